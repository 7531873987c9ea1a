//! The kernel's side of rings in plain memory.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::ring::RingMemory;

/// A ring in plain memory, freed on drop.
pub(super) struct FakeRing<T> {
    memory: RingMemory<T>,
    start: NonNull<u8>,
    layout: Layout,
}

const HEAD: usize = 64;

impl<T: Copy> FakeRing<T> {
    pub(super) fn new(size: u32) -> Self {
        let layout = Layout::from_size_align(HEAD + size as usize * size_of::<T>(), 64).unwrap();
        // SAFETY: the layout is not empty; zeroes are valid for all that is in it.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        // SAFETY: inside the allocation and aligned; RingMemory is only used
        // while the FakeRing lives.
        let memory = unsafe {
            let index = |n: usize| start.add(4 * n).cast::<AtomicU32>();
            RingMemory::new(index(0), index(1), index(2), start.add(HEAD).cast(), size)
        };
        FakeRing {
            memory,
            start,
            layout,
        }
    }

    pub(super) fn memory(&self) -> RingMemory<T> {
        self.memory
    }

    pub(super) fn set(&self, producer: u32, consumer: u32) {
        self.memory.producer().store(producer, Ordering::Release);
        self.memory.consumer().store(consumer, Ordering::Release);
    }
}

impl<T> Drop for FakeRing<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}
