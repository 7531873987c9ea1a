//! Who captures which engine's frames: the test plays engines, the one who captures, and those who may not.

use std::os::fd::{AsFd, OwnedFd};

use crate::harness::{Client, FakeEngine, Node, Options};
use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::memory::Mapping;
use portolan_abi::tap::{MARK_BYTES, Passing, TapGeometry, TapReader, TapWriter, Way};
use portoland::engine_link::ToEngine;

fn capture(engine: u16) -> Request {
    Request::Capture {
        engine,
        snaplen: 96,
        peer: Some(2),
        buffer_bytes: 1 << 20,
    }
}

fn captures(client: &Client) -> (TapGeometry, [OwnedFd; 2]) {
    match client.ask(&capture(0)) {
        (Response::Capturing { geometry }, fds) => (geometry, fds.try_into().unwrap()),
        other => panic!("no capture: {other:?}"),
    }
}

fn told_to_tap(engine: &FakeEngine) -> (u64, TapGeometry, Vec<OwnedFd>) {
    match engine.told() {
        (
            ToEngine::Tap {
                id,
                geometry,
                peer: Some(2),
            },
            fds,
        ) => (id, geometry, fds),
        other => panic!("not Tap: {other:?}"),
    }
}

// Root captures. Expect: both processes of the queue get the ring, a third is briefed of it, frames go from one to the other end, the
// reader cannot write the ring, and the end of the connection is the end of the capture.
#[test]
fn a_ring_goes_to_the_engine_its_standby_and_who_asked() {
    let (node, engine, standby) = Node::ready_twice(&Options::default());
    let client = node.client();
    let (geometry, [ring, mark]) = captures(&client);
    assert!(geometry.is_valid() && geometry.snaplen == 96);
    let (id, told, fds) = told_to_tap(&standby);
    assert_eq!((told, fds.len()), (geometry, 2));
    let (same, _, fds) = told_to_tap(&engine);
    assert_eq!(same, id);
    let mut writer = TapWriter::map(fds[0].as_fd(), fds[1].as_fd(), geometry).unwrap();
    let mut reader = TapReader::map(ring.as_fd(), mark.as_fd(), geometry).unwrap();
    writer.begin(1);
    let frame = Passing {
        at: 1,
        way: Way::Sent,
        peer: 2,
        queue: 0,
        length: 3,
    };
    writer.record(&frame, &[b"abc"]);
    let mut bytes = Vec::new();
    assert_eq!(reader.next(&mut bytes), Some(frame));
    assert_eq!(bytes, b"abc");
    assert!(Mapping::new(ring.as_fd(), geometry.bytes(), true).is_err());
    assert!(Mapping::new(mark.as_fd(), MARK_BYTES, true).is_ok());

    // The engine dies; its successor has the ring, and so has the next standby.
    engine.die();
    let successor = standby.take_over();
    let third = node.next_engine();
    let briefing = third.briefing();
    let tap = briefing
        .iter()
        .find(|(message, _)| matches!(message, ToEngine::Tap { .. }));
    let (message, fds) = tap.expect("the new standby hears of the capture");
    assert!(matches!(message, ToEngine::Tap { id: its, .. } if *its == id));
    assert_eq!(fds.len(), 2);

    drop(client);
    assert_eq!(successor.told().0, ToEngine::Untap);
    assert_eq!(third.told().0, ToEngine::Untap);
    // Free for the next one.
    let (_, _) = captures(&node.client());
}

#[test]
fn frames_are_for_root_and_for_one_at_a_time() {
    let (node, engine) = Node::ready(&Options {
        more: "[[acl]]\nuid = \"any\"\nports = \"1-255\"\n".into(),
        ..Options::default()
    });
    assert_eq!(
        node.client_as(1000, 0).refused(&capture(0)),
        ErrorCode::Denied
    );
    let client = node.client();
    assert_eq!(client.refused(&capture(7)), ErrorCode::NotFound);
    let _ring = captures(&client);
    told_to_tap(&engine);
    assert_eq!(node.client().refused(&capture(0)), ErrorCode::PortInUse);
    // The same again asks for another ring, as after a restart of the daemon.
    let _ring = captures(&client);
    told_to_tap(&engine);
    // Sizes that cannot be are made to fit.
    let request = Request::Capture {
        engine: 0,
        snaplen: u32::MAX,
        peer: None,
        buffer_bytes: 0,
    };
    let (response, _) = client.ask(&request);
    let Response::Capturing { geometry } = response else {
        panic!("{response:?}");
    };
    assert!(geometry.is_valid());
}
