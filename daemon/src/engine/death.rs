//! How the kernel tells of this process's death, at once. An `unsafe` island.
//!
//! Problem: a pidfd becomes readable when a process is gone altogether, its memory included, and taking down the page tables of a UMEM and
//! some arenas takes the kernel longer than everything else about a takeover together: 0.5 ms for 32 MiB, 1.7 ms for 96 MiB (measured
//! with 4 KiB pages). Whoever takes over does not care for page tables: the rings have one user again as soon as the dead one's thread
//! can never return to user mode.
//!
//! Idea: the serving engine holds a *robust futex*, the ledger's death word ([`portolan_abi::ledger::LedgerHeader::death`]). A thread that
//! ends, whatever ended it, has the robust futexes it holds marked `FUTEX_OWNER_DIED` by the kernel, which wakes a waiter; that is
//! one of the first things of an exit, before its memory goes (`exit_mm_release` in the kernel's `kernel/fork.c`), 10 to 16 us after
//! SIGKILL whatever is mapped. The watchdog waits on that word. It is a hint, as an engine can write what it likes into its ledger: the
//! watchdog asks the kernel whether the process is exiting before it believes it, and the pidfd still says so in the end.
//!
//! Rejected: a helper process that shares the address space and keeps it alive (it doubles the processes and would have to be killed,
//! too); huge pages for the UMEM alone (arenas matter as much); waiting for the pidfd only.
//!
//! Invariant: an engine has one thread. The word names it, and its exit is the process's.

use std::sync::atomic::{AtomicU32, Ordering};

/// `FUTEX_WAITERS` of linux/futex.h: without it the kernel wakes nobody.
const WAITERS: u32 = 0x8000_0000;

/// `struct robust_list` of linux/futex.h: a ring of entries that begins and ends in the head.
#[repr(C)]
struct Entry {
    next: *const Entry,
}

/// `struct robust_list_head`.
#[repr(C)]
struct Head {
    list: Entry,
    /// From an entry to its futex.
    offset: libc::c_long,
    pending: *const Entry,
}

/// The ledger's death word in the hands of an engine that may come to hold it.
pub(super) struct DeathWord {
    word: &'static AtomicU32,
}

impl DeathWord {
    /// Has the kernel look at this word when the thread ends; as long as another thread's number is in it, it will leave it alone.
    pub(super) fn attach(word: &'static AtomicU32) -> Self {
        let entry: &'static mut Entry = Box::leak(Box::new(Entry {
            next: std::ptr::null(),
        }));
        let offset = word
            .as_ptr()
            .addr()
            .wrapping_sub(std::ptr::from_ref(entry).addr());
        let head: &'static mut Head = Box::leak(Box::new(Head {
            list: Entry {
                next: std::ptr::from_ref(entry),
            },
            offset: offset as libc::c_long,
            pending: std::ptr::null(),
        }));
        entry.next = &raw const head.list;
        // SAFETY: head and entry live as long as the process, are not changed any more, and form the ring the kernel expects; it replaces
        // the C library's list, which is empty: nothing here uses its robust mutexes. The offset leads to the ledger's word, mapped for
        // good. If the kernel refuses, nothing is lost but time.
        unsafe {
            libc::syscall(
                libc::SYS_set_robust_list,
                &raw const *head,
                size_of::<Head>(),
            )
        };
        Self { word }
    }

    /// Holds the word from now on: the first thing of a takeover.
    pub(super) fn hold(&self) {
        let thread = rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned();
        self.word.store(thread | WAITERS, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER_DIED: u32 = 0x4000_0000;

    // A thread that holds the word ends, another one that only attached ends, too. Expect: the first one's end shows, and only that.
    #[test]
    fn the_kernel_marks_the_word_of_who_holds_it() {
        let word: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
        let thread = std::thread::spawn(move || {
            let death = DeathWord::attach(word);
            death.hold();
            word.load(Ordering::Acquire)
        });
        let held = thread.join().unwrap();
        // `join` returns on the C library's word, which the kernel clears a moment later or earlier.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while word.load(Ordering::Acquire) & OWNER_DIED == 0 {
            assert!(
                std::time::Instant::now() < deadline,
                "the kernel said nothing"
            );
            std::thread::yield_now();
        }
        assert_eq!(word.load(Ordering::Acquire), OWNER_DIED | held & WAITERS);

        let someone = 1 | WAITERS;
        word.store(someone, Ordering::Release);
        std::thread::spawn(move || {
            DeathWord::attach(word);
        })
        .join()
        .unwrap();
        assert_eq!(word.load(Ordering::Acquire), someone);
    }
}
