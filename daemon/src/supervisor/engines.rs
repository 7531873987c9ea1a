//! The engines: which processes work on a queue, and what becomes of them.
//!
//! A queue has one process that *serves* and one that *stands by*: running, mapped, told of every change, asleep on its link. Every process
//! begins as a standby; taking over is the only way to serve, for the first one of a queue as for the thousandth.
//!
//! | place | stage | leaves it by |
//! |---|---|---|
//! | standby | Preparing, done by t | `StandingBy` → StandingBy; the timer → fence; death → gone, another is prepared |
//! | standby | StandingBy | nobody serves, or the one who does dies → active, told `TakeOver`; death → gone, another is prepared |
//! | active | TakingOver, done by t | `Ready` → Serving; the timer → fence; death → leaving |
//! | active | Serving since t | death → leaving; a link that ends or makes no sense → fence |
//! | leaving | | the pidfd → reaped |
//!
//! When the active process dies the [watchdog](super::watchdog) has the standby take over before this thread hears of it; where
//! it cannot (no standby was ready, or adoption would be no remedy, [`super::escalation`]) this thread does what is needed.
//!
//! The transitions are in `succession.rs`, what is said to processes and what they say in `engine_links.rs`.
//!
//! *Fence* is SIGKILL; what follows happens when the kernel says that the process will never run again, never before: only then may
//! another touch the rings. Standby and active are told of every change in the same order, the standby first.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::busy_poll::BusyPoll;
use super::escalation::{Bounds, Escalation};
use super::events::{Event, Kind, Severity};
use super::memory::QueueMemory;
use super::packet::Outbox;
use super::recovery::Recoveries;
use super::reset::Reset;
use super::restarts::Restarts;
use super::spawn::Child;
use super::watchdog::Watched;

/// What is done about a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Nobody serves, and nobody takes over before this time.
    Waiting(Instant),
    /// A process serves or takes over.
    Served,
    /// Asked to leave.
    Stopping,
    /// Gone for good.
    Stopped,
}

/// How far a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It maps its memory and must be done by this time.
    Preparing(Instant),
    /// It can take over at any time.
    StandingBy,
    /// It has been told to, and must be done by this time.
    TakingOver(Instant),
    /// It serves since this time.
    Serving(Instant),
}

/// A process and our end of its link. Made of what a supervisor needs to go on with it, whoever started it.
pub struct Process {
    /// Which launch of its queue.
    pub launch: u32,
    /// The process.
    pub child: Child,
    /// How far it is.
    pub stage: Stage,
    pub(super) link: OwnedFd,
    pub(super) outbox: Outbox,
    /// Killed; its messages count no more.
    pub(super) fenced: bool,
    /// It has closed its link, so it should be dead by then.
    pub(super) leaves_by: Option<Instant>,
}

impl Process {
    /// A process at the other end of this link.
    pub fn new(launch: u32, child: Child, link: OwnedFd, stage: Stage) -> Self {
        Self {
            launch,
            child,
            stage,
            link,
            outbox: Outbox::default(),
            fenced: false,
            leaves_by: None,
        }
    }

    pub(super) fn watched(&self) -> io::Result<Watched> {
        Ok(Watched {
            launch: self.launch,
            pid: self.child.pid,
            exit: self.child.exit.try_clone()?,
        })
    }
}

/// One queue's engine, whichever processes work on it.
pub struct Engine {
    /// Index among this node's engines.
    pub index: u8,
    /// NIC queue.
    pub nic_queue: u32,
    /// What outlives the processes.
    pub memory: QueueMemory,
    /// What is done about it.
    pub state: EngineState,
    /// Its deaths.
    pub escalation: Escalation,
    /// Its last recovery.
    pub recoveries: Recoveries,
    /// The epoch of the last engine that said that it serves, as it was then: what an engine that goes wrong writes there later is not believed.
    pub epoch_seen: u32,
    /// Who serves, or is taking over.
    pub active: Option<Process>,
    /// Who takes over next.
    pub standby: Option<Process>,
    /// Who will never run again but is not reaped.
    pub(super) leaving: Vec<Process>,
    /// Launches so far.
    pub launches: u32,
    /// The standby is in the watchdog's hands, as far as we know.
    pub(super) armed: bool,
    /// Standbys that died, beside an engine that serves.
    pub(super) standby_deaths: Restarts,
    /// No standby is prepared before, beside an engine that serves.
    pub(super) no_standby_before: Instant,
    /// Its queue stood still: no other socket for that before.
    pub(super) no_reset_before: Instant,
    /// And so long after the next one.
    pub(super) reset_pause: Duration,
    /// Its socket is to be replaced.
    pub(super) reset: Option<Reset>,
    /// The socket is in the map.
    pub(super) in_map: bool,
    /// Who goes round for its frames.
    pub(super) busy_poll: BusyPoll,
}

