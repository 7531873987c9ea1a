//! `events`: what happened on this node.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use portolan::{ErrorCode, Node, NodeError};
use serde_json::Value;

use crate::arguments::Events;
use crate::paint::{Paint, style_of};
use crate::table::{duration, plain};

/// A daemon that is gone may come back within this.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// From one attempt to reach it to the next.
const PAUSE: Duration = Duration::from_millis(200);

/// Prints events: those that are remembered, and with `--follow` those to come.
pub fn run(node: Node, socket: &std::path::Path, options: &Events) -> anyhow::Result<ExitCode> {
    let paint = Paint::for_stdout();
    let since = options.since.map(|since| since.0);
    let (mut node, mut run, mut after) = (node, None::<String>, 0);
    let mut lost: Option<Instant> = None;
    loop {
        let wait = options.follow && run.is_some();
        let document = match node.events(run.as_deref(), after, wait) {
            Ok(document) => document,
            Err(error) if options.follow && is_gone(&error) => {
                let begun = *lost.get_or_insert_with(Instant::now);
                if begun.elapsed() > BACK_WITHIN {
                    return Err(error).context("the daemon did not come back");
                }
                std::thread::sleep(PAUSE);
                if let Ok(again) = Node::attach(socket) {
                    node = again;
                }
                continue;
            }
            Err(NodeError::Refused {
                code: ErrorCode::BadRequest,
                ..
            }) => {
                anyhow::bail!(
                    "this daemon is older than `portolan events`; upgrade it, or see its log"
                )
            }
            Err(error) => return Err(error.into()),
        };
        lost = None;
        let mut out = std::io::stdout().lock();
        for event in document["events"].as_array().into_iter().flatten() {
            if since.is_some_and(|since| happened(event).is_some_and(|at| at < since)) {
                continue;
            }
            match options.format.json {
                true => writeln!(out, "{event}")?,
                false => writeln!(out, "{}", line(event, paint))?,
            }
        }
        out.flush()?;
        run = document["run"].as_str().map(str::to_owned);
        let before = after;
        after = document["after"].as_u64().unwrap_or(before);
        let more = document["more"] == true && after != before;
        if !more && !options.follow {
            return Ok(ExitCode::SUCCESS);
        }
        if options.follow && run.is_none() {
            anyhow::bail!("the daemon's answer makes no sense: no `run` in it");
        }
    }
}

fn is_gone(error: &NodeError) -> bool {
    matches!(
        error,
        NodeError::Disconnected
            | NodeError::NoDaemon { .. }
            | NodeError::System { .. }
            | NodeError::Timeout { .. }
    )
}

fn happened(event: &Value) -> Option<SystemTime> {
    humantime::parse_rfc3339_weak(event["time"].as_str()?).ok()
}

/// One line for people.
fn line(event: &Value, paint: Paint) -> String {
    let time = plain(&event["time"]);
    // To the millisecond.
    let time = time.get(..23).unwrap_or(&time).replace('T', " ");
    let severity = plain(&event["severity"]);
    let padded = paint.paint(style_of("severity", &severity), &format!("{severity:7}"));
    let mut text = format!(
        "{time}  {padded}  {:18}  {}",
        plain(&event["kind"]),
        plain(&event["text"])
    );
    for key in ["engine", "port", "peer"] {
        if !event[key].is_null() {
            text += &format!(" {key}={}", plain(&event[key]));
        }
    }
    for (name, value) in event["fields"].as_object().into_iter().flatten() {
        text += &match (name.strip_suffix("_ns"), value.as_f64()) {
            _ if value.is_null() => continue,
            (Some(name), Some(ns)) => format!(" {name}={}", duration(ns).replace(' ', "")),
            _ => format!(" {name}={}", plain(value)),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_is_a_line() {
        let event = json!({
            "number": 7, "time": "2026-11-22T06:00:01.123456Z", "severity": "warning", "kind": "engine_recovered",
            "text": "engine recovered", "engine": 0, "port": null, "peer": null,
            "fields": { "cause": "hang\u{1b}[2J", "takeover_ns": 150_000, "outage_ns": null },
        });
        assert_eq!(
            line(&event, Paint::NONE),
            "2026-11-22 06:00:01.123  warning  engine_recovered    engine recovered engine=0 cause=hang\u{fffd}[2J takeover=150.0us"
        );
        // A daemon gone mad. Expect: no panic.
        for odd in [json!(null), json!({ "time": "é", "fields": 3 }), json!([1])] {
            line(&odd, Paint::NONE);
            assert_eq!(happened(&odd), None);
        }
    }
}
