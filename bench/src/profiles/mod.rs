//! The table of profiles: how much of its goodput and of its latency each keeps when the wire loses frames.
//!
//! Two nodes on this machine, an impaired wire between them. For each profile the daemons are started with it; for each loss three
//! things are measured in turn: goodput of messages that fit into a frame, goodput of long ones, and one-way latency of short ones at
//! a rate far below what the path carries, so that what is seen is the time to recover and not a queue.
//!
//! A machine's noise is larger than many differences here, so the profiles take turns, in another order each round, and what is
//! reported is the median of the rounds. All profiles have the same adaptive timer unless `--set` says otherwise.

pub mod load;
mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use portolan::Node;
use portolan_testbed::{Impairment, Lab, cancel};
use portolan_transport::policy::Profile;

use crate::company::Company;

use load::Pair;
use report::{Cell, Report, Settings};

/// More than the buffer before a link of 100 Mbit/s takes to empty.
const DRAINED_AFTER: Duration = Duration::from_millis(200);

/// What is measured and how.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Rounds; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Losses, in percent of the frames
    #[arg(long, value_delimiter = ',', default_value = "0,0.01,0.1,1,5,10")]
    losses: Vec<f64>,
    /// Profiles [default: all]
    #[arg(long, value_delimiter = ',', value_parser = profile)]
    profiles: Vec<Profile>,
    /// How long short messages' goodput and latency are measured, in milliseconds each
    #[arg(long, default_value_t = 300)]
    measure_ms: u64,
    /// How long the goodput of long messages is measured, in milliseconds: those that are half there at its beginning or end should not matter
    #[arg(long, default_value_t = 1000)]
    long_ms: u64,
    /// Bytes of a short message
    #[arg(long, default_value_t = 1024)]
    short_bytes: usize,
    /// Bytes of a long message
    #[arg(long, default_value_t = 65_536)]
    long_bytes: usize,
    /// Short messages per second while latency is measured
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..))]
    latency_rate: u32,
    /// MTU in bytes
    #[arg(long, default_value_t = 1500)]
    mtu: u32,
    /// How long every frame travels at least, in microseconds
    #[arg(long, default_value_t = 0)]
    delay_us: u32,
    /// Rate of the link in Mbit/s; 0: what the machine carries
    #[arg(long, default_value_t = 0)]
    rate_mbit: u64,
    /// Changes a field of every profile, as `rto_min_us=1000`
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Also writes the report here, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn profile(name: &str) -> Result<Profile, String> {
    let names: Vec<&str> = Profile::ALL.iter().map(|profile| profile.name()).collect();
    Profile::named(name).ok_or_else(|| format!("one of {}", names.join(", ")))
}

impl Options {
    fn impairment(&self, percent: f64) -> Impairment {
        Impairment {
            loss: percent / 100.0,
            delay_us: self.delay_us,
            rate_bps: self.rate_mbit * 1_000_000,
            ..Impairment::default()
        }
    }

    /// The daemons' configuration for a profile.
    fn overrides(&self, profile: Profile) -> String {
        let changes = self.set.join("\n");
        format!("[transport]\nprofile = \"{}\"\n{changes}\n", profile.name())
    }
}

/// Measures and prints the tables.
///
/// # Errors
/// What kept it from measuring.
pub fn run(options: &Options) -> Result<()> {
    let profiles = if options.profiles.is_empty() {
        Profile::ALL.to_vec()
    } else {
        options.profiles.clone()
    };
    let company = Company::meet();
    let began = Instant::now();
    let lab = Lab::builder()
        .mtu(options.mtu)
        .impaired(options.impairment(0.0));
    let lab = lab.build()?;
    let mut report = Report::new(
        Settings {
            mtu: options.mtu,
            delay_us: options.delay_us,
            rate_mbit: options.rate_mbit,
            short_bytes: options.short_bytes,
            long_bytes: options.long_bytes,
            latency_rate: options.latency_rate,
            measure_ms: options.measure_ms,
            long_ms: options.long_ms,
            rounds: options.rounds,
            set: options.set.clone(),
        },
        &options.losses,
    );
    let turns = profiles.len() * options.rounds as usize;
    for round in 0..options.rounds as usize {
        for turn in 0..profiles.len() {
            let profile = profiles[(turn + round) % profiles.len()];
            let done = round * profiles.len() + turn;
            let left = match done {
                0 => String::new(),
                _ => {
                    let each = began.elapsed() / done as u32;
                    format!(
                        ", about {} s left",
                        (each * (turns - done) as u32).as_secs()
                    )
                }
            };
            eprintln!(
                "round {} of {}: {}{left}",
                round + 1,
                options.rounds,
                profile.name()
            );
            let cells = measure(&lab, options, profile)
                .with_context(|| format!("profile {}", profile.name()))?;
            for (loss, cell) in options.losses.iter().zip(cells) {
                report.add(profile.name(), *loss, cell);
            }
        }
    }
    report.missed = lab.wire().counters()?.missed;
    lab.remove()?;
    report.took_s = began.elapsed().as_secs();
    print!("{}", report.markdown());
    company.warn();
    if let Some(path) = &options.json {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let text = serde_json::to_string_pretty(&report.json())?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
        eprintln!("written to {}", path.display());
    }
    Ok(())
}

/// One profile at every loss.
fn measure(lab: &Lab, options: &Options, profile: Profile) -> Result<Vec<Cell>> {
    lab.wire().set(&options.impairment(0.0))?;
    let overrides = options.overrides(profile);
    let _daemons = [
        lab.node(1).start_daemon(&overrides)?,
        lab.node(2).start_daemon(&overrides)?,
    ];
    let nodes = [1, 2].map(|node| Node::attach(lab.node(node).socket()));
    let [one, two] = nodes;
    let mut pair = Pair::new(one?, two?);
    // The nodes get to know each other, and each other's round trip, on a good wire.
    let measured = Duration::from_millis(options.measure_ms);
    let long = Duration::from_millis(options.long_ms);
    pair.goodput(options.short_bytes, measured / 4)?;
    let mut cells = Vec::new();
    for (number, &loss) in options.losses.iter().enumerate() {
        if cancel::requested() {
            bail!("interrupted");
        }
        let impairment = options.impairment(loss).seeded(number as u64);
        lab.wire().set(&impairment)?;
        let short_bps = pair.goodput(options.short_bytes, measured)?;
        let long_bps = pair.goodput(options.long_bytes, long)?;
        // What still stands before a slow link is not the next messages' latency.
        std::thread::sleep(DRAINED_AFTER);
        cells.push(Cell {
            short_bps,
            long_bps,
            latency: pair.latency(options.short_bytes, options.latency_rate, measured)?,
        });
    }
    Ok(cells)
}
