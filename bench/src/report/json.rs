//! The report for programs: DESIGN §9's shape.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Line, Results, goals};
use crate::host;
use crate::subjects::unit;

/// Writes it.
pub fn write(results: &Results, path: &Path) -> Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    let text = serde_json::to_string_pretty(&report(results))?;
    fs::write(path, text).with_context(|| path.display().to_string())
}

fn report(results: &Results) -> Value {
    let lines = results.lines();
    let subjects = results.subjects.iter().map(|(name, about)| {
        json!({ "subject": name, "version": about.version, "command": about.command })
    });
    let points = results.half_power_points();
    let points = points
        .iter()
        .map(|(name, bytes)| json!({ "subject": name, "bytes": bytes }));
    let failures = results
        .failures
        .iter()
        .map(|(case, subject, why)| json!({ "case": case, "subject": subject, "error": why }));
    let goals = goals::judge(results);
    let goals = goals.iter().map(|goal| {
        json!({
            "what": goal.what,
            "found": goal.found,
            "wanted": goal.wanted,
            "reached": goal.is_reached,
        })
    });
    json!({
        "host": host::describe(),
        "quick": results.quick,
        "turns": results.turns,
        "took_s": results.took_s,
        "subjects": subjects.collect::<Vec<_>>(),
        "results": lines.iter().map(result).collect::<Vec<_>>(),
        "half_power_points": points.collect::<Vec<_>>(),
        "goals": goals.collect::<Vec<_>>(),
        "failures": failures.collect::<Vec<_>>(),
    })
}

fn result(line: &Line) -> Value {
    // A median only where it is one.
    let p50 = (line.unit == unit::NS).then_some(line.value);
    let by_turn = line.by_turn.iter().map(
        |turn| json!({ "turn": turn.turn, "value": turn.value, "core_round_trip_ns": turn.around }),
    );
    json!({
        "case": line.case.to_string(),
        "subject": line.subject,
        "metric": line.metric,
        "mtu": line.case.mtu(),
        "bytes": line.case.bytes(),
        "p50": p50,
        "p99": line.p99,
        "p999": line.p999,
        "value": line.value,
        "least": line.range.0,
        "most": line.range.1,
        "unit": line.unit,
        "turns": line.turns,
        "by_turn": by_turn.collect::<Vec<_>>(),
        "samples": line.samples,
        "limit": line.case.limit(),
        "ratio_to_limit": line.ratio,
        "note": line.note,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Case;
    use crate::subjects::{About, Figure, metric};

    #[test]
    fn the_shape_is_the_designs() {
        let subjects =
            ["portolan", "limit-raw-xdp"].map(|name| (name.to_owned(), About::default()));
        let case = Case::Rate { bytes: 64 };
        let mut results = Results::new(subjects.to_vec(), vec![case], 1, false);
        for (subject, rate) in [("portolan", 3e6), ("limit-raw-xdp", 1e6)] {
            let figure = Figure::number(metric::RATE, rate, unit::PER_SECOND);
            results.add(&case, subject, 0, vec![figure]);
        }
        results.fail("pingpong-64", "aeron", "does not build");
        let report = report(&results);
        let first = &report["results"][0];
        assert_eq!(first["case"], "rate-64");
        assert_eq!(first["subject"], "portolan");
        assert_eq!(first["metric"], "messages");
        assert_eq!(first["value"], 3e6);
        assert_eq!(first["unit"], "1/s");
        assert_eq!(first["samples"], 1);
        assert_eq!(first["ratio_to_limit"], 3.0);
        for key in ["p50", "p99", "p999"] {
            assert!(first[key].is_null(), "{key}: a rate has no quantiles");
        }
        assert!(report["host"].is_object());
        assert_eq!(report["failures"][0]["subject"], "aeron");
    }
}
