//! What goes into the next frame.
//!
//! Problem: acknowledgements must never wait for data, high priority never behind low, no stream or peer behind a greedy one, and
//! small messages should share frames. GAMMA's credits (002); Tam's Stall on the sending side (003);
//! transport.md §9.1, §9.3, §11.1, §11.2
//!
//! Idea: a ready queue of peers per priority, taken in turn; a frame for one peer takes, in this order, handshake, answers of our
//! receiving streams, control of our sending streams, then messages, one chunk per stream in turn, high before low, until the
//! frame is full; without coalescing one message chunk fills it. Nothing ever waits for more to come. Low priority has its turn after eighteen times as many bytes of high.
//!
//! What a stream does with its turn is in `turn`.
//!
//! Rejected: a queue of chunks (stale by the time it is sent, and unbounded); Nagle's wait.
//!
//! Invariants: a frame goes to one peer; a message's payload is read after all headers are fixed; charged frames never exceed the
//! credit.

use super::control::{push, receiver_chunks, sender_chunks};
use super::credit::BUFFER_BYTES;
use super::hello::{WIRE_MAX, WIRE_MIN, truncate};
use super::peer::PeerEntry;
use super::round_trip::stamp;
use super::slab::NONE;
use super::timers::Owner;
use super::turn::{Plan, Source, StreamWriter, Turn};
use super::{Config, Endpoint, Transmit};
use crate::host::{Host, Reason};
use crate::ident::{Nanos, Peer, Priority};
use crate::policy::{OnTimeout, UNASKED_UNIT};
use crate::wire::chunk::{Hello, features};
use crate::wire::{Chunk, FrameHeader, FrameWriter, crc32c};

/// For each byte of low priority, high may send so many before it is low's turn again: low gets 1/19 of a busy link.
const HIGH_PER_LOW: i64 = 18;
/// High goes first.
pub(super) const LOW_DUE_AT_FIRST: i64 = -HIGH_PER_LOW * 1_500;
/// What low may have used ahead while high was silent, in bytes of high.
const LOW_AHEAD_MAX: i64 = HIGH_PER_LOW * 9_000;
impl Endpoint {
    /// Writes the next frame into `to` (as long as the longest frame) and says where it goes; `None` if nothing may be sent now.
    #[inline]
    pub fn poll_transmit<H: Host>(
        &mut self,
        now: Nanos,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        // Most polls find nothing.
        if !self.has_frames() {
            return None;
        }
        self.next_frame(now, to, host)
    }

    /// Whether [`Self::poll_transmit`] may find anything: asked for less than the room that it wants to write into.
    #[inline]
    pub fn has_frames(&self) -> bool {
        self.ready[0].len() | self.ready[1].len() != 0 || self.has_errands()
    }

