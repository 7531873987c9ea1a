//! What an engine left behind, or said, that was not itself any more: numbers and epochs that contradict each other, and those of the peer. A number that
//! jumped to one that was in use may have a send told as delivered: nobody can know. But whatever was sent ends, and streams go on.

use std::collections::BTreeSet;

use super::*;
use crate::policy::Profile;

/// How numbers of the ledger may be wrong, each time by so much.
const JUMPS: [i32; 12] = [
    -70_000, -1_030, -1_000, -300, -20, -1, 1, 20, 300, 1_000, 1_030, 70_000,
];

/// Ten messages under way, none of them answered; ten were delivered before.
fn under_way(profile: Profile) -> (Pair, Vec<u32>) {
    let mut pair = Pair::new(1472);
    for side in &mut pair.sides {
        side.endpoint.obey(profile.policy());
    }
    for _ in 0..10 {
        pair.send(0, 2, 100, Nanos::MAX);
    }
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let sends = (0..10).map(|_| pair.send(0, 2, 100, Nanos::MAX)).collect();
    (pair, sends)
}

/// Takes over on a node. Expect: whatever was under way ends, soon; what is sent then arrives. Otherwise says so.
fn goes_on(pair: Pair, node: usize) -> Result<(), &'static str> {
    let delivered = went_on(pair, node)?;
    match delivered.iter().collect::<BTreeSet<_>>().len() == delivered.len() {
        true => Ok(()),
        false => Err("delivers twice"),
    }
}

/// The tags of what was delivered to node 2, if all went on.
fn went_on(pair: Pair, node: usize) -> Result<Vec<u64>, &'static str> {
    // A thousand numbers that nobody knows of are made up for a few at a time; the default is meant to be quick at that.
    let quick = pair.sides[0].endpoint.config.policy == Policy::default();
    let limit = if quick { SECOND / 10 } else { 60 * SECOND };
    went_on_within(limit, pair, node)
}

fn went_on_within(limit: Nanos, mut pair: Pair, node: usize) -> Result<Vec<u64>, &'static str> {
    pair.take_over(node);
    if !settles(&mut pair, limit) {
        return Err("stands still");
    }
    // What is sent first may be what shows that something was not true.
    for last in [false, true] {
        let next = [
            (0, pair.send(0, 2, 100, Nanos::MAX)),
            (1, pair.send(1, 1, 100, Nanos::MAX)),
        ];
        if !settles(&mut pair, limit) {
            return Err("stands still later");
        }
        let delivered = |&(node, slot): &(usize, u32)| {
            let completed = &pair.sides[node].host.completed;
            completed.contains(&(slot, SendStatus::Delivered))
        };
        if last && !next.iter().all(delivered) {
            return Err("sends nothing more");
        }
    }
    let told = pair.sides.iter().map(|side| side.host.completed.len());
    if told.sum::<usize>() as u32 != pair.next_slot {
        return Err("tells not of every send");
    }
    let delivered = pair.sides[1].host.delivered.iter();
    Ok(delivered.map(|(delivery, _)| delivery.tag).collect())
}

/// Until nothing is under way. Applications resume streams that a failed send has paused.
fn settles(pair: &mut Pair, limit: Nanos) -> bool {
    (0..10).any(|_| {
        pair.resume(0, 2);
        pair.resume(1, 1);
        pair.run_until(limit / 10, Pair::all_settled)
    })
}

/// Tries every case; complains of all in which something stood still, by name.
fn none_stands_still<C: Copy + core::fmt::Debug>(
    cases: impl IntoIterator<Item = C>,
    try_one: impl Fn(C) -> Result<(), &'static str>,
) {
    let tried = cases.into_iter();
    let found: Vec<_> = tried
        .filter_map(|case| Some((case, try_one(case).err()?)))
        .collect();
    assert!(found.is_empty(), "{} of them: {found:?}", found.len());
}

/// Every profile with every one of these.
fn profiles_with<T: Copy>(
    all: impl IntoIterator<Item = T> + Clone,
) -> impl Iterator<Item = (Profile, T)> {
    let with = move |profile| all.clone().into_iter().map(move |one| (profile, one));
    Profile::ALL.into_iter().flat_map(with)
}

fn jump(number: u32, by: i32) -> u32 {
    number.wrapping_add_signed(by)
}

// The engine that dies had accepted its last sends under numbers that were not due, and counted on from there.
#[test]
fn numbers_that_jumped_before_a_takeover_hold_nobody_up() {
    let cases =
        profiles_with(JUMPS).flat_map(|(profile, by)| [0, 1, 9].map(|sound| (profile, by, sound)));
    none_stands_still(cases, |(profile, by, sound)| {
        let (mut pair, sends) = under_way(profile);
        let host = &mut pair.sides[0].host;
        for accepted in &mut host.accepted {
            if sends[sound..].contains(&accepted.0.id.slot) {
                accepted.3 = jump(accepted.3, by);
            }
        }
        for stream in host.sending.values_mut() {
            stream.3 = jump(stream.3, by);
        }
        goes_on(pair, 0)
    });
}

