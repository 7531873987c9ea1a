//! A sequence of steps: each announced, timed, bounded, and repeatable by hand from what is printed.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::cancel;
use portolan_testbed::process::{OnCancel, describe, kill_group, wait_child};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::failures::Failures;

/// How long a step that is told to stop may take before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// The repository's root.
pub fn root() -> PathBuf {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    path.pop();
    path
}

/// cargo in the repository's root, with arguments separated by spaces.
pub fn cargo(arguments: &str) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments.split_whitespace());
    command.current_dir(root());
    command
}

/// The steps so far.
#[derive(Default)]
pub struct Steps {
    done: Vec<Done>,
}

struct Done {
    title: &'static str,
    took: Duration,
    /// The command that repeats it, if it failed.
    failed: Option<String>,
    /// What it said of failures.
    said: Vec<String>,
}

impl Steps {
    /// Runs a program as a step. Whether it succeeded; an error only when interrupted.
    pub fn run(&mut self, title: &'static str, command: Command, within: Duration) -> Result<bool> {
        self.start(title, command, |command| run_to_end(command, within))
    }

    /// Runs `cargo test` as a step. What fails is said again at the end.
    pub fn test(
        &mut self,
        title: &'static str,
        command: Command,
        within: Duration,
    ) -> Result<bool> {
        let mut said = Vec::new();
        let succeeded = self.start(title, command, |command| {
            let mut child = start(command.stdout(Stdio::piped()))?;
            let output = child.stdout.take();
            let failures = output.map(|output| Failures::of(output, std::io::stdout()));
            let ended = wait(&mut child, within);
            said = failures.map(Failures::lines).unwrap_or_default();
            ended
        })?;
        if let Some(done) = self.done.last_mut() {
            done.said = said;
        }
        Ok(succeeded)
    }

    /// A step that `command` repeats.
    fn start(
        &mut self,
        title: &'static str,
        mut command: Command,
        work: impl FnOnce(&mut Command) -> Result<()>,
    ) -> Result<bool> {
        let repeat = with_environment(&command);
        self.check(title, &repeat, || {
            println!("   $ {repeat}");
            work(&mut command)
        })
    }

    /// Runs a closure as a step that `repeat` repeats.
    pub fn check(
        &mut self,
        title: &'static str,
        repeat: &str,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        println!("\n── {title}");
        let started = Instant::now();
        let result = work();
        if cancel::requested() {
            bail!("interrupted");
        }
        let took = started.elapsed();
        let failed = match result {
            Ok(()) => None,
            Err(error) => {
                println!("   failed: {error:#}\n   repeat it with: {repeat}");
                Some(repeat.to_owned())
            }
        };
        let succeeded = failed.is_none();
        self.done.push(Done {
            title,
            took,
            failed,
            said: Vec::new(),
        });
        Ok(succeeded)
    }

    /// Prints how long each step took; an error names those that failed.
    pub fn finish(self) -> Result<()> {
        println!("\n── summary");
        let mut total = Duration::ZERO;
        for done in &self.done {
            let result = if done.failed.is_none() {
                "ok"
            } else {
                "FAILED"
            };
            println!(
                "   {:<28} {result:<7} {:>7.1} s",
                done.title,
                done.took.as_secs_f64()
            );
            total += done.took;
        }
        println!(
            "   {:<28} {:<7} {:>7.1} s",
            "total",
            "",
            total.as_secs_f64()
        );
        let failed: Vec<&Done> = self.done.iter().filter(|d| d.failed.is_some()).collect();
        if failed.is_empty() {
            return Ok(());
        }
        for done in &failed {
            for line in &done.said {
                println!("   {line}");
            }
            if let Some(repeat) = &done.failed {
                println!("   repeat {} with: {repeat}", done.title);
            }
        }
        bail!("{} of {} steps failed", failed.len(), self.done.len());
    }
}

/// A command as one would type it, with the environment set for it.
fn with_environment(command: &Command) -> String {
    let mut words: Vec<String> = command
        .get_envs()
        .filter_map(|(name, value)| {
            let (name, value) = (name.to_string_lossy(), value?.to_string_lossy());
            Some(format!("{name}=\"{value}\""))
        })
        .collect();
    words.push(describe(command).replace(" * ", " '*' "));
    words.join(" ")
}

/// Runs a program with our output; an error when it fails, takes too long or we are told to stop.
pub fn run_to_end(command: &mut Command, within: Duration) -> Result<()> {
    wait(&mut start(command)?, within)
}

fn start(command: &mut Command) -> Result<Child> {
    (command.stdin(Stdio::null()).process_group(0).spawn())
        .with_context(|| format!("cannot start {}", describe(command)))
}

fn wait(child: &mut Child, within: Duration) -> Result<()> {
    match wait_child(child, Instant::now() + within, OnCancel::Stop) {
        Ok(Some(status)) if status.success() => Ok(()),
        Ok(Some(status)) => bail!("{status}"),
        Ok(None) => {
            end(child);
            bail!("not finished after {} s", within.as_secs());
        }
        Err(error) => {
            end(child);
            Err(error)
        }
    }
}

/// Ends a step with everything it started, first politely.
fn end(child: &mut Child) {
    // It may have ended meanwhile.
    let _ = kill_process_group(Pid::from_child(child), Signal::TERM);
    let _ = wait_child(child, Instant::now() + GRACE, OnCancel::Ignore);
    kill_group(child);
}
