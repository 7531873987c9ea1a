//! The sending end of a stream: numbers, window, and how a send ends when it is given up.
//!
//! Problem: messages of one (port → node, port, priority) arrive in order, once, and every send gets one definite status, across
//! loss, silence, deadlines, and the replacement of either engine. transport.md §4.2, §4.5, §4.6, §7.3, §14; ParaStation2's send buffer
//! states and Table 1 (000); Tam's go-back-N with Stall (003 §4.2.1); RMPP's NULL (001); GM's `resume_sending`/`drop_sends`.
//!
//! Idea: a queue of accepted messages, `base` the oldest that is not settled, `cursor` the next whose first chunk goes out, `high`
//! the next that never went out. Go-back-N is `cursor` moving back; the window is `cursor - base`; *never transmitted* is
//! `number >= high`. ParaStation2's states are implied: IDLE settled, READY at or after `cursor`, INTRANSIT before it, RETRANSMIT
//! between `cursor` and `high`. A message that is given up keeps its number, which then travels as NULL, so numbers stay
//! contiguous whatever happens to messages.
//!
//! With selective recovery, and wherever single messages are owed again, the cursor stays and messages before it are marked `lost`: they
//! go before anything new. What is lost is found in `loss`.
//!
//! After a send fails with NotDelivered (port closed, too long, deadline, bad memory) the stream pauses, as in GM: what was
//! transmitted runs its course, what was not stays queued, later sends too, until `resume_sending` or `drop_sends`. While it is
//! open whether a send given up was delivered after all, nothing new goes out either. A cancelled or dropped send does not
//! pause: its owner knows already. MaybeDelivered does not pause either: never transmitted sends go on to the peer's new
//! incarnation, and after Unreachable nothing is left to hold back.
//!
//! Rejected: taking numbers back from sends that were dropped before transmission (the ledger's `next` only grows); one timer per
//! message (the oldest is the one that matters, and PROBE asks for the state of all).
//!
//! Invariants: base ≤ cursor ≤ high ≤ next (serially); `queue.len() == next - base`; the front of the queue is not Done; from
//! `high` on no Null and no Done.

use alloc::collections::VecDeque;

use super::round_trip::STAMP_GOOD_FOR;
use super::slab::NONE;
use super::want::Regained;
use crate::host::{Reason, SendRequest, SendStatus};
use crate::ident::{Nanos, RecordId, SendId, StreamKey, serial_lt};
use crate::policy::AckMode;
use crate::wire::StreamRef;
use crate::wire::chunk::Range;

/// Ranges to send again, over all messages of a stream; what does not fit is asked for again.
const RESEND_MAX: usize = 64;
/// Transmissions of bytes remembered; one that is forgotten may be repeated for nothing.
const UNDER_WAY_MAX: usize = 2048;
/// Numbers of a stream that may be unsettled at once. Sends that end before they are transmitted give their tokens back and leave
/// their numbers owed, so tokens alone do not bound the queue of a stream that is held up.
pub(super) const UNSETTLED_MAX: usize = 1024;
/// DROP-CONFIRMs that wait.
const CONFIRMS_MAX: usize = 16;

/// What became of an accepted message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageState {
    /// It is to be delivered.
    Live,
    /// Given up after it was transmitted: NULL goes out until the receiver says what became of it.
    Null(Reason),
    /// Given up before it was transmitted, and told so: only its number is still owed, and travels as NULL.
    Hole,
    /// Its status is told; its number waits for those before it.
    Done,
}

/// An accepted message. Hundreds of short ones are under way at a time, so it keeps of its request only what its stream does not say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub id: SendId,
    pub len: u32,
    pub tag: u64,
    pub deadline: Nanos,
    pub ack: AckMode,
    pub state: MessageState,
    /// Sent as RTS; `granted` and `sent` count.
    pub long: bool,
    /// First byte not granted.
    pub granted: u32,
    /// Bytes below this nobody asked for: credit pays for them.
    pub unasked: u32,
    /// First byte never sent.
    pub sent: u32,
    /// NULL goes out with the next frame.
    pub null_due: bool,
    /// `cancel` was called and not acted on yet.
    pub cancelled: bool,
    /// A predecessor may have transmitted it, or given it up.
    pub restored: bool,
    /// When its first chunk, or NULL, last went out.
    pub sent_at: Nanos,
    /// When any of its bytes last went out.
    pub bytes_at: Nanos,
    /// The receiver was asked about it since.
    pub asked: bool,
    /// The receiver said that it has its first chunk. It may forget it again.
    pub received: bool,
    /// It is to go out again.
    pub lost: bool,
}

