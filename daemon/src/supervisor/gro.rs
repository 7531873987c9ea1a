//! A NAPI instance for an interface that has none, as long as there is use for it ([`super::busy_poll`]).
//!
//! **Problem.** A veth has instances while GRO is switched on, which it is not by default. While it has one that nobody polls, every frame takes longer, a
//! short message's way by 5 % (docs/tuning.md).
//!
//! **Idea.** GRO is switched on when an engine asks to go round and there is no instance, and off again when for [`LINGER`] none did. GRO that we did not
//! switch on stays as it is. That it is ours is in the notes before it is done, so whoever succeeds a supervisor that was killed switches it off; who stops or leaves does, too.
//! What is in the instance's queue when that goes is lost, and sent again: nothing much, as few frames came for a second.
//!
//! It may be in vain: frames that the other end sends with segmentation offload do not come through the instance (`veth_skb_is_eligible_for_gro`). Then it is let
//! be for [`REST`].

use std::io;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::poll::Timer;
use crate::ethtool::Ethtool;

/// How long an instance of ours is kept without use.
const LINGER: Duration = Duration::from_secs(1);
/// Engines that go round say so about each second.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// How long nothing is tried after it was in vain.
const REST: Duration = Duration::from_secs(600);

/// Whose GRO is, and since when it is of no use.
#[derive(Default)]
pub struct Gro {
    ours: bool,
    used: Option<Instant>,
    rest_until: Option<Instant>,
}

impl Gro {
    /// We switched it on.
    pub fn is_ours(&self) -> bool {
        self.ours
    }

    /// A predecessor of ours did. Its engines tell us within [`TOLD_WITHIN`] that they go round.
    pub fn adopt(&mut self, ours: bool) {
        self.ours = ours;
        self.used = Some(Instant::now() + TOLD_WITHIN);
    }

    /// An engine goes round, or is about to.
    pub fn is_of_use(&mut self, now: Instant) {
        self.used = Some(now);
    }

    /// Frames do not come through the instance.
    pub fn is_in_vain(&mut self, now: Instant) {
        if self.ours {
            self.rest_until = Some(now + REST);
        }
    }

    fn is_unused(&self, now: Instant) -> bool {
        self.used.is_none_or(|used| now - used >= LINGER)
    }

    fn rests(&self, now: Instant) -> bool {
        self.rest_until.is_some_and(|until| now < until)
    }
}

impl Supervisor {
    /// There is no instance, and an engine would use one.
    pub(super) fn switch_gro_on(&mut self, now: Instant) -> io::Result<()> {
        if self.gro.ours || self.gro.rests(now) {
            return Ok(());
        }
        let ethtool = Ethtool::new(&self.config.interface)?;
        // Then it has none for another reason: it is down, or on its way up.
        if ethtool.offloads().gro {
            return Ok(());
        }
        self.gro.ours = true;
        self.store_notes();
        self.gro.is_of_use(now);
        self.look_after_gro(now);
        if let Err(error) = ethtool.set_gro(true) {
            self.gro.ours = false;
            self.store_notes();
            return Err(error);
        }
        let interface = &self.config.interface;
        tracing::info!(%interface, "GRO is on while there is a stream, so that engines can go round for its frames");
        Ok(())
    }

    /// Has it looked at later, if it is ours.
    pub(super) fn look_after_gro(&mut self, now: Instant) {
        if self.gro.ours {
            self.poll.set_timer(now + LINGER, Timer::Gro);
        }
    }

    /// Switches it off if it was not used of late.
    pub(super) fn on_gro_timer(&mut self, now: Instant) {
        let polled = self.engines.iter().any(|engine| engine.busy_poll.is_on());
        if polled || !self.gro.is_unused(now) {
            return self.look_after_gro(now);
        }
        self.end_gro();
    }

    /// Switches it off if it is ours.
    pub(super) fn end_gro(&mut self) {
        if !std::mem::take(&mut self.gro.ours) {
            return;
        }
        let interface = &self.config.interface;
        match Ethtool::new(interface).and_then(|ethtool| ethtool.set_gro(false)) {
            Ok(()) => tracing::debug!(%interface, "GRO is off again"),
            Err(error) => {
                tracing::warn!(%interface, "GRO stays on: {error}; `ethtool -K {interface} gro off` switches it off");
            }
        }
        self.store_notes();
    }
}
