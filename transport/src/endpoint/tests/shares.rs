//! Who gets how much: credit, priorities, streams, grants.

use super::*;
use crate::policy::Ack;
use crate::wire::Chunk;
use crate::wire::frame::FRAME_HEADER_LEN;

/// A pair whose first message went through, with this policy.
pub(super) fn connected(policy: Policy) -> Pair {
    let mut pair = Pair::new(1472);
    for side in &mut pair.sides {
        side.endpoint.obey(policy);
        side.host.provide(2000);
    }
    pair.send(0, 2, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair
}

/// Submits `count` messages of a frame each from `port` to the same port of node 2.
pub(super) fn submit(pair: &mut Pair, port: u16, priority: Priority, len: usize, count: usize) {
    for _ in 0..count {
        let slot = pair.next_slot;
        pair.next_slot += 1;
        let side = &mut pair.sides[0];
        side.host.payloads.insert(slot, vec![slot as u8; len]);
        let request = SendRequest {
            id: SendId {
                port: PortId(port),
                slot,
                generation: 1,
            },
            stream: StreamKey {
                local: PortId(port),
                node: NodeId(2),
                remote: PortId(port),
                priority,
            },
            len: len as u32,
            tag: u64::from(port),
            deadline: Nanos::MAX,
            ack: crate::policy::AckMode::Policy,
        };
        side.endpoint
            .submit(pair.now, &request, &mut side.host)
            .unwrap();
    }
}

/// The next frame of node 1, not sent anywhere.
pub(super) fn frame(pair: &mut Pair) -> Option<Vec<u8>> {
    let mut to = vec![0; 1472];
    let (now, side) = (pair.now, &mut pair.sides[0]);
    let transmit = side.endpoint.poll_transmit(now, &mut to, &mut side.host)?;
    to.truncate(transmit.len);
    Some(to)
}

/// Payload bytes of a frame by sending port and priority.
fn shares(frame: &[u8]) -> Vec<((u16, u8), usize)> {
    let segments = [frame];
    let parsed = wire::parse(&segments).unwrap();
    let mut shares = Vec::new();
    for (chunk, view) in parsed.chunks() {
        if let Chunk::Eager { stream, .. }
        | Chunk::Data { stream, .. }
        | Chunk::Rts { stream, .. } = chunk
        {
            shares.push(((stream.sender_port, stream.priority), view.len()));
        }
    }
    shares
}

#[test]
fn no_more_than_the_credit_is_under_way() {
    let policy = Policy {
        eager_buffers: 8,
        ..Policy::default()
    };
    let mut pair = connected(policy);
    submit(&mut pair, 5, Priority::Low, 1300, 60);
    let mut lost = 0;
    while frame(&mut pair).is_some() {
        lost += 1;
    }
    assert_eq!(lost, 8, "frames of one buffer each");
    // All of them are lost. One answer to the probe restores the credit.
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let c = pair.sides[0].endpoint.counters();
    assert_eq!(c.sends_delivered, 61);
    assert!(c.credit_stalls > 0 && c.retransmits <= 16, "{c:?}");
}

// Four streams of short messages and one of some that come unasked as a whole, each with all nine buffers there are. Expect: these are through while half of the short ones
// still wait: who saves for one has what comes, and the others have it again afterwards.
#[test]
fn who_saves_credit_for_a_message_has_it_before_others_have_more() {
    let mut pair = connected(Policy {
        eager_buffers: 9,
        ack: Ack::Immediate,
        ..Policy::default()
    });
    // Or all credit would come at the same time.
    pair.late = 1000;
    let shorts = [5, 7, 8, 9];
    for port in shorts {
        submit(&mut pair, port, Priority::Low, 1300, 200);
    }
    submit(&mut pair, 6, Priority::Low, 12_000, 6);
    for port in [6, 7, 8, 9] {
        pair.sides[1].endpoint.port_opened(PortId(port));
    }
    let through = |pair: &Pair, port: u16| {
        let delivered = pair.sides[1].host.delivered.iter();
        delivered
            .filter(|(delivery, _)| delivery.stream.remote == PortId(port))
            .count()
    };
    assert!(pair.run_until(SECOND, |pair| through(pair, 6) == 6));
    for port in shorts {
        let through = through(&pair, port);
        assert!(through < 100, "port {port}: {through}");
    }
    assert!(pair.run_until(SECOND, Pair::all_settled));
}

#[test]
fn control_and_grants_need_no_credit() {
    let policy = Policy {
        eager_buffers: 1,
        ..Policy::default()
    };
    let mut pair = connected(policy);
    for len in [0, 100_000, 10, 300_000, 1300] {
        pair.send(0, 2, len, Nanos::MAX);
        pair.send(1, 1, len, Nanos::MAX);
    }
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.check_deliveries();
}

#[test]
fn high_goes_first_and_low_gets_its_floor() {
    let mut pair = connected(Policy {
        window_messages: 1000,
        eager_buffers: 2000,
        ..Policy::default()
    });
    submit(&mut pair, 5, Priority::Low, 1300, 500);
    submit(&mut pair, 5, Priority::High, 1300, 500);
    let (mut low, mut total) = (0, 0);
    for at in 0..200 {
        let frame = frame(&mut pair).unwrap();
        let share = shares(&frame);
        assert!(at > 0 || share[0].0.1 == 1, "high first");
        for ((_, priority), len) in share {
            low += if priority == 0 { len } else { 0 };
            total += len;
        }
    }
    let percent = low * 100 / total;
    assert!((5..8).contains(&percent), "low got {percent} %");
}

#[test]
fn streams_share_fairly() {
    let mut pair = connected(Policy {
        window_messages: 1000,
        eager_buffers: 4000,
        ..Policy::default()
    });
    for port in [5, 6, 7, 8] {
        pair.sides[1].endpoint.port_opened(PortId(port));
        submit(
            &mut pair,
            port,
            Priority::Low,
            200 + 10 * usize::from(port),
            400,
        );
    }
    let mut bytes = BTreeMap::new();
    for _ in 0..100 {
        for ((port, _), len) in shares(&frame(&mut pair).unwrap()) {
            *bytes.entry(port).or_insert(0usize) += len;
        }
    }
    let sum: usize = bytes.values().sum();
    let squares: usize = bytes.values().map(|b| b * b).sum();
    let jain = (sum * sum) as f64 / (4 * squares) as f64;
    assert!(jain > 0.95, "{jain} {bytes:?}");
}

#[test]
fn many_small_messages_share_a_frame() {
    let mut pair = connected(Policy::default());
    submit(&mut pair, 5, Priority::Low, 8, 64);
    let first = frame(&mut pair).unwrap();
    assert_eq!(shares(&first).len(), 64, "a window of them");
    // Two RUNs: a writer puts 32 into one.
    assert_eq!(first.len(), FRAME_HEADER_LEN + 32 + 2 * 12 + 64 * 8);
}

// As the papers do it. Expect: a frame of its own for each chunk of a message, whatever the priority.
#[test]
fn without_coalescing_a_frame_has_one_message() {
    let mut pair = connected(Policy {
        coalesce: false,
        ..Policy::default()
    });
    submit(&mut pair, 5, Priority::Low, 8, 20);
    submit(&mut pair, 5, Priority::High, 8, 20);
    submit(&mut pair, 5, Priority::Low, 20_000, 2);
    pair.send(1, 1, 3_000, Nanos::MAX);
    let start = pair.log.len();
    assert!(pair.run_until(SECOND, Pair::all_settled));
    for (_, bytes) in &pair.log[start..] {
        let messages = shares(bytes).len();
        assert!(messages <= 1, "{messages} in a frame");
    }
}

#[test]
fn short_transfers_overtake_long_ones_and_none_starves() {
    let policy = Policy {
        grant_bytes: 32 * 1024,
        grant_budget_bytes: 64 * 1024,
        ..Policy::default()
    };
    let mut pair = connected(policy);
    for port in 10..30 {
        for side in &mut pair.sides {
            side.endpoint.port_opened(PortId(port));
        }
        submit(&mut pair, port, Priority::Low, 400_000, 1);
    }
    pair.run_until(100 * LATENCY, |_| false);
    submit(&mut pair, 5, Priority::Low, 40_000, 1);
    let mut worst = 0;
    let done = |pair: &Pair| {
        pair.sides[1]
            .host
            .delivered
            .iter()
            .any(|d| d.0.tag == 5 && d.0.len == 40_000)
    };
    while !done(&pair) {
        assert!(pair.step());
        worst = worst.max(
            pair.sides[1]
                .endpoint
                .longs
                .iter()
                .map(|(_, l)| u64::from(l.granted - l.received))
                .sum(),
        );
    }
    let finished = pair.sides[1].host.delivered.len();
    assert!(finished < 12, "{finished} long ones first");
    assert!(worst <= 64 * 1024, "budget: {worst}");
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
}

// A short message, then a long one. Expect: a receiver says that it places one whenever it grants something, so that whoever keeps buffers for what is
// granted has them, and says so neither for the short one nor when all is done.
#[test]
fn a_receiver_says_that_it_may_be_sent_what_it_grants() {
    let mut pair = connected(Policy::default());
    submit(&mut pair, 5, Priority::Low, 100, 1);
    while !pair.all_settled() {
        assert!(pair.step());
        assert!(!pair.sides[1].endpoint.is_placing());
    }
    submit(&mut pair, 5, Priority::Low, 400_000, 2);
    let mut grants = 0;
    while !pair.all_settled() {
        assert!(pair.step());
        let receiver = &pair.sides[1].endpoint;
        let sent = receiver.counters().grants_sent;
        assert!(sent == grants || receiver.is_placing());
        grants = sent;
    }
    assert!(grants > 1, "{grants}");
    assert!(!pair.sides[1].endpoint.is_placing());
}

#[test]
fn jumbo_frames_are_proved_first() {
    let mut pair = Pair::new(8972);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, |pair| {
        pair.sides[0].endpoint.peers().all(|p| p.max_frame == 8972)
    }));

    // A path that swallows them: everything still arrives, in short frames.
    let mut pair = Pair::new(8972);
    pair.longest = 1500;
    pair.send(0, 2, 1_000_000, Nanos::MAX);
    pair.send(1, 1, 8_000, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.check_deliveries();
    assert!(
        pair.run_until(SECOND, |pair| pair.sides[0].endpoint.counters().paths_short
            == 1)
    );
    assert!(pair.sides[0].endpoint.peers().all(|p| p.max_frame == 1472));
    assert_eq!(pair.sides[0].endpoint.counters().retransmits, 0);
}

