//! Going on with what a predecessor left: processes, connections and ports as they are, whatever the predecessor was doing when it died.
//!
//! Nothing says how far it was; it need not be known. What an engine's process may not have heard it is told again, as every message to it
//! may come twice. What a connection asked and was not answered is still in its socket (`clients.rs`). Where a port is in its
//! life, the ledger says:
//!
//! | names | ledger | the predecessor died | so |
//! |---|---|---|---|
//! | whole | an earlier life, or CLOSED | before it journalled, or after all was done | forgotten; a request for it is worked on from the start |
//! | whole | OPENING | before its client was answered | the engine is told again; closed if nobody waits for it |
//! | whole | OPEN | | goes on; if its request is still there, the client is answered again |
//! | whole | CLOSING | | the engine is told again |
//! | some, none | OPENING, OPEN, CLOSING | storing or taking out; or the store lost something | closed |
//!
//! Who serves a queue, the ledger says too: its death word names the process. A process that is left and does not serve stands by, or
//! has just been told to take over; it is told so again if nobody serves.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portolan_abi::PORTS;
use portolan_abi::ledger::Ledger;
use portolan_abi::port::{CloseReason, state};

use super::names::{Name, PortLife, PortPart};
use super::predecessor::{LeftProcess, Leftovers, is_dead, pid_of};
use crate::engine_link::ToEngine;
use crate::supervisor::Supervisor;
use crate::supervisor::engines::{EngineState, Process, Stage};
use crate::supervisor::memory::PortMemory;
use crate::supervisor::poll::{EventFlags, Source, Timer};
use crate::supervisor::ports::Phase;
use crate::supervisor::recovery::Cause;
use crate::supervisor::spawn::Child;
use crate::supervisor::succession::{AT_LEISURE, PREPARED_WITHIN};
use crate::supervisor::watchdog::vitals;

/// The bits of a futex word that name a thread.
const THREAD: u32 = 0x3fff_ffff;

/// The process that serves, by the ledger.
fn serving_pid(ledger: Ledger<'_>) -> Option<i32> {
    let word = ledger.header().death.load(Ordering::Acquire) & THREAD;
    i32::try_from(word).ok().filter(|pid| *pid > 0)
}

impl Supervisor {
    /// Takes over what a predecessor left, before anything else happens.
    pub(in crate::supervisor) fn adopt(&mut self, left: Leftovers) {
        let now = Instant::now();
        for name in &left.odd {
            self.store.forget(&name.to_string());
        }
        if let Some(exit) = left.service {
            self.adopt_service(exit);
        }
        if let Some(notes) = left.notes {
            self.adopt_notes(notes);
        }
        for (id, socket) in left.clients {
            self.adopt_client(id, socket);
        }
        for (life, parts) in left.ports {
            self.adopt_port(life, parts);
        }
        self.close_what_the_store_lost();
        self.adopt_processes(left.processes, now);
        self.close_what_nobody_waits_for();
    }

    fn adopt_port(&mut self, life: PortLife, parts: [OwnedFd; 5]) {
        let number = life.port;
        let index = self.config.engine_of(number);
        let Some(engine) = self.engines.get(index).filter(|_| number < PORTS) else {
            return self.forget_port(life);
        };
        let (generation, journalled) = engine.memory.port_life(number);
        let phase = match journalled {
            state::OPENING => Phase::Opening,
            state::OPEN => Phase::Open,
            state::CLOSING => Phase::Closing,
            _ => return self.forget_port(life),
        };
        if generation != life.generation {
            return self.forget_port(life);
        }
        let memory = match PortMemory::restore(self.config.node, number, parts) {
            Ok(memory) => memory,
            Err(error) => {
                tracing::warn!(port = number, %error, "the port's memory cannot be gone on with");
                return self.forget_port(life);
            }
        };
        for (part, fd) in memory.parts() {
            self.store.adopt(Name::Port(life, part), fd);
        }
        let owner = self.clients.get_mut(life.client).map(|client| {
            client.ports.insert(number);
            (life.client, client.who.uid, client.who.pid)
        });
        if let Some(port) = self.ports.get_mut(number) {
            port.phase = phase;
            port.generation = generation;
            port.memory = Some(memory);
            port.opened_for = (life.client, life.request);
            port.owner = owner.map(|(id, ..)| id);
            (port.owner_uid, port.owner_pid) = owner.map_or((0, 0), |(_, uid, pid)| (uid, pid));
        }
    }

