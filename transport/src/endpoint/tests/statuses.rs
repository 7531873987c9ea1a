//! Every way a send ends, and that the stream goes on afterwards.

use super::*;
use SendStatus::{Delivered, MaybeDelivered, NotDelivered};

/// Messages that may be under way.
const WINDOW: usize = crate::policy::WINDOW_MAX as usize;

#[test]
fn a_message_waits_for_a_token() {
    let mut pair = Pair::new(1472);
    pair.sides[1].host.tokens.clear();
    let slots = [
        pair.send(0, 2, 100, Nanos::MAX),
        pair.send(0, 2, 50_000, Nanos::MAX),
    ];
    assert!(!pair.run_until(SECOND, Pair::all_settled));
    // One NACK for the number, then probes with backoff only.
    let nacks = pair.sides[1].endpoint.counters().nacks_sent;
    let probes = pair.sides[0].endpoint.counters().probes_sent;
    assert!(
        nacks <= probes + 1 && probes < 15,
        "{nacks} NACKs, {probes} probes"
    );
    // READY goes out at once, not at the next probe.
    pair.provide(1, 1);
    assert!(pair.run_until(5 * LATENCY, |pair| pair.sides[1].host.delivered.len() == 1));
    pair.provide(1, 1);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.check_deliveries();
    assert_eq!(slots.len(), pair.sides[1].host.delivered.len());
}

// The port goes in the middle of a frame of short messages. Expect: what was committed is delivered, nothing else; every buffer comes back.
#[test]
fn a_port_goes_between_two_commits_of_a_frame() {
    for (first, more) in [(1, 0), (1, 1), (1, 5), (0, 0), (0, 1)] {
        let mut pair = Pair::new(1472);
        // The first message opens the stream; those after it need no START.
        for _ in 0..first {
            pair.send(0, 2, 64, Nanos::MAX);
        }
        assert!(pair.run_until(SECOND, Pair::all_settled));
        for _ in 0..6 {
            pair.send(0, 2, 64, Nanos::MAX);
        }
        let most = first + more;
        pair.sides[1].host.commits_max = Some(most);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        let mut ends = vec![Delivered; most];
        ends.resize(first + 6, NotDelivered(Reason::PortClosed));
        assert_eq!(pair.statuses(0), ends);
        let receiver = &pair.sides[1];
        assert_eq!(receiver.endpoint.counters().memory_faults, 1);
        assert!(receiver.host.buffers.is_empty(), "a buffer was kept");
        pair.check_deliveries();
    }
}

// A short message among others of its frame finds no token. Expect: those before it arrive, those after it are not taken in its place.
#[test]
fn a_frame_is_taken_up_to_what_finds_no_token() {
    for bad in 0..6 {
        let mut pair = Pair::new(1472);
        pair.send(0, 2, 64, Nanos::MAX);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        pair.sides[1].host.tokens.truncate(bad);
        for _ in 0..6 {
            pair.send(0, 2, 64, Nanos::MAX);
        }
        pair.run_until(2 * LATENCY, |_| false);
        assert_eq!(pair.sides[1].host.delivered.len(), 1 + bad);
        assert!(pair.sides[1].endpoint.counters().no_buffer > 0);
        pair.provide(1, 6);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        assert_eq!(pair.statuses(0), [Delivered; 7]);
        pair.check_deliveries();
    }
}

