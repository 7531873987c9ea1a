//! The receiving end of a stream: order, duplicates and commits.
//!
//! Problem: whatever the network loses, doubles or reorders, each number is committed once and in order, and nothing is
//! acknowledged that was not committed. ParaStation2 Table 1 (000), Tam's Stall (003), RMPP's arrival order (001), FTGM's commit
//! before acknowledge (004), transport.md §5.1, §5.2, §5.3, §5.6, §14
//!
//! Idea: two numbers. `arrival` is the next number whose first chunk is missing; Table 1 is applied to it. `base` is the next to
//! commit, equal to the durable record. `messages` holds what lies from `base` on: messages that are being placed or wait for their
//! turn, so transfers overlap and commits do not. With selective recovery first chunks are accepted beyond `arrival` too, straight
//! into their buffers, and leave [`Kind::Missing`] between; with the others they are dropped, so nothing is ever missing, except
//! after a takeover before numbers that were committed ahead.
//!
//! A number may end without a delivery. NULL (the sender gave up): the number is committed in its turn and remembered in `nulled`,
//! a bitmap in the same durable word as `base`, until the sender confirmed that it knows: both engines may die before, and the
//! successor of the sender asks about a message that it takes for alive. A message its application refused is committed in the same
//! way before its sender is told: asked again, the application may think better of it, and a late copy would be delivered. MSGDROP
//! for a message that no buffer can ever hold is told first, and committed only when confirmed; a restored engine judges the
//! message again and comes to the same result, because *too long* holds for the life of a port. The cumulative acknowledgement
//! crosses neither before it is confirmed.
//!
//! A message without a buffer holds back those beyond it until it is taken: they would take the buffers that lower numbers need,
//! only to lose them again. Numbers below it are still welcome.
//!
//! Where messages commit in order of arrival, a whole one is committed while an earlier long one is under way: it becomes a bit ahead of
//! `base` in the durable word, and its sender is told by MSGEND.
//!
//! Rejected: a reorder buffer of frames (a frame is placed, or not taken at all); a durable status per drop (a word per stream for
//! a case that judging again settles).
//!
//! Invariants: no commit that would shift a bit of `nulled` out of the durable word; base ≤ arrival; the last of `messages` is not
//! missing, and the first that is has the number `arrival`; the bits ahead are exactly what is [`Kind::Committed`]; only
//! [`Kind::Placing`] has a row in the table of long messages.

use alloc::collections::VecDeque;

use crate::host::{Reason, after_commit};
use crate::ident::{BufferId, RecordId, StreamKey, serial_lt};
use crate::policy::AckMode;
use crate::wire::StreamRef;
use crate::wire::chunk::Received;

/// A number from `base` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Its first chunk did not come, or was forgotten.
    Missing,
    /// Placed and verified.
    Whole(BufferId),
    /// A long message; its row.
    Placing(u32),
    /// Given up by the sender.
    Null,
    /// Not wanted by the application.
    Refused,
    /// Committed ahead of its turn.
    Committed,
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
    /// Bytes to deliver.
    pub len: u32,
    /// Bytes the sender sent.
    pub total: u32,
    pub tag: u64,
    /// When to acknowledge it.
    pub ack: AckMode,
    /// More of it follows its first chunk without a grant.
    pub unasked: bool,
    /// Order of acceptance over all streams: finds the youngest.
    pub age: u64,
}

impl Incoming {
    /// A number without a payload.
    pub(super) fn bare(kind: Kind) -> Self {
        Self {
            kind,
            len: 0,
            total: 0,
            tag: 0,
            ack: AckMode::Policy,
            unasked: false,
            age: 0,
        }
    }

    /// Whether it holds a buffer or waits for its turn.
    pub(super) fn is_pending(&self) -> bool {
        !matches!(self.kind, Kind::Missing | Kind::Committed)
    }
}

