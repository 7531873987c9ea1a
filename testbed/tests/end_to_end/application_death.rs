//! Applications killed with SIGKILL while they send and receive: their ports close, their peers are told, nobody else notices, and
//! everything they had is given back.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::harness::talker::{Manner, Talker, Talking, close_books};
use crate::harness::worker::{self, Parent, Worker};
use crate::harness::{Cluster, STEP, books, proc, until};
use portolan::{Address, Node, PortOptions, Priority, Report};
use portolan_testbed::Lab;
use serde::{Deserialize, Serialize};

/// How soon the ports of a dead application are closed.
const CLOSED_WITHIN: Duration = Duration::from_millis(100);
const DEATHS_WATCHED: u64 = 20;
const DEATHS: u64 = 1000;
/// Applications that live, and die, at the same time.
const TOGETHER: u64 = 4;
/// What unused memory of an allocator may differ by.
const SLACK_KB: u64 = 1024;

#[derive(Serialize, Deserialize)]
struct Victim {
    socket: PathBuf,
    ports: [u16; 2],
    to: Vec<(u16, u16)>,
    first: u64,
}

#[test]
#[ignore = "an application of the tests below"]
fn victim() {
    worker::work(|victim: Victim, parent: &Parent| {
        let node = Node::attach(&victim.socket).unwrap();
        let to: Vec<_> = victim
            .to
            .iter()
            .flat_map(|&to| [Priority::Low, Priority::High].map(|p| (Address::from(to), p)))
            .collect();
        let manner = Manner {
            first: victim.first,
            buffers: 64,
            ..Manner::default()
        };
        let talking: Vec<_> = victim
            .ports
            .iter()
            .map(|&port| {
                let port = node.open_port(PortOptions::at(port)).unwrap();
                let talking = Talking::start(Talker::new(port, &to, manner).unwrap());
                talking.send(true);
                talking
            })
            .collect();
        // Both have heard and been heard before it is their turn to die.
        for t in &talking {
            until("an answer of the peers", STEP, || {
                (t.received() > 0 && t.delivered() > 0).then_some(())
            });
        }
        parent.answer(&"talking");
        parent.order();
    });
}

fn talk(cluster: &Cluster, at: (u16, u16), to: &[(u16, u16)], manner: Manner) -> Talking {
    let port = cluster.open(at.0, PortOptions::at(at.1));
    let to: Vec<_> = to
        .iter()
        .flat_map(|&to| [Priority::Low, Priority::High].map(|p| (Address::from(to), p)))
        .collect();
    Talking::start(Talker::new(port, &to, manner).unwrap())
}

/// The ports a node has.
fn ports(node: &Node) -> BTreeSet<u64> {
    let report = node.report(Report::Ports).unwrap();
    let rows = report["ports"].as_array().unwrap();
    rows.iter().map(|r| r["port"].as_u64().unwrap()).collect()
}

/// The connections to its daemon.
fn clients(node: &Node) -> u64 {
    let status = node.report(Report::Status).unwrap();
    status["limits"]["clients_now"].as_u64().unwrap()
}

fn wait_closed(node: &Node, which: &[u16], within: Duration) {
    until(&format!("ports {which:?} are closed"), within, || {
        let open = ports(node);
        which
            .iter()
            .all(|&p| !open.contains(&u64::from(p)))
            .then_some(())
    });
}

fn only_port_closed(books: &[books::Books]) {
    for book in books {
        for failure in book.failures() {
            assert!(
                failure.certain && failure.reason == "PortClosed",
                "{}: {failure:?}",
                book.name()
            );
        }
    }
}

#[test]
fn a_killed_applications_ports_close_at_once_and_nobody_else_notices() {
    let cluster = Cluster::start(Lab::builder());
    let node = cluster.attach(1);
    let victims = [40, 41];
    let at_victims = victims.map(|port| (1, port));
    let manner = Manner::default();
    // One peer on the other node, one on the same.
    let mut peers = [
        talk(&cluster, (2, 20), &at_victims, manner),
        talk(&cluster, (1, 21), &at_victims, manner),
    ];
    // Two who have nothing to do with it, across and on the same node.
    let mut bystanders = [
        talk(&cluster, (1, 30), &[(2, 30), (1, 31)], manner),
        talk(&cluster, (2, 30), &[(1, 30)], manner),
        talk(&cluster, (1, 31), &[(1, 30)], manner),
    ];
    peers.iter().chain(&bystanders).for_each(|t| t.send(true));
    let (mut closed, mut told) = (Vec::new(), Vec::new());
    for round in 0..DEATHS_WATCHED {
        let mut victim = Worker::start(
            "application_death::victim",
            &Victim {
                socket: cluster.lab.node(1).socket(),
                ports: victims,
                to: vec![(2, 20), (1, 21)],
                first: round << 32,
            },
        );
        assert_eq!(victim.answer::<String>(STEP), "talking");
        assert!(ports(&node).is_superset(&BTreeSet::from([40, 41])));
        let before: Vec<u64> = peers.iter().map(Talking::failed).collect();
        let start = Instant::now();
        victim.kill();
        wait_closed(&node, &victims, STEP);
        closed.push(start.elapsed());
        for (peer, before) in peers.iter_mut().zip(before) {
            until("the peers' sends end", STEP, || {
                peer.check();
                (peer.failed() > before).then_some(())
            });
        }
        told.push(start.elapsed());
        for bystander in &mut bystanders {
            bystander.hear(10, STEP);
        }
    }
    println!(
        "ports closed after at most {:?}, peers told after at most {:?}",
        closed.iter().max(),
        told.iter().max()
    );
    let peers = close_books(peers.into_iter().collect(), STEP);
    only_port_closed(&peers);
    assert!(peers.iter().all(|p| p.delivered() > 0));
    let bystanders = close_books(bystanders.into_iter().collect(), STEP);
    assert_eq!(books::complaints(&bystanders), [""; 0]);
    for book in &bystanders {
        assert_eq!(book.failures().count(), 0, "{book:?}");
    }
    assert!(
        closed.iter().all(|&after| after <= CLOSED_WITHIN),
        "{closed:?}"
    );
}

