//! `portolan-bench`: measurements on the real path, in laboratories. `cargo xtask` builds and runs it.

mod actor;
mod cases;
mod company;
mod compare;
mod distance;
mod faults;
mod host;
mod limits;
mod profiles;
mod report;
mod statistics;
mod subjects;
mod survival;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use portolan_testbed::cancel;

/// Measures Portolan on the real path.
#[derive(Parser)]
enum Arguments {
    /// Goodput and latency of every profile at several losses, over an impaired wire
    Profiles(profiles::Options),
    /// One-way latency with and without what an engine keeps for its successor
    Survival(survival::Options),
    /// Portolan and the limits of the machine, taking turns
    Compare(compare::Options),
    /// A process of a subject; the others start it
    #[command(hide = true)]
    Actor {
        /// What it is, as JSON
        role: String,
    },
    /// Engines hurt in every way under load; what was promised is checked
    Faults(faults::Options),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Actors end when their orders do, and by signals as anyone.
    let listening = match &arguments {
        Arguments::Actor { .. } => Ok(()),
        _ => listen_for_signals(),
    };
    let done = listening.and_then(|()| match arguments {
        Arguments::Profiles(options) => profiles::run(&options),
        Arguments::Survival(options) => survival::run(&options),
        Arguments::Faults(options) => faults::run(&options),
        Arguments::Compare(options) => compare::run(&options),
        Arguments::Actor { role } => actor::run(&role),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Told to stop, it takes its lab down first.
fn listen_for_signals() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, cancel::flag().clone()).context("signal handler")?;
    }
    Ok(())
}
