//! The free ranges of an arena: first fit, neighbours merged.
//!
//! Sorted by offset. Ports have few and long-lived buffers, so the list stays short; a smarter structure would not be faster.

use crate::error::ArenaFull;

/// Buffers begin and end on multiples of this: a cache line.
pub(crate) const ALIGN: u64 = 64;

/// Free ranges as (offset, bytes).
#[derive(Debug)]
pub(crate) struct FreeList {
    ranges: Vec<(u64, u64)>,
}

/// Bytes a buffer of `len` bytes occupies.
pub(crate) fn footprint(len: u32) -> u64 {
    u64::from(len.max(1)).next_multiple_of(ALIGN)
}

impl FreeList {
    /// `bytes` free bytes; room for `expected` ranges without allocation.
    pub(crate) fn new(bytes: u64, expected: usize) -> Self {
        let mut ranges = Vec::with_capacity(expected.max(1));
        ranges.push((0, bytes));
        Self { ranges }
    }

    /// Takes the first range that holds `len` bytes.
    pub(crate) fn take(&mut self, len: u32) -> Result<u64, ArenaFull> {
        let bytes = footprint(len);
        let Some(i) = self.ranges.iter().position(|&(_, free)| free >= bytes) else {
            return Err(self.full(len as usize));
        };
        let (offset, free) = self.ranges[i];
        if free == bytes {
            self.ranges.remove(i);
        } else {
            self.ranges[i] = (offset + bytes, free - bytes);
        }
        Ok(offset)
    }

    /// Gives back what [`Self::take`] returned for the same length.
    pub(crate) fn give(&mut self, offset: u64, len: u32) {
        let bytes = footprint(len);
        let i = self.ranges.partition_point(|&(o, _)| o < offset);
        let joins_next = self
            .ranges
            .get(i)
            .is_some_and(|&(o, _)| o == offset + bytes);
        let joins_previous = i > 0 && {
            let (o, b) = self.ranges[i - 1];
            o + b == offset
        };
        match (joins_previous, joins_next) {
            (true, true) => {
                let (_, next) = self.ranges.remove(i);
                self.ranges[i - 1].1 += bytes + next;
            }
            (true, false) => self.ranges[i - 1].1 += bytes,
            (false, true) => {
                self.ranges[i].0 = offset;
                self.ranges[i].1 += bytes;
            }
            (false, false) => self.ranges.insert(i, (offset, bytes)),
        }
    }

    /// The refusal of `wanted` bytes.
    pub(crate) fn full(&self, wanted: usize) -> ArenaFull {
        ArenaFull {
            wanted,
            free: self.ranges.iter().map(|&(_, b)| b).sum(),
            largest: self.ranges.iter().map(|&(_, b)| b).max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Take(u32),
        Give(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u32..5000).prop_map(Step::Take),
            (0usize..64).prop_map(Step::Give)
        ]
    }

    proptest! {
        // Any takes and gives. Expect: live ranges never overlap and stay inside; when all are given back, one range is free.
        #[test]
        fn ranges_never_overlap(steps in proptest::collection::vec(step(), 0..200)) {
            const BYTES: u64 = 64 * 1024;
            let mut list = FreeList::new(BYTES, 8);
            let mut live: Vec<(u64, u32)> = Vec::new();
            for step in steps {
                match step {
                    Step::Take(len) => match list.take(len) {
                        Ok(offset) => {
                            prop_assert!(offset % ALIGN == 0 && offset + footprint(len) <= BYTES);
                            for &(o, l) in &live {
                                prop_assert!(offset + footprint(len) <= o || o + footprint(l) <= offset);
                            }
                            live.push((offset, len));
                        }
                        Err(full) => prop_assert!(full.largest < footprint(len)),
                    },
                    Step::Give(i) if !live.is_empty() => {
                        let (offset, len) = live.swap_remove(i % live.len());
                        list.give(offset, len);
                    }
                    Step::Give(_) => {}
                }
                let used: u64 = live.iter().map(|&(_, l)| footprint(l)).sum();
                prop_assert_eq!(list.full(0).free, BYTES - used);
            }
            for (offset, len) in live.drain(..) {
                list.give(offset, len);
            }
            prop_assert_eq!(&list.ranges, &[(0, BYTES)]);
        }
    }
}
