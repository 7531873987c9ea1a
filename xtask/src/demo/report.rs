//! What the demo prints, and what it remembers for its exit code.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};

use anyhow::{Result, bail};
use portolan_testbed::cancel;

/// The verdicts of one scenario.
#[derive(Default)]
pub struct Report {
    right: usize,
    wrong: Vec<String>,
}

impl Report {
    /// Prints a verdict and goes on after a failure: the rest may still show something. An error only when interrupted.
    pub fn verdict(&mut self, what: &str, result: Result<String>) -> Result<()> {
        clear_progress();
        if cancel::requested() {
            bail!("interrupted");
        }
        match result {
            Ok(detail) => {
                self.right += 1;
                println!("   ✓ {what}: {detail}");
            }
            Err(error) => {
                let error = format!("{error:#}");
                println!("   ✗ {what}: {}", error.trim_end().replace('\n', "\n     "));
                let first = error.lines().next().unwrap_or_default();
                self.wrong.push(format!("{what}: {first}"));
            }
        }
        Ok(())
    }

    /// What went wrong, a line each.
    pub fn failures(&self) -> &[String] {
        &self.wrong
    }

    /// One line for the summary.
    pub fn line(&self) -> String {
        let mut line = format!("✓ {}", self.right);
        if !self.wrong.is_empty() {
            // Writing to a String does not fail.
            let _ = write!(line, "   ✗ {}", self.wrong.len());
        }
        line
    }
}

/// The heading of a scenario.
pub fn banner(text: &str) {
    let rule = "═".repeat(78);
    println!("\n{rule}\n {text}\n{rule}");
}

/// The heading of a section.
pub fn title(text: &str) {
    let rest = 74_usize.saturating_sub(text.chars().count());
    println!("\n── {text} {}", "─".repeat(rest));
}

/// Another program's output, set off.
pub fn quote(text: &str) {
    for line in text.trim_end().lines() {
        println!("   │ {line}");
    }
}

/// A line that the next one replaces, where somebody is looking.
pub fn progress(text: &str) {
    let mut out = std::io::stdout();
    if out.is_terminal() {
        // Nobody sees it if this fails.
        let _ = write!(out, "\r   {text:<74}").and_then(|()| out.flush());
    }
}

/// Removes such a line.
pub fn clear_progress() {
    let mut out = std::io::stdout();
    if out.is_terminal() {
        // As above.
        let _ = write!(out, "\r{:<78}\r", "").and_then(|()| out.flush());
    }
}
