//! What a supervisor knows, nobody else does, and its successor must: that the node is being drained, that GRO is ours to switch off, and the peers that were found. One
//! JSON document in a memfd of the store, written anew at every change. A successor that cannot read it begins without.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Supervisor;
use super::gro::GroOf;
use super::store::Name;
use crate::engine_link::Route;

/// Longer than any notes.
const LONGEST: usize = 4 << 20;

/// The document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// No new sends, no new ports.
    #[serde(default)]
    pub draining: bool,
    /// Where GRO was switched on by us.
    #[serde(default)]
    pub gro: Option<GroOf>,
    /// Peers that were found.
    #[serde(default)]
    pub found: Vec<Route>,
}

impl Notes {
    fn write(&self) -> io::Result<OwnedFd> {
        let fd = rustix::fs::memfd_create("portolan-notes", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        file.write_all(&serde_json::to_vec(self)?)?;
        Ok(file.into())
    }

    /// What was written; `None` if it cannot be read.
    pub fn read(fd: &OwnedFd) -> Option<Self> {
        let file = File::from(fd.as_fd().try_clone_to_owned().ok()?);
        let length = usize::try_from(file.metadata().ok()?.len()).ok()?;
        let mut bytes = vec![0; length.min(LONGEST)];
        file.read_exact_at(&mut bytes, 0).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

impl Supervisor {
    /// Writes down what has changed; false if it could not be.
    pub(super) fn store_notes(&mut self) -> bool {
        let notes = Notes {
            draining: self.draining,
            gro: self.gro.ours().cloned(),
            found: self.discovery.found().cloned().collect(),
        };
        self.store.remove(&Name::Notes);
        if notes == Notes::default() {
            return true;
        }
        let stored = notes.write().map_err(Into::into);
        let stored = stored.and_then(|fd| self.store.put(Name::Notes, &Arc::new(fd)));
        if let Err(error) = &stored {
            tracing::warn!("a successor would not know what was found or drained: {error}");
        }
        stored.is_ok()
    }

    /// Goes on with a predecessor's.
    pub(super) fn adopt_notes(&mut self, fd: OwnedFd) {
        if let Some(notes) = Notes::read(&fd) {
            self.draining = notes.draining;
            self.gro.adopt(notes.gro);
            for route in notes.found {
                if self.routes.contains_key(&route.node) || !self.discovery.remember(route.clone())
                {
                    continue;
                }
                self.follow_neighbour(&route);
                self.routes.insert(route.node, route);
            }
        }
        self.store.adopt(Name::Notes, Arc::new(fd));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_are_written() {
        let notes = Notes {
            draining: true,
            gro: Some(GroOf {
                interface: "eth0".into(),
                index: 2,
            }),
            found: vec![Route {
                node: 7,
                name: "seven".into(),
                mac: Some([2; 6]),
                address: Some("10.0.0.7".parse().unwrap()),
            }],
        };
        assert_eq!(Notes::read(&notes.write().unwrap()), Some(notes));
        let mut file =
            File::from(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(b"{\"draining\":7}").unwrap();
        assert_eq!(Notes::read(&file.into()), None);
    }
}
