//! The report for `docs/performance.md`: a table per kind of case, a row per subject, so that nobody copies figures by hand.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::table::shown;
use super::{Line, Results, goals};
use crate::cases::{Case, Wait};
use crate::host;
use crate::subjects::metric;

/// Writes it.
pub fn write(results: &Results, path: &Path) -> Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    fs::write(path, text(results)).with_context(|| path.display().to_string())
}

fn text(results: &Results) -> String {
    let lines = results.lines();
    let quick = match results.quick {
        true => "A quick look, not figures to be quoted. ",
        false => "",
    };
    let mut out = format!(
        "{quick}{}; {} turns, {:.0} s. Median of the turns, in brackets the ratio to the limit of the case.\n",
        host::line(),
        results.turns,
        results.took_s
    );
    if let Some(distances) = results.distances() {
        let _ = writeln!(out, "\n{distances}.");
    }
    out += "\n### Who\n\n| subject | version | how it is run |\n|---|---|---|\n";
    for (name, about) in &results.subjects {
        let _ = writeln!(out, "| `{name}` | {} | {} |", about.version, about.command);
    }
    type Wanted = fn(&Case) -> bool;
    let ping: Wanted = |case| matches!(case, Case::PingPong { .. });
    let rate: Wanted = |case| matches!(case, Case::Rate { .. });
    let stream: Wanted = |case| matches!(case, Case::Stream { .. });
    let sweep: Wanted = |case| matches!(case, Case::AllSize { .. });
    let fair: Wanted = |case| {
        matches!(
            case,
            Case::FanIn { .. } | Case::Ports { .. } | Case::Queues { .. }
        )
    };
    let idle: Wanted = |case| matches!(case, Case::Idle { .. });
    let startup: Wanted = |case| matches!(case, Case::Startup);
    type Of = fn(&Line) -> Option<f64>;
    let value: Of = |line| Some(line.value);
    let p999: Of = |line| line.p999;
    for (title, wanted, metric, of) in [
        ("One way of a message, p50", ping, metric::ONE_WAY, value),
        ("One way of a message, p99.9", ping, metric::ONE_WAY, p999),
        ("Messages per second, one way", rate, metric::RATE, value),
        (
            "Streams, payload per second",
            stream,
            metric::THROUGHPUT,
            value,
        ),
        (
            "All sizes: one way of a message, p50",
            sweep,
            metric::ONE_WAY,
            value,
        ),
        (
            "All sizes: payload per second, one way",
            sweep,
            metric::THROUGHPUT,
            value,
        ),
        (
            "All sizes: payload per second, both ways together",
            sweep,
            metric::BOTH_WAYS,
            value,
        ),
        ("Fairness, Jain's index", fair, metric::FAIRNESS, value),
        (
            "The same, payload per second",
            fair,
            metric::THROUGHPUT,
            value,
        ),
        (
            "An idle node, share of a core",
            idle,
            metric::IDLE_CPU,
            value,
        ),
        (
            "Its processor meanwhile: share of the time in which the kernel polled instead of having it sleep",
            idle,
            metric::IDLE_POLLED,
            value,
        ),
        ("The first message after idling", idle, metric::FIRST, value),
        ("Attaching", startup, metric::ATTACH, value),
        ("Opening a port", startup, metric::OPEN, value),
        (
            "The first message there and back",
            startup,
            metric::FIRST_ANSWER,
            value,
        ),
    ] {
        let chosen: Vec<&Line> = lines
            .iter()
            .filter(|line| wanted(&line.case) && line.metric == metric)
            .collect();
        // Ratios are of values, not of their tails.
        let with_ratios = !title.ends_with("p99.9");
        table(&mut out, title, results, &chosen, of, with_ratios);
    }
    points(results, &mut out);
    judged(results, &mut out);
    for (case, subject, why) in &results.failures {
        let why = why.lines().next().unwrap_or_default();
        let _ = writeln!(out, "\nNot measured: {case}, {subject}: {why}");
    }
    out
}

