//! Portolan for applications: reliable messages between numbered ports of a cluster's nodes, without system calls on the way.
//!
//! The vocabulary is GM's. A process attaches to its node's daemon and opens a **port**; from then on it talks to the node's engine
//! through shared memory. A **send token** stands for a send under way, a **receive token** for a buffer offered; each comes back with
//! an **event**.
//!
//! ```no_run
#![doc = include_str!("../examples/hello.rs")]
//! ```
//!
//! | to | there is |
//! |---|---|
//! | send | [`Port::send`] (zero copy), [`Port::send_bytes`] (copies), [`Port::send_and_wait`], [`Port::cancel`] |
//! | receive | [`Port::provide_receive_buffer`], [`Port::receive`] (polls), [`Port::blocking_receive`], [`Port::unknown`] |
//! | be called | [`Port::on_message`], [`Port::dispatch`] |
//! | be asked before a message is taken | [`PortOptions::ask_first`], [`Port::on_offer`], [`Event::Offered`] |
//! | say when a delivery is acknowledged | [`SendOptions::ack`] |
//! | wait with epoll | [`Port::event_fd`], [`Port::prepare_wait`] |
//! | go on after a failed send | [`Port::resume_sending`], [`Port::drop_sends`] |
//! | be sure in spite of a wrong engine | [`PortOptions::integrity`], [`Event::Integrity`], [`Port::confirm`] |
//! | keep time | [`SendOptions::timeout`], [`Port::set_alarm`], [`Wait`] |
//!
//! Messages from one port to another at one priority arrive in the order sent. Every send ends with a definite [`Status`]:
//! delivered, not delivered, or, when the other node restarted or fell silent, perhaps. After a send failed, the sends behind it
//! *in the same stream* wait until [`Port::resume_sending`] or [`Port::drop_sends`] says what to do about the gap.
//!
//! # Being asked first
//! A port may have its say before a message is taken, on the message's first chunk: take it whole, take only its beginning, or refuse
//! it. A refused message costs no buffer, a shortened one only as much as is wanted of it.
//!
//! ```no_run
#![doc = include_str!("../examples/headlines.rs")]
//! ```
//!
//! Being asked costs a round trip: the message stays with its sender until it is answered for. One that is not answered for waits until
//! its sender's timeout ends it, and messages behind it in its stream wait with it. [`Port::on_offer`] answers inside every call that
//! receives or waits; without it offers are events ([`Event::Offered`]). After an engine's fault its successor asks again; the port then
//! answers as the application did.
//!
//! # Misuse
//! A [`Buffer`] handed over is moved and comes back with its event, so memory the engine works on cannot be touched in safe code, sent
//! twice or freed. Everything else that can be done wrong is refused with an error that says so; refusals of a buffer hand it back
//! ([`Refused`]). Nothing panics. What the engine says is checked against the port's own books; what does not fit is ignored and
//! counted ([`Port::anomalies`]).
//!
//! # Threads
//! A [`Port`] is `Send` and not `Sync`: one thread at a time owns it, with no lock on its way; it may be moved to another thread. Use
//! one port per thread, or a lock of your own. A [`Buffer`] may be filled or read in any thread, and dropped there. A [`Node`] may be
//! shared; its requests wait for one another.
//!
//! # Fork
//! A port belongs to the process that opened it. In a forked child its memory is not there: every operation on the port fails with
//! [`PortError::Forked`], touching a [`Buffer`] kills the child with SIGSEGV, dropping either does nothing. As long as a child that
//! did not exec holds the inherited descriptors, the daemon does not notice the parent's death by its connection; a child that
//! stays around should drop its copies. All descriptors are close-on-exec. A child attaches and opens ports of its own.
//!
//! # Waiting
//! [`Wait::Adaptive`], the default, spins for 50 µs and then sleeps; [`Wait::Yield`] and [`Wait::Busy`] do not. But where an application has the core that its engine
//! is bound to, and yields do not let the engine have it, it sleeps at once unless it waits [`Wait::Busy`]. A daemon that dies
//! without closing its ports is noticed while waiting ([`PortError::DaemonGone`]); an application that only ever polls with
//! [`Port::receive`] sees its sends time out instead, or nothing.
//!
//! A thread that opens a port gets [short turns](turns) on its processor, unless the port waits [`Wait::Busy`]: so it is woken at once on a busy
//! machine, and alternates with an engine on the same core. A thread that a port was moved to may ask for them itself ([`turns::short`]).

mod after_fault;
mod alarm;
mod arena;
pub mod capture;
mod command;
mod control;
mod error;
mod event;
mod free_list;
mod integrity;
mod names;
mod node;
mod offer;
mod port;
mod receive;
pub mod service;
mod status;
mod tokens;
pub mod turns;
mod wait;

pub use alarm::{AlarmId, MAX_ALARMS};
pub use arena::Buffer;
pub use error::{ArenaFull, NodeError, PortError, Refused, SendError, TooManyAlarms};
pub use event::{Event, Message, SendHandle, Sent};
pub use integrity::{Fault, Integrity, IntegrityReport};
pub use names::{AckMode, Address, NodeId, PortId, Priority};
pub use node::{Node, PortOptions, Report};
pub use offer::{Offer, Verdict};
pub use port::{Closed, Port, SendOptions};
pub use portolan_abi::control::{DEFAULT_SOCKET, ErrorCode};
pub use portolan_abi::port::CloseReason;
pub use portolan_abi::token::INLINE_BYTES;
pub use status::{Reason, Status};
pub use wait::Wait;

// The guide's examples are compiled as this crate's are.
#[cfg(doctest)]
#[doc = include_str!("../../docs/api.md")]
struct Guide;
