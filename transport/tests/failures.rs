//! Conversations that something interrupts: engines, nodes and links that die, frames that are lost, late, changed or stale.

#![allow(clippy::unwrap_used)]

use portolan_sim::harness::*;
use portolan_transport::host::Reason::*;
use portolan_transport::host::SendStatus::*;
use portolan_transport::ident::{PortId, Priority};

// The peer restarts while messages are outstanding. Expect: PeerRestarted for what was under way, Delivered for what comes later.
#[test]
fn peer_restarts() {
    for pause in [20, 100, 500, 2000] {
        let mut net = pair();
        let messages: Vec<u64> = net.send_many((1, 1), (2, 2), 50_000, 30);
        net.run_for(pause * US);
        net.boot(node(2), 1);
        net.open(node(2), 2, 8, MIB);
        net.settle(10 * SECOND);
        for message in messages {
            let status = net.status(message).unwrap();
            assert!(
                matches!(
                    status,
                    Delivered | MaybeDelivered(PeerRestarted) | NotDelivered(PeerRestarted)
                ),
                "{status:?}"
            );
        }
        // Who had nothing under way learns of the restart by the first message, which it cannot know the fate of.
        let first = net.send((1, 1), (2, 2), 50_000);
        let back = net.send((2, 2), (1, 1), 50_000);
        net.settle(SECOND);
        let restarted = Some(MaybeDelivered(PeerRestarted));
        assert!(net.status(first) == Some(Delivered) || net.status(first) == restarted);
        let after = net.send((1, 1), (2, 2), 50_000);
        net.settle(SECOND);
        assert_eq!([after, back].map(|m| net.status(m)), [Some(Delivered); 2]);
    }
}

// Both restart at once. Expect: they find each other again.
#[test]
fn both_restart() {
    let mut net = pair();
    net.faults = Faults {
        late: 300,
        late_by: 5 * MS,
        ..Faults::NONE
    };
    net.send_many((1, 1), (2, 2), 50_000, 10);
    net.send_many((2, 2), (1, 1), 50_000, 10);
    net.run_for(MS);
    net.boot(node(1), 1);
    net.boot(node(2), 1);
    net.open(node(1), 1, 8, MIB);
    net.open(node(2), 2, 8, MIB);
    let messages = [
        net.send((1, 1), (2, 2), 50_000),
        net.send((2, 2), (1, 1), 50_000),
    ];
    net.settle(SECOND);
    assert_eq!(messages.map(|m| net.status(m)), [Some(Delivered); 2]);
}

// Frames of an earlier incarnation arrive again, all of them, at both ends. Expect: nothing is delivered, nothing breaks.
#[test]
fn stale_incarnation() {
    let mut net = pair();
    net.record(true);
    net.send_many((1, 1), (2, 2), 5_000, 5);
    net.send_many((2, 2), (1, 1), 500, 5);
    net.settle(SECOND);
    let old = net.record(false);
    net.boot(node(2), 1);
    net.open(node(2), 2, 8, MIB);
    let message = net.send((1, 1), (2, 2), 100);
    net.settle(10 * SECOND);
    assert!(matches!(
        net.status(message),
        Some(Delivered | MaybeDelivered(PeerRestarted) | NotDelivered(PeerRestarted))
    ));
    let delivered = net.book.borrow().delivered();
    for (to, frame) in old {
        net.inject(to, frame);
        net.run_for(10 * US);
    }
    net.run_for(SECOND);
    assert_eq!(net.book.borrow().delivered(), delivered);
    let message = net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    assert_eq!(net.status(message), Some(Delivered));
}

// Every frame of a conversation arrives again, later. Expect: nothing twice.
#[test]
fn replay() {
    let mut net = pair();
    net.record(true);
    for len in [10, 5_000, 200_000] {
        net.send((1, 1), (2, 2), len);
        net.send((2, 2), (1, 1), len);
    }
    net.settle(SECOND);
    let old = net.record(false);
    for (to, frame) in old {
        net.inject(to, frame);
    }
    net.run_for(SECOND);
    all_delivered(&net);
    net.send((1, 1), (2, 2), 10);
    net.settle(SECOND);
    all_delivered(&net);
}

// The same after the streams were closed and forgotten. Expect: refused, not opened again.
#[test]
fn replay_after_close() {
    let mut net = pair();
    net.record(true);
    net.send((1, 1), (2, 2), 10);
    net.send((2, 2), (1, 1), 5_000);
    net.settle(SECOND);
    let old = net.record(false);
    let idle = u64::from(net.policy.stream_idle_ms) * MS;
    net.run_for(2 * idle);
    assert_eq!(net.host(engine(2)).records(), (0, 0));
    for (to, frame) in old {
        net.inject(to, frame);
    }
    net.run_for(SECOND);
    assert_eq!(net.host(engine(2)).records(), (0, 0));
    let after = net.send((1, 1), (2, 2), 10);
    net.settle(SECOND);
    assert_eq!(net.status(after), Some(Delivered));
}

