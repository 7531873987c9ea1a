//! What receivers answer: ACK, NACK, READY, CTS, MSGEND, MSGDROP, NULL-ACK, PORT-CLOSED, CLOSED, REFUSED, RESUME.
//!
//! Problem: an answer may be late, doubled, from another epoch, or nonsense. ParaStation2 Table 1's rows for ACK and NACK (000),
//! Tam's Stall on the sending side (003), RMPP's CTS and MSGDROP (001). transport.md §3.3, §4.4, §6.2,
//! §6.3, §7.3, §15
//!
//! Idea: an answer is believed if it names our stream's current epoch and a number that was transmitted; everything else is
//! counted and ignored. ACK < base is old; base < ACK ≤ high settles; ACK > high is a violation (with cumulative acknowledgement
//! nothing else explains it), and so is one far below what a sound receiver can lack: an engine whose memory was damaged
//! left wrong numbers behind, here or there. Said once it is ignored; said again, the stream would stand still for ever, and goes
//! on under a new epoch (transport.md §13.3). NACK is a fast retransmit, at most once per number and round trip. What an acknowledgement says is lost
//! is in `loss`.
//!
//! Why REFUSED is safe: it is sent only where there is no record of the epoch. A record is opened before anything of an epoch is
//! committed and freed only after our CLOSE (which we send when nothing is outstanding, after which the epoch is not used) or
//! after a later epoch of ours took its place. So before the epoch's first acknowledgement, REFUSED of the *current* epoch proves
//! that nothing outstanding was delivered, and the floor keeps late copies out for ever. After it, no correct receiver says
//! REFUSED; if one does, what was transmitted ends as MaybeDelivered.

use super::Endpoint;
use super::peer::Reply;
use super::send_stream::{Message, MessageState};
use super::timers::Owner;
use super::{NACK_CORRUPT, NACK_GAP, NACK_NO_BUFFER};
use crate::host::{Host, Reason, SendStatus};
use crate::ident::{Nanos, Priority, serial_lt};
use crate::policy::{AckRule, Recovery};
use crate::wire::chunk::{MAX_RANGES, Range};
use crate::wire::{Chunk, StreamRef};

/// Two to this many epochs are left out at most.
const LEAVE_OUT_MAX: u8 = 28;

/// A reason from the wire.
fn drop_reason(reason: u8) -> Reason {
    match reason {
        r if r == Reason::PortClosed as u8 => Reason::PortClosed,
        r if r == Reason::NoResources as u8 => Reason::NoResources,
        r if r == Reason::Refused as u8 => Reason::Refused,
        _ => Reason::TooLong,
    }
}

impl Endpoint {
    /// Whether an answer of this peer names the stream that was sent on last, as most do. A stream that was sent on is of a port of ours
    /// and of the peer that owns the other port.
    fn answers_last(&self, peer: u32, name: &StreamRef) -> bool {
        self.send.get(self.last_sent).is_some_and(|stream| {
            let key = &stream.key;
            let named = (name.sender_port, name.receiver_port, name.priority != 0);
            stream.peer == peer
                && named == (key.local.0, key.remote.0, key.priority == Priority::High)
        })
    }

