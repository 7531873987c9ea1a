//! How sends end.
//!
//! Problem: each accepted send gets exactly one status, and never a guess: *Delivered* when the receiver said it committed the
//! number, *NotDelivered* when it is certain that it never will be, *MaybeDelivered* when neither can be known. transport.md
//! §4.4
//!
//! Idea: everything the receiver says goes through [`Endpoint::settle_before`] (all numbers before a base) or
//! [`Endpoint::settle`] (one); everything that ends without it divides the queue at `high`: transmitted may have arrived, never
//! transmitted cannot have. After a takeover `high` is `next`, since nobody knows what the predecessor transmitted.
//!
//! Invariant: a message leaves Live or Null exactly once, together with its status.

use super::Endpoint;
use super::PeerState;
use super::counters::Counters;
use super::send_stream::{Message, MessageState, pauses};
use super::slab::NONE;
use crate::host::{Host, Reason, SendStatus};
use crate::ident::{Nanos, NodeId, SendId};

/// Tells the host how a send ended, and counts.
#[inline]
fn tell<H: Host>(counters: &mut Counters, host: &mut H, id: SendId, status: SendStatus) {
    match status {
        SendStatus::Delivered => counters.sends_delivered += 1,
        SendStatus::NotDelivered(_) => counters.sends_failed += 1,
        SendStatus::MaybeDelivered(_) => counters.sends_maybe += 1,
    }
    host.complete(id, status);
}

impl Endpoint {
    /// Tells the host and counts.
    pub(super) fn finish<H: Host>(
        &mut self,
        host: &mut H,
        id: Option<SendId>,
        status: Option<SendStatus>,
    ) {
        if let (Some(id), Some(status)) = (id, status) {
            tell(&mut self.counters, host, id, status);
        }
    }

