//! `cargo xtask test`: every test there is.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use portolan_testbed::sweep;

use crate::build::{self, PROFILE};
use crate::setup;
use crate::steps::{Steps, cargo};

/// Bound on each of the three kinds of tests.
const TESTS: Duration = Duration::from_secs(20 * 60);
/// Clusters simulated each time; more by hand, with `cargo xtask sim`.
const SEEDS: &str = "200";
/// Bound on them.
const SIMULATION: Duration = Duration::from_secs(5 * 60);
/// Tests of programs find them here.
const BIN_DIR_VARIABLE: &str = "PORTOLAN_BIN_DIR";

/// Installs what is missing, builds, tests.
pub fn run() -> Result<()> {
    let mut steps = Steps::default();
    add(&mut steps)?;
    steps.finish()
}

/// The steps of testing, for `ci` too. Whether everything could be built.
pub fn add(steps: &mut Steps) -> Result<bool> {
    build::require_root()?;
    if !build::everything(steps)? {
        return Ok(false);
    }
    let tshark = || {
        let why = "reads captures with our dissector in a test";
        setup::require("tshark", "tshark", why)
    };
    // Without it that test fails, and says what it lacks.
    steps.check("tshark", "apt-get install tshark", tshark)?;
    let promtool = || {
        let why = "checks our metrics and alert rules in a test";
        setup::require("prometheus", "promtool", why)
    };
    let apt = "apt-get install --no-install-recommends prometheus";
    steps.check("promtool", apt, promtool)?;
    // `--workspace` in all of them: another selection would select other features and build everything again.
    // Whatever uses the network runs alone: two cores carry one end-to-end test.
    let mut simulation = Command::new(build::bin_dir()?.join("portolan-sim"));
    simulation.args(["--seeds", SEEDS]);
    steps.run("simulation", simulation, SIMULATION)?;
    for (title, selection) in [
        ("unit tests", "--lib --bins"),
        ("end-to-end tests", "--test * -- --test-threads=1"),
        ("documentation examples", "--doc -- --test-threads=1"),
    ] {
        let mut command = cargo(&format!(
            "test --profile {PROFILE} --workspace --no-fail-fast {selection}"
        ));
        command.env(BIN_DIR_VARIABLE, build::bin_dir()?);
        let result = steps.test(title, command, TESTS);
        // Tests that were killed leave their labs to whoever comes next; that is us.
        sweep()?;
        result?;
    }
    Ok(true)
}
