//! The exporter: the unprivileged child that tells Prometheus (`crate::exporter`), an ordinary client of our socket.
//!
//! It speaks HTTP with strangers, which takes as long as they like; so it is not us. It has nothing to lose and is not stored: it leaves when
//! its standard input ends, that is, with the supervisor that started it, however that ends; the next one starts another.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::Supervisor;
use super::events::{Event, Kind};
use super::poll::{EventFlags, Source, Timer};
use super::restarts::Restarts;
use super::spawn::Child;

/// Engines and applications first.
const AFTER: Duration = Duration::from_millis(300);
/// One that ends is started again after this.
const PAUSE: Duration = Duration::from_secs(1);
/// A killed child is waited for so long before an upgrade.
const DEATH: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// The exporter's process.
#[derive(Default)]
pub struct Exporter {
    child: Option<(Child, OwnedFd)>,
    launch: u32,
    restarts: Restarts,
}

impl Exporter {
    /// Its process id.
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().map(|(child, _)| child.pid)
    }

    /// Has it left?
    pub fn is_gone(&self) -> bool {
        self.child.is_none()
    }
}

impl Supervisor {
    /// Starts it when there is time.
    pub(super) fn schedule_exporter(&mut self, now: Instant) {
        self.poll.set_timer(now + AFTER, Timer::Exporter);
    }

    /// Starts the exporter, if there is to be one and it does not run.
    pub(super) fn start_exporter(&mut self, now: Instant) {
        if !self.exporter.is_gone() || self.stopping {
            return;
        }
        let (child, link) = match self.launcher.exporter() {
            Ok(Some(started)) => started,
            Ok(None) => return,
            Err(error) => {
                tracing::error!(%error, "the exporter of metrics cannot be started");
                return self.exporter_again(now);
            }
        };
        self.exporter.launch = self.exporter.launch.wrapping_add(1);
        let source = Source::ExporterExit(self.exporter.launch);
        if let Err(error) = self.poll.add(&child.exit, source, EventFlags::IN) {
            tracing::error!(%error, "the exporter of metrics cannot be watched");
            // Nobody watches it, so end it here.
            let _ = self.launcher.kill(&child);
            self.launcher.reap(&child);
            return self.exporter_again(now);
        }
        tracing::info!(pid = child.pid, "exporter of metrics started");
        self.exporter.child = Some((child, link));
    }

    fn exporter_again(&mut self, now: Instant) {
        let wait = self.exporter.restarts.died(now).max(PAUSE);
        self.poll.set_timer(now + wait, Timer::Exporter);
    }

    /// Its pidfd became readable.
    pub(super) fn on_exporter_exit(&mut self, launch: u32, now: Instant) {
        if launch != self.exporter.launch {
            return;
        }
        let Some((child, _)) = self.exporter.child.take() else {
            return;
        };
        self.poll.remove(&child.exit);
        let how = self.launcher.reap(&child);
        if self.stopping {
            return;
        }
        let text = format!("exporter of metrics died ({how})");
        let died = Event::new(Kind::HelperDied, text).field("helper", "metrics");
        self.events.record(died.field("pid", child.pid));
        self.exporter_again(now);
    }

    /// Kills the exporter.
    pub(super) fn stop_exporter(&mut self) {
        if let Some((child, _)) = &self.exporter.child
            && let Err(error) = self.launcher.kill(child)
        {
            tracing::warn!(%error, "the exporter of metrics cannot be killed");
        }
    }

    /// Ends the exporter before another program takes our place, which would not know of it. If it does not, it runs again a moment later.
    pub(super) fn end_exporter(&mut self) {
        self.stop_exporter();
        if let Some((child, _)) = self.exporter.child.take() {
            let mut exit = [PollFd::new(&child.exit, PollFlags::IN)];
            // If it takes longer it stays a zombie, which harms nobody.
            let _ = rustix::event::poll(&mut exit, Some(&DEATH));
            self.poll.remove(&child.exit);
            self.launcher.reap(&child);
        }
        self.schedule_exporter(Instant::now());
    }
}
