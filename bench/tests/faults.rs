//! A small fault campaign against the daemon as it is built: a few engines hurt in each way under load. Nothing may be lost, doubled or
//! changed, every port must receive again, nobody may be replaced without a fault. `cargo xtask faults` is the large one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;
use std::time::Duration;

use portolan_testbed::process;
use serde_json::Value;

/// Bound on all of it.
const CAMPAIGN: Duration = Duration::from_secs(120);

/// Runs `portolan-bench faults`; whether it was content, what it said, and its report.
fn faults(arguments: &[&str]) -> (bool, String, Value) {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_portolan-bench"));
    command
        .arg("faults")
        .args(arguments)
        .arg("--json")
        .arg(&report);
    let finished = process::run(&mut command, CAMPAIGN).unwrap();
    let said = format!("{}{}", finished.stdout, finished.stderr);
    let text = std::fs::read_to_string(&report).unwrap_or_else(|e| panic!("{e}: {said}"));
    let report = serde_json::from_str(&text).unwrap();
    (finished.status.success(), said, report)
}

/// The same, of its report the campaigns.
fn campaign(arguments: &[&str]) -> (bool, String, Vec<Value>) {
    let (content, said, report) = faults(arguments);
    let campaigns = report["campaigns"].as_array().unwrap().clone();
    (content, said, campaigns)
}

// Expect: each fault recovered from, nothing broken, the figures that `docs/faults.md` names.
#[test]
fn engines_are_hurt_and_nothing_is_lost() {
    let (content, said, campaigns) = campaign(&["--kills", "10", "--crashes", "5", "--hangs", "6"]);
    assert!(content, "{said}");
    let kinds: Vec<&str> = campaigns
        .iter()
        .filter_map(|c| c["kind"].as_str())
        .collect();
    assert_eq!(kinds, ["kill", "crash", "hang"]);
    for campaign in &campaigns {
        let injected = campaign["injected"].as_u64().unwrap();
        assert!(injected >= 5, "{campaign}");
        for (figure, expected) in [
            ("detected", injected),
            ("recovered", injected),
            ("lost", 0),
            ("duplicated", 0),
            ("corrupted", 0),
            ("false_alarms", 0),
        ] {
            assert_eq!(campaign[figure], expected, "{figure}: {campaign}");
        }
        assert!(campaign["messages"].as_u64() > Some(1000), "{campaign}");
        for times in ["detect_us", "outage_us"] {
            assert_eq!(campaign[times]["samples"], injected, "{times}: {campaign}");
            assert!(
                campaign[times]["p50"].as_u64() > Some(0),
                "{times}: {campaign}"
            );
        }
        assert!(said.contains(campaign["kind"].as_str().unwrap()), "{said}");
    }
}

// A watchdog told to be patient for a minute does not notice a hang in two seconds. Expect: the campaign says so and fails.
#[test]
fn what_is_not_recovered_fails_the_campaign() {
    let patient = "[recovery]\nhang_after_us = 60000000\nstuck_after_us = 60000000\n";
    let (content, said, campaigns) =
        campaign(&["--hangs", "1", "--patience", "2", "--config", patient]);
    assert!(!content, "{said}");
    assert_eq!(campaigns[0]["recovered"], 0, "{said}");
    assert!(said.contains("1 not recovered"), "{said}");
}

// FTGM's Table 2, without a fault. Expect: each of its figures, of a size that a machine can have: 5 ns to 10 ms of time, a megabyte per second.
#[test]
fn what_recovery_costs_is_measured() {
    let (content, said, report) = faults(&["--cost"]);
    assert!(content, "{said}");
    let cost = &report["cost"];
    for time in [
        "latency_us",
        "host_send_us",
        "host_receive_us",
        "engine_send_us",
        "engine_receive_us",
    ] {
        let figure = cost[time].as_f64();
        assert!(
            figure > Some(0.005) && figure < Some(10_000.0),
            "{time}: {cost}"
        );
    }
    assert!(cost["bandwidth_mb_s"].as_f64() > Some(1.0), "{cost}");
    assert!(said.contains("Table 2"), "{said}");
    assert!(
        report["campaigns"].as_array().unwrap().is_empty(),
        "{report}"
    );
}
