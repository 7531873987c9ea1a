//! What an engine does when there is nothing to do.
//!
//! `busy` spins; `yield` gives its core away now and then ([`Patience`]); `adaptive` does so for a while and then sleeps on its doorbells.
//! Before it sleeps, the engine says so in the heartbeat (with the time until which), in every port and in every crossing ring, and
//! then looks at all rings once more ([`portolan_abi::doorbell`]): whoever produces after that look rings.
//!
//! Doorbells that others hold are never read: they are watched edge-triggered, so each ring is a wake-up and their counters do not
//! matter. The socket and the link are level-triggered: what is not taken wakes again.
//!
//! The socket is watched only while the engine sleeps, and until what woke it has been seen to: taking it back is a system call, for which the
//! first message after a sleep need not wait. Whoever waits for a socket is called by the kernel for every frame that comes and
//! for every one that was sent, asleep or not: as much as a tenth of a sender's core when watched all the time, and a standby's watch
//! costs as much again.
//!
//! While its processor is kept awake (`engine.keep_awake_ms`) an engine takes naps instead of sleeping as long as it may: each ends with a turn that finds nothing, and
//! what the next message needs is in the caches once more. A first message comes a tenth sooner for a seventh of a per cent of a core (docs/tuning.md). Where processors sleep
//! with their engines naps bring nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use portolan_transport::ident::Nanos;

use portolan::turns::Patience;

use crate::engine_link::Wait;

/// Time without work before the core is given away, while that pays. While it does not, up to 32 times as long, some 20 us, which is what an application
/// that spins beside its engine may wait with its first message. Twelve and 192 empty loops on an EPYC guest (53 ns each while it yields); from half as
/// long to six times as long made no difference to exchanges and rates there.
const LEAST_NS: Nanos = 640;
/// How long `adaptive` spins before it sleeps.
const SPIN_NS: Nanos = 50_000;
/// Longest sleep, and longest nap.
const MAX_SLEEP_NS: Nanos = 100_000_000;
const NAP_NS: Nanos = 10_000_000;

const LINK: u64 = 1;
const OTHER: u64 = 0;

/// What to do after a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Go round again.
    Loop,
    /// Give the core away, then go round again.
    GiveWay,
    /// Sleep.
    Sleep,
}

/// The waiting of one engine.
pub struct Waiter {
    mode: Wait,
    epoll: OwnedFd,
    /// The socket is watched.
    listening: bool,
    idle_since: Option<Nanos>,
    /// For so long without work it naps.
    naps_for: Nanos,
    patience: Patience,
}

impl Waiter {
    /// In this mode. `shares_core`: with another engine. `keep_awake_ms`: its processor does not sleep for so long after a message.
    pub fn new(mode: Wait, shares_core: bool, keep_awake_ms: u32) -> io::Result<Self> {
        let patience = match shares_core {
            true => Patience::up_to(LEAST_NS, LEAST_NS),
            false => Patience::new(LEAST_NS),
        };
        Ok(Self {
            mode,
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            listening: false,
            idle_since: None,
            naps_for: Nanos::from(keep_awake_ms) * 1_000_000,
            patience,
        })
    }

