//! Building the programs that tests, labs and the demo run.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use portolan_testbed::Binaries;

use crate::setup;
use crate::steps::{self, Steps, cargo};

/// The Cargo profile of everything that runs in a lab.
pub const PROFILE: &str = "lab";
/// Bound on a build from nothing.
pub const BUILD: Duration = Duration::from_secs(20 * 60);

/// `target/lab`: where cargo put this program, too.
pub fn bin_dir() -> Result<PathBuf> {
    let program = std::env::current_exe().context("path of the running program")?;
    let target = program.ancestors().nth(2).context("target directory")?;
    Ok(target.join(PROFILE))
}

/// The programs this repository builds.
pub fn binaries() -> Result<Binaries> {
    Ok(Binaries::in_directory(bin_dir()?))
}

/// Installs what is missing and builds the programs; an error when that fails.
pub fn programs() -> Result<()> {
    setup::run()?;
    let build = format!("build --profile {PROFILE} -p portoland -p portolan-cli --bins");
    steps::run_to_end(&mut cargo(&build), BUILD).with_context(|| format!("cargo {build}"))
}

/// Builds the wire of impaired labs, which needs what [`programs`] installs.
pub fn wire() -> Result<()> {
    setup::run()?;
    let build = format!("build --profile {PROFILE} -p portolan-wire --bins");
    steps::run_to_end(&mut cargo(&build), BUILD).with_context(|| format!("cargo {build}"))
}

/// The same as steps, together with every test program. Whether it succeeded.
pub fn everything(steps: &mut Steps) -> Result<bool> {
    if !steps.check("what this machine needs", "cargo xtask setup", setup::run)? {
        return Ok(false);
    }
    let build = format!("build --profile {PROFILE} --workspace --bins --tests --examples");
    steps.run("build", cargo(&build), BUILD)
}

/// Fails early where a lab cannot be made anyway.
pub fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("this makes network namespaces and loads eBPF programs: run it as root");
    }
    Ok(())
}
