//! What a predecessor left us: descriptors and their names, from a service manager (sd_listen_fds(3)) or from the program that has
//! just replaced itself by us. An `unsafe` island: numbers from the environment become descriptors.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::manifest::{self, Manifest};
use super::names::Name;
use crate::supervisor::surroundings::Interface;

/// The first descriptor a manager passes.
pub const FIRST: RawFd = 3;
/// Inherited ones are moved here and above: engines get their link as descriptor 3.
const ABOVE: RawFd = 64;
/// What a program that replaces itself leaves: `number=name`, separated by colons.
pub const HANDOVER: &str = "PORTOLAN_HANDOVER";
/// How many a manager passes; whoever has a leisure begin at the first instruction looks for either (`supervisor/leisure/entry.rs`).
pub const LISTEN_FDS: &str = "LISTEN_FDS";
/// What they are called, in their order, separated by colons.
pub const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";

/// Descriptors by name.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Those whose names are ours.
    pub ours: Vec<(Name, OwnedFd)>,
    /// Names of others, which are closed again.
    pub unknown: Vec<String>,
    /// From the program we replaced, in the same process: its children are ours.
    pub in_place: bool,
}

impl Inherited {
    /// Takes over what the environment says. To be called once, before the process opens or closes anything by number.
    pub fn from_environment() -> Self {
        if let Ok(text) = std::env::var(HANDOVER) {
            return Self {
                in_place: true,
                ..Self::take(handed_over(&text))
            };
        }
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let own = std::process::id().to_string();
        if variable("LISTEN_PID") != own {
            return Self::default();
        }
        Self::take(listened(&variable(LISTEN_FDS), &variable(LISTEN_FDNAMES)))
    }

    fn take(named: Vec<(RawFd, String)>) -> Self {
        let mut inherited = Self::default();
        for (number, name) in named {
            let Some(fd) = claim(number) else {
                continue;
            };
            match name.parse() {
                Ok(name) => inherited.ours.push((name, fd)),
                Err(()) => inherited.unknown.push(name),
            }
        }
        inherited
    }

    /// The interface that a predecessor's memory, sockets and steering belong to, as it was then, and its name; if there is a manifest that says so.
    pub fn interface(&self) -> Option<(String, Interface)> {
        let (_, fd) = self.ours.iter().find(|(name, _)| *name == Name::Manifest)?;
        manifest::interface(&Manifest::read(fd).ok()?.basis)
    }

    /// Nothing at all?
    pub fn is_empty(&self) -> bool {
        self.ours.is_empty() && self.unknown.is_empty()
    }
}

/// Makes an inherited descriptor ours, moved out of the way and not inherited further.
fn claim(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: only asks about a number.
    if number < FIRST || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, meant for us by the environment, named once, and taken before this process opens anything else.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_dupfd_cloexec(&fd, ABOVE).ok()
}

/// From a manager: names in the order of the descriptors.
fn listened(count: &str, names: &str) -> Vec<(RawFd, String)> {
    let count: usize = count.parse().unwrap_or(0);
    (FIRST..)
        .zip(names.split(':').map(str::to_owned))
        .take(count)
        .collect()
}

/// From a predecessor in place.
fn handed_over(text: &str) -> Vec<(RawFd, String)> {
    let entry = |entry: &str| {
        let (number, name) = entry.split_once('=')?;
        Some((number.parse().ok()?, name.to_owned()))
    };
    let mut entries: Vec<(RawFd, String)> = text.split(':').filter_map(entry).collect();
    // Each number once: it becomes an owner.
    entries.sort();
    entries.dedup_by_key(|(number, _)| *number);
    entries
}

/// As [`handed_over`] reads it.
pub fn hand_over<'a>(entries: impl Iterator<Item = (&'a Name, &'a OwnedFd)>) -> String {
    let entries: Vec<String> = entries
        .map(|(name, fd)| format!("{}={name}", fd.as_raw_fd()))
        .collect();
    entries.join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_descriptors() {
        assert_eq!(
            listened("2", "a:b"),
            [(3, "a".to_owned()), (4, "b".to_owned())]
        );
        // Numbers and names that do not match: only what has both.
        assert_eq!(listened("3", "a").len(), 1);
        assert_eq!(listened("1", "a:b").len(), 1);
        assert!(listened("", "").is_empty());
    }

    #[test]
    fn a_handover_is_read_as_written() {
        let fd: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let text = hand_over([(&Name::Ledger(1), &fd), (&Name::Lock, &fd)].into_iter());
        let read = handed_over(&text);
        assert_eq!(read.len(), 1, "one number, one owner: {text}");
        assert_eq!(handed_over("7=lock:x:=:9=")[0], (7, "lock".to_owned()));
    }
}
