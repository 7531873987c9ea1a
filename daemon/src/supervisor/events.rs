//! What happened on this node, remembered for people: `portolan events`, and a log record for each.
//!
//! Problem: applications and other nodes cause many of these events, as often as they like. What they cause must cost a bounded amount
//! of memory and must not push out what an administrator looks for.
//!
//! Idea: each [`Kind`] keeps its newest [`KEPT`] events and no more; a kind that floods forgets only its own. Numbers rise by one from event to
//! event, so whoever follows sees what it missed.
//!
//! To report something: `self.events.record(Event::new(Kind::PortClosed, "…").port(9).field("uid", 1000))`. A kind that is new gets a line in
//! the table below, with its severity; its name is an interface.
//!
//! Rejected: one ring for all, which an application that opens and closes ports empties in a second; a file, which is the journal's
//! business.

use std::collections::{BTreeMap, VecDeque};
use std::time::SystemTime;

use portolan_abi::control::Response;
use serde_json::{Map, Value, json};

use super::Supervisor;
use super::clients::Pending;

/// Events of a kind that are kept.
pub const KEPT: usize = 128;
/// Events in one answer; who wants more asks again.
pub const PER_ANSWER: usize = 256;
/// Characters of an event's text, and of a field that is text.
const TEXT: usize = 400;
/// Fields of an event.
const FIELDS: usize = 16;

/// How much an administrator wants to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Info,
    /// Portolan has dealt with it, or something outside is out of order.
    Warning,
    /// Somebody has to do something.
    Error,
}

impl Severity {
    /// For people and scripts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

macro_rules! kinds {
    ($($(#[doc = $help:literal])+ $kind:ident = $name:literal, $severity:ident;)+) => {
        /// What kind of thing happened. Names are an interface: add, never rename.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Kind { $($(#[doc = $help])+ $kind,)+ }

        impl Kind {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$kind),+];

            /// For people and scripts.
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)+ }
            }

            /// In one sentence.
            pub fn help(self) -> &'static str {
                match self { $(Self::$kind => concat!($($help),+).trim_ascii(),)+ }
            }

            /// How much an administrator wants to know it.
            pub fn severity(self) -> Severity {
                match self { $(Self::$kind => Severity::$severity,)+ }
            }
        }
    };
}

kinds! {
    /// The supervisor serves, anew or after a restart of its own.
    NodeUp = "node_up", Info;
    /// The supervisor was told to stop.
    NodeStopping = "node_stopping", Info;
    /// An engine died or was killed; what follows says who serves now.
    EngineDied = "engine_died", Warning;
    /// An engine serves: the first of its queue, or after a predecessor left in good order.
    EngineReady = "engine_ready", Info;
    /// An engine serves in the place of one that died, with the times it took.
    EngineRecovered = "engine_recovered", Warning;
    /// An engine keeps dying, so its next start waits.
    EngineDegraded = "engine_degraded", Error;
    /// An engine was killed and does not die: it is stuck in the kernel.
    EngineStuck = "engine_stuck", Error;
    /// A standby is ready to take over.
    StandbyReady = "standby_ready", Info;
    /// A queue was given another socket.
    QueueReset = "queue_reset", Warning;
    /// An application has opened a port.
    PortOpened = "port_opened", Info;
    /// A port was closed: its application closed it or ended.
    PortClosed = "port_closed", Info;
    /// A port was closed because its application broke the rules.
    PortFailed = "port_failed", Warning;
    /// A connection or a port was refused to an application.
    AttachRefused = "attach_refused", Warning;
    /// A peer is there: messages flow.
    PeerUp = "peer_up", Info;
    /// A peer has fallen silent; sends to it end.
    PeerUnreachable = "peer_unreachable", Warning;
    /// A peer came back as another: with a new incarnation, having forgotten everything.
    PeerRestarted = "peer_restarted", Warning;
    /// A peer's engine was replaced; nothing was lost.
    PeerTakeover = "peer_takeover", Info;
    /// A peer cannot be talked to: another cluster, version or policy.
    PeerIncompatible = "peer_incompatible", Error;
    /// The interface went up, down, away or lost our program.
    InterfaceChanged = "interface_changed", Warning;
    /// The configuration was read again.
    ConfigReloaded = "config_reloaded", Info;
    /// The configuration was read again and refused.
    ConfigRefused = "config_refused", Error;
    /// A helper process of the daemon (service, metrics) died and is started again.
    HelperDied = "helper_died", Warning;
    /// The daemon is replaced by another build, or was not.
    Upgrade = "upgrade", Info;
}

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Event {
    kind: Kind,
    severity: Severity,
    text: String,
    engine: Option<u8>,
    port: Option<u16>,
    peer: Option<u16>,
    fields: Map<String, Value>,
}

impl Event {
    /// Of this kind; `text` is a sentence for people, without a stop at its end.
    pub fn new(kind: Kind, text: impl AsRef<str>) -> Self {
        Self {
            kind,
            severity: kind.severity(),
            text: printable(text.as_ref()),
            engine: None,
            port: None,
            peer: None,
            fields: Map::new(),
        }
    }

