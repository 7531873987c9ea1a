//! Conversations between endpoints, one property each: lengths, orders, tokens, statuses. Every number starts near its wrap.

#![allow(clippy::unwrap_used)]

use portolan_sim::harness::*;
use portolan_transport::host::Reason::*;
use portolan_transport::host::SendStatus::{self, *};
use portolan_transport::ident::{PortId, Priority, StreamKey};

/// The stream (1, 1) → (2, 2) as node 1 names it.
const FORTH: StreamKey = StreamKey {
    local: PortId(1),
    node: portolan_transport::ident::NodeId(2),
    remote: PortId(2),
    priority: Priority::Low,
};

// Messages of every kind of length, eager and long. Expect: each delivered once, in order.
#[test]
fn every_length() {
    for max_frame in [576, 1458, 8958] {
        let mut net = Net::new(3, 2, 1);
        net.max_frame = max_frame;
        net.segment = 1700;
        for id in [1, 2] {
            net.boot(node(id), 1);
        }
        net.open(node(1), 1, 8, 4 * MIB);
        net.open(node(2), 2, 8, 4 * MIB);
        let frame = u32::from(max_frame);
        let around = (frame - 90..frame + 3).chain(2 * frame - 140..2 * frame - 60);
        for len in [0, 1, 2, 7, 8, 63, 64, 100]
            .into_iter()
            .chain(around)
            .chain([65_535, 65_536, MIB, 4 * MIB])
        {
            net.send((1, 1), (2, 2), len);
            net.send((2, 2), (1, 1), len);
        }
        net.settle(20 * SECOND);
        all_delivered(&net);
    }
}

// Small messages share frames. Expect: far fewer frames than messages.
#[test]
fn small_messages_share_frames() {
    let mut net = pair();
    net.send((1, 1), (2, 2), 8);
    net.settle(SECOND);
    let before = net.frames;
    net.send_many((1, 1), (2, 2), 8, 60);
    net.settle(SECOND);
    all_delivered(&net);
    assert!(net.frames - before < 30, "{} frames", net.frames - before);
}

// A high message is sent while a long low one is under way. Expect: it is received first.
#[test]
fn high_overtakes_low() {
    let mut net = pair();
    let low = net.send((1, 1), (2, 2), 4 * MIB);
    net.run_for(500 * US);
    assert_eq!(net.status(low), None);
    let (high, _) = net.send_with((1, 1), (2, 2), Priority::High, 1000, u64::MAX);
    net.run_until(SECOND, "high arrives", |net| net.status(high).is_some());
    assert_eq!(net.status(low), None);
    net.settle(5 * SECOND);
    all_delivered(&net);
}

// A short message behind a long one on the same stream. Expect: in order all the same (the book checks).
#[test]
fn short_behind_long() {
    let mut net = pair();
    net.send((1, 1), (2, 2), 2 * MIB);
    net.send_many((1, 1), (2, 2), 100, 20);
    net.settle(5 * SECOND);
    all_delivered(&net);
}

// No receive token for a second. Expect: the sender waits, asking with ever fewer small frames; READY sets it off.
#[test]
fn no_buffer_then_ready() {
    for len in [100, 200_000] {
        let mut net = pair();
        net.open(node(2), 3, 0, MIB);
        net.provide_again = false;
        let message = net.send((1, 1), (2, 3), len);
        let second = net.send((1, 1), (2, 3), len);
        net.run_for(20 * MS);
        let (before, recorded) = (net.frames, {
            net.record(true);
            0
        });
        net.run_for(SECOND);
        assert_eq!(net.status(message), None);
        assert!(
            net.frames - before - recorded < 100,
            "{} frames to say nothing",
            net.frames - before
        );
        assert!(
            net.record(false).iter().all(|(_, frame)| frame.len() < 200),
            "probes carry headers only"
        );
        net.provide(node(2), PortId(3), Priority::Low, MIB);
        let start = net.now;
        net.run_until(SECOND, "READY", |net| {
            net.status(message) == Some(Delivered)
        });
        assert!(
            net.now - start < 10 * MS,
            "it took {} µs",
            (net.now - start) / US
        );
        assert_eq!(net.status(second), None);
        net.provide(node(2), PortId(3), Priority::Low, MIB);
        net.settle(SECOND);
        all_delivered(&net);
    }
}

