//! Whether the engines are still who they were, and what they counted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use portolan_abi::control::Request;
use serde_json::Value;

use super::control::Control;

/// The engines of a node as they were when the watch began.
pub struct Watch {
    socket: PathBuf,
    before: Vec<(u64, u64)>,
}

impl Watch {
    pub fn begin(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            before: engines(socket),
        }
    }

    /// No engine was replaced: the same processes, the same epochs.
    #[track_caller]
    pub fn assert_unharmed(&self) {
        assert_eq!(
            engines(&self.socket),
            self.before,
            "(pid, epoch) of the engines of {}",
            self.socket.display()
        );
    }
}

/// Process id and epoch of every engine.
fn engines(socket: &Path) -> Vec<(u64, u64)> {
    let control = Control::connect(socket).unwrap();
    let status = control.document(&Request::Status {}).unwrap();
    let number = |engine: &Value, key: &str| {
        engine[key]
            .as_u64()
            .unwrap_or_else(|| panic!("no {key} in {engine}"))
    };
    let engines = status["engines"].as_array().expect("engines");
    assert!(!engines.is_empty());
    engines
        .iter()
        .map(|engine| {
            assert_eq!(engine["state"], "running", "{status}");
            (number(engine, "pid"), number(engine, "epoch"))
        })
        .collect()
}

/// Every counter of a node, summed over its engines, by the last part of its name.
pub fn counters(socket: &Path) -> BTreeMap<String, u64> {
    let control = Control::connect(socket).unwrap();
    let document = control.document(&Request::Counters {}).unwrap();
    let mut sums = BTreeMap::new();
    collect(&document, "", &mut sums);
    sums
}

fn collect(value: &Value, name: &str, sums: &mut BTreeMap<String, u64>) {
    match value {
        Value::Object(entries) => {
            for (name, value) in entries {
                collect(value, name, sums);
            }
        }
        Value::Array(entries) => {
            for value in entries {
                collect(value, name, sums);
            }
        }
        Value::Number(number) => {
            if let Some(number) = number.as_u64() {
                *sums.entry(name.to_owned()).or_default() += number;
            }
        }
        _ => {}
    }
}

/// Waits until `done` returns true.
#[track_caller]
pub fn wait_until(what: &str, within: Duration, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not within {within:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
