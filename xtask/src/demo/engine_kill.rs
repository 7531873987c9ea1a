//! One engine is killed with SIGKILL while a file and a verified sweep cross it.
//!
//! What may happen: a pause, and everything arrives; or a sender is told that something was not, or may not have been,
//! delivered. What may not: a program that reports success for what did not arrive whole, one that hangs, one that fails
//! without a word, a file with a wrong byte in it, or traffic that does not go on afterwards.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{cancel, process};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::job::{Ended, Job};
use super::report::{self, Report};
use super::scenario::{self, Rows, Running};
use super::transfer::{self, Source, Transfer, mib};

/// The node whose engine dies: the file's receiver, the sweep's sender.
const VICTIM: u16 = 2;
const OTHER: u16 = 1;
/// The engine dies when this part of the file has arrived.
const KILLED_AFTER: u64 = 16;
/// Bound on the load to get there.
const LOADED: Duration = Duration::from_secs(60);
/// Bound on the next engine to run.
const TAKEN_OVER: Duration = Duration::from_secs(20);
/// Bound on each program to end after the kill.
const SETTLED: Duration = Duration::from_secs(90);
/// How long a receiver is left to end by itself after its sender gave up.
const ABANDONED: Duration = Duration::from_secs(10);
const LARGEST: u64 = 16 << 20;
const LARGEST_AFTER: u64 = 1 << 20;
const PINGS_AFTER: &str = "1000";
const PORT: u8 = 21;
const PORT_AFTER: u8 = 22;
/// The file sent afterwards, in bytes.
const FILE_AFTER: u64 = 16 << 20;

/// One engine as its daemon reports it.
struct Engine {
    pid: i32,
    epoch: u64,
}

/// Kills, watches, and shows that traffic goes on.
pub fn show(
    running: &Running,
    source: &Source,
    directory: &Path,
    report: &mut Report,
) -> Result<()> {
    let bystander = engine(running, OTHER).map(|engine| engine.pid);
    match Load::start(running, source, directory) {
        Ok(mut load) => {
            report.verdict("engine killed", load.kill_engine(running))?;
            report.verdict("the file under way", load.settle_file())?;
            report.verdict("the sweep under way", load.settle_sweep())?;
        }
        Err(error) => report.verdict("load", Err(error))?,
    }
    report.verdict("the other node's engine", untouched(running, bystander))?;
    report.verdict("ping afterwards", ping(running))?;
    let sweep = scenario::sweep_both_ways(running, LARGEST_AFTER, Rows::None);
    report.verdict("all sizes afterwards", sweep)?;
    let after = directory.join("after");
    std::fs::create_dir_all(&after).context("directory of the last file")?;
    let last = Source::make(&after, FILE_AFTER)?;
    for (from, to) in [(OTHER, VICTIM), (VICTIM, OTHER)] {
        let nodes = (running.node(from), running.node(to));
        let file = Transfer::start(&last, nodes, PORT_AFTER, &after);
        let what = format!("a file afterwards, {from}→{to}");
        report.verdict(&what, file.and_then(|file| file.finish(SETTLED)))?;
    }
    Ok(())
}

/// What crosses the engine when it dies.
struct Load<'a> {
    source: &'a Source,
    file: Transfer<'a>,
    sweep: Job,
}

impl<'a> Load<'a> {
    fn start(running: &Running, source: &'a Source, directory: &Path) -> Result<Self> {
        let (other, victim) = (running.node(OTHER), running.node(VICTIM));
        let sweep = scenario::sweep(victim, other, LARGEST, Rows::None)?;
        let file = Transfer::start(source, (other, victim), PORT, directory)?;
        Ok(Self {
            source,
            file,
            sweep,
        })
    }

