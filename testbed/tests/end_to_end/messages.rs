//! Messages of every size between real daemons, over every encapsulation and MTU; what the command line tool says and does.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::exchange::{between, options};
use crate::harness::running::Running;
use crate::harness::{Cluster, STEP, pattern, until};
use portolan::{Event, PortOptions, Priority};
use portolan_testbed::process;
use portolan_testbed::{Binaries, Encap, Lab, Node};
use serde_json::Value;

const LARGEST: usize = 16 << 20;
/// Bound on one whole list of sizes.
const LIST: Duration = Duration::from_secs(60);

/// Sizes at every edge: of what fits into a token, into a frame, into several frames, into a grant.
fn sizes(mtu: usize) -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 7, 8, 9, 63, 64, 65, 79, 80, 81, 127, 128, 129, 500];
    // Wherever a frame ends under all these headers, this goes over it byte by byte.
    sizes.extend(mtu - 180..=mtu + 2);
    for edge in [2 * mtu, 4096, 10 * mtu, 1 << 16, 256 << 10, 1 << 20] {
        sizes.extend([edge - 1, edge, edge + 1]);
    }
    sizes.extend([(3 << 20) + 5, LARGEST - 1, LARGEST, 1, LARGEST, 0]);
    sizes
}

fn every_size_crosses(mtu: u32, encap: Encap) {
    let cluster = Cluster::start(Lab::builder().mtu(mtu).encap(encap));
    let mut one = cluster.open(1, options(9, LARGEST));
    let mut two = cluster.open(2, options(5, LARGEST));
    between(&mut one, &mut two, &sizes(mtu as usize), LIST);
    for port in [one, two] {
        let closed = port.close(STEP).unwrap();
        assert_eq!((closed.failed, closed.unfinished), (0, 0));
    }
}

#[test]
fn every_size_over_udp_on_ipv4_at_1500() {
    every_size_crosses(1500, Encap::Udp4);
}

#[test]
fn every_size_over_udp_on_ipv4_at_9000() {
    every_size_crosses(9000, Encap::Udp4);
}

#[test]
fn every_size_over_udp_on_ipv6_at_1500() {
    every_size_crosses(1500, Encap::Udp6);
}

#[test]
fn every_size_over_udp_on_ipv6_at_9000() {
    every_size_crosses(9000, Encap::Udp6);
}

#[test]
fn every_size_over_ethernet_at_1500() {
    every_size_crosses(1500, Encap::Ethernet);
}

#[test]
fn every_size_over_ethernet_at_9000() {
    every_size_crosses(9000, Encap::Ethernet);
}

// A node streams to two others at once, so that frames as long as each other go to either in one turn. Expect: all of it arrives, and nobody is
// sent what is another's.
#[test]
fn two_peers_at_once_are_each_sent_their_own() {
    let cluster = Cluster::start(Lab::builder().nodes(3));
    let sizes = [1 << 20; 24];
    let mut pairs = [(9, 2), (10, 3)].map(|(port, node)| {
        let one = cluster.open(1, options(port, 1 << 20));
        (one, cluster.open(node, options(5, 1 << 20)))
    });
    std::thread::scope(|scope| {
        for (one, two) in &mut pairs {
            scope.spawn(|| between(one, two, &sizes, LIST));
        }
    });
    for node in [1, 2, 3] {
        let counters = cluster.lab.node(node).report("counters").unwrap();
        let misled = &counters["engines"][0]["counters"]["transport_frames_not_for_us"];
        assert_eq!(misled.as_u64(), Some(0), "node {node}");
    }
}

#[test]
fn every_size_between_ports_of_one_node() {
    // A node without any peer.
    let cluster = Cluster::start(Lab::builder().nodes(1));
    let mut one = cluster.open(1, options(9, LARGEST));
    let mut two = cluster.open(1, options(5, LARGEST));
    between(&mut one, &mut two, &sizes(1500), LIST);
}

