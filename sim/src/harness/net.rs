//! [`Net`]: engines, the network between them and its faults, under one virtual clock and one seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::host::SendStatus;
use portolan_transport::ident::{Nanos, NodeId, Peer, PortId, Priority, SendId, StreamKey};
use portolan_transport::policy::Policy;

use super::book::{Book, Route, SharedBook};
use super::host::{Event, TestHost};
use super::rng::Rng;

/// A frame of n bytes keeps a 10 Gbit/s wire busy for 4 n / 5 ns.
pub(super) fn wire_time(bytes: usize) -> Nanos {
    20 + bytes as Nanos * 4 / 5
}

/// How far ahead of the wire an engine fills its transmit ring.
pub(super) const RING_TIME: Nanos = 10 * US;

pub const US: Nanos = 1_000;
pub const MS: Nanos = 1_000_000;
pub const SECOND: Nanos = 1_000_000_000;

/// What the network does to frames; chances are per thousand.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub loss: u32,
    pub duplicate: u32,
    pub corrupt: u32,
    /// Frames that take up to `late_by` longer.
    pub late: u32,
    pub late_by: Nanos,
    pub delay: Nanos,
}

impl Faults {
    pub const NONE: Self = Self {
        loss: 0,
        duplicate: 0,
        corrupt: 0,
        late: 0,
        late_by: 0,
        delay: 5 * US,
    };

    pub fn loss(permille: u32) -> Self {
        Self {
            loss: permille,
            ..Self::NONE
        }
    }

    /// Everything at once.
    pub fn wild() -> Self {
        Self {
            loss: 50,
            duplicate: 50,
            corrupt: 30,
            late: 100,
            late_by: 300 * US,
            delay: 10 * US,
        }
    }
}

/// What the application does after a send that was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    Resume,
    Drop,
    Nothing,
}

pub(super) struct Engine {
    pub(super) config: Config,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) host: TestHost,
    /// Frames that wait for a dead engine's successor, as they would in its receive ring.
    pub(super) parked: Vec<Vec<u8>>,
    /// Until when its transmit ring keeps the wire busy.
    pub(super) busy_until: Nanos,
    /// It has more to send than its transmit ring takes.
    pub(super) blocked: bool,
    /// When the next engine takes over.
    pub(super) reborn: Option<Nanos>,
}

/// A cluster in a test.
pub struct Net {
    pub now: Nanos,
    pub rng: Rng,
    pub book: SharedBook,
    pub faults: Faults,
    pub policy: Policy,
    pub max_frame: u16,
    /// Receive buffers' size: frames arrive cut into pieces of it.
    pub segment: usize,
    pub after_failure: AfterFailure,
    /// Consumed receive tokens are provided again, until told otherwise.
    pub provide_again: bool,
    pub first_number: u32,
    pub(super) engines: BTreeMap<Peer, Engine>,
    pub(super) queues: BTreeMap<NodeId, u8>,
    pub(super) flights: BinaryHeap<Reverse<Flight>>,
    pub(super) sequence: u64,
    /// Directed pairs of nodes that do not hear each other.
    pub(super) cut: BTreeSet<(NodeId, NodeId)>,
    /// Every event the applications read.
    pub events: Vec<(NodeId, Event)>,
    /// Frames recorded by [`Net::record`].
    pub(super) recorded: Option<Vec<(Peer, Vec<u8>)>>,
    pub frames: u64,
    /// Prints every frame sent.
    pub trace: bool,
    pub deaths: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Flight {
    pub(super) at: Nanos,
    pub(super) sequence: u64,
    pub(super) from: NodeId,
    pub(super) to: (NodeId, u8),
    pub(super) frame: Vec<u8>,
}

pub fn node(id: u16) -> NodeId {
    NodeId::new(id).expect("a node id")
}

impl Net {
    /// A cluster with nodes `1..=nodes`, each of `queues` engines that know one another. Configure it before the first frame.
    pub fn new(seed: u64, nodes: u16, queues: u8) -> Self {
        Self::with_policy(seed, nodes, queues, Policy::default())
    }

