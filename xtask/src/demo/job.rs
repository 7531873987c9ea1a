//! A program that runs beside others: watched to a deadline, ended when dropped.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::process::{OnCancel, describe, kill_group, wait_child};

use super::report;

/// How often progress is shown.
const TICK: Duration = Duration::from_millis(200);

/// Where a job's standard output goes.
pub enum Output {
    /// Line by line to ours, each after this label, as long as the function wants it.
    Labelled(String, fn(&str) -> bool),
    /// Into a file.
    File(File),
}

/// A running program.
pub struct Job {
    what: String,
    child: Child,
    stderr: File,
    printer: Option<JoinHandle<()>>,
}

/// How a job ended.
pub struct Ended {
    pub status: ExitStatus,
    /// What it wrote to standard error, without surrounding space.
    pub said: String,
}

impl Job {
    /// Starts it.
    pub fn start(command: &mut Command, input: Stdio, output: Output) -> Result<Self> {
        let stderr = tempfile::tempfile().context("temporary file")?;
        let (stdout, print) = match output {
            Output::Labelled(label, wanted) => (Stdio::piped(), Some((label, wanted))),
            Output::File(file) => (file.into(), None),
        };
        let mut child = command
            .stdin(input)
            .stdout(stdout)
            .stderr(stderr.try_clone()?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", describe(command)))?;
        let printer = (child.stdout.take().zip(print))
            .map(|(out, (label, wanted))| print_lines(out, label, wanted));
        Ok(Self {
            what: words_of_tool(command),
            child,
            stderr,
            printer,
        })
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end and calls `tick` now and then; an error when it does not end in time.
    pub fn wait(&mut self, within: Duration, mut tick: impl FnMut()) -> Result<Ended> {
        let deadline = Instant::now() + within;
        loop {
            let next = deadline.min(Instant::now() + TICK);
            if let Some(status) = wait_child(&mut self.child, next, OnCancel::Stop)? {
                if let Some(printer) = self.printer.take() {
                    // It ends with its program.
                    let _ = printer.join();
                }
                return Ok(Ended {
                    status,
                    said: self.said(),
                });
            }
            if Instant::now() >= deadline {
                bail!(
                    "`{}` did not end within {within:?}\n{}",
                    self.what,
                    self.said()
                );
            }
            tick();
        }
    }

    /// [`Job::wait`], and anything but success is an error with what it said.
    pub fn succeed(&mut self, within: Duration, tick: impl FnMut()) -> Result<Ended> {
        let ended = self.wait(within, tick)?;
        if !ended.status.success() {
            bail!("`{}`: {}\n{}", self.what, ended.status, ended.said);
        }
        Ok(ended)
    }

    fn said(&self) -> String {
        let mut bytes = Vec::new();
        let mut file = &self.stderr;
        let read = file.rewind().and_then(|()| file.read_to_end(&mut bytes));
        match read {
            Ok(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
            Err(error) => format!("(standard error cannot be read: {error})"),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        kill_group(&mut self.child);
    }
}

fn print_lines(out: ChildStdout, label: String, wanted: fn(&str) -> bool) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let lines = BufReader::new(out).lines().map_while(Result::ok);
        for line in lines.filter(|line| wanted(line)) {
            report::clear_progress();
            println!("   {label} │ {line}");
        }
    })
}

/// `portolan … ping 2` without the way into the namespace.
fn words_of_tool(command: &Command) -> String {
    let words: Vec<_> = command
        .get_args()
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    let tool = words.iter().position(|word| word.ends_with("/portolan"));
    let arguments = tool.map_or(&words[..], |at| &words[at + 1..]);
    match arguments {
        [option, _, rest @ ..] if option == "--socket" => format!("portolan {}", rest.join(" ")),
        _ => describe(command),
    }
}
