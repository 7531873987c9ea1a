//! What a campaign came to, for people and for programs.

use portolan_sim::campaign::parallel::Report;
use portolan_sim::campaign::plan::Options;
use serde_json::{Value, json};

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

/// For people.
pub fn print(report: &Report, options: &Options) {
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
    println!(
        "frames      {} ({} bytes), {} of them bare",
        tally.frames, tally.bytes, tally.bare
    );
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

/// For programs.
pub fn as_json(report: &Report) -> Value {
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
        "bare": tally.bare,
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
