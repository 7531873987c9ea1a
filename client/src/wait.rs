//! Waiting: busy, giving the core away, or asleep.
//!
//! Who sleeps naps, on the word that tells the engine of it, since that takes half as long as the doorbell's descriptor, and between two naps looks whether
//! the daemon is still there. Where naps are not to be had, it sleeps on the descriptor and the daemon's connection, for as long as it takes
//! ([`portolan_abi::doorbell`]).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use portolan_abi::doorbell;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::alarm::{deadline_ns, now_ns};
use crate::arena::Buffer;
use crate::control::timespec;
use crate::error::{PortError, SendError};
use crate::event::{Event, SendHandle, Sent};
use crate::names::Address;
use crate::port::{Life, Port, SendOptions};
use crate::turns::Looks;

/// How a blocking call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Spins. Best latency; only for an application with a core of its own.
    Busy,
    /// Spins, giving the core away after each look. On its engine's own core, where the engine does not get it so, it sleeps until the engine
    /// wakes it.
    Yield,
    /// The same for a while, giving the core away only if anybody takes it, then sleeps until the engine wakes it.
    Adaptive {
        /// How long it spins.
        spin: Duration,
    },
}

impl Default for Wait {
    fn default() -> Self {
        Self::Adaptive {
            spin: Duration::from_micros(50),
        }
    }
}

/// How a port waits, and what it learned of its core.
#[derive(Debug)]
pub(crate) struct Waiting {
    how: Wait,
    looks: Looks,
    /// The doorbell ended a sleep and was not silenced yet.
    rung: bool,
    /// A nap of this wait ended before its time, and for nothing: a signal, or this thread may not nap.
    restless: bool,
    /// When to look whether the daemon is still there, for waits that do not sleep for long: one after the other they may never end.
    gone_check: u64,
}

impl Waiting {
    pub(crate) fn new(how: Wait) -> Self {
        Self {
            how,
            looks: Looks::default(),
            rung: false,
            restless: false,
            gone_check: 0,
        }
    }
}

/// How often a wait that does not sleep on the daemon's connection looks whether the daemon is still there.
const GONE_CHECK_NS: u64 = 100_000_000;
/// The longest nap: nobody wakes who naps when the daemon is gone.
const NAP_NS: u64 = GONE_CHECK_NS;
/// How long a blocking send waits for its end beyond its own timeout: an engine may be replaced meanwhile.
const SEND_GRACE: Duration = Duration::from_secs(10);

impl Port {
    /// Waits until an event comes, at most `timeout` ([`Duration::MAX`]: for ever), and receives it.
    pub fn blocking_receive(&mut self, timeout: Duration) -> Result<Option<Event>, PortError> {
        if let Some(event) = self.receive()? {
            return Ok(Some(event));
        }
        self.receive_until(deadline_ns(timeout))
    }

    pub(crate) fn receive_until(&mut self, deadline: u64) -> Result<Option<Event>, PortError> {
        loop {
            let came = self.wait_until(deadline)?;
            // Also when the time is over: an event may just have come, or nothing that concerns the application.
            match self.receive()? {
                None if came => {}
                event => return Ok(event),
            }
        }
    }

