//! Every profile through random runs: loss, a wild network, engines that die at any store, ports that close. `runs.rs` does the same at
//! length for the default; here each profile's own mechanisms must keep the same promises.

use portolan_sim::checks::order::Order as OrderCheck;
use portolan_sim::harness::*;
use portolan_transport::host::Reason::*;
use portolan_transport::host::SendStatus::*;
use portolan_transport::ident::{Peer, PortId, Priority};
use portolan_transport::policy::{AckRule, OnTimeout, Order, Policy, Profile, Recovery};

/// The profiles, and combinations of their answers that no paper has.
fn policies() -> Vec<(String, Policy)> {
    let named = Profile::ALL.map(|p| (p.name().to_string(), p.policy()));
    let default = Policy::default();
    let selective = Policy {
        recovery: Recovery::Selective,
        ..default
    };
    let mixed = [
        ("selective", selective),
        (
            "selective, resend",
            Policy {
                on_timeout: OnTimeout::Resend,
                ..selective
            },
        ),
        (
            "selective, arrival",
            Policy {
                order: Order::Arrival,
                window_messages: 16,
                ..selective
            },
        ),
        (
            "exact, probe, arrival",
            Policy {
                recovery: Recovery::GoBackN { stall: false },
                ack_rule: AckRule::Exact,
                order: Order::Arrival,
                window_messages: 8,
                ..default
            },
        ),
    ];
    let mixed = mixed.map(|(name, policy)| (name.to_string(), policy));
    named.into_iter().chain(mixed).collect()
}

/// Runs `test` for every profile and some seeds of each.
fn each(name: &str, count: u64, test: impl Fn(u64, Policy)) {
    let only = std::env::var("PORTOLAN_PROFILE").ok();
    for (profile, policy) in policies() {
        if only.as_ref().is_some_and(|only| *only != profile) {
            continue;
        }
        assert_eq!(policy.validate(), Ok(()));
        println!("PORTOLAN_PROFILE='{profile}'");
        seeds("profiles", name, count, |seed| test(seed, policy));
    }
}

/// Messages commit in order of arrival: the checker must know.
fn arrival_order(net: &Net) {
    let order = Box::new(OrderCheck::of_arrival());
    net.book.borrow_mut().checks.replace(order);
}

/// Two or three nodes with ports 1 to 4.
fn cluster(seed: u64, policy: Policy) -> (Net, u16) {
    let mut rng = Rng::new(seed ^ 0xc1a5);
    let nodes = 2 + rng.below(2) as u16;
    let queues = 1 + rng.below(2) as u8;
    let mut net = Net::with_policy(seed, nodes, queues, policy);
    if policy.order == Order::Arrival {
        arrival_order(&net);
    }
    if rng.chance(400) {
        (net.max_frame, net.segment) = (8958, 3776);
    }
    net.after_failure = *rng.pick(&[AfterFailure::Resume, AfterFailure::Drop]);
    net.first_number = (rng.u32() % 40).wrapping_add(u32::MAX - 30);
    for id in 1..=nodes {
        net.boot(node(id), queues);
        for port in 1..=4 {
            net.open(node(id), port, 1 + rng.below(6) as usize, 256 * 1024);
        }
    }
    (net, nodes)
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
        6..=8 => rng.below(20_000),
        _ => rng.below(200_000),
    };
    let priority = *rng.pick(&[Priority::Low, Priority::Low, Priority::High]);
    let deadline = if rng.chance(100) {
        net.now + rng.below(20 * MS)
    } else {
        u64::MAX
    };
    for _ in 0..*rng.pick(&[1, 1, 8]) {
        let (_, send) = net.send_with(from, to, priority, len as u32, deadline);
        if rng.chance(30) {
            let time = rng.below(MS);
            net.run_for(time);
            net.cancel(node(from.0), send);
        }
    }
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

