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

/*  The surface the engine, the tests and the simulator use (kept here until the type documents it):

impl Endpoint {
    pub fn new(config: Config, now: Nanos) -> Self;
    /// After a takeover: rebuilds streams and sends from the ledger's facts; queues RESUME to every peer with open streams.
    pub fn restore(config: Config, now: Nanos, durable: &Durable) -> Self;

    // what happened
    pub fn handle_frame<H: Host>(&mut self, now: Nanos, segments: &[&[u8]], host: &mut H) -> Result<(), FrameError>; // Err = counted drop
    pub fn handle_timeout<H: Host>(&mut self, now: Nanos, host: &mut H);
    pub fn port_opened(&mut self, port: PortId);
    pub fn port_closed<H: Host>(&mut self, now: Nanos, port: PortId, host: &mut H); // its sends end, its receiving streams answer PortClosed
    pub fn buffer_provided(&mut self, now: Nanos, port: PortId); // a receive token appeared: READY to whoever waits

    // commands
    pub fn submit<H: Host>(&mut self, now: Nanos, send: &SendRequest, host: &mut H) -> Result<(), Reason>; // Err: nothing was accepted; the engine completes the token itself
    pub fn cancel(&mut self, now: Nanos, id: SendId);
    pub fn resume_sending(&mut self, now: Nanos, stream: StreamKey);
    pub fn drop_sends<H: Host>(&mut self, now: Nanos, stream: StreamKey, host: &mut H);
    pub fn set_node(&mut self, now: Nanos, node: NodeId, max_frame: u16); // a node that may be sent to, and the path's bound; including this node itself
    pub fn remove_node<H: Host>(&mut self, now: Nanos, node: NodeId, host: &mut H);

    // what to do
    pub fn poll_transmit<H: Host>(&mut self, now: Nanos, to: &mut [u8], host: &mut H) -> Option<Transmit>;
    pub fn poll_timeout(&self) -> Option<Nanos>; // absolute; Some(t <= now) means: call handle_timeout

    // getters
    pub fn counters(&self) -> &Counters;          // one declared table: name, help, value
    pub fn peers(&self) -> impl Iterator<Item = PeerStatus>;   // node, queue, state, incarnation, rtt_ns, in flight, credit...
    pub fn check_consistency(&self);               // panics in tests when an internal invariant is broken
}
*/
