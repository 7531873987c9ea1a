//! The sign of life a service manager asks for (`WatchdogSec=` of the unit): a supervisor whose loop does not come round is killed by its
//! manager and started again, while its engines go on.

use std::time::{Duration, Instant};

use super::Supervisor;
use super::poll::Timer;

/// What the manager says: microseconds after which it gives us up (sd_watchdog_enabled(3)).
pub(super) const VARIABLE: &str = "WATCHDOG_USEC";

/// How often a sign is due, if any: with room for one that is late.
pub(super) fn every() -> Option<Duration> {
    interval(std::env::var(VARIABLE).ok().as_deref())
}

fn interval(text: Option<&str>) -> Option<Duration> {
    let bound: u64 = text?.parse().ok()?;
    (bound > 0).then(|| Duration::from_micros(bound) / 3)
}

impl Supervisor {
    /// Gives a sign of life, and sees to the next one.
    pub(super) fn give_sign_of_life(&mut self, now: Instant) {
        if let Some(every) = self.sign_of_life_every {
            self.store.alive();
            self.poll.set_timer(now + every, Timer::Alive);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_signs_within_the_bound() {
        assert_eq!(interval(Some("30000000")), Some(Duration::from_secs(10)));
        for nothing in [None, Some("0"), Some(""), Some("soon"), Some("-1")] {
            assert_eq!(interval(nothing), None);
        }
    }
}
