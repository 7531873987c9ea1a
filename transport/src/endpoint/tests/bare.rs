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
