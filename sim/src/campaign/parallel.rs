//! Many seeds on several threads; every failure with the one command that repeats it.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::plan::Options;
use super::run::{Outcome, run};
use crate::checks::{Violation, take_violation};

/// A seed that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    pub seed: u64,
    pub violation: Violation,
}

/// What a campaign came to.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub seeds: u64,
    pub total: Outcome,
    pub failures: Vec<Failure>,
    pub took: Duration,
    /// The seed that took longest, and how long.
    pub slowest: (u64, Duration),
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From here on a panic is kept for [`attempt`] instead of printed.
pub fn keep_panics() {
    set_hook(Box::new(|info| {
        PANIC.set(Some(info.to_string()));
    }));
}

/// Runs one seed; an error says what it violated.
pub fn attempt(seed: u64, options: &Options, trace: bool) -> Result<Outcome, Violation> {
    take_violation();
    catch_unwind(AssertUnwindSafe(|| run(seed, options, trace))).map_err(|_| {
        let message = PANIC.take().unwrap_or_default();
        take_violation().unwrap_or(Violation {
            invariant: "contract",
            what: message,
        })
    })
}

/// Runs seeds `first..first + count` on `jobs` threads and calls `progress` now and then. Stops early after `most_failures`.
pub fn campaign(
    first: u64,
    count: u64,
    jobs: usize,
    options: Options,
    most_failures: usize,
    mut progress: impl FnMut(u64, &Report),
) -> Report {
    let started = Instant::now();
    let next = Arc::new(AtomicU64::new(first));
    let enough = Arc::new(AtomicBool::new(false));
    let report = Arc::new(Mutex::new(Report::default()));
    let work = || {
        let (next, report, enough) = (next.clone(), report.clone(), enough.clone());
        move || {
            while !enough.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count {
                    return;
                }
                let begun = Instant::now();
                let result = attempt(seed, &options, false);
                let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                report.add(seed, result, begun.elapsed());
                if report.failures.len() >= most_failures {
                    enough.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    let threads: Vec<_> = (0..jobs.max(1))
        .map(|_| std::thread::spawn(work()))
        .collect();
    while !threads.iter().all(std::thread::JoinHandle::is_finished) {
        std::thread::park_timeout(Duration::from_millis(200));
        progress(
            count,
            &report.lock().unwrap_or_else(PoisonError::into_inner),
        );
    }
    let mut report = report
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    report.failures.sort_by_key(|failure| failure.seed);
    report.took = started.elapsed();
    report
}

impl Report {
    fn add(&mut self, seed: u64, result: Result<Outcome, Violation>, took: Duration) {
        self.seeds += 1;
        if took > self.slowest.1 {
            self.slowest = (seed, took);
        }
        match result {
            Ok(outcome) => self.total.add(&outcome),
            Err(violation) => self.failures.push(Failure { seed, violation }),
        }
    }
}

impl Outcome {
    /// Adds up.
    pub fn add(&mut self, other: &Self) {
        self.messages += other.messages;
        self.delivered += other.delivered;
        self.switch_dropped += other.switch_dropped;
        self.lasted_ns += other.lasted_ns;
        self.tally.add(&other.tally);
    }
}
