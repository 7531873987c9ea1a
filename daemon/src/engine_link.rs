//! What the supervisor and an engine say to each other: a SOCK_SEQPACKET pair, one JSON document per packet, descriptors beside it.
//!
//! The engine inherits its end as descriptor [`LINK_FD`]. Both ends are the same binary of the same build, but an engine parses
//! network frames, so the supervisor treats what comes from it as a claim: bounded, parsed, checked against its own books.

use std::net::IpAddr;

use portolan_abi::ledger::LedgerGeometry;
use portolan_abi::port::{CloseReason, PortGeometry};
use portolan_abi::tap::TapGeometry;
use serde::{Deserialize, Serialize};

use crate::transport_policy::TransportPolicy;
use crate::xsk::{CHUNK_SIZE, MAX_FRAME_LEN, UmemLayout, XskConfig, XskError};

/// The engine's end of the link after exec.
pub const LINK_FD: i32 = 3;
/// Longest packet either way.
pub const MAX_PACKET: usize = 64 * 1024;
/// Longest MTU there is: what the UMEM buffers of one frame hold, without the Ethernet header.
pub const MAX_MTU: u16 = MAX_FRAME_LEN as u16 - ETHERNET_HEADER;
const ETHERNET_HEADER: u16 = 14;
/// [`ToEngine::TakeOver`] as it travels: the watchdog sends it without a serialiser.
pub const TAKE_OVER: &[u8] = br#"{"to_engine":"take_over"}"#;

/// How frames travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encap {
    /// EtherType 0x88B5.
    Ethernet,
    /// UDP over IPv4 or IPv6.
    Udp,
}

/// How an engine waits when there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// Spin.
    Busy,
    /// Spin, giving the core away after a delivery, and else the less often the less that brought.
    Yield,
    /// Spin for a while, then sleep on the doorbells.
    Adaptive,
}

/// What an engine is told once, in [`ToEngine::Start`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// This node.
    pub node: u16,
    /// Its name.
    pub name: String,
    /// Hash of the cluster's name.
    pub cluster: u64,
    /// The node's incarnation (also in the ledger).
    pub incarnation: u64,
    /// This engine's queue index, 0-based among the node's engines.
    pub queue: u8,
    /// Engines of this node.
    pub queues: u8,
    /// Ledger's layout.
    pub ledger: LedgerGeometry,
    /// Encapsulation.
    pub encap: Encap,
    /// UDP port of queue 0; queue q listens on this + q.
    pub udp_port: u16,
    /// Local MAC.
    pub mac: [u8; 6],
    /// Local address, for UDP.
    pub address: Option<IpAddr>,
    /// Interface MTU.
    pub mtu: u16,
    /// The largest MTU the node ever uses: the UMEM is laid out for it. 0: as `mtu`.
    #[serde(default)]
    pub umem_mtu: u16,
    /// Waiting mode.
    pub wait: Wait,
    /// Core to run on.
    pub core: Option<usize>,
    /// UMEM frames used for receiving; the rest is for sending. Total is `ledger.frames`.
    pub rx_frames: u32,
    /// Entries of each AF_XDP ring.
    pub ring_entries: u32,
    /// Default timeout of a send, milliseconds.
    pub default_timeout_ms: u64,
    /// Policy of the transport, checked by the supervisor.
    #[serde(default)]
    pub transport: TransportPolicy,
    /// No epoch of this engine is lower, whatever the ledger says: one more than its predecessor's. 0: not known.
    #[serde(default)]
    pub first_epoch: u32,
    /// The interface is one end of a veth pair: frames that its other end has not taken yet are still with the kernel.
    #[serde(default)]
    pub veth: bool,
    /// Going round for frames is ended where it brings no more of them.
    #[serde(default)]
    pub compares_polling: bool,
    /// Another engine of this node is bound to the same core.
    #[serde(default)]
    pub shares_core: bool,
    /// For so long after a message its processor does not sleep, milliseconds; 0: it sleeps with the engine.
    #[serde(default)]
    pub keep_awake_ms: u32,
}

/// How a UMEM of at most `frames` frames is divided and how large the rings are: `rx_frames` to receive, the rest in slots that hold
/// the longest frame. With `frames` as in the result's layout it yields the same again, so both sides agree.
///
/// # Errors
/// [`XskError::Misuse`] if the numbers make no UMEM.
pub fn xsk_config(mtu: u16, rx_frames: u32, frames: u32) -> Result<XskConfig, XskError> {
    let longest = usize::from(mtu) + usize::from(ETHERNET_HEADER);
    let per_slot = longest.div_ceil(CHUNK_SIZE) as u32; // at most 17
    let slots = frames.saturating_sub(rx_frames) / per_slot;
    Ok(XskConfig::new(UmemLayout::new(rx_frames, slots, longest)?))
}

impl EngineConfig {
    /// The socket's configuration, as the supervisor created it.
    ///
    /// # Errors
    /// [`XskError::Misuse`] if the numbers make no UMEM.
    pub fn xsk_config(&self) -> Result<XskConfig, XskError> {
        let longest = self.umem_mtu.max(self.mtu);
        xsk_config(longest, self.rx_frames, self.ledger.frames)
    }
}

