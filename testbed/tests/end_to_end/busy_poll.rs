//! Engines that go round for frames themselves, as a veth's NAPI instance lets them: when there are many, and no longer than that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::harness::crowd::kill;
use crate::harness::{Cluster, STEP, until};
use crate::interface::{PATIENT, delete, make_again};
use portolan::{Address, Event, Port, PortOptions, Priority, SendOptions, Status};
use portolan_testbed::{DaemonOptions, Encap, Lab, ManagerOptions, Node, process};

/// Bytes of a message, messages under way, buffers for them.
const BYTES: usize = 256 << 10;
const UNDER_WAY: usize = 8;
/// An engine is back, or has noticed what there is to do, within this.
const NOTICED: Duration = Duration::from_secs(30);

/// An instance was given up and made again within twice that: half a second where it brings nothing, a second where it does.
const GIVEN_UP: Duration = Duration::from_secs(3);

/// Goes round whenever there are many frames, whether that brings more of them or not.
const ALWAYS: &str = "[network]\nbusy_poll = \"always\"";

fn ethtool(node: &Node, arguments: &[&str]) -> String {
    let mut command = node.command("ethtool");
    let (option, features) = arguments.split_first().unwrap();
    command.arg(option).arg(node.interface()).args(features);
    process::run_ok(&mut command, STEP).unwrap()
}

/// A cluster whose interfaces have a NAPI instance each, or none.
fn cluster(encap: Encap, gro: &str, overrides: &str) -> Cluster {
    let lab = Lab::builder().encap(encap).build().unwrap();
    for node in lab.nodes() {
        ethtool(node, &["-K", "gro", gro]);
    }
    Cluster::start_in(lab, |_| overrides.to_owned())
}

/// With a service manager for every daemon.
fn managed() -> Cluster {
    Cluster::start_as(Lab::builder(), |_| DaemonOptions {
        overrides: ALWAYS.to_owned(),
        manager: Some(ManagerOptions::default()),
        ..DaemonOptions::default()
    })
}

fn has_gro(cluster: &Cluster, node: u16) -> bool {
    let features = ethtool(cluster.lab.node(node), &["-k"]);
    features.contains("generic-receive-offload: on")
}

fn port(cluster: &Cluster, node: u16, number: u16) -> Port {
    let options = PortOptions {
        arena_bytes: (2 * UNDER_WAY * (BYTES + 64)) as u64,
        ..PortOptions::at(number)
    };
    cluster.open(node, options)
}

/// Sends messages, each with its number at both ends, until told to end.
fn send(port: &mut Port, to: Address, ends: &AtomicBool) -> u64 {
    let mut number = 0u64;
    loop {
        let over = ends.load(Ordering::Relaxed);
        while !over && (port.sends_outstanding() as usize) < UNDER_WAY {
            let mut buffer = port.allocate(BYTES).unwrap();
            buffer[..8].copy_from_slice(&number.to_le_bytes());
            buffer[BYTES - 8..BYTES].copy_from_slice(&number.to_le_bytes());
            let options = SendOptions {
                timeout: Some(STEP),
                ..SendOptions::default()
            };
            port.send(to, buffer, BYTES, options).unwrap();
            number += 1;
        }
        if over && port.sends_outstanding() == 0 {
            return number;
        }
        match port.blocking_receive(STEP).unwrap().expect("a send ends") {
            Event::Sent(sent) => assert_eq!(sent.status, Status::Delivered),
            Event::Received(_) => panic!("nobody sends to the sender"),
            _ => {}
        }
    }
}

