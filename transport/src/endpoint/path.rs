//! How long frames to a peer may be.
//!
//! Problem: both ends and the configuration may allow jumbo frames while something between them silently drops them: HELLO passes,
//! and every full frame after it is lost. transport.md §2.6
//!
//! Idea: what every Ethernet carries is believed; more is proved by a padded PATH-PROBE, which travels beside ordinary traffic in
//! shorter frames, and holds once PATH-ACK names its size and nonce. A probe that stays unanswered is repeated a few times; then the
//! peer is sent short frames until the path's bound or the association changes.
//!
//! Rejected: a search for the largest size (paths are 1500 or jumbo, the step between is rare); proving short frames too.
//!
//! Invariant: `max_frame` never exceeds what both ends allow, nor, above [`ASSUMED`], what was proved.

use super::timers::Owner;
use super::{Endpoint, PeerEntry};
use crate::ident::{Nanos, Priority};

use super::hello::MIN_FRAME;

/// Transport bytes of a UDP/IPv4 frame at MTU 1500: believed without proof.
const ASSUMED: u16 = 1_472;
/// Probes of one size before it is given up.
const TRIES: u8 = 5;
/// First repeat; doubles.
const REPEAT: Nanos = 10_000_000;

/// What is known about long frames to a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// The longest frame both ends and the configuration allow.
    bound: u16,
    /// The longest that was proved.
    proved: u16,
    /// A probe goes out with the next frame.
    due: bool,
    /// When to repeat the one that is out; MAX if none is.
    again_at: Nanos,
    tries: u8,
    nonce: u32,
}

impl Default for Path {
    fn default() -> Self {
        Self {
            bound: 0,
            proved: 0,
            due: false,
            again_at: Nanos::MAX,
            tries: 0,
            nonce: 0,
        }
    }
}

impl Path {
    /// Whether a probe is due.
    pub(super) fn is_due(&self) -> bool {
        self.due
    }

    /// Size and nonce of the probe that is due; it counts as sent.
    pub(super) fn take_probe(&mut self, now: Nanos) -> Option<(u16, u32)> {
        if !core::mem::take(&mut self.due) {
            return None;
        }
        self.again_at = now.saturating_add(REPEAT << self.tries.min(8));
        self.tries = self.tries.saturating_add(1);
        self.nonce = self.nonce.wrapping_add(1);
        Some((self.bound, self.nonce))
    }

    /// A new association: a proof that failed is tried again.
    pub(super) fn try_again(&mut self) {
        self.tries = 0;
    }

    /// When the peer's timer is wanted.
    pub(super) fn again_at(&self) -> Nanos {
        self.again_at
    }

    fn wants_proof(&self) -> bool {
        self.bound > ASSUMED.max(self.proved)
    }
}

impl PeerEntry {
    /// What may be sent under the bounds and the proof.
    fn apply_path(&mut self) {
        self.max_frame = self.path.bound.min(ASSUMED.max(self.path.proved));
    }
}

impl Endpoint {
    /// The bounds changed: path, configuration, or what the peer said it can receive.
    pub(super) fn bound_frames(&mut self, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let node = self.nodes.get(&entry.id.node);
        let path = node.map_or(MIN_FRAME, |node| node.max_frame);
        let bound = path
            .min(self.config.max_frame)
            .min(entry.remote_max_frame)
            .max(MIN_FRAME);
        if bound != entry.path.bound {
            entry.path.bound = bound;
            entry.path.tries = 0;
        }
        entry.apply_path();
        if entry.is_up() {
            self.prove_path(slot);
        }
    }

    /// Sends a probe, if longer frames are allowed than proved and it was not tried too often.
    pub(super) fn prove_path(&mut self, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let path = &mut entry.path;
        if path.wants_proof() && path.tries < TRIES {
            path.due = true;
            self.mark_ready(slot, Priority::High);
        }
    }

    /// PATH-ACK: a probe arrived.
    pub(super) fn on_path_ack(&mut self, slot: u32, size: u16, nonce: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let path = &mut entry.path;
        if path.again_at == Nanos::MAX || nonce != path.nonce || size != path.bound {
            return; // late, or of a bound that has changed
        }
        path.proved = size;
        path.again_at = Nanos::MAX;
        path.tries = 0;
        entry.apply_path();
    }

    /// The peer's timer: repeat a probe that was not answered.
    pub(super) fn repeat_probe(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let path = &mut entry.path;
        if path.again_at > now {
            self.timers.arm(Owner::Peer(slot), path.again_at);
        } else {
            path.again_at = Nanos::MAX;
            if path.tries >= TRIES && path.wants_proof() {
                self.counters.paths_short += 1;
            }
            if entry.is_up() {
                self.prove_path(slot);
            }
        }
    }
}
