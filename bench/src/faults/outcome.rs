//! What one campaign showed.

use std::collections::BTreeMap;

use anyhow::Result;
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::books::Tally;
use super::flips::category::Table;
use super::gaps::Gaps;
use super::victim::Recovered;

/// The longest time that is told apart: a minute.
const LONGEST_NS: u64 = 60_000_000_000;
/// Notes kept.
const NOTES: usize = 24;

/// Times in nanoseconds, reported in microseconds.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

impl Times {
    pub fn new() -> Result<Self> {
        Ok(Self(Histogram::new_with_bounds(1, LONGEST_NS, 3)?))
    }

    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    pub fn add(&mut self, nanoseconds: &Histogram<u64>) {
        // Of the same bounds, or clipped to them.
        for value in nanoseconds.iter_recorded() {
            let count = value.count_since_last_iteration();
            self.0.saturating_record_n(value.value_iterated_to(), count);
        }
    }

    pub fn merge(&mut self, other: &Self) {
        self.add(&other.0);
    }

    pub fn samples(&self) -> u64 {
        self.0.len()
    }

    /// In microseconds.
    pub fn quantile(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1000.0
    }

    pub fn max(&self) -> f64 {
        self.0.max() as f64 / 1000.0
    }

    /// `null` if nothing was measured.
    pub fn json(&self) -> Value {
        if self.0.is_empty() {
            return Value::Null;
        }
        let whole = |us: f64| us.round() as u64;
        json!({
            "p50": whole(self.quantile(0.5)),
            "p99": whole(self.quantile(0.99)),
            "max": whole(self.max()),
            "samples": self.0.len(),
        })
    }

    /// The median for people.
    pub fn median_text(&self) -> String {
        match self.0.is_empty() {
            true => "-".to_owned(),
            false => text(self.quantile(0.5)),
        }
    }

    /// `p50 / p99 / max` for people.
    pub fn text(&self) -> String {
        if self.0.is_empty() {
            return "-".to_owned();
        }
        [self.quantile(0.5), self.quantile(0.99), self.max()]
            .map(text)
            .join(" / ")
    }
}

fn text(us: f64) -> String {
    match us {
        us if us < 10.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

/// What a campaign may find without anything being wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Every message is delivered once, in order, unchanged, and every send ends as delivered.
    Exact,
    /// The same, but sends may end otherwise as long as they say so.
    Definite,
    /// Engines are wrong and not dead: what they do to messages is reported where integrity was asked for; hangs and crashes are recovered.
    Reported,
}

/// What a campaign showed.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub kind: String,
    pub injected: u64,
    /// Engines lost while the fault was being prepared; not counted as injected.
    pub botched: u64,
    /// The daemon noticed, where it says so.
    pub detected: u64,
    /// Somebody else served, and every port received again.
    pub recovered: u64,
    /// Engines replaced without a fault of ours.
    pub false_alarms: u64,
    pub tally: Tally,
    pub promise: Promise,
    /// The campaign could not go on.
    pub broken: bool,
    /// On the node of each engine hurt, where that is what is measured.
    pub open_ports: Option<u64>,
    /// Of flipped bits.
    pub flips: Option<Table>,
    /// Injection to detection.
    pub detect: Times,
    /// Detection to the successor serving.
    pub takeover: Times,
    /// The successor serving to the end of the longest gap.
    pub resume: Times,
    /// What the successor says it took.
    pub adopt: Times,
    /// The longest gap between deliveries, less the median gap.
    pub outage: Times,
    /// The same, of faults where the steady stream begins, and of faults where it ends.
    pub outage_at: [Times; 2],
    /// The same from there until the next standby is ready.
    pub renewal: Times,
    /// The same from the fault until the next standby is ready: all there is of it.
    pub whole: Times,
    /// The same for spans without a fault: the machine's noise.
    pub noise: Times,
    /// Every gap, where that is what is compared.
    pub gaps: Option<Gaps>,
    /// The median gap between deliveries, in nanoseconds.
    pub median_gap_ns: u64,
    pub causes: BTreeMap<String, u64>,
    pub tiers: BTreeMap<String, u64>,
    pub notes: Vec<String>,
    pub took_s: f64,
    /// Facts of this kind of campaign alone.
    pub more: serde_json::Map<String, Value>,
}

