//! Clients, friendly and hostile: all are served or refused, nobody waits for ever, and nothing leaks.

use std::time::{Duration, Instant};

use crate::harness::{Client, DEADLINE, Node, Options, open, port_geometry};
use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::port::{CloseReason, PortGeometry};
use portoland::engine_link::{FromEngine, PeerReport, ToEngine};
use proptest::prelude::*;

const ATTACH: Request = Request::Attach {
    abi: PORT_ABI_VERSION,
};

fn document(client: &Client, request: &Request) -> serde_json::Value {
    match client.ask(request).0 {
        Response::Document { document } => document,
        other => panic!("no document: {other:?}"),
    }
}

/// The supervisor has taken in everything that was sent before.
fn settle(node: &Node) {
    node.client().ask(&ATTACH);
}

#[test]
fn nodes_have_names_and_numbers() {
    let (node, _engine) = Node::ready(&Options {
        more: "[[peer]]\nid = 300\nname = \"far\"\naddress = \"10.0.0.2\"\n".into(),
        ..Options::default()
    });
    let client = node.client();
    let who = |answer: Response| match answer {
        Response::Node { id, name, .. } => (id, name),
        other => panic!("no node: {other:?}"),
    };
    let resolve = |node: &str| Request::Resolve { node: node.into() };
    assert_eq!(who(client.ask(&ATTACH).0), (1, "one".into()));
    assert_eq!(who(client.ask(&resolve("far")).0), (300, "far".into()));
    assert_eq!(who(client.ask(&resolve("300")).0), (300, "far".into()));
    assert_eq!(who(client.ask(&resolve("one")).0), (1, "one".into()));
    assert_eq!(client.refused(&resolve("2")), ErrorCode::NotFound);
    assert_eq!(client.refused(&resolve("a\nb")), ErrorCode::NotFound);
    let wrong = Request::Attach {
        abi: PORT_ABI_VERSION + 1,
    };
    assert_eq!(client.refused(&wrong), ErrorCode::AbiMismatch);
}

#[test]
fn the_access_list_decides_by_user_and_group() {
    let (node, engine) = Node::ready(&Options {
        more: "[[acl]]\nuid = 1000\nports = \"1-9\"\n[[acl]]\ngid = 50\nports = \"20\"\n".into(),
        ..Options::default()
    });
    let alice = node.client_as(1000, 1000);
    alice.open(&engine, 9);
    assert_eq!(alice.refused(&open(Some(10))), ErrorCode::Denied);
    assert_eq!(alice.refused(&open(Some(20))), ErrorCode::Denied);
    let bob = node.client_as(1001, 50);
    bob.open(&engine, 20);
    assert_eq!(bob.refused(&open(Some(9))), ErrorCode::Denied);
    // Any port that is allowed: from the top.
    alice.send(&open(None));
    assert_eq!(engine.told_to_open().0, 8);
    // None that is allowed is free.
    assert_eq!(bob.refused(&open(None)), ErrorCode::Denied);
    // The list decides, also for root.
    assert_eq!(node.client().refused(&open(Some(1))), ErrorCode::Denied);
}

#[test]
fn without_a_list_only_root() {
    let (node, engine) = Node::ready(&Options::default());
    assert_eq!(
        node.client_as(1000, 0).refused(&open(Some(1))),
        ErrorCode::Denied
    );
    node.client().open(&engine, 1);
}

#[test]
fn port_0_is_the_services() {
    let (node, _engine) = Node::ready(&Options::default());
    assert_eq!(node.client().refused(&open(Some(0))), ErrorCode::Denied);
    drop(node);
    let (node, engine) = Node::ready(&Options {
        we_are_the_service: true,
        ..Options::default()
    });
    // Its process, another user: who had the number before it.
    assert_eq!(node.client().refused(&open(Some(0))), ErrorCode::Denied);
    node.client_as(65534, 65534).open(&engine, 0);
}

