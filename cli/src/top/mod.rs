//! `top`: what the node does now, once per interval.
//!
//! Made of the daemon's reports, asked for twice and compared; so it costs the engines nothing but the question for their peers. On a
//! terminal each picture replaces the one before; elsewhere they follow each other; with `--json` each is a line.

mod latency;
mod picture;
mod probe;
mod rates;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use portolan::{Node, Report};
use serde_json::{Value, json};

use crate::arguments::Top;
use crate::paint::Paint;
use probe::Probe;

/// All reports, at one time.
pub struct Snapshot {
    at: Instant,
    status: Value,
    peers: Value,
    ports: Value,
    counters: Value,
}

impl Snapshot {
    fn take(node: &Node) -> anyhow::Result<Self> {
        let counters = node.report(Report::Counters)?;
        Ok(Self {
            at: Instant::now(),
            counters,
            status: node.report(Report::Status)?,
            peers: node.report(Report::Peers)?,
            ports: node.report(Report::Ports)?,
        })
    }
}

/// Shows pictures until interrupted, or as many as were asked for.
pub fn run(node: &Node, options: &Top) -> anyhow::Result<ExitCode> {
    let paint = Paint::for_stdout();
    let live = std::io::stdout().is_terminal() && !options.format.json && !options.once;
    let mut probe = options.probe.then(|| Probe::open(node)).transpose()?;
    let mut before = Snapshot::take(node).context("the daemon does not report")?;
    let mut shown = 0;
    loop {
        let until = before.at + options.interval.max(Duration::from_millis(50));
        let latencies = match &mut probe {
            Some(probe) => probe.measure(&before.peers, until)?,
            None => Value::Null,
        };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        let now = Snapshot::take(node).context("the daemon does not report")?;
        let mut document = rates::document(&before, &now);
        let time = humantime::format_rfc3339_millis(SystemTime::now());
        document["time"] = json!(time.to_string());
        document["latency"] = latencies;
        show(&document, paint, live, options.format.json)?;
        shown += 1;
        if options.once || options.count.is_some_and(|count| shown >= count) {
            return Ok(ExitCode::SUCCESS);
        }
        before = now;
    }
}

fn show(document: &Value, paint: Paint, live: bool, json: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{document}")?;
        return out.flush();
    }
    let text = picture::text(document, paint);
    if !live {
        writeln!(out, "{text}")?;
        return out.flush();
    }
    let rows = rustix::termios::tcgetwinsize(&out).map_or(24, |size| usize::from(size.ws_row));
    // Over the picture before, without clearing the screen first, which would flicker. What does not fit is left out.
    let mut screen = String::from("\x1b[H");
    for line in text.lines().take(rows.max(2) - 1) {
        screen += line;
        screen += "\x1b[K\n";
    }
    screen += "\x1b[J";
    out.write_all(screen.as_bytes())?;
    out.flush()
}
