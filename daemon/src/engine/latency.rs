//! How long sends took: from the round of the duty cycle that took the token to the one that learned that the message was delivered.
//!
//! Counted for every message, so in a few instructions: classes are powers of two, found by the position of the highest bit, and the time is
//! that of the round, which is read anyway. A send that outlived its engine is not counted: when it was taken is not among what is durable.

use std::sync::atomic::Ordering;

use portolan_abi::ledger::{LATENCY_CLASSES, Ledger};
use portolan_transport::ident::Nanos;

/// The bits of a time that do not choose its class: the first ends at 1,024 ns.
const FINEST: u32 = 10;

/// Upper bounds of all classes but the last, nanoseconds.
pub fn bounds_ns() -> impl Iterator<Item = u64> {
    (0..LATENCY_CLASSES as u32 - 1).map(|class| 1 << (FINEST + class))
}

/// Counted by an engine since it started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latencies {
    /// The last: beyond every bound.
    counts: [u64; LATENCY_CLASSES],
    sum_ns: u64,
}

impl Latencies {
    /// One more send was delivered.
    #[inline]
    pub fn observe(&mut self, ns: Nanos) {
        let class = u64::BITS - (ns.saturating_sub(1) >> FINEST).leading_zeros();
        if let Some(count) = self
            .counts
            .get_mut(class.min(LATENCY_CLASSES as u32 - 1) as usize)
        {
            *count += 1;
        }
        self.sum_ns = self.sum_ns.wrapping_add(ns);
    }

    /// Goes on from what the ledger says.
    pub fn adopt(ledger: Ledger<'_>) -> Self {
        let header = ledger.header();
        Self {
            counts: std::array::from_fn(|i| header.send_latencies[i].load(Ordering::Relaxed)),
            sum_ns: header.send_latency_ns.load(Ordering::Relaxed),
        }
    }

    /// Copies them to the ledger.
    pub fn publish(&self, ledger: Ledger<'_>) {
        let header = ledger.header();
        for (word, count) in header.send_latencies.iter().zip(&self.counts) {
            word.store(*count, Ordering::Relaxed);
        }
        header.send_latency_ns.store(self.sum_ns, Ordering::Relaxed);
    }

    /// For scripts, like the supervisor's own histograms.
    pub fn document(&self) -> serde_json::Value {
        serde_json::json!({
            "bounds_ns": bounds_ns().collect::<Vec<_>>(),
            "counts": self.counts,
            "sum_ns": self.sum_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_on_a_bound_is_within_it() {
        let bounds: Vec<u64> = bounds_ns().collect();
        assert_eq!((bounds[0], bounds[20]), (1_024, 1_073_741_824));
        assert_eq!(bounds.len(), LATENCY_CLASSES - 1);
        for (class, bound) in bounds.iter().enumerate() {
            let mut latencies = Latencies::default();
            latencies.observe(bound - 1);
            latencies.observe(*bound);
            latencies.observe(bound + 1);
            assert_eq!(
                (latencies.counts[class], latencies.counts[class + 1]),
                (2, 1)
            );
            assert_eq!(latencies.sum_ns, 3 * bound);
        }
        let mut latencies = Latencies::default();
        latencies.observe(0);
        latencies.observe(u64::MAX);
        assert_eq!(
            (latencies.counts[0], latencies.counts[LATENCY_CLASSES - 1]),
            (1, 1)
        );
    }
}
