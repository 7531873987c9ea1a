//! RUN between two endpoints: short messages of one length and tag, of which a frame holds many with one checksum. wire.md §4.3

use super::*;
use crate::endpoint::credit::BUFFER_BYTES;
use crate::policy::AckMode;

/// A pair whose first message went through.
fn connected() -> Pair {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair
}

/// Submits so many messages of 64 bytes and one tag.
fn submit(pair: &mut Pair, count: u32) {
    for _ in 0..count {
        let slot = pair.next_slot;
        pair.next_slot += 1;
        let side = &mut pair.sides[0];
        let bytes = (0..64).map(|at: u8| at ^ (slot as u8).wrapping_mul(5));
        side.host.payloads.insert(slot, bytes.collect());
        let request = SendRequest {
            id: SendId {
                port: PortId(5),
                slot,
                generation: 1,
            },
            stream: key(2),
            len: 64,
            tag: 9,
            deadline: Nanos::MAX,
            ack: AckMode::Policy,
        };
        side.endpoint
            .submit(pair.now, &request, &mut side.host)
            .unwrap();
    }
}

/// The next frame of node 1, not sent anywhere.
fn frame(pair: &mut Pair) -> Vec<u8> {
    let mut to = vec![0xaa; 1472];
    let (now, side) = (pair.now, &mut pair.sides[0]);
    let transmit = side.endpoint.poll_transmit(now, &mut to, &mut side.host);
    to.truncate(transmit.unwrap().len);
    side.endpoint.check_consistency();
    to
}

fn arrives(pair: &mut Pair, segments: &[&[u8]]) {
    let (now, side) = (pair.now, &mut pair.sides[1]);
    let taken = side.endpoint.handle_frame(now, segments, &mut side.host);
    assert_eq!(taken, Ok(()));
    side.endpoint.check_consistency();
}

/// What was delivered after the first message, by the numbers of its sends.
fn delivered(pair: &Pair) -> Vec<u32> {
    let sent = &pair.sides[0].host;
    let known = pair.sides[1].host.delivered.iter().skip(1);
    known
        .map(|(delivery, bytes)| {
            let number = delivery.number.wrapping_sub(sent.accepted[0].3);
            assert_eq!(&sent.payloads[&number], bytes);
            assert_eq!((delivery.tag, delivery.total), (9, 64));
            number
        })
        .collect()
}

// As many as there is room for. Expect: 21 in a frame of 1,472 bytes, and two frames for 42; all but the first of a frame copied without a checksum on
// both sides; each counted as a chunk on both sides.
#[test]
fn many_in_a_frame() {
    let mut pair = connected();
    submit(&mut pair, 42);
    let sent = pair.sides[0].endpoint.counters().chunks_sent;
    let received = pair.sides[1].endpoint.counters().chunks_received;
    let frames = [frame(&mut pair), frame(&mut pair)];
    assert_eq!(frames.each_ref().map(Vec::len), [48 + 32 + 12 + 21 * 64; 2]);
    for frame in &frames {
        arrives(&mut pair, &[frame]);
    }
    assert_eq!(delivered(&pair), (1..43).collect::<Vec<_>>());
    let [sender, receiver] = &pair.sides;
    assert_eq!(sender.endpoint.counters().chunks_sent - sent, 42);
    let counted = receiver.endpoint.counters().chunks_received - received;
    assert_eq!(counted, 42);
    assert_eq!(
        (sender.host.unchecked, receiver.host.unchecked),
        ([40, 0], [0, 40])
    );
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0), [SendStatus::Delivered; 43]);
}

