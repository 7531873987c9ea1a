//! `portolan-steps`: what only the program as it is built can show of the engine.
//!
//! `step` kills the engine after each instruction of its durable paths and checks that nothing is lost or doubled; `ping-pong` does
//! nothing but send messages back and forth, to be run under an instruction counter; `cost` does that, with and without what
//! survives an engine; `counts` counts the hot paths one by one, and compares.

mod callgrind;
mod cost;
mod counts;
mod paths;
mod tracee;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use portoland::engine::conversation::{Memories, PingPong};

/// Steps through the engine's code, or counts it.
#[derive(Parser)]
enum Arguments {
    /// Kills the engine after each instruction of accept, commit, complete and adopt
    Step {
        /// Every script and every takeover instead of a few
        #[arg(long)]
        complete: bool,
        /// Only scripts of this name, all there is of them
        #[arg(long, value_name = "NAME")]
        script: Vec<String>,
        /// Besides looking at the memory after each instruction: a real SIGKILL after every so many
        #[arg(long, default_value_t = 10_007)]
        kill_every: usize,
    },
    /// Messages of 64 bytes back and forth between two engines in this process
    PingPong {
        /// How many each way
        #[arg(long, default_value_t = 1000)]
        messages: usize,
    },
    /// Instructions per message with and without what survives an engine, counted by valgrind
    Cost {
        /// This program, built with the feature `volatile`
        without: PathBuf,
    },
    /// Instructions of the hot paths, counted by valgrind and compared with a baseline
    Counts(counts::Options),
    /// One case of `counts`, to be run under an instruction counter
    Count {
        /// Its name
        case: String,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse() {
        Arguments::Step {
            complete,
            script,
            kill_every,
        } => step(complete, &script, kill_every),
        Arguments::PingPong { messages } => {
            let memories = Memories::default();
            PingPong::new(&memories, messages).run();
            Ok(())
        }
        Arguments::Cost { without } => cost::print(&without),
        Arguments::Counts(options) => counts::compare(&options),
        Arguments::Count { case } => counts::run_case(&case),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Tracer and tracee take turns: on one core that is a switch, on two it is a wake-up.
fn stay_on_one_core() -> Result<()> {
    let mine = Pid::from_raw(0);
    let cores = sched_getaffinity(mine)?;
    let first = (0..CpuSet::count()).find(|core| cores.is_set(*core).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(first.context("no core")?)?;
    Ok(sched_setaffinity(mine, &one)?)
}

fn step(complete: bool, only: &[String], kill_every: usize) -> Result<()> {
    stay_on_one_core()?;
    let started = Instant::now();
    let complete = complete || !only.is_empty();
    let extent = paths::Extent {
        complete,
        kill_every,
        kill_around: if complete { 4 } else { 8 },
        adopt_every: if complete { 4 } else { 16 },
    };
    let mut scripts = extent.scripts();
    let known: Vec<&str> = scripts.iter().map(|script| script.name).collect();
    if let Some(unknown) = only.iter().find(|name| !known.contains(&name.as_str())) {
        bail!(
            "there is no script {unknown:?}; there are {}",
            known.join(", ")
        );
    }
    scripts.retain(|script| only.is_empty() || only.iter().any(|name| name == script.name));
    let tallies = paths::search(extent, &scripts)?;
    println!(
        "{:<22}{:>8}{:>14}{:>10}{:>9}",
        "path", "stepped", "instructions", "memories", "killed"
    );
    let mut all = paths::Tally::default();
    for (name, tally) in &tallies {
        println!(
            "{name:<22}{:>8}{:>14}{:>10}{:>9}",
            tally.paths, tally.instructions, tally.memories, tally.killed
        );
        all.paths += tally.paths;
        all.instructions += tally.instructions;
        all.memories += tally.memories;
        all.killed += tally.killed;
    }
    println!(
        "{:<22}{:>8}{:>14}{:>10}{:>9}",
        "all", all.paths, all.instructions, all.memories, all.killed
    );
    println!(
        "no instruction at which a kill loses or doubles a message; {:.1} s",
        started.elapsed().as_secs_f64()
    );
    Ok(())
}
