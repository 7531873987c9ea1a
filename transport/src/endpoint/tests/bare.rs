//! Bare frames of several streams at once.

use super::*;
use crate::policy::{AckMode, Profile};

/// Bytes of each message.
const LEN: u32 = 100_000;

/// Node 1 sends a long message on each of four streams, of two ports and both priorities.
fn four_streams(frame: u16, policy: Policy) -> Pair {
    let mut pair = Pair::new(frame);
    for (node, side) in pair.sides.iter_mut().enumerate() {
        let mut config = config(node as u16 + 1, frame);
        config.policy = policy;
        side.endpoint = Endpoint::new(config, 0);
        side.endpoint.set_node(0, NodeId(2 - node as u16), frame);
        for port in [5, 6] {
            side.endpoint.port_opened(PortId(port));
        }
    }
    let now = pair.now;
    let Side { endpoint, host } = &mut pair.sides[0];
    for slot in 0..4 {
        let mut stream = key(2);
        stream.local = PortId(5 + slot as u16 % 2);
        stream.priority = [Priority::Low, Priority::High][slot as usize / 2];
        host.payloads.insert(slot, vec![slot as u8; LEN as usize]);
        let request = SendRequest {
            id: SendId {
                port: stream.local,
                slot,
                generation: 1,
            },
            stream,
            len: LEN,
            tag: u64::from(slot),
            deadline: Nanos::MAX,
            ack: AckMode::Policy,
        };
        endpoint.submit(now, &request, host).unwrap();
    }
    pair
}

/// Bytes of messages that were sent so far, and frames of them that were bare.
fn sent(pair: &Pair) -> (u64, usize) {
    let (mut bytes, mut bare) = (0, 0);
    for (_, frame) in &pair.log {
        let segments = [&frame[..]];
        let frame = wire::parse(&segments).unwrap();
        bare += usize::from(frame.is_bare());
        let payloads = frame.chunks().map(|(_, view)| view.len() as u64);
        bytes += payloads.sum::<u64>();
    }
    (bytes, bare)
}

// Four streams at once to one peer, over a wire that loses nothing, at three lengths of frames, under each set of answers. Expect: each byte travels once, most of
// them in bare frames.
#[test]
fn streams_that_take_turns_send_each_byte_once() {
    for profile in Profile::ALL {
        for frame in [1_472, 3_470, 8_972] {
            let what = alloc::format!("{} at {frame}", profile.name());
            let mut pair = four_streams(frame, profile.policy());
            assert!(pair.run_until(1_000_000_000, Pair::all_settled), "{what}");
            let (bytes, bare) = sent(&pair);
            assert_eq!(bytes, 4 * u64::from(LEN), "{what}");
            let least = if profile.policy().coalesce { 20 } else { 0 };
            assert!(bare >= least, "{what}: {bare} bare frames");
            assert_eq!(pair.sides[1].host.delivered.len(), 4, "{what}");
        }
    }
}

// The same while frames are lost, doubled, late and damaged. Expect: the same messages, and of bytes not much more than was lost.
#[test]
fn what_was_lost_is_sent_again_and_little_else() {
    let mut pair = four_streams(1_472, Policy::default());
    (pair.loss, pair.late, pair.corrupt) = (30, 5, 5);
    assert!(pair.run_until(10_000_000_000, Pair::all_settled));
    let (bytes, bare) = sent(&pair);
    let all = 4 * u64::from(LEN);
    assert!(bytes > all && bytes < all + all / 4, "{bytes} of {all}");
    assert!(bare > 150, "{bare} bare frames");
    assert_eq!(pair.sides[1].host.delivered.len(), 4);
}

/// Node 1 has a long message under way, grants for more of it than two frames hold, and has just written a frame in full.
fn told() -> Pair {
    let mut pair = Pair::new(1_472);
    // Whatever an endpoint is told ends a train; these tests reach into it.
    pair.sides[0].endpoint.shortcuts.off = true;
    pair.send(0, 2, 20 * LEN as usize, Nanos::MAX);
    while sent(&pair).1 == 0 || shares::frame(&mut pair).is_none() {
        assert!(pair.now < 10 * SECOND && pair.step());
    }
    pair
}

/// What node 1 knows of node 2.
fn other(pair: &mut Pair) -> &mut PeerEntry {
    let endpoint = &mut pair.sides[0].endpoint;
    let slot = endpoint.peer_index[&Peer {
        node: NodeId(2),
        queue: 0,
    }];
    endpoint.peers.get_mut(slot).unwrap()
}

/// Whether the next frame of node 1 is bare.
fn is_next_bare(pair: &mut Pair) -> bool {
    let bytes = shares::frame(pair).unwrap();
    let segments = [bytes.as_slice()];
    wire::parse(&segments).unwrap().is_bare()
}

// A frame in full, then one bare, at the same reading of the clock. Expect: in full as well if more credit is to be told of in between.
#[test]
fn credit_that_is_due_is_told_in_full() {
    for due in [false, true] {
        let mut pair = told();
        other(&mut pair).credit.due |= due;
        assert_eq!(is_next_bare(&mut pair), !due);
    }
}

// Another engine takes over at the reading of the clock at which its predecessor was told all. Expect: it is told all, too.
#[test]
fn a_successor_was_told_nothing() {
    let mut pair = told();
    let now = pair.now;
    let entry = other(&mut pair);
    assert!(entry.may_get_bare(now));
    entry.void_volatile(now, 0);
    entry.reads_bare = true;
    assert!(!entry.may_get_bare(now));
}

// The peer was heard between a frame in full and a bare one. Expect: the bare one waits for an answer, or a peer that dies then would be waited for for ever.
#[test]
fn a_bare_frame_expects_an_answer() {
    let mut pair = told();
    other(&mut pair).waiting_since = None;
    assert!(is_next_bare(&mut pair));
    assert!(other(&mut pair).waiting_since.is_some());
}