#[test]
fn limits_are_told() {
    let (node, engine) = Node::ready(&Options {
        more: "[limits]\nports = 2\narena_bytes_per_port = 1048576\narena_bytes_total = 1179648\n"
            .into(),
        ..Options::default()
    });
    let client = node.client();
    let with_arena = |port, arena_bytes| Request::OpenPort {
        abi: PORT_ABI_VERSION,
        port: Some(port),
        geometry: PortGeometry {
            arena_bytes,
            ..port_geometry()
        },
    };
    assert_eq!(client.refused(&with_arena(1, 1_052_672)), ErrorCode::Limit);
    // No geometry at all.
    assert_eq!(client.refused(&with_arena(1, 4097)), ErrorCode::BadRequest);
    assert_eq!(
        client.refused(&with_arena(1, u64::MAX)),
        ErrorCode::BadRequest
    );
    assert_eq!(client.refused(&open(Some(256))), ErrorCode::NotFound);
    client.open(&engine, 1);
    client.open(&engine, 2);
    assert_eq!(client.refused(&open(Some(3))), ErrorCode::Limit);
    client.send(&Request::ClosePort { port: 2 });
    engine.told();
    engine.say(&FromEngine::PortClosed {
        port: 2,
        generation: 1,
        reason: CloseReason::ByOwner,
    });
    assert_eq!(client.answer().unwrap().0, Response::Done);
    // 64 KiB are in use: 1 MiB more is one page too much of 1152 KiB … no, exactly 64 KiB are left.
    client.send(&with_arena(2, 1_048_576));
    let (port, generation, ..) = engine.told_to_open();
    engine.say(&FromEngine::PortOpened { port, generation });
    client.answer().unwrap();
    client.send(&Request::ClosePort { port: 1 });
    engine.told();
    engine.say(&FromEngine::PortClosed {
        port: 1,
        generation: 1,
        reason: CloseReason::ByOwner,
    });
    client.answer().unwrap();
    assert_eq!(client.refused(&with_arena(3, 135_168)), ErrorCode::Limit);
}

#[test]
fn documents_have_their_keys() {
    let (node, engine) = Node::ready(&Options {
        more: "[[peer]]\nid = 2\nname = \"two\"\naddress = \"10.0.0.2\"\nmac = \"02:00:00:00:00:02\"\n[[peer]]\nid = 3\nname = \"three\"\naddress = \"10.0.0.3\"\n".into(),
        ..Options::default()
    });
    let client = node.client();
    let _fds = client.open(&engine, 7);
    let status = document(&client, &Request::Status {});
    assert_eq!(status["node"]["id"], 1);
    assert_eq!(status["node"]["encap"], "udp");
    assert_eq!(status["engines"][0]["state"], "running");
    assert_eq!(status["engines"][0]["mode"], "copy");
    assert_eq!(status["limits"]["clients"], 1024);
    let ports = document(&client, &Request::Ports {});
    assert_eq!(ports["ports"].as_array().unwrap().len(), 1);
    assert_eq!(ports["ports"][0]["port"], 7);
    assert_eq!(ports["ports"][0]["state"], "open");
    assert_eq!(ports["ports"][0]["owner_pid"], std::process::id());
    assert!(document(&client, &Request::Counters {})["steering"].is_object());

    // The engine is asked for its peers; those it does not know are listed all the same.
    client.send(&Request::Peers {});
    let ToEngine::QueryPeers { id } = engine.told().0 else {
        panic!("not asked");
    };
    let report = PeerReport {
        node: 2,
        queue: 0,
        name: "two".into(),
        state: "up".into(),
        rtt_ns: 5000,
        outstanding: 1,
        incarnation: 9,
        engine_epoch: 3,
        max_frame: 1400,
        misfit: None,
    };
    // An answer to another question is none.
    engine.say(&FromEngine::Peers {
        id: id + 1,
        peers: vec![],
    });
    engine.say(&FromEngine::Peers {
        id,
        peers: vec![report],
    });
    let Some((Response::Document { document: peers }, _)) = client.answer() else {
        panic!("no peers");
    };
    let rows = peers["peers"].as_array().unwrap();
    assert_eq!(
        (rows[0]["node"].as_u64(), rows[0]["state"].as_str()),
        (Some(2), Some("up"))
    );
    assert_eq!(rows[0]["mac"], "02:00:00:00:00:02");
    assert_eq!(
        (rows[1]["node"].as_u64(), rows[1]["state"].as_str()),
        (Some(3), Some("unresolved"))
    );
    // An engine that does not answer holds nobody up.
    let asked = Instant::now();
    document(&client, &Request::Peers {});
    assert!(asked.elapsed() < Duration::from_millis(1900));
}