    fn forget_port(&mut self, life: PortLife) {
        for part in PortPart::ALL {
            self.store.forget(&Name::Port(life, part).to_string());
        }
    }

    /// Ports that an engine may serve and whose memory we have not.
    fn close_what_the_store_lost(&mut self) {
        for number in 0..PORTS {
            let index = self.config.engine_of(number);
            let (Some(engine), Some(port)) = (self.engines.get(index), self.ports.get_mut(number))
            else {
                continue;
            };
            let (generation, journalled) = engine.memory.port_life(number);
            let lives = matches!(journalled, state::OPENING | state::OPEN | state::CLOSING);
            if port.phase == Phase::Free && lives {
                tracing::warn!(port = number, "the port's memory is lost: it is closed");
                port.phase = Phase::Closing;
                port.generation = generation;
                engine
                    .memory
                    .set_port_life(number, generation, state::CLOSING);
            }
        }
    }

    /// Ports whose connections are gone, and ports being opened that nobody asks for any more.
    fn close_what_nobody_waits_for(&mut self) {
        let ports = self.ports.iter();
        let owners: Vec<(u16, Phase, Option<u64>, u64)> = ports
            .filter(|(_, port)| matches!(port.phase, Phase::Opening | Phase::Open))
            .map(|(number, port)| (number, port.phase, port.owner, port.opened_for.1))
            .collect();
        for (number, phase, owner, request) in owners {
            let Some(owner) = owner else {
                self.close_port(number, CloseReason::OwnerGone);
                continue;
            };
            let service = self.clients.get(owner).is_some_and(|client| client.service);
            if number == 0 && !service {
                // A service whose process our predecessor could not store any more.
                self.drop_client(owner);
                continue;
            }
            let asks = request != 0 && self.waiting_request(owner) == Some(request);
            if phase == Phase::Opening && !asks {
                self.close_port(number, CloseReason::OwnerGone);
            }
        }
    }

    fn adopt_processes(&mut self, mut processes: Vec<LeftProcess>, now: Instant) {
        processes.sort_by_key(|left| (left.queue, left.launch));
        for left in processes {
            let name = (left.queue, left.launch, left.build);
            if let Err(error) = self.adopt_process(left) {
                let (queue, launch, _) = name;
                tracing::warn!(queue, launch, "an engine cannot be gone on with: {error}");
            }
        }
        for index in 0..self.engines.len() {
            self.resume_queue(index, now);
        }
    }

    fn adopt_process(&mut self, left: LeftProcess) -> std::io::Result<()> {
        let (queue, launch) = (left.queue, left.launch);
        let names = [
            Name::Link(queue, launch, left.build),
            Name::Process(queue, launch),
        ];
        let index = usize::from(queue);
        let pid = pid_of(&left.exit).filter(|_| !is_dead(&left.exit, Duration::ZERO));
        let (Some(engine), Some(pid)) = (self.engines.get_mut(index), pid) else {
            for name in names {
                self.store.forget(&name.to_string());
            }
            return Ok(());
        };
        let kept = [left.link.try_clone()?, left.exit.try_clone()?];
        for (name, fd) in names.into_iter().zip(kept) {
            self.store.adopt(name, Arc::new(fd));
        }
        engine.launches = engine.launches.max(launch);
        let ending = vitals::is_ending(pid, left.exit.as_fd());
        let child = Child {
            pid,
            exit: left.exit,
        };
        let exit = Source::EngineExit(queue, launch);
        self.poll.add(&child.exit, exit, EventFlags::IN)?;
        let stage = Stage::Preparing(Instant::now() + PREPARED_WITHIN);
        let mut process = Process::new(launch, child, left.link, stage);
        if ending {
            // If it does so in the background, nobody else ends that (`watchdog/background.rs`). It may be dead by now.
            let _ = vitals::make_ordinary(pid);
            engine.leaving.push(process);
            return Ok(());
        }
        let flags = EventFlags::IN | EventFlags::RDHUP;
        let link = Source::Link(queue, launch);
        self.poll.add(&process.link, link, flags)?;
        if left.build != self.build {
            self.outdated.insert((queue, launch), Cause::Upgrade);
        }
        let serves = serving_pid(engine.memory.ledger.ledger()) == Some(pid);
        let place = if serves {
            process.stage = Stage::Serving(Instant::now());
            engine.active.replace(process)
        } else {
            engine.standby.replace(process)
        };
        // Only one can be needed: the youngest.
        if let Some(surplus) = place {
            self.poll.remove(&surplus.link);
            // Dead already: as good.
            let _ = self.launcher.kill(&surplus.child);
            if let Some(engine) = self.engines.get_mut(index) {
                engine.leaving.push(surplus);
            }
        }
        Ok(())
    }

