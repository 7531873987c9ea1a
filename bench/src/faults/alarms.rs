//! What must not alarm anybody: pauses shorter than the bound, and a machine that is busy with something else.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::clock::{now_ns, ns, sleep_until};
use super::deaths::{recoveries, warm_up};
use super::fault::signal;
use super::outcome::{Outcome, Promise};
use super::progress::Progress;
use super::random::Random;
use super::scene::{NODES, Scene, Setting};
use super::victim::{Bounds, Engine};

/// Busy processes.
const BUSY: usize = 6;
/// Pauses last up to this part of the bound, in percent. The rest is for the machine: a process told to go on goes on later.
const PAUSE_PERCENT: u64 = 70;
/// Between two pauses.
const BETWEEN: Duration = Duration::from_millis(10);
/// Bound on traffic to go on after a pause.
const GO_ON: Duration = Duration::from_secs(10);
const READY: Duration = Duration::from_secs(10);

/// SIGSTOP and SIGCONT, `count` times, the engine stopped for less than the bound.
pub fn pauses(setting: &Setting, count: u64, progress: &mut Progress) -> Result<Outcome> {
    let mut outcome = Outcome::new("pause")?;
    let mut random = Random::new(setting.seed);
    let mut scene = Scene::start(setting)?;
    warm_up(&scene)?;
    let log = scene.steady()?.log.clone();
    let bound_us = Bounds::of(scene.daemon(1)?)?.stuck_after_us;
    let bound_us = bound_us.context("the daemon's status does not name `stuck_after_us`")?;
    let longest = Duration::from_micros(bound_us * PAUSE_PERCENT / 100);
    let mut too_long = 0;
    for _ in 0..count {
        let daemon = scene.daemon(NODES[random.below(2) as usize])?;
        let engine = Engine::wait_ready(daemon, READY)?;
        let pid = engine.pid.context("an engine without a process")?;
        let median = log.median_ns();
        let before = scene.received();
        let stopped = signal(pid, Signal::STOP)?;
        sleep_until(stopped + ns(random.span(longest)));
        let went_on = signal(pid, Signal::CONT);
        let paused_ns = now_ns() - stopped;
        outcome.injected += 1;
        // The machine kept us from waking it in time: whoever replaces it now is right.
        let overslept = paused_ns / 1000 >= bound_us;
        too_long += u64::from(overslept);
        let silent = scene.wait_all_go_on(&before, GO_ON);
        scene.check()?;
        if let Err(silent) = silent {
            outcome.note(format!("silent after a pause: {}", silent.join(", ")));
            break;
        }
        outcome.recovered += 1;
        let over = now_ns() + ns(BETWEEN);
        sleep_until(over);
        let after = Engine::look(daemon)?;
        if after.recoveries() > engine.recoveries() && !overslept {
            outcome.false_alarms += 1;
            outcome.note(format!(
                "replaced after a pause of {} us: {:?}",
                paused_ns / 1000,
                after.last
            ));
        } else if let (Err(error), false) = (went_on, overslept) {
            return Err(error);
        }
        let outage = log.longest_ns(stopped, over);
        outcome.outage.record(outage.saturating_sub(median).max(1));
        log.forget_before(stopped);
        progress.step();
    }
    outcome.median_gap_ns = log.median_ns();
    outcome.more.insert("bound_us".into(), bound_us.into());
    outcome
        .more
        .insert("longer_than_the_bound".into(), too_long.into());
    outcome.tally = scene.settle()?;
    Ok(outcome)
}

/// Processes that compute and compute.
struct Busy(Vec<Child>);

impl Busy {
    /// Two thirds of them bound to one processor each, in turns; the others go wherever there is room.
    fn start(cores: usize) -> Result<Self> {
        let mut busy = Self(Vec::new());
        for number in 0..BUSY {
            let child = Command::new("sh")
                .args(["-c", "while :; do :; done"])
                .stdin(Stdio::null())
                .spawn()
                .context("a busy process")?;
            let pid = Pid::from_child(&child);
            busy.0.push(child);
            if number % 3 < 2 {
                let mut set = CpuSet::new();
                set.set((number / 3 + number % 3) % cores.max(1));
                sched_setaffinity(Some(pid), &set).context("a processor for a busy process")?;
            }
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may be gone already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Nothing is done to the engines, which are bound to the processors that six busy processes compete for.
pub fn calm(setting: &Setting, span: Duration, progress: &mut Progress) -> Result<Outcome> {
    let mut outcome = Outcome::new("calm")?;
    // A machine may be so busy that a node seems to have gone; what must not happen is that somebody is replaced for it.
    outcome.promise = Promise::Definite;
    let cores = std::thread::available_parallelism()?.get();
    let mut setting = setting.clone();
    for (core, overrides) in setting.overrides.iter_mut().enumerate() {
        overrides.push_str(&format!("\n[engine]\ncores = [{}]\n", core % cores));
    }
    let mut scene = Scene::start(&setting)?;
    warm_up(&scene)?;
    let before = recoveries(&scene)?;
    let log = scene.steady()?.log.clone();
    let busy = Busy::start(cores)?;
    let over = Instant::now() + span;
    let mut window = now_ns();
    let mut seen = before;
    while Instant::now() < over {
        sleep_until(window + 1_000_000_000);
        scene.check()?;
        outcome
            .noise
            .record(log.longest_ns(window, now_ns()).max(1));
        log.forget_before(window);
        window = now_ns();
        let now = recoveries(&scene)?;
        if now > seen {
            for node in NODES {
                outcome.note(format!("node {node}: {:?}", scene.engine(node)?.last));
            }
            seen = now;
        }
        progress.step();
    }
    drop(busy);
    outcome.false_alarms = seen - before;
    outcome.median_gap_ns = log.median_ns();
    outcome
        .more
        .insert("minutes".into(), (span.as_secs_f64() / 60.0).into());
    outcome.more.insert("busy_processes".into(), BUSY.into());
    outcome.tally = scene.settle()?;
    if outcome.tally.sent == 0 {
        bail!("nothing was sent");
    }
    Ok(outcome)
}
