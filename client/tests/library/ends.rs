//! Events that tell of the ends of several sends.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::{DELIVERED, FakeDaemon, LONG, NODE, not_delivered, open, sent, tagged};
use portolan::{CloseReason, Event, Port, PortError, Reason, Status};
use portolan_abi::event::Outcome;
use portolan_abi::port::{READS_ENDS, state};
use portolan_abi::token::TokenRef;

/// A port with so many sends under way, in slots from 0 on and each with its slot as tag, whose engine does nothing by itself.
fn with_sends(daemon: &FakeDaemon, count: u64) -> Port {
    let mut port = open(daemon, 10);
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    for tag in 0..count {
        port.send_bytes((NODE, 11), b"x", tagged(tag)).unwrap();
    }
    port
}

/// The engine tells of these slots' first use at once.
fn end(daemon: &FakeDaemon, slots: &[u32], outcome: Outcome) {
    let token = |&slot: &u32| TokenRef {
        slot,
        generation: 1,
    };
    let tokens: Vec<_> = slots.iter().map(token).collect();
    daemon.with_port(10, |engine| engine.end(&tokens, outcome));
}

fn tags(port: &mut Port, status: Status) -> Vec<u64> {
    let ended = std::iter::from_fn(|| match port.receive().unwrap()? {
        Event::Sent(sent) => Some(sent),
        other => panic!("{other:?}"),
    });
    ended
        .inspect(|sent| assert_eq!(sent.status, status))
        .map(|sent| sent.tag)
        .collect()
}

// Events of one, of all there is room for and of some sends, of which one names a slot that is not in use and one an end that was told before.
// Expect: one event of the application for each end, in that order, with the outcome told; the others counted.
#[test]
fn each_end_is_an_event() {
    let daemon = FakeDaemon::start();
    let mut port = with_sends(&daemon, 14);
    let reads = daemon.with_port(10, |p| p.client.header().reads.load(Ordering::Relaxed));
    assert_eq!(reads, READS_ENDS);
    end(&daemon, &[3], DELIVERED);
    end(&daemon, &[9, 0, 1, 2, 4, 5, 6], DELIVERED);
    assert_eq!(tags(&mut port, Status::Delivered), [3, 9, 0, 1, 2, 4, 5, 6]);
    assert_eq!((port.sends_outstanding(), port.anomalies()), (6, 0));
    end(&daemon, &[50, 7, 3, 8], not_delivered(3));
    let late = Status::NotDelivered(Reason::Deadline);
    assert_eq!(tags(&mut port, late), [7, 8]);
    assert_eq!((port.sends_outstanding(), port.anomalies()), (4, 2));
}

// The first end was received and the others were not. Expect: there is something to wait for no longer, also for who is about to sleep, and for who
// waits for one of them; what came meanwhile is kept.
#[test]
fn the_rest_is_no_reason_to_wait() {
    let daemon = FakeDaemon::start();
    let mut port = with_sends(&daemon, 3);
    let last = port.send_bytes((NODE, 11), b"x", tagged(3)).unwrap();
    end(&daemon, &[0, 1, 2, 3], DELIVERED);
    let began = Instant::now();
    assert_eq!(sent(&mut port).tag, 0);
    assert!(port.wait(LONG).unwrap());
    assert!(!port.prepare_wait().unwrap());
    let ended = port.wait_for(last, LONG).unwrap().unwrap();
    assert_eq!((ended.tag, ended.status), (3, Status::Delivered));
    assert!(began.elapsed() < LONG / 2);
    assert_eq!(tags(&mut port, Status::Delivered), [1, 2]);
    assert!(port.blocking_receive(Duration::ZERO).unwrap().is_none());
    assert!(port.prepare_wait().unwrap());
}

// The next engine holds none of the sends, of which all but one were told of. Expect: that one is lost, the others ended as they were told.
#[test]
fn what_was_told_of_is_not_lost_with_its_engine() {
    let daemon = FakeDaemon::start();
    let mut port = with_sends(&daemon, 4);
    end(&daemon, &[0, 1, 3], DELIVERED);
    assert_eq!(sent(&mut port).tag, 0);
    daemon.with_port(10, |engine| {
        engine.offers();
        engine.take_over(&[], &[]);
    });
    for (tag, status) in [
        (1, Status::Delivered),
        (3, Status::Delivered),
        (2, Status::MaybeDelivered(Reason::Lost)),
    ] {
        let end = sent(&mut port);
        assert_eq!((end.tag, end.status), (tag, status));
    }
    assert!(port.receive().unwrap().is_none());
    assert_eq!((port.sends_outstanding(), port.anomalies()), (0, 1));
}

// The port is closed after the engine told of two of three sends. Expect: both as told, then the third as perhaps delivered, then the reason.
#[test]
fn what_was_told_of_before_the_port_closed_counts() {
    let daemon = FakeDaemon::start();
    let mut port = with_sends(&daemon, 3);
    end(&daemon, &[0, 2], DELIVERED);
    assert_eq!(sent(&mut port).tag, 0);
    daemon.with_port(10, |engine| {
        engine.set_state(state::CLOSED, Some(CloseReason::BadToken));
    });
    for (tag, status) in [
        (2, Status::Delivered),
        (1, Status::MaybeDelivered(Reason::OwnPortClosed)),
    ] {
        let end = sent(&mut port);
        assert_eq!((end.tag, end.status), (tag, status));
    }
    let closed = PortError::Closed(CloseReason::BadToken);
    assert_eq!(port.receive().unwrap_err(), closed);
}
