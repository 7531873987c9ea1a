//! A NAPI instance for an interface that has none, as long as there is use for it ([`super::busy_poll`]).
//!
//! **Problem.** A veth has instances while GRO is switched on, which it is not by default. While it has one that nobody polls, every frame takes longer, a
//! short message's way by 5 % (docs/tuning.md).
//!
//! **Idea.** GRO is switched on when an engine asks to go round and there is no instance, and off again when for [`LINGER`] none did, or at once if the last one rests: it will
//! try again, but meanwhile has many frames to receive. GRO that we did not
//! switch on stays as it is. That it is ours, and of which interface, is in the notes before it is done, so whoever succeeds a supervisor that was killed switches it off, also who
//! begins anew; who stops or leaves does, too. What is in the instance's queue when that goes is lost, and sent again, as are frames that are used up to find the next one.
//!
//! It may be in vain: frames that the other end sends with segmentation offload do not come through the instance (`veth_skb_is_eligible_for_gro`). Or
//! somebody switches it off meanwhile. Then it is let be for [`REST`].

use std::io;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Supervisor;
use super::poll::Timer;
use crate::ethtool::Ethtool;

/// How long an instance of ours is kept without use: longer than two questions of an engine that asks as seldom as it does.
const LINGER: Duration = Duration::from_secs(3);
/// How long nothing is tried after it was in vain.
const REST: Duration = Duration::from_secs(600);

/// The interface whose GRO we switched on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroOf {
    /// Its name.
    pub interface: String,
    /// Its index, as another one may have the name by now.
    pub index: u32,
}

impl GroOf {
    /// Switches it off again, if the interface is still there. True if there is nothing to do any more.
    pub fn switch_off(&self) -> bool {
        let Self { interface, index } = self;
        let switch = || -> io::Result<()> {
            let ethtool = Ethtool::new(interface)?;
            if ethtool.index()? == *index {
                ethtool.set_gro(false)?;
            }
            Ok(())
        };
        match switch() {
            Ok(()) => tracing::debug!(%interface, "GRO is off again"),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            Err(error) => {
                tracing::warn!(%interface, "GRO stays on: {error}; `ethtool -K {interface} gro off` switches it off");
                return false;
            }
        }
        true
    }
}

/// Whose GRO is, and since when it is of no use.
#[derive(Default)]
pub struct Gro {
    ours: Option<GroOf>,
    used: Option<Instant>,
    rest_until: Option<Instant>,
    /// It will be looked at.
    armed: bool,
    /// It was said that we do this.
    announced: bool,
}

impl Gro {
    /// What we switched on.
    pub fn ours(&self) -> Option<&GroOf> {
        self.ours.as_ref()
    }

    /// What a predecessor of ours did. Its engines tell us soon that they go round.
    pub fn adopt(&mut self, ours: Option<GroOf>) {
        self.ours = ours;
        self.used = Some(Instant::now());
    }

    /// An engine goes round, or is about to.
    pub fn is_of_use(&mut self, now: Instant) {
        self.used = Some(now);
    }

    /// Frames do not come through the instance.
    pub fn is_in_vain(&mut self, now: Instant) {
        if self.ours.is_some() {
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
        if self.gro.rests(now) {
            return Ok(());
        }
        let ethtool = Ethtool::new(&self.config.interface)?;
        if ethtool.offloads().gro {
            // There is none for another reason: the interface is down, or on its way up.
            if self.gro.ours.is_some() {
                self.gro.is_of_use(now);
            }
            return Ok(());
        }
        let index = ethtool.index()?;
        // Unless another interface has taken the place of ours.
        if (self.gro.ours.take()).is_some_and(|ours| ours.index == index) {
            // Somebody else switched it off.
            self.gro.rest_until = Some(now + REST);
            self.store_notes();
            return Ok(());
        }
        self.gro.ours = Some(GroOf {
            interface: self.config.interface.clone(),
            index,
        });
        let switched = match self.store_notes() {
            true => ethtool.set_gro(true),
            false => Err(io::Error::other("a successor could not be told of it")),
        };
        if switched.is_err() {
            self.gro.ours = None;
            self.store_notes();
            return switched;
        }
        self.gro.is_of_use(now);
        self.look_after_gro(now);
        let interface = &self.config.interface;
        let what = "GRO is on while there is a stream, so that engines can go round for its frames";
        // Streams for which that brings nothing try it now and then.
        match std::mem::replace(&mut self.gro.announced, true) {
            false => tracing::info!(%interface, "{what}"),
            true => tracing::debug!(%interface, "{what}"),
        }
        Ok(())
    }

    /// Has it looked at later, if it is ours.
    pub(super) fn look_after_gro(&mut self, now: Instant) {
        if self.gro.ours.is_some() && !self.gro.armed {
            self.gro.armed = true;
            self.poll.set_timer(now + LINGER, Timer::Gro);
        }
    }

    /// Switches it off if it was not used of late.
    pub(super) fn on_gro_timer(&mut self, now: Instant) {
        self.gro.armed = false;
        if !self.is_polled() && self.gro.is_unused(now) {
            self.end_gro();
        }
        self.look_after_gro(now);
    }

    /// An engine has stopped going round while there are many frames, which are faster without an instance.
    pub(super) fn spare_gro(&mut self) {
        if !self.is_polled() {
            self.end_gro();
        }
    }

    /// Whether an engine goes round.
    fn is_polled(&self) -> bool {
        self.engines.iter().any(|engine| engine.busy_poll.is_on())
    }

    /// Switches it off if it is ours.
    pub(super) fn end_gro(&mut self) {
        let Some(gro) = self.gro.ours.take() else {
            return;
        };
        if !gro.switch_off() {
            // Tried again.
            self.gro.ours = Some(gro);
        }
        self.store_notes();
    }
}
