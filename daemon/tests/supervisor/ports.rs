//! The life of ports and engines, as a dialogue: the test plays the engines and the applications.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::harness::{DEADLINE, FakeEngine, Node, Options, open};
use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::port::{CloseReason, state};
use portoland::engine_link::{FromEngine, ToEngine};

fn inode(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

/// The next `ClosePort`.
fn told_to_close(engine: &FakeEngine) -> (u16, u32, CloseReason) {
    match engine.told().0 {
        ToEngine::ClosePort {
            port,
            generation,
            reason,
        } => (port, generation, reason),
        other => panic!("not ClosePort: {other:?}"),
    }
}

#[test]
fn an_engine_is_briefed_before_it_runs() {
    let node = Node::start(&Options {
        queues: 2,
        more: "[[peer]]\nid = 2\nname = \"two\"\naddress = \"10.0.0.2\"\nmac = \"02:00:00:00:00:02\"\n".into(),
        ..Options::default()
    });
    for queue in 0..2 {
        let engine = node.next_engine();
        assert_eq!(engine.queue, queue);
        let briefing = engine.briefing();
        let (ToEngine::Start(config), fds) = &briefing[0] else {
            panic!("{briefing:?}");
        };
        assert_eq!((config.queue, config.queues, config.node), (queue, 2, 1));
        // Ledger, UMEM, XSK; two wake eventfds; a crossing ring each way.
        assert_eq!(fds.len(), 3 + 2 + 2);
        let routes: Vec<u16> = briefing
            .iter()
            .filter_map(|(told, _)| match told {
                ToEngine::Route(route) => Some(route.node),
                _ => None,
            })
            .collect();
        assert_eq!(routes, [1, 2]);
        assert_eq!(briefing.last().unwrap().0, ToEngine::StandBy);
    }
}

#[test]
fn a_port_opens_when_its_engine_has_it_and_is_journalled_on_the_way() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    // The engine is told first; the client waits.
    let (port, generation, engine_fds) = engine.told_to_open();
    assert_eq!((port, generation, engine_fds.len()), (7, 1, 4));
    assert_eq!(node.life(0, 7), (1, state::OPENING));
    assert!(client.no_answer_yet());
    // Another's answer, and one for another generation, mean nothing.
    engine.say(&FromEngine::PortOpened {
        port: 8,
        generation: 1,
    });
    engine.say(&FromEngine::PortOpened {
        port: 7,
        generation: 2,
    });
    engine.say(&FromEngine::PortOpened {
        port: 60_000,
        generation: 1,
    });
    assert!(client.no_answer_yet());
    engine.say(&FromEngine::PortOpened { port, generation });
    let (response, fds) = client.answer().unwrap();
    assert!(matches!(
        response,
        Response::PortOpened {
            port: 7,
            node: 1,
            ..
        }
    ));
    assert_eq!(node.life(0, 7), (1, state::OPEN));
    // The same memory, but the engine half read-only; the event doorbell's other end.
    let same: Vec<bool> = fds
        .iter()
        .zip(&engine_fds)
        .map(|(a, b)| inode(a) == inode(b))
        .collect();
    assert_eq!(same, [true, true, false, true]);
    rustix::io::write(&engine_fds[2], &[1]).unwrap();
    let mut ring = [0; 8];
    assert!(rustix::io::read(&fds[2], &mut ring).unwrap() > 0);
    let mode = |fd: &OwnedFd| rustix::fs::fcntl_getfl(fd).unwrap() & rustix::fs::OFlags::RWMODE;
    assert_eq!(mode(&fds[0]), rustix::fs::OFlags::RDWR);
    assert_eq!(mode(&fds[1]), rustix::fs::OFlags::RDONLY);
    assert_eq!(mode(&engine_fds[1]), rustix::fs::OFlags::RDWR);
    // Taken.
    assert_eq!(node.client().refused(&open(Some(7))), ErrorCode::PortInUse);
}

#[test]
fn a_number_is_free_again_only_when_the_engine_has_let_go() {
    let (node, engine) = Node::ready(&Options::default());
    let first = node.client();
    first.open(&engine, 7);
    first.send(&Request::ClosePort { port: 7 });
    assert_eq!(told_to_close(&engine), (7, 1, CloseReason::ByOwner));
    assert_eq!(node.life(0, 7), (1, state::CLOSING));
    // Somebody else wants it: waits.
    let second = node.client();
    second.send(&open(Some(7)));
    assert!(second.no_answer_yet() && first.no_answer_yet() && engine.told_nothing());
    engine.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1,
        reason: CloseReason::ByOwner,
    });
    assert_eq!(first.answer().unwrap().0, Response::Done);
    // Now it is the other's, in the next generation.
    let (port, generation, _fds) = engine.told_to_open();
    assert_eq!((port, generation), (7, 2));
    engine.say(&FromEngine::PortOpened { port, generation });
    assert!(matches!(
        second.answer().unwrap().0,
        Response::PortOpened { port: 7, .. }
    ));
    // The first one's no more.
    assert_eq!(
        first.refused(&Request::ClosePort { port: 7 }),
        ErrorCode::NotFound
    );
}