// Loss of 0 to 30 %. Expect: all that has no deadline and was not cancelled arrives.
#[test]
fn loss() {
    each("loss", 3, |seed, policy| {
        let (mut net, nodes) = cluster(seed, policy);
        let mut rng = Rng::new(seed);
        net.faults = Faults::loss(rng.below(300) as u32);
        for _ in 0..30 {
            random_send(&mut net, &mut rng, nodes);
            let time = rng.below(500 * US);
            net.run_for(time);
        }
        net.settle(300 * SECOND);
        all_definite(&net);
    });
}

// Loss, duplication, reordering and corruption at once.
#[test]
fn wild_network() {
    each("wild_network", 3, |seed, policy| {
        let (mut net, nodes) = cluster(seed, policy);
        let mut rng = Rng::new(seed);
        net.faults = Faults::wild();
        for _ in 0..30 {
            random_send(&mut net, &mut rng, nodes);
            let time = rng.below(500 * US);
            net.run_for(time);
        }
        net.settle(300 * SECOND);
        all_definite(&net);
    });
}

// Engines die at any of their stores, and between them, in any network. Expect: as before.
#[test]
fn engine_deaths() {
    each("engine_deaths", 5, |seed, policy| {
        let (mut net, nodes) = cluster(seed, policy);
        let mut rng = Rng::new(seed);
        if rng.chance(500) {
            net.faults = Faults::wild();
            net.faults.late_by = *rng.pick(&[300 * US, 5 * MS]);
        }
        for _ in 0..40 {
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
        net.settle(300 * SECOND);
        all_definite(&net);
    });
}

// Every store of short messages around a long one, in turn, is the last one of the engine that makes it, at either end.
#[test]
fn death_at_every_store() {
    let only = std::env::var("PORTOLAN_PROFILE").ok();
    for (name, policy) in policies() {
        if only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        for victim in [1, 2] {
            for step in 1.. {
                let mut net = Net::with_policy(1, 2, 1, policy);
                if policy.order == Order::Arrival {
                    arrival_order(&net);
                }
                net.open(node(1), 1, 8, MIB);
                net.open(node(2), 2, 8, MIB);
                net.kill_at_step(engine(victim), step);
                for len in [100, 20_000, 0, 100] {
                    net.send((1, 1), (2, 2), len);
                }
                net.settle(20 * SECOND);
                all_delivered(&net);
                if net.deaths == 0 {
                    assert!(step > 10, "{name}: only {step} stores");
                    break;
                }
            }
        }
    }
}

// Ports close and open, tokens come late, deadlines pass, engines die. Expect: definite statuses, and an end.
#[test]
fn ports_close() {
    each("ports_close", 5, |seed, policy| {
        let policy = Policy {
            stream_idle_ms: 50,
            unreachable_after_ms: 500,
            ..policy
        };
        let (mut net, nodes) = cluster(seed, policy);
        let mut rng = Rng::new(seed);
        if rng.chance(500) {
            net.faults = Faults::wild();
        }
        for _ in 0..60 {
            let end = (
                1 + rng.below(u64::from(nodes)) as u16,
                1 + rng.below(4) as u16,
            );
            let owner = net.owner(node(end.0), PortId(end.1));
            let open = net.host(owner).max_len(PortId(end.1)).is_some();
            match rng.below(8) {
                0 if open => net.close(node(end.0), end.1),
                1 => net.kill_at_step(owner, 1 + rng.below(60)),
                _ => {
                    if !open && net.is_alive(owner) {
                        let tokens = rng.below(4) as usize;
                        net.open(node(end.0), end.1, tokens, 256 * 1024);
                    }
                    let to = (
                        1 + rng.below(u64::from(nodes)) as u16,
                        1 + rng.below(4) as u16,
                    );
                    if net.host(owner).max_len(PortId(end.1)).is_some() {
                        for _ in 0..*rng.pick(&[1, 3, 20]) {
                            let len = *rng.pick(&[0, 10, 1000, 5000, 100_000, MIB]);
                            let patience = *rng.pick(&[MS, 100 * MS]);
                            let deadline = net.now + rng.below(patience);
                            net.send_with(end, to, Priority::Low, len, deadline);
                        }
                    }
                }
            }
            let time = rng.below(2 * MS);
            net.run_for(time);
        }
        net.settle(300 * SECOND);
    });
}
