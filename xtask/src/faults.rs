//! `cargo xtask faults`: the fault campaigns.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::steps::{self, cargo, root};
use crate::{build, setup};

/// Bound on the campaigns: a calm of hours may be asked for.
const CAMPAIGNS: Duration = Duration::from_secs(24 * 60 * 60);

/// Builds what is hurt and what hurts it, and runs the campaigns with these arguments.
pub fn run(arguments: &[String]) -> Result<()> {
    build::require_root()?;
    setup::run()?;
    let packages = "-p portoland -p portolan-cli -p portolan-bench";
    let build = format!("build --profile {} {packages} --bins", build::PROFILE);
    steps::run_to_end(&mut cargo(&build), build::BUILD)
        .with_context(|| format!("cargo {build}"))?;
    let mut command = Command::new(build::bin_dir()?.join("portolan-bench"));
    command.arg("faults").args(arguments);
    let report = root().join("target/faults/report.json");
    if !arguments.iter().any(|a| a.starts_with("--json")) {
        command.arg("--json").arg(&report);
    }
    steps::run_to_end(&mut command, CAMPAIGNS).context("portolan-bench faults")
}