/// Receives what [`send`] sends, in order, until as many have come as it says in the end.
fn receive(port: &mut Port, came: &AtomicU64, sent: &AtomicU64) {
    for _ in 0..UNDER_WAY {
        let buffer = port.allocate(BYTES).unwrap();
        port.provide_receive_buffer(buffer, Priority::Low).unwrap();
    }
    let mut number = 0u64;
    while number < sent.load(Ordering::Acquire) {
        let Some(event) = port.blocking_receive(Duration::from_millis(100)).unwrap() else {
            continue;
        };
        if let Event::Received(message) = event {
            assert_eq!(message.len(), BYTES);
            assert_eq!(message[..8], number.to_le_bytes());
            assert_eq!(message[BYTES - 8..], number.to_le_bytes());
            number += 1;
            came.store(number, Ordering::Relaxed);
            let buffer = message.into_buffer();
            port.provide_receive_buffer(buffer, Priority::Low).unwrap();
        }
    }
}

/// Streams from node 1 to node 2 while `meanwhile` looks at what happens.
fn stream(cluster: &Cluster, meanwhile: impl FnOnce(&AtomicU64)) {
    stream_between(cluster, 10, meanwhile);
}

/// The same between ports with this number.
fn stream_between(cluster: &Cluster, number: u16, meanwhile: impl FnOnce(&AtomicU64)) {
    let (mut one, mut two) = (port(cluster, 1, number), port(cluster, 2, number));
    let to = two.address();
    let (ends, came, sent) = (
        AtomicBool::new(false),
        AtomicU64::new(0),
        AtomicU64::new(u64::MAX),
    );
    /// Also when the test fails.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| receive(&mut two, &came, &sent));
        scope.spawn(|| sent.store(send(&mut one, to, &ends), Ordering::Release));
        let _ends = Ends(&ends);
        meanwhile(&came);
    });
    assert_eq!(came.into_inner(), sent.into_inner());
}

/// Which engine it is then; none that was killed.
fn wait_polled(cluster: &Cluster, node: u16, polled: bool, killed: Option<i32>) -> i32 {
    let what = format!("node {node}'s engine goes round itself: {polled}");
    let is = |status: &serde_json::Value| {
        let engine = &status["engines"][0];
        let fresh = killed.is_none_or(|killed| engine["pid"] != killed);
        fresh && engine["state"] == "running" && engine["busy_poll"] == polled
    };
    let status = (cluster.daemon(node))
        .wait_status(&what, NOTICED, is)
        .unwrap();
    status["engines"][0]["pid"].as_i64().unwrap() as i32
}

/// Waits for all engines of a node at once.
fn wait_all_polled(cluster: &Cluster, node: u16, polled: bool) {
    let what = format!("all of node {node}'s engines go round themselves: {polled}");
    let are = |status: &serde_json::Value| {
        let engines = status["engines"].as_array().unwrap();
        engines.iter().all(|engine| engine["busy_poll"] == polled)
    };
    cluster
        .daemon(node)
        .wait_status(&what, NOTICED, are)
        .unwrap();
}

/// Frames that were used up to find an instance.
fn errands(cluster: &Cluster, node: u16) -> u64 {
    let counters = cluster.lab.node(node).report("counters").unwrap();
    counters["steering"]["pass_errand"].as_u64().unwrap()
}

// A stream; its receiver's engine is killed as it goes round for frames, then the interface is set down and up, which gives it another NAPI instance. Expect: the
// engine begins to, and so does its successor, with the instance that is known, then with the new one; not any more when the stream is over; everything came, once and
// in order.
fn many_frames_are_gone_round_for(encap: Encap) {
    let cluster = cluster(encap, "on", ALWAYS);
    stream(&cluster, |came| {
        let pid = wait_polled(&cluster, 2, true, None);
        kill(pid);
        let before = came.load(Ordering::Relaxed);
        wait_polled(&cluster, 2, true, Some(pid));
        let goes_on = |before| came.load(Ordering::Relaxed) > before + UNDER_WAY as u64;
        until("the stream goes on", STEP, || goes_on(before).then_some(()));
        assert_eq!(errands(&cluster, 2), 1);
        let node = cluster.lab.node(2);
        for way in ["down", "up"] {
            let mut command = node.command("ip");
            command.args(["link", "set", "dev", &node.interface(), way]);
            process::run_ok(&mut command, STEP).unwrap();
        }
        until("another instance is found", NOTICED, || {
            (errands(&cluster, 2) == 2).then_some(())
        });
        wait_polled(&cluster, 2, true, None);
        let before = came.load(Ordering::Relaxed);
        until("the stream goes on", STEP, || goes_on(before).then_some(()));
    });
    wait_polled(&cluster, 2, false, None);
    // The administrator switched it on.
    assert!(has_gro(&cluster, 2));
}