#[test]
fn a_port_sends_to_itself() {
    let cluster = Cluster::start(Lab::builder().nodes(1));
    let mut port = cluster.open(1, options(9, 1 << 20));
    let own = port.address();
    let sizes = [0, 1, 80, 81, 1400, 9000, 70_000, 1 << 20, 3];
    crate::harness::exchange::exchange(&mut port, own, &sizes, LIST).unwrap();
}

// ---- the command line tool ----

fn json(node: &Node, report: &str) -> Value {
    let text = process::run_ok(node.portolan().args([report, "--json"]), STEP).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{report} --json: {e}: {text}"))
}

#[test]
fn reports_are_json_and_true() {
    let cluster = Cluster::start(Lab::builder());
    let (pid, engines) = {
        let daemon = cluster.daemon(1);
        (daemon.pid(), daemon.engine_pids().unwrap())
    };
    let mut one = cluster.open(1, options(9, 4096));
    let mut two = cluster.open(2, options(5, 4096));
    between(&mut one, &mut two, &[100; 50], LIST);
    let node = cluster.lab.node(1);

    let status = json(node, "status");
    assert_eq!(status["node"]["id"], 1, "{status}");
    assert_eq!(status["node"]["name"], "ptl1", "{status}");
    assert_eq!(status["engines"].as_array().unwrap().len(), 1, "{status}");
    assert_eq!(status["engines"][0]["pid"], engines[0], "{status}");
    assert_eq!(status["engines"][0]["state"], "running", "{status}");
    assert_ne!(engines[0], pid);

    let peers = json(node, "peers");
    let peer = &peers["peers"][0];
    assert_eq!(peer["node"], 2, "{peers}");
    assert_eq!(peer["state"], "up", "{peers}");
    assert!(peer["rtt_ns"].as_u64().unwrap() > 0, "{peers}");

    let ports = json(node, "ports");
    let rows = ports["ports"].as_array().unwrap();
    let mine = rows.iter().find(|row| row["port"] == 9).unwrap();
    assert_eq!(mine["owner_pid"], std::process::id(), "{ports}");
    assert!(rows.iter().all(|row| row["port"] != 5), "{ports}");

    // The engine publishes them now and then.
    until("the counters know what happened", STEP, || {
        let counters = json(node, "counters");
        let engine = &counters["engines"][0]["counters"];
        assert!(engine.is_object(), "{counters}");
        // 50 messages of 100 bytes came at each priority, and as many were sent.
        let known = engine["transport_bytes_delivered"] == 10_000 && engine["send_tokens"] == 100;
        known.then_some(())
    });
    let counters = json(node, "counters");
    let steered = counters["steering"].as_object().unwrap().values();
    let steered: u64 = steered.filter_map(Value::as_u64).sum();
    assert!(steered > 0, "{counters}");

    // For people: the same without JSON, not empty.
    for report in ["status", "peers", "ports", "counters"] {
        let text = process::run_ok(node.portolan().arg(report), STEP).unwrap();
        assert!(!text.trim().is_empty(), "{report}");
    }
}

#[test]
fn ping_is_answered_by_the_other_node_and_by_an_echo() {
    let cluster = Cluster::start(Lab::builder());
    let (one, two) = (cluster.lab.node(1), cluster.lab.node(2));
    for target in ["2", "ptl2", "1"] {
        let mut ping = one.portolan();
        let ping = ping.args(["ping", target, "--count", "20", "--interval", "0", "--json"]);
        let text = process::run_ok(ping, STEP).unwrap();
        println!("{text}");
    }
    // Nobody is at port 77.
    let refused =
        process::run(one.portolan().args(["ping", "2:77", "--count", "1"]), STEP).unwrap();
    assert!(!refused.status.success(), "{}", refused.stdout);
    // There is no such node.
    let refused = process::run(one.portolan().args(["ping", "99"]), STEP).unwrap();
    assert!(!refused.status.success(), "{}", refused.stdout);
    assert!(refused.stderr.contains("99"), "{}", refused.stderr);

    let mut echo = two.portolan();
    let mut echo = Running::start(echo.args(["echo", "77"]));
    until("port 77 is open", STEP, || echo.open(two, 77));
    process::run_ok(one.portolan().args(["ping", "2:77", "--count", "2"]), STEP).unwrap();
}

