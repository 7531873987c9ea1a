//! Heap bytes, counted per thread, so that a run can say what an endpoint holds.
//!
//! Only the program counts: it installs [`Counting`] as its allocator. Elsewhere [`of`] says 0.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, with a count.
pub struct Counting;

fn count(bytes: isize) {
    // A thread that ends frees after its count is gone.
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

// SAFETY: every method does what the system's allocator does, with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// The heap that what `take` returns holds: it is dropped, and what that frees is counted.
pub fn of<T>(take: impl FnOnce() -> T) -> usize {
    let taken = take();
    let before = LIVE.get();
    drop(taken);
    (before - LIVE.get()).max(0) as usize
}
