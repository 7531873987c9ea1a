//! The names of things: nodes, ports, queues, streams, sends and buffers; serial numbers. transport.md §1.1, §1.2

/// Nanoseconds of a monotonic clock that every caller of one endpoint shares.
pub type Nanos = u64;

/// A node of the cluster, 1 to 65 534. 0 and 65 535 are reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u16);

impl NodeId {
    /// The id, if it may name a node.
    pub fn new(id: u16) -> Option<Self> {
        (id != 0 && id != u16::MAX).then_some(Self(id))
    }
}

/// A port of a node, 0 to 255. Port 0 belongs to the daemon's own service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// Ports per node.
pub const PORTS: u16 = 256;

/// Two priorities, as in GM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Priority {
    /// Bulk traffic; still gets its floor of the link.
    Low = 0,
    /// Never queues behind low.
    High = 1,
}

/// One engine of a node: the transport's other end. The engine that owns a port is `port % queues`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    /// The node.
    pub node: NodeId,
    /// Which of its queues (engines).
    pub queue: u8,
}

/// The ordered sequence of messages from a port to a port at one priority, seen from one of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey {
    /// The port at this end.
    pub local: PortId,
    /// The node at the other end.
    pub node: NodeId,
    /// The port at the other end.
    pub remote: PortId,
    /// The stream's priority.
    pub priority: Priority,
}

/// A send token in use: which port, which slot, and the slot's generation, so that a stale name is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendId {
    /// The sending port.
    pub port: PortId,
    /// The token's slot in that port.
    pub slot: u32,
    /// The slot's generation; never 0.
    pub generation: u32,
}

/// A receive token claimed for a message being placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId {
    /// The receiving port.
    pub port: PortId,
    /// The token's slot in that port.
    pub slot: u32,
    /// The slot's generation; never 0.
    pub generation: u32,
}

/// A durable record in the ledger, handed out by [`crate::Host`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordId(pub u32);

/// `a < b` in serial arithmetic (RFC 1982): numbers wrap after 2³².
pub fn serial_lt(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// `a ≤ b` in serial arithmetic.
pub fn serial_le(a: u32, b: u32) -> bool {
    !serial_lt(b, a)
}