#[test]
fn a_long_answer_comes_in_packets() {
    let peers: String = (2..700)
        .map(|id| format!("[[peer]]\nid = {id}\nname = \"node-with-a-long-name-{id}\"\naddress = \"10.1.{}.{}\"\n", id / 250, 1 + id % 250))
        .collect();
    let more = format!("[engine]\numem_frames = 262144\n{peers}");
    let (node, engine) = Node::ready(&Options {
        more,
        ..Options::default()
    });
    let client = node.client();
    client.send(&Request::Peers {});
    let ToEngine::QueryPeers { id } = engine.told().0 else {
        panic!("not asked");
    };
    engine.say(&FromEngine::Peers { id, peers: vec![] });
    let Some((Response::Document { document }, _)) = client.answer() else {
        panic!("no peers");
    };
    assert_eq!(document["peers"].as_array().unwrap().len(), 698);
    assert!(document.to_string().len() > 2 * 32 * 1024);
}

#[test]
fn random_packets_never_stop_it() {
    // Its engine is never ready, so that nobody waits for its peers.
    let node = Node::start(&Options::default());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(2000));
    let words = prop_oneof![
        any::<Vec<u8>>(),
        // Looks like a request.
        ("[a-z_]{0,12}", "[a-z]{0,6}", any::<i64>()).prop_map(|(kind, key, value)| {
            format!("{{\"request\":\"{kind}\",\"{key}\":{value}}}").into_bytes()
        }),
        prop::sample::select(vec!["status", "ports", "counters", "peers"])
            .prop_map(|kind| format!("{{\"request\":\"{kind}\"}}").into_bytes()),
    ];
    runner
        .run(&words, |bytes| {
            let client = node.client();
            client.send_bytes(&bytes);
            // Served or refused; an empty packet ends the connection.
            prop_assert_eq!(client.answer().is_some(), !bytes.is_empty());
            Ok(())
        })
        .unwrap();
}

#[test]
fn one_request_at_a_time() {
    let (node, engine) = Node::ready(&Options::default());
    let client = node.client();
    client.send(&open(Some(7)));
    client.send(&open(Some(8)));
    let (port, generation, ..) = engine.told_to_open();
    assert_eq!(port, 7);
    assert!(engine.told_nothing());
    engine.say(&FromEngine::PortOpened { port, generation });
    assert!(matches!(
        client.answer(),
        Some((Response::PortOpened { port: 7, .. }, _))
    ));
    assert_eq!(engine.told_to_open().0, 8);
}

#[test]
fn a_client_that_does_not_read_is_dropped() {
    let (node, _engine) = Node::ready(&Options::default());
    let client = node.client();
    let request = serde_json::to_vec(&Request::Status {}).unwrap();
    // Ask until nothing more is taken, and never read.
    let sent = Instant::now();
    let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
    loop {
        match rustix::net::send(&client.socket, &request, flags) {
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => std::thread::yield_now(),
            // Dropped.
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => break,
            Err(error) => panic!("{error}"),
        }
        assert!(sent.elapsed() < DEADLINE, "it was not dropped");
    }
    // Nobody else noticed.
    let asked = Instant::now();
    settle(&node);
    assert!(asked.elapsed() < Duration::from_secs(1));
}

/// Asks, and gives the message of an expected refusal by a limit.
fn limited(client: &Client, request: &Request) -> String {
    match client.ask(request).0 {
        Response::Error {
            code: ErrorCode::Limit,
            message,
        } => message,
        other => panic!("not limited: {other:?}"),
    }
}