    pub fn with_policy(seed: u64, nodes: u16, queues: u8, policy: Policy) -> Self {
        let mut net = Self {
            now: 1 + Rng::new(seed).below(SECOND),
            rng: Rng::new(seed),
            book: Book::shared(),
            faults: Faults::NONE,
            policy,
            max_frame: 1458,
            segment: usize::MAX,
            after_failure: AfterFailure::Resume,
            provide_again: true,
            first_number: u32::MAX - 20,
            engines: BTreeMap::new(),
            queues: BTreeMap::new(),
            flights: BinaryHeap::new(),
            sequence: 0,
            cut: BTreeSet::new(),
            events: Vec::new(),
            recorded: None,
            frames: 0,
            trace: std::env::var_os("PORTOLAN_TRACE").is_some(),
            deaths: 0,
        };
        for id in 1..=nodes {
            net.boot(node(id), queues);
        }
        net
    }

    /// (Re)starts a node: a new incarnation with an empty ledger and closed ports.
    pub fn boot(&mut self, id: NodeId, queues: u8) {
        self.book.borrow_mut().abandon(id);
        self.queues.insert(id, queues);
        self.engines.retain(|peer, _| peer.node != id);
        let incarnation = self.rng.u64();
        for queue in 0..queues {
            let config = Config {
                node: id,
                queue,
                queues,
                incarnation,
                engine_epoch: u32::MAX - 1,
                cluster: 0xc1,
                name: format!("n{}", id.0),
                max_frame: self.max_frame,
                max_peers: 64,
                first_number: self.first_number,
                policy: self.policy,
            };
            let host = TestHost::new(id, self.book.clone(), u32::MAX - 3);
            let endpoint = Some(Endpoint::new(config.clone(), self.now));
            let engine = Engine {
                config,
                endpoint,
                host,
                parked: Vec::new(),
                busy_until: 0,
                blocked: false,
                reborn: None,
            };
            self.engines.insert(Peer { node: id, queue }, engine);
        }
        let nodes: Vec<NodeId> = self.queues.keys().copied().collect();
        for (peer, engine) in &mut self.engines {
            let Some(endpoint) = &mut engine.endpoint else {
                continue;
            };
            if peer.node == id {
                nodes
                    .iter()
                    .for_each(|other| endpoint.set_node(self.now, *other, self.max_frame));
            } else if engine.config.node != id {
                endpoint.set_node(self.now, id, self.max_frame);
            }
        }
    }

    /// The engine that owns a node's port.
    pub fn owner(&self, id: NodeId, port: PortId) -> Peer {
        Peer {
            node: id,
            queue: (port.0 % u16::from(self.queues[&id])) as u8,
        }
    }

    pub fn host(&mut self, peer: Peer) -> &mut TestHost {
        &mut self.engines.get_mut(&peer).expect("an engine").host
    }

    pub fn is_alive(&self, peer: Peer) -> bool {
        self.engines[&peer].endpoint.is_some()
    }

    pub fn endpoint(&self, peer: Peer) -> &Endpoint {
        self.engines[&peer]
            .endpoint
            .as_ref()
            .expect("a living engine")
    }

    pub fn peers(&self) -> Vec<Peer> {
        self.engines.keys().copied().collect()
    }

    /// Adds up a counter over all living engines.
    pub fn counter(&self, name: &str) -> u64 {
        let endpoints = self.engines.values().filter_map(|e| e.endpoint.as_ref());
        let values = endpoints.map(|e| {
            e.counters()
                .iter()
                .find(|c| c.0 == name)
                .unwrap_or_else(|| panic!("no counter {name}"))
                .2
        });
        values.sum()
    }

    // ---- what applications do ----

    /// Opens a port with `tokens` receive tokens of `len` bytes at each priority.
    pub fn open(&mut self, id: NodeId, port: u16, tokens: usize, len: u32) {
        let port = PortId(port);
        let owner = self.owner(id, port);
        self.host(owner).open_port(port, len);
        self.with(owner, |_, endpoint, _| endpoint.port_opened(port));
        for _ in 0..tokens {
            self.provide(id, port, Priority::Low, len);
            self.provide(id, port, Priority::High, len);
        }
    }

