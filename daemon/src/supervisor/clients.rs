//! Connections on the socket: accepted, read, answered, dropped. All of them are hostile until shown otherwise.
//!
//! One request at a time: while one is under way, or its answer waits for room, nothing more is read. So what a connection can make
//! us hold is one request and one answer. Who does not take the answer in time is dropped; so is who sends what is no request,
//! after being told. A connection that ends, however it does, loses its ports at once.
//!
//! A request that is numbered (`portolan_abi::control`) stays in its socket until its answer is out, so that a supervisor that dies in
//! between has a successor that finds it there. Hence whatever a request does must be done only once if it is done twice; those that cannot
//! (faults, upgrades) are taken out first. Every connection is in the store before its first request is looked at.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use portolan_abi::control::{
    ErrorCode, FIRST, MAX_REQUEST_BYTES, MAX_RESPONSE_PACKET, MORE, Request, Response,
    number_prefix, split_number,
};
use portolan_abi::port::{CloseReason, PortGeometry};
use rustix::net::SocketFlags;

use super::Supervisor;
use super::config::{Amounts, Credentials, Resource};
use super::packet::{Outbox, Packet, Received};
use super::poll::{EventFlags, Source, Timer};
use super::store::{Name, points};

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
    /// What another build says of itself.
    Upgrade,
    /// Something to happen: which run of the supervisor it has heard of, up to which event.
    Events(Option<String>, u64),
}

/// A connection.
pub struct Client {
    socket: Arc<OwnedFd>,
    /// Who it is.
    pub who: Credentials,
    /// It is our own service.
    pub service: bool,
    /// The ports it has.
    pub ports: BTreeSet<u16>,
    /// What it waits for.
    pub pending: Option<Pending>,
    /// The number of the request we work on.
    pub asked: Option<u64>,
    /// That request is still in the socket.
    untaken: bool,
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

    /// How many a user has.
    fn of_user(&self, uid: u32) -> u64 {
        let theirs = self.clients.values();
        theirs
            .filter(|client| client.who.uid == uid && !client.service)
            .count() as u64
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

/// A response as packets: the first byte says whether another follows, and whether the answer to a numbered request begins here;
/// descriptors go with the last.
pub fn response_packets(
    number: Option<u64>,
    response: &Response,
    fds: Vec<Arc<OwnedFd>>,
) -> Vec<Packet> {
    let mut text = number.map_or_else(Vec::new, |number| number_prefix(number).into_bytes());
    let before = text.len();
    if serde_json::to_writer(&mut text, response).is_err() {
        text.truncate(before);
        text.extend_from_slice(
            br#"{"response":"error","code":"internal","message":"the answer cannot be written"}"#,
        );
    }
    let mut packets: Vec<Packet> = text
        .chunks(MAX_RESPONSE_PACKET - 1)
        .map(|part| {
            let mut bytes = vec![MORE];
            bytes.extend_from_slice(part);
            Packet::plain(bytes)
        })
        .collect();
    if let Some(last) = packets.last_mut() {
        last.bytes[0] = 0;
        last.fds = fds;
    }
    if number.is_some()
        && let Some(first) = packets.first_mut()
    {
        first.bytes[0] |= FIRST;
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
            self.statistics.turned_away += 1;
            let why = "the daemon is out of descriptors; try again";
            refuse_at_the_door(socket, &refusal(why));
        }
        let worked = taken.is_ok();
        drop(taken);
        self.reserve = super::memory::eventfd().ok();
        had_reserve && worked
    }

    fn welcome(&mut self, socket: OwnedFd) {
        let Ok(who) = super::peer_credentials::of(socket.as_fd()) else {
            return;
        };
        if let Err(why) = self.has_room_for(&who) {
            self.statistics.turned_away += 1;
            let refusal = refusal(&why);
            self.audit(&who, "connect", &refusal);
            refuse_at_the_door(&socket, &refusal);
            return;
        }
        let id = self.clients.next;
        let socket = Arc::new(socket);
        if let Err(error) = self.store.put(Name::Client(id), &socket) {
            tracing::warn!(%error, "a connection cannot be stored");
            refuse_at_the_door(&socket, &refusal(&error.to_string()));
            return;
        }
        points::reached("client.stored");
        if !self.admit(id, socket, who) {
            self.store.remove(&Name::Client(id));
        }
    }

    /// May they have one more connection? Our own service always may.
    fn has_room_for(&self, who: &Credentials) -> Result<(), String> {
        if self.is_service(who) {
            return Ok(());
        }
        if self.clients.len() >= self.config.limits.clients {
            return Err(
                "all connections are in use; try again, or raise limits.clients".to_owned(),
            );
        }
        let used = Amounts::default().with(Resource::Connections, self.clients.of_user(who.uid));
        let one = Amounts::default().with(Resource::Connections, 1);
        let checked = self.config.quotas.check(who.uid, &used, &one);
        checked.map_err(|exceeded| exceeded.to_string())
    }

    /// Watches a connection that is in the store.
    fn admit(&mut self, id: u64, socket: Arc<OwnedFd>, who: Credentials) -> bool {
        self.statistics.connections += 1;
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) = self.poll.add(&socket, Source::Client(id), flags) {
            tracing::warn!(%error, "a connection cannot be watched");
            return false;
        }
        self.clients.next = self.clients.next.max(id) + 1;
        let service = self.is_service(&who);
        let client = Client {
            socket,
            who,
            service,
            ports: BTreeSet::new(),
            pending: None,
            asked: None,
            untaken: false,
            outbox: Outbox::default(),
            deadline: None,
            timer: None,
        };
        self.clients.clients.insert(id, client);
        true
    }

