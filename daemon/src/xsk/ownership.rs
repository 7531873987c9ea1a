//! Which chunk is where: one durable word per chunk, kept in the ledger.
//!
//! Problem: chunks a driver holds are in no ring, so a new owner of the socket
//! cannot find out from the rings which chunks the kernel has (ARCHITECTURE.md,
//! invariant 4). Idea: before a chunk is published to the fill or transmit ring, its
//! word records the ring and the index it will have there. It is ours again iff
//! the published producer is (serially) at or below that index, that is, if the
//! publishing never happened.
//!
//! | word | writer | reader | store | publishes |
//! |---|---|---|---|---|
//! | `table[chunk]` | the socket's owner | its successor, after the owner's death | Release | the chunk's state before the next ring index |
//!
//! A word is 0 when the chunk is OWNED, so a fresh table says that everything
//! is ours. Layout: bits 0–31 ring index, bits 32–33 state, the rest zero.

use std::sync::atomic::{AtomicU64, Ordering};

use super::crash_point::crash_point;

const STATE_OWNED: u64 = 0;
const STATE_FILL: u64 = 1;
const STATE_TRANSMIT: u64 = 2;
const STATE_SHIFT: u32 = 32;

/// Where a chunk is, as far as its owner recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// With us: in no ring, or in a consumer ring whose index was not yet released.
    Owned,
    /// In the fill ring at this index, and from there in the driver or the receive ring.
    Fill(u32),
    /// In the transmit ring at this index, and from there in the driver or the completion ring.
    Transmit(u32),
}

impl Record {
    /// The word stored in the ledger.
    pub fn encode(self) -> u64 {
        match self {
            Record::Owned => STATE_OWNED,
            Record::Fill(index) => STATE_FILL << STATE_SHIFT | u64::from(index),
            Record::Transmit(index) => STATE_TRANSMIT << STATE_SHIFT | u64::from(index),
        }
    }

    /// The record a word stands for, `None` if it is none we would write.
    pub fn decode(word: u64) -> Option<Self> {
        let index = word as u32;
        match word >> STATE_SHIFT {
            STATE_OWNED if index == 0 => Some(Record::Owned),
            STATE_FILL => Some(Record::Fill(index)),
            STATE_TRANSMIT => Some(Record::Transmit(index)),
            _ => None,
        }
    }
}

/// True if ring index `index` lies before `producer`, serially: it was published.
pub(super) fn is_published(index: u32, producer: u32) -> bool {
    (producer.wrapping_sub(index) as i32) > 0
}

/// The table of one UMEM.
#[derive(Clone, Copy)]
pub(super) struct OwnershipTable<'t> {
    words: &'t [AtomicU64],
}

impl<'t> OwnershipTable<'t> {
    /// `words` must have been checked to have one word per chunk.
    pub(super) fn new(words: &'t [AtomicU64]) -> Self {
        OwnershipTable { words }
    }

    /// The record of `chunk`; `None` if it is not plausible.
    pub(super) fn get(&self, chunk: u32) -> Option<Record> {
        // Only the owner writes and we are the owner; what our predecessor
        // wrote became visible when we learned of its death.
        Record::decode(self.words.get(chunk as usize)?.load(Ordering::Acquire))
    }

    /// Records where `chunk` is about to be.
    pub(super) fn set(&self, chunk: u32, record: Record) {
        if let Some(word) = self.words.get(chunk as usize) {
            crash_point();
            word.store(record.encode(), Ordering::Release);
        }
    }

    /// [`Self::set`] while the socket is in use, for a successor and for our own checks.
    #[inline]
    pub(super) fn note(&self, chunk: u32, record: Record) {
        if !cfg!(feature = "volatile") {
            self.set(chunk, record);
        }
    }

    /// Says of every chunk that it is ours: a new socket, nothing published.
    pub(super) fn reset(&self) {
        for word in self.words {
            word.store(Record::Owned.encode(), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_nobody_writes_are_no_records() {
        for record in [
            Record::Owned,
            Record::Fill(0),
            Record::Fill(u32::MAX),
            Record::Transmit(7),
        ] {
            assert_eq!(Record::decode(record.encode()), Some(record));
        }
        assert_eq!(Record::Owned.encode(), 0);
        for word in [1, 3 << 32, 1 << 34, 1 << 63, u64::MAX] {
            assert_eq!(Record::decode(word), None, "{word:#x}");
        }
    }

    #[test]
    fn published_is_serial() {
        assert!(is_published(0, 1));
        assert!(!is_published(1, 1));
        assert!(!is_published(2, 1));
        assert!(is_published(u32::MAX, 0));
        assert!(!is_published(0, u32::MAX));
    }
}
