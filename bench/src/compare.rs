//! The comparison: every case, every subject, taking turns.
//!
//! One lab per kind of interface. In it, for each group of cases, the subjects take turns: started, asked, ended. Who begins changes from turn to turn.
//! A subject that fails loses its answers of that turn and is reported; the others go on.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use portolan_testbed::{Lab, cancel};

use crate::cases::{Case, Group, Plan};
use crate::company::Company;
use crate::distance;
use crate::report::{self, Results};
use crate::subjects::{self, Scene, Subject};

/// What a start of a subject is expected to take.
const START: Duration = Duration::from_millis(300);

/// What is compared and how.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Cases, or what their names begin with [default: all]
    cases: Vec<String>,
    /// A look, in less than two minutes
    #[arg(long)]
    quick: bool,
    /// Only these subjects
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<String>,
    /// Also what people use today, and what was installed for that: UCX, libfabric, Open MPI
    #[arg(long)]
    peers: bool,
    /// Turns of every subject at every case
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    turns: Option<u32>,
    /// Before each measurement, waits up to two seconds until the cores are near each other: on a virtual machine whose host moves them, builds are
    /// compared at the same distance
    #[arg(long)]
    near: bool,
    /// Also writes the report here, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// And here, with plots
    #[arg(long)]
    html: Option<PathBuf>,
    /// And here, as the tables of docs/performance.md
    #[arg(long)]
    markdown: Option<PathBuf>,
}

/// Measures and reports.
///
/// # Errors
/// What kept it from measuring; or, after the report, that something of ours could not be measured.
pub fn run(options: &Options) -> Result<()> {
    let mut plan = Plan::new(&options.cases, options.quick)?;
    if let Some(turns) = options.turns {
        plan.timing.turns = turns as usize;
    }
    plan.near = options.near;
    let mut subjects = subjects::all();
    for name in &options.subjects {
        if !subjects.iter().any(|subject| subject.name() == name) {
            let names: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
            bail!("there is no subject {name}; there are: {}", names.join(" "));
        }
    }
    let is_named = |name: &str| options.subjects.iter().any(|named| named == name);
    subjects.retain(|subject| match options.subjects.is_empty() {
        true => options.peers || !subject.is_extra(),
        false => is_named(subject.name()),
    });
    let abouts = subjects
        .iter()
        .map(|subject| (subject.name().to_owned(), subject.about()));
    let cases: Vec<Case> = plan.cases().copied().collect();
    let turns = plan.timing.turns;
    let mut results = Results::new(abouts.collect(), cases, turns, options.quick);
    let company = Company::meet();
    let began = Instant::now();
    let measured = measure(&plan, &subjects, &mut results);
    results.took_s = began.elapsed().as_secs_f64();
    measured?;
    print!("{}", report::table(&results));
    println!(
        "{}; {turns} turns, {:.0} s",
        crate::host::line(),
        results.took_s
    );
    if let Some(distances) = results.distances() {
        println!("{distances}");
    }
    company.warn();
    type Write = fn(&Results, &Path) -> Result<()>;
    let forms: [(&Option<PathBuf>, Write); 3] = [
        (&options.json, report::write_json),
        (&options.html, report::write_html),
        (&options.markdown, report::write_markdown),
    ];
    for (path, write) in forms {
        if let Some(path) = path {
            write(&results, path)?;
            println!("written to {}", path.display());
        }
    }
    if let Some((case, subject, _)) = results.failures.first() {
        bail!("{subject} failed at {case}, and perhaps others");
    }
    Ok(())
}

fn measure(plan: &Plan, subjects: &[Box<dyn Subject>], results: &mut Results) -> Result<()> {
    let expected = whole(plan, subjects);
    println!(
        "{} cases of {} subjects, {} turns: about {:.0} minutes",
        results.cases.len(),
        subjects.len(),
        plan.timing.turns,
        (expected.as_secs_f64() / 60.0).ceil()
    );
    let progress = progress(expected)?;
    let mut at: Option<((u32, u16), Lab)> = None;
    for group in &plan.groups {
        let interfaces = (group.mtu, group.queues);
        if at.as_ref().is_none_or(|(are, _)| *are != interfaces) {
            // The old one first: one lab at a time has the cores.
            if let Some((_, lab)) = at.take() {
                lab.remove()?;
            }
            let lab = Lab::builder().mtu(group.mtu).queues(group.queues);
            at = Some((interfaces, lab.build()?));
        }
        let (_, lab) = at.as_ref().context("no lab")?;
        take_turns(plan, group, &Scene::new(lab)?, subjects, results, &progress)?;
    }
    progress.finish_and_clear();
    match at {
        Some((_, lab)) => lab.remove(),
        None => Ok(()),
    }
}