impl Outcome {
    pub fn new(kind: &str) -> Result<Self> {
        Ok(Self {
            kind: kind.to_owned(),
            injected: 0,
            botched: 0,
            detected: 0,
            recovered: 0,
            false_alarms: 0,
            tally: Tally::default(),
            promise: Promise::Exact,
            broken: false,
            open_ports: None,
            flips: None,
            detect: Times::new()?,
            takeover: Times::new()?,
            resume: Times::new()?,
            adopt: Times::new()?,
            outage: Times::new()?,
            outage_at: [Times::new()?, Times::new()?],
            renewal: Times::new()?,
            whole: Times::new()?,
            noise: Times::new()?,
            gaps: None,
            median_gap_ns: 0,
            causes: BTreeMap::new(),
            tiers: BTreeMap::new(),
            notes: Vec::new(),
            took_s: 0.0,
            more: serde_json::Map::new(),
        })
    }

    /// Of a campaign that could not go on.
    pub fn broken(kind: &str, why: &anyhow::Error) -> Result<Self> {
        let mut outcome = Self::new(kind)?;
        outcome.broken = true;
        outcome.note(format!("{why:#}"));
        Ok(outcome)
    }

    pub fn note(&mut self, what: String) {
        if self.notes.len() < NOTES {
            self.notes.push(what);
        }
    }

    /// A recovery that was waited for, from a fault at this time.
    pub fn recovered_from(&mut self, injected_ns: u64, recovered: &Recovered) {
        let Some(recovery) = &recovered.recovery else {
            return;
        };
        self.detected += 1;
        self.detect
            .record(recovery.detected_at_ns.saturating_sub(injected_ns));
        let takeover = recovered
            .ready_at_ns
            .saturating_sub(recovery.detected_at_ns);
        self.takeover.record(takeover);
        if let Some(adopted_in_ns) = recovery.adopted_in_ns {
            self.adopt.record(adopted_in_ns);
        }
        *self.causes.entry(recovery.cause.clone()).or_default() += 1;
        *self.tiers.entry(recovery.tier.clone()).or_default() += 1;
    }

    /// What went wrong; nothing if all is as promised.
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut complain = |count: u64, what: &str| {
            if count > 0 {
                complaints.push(format!("{count} {what}"));
            }
        };
        complain(u64::from(self.broken), "campaign broken off");
        if let Some(flips) = &self.flips {
            complain(
                flips.replaced.saturating_sub(flips.recovered),
                "engines not recovered",
            );
            complain(flips.down, "flips after which nothing went on");
            complain(
                flips.unreported,
                "streams with harm that no application was told of",
            );
            return complaints;
        }
        let tally = &self.tally;
        complain(tally.lost, "lost");
        complain(tally.duplicated, "duplicated");
        complain(tally.corrupted, "corrupted");
        complain(tally.disordered, "out of order");
        complain(tally.false_reports, "reported not delivered, and came");
        complain(tally.unended, "sends never ended");
        if self.promise == Promise::Exact {
            complain(tally.failed, "sends failed");
        }
        complain(
            self.injected.saturating_sub(self.recovered),
            "not recovered",
        );
        complain(self.false_alarms, "false alarms");
        complaints
    }

    pub fn json(&self) -> Value {
        let mut value = json!({
            "kind": self.kind,
            "injected": self.injected,
            "botched": self.botched,
            "detected": self.detected,
            "recovered": self.recovered,
            "lost": self.tally.lost,
            "duplicated": self.tally.duplicated,
            "corrupted": self.tally.corrupted,
            "disordered": self.tally.disordered,
            "failed_sends": self.tally.failed,
            "unreported_streams": self.tally.unreported,
            "unended_sends": self.tally.unended,
            "false_reports": self.tally.false_reports,
            "false_alarms": self.false_alarms,
            "messages": self.tally.sent,
            "detect_us": self.detect.json(),
            "takeover_us": self.takeover.json(),
            "resume_us": self.resume.json(),
            "adopt_us": self.adopt.json(),
            "open_ports": self.open_ports,
            "outage_us": self.outage.json(),
            "outage_at_sender_us": self.outage_at[0].json(),
            "outage_at_receiver_us": self.outage_at[1].json(),
            "renewal_us": self.renewal.json(),
            "whole_us": self.whole.json(),
            "noise_us": self.noise.json(),
            "gaps_us": self.gaps.as_ref().map(Gaps::json),
            "median_gap_us": self.median_gap_ns as f64 / 1000.0,
            "causes": self.causes,
            "tiers": self.tiers,
            "took_s": self.took_s,
            "complaints": self.complaints(),
            "notes": self.notes.iter().chain(&self.tally.notes).collect::<Vec<_>>(),
        });
        if let Some(object) = value.as_object_mut() {
            object.extend(self.more.clone());
        }
        value
    }
}
