//! The configuration: read once, checked once against the machine it is for, immutable ever after.
//!
//! What is wrong is said all at once, one line each: `FILE:LINE: what; what to do`.

mod acl;
mod address;
mod check;
mod checker;
mod discovery;
mod engine;
mod file;
mod metrics;
mod places;
mod quota;
mod recovery;
mod transport;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use portolan_abi::ledger::LedgerGeometry;
use portolan_transport::policy::Policy;
use serde::Deserialize;

pub use acl::{Acl, Credentials, PortSet, Subject};
pub use discovery::DiscoveryMode;
pub use places::{Key, Places};
pub use quota::{Amounts, Exceeded, Quotas, Resource};

use super::escalation::Bounds;
use super::surroundings::{Account, Interface, Surroundings};
use crate::engine_link::{Encap, Wait};
use crate::logging::Level;
use crate::transport_policy::TransportPolicy;

/// How the NIC and the UMEM exchange frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyMode {
    /// Zero-copy if the driver can.
    #[default]
    Auto,
    /// The kernel copies.
    Copy,
    /// The NIC works on the UMEM, or the daemon does not start.
    ZeroCopy,
}

/// Where the XDP program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// In the driver if it can, else in the stack; on a veth with one queue in the stack, which is faster there.
    #[default]
    Auto,
    /// In the driver, or the daemon does not start.
    Native,
    /// In the network stack.
    Generic,
}

/// Whether engines may go round for frames themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BusyPolling {
    /// On a veth, when there are many frames and it brings more of them.
    #[default]
    Auto,
    /// On a veth, whenever there are many frames.
    Always,
    /// The kernel always does.
    Never,
}

/// A node we may talk to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its id.
    pub id: u16,
    /// Its name.
    pub name: String,
    /// Its address, for UDP.
    pub address: Option<IpAddr>,
    /// Its MAC if given; for UDP otherwise the kernel's neighbour table knows it.
    pub mac: Option<[u8; 6]>,
}

/// Limits on what clients may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Peer nodes with credit at the same time.
    pub peers: u32,
    /// Streams per engine and direction.
    pub streams: u32,
    /// Open ports.
    pub ports: u32,
    /// Arena of one port, bytes.
    pub arena_bytes_per_port: u64,
    /// Arenas of all ports, bytes.
    pub arena_bytes_total: u64,
    /// Connections on the socket.
    pub clients: usize,
}

/// How engines are watched and replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// CPU time of its own after which an engine that does not come round hangs, microseconds.
    pub hang_after_us: u64,
    /// Wall time after which an engine that is stopped or blocked is stuck, microseconds.
    pub stuck_after_us: u64,
    /// It is asked for a sign of life before.
    pub challenge: bool,
    /// A standby is kept ready.
    pub standby: bool,
    /// From a death to the start of the next standby.
    pub standby_after: Duration,
    /// What is replaced when.
    pub escalation: Bounds,
}

/// The node's configuration. Only [`Config::parse`] makes one.
#[derive(Clone, Debug)]
pub struct Config {
    /// The cluster's name.
    pub cluster: String,
    /// How frames travel.
    pub encap: Encap,
    /// UDP port of queue 0.
    pub udp_port: u16,
    /// This node's id.
    pub node: u16,
    /// Its name.
    pub name: String,
    /// The socket applications connect to.
    pub socket: PathBuf,
    /// Its permissions.
    pub socket_mode: u32,
    /// Its group.
    pub socket_group: Option<u32>,
    /// Whom engines run as: never root.
    pub user: Account,
    /// The interface's name.
    pub interface: String,
    /// The interface as it was found.
    pub interface_facts: Interface,
    /// Our address, for UDP.
    pub address: Option<IpAddr>,
    /// The NIC queues, one engine each.
    pub queues: Vec<u32>,
    /// Copying or not.
    pub copy_mode: CopyMode,
    /// Where the XDP program runs.
    pub xdp_mode: XdpMode,
    /// Whether engines may go round for frames themselves.
    pub busy_polling: BusyPolling,
    /// How other nodes are found.
    pub discovery: DiscoveryMode,
    /// How long idle processors may take to wake, if that is bounded.
    pub cpu_latency_us: Option<u32>,
    /// How engines wait.
    pub wait: Wait,
    /// For how long after a message their processors are kept from sleeping, if they sleep themselves.
    pub keep_awake: Duration,
    /// Cores of the engines, in order; empty: wherever the scheduler likes.
    pub cores: Vec<usize>,
    /// UMEM frames of each engine, 4 KiB each.
    pub umem_frames: u32,
    /// Deadline of a send that has none.
    pub default_timeout_ms: u64,
    /// The transport's policy as it was chosen.
    pub transport: TransportPolicy,
    /// The policy itself, valid.
    pub policy: Policy,
    /// Limits.
    pub limits: Limits,
    /// How engines are watched and replaced.
    pub recovery: Recovery,
    /// Other nodes, by id.
    pub peers: Vec<Peer>,
    /// Who may open ports.
    pub acl: Acl,
    /// How much is logged.
    pub log_level: Level,
    /// The file as it was written, for naming what another differs in.
    pub written: toml::Table,
    /// Where metrics are to be had by HTTP, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// What each user may have at the same time.
    pub quotas: Quotas,
    /// Where in the file that is said.
    pub places: Places,
}