fn take_turns(
    plan: &Plan,
    group: &Group,
    scene: &Scene<'_>,
    subjects: &[Box<dyn Subject>],
    results: &mut Results,
    progress: &ProgressBar,
) -> Result<()> {
    let offering: Vec<(&dyn Subject, Vec<Case>)> = offers(group, subjects);
    // Who cannot be started now will not be a moment later.
    let mut absent: Vec<&str> = Vec::new();
    for turn in 0..plan.timing.turns {
        for place in 0..offering.len() {
            let (subject, cases) = &offering[(place + turn) % offering.len()];
            let name = subject.name();
            if absent.contains(&name) {
                continue;
            }
            let mut started = match subject.start(scene, cases) {
                Ok(started) => started,
                Err(error) if cancel::requested() => return Err(error),
                Err(error) => {
                    results.fail(&cases[0].to_string(), name, &format!("{error:#}"));
                    absent.push(name);
                    continue;
                }
            };
            progress.inc(START.as_millis() as u64);
            for case in cases {
                progress.set_message(format!("{case}, {name}"));
                let lasting = plan.timing.of(case);
                let before = match plan.near {
                    true => distance::when_near(scene.cores()),
                    false => distance::round_trip(scene.cores()),
                };
                match started.measure(case, lasting) {
                    Ok(figures) => {
                        results.add(case, name, turn, figures);
                        let around = [before, distance::round_trip(scene.cores())];
                        results.at_distance(case, name, turn, around);
                    }
                    Err(error) if cancel::requested() => return Err(error),
                    Err(error) => {
                        results.fail(&case.to_string(), name, &format!("{error:#}"));
                        // What it left behind would be measured next.
                        break;
                    }
                }
                progress.inc(expected(plan, case).as_millis() as u64);
                if cancel::requested() {
                    bail!("interrupted");
                }
            }
        }
        if let Some(first) = group.cases.first() {
            tell(progress, first, turn + 1);
        }
    }
    Ok(())
}

/// Where there is no terminal, how far it has come, in a line of its own.
fn tell(progress: &ProgressBar, first: &Case, turn: usize) {
    if !progress.is_hidden() {
        return;
    }
    let done = progress.position() as f64 / progress.length().unwrap_or(1).max(1) as f64;
    let left = progress.elapsed().as_secs_f64() * (1.0 - done) / done.max(0.001);
    eprintln!(
        "{first} and its like, turn {turn}: {:.0} %, about {:.0} min left",
        done * 100.0,
        (left / 60.0).ceil()
    );
}

/// Who has answers to a group, and to which of its cases.
fn offers<'a>(
    group: &Group,
    subjects: &'a [Box<dyn Subject>],
) -> Vec<(&'a dyn Subject, Vec<Case>)> {
    let offer = |subject: &'a dyn Subject| {
        let offered = group.cases.iter().filter(|case| subject.offers(case));
        let offered: Vec<Case> = offered.copied().collect();
        (!offered.is_empty()).then_some((subject, offered))
    };
    let subjects = subjects.iter().map(Box::as_ref);
    subjects.filter_map(offer).collect()
}

fn expected(plan: &Plan, case: &Case) -> Duration {
    let answers = match case {
        Case::AllSize { .. } => 3,
        _ => 1,
    };
    plan.timing.of(case) * 5 / 4 * answers
}

/// What all of it is expected to take.
fn whole(plan: &Plan, subjects: &[Box<dyn Subject>]) -> Duration {
    let mut total = Duration::ZERO;
    for group in &plan.groups {
        for (_, cases) in offers(group, subjects) {
            let cases: Duration = cases.iter().map(|case| expected(plan, case)).sum();
            total += (START + cases) * plan.timing.turns as u32;
        }
    }
    total
}

fn progress(expected: Duration) -> Result<ProgressBar> {
    // Where there is no terminal it shows nothing; `tell` does.
    let bar = ProgressBar::new(expected.as_millis() as u64);
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {percent:>3} %, {eta} left  {msg}",
    )?);
    Ok(bar)
}

#[cfg(test)]
mod tests {
    use super::*;

    // By arithmetic, as it is printed at the start. Expect: a look within two minutes, everything within half an hour, and with the
    // peers too.
    #[test]
    fn a_run_takes_no_longer_than_promised() {
        let minutes = |quick, peers| {
            let mut subjects = subjects::all();
            subjects.retain(|subject| peers || !subject.is_extra());
            let plan = Plan::new(&[], quick).unwrap();
            whole(&plan, &subjects).as_secs_f64() / 60.0
        };
        let found = [(true, false), (false, false), (false, true)];
        let found = found.map(|(quick, peers)| minutes(quick, peers));
        assert!(
            found[0] < 2.0 && found[1] < 20.0 && found[2] < 30.0,
            "{found:?}"
        );
    }
}
