//! One list of sizes, exchanged by two ports both ways at once, at both priorities: every byte, length, tag and the order checked.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use portolan::{Address, ArenaFull, Event, Port, PortOptions, Priority, SendError, SendOptions};

use super::pattern;

pub const PRIORITIES: [Priority; 2] = [Priority::Low, Priority::High];
/// Buffers of the largest size offered at each priority.
const LARGEST: usize = 2;
/// Small buffers offered at each priority.
const SMALL: usize = 16;
const SMALL_BYTES: usize = 4096;

/// Options of a port that can exchange messages of up to `largest` bytes.
pub fn options(port: u16, largest: usize) -> PortOptions {
    let received = 2 * (LARGEST * (largest + 64) + SMALL * SMALL_BYTES);
    let sent = 3 * (largest + 64) + (1 << 20);
    PortOptions {
        arena_bytes: (received + sent) as u64,
        ..PortOptions::at(port)
    }
}

fn seed(from: Address, to: Address, priority: Priority, number: usize) -> u64 {
    let name = |a: Address| u64::from(a.node.0) << 8 | u64::from(a.port.0);
    pattern::mix(name(from) << 40 | name(to) << 16 | u64::from(priority == Priority::High))
        ^ pattern::mix(number as u64)
}

/// Sends every size to `peer` at both priorities while receiving the same from it, until all of it is delivered both ways.
pub fn exchange(port: &mut Port, peer: Address, sizes: &[usize], within: Duration) -> Result<()> {
    exchange_counting(port, peer, sizes, within, &AtomicU64::new(0))
}

/// [`exchange`], and counts every message that came.
pub fn exchange_counting(
    port: &mut Port,
    peer: Address,
    sizes: &[usize],
    within: Duration,
    count: &AtomicU64,
) -> Result<()> {
    exchange_in(Order::Sent, port, peer, sizes, within, count)
}

/// In which order messages must come, and the ends of their sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Both as they were sent.
    Sent,
    /// The messages as they were sent, the ends in any order, each once: where every message has an acknowledgement of its own.
    AnyEnd,
    /// In any, each once: where the policy lets a short message overtake a long one.
    Any,
}

/// [`exchange_counting`] in this order.
pub fn exchange_in(
    order: Order,
    port: &mut Port,
    peer: Address,
    sizes: &[usize],
    within: Duration,
    count: &AtomicU64,
) -> Result<()> {
    let mut exchange = Exchange {
        own: port.address(),
        port,
        peer,
        sizes,
        order,
        sent: [0; 2],
        delivered: [0; 2],
        received: [0; 2],
        came: [(); 2].map(|()| vec![false; sizes.len()]),
        ended: [(); 2].map(|()| vec![false; sizes.len()]),
        count,
    };
    let done = exchange.run(Instant::now() + within);
    done.with_context(|| {
        format!(
            "{} with {peer}: of {} at each priority, sent {:?}, delivered {:?}, received {:?}",
            exchange.own,
            sizes.len(),
            exchange.sent,
            exchange.delivered,
            exchange.received
        )
    })
}

/// Two ports exchange `sizes`, each in a thread of its own.
pub fn between(one: &mut Port, two: &mut Port, sizes: &[usize], within: Duration) {
    between_in(Order::Sent, one, two, sizes, within, &AtomicU64::new(0));
}

/// [`between`] in this order, and counts every message that came.
pub fn between_in(
    order: Order,
    one: &mut Port,
    two: &mut Port,
    sizes: &[usize],
    within: Duration,
    count: &AtomicU64,
) {
    let (first, second) = (one.address(), two.address());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| exchange_in(order, two, first, sizes, within, count));
        let this = exchange_in(order, one, second, sizes, within, count);
        let other = other.join().unwrap();
        if this.is_err() || other.is_err() {
            panic!("{this:?}\n{other:?}");
        }
    });
}

struct Exchange<'a> {
    port: &'a mut Port,
    own: Address,
    peer: Address,
    sizes: &'a [usize],
    order: Order,
    // Numbers by priority.
    sent: [usize; 2],
    delivered: [usize; 2],
    received: [usize; 2],
    // Which, by priority.
    came: [Vec<bool>; 2],
    ended: [Vec<bool>; 2],
    count: &'a AtomicU64,
}

