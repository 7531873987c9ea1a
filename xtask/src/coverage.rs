//! `cargo xtask coverage`: which lines of the transport its own tests run.
//!
//! rustc instruments (`-C instrument-coverage`); LLVM's tools, of the very version rustc was built with, count. Inputs that others choose
//! reach every line of the protocol sooner or later, so a line no test ran is a line nobody has ever seen run: below the limit it fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use portolan_testbed::process;
use serde_json::Value;

use crate::build::BUILD;
use crate::setup;
use crate::steps::{self, cargo, root};

const PACKAGE: &str = "portolan-transport";
const SOURCES: &str = "transport/src/";
/// Percent of lines.
const LIMIT: f64 = 95.0;
/// Bound on all tests; instrumented and hardly optimised, they take longer.
const TESTS: Duration = Duration::from_secs(60 * 60);
const TOOLS: Duration = Duration::from_secs(5 * 60);

#[derive(Args)]
pub struct Options {
    /// Lists the lines no test ran, by file
    #[arg(long)]
    uncovered: bool,
}

/// A source file's lines.
struct File {
    name: String,
    lines: u64,
    covered: u64,
}

pub fn run(options: &Options) -> Result<()> {
    setup::run()?;
    let tools = Tools::find()?;
    let target = root().join("target/coverage");
    let profiles = target.join("profiles");
    let _ = fs::remove_dir_all(&profiles);
    fs::create_dir_all(&profiles)?;
    let prepare = |arguments: &str| {
        let mut command = cargo(&format!("test -p {PACKAGE} --lib --tests {arguments}"));
        command
            .env("RUSTFLAGS", "-C instrument-coverage")
            .env("CARGO_TARGET_DIR", &target)
            .env("LLVM_PROFILE_FILE", profiles.join("%m-%p.profraw"));
        command
    };
    steps::run_to_end(&mut prepare("--no-run"), BUILD).context("building the tests")?;
    let list = process::run_ok(&mut prepare("--no-run --message-format=json"), BUILD)?;
    let programs = programs(&list);
    steps::run_to_end(&mut prepare("--quiet"), TESTS).context("a test fails")?;

    let merged = target.join("merged.profdata");
    tools.merge(&profiles, &merged)?;
    let files = tools.count(&merged, &programs)?;
    print(&files);
    if options.uncovered {
        tools.print_uncovered(&merged, &programs)?;
    }
    let (lines, covered) = sum(&files);
    if percent(lines, covered) < LIMIT {
        bail!("less than {LIMIT} % of the lines are run by a test; --uncovered lists the others");
    }
    Ok(())
}

/// The test programs in what cargo says it built.
fn programs(list: &str) -> Vec<PathBuf> {
    list.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?)))
        .collect()
}

fn sum(files: &[File]) -> (u64, u64) {
    let add = |(lines, covered), file: &File| (lines + file.lines, covered + file.covered);
    files.iter().fold((0, 0), add)
}

fn percent(lines: u64, covered: u64) -> f64 {
    100.0 * covered as f64 / lines.max(1) as f64
}

fn print(files: &[File]) {
    println!(
        "   {:<40} {:>7} {:>7} {:>8}",
        "file", "lines", "missed", "covered"
    );
    let (lines, covered) = sum(files);
    let all = File {
        name: "all".to_owned(),
        lines,
        covered,
    };
    for file in files.iter().chain([&all]) {
        println!(
            "   {:<40} {:>7} {:>7} {:>7.1}%",
            file.name,
            file.lines,
            file.lines - file.covered,
            percent(file.lines, file.covered)
        );
    }
}

/// LLVM's tools of rustc's version.
struct Tools {
    version: String,
}

impl Tools {
    fn find() -> Result<Self> {
        let mut rustc = Command::new("rustc");
        let text = process::run_ok(rustc.arg("-vV"), TOOLS)?;
        let version = text
            .lines()
            .find_map(|line| line.strip_prefix("LLVM version: "))
            .and_then(|version| version.split('.').next())
            .with_context(|| format!("rustc does not say its LLVM version: {text}"))?
            .to_owned();
        let package: &'static str = format!("llvm-{version}").leak();
        let program: &'static str = format!("llvm-cov-{version}").leak();
        setup::require(package, program, "counts which lines ran")?;
        Ok(Self { version })
    }

    fn tool(&self, name: &str) -> Command {
        Command::new(format!("{name}-{}", self.version))
    }

    fn merge(&self, profiles: &Path, to: &Path) -> Result<()> {
        let mut command = self.tool("llvm-profdata");
        command
            .args(["merge", "-sparse", "-o"])
            .arg(to)
            .arg(profiles);
        process::run_ok(&mut command, TOOLS).map(drop)
    }

    /// llvm-cov over all test programs.
    fn cov(&self, action: &str, merged: &Path, programs: &[PathBuf]) -> Command {
        let mut command = self.tool("llvm-cov");
        command.arg(action).arg("-instr-profile").arg(merged);
        for (index, program) in programs.iter().enumerate() {
            if index > 0 {
                command.arg("-object");
            }
            command.arg(program);
        }
        command
    }

    /// Every file of the sources that is not itself a test.
    fn count(&self, merged: &Path, programs: &[PathBuf]) -> Result<Vec<File>> {
        let mut command = self.cov("export", merged, programs);
        let text = process::run_ok(command.args(["-summary-only", "-skip-functions"]), TOOLS)?;
        let report: Value = serde_json::from_str(&text).context("llvm-cov's report")?;
        let files = report["data"][0]["files"].as_array();
        let mut counted: Vec<File> = files
            .context("llvm-cov's report names no files")?
            .iter()
            .filter_map(|file| {
                let lines = &file["summary"]["lines"];
                Some(File {
                    name: source(file["filename"].as_str()?)?.to_owned(),
                    lines: lines["count"].as_u64()?,
                    covered: lines["covered"].as_u64()?,
                })
            })
            .collect();
        counted.sort_by(|one, other| one.name.cmp(&other.name));
        if counted.is_empty() {
            bail!("no file of {SOURCES} in llvm-cov's report");
        }
        Ok(counted)
    }

    fn print_uncovered(&self, merged: &Path, programs: &[PathBuf]) -> Result<()> {
        let mut command = self.cov("export", merged, programs);
        let text = process::run_ok(command.args(["-format=lcov", "-skip-functions"]), TOOLS)?;
        let mut file = None;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("SF:") {
                file = source(name);
            } else if let (Some(name), Some(data)) = (file, line.strip_prefix("DA:"))
                && let Some((number, "0")) = data.split_once(',')
            {
                println!("   {SOURCES}{name}:{number}");
            }
        }
        Ok(())
    }
}

/// A path below the sources, if it is one and no test.
fn source(path: &str) -> Option<&str> {
    let (_, name) = path.split_once(SOURCES)?;
    let test = name
        .split('/')
        .any(|part| part == "tests" || part == "tests.rs");
    (!test).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_no_sources() {
        assert_eq!(
            source("/x/transport/src/wire/parse.rs"),
            Some("wire/parse.rs")
        );
        assert_eq!(source("/x/transport/src/wire/tests/random.rs"), None);
        assert_eq!(source("/x/transport/src/endpoint/tests.rs"), None);
        assert_eq!(source("/x/sim/src/lib.rs"), None);
    }

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let list = "{\"reason\":\"compiler-artifact\",\"executable\":\"/t/a\"}\nnoise\n{\"executable\":null}\n";
        assert_eq!(programs(list), [PathBuf::from("/t/a")]);
    }
}
