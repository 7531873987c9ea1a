//! Deadlines of peers: delayed acknowledgements, HELLO repeats, silence.
//!
//! Problem: everything a frame could have said may be lost, control included (ParaStation2's four kinds of loss, 000). RFC 6298
//! for the timeout; RMPP's retry of the oldest request (001); transport.md §2.7, §6.1
//!
//! Idea: one deadline per peer here, one per sending stream in `stream_timeout`. A peer that says nothing at all for
//! `unreachable_after` is unreachable.

use super::Endpoint;
use super::PeerState;
use super::timers::Owner;
use crate::host::{Host, Reason};
use crate::ident::{Nanos, Priority};

impl Endpoint {
    /// Does what is due at `now`.
    pub fn handle_timeout<H: Host>(&mut self, now: Nanos, host: &mut H) {
        self.train = None;
        self.catch_up(now, host);
        self.grants.tick(now);
        self.act_on_cancels(now, host);
        while let Some(owner) = self.timers.pop_due(now) {
            match owner {
                Owner::Sweep => self.sweep_timeout(now),
                Owner::Grants => self.grants_timeout(),
                Owner::Peer(slot) => self.peer_timeout(now, slot, host),
                Owner::Send(slot) => self.stream_timeout(now, slot, host),
            }
        }
    }

    #[cold]
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
}
