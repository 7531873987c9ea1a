//! Four applications on one node, two ports each, all sending to all, on the same node and across: nobody gets what is another's,
//! and everybody gets as much.

use std::path::PathBuf;
use std::time::Duration;

use crate::harness::books::{self, Books};
use crate::harness::talker::{Manner, Talker, Talking};
use crate::harness::worker::{self, Parent, Worker};
use crate::harness::{Cluster, STEP, jain};
use portolan::{Address, Node, PortOptions, Priority};
use portolan_testbed::Lab;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

const APPLICATIONS: u16 = 4;
const PORTS_EACH: u16 = 2;
/// How long deliveries are counted.
const MEASURED: Duration = Duration::from_secs(4);
const FAIR: f64 = 0.95;

#[derive(Serialize, Deserialize)]
struct Application {
    socket: PathBuf,
    ports: Vec<u16>,
    /// The core it runs on.
    core: usize,
    /// Everybody, these ports included: a port does not send to itself.
    everybody: Vec<(u16, u16)>,
}

#[derive(Serialize, Deserialize)]
struct Count {
    port: u16,
    delivered: u64,
    received: u64,
}

#[test]
#[ignore = "an application of the tests below"]
fn application() {
    worker::work(|application: Application, parent: &Parent| {
        let mut core = CpuSet::new();
        core.set(application.core);
        sched_setaffinity(None, &core).unwrap();
        let node = Node::attach(&application.socket).unwrap();
        let mut talking: Vec<(u16, Talking)> = application
            .ports
            .iter()
            .map(|&number| {
                let port = node.open_port(PortOptions::at(number)).unwrap();
                let own = port.address();
                let others = application.everybody.iter().copied().map(Address::from);
                let to: Vec<_> = others
                    .filter(|&to| to != own)
                    .map(|to| (to, Priority::Low))
                    .collect();
                let manner = Manner {
                    window: 4,
                    ..Manner::default()
                };
                let talker = Talker::new(port, &to, manner).unwrap();
                (number, Talking::start(talker))
            })
            .collect();
        parent.answer(&"open");
        loop {
            match parent.order().as_str() {
                "send" => talking.iter().for_each(|(_, t)| t.send(true)),
                "count" => {
                    for (_, t) in &mut talking {
                        t.check();
                    }
                    let count = talking.iter().map(|(port, t)| Count {
                        port: *port,
                        delivered: t.delivered(),
                        received: t.received(),
                    });
                    parent.answer(&count.collect::<Vec<_>>());
                }
                "settle" => {
                    talking.iter_mut().for_each(|(_, t)| t.settle(STEP));
                    parent.answer(&"settled");
                }
                _ => break,
            }
        }
        let books = talking.into_iter().map(|(_, t)| t.finish().books());
        parent.answer(&books.collect::<Vec<_>>());
    });
}

/// The first and the last core we may run on.
fn two_cores() -> (usize, usize) {
    let allowed = sched_getaffinity(None).unwrap();
    let cores = || (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
    (cores().next().unwrap(), cores().next_back().unwrap())
}

/// What each application's ports count now.
fn count(applications: &mut [Worker]) -> Vec<Count> {
    for application in &mut *applications {
        application.order("count");
    }
    let counts = applications.iter().map(|a| a.answer::<Vec<Count>>(STEP));
    counts.flatten().collect()
}

fn all_send_to_all(nodes: &[u16]) {
    // Engines on one core, applications on another, or the scheduler decides who has most: its neighbours on a core.
    let (core, engines_core) = two_cores();
    let lab = Lab::builder().nodes(nodes.len() as u16);
    let cluster = Cluster::start_with(lab, &format!("[engine]\ncores = [{engines_core}]"));
    let ports_of = |a: u16| (0..PORTS_EACH).map(move |p| 10 + a * PORTS_EACH + p);
    let everybody: Vec<(u16, u16)> = nodes
        .iter()
        .flat_map(|&node| (0..APPLICATIONS).flat_map(ports_of).map(move |p| (node, p)))
        .collect();
    let mut applications: Vec<Worker> = nodes
        .iter()
        .flat_map(|&node| (0..APPLICATIONS).map(move |a| (node, a)))
        .map(|(node, a)| {
            let application = Application {
                socket: cluster.lab.node(node).socket(),
                ports: ports_of(a).collect(),
                core,
                everybody: everybody.clone(),
            };
            Worker::start("fairness::application", &application)
        })
        .collect();
    for application in &applications {
        assert_eq!(application.answer::<String>(STEP), "open");
    }
    for application in &mut applications {
        application.order("send");
    }
    // Everybody is at it before the count begins.
    crate::harness::until("everybody has sent and received", STEP, || {
        let counts = count(&mut applications);
        let busy = counts.iter().all(|c| c.delivered > 50 && c.received > 50);
        busy.then_some(())
    });
    let before = count(&mut applications);
    // Not a wait for something to happen: the length of the measurement.
    std::thread::sleep(MEASURED);
    let after = count(&mut applications);
    for application in &mut applications {
        application.order("settle");
    }
    for application in &applications {
        assert_eq!(application.answer::<String>(2 * STEP), "settled");
    }
    for application in &mut applications {
        application.order("end");
    }
    let books: Vec<Books> = applications
        .iter()
        .flat_map(|a| a.answer::<Vec<Books>>(STEP))
        .collect();

    assert_eq!(books.len(), everybody.len());
    assert_eq!(books::complaints(&books), [""; 0]);
    for book in &books {
        assert_eq!(book.failures().count(), 0, "{book:?}");
    }
    let shares = |of: fn(&Count) -> u64| -> Vec<u64> {
        let pairs = before.iter().zip(&after);
        pairs
            .map(|(b, a)| {
                assert_eq!(b.port, a.port);
                of(a) - of(b)
            })
            .collect()
    };
    let delivered = shares(|c| c.delivered);
    let received = shares(|c| c.received);
    let total: u64 = delivered.iter().sum();
    assert!(total > 1000, "{delivered:?}");
    println!(
        "{} ports on {} node(s): {:.0} messages/s",
        everybody.len(),
        nodes.len(),
        total as f64 / MEASURED.as_secs_f64(),
    );
    assert_fair("sent", &delivered);
    assert_fair("received", &received);
    if nodes.len() > 1 {
        let across: Vec<u64> = books.iter().map(Books::delivered_across).collect();
        assert_fair("sent across", &across);
    }
}

fn assert_fair(what: &str, shares: &[u64]) {
    let index = jain(shares);
    println!("  {what}: Jain {index:.4}");
    assert!(index >= FAIR, "{what}: {shares:?}");
}

#[test]
fn all_send_to_all_on_one_node() {
    all_send_to_all(&[1]);
}

#[test]
fn all_send_to_all_on_both_nodes() {
    all_send_to_all(&[1, 2]);
}

#[test]
fn the_index_knows_unfairness() {
    assert!(jain(&[100, 100, 100, 100]) > 0.999);
    assert!(jain(&[100, 100, 100, 40]) < FAIR);
    assert!(jain(&[100, 0, 0, 0]) < 0.26);
}
