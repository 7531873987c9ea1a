//! A port that sends letters to others, takes what they send, checks both and keeps books; and a thread that keeps it going.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use portolan::{Address, Event, Port, Priority, SendOptions};

use super::books::{Books, Inbox, Lane, Outbox, lane};
use super::{STEP, letter, pattern};

/// How long a talker that has nothing to do waits before it looks at its orders.
const NAP: Duration = Duration::from_millis(20);
/// Events handled before it sends again.
const EVENTS_PER_TURN: usize = 64;

/// How a talker talks.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Sends under way per destination.
    pub window: u64,
    /// Longest letter.
    pub longest: usize,
    /// Buffers offered.
    pub buffers: usize,
    /// Timeout of a send.
    pub timeout: Duration,
    /// Its first number: above all those its predecessor at the same port used.
    pub first: u64,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            window: 8,
            longest: 1200,
            buffers: 128,
            timeout: STEP,
            first: 0,
        }
    }
}

/// A port with its books.
pub struct Talker {
    port: Port,
    manner: Manner,
    lanes: Vec<(Lane, Outbox)>,
    inboxes: BTreeMap<Lane, Inbox>,
    turn: usize,
}

fn priority(high: bool) -> Priority {
    if high { Priority::High } else { Priority::Low }
}

impl Talker {
    /// Takes over a fresh port; `to` are the streams it sends on.
    pub fn new(mut port: Port, to: &[(Address, Priority)], manner: Manner) -> Result<Self> {
        for p in [Priority::Low, Priority::High] {
            for _ in 0..manner.buffers {
                let buffer = port.allocate(manner.longest)?;
                port.provide_receive_buffer(buffer, p)?;
            }
        }
        Ok(Self {
            port,
            manner,
            lanes: to
                .iter()
                .map(|&(address, p)| (lane(address, p), Outbox::from_number(manner.first)))
                .collect(),
            inboxes: BTreeMap::new(),
            turn: 0,
        })
    }

    pub fn address(&self) -> Address {
        self.port.address()
    }

    /// Waits until every receiver has confirmed what it was said to have; only with integrity. How many have not.
    pub fn confirm(&mut self, within: Duration) -> Result<u64> {
        let left = self.port.confirm(within)?;
        // What came meanwhile is in the port's backlog.
        while self.receive(Duration::ZERO)? > 0 {}
        Ok(left)
    }

    pub fn books(&self) -> Books {
        Books::new(self.address(), &self.lanes, &self.inboxes)
    }

    fn outstanding(&self) -> u64 {
        self.lanes.iter().map(|(_, o)| o.outstanding()).sum()
    }

    /// Fills every destination's window, in turns, as far as tokens go.
    fn send(&mut self) -> Result<()> {
        let mut full = 0;
        while full < self.lanes.len() && self.port.send_tokens() > 1 {
            let index = self.turn % self.lanes.len();
            self.turn += 1;
            if self.lanes[index].1.outstanding() < self.manner.window {
                full = 0;
                self.send_one(index)?;
            } else {
                full += 1;
            }
        }
        Ok(())
    }

    fn send_one(&mut self, index: usize) -> Result<()> {
        let from = self.address();
        let ((node, port, high), outbox) = &mut self.lanes[index];
        let to = Address::from((*node, *port));
        let number = outbox.next;
        let span = (self.manner.longest - letter::HEADER + 1) as u64;
        let len = letter::HEADER + (pattern::mix(number ^ u64::from(*port) << 32) % span) as usize;
        let bytes = letter::write(from, to, priority(*high), number, len);
        let options = SendOptions {
            priority: priority(*high),
            tag: number,
            timeout: Some(self.manner.timeout),
            ..SendOptions::default()
        };
        self.port.send_bytes(to, &bytes, options)?;
        outbox.next += 1;
        Ok(())
    }

    /// Handles the events there are, after waiting for the first.
    fn receive(&mut self, wait: Duration) -> Result<usize> {
        let mut handled = 0;
        let mut event = self.port.blocking_receive(wait)?;
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
        match event {
            Event::Received(message) => {
                let number = letter::read(&message, self.port.address())?;
                let from = lane(message.from(), message.priority());
                let inbox = self.inboxes.entry(from).or_default();
                if let Err(error) = inbox.came(number) {
                    bail!("{} ← {}: {error}", self.port.address(), message.from());
                }
                self.port.unknown(Event::Received(message));
            }
            Event::Sent(sent) => {
                let name = lane(sent.to, sent.priority);
                let Some((_, outbox)) = self.lanes.iter_mut().find(|(lane, _)| *lane == name)
                else {
                    bail!("a send to {} ended that never began", sent.to);
                };
                outbox.end(sent.tag, sent.status);
                self.port.unknown(Event::Sent(sent));
            }
            Event::Integrity(report) => bail!("{}: {report}", self.port.address()),
            other => self.port.unknown(other),
        }
        if self.port.anomalies() > 0 {
            bail!("the engine confused {}", self.port.address());
        }
        Ok(())
    }
}