impl Message {
    #[inline]
    pub(super) fn new(request: &SendRequest) -> Self {
        Self {
            id: request.id,
            len: request.len,
            tag: request.tag,
            deadline: request.deadline,
            ack: request.ack,
            state: MessageState::Live,
            long: false,
            granted: 0,
            unasked: 0,
            sent: 0,
            null_due: false,
            cancelled: false,
            restored: false,
            sent_at: 0,
            bytes_at: 0,
            asked: false,
            received: false,
            lost: false,
        }
    }

    /// Its first chunk, or its NULL, goes out now.
    #[inline]
    pub(super) fn goes_out(&mut self, now: Nanos) {
        (self.lost, self.asked) = (false, false);
        (self.sent_at, self.bytes_at) = (now, now);
    }

    /// All of it goes out in one chunk now, for the first time.
    #[inline(always)]
    pub(super) fn goes_whole(&mut self, now: Nanos) {
        self.long = false;
        (self.sent, self.granted) = (self.len, self.len);
        self.goes_out(now);
    }

    /// Whether the message behind it may go into the same RUN.
    #[inline(always)]
    pub(super) fn is_followed_by(&self, next: &Self) -> bool {
        next.state == MessageState::Live
            && (next.len, next.tag, next.ack) == (self.len, self.tag, self.ack)
    }

    /// The receiver has nothing of it, as far as we know.
    pub(super) fn restart(&mut self) {
        (self.long, self.granted, self.unasked, self.sent) = (false, 0, 0, 0);
        (self.received, self.lost) = (false, false);
    }
}

/// The sending end of a stream.
#[derive(Clone, Debug)]
pub(super) struct SendStream {
    pub key: StreamKey,
    /// The peer's slot; NONE until the node said how many queues it has.
    pub peer: u32,
    /// `None` only after a takeover or while the table is full.
    pub record: Option<RecordId>,
    /// The incarnation the record is tagged with; 0 before the first HELLO.
    pub incarnation: u64,
    pub epoch: u32,
    pub base: u32,
    pub queue: VecDeque<Message>,
    pub cursor: u32,
    pub high: u32,
    /// The receiver has a record of this epoch: START is not needed any more.
    pub established: bool,
    /// A new epoch is needed before anything more is sent.
    pub reopen: bool,
    /// When REFUSED last made it reopen.
    pub reopened_at: Nanos,
    /// How often it did so before anything of the epoch was answered.
    pub refusals: u8,
    /// Tam's Stall: nothing new until a positive acknowledgement.
    pub stalled: bool,
    /// The receiver has no buffer for this number: messages from it on wait.
    pub not_ready: Option<u32>,
    /// How far it may go since there was one.
    pub regained: Option<Regained>,
    /// Credit, or room for a record, is wanting: the timer asks again.
    pub starved: bool,
    /// A send failed; see the module's text.
    pub paused: bool,
    /// A send that would pause the stream was given up; nothing new goes out until the receiver said whether it was too late.
    pub holding: bool,
    /// CLOSE was sent; the epoch is not used any more.
    pub closing: bool,
    pub close_tries: u8,
    /// Number and time of the last go-back: at most one per number and round trip.
    pub last_back: Option<(u32, Nanos)>,
    /// Retransmission timer; MAX if off.
    pub timer: Nanos,
    pub backoff: u8,
    /// Earliest deadline of a Live message.
    pub deadline: Nanos,
    /// When an empty stream is closed.
    pub idle_at: Nanos,
    /// Ranges of long messages to send again.
    pub resend: VecDeque<(u32, Range)>,
    /// Ranges that went out last, and when.
    pub under_way: VecDeque<(u32, Range, Nanos)>,
    /// Some message may be marked `lost`.
    pub lost: bool,
    /// The request whose unasked bytes go next.
    pub follows: Option<u32>,
    /// Some long message before the cursor may have bytes granted that were not sent. Only a grant makes one so: a first chunk leaves none.
    pub hungry: bool,
    /// What the receiver had when it wrote its newest answer, the answer's time stamp, and when that came.
    pub horizon: Nanos,
    pub written: Option<u32>,
    pub heard_at: Nanos,
    /// The highest number it had then of those that left at `horizon`.
    pub newest: Option<u32>,
    /// When messages that may merely have been overtaken are lost; MAX if there are none.
    pub reorder_at: Nanos,
    /// When `base` moved last, as frames are stamped.
    pub moved_at: Nanos,
    /// When the receiver was first said to contradict our numbers since, as frames are stamped.
    pub doubted_at: Nanos,

