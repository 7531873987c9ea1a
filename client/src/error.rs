//! What can go wrong, per operation: whose fault it is and what to do.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use portolan_abi::control::ErrorCode;
use portolan_abi::port::CloseReason;

use crate::arena::Buffer;

/// An operation on the daemon's socket failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// Nobody listens on the socket.
    #[error("no daemon listens on {path}; start portoland, or name its socket with --socket or PORTOLAN_SOCKET", path = path.display())]
    NoDaemon {
        /// The socket's path.
        path: PathBuf,
    },
    /// This user may not connect.
    #[error("no permission to connect to {path}; join the socket's group or have the administrator admit this user", path = path.display())]
    NoPermission {
        /// The socket's path.
        path: PathBuf,
    },
    /// The daemon did not answer in time.
    #[error(
        "the daemon did not {what} within {waited:?}; see its log, it may be overloaded or hung"
    )]
    Timeout {
        /// What it did not do.
        what: &'static str,
        /// How long we waited.
        waited: Duration,
    },
    /// The daemon closed the connection.
    #[error(
        "the daemon closed the connection; it stopped, or refuses more connections: see its log"
    )]
    Disconnected,
    /// The daemon refused.
    #[error("{message}")]
    Refused {
        /// What kind of refusal.
        code: ErrorCode,
        /// The daemon's words.
        message: String,
    },
    /// The daemon's answer makes no sense.
    #[error(
        "the daemon's answer makes no sense ({0}); library and daemon should come from the same release"
    )]
    BadAnswer(String),
    /// The options of a port are out of limits.
    #[error("port options out of limits: {0}")]
    BadOptions(String),
    /// The system refused.
    #[error("cannot {what}: {source}")]
    System {
        /// What we tried.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl NodeError {
    pub(crate) fn system(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System {
            what,
            source: source.into(),
        }
    }
}

/// The port can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// It was closed.
    #[error("the port was closed: {}", Words(*.0))]
    Closed(CloseReason),
    /// The daemon closed our connection without closing the port: it died.
    #[error("the daemon went away and the port with it; attach again")]
    DaemonGone,
    /// This process is a fork of the port's owner.
    #[error(
        "this process is a fork of the port's owner, which may not use the port; open one of its own"
    )]
    Forked,
    /// Waiting failed.
    #[error("cannot wait for events: {0}")]
    Wait(rustix::io::Errno),
}

struct Words(CloseReason);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            CloseReason::ByOwner => "by this application",
            CloseReason::OwnerGone => "its connection to the daemon ended",
            CloseReason::RingJump => "a ring index in its memory jumped",
            CloseReason::BadToken => "a token in its memory made no sense",
            CloseReason::BadMemory => "its memory could not be read or written",
            CloseReason::Poison => "an engine died twice working on it",
            CloseReason::Administrator => "by the administrator, or because the daemon stops",
        })
    }
}

/// A send, a provide or a command was refused; nothing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// All tokens of the kind are out; receive events until one comes back.
    #[error("no token is free; receive events until one comes back")]
    NoToken,
    /// The length is longer than the buffer.
    #[error("the message has {len} bytes, its buffer only {buffer}")]
    TooLong {
        /// Bytes asked for.
        len: usize,
        /// Bytes the buffer has.
        buffer: usize,
    },
    /// The buffer belongs to another port's arena.
    #[error("the buffer belongs to another port")]
    ForeignBuffer,
    /// The offer was made to another port.
    #[error("the offer was made to another port")]
    ForeignOffer,
    /// No such node or port can exist.
    #[error("no such address can exist: nodes are 1 to 65534, ports 0 to 255")]
    BadAddress,
    /// The arena has no room for a copy.
    #[error(transparent)]
    ArenaFull(#[from] ArenaFull),
    /// The engine did not end the send in time; its end will still come as an event.
    #[error("the engine did not end the send in time; its end will still come as an event")]
    NoAnswer,
    /// The port can no longer be used.
    #[error(transparent)]
    Port(#[from] PortError),
}

/// The arena has no free range of this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the arena has no room for {wanted} bytes: {free} are free, {largest} of them in one piece; open the port with a larger arena"
)]
pub struct ArenaFull {
    /// Bytes asked for.
    pub wanted: usize,
    /// Bytes free.
    pub free: u64,
    /// Bytes of the largest free range.
    pub largest: u64,
}

/// Too many alarms are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} alarms are set, more are not possible", crate::alarm::MAX_ALARMS)]
pub struct TooManyAlarms;

/// A refusal that hands the buffer back.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// Why.
    pub error: SendError,
    /// The buffer, unused.
    pub buffer: Buffer,
}

impl From<Refused> for SendError {
    fn from(refused: Refused) -> Self {
        refused.error
    }
}
