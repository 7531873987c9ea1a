//! Idle peers cost no volatile memory, and are met again (transport.md §2.8).

use portolan_sim::harness::*;
use portolan_transport::endpoint::PeerState;
use portolan_transport::policy::Policy;

fn policy() -> Policy {
    Policy {
        stream_idle_ms: 20,
        peer_idle_ms: 200,
        ..Policy::default()
    }
}

fn net(seed: u64, nodes: u16, policy: Policy) -> Net {
    let mut net = Net::with_policy(seed, nodes, 1, policy);
    for id in 1..=nodes {
        net.open(node(id), id, 8, MIB);
    }
    net
}

/// How many peers an engine knows.
fn known(net: &Net, id: u16) -> usize {
    net.endpoint(engine(id)).peers().count()
}

// Both fall silent. Expect: neither knows the other; then everything works again, as often as one likes.
#[test]
fn idle_peers_are_forgotten_and_met_again() {
    let mut net = net(1, 2, policy());
    for round in 1..5 {
        net.send((1, 1), (2, 2), 100);
        net.send((2, 2), (1, 1), 100_000);
        net.settle(SECOND);
        assert_eq!((known(&net, 1), known(&net, 2)), (1, 1));
        net.run_for(SECOND / 2);
        assert_eq!((known(&net, 1), known(&net, 2)), (0, 0));
        assert_eq!(net.counter("peers_forgotten"), 2 * round);
        for id in [1, 2] {
            let timeout = net.endpoint(engine(id)).poll_timeout();
            assert!(timeout.is_none_or(|at| at > net.now), "nothing to do");
        }
    }
    all_delivered(&net);
    assert_eq!(
        (net.counter("peer_restarts"), net.counter("resets_sent")),
        (0, 0)
    );
}

/// Node 1 forgets after 200 ms, node 2 does not.
fn one_sided(seed: u64) -> Net {
    let mut net = net(seed, 2, policy());
    net.policy.peer_idle_ms = 3_600_000;
    net.boot(node(2), 1);
    net.open(node(2), 2, 8, MIB);
    net.send((1, 1), (2, 2), 100);
    net.send_many((2, 2), (1, 1), 1_300, 200);
    net.settle(SECOND);
    net.run_for(SECOND / 2);
    assert_eq!((known(&net, 1), known(&net, 2)), (0, 1));
    net
}

// One forgot, the other sends. Expect: its first frame is taken, without RESET and without waiting for a timer.
#[test]
fn a_frame_of_a_forgotten_peer_is_taken() {
    let mut net = one_sided(2);
    let asked = net.now;
    net.send((2, 2), (1, 1), 100);
    net.settle(SECOND);
    all_delivered(&net);
    let delivered = net.events.len();
    assert!(delivered > 0 && net.now - asked < 10 * MS);
    assert_eq!(
        (net.counter("resets_sent"), net.counter("timeouts")),
        (0, 0)
    );
    assert_eq!(net.counter("frames_wrong_incarnation"), 0);
}

// One forgot and sends again, its count of credit anew, to one that remembers a higher one. Expect: no more than the credit, and all of it.
#[test]
fn counts_begin_anew_where_they_were_forgotten() {
    let mut net = one_sided(3);
    let eager = net.policy.eager_buffers;
    // Now the one that remembers is sent to.
    net.send_many((1, 1), (2, 2), 1_300, 300);
    net.run_until(SECOND, "all sent", |net| {
        for id in [1, 2] {
            for peer in net.endpoint(engine(id)).peers() {
                assert!(peer.credit <= eager && peer.given <= eager, "{peer:?}");
            }
        }
        net.book.borrow().is_settled()
    });
    all_delivered(&net);
    // And the other way round.
    net.send_many((2, 2), (1, 1), 1_300, 300);
    net.settle(SECOND);
    all_delivered(&net);
}

// Shares of a budget. Expect: they come back before their holders are forgotten.
#[test]
fn shares_come_back_first() {
    let policy = Policy {
        eager_buffers: 8,
        eager_budget_buffers: 16,
        ..policy()
    };
    let mut net = net(4, 5, policy);
    for _ in 0..3 {
        for id in 2..6 {
            net.send((id, id), (1, 1), 100);
        }
        net.settle(SECOND);
        net.run_for(SECOND); // what comes back is a sign of life
        assert_eq!(known(&net, 1), 0);
    }
    all_delivered(&net);
}

// A peer restarted, and what its former self said arrives after it was forgotten. Expect: HELLOs of the former self change
// nothing, and neither do its answers while ours is unanswered.
#[test]
fn a_superseded_incarnation_stays_superseded() {
    let mut net = net(5, 2, policy());
    net.record(true);
    net.send((2, 2), (1, 1), 100);
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    let ghosts = net.record(false);
    net.boot(node(2), 1);
    net.open(node(2), 2, 8, MIB);
    net.send((2, 2), (1, 1), 100);
    net.settle(SECOND);
    let now = |net: &Net| {
        net.endpoint(engine(1))
            .peers()
            .next()
            .map(|p| p.incarnation)
    };
    let present = now(&net);
    net.run_for(SECOND);
    assert_eq!(known(&net, 1), 0);
    for (to, frame) in ghosts.clone() {
        if to == engine(1) {
            net.inject(to, frame);
            net.run_for(50 * US);
        }
    }
    net.run_for(20 * MS);
    assert_eq!(now(&net), present);
    // The same with nobody to answer: only the ghost is heard.
    net.run_for(SECOND);
    net.link(node(1), node(2), false);
    for (to, frame) in ghosts {
        if to == engine(1) {
            net.inject(to, frame);
            net.run_for(50 * US);
        }
    }
    assert_eq!(now(&net), present);
    net.link(node(1), node(2), true);
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    all_delivered(&net);
    assert_eq!(net.counter("peer_restarts"), 1);
}

// More nodes than the table holds, one after the other. Expect: those that are idle make room.
#[test]
fn a_full_table_makes_room() {
    let policy = Policy {
        peer_idle_ms: 3_600_000,
        ..policy()
    };
    let mut net = net(6, 90, policy);
    for id in 2..=90 {
        net.send((1, 1), (id, id), 100);
        net.settle(SECOND);
        net.run_for(SECOND / 10);
    }
    all_delivered(&net);
    assert!(known(&net, 1) <= 64);
    let states = net.endpoint(engine(1)).peers();
    assert!(states.into_iter().all(|p| p.state == PeerState::Up));
}

// Engines die while peers are forgotten and met.
#[test]
fn forgetting_and_successors() {
    seeds("idle", "forgetting_and_successors", 10, |seed| {
        let mut net = net(seed, 3, policy());
        let mut rng = Rng::new(seed);
        net.faults = Faults::loss(20);
        for _ in 0..40 {
            let from = 1 + rng.below(3) as u16;
            let to = 1 + rng.below(3) as u16;
            net.send((from, from), (to, to), rng.below(5_000) as u32);
            net.run_for(rng.below(SECOND / 2));
            if rng.chance(200) {
                net.kill(engine(1 + rng.below(3) as u16), MS);
            }
        }
        net.settle(60 * SECOND);
        all_delivered(&net);
    });
}