#[test]
fn too_long_is_told_and_the_stream_pauses() {
    let mut pair = Pair::new(1472);
    pair.sides[1].host.token_len = 10_000;
    pair.send(0, 2, 100, Nanos::MAX);
    pair.send(0, 2, 10_001, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.send(0, 2, 300, Nanos::MAX);
    assert!(!pair.run_until(SECOND, Pair::all_settled), "paused");
    pair.resume(0, 2);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(
        pair.statuses(0),
        [Delivered, NotDelivered(Reason::TooLong), Delivered]
    );
    // Nothing waits for a confirmation.
    assert!(pair.run_until(SECOND, |pair| {
        pair.sides[1]
            .endpoint
            .receive
            .iter()
            .all(|(_, s)| s.messages.is_empty())
    }));
    pair.check_deliveries();
}

#[test]
fn a_deadline_ends_what_waits_and_what_never_left() {
    let mut pair = Pair::new(1472);
    pair.sides[1].host.tokens.clear();
    let deadline = pair.now + SECOND / 10;
    pair.send(0, 2, 100, deadline); // transmitted, finds no token
    pair.run_until(5 * LATENCY, |_| false);
    pair.send(0, 2, 100, deadline); // never transmitted: the stream is not ready
    pair.send(0, 2, 100, Nanos::MAX); // paused behind them
    assert!(pair.run_until(SECOND, |pair| pair.sides[0].host.completed.len() == 2));
    assert!(pair.now < deadline + SECOND / 100);
    pair.provide(1, 5);
    pair.resume(0, 2);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let late = NotDelivered(Reason::Deadline);
    assert_eq!(pair.statuses(0), [late, late, Delivered]);
    pair.check_deliveries();
}

#[test]
fn dropped_sends_leave_no_gap() {
    let mut pair = Pair::new(1472);
    pair.sides[1].host.token_len = 10_000;
    pair.send(0, 2, 20_000, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    for _ in 0..40 {
        pair.send(0, 2, 10, Nanos::MAX);
    }
    let (now, side) = (pair.now, &mut pair.sides[0]);
    side.endpoint.drop_sends(now, key(2), &mut side.host);
    pair.send(0, 2, 10, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let statuses = pair.statuses(0);
    assert!(
        statuses[1..41]
            .iter()
            .all(|s| *s == NotDelivered(Reason::Dropped))
    );
    assert_eq!(statuses[41], Delivered);
    pair.check_deliveries();
}

#[test]
fn a_cancelled_send_tells_what_became_of_it() {
    let mut pair = Pair::new(1472);
    // Cancelled before it left.
    let slot = pair.send(0, 2, 100, Nanos::MAX);
    pair.cancel(0, slot);
    // Cancelled in the middle: half of it is placed, and the buffer comes back.
    let long = pair.send(0, 2, 3_000_000, Nanos::MAX);
    assert!(pair.run_until(SECOND, |pair| pair.sides[1].endpoint.longs.len() == 1));
    pair.cancel(0, long);
    let after = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(
        pair.statuses(0),
        [
            NotDelivered(Reason::Cancelled),
            NotDelivered(Reason::Cancelled),
            Delivered
        ]
    );
    // Cancelled when it was delivered already: the acknowledgement is on its way.
    let done = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, |pair| pair.sides[1].host.delivered.len() == 2));
    pair.cancel(0, done);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[done as usize], Delivered);
    assert!(pair.sides[1].host.buffers.is_empty());
    pair.check_deliveries();
    let _ = after;
}

#[test]
fn a_closed_port_answers_definitely_and_its_next_owner_sees_nothing() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.sides[1].host.tokens.clear();
    for _ in 0..3 {
        pair.send(0, 2, 100, Nanos::MAX);
    }
    pair.run_until(20 * LATENCY, |_| false);
    pair.close_port(1);
    let closed = pair.now;
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert!(pair.now - closed < SECOND / 100, "told without being asked");
    let gone = NotDelivered(Reason::PortClosed);
    assert_eq!(pair.statuses(0), [Delivered, gone, gone, gone]);
    // To a closed port, with a new epoch.
    pair.resume(0, 2);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[4], gone);
    // The next owner.
    pair.open_port(1, 10);
    pair.resume(0, 2);
    let slot = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[slot as usize], Delivered);
    pair.check_deliveries();
}

