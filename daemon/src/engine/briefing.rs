//! Standing by, and taking over.
//!
//! Every engine begins as a standby, the first one too: it maps what the supervisor hands over, hears of every change, and sleeps on its
//! link. Nothing of that touches what the serving engine works on. [`Standby::take_over`] is the only way to serve, and does as little as
//! it can: what can be mapped, allocated or looked up before, is.
//!
//! Cursors are not taken when memory is mapped but at the takeover: until then they are the serving engine's to move.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use anyhow::{Context, bail};
use portolan_abi::ledger::Ledger;
use portolan_abi::memory::LedgerMapping;
use portolan_abi::port::PortGeometry;
use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::ident::{NodeId, PortId};
use portolan_transport::policy::Policy;

use crate::engine_link::{EngineConfig, FromEngine, ToEngine};
use crate::xsk::{KickOutcome, MappedXsk, Xsk};

use super::Engine;
use super::busy_poll::BusyPoll;
use super::clock::{Clock, Machine};
use super::control::{Incoming, Link};
use super::counters::{CounterPage, EngineCounters};
use super::crossing::{CrossingReceiver, CrossingSender, SLOT_BYTES};
use super::death::DeathWord;
use super::encap::Encapsulation;
use super::fill_depth::FillDepth;
use super::host::EngineHost;
use super::ledger_facts::Facts;
use super::lookout::Lookout;
use super::path::{MAX_ON_VETH, MAX_STAGED, Neighbour, Path};
use super::ports::{Port, PortParts};
use super::restore;
use super::routes::{Change, Routes};
use super::suspect::Suspect;
use super::tap::Tap;
use super::wait::Waiter;
use super::warm;
use super::wedge::Wedge;

/// The number a new stream's first message gets.
const FIRST_NUMBER: u32 = 1;

/// An engine that has everything mapped and waits to take over. Until then it writes nothing that others read.
pub(super) struct Standby {
    config: EngineConfig,
    node: NodeId,
    policy: Policy,
    ledger: Ledger<'static>,
    death: DeathWord,
    socket: MappedXsk,
    encap: Encapsulation,
    neighbours: Vec<Neighbour>,
    own_wake: OwnedFd,
    waiter: Waiter,
    clock: Clock,
    routes: Routes,
    reachable: BTreeSet<u16>,
    ports: BTreeMap<u16, Port>,
    tap: Option<Box<Tap>>,
    draining: bool,
    /// [`warm::up`] was done.
    warm: bool,
}

/// The descriptors of a message, taken in the order of the contract.
struct Descriptors(std::vec::IntoIter<OwnedFd>);

impl Descriptors {
    fn take(&mut self, what: &str) -> anyhow::Result<OwnedFd> {
        self.0
            .next()
            .with_context(|| format!("the supervisor sent no descriptor for {what}"))
    }
}

fn pin(core: usize) -> anyhow::Result<()> {
    let mut cores = rustix::thread::CpuSet::new();
    if core < rustix::thread::CpuSet::MAX_CPU {
        cores.set(core);
    }
    rustix::thread::sched_setaffinity(None, &cores)
        .with_context(|| format!("core {core} cannot be used"))
}

