//! Faults that end an engine, one after the other under load: each must be noticed, somebody else must serve, and every port must
//! receive again. Then everything that was sent must have come, once, in order, unchanged.

use std::time::{Duration, Instant};

use anyhow::Result;
use portolan_testbed::cancel;

use super::clock::{now_ns, ns, sleep_until};
use super::fault::Fault;
use super::outcome::Outcome;
use super::progress::Progress;
use super::random::Random;
use super::scene::{NODES, Scene, Setting};
use super::victim::{Bounds, Engine};

/// Bound on an engine with its standby to be there.
const READY: Duration = Duration::from_secs(10);
/// Bound on the recovery of an engine that was lost before its fault.
const BOTCHED: Duration = Duration::from_secs(2);
/// How long deliveries are watched after the successor is ready, and before the fault.
const AROUND: Duration = Duration::from_millis(50);
/// Faults come at any moment: up to this much later.
const JITTER: Duration = Duration::from_millis(10);
/// How long the nodes get to know each other.
const WARM_UP: Duration = Duration::from_millis(500);
/// So many worlds may break before a campaign gives up.
const WORLDS: u64 = 4;

/// A campaign of faults that end engines.
pub struct Deaths<'a> {
    pub kind: &'a str,
    /// Taken in turns.
    pub faults: &'a [Fault],
    pub count: u64,
    pub setting: &'a Setting,
}

impl Deaths<'_> {
    /// Runs it.
    ///
    /// # Errors
    /// Interrupted, or no world could be made; whatever the faults do is in the outcome.
    pub fn run(&self, progress: &mut Progress) -> Result<Outcome> {
        let mut outcome = Outcome::new(self.kind)?;
        let mut random = Random::new(self.setting.seed);
        let mut broken = 0;
        while outcome.injected < self.count && broken < WORLDS {
            let mut scene = Scene::start(self.setting)?;
            let before = recoveries(&scene)?;
            let bounds = serde_json::to_value(Bounds::of(scene.daemon(1)?)?)?;
            outcome.more.insert("bounds_us".into(), bounds);
            let hurt_before = outcome.injected + outcome.botched;
            let survived = self.hurt(&scene, &mut outcome, &mut random, progress);
            let after = recoveries(&scene);
            if cancel::requested() {
                return Err(anyhow::anyhow!("interrupted"));
            }
            if let Err(error) = &survived {
                broken += 1;
                outcome.note(format!("fault {}: {error:#}", outcome.injected));
            }
            if let Ok(after) = after {
                let expected = before + outcome.injected + outcome.botched - hurt_before;
                outcome.false_alarms += after.saturating_sub(expected);
            }
            outcome.median_gap_ns = scene.steady()?.log.median_ns();
            outcome.tally.merge(match survived {
                Ok(()) => scene.settle()?,
                Err(_) => scene.settle_broken()?,
            });
        }
        Ok(outcome)
    }

    /// Fault after fault in one world, until all are injected or the world is broken.
    fn hurt(
        &self,
        scene: &Scene,
        outcome: &mut Outcome,
        random: &mut Random,
        progress: &mut Progress,
    ) -> Result<()> {
        warm_up(scene)?;
        while outcome.injected < self.count {
            let node = NODES[random.below(2) as usize];
            let index = outcome.injected as usize % self.faults.len().max(1);
            let Some(fault) = self.faults.get(index) else {
                return Ok(());
            };
            if outcome.botched > self.count + WORLDS {
                anyhow::bail!("this machine is too busy to inject a fault");
            }
            let injected = outcome.injected;
            one(scene, node, *fault, outcome, random)?;
            if outcome.injected > injected {
                progress.step();
            }
        }
        Ok(())
    }
}

/// Everybody has received something.
pub fn warm_up(scene: &Scene) -> Result<()> {
    let nothing = vec![0; scene.received().len()];
    let silent = scene.wait_all_go_on(&nothing, READY);
    scene.check()?;
    if let Err(silent) = silent {
        anyhow::bail!("no traffic at {}", silent.join(", "));
    }
    sleep_until(now_ns() + ns(WARM_UP));
    Ok(())
}

/// Recoveries of both engines so far.
pub fn recoveries(scene: &Scene) -> Result<u64> {
    NODES
        .iter()
        .map(|node| Ok(scene.engine(*node)?.recoveries()))
        .sum()
}

/// One fault and what becomes of it.
pub fn one(
    scene: &Scene,
    node: u16,
    fault: Fault,
    outcome: &mut Outcome,
    random: &mut Random,
) -> Result<()> {
    let log = &scene.steady()?.log;
    let daemon = scene.daemon(node)?;
    Engine::wait_ready(daemon, READY)?;
    let quiet_from = now_ns();
    sleep_until(quiet_from + ns(AROUND) + ns(random.span(JITTER)));
    scene.check()?;
    let engine = Engine::wait_ready(daemon, READY)?;
    let Some(pid) = engine.pid else {
        anyhow::bail!("an engine without a process");
    };
    let median = log.median_ns();
    let noise = log.longest_ns(quiet_from, now_ns());
    let injected = match fault.inject(pid, &daemon.socket()) {
        Ok(injected) => injected,
        Err(error) => {
            // On a busy machine who is to be sent astray may stand still for so long that it is fenced for that.
            let fenced = engine.wait_recovered(daemon, BOTCHED).is_ok();
            outcome.botched += u64::from(fenced);
            return if fenced { Ok(()) } else { Err(error) };
        }
    };
    outcome.injected += 1;
    outcome.noise.record(noise.saturating_sub(median).max(1));
    let recovered = engine.wait_recovered(daemon, scene.patience)?;
    outcome.recovered_from(injected.at_ns, &recovered);
    let silent = scene.wait_all_go_on(&scene.received(), scene.patience);
    scene.check()?;
    if let Err(silent) = silent {
        anyhow::bail!("silent after the recovery: {}", silent.join(", "));
    }
    outcome.recovered += 1;
    let over = recovered.ready_at_ns.max(injected.at_ns) + ns(AROUND);
    sleep_until(over);
    let outage = log.longest_ns(injected.at_ns, over);
    if let Some(ended) = log.longest_end_ns(injected.at_ns, over) {
        let resumed = ended.saturating_sub(recovered.ready_at_ns);
        outcome.resume.record(resumed.max(1));
    }
    let outage = outage.saturating_sub(median).max(1);
    outcome.outage.record(outage);
    outcome.outage_at[usize::from(node == NODES[1])].record(outage);
    Engine::wait_ready(daemon, READY)?;
    let renewal = log.longest_ns(over, now_ns()).saturating_sub(median);
    outcome.renewal.record(renewal.max(1));
    outcome.whole.record(outage.max(renewal).max(1));
    log.forget_before(injected.at_ns);
    Ok(())
}

/// How long a campaign may be expected to take, per fault: watching before and after, a standby made, traffic again.
pub const EXPECTED_S: f64 = 0.3;

/// A clock for a campaign.
pub fn timed(work: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
    let began = Instant::now();
    let mut outcome = work()?;
    outcome.took_s = began.elapsed().as_secs_f64();
    Ok(outcome)
}
