//! `cargo xtask fuzz`: libFuzzer on the targets of `fuzz/`, with the stable compiler.
//!
//! rustc has LLVM's coverage instrumentation in it; cargo-fuzz only passes these flags. A target builds into a directory of its own, since
//! the flags would rebuild everything else. What a session finds out stays in `target/fuzz/corpus`; `--minimise` chooses from it the
//! few inputs that reach everything and keeps them in `fuzz/corpus`, where tests replay them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use portolan_testbed::process::{OnCancel, kill_group, wait_child};

use crate::build::BUILD;
use crate::setup;
use crate::steps::{self, cargo, root};

/// The targets: name, longest input, and what is fuzzed.
const TARGETS: [(&str, usize, &str); 4] = [
    (
        "frame",
        2048,
        "bytes from the network: wire::parse and its accessors, and back",
    ),
    (
        "conversation",
        700,
        "whole endpoints: sends, faults, deaths, and a node that lies",
    ),
    (
        "client_memory",
        700,
        "what an application writes into its half of a port",
    ),
    (
        "control",
        2048,
        "JSON packets to supervisor and engine, configuration, port sets",
    ),
];
/// Instruments every edge and comparison; optimisation stays on.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";
/// What the repository keeps of a target's corpus, at most.
const KEPT_FILES: usize = 299;
const KEPT_BYTES: u64 = 200 * 1024;
/// Seconds one input may take.
const INPUT_SECONDS: u32 = 25;
/// Bound on choosing a corpus.
const MERGE: Duration = Duration::from_secs(30 * 60);
/// How often a running session is reported on.
const REPORT_EVERY: Duration = Duration::from_secs(15);

#[derive(Args)]
pub struct Options {
    /// What to fuzz; `--list` shows what there is
    #[arg(required_unless_present = "list")]
    target: Option<String>,
    /// How long
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Processes at once
    #[arg(long, default_value_t = 1)]
    jobs: u32,
    /// Lists the targets
    #[arg(long)]
    list: bool,
    /// Runs one input and nothing else
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Afterwards, keeps in fuzz/corpus the inputs that reach the most
    #[arg(long)]
    minimise: bool,
}

pub fn run(options: &Options) -> Result<()> {
    if options.list {
        for (name, _, what) in TARGETS {
            println!("{name:<14} {what}");
        }
        return Ok(());
    }
    let name = options.target.as_deref().unwrap_or_default();
    let Some((name, max_len, _)) = TARGETS.into_iter().find(|target| target.0 == name) else {
        bail!("no target {name:?}; `cargo xtask fuzz --list` shows them");
    };
    let fuzzer = Fuzzer::build(name, max_len)?;
    if let Some(file) = &options.replay {
        return fuzzer.replay(file);
    }
    if options.minutes > 0.0 {
        fuzzer.session(options)?;
    }
    if options.minimise {
        fuzzer.minimise()?;
    }
    Ok(())
}

/// A target that was built.
struct Fuzzer {
    name: &'static str,
    program: PathBuf,
    max_len: usize,
    /// What sessions found so far.
    corpus: PathBuf,
    /// What the repository keeps.
    kept: PathBuf,
    findings: PathBuf,
}

impl Fuzzer {
    fn build(name: &'static str, max_len: usize) -> Result<Self> {
        setup::run()?;
        setup::require("g++", "g++", "compiles libFuzzer")?;
        let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let target = root().join("target/fuzz");
        // With a target named, build scripts and macros are built without the flags.
        let mut build = cargo(&format!(
            "build --profile fuzz -p portolan-fuzz --features libfuzzer --bin fuzz-{name} --target {triple}"
        ));
        build
            .env("RUSTFLAGS", FLAGS)
            .env("CARGO_TARGET_DIR", &target);
        steps::run_to_end(&mut build, BUILD).context("building the fuzzer")?;
        let fuzzer = Self {
            name,
            program: target
                .join(triple)
                .join("fuzz")
                .join(format!("fuzz-{name}")),
            max_len,
            corpus: target.join("corpus").join(name),
            kept: root().join("fuzz/corpus").join(name),
            findings: target.join("findings").join(name),
        };
        for directory in [&fuzzer.corpus, &fuzzer.kept, &fuzzer.findings] {
            fs::create_dir_all(directory)?;
        }
        Ok(fuzzer)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .current_dir(root())
            .arg(format!("-max_len={}", self.max_len))
            .arg(format!("-timeout={INPUT_SECONDS}"))
            .arg(format!("-artifact_prefix={}/", self.findings.display()))
            // Long programs early: most of what is worth reaching needs several steps.
            .args(["-len_control=20", "-print_final_stats=1"]);
        let dictionary = root().join("fuzz").join(format!("{}.dict", self.name));
        if dictionary.exists() {
            command.arg(format!("-dict={}", dictionary.display()));
        }
        command
    }

    fn replay(&self, file: &Path) -> Result<()> {
        let mut command = self.command();
        command.arg(std::path::absolute(file)?);
        steps::run_to_end(&mut command, Duration::from_secs(60)).context("the input fails")
    }

    /// Fuzzes, and reports. An error if something was found.
    fn session(&self, options: &Options) -> Result<()> {
        let time = Duration::from_secs_f64(options.minutes * 60.0);
        let mut command = self.command();
        command.arg(format!("-max_total_time={}", time.as_secs().max(1)));
        if options.jobs > 1 {
            command.arg(format!("-fork={}", options.jobs));
        }
        command.args([&self.corpus, &self.kept]);
        let before = self.found()?;
        let mut report = Report::default();
        let ended = report.follow(command, time + BUILD)?;
        report.print(self.name);
        let new = self
            .found()?
            .into_iter()
            .find(|file| !before.contains(file));
        match new {
            None if ended => Ok(()),
            None => bail!("the fuzzer failed without an input: see above"),
            Some(input) => {
                let input = self.shorten(&input)?;
                bail!(
                    "found an input that fails; repeat with:\n  cargo xtask fuzz {} --replay {}",
                    self.name,
                    input.display()
                )
            }
        }
    }