    pub(super) fn on_answer<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        chunk: &Chunk<'_>,
        host: &mut H,
    ) {
        let (Chunk::Cts { stream, .. }
        | Chunk::MsgEnd { stream, .. }
        | Chunk::Ack { stream, .. }
        | Chunk::Nack { stream, .. }
        | Chunk::Ready { stream, .. }
        | Chunk::MsgDrop { stream, .. }
        | Chunk::NullAck { stream, .. }
        | Chunk::PortClosed { stream, .. }
        | Chunk::Closed { stream }
        | Chunk::Refused { stream }
        | Chunk::Resume { stream, .. }) = chunk
        else {
            self.counters.protocol_violations += 1;
            return;
        };
        let slot = match self.answers_last(peer, stream) {
            true => Some(self.last_sent),
            false => match self.key_of(peer, stream, true) {
                Some(key) => self.send_index.get(&key).copied(),
                None => {
                    self.counters.stale_epochs += 1;
                    return;
                }
            },
        };
        let entry = slot.and_then(|slot| Some((slot, self.send.get(slot)?)));
        let ended = entry.is_none_or(|(_, entry)| serial_lt(stream.epoch, entry.epoch));
        let Some((slot, _)) = entry.filter(|(_, e)| e.epoch == stream.epoch && e.peer == peer)
        else {
            self.counters.stale_epochs += 1;
            // An epoch of ours that is over: the receiver may free its record.
            if ended && let Chunk::Ack { base, .. } | Chunk::Resume { base, .. } = *chunk {
                self.reply(peer, Reply::Close(*stream, base));
            }
            return;
        };
        match *chunk {
            Chunk::Ack { base, .. } if self.config.policy.ack_rule == AckRule::Exact => {
                self.on_exact_ack(now, slot, base.wrapping_sub(1), host);
            }
            Chunk::Ack { base, received, .. } => {
                self.on_ack(now, slot, base, host);
                self.on_received(now, slot, base, &received);
            }
            Chunk::Resume { base, .. } => self.on_ack(now, slot, base, host),
            Chunk::Nack {
                expected, reason, ..
            } => self.on_nack(now, slot, expected, reason, host),
            Chunk::Ready { number, .. } => self.on_ready(now, slot, number),
            Chunk::Cts {
                number,
                granted,
                ref missing,
                missing_len,
                ..
            } => self.on_cts(now, slot, number, granted, missing, missing_len),
            Chunk::MsgEnd { number, .. } => {
                self.on_outcome(now, slot, number, SendStatus::Delivered, host)
            }
            Chunk::MsgDrop { number, reason, .. } => {
                let status = SendStatus::NotDelivered(drop_reason(reason));
                self.on_outcome(now, slot, number, status, host);
            }
            Chunk::NullAck {
                number, delivered, ..
            } => self.on_null_ack(now, slot, number, delivered, host),
            Chunk::PortClosed { base, .. } => self.on_port_closed(now, slot, base, host),
            Chunk::Closed { .. } => self.on_closed(slot, host),
            Chunk::Refused { .. } => self.on_refused(now, slot, host),
            _ => {}
        }
    }

    /// Every number before `base` is committed.
    fn on_ack<H: Host>(&mut self, now: Nanos, slot: u32, base: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        if serial_lt(stream.high, base) {
            return self.on_contradiction(now, slot, host); // ACK > expected
        }
        stream.established = true;
        if serial_lt(stream.base, base) {
            self.settle_before(now, slot, base, host);
        } else if serial_lt(base, stream.base) {
            self.on_old_base(now, slot, base, host);
        }
    }

    /// `number` is committed; ParaStation2's Table 1: what was skipped lost its acknowledgement.
    #[cold]
    fn on_exact_ack<H: Host>(&mut self, now: Nanos, slot: u32, number: u32, host: &mut H) {
        self.on_outcome(now, slot, number, SendStatus::Delivered, host);
        self.on_skipped(now, slot, number);
    }

    /// The receiver waits for `expected`, or has no buffer for it.
    #[cold]
    fn on_nack<H: Host>(&mut self, now: Nanos, slot: u32, expected: u32, reason: u8, host: &mut H) {
        self.counters.nacks_received += 1;
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        stream.refusals = 0; // it knows the epoch
        if serial_lt(stream.high, expected) {
            return self.on_contradiction(now, slot, host);
        }
        if serial_lt(expected, stream.base) {
            // We settled it, the receiver did not: its engine was replaced after it told us of a drop, or a hole of ours was
            // lost with our predecessor. Never something delivered, which it would have committed. Or the NACK is merely old:
            // then NULL is answered by an acknowledgement.
            return self.fill_from(now, slot, expected, host);
        }
        let Some(entry) = self.peers.get(stream.peer) else {
            return;
        };
        let policy = &self.config.policy;
        let rto = entry.rtt.rto(policy, stream.backoff);
        match (reason, policy.recovery) {
            (NACK_GAP | NACK_CORRUPT, Recovery::Selective) => {
                self.on_single_loss(now, slot, expected);
            }
            (NACK_GAP | NACK_CORRUPT, Recovery::GoBackN { stall }) => {
                if stream.go_back_once(now, expected, entry.horizon, entry.rtt.repeat(policy)) {
                    stream.stalled = stall;
                    stream.timer = now.saturating_add(rto);
                    self.rearm(now, slot);
                    self.activate(now, slot);
                }
            }
            (NACK_NO_BUFFER, Recovery::Selective) => self.on_no_buffer(now, slot, expected),
            (NACK_NO_BUFFER, Recovery::GoBackN { .. }) => {
                if serial_lt(expected, stream.cursor) || stream.cursor == expected {
                    stream.go_back(expected);
                    stream.not_ready = Some(expected);
                    stream.timer = now.saturating_add(rto);
                    self.rearm(now, slot);
                }
            }
            _ => self.counters.protocol_violations += 1,
        }
    }

    /// A grant, and what to send again.
    fn on_cts(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        granted: u32,
        missing: &[Range; MAX_RANGES],
        len: u8,
    ) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        stream.established = true;
        if !serial_lt(number, stream.cursor) {
            // Of an acceptance that a go-back made void. But the receiver has a buffer: a late NACK must not hold the stream for
            // ever. The request goes out again, and is answered by grants.
            let held = stream.not_ready == Some(number);
            if held && number == stream.cursor && serial_lt(number, stream.high) {
                stream.not_ready = None;
                self.activate(now, slot);
            }
            return;
        }
        let Some(index) = stream.index(number) else {
            return;
        };
        let Some(message) = stream.queue.get_mut(index) else {
            return;
        };
        if message.state != MessageState::Live || granted > message.len {
            self.counters.protocol_violations += u64::from(granted > message.len);
            return;
        }
        if !message.long {
            // The receiver holds it as a long message, from when it did not fit a frame; since then it went out again as a short
            // one, which the receiver took for a copy. It goes on as a long one.
            (message.long, message.granted, message.sent) = (true, 0, 0);
        }
        message.granted = message.granted.max(granted);
        if granted >= message.unasked {
            message.unasked = 0; // asked for now
        }
        stream.hungry = true;
        (message.received, message.lost) = (true, false);
        let sent = message.sent;
        if stream.not_ready == Some(number) {
            stream.not_ready = None;
        }
        let entry = self.peers.get(stream.peer);
        let (horizon, written, window) =
            entry.map_or((0, 0, 0), |e| (e.horizon, e.written, e.reorder_window()));
        stream.heard(now, written, horizon, window);
        stream.resend.retain(|&(n, _)| n != number);
        for range in missing.iter().take(usize::from(len)) {
            let missing = Range {
                from: range.from,
                to: range.to.min(sent),
            };
            let range = match horizon {
                0 => missing,
                horizon => stream.without_under_way(number, missing, horizon),
            };
            if range.from < range.to {
                stream.resend_range(number, range);
            }
        }
        let Some(entry) = self.peers.get(stream.peer) else {
            return;
        };
        stream.backoff = 0;
        stream.timer = now.saturating_add(entry.rtt.rto(&self.config.policy, 0));
        self.rearm(now, slot);
        self.activate(now, slot);
        self.ask_about_bytes(slot);
    }

    /// MSGEND or MSGDROP: one message ended.
    fn on_outcome<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        status: SendStatus,
        host: &mut H,
    ) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        if !serial_lt(number, stream.high) {
            self.counters.protocol_violations += 1;
            return;
        }
        stream.established = true;
        if !matches!(status, SendStatus::Delivered) {
            stream.confirm(number);
            self.queue_sender_control(slot);
        }
        let index = self.send.get(slot).and_then(|stream| stream.index(number));
        if let Some(index) = index {
            if let Some(message) = self.send.get_mut(slot).and_then(|s| s.queue.get_mut(index)) {
                (message.received, message.lost) = (true, false);
            }
            self.settle(now, slot, index, status, host);
        }
    }

    /// What became of a number we gave up.
    #[cold]
    fn on_null_ack<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        delivered: bool,
        host: &mut H,
    ) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        if !serial_lt(number, stream.high) {
            self.counters.protocol_violations += 1;
            return;
        }
        stream.established = true;
        if !delivered {
            stream.confirm(number);
            self.queue_sender_control(slot);
        }
        let Some(stream) = self.send.get(slot) else {
            return;
        };
        let Some(index) = stream.index(number) else {
            return;
        };
        let reason = match stream.queue.get(index) {
            Some(message) => match message.state {
                MessageState::Null(reason) => reason,
                // Our predecessor gave it up when it was time; our own timer has not looked yet.
                _ if message.restored && message.deadline <= now => Reason::Deadline,
                // A cancel that died with our predecessor; or a refusal, whose reason died with the receiver's.
                _ if message.restored => Reason::Cancelled,
                _ => Reason::Refused,
            },
            None => Reason::Refused,
        };
        let status = if delivered {
            SendStatus::Delivered
        } else {
            SendStatus::NotDelivered(reason)
        };
        self.settle(now, slot, index, status, host);
    }

    /// The port is closed: before `base` delivered, from it on never.
    #[cold]
    fn on_port_closed<H: Host>(&mut self, now: Nanos, slot: u32, base: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        stream.refusals = 0; // it knows the epoch
        if serial_lt(stream.high, base) {
            return self.on_contradiction(now, slot, host);
        }
        if serial_lt(stream.base, base) {
            self.settle_before(now, slot, base, host);
        }
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        // Numbers whose sends were told already, by `drop_sends` perhaps, are nobody's failure.
        let fails = |m: &Message| matches!(m.state, MessageState::Live | MessageState::Null(_));
        if stream.queue.iter().any(fails) {
            stream.paused = true;
        }
        self.end_untransmitted(now, slot, Reason::PortClosed, host);
    }

    /// The receiver forgot the stream, as we asked.
    #[cold]
    fn on_closed<H: Host>(&mut self, slot: u32, host: &mut H) {
        if self.send.get(slot).is_some_and(|stream| stream.closing) {
            self.remove_send_stream(slot, host);
        }
    }

    /// Frees an idle stream's record and forgets it.
    pub(super) fn remove_send_stream<H: Host>(&mut self, slot: u32, host: &mut H) {
        let Some(stream) = self.send.remove(slot) else {
            return;
        };
        self.send_index.remove(&stream.key);
        self.timers.cancel(Owner::Send(slot));
        if let Some(record) = stream.record {
            host.free_send_record(record);
        }
    }

    /// No record of this epoch; see the module's text.
    #[cold]
    fn on_refused<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let Some(stream) = self.send.get(slot) else {
            return;
        };
        if stream.closing {
            return self.on_closed(slot, host);
        }
        let established = stream.established;
        self.begin_again(now, slot, established, host);
    }

    /// The receiver waits for a number that we never sent, or settled so long ago that it must have it. If it says so again when it
    /// has heard from us since, and nothing was settled meanwhile, then one of us has not the numbers it had, and nothing of this
    /// epoch can be agreed on any more.
    #[cold]
    pub(super) fn on_contradiction<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        self.counters.protocol_violations += 1;
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get(stream.peer) else {
            return;
        };
        if stream.doubted_at <= stream.moved_at {
            stream.doubted_at = entry.stamps.newest(now);
        } else if entry.horizon > stream.doubted_at && !stream.closing {
            // What is closing has nothing outstanding, and ends by itself.
            self.begin_again(now, slot, true, host);
        }
    }

    /// Goes on under a new epoch. What was transmitted ends as perhaps delivered if the receiver may have it.
    fn begin_again<H: Host>(&mut self, now: Nanos, slot: u32, perhaps: bool, host: &mut H) {
        let Some(stream) = self.send.get(slot) else {
            return;
        };
        // A peer that refuses everything must not make us draw an epoch per frame; the PROBE brings the next answer.
        let repeat = Nanos::from(self.config.policy.rto_min_us) * 1_000;
        if now < stream.reopened_at.saturating_add(repeat) {
            return;
        }
        if perhaps {
            self.settle_transmitted(now, slot, Reason::PeerRestarted, host);
        }
        let mut leave_out = 0;
        if let Some(stream) = self.send.get_mut(slot) {
            stream.reopened_at = now;
            stream.refusals = match stream.established {
                true => 0,
                false => stream.refusals.saturating_add(1),
            };
            // Refused again: the receiver knows a later epoch, which a damaged engine made up. So it is overtaken soon, but never by half of all
            // epochs, which would make it the later one again.
            leave_out = match stream.refusals {
                0 | 1 => 0,
                again => 1 << again.saturating_mul(3).min(LEAVE_OUT_MAX),
            };
        }
        self.reopen_later(slot, leave_out, host);
        self.activate(now, slot);
    }

    /// Keeps the retransmission timer in step with what is outstanding, and the heap with the timer.
    pub(super) fn rearm(&mut self, now: Nanos, slot: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get(stream.peer) else {
            return;
        };
        if !stream.outstanding() && stream.not_ready.is_none() && !stream.starved && !stream.closing
        {
            stream.timer = Nanos::MAX;
        } else if stream.timer == Nanos::MAX {
            stream.timer = now.saturating_add(entry.rtt.rto(&self.config.policy, stream.backoff));
        }
        let wake = stream.next_wake();
        self.timers.arm(Owner::Send(slot), wake);
    }
}