    /// Goes on with the processes of a queue, as far as there are any.
    fn resume_queue(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        let active = engine.active.as_ref().map(|process| process.launch);
        let standby = engine.standby.as_ref().map(|process| process.launch);
        if let Some(process) = &engine.active {
            tracing::info!(queue, pid = process.child.pid, "engine goes on");
            engine.state = EngineState::Served;
            match process.watched() {
                Ok(watched) => self.watchdog.watch(queue, watched),
                Err(error) => tracing::warn!(queue, %error, "not watched"),
            }
        }
        // The standby first, as always.
        if let Some(launch) = standby {
            self.tell_again(index, launch, false);
        }
        if let Some(launch) = active {
            self.tell_again(index, launch, true);
        }
        match (active, standby) {
            (Some(_), Some(launch)) if self.outdated.contains_key(&(queue, launch)) => {
                self.fence_process(index, launch, "is of the build that was replaced");
            }
            (Some(_), Some(launch)) => {
                self.tell_one(index, launch, &ToEngine::StandBy, Vec::new());
                // Who prepares itself in the background does so no longer.
                let leisure_ends = Instant::now() + AT_LEISURE;
                self.poll.set_timer(leisure_ends, Timer::Engine(queue));
                self.poll
                    .set_timer(now + PREPARED_WITHIN, Timer::Engine(queue));
            }
            (None, Some(_)) => self.take_over(index, now),
            (Some(_) | None, None) => {}
        }
        if active.is_some() {
            self.steer_to(index);
        }
    }

    /// Everything that may change while a process lives: it may not have heard of the last changes. One that stands by must know ports
    /// that are being closed as long as the one who serves has not let go of them, and forget those it has.
    fn tell_again(&mut self, index: usize, launch: u32, serves: bool) {
        // One without a MAC is being resolved again, and known to the engine.
        let routes = self.routes.values().filter(|route| route.mac.is_some());
        let mut messages: Vec<_> = routes
            .map(|route| (ToEngine::Route(route.clone()), Vec::new()))
            .collect();
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        for (number, port) in self.ports.iter() {
            if self.config.engine_of(number) != index {
                continue;
            }
            let close = |generation| ToEngine::ClosePort {
                port: number,
                generation,
                reason: CloseReason::OwnerGone,
            };
            match (port.phase, &port.memory) {
                (Phase::Closing, _) if serves => {
                    messages.push((close(port.generation), Vec::new()));
                }
                (Phase::Free, _) => {
                    let (last, _) = engine.memory.port_life(number);
                    if !serves && last > 0 {
                        messages.push((close(last), Vec::new()));
                    }
                }
                (_, Some(memory)) => {
                    let message = ToEngine::OpenPort {
                        port: number,
                        generation: port.generation,
                        geometry: memory.geometry,
                    };
                    messages.push((message, memory.for_engine()));
                }
                (_, None) => {}
            }
        }
        // Who captures through a predecessor's ring sees that it ends, and asks for one of ours.
        messages.push((ToEngine::Untap, Vec::new()));
        for (message, fds) in messages {
            self.tell_one(index, launch, &message, fds);
        }
    }

    /// Replaces a serving process of another build, or made for another MTU, now that one of ours stands by.
    pub(in crate::supervisor) fn renew(&mut self, index: usize) {
        let Some(engine) = self.engines.get(index).filter(|engine| engine.armed) else {
            return;
        };
        let Some(process) = &engine.active else {
            return;
        };
        if let Some(cause) = self.outdated.remove(&(engine.index, process.launch)) {
            let why = match cause {
                Cause::Interface => "was made for another MTU",
                _ => "is of the build that was replaced",
            };
            self.fence(index, cause, why);
        }
    }
}
