//! Two queues, two engines per node: a port's number decides which engine serves it, and nobody has to care.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::harness::exchange::{between, options};
use crate::harness::{Cluster, proc};
use portolan_testbed::{Encap, Lab};
use serde_json::Value;

const LARGEST: usize = 1 << 20;
const LIST: Duration = Duration::from_secs(30);

fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1, 80, 81, 1000, 1472, 4096, 65_537, LARGEST, 5];
    sizes.extend((0..100).map(|n| n * 37));
    sizes
}

/// The engine that serves a port.
fn queue_of(cluster: &Cluster, node: u16, port: u16) -> u64 {
    let mut report = cluster.lab.node(node).portolan();
    let text =
        portolan_testbed::process::run_ok(report.args(["ports", "--json"]), crate::harness::STEP)
            .unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    let rows = report["ports"].as_array().unwrap();
    let row = rows.iter().find(|row| row["port"] == port).unwrap();
    row["queue"].as_u64().unwrap()
}

fn ports_reach_ports(encap: Encap, mtu: u32) {
    let cluster = Cluster::start(Lab::builder().queues(2).encap(encap).mtu(mtu));
    for node in [1, 2] {
        let engines: BTreeSet<i32> = cluster
            .daemon(node)
            .engine_pids()
            .unwrap()
            .into_iter()
            .collect();
        assert_eq!(engines.len(), 2, "two engines are two processes");
        for engine in engines {
            assert_ne!(engine, cluster.daemon(node).pid());
            assert!(proc::status(engine, "Name").starts_with("portoland"));
        }
    }
    // From an even or an odd port, to an even or an odd one, across and on the node itself.
    for (from, to) in [(2, 4), (2, 5), (3, 4), (3, 5)] {
        for node in [2, 1] {
            let mut one = cluster.open(1, options(from, LARGEST));
            let mut two = cluster.open(node, options(to, LARGEST));
            assert_eq!(queue_of(&cluster, 1, from), u64::from(from % 2));
            assert_eq!(queue_of(&cluster, node, to), u64::from(to % 2));
            between(&mut one, &mut two, &sizes(), LIST);
            for port in [one, two] {
                port.close(crate::harness::STEP).unwrap();
            }
        }
    }
}

#[test]
fn ports_of_either_engine_reach_ports_of_either_over_udp() {
    ports_reach_ports(Encap::Udp4, 1500);
}

#[test]
fn ports_of_either_engine_reach_ports_of_either_over_udp_on_ipv6_with_jumbo_frames() {
    ports_reach_ports(Encap::Udp6, 9000);
}

#[test]
fn ports_of_either_engine_reach_ports_of_either_over_ethernet() {
    ports_reach_ports(Encap::Ethernet, 1500);
}

// All at once: four ports of one node with four of the other, every engine with every engine.
#[test]
fn both_engines_work_at_once() {
    let cluster = Cluster::start(Lab::builder().queues(2));
    std::thread::scope(|scope| {
        for (from, to) in [(2, 4), (3, 5), (12, 15), (13, 14)] {
            let cluster = &cluster;
            scope.spawn(move || {
                let mut one = cluster.open(1, options(from, LARGEST));
                let mut two = cluster.open(2, options(to, LARGEST));
                between(&mut one, &mut two, &sizes(), LIST);
            });
        }
    });
}

/// How the program is on a node's interface, as `ip` and `portolan status` say it.
fn xdp_mode(cluster: &Cluster, node: u16) -> String {
    let node = cluster.lab.node(node);
    let mut link = node.command("ip");
    link.args(["-j", "link", "show", "dev", &node.interface()]);
    let text = portolan_testbed::process::run_ok(&mut link, crate::harness::STEP).unwrap();
    let links: Value = serde_json::from_str(&text).unwrap();
    let mode = match links[0]["xdp"]["mode"].as_u64() {
        Some(1) => "native",
        Some(2) => "generic",
        other => panic!("mode {other:?} in {text}"),
    };
    assert_eq!(node.report("status").unwrap()["node"]["xdp"], mode);
    mode.to_owned()
}

// veth forgets the queue before generic mode: everything would come to the first engine, and cross.
#[test]
fn frames_come_to_the_engine_they_are_for() {
    let cluster = Cluster::start(Lab::builder().queues(2));
    let mut one = cluster.open(1, options(3, LARGEST));
    let mut two = cluster.open(2, options(5, LARGEST));
    between(&mut one, &mut two, &sizes(), LIST);
    for node in [1, 2] {
        assert_eq!(xdp_mode(&cluster, node), "native");
        let counters = cluster.lab.node(node).report("counters").unwrap();
        for engine in counters["engines"].as_array().unwrap() {
            // Engines of different queues greet each other.
            let crossed = engine["counters"]["crossed"].as_u64().unwrap();
            assert!(crossed < 20, "{crossed} frames crossed on node {node}");
        }
    }
}

#[test]
fn a_single_queue_of_a_veth_is_taken_in_generic_mode() {
    for mtu in [1500, 9000] {
        let cluster = Cluster::start(Lab::builder().mtu(mtu));
        assert_eq!(xdp_mode(&cluster, 1), "generic");
        let mut one = cluster.open(1, options(3, LARGEST));
        let mut two = cluster.open(2, options(5, LARGEST));
        between(&mut one, &mut two, &sizes(), LIST);
    }
}
