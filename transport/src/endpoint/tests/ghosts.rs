//! Frames of the past come again.

use super::*;

/// The frames so far that went to `node`.
fn frames_to(pair: &Pair, node: usize) -> Vec<Vec<u8>> {
    let to_node = pair.log.iter().filter(|frame| frame.0 == node);
    to_node.map(|frame| frame.1.clone()).collect()
}

/// They arrive again, with time to answer between them.
fn replay(pair: &mut Pair, node: usize, frames: &[Vec<u8>]) {
    for frame in frames {
        let (now, side) = (pair.now, &mut pair.sides[node]);
        let _ = side.endpoint.handle_frame(now, &[frame], &mut side.host);
        side.endpoint.check_consistency();
        pair.run_until(5 * LATENCY, |_| false);
    }
}

#[test]
fn a_closed_epoch_stays_closed() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let old = frames_to(&pair, 1);
    let empty = |pair: &Pair| pair.sides[1].host.receiving.is_empty();
    assert!(pair.run_until(70 * SECOND, empty));
    // The first frames come again, START included. Expect: refused, nothing delivered, no record.
    replay(&mut pair, 1, &old);
    assert!(pair.sides[1].endpoint.counters().streams_refused > 0);
    assert!(pair.sides[1].host.receiving.is_empty());
    assert_eq!(pair.sides[1].host.delivered.len(), 1);
    // The same after the engine was replaced: the floor is durable.
    pair.take_over(1);
    pair.send(1, 1, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    replay(&mut pair, 1, &old);
    assert_eq!(pair.sides[1].host.delivered.len(), 1);
}

#[test]
fn what_a_closed_port_refused_never_reaches_its_next_owner() {
    let mut pair = Pair::new(1472);
    pair.close_port(1);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(
        pair.statuses(0),
        [SendStatus::NotDelivered(Reason::PortClosed)]
    );
    let old = frames_to(&pair, 1);
    pair.open_port(1, 10);
    replay(&mut pair, 1, &old);
    assert!(pair.sides[1].host.delivered.is_empty());
}

#[test]
fn a_superseded_incarnation_never_comes_back() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let old = frames_to(&pair, 0);
    pair.sides[1] = Pair::new(1472).sides.into_iter().nth(1).unwrap();
    pair.sides[1].endpoint.config.incarnation = 99;
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    // HELLO, HELLO-ACK and all else of the dead node, twice. Expect: the living one stays known, sends go on.
    for _ in 0..2 {
        replay(&mut pair, 0, &old);
    }
    assert_eq!(pair.sides[0].endpoint.counters().peer_restarts, 1);
    assert!(
        pair.sides[0]
            .endpoint
            .peers()
            .all(|peer| peer.incarnation == 99)
    );
    let slot = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[slot as usize], SendStatus::Delivered);
}
