//! One engine's end of the transport.

use alloc::string::String;

use crate::host::{Durable, Host, Reason, SendRequest};
use crate::ident::{Nanos, NodeId, Peer, PortId, Priority, SendId, StreamKey};
use crate::policy::Policy;

/// What an endpoint is told once.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// This engine's queue.
    pub queue: u8,
    /// Engines on this node.
    pub queues: u8,
    /// This node's incarnation.
    pub incarnation: u64,
    /// This engine's epoch, one more than its predecessor's.
    pub engine_epoch: u32,
    /// Hash of the cluster's name.
    pub cluster: u64,
    /// This node's name.
    pub name: String,
    /// Longest frame the path's encapsulation leaves for the transport, bytes.
    pub max_frame: u16,
    /// Most peers (node and queue) at once.
    pub max_peers: usize,
    /// Number of a new stream's first message; simulations begin near the wrap.
    pub first_number: u32,
    /// Protocol policy.
    pub policy: Policy,
}

/// A frame [`Endpoint::poll_transmit`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Where it goes. May be this very node: the engine loops it back.
    pub peer: Peer,
    /// Bytes written.
    pub len: usize,
    /// Highest priority among its chunks.
    pub priority: Priority,
    /// Same for all frames of a flow; the engine derives the UDP source port from it.
    pub flow: u16,
}

/// Why a frame, or the rest of it, was dropped. Each has its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The wire layer refused it: truncated, unknown version, bad checksum.
    Malformed,
    /// Addressed to another node or queue.
    NotForUs,
    /// From a node nobody told us of, or a queue that node does not have.
    UnknownPeer,
    /// An incarnation in the header is not the one we know; a RESET answers it.
    WrongIncarnation,
    /// From an engine that has a successor.
    StaleEngine,
    /// No association with the peer yet.
    NotAssociated,
}

/// How far the association with a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nothing asked for yet, or unreachable and nobody wants it now.
    Idle,
    /// HELLO is on its way, repeated until answered.
    Connecting,
    /// Both incarnations are known to both sides.
    Up,
    /// The peer speaks another version, policy or cluster.
    Incompatible,
}

/// A peer as `status` shows it.
#[derive(Clone, Copy, Debug)]
pub struct PeerStatus<'a> {
    /// Node and queue.
    pub peer: Peer,
    /// Its name from HELLO; empty before.
    pub name: &'a str,
    /// The association.
    pub state: PeerState,
    /// Its incarnation; 0 while unknown.
    pub incarnation: u64,
    /// Its engine's epoch.
    pub engine_epoch: u32,
    /// Smoothed round trip, nanoseconds; 0 before the first sample.
    pub rtt_ns: u64,
    /// Retransmission timeout now, nanoseconds.
    pub rto_ns: u64,
    /// Messages sent and not settled.
    pub in_flight: u32,
    /// Receive buffers we may still fill unasked.
    pub credit: u32,
    /// Longest frame sent to it.
    pub max_frame: u16,
}

/// What happened, counted. Declared once in the table below: name and help text.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Frames received.
    pub frames_received: u64,
}

impl Counters {
    /// Name, help text and value of every counter.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> + '_ {
        [("frames_received", "Frames received.", self.frames_received)].into_iter()
    }
}

/// One engine's end of the transport.
pub struct Endpoint {
    counters: Counters,
}

#[allow(missing_docs, unused_variables)]
impl Endpoint {
    pub fn new(config: Config, now: Nanos) -> Self {
        Self {
            counters: Counters::default(),
        }
    }
    /// After a takeover: rebuilds streams and sends from the ledger's facts; queues RESUME to every peer with open streams.
    pub fn restore(config: Config, now: Nanos, durable: &Durable) -> Self {
        Self {
            counters: Counters::default(),
        }
    }
    pub fn handle_frame<H: Host>(
        &mut self,
        now: Nanos,
        segments: &[&[u8]],
        host: &mut H,
    ) -> Result<(), FrameError> {
        Ok(())
    }
    pub fn handle_timeout<H: Host>(&mut self, now: Nanos, host: &mut H) {}
    pub fn port_opened(&mut self, port: PortId) {}
    /// Its sends end, its receiving streams answer PortClosed.
    pub fn port_closed<H: Host>(&mut self, now: Nanos, port: PortId, host: &mut H) {}
    /// A receive token appeared: READY to whoever waits.
    pub fn buffer_provided(&mut self, now: Nanos, port: PortId) {}
    /// Err: nothing was accepted; the engine completes the token itself.
    pub fn submit<H: Host>(
        &mut self,
        now: Nanos,
        send: &SendRequest,
        host: &mut H,
    ) -> Result<(), Reason> {
        Err(Reason::NoRoute)
    }
    pub fn cancel(&mut self, now: Nanos, id: SendId) {}
    pub fn resume_sending(&mut self, now: Nanos, stream: StreamKey) {}
    pub fn drop_sends<H: Host>(&mut self, now: Nanos, stream: StreamKey, host: &mut H) {}
    /// A node that may be sent to, and the path's bound; including this node itself.
    pub fn set_node(&mut self, now: Nanos, node: NodeId, max_frame: u16) {}
    pub fn remove_node<H: Host>(&mut self, now: Nanos, node: NodeId, host: &mut H) {}
    pub fn poll_transmit<H: Host>(
        &mut self,
        now: Nanos,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        None
    }
    /// Absolute; Some(t <= now) means: call handle_timeout.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        None
    }
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
    pub fn peers(&self) -> impl Iterator<Item = PeerStatus<'_>> {
        core::iter::empty()
    }
    /// Panics when an internal invariant is broken; for tests.
    pub fn check_consistency(&self) {}
}
