//! What the supervisor hands over at the start, and the takeover itself, up to the first loop.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, bail};
use portolan_abi::ledger::Ledger;
use portolan_abi::memory::LedgerMapping;
use portolan_abi::port::PortGeometry;
use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::ident::{NodeId, PortId};

use crate::engine_link::{EngineConfig, FromEngine, Route, ToEngine};
use crate::xsk::Xsk;

use super::Engine;
use super::control::{Incoming, Link};
use super::counters::{CounterPage, EngineCounters};
use super::crossing::{CrossingReceiver, CrossingSender, SLOT_BYTES};
use super::encap::Encapsulation;
use super::host::EngineHost;
use super::ledger_facts::Facts;
use super::path::{Neighbour, Path};
use super::ports::PortParts;
use super::restore;
use super::routes::Routes;
use super::wait::Waiter;

/// The number a new stream's first message gets.
const FIRST_NUMBER: u32 = 1;

/// An engine that has its memory but does not run yet.
pub(super) struct Briefing {
    config: EngineConfig,
    node: NodeId,
    engine_epoch: u32,
    ledger: Ledger<'static>,
    xsk: Xsk<'static>,
    encap: Encapsulation,
    host: EngineHost,
    neighbours: Vec<Neighbour>,
    own_wake: OwnedFd,
    waiter: Waiter,
    routes: Vec<Route>,
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

impl Briefing {
    /// Maps everything [`ToEngine::Start`] brought and takes the socket over. The previous engine is dead. Descriptors that are only
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
        let facts = Facts::adopt(ledger);
        let engine_epoch = facts.raise_engine_epoch();
        let xsk = Xsk::adopt(socket, &umem, ledger.frames(), &config.xsk_config()?)
            .context("the AF_XDP socket cannot be taken over")?;
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

        let waiter = Waiter::new(config.wait)?;
        waiter.watch_link(link.fd())?;
        waiter.watch_socket(xsk.fd())?;
        waiter.watch_bell(own_wake.as_fd())?;
        let host = EngineHost::new(facts, config.default_timeout_ms);
        Ok(Self {
            config,
            node,
            engine_epoch,
            ledger,
            xsk,
            encap,
            host,
            neighbours,
            own_wake,
            waiter,
            routes: Vec::new(),
        })
    }

    /// Listens until [`ToEngine::Restored`], then builds the engine. `None`: the supervisor wants us to leave.
    pub(super) fn complete(mut self, link: &mut Link) -> anyhow::Result<Option<Engine>> {
        loop {
            let (message, fds) = match link.receive(true)? {
                Incoming::Message(message, fds) => (message, fds),
                Incoming::Closed => return Ok(None),
                Incoming::Nothing => continue,
            };
            match message {
                ToEngine::Route(route) => self.routes.push(route),
                ToEngine::RemoveNode { node } => self.routes.retain(|route| route.node != node),
                ToEngine::OpenPort {
                    port,
                    generation,
                    geometry,
                    restore,
                } => {
                    let parts = port_parts(port, generation, geometry, fds)?;
                    open_port(&mut self.host, &self.waiter, parts, restore)?;
                    link.send(&FromEngine::PortOpened { port, generation });
                }
                ToEngine::Restored => return self.build().map(Some),
                ToEngine::Stop => return Ok(None),
                ToEngine::Hang => super::serve::hang(),
                // Neither is there yet: the engine is asked again once it runs, or the port was never told to us.
                ToEngine::QueryPeers { id } => link.send(&FromEngine::Peers {
                    id,
                    peers: Vec::new(),
                }),
                ToEngine::ClosePort {
                    port,
                    generation,
                    reason,
                } => {
                    let served = self.host.ports.get(port);
                    if let Some(served) = served.filter(|p| p.generation() == generation) {
                        self.waiter.forget_bell(served.engine_bell());
                        served.close(reason);
                        self.host.ports.remove(port);
                    }
                    link.send(&FromEngine::PortClosed {
                        port,
                        generation,
                        reason,
                    });
                }
                ToEngine::Start(_) => bail!("Start came twice"),
            }
        }
    }

    fn build(mut self) -> anyhow::Result<Engine> {
        let now = super::now();
        let durable = restore::durable(&mut self.host);
        let config = Config {
            node: self.node,
            queue: self.config.queue,
            queues: self.config.queues,
            incarnation: self.config.incarnation,
            engine_epoch: self.engine_epoch,
            cluster: self.config.cluster,
            name: self.config.name.clone(),
            max_frame: self.encap.max_frame(),
            max_peers: self.config.ledger.peers as usize,
            first_number: FIRST_NUMBER,
            policy: self.config.transport.policy()?,
        };
        let endpoint = Endpoint::restore(config, now, &durable);
        let mut engine = Engine {
            path: Path {
                node: self.config.node,
                queue: self.config.queue,
                xsk: self.xsk,
                encap: self.encap,
                routes: Routes::new(self.config.node),
                neighbours: self.neighbours,
                endpoint,
                host: self.host,
                counters: EngineCounters::default(),
                scratch: vec![0; SLOT_BYTES],
                down_until: 0,
                blocked: false,
            },
            ledger: self.ledger,
            counter_page: CounterPage::adopt(self.ledger),
            waiter: self.waiter,
            _own_wake: self.own_wake,
            next_control: 0,
            next_counters: 0,
        };
        for route in &self.routes {
            engine.set_route(now, route);
        }
        let numbers: Vec<u16> = engine.path.host.ports.iter().map(|p| p.number()).collect();
        for number in numbers {
            engine.path.endpoint.port_opened(PortId(number));
        }
        // Whoever slept through the takeover looks again.
        for port in engine.path.host.ports.iter() {
            port.ring();
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

/// Opens or restores a port and watches its doorbell. Idempotent.
pub(super) fn open_port(
    host: &mut EngineHost,
    waiter: &Waiter,
    parts: PortParts,
    restore: bool,
) -> anyhow::Result<()> {
    let (number, generation) = (parts.port, parts.generation);
    match host.ports.get(number) {
        Some(port) if port.generation() == generation => return Ok(()),
        Some(_) => bail!("port {number} is opened before its predecessor was closed"),
        None => {}
    }
    let known = host.knows(number, generation);
    if restore && known {
        restore::restore_port(host, parts)
    } else {
        host.open_fresh(parts)
    }
    .with_context(|| format!("port {number}"))?;
    if let Some(port) = host.ports.get(number) {
        waiter.watch_bell(port.engine_bell())?;
    }
    Ok(())
}
