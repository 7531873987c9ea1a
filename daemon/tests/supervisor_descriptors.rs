//! Clients that bring descriptors, or come by the thousand: whatever they do, nothing of it stays. Apart from the other tests, as
//! descriptors are counted by process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "supervisor/harness/mod.rs"]
mod harness;

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::Instant;

use harness::{DEADLINE, Node, Options};
use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{ErrorCode, MAX_REQUEST_BYTES, Request, Response};
use portolan_abi::port::CloseReason;
use portoland::engine_link::FromEngine;
use rustix::process::{Resource, Rlimit};

const ATTACH: Request = Request::Attach {
    abi: PORT_ABI_VERSION,
};

/// Descriptors belong to the process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The other side closes a little later.
fn back_to(before: usize) {
    let end = Instant::now() + DEADLINE;
    while descriptors() > before {
        assert!(
            Instant::now() < end,
            "{} descriptors, {before} before",
            descriptors()
        );
        std::thread::yield_now();
    }
}

/// The supervisor has taken in everything that was sent before.
fn settle(node: &Node) {
    node.client().ask(&ATTACH);
}

#[test]
fn nonsense_is_refused_and_descriptors_are_not_kept() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let (node, _engine) = Node::ready(&Options::default());
    let client = node.client();
    client.ask(&ATTACH);
    let before = descriptors();
    let request = serde_json::to_vec(&ATTACH).unwrap();
    let bad: Vec<Vec<u8>> = [
        b"hello".to_vec(),
        vec![0; 1],
        vec![0xff; MAX_REQUEST_BYTES],
        vec![b' '; MAX_REQUEST_BYTES + 1],
        vec![b'['; MAX_REQUEST_BYTES],
        b"{\"request\":\"attach\",\"abi\":1,\"more\":2}".to_vec(),
        b"{\"request\":\"attach\",\"abi\":-1}".to_vec(),
        b"{\"request\":\"open_port\",\"abi\":1,\"port\":70000}".to_vec(),
    ]
    .into_iter()
    // Half a message, at every length.
    .chain((1..request.len()).map(|length| request[..length].to_vec()))
    .collect();
    for bytes in bad {
        client.send_bytes(&bytes);
        let Some((Response::Error { code, .. }, _)) = client.answer() else {
            panic!("not refused: {bytes:?}");
        };
        assert_eq!(code, ErrorCode::BadRequest);
    }
    // Descriptors beside a request are nobody's: the request is served.
    for _ in 0..100 {
        let file = std::fs::File::open("/dev/null").unwrap();
        client.send_with_fds(&request, &[file.as_fd(); 16]);
        assert!(matches!(client.answer(), Some((Response::Node { .. }, _))));
    }
    back_to(before);
    // An empty packet looks like the end: it is one.
    client.send_bytes(b"");
    assert!(client.answer().is_none());
}

#[test]
fn ten_thousand_connections_are_served_or_refused() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        ..limit
    };
    rustix::process::setrlimit(Resource::Nofile, wanted).unwrap();
    let (node, engine) = Node::ready(&Options {
        more: "[limits]\nclients = 200\n".into(),
        ..Options::default()
    });
    let before = descriptors();
    let first = node.client();
    first.ask(&ATTACH);
    // 200 at most are kept; the others are told why and let go.
    let mut kept = Vec::new();
    let mut refused = 0;
    for number in 0..10_000 {
        let client = node.client();
        if number < 199 {
            client.ask(&ATTACH);
            kept.push(client);
        } else {
            let Some((
                Response::Error {
                    code: ErrorCode::Limit,
                    ..
                },
                _,
            )) = client.answer()
            else {
                panic!("neither served nor refused");
            };
            assert!(client.answer().is_none());
            refused += 1;
        }
    }
    assert_eq!((kept.len(), refused), (199, 9801));
    // Those that are in are served all the while.
    first.open(&engine, 7);
    // When they leave, others get in, and nothing is left of them.
    drop((kept, first));
    engine.told();
    let end = Instant::now() + DEADLINE;
    loop {
        let client = node.client();
        client.send(&ATTACH);
        if let Some((Response::Node { .. }, _)) = client.answer() {
            break;
        }
        assert!(Instant::now() < end);
    }
    engine.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1,
        reason: CloseReason::OwnerGone,
    });
    back_to(before);
}

#[test]
fn a_thousand_applications_killed_leave_nothing_behind() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let (node, engine) = Node::ready(&Options::default());
    let before = descriptors();
    node.client().open(&engine, 7);
    for round in 1..=1000 {
        engine.told();
        let generation = round;
        engine.say(&FromEngine::PortClosed {
            port: 7,
            generation,
            reason: CloseReason::OwnerGone,
        });
        settle(&node);
        // Opens the same port again and dies.
        let _memory = node.client().open(&engine, 7);
    }
    engine.told();
    engine.say(&FromEngine::PortClosed {
        port: 7,
        generation: 1001,
        reason: CloseReason::OwnerGone,
    });
    back_to(before);
}
