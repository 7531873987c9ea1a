//! Another socket for a queue: tiers reset and rebuild ([`super::escalation`]).
//!
//! | step | done when |
//! |---|---|
//! | fence who serves, and the standby; nobody may adopt | |
//! | wait until both are gone altogether | their pidfds say so: their mappings hold the old socket, and a queue has one |
//! | close our copy of the socket, which takes it out of the map | |
//! | make another on the same queue: same UMEM (reset) or another (rebuild), a cleared ownership table | the kernel has released the old one (tens of milliseconds), asked again every few |
//! | prepare a standby, which takes over as ever | `Ready`; the socket goes into the map |
//!
//! The ledger stays, so nothing is lost but the frames that were in the rings, which are sent again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::engines::EngineState;
use super::escalation::Tier;
use super::events::{Event, Kind};
use super::poll::Timer;
use super::recovery::Cause;
use super::sockets::{NewSocket, NoSocket};
use super::store::Name;

/// A queue that is not released yet is asked again after this.
const RELEASE_PAUSE: Duration = Duration::from_millis(4);
/// A queue that is not released by then: something else holds it.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// Between two sockets for a queue that stands still.
const FIRST_PAUSE: Duration = Duration::from_secs(4);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A socket that is to be replaced.
#[derive(Clone, Copy, Debug)]
pub struct Reset {
    /// [`Tier::Reset`] or [`Tier::Rebuild`].
    pub tier: Tier,
    /// The old socket is closed here, since then.
    closed_at: Option<Instant>,
}

impl Reset {
    /// Nothing has been done yet.
    pub fn new(tier: Tier) -> Self {
        Self {
            tier,
            closed_at: None,
        }
    }
}

impl Supervisor {
    /// Gives a queue another socket, because somebody asked for it or its engine says that it stands still.
    pub(super) fn reset_queue(&mut self, index: usize, cause: Cause, why: &str) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        if engine.state != EngineState::Served || engine.reset.is_some() {
            return;
        }
        engine.reset = Some(Reset::new(Tier::Reset));
        // If the standby has just been told to take over, it finds that out by being killed, like who serves.
        self.disarm(index);
        self.fence(index, cause, why);
    }

    /// The interface is another one: nothing that is bound to a queue is of use.
    pub(super) fn rebuild_queue(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        match engine.state {
            EngineState::Served => {
                engine.reset = Some(Reset::new(Tier::Rebuild));
                self.disarm(index);
                self.fence(
                    index,
                    Cause::Interface,
                    "works on an interface that is gone",
                );
            }
            EngineState::Waiting(_) => {
                engine.reset = Some(Reset::new(Tier::Rebuild));
                self.do_not_wait(index, now);
            }
            EngineState::Stopping | EngineState::Stopped => {}
        }
    }

    /// What stood in the way of a queue may be gone.
    pub(super) fn do_not_wait(&mut self, index: usize, now: Instant) {
        if let Some(engine) = self.engines.get_mut(index)
            && let EngineState::Waiting(at) = engine.state
        {
            engine.state = EngineState::Waiting(at.min(now));
            self.poll.set_timer(now, Timer::Engine(engine.index));
        }
    }

    /// An engine says that its queue stands still. Another socket is the remedy for what a socket can have; if it stands still again soon
    /// after, the next one waits, and longer each time.
    pub(super) fn on_wedged(&mut self, index: usize, evidence: &str) {
        let now = Instant::now();
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        if now < engine.no_reset_before || !self.interface.takes_sockets() {
            return;
        }
        let long_ago = now.duration_since(engine.no_reset_before) > LONGEST_PAUSE;
        let pause = if long_ago {
            FIRST_PAUSE
        } else {
            (engine.reset_pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE)
        };
        engine.reset_pause = pause;
        engine.no_reset_before = now + pause;
        let evidence: String = evidence
            .chars()
            .filter(|c| !c.is_control())
            .take(100)
            .collect();
        self.reset_queue(
            index,
            Cause::Wedged,
            &format!("has a queue that stands still: {evidence}"),
        );
    }

    /// A successor must find the new ones.
    fn store_socket(&mut self, index: usize, tier: Tier) {
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        let queue = engine.index;
        let (umem, xsk) = (&engine.memory.umem, &engine.memory.xsk);
        let mut stored = Ok(());
        if tier != Tier::Reset {
            self.store.remove(&Name::Umem(queue));
            stored = self.store.put(Name::Umem(queue), umem);
        }
        if let Err(error) = stored.and_then(|()| self.store.put(Name::Xsk(queue), xsk)) {
            tracing::error!(queue, "the socket cannot be stored: {error}");
        }
    }

    /// The next step, if there is one to take. True: the socket is in order.
    pub(super) fn reset_goes_on(&mut self, index: usize, now: Instant) -> bool {
        let Some(engine) = self.engines.get_mut(index) else {
            return true;
        };
        let Some(mut reset) = engine.reset else {
            return true;
        };
        let queue = engine.index;
        if let Some(standby) = &engine.standby {
            let launch = standby.launch;
            self.fence_process(index, launch, "has a socket that is to go");
            return false;
        }
        if engine.active.is_some() || !engine.leaving.is_empty() {
            return false;
        }
        if !self.interface.takes_sockets() {
            // Whoever sees it come back goes on.
            return false;
        }
        let since = *reset.closed_at.get_or_insert(now);
        engine.reset = Some(reset);
        engine.in_map = false;
        // The last copy of ours: any other descriptor in its place until there is a new one.
        engine.memory.xsk = Arc::clone(&engine.memory.wake);
        self.store.remove(&Name::Xsk(queue));
        let umem = (reset.tier == Tier::Reset).then(|| Arc::clone(&engine.memory.umem));
        let ledger = engine.memory.ledger.ledger();
        let made = self
            .sockets
            .create(engine.nic_queue, umem.as_deref(), ledger.frames());
        match made {
            Ok(NewSocket {
                umem,
                xsk,
                zero_copy,
            }) => {
                let event = Event::new(Kind::QueueReset, "the queue has another socket");
                let event = event.engine(queue).field("tier", reset.tier.name());
                self.events.record(event);
                engine.memory.umem = umem;
                engine.memory.xsk = xsk;
                engine.memory.zero_copy = zero_copy;
                engine.reset = None;
                self.store_socket(index, reset.tier);
                true
            }
            Err(NoSocket::NotYet) if now.duration_since(since) < RELEASE_PATIENCE => {
                self.poll
                    .set_timer(now + RELEASE_PAUSE, Timer::Engine(queue));
                false
            }
            Err(why) => {
                let why = match why {
                    NoSocket::NotYet => "somebody else holds the queue".to_owned(),
                    NoSocket::Failed(why) => why,
                };
                let wait = engine.escalation.died(Duration::ZERO).1;
                let wait = wait.max(engine.escalation.healthy_after());
                engine.reset = Some(Reset::new(reset.tier));
                engine.state = EngineState::Waiting(now + wait);
                tracing::error!(queue, "no socket: {why}; tried again in {wait:?}");
                self.poll.set_timer(now + wait, Timer::Engine(queue));
                self.refuse_opening(index);
                false
            }
        }
    }
}
