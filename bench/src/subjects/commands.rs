//! Programs of others as subjects: a server in the background, and a client that measures itself and prints what it found.
//!
//! ```ignore
//! // In `start`: what stays, and how one knows that it is there. Dropping it kills it, with its process group.
//! let mut server = Background::start(scene.command(Side::Two, "iperf3").args(["-s", "-1"]))?;
//! server.wait_said("Server listening", START)?;
//! // In `measure`: to its end, with a bound; its standard output, or an error with its standard error.
//! let address = scene.node(Side::Two).ipv4().to_string();
//! let text = run(scene.command(Side::One, "iperf3").args(["-c", &address, "-J"]), lasting + GRACE)?;
//! ```
//!
//! Both are interrupted with the bench. [`Scene::command`](super::Scene::command) puts a program into a side's namespace and on its core.

// The peers are made of it.
#![allow(dead_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{cancel, process};

/// Between two looks at what a program has said.
const PAUSE: Duration = Duration::from_millis(5);

/// A program that goes on until it is dropped.
pub struct Background {
    what: String,
    child: Child,
    said: File,
}

impl Background {
    /// Starts it. What it writes, standard error included, is kept.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let said = tempfile::tempfile().context("temporary file")?;
        let what = process::describe(command);
        let child = command
            .stdin(Stdio::null())
            .stdout(said.try_clone()?)
            .stderr(said.try_clone()?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {what}"))?;
        Ok(Self { what, child, said })
    }

    /// Everything it has written.
    ///
    /// # Errors
    /// It cannot be read again.
    pub fn said(&mut self) -> Result<String> {
        // Not by reading on: the file's position is the child's too, who writes there.
        let len = usize::try_from(self.said.metadata()?.len()).context("said too much")?;
        let mut bytes = vec![0; len];
        self.said.read_exact_at(&mut bytes, 0)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Waits until it has written `text`.
    ///
    /// # Errors
    /// It ended, or did not write it in time.
    pub fn wait_said(&mut self, text: &str, within: Duration) -> Result<()> {
        self.wait_until(text, within, |said| said.contains(text))
    }

    /// Waits until `there` is true of what it has written, or of anything else.
    ///
    /// # Errors
    /// It ended, or that did not become true in time.
    pub fn wait_until(
        &mut self,
        what: &str,
        within: Duration,
        mut there: impl FnMut(&str) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let said = self.said()?;
            if there(&said) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended, {status}, before {what}\n{said}", self.what);
            }
            if cancel::requested() {
                bail!("interrupted");
            }
            if Instant::now() > deadline {
                bail!("{}: {what}: not within {within:?}\n{said}", self.what);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        process::kill_group(&mut self.child);
    }
}

/// Runs a program to its end and returns what it wrote to standard output.
///
/// # Errors
/// It failed, or did not end in time and was killed; with what it wrote.
pub fn run(command: &mut Command, within: Duration) -> Result<String> {
    process::run_ok(command, within)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn a_program_is_waited_for_until_it_says_the_word() {
        let mut shell = Command::new("sh");
        let mut background =
            Background::start(shell.args(["-c", "echo one; echo ready; sleep 60"])).unwrap();
        background.wait_said("ready", SOON).unwrap();
        assert_eq!(background.said().unwrap(), "one\nready\n");
        let error = background.wait_said("never", Duration::from_millis(50));
        assert!(error.unwrap_err().to_string().contains("not within"));
    }

    #[test]
    fn a_program_that_ends_before_its_word_is_an_error_with_what_it_said() {
        let mut shell = Command::new("sh");
        let mut background = Background::start(shell.args(["-c", "echo why >&2; exit 3"])).unwrap();
        let error = background.wait_said("ready", SOON).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('3'), "{error}");
    }
}
