//! A copy of this process that does one thing, instruction by instruction, and can be killed after any of them.
//!
//! Problem: which memories can a death leave? Idea: all that matters of an engine's death is the shared memory at that instant, so the
//! copy is stepped through the work once (ptrace), and the memory looked at after each instruction; every memory that differs from the
//! one before is kept. That a real death leaves one of these is shown by real deaths: a fresh copy is stepped some way and killed. Copies
//! are forks and take the same steps, but for those of the allocator, whose lists our own notes change between one fork and the next.

use std::collections::HashSet;

use anyhow::{Context, Result, bail};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use portoland::engine::conversation::{Image, Memory};

/// Instructions after which something is wrong with the work, not with the patience.
const ENDLESS: u64 = 50_000_000;

/// A copy of this process, stopped before its work.
struct Tracee {
    pid: Pid,
}

/// One step.
enum Step {
    Done,
    More,
}

impl Tracee {
    /// The copy will do `work` and nothing else.
    fn start<R>(work: impl FnOnce() -> R) -> Result<Self> {
        // SAFETY: this process has one thread, so the copy may do anything.
        let forked = unsafe { fork() }.context("fork")?;
        let pid = match forked {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                let traced = ptrace::traceme().and_then(|()| raise(Signal::SIGSTOP));
                if traced.is_ok() {
                    std::mem::forget(work());
                    // Says that it is done; it is killed then.
                    let _ = raise(Signal::SIGSTOP);
                }
                std::process::abort();
            }
        };
        let tracee = Self { pid };
        match waitpid(pid, None).context("waiting for the copy")? {
            WaitStatus::Stopped(_, Signal::SIGSTOP) => Ok(tracee),
            other => bail!("the copy began with {other:?}"),
        }
    }

    fn step(&self) -> Result<Step> {
        ptrace::step(self.pid, None).context("stepping")?;
        match waitpid(self.pid, None).context("waiting for a step")? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => Ok(Step::More),
            WaitStatus::Stopped(_, Signal::SIGSTOP) => Ok(Step::Done),
            other => bail!("the copy went wrong: {other:?}"),
        }
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // A copy that is gone already is gone.
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, None);
    }
}

/// A piece of work, instruction by instruction.
#[derive(Debug)]
pub struct Trace {
    /// How many there were.
    pub instructions: u64,
    /// Memories that differ from their predecessor, with the instruction that left them; the first one is how it began.
    pub memories: Vec<(u64, Image)>,
    /// Deaths by SIGKILL.
    pub killed: u64,
}

/// Steps a copy through the work. The memory is then as if the work had been done.
pub fn trace<R>(memory: &Memory, work: impl FnOnce() -> R) -> Result<Trace> {
    let mut image = memory.image();
    let rest = memory.rest();
    let mut trace = Trace {
        instructions: 0,
        memories: vec![(0, image.clone())],
        killed: 0,
    };
    let tracee = Tracee::start(work)?;
    while let Step::More = tracee.step()? {
        trace.instructions += 1;
        if memory.refresh(&mut image) {
            trace.memories.push((trace.instructions, image.clone()));
        }
        if trace.instructions > ENDLESS {
            bail!("no end after {ENDLESS} instructions");
        }
    }
    if memory.rest() != rest {
        bail!("the ledger changed where nobody looked");
    }
    Ok(trace)
}

/// Kills a fresh copy after each of these instructions of the work, from the memory it began with. What it leaves must be among what
/// was seen when stepping past.
pub fn kill_after<R>(
    memory: &Memory,
    trace: &Trace,
    instructions: impl Iterator<Item = u64>,
    work: impl Fn() -> R,
) -> Result<u64> {
    let mut killed = 0;
    let begin = trace.memories.first().map(|(_, image)| image.clone());
    let begin = begin.unwrap_or_default();
    let seen: HashSet<&Image> = trace.memories.iter().map(|(_, image)| image).collect();
    for instruction in instructions {
        memory.restore(&begin);
        let tracee = Tracee::start(&work)?;
        for _ in 0..instruction {
            if let Step::Done = tracee.step()? {
                break;
            }
        }
        drop(tracee);
        killed += 1;
        if !seen.contains(&memory.image()) {
            bail!(
                "killed after instruction {instruction}, it left a memory that stepping past did not show"
            );
        }
    }
    memory.restore(&begin);
    Ok(killed)
}
