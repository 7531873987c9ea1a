//! Random runs: any traffic, any faults, engines that die at any store; the book and the hosts check every promise.

use portolan_sim::harness::*;
use portolan_transport::host::Reason::*;
use portolan_transport::host::SendStatus::*;
use portolan_transport::ident::{Peer, PortId, Priority};
use portolan_transport::policy::Policy;

/// A cluster with ports 1 to 4 on each node, and the nodes' number.
fn cluster(seed: u64, policy: Policy) -> (Net, u16) {
    let mut rng = Rng::new(seed ^ 0xc1a5);
    let nodes = 2 + rng.below(2) as u16;
    let queues = 1 + rng.below(2) as u8;
    let mut net = Net::with_policy(seed, nodes, queues, policy);
    if rng.chance(400) {
        (net.max_frame, net.segment) = (8958, 3776);
    }
    net.after_failure = *rng.pick(&[AfterFailure::Resume, AfterFailure::Drop]);
    net.first_number = (rng.u32() % 40).wrapping_add(u32::MAX - 30);
    for id in 1..=nodes {
        net.boot(node(id), queues);
        for port in 1..=4 {
            net.open(node(id), port, 1 + rng.below(6) as usize, 2 * MIB);
        }
    }
    (net, nodes)
}

/// Nothing worse happened than deadlines, cancels and what the application dropped after them: nobody may say *maybe*.
fn all_definite(net: &Net) {
    let book = net.book.borrow();
    for id in 0..book.len() as u64 {
        let status = book.status(id);
        assert!(
            matches!(
                status,
                Some(Delivered | NotDelivered(Deadline | Cancelled | Dropped))
            ),
            "{:?}",
            book.message(id)
        );
    }
}

/// One random send between any two ports of the cluster.
fn random_send(net: &mut Net, rng: &mut Rng, nodes: u16) {
    let mut end = || {
        (
            1 + rng.below(u64::from(nodes)) as u16,
            1 + rng.below(4) as u16,
        )
    };
    let (from, to) = (end(), end());
    let len = match rng.below(10) {
        0 => 0,
        1..=5 => rng.below(1300),
        6..=7 => rng.below(20_000),
        8 => rng.below(200_000),
        _ => rng.below(u64::from(2 * MIB)),
    };
    let priority = if rng.chance(300) {
        Priority::High
    } else {
        Priority::Low
    };
    let deadline = if rng.chance(100) {
        net.now + rng.below(20 * MS)
    } else {
        u64::MAX
    };
    let (_, send) = net.send_with(from, to, priority, len as u32, deadline);
    if rng.chance(30) {
        let time = rng.below(2 * MS);
        net.run_for(time);
        net.cancel(node(from.0), send);
    }
}

// Traffic of all kinds under loss of 0 to 30 %, nothing else. Expect: all that has no deadline and was not cancelled arrives.
#[test]
fn loss() {
    seeds("runs", "loss", 12, |seed| {
        let (mut net, nodes) = cluster(seed, Policy::default());
        let mut rng = Rng::new(seed);
        net.faults = Faults::loss(rng.below(300) as u32);
        for _ in 0..60 {
            random_send(&mut net, &mut rng, nodes);
            let time = rng.below(500 * US);
            net.run_for(time);
        }
        net.settle(120 * SECOND);
        all_definite(&net);
    });
}

// Loss, duplication, reordering and corruption at once.
#[test]
fn wild_network() {
    seeds("runs", "wild_network", 12, |seed| {
        let (mut net, nodes) = cluster(seed, Policy::default());
        let mut rng = Rng::new(seed);
        net.faults = Faults::wild();
        for _ in 0..80 {
            random_send(&mut net, &mut rng, nodes);
            let time = rng.below(500 * US);
            net.run_for(time);
        }
        net.settle(120 * SECOND);
        all_definite(&net);
    });
}

// The frames a path carries grow and shrink in the middle of bursts, and answers come late: a message that was long goes out again as
// a short one, and the other way round. Expect: everything arrives.
#[test]
fn paths_that_change() {
    seeds("runs", "paths_that_change", 20, |seed| {
        let (mut net, nodes) = cluster(seed, Policy::default());
        let mut rng = Rng::new(seed);
        net.faults = Faults {
            late_by: 5 * MS,
            ..Faults::wild()
        };
        for _ in 0..20 {
            let (from, to) = (
                1 + rng.below(u64::from(nodes)) as u16,
                1 + rng.below(u64::from(nodes)) as u16,
            );
            let longest = u64::from(net.max_frame);
            for _ in 0..rng.below(40) {
                net.send((from, 1), (to, 2), rng.below(longest) as u32);
            }
            for _ in 0..rng.below(6) {
                net.path_to(node(to), *rng.pick(&[576, net.max_frame]));
                let time = rng.below(2 * MS);
                net.run_for(time);
            }
        }
        net.settle(120 * SECOND);
        all_definite(&net);
    });
}

