//! The report: JSON for programs, tables for people.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::cost::Cost;
use super::gaps;
use super::outcome::Outcome;
use super::tables;

/// Notes printed of a campaign that complains; the report has more.
const NOTES: usize = 12;

/// Everything that was found out.
pub struct Report {
    seed: u64,
    outcomes: Vec<Outcome>,
    cost: Option<Cost>,
}

impl Report {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            outcomes: Vec::new(),
            cost: None,
        }
    }

    pub fn add(&mut self, outcome: Outcome) {
        self.outcomes.push(outcome);
    }

    pub fn set_cost(&mut self, cost: Cost) {
        self.cost = Some(cost);
    }

    fn json(&self) -> Value {
        json!({
            "host": host(),
            "seed": self.seed,
            "cost": self.cost.as_ref().map(Cost::json),
            "campaigns": self.outcomes.iter().map(Outcome::json).collect::<Vec<_>>(),
        })
    }

    /// Writes what is known so far, if somewhere, so that it survives whatever comes next.
    pub fn keep(&self, path: Option<&Path>) -> Result<()> {
        let Some(path) = path else {
            return Ok(());
        };
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        let text = serde_json::to_string_pretty(&self.json())?;
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Everything that is not as promised.
    pub fn complaints(&self) -> Vec<String> {
        let of = |outcome: &Outcome| {
            let kind = &outcome.kind;
            let complaints = outcome.complaints().into_iter();
            let notes = outcome.notes.iter().chain(&outcome.tally.notes).take(NOTES);
            let found: Vec<String> = complaints.map(|c| format!("{kind}: {c}")).collect();
            match found.is_empty() {
                true => found,
                false => {
                    let notes = notes.map(|note| format!("{kind}:   {note}"));
                    found.into_iter().chain(notes).collect()
                }
            }
        };
        self.outcomes.iter().flat_map(of).collect()
    }

    pub fn text(&self) -> String {
        let tables = [
            self.campaigns(),
            tables::one(&self.outcomes),
            self.cost.as_ref().map(tables::two),
            tables::three(&self.outcomes),
            gaps::tables(&self.outcomes),
        ];
        let mut text = String::new();
        for table in tables.into_iter().flatten() {
            text += &format!("{table}\n");
        }
        text += &format!("{}\n", machine());
        text
    }

    fn campaigns(&self) -> Option<String> {
        if self.outcomes.is_empty() {
            return None;
        }
        let mut rows = vec![
            [
                "campaign",
                "injected",
                "detected",
                "recovered",
                "lost",
                "doubled",
                "changed",
                "failed sends",
                "false alarms",
                "detect us",
                "takeover us",
                "resume us",
                "outage us",
                "renewal us",
                "whole us",
                "noise us",
            ]
            .map(str::to_owned)
            .to_vec(),
        ];
        for outcome in &self.outcomes {
            let tally = &outcome.tally;
            rows.push(vec![
                outcome.kind.clone(),
                outcome.injected.to_string(),
                outcome.detected.to_string(),
                outcome.recovered.to_string(),
                tally.lost.to_string(),
                tally.duplicated.to_string(),
                tally.corrupted.to_string(),
                tally.failed.to_string(),
                outcome.false_alarms.to_string(),
                outcome.detect.text(),
                outcome.takeover.text(),
                outcome.resume.text(),
                outcome.outage.text(),
                outcome.renewal.text(),
                outcome.whole.text(),
                outcome.noise.text(),
            ]);
        }
        Some(format!("Times are p50 / p99 / max.\n\n{}", table(&rows)))
    }
}

/// One campaign on one line, as soon as it is over.
pub fn line(outcome: &Outcome) -> String {
    let verdict = match outcome.complaints() {
        complaints if complaints.is_empty() => "ok".to_owned(),
        complaints => complaints.join(", "),
    };
    format!(
        "{:<8} {:>5} injected, {:>5} recovered, outage {} us: {verdict} ({:.0} s)",
        outcome.kind,
        outcome.injected,
        outcome.recovered,
        outcome.outage.text(),
        outcome.took_s
    )
}

/// Rows as columns of Markdown; the first row is the heading.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        text += &format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "));
        if number == 0 {
            let rule = widths
                .iter()
                .enumerate()
                .map(|(column, width)| match column {
                    0 => "-".repeat(*width),
                    _ => format!("{}:", "-".repeat(width.saturating_sub(1))),
                });
            text += &format!("| {} |\n", rule.collect::<Vec<_>>().join(" | "));
        }
    }
    text
}

fn first_line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

fn host() -> Value {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name"));
    let memory = first_line("/proc/meminfo");
    let kb = memory.split_ascii_whitespace().nth(1);
    json!({
        "cpu": model.map(|m| m.trim_start_matches([' ', '\t', ':'])).unwrap_or("unknown"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_mb": kb.and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) / 1024,
        "kernel": first_line("/proc/sys/kernel/osrelease"),
    })
}

fn machine() -> String {
    let host = host();
    let text = |key: &str| match &host[key] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    format!(
        "{}, {} processors, {} MB, Linux {}",
        text("cpu"),
        text("cores"),
        text("memory_mb"),
        text("kernel")
    )
}
