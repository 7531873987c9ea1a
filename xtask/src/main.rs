//! `cargo xtask`: every habit of this repository, one command each.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use portolan_testbed::cancel;

mod bench;
mod book;
mod build;
mod ci;
mod counts;
mod coverage;
mod deb;
mod demo;
mod deploy;
mod failures;
mod faults;
mod fuzz;
mod lab;
mod profiles;
mod setup;
mod sim;
mod steps;
mod survival;
mod tests;
mod tidy;
mod train;

/// What a shell reports for a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Every habit of this repository, one command each.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Installs what building and testing need and this machine lacks (apt, as root)
    Setup,
    /// Makes two nodes, shows real traffic between them, kills an engine under load, cleans up
    Demo(demo::Options),
    /// Installs what is missing, builds, and runs every test
    Test,
    /// The guides in docs/ as a book in target/book, its contents and links checked
    Book,
    /// The Debian package
    Deb(deb::Options),
    /// Two Debian systems with systemd: the package installed, restarted, killed, upgraded, purged, under load
    TestDeploy(deploy::Options),
    /// Formatting, lints, tidy checks, documentation, ring models, then everything `test` does, and `counts`
    Ci,
    /// Checks the repository's own rules: file lengths, leftovers, the papers' table, a pure transport
    Tidy,
    /// Deterministic simulation: random clusters, faults and traffic from seeds; `--help` for the rest
    Sim(sim::Options),
    /// Measures every profile on the real path: goodput and latency at several losses
    Profiles {
        /// Arguments of `portolan-bench profiles`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Compares Portolan with what the machine gives, and with peers: `--quick`, `--peers`, names of cases
    Bench {
        /// Arguments of `portolan-bench compare`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Engines killed, hung, stopped, blocked and damaged under load, and what was promised checked
    Faults {
        /// Arguments of `portolan-bench faults`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Kills the engine after each instruction of its durable paths; `--complete` for all of them
    Steps {
        /// Arguments of `portolan-steps step`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// What it costs to survive an engine: instructions and latency, with and without
    Survival {
        /// Arguments of `portolan-bench survival`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs a daemon that counts its branches, for the compiler: what releases are built with from then on
    Train,
    /// Instructions of the hot paths under callgrind, compared with steps/instructions.toml; fails when one grew by more than 3 %
    Counts {
        /// Makes the baseline of what is counted now; the commit says why
        #[arg(long)]
        accept: bool,
    },
    /// Which lines of the transport its tests run; fails below 95 %
    Coverage(coverage::Options),
    /// Hostile input for everything that reads what others wrote
    Fuzz(fuzz::Options),
    /// A laboratory that stays up until it is taken down
    Lab {
        #[command(subcommand)]
        task: lab::Task,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match listen_for_signals().and_then(|()| run(arguments.task)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if cancel::requested() => {
            eprintln!("\ninterrupted; cleaned up");
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Setup => setup::run(),
        Task::Demo(options) => demo::run(&options),
        Task::Test => tests::run(),
        Task::Book => book::run(),
        Task::Deb(options) => deb::run(&options),
        Task::TestDeploy(options) => deploy::run(&options),
        Task::Ci => ci::run(),
        Task::Tidy => tidy::run(),
        Task::Sim(options) => sim::run(&options),
        Task::Profiles { arguments } => profiles::run(&arguments),
        Task::Bench { arguments } => bench::run(&arguments),
        Task::Faults { arguments } => faults::run(&arguments),
        Task::Steps { arguments } => survival::steps(&arguments),
        Task::Survival { arguments } => survival::run(&arguments),
        Task::Train => train::run(),
        Task::Counts { accept } => counts::run(accept),
        Task::Coverage(options) => coverage::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Lab { task } => lab::run(task),
    }
}

/// From here on Ctrl-C, a closed terminal and SIGTERM end waits, and what was made is taken down on the way out.
fn listen_for_signals() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, cancel::flag().clone()).context("signal handler")?;
    }
    Ok(())
}
