//! Frames to sockets: the XDP program, or a test's.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Steer, SteerConfig, SteerError};

use super::config::{Config, XdpMode};
use crate::engine_link::Encap;

/// How long another program may still be on the interface while who attached it dies.
const OCCUPIED_PATIENCE: Duration = Duration::from_millis(500);
/// The pause between two tries.
const OCCUPIED_PAUSE: Duration = Duration::from_millis(5);

/// What decides where frames go.
pub trait Steering {
    /// Our frames of a NIC queue go to this socket.
    ///
    /// # Errors
    /// One line: what and what to do.
    fn insert(&mut self, nic_queue: u32, xsk: BorrowedFd<'_>) -> Result<(), String>;

    /// Frames by reason.
    fn counters(&self) -> Vec<(String, u64)>;
}

/// No frames at all.
#[derive(Debug, Default)]
pub struct NoSteering;

impl Steering for NoSteering {
    fn insert(&mut self, _nic_queue: u32, _xsk: BorrowedFd<'_>) -> Result<(), String> {
        Ok(())
    }

    fn counters(&self) -> Vec<(String, u64)> {
        Vec::new()
    }
}

impl Steering for Steer {
    fn insert(&mut self, nic_queue: u32, xsk: BorrowedFd<'_>) -> Result<(), String> {
        Steer::insert(self, nic_queue, xsk).map_err(|error| error.to_string())
    }

    fn counters(&self) -> Vec<(String, u64)> {
        match Steer::counters(self) {
            Ok(counters) => counters
                .into_iter()
                .map(|(reason, packets)| (reason.name().to_owned(), packets))
                .collect(),
            Err(error) => {
                tracing::warn!(%error, "the steering counters cannot be read");
                Vec::new()
            }
        }
    }
}

/// NIC queues that steering serves: all up to the highest one configured.
pub fn steered_queues(config: &Config) -> u16 {
    // Queues are below 64, checked.
    config.queues.iter().copied().max().unwrap_or(0) as u16 + 1
}

/// Loads the program and attaches it to the interface.
///
/// # Errors
/// One line: what and what to do.
pub fn attach(config: &Config) -> Result<Steer, SteerError> {
    let (local_v4, local_v6) = match config.address {
        Some(IpAddr::V4(address)) => (Some(address), None),
        Some(IpAddr::V6(address)) => (None, Some(address)),
        None => (None, None),
    };
    let mut steer = Steer::load(&SteerConfig {
        encap: match config.encap {
            Encap::Ethernet => portolan_ebpf::Encap::Ethernet,
            Encap::Udp => portolan_ebpf::Encap::Udp,
        },
        ethertype: DEFAULT_ETHERTYPE,
        udp_base_port: config.udp_port,
        queues: steered_queues(config),
        local_mac: config.interface_facts.mac,
        local_v4,
        local_v6,
    })?;
    let interface = &config.interface;
    let first = match config.xdp_mode {
        XdpMode::Auto | XdpMode::Native => AttachMode::Native,
        XdpMode::Generic => AttachMode::Generic,
    };
    match attach_patiently(&mut steer, interface, first) {
        Err(
            error @ (SteerError::NoNative(_)
            | SteerError::Refused(..)
            | SteerError::TooFewQueues(_)),
        ) if config.xdp_mode == XdpMode::Auto => {
            tracing::warn!("{error}; trying generic mode, which is slower");
            attach_patiently(&mut steer, interface, AttachMode::Generic)?;
        }
        other => other?,
    }
    Ok(steer)
}

/// Attaches, and lets a predecessor finish dying: its program is there until the last copy of its link's descriptor is closed, also one
/// in a child that was just being started.
fn attach_patiently(
    steer: &mut Steer,
    interface: &str,
    mode: AttachMode,
) -> Result<(), SteerError> {
    let deadline = Instant::now() + OCCUPIED_PATIENCE;
    loop {
        match steer.attach(interface, mode) {
            Err(SteerError::Occupied(_)) if Instant::now() < deadline => {
                std::thread::sleep(OCCUPIED_PAUSE);
            }
            other => return other,
        }
    }
}