    fn found(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.findings)?;
        entries.map(|entry| Ok(entry?.path())).collect()
    }

    /// The shortest input that fails like this one, in the corpus the repository keeps: tests are red until it is fixed. One that takes too long
    /// is kept as it is: libFuzzer would call any part of it a failure that it could not finish either.
    fn shorten(&self, input: &Path) -> Result<PathBuf> {
        let name = input.file_name().unwrap_or_default();
        let kept = self.kept.join(name);
        fs::copy(input, &kept)?;
        if !name.as_encoded_bytes().starts_with(b"crash-") {
            return Ok(kept);
        }
        let mut command = self.command();
        command
            .args(["-minimize_crash=1", "-max_total_time=60"])
            .arg(format!("-exact_artifact_path={}", kept.display()))
            .arg(input)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        println!("   making the input shorter …");
        // It fails by intention; what it leaves is what counts.
        let _ = steps::run_to_end(&mut command, Duration::from_secs(180));
        Ok(kept)
    }

    /// Chooses the inputs that reach the most for the repository.
    fn minimise(&self) -> Result<()> {
        let chosen = self.corpus.with_extension("chosen");
        let _ = fs::remove_dir_all(&chosen);
        fs::create_dir_all(&chosen)?;
        let mut command = self.command();
        // The fewest inputs, and counting which edges are reached, not how often: dozens instead of thousands.
        command
            .args(["-set_cover_merge=1", "-use_counters=0"])
            .args([&chosen, &self.kept, &self.corpus])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        steps::run_to_end(&mut command, MERGE).context("choosing a corpus")?;
        let mut inputs: Vec<(u64, PathBuf)> = fs::read_dir(&chosen)?
            .map(|entry| {
                let entry = entry?;
                Ok((entry.metadata()?.len(), entry.path()))
            })
            .collect::<Result<_>>()?;
        // If there is not room for all: the long ones reach the most.
        inputs.sort_by(|one, other| other.cmp(one));
        let all = inputs.len();
        let mut room = KEPT_BYTES;
        inputs.truncate(KEPT_FILES);
        inputs.retain(|(len, _)| {
            let fits = *len <= room;
            room -= if fits { *len } else { 0 };
            fits
        });
        fs::remove_dir_all(&self.kept)?;
        fs::create_dir_all(&self.kept)?;
        for (_, input) in &inputs {
            fs::copy(input, self.kept.join(input.file_name().unwrap_or_default()))?;
        }
        println!(
            "   {} of {all} inputs, {} bytes, kept in {}",
            inputs.len(),
            KEPT_BYTES - room,
            self.kept.display()
        );
        Ok(())
    }
}

/// What libFuzzer says while it runs.
#[derive(Default)]
struct Report {
    started: Option<Instant>,
    edges: Option<String>,
    /// The newest line with coverage.
    newest: String,
    runs: Option<String>,
}

impl Report {
    /// Runs it to its end and prints what matters; whether it succeeded.
    fn follow(&mut self, mut command: Command, within: Duration) -> Result<bool> {
        use std::os::unix::process::CommandExt;
        command
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn().context("starting the fuzzer")?;
        let started = *self.started.insert(Instant::now());
        let output = child.stderr.take().context("its output")?;
        let mut said = Instant::now();
        std::thread::scope(|scope| {
            // Reading ends with the fuzzer, however that ends.
            scope.spawn(|| {
                for line in BufReader::new(output)
                    .split(b'\n')
                    .map_while(|line| line.ok())
                {
                    let line = String::from_utf8_lossy(&line);
                    if self.take_in(&line) {
                        println!("   {line}");
                    } else if said.elapsed() > REPORT_EVERY {
                        said = Instant::now();
                        println!("   {:>4} s  {}", started.elapsed().as_secs(), self.newest);
                    }
                }
            });
            let ended = wait_child(&mut child, Instant::now() + within, OnCancel::Stop);
            if !matches!(ended, Ok(Some(_))) {
                kill_group(&mut child);
            }
            Ok(ended?.is_some_and(|status| status.success()))
        })
    }

    /// Remembers what a line says; whether it is worth showing: it is not part of the usual chatter.
    fn take_in(&mut self, line: &str) -> bool {
        if let Some(at) = line.find("cov: ") {
            line[at..].clone_into(&mut self.newest);
        } else if let Some(count) = line.strip_prefix("stat::number_of_executed_units: ") {
            self.runs = Some(count.trim().to_owned());
        } else if line.starts_with("INFO: Loaded") && line.contains("counters") {
            let count = line
                .split('(')
                .nth(1)
                .and_then(|rest| rest.split(' ').next());
            self.edges = count.map(str::to_owned);
        }
        let usual = [
            "#",
            "INFO:",
            "stat::",
            "Done",
            "Running:",
            "\"",
            "NEW_FUNC",
            "\tNEW_FUNC",
            "###",
            "WARNING: Failed to find function",
            "Loaded",
            "Dictionary:",
        ];
        !line.trim().is_empty() && !usual.iter().any(|start| line.starts_with(start))
    }

    fn print(&self, name: &str) {
        println!(
            "   {name}: {} s, {} runs, {}, {} edges in all",
            self.started.map_or(0, |at| at.elapsed().as_secs()),
            self.runs.as_deref().unwrap_or("?"),
            self.newest,
            self.edges.as_deref().unwrap_or("?"),
        );
    }
}
