//! Supervisors that are killed, and supervisors that are replaced by another build, while their engines go on.
//!
//! Nothing may be lost, and nobody may notice: the engines stay who they are, and the longest gaps between deliveries are those that the
//! machine makes without a fault.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use portolan_testbed::process;

use super::clock::{now_ns, ns, sleep_until};
use super::deaths::{recoveries, warm_up};
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
/// How long deliveries are watched afterwards, and before.
const AROUND: Duration = Duration::from_millis(100);
/// How long a campaign may be expected to take, per supervisor.
pub const EXPECTED_S: f64 = 0.6;

/// What is done to a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// SIGKILL; its manager starts it again.
    Kill,
    /// `portolan upgrade` to another file of the same build.
    Upgrade,
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
    let mut random = Random::new(setting.seed);
    let setting = Setting {
        managed: true,
        ..setting.clone()
    };
    // Not in the lab's directory: what is below /run may not be executable.
    let builds = tempfile::tempdir().context("a directory for builds")?;
    fs::set_permissions(builds.path(), fs::Permissions::from_mode(0o755))?;
    let mut scene = Scene::start(&setting)?;
    warm_up(&scene)?;
    let before = recoveries(&scene)?;
    let log = scene.steady()?.log.clone();
    for number in 0..count {
        let node = NODES[random.below(2) as usize];
        let one = one(
            deed,
            &scene,
            node,
            &builds.path().join(format!("portoland-{number}")),
            &log,
            &mut outcome,
        );
        scene.check()?;
        if let Err(error) = one {
            outcome.note(format!("{number}: {error:#}"));
            break;
        }
        progress.step();
    }
    outcome.false_alarms = recoveries(&scene).map_or(0, |after| after.saturating_sub(before));
    outcome.median_gap_ns = log.median_ns();
    outcome.tally = scene.settle()?;
    Ok(outcome)
}

fn one(
    deed: Deed,
    scene: &Scene,
    node: u16,
    build: &Path,
    log: &GapLog,
    outcome: &mut Outcome,
) -> Result<()> {
    let daemon = scene.daemon(node)?;
    let engine = Engine::wait_ready(daemon, READY)?;
    if deed == Deed::Upgrade {
        // Not while deliveries are watched: 20 MB are copied.
        fs::copy(program(scene, node)?, build).context("a copy of the daemon")?;
    }
    let quiet = now_ns();
    sleep_until(quiet + ns(AROUND));
    let median = log.median_ns();
    let began = now_ns();
    outcome
        .noise
        .record(log.longest_ns(quiet, began).saturating_sub(median).max(1));
    outcome.injected += 1;
    match deed {
        Deed::Kill => {
            let start = daemon.manager()?.kill()?;
            daemon.manager()?.wait_ready(start, BACK)?;
        }
        Deed::Upgrade => upgrade(scene, node, build)?,
    }
    let back = now_ns();
    outcome.takeover.record(back - began);
    let now = Engine::wait_ready(daemon, READY)?;
    ensure!(
        now.pid == engine.pid,
        "the engine was {:?} and is {:?}",
        engine.pid,
        now.pid
    );
    if let Err(silent) = scene.wait_all_go_on(&scene.received(), BACK) {
        bail!("silent afterwards: {}", silent.join(", "));
    }
    outcome.recovered += 1;
    let over = back + ns(AROUND);
    sleep_until(over);
    let outage = log.longest_ns(began, over);
    outcome.outage.record(outage.saturating_sub(median).max(1));
    log.forget_before(began);
    Ok(())
}

/// What a node's supervisor runs.
fn program(scene: &Scene, node: u16) -> Result<String> {
    Ok(format!("/proc/{}/exe", scene.daemon(node)?.pid()))
}

/// Replaces a supervisor by the same build in another file.
fn upgrade(scene: &Scene, node: u16, build: &Path) -> Result<()> {
    let mut command = scene.lab().node(node).portolan();
    command.arg("upgrade").arg(build);
    process::run_ok(&mut command, BACK)?;
    let now = fs::read_link(program(scene, node)?).context("its program")?;
    ensure!(now == build, "the supervisor still runs {}", now.display());
    Ok(())
}
