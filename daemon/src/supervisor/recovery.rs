//! What is remembered of recoveries, for people and campaigns.

use serde_json::{Value, json};

use super::escalation::Tier;

/// Why an engine was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It died by itself.
    Death,
    /// It ran and did not come round.
    Hang,
    /// It was stopped or blocked and did not come round.
    Stuck,
    /// Its queue stood still.
    Wedged,
    /// Somebody asked for another socket.
    Reset,
    /// Somebody asked for its death.
    Fault,
    /// What it said or did made no sense.
    Misbehaviour,
    /// A newer build takes over.
    Upgrade,
    /// Its interface is another one, or has another MTU.
    Interface,
}

impl Cause {
    /// For people and scripts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Death => "death",
            Self::Hang => "hang",
            Self::Stuck => "stuck",
            Self::Wedged => "wedged",
            Self::Reset => "reset",
            Self::Fault => "fault",
            Self::Misbehaviour => "misbehaviour",
            Self::Upgrade => "upgrade",
            Self::Interface => "interface",
        }
    }
}

/// One recovery. Times are CLOCK_MONOTONIC nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Recovery {
    number: u64,
    cause: Cause,
    tier: Tier,
    last_beat_ns: Option<u64>,
    detected_at_ns: u64,
    fenced_at_ns: u64,
    ready_at_ns: Option<u64>,
    adopted_in_ns: Option<u64>,
}

/// The recoveries of one queue.
#[derive(Debug, Default)]
pub struct Recoveries {
    suspected: Option<(Cause, u64)>,
    last: Option<Recovery>,
    /// Engines that took over from one that had died.
    takeovers: u64,
}

impl Recoveries {
    /// The engine is to be killed for this, which was noticed then. The first reason counts.
    pub fn suspect(&mut self, cause: Cause, at_ns: u64) {
        self.suspected.get_or_insert((cause, at_ns));
    }

    /// It is dead since then, and will be replaced so.
    pub fn died(&mut self, at_ns: u64, last_beat_ns: Option<u64>, tier: Tier) {
        let (cause, detected_at_ns) = self.suspected.take().unwrap_or((Cause::Death, at_ns));
        self.last = Some(Recovery {
            number: self.last.map_or(0, |last| last.number) + 1,
            cause,
            tier,
            last_beat_ns,
            detected_at_ns,
            fenced_at_ns: at_ns,
            ready_at_ns: None,
            adopted_in_ns: None,
        });
    }

    /// The next one serves since then.
    pub fn ready(&mut self, adopted_in_ns: u64, at_ns: u64) {
        if let Some(last) = self.last.as_mut().filter(|last| last.ready_at_ns.is_none()) {
            last.ready_at_ns = Some(at_ns);
            last.adopted_in_ns = Some(adopted_in_ns);
            self.takeovers += 1;
        }
    }

    /// Engines that took over from one that had died.
    pub fn takeovers(&self) -> u64 {
        self.takeovers
    }

    /// The tier of the last recovery.
    pub fn tier(&self) -> Tier {
        self.last.map_or(Tier::Adopt, |last| last.tier)
    }

    /// The last recovery, for `portolan status`.
    pub fn document(&self) -> Value {
        self.last.map_or(Value::Null, |last| {
            json!({
                "number": last.number,
                "cause": last.cause.name(),
                "tier": last.tier.name(),
                "last_beat_ns": last.last_beat_ns,
                "detected_at_ns": last.detected_at_ns,
                "fenced_at_ns": last.fenced_at_ns,
                "ready_at_ns": last.ready_at_ns,
                "adopted_in_ns": last.adopted_in_ns,
            })
        })
    }
}