impl Standby {
    /// Maps everything [`ToEngine::Start`] brought, and touches nothing: the engine that works here may live. Descriptors that are only
    /// needed for mapping are closed here.
    pub(super) fn begin(
        config: EngineConfig,
        fds: Vec<OwnedFd>,
        link: &Link,
    ) -> anyhow::Result<Self> {
        let node = NodeId::new(config.node).context("the node id is reserved")?;
        if config.queue >= config.queues {
            bail!("queue {} of {}", config.queue, config.queues);
        }
        if let Some(core) = config.core {
            pin(core)?;
        }
        let policy = config.transport.policy()?;
        let mut fds = Descriptors(fds.into_iter());
        let ledger_fd = fds.take("the ledger")?;
        let umem = fds.take("the UMEM")?;
        let socket = fds.take("the socket")?;

        let mapping = LedgerMapping::map(ledger_fd.as_fd(), config.ledger).context("the ledger")?;
        // Mapped for as long as the process lives.
        let ledger = Box::leak(Box::new(mapping)).ledger();
        if !ledger.is_valid() {
            bail!("the ledger is of another version or geometry");
        }
        let death = DeathWord::attach(&ledger.header().death);
        let socket = Xsk::map(socket, &umem, &config.xsk_config()?)
            .context("the AF_XDP socket cannot be mapped")?;
        let routes = Routes::new(config.node);
        let encap = Encapsulation::new(&config)
            .context("UDP needs an address and room for all queues' ports")?;

        let mut wakes = Vec::new();
        for queue in 0..config.queues {
            wakes.push(Some(fds.take(&format!("waking queue {queue}"))?));
        }
        let mut neighbours = Vec::new();
        for queue in (0..config.queues).filter(|queue| *queue != config.queue) {
            let from = fds.take("a crossing ring")?;
            let to = fds.take("a crossing ring")?;
            neighbours.push(Neighbour {
                queue,
                from: CrossingReceiver::map(from.as_fd()).context("a crossing ring")?,
                to: CrossingSender::map(to.as_fd()).context("a crossing ring")?,
                wake: (wakes.get_mut(usize::from(queue)))
                    .and_then(Option::take)
                    .context("no descriptor to wake a queue")?,
            });
        }
        let own_wake = (wakes.get_mut(usize::from(config.queue)))
            .and_then(Option::take)
            .context("no descriptor to wake this engine")?;

        let waiter = Waiter::new(config.wait, config.shares_core, config.keep_awake_ms)?;
        waiter.watch_link(link.fd())?;
        waiter.watch_bell(own_wake.as_fd())?;
        Ok(Self {
            config,
            node,
            policy,
            ledger,
            death,
            socket,
            encap,
            neighbours,
            own_wake,
            waiter,
            // Reads a file, which the sandbox forbids later.
            clock: Clock::new(Machine::new()),
            routes,
            reachable: BTreeSet::new(),
            ports: BTreeMap::new(),
            tap: None,
            draining: false,
            warm: false,
        })
    }

    /// Listens until [`ToEngine::TakeOver`], which returns true. False: the supervisor wants us to leave.
    pub(super) fn listen(&mut self, link: &mut Link) -> anyhow::Result<bool> {
        loop {
            let (message, fds) = match link.receive(true)? {
                Incoming::Message(message, fds) => (message, fds),
                Incoming::Closed => return Ok(false),
                Incoming::Nothing => continue,
            };
            match message {
                ToEngine::Route(route) => {
                    if self.routes.set(&route, &self.encap) == Change::Reachable {
                        self.reachable.insert(route.node);
                    }
                }
                ToEngine::RemoveNode { node } => {
                    self.routes.remove(node);
                    self.reachable.remove(&node);
                }
                ToEngine::OpenPort {
                    port,
                    generation,
                    geometry,
                } => self.map_port(port_parts(port, generation, geometry, fds)?)?,
                ToEngine::ClosePort {
                    port, generation, ..
                } => self.unmap_port(port, generation),
                ToEngine::Tap { id, geometry, peer } => {
                    self.tap = Tap::map(id, geometry, peer, &fds);
                }
                ToEngine::Untap => self.tap = None,
                ToEngine::StandBy => {
                    // A supervisor that comes back asks again.
                    if !std::mem::replace(&mut self.warm, true) {
                        warm::up(self.ledger);
                    }
                    link.send(&FromEngine::StandingBy);
                }
                ToEngine::Drain { on } => self.draining = on,
                ToEngine::TakeOver => return Ok(true),
                ToEngine::Stop => return Ok(false),
                ToEngine::Hang => super::serve::hang(),
                // Nobody is known yet.
                ToEngine::QueryPeers { id } => link.send(&FromEngine::Peers {
                    id,
                    peers: Vec::new(),
                }),
                // Who serves asks for it.
                ToEngine::BusyPoll { .. } => {}
                ToEngine::Start(_) => bail!("Start came twice"),
            }
        }
    }

    fn map_port(&mut self, parts: PortParts) -> anyhow::Result<()> {
        let (number, generation) = (parts.port, parts.generation);
        match self.ports.get(&number) {
            Some(port) if port.generation() == generation => return Ok(()),
            Some(_) => bail!("port {number} is opened before its predecessor was closed"),
            None => {}
        }
        let port = Port::map(parts).with_context(|| format!("port {number}"))?;
        self.waiter.watch_bell(port.engine_bell())?;
        warm::port(self.ledger, &port);
        self.ports.insert(number, port);
        Ok(())
    }

    fn unmap_port(&mut self, number: u16, generation: u32) {
        let mapped = self.ports.get(&number);
        if mapped.is_some_and(|port| port.generation() == generation)
            && let Some(port) = self.ports.remove(&number)
        {
            self.waiter.forget_bell(port.engine_bell());
        }
    }

