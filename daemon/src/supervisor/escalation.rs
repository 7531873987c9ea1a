//! How an engine that died is replaced, by evidence.
//!
//! | tier | what is new | what is lost |
//! |---|---|---|
//! | adopt | the process | nothing |
//! | reset | and the AF_XDP socket | frames in its rings |
//! | rebuild | and UMEM, XDP program and map | frames of the whole node |
//!
//! A death is *early* if the engine had not served for a while before: nothing says then that its successor will do better with the
//! same things. Early deaths in a row lead from tier to tier, and when the last one did not help either, to waits that grow: the queue is
//! *degraded*, and says so. A death after a healthy life starts over, at once and at the first tier, however many there were before: an engine
//! that is killed ten times a second by somebody who wants to see it recover is in order.

use std::time::Duration;

/// What to replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The process.
    Adopt,
    /// The socket, too.
    Reset,
    /// Everything but the ledger.
    Rebuild,
}

impl Tier {
    /// For people and scripts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Adopt => "adopt",
            Self::Reset => "reset",
            Self::Rebuild => "rebuild",
        }
    }
}

/// When to go from one tier to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// An engine that served so long was healthy.
    pub healthy_after: Duration,
    /// Early deaths in a row answered by adoption.
    pub adoptions: u32,
    /// Then so many by a new socket.
    pub resets: u32,
    /// Then so many by rebuilding.
    pub rebuilds: u32,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            healthy_after: Duration::from_millis(100),
            adoptions: 4,
            resets: 3,
            rebuilds: 3,
        }
    }
}

/// The first wait of a degraded queue, and the longest.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The deaths of one queue's engines.
#[derive(Debug)]
pub struct Escalation {
    bounds: Bounds,
    early: u32,
    total: u64,
}

impl Escalation {
    /// Nobody has died yet.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            early: 0,
            total: 0,
        }
    }

    /// Deaths so far.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How long an engine serves until it is healthy.
    pub fn healthy_after(&self) -> Duration {
        self.bounds.healthy_after
    }

    /// An engine has served long enough.
    pub fn healthy(&mut self) {
        self.early = 0;
    }

    /// Would a death now be answered by adoption, at once?
    pub fn may_adopt(&self) -> bool {
        self.early < self.bounds.adoptions
    }

    /// A death, after serving for so long; says what to replace and how long to wait before.
    pub fn died(&mut self, served: Duration) -> (Tier, Duration) {
        self.total += 1;
        if served >= self.bounds.healthy_after {
            self.early = 0;
            return (Tier::Adopt, Duration::ZERO);
        }
        self.early = self.early.saturating_add(1);
        let bounds = &self.bounds;
        let mut left = self.early;
        for (tier, times) in [
            (Tier::Adopt, bounds.adoptions),
            (Tier::Reset, bounds.resets),
            (Tier::Rebuild, bounds.rebuilds),
        ] {
            if left <= times {
                return (tier, Duration::ZERO);
            }
            left -= times;
        }
        let doublings = (left - 1).min(16);
        (
            Tier::Rebuild,
            (FIRST_WAIT * 2u32.pow(doublings)).min(LONGEST_WAIT),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        healthy_after: Duration::from_millis(100),
        adoptions: 2,
        resets: 1,
        rebuilds: 1,
    };

    // Engines that die as soon as they are there. Expect: tier after tier, then waits that grow up to their bound.
    #[test]
    fn early_deaths_escalate_and_end_in_waits() {
        let mut escalation = Escalation::new(BOUNDS);
        let mut next = || escalation.died(Duration::from_millis(99));
        assert_eq!(next(), (Tier::Adopt, Duration::ZERO));
        assert_eq!(next(), (Tier::Adopt, Duration::ZERO));
        assert_eq!(next(), (Tier::Reset, Duration::ZERO));
        assert_eq!(next(), (Tier::Rebuild, Duration::ZERO));
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            assert_eq!(next(), (Tier::Rebuild, Duration::from_secs(seconds)));
        }
        assert_eq!(escalation.total(), 11);
    }

    // Deaths without number, each after a healthy life. Expect: the first tier, at once, every time; and so after early deaths.
    #[test]
    fn a_healthy_life_starts_over() {
        let mut escalation = Escalation::new(BOUNDS);
        for _ in 0..1000 {
            assert_eq!(
                escalation.died(BOUNDS.healthy_after),
                (Tier::Adopt, Duration::ZERO)
            );
        }
        for _ in 0..5 {
            escalation.died(Duration::ZERO);
        }
        assert!(!escalation.may_adopt());
        assert_eq!(escalation.died(BOUNDS.healthy_after).0, Tier::Adopt);
        // Said while it lives, it counts as well.
        escalation.died(Duration::ZERO);
        escalation.died(Duration::ZERO);
        assert!(!escalation.may_adopt());
        escalation.healthy();
        assert!(escalation.may_adopt());
        assert_eq!(escalation.died(Duration::ZERO).0, Tier::Adopt);
    }
}
