//! The paper's own experiment: single bits flipped at random in the machine code of an engine while it carries traffic.
//!
//! A flip hits the active engine's private copy of its code; its standby and the file are untouched, which is checked. Then everything is
//! watched for a while, and what was seen is put into FTGM's categories ([`category`]). An engine that still runs is killed afterwards, so that
//! every flip meets sound code. A world in which messages were harmed is settled, counted and replaced by a fresh one.
//!
//! A damaged engine may do anything it has the right to: acknowledge what it did not deliver, scribble over ports. So nothing is promised
//! about messages here, except that with end-to-end integrity the applications are told. What is promised is that hangs and crashes
//! are noticed and traffic goes on.

pub mod category;
mod sites;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{Daemon, cancel};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::clock::now_ns;
use super::deaths::warm_up;
use super::fault::signal;
use super::meter::Meter;
use super::outcome::{Outcome, Promise};
use super::progress::Progress;
use super::random::Random;
use super::scene::{NODES, PAUSE, Scene, Setting};
use super::text::{Program, Text};
use super::victim::Engine;
use category::{Seen, Table};
use sites::{Executed, Sites};

pub use sites::Path;

/// How long a flip may show what it does.
const WATCHED: Duration = Duration::from_millis(250);
/// A port that receives nothing for so long has fallen silent.
const SILENT: Duration = Duration::from_secs(2);
/// Bound on an engine with its standby to be there.
const READY: Duration = Duration::from_secs(10);
/// Bound on a recovery.
const RECOVERED: Duration = Duration::from_secs(10);
/// Lines of a log that go into a report.
const LOG_LINES: usize = 200;
/// How long each engine is followed to learn what it executes.
const FOLLOWED: Duration = Duration::from_secs(4);
/// A watchdog that lets an engine be followed.
const PATIENT: &str = "\n[recovery]\nhang_after_us = 60000000\nstuck_after_us = 60000000\n";
/// What a supervisor logs when an engine says that it cannot go on.
const LEAVES: &str = "engine gives up";
/// How long a campaign may be expected to take, per flip.
pub const EXPECTED_S: f64 = 0.6;

/// A campaign of flips.
pub struct Flips<'a> {
    pub kind: &'static str,
    pub path: Path,
    pub count: u64,
    pub setting: &'a Setting,
}

/// What is compared before and after a flip.
#[derive(Clone, Debug)]
struct Snapshot {
    received: Vec<u64>,
    troubles: u64,
    odd: u64,
    recoveries: [u64; 2],
}

impl Snapshot {
    fn take(scene: &Scene) -> Result<Self> {
        let load = |figure: fn(&Meter) -> u64| scene.total(figure);
        let troubles = |m: &Meter| {
            m.troubles.load(Ordering::Relaxed)
                + m.failed.load(Ordering::Relaxed)
                + m.reported.load(Ordering::Relaxed)
        };
        let [one, two] = NODES.map(|node| scene.engine(node));
        Ok(Self {
            received: scene.received(),
            troubles: load(troubles),
            odd: load(|m| m.anomalies.load(Ordering::Relaxed)),
            recoveries: [one?.recoveries(), two?.recoveries()],
        })
    }
}

