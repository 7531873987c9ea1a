//! What is said to the processes of a queue, and what they say.
//!
//! Every process of a queue hears of every change in the same order, the standby before the active one: a port that the active process
//! serves, and of which an application may have heard, is then known to its successor. A link is a queue, so a standby that is told to take over has
//! heard of everything sent before; one with unsent packets is taken out of the watchdog's hands until they are out.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::engines::Engine;
use super::packet::{Packet, Received};
use super::poll::{EventFlags, Source, Timer};
use super::ports::Phase;
use super::recovery::Cause;
use crate::engine_link::{EngineConfig, FromEngine, MAX_PACKET, ToEngine};

/// A process that closed its link is dead within this.
const LEAVES_WITHIN: Duration = Duration::from_millis(500);
/// Messages that may wait for a process, beside a route per node; one that leaves more unread is hung.
const MAX_WAITING: usize = 4096;
/// Messages of one process handled before others get a turn.
const MESSAGES_PER_TURN: usize = 64;

impl Supervisor {
    /// Everything a new process must know, in the order of the contract.
    pub(super) fn brief(&mut self, index: usize, launch: u32) {
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        self.mend(index, engine);
        let start = ToEngine::Start(Box::new(self.engine_config(engine)));
        let mut fds = vec![
            Arc::clone(&engine.memory.ledger_fd),
            Arc::clone(&engine.memory.umem),
            Arc::clone(&engine.memory.xsk),
        ];
        fds.extend(self.engines.iter().map(|e| Arc::clone(&e.memory.wake)));
        fds.extend(self.crossings.of(index));
        let mut messages = vec![(start, fds)];
        let routes = self.routes.values();
        messages.extend(routes.map(|route| (ToEngine::Route(route.clone()), Vec::new())));
        let ports = self.ports.iter().filter(|(number, port)| {
            port.phase != Phase::Free && self.config.engine_of(*number) == index
        });
        messages.extend(ports.filter_map(|(number, port)| {
            let memory = port.memory.as_ref()?;
            let message = ToEngine::OpenPort {
                port: number,
                generation: port.generation,
                geometry: memory.geometry,
            };
            Some((message, memory.for_engine()))
        }));
        messages.extend(self.captures.briefing(index));
        if self.draining {
            messages.push((ToEngine::Drain { on: true }, Vec::new()));
        }
        messages.push((ToEngine::StandBy, Vec::new()));
        for (message, fds) in messages {
            self.tell_one(index, launch, &message, fds);
        }
    }

    /// What an engine that went wrong has written over and is ours, is ours again: no successor could be started with it.
    fn mend(&self, index: usize, engine: &Engine) {
        let queue = engine.index;
        if engine.memory.ledger.ledger().mend(self.incarnation) {
            tracing::warn!(queue, "an engine wrote over the head of its ledger: mended");
        }
        for (port, served) in self.ports.iter() {
            let Some(memory) = &served.memory else {
                continue;
            };
            if self.config.engine_of(port) != index {
                continue;
            }
            match memory.mend(self.config.node, port) {
                Ok(false) => {}
                Ok(true) => tracing::warn!(port, "an engine wrote over the port's head: mended"),
                Err(error) => tracing::error!(port, %error, "the port's memory cannot be read"),
            }
        }
    }

