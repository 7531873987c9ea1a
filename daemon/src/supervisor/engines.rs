//! The engines: started, told what to serve, fenced when they misbehave, replaced when they die.
//!
//! | state | link | leaves it by |
//! |---|---|---|
//! | Waiting until t | none | the timer → Starting |
//! | Starting, ready by t | yes | `Ready` → Running; the timer → fence; death → Waiting |
//! | Running | yes | death → Waiting; a link that ends or makes no sense → fence |
//! | Stopping | yes | death → Stopped |
//!
//! *Fence* is SIGKILL; what follows happens when the pidfd says that it is dead, never before: only then may another touch the
//! rings. A new engine is told everything from the start; every message to it is idempotent.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portolan_abi::port::CloseReason;

use super::Supervisor;
use super::memory::QueueMemory;
use super::packet::{Outbox, Packet, Received};
use super::poll::{EventFlags, Source, Timer};
use super::ports::Phase;
use super::restarts::Restarts;
use super::spawn::Child;
use crate::engine_link::{EngineConfig, FromEngine, MAX_PACKET, Route, ToEngine};

/// An engine that takes longer to adopt is hung.
const READY_WITHIN: Duration = Duration::from_secs(10);
/// A process that closed its link is dead within this.
const LEAVES_WITHIN: Duration = Duration::from_millis(500);
/// Messages that may wait for an engine, beside a route per node; one that leaves more unread is hung.
const MAX_WAITING: usize = 4096;
/// Messages of one engine handled before others get a turn.
const MESSAGES_PER_TURN: usize = 64;
/// More than a link holds when its engine dies.
const LAST_MESSAGES: usize = 4096;

/// What an engine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// No process; one will be started at this time.
    Waiting(Instant),
    /// A process that must be ready by this time.
    Starting(Instant),
    /// Serving.
    Running,
    /// Asked to leave.
    Stopping,
    /// Gone for good.
    Stopped,
}

/// A process and our end of its link.
struct Process {
    child: Child,
    link: OwnedFd,
    outbox: Outbox,
    /// Killed; its messages count no more.
    fenced: bool,
    /// It has closed its link, so it should be dead by then.
    leaves_by: Option<Instant>,
}

/// One engine, whichever process it is at the moment.
pub struct Engine {
    /// Index among this node's engines.
    pub index: u8,
    /// NIC queue.
    pub nic_queue: u32,
    /// What outlives the process.
    pub memory: QueueMemory,
    /// What it is doing.
    pub state: EngineState,
    /// Deaths.
    pub restarts: Restarts,
    process: Option<Process>,
    launch: u32,
    in_map: bool,
}

impl Engine {
    /// An engine not yet started.
    pub fn new(index: u8, nic_queue: u32, memory: QueueMemory) -> Self {
        Self {
            index,
            nic_queue,
            memory,
            state: EngineState::Waiting(Instant::now()),
            restarts: Restarts::default(),
            process: None,
            launch: 0,
            in_map: false,
        }
    }

    /// Is there a process that may touch the memory, fenced or not?
    pub fn has_process(&self) -> bool {
        self.process.is_some()
    }

    /// Its process id; `None` between two processes.
    pub fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(|process| process.child.pid)
    }

    /// Its epoch: which one of the engines that worked on this ledger it is.
    pub fn epoch(&self) -> u64 {
        let header = self.memory.ledger.ledger();
        header.header().engine_epoch.load(Ordering::Relaxed)
    }

    /// Does its next start wait, because it keeps dying?
    pub fn is_degraded(&self) -> bool {
        matches!(self.state, EngineState::Waiting(at) if at > Instant::now())
    }

    /// For people.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            _ if self.process.as_ref().is_some_and(|p| p.fenced) => "fenced",
            EngineState::Waiting(_) if self.is_degraded() => "degraded",
            EngineState::Waiting(_) | EngineState::Starting(_) => "starting",
            EngineState::Running => "running",
            EngineState::Stopping => "stopping",
            EngineState::Stopped => "stopped",
        }
    }
}

