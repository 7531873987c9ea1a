//! Numbers that follow from a seed, so that a campaign can be run again with the same choices.

use std::time::Duration;

use portolan_testbed::pattern::mix;

/// A generator: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { state: mix(seed) }
    }

    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// Below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// Up to `most`.
    pub fn span(&mut self, most: Duration) -> Duration {
        Duration::from_nanos(self.below(u64::try_from(most.as_nanos()).unwrap_or(u64::MAX)))
    }
}
