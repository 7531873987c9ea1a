//! Orders as they reach an actor.

use std::io::{BufRead, Write, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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
    words: Arc<Words>,
    jobs: Receiver<Job>,
    go: Receiver<()>,
}

/// What who works looks at; only the thread that listens writes it.
#[derive(Default)]
struct Words {
    phase: AtomicU32,
    /// How often it was told to be quiet, and how much was to come then, one more than it is; 0: not known.
    quiet: AtomicU32,
    expected: AtomicU64,
}

impl Orders {
    /// Begins to listen.
    pub fn listen() -> Self {
        let words = Arc::new(Words::default());
        let (tell_job, jobs) = channel();
        let (tell_go, go) = channel();
        let listener = Arc::clone(&words);
        std::thread::spawn(move || listen(&listener, &tell_job, &tell_go));
        Self { words, jobs, go }
    }

    /// How often it was told to be quiet since the process began, and how many messages are to come.
    pub fn quiet(&self) -> (u32, Option<u64>) {
        let count = self.words.quiet.load(Ordering::Acquire);
        let expected = self.words.expected.load(Ordering::Relaxed);
        (count, expected.checked_sub(1))
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
        match self.words.phase.load(Ordering::Relaxed) {
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
fn listen(words: &Words, jobs: &Sender<Job>, go: &Sender<()>) {
    let phase = &words.phase;
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
            Ok(Order::Quiet { expected }) => {
                let expected = expected.map_or(0, |count| count.saturating_add(1));
                words.expected.store(expected, Ordering::Relaxed);
                words.quiet.fetch_add(1, Ordering::Release);
                Phase::Quiet
            }
            Ok(Order::Stop) | Err(_) => Phase::Over,
        };
        phase.store(next as u32, Ordering::Relaxed);
    }
    phase.store(Phase::Over as u32, Ordering::Relaxed);
}
