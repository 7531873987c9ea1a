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

    /// The same over the memory of a port, whose geometry was checked when it was mapped.
    #[cfg(all(feature = "std", not(loom)))]
    #[inline]
    pub(crate) fn of_geometry(
        producer: &'m AtomicU32,
        consumer: &'m AtomicU32,
        entries: &'m [[AtomicU64; W]],
    ) -> Self {
        debug_assert!(entries.len().is_power_of_two());
        Self {
            producer,
            consumer,
            entries,
        }
    }

    #[inline]
    fn entry(&self, index: u32) -> &'m [AtomicU64; W] {
        &self.entries[index as usize & (self.entries.len() - 1)]
    }

    /// Entries the ring holds.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The producer index as published: where a new owner of the producing side goes on.
    #[inline]
    pub fn published(&self) -> u32 {
        self.producer.load(Ordering::Acquire)
    }

    /// The consumer index as published: where a new owner of the consuming side goes on.
    #[inline]
    pub fn consumed(&self) -> u32 {
        self.consumer.load(Ordering::Acquire)
    }

    /// The entry at a free-running index, as it stands now.
    #[inline]
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
    #[inline]
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Entries that may be pushed before the consumer moves, by the consumer's claim; 0 if the claim is absurd.
    #[inline]
    pub fn free<const W: usize>(&self, ring: SharedRing<'_, W>) -> u32 {
        // SYNC(ring-consumer): what we overwrite was read before this index was stored.
        let used = self
            .next
            .wrapping_sub(ring.consumer.load(Ordering::Acquire));
        ring.capacity().saturating_sub(used)
    }

    /// Writes an entry and moves our private index. The caller has made sure that there is room ([`Self::free`] or a token count).
    #[inline]
    pub fn stage<const W: usize>(&mut self, ring: SharedRing<'_, W>, words: &[u64; W]) {
        let entry = ring.entry(self.next);
        for (word, value) in entry.iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Makes every staged entry visible: one store, however many entries.
    #[inline]
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
    #[inline]
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Entries that wait, by the producer's claim; an absurd claim is an error.
    #[inline]
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
    #[inline]
    pub fn take<const W: usize>(&mut self, ring: SharedRing<'_, W>) -> [u64; W] {
        let words = ring.peek(self.next);
        self.next = self.next.wrapping_add(1);
        words
    }

    /// Moves our private index past an entry that was looked at ([`SharedRing::peek`]).
    #[inline]
    pub fn pass(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Gives everything taken so far back to the producer.
    #[inline]
    pub fn release<const W: usize>(&self, ring: SharedRing<'_, W>) {
        // SYNC(ring-consumer)
        ring.consumer.store(self.next, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::oracle::RingOracle;

    struct Memory {
        producer: AtomicU32,
        consumer: AtomicU32,
        entries: Vec<[AtomicU64; 1]>,
    }

    impl Memory {
        fn new(capacity: usize, start: u32) -> Self {
            Self {
                producer: AtomicU32::new(start),
                consumer: AtomicU32::new(start),
                entries: (0..capacity).map(|_| [AtomicU64::new(0)]).collect(),
            }
        }

        fn ring(&self) -> SharedRing<'_, 1> {
            SharedRing::new(&self.producer, &self.consumer, &self.entries)
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Stage,
        Publish,
        ProducerDies,
        Take,
        Release,
        ConsumerDies,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => Just(Step::Stage),
            2 => Just(Step::Publish),
            1 => Just(Step::ProducerDies),
            4 => Just(Step::Take),
            2 => Just(Step::Release),
            1 => Just(Step::ConsumerDies),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
           // Any interleaving, either side dying and being replaced at any step, indices beginning near their wrap. Expect: the ring is
           // the oracle's queue.
           #[test]
           fn ring_is_the_oracle(steps in steps(), log2 in 0usize..5, start in prop_oneof![Just(0), Just(u32::MAX - 3), any::<u32>()]) {
               let memory = Memory::new(1 << log2, start);
               let mut oracle = RingOracle::new(1 << log2);
               let (mut producer, mut consumer) = (ProducerCursor::new(start), ConsumerCursor::new(start));
               let mut value = 0;
               for step in steps {
                   let ring = memory.ring();
                   match step {
                       Step::Stage => {
                           prop_assert_eq!(producer.free(ring) as usize, oracle.free());
                           if oracle.free() > 0 {
                               value += 1;
                               producer.stage(ring, &[value]);
                               oracle.stage(value);
                           }
                       }
                       Step::Publish => { producer.publish(ring); oracle.publish(); }
                       Step::ProducerDies => { producer = ProducerCursor::new(ring.published()); oracle.producer_dies(); }
                       Step::Take => {
                           prop_assert_eq!(consumer.available(ring).unwrap() as usize, oracle.available());
                           if oracle.available() > 0 {
                               prop_assert_eq!(consumer.take(ring)[0], oracle.take());
                           }
                       }
                       Step::Release => { consumer.release(ring); oracle.release(); }
                       Step::ConsumerDies => { consumer = ConsumerCursor::new(ring.consumed()); oracle.consumer_dies(); }
                   }
               }
           }

           // The partner's index jumps anywhere. Expect: a claim within the capacity is served, any other is an error, and our own
           // index does not move.
           #[test]
           fn a_jumping_producer_is_named(ours in any::<u32>(), claim in any::<u32>()) {
               let memory = Memory::new(8, ours);
               memory.producer.store(claim, Ordering::Release);
               let consumer = ConsumerCursor::new(ours);
               let distance = claim.wrapping_sub(ours);
               match consumer.available(memory.ring()) {
                   Ok(available) => prop_assert!(available == distance && distance <= 8),
                   Err(jump) => {
    prop_assert!(distance > 8);
    prop_assert_eq!(jump, RingJump { claimed: claim, ours });
    }
               }
               prop_assert_eq!(consumer.next(), ours);
           }

           // The consumer's index jumps anywhere. Expect: never more room than the ring has.
           #[test]
           fn a_jumping_consumer_gives_no_room_that_is_not_there(ours in any::<u32>(), claim in any::<u32>()) {
               let memory = Memory::new(8, ours);
               memory.consumer.store(claim, Ordering::Release);
               prop_assert!(ProducerCursor::new(ours).free(memory.ring()) <= 8);
           }
       }
}

#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Memory {
        producer: AtomicU32,
        consumer: AtomicU32,
        entries: [[AtomicU64; 2]; 2],
    }

    impl Memory {
        fn new(start: u32) -> Arc<Self> {
            Arc::new(Self {
                producer: AtomicU32::new(start),
                consumer: AtomicU32::new(start),
                entries: core::array::from_fn(|_| [AtomicU64::new(0), AtomicU64::new(0)]),
            })
        }

        fn ring(&self) -> SharedRing<'_, 2> {
            SharedRing::new(&self.producer, &self.consumer, &self.entries)
        }
    }

    // Three entries through a ring of two, across the wrap of the index. Expect: each arrives whole, once, in order, in every
    // interleaving and under every reordering the memory model allows.
    #[test]
    fn loom_ring_delivers_in_order() {
        loom::model(|| {
            let start = u32::MAX;
            let memory = Memory::new(start);
            let writer = memory.clone();
            let producer = thread::spawn(move || {
                let mut cursor = ProducerCursor::new(start);
                let mut value = 1;
                while value <= 3 {
                    if cursor.free(writer.ring()) > 0 {
                        cursor.stage(writer.ring(), &[value, value * 10]);
                        cursor.publish(writer.ring());
                        value += 1;
                    } else {
                        thread::yield_now();
                    }
                }
            });
            let mut cursor = ConsumerCursor::new(start);
            let mut expected = 1;
            while expected <= 3 {
                if cursor.available(memory.ring()).unwrap() == 0 {
                    thread::yield_now();
                    continue;
                }
                let words = cursor.take(memory.ring());
                assert_eq!(words, [expected, expected * 10]);
                cursor.release(memory.ring());
                expected += 1;
            }
            producer.join().unwrap();
        });
    }

    // A consumer takes one entry and dies before it releases; another takes over. Expect: the entry is there again.
    #[test]
    fn loom_a_consumer_that_dies_releases_nothing() {
        loom::model(|| {
            let memory = Memory::new(7);
            let writer = memory.clone();
            let producer = thread::spawn(move || {
                let mut cursor = ProducerCursor::new(7);
                for value in 1..=2 {
                    cursor.stage(writer.ring(), &[value, value]);
                    cursor.publish(writer.ring());
                }
            });
            let mut dying = ConsumerCursor::new(memory.ring().consumed());
            if dying.available(memory.ring()).unwrap() > 0 {
                assert_eq!(dying.take(memory.ring()), [1, 1]);
            }
            drop(dying);
            producer.join().unwrap();
            let mut heir = ConsumerCursor::new(memory.ring().consumed());
            assert_eq!(heir.available(memory.ring()), Ok(2));
            assert_eq!(heir.take(memory.ring()), [1, 1]);
            assert_eq!(heir.take(memory.ring()), [2, 2]);
        });
    }

    // A consumer that finds nothing announces its sleep; a producer publishes meanwhile. Expect: the consumer sees the entry or the
    // producer sees the announcement; never neither.
    #[test]
    fn loom_no_wakeup_is_lost() {
        loom::model(|| {
            let memory = Memory::new(0);
            let waiting = Arc::new(AtomicU32::new(0));
            let (writer, flag) = (memory.clone(), waiting.clone());
            let producer = thread::spawn(move || {
                let mut cursor = ProducerCursor::new(0);
                cursor.stage(writer.ring(), &[1, 1]);
                cursor.publish(writer.ring());
                crate::doorbell::must_ring(&flag)
            });
            let cursor = ConsumerCursor::new(0);
            crate::doorbell::announce(&waiting);
            let sees = cursor.available(memory.ring()).unwrap() > 0;
            let rung = producer.join().unwrap();
            assert!(sees || rung, "a lost wake-up");
        });
    }
}
