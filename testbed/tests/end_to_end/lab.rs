//! The laboratory itself: what it is made of, and that nothing of it stays behind.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_testbed::{Binaries, DaemonOptions, Encap, Lab, Node, process, sweep};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv,
    send, socket,
};

const STEP: Duration = Duration::from_secs(20);

fn ping(from: &Node, to: IpAddr, payload: u32) {
    let mut command = from.command("ping");
    let (to, payload) = (to.to_string(), payload.to_string());
    // -M do: never fragment, so that the payload shows the MTU.
    command.args([
        "-c", "2", "-i", "0.01", "-W", "5", "-M", "do", "-s", &payload, &to,
    ]);
    process::run_ok(&mut command, STEP).unwrap();
}

fn read_inside(node: &Node, path: String) -> String {
    // /sys shows the namespace it was mounted in, so a program with its own view reads it.
    let text = process::run_ok(node.command("cat").arg(path), STEP).unwrap();
    text.trim().to_owned()
}

fn namespaces() -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir("/run/netns") else {
        return BTreeSet::new();
    };
    entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Nothing named after the lab is left.
fn assert_gone(name: &str) {
    let left: Vec<_> = namespaces()
        .into_iter()
        .filter(|n| n.starts_with(&format!("{name}n")))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!Path::new("/run/portolan").join(name).exists());
}

#[test]
fn two_nodes_reach_each_other_at_any_mtu() {
    for (mtu, encap) in [(1500, Encap::Udp4), (9000, Encap::Udp6)] {
        let lab = Lab::builder().mtu(mtu).encap(encap).build().unwrap();
        let (one, two) = (lab.node(1), lab.node(2));
        // The headers: 20 bytes IPv4 or 40 bytes IPv6, 8 bytes ICMP.
        ping(one, two.ipv4().into(), mtu - 28);
        ping(two, one.ipv6().into(), mtu - 48);
        let mut large = one.command("ping");
        let payload = (mtu - 27).to_string();
        large.args([
            "-c",
            "1",
            "-W",
            "1",
            "-M",
            "do",
            "-s",
            &payload,
            &two.ipv4().to_string(),
        ]);
        assert!(!process::run(&mut large, STEP).unwrap().status.success());
    }
}

#[test]
fn five_nodes_meet_on_a_bridge() {
    let lab = Lab::builder().nodes(5).mtu(9000).build().unwrap();
    for to in 2..=5 {
        ping(lab.node(1), lab.node(to).ipv4().into(), 8972);
    }
    ping(lab.node(5), lab.node(2).ipv6().into(), 8952);
}

#[test]
fn interfaces_have_the_queues_macs_and_offloads_asked_for() {
    for nodes in [2, 3] {
        let lab = Lab::builder().nodes(nodes).queues(3).build().unwrap();
        for node in lab.nodes() {
            let interface = node.interface();
            let sys = format!("/sys/class/net/{interface}");
            assert_eq!(read_inside(node, format!("{sys}/address")), node.mac());
            let queues =
                process::run_ok(node.command("ls").arg(format!("{sys}/queues")), STEP).unwrap();
            let mut queues: Vec<_> = queues.split_whitespace().collect();
            queues.sort_unstable();
            assert_eq!(queues, ["rx-0", "rx-1", "rx-2", "tx-0", "tx-1", "tx-2"]);
            let features =
                process::run_ok(node.command("ethtool").args(["-k", &interface]), STEP).unwrap();
            for feature in [
                "tx-checksumming: off",
                "tcp-segmentation-offload: off",
                "generic-segmentation-offload: off",
                "generic-receive-offload: off",
            ] {
                assert!(features.contains(feature), "{feature} not in\n{features}");
            }
        }
    }
}

