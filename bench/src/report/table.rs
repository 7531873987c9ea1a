//! The report for a terminal.

use std::fmt::Write;

use super::{Line, Results, goals};
use crate::cases::Case;
use crate::subjects::unit;

/// All lines, and what is made of them.
pub fn table(results: &Results) -> String {
    let mut rows = vec![
        [
            "case", "subject", "value", "least", "most", "p99", "p99.9", "ratio", "note",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    let mut last: Option<(Case, &'static str)> = None;
    for line in results.lines() {
        if last.is_some_and(|(case, _)| case != line.case) {
            rows.push(Vec::new());
        }
        last = Some((line.case, line.metric));
        rows.push(row(&line));
    }
    let mut text = aligned(&rows);
    for (subject, point) in results.half_power_points() {
        let point = point.map_or("below the smallest size".to_owned(), |n| {
            format!("{n:.0} bytes")
        });
        let _ = writeln!(text, "N/2 of {subject}: {point}");
    }
    let goals = goals::judge(results);
    if !goals.is_empty() {
        text.push('\n');
    }
    for goal in goals {
        let word = if goal.is_reached {
            "reached"
        } else {
            "MISSED "
        };
        let (what, found, wanted) = (goal.what, goal.found, goal.wanted);
        let _ = writeln!(text, "{word}  {what}: {found}, {wanted}");
    }
    for (case, subject, why) in &results.failures {
        let _ = writeln!(text, "FAILED {case}, {subject}: {why}");
    }
    text
}

fn row(line: &Line) -> Vec<String> {
    let of = |value: f64| shown(value, line.unit);
    let maybe = |value: Option<f64>| value.map(of).unwrap_or_default();
    let metric = line.metric.trim_end_matches("_ns");
    let name = match line.case {
        Case::PingPong { .. } | Case::Rate { .. } | Case::Stream { .. } => line.case.to_string(),
        case => format!("{case} {metric}"),
    };
    vec![
        name,
        line.subject.clone(),
        of(line.value),
        of(line.range.0),
        of(line.range.1),
        maybe(line.p99),
        maybe(line.p999),
        line.ratio
            .map(|ratio| format!("{ratio:.2}"))
            .unwrap_or_default(),
        line.note.clone().unwrap_or_default(),
    ]
}

/// A value for people, with three digits or so.
pub fn shown(value: f64, of: &str) -> String {
    match of {
        unit::NS if value >= 1e7 => format!("{:.1} ms", value / 1e6),
        unit::NS => format!("{:.2} us", value / 1e3),
        unit::PER_SECOND if value >= 1e5 => format!("{:.3} M/s", value / 1e6),
        unit::PER_SECOND => format!("{value:.0} /s"),
        unit::BITS if value >= 1e8 => format!("{:.2} Gbit/s", value / 1e9),
        unit::BITS => format!("{:.2} Mbit/s", value / 1e6),
        _ => format!("{value:.4}"),
    }
}

/// Columns with two spaces between; the first two to the left, the last too.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column < 2 || column + 1 == columns {
                true => write!(line, "{cell:<width$}  "),
                false => write!(line, "{cell:>width$}  "),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_in_units_people_use() {
        assert_eq!(shown(1600.0, unit::NS), "1.60 us");
        assert_eq!(shown(45_000_000.0, unit::NS), "45.0 ms");
        assert_eq!(shown(3_210_000.0, unit::PER_SECOND), "3.210 M/s");
        assert_eq!(shown(24.6e9, unit::BITS), "24.60 Gbit/s");
        assert_eq!(shown(0.9812, unit::ONE), "0.9812");
    }
}
