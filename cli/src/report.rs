//! `status`, `peers`, `ports`, `counters`: the daemon's documents, as JSON or as tables.
//!
//! Defensive: what a daemon of another version leaves out is shown as `-`, what it adds is shown by `--json`.

use std::io::Write;
use std::process::ExitCode;

use portolan::{Node, Report};
use serde_json::Value;

use crate::paint::Paint;
use crate::recovery::Recovery;
use crate::table::{Table, duration, plain};

/// Prints a report.
pub fn show(node: &Node, report: Report, json: bool) -> anyhow::Result<ExitCode> {
    let document = node.report(report)?;
    let paint = Paint::for_stdout();
    let text = if json {
        format!("{document:#}\n")
    } else {
        match report {
            Report::Status => status(&document, paint),
            Report::Peers => peers(&document, paint),
            Report::Ports => ports(&document, paint),
            Report::Counters => counters(&document, paint),
        }
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn list<'v>(document: &'v Value, key: &str) -> &'v [Value] {
    document[key].as_array().map_or(&[], Vec::as_slice)
}

/// A table of these keys of each entry.
fn columns(entries: &[Value], keys: &[(&str, &str)]) -> Table {
    let headings: Vec<&str> = keys.iter().map(|(heading, _)| *heading).collect();
    let mut table = Table::new(&headings);
    for entry in entries {
        table.row(
            keys.iter()
                .map(|(_, key)| cell(key, &entry[*key]))
                .collect(),
        );
    }
    table
}

fn cell(key: &str, value: &Value) -> String {
    match (key, value.as_f64()) {
        ("rtt_ns", Some(0.0)) => "-".into(),
        ("rtt_ns", Some(ns)) => duration(ns),
        ("arena_bytes", Some(bytes)) => size(bytes),
        _ => plain(value),
    }
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b < 1024.0 * 1024.0 => format!("{:.0} KiB", b / 1024.0),
        b if b < 1024.0 * 1024.0 * 1024.0 => format!("{:.0} MiB", b / 1024.0 / 1024.0),
        b => format!("{:.1} GiB", b / 1024.0 / 1024.0 / 1024.0),
    }
}

fn status(document: &Value, paint: Paint) -> String {
    let mut text = String::new();
    let empty = serde_json::Map::new();
    let node = document["node"].as_object().unwrap_or(&empty);
    let mut about = Table::new(&[&format!(
        "node {} ({})",
        plain(&document["node"]["id"]),
        plain(&document["node"]["name"])
    )]);
    for (key, value) in node {
        match key.as_str() {
            "id" | "name" => {}
            "uptime_s" => about.row(vec!["  up".into(), uptime(value.as_u64().unwrap_or(0))]),
            key if !value.is_null() => about.row(vec![format!("  {key}"), plain(value)]),
            _ => {}
        }
    }
    text += &about.render_ragged(paint);
    text += "\n";
    let engines = list(document, "engines");
    let keys = [
        ("engine", "queue"),
        ("state", "state"),
        ("pid", "pid"),
        ("epoch", "epoch"),
        ("mode", "mode"),
        ("wait", "wait"),
        ("core", "core"),
        ("restarts", "restarts"),
        ("standby", "standby"),
    ];
    text += &columns(engines, &keys).paint(paint);
    text += &recoveries(engines, paint);
    for (section, heading) in [("transport", "transport"), ("limits", "limit")] {
        let Some(values) = document[section].as_object().filter(|v| !v.is_empty()) else {
            continue;
        };
        text += "\n";
        let mut table = Table::new(&[heading, "value"]);
        for (key, value) in values {
            table.row(vec![plain(&key.as_str().into()), plain(value)]);
        }
        text += &table.paint(paint);
    }
    text
}

/// What became of the engines that were lost last; nothing if none was.
fn recoveries(engines: &[Value], paint: Paint) -> String {
    let mut table = Table::new(&["engine", "recovery", "cause", "by", "detected", "serving"]);
    let mut any = false;
    for engine in engines {
        let Some(last) = Recovery::of(engine) else {
            continue;
        };
        any = true;
        let (detected, serving) = last.spans();
        table.row(vec![
            plain(&engine["queue"]),
            plain(&last.document["number"]),
            plain(&last.document["cause"]),
            plain(&last.document["tier"]),
            detected,
            serving,
        ]);
    }
    match any {
        true => format!("\n{}", table.paint(paint)),
        false => String::new(),
    }
}

