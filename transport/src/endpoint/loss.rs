//! What is lost, from what receivers say they have.
//!
//! Problem: find what the network lost as soon as it can be known, send it again once, and do not take for lost what was merely
//! overtaken. ParaStation2 Table 1's exact acknowledgements (000); RACK (RFC 8985) over the time stamps of every frame.
//! transport.md §6.3, §7.1, §7.2
//!
//! Idea: an acknowledgement lists what the receiver has beyond its base. Its frame says which of our frames had arrived when it was
//! written: the *horizon*. A message that left before the horizon and is not listed is lost, once frames that left with it have had
//! the time to arrive late: the reorder window. If that time is not over, a timer waits for the rest of it. What is sent again
//! has a new time and is judged by it, so each loss is repaired once per round trip, whatever was lost, retransmissions and their
//! acknowledgements included. Messages of one frame burst have the same time; then the order of numbers decides.
//!
//! An answer says nothing of messages that left after its horizon, and one that was overtaken by another of the stream (their frames' time
//! stamps tell) says nothing at all but its base. A message that was listed and is not any more lost its buffer to another: it is owed
//! again, from its first byte.
//!
//! Of a long message the acknowledgement tells no bytes. When everything that may be sent of one left before the horizon and it has
//! not ended, a PROBE asks, once: the last bytes may be lost, or the grant for the next.
//!
//! With exact acknowledgements one for a later number than the oldest shows that those for the numbers between were lost: they
//! are sent again and acknowledged again.
//!
//! An acknowledgement below our base, written after we had told what became of `base - 1`, is from a receiver whose engine died before it committed
//! a drop that it had told us of: NULL fills its place.
//!
//! Rejected: counting duplicate acknowledgements (three frames may never follow); a timer per message.
//!
//! Invariants: no message is marked lost that left at or after the horizon plus the time since it was heard; a message that is
//! marked has no mark of being received.

use super::Endpoint;
use super::send_stream::{MessageState, SendStream, UNSETTLED_MAX};
use crate::host::Host;
use crate::ident::{Nanos, serial_lt};
use crate::policy::Recovery;
use crate::wire::chunk::Received;

impl SendStream {
    /// Marks what is lost by now: not received, left before what was received and `window` ago. Returns how many, and sets when to
    /// look again.
    fn find_lost(&mut self, now: Nanos, window: Nanos) -> u64 {
        let (horizon, newest) = (self.horizon, self.newest);
        let reached = horizon.saturating_add(now.saturating_sub(self.heard_at));
        let (mut found, mut again) = (0, Nanos::MAX);
        for index in 0..self.cursor.wrapping_sub(self.base) as usize {
            let number = self.number(index);
            let Some(message) = self.queue.get(index) else {
                break;
            };
            let with_newest = || newest.is_some_and(|newest| serial_lt(number, newest));
            let overtaken =
                message.sent_at < horizon || (message.sent_at == horizon && with_newest());
            if message.received || message.lost || !overtaken {
                continue;
            }
            let lost_at = message.sent_at.saturating_add(window);
            if lost_at <= reached {
                self.lose(index);
                found += 1;
            } else {
                again = again.min(now.saturating_add(lost_at - reached));
            }
        }
        self.reorder_at = again;
        found
    }

    /// Whether all that may be sent of some long message had the time to arrive, and nothing is said of it: bytes, a grant or its end may
    /// be lost, or it waits for others. Each transmission is asked about once.
    fn wants_to_ask(&mut self, window: Nanos) -> bool {
        let mut asks = false;
        for index in 0..self.cursor.wrapping_sub(self.base) as usize {
            let number = self.number(index);
            let Some(message) = self.queue.get_mut(index) else {
                break;
            };
            let silent = message.long
                && message.received
                && !message.asked
                && message.state == MessageState::Live
                && message.sent >= message.granted
                && message.bytes_at.saturating_add(window) <= self.horizon;
            if silent && !self.resend.iter().any(|&(n, _)| n == number) {
                message.asked = true;
                asks = true;
            }
        }
        asks
    }

    /// Takes in what the receiver has. True if something of it is news; and how many messages it forgot.
    fn learn_received(&mut self, base: u32, received: &Received, horizon: Nanos) -> (bool, u64) {
        let shift = self.base.wrapping_sub(base) as usize;
        let (mut news, mut forgotten) = (false, 0);
        self.newest = None;
        for index in 0..self.cursor.wrapping_sub(self.base) as usize {
            let number = self.number(index);
            let Some(message) = self.queue.get_mut(index) else {
                break;
            };
            if received.has(shift + index) {
                news |= !message.received;
                (message.received, message.lost) = (true, false);
                if message.sent_at == horizon {
                    self.newest = Some(number);
                }
                if self.not_ready == Some(number) {
                    self.not_ready = None;
                }
            } else if message.received && message.sent_at <= horizon {
                self.lose(index);
                forgotten += 1;
            }
        }
        (news, forgotten)
    }
}

