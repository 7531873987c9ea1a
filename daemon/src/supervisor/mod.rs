//! The supervisor: owns what must survive an engine, and looks after the processes that use it.
//!
//! One thread, one epoll set, no blocking call after start-up but fork. Everything that can happen is a [`poll::Source`] or a
//! [`poll::Timer`]; each is handled by the file named after the noun it is about:
//!
//! | file | noun |
//! |---|---|
//! | `config/` | the configuration, its checks, the access list, quotas, the credit sum |
//! | `leisure.rs` | making way for others on the way up |
//! | `foundation.rs` | what the node stands on, made or gone on with |
//! | `startup.rs` | from a configuration to a running supervisor, with each failure in one line |
//! | `engines.rs`, `succession.rs`, `engine_links.rs`, `stopping.rs` | engine processes, who serves next, what is said, how they leave |
//! | `watchdog/` | who notices that an engine is dead, or hangs |
//! | `escalation.rs`, `restarts.rs`, `recovery.rs` | what is done about deaths, and what is remembered |
//! | `reset.rs`, `sockets.rs` | another socket for a queue |
//! | `ports.rs`, `ports_closing.rs`, `memory.rs` | ports, and all memory that outlives an engine |
//! | `clients.rs`, `requests.rs`, `audit.rs` | connections, what they ask for, and who was refused |
//! | `captures.rs` | who captures frames |
//! | `documents.rs`, `peers.rs` | the reports |
//! | `events.rs`, `peer_events.rs` | what happened, for people |
//! | `statistics.rs`, `histogram.rs`, `exporter_process.rs` | what is counted, and the child that tells Prometheus |
//! | `neighbours.rs`, `netlink.rs` | which MAC a peer has |
//! | `interface.rs`, `interface_events.rs` | what becomes of the interface |
//! | `steering.rs` | the XDP program |
//! | `busy_poll.rs`, `napi.rs`, `gro.rs` | engines that go round for frames themselves |
//! | `cpu_latency.rs` | how long idle processors may take to wake |
//! | `keep_awake.rs` | processors of engines that do not sleep for a while after a message |
//! | `reload.rs`, `alive.rs` | the configuration read again; the service manager's watchdog |
//! | `discovery/`, `drain.rs`, `notes.rs` | who else is there; leaving without loss; what a successor must know of both |
//! | `store/` | what survives the supervisor, and going on with it |
//! | `spawn/`, `peer_credentials.rs`, `leisure/entry.rs` | the `unsafe` islands |

mod alive;
mod audit;
mod busy_poll;
mod captures;
pub mod clients;
pub mod config;
mod cpu_latency;
pub mod discovery;
mod documents;
mod drain;
mod engine_links;
pub mod engines;
pub mod escalation;
pub mod events;
mod exporter_process;
mod foundation;
mod gro;
pub mod histogram;
mod interface;
mod interface_events;
mod keep_awake;
pub mod kernel;
mod leisure;
pub mod memory;
mod napi;
mod neighbours;
pub mod netlink;
mod notes;
pub mod packet;
mod peer_credentials;
mod peer_events;
mod peers;
pub mod poll;
pub mod ports;
mod ports_closing;
pub(crate) mod privileges;
pub mod recovery;
pub mod reload;
mod requests;
mod reset;
pub mod restarts;
mod service_process;
pub mod sockets;
pub mod spawn;
mod startup;
mod statistics;
pub mod steering;
mod stopping;
pub mod store;
mod succession;
pub mod surroundings;
pub mod watchdog;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

pub use leisure::Leisure;
pub(crate) use startup::memlock_needed;
pub use startup::{ForeignStore, check, run};

use audit::Audit;
use captures::Captures;
use clients::Clients;
use config::Config;
use cpu_latency::CpuLatency;
use discovery::Discovery;
use engines::{Engine, EngineState};
use events::{Event, Events, Kind};
use exporter_process::Exporter;
use gro::Gro;
use interface::Interface;
use interface_events::Looks;
use keep_awake::KeepAwake;
use kernel::Support;
use memory::{Crossings, QueueMemory};
use neighbours::Neighbours;
use netlink::LinkWatch;
use peer_events::PeersSeen;
use peers::PeersRound;
use poll::{EventFlags, Poll, Source, Timer};
use ports::Ports;
use recovery::Cause;
use reload::Reload;
use service_process::Service;
use sockets::Sockets;
use spawn::Launcher;
use statistics::Statistics;
use steering::Steering;
use store::Store;
use store::handover::Probe;
use store::predecessor::Leftovers;
use watchdog::Watchdog;

