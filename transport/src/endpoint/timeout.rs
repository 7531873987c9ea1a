//! Deadlines: retransmission, delayed acknowledgements, HELLO repeats, silence, send deadlines, idle streams.
//!
//! Problem: everything a frame could have said may be lost, control included (ParaStation2's four kinds of loss, 000). RFC 6298
//! for the timeout; RMPP's retry of the oldest request (001); PROTOCOL *Congestion*.
//!
//! Idea: the timer sends no data. It sends a PROBE, and the receiver answers with everything it knows (acknowledgement, gap, want
//! of buffer, grants with what is missing), so a lost acknowledgement costs a header instead of a window, and there is one way
//! to recover. Backoff doubles up to the policy's bound; a peer that says nothing at all for `unreachable_after` is unreachable.

use super::Endpoint;
use super::PeerState;
use super::send_stream::{Message, MessageState};
use super::timers::Owner;
use crate::host::{Host, Reason};
use crate::ident::{Nanos, Priority};

/// CLOSEs sent before a stream to a silent peer is forgotten without CLOSED.
const CLOSE_TRIES: u8 = 10;

impl Endpoint {
    /// Does what is due at `now`.
    pub fn handle_timeout<H: Host>(&mut self, now: Nanos, host: &mut H) {
        self.act_on_cancels(now, host);
        while let Some(owner) = self.timers.pop_due(now) {
            match owner {
                Owner::Peer(slot) => self.peer_timeout(now, slot, host),
                Owner::Send(slot) => self.stream_timeout(now, slot, host),
            }
        }
    }

    fn peer_timeout<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let limit = self.unreachable_after();
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        if entry.ack_due <= now {
            entry.ack_due = Nanos::MAX;
            entry.acks_pending = 0;
            self.mark_ready(slot, Priority::High);
        } else {
            self.timers.arm(Owner::Peer(slot), entry.ack_due);
        }
        let Some(entry) = self.peers.get(slot) else {
            return;
        };
        match entry.waiting_since.map(|since| since.saturating_add(limit)) {
            Some(end) if end <= now => {
                self.counters.peers_unreachable += 1;
                let node = entry.id.node;
                let connecting = entry.state == PeerState::Connecting;
                self.fail_peer(now, slot, Reason::Unreachable, host);
                if connecting {
                    self.fail_unresolved(now, node, Reason::Unreachable, host);
                }
            }
            Some(end) => self.timers.arm(Owner::Peer(slot), end),
            None => {}
        }
        let Some(entry) = self.peers.get(slot) else {
            return;
        };
        if entry.placing > 0 {
            let silent = entry.last_heard.saturating_add(limit);
            if silent <= now {
                self.void_receiving(slot, host); // tokens of a sender that went away
            } else {
                self.timers.arm(Owner::Peer(slot), silent);
            }
        }
        self.repeat_hello(now, slot);
        self.repeat_probe(now, slot);
        self.repeat_call(now, slot);
    }

    fn stream_timeout<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        if stream.deadline <= now {
            self.give_up_where(now, slot, Reason::Deadline, host, |m| {
                m.request.deadline <= now
            });
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
        if stream.timer <= now {
            stream.timer = Nanos::MAX;
            if up && stream.closing {
                stream.close = true;
                stream.close_tries = stream.close_tries.saturating_add(1);
            } else if up
                && !stream.reopen
                && (stream.outstanding() || stream.not_ready || stream.starved)
            {
                self.counters.timeouts += 1;
                stream.probe = true;
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
            if up && stream.nulls {
                self.activate(now, slot); // one at the cursor goes out in its turn
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
