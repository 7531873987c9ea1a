//! Supervisors killed, restarted and stopped while engines move messages: the next one goes on with everything, applications stay
//! attached, nothing is lost, nothing comes twice.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::crowd::{all_go_on, all_is_well, all_talk, kill};
use crate::harness::{Cluster, STEP, until};
use portolan::{Event, Node, NodeError, Port, PortError, PortOptions, Priority, SendOptions};
use portolan_testbed::{Daemon, DaemonOptions, Lab, Manager, ManagerOptions};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};

/// Who talks.
const EVERYBODY: [(u16, u16); 4] = [(1, 10), (1, 11), (2, 10), (2, 11)];
/// include/linux/sched.h: the process is being taken down.
const PF_EXITING: u64 = 0x4;

fn manager(cluster: &Cluster, node: u16) -> &Manager {
    cluster.daemon(node).manager().unwrap()
}

/// Opens a port, sends itself a letter, closes the port again.
fn use_a_port(node: &Node, number: u16) {
    let mut port = node.open_port(PortOptions::at(number)).unwrap();
    greet_itself(&mut port);
    port.close(STEP).unwrap();
}

fn greet_itself(port: &mut Port) {
    let buffer = port.allocate(64).unwrap();
    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
    let own = port.address();
    port.send_bytes(own, b"hello", SendOptions::default())
        .unwrap();
    let (mut sent, mut received) = (false, false);
    while !sent || !received {
        let event = port.blocking_receive(STEP).unwrap();
        match event.expect("a letter to oneself") {
            Event::Sent(end) => {
                assert!(end.status.is_delivered(), "{:?}", end.status);
                sent = true;
            }
            Event::Received(message) => {
                assert_eq!(&message[..], b"hello");
                received = true;
            }
            other => port.unknown(other),
        }
    }
}

fn ready_engines(daemon: &Daemon) {
    let all_ready = |status: &serde_json::Value| {
        status["engines"].as_array().is_some_and(|engines| {
            engines
                .iter()
                .all(|e| e["state"] == "running" && e["standby"] == "ready")
        })
    };
    daemon
        .wait_status("engines run and standbys are ready", STEP, all_ready)
        .unwrap();
}

fn standby_pids(cluster: &Cluster, node: u16) -> Vec<i32> {
    let active = cluster.daemon(node).engine_pids().unwrap();
    let namespace = cluster.lab.node(node).namespace_name().to_owned();
    let output = Command::new("ip")
        .args(["netns", "pids", &namespace])
        .output();
    let pids = String::from_utf8(output.unwrap().stdout).unwrap();
    // Whoever is being taken down does not stand by; on a busy machine that takes longer than to succeed it.
    let is_engine = |pid: &i32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after_name = line.rsplit_once("(portoland-eng) ");
        let flags =
            after_name.and_then(|(_, fields)| fields.split(' ').nth(6)?.parse::<u64>().ok());
        flags.is_some_and(|flags| flags & PF_EXITING == 0)
    };
    let pids = pids.split_whitespace().map(|pid| pid.parse().unwrap());
    pids.filter(is_engine)
        .filter(|pid| !active.contains(pid))
        .collect()
}

