//! The applications of a random run, and the hand that does the deeds of its plan.

use std::collections::BTreeMap;

use portolan_transport::host::SendStatus;
use portolan_transport::ident::{Nanos, NodeId, PortId, Priority, SendId};

use super::plan::{Deed, Flow, Plan, Sizes};
use crate::cluster::{Application, Cluster};
use crate::harness::book::Route;
use crate::harness::host::Event;
use crate::harness::rng::Rng;

const PRIORITIES: [Priority; 2] = [Priority::Low, Priority::High];

/// What an alarm is for; the low half says which.
const POST: u64 = 1 << 32;
const DEED: u64 = 2 << 32;
const CANCEL: u64 = 3 << 32;
const PROVIDE: u64 = 4 << 32;

/// Where a flow is.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    posted: u32,
    outstanding: u32,
}

/// The applications.
pub struct Workload {
    pub plan: Plan,
    rng: Rng,
    progress: Vec<Progress>,
    /// Which flow a message belongs to.
    flow_of: Vec<u32>,
    cancels: Vec<(NodeId, u64, SendId)>,
    /// Buffers to provide again, later.
    late: Vec<(NodeId, PortId, Priority)>,
    /// Tokens outside, per port and priority.
    provided: BTreeMap<(NodeId, PortId, Priority), usize>,
    healed: bool,
}

impl Workload {
    /// Opens all ports, and writes down when everything begins.
    pub fn new(plan: Plan, cluster: &mut Cluster) -> Self {
        let workload = Self {
            rng: Rng::new(plan.setup.seed ^ 0x776f_726b),
            progress: vec![Progress::default(); plan.flows.len()],
            flow_of: Vec::new(),
            cancels: Vec::new(),
            late: Vec::new(),
            provided: BTreeMap::new(),
            healed: false,
            plan,
        };
        let mut workload = workload;
        for node in 1..=cluster.nodes() {
            workload.open_all(cluster, NodeId(node));
        }
        let start = cluster.now;
        for (index, flow) in (0..).zip(&workload.plan.flows) {
            cluster.alarm(start + flow.begins_ns, POST | index);
        }
        for (index, deed) in (0..).zip(&workload.plan.deeds) {
            cluster.alarm(start + deed.0, DEED | index);
        }
        workload
    }

    fn is_open(cluster: &mut Cluster, node: NodeId, port: PortId) -> bool {
        let owner = cluster.owner(node, port);
        cluster.host(owner).max_len(port).is_some()
    }

    fn open(&mut self, cluster: &mut Cluster, node: NodeId, port: PortId) {
        if Self::is_open(cluster, node, port) {
            return;
        }
        cluster.open(node, port, self.plan.max_len);
        for priority in PRIORITIES {
            self.provided.insert((node, port, priority), 0);
            for _ in 0..self.plan.tokens {
                self.provide(cluster, node, port, priority);
            }
        }
    }

    fn open_all(&mut self, cluster: &mut Cluster, node: NodeId) {
        for port in 1..=self.plan.ports {
            self.open(cluster, node, PortId(port));
        }
    }

    fn provide(&mut self, cluster: &mut Cluster, node: NodeId, port: PortId, priority: Priority) {
        let outside = self.provided.entry((node, port, priority)).or_default();
        if *outside < self.plan.tokens && Self::is_open(cluster, node, port) {
            *outside += 1;
            cluster.provide(node, port, priority, self.plan.max_len);
        }
    }

    /// All faults are over: ports are open, applications prompt, and what is left to send is sent.
    pub fn heal(&mut self, cluster: &mut Cluster) {
        self.healed = true;
        self.plan.provide_lag_ns = 0;
        cluster.heal();
        for node in 1..=cluster.nodes() {
            self.open_all(cluster, NodeId(node));
        }
        for index in 0..self.plan.flows.len() {
            self.post(cluster, index);
        }
    }

    /// One more message over every route and back: the last word of everybody to everybody.
    pub fn say_goodbye(&mut self, cluster: &mut Cluster) {
        let mut routes: Vec<Route> = self.plan.flows.iter().map(|flow| flow.route).collect();
        let back = |r: &Route| Route {
            from: r.to,
            to: r.from,
            priority: r.priority,
        };
        routes.extend(routes.iter().map(back).collect::<Vec<_>>());
        routes.sort_unstable();
        routes.dedup();
        for route in routes {
            cluster.post(route, 16, Nanos::MAX);
            self.flow_of.push(u32::MAX);
        }
    }

    /// Whether every flow has sent all it had.
    pub fn is_exhausted(&self) -> bool {
        let all = |(flow, progress): (&Flow, &Progress)| progress.posted == flow.count;
        self.plan.flows.iter().zip(&self.progress).all(all)
    }

