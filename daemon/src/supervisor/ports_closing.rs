//! Ports that end: by their owner, by their engine for cause, or because there is no engine any more. The phases are in `ports.rs`.

use std::time::Instant;

use portolan_abi::control::{ErrorCode, Response};
use portolan_abi::port::{CloseReason, state};

use super::Supervisor;
use super::clients::Pending;
use super::events::{Event, Kind};
use super::ports::{Phase, refuse};
use super::store::{Name, PortPart, points};
use crate::engine_link::ToEngine;

impl Supervisor {
    /// The client that had the port is to hear no more of it.
    pub(super) fn disown(&mut self, number: u16) {
        if let Some(port) = self.ports.get_mut(number) {
            port.owner = None;
        }
    }

    /// Closes every port: the daemon stops.
    pub(super) fn close_all_ports(&mut self) {
        for number in 0..portolan_abi::PORTS {
            self.close_port(number, CloseReason::Administrator);
        }
    }

    /// The engines are gone: whatever is not closed is now.
    pub(super) fn abandon_ports(&mut self) {
        for index in 0..self.engines.len() {
            self.finish_closing(index, CloseReason::Administrator);
        }
    }

    /// Begins to close a port. Its number is free when the engine has let go.
    pub(super) fn close_port(&mut self, number: u16, reason: CloseReason) {
        let index = self.config.engine_of(number);
        let (Some(engine), Some(port)) = (self.engines.get(index), self.ports.get_mut(number))
        else {
            return;
        };
        if !matches!(port.phase, Phase::Opening | Phase::Open) {
            return;
        }
        let generation = port.generation;
        port.phase = Phase::Closing;
        engine
            .memory
            .set_port_life(number, generation, state::CLOSING);
        points::reached("close.journalled");
        // Without a process the next one is told when it takes over, unless it will not come soon.
        let nobody = !engine.has_process() && engine.is_degraded();
        let message = ToEngine::ClosePort {
            port: number,
            generation,
            reason,
        };
        self.tell_active(index, &message, Vec::new());
        points::reached("close.told");
        if nobody {
            self.port_is_closed(number, reason);
        }
    }

    /// An engine says that it has let go of a port, or closed it for cause.
    pub(super) fn on_port_closed(
        &mut self,
        index: usize,
        number: u16,
        generation: u32,
        reason: CloseReason,
    ) {
        let ours = self.config.engine_of(number) == index;
        let current = self
            .ports
            .get(number)
            .is_some_and(|p| ours && p.generation == generation && p.phase != Phase::Free);
        if !current {
            return;
        }
        let message = ToEngine::ClosePort {
            port: number,
            generation,
            reason,
        };
        self.tell_standby(index, &message);
        let in_order = matches!(
            reason,
            CloseReason::ByOwner | CloseReason::OwnerGone | CloseReason::Administrator
        );
        if let Some(port) = self.ports.get(number).filter(|_| !in_order) {
            let (user, pid) = (port.owner_uid, port.owner_pid);
            let failed = Event::new(Kind::PortFailed, "port closed for cause").port(number);
            let failed = failed.field("reason", serde_json::json!(reason));
            self.events
                .record(failed.field("uid", user).field("pid", pid));
            self.ports.hold_back(user, Instant::now());
        }
        self.port_is_closed(number, reason);
    }

    /// The engine of these ports is dead and has no successor that would close them.
    pub(super) fn finish_closing(&mut self, index: usize, reason: CloseReason) {
        for number in self.ports_in(index, Phase::Closing) {
            self.port_is_closed(number, reason);
        }
    }

    /// The engine of these ports will not come soon: those who wait for it are told.
    pub(super) fn refuse_opening(&mut self, index: usize) {
        for number in self.ports_in(index, Phase::Opening) {
            self.close_port(number, CloseReason::Administrator);
        }
    }

    fn ports_in(&self, index: usize, phase: Phase) -> Vec<u16> {
        let mine = self.ports.iter().filter(|(number, port)| {
            port.phase == phase && self.config.engine_of(*number) == index
        });
        mine.map(|(number, _)| number).collect()
    }

    /// Nobody but its application has the port's memory now.
    fn port_is_closed(&mut self, number: u16, reason: CloseReason) {
        let index = self.config.engine_of(number);
        let (Some(engine), Some(port)) = (self.engines.get(index), self.ports.get_mut(number))
        else {
            return;
        };
        points::reached("close.heard");
        port.phase = Phase::Free;
        let life = port.life(number);
        let owner = port.owner.take();
        if let Some(memory) = port.memory.take()
            && let Err(error) = memory.mark_closed(reason)
        {
            tracing::warn!(port = number, %error, "the port's owner cannot be told");
        }
        engine
            .memory
            .set_port_life(number, port.generation, state::CLOSED);
        let closed = Event::new(Kind::PortClosed, "port closed").port(number);
        let closed = closed.field("reason", serde_json::json!(reason));
        self.events.record(closed);
        points::reached("close.closed");
        if let Some(owner) = owner {
            self.owner_lost_port(owner, number);
        }
        points::reached("close.answered");
        for part in PortPart::ALL {
            self.store.remove(&Name::Port(life, part));
        }
        self.retry_waiting(number);
    }

    /// Tells the client that waits for this, if one does.
    fn owner_lost_port(&mut self, owner: u64, number: u16) {
        let Some(client) = self.clients.get_mut(owner) else {
            return;
        };
        client.ports.remove(&number);
        match client.pending {
            Some(Pending::Close(port)) if port == number => {
                self.finish(owner, Response::Done, Vec::new());
            }
            Some(Pending::Open(port)) if port == number => {
                let error = refuse(
                    ErrorCode::Unavailable,
                    format!(
                        "the engine of port {number} could not open it; try again, or see the daemon's log"
                    ),
                );
                self.finish(owner, error, Vec::new());
            }
            _ => {}
        }
    }
}