// Twenty times; in four of them nobody waits for the next one, which takes its time.
#[test]
fn streams_do_not_notice_that_supervisors_are_killed() {
    let cluster = Cluster::start_managed(Lab::builder());
    let mut all = all_talk(&cluster, &EVERYBODY);
    let app = [1, 2].map(|node| cluster.attach(node));
    ready_engines(cluster.daemon(1));
    ready_engines(cluster.daemon(2));
    let engines = [1, 2].map(|node| cluster.daemon(node).engine_pids().unwrap());
    let service = cluster.daemon(1).status().unwrap()["node"]["service_pid"].clone();
    let stored = manager(&cluster, 1).stored().len();
    let mut longest = Duration::ZERO;
    for round in 0..20u16 {
        let node = 1 + round % 2;
        let killed = Instant::now();
        let start = manager(&cluster, node).kill().unwrap();
        // Attached before any of this.
        let somebody = || use_a_port(&app[usize::from(node) - 1], 20 + round);
        if round % 5 != 0 {
            somebody();
        }
        manager(&cluster, node).wait_ready(start, STEP).unwrap();
        longest = longest.max(killed.elapsed());
        if round % 5 == 0 {
            somebody();
        }
        all_go_on(&mut all);
    }
    println!("20 supervisors killed; the next one served after at most {longest:?}");
    for node in [1, 2] {
        let now = cluster.daemon(node).engine_pids().unwrap();
        assert_eq!(now, engines[usize::from(node) - 1], "engines went on");
    }
    let status = cluster.daemon(1).status().unwrap();
    assert_eq!(
        status["node"]["service_pid"], service,
        "the service went on"
    );
    let ping = cluster
        .lab
        .node(2)
        .portolan()
        .args(["ping", "1", "-c", "10"])
        .status();
    assert!(ping.unwrap().success());
    for talking in &all {
        assert_eq!(
            talking.faults(),
            0,
            "{} is told of nothing",
            talking.address
        );
    }
    all_is_well(all);
    // Nothing piles up. The talkers' own connections are gone.
    until("the store is as small as it was", STEP, || {
        (manager(&cluster, 1).stored().len() <= stored).then_some(())
    });
    assert!(manager(&cluster, 1).hung_up().is_empty());
}

// `systemctl restart`: SIGTERM, and a start. Then `systemctl stop`: nobody keeps anything, so the engines leave.
#[test]
fn a_restart_leaves_everything_and_a_stop_ends_it() {
    let cluster = Cluster::start_managed(Lab::builder());
    let mut all = all_talk(&cluster, &EVERYBODY);
    let engines = cluster.daemon(1).engine_pids().unwrap();
    for _ in 0..3 {
        manager(&cluster, 1).restart(STEP).unwrap();
        all_go_on(&mut all);
    }
    assert_eq!(cluster.daemon(1).engine_pids().unwrap(), engines);
    all_is_well(all);

    let mut left = cluster.open(1, PortOptions::at(9));
    let (status, _rest) = cluster.stop(1);
    assert!(status.success(), "{status}");
    let end = left.blocking_receive(STEP).unwrap_err();
    assert!(
        matches!(end, PortError::Closed(_) | PortError::DaemonGone),
        "{end:?}"
    );
}

// The engine dies while there is no supervisor; both die together; all of them die.
#[test]
fn streams_survive_supervisor_and_engines() {
    let cluster = Cluster::start_managed(Lab::builder());
    let mut all = all_talk(&cluster, &EVERYBODY);
    for round in 0..9 {
        ready_engines(cluster.daemon(1));
        let manager = manager(&cluster, 1);
        let active = cluster.daemon(1).engine_pids().unwrap()[0];
        let standby = standby_pids(&cluster, 1);
        assert_eq!(standby.len(), 1, "one stands by");
        if round % 3 == 0 {
            manager.hold(true);
        }
        let start = manager.kill().unwrap();
        if round % 3 == 0 {
            manager.wait_gone(STEP).unwrap();
        }
        kill(active);
        if round % 3 == 2 {
            kill(standby[0]);
        }
        manager.hold(false);
        manager.wait_ready(start, STEP).unwrap();
        all_go_on(&mut all);
        let now = cluster.daemon(1).engine_pids().unwrap()[0];
        assert_ne!(now, active);
        if round % 3 == 0 {
            assert_eq!(now, standby[0], "the standby takes over");
        }
    }
    all_is_well(all);
}

