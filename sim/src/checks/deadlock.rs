//! Work that can go on does.
//!
//! While faults last nothing is demanded. Once they are over, some send ends or some message is committed at least every
//! `patience_ns` as long as anything waits, and all is over within `bound_ns`.

use portolan_transport::host::SendStatus;
use portolan_transport::ident::Nanos;

use super::{Check, Verdict};
use crate::harness::book::{Message, Route};

/// The checker.
pub struct Deadlock {
    patience_ns: Nanos,
    bound_ns: Nanos,
    healed: Option<Nanos>,
    newest: Nanos,
}

impl Deadlock {
    /// The longest pause, and the longest time to the end of everything, both from when the faults are over.
    pub fn new(patience_ns: Nanos, bound_ns: Nanos) -> Self {
        Self {
            patience_ns,
            bound_ns,
            healed: None,
            newest: 0,
        }
    }
}

impl Check for Deadlock {
    fn name(&self) -> &'static str {
        "deadlock"
    }

    fn committed(
        &mut self,
        now: Nanos,
        _id: u64,
        _message: Option<&Message>,
        _route: Route,
        _bytes: &[u8],
    ) -> Verdict {
        self.newest = now;
        Ok(())
    }

    fn completed(
        &mut self,
        now: Nanos,
        _id: u64,
        _message: &Message,
        _status: SendStatus,
    ) -> Verdict {
        self.newest = now;
        Ok(())
    }

    fn healed(&mut self, now: Nanos) {
        self.healed = Some(now);
        self.newest = now;
    }

    fn passed(&mut self, now: Nanos, waiting: usize) -> Verdict {
        let Some(healed) = self.healed.filter(|_| waiting > 0) else {
            return Ok(());
        };
        let (idle, all) = (now.saturating_sub(self.newest), now.saturating_sub(healed));
        if idle > self.patience_ns {
            return Err(format!(
                "nothing ends for {} ms, {} ms after the last fault; {waiting} sends wait",
                idle / 1_000_000,
                all / 1_000_000
            ));
        }
        if all > self.bound_ns {
            return Err(format!(
                "{waiting} sends wait {} ms after the last fault",
                all / 1_000_000
            ));
        }
        Ok(())
    }
}