// Engines die at any of their stores, and between them. Expect: what has no deadline, was not cancelled and met no closed port is
// delivered, once.
#[test]
fn engine_deaths() {
    seeds("runs", "engine_deaths", 30, |seed| {
        let (mut net, nodes) = cluster(seed, Policy::default());
        let mut rng = Rng::new(seed);
        if rng.chance(500) {
            net.faults = Faults::wild();
            // So late that a frame may meet the engine's successor.
            net.faults.late_by = *rng.pick(&[300 * US, 5 * MS]);
        }
        for _ in 0..60 {
            random_send(&mut net, &mut rng, nodes);
            let peers = net.peers();
            let victim: Peer = *rng.pick(&peers);
            match rng.below(6) {
                0 => net.kill(victim, rng.below(3 * MS)),
                1..=2 => net.kill_at_step(victim, 1 + rng.below(60)),
                _ => {}
            }
            let time = rng.below(MS);
            net.run_for(time);
        }
        net.settle(120 * SECOND);
        all_definite(&net);
    });
}

// Every store of one short and one long message, in turn, is the last one of the engine that makes it, at either end.
#[test]
fn death_at_every_store() {
    for victim in [1, 2] {
        for step in 1.. {
            let mut net = pair();
            net.kill_at_step(engine(victim), step);
            net.send((1, 1), (2, 2), 100);
            net.send((1, 1), (2, 2), 20_000);
            net.send((1, 1), (2, 2), 100);
            net.settle(10 * SECOND);
            all_delivered(&net);
            if net.deaths == 0 {
                assert!(
                    step > 10,
                    "the engine makes fewer stores than it must: {step}"
                );
                break;
            }
        }
    }
}

// Ports close and open, tokens come late, links go down, nodes restart, all at random.
#[test]
fn everything() {
    seeds("runs", "everything", 30, |seed| {
        let policy = Policy {
            unreachable_after_ms: 200,
            stream_idle_ms: 50,
            ..Policy::default()
        };
        let (mut net, nodes) = cluster(seed, policy);
        let mut rng = Rng::new(seed);
        // A record of a node that died and never speaks to this engine again is kept: then small ledgers would fill for ever.
        let small = rng.chance(200);
        if small {
            for peer in net.peers() {
                net.host(peer).max_records = 1 + rng.below(6) as usize;
            }
        }
        if rng.chance(500) {
            net.faults = Faults::wild();
            // So late that a frame may meet the engine's successor.
            net.faults.late_by = *rng.pick(&[300 * US, 5 * MS]);
        }
        for _ in 0..150 {
            let open = |net: &mut Net, id: u16, port: u16| {
                let owner = net.owner(node(id), PortId(port));
                net.host(owner).max_len(PortId(port)).is_some()
            };
            let mut end = || {
                (
                    1 + rng.below(u64::from(nodes)) as u16,
                    1 + rng.below(4) as u16,
                )
            };
            let (one, other) = (end(), end());
            match rng.below(20) {
                0 if open(&mut net, one.0, one.1) => net.close(node(one.0), one.1),
                1 => net.link(node(one.0), node(other.0), false),
                2 if !small => {
                    let queues = 1 + rng.below(2) as u8;
                    net.boot(node(one.0), queues);
                }
                3..=4 => net.kill(net.owner(node(one.0), PortId(one.1)), rng.below(3 * MS)),
                5..=6 => net.kill_at_step(net.owner(node(one.0), PortId(one.1)), 1 + rng.below(60)),
                7..=9 => net.link(node(one.0), node(other.0), true),
                _ => {
                    let owner = net.owner(node(one.0), PortId(one.1));
                    if !open(&mut net, one.0, one.1) && net.is_alive(owner) {
                        net.open(node(one.0), one.1, rng.below(4) as usize, MIB);
                    }
                    if open(&mut net, one.0, one.1) {
                        let priority = *rng.pick(&[Priority::Low, Priority::High]);
                        for _ in 0..*rng.pick(&[1, 1, 3, 40]) {
                            let len = *rng.pick(&[0, 10, 1000, 5000, 100_000, MIB + 1]);
                            let patience = *rng.pick(&[MS, 10 * MS, 100 * MS, SECOND]);
                            let deadline = net.now + rng.below(patience);
                            let (_, send) = net.send_with(one, other, priority, len, deadline);
                            if rng.chance(50) {
                                net.cancel(node(one.0), send);
                            }
                        }
                    }
                }
            }
            let time = match rng.below(10) {
                0 => rng.below(300 * MS),
                _ => rng.below(MS),
            };
            net.run_for(time);
        }
        for a in 1..=nodes {
            (1..=nodes).for_each(|b| net.link(node(a), node(b), true));
        }
        net.settle(120 * SECOND);
    });
}
