//! A daemon and an engine small enough to read: real sockets, real memfds, real doorbells, one node, no network.
//!
//! The engine delivers in the order sent; what finds no buffer waits in its stream, as it should. Its `Knobs` make it misbehave.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::collections::{BTreeMap, VecDeque};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use portolan_abi::control::{ErrorCode, MAX_REQUEST_BYTES, Request, Response};
use portolan_abi::event::{Certainty, Event, EventKind, Outcome};
use portolan_abi::memory::{self, ClientHalf, EngineHalf};
use portolan_abi::port::{CloseReason, PortGeometry, state};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{FLAG_INLINE, Opcode, ReceiveToken, SendToken, TokenRef, Untrusted};
use portolan_abi::{MAX_MESSAGE_BYTES, PORT_ABI_VERSION};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

pub const NODE: u16 = 1;
pub const SECOND: Duration = Duration::from_secs(1);
pub const LONG: Duration = Duration::from_secs(10);

/// What the daemon answers wrongly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lie {
    #[default]
    None,
    Version,
    Magic,
    Port,
    Size,
    Unsealed,
    Descriptors,
    NoJson,
    TooLong,
    Silence,
    HangUp,
    Endless,
}

/// How the engine behaves.
#[derive(Default)]
pub struct Knobs {
    /// Sleeps on its doorbells between looks, as an adaptive engine does.
    pub sleeps: AtomicBool,
    /// Accepts, but neither delivers nor completes.
    pub frozen: AtomicBool,
    /// Doorbells heard.
    pub rung: AtomicU32,
    stop: AtomicBool,
}

pub struct FakePort {
    pub client: ClientHalf,
    pub engine: EngineHalf,
    events: OwnedFd,
    doorbell: OwnedFd,
    sends: ConsumerCursor,
    provides: ConsumerCursor,
    completions: ProducerCursor,
    offered: Vec<(TokenRef, ReceiveToken)>,
    waiting: VecDeque<Pending>,
    /// Streams held up by a failed send: (node, port, priority).
    held: Vec<(u16, u16, u8)>,
    alarm_fired: u64,
}

struct Pending {
    slot: TokenRef,
    token: SendToken,
    deadline: Option<Instant>,
}

type Ports = Arc<Mutex<BTreeMap<u16, FakePort>>>;

pub struct FakeDaemon {
    pub path: PathBuf,
    pub knobs: Arc<Knobs>,
    pub ports: Ports,
    lie: Arc<Mutex<Lie>>,
    connections: Arc<Mutex<Vec<OwnedFd>>>,
    threads: Vec<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl FakeDaemon {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("portolan.sock");
        let listener = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        let mut daemon = Self {
            path,
            knobs: Arc::default(),
            ports: Arc::default(),
            lie: Arc::default(),
            connections: Arc::default(),
            threads: Vec::new(),
            _dir: dir,
        };
        let (knobs, ports) = (daemon.knobs.clone(), daemon.ports.clone());
        daemon
            .threads
            .push(std::thread::spawn(move || engine(&knobs, &ports)));
        let (knobs, ports, lie, connections) = (
            daemon.knobs.clone(),
            daemon.ports.clone(),
            daemon.lie.clone(),
            daemon.connections.clone(),
        );
        daemon.threads.push(std::thread::spawn(move || {
            while !knobs.stop.load(Ordering::Relaxed) {
                if !readable(&listener, Duration::from_millis(20)) {
                    continue;
                }
                let socket = rustix::net::accept(&listener).unwrap();
                connections
                    .lock()
                    .unwrap()
                    .push(rustix::io::dup(&socket).unwrap());
                let (knobs, ports, lie) = (knobs.clone(), ports.clone(), lie.clone());
                std::thread::spawn(move || serve(&socket, &knobs, &ports, &lie));
            }
        }));
        daemon
    }

