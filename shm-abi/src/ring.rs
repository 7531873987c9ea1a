//! Single-producer single-consumer rings between two processes that do not trust each other.
//!
//! | index | writer | reader | store | load | publishes |
//! |---|---|---|---|---|---|
//! | producer | producing side | consuming side | Release | Acquire | the entries before it |
//! | consumer | consuming side | producing side | Release | Acquire | that the entries before it may be overwritten |
//!
//! Indices run freely over `u32` and wrap; the capacity is a power of two. Each side keeps its own index privately in a cursor and
//! only ever *stores* the shared copy, so a hostile partner can lie about its own index but never move ours. Entries are words
//! loaded and stored relaxed: a racing writer yields nonsense to be checked, never undefined behaviour.

use crate::atomic::{AtomicU32, AtomicU64, Ordering};

/// The shared memory of one ring. Cheap to make from a mapping whenever needed.
#[derive(Clone, Copy)]
pub struct SharedRing<'m, const W: usize> {
    producer: &'m AtomicU32,
    consumer: &'m AtomicU32,
    entries: &'m [[AtomicU64; W]],
}

/// The partner's index claims more than a ring can hold, or ran backwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingJump {
    /// What the partner's index says.
    pub claimed: u32,
    /// Where we are.
    pub ours: u32,
}

impl<'m, const W: usize> SharedRing<'m, W> {
    /// A ring over these words. `entries.len()` must be a power of two (our own geometry, never the partner's word).
    pub fn new(
        producer: &'m AtomicU32,
        consumer: &'m AtomicU32,
        entries: &'m [[AtomicU64; W]],
    ) -> Self {
        assert!(entries.len().is_power_of_two());
        Self {
            producer,
            consumer,
            entries,
        }
    }

    fn entry(&self, index: u32) -> &'m [AtomicU64; W] {
        &self.entries[index as usize & (self.entries.len() - 1)]
    }

    /// Entries the ring holds.
    pub fn capacity(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The producer index as published: where a new owner of the producing side goes on.
    pub fn published(&self) -> u32 {
        self.producer.load(Ordering::Acquire)
    }

    /// The consumer index as published: where a new owner of the consuming side goes on.
    pub fn consumed(&self) -> u32 {
        self.consumer.load(Ordering::Acquire)
    }

    /// The entry at a free-running index, as it stands now.
    pub fn peek(&self, index: u32) -> [u64; W] {
        let entry = self.entry(index);
        core::array::from_fn(|i| entry[i].load(Ordering::Relaxed))
    }
}

/// The producing side's private state.
#[derive(Clone, Debug)]
pub struct ProducerCursor {
    next: u32,
}

impl ProducerCursor {
    /// Goes on at `next`.
    pub fn new(next: u32) -> Self {
        Self { next }
    }

    /// The index the next entry gets.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Entries that may be pushed before the consumer moves, by the consumer's claim; 0 if the claim is absurd.
    pub fn free<const W: usize>(&self, ring: SharedRing<'_, W>) -> u32 {
        // SYNC(ring-consumer): what we overwrite was read before this index was stored.
        let used = self
            .next
            .wrapping_sub(ring.consumer.load(Ordering::Acquire));
        ring.capacity().saturating_sub(used)
    }

    /// Writes an entry and moves our private index. The caller has made sure that there is room ([`Self::free`] or a token count).
    pub fn stage<const W: usize>(&mut self, ring: SharedRing<'_, W>, words: &[u64; W]) {
        let entry = ring.entry(self.next);
        for (word, value) in entry.iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Makes every staged entry visible: one store, however many entries.
    pub fn publish<const W: usize>(&self, ring: SharedRing<'_, W>) {
        // SYNC(ring-producer)
        ring.producer.store(self.next, Ordering::Release);
    }
}

/// The consuming side's private state.
#[derive(Clone, Debug)]
pub struct ConsumerCursor {
    next: u32,
}

impl ConsumerCursor {
    /// Goes on at `next`.
    pub fn new(next: u32) -> Self {
        Self { next }
    }

    /// The index of the next entry to read.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Entries that wait, by the producer's claim; an absurd claim is an error.
    pub fn available<const W: usize>(&self, ring: SharedRing<'_, W>) -> Result<u32, RingJump> {
        // SYNC(ring-producer)
        let claimed = ring.producer.load(Ordering::Acquire);
        let available = claimed.wrapping_sub(self.next);
        if available > ring.capacity() {
            Err(RingJump {
                claimed,
                ours: self.next,
            })
        } else {
            Ok(available)
        }
    }

    /// Copies the next entry and moves our private index.
    pub fn take<const W: usize>(&mut self, ring: SharedRing<'_, W>) -> [u64; W] {
        let words = ring.peek(self.next);
        self.next = self.next.wrapping_add(1);
        words
    }

    /// Gives everything taken so far back to the producer.
    pub fn release<const W: usize>(&self, ring: SharedRing<'_, W>) {
        // SYNC(ring-consumer)
        ring.consumer.store(self.next, Ordering::Release);
    }
}
