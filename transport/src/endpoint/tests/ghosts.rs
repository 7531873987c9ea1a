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

#[test]
fn what_a_dead_application_left_unsent_holds_nobody_up() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 10, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.sides[1].host.tokens.clear();
    let left: Vec<u32> = (0..200)
        .map(|_| pair.send(0, 2, 3_000, Nanos::MAX))
        .collect();
    pair.run_until(20 * LATENCY, |_| false);
    // Application and engine die together; another application opens the port at once, another engine takes over.
    let died = SendStatus::MaybeDelivered(Reason::PortClosed);
    pair.sides[0]
        .host
        .completed
        .extend(left.into_iter().map(|slot| (slot, died)));
    pair.take_over(0);
    pair.provide(1, 10);
    let next = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND / 10, Pair::all_settled), "held up");
    assert_eq!(pair.statuses(0)[next as usize], SendStatus::Delivered);
    pair.check_deliveries();
}

#[test]
fn a_node_that_is_gone_when_an_engine_takes_over_costs_its_sends_only() {
    let mut pair = Pair::new(1472);
    pair.loss = 1000;
    let deadline = pair.now + SECOND;
    let slot = pair.send(0, 2, 100, deadline);
    pair.run_until(20 * LATENCY, |_| false);
    let durable = pair.sides[0].host.durable();
    let mut config = pair.sides[0].endpoint.config().clone();
    config.engine_epoch += 1;
    // No `set_node`: it was removed, or its address is unknown since.
    pair.sides[0].endpoint = Endpoint::restore(config, pair.now, &durable);
    assert!(pair.run_until(2 * SECOND, Pair::all_settled));
    let maybe = SendStatus::MaybeDelivered(Reason::Deadline);
    assert_eq!(pair.statuses(0)[slot as usize], maybe);
    let empty = |pair: &Pair| pair.sides[0].host.sending.is_empty();
    assert!(pair.run_until(130 * SECOND, empty), "its record is kept");
}

#[test]
fn a_peer_that_comes_back_to_a_new_engine_is_answered() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    // The link is cut; an engine dies meanwhile, and its successor gives up.
    pair.loss = 1000;
    pair.take_over(1);
    let idle = |pair: &Pair| {
        pair.sides[1]
            .endpoint
            .peers()
            .all(|p| p.state == PeerState::Idle)
    };
    assert!(pair.run_until(10 * SECOND, idle));
    pair.loss = 0;
    let slot = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[slot as usize], SendStatus::Delivered);
    pair.check_deliveries();
}
