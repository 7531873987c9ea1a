//! Frames to sockets: the XDP program, or a test's.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Frames, Steer, SteerConfig, SteerError};

use super::config::{Config, XdpMode};
use super::leisure::undisturbed;
use super::store::Name;
use crate::engine_link::Encap;

/// How long another program may still be on the interface while who attached it dies.
const OCCUPIED_PATIENCE: Duration = Duration::from_millis(500);
/// The pause between two tries.
const OCCUPIED_PAUSE: Duration = Duration::from_millis(5);

/// Frames of interfaces with this MTU fit a page with all that the kernel puts before and behind.
const PAGE_MTU: u32 = 3_500;

/// What decides where frames go.
pub trait Steering {
    /// Our frames of a NIC queue go to this socket.
    ///
    /// # Errors
    /// One line: what and what to do.
    fn insert(&mut self, nic_queue: u32, xsk: BorrowedFd<'_>) -> Result<(), String>;

    /// The next frame of ours on a NIC queue becomes a datagram for this UDP port ([`Steer::send_on_errand`]).
    ///
    /// # Errors
    /// One line: what and what to do.
    fn send_on_errand(&mut self, _nic_queue: u32, _port: u16) -> Result<(), String> {
        Err("nobody steers".to_owned())
    }

    /// Frames by reason.
    fn counters(&self) -> Vec<(String, u64)>;

    /// The index of the interface the program is on; 0: none; `None`: nobody knows.
    fn attached_to(&self) -> Option<u32> {
        None
    }

    /// Lets the program go and loads another for this configuration, which is on no interface yet and knows no socket.
    ///
    /// # Errors
    /// One line: what and what to do.
    fn load_anew(&mut self, _config: &Config) -> Result<(), String> {
        Ok(())
    }

    /// Puts the program onto the interface once more, with the sockets it knows. Tried once.
    ///
    /// # Errors
    /// One line: what and what to do.
    fn attach_again(&mut self, _config: &Config) -> Result<(), String> {
        Ok(())
    }

    /// What a successor needs; nothing while the program is on no interface.
    fn to_store(&self) -> Vec<(Name, OwnedFd)> {
        Vec::new()
    }
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

    fn send_on_errand(&mut self, nic_queue: u32, port: u16) -> Result<(), String> {
        Steer::send_on_errand(self, nic_queue, port).map_err(|error| error.to_string())
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

    fn attached_to(&self) -> Option<u32> {
        Steer::attached_to(self).ok()
    }

    fn load_anew(&mut self, config: &Config) -> Result<(), String> {
        // Loaded before the other is let go: if it cannot be, nothing has changed.
        let fresh = load(config).map_err(|error| error.to_string())?;
        self.detach();
        *self = fresh;
        Ok(())
    }

    fn attach_again(&mut self, config: &Config) -> Result<(), String> {
        self.detach();
        attach_in_any_mode(self, config, Duration::ZERO).map_err(|error| error.to_string())
    }

    fn to_store(&self) -> Vec<(Name, OwnedFd)> {
        match self.fds() {
            Ok(Some(fds)) => {
                let mut all = vec![
                    (Name::XdpLink, fds.link),
                    (Name::XdpProgram, fds.program),
                    (Name::XdpSockets, fds.sockets),
                    (Name::XdpCounters, fds.counters),
                ];
                all.extend(fds.errands.map(|fd| (Name::XdpErrands, fd)));
                all
            }
            Ok(None) => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "steering cannot be stored");
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
    let mut steer = load(config)?;
    attach_in_any_mode(&mut steer, config, OCCUPIED_PATIENCE)?;
    Ok(steer)
}

fn load(config: &Config) -> Result<Steer, SteerError> {
    let (local_v4, local_v6) = match config.address {
        Some(IpAddr::V4(address)) => (Some(address), None),
        Some(IpAddr::V6(address)) => (None, Some(address)),
        None => (None, None),
    };
    let frames = match first_mode(config) {
        AttachMode::Generic if config.interface_facts.mtu <= PAGE_MTU => Frames::OfOneBuffer,
        _ => Frames::OfSeveralBuffers,
    };
    let config = SteerConfig {
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
    };
    undisturbed(|| Steer::load_for(&config, frames))
}

/// Where the program runs, or is tried first.
///
/// Everywhere but on veth that is the driver. veth made an skb for each frame before its driver's XDP comes, which then copies it once more into
/// pages of its own and has a NAPI instance of its own go round. In generic mode the skb is what the program sees: a 64-byte message takes an
/// eighth less, a stream at MTU 1500 a third (docs/performance-history.md). But there veth loses which receive queue a frame is on, so of several
/// all would seem to come on the first.
fn first_mode(config: &Config) -> AttachMode {
    let facts = &config.interface_facts;
    match config.xdp_mode {
        XdpMode::Auto if facts.veth && facts.rx_queues == Some(1) => AttachMode::Generic,
        XdpMode::Auto | XdpMode::Native => AttachMode::Native,
        XdpMode::Generic => AttachMode::Generic,
    }
}

fn attach_in_any_mode(
    steer: &mut Steer,
    config: &Config,
    patience: Duration,
) -> Result<(), SteerError> {
    let interface = &config.interface;
    let first = first_mode(config);
    match attach_patiently(steer, interface, first, patience) {
        Err(
            error @ (SteerError::NoNative(_)
            | SteerError::Refused(..)
            | SteerError::TooFewQueues(_)),
        ) if config.xdp_mode == XdpMode::Auto && first == AttachMode::Native => {
            tracing::warn!("{error}; trying generic mode, which is slower");
            attach_patiently(steer, interface, AttachMode::Generic, patience)
        }
        other => other,
    }
}

/// Attaches, and lets a predecessor finish dying: its program is there until the last copy of its link's descriptor is closed, also one
/// in a child that was just being started.
fn attach_patiently(
    steer: &mut Steer,
    interface: &str,
    mode: AttachMode,
    patience: Duration,
) -> Result<(), SteerError> {
    let deadline = Instant::now() + patience;
    loop {
        match steer.attach(interface, mode) {
            Err(SteerError::Occupied(_)) if Instant::now() < deadline => {
                std::thread::sleep(OCCUPIED_PAUSE);
            }
            other => return other,
        }
    }
}
