//! Instructions per message, counted by callgrind in this program and in one that keeps nothing for a successor.
//!
//! Counted is what happens inside the engines' turns, from taking a token to completing it at its sender; not the applications, and not
//! the socket, whose place a ring in memory takes. Each count is the difference of two runs, so that what happens once per run is not in it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::callgrind;

const FEW: u64 = 1_000;
const MANY: u64 = 5_000;

/// Instructions of one run.
fn count(program: &Path, messages: u64) -> Result<u64> {
    let mut command = Command::new(program);
    command.args(["ping-pong", "--messages", &messages.to_string()]);
    callgrind::count(&command, "*conversation*Engine*turn*")
}

/// Instructions of both engines per message.
fn per_message(program: &Path) -> Result<f64> {
    let (few, many) = (count(program, FEW)?, count(program, MANY)?);
    Ok(many.saturating_sub(few) as f64 / (2 * (MANY - FEW)) as f64)
}

/// Prints both counts.
pub fn print(without: &Path) -> Result<()> {
    let with = per_message(&std::env::current_exe().context("path of this program")?)?;
    let without = per_message(without)?;
    println!("instructions per 64-byte message, in both engines:");
    println!("  as it is            {with:>8.0}");
    println!("  nothing survives    {without:>8.0}");
    println!(
        "  what survives costs {:>8.0}, {:.1} %",
        with - without,
        100.0 * (with - without) / without
    );
    Ok(())
}
