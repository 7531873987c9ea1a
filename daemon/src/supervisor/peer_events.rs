//! Events about peers: up, unreachable, restarted, taken over, incompatible.
//!
//! Problem: engines know their peers, and asking costs them time they have for messages; they do not tell by themselves either.
//!
//! Idea: whatever happens to a peer moves one of a few counters, which lie in the ledger and cost nothing to read. Once per second they are
//! looked at; only when one has moved, or when an engine was in the middle of something, are engines asked as `portolan peers` asks them, and
//! what they say is compared with what they said last.
//!
//! What happens and is undone within a second may go unnoticed; the counters still tell.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::events::{Event, Kind};
use super::poll::Timer;
use crate::engine_link::PeerReport;

/// From one look to the next.
const EVERY: Duration = Duration::from_secs(1);
/// What moves when something happens to a peer.
const TELLING: [&str; 7] = [
    UNREACHABLE,
    "transport_hellos_sent",
    "transport_resets_received",
    "transport_peer_restarts",
    "transport_peer_takeovers",
    "transport_peers_forgotten",
    "transport_peers_incompatible",
];
const UNREACHABLE: &str = "transport_peers_unreachable";

/// What was said of a node last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    up: bool,
    /// Asked for, without an answer yet.
    trying: bool,
    incarnation: u64,
    misfit: Option<String>,
    /// Of each of its engines.
    epochs: BTreeMap<u8, u32>,
}

/// What is known of all of them.
#[derive(Debug, Default)]
pub struct PeersSeen {
    nodes: BTreeMap<u16, Known>,
    /// Of each engine: what it had counted when it was last looked at.
    counted: Vec<[u64; TELLING.len()]>,
    /// Peers were given up as unreachable since the last report.
    given_up: bool,
    /// Something was under way in the last report.
    unsettled: bool,
}

impl PeersSeen {
    /// Whether anything has moved since the last look.
    fn moved(&mut self, now: Vec<[u64; TELLING.len()]>) -> bool {
        let before = std::mem::replace(&mut self.counted, now);
        let none = [0; TELLING.len()];
        for (index, counted) in self.counted.iter().enumerate() {
            self.given_up |= counted[0] != before.get(index).unwrap_or(&none)[0];
        }
        before != self.counted
    }

    /// Compares what engines say now with what they said before.
    fn judge<'r>(&mut self, reports: impl Iterator<Item = &'r PeerReport>) -> Vec<Event> {
        let mut now: BTreeMap<u16, Known> = BTreeMap::new();
        for report in reports {
            let known = now.entry(report.node).or_default();
            known.up |= report.state == "up";
            known.trying |= report.state == "connecting";
            if report.incarnation != 0 {
                known.incarnation = report.incarnation;
            }
            known.misfit = known.misfit.take().or_else(|| report.misfit.clone());
            known.epochs.insert(report.queue, report.engine_epoch);
        }
        let given_up = std::mem::take(&mut self.given_up);
        self.unsettled = now.values().any(|known| known.trying);
        let mut events = Vec::new();
        for (node, known) in &mut now {
            let before = self.nodes.remove(node).unwrap_or_default();
            events.extend(compare(*node, &before, known, given_up));
            if known.incarnation == 0 {
                // Forgotten by the engine, not by us: it may come back as another.
                known.incarnation = before.incarnation;
            }
        }
        // No longer spoken of: forgotten, or not configured any more.
        self.nodes.retain(|node, _| !now.contains_key(node));
        for known in self.nodes.values_mut() {
            (known.up, known.trying) = (false, false);
        }
        self.nodes.append(&mut now);
        events
    }
}

fn compare(node: u16, before: &Known, now: &Known, given_up: bool) -> Option<Event> {
    if now.misfit.is_some() && now.misfit != before.misfit {
        let misfit = now.misfit.clone().unwrap_or_default();
        let text = "peer cannot be talked to: its configuration does not fit ours";
        return Some(
            Event::new(Kind::PeerIncompatible, text)
                .peer(node)
                .field("misfit", misfit),
        );
    }
    let another =
        before.incarnation != 0 && now.incarnation != 0 && before.incarnation != now.incarnation;
    if another {
        let text = "peer has restarted: it knows nothing of what was before";
        let incarnation = format!("{:016x}", now.incarnation);
        let event = Event::new(Kind::PeerRestarted, text).peer(node);
        return Some(event.field("incarnation", incarnation));
    }
    if now.up && !before.up {
        return Some(Event::new(Kind::PeerUp, "peer up").peer(node));
    }
    if !now.up && !now.trying && (before.up || before.trying) && given_up {
        return Some(Event::new(Kind::PeerUnreachable, "peer unreachable").peer(node));
    }
    let replaced = now.epochs.iter().find(|(queue, epoch)| {
        let was = before.epochs.get(queue).copied().unwrap_or(0);
        was != 0 && **epoch != 0 && was != **epoch
    });
    let (queue, epoch) = replaced.filter(|_| now.up)?;
    let event = Event::new(Kind::PeerTakeover, "peer's engine was replaced").peer(node);
    Some(event.field("queue", *queue).field("epoch", *epoch))
}

