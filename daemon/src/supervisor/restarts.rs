//! When to start a child again: at once, unless it keeps dying.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many deaths …
const STORM_DEATHS: usize = 10;
/// … within so long are a storm.
const STORM_WINDOW: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The deaths of one child.
#[derive(Debug, Default)]
pub struct Restarts {
    recent: VecDeque<Instant>,
    wait: Option<Duration>,
    total: u64,
}

impl Restarts {
    /// Deaths so far.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// A death; says how long to wait before the next start.
    pub fn died(&mut self, now: Instant) -> Duration {
        self.total += 1;
        if let Some(last) = self.recent.back()
            && now.duration_since(*last) > STORM_WINDOW + self.wait.unwrap_or_default()
        {
            // It had recovered.
            self.wait = None;
        }
        self.recent.push_back(now);
        while self.recent.len() > STORM_DEATHS + 1 {
            self.recent.pop_front();
        }
        let storm = self.recent.len() > STORM_DEATHS
            && self
                .recent
                .front()
                .is_some_and(|first| now.duration_since(*first) <= STORM_WINDOW);
        self.wait = match self.wait {
            Some(wait) => Some((wait * 2).min(LONGEST_WAIT)),
            None => storm.then_some(FIRST_WAIT),
        };
        self.wait.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_slowed_down_and_forgiven() {
        let mut now = Instant::now();
        let mut restarts = Restarts::default();
        // Ten quick deaths: at once each time.
        for _ in 0..STORM_DEATHS {
            assert_eq!(restarts.died(now), Duration::ZERO);
            now += Duration::from_millis(10);
        }
        // The eleventh waits, and each further one longer, up to the bound.
        let mut last = Duration::ZERO;
        for _ in 0..8 {
            let wait = restarts.died(now);
            assert!(wait > last || wait == LONGEST_WAIT);
            last = wait;
            now += wait;
        }
        assert_eq!(last, LONGEST_WAIT);
        // It lived long enough: forgiven.
        now += LONGEST_WAIT + STORM_WINDOW + Duration::from_secs(1);
        assert_eq!(restarts.died(now), Duration::ZERO);
        assert_eq!(restarts.total(), STORM_DEATHS as u64 + 9);
    }

    #[test]
    fn rare_deaths_are_no_storm() {
        let mut now = Instant::now();
        let mut restarts = Restarts::default();
        for _ in 0..100 {
            assert_eq!(restarts.died(now), Duration::ZERO);
            now += Duration::from_millis(1100);
        }
    }
}
