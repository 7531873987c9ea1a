//! Want of a buffer, as the sender has it: what waits for READY, and how much goes out then.
//!
//! **Problem.** A receiver has as many buffers as its application gave it, and its senders know nothing of that. From the number that found none on
//! everything is dropped, and READY says of one buffer that it is there. A sender with hundreds of messages that answers with all of them has nearly all of
//! them dropped again, each time: four senders of 4 KiB to one port, 511 messages under way each and 1,024 buffers, had six first chunks dropped for each that was
//! taken, and a quarter of the rate (docs/tuning.md).
//!
//! **Idea.** What was dropped counts as never sent ([`SendStream::go_back`]), so that nothing is left to be found lost. After READY go as many
//! as there were buffers for last time, twice: [`Regained`]. When the last of these has arrived there may be as many again; a stream that has come as far as a window knows of no want any more.
//!
//! **Rejected.** The number of buffers in READY: they are not the stream's, but whoever's comes first, and it would be another wire format.
//!
//! transport.md §5.5. Only where single messages are recovered; the papers' own ways are theirs.

use super::Endpoint;
use super::send_stream::{MessageState, SendStream};
use crate::ident::{Nanos, serial_lt};
use crate::policy::Recovery;

/// Messages that go out after READY at least: their frames cost little more than one.
const LEAST: u32 = 8;
/// Who has come so far without want has none any more.
const WINDOW: u32 = 512;

/// How far a stream may go since its receiver had a buffer again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regained {
    /// The number that had waited.
    from: u32,
    /// Messages from this number on wait until the one before it has arrived.
    until: u32,
}

impl SendStream {
    /// There is a buffer for `number`, which had waited.
    fn regain(&mut self, number: u32) {
        let last = self.regained.filter(|last| serial_lt(last.from, number));
        let taken = last.map_or(0, |last| number.wrapping_sub(last.from));
        let may = taken.saturating_mul(2).clamp(LEAST, WINDOW);
        self.regained = Some(Regained {
            from: number,
            until: number.wrapping_add(may),
        });
    }

    /// Whether message `index` need not wait for a buffer.
    pub(super) fn is_ready(&self, index: usize) -> bool {
        let number = self.number(index);
        self.not_ready.is_none_or(|from| serial_lt(number, from))
    }

    /// Whether message `index` may go out for all that is known of its receiver's buffers.
    #[inline]
    pub(super) fn may_go(&mut self, index: usize) -> bool {
        self.is_ready(index) && (self.regained.is_none() || self.goes_on(index))
    }

    #[cold]
    fn goes_on(&mut self, index: usize) -> bool {
        let number = self.number(index);
        while let Some(Regained { from, until }) = self.regained
            && !serial_lt(number, until)
        {
            let last = until.wrapping_sub(1);
            let last = self.index(last).and_then(|index| self.queue.get(index));
            // Settled, if it is not there any more.
            if last.is_some_and(|message| !message.received) {
                return false;
            }
            let span = until.wrapping_sub(from);
            self.regained = (span < WINDOW).then_some(Regained {
                from,
                until: until.wrapping_add(span),
            });
        }
        true
    }
}

impl Endpoint {
    /// The receiver found no buffer for `number`, or took its buffer away: it and what follows wait for READY.
    pub(super) fn on_no_buffer(&mut self, now: Nanos, slot: u32, number: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get(stream.peer) else {
            return;
        };
        let message = stream.index(number).and_then(|i| stream.queue.get(i));
        let Some(message) = message.filter(|_| !serial_lt(stream.cursor, number)) else {
            return;
        };
        // What went out since is not what it speaks of; nor does a message that ended need a buffer.
        let late = entry.horizon != 0 && message.sent_at > entry.horizon;
        if late || message.state != MessageState::Live {
            return;
        }
        if stream.not_ready.is_none_or(|from| serial_lt(number, from)) {
            stream.not_ready = Some(number);
        }
        stream.timer = now.saturating_add(entry.rtt.rto(&self.config.policy, stream.backoff));
        // It took nothing beyond it either; and what it had a buffer for, that was taken away.
        stream.go_back(number);
        self.rearm(now, slot);
    }

    /// There is a buffer for `number`, which the receiver does not have yet.
    #[cold]
    pub(super) fn on_ready(&mut self, now: Nanos, slot: u32, number: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let old = serial_lt(number, stream.base);
        if old || serial_lt(stream.high, number) {
            self.counters.protocol_violations += u64::from(!old);
            return;
        }
        let Some(entry) = self.peers.get(stream.peer) else {
            return;
        };
        let policy = &self.config.policy;
        let waited = stream.not_ready.take();
        stream.backoff = 0;
        stream.timer = now.saturating_add(entry.rtt.rto(policy, 0));
        match policy.recovery {
            Recovery::GoBackN { .. } => {
                stream.go_back_once(now, number, entry.horizon, entry.rtt.repeat(policy));
            }
            Recovery::Selective => {
                let horizon = entry.horizon;
                let message = stream.index(number).and_then(|i| stream.queue.get(i));
                // It went out and was dropped, of which nothing was said before there was a buffer again; or it went out again since.
                let dropped = message.is_some_and(|message| {
                    serial_lt(number, stream.cursor)
                        && !message.received
                        && (horizon == 0 || message.sent_at <= horizon)
                });
                // So was what went out behind it, if all of that had arrived as well.
                let last = stream.index(stream.cursor.wrapping_sub(1));
                let last = last.and_then(|i| stream.queue.get(i));
                let behind = number.wrapping_add(1) != stream.cursor
                    && last.is_some_and(|last| last.sent_at <= horizon);
                if waited == Some(number) || (dropped && behind) {
                    stream.go_back(number);
                    stream.regain(number);
                } else if dropped {
                    // It may as well have been lost, which is no want.
                    stream.lose(number.wrapping_sub(stream.base) as usize);
                }
            }
            Recovery::WholeMessage => {
                // It took nothing beyond it meanwhile.
                let before = stream.cursor.wrapping_sub(number);
                for later in 0..before.min(stream.queue.len() as u32) {
                    self.on_single_loss(now, slot, number.wrapping_add(later));
                }
            }
        }
        self.rearm(now, slot);
        self.activate(now, slot);
    }
}