// Frames of an engine arrive when its successor is at work. Expect: dropped, each of them counted.
#[test]
fn replay_after_take_over() {
    let mut net = pair();
    net.record(true);
    net.send_many((1, 1), (2, 2), 5_000, 5);
    net.settle(SECOND);
    let old = net.record(false);
    net.kill(engine(1), MS);
    net.send((1, 1), (2, 2), 10);
    net.settle(SECOND);
    let from_old = old.iter().filter(|(to, _)| *to == engine(2)).count() as u64;
    for (to, frame) in old {
        net.inject(to, frame);
    }
    net.run_for(SECOND);
    assert_eq!(net.counter("frames_stale_engine"), from_old);
    net.send((1, 1), (2, 2), 10);
    net.settle(SECOND);
    all_delivered(&net);
}

// The link is down for longer than patience. Expect: Unreachable; after it is mended, new messages arrive.
#[test]
fn unreachable() {
    let mut net = pair();
    let first = net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    net.link(node(1), node(2), false);
    let lost = [100, 100_000].map(|len| net.send((1, 1), (2, 2), len));
    let start = net.now;
    net.settle(30 * SECOND);
    let patience = u64::from(net.policy.unreachable_after_ms) * MS;
    assert!(net.now - start >= patience && net.now - start < 3 * patience);
    assert!(net.counter("peers_unreachable") > 0);
    assert_eq!(net.status(first), Some(Delivered));
    for message in lost {
        assert!(matches!(
            net.status(message),
            Some(NotDelivered(Unreachable) | MaybeDelivered(Unreachable))
        ));
    }
    net.link(node(1), node(2), true);
    let after = net.send((1, 1), (2, 2), 100);
    net.settle(10 * SECOND);
    assert_eq!(net.status(after), Some(Delivered));
}

// The acknowledgement of a delivered message is lost for ever. Expect: MaybeDelivered, not NotDelivered (the book checks), and no
// second delivery after the link is back.
#[test]
fn unreachable_after_delivery() {
    let mut net = pair();
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    let message = net.send((1, 1), (2, 2), 100);
    net.run_until(SECOND, "it arrives", |net| {
        net.book.borrow().message(message).commits == 1
    });
    net.link(node(1), node(2), false);
    net.settle(30 * SECOND);
    assert_eq!(net.status(message), Some(MaybeDelivered(Unreachable)));
    assert_eq!(net.counter("sends_maybe"), 1);
    net.link(node(1), node(2), true);
    let after = net.send((1, 1), (2, 2), 100);
    net.settle(10 * SECOND);
    assert_eq!(net.status(after), Some(Delivered));
}

// The receiving engine dies in the middle of a long message, the sending one a little later. Expect: nothing but a pause.
#[test]
fn take_over_mid_message() {
    for (victim, pause) in [(2, 100), (1, 100), (2, 1000), (1, 1000), (2, 3000)] {
        let mut net = pair();
        for _ in 0..3 {
            net.send((1, 1), (2, 2), MIB);
            net.send((1, 1), (2, 2), 700);
        }
        net.run_for(pause * US);
        net.kill(engine(victim), MS);
        net.settle(5 * SECOND);
        all_delivered(&net);
        assert_eq!(net.deaths, 1);
    }
}

// Both engines die together.
#[test]
fn take_over_both() {
    let mut net = pair();
    for _ in 0..5 {
        net.send((1, 1), (2, 2), 400_000);
        net.send((2, 2), (1, 1), 400_000);
        net.run_for(300 * US);
        net.kill(engine(1), MS);
        net.kill(engine(2), 2 * MS);
        net.run_for(3 * MS);
    }
    net.settle(5 * SECOND);
    all_delivered(&net);
    assert_eq!(net.deaths, 10);
}

// A receiver's engine dies; its successor announces itself. Expect: the transfer goes on long before a sender's timer at its upper
// bound would have noticed.
#[test]
fn resume_is_prompt() {
    let mut net = pair();
    let message = net.send((1, 1), (2, 2), 4 * MIB);
    net.run_for(500 * US);
    net.kill(engine(2), 100 * MS);
    net.run_for(100 * MS + 1);
    let reborn = net.now;
    net.run_until(SECOND, "it arrives", |net| net.status(message).is_some());
    assert!(
        net.now - reborn < 60 * MS,
        "{} ms after the takeover",
        (net.now - reborn) / MS
    );
}