/// A node that may be talked to and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Its id.
    pub node: u16,
    /// Its name.
    pub name: String,
    /// Next hop's MAC; `None` while the neighbour is not resolved.
    pub mac: Option<[u8; 6]>,
    /// Its address, for UDP.
    pub address: Option<IpAddr>,
}

/// From the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "to_engine", rename_all = "snake_case")]
pub enum ToEngine {
    /// First of all: maps everything and touches nothing. Descriptors: ledger, UMEM, XSK, then for each queue of the node in order its wake eventfd, then for each *other*
    /// queue in order: crossing ring from it to us, crossing ring from us to it.
    Start(Box<EngineConfig>),
    /// Adds or changes a route. Also sent for this very node (loop back).
    Route(Route),
    /// Forgets a node.
    RemoveNode {
        /// Its id.
        node: u16,
    },
    /// Serves a port. Descriptors: client half, engine half, event doorbell (engine → application), engine doorbell
    /// (application → engine). Idempotent. Whether it is restored or new is the ledger's to say: restored if an engine has served this
    /// generation before.
    OpenPort {
        /// The port.
        port: u16,
        /// Its generation, as journalled in the ledger.
        generation: u32,
        /// Its layout.
        geometry: PortGeometry,
    },
    /// Everything there is to know has been sent; answered by [`FromEngine::StandingBy`]. What changes afterwards is sent as it changes.
    StandBy,
    /// The engine that worked here is dead: take over, and run. Answered by [`FromEngine::Ready`] and a [`FromEngine::PortOpened`] for each
    /// port.
    TakeOver,
    /// Ends service of a port; answered by [`FromEngine::PortClosed`], by a standby not at all. Idempotent.
    ClosePort {
        /// The port.
        port: u16,
        /// Its generation.
        generation: u32,
        /// Why.
        reason: CloseReason,
    },
    /// Asks for the peers as this engine sees them; answered by [`FromEngine::Peers`].
    QueryPeers {
        /// Returned in the answer.
        id: u64,
    },
    /// Records every frame on a ring from now on, instead of on another one if there is one. Descriptors: ring, mark. Idempotent.
    Tap {
        /// Tells it from others.
        id: u64,
        /// The ring's layout.
        geometry: TapGeometry,
        /// Only frames to and from this node.
        peer: Option<u16>,
    },
    /// Ends that, whichever ring it is. Idempotent.
    Untap,
    /// New sends are refused from now on, or taken again.
    Drain {
        /// Refused.
        on: bool,
    },
    /// Answers [`FromEngine::BusyPoll`]: from now on goes round for frames itself, by receiving from the socket that comes as descriptor; or no
    /// longer, after a last time.
    BusyPoll {
        /// Goes round.
        on: bool,
    },
    /// Leave cleanly.
    Stop,
    /// Fault injection: stop looping, for ever.
    Hang,
}

/// What an engine knows of a peer engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerReport {
    /// Node.
    pub node: u16,
    /// Its queue.
    pub queue: u8,
    /// Name it gave in HELLO; empty before.
    pub name: String,
    /// `unresolved`, `idle` (nothing asked of it, or given up as unreachable), `connecting`, `up` or `incompatible`.
    pub state: String,
    /// Smoothed round trip time, nanoseconds; 0 before the first.
    pub rtt_ns: u64,
    /// Messages not yet settled towards it.
    pub outstanding: u64,
    /// Its incarnation.
    pub incarnation: u64,
    /// Its engine's epoch.
    pub engine_epoch: u32,
    /// Longest frame the path carries, transport bytes.
    pub max_frame: u16,
    /// Why it is `incompatible`: `cluster`, `version`, or the field of the policy that does not fit.
    #[serde(default)]
    pub misfit: Option<String>,
}

/// From the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "from_engine", rename_all = "snake_case")]
pub enum FromEngine {
    /// Has mapped everything and waits for [`ToEngine::TakeOver`].
    StandingBy,
    /// Adopted everything and runs.
    Ready {
        /// Nanoseconds from TakeOver to here.
        adopted_in_ns: u64,
        /// When that was, CLOCK_MONOTONIC nanoseconds.
        ready_at_ns: u64,
    },
    /// The port is served.
    PortOpened {
        /// The port.
        port: u16,
        /// Its generation.
        generation: u32,
    },
    /// The port is no longer served and its memory no longer mapped; also unasked, when the engine closed it for cause.
    PortClosed {
        /// The port.
        port: u16,
        /// Its generation.
        generation: u32,
        /// Why.
        reason: CloseReason,
    },
    /// Answer to [`ToEngine::QueryPeers`].
    Peers {
        /// The query's.
        id: u64,
        /// At most a packet's worth.
        peers: Vec<PeerReport>,
    },
    /// Would go round for frames itself, or no longer. Said again until it is answered.
    BusyPoll {
        /// Would.
        on: bool,
        /// Does not for the time being, while there are many frames: an instance that is there for its sake is better not there.
        #[serde(default)]
        rests: bool,
    },
    /// Comes round, but its queue stands still. Said once per second as long as it does.
    Wedged {
        /// What the rings and the kernel's statistics say.
        evidence: String,
    },
    /// Cannot go on.
    Fatal {
        /// Why.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packet_of_the_watchdog_is_the_message() {
        let written = serde_json::to_vec(&ToEngine::TakeOver).unwrap();
        assert_eq!(written, TAKE_OVER);
    }
}
