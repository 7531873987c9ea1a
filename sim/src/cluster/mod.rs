//! A cluster: engines with their rings, links, a switch, applications, one clock, one seed.
//!
//! Problem: thousands of nodes run the very transport code for millions of frames, and a run must repeat from its seed to the bit.
//! Its model is TigerBeetle's simulator.
//!
//! Idea: everything that happens is an entry of [`Clock`]; nothing else moves time. An engine runs in turns as the real one does:
//! commands, receive ring, timers, sends, transmit ring; each frame costs it processor time, so its own clock runs ahead of the
//! cluster's while it works. A frame leaves when the sender's link has carried it, crosses the [`Switch`], and waits in a receive
//! ring of finite size. Applications see their events after the turn that made them.
//!
//! Rejected: the harness's loop over all engines at every instant (its cost grows with the square of the nodes).
//!
//! Invariants: `wake_at` of an engine is the earliest turn written down for it that is not stale; a path is first in, first out
//! unless the network says otherwise; no hash map is walked.

pub mod clock;
pub mod engine;
pub mod frames;
pub mod impairment;
pub mod switch;
mod turn;
mod wire;

use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::ident::{Nanos, NodeId, Peer, PortId, Priority, SendId, StreamKey};
use portolan_transport::policy::Policy;

use crate::harness::book::{Book, Route, SharedBook};
use crate::harness::host::{Event, TestHost};
use crate::harness::rng::Rng;

use clock::{Clock, Happening};
use engine::{Command, Engine};
use frames::Frames;
use impairment::Network;
use switch::{Hardware, Switch};

/// What runs on the nodes.
pub trait Application {
    /// An application of `node` read an event.
    fn event(&mut self, cluster: &mut Cluster, node: NodeId, event: Event);

    /// An alarm set with [`Cluster::alarm`] is due.
    fn alarm(&mut self, cluster: &mut Cluster, name: u64);
}

/// What is the same for all nodes.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    /// One policy per node, in order.
    pub policies: Vec<Policy>,
    pub queues: u8,
    pub max_frame: u16,
    /// Receive buffers' size: frames arrive cut into pieces of it.
    pub segment: usize,
    pub first_number: u32,
    pub first_epoch: u32,
    pub max_peers: usize,
    pub max_records: usize,
    pub hardware: Hardware,
}

impl Setup {
    /// `nodes` nodes with one engine and one policy, jumbo frames.
    pub fn new(seed: u64, nodes: usize, policy: Policy) -> Self {
        Self {
            seed,
            policies: vec![policy; nodes],
            queues: 1,
            max_frame: 8_958,
            segment: 3_840,
            first_number: u32::MAX - 20,
            first_epoch: u32::MAX - 3,
            max_peers: 64.max(nodes + 8),
            max_records: 4_096.max(nodes * 2),
            hardware: Hardware::default(),
        }
    }
}

/// What happened, beside what the checkers judge.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub frames: u64,
    /// Of them bare ones.
    pub bare: u64,
    pub bytes: u64,
    pub lost: u64,
    pub duplicated: u64,
    pub corrupted: u64,
    pub late: u64,
    pub crossings_lost: u64,
    /// Frames dropped because a receive ring was full.
    pub no_receive_buffer: u64,
    pub deaths: u64,
    pub reboots: u64,
    pub stops: u64,
    pub turns: u64,
}

impl Tally {
    /// Adds up.
    pub fn add(&mut self, other: &Self) {
        self.frames += other.frames;
        self.bare += other.bare;
        self.bytes += other.bytes;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.corrupted += other.corrupted;
        self.late += other.late;
        self.crossings_lost += other.crossings_lost;
        self.no_receive_buffer += other.no_receive_buffer;
        self.deaths += other.deaths;
        self.reboots += other.reboots;
        self.stops += other.stops;
        self.turns += other.turns;
    }

    /// Single faults injected.
    pub fn faults(&self) -> u64 {
        self.lost
            + self.duplicated
            + self.corrupted
            + self.late
            + self.crossings_lost
            + self.deaths
            + self.reboots
            + self.stops
    }
}

/// The cluster.
pub struct Cluster {
    pub now: Nanos,
    pub setup: Setup,
    pub book: SharedBook,
    pub network: Network,
    pub switch: Switch,
    pub tally: Tally,
    /// Prints every frame.
    pub trace: bool,
    /// Checkers see every frame.
    pub watch_frames: bool,
    /// Look at an engine's innards every so many turns; 0 for never.
    pub look_every: u64,
    clock: Clock,
    frames: Frames,
    engines: Vec<Engine>,
    /// Until when each node's link is busy.
    links: Vec<Nanos>,
    rng: Rng,
}

