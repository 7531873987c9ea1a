//! `ping`: there and back, with percentiles.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use hdrhistogram::Histogram;
use portolan::service::{Kind, Tag};
use portolan::{Address, Event, Node, Port, PortOptions, Priority, SendOptions, Wait};
use serde_json::{Value, json};

use crate::arguments::Ping;
use crate::table::duration;

/// Below this pause, replies are not printed one by one.
const SLOW_ENOUGH_TO_READ: Duration = Duration::from_millis(100);

/// A target that answers none of so many is given up.
const HOPELESS: u64 = 5;

/// What became of one ping.
pub enum Outcome {
    Answered(Duration),
    Lost(String),
}

pub fn run(node: &Node, options: &Ping) -> anyhow::Result<ExitCode> {
    let to = options.target.resolve(node)?;
    let priority = options.priority.priority();
    let mut port = open(node, options.size, priority, options.wait.wait())?;
    let payload: Vec<u8> = (0..options.size).map(|i| i as u8).collect();
    let first = random_id();
    let mut times = Histogram::<u64>::new_with_bounds(1, 600_000_000_000, 3)?;
    let (mut lost, mut last_loss) = (0u64, None);
    let talk = !options.format.json && options.interval >= SLOW_ENOUGH_TO_READ;
    for i in 0..options.count {
        let start = Instant::now();
        let id = first.wrapping_add(i) & (u64::MAX >> 8);
        let send = self::options(id, priority, options.timeout);
        let outcome = one(&mut port, to, &payload, id, send, options.timeout)?;
        if talk {
            let text = match &outcome {
                Outcome::Answered(rtt) => duration(rtt.as_nanos() as f64),
                Outcome::Lost(why) => format!("lost: {why}"),
            };
            writeln!(
                std::io::stdout(),
                "{} bytes from {to}: seq={i} time={text}",
                payload.len()
            )?;
        }
        match outcome {
            Outcome::Answered(rtt) => times.saturating_record(rtt.as_nanos() as u64),
            Outcome::Lost(why) => {
                lost += 1;
                last_loss = Some(why);
            }
        }
        if lost == HOPELESS && times.is_empty() {
            break;
        }
        if i + 1 < options.count {
            pause(&mut port, options.interval.saturating_sub(start.elapsed()))?;
        }
    }
    port.close(Duration::ZERO)?;
    print(options, to, &times, lost, last_loss.as_deref())?;
    Ok(if lost == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// A port to ping from, with buffers for the answers.
pub fn open(node: &Node, size: u16, priority: Priority, wait: Wait) -> anyhow::Result<Port> {
    let mut port = node.open_port(PortOptions {
        wait,
        ..PortOptions::default()
    })?;
    for _ in 0..8 {
        let buffer = port.allocate(size.max(64).into())?;
        port.provide_receive_buffer(buffer, priority)?;
    }
    Ok(port)
}

/// How ping number `id` is sent.
pub fn options(id: u64, priority: Priority, timeout: Duration) -> SendOptions {
    let kind = Kind::Ping;
    SendOptions {
        priority,
        tag: Tag { kind, id }.encode(),
        timeout: Some(timeout),
        ..SendOptions::default()
    }
}

/// One ping and its answer. Answers to earlier ones, given up meanwhile, only give their buffers back.
pub fn one(
    port: &mut Port,
    to: Address,
    payload: &[u8],
    id: u64,
    options: SendOptions,
    timeout: Duration,
) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let handle = port.send_bytes(to, payload, options)?;
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        match port.blocking_receive(left)? {
            Some(Event::Received(message)) => {
                let rtt = start.elapsed();
                let ours = Tag::decode(message.tag())
                    .is_some_and(|tag| tag.kind == Kind::PingReply && tag.id == id);
                let same = message[..] == *payload;
                port.unknown(Event::Received(message));
                match (ours, same) {
                    (true, true) => return Ok(Outcome::Answered(rtt)),
                    (true, false) => bail!("{to} answered with other bytes than were sent"),
                    (false, _) => {}
                }
            }
            Some(Event::Sent(sent)) if !sent.status.is_delivered() => {
                port.drop_sends(to, options.priority)?;
                if sent.handle == handle {
                    return Ok(Outcome::Lost(sent.status.to_string()));
                }
            }
            Some(other) => port.unknown(other),
            None => return Ok(Outcome::Lost("no answer in time".into())),
        }
    }
}

/// Waits until it is time for the next one, while late events are taken care of.
fn pause(port: &mut Port, pause: Duration) -> anyhow::Result<()> {
    let end = Instant::now() + pause;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        if let Some(event) = port.blocking_receive(left)? {
            port.unknown(event);
        }
    }
}

fn print(
    options: &Ping,
    to: Address,
    times: &Histogram<u64>,
    lost: u64,
    last_loss: Option<&str>,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if options.format.json {
        let document = json!({
            "target": to.to_string(),
            "bytes": options.size,
            "sent": times.len() + lost,
            "answered": times.len(),
            "lost": lost,
            "last_loss": last_loss,
            "rtt_ns": percentiles(times, 1.0),
            "one_way_ns": percentiles(times, 2.0),
        });
        writeln!(out, "{document:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{} sent to {to}, {} answered, {lost} lost",
        times.len() + lost,
        times.len()
    )?;
    if let Some(why) = last_loss {
        writeln!(out, "last loss: {why}")?;
    }
    if !times.is_empty() {
        let mut table =
            crate::table::Table::new(&["", "min", "p50", "p90", "p99", "p99.9", "max", "mean"]);
        for (name, divisor) in [("one way", 2.0), ("round trip", 1.0)] {
            let mut row = vec![name.to_string()];
            row.extend(figures(times, divisor).map(|(_, ns)| duration(ns)));
            table.row(row);
        }
        write!(out, "{}", table.render())?;
    }
    Ok(())
}

fn figures(times: &Histogram<u64>, divisor: f64) -> [(&'static str, f64); 7] {
    let at = |q: f64| times.value_at_quantile(q) as f64 / divisor;
    [
        ("min", times.min() as f64 / divisor),
        ("p50", at(0.5)),
        ("p90", at(0.9)),
        ("p99", at(0.99)),
        ("p999", at(0.999)),
        ("max", times.max() as f64 / divisor),
        ("mean", times.mean() / divisor),
    ]
}

pub fn percentiles(times: &Histogram<u64>, divisor: f64) -> Value {
    if times.is_empty() {
        return Value::Null;
    }
    figures(times, divisor)
        .into_iter()
        .map(|(name, ns)| (name.to_string(), json!(ns.round() as u64)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Names a conversation: an answer to the previous owner of this port's number is not ours.
pub fn random_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's only source of randomness, and enough here.
    let random = std::collections::hash_map::RandomState::new();
    random.build_hasher().finish() & (u64::MAX >> 8)
}
