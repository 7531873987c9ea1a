//! Processors of engines that do not sleep for a while after a message. They are the machine's, so the tests of this file take turns.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::harness::crowd::kill;
use crate::harness::{Cluster, STEP, until};
use portolan::{PortOptions, SendOptions};
use portolan_testbed::{DaemonOptions, Lab, ManagerOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

static MACHINE: Mutex<()> = Mutex::new(());

/// A time after which nobody keeps anything awake, and one that no test lasts.
const BRIEFLY: u32 = 600;
const FOR_EVER: u32 = 3_600_000;

/// Nobody else has the machine, and none of its processors has a bound in the end, whatever went wrong.
struct Alone(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

fn alone() -> Alone {
    Alone(MACHINE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Drop for Alone {
    fn drop(&mut self) {
        for core in [0, 1] {
            // There may be no such processor.
            let _ = fs::write(file_of(core), "0");
        }
    }
}

fn file_of(core: usize) -> String {
    format!("/sys/devices/system/cpu/cpu{core}/power/pm_qos_resume_latency_us")
}

fn bound_of(core: usize) -> String {
    let text = fs::read_to_string(file_of(core)).unwrap();
    text.trim().to_owned()
}

fn set_bound(core: usize, bound: &str) {
    fs::write(file_of(core), bound).unwrap();
}

/// What keeps a processor of this machine awake, if anything does that a daemon of root's may write.
fn keeps() -> Option<&'static str> {
    if fs::metadata(file_of(0)).unwrap().uid() != 0 {
        return None;
    }
    let driver = fs::read_to_string("/sys/devices/system/cpu/cpuidle/current_driver");
    match driver.unwrap_or_default().trim() {
        "" | "none" => None,
        "haltpoll" => Some("n/a"),
        _ => Some("2"),
    }
}

fn config(cores: &str, ms: u32) -> String {
    format!("[engine]\ncores = {cores}\nkeep_awake_ms = {ms}")
}

/// Two nodes, of which the first has its engines on these cores and keeps them awake.
fn cluster(cores: &str, ms: u32, manager: bool) -> Cluster {
    let overrides = config(cores, ms);
    let queues = cores.split(',').count();
    Cluster::start_as(Lab::builder().queues(queues as u16), |node| DaemonOptions {
        overrides: if node == 1 {
            overrides.clone()
        } else {
            String::new()
        },
        manager: manager.then(ManagerOptions::default),
        ..DaemonOptions::default()
    })
}

/// One message, from node 1 to node 2, which takes it or not.
fn send(cluster: &Cluster) {
    let mut port = cluster.open(1, PortOptions::at(9));
    port.send_bytes((2, 5), b"awake", SendOptions::default())
        .unwrap();
    // Nobody has that port: it is refused, but was sent.
    port.blocking_receive(STEP).unwrap().unwrap();
}

fn kept(status: &Value) -> Vec<usize> {
    serde_json::from_value(status["node"]["kept_awake"].clone()).unwrap()
}

/// Waits until these processors, and no others, are kept awake by node 1.
fn holds(cluster: &Cluster, cores: &[usize]) {
    let what = format!("kept awake: {cores:?}");
    let expected = |status: &Value| kept(status) == cores;
    (cluster.daemon(1).wait_status(&what, STEP, expected)).unwrap();
}

// No message; one; none for longer than is configured; one, and it is configured otherwise; one, and the daemon is stopped. Expect: the engine's processor, and no other, may
// sleep, may not, may again, each time; and the report says which.
#[test]
fn a_processor_is_kept_awake_after_a_message() {
    let _alone = alone();
    let cluster = cluster("[0]", BRIEFLY, false);
    holds(&cluster, &[]);
    assert_eq!((bound_of(0), bound_of(1)), ("0".into(), "0".into()));
    let Some(bound) = keeps() else {
        send(&cluster);
        assert_eq!(bound_of(0), "0");
        return;
    };
    send(&cluster);
    holds(&cluster, &[0]);
    let status = cluster.daemon(1).status().unwrap();
    assert_eq!(status["node"]["keep_awake_ms"], BRIEFLY);
    assert_eq!(status["node"]["keep_awake_refused"], json!(null));
    holds(&cluster, &[]);
    assert_eq!(bound_of(0), "0");
    let supervisor = Pid::from_raw(cluster.daemon(1).pid()).unwrap();
    for (ms, cores) in [(FOR_EVER, &[0][..]), (0, &[])] {
        let node = cluster.lab.node(1);
        node.write_config(&config("[0]", ms)).unwrap();
        kill_process(supervisor, Signal::HUP).unwrap();
        let configured = |status: &Value| status["node"]["keep_awake_ms"] == ms;
        (cluster
            .daemon(1)
            .wait_status("configured", STEP, configured))
        .unwrap();
        if ms > 0 {
            send(&cluster);
        }
        holds(&cluster, cores);
        let expected = if ms > 0 { bound } else { "0" };
        assert_eq!((bound_of(0), bound_of(1)), (expected.into(), "0".into()));
    }
    let node = cluster.lab.node(1);
    node.write_config(&config("[0]", FOR_EVER)).unwrap();
    kill_process(supervisor, Signal::HUP).unwrap();
    until("it is kept awake", STEP, || {
        send(&cluster);
        (bound_of(0) == bound).then_some(())
    });
    let (status, _cluster) = cluster.stop(1);
    assert!(status.success());
    assert_eq!(bound_of(0), "0");
}

// A message, where processors are kept awake, and nothing more. Expect: the engine naps, fifty times in less time than thirty of its longest sleeps take, so that
// its caches keep what the next message needs.
#[test]
fn an_engine_naps_meanwhile() {
    let _alone = alone();
    let cluster = cluster("[0]", FOR_EVER, false);
    send(&cluster);
    let sleeps = || {
        let counters = cluster.lab.node(1).report("counters").unwrap();
        counters["engines"][0]["counters"]["sleeps"].as_u64()
    };
    let first = sleeps().unwrap();
    let since = Instant::now();
    until("fifty naps", STEP, || {
        (sleeps()? >= first + 50).then_some(())
    });
    let took = since.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?}");
}

// Engines that are bound to no processor. Expect: one where such an engine may have slept is kept awake.
#[test]
fn an_engine_that_is_not_bound_keeps_awake_where_it_ran() {
    let _alone = alone();
    let cluster = cluster("[]", FOR_EVER, false);
    let Some(bound) = keeps() else { return };
    until("one is kept awake", STEP, || {
        send(&cluster);
        let status = cluster.daemon(1).status().unwrap();
        let kept = kept(&status);
        (kept.len() == 1 && bound_of(kept[0]) == bound).then_some(())
    });
}

// Two engines; somebody has bounded the processor of one. A message; then the daemon is stopped. Expect: the other one's is kept awake as long, and that bound is what it was all
// the time, also if it is the one that we would have.
#[test]
fn what_an_administrator_bounded_stays() {
    let _alone = alone();
    if keeps().is_none() {
        return;
    }
    for theirs in ["70", "n/a", "2"] {
        set_bound(0, theirs);
        let cluster = cluster("[0, 1]", FOR_EVER, false);
        send(&cluster);
        holds(&cluster, &[1]);
        assert_eq!(bound_of(0).as_str(), theirs);
        let (status, _cluster) = cluster.stop(1);
        assert!(status.success());
        assert_eq!((bound_of(0).as_str(), bound_of(1).as_str()), (theirs, "0"));
        set_bound(0, "0");
    }
}

// A processor is kept awake for ever; then the supervisor is killed. Expect: the next one goes on, and as there is no message any more lets it sleep.
#[test]
fn who_comes_after_lets_it_sleep() {
    let _alone = alone();
    let cluster = cluster("[0]", FOR_EVER, true);
    if keeps().is_none() {
        return;
    }
    send(&cluster);
    holds(&cluster, &[0]);
    kill(cluster.daemon(1).pid());
    until("another supervisor serves", STEP, || {
        let log = cluster.daemon(1).log();
        log.contains("node goes on").then_some(())
    });
    holds(&cluster, &[]);
    assert_eq!(bound_of(0), "0");
}