// Every step of opening and closing a port, of taking a connection and letting it go, is survived.
#[test]
fn a_supervisor_may_die_at_every_step() {
    let points = [
        "start.stored",
        "client.stored/4",
        "client.answered/4",
        "client.dropped/4",
        "open.stored/2",
        "open.journalled/2",
        "open.told/2",
        "open.heard/2",
        "open.open/2",
        "close.journalled",
        "close.told",
        "close.heard",
        "close.closed",
        "close.answered",
    ];
    let lab = Lab::builder().nodes(1).build().unwrap();
    for point in points {
        let options = DaemonOptions {
            manager: Some(ManagerOptions {
                first_env: vec![("PORTOLAN_DIE_AT".to_owned(), point.to_owned())],
                ..ManagerOptions::default()
            }),
            ..DaemonOptions::default()
        };
        let daemon = lab.node(1).start_daemon_with(&options).unwrap();
        let manager = daemon.manager().unwrap();
        until("the service's port is open", STEP, || {
            let ports = lab.node(1).report("ports").ok()?;
            (ports["ports"][0]["state"] == "open").then_some(())
        });
        let stays = lab_attach(&lab).open_port(PortOptions::at(7));
        let mut stays = stays.unwrap_or_else(|error| panic!("{point}: {error:?}"));
        let mut tries = 0;
        loop {
            use_a_port(&lab_attach(&lab), 9);
            greet_itself(&mut stays);
            tries += 1;
            if manager.starts() > 1 && manager.is_ready() {
                break;
            }
            assert!(tries < 50, "{point} is never reached");
        }
        use_a_port(&lab_attach(&lab), 9);
        stays.close(STEP).unwrap();
        assert_eq!(manager.starts(), 2, "{point}: it dies once");
        // Nothing is left over.
        until("nothing of those ports is stored", STEP, || {
            let stored = manager.stored();
            let ours = stored
                .iter()
                .filter(|n| n.starts_with("port-") && !n.starts_with("port-0-"));
            (ours.count() == 0).then_some(())
        });
        daemon.kill().unwrap();
    }
}

/// Of the pause of one that nobody waits for, 0.8 s (`supervisor/leisure.rs`), what it surely takes.
const A_PAUSE: Duration = Duration::from_millis(500);

/// What the supervisor that came back last says of its way up: how often it paused, and whether somebody waited for it.
fn way_up(daemon: &Daemon) -> (u32, bool) {
    let log = daemon.log();
    let line = log
        .lines()
        .rfind(|line| line.contains("made way for others"));
    let line = line.unwrap_or_else(|| panic!("it did not make way:\n{log}"));
    let value = |key: &str| {
        let (_, rest) = line.split_once(key).expect(key);
        rest.split_whitespace().next().unwrap()
    };
    (
        value("pauses=").parse().unwrap(),
        value("waited_for=").parse().unwrap(),
    )
}

// A supervisor comes back while nobody wants anything of it, while one of its engines is dead, while an application has connected, and while one that was
// attached asks. Expect: it takes its time the first time, only.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_supervisor_takes_its_time_until_somebody_waits() {
    let cluster = Cluster::start_managed(Lab::builder());
    let daemon = cluster.daemon(1);
    let manager = manager(&cluster, 1);
    let attached = cluster.attach(1);
    let comes_back = |meanwhile: &mut dyn FnMut()| {
        ready_engines(daemon);
        // Who goes is heard, too.
        until("who asked for the status is forgotten", STEP, || {
            manager.hung_up().is_empty().then_some(())
        });
        manager.hold(true);
        let start = manager.kill().unwrap();
        manager.wait_gone(STEP).unwrap();
        meanwhile();
        manager.hold(false);
        let born = Instant::now();
        manager.wait_ready(start, STEP).unwrap();
        let took = born.elapsed();
        // It says so when it looks after its engines, just after it is ready.
        ready_engines(daemon);
        let (pauses, waited_for) = way_up(daemon);
        (pauses, waited_for, took)
    };
    // An engine may have answered just when the supervisor was killed, and then has somebody wait; at the end they all have something to answer.
    let ways: Vec<_> = std::iter::repeat_with(|| comes_back(&mut || ()))
        .take(5)
        .collect();
    let paused = |&(pauses, _, took): &(u32, bool, Duration)| pauses > 0 && took > A_PAUSE;
    assert!(ways.iter().any(paused), "{ways:?}, nobody waits");

    let active = daemon.engine_pids().unwrap()[0];
    let (pauses, waited_for, _) = comes_back(&mut || kill(active));
    assert!(pauses == 1 && waited_for, "{pauses} pauses, engine dead");
    assert_ne!(daemon.engine_pids().unwrap()[0], active);

    let mut connected = None;
    let (pauses, waited_for, _) = comes_back(&mut || {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let address = SocketAddrUnix::new(daemon.socket()).unwrap();
        connect(&socket, &address).unwrap();
        connected = Some(socket);
    });
    assert!(pauses == 1 && waited_for, "{pauses} pauses, connected");

    std::thread::scope(|scope| {
        let mut port = None;
        let (_, waited_for, _) = comes_back(&mut || {
            port = Some(scope.spawn(|| attached.open_port(PortOptions::at(9))));
        });
        assert!(waited_for, "asked");
        greet_itself(&mut port.unwrap().join().unwrap().unwrap());
    });
}

