//! The reports for people and scripts. Their keys are an interface: add, never rename.

use std::sync::atomic::Ordering;

use portolan_abi::ledger::unpair;
use portolan_abi::port::PortGeometry;
use portolan_ebpf::AttachMode;
use portolan_transport::policy::{Ack, AckRule, OnTimeout, Order, Profile, Recovery};
use serde_json::{Value, json};

use super::Supervisor;
use super::config::Config;
use super::ports::Phase;
use crate::engine_link::{Encap, Wait};

impl Supervisor {
    /// `portolan status`.
    pub(super) fn status(&self) -> Value {
        let config = &self.config;
        let engines: Vec<Value> = self
            .engines
            .iter()
            .map(|engine| {
                json!({
                    "queue": engine.index,
                    "nic_queue": engine.nic_queue,
                    "pid": engine.pid(),
                    "state": engine.state_name(),
                    "epoch": engine.epoch(),
                    "mode": if engine.memory.zero_copy { "zerocopy" } else { "copy" },
                    "wait": wait_name(config.wait),
                    "busy_poll": engine.busy_poll.is_on(),
                    "core": config.cores.get(usize::from(engine.index)),
                    "restarts": engine.escalation.total(),
                    "standby": engine.standby_name(),
                    "takeovers": engine.recoveries.takeovers(),
                    "tier": engine.recoveries.tier().name(),
                    "last_recovery": engine.recoveries.document(),
                })
            })
            .collect();
        let limits = &config.limits;
        json!({
            "node": {
                "id": config.node,
                "name": config.name,
                "incarnation": format!("{:016x}", self.incarnation),
                "cluster": config.cluster,
                "encap": match config.encap { Encap::Udp => "udp", Encap::Ethernet => "ethernet" },
                "interface": config.interface,
                "address": config.address,
                "mac": super::format_mac(&config.interface_facts.mac),
                "mtu": self.interface.mtu(),
                "mtu_configured": self.mtu,
                "interface_state": self.interface.state().name(),
                "xdp": self.interface.xdp().map(AttachMode::name),
                "uptime_s": self.started.elapsed().as_secs(),
                "cpu_latency_us": self.cpu_latency.us(),
                "keep_awake_ms": config.keep_awake.as_millis() as u64,
                "kept_awake": self.keep_awake.held(),
                "keep_awake_refused": self.keep_awake.refused(),
                "kernel": self.kernel.describe(),
                "service_pid": self.service.pid(),
                "metrics_pid": self.exporter.pid(),
                "metrics": config.metrics.map(|address| address.to_string()),
            },
            "engines": engines,
            "transport": transport_document(config),
            "recovery": {
                "hang_after_us": config.recovery.hang_after_us,
                "stuck_after_us": config.recovery.stuck_after_us,
            },
            "limits": {
                "peers": limits.peers,
                "streams": limits.streams,
                "ports": limits.ports,
                "arena_bytes_per_port": limits.arena_bytes_per_port,
                "arena_bytes_total": limits.arena_bytes_total,
                "clients": limits.clients,
                "clients_now": self.clients.len(),
            },
        })
    }

    /// `portolan ports`.
    pub(super) fn ports_document(&self) -> Value {
        let rows: Vec<Value> = self
            .ports
            .iter()
            .filter_map(|(number, port)| {
                let memory = port.memory.as_ref()?;
                let (under_way, offered) = self.tokens_out(number, memory.geometry);
                Some(json!({
                    "port": number,
                    "state": phase_name(port.phase),
                    "owner_pid": port.owner_pid,
                    "owner_uid": port.owner_uid,
                    "queue": self.config.engine_of(number),
                    "generation": port.generation,
                    "send_tokens": memory.geometry.send_tokens,
                    "receive_tokens": memory.geometry.receive_tokens,
                    "arena_bytes": memory.geometry.arena_bytes,
                    "sends_under_way": under_way,
                    "buffers_offered": offered,
                }))
            })
            .collect();
        json!({ "ports": rows })
    }

    /// Send tokens of a port that are with its engine, and receive tokens.
    fn tokens_out(&self, port: u16, geometry: PortGeometry) -> (usize, usize) {
        let Some(engine) = self.engines.get(self.config.engine_of(port)) else {
            return (0, 0);
        };
        let ledger = engine.memory.ledger.ledger();
        let sends = ledger
            .sends(port)
            .iter()
            .take(geometry.send_tokens as usize);
        let receives = ledger
            .receives(port)
            .iter()
            .take(geometry.receive_tokens as usize);
        let sends = sends.filter(|record| record.tag.load(Ordering::Relaxed) != 0);
        let offered = receives.filter(|record| {
            let (consumed, provided) = unpair(record.load(Ordering::Relaxed));
            consumed != provided
        });
        (sends.count(), offered.count())
    }
}

/// The policy: its profile, and the choices that matter when two nodes do not understand each other or one is slow.
fn transport_document(config: &Config) -> Value {
    let policy = &config.policy;
    let profile = config.transport.profile().unwrap_or(Profile::Default);
    let (ack, ack_delay_us) = match policy.ack {
        Ack::Immediate => ("immediate", 0),
        Ack::Delayed { delay_us } => ("delayed", delay_us),
        Ack::Piggybacked { at_most_us } => ("piggybacked", at_most_us),
    };
    json!({
        "profile": profile.name(),
        "changed": config.transport.is_changed(),
        "recovery": match policy.recovery {
            Recovery::GoBackN { stall: true } => "go-back-n, stall",
            Recovery::GoBackN { stall: false } => "go-back-n",
            Recovery::WholeMessage => "whole message",
            Recovery::Selective => "selective",
        },
        "on_timeout": match policy.on_timeout {
            OnTimeout::Probe => "probe",
            OnTimeout::Resend => "resend",
        },
        "ack": ack,
        "ack_delay_us": ack_delay_us,
        "ack_rule": match policy.ack_rule {
            AckRule::Cumulative => "cumulative",
            AckRule::Exact => "exact",
        },
        "order": match policy.order {
            Order::Number => "number",
            Order::Arrival => "arrival",
        },
        "window_messages": policy.window_messages,
        "coalesce": policy.coalesce,
        "eager_buffers": policy.eager_buffers,
        "eager_budget_buffers": policy.eager_budget_buffers,
        "unasked_bytes": policy.unasked_bytes,
        "grant_bytes": policy.grant_bytes,
        "grant_budget_bytes": policy.grant_budget_bytes,
        "crowd": policy.crowd,
        "rto_min_us": policy.rto_min_us,
        "rto_max_us": policy.rto_max_us,
        "congestion_target_us": policy.congestion.target_us(),
        "unreachable_after_ms": policy.unreachable_after_ms,
        "stream_idle_ms": policy.stream_idle_ms,
        "peer_idle_ms": policy.peer_idle_ms,
    })
}

fn wait_name(wait: Wait) -> &'static str {
    match wait {
        Wait::Busy => "busy",
        Wait::Yield => "yield",
        Wait::Adaptive => "adaptive",
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Free => "free",
        Phase::Opening => "opening",
        Phase::Open => "open",
        Phase::Closing => "closing",
    }
}