    // control chunks due
    pub probe: bool,
    pub close: bool,
    pub nulls: bool,
    /// The first number that we settled and the receiver still waits for: NULL goes out for those from it to `base`.
    pub filler: Option<u32>,
    /// When that was asked for last, as frames are stamped.
    pub filled_at: Nanos,
    pub confirms: VecDeque<u32>,
    /// In the peer's `sender_control`.
    pub in_control: bool,
    /// In the peer's `active`.
    pub in_active: bool,
}

impl SendStream {
    pub(super) fn new(key: StreamKey, epoch: u32, first: u32) -> Self {
        Self {
            key,
            peer: NONE,
            record: None,
            incarnation: 0,
            epoch,
            base: first,
            queue: VecDeque::new(),
            cursor: first,
            high: first,
            established: false,
            reopen: false,
            reopened_at: 0,
            refusals: 0,
            stalled: false,
            not_ready: None,
            regained: None,
            starved: false,
            follows: None,
            hungry: false,
            paused: false,
            holding: false,
            closing: false,
            close_tries: 0,
            last_back: None,
            timer: Nanos::MAX,
            backoff: 0,
            deadline: Nanos::MAX,
            idle_at: Nanos::MAX,
            resend: VecDeque::new(),
            under_way: VecDeque::new(),
            lost: false,
            horizon: 0,
            written: None,
            heard_at: 0,
            newest: None,
            reorder_at: Nanos::MAX,
            moved_at: 0,
            doubted_at: 0,
            probe: false,
            close: false,
            nulls: false,
            filler: None,
            filled_at: 0,
            confirms: VecDeque::new(),
            in_control: false,
            in_active: false,
        }
    }

    /// How chunks name the stream.
    pub(super) fn wire(&self) -> StreamRef {
        StreamRef {
            sender_port: self.key.local.0,
            receiver_port: self.key.remote.0,
            priority: self.key.priority as u8,
            epoch: self.epoch,
        }
    }

    /// START, while the receiver may have no record.
    pub(super) fn start(&self) -> Option<u32> {
        (!self.established).then_some(self.base)
    }

    /// The next number to assign.
    pub(super) fn next(&self) -> u32 {
        self.base.wrapping_add(self.queue.len() as u32)
    }

    /// Index of an unsettled number.
    pub(super) fn index(&self, number: u32) -> Option<usize> {
        let index = number.wrapping_sub(self.base) as usize;
        (index < self.queue.len()).then_some(index)
    }

    /// Whether `number` was ever transmitted, or may have been before a takeover.
    pub(super) fn transmitted(&self, index: usize) -> bool {
        index < self.high.wrapping_sub(self.base) as usize
    }

    pub(super) fn number(&self, index: usize) -> u32 {
        self.base.wrapping_add(index as u32)
    }

    /// First chunks go out again from `number` on.
    #[cold]
    pub(super) fn go_back(&mut self, number: u32) {
        if !serial_lt(number, self.cursor) {
            return;
        }
        let (from, to) = (
            number.wrapping_sub(self.base) as usize,
            self.cursor.wrapping_sub(self.base) as usize,
        );
        for message in self.queue.range_mut(from..to) {
            message.restart();
        }
        self.resend.retain(|&(n, _)| serial_lt(n, number));
        self.cursor = number;
    }