impl Supervisor {
    /// Starts the process of an engine and tells it all it must know.
    pub(super) fn start_engine(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        let (child, link) = match self.launcher.engine(queue) {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(queue, %error, "the engine cannot be started");
                self.schedule_engine(index, now);
                return;
            }
        };
        engine.launch = engine.launch.wrapping_add(1);
        let launch = engine.launch;
        let link_flags = EventFlags::IN | EventFlags::RDHUP;
        let watched = self
            .poll
            .add(&link, Source::Link(queue, launch), link_flags)
            .and_then(|()| {
                let source = Source::EngineExit(queue, launch);
                self.poll.add(&child.exit, source, EventFlags::IN)
            });
        if let Err(error) = watched {
            tracing::error!(queue, %error, "the engine cannot be watched");
            // Nobody watches it, so end it here.
            let _ = self.launcher.kill(&child);
            self.launcher.reap(&child);
            self.schedule_engine(index, now);
            return;
        }
        tracing::info!(queue, pid = child.pid, "engine started");
        engine.process = Some(Process {
            child,
            link,
            outbox: Outbox::default(),
            fenced: false,
            leaves_by: None,
        });
        let ready_by = now + READY_WITHIN;
        engine.state = EngineState::Starting(ready_by);
        self.poll.set_timer(ready_by, Timer::Engine(queue));
        self.brief_engine(index);
    }

    /// Everything a new engine must know, in the order of the contract.
    fn brief_engine(&mut self, index: usize) {
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        let start = ToEngine::Start(Box::new(self.engine_config(engine)));
        let mut fds = vec![
            Arc::clone(&engine.memory.ledger_fd),
            Arc::clone(&engine.memory.umem),
            Arc::clone(&engine.memory.xsk),
        ];
        fds.extend(self.engines.iter().map(|e| Arc::clone(&e.memory.wake)));
        fds.extend(self.crossings.of(index));
        self.tell(index, &start, fds);
        let routes: Vec<Route> = self.routes.values().cloned().collect();
        for route in routes {
            self.tell(index, &ToEngine::Route(route), Vec::new());
        }
        self.tell_ports(index, Phase::Open);
        self.tell(index, &ToEngine::Restored, Vec::new());
        self.tell_ports(index, Phase::Opening);
    }

    /// Sends the ports in this phase: open ones to be restored, opening ones anew.
    fn tell_ports(&mut self, index: usize, phase: Phase) {
        let mine = self.ports.iter().filter(|(number, port)| {
            port.phase == phase && self.config.engine_of(*number) == index
        });
        let messages: Vec<_> = mine
            .filter_map(|(number, port)| {
                let memory = port.memory.as_ref()?;
                let message = ToEngine::OpenPort {
                    port: number,
                    generation: port.generation,
                    geometry: memory.geometry,
                    restore: phase == Phase::Open,
                };
                Some((message, memory.for_engine()))
            })
            .collect();
        for (message, fds) in messages {
            self.tell(index, &message, fds);
        }
    }

    fn engine_config(&self, engine: &Engine) -> EngineConfig {
        let config = &self.config;
        EngineConfig {
            node: config.node,
            name: config.name.clone(),
            cluster: config.cluster_id(),
            incarnation: self.incarnation,
            queue: engine.index,
            queues: config.engines(),
            ledger: engine.memory.geometry,
            encap: config.encap,
            udp_port: config.udp_port,
            mac: config.interface_facts.mac,
            address: config.address,
            mtu: self.mtu,
            wait: config.wait,
            core: config.cores.get(usize::from(engine.index)).copied(),
            rx_frames: config.rx_frames(),
            ring_entries: config.rx_frames().next_power_of_two(),
            default_timeout_ms: config.default_timeout_ms,
            transport: config.transport.clone(),
        }
    }

    /// Sends a message to an engine, if there is one.
    pub(super) fn tell(&mut self, index: usize, message: &ToEngine, fds: Vec<Arc<OwnedFd>>) {
        let bytes = match serde_json::to_vec(message) {
            Ok(bytes) if bytes.len() <= MAX_PACKET => bytes,
            Ok(_) | Err(_) => {
                tracing::error!(?message, "a message to an engine cannot be written");
                return;
            }
        };
        // At its start it is told all routes at once.
        let most = MAX_WAITING + self.routes.len();
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.process.as_mut().filter(|p| !p.fenced) else {
            return;
        };
        process.outbox.push(Packet { bytes, fds });
        if process.outbox.len() > most {
            self.fence(index, "does not read its messages");
            return;
        }
        self.flush_engine(index);
    }

    fn flush_engine(&mut self, index: usize) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let source = Source::Link(engine.index, engine.launch);
        let Some(process) = engine.process.as_mut().filter(|p| !p.fenced) else {
            return;
        };
        if process.leaves_by.is_some() {
            return;
        }
        let mut flags = EventFlags::IN | EventFlags::RDHUP;
        if process.outbox.flush(process.link.as_fd()).is_ok() {
            flags.set(EventFlags::OUT, !process.outbox.is_empty());
        }
        // An error means that the other end is gone: reading will tell.
        if self.poll.modify(&process.link, source, flags).is_err() {
            self.fence(index, "cannot be watched");
        }
    }

    /// Processes close their links when they die, a moment before their pidfd tells; one that lives on without is useless.
    fn on_link_closed(&mut self, index: usize) {
        let leaves_by = Instant::now() + LEAVES_WITHIN;
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.process.as_mut() else {
            return;
        };
        if process.leaves_by.is_none() {
            process.leaves_by = Some(leaves_by);
            self.poll.remove(&process.link);
            self.poll.set_timer(leaves_by, Timer::Engine(engine.index));
        }
    }

    /// Kills an engine that must not go on. What follows, follows its death.
    pub(super) fn fence(&mut self, index: usize, why: &str) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.process.as_mut().filter(|p| !p.fenced) else {
            return;
        };
        tracing::warn!(
            queue = engine.index,
            pid = process.child.pid,
            "engine fenced: it {why}"
        );
        process.fenced = true;
        // Removed already if it was closed.
        self.poll.remove(&process.link);
        if let Err(error) = self.launcher.kill(&process.child) {
            tracing::error!(queue = engine.index, %error, "the engine cannot be killed");
        }
    }

    /// Something happened on an engine's link.
    pub(super) fn on_link(&mut self, queue: u8, launch: u32, flags: EventFlags) {
        let index = usize::from(queue);
        if self.engines.get(index).is_none_or(|e| e.launch != launch) {
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.flush_engine(index);
        }
        self.read_link(index, MESSAGES_PER_TURN);
    }

    fn read_link(&mut self, index: usize, at_most: usize) {
        let mut buffer = std::mem::take(&mut self.link_buffer);
        buffer.resize(MAX_PACKET, 0);
        for _ in 0..at_most {
            let Some(engine) = self.engines.get(index) else {
                break;
            };
            let Some(process) = engine.process.as_ref().filter(|p| !p.fenced) else {
                break;
            };
            match super::packet::receive(process.link.as_fd(), &mut buffer) {
                Ok(Received::Packet(length)) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    match serde_json::from_slice::<FromEngine>(bytes) {
                        Ok(message) => self.on_message(index, message),
                        Err(_) => self.fence(index, "talks nonsense"),
                    }
                }
                Ok(Received::Nothing) => break,
                Ok(Received::TooLong) => self.fence(index, "talks too much"),
                Ok(Received::Closed) | Err(_) => {
                    self.on_link_closed(index);
                    break;
                }
            }
        }
        self.link_buffer = buffer;
    }

    fn on_message(&mut self, index: usize, message: FromEngine) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        match message {
            FromEngine::Ready { adopted_in_ns } => {
                if !matches!(engine.state, EngineState::Starting(_)) {
                    return;
                }
                engine.state = EngineState::Running;
                let micros = adopted_in_ns / 1000;
                tracing::info!(queue, epoch = engine.epoch(), micros, "engine ready");
                self.steer_to(index);
            }
            FromEngine::PortOpened { port, generation } => {
                self.on_port_opened(index, port, generation);
            }
            FromEngine::PortClosed {
                port,
                generation,
                reason,
            } => self.on_port_closed(index, port, generation, reason),
            FromEngine::Peers { id, peers } => self.on_peers(index, id, peers),
            FromEngine::Fatal { message } => {
                // One line, whatever it says.
                let message: String = message
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(500)
                    .collect();
                tracing::error!(queue, "engine gives up: {message}");
            }
        }
    }

    /// Frames of the queue go to the socket from now on, and stay in it while engines come and go.
    fn steer_to(&mut self, index: usize) {
        let Some(engine) = self.engines.get_mut(index).filter(|e| !e.in_map) else {
            return;
        };
        match self
            .steering
            .insert(engine.nic_queue, engine.memory.xsk.as_fd())
        {
            Ok(()) => engine.in_map = true,
            Err(error) => {
                tracing::error!(queue = engine.index, "frames cannot be steered: {error}");
                self.fence(index, "cannot be reached");
            }
        }
    }

    /// A pidfd became readable.
    pub(super) fn on_engine_exit(&mut self, queue: u8, launch: u32, now: Instant) {
        let index = usize::from(queue);
        if self.engines.get(index).is_none_or(|e| e.launch != launch) {
            return;
        }
        // What it said before it died still counts.
        self.read_link(index, LAST_MESSAGES);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.process.take() else {
            return;
        };
        let how = self.launcher.reap(&process.child);
        let pid = process.child.pid;
        self.poll.remove(&process.child.exit);
        self.poll.remove(&process.link);
        drop(process);
        self.forget_peers_of(index);
        // Nobody maps the memory of closing ports any more.
        self.finish_closing(index, CloseReason::OwnerGone);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        if engine.state == EngineState::Stopping {
            tracing::info!(queue, pid, "engine stopped ({how})");
            engine.state = EngineState::Stopped;
            return;
        }
        tracing::warn!(queue, pid, "engine died ({how})");
        self.schedule_engine(index, now);
    }

    fn schedule_engine(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        let wait = engine.restarts.died(now);
        engine.state = EngineState::Waiting(now + wait);
        if self.stopping {
            engine.state = EngineState::Stopped;
        } else if wait.is_zero() {
            self.start_again(index, now);
        } else {
            tracing::error!(
                queue,
                seconds = wait.as_secs(),
                "engine degraded: it keeps dying, the next start waits"
            );
            self.poll.set_timer(now + wait, Timer::Engine(queue));
            self.refuse_opening(index);
        }
    }

    /// Starts it in the next round of the loop: a start that fails at once must not recurse.
    fn start_again(&mut self, index: usize, now: Instant) {
        self.poll.set_timer(now, Timer::Engine(index as u8));
    }

    /// An engine's timer fired.
    pub(super) fn on_engine_timer(&mut self, queue: u8, now: Instant) {
        let index = usize::from(queue);
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        if let Some(process) = &engine.process
            && process.leaves_by.is_some_and(|by| by <= now)
        {
            self.fence(index, "closed its link and lives on");
            return;
        }
        match engine.state {
            EngineState::Waiting(at) if at <= now && engine.process.is_none() => {
                self.start_engine(index, now);
            }
            EngineState::Starting(by) if by <= now => self.fence(index, "was not ready in time"),
            _ => {}
        }
    }

    /// Asks every engine to leave.
    pub(super) fn stop_engines(&mut self) {
        for index in 0..self.engines.len() {
            let Some(engine) = self.engines.get_mut(index) else {
                continue;
            };
            engine.state = match engine.process {
                Some(_) => EngineState::Stopping,
                None => EngineState::Stopped,
            };
            self.tell(index, &ToEngine::Stop, Vec::new());
        }
    }

    /// Kills every engine that has not left.
    pub(super) fn kill_engines(&mut self) {
        for index in 0..self.engines.len() {
            self.fence(index, "did not stop in time");
        }
    }
}
