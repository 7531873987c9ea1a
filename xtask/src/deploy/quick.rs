//! What of the package can be checked in a moment, for `ci`: the units, the configuration, man pages and completions.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use portolan_testbed::{Lab, process};

use crate::{build, steps};

/// Bound on each program that is run.
const QUICK: Duration = Duration::from_secs(60);

/// All of it, with the programs that were built for tests.
pub fn check() -> Result<()> {
    let programs = build::bin_dir()?;
    let scratch = tempfile::tempdir()?;
    units(&programs, scratch.path())?;
    manual(&programs, scratch.path())?;
    configuration(scratch.path())
}

/// systemd finds nothing to say about the units, where there is one to ask.
fn units(programs: &Path, scratch: &Path) -> Result<()> {
    let daemon = programs.join("portoland");
    let mut names = Vec::new();
    for entry in fs::read_dir(steps::root().join("deploy/systemd"))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".service") {
            continue;
        }
        let text = fs::read_to_string(entry.path())?;
        let text = text.replace("/usr/bin/portoland", &daemon.display().to_string());
        let named = name.replace("@.", "@eth0.");
        fs::write(scratch.join(&name), text)?;
        names.push(scratch.join(named));
    }
    ensure!(names.len() == 2, "deploy/systemd has {} units", names.len());
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]).args(&names);
    let Ok(done) = process::run(&mut verify, QUICK) else {
        println!("   no systemd-analyze here: the units are not verified");
        return Ok(());
    };
    let said = done.stdout + &done.stderr;
    // Other units of this machine are not ours to judge.
    let ours: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("portoland"))
        .collect();
    ensure!(
        ours.is_empty(),
        "systemd-analyze verify: {}",
        ours.join("\n")
    );
    Ok(())
}

/// Every command has a page, and every shell its completions.
fn manual(programs: &Path, scratch: &Path) -> Result<()> {
    let to = scratch.join("manual");
    for program in ["portoland", "portolan"] {
        process::run_ok(
            Command::new(programs.join(program)).arg("manual").arg(&to),
            QUICK,
        )?;
    }
    for file in [
        "portoland.8",
        "portoland-check.8",
        "portolan.1",
        "portolan-ping.1",
        "portolan.bash",
        "_portolan",
        "portolan.fish",
        "portoland.bash",
    ] {
        let length = fs::metadata(to.join(file))
            .with_context(|| file.to_owned())?
            .len();
        ensure!(length > 100, "{file} has {length} bytes");
    }
    for hidden in ["portoland-engine.8", "portolan-manual.1"] {
        ensure!(!to.join(hidden).exists(), "{hidden} is nobody's business");
    }
    Ok(())
}

/// The configuration that is installed is one, up to what only the machine it is installed on has: a lab's node has an interface.
fn configuration(scratch: &Path) -> Result<()> {
    let lab = Lab::builder()
        .name("ptpk")
        .binaries(build::binaries()?)
        .build()?;
    let node = lab.node(1);
    let text = fs::read_to_string(steps::root().join("deploy/portolan.toml"))?;
    let text = text
        .replace("\"eth0\"", &format!("\"{}\"", node.interface()))
        .replace("user = \"portolan\"", "user = \"nobody\"")
        .replace("socket_group = \"portolan\"", "socket_group = \"nogroup\"")
        .replace("gid = \"portolan\"", "gid = \"nogroup\"");
    let file = scratch.join("portolan.toml");
    fs::write(&file, text)?;
    process::run_ok(node.portoland()?.arg("check").arg(&file), QUICK).map(drop)
}
