//! An engine's last recovery, as its daemon describes it.

use serde_json::Value;

use crate::table::duration;

/// The last recovery of an engine.
pub struct Recovery<'v> {
    /// `last_recovery` in the engine's status.
    pub document: &'v Value,
}

impl<'v> Recovery<'v> {
    /// Of this engine, if it was ever lost.
    pub fn of(engine: &'v Value) -> Option<Self> {
        let document = &engine["last_recovery"];
        document.is_object().then_some(Self { document })
    }

    /// How many there were, with this one.
    pub fn number(&self) -> u64 {
        self.document["number"].as_u64().unwrap_or(0)
    }

    /// Whether somebody serves again.
    pub fn is_over(&self) -> bool {
        self.time("ready_at_ns").is_some()
    }

    fn time(&self, key: &str) -> Option<u64> {
        self.document[key].as_u64().filter(|time| *time > 0)
    }

    /// From the last sign of life to when its loss was noticed, and from there to its successor serving; `-` for what is not known.
    pub fn spans(&self) -> (String, String) {
        let span = |from: &str, to: &str| match (self.time(from), self.time(to)) {
            (Some(from), Some(to)) => duration(to.saturating_sub(from) as f64),
            _ => "-".to_owned(),
        };
        (
            span("last_beat_ns", "detected_at_ns"),
            span("detected_at_ns", "ready_at_ns"),
        )
    }
}
