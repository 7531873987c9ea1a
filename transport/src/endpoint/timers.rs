//! When somebody wants to be woken: one deadline per peer and per sending stream, one for all grants, and one
//! for the next look for idle peers.
//!
//! Idea: an indexed heap with at most one entry per owner. [`Timers::arm`] only ever moves an entry *earlier*; an owner whose
//! deadline moved later is woken too early once, finds nothing to do and arms again. So the packet path, which pushes
//! retransmission timers back all the time, touches the heap only when a timer was not armed at all.
//!
//! Rejected: a heap with stale entries (an idle timer of a minute re-armed every few milliseconds piles them up); a timer wheel
//! (a resolution, and work in every empty slot).
//!
//! Invariants: those of the heap.

use super::heap::Heap;
use crate::ident::Nanos;

/// Whose timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// Long messages that were granted and say nothing.
    Grants,
    /// The next look for idle peers.
    Sweep,
    /// A peer's slot.
    Peer(u32),
    /// A sending stream's slot.
    Send(u32),
}

impl Owner {
    fn id(self) -> u32 {
        match self {
            Self::Grants => 0,
            Self::Sweep => 1,
            Self::Peer(slot) => (slot + 1) << 1,
            Self::Send(slot) => (slot + 1) << 1 | 1,
        }
    }

    fn of(id: u32) -> Self {
        match (id >> 1, id & 1) {
            (0, 0) => Self::Grants,
            (0, _) => Self::Sweep,
            (slot, 0) => Self::Peer(slot - 1),
            (slot, _) => Self::Send(slot - 1),
        }
    }
}

/// The deadlines.
#[derive(Clone, Debug, Default)]
pub(super) struct Timers {
    heap: Heap,
}

impl Timers {
    /// Wakes `owner` at `at` or earlier. `Nanos::MAX` is never.
    pub(super) fn arm(&mut self, owner: Owner, at: Nanos) {
        if at != Nanos::MAX && self.heap.key(owner.id()).is_none_or(|armed| at < armed) {
            self.heap.set(owner.id(), at);
        }
    }

    /// Gives back what many owners once took.
    pub(super) fn shrink(&mut self) {
        self.heap.shrink();
    }

    /// Forgets `owner`.
    pub(super) fn cancel(&mut self, owner: Owner) {
        self.heap.remove(owner.id());
    }

    /// The earliest deadline.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.heap.first().map(|(at, _)| at)
    }

    /// Takes an owner whose time has come.
    pub(super) fn pop_due(&mut self, now: Nanos) -> Option<Owner> {
        let (_, id) = self.heap.first().filter(|&(at, _)| at <= now)?;
        self.heap.remove(id);
        Some(Owner::of(id))
    }

    /// Panics when the heap is broken.
    pub(super) fn check_consistency(&self) {
        self.heap.check_consistency();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fires_in_order_and_only_moves_earlier() {
        let mut timers = Timers::default();
        for slot in 0..50u32 {
            timers.arm(Owner::Send(slot), u64::from(slot * 7919 % 101));
            timers.arm(Owner::Peer(slot), u64::from(slot * 104_729 % 103));
        }
        timers.check_consistency();
        timers.arm(Owner::Send(3), 1_000); // later: ignored
        timers.arm(Owner::Peer(9), 0); // earlier: moved
        timers.cancel(Owner::Send(20));
        timers.arm(Owner::Grants, 70);
        timers.check_consistency();
        assert!(timers.pop_due(50).is_some());
        let (mut last, mut fired) = (0, 1);
        while let Some(at) = timers.next() {
            assert!(at >= last);
            last = at;
            assert_ne!(timers.pop_due(at), Some(Owner::Send(20)));
            fired += 1;
            timers.check_consistency();
        }
        assert_eq!(fired, 100);
    }
}
