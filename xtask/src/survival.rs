//! `cargo xtask steps` and `cargo xtask survival`: that an engine's death costs nothing, and what that costs while nobody dies.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::steps::{self, cargo};
use crate::{build, setup};

/// Bound on stepping through everything.
const STEPPING: Duration = Duration::from_secs(4 * 60 * 60);
/// Bound on counting and measuring.
const MEASURING: Duration = Duration::from_secs(60 * 60);

fn built(what: &str, target: Option<&PathBuf>) -> Result<()> {
    let build = format!("build --profile {} {what} --bins", build::PROFILE);
    let mut command = cargo(&build);
    if let Some(target) = target {
        command.arg("--target-dir").arg(target);
    }
    steps::run_to_end(&mut command, build::BUILD).with_context(|| format!("cargo {build}"))
}

/// Builds and runs `portolan-steps step` with these arguments.
pub fn steps(arguments: &[String]) -> Result<()> {
    setup::run()?;
    built("-p portolan-steps", None)?;
    let mut command = Command::new(build::bin_dir()?.join("portolan-steps"));
    command.arg("step").args(arguments);
    steps::run_to_end(&mut command, STEPPING).context("portolan-steps step")
}

/// Builds everything twice, counts instructions, measures latencies.
pub fn run(arguments: &[String]) -> Result<()> {
    build::require_root()?;
    setup::run()?;
    setup::require("valgrind", "valgrind", "counts instructions")?;
    let with = build::bin_dir()?;
    let target = with.parent().context("target directory")?.join("volatile");
    let without = target.join(build::PROFILE);
    let programs = "-p portoland -p portolan-cli -p portolan-steps";
    built(&format!("{programs} -p portolan-bench"), None)?;
    let features = "--features portoland/volatile,portolan-steps/volatile";
    built(&format!("{programs} {features}"), Some(&target))?;

    let mut command = Command::new(with.join("portolan-steps"));
    command.arg("cost").arg(without.join("portolan-steps"));
    steps::run_to_end(&mut command, MEASURING).context("portolan-steps cost")?;
    let mut command = Command::new(with.join("portolan-bench"));
    command.arg("survival").arg(&without).args(arguments);
    steps::run_to_end(&mut command, MEASURING).context("portolan-bench survival")
}