    pub fn lie(&self, lie: Lie) {
        *self.lie.lock().unwrap() = lie;
    }

    /// Looks at, or does something to, a port from the engine's side, between two of its loops.
    pub fn with_port<T>(&self, port: u16, f: impl FnOnce(&mut FakePort) -> T) -> T {
        f(self.ports.lock().unwrap().get_mut(&port).expect("open"))
    }

    /// Dies: every connection ends, the ports' memory stays as it is.
    pub fn die(&self) {
        self.knobs.frozen.store(true, Ordering::Relaxed);
        for socket in self.connections.lock().unwrap().drain(..) {
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.knobs.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn readable(fd: &OwnedFd, timeout: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&timeout)).unwrap_or(0) > 0
}

// ---- the control protocol ----

fn serve(socket: &OwnedFd, knobs: &Knobs, ports: &Ports, lie: &Mutex<Lie>) {
    let mut mine = Vec::new();
    let mut packet = [0; MAX_REQUEST_BYTES];
    loop {
        while !readable(socket, Duration::from_millis(20)) {
            if knobs.stop.load(Ordering::Relaxed) {
                return;
            }
        }
        let mut space: [MaybeUninit<u8>; 0] = [];
        let received = rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut packet)],
            &mut RecvAncillaryBuffer::new(&mut space),
            RecvFlags::empty(),
        );
        let len = received.map_or(0, |r| r.bytes);
        if len == 0 {
            break;
        }
        let lie = *lie.lock().unwrap();
        let (response, fds) = match serde_json::from_slice(&packet[..len]) {
            Ok(request) => answer(request, lie, ports, &mut mine),
            Err(e) => (error(ErrorCode::BadRequest, &e.to_string()), Vec::new()),
        };
        if !reply(socket, lie, &response, &fds) {
            break;
        }
    }
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    for port in mine {
        if let Some(port) = ports.lock().unwrap().remove(&port) {
            port.set_state(state::CLOSED, Some(CloseReason::OwnerGone));
        }
    }
}

fn error(code: ErrorCode, message: &str) -> Response {
    Response::Error {
        code,
        message: message.into(),
    }
}

fn answer(
    request: Request,
    lie: Lie,
    ports: &Ports,
    mine: &mut Vec<u16>,
) -> (Response, Vec<OwnedFd>) {
    let node = |id, name: &str| Response::Node {
        id,
        name: name.into(),
        default_timeout_ms: 3_000,
    };
    let response = match request {
        Request::Attach { abi } | Request::OpenPort { abi, .. } if abi != PORT_ABI_VERSION => {
            error(ErrorCode::AbiMismatch, "abi")
        }
        Request::Attach { .. } => node(NODE, "fake"),
        Request::Resolve { node: name } => match name.as_str() {
            "1" | "fake" => node(NODE, "fake"),
            "2" | "other" => node(2, "other"),
            _ => error(ErrorCode::NotFound, "no node is called that"),
        },
        Request::OpenPort { port, geometry, .. } => {
            let mut ports = ports.lock().unwrap();
            let port = port
                .or_else(|| (16..256).find(|p| !ports.contains_key(p)))
                .unwrap();
            if ports.contains_key(&port) {
                let message = format!("port {port} is taken");
                return (error(ErrorCode::PortInUse, &message), Vec::new());
            }
            let (made, mut fds) = FakePort::make(port, geometry, lie);
            ports.insert(port, made);
            mine.push(port);
            if lie == Lie::Descriptors {
                fds.pop();
            }
            let response = Response::PortOpened {
                port,
                node: NODE,
                geometry,
            };
            return (response, fds);
        }
        Request::ClosePort { port } => {
            mine.retain(|&p| p != port);
            match ports.lock().unwrap().remove(&port) {
                Some(port) => {
                    port.set_state(state::CLOSED, Some(CloseReason::ByOwner));
                    Response::Done
                }
                None => error(ErrorCode::NotFound, "no such port"),
            }
        }
        Request::Status {} | Request::Peers {} | Request::Ports {} | Request::Counters {} => {
            // Longer than one packet.
            Response::Document {
                document: serde_json::json!({ "padding": "x".repeat(100_000) }),
            }
        }
        Request::Fault { .. } => error(ErrorCode::Denied, "only root may do that"),
    };
    (response, Vec::new())
}

