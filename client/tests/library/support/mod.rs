//! A daemon and an engine small enough to read: real sockets, real memfds, real doorbells, one node, no network.
//!
//! The engine delivers in the order sent; what finds no buffer waits in its stream, as it should. Its `Knobs` make it misbehave.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use portolan::{Event, Node, Port, PortOptions, Priority, SendOptions, Sent};
use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{ErrorCode, MAX_REQUEST_BYTES, Request, Response};
use portolan_abi::port::{CloseReason, state};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

mod engine;

// Each test file that includes this module uses its own part of it.
#[allow(unused_imports)]
pub use engine::{DELIVERED, FakePort, not_delivered, received};

pub const NODE: u16 = 1;
pub const SECOND: Duration = Duration::from_secs(1);
pub const LONG: Duration = Duration::from_secs(10);

/// Attaches and opens a port.
pub fn open(daemon: &FakeDaemon, port: u16) -> Port {
    let node = Node::attach(&daemon.path).unwrap();
    node.open_port(PortOptions::at(port)).unwrap()
}

/// A send with this tag.
pub fn tagged(tag: u64) -> SendOptions {
    SendOptions {
        tag,
        ..SendOptions::default()
    }
}

/// Gives a port so many buffers.
pub fn provide(port: &mut Port, count: usize, len: usize, priority: Priority) {
    for _ in 0..count {
        let buffer = port.allocate(len).unwrap();
        port.provide_receive_buffer(buffer, priority).unwrap();
    }
}

/// The next event.
pub fn event(port: &mut Port) -> Event {
    port.blocking_receive(LONG).unwrap().expect("an event")
}

/// The end of a send, which comes next.
pub fn sent(port: &mut Port) -> Sent {
    match event(port) {
        Event::Sent(sent) => sent,
        other => panic!("{other:?}"),
    }
}

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
            .push(std::thread::spawn(move || engine::engine(&knobs, &ports)));
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
        let (response, fds) =
            match serde_json::from_slice(portolan_abi::control::split_number(&packet[..len]).1) {
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
        Request::Upgrade { .. } => Response::Done,
        Request::Status {} | Request::Peers {} | Request::Ports {} | Request::Counters {} => {
            // Longer than one packet.
            Response::Document {
                document: serde_json::json!({ "padding": "x".repeat(100_000) }),
            }
        }
        Request::Map {} | Request::Drain { .. } => Response::Document {
            document: serde_json::json!({ "draining": true, "outstanding": 0 }),
        },
        Request::Fault { .. } | Request::Capture { .. } => {
            error(ErrorCode::Denied, "only root may do that")
        }
        // It is older than that.
        Request::Events { .. } => error(ErrorCode::BadRequest, "the packet is no request"),
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