/// Everything a process holds on behalf of applications.
#[derive(Debug, PartialEq)]
struct Holdings {
    descriptors: BTreeMap<String, usize>,
    mappings: BTreeMap<String, usize>,
}

fn holdings(pid: i32) -> Holdings {
    Holdings {
        descriptors: proc::descriptor_kinds(pid),
        mappings: proc::shared_mappings(pid),
    }
}

#[test]
fn a_thousand_killed_applications_leave_nothing_behind() {
    // An engine that happens to see many frames has a socket made for them, which is no application's.
    let cluster = Cluster::start_with(Lab::builder(), "[network]\nbusy_poll = \"never\"");
    let node = cluster.attach(1);
    let numbers = |i: u64| [100 + 2 * i as u16, 101 + 2 * i as u16];
    let all: Vec<u16> = (0..TOGETHER).flat_map(numbers).collect();
    let at_victims: Vec<_> = all.iter().map(|&port| (1, port)).collect();
    let manner = Manner {
        window: 2,
        ..Manner::default()
    };
    let mut peer = talk(&cluster, (2, 20), &at_victims, manner);
    peer.send(true);
    let pids = {
        let daemon = cluster.daemon(1);
        let engines = daemon.engine_pids().unwrap();
        [vec![daemon.pid()], engines].concat()
    };
    // Without victims: ours, and the two of the service.
    let alone = 3;
    until("the service is there and nobody else", STEP, || {
        (clients(&node) == alone).then_some(())
    });
    let round = |number: u64| {
        let mut victims: Vec<Worker> = (0..TOGETHER)
            .map(|i| {
                let victim = Victim {
                    socket: cluster.lab.node(1).socket(),
                    ports: numbers(i),
                    to: vec![(2, 20)],
                    first: number << 32,
                };
                Worker::start("application_death::victim", &victim)
            })
            .collect();
        for victim in &victims {
            assert_eq!(victim.answer::<String>(STEP), "talking");
        }
        for victim in &mut victims {
            victim.kill();
        }
        wait_closed(&node, &all, STEP);
        // Each had a connection beside those of its ports.
        until("every connection is closed", STEP, || {
            (clients(&node) == alone).then_some(())
        });
    };

    // The first deaths may make a process grow what it keeps.
    for number in 0..4 {
        round(number);
    }
    let before: Vec<_> = pids.iter().map(|&pid| holdings(pid)).collect();
    let grown = |key: &str| -> Vec<u64> { pids.iter().map(|&p| proc::kilobytes(p, key)).collect() };
    let keys = ["VmSize", "RssAnon", "RssShmem"];
    let memory_before = keys.map(grown);

    for number in 4..4 + DEATHS / TOGETHER {
        round(number);
        peer.check();
    }
    for (&pid, before) in pids.iter().zip(&before) {
        // Closing is reported before the last descriptor is gone.
        let name = proc::status(pid, "Name");
        let mut now = holdings(pid);
        let deadline = Instant::now() + STEP;
        while now != *before && Instant::now() < deadline {
            std::thread::yield_now();
            now = holdings(pid);
        }
        assert_eq!(now, *before, "{name} ({pid})");
    }
    let memory_after = keys.map(grown);
    println!("{keys:?} of {pids:?} in kB: {memory_before:?} before, {memory_after:?} after");
    for ((key, before), after) in keys.iter().zip(&memory_before).zip(&memory_after) {
        for ((pid, before), after) in pids.iter().zip(before).zip(after) {
            assert!(
                *after <= before + SLACK_KB,
                "{key} of {pid}: {before} → {after} kB"
            );
        }
    }
    let engines = cluster.daemon(1).engine_pids().unwrap();
    assert_eq!(engines, pids[1..], "the same engines");
    let books = close_books(vec![peer], STEP);
    only_port_closed(&books);
}
