//! A stream's turn at a frame: the one chunk it adds.
//!
//! Problem: which of a stream's messages goes next, and how much of it, under window, Stall, want of buffers, credit and grants.
//! transport.md §4.2, §4.3, §7.2, §8.3, §8.4. ParaStation2's window and states (000), Tam's Stall on the sending side (003), RMPP's grants (001), GAMMA's credits (002).
//!
//! Idea: what is lost goes before what is new, and first chunks go before DATA: a first chunk is what order depends on, DATA is paced by grants. A number that is only owed
//! (NULL) goes whatever holds messages back. A message that fits a frame waits for one that has room for it; a longer one takes
//! what is left, unless that is too little to be worth a chunk.
//!
//! What follows a request unasked goes before other first chunks. It waits for credit like them, but holds up no DATA that was granted.
//!
//! Rejected: splitting a short message over two frames (two chances to lose it, and a grant to wait for).
//!
//! Invariants: a frame with EAGER, RTS with payload, or DATA that nobody asked for, is charged `ceil(len / 3840)` credits and never exceeds them; DATA stays
//! below `granted`; nothing new goes out while stalled, paused, holding or not ready.

use alloc::vec::Vec;

use super::bare::BarePiece;
use super::control::push;
use super::counters::Counters;
use super::credit::BUFFER_BYTES;
use super::send_stream::{Message, MessageState, SendStream};
use crate::ident::{Nanos, SendId};
use crate::wire::chunk::Range;
use crate::wire::frame::FRAME_HEADER_LEN;
use crate::wire::{Chunk, DATA_LEN, Form, FrameWriter, Payload, eager_header_len};

/// An EAGER's chunk header with START; what a whole frame leaves for one message.
pub(super) const EAGER_HEADER: usize = 40;
/// A long message is not split into less than this while a fresh frame would carry more.
const PIECE_MIN: usize = 512;

/// Payload that a chunk of the frame still needs: all of it, or, of a RUN, its next message's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub chunk: usize,
    pub stream: u32,
    pub number: u32,
    pub id: SendId,
    pub offset: u32,
}

impl Source {
    /// From the message's first byte on.
    #[inline(always)]
    pub fn of(chunk: usize, stream: u32, number: u32, id: SendId) -> Self {
        Self {
            chunk,
            stream,
            number,
            id,
            offset: 0,
        }
    }
}

/// The payloads of the frame being written.
#[derive(Default)]
pub(super) struct Plan {
    /// In the order of the chunks; one per chunk, but of a RUN one per message.
    pub sources: Vec<Source>,
    /// The frame carries unasked payload and is charged to the credit.
    pub charged: bool,
    /// Something in the frame wants an answer.
    pub asks: bool,
    /// Granted DATA fills the frame.
    pub filled: Option<Filled>,
    /// The clock's reading at which it leaves.
    pub read_at: Nanos,
    /// A bare frame would be read, and leave nothing unsaid.
    pub may_be_bare: bool,
    /// The frame is a bare one with this.
    pub bare: Option<BarePiece>,
}

/// The only chunk of a frame that it fills: a piece of a long message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub sender: u32,
    /// The message in the stream's queue.
    pub index: usize,
    pub number: u32,
    pub id: SendId,
    pub taken: Range,
    /// What is granted ends here.
    pub until: u32,
}

/// What a stream did with its turn.
pub(super) enum Turn {
    /// Wrote a chunk; may have more.
    Sent,
    /// The same, cut to what the frame held: nothing else has room.
    Filled,
    /// Has nothing it may send now.
    Nothing,
    /// Waits for credit.
    NoCredit,
    /// Wants a frame of its own.
    Full,
}

