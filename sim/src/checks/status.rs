//! Every send ends with exactly one status, and it is true.
//!
//! *Delivered*: it was committed. *NotDelivered*: it was not and never will be. *MaybeDelivered*: only where nobody can know, after a
//! restart or a silence, or because the sender closed its port. And the reason happened: a deadline that passed, a cancel that was asked for, a port that was closed.

use std::collections::BTreeSet;

use portolan_transport::host::{Reason, SendStatus};
use portolan_transport::ident::{Nanos, NodeId, PortId};

use super::{Check, Verdict};
use crate::harness::book::{Message, Route};

/// The checker.
#[derive(Default)]
pub struct Status {
    /// Reasons are judged too; otherwise only whether the status fits the commits.
    reasons: bool,
    restarted: BTreeSet<NodeId>,
    closed: BTreeSet<(NodeId, PortId)>,
    cancelled: BTreeSet<u64>,
    dropped: BTreeSet<Route>,
    silence: bool,
    /// Tables are too small for everybody.
    scarce: bool,
}

/// How far an engine's clock may be ahead of the book's within a turn.
const AHEAD: Nanos = 100_000;

impl Status {
    /// Judges reasons too: the run must report cancels, drops, restarts and silences.
    pub fn with_reasons(scarce: bool) -> Self {
        Self {
            reasons: true,
            scarce,
            ..Self::default()
        }
    }

    /// Whether what the status gives as its reason happened.
    fn happened(&self, now: Nanos, id: u64, message: &Message, reason: Reason) -> bool {
        let Route { from, to, .. } = message.route;
        match reason {
            Reason::Deadline => message.deadline <= now + AHEAD,
            Reason::Cancelled => self.cancelled.contains(&id),
            Reason::Dropped => self.dropped.contains(&message.route),
            Reason::PeerRestarted => self.restarted.contains(&to.0),
            Reason::Unreachable => self.silence,
            // A port that was never opened looks like a closed one; runs open all they send to, or say that they closed it.
            Reason::PortClosed => {
                let gone = |end| self.closed.contains(end) || self.restarted.contains(&end.0);
                gone(&to) || gone(&from)
            }
            Reason::TooLong => message.too_long,
            Reason::NoResources => self.scarce,
            Reason::Refused => message.refused,
            Reason::NoRoute | Reason::Incompatible | Reason::BadMemory => false,
        }
    }
}

impl Check for Status {
    fn name(&self) -> &'static str {
        "status"
    }

    fn committed(
        &mut self,
        _now: Nanos,
        id: u64,
        message: Option<&Message>,
        _route: Route,
        _bytes: &[u8],
    ) -> Verdict {
        match message {
            Some(m) if matches!(m.status, Some(SendStatus::NotDelivered(_))) => Err(format!(
                "message {id} is delivered after its sender was told it would not be: {m:?}"
            )),
            _ => Ok(()),
        }
    }

    fn completed(&mut self, now: Nanos, id: u64, message: &Message, status: SendStatus) -> Verdict {
        if message.status.is_some() {
            return Err(format!(
                "message {id} ends twice, now {status:?}: {message:?}"
            ));
        }
        let reason = match status {
            SendStatus::Delivered if message.commits == 1 => return Ok(()),
            SendStatus::Delivered => {
                return Err(format!("message {id} is called delivered: {message:?}"));
            }
            SendStatus::NotDelivered(_) if message.commits != 0 => {
                return Err(format!(
                    "message {id} was delivered, now {status:?}: {message:?}"
                ));
            }
            SendStatus::NotDelivered(reason) => reason,
            SendStatus::MaybeDelivered(reason) => {
                let Route { from, to, .. } = message.route;
                let nobody_knows =
                    self.silence || self.restarted.contains(&to.0) || self.closed.contains(&from);
                if self.reasons && !nobody_knows {
                    return Err(format!(
                        "message {id} ends {status:?}, and it can be known: {message:?}"
                    ));
                }
                reason
            }
        };
        if self.reasons && !self.happened(now, id, message, reason) {
            return Err(format!(
                "message {id} ends {status:?}, which did not happen by {now}: {message:?}"
            ));
        }
        Ok(())
    }

    fn cancelled(&mut self, id: u64) {
        self.cancelled.insert(id);
    }

    fn dropped(&mut self, route: Route) {
        self.dropped.insert(route);
    }

    fn port_closed(&mut self, node: NodeId, port: PortId) -> Verdict {
        self.closed.insert((node, port));
        Ok(())
    }

    fn node_restarted(&mut self, node: NodeId) {
        self.restarted.insert(node);
    }

    fn silence(&mut self) {
        self.silence = true;
    }

    fn end_of_run(&mut self, messages: &[Message]) -> Verdict {
        let open = (0..)
            .zip(messages)
            .find(|(_, m)| m.status.is_none() && !m.abandoned);
        match open {
            Some((id, message)) => Err(format!("message {id} has no status: {message:?}")),
            None => Ok(()),
        }
    }
}
