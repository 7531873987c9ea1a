//! Which work is stepped through, and what is asked of every memory found on the way.
//!
//! A script of the laboratory is run once to see what the subject does in each of its turns. Every turn that stores anything durable is
//! then a path: it is run again up to that turn, which a copy is stepped through; and each memory found there is handed to a successor,
//! with which the script must come to its end and both applications to what is theirs ([`World::check`]). Takeovers are paths too: each
//! begins with a memory found in another path.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use portolan_transport::policy::Profile;
use portoland::engine::conversation::{
    Image, Memories, Memory, Progress, Risk, Script, Work, World,
};

use crate::tracee::{Trace, kill_after, trace};

/// From one word about long work to the next.
const PROGRESS: Duration = Duration::from_secs(10);

/// Twice as many works: half as many takeovers after each.
const WORKS_FULL: usize = 40;

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// All scripts instead of the shortest.
    pub complete: bool,
    /// A copy is killed after every so many instructions of a path, and around every so many of its stores. A death costs as many
    /// steps as it comes late.
    pub kill_every: usize,
    pub kill_around: usize,
    /// Of the memories a path leaves, every so many begin a takeover that is stepped through.
    pub adopt_every: usize,
}

impl Extent {
    /// What it takes.
    pub fn scripts(self) -> Vec<Script> {
        if self.complete {
            let short = Profile::ALL.map(Script::short);
            short.into_iter().chain(Script::all()).collect()
        } else {
            vec![
                Script::short(Profile::Default),
                Script::short(Profile::Rmpp),
            ]
        }
    }
}

/// A frame on the wire: its index, its words.
type Frames = Vec<(u32, Vec<u64>)>;

/// The subject dies in its `call`-th work and leaves this.
#[derive(Clone)]
struct Death {
    call: usize,
    image: Image,
    frames: Frames,
}

/// What one work of the subject was.
struct Seen {
    name: &'static str,
    changed: bool,
}

/// Runs through, and remembers what was done.
#[derive(Default)]
struct Watch(Vec<Seen>);

fn name(work: Work, before: Progress, after: Progress) -> &'static str {
    let did = (
        after.accepted != before.accepted,
        after.committed > before.committed,
        after.completed > before.completed,
    );
    match (work, did) {
        (Work::TakeOver(_), _) => "adopt",
        (Work::Open, _) => "open a port",
        (Work::Close, _) => "close a port",
        (Work::Turn, (true, _, true)) => "accept and complete",
        (Work::Turn, (true, _, false)) => "accept",
        (Work::Turn, (false, true, true)) => "commit and complete",
        (Work::Turn, (false, true, false)) => "commit",
        (Work::Turn, (false, false, true)) => "complete",
        (Work::Turn, (false, false, false)) => "streams and tokens",
    }
}

impl Risk for Watch {
    fn run<R>(&mut self, work: Work, memory: &Memory, body: impl FnOnce() -> R) -> Option<R> {
        let (before, image) = (memory.progress(), memory.image());
        let result = body();
        self.0.push(Seen {
            name: name(work, before, memory.progress()),
            changed: memory.image() != image,
        });
        Some(result)
    }
}

/// Dies as it is told; in the work after that, a copy is stepped through it first.
struct Fate<'f> {
    call: usize,
    deaths: &'f [Death],
    step: Option<(usize, Extent)>,
    found: Option<Result<(Trace, Frames)>>,
}

impl<'f> Fate<'f> {
    fn of(deaths: &'f [Death]) -> Self {
        Self {
            call: 0,
            deaths,
            step: None,
            found: None,
        }
    }

    fn stepping(deaths: &'f [Death], call: usize, extent: Extent) -> Self {
        Self {
            step: Some((call, extent)),
            ..Self::of(deaths)
        }
    }
}

/// Steps a copy through the work, and kills others on the way.
fn look<R>(memory: &Memory, extent: Extent, body: impl FnOnce() -> R) -> Result<(Trace, Frames)> {
    // Every copy does it, and none of them is us: each has the one there is.
    let body = std::cell::Cell::new(Some(body));
    let work = || body.take().map(|body| body());
    let (sent, begin) = (memory.frames_sent(), memory.image());
    let mut trace = trace(memory, work)?;
    let frames = memory.frames_since(sent);
    let around = extent.kill_around.max(1);
    let stores = trace.memories.iter().skip(around / 2).step_by(around);
    let stores = stores.map(|(at, _)| *at);
    let mut deaths: Vec<u64> = stores.flat_map(|at| [at.saturating_sub(1), at]).collect();
    deaths.extend((0..trace.instructions).step_by(extent.kill_every.max(1)));
    deaths.sort_unstable();
    deaths.dedup();
    trace.killed = kill_after(memory, &trace, deaths.into_iter(), work)?;
    memory.restore(&begin);
    // Not ours to drop: it is the subject's, whose copies did the work.
    Ok((trace, frames))
}