#[test]
fn a_dead_applications_ports_close_in_milliseconds() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.open(&engine, 7);
    client.open(&engine, 9);
    let died = Instant::now();
    drop(client);
    assert_eq!(told_to_close(&engine), (7, 1, CloseReason::OwnerGone));
    assert_eq!(told_to_close(&engine), (9, 1, CloseReason::OwnerGone));
    assert!(died.elapsed() < Duration::from_millis(100));
    engine.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1,
        reason: CloseReason::OwnerGone,
    });
    // The next one gets it.
    node.client().open(&engine, 7);
}

#[test]
fn open_ports_survive_their_engine() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    let fds = client.open(&engine, 7);
    engine.die();
    let successor = node.next_engine();
    let briefing = successor.briefing();
    let (restored, engine_fds) = &briefing[briefing.len() - 2];
    assert!(
        matches!(
            restored,
            ToEngine::OpenPort {
                port: 7,
                generation: 1,
                ..
            }
        ),
        "{restored:?}"
    );
    assert_eq!(inode(&engine_fds[0]), inode(&fds[0]));
    successor.say(&FromEngine::StandingBy);
    let successor = successor.take_over();
    successor.say(&FromEngine::PortOpened {
        port: 7,
        generation: 1,
    });
    // The application hears nothing of it, and closes its port as ever.
    client.send(&Request::ClosePort { port: 7 });
    assert_eq!(told_to_close(&successor), (7, 1, CloseReason::ByOwner));
    successor.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1,
        reason: CloseReason::ByOwner,
    });
    assert_eq!(client.answer().unwrap().0, Response::Done);
}

#[test]
fn a_port_being_opened_is_opened_by_the_next_engine() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    engine.told_to_open();
    engine.die();
    // Whether it is new, the ledger says.
    let successor = node.next_engine();
    let briefing = successor.briefing();
    let (told, _fds) = &briefing[briefing.len() - 2];
    let &ToEngine::OpenPort {
        port, generation, ..
    } = told
    else {
        panic!("{told:?}");
    };
    assert_eq!((port, generation), (7, 1));
    successor.say(&FromEngine::StandingBy);
    let successor = successor.take_over();
    successor.say(&FromEngine::PortOpened { port, generation });
    assert!(matches!(
        client.answer().unwrap().0,
        Response::PortOpened { port: 7, .. }
    ));
}

#[test]
fn what_an_engine_said_before_it_died_still_counts() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    let (port, generation, ..) = engine.told_to_open();
    engine.say(&FromEngine::PortOpened { port, generation });
    engine.exit_only();
    assert!(matches!(
        client.answer().unwrap().0,
        Response::PortOpened { port: 7, .. }
    ));
    let briefing = node.next_engine().briefing();
    let opened = |told: &ToEngine| matches!(told, ToEngine::OpenPort { port: 7, .. });
    assert!(briefing.iter().any(|(told, _)| opened(told)));
}

// An engine dies while it closes a port. It may have published a commit that its ledger does not know of yet. Expect: its successor is
// told of the port, so that it brings the ledger up to it, and to close it; only then it is closed.
#[test]
fn a_port_being_closed_is_closed_by_its_engines_successor() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.open(&engine, 7);
    client.send(&Request::ClosePort { port: 7 });
    told_to_close(&engine);
    engine.die();
    let successor = node.next_engine();
    let briefing = successor.briefing();
    let knows = |told: &ToEngine| matches!(told, ToEngine::OpenPort { port: 7, .. });
    assert!(briefing.iter().any(|(told, _)| knows(told)), "{briefing:?}");
    assert_eq!(node.life(0, 7), (1, state::CLOSING));
    successor.say(&FromEngine::StandingBy);
    let successor = successor.take_over();
    let (port, generation, reason) = told_to_close(&successor);
    assert_eq!((port, generation), (7, 1));
    successor.say(&FromEngine::PortClosed {
        port,
        generation,
        reason,
    });
    assert_eq!(client.answer().unwrap().0, Response::Done);
    assert_eq!(node.life(0, 7), (1, state::CLOSED));
}

#[test]
fn an_engine_that_does_not_answer_holds_nobody_up() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    let asked = Instant::now();
    assert_eq!(client.refused(&open(Some(7))), ErrorCode::Unavailable);
    assert!(asked.elapsed() < Duration::from_secs(3));
    // The port is not lost for ever, nor free before the engine has answered.
    engine.told_to_open();
    assert_eq!(told_to_close(&engine), (7, 1, CloseReason::Administrator));
    assert_eq!(node.life(0, 7), (1, state::CLOSING));
    // An answer that is late opens nothing.
    engine.say(&FromEngine::PortOpened {
        port: 7,
        generation: 1,
    });
    engine.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1,
        reason: CloseReason::Administrator,
    });
    client.open(&engine, 7);
}

