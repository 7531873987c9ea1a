//! `cargo xtask sim --mutants`: does the simulator notice bugs?
//!
//! Problem: a checker that never fails proves nothing. Idea: `sim/mutants.toml` lists bugs as textual changes to the transport. Each
//! is made in a copy of `crc/`, `transport/` and `sim/` under `target/mutants`, built, and run over seeds until a checker objects.
//! One that survives is a hole in the simulator. A change whose text is not found exactly once is an error: the code moved on.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use portolan_testbed::cancel;
use portolan_testbed::process::{OnCancel, wait_child};
use serde::Deserialize;

use crate::steps::root;

/// Seeds a mutant is run over at most.
const SEEDS: u64 = 300;
/// Bound on a build, and on all seeds of one mutant.
const BUILD: Duration = Duration::from_secs(10 * 60);
const RUN: Duration = Duration::from_secs(5 * 60);
/// Quick to build, fast enough to run.
const PROFILE: &str = "\n[profile.mutants]\ninherits = \"release\"\nlto = false\nopt-level = 1\ncodegen-units = 16\n\
                       debug = false\noverflow-checks = true\n";

#[derive(Deserialize)]
struct List {
    mutant: Vec<Mutant>,
}

/// A planted bug.
#[derive(Deserialize)]
struct Mutant {
    name: String,
    /// What it breaks, in words.
    breaks: String,
    /// All nodes run this profile; drawn from the seed without.
    profile: Option<String>,
    file: PathBuf,
    find: String,
    replace: String,
}

/// Who noticed.
enum Fate {
    /// A checker, at this seed.
    Caught(String, u64),
    /// The run never ended.
    Hung,
    Survived,
}

