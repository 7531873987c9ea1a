//! `portolan-sim`: random runs from seeds, and measurements on simulated hardware.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use portolan_sim::campaign::parallel::{attempt, campaign, keep_panics};
use portolan_sim::campaign::plan::{Options, Plan};
use portolan_sim::harness::{MS, US};
use portolan_sim::scenario::{all_to_all, incast, profiles};
use portolan_transport::policy::{Policy, Profile};

mod summary;

#[global_allocator]
static HEAP: portolan_sim::heap::Counting = portolan_sim::heap::Counting;

/// Deterministic simulation of Portolan's transport: random clusters, traffic and faults, every run from its seed
#[derive(Parser)]
#[command(name = "cargo xtask sim", args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    scenario: Option<Scenario>,
    #[command(flatten)]
    campaign: Campaign,
}

#[derive(Args)]
struct Campaign {
    /// Seeds to run
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// The one seed to run
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
    /// Prints what the seed would do, and does not do it
    #[arg(long, requires = "seed")]
    plan: bool,
    /// The summary as JSON
    #[arg(long)]
    json: bool,
    /// Ends after so many failures
    #[arg(long, default_value_t = 10)]
    failures: usize,
}

#[derive(Subcommand)]
enum Scenario {
    /// Many senders of long messages to one receiver, beside single frames at high priority
    Incast {
        #[arg(long, default_value_t = 1_000)]
        senders: u16,
        /// Bytes of a long message
        #[arg(long, default_value_t = 64 << 10)]
        size: u32,
        /// Long messages under way per sender
        #[arg(long, default_value_t = 2)]
        depth: u32,
        /// Nodes that send single frames
        #[arg(long, default_value_t = 16)]
        others: u16,
        /// How long it is measured, simulated milliseconds
        #[arg(long, default_value_t = 100)]
        milliseconds: u64,
        #[arg(long, value_parser = profile, default_value = "default")]
        profile: Profile,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long)]
        json: bool,
    },
    /// Every node sends to every other one
    AllToAll {
        #[arg(long, default_value_t = 4_096, value_parser = clap::value_parser!(u16).range(2..=4_096))]
        nodes: u16,
        /// Bytes of a message
        #[arg(long, default_value_t = 64)]
        size: u32,
        /// Messages under way per node
        #[arg(long, default_value_t = 8)]
        depth: u16,
        /// Between one message and the next, simulated microseconds: idle peers are forgotten meanwhile
        #[arg(long, default_value_t = 100)]
        pause_us: u64,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long)]
        json: bool,
    },
    /// Goodput and latency of every profile at losses from 0 to 10 %
    Profiles {
        /// Bytes of a message
        #[arg(long, default_value_t = 8_192)]
        size: u32,
        /// Longest frame, transport bytes
        #[arg(long, default_value_t = 8_958)]
        frame: u16,
        /// Rate of the link, Mbit/s
        #[arg(long, default_value_t = 25_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        rate_mbit: u64,
        /// Round trip of an empty frame, microseconds
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        round_trip_us: u64,
        /// How long goodput is measured, simulated milliseconds
        #[arg(long, default_value_t = 200)]
        milliseconds: u64,
        /// Messages whose latency is measured
        #[arg(long, default_value_t = 50_000)]
        messages: u64,
        /// Part of the link they take, percent
        #[arg(long, default_value_t = 80)]
        load: u32,
        /// The fixed timer of the second table, microseconds
        #[arg(long, default_value_t = 10_000)]
        fixed_us: u32,
        #[arg(long)]
        jobs: Option<usize>,
        #[arg(long)]
        json: bool,
    },
}

fn profile(name: &str) -> Result<Profile, String> {
    let names = Profile::ALL.map(Profile::name).join(", ");
    Profile::named(name).ok_or(format!("one of {names}"))
}

/// One per core, unless said otherwise.
fn threads(jobs: Option<usize>) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    jobs.unwrap_or_else(cores)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.scenario {
        Some(scenario) => run_scenario(scenario),
        None => run_campaign(&arguments.campaign),
    }
}

fn show(json: bool, (text, value): (String, serde_json::Value)) -> ExitCode {
    if json {
        println!("{value:#}");
    } else {
        println!("{text}");
    }
    ExitCode::SUCCESS
}

fn run_scenario(scenario: Scenario) -> ExitCode {
    match scenario {
        Scenario::Incast {
            senders,
            size,
            depth,
            others,
            milliseconds,
            profile,
            seed,
            json,
        } => {
            let case = incast::Incast {
                senders,
                len: size,
                depth,
                others,
                single: 1_000,
                apart_ns: 200 * US,
                measured_ns: milliseconds * MS,
                policy: incast::policy(profile),
                seed,
            };
            show(json, incast::report(&case))
        }
        Scenario::AllToAll {
            nodes,
            size,
            depth,
            pause_us,
            seed,
            json,
        } => {
            let case = all_to_all::AllToAll {
                nodes,
                len: size,
                depth,
                pause_ns: pause_us * US,
                policy: Policy {
                    stream_idle_ms: 1,
                    peer_idle_ms: 1,
                    ..Policy::default()
                },
                seed,
            };
            show(json, all_to_all::report(&case))
        }
        Scenario::Profiles {
            size,
            frame,
            rate_mbit,
            round_trip_us,
            milliseconds,
            messages,
            load,
            fixed_us,
            jobs,
            json,
        } => {
            let adaptive = profiles::Case {
                len: size,
                max_frame: frame,
                link: profiles::Link {
                    mbit_per_s: rate_mbit,
                    round_trip_us,
                },
                measured_ns: milliseconds * MS,
                messages,
                load_percent: load,
                fixed_us: None,
                seed: 1,
            };
            let fixed = profiles::Case {
                fixed_us: Some(fixed_us),
                ..adaptive
            };
            let tables =
                [adaptive, fixed].map(|case| (case, profiles::table(&case, threads(jobs))));
            let texts = tables
                .iter()
                .map(|(case, table)| profiles::markdown(case, table));
            let text = texts.collect::<Vec<_>>().join("\n");
            let values = tables
                .iter()
                .map(|(case, table)| profiles::as_json(case, table));
            show(json, (text, values.collect()))
        }
    }
}

fn run_campaign(arguments: &Campaign) -> ExitCode {
    keep_panics();
    let options = Options {
        profile: arguments.profile,
        nodes: arguments.nodes,
    };
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
    let (jobs, most) = (threads(arguments.jobs), arguments.failures);
    let report = campaign(first, count, jobs, options, most, |all, report| {
        if terminal {
            eprint!(
                "\r{}/{all} seeds, {} failed ",
                report.seeds,
                report.failures.len()
            );
            let _ = std::io::stderr().flush();
        }
    });
    if terminal {
        eprint!("\r\x1b[K");
    }
    if arguments.json {
        println!("{:#}", summary::as_json(&report));
    } else {
        summary::print(&report, &options);
    }
    if report.failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
