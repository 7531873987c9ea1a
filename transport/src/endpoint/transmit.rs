//! What goes into the next frame.
//!
//! Problem: acknowledgements must never wait for data, high priority never behind low, no stream or peer behind a greedy one, and
//! small messages should share frames. DESIGN §3 *Coalescing*; GAMMA's credits (002); Tam's Stall on the sending side (003);
//! PROTOCOL *Priorities*, *Credits*.
//!
//! Idea: a ready queue of peers per priority, taken in turn; a frame for one peer takes, in this order, handshake, answers of our
//! receiving streams, control of our sending streams, then messages, one chunk per stream in turn, high before low, until the
//! frame is full. Nothing ever waits for more to come. Low priority has its turn after eighteen times as many bytes of high.
//!
//! Within a stream, first chunks go before DATA: a first chunk is what order depends on, DATA is paced by grants.
//!
//! Rejected: a queue of chunks (stale by the time it is sent, and unbounded); Nagle's wait.
//!
//! Invariants: a frame with EAGER or RTS payload is charged `ceil(len / 3840)` credits and never exceeds them; a frame goes to one
//! peer; a message's payload is read after all headers are fixed.

use super::control::{push, receiver_chunks, sender_chunks};
use super::counters::Counters;
use super::hello::{WIRE_MAX, WIRE_MIN, truncate};
use super::peer::BUFFER_BYTES;
use super::send_stream::{Message, MessageState, SendStream};
use super::timers::Owner;
use super::{Config, Endpoint, Transmit};
use crate::host::{Host, Reason};
use crate::ident::{Nanos, Peer, Priority, SendId};
use crate::wire::chunk::{Hello, Range};
use crate::wire::frame::FRAME_HEADER_LEN;
use crate::wire::{Chunk, FrameHeader, FrameWriter, MAX_CHUNKS, Payload, crc32c};

/// For each byte of low priority, high may send so many before it is low's turn again: low gets 1/19 of a busy link.
const HIGH_PER_LOW: i64 = 18;
/// High goes first.
pub(super) const LOW_DUE_AT_FIRST: i64 = -HIGH_PER_LOW * 1_500;
/// What low may have used ahead while high was silent, in bytes of high.
const LOW_AHEAD_MAX: i64 = HIGH_PER_LOW * 9_000;
/// An EAGER's chunk header with START; what a whole frame leaves for one message.
const EAGER_HEADER: usize = 40;
/// A long message is not split into less than this while a fresh frame would carry more.
const PIECE_MIN: usize = 512;

/// Payload that a chunk of the frame still needs.
#[derive(Clone, Copy)]
struct Source {
    chunk: usize,
    stream: u32,
    number: u32,
    id: SendId,
    offset: u32,
}

/// The payloads of the frame being written.
#[derive(Default)]
struct Plan {
    sources: [Option<Source>; MAX_CHUNKS],
    len: usize,
    /// The frame carries unasked payload and is charged to the credit.
    charged: bool,
    /// Something in the frame wants an answer.
    asks: bool,
}

/// What a stream did with its turn.
enum Turn {
    /// Wrote a chunk; may have more.
    Sent,
    /// Has nothing it may send now.
    Nothing,
    /// Waits for credit.
    NoCredit,
    /// Wants a frame of its own.
    Full,
}

impl Endpoint {
    /// Writes the next frame into `to` (as long as the longest frame) and says where it goes; `None` if nothing may be sent now.
    pub fn poll_transmit<H: Host>(
        &mut self,
        now: Nanos,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        self.act_on_cancels(now, host);
        if let Some(transmit) = self.write_reset(to) {
            return Some(transmit);
        }
        // Each peer once: one whose work fits no frame must not keep us here.
        for _ in 0..self.ready[0].len() + self.ready[1].len() {
            let low_turn = self.low_due >= 0 && !self.ready[0].is_empty();
            let class = usize::from(!self.ready[1].is_empty() && !low_turn);
            let slot = self.ready[class].pop_front()?;
            let Some(entry) = self.peers.get_mut(slot) else {
                continue;
            };
            entry.ready[class] = false;
            if let Some(transmit) = self.write_frame(now, slot, class, to, host) {
                let len = transmit.len as i64;
                self.low_due = match class {
                    0 => (self.low_due - HIGH_PER_LOW * len).max(-LOW_AHEAD_MAX),
                    _ => (self.low_due + len).min(0),
                };
                return Some(transmit);
            }
        }
        None
    }

