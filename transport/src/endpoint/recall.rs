//! Peers that are idle are forgotten, and recalled from the ledger when they are met again.
//!
//! Problem: a node may talk to thousands of others now and then; what is volatile about them must not stay. transport.md §2.8
//!
//! Idea: a sweep, a few times per `peer_idle`, marks the peers that have streams in one pass over the streams, and forgets those that have none, no work
//! and were not heard for so long. What must outlive that is in the ledger already: incarnation and epoch floor ([`Host::load_peer`]).
//! An entry made later recalls them before it is used. A frame that fits what the ledger says is taken at once, as after a
//! takeover; HELLO goes out beside it.
//!
//! Why that is safe, thing by thing:
//! - *Epoch floor*: durable; a late START of a forgotten stream is refused as ever.
//! - *Engine epoch*: void. A ghost of a replaced engine may be taken for the peer until its next frame, whose higher epoch voids what the ghost
//!   did; all streams of the ghost's were closed before (there were none left), so the floor refuses them.
//! - *Superseded incarnations*: a late HELLO of one is answered by a HELLO of ours, and a HELLO-ACK that would change what the ledger says must echo
//!   the time stamp of that very HELLO. The present incarnation can: it answers a HELLO of somebody it does not know, or of us as we are.
//! - *Credit*: a share is called back first. Our own count begins anew with our next HELLO (see `credit`).
//! - *Round trip, path*: measured anew.
//!
//! Rejected: a count of streams per peer (four places that attach streams would have to keep it right); a timer per peer (each would look
//! at all streams).
//!
//! Invariant: an entry that is gone is named by no stream, no timer and no queue.

use super::credit::Share;
use super::timers::Owner;
use super::{Endpoint, PeerEntry, PeerState};
use crate::host::Host;
use crate::ident::{Nanos, Peer};

/// Sweeps per `peer_idle`.
const SWEEPS: Nanos = 4;
/// When the table is full, this is idle enough.
const IDLE_WHEN_FULL: Nanos = 1_000_000_000;

impl PeerEntry {
    fn has_work(&self) -> bool {
        let queues = [
            &self.control,
            &self.sender_control,
            &self.active[0],
            &self.active[1],
        ];
        self.hello_due
            || self.hello_ack_due
            || self.hello_outstanding
            || self.placing > 0
            || self.ready.contains(&true)
            || !self.replies.is_empty()
            || queues.iter().any(|queue| !queue.is_empty())
    }

    /// What the ledger knows of it. An entry is recalled once.
    #[cold]
    fn recall<H: Host>(&mut self, host: &H) {
        self.recalled = true;
        if let Some((incarnation, floor)) = host.load_peer(self.id)
            && self.incarnation == 0
        {
            (self.incarnation, self.floor) = (incarnation, floor);
        }
    }

    /// Whether it may be forgotten, if it has no streams.
    fn is_idle(&self, now: Nanos, idle: Nanos) -> bool {
        let settled = match self.state {
            PeerState::Up | PeerState::Idle => true,
            PeerState::Incompatible => now >= self.hello_at,
            PeerState::Connecting => false,
        };
        settled && now >= self.last_heard.saturating_add(idle) && !self.has_work()
    }
}

impl Endpoint {
    fn peer_idle(&self) -> Nanos {
        Nanos::from(self.config.policy.peer_idle_ms) * 1_000_000
    }

    /// An entry was made: it will be looked at.
    pub(super) fn arm_sweep(&mut self, now: Nanos) {
        let at = now.saturating_add((self.peer_idle() / SWEEPS).max(1));
        self.timers.arm(Owner::Sweep, at);
    }

    /// The sweep's timer.
    #[cold]
    pub(super) fn sweep_timeout(&mut self, now: Nanos) {
        self.sweep(now, self.peer_idle());
        if self.peers.len() > 0 {
            self.arm_sweep(now);
        }
    }

    /// The table is full: perhaps some are idle.
    #[cold]
    pub(super) fn make_room(&mut self, now: Nanos) {
        let again = self.swept_at.saturating_add(IDLE_WHEN_FULL);
        if self.swept_at == 0 || now >= again {
            self.sweep(now, self.peer_idle().min(IDLE_WHEN_FULL));
        }
    }

    fn sweep(&mut self, now: Nanos, idle: Nanos) {
        self.swept_at = now;
        let marks = &mut self.swept;
        marks.clear();
        marks.resize(self.peers.end() as usize, false);
        let sending = self.send.iter().map(|(_, stream)| stream.peer);
        let receiving = self.receive.iter().map(|(_, stream)| stream.peer);
        for peer in sending.chain(receiving) {
            if let Some(mark) = marks.get_mut(peer as usize) {
                *mark = true;
            }
        }
        for slot in 0..self.peers.end() {
            let streams = self.swept.get(slot as usize) != Some(&false);
            let Some(entry) = self
                .peers
                .get(slot)
                .filter(|e| !streams && e.is_idle(now, idle))
            else {
                continue;
            };
            match entry.credit.share {
                // Of a peer that is gone nothing comes back.
                Share::Held(_) if entry.is_up() => self.call_back(now, slot),
                Share::Returning(_) => {}
                _ => self.forget_peer(now, slot),
            }
        }
        // What thousands took while they were busy.
        self.peers.shrink();
        self.send.shrink();
        self.receive.shrink();
        self.longs.shrink();
        self.timers.shrink();
        self.swept.clear();
        self.swept.shrink_to(self.peers.end() as usize);
        for queue in &mut self.ready {
            queue.shrink_to(8);
        }
    }

    fn forget_peer(&mut self, now: Nanos, slot: u32) {
        self.take_share(now, slot);
        if let Some(entry) = self.peers.remove(slot) {
            self.peer_index.remove(&entry.id);
            self.heard = None;
            self.timers.cancel(Owner::Peer(slot));
            self.counters.peers_forgotten += 1;
        }
    }

    /// Before an entry that was just made is used: what the ledger knows of the peer.
    pub(super) fn recall<H: Host>(&mut self, slot: u32, host: &H) {
        if let Some(entry) = self.peers.get_mut(slot)
            && !entry.recalled
        {
            entry.recall(host);
        }
    }

    /// The entry of a peer whose frame came and fits what the ledger says of it; made anew if the peer was forgotten.
    #[inline(never)]
    pub(super) fn recall_for<H: Host>(
        &mut self,
        now: Nanos,
        from: Peer,
        src_incarnation: u32,
        host: &H,
    ) -> Option<u32> {
        if let Some(&slot) = self.peer_index.get(&from) {
            self.recall(slot, host);
            return Some(slot);
        }
        let (incarnation, _) = host.load_peer(from)?;
        if super::truncate(incarnation) != src_incarnation {
            return None;
        }
        let slot = self.peer_slot(now, from)?;
        self.recall(slot, host);
        Some(slot)
    }
}