// A token that is too small does not serve. Expect: the message waits for one that fits.
#[test]
fn only_small_tokens() {
    let mut net = pair();
    net.provide_again = false;
    net.open(node(2), 3, 0, MIB);
    net.provide(node(2), PortId(3), Priority::Low, 99);
    net.provide(node(2), PortId(3), Priority::High, 1000);
    let message = net.send((1, 1), (2, 3), 100);
    net.run_for(200 * MS);
    assert_eq!(net.status(message), None);
    net.provide(node(2), PortId(3), Priority::Low, 100);
    net.settle(SECOND);
    all_delivered(&net);
}

// To a port nobody opened, eager and long. Expect: PortClosed, soon.
#[test]
fn closed_port() {
    let mut net = pair();
    let lost = [100, MIB].map(|len| net.send((1, 1), (2, 9), len));
    net.settle(SECOND);
    for message in lost {
        assert_eq!(net.status(message), Some(NotDelivered(PortClosed)));
    }
}

// The receiving port closes while messages flow. Expect: what was committed is Delivered, the rest PortClosed.
#[test]
fn port_closes_under_way() {
    for pause in [0, 30, 100, 300, 1000] {
        let mut net = pair();
        let messages: Vec<u64> = (0..40)
            .map(|i| net.send((1, 1), (2, 2), if i % 8 == 7 { 300_000 } else { 500 }))
            .collect();
        net.run_for(pause * US);
        net.close(node(2), 2);
        net.settle(SECOND);
        for message in messages {
            assert!(
                matches!(
                    net.status(message),
                    Some(Delivered | NotDelivered(PortClosed))
                ),
                "{:?}",
                net.status(message)
            );
        }
    }
}

// The port closes and another application opens it. Expect: the new owner gets only what was sent to it after the sender learned
// of the closing; old messages are PortClosed.
#[test]
fn port_reopens() {
    let mut net = pair();
    net.after_failure = AfterFailure::Drop;
    let old: Vec<u64> = net.send_many((1, 1), (2, 2), 300_000, 10);
    net.run_for(100 * US);
    net.close(node(2), 2);
    net.open(node(2), 2, 8, MIB);
    net.run_until(SECOND, "old ones end", |net| net.book.borrow().is_settled());
    for message in old {
        assert!(matches!(
            net.status(message),
            Some(Delivered | NotDelivered(PortClosed | Dropped))
        ));
    }
    let new = net.send((1, 1), (2, 2), 1000);
    net.settle(SECOND);
    assert_eq!(net.status(new), Some(Delivered));
}

// The sending port closes. Expect: its sends end with a status, and the receiver keeps no token for them.
#[test]
fn sender_closes() {
    let mut net = pair();
    net.send_many((1, 1), (2, 2), 300_000, 20);
    net.run_for(200 * US);
    net.close(node(1), 1);
    net.settle(2 * SECOND);
    assert_eq!(net.host(engine(2)).tokens(PortId(2)), 16);
}

// Longer than the port ever takes. Expect: TooLong at once, the following ones delivered after resume.
#[test]
fn too_long() {
    let mut net = pair();
    net.open(node(2), 3, 2, 1000);
    let long = [1001, MIB].map(|len| net.send((1, 1), (2, 3), len));
    let fits = net.send((1, 1), (2, 3), 1000);
    net.settle(SECOND);
    assert_eq!(
        long.map(|m| net.status(m)),
        [Some(NotDelivered(TooLong)); 2]
    );
    assert_eq!(net.status(fits), Some(Delivered));
}

