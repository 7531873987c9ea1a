//! How many bytes of long messages are under way, and whose.
//!
//! Problem: a thousand senders of long messages to one receiver neither may overflow it nor starve each other. RMPP grants
//! what its own budget holds, at least a packet, at most a cap (001, Figure 8); transport.md §8.2, §8.3
//!
//! Idea: the receiver alone decides. `granted` is an absolute limit per message; a message is *hungry* when less than half of
//! `grant_bytes` is under way and it was not granted whole. Hungry messages stand in heaps: by what is still to come, per priority, and by age. The one with
//! the least to come is served, high priority first, while the budget lasts. A sixteenth of the budget belongs to the message that has
//! waited longest and has nothing under way, so that short ones cannot starve it; another one is low's while high is busy, and one high's while low is.
//! What is given at once is at least a frame, and a quarter of `grant_bytes` if the budget is as large, or every frame that arrives would be
//! answered by a CTS for the next. First bytes that a sender says it sends unasked are granted from the start, and stay out of the budget: its credit
//! pays for them (transport.md §8.4).
//!
//! A sender that was granted and says nothing must not hold the budget: after a while its message is *silent*, and what it was granted is given
//! to others. The message keeps its place and its limit; its first bytes count again what is under way, and nothing more is given
//! until that has drained.
//!
//! Rejected: looking at all messages for each grant (a thousand of them, for each frame that arrives); taking a limit back
//! (it may have been used already).
//!
//! Invariants: `under_way` is the sum of `granted - received`, unasked bytes left out, over messages that are not silent, per priority; it exceeds the budget only
//! by what silent ones woke up with, and after an end of gulps ([`Endpoint::grant_at_least`]) by what was granted during them; exactly the hungry messages stand in the heaps; watched are those with bytes
//! under way.

use super::Endpoint;
use super::heap::Heap;
use super::long_message::LongMessage;
use super::slab::Slab;
use super::timers::Owner;
use crate::ident::Nanos;
use crate::policy::Policy;

/// The part of the budget set aside for the message that has waited longest, and for each priority from the other.
const RESERVE: u64 = 16;
/// A sender has so many of its shortest timeouts to use what it was granted: more than a budget takes through a slow link.
const SILENT_AFTER_RTOS: Nanos = 25;
const SILENT_AFTER_MIN: Nanos = 10_000_000;

/// The budget and who wants of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Grants {
    /// The newest time the endpoint was told.
    clock: Nanos,
    under_way: [u64; 2],
    /// Hungry messages by priority, the least to come first.
    shortest: [Heap; 2],
    /// Hungry messages, the oldest first.
    oldest: Heap,
    /// Messages with bytes under way, by when to see whether they came.
    watched: Heap,
}

impl Grants {
    pub(super) fn tick(&mut self, now: Nanos) {
        self.clock = now;
    }

    /// A message was added.
    pub(super) fn add(&mut self, row: u32, long: &LongMessage, policy: &Policy) {
        self.under_way[long.priority as usize] += long.counted();
        self.track(row, long, policy);
    }

    /// It is gone.
    pub(super) fn remove(&mut self, row: u32, long: &LongMessage) {
        let under_way = &mut self.under_way[long.priority as usize];
        *under_way = under_way.saturating_sub(long.counted());
        self.shortest[long.priority as usize].remove(row);
        self.oldest.remove(row);
        self.watched.remove(row);
    }

    /// So many bytes of the message have been received by now; its sender is there.
    pub(super) fn received(
        &mut self,
        row: u32,
        long: &mut LongMessage,
        bytes: u32,
        policy: &Policy,
    ) {
        let under_way = &mut self.under_way[long.priority as usize];
        *under_way = under_way.saturating_sub(long.counted());
        long.received = bytes;
        (long.silent, long.heard_at) = (false, self.clock);
        *under_way += long.counted();
        self.track(row, long, policy);
    }

    /// Keeps the heaps in step.
    fn track(&mut self, row: u32, long: &LongMessage, policy: &Policy) {
        let shortest = &mut self.shortest[long.priority as usize];
        if long.is_hungry(policy) {
            let to_come = u64::from(long.total - long.received);
            shortest.set(row, to_come << 32 | long.age & 0xffff_ffff);
            self.oldest.set(row, long.age);
        } else {
            shortest.remove(row);
            self.oldest.remove(row);
        }
        if long.counted() == 0 {
            self.watched.remove(row);
        } else if self.watched.key(row).is_none() {
            self.watched
                .set(row, self.clock.saturating_add(silent_after(policy)));
        }
    }

    /// Raises one message's limit. Returns its row, to be called again until `None`.
    pub(super) fn give(&mut self, rows: &mut Slab<LongMessage>, policy: &Policy) -> Option<u32> {
        let shares = Shares::of(policy);
        for class in [1, 0] {
            if let Some((_, row)) = self.shortest[class].first()
                && let Some(long) = rows.get_mut(row)
            {
                let taken = self.under_way[class] + self.under_way[1 - class].max(shares.floor);
                let spare = shares.common.saturating_sub(taken);
                let wanted = long.wanted(policy);
                if spare > 0 && spare >= wanted.min(shares.quantum) {
                    self.raise(row, long, wanted.min(spare), policy);
                    return Some(row);
                }
            }
        }
        let (_, row) = self.oldest.first()?;
        let long = rows.get_mut(row)?;
        let left = shares.budget.saturating_sub(self.under_way.iter().sum());
        let wanted = long.wanted(policy);
        let bytes = wanted.min(shares.reserve).min(left);
        if long.counted() > 0 || bytes < wanted.min(step(policy)) {
            return None;
        }
        self.raise(row, long, bytes, policy);
        Some(row)
    }

