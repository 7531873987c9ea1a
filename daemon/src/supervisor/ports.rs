//! The ports: opened, closed, and journalled on the way, so that whatever dies in between, the next one knows.
//!
//! | phase (journal) | entered by | left by |
//! |---|---|---|
//! | Free (CLOSED) | the engine's `PortClosed`, or that no engine comes | a client's `OpenPort` → Opening |
//! | Opening (OPENING) | memory made, generation raised | `PortOpened` → Open, then the client's reply; the client gone, a deadline → Closing |
//! | Open (OPEN) | | `ClosePort`, the client gone → Closing; the engine's `PortClosed` for cause → Free |
//! | Closing (CLOSING) | | `PortClosed` → Free; the engine's death: its successor is told of the port, and to close it |
//!
//! A number is free again only when no engine can have the memory mapped. While an engine is dead the phases stand still and are
//! told to the next one. So it is with a port being closed: its application may have read a message whose commit the dead engine had
//! published and not yet settled, and only who maps the port's events can bring the ledger up to it. A successor that never heard of the port
//! would tell the message's sender that it was not delivered. For the same reason a standby forgets a port when the engine that serves
//! has let go of it, and not before.

use std::time::{Duration, Instant};

use portolan_abi::PORTS;
use portolan_abi::control::{ErrorCode, Response};
use portolan_abi::port::{CloseReason, PortGeometry, state};

use super::Supervisor;
use super::config::{Amounts, Resource};
use super::engines::Engine;
use super::events::{Event, Kind};
use super::memory::PortMemory;
use super::store::names::PortLife;
use super::store::{Name, StoreError, points};
use crate::engine_link::ToEngine;

/// Where a port is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nobody's.
    Free,
    /// Its engine has been, or will be, told.
    Opening,
    /// In service.
    Open,
    /// Its engine has been told to let go.
    Closing,
}

/// One port.
#[derive(Debug)]
pub struct Port {
    /// Where it is in its life.
    pub phase: Phase,
    /// How often it has been opened.
    pub generation: u32,
    /// Its memory, unless free; or unless a predecessor's store lost it, then it is closing.
    pub memory: Option<PortMemory>,
    /// The connection and the number of the request that it was opened for.
    pub opened_for: (u64, u64),
    /// The client that has it, or waits for it.
    pub owner: Option<u64>,
    /// The owner's user.
    pub owner_uid: u32,
    /// The owner's process.
    pub owner_pid: i32,
}

impl Port {
    /// What the store calls its life.
    pub(super) fn life(&self, number: u16) -> PortLife {
        let (client, request) = self.opened_for;
        PortLife {
            port: number,
            generation: self.generation,
            client,
            request,
        }
    }
}

/// How long a user whose port was closed for cause waits for the next one. Making, mapping and ending a port costs the supervisor
/// and the engine a few hundred microseconds; without this a program that breaks its ports as fast as it gets them would take them
/// from its neighbours.
const HOLD_BACK: Duration = Duration::from_millis(1);

/// All ports.
pub struct Ports {
    ports: Vec<Port>,
    next_any: u16,
    /// Users who broke a port, and until when they wait; at most one entry per user who did so within [`HOLD_BACK`].
    held_back: Vec<(u32, Instant)>,
}

impl Default for Ports {
    fn default() -> Self {
        let free = || Port {
            phase: Phase::Free,
            generation: 0,
            memory: None,
            opened_for: (0, 0),
            owner: None,
            owner_uid: 0,
            owner_pid: 0,
        };
        Self {
            ports: (0..PORTS).map(|_| free()).collect(),
            next_any: PORTS - 1,
            held_back: Vec::new(),
        }
    }
}

impl Ports {
    /// A port.
    pub fn get(&self, number: u16) -> Option<&Port> {
        self.ports.get(usize::from(number))
    }

