//! The names of things: nodes, ports, addresses, priorities.

use std::fmt;

/// A node of the cluster, 1 to 65 534.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u16);

/// A port of a node, 0 to 255. Port 0 is the daemon's own service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// Where a message goes, or came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// The node.
    pub node: NodeId,
    /// The port on it.
    pub port: PortId,
}

impl Address {
    /// Could such a port exist?
    pub fn is_valid(&self) -> bool {
        self.node.0 != 0 && self.node.0 != u16::MAX && self.port.0 < portolan_abi::PORTS
    }
}

impl From<(NodeId, PortId)> for Address {
    fn from((node, port): (NodeId, PortId)) -> Self {
        Self { node, port }
    }
}

impl From<(u16, u16)> for Address {
    fn from((node, port): (u16, u16)) -> Self {
        Self {
            node: NodeId(node),
            port: PortId(port),
        }
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.node, self.port)
    }
}

/// When the receiving engine acknowledges a delivery, for one send. Whatever it is, a send ends only when its delivery is certain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AckMode {
    /// As the receiving node's policy says.
    #[default]
    Policy,
    /// At once: the send ends as soon as it can, for one more frame.
    Immediate,
    /// With whatever else goes back, or late: for messages whose end nobody waits for.
    Lazy,
}

/// Two priorities, as in GM. A buffer provided at one priority only takes messages sent at that priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Priority {
    /// Bulk traffic.
    #[default]
    Low,
    /// Never queues behind low.
    High,
}

impl Priority {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Low => 0,
            Self::High => 1,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Low),
            1 => Some(Self::High),
            _ => None,
        }
    }
}
