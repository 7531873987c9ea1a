//! What a flipped bit did, in the words of FTGM's Table 1.
//!
//! | category | here |
//! |---|---|
//! | Local Interface Hung | the damaged engine was replaced: it died, looped or blocked |
//! | Messages Corrupted | a message was changed, lost, doubled or came out of order, a send failed, or a port fell silent: the paper counts dropped messages here |
//! | Remote Interface Hung | the other node's engine had to be replaced |
//! | MCP Restart | the damaged engine noticed by itself that something was wrong, and left |
//! | Host Computer Crash | the supervisor died |
//! | Other Errors | a port was closed, the library was told nonsense |
//! | No Impact | nothing |
//!
//! One flip may do several of these things; it counts as the worst, in the order of [`Category::ALL`].

use serde_json::{Map, Value, json};

/// The categories, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Category {
    HostCrash,
    LocalHung,
    RemoteHung,
    Restart,
    Corrupted,
    Other,
    NoImpact,
}

impl Category {
    pub const ALL: [Self; 7] = [
        Self::HostCrash,
        Self::LocalHung,
        Self::RemoteHung,
        Self::Restart,
        Self::Corrupted,
        Self::Other,
        Self::NoImpact,
    ];

    /// As the paper calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::LocalHung => "Local Interface Hung",
            Self::Corrupted => "Messages Corrupted",
            Self::RemoteHung => "Remote Interface Hung",
            Self::Restart => "MCP Restart",
            Self::HostCrash => "Host Computer Crash",
            Self::Other => "Other Errors",
            Self::NoImpact => "No Impact",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::LocalHung => "local_hung",
            Self::Corrupted => "messages_corrupted",
            Self::RemoteHung => "remote_hung",
            Self::Restart => "restart",
            Self::HostCrash => "host_crash",
            Self::Other => "other",
            Self::NoImpact => "no_impact",
        }
    }
}

/// What was seen after one flip.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The supervisor does not answer.
    pub host_crash: bool,
    /// Why the damaged engine was replaced, if it was.
    pub cause: Option<String>,
    /// It said itself that it could not go on.
    pub gave_up: bool,
    /// Some port received nothing more, while the engine went round as ever: what is not sent or not taken is not missed by a watchdog.
    pub silent: bool,
    /// Nothing went on even with a sound engine.
    pub down: bool,
    /// The other engine was replaced.
    pub remote: bool,
    /// Messages changed, lost, doubled, out of order; sends failed.
    pub corrupted: bool,
    /// A port was closed, or told nonsense.
    pub other: bool,
}

impl Seen {
    /// All that applies, the worst first.
    pub fn categories(&self) -> Vec<Category> {
        let gave_up = self.cause.is_some() && self.gave_up;
        let hung = self.cause.is_some() && !gave_up;
        let found = [
            (self.host_crash, Category::HostCrash),
            (hung, Category::LocalHung),
            (self.remote, Category::RemoteHung),
            (gave_up, Category::Restart),
            (self.corrupted || self.silent, Category::Corrupted),
            (self.other, Category::Other),
        ];
        let found = found.into_iter().filter(|(seen, _)| *seen);
        let mut all: Vec<Category> = found.map(|(_, category)| category).collect();
        if all.is_empty() {
            all.push(Category::NoImpact);
        }
        all
    }
}

/// The flips of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub flips: u64,
    counts: [u64; 7],
    /// Engines that died, looped or blocked, and those that left by themselves.
    pub replaced: u64,
    /// Of these, those after which everything went on.
    pub recovered: u64,
    /// Ended by a signal; found looping, stuck or wedged; silent at some port, and going round as ever.
    pub died: u64,
    pub hung: u64,
    pub silent: u64,
    /// Damage that outlived its engine: nothing went on with a sound one.
    pub down: u64,
    /// Engines that hung or died and corrupted messages before.
    pub hung_and_corrupted: u64,
    /// Streams with messages that were harmed, of which no application was told. Only with integrity.
    pub unreported: u64,
}

impl Table {
    pub fn add(&mut self, seen: &Seen) {
        self.flips += 1;
        let categories = seen.categories();
        if let Some(worst) = categories.first() {
            let position = Category::ALL.iter().position(|c| c == worst);
            if let Some(count) = position.and_then(|p| self.counts.get_mut(p)) {
                *count += 1;
            }
        }
        let hung = categories.contains(&Category::LocalHung);
        self.hung_and_corrupted += u64::from(hung && seen.corrupted);
        self.replaced += u64::from(hung || categories.contains(&Category::Restart));
        self.silent += u64::from(seen.silent);
        self.down += u64::from(seen.down);
        match seen.cause.as_deref() {
            Some("death" | "unknown") if !seen.gave_up => self.died += 1,
            Some("hang" | "stuck" | "wedged") => self.hung += 1,
            _ => {}
        }
    }

    pub fn count(&self, category: Category) -> u64 {
        let position = Category::ALL.iter().position(|c| *c == category);
        position
            .and_then(|p| self.counts.get(p))
            .copied()
            .unwrap_or(0)
    }

    /// In percent of the flips.
    pub fn percent(&self, category: Category) -> f64 {
        100.0 * self.count(category) as f64 / self.flips.max(1) as f64
    }

    pub fn json(&self) -> Value {
        let counts = Category::ALL.map(|c| (c.key().to_owned(), Value::from(self.count(c))));
        json!({
            "flips": self.flips,
            "categories": Map::from_iter(counts),
            "engines_lost": self.replaced,
            "engines_recovered": self.recovered,
            "died": self.died,
            "hung": self.hung,
            "silent": self.silent,
            "down": self.down,
            "hung_and_corrupted": self.hung_and_corrupted,
            "unreported": self.unreported,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A flip that does two things. Expect: it counts once, as the worse, and the other is remembered.
    #[test]
    fn a_flip_counts_once() {
        let mut table = Table::default();
        table.add(&Seen::default());
        table.add(&Seen {
            cause: Some("hang".into()),
            corrupted: true,
            ..Seen::default()
        });
        table.add(&Seen {
            cause: Some("death".into()),
            gave_up: true,
            ..Seen::default()
        });
        table.add(&Seen {
            silent: true,
            ..Seen::default()
        });
        assert_eq!(table.count(Category::NoImpact), 1);
        assert_eq!(table.count(Category::LocalHung), 1);
        assert_eq!(table.count(Category::Restart), 1);
        assert_eq!(table.count(Category::Corrupted), 1);
        assert_eq!((table.hung_and_corrupted, table.replaced), (1, 2));
        let sum: u64 = Category::ALL.iter().map(|c| table.count(*c)).sum();
        assert_eq!(sum, table.flips);
    }
}
