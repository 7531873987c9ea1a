//! Traffic between two systems that never rests: `allsize --verify`, again and again. It checks every byte, and that each message comes once and in
//! order; a run that fails is a failure of whatever was done meanwhile.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::process;

use super::container::Container;

/// Bound on one run: a few seconds, longer than any pause that is allowed.
const RUN: Duration = Duration::from_secs(60);
/// Sizes from one byte to many fragments and grants, a fraction of a second on an idle machine.
const ALLSIZE: &str = "portolan allsize --verify --max 64K --count 3 --timeout 30";

/// What went wrong in a run.
#[derive(Clone, Debug)]
struct Failure {
    by: String,
    said: String,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    runs: [AtomicU32; 2],
    failures: Mutex<Vec<Failure>>,
}

/// Two loops, one in each direction.
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Begins it.
    pub fn start(pair: [&Container; 2], names: [&str; 2]) -> Self {
        let shared = Arc::<Shared>::default();
        let [a, b] = pair;
        let [to_a, to_b] = names;
        let threads = [(0, a, to_b), (1, b, to_a)].map(|(index, from, to)| {
            let shared = Arc::clone(&shared);
            let script = format!("{ALLSIZE} {to}");
            let by = format!("{} -> {to}", from.name);
            let mut command = from.command(&script);
            std::thread::spawn(move || repeat(&shared, index, &by, &mut command))
        });
        Self {
            shared,
            threads: threads.into(),
        }
    }

    /// Waits until each direction has completed two runs more, so that one of them began after now; an error if any failed.
    pub fn goes_on(&self) -> Result<()> {
        let counts = || {
            self.shared
                .runs
                .each_ref()
                .map(|runs| runs.load(Ordering::Relaxed))
        };
        let before = counts();
        let end = Instant::now() + 2 * RUN;
        loop {
            self.fine()?;
            let now = counts();
            if now
                .iter()
                .zip(before)
                .all(|(now, before)| *now >= before + 2)
            {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("traffic stands still: {before:?} runs, then {now:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn fine(&self) -> Result<()> {
        let failures = self
            .shared
            .failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match failures.first() {
            None => Ok(()),
            Some(failure) => bail!("{}: {}", failure.by, failure.said),
        }
    }

    /// Ends it; runs completed. An error if any failed.
    pub fn stop(mut self) -> Result<u32> {
        self.end()?;
        self.fine()?;
        Ok(self
            .shared
            .runs
            .iter()
            .map(|runs| runs.load(Ordering::Relaxed))
            .sum())
    }

    fn end(&mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread
                .join()
                .ok()
                .context("a thread of the load panicked")?;
        }
        Ok(())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

fn repeat(shared: &Shared, index: usize, by: &str, command: &mut Command) {
    while !shared.stop.load(Ordering::Relaxed) {
        let said = match process::run(command, RUN) {
            Ok(done) if done.status.success() => {
                if let Some(runs) = shared.runs.get(index) {
                    runs.fetch_add(1, Ordering::Relaxed);
                }
                continue;
            }
            Ok(done) => format!("{}\n{}{}", done.status, done.stdout, done.stderr),
            Err(error) => format!("{error:#}"),
        };
        let mut failures = shared
            .failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        failures.push(Failure {
            by: by.to_owned(),
            said,
        });
        return;
    }
}
