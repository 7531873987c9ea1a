//! Attaching and opening: what the daemon may answer, and what the library makes of it.

use std::time::Instant;

use crate::support::{FakeDaemon, Lie, SECOND};
use portolan::{ErrorCode, Node, NodeError, NodeId, PortOptions, Report};

// Nobody is there. Expect: an error that names the path and says what to do.
#[test]
fn no_daemon() {
    let error = Node::attach("/nonexistent/portolan.sock").err().unwrap();
    assert!(matches!(error, NodeError::NoDaemon { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("/nonexistent/portolan.sock") && text.contains("start portoland"));
}

// Requests of each kind. Expect: their answers, long ones joined from several packets, refusals with code and words.
#[test]
fn requests_are_answered() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    assert_eq!((node.id(), node.name()), (NodeId(1), "fake"));
    assert_eq!(node.resolve("other").unwrap(), NodeId(2));
    let document = node.report(Report::Status).unwrap();
    assert_eq!(document["padding"].as_str().unwrap().len(), 100_000);
    let refused = node.inject_fault(0, "kill").err().unwrap();
    assert!(
        matches!(&refused, NodeError::Refused { code: ErrorCode::Denied, message } if message.contains("root"))
    );
    // The connection survives a refusal.
    assert_eq!(node.resolve("2").unwrap(), NodeId(2));
}

// The daemon restarts between two requests. Expect: the second request connects anew.
#[test]
fn requests_reconnect() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    daemon.die();
    assert_eq!(node.resolve("2").unwrap(), NodeId(2));
}

// Answers that make no sense, one after another. Expect: a definite error each time, soon, and no port.
#[test]
fn wrong_answers_are_refused() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let lies = [
        (Lie::Version, "version"),
        (Lie::Magic, "version"),
        (Lie::Port, "another port"),
        (Lie::Size, "bytes"),
        (Lie::Unsealed, "sealed"),
        (Lie::Descriptors, "3 descriptors"),
        (Lie::NoJson, "makes no sense"),
        (Lie::TooLong, "too long"),
        (Lie::HangUp, "closed the connection"),
        (Lie::Endless, "closed the connection"),
    ];
    for (lie, words) in lies {
        daemon.lie(lie);
        let start = Instant::now();
        let error = node.open_port(PortOptions::default()).err().unwrap();
        assert!(error.to_string().contains(words), "{lie:?}: {error}");
        assert!(start.elapsed() < SECOND * 5, "{lie:?}");
    }
    daemon.lie(Lie::None);
    node.open_port(PortOptions::default()).unwrap();
}

// The daemon takes the request and says nothing. Expect: an error after the deadline, not a wait for ever.
#[test]
fn silence_ends() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    daemon.lie(Lie::Silence);
    let start = Instant::now();
    let error = node.resolve("2").err().unwrap();
    assert!(matches!(error, NodeError::Timeout { .. }), "{error:?}");
    assert!(start.elapsed() < SECOND * 20);
}

// Options out of limits, a port taken. Expect: refused with the number that is wrong; free again after close.
#[test]
fn options_and_ports_in_use() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let with = |f: fn(&mut PortOptions)| {
        let mut options = PortOptions::at(5);
        f(&mut options);
        node.open_port(options)
    };
    for bad in [
        with(|o| o.send_tokens = 0),
        with(|o| o.send_tokens = 512),
        with(|o| o.receive_tokens = 0),
        with(|o| o.receive_tokens = 1025),
        with(|o| o.arena_bytes = 0),
        with(|o| o.arena_bytes = u64::MAX),
    ] {
        assert!(matches!(bad, Err(NodeError::BadOptions(_))));
    }
    let port = with(|o| {
        o.send_tokens = 511;
        o.receive_tokens = 1000;
        o.arena_bytes = 1;
    })
    .unwrap();
    assert_eq!(port.send_tokens(), 511);
    assert_eq!(port.receive_tokens(), 1024);
    assert!(matches!(
        node.open_port(PortOptions::at(5)),
        Err(NodeError::Refused {
            code: ErrorCode::PortInUse,
            ..
        })
    ));
    port.close(SECOND).unwrap();
    node.open_port(PortOptions::at(5)).unwrap();
}
