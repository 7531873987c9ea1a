//! `cargo xtask profiles`: the table of profiles on the real path.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::steps::{self, cargo, root};
use crate::{build, setup};

/// Bound on the measurement; with the defaults it takes five minutes.
const MEASURING: Duration = Duration::from_secs(60 * 60);

/// Builds what is measured and what measures, and runs it with these arguments.
pub fn run(arguments: &[String]) -> Result<()> {
    build::require_root()?;
    setup::run()?;
    let packages = "-p portoland -p portolan-cli -p portolan-wire -p portolan-bench";
    let build = format!("build --profile {} {packages} --bins", build::PROFILE);
    steps::run_to_end(&mut cargo(&build), build::BUILD)
        .with_context(|| format!("cargo {build}"))?;
    let program = build::bin_dir()?.join("portolan-bench");
    let mut command = std::process::Command::new(program);
    command.arg("profiles").args(arguments);
    if !arguments
        .iter()
        .any(|argument| argument.starts_with("--json"))
    {
        command
            .arg("--json")
            .arg(root().join("target/profiles/report.json"));
    }
    steps::run_to_end(&mut command, MEASURING).context("portolan-bench")
}