impl Cluster {
    /// All nodes are up, all ports closed.
    pub fn new(setup: Setup) -> Self {
        let nodes = setup.policies.len();
        let mut rng = Rng::new(setup.seed);
        let mut cluster = Self {
            now: 1 + rng.below(1 << 40),
            book: Book::shared(),
            network: Network::new(nodes, Rng::new(rng.u64())),
            switch: Switch::new(setup.hardware, nodes),
            tally: Tally::default(),
            trace: false,
            watch_frames: false,
            look_every: 0,
            clock: Clock::default(),
            frames: Frames::new(usize::from(setup.max_frame)),
            engines: Vec::with_capacity(nodes * usize::from(setup.queues)),
            links: vec![0; nodes],
            rng,
            setup,
        };
        for index in 0..nodes {
            for queue in 0..cluster.setup.queues {
                let engine = cluster.new_engine(index, queue, 0);
                cluster.engines.push(engine);
            }
        }
        cluster
    }

    fn new_engine(&mut self, index: usize, queue: u8, turns: u64) -> Engine {
        let id = NodeId(index as u16 + 1);
        let setup = &self.setup;
        // One incarnation per boot of a node, whatever its queues.
        let incarnation = match queue {
            0 => self.rng.u64().max(1),
            _ => {
                self.engines[index * usize::from(setup.queues)]
                    .config
                    .incarnation
            }
        };
        let config = Config {
            node: id,
            queue,
            queues: setup.queues,
            incarnation,
            engine_epoch: u32::MAX - 1,
            cluster: 0xc1,
            name: format!("n{}", id.0),
            max_frame: setup.max_frame,
            max_peers: setup.max_peers,
            first_number: setup.first_number,
            policy: setup.policies[index],
        };
        let mut host = TestHost::new(id, self.book.clone(), setup.first_epoch);
        host.tagless = id.0.is_multiple_of(2);
        host.max_records = setup.max_records;
        let mut endpoint = Endpoint::new(config.clone(), self.now);
        for node in 1..=setup.policies.len() {
            endpoint.set_node(self.now, NodeId(node as u16), setup.max_frame);
        }
        let mut engine = Engine::new(Peer { node: id, queue }, config, endpoint, host);
        engine.turns = turns;
        engine
    }

    pub fn nodes(&self) -> u16 {
        self.setup.policies.len() as u16
    }

    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// The index of a node's engine.
    pub fn index(&self, peer: Peer) -> usize {
        usize::from(peer.node.0 - 1) * usize::from(self.setup.queues) + usize::from(peer.queue)
    }

    /// The index of the engine that owns a node's port.
    pub fn owner(&self, node: NodeId, port: PortId) -> usize {
        let queue = (port.0 % u16::from(self.setup.queues)) as u8;
        self.index(Peer { node, queue })
    }

    pub fn host(&mut self, engine: usize) -> &mut TestHost {
        &mut self.engines[engine].host
    }

    /// Adds up a counter over all living engines.
    pub fn counter(&self, name: &str) -> u64 {
        let living = self.engines.iter().filter_map(|e| e.endpoint.as_ref());
        let counters = living.filter_map(|e| e.counters().iter().find(|c| c.0 == name));
        counters.map(|c| c.2).sum()
    }

    /// Takes an engine's endpoint away, to see what it holds; the engine is dead from then on.
    pub fn take_endpoint(&mut self, engine: usize) -> Option<Endpoint> {
        self.engines[engine].endpoint.take()
    }

    // ---- what applications do ----

    /// Opens a port with room for messages of `len` bytes.
    pub fn open(&mut self, node: NodeId, port: PortId, len: u32) {
        let owner = self.owner(node, port);
        self.engines[owner].host.open_port(port, len);
        self.command(owner, Command::Opened(port));
    }

    pub fn close(&mut self, node: NodeId, port: PortId) {
        let owner = self.owner(node, port);
        self.engines[owner].host.close_port(port);
        self.command(owner, Command::Closed(port));
    }

    /// Offers a receive buffer.
    pub fn provide(&mut self, node: NodeId, port: PortId, priority: Priority, len: u32) {
        let owner = self.owner(node, port);
        self.engines[owner].host.provide(port, priority, len);
        self.command(owner, Command::Provided(port));
    }

    /// Posts a send; the engine finds it at its next turn.
    pub fn post(&mut self, route: Route, len: u32, deadline: Nanos) -> (u64, SendId) {
        self.book.borrow_mut().now = self.now;
        let owner = self.owner(route.from.0, route.from.1);
        let posted = self.engines[owner].host.post(route, len, deadline);
        self.wake(owner, self.now);
        posted
    }

