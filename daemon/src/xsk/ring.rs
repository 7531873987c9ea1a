//! One side of a single-producer single-consumer ring shared with the kernel.
//!
//! | index | writer | reader | store order | load order | publishes |
//! |---|---|---|---|---|---|
//! | fill, tx `producer` | us | kernel | Release `XSK_PRODUCE` | kernel's acquire | descriptors before it, and their ownership words |
//! | fill, tx `consumer` | kernel | us | kernel's release | Acquire `XSK_KERNEL_CONSUMED` | descriptors before it are read, their places free |
//! | rx, completion `producer` | kernel | us | kernel's release | Acquire `XSK_KERNEL_PRODUCED` | descriptors before it, and the chunks' bytes |
//! | rx, completion `consumer` | us | kernel | Release `XSK_CONSUME` | kernel's acquire | descriptors before it are read; the chunks' ownership words |
//! | `flags` | kernel | us | kernel's plain store | Relaxed after a full fence | NEED_WAKEUP, a hint |
//!
//! The kernel's halves are in net/xdp/xsk_queue.h (`smp_load_acquire`,
//! `smp_store_release`). Indices run freely modulo 2³²; an entry's place is the
//! index modulo the size. The same code runs on mapped kernel rings and, in
//! tests, on plain memory with a test on the kernel's side.
//!
//! Rings survive their owner and are writable by it, so what an index claims is
//! checked each time: more entries than the ring has is [`Corrupt`], not a loop.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::crash_point::crash_point;

/// A ring whose indices cannot be true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Corrupt;

/// One entry of the receive and transmit rings (`struct xdp_desc`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Byte offset into the UMEM.
    pub(super) addr: u64,
    /// Bytes.
    pub(super) len: u32,
    /// [`CONTINUED`] or 0.
    pub(super) options: u32,
}

const _: () = assert!(size_of::<Descriptor>() == 16 && align_of::<Descriptor>() == 8);

/// The frame goes on in the next descriptor (`XDP_PKT_CONTD`).
pub(super) const CONTINUED: u32 = libc::XDP_PKT_CONTD;

/// Where a ring lies in memory. `T` is `u64` (an address) or [`Descriptor`].
#[derive(Clone, Copy)]
pub(super) struct RingMemory<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    size: u32,
    _entries: PhantomData<T>,
}

// SAFETY: what `RingMemory::new` was promised holds from any thread: indices are
// atomics, and entries are only touched by the side that owns them.
unsafe impl<T: Send> Send for RingMemory<T> {}

impl<T: Copy> RingMemory<T> {
    /// # Safety
    /// The pointers are aligned and valid for reads and writes for as long as
    /// the result or a copy of it is used; `entries` has `size` elements, a
    /// power of two; any bit pattern is a `T`; nobody else plays our side of
    /// this ring meanwhile.
    pub(super) unsafe fn new(
        producer: NonNull<AtomicU32>,
        consumer: NonNull<AtomicU32>,
        flags: NonNull<AtomicU32>,
        entries: NonNull<T>,
        size: u32,
    ) -> Self {
        debug_assert!(size.is_power_of_two());
        RingMemory {
            producer,
            consumer,
            flags,
            entries,
            size,
            _entries: PhantomData,
        }
    }

    pub(super) fn producer(&self) -> &AtomicU32 {
        // SAFETY: valid by the contract of `new`.
        unsafe { self.producer.as_ref() }
    }

    pub(super) fn consumer(&self) -> &AtomicU32 {
        // SAFETY: valid by the contract of `new`.
        unsafe { self.consumer.as_ref() }
    }