    /// The receiver committed everything before `base` (base ≤ high).
    pub(super) fn settle_before<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        base: u32,
        host: &mut H,
    ) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let settled = base
            .wrapping_sub(stream.base)
            .min(stream.queue.len() as u32);
        let (port, counters) = (stream.key.local, &mut self.counters);
        let messages = stream.queue.drain(..settled as usize);
        // An acknowledgement crosses no NULL that we have not confirmed, so a number given up was delivered before.
        let delivered = messages.filter_map(|message| match message.state {
            MessageState::Live | MessageState::Null(_) => {
                counters.sends_delivered += 1;
                Some(message.id)
            }
            MessageState::Hole | MessageState::Done => None,
        });
        host.complete_delivered(port, delivered);
        self.settled(now, slot, settled);
    }

    /// One number got its status; `Live` and `Null` only.
    pub(super) fn settle<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        index: usize,
        status: SendStatus,
        host: &mut H,
    ) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(message) = stream.queue.get_mut(index) else {
            return;
        };
        let open = matches!(message.state, MessageState::Live | MessageState::Null(_));
        message.state = MessageState::Done;
        let id = message.id;
        if stream.not_ready == Some(stream.number(index)) {
            stream.not_ready = None;
        }
        if let SendStatus::NotDelivered(reason) = status
            && open
            && pauses(reason)
        {
            stream.paused = true;
        }
        if open {
            self.finish(host, Some(id), Some(status));
        }
        self.settled(now, slot, 0);
    }

    /// So many messages were settled and left the front of the queue, and there may be more that were: progress.
    fn settled(&mut self, now: Nanos, slot: u32, gone: u32) {
        let idle = Nanos::from(self.config.policy.stream_idle_ms) * 1_000_000;
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let released = stream.released();
        if !stream.pop_settled(gone) {
            if released {
                self.activate(now, slot);
            }
            return;
        }
        stream.stalled = false;
        let entry = self.peers.get(stream.peer);
        stream.moved_at = entry.map_or(now, |entry| entry.stamps.newest(now));
        stream.backoff = 0;
        stream.last_back = None;
        stream.timer = Nanos::MAX; // starts anew
        if stream.queue.is_empty() {
            stream.deadline = Nanos::MAX;
            stream.idle_at = now.saturating_add(idle);
        }
        // With nothing more to say the peer must not be made ready: an acknowledgement we owe it would leave alone, a moment before the
        // application's answer that it could travel with.
        let has_more = !stream.queue.is_empty();
        self.rearm(now, slot);
        if has_more {
            self.activate(now, slot);
        }
    }

    /// Gives up, with `reason`, the Live messages that `which` names.
    #[cold]
    pub(super) fn give_up_where<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        reason: Reason,
        host: &mut H,
        which: impl Fn(&Message) -> bool,
    ) {
        let mut index = 0;
        while let Some(stream) = self.send.get_mut(slot)
            && let Some(message) = stream.queue.get(index)
        {
            if message.state == MessageState::Live && which(message) {
                let id = message.id;
                let status = stream.give_up(index, reason);
                self.finish(host, Some(id), status);
            }
            index += 1;
        }
        if let Some(stream) = self.send.get_mut(slot) {
            stream.find_deadline();
            self.activate(now, slot);
        }
    }

    /// Everything transmitted ends as MaybeDelivered (NULLs with their own reason, which the application asked for); what was
    /// not transmitted stays.
    #[cold]
    pub(super) fn settle_transmitted<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        reason: Reason,
        host: &mut H,
    ) {
        let Some(stream) = self.send.get(slot) else {
            return;
        };
        for index in 0..stream.high.wrapping_sub(stream.base) as usize {
            let Some(message) = self.send.get_mut(slot).and_then(|s| s.queue.get_mut(index)) else {
                break;
            };
            let status = match message.state {
                MessageState::Live => SendStatus::MaybeDelivered(reason),
                MessageState::Null(reason) => SendStatus::MaybeDelivered(reason),
                MessageState::Hole | MessageState::Done => {
                    message.state = MessageState::Done;
                    continue;
                }
            };
            message.state = MessageState::Done;
            let id = message.id;
            self.finish(host, Some(id), Some(status));
        }
        self.settled(now, slot, 0);
    }

    /// Every send of the stream ends. The next one opens a new epoch, so that late frames of this one hurt nobody.
    #[cold]
    pub(super) fn fail_stream<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        reason: Reason,
        host: &mut H,
    ) {
        self.settle_transmitted(now, slot, reason, host);
        self.end_untransmitted(now, slot, reason, host);
        if let Some(stream) = self.send.get_mut(slot) {
            stream.reopen = true;
            stream.paused = false;
        }
    }

    /// What is left of the queue was certainly not delivered; the epoch ends with it.
    #[cold]
    pub(super) fn end_untransmitted<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        reason: Reason,
        host: &mut H,
    ) {
        let idle = Nanos::from(self.config.policy.stream_idle_ms) * 1_000_000;
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let next = stream.next();
        while let Some(message) = self.send.get_mut(slot).and_then(|s| s.queue.pop_front()) {
            let status = match message.state {
                MessageState::Live => SendStatus::NotDelivered(reason),
                MessageState::Null(reason) => SendStatus::NotDelivered(reason),
                MessageState::Hole | MessageState::Done => continue,
            };
            self.finish(host, Some(message.id), Some(status));
        }
        if let Some(stream) = self.send.get_mut(slot) {
            (stream.base, stream.cursor, stream.high) = (next, next, next);
            stream.void_volatile();
            (stream.nulls, stream.holding) = (false, false);
            stream.deadline = Nanos::MAX;
            stream.reopen = true;
            stream.idle_at = now.saturating_add(idle);
            self.rearm(now, slot);
        }
    }

    /// A peer is gone for now: its sends end, half-placed messages are forgotten.
    #[cold]
    pub(super) fn fail_peer<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        reason: Reason,
        host: &mut H,
    ) {
        for slot in 0..self.send.end() {
            if self
                .send
                .get(slot)
                .is_some_and(|stream| stream.peer == peer)
            {
                self.fail_stream(now, slot, reason, host);
            }
        }
        self.void_receiving(peer, host);
        self.take_share(now, peer);
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.state = PeerState::Idle;
            entry.waiting_since = None;
            entry.hello_due = false;
            entry.hello_outstanding = false;
            entry.replies.clear();
        }
    }

    /// Streams to a node whose queues never became known.
    #[cold]
    pub(super) fn fail_unresolved<H: Host>(
        &mut self,
        now: Nanos,
        node: NodeId,
        reason: Reason,
        host: &mut H,
    ) {
        for slot in 0..self.send.end() {
            let unresolved = |s: &super::SendStream| s.key.node == node && s.peer == NONE;
            if self.send.get(slot).is_some_and(unresolved) {
                self.fail_stream(now, slot, reason, host);
            }
        }
    }
}
