//! `portolan-sim`: random runs from seeds.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use portolan_sim::campaign::parallel::{Report, attempt, campaign, keep_panics};
use portolan_sim::campaign::plan::{Options, Plan};
use portolan_transport::policy::Profile;
use serde_json::json;

/// Deterministic simulation of Portolan's transport
#[derive(Parser)]
#[command(name = "portolan-sim")]
struct Arguments {
    /// Seeds to run
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// The first seed; alone, the only one
    #[arg(long)]
    seed: Option<u64>,
    /// All nodes run this profile [default: drawn from the seed]
    #[arg(long, value_parser = profile)]
    profile: Option<Profile>,
    /// Nodes in the cluster [default: drawn from the seed]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4_096))]
    nodes: Option<u16>,
    /// Threads [default: one per core]
    #[arg(long)]
    jobs: Option<usize>,
    /// Prints every frame (one seed)
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Prints what the seed does, and does not do it
    #[arg(long, requires = "seed")]
    plan: bool,
    /// The summary as JSON
    #[arg(long)]
    json: bool,
    /// Goes on after this many failures
    #[arg(long, default_value_t = 10)]
    failures: usize,
}

fn profile(name: &str) -> Result<Profile, String> {
    let names = Profile::ALL.map(Profile::name).join(", ");
    Profile::named(name).ok_or(format!("one of {names}"))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    keep_panics();
    let options = Options {
        profile: arguments.profile,
        nodes: arguments.nodes,
    };
    let jobs = arguments
        .jobs
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    if let Some(seed) = arguments.seed
        && arguments.plan
    {
        println!("{:#?}", Plan::new(seed, &options));
        return ExitCode::SUCCESS;
    }
    if let Some(seed) = arguments.seed
        && arguments.trace
    {
        return match attempt(seed, &options, true) {
            Ok(outcome) => {
                println!("{outcome:#?}");
                ExitCode::SUCCESS
            }
            Err(violation) => {
                eprintln!("seed {seed}: {violation}");
                ExitCode::FAILURE
            }
        };
    }
    let (first, count) = match arguments.seed {
        Some(seed) => (seed, 1),
        None => (0, arguments.seeds),
    };
    let terminal = std::io::stderr().is_terminal();
    let report = campaign(
        first,
        count,
        jobs,
        options,
        arguments.failures,
        |all, report| {
            if terminal {
                eprint!(
                    "\r{}/{all} seeds, {} failed ",
                    report.seeds,
                    report.failures.len()
                );
                let _ = std::io::stderr().flush();
            }
        },
    );
    if terminal {
        eprint!("\r\x1b[K");
    }
    if arguments.json {
        println!("{}", as_json(&report));
    } else {
        print(&report, &options);
    }
    if report.failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The command that repeats a seed.
fn command(seed: u64, options: &Options) -> String {
    let mut command = format!("cargo xtask sim --seed {seed}");
    if let Some(profile) = options.profile {
        command += &format!(" --profile {}", profile.name());
    }
    if let Some(nodes) = options.nodes {
        command += &format!(" --nodes {nodes}");
    }
    command
}

fn print(report: &Report, options: &Options) {
    for failure in &report.failures {
        println!("seed {}: {}", failure.seed, failure.violation);
        println!("  repeat with: {}", command(failure.seed, options));
    }
    let (total, tally) = (&report.total, &report.total.tally);
    println!(
        "seeds       {} ({} failed)",
        report.seeds,
        report.failures.len()
    );
    println!(
        "messages    {} sent, {} delivered",
        total.messages, total.delivered
    );
    println!("frames      {} ({} bytes)", tally.frames, tally.bytes);
    println!(
        "faults      {}: {} lost, {} doubled, {} corrupt, {} late, {} crossings lost",
        tally.faults(),
        tally.lost,
        tally.duplicated,
        tally.corrupted,
        tally.late,
        tally.crossings_lost
    );
    println!(
        "            {} engine deaths, {} reboots, {} engines stopped",
        tally.deaths, tally.reboots, tally.stops
    );
    println!(
        "congestion  {} frames without a receive buffer, {} dropped by the switch",
        tally.no_receive_buffer, total.switch_dropped
    );
    println!(
        "time        {:.1} s ({:.1} s simulated); slowest seed {} with {:.2} s",
        report.took.as_secs_f64(),
        total.lasted_ns as f64 / 1e9,
        report.slowest.0,
        report.slowest.1.as_secs_f64()
    );
}

fn as_json(report: &Report) -> serde_json::Value {
    let (total, tally) = (&report.total, &report.total.tally);
    let failures: Vec<_> = report
        .failures
        .iter()
        .map(|f| json!({"seed": f.seed, "invariant": f.violation.invariant, "what": f.violation.what}))
        .collect();
    json!({
        "seeds": report.seeds,
        "failures": failures,
        "messages": total.messages,
        "delivered": total.delivered,
        "frames": tally.frames,
        "bytes": tally.bytes,
        "lost": tally.lost,
        "duplicated": tally.duplicated,
        "corrupted": tally.corrupted,
        "late": tally.late,
        "crossings_lost": tally.crossings_lost,
        "deaths": tally.deaths,
        "reboots": tally.reboots,
        "stops": tally.stops,
        "faults": tally.faults(),
        "no_receive_buffer": tally.no_receive_buffer,
        "switch_dropped": total.switch_dropped,
        "simulated_ns": total.lasted_ns,
        "seconds": report.took.as_secs_f64(),
    })
}
