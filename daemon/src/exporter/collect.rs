//! From the daemon's reports to samples. What a report leaves out is left out here.

use serde_json::{Map, Value, json};

use super::families;
use super::page::Samples;

/// The reports, as `portolan … --json` shows them; null: the daemon did not answer.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    /// `portolan status`.
    pub status: Value,
    /// `portolan peers`.
    pub peers: Value,
    /// `portolan ports`.
    pub ports: Value,
    /// `portolan counters`.
    pub counters: Value,
}

/// Everything there is to say.
pub fn samples(reports: &Reports) -> Samples {
    let mut samples = Samples::default();
    let up = reports.status.is_object();
    samples.plain("portolan_up", f64::from(u8::from(up)));
    if up {
        node(&mut samples, &reports.status);
        engines(&mut samples, &reports.status);
        counted(&mut samples, &reports.counters);
        peers(&mut samples, &reports.peers);
        ports(&mut samples, &reports.ports);
    }
    samples
}

fn list<'v>(document: &'v Value, key: &str) -> &'v [Value] {
    document[key].as_array().map_or(&[], Vec::as_slice)
}

fn pairs(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

fn number(samples: &mut Samples, name: &str, labels: &[(&str, Value)], value: &Value) {
    if let Some(value) = value.as_f64() {
        samples.add(name, labels, value);
    }
}

/// In seconds, what is given in nanoseconds.
fn seconds(samples: &mut Samples, name: &str, labels: &[(&str, Value)], value: &Value) {
    if let Some(ns) = value.as_f64() {
        samples.add(name, labels, ns / 1e9);
    }
}

fn yes(samples: &mut Samples, name: &str, labels: &[(&str, Value)], is: bool) {
    samples.add(name, labels, f64::from(u8::from(is)));
}

fn node(samples: &mut Samples, status: &Value) {
    let node = &status["node"];
    let what = ["name", "cluster", "incarnation", "interface", "encap"];
    let mut labels = vec![("node", node["id"].clone())];
    labels.extend(what.map(|key| (key, node[key].clone())));
    labels.push(("profile", status["transport"]["profile"].clone()));
    samples.add("portolan_node_info", &labels, 1.0);
    number(
        samples,
        "portolan_node_uptime_seconds",
        &[],
        &node["uptime_s"],
    );
    number(samples, "portolan_node_mtu_bytes", &[], &node["mtu"]);
    let interface = [
        ("interface", node["interface"].clone()),
        ("state", node["interface_state"].clone()),
    ];
    yes(
        samples,
        "portolan_interface_up",
        &interface,
        node["interface_state"] == "up",
    );
    let limits = &status["limits"];
    for (name, key) in [
        ("portolan_clients", "clients_now"),
        ("portolan_clients_limit", "clients"),
        ("portolan_ports_limit", "ports"),
        ("portolan_arena_limit_bytes", "arena_bytes_total"),
    ] {
        number(samples, name, &[], &limits[key]);
    }
}

fn engines(samples: &mut Samples, status: &Value) {
    for engine in list(status, "engines") {
        let labels = [("engine", engine["queue"].clone())];
        for (name, is) in [
            ("portolan_engine_up", engine["state"] == "running"),
            ("portolan_engine_degraded", engine["state"] == "degraded"),
            (
                "portolan_engine_standby_ready",
                engine["standby"] == "ready",
            ),
            ("portolan_engine_zero_copy", engine["mode"] == "zerocopy"),
        ] {
            yes(samples, name, &labels, is);
        }
        number(samples, "portolan_engine_epoch", &labels, &engine["epoch"]);
    }
}

fn counted(samples: &mut Samples, counters: &Value) {
    for engine in list(counters, "engines") {
        let queue = || ("engine", engine["queue"].clone());
        for (name, value) in pairs(&engine["counters"]) {
            number(samples, &families::engine_counter(name), &[queue()], value);
        }
        seconds(
            samples,
            "portolan_engine_cpu_seconds_total",
            &[queue()],
            &engine["cpu_ns"],
        );
        samples.histogram(
            "portolan_engine_send_latency_seconds",
            &[queue()],
            &engine["send_latency"],
        );
        let recoveries = &engine["recoveries"];
        for (cause, count) in pairs(&recoveries["deaths"]) {
            let labels = [queue(), ("cause", json!(cause))];
            number(samples, "portolan_engine_deaths_total", &labels, count);
        }
        number(
            samples,
            "portolan_engine_takeovers_total",
            &[queue()],
            &recoveries["takeovers"],
        );
        samples.histogram(
            "portolan_engine_takeover_seconds",
            &[queue()],
            &recoveries["takeover"],
        );
        samples.histogram(
            "portolan_engine_outage_seconds",
            &[queue()],
            &recoveries["outage"],
        );
    }
    for (family, label, values) in [
        (
            "portolan_steering_packets_total",
            "reason",
            &counters["steering"],
        ),
        ("portolan_events_total", "kind", &counters["events"]),
        (
            "portolan_supervisor_refusals_total",
            "code",
            &counters["supervisor"]["requests_refused"],
        ),
    ] {
        for (name, count) in pairs(values) {
            number(samples, family, &[(label, json!(name))], count);
        }
    }
    let supervisor = &counters["supervisor"];
    for (name, key) in [
        ("portolan_supervisor_connections_total", "connections"),
        (
            "portolan_supervisor_connections_refused_total",
            "connections_turned_away",
        ),
        ("portolan_supervisor_requests_total", "requests"),
    ] {
        number(samples, name, &[], &supervisor[key]);
    }
    samples.histogram(
        "portolan_supervisor_turn_seconds",
        &[],
        &supervisor["turns"],
    );
}

fn peers(samples: &mut Samples, peers: &Value) {
    for peer in list(peers, "peers") {
        let mut labels = vec![("peer", peer["node"].clone())];
        labels.extend(["name", "queue", "engine"].map(|key| (key, peer[key].clone())));
        yes(samples, "portolan_peer_up", &labels, peer["state"] == "up");
        let misfit = peer["state"] == "incompatible";
        yes(samples, "portolan_peer_incompatible", &labels, misfit);
        number(
            samples,
            "portolan_peer_outstanding_messages",
            &labels,
            &peer["outstanding"],
        );
        if peer["rtt_ns"].as_u64() > Some(0) {
            seconds(
                samples,
                "portolan_peer_rtt_seconds",
                &labels,
                &peer["rtt_ns"],
            );
        }
        number(
            samples,
            "portolan_peer_frame_bytes",
            &labels,
            &peer["max_frame"],
        );
    }
}

fn ports(samples: &mut Samples, ports: &Value) {
    let open = list(ports, "ports");
    samples.plain("portolan_ports_open", open.len() as f64);
    let arenas: f64 = open
        .iter()
        .filter_map(|port| port["arena_bytes"].as_f64())
        .sum();
    samples.plain("portolan_arena_bytes", arenas);
    for port in open {
        let labels = [
            ("port", port["port"].clone()),
            ("engine", port["queue"].clone()),
        ];
        for (name, key) in [
            ("portolan_port_send_tokens", "send_tokens"),
            ("portolan_port_sends_under_way", "sends_under_way"),
            ("portolan_port_receive_tokens", "receive_tokens"),
            ("portolan_port_buffers_offered", "buffers_offered"),
        ] {
            number(samples, name, &labels, &port[key]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::Format;
    use super::*;

    // Reports of a daemon gone mad, or none. Expect: no panic, and it is said that the daemon does not answer.
    #[test]
    fn any_report_becomes_a_page() {
        let odd = [
            json!(null),
            json!(7),
            json!([1]),
            json!({ "engines": 4, "peers": [1, null], "ports": ["x"], "node": [], "supervisor": 1 }),
            json!({ "engines": [{ "counters": [1], "recoveries": { "takeover": { "counts": [] } } }], "events": { "a": {} } }),
        ];
        for document in &odd {
            let reports = Reports {
                status: document.clone(),
                peers: document.clone(),
                ports: document.clone(),
                counters: document.clone(),
            };
            let page = samples(&reports).render(Format::Text);
            let up = if document.is_object() {
                "portolan_up 1\n"
            } else {
                "portolan_up 0\n"
            };
            assert!(page.contains(up), "{page}");
        }
    }
}