    /// Go back at most once per number and round trip (NACK as fast retransmit): never for an answer that was written before what
    /// went out again since had arrived; without a horizon not within `repeat`.
    #[cold]
    pub(super) fn go_back_once(
        &mut self,
        now: Nanos,
        number: u32,
        horizon: Nanos,
        repeat: Nanos,
    ) -> bool {
        if !serial_lt(number, self.cursor) {
            return false;
        }
        let sent_at = self.index(number).and_then(|i| self.queue.get(i));
        let sent_at = sent_at.map_or(0, |message| message.sent_at);
        let again = |&(last, at): &(u32, Nanos)| last == number && now < at.saturating_add(repeat);
        let stale = match horizon {
            0 => self.last_back.as_ref().is_some_and(again),
            horizon => sent_at > horizon,
        };
        if stale {
            return false;
        }
        self.last_back = Some((number, now));
        self.go_back(number);
        true
    }

    /// Everything volatile is void: an engine was replaced, or the epoch is new.
    pub(super) fn void_volatile(&mut self) {
        self.go_back(self.base);
        self.resend.clear();
        self.confirms.clear();
        (self.filler, self.filled_at) = (None, 0);
        self.probe = false;
        (self.stalled, self.not_ready, self.starved) = (false, None, false);
        self.regained = None;
        (self.lost, self.horizon, self.newest) = (false, 0, None);
        self.written = None;
        self.reorder_at = Nanos::MAX;
        self.under_way.clear();
        (self.backoff, self.timer) = (0, Nanos::MAX);
        self.last_back = None;
    }

    /// Drops settled messages from the front and keeps the numbers in step, also with so many that are gone from there already. True if `base` moved.
    pub(super) fn pop_settled(&mut self, gone: u32) -> bool {
        let before = self.base;
        self.base = before.wrapping_add(gone);
        while let Some(front) = self.queue.front()
            && front.state == MessageState::Done
        {
            self.queue.pop_front();
            self.base = self.base.wrapping_add(1);
        }
        if serial_lt(self.cursor, self.base) {
            self.cursor = self.base;
        }
        let base = self.base;
        self.not_ready = self.not_ready.filter(|&number| !serial_lt(number, base));
        if serial_lt(self.high, self.base) {
            self.high = self.base;
        }
        before != self.base
    }

    /// Whether anything that was transmitted is not settled, so that the retransmission timer must run.
    pub(super) fn outstanding(&self) -> bool {
        self.high != self.base
    }

    /// When the stream wants to be woken.
    pub(super) fn next_wake(&self) -> Nanos {
        let idle = if self.queue.is_empty() && !self.closing {
            self.idle_at
        } else {
            Nanos::MAX
        };
        self.timer.min(self.deadline).min(self.reorder_at).min(idle)
    }

    /// Gives message `index` up. Returns its status if it is known at once: never transmitted means not delivered.
    #[cold]
    pub(super) fn give_up(&mut self, index: usize, reason: Reason) -> Option<SendStatus> {
        let transmitted = self.transmitted(index);
        let message = self.queue.get_mut(index)?;
        if message.state != MessageState::Live {
            return None;
        }
        if transmitted {
            message.state = MessageState::Null(reason);
            message.null_due = true;
            self.nulls = true;
            self.holding |= pauses(reason);
            None
        } else {
            message.state = MessageState::Hole;
            self.paused |= pauses(reason);
            Some(SendStatus::NotDelivered(reason))
        }
    }

    /// The earliest deadline of what is still to be delivered.
    #[cold]
    pub(super) fn find_deadline(&mut self) {
        self.deadline = self
            .queue
            .iter()
            .filter(|message| message.state == MessageState::Live)
            .map(|message| message.deadline)
            .min()
            .unwrap_or(Nanos::MAX);
    }

    pub(super) fn confirm(&mut self, number: u32) {
        if self.confirms.len() < CONFIRMS_MAX && !self.confirms.contains(&number) {
            self.confirms.push_back(number);
        }
    }

    /// Marks a message that went out to go out again.
    #[cold]
    pub(super) fn lose(&mut self, index: usize) {
        let number = self.number(index);
        if let Some(message) = self.queue.get_mut(index) {
            message.restart();
            message.lost = true;
            self.lost = true;
            self.resend.retain(|&(n, _)| n != number);
        }
    }

