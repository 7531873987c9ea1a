//! What people and machines do to the interface under a running node: set it down and up, change its MTU, take its XDP program off, delete
//! it and make another of the same name. The node goes on, applications stay attached, nothing is lost but what had a deadline.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use crate::harness::crowd::{all_go_on, all_is_well, all_talk, begin, talk};
use crate::harness::exchange::options;
use crate::harness::talker::Talking;
use crate::harness::{Cluster, STEP, until};
use portolan::{Address, Event, Port, Priority, Reason, SendOptions, Status};
use portolan_ebpf::{AttachMode, Encap, Steer, SteerConfig};
use portolan_testbed::{DaemonOptions, Lab, ManagerOptions};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use serde_json::Value;

/// What happened is seen within this.
const SEEN: Duration = Duration::from_secs(10);
/// Nobody gives a peer up while its interface is away.
pub const PATIENT: &str = "[transport]\nunreachable_after_ms = 60000\n";
/// Everybody gives it up soon.
const IMPATIENT: &str = "[transport]\nunreachable_after_ms = 500\n";

/// Two ports, one per node, each with streams to the other.
fn both_ways(cluster: &Cluster) -> Vec<Talking> {
    let mut all = vec![
        talk(cluster, (1, 10), &[(2, 10)]),
        talk(cluster, (2, 10), &[(1, 10)]),
    ];
    begin(&mut all);
    all
}