    /// Takes over from the engine that worked here, which is dead ([`restore`]).
    pub(super) fn take_over(self) -> anyhow::Result<Engine> {
        let now = super::now();
        self.death.hold();
        let working_frame = (self.ledger.header().working_frame).load(Ordering::Acquire);
        let facts = Facts::adopt(self.ledger);
        let engine_epoch = facts.raise_engine_epoch(self.config.first_epoch);
        let xsk = (self.socket)
            .adopt(self.ledger.frames())
            .context("the AF_XDP socket cannot be taken over")?;
        let mut host = EngineHost::new(facts, self.config.default_timeout_ms);
        host.core = self.config.core;
        host.draining = self.draining;
        host.suspect_last_token();
        for (_, mut port) in self.ports {
            port.go_on();
            restore::take_up(&mut host, port);
        }
        let durable = restore::durable(&mut host);
        let config = Config {
            node: self.node,
            queue: self.config.queue,
            queues: self.config.queues,
            incarnation: self.config.incarnation,
            engine_epoch,
            cluster: self.config.cluster,
            name: self.config.name.clone(),
            max_frame: self.encap.max_frame(),
            max_peers: self.config.ledger.peers as usize,
            first_number: FIRST_NUMBER,
            policy: self.policy,
        };
        let endpoint = Endpoint::restore(config, now, &durable);
        let mut neighbours = self.neighbours;
        for neighbour in &mut neighbours {
            neighbour.from.go_on();
            neighbour.to.go_on();
        }
        let mut tap = self.tap;
        if let Some(tap) = &mut tap {
            tap.begin(engine_epoch);
        }
        let most = match self.config.veth {
            true => MAX_ON_VETH,
            false => MAX_STAGED,
        };
        let tx_chunks = xsk.layout().tx_chunks();
        let mut engine = Engine {
            path: Path {
                node: self.config.node,
                queue: self.config.queue,
                xsk,
                encap: self.encap,
                seen: Default::default(),
                routes: self.routes,
                neighbours,
                endpoint,
                host,
                counters: EngineCounters::default(),
                scratch: vec![0; SLOT_BYTES],
                down_until: 0,
                max_outstanding: most,
                full_until: 0,
                lookout: Lookout::of(most.min(tx_chunks)),
                blocked: false,
                suspect: Suspect::found(working_frame),
                wedge: Wedge::default(),
                fill_depth: FillDepth::new(now),
                last_kick: KickOutcome::Idle,
                busy_poll: BusyPoll::new(self.config.compares_polling, self.config.shares_core),
                tap,
            },
            ledger: self.ledger,
            counter_page: CounterPage::adopt(self.ledger),
            waiter: self.waiter,
            clock: self.clock,
            _own_wake: self.own_wake,
            next_control: 0,
            next_counters: 0,
            kept: false,
        };
        let max_frame = engine.path.encap.max_frame();
        for node in self.reachable.into_iter().filter_map(NodeId::new) {
            engine.path.endpoint.set_node(now, node, max_frame);
        }
        let numbers: Vec<u16> = engine.path.host.ports.iter().map(|p| p.number()).collect();
        for number in numbers {
            engine.path.endpoint.port_opened(PortId(number));
        }
        // Whoever slept through the takeover looks again.
        for port in engine.path.host.ports.iter() {
            port.wake();
        }
        Ok(engine)
    }
}

/// A port from its message.
pub(super) fn port_parts(
    port: u16,
    generation: u32,
    geometry: PortGeometry,
    fds: Vec<OwnedFd>,
) -> anyhow::Result<PortParts> {
    let mut fds = Descriptors(fds.into_iter());
    Ok(PortParts {
        port,
        generation,
        geometry,
        client: fds.take("a client half")?,
        engine: fds.take("an engine half")?,
        event_bell: fds.take("an event doorbell")?,
        engine_bell: fds.take("an engine doorbell")?,
    })
}

/// Opens a port and watches its doorbell. Idempotent. One that the ledger knows was closed for cause by a predecessor that could not say
/// so: it is restored to be closed.
pub(super) fn open_port(
    host: &mut EngineHost,
    waiter: &Waiter,
    parts: PortParts,
) -> anyhow::Result<()> {
    let (number, generation) = (parts.port, parts.generation);
    match host.ports.get(number) {
        Some(port) if port.generation() == generation => return Ok(()),
        Some(_) => bail!("port {number} is opened before its predecessor was closed"),
        None => {}
    }
    restore::take_up_parts(host, parts).with_context(|| format!("port {number}"))?;
    if let Some(port) = host.ports.get(number) {
        waiter.watch_bell(port.engine_bell())?;
    }
    Ok(())
}
