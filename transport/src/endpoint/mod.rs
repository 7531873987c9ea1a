//! One engine's end of the transport.

use alloc::string::String;

use crate::host::{Durable, Host, SendRequest};
use crate::ident::{Nanos, NodeId, Peer, PortId, Priority, StreamKey};
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