    fn raise(&mut self, row: u32, long: &mut LongMessage, bytes: u64, policy: &Policy) {
        long.granted += bytes as u32; // at most what is still to come
        long.cts = long.cts.or(Some(false));
        long.heard_at = self.clock;
        self.under_way[long.priority as usize] += bytes;
        self.track(row, long, policy);
    }

    /// Looks after those that were granted a while ago. True if something came back.
    fn look(&mut self, rows: &mut Slab<LongMessage>, policy: &Policy) -> u64 {
        let mut lapsed = 0;
        while let Some((_, row)) = self.watched.first().filter(|&(at, _)| at <= self.clock) {
            let Some(long) = rows.get_mut(row) else {
                self.watched.remove(row);
                continue;
            };
            let at = long.heard_at.saturating_add(silent_after(policy));
            if at > self.clock {
                self.watched.set(row, at);
                continue;
            }
            let under_way = &mut self.under_way[long.priority as usize];
            *under_way = under_way.saturating_sub(long.counted());
            long.silent = true;
            self.track(row, long, policy);
            lapsed += 1;
        }
        lapsed
    }

    /// The policy grants something else: who is hungry now?
    fn again(&mut self, rows: &Slab<LongMessage>, policy: &Policy) {
        for (row, long) in rows.iter() {
            self.track(row, long, policy);
        }
    }

    /// When to look again.
    pub(super) fn look_at(&self) -> Nanos {
        self.watched.first().map_or(Nanos::MAX, |(at, _)| at)
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_consistency(&self, rows: &Slab<LongMessage>, policy: &Policy) {
        let mut sums = [0; 2];
        for (row, long) in rows.iter() {
            let class = long.priority as usize;
            sums[class] += long.counted();
            let hungry = long.is_hungry(policy);
            assert_eq!(
                self.shortest[class].key(row).is_some(),
                hungry,
                "{row} by what is to come"
            );
            assert_eq!(self.oldest.key(row).is_some(), hungry, "{row} by age");
            assert_eq!(
                self.watched.key(row).is_some(),
                long.counted() > 0,
                "{row} watched"
            );
            assert!(
                long.received <= long.granted && long.granted <= long.total,
                "{long:?}"
            );
        }
        assert_eq!(self.under_way, sums);
        for heap in [
            &self.shortest[0],
            &self.shortest[1],
            &self.oldest,
            &self.watched,
        ] {
            heap.check_consistency();
            assert!(
                heap.rows().all(|row| rows.get(row).is_some()),
                "a row that is gone"
            );
        }
    }
}

/// The budget, divided.
struct Shares {
    budget: u64,
    /// What all may use together.
    common: u64,
    /// The part of it that one priority leaves to the other.
    floor: u64,
    /// For the one that has waited longest.
    reserve: u64,
    /// Less than this is not worth a CTS, unless it is all that is wanted.
    quantum: u64,
}

impl Shares {
    fn of(policy: &Policy) -> Self {
        let (budget, step) = (u64::from(policy.grant_budget_bytes), step(policy));
        let part = budget / RESERVE;
        let reserve = part.max(step).min(budget);
        let common = budget - reserve;
        let floor = if part >= step { part } else { 0 };
        let most = common - floor;
        let quantum = u64::from(policy.grant_bytes / 4)
            .max(step)
            .min((most / 2).max(1));
        Self {
            budget,
            common,
            floor,
            reserve,
            quantum,
        }
    }
}

/// The least that is worth a CTS: a frame, or what the policy grants at all.
fn step(policy: &Policy) -> u64 {
    u64::from(policy.grant_bytes.clamp(1, 9_000))
}

fn silent_after(policy: &Policy) -> Nanos {
    (Nanos::from(policy.rto_min_us) * 1_000 * SILENT_AFTER_RTOS).max(SILENT_AFTER_MIN)
}

impl Endpoint {
    /// From now on a long message is granted at least so much, and all together twice that, where the policy says less; with 0 as the policy says. For a receiver that takes
    /// frames in gulps: a grant must hold one, or its senders have nothing that they may send while it swallows. What was granted stays granted.
    pub fn grant_at_least(&mut self, now: Nanos, bytes: u32) {
        let policy = &self.config.policy;
        self.granting = Policy {
            grant_bytes: policy.grant_bytes.max(bytes),
            grant_budget_bytes: policy.grant_budget_bytes.max(bytes.saturating_mul(2)),
            ..*policy
        };
        self.train = None;
        self.grants.tick(now);
        self.grants.again(&self.longs, &self.granting);
        self.give_grants();
    }

    /// Spends the budget.
    pub(super) fn give_grants(&mut self) {
        while let Some(row) = self.grants.give(&mut self.longs, &self.granting) {
            let Some(slot) = self.longs.get(row).map(|long| long.stream) else {
                return;
            };
            if let Some(stream) = self.receive.get_mut(slot) {
                stream.due.grants = true;
            }
            self.queue_control(slot);
        }
        self.timers.arm(Owner::Grants, self.grants.look_at());
    }

    /// What silent senders were granted goes to others.
    #[cold]
    pub(super) fn grants_timeout(&mut self) {
        let lapsed = self.grants.look(&mut self.longs, &self.granting);
        self.counters.grants_lapsed += lapsed;
        self.give_grants();
    }

    /// Whether requests to us had better travel without data (transport.md §8.3).
    pub(super) fn is_crowded(&self) -> bool {
        self.longs.len() > self.config.policy.crowd as usize
    }
}
