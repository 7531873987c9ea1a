//! From two snapshots to what happened between them. The document of `top --json`.

use serde_json::{Map, Value, json};

use super::{Snapshot, latency};

/// Rates of an engine: what they are called, and which counter they are made of.
const RATES: [(&str, &str); 12] = [
    ("frames_sent_per_s", "transport_frames_sent"),
    ("frames_received_per_s", "transport_frames_received"),
    ("bytes_sent_per_s", "transport_bytes_sent"),
    ("bytes_received_per_s", "transport_bytes_received"),
    ("sends_per_s", "transport_sends_accepted"),
    ("deliveries_per_s", "transport_messages_delivered"),
    ("bytes_delivered_per_s", "transport_bytes_delivered"),
    ("retransmits_per_s", "transport_retransmits"),
    ("credit_stalls_per_s", "transport_credit_stalls"),
    ("no_buffer_per_s", "transport_no_buffer"),
    ("send_tokens_per_s", "send_tokens"),
    ("receive_tokens_per_s", "receive_tokens"),
];

fn list<'v>(document: &'v Value, key: &str) -> &'v [Value] {
    document[key].as_array().map_or(&[], Vec::as_slice)
}

fn of_queue<'v>(engines: &'v [Value], queue: &Value) -> &'v Value {
    let found = engines.iter().find(|engine| engine["queue"] == *queue);
    found.unwrap_or(&Value::Null)
}

/// What it grew by; null if it is not there, 0 if it began anew.
fn grown(before: &Value, now: &Value) -> Option<u64> {
    Some(now.as_u64()?.saturating_sub(before.as_u64()?))
}

/// Everything `top` shows, but for time and latencies.
pub fn document(before: &Snapshot, now: &Snapshot) -> Value {
    let seconds = now.at.saturating_duration_since(before.at).as_secs_f64();
    let seconds = seconds.max(1e-3);
    let status = &now.status;
    let engines = list(status, "engines").iter();
    let engines: Vec<Value> = engines
        .map(|engine| self::engine(engine, before, now, seconds))
        .collect();
    let node = &status["node"];
    json!({
        "interval_s": seconds,
        "node": {
            "id": node["id"],
            "name": node["name"],
            "uptime_s": node["uptime_s"],
            "interface": node["interface"],
            "interface_state": node["interface_state"],
        },
        "engines": engines,
        "peers": picked(&now.peers, "peers", &["node", "name", "queue", "state", "rtt_ns", "outstanding"]),
        "ports": picked(&now.ports, "ports", &[
            "port", "owner_uid", "owner_pid", "queue", "send_tokens", "sends_under_way", "receive_tokens", "buffers_offered",
        ]),
    })
}

fn picked(document: &Value, key: &str, keys: &[&str]) -> Vec<Value> {
    let each = list(document, key).iter().map(|entry| {
        let pairs = keys
            .iter()
            .map(|key| ((*key).to_owned(), entry[*key].clone()));
        Value::Object(pairs.collect())
    });
    each.collect()
}

fn engine(engine: &Value, before: &Snapshot, now: &Snapshot, seconds: f64) -> Value {
    let queue = &engine["queue"];
    let was = of_queue(list(&before.counters, "engines"), queue);
    let is = of_queue(list(&now.counters, "engines"), queue);
    let mut row = Map::new();
    for key in ["queue", "state", "standby", "core", "epoch", "takeovers"] {
        row.insert(key.to_owned(), engine[key].clone());
    }
    let same = of_queue(list(&before.status, "engines"), queue)["pid"] == engine["pid"];
    let cpu = grown(&was["cpu_ns"], &is["cpu_ns"]).filter(|_| same);
    let cpu = cpu.map(|ns| ns as f64 / 1e7 / seconds);
    row.insert("cpu_percent".to_owned(), json!(cpu));
    let took = |key: &str| {
        let last = &engine["last_recovery"];
        let span = last["ready_at_ns"]
            .as_u64()?
            .checked_sub(last[key].as_u64()?)?;
        (span > 0).then_some(span)
    };
    row.insert(
        "last_recovery_cause".to_owned(),
        engine["last_recovery"]["cause"].clone(),
    );
    row.insert("last_recovery_ns".to_owned(), json!(took("detected_at_ns")));
    let quantiles = latency::quantiles(&was["send_latency"], &is["send_latency"]);
    row.insert("send_latency_ns".to_owned(), quantiles);
    for (name, counter) in RATES {
        let grown = grown(&was["counters"][counter], &is["counters"][counter]);
        let rate = grown.map(|grown| grown as f64 / seconds);
        row.insert(name.to_owned(), json!(rate));
    }
    Value::Object(row)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn snapshot(at: Instant, sent: u64, cpu_ns: u64) -> Snapshot {
        Snapshot {
            at,
            status: json!({
                "node": { "id": 1, "name": "a" },
                "engines": [{ "queue": 0, "pid": 7, "state": "running", "last_recovery": {
                    "cause": "hang", "detected_at_ns": 1000, "ready_at_ns": 151_000 } }],
            }),
            peers: json!({ "peers": [{ "node": 2, "rtt_ns": 20_000, "mac": "…" }] }),
            ports: json!({}),
            counters: json!({ "engines": [{ "queue": 0, "cpu_ns": cpu_ns,
                "counters": { "transport_frames_sent": sent } }] }),
        }
    }

    #[test]
    fn rates_are_per_second() {
        let start = Instant::now();
        let before = snapshot(start, 1000, 1_000_000_000);
        let now = snapshot(start + Duration::from_secs(2), 5000, 2_000_000_000);
        let document = document(&before, &now);
        let engine = &document["engines"][0];
        assert_eq!(engine["frames_sent_per_s"], 2000.0);
        assert_eq!(engine["cpu_percent"], 50.0);
        assert_eq!(engine["last_recovery_ns"], 150_000);
        assert_eq!(engine["retransmits_per_s"], Value::Null);
        assert_eq!(
            document["peers"][0],
            json!({ "node": 2, "name": null, "queue": null, "state": null,
            "rtt_ns": 20_000, "outstanding": null })
        );
    }

    // Counters that began anew, or reports of a daemon gone mad. Expect: nothing negative, no panic.
    #[test]
    fn any_two_reports_can_be_compared() {
        let start = Instant::now();
        let (before, now) = (snapshot(start, 9, 9), snapshot(start, 3, 3));
        assert_eq!(
            document(&before, &now)["engines"][0]["frames_sent_per_s"],
            0.0
        );
        for odd in [
            json!(null),
            json!([1]),
            json!({ "engines": [3, {}], "peers": [1], "ports": "x" }),
        ] {
            let odd = |at| Snapshot {
                at,
                status: odd.clone(),
                peers: odd.clone(),
                ports: odd.clone(),
                counters: odd.clone(),
            };
            document(&odd(start), &now);
            document(&odd(start), &odd(start));
        }
    }
}
