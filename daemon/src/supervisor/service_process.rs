//! The service: the unprivileged child that answers `ping` and `allsize` on port 0, an ordinary client but for that port.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::config::Credentials;
use super::events::{Event, Kind};
use super::poll::{EventFlags, Source, Timer};
use super::restarts::Restarts;
use super::spawn::Child;
use super::store::predecessor::pid_of;
use super::store::{Name, StoreError};

/// One that ends well is started again after this.
const PAUSE: Duration = Duration::from_secs(1);

/// The service's process.
#[derive(Default)]
pub struct Service {
    child: Option<Child>,
    launch: u32,
    restarts: Restarts,
}

impl Service {
    /// Its process id.
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().map(|child| child.pid)
    }
}

impl Supervisor {
    /// Starts the service, unless it runs.
    pub(super) fn start_service(&mut self, now: Instant) {
        if self.service.child.is_some() || self.stopping {
            return;
        }
        let child = match self.launcher.service() {
            Ok(Some(child)) => child,
            Ok(None) => return,
            Err(error) => {
                tracing::error!(%error, "the service cannot be started");
                self.schedule_service(now);
                return;
            }
        };
        self.service.launch = self.service.launch.wrapping_add(1);
        let source = Source::ServiceExit(self.service.launch);
        if let Err(error) = self.poll.add(&child.exit, source, EventFlags::IN) {
            tracing::error!(%error, "the service cannot be watched");
            // Nobody watches it, so end it here.
            let _ = self.launcher.kill(&child);
            self.launcher.reap(&child);
            self.schedule_service(now);
            return;
        }
        if let Err(error) = self.store_service(&child) {
            tracing::error!("the service cannot be stored: {error}");
            let _ = self.launcher.kill(&child);
            self.launcher.reap(&child);
            self.poll.remove(&child.exit);
            self.schedule_service(now);
            return;
        }
        tracing::info!(pid = child.pid, "service started");
        self.service.child = Some(child);
    }

    fn store_service(&mut self, child: &Child) -> Result<(), StoreError> {
        let exit = Arc::new(child.exit.try_clone()?);
        self.store.put(Name::Service, &exit)
    }

    /// Goes on with a predecessor's service.
    pub(super) fn adopt_service(&mut self, exit: OwnedFd) {
        let Some(pid) = pid_of(&exit) else {
            self.store.forget(&Name::Service.to_string());
            return;
        };
        let watched = exit.try_clone().and_then(|kept| {
            self.store.adopt(Name::Service, Arc::new(kept));
            self.service.launch = self.service.launch.wrapping_add(1);
            let source = Source::ServiceExit(self.service.launch);
            self.poll.add(&exit, source, EventFlags::IN)
        });
        match watched {
            Ok(()) => self.service.child = Some(Child { pid, exit }),
            Err(error) => tracing::error!(%error, "the service cannot be watched"),
        }
    }

    /// Its pidfd became readable.
    pub(super) fn on_service_exit(&mut self, launch: u32, now: Instant) {
        if launch != self.service.launch {
            return;
        }
        let Some(child) = self.service.child.take() else {
            return;
        };
        self.poll.remove(&child.exit);
        self.store.remove(&Name::Service);
        let how = self.launcher.reap(&child);
        if self.stopping {
            return;
        }
        let died = Event::new(Kind::HelperDied, format!("service died ({how})"));
        let died = died.field("helper", "service").field("pid", child.pid);
        self.events.record(died);
        self.schedule_service(now);
    }

    fn schedule_service(&mut self, now: Instant) {
        let wait = self.service.restarts.died(now).max(PAUSE);
        self.poll.set_timer(now + wait, Timer::Service);
    }

    /// Is this client our service? Its process is not reaped, so the number is nobody else's; but it is the number of who connected,
    /// which may have been somebody else before, so the user must be right, too.
    pub(super) fn is_service(&self, who: &Credentials) -> bool {
        self.service.pid() == Some(who.pid) && who.uid == self.config.user.uid
    }

    /// Kills the service. It has nothing to lose.
    pub(super) fn stop_service(&mut self) {
        if let Some(child) = &self.service.child
            && let Err(error) = self.launcher.kill(child)
        {
            tracing::warn!(%error, "the service cannot be killed");
        }
    }

    /// Has it left?
    pub(super) fn service_is_gone(&self) -> bool {
        self.service.child.is_none()
    }
}
