//! What a ring must do, as plain as it can be said. Unit, property and loom tests compare the real ring with this one.

use std::collections::VecDeque;

/// A bounded queue with staging on one side and release on the other.
pub struct RingOracle {
    capacity: usize,
    staged: Vec<u64>,
    visible: VecDeque<u64>,
    taken: usize,
}

impl RingOracle {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            staged: Vec::new(),
            visible: VecDeque::new(),
            taken: 0,
        }
    }

    pub fn free(&self) -> usize {
        self.capacity - self.visible.len() - self.staged.len()
    }

    pub fn stage(&mut self, value: u64) {
        assert!(self.free() > 0);
        self.staged.push(value);
    }

    pub fn publish(&mut self) {
        self.visible.extend(self.staged.drain(..));
    }

    /// The producer died: what it had not published never was.
    pub fn producer_dies(&mut self) {
        self.staged.clear();
    }

    pub fn available(&self) -> usize {
        self.visible.len() - self.taken
    }

    pub fn take(&mut self) -> u64 {
        self.taken += 1;
        self.visible[self.taken - 1]
    }

    pub fn release(&mut self) {
        self.visible.drain(..self.taken);
        self.taken = 0;
    }

    /// The consumer died: what it took but did not release is there again.
    pub fn consumer_dies(&mut self) {
        self.taken = 0;
    }
}
