//! Connections on the socket: accepted, read, answered, dropped. All of them are hostile until shown otherwise.
//!
//! One request at a time: while one is under way, or its answer waits for room, nothing more is read. So what a connection can make
//! us hold is one request and one answer. Who does not take the answer in time is dropped; so is who sends what is no request,
//! after being told. A connection that ends, however it does, loses its ports at once.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use portolan_abi::control::{ErrorCode, MAX_REQUEST_BYTES, MAX_RESPONSE_PACKET, Request, Response};
use portolan_abi::port::{CloseReason, PortGeometry};
use rustix::net::SocketFlags;

use super::Supervisor;
use super::config::Credentials;
use super::packet::{Outbox, Packet, Received};
use super::poll::{EventFlags, Source, Timer};

/// An engine answers within this, or the request fails.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// A client takes its answer within this, or is dropped.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// Connections accepted before others get a turn.
const ACCEPTS_PER_TURN: usize = 64;

/// What a client waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pending {
    /// Its engine's word that a port is open.
    Open(u16),
    /// Its engine's word that a port is closed.
    Close(u16),
    /// A port that is being closed, to open it again.
    Free(u16, PortGeometry),
    /// That its user, who broke a port, may open one again.
    HeldBack(Option<u16>, PortGeometry),
    /// The engines' reports of their peers.
    Peers,
}

/// A connection.
pub struct Client {
    socket: OwnedFd,
    /// Who it is.
    pub who: Credentials,
    /// It is our own service.
    pub service: bool,
    /// The ports it has.
    pub ports: BTreeSet<u16>,
    /// What it waits for.
    pub pending: Option<Pending>,
    outbox: Outbox,
    /// When what it waits for, or what waits for it, is overdue.
    deadline: Option<Instant>,
    timer: Option<Instant>,
}

/// All connections.
#[derive(Default)]
pub struct Clients {
    clients: HashMap<u64, Client>,
    next: u64,
}

impl Clients {
    /// A connection.
    pub fn get(&self, id: u64) -> Option<&Client> {
        self.clients.get(&id)
    }

    /// A connection.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut Client> {
        self.clients.get_mut(&id)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.clients.len()
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// Those that wait for what `wanted` accepts.
    pub fn waiting(&self, wanted: impl Fn(&Pending) -> bool) -> Vec<u64> {
        let matching = self
            .clients
            .iter()
            .filter(|(_, client)| client.pending.as_ref().is_some_and(&wanted));
        let mut ids: Vec<u64> = matching.map(|(id, _)| *id).collect();
        // First come, first served.
        ids.sort_unstable();
        ids
    }
}

/// A response as packets: the first byte says whether another follows; descriptors go with the last.
pub fn response_packets(response: &Response, fds: Vec<Arc<OwnedFd>>) -> Vec<Packet> {
    let text = serde_json::to_vec(response).unwrap_or_else(|_| {
        br#"{"response":"error","code":"internal","message":"the answer cannot be written"}"#
            .to_vec()
    });
    let mut packets: Vec<Packet> = text
        .chunks(MAX_RESPONSE_PACKET - 1)
        .map(|part| {
            let mut bytes = vec![1];
            bytes.extend_from_slice(part);
            Packet::plain(bytes)
        })
        .collect();
    if let Some(last) = packets.last_mut() {
        last.bytes[0] = 0;
        last.fds = fds;
    }
    packets
}

impl Supervisor {
    /// The listening socket has connections for us.
    pub(super) fn on_listener(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => self.welcome(socket),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    if !self.turn_away() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Out of descriptors: uses the one in reserve to take a connection off the queue. False if that did not work either.
    fn turn_away(&mut self) -> bool {
        let had_reserve = self.reserve.take().is_some();
        let taken = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC);
        if let Ok(socket) = &taken {
            refuse_at_the_door(socket, "the daemon is out of descriptors; try again");
        }
        let worked = taken.is_ok();
        drop(taken);
        self.reserve = super::memory::eventfd().ok();
        had_reserve && worked
    }

