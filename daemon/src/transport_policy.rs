//! The transport's policy as a configuration chooses it: a profile by name, and what of it is changed.
//!
//! Supervisor and engine are told the same few words and make the same [`Policy`] of them; the engine does not believe more than
//! that. What both ends of the wire must agree on (how losses are recovered, what an acknowledgement covers) and the order of
//! commits come with the profile alone: changing one of them by itself would make a protocol that no paper describes.

use portolan_transport::policy::{Ack, Congestion, OnTimeout, Policy, PolicyError, Profile};
use serde::{Deserialize, Serialize};

/// What the retransmission timer does, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimerAction {
    /// Asks what is missing.
    Probe,
    /// Sends the oldest again.
    Resend,
}

/// When commits are acknowledged, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AckTime {
    /// At once.
    Immediate,
    /// With the next frame, or after `ack_delay_us`.
    Delayed,
    /// Only with a frame that goes anyway, or after `ack_delay_us`.
    Piggybacked,
}

/// A profile and what of it is changed. The fields are those of [`Policy`]; `None` leaves what the profile says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransportPolicy {
    /// The profile's name; `None` is `default`.
    pub profile: Option<String>,
    /// [`Policy::window_messages`].
    pub window_messages: Option<u32>,
    /// [`Policy::on_timeout`].
    pub on_timeout: Option<TimerAction>,
    /// [`Policy::ack`].
    pub ack: Option<AckTime>,
    /// Its longest wait, in microseconds.
    pub ack_delay_us: Option<u32>,
    /// [`Policy::coalesce`].
    pub coalesce: Option<bool>,
    /// [`Policy::eager_buffers`].
    pub eager_buffers: Option<u32>,
    /// [`Policy::eager_budget_buffers`].
    pub eager_budget_buffers: Option<u32>,
    /// [`Policy::unasked_bytes`].
    pub unasked_bytes: Option<u32>,
    /// [`Policy::grant_bytes`].
    pub grant_bytes: Option<u32>,
    /// [`Policy::grant_budget_bytes`].
    pub grant_budget_bytes: Option<u32>,
    /// [`Policy::crowd`].
    pub crowd: Option<u32>,
    /// [`Policy::rto_min_us`].
    pub rto_min_us: Option<u32>,
    /// [`Policy::rto_max_us`].
    pub rto_max_us: Option<u32>,
    /// The target of the profile's [`Congestion`], of [`Congestion::Delay`] if it has none; 0: [`Congestion::None`].
    pub congestion_target_us: Option<u32>,
    /// [`Policy::unreachable_after_ms`].
    pub unreachable_after_ms: Option<u32>,
    /// [`Policy::stream_idle_ms`].
    pub stream_idle_ms: Option<u32>,
    /// [`Policy::peer_idle_ms`].
    pub peer_idle_ms: Option<u32>,
}

impl TransportPolicy {
    /// The profile; `None`: there is none of that name.
    pub fn profile(&self) -> Option<Profile> {
        match &self.profile {
            None => Some(Profile::Default),
            Some(name) => Profile::named(name),
        }
    }

    /// Whether anything but the profile's name is given.
    pub fn is_changed(&self) -> bool {
        let unchanged = Self {
            profile: self.profile.clone(),
            ..Self::default()
        };
        *self != unchanged
    }

    /// The policy.
    ///
    /// # Errors
    /// A field of [`Policy`] that cannot work, or `profile`.
    pub fn policy(&self) -> Result<Policy, PolicyError> {
        let profile = self.profile().ok_or(PolicyError {
            field: "profile",
            must: "the name of a profile",
        })?;
        let base = profile.policy();
        let policy = Policy {
            window_messages: self.window_messages.unwrap_or(base.window_messages),
            on_timeout: match self.on_timeout {
                None => base.on_timeout,
                Some(TimerAction::Probe) => OnTimeout::Probe,
                Some(TimerAction::Resend) => OnTimeout::Resend,
            },
            ack: self.ack(base.ack),
            coalesce: self.coalesce.unwrap_or(base.coalesce),
            eager_buffers: self.eager_buffers.unwrap_or(base.eager_buffers),
            eager_budget_buffers: self
                .eager_budget_buffers
                .unwrap_or(base.eager_budget_buffers),
            unasked_bytes: self.unasked_bytes.unwrap_or(base.unasked_bytes),
            grant_bytes: self.grant_bytes.unwrap_or(base.grant_bytes),
            grant_budget_bytes: self.grant_budget_bytes.unwrap_or(base.grant_budget_bytes),
            crowd: self.crowd.unwrap_or(base.crowd),
            rto_min_us: self.rto_min_us.unwrap_or(base.rto_min_us),
            rto_max_us: self.rto_max_us.unwrap_or(base.rto_max_us),
            congestion: match self.congestion_target_us {
                None => base.congestion,
                Some(0) => Congestion::None,
                Some(target_us) => match base.congestion {
                    Congestion::DelayAndLoss { .. } => Congestion::DelayAndLoss { target_us },
                    Congestion::None | Congestion::Delay { .. } => Congestion::Delay { target_us },
                },
            },
            unreachable_after_ms: self
                .unreachable_after_ms
                .unwrap_or(base.unreachable_after_ms),
            stream_idle_ms: self.stream_idle_ms.unwrap_or(base.stream_idle_ms),
            peer_idle_ms: self.peer_idle_ms.unwrap_or(base.peer_idle_ms),
            ..base
        };
        policy.validate()?;
        Ok(policy)
    }