fn reply(socket: &OwnedFd, lie: Lie, response: &Response, fds: &[OwnedFd]) -> bool {
    let mut text = serde_json::to_vec(response).unwrap();
    match lie {
        Lie::NoJson => text = b"}{".to_vec(),
        Lie::Silence => return true,
        Lie::HangUp => return false,
        _ => {}
    }
    let pieces: Vec<_> = match lie {
        Lie::TooLong => {
            text.resize(60_000, b' ');
            vec![&text[..]]
        }
        _ => text.chunks(30_000).collect(),
    };
    let last = pieces.len() - 1;
    for (i, piece) in pieces.into_iter().enumerate() {
        let mut packet = vec![u8::from(i != last || lie == Lie::Endless)];
        packet.extend_from_slice(piece);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if i == last && !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let sent = rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&packet)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        if sent.is_err() {
            return false;
        }
    }
    lie != Lie::Endless
}

// ---- the engine ----

impl FakePort {
    fn make(port: u16, geometry: PortGeometry, lie: Lie) -> (Self, Vec<OwnedFd>) {
        let client_fd = memory::create_sealed("fake-client", geometry.client_half_bytes()).unwrap();
        let engine_fd = memory::create_sealed("fake-engine", geometry.engine_half_bytes()).unwrap();
        let client = ClientHalf::map(client_fd.as_fd(), geometry).unwrap();
        let engine = EngineHalf::map(engine_fd.as_fd(), geometry, true).unwrap();
        client.initialise();
        engine.initialise(NODE, if lie == Lie::Port { port + 1 } else { port });
        match lie {
            Lie::Version => engine.header().version.store(99, Ordering::Relaxed),
            Lie::Magic => client.header().magic.store(1, Ordering::Relaxed),
            _ => {}
        }
        engine
            .header()
            .state
            .store(u64::from(state::OPEN), Ordering::Release);
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (events, doorbell) = (eventfd(), eventfd());
        let shown = match lie {
            Lie::Size => memory::create_sealed("wrong", 4096).unwrap(),
            Lie::Unsealed => {
                let fd = rustix::fs::memfd_create("bare", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&fd, geometry.client_half_bytes() as u64).unwrap();
                fd
            }
            _ => client_fd,
        };
        let fds = vec![
            shown,
            memory::reopen_read_only(engine_fd.as_fd()).unwrap(),
            rustix::io::dup(&events).unwrap(),
            rustix::io::dup(&doorbell).unwrap(),
        ];
        let made = Self {
            client,
            engine,
            events,
            doorbell,
            sends: ConsumerCursor::new(0),
            provides: ConsumerCursor::new(0),
            completions: ProducerCursor::new(0),
            offered: Vec::new(),
            waiting: VecDeque::new(),
            held: Vec::new(),
            alarm_fired: 0,
        };
        (made, fds)
    }

    pub fn set_state(&self, to: u32, reason: Option<CloseReason>) {
        let word = u64::from(reason.map_or(0, |r| r as u32)) << 32 | u64::from(to);
        self.engine.header().state.store(word, Ordering::Release);
        self.ring();
    }