    /// Another severity than is usual for its kind.
    pub fn severity(mut self, severity: Severity) -> Self {
        self.severity = severity;
        self
    }

    /// It is about this engine.
    pub fn engine(mut self, queue: u8) -> Self {
        self.engine = Some(queue);
        self
    }

    /// It is about this port.
    pub fn port(mut self, port: u16) -> Self {
        self.port = Some(port);
        self
    }

    /// It is about this node.
    pub fn peer(mut self, node: u16) -> Self {
        self.peer = Some(node);
        self
    }

    /// Something else to know: numbers in the unit its name ends with, or a short text.
    pub fn field(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        if self.fields.len() < FIELDS {
            let value = match value.into() {
                Value::String(text) => printable(&text).into(),
                other => other,
            };
            self.fields.insert(name.to_owned(), value);
        }
        self
    }

    /// Its kind, for people and scripts.
    pub fn kind_name(&self) -> &'static str {
        self.kind.name()
    }

    fn log(&self) {
        let kind = self.kind.name();
        let (engine, port, peer) = (self.engine, self.port, self.peer);
        let fields = (!self.fields.is_empty()).then(|| listed(&self.fields));
        let text = &self.text;
        match self.severity {
            Severity::Info => tracing::info!(kind, engine, port, peer, fields, "{text}"),
            Severity::Warning => tracing::warn!(kind, engine, port, peer, fields, "{text}"),
            Severity::Error => tracing::error!(kind, engine, port, peer, fields, "{text}"),
        }
    }
}

/// One line, not too long, whatever applications and peers call themselves.
fn printable(text: &str) -> String {
    let plain = text.chars().filter(|c| !c.is_control());
    plain.take(TEXT).collect()
}

/// `name=value …`
fn listed(fields: &Map<String, Value>) -> String {
    let each = fields.iter().map(|(name, value)| match value {
        Value::String(text) => format!("{name}={text:?}"),
        other => format!("{name}={other}"),
    });
    each.collect::<Vec<_>>().join(" ")
}

#[derive(Debug)]
struct Recorded {
    at: SystemTime,
    event: Event,
}

/// The events of this supervisor's life.
#[derive(Debug)]
pub struct Events {
    /// Tells this supervisor's numbers from its predecessor's.
    run: String,
    kept: BTreeMap<u64, Recorded>,
    numbers: BTreeMap<Kind, VecDeque<u64>>,
    recorded: BTreeMap<Kind, u64>,
    next: u64,
    heard: u64,
}

impl Default for Events {
    fn default() -> Self {
        use std::hash::{BuildHasher, Hasher};
        let random = std::collections::hash_map::RandomState::new();
        Self {
            run: format!("{:016x}", random.build_hasher().finish()),
            kept: BTreeMap::new(),
            numbers: BTreeMap::new(),
            recorded: BTreeMap::new(),
            next: 1,
            heard: 1,
        }
    }
}

impl Events {
    /// It happened now. Remembered, and logged.
    pub fn record(&mut self, event: Event) {
        event.log();
        let kind = event.kind;
        let number = self.next;
        self.next += 1;
        *self.recorded.entry(kind).or_default() += 1;
        let of_kind = self.numbers.entry(kind).or_default();
        of_kind.push_back(number);
        if of_kind.len() > KEPT
            && let Some(oldest) = of_kind.pop_front()
        {
            self.kept.remove(&oldest);
        }
        let at = SystemTime::now();
        self.kept.insert(number, Recorded { at, event });
    }

    /// How many of each kind there were.
    pub fn recorded(&self) -> impl Iterator<Item = (Kind, u64)> + '_ {
        let all = Kind::ALL.iter();
        all.map(|kind| (*kind, self.recorded.get(kind).copied().unwrap_or(0)))
    }

    /// Has something happened since this was last asked?
    pub fn news(&mut self) -> bool {
        std::mem::replace(&mut self.heard, self.next) != self.next
    }

    /// Is there anything that this asker has not seen?
    pub fn has_after(&self, run: Option<&str>, after: u64) -> bool {
        run.is_some_and(|run| run != self.run) || after.saturating_add(1) < self.next
    }

    /// What happened after event number `after` of that run; of another run, everything. At most [`PER_ANSWER`] events, the oldest first;
    /// `after` in the document is what to ask next, `more` whether there is more at once.
    pub fn document(&self, run: Option<&str>, after: u64) -> Value {
        let other = run.is_some_and(|run| run != self.run);
        let from = if other { 1 } else { after.saturating_add(1) };
        let mut matching = self.kept.range(from..);
        let events: Vec<Value> = (matching.by_ref().take(PER_ANSWER))
            .map(|(number, recorded)| row(*number, recorded))
            .collect();
        let more = matching.next().is_some();
        let last = events.last().and_then(|event| event["number"].as_u64());
        let next = if more { last } else { None };
        json!({
            "run": self.run,
            "after": next.unwrap_or(self.next - 1),
            "more": more,
            "events": events,
        })
    }
}

