//! What a port hands to its application.

use std::ops::{Deref, DerefMut};

use portolan_abi::token::TokenRef;

use crate::alarm::AlarmId;
use crate::arena::Buffer;
use crate::integrity::IntegrityReport;
use crate::names::{Address, Priority};
use crate::offer::Offer;
use crate::status::Status;

/// What happened.
//
// Its kind is as wide as the fields behind it: of four bytes, with fields of four behind them, events were moved in pieces that lie across what had just
// been written, and a processor waits for that.
#[derive(Debug)]
#[non_exhaustive]
#[repr(u64)]
pub enum Event {
    /// A message came.
    Received(Message),
    /// A send ended.
    Sent(Sent),
    /// A message is about to come: what is wanted of it? Only if [`crate::PortOptions::ask_first`] asks for it and no handler is set
    /// ([`crate::Port::on_offer`]).
    Offered(Offer),
    /// An alarm went off.
    Alarm(AlarmId),
    /// An engine took over after a fault, this many times so far. Nothing is lost and nothing needs to be done; only delivered
    /// if [`crate::PortOptions::report_faults`] asks for it.
    FaultRecovered(u32),
    /// Messages are not as they should be; only with [`crate::PortOptions::integrity`].
    Integrity(IntegrityReport),
}

/// A message in the buffer it was received into. Dereferences to its bytes.
#[derive(Debug)]
pub struct Message {
    pub(crate) buffer: Buffer,
    pub(crate) len: usize,
    pub(crate) total: usize,
    pub(crate) from: Address,
    pub(crate) priority: Priority,
    pub(crate) tag: u64,
    pub(crate) verified: bool,
}

impl Message {
    /// Who sent it.
    pub fn from(&self) -> Address {
        self.from
    }

    /// The priority it was sent at.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// What the sender put beside the bytes.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Is every byte as it was sent, says the sender's seal? Always with [`crate::PortOptions::integrity`], but for messages that this
    /// port shortened, which come without their seal; never without it.
    pub fn is_verified(&self) -> bool {
        self.verified
    }

    /// Bytes the sender sent: more than were received if this port shortened the message ([`crate::Port::shorten`]).
    pub fn total(&self) -> usize {
        self.total
    }

    /// The whole buffer, to provide again, or to send the message on without copying it.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // Checked against the buffer when the event was read.
        self.buffer.get(..self.len).unwrap_or_default()
    }
}

impl DerefMut for Message {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.get_mut(..self.len).unwrap_or_default()
    }
}

/// Names one send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendHandle {
    /// Slot and generation, in one word: written as two and moved as one, it would have to be waited for.
    token: u64,
}

impl SendHandle {
    #[inline(always)]
    pub(crate) fn of(token: TokenRef) -> Self {
        Self {
            token: token.encode(),
        }
    }

    #[inline(always)]
    pub(crate) fn token(self) -> TokenRef {
        TokenRef::decode(self.token)
    }
}

/// The end of a send.
#[derive(Debug)]
pub struct Sent {
    /// Which send.
    pub handle: SendHandle,
    /// How it ended.
    pub status: Status,
    /// Where it went, or should have.
    pub to: Address,
    /// Its priority.
    pub priority: Priority,
    /// Its tag.
    pub tag: u64,
    /// The buffer given to [`crate::Port::send`]; `None` after [`crate::Port::send_bytes`], and for ever out of reach when the
    /// daemon died with the send.
    pub buffer: Option<Buffer>,
}