use crate::engine_link::{Route, ToEngine};

/// Engines leave within this when asked to.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// What a supervisor is made of.
pub struct Parts {
    /// The configuration.
    pub config: Config,
    /// The node's incarnation, as in every ledger.
    pub incarnation: u64,
    /// Longest packet; memory is laid out for it.
    pub mtu: u16,
    /// What the kernel can do.
    pub kernel: Support,
    /// Per engine, in order.
    pub queues: Vec<QueueMemory>,
    /// Between engines.
    pub crossings: Crossings,
    /// A listening, non-blocking SOCK_SEQPACKET socket.
    pub listener: OwnedFd,
    /// Readable when the supervisor is to stop; a second byte means at once.
    pub stop: OwnedFd,
    /// Starts processes.
    pub launcher: Box<dyn Launcher>,
    /// Makes sockets.
    pub sockets: Box<dyn Sockets>,
    /// Steers frames.
    pub steering: Box<dyn Steering>,
    /// Resolves MACs that are not configured.
    pub resolve_neighbours: bool,
    /// Follows what becomes of the interface.
    pub watch_interface: bool,
    /// What survives us.
    pub store: Store,
    /// Readable when the supervisor is to leave everything to its successor.
    pub leave: Option<OwnedFd>,
    /// Which executable this is.
    pub build: u32,
    /// How it is to read its configuration again.
    pub reload: Option<Reload>,
}

/// How a supervisor's run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The node is down: no engine runs, no port is open.
    Stopped,
    /// The node is up, without a supervisor: its service manager has everything for the next one.
    Left,
}

/// The supervisor of one node.
pub struct Supervisor {
    config: Config,
    incarnation: u64,
    mtu: u16,
    kernel: Support,
    started: Instant,
    stopping: bool,
    poll: Poll,
    listener: OwnedFd,
    stop: OwnedFd,
    launcher: Box<dyn Launcher>,
    sockets: Box<dyn Sockets>,
    steering: Box<dyn Steering>,
    engines: Vec<Engine>,
    watchdog: Watchdog,
    warned_of_priority: bool,
    crossings: Crossings,
    routes: BTreeMap<u16, Route>,
    neighbours: Option<Neighbours>,
    interface: Interface,
    links: Option<LinkWatch>,
    looks: Looks,
    gro: Gro,
    cpu_latency: CpuLatency,
    keep_awake: KeepAwake,
    ports: Ports,
    clients: Clients,
    events: Events,
    statistics: Statistics,
    exporter: Exporter,
    peers_seen: PeersSeen,
    audit: Audit,
    captures: Captures,
    service: Service,
    peers_round: PeersRound,
    link_buffer: Vec<u8>,
    store: Store,
    leave: Option<OwnedFd>,
    left: bool,
    build: u32,
    reload: Option<Reload>,
    resolves_neighbours: bool,
    sign_of_life_every: Option<Duration>,
    /// Processes to be replaced when a standby is ready, and why: queue, launch.
    outdated: BTreeMap<(u8, u32), Cause>,
    /// A build that may replace this one.
    upgrade: Option<Probe>,
    /// Given up for a moment when descriptors run out.
    reserve: Option<OwnedFd>,
    /// No new ports, no new sends.
    draining: bool,
    discovery: Discovery,
}

