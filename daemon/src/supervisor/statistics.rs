//! What the supervisor counts about itself, and the report of everything counted.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use portolan_abi::control::{ErrorCode, Response};
use serde_json::{Map, Value, json};

use super::Supervisor;
use super::engines::Engine;
use super::histogram::Histogram;
use super::watchdog::vitals;
use crate::engine::latency::Latencies;

/// Counted since this supervisor started.
#[derive(Debug, Default)]
pub struct Statistics {
    /// Connections taken.
    pub connections: u64,
    /// Connections refused at the door.
    pub turned_away: u64,
    /// Requests begun.
    pub requests: u64,
    refused: BTreeMap<&'static str, u64>,
    turns: Histogram,
}

/// Every kind of refusal, as clients see it.
const REFUSALS: [(ErrorCode, &str); 8] = [
    (ErrorCode::BadRequest, "bad_request"),
    (ErrorCode::AbiMismatch, "abi_mismatch"),
    (ErrorCode::Denied, "denied"),
    (ErrorCode::PortInUse, "port_in_use"),
    (ErrorCode::NotFound, "not_found"),
    (ErrorCode::Limit, "limit"),
    (ErrorCode::Unavailable, "unavailable"),
    (ErrorCode::Internal, "internal"),
];

impl Statistics {
    /// An answer goes out.
    pub fn answered(&mut self, response: &Response) {
        if let Response::Error { code, .. } = response
            && let Some((_, name)) = REFUSALS.iter().find(|(known, _)| known == code)
        {
            *self.refused.entry(name).or_default() += 1;
        }
    }

    /// One round of the loop took so long: so long nobody else was heard.
    pub fn turn(&mut self, took: Duration) {
        self.turns.observe(took.as_nanos() as u64);
    }

    fn document(&self) -> Value {
        let refused = REFUSALS.iter().map(|(_, name)| {
            let count = self.refused.get(name).copied().unwrap_or(0);
            ((*name).to_owned(), count.into())
        });
        json!({
            "connections": self.connections,
            "connections_turned_away": self.turned_away,
            "requests": self.requests,
            "requests_refused": refused.collect::<Map<_, _>>(),
            "turns": self.turns.document(),
        })
    }
}

impl Supervisor {
    /// `portolan counters`.
    pub(super) fn counters(&self) -> Value {
        let steering: Map<String, Value> = (self.steering.counters().into_iter())
            .map(|(name, packets)| (name, packets.into()))
            .collect();
        let names = crate::engine::counters::names();
        let engines: Vec<Value> = (self.engines.iter())
            .map(|engine| engine_counters(engine, &names))
            .collect();
        let events = self.events.recorded();
        let events = events.map(|(kind, count)| (kind.name().to_owned(), count.into()));
        json!({
            "engines": engines,
            "steering": steering,
            "supervisor": self.statistics.document(),
            "events": events.collect::<Map<_, _>>(),
        })
    }
}

fn engine_counters(engine: &Engine, names: &[(String, &str)]) -> Value {
    let ledger = engine.memory.ledger.ledger();
    let values: Map<String, Value> = (names.iter())
        .zip(&ledger.header().counters)
        .map(|((name, _), word)| (name.clone(), word.load(Ordering::Relaxed).into()))
        .collect();
    json!({
        "queue": engine.index,
        "counters": values,
        "send_latency": Latencies::adopt(ledger).document(),
        "cpu_ns": engine.pid().and_then(vitals::cpu_time_ns),
        "recoveries": engine.recoveries.statistics(),
    })
}