#[test]
fn many_frames_are_gone_round_for_over_udp() {
    many_frames_are_gone_round_for(Encap::Udp4);
}

#[test]
fn many_frames_are_gone_round_for_over_ethernet() {
    many_frames_are_gone_round_for(Encap::Ethernet);
}

// A stream to each of two engines, which share a core. Expect: both begin to, at the same time, each for its own instance; neither does when the streams are over; everything
// came.
#[test]
fn engines_that_share_a_core_go_round_as_well() {
    let lab = Lab::builder().queues(2).build().unwrap();
    let cluster = Cluster::start_in(lab, |node| {
        format!("{ALWAYS}\n[engine]\ncores = [{0}, {0}]\n", node - 1)
    });
    stream_between(&cluster, 10, |_| {
        stream_between(&cluster, 11, |_| wait_all_polled(&cluster, 2, true));
    });
    wait_all_polled(&cluster, 2, false);
    assert_eq!(errands(&cluster, 2), 2);
}

// The same stream where it is forbidden. Expect: frames come by themselves, and no frame is taken for an errand.
#[test]
fn who_does_not_want_it_is_left_alone() {
    let never = "[network]\nbusy_poll = \"never\"";
    let cluster = cluster(Encap::Udp4, "on", never);
    stream(&cluster, |came| {
        until("the stream goes on", NOTICED, || {
            (came.load(Ordering::Relaxed) > 2_000).then_some(())
        });
    });
    wait_polled(&cluster, 2, false, None);
    assert_eq!(errands(&cluster, 2), 0);
}

// A stream through interfaces without an instance. Expect: the receiver's has one as long as it is polled, and a while longer.
#[test]
fn an_interface_has_an_instance_as_long_as_that_is_of_use() {
    let cluster = cluster(Encap::Udp4, "off", ALWAYS);
    stream(&cluster, |_| {
        wait_polled(&cluster, 2, true, None);
        assert!(has_gro(&cluster, 2));
        assert!(errands(&cluster, 2) >= 1);
    });
    wait_polled(&cluster, 2, false, None);
    until("GRO is off again", NOTICED, || {
        (!has_gro(&cluster, 2)).then_some(())
    });
}

// The same, but it goes on only where it brings more. Expect: whether it does or not, before long frames come by themselves for a while, without an instance, and then it is
// tried again; with one kept for three seconds that would take longer.
#[test]
fn an_instance_is_given_up_while_it_is_of_no_use() {
    let cluster = cluster(Encap::Udp4, "off", "[log]\nlevel = \"debug\"");
    stream(&cluster, |_| {
        let switched_on = || {
            let log = cluster.daemon(2).log();
            log.matches("GRO is on while there is a stream").count()
        };
        until("GRO is on", NOTICED, || (switched_on() >= 1).then_some(()));
        until("it is on once more", 2 * GIVEN_UP, || {
            (switched_on() >= 2).then_some(())
        });
    });
    wait_polled(&cluster, 2, false, None);
    until("GRO is off again", NOTICED, || {
        (!has_gro(&cluster, 2)).then_some(())
    });
}

// The same as the one before that, and the other end cuts what it sends into segments itself, so its frames do not come through the instance. Expect: that is noticed,
// and the instance goes.
#[test]
fn an_instance_that_nothing_comes_through_is_taken_away() {
    let cluster = cluster(Encap::Udp4, "off", ALWAYS);
    ethtool(
        cluster.lab.node(1),
        &["-K", "tx", "on", "sg", "on", "tso", "on"],
    );
    stream(&cluster, |_| {
        until("three frames are given", NOTICED, || {
            (errands(&cluster, 2) >= 3).then_some(())
        });
        until("GRO is off again", NOTICED, || {
            (!has_gro(&cluster, 2)).then_some(())
        });
    });
    wait_polled(&cluster, 2, false, None);
}