#[test]
fn sends_that_end_before_they_leave_do_not_pile_up() {
    let mut pair = Pair::new(1472);
    pair.sides[1].host.tokens.clear();
    pair.send(0, 2, 100, Nanos::MAX); // holds the stream up
    pair.run_until(20 * LATENCY, |_| false);
    let refused = (0..5_000).find(|i| {
        let id = SendId {
            port: PortId(5),
            slot: 1_000 + i,
            generation: 1,
        };
        let request = SendRequest {
            id,
            stream: key(2),
            len: 0,
            tag: u64::from(id.slot),
            deadline: pair.now + 1,
            ack: crate::policy::AckMode::Policy,
        };
        let (now, side) = (pair.now, &mut pair.sides[0]);
        let refused = side.endpoint.submit(now, &request, &mut side.host);
        pair.now += 2;
        let (now, side) = (pair.now, &mut pair.sides[0]);
        side.endpoint.handle_timeout(now, &mut side.host);
        refused == Err(Reason::NoResources)
    });
    assert!(refused.is_some_and(|i| i > 300), "{refused:?}");
    // The receiver has buffers again. Expect: the numbers that are owed go, and so does what is sent next.
    pair.provide(1, 10);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.resume(0, 2);
    assert!(pair.run_until(2 * SECOND, |pair| {
        pair.sides[0]
            .endpoint
            .send
            .iter()
            .all(|(_, s)| s.queue.is_empty())
    }));
    let slot = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let statuses = &pair.sides[0].host.completed;
    assert!(statuses.contains(&(slot, SendStatus::Delivered)));
}
