//! Grants: the budget, whose turn it is, and senders that do not use theirs (transport.md §8).

use super::*;
use crate::endpoint::grants::Grants;
use crate::endpoint::long_message::{LongMessage, RangeSet};
use crate::endpoint::slab::Slab;
use crate::wire::Chunk;

fn policy(grant_bytes: u32, grant_budget_bytes: u32) -> Policy {
    Policy {
        grant_bytes,
        grant_budget_bytes,
        ..Policy::default()
    }
}

fn desk() -> Desk {
    Desk::new(policy(64 * 1024, 1 << 20))
}

/// A receiver's long messages and its budget.
struct Desk {
    grants: Grants,
    rows: Slab<LongMessage>,
    policy: Policy,
    age: u64,
}

impl Desk {
    fn new(policy: Policy) -> Self {
        Self {
            grants: Grants::default(),
            rows: Slab::new(),
            policy,
            age: 0,
        }
    }

    fn add(&mut self, priority: Priority, total: u32) -> u32 {
        self.age += 1;
        let long = LongMessage {
            stream: 0,
            number: 0,
            buffer: BufferId {
                port: PortId(0),
                slot: 0,
                generation: 1,
            },
            priority,
            total,
            received: 0,
            ranges: RangeSet::default(),
            unasked: 0,
            granted: 0,
            cts: None,
            asked_at: None,
            report: 0,
            seen: 0,
            age: self.age,
            heard_at: 0,
            silent: false,
        };
        let row = self.rows.insert(long);
        self.grants.add(row, &long, &self.policy);
        row
    }

    /// Everybody who gets something, in order.
    fn give(&mut self) -> Vec<u32> {
        let mut served = Vec::new();
        while let Some(row) = self.grants.give(&mut self.rows, &self.policy) {
            served.push(row);
        }
        if self.rows.len() < 200 {
            assert!(self.under_way() <= u64::from(self.policy.grant_budget_bytes));
        }
        served
    }

    fn under_way(&self) -> u64 {
        self.rows.iter().map(|(_, long)| long.counted()).sum()
    }

    fn long(&self, row: u32) -> LongMessage {
        *self.rows.get(row).unwrap()
    }

    /// Bytes come; a message that is whole goes away.
    fn arrive(&mut self, row: u32, bytes: u32) -> bool {
        let long = self.rows.get_mut(row).unwrap();
        let received = (long.received + bytes).min(long.granted);
        self.grants.received(row, long, received, &self.policy);
        let whole = received == long.total;
        if whole {
            let long = self.rows.remove(row).unwrap();
            self.grants.remove(row, &long);
        }
        whole
    }

    fn check(&self) {
        self.grants.check_consistency(&self.rows, &self.policy);
    }
}

#[test]
fn at_least_a_frame_and_never_more_than_the_budget() {
    for (grant, budget) in [
        (1, 1),
        (1_408, 1_408),
        (9_000, 9_000),
        (22_528, 100_000),
        (1 << 20, 1 << 20),
    ] {
        let mut desk = Desk::new(policy(grant, budget));
        let rows: Vec<u32> = (0..20)
            .map(|i| desk.add(Priority::Low, (5 * grant).min(9_000) + i * 7))
            .collect();
        let mut left = rows.len();
        for turn in 0.. {
            let served = desk.give();
            assert!(
                !served.is_empty() || desk.under_way() > 0,
                "{grant} of {budget}: stuck"
            );
            for &row in &served {
                let long = desk.long(row);
                let least = grant.min(1_408).min(long.total - long.received);
                assert!(long.granted - long.received >= least, "{long:?}");
            }
            for &row in &rows {
                if desk
                    .rows
                    .get(row)
                    .is_some_and(|long| long.granted > long.received)
                    && desk.arrive(row, 1_408)
                {
                    left -= 1;
                }
            }
            desk.check();
            if left == 0 {
                break;
            }
            assert!(turn < 1_000_000);
        }
    }
}

