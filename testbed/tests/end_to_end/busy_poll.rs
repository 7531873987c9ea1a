//! Engines that go round for frames themselves, as a veth's NAPI instance lets them: when there are many, and no longer than that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::harness::crowd::kill;
use crate::harness::{Cluster, STEP};
use portolan::{Address, Event, Port, PortOptions, Priority, SendOptions, Status};
use portolan_testbed::{Encap, Lab, process};

/// Bytes of a message, messages under way, buffers for them.
const BYTES: usize = 256 << 10;
const UNDER_WAY: usize = 8;
/// An engine is back, or has noticed what there is to do, within this.
const NOTICED: Duration = Duration::from_secs(30);

/// A cluster whose interfaces have a NAPI instance each.
fn cluster(encap: Encap, overrides: &str) -> Cluster {
    let lab = Lab::builder().encap(encap).build().unwrap();
    for node in lab.nodes() {
        let mut command = node.command("ethtool");
        command.args(["-K", &node.interface(), "gro", "on"]);
        process::run_ok(&mut command, STEP).unwrap();
    }
    Cluster::start_in(lab, |_| overrides.to_owned())
}

fn port(cluster: &Cluster, node: u16) -> Port {
    let options = PortOptions {
        arena_bytes: (2 * UNDER_WAY * (BYTES + 64)) as u64,
        ..PortOptions::at(10)
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
    let (mut one, mut two) = (port(cluster, 1), port(cluster, 2));
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

fn wait_polled(cluster: &Cluster, node: u16, polled: bool) -> i32 {
    let what = format!("node {node}'s engine goes round itself: {polled}");
    let is = |status: &serde_json::Value| {
        let engine = &status["engines"][0];
        engine["state"] == "running" && engine["busy_poll"] == polled
    };
    let status = (cluster.daemon(node))
        .wait_status(&what, NOTICED, is)
        .unwrap();
    status["engines"][0]["pid"].as_i64().unwrap() as i32
}

// A stream; its receiver's engine is killed as it goes round for frames, and what is left of the stream is a message now and then. Expect: it begins to, its
// successor does too, none of them when there is nothing any more; everything came, once and in order; a message then comes at once.
fn many_frames_are_gone_round_for(encap: Encap) {
    let cluster = cluster(encap, "");
    stream(&cluster, |came| {
        let pid = wait_polled(&cluster, 2, true);
        kill(pid);
        let before = came.load(Ordering::Relaxed);
        assert_ne!(wait_polled(&cluster, 2, true), pid);
        let deadline = Instant::now() + STEP;
        while came.load(Ordering::Relaxed) < before + 4 * UNDER_WAY as u64 {
            assert!(Instant::now() < deadline, "the stream stands still");
            std::thread::yield_now();
        }
    });
    wait_polled(&cluster, 2, false);
    let counters = cluster.lab.node(2).report("counters").unwrap();
    let errands = counters["steering"]["pass_errand"].as_u64().unwrap();
    assert!((1..=5).contains(&errands), "{errands} frames went astray");
}

#[test]
fn many_frames_are_gone_round_for_over_udp() {
    many_frames_are_gone_round_for(Encap::Udp4);
}

#[test]
fn many_frames_are_gone_round_for_over_ethernet() {
    many_frames_are_gone_round_for(Encap::Ethernet);
}

// The same stream where it is forbidden. Expect: frames come by themselves, and no frame is taken for an errand.
#[test]
fn who_does_not_want_it_is_left_alone() {
    let cluster = cluster(Encap::Udp4, "[network]\nbusy_poll = \"never\"");
    stream(&cluster, |came| {
        let deadline = Instant::now() + NOTICED;
        while came.load(Ordering::Relaxed) < 2_000 {
            assert!(Instant::now() < deadline, "the stream stands still");
            std::thread::yield_now();
        }
    });
    wait_polled(&cluster, 2, false);
    let counters = cluster.lab.node(2).report("counters").unwrap();
    assert_eq!(counters["steering"]["pass_errand"], 0);
}