#[test]
fn a_file_goes_through_pipes() {
    let cluster = Cluster::start(Lab::builder().mtu(9000));
    let (one, two) = (cluster.lab.node(1), cluster.lab.node(2));
    let directory = tempfile::tempdir().unwrap();
    // Also nothing at all, and nothing round.
    for bytes in [0, 1, (64 << 20) + 12_345] {
        let mut sent = vec![0; bytes];
        pattern::fill(&mut sent, bytes as u64);
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::write(&from, &sent).unwrap();
        let mut receiver = two.portolan();
        let receiver = receiver
            .args(["recv", "30"])
            .stdout(File::create(&to).unwrap());
        let mut receiver = Running::start(receiver);
        until("port 30 is open", STEP, || receiver.open(two, 30));
        let mut sender = one.portolan();
        let sender = sender
            .args(["send", "2:30"])
            .stdin(File::open(&from).unwrap());
        Running::start(sender).succeeds(LIST);
        receiver.succeeds(LIST);
        assert!(fs::read(&to).unwrap() == sent, "{bytes} bytes");
    }
}

/// Until a node's service has opened port 0, which it does after its engines run.
fn await_service(cluster: &Cluster, node: u16) {
    let deadline = Instant::now() + STEP;
    loop {
        let mut ports = cluster.lab.node(node).portolan();
        let text = process::run_ok(ports.args(["ports", "--json"]), STEP).unwrap();
        let ports: serde_json::Value = serde_json::from_str(&text).unwrap();
        let open = |port: &serde_json::Value| port["port"] == 0 && port["state"] == "open";
        if ports["ports"].as_array().unwrap().iter().any(open) {
            return;
        }
        assert!(Instant::now() < deadline, "no service: {text}");
    }
}

#[test]
fn allsize_verifies_both_ways() {
    for encap in [Encap::Udp4, Encap::Ethernet] {
        let cluster = Cluster::start(Lab::builder().mtu(9000).encap(encap));
        await_service(&cluster, 2);
        let text = process::run_ok(
            cluster
                .lab
                .node(1)
                .portolan()
                .args(["allsize", "2", "--verify"]),
            LIST,
        )
        .unwrap();
        assert!(text.contains("16"), "up to 16 MiB: {text}");
    }
}

// ---- the examples, one of which is the library's first page ----

fn example(cluster: &Cluster, node: u16, name: &str) -> Command {
    let directory = Binaries::find().unwrap().directory().join("examples");
    let example = directory.join(name);
    assert!(
        example.is_file(),
        "there is no {}: build it with `cargo build -p portolan --examples` (with the profile of the daemon)",
        example.display()
    );
    let mut command = Command::new(&example);
    command.env("PORTOLAN_SOCKET", cluster.lab.node(node).socket());
    command
}

#[test]
fn the_example_plays_ping_pong() {
    let cluster = Cluster::start(Lab::builder());
    let mut waiting = Running::start(example(&cluster, 2, "pingpong").stdout(Stdio::null()));
    until("the other player waits", STEP, || {
        waiting.open(cluster.lab.node(2), 20)
    });
    let text = process::run_ok(example(&cluster, 1, "pingpong").arg("2"), LIST).unwrap();
    assert!(text.contains("per round trip"), "{text}");
}

#[test]
fn the_example_says_hello() {
    let cluster = Cluster::start(Lab::builder());
    let mut port = cluster.open(2, PortOptions::at(9));
    let buffer = port.allocate(64).unwrap();
    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
    let hello = Running::start(&mut example(&cluster, 1, "hello"));
    let Some(Event::Received(message)) = port.blocking_receive(STEP).unwrap() else {
        panic!("nobody says hello");
    };
    assert_eq!(&message[..], b"hello, node 2");
    assert_eq!(message.from(), (1, 9).into());
    hello.succeeds(LIST);
}