    pub(super) fn flags(&self) -> &AtomicU32 {
        // SAFETY: valid by the contract of `new`.
        unsafe { self.flags.as_ref() }
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    pub(super) fn read(&self, index: u32) -> T {
        let place = (index & (self.size - 1)) as usize;
        // SAFETY: place < size, so inside `entries` by the contract of `new`;
        // volatile, because the other side may be misbehaving in another process.
        unsafe { self.entries.as_ptr().add(place).read_volatile() }
    }

    pub(super) fn write(&self, index: u32, entry: T) {
        let place = (index & (self.size - 1)) as usize;
        // SAFETY: as in `read`.
        unsafe { self.entries.as_ptr().add(place).write_volatile(entry) }
    }

    fn needs_wakeup(&self) -> bool {
        // The kernel sets the flag, then looks at the producer; we stored the
        // producer, now look at the flag. Without a full fence both could miss.
        fence(Ordering::SeqCst);
        self.flags().load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// Our side of the fill or the transmit ring.
pub(super) struct Producer<T> {
    ring: RingMemory<T>,
    /// The index the next staged entry will have.
    staged: u32,
    /// What the kernel was told.
    published: u32,
}

impl<T: Copy> Producer<T> {
    /// Goes on where the ring stands.
    pub(super) fn adopt(ring: RingMemory<T>) -> Result<Self, Corrupt> {
        // Our predecessor's last store; it is dead, so it does not move.
        let published = ring.producer().load(Ordering::Acquire);
        let producer = Producer {
            ring,
            staged: published,
            published,
        };
        producer.in_ring()?;
        Ok(producer)
    }

    /// Published entries the kernel has not read yet.
    pub(super) fn in_ring(&self) -> Result<u32, Corrupt> {
        crash_point();
        // SYNC(XSK_KERNEL_CONSUMED): pairs with the kernel's release of its consumer index.
        let consumed = self.ring.consumer().load(Ordering::Acquire);
        let entries = self.published.wrapping_sub(consumed);
        if entries > self.ring.size() {
            Err(Corrupt)
        } else {
            Ok(entries)
        }
    }

    /// The index the next staged entry will have.
    pub(super) fn next_index(&self) -> u32 {
        self.staged
    }

    /// What was staged at an index, or a ring's size before.
    pub(super) fn entry(&self, index: u32) -> T {
        self.ring.read(index)
    }

    /// The producer index as the kernel knows it.
    pub(super) fn published(&self) -> u32 {
        self.published
    }

    /// Entries staged but not published.
    pub(super) fn staged(&self) -> u32 {
        self.staged.wrapping_sub(self.published)
    }

    /// Writes the next entry; the kernel sees it at [`Producer::publish`]. The
    /// caller has recorded the chunk's ownership with [`Producer::next_index`]
    /// and knows that there is room: never more chunks than places.
    pub(super) fn stage(&mut self, entry: T) {
        crash_point();
        self.ring.write(self.staged, entry);
        self.staged = self.staged.wrapping_add(1);
    }

    /// Hands everything staged to the kernel: one store, so all or nothing.
    pub(super) fn publish(&mut self) {
        if self.staged == self.published {
            return;
        }
        crash_point();
        // SYNC(XSK_PRODUCE): pairs with the kernel's acquire of the producer index.
        self.ring.producer().store(self.staged, Ordering::Release);
        self.published = self.staged;
        crash_point();
    }

    /// True if the kernel asked to be woken when there is work on this ring.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }

    /// Its number of places.
    pub(super) fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The ring itself, for checking.
    pub(super) fn memory(&self) -> &RingMemory<T> {
        &self.ring
    }
}

/// Our side of the receive or the completion ring.
pub(super) struct Consumer<T> {
    ring: RingMemory<T>,
    /// The first entry not released.
    released: u32,
}

impl<T: Copy> Consumer<T> {
    /// Goes on where the ring stands.
    pub(super) fn adopt(ring: RingMemory<T>) -> Result<Self, Corrupt> {
        // Our predecessor's last store; it is dead, so it does not move.
        let released = ring.consumer().load(Ordering::Acquire);
        let consumer = Consumer { ring, released };
        consumer.available()?;
        Ok(consumer)
    }

    /// Entries the kernel has published and we have not released.
    pub(super) fn available(&self) -> Result<u32, Corrupt> {
        crash_point();
        // SYNC(XSK_KERNEL_PRODUCED): pairs with the kernel's release of its producer index.
        let produced = self.ring.producer().load(Ordering::Acquire);
        let entries = produced.wrapping_sub(self.released);
        if entries > self.ring.size() {
            Err(Corrupt)
        } else {
            Ok(entries)
        }
    }

    /// Its number of places.
    pub(super) fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The entry `nth` after the last released one; the caller has seen that it
    /// is available.
    pub(super) fn peek(&self, nth: u32) -> T {
        self.ring.read(self.released.wrapping_add(nth))
    }

    /// Gives the first `count` entries' places back to the kernel. The chunks
    /// they name have been recorded OWNED before.
    pub(super) fn release(&mut self, count: u32) {
        if count == 0 {
            return;
        }
        self.released = self.released.wrapping_add(count);
        crash_point();
        // SYNC(XSK_CONSUME): pairs with the kernel's acquire of the consumer index.
        self.ring.consumer().store(self.released, Ordering::Release);
        crash_point();
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::FakeRing;
    use super::*;

    #[test]
    fn indices_wrap_and_entries_arrive_in_order() {
        let fake = FakeRing::<u64>::new(4);
        // The indices start three below the wrap.
        fake.set(u32::MAX - 2, u32::MAX - 2);
        let mut ours = Producer::adopt(fake.memory()).unwrap();
        let mut theirs = Consumer::adopt(fake.memory()).unwrap();
        for value in 0..20u64 {
            ours.stage(value);
            assert_eq!(theirs.available(), Ok(0));
            ours.publish();
            assert_eq!(ours.in_ring(), Ok(1));
            assert_eq!(theirs.available(), Ok(1));
            assert_eq!(theirs.peek(0), value);
            theirs.release(1);
            assert_eq!(ours.in_ring(), Ok(0));
        }
    }

    #[test]
    fn indices_that_cannot_be_true_are_refused() {
        let fake = FakeRing::<u64>::new(4);
        fake.set(5, 0);
        assert!(Producer::adopt(fake.memory()).is_err());
        assert!(Consumer::adopt(fake.memory()).is_err());
        fake.set(4, 0);
        let ours = Producer::adopt(fake.memory()).unwrap();
        let theirs = Consumer::adopt(fake.memory()).unwrap();
        // Later the other side's index jumps.
        fake.set(4, 5);
        assert_eq!(ours.in_ring(), Err(Corrupt));
        fake.set(1000, 0);
        assert_eq!(theirs.available(), Err(Corrupt));
    }
}