// The same as the one before that; the receiver's supervisor is killed meanwhile, in the end the daemon is stopped during another stream. Expect: the successor
// knows that GRO is not the administrator's, and switches it off; so does who is stopped.
#[test]
fn who_comes_after_switches_it_off() {
    let cluster = managed();
    stream(&cluster, |_| {
        wait_polled(&cluster, 2, true, None);
        kill(cluster.daemon(2).pid());
        until("another supervisor serves", STEP, || {
            let log = cluster.daemon(2).log();
            log.contains("node goes on").then_some(())
        });
        wait_polled(&cluster, 2, true, None);
    });
    until("GRO is off again", NOTICED, || {
        (!has_gro(&cluster, 2)).then_some(())
    });
    stream(&cluster, |_| {
        wait_polled(&cluster, 2, true, None);
        assert!(has_gro(&cluster, 2));
    });
    let (status, cluster) = cluster.stop(2);
    assert!(status.success());
    assert!(!has_gro(&cluster, 2));
}

// A stream; then the receiver's supervisor is killed, and its store loses a ledger. Expect: the next one begins anew, and switches GRO off all the same.
#[test]
fn who_begins_anew_switches_it_off() {
    let cluster = managed();
    stream(&cluster, |_| {
        wait_polled(&cluster, 2, true, None);
    });
    let manager = cluster.daemon(2).manager().unwrap();
    manager.hold(true);
    let start = manager.kill().unwrap();
    manager.wait_gone(STEP).unwrap();
    assert!(has_gro(&cluster, 2));
    assert_eq!(manager.lose(|name| name == "ledger-0"), 1);
    manager.hold(false);
    manager.wait_ready(start, STEP).unwrap();
    assert!(!has_gro(&cluster, 2));
}

// A stream through an instance of ours; the administrator switches GRO off meanwhile. Expect: that is let be: the engine does not go round any more, the stream goes
// on, and GRO stays off.
#[test]
fn what_somebody_else_switched_off_stays_off() {
    let cluster = cluster(Encap::Udp4, "off", ALWAYS);
    stream(&cluster, |came| {
        wait_polled(&cluster, 2, true, None);
        assert!(has_gro(&cluster, 2));
        ethtool(cluster.lab.node(2), &["-K", "gro", "off"]);
        wait_polled(&cluster, 2, false, None);
        let before = came.load(Ordering::Relaxed);
        until("the stream goes on", NOTICED, || {
            (came.load(Ordering::Relaxed) > before + 2_000).then_some(())
        });
        wait_polled(&cluster, 2, false, None);
        assert!(!has_gro(&cluster, 2));
    });
}

// A stream through an instance of ours; then both interfaces are deleted and made again, without GRO. Expect: the new one has an instance as well, which is found and
// gone round for, as nobody has switched anything off; when the stream is over, GRO is off.
#[test]
fn an_interface_in_the_place_of_ours_has_an_instance_as_well() {
    let cluster = cluster(Encap::Udp4, "off", &format!("{PATIENT}{ALWAYS}"));
    stream(&cluster, |came| {
        let pid = wait_polled(&cluster, 2, true, None);
        assert!(has_gro(&cluster, 2));
        delete(&cluster);
        make_again(&cluster);
        until("GRO of the new one is on", NOTICED, || {
            has_gro(&cluster, 2).then_some(())
        });
        wait_polled(&cluster, 2, true, Some(pid));
        let before = came.load(Ordering::Relaxed);
        until("the stream goes on", STEP, || {
            (came.load(Ordering::Relaxed) > before + UNDER_WAY as u64).then_some(())
        });
    });
    wait_polled(&cluster, 2, false, None);
    until("GRO is off again", NOTICED, || {
        (!has_gro(&cluster, 2)).then_some(())
    });
}
