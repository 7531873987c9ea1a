//! `fault`: hurts an engine on purpose, and tells what became of it.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use portolan::{Node, Report};
use serde_json::Value;

use crate::arguments::Fault;
use crate::recovery::Recovery;
use crate::table::plain;

/// How long a recovery is waited for.
const RECOVERED: Duration = Duration::from_secs(10);
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(2);

/// Injects the fault and, unless told not to, waits until another engine serves.
pub fn run(node: &Node, fault: &Fault) -> anyhow::Result<ExitCode> {
    let (kind, engine) = (fault.kind.name(), fault.engine);
    let before = (!fault.no_wait)
        .then(|| look(node, engine))
        .transpose()
        .unwrap_or_default()
        .flatten();
    node.inject_fault(engine, kind)
        .with_context(|| format!("cannot {kind} engine {engine}"))?;
    // A daemon that says nothing of recoveries cannot be waited for.
    let Some(before) = before.filter(|engine| engine.get("last_recovery").is_some()) else {
        return Ok(ExitCode::SUCCESS);
    };
    let number = Recovery::of(&before).map_or(0, |last| last.number());
    let deadline = Instant::now() + RECOVERED;
    loop {
        if let Ok(Some(now)) = look(node, engine)
            && let Some(last) = Recovery::of(&now)
            && last.number() > number
            && last.is_over()
        {
            println!("{}", describe(&before, &now, &last));
            return Ok(ExitCode::SUCCESS);
        }
        if Instant::now() > deadline {
            bail!(
                "engine {engine} was not replaced within {RECOVERED:?}; `portolan status` shows what it does"
            );
        }
        std::thread::sleep(PAUSE);
    }
}

fn look(node: &Node, engine: u16) -> anyhow::Result<Option<Value>> {
    let status = node.report(Report::Status)?;
    let engines = status["engines"].as_array().map_or(&[][..], Vec::as_slice);
    let found = engines.iter().find(|e| e["queue"] == engine);
    Ok(found.cloned())
}

fn describe(before: &Value, now: &Value, last: &Recovery) -> String {
    let (detected, serving) = last.spans();
    format!(
        "engine {}: process {} was lost ({}), noticed {detected} after its last sign of life; process {} served {serving} later (by {})",
        plain(&now["queue"]),
        plain(&before["pid"]),
        plain(&last.document["cause"]),
        plain(&now["pid"]),
        plain(&last.document["tier"]),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_recovery_is_told_in_a_sentence() {
        let before = json!({ "queue": 0, "pid": 70 });
        let now = json!({ "queue": 0, "pid": 71, "last_recovery": {
            "number": 1, "cause": "hang", "tier": "adopt",
            "last_beat_ns": 1000, "detected_at_ns": 1_501_000, "ready_at_ns": 1_751_000,
        } });
        let last = Recovery::of(&now).unwrap();
        assert!(last.is_over());
        let text = describe(&before, &now, &last);
        for wanted in [
            "process 70",
            "(hang)",
            "1500.0 us",
            "process 71",
            "250.0 us",
            "adopt",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        let under_way = json!({ "last_recovery": { "number": 2, "ready_at_ns": null } });
        assert!(!Recovery::of(&under_way).unwrap().is_over());
    }
}