#[test]
fn a_tcp_transfer_between_namespaces_arrives_whole() {
    let lab = Lab::builder().build().unwrap();
    let to = lab.node(2).ipv4();
    // The socket is opened inside and used outside: it stays in its namespace.
    let listener = lab
        .node(2)
        .in_namespace(|| TcpListener::bind((to, 5000)).unwrap())
        .unwrap();
    let sent: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let connect = || TcpStream::connect((to, 5000)).unwrap();
            let mut stream = lab.node(1).in_namespace(connect).unwrap();
            stream.set_write_timeout(Some(STEP)).unwrap();
            stream.write_all(&sent).unwrap();
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(STEP)).unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received == sent);
    });
}

#[test]
fn a_panic_inside_a_namespace_reaches_the_caller() {
    let lab = Lab::builder().build().unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        lab.node(1).in_namespace(|| panic!("inside"))
    }));
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
}

#[test]
fn labs_side_by_side_do_not_meet() {
    let labs: Vec<Lab> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| Lab::builder().build().unwrap()))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let names: BTreeSet<_> = labs.iter().map(Lab::name).collect();
    assert_eq!(names.len(), 3);
    for lab in &labs {
        ping(lab.node(1), lab.node(2).ipv4().into(), 64);
    }
    // The same address, another network: only its own listener is found.
    let address = (labs[0].node(2).ipv4(), 5001);
    let _listener = labs[0]
        .node(2)
        .in_namespace(|| TcpListener::bind(address).unwrap())
        .unwrap();
    assert!(
        labs[0]
            .node(1)
            .in_namespace(|| TcpStream::connect(address))
            .unwrap()
            .is_ok()
    );
    assert!(
        labs[1]
            .node(1)
            .in_namespace(|| TcpStream::connect(address))
            .unwrap()
            .is_err()
    );
}

#[test]
fn a_dropped_lab_takes_its_processes_and_namespaces_along() {
    for panics in [false, true] {
        let mut left = None;
        let mut sleeper = None;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let lab = Lab::builder().nodes(3).build().unwrap();
            left = Some(lab.name().to_owned());
            sleeper = Some(lab.node(2).command("sleep").arg("600").spawn().unwrap());
            ping(lab.node(1), lab.node(3).ipv4().into(), 64);
            assert!(!panics, "on purpose");
        }));
        assert_eq!(result.is_err(), panics);
        assert_gone(&left.unwrap());
        let status = sleeper.unwrap().wait().unwrap();
        assert!(!status.success(), "killed, not finished: {status}");
    }
}

#[test]
fn the_lab_of_a_killed_process_is_swept() {
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "lab::helper_that_abandons_a_lab",
            "--ignored",
            "--nocapture",
        ])
        .env("ABANDON_A_LAB", "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(owner.stdout.take().unwrap());
    let name = output
        .lines()
        .find_map(|line| {
            line.unwrap()
                .split_once("LAB=")
                .map(|(_, name)| name.to_owned())
        })
        .expect("the helper says its lab's name");
    // Its owner lives: nobody sweeps it.
    assert!(!sweep().unwrap().contains(&name));
    assert!(namespaces().contains(&format!("{name}n1")));
    owner.kill().unwrap();
    owner.wait().unwrap();
    // Any lab built by anyone sweeps; it may also have been another test just now.
    drop(Lab::builder().build().unwrap());
    assert_gone(&name);
}

#[test]
#[ignore = "the other process of the_lab_of_a_killed_process_is_swept"]
fn helper_that_abandons_a_lab() {
    if std::env::var_os("ABANDON_A_LAB").is_none() {
        return;
    }
    let lab = Lab::builder().build().unwrap();
    let mut sleeper = lab
        .node(1)
        .command("sleep")
        .arg("600")
        .stdout(Stdio::null()) // or whoever reads ours waits for it
        .spawn()
        .unwrap();
    println!("LAB={}", lab.name());
    sleeper.wait().unwrap();
}

#[test]
fn a_spec_out_of_range_is_refused() {
    for builder in [
        Lab::builder().nodes(0),
        Lab::builder().queues(0),
        Lab::builder().mtu(500),
        Lab::builder().name("Too-Strange"),
    ] {
        assert!(builder.build().is_err());
    }
}

