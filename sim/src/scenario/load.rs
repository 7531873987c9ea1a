//! Streams of messages at full speed or at a rate, and how long each took.

use portolan_transport::ident::{Nanos, NodeId, PortId, Priority};

use crate::cluster::{Application, Cluster};
use crate::harness::book::Route;
use crate::harness::host::Event;
use crate::harness::rng::Rng;

/// When the next message is sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// So many under way at any time.
    Closed(u32),
    /// At random times (Poisson), this long apart on average.
    Open(Nanos),
}

/// Messages of one kind from one application.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub route: Route,
    pub len: u32,
    pub pace: Pace,
}

/// What is measured of one kind of traffic.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Bytes delivered between the two times.
    pub bytes: u64,
    /// Time from the post to the application's event, nanoseconds.
    pub latency_ns: Vec<Nanos>,
}

impl Measured {
    /// The latency that this part of the messages stays within.
    pub fn quantile(&mut self, part: f64) -> Nanos {
        self.latency_ns.sort_unstable();
        let last = self.latency_ns.len().saturating_sub(1);
        let at = (part * last as f64).round() as usize;
        self.latency_ns.get(at).copied().unwrap_or(0)
    }
}

/// The applications: sources in two classes, by priority, and ports that provide every buffer again.
pub struct Load {
    sources: Vec<Source>,
    rng: Rng,
    /// Which source each message is from, and when it was posted; the first is number `first`.
    posted: Vec<(u32, Nanos)>,
    /// Between these times it counts.
    pub from: Nanos,
    pub until: Nanos,
    /// No new messages from then on.
    pub stop: Nanos,
    /// By priority.
    pub measured: [Measured; 2],
    /// Messages that ended otherwise than delivered.
    pub failed: u64,
}

/// A port with so many buffers of this length at each priority.
pub fn open(cluster: &mut Cluster, node: NodeId, port: PortId, buffers: usize, len: u32) {
    cluster.open(node, port, len);
    for priority in [Priority::Low, Priority::High] {
        for _ in 0..buffers {
            cluster.provide(node, port, priority, len);
        }
    }
}

impl Load {
    /// Starts all sources within `spread` from now; what arrives between `from` and `until` counts.
    pub fn new(
        cluster: &mut Cluster,
        sources: Vec<Source>,
        spread: Nanos,
        (from, until): (Nanos, Nanos),
    ) -> Self {
        let mut rng = Rng::new(cluster.setup.seed ^ 0x6c6f_6164);
        for index in 0..sources.len() {
            let at = cluster.now + rng.below(spread.max(1));
            cluster.alarm(at, index as u64);
        }
        Self {
            sources,
            rng,
            posted: Vec::new(),
            from,
            until,
            stop: until,
            measured: Default::default(),
            failed: 0,
        }
    }

    fn post(&mut self, cluster: &mut Cluster, index: usize) {
        if cluster.now >= self.stop {
            return;
        }
        let source = self.sources[index];
        cluster.post(source.route, source.len, Nanos::MAX);
        self.posted.push((index as u32, cluster.now));
    }
}

impl Application for Load {
    fn event(&mut self, cluster: &mut Cluster, node: NodeId, event: Event) {
        match event {
            Event::Received { id, stream, .. } => {
                let (source, posted) = self.posted[id as usize];
                let len = self.sources[source as usize].len;
                let now = cluster.now;
                let measured = &mut self.measured[stream.priority as usize];
                if (self.from..self.until).contains(&now) {
                    measured.bytes += u64::from(len);
                }
                if (self.from..self.until).contains(&posted) {
                    measured.latency_ns.push(now - posted);
                }
                cluster.provide(node, stream.local, stream.priority, len);
            }
            Event::Completed {
                id, status, stream, ..
            } => {
                if status != portolan_transport::host::SendStatus::Delivered {
                    self.failed += 1;
                    cluster.resume_sending(node, stream);
                }
                let index = self.posted[id as usize].0 as usize;
                if matches!(self.sources[index].pace, Pace::Closed(_)) {
                    self.post(cluster, index);
                }
            }
        }
    }

    fn alarm(&mut self, cluster: &mut Cluster, name: u64) {
        let index = name as usize;
        match self.sources[index].pace {
            Pace::Closed(depth) => (0..depth).for_each(|_| self.post(cluster, index)),
            Pace::Open(apart) => {
                self.post(cluster, index);
                let uniform = (self.rng.below(1 << 53) as f64 + 1.0) / (1u64 << 53) as f64;
                let pause = (-uniform.ln() * apart as f64) as Nanos;
                if cluster.now < self.stop {
                    cluster.alarm(cluster.now + pause.max(1), name);
                }
            }
        }
    }
}
