//! Time stamps in frames: what becomes of them.

use super::*;

/// What `from` knows of the round trip to `node`.
fn entry(pair: &Pair, from: usize, node: u16) -> peer::PeerEntry {
    let endpoint = &pair.sides[from].endpoint;
    let (_, entry) = endpoint
        .peers
        .iter()
        .find(|(_, entry)| entry.id.node == NodeId(node))
        .unwrap();
    entry.clone()
}

#[test]
fn the_round_trip_is_measured_without_what_the_peer_waited() {
    let mut pair = Pair::new(1472);
    for i in 0..40 {
        pair.send(0, 2, 100, Nanos::MAX);
        pair.send(0, 1, 100 + i, Nanos::MAX); // to itself
        pair.run_until(9 * LATENCY, |_| false); // longer than acknowledgements are delayed
    }
    assert!(pair.run_until(SECOND, Pair::all_settled));
    for node in [1, 2] {
        let entry = entry(&pair, 0, node);
        let exact = 2 * LATENCY..=2 * LATENCY + 256;
        assert!(exact.contains(&entry.rtt.srtt), "{:?}", entry.rtt);
        assert!(exact.contains(&entry.rtt.min), "{:?}", entry.rtt);
        assert!(entry.horizon > 0 && entry.horizon <= pair.now - LATENCY);
    }
    let answers = entry(&pair, 1, 1).rtt.srtt;
    assert!((2 * LATENCY..=2 * LATENCY + 256).contains(&answers));
}

#[test]
fn frames_sent_again_are_samples_too() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.loss = 300;
    for _ in 0..100 {
        pair.send(0, 2, 1300, Nanos::MAX);
    }
    assert!(pair.run_until(60 * SECOND, Pair::all_settled));
    assert!(pair.sides[0].endpoint.counters().retransmits > 10);
    let rtt = entry(&pair, 0, 2).rtt;
    // A hundred frames of one batch are stamped up to 100 ns late.
    let exact = 2 * LATENCY - 128..=2 * LATENCY + 256;
    assert!(exact.contains(&rtt.srtt), "{rtt:?}");
}

#[test]
fn a_successor_measures_anew() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_ne!(entry(&pair, 0, 2).rtt.srtt, 0);
    pair.take_over(1);
    let heard = |pair: &Pair| pair.sides[0].endpoint.counters().peer_takeovers == 1;
    assert!(pair.run_until(SECOND, heard));
    let entry = entry(&pair, 0, 2);
    // Its first frame cannot echo anything.
    assert_eq!((entry.rtt.srtt, entry.horizon), (0, 0));
}
