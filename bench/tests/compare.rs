//! The comparison itself: a small one to its end, and one that is interrupted. What it measures here means nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use portolan_testbed::process::{self, OnCancel};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Bound on each.
const COMPARED: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(5);
/// Long enough for thousands of frames.
const STOPPED: Duration = Duration::from_millis(5);

fn compare() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portolan-bench"));
    command.args(["compare", "--quick"]);
    command
}

// One turn of two cases. Expect: a figure of every subject, in the report's shape, each limit's ratio to itself 1, and a table.
#[test]
fn every_subject_has_a_figure() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report.json");
    let mut command = compare();
    command.args([
        "pingpong-64",
        "stream-64k-mtu1500",
        "--turns",
        "1",
        "--json",
    ]);
    let finished = process::run(command.arg(&path), COMPARED).unwrap();
    let said = format!("{}{}", finished.stdout, finished.stderr);
    assert!(finished.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(report["failures"].as_array().unwrap().is_empty(), "{said}");
    let results = report["results"].as_array().unwrap();
    let of = |case: &str, subject: &str| {
        let is = |line: &&Value| line["case"] == case && line["subject"] == subject;
        let line = results.iter().find(is);
        line.unwrap_or_else(|| panic!("nothing of {subject} at {case}: {said}"))
    };
    for subject in [
        "portolan",
        "limit-raw-xdp",
        "limit-relay",
        "limit-relay-crc",
        "kernel-tcp",
        "kernel-tcp-nogso",
    ] {
        let ways = of("pingpong-64", subject);
        assert_eq!(ways["metric"], "one_way_ns");
        // A veth pair is slower than a hundred nanoseconds; and messages were counted, not one.
        assert!(ways["p50"].as_f64() > Some(100.0), "{ways}");
        assert!(ways["p50"].as_f64() <= ways["p999"].as_f64(), "{ways}");
        assert!(ways["samples"].as_u64() > Some(10), "{ways}");
        let stream = of("stream-64k-mtu1500", subject);
        assert_eq!(
            (&stream["unit"], &stream["mtu"]),
            (&"bit/s".into(), &1500.into())
        );
        assert!(stream["value"].as_f64() > Some(1e7), "{stream}");
        // Everything that was sent came, nothing twice.
        assert!(stream["note"].is_null(), "{stream}");
        assert!(said.contains(subject), "{said}");
    }
    assert_eq!(of("pingpong-64", "limit-relay")["ratio_to_limit"], 1.0);
    let stream = of("stream-64k-mtu1500", "limit-relay-crc");
    assert_eq!(stream["ratio_to_limit"], 1.0);
}

// One turn of who sleeps, and of UDP in its forms. Expect: figures of all.
#[test]
fn peers_that_need_nothing_installed_are_measured_when_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report.json");
    let mut command = compare();
    let names = "kernel-tcp-blocking,kernel-tcp-blocking-nogso,kernel-udp,kernel-udp-gso,kernel-udp-blocking";
    command.args(["pingpong-64", "rate-64", "--turns", "1", "--json"]);
    command.arg(&path).args(["--subjects", names]);
    let finished = process::run(&mut command, COMPARED).unwrap();
    let said = format!("{}{}", finished.stdout, finished.stderr);
    assert!(finished.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for subject in names.split(',') {
        for case in ["pingpong-64", "rate-64"] {
            let results = report["results"].as_array().unwrap();
            let is = |line: &&Value| line["case"] == case && line["subject"] == subject;
            let line = results.iter().find(is);
            let line = line.unwrap_or_else(|| panic!("nothing of {subject} at {case}: {said}"));
            assert!(line["value"].as_f64() > Some(100.0), "{line}");
        }
    }
}

// Who receives is stopped for a while, again and again, in the middle of a stream. Expect: limits lose nothing for it.
#[test]
fn a_limit_waits_for_who_is_not_on_its_core() {
    for (subject, actor) in [("limit-raw-xdp", "Raw"), ("limit-relay-crc", "Relay")] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        let mut command = compare();
        command.args(["stream-64k-mtu1500", "--turns", "3", "--subjects", subject]);
        let mut bench = command.arg("--json").arg(&path).spawn().unwrap();
        let deadline = Instant::now() + COMPARED;
        let mut stops = 0;
        while bench.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "it does not end");
            let all = descendants(bench.id()).into_iter();
            for pid in all.filter(|&pid| program(pid).contains(actor)) {
                let Some(pid) = Pid::from_raw(pid.cast_signed()) else {
                    continue;
                };
                if kill_process(pid, Signal::STOP).is_ok() {
                    std::thread::sleep(STOPPED);
                    // It may have been ended meanwhile.
                    let _ = kill_process(pid, Signal::CONT);
                    stops += 1;
                }
            }
            std::thread::sleep(PAUSE);
        }
        assert!(stops >= 10, "it was stopped only {stops} times");
        let report: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let stream = &report["results"][0];
        assert_eq!(stream["subject"], subject, "{report}");
        assert_eq!(stream["turns"], 3, "{report}");
        assert!(stream["note"].is_null(), "{stream}");
    }
}

/// Children of a process, and theirs.
fn descendants(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let children = text
        .split_ascii_whitespace()
        .map(|pid| pid.parse().unwrap());
    children
        .flat_map(|child| [vec![child], descendants(child)].concat())
        .collect()
}

fn program(pid: u32) -> String {
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command).into_owned()
}

/// Waits until there is an actor whose command line says `word`: not who is about to become one, and may be in no namespace yet.
fn until_one_says(bench: &mut Child, word: &str) -> u32 {
    let deadline = Instant::now() + COMPARED;
    loop {
        let all = descendants(bench.id());
        if let Some(pid) = all.into_iter().find(|pid| {
            let program = program(*pid);
            program.starts_with('/') && program.contains(word)
        }) {
            return pid;
        }
        assert!(bench.try_wait().unwrap().is_none(), "it ended");
        assert!(Instant::now() < deadline, "there is no {word}");
        std::thread::sleep(PAUSE);
    }
}

// Ctrl-C while relays and their applications run. Expect: it ends soon, with an error, and neither processes nor namespaces are left.
#[test]
fn who_interrupts_it_finds_nothing_left() {
    let mut command = compare();
    command.args([
        "pingpong-64",
        "--turns",
        "1000",
        "--subjects",
        "limit-relay",
    ]);
    let mut bench = command
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let actor = until_one_says(&mut bench, "Client");
    let all = descendants(bench.id());
    let namespace = std::fs::metadata(format!("/proc/{actor}/ns/net")).unwrap();
    kill_process(Pid::from_child(&bench), Signal::INT).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let status = process::wait_child(&mut bench, deadline, OnCancel::Ignore).unwrap();
    assert!(!status.expect("it goes on").success());
    for pid in all {
        assert!(!program(pid).contains("actor"), "{pid} is left");
    }
    use std::os::unix::fs::MetadataExt;
    let named = std::fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .flatten();
    for handle in named {
        let left = handle.metadata().unwrap().ino() == namespace.ino();
        assert!(!left, "{} is left", handle.path().display());
    }
}
