//! After an engine's fault: tokens that the dead engine lost come back.
//!
//! A sound engine loses none, wherever it dies. A damaged one can end tokens without an event, or with one that names another: its
//! ledger calls them free, and the application would wait for them for ever, its peers for buffers. The successor says which tokens it
//! found ([`Inventory`]); those that an earlier engine was given, that are not among them, and of which no event told are lost. Nobody works
//! on their memory any more. A buffer is provided again; a send ends as perhaps delivered ([`Reason::Lost`]).
//!
//! Rejected: the engine finds them by itself (it cannot tell a token that the application has from one that was lost); words in which the
//! application says what it has (a store for each message, for what a fault in 1,000 needs).

use std::sync::atomic::{AtomicU64, Ordering, fence};

use portolan_abi::port::Inventory;

use crate::error::PortError;
use crate::event::Event;
use crate::port::Port;
use crate::status::{Reason, Status};
use crate::tokens::is_before;

impl Port {
    /// What is to be received before the takeover that `faults` counts is over: events that were published before it, then the ends of
    /// sends that were lost.
    pub(crate) fn next_after_fault(&mut self, faults: u32) -> Result<Option<Event>, PortError> {
        if let Some(event) = self.poll_ring()? {
            return Ok(Some(event));
        }
        let found = Found::read(&self.memory.engine().header().inventory, faults);
        let Some(found) = found.filter(|f| !is_before(self.received.next(), f.events)) else {
            return Ok(None);
        };
        let has = |slot| has(&found.receives_held, slot);
        while let Some((buffer, priority)) = self.receive_book.end_lost(found.provides, has) {
            self.anomalies += 1;
            // Refused only if the port is gone; then the buffer goes back to the arena.
            let _ = self.provide_receive_buffer(buffer, priority);
        }
        Ok(self.next_lost_send(&found))
    }

    fn next_lost_send(&mut self, found: &Found) -> Option<Event> {
        loop {
            let has = |slot| has(&found.sends_held, slot);
            let token = self.send_book.lost(found.sends, has)?;
            self.anomalies += 1;
            let event = self.ended(token, Status::MaybeDelivered(Reason::Lost));
            if event.is_some() {
                return event;
            }
        }
    }
}

/// A private copy of an [`Inventory`].
struct Found {
    sends: u32,
    provides: u32,
    events: u32,
    sends_held: Vec<u64>,
    receives_held: Vec<u64>,
}

impl Found {
    /// `None` if it is not that of this takeover: the engine is of a version that takes none, or the next one is being written.
    fn read(inventory: &Inventory, faults: u32) -> Option<Self> {
        let is_it = || inventory.of.load(Ordering::Acquire) == faults;
        let copy = |words: &[AtomicU64]| -> Vec<u64> {
            words
                .iter()
                .map(|word| word.load(Ordering::Relaxed))
                .collect()
        };
        if !is_it() {
            return None;
        }
        let found = Self {
            sends: inventory.sends.load(Ordering::Relaxed),
            provides: inventory.provides.load(Ordering::Relaxed),
            events: inventory.events.load(Ordering::Relaxed),
            sends_held: copy(&inventory.sends_held),
            receives_held: copy(&inventory.receives_held),
        };
        // SYNC(inventory)
        fence(Ordering::Acquire);
        is_it().then_some(found)
    }
}

fn has(words: &[u64], slot: u32) -> bool {
    words
        .get(slot as usize / 64)
        .is_some_and(|word| word >> (slot % 64) & 1 == 1)
}
