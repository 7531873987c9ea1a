//! An engine's tables and heap stay within what its configuration says, whatever arrives.

use super::{Check, Usage, Verdict};

/// Heap of an endpoint that knows nobody.
const HEAP_FIXED: usize = 128 << 10;
/// Heap per peer's entry, with its queues and its name.
const HEAP_PER_PEER: usize = 8 << 10;
/// Heap per stream, with a window of messages accepted ahead.
const HEAP_PER_RECORD: usize = 24 << 10;
/// Heap per send that waits.
const HEAP_PER_SEND: usize = 1 << 10;

/// The checker.
#[derive(Default)]
pub struct Memory {
    /// The most of each that was ever seen: tables never shrink.
    records: usize,
    sends: usize,
}

impl Check for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn looked_at(&mut self, usage: &Usage) -> Verdict {
        let who = usage.engine;
        if usage.peers.0 > usage.peers.1 {
            return Err(format!(
                "{who:?} has {} peers, may have {}",
                usage.peers.0, usage.peers.1
            ));
        }
        if usage.records.0 > 2 * usage.records.1 {
            return Err(format!(
                "{who:?} has {} stream records, two tables of {}",
                usage.records.0, usage.records.1
            ));
        }
        self.records = self.records.max(usage.records.0);
        self.sends = self.sends.max(usage.sends);
        let bound = HEAP_FIXED
            + HEAP_PER_PEER * usage.peers.1.min(usage.peers.0 + 8)
            + HEAP_PER_RECORD * self.records
            + HEAP_PER_SEND * self.sends;
        if usage.heap > bound {
            return Err(format!(
                "{who:?} holds {} bytes of heap, more than {bound}: {usage:?}",
                usage.heap
            ));
        }
        Ok(())
    }
}
