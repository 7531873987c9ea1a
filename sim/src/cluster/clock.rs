//! What happens when: a binary heap of small entries; equal times keep the order in which they were written down.
//!
//! Rejected: a calendar queue (the spans here reach from 50 ns to minutes; the heap's entries are 32 bytes and its depth at 4,096
//! nodes is 17).

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use portolan_transport::ident::Nanos;

/// Something that happens. Numbers are indices of engines, frames and ports of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// An engine runs.
    Turn(u32),
    /// A frame reaches the switch.
    Ingress(u32),
    /// A port of the switch is free for its next frame.
    Egress(u32),
    /// A frame reaches an engine's receive ring.
    Arrival(u32),
    /// The applications of an engine read their events.
    Read(u32),
    /// Something an application, or whoever drives the run, wants to be told.
    Alarm(u64),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Nanos,
    sequence: u64,
    what: Happening,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

/// Everything that will happen.
#[derive(Debug, Default)]
pub struct Clock {
    heap: BinaryHeap<Entry>,
    sequence: u64,
}

impl Clock {
    /// `what` happens at `at`.
    pub fn set(&mut self, at: Nanos, what: Happening) {
        self.sequence += 1;
        self.heap.push(Entry {
            at,
            sequence: self.sequence,
            what,
        });
    }

    /// When the next thing happens.
    pub fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Takes the next thing.
    pub fn pop(&mut self) -> Option<(Nanos, Happening)> {
        self.heap.pop().map(|entry| (entry.at, entry.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expect: by time, and in the order of writing within one time.
    #[test]
    fn order() {
        let mut clock = Clock::default();
        for (at, name) in [(5, 1), (3, 2), (5, 3), (1, 4), (3, 5)] {
            clock.set(at, Happening::Alarm(name));
        }
        let popped: Vec<_> = std::iter::from_fn(|| clock.pop()).collect();
        let names = [(1, 4), (3, 2), (3, 5), (5, 1), (5, 3)];
        assert_eq!(popped, names.map(|(at, name)| (at, Happening::Alarm(name))));
    }
}
