//! When somebody wants to be woken: one deadline per peer and per sending stream.
//!
//! Idea: an indexed binary heap with at most one entry per owner. [`Timers::arm`] only ever moves an entry *earlier*; an owner whose
//! deadline moved later is woken too early once, finds nothing to do and arms again. So the packet path, which pushes
//! retransmission timers back all the time, touches the heap only when a timer was not armed at all.
//!
//! Rejected: a heap with stale entries (an idle timer of a minute re-armed every few milliseconds piles them up); a timer wheel
//! (a resolution, and work in every empty slot).
//!
//! Invariants: `position[id] == index + 1` for the entry at `index`, 0 without one; the heap order.

use alloc::vec::Vec;

use crate::ident::Nanos;

/// Whose timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A peer's slot.
    Peer(u32),
    /// A sending stream's slot.
    Send(u32),
}

impl Owner {
    fn id(self) -> u32 {
        match self {
            Self::Peer(slot) => slot << 1,
            Self::Send(slot) => slot << 1 | 1,
        }
    }

    fn of(id: u32) -> Self {
        if id & 1 == 0 {
            Self::Peer(id >> 1)
        } else {
            Self::Send(id >> 1)
        }
    }
}

/// The heap.
#[derive(Clone, Debug, Default)]
pub(super) struct Timers {
    heap: Vec<(Nanos, u32)>,
    position: Vec<u32>,
}

impl Timers {
    /// Wakes `owner` at `at` or earlier. `Nanos::MAX` is never.
    pub(super) fn arm(&mut self, owner: Owner, at: Nanos) {
        if at == Nanos::MAX {
            return;
        }
        let id = owner.id();
        if self.position.len() <= id as usize {
            self.position.resize(id as usize + 1, 0);
        }
        match self.position[id as usize] {
            0 => {
                self.heap.push((at, id));
                let index = self.heap.len() - 1;
                self.position[id as usize] = index as u32 + 1;
                self.up(index);
            }
            place => {
                let index = place as usize - 1;
                if at < self.heap[index].0 {
                    self.heap[index].0 = at;
                    self.up(index);
                }
            }
        }
    }

    /// Forgets `owner`.
    pub(super) fn cancel(&mut self, owner: Owner) {
        if let Some(&place) = self.position.get(owner.id() as usize)
            && place != 0
        {
            self.remove(place as usize - 1);
        }
    }

    /// The earliest deadline.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.heap.first().map(|&(at, _)| at)
    }

    /// Takes an owner whose time has come.
    pub(super) fn pop_due(&mut self, now: Nanos) -> Option<Owner> {
        let &(at, id) = self.heap.first()?;
        if at > now {
            return None;
        }
        self.remove(0);
        Some(Owner::of(id))
    }

    fn remove(&mut self, index: usize) {
        let (_, id) = self.heap.swap_remove(index);
        self.position[id as usize] = 0;
        if index < self.heap.len() {
            self.position[self.heap[index].1 as usize] = index as u32 + 1;
            self.down(index);
            self.up(index);
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.position[self.heap[a].1 as usize] = a as u32 + 1;
        self.position[self.heap[b].1 as usize] = b as u32 + 1;
    }

    fn up(&mut self, mut index: usize) {
        while index > 0 {
            let parent = (index - 1) / 2;
            if self.heap[parent].0 <= self.heap[index].0 {
                return;
            }
            self.swap(parent, index);
            index = parent;
        }
    }

    fn down(&mut self, mut index: usize) {
        loop {
            let left = index * 2 + 1;
            let Some(&first) = self.heap.get(left) else {
                return;
            };
            let child = match self.heap.get(left + 1) {
                Some(right) if right.0 < first.0 => left + 1,
                _ => left,
            };
            if self.heap[index].0 <= self.heap[child].0 {
                return;
            }
            self.swap(index, child);
            index = child;
        }
    }

    /// Panics when the heap is broken.
    pub(super) fn check_consistency(&self) {
        for (index, &(at, id)) in self.heap.iter().enumerate() {
            assert_eq!(self.position[id as usize], index as u32 + 1);
            assert!(index == 0 || self.heap[(index - 1) / 2].0 <= at);
        }
        let armed = self.position.iter().filter(|&&place| place != 0).count();
        assert_eq!(armed, self.heap.len());
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
        assert_eq!(fired, 99);
    }
}
