//! A table whose rows keep their number: peers, streams and long messages are named by slot, so that queues and timers hold four
//! bytes instead of a key. Rows are reused; nothing is allocated once the table has been as large as it gets.

use alloc::vec::Vec;

/// No row.
pub(super) const NONE: u32 = u32::MAX;

/// The table.
#[derive(Clone, Debug)]
pub(super) struct Slab<T> {
    rows: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Self {
            rows: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, row: T) -> u32 {
        if let Some(slot) = self.free.pop()
            && let Some(place) = self.rows.get_mut(slot as usize)
        {
            *place = Some(row);
            return slot;
        }
        self.rows.push(Some(row));
        (self.rows.len() - 1) as u32
    }

    pub(super) fn remove(&mut self, slot: u32) -> Option<T> {
        let row = self.rows.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(row)
    }

    /// Gives back what many rows that are not in use any more once took; rows in use stay where they are. For a sweep, not for the
    /// packet path.
    pub(super) fn shrink(&mut self) {
        const KEPT: usize = 8;
        if self.rows.capacity() <= KEPT.max(4 * self.len()) {
            return;
        }
        while self.rows.last().is_some_and(Option::is_none) {
            self.rows.pop();
        }
        let end = self.rows.len() as u32;
        self.free.retain(|slot| *slot < end);
        self.rows.shrink_to(KEPT);
        self.free.shrink_to(KEPT);
    }

    pub(super) fn get(&self, slot: u32) -> Option<&T> {
        self.rows.get(slot as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.rows.get_mut(slot as usize)?.as_mut()
    }

    /// Slots in use lie below this.
    pub(super) fn end(&self) -> u32 {
        self.rows.len() as u32
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.rows
            .iter()
            .enumerate()
            .filter_map(|(slot, row)| Some((slot as u32, row.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_many_gives_its_memory_back() {
        let mut slab = Slab::new();
        for i in 0..1_000u32 {
            assert_eq!(slab.insert(i), i);
        }
        for slot in (0..1_000).filter(|slot| *slot != 70) {
            slab.remove(slot);
        }
        slab.shrink();
        assert_eq!((slab.len(), slab.end(), slab.get(70)), (1, 71, Some(&70)));
        assert!(slab.rows.capacity() < 128 && slab.free.capacity() < 128);
        let slots: Vec<u32> = (0..100).map(|i| slab.insert(i)).collect();
        let mut sorted = slots.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 100, "each in a row of its own");
        assert!(!slots.contains(&70));
        slab.shrink();
        assert_eq!(slab.len(), 101);
    }
}
