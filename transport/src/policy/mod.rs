//! The `Policy`: every choice on which the five papers differ, as one validated value.
//!
//! Problem: ParaStation2, RMPP, GAMMA, Tam's go-back-N and FTGM answer the same questions (what is sent again, when is it acknowledged,
//! who may send how much) differently. One protocol, whose answers are chosen: transport.md §12
//!
//! Idea: a field per question, independent of the others as far as the protocol allows; [`Policy::validate`] refuses what cannot
//! work. What both ends must agree on travels in HELLO ([`Policy::wire`]); the rest is each end's own affair. The papers' sets of
//! answers have names, in [`profiles`](Profile).

mod profiles;

pub use profiles::Profile;

use crate::wire::chunk::{ACK_WORDS, PolicyWire};

/// Most messages of one stream under way: what the acknowledgement's bitmap covers.
pub const WINDOW_MAX: u32 = 64 * ACK_WORDS as u32;
/// What HELLO counts unasked bytes in.
pub const UNASKED_UNIT: u32 = 256;
/// Most bytes of a long message that may come without a grant: as many as HELLO can say.
pub const UNASKED_MAX: u32 = 255 * UNASKED_UNIT;
/// Most messages under way where they commit in order of arrival: the bits of the durable record.
pub const WINDOW_MAX_ARRIVAL: u32 = 16;

/// What is sent again after a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Everything from the first missing message on; what comes out of order is dropped.
    GoBackN {
        /// Tam's Stall (003 §4.2.1) on both sides: one NACK, then silence; nothing new until a positive acknowledgement. Without it
        /// every message out of order is NACKed, and new ones go on (ParaStation2, 000).
        stall: bool,
    },
    /// The message that lost something, from its first byte, when the sender's timer says so; the receiver only drops (RMPP, 001).
    WholeMessage,
    /// Exactly what is missing: messages out of order are kept in their buffers.
    Selective,
}

/// What the retransmission timer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTimeout {
    /// Asks with a header; the answer says what is missing.
    Probe,
    /// Sends the oldest again, as the papers do.
    Resend,
}

/// When a commit is acknowledged, unless the send says otherwise ([`AckMode`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    /// At once.
    Immediate,
    /// With the next frame to the peer, or after `delay_us`, or when a quarter of the window waits.
    Delayed {
        /// Longest wait, in microseconds.
        delay_us: u32,
    },
    /// Only with a frame that goes to the peer anyway, or after `at_most_us`.
    Piggybacked {
        /// Longest wait, in microseconds; shorter than the sender's timer.
        at_most_us: u32,
    },
}

/// A send's own wish about its acknowledgement (Tam: chosen by the layer above, per message).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AckMode {
    /// As the receiver's policy says.
    #[default]
    Policy,
    /// At once.
    Immediate,
    /// Whenever a frame goes back anyway.
    Lazy,
}

/// What one acknowledgement covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckRule {
    /// Everything before a number.
    Cumulative,
    /// One message; an acknowledgement that leaves others out marks those for retransmission (ParaStation2 Table 1).
    Exact,
}

/// In which order the messages of a stream commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In order of their numbers.
    Number,
    /// First chunks in order of their numbers; a short message may commit during a long one (RMPP).
    Arrival,
}

/// How a sender answers congestion with the traffic nobody granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Congestion {
    /// Not at all; credits alone bound it.
    None,
    /// A window per peer that follows the measured delay (Swift, SIGCOMM 2020).
    Delay {
        /// Round trip, above the smallest one seen, at which the window neither grows nor shrinks, in microseconds.
        target_us: u32,
    },
    /// As `Delay`, but the window shrinks only in a round trip that lost something too. Where engines share their cores with others a
    /// round trip is long because somebody did not run, and that is no congestion.
    DelayAndLoss {
        /// As in `Delay`.
        target_us: u32,
    },
}

impl Congestion {
    /// The target in microseconds; 0 without one.
    pub fn target_us(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Delay { target_us } | Self::DelayAndLoss { target_us } => target_us,
        }
    }
}

