//! The node: the daemon on this machine, as an application sees it.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portolan_abi::control::{DEFAULT_SOCKET, Request, Response};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::{ClientHeader, PAGE, PORT_MAGIC, PortGeometry, READS_ENDS};
use portolan_abi::{MAX_ARENA_BYTES, MAX_RECEIVE_TOKENS, MAX_SEND_TOKENS, PORT_ABI_VERSION};
use std::sync::atomic::Ordering;

use crate::arena::Memory;
use crate::capture::{Capture, CaptureOptions};
use crate::control::Connection;
use crate::error::NodeError;
use crate::free_list::ALIGN;
use crate::integrity::{Integrity, NOTES, SEAL};
use crate::names::{NodeId, PortId};
use crate::port::{Opened, Port};
use crate::turns;
use crate::wait::Wait;

/// Send slots kept for commands (cancel, resume, drop), so that they never wait for a send to end.
const COMMAND_SLOTS: u32 = 1;
/// Send slots kept for answers to offers, if there may be offers and as far as slots go.
const ANSWER_SLOTS: u32 = 8;

/// The daemon of this node.
///
/// Attaching costs nothing at the engine; it is a conversation with the supervisor. Requests may be made from several threads; one
/// waits for the other, at most ten seconds each.
pub struct Node {
    path: PathBuf,
    connection: Mutex<Option<Connection>>,
    id: NodeId,
    name: String,
    default_timeout: Duration,
}

/// What a port is to have.
#[derive(Clone, Debug)]
pub struct PortOptions {
    /// Its number; `None` for any that is free and allowed.
    pub port: Option<u16>,
    /// Sends under way at one time, 1 to 511. Memory is made for the next power of two, less one kept for commands.
    pub send_tokens: u32,
    /// Buffers offered at one time, 1 to 1024, rounded up to a power of two.
    pub receive_tokens: u32,
    /// Bytes of the arena all buffers come from, rounded up to pages. Untouched memory costs nothing.
    pub arena_bytes: u64,
    /// How blocking calls wait.
    pub wait: Wait,
    /// Deliver [`crate::Event::FaultRecovered`]; otherwise it is only counted.
    pub report_faults: bool,
    /// Ask before messages of at least so many bytes are taken ([`crate::Event::Offered`]); `Some(0)`: before every message.
    pub ask_first: Option<usize>,
    /// Check everything end to end, past engines that may be wrong ([`crate::Event::Integrity`]). Both ends of every stream must have it.
    /// Each message grows by 32 bytes, the arena by as much for each token, to 64 bytes; 8 send and 8 receive tokens are the library's.
    pub integrity: Option<Integrity>,
}

impl Default for PortOptions {
    fn default() -> Self {
        Self {
            port: None,
            send_tokens: 63,
            receive_tokens: 256,
            arena_bytes: 8 << 20,
            wait: Wait::default(),
            report_faults: false,
            ask_first: None,
            integrity: None,
        }
    }
}

impl PortOptions {
    /// The default options at a port number.
    pub fn at(port: u16) -> Self {
        Self {
            port: Some(port),
            ..Self::default()
        }
    }

    /// With [`Self::ask_first`] set: ask before messages of at least `bytes` are taken.
    pub fn ask_first(self, bytes: usize) -> Self {
        Self {
            ask_first: Some(bytes),
            ..self
        }
    }

    /// With end-to-end integrity.
    pub fn integrity(self) -> Self {
        Self {
            integrity: Some(Integrity::default()),
            ..self
        }
    }