    /// Goes on with a predecessor's connection.
    pub(super) fn adopt_client(&mut self, id: u64, socket: OwnedFd) {
        let name = Name::Client(id);
        let socket = Arc::new(socket);
        self.store.adopt(name, Arc::clone(&socket));
        let adopted = match super::peer_credentials::of(socket.as_fd()) {
            Ok(who) => self.admit(id, socket, who),
            Err(_) => false,
        };
        if !adopted {
            self.store.remove(&name);
        }
    }

    /// The number of the request that waits in a connection, if one does.
    pub(super) fn waiting_request(&self, id: u64) -> Option<u64> {
        let client = self.clients.get(id)?;
        let mut buffer = [0; MAX_REQUEST_BYTES];
        match super::packet::peek(client.socket.as_fd(), &mut buffer) {
            Ok(Received::Packet(length)) => split_number(buffer.get(..length)?).0,
            _ => None,
        }
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
        match super::packet::peek(client.socket.as_fd(), &mut buffer) {
            Ok(Received::Nothing) => {}
            Ok(Received::Packet(length)) => {
                let bytes = buffer.get(..length).unwrap_or_default();
                let (number, text) = split_number(bytes);
                let request = serde_json::from_slice::<Request>(text);
                self.begin_request(id, number);
                match request {
                    Ok(request) => self.on_request(id, request),
                    Err(_) => self.finish(id, bad("the packet is no request"), Vec::new()),
                }
            }
            Ok(Received::TooLong) => {
                self.begin_request(id, None);
                self.finish(id, bad("the packet is longer than any request"), Vec::new());
            }
            Ok(Received::Closed) | Err(_) => self.drop_client(id),
        }
    }

    /// Works on the request that waits in the socket. One with a number stays there until it is answered.
    fn begin_request(&mut self, id: u64, number: Option<u64>) {
        if let Some(client) = self.clients.get_mut(id) {
            client.asked = number;
            client.untaken = true;
        }
        if number.is_none() {
            self.take_request(id);
        }
    }

    /// Takes the request out of the socket: a successor would not see it again.
    pub(super) fn take_request(&mut self, id: u64) {
        if let Some(client) = self.clients.get_mut(id)
            && std::mem::take(&mut client.untaken)
        {
            // It was there when we looked, and nobody else reads here; the bytes are of no interest.
            let _ = super::packet::receive(client.socket.as_fd(), &mut [0]);
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
        self.statistics.answered(&response);
        client.pending = None;
        client.deadline = None;
        for packet in response_packets(client.asked, &response, fds) {
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
        let answered = client.pending.is_none() && client.outbox.is_empty();
        if answered {
            client.deadline = None;
            points::reached("client.answered");
            self.take_request(id);
        } else if client.pending.is_none()
            && (client.deadline.is_none() || client.outbox.len() < before)
        {
            client.deadline = Some(Instant::now() + TAKEN_WITHIN);
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
            Some(Pending::Events(run, after)) => {
                let document = self.events.document(run.as_deref(), after);
                self.finish(id, Response::Document { document }, Vec::new());
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
            // The build is asked with a bound of its own.
            Some(Pending::Upgrade) => self.wait_for(id, Pending::Upgrade),
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
        self.end_captures_of(id);
        for port in &client.ports {
            self.disown(*port);
            self.close_port(*port, CloseReason::OwnerGone);
        }
        // Last: a successor that finds it sees that it has ended, and does the same.
        points::reached("client.dropped");
        self.store.remove(&Name::Client(id));
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

/// There is no room, and why.
fn refusal(why: &str) -> Response {
    Response::Error {
        code: ErrorCode::Limit,
        message: why.to_owned(),
    }
}

/// Tells a connection why it is not wanted, if it listens.
fn refuse_at_the_door(socket: &OwnedFd, refusal: &Response) {
    for packet in response_packets(None, refusal, Vec::new()) {
        // It closes either way.
        let _ = packet.send(socket.as_fd());
    }
}