/// Chunks due to the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    pub ack: bool,
    pub resume: bool,
    pub port_closed: bool,
    /// NACK: number and reason.
    pub nack: Option<(u32, u8)>,
    /// READY for this number.
    pub ready: Option<u32>,
    /// A message that needed a grant was committed.
    pub msg_end: Option<u32>,
    /// MSGENDs for what was committed ahead, as `ends` names them.
    pub ends: bool,
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

    /// The cumulative acknowledgement, and nothing else.
    #[inline]
    fn is_ack_alone(&self) -> bool {
        self.ack
            && !(self.resume || self.ends || self.grants || self.msg_end.is_some())
            && !self.is_rare()
    }

    /// Anything but acknowledgements, ends and grants.
    pub(super) fn is_rare(&self) -> bool {
        self.port_closed
            || self.nulled
            || self.drops
            || self.null_delivered.is_some()
            || self.nack.is_some()
            || self.ready.is_some()
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
    /// The lowest number that found no buffer; its sender was told. Nothing beyond it is taken: the next buffer is for it.
    pub no_buffer: Option<u32>,
    /// READY was said for it.
    pub woken: bool,
    /// The number accepted last had others beyond it.
    pub fills: bool,
    /// The application has not decided about this number yet.
    pub undecided: Option<u32>,
    /// One acknowledgement per message.
    pub exact: bool,
    /// Then: bit i asks for that of `base - 1 - i`.
    pub acks: Received,
    /// Bit i: MSGEND is due for `base + i`, committed ahead.
    pub ends: u32,
    /// Bit i, beside bit i of `nulled`: the application refused it.
    pub refused: u32,
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
            no_buffer: None,
            woken: false,
            fills: false,
            undecided: None,
            exact: false,
            acks: Received::default(),
            ends: 0,
            refused: 0,
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
        self.refused &= !bit;
        bit != 0
    }

    /// Numbers given up and not confirmed, oldest first, and whether the application refused them.
    pub(super) fn nulled_numbers(&self) -> impl Iterator<Item = (u32, bool)> + use<> {
        let (base, nulled, refused) = (self.base, self.nulled(), self.refused);
        let bits = (0..16).rev().filter(move |bit| nulled >> bit & 1 != 0);
        bits.map(move |bit| (base.wrapping_sub(1 + bit), refused >> bit & 1 != 0))
    }

    /// Whether the next commit would lose an unconfirmed NULL.
    pub(super) fn nulled_full(&self) -> bool {
        if self.nulled() == 0 {
            return false;
        }
        let (_, after) = after_commit(self.base, self.bits, self.base, false);
        (after & 0xffff).count_ones() < self.nulled().count_ones()
    }

    /// Index of a number from `base` on that is not missing.
    pub(super) fn index(&self, number: u32) -> Option<usize> {
        let index = number.wrapping_sub(self.base) as usize;
        let held = |m: &Incoming| m.kind != Kind::Missing;
        self.messages.get(index).is_some_and(held).then_some(index)
    }

    pub(super) fn number(&self, index: usize) -> u32 {
        self.base.wrapping_add(index as u32)
    }

    /// Whether something beyond a missing number is there.
    pub(super) fn has_holes(&self) -> bool {
        self.arrival != self.number(self.messages.len())
    }

    /// Takes a missing number in; the caller checked that it lies in the window.
    pub(super) fn accept(&mut self, number: u32, incoming: Incoming) {
        let index = number.wrapping_sub(self.base) as usize;
        while self.messages.len() < index {
            self.messages.push_back(Incoming::bare(Kind::Missing));
        }
        match self.messages.get_mut(index) {
            Some(place) => *place = incoming,
            None => self.messages.push_back(incoming),
        }
        self.stalled = false;
        self.no_buffer = self.no_buffer.filter(|&refused| refused != number);
        self.find_arrival();
    }

    /// Makes a number missing again. Returns what it was.
    #[cold]
    pub(super) fn forget(&mut self, index: usize) -> Option<Incoming> {
        let missing = Incoming::bare(Kind::Missing);
        let was = core::mem::replace(self.messages.get_mut(index)?, missing);
        while self
            .messages
            .back()
            .is_some_and(|last| last.kind == Kind::Missing)
        {
            self.messages.pop_back();
        }
        let number = self.number(index);
        if serial_lt(number, self.arrival) {
            self.arrival = number;
        }
        Some(was)
    }

    fn find_arrival(&mut self) {
        let mut index = self.arrival.wrapping_sub(self.base) as usize;
        while self
            .messages
            .get(index)
            .is_some_and(|m| m.kind != Kind::Missing)
        {
            index += 1;
        }
        self.arrival = self.number(index);
    }

    /// The record says {base, bits} now: numbers before `base` are over.
    pub(super) fn advance(&mut self, base: u32, bits: u32) {
        for _ in 0..base.wrapping_sub(self.base) {
            let over = self.messages.pop_front();
            let refused = over.is_some_and(|m| m.kind == Kind::Refused);
            self.refused = self.refused << 1 & 0xffff | u32::from(refused);
            if self.exact {
                self.acks.shift();
                // What was not told one by one yet is told with the rest.
                if self.ends & 1 != 0 {
                    self.acks.set(0);
                }
            }
            self.ends >>= 1;
        }
        (self.base, self.bits) = (base, bits);
        self.find_arrival();
    }

    /// Whether nothing is kept, owed or waited for: then the next number can be committed as it comes, if it is whole.
    pub(super) fn is_straight(&self) -> bool {
        // Nothing was given up and not confirmed, nothing committed ahead.
        let nothing_special = self.bits | self.ends | self.refused == 0;
        nothing_special
            && self.messages.is_empty()
            && self.no_buffer.is_none()
            && !self.exact
            && !self.closed
    }

    /// Whether an acknowledgement is due, which names no number but `base`, and nothing else is.
    #[inline]
    pub(super) fn owes_a_plain_ack(&self) -> bool {
        self.due.is_ack_alone() && !self.exact && self.bits == 0 && self.messages.is_empty()
    }

    /// The record says that `base` is over, and nothing else: what [`Self::accept`] and [`Self::advance`] come to if
    /// [`Self::is_straight`].
    pub(super) fn step(&mut self) {
        self.base = self.base.wrapping_add(1);
        self.arrival = self.base;
        (self.stalled, self.fills) = (false, false);
    }

    /// Nothing is there but what was committed ahead.
    pub(super) fn only_committed(&mut self) {
        self.messages.clear();
        let ahead = self.bits >> 16;
        for index in 0..32 - ahead.leading_zeros() {
            if index == 0 {
                self.messages.push_back(Incoming::bare(Kind::Missing));
            }
            self.messages
                .push_back(Incoming::bare(match ahead >> index & 1 {
                    0 => Kind::Missing,
                    _ => Kind::Committed,
                }));
        }
        self.arrival = self.base;
        self.ends = ahead << 1;
        self.due.ends = ahead != 0;
    }

    /// What is to be committed next. In order of arrival a whole message does not wait for those before it.
    pub(super) fn next_ready(&self, in_arrival_order: bool) -> Option<usize> {
        for (index, incoming) in self.messages.iter().enumerate() {
            match incoming.kind {
                Kind::Whole(_) => return Some(index),
                Kind::Null
                | Kind::Refused
                | Kind::Drop {
                    confirmed: true, ..
                } if index == 0 => {
                    return Some(0);
                }
                Kind::Missing => return None,
                _ if !in_arrival_order => return None,
                _ => {}
            }
        }
        None
    }

    /// What an acknowledgement with base `ack_base` says was received.
    pub(super) fn received(&self) -> Received {
        let mut received = Received::default();
        let behind = self.base.wrapping_sub(self.ack_base()) as usize;
        (0..behind).for_each(|bit| received.set(bit));
        for (index, incoming) in self.messages.iter().enumerate() {
            if incoming.kind != Kind::Missing {
                received.set(behind + index);
            }
        }
        received
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_consistency(&self) {
        let missing = |m: &Incoming| m.kind == Kind::Missing;
        let first = self.messages.iter().position(missing);
        let first = first.unwrap_or(self.messages.len());
        assert_eq!(self.arrival, self.number(first), "arrival");
        assert!(
            !self.messages.back().is_some_and(missing),
            "a missing number at the end"
        );
        let ahead = |(index, m): (usize, &Incoming)| match m.kind {
            Kind::Committed => 1u64 << index,
            _ => 0,
        };
        let ahead: u64 = self.messages.iter().enumerate().map(ahead).sum();
        assert_eq!(ahead, u64::from(self.bits >> 16) << 1, "committed ahead");
        assert_eq!(self.refused & !self.nulled(), 0, "refused");
    }
}
