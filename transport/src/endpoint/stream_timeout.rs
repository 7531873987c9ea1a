//! A sending stream's deadlines: retransmission, what was merely overtaken, send deadlines, idle streams.
//!
//! Problem: everything a frame could have said may be lost, control included (ParaStation2's four kinds of loss, 000). RFC 6298
//! for the timeout; RMPP's retry of the oldest request (001); transport.md §3.2, §7.4,
//! §7.5
//!
//! Idea: by default the timer sends no data. It sends a PROBE, and the receiver answers with everything it knows (acknowledgement,
//! gap, want of buffer, grants with what is missing), so a lost acknowledgement costs a header instead of a window, and there is one
//! way to recover. The papers' timers send data again, if the policy says so: with go-back-N everything from the oldest on, else
//! the oldest message; with whole message recovery, where nothing else finds a loss, also every later one that was not answered for as
//! long. Want of a buffer is probed for in any case. Backoff doubles up to the policy's bound.

use super::Endpoint;
use super::send_stream::{Message, MessageState, SendStream};
use super::timers::Owner;
use crate::host::{Host, Reason};
use crate::ident::Nanos;
use crate::policy::{OnTimeout, Policy, Recovery};

/// CLOSEs sent before a stream to a silent peer is forgotten without CLOSED.
const CLOSE_TRIES: u8 = 10;

impl SendStream {
    /// The timer's data. False: it sends PROBE. `broke`: there is no credit at all.
    fn resend_on_timeout(
        &mut self,
        now: Nanos,
        patience: Nanos,
        broke: bool,
        policy: &Policy,
    ) -> bool {
        // Without credit nothing would go out, and the frame that brings more may be the one that was lost: only asking helps.
        let asks = policy.on_timeout == OnTimeout::Probe || (self.starved && broke);
        if asks || self.not_ready.is_some() || !self.outstanding() {
            return false;
        }
        let before = self.cursor.wrapping_sub(self.base) as usize;
        match policy.recovery {
            Recovery::GoBackN { stall } => {
                self.go_back(self.base);
                self.stalled = stall;
            }
            Recovery::WholeMessage => {
                for index in 0..before {
                    let Some(message) = self.queue.get(index) else {
                        break;
                    };
                    let unanswered =
                        !message.received && message.sent_at.saturating_add(patience) <= now;
                    if !message.lost && (index == 0 || unanswered) {
                        self.lose(index);
                    }
                }
            }
            Recovery::Selective => {
                let mut messages = self.queue.iter().take(before);
                let Some(index) = messages.position(|message| !message.received) else {
                    return false;
                };
                self.lose(index);
            }
        }
        true
    }
}

impl Endpoint {
    #[cold]
    pub(super) fn stream_timeout<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        if stream.deadline <= now {
            self.give_up_where(now, slot, Reason::Deadline, host, |m| m.deadline <= now);
        }
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get(stream.peer) else {
            if stream.queue.is_empty() && stream.idle_at <= now {
                return self.remove_send_stream(slot, host);
            }
            // A restored stream to a node that is not there any more: nobody will ever say what became of what was sent.
            let waits = |m: &Message| m.state == MessageState::Live;
            let gone = !self.nodes.contains_key(&stream.key.node);
            if gone && !stream.queue.is_empty() && !stream.queue.iter().any(waits) {
                self.fail_stream(now, slot, Reason::NoRoute, host);
            }
            if let Some(stream) = self.send.get(slot) {
                self.timers.arm(Owner::Send(slot), stream.next_wake());
            }
            return;
        };
        let up = entry.is_up();
        if stream.reorder_at <= now {
            self.reorder_timeout(now, slot);
        }
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let Some(entry) = self.peers.get_mut(stream.peer) else {
            return;
        };
        if stream.timer <= now {
            stream.timer = Nanos::MAX;
            if up && stream.closing {
                stream.close = true;
                stream.close_tries = stream.close_tries.saturating_add(1);
            } else if up
                && !stream.reopen
                && (stream.outstanding() || stream.not_ready.is_some() || stream.starved)
            {
                self.counters.timeouts += 1;
                let first_rto = entry.rtt.rto(&self.config.policy, 0);
                if entry.last_heard.saturating_add(first_rto) <= now {
                    entry.window.silence(now, first_rto, &self.config.policy);
                }
                let broke = entry.may_fill(&self.config.policy) == 0;
                let policy = &self.config.policy;
                // What wanted credit may be held back since, while there is some for what was lost; or what there is may not do.
                let starved = stream.starved;
                let again = stream.resend_on_timeout(now, first_rto, broke, policy);
                stream.probe = starved || !again;
                for message in &mut stream.queue {
                    if matches!(message.state, MessageState::Null(_)) {
                        message.null_due = true;
                        stream.nulls = true;
                    }
                }
            }
            if up {
                stream.backoff = stream.backoff.saturating_add(1);
                stream.timer =
                    now.saturating_add(entry.rtt.rto(&self.config.policy, stream.backoff));
            }
            if stream.closing && (!up || stream.close_tries > CLOSE_TRIES) {
                return self.remove_send_stream(slot, host);
            }
            if up && (stream.nulls || !stream.probe) {
                self.activate(now, slot); // a NULL at the cursor goes out in its turn
            }
            let Some(stream) = self.send.get(slot) else {
                return;
            };
            if up && stream.reopen && !stream.queue.is_empty() {
                self.reopen(slot, host);
                self.activate(now, slot);
            }
            self.queue_sender_control(slot);
        } else if stream.queue.is_empty() && !stream.closing && stream.idle_at <= now {
            // Nothing outstanding: the epoch ends here, whatever becomes of the CLOSE.
            stream.idle_at = Nanos::MAX;
            stream.closing = true;
            stream.close = up;
            stream.timer = now.saturating_add(entry.rtt.rto(&self.config.policy, 0));
            self.queue_sender_control(slot);
        }
        self.rearm(now, slot);
    }
}
