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
    report.verdict("every byte verified", sweep_both_ways(running, LARGEST))?;

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

/// Starts `allsize --verify` from one node to the other.
pub fn sweep(from: &Node, to: &Node, largest: u64) -> Result<Job> {
    let mut command = from.portolan();
    command.args([
        "allsize",
        &to.id().to_string(),
        "--verify",
        "--max",
        &largest.to_string(),
    ]);
    let label = format!("{}→{}", from.id(), to.id());
    Job::start(&mut command, Stdio::null(), Output::Labelled(label))
}

/// Both nodes verify all sizes against each other at once.
pub fn sweep_both_ways(running: &Running, largest: u64) -> Result<String> {
    let started = Instant::now();
    let mut there = sweep(running.node(1), running.node(2), largest)?;
    let mut back = sweep(running.node(2), running.node(1), largest)?;
    there.succeed(SWEEP, || {})?;
    back.succeed(SWEEP, || {})?;
    Ok(format!(
        "both ways in {:.1} s",
        started.elapsed().as_secs_f64()
    ))
}
