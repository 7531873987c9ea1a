//! Sleeping without missing a wake-up, between two processes.
//!
//! The sleeper announces itself, then looks once more; the waker publishes, then looks whether anyone announced. A sequentially
//! consistent fence between the two steps of each side makes it impossible that both miss the other.
//!
//! | word | writer | reader |
//! |---|---|---|
//! | `ClientHeader::waiting` | application; engine, to end a nap | engine |
//! | `EngineHeader::engine_sleeping` | engine | application |
//! | *sleeping* of a crossing ring | receiving engine | sending engine |
//!
//! An application has two ways of sleeping. On its doorbell, a file descriptor, it may sleep for as long as it likes, also on others and on
//! the daemon's connection. Or it *naps* on the word itself (futex(2)), a moment at a time, since then nobody tells it that the daemon is gone:
//! that takes two short system calls instead of four longer ones (socket and poll). Whoever wakes it takes the announcement back first, so that it cannot fall asleep after it was
//! woken; a waker that dies in between leaves it asleep until whoever comes next wakes it regardless ([`rouse`]), or its moment is over.

#[cfg(not(loom))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;

use crate::atomic::{AtomicU32, Ordering};

const AWAKE: u32 = 0;
/// Any other number means the same.
const AT_BELL: u32 = 1;
const NAPPING: u32 = 2;

/// Who is to be woken, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleeper {
    /// Nobody.
    Nobody,
    /// One that sleeps on its doorbell.
    AtBell,
    /// One that naps on the word ([`rouse`]).
    Napping,
}

/// Says that we are about to sleep. Afterwards the caller looks at its rings once more and only then sleeps on its doorbell.
pub fn announce(word: &AtomicU32) {
    // Swapped, so that it has its place in one order with what ends naps.
    word.swap(AT_BELL, Ordering::Relaxed);
    // SYNC(doorbell): our announcement before our look at the rings.
    fence(Ordering::SeqCst);
}

/// Says that we are about to nap. Afterwards the caller looks at its rings once more and only then naps.
pub fn announce_nap(word: &AtomicU32) {
    word.swap(NAPPING, Ordering::Relaxed);
    // SYNC(doorbell): as in `announce`.
    fence(Ordering::SeqCst);
}

/// Says that we are awake.
pub fn withdraw(word: &AtomicU32) {
    word.store(AWAKE, Ordering::Relaxed);
}

/// After publishing: must the doorbell be rung? A word that another process sets for no reason costs a needless ring, no more.
pub fn must_ring(word: &AtomicU32) -> bool {
    // SYNC(doorbell): what we published before our look at the announcement.
    fence(Ordering::SeqCst);
    word.load(Ordering::Relaxed) != AWAKE
}

/// After publishing to one that may nap: who is to be woken?
pub fn sleeper(word: &AtomicU32) -> Sleeper {
    // SYNC(doorbell): as in `must_ring`.
    fence(Ordering::SeqCst);
    match word.load(Ordering::Relaxed) {
        AWAKE => Sleeper::Nobody,
        NAPPING => Sleeper::Napping,
        _ => Sleeper::AtBell,
    }
}

/// Whether somebody is to be woken, without what makes that certain: a hint.
pub fn seems_asleep(word: &AtomicU32) -> bool {
    word.load(Ordering::Relaxed) != AWAKE
}

/// Takes back that somebody naps. What else it says stays: who sleeps on a doorbell by now would not be woken again.
fn end_nap(word: &AtomicU32) {
    let _ = word.compare_exchange(NAPPING, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
}

/// Wakes who naps on the word, whatever it says.
#[cfg(all(feature = "std", not(loom)))]
pub fn rouse(word: &AtomicU32) {
    // SYNC(doorbell): as in `must_ring`, for who did not ask `sleeper`.
    fence(Ordering::SeqCst);
    end_nap(word);
    // Shared memory of ours: what could fail is a word that is not there, and then nobody sleeps on it.
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), 1);
}

/// Naps on an announced word for at most so many nanoseconds. True: it was woken, or the announcement had been taken back; for no reason, perhaps, as in every
/// wait. False: the time passed, a signal came, or this thread may not nap.
#[cfg(all(feature = "std", not(loom)))]
pub fn nap(word: &AtomicU32, at_most_ns: u64) -> bool {
    use rustix::io::Errno;
    use rustix::thread::futex::{Flags, Timespec, wait};
    let at_most = Timespec {
        tv_sec: (at_most_ns / 1_000_000_000) as _,
        tv_nsec: (at_most_ns % 1_000_000_000) as _,
    };
    matches!(
        wait(word, Flags::empty(), NAPPING, Some(&at_most)),
        Ok(()) | Err(Errno::AGAIN)
    )
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    // Naps, with the other side publishing meanwhile; where the waker was slow, it ends the next nap, or meets one who sleeps on its doorbell by
    // then. Expect: a nap that was not for nothing ends, and what says that somebody sleeps on a doorbell is never taken back by a waker.
    #[test]
    fn loom_a_nap_ends_and_a_sleep_is_not_forgotten() {
        loom::model(|| {
            let (word, published) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let (of_waker, event) = (word.clone(), published.clone());
            let waker = thread::spawn(move || {
                event.store(1, Ordering::Release);
                let found = sleeper(&of_waker);
                if found == Sleeper::Napping {
                    end_nap(&of_waker);
                }
                found
            });
            announce_nap(&word);
            while published.load(Ordering::Acquire) == 0 {
                // As the kernel does: asleep only while the word says so.
                while word.load(Ordering::Relaxed) == NAPPING {
                    thread::yield_now();
                }
                announce_nap(&word);
            }
            announce(&word);
            waker.join().unwrap();
            assert_eq!(word.load(Ordering::Relaxed), AT_BELL);
        });
    }
}
