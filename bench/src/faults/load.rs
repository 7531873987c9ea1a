//! The load: ports on both nodes that send each other messages of 1 byte to 1 MiB at a bounded rate and check every byte.
//!
//! Bounded, because the campaign measures outages and not queues: two cores carry two engines, their standbys and all applications.
//! A thread per port sends about fifty messages per second, at random moments; with four ports on each node that is about 15 MB/s.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use portolan::{
    Address, Event, Integrity, Port, PortOptions, Priority, SendError, SendOptions, Wait,
};

use super::books::{Inbox, Outbox};
use super::clock::{now_ns, ns};
use super::letter::{LONGEST, Stream};
use super::meter::{Meter, Orders};
use super::random::Random;

/// The mean pause between two messages of a port.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a thread without work waits before it looks at its orders.
const LOOK: Duration = Duration::from_millis(20);
/// Longer than any outage; a send that meets it is lost.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Buffers offered: (bytes, how many).
const BUFFERS: [(usize, usize); 3] = [(LONGEST, 4), (65_536, 8), (4096, 48)];
/// What sends may take of the arena.
const SEND_BYTES: usize = 12 << 20;
/// Events handled before it is time to look at the clock.
const EVENTS_PER_TURN: usize = 32;

/// End-to-end integrity, if wanted: what is not confirmed within a second is reported, which no outage lasts.
pub fn integrity(wanted: bool) -> Option<Integrity> {
    wanted.then_some(Integrity {
        confirm_within: Duration::from_secs(1),
    })
}

/// Options of a loaded port.
pub fn options(port: u16, sealed: bool) -> PortOptions {
    let offered: usize = BUFFERS
        .iter()
        .map(|(bytes, count)| (bytes + 64) * count)
        .sum();
    PortOptions {
        arena_bytes: (offered + SEND_BYTES) as u64,
        // Spinning would take the core from an engine.
        wait: Wait::Adaptive {
            spin: Duration::ZERO,
        },
        integrity: integrity(sealed),
        ..PortOptions::at(port)
    }
}

/// One port with its stream out, its stream in, and their books.
pub struct Talker {
    port: Port,
    out: Stream,
    incoming: Stream,
    outbox: Outbox,
    inbox: Inbox,
    random: Random,
    due_ns: u64,
    meter: Arc<Meter>,
}

/// What a talker wrote down.
pub struct Written {
    pub out: Stream,
    pub outbox: Outbox,
    pub inbox: Inbox,
    /// Messages that integrity reported at this port.
    pub reported: u64,
}

impl Talker {
    /// Takes over a fresh port, which talks to `peer`.
    pub fn new(
        mut port: Port,
        peer: Address,
        sizes: super::letter::Sizes,
        seed: u64,
    ) -> Result<Self> {
        for (bytes, count) in BUFFERS {
            for _ in 0..count {
                let buffer = port.allocate(bytes)?;
                port.provide_receive_buffer(buffer, Priority::Low)?;
            }
        }
        let own = port.address();
        Ok(Self {
            port,
            out: Stream {
                from: own,
                to: peer,
                sizes,
            },
            incoming: Stream {
                from: peer,
                to: own,
                sizes,
            },
            outbox: Outbox::default(),
            inbox: Inbox::default(),
            random: Random::new(seed ^ u64::from(own.node.0) << 8 ^ u64::from(own.port.0)),
            due_ns: 0,
            meter: Arc::default(),
        })
    }

    pub fn address(&self) -> Address {
        self.out.from
    }

    pub fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Talks in a thread of its own until told to leave.
    pub fn start(mut self, orders: Arc<Orders>) -> Result<JoinHandle<Written>> {
        let name = self.port.address().to_string();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            if let Err(error) = self.talk(&orders) {
                orders.give_up(format!("{}: {error:#}", self.out.from));
            }
            Written {
                out: self.out,
                outbox: self.outbox,
                inbox: self.inbox,
                reported: self.meter.reported.load(Ordering::Relaxed),
            }
        });
        thread.context("thread of a port")
    }

    fn talk(&mut self, orders: &Orders) -> Result<()> {
        loop {
            let leave = orders.is_over();
            // Before we look at the order, so that nobody believes us settled while we begin a send.
            self.meter.outstanding.fetch_add(1, Ordering::SeqCst);
            if !orders.is_quiet() && now_ns() >= self.due_ns {
                self.send()?;
                self.due_ns = now_ns() + ns(self.random.span(2 * PAUSE));
            }
            self.publish();
            let idle = Duration::from_nanos(self.due_ns.saturating_sub(now_ns()));
            let wait = if leave {
                Duration::ZERO
            } else {
                idle.min(LOOK)
            };
            self.meter.integrity(&mut self.port, orders)?;
            let handled = self.receive(wait)?;
            self.publish();
            if leave && handled == 0 {
                return Ok(());
            }
        }
    }

    fn send(&mut self) -> Result<()> {
        let number = self.outbox.next;
        let len = self.out.len(number);
        if self.port.send_tokens() == 0 {
            return Ok(());
        }
        let Ok(mut buffer) = self.port.allocate(len) else {
            // Those under way give room back.
            return Ok(());
        };
        let bytes = buffer.get_mut(..len).context("buffer")?;
        self.out.fill(number, bytes);
        let options = SendOptions {
            tag: number,
            timeout: Some(SEND_TIMEOUT),
            ..SendOptions::default()
        };
        match self.port.send(self.out.to, buffer, len, options) {
            Ok(_) => self.outbox.next += 1,
            Err(refused) if matches!(refused.error, SendError::NoToken) => {}
            Err(refused) => return Err(refused.error).context("send"),
        }
        Ok(())
    }

    fn receive(&mut self, wait: Duration) -> Result<usize> {
        let mut event = self.port.blocking_receive(wait)?;
        let mut handled = 0;
        while let Some(one) = event {
            self.handle(one)?;
            handled += 1;
            if handled == EVENTS_PER_TURN {
                break;
            }
            event = self.port.receive()?;
        }
        Ok(handled)
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        self.meter.event(&event);
        match &event {
            Event::Received(message) => {
                let as_sent = self.incoming.check(message);
                self.inbox.came(message.tag(), as_sent);
                self.meter.received.fetch_add(1, Ordering::Relaxed);
            }
            Event::Sent(sent) => self.outbox.end(sent.tag, sent.status),
            _ => {}
        }
        if let Event::Received(message) = event {
            let priority = message.priority();
            let mut buffer = message.into_buffer();
            // What is left of this message must not pass for the next one.
            let most = buffer.len().min(4096);
            if let Some(first) = buffer.get_mut(..most) {
                first.fill(0xee);
            }
            if let Err(refused) = self.port.provide_receive_buffer(buffer, priority) {
                bail!("a buffer is not taken back: {}", refused.error);
            }
        } else {
            self.port.unknown(event);
        }
        Ok(())
    }

    fn publish(&self) {
        let meter = &self.meter;
        meter
            .outstanding
            .store(self.outbox.outstanding(), Ordering::SeqCst);
        meter.failed.store(self.outbox.failed(), Ordering::Relaxed);
        meter
            .troubles
            .store(self.inbox.troubles(), Ordering::Relaxed);
        meter
            .anomalies
            .store(self.port.anomalies(), Ordering::Relaxed);
    }
}
