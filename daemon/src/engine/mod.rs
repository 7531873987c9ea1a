//! One engine: a poll loop over its socket, its ports and the transport.
//!
//! An engine is an unprivileged process that owns nothing that must survive: it maps what its supervisor hands it and stands by
//! ([`briefing`]), takes over from whoever worked there before ([`restore`]), and then turns one duty cycle ([`Engine::turn`]) until its
//! link ends.
//! Killing it at any instruction loses nothing ([`commit`]).
//!
//! | file | noun |
//! |---|---|
//! | `mod.rs` | the process and its duty cycle |
//! | `briefing.rs`, `warm.rs` | standing by: what the supervisor hands over; taking over |
//! | `death.rs` | how the kernel tells of our death |
//! | `serve.rs` | tokens from the ports, messages from the link |
//! | `path.rs`, `inbound.rs` | the path of frames: socket and crossing rings ↔ transport; what becomes of a received one |
//! | `lookout.rs` | how often to look what was sent |
//! | `fill_depth.rs` | how many buffers the kernel holds to receive into |
//! | `encap.rs`, `routes.rs` | outer headers, and where each node is |
//! | `crossing.rs` | frames between the engines of a node |
//! | `ports.rs`, `buffers.rs`, `bell.rs` | ports, receive tokens, doorbells |
//! | `questions.rs` | messages the application is asked about first |
//! | `host.rs` | what the transport asks for |
//! | `checked_copy.rs` | payloads between arenas and frames, with their CRC |
//! | `commit.rs`, `commit_point.rs`, `ledger_facts.rs`, `restore.rs` | durable facts: their order, its named points, their tables, taking over |
//! | `control.rs` | the link to the supervisor |
//! | `suspect.rs` | frames and tokens that kill |
//! | `wedge.rs` | a queue that stands still |
//! | `wait.rs` | waiting without work |
//! | `clock.rs` | what time it is |
//! | `busy_poll/` | going round for frames instead of the kernel; whether it pays |
//! | `sandbox.rs` | what may be asked of the kernel |
//! | `counters.rs`, `latency.rs` | what is counted |
//! | `tap.rs` | copies of frames, for who captures them |

mod alike;
pub(crate) mod bell;
mod briefing;
mod buffers;
pub(crate) mod busy_poll;
mod checked_copy;
mod clock;
mod commit;
mod commit_point;
mod control;
#[cfg(any(test, feature = "conversation"))]
pub mod conversation;
pub mod counters;
pub mod crossing;
mod death;
mod encap;
mod fill_depth;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod host;
mod inbound;
mod inventory;
pub mod latency;
mod ledger_facts;
mod lookout;
mod path;
mod port_table;
mod ports;
mod questions;
mod restore;
mod routes;
mod sandbox;
mod serve;
mod suspect;
mod tap;
#[cfg(test)]
mod tests;
mod wait;
mod warm;
mod wedge;

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use anyhow::bail;
use portolan::turns;
use portolan_abi::ledger::{HEARTBEAT_SLEEPING, Ledger};
use portolan_transport::ident::Nanos;

use crate::engine_link::{FromEngine, ToEngine};

use briefing::Standby;
use busy_poll::Wish;
use clock::Clock;
use control::{Incoming, Link};
use counters::CounterPage;
use path::Path;
use wait::{Next, Waiter};

/// How often the link is looked at while the engine does not sleep.
const CONTROL_EVERY_NS: Nanos = 200_000;
/// More than unmapping a page takes (20 ns measured).
const UNMAP_PAGE_NS: Nanos = 100;
/// How often the counters are copied to the ledger.
const COUNTERS_EVERY_NS: Nanos = 1_000_000;

/// Looks at the rings alone between two turns without work.
const LOOKS_PER_TURN: u32 = 6;

/// CLOCK_MONOTONIC in nanoseconds, without a system call.
fn now() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (time.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_nsec as u64)
}

/// Runs an engine whose link is descriptor [`crate::engine_link::LINK_FD`], until its supervisor stops it or goes away.
///
/// # Errors
/// What kept it from going on; the supervisor was told the same.
pub fn run() -> anyhow::Result<()> {
    let mut link = Link::inherit()?;
    // The usual hook would look for symbols, which the sandbox forbids.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("the engine panicked: {panic}")
    }));
    let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serve(&mut link)));
    let error = match served {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error,
        // The ledger is consistent at any instruction, so also here; a successor takes over from it.
        Err(panic) => {
            let what = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let what = what.or_else(|| panic.downcast_ref::<String>().cloned());
            anyhow::anyhow!("panicked: {}", what.unwrap_or_default())
        }
    };
    link.send(&FromEngine::Fatal {
        message: format!("{error:#}"),
    });
    Err(error)
}

