//! The invariants, one checker each.
//!
//! Problem: a transport that checks itself believes itself. Idea: the checkers see only what the applications, the hosts and the
//! wire saw, through the hooks of [`Check`], and keep their own accounts; none asks the transport what it thinks. A hook that
//! returns an error ends the run with a [`Violation`] that names the invariant, the messages and the nodes.
//!
//! | invariant | file |
//! |---|---|
//! | a message is committed at most once, where it was sent | `exactly_once` |
//! | messages of a stream are committed in the order they were sent | `order` |
//! | and with the bytes that were sent | `content` |
//! | every send ends with one status, and it is true | `status` |
//! | buffers in use never exceed what their owner gave out, and credit returns in full | `credits` |
//! | a receive token is free, claimed or the application's, and never two of them | `tokens` |
//! | tables and heap of an engine stay within what its configuration says | `memory` |
//! | work that can go on does | `deadlock` |

pub mod content;
pub mod credits;
pub mod deadlock;
pub mod exactly_once;
pub mod memory;
pub mod order;
pub mod status;
pub mod tokens;

use std::cell::RefCell;
use std::fmt;

use portolan_transport::host::SendStatus;
use portolan_transport::ident::{BufferId, Nanos, NodeId, Peer, PortId, Priority};
use portolan_transport::wire::Frame;

use crate::harness::book::{Message, Route};

/// Fine, or what is wrong.
pub type Verdict = Result<(), String>;

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The checker's name.
    pub invariant: &'static str,
    /// Which messages and nodes, and how.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.invariant, self.what)
    }
}

/// What happened to a receive token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenStep {
    /// The application gave it.
    Provided,
    /// The engine took it for a message.
    Claimed,
    /// The engine gave it back unused, or died.
    Released,
    /// The same, and its port is closed.
    Withdrawn,
    /// It went to the application with a message.
    Delivered,
}

/// A frame between two engines, as somebody on the wire reads it.
#[derive(Debug)]
pub struct FrameSeen<'a> {
    /// Who sent it.
    pub from: Peer,
    /// For whom.
    pub to: Peer,
    /// Transport bytes.
    pub len: usize,
    /// Tells it from all others lately: its header's checksum.
    pub id: u32,
    /// The frame.
    pub frame: &'a Frame<'a>,
}

/// What an engine holds, seen from outside.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// The engine.
    pub engine: Peer,
    /// Peers it has an entry for, and may have.
    pub peers: (usize, usize),
    /// Stream records in its ledger, sending and receiving together, and how many each table may hold.
    pub records: (usize, usize),
    /// Sends its applications wait for.
    pub sends: usize,
    /// Tokens it holds.
    pub claimed: usize,
    /// Heap bytes its endpoint allocated and did not free; 0 where nobody counts.
    pub heap: usize,
}

/// A checker of one invariant. Every hook may stay as it is.
#[allow(unused_variables)]
pub trait Check {
    /// The invariant's name.
    fn name(&self) -> &'static str;

    /// An application posted a send.
    fn sent(&mut self, now: Nanos, id: u64, message: &Message) -> Verdict {
        Ok(())
    }

    /// A receiver is about to commit a message (`None`: its tag was never sent) that came over `route` with `bytes`.
    fn committed(
        &mut self,
        now: Nanos,
        id: u64,
        message: Option<&Message>,
        route: Route,
        bytes: &[u8],
    ) -> Verdict {
        Ok(())
    }

    /// A send is about to end.
    fn completed(&mut self, now: Nanos, id: u64, message: &Message, status: SendStatus) -> Verdict {
        Ok(())
    }

    /// A receive token changed hands.
    fn token(
        &mut self,
        node: NodeId,
        token: BufferId,
        priority: Priority,
        step: TokenStep,
    ) -> Verdict {
        Ok(())
    }

    /// A port was closed: its free tokens are gone, the claimed ones when the engine lets go.
    fn port_closed(&mut self, node: NodeId, port: PortId) -> Verdict {
        Ok(())
    }

    /// The application asked for a send to be given up.
    fn cancelled(&mut self, id: u64) {}

    /// The application dropped what waits on a stream.
    fn dropped(&mut self, route: Route) {}

    /// An engine died and another has taken over the ledger.
    fn engine_died(&mut self, engine: Peer) -> Verdict {
        Ok(())
    }

    /// A node came back with a new incarnation; it has `queues` engines.
    fn node_restarted(&mut self, node: NodeId) {}

    /// From now on nodes may fail to hear each other for long.
    fn silence(&mut self) {}

    /// A frame was written.
    fn frame_sent(&mut self, seen: &FrameSeen<'_>) -> Verdict {
        Ok(())
    }

    /// A frame was taken from the receive ring, its headers unharmed.
    fn frame_received(&mut self, seen: &FrameSeen<'_>) -> Verdict {
        Ok(())
    }

    /// Now and then.
    fn looked_at(&mut self, usage: &Usage) -> Verdict {
        Ok(())
    }

    /// Time passed; `waiting` sends have no status.
    fn passed(&mut self, now: Nanos, waiting: usize) -> Verdict {
        Ok(())
    }

    /// All faults are over.
    fn healed(&mut self, now: Nanos) {}

    /// Every send has a status and everything is quiet.
    fn end_of_run(&mut self, messages: &[Message]) -> Verdict {
        Ok(())
    }
}

thread_local! {
    static LAST: RefCell<Option<Violation>> = const { RefCell::new(None) };
}

/// The violation that ended this thread's newest run.
pub fn take_violation() -> Option<Violation> {
    LAST.take()
}

/// All checkers of a run.
#[derive(Default)]
pub struct Checks {
    checks: Vec<Box<dyn Check>>,
}

impl fmt::Debug for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.checks.iter().map(|c| c.name()))
            .finish()
    }
}

impl Checks {
    /// The checkers of what applications were promised: what needs no wire to be judged.
    pub fn of_messages() -> Self {
        Self {
            checks: vec![
                Box::new(exactly_once::ExactlyOnce),
                Box::new(order::Order::default()),
                Box::new(content::Content),
                Box::new(status::Status::default()),
                Box::new(tokens::Tokens::default()),
            ],
        }
    }

    /// Adds a checker.
    pub fn add(&mut self, check: Box<dyn Check>) {
        self.checks.push(check);
    }

    /// Puts one checker in the place of the one with its name.
    pub fn replace(&mut self, check: Box<dyn Check>) {
        self.checks.retain(|old| old.name() != check.name());
        self.checks.push(check);
    }

    /// Runs a hook of every checker.
    ///
    /// # Panics
    /// When one of them objects; [`take_violation`] then says which.
    #[allow(clippy::panic)] // how a run ends
    pub fn ask(&mut self, mut hook: impl FnMut(&mut dyn Check) -> Verdict) {
        for check in &mut self.checks {
            if let Err(what) = hook(check.as_mut()) {
                let violation = Violation {
                    invariant: check.name(),
                    what,
                };
                LAST.set(Some(violation.clone()));
                panic!("{violation}");
            }
        }
    }

    /// Runs a hook that cannot fail.
    pub fn tell(&mut self, mut hook: impl FnMut(&mut dyn Check)) {
        self.checks
            .iter_mut()
            .for_each(|check| hook(check.as_mut()));
    }
}
