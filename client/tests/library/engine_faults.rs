//! What an application sees of an engine that was replaced, and of one that went wrong before.

use std::sync::atomic::Ordering;

use crate::support::{FakeDaemon, NODE, event, open, provide, received, sent, tagged};
use portolan::{Event, Node, PortOptions, Priority, Reason, Status};

// An engine takes over. Expect: visible only to an application that asked, and counted for all.
#[test]
fn recovered_faults_are_reported_on_request() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let options = PortOptions {
        report_faults: true,
        ..PortOptions::at(10)
    };
    let mut asks = node.open_port(options).unwrap();
    let mut other = open(&daemon, 11);
    for port in [10, 11] {
        daemon.with_port(port, |p| {
            p.engine
                .header()
                .faults_recovered
                .store(3, Ordering::Relaxed);
            p.ring();
        });
    }
    assert!(matches!(event(&mut asks), Event::FaultRecovered(3)));
    assert!(asks.receive().unwrap().is_none());
    assert!(other.receive().unwrap().is_none());
    assert_eq!(other.faults_recovered(), 3);
}

// An engine that went wrong before it died ended two of four sends and two of three buffers without a word, and a message came just before it
// died. Expect: the message is received, the two sends end as perhaps delivered, the two buffers are offered again, once, and what the
// next engine holds is left alone.
#[test]
fn tokens_that_died_with_an_engine_come_back() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let options = PortOptions {
        report_faults: true,
        ..PortOptions::at(10)
    };
    let mut port = node.open_port(options).unwrap();
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    provide(&mut port, 4, 4096, Priority::Low);
    let handles: Vec<_> = (0..4)
        .map(|tag| {
            port.send_bytes((NODE, 11), &[7; 1000], tagged(tag))
                .unwrap()
        })
        .collect();
    let (came, kept, lost) = daemon.with_port(10, |engine| {
        let (at, came) = engine.offered_buffer(4096);
        engine.client.write_arena(at, &[9]).unwrap();
        let offers = engine.offers();
        engine.push(&received(came, 1));
        engine.take_over(&[1, 3], &[offers[0].0]);
        (came.slot, offers[0], offers[1..].to_vec())
    });
    let Event::Received(message) = event(&mut port) else {
        panic!("slot {came} first");
    };
    assert_eq!(message[..], [9]);
    for tag in [0, 2] {
        let end = sent(&mut port);
        assert_eq!(end.status, Status::MaybeDelivered(Reason::Lost));
        assert_eq!((end.tag, end.handle), (tag, handles[tag as usize]));
    }
    assert!(matches!(event(&mut port), Event::FaultRecovered(1)));
    assert!(port.receive().unwrap().is_none());
    assert_eq!((port.sends_outstanding(), port.buffers_provided()), (2, 3));
    assert_eq!(port.anomalies(), 4);
    let held: Vec<u64> = daemon.with_port(10, |engine| {
        let offers = engine.offers();
        offers.iter().map(|(_, at)| *at).collect()
    });
    // The engine of this test remembers what its predecessor forgot, too.
    let before = [kept, lost[0], lost[1]].map(|(_, at)| at);
    let mut again = held[before.len()..].to_vec();
    again.sort_unstable();
    let mut wanted = before[1..].to_vec();
    wanted.sort_unstable();
    assert_eq!(again, wanted);
    // The next one has everything.
    daemon.with_port(10, |engine| {
        engine.take_over(&[1, 3], &(0..4).collect::<Vec<_>>());
    });
    assert!(matches!(event(&mut port), Event::FaultRecovered(2)));
    assert_eq!(port.anomalies(), 4);
}

// The inventory is another takeover's: of an engine that writes none, or one that is being written. Expect: nothing is taken for lost.
#[test]
fn an_inventory_of_another_takeover_says_nothing() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    provide(&mut port, 4, 4096, Priority::Low);
    port.send_bytes((NODE, 11), &[7], tagged(0)).unwrap();
    daemon.with_port(10, |engine| {
        engine.offers();
        engine.take_over(&[], &[]);
        let header = engine.engine.header();
        header.faults_recovered.store(2, Ordering::Release);
        engine.ring();
    });
    assert!(port.receive().unwrap().is_none());
    assert_eq!((port.sends_outstanding(), port.buffers_provided()), (1, 4));
    assert_eq!((port.faults_recovered(), port.anomalies()), (2, 0));
}

// A damaged engine's index runs ahead of what a ring can hold; the engine goes on from there. Expect: what was in between is lost and counted,
// what comes after is received.
#[test]
fn an_event_ring_that_jumped_is_followed() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    provide(&mut port, 1, 4096, Priority::Low);
    daemon.with_port(10, |engine| engine.jump(1 << 20));
    assert!(port.receive().unwrap().is_none());
    assert_eq!(port.anomalies(), 1);
    daemon.with_port(10, |engine| {
        let (_, slot) = engine.offered_buffer(4096);
        engine.push(&received(slot, 0));
    });
    assert!(matches!(event(&mut port), Event::Received(_)));
    assert_eq!(port.anomalies(), 1);
}
