//! Everything the demo shows on one network.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use portolan_testbed::{Daemon, Lab, Node, Spec, process};

use super::engine_kill;
use super::job::{Job, Output};
use super::report::{self, Report};
use super::transfer::{Source, Transfer, mib};
use crate::build;

/// Bound on a short command.
const SHORT: Duration = Duration::from_secs(10);
/// Bounds on the longer things shown.
const PING: Duration = Duration::from_secs(60);
const SWEEP: Duration = Duration::from_secs(120);
const FILE: Duration = Duration::from_secs(240);
const PINGS: u32 = 10_000;
/// The largest message of the sweep, 16 MiB.
const LARGEST: u64 = 16 << 20;
/// The port files go to.
const FILE_PORT: u8 = 20;

/// A lab with its two daemons.
pub struct Running<'a> {
    pub lab: &'a Lab,
    pub daemons: [Daemon; 2],
}

impl Running<'_> {
    pub fn node(&self, id: u16) -> &Node {
        self.lab.node(id)
    }
}

/// Runs it; verdicts go into the report, an error means that nothing more can be shown.
pub fn run(spec: Spec, source: &Source, directory: &Path, report: &mut Report) -> Result<()> {
    report::title("Two nodes");
    let started = Instant::now();
    let lab = Lab::builder()
        .spec(spec)
        .binaries(build::binaries()?)
        .build()?;
    for node in lab.nodes() {
        println!(
            "   node {} ({})  namespace {}  {} {}  {}  {}",
            node.id(),
            node.name(),
            node.namespace_name(),
            node.interface(),
            node.mac(),
            node.ipv4(),
            node.ipv6()
        );
    }
    match start(&lab) {
        Ok(running) => {
            report.verdict(
                "both daemons run",
                Ok(format!("after {:.1} s", started.elapsed().as_secs_f64())),
            )?;
            show(&running, source, directory, report)?;
        }
        Err(error) => report.verdict("both daemons run", Err(error))?,
    }
    report::title("Cleaning up");
    let name = lab.name().to_owned();
    report.verdict(
        "nothing left",
        lab.remove().map(|()| format!("lab {name} removed")),
    )
}

fn start(lab: &Lab) -> Result<Running<'_>> {
    let daemons = [lab.node(1).start_daemon("")?, lab.node(2).start_daemon("")?];
    Ok(Running { lab, daemons })
}

fn show(running: &Running, source: &Source, directory: &Path, report: &mut Report) -> Result<()> {
    report::title("portolan status");
    for node in running.lab.nodes() {
        report.verdict(
            &format!("node {}", node.id()),
            shown(node, &["status"], SHORT),
        )?;
    }

    report::title("portolan ping");
    let result = shown(
        running.node(1),
        &["ping", "2", "--count", &PINGS.to_string()],
        PING,
    );
    report.verdict(&format!("{PINGS} round trips"), result)?;

    report::title(&format!(
        "portolan allsize --verify: 1 B to {} both ways at once",
        mib(LARGEST)
    ));
    report.verdict(
        "every byte verified",
        sweep_both_ways(running, LARGEST, Rows::Few),
    )?;

    report::title(&format!(
        "portolan send | recv: a file of {}",
        mib(source.bytes)
    ));
    let nodes = (running.node(1), running.node(2));
    let file = Transfer::start(source, nodes, FILE_PORT, directory);
    report.verdict("same file", file.and_then(|file| file.finish(FILE)))?;

    report::title("An engine killed under load");
    engine_kill::show(running, source, directory, report)
}

/// Runs the tool on a node and quotes its output.
fn shown(node: &Node, arguments: &[&str], within: Duration) -> Result<String> {
    let text = process::run_ok(node.portolan().args(arguments), within)?;
    if text.trim().is_empty() {
        bail!("portolan {} printed nothing", arguments.join(" "));
    }
    report::quote(&text);
    Ok("answered".to_owned())
}

/// How much of a sweep's table is shown; all sizes are measured and verified.
#[derive(Clone, Copy)]
pub enum Rows {
    /// Powers of four.
    Few,
    /// Only what it says at the end.
    None,
}

impl Rows {
    fn wanted(self) -> fn(&str) -> bool {
        match self {
            Self::Few => |line| row_size(line).is_none_or(is_power_of_four),
            Self::None => |line| row_size(line).is_none() && !line.contains("rounds"),
        }
    }
}

/// The size in a row of the table, which continues with the number of rounds.
fn row_size(line: &str) -> Option<u64> {
    let mut words = line.split_whitespace();
    let (size, rounds) = (words.next()?, words.next()?);
    rounds.parse::<u64>().ok().and(size.parse().ok())
}

fn is_power_of_four(size: u64) -> bool {
    size.is_power_of_two() && size.trailing_zeros().is_multiple_of(2)
}

/// Starts `allsize --verify` from one node to the other.
pub fn sweep(from: &Node, to: &Node, largest: u64, rows: Rows) -> Result<Job> {
    let mut command = from.portolan();
    let (target, largest) = (to.id().to_string(), largest.to_string());
    command.args(["allsize", &target, "--verify", "--max", &largest]);
    let label = format!("{}→{}", from.id(), to.id());
    Job::start(
        &mut command,
        Stdio::null(),
        Output::Labelled(label, rows.wanted()),
    )
}

/// Both nodes verify all sizes against each other at once.
pub fn sweep_both_ways(running: &Running, largest: u64, rows: Rows) -> Result<String> {
    let started = Instant::now();
    let mut there = sweep(running.node(1), running.node(2), largest, rows)?;
    let mut back = sweep(running.node(2), running.node(1), largest, rows)?;
    there.succeed(SWEEP, || {})?;
    back.succeed(SWEEP, || {})?;
    Ok(format!(
        "both ways in {:.1} s",
        started.elapsed().as_secs_f64()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_rows_stand_for_the_sweep() {
        let (few, none) = (Rows::Few.wanted(), Rows::None.wanted());
        for (line, in_few, in_none) in [
            ("       bytes  rounds     one way", true, false),
            ("           4     100     16.4 us", true, false),
            ("           8     100     16.4 us", false, false),
            ("    16777216       1     16.4 us", true, false),
            ("70 sizes to 2:0 and back, every byte checked", true, true),
        ] {
            assert_eq!((few(line), none(line)), (in_few, in_none), "{line}");
        }
    }
}