// Alice takes what she may have. Expect: no more, with the quota, what she has and the key in the message; Bob has his own; root has what
// there is; what she gives back she may have again.
#[test]
fn a_user_cannot_take_everything() {
    let more = "[[acl]]\nuid = \"any\"\nports = \"1-255\"\n\
        [[quota]]\nuid = \"any\"\nports = 2\nsend_tokens = 64\nreceive_tokens = 64\narena_bytes = 196608\n\
        [[quota]]\nuid = 1001\nports = 9\n";
    let (node, engine) = Node::ready(&Options {
        more: more.into(),
        ..Options::default()
    });
    let asking = |port, send_tokens, receive_tokens, arena_bytes| Request::OpenPort {
        abi: PORT_ABI_VERSION,
        port: Some(port),
        geometry: PortGeometry::new(send_tokens, receive_tokens, arena_bytes).unwrap(),
    };
    let alice = node.client_as(1000, 1000);
    alice.open(&engine, 1);
    // One port of 16, 16, 64 KiB is hers: each of these is one too much of something.
    for (request, key, has) in [
        (asking(2, 64, 16, 4096), "`send_tokens`", "16 of its 64"),
        (asking(2, 16, 64, 4096), "`receive_tokens`", "16 of its 64"),
        (
            asking(2, 16, 16, 135_168),
            "`arena_bytes`",
            "65536 of its 196608",
        ),
    ] {
        let message = limited(&alice, &request);
        assert!(
            message.contains(key) && message.contains(has),
            "{key}: {message}"
        );
        assert!(message.contains("uid = \"any\""), "{message}");
    }
    // On another connection it is the same user's.
    let again = node.client_as(1000, 7);
    again.open(&engine, 2);
    let message = limited(&alice, &open(Some(3)));
    assert!(
        message.contains("2 of its 2 ports") && message.contains("`ports`"),
        "{message}"
    );
    // Bob's rule names ports only; the rest is everybody's.
    let bob = node.client_as(1001, 1000);
    bob.open(&engine, 3);
    let message = limited(&bob, &asking(4, 64, 16, 4096));
    assert!(message.contains("[[quota]] uid = 1001"), "{message}");
    bob.open(&engine, 4);
    bob.open(&engine, 5);
    let root = node.client();
    root.open(&engine, 6);
    // What is being closed is hers until it is closed.
    drop(again);
    assert!(matches!(
        engine.told().0,
        ToEngine::ClosePort { port: 2, .. }
    ));
    limited(&alice, &open(Some(7)));
    engine.say(&FromEngine::PortClosed {
        port: 2,
        generation: 1,
        reason: CloseReason::OwnerGone,
    });
    settle(&node);
    alice.open(&engine, 7);
}

#[test]
fn a_user_cannot_take_all_connections() {
    let more = "[[quota]]\nuid = \"any\"\nconnections = 2\n[limits]\nclients = 8\n";
    let (node, _engine) = Node::ready(&Options {
        more: more.into(),
        ..Options::default()
    });
    let first = node.client_as(1000, 1000);
    let _second = node.client_as(1000, 1000);
    let third = node.client_as(1000, 1000);
    match third.answer() {
        Some((Response::Error { code, message }, _)) => {
            assert_eq!(code, ErrorCode::Limit);
            assert!(message.contains("2 of its 2 connections"), "{message}");
        }
        other => panic!("not refused: {other:?}"),
    }
    assert!(third.answer().is_none());
    // Somebody else is let in, and so is she when she has left.
    node.client_as(1001, 1001).ask(&ATTACH);
    drop(first);
    settle(&node);
    assert!(matches!(
        node.client_as(1000, 1000).ask(&ATTACH).0,
        Response::Node { .. }
    ));
}

// Nothing is configured. Expect: half of everything for a user, rounded up, and the other half for others.
#[test]
fn without_a_quota_a_user_has_half() {
    let (node, engine) = Node::ready(&Options {
        more: "[[acl]]\nuid = \"any\"\nports = \"1-255\"\n[limits]\nports = 3\n".into(),
        ..Options::default()
    });
    let alice = node.client_as(1000, 1000);
    alice.open(&engine, 1);
    alice.open(&engine, 2);
    let message = limited(&alice, &open(Some(3)));
    assert!(message.contains("2 of its 2 ports"), "{message}");
    node.client_as(1001, 1001).open(&engine, 3);
}