impl Risk for Fate<'_> {
    fn run<R>(&mut self, _: Work, memory: &Memory, body: impl FnOnce() -> R) -> Option<R> {
        let call = self.call;
        self.call += 1;
        if let Some((_, extent)) = self.step.filter(|(at, _)| *at == call) {
            let begin = memory.image();
            // The subject is stepped through, not alive afterwards: it died before it began.
            self.found = Some(look(memory, extent, body));
            memory.restore(&begin);
            return None;
        }
        let Some(death) = self.deaths.iter().find(|death| death.call == call) else {
            return Some(body());
        };
        memory.put_frames(&death.frames);
        memory.restore(&death.image);
        None
    }
}

/// What was found of all paths of one name.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub paths: u64,
    pub instructions: u64,
    pub memories: u64,
    pub killed: u64,
}

/// What was found, by name.
pub type Tallies = BTreeMap<&'static str, Tally>;

/// One script, from beginning to end.
struct Search<'m> {
    memories: &'m Memories,
    script: Script,
    extent: Extent,
    tallies: &'m mut Tallies,
}

impl Search<'_> {
    fn run(&mut self) -> Result<()> {
        let mut watch = Watch::default();
        World::run(self.memories, &self.script, &mut watch);
        let works = watch.0.iter().enumerate();
        let paths: Vec<_> = works.filter(|(_, seen)| seen.changed).collect();
        let mut said = Instant::now();
        for (nth, &(call, seen)) in paths.iter().enumerate() {
            if said.elapsed() > PROGRESS {
                said = Instant::now();
                let (name, of) = (self.script.name, paths.len());
                let instructions = instructions(self.tallies);
                eprintln!("{name}: {nth} of {of} works, {instructions} instructions so far");
            }
            let found = self.step_through(seen.name, &[], call)?;
            let every = self.adopt_every(paths.len());
            for (nth, death) in found.iter().enumerate() {
                if nth % every == every / 2 {
                    self.step_through("adopt", std::slice::from_ref(death), call + 1)?;
                }
            }
        }
        Ok(())
    }

    /// A script of hundreds of works leaves much the same to successors again and again.
    fn adopt_every(&self, works: usize) -> usize {
        let every = self.extent.adopt_every.max(1);
        every * (works / WORKS_FULL).max(1)
    }

    /// Steps through one work and asks everything of what it finds.
    fn step_through(
        &mut self,
        name: &'static str,
        deaths: &[Death],
        call: usize,
    ) -> Result<Vec<Death>> {
        let mut fate = Fate::stepping(deaths, call, self.extent);
        World::run(self.memories, &self.script, &mut fate);
        let Some(found) = fate.found else {
            bail!("{}: there is no {call}th work", self.script.name);
        };
        let (trace, frames) = found?;
        let tally = self.tallies.entry(name).or_default();
        tally.paths += 1;
        tally.instructions += trace.instructions;
        tally.memories += trace.memories.len() as u64;
        tally.killed += trace.killed;
        let mut all = Vec::new();
        for (instruction, image) in trace.memories {
            let death = Death {
                call,
                image,
                frames: frames.clone(),
            };
            let mut lives = deaths.to_vec();
            lives.push(death.clone());
            let run = || World::run(self.memories, &self.script, &mut Fate::of(&lives));
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                bail!(
                    "{}, {name} (work {call}): dead after instruction {instruction} of {}, the promise is broken",
                    self.script.name,
                    trace.instructions
                );
            }
            all.push(death);
        }
        Ok(all)
    }
}

/// Steps through every path of these scripts.
pub fn search(extent: Extent, scripts: &[Script]) -> Result<Tallies> {
    let memories = Memories::default();
    let mut tallies = Tallies::new();
    for script in scripts {
        let mut search = Search {
            memories: &memories,
            script: script.clone(),
            extent,
            tallies: &mut tallies,
        };
        let name = search.script.name;
        search.run()?;
        let instructions = instructions(&tallies);
        eprintln!("{name}: done, {instructions} instructions so far");
    }
    Ok(tallies)
}

fn instructions(tallies: &Tallies) -> u64 {
    tallies.values().map(|tally| tally.instructions).sum()
}
