//! CLOCK_MONOTONIC, which every process of the machine reads alike: what a daemon says about a recovery is compared with our own times.

use std::time::Duration;

use rustix::thread::{ClockId as SleepClock, clock_nanosleep_absolute};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC.
pub fn now_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// Nanoseconds this thread has run.
pub fn thread_cpu_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::ThreadCPUTime))
}

fn nanoseconds(time: Timespec) -> u64 {
    (time.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_nsec as u64)
}

/// Sleeps until CLOCK_MONOTONIC says so. Woken early by nothing but a signal.
pub fn sleep_until(ns: u64) {
    let until = Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as _,
    };
    // Interrupted: whoever paces looks at the clock again.
    let _ = clock_nanosleep_absolute(SleepClock::Monotonic, &until);
}

/// A span in nanoseconds.
pub fn ns(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