    /// A RESET goes alone, to somebody who may not even be a peer.
    fn write_reset(&mut self, to: &mut [u8]) -> Option<Transmit> {
        let reset = self.resets.queue.pop_front()?;
        let mut w = FrameWriter::new(to);
        let chunk = Chunk::Reset {
            src_incarnation: reset.src_incarnation,
            dst_incarnation: reset.dst_incarnation,
            reason: reset.reason,
        };
        push(&mut w, &mut self.counters, &chunk).ok()?;
        let mut header = frame_header(&self.config);
        (header.dst_node, header.dst_queue) = (reset.to.node.0, reset.to.queue);
        header.dst_incarnation = reset.src_incarnation;
        let len = w.finish_headers().finish(&header);
        self.counters.resets_sent += 1;
        self.counters.frames_sent += 1;
        self.counters.bytes_sent += len as u64;
        Some(Transmit {
            peer: reset.to,
            len,
            priority: Priority::High,
            flow: 0,
        })
    }

    fn write_frame<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        class: usize,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        let entry = self.peers.get_mut(slot)?;
        let up = entry.is_up();
        if up && let Some((size, nonce)) = entry.path.take_probe(now) {
            self.timers.arm(Owner::Peer(slot), entry.path.again_at());
            self.mark_leftovers(slot);
            self.mark_ready(slot, Priority::High);
            let mut w = FrameWriter::new(to);
            let chunk = Chunk::PathProbe { size, nonce };
            if push(&mut w, &mut self.counters, &chunk).is_ok() {
                return self.finish_frame(now, slot, w, &Plan::default(), false, host);
            }
            return None;
        }
        let space = to.len().min(usize::from(entry.max_frame));
        let mut w = FrameWriter::new(to.get_mut(..space)?);
        let mut plan = Plan::default();
        let mut full = self.handshake(now, slot, &mut w, &mut plan);
        let mut only_low = false;
        if up && !full {
            full = self.answers(slot, &mut w, &mut plan);
            for class in [class, 1 - class] {
                let before = w.chunks();
                full = full || self.messages(now, slot, class, space, &mut w, &mut plan);
                if w.chunks() > before {
                    only_low = class == 0 && (only_low || before == 0);
                }
            }
        }
        if full {
            self.mark_leftovers(slot);
        }
        if w.is_empty() {
            return None;
        }
        self.finish_frame(now, slot, w, &plan, only_low, host)
    }

    /// A frame was full: the peer goes to the end of the queues it has work for.
    fn mark_leftovers(&mut self, slot: u32) {
        let Some(entry) = self.peers.get(slot) else {
            return;
        };
        let control = !entry.control.is_empty()
            || !entry.sender_control.is_empty()
            || !entry.replies.is_empty();
        let handshake = entry.hello_due || entry.hello_ack_due;
        let [low, high] = [&entry.active[0], &entry.active[1]].map(|queue| !queue.is_empty());
        if high || control || handshake {
            self.mark_ready(slot, Priority::High);
        }
        if low {
            self.mark_ready(slot, Priority::Low);
        }
    }

    /// HELLO-ACK and HELLO. True if the frame is full.
    fn handshake(
        &mut self,
        now: Nanos,
        slot: u32,
        w: &mut FrameWriter<'_>,
        plan: &mut Plan,
    ) -> bool {
        let Some(entry) = self.peers.get_mut(slot) else {
            return true;
        };
        let mut hello = Hello {
            incarnation: self.config.incarnation,
            echo: entry.echo,
            cluster: self.config.cluster,
            wire_min: WIRE_MIN,
            wire_max: WIRE_MAX,
            queues: self.config.queues,
            max_frame: self.config.max_frame,
            policy: self.fingerprint,
            name: &self.config.name,
        };
        if entry.hello_ack_due {
            if push(w, &mut self.counters, &Chunk::HelloAck(hello)).is_err() {
                return true;
            }
            entry.hello_ack_due = false;
        }
        if entry.hello_due {
            if hello.echo == 0 {
                hello.echo = entry.incarnation;
            }
            if push(w, &mut self.counters, &Chunk::Hello(hello)).is_err() {
                return true;
            }
            self.counters.hellos_sent += 1;
            let at = Self::hello_sent(entry, now);
            self.timers.arm(Owner::Peer(slot), at);
            plan.asks = true;
        }
        false
    }

    /// Answers and control. True if the frame is full.
    fn answers(&mut self, slot: u32, w: &mut FrameWriter<'_>, plan: &mut Plan) -> bool {
        let Some(entry) = self.peers.get_mut(slot) else {
            return true;
        };
        while let Some(reply) = entry.replies.front() {
            if push(w, &mut self.counters, &reply.chunk()).is_err() {
                return true;
            }
            entry.replies.pop_front();
        }
        while let Some(&receiver) = entry.control.front() {
            if let Some(stream) = self.receive.get_mut(receiver)
                && stream.peer == slot
            {
                if receiver_chunks(stream, &mut self.longs, w, &mut self.counters).is_err() {
                    return true;
                }
                stream.in_control = false;
            }
            entry.control.pop_front();
        }
        // All acknowledgements are in this frame.
        entry.ack_due = Nanos::MAX;
        entry.acks_pending = 0;
        while let Some(&sender) = entry.sender_control.front() {
            if let Some(stream) = self.send.get_mut(sender)
                && stream.peer == slot
            {
                match sender_chunks(stream, w, &mut self.counters) {
                    Ok(asks) => plan.asks |= asks,
                    Err(_) => return true,
                }
                stream.in_control = false;
            }
            entry.sender_control.pop_front();
        }
        false
    }

    /// Messages of one priority, one chunk per stream in turn. True if the frame is full.
    fn messages(
        &mut self,
        now: Nanos,
        slot: u32,
        class: usize,
        space: usize,
        w: &mut FrameWriter<'_>,
        plan: &mut Plan,
    ) -> bool {
        let mut blocked = 0;
        loop {
            let Some(entry) = self.peers.get_mut(slot) else {
                return true;
            };
            let Some(&sender) = entry.active[class]
                .front()
                .filter(|_| blocked < entry.active[class].len())
            else {
                return false;
            };
            let Some(stream) = self
                .send
                .get_mut(sender)
                .filter(|stream| stream.peer == slot)
            else {
                entry.active[class].pop_front();
                continue;
            };
            let mut writer = StreamWriter {
                now,
                sender,
                space,
                window: self.config.policy.window_messages,
                credit: entry.credit() as usize * BUFFER_BYTES,
                w,
                plan,
                counters: &mut self.counters,
            };
            let turn = writer.turn(stream);
            if matches!(turn, Turn::Sent | Turn::NoCredit) && stream.timer == Nanos::MAX {
                stream.timer =
                    now.saturating_add(entry.rtt.rto(&self.config.policy, stream.backoff));
                self.timers.arm(Owner::Send(sender), stream.timer);
            }
            match turn {
                Turn::Sent => {
                    blocked = 0;
                    stream.starved = false;
                    entry.active[class].rotate_left(1);
                }
                Turn::Full => return true,
                Turn::NoCredit => {
                    blocked += 1;
                    self.counters.credit_stalls += u64::from(!stream.starved);
                    stream.starved = true;
                    entry.active[class].rotate_left(1);
                }
                Turn::Nothing => {
                    stream.in_active = false;
                    entry.active[class].pop_front();
                }
            }
        }
    }

    /// Reads the payloads, charges the credit, writes the frame header.
    fn finish_frame<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        w: FrameWriter<'_>,
        plan: &Plan,
        only_low: bool,
        host: &mut H,
    ) -> Option<Transmit> {
        let buffers = w.len().div_ceil(BUFFER_BYTES) as u32;
        let mut payloads = w.finish_headers();
        for source in plan.sources.iter().take(plan.len).flatten() {
            let to = payloads.payload_mut(source.chunk);
            let crc = match host.read_payload(source.id, source.offset, to) {
                Ok(crc) => crc,
                Err(_) => {
                    // The client's memory is gone. The rest of the frame must not suffer: this chunk goes out with a checksum
                    // that cannot match, and the send is given up.
                    to.fill(0);
                    self.memory_fault(source.stream, source.number);
                    !crc32c(to)
                }
            };
            payloads.set_payload_crc(source.chunk, crc);
        }
        let mut header = frame_header(&self.config);
        let unreachable = self.unreachable_after();
        let entry = self.peers.get_mut(slot)?;
        let peer = entry.id;
        (header.dst_node, header.dst_queue) = (peer.node.0, peer.queue);
        if entry.incarnation != 0 {
            header.dst_incarnation = truncate(entry.incarnation);
        }
        if plan.charged {
            entry.sent_buffers = entry.sent_buffers.wrapping_add(buffers);
        }
        header.sent_buffers = entry.sent_buffers;
        header.credit_limit = entry
            .seen_buffers
            .wrapping_add(self.config.policy.eager_buffers);
        if plan.asks && entry.waiting_since.is_none() {
            entry.waiting_since = Some(now);
            self.timers
                .arm(Owner::Peer(slot), now.saturating_add(unreachable));
        }
        let len = payloads.finish(&header);
        self.counters.frames_sent += 1;
        self.counters.bytes_sent += len as u64;
        Some(Transmit {
            peer,
            len,
            priority: if only_low {
                Priority::Low
            } else {
                Priority::High
            },
            flow: flow(&self.config, peer),
        })
    }

    /// A send's memory cannot be read: its number goes on as NULL.
    fn memory_fault(&mut self, sender: u32, number: u32) {
        self.counters.memory_faults += 1;
        if let Some(stream) = self.send.get_mut(sender)
            && let Some(index) = stream.index(number)
        {
            // Transmitted by now, so no status yet.
            let _ = stream.give_up(index, Reason::BadMemory);
            self.queue_sender_control(sender);
        }
    }
}

