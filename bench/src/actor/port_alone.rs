//! What only Portolan's applications are asked: to be woken, and to begin.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use portolan::{Address, Event, Node, Port, PortOptions, Priority, SendOptions, Wait};

use super::first_message::{BYTES, LOOK, Sleeper, await_stamp, now, stamp};
use super::work::{counts, histogram};
use super::{Answer, Job, Orders};

/// Bound on one message.
const ARRIVED: Duration = Duration::from_secs(5);
/// Buffers offered.
const BUFFERS: usize = 8;

pub fn perform(socket: &Path, own: u16, to: Address, job: &Job, orders: &Orders) -> Result<()> {
    match job {
        Job::Stamp | Job::Await => {
            let port = open(&Node::attach(socket)?, own)?;
            let mut asleep = Asleep { port, to };
            match job {
                Job::Stamp => stamp(&mut asleep, orders),
                _ => await_stamp(&mut asleep, orders),
            }
        }
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

/// An application asleep in its port.
struct Asleep {
    port: Port,
    to: Address,
}

impl Sleeper for Asleep {
    fn send(&mut self, message: &[u8; BYTES]) -> Result<()> {
        self.port
            .send_bytes(self.to, message, SendOptions::default())?;
        let deadline = Instant::now() + ARRIVED;
        loop {
            ensure!(Instant::now() < deadline, "a send does not end");
            match self.port.blocking_receive(LOOK)? {
                Some(Event::Sent(sent)) => {
                    ensure!(sent.status.is_delivered(), "a send ended {}", sent.status);
                    return Ok(());
                }
                Some(event) => self.port.unknown(event),
                None => {}
            }
        }
    }

    fn sleep(&mut self) -> Result<Option<(u64, [u8; 8])>> {
        let Some(event) = self.port.blocking_receive(LOOK)? else {
            return Ok(None);
        };
        let came = now();
        let first = match &event {
            Event::Received(message) => message.first_chunk::<8>().copied(),
            _ => None,
        };
        self.port.unknown(event);
        Ok(first.map(|first| (came, first)))
    }
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