/// `ip` in a node's network.
fn ip(cluster: &Cluster, node: u16, arguments: &str) {
    let mut command = cluster.lab.node(node).command("ip");
    let output = command.args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

fn set(cluster: &Cluster, node: u16, what: &str) {
    let interface = cluster.lab.node(node).interface();
    ip(cluster, node, &format!("link set dev {interface} {what}"));
}

fn wait(cluster: &Cluster, node: u16, what: &str, condition: impl FnMut(&Value) -> bool) -> Value {
    cluster
        .daemon(node)
        .wait_status(what, SEEN, condition)
        .unwrap()
}

fn wait_state(cluster: &Cluster, node: u16, state: &str) {
    let what = format!("the interface of node {node} is {state}");
    wait(cluster, node, &what, |status| {
        status["node"]["interface_state"] == state
    });
}

/// Sends, and waits how that ends.
fn send(port: &mut Port, to: (u16, u16), timeout: Duration) -> Status {
    let options = SendOptions {
        timeout: Some(timeout),
        ..SendOptions::default()
    };
    port.send_bytes(Address::from(to), b"does anybody hear this?", options)
        .unwrap();
    until("the send ends", STEP, || {
        let event = port.blocking_receive(STEP).unwrap()?;
        let status = match &event {
            Event::Sent(sent) => Some(sent.status),
            _ => None,
        };
        port.unknown(event);
        status
    })
}

/// While a peer that was reached cannot be reached, sends end when it is given up, whatever their deadlines: only the peer could say that they did
/// not come. One that never left the node ends at its deadline. Afterwards the same ports go on.
fn sends_end(cluster: &Cluster, away: impl FnOnce(), back: impl FnOnce()) {
    let (soon, late) = (Duration::from_millis(200), STEP);
    let to = (2, 41);
    let mut sender = cluster.open(1, options(40, 4096));
    let mut receiver = cluster.open(2, options(41, 4096));
    for _ in 0..4 {
        let buffer = receiver.allocate(1024).unwrap();
        receiver
            .provide_receive_buffer(buffer, Priority::Low)
            .unwrap();
    }
    assert_eq!(send(&mut sender, to, late), Status::Delivered);
    away();
    let status = send(&mut sender, to, soon);
    assert_eq!(status, Status::MaybeDelivered(Reason::Deadline));
    let status = send(&mut sender, to, soon);
    assert_eq!(status, Status::NotDelivered(Reason::Deadline));
    let status = send(&mut sender, to, late);
    assert_eq!(status, Status::NotDelivered(Reason::Unreachable));
    back();
    assert_eq!(send(&mut sender, to, late), Status::Delivered);
}

fn incarnations(cluster: &Cluster) -> Vec<Value> {
    let of = |node| cluster.daemon(node).status().unwrap()["node"]["incarnation"].clone();
    [1, 2].map(of).to_vec()
}

// Five times down and up under load. Expect: the state follows, everything waits and goes on by itself, and no engine was replaced for it.
#[test]
fn down_and_up_again() {
    let cluster = Cluster::start_with(Lab::builder(), PATIENT);
    let mut all = both_ways(&cluster);
    let engines = cluster.daemon(1).engine_pids().unwrap();
    for _ in 0..5 {
        set(&cluster, 1, "down");
        wait_state(&cluster, 1, "down");
        // The other end has lost its carrier.
        wait_state(&cluster, 2, "down");
        set(&cluster, 1, "up");
        wait_state(&cluster, 1, "up");
        wait_state(&cluster, 2, "up");
        all_go_on(&mut all);
    }
    assert_eq!(cluster.daemon(1).engine_pids().unwrap(), engines);
    all_is_well(all);
}

// A send while the interface is down. Expect: a definite end, and the next one, when it is up, is delivered.
#[test]
fn a_send_ends_while_the_interface_is_down() {
    let cluster = Cluster::start_with(Lab::builder(), IMPATIENT);
    let to_state = |what, state| {
        set(&cluster, 1, what);
        wait_state(&cluster, 1, state);
    };
    sends_end(
        &cluster,
        || to_state("down", "down"),
        || to_state("up", "up"),
    );
}

/// Changes the MTU of one end under load with letters longer than any frame.
fn follow_the_mtu(cluster: &Cluster, changes: &[(u32, u32)]) {
    let mut all = both_ways(cluster);
    for &(mtu, followed) in changes {
        let before = cluster.daemon(1).engine_pids().unwrap();
        set(cluster, 1, &format!("mtu {mtu}"));
        let status = wait(cluster, 1, "the MTU is followed", |status| {
            let engine = &status["engines"][0];
            status["node"]["mtu"] == followed
                && engine["state"] == "running"
                && engine["pid"] != before[0]
        });
        assert_eq!(status["node"]["mtu_configured"], 1500);
        // Also the only recovery: nobody who took over was fenced for not having done so.
        let last = &status["engines"][0]["last_recovery"];
        assert_eq!(last["cause"], "interface", "{status}");
        all_go_on(&mut all);
    }
    let status = cluster.daemon(1).status().unwrap();
    assert_eq!(status["engines"][0]["restarts"], changes.len(), "{status}");
    all_is_well(all);
}

// The MTU of one end becomes smaller, then larger than ever. Expect: it is followed down and up to what the node was made with, with one
// takeover each, and nothing is lost.
#[test]
fn the_mtu_is_followed() {
    let cluster = Cluster::start(Lab::builder().mtu(1500));
    let changes = [
        (1300, 1300),
        (700, 700),
        (1600, 1500),
        (900, 900),
        (1500, 1500),
    ];
    follow_the_mtu(&cluster, &changes);
    // Too small for anybody.
    set(&cluster, 1, "mtu 575");
    wait_state(&cluster, 1, "down");
    set(&cluster, 1, "mtu 1500");
    wait_state(&cluster, 1, "up");
}

// The same without standbys. Expect: the same, with a pause of a process start.
#[test]
fn the_mtu_is_followed_without_standbys() {
    let builder = Lab::builder().mtu(1500);
    let cluster = Cluster::start_with(builder, "[recovery]\nstandby = false\n");
    follow_the_mtu(&cluster, &[(1300, 1300), (1600, 1500)]);
}

/// The XDP link of a node's supervisor.
fn xdp_link(cluster: &Cluster, node: u16) -> OwnedFd {
    let pid = cluster.daemon(node).pid();
    let is_xdp = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path()).is_ok_and(|text| text.contains("link_type:\txdp"))
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo"))
        .unwrap()
        .flatten();
    let entry = entries.into_iter().find(is_xdp).expect("an XDP link");
    let number = entry.file_name().to_str().unwrap().parse().unwrap();
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).unwrap()
}

fn detach(cluster: &Cluster, node: u16) {
    portolan_ebpf::detach(xdp_link(cluster, node).as_fd()).unwrap();
}

// Somebody detaches the program, under load. Expect: it is attached again with its sockets, and no engine was replaced for it.
#[test]
fn a_detached_program_is_attached_again() {
    let cluster = Cluster::start(Lab::builder());
    let mut all = both_ways(&cluster);
    let engines = cluster.daemon(1).engine_pids().unwrap();
    for _ in 0..2 {
        detach(&cluster, 1);
        all_go_on(&mut all);
    }
    wait_state(&cluster, 1, "up");
    assert!(cluster.daemon(1).log().contains("attached again"));
    assert_eq!(cluster.daemon(1).engine_pids().unwrap(), engines);
    all_is_well(all);
}