/// What a talker's thread is told and tells.
#[derive(Default)]
struct Orders {
    send: AtomicBool,
    leave: AtomicBool,
    delivered: AtomicU64,
    failed: AtomicU64,
    received: AtomicU64,
    faults: AtomicU64,
    outstanding: AtomicU64,
}

/// A talker in a thread of its own.
pub struct Talking {
    pub address: Address,
    orders: Arc<Orders>,
    thread: Option<JoinHandle<Result<Talker>>>,
}

impl Talking {
    /// Receives from now on; sends once told to.
    pub fn start(talker: Talker) -> Self {
        let orders = Arc::new(Orders::default());
        let address = talker.address();
        let thread = std::thread::Builder::new()
            .name(address.to_string())
            .spawn({
                let orders = Arc::clone(&orders);
                move || talk(talker, &orders)
            })
            .unwrap();
        Self {
            address,
            orders,
            thread: Some(thread),
        }
    }

    pub fn send(&self, on: bool) {
        self.orders.send.store(on, Ordering::SeqCst);
    }

    pub fn delivered(&self) -> u64 {
        self.orders.delivered.load(Ordering::Relaxed)
    }

    pub fn failed(&self) -> u64 {
        self.orders.failed.load(Ordering::Relaxed)
    }

    pub fn received(&self) -> u64 {
        self.orders.received.load(Ordering::Relaxed)
    }

    /// How often an engine took over its port.
    pub fn faults(&self) -> u64 {
        self.orders.faults.load(Ordering::Relaxed)
    }

    /// Fails with what went wrong if the talker has given up.
    #[track_caller]
    pub fn check(&mut self) {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            let error = self.thread.take().unwrap().join().unwrap().err();
            panic!("{} gave up: {error:?}", self.address);
        }
    }

    /// Waits until `more` further letters came in.
    #[track_caller]
    pub fn hear(&mut self, more: u64, within: Duration) {
        let goal = self.received() + more;
        let what = format!("{} hears {more} letters more", self.address);
        super::until(&what, within, || {
            self.check();
            (self.received() >= goal).then_some(())
        });
    }

    /// Waits until `more` further sends were delivered.
    #[track_caller]
    pub fn deliver(&mut self, more: u64, within: Duration) {
        let goal = self.delivered() + more;
        let what = format!("{} delivers {more} letters more", self.address);
        super::until(&what, within, || {
            self.check();
            (self.delivered() >= goal).then_some(())
        });
    }

    /// Sends no more, and waits until every send has ended. It still receives.
    #[track_caller]
    pub fn settle(&mut self, within: Duration) {
        self.send(false);
        let what = format!("every send of {} ends", self.address);
        super::until(&what, within, || {
            self.check();
            (self.orders.outstanding.load(Ordering::SeqCst) == 0).then_some(())
        });
    }

    /// Takes what still waits and hands back the talker.
    #[track_caller]
    pub fn finish(mut self) -> Talker {
        self.orders.leave.store(true, Ordering::SeqCst);
        let thread = self.thread.take().unwrap();
        thread.join().unwrap().unwrap()
    }
}

impl Drop for Talking {
    fn drop(&mut self) {
        self.orders.leave.store(true, Ordering::SeqCst);
    }
}

/// Everybody stops sending, everything ends, and the books of all are closed.
#[track_caller]
pub fn close_books(mut all: Vec<Talking>, within: Duration) -> Vec<Books> {
    for talking in &all {
        talking.send(false);
    }
    for talking in &mut all {
        talking.settle(within);
    }
    // What was delivered is in the rings by now.
    all.into_iter().map(|t| t.finish().books()).collect()
}

fn talk(mut talker: Talker, orders: &Orders) -> Result<Talker> {
    let own = talker.address();
    loop {
        let leave = orders.leave.load(Ordering::SeqCst);
        // Counted as outstanding before we look at the order, so that nobody believes us settled while we begin a send.
        orders.outstanding.fetch_add(1, Ordering::SeqCst);
        if !leave && orders.send.load(Ordering::SeqCst) {
            talker.send().with_context(|| format!("{own} sends"))?;
        }
        orders
            .outstanding
            .store(talker.outstanding(), Ordering::SeqCst);
        let wait = if leave { Duration::ZERO } else { NAP };
        let handled = talker
            .receive(wait)
            .with_context(|| format!("{own} receives"))?;
        let books = talker.lanes.iter().map(|(_, o)| o);
        let (delivered, failed) = books.fold((0, 0), |(d, f), o| {
            (d + o.delivered, f + o.failures.len() as u64)
        });
        orders.delivered.store(delivered, Ordering::Relaxed);
        orders.failed.store(failed, Ordering::Relaxed);
        let received = talker.inboxes.values().map(|i| i.count).sum();
        orders.received.store(received, Ordering::Relaxed);
        orders
            .faults
            .store(u64::from(talker.port.faults_recovered()), Ordering::Relaxed);
        orders
            .outstanding
            .store(talker.outstanding(), Ordering::SeqCst);
        // Many talkers share two cores: nobody shall have more because the scheduler lets it stay.
        std::thread::yield_now();
        if leave && handled == 0 {
            return Ok(talker);
        }
    }
}