    pub fn cancel(&mut self, node: NodeId, id: u64, send: SendId) {
        self.book
            .borrow_mut()
            .checks
            .tell(|check| check.cancelled(id));
        let owner = self.owner(node, send.port);
        self.command(owner, Command::Cancel(send));
    }

    pub fn resume_sending(&mut self, node: NodeId, stream: StreamKey) {
        let owner = self.owner(node, stream.local);
        self.command(owner, Command::Resume(stream));
    }

    pub fn drop_sends(&mut self, node: NodeId, stream: StreamKey) {
        let route = Route {
            from: (node, stream.local),
            to: (stream.node, stream.remote),
            priority: stream.priority,
        };
        self.book
            .borrow_mut()
            .checks
            .tell(|check| check.dropped(route));
        let owner = self.owner(node, stream.local);
        self.command(owner, Command::Drop(stream));
    }

    fn command(&mut self, engine: usize, command: Command) {
        self.engines[engine].commands.push_back(command);
        self.wake(engine, self.now);
    }

    /// Tells the application of the run at `at`.
    pub fn alarm(&mut self, at: Nanos, name: u64) {
        self.clock.set(at.max(self.now), Happening::Alarm(name));
    }

    // ---- what goes wrong ----

    /// The engine dies now; the next one takes over after `pause`.
    pub fn kill(&mut self, engine: usize, pause: Nanos) {
        let now = self.now;
        let e = &mut self.engines[engine];
        if e.endpoint.take().is_some() {
            self.tally.deaths += 1;
            e.reborn_at = now + pause;
            self.wake(engine, now + pause);
        }
    }

    /// The engine dies in the middle of its n-th store from now.
    pub fn kill_at_step(&mut self, engine: usize, steps: u64) {
        self.engines[engine].host.die_after = Some(steps.max(1));
    }

    /// The engine gets no processor for a while.
    pub fn stop(&mut self, engine: usize, time: Nanos) {
        self.tally.stops += 1;
        let e = &mut self.engines[engine];
        e.stopped_until = e.stopped_until.max(self.now + time);
    }

    /// (Re)starts a node: a new incarnation with an empty ledger and closed ports.
    pub fn reboot(&mut self, node: NodeId) {
        self.tally.reboots += 1;
        self.book.borrow_mut().abandon(node);
        for queue in 0..self.setup.queues {
            let at = self.index(Peer { node, queue });
            let turns = self.engines[at].turns + 1;
            let new = self.new_engine(usize::from(node.0 - 1), queue, turns);
            let old = std::mem::replace(&mut self.engines[at], new);
            for frame in old.receive_ring {
                self.frames.free(frame);
            }
            self.wake(at, self.now);
        }
        for other in 0..self.engines.len() {
            if self.engines[other].peer.node != node {
                self.command(other, Command::Node(node));
            }
        }
    }

    /// Nodes do not hear each other, in one direction or in both.
    pub fn cut(&mut self, from: NodeId, to: NodeId, both: bool) {
        let (from, to) = (u32::from(from.0) - 1, u32::from(to.0) - 1);
        if from != to {
            self.network.cut.insert((from, to));
            if both {
                self.network.cut.insert((to, from));
            }
        }
    }

    pub fn mend(&mut self, from: NodeId, to: NodeId) {
        let (from, to) = (u32::from(from.0) - 1, u32::from(to.0) - 1);
        self.network.cut.remove(&(from, to));
        self.network.cut.remove(&(to, from));
    }

    /// The applications of an engine take this long to read their events from now on.
    pub fn lag(&mut self, engine: usize, time: Nanos) {
        self.engines[engine].read_lag = time;
    }

    /// The engine grants long messages at least so many bytes; a successor of it does not.
    pub fn grant(&mut self, engine: usize, bytes: u32) {
        self.engines[engine]
            .commands
            .push_back(Command::Grant(bytes));
        self.wake(engine, self.now);
    }

    /// All faults are over: the network is perfect, every engine runs, applications are prompt.
    pub fn heal(&mut self) {
        self.network.heal();
        for engine in 0..self.engines.len() {
            let e = &mut self.engines[engine];
            e.stopped_until = 0;
            e.read_lag = 0;
            e.host.die_after = None;
            self.wake(engine, self.now);
        }
        let now = self.now;
        self.book
            .borrow_mut()
            .checks
            .tell(|check| check.healed(now));
    }

    /// Every send has its status.
    pub fn is_settled(&self) -> bool {
        self.book.borrow().is_settled()
    }

    /// No engine holds a token, no application waits.
    pub fn holds_nothing(&self) -> bool {
        self.engines.iter().all(|e| e.host.holds_nothing())
    }
}
