//! `cargo xtask counts`: instructions of the hot paths, against a baseline that is committed.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use portolan_testbed::process;

use crate::steps::{self, Steps, cargo, root};
use crate::{build, setup};

/// Bound on counting everything: half a minute on two idle cores.
const COUNTING: Duration = Duration::from_secs(5 * 60);
/// Bound on asking the compiler its name.
const QUICK: Duration = Duration::from_secs(60);

/// Builds and counts; with `accept`, what is found becomes the baseline.
pub fn run(accept: bool) -> Result<()> {
    setup::run()?;
    let build = format!(
        "build --profile {} -p portolan-steps --bins",
        build::PROFILE
    );
    steps::run_to_end(&mut cargo(&build), build::BUILD)
        .with_context(|| format!("cargo {build}"))?;
    compare(accept)
}

/// As a step, after everything was built.
pub fn add(steps: &mut Steps) -> Result<bool> {
    steps.check("instruction counts", "cargo xtask counts", || {
        compare(false)
    })
}

fn compare(accept: bool) -> Result<()> {
    setup::require("valgrind", "valgrind", "counts instructions")?;
    let mut compiler = Command::new("rustc");
    compiler.arg("--version").current_dir(root());
    let compiler = process::run_ok(&mut compiler, QUICK)?;
    let mut command = Command::new(build::bin_dir()?.join("portolan-steps"));
    command
        .arg("counts")
        .arg(root().join("steps/instructions.toml"));
    command.args(["--compiler", compiler.trim()]);
    if accept {
        command.arg("--accept");
    }
    steps::run_to_end(&mut command, COUNTING).context("portolan-steps counts")
}