#[test]
fn what_was_dropped_fails_nobody_again_when_the_port_says_that_it_is_closed() {
    let mut pair = Pair::new(1472);
    pair.close_port(1);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    // Sends behind the failed one are dropped; their numbers go out as NULL, and PORT-CLOSED answers them.
    for _ in 0..3 {
        pair.send(0, 2, 100, Nanos::MAX);
    }
    let (now, side) = (pair.now, &mut pair.sides[0]);
    side.endpoint.drop_sends(now, key(2), &mut side.host);
    assert!(pair.all_settled());
    pair.run_until(SECOND / 100, |_| false);
    // The next owner of the port. Expect: no pause that the application knows nothing of.
    pair.open_port(1, 10);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[4], Delivered);
    pair.check_deliveries();
}

#[test]
fn a_new_incarnation_gets_only_what_was_never_transmitted() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.sides[1].host.tokens.clear();
    for _ in 0..WINDOW + 136 {
        pair.send(0, 2, 100, Nanos::MAX); // more than the window
    }
    pair.run_until(20 * LATENCY, |_| false);
    // Node 2 reboots: nothing of its ledger is left.
    let fresh = Pair::new(1472).sides.into_iter().nth(1).unwrap();
    let old = core::mem::replace(&mut pair.sides[1], fresh);
    pair.sides[1].endpoint.config.incarnation = 99;
    assert_eq!(old.host.delivered.len(), 1);
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
    let statuses = pair.statuses(0);
    let maybe = statuses
        .iter()
        .filter(|s| **s == MaybeDelivered(Reason::PeerRestarted))
        .count();
    let delivered = statuses.iter().filter(|s| **s == Delivered).count();
    assert_eq!(maybe, WINDOW);
    assert_eq!(delivered, 1 + 136);
    assert_eq!(pair.sides[1].host.delivered.len(), 136);
    assert_eq!(pair.sides[0].endpoint.counters().peer_restarts, 1);
}

#[test]
fn an_unreachable_peer_ends_sends_and_comes_back() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.loss = 1000;
    for _ in 0..WINDOW + 36 {
        pair.send(0, 2, 100, Nanos::MAX);
    }
    assert!(pair.run_until(20 * SECOND, Pair::all_settled));
    let statuses = pair.statuses(0);
    assert!(
        statuses[1..=WINDOW]
            .iter()
            .all(|s| *s == MaybeDelivered(Reason::Unreachable))
    );
    assert!(
        statuses[1 + WINDOW..]
            .iter()
            .all(|s| *s == NotDelivered(Reason::Unreachable))
    );
    pair.loss = 0;
    let slot = pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[slot as usize], Delivered);
    pair.check_deliveries();
}

#[test]
fn nobody_there_at_all() {
    let mut pair = Pair::new(1472);
    pair.loss = 1000;
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(20 * SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0), [NotDelivered(Reason::Unreachable)]);
}

#[test]
fn another_policy_is_incompatible() {
    let mut pair = Pair::new(1472);
    pair.sides[1].endpoint.config.policy.recovery = crate::policy::Recovery::WholeMessage;
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0), [NotDelivered(Reason::Incompatible)]);
}

#[test]
fn idle_streams_are_closed_on_both_ends() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let empty = |pair: &Pair| {
        pair.sides
            .iter()
            .all(|s| s.host.sending.is_empty() && s.host.receiving.is_empty())
    };
    assert!(pair.run_until(70 * SECOND, empty), "records are freed");
    pair.send(0, 2, 100, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    pair.check_deliveries();
    assert_eq!(pair.sides[1].host.delivered.len(), 2);
}

#[test]
fn unreadable_memory_fails_its_send_only() {
    let mut pair = Pair::new(1472);
    pair.send(0, 2, 100, Nanos::MAX);
    let bad = pair.send(0, 2, 100, Nanos::MAX);
    let long = pair.send(0, 2, 100_000, Nanos::MAX);
    pair.sides[0].host.payloads.remove(&bad);
    pair.run_until(SECOND, |pair| pair.sides[0].host.completed.len() == 3);
    pair.resume(0, 2);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(
        pair.statuses(0),
        [Delivered, NotDelivered(Reason::BadMemory), Delivered]
    );
    let _ = long;
}