    pub(super) fn get_mut(&mut self, number: u16) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(number))
    }

    /// Every port with its number.
    pub fn iter(&self) -> impl Iterator<Item = (u16, &Port)> {
        (0..).zip(&self.ports)
    }

    /// What a user's ports take.
    fn of_user(&self, uid: u32) -> Amounts {
        let ports = self.iter().filter(|(number, _)| *number > 0);
        let theirs = ports.filter(|(_, port)| port.owner_uid == uid);
        theirs
            .filter_map(|(_, port)| port.memory.as_ref())
            .fold(Amounts::default(), |sum, memory| {
                sum.plus(&amounts(&memory.geometry))
            })
    }

    /// Those of applications that are not free, and the bytes of their arenas.
    fn in_use(&self) -> (u32, u64) {
        let used = self.iter().filter(|(number, _)| *number > 0);
        used.filter_map(|(_, port)| port.memory.as_ref())
            .fold((0, 0), |(ports, bytes), memory| {
                (ports + 1, bytes + memory.geometry.arena_bytes)
            })
    }

    /// The port that was opened for this very request of this connection, by us or a predecessor. Only of numbered requests it can be
    /// told.
    fn opened_for(&self, client: u64, request: u64) -> Option<(u16, Phase)> {
        let mut found = self.iter().filter(|(_, port)| {
            request != 0
                && port.opened_for == (client, request)
                && matches!(port.phase, Phase::Opening | Phase::Open)
        });
        found.next().map(|(number, port)| (number, port.phase))
    }

    /// This user broke a port just now.
    pub(super) fn hold_back(&mut self, user: u32, now: Instant) {
        self.held_back
            .retain(|(held, until)| *held != user && *until > now);
        self.held_back.push((user, now + HOLD_BACK));
    }

    /// Until when this user waits.
    fn held_back_until(&self, user: u32, now: Instant) -> Option<Instant> {
        let entry = self.held_back.iter().find(|(held, _)| *held == user);
        entry.map(|(_, until)| *until).filter(|until| *until > now)
    }

    /// A free port that `allowed` allows. From the top and round, so that numbers people choose stay free for them and one just
    /// closed is not taken again at once.
    fn any_free(&mut self, allowed: impl Fn(u16) -> bool) -> Option<u16> {
        for _ in 1..PORTS {
            let number = self.next_any;
            self.next_any = if number == 1 { PORTS - 1 } else { number - 1 };
            let free = self.get(number).is_some_and(|p| p.phase == Phase::Free);
            if free && allowed(number) {
                return Some(number);
            }
        }
        None
    }
}

/// How a request to open a port goes on.
pub(super) enum Opening {
    /// Its engine has been told.
    Begun(u16),
    /// It is open already: a predecessor opened it for this very request.
    Done(u16),
    /// The port is being closed: try when it is free.
    Wait(u16),
    /// The client's user broke a port: try then.
    HeldBack(Instant),
}

/// What a port takes of its user's quota.
fn amounts(geometry: &PortGeometry) -> Amounts {
    Amounts::default()
        .with(Resource::Ports, 1)
        .with(Resource::SendTokens, geometry.send_tokens.into())
        .with(Resource::ReceiveTokens, geometry.receive_tokens.into())
        .with(Resource::ArenaBytes, geometry.arena_bytes)
}

pub(super) fn refuse(code: ErrorCode, message: impl Into<String>) -> Response {
    Response::Error {
        code,
        message: message.into(),
    }
}

impl Supervisor {
    /// A client wants a port.
    pub(super) fn open_port(
        &mut self,
        client: u64,
        wanted: Option<u16>,
        geometry: PortGeometry,
    ) -> Result<Opening, Response> {
        let limits = &self.config.limits;
        if !geometry.is_valid() {
            return Err(refuse(
                ErrorCode::BadRequest,
                "the port's geometry is out of limits: tokens are powers of two, the arena is whole pages",
            ));
        }
        let (ports, arena_bytes) = self.ports.in_use();
        let most = limits.arena_bytes_per_port;
        if geometry.arena_bytes > most {
            return Err(refuse(
                ErrorCode::Limit,
                format!(
                    "an arena has at most {most} bytes here; ask for less or raise limits.arena_bytes_per_port"
                ),
            ));
        }
        let Some(who) = self.clients.get(client) else {
            return Err(refuse(ErrorCode::Internal, "no such client"));
        };
        let service = who.service;
        let (uid, pid) = (who.who.uid, who.who.pid);
        let request = who.asked.unwrap_or(0);
        if let Some((number, phase)) = self.ports.opened_for(client, request) {
            return Ok(match phase {
                Phase::Open => Opening::Done(number),
                _ => Opening::Begun(number),
            });
        }
        if !service && let Some(until) = self.ports.held_back_until(uid, Instant::now()) {
            return Ok(Opening::HeldBack(until));
        }
        let acl = &self.config.acl;
        let allowed = |port| {
            if port == 0 {
                service
            } else {
                service || acl.allows(&who.who, port)
            }
        };
        let number = match wanted {
            Some(port) if port >= PORTS => {
                return Err(refuse(
                    ErrorCode::NotFound,
                    format!("there is no port {port}; ports are 1 to {}", PORTS - 1),
                ));
            }
            Some(port) if !allowed(port) => {
                return Err(refuse(
                    ErrorCode::Denied,
                    format!(
                        "port {port} is not for uid {uid}; see [[acl]] in the daemon's configuration"
                    ),
                ));
            }
            Some(port) => port,
            None => self.ports.any_free(allowed).ok_or_else(|| {
                refuse(
                    ErrorCode::Denied,
                    format!(
                        "no free port is for uid {uid}; see [[acl]] in the daemon's configuration"
                    ),
                )
            })?,
        };
        match self.ports.get(number).map(|port| port.phase) {
            Some(Phase::Free) => {}
            Some(Phase::Closing) => return Ok(Opening::Wait(number)),
            _ => {
                return Err(refuse(
                    ErrorCode::PortInUse,
                    format!("port {number} is in use; `portolan ports` shows by whom"),
                ));
            }
        }
        if number != 0 {
            if ports >= limits.ports {
                return Err(refuse(
                    ErrorCode::Limit,
                    format!(
                        "all {} ports are in use; close one or raise limits.ports",
                        limits.ports
                    ),
                ));
            }
            if arena_bytes.saturating_add(geometry.arena_bytes) > limits.arena_bytes_total {
                return Err(refuse(
                    ErrorCode::Limit,
                    format!(
                        "arenas have {arena_bytes} of {} bytes; close a port or raise limits.arena_bytes_total",
                        limits.arena_bytes_total
                    ),
                ));
            }
        }
        if !service {
            let used = self.ports.of_user(uid);
            let checked = self.config.quotas.check(uid, &used, &amounts(&geometry));
            checked.map_err(|exceeded| refuse(ErrorCode::Limit, exceeded.to_string()))?;
        }
        let index = self.config.engine_of(number);
        if self.engines.get(index).is_some_and(Engine::is_degraded) {
            return Err(refuse(
                ErrorCode::Unavailable,
                format!("the engine of port {number} keeps dying; see the daemon's log"),
            ));
        }
        let memory = PortMemory::create(self.config.node, number, geometry).map_err(|error| {
            refuse(
                ErrorCode::Internal,
                format!("the port's memory cannot be made: {error}"),
            )
        })?;
        self.begin_opening(number, memory, (client, request), (uid, pid))
            .map_err(|error| refuse(ErrorCode::Limit, error.to_string()))?;
        Ok(Opening::Begun(number))
    }

