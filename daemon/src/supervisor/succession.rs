//! Who serves a queue next: standbys prepared, promoted, fenced and buried. The stages are in [`super::engines`].

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use portolan_abi::port::CloseReason;

use super::Supervisor;
use super::engines::{EngineState, Process, Stage};
use super::escalation::Tier;
use super::events::{Event, Kind};
use super::poll::{EventFlags, Source, Timer};
use super::ports::Phase;
use super::recovery::Cause;
use super::reset::Reset;
use super::spawn::{Child, Urgency};
use super::store::Name;
use super::watchdog::background::LONGEST_NS;
use super::watchdog::{Armed, Seen, now_ns};
use crate::engine_link::ToEngine;

/// A standby that takes longer to map everything is hung.
pub(super) const PREPARED_WITHIN: Duration = Duration::from_secs(10);
/// So long it is prepared in the time that others leave.
pub(super) const AT_LEISURE: Duration = Duration::from_nanos(LONGEST_NS);
/// An engine that takes longer to take over is hung.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(2);
/// More than a link holds when its engine dies.
const LAST_MESSAGES: usize = 4096;

impl Supervisor {
    /// Starts a process that stands by, unless there is one.
    pub(super) fn prepare_standby(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        let leaving = matches!(engine.state, EngineState::Stopping | EngineState::Stopped);
        if engine.standby.is_some() || engine.reset.is_some() || leaving {
            return;
        }
        if self.interface.is_gone() {
            // The socket cannot be mapped any more; whoever sees another interface goes on.
            return;
        }
        // Mapping memory takes milliseconds, which applications would miss on a busy machine, unless it is waited for.
        let waited_for = engine.active.is_none();
        let urgency = if waited_for {
            Urgency::Urgent
        } else {
            Urgency::Idle
        };
        let (child, link) = match self.launcher.engine(queue, urgency) {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(queue, %error, "the engine cannot be started");
                self.on_early_death(index, now);
                return;
            }
        };
        engine.launches = engine.launches.wrapping_add(1);
        let launch = engine.launches;
        let link_flags = EventFlags::IN | EventFlags::RDHUP;
        let watched = self
            .poll
            .add(&link, Source::Link(queue, launch), link_flags)
            .and_then(|()| {
                let source = Source::EngineExit(queue, launch);
                self.poll.add(&child.exit, source, EventFlags::IN)
            });
        if let Err(error) = watched {
            tracing::error!(queue, %error, "the engine cannot be watched");
            // Nobody watches it, so end it here.
            let _ = self.launcher.kill(&child);
            self.launcher.reap(&child);
            self.on_early_death(index, now);
            return;
        }
        let stored = self.store_process(queue, launch, &child, &link);
        let Some(engine) = self.engines.get_mut(index).filter(|_| stored) else {
            let _ = self.launcher.kill(&child);
            self.launcher.reap(&child);
            self.on_early_death(index, now);
            return;
        };
        tracing::debug!(queue, pid = child.pid, "standby started");
        let by = now + PREPARED_WITHIN;
        if !waited_for {
            self.watchdog
                .in_background(child.pid, AT_LEISURE.saturating_mul(2));
            self.poll.set_timer(now + AT_LEISURE, Timer::Engine(queue));
        }
        engine.standby = Some(Process::new(launch, child, link, Stage::Preparing(by)));
        self.poll.set_timer(by, Timer::Engine(queue));
        self.brief(index, launch);
    }

    /// A standby has mapped everything.
    pub(super) fn on_standing_by(&mut self, index: usize, launch: u32) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.standby.as_mut().filter(|p| p.launch == launch) else {
            return;
        };
        process.stage = Stage::StandingBy;
        let ready = Event::new(Kind::StandbyReady, "standby ready").engine(engine.index);
        self.events.record(ready.field("pid", process.child.pid));
        if let Err(error) = self.launcher.schedule(&process.child, Urgency::Urgent) {
            if !self.warned_of_priority {
                tracing::warn!(
                    "standbys run like everybody else, so a busy machine delays takeovers: {error}; grant CAP_SYS_NICE"
                );
            }
            self.warned_of_priority = true;
        }
        self.go_on(index, Instant::now());
    }

    /// Before it is told anything: a successor must find it. False: then nobody may know of it.
    fn store_process(&mut self, queue: u8, launch: u32, child: &Child, link: &OwnedFd) -> bool {
        let kept = child
            .exit
            .try_clone()
            .and_then(|exit| Ok((exit, link.try_clone()?)));
        let stored = match kept {
            Ok((exit, link)) => self.store.put_all(&[
                (Name::Process(queue, launch), Arc::new(exit)),
                (Name::Link(queue, launch, self.build), Arc::new(link)),
            ]),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = &stored {
            tracing::error!(queue, "the engine cannot be stored: {error}");
        }
        stored.is_ok()
    }

    /// Does the next thing there is to do about a queue, if it is time.
    pub(super) fn go_on(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let waits_no_more = matches!(engine.state, EngineState::Waiting(at) if at <= now);
        if waits_no_more && engine.active.is_none() && !self.reset_goes_on(index, now) {
            return;
        }
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let stands_by =
            (engine.standby.as_ref()).is_some_and(|p| p.stage == Stage::StandingBy && !p.fenced);
        match engine.state {
            EngineState::Waiting(at) if at <= now && engine.active.is_none() => {
                if stands_by {
                    self.take_over(index, now);
                } else {
                    self.prepare_standby(index, now);
                }
            }
            EngineState::Served if engine.is_running() => {
                if engine.standby.is_none() {
                    if self.config.recovery.standby && engine.no_standby_before <= now {
                        self.prepare_standby(index, now);
                    }
                } else {
                    self.arm(index);
                    self.renew(index);
                }
            }
            _ => {}
        }
    }

    /// Puts the standby into the watchdog's hands, if it may take over by itself.
    pub(super) fn arm(&mut self, index: usize) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let may = engine.state == EngineState::Served
            && engine.escalation.may_adopt()
            && engine.reset.is_none();
        let Some(process) = engine.standby.as_ref().filter(|_| may && !engine.armed) else {
            return;
        };
        let knows_all = process.outbox.is_empty();
        if process.stage != Stage::StandingBy || process.fenced || !knows_all {
            return;
        }
        // Out of descriptors: then it takes over when we get to it.
        if let (Ok(watched), Ok(link)) = (process.watched(), process.link.try_clone()) {
            let process = watched;
            self.watchdog.arm(engine.index, Armed { process, link });
            engine.armed = true;
        }
    }

    /// Takes the standby out of the watchdog's hands. False: it has just been told to take over, which we will hear of.
    pub(super) fn disarm(&mut self, index: usize) -> bool {
        let Some(engine) = self.engines.get_mut(index) else {
            return true;
        };
        !std::mem::take(&mut engine.armed) || self.watchdog.disarm(engine.index)
    }

    /// Has the standby take over. Nobody serves.
    pub(super) fn take_over(&mut self, index: usize, now: Instant) {
        self.disarm(index);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.standby.take() else {
            return;
        };
        let launch = process.launch;
        match process.watched() {
            Ok(watched) => self.watchdog.watch(engine.index, watched),
            Err(error) => tracing::warn!(queue = engine.index, %error, "not watched"),
        }
        engine.active = Some(process);
        self.tell_one(index, launch, &ToEngine::TakeOver, Vec::new());
        self.on_taking_over(index, now);
    }

    /// The active process has been told to take over, by us or by the watchdog.
    fn on_taking_over(&mut self, index: usize, now: Instant) {
        let by = now + TAKEN_OVER_WITHIN;
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.active.as_mut() else {
            return;
        };
        process.stage = Stage::TakingOver(by);
        if engine.state != EngineState::Stopping {
            engine.state = EngineState::Served;
        }
        self.poll.set_timer(by, Timer::Engine(engine.index));
        if engine.reset.is_some() {
            // Told in the very moment in which its socket was given up.
            self.fence(index, Cause::Reset, "took over a socket that is to go");
            return;
        }
        self.tell_closing_again(index);
    }

    /// A process says that it serves.
    pub(super) fn on_ready(&mut self, index: usize, launch: u32, adopted_in_ns: u64, at_ns: u64) {
        let now = Instant::now();
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(process) = engine.active.as_mut().filter(|p| p.launch == launch) else {
            return;
        };
        if !matches!(process.stage, Stage::TakingOver(_)) {
            return;
        }
        process.stage = Stage::Serving(now);
        let pid = process.child.pid;
        engine.epoch_seen = engine.epoch() as u32;
        let event = engine.recoveries.ready(adopted_in_ns, at_ns);
        self.watchdog.expect_beats(engine.index, launch);
        let event = event.engine(engine.index).field("pid", pid);
        self.events.record(event.field("epoch", engine.epoch()));
        let healthy = now + engine.escalation.healthy_after();
        self.poll.set_timer(healthy, Timer::Engine(engine.index));
        self.steer_to(index);
        self.go_on(index, now);
    }

    /// Frames of the queue go to the socket from now on, and stay in it while engines come and go.
    pub(super) fn steer_to(&mut self, index: usize) {
        let Some(engine) = self.engines.get_mut(index).filter(|e| !e.in_map) else {
            return;
        };
        let socket = engine.memory.xsk.as_fd();
        match self.steering.insert(engine.nic_queue, socket) {
            Ok(()) => engine.in_map = true,
            Err(error) => {
                tracing::error!(queue = engine.index, "frames cannot be steered: {error}");
                self.fence(index, Cause::Death, "cannot be reached");
            }
        }
    }

    /// Kills the active process. What follows, follows its death.
    pub(super) fn fence(&mut self, index: usize, cause: Cause, why: &str) {
        if let Some(engine) = self.engines.get_mut(index)
            && let Some(process) = engine.active.as_ref().filter(|p| !p.fenced)
        {
            let launch = process.launch;
            engine.recoveries.suspect(cause, now_ns());
            self.fence_process(index, launch, why);
        }
    }

    /// Kills a process that must not go on.
    pub(super) fn fence_process(&mut self, index: usize, launch: u32, why: &str) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        let Some(process) = engine.process_mut(launch).filter(|p| !p.fenced) else {
            return;
        };
        tracing::warn!(queue, pid = process.child.pid, "engine fenced: it {why}");
        process.fenced = true;
        // Removed already if it was closed.
        self.poll.remove(&process.link);
        if let Err(error) = self.launcher.kill(&process.child) {
            tracing::error!(queue, %error, "the engine cannot be killed");
        }
        if engine.standby.as_ref().is_some_and(|p| p.launch == launch) {
            self.disarm(index);
        }
    }

    /// Takes in what the watchdog saw, before anything else happens.
    pub(super) fn heed_watchdog(&mut self, now: Instant) {
        while let Some(seen) = self.watchdog.next() {
            match seen {
                Seen::Fenced {
                    queue,
                    launch,
                    cause,
                    at_ns,
                } => self.on_fenced(queue, launch, cause, at_ns),
                Seen::WillNotDie { queue, launch } => {
                    let text = "the engine was killed and does not die: it is stuck in the kernel; its queue waits for that";
                    let stuck = Event::new(Kind::EngineStuck, text).engine(queue);
                    self.events.record(stuck.field("launch", launch));
                }
                Seen::Death {
                    queue,
                    launch,
                    at_ns,
                    last_beat_ns,
                    promoted,
                } => {
                    let index = usize::from(queue);
                    if let (Some(engine), Some(_)) = (self.engines.get_mut(index), promoted) {
                        engine.armed = false;
                    }
                    self.on_active_death(index, launch, at_ns, last_beat_ns, promoted, now);
                }
            }
        }
    }

    /// The watchdog has killed the active process.
    fn on_fenced(&mut self, queue: u8, launch: u32, cause: Cause, at_ns: u64) {
        let Some(engine) = self.engines.get_mut(usize::from(queue)) else {
            return;
        };
        let Some(process) = engine.active.as_mut().filter(|p| p.launch == launch) else {
            return;
        };
        let pid = process.child.pid;
        tracing::warn!(queue, pid, "engine fenced: {}", cause.name());
        process.fenced = true;
        engine.recoveries.suspect(cause, at_ns);
        self.poll.remove(&process.link);
    }

    /// The active process will never run again.
    fn on_active_death(
        &mut self,
        index: usize,
        launch: u32,
        at_ns: u64,
        last_beat_ns: Option<u64>,
        promoted: Option<u32>,
        now: Instant,
    ) {
        // What it said before it died still counts.
        self.read_link(index, launch, LAST_MESSAGES);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let Some(dead) = engine.active.take_if(|p| p.launch == launch) else {
            return;
        };
        let served = match dead.stage {
            Stage::Serving(since) => now.saturating_duration_since(since),
            _ => Duration::ZERO,
        };
        let (tier, wait) = engine.escalation.died(served);
        let tier = engine.reset.map_or(tier, |reset| reset.tier.max(tier));
        engine.recoveries.died(at_ns, last_beat_ns, tier);
        self.events.record(engine.death_event(dead.child.pid));
        if let Some(standby) = &engine.standby
            && matches!(standby.stage, Stage::Preparing(_))
        {
            // Now it is waited for.
            let _ = self.launcher.schedule(&standby.child, Urgency::Urgent);
        }
        // Applications first: they have a pause to make up for.
        let next = now + self.config.recovery.standby_after;
        engine.no_standby_before = engine.no_standby_before.max(next);
        self.poll
            .set_timer(engine.no_standby_before, Timer::Engine(engine.index));
        self.poll.remove(&dead.link);
        engine.leaving.push(dead);
        self.forget_peers_of(index);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        if promoted.is_some() && engine.standby.as_ref().map(|p| p.launch) == promoted {
            engine.active = engine.standby.take();
            self.on_taking_over(index, now);
        } else {
            self.recover(index, tier, wait, now);
        }
        // What nobody goes round for any more would be late. After those who are in more of a hurry.
        self.end_polling(index);
    }

    /// A process that never served died, or could not be started.
    fn on_early_death(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        if engine.active.is_some() {
            // Somebody serves: no hurry, and no reason to touch what works.
            let pause = engine.standby_deaths.died(now);
            engine.no_standby_before = now + pause.max(engine.escalation.healthy_after());
            let queue = engine.index;
            self.poll
                .set_timer(engine.no_standby_before, Timer::Engine(queue));
        } else {
            let (tier, wait) = engine.escalation.died(Duration::ZERO);
            self.recover(index, tier, wait, now);
        }
    }

    /// Nobody serves: does what the evidence says.
    fn recover(&mut self, index: usize, tier: Tier, wait: Duration, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let queue = engine.index;
        if engine.state == EngineState::Stopping || self.stopping {
            self.finish_closing(index, CloseReason::OwnerGone);
            self.settle_stop(index);
            return;
        }
        engine.state = EngineState::Waiting(now + wait);
        if tier > Tier::Adopt {
            engine.reset = Some(Reset::new(tier));
        }
        if wait.is_zero() {
            // A standby that is ready takes over at once. A start waits for the next round of the loop: one that fails at once must not
            // recurse.
            let stands_by = (engine.standby.as_ref()).is_some_and(|p| p.stage == Stage::StandingBy);
            if stands_by {
                self.go_on(index, now);
            } else {
                self.poll.set_timer(now, Timer::Engine(queue));
            }
            return;
        }
        let text = "engine degraded: it keeps dying, the next start waits";
        let event = Event::new(Kind::EngineDegraded, text).engine(queue);
        self.events.record(event.field("seconds", wait.as_secs()));
        self.poll.set_timer(now + wait, Timer::Engine(queue));
        self.finish_closing(index, CloseReason::OwnerGone);
        self.refuse_opening(index);
    }

    /// A pidfd became readable: the process is gone altogether.
    pub(super) fn on_engine_exit(&mut self, queue: u8, launch: u32, now: Instant) {
        let index = usize::from(queue);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let is = |process: &Option<Process>| process.as_ref().is_some_and(|p| p.launch == launch);
        if is(&engine.active) {
            // Its death word has said nothing, or the watchdog has just heard it.
            if self.watchdog.forget(queue, launch) {
                self.disarm(index);
                self.on_active_death(index, launch, now_ns(), None, None, now);
            } else {
                self.heed_watchdog(now);
                self.on_active_death(index, launch, now_ns(), None, None, now);
            }
        } else if is(&engine.standby) {
            self.read_link(index, launch, LAST_MESSAGES);
            // The watchdog may have promoted it just now; then it is the active one's death.
            if !self.disarm(index) {
                self.heed_watchdog(now);
                return self.on_engine_exit(queue, launch, now);
            }
            let Some(engine) = self.engines.get_mut(index) else {
                return;
            };
            if let Some(dead) = engine.standby.take() {
                self.poll.remove(&dead.link);
                let asked_for = engine.reset.is_some() && dead.fenced;
                self.bury(index, &dead);
                if !asked_for {
                    let event = Event::new(Kind::EngineDied, "standby died").engine(queue);
                    self.events.record(event.field("pid", dead.child.pid));
                    self.on_early_death(index, now);
                }
            }
        }
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let gone = engine.leaving.iter().position(|p| p.launch == launch);
        if let Some(dead) = gone.map(|place| engine.leaving.swap_remove(place)) {
            self.bury(index, &dead);
        }
        self.settle_stop(index);
        if self.engines.get(index).is_some_and(|e| e.reset.is_some()) {
            self.go_on(index, now);
        }
    }

    fn bury(&mut self, index: usize, dead: &Process) {
        let how = self.launcher.reap(&dead.child);
        let pid = dead.child.pid;
        self.poll.remove(&dead.child.exit);
        let (queue, launch) = (index as u8, dead.launch);
        self.outdated.remove(&(queue, launch));
        self.store.remove_process(queue, launch);
        if self.stopping {
            tracing::info!(queue = index, pid, "engine stopped ({how})");
        } else {
            tracing::warn!(queue = index, pid, "engine died ({how})");
        }
    }

    /// An engine's timer fired.
    pub(super) fn on_engine_timer(&mut self, queue: u8, now: Instant) {
        let index = usize::from(queue);
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        if let Some(standby) = &engine.standby
            && let Stage::Preparing(by) = standby.stage
            && !standby.fenced
            && now + PREPARED_WITHIN >= by + AT_LEISURE
        {
            // There was no leisure. Again and again: it makes itself idle as one of the first things it does, and on a machine that is busy enough
            // comes to that only after it has been told to be ordinary.
            let _ = self.launcher.schedule(&standby.child, Urgency::Ordinary);
            self.poll.set_timer(now + AT_LEISURE, Timer::Engine(queue));
        }
        let mut overdue = Vec::new();
        for process in engine.standby.iter().chain(engine.active.iter()) {
            let why = match process.stage {
                _ if process.leaves_by.is_some_and(|by| by <= now) => {
                    "closed its link and lives on"
                }
                Stage::Preparing(by) if by <= now => "was not prepared in time",
                Stage::TakingOver(by) if by <= now => "did not take over in time",
                _ => continue,
            };
            overdue.push((process.launch, why));
        }
        if let Some(Stage::Serving(since)) = engine.active.as_ref().map(|p| p.stage)
            && now.saturating_duration_since(since) >= engine.escalation.healthy_after()
        {
            engine.escalation.healthy();
        }
        for (launch, why) in overdue {
            self.fence_process(index, launch, why);
        }
        self.go_on(index, now);
    }

    /// Ports the supervisor waits to have closed.
    fn tell_closing_again(&mut self, index: usize) {
        let Some(launch) = (self.engines.get(index)).and_then(|e| Some(e.active.as_ref()?.launch))
        else {
            return;
        };
        let closing = self.ports.iter().filter(|(number, port)| {
            port.phase == Phase::Closing && self.config.engine_of(*number) == index
        });
        let messages: Vec<ToEngine> = closing
            .map(|(port, p)| ToEngine::ClosePort {
                port,
                generation: p.generation,
                reason: CloseReason::OwnerGone,
            })
            .collect();
        for message in messages {
            self.tell_one(index, launch, &message, Vec::new());
        }
    }
}