// A deadline passes while no token is there, and while a long message is under way. Expect: Deadline, never a late delivery
// (the book checks), and the stream goes on.
#[test]
fn deadline() {
    for len in [100, 50_000] {
        let mut net = pair();
        net.open(node(2), 3, 0, MIB);
        let deadline = net.now + 50 * MS;
        let (message, _) = net.send_with((1, 1), (2, 3), Priority::Low, len, deadline);
        let next = net.send((1, 1), (2, 3), len);
        net.run_until(200 * MS, "the deadline", |net| {
            net.status(message).is_some()
        });
        assert_eq!(net.status(message), Some(NotDelivered(Deadline)));
        assert!(net.now >= deadline && net.now < deadline + 20 * MS);
        net.provide(node(2), PortId(3), Priority::Low, MIB);
        net.settle(SECOND);
        assert_eq!(net.status(next), Some(Delivered));
    }
    let mut net = pair();
    let deadline = net.now + 300 * US;
    let (long, _) = net.send_with((1, 1), (2, 2), Priority::Low, 4 * MIB, deadline);
    net.settle(SECOND);
    assert_eq!(net.status(long), Some(NotDelivered(Deadline)));
}

// Cancelled while it waits, and cancelled too late. Expect: Cancelled, or Delivered, and the rest of the stream goes on.
#[test]
fn cancel() {
    let mut net = pair();
    net.open(node(2), 3, 0, MIB);
    let (waits, id) = net.send_with((1, 1), (2, 3), Priority::Low, 70_000, u64::MAX);
    let next = net.send((1, 1), (2, 3), 10);
    net.run_for(50 * MS);
    net.cancel(node(1), id);
    net.run_until(SECOND, "cancelled", |net| net.status(waits).is_some());
    assert_eq!(net.status(waits), Some(NotDelivered(Cancelled)));
    net.provide(node(2), PortId(3), Priority::Low, MIB);
    net.settle(SECOND);
    assert_eq!(net.status(next), Some(Delivered));
    net.cancel(node(1), id);
    net.settle(SECOND);
}

// Sends after a failed one wait for the application's word. Expect: resume delivers them, drop ends them.
#[test]
fn resume_and_drop() {
    for resume in [true, false] {
        let mut net = pair();
        net.after_failure = AfterFailure::Nothing;
        net.open(node(2), 3, 4, 1000);
        let failed = net.send((1, 1), (2, 3), 5000);
        let held: Vec<u64> = net.send_many((1, 1), (2, 3), 10, 3);
        let stream = StreamKey {
            remote: PortId(3),
            ..FORTH
        };
        net.run_until(SECOND, "it fails", |net| net.status(failed).is_some());
        net.run_for(100 * MS);
        let expected: SendStatus = if resume {
            net.resume_sending(node(1), stream);
            Delivered
        } else {
            net.drop_sends(node(1), stream);
            NotDelivered(Dropped)
        };
        net.settle(SECOND);
        for message in held {
            // One that was committed before the failure was known is Delivered either way.
            assert!(
                net.status(message) == Some(expected) || net.status(message) == Some(Delivered)
            );
        }
        let after = net.send((1, 1), (2, 3), 10);
        net.settle(SECOND);
        assert_eq!(net.status(after), Some(Delivered));
    }
}

// To a node nobody configured. Expect: NoRoute.
#[test]
fn no_route() {
    let mut net = pair();
    let message = net.send((1, 1), (77, 1), 100);
    net.settle(SECOND);
    assert_eq!(net.status(message), Some(NotDelivered(NoRoute)));
}

// The sender's memory cannot be read. Expect: BadMemory for that one, the others pass.
#[test]
fn bad_memory() {
    for len in [100, 100_000] {
        let mut net = pair();
        let before = net.send((1, 1), (2, 2), 100);
        let bad = net.send((1, 1), (2, 2), len);
        let after = net.send((1, 1), (2, 2), 100);
        net.host(engine(1)).bad_sends.push(bad);
        net.settle(2 * SECOND);
        assert_eq!(net.status(bad), Some(NotDelivered(BadMemory)));
        assert_eq!([before, after].map(|m| net.status(m)), [Some(Delivered); 2]);
    }
}

// The receiver's ledger holds no more streams. Expect: the streams it holds go on, the others wait until one falls idle.
#[test]
fn ledger_full() {
    let mut net = pair();
    for port in 10..20 {
        net.open(node(1), port, 1, 100);
    }
    net.host(engine(2)).max_records = 4;
    let messages: Vec<u64> = (10..20)
        .map(|port| net.send((1, port), (2, 2), 100))
        .collect();
    net.run_for(SECOND);
    let delivered: Vec<u64> = messages
        .into_iter()
        .filter(|m| net.status(*m) == Some(Delivered))
        .collect();
    assert_eq!(delivered.len(), 4);
    let again = net.send((1, 10 + delivered[0] as u16), (2, 2), 100);
    net.run_until(SECOND, "one of the four", |net| {
        net.status(again) == Some(Delivered)
    });
    let idle = u64::from(net.policy.stream_idle_ms) * MS;
    net.settle(4 * idle);
    all_delivered(&net);
}

