//! Commits, and the acknowledgements that follow them.
//!
//! Problem: a message becomes the application's exactly once and in its turn, and nothing is acknowledged before. FTGM's rule
//! (004), made precise in transport.md §5.2, §5.3, §5.6, §6.1, §13.1; Tam's immediate, delayed and piggybacked acknowledgement (003); RMPP's order of
//! arrival (001).
//!
//! Idea: [`Endpoint::commit_ready`] takes from a stream's accepted messages what is complete and next (in order of arrival: what is
//! complete), hands it to the host, and only then moves the record, from which acknowledgements are read when they are sent. An
//! acknowledgement waits for a frame to ride on, as long as policy or sender allow, and never longer than a quarter of the window.
//! A message out of order, and one that fills a hole, is acknowledged at once: its sender learns what is missing.
//!
//! Nearly all that comes is a short message that its stream waits for, with more of them behind it in the frame: [`Endpoint::commit_short`]
//! takes these without a look at Table 1, without `messages`, and with one acknowledgement for all. It does nothing that the general way
//! would not do, and leaves everything else to it.
//!
//! Invariants: {base, bits} moves nowhere else; an error of the host commits nothing and closes the stream.

use alloc::collections::VecDeque;

use super::receive_stream::{Incoming, Kind, ReceiveStream};
use super::timers::Owner;
use super::{Counters, Endpoint};
use crate::host::{Delivery, Host, MemoryFault, after_commit};
use crate::ident::{BufferId, Nanos, Priority};
use crate::policy::{Ack, AckMode, Order, Recovery};
use crate::wire::{Chunks, Short, StreamRef};

/// Makes a whole message the application's; only then the record may move, to `base` and `bits`.
#[inline(always)]
fn hand_over<H: Host>(
    stream: &ReceiveStream,
    buffer: BufferId,
    (number, base, bits): (u32, u32, u32),
    incoming: &Incoming,
    counters: &mut Counters,
    host: &mut H,
) -> Result<(), MemoryFault> {
    let delivery = Delivery {
        buffer,
        stream: stream.key,
        record: stream.record,
        epoch: stream.epoch,
        number,
        base,
        bits,
        len: incoming.len,
        total: incoming.total,
        tag: incoming.tag,
    };
    if host.commit(&delivery).is_err() {
        counters.memory_faults += 1;
        return Err(MemoryFault);
    }
    counters.messages_delivered += 1;
    counters.bytes_delivered += u64::from(incoming.len);
    Ok(())
}

/// Whether the next message of this stream can be committed as it comes: nothing is kept, nobody else waits for its port's buffers, and the port need not be asked.
#[inline(always)]
pub(super) fn takes_straight<H: Host>(
    stream: &ReceiveStream,
    waiting: &[VecDeque<u32>],
    host: &H,
) -> bool {
    let port = stream.key.local;
    let others_wait = (waiting.get(usize::from(port.0))).is_some_and(|w| !w.is_empty());
    stream.is_straight() && !others_wait && !host.wants_offers(port)
}

/// What became of a short message that its stream waits for.
pub(super) enum Taken {
    /// Nothing: the general way finds out why.
    No,
    /// It is committed.
    Yes,
    /// Its port's memory is not as it must be. It lies in this buffer and will not be committed.
    Fault(BufferId),
}

/// A whole short message in its buffer.
#[inline(always)]
fn whole(short: &Short<'_>, buffer: BufferId) -> Incoming {
    let len = short.bytes.len() as u32;
    Incoming {
        len,
        total: len,
        tag: short.tag,
        ack: short.ack,
        ..Incoming::bare(Kind::Whole(buffer))
    }
}

/// Places and commits `short`, the next message of a stream that is straight.
#[inline(always)]
pub(super) fn take<H: Host>(
    stream: &mut ReceiveStream,
    short: &Short<'_>,
    counters: &mut Counters,
    host: &mut H,
) -> Taken {
    let (key, number, len) = (stream.key, short.number, short.bytes.len() as u32);
    let Ok(buffer) = host.claim(key.local, key.priority, len) else {
        return Taken::No;
    };
    let placed = match short.crc {
        Some(crc) => host.write_payload(buffer, 0, short.bytes) == Ok(crc),
        None => host.place_payload(buffer, 0, short.bytes).is_ok(),
    };
    if !placed {
        host.release(buffer);
        return Taken::No;
    }
    let to = (number, number.wrapping_add(1), 0);
    let incoming = whole(short, buffer);
    if hand_over(stream, buffer, to, &incoming, counters, host).is_err() {
        return Taken::Fault(buffer);
    }
    stream.step();
    Taken::Yes
}

