//! `cargo xtask book`: the guides as a book (mdBook), its contents and links checked.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::build;
use crate::steps::{self, Steps, cargo};

/// Bound on making it.
const QUICK: Duration = Duration::from_secs(60);

/// Builds what makes it, and makes it.
pub fn run() -> Result<()> {
    let build = format!("build --profile {} -p portolan-book", build::PROFILE);
    steps::run_to_end(&mut cargo(&build), build::BUILD)
        .with_context(|| format!("cargo {build}"))?;
    steps::run_to_end(&mut program()?, QUICK).context("the book")
}

/// As a step, after everything was built.
pub fn add(steps: &mut Steps) -> Result<bool> {
    steps.run("book", program()?, QUICK)
}

fn program() -> Result<Command> {
    Ok(Command::new(build::bin_dir()?.join("portolan-book")))
}
