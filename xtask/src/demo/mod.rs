//! `cargo xtask demo`: two nodes, real traffic, an engine killed under load, and what came of it.

mod engine_kill;
mod job;
mod report;
mod scenario;
mod transfer;

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use portolan_testbed::Spec;

use crate::lab::{Carrier, Network};
use crate::{build, steps};
use report::Report;

/// The file of one run, in MiB, and of each run of the matrix.
const FILE_MIB: u64 = 1024;
const MATRIX_FILE_MIB: u64 = 64;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    network: Network,
    /// Size of the file sent, in MiB [default: 1024; with --matrix 64]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    file_mib: Option<u64>,
    /// MTU 1500 and 9000, each over UDP on IPv4, UDP on IPv6, and Ethernet
    #[arg(long, conflicts_with_all = ["mtu", "encap", "ipv6"])]
    matrix: bool,
}

impl Options {
    fn specs(&self) -> Result<Vec<Spec>> {
        if !self.matrix {
            return Ok(vec![self.network.spec(2)?]);
        }
        let carriers = [
            (Carrier::Udp, false),
            (Carrier::Udp, true),
            (Carrier::Ethernet, false),
        ];
        [1500, 9000]
            .into_iter()
            .flat_map(|mtu| carriers.map(|(encap, ipv6)| (mtu, encap, ipv6)))
            .map(|(mtu, encap, ipv6)| {
                let network = Network {
                    mtu,
                    encap,
                    ipv6,
                    ..self.network.clone()
                };
                network.spec(2)
            })
            .collect()
    }

    fn file_bytes(&self) -> u64 {
        let mib = self.file_mib.unwrap_or(if self.matrix {
            MATRIX_FILE_MIB
        } else {
            FILE_MIB
        });
        mib << 20
    }
}

/// The demo's files, beside the build: their place has room for that too.
struct Files {
    directory: PathBuf,
    /// Held while they are ours.
    _lock: File,
}

impl Files {
    /// An empty directory; what a killed demo left is removed.
    fn claim() -> Result<Self> {
        let target = steps::root().join("target");
        let directory = target.join("demo");
        let lock = File::create(target.join("demo.lock")).context("demo.lock")?;
        if lock.try_lock().is_err() {
            bail!("another demo of this checkout is running");
        }
        if directory.exists() {
            fs::remove_dir_all(&directory).context("files of an earlier demo")?;
        }
        fs::create_dir_all(&directory).context("directory of the demo's files")?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("{} cannot be removed: {error}", self.directory.display());
        }
    }
}

/// Shows it; an error unless everything was right.
pub fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    let specs = options.specs()?;
    build::require_root()?;
    report::title("Build");
    build::programs()?;
    let built = started.elapsed();
    println!("   built in {:.0} s", built.as_secs_f64());

    let files = Files::claim()?;
    let source = transfer::Source::make(&files.directory, options.file_bytes())?;

    let mut summary = Vec::new();
    for spec in specs {
        let name = format!("MTU {} · {}", spec.mtu, spec.encap);
        report::banner(&name);
        let mut report = Report::default();
        scenario::run(spec, &source, &files.directory, &mut report)?;
        summary.push((name, report));
    }

    report::banner("Summary");
    let mut failures = 0;
    for (name, report) in &summary {
        failures += report.failures().len();
        println!("   {name:<28} {}", report.line());
        for failure in report.failures() {
            println!("      ✗ {failure}");
        }
    }
    println!(
        "   {:.0} s in all, {:.0} s of it building",
        started.elapsed().as_secs_f64(),
        built.as_secs_f64()
    );
    if failures > 0 {
        bail!("{failures} of the things shown went wrong");
    }
    println!("   everything as it should be; nothing is left behind");
    Ok(())
}
