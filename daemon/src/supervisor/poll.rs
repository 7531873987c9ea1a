//! The one epoll set, and the timers beside it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

pub use epoll::EventFlags;

/// Events taken in at once.
const BATCH: usize = 128;

/// Where an event comes from. Launches and clients are counted and never reused, so an event that is late names nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A signal to stop.
    Stop,
    /// A signal to leave everything to a successor.
    Leave,
    /// A build that may replace ours has said what it is.
    Upgrade,
    /// The listening socket.
    Listener,
    /// An engine's link: queue, launch.
    Link(u8, u32),
    /// An engine's death: queue, launch.
    EngineExit(u8, u32),
    /// The service's death: launch.
    ServiceExit(u32),
    /// The exporter's death: launch.
    ExporterExit(u32),
    /// The kernel's neighbour table changed.
    Neighbours,
    /// Something about a link changed.
    Links,
    /// A signal to read the configuration again.
    Reload,
    /// Another node announced itself.
    Discovery,
    /// The watchdog saw something.
    Watchdog,
    /// A client.
    Client(u64),
}

impl Source {
    const BITS: u32 = 56;

    fn encode(self) -> u64 {
        let engine = |queue: u8, launch: u32| u64::from(queue) << 32 | u64::from(launch);
        let (kind, value) = match self {
            Self::Stop => (0, 0),
            Self::Listener => (1, 0),
            Self::Link(queue, launch) => (2, engine(queue, launch)),
            Self::EngineExit(queue, launch) => (3, engine(queue, launch)),
            Self::ServiceExit(launch) => (4, u64::from(launch)),
            Self::Neighbours => (5, 0),
            Self::Client(id) => (6, id & ((1 << Self::BITS) - 1)),
            Self::Watchdog => (7, 0),
            Self::Leave => (8, 0),
            Self::Upgrade => (9, 0),
            Self::Links => (10, 0),
            Self::Reload => (11, 0),
            Self::ExporterExit(launch) => (12, u64::from(launch)),
            Self::Discovery => (13, 0),
        };
        kind << Self::BITS | value
    }

    fn decode(word: u64) -> Option<Self> {
        let value = word & ((1 << Self::BITS) - 1);
        let (queue, launch) = ((value >> 32) as u8, value as u32);
        Some(match word >> Self::BITS {
            0 => Self::Stop,
            1 => Self::Listener,
            2 => Self::Link(queue, launch),
            3 => Self::EngineExit(queue, launch),
            4 => Self::ServiceExit(launch),
            5 => Self::Neighbours,
            6 => Self::Client(value),
            7 => Self::Watchdog,
            8 => Self::Leave,
            9 => Self::Upgrade,
            10 => Self::Links,
            11 => Self::Reload,
            12 => Self::ExporterExit(launch),
            13 => Self::Discovery,
            _ => return None,
        })
    }
}

/// What a timer is for. Firing only means: look whether something is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// A client's deadline.
    Client(u64),
    /// A client's user may open ports again.
    HeldBack(u64),
    /// Something is due about an engine.
    Engine(u8),
    /// The service is to be started.
    Service,
    /// The exporter is to be started.
    Exporter,
    /// What engines count about peers is to be looked at.
    PeerEvents,
    /// The engines should have told their peers by now.
    Peers,
    /// Neighbours are to be looked after.
    Neighbours,
    /// A frame given for an engine's socket should have come by now.
    Errand(u8),
    /// GRO that we switched on may be of no use any more.
    Gro,
    /// Whether there were messages is to be looked at.
    KeepAwake,
    /// The interface is to be looked at.
    Interface,
    /// This node is to announce itself.
    Discovery,
    /// Stopping has taken long enough.
    Stop,
    /// The service manager is due a sign of life.
    Alive,
}

/// The epoll set and the timers.
pub struct Poll {
    epoll: OwnedFd,
    timers: BinaryHeap<Reverse<(Instant, Timer)>>,
}

impl Poll {
    /// An empty set.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timers: BinaryHeap::new(),
        })
    }

    /// Watches a descriptor. Closing its last copy ends that; [`Self::remove`] ends it before.
    ///
    /// # Errors
    /// The system's.
    pub fn add(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> io::Result<()> {
        let data = epoll::EventData::new_u64(source.encode());
        Ok(epoll::add(&self.epoll, fd, data, flags)?)
    }

    /// Changes what is watched for.
    ///
    /// # Errors
    /// The system's.
    pub fn modify(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> io::Result<()> {
        let data = epoll::EventData::new_u64(source.encode());
        Ok(epoll::modify(&self.epoll, fd, data, flags)?)
    }

    /// Watches a descriptor no more.
    pub fn remove(&self, fd: impl AsFd) {
        // It was never in: then there is nothing to do.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Sets a timer.
    pub fn set_timer(&mut self, at: Instant, timer: Timer) {
        self.timers.push(Reverse((at, timer)));
    }

    /// The next timer that is due.
    pub fn due(&mut self, now: Instant) -> Option<Timer> {
        let Reverse((at, timer)) = *self.timers.peek()?;
        if at > now {
            return None;
        }
        self.timers.pop();
        Some(timer)
    }

    /// Waits for events, at most until the next timer.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self) -> io::Result<Vec<(Source, EventFlags)>> {
        let timeout = self.timers.peek().map(|Reverse((at, _))| {
            let wait = at.saturating_duration_since(Instant::now());
            // Bounded, for kernels without epoll_pwait2; and rounded up, so that the timer is due afterwards.
            let wait = wait.min(Duration::from_secs(3600)) + Duration::from_millis(1);
            Timespec {
                tv_sec: wait.as_secs() as i64,
                tv_nsec: wait.subsec_nanos().into(),
            }
        });
        let mut space = [MaybeUninit::uninit(); BATCH];
        match epoll::wait(&self.epoll, &mut space, timeout.as_ref()) {
            Ok((events, _)) => Ok(events
                .iter()
                .filter_map(|event| Some((Source::decode(event.data.u64())?, event.flags)))
                .collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_the_kernel() {
        for source in [
            Source::Stop,
            Source::Listener,
            Source::Link(63, u32::MAX),
            Source::EngineExit(0, 7),
            Source::ServiceExit(9),
            Source::ExporterExit(8),
            Source::Neighbours,
            Source::Links,
            Source::Reload,
            Source::Watchdog,
            Source::Client(1 << 40),
        ] {
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
        assert_eq!(Source::decode(u64::MAX), None);
    }

    #[test]
    fn timers_fire_in_order_and_not_before() {
        let mut poll = Poll::new().unwrap();
        let now = Instant::now();
        poll.set_timer(now + Duration::from_millis(2), Timer::Service);
        poll.set_timer(now + Duration::from_millis(1), Timer::Peers);
        poll.set_timer(now + Duration::from_secs(9), Timer::Stop);
        assert_eq!(poll.due(now), None);
        let later = now + Duration::from_millis(5);
        assert_eq!(poll.due(later), Some(Timer::Peers));
        assert_eq!(poll.due(later), Some(Timer::Service));
        assert_eq!(poll.due(later), None);
    }
}
