//! What the processes of a node may do and hold, read from /proc: exactly what they need.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::harness::{Cluster, STEP, proc, until};
use portolan::{Port, PortOptions};
use portolan_testbed::{Lab, process};
use rustix::process::Gid;
use rustix::thread::set_thread_groups;

const QUEUES: u16 = 2;
/// NET_ADMIN, BPF, NET_RAW, SETUID, SETGID, KILL, SYS_NICE, IPC_LOCK: the supervisor's (ARCHITECTURE.md, *Trust boundaries*).
const SUPERVISORS: u64 = 1 << 12 | 1 << 39 | 1 << 13 | 1 << 7 | 1 << 6 | 1 << 5 | 1 << 23 | 1 << 14;

/// A cluster whose daemons are started with a supplementary group, for children to give up.
fn start(queues: u16) -> Cluster {
    set_thread_groups(&[Gid::from_raw(4)]).unwrap();
    let cluster = Cluster::start(Lab::builder().queues(queues));
    assert_eq!(proc::status(cluster.daemon(1).pid(), "Groups"), "4");
    cluster
}

fn capabilities(pid: i32, set: &str) -> u64 {
    u64::from_str_radix(&proc::status(pid, set), 16).unwrap()
}

fn nobody() -> (String, String) {
    let id = |flag| process::run_ok(Command::new("id").args([flag, "nobody"]), STEP).unwrap();
    (id("-u").trim().to_owned(), id("-g").trim().to_owned())
}

/// An ordinary user without any privilege or way to gain one.
fn assert_powerless(pid: i32) {
    let what = format!("{} ({pid})", proc::status(pid, "Name"));
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(capabilities(pid, set), 0, "{what}: {set}");
    }
    assert_eq!(proc::status(pid, "NoNewPrivs"), "1", "{what}");
    let (uid, gid) = nobody();
    for (key, id) in [("Uid", uid), ("Gid", gid)] {
        let ids = proc::status(pid, key);
        assert!(
            ids.split_whitespace().count() == 4 && ids.split_whitespace().all(|x| x == id),
            "{what}: {key} {ids}"
        );
    }
    assert_eq!(proc::status(pid, "Groups"), "", "{what}");
}

/// All threads of a process, itself included.
fn threads(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .map(|t| t.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect()
}

/// The descriptors an engine may hold: standard ones, its link, its XSK, its epoll, a wake eventfd per engine of the node, and
/// for every port it serves two doorbells: its own, an eventfd, and its end of the application's, a socket.
fn allowed(log: &str, ports: usize) -> BTreeMap<String, usize> {
    BTreeMap::from([
        ("/dev/null".to_owned(), 1),
        (log.to_owned(), 2),
        ("socket".to_owned(), 2 + ports),
        ("anon_inode:[eventpoll]".to_owned(), 1),
        (
            "anon_inode:[eventfd]".to_owned(),
            usize::from(QUEUES) + ports,
        ),
    ])
}

#[test]
fn an_engine_holds_nothing_it_does_not_need() {
    let cluster = start(QUEUES);
    let engines = cluster.daemon(1).engine_pids().unwrap();
    assert_eq!(engines.len(), usize::from(QUEUES));
    let log = cluster.lab.node(1).log_path();
    let log = fs::canonicalize(log).unwrap().display().to_string();
    // The service opens port 0 in its own time.
    service_of(&cluster);

    let mut ports: Vec<Port> = Vec::new();
    // With the service's port alone; with one of its own; with three; and when those are closed again.
    for open in [0, 1, 3, 0] {
        while ports.len() > open {
            ports.pop().unwrap().close(STEP).unwrap();
        }
        while ports.len() < open {
            let number = 2 + 2 * ports.len() as u16;
            ports.push(cluster.open(1, PortOptions::at(number)));
        }
        for (queue, &engine) in engines.iter().enumerate() {
            // Even ports, and the service's, are the first engine's.
            let served = if queue == 0 { 1 + open } else { 0 };
            let allowed = allowed(&log, served);
            let what = format!("engine {queue} with {open} applications' ports");
            // Doorbells go a moment after the port.
            let held = until(&what, STEP, || {
                let held = proc::descriptor_kinds(engine);
                let total: usize = held.values().sum();
                (total <= allowed.values().sum()).then_some(held)
            });
            assert_eq!(held, allowed, "{what}: {:?}", proc::descriptors(engine));
        }
    }
}

#[test]
fn an_engine_may_do_nothing_it_does_not_need() {
    let cluster = start(QUEUES);
    let supervisor = cluster.daemon(1).pid();
    for engine in cluster.daemon(1).engine_pids().unwrap() {
        for thread in threads(engine) {
            assert_powerless(thread);
            // 2: a filter.
            assert_eq!(proc::status(thread, "Seccomp"), "2");
        }
        assert_ne!(engine, supervisor);
        assert_eq!(
            fs::read_dir(format!("/proc/{engine}/task"))
                .unwrap()
                .count(),
            1
        );
    }
}

/// The process that answers at port 0.
fn service_of(cluster: &Cluster) -> i32 {
    let node = cluster.attach(1);
    until("port 0 is open", STEP, || {
        let report = node.report(portolan::Report::Ports).unwrap();
        let rows = report["ports"].as_array().unwrap().clone();
        let row = rows
            .into_iter()
            .find(|row| row["port"] == 0 && row["state"] == "open")?;
        i32::try_from(row["owner_pid"].as_i64()?).ok()
    })
}

#[test]
fn the_service_is_an_ordinary_process() {
    let cluster = start(1);
    let service = service_of(&cluster);
    assert_powerless(service);
    let log = cluster.lab.node(1).log_path();
    let log = fs::canonicalize(log).unwrap().display().to_string();
    // Its connections to the daemon, one of them the port's, and the port's two doorbells. Nothing of the supervisor's.
    let allowed = BTreeMap::from([
        ("/dev/null".to_owned(), 1),
        (log, 2),
        ("socket".to_owned(), 3),
        ("anon_inode:[eventfd]".to_owned(), 1),
    ]);
    assert_eq!(proc::descriptor_kinds(service), allowed);
}

#[test]
fn the_supervisor_keeps_the_least_set_and_no_more() {
    let cluster = start(1);
    let supervisor = cluster.daemon(1).pid();
    for thread in threads(supervisor) {
        for set in ["CapPrm", "CapEff"] {
            assert_eq!(capabilities(thread, set), SUPERVISORS, "{set}");
        }
        // And it can never have more.
        assert_eq!(capabilities(thread, "CapBnd"), SUPERVISORS);
        for set in ["CapInh", "CapAmb"] {
            assert_eq!(capabilities(thread, set), 0, "{set}");
        }
    }
}
