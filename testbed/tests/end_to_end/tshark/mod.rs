//! Runs tshark with Portolan's dissector over captures, and reads what it found.

pub mod capture;
pub mod dialogue;
pub mod expected;
pub mod samples;
pub mod session;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use portolan_testbed::process;
use serde_json::Value;

/// The dissector.
pub const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../deploy/wireshark/portolan.lua"
);
/// Bound on one run of tshark.
const RUN: Duration = Duration::from_secs(60);
/// tshark's severity of an error.
pub const ERROR: &str = "8388608";

/// The values of a packet's fields, by name, each as often as it is there.
pub type Fields = BTreeMap<String, Vec<String>>;

/// How tshark reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Each packet once, as it comes.
    One,
    /// All packets twice, so that a packet knows of later ones.
    Two,
}

pub const BOTH: [Passes; 2] = [Passes::One, Passes::Two];

/// What tshark says of a capture. It must end well and without a word about Lua.
pub fn run(capture: &Path, passes: Passes, arguments: &[&str]) -> String {
    let mut command = Command::new("tshark");
    command.arg("-X").arg(format!("lua_script:{SCRIPT}"));
    // Whoever runs the tests may have settings and plugins.
    let home = capture.parent().unwrap();
    command
        .env("HOME", home)
        .env("XDG_CONFIG_HOME", home)
        .env("LC_ALL", "C.UTF-8");
    if passes == Passes::Two {
        command.arg("-2");
    }
    command.arg("-r").arg(capture).args(arguments);
    let finished = process::run(&mut command, RUN)
        .expect("tshark; `apt-get install tshark` or `cargo xtask test` installs it");
    assert!(finished.status.success(), "{finished:?}");
    assert!(!finished.stderr.contains("Lua"), "{}", finished.stderr);
    finished.stdout
}

/// These fields of each packet, in order; each may be there any number of times. None may be one of [`ACCIDENTS`].
#[track_caller]
pub fn rows(capture: &Path, passes: Passes, names: &[&str]) -> Vec<Vec<Vec<String>>> {
    let mut arguments = vec!["-T", "fields", "-E", "aggregator=;"];
    for name in ACCIDENTS.iter().chain(names) {
        arguments.extend(["-e", name]);
    }
    let values = |cell: &str| match cell {
        "" => Vec::new(),
        cell => cell.split(';').map(str::to_owned).collect(),
    };
    let text = run(capture, passes, &arguments);
    let mut rows = Vec::new();
    for line in text.lines() {
        let mut row: Vec<Vec<String>> = line.split('\t').map(values).collect();
        let asked = row.split_off(ACCIDENTS.len());
        no_accident(rows.len() + 1, &row);
        rows.push(asked);
    }
    rows
}

/// What is asked of every packet: whether Lua stumbled, or somebody went beyond the packet's bytes.
const ACCIDENTS: [&str; 4] = [
    "_ws.lua.error",
    "_ws.expert.message",
    "_ws.malformed",
    "portolan.expert.malformed",
];

#[track_caller]
fn no_accident(packet: usize, row: &[Vec<String>]) {
    let exception = row[1].iter().any(|text| text.contains("Exception"));
    assert!(row[0].is_empty() && !exception, "packet {packet}: {row:?}");
    // It is so called by us, or else by tshark.
    let (by_anybody, by_us) = (!row[2].is_empty(), !row[3].is_empty());
    assert_eq!(by_anybody, by_us, "packet {packet}: {row:?}");
}

/// All fields of each packet that belong to Portolan's frames, and what experts say.
pub fn packets(capture: &Path, passes: Passes) -> Vec<Fields> {
    let text = run(capture, passes, &["-T", "json", "--no-duplicate-keys"]);
    let packets: Vec<Value> = serde_json::from_str(&text).unwrap();
    let fields = |packet: &Value| {
        let mut fields = Fields::new();
        collect("", &packet["_source"]["layers"], &mut fields);
        fields
    };
    packets.iter().map(fields).collect()
}

fn collect(name: &str, value: &Value, fields: &mut Fields) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                collect(name, value, fields);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(name, value, fields)),
        Value::String(text) if name.starts_with("portolan.") || name.starts_with("_ws.") => {
            fields
                .entry(name.to_owned())
                .or_default()
                .push(text.clone());
        }
        _ => {}
    }
}
