//! `[recovery]`: how engines are watched and replaced. The defaults are reasoned in docs/recovery.md.

use std::time::Duration;

use super::Recovery;
use super::checker::Checker;
use super::file;
use crate::supervisor::escalation::Bounds;

/// CPU time without a sign of life, microseconds.
const HANG_AFTER_US: i64 = 20_000;
/// Stopped or blocked without one, microseconds.
const STUCK_AFTER_US: i64 = 100_000;

/// From a death to the start of the next standby, milliseconds.
const STANDBY_AFTER_MS: i64 = 100;

pub(super) fn recovery(checker: &mut Checker<'_>, recovery: &file::Recovery) -> Recovery {
    let yes = |value: &Option<toml::Spanned<bool>>| value.as_ref().is_none_or(|v| *v.get_ref());
    let standard = Bounds::default();
    let mut times = |what, value: &Option<toml::Spanned<i64>>, default: u32| {
        checker.number(what, value.as_ref(), 0..=1000, default.into()) as u32
    };
    let adoptions = times(
        "recovery.adoptions",
        &recovery.adoptions,
        standard.adoptions,
    );
    let resets = times("recovery.resets", &recovery.resets, standard.resets);
    let rebuilds = times("recovery.rebuilds", &recovery.rebuilds, standard.rebuilds);
    let healthy = checker.number(
        "recovery.healthy_after_ms",
        recovery.healthy_after_ms.as_ref(),
        1..=60_000,
        standard.healthy_after.as_millis() as i64,
    );
    let standby_after = checker.number(
        "recovery.standby_after_ms",
        recovery.standby_after_ms.as_ref(),
        0..=10_000,
        STANDBY_AFTER_MS,
    );
    Recovery {
        standby_after: Duration::from_millis(standby_after as u64),
        hang_after_us: checker.number(
            "recovery.hang_after_us",
            recovery.hang_after_us.as_ref(),
            1_000..=60_000_000,
            HANG_AFTER_US,
        ) as u64,
        stuck_after_us: checker.number(
            "recovery.stuck_after_us",
            recovery.stuck_after_us.as_ref(),
            5_000..=600_000_000,
            STUCK_AFTER_US,
        ) as u64,
        challenge: yes(&recovery.challenge),
        standby: yes(&recovery.standby),
        escalation: Bounds {
            healthy_after: Duration::from_millis(healthy as u64),
            adoptions,
            resets,
            rebuilds,
        },
    }
}