// 200 messages in a row and credit for one buffer or two, while a frame of 8,972 bytes would take three; likewise a window of so many messages. Expect: the
// same frames as of who asks for each message by itself, and as long as credit or window let them be.
#[test]
fn credit_and_window_end_within_a_run() {
    for (buffers, window) in [(1, 256), (2, 256), (64, 1), (64, 2), (64, 40), (64, 120)] {
        let both = [false, true].map(|off| {
            let mut pair = Pair::new(8_972);
            for (node, side) in pair.sides.iter_mut().enumerate() {
                let mut config = config(node as u16 + 1, 8_972);
                (
                    config.policy.eager_buffers,
                    config.policy.eager_budget_buffers,
                ) = (buffers, 0);
                config.policy.window_messages = window;
                config.policy.validate().unwrap();
                side.endpoint = Endpoint::new(config, 0);
                side.endpoint.shortcuts.off = off;
                side.endpoint.set_node(0, NodeId(2 - node as u16), 8_972);
                side.endpoint.port_opened(PortId(5));
            }
            pair.send(0, 2, 1, Nanos::MAX);
            let proved = |pair: &Pair| {
                let mut peers = pair.sides[0].endpoint.peers();
                pair.all_settled() && peers.all(|peer| peer.max_frame == 8_972)
            };
            assert!(pair.run_until(SECOND, proved));
            submit(&mut pair, 200);
            let mut frames = Vec::new();
            let mut to = vec![0xaa; 8_972];
            let (now, side) = (pair.now, &mut pair.sides[0]);
            while let Some(transmit) = side.endpoint.poll_transmit(now, &mut to, &mut side.host) {
                frames.push(to[..transmit.len].to_vec());
                side.endpoint.check_consistency();
            }
            (frames, side.endpoint.shortcuts.bursts)
        });
        let [(frames, bursts), (by_itself, none)] = &both;
        assert_eq!(frames, by_itself, "{buffers} {window}");
        assert!(*bursts > 0 && *none == 0, "{buffers} {window}");
        let at_most = (buffers as usize * BUFFER_BYTES).min(100 + 70 * window as usize);
        let longest = frames.iter().map(Vec::len).max().unwrap();
        assert!(
            longest <= at_most.min(8_972),
            "{buffers} {window}: {longest}"
        );
        let reached = (at_most * 8 / 10).min(8_972 * 9 / 10);
        assert!(longest > reached, "{buffers} {window}: {longest}");
    }
}

// Cut into two and three segments anywhere behind the headers. Expect: all arrive, though a message that straddles goes another way.
#[test]
fn straddling_segments() {
    let mut pair = connected();
    submit(&mut pair, 6);
    let frame = frame(&mut pair);
    let headers = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
    let mut straight = [false; 2];
    for cut in headers..=frame.len() {
        for more in [0, 1, 63, 64, 65, 200] {
            let (head, rest) = frame.split_at(cut);
            let (middle, rest) = rest.split_at(more.min(rest.len()));
            // Another receiver each time: the same frame is not news to the same.
            let mut other = connected();
            other.sides[0].host.payloads = pair.sides[0].host.payloads.clone();
            arrives(&mut other, &[head, middle, rest]);
            assert_eq!(delivered(&other), [1, 2, 3, 4, 5, 6], "{cut} {more}");
            let c = other.sides[1].endpoint.counters();
            assert_eq!((c.payloads_corrupt, c.duplicates), (0, 0));
            straight[usize::from(other.sides[1].host.unchecked[1] == 5)] = true;
        }
    }
    assert_eq!(straight, [true; 2]);
}

// Tokens for some of a frame's messages. Expect: those are delivered, the sender is told of the next, and the others come when there are tokens; none
// is lost or comes twice.
#[test]
fn tokens_for_some() {
    for tokens in 0..7 {
        let mut pair = connected();
        pair.sides[1].host.tokens.truncate(tokens);
        submit(&mut pair, 6);
        let frame = frame(&mut pair);
        arrives(&mut pair, &[&frame]);
        let some = tokens.min(6) as u32;
        assert_eq!(delivered(&pair), (1..=some).collect::<Vec<_>>());
        pair.provide(1, 8);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        assert_eq!(delivered(&pair), [1, 2, 3, 4, 5, 6], "{tokens} tokens");
        assert_eq!(pair.statuses(0), [SendStatus::Delivered; 7]);
        assert!(pair.sides[1].host.buffers.is_empty());
    }
}

// A message of a RUN that was verified cannot be written. Expect: the general way takes over from there, and nothing else is lost.
#[test]
fn memory_that_cannot_be_written() {
    for places in 0..6 {
        let mut pair = connected();
        pair.sides[1].host.places_max = Some(places);
        submit(&mut pair, 6);
        let frame = frame(&mut pair);
        arrives(&mut pair, &[&frame]);
        assert_eq!(delivered(&pair), [1, 2, 3, 4, 5, 6], "{places}");
        let host = &pair.sides[1].host;
        assert_eq!((host.unchecked[1], host.buffers.len()), (places.min(5), 0));
    }
}