impl Exchange<'_> {
    fn run(&mut self, deadline: Instant) -> Result<()> {
        self.provide()?;
        let all = [self.sizes.len(); 2];
        while (self.delivered, self.received) != (all, all) {
            self.send_what_fits()?;
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(event) = self.port.blocking_receive(left)? else {
                bail!("nothing more came in time");
            };
            self.handle(event)?;
        }
        ensure!(self.port.anomalies() == 0, "the engine confused the port");
        Ok(())
    }

    fn provide(&mut self) -> Result<()> {
        // A second exchange finds the buffers of the first.
        if self.port.buffers_provided() > 0 {
            return Ok(());
        }
        let largest = self.sizes.iter().copied().max().unwrap_or(0);
        for priority in PRIORITIES {
            let classes = [(largest, LARGEST), (SMALL_BYTES.min(largest), SMALL)];
            for (bytes, count) in classes {
                for _ in 0..count {
                    let buffer = self.port.allocate(bytes)?;
                    self.port.provide_receive_buffer(buffer, priority)?;
                }
            }
        }
        Ok(())
    }

    fn send_what_fits(&mut self) -> Result<()> {
        for (lane, priority) in PRIORITIES.into_iter().enumerate() {
            while self.sent[lane] < self.sizes.len() && self.port.send_tokens() > 1 {
                let number = self.sent[lane];
                match self.send(priority, number) {
                    // Those under way give room back.
                    Err(SendError::ArenaFull(_)) if self.port.sends_outstanding() > 0 => break,
                    other => other?,
                }
                self.sent[lane] += 1;
            }
        }
        Ok(())
    }

    fn send(&mut self, priority: Priority, number: usize) -> Result<(), SendError> {
        let len = self.sizes[number];
        let seed = seed(self.own, self.peer, priority, number);
        let options = SendOptions {
            priority,
            tag: number as u64,
            timeout: Some(super::STEP),
            ..SendOptions::default()
        };
        // Both ways of sending, so that short ones go inside the token and through the arena.
        if number.is_multiple_of(2) && len <= SMALL_BYTES {
            let mut bytes = vec![0; len];
            pattern::fill(&mut bytes, seed);
            self.port.send_bytes(self.peer, &bytes, options)?;
            return Ok(());
        }
        let mut buffer = self.port.allocate(len).map_err(|e: ArenaFull| e)?;
        pattern::fill(&mut buffer[..len], seed);
        self.port.send(self.peer, buffer, len, options)?;
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Received(message) => {
                let lane = usize::from(message.priority() == Priority::High);
                let number = match self.order {
                    Order::Sent | Order::AnyEnd => self.received[lane],
                    Order::Any => message.tag() as usize,
                };
                let what = format!("{:?} message {number}", message.priority());
                ensure!(
                    message.from() == self.peer,
                    "{what} came from {}",
                    message.from()
                );
                ensure!(
                    message.tag() == number as u64,
                    "{what} is number {}",
                    message.tag()
                );
                ensure!(
                    self.sizes.get(number) == Some(&message.len()),
                    "{what} has {} bytes, not {:?}",
                    message.len(),
                    self.sizes.get(number)
                );
                let seed = seed(self.peer, self.own, message.priority(), number);
                if let Some(offset) = pattern::first_wrong(&message, seed) {
                    bail!("{what} of {} bytes is wrong at {offset}", message.len());
                }
                ensure!(!self.came[lane][number], "{what} came twice");
                self.came[lane][number] = true;
                self.received[lane] += 1;
                self.count.fetch_add(1, Ordering::Relaxed);
                let priority = message.priority();
                let mut buffer = message.into_buffer();
                // What is left of this message must not pass for the next one.
                if buffer.len() <= SMALL_BYTES {
                    buffer.fill(0xee);
                }
                self.port.provide_receive_buffer(buffer, priority)?;
            }
            Event::Sent(sent) => {
                let lane = usize::from(sent.priority == Priority::High);
                let number = match self.order {
                    Order::Sent => self.delivered[lane],
                    Order::AnyEnd | Order::Any => sent.tag as usize,
                };
                ensure!(
                    sent.status.is_delivered(),
                    "{:?} send {}: {}",
                    sent.priority,
                    sent.tag,
                    sent.status
                );
                ensure!(
                    sent.tag == number as u64,
                    "the end of {:?} send {} came before that of {number}",
                    sent.priority,
                    sent.tag
                );
                ensure!(
                    !self.ended[lane][number],
                    "{:?} send {number} ended twice",
                    sent.priority
                );
                self.ended[lane][number] = true;
                self.delivered[lane] += 1;
            }
            other => self.port.unknown(other),
        }
        Ok(())
    }
}
