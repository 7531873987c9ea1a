//! The configuration file as it is written, before anything is believed. Every value keeps its place in the file, so that the
//! checks can name the line. Numbers are wide here: their ranges are checked with a message of our own.

use serde::Deserialize;
use toml::{Spanned, Value};

use crate::engine_link::{Encap, Wait};
use crate::logging::Level;
use crate::transport_policy::{AckTime, TimerAction};

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub cluster: Cluster,
    pub node: Node,
    pub network: Network,
    #[serde(default)]
    pub engine: Engine,
    #[serde(default)]
    pub transport: Transport,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub recovery: Recovery,
    #[serde(default)]
    pub peer: Vec<Peer>,
    pub acl: Option<Vec<Acl>>,
    #[serde(default)]
    pub log: Log,
    #[serde(default)]
    pub metrics: Metrics,
    #[serde(default)]
    pub quota: Vec<Quota>,
}

/// What is logged.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Log {
    pub level: Option<Spanned<Level>>,
}

/// What the whole cluster must agree on.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cluster {
    pub name: Spanned<String>,
    pub encap: Option<Spanned<Encap>>,
    pub udp_port: Option<Spanned<i64>>,
}

/// This node.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Node {
    pub id: Spanned<i64>,
    pub name: Spanned<String>,
    pub socket: Option<Spanned<String>>,
    pub socket_mode: Option<Spanned<String>>,
    pub socket_group: Option<Spanned<Value>>,
    pub user: Option<Spanned<Value>>,
    pub cpu_latency_us: Option<Spanned<i64>>,
}

/// Its network.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Network {
    pub interface: Spanned<String>,
    pub address: Option<Spanned<String>>,
    pub queues: Option<Spanned<Vec<Spanned<i64>>>>,
    pub mode: Option<Spanned<super::CopyMode>>,
    pub xdp: Option<Spanned<super::XdpMode>>,
    pub busy_poll: Option<Spanned<super::BusyPolling>>,
    pub discovery: Option<Spanned<Value>>,
}

/// Its engines.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Engine {
    pub wait: Option<Spanned<Wait>>,
    pub cores: Option<Spanned<Vec<Spanned<i64>>>>,
    pub umem_frames: Option<Spanned<i64>>,
    pub keep_awake_ms: Option<Spanned<i64>>,
    pub default_timeout_ms: Option<Spanned<i64>>,
}

/// Its transport: a profile and what of it is changed.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Transport {
    pub profile: Option<Spanned<String>>,
    pub window_messages: Option<Spanned<i64>>,
    pub on_timeout: Option<Spanned<TimerAction>>,
    pub ack: Option<Spanned<AckTime>>,
    pub ack_delay_us: Option<Spanned<i64>>,
    pub coalesce: Option<Spanned<bool>>,
    pub eager_buffers: Option<Spanned<i64>>,
    pub eager_budget_buffers: Option<Spanned<i64>>,
    pub unasked_bytes: Option<Spanned<i64>>,
    pub grant_bytes: Option<Spanned<i64>>,
    pub grant_budget_bytes: Option<Spanned<i64>>,
    pub crowd: Option<Spanned<i64>>,
    pub rto_min_us: Option<Spanned<i64>>,
    pub rto_max_us: Option<Spanned<i64>>,
    pub congestion_target_us: Option<Spanned<i64>>,
    pub unreachable_after_ms: Option<Spanned<i64>>,
    pub stream_idle_ms: Option<Spanned<i64>>,
    pub peer_idle_ms: Option<Spanned<i64>>,
}

/// Limits.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limits {
    pub peers: Option<Spanned<i64>>,
    pub streams: Option<Spanned<i64>>,
    pub ports: Option<Spanned<i64>>,
    pub arena_bytes_per_port: Option<Spanned<i64>>,
    pub arena_bytes_total: Option<Spanned<i64>>,
    pub clients: Option<Spanned<i64>>,
}

/// How engines are watched and replaced.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Recovery {
    pub hang_after_us: Option<Spanned<i64>>,
    pub stuck_after_us: Option<Spanned<i64>>,
    pub challenge: Option<Spanned<bool>>,
    pub standby: Option<Spanned<bool>>,
    pub healthy_after_ms: Option<Spanned<i64>>,
    pub standby_after_ms: Option<Spanned<i64>>,
    pub adoptions: Option<Spanned<i64>>,
    pub resets: Option<Spanned<i64>>,
    pub rebuilds: Option<Spanned<i64>>,
}

/// A node we may talk to.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Peer {
    pub id: Spanned<i64>,
    pub name: Spanned<String>,
    pub address: Option<Spanned<String>>,
    pub mac: Option<Spanned<String>>,
}

/// What Prometheus gets.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Metrics {
    pub listen: Option<Spanned<String>>,
}

/// Who may open which ports.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Acl {
    pub uid: Option<Spanned<Value>>,
    pub gid: Option<Spanned<Value>>,
    pub ports: Spanned<Value>,
}

/// What a user may have at the same time.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Quota {
    pub uid: Spanned<Value>,
    pub ports: Option<Spanned<i64>>,
    pub connections: Option<Spanned<i64>>,
    pub send_tokens: Option<Spanned<i64>>,
    pub receive_tokens: Option<Spanned<i64>>,
    pub arena_bytes: Option<Spanned<i64>>,
}
