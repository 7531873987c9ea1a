//! `[transport]`: the policy, checked as a whole, complaints at the line that causes them.

use std::ops::{Range, RangeInclusive};

use portolan_transport::policy::{Policy, Profile};
use toml::Spanned;

use super::checker::Checker;
use super::file;
use crate::transport_policy::TransportPolicy;

/// Every number is one of 32 bits; what it may be beyond that, the policy itself knows.
const WORD: RangeInclusive<i64> = 0..=u32::MAX as i64;

/// The policy as chosen and as it is; both the default's where something is wrong.
pub(super) fn transport(
    checker: &mut Checker<'_>,
    section: &file::Transport,
) -> (TransportPolicy, Policy) {
    let mut number = |name: &str, value: &Option<Spanned<i64>>| {
        let value = value.as_ref()?;
        Some(checker.number(&format!("transport.{name}"), Some(value), WORD, 1) as u32)
    };
    let chosen = TransportPolicy {
        profile: section.profile.as_ref().map(|p| p.get_ref().clone()),
        window_messages: number("window_messages", &section.window_messages),
        on_timeout: section.on_timeout.as_ref().map(|v| *v.get_ref()),
        ack: section.ack.as_ref().map(|v| *v.get_ref()),
        ack_delay_us: number("ack_delay_us", &section.ack_delay_us),
        coalesce: section.coalesce.as_ref().map(|v| *v.get_ref()),
        eager_buffers: number("eager_buffers", &section.eager_buffers),
        eager_budget_buffers: number("eager_budget_buffers", &section.eager_budget_buffers),
        unasked_bytes: number("unasked_bytes", &section.unasked_bytes),
        grant_bytes: number("grant_bytes", &section.grant_bytes),
        grant_budget_bytes: number("grant_budget_bytes", &section.grant_budget_bytes),
        crowd: number("crowd", &section.crowd),
        rto_min_us: number("rto_min_us", &section.rto_min_us),
        rto_max_us: number("rto_max_us", &section.rto_max_us),
        congestion_target_us: number("congestion_target_us", &section.congestion_target_us),
        unreachable_after_ms: number("unreachable_after_ms", &section.unreachable_after_ms),
        stream_idle_ms: number("stream_idle_ms", &section.stream_idle_ms),
        peer_idle_ms: number("peer_idle_ms", &section.peer_idle_ms),
    };
    if let (None, Some(profile)) = (chosen.profile(), &section.profile) {
        let names: Vec<&str> = Profile::ALL.iter().map(|profile| profile.name()).collect();
        let message = format!(
            "transport.profile `{}` is not known; choose one of {}",
            profile.get_ref(),
            names.join(", ")
        );
        checker.complain(profile.span(), message);
        return (TransportPolicy::default(), Policy::default());
    }
    match chosen.policy() {
        Ok(policy) => (chosen, policy),
        Err(error) => {
            let name = chosen.profile().unwrap_or(Profile::Default).name();
            let message = format!(
                "transport.{} must be {}; correct it or leave it to profile `{name}`",
                error.field, error.must
            );
            checker.complain(place(section, error.field), message);
            (TransportPolicy::default(), Policy::default())
        }
    }
}

/// Where a field of the policy is set; else where whatever else is set in the section, since the profiles by themselves are right.
fn place(section: &file::Transport, field: &str) -> Range<usize> {
    let set = section.places();
    let own = set.iter().find(|(name, _)| name.starts_with(field));
    own.or(set.first()).map_or(0..0, |(_, span)| span.clone())
}

impl file::Transport {
    /// Everything that is set, with its place, the profile last.
    fn places(&self) -> Vec<(&'static str, Range<usize>)> {
        fn span<T>(value: &Option<Spanned<T>>) -> Option<Range<usize>> {
            value.as_ref().map(Spanned::span)
        }
        let all = [
            ("window_messages", span(&self.window_messages)),
            ("on_timeout", span(&self.on_timeout)),
            // The time is what can be wrong about it.
            ("ack_delay_us", span(&self.ack_delay_us)),
            ("ack", span(&self.ack)),
            ("coalesce", span(&self.coalesce)),
            ("eager_buffers", span(&self.eager_buffers)),
            ("eager_budget_buffers", span(&self.eager_budget_buffers)),
            ("unasked_bytes", span(&self.unasked_bytes)),
            ("grant_bytes", span(&self.grant_bytes)),
            ("grant_budget_bytes", span(&self.grant_budget_bytes)),
            ("crowd", span(&self.crowd)),
            ("rto_min_us", span(&self.rto_min_us)),
            ("rto_max_us", span(&self.rto_max_us)),
            ("congestion_target_us", span(&self.congestion_target_us)),
            ("unreachable_after_ms", span(&self.unreachable_after_ms)),
            ("stream_idle_ms", span(&self.stream_idle_ms)),
            ("peer_idle_ms", span(&self.peer_idle_ms)),
            ("profile", span(&self.profile)),
        ];
        let set = all
            .into_iter()
            .filter_map(|(name, span)| Some((name, span?)));
        set.collect()
    }
}
