//! Whether going round brings more frames than come by themselves.
//!
//! | a trial, from the look on with which we go round | |
//! |---|---|
//! | more frames in [`TRIAL`] looks than before, after [`SETTLING`] | it pays, for [`BELIEVED_NS`] and longer; then it is compared anew |
//! | not more, or plainly fewer after [`SHORT_TRIAL`] | it does not, for [`RETRY_NS`] and longer; or until the stream pauses, as the next one may be another, but not once it was so long as [`LONGEST_NS`] |
//! | ended as there were few frames, and from the beginning | the same: perhaps they come no more because of us |
//! | ended as there were few frames later | it was none |
//!
//! **A pause is no evidence.** Who sends for some 50 ms at a time would be told in one of these that it brings nothing, and have little of what it brings for seconds. So
//! looks with few frames do not count, unless the core is not ours alone: there it is the other engine's turn as well, and no pause.

use portolan_transport::ident::Nanos;

use super::CALM;

/// Looks that are compared with those before; the first ones are not, as what comes then had been kept back.
pub const TRIAL: u32 = 32;
pub const SETTLING: u32 = 16;
/// So many of them are enough where there are fewer than eight frames for nine of before.
pub const SHORT_TRIAL: u32 = 8;
const WORSE: (u64, u64) = (9, 8);
/// It pays if there are more than thirty-three for thirty-two.
const BETTER: (u64, u64) = (33, 32);
/// How long a trial is believed that went well, and one that did not: twice as long each time (of the second, each time in a row), up to the third,
/// until there were not many frames for [`CALM_NS`]. The second is not long at first, as what shares a machine with us may decide a trial the wrong way (docs/tuning.md);
/// nor is it short, as a trial takes some 50 ms in which a stream may be a quarter slower: 3 % of the time between two.
const BELIEVED_NS: Nanos = 1_000_000_000;
const RETRY_NS: Nanos = 500_000_000;
const LONGEST_NS: Nanos = 8_000_000_000;
const CALM_NS: Nanos = 1_000_000_000;
/// So long without many frames is a pause: another stream may come after it, also where what came meanwhile is more than few.
const QUIET_NS: Nanos = 4_000_000;

/// Frames over some time.
#[derive(Clone, Copy, Default)]
pub struct Rate {
    /// So many.
    pub frames: u64,
    /// In so long.
    pub ns: Nanos,
}

impl Rate {
    fn add(&mut self, more: Self) {
        self.frames = self.frames.saturating_add(more.frames);
        self.ns = self.ns.saturating_add(more.ns);
    }

    /// Counts what was long ago for less.
    fn fade(&mut self) {
        if self.ns > u64::from(2 * TRIAL) * 1_000_000 {
            (self.frames, self.ns) = (self.frames / 2, self.ns / 2);
        }
    }

    /// Whether there are more of these than so many for so many of the other.
    fn beats(self, other: Self, (more, than): (u64, u64)) -> bool {
        let ours = u128::from(self.frames) * u128::from(other.ns) * u128::from(than);
        let theirs = u128::from(other.frames) * u128::from(self.ns) * u128::from(more);
        ours > theirs
    }
}

/// How that is for the core that we have, or have in turns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// Less than it takes to go on.
    Few,
    /// Neither.
    Some,
    /// As it takes to ask.
    Many,
}

/// What came of a trial.
#[derive(Clone, Copy, Default)]
enum Verdict {
    #[default]
    Open,
    /// For so long.
    Pays(Nanos),
    DoesNot,
}

/// Twice as long as the last time.
fn longer(last: Nanos, least: Nanos) -> Nanos {
    last.saturating_mul(2).clamp(least, LONGEST_NS)
}

/// Compares what came by itself with what came since we go round.
#[derive(Default)]
pub struct Judge {
    /// The core is ours: that there are few frames is the sender's doing.
    alone: bool,
    /// Of looks that were for asking.
    before: Rate,
    /// Since it settled.
    now: Rate,
    /// Looks since we go round.
    looks: u32,
    verdict: Verdict,
    /// Not asked before, or before a pause.
    rest_until: Nanos,
    or_pause: bool,
    /// How long the last trial that went well is believed; the last one that did not, or 0 after one that did.
    believed: Nanos,
    rested: Nanos,
    /// How long there were not many frames.
    calm: Nanos,
}

impl Judge {
    /// Of an engine with its core to itself, or not.
    pub fn new(alone: bool) -> Self {
        Self {
            alone,
            ..Self::default()
        }
    }

    /// Whether we may ask.
    pub fn allows(&self, now: Nanos) -> bool {
        now >= self.rest_until
    }

    /// Frames come by themselves, and there were many of them `of_late`. They do not count any more once we have asked to `begin`.
    pub fn without(&mut self, seen: Rate, amount: Amount, of_late: bool, begins: bool) {
        if !of_late {
            self.before = Rate::default();
        } else if !begins && self.counts(amount) {
            self.before.add(seen);
            self.before.fade();
        }
        if amount == Amount::Many {
            self.calm = 0;
        } else {
            self.calm = self.calm.saturating_add(seen.ns);
            if self.or_pause && self.calm >= QUIET_NS {
                self.rest_until = 0;
            }
            if self.calm >= CALM_NS {
                (self.believed, self.rested) = (0, 0);
            }
        }
    }

    /// Whether a look says something: not of a pause.
    fn counts(&self, amount: Amount) -> bool {
        !self.alone || amount != Amount::Few
    }

    /// We go round, perhaps with few frames for so long that it `ends`. Says if we should not any more.
    pub fn with(&mut self, now: Nanos, seen: Rate, amount: Amount, ends: bool) -> bool {
        match self.verdict {
            Verdict::Open => {}
            Verdict::Pays(until) => return now >= until,
            Verdict::DoesNot => return true,
        }
        if !self.counts(amount) {
            let in_vain = ends && self.looks < CALM;
            if in_vain {
                self.rest(now);
            }
            return in_vain;
        }
        self.looks = self.looks.saturating_add(1);
        if self.looks <= SETTLING {
            return false;
        }
        self.now.add(seen);
        let enough = self.alone && self.looks >= SETTLING + SHORT_TRIAL;
        let worse = enough && self.before.beats(self.now, WORSE);
        if self.looks < SETTLING + TRIAL && !worse {
            return false;
        }
        let pays = self.now.beats(self.before, BETTER);
        match pays {
            true => {
                (self.believed, self.rested) = (longer(self.believed, BELIEVED_NS), 0);
                self.verdict = Verdict::Pays(now.saturating_add(self.believed));
            }
            false => self.rest(now),
        }
        !pays
    }

    /// It does not pay.
    fn rest(&mut self, now: Nanos) {
        self.rested = longer(self.rested, RETRY_NS);
        self.verdict = Verdict::DoesNot;
        self.rest_until = now.saturating_add(self.rested);
        self.or_pause = self.alone && self.rested < LONGEST_NS;
    }

    /// We begin to, or end.
    pub fn changed(&mut self, begins: bool) {
        (self.looks, self.now, self.verdict) = (0, Rate::default(), Verdict::Open);
        if !begins {
            self.before = Rate::default();
        }
    }
}
