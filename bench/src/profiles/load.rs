//! The load on a pair of nodes: as much as goes, or at a rate with the time each message takes.
//!
//! Sender and receiver are threads of this process, so both read the same clock and a message can carry the time it was sent. Each
//! measurement has ports of its own: what an earlier one left behind is nobody's.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use portolan::{Address, Event, Node, Port, PortOptions, Priority, SendError, SendOptions};

/// Sends under way at most: more than any window.
const TOKENS: u32 = 255;
/// Buffers offered at most.
const BUFFERS: usize = 512;
/// What buffers may take together.
const BUFFER_BYTES: usize = 32 << 20;
/// How long one wait lasts before the thread looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(20);
/// How long stragglers are waited for when latency is measured; who is later took this long.
const STRAGGLERS: Duration = Duration::from_secs(2);
/// The longest latency that is told apart.
const LONGEST_NS: u64 = 20_000_000_000;

/// Two nodes.
pub struct Pair {
    one: Node,
    two: Node,
    /// Number of the next measurement's ports.
    port: u16,
}

impl Pair {
    pub fn new(one: Node, two: Node) -> Self {
        Self { one, two, port: 10 }
    }

    /// Bits of messages per second from node 1 to node 2.
    pub fn goodput(&mut self, bytes: usize, measured: Duration) -> Result<f64> {
        let (mut from, mut to) = self.ports(bytes)?;
        let address = to.address();
        let (stop, received) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                until_stopped(&stop, || {
                    receive(&mut to, |_| {
                        received.fetch_add(1, Ordering::Relaxed);
                    })
                })
            });
            let sender = scope.spawn(|| until_stopped(&stop, || fill(&mut from, address, bytes)));
            // Under way before it counts.
            std::thread::sleep(measured / 4);
            let (before, began) = (received.load(Ordering::Relaxed), Instant::now());
            std::thread::sleep(measured);
            let (after, took) = (received.load(Ordering::Relaxed), began.elapsed());
            stop.store(true, Ordering::Relaxed);
            join(receiver).context("receiver")?;
            join(sender).context("sender")?;
            Ok((after - before) as f64 * bytes as f64 * 8.0 / took.as_secs_f64())
        })
    }

    /// One-way latencies in nanoseconds, of `rate` messages per second from node 1 to node 2.
    pub fn latency(
        &mut self,
        bytes: usize,
        rate: u32,
        measured: Duration,
    ) -> Result<Histogram<u64>> {
        let bytes = bytes.max(8);
        let (mut from, mut to) = self.ports(bytes)?;
        let address = to.address();
        let base = Instant::now();
        let stop = AtomicBool::new(false);
        let mut latencies = Histogram::new_with_bounds(1, LONGEST_NS, 3)?;
        let count = (u64::from(rate) * measured.as_millis() as u64 / 1000).max(1);
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                until_stopped(&stop, || {
                    receive(&mut to, |message| {
                        let mut sent = [0; 8];
                        sent.copy_from_slice(&message[..8]);
                        let now = base.elapsed().as_nanos() as u64;
                        latencies.saturating_record(now.saturating_sub(u64::from_le_bytes(sent)));
                    })?;
                    if latencies.len() == count {
                        stop.store(true, Ordering::Relaxed);
                    }
                    Ok(())
                })
            });
            let sent = pace(&mut from, address, bytes, count, rate, base, &stop);
            // For its acknowledgements, and for who is late.
            let deadline = Instant::now() + STRAGGLERS;
            while sent.is_ok() && !stop.load(Ordering::Relaxed) && Instant::now() < deadline {
                from.blocking_receive(LOOK)?;
            }
            stop.store(true, Ordering::Relaxed);
            join(receiver).context("receiver")?;
            sent.context("sender")
        })?;
        let missing = count - latencies.len();
        latencies.saturating_record_n(STRAGGLERS.as_nanos() as u64, missing);
        Ok(latencies)
    }

    /// A sender at node 1 and a receiver at node 2 with its buffers offered.
    fn ports(&mut self, bytes: usize) -> Result<(Port, Port)> {
        let number = self.port;
        self.port = if number == 200 { 10 } else { number + 1 };
        let buffers = (BUFFER_BYTES / bytes.max(1)).clamp(8, BUFFERS);
        let room = |count: usize| (count * (bytes + 128) + (1 << 20)) as u64;
        let from = self.one.open_port(PortOptions {
            send_tokens: TOKENS.min(buffers as u32),
            arena_bytes: room(buffers.min(TOKENS as usize)),
            ..PortOptions::at(number)
        })?;
        let mut to = self.two.open_port(PortOptions {
            receive_tokens: buffers as u32,
            arena_bytes: room(buffers),
            ..PortOptions::at(number)
        })?;
        for _ in 0..buffers {
            let buffer = to.allocate(bytes)?;
            to.provide_receive_buffer(buffer, Priority::Low)?;
        }
        Ok((from, to))
    }
}

fn until_stopped(stop: &AtomicBool, mut step: impl FnMut() -> Result<()>) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        if let Err(error) = step() {
            stop.store(true, Ordering::Relaxed);
            return Err(error);
        }
    }
    Ok(())
}

fn join(thread: std::thread::ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Takes what comes, or waits a while for it, and offers its buffer again.
fn receive(port: &mut Port, mut message: impl FnMut(&[u8])) -> Result<()> {
    let Some(event) = port.blocking_receive(LOOK)? else {
        return Ok(());
    };
    if let Event::Received(received) = event {
        message(&received);
        port.provide_receive_buffer(received.into_buffer(), Priority::Low)?;
    } else {
        port.unknown(event);
    }
    Ok(())
}

/// Sends until every token is out, then waits for one.
fn fill(port: &mut Port, to: Address, bytes: usize) -> Result<()> {
    while port.send_tokens() > 0 {
        let Ok(buffer) = port.allocate(bytes) else {
            break;
        };
        port.send(to, buffer, bytes, SendOptions::default())?;
    }
    ended(port.blocking_receive(LOOK)?)
}

/// Sends `count` messages at `rate`, each with the time at which it was to go. A message without a token waits, and its time runs.
fn pace(
    port: &mut Port,
    to: Address,
    bytes: usize,
    count: u64,
    rate: u32,
    base: Instant,
    stop: &AtomicBool,
) -> Result<()> {
    let interval = Duration::from_secs(1) / rate;
    let mut message = vec![0; bytes];
    let mut next = Instant::now();
    for _ in 0..count {
        loop {
            let wait = next.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                break;
            }
            ended(port.blocking_receive(wait)?)?;
        }
        // That this thread woke late is not the path's fault.
        let sent = base.elapsed().as_nanos() as u64;
        message[..8].copy_from_slice(&sent.to_le_bytes());
        next = (next + interval).max(Instant::now());
        loop {
            match port.send_bytes(to, &message, SendOptions::default()) {
                Ok(_) => break,
                Err(SendError::NoToken | SendError::ArenaFull(_))
                    if !stop.load(Ordering::Relaxed) =>
                {
                    ended(port.blocking_receive(LOOK)?)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// No send of a measurement may fail.
fn ended(event: Option<Event>) -> Result<()> {
    if let Some(Event::Sent(sent)) = event {
        ensure!(sent.status.is_delivered(), "a send ended {}", sent.status);
    }
    Ok(())
}