    /// Kills the engine in the middle of the file and waits for the next one.
    fn kill_engine(&mut self, running: &Running) -> Result<String> {
        let daemon = &running.daemons[usize::from(VICTIM) - 1];
        let queue = transfer::queue_of(running.node(VICTIM), PORT)?;
        let old = parse(&daemon.status()?, queue)?;
        let pid = Pid::from_raw(old.pid).context("the engine's process id is 0")?;
        let deadline = Instant::now() + LOADED;
        while self.file.received_bytes() < self.source.bytes / KILLED_AFTER {
            if cancel::requested() || Instant::now() > deadline {
                bail!(
                    "only {} arrived within {LOADED:?}",
                    mib(self.file.received_bytes())
                );
            }
            if !self.file.sender.is_running() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if !self.file.sender.is_running() {
            bail!("the sender ended before the engine could be killed");
        }
        let arrived = mib(self.file.received_bytes());
        kill_process(pid, Signal::KILL).context("SIGKILL")?;
        let killed = Instant::now();
        let status = daemon.wait_status("the next engine runs", TAKEN_OVER, |status| {
            parse(status, queue).is_ok_and(|new| new.pid != old.pid)
                && status["engines"][queue]["state"] == "running"
        })?;
        let new = parse(&status, queue)?;
        if new.epoch <= old.epoch {
            bail!("the epoch did not rise: {} after {}", new.epoch, old.epoch);
        }
        Ok(format!(
            "SIGKILL to {} on node {VICTIM} (epoch {}) with {arrived} of {} arrived; {} (epoch {}) runs after {} ms",
            old.pid,
            old.epoch,
            mib(self.source.bytes),
            new.pid,
            new.epoch,
            killed.elapsed().as_millis()
        ))
    }

    fn settle_file(&mut self) -> Result<String> {
        let sent = self.file.sender.wait(SETTLED, || {})?;
        if sent.status.success() {
            self.file.receiver.succeed(SETTLED, || {})?;
            transfer::compare(self.source, &self.file.received)
                .context("the sender reported success")?;
            return Ok("went on and arrived whole".to_owned());
        }
        let told = definite(&sent)?;
        // The receiver may wait for an end that cannot come any more; if it claims to have one, it must be right.
        if let Ok(received) = self.file.receiver.wait(ABANDONED, || {})
            && received.status.success()
        {
            transfer::compare(self.source, &self.file.received)
                .context("the receiver reported success")?;
        }
        let arrived = self.file.received_bytes();
        let (theirs, ours) = (&self.file.received, &self.source.path);
        if arrived > self.source.bytes
            || transfer::sha256(theirs, arrived)? != transfer::sha256(ours, arrived)?
        {
            bail!("what arrived of the file is not its beginning");
        }
        Ok(format!(
            "its sender was told ({told}); the {} that arrived are right",
            mib(arrived)
        ))
    }

    fn settle_sweep(&mut self) -> Result<String> {
        let ended = self.sweep.wait(SETTLED, || {})?;
        if ended.status.success() {
            return Ok("went on, every byte verified".to_owned());
        }
        let told = definite(&ended)?;
        Ok(format!("was told: {told}"))
    }
}

/// The last line a program that failed said; an error if it failed in a way nobody can act on.
fn definite(ended: &Ended) -> Result<String> {
    let last = ended.said.lines().last().unwrap_or_default();
    if ended.status.code().is_none() || last.is_empty() || ended.said.contains("panicked") {
        bail!("failed without a status: {}\n{}", ended.status, ended.said);
    }
    // What `allsize --verify` says of wrong bytes, or too few.
    if ended.said.contains("came back") {
        bail!("wrong bytes were delivered: {}", ended.said);
    }
    Ok(last.to_owned())
}

fn untouched(running: &Running, before: Result<i32>) -> Result<String> {
    let (before, now) = (before?, engine(running, OTHER)?.pid);
    if before != now {
        bail!("{before} of node {OTHER} was replaced by {now}");
    }
    Ok(format!("{now} of node {OTHER} is still there"))
}

fn ping(running: &Running) -> Result<String> {
    let mut command = running.node(OTHER).portolan();
    command.args(["ping", &VICTIM.to_string(), "--count", PINGS_AFTER]);
    let text = process::run_ok(&mut command, SETTLED)?;
    report::quote(&text);
    Ok(format!("{PINGS_AFTER} round trips"))
}

/// A node's first engine.
fn engine(running: &Running, node: u16) -> Result<Engine> {
    parse(&running.daemons[usize::from(node) - 1].status()?, 0)
}

/// One engine of a status.
fn parse(status: &Value, queue: usize) -> Result<Engine> {
    let engine = &status["engines"][queue];
    let pid = engine["pid"]
        .as_i64()
        .and_then(|pid| i32::try_from(pid).ok());
    match (pid, engine["epoch"].as_u64()) {
        (Some(pid), Some(epoch)) => Ok(Engine { pid, epoch }),
        _ => bail!("a status without an engine's pid and epoch: {status}"),
    }
}