    /// Watches the link.
    pub fn watch_link(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(LINK),
            EventFlags::IN,
        )?)
    }

    /// Watches a doorbell that others ring.
    pub fn watch_bell(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(OTHER),
            flags,
        )?)
    }

    /// Watches a doorbell no longer. Closing it would not do: others hold the same open file.
    pub fn forget_bell(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// There will be work in the next loop.
    pub fn stay_awake(&mut self) {
        self.idle_since = None;
    }

    /// An application was given something: may it have the core at once, in the middle of a loop? Then it is given away now.
    #[inline]
    pub fn gives_way_at_once(&mut self) -> bool {
        let gives_way = self.mode != Wait::Busy;
        if gives_way {
            self.patience.gave();
        }
        gives_way
    }

    /// After a loop that found work or did not, tokens of an application or none, gave one an event or did not, and left something to do or
    /// nothing.
    pub fn after_loop(
        &mut self,
        worked: bool,
        tokens: bool,
        delivered: bool,
        more: bool,
        now: Nanos,
    ) -> Next {
        if self.mode == Wait::Busy {
            if !worked {
                std::hint::spin_loop();
            }
            return Next::Loop;
        }
        let gives_way = self.patience.ends(now, worked, tokens, delivered, more);
        if worked {
            self.idle_since = None;
        } else if self.mode == Wait::Adaptive {
            let since = *self.idle_since.get_or_insert(now);
            if now.saturating_sub(since) >= SPIN_NS {
                self.patience.forget();
                return Next::Sleep;
            }
        }
        if gives_way { Next::GiveWay } else { Next::Loop }
    }

    /// How long a sleep may last that begins now.
    pub fn longest_sleep(&self, now: Nanos) -> Nanos {
        let idle = now.saturating_sub(self.idle_since.unwrap_or(now));
        match idle < self.naps_for {
            true => NAP_NS,
            false => MAX_SLEEP_NS,
        }
    }

    /// Sleeps until something happens, here or at the socket, or for so long. True if the link has something. The socket is watched until
    /// [`Self::stop_listening`].
    pub fn sleep(&mut self, at_most: Nanos, socket: BorrowedFd<'_>) -> io::Result<bool> {
        if !self.listening {
            // Whatever lies there already ends the sleep at once.
            let data = EventData::new_u64(OTHER);
            epoll::add(&self.epoll, socket, data, EventFlags::IN)?;
            self.listening = true;
        }
        self.wait(at_most)
    }

    /// Whether a sleep ended, and not all that it left to do is done.
    #[inline]
    pub fn has_slept(&self) -> bool {
        self.listening
    }

    /// Watches the socket no longer, if it was watched.
    #[inline]
    pub fn stop_listening(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if std::mem::take(&mut self.listening) {
            epoll::delete(&self.epoll, socket)?;
        }
        Ok(())
    }

    fn wait(&mut self, at_most: Nanos) -> io::Result<bool> {
        let timeout = Timespec {
            tv_sec: (at_most / 1_000_000_000) as i64,
            tv_nsec: (at_most % 1_000_000_000) as _,
        };
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(OTHER),
        }; 16];
        let count = match epoll::wait(self.epoll.as_fd(), &mut events, Some(&timeout)) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        if count > 0 {
            self.idle_since = None;
        }
        Ok(events[..count.min(events.len())]
            .iter()
            .any(|event| event.data.u64() == LINK))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// How many descriptors an epoll watches, as the kernel tells.
    fn watched(waiter: &Waiter) -> usize {
        let epoll = waiter.epoll.as_raw_fd();
        let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{epoll}")).unwrap();
        told.lines().filter(|line| line.starts_with("tfd:")).count()
    }

    // Nothing to do, for ever. Expect: an engine with its core for itself gives it away ever more rarely; one that shares it with another each time as soon.
    #[test]
    fn who_shares_a_core_with_another_engine_never_keeps_it_for_nothing() {
        for (shares_core, expected) in [(false, 32 * LEAST_NS), (true, LEAST_NS)] {
            let mut waiter = Waiter::new(Wait::Yield, shares_core, 0).unwrap();
            let (mut now, mut gave, mut longest) = (0, 0, 0);
            while now < 1_000 * LEAST_NS {
                now += 10;
                if waiter.after_loop(false, false, false, false, now) == Next::GiveWay {
                    longest = (now - gave).max(longest);
                    gave = now;
                }
            }
            assert!((expected..expected + 100).contains(&longest), "{longest}");
        }
    }

    // Idle for a while, where processors are kept awake for two seconds after a message and where they are not. Expect: naps for two seconds, then sleep; work ends it.
    #[test]
    fn an_engine_naps_while_its_processor_is_kept_awake() {
        for (ms, longest) in [(2_000, NAP_NS), (0, MAX_SLEEP_NS)] {
            let mut waiter = Waiter::new(Wait::Adaptive, false, ms).unwrap();
            let began = 7_000_000_000;
            for begun in [began, began + 10_000_000_000] {
                waiter.after_loop(true, false, false, false, begun);
                waiter.after_loop(false, false, false, false, begun);
                assert_eq!(waiter.longest_sleep(begun), longest);
                assert_eq!(waiter.longest_sleep(begun + 1_999_999_999), longest);
                assert_eq!(waiter.longest_sleep(begun + 2_000_000_000), MAX_SLEEP_NS);
            }
        }
    }

    // Two sleeps that the socket ends, one after the other, then what has time. Expect: the socket is watched from the first sleep on, and no longer
    // than that; after a last sleep it is watched again.
    #[test]
    fn the_socket_is_watched_until_what_came_was_seen_to() {
        let (socket, peer) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut waiter = Waiter::new(Wait::Adaptive, false, 0).unwrap();
        assert_eq!(watched(&waiter), 0);
        peer.send(b"a frame").unwrap();
        for _ in 0..2 {
            waiter.idle_since = Some(0);
            assert!(!waiter.sleep(MAX_SLEEP_NS, socket.as_fd()).unwrap());
            assert_eq!(waiter.idle_since, None, "asleep with a frame there");
            assert_eq!(watched(&waiter), 1);
        }
        waiter.stop_listening(socket.as_fd()).unwrap();
        assert_eq!(watched(&waiter), 0);
        waiter.stop_listening(socket.as_fd()).unwrap();
        waiter.sleep(MAX_SLEEP_NS, socket.as_fd()).unwrap();
        assert_eq!(watched(&waiter), 1);
    }
}