#[test]
fn a_port_closed_for_cause_is_gone() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.open(&engine, 7);
    let second = node.client();
    let closed = Instant::now();
    engine.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1,
        reason: CloseReason::RingJump,
    });
    // Free again, with new memory; but who broke a port waits a moment before the same user gets another.
    second.open(&engine, 7);
    assert!(closed.elapsed() >= Duration::from_millis(1));
    assert_eq!(
        client.refused(&Request::ClosePort { port: 7 }),
        ErrorCode::NotFound
    );
    // The end of the first owner is not the second one's.
    drop(client);
    assert!(engine.told_nothing());
}

#[test]
fn ports_belong_to_queues_and_an_engine_speaks_for_its_own() {
    let node = Node::start(&Options {
        queues: 2,
        more: "[recovery]\nstandby = false\n".into(),
        ..Options::default()
    });
    let zero = node.next_engine().ready();
    let one = node.next_engine().ready();
    let client = node.client();
    client.send(&open(Some(7)));
    let (port, generation, ..) = one.told_to_open();
    // Port 7 is not engine 0's to open, or to close.
    zero.say(&FromEngine::PortOpened { port, generation });
    zero.say(&FromEngine::PortClosed {
        port,
        generation,
        reason: CloseReason::Poison,
    });
    assert!(client.no_answer_yet());
    one.say(&FromEngine::PortOpened { port, generation });
    assert!(matches!(
        client.answer().unwrap().0,
        Response::PortOpened { port: 7, .. }
    ));
    client.open(&zero, 8);
    // Only the dead one's ports are restored.
    one.die();
    let restored: Vec<u16> = node
        .next_engine()
        .briefing()
        .iter()
        .filter_map(|(told, _)| match told {
            ToEngine::OpenPort { port, .. } => Some(*port),
            _ => None,
        })
        .collect();
    assert_eq!(restored, [7]);
    assert!(zero.told_nothing());
}

#[test]
fn an_engine_that_talks_nonsense_is_replaced() {
    let (node, engine) = Node::ready(&Options::default());
    engine.say_bytes(b"{\"from_engine\":\"nothing\"}");
    engine.wait_killed();
    let engine = node.next_engine().ready();
    engine.say_bytes(&vec![b' '; 80 * 1024]);
    engine.wait_killed();
    node.next_engine().ready();
}

#[test]
fn an_engine_without_a_link_is_replaced() {
    let (node, mut engine) = Node::ready(&Options::default());
    engine.hang_up();
    engine.wait_killed();
    node.next_engine().ready();
}

#[test]
fn an_engine_that_keeps_dying_is_slowed_down_and_says_so() {
    let node = Node::start(&Options::default());
    for _ in 0..11 {
        node.next_engine().die();
    }
    // Not at once any more.
    assert!(node.no_engine_within(Duration::from_millis(500)));
    let client = node.client();
    let asked = Instant::now();
    assert_eq!(client.refused(&open(Some(7))), ErrorCode::Unavailable);
    assert!(asked.elapsed() < Duration::from_secs(1));
    let Response::Document { document } = client.ask(&Request::Status {}).0 else {
        panic!("no status");
    };
    assert_eq!(document["engines"][0]["state"], "degraded");
    assert_eq!(document["engines"][0]["restarts"], 11);
    // But it is tried again.
    let engine = node.next_engine().ready();
    client.open(&engine, 7);
}

#[test]
fn root_can_kill_and_hang_an_engine() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    let fault = |engine: u16, kind: &str| Request::Fault {
        engine,
        kind: kind.into(),
    };
    assert_eq!(client.ask(&fault(0, "hang")).0, Response::Done);
    assert_eq!(engine.told().0, ToEngine::Hang);
    assert_eq!(client.refused(&fault(1, "kill")), ErrorCode::NotFound);
    assert_eq!(client.refused(&fault(0, "tickle")), ErrorCode::BadRequest);
    assert_eq!(
        node.client_as(1000, 1000).refused(&fault(0, "kill")),
        ErrorCode::Denied
    );
    assert!(!engine.was_killed());
    assert_eq!(client.ask(&fault(0, "kill")).0, Response::Done);
    engine.wait_killed();
    node.next_engine().ready();
}

#[test]
fn stopping_closes_ports_and_lets_engines_leave() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.open(&engine, 7);
    node.ask_to_stop();
    assert_eq!(told_to_close(&engine), (7, 1, CloseReason::Administrator));
    assert_eq!(engine.told().0, ToEngine::Stop);
    engine.die();
    node.join();
    // The connection ends with the supervisor.
    assert!(client.answer().is_none());
}

#[test]
fn an_engine_that_does_not_leave_is_killed() {
    let (node, engine) = Node::ready(&Options::default());
    let asked = Instant::now();
    node.ask_to_stop();
    engine.wait_killed();
    assert!(asked.elapsed() < DEADLINE);
    node.join();
}
