//! Commits, and the acknowledgements that follow them.
//!
//! Problem: a message becomes the application's exactly once and in its turn, and nothing is acknowledged before. FTGM's rule
//! (004), made precise in RECOVERY *Receive*; Tam's immediate, delayed and piggybacked acknowledgement (003).
//!
//! Idea: [`Endpoint::commit_ready`] takes from the front of a stream's accepted messages what is complete, hands it to the host,
//! and only then moves `base`, from which acknowledgements are read when they are sent. An acknowledgement waits for a frame to
//! ride on, at most `delay_us`, and never longer than a quarter of the window.
//!
//! Invariants: `base` moves nowhere else; an error of the host commits nothing and closes the stream.

use super::Endpoint;
use super::receive_stream::{Incoming, Kind};
use super::timers::Owner;
use crate::host::{Delivery, Host, after_commit};
use crate::ident::{Nanos, Priority};
use crate::policy::Ack;
use crate::wire::StreamRef;

impl Endpoint {
    /// Accepts the number `arrival` as `kind`.
    pub(super) fn push(&mut self, now: Nanos, slot: u32, kind: Kind, len: u32, tag: u64) {
        self.age += 1;
        let age = self.age;
        let silent = now.saturating_add(self.unreachable_after());
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.accept(Incoming {
            kind,
            len,
            tag,
            age,
        });
        let peer = stream.peer;
        if let Some(entry) = self.peers.get_mut(peer) {
            if !matches!(kind, Kind::Whole(_)) {
                self.timers.arm(Owner::Peer(peer), silent);
            }
            entry.placing += 1;
        }
    }

    /// Commits what is complete, in order, and acknowledges it. The only place where `base` moves.
    pub(super) fn commit_ready<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let (mut committed, mut long_end) = (0, false);
        while let Some(stream) = self.receive.get_mut(slot)
            && let Some(&incoming) = stream.messages.front()
        {
            if stream.nulled_full() {
                // Until the sender confirmed the oldest, of which it is told again with every answer.
                stream.due.nulled = true;
                self.queue_control(slot);
                break;
            }
            let number = stream.base;
            let given_up = matches!(incoming.kind, Kind::Null);
            let (base, bits) = after_commit(number, stream.bits, number, given_up);
            match incoming.kind {
                Kind::Placing(_)
                | Kind::Drop {
                    confirmed: false, ..
                } => break,
                Kind::Whole(buffer) => {
                    let delivery = Delivery {
                        buffer,
                        stream: stream.key,
                        record: stream.record,
                        epoch: stream.epoch,
                        number,
                        base,
                        bits,
                        len: incoming.len,
                        total: incoming.len,
                        tag: incoming.tag,
                    };
                    if host.commit(&delivery).is_err() {
                        self.counters.memory_faults += 1;
                        return self.close_receive_stream(slot, host);
                    }
                    self.counters.messages_delivered += 1;
                    self.counters.bytes_delivered += u64::from(incoming.len);
                    if incoming.len > u32::from(self.config.max_frame) {
                        stream.due.msg_end = Some(number);
                        long_end = true;
                    }
                }
                Kind::Null => {
                    host.commit_base(stream.record, stream.epoch, base, bits);
                    stream.due.nulled = true;
                    long_end = true;
                }
                Kind::Drop { .. } => {
                    host.commit_base(stream.record, stream.epoch, base, bits);
                    long_end = true;
                }
            }
            stream.messages.pop_front();
            (stream.base, stream.bits) = (base, bits);
            let peer = stream.peer;
            if let Some(entry) = self.peers.get_mut(peer) {
                entry.placing = entry.placing.saturating_sub(1);
            }
            committed += 1;
        }
        if committed > 0 {
            self.acknowledge(now, slot, committed, long_end);
        }
    }

    /// Immediate, delayed or piggybacked acknowledgement (Tam): any frame to the peer takes it along.
    fn acknowledge(&mut self, now: Nanos, slot: u32, committed: u32, urgent: bool) {
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
        match policy.ack {
            Ack::Delayed { delay_us } if !urgent && entry.acks_pending < at_once => {
                if entry.ack_due == Nanos::MAX {
                    entry.ack_due = now.saturating_add(Nanos::from(delay_us) * 1_000);
                    self.timers.arm(Owner::Peer(peer), entry.ack_due);
                }
            }
            Ack::Immediate | Ack::Delayed { .. } | Ack::Piggybacked { .. } => {
                self.mark_ready(peer, Priority::High)
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
    pub(super) fn tell_state(&mut self, slot: u32) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.due.ack = true;
        stream.due.drops = true;
        stream.due.nulled |= stream.nulled() != 0;
        for incoming in &stream.messages {
            if let Kind::Placing(row) = incoming.kind
                && let Some(long) = self.longs.get_mut(row)
            {
                long.cts = Some(true);
                stream.due.grants = true;
            }
        }
        self.queue_control(slot);
    }

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