// Somebody detaches the program and puts another there. Expect: the state and the log say so, and when it is gone ours is back by itself.
#[test]
fn another_program_is_left_alone_until_it_goes() {
    let cluster = Cluster::start(Lab::builder());
    let all = both_ways(&cluster);
    let node = cluster.lab.node(1);
    let config = SteerConfig {
        encap: Encap::Ethernet,
        ethertype: 0x88b6,
        udp_base_port: 9,
        queues: 1,
        local_mac: [2, 9, 9, 9, 9, 9],
        local_v4: None,
        local_v6: None,
    };
    let mut other = Steer::load(&config).unwrap();
    let supervisor = Pid::from_raw(cluster.daemon(1).pid()).unwrap();
    let link = xdp_link(&cluster, 1);
    // It must not be quicker than we are.
    kill_process(supervisor, Signal::STOP).unwrap();
    portolan_ebpf::detach(link.as_fd()).unwrap();
    drop(link);
    let interface = node.interface();
    node.in_namespace(|| other.attach(&interface, AttachMode::Native))
        .unwrap()
        .unwrap();
    kill_process(supervisor, Signal::CONT).unwrap();
    wait_state(&cluster, 1, "stripped");
    until("the log says whose", SEEN, || {
        let log = cluster.daemon(1).log();
        (log.contains("another XDP program, id ") && log.contains("bpftool prog show id"))
            .then_some(())
    });
    drop(other);
    wait_state(&cluster, 1, "up");
    let mut all = all;
    all_go_on(&mut all);
    all_is_well(all);
}

/// Makes the veth pair of a lab of two nodes again, with other indices, and node 1's end with this MAC.
fn recreate(cluster: &Cluster, mac: &str) {
    let [one, two] = [1, 2].map(|id| cluster.lab.node(id));
    let queues = cluster.lab.spec().queues;
    let both = format!("numtxqueues {queues} numrxqueues {queues}");
    ip(
        cluster,
        1,
        &format!(
            "link add name {} index 4711 address {mac} {both} type veth peer name {} address {} {both} netns {}",
            one.interface(),
            two.interface(),
            two.mac(),
            two.namespace_name()
        ),
    );
    for node in [one, two] {
        let name = node.interface();
        let mut ethtool = node.command("ethtool");
        ethtool.args([
            "-K", &name, "tx", "off", "gro", "off", "tso", "off", "gso", "off",
        ]);
        assert!(ethtool.output().unwrap().status.success());
        ip(
            cluster,
            node.id(),
            &format!("address add {}/16 dev {name}", node.ipv4()),
        );
        ip(cluster, node.id(), &format!("link set {name} up"));
    }
}

pub fn delete(cluster: &Cluster) {
    let interface = cluster.lab.node(1).interface();
    ip(cluster, 1, &format!("link delete {interface}"));
    for node in [1, 2] {
        wait_state(cluster, node, "gone");
    }
}

/// Without offloads.
pub fn make_again(cluster: &Cluster) {
    recreate(cluster, &cluster.lab.node(1).mac());
    for node in [1, 2] {
        wait_state(cluster, node, "up");
    }
}

// Both ends are deleted and made again, with another index, under load. Expect: gone meanwhile, and then everything goes on: the same
// incarnations, the same ports, nothing lost. Twice, so that the second stands on what the first has made.
#[test]
fn deleted_and_made_again() {
    let cluster = Cluster::start_with(Lab::builder(), PATIENT);
    let mut all = both_ways(&cluster);
    let before = incarnations(&cluster);
    for _ in 0..2 {
        delete(&cluster);
        make_again(&cluster);
        all_go_on(&mut all);
    }
    assert_eq!(incarnations(&cluster), before);
    all_is_well(all);
}

// A send while there is no interface. Expect: as while it is down.
#[test]
fn a_send_ends_while_there_is_no_interface() {
    let cluster = Cluster::start_with(Lab::builder(), IMPATIENT);
    sends_end(&cluster, || delete(&cluster), || make_again(&cluster));
}

