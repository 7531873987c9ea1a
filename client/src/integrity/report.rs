//! What an application is told when something is not right.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::names::{Address, Priority};

/// Reports kept until they are received; further ones are added to those of their kind.
const KEPT: usize = 256;

/// End-to-end integrity of a port ([`crate::PortOptions::integrity`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Integrity {
    /// A message that the engine called delivered and that the receiving library has not confirmed for so long is reported
    /// ([`Fault::Unconfirmed`]); at least 4 ms. Longer than an application at the other end may take between two looks at its port.
    pub confirm_within: Duration,
}

impl Default for Integrity {
    fn default() -> Self {
        Self {
            confirm_within: Duration::from_secs(4),
        }
    }
}

/// What is not right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fault {
    /// To a receiver: bytes, length or tag of a message are not those that were sent. It was not handed out.
    Changed,
    /// To a receiver: a message came with another sender, receiver or priority than it was sent with. It was not handed out.
    Misdirected,
    /// To a receiver: a message has no seal: its sender has no integrity, or its end is lost. It was not handed out.
    Unsealed,
    /// To a receiver: a message came a second time, or after it was over. It was not handed out.
    Repeated,
    /// A message was lost whose sender was told that it is delivered. To its receiver, and to its sender.
    Lost,
    /// A message came whose sender was told that it is *not* delivered, and which it may therefore send again. To its receiver, or to its
    /// sender.
    Contradicted,
    /// To a sender: the engine called it delivered, and the receiving library has not confirmed that it came: lost perhaps, or the
    /// application there does not look, has closed its port, or has no integrity.
    Unconfirmed,
    /// To a sender: a send has not ended long after its timeout.
    Endless,
    /// The engine said something that makes no sense ([`crate::Port::anomalies`]).
    Nonsense,
}

/// Something is not right with messages of one stream. Everything else about them, and all other messages, are as they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegrityReport {
    /// What.
    pub fault: Fault,
    /// The other end of the stream; as the engine names it, if nothing else does. `None`: unknown, or several.
    pub peer: Option<Address>,
    /// The stream's priority.
    pub priority: Option<Priority>,
    /// How many messages.
    pub messages: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Changed => "changed on the way",
            Self::Misdirected => "not meant for this port, or not from where it seems to be",
            Self::Unsealed => "without a seal",
            Self::Repeated => "came again",
            Self::Lost => "lost, though called delivered",
            Self::Contradicted => "came, though called not delivered",
            Self::Unconfirmed => "called delivered and not confirmed by the receiver",
            Self::Endless => "not ended long after the timeout",
            Self::Nonsense => "contradicted the port's own books",
        })
    }
}

impl fmt::Display for IntegrityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} message(s) ", self.messages)?;
        if let Some(peer) = self.peer {
            write!(f, "of the stream with {peer} ")?;
        }
        self.fault.fmt(f)
    }
}

/// Reports that wait for the application.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    waiting: VecDeque<IntegrityReport>,
}

impl Reports {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn take(&mut self) -> Option<IntegrityReport> {
        self.waiting.pop_front()
    }

    pub(crate) fn add(
        &mut self,
        fault: Fault,
        peer: Option<(Address, Priority)>,
        messages: impl Into<u64>,
    ) {
        let messages = messages.into();
        if messages == 0 {
            return;
        }
        let report = IntegrityReport {
            fault,
            peer: peer.map(|(address, _)| address),
            priority: peer.map(|(_, priority)| priority),
            messages,
        };
        let same = |r: &IntegrityReport| {
            (r.fault, r.peer, r.priority) == (fault, report.peer, report.priority)
        };
        if let Some(known) = self.waiting.iter_mut().find(|r| same(r)) {
            known.messages = known.messages.saturating_add(messages);
            return;
        }
        if self.waiting.len() >= KEPT
            && let Some(known) = self.waiting.iter_mut().find(|r| r.fault == fault)
        {
            known.messages = known.messages.saturating_add(messages);
            (known.peer, known.priority) = (None, None);
            return;
        }
        // Full of other kinds: there are few kinds.
        self.waiting.push_back(report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // More faults than are kept. Expect: none is forgotten, the memory is bounded.
    #[test]
    fn reports_are_added_up() {
        let mut reports = Reports::default();
        reports.add(Fault::Lost, None, 0u32);
        assert!(reports.is_empty());
        for port in 0..1000u16 {
            for _ in 0..2 {
                let peer = ((1 + port / 256, port % 256).into(), Priority::Low);
                reports.add(Fault::Lost, Some(peer), 3u32);
            }
        }
        reports.add(Fault::Changed, None, 1u32);
        assert_eq!(reports.waiting.len(), KEPT + 1);
        let mut lost = 0;
        while let Some(report) = reports.take() {
            lost += report.messages * u64::from(report.fault == Fault::Lost);
        }
        assert_eq!(lost, 6000);
    }
}
