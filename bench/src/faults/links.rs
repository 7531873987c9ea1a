//! Interfaces that go down and up again: everything resumes without help, and every send ends with a definite status.

use std::time::Duration;

use anyhow::{Context, Result};
use portolan_testbed::process;

use super::clock::{now_ns, ns, sleep_until};
use super::deaths::{recoveries, warm_up};
use super::outcome::{Outcome, Promise};
use super::progress::Progress;
use super::random::Random;
use super::scene::{NODES, Scene, Setting};

/// Down at least and at most so long.
const DOWN: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(300)];
/// Bound on one `ip` command.
const STEP: Duration = Duration::from_secs(10);
/// Bound on traffic to resume.
const RESUMED: Duration = Duration::from_secs(20);
/// Between two cycles.
const BETWEEN: Duration = Duration::from_millis(200);

/// `count` times down and up.
pub fn links(setting: &Setting, count: u64, progress: &mut Progress) -> Result<Outcome> {
    let mut outcome = Outcome::new("link")?;
    outcome.promise = Promise::Definite;
    let mut random = Random::new(setting.seed);
    let mut scene = Scene::start(setting)?;
    warm_up(&scene)?;
    let recoveries_before = recoveries(&scene)?;
    let log = scene.steady()?.log.clone();
    for _ in 0..count {
        let node = NODES[random.below(2) as usize];
        let median = log.median_ns();
        outcome.injected += 1;
        set(&scene, node, "down")?;
        let spread = DOWN[1].saturating_sub(DOWN[0]);
        sleep_until(now_ns() + ns(DOWN[0]) + ns(random.span(spread)));
        set(&scene, node, "up")?;
        let up = now_ns();
        let silent = scene.wait_all_go_on(&scene.received(), RESUMED);
        scene.check()?;
        if let Err(silent) = silent {
            outcome.note(format!(
                "silent after the link came up: {}",
                silent.join(", ")
            ));
            break;
        }
        outcome.recovered += 1;
        let over = now_ns() + ns(BETWEEN);
        sleep_until(over);
        // What is left of the gap once the link is there again.
        let ended = log.longest_end_ns(up, over).unwrap_or(up);
        outcome
            .outage
            .record(ended.saturating_sub(up + median).max(1));
        log.forget_before(up);
        progress.step();
    }
    let recoveries_after = recoveries(&scene)?;
    outcome.more.insert(
        "engines_replaced".into(),
        (recoveries_after - recoveries_before).into(),
    );
    outcome.median_gap_ns = log.median_ns();
    outcome.tally = scene.settle()?;
    Ok(outcome)
}

fn set(scene: &Scene, node: u16, state: &str) -> Result<()> {
    let node = scene.lab().node(node);
    let mut command = node.command("ip");
    command.args(["link", "set", "dev", &node.interface(), state]);
    process::run_ok(&mut command, STEP)
        .map(drop)
        .with_context(|| format!("link {state}"))
}
