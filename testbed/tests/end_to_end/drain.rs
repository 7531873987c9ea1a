//! `portolan drain`: sends and ports are refused with a reason that says why, what was under way ends, and it can be taken back; an engine
//! that dies and a supervisor that dies meanwhile change nothing.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use portolan::{Event, PortOptions, Priority, Reason, SendOptions, Status};
use portolan_testbed::{Binaries, DaemonOptions, Lab, ManagerOptions, Node, process};
use rustix::process::{Pid, Signal, kill_process};

const WITHIN: Duration = Duration::from_secs(15);

fn drain(node: &Node, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = node.portolan();
    let finished = process::run(command.arg("drain").args(arguments), WITHIN).unwrap();
    (finished.status.code(), finished.stdout + &finished.stderr)
}

/// How the next send ends that ends.
#[track_caller]
fn ended(port: &mut portolan::Port) -> Status {
    let deadline = Instant::now() + WITHIN;
    while Instant::now() < deadline {
        if let Some(Event::Sent(sent)) = port.blocking_receive(Duration::from_secs(1)).unwrap() {
            return sent.status;
        }
    }
    panic!("no send ends");
}

#[test]
fn a_drained_node_loses_nothing_and_takes_nothing() {
    let lab = Lab::builder().name("ptdr").build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let options = DaemonOptions {
        manager: Some(ManagerOptions::default()),
        ..DaemonOptions::default()
    };
    let first = one.start_daemon_with(&options).unwrap();
    let _second = two.start_daemon("").unwrap();
    let node = portolan::Node::attach(one.socket()).unwrap();
    let mut sender = node.open_port(PortOptions::at(9)).unwrap();
    let there = portolan::Node::attach(two.socket()).unwrap();
    let mut receiver = there.open_port(PortOptions::at(5)).unwrap();
    let to = (2, 5);
    let late = SendOptions {
        timeout: Some(Duration::from_secs(60)),
        ..SendOptions::default()
    };

    // Three messages nobody has a buffer for: outstanding for as long as we like.
    for _ in 0..3 {
        sender.send_bytes(to, b"wait for me", late).unwrap();
    }
    let (code, said) = drain(one, &["--timeout", "0.3"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("NOT safe to stop yet: 3 sends") && said.contains("port 9: 3"),
        "{said}"
    );

    // A send, and a port.
    let refused = Status::NotDelivered(Reason::Draining);
    let again = |sender: &mut portolan::Port| {
        sender.send_bytes(to, b"too late", late).unwrap();
        ended(sender)
    };
    assert_eq!(again(&mut sender), refused);
    let deadline = Instant::now() + WITHIN;
    // Engines publish their counters now and then.
    while one.report("counters").unwrap()["engines"][0]["counters"]["send_tokens_refused"] != 1 {
        assert!(Instant::now() < deadline, "the refusal is not counted");
        std::thread::yield_now();
    }
    let error = node
        .open_port(PortOptions::at(10))
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(error.contains("being drained"), "{error}");

    // The engine dies, then the supervisor. Expect: as before.
    let mut fault = one.portolan();
    process::run_ok(fault.args(["fault", "kill", "0"]), WITHIN).unwrap();
    assert_eq!(again(&mut sender), refused);
    let pid = first.pid();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let deadline = Instant::now() + WITHIN;
    while first.pid() == pid || first.pid() == 0 || one.report("status").is_err() {
        assert!(Instant::now() < deadline, "no successor");
        std::thread::yield_now();
    }
    assert_eq!(again(&mut sender), refused);
    let (code, said) = drain(one, &["--timeout", "0"]);
    assert_eq!(code, Some(1), "{said}");

    // Only root.
    let mut nobody = one.command("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    // Where nobody may go, whatever the path of the build is.
    let open = tempfile::tempdir().unwrap();
    std::fs::set_permissions(open.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let tool = open.path().join("portolan");
    std::fs::copy(Binaries::find().unwrap().cli().unwrap(), &tool).unwrap();
    nobody
        .arg(tool)
        .arg("--socket")
        .arg(one.socket())
        .args(["drain", "--undo"]);
    let denied = process::run(&mut nobody, WITHIN).unwrap();
    assert!(denied.stderr.contains("only root"), "{}", denied.stderr);

    // Buffers come. Expect: all three are delivered, once each, and it is safe to stop.
    for _ in 0..8 {
        let buffer = receiver.allocate(4096).unwrap();
        receiver
            .provide_receive_buffer(buffer, Priority::Low)
            .unwrap();
    }
    for _ in 0..3 {
        assert_eq!(ended(&mut sender), Status::Delivered);
    }
    let (code, said) = drain(one, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("safe to stop"), "{said}");
    let mut came = 0;
    while let Some(Event::Received(_)) = receiver
        .blocking_receive(Duration::from_millis(200))
        .unwrap()
    {
        came += 1;
    }
    assert_eq!(came, 3);

    // Taken back.
    let (code, said) = drain(one, &["--undo"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(again(&mut sender), Status::Delivered);
    drop(node.open_port(PortOptions::at(10)).unwrap());
}