// Every send has its own wrong number, some the same; the next number is one more of them.
#[test]
fn numbers_all_over_the_place_hold_nobody_up() {
    none_stands_still(profiles_with(1..tries(200)), |(profile, seed)| {
        let (mut pair, sends) = under_way(profile);
        pair.random ^= seed.wrapping_mul(0x1234_5678_9abc_def1);
        let reach = [30, 300, 3_000][seed as usize % 3];
        let mut jumps: Vec<i32> = (0..=sends.len())
            .map(|_| (pair.dice() % (2 * reach)) as i32 - reach as i32)
            .collect();
        let host = &mut pair.sides[0].host;
        for accepted in &mut host.accepted {
            if sends.contains(&accepted.0.id.slot) {
                accepted.3 = jump(accepted.3, jumps.pop().unwrap());
            }
        }
        for stream in host.sending.values_mut() {
            stream.3 = jump(stream.3, jumps[0]);
        }
        goes_on(pair, 0)
    });
}

// Nothing is under way; the number that is used next is another.
#[test]
fn a_next_number_that_jumped_holds_nobody_up() {
    none_stands_still(profiles_with(JUMPS), |(profile, by)| {
        let (mut pair, _) = under_way(profile);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        for stream in pair.sides[0].host.sending.values_mut() {
            stream.3 = jump(stream.3, by);
        }
        goes_on(pair, 0)
    });
}

// The receiver expects another number than it did.
#[test]
fn a_base_that_jumped_holds_nobody_up() {
    none_stands_still(profiles_with(JUMPS), |(profile, by)| {
        let (mut pair, _) = under_way(profile);
        for stream in pair.sides[1].host.receiving.values_mut() {
            stream.3 = jump(stream.3, by);
        }
        goes_on(pair, 1)
    });
}

// The engine that dies had written another epoch into its last frames. Expect: its successor, whose epoch is lower, is believed all the same, also
// if it is the one that speaks first.
#[test]
fn an_epoch_that_was_never_true_holds_nobody_up() {
    let cases = [1, 2, 31, 1 << 20, (1 << 31) - 1].map(|by| [(by, 0), (by, 1)]);
    none_stands_still(cases.into_iter().flatten(), |(by, speaks)| {
        let (mut pair, _) = under_way(Profile::Default);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        let epoch = pair.sides[0].endpoint.config.engine_epoch;
        pair.sides[0].endpoint.config.engine_epoch = epoch + by;
        pair.send(0, 2, 100, Nanos::MAX);
        pair.run_until(5 * LATENCY, |_| false);
        pair.sides[0].endpoint.config.engine_epoch = epoch;
        for _ in 0..10 {
            pair.send(speaks, 2 - speaks as u16, 4_000, Nanos::MAX);
        }
        goes_on(pair, 0)
    });
}

// The engine that dies had opened its stream under an epoch that it never drew. Expect: the stream goes on under one that comes after it. What was
// delivered under the lie may come again: REFUSED proves to a successor that nothing was. End-to-end integrity says so.
#[test]
fn a_stream_epoch_that_was_never_drawn_holds_nobody_up() {
    let cases = profiles_with([1, 2, 31, 1 << 20, (1 << 31) - 1]);
    none_stands_still(cases, |(profile, by)| {
        let (mut pair, _) = under_way(profile);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        pair.send(0, 2, 100, Nanos::MAX);
        let sending = &mut pair.sides[0].endpoint.send;
        let slot = sending.iter().next().unwrap().0;
        let stream = sending.get_mut(slot).unwrap();
        (stream.epoch, stream.established) = (stream.epoch + by, false);
        pair.run_until(5 * LATENCY, |_| false);
        went_on(pair, 0).map(drop)
    });
}

// The engine that dies had closed an epoch that it never drew. Expect: as above; if the epoch may be one that was drawn, later ones are reached soon.
#[test]
fn an_epoch_that_was_closed_and_never_drawn_holds_nobody_up() {
    let cases = [1, 31, 1 << 20, 1 << 30, (1 << 30) + 1, (1 << 31) - 1];
    none_stands_still(cases, |by| {
        let (mut pair, _) = under_way(Profile::Default);
        assert!(pair.run_until(SECOND, Pair::all_settled));
        let mut wire = pair.sides[0].endpoint.send.iter().next().unwrap().1.wire();
        wire.epoch += by;
        let Side { endpoint, host } = &mut pair.sides[1];
        let (node, queue) = (NodeId(1), 0);
        let peer = endpoint.peer_index[&Peer { node, queue }];
        endpoint.on_close(peer, &wire, host);
        goes_on(pair, 0)
    });
}

// An engine that is not itself any more lies in some of its frames, until it dies. Expect: nobody panics, and once its successor is there everything
// goes on, both ways. What was believed meanwhile is not judged.
#[test]
fn lies_of_a_dying_engine_hold_nobody_up() {
    none_stands_still(profiles_with(1..tries(300)), |(profile, seed)| {
        let (mut pair, _) = under_way(profile);
        pair.random ^= seed.wrapping_mul(0x1234_5678_9abc_def1);
        pair.lies[0] = [30, 300, 1_000][seed as usize % 3];
        for _ in 0..8 {
            let len = [100, 3_000, 40_000][pair.dice() as usize % 3];
            pair.send(0, 2, len, Nanos::MAX);
            pair.send(1, 1, len, Nanos::MAX);
            pair.run_until(5 * LATENCY, |_| false);
        }
        pair.lies[0] = 0;
        went_on_within(60 * SECOND, pair, 0).map(drop)
    });
}
