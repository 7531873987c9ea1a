//! Actors: the processes of a subject that send and receive, each in the namespace and on the core that it is placed on.
//!
//! An actor is this program again, told what to be ([`Role`]). It takes [`Order`]s from standard input, a line of JSON each, and
//! writes [`Answer`]s to standard output. What it then does is the same for every subject ([`work`]): the subjects differ only in how
//! they send and receive ([`Ends`]). So nobody is measured with another yardstick.
//!
//! While it works an actor makes no system call of its own: a thread that sleeps in `read` takes the orders, and the loop looks at
//! one word. When standard input ends, because whoever gave orders died, so does the actor.

mod first_message;
mod foreign;
mod handle;
mod orders;
mod port;
mod port_alone;
mod socket;
mod work;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

pub use foreign::ForeignRole;
pub use handle::{Actor, said};
pub use orders::{Orders, Phase};
pub use socket::{DATAGRAM, Protocol, SocketRole};
pub use work::histogram;

use crate::limits;

/// What an actor is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Role {
    /// An application of a Portolan node.
    Port(PortRole),
    /// One end of a raw AF_XDP exchange.
    Raw(limits::WireRole),
    /// A relay between an application and the wire.
    Relay(limits::RelayRole),
    /// The application of a relay.
    Client(limits::ClientRole),
    /// An application with a socket of the kernel.
    Socket(SocketRole),
    /// A library of somebody else.
    Foreign(ForeignRole),
    /// One that somebody else starts: it takes orders from a socket.
    Remote {
        /// Where that is.
        orders: PathBuf,
        /// What it is.
        role: Box<Self>,
    },
}

/// An application of a Portolan node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortRole {
    /// The daemon's.
    pub socket: PathBuf,
    /// Its own ports, and whom each sends to: a node and a port.
    pub ports: Vec<(u16, (u16, u16))>,
    /// Waits as a blocking call of the library does by default, for its only port; else it polls and gives the core away.
    pub blocks: bool,
}

/// What an actor is told.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Order {
    /// To get ready for this; answered [`Answer::Ready`].
    Job(Job),
    /// To begin.
    Go,
    /// To send no more, and answer [`Answer::Settled`] when all that was sent has ended and nothing comes any more. May be said again.
    Quiet {
        /// How many messages are to come in all, where that is known: they are waited for.
        expected: Option<u64>,
    },
    /// To end the job; answered [`Answer::Done`].
    Stop,
}

/// What an actor does. Times are nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Sends, waits for the answer, and so on for so long; answers [`Answer::Ways`].
    PingPong {
        /// Length of the message.
        bytes: usize,
        /// How long.
        lasting: u64,
    },
    /// Sends back what comes.
    Echo {
        /// Length of the messages that will come.
        bytes: usize,
    },
    /// Sends, receives, or both, as much as goes. Who receives answers [`Answer::Flow`].
    Flow {
        /// Length of each message.
        bytes: usize,
        /// Whether it sends.
        send: bool,
        /// Whether it measures what comes.
        receive: bool,
        /// How long it measures.
        lasting: u64,
    },
    /// Sends one message with the time in it.
    Stamp,
    /// Sleeps until such a message comes; answers [`Answer::Ways`].
    Await,
    /// Attaches, opens and sends, again and again for so long; answers [`Answer::Startup`].
    Startup {
        /// How long.
        lasting: u64,
    },
}

/// What an actor says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It is there, or ready for its job.
    Ready,
    /// Times in nanoseconds, each with how often it was seen.
    Ways(Vec<(u64, u64)>),
    /// What came.
    Flow(Flow),
    /// Times in nanoseconds to attach, to open a port, and for the first message there and back.
    Startup([Vec<(u64, u64)>; 3]),
    /// All that was sent has ended, and nothing comes any more.
    Settled(Totals),
    /// The job is over.
    Done,
    /// It cannot.
    Failed(String),
}

/// What came while it was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Flow {
    /// Messages.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How long, in nanoseconds.
    pub ns: u64,
    /// Messages of each pair of ports, in no order.
    pub shares: Vec<u64>,
    /// Frames that found no room meanwhile.
    pub missed: u64,
}

/// All messages of a job, measured or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Handed over.
    pub sent: u64,
    /// Taken.
    pub came: u64,
    /// Bytes of those.
    pub came_bytes: u64,
}

/// A message that came.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Its length.
    pub bytes: usize,
    /// Something that tells senders apart.
    pub source: u32,
}

/// How a subject sends and receives, at one or more ends.
///
/// Nothing here waits: what cannot be done now is tried again after [`Ends::pause`].
pub trait Ends {
    /// Gets ready for messages of this length; everything before has ended.
    fn prepare(&mut self, bytes: usize) -> Result<()>;

    /// How many ends.
    fn count(&self) -> usize {
        1
    }

    /// Hands a message over. False: not now, or not all of it yet; to be called again with the same.
    fn send(&mut self, end: usize, bytes: usize) -> Result<bool>;

    /// Whether a message was handed over in part: it is, also when nothing else is to be sent. Not settled until then.
    fn partial(&self, _end: usize) -> bool {
        false
    }

    /// Takes a message that came whole.
    fn receive(&mut self, end: usize) -> Result<Option<Arrival>>;

    /// There was nothing to do: lets others have the core, if that is how this subject waits.
    fn pause(&mut self);

    /// Whether all that was sent has ended.
    fn settled(&mut self) -> Result<bool> {
        Ok(true)
    }

    /// Frames that came and found no room.
    fn missed(&self) -> u64 {
        0
    }

    /// Does a job that only some subjects know.
    fn special(&mut self, job: &Job, _orders: &Orders) -> Result<()> {
        bail!("{job:?} is not for this subject")
    }
}

/// Is what it is told to be, until standard input ends.
///
/// # Errors
/// What kept it from that.
pub fn run(role: &str) -> Result<()> {
    let mut role: Role = serde_json::from_str(role).context("a role")?;
    if let Role::Remote { orders, role: own } = role {
        let orders = UnixStream::connect(&orders).context("where orders come from")?;
        rustix::stdio::dup2_stdin(&orders)?;
        rustix::stdio::dup2_stdout(&orders)?;
        role = *own;
    }
    let orders = Orders::listen();
    match role {
        Role::Port(role) => work::serve(&mut port::Ports::new(role)?, &orders),
        Role::Raw(role) => work::serve(&mut limits::Raw::open(&role)?, &orders),
        Role::Client(role) => work::serve(&mut limits::Client::open(&role)?, &orders),
        Role::Socket(role) => work::serve(&mut socket::Sockets::open(&role)?, &orders),
        Role::Foreign(role) => work::serve(&mut foreign::Foreign::open(role)?, &orders),
        Role::Remote { .. } => bail!("a role within a role within a role"),
        Role::Relay(role) => limits::relay(&role, &orders),
    }
}
