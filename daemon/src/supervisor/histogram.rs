//! Times, counted into a few classes: what Prometheus calls a histogram.

use serde_json::{Value, json};

/// Upper bounds of the classes, nanoseconds: from 10 microseconds to 10 seconds, three a decade.
pub const BOUNDS_NS: [u64; 19] = [
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// How often a time was in which class.
#[derive(Clone, Copy, Debug, Default)]
pub struct Histogram {
    /// The last: beyond every bound.
    counts: [u64; BOUNDS_NS.len() + 1],
    sum_ns: u64,
}

impl Histogram {
    /// One more time.
    pub fn observe(&mut self, ns: u64) {
        let class = BOUNDS_NS.partition_point(|bound| *bound < ns);
        if let Some(count) = self.counts.get_mut(class) {
            *count += 1;
        }
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// For scripts: the bounds, how many times were at most as long as each (and longer than the one before), last those beyond
    /// all; and their sum.
    pub fn document(&self) -> Value {
        json!({ "bounds_ns": BOUNDS_NS, "counts": self.counts, "sum_ns": self.sum_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_on_a_bound_is_within_it() {
        let mut histogram = Histogram::default();
        for ns in [0, 10_000, 10_001, 10_000_000_000, u64::MAX] {
            histogram.observe(ns);
        }
        let mut expected = [0; 20];
        (expected[0], expected[1], expected[18], expected[19]) = (2, 1, 1, 1);
        assert_eq!(histogram.counts, expected);
        assert_eq!(histogram.sum_ns, u64::MAX);
        let bounds = BOUNDS_NS.windows(2);
        assert!(bounds.into_iter().all(|pair| pair[0] < pair[1]));
    }
}
