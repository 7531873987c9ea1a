//! Many senders to one receiver: long messages at low priority from all, single frames at high priority from a few others.
//!
//! Reported: how much of the receiver's link is used, what was dropped where, and what the single frames' latency is against the
//! same cluster without the long messages.

use portolan_transport::ident::{Nanos, NodeId, PortId, Priority};
use portolan_transport::policy::{Policy, Profile};
use serde_json::{Value, json};

use super::load::{Load, Pace, Source, open};
use crate::cluster::{Cluster, Setup};
use crate::harness::book::Route;
use crate::harness::{MS, US};

/// The case.
#[derive(Clone, Copy, Debug)]
pub struct Incast {
    pub senders: u16,
    /// Bytes of a long message, and how many of them each sender has under way.
    pub len: u32,
    pub depth: u32,
    /// Nodes that send single frames, their bytes, and how far apart.
    pub others: u16,
    pub single: u32,
    pub apart_ns: Nanos,
    /// How long it is measured, after a fifth of it.
    pub measured_ns: Nanos,
    pub policy: Policy,
    pub seed: u64,
}

/// What came out.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Payload, and everything on the wire, as parts of the receiver's link.
    pub goodput: f64,
    pub utilisation: f64,
    pub no_receive_buffer: u64,
    pub switch_dropped: [u64; 2],
    pub switch_most_used: u64,
    pub retransmits: u64,
    pub p50_ns: Nanos,
    pub p99_ns: Nanos,
    pub singles: usize,
    pub failed: u64,
}

/// The profile's policy, with the eager budget that the receive ring holds.
pub fn policy(profile: Profile) -> Policy {
    let ring = crate::cluster::switch::Hardware::default().receive_ring_buffers;
    let mut policy = profile.policy();
    if policy.eager_budget_buffers == 0 {
        policy.eager_budget_buffers = (ring / 2).max(policy.eager_buffers);
    }
    policy
}

const BULK: PortId = PortId(1);
const SINGLE: PortId = PortId(2);

fn run(case: &Incast, bulk: bool) -> Outcome {
    let nodes = 1 + case.senders + case.others;
    let mut setup = Setup::new(case.seed, usize::from(nodes), case.policy);
    setup.max_records = 2 * usize::from(nodes) + 16;
    let mut cluster = Cluster::new(setup);
    let receiver = NodeId(1);
    open(
        &mut cluster,
        receiver,
        BULK,
        usize::from(case.senders) * 2,
        case.len,
    );
    open(&mut cluster, receiver, SINGLE, 512, case.single);
    let mut sources = Vec::new();
    for node in 2..=nodes {
        let is_bulk = node <= 1 + case.senders;
        let (port, priority) = if is_bulk {
            (BULK, Priority::Low)
        } else {
            (SINGLE, Priority::High)
        };
        if is_bulk && !bulk {
            continue;
        }
        let from = (NodeId(node), port);
        cluster.open(from.0, port, case.len);
        sources.push(Source {
            route: Route {
                from,
                to: (receiver, port),
                priority,
            },
            len: if is_bulk { case.len } else { case.single },
            pace: if is_bulk {
                Pace::Closed(case.depth)
            } else {
                Pace::Open(case.apart_ns)
            },
        });
    }
    let start = cluster.now;
    let from = start + case.measured_ns / 5;
    let until = from + case.measured_ns;
    let mut load = Load::new(&mut cluster, sources, 200 * US, (from, until));
    cluster.run(&mut load, from, |_, _| false);
    let before = cluster.switch.carried(0);
    cluster.run(&mut load, until, |_, _| false);
    let carried = cluster.switch.carried(0) - before;
    let (tally, switch) = (
        cluster.tally,
        (cluster.switch.dropped, cluster.switch.most_used),
    );
    let retransmits = cluster.counter("retransmits");
    // What is under way is waited for: latecomers count.
    cluster.run(&mut load, until + 500 * MS, |cluster, _| {
        cluster.is_settled()
    });
    let capacity =
        cluster.setup.hardware.link_bits_per_s as f64 / 8.0 * case.measured_ns as f64 / 1e9;
    let bytes: u64 = load.measured.iter().map(|m| m.bytes).sum();
    let single = &mut load.measured[Priority::High as usize];
    Outcome {
        goodput: bytes as f64 / capacity,
        utilisation: carried as f64 / capacity,
        no_receive_buffer: tally.no_receive_buffer,
        switch_dropped: switch.0,
        switch_most_used: switch.1,
        retransmits,
        p50_ns: single.quantile(0.5),
        p99_ns: single.quantile(0.99),
        singles: single.latency_ns.len(),
        failed: load.failed,
    }
}

/// With the long messages, and without.
pub fn measure(case: &Incast) -> (Outcome, Outcome) {
    (run(case, true), run(case, false))
}

/// As text and as JSON.
pub fn report(case: &Incast) -> (String, Value) {
    let (loaded, unloaded) = measure(case);
    let ratio = loaded.p99_ns as f64 / unloaded.p99_ns.max(1) as f64;
    let us = |ns: Nanos| ns as f64 / 1e3;
    let text = format!(
        "incast {} -> 1, {} B messages, {} under way each, {} ms\n\
         receiver's link      {:.1} % used, {:.1} % payload\n\
         no receive buffer    {}\n\
         dropped by switch    {} low, {} high; most of its memory in use {} KiB\n\
         sent again           {} messages\n\
         single frames        {} of {} B at high priority\n\
         latency p50          {:.1} us, unloaded {:.1} us\n\
         latency p99          {:.1} us, unloaded {:.1} us: {ratio:.1} times\n\
         failed sends         {}",
        case.senders,
        case.len,
        case.depth,
        case.measured_ns / MS,
        loaded.utilisation * 100.0,
        loaded.goodput * 100.0,
        loaded.no_receive_buffer,
        loaded.switch_dropped[0],
        loaded.switch_dropped[1],
        loaded.switch_most_used >> 10,
        loaded.retransmits,
        loaded.singles,
        case.single,
        us(loaded.p50_ns),
        us(unloaded.p50_ns),
        us(loaded.p99_ns),
        us(unloaded.p99_ns),
        loaded.failed,
    );
    let json = json!({
        "senders": case.senders,
        "message_bytes": case.len,
        "utilisation": loaded.utilisation,
        "goodput": loaded.goodput,
        "no_receive_buffer": loaded.no_receive_buffer,
        "switch_dropped_low": loaded.switch_dropped[0],
        "switch_dropped_high": loaded.switch_dropped[1],
        "switch_most_used_bytes": loaded.switch_most_used,
        "retransmits": loaded.retransmits,
        "single_p50_ns": loaded.p50_ns,
        "single_p99_ns": loaded.p99_ns,
        "unloaded_p50_ns": unloaded.p50_ns,
        "unloaded_p99_ns": unloaded.p99_ns,
        "p99_ratio": ratio,
        "failed": loaded.failed,
    });
    (text, json)
}
