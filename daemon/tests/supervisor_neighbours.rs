//! The MACs of peers, resolved from the kernel in a real network: directly, by a router, over IPv6, and followed when they change.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use portolan_testbed::{Daemon, Encap, Lab, Node};

const DEADLINE: Duration = Duration::from_secs(30);

/// A peer without a MAC.
fn peer_at(address: &str) -> String {
    format!("[[peer]]\nid = 2\nname = \"ptl2\"\naddress = \"{address}\"\n")
}

/// Runs `ip` in a node's network.
fn ip(node: &Node, arguments: &str) {
    let mut command = node.command("ip");
    let status = command.args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Waits until the daemon gives the peer this MAC.
fn wait_for_mac(node: &Node, daemon: &Daemon, mac: &str) {
    let end = Instant::now() + DEADLINE;
    loop {
        let peers = node.report("peers").unwrap();
        if peers["peers"][0]["mac"] == mac {
            return;
        }
        assert!(Instant::now() < end, "not {mac}: {peers}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_peer_is_resolved_and_followed_to_another_mac() {
    let lab = Lab::builder().name("ptnb").build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    // A kernel that forgets quickly, or this test would take a minute.
    let settings = "/proc/sys/net/ipv4/neigh/ptl1v";
    let quick = format!(
        "echo 500 > {settings}/base_reachable_time_ms; echo 1 > {settings}/delay_first_probe_time; echo 100 > {settings}/retrans_time_ms"
    );
    let status = one.command("sh").args(["-c", &quick]).status().unwrap();
    assert!(status.success());
    let daemon = one.start_daemon(&peer_at("10.77.0.2")).unwrap();
    wait_for_mac(one, &daemon, &two.mac());
    // It says nothing when it changes: the old MAC must be found to be dead, and the new one asked for.
    ip(two, "link set dev ptl2v address 02:00:00:00:77:77");
    wait_for_mac(one, &daemon, "02:00:00:00:77:77");
}

#[test]
fn a_peer_behind_a_router_has_the_routers_mac() {
    let lab = Lab::builder().name("ptnb").build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    ip(one, "route add 10.99.0.0/24 via 10.77.0.2");
    let daemon = one.start_daemon(&peer_at("10.99.0.9")).unwrap();
    wait_for_mac(one, &daemon, &two.mac());
}

#[test]
fn a_peer_without_a_route_gets_one_later() {
    let lab = Lab::builder().name("ptnb").build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let daemon = one.start_daemon(&peer_at("10.99.0.9")).unwrap();
    let peers = one.report("peers").unwrap();
    assert_eq!(peers["peers"][0]["state"], "unresolved");
    ip(one, "route add 10.99.0.0/24 via 10.77.0.2");
    wait_for_mac(one, &daemon, &two.mac());
}

#[test]
fn a_peer_is_resolved_over_ipv6() {
    let lab = Lab::builder()
        .name("ptnb")
        .encap(Encap::Udp6)
        .build()
        .unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let daemon = one.start_daemon(&peer_at(&two.ipv6().to_string())).unwrap();
    wait_for_mac(one, &daemon, &two.mac());
}
