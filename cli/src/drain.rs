//! `portolan drain`: no new sends, wait for what is outstanding, say when it is safe to stop; `--undo` takes it back.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use portolan::Node;
use serde_json::Value;

use crate::arguments::Drain;

/// Between two questions.
const EVERY: Duration = Duration::from_millis(100);

/// Drains the node, or undoes it.
pub fn run(node: &Node, options: &Drain) -> anyhow::Result<ExitCode> {
    if options.undo {
        let state = node.drain("end")?;
        return say(
            options,
            &state,
            "drained no more: ports and sends are taken again",
        );
    }
    let begun = Instant::now();
    let mut state = node.drain("begin").context("the node is not drained")?;
    let most = outstanding(&state);
    let bar = if options.format.json || !std::io::stderr().is_terminal() {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(most)
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} sends ended {elapsed}") {
        bar.set_style(style);
    }
    while outstanding(&state) > 0 && begun.elapsed() < options.timeout {
        let now = outstanding(&state);
        bar.set_length(most.max(now));
        bar.set_position(most.saturating_sub(now));
        std::thread::sleep(EVERY);
        state = node.drain("look")?;
        if state["draining"] != true {
            bail!(
                "somebody ended draining (`portolan drain --undo`), or the node was started anew"
            );
        }
    }
    bar.finish_and_clear();
    if state["safe_to_stop"] == true {
        let name = node.name();
        let text = format!(
            "safe to stop: no send of node {name} is outstanding, new ones are refused (`systemctl stop portoland`; `portolan drain --undo` takes it back)"
        );
        return say(options, &state, &text);
    }
    let ports: Vec<String> = state["ports"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|port| {
            format!(
                "port {}: {} (pid {})",
                port["port"], port["outstanding"], port["owner_pid"]
            )
        })
        .collect();
    let text = format!(
        "NOT safe to stop yet: {} sends are outstanding ({}); they end by their own deadlines. The node goes on draining: ask again, or `portolan drain --undo`",
        outstanding(&state),
        ports.join(", ")
    );
    say(options, &state, &text)?;
    Ok(ExitCode::FAILURE)
}

fn outstanding(state: &Value) -> u64 {
    state["outstanding"].as_u64().unwrap_or(0)
}

fn say(options: &Drain, state: &Value, text: &str) -> anyhow::Result<ExitCode> {
    let text = if options.format.json {
        format!("{state:#}\n")
    } else {
        format!("{text}\n")
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
