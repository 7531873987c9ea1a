//! `cargo xtask train`: which way the daemon's branches go, for the compiler.
//!
//! Problem: what runs a million times a second and what runs once look alike to a compiler, so it puts them side by side.
//!
//! Idea: a daemon that counts its branches runs the benchmark's short cases; what it counted is committed, as `daemon/portoland.profdata`,
//! and each release is built with it (`.cargo/rustc`). So a release is still what `cargo build --release` makes, anywhere. A function that was
//! changed since, and all of them with another version of rustc, are built as without it: it costs nothing but what it would bring.
//!
//! Counters are memory that the process shares with a file (`%c`, LLVM's continuous mode): engines, which may open no file and mostly end by
//! SIGKILL, could not write them at their end. Values are not counted (`-disable-vp`), as there is no room for them in such a file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use portolan_testbed::process;
use rustix::fs::Mode;

use crate::steps::{self, cargo, root};
use crate::{build, setup};

/// What releases are built with.
const TRAINED: &str = "daemon/portoland.profdata";
/// The profile of releases.
const PROFILE: &str = "release";
/// Where the counters lie. Engines, which are another user, must be able to open them.
const COUNTERS: &str = "/tmp/portolan-train";
/// What the daemon is trained with.
const CASES: &[&str] = &[
    "pingpong-64",
    "pingpong-4k",
    "rate-64",
    "stream-4k",
    "stream-1M",
    "startup",
    "idle-adaptive",
];
/// Crates whose functions are kept: the others are built without it.
const KEPT: &str = "portoland|portolan_transport|portolan_abi";
/// Reads what rustc's LLVM writes and writes what all later ones read; the newest in Debian 12.
const TOOL: (&str, &str) = ("llvm-19", "llvm-profdata-19");
/// Bounds on training, and on the tool.
const TRAINING: Duration = Duration::from_secs(10 * 60);
const MERGING: Duration = Duration::from_secs(60);

/// Counts, and writes what releases are built with.
pub fn run() -> Result<()> {
    build::require_root()?;
    setup::run()?;
    setup::require(TOOL.0, TOOL.1, "merges the counters")?;
    let target = build::bin_dir()?
        .parent()
        .context("target directory")?
        .join("train");
    let programs = format!("build --profile {PROFILE} -p portolan-cli -p portolan-bench --bins");
    steps::run_to_end(&mut cargo(&programs), build::BUILD)
        .with_context(|| format!("cargo {programs}"))?;
    let counting = format!("build --profile {PROFILE} -p portoland --bins");
    let mut command = cargo(&counting);
    command.arg("--target-dir").arg(&target).env(
        "RUSTFLAGS",
        format!(
            "-Cprofile-generate={COUNTERS}%c -Cllvm-args=-runtime-counter-relocation -Cllvm-args=-disable-vp"
        ),
    );
    steps::run_to_end(&mut command, build::BUILD).with_context(|| format!("cargo {counting}"))?;

    let programs = target.join(PROFILE);
    let others = build::bin_dir()?.with_file_name(PROFILE);
    for name in ["portolan", "portolan-bench"] {
        fs::copy(others.join(name), programs.join(name)).with_context(|| format!("copy {name}"))?;
    }
    let counters = Path::new(COUNTERS);
    // What build scripts counted, and earlier training.
    let _ = fs::remove_dir_all(counters);
    fs::create_dir(counters).with_context(|| format!("{COUNTERS}, a new directory"))?;
    let all = fs::Permissions::from_mode(0o777);
    fs::set_permissions(counters, all).context(COUNTERS)?;
    // A supervisor makes the file, its engines use it.
    let mask = rustix::process::umask(Mode::empty());
    let mut command = Command::new(programs.join("portolan-bench"));
    command.args(["compare", "--subjects", "portolan", "--turns", "2"]);
    let trained = steps::run_to_end(command.args(CASES), TRAINING).context("portolan-bench");
    rustix::process::umask(mask);
    trained?;

    let mut merge = Command::new(TOOL.1);
    merge.args(["merge", "--sparse", &format!("--function={KEPT}"), "-o"]);
    process::run_ok(merge.arg(root().join(TRAINED)).arg(counters), MERGING)?;
    fs::remove_dir_all(counters).context(COUNTERS)?;
    println!("   written to {TRAINED}: releases are built with it from now on");
    Ok(())
}