// Thousands wait. Expect: in order of what is to come, in the time that a few comparisons each take.
#[test]
fn thousands_are_served_shortest_first() {
    let mut desk = desk();
    let lengths: Vec<u32> = (0..20_000).map(|i| 64_000 + i * 7_919 % 20_011).collect();
    for &len in &lengths {
        desk.add(Priority::Low, len);
    }
    let mut done = Vec::new();
    let mut served: VecDeque<u32> = desk.give().into();
    while let Some(row) = served.pop_front() {
        let total = desk.long(row).total;
        if desk.arrive(row, 64_000) {
            done.push(total);
        }
        for row in desk.give() {
            if !served.contains(&row) {
                served.push_back(row);
            }
        }
        if desk.rows.get(row).is_some_and(|l| l.granted > l.received) && !served.contains(&row) {
            served.push_back(row);
        }
    }
    desk.check();
    assert_eq!(done.len(), lengths.len());
    // But for the oldest, which the reserve serves, short ones are done first.
    let early = done[..10_000].iter().filter(|len| **len < 74_000).count();
    assert!(early > 8_000, "{early}");
}

// Short ones never stop coming. Expect: the long one that came first moves all the time.
#[test]
fn the_oldest_has_a_sixteenth() {
    let mut desk = desk();
    for _ in 0..40 {
        desk.add(Priority::Low, 60_000);
    }
    let old = desk.add(Priority::Low, 100_000_000);
    desk.age += 1;
    for _ in 0..2_000 {
        for row in desk.give() {
            if row != old && desk.arrive(row, 60_000) {
                desk.add(Priority::Low, 60_000);
            }
        }
        desk.arrive(old, 6_000);
        desk.check();
    }
    assert!(desk.long(old).received > 1_000_000, "{:?}", desk.long(old));
}

#[test]
fn neither_priority_starves_the_other() {
    for greedy in [Priority::Low, Priority::High] {
        let modest = match greedy {
            Priority::Low => Priority::High,
            Priority::High => Priority::Low,
        };
        let mut desk = desk();
        for _ in 0..100 {
            desk.add(greedy, 60_000);
        }
        desk.give();
        let late = desk.add(modest, 60_000);
        assert_eq!(desk.give(), [late], "there is room for it at once");
        assert_eq!(desk.long(late).granted, 60_000);
    }
    // High goes first.
    let mut desk = desk();
    desk.add(Priority::Low, 100);
    let high = desk.add(Priority::High, 60_000);
    assert_eq!(desk.give()[0], high);
}

#[test]
fn what_a_silent_sender_was_granted_goes_to_others() {
    let mut pair = Pair::new(1472);
    for side in &mut pair.sides {
        side.endpoint.obey(policy(100_000, 100_000));
        side.endpoint.config.policy.unreachable_after_ms = 60_000;
        side.endpoint.port_opened(PortId(6));
    }
    pair.send(0, 2, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    // Its request comes through, and nothing after it.
    let slot = pair.send(0, 2, 1_000_000, Nanos::MAX);
    pair.step();
    pair.step();
    pair.loss = 1000;
    let granted = |pair: &Pair| {
        let mut longs = pair.sides[1].endpoint.longs.iter();
        longs.next().map(|(_, long)| long.counted())
    };
    assert!(pair.run_until(SECOND, |pair| granted(pair) > Some(80_000)));
    let since = pair.now;
    assert!(pair.run_until(SECOND, |pair| granted(pair) == Some(0)));
    let after = pair.now - since;
    assert!((20_000_000..110_000_000).contains(&after), "{after}");
    assert_eq!(pair.sides[1].endpoint.counters().grants_lapsed, 1);
    // Here it is again.
    pair.loss = 0;
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0)[slot as usize], SendStatus::Delivered);
    pair.check_deliveries();
}

