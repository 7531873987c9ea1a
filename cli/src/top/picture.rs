//! What people see of `top`.

use serde_json::Value;

use crate::paint::{Paint, Style, style_of};
use crate::table::{Table, duration, plain, rate};

/// Ports that are shown; the busiest first.
const PORTS: usize = 16;

fn list<'v>(document: &'v Value, key: &str) -> &'v [Value] {
    document[key].as_array().map_or(&[], Vec::as_slice)
}

/// A number for people: 12345.6 → 12.3k; `-` if it is not known.
fn count(value: &Value) -> String {
    match value.as_f64() {
        None => "-".into(),
        Some(number) if number < 9999.5 => format!("{number:.0}"),
        Some(number) if number < 9_999_500.0 => format!("{:.1}k", number / 1e3),
        Some(number) => format!("{:.1}M", number / 1e6),
    }
}

fn bytes(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".into(), rate)
}

fn ns(value: &Value) -> String {
    let known = value.as_f64().filter(|ns| *ns > 0.0);
    known.map_or_else(|| "-".into(), duration)
}

fn of(part: &Value, all: &Value) -> String {
    format!("{}/{}", plain(part), plain(all))
}

/// The whole picture.
pub fn text(document: &Value, paint: Paint) -> String {
    let node = &document["node"];
    let state = plain(&node["interface_state"]);
    let mut text = format!(
        "{}  {}  {} {}  up {} s\n\n",
        paint.paint(
            Style::Heading,
            &format!("node {} ({})", plain(&node["id"]), plain(&node["name"]))
        ),
        plain(&document["time"]),
        plain(&node["interface"]),
        paint.paint(style_of("state", &state), &state),
        plain(&node["uptime_s"]),
    );
    text += &engines(document, paint);
    text += &peers(document, paint);
    text += &ports(document, paint);
    text
}

fn engines(document: &Value, paint: Paint) -> String {
    let mut table = Table::new(&[
        "engine",
        "state",
        "standby",
        "cpu %",
        "sends/s",
        "p50",
        "p99",
        "deliveries/s",
        "in",
        "out",
        "retransmits/s",
        "stalls/s",
        "no buffer/s",
        "recoveries",
        "last",
    ]);
    for engine in list(document, "engines") {
        let cpu = engine["cpu_percent"].as_f64();
        let last = match engine["last_recovery_cause"].as_str() {
            Some(cause) => format!("{cause} {}", ns(&engine["last_recovery_ns"])),
            None => "-".into(),
        };
        table.row(vec![
            plain(&engine["queue"]),
            plain(&engine["state"]),
            plain(&engine["standby"]),
            cpu.map_or_else(|| "-".into(), |percent| format!("{percent:.0}")),
            count(&engine["sends_per_s"]),
            ns(&engine["send_latency_ns"]["p50"]),
            ns(&engine["send_latency_ns"]["p99"]),
            count(&engine["deliveries_per_s"]),
            bytes(&engine["bytes_received_per_s"]),
            bytes(&engine["bytes_sent_per_s"]),
            count(&engine["retransmits_per_s"]),
            count(&engine["credit_stalls_per_s"]),
            count(&engine["no_buffer_per_s"]),
            plain(&engine["takeovers"]),
            last,
        ]);
    }
    table.paint(paint)
}

fn peers(document: &Value, paint: Paint) -> String {
    let peers = list(document, "peers");
    if peers.is_empty() {
        return String::new();
    }
    let probed = document["latency"].is_array();
    let mut headings = vec!["peer", "name", "queue", "state", "rtt", "outstanding"];
    if probed {
        headings.extend(["ping p50", "p99", "p99.9", "lost"]);
    }
    let mut table = Table::new(&headings);
    for peer in peers {
        let keys = ["node", "name", "queue", "state"];
        let mut row: Vec<String> = keys.iter().map(|key| plain(&peer[*key])).collect();
        row.extend([ns(&peer["rtt_ns"]), count(&peer["outstanding"])]);
        if probed {
            let found = list(document, "latency")
                .iter()
                .find(|l| l["node"] == peer["node"]);
            let latency = found.unwrap_or(&Value::Null);
            row.extend(["p50", "p99", "p999"].map(|q| ns(&latency["rtt_ns"][q])));
            row.push(count(&latency["lost"]));
        }
        table.row(row);
    }
    format!("\n{}", table.paint(paint))
}

fn ports(document: &Value, paint: Paint) -> String {
    let mut ports: Vec<&Value> = list(document, "ports").iter().collect();
    if ports.is_empty() {
        return String::new();
    }
    let busy = |port: &&Value| std::cmp::Reverse(port["sends_under_way"].as_u64().unwrap_or(0));
    ports.sort_by_key(busy);
    let mut table = Table::new(&[
        "port",
        "uid",
        "pid",
        "engine",
        "sends under way",
        "buffers offered",
    ]);
    for port in ports.iter().take(PORTS) {
        table.row(vec![
            plain(&port["port"]),
            plain(&port["owner_uid"]),
            plain(&port["owner_pid"]),
            plain(&port["queue"]),
            of(&port["sends_under_way"], &port["send_tokens"]),
            of(&port["buffers_offered"], &port["receive_tokens"]),
        ]);
    }
    let more = ports.len().saturating_sub(PORTS);
    let rest = match more {
        0 => String::new(),
        more => format!("and {more} more: `portolan ports`\n"),
    };
    format!("\n{}{rest}", table.paint(paint))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_has_its_place() {
        let document = json!({
            "time": "2026-11-22T06:00:00Z",
            "node": { "id": 1, "name": "a", "interface": "eth0", "interface_state": "up", "uptime_s": 70 },
            "engines": [{ "queue": 0, "state": "running", "standby": "ready", "cpu_percent": 12.4, "sends_per_s": 123_456.0,
                "bytes_sent_per_s": 2e6, "takeovers": 3, "last_recovery_cause": "hang", "last_recovery_ns": 150_000 }],
            "peers": [{ "node": 2, "name": "b", "queue": 0, "state": "up", "rtt_ns": 25_000, "outstanding": 4 }],
            "latency": [{ "node": 2, "lost": 0, "rtt_ns": { "p50": 30_000, "p99": 60_000, "p999": 90_000 } }],
            "ports": [{ "port": 9, "send_tokens": 64, "sends_under_way": 5, "receive_tokens": 32, "buffers_offered": 7 }],
        });
        let text = text(&document, Paint::NONE);
        for wanted in [
            "node 1 (a)",
            "123.5k",
            "2.0 MB/s",
            "hang 150.0 us",
            "25.0 us",
            "60.0 us",
            "5/64",
            "7/32",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert!(!text.contains('\u{1b}'));
        for odd in [
            json!(null),
            json!([1]),
            json!({ "engines": [1], "peers": [null], "ports": ["x"], "latency": [2] }),
        ] {
            super::text(&odd, Paint::NONE);
        }
    }
}