fn row(number: u64, recorded: &Recorded) -> Value {
    let event = &recorded.event;
    json!({
        "number": number,
        "time": humantime::format_rfc3339_micros(recorded.at).to_string(),
        "severity": event.severity.name(),
        "kind": event.kind.name(),
        "text": event.text,
        "engine": event.engine,
        "port": event.port,
        "peer": event.peer,
        "fields": event.fields,
    })
}

impl Supervisor {
    /// A client asks what happened.
    pub(super) fn request_events(&mut self, id: u64, run: Option<String>, after: u64, wait: bool) {
        if wait && !self.events.has_after(run.as_deref(), after) {
            self.wait_for(id, Pending::Events(run, after));
            return;
        }
        let document = self.events.document(run.as_deref(), after);
        self.finish(id, Response::Document { document }, Vec::new());
    }

    /// Something has happened: those who wait for that are told.
    pub(super) fn tell_followers(&mut self) {
        let waiting = (self.clients).waiting(|pending| matches!(pending, Pending::Events(..)));
        for id in waiting {
            let Some(client) = self.clients.get(id) else {
                continue;
            };
            if let Some(Pending::Events(run, after)) = client.pending.clone() {
                self.request_events(id, run, after, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(document: &Value) -> Vec<u64> {
        let events = document["events"].as_array().unwrap();
        events
            .iter()
            .map(|e| e["number"].as_u64().unwrap())
            .collect()
    }

    // An application floods us with refused requests after an engine's death. Expect: bounded, and the death is still there.
    #[test]
    fn a_flood_pushes_out_only_its_own_kind() {
        let mut events = Events::default();
        events.record(Event::new(Kind::EngineDied, "engine died").engine(0));
        for n in 0..10_000_u32 {
            events.record(Event::new(Kind::AttachRefused, "no").field("uid", n));
        }
        assert_eq!(events.kept.len(), KEPT + 1);
        let document = events.document(None, 0);
        assert_eq!(document["events"][0]["kind"], "engine_died");
        assert_eq!(document["events"][KEPT]["fields"]["uid"], 9999);
        assert_eq!(document["more"], false);
        let counted: BTreeMap<_, _> = events.recorded().collect();
        assert_eq!(counted[&Kind::AttachRefused], 10_000);
        assert_eq!(counted[&Kind::PeerUp], 0);
    }

    // Everything is asked for piece by piece, then what is new. Expect: each event once, in order.
    #[test]
    fn whoever_follows_sees_each_event_once() {
        let mut events = Events::default();
        for kind in Kind::ALL.iter().cycle().take(Kind::ALL.len() * 20) {
            events.record(Event::new(*kind, kind.help()));
        }
        let (mut seen, mut after) = (Vec::new(), 0);
        loop {
            let document = events.document(None, after);
            after = document["after"].as_u64().unwrap();
            assert!(numbers(&document).len() <= PER_ANSWER);
            seen.extend(numbers(&document));
            if document["more"] == false {
                break;
            }
        }
        let all: Vec<u64> = (1..=Kind::ALL.len() as u64 * 20).collect();
        assert_eq!(seen, all);
        let run = events.run.clone();
        assert!(!events.has_after(Some(&run), after));
        events.record(Event::new(Kind::PeerUp, "peer up").peer(2));
        assert!(events.has_after(Some(&run), after));
        assert_eq!(numbers(&events.document(Some(&run), after)), [after + 1]);
        // A successor's numbers begin anew, so its follower does.
        assert!(events.has_after(Some("another"), u64::MAX));
        assert_eq!(numbers(&events.document(Some("another"), u64::MAX))[0], 1);
        assert_eq!(numbers(&events.document(Some(&run), u64::MAX)), [0_u64; 0]);
    }

    // Names that would break lines or fill memory. Expect: one line, of bounded length.
    #[test]
    fn what_strangers_call_themselves_is_made_harmless() {
        let long = "x\n\u{1b}[2J".repeat(1000);
        let mut event = Event::new(Kind::PeerUp, &long).field("name", long.clone());
        for _ in 0..100 {
            event = event.field("other", 1);
        }
        assert_eq!(event.text.chars().count(), TEXT);
        assert!(!event.text.contains('\n') && !event.text.contains('\u{1b}'));
        assert!(event.fields.len() <= FIELDS);
        assert!(event.fields["name"].as_str().unwrap().len() <= TEXT);
    }

    #[test]
    fn every_kind_has_a_name_of_its_own_and_help() {
        let mut names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Kind::ALL.len());
        assert!(Kind::ALL.iter().all(|kind| kind.help().ends_with('.')));
    }

    #[test]
    fn news_are_told_once() {
        let mut events = Events::default();
        assert!(!events.news());
        events.record(Event::new(Kind::NodeUp, "node up"));
        assert!(events.news());
        assert!(!events.news());
    }
}
