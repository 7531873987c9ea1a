//! The command against a daemon and an engine in one file (the library's own test support): one node, no network, no root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../client/tests/library/support/mod.rs"]
mod support;

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use portolan::service::{Answers, EchoServer, Kind, Tag};
use portolan::{Event, Node, PortOptions, SendOptions};
use serde_json::Value;
use support::{FakeDaemon, LONG, NODE};

fn portolan(daemon: &FakeDaemon, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portolan"));
    command
        .arg("--socket")
        .arg(&daemon.path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Waits for a child, but not for ever.
fn finish(mut child: Child) -> Output {
    let deadline = Instant::now() + LONG * 6;
    // Its pipes are read meanwhile by `wait_with_output`; a child that hangs is killed from here.
    let pid = rustix::process::Pid::from_child(&child);
    drop(child.stdin.take());
    let (done, waits) = std::sync::mpsc::channel::<()>();
    let killer = std::thread::spawn(move || {
        let left = deadline.saturating_duration_since(Instant::now());
        if waits.recv_timeout(left) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    killer.join().unwrap();
    output
}

fn run(daemon: &FakeDaemon, arguments: &[&str]) -> Output {
    finish(portolan(daemon, arguments).spawn().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Serves port 0 until told to stop; `damage` is done to each answer.
fn with_service(daemon: &FakeDaemon, work: impl FnOnce()) {
    let node = Node::attach(&daemon.path).unwrap();
    let mut port = node.open_port(EchoServer::port_options(0)).unwrap();
    EchoServer::provide_buffers(&mut port).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut server = EchoServer::new(Answers::Service, LONG);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                server.serve(&mut port, Duration::from_millis(20)).unwrap();
            }
        });
        // Also when a check in `work` fails, or the scope would wait for ever.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

// No daemon. Expect: one line that says what to do, status 1; a wrong command line is status 2.
#[test]
fn no_daemon() {
    let output = Command::new(env!("CARGO_BIN_EXE_portolan"))
        .args(["--socket", "/nonexistent/socket", "status"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let words = text(&output.stderr);
    assert!(
        words.contains("start portoland") && words.lines().count() == 1,
        "{words}"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_portolan"))
        .env("PORTOLAN_SOCKET", "/nonexistent/other")
        .arg("peers")
        .output()
        .unwrap();
    assert!(text(&output.stderr).contains("/nonexistent/other"));
    let output = Command::new(env!("CARGO_BIN_EXE_portolan"))
        .args(["ping", "2:999"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}

// The service answers. Expect: every ping answered, figures in both formats; every size there and back with every byte checked.
#[test]
fn ping_and_allsize() {
    let daemon = FakeDaemon::start();
    with_service(&daemon, || {
        let output = run(&daemon, &["ping", "fake", "-c", "50", "-i", "0", "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&report["answered"], &report["lost"]),
            (&50.into(), &0.into())
        );
        let (rtt, one_way) = (&report["rtt_ns"]["p50"], &report["one_way_ns"]["p50"]);
        let half = rtt.as_u64().unwrap() / 2;
        assert!(half > 0 && one_way.as_u64().unwrap().abs_diff(half) <= 1);
        let output = run(
            &daemon,
            &["ping", "1", "-c", "2", "-i", "0.1", "-s", "4096"],
        );
        assert!(text(&output.stdout).contains("2 answered, 0 lost"));

        let output = run(
            &daemon,
            &[
                "allsize", "1", "--verify", "--min", "0", "--max", "1M", "--json",
            ],
        );
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&report["ok"], &report["verify"]),
            (&true.into(), &true.into())
        );
        let sizes = report["sizes"].as_array().unwrap();
        assert_eq!(
            (&sizes[0]["bytes"], &sizes[1]["bytes"]),
            (&0.into(), &1.into())
        );
        assert_eq!(sizes.last().unwrap()["bytes"], 1 << 20);
        let output = run(&daemon, &["allsize", "1", "--min", "1000", "--max", "1000"]);
        assert!(text(&output.stdout).contains("1 sizes to 1:0 and back\n"));
    });
}

// Nobody answers; the wrong one does. Expect: definite words and status 1.
#[test]
fn failures_are_definite() {
    let daemon = FakeDaemon::start();
    let output = run(&daemon, &["ping", "1:99", "-c", "1", "-i", "1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("lost: not delivered: the receiving port is not open"));
    let output = run(&daemon, &["ping", "other"]);
    let words = text(&output.stdout);
    assert!(
        words.contains("5 sent to 2:0, 0 answered, 5 lost"),
        "{words}{}",
        text(&output.stderr)
    );
    assert!(words.contains("no route to it"));
    let output = run(&daemon, &["ping", "nobody"]);
    assert!(text(&output.stderr).contains("no node is called that"));
    let output = run(&daemon, &["allsize", "1:99", "--max", "10"]);
    assert_eq!(output.status.code(), Some(1));
    let words = text(&output.stderr);
    assert!(
        words.contains("at 1 bytes") && words.contains("not open"),
        "{words}"
    );
    // A daemon that does not know the question.
    let output = run(&daemon, &["events"]);
    assert_eq!(output.status.code(), Some(1));
    let words = text(&output.stderr);
    assert!(words.contains("older than `portolan events`"), "{words}");
    let output = run(&daemon, &["fault", "kill", "0"]);
    assert!(text(&output.stderr).contains("cannot kill engine 0: only root may do that"));
}

// An echo that damages one byte of one size. Expect: allsize --verify names the byte and fails; without --verify nobody notices.
#[test]
fn allsize_verifies() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let mut port = node.open_port(EchoServer::port_options(50)).unwrap();
    EchoServer::provide_buffers(&mut port).unwrap();
    let child = portolan(
        &daemon,
        &["allsize", "1:50", "--verify", "--max", "70", "-c", "1"],
    )
    .spawn()
    .unwrap();
    let finished = std::thread::spawn(move || finish(child));
    let deadline = Instant::now() + LONG;
    while !finished.is_finished() {
        assert!(Instant::now() < deadline);
        let event = port.blocking_receive(Duration::from_millis(10)).unwrap();
        let Some(Event::Received(mut message)) = event else {
            continue;
        };
        if message.len() == 64 {
            message[63] ^= 1;
        }
        let tag = Tag {
            kind: Kind::AllsizeReply,
            id: Tag::decode(message.tag()).unwrap().id,
        };
        let options = SendOptions {
            tag: tag.encode(),
            ..SendOptions::default()
        };
        port.send_bytes(message.from(), &message, options).unwrap();
        port.unknown(Event::Received(message));
    }
    let output = finished.join().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let words = text(&output.stderr);
    assert!(
        words.contains("at 64 bytes: byte 63 of 64 came back as"),
        "{words}"
    );
}

/// Something no transfer damages unnoticed.
fn content(len: usize) -> Vec<u8> {
    let mut x = 0x9e37_79b9_u32;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x as u8
        })
        .collect()
}

// A file through pipes; the receiver starts later than the sender. Expect: the same bytes out, both succeed; also nothing at all.
#[test]
fn send_and_recv() {
    let daemon = FakeDaemon::start();
    for len in [0, 1, 1 << 20, (40 << 20) + 12345] {
        let bytes = content(len);
        let mut sender = portolan(&daemon, &["send", "1"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = sender.stdin.take().unwrap();
        let copy = bytes.clone();
        let feeder = std::thread::spawn(move || {
            input.write_all(&copy).unwrap();
        });
        let receiver = portolan(&daemon, &["recv"]).spawn().unwrap();
        let received = finish(receiver);
        let sent = finish(sender);
        feeder.join().unwrap();
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        assert!(received.status.success(), "{}", text(&received.stderr));
        assert!(
            received.stdout == bytes,
            "{} of {len}",
            received.stdout.len()
        );
        assert!(text(&sent.stderr).contains(&format!("sent {len} bytes")));
    }
}

// Nobody receives; the receiver's output closes in the middle. Expect: the sender fails with the reason.
#[test]
fn send_fails_definitely() {
    let daemon = FakeDaemon::start();
    let output = run(&daemon, &["send", "1:9", "--wait-for-receiver", "0.1"]);
    assert_eq!(output.status.code(), Some(1));
    let words = text(&output.stderr);
    assert!(
        words.contains("start `portolan recv 9` on node 1 first"),
        "{words}"
    );

    let mut receiver = portolan(&daemon, &["recv", "9"]).spawn().unwrap();
    drop(receiver.stdout.take());
    let mut sender = portolan(&daemon, &["send", "1:9"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = sender.stdin.take().unwrap();
    let feeder = std::thread::spawn(move || {
        // Ends when the sender does.
        while input.write_all(&[7; 65536]).is_ok() {}
    });
    let sent = finish(sender);
    feeder.join().unwrap();
    assert_eq!(sent.status.code(), Some(1));
    let words = text(&sent.stderr);
    assert!(words.contains("the receiving port is not open"), "{words}");
    assert_eq!(finish(receiver).status.code(), Some(1));
}

// A sender that promises more than it sends; one that falls silent. Expect: what came is written, and the receiver fails.
#[test]
fn truncation_is_noticed() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let mut port = node.open_port(PortOptions::default()).unwrap();
    for end in [true, false] {
        let receiver = portolan(&daemon, &["recv", "12", "--timeout", "0.5"])
            .spawn()
            .unwrap();
        let mut say = |kind, bytes: &[u8]| {
            let deadline = Instant::now() + LONG;
            loop {
                let options = SendOptions {
                    tag: Tag { kind, id: 4 }.encode(),
                    ..SendOptions::default()
                };
                let handle = port.send_bytes((NODE, 12), bytes, options).unwrap();
                let sent = port.wait_for(handle, LONG).unwrap().unwrap();
                if sent.status.is_delivered() {
                    break;
                }
                assert!(Instant::now() < deadline);
                port.drop_sends((NODE, 12), sent.priority).unwrap();
            }
        };
        say(Kind::Begin, b"");
        say(Kind::Data, b"0123456789");
        if end {
            say(Kind::End, &11u64.to_le_bytes());
        }
        let output = finish(receiver);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(output.stdout, b"0123456789");
        assert!(
            text(&output.stderr).contains("truncated"),
            "{}",
            text(&output.stderr)
        );
    }
}