impl Endpoint {
    /// An acknowledgement's bitmap; its base is settled.
    pub(super) fn on_received(&mut self, now: Nanos, slot: u32, base: u32, received: &Received) {
        if self.config.policy.recovery != Recovery::Selective {
            return;
        }
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get_mut(stream.peer) else {
            return;
        };
        let horizon = entry.horizon;
        let beyond = serial_lt(stream.base, base);
        if horizon == 0
            || beyond
            || !stream.heard(now, entry.written, horizon, entry.reorder_window())
        {
            return;
        }
        if stream.cursor == stream.base {
            // It speaks of nothing that is under way.
            (stream.newest, stream.reorder_at) = (None, Nanos::MAX);
            return self.rearm(now, slot);
        }
        let (news, forgotten) = stream.learn_received(base, received, horizon);
        let found = stream.find_lost(now, entry.reorder_window());
        self.counters.losses_found += found;
        if found > 0 {
            entry.window.lost(now);
        }
        self.counters.messages_reneged += forgotten;
        if news {
            stream.backoff = 0;
        }
        if news || found + forgotten > 0 {
            stream.timer = now.saturating_add(entry.rtt.rto(&self.config.policy, stream.backoff));
            self.activate(now, slot);
        }
        self.rearm(now, slot);
        self.ask_about_bytes(slot);
    }

    /// PROBE if a long message seems to have lost something that only the receiver can name.
    #[cold]
    pub(super) fn ask_about_bytes(&mut self, slot: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let selective = self.config.policy.recovery == Recovery::Selective;
        let window = self.peers.get(stream.peer).map(|e| e.reorder_window());
        if selective && window.is_some_and(|window| stream.wants_to_ask(window)) {
            stream.probe = true;
            self.queue_sender_control(slot);
        }
    }

    /// The reorder window of some messages is over.
    pub(super) fn reorder_timeout(&mut self, now: Nanos, slot: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get_mut(stream.peer) else {
            stream.reorder_at = Nanos::MAX;
            return;
        };
        let found = stream.find_lost(now, entry.reorder_window());
        self.counters.losses_found += found;
        if found > 0 {
            entry.window.lost(now);
            stream.timer = now.saturating_add(entry.rtt.rto(&self.config.policy, stream.backoff));
            self.activate(now, slot);
        }
    }

    /// One message the receiver says it does not have, unless it said since that it does.
    #[cold]
    pub(super) fn on_single_loss(&mut self, now: Nanos, slot: u32, number: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let horizon = self.peers.get(stream.peer).map_or(0, |e| e.horizon);
        let Some(index) = stream.index(number) else {
            return;
        };
        // What went out after the answer's horizon is not what it speaks of.
        let spoken_of = |m: &super::send_stream::Message| {
            let done = m.received || m.lost || m.state == MessageState::Done;
            !done && (horizon == 0 || m.sent_at <= horizon)
        };
        if serial_lt(number, stream.cursor) && stream.queue.get(index).is_some_and(spoken_of) {
            stream.lose(index);
            self.activate(now, slot);
        }
    }

    /// Exact acknowledgement of `number`: those of the numbers before it were lost.
    #[cold]
    pub(super) fn on_skipped(&mut self, now: Nanos, slot: u32, number: u32) {
        let stream = self.send.get(slot);
        let found = stream.and_then(|stream| Some((stream.base, stream.index(number)?)));
        let Some((base, index)) = found else {
            return; // it was the oldest, or an old one
        };
        for skipped in 0..index {
            if let Some(message) = self
                .send
                .get_mut(slot)
                .and_then(|s| s.queue.get_mut(skipped))
            {
                message.received = false; // its end is what was lost
            }
            self.on_single_loss(now, slot, base.wrapping_add(skipped as u32));
        }
    }

    /// An acknowledgement below our base: old, or its receiver lost what it told us of.
    #[cold]
    pub(super) fn on_old_base<H: Host>(&mut self, now: Nanos, slot: u32, base: u32, host: &mut H) {
        let Some(stream) = self.send.get(slot) else {
            return;
        };
        let horizon = self.peers.get(stream.peer).map_or(0, |e| e.horizon);
        if horizon > stream.moved_at {
            self.fill_from(now, slot, base, host);
        }
    }

    /// The receiver waits for numbers from `base` on, which we settled: NULL goes out for them, unless it did and the receiver had not
    /// heard so (transport.md §7.6). NULL is answered, so that an answer to every answer would never end, and multiply in a network that
    /// duplicates.
    #[cold]
    pub(super) fn fill_from<H: Host>(&mut self, now: Nanos, slot: u32, base: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let entry = self.peers.get(stream.peer);
        let (horizon, last) = entry.map_or((0, 0), |e| (e.horizon, e.stamps.last(now)));
        // More than was ever unsettled at once, and no old answer.
        let lacks = stream.base.wrapping_sub(base) as usize;
        if lacks > UNSETTLED_MAX && horizon > stream.moved_at {
            return self.on_contradiction(now, slot, host);
        }
        if horizon == 0 || horizon > stream.filled_at {
            (stream.filler, stream.filled_at) = (Some(base), last);
            self.queue_sender_control(slot);
        }
    }
}
