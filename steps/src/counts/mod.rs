//! Instructions of the hot paths, counted by callgrind and compared with a baseline that is committed.
//!
//! Problem: time measured on a shared machine scatters by more than a change to the hot path costs; a growth of a few per cent would
//! never be seen, and many of them add up. Idea: under callgrind the same program takes the same instructions every time, so a growth of
//! [`LIMIT`] is a fact. Each case ([`cases`]) runs in a process of its own, and only what happens inside [`counted`] is counted; what is
//! compared is the mean of many repetitions, after others that warmed tables and queues up.
//!
//! What a count depends on besides our code: the compiler, whose version the baseline names; the processor, of which valgrind shows the
//! program no more than AVX2, and we hide AVX from libc, so that its copies take the same way everywhere. CRC32C takes the path of
//! SSE 4.2, which valgrind translates and every x86-64 of the last fifteen years has. Another architecture has no baseline.
//! Instructions are not time: a miss of the cache or a system call counts as one, or not at all.
//!
//! Rejected: gungraun (iai-callgrind), which does the same through a benchmark harness, but wants a runner of the exactly same version
//! installed beside it, and builds everything once more under its own profile; `perf stat`, which virtual machines often do not have.

mod baseline;
mod cases;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::callgrind;
use baseline::{Baseline, Conditions};
use cases::Case;

/// Growth beyond this fails; shrinkage beyond it is worth a new baseline.
const LIMIT: f64 = 0.03;
/// The same under another compiler or valgrind than the baseline's, whose own differences are in it.
const LIMIT_ELSEWHERE: f64 = 0.15;
/// Repetitions that are counted.
const REPETITIONS: u64 = 200;

/// What is counted, and against what.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The baseline
    baseline: PathBuf,
    /// The compiler this program was built with
    #[arg(long)]
    compiler: String,
    /// Makes the baseline of what is counted now
    #[arg(long)]
    accept: bool,
}

/// Everything that happens inside is counted, when this runs under callgrind.
#[inline(never)]
fn counted<R>(body: impl FnOnce() -> R) -> R {
    body()
}

/// Runs one case, for callgrind to watch.
pub fn run_case(name: &str) -> Result<()> {
    let case = Case::named(name).with_context(|| format!("there is no case {name}"))?;
    case.run(REPETITIONS);
    Ok(())
}

/// Counts all cases and compares.
pub fn compare(options: &Options) -> Result<()> {
    let here = std::env::current_exe().context("path of this program")?;
    let conditions = Conditions {
        compiler: options.compiler.clone(),
        valgrind: callgrind::version()?,
    };
    let mut now = BTreeMap::new();
    for case in Case::all() {
        let mut command = Command::new(&here);
        command.args(["count", &case.name()]);
        let total = callgrind::count(&command, "*counts*counted*")?;
        let each = total as f64 / (REPETITIONS * case.messages()) as f64;
        now.insert(case.name(), (each * 10.0).round() / 10.0);
    }
    let old = Baseline::read(&options.baseline)?;
    let limit = match old.conditions() {
        Some(known) if *known != conditions => {
            println!("counted with {conditions}");
            println!("the baseline with {known}: what differs may be theirs");
            LIMIT_ELSEWHERE
        }
        _ => LIMIT,
    };
    let grown = report(&old, &now, limit);
    if options.accept {
        Baseline::new(conditions, now).write(&options.baseline)?;
        println!("accepted; commit the baseline with the change, and say why");
        return Ok(());
    }
    if grown.is_empty() {
        return Ok(());
    }
    bail!(
        "{} grew by more than {:.0} %; if that is the price of something, say of what in the commit, and accept it: cargo xtask counts --accept",
        grown.join(", "),
        100.0 * limit
    )
}

/// Prints the table; returns what fails.
fn report(old: &Baseline, now: &BTreeMap<String, f64>, limit: f64) -> Vec<String> {
    println!(
        "{:<28}{:>12}{:>12}{:>9}",
        "instructions per message", "baseline", "now", ""
    );
    let mut failed = Vec::new();
    let mut shrunk = false;
    for (name, count) in now {
        let Some(before) = old.count(name) else {
            println!("{name:<28}{:>12}{count:>12.1}  new", "");
            if !old.is_empty() {
                failed.push(name.clone());
            }
            continue;
        };
        let change = count / before - 1.0;
        let mark = verdict(change, limit);
        println!(
            "{name:<28}{before:>12.1}{count:>12.1}{:>8.1} %{mark}",
            100.0 * change
        );
        match mark {
            GREW => failed.push(name.clone()),
            SHRANK => shrunk = true,
            _ => {}
        }
    }
    if shrunk {
        println!("less than before: keep it that way with cargo xtask counts --accept");
    }
    if old.is_empty() {
        println!("no baseline for this architecture: nothing to compare with");
    }
    failed
}

const GREW: &str = "  MORE";
const SHRANK: &str = "  less";

fn verdict(change: f64, limit: f64) -> &'static str {
    // Not a number is no better than too much.
    if change < -limit {
        SHRANK
    } else if change <= limit {
        ""
    } else {
        GREW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &[(&str, f64)]) -> BTreeMap<String, f64> {
        let owned = all.iter().map(|(name, count)| ((*name).to_owned(), *count));
        owned.collect()
    }

    fn baseline(all: &[(&str, f64)]) -> Baseline {
        let conditions = Conditions {
            compiler: "rustc".to_owned(),
            valgrind: "valgrind".to_owned(),
        };
        Baseline::new(conditions, counts(all))
    }

    // 3 % more passes, a little beyond fails, less never does.
    #[test]
    fn growth_beyond_the_limit_fails() {
        let old = baseline(&[("a", 1000.0), ("b", 1000.0), ("c", 1000.0)]);
        let now = counts(&[("a", 1029.9), ("b", 1030.1), ("c", 10.0)]);
        assert_eq!(report(&old, &now, LIMIT), ["b"]);
        assert!(report(&old, &now, LIMIT_ELSEWHERE).is_empty());
        assert_eq!(verdict(-0.031, LIMIT), SHRANK);
        assert_eq!(verdict(f64::NAN, LIMIT), GREW);
    }

    // A case that nobody accepted fails, unless there is nothing at all.
    #[test]
    fn a_case_without_a_baseline_fails() {
        let now = counts(&[("a", 1.0), ("new", 1.0)]);
        assert_eq!(report(&baseline(&[("a", 1.0)]), &now, LIMIT), ["new"]);
        assert!(report(&Baseline::default(), &now, LIMIT).is_empty());
    }

    #[test]
    fn every_case_runs_and_has_a_name_of_its_own() {
        let mut names: Vec<String> = Case::all().iter().map(Case::name).collect();
        for case in Case::all() {
            assert!(Case::named(&case.name()).is_some());
            case.run(2);
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
