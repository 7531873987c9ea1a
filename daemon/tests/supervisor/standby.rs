//! Standbys, takeovers and new sockets, as a dialogue: the test plays the engines.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::harness::{Client, DEADLINE, FakeEngine, Node, Options, open};
use portolan_abi::control::{Request, Response};
use portolan_abi::port::CloseReason;
use portoland::engine_link::{FromEngine, ToEngine};
use portoland::supervisor::spawn::Urgency;

const QUIET: Duration = Duration::from_millis(50);

fn inode(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

fn status(client: &Client) -> serde_json::Value {
    match client.ask(&Request::Status {}).0 {
        Response::Document { document } => document["engines"][0].clone(),
        other => panic!("no status: {other:?}"),
    }
}

fn fault(kind: &str) -> Request {
    Request::Fault {
        engine: 0,
        kind: kind.into(),
    }
}

fn told_to_close(engine: &FakeEngine) -> (u16, CloseReason) {
    match engine.told().0 {
        ToEngine::ClosePort { port, reason, .. } => (port, reason),
        other => panic!("not ClosePort: {other:?}"),
    }
}

// One serves, one stands by. Expect: both hear of every change, only the one who serves is asked, and its death makes the other serve.
#[test]
fn a_standby_hears_everything_and_takes_over() {
    let (node, engine, standby) = Node::ready_twice(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    let (_, generation, fds) = standby.told_to_open();
    assert_eq!(engine.told_to_open().1, generation);
    assert_eq!(fds.len(), 4);
    // A standby's word opens nothing.
    let port = 7;
    standby.say(&FromEngine::PortOpened { port, generation });
    assert!(client.no_answer_yet());
    engine.say(&FromEngine::PortOpened { port, generation });
    assert!(matches!(
        client.answer().unwrap().0,
        Response::PortOpened { port: 7, .. }
    ));
    assert_eq!(status(&node.client())["standby"], "ready");
    assert!(node.no_engine_within(QUIET), "one standby is enough");

    engine.die();
    let engine = standby.take_over();
    let standby = node.next_engine().stand_by();
    let now = status(&node.client());
    assert_eq!(
        (&now["state"], &now["takeovers"]),
        (&"running".into(), &1.into())
    );
    let last = &now["last_recovery"];
    assert_eq!(
        (&last["cause"], &last["tier"]),
        (&"death".into(), &"adopt".into())
    );
    assert!(last["fenced_at_ns"].as_u64() > Some(1) && last["ready_at_ns"] == 1);

    // The next standby was told of the port as well; it forgets it when the engine has let go, and not before.
    client.send(&Request::ClosePort { port: 7 });
    let (port, reason) = told_to_close(&engine);
    assert!(standby.told_nothing());
    engine.say(&FromEngine::PortClosed {
        port,
        generation,
        reason,
    });
    assert_eq!(told_to_close(&standby), (port, reason));
}

// The engine closes a port for cause, which nobody told it to. Expect: its standby is told to forget it.
#[test]
fn what_an_engine_closed_by_itself_its_standby_forgets() {
    let (node, engine, standby) = Node::ready_twice(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    let (port, generation, _fds) = standby.told_to_open();
    engine.told_to_open();
    engine.say(&FromEngine::PortOpened { port, generation });
    client.answer().unwrap();
    let reason = CloseReason::RingJump;
    engine.say(&FromEngine::PortClosed {
        port,
        generation,
        reason,
    });
    assert_eq!(told_to_close(&standby), (7, reason));
    assert!(engine.told_nothing());
}

// A standby dies beside an engine that serves. Expect: another is prepared after a moment, and nothing else happens.
#[test]
fn a_standby_that_dies_is_replaced_without_hurry() {
    let (node, engine, standby) = Node::ready_twice(&Options::default());
    standby.die();
    assert_eq!(status(&node.client())["standby"], "none");
    let standby = node.next_engine().stand_by();
    assert!(engine.told_nothing() && !engine.was_killed());
    engine.die();
    standby.take_over();
}

// A standby takes its time to be ready: a busy machine, on which it may make itself idle long after it was started. Expect: it is told again and again to be
// ordinary, however often that was; when it stands by it is urgent, and nobody says otherwise any more.
#[test]
fn a_standby_is_told_to_be_ordinary_until_it_stands_by() {
    let (node, _engine, standby) = Node::ready_twice(&Options::default());
    standby.die();
    let standby = node.next_engine();
    // Other timers of the queue come after ten seconds.
    let deadline = Instant::now() + DEADLINE / 2;
    while standby.urgencies().len() < 5 {
        assert!(Instant::now() < deadline, "{:?}", standby.urgencies());
        std::thread::yield_now();
    }
    let standby = standby.stand_by();
    while standby.urgencies().last() != Some(&Urgency::Urgent) {
        assert!(Instant::now() < deadline, "{:?}", standby.urgencies());
        std::thread::yield_now();
    }
    std::thread::sleep(5 * QUIET);
    let (last, before) = standby
        .urgencies()
        .split_last()
        .map(|(l, b)| (*l, b.to_vec()))
        .unwrap();
    assert_eq!(last, Urgency::Urgent);
    assert!(before.iter().all(|u| *u == Urgency::Ordinary), "{before:?}");
}

// The engine dies while its port is being closed. Expect: the successor, which knows the port, is asked to close it, and then it is closed.
#[test]
fn a_port_is_closed_by_the_successor_too() {
    let (node, engine, standby) = Node::ready_twice(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    let (port, generation, _fds) = standby.told_to_open();
    engine.told_to_open();
    engine.say(&FromEngine::PortOpened { port, generation });
    client.answer().unwrap();
    client.send(&Request::ClosePort { port });
    told_to_close(&engine);
    engine.die();
    let engine = standby.take_over();
    let (port, reason) = told_to_close(&engine);
    assert!(client.no_answer_yet());
    engine.say(&FromEngine::PortClosed {
        port,
        generation,
        reason,
    });
    assert_eq!(client.answer().unwrap().0, Response::Done);
}

// `portolan fault reset`. Expect: both processes are killed, a socket is made over the same UMEM, and the next engine gets it.
#[test]
fn a_queue_is_given_another_socket() {
    let node = Node::start(&Options::default());
    let engine = node.next_engine();
    let before = engine.briefing();
    engine.say(&FromEngine::StandingBy);
    let engine = engine.take_over();
    let standby = node.next_engine().stand_by();
    let client = node.client();
    assert_eq!(client.ask(&fault("reset")).0, Response::Done);
    engine.wait_killed();
    standby.wait_killed();
    let umem = node.sockets.recv_timeout(DEADLINE).unwrap();
    assert_eq!(umem.map(|fd| inode(&fd)), Some(inode(&before[0].1[1])));
    let engine = node.next_engine();
    let after = engine.briefing();
    assert_eq!(
        inode(&before[0].1[0]),
        inode(&after[0].1[0]),
        "the ledger stays"
    );
    engine.say(&FromEngine::StandingBy);
    engine.take_over();
    let now = status(&client);
    let last = &now["last_recovery"];
    assert_eq!(
        (&last["cause"], &last["tier"]),
        (&"reset".into(), &"reset".into())
    );
}

// Engines that die at once. Expect: the process, then the socket, then the UMEM, too, is replaced; then waits, and a state that says so.
#[test]
fn early_deaths_lead_from_tier_to_tier() {
    let node = Node::start(&Options {
        more: "[recovery]\nstandby = false\nadoptions = 2\nresets = 2\nrebuilds = 1\n".into(),
        ..Options::default()
    });
    let none_made = || node.sockets.try_recv().is_err();
    for _ in 0..2 {
        node.next_engine().ready().die();
    }
    let engine = node.next_engine().ready();
    assert!(none_made());
    engine.die();
    for over_the_same in [true, true, false] {
        let engine = node.next_engine().ready();
        let umem = node.sockets.recv_timeout(DEADLINE).unwrap();
        assert_eq!(umem.is_some(), over_the_same);
        assert!(none_made());
        engine.die();
    }
    assert!(node.no_engine_within(Duration::from_millis(500)));
    let now = status(&node.client());
    assert_eq!(
        (&now["state"], &now["tier"]),
        (&"degraded".into(), &"rebuild".into())
    );
    // It is tried again.
    node.next_engine().ready();
}

// An engine says that its queue stands still, and its successor says so again. Expect: another socket, and no third one at once.
#[test]
fn a_queue_that_stands_still_gets_another_socket_but_not_for_ever() {
    let (node, engine) = Node::ready(&Options::default());
    let wedged = FromEngine::Wedged {
        evidence: "completions\nstopped".into(),
    };
    engine.say(&wedged);
    engine.wait_killed();
    assert!(node.sockets.recv_timeout(DEADLINE).unwrap().is_some());
    let engine = node.next_engine().ready();
    let now = status(&node.client());
    let last = &now["last_recovery"];
    assert_eq!(
        (&last["cause"], &last["tier"]),
        (&"wedged".into(), &"reset".into())
    );
    engine.say(&wedged);
    status(&node.client());
    assert!(!engine.was_killed() && node.sockets.try_recv().is_err());
}