    #[inline(never)]
    fn next_frame<H: Host>(&mut self, now: Nanos, to: &mut [u8], host: &mut H) -> Option<Transmit> {
        if self.train.is_some()
            && let Some(transmit) = self.next_of_train(now, to, host)
        {
            return Some(transmit);
        }
        if self.has_errands() {
            self.act_on_cancels(now, host);
            if let Some(transmit) = self.write_reset(now, to) {
                return Some(transmit);
            }
        } else if let Some(transmit) = self.lone_message(now, to, host) {
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
                self.note_turn(class, transmit.len);
                return Some(transmit);
            }
        }
        None
    }

    /// A frame of so many bytes left, in the turn of one priority.
    #[inline]
    pub(super) fn note_turn(&mut self, class: usize, len: usize) {
        let len = len as i64;
        self.low_due = match class {
            0 => (self.low_due - HIGH_PER_LOW * len).max(-LOW_AHEAD_MAX),
            _ => (self.low_due + len).min(0),
        };
    }

    /// Whether there is anything of what is rare and comes before frames: one test for all of it.
    #[inline]
    fn has_errands(&self) -> bool {
        self.cancelled.len() | self.orphans.len() | self.resets.queue.len() != 0
    }

    /// A RESET goes alone, to somebody who may not even be a peer.
    #[cold]
    fn write_reset(&mut self, now: Nanos, to: &mut [u8]) -> Option<Transmit> {
        let reset = self.resets.queue.pop_front()?;
        let mut w = FrameWriter::new(to);
        let chunk = Chunk::Reset {
            src_incarnation: reset.src_incarnation,
            dst_incarnation: reset.dst_incarnation,
            reason: reset.reason,
            detail: reset.detail,
        };
        push(&mut w, &mut self.counters, &chunk).ok()?;
        let mut header = frame_header(&self.config, now);
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
        self.recall(slot, host);
        let entry = self.peers.get_mut(slot)?;
        let read_at = now;
        let now = entry.stamps.write(now);
        let up = entry.is_up();
        let greets = entry.hello_due || entry.hello_ack_due;
        let proves = up && entry.path.is_due();
        if proves && !greets {
            return self.write_probe(now, slot, to, host);
        }
        let space = to.len().min(usize::from(entry.max_frame));
        let due = up && entry.credit.due;
        let active = [&entry.active[0], &entry.active[1]].map(|queue| !queue.is_empty());
        let may_be_bare = entry.may_get_bare(read_at) && !due;
        let mut w = FrameWriter::new(to.get_mut(..space)?);
        w.shorten(entry.rows);
        let mut plan = Plan::over(core::mem::take(&mut self.sources));
        (plan.read_at, plan.may_be_bare) = (read_at, may_be_bare);
        let mut full = greets && self.handshake(now, slot, &mut w, &mut plan);
        let mut only_low = false;
        if up && !full {
            full = self.answers(slot, &mut w, &mut plan);
            for class in [class, 1 - class] {
                if full || !active[class] {
                    continue;
                }
                let before = w.chunks();
                full = self.messages(now, slot, class, space, &mut w, &mut plan);
                if w.chunks() > before {
                    only_low = class == 0 && (only_low || before == 0);
                }
            }
        }
        if full {
            self.mark_leftovers(slot);
        }
        if proves {
            // Behind the handshake, without which nobody would believe it.
            self.mark_ready(slot, Priority::High);
        }
        let transmit = if let Some(piece) = &plan.bare {
            self.finish_bare(now, slot, piece, to.get_mut(..space)?, host)
        } else if w.is_empty() && !due {
            None
        } else {
            self.finish_frame(now, slot, &mut w, &plan, only_low, host)
        };
        if plan.filled.is_some() {
            self.begin_train(read_at, to.len(), slot, &plan, transmit);
        }
        self.sources = plan.sources;
        transmit
    }

    /// A frame as long as the path may carry, alone.
    #[cold]
    fn write_probe<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        let entry = self.peers.get_mut(slot)?;
        let (size, nonce) = entry.path.take_probe(now)?;
        self.timers.arm(Owner::Peer(slot), entry.path.again_at());
        self.mark_leftovers(slot);
        self.mark_ready(slot, Priority::High);
        let mut w = FrameWriter::new(to);
        let chunk = Chunk::PathProbe { size, nonce };
        push(&mut w, &mut self.counters, &chunk).ok()?;
        self.finish_frame(now, slot, &mut w, &Plan::default(), false, host)
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
    #[cold]
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
            window: self.config.policy.window_messages as u16,
            policy: self.config.policy.wire(),
            unasked: (self.config.policy.unasked() / UNASKED_UNIT) as u8,
            features: features::NEXT | features::RUN | features::BARE,
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
        let recovery = self.config.policy.recovery;
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
                if receiver_chunks(stream, &mut self.longs, w, &mut self.counters, recovery)
                    .is_err()
                {
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
        let Some(entry) = self.peers.get_mut(slot) else {
            return true;
        };
        let policy = &self.config.policy;
        // What the peer allows is the same for the whole frame, which is charged when it is finished.
        let mut writer = StreamWriter {
            now,
            sender: NONE,
            space,
            window: policy.window_messages.min(entry.remote_window),
            credit: entry.may_fill(policy) as usize * BUFFER_BYTES,
            asks_first: entry.asks_first(),
            may_save: match class == 1 || entry.active[1].is_empty() {
                true => entry.window.size(policy).min(policy.eager_buffers),
                false => 0,
            },
            saves: false,
            crowded: entry.crowded,
            unasked: entry.remote_unasked,
            w,
            plan,
            counters: &mut self.counters,
            #[cfg(test)]
            shortcuts: &mut self.shortcuts,
        };
        // Who saves credit, unless it wants none any more, and whether that is before this class's.
        let (credit, send) = (writer.credit, &self.send);
        let saving = |saver: &u32| {
            let stream = send.get(*saver);
            stream.filter(|stream| stream.peer == slot && stream.in_active)
        };
        entry.saver = entry.saver.filter(|saver| saving(saver).is_some());
        let goes_before =
            |saver: &u32| saving(saver).is_some_and(|stream| stream.key.priority as usize >= class);
        let mut saver = entry.saver.filter(goes_before);
        let active = &mut entry.active[class];
        let (mut blocked, mut ended) = (0, false);
        while blocked < active.len()
            && let Some(&sender) = active.front()
        {
            let Some(stream) = self.send.get_mut(sender).filter(|s| s.peer == slot) else {
                active.pop_front();
                continue;
            };
            writer.sender = sender;
            writer.credit = match saver {
                // But who has sent a request saved for what follows it, too.
                Some(other) if other != sender && stream.follows.is_none() => 0,
                _ => credit,
            };
            // With nobody to take turns with, a stream goes on until it is done.
            let (sent, turn) = if active.len() == 1 && policy.coalesce {
                writer.turns(stream)
            } else {
                match writer.turn(stream) {
                    Turn::Sent | Turn::Filled => (true, Turn::Sent),
                    turn => (false, turn),
                }
            };
            if core::mem::take(&mut writer.saves) {
                if entry.saver.is_none() {
                    (entry.saver, saver) = (Some(sender), Some(sender));
                }
            } else if entry.saver == Some(sender) && !matches!(turn, Turn::Full) {
                // What it saved is for whoever waits, also of those that were asked before it.
                (entry.saver, saver) = (None, None);
                (blocked, ended) = (0, true);
            }
            // A timer that sends data again must not do so while a long grant is still leaving: it runs from the newest byte.
            let restarts = sent && policy.on_timeout == OnTimeout::Resend;
            let starts = (sent || matches!(turn, Turn::NoCredit)) && stream.timer == Nanos::MAX;
            if starts || restarts {
                stream.timer = now.saturating_add(entry.rtt.rto(policy, stream.backoff));
                self.timers.arm(Owner::Send(sender), stream.timer);
            }
            if sent {
                blocked = 0;
                stream.starved = false;
            }
            match turn {
                Turn::Sent | Turn::Filled => {
                    active.rotate_left(1);
                    if !policy.coalesce {
                        return true; // a frame of its own
                    }
                }
                Turn::Full => return true,
                Turn::NoCredit => {
                    blocked += 1;
                    writer.counters.credit_stalls += u64::from(!stream.starved);
                    stream.starved = true;
                    active.rotate_left(1);
                }
                Turn::Nothing => {
                    stream.in_active = false;
                    active.pop_front();
                }
            }
        }
        // Those of lower priority may have been asked in this frame already.
        ended && class == 1 && !entry.active[0].is_empty()
    }

    /// Reads the payloads, charges the credit, writes the frame header.
    fn finish_frame<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        w: &mut FrameWriter<'_>,
        plan: &Plan,
        only_low: bool,
        host: &mut H,
    ) -> Option<Transmit> {
        let buffers = w.len().div_ceil(BUFFER_BYTES) as u32;
        let mut payloads = w.finish_headers();
        for sources in plan.sources.chunk_by(|a, b| a.chunk == b.chunk) {
            match sources {
                [] => {}
                [source] => payloads.fill(source.chunk, |to| {
                    host.read_payload(source.id, source.offset, to)
                        .unwrap_or_else(|_| self.unreadable(source.stream, source.number, to))
                }),
                [first, ..] => payloads.fill(first.chunk, |to| self.read_run(sources, to, host)),
            }
        }
        let crowded = self.is_crowded();
        if plan.asks {
            self.expect_answer(now, slot);
        }
        let entry = self.peers.get_mut(slot)?;
        let peer = entry.id;
        entry.told_at = plan.read_at;
        let mut header = header_to(&self.config, entry, now);
        header.crowded = crowded;
        if plan.charged {
            entry.credit.charge(now, buffers);
            entry.window.charge(now, buffers, &self.config.policy);
        }
        entry.credit.write(&self.config.policy, &mut header);
        (header.echo, header.held) = entry.stamps.echo(now);
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

    /// Something that leaves for the peer now wants an answer.
    #[inline]
    pub(super) fn expect_answer(&mut self, now: Nanos, slot: u32) {
        let unreachable = self.unreachable_after();
        if let Some(entry) = self.peers.get_mut(slot)
            && entry.waiting_since.is_none()
        {
            entry.waiting_since = Some(now);
            self.timers
                .arm(Owner::Peer(slot), now.saturating_add(unreachable));
        }
    }

    /// The payloads of a RUN's messages, all of one length, one behind the other; returns the checksum of them all.
    #[inline]
    fn read_run<H: Host>(&mut self, sources: &[Source], to: &mut [u8], host: &mut H) -> u32 {
        let mut readable = true;
        let each = (to.len() / sources.len().max(1)).max(1);
        for (source, piece) in sources.iter().zip(to.chunks_exact_mut(each)) {
            if host.copy_payload(source.id, source.offset, piece).is_err() {
                self.unreadable(source.stream, source.number, piece);
                readable = false;
            }
        }
        // Of what is in the frame, which nobody else writes.
        match readable {
            true => crc32c(to),
            false => !crc32c(to),
        }
    }

    /// A send's memory cannot be read, for its client is gone: its number goes on as NULL. The rest of the frame must not suffer, so the
    /// payload goes out with the checksum returned, which cannot match. The other messages of a RUN do: nearly always they are of the same client.
    #[cold]
    pub(super) fn unreadable(&mut self, sender: u32, number: u32, payload: &mut [u8]) -> u32 {
        payload.fill(0);
        self.counters.memory_faults += 1;
        if let Some(stream) = self.send.get_mut(sender)
            && let Some(index) = stream.index(number)
        {
            // Transmitted by now, so no status yet.
            let _ = stream.give_up(index, Reason::BadMemory);
            self.queue_sender_control(sender);
        }
        !crc32c(payload)
    }
}

/// A header from us to nobody yet.
#[inline]
fn frame_header(config: &Config, now: Nanos) -> FrameHeader {
    FrameHeader {
        src_node: config.node.0,
        src_queue: config.queue,
        src_incarnation: truncate(config.incarnation),
        engine_epoch: config.engine_epoch,
        sent_at: stamp(now),
        ..FrameHeader::default()
    }
}

/// A header from us to this peer that says who both are, and no more.
#[inline]
pub(super) fn header_to(config: &Config, entry: &PeerEntry, now: Nanos) -> FrameHeader {
    let mut header = frame_header(config, now);
    (header.dst_node, header.dst_queue) = (entry.id.node.0, entry.id.queue);
    if entry.incarnation != 0 {
        header.dst_incarnation = truncate(entry.incarnation);
    }
    header
}

/// One flow per pair of engines.
#[inline]
pub(super) fn flow(config: &Config, peer: Peer) -> u16 {
    let pair = u32::from(peer.node.0) << 16 | u32::from(config.queue) << 8 | u32::from(peer.queue);
    (pair.wrapping_mul(0x9e37_79b1) >> 16) as u16
}
