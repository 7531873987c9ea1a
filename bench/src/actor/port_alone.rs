//! What only Portolan's applications are asked: to be woken, and to begin.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use portolan::{Address, Event, Node, Port, PortOptions, Priority, SendOptions, Wait};
use rustix::time::{ClockId, clock_gettime};

use super::work::{counts, histogram};
use super::{Answer, Job, Orders, Phase};

/// Bound on one message.
const ARRIVED: Duration = Duration::from_secs(5);
/// How often somebody asleep looks at his orders.
const LOOK: Duration = Duration::from_millis(200);
/// Buffers offered.
const BUFFERS: usize = 8;

pub fn perform(socket: &Path, own: u16, to: Address, job: &Job, orders: &Orders) -> Result<()> {
    match job {
        Job::Stamp => stamp(&mut open(&Node::attach(socket)?, own)?, to, orders),
        Job::Await => await_stamp(&mut open(&Node::attach(socket)?, own)?, orders),
        Job::Startup { lasting } => {
            orders.ready()?;
            let times = startup(socket, own, to, Duration::from_nanos(*lasting))?;
            orders.answer(&Answer::Startup(times.map(|times| counts(&times))))
        }
        _ => Ok(()),
    }
}

/// Waits as applications do unless told otherwise.
fn open(node: &Node, own: u16) -> Result<Port> {
    let mut port = node.open_port(PortOptions {
        wait: Wait::default(),
        ..PortOptions::at(own)
    })?;
    for _ in 0..BUFFERS {
        let buffer = port.allocate(64)?;
        port.provide_receive_buffer(buffer, Priority::Low)?;
    }
    Ok(port)
}

/// The machine's own time, the same for every process.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// A message when the word is given, after one that made the nodes known to each other.
fn stamp(port: &mut Port, to: Address, orders: &Orders) -> Result<()> {
    send(port, to, 0)?;
    orders.ready()?;
    send(port, to, now())
}

fn send(port: &mut Port, to: Address, stamp: u64) -> Result<()> {
    let mut message = [0; 64];
    message[..8].copy_from_slice(&stamp.to_le_bytes());
    port.send_bytes(to, &message, SendOptions::default())?;
    let deadline = Instant::now() + ARRIVED;
    loop {
        ensure!(Instant::now() < deadline, "a send does not end");
        match port.blocking_receive(LOOK)? {
            Some(Event::Sent(sent)) => {
                ensure!(sent.status.is_delivered(), "a send ended {}", sent.status);
                return Ok(());
            }
            Some(event) => port.unknown(event),
            None => {}
        }
    }
}

/// How old stamps are when they come.
fn await_stamp(port: &mut Port, orders: &Orders) -> Result<()> {
    orders.ready()?;
    while orders.phase() != Phase::Over {
        let Some(event) = port.blocking_receive(LOOK)? else {
            continue;
        };
        let came = now();
        if let Event::Received(message) = &event
            && let Some(stamp) = message.first_chunk::<8>()
            && *stamp != [0; 8]
        {
            let way = came.saturating_sub(u64::from_le_bytes(*stamp));
            orders.answer(&Answer::Ways(vec![(way, 1)]))?;
        }
        port.unknown(event);
    }
    Ok(())
}

/// Attaching, opening, and the first message there and back, as often as goes.
fn startup(socket: &Path, own: u16, to: Address, lasting: Duration) -> Result<[Histogram<u64>; 3]> {
    let mut times = [histogram()?, histogram()?, histogram()?];
    let end = Instant::now() + lasting;
    while Instant::now() < end {
        let began = Instant::now();
        let node = Node::attach(socket)?;
        let attached = Instant::now();
        let mut port = open(&node, own)?;
        let opened = Instant::now();
        port.send_bytes(to, &[7; 64], SendOptions::default())?;
        let answered = loop {
            let left = ARRIVED.saturating_sub(opened.elapsed());
            let event = port.blocking_receive(left)?.context("no answer comes")?;
            if matches!(event, Event::Received(_)) {
                break Instant::now();
            }
            port.unknown(event);
        };
        let took = [attached - began, opened - attached, answered - opened];
        for (times, took) in times.iter_mut().zip(took) {
            times.saturating_record(took.as_nanos() as u64);
        }
        port.close(ARRIVED)?;
    }
    Ok(times)
}
