//! Sleeping without missing a wake-up, between two processes.
//!
//! The sleeper announces itself, then looks once more; the waker publishes, then looks whether anyone announced. A sequentially
//! consistent fence between the two steps of each side makes it impossible that both miss the other.
//!
//! | word | writer | reader |
//! |---|---|---|
//! | `ClientHeader::waiting` | application | engine |
//! | `EngineHeader::engine_sleeping` | engine | application |
//! | *sleeping* of a crossing ring | receiving engine | sending engine |

#[cfg(not(loom))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;

use crate::atomic::{AtomicU32, Ordering};

/// Says that we are about to sleep. Afterwards the caller looks at its rings once more and only then sleeps on its doorbell.
pub fn announce(word: &AtomicU32) {
    word.store(1, Ordering::Relaxed);
    // SYNC(doorbell): our announcement before our look at the rings.
    fence(Ordering::SeqCst);
}

/// Says that we are awake.
pub fn withdraw(word: &AtomicU32) {
    word.store(0, Ordering::Relaxed);
}

/// After publishing: must the doorbell be rung? A word that another process sets for no reason costs a needless ring, no more.
pub fn must_ring(word: &AtomicU32) -> bool {
    // SYNC(doorbell): what we published before our look at the announcement.
    fence(Ordering::SeqCst);
    word.load(Ordering::Relaxed) != 0
}