// The interface of a node with two queues is given another MAC, then deleted and made again with a third, under load between and within
// nodes that ask the kernel for each other's MAC. Expect: everything goes on.
#[test]
fn another_mac_and_several_queues() {
    let lab = Lab::builder().queues(2).build().unwrap();
    let other = |id: u16| lab.node(3 - id);
    let peers = [1, 2].map(|id| {
        let (peer, address) = (other(id), other(id).ipv4());
        let (number, name) = (peer.id(), peer.name());
        format!("{PATIENT}[[peer]]\nid = {number}\nname = \"{name}\"\naddress = \"{address}\"\n")
    });
    let cluster = Cluster::start_in(lab, |id| peers[usize::from(id) - 1].clone());
    let mut all = all_talk(&cluster, &[(1, 10), (1, 11), (2, 11)]);
    let before = incarnations(&cluster);
    for (mac, recreated) in [("02:00:00:01:00:01", false), ("02:00:00:02:00:01", true)] {
        if recreated {
            delete(&cluster);
            recreate(&cluster, mac);
        } else {
            set(&cluster, 1, &format!("address {mac}"));
        }
        wait(&cluster, 1, "the MAC is ours", |status| {
            status["node"]["mac"] == mac && status["node"]["interface_state"] == "up"
        });
        all_go_on(&mut all);
    }
    assert_eq!(incarnations(&cluster), before);
    all_is_well(all);
}

fn managed() -> Cluster {
    Cluster::start_as(Lab::builder(), |_| DaemonOptions {
        overrides: PATIENT.to_owned(),
        manager: Some(ManagerOptions::default()),
        ..DaemonOptions::default()
    })
}

/// Kills the supervisor of node 1 and waits for its successor.
fn kill_supervisor(cluster: &Cluster) {
    let supervisor = Pid::from_raw(cluster.daemon(1).pid()).unwrap();
    kill_process(supervisor, Signal::KILL).unwrap();
    until("another supervisor serves", STEP, || {
        let log = cluster.daemon(1).log();
        log.contains("node goes on").then_some(())
    });
}

// An interface is made again, and its MTU set, then the supervisor is killed. Expect: its successor finds in the store what belongs to the new
// interface, and goes on.
#[test]
fn a_successor_goes_on_with_the_new_interface() {
    let cluster = managed();
    let mut all = both_ways(&cluster);
    let before = incarnations(&cluster);
    delete(&cluster);
    make_again(&cluster);
    all_go_on(&mut all);
    let follows = |what, mtu| {
        wait(&cluster, 1, what, |status| status["node"]["mtu"] == mtu);
    };
    set(&cluster, 1, "mtu 1300");
    follows("the MTU is followed", 1300);
    kill_supervisor(&cluster);
    wait_state(&cluster, 1, "up");
    follows("the MTU is still followed", 1300);
    all_go_on(&mut all);
    // More than memory is laid out for is no reason to begin anew.
    set(&cluster, 1, "mtu 4000");
    follows("the MTU is followed up to what there is room for", 1500);
    kill_supervisor(&cluster);
    wait_state(&cluster, 1, "up");
    all_go_on(&mut all);
    assert_eq!(incarnations(&cluster), before);
    all_is_well(all);
}

// The supervisor is killed while there is no interface. Expect: its successor waits for one, like itself.
#[test]
fn a_successor_waits_for_the_interface() {
    let cluster = managed();
    let mut all = both_ways(&cluster);
    let before = incarnations(&cluster);
    delete(&cluster);
    kill_supervisor(&cluster);
    wait_state(&cluster, 1, "gone");
    make_again(&cluster);
    all_go_on(&mut all);
    assert_eq!(incarnations(&cluster), before);
    all_is_well(all);
}

// The interface becomes another while no supervisor looks. Expect: the next one finds that out.
#[test]
fn a_successor_finds_another_interface() {
    let cluster = managed();
    let mut all = both_ways(&cluster);
    let before = incarnations(&cluster);
    let supervisor = Pid::from_raw(cluster.daemon(1).pid()).unwrap();
    kill_process(supervisor, Signal::STOP).unwrap();
    let interface = cluster.lab.node(1).interface();
    ip(&cluster, 1, &format!("link delete {interface}"));
    wait_state(&cluster, 2, "gone");
    recreate(&cluster, &cluster.lab.node(1).mac());
    kill_supervisor(&cluster);
    for node in [1, 2] {
        wait_state(&cluster, node, "up");
    }
    all_go_on(&mut all);
    assert_eq!(incarnations(&cluster), before);
    all_is_well(all);
}

// A node whose interface is down when it starts. Expect: it starts, says so, and works when the interface is up.
#[test]
fn a_node_starts_while_its_interface_is_down() {
    let lab = Lab::builder().build().unwrap();
    let interface = lab.node(1).interface();
    let mut down = lab.node(1).command("ip");
    down.args(["link", "set", "dev", &interface, "down"]);
    assert!(down.status().unwrap().success());
    let cluster = Cluster::start_in(lab, |_| PATIENT.to_owned());
    wait_state(&cluster, 1, "down");
    set(&cluster, 1, "up");
    wait_state(&cluster, 1, "up");
    all_is_well(both_ways(&cluster));
}