/// From the first message to the last loop.
fn serve(link: &mut Link) -> anyhow::Result<()> {
    let (config, fds) = match link.receive(true)? {
        Incoming::Message(ToEngine::Start(config), fds) => (*config, fds),
        Incoming::Closed => return Ok(()),
        Incoming::Nothing | Incoming::Message(..) => bail!("the first message must be Start"),
    };
    let mut standby = Standby::begin(config, fds, link)?;
    // The first look at the clock asks the kernel where it is, which the sandbox forbids.
    now();
    sandbox::enter()?;
    if !standby.listen(link)? {
        return Ok(());
    }
    let told = now();
    let mut engine = standby.take_over()?;
    let ready_at_ns = now();
    link.send(&FromEngine::Ready {
        adopted_in_ns: ready_at_ns.saturating_sub(told),
        ready_at_ns,
    });
    engine.report_ports(link);
    // The first loop hears what came meanwhile and tells the peers; then we are one process among others.
    let mut go_on = engine.turn(link)?;
    turns::short();
    while go_on {
        go_on = engine.turn(link)?;
    }
    Ok(())
}

/// A running engine.
struct Engine {
    path: Path,
    ledger: Ledger<'static>,
    counter_page: CounterPage,
    waiter: Waiter,
    clock: Clock,
    /// Held open, so that others can wake us.
    _own_wake: OwnedFd,
    next_control: Nanos,
    next_counters: Nanos,
    /// The core was not given away in the last turn although it was time.
    kept: bool,
}

impl Engine {
    /// The duty cycle. False: leave.
    fn turn(&mut self, link: &mut Link) -> anyhow::Result<bool> {
        let mut now = self.clock.now();
        self.path.host.now = now;
        let mut worked = self.path.receive(now);
        worked |= self.path.drain_crossings(now);
        if self.gives_way_at_once() {
            self.path.wake_neighbours();
            self.give_way();
            now = self.clock.now();
            self.path.host.now = now;
        }
        let tokens = self.serve_ports(now, link);
        worked |= tokens;
        worked |= self.path.transmit(now);
        self.path.kick(now);
        // What follows holds up no frame.
        if tokens {
            self.serve_buffers(now);
        }
        let delivered = std::mem::take(&mut self.path.host.delivered);
        let more = delivered && !tokens && (self.path.blocked || self.is_asked());
        // Who sleeps is woken once for all there is: another waking takes longer.
        worked |= self.path.timers(now);
        let woken = self.wake_applications(now);
        self.path.wake_neighbours();
        self.beat(worked);
        // Who slept as we did does not always have the core for being woken; what is left of the turn is as cold as it is.
        if woken && self.waiter.has_slept() && self.path.host.ports.unread() {
            self.give_way();
        }

        if !self.housekeeping(now, link)? {
            return Ok(false);
        }
        let worked = worked || self.path.blocked;
        let next = (self.waiter).after_loop(worked, tokens, delivered, more, now);
        // Whoever was woken on this core had it at once. But others may wait for it.
        self.kept = next == Next::GiveWay
            && woken
            && delivered
            && !self.kept
            && !self.path.host.ports.unread();
        match next {
            // Who is to make room may be waiting for this core.
            Next::Loop if self.path.is_full(now) => self.give_way(),
            Next::Loop => {}
            Next::GiveWay if self.kept => {}
            Next::GiveWay => self.give_way(),
            // Nobody else would see a frame come.
            Next::Sleep if self.path.busy_poll.is_on() => self.give_way(),
            Next::Sleep => self.sleep(now)?,
        }
        if !worked && next != Next::Sleep {
            self.look();
        }
        Ok(true)
    }

    /// Whether an application was given something in this turn, which it is awake to take, and nobody waits for anything else: it has the core before what is left
    /// of the turn.
    #[inline]
    fn gives_way_at_once(&mut self) -> bool {
        let gives_way = self.path.host.delivered
            && !self.path.blocked
            && !self.path.endpoint.has_frames()
            && !self.is_asked()
            && !self.path.host.ports.sleepy()
            && self.waiter.gives_way_at_once();
        self.path.host.delivered &= !gives_way;
        gives_way
    }

    /// What holds up no frame, and seldom an application: the end of a sleep, the link, the counters. False: leave.
    fn housekeeping(&mut self, now: Nanos, link: &mut Link) -> anyhow::Result<bool> {
        self.waiter.stop_listening(self.path.xsk.fd())?;
        if now >= self.next_control {
            self.next_control = now.saturating_add(CONTROL_EVERY_NS);
            if !self.control(now, link)? {
                return Ok(false);
            }
        }
        if now >= self.next_counters {
            self.next_counters = now.saturating_add(COUNTERS_EVERY_NS);
            self.publish_counters();
            let frames = self.path.xsk.counters().rx_frames;
            if let Some(wish) = self.path.busy_poll.look(now, frames) {
                link.send(&FromEngine::BusyPoll {
                    on: wish == Wish::Begin,
                    rests: wish == Wish::Rest,
                });
            }
            if let Some(evidence) = self.path.wedged(now) {
                link.send(&FromEngine::Wedged {
                    evidence: evidence.to_owned(),
                });
            }
        }
        Ok(true)
    }

