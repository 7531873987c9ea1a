//! Receive buffers that are fewer than their senders (transport.md §9): a budget, shares that go round, requests without data.

use std::cell::RefCell;
use std::collections::BTreeSet;

use portolan_sim::harness::*;
use portolan_transport::ident::Peer;
use portolan_transport::policy::{Policy, Profile};

/// Node 1 lets `shares` of the others fill 8 buffers each.
fn crowd(seed: u64, senders: u16, shares: u32) -> Net {
    let policy = Policy {
        eager_buffers: 8,
        eager_budget_buffers: 8 * shares,
        ..Policy::default()
    };
    let mut net = Net::with_policy(seed, 1 + senders, 1, policy);
    net.open(node(1), 1, 200, MIB);
    for id in 2..2 + senders {
        net.open(node(id), 1, 8, MIB);
    }
    net
}

/// What the others may fill at node 1, as they see it, with who may; and as node 1 sees it.
fn credit(net: &Net) -> (u32, BTreeSet<u16>, u32) {
    let (mut sum, mut who) = (0, BTreeSet::new());
    for peer in net.peers().into_iter().filter(|p| p.node != node(1)) {
        let known = net.endpoint(peer).peers().find(|p| p.peer == engine(1));
        let left = known.map_or(0, |p| p.credit);
        sum += left;
        if left > 0 {
            who.insert(peer.node.0);
        }
    }
    let given = net.endpoint(engine(1)).peers().map(|p| p.given).sum();
    (sum, who, given)
}

/// Runs until everything is settled; the budget holds all the time. Returns who had credit at some time.
fn run(net: &mut Net, budget: u32) -> BTreeSet<u16> {
    let lucky = RefCell::new(BTreeSet::new());
    net.run_until(60 * SECOND, "all sent", |net| {
        let (left, who, given) = credit(net);
        assert!(left <= given, "{left} in their hands, {given} given");
        assert!(given <= budget, "{given} given");
        lucky.borrow_mut().extend(who);
        net.book.borrow().is_settled()
    });
    all_delivered(net);
    lucky.into_inner()
}

// Eight senders, credit for two. Expect: never more than that, everything arrives, each had its turn.
#[test]
fn shares_go_round() {
    for loss in [0, 50] {
        let mut net = crowd(7, 8, 2);
        net.faults = Faults::loss(loss);
        net.faults.delay = 500 * US; // so that it takes longer than a turn
        for _ in 0..900 {
            for id in 2..10 {
                net.send((id, 1), (1, 1), 1_300);
            }
        }
        let lucky = run(&mut net, 16);
        assert_eq!(lucky, (2..10).collect());
    }
}

// The holder is idle, somebody else sends. Expect: the credit changes hands after what an acknowledgement takes, although every
// third frame is lost.
#[test]
fn idle_credit_is_called_back() {
    for seed in 0..20 {
        let mut net = crowd(seed, 2, 1);
        net.send((2, 1), (1, 1), 100);
        assert_eq!(run(&mut net, 8), [2].into());
        net.run_for(5 * MS);
        net.faults = Faults::loss(if seed > 0 { 300 } else { 0 });
        let asked = net.now;
        net.send((3, 1), (1, 1), 100);
        run(&mut net, 8);
        net.run_until(SECOND, "credit for node 3", |net| {
            let mut peers = net.endpoint(engine(1)).peers();
            peers.any(|p| p.given == 8 && p.peer.node == node(3))
        });
        let took = net.now - asked;
        assert!(seed > 0 || took < MS / 2, "{} us", took / US);
        net.faults = Faults::NONE;
        net.send((3, 1), (1, 1), 100);
        assert!(run(&mut net, 8).is_subset(&[3].into()));
        assert_eq!(credit(&net).1, [3].into());
    }
}

// The holder died. Expect: its share is taken once it is known to be unreachable, and everything works meanwhile.
#[test]
fn the_credit_of_the_dead_is_taken() {
    let mut net = crowd(3, 2, 1);
    net.send((2, 1), (1, 1), 100);
    run(&mut net, 8);
    net.link(node(1), node(2), false);
    net.run_for(5 * MS);
    let asked = net.now;
    for _ in 0..6_000 {
        net.send((3, 1), (1, 1), 1_300);
        net.run_for(MS);
    }
    net.run_until(SECOND, "all sent", |net| net.book.borrow().is_settled());
    all_delivered(&net);
    let given = net.endpoint(engine(1)).peers().find(|p| p.given > 0);
    assert_eq!(given.map(|p| p.peer.node), Some(node(3)));
    let patience = u64::from(net.policy.unreachable_after_ms) * MS;
    assert!(net.now > asked + patience);
    // And here it is again.
    net.link(node(1), node(2), true);
    net.send((2, 1), (1, 1), 100);
    net.settle(10 * SECOND);
    all_delivered(&net);
}

// Without any credit at all, every size arrives by request.
#[test]
fn asking_first_works_for_every_size() {
    let mut net = crowd(5, 2, 1);
    net.send((2, 1), (1, 1), 0); // takes the only share
    run(&mut net, 8);
    let sizes = [0, 1, 100, 1_300, 1_400, 5_000, 100_000];
    for len in sizes {
        net.send((3, 1), (1, 1), len);
    }
    let data = net.counter("credit_stalls");
    net.settle(SECOND);
    all_delivered(&net);
    assert_eq!(
        net.counter("credit_stalls"),
        data,
        "nobody waits for credit"
    );
}

// Engines of both ends are replaced and nodes restart while shares go round.
#[test]
fn shares_survive_successors() {
    seeds("credits", "shares_survive_successors", 10, |seed| {
        let mut net = crowd(seed, 4, 2);
        net.faults = Faults::loss(20);
        let mut rng = Rng::new(seed);
        for round in 0..40 {
            for id in 2..6 {
                for _ in 0..20 {
                    net.send((id, 1), (1, 1), 1_300);
                }
            }
            net.run_for(rng.below(4 * MS));
            let victim = engine(1 + rng.below(5) as u16);
            if round % 4 == 0 {
                net.kill(victim, MS);
            }
        }
        net.settle(60 * SECOND);
        all_delivered(&net);
        let engines: Vec<Peer> = net.peers();
        net.run_until(SECOND, "all alive", |net| {
            engines.iter().all(|peer| net.is_alive(*peer))
        });
        let (left, _, given) = credit(&net);
        assert!(left <= 16 + 8 && given <= 16, "{left} {given}");
    });
}

// Credit is used up and the frames that bring more are lost, under a policy whose timer sends data again. Expect: the sender asks instead
// of waiting for what nobody sends.
#[test]
fn the_frame_that_brings_credit_is_lost() {
    let policy = Policy {
        eager_buffers: 4,
        ..Profile::Gamma.policy()
    };
    let mut net = Net::with_policy(1, 2, 1, policy);
    net.open(node(1), 1, 0, MIB);
    net.open(node(2), 2, 40, MIB);
    net.send((1, 1), (2, 2), 1000);
    net.settle(SECOND);
    net.send_many((1, 1), (2, 2), 1000, 20);
    // The frames are on their way, the delayed acknowledgement is not.
    net.run_for(12 * US);
    net.link(node(1), node(2), false);
    net.run_for(500 * US);
    assert!(net.counter("credit_stalls") > 0);
    net.link(node(1), node(2), true);
    net.settle(SECOND);
    all_delivered(&net);
}