// The ledger is full and stays so. Expect: a deadline still ends a send, with certainty.
#[test]
fn ledger_full_deadline() {
    let mut net = pair();
    net.open(node(1), 3, 1, 100);
    net.host(engine(2)).max_records = 1;
    let holds = net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    let deadline = net.now + 100 * MS;
    let (late, _) = net.send_with((1, 3), (2, 2), Priority::Low, 100, deadline);
    net.settle(SECOND);
    assert_eq!(net.status(holds), Some(Delivered));
    assert_eq!(net.status(late), Some(NotDelivered(Deadline)));
}

// A sender closes its stream while nobody hears it. Expect: its record is reclaimed when another stream needs it.
#[test]
fn record_of_a_lost_close() {
    let mut net = pair();
    net.open(node(1), 3, 1, 100);
    net.host(engine(2)).max_records = 1;
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    net.link(node(1), node(2), false);
    net.run_for(4 * u64::from(net.policy.stream_idle_ms) * MS);
    net.link(node(1), node(2), true);
    assert_eq!(
        (net.host(engine(1)).records(), net.host(engine(2)).records()),
        ((0, 0), (0, 1))
    );
    net.send((1, 3), (2, 2), 100);
    net.settle(2 * SECOND);
    all_delivered(&net);
}

// A stream falls idle. Expect: both ends forget it, and a later message opens it anew.
#[test]
fn idle_streams_are_forgotten() {
    let mut net = pair();
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    assert_eq!(
        (net.host(engine(1)).records(), net.host(engine(2)).records()),
        ((1, 0), (0, 1))
    );
    let idle = u64::from(net.policy.stream_idle_ms) * MS;
    net.run_for(2 * idle);
    assert_eq!(
        (net.host(engine(1)).records(), net.host(engine(2)).records()),
        ((0, 0), (0, 0))
    );
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    all_delivered(&net);
}

// An idle pair exchanges (almost) nothing.
#[test]
fn silence_costs_nothing() {
    let mut net = pair();
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    let before = net.frames;
    net.run_for(20 * SECOND);
    assert!(
        net.frames - before < 50,
        "{} frames in 20 idle seconds",
        net.frames - before
    );
}

// Ports of one node talk to each other, on one queue and across two.
#[test]
fn local_delivery() {
    for queues in [1, 2] {
        let mut net = Net::new(5, 1, queues);
        for port in [1, 2, 3] {
            net.open(node(1), port, 4, MIB);
        }
        for len in [0, 100, 5_000, 300_000] {
            for (from, to) in [(1, 2), (2, 1), (1, 3), (3, 3), (3, 2)] {
                net.send((1, from), (1, to), len);
            }
        }
        net.settle(2 * SECOND);
        all_delivered(&net);
    }
}

// Nodes with different numbers of queues, all ports to all ports.
#[test]
fn queues() {
    let mut net = Net::new(6, 2, 2);
    net.boot(node(2), 3);
    for (id, port) in [(1, 4), (1, 5), (2, 6), (2, 7), (2, 8)] {
        net.open(node(id), port, 4, MIB);
    }
    for from in [4, 5] {
        for to in [6, 7, 8] {
            for len in [10, 200_000] {
                net.send((1, from), (2, to), len);
                net.send((2, to), (1, from), len);
            }
        }
    }
    net.settle(2 * SECOND);
    all_delivered(&net);
}

// Enough messages on one stream to wrap its number, and enough streams to wrap the epochs.
#[test]
fn wraps() {
    let mut net = pair();
    for port in 20..30 {
        net.open(node(1), port, 1, 100);
        net.send_many((1, port), (2, 2), 64, 30);
    }
    net.settle(5 * SECOND);
    all_delivered(&net);
}
