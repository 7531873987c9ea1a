//! What the threads of the load are told, and tell while they run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portolan::{Event, Port, PortError};

/// How long receivers are asked before a thread looks at its orders.
const CONFIRM: Duration = Duration::from_millis(20);

/// Orders to every thread of the load.
#[derive(Debug, Default)]
pub struct Orders {
    /// No message is begun any more.
    pub quiet: AtomicBool,
    /// Every send has ended; receivers are asked what they have.
    pub confirm: AtomicBool,
    /// Take what still waits and end.
    pub leave: AtomicBool,
    failure: Mutex<Option<String>>,
}

impl Orders {
    /// A thread gives up; the first to do so is remembered.
    pub fn give_up(&self, why: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(why);
    }

    /// Why a thread gave up, if one did.
    pub fn failure(&self) -> Option<String> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::SeqCst)
    }

    pub fn is_confirming(&self) -> bool {
        self.confirm.load(Ordering::SeqCst)
    }

    pub fn is_over(&self) -> bool {
        self.leave.load(Ordering::SeqCst)
    }
}

/// How far one port of the load has come.
#[derive(Debug, Default)]
pub struct Meter {
    pub received: AtomicU64,
    pub outstanding: AtomicU64,
    /// Sends that ended otherwise than delivered.
    pub failed: AtomicU64,
    /// Messages changed, doubled, out of order or missing, so far.
    pub troubles: AtomicU64,
    /// Events that made no sense to the library.
    pub anomalies: AtomicU64,
    /// Messages that end-to-end integrity reported to the application.
    pub reported: AtomicU64,
    /// Messages called delivered that the receiving library has not confirmed.
    pub unconfirmed: AtomicU64,
}

impl Meter {
    /// What integrity still waits for at this port.
    pub fn integrity(&self, port: &mut Port, orders: &Orders) -> Result<(), PortError> {
        if orders.is_confirming() {
            port.confirm(CONFIRM)?;
        }
        self.unconfirmed.store(port.unconfirmed(), Ordering::SeqCst);
        Ok(())
    }

    /// An event that may be a report.
    pub fn event(&self, event: &Event) {
        if let Event::Integrity(report) = event {
            self.reported.fetch_add(report.messages, Ordering::Relaxed);
        }
    }

    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}