    fn welcome(&mut self, socket: OwnedFd) {
        if self.clients.len() >= self.config.limits.clients {
            refuse_at_the_door(
                &socket,
                "all connections are in use; try again, or raise limits.clients",
            );
            return;
        }
        let Ok(who) = super::peer_credentials::of(socket.as_fd()) else {
            return;
        };
        let id = self.clients.next;
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) = self.poll.add(&socket, Source::Client(id), flags) {
            tracing::warn!(%error, "a connection cannot be watched");
            return;
        }
        self.clients.next += 1;
        let service = self.is_service(&who);
        let client = Client {
            socket,
            who,
            service,
            ports: BTreeSet::new(),
            pending: None,
            outbox: Outbox::default(),
            deadline: None,
            timer: None,
        };
        self.clients.clients.insert(id, client);
    }

    /// Something happened on a connection.
    pub(super) fn on_client(&mut self, id: u64, flags: EventFlags) {
        if flags.intersects(EventFlags::HUP | EventFlags::RDHUP | EventFlags::ERR) {
            self.drop_client(id);
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.flush_client(id);
        }
        let Some(client) = self.clients.get(id) else {
            return;
        };
        if !flags.contains(EventFlags::IN) || client.pending.is_some() || !client.outbox.is_empty()
        {
            return;
        }
        let mut buffer = [0; MAX_REQUEST_BYTES];
        let bad = |message: &str| Response::Error {
            code: ErrorCode::BadRequest,
            message: message.to_owned(),
        };
        match super::packet::receive(client.socket.as_fd(), &mut buffer) {
            Ok(Received::Nothing) => {}
            Ok(Received::Packet(length)) => {
                let bytes = buffer.get(..length).unwrap_or_default();
                match serde_json::from_slice::<Request>(bytes) {
                    Ok(request) => self.on_request(id, request),
                    Err(_) => self.finish(id, bad("the packet is no request"), Vec::new()),
                }
            }
            Ok(Received::TooLong) => {
                self.finish(id, bad("the packet is longer than any request"), Vec::new());
            }
            Ok(Received::Closed) | Err(_) => self.drop_client(id),
        }
    }

    /// The client waits for this from now on.
    pub(super) fn wait_for(&mut self, id: u64, pending: Pending) {
        if let Some(client) = self.clients.get_mut(id) {
            client.pending = Some(pending);
            client.deadline = Some(Instant::now() + ANSWER_WITHIN);
        }
        self.watch_client(id);
    }

    /// Answers a client: its request is done with.
    pub(super) fn finish(&mut self, id: u64, response: Response, fds: Vec<Arc<OwnedFd>>) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        client.pending = None;
        client.deadline = None;
        for packet in response_packets(&response, fds) {
            client.outbox.push(packet);
        }
        self.flush_client(id);
    }

    fn flush_client(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        let before = client.outbox.len();
        if client.outbox.flush(client.socket.as_fd()).is_err() {
            self.drop_client(id);
            return;
        }
        if client.pending.is_none() {
            if client.outbox.is_empty() {
                client.deadline = None;
            } else if client.deadline.is_none() || client.outbox.len() < before {
                client.deadline = Some(Instant::now() + TAKEN_WITHIN);
            }
        }
        self.watch_client(id);
    }

    /// Watches for what makes sense now, and until when.
    fn watch_client(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        let mut flags = EventFlags::RDHUP;
        let idle = client.pending.is_none() && client.outbox.is_empty();
        flags.set(EventFlags::IN, idle);
        flags.set(EventFlags::OUT, !client.outbox.is_empty());
        if let Some(deadline) = client.deadline
            && client.timer.is_none_or(|timer| timer > deadline)
        {
            client.timer = Some(deadline);
            self.poll.set_timer(deadline, Timer::Client(id));
        }
        if self
            .poll
            .modify(&client.socket, Source::Client(id), flags)
            .is_err()
        {
            self.drop_client(id);
        }
    }

    /// A client's timer fired.
    pub(super) fn on_client_timer(&mut self, id: u64, now: Instant) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        client.timer = None;
        match client.deadline {
            Some(deadline) if deadline <= now => {}
            // Something else is due later.
            Some(_) => return self.watch_client(id),
            None => return,
        }
        let unavailable = |message: String| Response::Error {
            code: ErrorCode::Unavailable,
            message,
        };
        match client.pending.clone() {
            None => {
                tracing::debug!(
                    pid = client.who.pid,
                    "client dropped: it does not take its answer"
                );
                self.drop_client(id);
            }
            Some(Pending::Open(port)) => {
                client.ports.remove(&port);
                self.disown(port);
                self.close_port(port, CloseReason::Administrator);
                let message = format!("the engine of port {port} does not answer; try again");
                self.finish(id, unavailable(message), Vec::new());
            }
            Some(Pending::Close(port)) => {
                client.ports.remove(&port);
                self.disown(port);
                let message = format!(
                    "the engine of port {port} does not answer; the port closes when it does"
                );
                self.finish(id, unavailable(message), Vec::new());
            }
            Some(Pending::Free(port, _)) => {
                let message = format!("port {port} is still being closed; try again");
                let error = Response::Error {
                    code: ErrorCode::PortInUse,
                    message,
                };
                self.finish(id, error, Vec::new());
            }
            // These have timers of their own.
            Some(Pending::HeldBack(port, geometry)) => self.request_port(id, port, geometry),
            Some(Pending::Peers) => self.finish(
                id,
                unavailable("the engines do not answer; try again".to_owned()),
                Vec::new(),
            ),
        }
    }

    /// A client's user is held back no longer.
    pub(super) fn on_held_back_timer(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        if let Some(Pending::HeldBack(port, geometry)) = client.pending {
            client.pending = None;
            self.request_port(id, port, geometry);
        }
    }

    /// Ends a connection: its ports close.
    pub(super) fn drop_client(&mut self, id: u64) {
        let Some(client) = self.clients.clients.remove(&id) else {
            return;
        };
        self.poll.remove(&client.socket);
        for port in &client.ports {
            self.disown(*port);
            self.close_port(*port, CloseReason::OwnerGone);
        }
    }

    /// A port became free: those who waited for it try again, the first one first.
    pub(super) fn retry_waiting(&mut self, number: u16) {
        let waiting = self
            .clients
            .waiting(|pending| matches!(pending, Pending::Free(port, _) if *port == number));
        for id in waiting {
            let Some(client) = self.clients.get(id) else {
                continue;
            };
            if let Some(Pending::Free(port, geometry)) = client.pending {
                self.request_port(id, Some(port), geometry);
            }
        }
    }
}

/// Tells a connection why it is not wanted, if it listens.
fn refuse_at_the_door(socket: &OwnedFd, why: &str) {
    let response = Response::Error {
        code: ErrorCode::Limit,
        message: why.to_owned(),
    };
    for packet in response_packets(&response, Vec::new()) {
        // It closes either way.
        let _ = packet.send(socket.as_fd());
    }
}
