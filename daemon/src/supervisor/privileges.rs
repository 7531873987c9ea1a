//! The least set of capabilities (ARCHITECTURE.md, *Trust boundaries*), and what to say when one is missing.

use std::io;

use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Capabilities we keep, what they are called, and whether we cannot start without.
const KEPT: [(CapabilitySet, &str, bool); 8] = [
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN", true),
    (CapabilitySet::BPF, "CAP_BPF", true),
    (CapabilitySet::NET_RAW, "CAP_NET_RAW", true),
    (CapabilitySet::SETUID, "CAP_SETUID", true),
    (CapabilitySet::SETGID, "CAP_SETGID", true),
    (CapabilitySet::KILL, "CAP_KILL", true),
    // The watchdog's.
    (CapabilitySet::SYS_NICE, "CAP_SYS_NICE", false),
    // Or a memlock limit above the UMEM's size.
    (CapabilitySet::IPC_LOCK, "CAP_IPC_LOCK", false),
];

/// Descriptors we want room for: clients, ports, engines.
const DESCRIPTORS: u64 = 65_536;

fn kept() -> CapabilitySet {
    KEPT.iter()
        .fold(CapabilitySet::empty(), |set, (one, _, _)| set | *one)
}

/// The names of capabilities that are needed and missing in `have`.
fn missing_in(have: CapabilitySet) -> Vec<&'static str> {
    KEPT.iter()
        .filter(|(one, _, needed)| *needed && !have.contains(*one))
        .map(|(_, name, _)| *name)
        .collect()
}

/// Do we have what we need?
///
/// # Errors
/// One line: what is missing and what to do.
pub fn check() -> Result<(), String> {
    let have = rustix::thread::capabilities(None)
        .map_err(|error| format!("capabilities cannot be read: {error}"))?;
    let missing = missing_in(have.effective);
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "no privilege: {} missing; run as root, or grant them (systemd: AmbientCapabilities=)",
        missing.join(", ")
    ))
}

/// Gives up every capability that is not kept, for good.
///
/// # Errors
/// The system's.
pub fn drop_the_rest() -> io::Result<()> {
    let have = rustix::thread::capabilities(None)?;
    if have.effective.contains(CapabilitySet::SETPCAP) {
        for number in 0..64 {
            let one = CapabilitySet::from_bits_retain(1 << number);
            if kept().contains(one) {
                continue;
            }
            match rustix::thread::remove_capability_from_bounding_set(one) {
                Ok(()) => {}
                // Beyond the last capability this kernel knows.
                Err(rustix::io::Errno::INVAL) => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    let keep = have.permitted & kept();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: keep,
            permitted: keep,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(())
}

/// Has a program that is executed now keep what we keep, also for a user that is not root. [`drop_the_rest`] undoes it.
///
/// # Errors
/// The system's.
pub fn keep_across_exec() -> io::Result<()> {
    let have = rustix::thread::capabilities(None)?;
    let keep = have.permitted & kept();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: keep,
            permitted: keep,
            inheritable: keep,
        },
    )?;
    for (one, _, _) in KEPT {
        if keep.contains(one) {
            rustix::thread::configure_capability_in_ambient_set(one, true)?;
        }
    }
    Ok(())
}

/// Makes room for descriptors, as far as we are allowed to. Returns the limit.
pub fn raise_descriptor_limit() -> u64 {
    let now = rustix::process::getrlimit(Resource::Nofile);
    let soft = now.current.unwrap_or(u64::MAX);
    let hard = now.maximum.unwrap_or(u64::MAX);
    if soft >= DESCRIPTORS {
        return soft;
    }
    for (current, maximum) in [
        (DESCRIPTORS, hard.max(DESCRIPTORS)),
        (hard.min(DESCRIPTORS), hard),
    ] {
        let wanted = Rlimit {
            current: Some(current),
            maximum: Some(maximum),
        };
        if rustix::process::setrlimit(Resource::Nofile, wanted).is_ok() {
            return current;
        }
    }
    soft
}

/// May `bytes` be locked in memory?
///
/// # Errors
/// One line: what is missing and what to do.
pub fn check_memlock(bytes: u64) -> Result<(), String> {
    let have = rustix::thread::capabilities(None)
        .map_err(|error| format!("capabilities cannot be read: {error}"))?;
    let limit = rustix::process::getrlimit(Resource::Memlock).current;
    match limit {
        Some(limit) if limit < bytes && !have.effective.contains(CapabilitySet::IPC_LOCK) => {
            Err(format!(
                "RLIMIT_MEMLOCK is {limit} bytes where the UMEMs take {bytes}; raise it (systemd: LimitMEMLOCK=infinity), grant CAP_IPC_LOCK, or lower engine.umem_frames"
            ))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert!(missing_in(CapabilitySet::all()).is_empty());
        assert!(missing_in(kept() - CapabilitySet::IPC_LOCK).is_empty());
        let without = kept() - CapabilitySet::BPF - CapabilitySet::KILL;
        assert_eq!(missing_in(without), ["CAP_BPF", "CAP_KILL"]);
    }
}