impl Supervisor {
    /// Puts a supervisor together. Nothing runs yet.
    ///
    /// # Errors
    /// The system's.
    pub fn new(parts: Parts) -> io::Result<Self> {
        let poll = Poll::new()?;
        poll.add(&parts.listener, Source::Listener, EventFlags::IN)?;
        poll.add(&parts.stop, Source::Stop, EventFlags::IN)?;
        if let Some(leave) = &parts.leave {
            poll.add(leave, Source::Leave, EventFlags::IN)?;
        }
        if let Some(reload) = &parts.reload {
            poll.add(&reload.signal, Source::Reload, EventFlags::IN)?;
        }
        let neighbours = if parts.resolve_neighbours {
            Neighbours::new(&parts.config)?
        } else {
            None
        };
        if let Some(neighbours) = &neighbours {
            poll.add(neighbours.watch(), Source::Neighbours, EventFlags::IN)?;
        }
        let links = parts.watch_interface.then(LinkWatch::new).transpose()?;
        if let Some(links) = &links {
            poll.add(links, Source::Links, EventFlags::IN)?;
        }
        let discovery = Discovery::new(&parts.config, parts.incarnation);
        for socket in discovery.sockets() {
            poll.add(socket, Source::Discovery, EventFlags::IN)?;
        }
        let ledgers = parts.queues.iter().map(QueueMemory::map_again);
        let recovery = parts.config.recovery;
        let bounds = watchdog::judge::Bounds {
            hang_after_ns: recovery.hang_after_us * 1000,
            stuck_after_ns: recovery.stuck_after_us * 1000,
            challenge: recovery.challenge,
        };
        let watchdog = Watchdog::start(ledgers.collect::<io::Result<_>>()?, bounds)?;
        poll.add(watchdog.bell(), Source::Watchdog, EventFlags::IN)?;
        let queues = parts.config.queues.iter().zip(parts.queues);
        let bounds = recovery.escalation;
        let engines = (0..)
            .zip(queues)
            .map(|(index, (nic_queue, memory))| Engine::new(index, *nic_queue, memory, bounds))
            .collect();
        let interface = parts.config.interface_facts.clone();
        let cpu_latency = CpuLatency::bounded(parts.config.cpu_latency_us);
        let keep_awake = KeepAwake::new(&parts.config);
        Ok(Self {
            routes: routes(&parts.config),
            config: parts.config,
            incarnation: parts.incarnation,
            mtu: parts.mtu,
            kernel: parts.kernel,
            started: Instant::now(),
            stopping: false,
            poll,
            listener: parts.listener,
            stop: parts.stop,
            launcher: parts.launcher,
            sockets: parts.sockets,
            steering: parts.steering,
            engines,
            watchdog,
            warned_of_priority: false,
            crossings: parts.crossings,
            neighbours,
            interface: Interface::new(&interface, parts.mtu),
            links,
            looks: Looks::default(),
            gro: Gro::default(),
            cpu_latency,
            keep_awake,
            ports: Ports::default(),
            clients: Clients::default(),
            events: Events::default(),
            statistics: Statistics::default(),
            exporter: Exporter::default(),
            peers_seen: PeersSeen::default(),
            audit: Audit::default(),
            captures: Captures::default(),
            service: Service::default(),
            peers_round: PeersRound::default(),
            link_buffer: Vec::new(),
            store: parts.store,
            leave: parts.leave,
            left: false,
            build: parts.build,
            reload: parts.reload,
            resolves_neighbours: parts.resolve_neighbours,
            sign_of_life_every: alive::every(),
            outdated: BTreeMap::new(),
            upgrade: None,
            reserve: Some(memory::eventfd()?),
            draining: false,
            discovery,
        })
    }

    /// Runs until asked to stop and everything has stopped. `settled` is called when everything that was going on is looked after.
    ///
    /// # Errors
    /// The system's: the epoll set failed.
    pub fn run(mut self, settled: impl FnOnce()) -> io::Result<Ended> {
        let now = Instant::now();
        let up = Event::new(Kind::NodeUp, "the supervisor serves").field("node", self.config.node);
        self.events.record(up);
        self.let_loose();
        self.look_after_gro(now);
        self.look_after_processors(now);
        self.look_after_neighbours(now);
        self.look_at_interface(now);
        self.announce(now);
        for index in 0..self.engines.len() {
            self.go_on(index, now);
        }
        settled();
        self.start_service(now);
        self.give_sign_of_life(now);
        self.look_at_peers(now);
        self.schedule_exporter(now);
        while !self.has_stopped() {
            let happened = self.poll.wait()?;
            let begun = Instant::now();
            for (source, flags) in happened {
                self.on_event(source, flags);
            }
            let now = Instant::now();
            while let Some(timer) = self.poll.due(now) {
                self.on_timer(timer, now);
            }
            if self.events.news() {
                self.tell_followers();
            }
            self.statistics.turn(begun.elapsed());
        }
        self.let_processors_sleep();
        if self.left && !self.stopping {
            self.leave_polling();
            tracing::info!("left: the service manager has everything for the next one");
            return Ok(Ended::Left);
        }
        self.abandon_ports();
        self.end_gro();
        self.store.clear();
        tracing::info!("stopped");
        Ok(Ended::Stopped)
    }

    /// Goes on with what a predecessor left; to be called before [`Self::run`].
    pub fn succeed(&mut self, left: Leftovers) {
        self.adopt(left);
    }

    /// Tells the service manager that we serve, and who asked for this build that it does.
    pub fn ready(&mut self, told: Option<(u64, u64)>) {
        self.store.ready();
        if let Some((id, number)) = told {
            if let Some(client) = self.clients.get_mut(id) {
                client.asked = Some(number).filter(|number| *number > 0);
            }
            let done = portolan_abi::control::Response::Done;
            self.finish(id, done, Vec::new());
        }
    }