// A message waiting for a token outlives its receiver's engine.
#[test]
fn take_over_while_waiting_for_a_buffer() {
    let mut net = pair();
    net.open(node(2), 3, 0, MIB);
    let messages = [100, 100_000].map(|len| net.send((1, 1), (2, 3), len));
    net.run_for(30 * MS);
    net.kill(engine(2), MS);
    net.run_for(30 * MS);
    net.kill(engine(1), MS);
    net.run_for(30 * MS);
    net.provide(node(2), PortId(3), Priority::Low, MIB);
    net.provide(node(2), PortId(3), Priority::Low, MIB);
    net.settle(2 * SECOND);
    assert_eq!(messages.map(|m| net.status(m)), [Some(Delivered); 2]);
}

// A refusal (too long) whose status was not delivered when the receiver's engine died. Expect: still TooLong.
#[test]
fn take_over_and_drops() {
    for pause in [5, 10, 15, 20, 30, 60, 200] {
        for victim in [1, 2] {
            let mut net = pair();
            net.open(node(2), 3, 4, 1000);
            let long = net.send((1, 1), (2, 3), 2000);
            let fits = net.send((1, 1), (2, 3), 500);
            net.run_for(pause * US);
            net.kill(engine(victim), MS);
            net.settle(5 * SECOND);
            assert_eq!(net.status(long), Some(NotDelivered(TooLong)));
            assert_eq!(net.status(fits), Some(Delivered));
        }
    }
}

// A port closes while its engine is dead. Expect: the successor tells the senders.
#[test]
fn port_closes_during_take_over() {
    let mut net = pair();
    let messages: Vec<u64> = net.send_many((1, 1), (2, 2), 100_000, 10);
    net.run_for(200 * US);
    net.kill(engine(2), 5 * MS);
    net.close(node(2), 2);
    net.settle(5 * SECOND);
    for message in messages {
        assert!(matches!(
            net.status(message),
            Some(Delivered | NotDelivered(PortClosed))
        ));
    }
}

// A port closes and another application opens it while the engine is dead. Expect: what was sent to the old owner is not given to
// the new one.
#[test]
fn port_reopens_during_take_over() {
    let mut net = pair();
    net.after_failure = AfterFailure::Drop;
    let old = net.send_many((1, 1), (2, 2), 100_000, 10);
    net.run_for(200 * US);
    net.kill(engine(2), 5 * MS);
    net.close(node(2), 2);
    net.open(node(2), 2, 8, MIB);
    net.settle(5 * SECOND);
    let ends = old.iter().map(|m| net.status(*m));
    assert!(
        ends.clone()
            .any(|end| end == Some(NotDelivered(PortClosed)))
    );
    for end in ends {
        assert!(
            matches!(end, Some(Delivered | NotDelivered(PortClosed | Dropped))),
            "{end:?}"
        );
    }
    let new = net.send((1, 1), (2, 2), 1000);
    net.settle(SECOND);
    assert_eq!(net.status(new), Some(Delivered));
}

// One in three frames is lost. Expect: everything arrives.
#[test]
fn heavy_loss() {
    for seed in 0..4 {
        let mut net = Net::new(seed, 2, 1);
        net.faults = Faults::loss(300);
        net.open(node(1), 1, 8, MIB);
        net.open(node(2), 2, 8, MIB);
        for len in [0, 10, 1000, 3000, 70_000, 300_000] {
            net.send((1, 1), (2, 2), len);
            net.send((2, 2), (1, 1), len);
        }
        net.settle(60 * SECOND);
        all_delivered(&net);
    }
}

// Frames are only reordered, never lost. Expect: everything arrives.
#[test]
fn reordering() {
    let mut net = pair();
    net.faults = Faults {
        late: 500,
        late_by: 2 * MS,
        ..Faults::NONE
    };
    for _ in 0..10 {
        for len in [100, 3000, 200_000] {
            net.send((1, 1), (2, 2), len);
        }
    }
    net.settle(10 * SECOND);
    all_delivered(&net);
}

// One in ten frames has a flipped bit. Expect: dropped and sent again, nothing changed (the book checks every byte).
#[test]
fn corruption() {
    let mut net = pair();
    net.faults = Faults {
        corrupt: 100,
        ..Faults::NONE
    };
    for _ in 0..10 {
        for len in [100, 3000, 200_000] {
            net.send((1, 1), (2, 2), len);
        }
    }
    net.settle(30 * SECOND);
    all_delivered(&net);
}