/// A stand-in for the daemon.
fn stand_in(daemon: &str) -> (tempfile::TempDir, Binaries) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("portoland");
    fs::write(&path, daemon).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let binaries = Binaries::in_directory(directory.path());
    (directory, binaries)
}

fn listening_stand_in() -> String {
    let program = std::env::current_exe().unwrap();
    // The engine leaves the process group, as a hostile case.
    format!(
        "#!/bin/sh\necho started\nsetsid sleep 600 &\nSTAND_IN_CONFIG=$2 exec {} --exact lab::helper_that_listens --ignored\n",
        program.display()
    )
}

#[test]
#[ignore = "the daemon of the tests below"]
fn helper_that_listens() {
    let Some(config) = std::env::var_os("STAND_IN_CONFIG") else {
        return;
    };
    let config = fs::read_to_string(config).unwrap();
    let config: toml::Table = config.parse().unwrap();
    let path = SocketAddrUnix::new(config["node"]["socket"].as_str().unwrap()).unwrap();
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &path).unwrap();
    listen(&listener, 16).unwrap();
    let report =
        r#"{"response":"document","document":{"engines":[{"queue":0,"pid":1,"state":"running"}]}}"#;
    loop {
        let connection = accept(&listener).unwrap();
        let mut request = [0; 4096];
        let (length, _) = recv(&connection, &mut request, RecvFlags::empty()).unwrap();
        if length > 0 {
            assert_eq!(&request[..length], br#"{"request":"status"}"#);
            // In two packets: another follows, the last.
            let (first, last) = report.split_at(20);
            for (more, part) in [(1, first), (0, last)] {
                let packet = [&[more], part.as_bytes()].concat();
                send(&connection, &packet, SendFlags::NOSIGNAL).unwrap();
            }
        }
    }
}

fn processes_of(node: &Node) -> String {
    let mut command = Command::new("ip");
    command.args(["netns", "pids", node.namespace_name()]);
    process::run_ok(&mut command, STEP).unwrap()
}

#[test]
fn a_daemon_is_waited_for_and_ended_with_its_engines() {
    let (_directory, binaries) = stand_in(&listening_stand_in());
    let lab = Lab::builder().binaries(binaries).build().unwrap();
    let node = lab.node(1);
    let mut daemon = node.start_daemon("[engine]\nwait = \"busy\"").unwrap();
    assert!(daemon.is_running());
    assert!(daemon.log().contains("started"));
    assert_eq!(daemon.engine_pids().unwrap(), [1]);
    assert!(
        fs::read_to_string(daemon.config_path())
            .unwrap()
            .contains("busy")
    );
    assert_eq!(processes_of(node).lines().count(), 2);
    drop(daemon);
    assert_eq!(processes_of(node), "");

    // Stopped in the ordinary way: it leaves its engine behind, and that is an error.
    fs::remove_file(node.socket()).unwrap();
    let daemon = node.start_daemon("").unwrap();
    let error = daemon.stop(STEP).unwrap_err();
    assert!(error.to_string().contains("behind"), "{error:#}");
    assert_eq!(processes_of(node), "");
}

#[test]
fn a_daemon_that_does_not_start_is_reported_with_its_log() {
    let (_directory, binaries) = stand_in("#!/bin/sh\necho no such interface >&2\nexit 2\n");
    let lab = Lab::builder().binaries(binaries).build().unwrap();
    let error = format!("{:#}", lab.node(1).start_daemon("").unwrap_err());
    assert!(error.contains("no such interface"), "{error}");

    let (_directory, binaries) = stand_in("#!/bin/sh\necho starting\nsleep 600\n");
    let lab = Lab::builder().binaries(binaries).build().unwrap();
    let options = DaemonOptions {
        within: Duration::from_millis(300),
        ..DaemonOptions::default()
    };
    let error = format!("{:#}", lab.node(1).start_daemon_with(&options).unwrap_err());
    assert!(
        error.contains("not ready within 300ms") && error.contains("starting"),
        "{error}"
    );
    assert_eq!(processes_of(lab.node(1)), "");
}
