//! An indexed binary heap: rows by key, each at most once, the smallest key first.
//!
//! Problem: timers and grants ask for the earliest or the shortest of thousands, whose keys change with every frame, and must not
//! allocate. Idea: an array in heap order and, per row, its place in it, so that a row is found, moved and removed in log n. Both
//! arrays grow to the load and stay.
//!
//! Rejected: a balanced tree (a node per row, allocated and freed all the time); a heap with stale entries (keys that move often
//! pile them up).
//!
//! Invariants: `place[row] == index + 1` for the entry at `index`, 0 without one; no key is smaller than its parent's.

use alloc::vec::Vec;

/// The heap.
#[derive(Clone, Debug, Default)]
pub(super) struct Heap {
    entries: Vec<(u64, u32)>,
    place: Vec<u32>,
}

impl Heap {
    /// The smallest key and its row.
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        self.entries.first().copied()
    }

    /// The row's key.
    pub(super) fn key(&self, row: u32) -> Option<u64> {
        let place = *self.place.get(row as usize)?;
        Some(self.entries.get((place as usize).checked_sub(1)?)?.0)
    }

    /// Gives the row this key, whether it had one or not.
    pub(super) fn set(&mut self, row: u32, key: u64) {
        if self.place.len() <= row as usize {
            self.place.resize(row as usize + 1, 0);
        }
        match self.place[row as usize] {
            0 => {
                self.entries.push((key, row));
                self.place[row as usize] = self.entries.len() as u32;
                self.up(self.entries.len() - 1);
            }
            place => {
                let index = place as usize - 1;
                let before = core::mem::replace(&mut self.entries[index].0, key);
                if key < before {
                    self.up(index);
                } else if key > before {
                    self.down(index);
                }
            }
        }
    }

    /// Gives back what many rows once took.
    pub(super) fn shrink(&mut self) {
        const KEPT: usize = 8;
        if self.place.capacity() > KEPT.max(4 * self.entries.len()) {
            while self.place.last() == Some(&0) {
                self.place.pop();
            }
            self.place.shrink_to(KEPT);
            self.entries.shrink_to(KEPT);
        }
    }

    /// Forgets the row.
    pub(super) fn remove(&mut self, row: u32) {
        let Some(index) = self
            .place
            .get(row as usize)
            .and_then(|place| (*place as usize).checked_sub(1))
        else {
            return;
        };
        self.entries.swap_remove(index);
        self.place[row as usize] = 0;
        if index < self.entries.len() {
            self.place[self.entries[index].1 as usize] = index as u32 + 1;
            self.down(index);
            self.up(index);
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.entries.swap(a, b);
        self.place[self.entries[a].1 as usize] = a as u32 + 1;
        self.place[self.entries[b].1 as usize] = b as u32 + 1;
    }

    fn up(&mut self, mut index: usize) {
        while index > 0 {
            let parent = (index - 1) / 2;
            if self.entries[parent].0 <= self.entries[index].0 {
                return;
            }
            self.swap(parent, index);
            index = parent;
        }
    }

    fn down(&mut self, mut index: usize) {
        loop {
            let left = index * 2 + 1;
            let Some(&first) = self.entries.get(left) else {
                return;
            };
            let child = match self.entries.get(left + 1) {
                Some(right) if right.0 < first.0 => left + 1,
                _ => left,
            };
            if self.entries[index].0 <= self.entries[child].0 {
                return;
            }
            self.swap(index, child);
            index = child;
        }
    }

    /// All rows, in no order.
    pub(super) fn rows(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().map(|&(_, row)| row)
    }

    /// Panics when the heap is broken.
    pub(super) fn check_consistency(&self) {
        for (index, &(key, row)) in self.entries.iter().enumerate() {
            assert_eq!(self.place[row as usize], index as u32 + 1);
            assert!(index == 0 || self.entries[(index - 1) / 2].0 <= key);
        }
        let placed = self.place.iter().filter(|&&place| place != 0).count();
        assert_eq!(placed, self.entries.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_order_of_their_newest_keys() {
        let mut heap = Heap::default();
        let mut keys = alloc::collections::BTreeMap::new();
        let mut dice = 7u64;
        for step in 0..5_000 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (row, key) = ((dice >> 40) as u32 % 60, dice >> 50);
            if dice >> 33 & 3 == 0 {
                heap.remove(row);
                keys.remove(&row);
            } else {
                heap.set(row, key);
                keys.insert(row, key);
            }
            heap.check_consistency();
            assert_eq!(heap.key(row), keys.get(&row).copied(), "step {step}");
            assert_eq!(heap.first().map(|f| f.0), keys.values().min().copied());
        }
        assert_eq!(heap.rows().count(), keys.len());
    }
}
