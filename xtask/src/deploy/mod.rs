//! `cargo xtask test-deploy`: the package on two Debian 12 systems with their own systemd, connected by a veth pair, as an administrator meets it.
//!
//! The systems are debootstrapped once and kept as target/deploy/bookworm.tar. The commands that begin are copied from docs/quickstart.md. Then traffic
//! flows in both directions, every byte checked, and meanwhile everything is done to the service that is done to services. All of it ends and is
//! removed whatever happens.

mod container;
mod load;
mod processors;
pub mod quick;
mod quickstart;
mod scenario;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{cancel, process};

use crate::{build, deb, setup, steps};
use container::{Container, Wire};
use processors::Processors;

/// The Debian that is installed.
const SUITE: &str = "bookworm";
/// Beside what a minimal system has: an init, and what people type.
const INCLUDE: &str = "systemd,systemd-sysv,dbus,iproute2";
/// Bound on installing a Debian system.
const DEBOOTSTRAP: Duration = Duration::from_secs(15 * 60);
/// The version that is upgraded to.
const NEXT: &str = "99.0.0-1";

/// What may be said of it.
#[derive(clap::Args)]
pub struct Options {
    /// Take the programs of target/release as they are
    #[arg(long)]
    no_build: bool,
    /// Leave the systems' files in target/deploy when something fails
    #[arg(long)]
    keep: bool,
}

/// Does it all.
pub fn run(options: &Options) -> Result<()> {
    build::require_root()?;
    let started = Instant::now();
    setup::run()?;
    setup::require("debootstrap", "debootstrap", "installs Debian systems")?;
    setup::require("systemd-container", "systemd-nspawn", "boots them")?;
    if !options.no_build {
        deb::programs()?;
    }
    let directory = steps::root().join("target/deploy");
    fs::create_dir_all(&directory)?;
    let base = base(&directory)?;
    let packages = packages(&directory)?;
    deb::lintian(&packages[0])?;
    let built = started.elapsed();

    let run = Run::new(&directory, options.keep)?;
    let result = run.go(&base, &packages);
    let kept = options.keep && result.is_err() && !cancel::requested();
    match (&result, kept) {
        (Err(_), true) => println!("kept: {}", run.directory.display()),
        _ => fs::remove_dir_all(&run.directory).context("cleaning up")?,
    }
    let all = started.elapsed();
    println!(
        "\n{} in {:.0} s (packages and systems {:.0} s, the rest {:.0} s)",
        if result.is_ok() { "passed" } else { "FAILED" },
        all.as_secs_f64(),
        built.as_secs_f64(),
        (all - built).as_secs_f64()
    );
    result
}

/// A minimal Debian system, installed once.
fn base(directory: &Path) -> Result<PathBuf> {
    let tar = directory.join(format!("{SUITE}.tar"));
    if tar.exists() {
        return Ok(tar);
    }
    println!(
        "   installing a minimal Debian {SUITE} once, for {}",
        tar.display()
    );
    let tree = tempfile::tempdir_in(directory)?;
    let mut command = Command::new("debootstrap");
    command.args(["--variant=minbase", &format!("--include={INCLUDE}"), SUITE]);
    process::run_ok(command.arg(tree.path()), DEBOOTSTRAP)?;
    // As on an installation medium: nothing to install from but what is brought.
    for rest in ["var/lib/apt/lists", "var/cache/apt/archives"] {
        let path = tree.path().join(rest);
        fs::remove_dir_all(&path)?;
        fs::create_dir_all(path.join("partial"))?;
    }
    let part = tar.with_extension("part");
    let mut pack = Command::new("tar");
    pack.arg("-cf")
        .arg(&part)
        .arg("--numeric-owner")
        .arg("-C")
        .arg(tree.path())
        .arg(".");
    process::run_ok(&mut pack, DEBOOTSTRAP)?;
    fs::rename(part, &tar)?;
    Ok(tar)
}

/// The package, and the one to upgrade to: another build of the same code.
fn packages(directory: &Path) -> Result<[PathBuf; 2]> {
    let mut all = Vec::new();
    for (version, more) in [(None, b"".as_slice()), (Some(NEXT), b"next".as_slice())] {
        let made = deb::package(version, more)?;
        let name = made.file_name().context("a name")?;
        let kept = directory.join(name);
        fs::rename(&made, &kept)?;
        all.push(kept);
    }
    <[PathBuf; 2]>::try_from(all).ok().context("two packages")
}

/// One run: its files, and names nobody else has.
struct Run {
    directory: PathBuf,
    names: [String; 2],
}

impl Run {
    fn new(directory: &Path, keep: bool) -> Result<Self> {
        let id = std::process::id();
        // What runs that were killed have left.
        for entry in fs::read_dir(directory)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(whose) = name.strip_prefix("run-") else {
                continue;
            };
            if !keep && !Path::new("/proc").join(whose).exists() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        let directory = directory.join(format!("run-{id}"));
        fs::create_dir_all(&directory)?;
        Ok(Self {
            directory,
            names: ["a", "b"].map(|end| format!("pdeploy{id}{end}")),
        })
    }

    fn go(&self, base: &Path, packages: &[PathBuf; 2]) -> Result<()> {
        let page = fs::read_to_string(steps::root().join(quickstart::PAGE))?;
        let commands = quickstart::commands(&page)?;
        // Dropped after the systems that use them.
        let _processors = Processors::remember()?;
        let _wire = Wire::new(self.names.clone(), ["192.0.2.1/24", "192.0.2.2/24"])?;
        let [one, two] = &self.names;
        let mut systems = [
            Container::unpack("node1", base, &self.directory, one)?,
            Container::unpack("node2", base, &self.directory, two)?,
        ];
        for system in &mut systems {
            let name = packages[0].file_name().context("a name")?;
            fs::copy(&packages[0], system.path("root").join(name))?;
            fs::create_dir_all(system.path("srv"))?;
            fs::copy(&packages[1], system.path("srv/next.deb"))?;
            system.boot()?;
        }
        let result = scenario::all(&mut systems, &commands);
        if result.is_err() && !cancel::requested() {
            for system in &systems {
                let script = "journalctl -u portoland -n 40 --no-pager -o cat; systemctl status portoland --no-pager -n 0";
                if let Ok(done) = system.run(script, Duration::from_secs(20)) {
                    println!(
                        "── {}'s journal\n{}{}",
                        system.name, done.stdout, done.stderr
                    );
                }
            }
        }
        if cancel::requested() {
            bail!("interrupted");
        }
        result
    }
}