// A long message under way to a receiver that begins to take frames in gulps, then two more, then an end of it. Expect: granted as much as a gulp at once, all together twice that; then nothing
// until no more is under way than the policy's budget holds; nothing is lost.
#[test]
fn who_takes_frames_in_gulps_grants_as_much_as_one() {
    const GULP: u32 = 600_000;
    let mut pair = Pair::new(9_000);
    let policy = Policy::default();
    let under_way = |pair: &Pair| -> Vec<u64> {
        let longs = pair.sides[1].endpoint.longs.iter();
        longs.map(|(_, long)| long.counted()).collect()
    };
    pair.send(0, 2, 4_000_000, Nanos::MAX);
    let granted = |pair: &Pair| under_way(pair).iter().sum::<u64>() > 0;
    assert!(pair.run_until(SECOND, granted));
    let before = under_way(&pair)[0];
    assert!(before <= u64::from(policy.grant_bytes), "{before}");
    let now = pair.now;
    pair.sides[1].endpoint.grant_at_least(now, GULP);
    assert_eq!(under_way(&pair), [u64::from(GULP)]);
    for _ in 0..2 {
        pair.send(0, 2, 4_000_000, Nanos::MAX);
    }
    let budget = u64::from(policy.grant_budget_bytes);
    let all = |pair: &Pair| under_way(pair).iter().sum::<u64>();
    assert!(pair.run_until(SECOND, |pair| all(pair) > u64::from(GULP)));
    let mut left = all(&pair);
    assert!(left > budget && left <= u64::from(2 * GULP), "{left}");
    let now = pair.now;
    pair.sides[1].endpoint.grant_at_least(now, 0);
    while left > budget {
        pair.step();
        assert!(all(&pair) <= left, "granted beyond the budget");
        left = all(&pair);
    }
    for _ in 0..40 {
        pair.step();
        assert!(all(&pair) <= budget);
    }
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
    pair.check_deliveries();
}

// Gulps begin and end at any time, on both sides, while frames are lost and overtake each other; the pair's own checks look at every step. Expect: everything arrives once.
#[test]
fn gulps_may_begin_and_end_at_any_time() {
    for frame in [1_472, 9_000] {
        let mut pair = Pair::new(frame);
        (pair.loss, pair.late) = (20, 50);
        for _ in 0..6 {
            pair.send(0, 2, 700_000, Nanos::MAX);
            pair.send(1, 1, 300_000, Nanos::MAX);
        }
        let mut settled = false;
        for _ in 0..1_000_000 {
            let gulp = [0, 64 * u32::from(frame), 2_000_000][pair.dice() as usize % 3];
            let (side, now) = (pair.dice() as usize % 2, pair.now);
            pair.sides[side].endpoint.grant_at_least(now, gulp);
            pair.step();
            settled = pair.all_settled();
            if settled {
                break;
            }
        }
        assert!(settled);
        pair.check_deliveries();
    }
}

// More wait than the policy calls a crowd. Expect: later requests bring no data, until the crowd is gone.
#[test]
fn in_a_crowd_requests_travel_alone() {
    let mut pair = Pair::new(1472);
    for side in &mut pair.sides {
        side.endpoint.obey(policy(2_000, 2_000));
        side.endpoint.config.policy.crowd = 3;
        (6..20).for_each(|port| side.endpoint.port_opened(PortId(port)));
    }
    pair.send(0, 2, 1, Nanos::MAX);
    assert!(pair.run_until(SECOND, Pair::all_settled));
    let requests = |pair: &Pair, from: usize| {
        let mut lens = Vec::new();
        for (_, bytes) in &pair.log[from..] {
            let segments: [&[u8]; 1] = [bytes];
            for (chunk, _) in wire::parse(&segments).unwrap().chunks() {
                if let Chunk::Rts { payload, .. } = chunk {
                    lens.push(payload.len);
                }
            }
        }
        lens
    };
    for _ in 0..8 {
        let start = pair.log.len();
        pair.send(0, 2, 40_000, Nanos::MAX);
        pair.run_until(6 * LATENCY, |_| false);
        let crowd = pair.sides[1].endpoint.longs.len() > 4; // it was told of more than three
        let alone = requests(&pair, start).iter().all(|len| *len == 0);
        assert!(!crowd || alone, "{:?}", requests(&pair, start));
    }
    assert!(requests(&pair, 0).iter().filter(|len| **len == 0).count() >= 3);
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
    pair.check_deliveries();
    let start = pair.log.len();
    pair.send(0, 2, 1, Nanos::MAX); // its answer says that the crowd is gone
    pair.send(0, 2, 40_000, Nanos::MAX);
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
    pair.send(0, 2, 40_000, Nanos::MAX);
    assert!(pair.run_until(10 * SECOND, Pair::all_settled));
    assert!(requests(&pair, start).last().is_some_and(|len| *len > 0));
}
