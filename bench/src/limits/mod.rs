//! Limits: what the machine gives to anyone who does no more than is unavoidable.
//!
//! | subject | what it does | what it says |
//! |---|---|---|
//! | `limit-raw-xdp` | two processes, a core each, spinning; frames out of and into AF_XDP sockets | no daemon is faster than its wire |
//! | `limit-switch` | two applications on one core with such a memory between them, which give the core away with `sched_yield` | what it costs that another process has its turn: a relay cannot do without one on each core |
//! | `limit-relay` | on each core a relay process and an application, which pass messages over shared memory and give the core away with `sched_yield`; relays hand them on as frames | what a daemon costs before it does anything |
//! | `limit-relay-crc` | the same; each relay copies every payload once and computes its CRC32C | what a *reliable* daemon costs before it does anything |
//! | `limit-relay-crc-polled` | the same; relays go round for frames themselves (`polling.rs`) | what it costs one whose engines do so |
//!
//! None of them resends or orders anything, and none could be used: a lost frame is lost. They send no more than the other end has room
//! for (`window.rs`), so that none is lost; should one be, that is reported ([`crate::actor::Flow::missed`]).
//!
//! On xsk-rs, so that the limit shares no code, and no mistake, with what is held against it.

mod client;
mod polling;
mod relay;
mod shared;
mod socket;
mod window;
mod wire;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use client::Client;
pub use polling::PORT as POLLED_PORT;
pub use relay::run as relay;
pub use shared::create;
pub use wire::Raw;

/// One end of the wire.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WireRole {
    /// The interface, in the namespace the process runs in.
    pub interface: String,
    /// Its MAC.
    pub mac: [u8; 6],
    /// The other end's.
    pub peer: [u8; 6],
    /// Of both.
    pub mtu: u32,
    /// Who receives goes round for frames.
    pub polled: bool,
}

/// What relays do to payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// Nothing: frames of the right length. Only what fits beside a message's length travels in them.
    Bare,
    /// Copied once on each side, its CRC32C computed and, where it comes, compared.
    Checked,
}

/// A relay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelayRole {
    /// Its end of the wire.
    pub wire: WireRole,
    /// The memory it shares with its application.
    pub memory: PathBuf,
    /// What it does to payloads.
    pub form: Form,
}

/// The application of a relay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientRole {
    /// The memory it shares with its relay.
    pub memory: PathBuf,
    /// There is no relay but another application, and this is the one that does as a relay would.
    pub in_relays_place: bool,
}