impl Config {
    /// Checks the text of a configuration file. `file` is its name for messages.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(
        file: &Path,
        text: &str,
        surroundings: &dyn Surroundings,
    ) -> Result<Self, ConfigErrors> {
        check::check(file, text, surroundings)
    }

    /// Reads and checks a configuration file.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(file: &Path, surroundings: &dyn Surroundings) -> Result<Self, ConfigErrors> {
        let text = std::fs::read_to_string(file).map_err(|error| {
            let hint = "check the path and its permissions";
            ConfigErrors::single(file, None, format!("cannot be read: {error}; {hint}"))
        })?;
        Self::parse(file, &text, surroundings)
    }

    /// Number of engines.
    pub fn engines(&self) -> u8 {
        self.queues.len() as u8 // at most 64, checked
    }

    /// The queue's index of the engine that owns a port.
    pub fn engine_of(&self, port: u16) -> usize {
        usize::from(port) % self.queues.len()
    }

    /// The core that an engine is bound to, if it is, and whether another one is bound to the same.
    pub fn core_of(&self, engine: u8) -> (Option<usize>, bool) {
        core_of(&self.cores, engine)
    }

    /// The longest IP packet or Ethernet payload that engines send and receive.
    pub fn mtu(&self) -> u16 {
        let longest = crate::engine_link::MAX_MTU;
        self.interface_facts.mtu.min(u32::from(longest)) as u16
    }

    /// UMEM frames of an engine for receiving: three quarters. At most 32 (on a veth 128) transmit descriptors are outstanding, so sending
    /// needs little.
    pub fn rx_frames(&self) -> u32 {
        self.umem_frames / 4 * 3
    }

    /// Layout of each engine's ledger, for a UMEM of `frames` frames.
    pub fn ledger_geometry(&self, frames: u32) -> LedgerGeometry {
        // A peer node has one record per engine of its own; eight is plenty, and a table that is full refuses new peers only.
        let nodes = self.limits.peers.max(self.peers.len() as u32) + 1;
        LedgerGeometry {
            peers: nodes * 8,
            send_streams: self.limits.streams,
            receive_streams: self.limits.streams,
            frames,
        }
    }

    /// Hash of the cluster's name (FNV-1a): nodes of other clusters are not listened to.
    pub fn cluster_id(&self) -> u64 {
        self.cluster
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            })
    }
}

/// One complaint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1; `None` when the file as a whole is meant.
    pub line: Option<usize>,
    /// What is wrong and what to do, in one line.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}", self.message)
    }
}

/// Everything that is wrong with a configuration; never empty. One line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl ConfigErrors {
    fn single(file: &Path, line: Option<usize>, message: String) -> Self {
        Self(vec![ConfigError {
            file: file.to_owned(),
            line,
            message,
        }])
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

fn core_of(cores: &[usize], engine: u8) -> (Option<usize>, bool) {
    let core = cores.get(usize::from(engine)).copied();
    let there = cores.iter().filter(|there| Some(**there) == core);
    (core, there.count() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Engines on cores 3, 5 and 3; on none. Expect: the first and the third share one; whoever is bound to none shares none.
    #[test]
    fn engines_on_one_core_share_it() {
        let of = |engine| core_of(&[3, 5, 3], engine);
        assert_eq!(
            [0, 1, 2].map(of),
            [(Some(3), true), (Some(5), false), (Some(3), true)]
        );
        assert_eq!(core_of(&[], 0), (None, false));
    }
}