fn uptime(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

fn peers(document: &Value, paint: Paint) -> String {
    let peers = list(document, "peers");
    if peers.is_empty() {
        return "no peers are configured or known\n".into();
    }
    let keys = [
        ("node", "node"),
        ("name", "name"),
        ("queue", "queue"),
        ("state", "state"),
        ("misfit", "misfit"),
        ("rtt", "rtt_ns"),
        ("outstanding", "outstanding"),
        ("epoch", "engine_epoch"),
        ("frame", "max_frame"),
        ("mac", "mac"),
        ("address", "address"),
    ];
    columns(peers, &keys).paint(paint)
}

fn ports(document: &Value, paint: Paint) -> String {
    let ports = list(document, "ports");
    if ports.is_empty() {
        return "no ports are open\n".into();
    }
    let keys = [
        ("port", "port"),
        ("state", "state"),
        ("pid", "owner_pid"),
        ("uid", "owner_uid"),
        ("engine", "queue"),
        ("send tokens", "send_tokens"),
        ("under way", "sends_under_way"),
        ("receive tokens", "receive_tokens"),
        ("offered", "buffers_offered"),
        ("arena", "arena_bytes"),
    ];
    columns(ports, &keys).paint(paint)
}

/// One row per counter, one column per engine; counters that are 0 everywhere only appear in the JSON.
fn counters(document: &Value, paint: Paint) -> String {
    let engines = list(document, "engines");
    let mut names: Vec<&String> = Vec::new();
    for engine in engines {
        for name in engine["counters"]
            .as_object()
            .into_iter()
            .flat_map(|c| c.keys())
        {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let mut headings = vec!["counter".to_string()];
    headings.extend(
        engines
            .iter()
            .map(|e| format!("engine {}", plain(&e["queue"]))),
    );
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for name in names {
        let values: Vec<&Value> = engines.iter().map(|e| &e["counters"][name]).collect();
        if values.iter().any(|v| v.as_u64() != Some(0)) {
            let mut row = vec![plain(&name.as_str().into())];
            row.extend(values.into_iter().map(plain));
            table.row(row);
        }
    }
    let mut text = table.paint(paint);
    let mut steering = Table::new(&["steering", "packets"]);
    for (reason, packets) in document["steering"].as_object().into_iter().flatten() {
        steering.row(vec![plain(&reason.as_str().into()), plain(packets)]);
    }
    text += "\n";
    text += &steering.paint(paint);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status_plain(document: &Value) -> String {
        status(document, Paint::NONE)
    }

    fn peers_plain(document: &Value) -> String {
        peers(document, Paint::NONE)
    }

    fn ports_plain(document: &Value) -> String {
        ports(document, Paint::NONE)
    }

    fn counters_plain(document: &Value) -> String {
        counters(document, Paint::NONE)
    }

    // The documents of the daemon. Expect: every value in its place.
    #[test]
    fn documents_become_tables() {
        let text = status_plain(&json!({
            "node": { "id": 1, "name": "a", "mtu": 1500, "uptime_s": 3700 },
            "engines": [{ "queue": 0, "pid": 77, "state": "running", "epoch": 2, "core": null }],
            "limits": { "ports": 255 },
        }));
        assert!(text.starts_with("node 1 (a)\n"), "{text}");
        for wanted in ["mtu", "1500", "1 h 1 min", "running", "77", "ports"] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert!(!text.contains("recovery"), "{text}");
        let text = status_plain(
            &json!({ "engines": [{ "queue": 0, "standby": "ready", "last_recovery": {
            "number": 3, "cause": "hang", "tier": "adopt",
            "last_beat_ns": 1_000_000, "detected_at_ns": 2_500_000, "ready_at_ns": 2_600_000,
        } }] }),
        );
        for wanted in ["recovery", "hang", "adopt", "1500.0 us", "100.0 us"] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        let text =
            peers_plain(&json!({ "peers": [{ "node": 2, "state": "up", "rtt_ns": 45_600 }] }));
        assert!(text.contains("45.6 us") && text.contains("up"), "{text}");
        let text = ports_plain(&json!({ "ports": [{ "port": 7, "arena_bytes": 8 << 20 }] }));
        assert!(text.contains("8 MiB"), "{text}");
        let text = counters_plain(&json!({
            "engines": [
                { "queue": 0, "counters": { "frames_sent": 5, "never": 0 } },
                { "queue": 1, "counters": { "frames_sent": 6, "never": 0 } },
            ],
            "steering": { "redirected": 9 },
        }));
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(lines[1], ["frames_sent", "5", "6"]);
        assert!(lines.contains(&vec!["redirected", "9"]));
        assert!(!text.contains("never"));
    }

    // Documents of a daemon gone mad. Expect: no panic.
    #[test]
    fn any_document_can_be_shown() {
        let nothing = [json!(null), json!(7), json!([]), json!({}), json!("x")];
        let odd = [
            json!({ "node": 3, "engines": 4, "peers": [1, null, []], "ports": ["x"], "limits": [] }),
            json!({ "engines": [{ "counters": [1] }, 5], "steering": { "a": { "b": 1 } } }),
        ];
        for document in nothing.iter().chain(&odd) {
            for show in [status, peers, ports, counters] {
                show(document, Paint::NONE);
            }
        }
    }
}