/// A row per case and a column per subject.
fn table(
    out: &mut String,
    title: &str,
    results: &Results,
    lines: &[&Line],
    of: fn(&Line) -> Option<f64>,
    ratios: bool,
) {
    let mut cases: Vec<Case> = Vec::new();
    for line in lines {
        if !cases.contains(&line.case) {
            cases.push(line.case);
        }
    }
    let subjects = results.subjects.iter().map(|(name, _)| name.as_str());
    let answered = |name: &&str| lines.iter().any(|line| line.subject == *name);
    let subjects: Vec<&str> = subjects.filter(answered).collect();
    if cases.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n### {title}\n\n| | {} |", subjects.join(" | "));
    let _ = writeln!(out, "|---|{}", "---:|".repeat(subjects.len()));
    for case in cases {
        let cell = |subject: &&str| {
            let is = |line: &&&Line| line.case == case && line.subject == *subject;
            let Some((line, value)) = lines.iter().find(is).and_then(|l| Some((l, of(l)?))) else {
                return String::from("–");
            };
            let ratio = line.ratio.filter(|_| ratios);
            let ratio = ratio.map(|ratio| format!(" ({ratio:.2})"));
            let mark = if line.note.is_some() { " \\*" } else { "" };
            shown(value, line.unit) + &ratio.unwrap_or_default() + mark
        };
        let cells: Vec<String> = subjects.iter().map(cell).collect();
        let _ = writeln!(out, "| {} | {} |", name(&case), cells.join(" | "));
    }
    if lines.iter().any(|line| line.note.is_some()) {
        *out += "\n\\* Some of what was sent was lost; how much is in `report.html`.\n";
    }
}

fn name(case: &Case) -> String {
    match case {
        Case::Idle { wait } if *wait == Wait::Adaptive => format!("{case} (the default)"),
        case => case.to_string(),
    }
}

fn points(results: &Results, out: &mut String) {
    let points = results.half_power_points();
    if points.is_empty() {
        return;
    }
    *out += "\n### N/2\n\n| subject | bytes |\n|---|---:|\n";
    for (subject, bytes) in points {
        let bytes = bytes.map_or("below the smallest size".to_owned(), |n| format!("{n:.0}"));
        let _ = writeln!(out, "| {subject} | {bytes} |");
    }
}

fn judged(results: &Results, out: &mut String) {
    let goals = goals::judge(results);
    if goals.is_empty() {
        return;
    }
    *out += "\n### Goals\n\n| goal | found | wanted | |\n|---|---:|---:|---|\n";
    for goal in goals {
        let word = if goal.is_reached {
            "reached"
        } else {
            "**missed**"
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {word} |",
            goal.what, goal.found, goal.wanted
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subjects::{About, Figure, unit};

    // One subject was measured at both cases, the other at one. Expect: a row per case, a dash where nothing was measured.
    #[test]
    fn what_was_not_measured_is_a_dash() {
        let subjects =
            ["portolan", "limit-relay-crc"].map(|name| (name.to_owned(), About::default()));
        let [one, two] = [1500, 9000].map(|mtu| Case::Stream { bytes: 4096, mtu });
        let mut results = Results::new(subjects.to_vec(), vec![one, two], 1, false);
        let figure = |bits| vec![Figure::number(metric::THROUGHPUT, bits, unit::BITS)];
        results.add(&one, "portolan", 0, figure(5e9));
        results.add(&one, "limit-relay-crc", 0, figure(1e10));
        let with_loss = figure(2e10).remove(0).with_note(Some("5 of 9".to_owned()));
        results.add(&two, "portolan", 0, vec![with_loss]);
        let text = text(&results);
        let row = "| stream-4k-mtu1500 | 5.00 Gbit/s (0.50) | 10.00 Gbit/s (1.00) |";
        assert!(text.contains(row), "{text}");
        assert!(
            text.contains("| stream-4k-mtu9000 | 20.00 Gbit/s \\* | – |"),
            "{text}"
        );
        assert!(!text.contains("Fairness"), "{text}");
    }
}