/// Everything at once; whatever is told must be true.
#[test]
fn statuses_are_never_a_guess() {
    for seed in 1..tries(150) {
        let mut pair = Pair::new(1472);
        pair.random ^= seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
        (pair.loss, pair.double, pair.late, pair.corrupt) = (30, 30, 60, 10);
        for side in &mut pair.sides {
            side.host.token_len = 100_000;
            side.host.tokens.truncate(20);
        }
        for i in 0..300 {
            let from = (i % 2) as usize;
            let len = match pair.dice() % 20 {
                0 => 120_000, // too long
                1..4 => 30_000,
                n => n as usize * 50,
            };
            let deadline = match pair.dice() % 8 {
                0 => pair.now + pair.dice() % (500 * LATENCY),
                _ => Nanos::MAX,
            };
            if pair.sides.iter().all(|side| side.host.open) {
                let slot = pair.send(from, 2 - from as u16, len, deadline);
                if pair.dice().is_multiple_of(10) {
                    let back = (pair.dice() % 3) as u32 * 2;
                    pair.cancel(from, slot.saturating_sub(back));
                }
            }
            let time = pair.dice() % (20 * LATENCY);
            pair.run_until(time, |_| false);
            match pair.dice() % 40 {
                0 | 1 => {
                    pair.resume(0, 2);
                    pair.resume(1, 1);
                }
                2 => pair.close_port(1),
                3 if seed.is_multiple_of(2) => pair.take_over(from),
                4 if seed.is_multiple_of(3) => pair.take_over(1 - from),
                5..12 => pair.provide(from, if pair.sides[from].host.open { 5 } else { 0 }),
                _ => {}
            }
            if !pair.sides[1].host.open && pair.dice().is_multiple_of(3) {
                pair.open_port(1, 10);
            }
        }
        if !pair.sides[1].host.open {
            pair.open_port(1, 10);
        }
        let mut rounds = 0;
        while !pair.all_settled() {
            rounds += 1;
            assert!(rounds < 300, "seed {seed}: stuck");
            for node in 0..2 {
                pair.provide(node, 20);
                pair.resume(node, 2 - node as u16);
            }
            pair.run_until(SECOND / 10, Pair::all_settled);
        }
        pair.check_deliveries();
    }
}

// As many numbers unsettled as a stream may have, the last ones accepted in one go. Expect: no more are taken, by either way.
#[test]
fn more_of_a_stream_end_where_sends_do() {
    let mut pair = Pair::new(1_472);
    pair.send(0, 2, 64, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let (now, side) = (pair.now, &mut pair.sides[0]);
    let stream = StreamKey {
        local: PortId(5),
        node: NodeId(2),
        remote: PortId(5),
        priority: Priority::Low,
    };
    let request = |slot: u32| SendRequest {
        id: SendId {
            port: PortId(5),
            slot,
            generation: 1,
        },
        stream,
        len: 0,
        tag: 0,
        deadline: u64::MAX,
        ack: crate::policy::AckMode::Policy,
    };
    let first = request(1_000);
    side.endpoint.submit(now, &first, &mut side.host).unwrap();
    let mut taken = 0;
    while let Some(mut more) = side.endpoint.more(&first)
        && let Some(number) = more.number()
    {
        let (record, epoch) = more.record();
        let send = more.next(request(2_000 + taken).id, 0, 0);
        side.host.accept(&send, record, epoch, number);
        more.push(&send);
        taken += 1;
        assert!(taken < 5_000);
    }
    let one_more = side.endpoint.submit(now, &request(9_000), &mut side.host);
    assert_eq!(one_more, Err(Reason::NoResources));
    assert!(taken > 1_000, "{taken}");
}
