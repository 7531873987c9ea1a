//! `[engine]`: where engines run and how they wait.

use std::time::Duration;

use super::checker::Checker;
use super::file;
use crate::engine_link::Wait;
use crate::supervisor::surroundings::Surroundings;

/// More than a second, which is how long applications pause that send now and then: heartbeats, polls, somebody's keystrokes.
const KEEP_AWAKE_MS: i64 = 2_000;

pub(super) fn wait(engine: &file::Engine) -> Wait {
    let said = engine.wait.as_ref();
    said.map_or(Wait::Adaptive, |wait| *wait.get_ref())
}

pub(super) fn keep_awake(checker: &mut Checker<'_>, engine: &file::Engine) -> Duration {
    let ms = checker.number(
        "engine.keep_awake_ms",
        engine.keep_awake_ms.as_ref(),
        0..=3_600_000,
        KEEP_AWAKE_MS,
    );
    Duration::from_millis(ms as u64)
}

pub(super) fn cores(
    checker: &mut Checker<'_>,
    engine: &file::Engine,
    engines: usize,
    surroundings: &dyn Surroundings,
) -> Vec<usize> {
    let list = engine.cores.as_ref();
    let Some(list) = list.filter(|list| !list.get_ref().is_empty()) else {
        return Vec::new();
    };
    if list.get_ref().len() != engines {
        let message = format!(
            "engine.cores names {} cores for {engines} engines; name one for each queue, or none",
            list.get_ref().len()
        );
        checker.complain(list.span(), message);
    }
    let there = surroundings.cores();
    let mut cores = Vec::new();
    for value in list.get_ref() {
        match usize::try_from(*value.get_ref()) {
            Ok(core) if there.contains(&core) => cores.push(core),
            _ => {
                let message = format!(
                    "there is no core {} for us; choose of {there:?}",
                    value.get_ref()
                );
                checker.complain(value.span(), message);
            }
        }
    }
    cores
}
