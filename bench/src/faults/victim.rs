//! An engine as its daemon's status describes it, and waiting for what becomes of it.
//!
//! The times of a recovery are the daemon's own, on the clock we read too. A daemon that does not report them is judged by its engine's
//! process id alone.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{Daemon, cancel};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::clock::now_ns;

/// Between two looks. The daemon's times do not depend on it, and an answer costs both of us a tenth of a millisecond of a core.
const PAUSE: Duration = Duration::from_millis(5);

/// The last recovery of an engine.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Recovery {
    /// How many there were, with this one.
    pub number: u64,
    pub cause: String,
    pub tier: String,
    pub detected_at_ns: u64,
    /// None while nobody serves yet.
    pub ready_at_ns: Option<u64>,
    pub adopted_in_ns: Option<u64>,
}

/// An engine.
#[derive(Clone, Debug, Default)]
pub struct Engine {
    pub pid: Option<i32>,
    pub state: String,
    /// `ready`, `preparing` or `none`; nothing if the daemon has no standbys.
    pub standby: Option<String>,
    pub last: Option<Recovery>,
    /// Whether the daemon reports recoveries.
    pub reports: bool,
    /// Deaths, where it does not.
    pub restarts: u64,
}

/// A recovery that was waited for.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// What the daemon says, if it does.
    pub recovery: Option<Recovery>,
    /// When the engine was ready: the daemon's figure, or when we saw it.
    pub ready_at_ns: u64,
}

/// Bounds of the watchdog, in microseconds; none where the daemon does not say.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bounds {
    pub hang_after_us: Option<u64>,
    pub stuck_after_us: Option<u64>,
}

impl Engine {
    /// Asks the daemon. There is one engine per node here.
    pub fn look(daemon: &Daemon) -> Result<Self> {
        Self::parse(&daemon.status()?)
    }

    fn parse(status: &Value) -> Result<Self> {
        let engine = &status["engines"][0];
        let last = match &engine["last_recovery"] {
            Value::Null => None,
            found => Some(Recovery::deserialize(found).context("last_recovery")?),
        };
        let pid = engine["pid"].as_i64().map(i32::try_from).transpose()?;
        Ok(Self {
            pid,
            state: engine["state"].as_str().unwrap_or_default().to_owned(),
            standby: engine["standby"].as_str().map(str::to_owned),
            last,
            reports: engine.get("last_recovery").is_some(),
            restarts: engine["restarts"].as_u64().unwrap_or(0),
        })
    }

    /// Recoveries so far.
    pub fn recoveries(&self) -> u64 {
        match &self.last {
            Some(last) => last.number,
            None if self.reports => 0,
            None => self.restarts,
        }
    }

    /// Whoever was lost last has been replaced.
    fn has_successor(&self) -> bool {
        self.last
            .as_ref()
            .is_none_or(|last| last.ready_at_ns.is_some())
    }

    /// Serving, and with a successor that waits.
    pub fn is_ready(&self) -> bool {
        let successor = self.standby.as_ref().is_none_or(|s| s == "ready");
        self.state == "running" && self.pid.is_some() && successor
    }

    /// Waits until it is ready to be hurt.
    pub fn wait_ready(daemon: &Daemon, within: Duration) -> Result<Self> {
        wait(
            daemon,
            within,
            "the engine and its standby are ready",
            |engine| engine.is_ready(),
        )
    }

    /// Waits until somebody else serves in its place.
    pub fn wait_recovered(&self, daemon: &Daemon, within: Duration) -> Result<Recovered> {
        let engine = wait(daemon, within, "the engine is replaced", |engine| {
            let replaced = match engine.reports {
                true => engine.recoveries() > self.recoveries() && engine.has_successor(),
                false => engine.pid.is_some() && engine.pid != self.pid,
            };
            replaced && engine.state == "running"
        })?;
        let ready_at_ns = match &engine.last {
            Some(last) => last.ready_at_ns.unwrap_or_else(now_ns),
            None => now_ns(),
        };
        Ok(Recovered {
            recovery: engine.last,
            ready_at_ns,
        })
    }
}

fn wait(
    daemon: &Daemon,
    within: Duration,
    what: &str,
    condition: impl Fn(&Engine) -> bool,
) -> Result<Engine> {
    let deadline = Instant::now() + within;
    loop {
        let engine = Engine::look(daemon);
        if let Ok(engine) = &engine
            && condition(engine)
        {
            return Ok(engine.clone());
        }
        if cancel::requested() {
            bail!("interrupted");
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {within:?}; last seen: {engine:?}");
        }
        std::thread::sleep(PAUSE);
    }
}

impl Bounds {
    /// As the daemon says.
    pub fn of(daemon: &Daemon) -> Result<Self> {
        let status = daemon.status()?;
        let bound = |name: &str| status["recovery"][name].as_u64();
        Ok(Self {
            hang_after_us: bound("hang_after_us"),
            stuck_after_us: bound("stuck_after_us"),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    // Status of a daemon with and without recoveries to report. Expect: each understood.
    #[test]
    fn a_status_is_understood() {
        let old = json!({ "engines": [{ "pid": 7, "state": "running", "restarts": 3 }] });
        let engine = Engine::parse(&old).unwrap();
        assert!(engine.is_ready() && !engine.reports);
        assert_eq!((engine.pid, engine.recoveries()), (Some(7), 3));
        let fresh = json!({ "engines": [{
            "pid": 8, "state": "running", "standby": "preparing", "last_recovery": null
        }] });
        let engine = Engine::parse(&fresh).unwrap();
        assert!(!engine.is_ready() && engine.reports);
        assert_eq!(engine.recoveries(), 0);
        let after = json!({ "engines": [{
            "pid": 9, "state": "running", "standby": "ready",
            "last_recovery": { "number": 4, "cause": "death", "tier": "adopt", "last_beat_ns": null, "detected_at_ns": 12,
                "fenced_at_ns": 13, "ready_at_ns": null, "adopted_in_ns": null }
        }] });
        let engine = Engine::parse(&after).unwrap();
        assert!(engine.is_ready());
        assert_eq!(engine.recoveries(), 4);
        assert!(!engine.has_successor());
        assert!(Engine::parse(&json!({})).unwrap().pid.is_none());
    }
}