    /// Its time is what was asked for, or the profile's, or what the default policy waits.
    fn ack(&self, base: Ack) -> Ack {
        /// What a delay is where neither the configuration nor the profile knows one.
        const DELAY_US: u32 = 50;
        let (base_time, base_delay) = match base {
            Ack::Immediate => (AckTime::Immediate, DELAY_US),
            Ack::Delayed { delay_us } => (AckTime::Delayed, delay_us),
            Ack::Piggybacked { at_most_us } => (AckTime::Piggybacked, at_most_us),
        };
        let delay_us = self.ack_delay_us.unwrap_or(base_delay);
        match self.ack.unwrap_or(base_time) {
            AckTime::Immediate => Ack::Immediate,
            AckTime::Delayed => Ack::Delayed { delay_us },
            AckTime::Piggybacked => Ack::Piggybacked {
                at_most_us: delay_us,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_said_is_the_default() {
        let chosen = TransportPolicy::default();
        assert_eq!(chosen.policy(), Ok(Policy::default()));
        assert!(!chosen.is_changed());
    }

    #[test]
    fn every_profile_is_chosen_by_its_name() {
        for profile in Profile::ALL {
            let chosen = TransportPolicy {
                profile: Some(profile.name().to_owned()),
                ..TransportPolicy::default()
            };
            assert_eq!(chosen.policy(), Ok(profile.policy()));
            assert!(!chosen.is_changed());
        }
        let chosen = TransportPolicy {
            profile: Some("tcp".to_owned()),
            ..TransportPolicy::default()
        };
        assert_eq!(chosen.policy().unwrap_err().field, "profile");
    }

    #[test]
    fn every_override_changes_its_field_and_nothing_else() {
        let changed = TransportPolicy {
            profile: Some("ftgm".to_owned()),
            window_messages: Some(7),
            on_timeout: Some(TimerAction::Probe),
            ack: Some(AckTime::Piggybacked),
            ack_delay_us: Some(99),
            coalesce: Some(true),
            eager_buffers: Some(11),
            eager_budget_buffers: Some(1100),
            unasked_bytes: Some(256),
            grant_bytes: Some(13),
            grant_budget_bytes: Some(1300),
            crowd: Some(17),
            rto_min_us: Some(1900),
            rto_max_us: Some(190_000),
            congestion_target_us: Some(23),
            unreachable_after_ms: Some(2900),
            stream_idle_ms: Some(31),
            peer_idle_ms: Some(37),
        };
        assert!(changed.is_changed());
        let expected = Policy {
            window_messages: 7,
            on_timeout: OnTimeout::Probe,
            ack: Ack::Piggybacked { at_most_us: 99 },
            coalesce: true,
            eager_buffers: 11,
            eager_budget_buffers: 1100,
            unasked_bytes: 256,
            grant_bytes: 13,
            grant_budget_bytes: 1300,
            crowd: 17,
            rto_min_us: 1900,
            rto_max_us: 190_000,
            congestion: Congestion::Delay { target_us: 23 },
            unreachable_after_ms: 2900,
            stream_idle_ms: 31,
            peer_idle_ms: 37,
            ..Profile::Ftgm.policy()
        };
        assert_eq!(changed.policy(), Ok(expected));
        // The same words across the link to the engine.
        let text = serde_json::to_string(&changed).unwrap();
        assert_eq!(
            serde_json::from_str::<TransportPolicy>(&text).unwrap(),
            changed
        );
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let chosen = TransportPolicy {
            window_messages: Some(0),
            ..TransportPolicy::default()
        };
        assert_eq!(chosen.policy().unwrap_err().field, "window_messages");
    }
}