/// A header from us to nobody yet.
fn frame_header(config: &Config) -> FrameHeader {
    FrameHeader {
        src_node: config.node.0,
        src_queue: config.queue,
        src_incarnation: truncate(config.incarnation),
        engine_epoch: config.engine_epoch,
        ..FrameHeader::default()
    }
}

/// One flow per pair of engines.
fn flow(config: &Config, peer: Peer) -> u16 {
    let pair = u32::from(peer.node.0) << 16 | u32::from(config.queue) << 8 | u32::from(peer.queue);
    (pair.wrapping_mul(0x9e37_79b1) >> 16) as u16
}

/// A stream's turn at a frame.
struct StreamWriter<'a, 'w, 'f> {
    now: Nanos,
    sender: u32,
    /// The whole frame.
    space: usize,
    window: u32,
    /// Bytes the credit covers.
    credit: usize,
    w: &'w mut FrameWriter<'f>,
    plan: &'a mut Plan,
    counters: &'a mut Counters,
}

impl StreamWriter<'_, '_, '_> {
    /// One chunk of the stream: the next first chunk, else DATA.
    fn turn(&mut self, stream: &mut SendStream) -> Turn {
        if stream.reopen || stream.record.is_none() {
            return if stream.queue.is_empty() {
                Turn::Nothing
            } else {
                Turn::NoCredit // the timer tries again
            };
        }
        let index = stream.cursor.wrapping_sub(stream.base) as usize;
        let fresh = stream.cursor == stream.high;
        let mut blocked = None;
        if index < self.window as usize
            && let Some(message) = stream.queue.get(index)
        {
            match message.state {
                // Its number is owed whatever holds the others back.
                MessageState::Null(_) | MessageState::Hole | MessageState::Done => {
                    return self.null(stream, index);
                }
                MessageState::Live if stream.not_ready => {}
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
    fn room(&self, chunk: &Chunk<'_>) -> Option<(usize, usize)> {
        let room = self.w.room_for(chunk)?;
        Some((room, self.space.saturating_sub(room)))
    }

    /// NULL in its turn.
    fn null(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        let chunk = Chunk::Null {
            stream: stream.wire(),
            start: stream.start(),
            number: stream.cursor,
        };
        match self.room(&chunk) {
            Some((_, used)) if !self.plan.charged || used <= self.credit => {}
            _ => return Turn::Full,
        }
        if push(self.w, self.counters, &chunk).is_err() {
            return Turn::Full;
        }
        if let Some(message) = stream.queue.get_mut(index) {
            message.null_tries = message.null_tries.saturating_add(1);
            message.null_due = false;
        }
        stream.not_ready = false;
        self.advance(stream);
        Turn::Sent
    }

    /// EAGER, or RTS with as much as fits and the credit covers.
    fn first(&mut self, stream: &mut SendStream, index: usize) -> Turn {
        let Some(message) = stream.queue.get(index) else {
            return Turn::Nothing;
        };
        let request = message.request;
        let (name, start, number) = (stream.wire(), stream.start(), stream.cursor);
        let (total, tag) = (request.len, request.tag);
        let whole = total as usize <= self.space.saturating_sub(FRAME_HEADER_LEN + EAGER_HEADER);
        let chunk = |len: u16| {
            let payload = Payload { len, crc: 0 };
            if whole {
                Chunk::Eager {
                    stream: name,
                    start,
                    number,
                    tag,
                    payload,
                }
            } else {
                Chunk::Rts {
                    stream: name,
                    start,
                    number,
                    tag,
                    total,
                    payload,
                }
            }
        };
        let Some((room, used)) = self.room(&chunk(0)) else {
            return Turn::Full;
        };
        let paid = self.credit.saturating_sub(used);
        let len = if whole {
            if total as usize > room {
                return Turn::Full;
            }
            if used + total as usize > self.credit {
                return if self.plan.charged {
                    Turn::Full
                } else {
                    Turn::NoCredit
                };
            }
            total as usize
        } else {
            if room < PIECE_MIN && !self.w.is_empty() {
                return Turn::Full;
            }
            room.min(paid).min(total as usize)
        };
        let Ok(at) = push(self.w, self.counters, &chunk(len as u16)) else {
            return Turn::Full;
        };
        self.plan.charged |= whole || len > 0;
        self.plan.add(at, self.sender, number, request.id, 0, len);
        if let Some(message) = stream.queue.get_mut(index) {
            message.long = !whole;
            (message.sent, message.granted) = (len as u32, len as u32);
        }
        if stream.cursor != stream.high {
            self.counters.retransmits += 1;
        } else if stream.timed.is_none() {
            stream.timed = Some((number, self.now));
        }
        self.advance(stream);
        Turn::Sent
    }

    fn advance(&mut self, stream: &mut SendStream) {
        if stream.cursor == stream.high {
            stream.high = stream.high.wrapping_add(1);
        }
        stream.cursor = stream.cursor.wrapping_add(1);
        self.plan.asks = true;
    }

    /// DATA: what is asked for again, then what is granted, oldest message first.
    fn data(&mut self, stream: &mut SendStream) -> Turn {
        while let Some(&(number, range)) = stream.resend.front() {
            let message = stream
                .index(number)
                .and_then(|index| stream.queue.get(index));
            let Some(message) = message.filter(|m| m.long && m.state == MessageState::Live) else {
                stream.resend.pop_front();
                continue;
            };
            let id = message.request.id;
            return match self.piece(stream, number, id, range) {
                Err(turn) => turn,
                Ok(taken) => {
                    self.counters.retransmitted_bytes += u64::from(taken.to - taken.from);
                    if taken.to == range.to {
                        stream.resend.pop_front();
                    } else if let Some(front) = stream.resend.front_mut() {
                        front.1.from = taken.to;
                    }
                    Turn::Sent
                }
            };
        }
        let before = stream.cursor.wrapping_sub(stream.base) as usize;
        let hungry = |m: &Message| m.long && m.state == MessageState::Live && m.sent < m.granted;
        let Some(index) = stream.queue.iter().take(before).position(hungry) else {
            return Turn::Nothing;
        };
        let Some(message) = stream.queue.get(index) else {
            return Turn::Nothing;
        };
        let (id, range) = (
            message.request.id,
            Range {
                from: message.sent,
                to: message.granted,
            },
        );
        match self.piece(stream, stream.number(index), id, range) {
            Err(turn) => turn,
            Ok(taken) => {
                if let Some(message) = stream.queue.get_mut(index) {
                    message.sent = taken.to;
                }
                Turn::Sent
            }
        }
    }

    /// One DATA chunk from the front of `range`; returns what it took.
    fn piece(
        &mut self,
        stream: &SendStream,
        number: u32,
        id: SendId,
        range: Range,
    ) -> Result<Range, Turn> {
        let chunk = |len: u16| Chunk::Data {
            stream: stream.wire(),
            number,
            offset: range.from,
            payload: Payload { len, crc: 0 },
        };
        let (mut room, used) = self.room(&chunk(0)).ok_or(Turn::Full)?;
        if self.plan.charged {
            room = room.min(self.credit.saturating_sub(used));
        }
        let len = room.min((range.to - range.from) as usize);
        let rest = (range.to - range.from) as usize - len;
        if len == 0 || (len < PIECE_MIN && rest > 0 && !self.w.is_empty()) {
            return Err(Turn::Full);
        }
        let at = push(self.w, self.counters, &chunk(len as u16)).map_err(|_| Turn::Full)?;
        self.plan.add(at, self.sender, number, id, range.from, len);
        self.plan.asks = true;
        Ok(Range {
            from: range.from,
            to: range.from + len as u32,
        })
    }
}

impl Plan {
    fn add(&mut self, chunk: usize, stream: u32, number: u32, id: SendId, offset: u32, len: usize) {
        if len > 0
            && let Some(source) = self.sources.get_mut(self.len)
        {
            *source = Some(Source {
                chunk,
                stream,
                number,
                id,
                offset,
            });
            self.len += 1;
        }
    }
}
