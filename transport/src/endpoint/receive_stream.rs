//! The receiving end of a stream: order, duplicates and commits.
//!
//! Problem: whatever the network loses, doubles or reorders, each number is committed once and in order, and nothing is
//! acknowledged that was not committed. ParaStation2 Table 1 (000), Tam's Stall (003), RMPP's arrival order (001), FTGM's commit
//! before acknowledge (004), PROTOCOL *Order*, *Tokens*.
//!
//! Idea: two numbers. `arrival` is the next number whose first chunk may come; Table 1 is applied to it. `base` is the next to
//! commit, equal to the durable record. Between them lie accepted messages that are being placed or wait for their turn, so
//! transfers overlap and commits do not. First chunks that come too early are dropped: one NACK, then silence (Stall).
//!
//! A number may end without a delivery. NULL (the sender gave up): the number is committed in its turn and remembered in `nulled`,
//! a bitmap in the same durable word as `base`, until the sender confirmed that it knows: both engines may die before, and the
//! successor of the sender asks about a message that it takes for alive. MSGDROP (no buffer can ever hold it): told first,
//! committed only when confirmed; a restored engine judges the message again and comes to the same result, because *too long*
//! holds for the life of a port. The cumulative acknowledgement crosses neither before it is confirmed.
//!
//! Rejected: a reorder buffer for first chunks (needs frames or tokens while earlier numbers may never find one); a durable status
//! per drop (a word per stream for a case that judging again settles).
//!
//! Invariants: no commit that would shift a bit of `nulled` out of the durable word; base ≤ arrival; `messages.len() == arrival - base`;
//! only [`Kind::Placing`] has a row in the table of long messages.

use alloc::collections::VecDeque;

use crate::host::{Reason, after_commit};
use crate::ident::{BufferId, RecordId, StreamKey};
use crate::wire::StreamRef;

/// An accepted number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Placed and verified.
    Whole(BufferId),
    /// A long message; its row.
    Placing(u32),
    /// Given up by the sender.
    Null,
    /// Refused for good.
    Drop {
        /// Told to the sender.
        reason: Reason,
        /// The sender knows.
        confirmed: bool,
    },
}

/// An accepted number and what it needs for its commit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    pub kind: Kind,
    pub len: u32,
    pub tag: u64,
    /// Order of acceptance over all streams: finds the youngest.
    pub age: u64,
}

/// Chunks due to the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    pub ack: bool,
    pub resume: bool,
    pub port_closed: bool,
    /// NACK and its reason.
    pub nack: Option<u8>,
    pub ready: bool,
    /// A long message was committed.
    pub msg_end: Option<u32>,
    /// NULL-ACK for a number that was delivered.
    pub null_delivered: Option<u32>,
    /// NULL-ACKs for `nulled`.
    pub nulled: bool,
    /// MSGDROPs for all unconfirmed drops.
    pub drops: bool,
    /// CTS for the long messages that want one.
    pub grants: bool,
}

impl Due {
    pub(super) fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// The receiving end of a stream.
#[derive(Clone, Debug)]
pub(super) struct ReceiveStream {
    pub key: StreamKey,
    pub peer: u32,
    pub incarnation: u64,
    pub record: RecordId,
    pub epoch: u32,
    pub base: u32,
    pub arrival: u32,
    pub messages: VecDeque<Incoming>,
    /// The second half of the durable record, see [`after_commit`].
    pub bits: u32,
    /// The port's instance that opened it is gone.
    pub closed: bool,
    /// Tam's Stall: the NACK for `arrival` was sent.
    pub stalled: bool,
    /// The NACK for want of a buffer was sent for `arrival`.
    pub no_buffer: bool,
    /// In the port's queue of streams that wait for a token.
    pub waiting: bool,
    pub due: Due,
    /// In the peer's `control`.
    pub in_control: bool,
}

impl ReceiveStream {
    pub(super) fn new(
        key: StreamKey,
        peer: u32,
        incarnation: u64,
        record: RecordId,
        epoch: u32,
        base: u32,
    ) -> Self {
        Self {
            key,
            peer,
            incarnation,
            record,
            epoch,
            base,
            arrival: base,
            messages: VecDeque::new(),
            bits: 0,
            closed: false,
            stalled: false,
            no_buffer: false,
            waiting: false,
            due: Due::default(),
            in_control: false,
        }
    }

    /// How chunks name the stream.
    pub(super) fn wire(&self) -> StreamRef {
        StreamRef {
            sender_port: self.key.remote.0,
            receiver_port: self.key.local.0,
            priority: self.key.priority as u8,
            epoch: self.epoch,
        }
    }

    /// What the cumulative acknowledgement says: never past an unconfirmed NULL (an unconfirmed drop is not committed at all).
    pub(super) fn ack_base(&self) -> u32 {
        self.base.wrapping_sub(32 - self.nulled().leading_zeros())
    }

    /// Bit i: number `base - 1 - i` was given up, and the sender has not confirmed that it knows.
    pub(super) fn nulled(&self) -> u32 {
        self.bits & 0xffff
    }

    /// The number's bit in [`Self::nulled`]; 0 if it is too old or not committed.
    fn nulled_bit(&self, number: u32) -> u32 {
        let back = self.base.wrapping_sub(number).wrapping_sub(1);
        1u32.checked_shl(back).unwrap_or(0) & 0xffff
    }

    pub(super) fn is_nulled(&self, number: u32) -> bool {
        self.bits & self.nulled_bit(number) != 0
    }

    /// The sender knows. True if that was news.
    pub(super) fn confirm_nulled(&mut self, number: u32) -> bool {
        let bit = self.bits & self.nulled_bit(number);
        self.bits &= !bit;
        bit != 0
    }

    /// Numbers given up and not confirmed, oldest first.
    pub(super) fn nulled_numbers(&self) -> impl Iterator<Item = u32> + use<> {
        let (base, nulled) = (self.base, self.nulled());
        let bits = (0..16).rev().filter(move |bit| nulled >> bit & 1 != 0);
        bits.map(move |bit| base.wrapping_sub(1 + bit))
    }

    /// Whether the next commit would lose an unconfirmed NULL.
    pub(super) fn nulled_full(&self) -> bool {
        let (_, after) = after_commit(self.base, self.bits, self.base, false);
        (after & 0xffff).count_ones() < self.nulled().count_ones()
    }

    /// Index of an accepted, uncommitted number.
    pub(super) fn index(&self, number: u32) -> Option<usize> {
        let index = number.wrapping_sub(self.base) as usize;
        (index < self.messages.len()).then_some(index)
    }

    /// Appends the message of number `arrival`.
    pub(super) fn accept(&mut self, incoming: Incoming) {
        self.messages.push_back(incoming);
        self.arrival = self.arrival.wrapping_add(1);
        (self.stalled, self.no_buffer) = (false, false);
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_consistency(&self) {
        assert_eq!(
            self.arrival,
            self.base.wrapping_add(self.messages.len() as u32)
        );
    }
}