/// Runs the mutants of these names, or all.
pub fn run(only: &[String]) -> Result<()> {
    let path = root().join("sim/mutants.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let list: List = toml::from_str(&text).with_context(|| path.display().to_string())?;
    let chosen = |mutant: &&Mutant| only.is_empty() || only.contains(&mutant.name);
    let mutants: Vec<&Mutant> = list.mutant.iter().filter(chosen).collect();
    ensure!(!mutants.is_empty(), "no mutant of that name");
    let tree = root().join("target/mutants/tree");
    copy_tree(&tree)?;
    for mutant in &mutants {
        mutant.applied(&tree)?; // before the first long build
    }
    println!("   without a mutant");
    build(&tree)?;
    let known = failing_seeds(&tree, None)?;
    if !known.is_empty() {
        println!("   seeds that fail as it is, and say nothing about mutants: {known:?}");
    }
    let mut survivors = 0;
    println!(
        "   {:<26} {:<14} {:>5}   what it breaks",
        "mutant", "caught by", "seed"
    );
    for mutant in mutants {
        let fate = judge(mutant, &tree, &known).with_context(|| mutant.name.clone())?;
        let (by, seed) = match fate {
            Fate::Caught(by, seed) => (by, seed.to_string()),
            Fate::Hung => ("never ends".to_owned(), String::new()),
            Fate::Survived => {
                survivors += 1;
                ("NOBODY".to_owned(), String::new())
            }
        };
        println!(
            "   {:<26} {by:<14} {seed:>5}   {}",
            mutant.name, mutant.breaks
        );
    }
    ensure!(survivors == 0, "{survivors} mutants survived {SEEDS} seeds");
    Ok(())
}

impl Mutant {
    /// The file with the bug in it.
    fn applied(&self, tree: &Path) -> Result<String> {
        let path = tree.join(&self.file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let found = text.matches(&self.find).count();
        ensure!(
            found == 1,
            "mutant {}: its text stands {found} times in {}",
            self.name,
            self.file.display()
        );
        Ok(text.replace(&self.find, &self.replace))
    }
}

/// A workspace of the simulator and what it is made of.
fn copy_tree(tree: &Path) -> Result<()> {
    if tree.exists() {
        fs::remove_dir_all(tree)?;
    }
    for part in [
        "crc/src",
        "crc/Cargo.toml",
        "transport/src",
        "transport/Cargo.toml",
        "sim/src",
        "sim/Cargo.toml",
        "Cargo.lock",
    ] {
        copy(&root().join(part), &tree.join(part))?;
    }
    let manifest = fs::read_to_string(root().join("Cargo.toml"))?;
    let mut lines: Vec<&str> = manifest.lines().collect();
    let members = lines.iter_mut().find(|line| line.starts_with("members = "));
    *members.context("Cargo.toml names no members")? =
        "members = [\"crc\", \"transport\", \"sim\"]";
    fs::write(tree.join("Cargo.toml"), lines.join("\n") + PROFILE)?;
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(above) = to.parent() {
        fs::create_dir_all(above)?;
    }
    if from.is_file() {
        fs::copy(from, to)?;
        return Ok(());
    }
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn build(tree: &Path) -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo
        .args([
            "build",
            "--quiet",
            "--profile",
            "mutants",
            "-p",
            "portolan-sim",
            "--bin",
            "portolan-sim",
        ])
        .env("RUSTFLAGS", "-Awarnings")
        .env("CARGO_TARGET_DIR", root().join("target/mutants/build"))
        .current_dir(tree);
    match finish(&mut cargo, BUILD, &tree.with_extension("build"))? {
        Some((true, _)) => Ok(()),
        Some((false, output)) => bail!("it does not build:\n{output}"),
        None => bail!("its build does not end"),
    }
}

/// Runs seeds and returns those that failed with the checker that objected, or nothing if it does not end.
fn simulate(tree: &Path, most: usize, profile: Option<&str>) -> Result<Option<Vec<(u64, String)>>> {
    let program = root().join("target/mutants/build/mutants/portolan-sim");
    let mut command = Command::new(program);
    let (seeds, most) = (SEEDS.to_string(), most.to_string());
    command.args(["--seeds", &seeds, "--failures", &most, "--json"]);
    if let Some(profile) = profile {
        command.args(["--profile", profile]);
    }
    let Some((_, output)) = finish(&mut command, RUN, &tree.with_extension("run"))? else {
        return Ok(None);
    };
    let report: serde_json::Value =
        serde_json::from_str(&output).context("the simulator's report")?;
    let failures = report["failures"].as_array().cloned().unwrap_or_default();
    let failure =
        |f: &serde_json::Value| Some((f["seed"].as_u64()?, f["invariant"].as_str()?.to_owned()));
    Ok(Some(failures.iter().filter_map(failure).collect()))
}

fn failing_seeds(tree: &Path, profile: Option<&str>) -> Result<BTreeSet<u64>> {
    let failures = simulate(tree, usize::MAX, profile)?.context("the simulator does not end")?;
    Ok(failures.into_iter().map(|(seed, _)| seed).collect())
}

fn judge(mutant: &Mutant, tree: &Path, known: &BTreeSet<u64>) -> Result<Fate> {
    let profile = mutant.profile.as_deref();
    let own;
    let known = match profile {
        None => known,
        profile => {
            build(tree)?;
            own = failing_seeds(tree, profile)?;
            &own
        }
    };
    let path = tree.join(&mutant.file);
    let original = fs::read_to_string(&path)?;
    fs::write(&path, mutant.applied(tree)?)?;
    let result = build(tree).and_then(|()| simulate(tree, known.len() + 1, profile));
    fs::write(&path, original)?;
    let Some(failures) = result? else {
        return Ok(Fate::Hung);
    };
    let new = failures.into_iter().find(|(seed, _)| !known.contains(seed));
    Ok(new.map_or(Fate::Survived, |(seed, by)| Fate::Caught(by, seed)))
}

/// Runs a program with its output in a file: whether it succeeded, and what it said; nothing if it takes too long.
fn finish(command: &mut Command, within: Duration, log: &Path) -> Result<Option<(bool, String)>> {
    let file = fs::File::create(log).with_context(|| log.display().to_string())?;
    let mut child = command
        .stdin(Stdio::null())
        .stderr(file.try_clone()?)
        .stdout(file)
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let status = wait_child(&mut child, Instant::now() + within, OnCancel::Stop);
    if !matches!(status, Ok(Some(_))) {
        let _ = child.kill();
        let _ = child.wait();
    }
    if cancel::requested() {
        bail!("interrupted");
    }
    let output = fs::read_to_string(log)?;
    Ok(status?.map(|status| (status.success(), output)))
}

#[cfg(test)]
mod tests {
    use super::*;

    // The code moves on, and nobody runs all mutants every day. Expect: each still finds its place, exactly once.
    #[test]
    fn every_mutant_finds_its_place() {
        let text = fs::read_to_string(root().join("sim/mutants.toml")).unwrap();
        let list: List = toml::from_str(&text).unwrap();
        assert!(list.mutant.len() > 20);
        for mutant in &list.mutant {
            if let Err(error) = mutant.applied(&root()) {
                panic!("{}: {error:#}", mutant.name);
            }
        }
    }
}
