//! Alarms: times at which an application wants to hear from its port.

use std::time::Duration;

use rustix::time::ClockId;

use crate::error::TooManyAlarms;

/// Most alarms of a port.
pub const MAX_ALARMS: usize = 64;

/// Names an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AlarmId(u64);

/// CLOCK_MONOTONIC in nanoseconds, as the engine counts.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec)
        .unwrap_or(0)
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// `after` from now; `u64::MAX` stands for never.
pub(crate) fn deadline_ns(after: Duration) -> u64 {
    now_ns().saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX))
}

/// The alarms that are set. Few, so a list does.
#[derive(Debug)]
pub(crate) struct Alarms {
    set: Vec<(u64, AlarmId)>,
    next: u64,
}

impl Alarms {
    pub(crate) fn new() -> Self {
        Self {
            set: Vec::with_capacity(MAX_ALARMS),
            next: 1,
        }
    }

    pub(crate) fn set(&mut self, at_ns: u64) -> Result<AlarmId, TooManyAlarms> {
        if self.set.len() == MAX_ALARMS {
            return Err(TooManyAlarms);
        }
        let id = AlarmId(self.next);
        self.next += 1;
        self.set.push((at_ns, id));
        Ok(id)
    }

    pub(crate) fn cancel(&mut self, id: AlarmId) -> bool {
        let before = self.set.len();
        self.set.retain(|&(_, set)| set != id);
        self.set.len() != before
    }

    /// When the earliest goes off.
    pub(crate) fn earliest(&self) -> Option<u64> {
        self.set.iter().map(|&(at, _)| at).min()
    }

    /// Is any set?
    #[inline]
    pub(crate) fn any_set(&self) -> bool {
        !self.set.is_empty()
    }

    /// Takes the earliest that is due. Reads the clock only if any is set.
    pub(crate) fn take_due(&mut self) -> Option<AlarmId> {
        let i = (0..self.set.len()).min_by_key(|&i| self.set[i])?;
        (self.set[i].0 <= now_ns()).then(|| self.set.swap_remove(i).1)
    }

    pub(crate) fn any_due(&self) -> bool {
        self.earliest().is_some_and(|at| at <= now_ns())
    }
}