    /// Wakes the application if it sleeps.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.client.header().waiting.load(Ordering::Relaxed) != 0 {
            rustix::io::write(&self.events, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Puts any words into the event ring.
    pub fn push_words(&mut self, words: &[u64; 8]) {
        let ring = self.engine.event_ring(&self.client);
        self.completions.stage(ring, words);
        self.completions.publish(ring);
        self.ring();
    }

    pub fn push(&mut self, event: &Event) {
        self.push_words(&event.encode());
    }

    fn complete(&mut self, slot: TokenRef, token: &SendToken, outcome: Outcome) {
        self.push(&Event {
            kind: EventKind::Sent(outcome),
            priority: token.priority,
            slot: slot.slot,
            generation: slot.generation,
            len: 0,
            node: 0,
            port: 0,
            record: 0,
            epoch: 0,
            number: 0,
            tag: 0,
        });
    }

    /// Takes what the application published.
    fn take(&mut self) {
        let geometry = self.client.geometry();
        let ring = self.client.provide_ring(&self.engine);
        for _ in 0..self.provides.available(ring).unwrap() {
            let slot = TokenRef::decode(self.provides.take(ring)[0]);
            let words = Untrusted::read(&self.client.receive_slots()[slot.slot as usize]);
            let token = words.check(slot, &geometry).expect("a sensible token");
            self.offered.push((slot, token));
        }
        self.provides.release(ring);
        let ring = self.client.send_ring(&self.engine);
        let mut taken = Vec::new();
        for _ in 0..self.sends.available(ring).unwrap() {
            let slot = TokenRef::decode(self.sends.take(ring)[0]);
            let words = Untrusted::read(&self.client.send_slots()[slot.slot as usize]);
            taken.push((
                slot,
                words.check(slot, &geometry).expect("a sensible token"),
            ));
        }
        self.sends.release(ring);
        for (slot, token) in taken {
            self.accept(slot, token);
        }
    }

    fn accept(&mut self, slot: TokenRef, token: SendToken) {
        let stream = (token.node, token.port, token.priority);
        let mut ended = Vec::new();
        match token.opcode {
            Opcode::Send => {
                let us = token.timeout_us;
                let deadline = (us != 0).then(|| Instant::now() + Duration::from_micros(us.into()));
                self.waiting.push_back(Pending {
                    slot,
                    token,
                    deadline,
                });
                return;
            }
            Opcode::ResumeSending => self.held.retain(|&h| h != stream),
            Opcode::DropSends => {
                self.held.retain(|&h| h != stream);
                self.waiting.retain(|p| {
                    let drop = (p.token.node, p.token.port, p.token.priority) == stream;
                    if drop {
                        ended.push((p.slot, p.token, 7));
                    }
                    !drop
                });
            }
            Opcode::Cancel => self.waiting.retain(|p| {
                let name = u64::from(p.slot.generation) << 32 | u64::from(p.slot.slot);
                if name == token.arena_offset {
                    ended.push((p.slot, p.token, 6));
                }
                name != token.arena_offset
            }),
        }
        for (slot, token, reason) in ended {
            self.complete(slot, &token, not_delivered(reason));
        }
        self.complete(slot, &token, DELIVERED);
    }

    fn payload(&self, pending: &Pending) -> Vec<u8> {
        let mut bytes = vec![0; pending.token.len as usize];
        if pending.token.flags & FLAG_INLINE != 0 {
            self.client
                .read_inline(pending.slot.slot, 0, &mut bytes)
                .unwrap();
        } else {
            let offset = pending.token.arena_offset;
            self.client.read_arena(offset, &mut bytes).unwrap();
        }
        bytes
    }

    /// Puts a message into the smallest buffer that holds it. `None`: it must wait.
    fn deliver(&mut self, from: u16, token: &SendToken, bytes: &[u8]) -> Option<()> {
        let (i, _) = self
            .offered
            .iter()
            .enumerate()
            .filter(|(_, (_, o))| o.priority == token.priority && o.len >= token.len)
            .min_by_key(|(_, (_, o))| o.len)?;
        let (slot, offer) = self.offered.remove(i);
        self.client.write_arena(offer.arena_offset, bytes).unwrap();
        self.push(&Event {
            kind: EventKind::Received,
            priority: token.priority,
            slot: slot.slot,
            generation: slot.generation,
            len: token.len,
            node: NODE,
            port: from,
            record: 0,
            epoch: 1,
            number: 1,
            tag: token.tag,
        });
        Some(())
    }

    fn ring_alarm(&mut self) {
        let at = self.client.header().alarm_at.load(Ordering::Acquire);
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        if at != 0 && at != self.alarm_fired && at <= now {
            self.alarm_fired = at;
            rustix::io::write(&self.events, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

pub const DELIVERED: Outcome = Outcome {
    certainty: Certainty::Delivered,
    reason: 0,
};

pub fn not_delivered(reason: u8) -> Outcome {
    Outcome {
        certainty: Certainty::NotDelivered,
        reason,
    }
}

fn engine(knobs: &Knobs, ports: &Ports) {
    while !knobs.stop.load(Ordering::Relaxed) {
        let mut ports = ports.lock().unwrap();
        let numbers: Vec<u16> = ports.keys().copied().collect();
        for &number in &numbers {
            let port = ports.get_mut(&number).unwrap();
            port.engine
                .header()
                .engine_sleeping
                .store(0, Ordering::Relaxed);
            port.take();
            port.ring_alarm();
            if !knobs.frozen.load(Ordering::Relaxed) {
                work(&mut ports, number);
            }
        }
        let mut sleeps = knobs.sleeps.load(Ordering::Relaxed);
        if sleeps {
            for port in ports.values() {
                port.engine
                    .header()
                    .engine_sleeping
                    .store(1, Ordering::Relaxed);
            }
            fence(Ordering::SeqCst);
            sleeps = ports.values().all(|p| {
                p.sends.available(p.client.send_ring(&p.engine)) == Ok(0)
                    && p.provides.available(p.client.provide_ring(&p.engine)) == Ok(0)
            });
        }
        let bells: Vec<_> = ports
            .values()
            .map(|p| rustix::io::dup(&p.doorbell).unwrap())
            .collect();
        drop(ports);
        if !sleeps {
            std::thread::yield_now();
            continue;
        }
        let mut fds: Vec<_> = bells
            .iter()
            .map(|b| PollFd::new(b, PollFlags::IN))
            .collect();
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        for bell in &bells {
            if readable(bell, Duration::ZERO) && rustix::io::read(bell, &mut [0; 8]).is_ok() {
                knobs.rung.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// One pass over a port's waiting sends. A stream goes on only past what ended well.
fn work(ports: &mut BTreeMap<u16, FakePort>, number: u16) {
    let mut stuck = Vec::new();
    let mut keep = VecDeque::new();
    let mut source = ports.remove(&number).unwrap();
    while let Some(pending) = source.waiting.pop_front() {
        let token = pending.token;
        let stream = (token.node, token.port, token.priority);
        if stuck.contains(&stream) || source.held.contains(&stream) {
            keep.push_back(pending);
            continue;
        }
        let bytes = source.payload(&pending);
        let outcome = if token.node != NODE {
            Some(not_delivered(9))
        } else if token.len == MAX_MESSAGE_BYTES {
            Some(not_delivered(2))
        } else {
            let target = if token.port == number {
                Some(&mut source)
            } else {
                ports.get_mut(&token.port)
            };
            match target {
                None => Some(not_delivered(1)),
                Some(port) => port.deliver(number, &token, &bytes).map(|()| DELIVERED),
            }
        };
        let overdue = pending.deadline.is_some_and(|d| Instant::now() >= d);
        match outcome.or(overdue.then(|| not_delivered(3))) {
            Some(outcome) => {
                if outcome != DELIVERED {
                    source.held.push(stream);
                }
                source.complete(pending.slot, &token, outcome);
            }
            None => {
                stuck.push(stream);
                keep.push_back(pending);
            }
        }
    }
    source.waiting = keep;
    ports.insert(number, source);
}
