//! Every metric there is: one table, from which the page, docs/metrics.md and the tests are made.

use std::sync::LazyLock;

/// What Prometheus does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises, but for restarts.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Times in classes, seconds.
    Histogram,
}

impl Kind {
    /// As in the text format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Clone, Debug)]
pub struct Family {
    /// Its name. An interface: add, never rename.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// One sentence.
    pub help: String,
}

use Kind::{Counter, Gauge, Histogram};

type Row = (&'static str, Kind, &'static [&'static str], &'static str);

const NONE: &[&str] = &[];
const ENGINE: &[&str] = &["engine"];
const PEER: &[&str] = &["peer", "name", "queue", "engine"];
const PORT: &[&str] = &["port", "engine"];

/// All but the engines' counters.
const ROWS: &[Row] = &[
    (
        "portolan_up",
        Gauge,
        NONE,
        "1 if the daemon answers its exporter.",
    ),
    (
        "portolan_node_info",
        Gauge,
        &[
            "node",
            "name",
            "cluster",
            "incarnation",
            "interface",
            "encap",
            "profile",
        ],
        "1; what the node is.",
    ),
    (
        "portolan_node_uptime_seconds",
        Gauge,
        NONE,
        "Since this supervisor started.",
    ),
    (
        "portolan_node_mtu_bytes",
        Gauge,
        NONE,
        "MTU that engines use.",
    ),
    (
        "portolan_interface_up",
        Gauge,
        &["interface", "state"],
        "1 if the interface is in order; state says how it is.",
    ),
    (
        "portolan_clients",
        Gauge,
        NONE,
        "Connections on the daemon's socket.",
    ),
    (
        "portolan_clients_limit",
        Gauge,
        NONE,
        "Connections it takes at most.",
    ),
    ("portolan_ports_open", Gauge, NONE, "Ports that are open."),
    (
        "portolan_ports_limit",
        Gauge,
        NONE,
        "Ports that may be open.",
    ),
    (
        "portolan_arena_bytes",
        Gauge,
        NONE,
        "Arenas of all open ports.",
    ),
    (
        "portolan_arena_limit_bytes",
        Gauge,
        NONE,
        "Arenas that all ports may have.",
    ),
    (
        "portolan_engine_up",
        Gauge,
        ENGINE,
        "1 if an engine serves the queue.",
    ),
    (
        "portolan_engine_degraded",
        Gauge,
        ENGINE,
        "1 if the queue's engines keep dying, so that the next start waits.",
    ),
    (
        "portolan_engine_standby_ready",
        Gauge,
        ENGINE,
        "1 if a standby is ready to take over.",
    ),
    (
        "portolan_engine_zero_copy",
        Gauge,
        ENGINE,
        "1 if the NIC works on the engine's memory.",
    ),
    (
        "portolan_engine_epoch",
        Gauge,
        ENGINE,
        "Which engine of its queue it is.",
    ),
    (
        "portolan_engine_cpu_seconds_total",
        Counter,
        ENGINE,
        "CPU time of the process that serves; begins anew with each.",
    ),
    (
        "portolan_engine_deaths_total",
        Counter,
        &["engine", "cause"],
        "Engines that were lost while they served, by cause.",
    ),
    (
        "portolan_engine_takeovers_total",
        Counter,
        ENGINE,
        "Engines that took over from one that was lost.",
    ),
    (
        "portolan_engine_send_latency_seconds",
        Histogram,
        ENGINE,
        "From taking a message from its sender until it was known to be delivered; without those that outlived an engine.",
    ),
    (
        "portolan_engine_takeover_seconds",
        Histogram,
        ENGINE,
        "From the moment a loss was noticed until another engine served.",
    ),
    (
        "portolan_engine_outage_seconds",
        Histogram,
        ENGINE,
        "From a lost engine's last sign of life until another served.",
    ),
    (
        "portolan_steering_packets_total",
        Counter,
        &["reason"],
        "Packets by what the XDP program did with them.",
    ),
    (
        "portolan_peer_up",
        Gauge,
        PEER,
        "1 if messages flow between this engine and that of the peer.",
    ),
    (
        "portolan_peer_incompatible",
        Gauge,
        PEER,
        "1 if the peer's cluster, version or policy does not fit ours.",
    ),
    (
        "portolan_peer_rtt_seconds",
        Gauge,
        PEER,
        "Smoothed round trip time of frames.",
    ),
    (
        "portolan_peer_outstanding_messages",
        Gauge,
        PEER,
        "Messages to the peer that are not settled.",
    ),
    (
        "portolan_peer_frame_bytes",
        Gauge,
        PEER,
        "Longest frame the path carries.",
    ),
    (
        "portolan_port_send_tokens",
        Gauge,
        PORT,
        "Send tokens of an open port.",
    ),
    (
        "portolan_port_sends_under_way",
        Gauge,
        PORT,
        "Of these, those that are with the engine: messages not settled.",
    ),
    (
        "portolan_port_receive_tokens",
        Gauge,
        PORT,
        "Receive tokens of an open port.",
    ),
    (
        "portolan_port_buffers_offered",
        Gauge,
        PORT,
        "Of these, those that are with the engine: room for messages to come.",
    ),
    (
        "portolan_supervisor_connections_total",
        Counter,
        NONE,
        "Connections taken on the daemon's socket.",
    ),
    (
        "portolan_supervisor_connections_refused_total",
        Counter,
        NONE,
        "Connections refused because there were too many.",
    ),
    (
        "portolan_supervisor_requests_total",
        Counter,
        NONE,
        "Requests of clients.",
    ),
    (
        "portolan_supervisor_refusals_total",
        Counter,
        &["code"],
        "Requests refused, by the code clients get.",
    ),
    (
        "portolan_supervisor_turn_seconds",
        Histogram,
        NONE,
        "Rounds of the supervisor's loop: so long nobody else is heard.",
    ),
    (
        "portolan_events_total",
        Counter,
        &["kind"],
        "Events, as `portolan events` shows them.",
    ),
    (
        "portolan_exporter_collections_total",
        Counter,
        NONE,
        "Times the exporter asked the daemon.",
    ),
    (
        "portolan_exporter_collections_failed_total",
        Counter,
        NONE,
        "Of these, those that had no answer.",
    ),
    (
        "portolan_exporter_requests_total",
        Counter,
        &["outcome"],
        "HTTP requests, by what became of them.",
    ),
];

/// The name of the metric of an engine's counter.
pub fn engine_counter(counter: &str) -> String {
    // Prometheus' linter takes the last word for microseconds.
    let counter = match counter {
        "transport_frames_not_for_us" => "transport_frames_for_others",
        other => other,
    };
    let layered = counter.starts_with("transport_") || counter.starts_with("xsk_");
    let layer = if layered { "" } else { "engine_" };
    format!("portolan_{layer}{counter}_total")
}

/// Every metric, in the order of the page.
pub fn all() -> &'static [Family] {
    static ALL: LazyLock<Vec<Family>> = LazyLock::new(|| {
        let rows = ROWS.iter().map(|(name, kind, labels, help)| Family {
            name: (*name).to_owned(),
            kind: *kind,
            labels,
            help: (*help).to_owned(),
        });
        let counters = crate::engine::counters::names().into_iter();
        let counters = counters.map(|(name, help)| Family {
            name: engine_counter(&name),
            kind: Counter,
            labels: ENGINE,
            help: help.to_owned(),
        });
        rows.chain(counters).collect()
    });
    &ALL
}

/// The table of docs/metrics.md.
pub fn markdown() -> String {
    let mut text =
        String::from("| metric | kind | labels | what it is |\n| --- | --- | --- | --- |\n");
    for family in all() {
        let labels: Vec<String> = family
            .labels
            .iter()
            .map(|label| format!("`{label}`"))
            .collect();
        let (name, kind) = (&family.name, family.kind.name());
        text += &format!(
            "| `{name}` | {kind} | {} | {} |\n",
            labels.join(", "),
            family.help
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expect: names that Prometheus takes and its linter likes, each once, each with help.
    #[test]
    fn names_are_sound() {
        let mut names = std::collections::BTreeSet::new();
        for family in all() {
            let name = &family.name;
            assert!(names.insert(name.clone()), "{name} twice");
            assert!(name.starts_with("portolan_"), "{name}");
            assert!(
                name.chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'),
                "{name}"
            );
            assert_eq!(name.ends_with("_total"), family.kind == Counter, "{name}");
            assert!(
                family.kind != Histogram || name.ends_with("_seconds"),
                "{name}"
            );
            assert!(
                family.help.ends_with('.') && !family.help.contains(['\n', '\\', '|']),
                "{name}"
            );
        }
    }

    #[test]
    fn the_documentation_lists_them_all() {
        let page = include_str!("../../../docs/metrics.md");
        assert!(
            page.contains(&markdown()),
            "docs/metrics.md: put the output of `portoland metrics --list` there"
        );
    }
}