    /// Tells the engine what the port's library reads and what its application wants to be asked.
    pub(crate) fn announce(&self, header: &ClientHeader) {
        header.reads.store(READS_ENDS, Ordering::Relaxed);
        if let Some(least) = self.ask_first {
            let least = (least as u64).saturating_add(self.tail().into());
            header
                .ask_first
                .store(least.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Bytes behind each buffer.
    pub(crate) fn tail(&self) -> u16 {
        if self.integrity.is_some() {
            SEAL as u16
        } else {
            0
        }
    }

    /// Tokens of each kind that are the library's.
    pub(crate) fn notes(&self) -> u32 {
        if self.integrity.is_some() { NOTES } else { 0 }
    }

    fn geometry(&self) -> Result<PortGeometry, NodeError> {
        let bad = |what: String| Err(NodeError::BadOptions(what));
        let notes = self.notes();
        let most = MAX_SEND_TOKENS - COMMAND_SLOTS - notes;
        if self.send_tokens == 0 || self.send_tokens > most {
            return bad(format!(
                "send_tokens is {}, not 1 to {most}",
                self.send_tokens
            ));
        }
        let most = MAX_RECEIVE_TOKENS - notes;
        if self.receive_tokens == 0 || self.receive_tokens > most {
            return bad(format!(
                "receive_tokens is {}, not 1 to {most}",
                self.receive_tokens
            ));
        }
        if self.arena_bytes == 0 || self.arena_bytes > MAX_ARENA_BYTES {
            return bad(format!(
                "arena_bytes is {}, not 1 to {MAX_ARENA_BYTES}",
                self.arena_bytes
            ));
        }
        let kept = notes
            + match self.ask_first {
                Some(_) => COMMAND_SLOTS + ANSWER_SLOTS,
                None => COMMAND_SLOTS,
            };
        let send_tokens = (self.send_tokens + kept)
            .next_power_of_two()
            .min(MAX_SEND_TOKENS);
        let receive_tokens = (self.receive_tokens + notes).next_power_of_two();
        let seals = match self.integrity {
            Some(_) => u64::from(send_tokens + receive_tokens) * ALIGN,
            None => 0,
        };
        Ok(PortGeometry {
            send_tokens,
            receive_tokens,
            arena_bytes: (self.arena_bytes + seals)
                .next_multiple_of(PAGE as u64)
                .min(MAX_ARENA_BYTES),
        })
    }
}

/// What the daemon can report about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Node, engines, limits.
    Status,
    /// Other nodes.
    Peers,
    /// Open ports.
    Ports,
    /// Counters of engines and steering.
    Counters,
}

impl Node {
    /// Attaches to the daemon whose socket is at `path`.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self, NodeError> {
        let path = path.as_ref();
        let connection = Connection::open(path)?;
        match connection.request(&Request::Attach {
            abi: PORT_ABI_VERSION,
        })? {
            (
                Response::Node {
                    id,
                    name,
                    default_timeout_ms,
                },
                _,
            ) => Ok(Self {
                path: path.into(),
                connection: Mutex::new(Some(connection)),
                id: NodeId(id),
                name,
                default_timeout: Duration::from_millis(default_timeout_ms),
            }),
            (other, _) => Err(unexpected("Attach", &other)),
        }
    }

    /// Attaches to the socket named by the environment variable `PORTOLAN_SOCKET`, or to `/run/portolan/portolan.sock`.
    pub fn attach_default() -> Result<Self, NodeError> {
        match std::env::var_os("PORTOLAN_SOCKET") {
            Some(path) if !path.is_empty() => Self::attach(PathBuf::from(path)),
            _ => Self::attach(DEFAULT_SOCKET),
        }
    }

    /// This node's id.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// This node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The timeout a send gets that names none.
    pub fn default_timeout(&self) -> Duration {
        self.default_timeout
    }

    /// The id of a node, by its name or number.
    pub fn resolve(&self, node: &str) -> Result<NodeId, NodeError> {
        match self.request(&Request::Resolve { node: node.into() })? {
            Response::Node { id, .. } => Ok(NodeId(id)),
            other => Err(unexpected("Resolve", &other)),
        }
    }

    /// A report of the daemon, as JSON.
    pub fn report(&self, report: Report) -> Result<serde_json::Value, NodeError> {
        let request = match report {
            Report::Status => Request::Status {},
            Report::Peers => Request::Peers {},
            Report::Ports => Request::Ports {},
            Report::Counters => Request::Counters {},
        };
        match self.request(&request)? {
            Response::Document { document } => Ok(document),
            other => Err(unexpected("report", &other)),
        }
    }

    /// What happened on the node after event number `after` of that run of its supervisor (`run` and `after` of the document read last;
    /// `None` and 0 at first), as JSON. With `wait`, and nothing new, the daemon waits a moment for something to happen.
    pub fn events(
        &self,
        run: Option<&str>,
        after: u64,
        wait: bool,
    ) -> Result<serde_json::Value, NodeError> {
        let run = run.map(str::to_owned);
        match self.request(&Request::Events { run, after, wait })? {
            Response::Document { document } => Ok(document),
            other => Err(unexpected("Events", &other)),
        }
    }

    /// The nodes that are known and what is wrong with them, as JSON (docs/discovery.md).
    pub fn map(&self) -> Result<serde_json::Value, NodeError> {
        self.document("map", &Request::Map {})
    }

    /// Begins (`begin`) or ends (`end`) draining this node, or looks how far it is (`look`). Beginning and ending: root only.
    pub fn drain(&self, action: &str) -> Result<serde_json::Value, NodeError> {
        let action = action.into();
        self.document("drain", &Request::Drain { action })
    }

    fn document(&self, name: &str, request: &Request) -> Result<serde_json::Value, NodeError> {
        match self.request(request)? {
            Response::Document { document } => Ok(document),
            other => Err(unexpected(name, &other)),
        }
    }

    /// Injects a fault into an engine, on purpose: `kill`, `hang` or `reset`. Root only.
    pub fn inject_fault(&self, engine: u16, kind: &str) -> Result<(), NodeError> {
        let kind = kind.into();
        match self.request(&Request::Fault { engine, kind })? {
            Response::Done => Ok(()),
            other => Err(unexpected("Fault", &other)),
        }
    }

    /// Captures the frames that pass an engine. Root only.
    pub fn capture(&self, options: CaptureOptions) -> Result<Capture, NodeError> {
        Capture::start(&self.path, options)
    }

    /// Replaces the daemon by the build at `binary`, an absolute path, or by what is now where the daemon was started from, while
    /// applications stay attached. A build that cannot go on where the daemon stops is refused and changes nothing. Root only.
    pub fn upgrade(&self, binary: Option<&str>) -> Result<(), NodeError> {
        let binary = binary.map(Into::into);
        match self.request(&Request::Upgrade { binary })? {
            Response::Done => Ok(()),
            other => Err(unexpected("Upgrade", &other)),
        }
    }

    /// Opens a port. It has a connection of its own and lives on when the `Node` is dropped.
    pub fn open_port(&self, options: PortOptions) -> Result<Port, NodeError> {
        let geometry = options.geometry()?;
        let connection = Connection::open(&self.path)?;
        let request = Request::OpenPort {
            abi: PORT_ABI_VERSION,
            port: options.port,
            geometry,
        };
        let (response, descriptors) = connection.request(&request)?;
        let Response::PortOpened {
            port,
            node,
            geometry: granted,
        } = response
        else {
            return Err(unexpected("OpenPort", &response));
        };
        if granted != geometry || options.port.is_some_and(|asked| asked != port) {
            return Err(NodeError::BadAnswer(
                "it opened another port than asked for".into(),
            ));
        }
        let [client, engine, events, doorbell]: [_; 4] =
            descriptors.try_into().map_err(|d: Vec<_>| {
                NodeError::BadAnswer(format!("{} descriptors came, not 4", d.len()))
            })?;

        let map = |e| NodeError::system("map the port's memory", e);
        let client = ClientHalf::map(client.as_fd(), geometry).map_err(map)?;
        let engine = EngineHalf::map(engine.as_fd(), geometry, false).map_err(map)?;
        let client_ours = {
            let header = client.header();
            // SYNC(port-magic)
            header.magic.load(Ordering::Acquire) == PORT_MAGIC
                && header.version.load(Ordering::Relaxed) == PORT_ABI_VERSION
        };
        let engine_ours = engine.is_valid() && {
            let header = engine.header();
            header.port.load(Ordering::Relaxed) == u32::from(port)
                && header.node.load(Ordering::Relaxed) == u32::from(node)
        };
        if !client_ours || !engine_ours {
            return Err(NodeError::BadAnswer(
                "the port's memory is of another version or another port".into(),
            ));
        }
        for eventfd in [&events, &doorbell] {
            // A blocking doorbell would make us wait for whoever rings it.
            rustix::fs::fcntl_getfl(eventfd)
                .and_then(|flags| {
                    rustix::fs::fcntl_setfl(eventfd, flags | rustix::fs::OFlags::NONBLOCK)
                })
                .map_err(|e| NodeError::system("prepare a doorbell", e))?;
        }
        let integrity_id = match options.integrity {
            Some(_) => random()?,
            None => 0,
        };
        let memory = Memory::new(client, engine, options.tail())
            .map_err(|e| NodeError::system("keep the port's memory out of forked children", e))?;
        let mut port = Port::new(
            Opened {
                memory,
                connection,
                events,
                doorbell,
                node: NodeId(node),
                port: PortId(port),
                default_timeout: self.default_timeout,
                integrity_id,
            },
            &options,
        );
        if options.integrity.is_some() && port.provide_for_notes().is_none() {
            return Err(NodeError::BadOptions("the arena has no room".into()));
        }
        if options.wait != Wait::Busy {
            turns::as_engines();
        }
        Ok(port)
    }

    /// One request on the shared connection. After a failure the next request connects anew, so that an answer that comes too late is
    /// never taken for another's.
    fn request(&self, request: &Request) -> Result<Response, NodeError> {
        let mut slot = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let connection = match slot.take() {
            Some(connection) if !connection.is_gone() => connection,
            _ => Connection::open(&self.path)?,
        };
        let answer = connection.request(request);
        if matches!(answer, Ok(_) | Err(NodeError::Refused { .. })) {
            *slot = Some(connection);
        }
        Ok(answer?.0)
    }
}

/// A number that no other port has.
fn random() -> Result<u64, NodeError> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut bytes, flags)
        .map_err(|e| NodeError::system("draw a random number", e))?;
    Ok(u64::from_le_bytes(bytes))
}

pub(crate) fn unexpected(request: &str, response: &Response) -> NodeError {
    let kind = match response {
        Response::Node { .. } => "Node",
        Response::PortOpened { .. } => "PortOpened",
        Response::Capturing { .. } => "Capturing",
        Response::Done => "Done",
        Response::Document { .. } => "Document",
        Response::Error { .. } => "Error",
    };
    NodeError::BadAnswer(format!("{kind} in answer to {request}"))
}