fn lab_attach(lab: &Lab) -> Node {
    until("the daemon is attached to", STEP, || {
        // A connection that was taken but not yet stored is lost with its supervisor.
        Node::attach(lab.node(1).socket()).ok()
    })
}

#[test]
fn who_left_meanwhile_is_missed() {
    let cluster = Cluster::start_managed(Lab::builder().nodes(1));
    let port = cluster.open(1, PortOptions::at(9));
    let manager = manager(&cluster, 1);
    manager.hold(true);
    let start = manager.kill().unwrap();
    manager.wait_gone(STEP).unwrap();
    drop(port);
    // By hand, beside it: the lock is kept, too.
    let output = cluster
        .lab
        .node(1)
        .portoland()
        .unwrap()
        .arg("--config")
        .arg(cluster.daemon(1).config_path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("another portoland"),
        "{said}"
    );
    manager.hold(false);
    manager.wait_ready(start, STEP).unwrap();
    until("the port is free again", STEP, || {
        let ports = cluster.lab.node(1).report("ports").ok()?;
        (ports["ports"].as_array()?.len() == 1).then_some(())
    });
    use_a_port(&cluster.attach(1), 9);
}

// What the store lost, or what is not a ledger any more, cannot be gone on with. Expect: a new incarnation, ports closed, and the node works.
#[test]
fn without_its_ledger_a_node_begins_anew() {
    let cluster = Cluster::start_managed(Lab::builder());
    let incarnation = || cluster.daemon(1).status().unwrap()["node"]["incarnation"].clone();
    for lost in [true, false] {
        let before = incarnation();
        let mut port = cluster.open(1, PortOptions::at(9));
        let manager = manager(&cluster, 1);
        manager.hold(true);
        let start = manager.kill().unwrap();
        manager.wait_gone(STEP).unwrap();
        if lost {
            assert_eq!(manager.lose(|name| name == "ledger-0"), 1);
        } else {
            let ledger = manager.stored_fd("ledger-0").unwrap();
            let magic = [0u8; 8];
            assert_eq!(rustix::io::pwrite(&ledger, &magic, 0).unwrap(), 8);
        }
        manager.hold(false);
        manager.wait_ready(start, STEP).unwrap();
        ready_engines(cluster.daemon(1));
        assert_ne!(incarnation(), before);
        let end = loop {
            match port.blocking_receive(STEP) {
                Ok(Some(event)) => port.unknown(event),
                Ok(None) => panic!("the port lives on"),
                Err(end) => break end,
            }
        };
        assert!(
            matches!(end, PortError::Closed(_) | PortError::DaemonGone),
            "{end:?}"
        );
        use_a_port(&cluster.attach(1), 9);
        // What is sent to the former incarnation is refused, as it must be; the next reaches the new one.
        until("the other node reaches it", STEP, || {
            let mut ping = cluster.lab.node(2).portolan();
            let ping = ping.args(["ping", "1", "-c", "10"]).output().unwrap();
            ping.status.success().then_some(())
        });
    }
}

#[test]
fn a_full_store_is_an_error_with_its_remedy() {
    let lab = Lab::builder().nodes(1);
    let cluster = Cluster::start_as(lab, |_| DaemonOptions {
        manager: Some(ManagerOptions {
            store_max: 40,
            ..ManagerOptions::default()
        }),
        ..DaemonOptions::default()
    });
    ready_engines(cluster.daemon(1));
    let node = cluster.attach(1);
    let mut ports = Vec::new();
    let refusal = loop {
        match node.open_port(PortOptions::default()) {
            Ok(port) => ports.push(port),
            Err(refusal) => break refusal,
        }
        assert!(ports.len() < 40);
    };
    assert!(!ports.is_empty());
    let NodeError::Refused { message, .. } = &refusal else {
        panic!("{refusal:?}");
    };
    assert!(message.contains("FileDescriptorStoreMax"), "{message}");
    assert!(
        manager(&cluster, 1).refused().is_empty(),
        "nothing was dropped"
    );
    // What is open stays, over a restart, too.
    manager(&cluster, 1).restart(STEP).unwrap();
    ports.iter_mut().for_each(greet_itself);
}
