//! Everybody sends to everybody: does a cluster of this size fit the machine, and what does a peer cost?

use std::fs;

use portolan_transport::ident::{Nanos, NodeId, PortId, Priority};
use portolan_transport::policy::Policy;
use serde_json::{Value, json};

use crate::cluster::{Application, Cluster, Setup};
use crate::harness::book::Route;
use crate::harness::host::Event;
use crate::harness::{MS, SECOND, US};
use crate::heap;

/// Bytes of one direction of one stream in a ledger (`shm-abi/src/ledger.rs` asserts it).
pub const DURABLE_BYTES: usize = 32;

const PORT: PortId = PortId(1);

/// The case.
#[derive(Clone, Copy, Debug)]
pub struct AllToAll {
    pub nodes: u16,
    /// Bytes of a message.
    pub len: u32,
    /// Messages each node has under way.
    pub depth: u16,
    /// How long it waits between one and the next, so that idle peers are forgotten meanwhile.
    pub pause_ns: Nanos,
    pub policy: Policy,
    pub seed: u64,
}

struct Everybody {
    len: u32,
    pause_ns: Nanos,
    /// Per node, the distance of the next one it sends to.
    next: Vec<u16>,
    received: u64,
    failed: u64,
}

impl Everybody {
    fn post(&mut self, cluster: &mut Cluster, node: NodeId) {
        let nodes = cluster.nodes();
        let distance = &mut self.next[usize::from(node.0) - 1];
        if *distance >= nodes {
            return;
        }
        let to = NodeId((node.0 - 1 + *distance) % nodes + 1);
        *distance += 1;
        let route = Route {
            from: (node, PORT),
            to: (to, PORT),
            priority: Priority::Low,
        };
        cluster.post(route, self.len, Nanos::MAX);
    }
}

impl Application for Everybody {
    fn event(&mut self, cluster: &mut Cluster, node: NodeId, event: Event) {
        match event {
            Event::Received { stream, .. } => {
                self.received += 1;
                cluster.provide(node, PORT, stream.priority, self.len);
            }
            Event::Completed { status, .. } => {
                self.failed += u64::from(status != portolan_transport::host::SendStatus::Delivered);
                cluster.alarm(cluster.now + self.pause_ns, u64::from(node.0));
            }
        }
    }

    fn alarm(&mut self, cluster: &mut Cluster, name: u64) {
        self.post(cluster, NodeId(name as u16));
    }
}

/// The most memory this process ever used, and what it uses now, in KiB.
fn memory_kib() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
            .unwrap_or(0)
    };
    (field("VmHWM:"), field("VmRSS:"))
}

/// As text and as JSON.
pub fn report(case: &AllToAll) -> (String, Value) {
    let before = memory_kib().1;
    let mut setup = Setup::new(case.seed, usize::from(case.nodes), case.policy);
    setup.max_frame = 1_458;
    let mut cluster = Cluster::new(setup);
    cluster.book.borrow_mut().checks = crate::checks::Checks::default();
    let tokens = usize::from(case.depth) * 4;
    for node in 1..=case.nodes {
        cluster.open(NodeId(node), PORT, case.len);
        for _ in 0..tokens {
            cluster.provide(NodeId(node), PORT, Priority::Low, case.len);
        }
    }
    let start = cluster.now;
    for node in 1..=case.nodes {
        for turn in 0..case.depth {
            cluster.alarm(start + u64::from(turn) * 2 * US, u64::from(node));
        }
    }
    let mut everybody = Everybody {
        len: case.len,
        pause_ns: case.pause_ns,
        next: vec![1; usize::from(case.nodes)],
        received: 0,
        failed: 0,
    };
    let expected = u64::from(case.nodes) * u64::from(case.nodes - 1);
    let done =
        |cluster: &Cluster, app: &Everybody| app.received >= expected && cluster.is_settled();
    let finished = cluster.run(&mut everybody, start + 600 * SECOND, done);
    let took = cluster.now - start;
    let records: usize = cluster
        .engines()
        .iter()
        .map(|e| e.host.records().0 + e.host.records().1)
        .sum();
    // Streams close, peers are forgotten.
    let idle = u64::from(case.policy.stream_idle_ms + case.policy.peer_idle_ms) * 4 * MS + 200 * MS;
    let quiet = cluster.now + idle;
    cluster.run(&mut everybody, quiet, |_, _| false);
    let kept = cluster.engines()[1]
        .endpoint
        .as_ref()
        .map_or(0, |endpoint| endpoint.peers().count());
    let idle = heap::of(|| cluster.take_endpoint(1));
    let (peak, _) = memory_kib();
    let per_node = (peak.saturating_sub(before)) as f64 / f64::from(case.nodes);
    let kib = |bytes: usize| bytes as f64 / 1024.0;
    let text = format!(
        "all to all, {} nodes: {} of {expected} messages of {} B delivered, {} failed{}\n\
         simulated time       {:.1} ms, {} frames\n\
         peak memory          {:.1} MiB in all, {per_node:.1} KiB per node (with its host and the simulator)\n\
         endpoint's heap      {:.1} KiB of one idle node, which remembers {kept} peers\n\
         durable state        {DURABLE_BYTES} bytes per stream direction; {records} records at the end of the traffic",
        case.nodes,
        everybody.received,
        case.len,
        everybody.failed,
        if finished { "" } else { " (not finished)" },
        took as f64 / 1e6,
        cluster.tally.frames,
        peak as f64 / 1024.0,
        kib(idle),
    );
    let json = json!({
        "nodes": case.nodes,
        "delivered": everybody.received,
        "expected": expected,
        "failed": everybody.failed,
        "simulated_ns": took,
        "frames": cluster.tally.frames,
        "peak_kib": peak,
        "peak_kib_per_node": per_node,
        "endpoint_idle_bytes": idle,
        "endpoint_idle_peers": kept,
        "durable_bytes_per_stream_direction": DURABLE_BYTES,
    });
    (text, json)
}