    /// Stored, then journalled, then told to the engine.
    fn begin_opening(
        &mut self,
        number: u16,
        memory: PortMemory,
        opened_for: (u64, u64),
        owner: (u32, i32),
    ) -> Result<(), StoreError> {
        let index = self.config.engine_of(number);
        let (Some(engine), Some(port)) = (self.engines.get(index), self.ports.get_mut(number))
        else {
            return Ok(());
        };
        let (last, _) = engine.memory.port_life(number);
        // Never 0: a zeroed record is no generation's.
        port.generation = last.checked_add(1).unwrap_or(1);
        port.opened_for = opened_for;
        let life = port.life(number);
        self.store.put_all(
            &memory
                .parts()
                .map(|(part, fd)| (Name::Port(life, part), fd)),
        )?;
        points::reached("open.stored");
        port.phase = Phase::Opening;
        port.owner = Some(opened_for.0);
        (port.owner_uid, port.owner_pid) = owner;
        let message = ToEngine::OpenPort {
            port: number,
            generation: port.generation,
            geometry: memory.geometry,
        };
        let fds = memory.for_engine();
        port.memory = Some(memory);
        engine
            .memory
            .set_port_life(number, port.generation, state::OPENING);
        points::reached("open.journalled");
        // Without a process now, the next one is told when it starts.
        self.tell(index, &message, fds);
        points::reached("open.told");
        Ok(())
    }

    /// An engine says that it serves a port.
    pub(super) fn on_port_opened(&mut self, index: usize, number: u16, generation: u32) {
        let ours = self.config.engine_of(number) == index;
        let Some(port) = self
            .ports
            .get_mut(number)
            .filter(|p| ours && p.generation == generation)
        else {
            return;
        };
        // Open already: restored. Closing: the engine will hear of that next.
        if port.phase != Phase::Opening {
            return;
        }
        let (Some(memory), Some(owner)) = (&port.memory, port.owner) else {
            return;
        };
        points::reached("open.heard");
        let opened = memory.mark_open().and_then(|()| memory.for_application());
        let fds = match opened {
            Ok(fds) => fds,
            Err(error) => {
                tracing::error!(port = number, %error, "the port's memory cannot be mapped");
                let error = refuse(ErrorCode::Internal, "the port's memory cannot be mapped");
                self.close_port(number, CloseReason::BadMemory);
                self.finish(owner, error, Vec::new());
                return;
            }
        };
        port.phase = Phase::Open;
        let geometry = memory.geometry;
        if let Some(engine) = self.engines.get(index) {
            engine.memory.set_port_life(number, generation, state::OPEN);
        }
        let opened = Event::new(Kind::PortOpened, "port open").port(number);
        let opened = opened.field("uid", port.owner_uid);
        self.events.record(opened.field("pid", port.owner_pid));
        points::reached("open.open");
        let reply = Response::PortOpened {
            port: number,
            node: self.config.node,
            geometry,
        };
        self.finish(owner, reply, fds);
    }

    /// Tells a client that its port is open, which a predecessor has opened for it.
    pub(super) fn answer_opened(&mut self, client: u64, number: u16) {
        let Some(memory) = self.ports.get(number).and_then(|port| port.memory.as_ref()) else {
            return;
        };
        let reply = Response::PortOpened {
            port: number,
            node: self.config.node,
            geometry: memory.geometry,
        };
        match memory.for_application() {
            Ok(fds) => self.finish(client, reply, fds),
            Err(error) => {
                tracing::error!(port = number, %error, "the port's memory cannot be opened");
                let error = refuse(ErrorCode::Internal, "the port's memory cannot be opened");
                self.close_port(number, CloseReason::BadMemory);
                self.finish(client, error, Vec::new());
            }
        }
    }
}
