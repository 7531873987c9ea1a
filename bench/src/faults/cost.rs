//! FTGM's Table 2 on this machine: bandwidth, latency, and the processor time each message takes, in the application and in the engine.
//!
//! The application's time is that of its calls alone: messages are sent in batches, everybody sleeps until all have come, then the batch
//! is received. The engine's time is measured with both engines saturated by short messages, so none of it is spent looking for work.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan::{Address, Event, Node, Port, PortOptions, Priority, SendOptions};
use serde_json::{Value, json};

use super::clock::thread_cpu_ns;
use super::scene::{NODES, PAUSE, Setting};
use super::victim::Engine;
use crate::profiles::load::Pair;

/// Bytes of a short message.
const SHORT: usize = 64;
/// Bytes of a long one.
const LONG: usize = 1 << 18;
/// Messages per second while latency is measured: far below what the path carries.
const RATE: u32 = 2000;
const MEASURED: Duration = Duration::from_secs(2);
const BATCH: usize = 32;
const BATCHES: usize = 300;
/// Bound on a batch.
const ARRIVED: Duration = Duration::from_secs(10);
const FIRST_PORT: u16 = 210;

/// The row of a table like FTGM's.
#[derive(Clone, Debug)]
pub struct Cost {
    pub bandwidth_mb_s: f64,
    pub latency_us: f64,
    pub send_us: f64,
    pub receive_us: f64,
    /// Of the sender's and of the receiver's engine.
    pub engine_us: [f64; 2],
}

/// What it is expected to take.
pub const EXPECTED_S: f64 = 14.0;

/// Measures all of it in a lab without faults.
pub fn measure(setting: &Setting) -> Result<Cost> {
    let lab = setting.lab()?;
    let daemons = NODES.map(|node| lab.node(node).start_daemon(&setting.overrides[0]));
    let [one, two] = daemons;
    let daemons = [one?, two?];
    let attach = |node: u16| Node::attach(lab.node(node).socket());
    let mut pair = Pair::new(attach(1)?, attach(2)?);
    pair.goodput(SHORT, MEASURED / 4)?;
    let bandwidth_mb_s = pair.goodput(LONG, MEASURED)? / 8e6;
    let latency = pair.latency(SHORT, RATE, MEASURED)?;
    let pids = [
        Engine::look(&daemons[0])?.pid,
        Engine::look(&daemons[1])?.pid,
    ];
    let cpu = || -> Result<[u64; 2]> {
        let [one, two] = pids.map(|pid| cpu_ns(pid.context("an engine without a process")?));
        Ok([one?, two?])
    };
    let (began, before) = (Instant::now(), cpu()?);
    let messages = pair.goodput(SHORT, MEASURED)? / 8.0 / SHORT as f64;
    let (wall, after) = (began.elapsed().as_nanos() as f64, cpu()?);
    let engine_us = [0, 1].map(|i| {
        let share = (after[i] - before[i]) as f64 / wall;
        share / messages * 1e6
    });
    let (send_us, receive_us) = calls(&attach(1)?, &attach(2)?)?;
    Ok(Cost {
        bandwidth_mb_s,
        latency_us: latency.value_at_quantile(0.5) as f64 / 1000.0,
        send_us,
        receive_us,
        engine_us,
    })
}

impl Cost {
    pub fn json(&self) -> Value {
        json!({
            "bandwidth_mb_s": self.bandwidth_mb_s,
            "latency_us": self.latency_us,
            "host_send_us": self.send_us,
            "host_receive_us": self.receive_us,
            "engine_send_us": self.engine_us[0],
            "engine_receive_us": self.engine_us[1],
        })
    }
}

/// Nanoseconds a process has run.
fn cpu_ns(pid: i32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).context("schedstat")?;
    let first = text.split_ascii_whitespace().next().context("schedstat")?;
    first.parse().context("schedstat")
}

/// Microseconds of processor time per send, and per receive with its buffer provided again.
fn calls(one: &Node, two: &Node) -> Result<(f64, f64)> {
    let mut from = one.open_port(PortOptions::at(FIRST_PORT))?;
    let mut to = two.open_port(PortOptions::at(FIRST_PORT))?;
    for _ in 0..2 * BATCH {
        let buffer = to.allocate(SHORT)?;
        to.provide_receive_buffer(buffer, Priority::Low)?;
    }
    let (mut sending, mut receiving) = (0, 0);
    for _ in 0..BATCHES {
        sending += timed(|| send(&mut from, to.address()))?;
        ended(&mut from)?;
        receiving += timed(|| receive(&mut to))?;
    }
    let each = (BATCH * BATCHES) as f64 * 1000.0;
    Ok((sending as f64 / each, receiving as f64 / each))
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let before = thread_cpu_ns();
    work()?;
    Ok(thread_cpu_ns() - before)
}

fn send(port: &mut Port, to: Address) -> Result<()> {
    for _ in 0..BATCH {
        port.send_bytes(to, &[7; SHORT], SendOptions::default())?;
    }
    Ok(())
}

/// Every send has ended, so every message waits to be received.
fn ended(port: &mut Port) -> Result<()> {
    let deadline = Instant::now() + ARRIVED;
    while port.sends_outstanding() > 0 {
        if Instant::now() > deadline {
            bail!("a batch did not arrive");
        }
        match port.receive()? {
            Some(event) => port.unknown(event),
            None => std::thread::sleep(PAUSE),
        }
    }
    Ok(())
}

fn receive(port: &mut Port) -> Result<()> {
    for _ in 0..BATCH {
        match port.receive()? {
            Some(Event::Received(message)) => port.unknown(Event::Received(message)),
            other => bail!("{other:?} instead of a message"),
        }
    }
    Ok(())
}