/// A protocol policy. [`Endpoint`](crate::Endpoint) relies on [`Policy::validate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Messages under way per stream, 1 to [`WINDOW_MAX`].
    pub window_messages: u32,
    /// Recovery from loss. Both ends must agree on the kind.
    pub recovery: Recovery,
    /// What the timer does.
    pub on_timeout: OnTimeout,
    /// When commits are acknowledged.
    pub ack: Ack,
    /// What an acknowledgement covers. Both ends must agree.
    pub ack_rule: AckRule,
    /// Order of commits.
    pub order: Order,
    /// Small messages share frames.
    pub coalesce: bool,
    /// Receive buffers (UMEM frames) an active peer may fill unasked (GAMMA's credit).
    pub eager_buffers: u32,
    /// Sum of them over all peers; a peer beyond it has no credit and asks first. 0: no bound.
    pub eager_budget_buffers: u32,
    /// First bytes of a long message that a peer may send without a grant, on its credit: a multiple of 256, at most [`UNASKED_MAX`].
    /// Only where recovery is selective.
    pub unasked_bytes: u32,
    /// Bytes granted ahead to one long message.
    pub grant_bytes: u32,
    /// Bytes granted ahead to all long messages together (RMPP Figure 8's budget).
    pub grant_budget_bytes: u32,
    /// Long messages under way above which senders are asked to let requests travel without data.
    pub crowd: u32,
    /// Retransmission timeout's bounds, in microseconds; equal ones make a fixed timer.
    pub rto_min_us: u32,
    /// Upper bound after backoff.
    pub rto_max_us: u32,
    /// Congestion response.
    pub congestion: Congestion,
    /// Silence after which a peer is unreachable, in milliseconds.
    pub unreachable_after_ms: u32,
    /// Silence after which an idle stream is closed and its record reclaimed, in milliseconds.
    pub stream_idle_ms: u32,
    /// Silence after which a peer without streams is forgotten but for its durable record, in milliseconds.
    pub peer_idle_ms: u32,
}

/// Why a policy cannot work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyError {
    /// The field.
    pub field: &'static str,
    /// What it must be.
    pub must: &'static str,
}

impl core::fmt::Display for PolicyError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} must be {}", self.field, self.must)
    }
}

impl core::error::Error for PolicyError {}

impl Default for Policy {
    fn default() -> Self {
        Profile::Default.policy()
    }
}

impl Policy {
    /// Refuses what cannot work, naming the field.
    pub fn validate(&self) -> Result<(), PolicyError> {
        let delay = match self.ack {
            Ack::Immediate => 0,
            Ack::Delayed { delay_us } => delay_us,
            Ack::Piggybacked { at_most_us } => at_most_us,
        };
        let window = match self.order {
            Order::Number => WINDOW_MAX,
            Order::Arrival => WINDOW_MAX_ARRIVAL,
        };
        let target = self.congestion == Congestion::None || self.congestion.target_us() > 0;
        let unreachable = u64::from(self.unreachable_after_ms) * 1_000;
        let rules = [
            (
                (1..=WINDOW_MAX).contains(&self.window_messages),
                "window_messages",
                "1 to 512",
            ),
            (
                self.window_messages <= window,
                "window_messages",
                "at most 16 where messages commit in order of arrival",
            ),
            (
                self.ack_rule == AckRule::Cumulative
                    || matches!(self.recovery, Recovery::GoBackN { .. }),
                "ack_rule",
                "cumulative unless recovery is go-back-n",
            ),
            (
                self.recovery != Recovery::WholeMessage || self.on_timeout == OnTimeout::Resend,
                "on_timeout",
                "resend where recovery is whole-message: nothing else finds a loss",
            ),
            (self.eager_buffers >= 1, "eager_buffers", "at least 1"),
            (
                self.eager_budget_buffers == 0 || self.eager_budget_buffers >= self.eager_buffers,
                "eager_budget_buffers",
                "0 (no bound) or at least eager_buffers",
            ),
            (
                self.unasked_bytes <= UNASKED_MAX
                    && self.unasked_bytes.is_multiple_of(UNASKED_UNIT),
                "unasked_bytes",
                "a multiple of 256, at most 65280",
            ),
            (self.grant_bytes >= 1, "grant_bytes", "at least 1"),
            (
                self.grant_budget_bytes >= self.grant_bytes,
                "grant_budget_bytes",
                "at least grant_bytes",
            ),
            (self.rto_min_us >= 1, "rto_min_us", "at least 1"),
            (
                self.rto_max_us >= self.rto_min_us,
                "rto_max_us",
                "at least rto_min_us",
            ),
            (
                delay < self.rto_min_us,
                "ack",
                "delayed by less than rto_min_us",
            ),
            (target, "congestion", "given a target of at least 1 us"),
            (
                unreachable > u64::from(self.rto_max_us),
                "unreachable_after_ms",
                "longer than rto_max_us",
            ),
            (self.stream_idle_ms >= 1, "stream_idle_ms", "at least 1"),
            (self.peer_idle_ms >= 1, "peer_idle_ms", "at least 1"),
        ];
        match rules.iter().find(|rule| !rule.0) {
            None => Ok(()),
            Some(&(_, field, must)) => Err(PolicyError { field, must }),
        }
    }

