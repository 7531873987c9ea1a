//! Nodes that find each other on a real segment, and everything that may be in their way there: a node that moves, an id that is taken
//! twice, another cluster, another MTU and policy; seeds; a supervisor that dies.

use std::time::{Duration, Instant};

use portolan_testbed::{Daemon, DaemonOptions, Encap, Lab, ManagerOptions, Node, process};
use serde_json::Value;

const WITHIN: Duration = Duration::from_secs(15);
const MULTICAST: &str = "peer = []\n[network]\ndiscovery = \"multicast\"\n";

/// Waits until a node's map is as wanted.
#[track_caller]
fn until(node: &Node, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + WITHIN;
    loop {
        let map = node.report("map").unwrap();
        if wanted(&map) {
            return map;
        }
        assert!(Instant::now() < deadline, "never {what}: {map:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn here(map: &Value, id: u16) -> bool {
    let nodes = map["nodes"].as_array().unwrap();
    nodes
        .iter()
        .any(|n| n["node"] == id && n["state"] == "here")
}

fn conflict<'v>(map: &'v Value, kind: &str) -> Option<&'v Value> {
    map["conflicts"]
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["kind"] == kind)
}

/// Waits until a node's service has its port, which the others may find the node before.
#[track_caller]
fn serving(node: &Node) {
    let deadline = Instant::now() + WITHIN;
    loop {
        let report = node.report("ports").unwrap();
        let ports = report["ports"].as_array().unwrap();
        if ports.iter().any(|row| row["port"] == 0) {
            return;
        }
        assert!(Instant::now() < deadline, "no service: {report:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// By name, so that names are learned too.
#[track_caller]
fn ping(from: &Node, to: &Node) {
    serving(to);
    let mut ping = from.portolan();
    ping.args(["ping", &format!("ptl{}", to.id()), "-c", "20"]);
    process::run_ok(&mut ping, WITHIN).unwrap();
}

fn ip(node: &Node, arguments: &str) {
    let mut command = node.command("ip");
    process::run_ok(command.args(arguments.split(' ')), WITHIN).unwrap();
}

// Three nodes that know nobody, by every encapsulation. Expect: each reaches each by name, and the map is free of conflicts.
#[test]
fn three_nodes_find_each_other() {
    for encap in [Encap::Udp4, Encap::Udp6, Encap::Ethernet] {
        let lab = Lab::builder()
            .name("ptdi")
            .nodes(3)
            .encap(encap)
            .build()
            .unwrap();
        let begun = Instant::now();
        let start = |node: &Node| node.start_daemon(MULTICAST).unwrap();
        let _daemons: Vec<Daemon> = lab.nodes().iter().map(start).collect();
        for node in lab.nodes() {
            let others: Vec<u16> = (1..=3).filter(|id| *id != node.id()).collect();
            let map = until(node, "complete", |map| {
                others.iter().all(|id| here(map, *id))
            });
            assert_eq!(
                map["conflicts"].as_array().unwrap().len(),
                0,
                "{encap}: {map:#}"
            );
            for other in others {
                ping(node, lab.node(other));
            }
        }
        // Once per second, and once for each who asks or is found.
        let announced = lab.node(1).report("map").unwrap()["announced"]
            .as_u64()
            .unwrap();
        let most = begun.elapsed().as_secs() + 8;
        assert!((2..=most).contains(&announced), "{announced} of {most}");
        let mut show = lab.node(1).portolan();
        let shown = process::run_ok(show.arg("map"), WITHIN).unwrap();
        assert!(
            shown.contains("ptl2") && shown.contains("announced"),
            "{shown}"
        );
    }
}

// A third node takes the id of the second. Expect: both others name it, and the second is still reached; one of another cluster, MTU and
// profile is named as that.
#[test]
fn what_is_in_the_way_is_named() {
    let lab = Lab::builder().name("ptdi").nodes(3).build().unwrap();
    let (one, two, three) = (lab.node(1), lab.node(2), lab.node(3));
    let _first = one.start_daemon(MULTICAST).unwrap();
    let _second = two.start_daemon(MULTICAST).unwrap();
    until(one, "found", |map| here(map, 2));
    ping(one, two);

    let twin = three
        .start_daemon(&format!("{MULTICAST}[node]\nid = 2\nname = \"twin\"\n"))
        .unwrap();
    let map = until(one, "a duplicate", |map| {
        conflict(map, "duplicate id").is_some()
    });
    let what = conflict(&map, "duplicate id").unwrap()["what"].to_string();
    assert!(
        what.contains("10.77.0.2") && what.contains("10.77.0.3"),
        "{what}"
    );
    until(two, "its own duplicate", |map| {
        conflict(map, "duplicate id").is_some()
    });
    ping(one, two);
    let mut show = one.portolan();
    let shown = process::run(show.arg("map"), WITHIN).unwrap();
    assert_eq!(shown.status.code(), Some(1), "{}", shown.stdout);
    assert!(
        shown.stdout.contains("bad: duplicate id: node 2"),
        "{}",
        shown.stdout
    );
    drop(twin);

    let other = three
        .start_daemon(&format!("{MULTICAST}[cluster]\nname = \"elsewhere\"\n"))
        .unwrap();
    let map = until(one, "another cluster", |map| {
        conflict(map, "other cluster").is_some()
    });
    let what = conflict(&map, "other cluster").unwrap()["what"].to_string();
    assert!(what.contains("elsewhere"), "{what}");
    assert!(!here(&map, 3));
    drop(other);

    ip(
        three,
        &format!("link set dev {} mtu 1400", three.interface()),
    );
    let strict = format!("{MULTICAST}[transport]\nprofile = \"gbn-stall\"\n");
    let _odd = three.start_daemon(&strict).unwrap();
    let map = until(one, "another policy", |map| {
        conflict(map, "policy").is_some()
    });
    assert!(
        conflict(&map, "mtu").unwrap()["what"]
            .to_string()
            .contains("1400")
    );
    let mut resolve = one.portolan();
    resolve.args(["ping", "ptl3", "-c", "1"]);
    let refused = process::run(&mut resolve, WITHIN).unwrap();
    assert!(
        refused.stderr.contains("no node `ptl3`"),
        "{}",
        refused.stderr
    );
}

// The second node stops and comes back with another MAC and address. Expect: named, and reached there.
#[test]
fn a_node_that_moves_is_followed() {
    let lab = Lab::builder().name("ptdi").nodes(3).build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let _first = one.start_daemon(MULTICAST).unwrap();
    let second = two.start_daemon(MULTICAST).unwrap();
    until(one, "found", |map| here(map, 2));
    ping(one, two);
    drop(second);
    let interface = two.interface();
    ip(two, &format!("link set dev {interface} down"));
    ip(
        two,
        &format!("link set dev {interface} address 02:00:00:00:77:77 up"),
    );
    ip(two, &format!("address add 10.77.0.77/16 dev {interface}"));
    let moved = format!("{MULTICAST}address = \"10.77.0.77\"\n");
    let _second = two.start_daemon(&moved).unwrap();
    let map = until(one, "moved", |map| conflict(map, "moved").is_some());
    let what = conflict(&map, "moved").unwrap()["what"].to_string();
    assert!(
        what.contains("10.77.0.77") && what.contains("02:00:00:00:77:77"),
        "{what}"
    );
    // Of the first message nobody knows whether the node before the move has had it.
    let mut first = one.portolan();
    first.args(["ping", "ptl2", "-c", "1"]);
    process::run(&mut first, WITHIN).unwrap();
    ping(one, two);
}

// Two who know only the first, by its address. Expect: they find each other; and the first's supervisor dies, with an engine after it:
// what was found is still reached, at once.
#[test]
fn seeds_and_a_supervisor_that_dies() {
    let lab = Lab::builder().name("ptdi").nodes(3).build().unwrap();
    let seeds = "peer = []\n[network]\ndiscovery = [\"10.77.0.1\"]\n";
    let options = DaemonOptions {
        overrides: seeds.to_owned(),
        manager: Some(ManagerOptions::default()),
        ..DaemonOptions::default()
    };
    let first = lab.node(1).start_daemon_with(&options).unwrap();
    let _second = lab.node(2).start_daemon(seeds).unwrap();
    let _third = lab.node(3).start_daemon(seeds).unwrap();
    until(lab.node(2), "found by way of the seed", |map| here(map, 3));
    ping(lab.node(2), lab.node(3));
    until(lab.node(1), "found", |map| here(map, 2) && here(map, 3));
    ping(lab.node(1), lab.node(3));
    // Nobody announces anything from now on: what the successor knows it knows from its predecessor.
    for node in [lab.node(2), lab.node(3)] {
        ip(node, "route add blackhole 10.77.0.1/32");
    }
    let pid = first.pid();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let deadline = Instant::now() + WITHIN;
    while first.pid() == pid || first.pid() == 0 || lab.node(1).report("map").is_err() {
        assert!(Instant::now() < deadline, "no successor");
        std::thread::sleep(Duration::from_millis(10));
    }
    ping(lab.node(1), lab.node(3));
    let mut fault = lab.node(1).portolan();
    process::run_ok(fault.args(["fault", "kill", "0"]), WITHIN).unwrap();
    ping(lab.node(1), lab.node(3));
}

// Two segments and a router between them; each knows the first's address. Expect: they find each other and talk, and all of it went through
// the router, to whose MAC both send.
#[test]
fn seeds_across_a_router() {
    let lab = Lab::builder().name("ptdi").nodes(3).build().unwrap();
    let (one, two, router) = (lab.node(1), lab.node(2), lab.node(3));
    let interface = router.interface();
    for segment in [1, 2] {
        ip(
            router,
            &format!("address add 10.78.{segment}.254/24 dev {interface}"),
        );
    }
    // One interface for both segments: without redirects nobody learns a shorter way.
    let settings = format!(
        "cd /proc/sys/net/ipv4 && echo 1 > ip_forward && echo 0 > conf/all/send_redirects && echo 0 > conf/{interface}/send_redirects"
    );
    let mut sh = router.command("sh");
    process::run_ok(sh.args(["-c", &settings]), WITHIN).unwrap();
    let forwarded = || -> u64 {
        let mut count = router.command("sh");
        count.args([
            "-c",
            "grep '^Ip:' /proc/net/snmp | tail -n 1 | cut -d ' ' -f 7",
        ]);
        let said = process::run_ok(&mut count, WITHIN).unwrap();
        said.trim().parse().unwrap()
    };
    let start = |node: &Node| -> Daemon {
        let (id, interface) = (node.id(), node.interface());
        ip(node, &format!("address flush dev {interface} scope global"));
        ip(
            node,
            &format!("address add 10.78.{id}.1/24 dev {interface}"),
        );
        ip(node, &format!("route add default via 10.78.{id}.254"));
        let settings = format!(
            "peer = []\n[network]\ndiscovery = [\"10.78.1.1\"]\naddress = \"10.78.{id}.1\"\n"
        );
        node.start_daemon(&settings).unwrap()
    };
    let (_first, _second) = (start(one), start(two));
    for (node, other) in [(one, 2), (two, 1)] {
        let map = until(node, "found across the router", |map| here(map, other));
        assert_eq!(
            map["conflicts"].as_array().unwrap().len(),
            0,
            "no conflict: {map:#}"
        );
    }
    let before = forwarded();
    ping(one, two);
    ping(two, one);
    let crossed = forwarded() - before;
    assert!(crossed >= 40, "{crossed} datagrams through the router");
}
