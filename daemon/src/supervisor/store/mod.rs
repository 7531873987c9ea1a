//! What must survive the supervisor: every descriptor it holds, by name, in its service manager's hands.
//!
//! **Problem.** A supervisor may be killed, restarted or replaced by another build while engines move messages for applications.
//! Everything they work on is a descriptor: memory, sockets, links, pidfds, connections. If they close, the memory goes, the engines
//! leave, the applications lose their ports.
//!
//! **Idea.** systemd keeps descriptors for a service (`FDSTORE=1`, sd_notify(3)) and hands them to its next process
//! (`LISTEN_FDS`). Each descriptor is stored *before* the answer that makes it matter, and the answer goes out before it is taken
//! out again; so at any instruction the store holds enough, and perhaps something more, which the successor recognises and drops.
//! What a descriptor is, its [`Name`] says; the rest is in the ledgers (a port's life) and in the memory itself (its layout). Nothing
//! else is written down: names plus ledgers suffice.
//!
//! The store also is the book for replacing the running program by another in place (`handover.rs`), which needs no manager.
//!
//! **Full.** systemd drops what does not fit without a word. So we count: it says how many there may be in `$FDSTORE`, and one
//! more is an error before anything depends on it.
//!
//! **Rejected.** A file with the state: it would be a second truth beside the descriptors. Asking systemd to confirm
//! (`BARRIER=1`) before each answer: it costs a round trip through a busy process, and systemd reads its queue of notifications to
//! the end before it looks at the death of who sent them.
//!
//! | file | noun |
//! |---|---|
//! | `names.rs` | what a stored descriptor is |
//! | `notify.rs` | the manager, as it is talked to |
//! | `inherit.rs`, `predecessor.rs` | what a predecessor left us; sorted |
//! | `adopt.rs` | going on with it |
//! | `handover.rs`, `abi.rs` | the running program replaced by another; which ones fit |
//! | `manifest.rs` | which build and configuration the rest belongs to |
//! | `points.rs` | places to die at, for tests |

pub mod abi;
mod adopt;
pub mod handover;
pub mod inherit;
pub mod manifest;
pub mod names;
pub mod notify;
pub mod points;
pub mod predecessor;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub use names::{Name, PortPart};
use notify::Notifier;

/// Most bytes of names: they are handed over in one environment variable, which has at most 128 KiB. Each is counted with
/// [`NAME_OVERHEAD`].
const MOST_NAME_BYTES: usize = 120 * 1024;
/// A colon, and for a handover in place the descriptor's number and its separator.
const NAME_OVERHEAD: usize = 8;

/// Why a descriptor cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The manager would drop it.
    #[error(
        "the service manager keeps at most {0} descriptors for us; raise FileDescriptorStoreMax= of the unit"
    )]
    Full(usize),
    /// The names would not fit where a successor finds them.
    #[error("there are too many descriptors to hand over; close ports or connections")]
    TooManyNames,
    /// The manager did not take it.
    #[error("the service manager does not take our descriptors: {0}")]
    Manager(#[from] io::Error),
}

/// The store, as far as we know it: what we put in and what we inherited.
#[derive(Default)]
pub struct Store {
    manager: Option<Notifier>,
    kept: BTreeMap<Name, Arc<OwnedFd>>,
    name_bytes: usize,
}

impl Store {
    /// With a manager that keeps it, or without.
    pub fn new(manager: Option<Notifier>) -> Self {
        Self {
            manager,
            ..Self::default()
        }
    }

    /// Does somebody keep it when we are gone?
    pub fn outlives_us(&self) -> bool {
        self.manager.as_ref().is_some_and(|m| m.store_max() > 0)
    }

    /// What is in it.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &Arc<OwnedFd>)> {
        self.kept.iter()
    }

    /// Notes what a predecessor left in the manager's store and we go on using.
    pub fn adopt(&mut self, name: Name, fd: Arc<OwnedFd>) {
        self.name_bytes += cost(&name);
        self.kept.insert(name, fd);
    }

    /// Stores one descriptor.
    ///
    /// # Errors
    /// It is not stored, so nothing may depend on it.
    pub fn put(&mut self, name: Name, fd: &Arc<OwnedFd>) -> Result<(), StoreError> {
        let bytes = self.name_bytes + cost(&name);
        if bytes > MOST_NAME_BYTES {
            return Err(StoreError::TooManyNames);
        }
        if let Some(manager) = self.manager.as_ref().filter(|m| m.store_max() > 0) {
            if self.kept.len() >= manager.store_max() {
                return Err(StoreError::Full(manager.store_max()));
            }
            let text = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0");
            manager.say(&text, Some(fd.as_fd()))?;
        }
        self.name_bytes = bytes;
        self.kept.insert(name, Arc::clone(fd));
        Ok(())
    }

    /// Stores all of these, or none.
    ///
    /// # Errors
    /// None is stored, so nothing may depend on them.
    pub fn put_all(&mut self, all: &[(Name, Arc<OwnedFd>)]) -> Result<(), StoreError> {
        for (done, (name, fd)) in all.iter().enumerate() {
            if let Err(error) = self.put(*name, fd) {
                for (name, _) in all.iter().take(done) {
                    self.remove(name);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes a descriptor out again; what is not there is fine.
    pub fn remove(&mut self, name: &Name) {
        if self.kept.remove(name).is_none() {
            return;
        }
        self.name_bytes -= cost(name);
        self.forget(&name.to_string());
    }

    /// Takes out a process of an engine.
    pub fn remove_process(&mut self, queue: u8, launch: u32) {
        self.remove_all(|name| match *name {
            Name::Process(q, l) | Name::Link(q, l, _) => (q, l) == (queue, launch),
            _ => false,
        });
    }

    /// Takes out everything that `unwanted` says.
    fn remove_all(&mut self, unwanted: impl Fn(&Name) -> bool) {
        let names: Vec<Name> = self.kept.keys().filter(|n| unwanted(n)).copied().collect();
        for name in names {
            self.remove(&name);
        }
    }

    /// Takes something out of the manager's store that is not in our book.
    pub fn forget(&self, name: &str) {
        if let Some(manager) = self.manager.as_ref().filter(|m| m.store_max() > 0)
            && let Err(error) = manager.say(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None)
        {
            // A successor finds something more than it needs.
            tracing::warn!(name, %error, "the service manager keeps a descriptor we are done with");
        }
    }

    /// Empties it: the node stops for good.
    pub fn clear(&mut self) {
        self.remove_all(|_| true);
    }

    /// Tells the manager that we come round.
    pub fn alive(&self) {
        if let Some(manager) = &self.manager
            && let Err(error) = manager.say("WATCHDOG=1", None)
        {
            tracing::warn!(%error, "the service manager is given no sign of life");
        }
    }

    /// Tells the manager that we serve.
    pub fn ready(&self) {
        let Some(manager) = &self.manager else {
            return;
        };
        let text = format!("READY=1\nMAINPID={}", std::process::id());
        if let Err(error) = manager.say(&text, None) {
            tracing::warn!(%error, "the service manager cannot be told that we are ready");
        }
    }
}

fn cost(name: &Name) -> usize {
    name.to_string().len() + NAME_OVERHEAD
}