/// A stream's turn at a frame.
pub(super) struct StreamWriter<'a, 'w, 'f> {
    pub now: Nanos,
    pub sender: u32,
    /// The whole frame.
    pub space: usize,
    pub window: u32,
    /// Bytes the credit covers.
    pub credit: usize,
    /// It will not cover more by waiting: what it does not cover travels as a request.
    pub asks_first: bool,
    /// So many buffers may be waited for; 0: streams of higher priority would take what comes.
    pub may_save: u32,
    /// The turn ended as there is not credit for all of a message yet, and there may be.
    pub saves: bool,
    /// Requests travel without data.
    pub crowded: bool,
    /// First bytes of a long message that the peer takes without a grant.
    pub unasked: u32,
    pub w: &'w mut FrameWriter<'f>,
    pub plan: &'a mut Plan,
    pub counters: &'a mut Counters,
    #[cfg(test)]
    pub shortcuts: &'a mut super::Shortcuts,
}

impl StreamWriter<'_, '_, '_> {
    /// As many turns as the stream can take. True if it took any; and how the last one ended, which is not [`Turn::Sent`].
    pub(super) fn turns(&mut self, stream: &mut SendStream) -> (bool, Turn) {
        let mut any = self.burst(stream);
        loop {
            match self.turn(stream) {
                Turn::Sent => any = true,
                // What may come next need not be looked for.
                Turn::Filled => return (true, Turn::Full),
                turn => return (any, turn),
            }
        }
    }

    /// One chunk of the stream: the next first chunk, else DATA.
    #[inline(always)]
    pub(super) fn turn(&mut self, stream: &mut SendStream) -> Turn {
        if stream.reopen || stream.record.is_none() {
            return if stream.queue.is_empty() {
                Turn::Nothing
            } else {
                Turn::NoCredit // the timer tries again
            };
        }
        let mut blocked = None;
        if stream.lost
            && let Some(index) = stream.first_lost()
        {
            match self.again(stream, index) {
                Turn::NoCredit => blocked = Some(Turn::NoCredit),
                turn => return turn,
            }
        }
        if let Some(number) = stream.follows {
            match self.follow(stream, number) {
                Turn::Nothing => stream.follows = None,
                Turn::NoCredit => blocked = Some(Turn::NoCredit),
                turn => return turn,
            }
        }
        let index = stream.cursor.wrapping_sub(stream.base) as usize;
        let fresh = stream.cursor == stream.high;
        if index < self.window as usize
            && let Some(message) = stream.queue.get(index)
        {
            let state = message.state;
            match state {
                // Its number is owed whatever holds the others back.
                MessageState::Null(_) | MessageState::Hole | MessageState::Done => {
                    return self.null(stream, index);
                }
                MessageState::Live if blocked.is_some() || !stream.may_go(index) => {}
                MessageState::Live
                    if fresh && (stream.stalled || stream.paused || stream.holding) => {}
                MessageState::Live => match self.first(stream, index) {
                    Turn::NoCredit => blocked = Some(Turn::NoCredit), // granted DATA needs none
                    turn => return turn,
                },
            }
        }
        match self.data(stream) {
            Turn::Nothing => blocked.unwrap_or(Turn::Nothing),
            turn => turn,
        }
    }

    /// Payload bytes that fit behind `chunk`'s header, and bytes of the frame without them.
    #[inline]
    fn room(&self, chunk: &Chunk<'_>) -> Option<(usize, usize)> {
        let room = self.w.room_for(chunk)?;
        Some((room, self.space.saturating_sub(room)))
    }

    /// A message that is lost, or its NULL.
    #[cold]
    fn again(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        match stream.queue.get(index).map(|message| message.state) {
            None => Turn::Nothing,
            Some(MessageState::Live) => self.first(stream, index),
            Some(_) => self.null(stream, index),
        }
    }

    /// NULL in its turn.
    #[cold]
    fn null(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        let number = stream.number(index);
        let chunk = Chunk::Null {
            stream: stream.wire(),
            start: stream.start(),
            number,
        };
        match self.room(&chunk) {
            Some((_, used)) if !self.plan.charged || used <= self.credit => {}
            _ => return Turn::Full,
        }
        if push(self.w, self.counters, &chunk).is_err() {
            return Turn::Full;
        }
        if let Some(message) = stream.queue.get_mut(index) {
            message.null_due = false;
            message.goes_out(self.now);
        }
        stream.not_ready = stream.not_ready.filter(|&from| from != number);
        self.advance(stream, number);
        Turn::Sent
    }

    /// EAGER, or RTS with as much as fits and the credit covers. A message that fits a frame and not the credit is asked for too.
    #[inline(always)]
    fn first(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        let Some(message) = stream.queue.get(index) else {
            return Turn::Nothing;
        };
        let alone = FRAME_HEADER_LEN + EAGER_HEADER + message.len as usize;
        let whole =
            alone <= self.space && (alone <= self.credit || !self.asks_first || self.plan.charged);
        if whole {
            self.eager(stream, index, alone)
        } else {
            self.request(stream, index)
        }
    }

    /// All of a message, which needs `alone` bytes in a frame of its own.
    #[inline(always)]
    fn eager(&mut self, stream: &mut SendStream, index: usize, alone: usize) -> Turn {
        let (name, start, number) = (stream.wire(), stream.start(), stream.number(index));
        let Some(message) = stream.queue.get_mut(index) else {
            return Turn::Nothing;
        };
        let (id, total) = (message.id, message.len);
        let (tag, ack) = (message.tag, message.ack);
        let (form, room) = match start {
            None => {
                let form = self.w.form(&name, number, tag, ack, total as usize);
                (form, self.w.room_in(form))
            }
            start => (Form::Eager, self.w.room_behind(eager_header_len(start))),
        };
        let used = match room {
            Some(room) if total as usize <= room => self.space.saturating_sub(room),
            _ => return Turn::Full,
        };
        if used + total as usize > self.credit {
            // Too much for what else is in the frame, or too much.
            return if self.plan.charged || alone <= self.credit {
                Turn::Full
            } else {
                Turn::NoCredit
            };
        }
        let payload = Payload {
            len: total as u16,
            crc: 0,
        };
        let pushed = match start {
            None => self.w.push_eager(form, &name, number, tag, ack, payload),
            start => self.w.push(&Chunk::Eager {
                stream: name,
                start,
                number,
                tag,
                ack,
                payload,
            }),
        };
        let Ok(at) = pushed else {
            return Turn::Full;
        };
        self.counters.chunks_sent += 1;
        self.plan.charged = true;
        self.plan
            .add(at, self.sender, number, id, 0, total as usize);
        message.long = false;
        (message.sent, message.granted) = (total, total);
        message.goes_out(self.now);
        if number != stream.high {
            self.counters.retransmits += 1;
        }
        self.advance(stream, number);
        Turn::Sent
    }

    /// RTS with as much of the message as fits and the credit covers.
    fn request(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        let (name, start, number) = (stream.wire(), stream.start(), stream.number(index));
        let Some(message) = stream.queue.get_mut(index) else {
            return Turn::Nothing;
        };
        let (id, all, tag, ack) = (message.id, message.len, message.tag, message.ack);
        let chunk = |len: usize, unasked: bool| Chunk::Rts {
            stream: name,
            start,
            number,
            tag,
            ack,
            total: all,
            unasked,
            payload: Payload {
                len: len as u16,
                crc: 0,
            },
        };
        let total = all as usize;
        let Some((room, used)) = self.room(&chunk(0, false)) else {
            return Turn::Full;
        };
        let paid = match self.crowded {
            true => 0,
            false => self.credit.saturating_sub(used),
        };
        let too_short = paid > 0 && room < PIECE_MIN.min(total);
        if (too_short && !self.w.is_empty()) || (self.plan.charged && used > self.credit) {
            return Turn::Full;
        }
        let len = room.min(paid).min(total);
        let ahead = self.unasked.min(all);
        let follows = len > 0 && self.covers(ahead.saturating_sub(len as u32));
        // What comes unasked as a whole waits for credit as a short one does: to ask for a grant takes longer, and holds up all behind it. Others
        // would take each bit of credit that comes, so that it never were enough: they have none meanwhile.
        let waits = !follows && ahead == all && (len as u32) < all;
        if waits && self.buffers(all) <= self.may_save as usize && !self.crowded && !self.asks_first
        {
            self.saves = true;
            return Turn::NoCredit;
        }
        let Ok(at) = push(self.w, self.counters, &chunk(len, follows)) else {
            return Turn::Full;
        };
        self.plan.charged |= len > 0;
        self.plan.add(at, self.sender, number, id, 0, len);
        message.long = true;
        message.unasked = if follows { ahead } else { 0 };
        (message.sent, message.granted) = (len as u32, message.unasked.max(len as u32));
        message.goes_out(self.now);
        if follows {
            (stream.hungry, stream.follows) = (true, Some(number));
        }
        if number != stream.high {
            self.counters.retransmits += 1;
        }
        self.advance(stream, number);
        Turn::Sent
    }

    /// Whether there are bytes to follow a request, and credit for them beside the request's frame.
    fn covers(&self, bytes: u32) -> bool {
        let buffers = self.space.div_ceil(BUFFER_BYTES) + self.buffers(bytes);
        bytes > 0 && buffers * BUFFER_BYTES <= self.credit
    }

    /// Receive buffers that so many bytes fill.
    fn buffers(&self, bytes: u32) -> usize {
        let payload = self.space.saturating_sub(FRAME_HEADER_LEN + EAGER_HEADER);
        let frames = (bytes as usize).div_ceil(payload.max(1));
        frames * self.space.div_ceil(BUFFER_BYTES)
    }

    /// The first chunk of message `number`, or its NULL, goes out.
    #[inline]
    fn advance(&mut self, stream: &mut SendStream, number: u32) {
        let next = number.wrapping_add(1);
        if number == stream.high {
            stream.high = next;
        }
        if number == stream.cursor {
            stream.cursor = next;
        }
        self.plan.asks = true;
    }

    /// DATA: what is asked for again, then what is granted, oldest message first.
    #[inline(never)]
    fn data(&mut self, stream: &mut SendStream) -> Turn {
        while let Some(&(number, range)) = stream.resend.front() {
            let message = stream
                .index(number)
                .and_then(|index| stream.queue.get(index));
            let Some(message) = message.filter(|m| m.long && m.state == MessageState::Live) else {
                stream.resend.pop_front();
                continue;
            };
            let id = message.id;
            return match self.piece(stream, number, id, range, false) {
                Err(turn) => turn,
                Ok(taken) => {
                    self.counters.retransmitted_bytes += u64::from(taken.to - taken.from);
                    stream.note_bytes(number, taken, self.now);
                    if taken.to == range.to {
                        stream.resend.pop_front();
                    } else if let Some(front) = stream.resend.front_mut() {
                        front.1.from = taken.to;
                    }
                    self.sent()
                }
            };
        }
        if !stream.hungry {
            return Turn::Nothing; // or every poll would look at the whole window
        }
        let before = stream.cursor.wrapping_sub(stream.base) as usize;
        let hungry = |m: &Message| m.long && m.state == MessageState::Live && m.sent < m.granted;
        let waits = |m: &Message| m.sent < m.unasked && self.is_broke();
        let mut messages = stream.queue.iter().take(before);
        if let Some(index) = messages.position(|m| hungry(m) && !waits(m)) {
            return self.next_bytes(stream, index);
        }
        stream.hungry = stream.queue.iter().take(before).any(hungry);
        match stream.hungry {
            true => self.unpaid(),
            false => Turn::Nothing,
        }
    }

    /// The unasked bytes of a request that went out: before anything else new, so that its message is whole soon.
    #[inline(never)]
    fn follow(&mut self, stream: &mut SendStream, number: u32) -> Turn {
        let index = stream.index(number);
        let waits = |index: &usize| {
            let message = stream.queue.get(*index);
            message.is_some_and(|m| m.long && m.state == MessageState::Live && m.sent < m.unasked)
        };
        match index.filter(waits) {
            None => Turn::Nothing,
            Some(_) if self.is_broke() => self.unpaid(),
            Some(index) => self.next_bytes(stream, index),
        }
    }

    /// Whether the credit does not cover a piece worth sending in this frame.
    fn is_broke(&self) -> bool {
        let used = self.w.room_behind(0).map_or(0, |room| self.space - room);
        used + PIECE_MIN > self.credit
    }

    /// Unasked bytes wait for credit: for a fresh frame, which can be paid for or will be when this one has been, or for more of it.
    fn unpaid(&self) -> Turn {
        match self.credit {
            0 => Turn::NoCredit,
            _ => Turn::Full,
        }
    }

    /// DATA of a message that has some it may send.
    fn next_bytes(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        let Some(message) = stream.queue.get(index) else {
            return Turn::Nothing;
        };
        let unasked = message.sent < message.unasked;
        let (from, id) = (message.sent, message.id);
        let to = match unasked {
            true => message.unasked,
            false => message.granted,
        };
        let number = stream.number(index);
        match self.piece(stream, number, id, Range { from, to }, unasked) {
            Err(turn) => turn,
            Ok(taken) => {
                if let Some(message) = stream.queue.get_mut(index) {
                    message.sent = taken.to;
                }
                stream.note_bytes(number, taken, self.now);
                let turn = self.sent();
                let only = self.w.chunks() == 1 || self.plan.bare.is_some();
                if matches!(turn, Turn::Filled) && only && !unasked {
                    self.plan.filled = Some(Filled {
                        sender: self.sender,
                        index,
                        number,
                        id,
                        taken,
                        until: to,
                    });
                }
                turn
            }
        }
    }

    /// A chunk was written, which may have been cut.
    fn sent(&self) -> Turn {
        if self.w.is_full() {
            Turn::Filled
        } else {
            Turn::Sent
        }
    }

    /// One DATA chunk from the front of `range`; returns what it took.
    #[inline(never)]
    fn piece(
        &mut self,
        stream: &SendStream,
        number: u32,
        id: SendId,
        range: Range,
        unasked: bool,
    ) -> Result<Range, Turn> {
        if !unasked && let Some(piece) = self.bare_piece(number, id, range) {
            return Ok(piece);
        }
        let mut room = self.w.room_behind(DATA_LEN).ok_or(Turn::Full)?;
        let used = self.space.saturating_sub(room);
        if self.plan.charged || unasked {
            room = room.min(self.credit.saturating_sub(used));
        }
        let len = room.min((range.to - range.from) as usize);
        let rest = (range.to - range.from) as usize - len;
        if len == 0 || (len < PIECE_MIN && rest > 0 && !self.w.is_empty()) {
            return Err(Turn::Full);
        }
        let payload = Payload {
            len: len as u16,
            crc: 0,
        };
        let at = self
            .w
            .push_data(&stream.wire(), number, range.from, unasked, payload)
            .map_err(|_| Turn::Full)?;
        self.counters.chunks_sent += 1;
        self.plan.add(at, self.sender, number, id, range.from, len);
        self.plan.charged |= unasked;
        self.plan.asks = true;
        Ok(Range {
            from: range.from,
            to: range.from + len as u32,
        })
    }
}

impl Plan {
    /// An empty plan in memory that another one left.
    #[inline]
    pub(super) fn over(mut sources: Vec<Source>) -> Self {
        sources.clear();
        Self {
            sources,
            ..Self::default()
        }
    }

    #[inline]
    pub(super) fn add(
        &mut self,
        chunk: usize,
        stream: u32,
        number: u32,
        id: SendId,
        offset: u32,
        len: usize,
    ) {
        if len > 0 {
            self.sources.push(Source {
                offset,
                ..Source::of(chunk, stream, number, id)
            });
        }
    }
}