// The application is asked about each message, which nobody does on the straight way. Expect: all are offered, and delivered.
#[test]
fn asked_about_each() {
    let mut pair = connected();
    let accepts = [(9, Verdict::Accept)];
    pair.sides[1].host.verdicts = Some(accepts.into_iter().collect());
    submit(&mut pair, 6);
    let frame = frame(&mut pair);
    arrives(&mut pair, &[&frame]);
    assert_eq!(delivered(&pair), [1, 2, 3, 4, 5, 6]);
    let host = &pair.sides[1].host;
    assert_eq!((host.offered.len(), host.unchecked), (6, [0, 0]));
}

// A bit of the payloads flipped, any byte's. Expect: the message in front of the RUN is damaged, or the RUN is, with all of its messages; whatever is
// damaged is not delivered and comes again.
#[test]
fn damaged() {
    let mut pair = connected();
    submit(&mut pair, 6);
    let good = frame(&mut pair);
    let headers = usize::from(u16::from_be_bytes([good[4], good[5]]));
    for at in (headers..good.len()).step_by(7) {
        let mut pair = connected();
        submit(&mut pair, 6);
        let mut frame = frame(&mut pair);
        frame[at] ^= 4;
        arrives(&mut pair, &[&frame]);
        let corrupt = pair.sides[1].endpoint.counters().payloads_corrupt;
        if at < headers + 64 {
            // Those behind it wait for it.
            assert_eq!((delivered(&pair), corrupt), (vec![], 1));
        } else {
            assert_eq!((delivered(&pair), corrupt), (vec![1], 5));
        }
        assert!(pair.run_until(SECOND, Pair::all_settled));
        assert_eq!(delivered(&pair), [1, 2, 3, 4, 5, 6], "{at}");
        assert_eq!(pair.statuses(0), [SendStatus::Delivered; 7]);
    }
}

// One of six messages is cancelled before any of them goes out. Expect: it is not delivered, and the others are, in the order of their numbers.
#[test]
fn one_was_cancelled() {
    for cancelled in 1..7 {
        let mut pair = connected();
        submit(&mut pair, 6);
        pair.cancel(0, cancelled);
        let (now, side) = (pair.now, &mut pair.sides[0]);
        side.endpoint.handle_timeout(now, &mut side.host);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        let mut expected = [SendStatus::Delivered; 7];
        expected[cancelled as usize] = SendStatus::NotDelivered(Reason::Cancelled);
        assert_eq!(pair.statuses(0), expected);
        let others: Vec<u32> = (1..7).filter(|number| *number != cancelled).collect();
        assert_eq!(delivered(&pair), others);
    }
}

// The memory of a message of a RUN is gone when the frame is written. Expect: that one is not delivered; the others are, though they have to go again.
#[test]
fn memory_that_is_gone() {
    for gone in 1..7 {
        let mut pair = connected();
        submit(&mut pair, 6);
        let bytes = pair.sides[0].host.payloads.remove(&gone).unwrap();
        let frame = frame(&mut pair);
        arrives(&mut pair, &[&frame]);
        let expected = if gone == 1 { vec![] } else { vec![1] };
        assert_eq!(delivered(&pair), expected, "{gone}");
        let c = pair.sides[1].endpoint.counters();
        assert_eq!(c.payloads_corrupt, if gone == 1 { 1 } else { 5 });
        pair.sides[0].host.payloads.insert(gone, bytes);
        pair.run_until(SECOND, |pair| pair.sides[0].host.completed.len() == 7);
        pair.resume(0, 2);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        let mut expected = [SendStatus::Delivered; 7];
        expected[gone as usize] = SendStatus::NotDelivered(Reason::BadMemory);
        assert_eq!(pair.statuses(0), expected);
        let others: Vec<u32> = (1..7).filter(|number| *number != gone).collect();
        assert_eq!(delivered(&pair), others);
        assert_eq!(pair.sides[0].endpoint.counters().memory_faults, 1);
    }
}
