//! What is remembered of recoveries, for people and campaigns.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::escalation::Tier;
use super::events::{Event, Kind};
use super::histogram::Histogram;

/// Why an engine was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Death,
        Self::Hang,
        Self::Stuck,
        Self::Wedged,
        Self::Reset,
        Self::Fault,
        Self::Misbehaviour,
        Self::Upgrade,
        Self::Interface,
    ];

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
    deaths: BTreeMap<Cause, u64>,
    takeover: Histogram,
    outage: Histogram,
}

impl Recoveries {
    /// The engine is to be killed for this, which was noticed then. The first reason counts.
    pub fn suspect(&mut self, cause: Cause, at_ns: u64) {
        self.suspected.get_or_insert((cause, at_ns));
    }

    /// It is dead since then, and will be replaced so.
    pub fn died(&mut self, at_ns: u64, last_beat_ns: Option<u64>, tier: Tier) {
        let (cause, detected_at_ns) = self.suspected.take().unwrap_or((Cause::Death, at_ns));
        *self.deaths.entry(cause).or_default() += 1;
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

    /// The next one serves since then. Says what there is to tell.
    pub fn ready(&mut self, adopted_in_ns: u64, at_ns: u64) -> Event {
        let Some(last) = self.last.as_mut().filter(|last| last.ready_at_ns.is_none()) else {
            return Event::new(Kind::EngineReady, "engine ready");
        };
        last.ready_at_ns = Some(at_ns);
        last.adopted_in_ns = Some(adopted_in_ns);
        self.takeovers += 1;
        let takeover_ns = at_ns.saturating_sub(last.detected_at_ns);
        self.takeover.observe(takeover_ns);
        let outage_ns = (last.last_beat_ns).map(|beat| at_ns.saturating_sub(beat));
        self.outage.observe(outage_ns.unwrap_or(takeover_ns));
        let text = "engine recovered: another serves";
        Event::new(Kind::EngineRecovered, text)
            .field("cause", last.cause.name())
            .field("tier", last.tier.name())
            .field("takeover_ns", takeover_ns)
            .field("outage_ns", outage_ns)
    }

    /// Why the engine that just died did.
    pub fn cause(&self) -> Cause {
        self.last.map_or(Cause::Death, |last| last.cause)
    }

    /// For `portolan counters`: deaths by cause, and how long it took from a death's being noticed, and from the last sign of life before it,
    /// until another engine served.
    pub fn statistics(&self) -> Value {
        let deaths = Cause::ALL.iter().map(|cause| {
            let count = self.deaths.get(cause).copied().unwrap_or(0);
            (cause.name().to_owned(), count.into())
        });
        json!({
            "deaths": deaths.collect::<serde_json::Map<_, _>>(),
            "takeovers": self.takeovers,
            "takeover": self.takeover.document(),
            "outage": self.outage.document(),
        })
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