    /// Waits until there is something to receive, at most `timeout`. `false` when the time passed.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, PortError> {
        self.wait_until(deadline_ns(timeout))
    }

    /// Changes how blocking calls wait.
    pub fn set_wait(&mut self, wait: Wait) {
        if wait != Wait::Busy {
            crate::turns::as_engines();
        }
        self.wait.how = wait;
        self.wait.looks = Looks::default();
    }

    pub(crate) fn wait_until(&mut self, deadline: u64) -> Result<bool, PortError> {
        if !self.backlog.is_empty() {
            return Ok(true);
        }
        self.wait_new(deadline)
    }

    /// Waits for something that is not in the backlog.
    pub(crate) fn wait_new(&mut self, deadline: u64) -> Result<bool, PortError> {
        if self.pending() {
            return Ok(true);
        }
        let how = self.wait.how;
        let mut now = now_ns();
        let (spin_end, sleeps) = match how {
            Wait::Busy | Wait::Yield => (u64::MAX, false),
            Wait::Adaptive { spin } => {
                let spin = u64::try_from(spin.as_nanos()).unwrap_or(u64::MAX);
                (now.saturating_add(spin), true)
            }
        };
        self.wait.looks.begin();
        self.wait.restless = false;
        loop {
            if self.integrity.is_some() && self.look_in(now) {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
            if now >= self.wait.gone_check {
                self.wait.gone_check = now.saturating_add(GONE_CHECK_NS);
                self.check_daemon();
            }
            let mut gave_way = false;
            if sleeps && now >= spin_end {
                self.sleep(now, deadline)?;
            } else {
                gave_way = match how {
                    Wait::Busy => false,
                    Wait::Yield => true,
                    Wait::Adaptive { .. } => self.wait.looks.give_way(),
                };
                match gave_way {
                    true => std::thread::yield_now(),
                    false => std::hint::spin_loop(),
                }
            }
            let came = self.pending();
            // Who has what he waited for need not know how late it is.
            let later = if came { now } else { now_ns() };
            if gave_way {
                let took = later.saturating_sub(now);
                self.wait.looks.gave_way((!came).then_some(took));
            }
            if came {
                return Ok(true);
            }
            now = later;
            if gave_way && self.is_in_its_engines_way() {
                self.wait.looks.slept_instead();
                self.nap(now, deadline);
                if self.pending() {
                    return Ok(true);
                }
                now = now_ns();
            }
        }
    }

    /// Whether the engine wakes those that nap: it may be an older one.
    fn may_nap(&self) -> bool {
        let header = self.memory.engine().header();
        let began_after = header.naps_of.load(Ordering::Relaxed).wrapping_sub(1);
        began_after == header.faults_recovered.load(Ordering::Relaxed)
    }

    /// After a yield that brought nothing: is this the core that the engine is bound to, did the engine not get it, and would a nap leave it to
    /// the engine? An engine that had it took what it was given.
    fn is_in_its_engines_way(&self) -> bool {
        let header = self.memory.engine().header();
        let core = header.core.load(Ordering::Relaxed);
        if core == 0 || core as usize != rustix::thread::sched_getcpu() + 1 {
            return false;
        }
        (!self.all_taken() || self.wait.looks.in_vain()) && self.may_nap()
    }

    /// Sleeps once: until the engine wakes us, the earliest alarm, the deadline, or the daemon's end.
    fn sleep(&mut self, now: u64, deadline: u64) -> Result<(), PortError> {
        if !self.wait.restless && self.may_nap() {
            self.nap(now, deadline);
            return Ok(());
        }
        self.sleep_long(now, deadline)
    }

    /// Sleeps for a moment: until the engine wakes us, the earliest alarm, the deadline.
    fn nap(&mut self, now: u64, deadline: u64) {
        let until = self.wakes_at().min(deadline);
        let at_most_ns = until.saturating_sub(now).min(NAP_NS);
        let word = &self.memory.client().header().waiting;
        doorbell::announce_nap(word);
        let in_time = self.pending() || doorbell::nap(word, at_most_ns);
        self.withdraw();
        self.wait.restless = !in_time && now_ns() < now.saturating_add(at_most_ns);
    }

    /// Sleeps on the doorbell.
    fn sleep_long(&mut self, now: u64, deadline: u64) -> Result<(), PortError> {
        if !self.arm() {
            return Ok(());
        }
        let until = self.wakes_at().min(deadline);
        let timeout = timespec(Duration::from_nanos(until.saturating_sub(now)));
        let slept = {
            let mut fds = [
                PollFd::new(&self.events, PollFlags::IN),
                PollFd::new(&self.connection, PollFlags::RDHUP),
            ];
            let slept = rustix::event::poll(&mut fds, (until != u64::MAX).then_some(&timeout));
            slept.map(|_| (fds[0].revents(), fds[1].revents()))
        };
        self.withdraw();
        match slept {
            Ok((doorbell, daemon)) => {
                // What it rang for comes first; before the next sleep there is time to silence it.
                self.wait.rung = !doorbell.is_empty();
                if !daemon.is_empty() {
                    self.check_daemon();
                }
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(e) => Err(PortError::Wait(e)),
        }
    }

    /// When something is to be done although the engine says nothing; `u64::MAX`: never.
    fn wakes_at(&self) -> u64 {
        let alarm = self.alarms.earliest().unwrap_or(u64::MAX);
        alarm.min(self.integrity_due())
    }

    /// Announces that we are about to sleep. `false`, and not announced, if there is something to receive.
    fn arm(&mut self) -> bool {
        if std::mem::take(&mut self.wait.rung) {
            self.silence();
        }
        doorbell::announce(&self.memory.client().header().waiting);
        self.armed = true;
        if self.pending() {
            self.disarm();
        }
        self.armed
    }

    /// Awake again: no more doorbells, and the one that rang is silenced.
    pub(crate) fn disarm(&mut self) {
        self.withdraw();
        self.silence();
    }

    /// Awake again: no more doorbells.
    fn withdraw(&mut self) {
        self.armed = false;
        doorbell::withdraw(&self.memory.client().header().waiting);
    }

    /// Whatever rang until now rings no longer.
    fn silence(&self) {
        // Fails if it has not rung. Each ring is eight bytes; all that rang is silenced at once.
        let _ = rustix::io::read(&self.events, &mut [0; 1024]);
    }

    /// The doorbell as a file descriptor, for epoll and its friends. Call [`Self::prepare_wait`] before each sleep on it: until then it may still ring of
    /// what was received since.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Arms the doorbell: `true` means that [`Self::event_fd`] becomes readable as soon as there is something to receive, an alarm
    /// included; `false` that there is something already. The next [`Self::receive`] disarms it.
    pub fn prepare_wait(&mut self) -> Result<bool, PortError> {
        if self.memory.forked() {
            return Err(PortError::Forked);
        }
        self.check_daemon();
        if !self.backlog.is_empty() || self.pending() {
            return Ok(false);
        }
        let alarm_at = match self.wakes_at() {
            u64::MAX => 0,
            at => at,
        };
        let word = &self.memory.client().header().alarm_at;
        if word.load(Ordering::Relaxed) != alarm_at {
            word.store(alarm_at, Ordering::Release);
            self.ring_doorbell();
        }
        Ok(self.arm())
    }

    /// Notices that the daemon closed our connection without closing the port.
    fn check_daemon(&mut self) {
        if self.life == Life::Open && self.connection.is_gone() && !self.pending() {
            self.life = Life::Ending(PortError::DaemonGone);
        }
    }

    // ---- blocking sends ----

    /// Sends and waits for the end of the send, which is bounded by its timeout. Other events that come meanwhile are kept for
    /// [`Self::receive`].
    pub fn send_and_wait(
        &mut self,
        to: impl Into<Address>,
        buffer: Buffer,
        len: usize,
        options: SendOptions,
    ) -> Result<Sent, SendError> {
        let handle = self.send(to, buffer, len, options)?;
        let timeout = options.timeout.unwrap_or(self.default_timeout());
        self.wait_for(handle, timeout.saturating_add(SEND_GRACE))?
            .ok_or(SendError::NoAnswer)
    }

    /// Waits for the end of one send, at most `timeout`. Other events that come meanwhile are kept for [`Self::receive`]. `None` if the
    /// send has not ended ([`Self::is_outstanding`]) or its end was received before.
    pub fn wait_for(
        &mut self,
        handle: SendHandle,
        timeout: Duration,
    ) -> Result<Option<Sent>, PortError> {
        let is_it = |event: &Event| matches!(event, Event::Sent(sent) if sent.handle == handle);
        if let Some(i) = self.backlog.iter().position(is_it) {
            return Ok(match self.backlog.remove(i) {
                Some(Event::Sent(sent)) => Some(sent),
                _ => None,
            });
        }
        let deadline = deadline_ns(timeout);
        while self.send_book.holds(handle) {
            let came = self.wait_new(deadline)?;
            match self.poll()? {
                Some(Event::Sent(sent)) if sent.handle == handle => return Ok(Some(sent)),
                Some(other) => self.backlog.push_back(other),
                None if came => {}
                None => break,
            }
        }
        Ok(None)
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd()
    }
}