impl Supervisor {
    /// Looks at what engines have counted, and asks them if that says something.
    pub(super) fn look_at_peers(&mut self, now: Instant) {
        self.poll.set_timer(now + EVERY, Timer::PeerEvents);
        let names = crate::engine::counters::names();
        let places = TELLING.map(|name| names.iter().position(|(known, _)| known == name));
        let counted = self.engines.iter().map(|engine| {
            let ledger = engine.memory.ledger.ledger();
            let words = &ledger.header().counters;
            places.map(|place| {
                let word = place.and_then(|place| words.get(place));
                word.map_or(0, |word| word.load(Ordering::Relaxed))
            })
        });
        let counted = counted.collect();
        let moved = self.peers_seen.moved(counted);
        if moved || self.peers_seen.unsettled {
            self.begin_peers_round();
        }
    }

    /// A round of questions has ended with these reports.
    pub(super) fn peers_were_seen(&mut self) {
        let running = self.engines.iter().filter(|engine| engine.is_running());
        let running = running.count();
        let reports = std::mem::take(&mut self.peers_round.reports);
        let answered: BTreeSet<usize> = reports.iter().map(|(engine, _)| *engine).collect();
        // Who did not answer would seem to have lost its peers.
        if !answered.is_empty() && answered.len() == running {
            let own = self.config.node;
            let said = reports.iter().map(|(_, report)| report);
            let said = said.filter(|report| report.node != own);
            for event in self.peers_seen.judge(said) {
                self.events.record(event);
            }
        }
        self.peers_round.reports = reports;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(state: &str, incarnation: u64, epoch: u32) -> PeerReport {
        PeerReport {
            node: 2,
            queue: 0,
            name: String::new(),
            state: state.to_owned(),
            rtt_ns: 0,
            outstanding: 0,
            incarnation,
            engine_epoch: epoch,
            max_frame: 0,
            misfit: (state == "incompatible").then(|| "cluster".to_owned()),
        }
    }

    /// The kinds of events after each of these reports; `!` before a state: a peer was given up since.
    fn told(script: &[(&str, u64, u32)]) -> Vec<&'static str> {
        let mut seen = PeersSeen::default();
        let mut all = Vec::new();
        for (state, incarnation, epoch) in script {
            seen.given_up = state.starts_with('!');
            let report = report(state.trim_start_matches('!'), *incarnation, *epoch);
            let events = seen.judge(std::iter::once(&report));
            all.extend(events.iter().map(Event::kind_name));
        }
        all
    }

    #[test]
    fn each_change_is_told_once() {
        assert_eq!(
            told(&[
                ("idle", 0, 0),
                ("connecting", 0, 0),
                ("up", 7, 1),
                ("up", 7, 1)
            ]),
            ["peer_up"]
        );
        assert_eq!(
            told(&[("up", 7, 1), ("up", 7, 2), ("up", 7, 2)]),
            ["peer_up", "peer_takeover"]
        );
        assert_eq!(
            told(&[("up", 7, 1), ("!idle", 7, 1), ("idle", 7, 1)]),
            ["peer_up", "peer_unreachable"]
        );
        assert_eq!(
            told(&[("connecting", 0, 0), ("!idle", 0, 0)]),
            ["peer_unreachable"]
        );
        // It has rested for long and was forgotten: no news, nor its return as itself.
        assert_eq!(told(&[("up", 7, 1), ("idle", 0, 0)]), ["peer_up"]);
        // Rebooted while it was unreachable.
        assert_eq!(
            told(&[
                ("up", 7, 1),
                ("!idle", 0, 0),
                ("connecting", 0, 0),
                ("up", 8, 1)
            ]),
            ["peer_up", "peer_unreachable", "peer_restarted"]
        );
        assert_eq!(
            told(&[("incompatible", 0, 0), ("incompatible", 0, 0)]),
            ["peer_incompatible"]
        );
    }

    #[test]
    fn a_peer_that_nobody_speaks_of_is_up_again_later() {
        let mut seen = PeersSeen::default();
        let up = report("up", 7, 1);
        let kinds = |events: Vec<Event>| events.iter().map(Event::kind_name).collect::<Vec<_>>();
        assert_eq!(kinds(seen.judge(std::iter::once(&up))), ["peer_up"]);
        assert_eq!(kinds(seen.judge(std::iter::empty())), [""; 0]);
        assert_eq!(kinds(seen.judge(std::iter::once(&up))), ["peer_up"]);
    }

    #[test]
    fn what_tells_of_peers_is_counted() {
        let names = crate::engine::counters::names();
        for telling in TELLING {
            assert!(names.iter().any(|(name, _)| name == telling), "{telling}");
        }
    }
}