    /// The first message to go out again that nothing holds back. Worth asking for while some may be `lost`.
    pub(super) fn first_lost(&mut self) -> Option<usize> {
        let before = self.cursor.wrapping_sub(self.base) as usize;
        let mut messages = self.queue.iter().take(before).enumerate();
        let Some(first) = messages.find(|(_, m)| m.lost) else {
            self.lost = false;
            return None;
        };
        let free = |(index, message): &(usize, &Message)| {
            message.lost && (message.state != MessageState::Live || self.is_ready(*index))
        };
        core::iter::once(first)
            .chain(messages)
            .find(free)
            .map(|(index, _)| index)
    }

    /// Bytes of a long message go out now.
    pub(super) fn note_bytes(&mut self, number: u32, range: Range, now: Nanos) {
        if let Some(message) = self.index(number).and_then(|i| self.queue.get_mut(i)) {
            (message.bytes_at, message.asked) = (now, false);
        }
        if let Some((n, last, at)) = self.under_way.back_mut()
            && (*n, last.to, *at) == (number, range.from, now)
        {
            last.to = range.to;
            return;
        }
        if self.under_way.len() == UNDER_WAY_MAX {
            self.under_way.pop_front();
        }
        self.under_way.push_back((number, range, now));
    }

    /// Takes note of an answer. False if it was overtaken by another of the stream: it is out of date. What left `window` before the newest
    /// horizon is not under way any more, not even for an answer that was overtaken.
    pub(super) fn heard(
        &mut self,
        now: Nanos,
        written: u32,
        horizon: Nanos,
        window: Nanos,
    ) -> bool {
        let newer = |last: u32| serial_lt(written, last);
        let comparable = now < self.heard_at.saturating_add(STAMP_GOOD_FOR);
        if comparable && self.written.is_some_and(newer) {
            return false;
        }
        (self.written, self.heard_at) = (Some(written), now);
        self.horizon = self.horizon.max(horizon);
        let arrived = self.horizon.saturating_sub(window);
        while self
            .under_way
            .front()
            .is_some_and(|&(_, _, at)| at < arrived)
        {
            self.under_way.pop_front();
        }
        true
    }

    /// What is left of a missing range without the bytes that are under way: they left after `horizon`, which the receiver said.
    pub(super) fn without_under_way(&self, number: u32, missing: Range, horizon: Nanos) -> Range {
        let mut left = missing;
        for &(n, sent, at) in &self.under_way {
            if n != number || at <= horizon || sent.to <= left.from || left.to <= sent.from {
                continue;
            }
            if sent.from <= left.from {
                left.from = sent.to.min(left.to);
            } else {
                left.to = sent.from;
            }
        }
        left
    }

    #[cold]
    pub(super) fn resend_range(&mut self, number: u32, range: Range) {
        if self.resend.len() < RESEND_MAX {
            self.resend.push_back((number, range));
        }
    }

    /// Ends the hold if no send given up is without its answer. True if it just ended.
    pub(super) fn released(&mut self) -> bool {
        let open = |m: &Message| matches!(m.state, MessageState::Null(reason) if pauses(reason));
        let released = self.holding && !self.queue.iter().any(open);
        self.holding &= !released;
        released
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_consistency(&self) {
        let next = self.next();
        let at = |number: u32| number.wrapping_sub(self.base) as usize;
        assert!(at(self.cursor) <= at(self.high), "cursor beyond high");
        assert!(at(self.high) <= self.queue.len(), "high beyond next {next}");
        for (index, message) in self.queue.iter().enumerate() {
            match message.state {
                MessageState::Done => assert!(index > 0, "a settled front"),
                MessageState::Null(_) => {
                    assert!(self.transmitted(index), "NULL before transmission")
                }
                MessageState::Live => assert!(message.sent <= message.len),
                MessageState::Hole => {}
            }
            assert!(!message.lost || self.lost, "lost and forgotten");
            assert!(!message.lost || !message.received, "lost and received");
            assert!(
                !message.lost || index < at(self.cursor),
                "lost before it was sent"
            );
        }
    }
}

/// GM's rule: after which failures the stream waits for `resume_sending` or `drop_sends`.
pub(super) fn pauses(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::PortClosed | Reason::TooLong | Reason::Deadline | Reason::BadMemory
    )
}
