//! The configuration read again while a node runs: what changes at once, what is refused, and what a broken file does.

use crate::harness::{FakeEngine, Node, Options, open};
use portolan_abi::control::{ErrorCode, Request, Response};
use portoland::engine_link::{Route, ToEngine};

fn options() -> Options {
    Options {
        more: "[limits]\npeers = 3\nclients = 9\n\
               [[acl]]\nuid = 1000\nports = \"1-9\"\n\
               [[peer]]\nid = 2\nname = \"two\"\naddress = \"10.0.0.2\"\nmac = \"02:00:00:00:00:02\"\n"
            .to_owned(),
        ..Options::default()
    }
}

fn peer(id: u16) -> String {
    format!(
        "[[peer]]\nid = {id}\nname = \"n{id}\"\naddress = \"10.0.0.{id}\"\nmac = \"02:00:00:00:00:{id:02}\"\n"
    )
}

/// The next route an engine is told of.
fn told_route(engine: &FakeEngine) -> Route {
    match engine.told().0 {
        ToEngine::Route(route) => route,
        other => panic!("no route: {other:?}"),
    }
}

// A user the list admits, then does not, then does again. Expect: the answer follows the file, and ports that are open stay.
#[test]
fn the_access_list_changes_for_who_is_connected() {
    let (node, engine) = Node::ready(&options());
    let client = node.client_as(1000, 1000);
    client.open(&engine, 5);

    // The peer is the sign that the reload is through: engines are told of it.
    node.rewrite(|text| text.replace("uid = 1000", "uid = 1001") + &peer(3));
    node.reload();
    assert_eq!(told_route(&engine).node, 3);
    assert_eq!(client.refused(&open(Some(6))), ErrorCode::Denied);
    let other = node.client_as(1001, 1001);
    other.open(&engine, 6);

    node.rewrite(|text| text.replace("uid = 1001", "uid = 1000") + &peer(4));
    node.reload();
    assert_eq!(told_route(&engine).node, 4);
    client.open(&engine, 7);
    assert_eq!(other.refused(&open(Some(8))), ErrorCode::Denied);
    let Response::Document { document } = client.ask(&Request::Ports {}).0 else {
        panic!("no report");
    };
    let open: Vec<u64> = (document["ports"].as_array().unwrap().iter())
        .map(|port| port["port"].as_u64().unwrap())
        .collect();
    assert_eq!(open, [5, 6, 7]);
}

// A user who may have one port, then two. Expect: as the file says, and the port that is open stays.
#[test]
fn quotas_change_for_who_is_connected() {
    let mut options = options();
    options.more += "[[quota]]\nuid = 1000\nports = 1\n";
    let (node, engine) = Node::ready(&options);
    let client = node.client_as(1000, 1000);
    client.open(&engine, 5);
    assert_eq!(client.refused(&open(Some(6))), ErrorCode::Limit);

    node.rewrite(|text| text.replace("\nports = 1\n", "\nports = 2\n") + &peer(3));
    node.reload();
    assert_eq!(told_route(&engine).node, 3);
    client.open(&engine, 6);
    assert_eq!(client.refused(&open(Some(7))), ErrorCode::Limit);

    node.rewrite(|text| text.replace("\nports = 2\n", "\nports = 1\n") + &peer(4));
    node.reload();
    assert_eq!(told_route(&engine).node, 4);
    assert_eq!(client.refused(&open(Some(7))), ErrorCode::Limit);
    let Response::Document { document } = client.ask(&Request::Ports {}).0 else {
        panic!("no report");
    };
    assert_eq!(document["ports"].as_array().unwrap().len(), 2);
}

// A peer moves, one comes, one goes. Expect: engines, the standby too, hear of exactly that, and the node resolves the new name.
#[test]
fn engines_hear_of_peers_that_change() {
    let (node, engine, standby) = Node::ready_twice(&options());
    node.rewrite(|text| text.replace("02:00:00:00:00:02", "02:00:00:00:00:22") + &peer(3));
    node.reload();
    for engine in [&standby, &engine] {
        let moved = told_route(engine);
        assert_eq!((moved.node, moved.mac), (2, Some([2, 0, 0, 0, 0, 0x22])));
        assert_eq!(told_route(engine).node, 3);
    }
    let asks = |name: &str| Request::Resolve {
        node: name.to_owned(),
    };
    let client = node.client();
    assert!(matches!(
        client.ask(&asks("n3")).0,
        Response::Node { id: 3, .. }
    ));

    node.rewrite(|text| text.replace(&peer(3), ""));
    node.reload();
    for engine in [&standby, &engine] {
        assert_eq!(engine.told().0, ToEngine::RemoveNode { node: 3 });
    }
    assert_eq!(client.refused(&asks("n3")), ErrorCode::NotFound);
    assert!(engine.told_nothing());
}

// What a running node cannot take, together with what it can. Expect: the latter only.
#[test]
fn what_cannot_change_is_left_and_the_rest_applied() {
    let (node, engine) = Node::ready(&options());
    node.rewrite(|text| text.replace("name = \"one\"", "name = \"another\"") + &peer(3));
    node.reload();
    assert_eq!(told_route(&engine).node, 3);
    let named = node.client().ask(&Request::Resolve {
        node: "1".to_owned(),
    });
    assert!(matches!(named.0, Response::Node { name, .. } if name == "one"));
}

// More peers than memory is laid out for. Expect: none of them, and the access list all the same.
#[test]
fn peers_beyond_the_room_there_is_are_refused() {
    let (node, engine) = Node::ready(&options());
    let client = node.client_as(1001, 1001);
    assert_eq!(client.refused(&open(Some(5))), ErrorCode::Denied);
    let many: String = (3..6).map(peer).collect();
    node.rewrite(|text| text.replace("uid = 1000", "uid = 1001") + &many);
    node.reload();
    // Nothing but the answer tells when; every request comes after the signal or before it.
    let end = std::time::Instant::now() + crate::harness::DEADLINE;
    client.send(&open(Some(5)));
    while let Some((Response::Error { .. }, _)) = {
        let early = !engine.told_nothing();
        if early { None } else { client.answer() }
    } {
        assert!(std::time::Instant::now() < end, "not reloaded");
        client.send(&open(Some(5)));
    }
    // The first thing the engine hears is the port: no route before.
    assert_eq!(engine.told_to_open().0, 5);
}

// A file with an error. Expect: nothing changes, and the next good one is taken.
#[test]
fn a_broken_file_changes_nothing() {
    let (node, engine) = Node::ready(&options());
    node.rewrite(|text| text.replace("uid = 1000", "uid = 1001") + "[[peer]]\nid = 0\n");
    node.reload();
    assert!(engine.told_nothing());
    let client = node.client_as(1001, 1001);
    assert_eq!(client.refused(&open(Some(5))), ErrorCode::Denied);
    node.rewrite(|text| text.replace("[[peer]]\nid = 0\n", &peer(3)));
    node.reload();
    assert_eq!(told_route(&engine).node, 3);
    client.open(&engine, 5);
}