    /// First bytes of a long message that are taken without a grant.
    pub fn unasked(&self) -> u32 {
        match self.recovery {
            Recovery::Selective => self.unasked_bytes,
            // Bytes that the papers' receivers could not tell a hole from.
            Recovery::GoBackN { .. } | Recovery::WholeMessage => 0,
        }
    }

    /// What HELLO says of the policy.
    pub fn wire(&self) -> PolicyWire {
        PolicyWire {
            recovery: match self.recovery {
                Recovery::GoBackN { .. } => 1,
                Recovery::WholeMessage => 2,
                Recovery::Selective => 3,
            },
            ack_rule: match self.ack_rule {
                AckRule::Cumulative => 1,
                AckRule::Exact => 2,
            },
            order: match self.order {
                Order::Number => 1,
                Order::Arrival => 2,
            },
        }
    }

    /// The first field on which two ends must agree and do not: its number in RESET, 1 recovery, 2 ack_rule.
    pub fn misfit(&self, other: &PolicyWire) -> Option<u8> {
        let ours = self.wire();
        if ours.recovery != other.recovery {
            Some(1)
        } else if ours.ack_rule != other.ack_rule {
            Some(2)
        } else {
            None
        }
    }
}

/// The name of a field that [`Policy::misfit`] numbers.
pub fn misfit_name(detail: u8) -> &'static str {
    match detail {
        1 => "recovery",
        2 => "ack_rule",
        _ => "policy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_is_valid_and_has_its_name() {
        for profile in Profile::ALL {
            assert_eq!(profile.policy().validate(), Ok(()), "{}", profile.name());
            assert_eq!(Profile::named(profile.name()), Some(profile));
        }
        assert_eq!(Profile::named("none"), None);
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let refused = |change: fn(&mut Policy)| {
            let mut policy = Policy::default();
            change(&mut policy);
            policy.validate().unwrap_err().field
        };
        assert_eq!(refused(|p| p.window_messages = 0), "window_messages");
        assert_eq!(refused(|p| p.window_messages = 513), "window_messages");
        assert_eq!(refused(|p| p.order = Order::Arrival), "window_messages");
        assert_eq!(
            refused(|p| (p.ack_rule, p.recovery) = (AckRule::Exact, Recovery::Selective)),
            "ack_rule"
        );
        assert_eq!(
            refused(|p| p.recovery = Recovery::WholeMessage),
            "on_timeout"
        );
        assert_eq!(refused(|p| p.eager_buffers = 0), "eager_buffers");
        assert_eq!(
            refused(|p| p.eager_budget_buffers = 1),
            "eager_budget_buffers"
        );
        assert_eq!(refused(|p| p.unasked_bytes = 255), "unasked_bytes");
        assert_eq!(refused(|p| p.unasked_bytes = 256 * 256), "unasked_bytes");
        assert_eq!(refused(|p| p.grant_bytes = 0), "grant_bytes");
        assert_eq!(refused(|p| p.grant_budget_bytes = 1), "grant_budget_bytes");
        assert_eq!(refused(|p| p.rto_min_us = 0), "rto_min_us");
        assert_eq!(refused(|p| p.rto_max_us = 1), "rto_max_us");
        assert_eq!(
            refused(|p| p.ack = Ack::Delayed { delay_us: 1 << 30 }),
            "ack"
        );
        assert_eq!(
            refused(|p| p.congestion = Congestion::Delay { target_us: 0 }),
            "congestion"
        );
        assert_eq!(
            refused(|p| p.unreachable_after_ms = 1),
            "unreachable_after_ms"
        );
        assert_eq!(refused(|p| p.stream_idle_ms = 0), "stream_idle_ms");
        assert_eq!(refused(|p| p.peer_idle_ms = 0), "peer_idle_ms");
    }

    #[test]
    fn who_can_work_together() {
        let fits = |a: Profile, b: Profile| a.policy().misfit(&b.policy().wire()).map(misfit_name);
        assert_eq!(fits(Profile::Gamma, Profile::GbnStall), None);
        assert_eq!(fits(Profile::Rmpp, Profile::GbnStall), Some("recovery"));
        assert_eq!(fits(Profile::Ftgm, Profile::ParaStation2), Some("ack_rule"));
    }
}