/// What both daemons say of themselves, the end of what they logged, and what their applications see.
fn everything(scene: &Scene) -> Value {
    let reports = ["status", "peers", "ports", "counters"];
    let of = |node: u16| {
        let said = reports.map(|what| {
            let said = scene.lab().node(node).report(what);
            (what, said.unwrap_or_default())
        });
        let log = scene.daemon(node).map(Daemon::log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(LOG_LINES).collect();
        let log = ("log", lines.into_iter().rev().collect());
        Value::from_iter(said.into_iter().chain([log]))
    };
    json!({ "nodes": NODES.map(of), "load": scene.load_report() })
}

impl Flips<'_> {
    pub fn run(&self, progress: &mut Progress) -> Result<Outcome> {
        let mut outcome = Outcome::new(self.kind)?;
        outcome.promise = Promise::Reported;
        let mut table = Table::default();
        let mut random = Random::new(self.setting.seed ^ u64::from(self.path == Path::Send));
        let (program, sites) = self.learn()?;
        outcome.more.insert("sites".into(), sites.describe().into());
        let mut worlds = 0u64;
        while table.flips < self.count {
            worlds += 1;
            let mut scene = Scene::start(self.setting)?;
            warm_up(&scene)?;
            let (mut harmed, mut sound) = (false, true);
            while table.flips < self.count && !harmed {
                let (address, bit) = match self.setting.flip_at {
                    Some(at) => at,
                    None => sites.pick(&mut random)?,
                };
                let node = NODES[random.below(2) as usize];
                let function = (program.functions.iter())
                    .find(|f| (f.address..f.address + f.bytes).contains(&address));
                let name = function.map_or("?", |function| &function.name);
                let what = format!("bit {bit} of {address:#x} ({name}) on node {node}");
                let seen = self.flip(
                    &scene,
                    &program,
                    node,
                    address,
                    bit,
                    &mut table,
                    &mut outcome,
                );
                if cancel::requested() {
                    bail!("interrupted");
                }
                let seen = match seen {
                    Ok(seen) => seen,
                    Err(error) => {
                        // Of an earlier one, perhaps. Another world is needed.
                        outcome.note(format!("before {what}: {error:#}"));
                        outcome.more.insert(what, everything(&scene));
                        table.down += 1;
                        sound = false;
                        break;
                    }
                };
                harmed =
                    seen.corrupted || seen.other || seen.host_crash || seen.silent || seen.down;
                if harmed || seen.remote {
                    outcome.note(format!("{what}: {seen:?}"));
                }
                sound = !seen.down && !seen.host_crash;
                if seen.down {
                    // Before anything settles: what is to be explained is in here.
                    outcome.more.insert(what, everything(&scene));
                }
                table.add(&seen);
                progress.step();
            }
            // What stands still is not waited for.
            let tally = match sound {
                true => scene.settle()?,
                false => scene.settle_broken()?,
            };
            table.unreported += tally.unreported;
            outcome.tally.merge(tally);
        }
        outcome.injected = table.flips;
        outcome.detected = table.replaced;
        outcome.recovered = table.recovered;
        outcome.more.insert("worlds".into(), worlds.into());
        outcome
            .more
            .insert("integrity".into(), self.setting.integrity.into());
        outcome.more.insert("table".into(), table.json());
        outcome.flips = Some(table);
        Ok(outcome)
    }

    /// Which instructions traffic executes.
    fn learn(&self) -> Result<(Program, Sites)> {
        let mut setting = self.setting.clone();
        for overrides in &mut setting.overrides {
            overrides.push_str(PATIENT);
        }
        let scene = Scene::start(&setting)?;
        warm_up(&scene)?;
        let pid = scene
            .engine(1)?
            .pid
            .context("an engine without a process")?;
        let program = Program::read(std::path::Path::new(&format!("/proc/{pid}/exe")))?;
        let mut executed = Executed::default();
        let mut random = Random::new(self.setting.seed);
        for node in NODES {
            let pid = scene
                .engine(node)?
                .pid
                .context("an engine without a process")?;
            let text = Text::of_program(pid, &program)?;
            executed.follow(pid, &program, text.address(0), FOLLOWED, &mut random)?;
        }
        let sites = Sites::of(self.path, &program, &executed)?;
        eprintln!(
            "the engine executes {} instructions; its {} path: {}",
            executed.len(),
            self.path.name(),
            sites.describe()
        );
        Ok((program, sites))
    }

    /// One flip and what it does.
    #[allow(clippy::too_many_arguments)]
    fn flip(
        &self,
        scene: &Scene,
        program: &Program,
        node: u16,
        address: u64,
        bit: u32,
        table: &mut Table,
        outcome: &mut Outcome,
    ) -> Result<Seen> {
        let daemon = scene.daemon(node)?;
        let engine = Engine::wait_ready(daemon, READY)?;
        let pid = engine.pid.context("an engine without a process")?;
        let before = Snapshot::take(scene)?;
        let left = |daemon: &Daemon| daemon.log().matches(LEAVES).count();
        let left_before = left(daemon);
        let text = Text::of_program(pid, program)?;
        let injected = now_ns();
        let byte = text.flip(text.address(address), bit)?;
        self.others_untouched(scene, program, node, address, byte)?;
        let mut seen = self.watch(scene, daemon, &engine, &before)?;
        if let Some(recovered) = &seen.1 {
            outcome.recovered_from(injected, recovered);
        }
        seen.0.gave_up = left(daemon) > left_before;
        let mut on_its_feet = true;
        if seen.1.is_none() && !seen.0.host_crash {
            // Its code is damaged; whoever follows has sound code. It may be gone by now.
            let _ = signal(pid, Signal::KILL);
            on_its_feet = engine.wait_recovered(daemon, RECOVERED).is_ok();
        }
        let lost = seen.0.cause.is_some();
        if scene.failure().is_none() && on_its_feet {
            // A port may be closed for what its engine did to it, also while we wait for it: the others' engine serves.
            let all = scene.wait_all_go_on(&scene.received(), RECOVERED);
            on_its_feet = all.is_ok() || scene.failure().is_some();
        }
        if lost && on_its_feet {
            table.recovered += 1;
        } else if !on_its_feet {
            seen.0.down = true;
            outcome.note(format!("not recovered: {:?}", scene.engine(node)));
        }
        self.judge(scene, &before, node, &mut seen.0);
        Ok(seen.0)
    }

    /// Watches until the engine is replaced, or long enough.
    fn watch(
        &self,
        scene: &Scene,
        daemon: &Daemon,
        engine: &Engine,
        before: &Snapshot,
    ) -> Result<(Seen, Option<super::victim::Recovered>)> {
        let began = Instant::now();
        let mut seen = Seen::default();
        loop {
            let Ok(now) = Engine::look(daemon) else {
                seen.host_crash = began.elapsed() > SILENT;
                if seen.host_crash {
                    return Ok((seen, None));
                }
                std::thread::sleep(PAUSE);
                continue;
            };
            if now.recoveries() > engine.recoveries() || now.pid != engine.pid {
                let recovered = engine.wait_recovered(daemon, RECOVERED).ok();
                let recovery = recovered.as_ref().and_then(|r| r.recovery.as_ref());
                seen.cause = Some(recovery.map_or("unknown".to_owned(), |r| r.cause.clone()));
                return Ok((seen, recovered));
            }
            let silent = scene
                .received()
                .iter()
                .zip(&before.received)
                .any(|(now, then)| now <= then);
            let long = began.elapsed();
            if long >= SILENT && silent && scene.failure().is_none() {
                seen.silent = true;
            }
            if cancel::requested() || long >= SILENT || long >= WATCHED && !silent {
                return Ok((seen, None));
            }
            std::thread::sleep(2 * PAUSE);
        }
    }

    /// What else is to be seen afterwards.
    fn judge(&self, scene: &Scene, before: &Snapshot, node: u16, seen: &mut Seen) {
        let Ok(after) = Snapshot::take(scene) else {
            seen.host_crash = true;
            return;
        };
        let other = usize::from(node == 1);
        seen.remote = after.recoveries.get(other) > before.recoveries.get(other);
        seen.corrupted = after.troubles > before.troubles;
        seen.other = after.odd > before.odd || scene.failure().is_some();
    }

    /// The supervisor runs the same file: its copy shows what everybody else has.
    fn others_untouched(
        &self,
        scene: &Scene,
        program: &Program,
        node: u16,
        address: u64,
        byte: u8,
    ) -> Result<()> {
        let supervisor = Text::of_program(scene.daemon(node)?.pid(), program)?;
        let mut found = [0];
        supervisor.read(supervisor.address(address), &mut found)?;
        if found != [byte] {
            bail!("the flip reached another process");
        }
        Ok(())
    }
}
