//! Supervisors that are killed, and supervisors that are replaced by another build, while their engines go on.
//!
//! Nothing may be lost, and nobody may notice: the engines stay who they are, and the gaps between deliveries are those that the machine
//! makes without a fault. All of them are compared, by quantiles, and the longest of each span by itself.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use portolan_testbed::{Binaries, Daemon, process};

use super::clock::{now_ns, ns, sleep_until};
use super::deaths::{recoveries, warm_up};
use super::gaps::{Gaps, Part};
use super::outcome::Outcome;
use super::progress::Progress;
use super::random::Random;
use super::scene::{NODES, Scene, Setting};
use super::steady::GapLog;
use super::victim::Engine;

/// Bound on a supervisor to be back, and on an upgrade.
const BACK: Duration = Duration::from_secs(20);
/// Bound on an engine with its standby to be there.
const READY: Duration = Duration::from_secs(10);
/// How long deliveries are watched afterwards.
const AROUND: Duration = Duration::from_millis(100);

/// What is done to a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// SIGKILL; its manager starts it again.
    Kill,
    /// `portolan upgrade` to another file of the same build.
    Upgrade,
}

impl Deed {
    /// How long one may be expected to take, and as long again without.
    pub fn expected_s(self) -> f64 {
        match self {
            // Its successor takes its time.
            Self::Kill => 4.5,
            Self::Upgrade => 0.8,
        }
    }
}

/// `count` supervisors.
pub fn supervisors(
    deed: Deed,
    setting: &Setting,
    count: u64,
    progress: &mut Progress,
) -> Result<Outcome> {
    let mut outcome = Outcome::new(match deed {
        Deed::Kill => "supervisor",
        Deed::Upgrade => "upgrade",
    })?;
    let mut gaps = Gaps::new(count)?;
    let mut random = Random::new(setting.seed);
    let setting = Setting {
        managed: true,
        ..setting.clone()
    };
    // Not in the lab's directory: what is below /run may not be executable.
    let builds = tempfile::tempdir().context("a directory for builds")?;
    fs::set_permissions(builds.path(), fs::Permissions::from_mode(0o755))?;
    let mut scene = Scene::start(&setting)?;
    // Two, of which a node runs one or neither. Before anything is watched: each copy is 20 MB.
    let builds = match deed {
        Deed::Kill => Vec::new(),
        Deed::Upgrade => ["a", "b"]
            .iter()
            .map(|name| copy(&scene, &builds.path().join(format!("portoland-{name}"))))
            .collect::<Result<_>>()?,
    };
    warm_up(&scene)?;
    let before = recoveries(&scene)?;
    let log = scene.steady()?.log.clone();
    for number in 0..count {
        let node = NODES[random.below(2) as usize];
        let one = one(&scene, node, &builds, &log, &mut outcome, gaps.part(number));
        scene.check()?;
        if let Err(error) = one {
            outcome.note(format!("{number}: {error:#}"));
            break;
        }
        progress.step();
    }
    outcome.false_alarms = recoveries(&scene).map_or(0, |after| after.saturating_sub(before));
    outcome.median_gap_ns = log.median_ns();
    outcome.gaps = Some(gaps);
    outcome.tally = scene.settle()?;
    Ok(outcome)
}

/// One supervisor; upgraded if there are `builds`, killed otherwise.
fn one(
    scene: &Scene,
    node: u16,
    builds: &[PathBuf],
    log: &GapLog,
    outcome: &mut Outcome,
    gaps: &mut Part,
) -> Result<()> {
    let daemon = scene.daemon(node)?;
    let engine = Engine::wait_ready(daemon, READY)?;
    let running = fs::read_link(program(scene, node)?).context("its program")?;
    let build = builds.iter().find(|build| **build != running);
    sleep_until(now_ns() + ns(AROUND));
    let median = log.median_ns();
    let began = now_ns();
    log.begin_span();
    outcome.injected += 1;
    match build {
        None => {
            let start = daemon.manager()?.kill()?;
            daemon.manager()?.wait_ready(start, BACK)?;
        }
        Some(build) => upgrade(scene, node, build)?,
    }
    outcome.takeover.record(now_ns() - began);
    let now = watch(scene, daemon)?;
    ensure!(
        now.pid == engine.pid,
        "the engine was {:?} and is {:?}",
        engine.pid,
        now.pid
    );
    outcome.recovered += 1;
    let over = now_ns();
    log.add_span_to(&mut gaps.around);
    let outage = log.longest_ns(began, over);
    outcome.outage.record(outage.saturating_sub(median).max(1));
    // As long a span, with the same questions asked, in which nothing happens.
    let quiet = now_ns();
    log.begin_span();
    sleep_until(quiet + (over - began).saturating_sub(ns(AROUND)));
    watch(scene, daemon)?;
    log.add_span_to(&mut gaps.without);
    let noise = log.longest_ns(quiet, quiet + (over - began));
    outcome.noise.record(noise.saturating_sub(median).max(1));
    log.forget_before(began);
    Ok(())
}

/// Waits until everything goes on, and until deliveries have been watched for long enough.
fn watch(scene: &Scene, daemon: &Daemon) -> Result<Engine> {
    let until = now_ns() + ns(AROUND);
    let engine = Engine::wait_ready(daemon, READY)?;
    if let Err(silent) = scene.wait_all_go_on(&scene.received(), BACK) {
        bail!("silent afterwards: {}", silent.join(", "));
    }
    sleep_until(until);
    Ok(engine)
}

/// The build that runs, in another file.
fn copy(scene: &Scene, to: &Path) -> Result<PathBuf> {
    fs::copy(program(scene, NODES[0])?, to).context("a copy of the daemon")?;
    Ok(to.to_owned())
}

/// What a node's supervisor runs.
fn program(scene: &Scene, node: u16) -> Result<String> {
    Ok(format!("/proc/{}/exe", scene.daemon(node)?.pid()))
}

/// Replaces a supervisor by the same build in another file.
fn upgrade(scene: &Scene, node: u16, build: &Path) -> Result<()> {
    // It needs the socket, not the network, and so no `ip netns exec`, whose work nobody has who replaces a daemon.
    let mut command = Command::new(Binaries::find()?.cli()?);
    command.arg("--socket").arg(scene.lab().node(node).socket());
    command.arg("upgrade").arg(build);
    process::run_ok(&mut command, BACK)?;
    let now = fs::read_link(program(scene, node)?).context("its program")?;
    ensure!(now == build, "the supervisor still runs {}", now.display());
    Ok(())
}