impl Engine {
    /// An engine not yet started.
    pub fn new(index: u8, nic_queue: u32, memory: QueueMemory, bounds: Bounds) -> Self {
        let header = memory.ledger.ledger().header();
        let epoch_seen = header.engine_epoch.load(Ordering::Relaxed) as u32;
        Self {
            index,
            nic_queue,
            memory,
            state: EngineState::Waiting(Instant::now()),
            escalation: Escalation::new(bounds),
            recoveries: Recoveries::default(),
            epoch_seen,
            active: None,
            standby: None,
            leaving: Vec::new(),
            launches: 0,
            armed: false,
            standby_deaths: Restarts::default(),
            no_standby_before: Instant::now(),
            no_reset_before: Instant::now(),
            reset_pause: Duration::ZERO,
            reset: None,
            in_map: false,
            busy_poll: BusyPoll::default(),
        }
    }

    /// Is there a process that serves or takes over, fenced or not?
    pub fn has_process(&self) -> bool {
        self.active.is_some()
    }

    /// Who serves; `None` between two processes.
    pub fn pid(&self) -> Option<i32> {
        self.active.as_ref().map(|process| process.child.pid)
    }

    /// Does somebody serve?
    pub fn is_running(&self) -> bool {
        let stage = self.active.as_ref().map(|process| process.stage);
        self.state == EngineState::Served && matches!(stage, Some(Stage::Serving(_)))
    }

    /// Its epoch: which one of the engines that worked on this ledger it is.
    pub fn epoch(&self) -> u64 {
        let header = self.memory.ledger.ledger();
        header.header().engine_epoch.load(Ordering::Relaxed)
    }

    /// Does its next start wait, because it keeps dying?
    pub fn is_degraded(&self) -> bool {
        matches!(self.state, EngineState::Waiting(at) if at > Instant::now())
    }

    /// Its process is dead; told once that is in `recoveries`. An engine that leaves as it was asked to is no cause for concern.
    pub(super) fn death_event(&self, pid: i32) -> Event {
        let leaves = self.state == EngineState::Stopping;
        let (text, severity) = match leaves {
            true => ("engine stopped", Severity::Info),
            false => ("engine died", Severity::Warning),
        };
        Event::new(Kind::EngineDied, text)
            .severity(severity)
            .engine(self.index)
            .field("pid", pid)
            .field("cause", self.recoveries.cause().name())
    }

    /// For people.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            _ if self.active.as_ref().is_some_and(|p| p.fenced) => "fenced",
            EngineState::Waiting(_) if self.is_degraded() => "degraded",
            EngineState::Served if self.is_running() => "running",
            EngineState::Waiting(_) | EngineState::Served => "starting",
            EngineState::Stopping => "stopping",
            EngineState::Stopped => "stopped",
        }
    }

    /// For people.
    pub fn standby_name(&self) -> &'static str {
        match self.standby.as_ref().map(|process| process.stage) {
            Some(Stage::StandingBy) => "ready",
            Some(_) => "preparing",
            None => "none",
        }
    }

    /// The process of a launch, unless it is leaving.
    pub(super) fn process_mut(&mut self, launch: u32) -> Option<&mut Process> {
        let mut both = self.standby.iter_mut().chain(self.active.iter_mut());
        both.find(|process| process.launch == launch)
    }

    /// Those who have not left.
    pub(super) fn launches(&self) -> impl Iterator<Item = u32> + use<> {
        // The standby first: a change that the active process makes real must be known to its successor.
        let both = [&self.standby, &self.active].map(|p| p.as_ref().map(|p| p.launch));
        both.into_iter().flatten()
    }
}