impl Endpoint {
    /// The straight way: commits `short`, the next of `chunks`, and those after it, as long as each is the message that the stream named
    /// last waits for. Returns how many chunks it took.
    ///
    /// The rest is left to [`Self::on_message_chunk`] as if nobody had looked at it: a message that finds no buffer or does not match its
    /// checksum, a stream that is not [`ReceiveStream::is_straight`], a port where others wait for tokens or that wants to be asked.
    pub(super) fn commit_short<'f, H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        mut short: Short<'f>,
        chunks: &mut Chunks<'f>,
        host: &mut H,
    ) -> u32 {
        let (name, ack) = (short.stream, short.ack);
        let Some(slot) = self.named_before(peer, &name) else {
            return 0;
        };
        let Some(stream) = self.receive.get_mut(slot) else {
            return 0;
        };
        if !takes_straight(stream, &self.waiting, host) {
            return 0;
        }
        let mut committed = 0;
        loop {
            let (number, len) = (short.number, short.bytes.len());
            let next = number == stream.base && short.stream == name && short.ack == ack;
            if !next || len > usize::from(self.config.max_frame) {
                break;
            }
            match take(stream, &short, &mut self.counters, host) {
                Taken::No => break,
                Taken::Yes => chunks.pass(&short),
                Taken::Fault(buffer) => {
                    chunks.pass(&short);
                    self.acknowledge_all(now, slot, committed, ack);
                    self.end_faulty(now, slot, &short, buffer, host);
                    return committed + 1;
                }
            }
            committed += 1;
            match chunks.short() {
                Some(next) => short = next,
                None => break,
            }
        }
        self.acknowledge_all(now, slot, committed, ack);
        committed
    }

    /// A message's port goes: the message ends as all do that were accepted and are not committed.
    #[cold]
    pub(super) fn end_faulty<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        short: &Short<'_>,
        buffer: BufferId,
        host: &mut H,
    ) {
        self.push(now, slot, short.number, whole(short, buffer));
        self.close_receive_stream(slot, host);
    }

    /// So many were committed on the straight way.
    #[inline]
    pub(super) fn acknowledge_all(&mut self, now: Nanos, slot: u32, committed: u32, ack: AckMode) {
        if committed > 0 {
            self.age += u64::from(committed);
            self.acknowledge(now, slot, committed, ack);
        }
    }

    /// Takes the missing number in.
    pub(super) fn push(&mut self, now: Nanos, slot: u32, number: u32, incoming: Incoming) {
        self.age += 1;
        let age = self.age;
        let silent = now.saturating_add(self.unreachable_after());
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.fills = stream.has_holes();
        stream.accept(number, Incoming { age, ..incoming });
        let peer = stream.peer;
        if let Some(entry) = self.peers.get_mut(peer) {
            if !matches!(incoming.kind, Kind::Whole(_)) {
                self.timers.arm(Owner::Peer(peer), silent);
            }
            entry.placing += 1;
        }
    }

    /// After [`Self::push`]: commits what can be, and tells the sender what it should know of the rest.
    pub(super) fn commit_or_tell<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        host: &mut H,
    ) {
        self.commit_ready(now, slot, host);
        if self.config.policy.recovery != Recovery::Selective {
            return;
        }
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        let waits = stream.index(number).and_then(|i| stream.messages.get(i));
        if stream.fills || stream.has_holes() {
            self.acknowledge(now, slot, 0, AckMode::Immediate);
        } else if let Some(&Incoming { kind, ack, .. }) = waits {
            let told = match kind {
                Kind::Placing(row) => self.longs.get(row).is_some_and(|long| long.cts.is_some()),
                kind => matches!(kind, Kind::Drop { .. }),
            };
            if !told {
                self.acknowledge(now, slot, 0, ack);
            }
        }
    }

    /// Commits what is complete, in order, and acknowledges it. The record moves here, and on the straight way.
    pub(super) fn commit_ready<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let in_arrival_order = self.config.policy.order == Order::Arrival;
        let (mut committed, mut ack) = (0, AckMode::Lazy);
        while let Some(stream) = self.receive.get_mut(slot)
            && let Some(index) = stream.next_ready(in_arrival_order)
            && let Some(&incoming) = stream.messages.get(index)
        {
            if index == 0 && stream.nulled_full() {
                // Until the sender confirmed the oldest, of which it is told again with every answer.
                stream.due.nulled = true;
                self.queue_control(slot);
                break;
            }
            let number = stream.number(index);
            let given_up = matches!(incoming.kind, Kind::Null | Kind::Refused);
            let (base, bits) = after_commit(stream.base, stream.bits, number, given_up);
            let mut wish = incoming.ack;
            if let Kind::Whole(buffer) = incoming.kind {
                let to = (number, base, bits);
                if hand_over(stream, buffer, to, &incoming, &mut self.counters, host).is_err() {
                    return self.close_receive_stream(slot, host);
                }
                if index > 0 {
                    if let Some(place) = stream.messages.get_mut(index) {
                        place.kind = Kind::Committed;
                    }
                    stream.ends |= 1 << index;
                    stream.due.ends = true;
                    wish = AckMode::Immediate;
                } else if incoming.total > u32::from(self.config.max_frame) {
                    if !incoming.unasked || incoming.total > self.config.policy.unasked() {
                        stream.due.msg_end = Some(number);
                        wish = AckMode::Immediate;
                    } else if wish == AckMode::Lazy {
                        // A few of them may be all that their sender has credit for.
                        wish = AckMode::Policy;
                    }
                }
            } else {
                host.commit_base(stream.record, stream.epoch, base, bits);
                stream.due.nulled |= given_up;
                wish = AckMode::Immediate;
            }
            if stream.exact && !given_up {
                stream.due.ack = true;
            }
            stream.advance(base, bits);
            if stream.exact && !given_up && index == 0 {
                // Numbers after it were committed ahead and are told by themselves.
                let back = stream.base.wrapping_sub(number).wrapping_sub(1);
                stream.acks.set(back as usize);
            }
            let peer = stream.peer;
            if let Some(entry) = self.peers.get_mut(peer) {
                entry.placing = entry.placing.saturating_sub(1);
            }
            committed += 1;
            ack = match (ack, wish) {
                (AckMode::Immediate, _) | (_, AckMode::Immediate) => AckMode::Immediate,
                (AckMode::Policy, _) | (_, AckMode::Policy) => AckMode::Policy,
                _ => AckMode::Lazy,
            };
        }
        if committed > 0 {
            self.acknowledge(now, slot, committed, ack);
        }
    }

    /// Immediate, delayed or piggybacked acknowledgement (Tam), as the policy or the sender says: any frame to the peer takes it along.
    pub(super) fn acknowledge(&mut self, now: Nanos, slot: u32, committed: u32, mode: AckMode) {
        let policy = &self.config.policy;
        let at_once = (policy.window_messages / 4).clamp(1, 16);
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.due.ack = true;
        let peer = stream.peer;
        let Some(entry) = self.peers.get_mut(peer) else {
            return;
        };
        if !stream.in_control {
            stream.in_control = true;
            entry.control.push_back(slot);
        }
        entry.acks_pending += committed;
        let wait_us = match (mode, policy.ack) {
            (AckMode::Immediate, _) | (AckMode::Policy, Ack::Immediate) => None,
            (AckMode::Policy, Ack::Delayed { delay_us }) => {
                Some(delay_us).filter(|_| entry.acks_pending < at_once)
            }
            (_, Ack::Piggybacked { at_most_us }) => Some(at_most_us),
            // Shorter than the sender's timer, if its policy is like ours.
            (AckMode::Lazy, Ack::Immediate | Ack::Delayed { .. }) => Some(policy.rto_min_us / 2),
        };
        match wait_us {
            None => self.mark_ready(peer, Priority::High),
            Some(wait_us) => {
                let due = now.saturating_add(Nanos::from(wait_us) * 1_000);
                if due < entry.ack_due {
                    entry.ack_due = due;
                    self.timers.arm(Owner::Peer(peer), due);
                }
            }
        }
    }

    /// The stream has chunks to send at once.
    pub(super) fn queue_control(&mut self, slot: u32) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        let peer = stream.peer;
        if let Some(entry) = self.peers.get_mut(peer) {
            if !stream.in_control {
                stream.in_control = true;
                entry.control.push_back(slot);
            }
            self.mark_ready(peer, Priority::High);
        }
    }

    /// Everything the receiver knows, in answer to a PROBE.
    #[cold]
    pub(super) fn tell_state(&mut self, slot: u32) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        if stream.exact {
            stream.due.resume = true; // the one cumulative answer there is
        } else {
            stream.due.ack = true;
        }
        stream.due.drops = true;
        stream.due.nulled |= stream.nulled() != 0;
        stream.ends = stream.bits >> 16 << 1;
        stream.due.ends = stream.ends != 0;
        for incoming in &stream.messages {
            // One of which all came that was granted waits for more, and its sender need not be told.
            if let Kind::Placing(row) = incoming.kind
                && let Some(long) = self.longs.get_mut(row)
                && long.granted > long.received
            {
                long.cts = Some(true);
                stream.due.grants = true;
            }
        }
        self.queue_control(slot);
    }

    #[cold]
    pub(super) fn on_drop_confirm<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        stream: &StreamRef,
        number: u32,
        host: &mut H,
    ) {
        let Some(slot) = self.current(peer, stream) else {
            return;
        };
        let Some(entry) = self.receive.get_mut(slot) else {
            return;
        };
        let mut news = entry.confirm_nulled(number);
        if news {
            host.commit_base(entry.record, entry.epoch, entry.base, entry.bits);
            entry.due.nulled = entry.nulled() != 0;
        }
        if let Some(index) = entry.index(number)
            && let Some(incoming) = entry.messages.get_mut(index)
            && let Kind::Drop { confirmed, .. } = &mut incoming.kind
        {
            news |= !*confirmed;
            *confirmed = true;
        }
        if news {
            (entry.due.ack, entry.due.drops) = (true, true);
            entry.due.port_closed = entry.closed && entry.nulled() == 0;
            self.commit_ready(now, slot, host);
            self.queue_control(slot);
        }
    }
}
