//! `cargo xtask deb`: the Debian package.
//!
//! cargo-deb puts it together (`[package.metadata.deb]` of daemon/Cargo.toml); what it cannot make is made before: man pages and completions,
//! written by the programs themselves, and programs without symbols.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::process;

use crate::steps::{self, cargo};
use crate::{build, setup};

/// cargo-deb, as its registry names it; built once below target/tools, within a minute.
const CARGO_DEB: &str = "3.8.0";
/// Bound on building cargo-deb.
const TOOL: Duration = Duration::from_secs(10 * 60);
/// Bound on everything that compiles nothing.
const QUICK: Duration = Duration::from_secs(3 * 60);

/// What may be said of it.
#[derive(clap::Args)]
pub struct Options {
    /// A version of Debian's form instead of the workspace's
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// Have lintian judge it
    #[arg(long)]
    lintian: bool,
}

/// Builds the package and says where it is.
pub fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    programs()?;
    let package = package(options.version.as_deref(), b"")?;
    println!(
        "{} ({} KiB, {:.0} s)",
        package.display(),
        fs::metadata(&package)?.len() >> 10,
        started.elapsed().as_secs_f64()
    );
    if options.lintian {
        lintian(&package)?;
    }
    Ok(())
}

/// Builds the programs as they are released.
pub fn programs() -> Result<()> {
    setup::run()?;
    let build = "build --release -p portoland -p portolan-cli --bins";
    steps::run_to_end(&mut cargo(build), build::BUILD).with_context(|| format!("cargo {build}"))
}

/// Makes a package of what is built. `more` is appended to the daemon, which makes it another build of the same code.
pub fn package(version: Option<&str>, more: &[u8]) -> Result<PathBuf> {
    setup::require(
        "dpkg-dev",
        "dpkg-shlibdeps",
        "finds what a package depends on",
    )?;
    let tool = cargo_deb()?;
    let directory = steps::root().join("target/deb");
    let stage = directory.join("stage");
    if stage.exists() {
        fs::remove_dir_all(&stage).context("target/deb/stage")?;
    }
    fs::create_dir_all(&stage)?;
    let release = build::bin_dir()?.with_file_name("release");
    for program in ["portoland", "portolan"] {
        let staged = stage.join(program);
        let mut strip = Command::new("strip");
        strip.arg("--strip-unneeded").arg("-o").arg(&staged);
        process::run_ok(strip.arg(release.join(program)), QUICK)?;
    }
    manual(&stage)?;
    let changelog = stage.join("changelog");
    fs::copy(steps::root().join("CHANGELOG.md"), &changelog)?;
    process::run_ok(Command::new("gzip").arg("-9n").arg(changelog), QUICK)?;
    if !more.is_empty() {
        let path = stage.join("portoland");
        let mut bytes = fs::read(&path)?;
        bytes.extend_from_slice(more);
        fs::write(path, bytes)?;
    }
    let mut command = Command::new(tool);
    command.args([
        "-p",
        "portoland",
        "--no-build",
        "--no-strip",
        "-q",
        "--output",
    ]);
    command.arg(&directory).current_dir(steps::root());
    if let Some(version) = version {
        command.args(["--deb-version", version]);
    }
    let said = process::run_ok(&mut command, QUICK)?;
    let path = said
        .lines()
        .map(str::trim)
        .rfind(|line| line.ends_with(".deb"));
    path.map(PathBuf::from)
        .context("cargo-deb names no package")
}

/// Man pages and completions.
fn manual(stage: &Path) -> Result<()> {
    let all = stage.join("manual");
    for program in ["portoland", "portolan"] {
        let mut write = Command::new(stage.join(program));
        process::run_ok(write.arg("manual").arg(&all), QUICK)?;
    }
    let (man, completions) = (stage.join("man"), stage.join("completions"));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    for entry in fs::read_dir(&all)? {
        let path = entry?.path();
        let name = path.file_name().context("a name")?;
        let is_page = path.extension().is_some_and(|one| one == "1" || one == "8");
        if is_page {
            let to = man.join(name);
            fs::rename(&path, &to)?;
            process::run_ok(Command::new("gzip").arg("-9n").arg(to), QUICK)?;
        } else {
            fs::rename(&path, completions.join(name))?;
        }
    }
    Ok(())
}

/// Installs cargo-deb below target/tools unless it is there.
fn cargo_deb() -> Result<PathBuf> {
    let root = steps::root().join("target/tools");
    let program = root.join("bin/cargo-deb");
    let there = || -> Result<bool> {
        let found = process::run(Command::new(&program).arg("--version"), QUICK)?;
        Ok(found.stdout.trim().ends_with(CARGO_DEB))
    };
    if program.exists() && there()? {
        return Ok(program);
    }
    println!("   building cargo-deb {CARGO_DEB} once, for target/tools");
    let install = format!(
        "install cargo-deb --version ={CARGO_DEB} --locked --debug --no-default-features --force"
    );
    let mut command = cargo(&install);
    command.arg("--root").arg(&root);
    steps::run_to_end(&mut command, TOOL)?;
    Ok(program)
}

/// lintian's errors are ours; its warnings are printed.
pub fn lintian(package: &Path) -> Result<()> {
    setup::require("lintian", "lintian", "judges Debian packages")?;
    let mut command = Command::new("lintian");
    command.args(["--fail-on", "error", "--no-tag-display-limit"]);
    let found = process::run(command.arg(package), QUICK)?;
    print!("{}", found.stdout);
    if !found.status.success() {
        bail!("lintian finds errors{}", found.stderr);
    }
    println!("lintian: no errors");
    Ok(())
}
