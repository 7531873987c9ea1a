//! `cargo xtask sim`: builds the simulator and runs it; with `--mutants`, against planted bugs.

mod mutants;

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::{self, PROFILE};
use crate::steps::{self, cargo};

/// What follows `sim` goes to the simulator as it is.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    /// `--seeds N`, `--seed S`, `--profile P`, `--nodes N`, `--jobs J`, `--json`, `--trace`, or `incast`, `all-to-all`, `profiles`; or
    /// `--mutants [NAME…]`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds it, runs it, and fails as it does.
pub fn run(options: &Options) -> Result<()> {
    if let Some((first, only)) = options.arguments.split_first()
        && first == "--mutants"
    {
        return mutants::run(only);
    }
    let build = format!("build --quiet --profile {PROFILE} -p portolan-sim --bin portolan-sim");
    steps::run_to_end(&mut cargo(&build), build::BUILD)
        .with_context(|| format!("cargo {build}"))?;
    let program = build::bin_dir()?.join("portolan-sim");
    let status = Command::new(&program)
        .args(&options.arguments)
        .status()
        .with_context(|| program.display().to_string())?;
    if !status.success() {
        bail!("the simulator ended with {status}");
    }
    Ok(())
}