    /// Gives the core away, above all to applications that were given something.
    fn give_way(&self) {
        let (ports, xsk) = (&self.path.host.ports, &self.path.xsk);
        turns::give_way(|| ports.unread() && !xsk.has_received());
    }

    /// Between two turns without work, looks a few times at nothing but the rings, each time in a tenth of a turn: what comes is seen that much sooner.
    fn look(&self) {
        for _ in 0..LOOKS_PER_TURN {
            if self.has_news() {
                break;
            }
        }
    }

    /// Whether a frame or a token waits.
    #[inline]
    fn has_news(&self) -> bool {
        self.path.xsk.has_received() || self.path.host.ports.iter().any(ports::Port::has_work)
    }

    /// Heartbeat, and the answer to a challenge.
    fn beat(&mut self, worked: bool) {
        self.path.counters.loops += 1;
        self.path.counters.loops_busy += u64::from(worked);
        let header = self.ledger.header();
        if cfg!(feature = "volatile") {
            if self.path.counters.loops == 1 {
                // Asleep for ever: not judged.
                header.heartbeat.store(u64::MAX, Ordering::Release);
            }
            return;
        }
        let beat = self.path.counters.loops & !HEARTBEAT_SLEEPING;
        header.heartbeat.store(beat, Ordering::Release);
        let challenge = header.challenge.load(Ordering::Acquire);
        if challenge != header.response.load(Ordering::Relaxed) {
            header.response.store(challenge, Ordering::Release);
        }
    }

    /// Unmapping so many bytes comes next, which is one long step in the kernel: the watchdog is told as if we slept.
    fn excuse(&mut self, now: Nanos, bytes: u64) {
        let until = now.saturating_add(bytes / 4096 * UNMAP_PAGE_NS) & !HEARTBEAT_SLEEPING;
        let header = self.ledger.header();
        header
            .heartbeat
            .store(HEARTBEAT_SLEEPING | until, Ordering::Release);
    }

    fn publish_counters(&mut self) {
        self.path.counters.offers = self.path.host.offers;
        self.counter_page.publish(
            self.ledger,
            &self.path.counters,
            self.path.endpoint.counters(),
            self.path.xsk.counters(),
        );
        self.path.host.latencies.publish(self.ledger);
    }

    /// Sleeps until a doorbell rings, a frame or a message comes, or something is due.
    fn sleep(&mut self, now: Nanos) -> anyhow::Result<()> {
        if self.due_at(now) <= now {
            return Ok(());
        }
        self.publish_counters();
        self.announce_sleep(true);
        // SYNC(doorbell): our announcements before our look at the rings, and at the alarms.
        let longest = self.waiter.longest_sleep(now);
        let until = self.due_at(now).min(now.saturating_add(longest));
        if until > now && !self.has_work() {
            self.path.counters.sleeps += 1;
            self.announce(HEARTBEAT_SLEEPING | until);
            if self.waiter.sleep(until - now, self.path.xsk.fd())? {
                self.next_control = 0;
            }
        }
        self.announce_sleep(false);
        self.announce(self.path.counters.loops & !HEARTBEAT_SLEEPING);
        Ok(())
    }

    fn announce(&self, heartbeat: u64) {
        if !cfg!(feature = "volatile") {
            let word = &self.ledger.header().heartbeat;
            word.store(heartbeat, Ordering::Release);
        }
    }

    /// When something is due by itself; `u64::MAX` for never.
    fn due_at(&self, now: Nanos) -> Nanos {
        let mut due = self.path.endpoint.poll_timeout().unwrap_or(Nanos::MAX);
        if self.path.down_until > now {
            due = due.min(self.path.down_until);
        }
        for port in self.path.host.ports.iter() {
            due = due.min(port.alarm().unwrap_or(Nanos::MAX));
        }
        due
    }

    fn announce_sleep(&self, asleep: bool) {
        for port in self.path.host.ports.iter() {
            if asleep {
                port.announce_sleep();
            } else {
                port.withdraw_sleep();
            }
        }
        for neighbour in &self.path.neighbours {
            neighbour.from.announce_sleep(asleep);
        }
    }

    /// Whether there is something to do.
    #[inline]
    fn is_asked(&mut self) -> bool {
        self.has_news() || self.path.is_crossed()
    }

    fn has_work(&mut self) -> bool {
        self.path.host.ports.iter().any(ports::Port::has_work) || self.path.is_crossed()
    }
}
