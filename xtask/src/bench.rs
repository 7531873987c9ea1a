//! `cargo xtask bench`: Portolan, the limits of the machine and, with `--peers`, what people use today, compared.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::steps::{self, cargo, root};
use crate::{build, setup};

/// What is compared with other people's releases is one of ours: no checks of arithmetic, whole-program optimisation.
const PROFILE: &str = "release";
/// Bound on the comparison; a full one takes less than half an hour.
const COMPARING: Duration = Duration::from_secs(2 * 60 * 60);

/// Builds what is compared and what compares it, and runs it with these arguments.
pub fn run(arguments: &[String]) -> Result<()> {
    build::require_root()?;
    setup::run()?;
    if arguments.iter().any(|argument| argument == "--peers")
        && let Err(error) = setup::peers()
    {
        // The report says of each that it could not be built.
        eprintln!("   peers cannot be installed: {error:#}");
    }
    let packages = "-p portoland -p portolan-cli -p portolan-bench";
    let build = format!("build --profile {PROFILE} {packages} --bins");
    steps::run_to_end(&mut cargo(&build), build::BUILD)
        .with_context(|| format!("cargo {build}"))?;
    let programs = build::bin_dir()?.with_file_name(PROFILE);
    let mut command = Command::new(programs.join("portolan-bench"));
    command.arg("compare").args(arguments);
    for (form, ending) in [("json", "json"), ("html", "html"), ("markdown", "md")] {
        let option = format!("--{form}");
        if !arguments.iter().any(|a| a.starts_with(&option)) {
            let path = root().join(format!("target/bench/report.{ending}"));
            command.arg(option).arg(path);
        }
    }
    steps::run_to_end(&mut command, COMPARING).context("portolan-bench compare")
}
