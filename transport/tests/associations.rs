//! Who can work with whom (transport.md §2.2), and with which window (transport.md §4.2).

#![allow(clippy::expect_used)]

use portolan_sim::harness::*;
use portolan_transport::endpoint::{Misfit, PeerState, PeerStatus};
use portolan_transport::host::{Reason, SendStatus};
use portolan_transport::policy::{Policy, Profile, misfit_name};

/// Node 1 with one policy, node 2 with another.
fn between(a: Policy, b: Policy) -> Net {
    let mut net = Net::with_policy(1, 2, 1, a);
    net.policy = b;
    net.boot(node(2), 1);
    net.open(node(1), 1, 100, MIB);
    net.open(node(2), 2, 100, MIB);
    net
}

fn status(net: &Net, id: u16) -> PeerStatus<'_> {
    let mut peers = net.endpoint(engine(id)).peers();
    peers.next().expect("a peer")
}

// Every profile with every other. Expect: those that agree on recovery and acknowledgement work together, with the smaller of their windows;
// the others refuse each other, say what does not fit, and every send says so.
#[test]
fn profiles_that_fit_work_together() {
    for a in Profile::ALL {
        for b in Profile::ALL {
            let (ours, theirs) = (a.policy(), b.policy());
            let misfit = ours.misfit(&theirs.wire());
            assert_eq!(misfit, theirs.misfit(&ours.wire()), "both see it alike");
            let mut net = between(ours, theirs);
            let sends = [
                net.send((1, 1), (2, 2), 100),
                net.send((2, 2), (1, 1), 20_000),
                net.send((1, 1), (2, 2), 300_000),
            ];
            net.settle(10 * SECOND);
            for send in sends {
                let expected = match misfit {
                    None => SendStatus::Delivered,
                    Some(_) => SendStatus::NotDelivered(Reason::Incompatible),
                };
                let names = (a.name(), b.name());
                assert_eq!(net.status(send), Some(expected), "{names:?}");
            }
            for (id, other) in [(1, theirs), (2, ours)] {
                let status = status(&net, id);
                match misfit {
                    None => {
                        let window = ours.window_messages.min(theirs.window_messages);
                        assert_eq!(status.state, PeerState::Up);
                        assert_eq!(status.window_messages, window);
                        assert_eq!(status.policy, other.wire());
                    }
                    Some(detail) => {
                        assert_eq!(status.state, PeerState::Incompatible);
                        let name = misfit_name(detail);
                        assert_eq!(status.misfit, Some(Misfit::Policy(name)));
                    }
                }
            }
        }
    }
}

// A window of four meets one of sixty-four. Expect: never more than four under way.
#[test]
fn the_smaller_window_holds() {
    let mut small = Policy {
        window_messages: 4,
        ..Policy::default()
    };
    small.stream_idle_ms = 100;
    let mut net = between(Policy::default(), small);
    net.send_many((1, 1), (2, 2), 1_000, 60);
    net.send_many((2, 2), (1, 1), 1_000, 60);
    net.run_until(SECOND, "all sent", |net| {
        for id in [1, 2] {
            let under_way = net.endpoint(engine(id)).peers().map(|p| p.in_flight);
            assert!(under_way.sum::<u32>() <= 4);
        }
        net.book.borrow().is_settled()
    });
    all_delivered(&net);
    assert_eq!(net.counter("protocol_violations"), 0);
}

// A peer that did not fit comes back with a policy that does. Expect: it is asked again, and talked to.
#[test]
fn a_peer_that_fits_now_is_talked_to() {
    let mut net = between(Policy::default(), Profile::Rmpp.policy());
    let refused = net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    let incompatible = SendStatus::NotDelivered(Reason::Incompatible);
    assert_eq!(net.status(refused), Some(incompatible));
    net.policy = Policy::default();
    net.boot(node(2), 1);
    net.open(node(2), 2, 100, MIB);
    net.run_for(2 * SECOND);
    let sent = net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    assert_eq!(net.status(sent), Some(SendStatus::Delivered));
    assert_eq!(status(&net, 1).misfit, None);
}
