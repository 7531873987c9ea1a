//! How a send ended: never a guess.

use std::fmt;

use portolan_abi::event::{Certainty, Outcome, reason};

/// How a send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// It is in the receiver's buffer.
    Delivered,
    /// It is not and never will be in the receiver's buffer.
    NotDelivered(Reason),
    /// It cannot be known.
    MaybeDelivered(Reason),
}

/// Why a send was not, or perhaps not, delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The receiving port is not open, or was closed.
    PortClosed,
    /// The receiver can never hold a message of this length.
    TooLong,
    /// The send's timeout passed.
    Deadline,
    /// The receiving node came back as a new incarnation.
    PeerRestarted,
    /// The receiving node does not answer.
    Unreachable,
    /// Cancelled by this application.
    Cancelled,
    /// Dropped by [`crate::Port::drop_sends`].
    Dropped,
    /// The engine could not read the message from this application's memory.
    BadMemory,
    /// No such node, or no route to it.
    NoRoute,
    /// The nodes' versions or policies cannot work together.
    Incompatible,
    /// A table of an engine is full; try again later.
    NoResources,
    /// The receiving application refused it before it was taken.
    Refused,
    /// The engine did not accept the token: a fault of this library or of this process's memory.
    BadToken,
    /// This node is being drained and takes no new sends; it is about to be stopped.
    Draining,
    /// This port was closed before the send ended.
    OwnPortClosed,
    /// The daemon went away before the send ended.
    DaemonGone,
    /// A damaged engine died without saying how it ended.
    Lost,
    /// A reason that this version of the library does not know.
    Unknown(u8),
}

impl Reason {
    fn from_code(code: u8) -> Self {
        match code {
            1 => Self::PortClosed,
            2 => Self::TooLong,
            3 => Self::Deadline,
            4 => Self::PeerRestarted,
            5 => Self::Unreachable,
            6 => Self::Cancelled,
            7 => Self::Dropped,
            8 => Self::BadMemory,
            9 => Self::NoRoute,
            10 => Self::Incompatible,
            11 => Self::NoResources,
            12 => Self::Refused,
            reason::BAD_TOKEN => Self::BadToken,
            reason::DRAINING => Self::Draining,
            other => Self::Unknown(other),
        }
    }
}

impl Status {
    pub(crate) fn from_outcome(outcome: Outcome) -> Self {
        match outcome.certainty {
            Certainty::Delivered => Self::Delivered,
            Certainty::NotDelivered => Self::NotDelivered(Reason::from_code(outcome.reason)),
            Certainty::MaybeDelivered => Self::MaybeDelivered(Reason::from_code(outcome.reason)),
        }
    }

    /// In the receiver's buffer, for certain?
    pub fn is_delivered(&self) -> bool {
        *self == Self::Delivered
    }

    /// Why not, or perhaps not.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Delivered => None,
            Self::NotDelivered(reason) | Self::MaybeDelivered(reason) => Some(*reason),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Delivered => f.write_str("delivered"),
            Self::NotDelivered(reason) => write!(f, "not delivered: {reason}"),
            Self::MaybeDelivered(reason) => write!(f, "perhaps delivered: {reason}"),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::PortClosed => "the receiving port is not open",
            Self::TooLong => "the receiver can never hold a message of this length",
            Self::Deadline => "its timeout passed",
            Self::PeerRestarted => "the receiving node restarted",
            Self::Unreachable => "the receiving node does not answer",
            Self::Cancelled => "it was cancelled",
            Self::Draining => "this node is being drained and takes no new sends",
            Self::Dropped => "it was dropped after an earlier send failed",
            Self::BadMemory => {
                "the engine could not read the message from the application's memory"
            }
            Self::NoRoute => "no such node, or no route to it",
            Self::Incompatible => "the two nodes' versions or policies cannot work together",
            Self::NoResources => "a table of an engine is full; try again later",
            Self::Refused => "the receiving application refused it",
            Self::BadToken => "the engine did not accept the token",
            Self::OwnPortClosed => "the sending port was closed",
            Self::DaemonGone => "the daemon went away",
            Self::Lost => "a damaged engine died without saying how it ended",
            Self::Unknown(code) => return write!(f, "reason {code}, unknown to this library"),
        };
        f.write_str(text)
    }
}

#[cfg(test)]
mod tests {
    use portolan_transport::host::Reason as Wire;

    use super::*;

    // Every reason the transport can give. Expect: the library knows it by the same name.
    #[test]
    fn knows_the_transports_reasons() {
        let all = [
            Wire::PortClosed,
            Wire::TooLong,
            Wire::Deadline,
            Wire::PeerRestarted,
            Wire::Unreachable,
            Wire::Cancelled,
            Wire::Dropped,
            Wire::BadMemory,
            Wire::NoRoute,
            Wire::Incompatible,
            Wire::NoResources,
            Wire::Refused,
        ];
        for wire in all {
            assert_eq!(
                format!("{wire:?}"),
                format!("{:?}", Reason::from_code(wire as u8))
            );
        }
        assert_eq!(Reason::from_code(13), Reason::Unknown(13));
        assert_eq!(Reason::from_code(reason::BAD_TOKEN), Reason::BadToken);
    }
}