    /// Something happened.
    fn on_event(&mut self, source: Source, flags: EventFlags) {
        let now = Instant::now();
        // Before anybody who was promoted is heard.
        self.heed_watchdog(now);
        match source {
            Source::Watchdog => self.watchdog.quiet(),
            Source::Stop => self.on_stop(now),
            Source::Leave => self.on_leave(),
            Source::Upgrade => self.on_probed(),
            Source::Listener => self.on_listener(),
            Source::Link(queue, launch) => self.on_link(queue, launch, flags),
            Source::EngineExit(queue, launch) => self.on_engine_exit(queue, launch, now),
            Source::ServiceExit(launch) => self.on_service_exit(launch, now),
            Source::ExporterExit(launch) => self.on_exporter_exit(launch, now),
            Source::Neighbours => self.on_neighbours(),
            Source::Links => self.on_links(now),
            Source::Reload => self.on_reload(now),
            Source::Discovery => self.on_discovery(now),
            Source::Client(id) => self.on_client(id, flags),
        }
    }

    fn on_timer(&mut self, timer: Timer, now: Instant) {
        match timer {
            Timer::Client(id) => self.on_client_timer(id, now),
            Timer::HeldBack(id) => self.on_held_back_timer(id),
            Timer::Engine(queue) => self.on_engine_timer(queue, now),
            Timer::Service => self.start_service(now),
            Timer::Exporter => self.start_exporter(now),
            Timer::PeerEvents => self.look_at_peers(now),
            Timer::Peers => self.on_peers_timer(now),
            Timer::Neighbours => self.look_after_neighbours(now),
            Timer::Errand(queue) => self.on_errand_timer(queue, now),
            Timer::Gro => self.on_gro_timer(now),
            Timer::KeepAwake => self.on_keep_awake_timer(now),
            Timer::Interface => self.on_interface_timer(now),
            Timer::Discovery => self.announce(now),
            Timer::Stop => self.kill_engines(),
            Timer::Alive => self.give_sign_of_life(now),
        }
    }

    /// Asked to stop: ports close, engines leave, and who does not leave in time, or is asked again, is killed.
    fn on_stop(&mut self, now: Instant) {
        let mut bytes = [0; 64];
        // Only how often we were asked matters.
        let _ = rustix::io::read(&self.stop, &mut bytes);
        if self.stopping {
            self.kill_engines();
            return;
        }
        let stopping = Event::new(Kind::NodeStopping, "stopping");
        self.events.record(stopping);
        self.stopping = true;
        self.poll.remove(&self.listener);
        self.close_all_ports();
        self.stop_engines();
        self.stop_service();
        self.stop_exporter();
        self.poll.set_timer(now + STOP_WITHIN, Timer::Stop);
    }

    /// Told to make room for a successor, or to stop, and only who keeps our descriptors knows which. So nothing is ended here.
    fn on_leave(&mut self) {
        if let Some(leave) = &self.leave {
            // Only that we were told matters.
            let _ = rustix::io::read(leave, &mut [0; 64]);
        }
        if self.stopping {
            self.kill_engines();
        } else {
            self.left = true;
        }
    }

    fn has_stopped(&self) -> bool {
        if self.left && !self.stopping {
            return true;
        }
        let gone = |engine: &Engine| engine.state == EngineState::Stopped;
        let children = self.service_is_gone() && self.exporter.is_gone();
        self.stopping && children && self.engines.iter().all(gone)
    }

    /// A route changed: every engine is told.
    fn publish_route(&mut self, route: Route) {
        tracing::info!(
            node = route.node,
            mac = route.mac.as_ref().map(format_mac),
            "route"
        );
        self.routes.insert(route.node, route.clone());
        for index in 0..self.engines.len() {
            self.tell(index, &ToEngine::Route(route.clone()), Vec::new());
        }
    }
}

/// The routes as configured: this very node and its peers.
fn routes(config: &Config) -> BTreeMap<u16, Route> {
    let own = Route {
        node: config.node,
        name: config.name.clone(),
        mac: Some(config.interface_facts.mac),
        address: config.address,
    };
    let peers = config.peers.iter().map(|peer| Route {
        node: peer.id,
        name: peer.name.clone(),
        mac: peer.mac,
        address: peer.address,
    });
    peers
        .chain([own])
        .map(|route| (route.node, route))
        .collect()
}

/// As people write it.
pub(crate) fn format_mac(mac: &[u8; 6]) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}