    pub fn close(&mut self, id: NodeId, port: u16) {
        let port = PortId(port);
        let owner = self.owner(id, port);
        self.host(owner).close_port(port);
        self.with(owner, |now, endpoint, host| {
            endpoint.port_closed(now, port, host)
        });
    }

    pub fn provide(&mut self, id: NodeId, port: PortId, priority: Priority, len: u32) {
        let owner = self.owner(id, port);
        self.host(owner).provide(port, priority, len);
        self.with(owner, |now, endpoint, _| {
            endpoint.buffer_provided(now, port)
        });
    }

    pub fn send(&mut self, from: (u16, u16), to: (u16, u16), len: u32) -> u64 {
        self.send_with(from, to, Priority::Low, len, u64::MAX).0
    }

    pub fn send_many(
        &mut self,
        from: (u16, u16),
        to: (u16, u16),
        len: u32,
        count: usize,
    ) -> Vec<u64> {
        (0..count).map(|_| self.send(from, to, len)).collect()
    }

    /// Posts a send; the engine finds it at its next turn.
    pub fn send_with(
        &mut self,
        from: (u16, u16),
        to: (u16, u16),
        priority: Priority,
        len: u32,
        deadline: Nanos,
    ) -> (u64, SendId) {
        let end = |(id, port): (u16, u16)| (node(id), PortId(port));
        let route = Route {
            from: end(from),
            to: end(to),
            priority,
        };
        let owner = self.owner(route.from.0, route.from.1);
        self.host(owner).post(route, len, deadline)
    }

    pub fn cancel(&mut self, id: NodeId, send: SendId) {
        self.with(self.owner(id, send.port), |now, endpoint, host| {
            if let Some(stream) = host.stream_of(send) {
                endpoint.cancel(now, send, stream);
            }
        });
    }

    pub fn resume_sending(&mut self, id: NodeId, stream: StreamKey) {
        self.with(self.owner(id, stream.local), |now, endpoint, _| {
            endpoint.resume_sending(now, stream)
        });
    }

    pub fn drop_sends(&mut self, id: NodeId, stream: StreamKey) {
        self.with(self.owner(id, stream.local), |now, endpoint, host| {
            endpoint.drop_sends(now, stream, host)
        });
    }

    pub fn status(&self, message: u64) -> Option<SendStatus> {
        self.book.borrow().status(message)
    }

    // ---- what goes wrong ----

    /// Frames to a node may be this long from now on, as far as its peers know.
    pub fn path_to(&mut self, id: NodeId, max_frame: u16) {
        for peer in self.peers() {
            self.with(peer, |now, endpoint, _| {
                endpoint.set_node(now, id, max_frame);
            });
        }
    }

    /// Cuts or mends the link between two nodes, both ways.
    pub fn link(&mut self, a: NodeId, b: NodeId, up: bool) {
        for pair in [(a, b), (b, a)] {
            if up {
                self.cut.remove(&pair)
            } else {
                self.cut.insert(pair)
            };
        }
    }

    /// The engine dies now; the next one takes over after `pause`.
    pub fn kill(&mut self, peer: Peer, pause: Nanos) {
        let now = self.now;
        let engine = self.engines.get_mut(&peer).expect("an engine");
        if engine.endpoint.take().is_some() {
            engine.reborn = Some(now + pause);
            self.deaths += 1;
        }
    }

    /// The engine dies in the middle of its n-th store from now.
    pub fn kill_at_step(&mut self, peer: Peer, steps: u64) {
        self.host(peer).die_after = Some(steps.max(1));
    }

    /// Starts or stops recording every frame sent; returns what was recorded.
    pub fn record(&mut self, on: bool) -> Vec<(Peer, Vec<u8>)> {
        std::mem::replace(&mut self.recorded, on.then(Vec::new)).unwrap_or_default()
    }

    /// A frame from nowhere.
    pub fn inject(&mut self, to: Peer, frame: Vec<u8>) {
        self.fly(self.now, node(u16::MAX - 1), to, frame);
    }
}