    fn engine_config(&self, engine: &Engine) -> EngineConfig {
        let config = &self.config;
        let (core, shares_core) = config.core_of(engine.index);
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
            mtu: self.interface.mtu(),
            umem_mtu: self.mtu,
            wait: config.wait,
            core,
            shares_core,
            keep_awake_ms: u32::try_from(config.keep_awake.as_millis()).unwrap_or(u32::MAX),
            rx_frames: config.rx_frames(),
            ring_entries: config.rx_frames().next_power_of_two(),
            default_timeout_ms: config.default_timeout_ms,
            transport: config.transport.clone(),
            first_epoch: engine.epoch_seen.wrapping_add(1),
            veth: config.interface_facts.veth,
            compares_polling: config.busy_polling == super::config::BusyPolling::Auto,
        }
    }

    /// Tells every process of a queue of a change.
    pub(super) fn tell(&mut self, index: usize, message: &ToEngine, fds: Vec<Arc<OwnedFd>>) {
        let launches = self.engines.get(index).map(Engine::launches);
        for launch in launches.into_iter().flatten() {
            self.tell_one(index, launch, message, fds.clone());
        }
    }

    /// Tells the process that serves, if there is one.
    pub(super) fn tell_active(&mut self, index: usize, message: &ToEngine, fds: Vec<Arc<OwnedFd>>) {
        let active = self.engines.get(index).and_then(|e| e.active.as_ref());
        if let Some(launch) = active.map(|process| process.launch) {
            self.tell_one(index, launch, message, fds);
        }
    }

    /// Tells the process that stands by, if there is one.
    pub(super) fn tell_standby(&mut self, index: usize, message: &ToEngine) {
        let standby = self.engines.get(index).and_then(|e| e.standby.as_ref());
        if let Some(launch) = standby.map(|process| process.launch) {
            self.tell_one(index, launch, message, Vec::new());
        }
    }

    /// Tells one process.
    pub(super) fn tell_one(
        &mut self,
        index: usize,
        launch: u32,
        message: &ToEngine,
        fds: Vec<Arc<OwnedFd>>,
    ) {
        let bytes = match serde_json::to_vec(message) {
            Ok(bytes) if bytes.len() <= MAX_PACKET => bytes,
            Ok(_) | Err(_) => {
                tracing::error!(?message, "a message to an engine cannot be written");
                return;
            }
        };
        // At its start it is told all routes at once.
        let most = MAX_WAITING + self.routes.len();
        let process = (self.engines.get_mut(index)).and_then(|e| e.process_mut(launch));
        let Some(process) = process.filter(|p| !p.fenced) else {
            return;
        };
        process.outbox.push(Packet { bytes, fds });
        if process.outbox.len() > most {
            self.misbehaves(index, launch, "does not read its messages");
            return;
        }
        self.flush_engine(index, launch);
    }

    fn flush_engine(&mut self, index: usize, launch: u32) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let source = Source::Link(engine.index, launch);
        let Some(process) = engine.process_mut(launch).filter(|p| !p.fenced) else {
            return;
        };
        if process.leaves_by.is_some() {
            return;
        }
        let mut flags = EventFlags::IN | EventFlags::RDHUP;
        if process.outbox.flush(process.link.as_fd()).is_ok() {
            flags.set(EventFlags::OUT, !process.outbox.is_empty());
        }
        let all_out = process.outbox.is_empty();
        let standby = engine.standby.as_ref().is_some_and(|p| p.launch == launch);
        // An error means that the other end is gone: reading will tell.
        let watched = engine.process_mut(launch).map_or(Ok(()), |process| {
            self.poll.modify(&process.link, source, flags)
        });
        if watched.is_err() {
            self.misbehaves(index, launch, "cannot be watched");
        } else if standby && !all_out {
            // If it has just been told to take over, it hears of the change as one who serves, and nobody else has heard of it yet.
            self.disarm(index);
        } else if standby {
            self.arm(index);
        }
    }

    /// Kills a process that does what none of ours would.
    fn misbehaves(&mut self, index: usize, launch: u32, why: &str) {
        if self.serves(index, launch) {
            self.fence(index, Cause::Misbehaviour, why);
        } else {
            self.fence_process(index, launch, why);
        }
    }

    /// Processes close their links when they die, a moment before their pidfd tells; one that lives on without is useless.
    fn on_link_closed(&mut self, index: usize, launch: u32) {
        let leaves_by = Instant::now() + LEAVES_WITHIN;
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        let Some(process) = engine.process_mut(launch) else {
            return;
        };
        if process.leaves_by.is_none() {
            process.leaves_by = Some(leaves_by);
            self.poll.remove(&process.link);
            self.poll.set_timer(leaves_by, Timer::Engine(queue));
        }
    }

    /// Something happened on a process's link.
    pub(super) fn on_link(&mut self, queue: u8, launch: u32, flags: EventFlags) {
        let index = usize::from(queue);
        if flags.contains(EventFlags::OUT) {
            self.flush_engine(index, launch);
            self.renew(index);
        }
        self.read_link(index, launch, MESSAGES_PER_TURN);
    }

    pub(super) fn read_link(&mut self, index: usize, launch: u32, at_most: usize) {
        let mut buffer = std::mem::take(&mut self.link_buffer);
        buffer.resize(MAX_PACKET, 0);
        for _ in 0..at_most {
            let process = (self.engines.get_mut(index)).and_then(|e| e.process_mut(launch));
            let Some(process) = process.filter(|p| !p.fenced) else {
                break;
            };
            match super::packet::receive(process.link.as_fd(), &mut buffer) {
                Ok(Received::Packet(length)) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    match serde_json::from_slice::<FromEngine>(bytes) {
                        Ok(message) => self.on_message(index, launch, message),
                        Err(_) => self.misbehaves(index, launch, "talks nonsense"),
                    }
                }
                Ok(Received::Nothing) => break,
                Ok(Received::TooLong) => self.misbehaves(index, launch, "talks too much"),
                Ok(Received::Closed) | Err(_) => {
                    self.on_link_closed(index, launch);
                    break;
                }
            }
        }
        self.link_buffer = buffer;
    }

    fn serves(&self, index: usize, launch: u32) -> bool {
        let active = self.engines.get(index).and_then(|e| e.active.as_ref());
        active.is_some_and(|process| process.launch == launch)
    }

    fn on_message(&mut self, index: usize, launch: u32, message: FromEngine) {
        let of_standbys = matches!(message, FromEngine::StandingBy | FromEngine::Fatal { .. });
        if !of_standbys && !self.serves(index, launch) {
            // Promoted since the watchdog was last heeded: by the death of a predecessor that this very turn has fenced, perhaps. The
            // watchdog says so before it tells the standby, thus before the standby speaks.
            self.heed_watchdog(Instant::now());
        }
        let serves = self.serves(index, launch);
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        let queue = engine.index;
        match message {
            FromEngine::StandingBy => self.on_standing_by(index, launch),
            FromEngine::Fatal { message } => {
                // One line, whatever it says.
                let message: String = message
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(500)
                    .collect();
                tracing::error!(queue, "engine gives up: {message}");
            }
            // The rest is for who serves to say.
            _ if !serves => {}
            FromEngine::Ready {
                adopted_in_ns,
                ready_at_ns,
            } => self.on_ready(index, launch, adopted_in_ns, ready_at_ns),
            FromEngine::PortOpened { port, generation } => {
                self.on_port_opened(index, port, generation);
            }
            FromEngine::PortClosed {
                port,
                generation,
                reason,
            } => self.on_port_closed(index, port, generation, reason),
            FromEngine::Peers { id, peers } => self.on_peers(index, id, peers),
            FromEngine::BusyPoll { on, rests } => {
                self.on_busy_poll(index, on);
                if rests {
                    self.spare_gro();
                }
            }
            FromEngine::Wedged { evidence } => self.on_wedged(index, &evidence),
        }
    }
}
