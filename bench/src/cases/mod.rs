//! What is measured: the cases, their names, and in which order.
//!
//! A case is one question with one answer per subject. Cases that can be asked of a subject without starting it again form a *group*;
//! within a group the subjects take turns, in another order each turn, so that whatever the machine's mood does, it does to all.

mod plan;

use std::fmt;

pub use plan::{Group, Plan};

/// One thing to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// A message there and back, one at a time; half of that is a way.
    PingPong {
        /// Length of the message.
        bytes: usize,
    },
    /// As many short messages as go, one way.
    Rate {
        /// Length of each.
        bytes: usize,
    },
    /// As many bytes as go, one way.
    Stream {
        /// Length of each message.
        bytes: usize,
        /// Of the interfaces.
        mtu: u32,
    },
    /// One size of the sweep that draws the papers' curves (FTGM's Figures 7 and 8): a way, one way, and both ways at once.
    AllSize {
        /// Length of each message.
        bytes: usize,
    },
    /// So many processes of one node send to one port of the other.
    FanIn {
        /// How many.
        senders: u16,
    },
    /// One process of each node, so many ports, each sending to its counterpart.
    Ports {
        /// How many.
        ports: u16,
    },
    /// As many ports as interfaces have queues, each sending to its counterpart: by an engine each, or all by one.
    Queues {
        /// How many.
        queues: u16,
    },
    /// A node with nothing to do: the processor time it takes, and the first message after a second of that.
    Idle {
        /// How engines wait.
        wait: Wait,
    },
    /// From nothing to the first message: attach, open, send.
    Startup,
}

/// How an engine with nothing to do waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It spins.
    Busy,
    /// It gives the core away after a few looks.
    Yield,
    /// It does so for a while and then sleeps.
    Adaptive,
}

impl Wait {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Busy, Self::Yield, Self::Adaptive];

    /// As the daemon's configuration calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Yield => "yield",
            Self::Adaptive => "adaptive",
        }
    }
}

/// MTU of every case that does not name one.
pub const MTU: u32 = 1500;
/// MTUs of the streams: Ethernet's, the largest whose frame lies in one chunk of a UMEM, and jumbo frames.
pub const MTUS: [u32; 3] = [1500, 3498, 9000];
/// Bytes of each message where fairness is measured.
pub const FAIRNESS_BYTES: usize = 4096;

impl Case {
    /// MTU of the interfaces it is measured on.
    pub fn mtu(&self) -> u32 {
        match self {
            Self::Stream { mtu, .. } => *mtu,
            _ => MTU,
        }
    }

    /// Queues of the interfaces it is measured on.
    pub fn queues(&self) -> u16 {
        match self {
            Self::Queues { queues } => *queues,
            _ => 1,
        }
    }

    /// Length of its messages.
    pub fn bytes(&self) -> usize {
        match self {
            Self::PingPong { bytes }
            | Self::Rate { bytes }
            | Self::Stream { bytes, .. }
            | Self::AllSize { bytes } => *bytes,
            Self::FanIn { .. } | Self::Ports { .. } | Self::Queues { .. } => FAIRNESS_BYTES,
            Self::Idle { .. } | Self::Startup => 64,
        }
    }

    /// Whether it is about one sender and one receiver, which everybody can be.
    pub fn is_plain(&self) -> bool {
        match self {
            Self::PingPong { .. }
            | Self::Rate { .. }
            | Self::Stream { .. }
            | Self::AllSize { .. } => true,
            Self::FanIn { .. }
            | Self::Ports { .. }
            | Self::Queues { .. }
            | Self::Idle { .. }
            | Self::Startup => false,
        }
    }

    /// The subject it is held against: what is physically there to be reached. None where there is no such thing.
    pub fn limit(&self) -> Option<&'static str> {
        match self {
            Self::PingPong { .. } => Some("limit-relay"),
            // One frame per message is what a transport that coalesces must beat.
            Self::Rate { .. } => Some("limit-raw-xdp"),
            Self::Stream { .. } | Self::AllSize { .. } => Some("limit-relay-crc"),
            // What is gained, or at least not lost, by more engines.
            Self::Queues { .. } => Some("portolan-one-engine"),
            Self::FanIn { .. } | Self::Ports { .. } | Self::Idle { .. } | Self::Startup => None,
        }
    }

    /// Whether another case can follow this one without starting subjects anew.
    pub fn goes_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Idle { wait }, Self::Idle { wait: other }) => wait == other,
            (Self::PingPong { .. }, Self::Rate { .. }) => true,
            _ => {
                (self.mtu(), self.queues()) == (other.mtu(), other.queues())
                    && std::mem::discriminant(self) == std::mem::discriminant(other)
            }
        }
    }

    /// Whether a name given on the command line means this case: its own, or the beginning of it up to a dash.
    pub fn is_meant_by(&self, name: &str) -> bool {
        let own = self.to_string();
        own.strip_prefix(name)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PingPong { bytes } => write!(f, "pingpong-{}", Size(*bytes)),
            Self::Rate { bytes } => write!(f, "rate-{}", Size(*bytes)),
            Self::Stream { bytes, mtu } => write!(f, "stream-{}-mtu{mtu}", Size(*bytes)),
            Self::AllSize { bytes } => write!(f, "allsize-{}", Size(*bytes)),
            Self::FanIn { senders } => write!(f, "fanin-{senders}"),
            Self::Ports { ports } => write!(f, "ports-{ports}"),
            Self::Queues { queues } => write!(f, "queues-{queues}"),
            Self::Idle { wait } => write!(f, "idle-{}", wait.name()),
            Self::Startup => f.write_str("startup"),
        }
    }
}

/// How many messages of a length may be under way at once, before a subject's own bounds: the same memory is touched by all, or some
/// would work in the processor's caches where others cannot.
pub fn window(bytes: usize) -> usize {
    const TOGETHER: usize = 8 << 20;
    (TOGETHER / bytes.max(1)).clamp(4, 1024)
}

/// A number of bytes, as names of cases have it.
pub struct Size(pub usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const K: usize = 1 << 10;
        const M: usize = 1 << 20;
        match self.0 {
            n if n >= M && n.is_multiple_of(M) => write!(f, "{}M", n / M),
            n if n >= K && n.is_multiple_of(K) => write!(f, "{}k", n / K),
            n => write!(f, "{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_design() {
        assert_eq!(Case::PingPong { bytes: 64 }.to_string(), "pingpong-64");
        assert_eq!(Case::PingPong { bytes: 1 << 20 }.to_string(), "pingpong-1M");
        assert_eq!(Case::Rate { bytes: 64 }.to_string(), "rate-64");
        let stream = Case::Stream {
            bytes: 4096,
            mtu: 9000,
        };
        assert_eq!(stream.to_string(), "stream-4k-mtu9000");
        assert_eq!(Case::FanIn { senders: 4 }.to_string(), "fanin-4");
    }

    #[test]
    fn a_name_means_a_case_or_all_that_begin_with_it() {
        let stream = Case::Stream {
            bytes: 1 << 20,
            mtu: 9000,
        };
        for name in ["stream", "stream-1M", "stream-1M-mtu9000"] {
            assert!(stream.is_meant_by(name), "{name}");
        }
        for name in ["stream-1", "stre", "pingpong", "stream-1M-mtu90"] {
            assert!(!stream.is_meant_by(name), "{name}");
        }
        assert!(!Case::PingPong { bytes: 16 }.is_meant_by("pingpong-1"));
    }
}