    fn post(&mut self, cluster: &mut Cluster, index: usize) {
        let flow = self.plan.flows[index].clone();
        if !Self::is_open(cluster, flow.route.from.0, flow.route.from.1) {
            // Its port is closed: the application tries again when it is open, or when all is over.
            if !self.healed {
                cluster.alarm(cluster.now + 200_000, POST | index as u64);
            }
            return;
        }
        while self.progress[index].posted < flow.count
            && self.progress[index].outstanding < flow.depth
        {
            let len = self.length(flow.sizes);
            let deadline = if self.rng.chance(flow.deadlines) {
                cluster.now + self.rng.below(5_000_000)
            } else {
                Nanos::MAX
            };
            let (id, send) = cluster.post(flow.route, len, deadline);
            if len > self.plan.max_len {
                cluster.book.borrow_mut().is_too_long(id);
            }
            self.flow_of.push(index as u32);
            self.progress[index].posted += 1;
            self.progress[index].outstanding += 1;
            if self.rng.chance(flow.cancels) {
                let at = cluster.now + self.rng.below(500_000);
                self.cancels.push((flow.route.from.0, id, send));
                cluster.alarm(at, CANCEL | (self.cancels.len() as u64 - 1));
            }
            if flow.think_ns > 0
                && !self.healed
                && self.progress[index].posted.is_multiple_of(flow.depth)
            {
                break; // the rest after a moment
            }
        }
    }

    fn length(&mut self, sizes: Sizes) -> u32 {
        let rng = &mut self.rng;
        let len = match sizes {
            Sizes::Tiny => rng.below(200),
            Sizes::Frame => rng.below(1_500),
            Sizes::Mixed => match rng.below(10) {
                0..=4 => rng.below(4_000),
                5..=8 => rng.below(20_000),
                _ => rng.below(64 << 10),
            },
            Sizes::Long => match rng.below(40) {
                0 => u64::from(self.plan.max_len) + 1,
                1..=30 => rng.between(10_000, 200_000),
                _ => rng.between(10_000, 1_000_000),
            },
        };
        len as u32
    }

    fn ended(&mut self, cluster: &mut Cluster, id: u64) {
        let Some(&index) = self.flow_of.get(id as usize) else {
            return;
        };
        let Some(progress) = self.progress.get_mut(index as usize) else {
            return; // a goodbye
        };
        progress.outstanding = progress.outstanding.saturating_sub(1);
        let think = self.plan.flows[index as usize].think_ns;
        if think == 0 || self.healed {
            self.post(cluster, index as usize);
        } else {
            let pause = self.rng.below(2 * think);
            cluster.alarm(cluster.now + pause, POST | u64::from(index));
        }
    }

    fn act(&mut self, cluster: &mut Cluster, deed: Deed) {
        if self.healed {
            return;
        }
        match deed {
            Deed::Kill { engine, pause } => cluster.kill(engine, pause),
            Deed::KillAtStep { engine, steps } => cluster.kill_at_step(engine, steps),
            Deed::Stop { engine, time } => cluster.stop(engine, time),
            Deed::Cut { from, to, both } => cluster.cut(from, to, both),
            Deed::Mend { from, to } => cluster.mend(from, to),
            Deed::Reboot { node } => {
                cluster.reboot(node);
                for (flow, progress) in self.plan.flows.iter().zip(&mut self.progress) {
                    if flow.route.from.0 == node {
                        progress.outstanding = 0;
                    }
                }
                self.open_all(cluster, node);
                for index in 0..self.plan.flows.len() {
                    if self.plan.flows[index].route.from.0 == node {
                        self.post(cluster, index);
                    }
                }
            }
            Deed::Close { node, port } => {
                if Self::is_open(cluster, node, port) {
                    cluster.close(node, port);
                }
            }
            Deed::Open { node, port } => self.open(cluster, node, port),
            Deed::Lag { engine, time } => cluster.lag(engine, time),
            Deed::Grant { engine, bytes } => cluster.grant(engine, bytes),
            Deed::Weather(impairment) => cluster.network.impairment = impairment,
        }
    }
}

impl Application for Workload {
    fn event(&mut self, cluster: &mut Cluster, node: NodeId, event: Event) {
        match event {
            Event::Received { stream, .. } => {
                let name = (node, stream.local, stream.priority);
                if let Some(outside) = self.provided.get_mut(&name) {
                    *outside = outside.saturating_sub(1);
                }
                if self.plan.provide_lag_ns > 0 {
                    self.late.push(name);
                    let at = cluster.now + self.rng.below(self.plan.provide_lag_ns);
                    cluster.alarm(at, PROVIDE | (self.late.len() as u64 - 1));
                } else {
                    self.provide(cluster, node, stream.local, stream.priority);
                }
            }
            Event::Completed {
                id, stream, status, ..
            } => {
                if status != SendStatus::Delivered {
                    if self.plan.resume {
                        cluster.resume_sending(node, stream);
                    } else {
                        cluster.drop_sends(node, stream);
                    }
                }
                self.ended(cluster, id);
            }
        }
    }

    fn alarm(&mut self, cluster: &mut Cluster, name: u64) {
        let index = (name & 0xffff_ffff) as usize;
        match name & !0xffff_ffff {
            POST => self.post(cluster, index),
            DEED => {
                let deed = self.plan.deeds[index].1;
                self.act(cluster, deed);
            }
            CANCEL => {
                let (node, id, send) = self.cancels[index];
                // The token may be another send's by now, after a restart.
                let rebooted = cluster.tally.reboots > 0;
                let over = {
                    let book = cluster.book.borrow();
                    let message = book.message(id);
                    message.abandoned || (rebooted && message.status.is_some())
                };
                if !over {
                    cluster.cancel(node, id, send);
                }
            }
            PROVIDE => {
                let (node, port, priority) = self.late[index];
                self.provide(cluster, node, port, priority);
            }
            _ => {}
        }
    }
}
