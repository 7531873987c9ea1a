//! Orders as they reach an actor.

use std::io::{BufRead, Write, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, Result};

use super::{Answer, Job, Order};

/// How far a job is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not begun yet.
    Waiting,
    /// Under way.
    Running,
    /// Send no more.
    Quiet,
    /// Over.
    Over,
}

/// Orders from standard input. One word says how far the job at hand is to go; jobs wait in a queue.
pub struct Orders {
    phase: Arc<AtomicU32>,
    jobs: Receiver<Job>,
    go: Receiver<()>,
}

impl Orders {
    /// Begins to listen.
    pub fn listen() -> Self {
        let phase = Arc::new(AtomicU32::new(Phase::Waiting as u32));
        let (tell_job, jobs) = channel();
        let (tell_go, go) = channel();
        let listener = Arc::clone(&phase);
        std::thread::spawn(move || listen(&listener, &tell_job, &tell_go));
        Self { phase, jobs, go }
    }

    /// The next job; `None` when there will be no more.
    pub fn next(&self) -> Option<Job> {
        self.jobs.recv().ok()
    }

    /// Says that it is ready, and waits for the word to begin.
    pub fn ready(&self) -> Result<()> {
        self.answer(&Answer::Ready)?;
        self.go.recv().context("nobody gives orders any more")
    }

    /// How far the job is to go.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Waiting,
            1 => Phase::Running,
            2 => Phase::Quiet,
            _ => Phase::Over,
        }
    }

    /// Says something.
    pub fn answer(&self, answer: &Answer) -> Result<()> {
        let line = serde_json::to_string(answer)? + "\n";
        let mut out = stdout().lock();
        out.write_all(line.as_bytes()).context("standard output")?;
        out.flush().context("standard output")
    }
}

/// Until standard input ends; then everything is over.
fn listen(phase: &AtomicU32, jobs: &Sender<Job>, go: &Sender<()>) {
    for line in stdin().lock().lines() {
        let Ok(line) = line else { break };
        let next = match serde_json::from_str(&line) {
            Ok(Order::Job(job)) => {
                // Before the job can be seen: what was over is not over for it.
                phase.store(Phase::Waiting as u32, Ordering::Relaxed);
                let _ = jobs.send(job);
                continue;
            }
            Ok(Order::Go) => {
                phase.store(Phase::Running as u32, Ordering::Relaxed);
                let _ = go.send(());
                continue;
            }
            Ok(Order::Quiet) => Phase::Quiet,
            Ok(Order::Stop) | Err(_) => Phase::Over,
        };
        phase.store(next as u32, Ordering::Relaxed);
    }
    phase.store(Phase::Over as u32, Ordering::Relaxed);
}
