//! Who may fill receive buffers unasked, and how many.
//!
//! Problem: a receiver has so many buffers, and every possible sender wants to be able to send at once. GAMMA gives each sender a
//! reserved credit (002), which a cluster of thousands cannot pay. transport.md §9.1, §9.2, §9.3
//!
//! Idea: credit is two absolute serial numbers in every frame header but bare frames', counted in receive buffers: what we sent so far, and how far
//! the receiver lets us go. `limit = highest count seen + eager_buffers`, so losing frames costs nothing for longer than until
//! the next frame arrives, and one frame restores the whole credit. Only frames with unasked payload (EAGER, RTS with data)
//! are charged; granted DATA and all control have buffers of their own, so acknowledgements can never deadlock.
//!
//! The credit itself is shared out: a peer that holds a *share* is let go `eager_buffers` beyond what was seen of it, one without is
//! not let go any further, and there are as many shares as the budget holds. Free shares go to whoever says HELLO. A peer without
//! credit asks first: its messages travel as RTS without data and are granted, and its asking makes it a candidate.
//! While somebody waits, a hand goes round the holders: one that did not use its share for a while, or had it for long, is no longer
//! let go further and sees RETURN-CREDIT in our frames, upon which it counts what it has left as sent. That is idempotent, and
//! repeated until it is seen. The share then goes to whoever waited longest, so each gets its turn.
//!
//! A limit is believed only in a frame whose writer had heard from us since our count began (its echo says so): counts begin anew
//! where a peer was forgotten, and HELLO makes the other side begin anew with them.
//!
//! Rejected: relative credits (a lost credit frame loses credit); credit per stream (256 × 256 × nodes windows reserve memory
//! nobody has); an initial credit that both ends assume (nobody may have it to give); shrinking everybody's share as
//! peers come (limits only ever grow, so nothing could be taken back).
//!
//! Invariants: `sent` never passes `limit` but for a limit given back; `allowed - seen` is at most `eager_buffers` and 0 without a share;
//! holders (those called back included) times `eager_buffers` is within the budget. So what peers may fill unasked, summed, never
//! exceeds the budget, except for what a peer that was given up for dead, or an engine that was replaced, had left.

use alloc::collections::VecDeque;

use super::Endpoint;
use super::timers::Owner;
use crate::ident::{Nanos, Priority, serial_lt};
use crate::policy::Policy;
use crate::wire::FrameHeader;

/// Payload bytes of one receive buffer in copy mode: a 4096-byte UMEM frame less its headroom.
pub(super) const BUFFER_BYTES: usize = 3840;
/// More than any receiver gives to one peer: a limit beyond it is absurd.
const LIMIT_MAX: u32 = 1 << 20;
/// A share that was not used for so long is idle.
const IDLE_AFTER: Nanos = 1_000_000;
/// And one that was held for so long is somebody else's turn.
const TURN: Nanos = 20_000_000;
/// Who asked last so long ago does not wait any more.
const ASKING_FOR: Nanos = 1_000_000_000;
/// Holders looked at each time somebody asks.
const LOOK: usize = 8;

/// A peer's part of the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Share {
    /// None, and it does not want one.
    #[default]
    None,
    /// None; it waits since then.
    Asking(Nanos),
    /// Held since then.
    Held(Nanos),
    /// Called back; the flag went out last then.
    Returning(Nanos),
}

impl Share {
    fn is_held(self) -> bool {
        matches!(self, Self::Held(_) | Self::Returning(_))
    }
}

/// Both directions' credit with one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Credit {
    /// What we sent, in receive buffers.
    sent: u32,
    /// How far it may go.
    limit: u32,
    /// It was told, in this association.
    known: bool,
    /// When our count began.
    since: Nanos,
    /// When the newest charged frame left.
    charged_at: Nanos,
    /// We gave our credit back then.
    returned_at: Nanos,
    /// The highest count of theirs.
    seen: u32,
    /// When it grew last.
    seen_at: Nanos,
    /// How far we let it go.
    allowed: u32,
    pub share: Share,
    /// When the share was called back.
    called_at: Nanos,
    /// A frame goes out even if there is nothing else to say.
    pub due: bool,
}

impl Credit {
    pub(super) fn new(now: Nanos) -> Self {
        Self {
            since: now,
            ..Self::default()
        }
    }

    /// Receive buffers of theirs we may still fill unasked.
    pub(super) fn left(&self) -> u32 {
        (self.limit.wrapping_sub(self.sent) as i32).max(0) as u32
    }

    /// Receive buffers of ours it may still fill unasked, as far as we know.
    pub(super) fn given(&self) -> u32 {
        self.allowed.wrapping_sub(self.seen)
    }

    /// Whether it lets us go no further by itself, because it has heard of all we sent. `horizon`: as of when it knows us.
    pub(super) fn is_at_its_end(&self, horizon: Nanos) -> bool {
        self.known && horizon >= self.charged_at
    }

    /// Whether a peer that sent so much may fill so many buffers of ours more as it was told already, and nothing of its share is asked back.
    #[inline]
    pub(super) fn is_far_from_its_end(&self, sent: u32, buffers: u32) -> bool {
        let left = self.allowed.wrapping_sub(sent) as i32;
        left >= 0
            && left as u32 >= buffers
            && !self.due
            && !matches!(self.share, Share::Returning(_))
    }

    /// A frame with unasked payload leaves.
    pub(super) fn charge(&mut self, now: Nanos, buffers: u32) {
        self.sent = self.sent.wrapping_add(buffers);
        self.charged_at = now;
    }

    /// What the header of a frame to the peer says.
    pub(super) fn write(&mut self, policy: &Policy, header: &mut FrameHeader) {
        if policy.eager_budget_buffers == 0 || matches!(self.share, Share::Held(_)) {
            self.allow(self.seen.wrapping_add(policy.eager_buffers));
        }
        header.sent_buffers = self.sent;
        header.credit_limit = self.allowed;
        header.return_credit = matches!(self.share, Share::Returning(_));
        self.due = false;
    }

    fn allow(&mut self, limit: u32) {
        if serial_lt(self.allowed, limit) {
            self.allowed = limit;
        }
    }

    /// What a header of theirs says. `horizon`: as of when its writer knew us. `repeat`: a round trip.
    pub(super) fn learn(
        &mut self,
        now: Nanos,
        header: &FrameHeader,
        horizon: Nanos,
        repeat: Nanos,
    ) {
        if serial_lt(self.seen, header.sent_buffers) {
            (self.seen, self.seen_at) = (header.sent_buffers, now);
            self.allow(self.seen);
        }
        if horizon < self.since || horizon == 0 {
            return;
        }
        self.known = true;
        if serial_lt(self.limit, header.credit_limit)
            && header.credit_limit.wrapping_sub(self.sent) <= LIMIT_MAX
        {
            self.limit = header.credit_limit;
        }
        // A flag that was written before our answer came needs no other, unless the answer was lost.
        if header.return_credit
            && (self.left() > 0 || now >= self.returned_at.saturating_add(repeat))
        {
            self.sent = self.sent.wrapping_add(self.left());
            self.returned_at = now;
            self.due = true;
        }
    }

    /// Their count goes on from here, perhaps backwards.
    fn begin(&mut self, now: Nanos, seen: u32) {
        (self.seen, self.seen_at, self.allowed) = (seen, now, seen);
    }

    /// A HELLO: if the count went backwards it is another one.
    fn begin_if_behind(&mut self, now: Nanos, sent: u32) {
        if serial_lt(sent, self.seen) {
            self.begin(now, sent);
        }
    }

    /// The other side knows nothing of us any more.
    #[cold]
    pub(super) fn void(&mut self, now: Nanos, seen: u32) {
        self.begin(now, seen);
        (self.limit, self.known, self.charged_at) = (self.sent, false, 0);
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_consistency(&self, policy: &Policy) {
        assert!(self.given() <= policy.eager_buffers, "{self:?}");
        if policy.eager_budget_buffers != 0 && !self.share.is_held() {
            assert_eq!(self.given(), 0, "{self:?}");
        }
    }
}

/// Who holds shares, and who wants one.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    /// In the order the hand comes to them.
    holders: VecDeque<u32>,
    /// In the order they asked. Some of them may have gone away since.
    asking: VecDeque<u32>,
    /// Holders that were called back.
    returning: u32,
}

impl Endpoint {
    /// How many shares there are; `None` if everybody has one.
    fn shares_max(&self) -> Option<usize> {
        let policy = &self.config.policy;
        match policy.eager_budget_buffers {
            0 => None,
            budget => Some((budget / policy.eager_buffers.max(1)) as usize),
        }
    }

    /// The peer says HELLO: it gets a share if one is free.
    pub(super) fn offer_share(&mut self, now: Nanos, slot: u32) {
        let free = self
            .shares_max()
            .is_some_and(|max| self.shares.holders.len() < max && self.shares.asking.is_empty());
        if free {
            self.give_share(now, slot);
        }
    }

    /// The peer sent something that asks first.
    #[cold]
    pub(super) fn ask_share(&mut self, now: Nanos, slot: u32) {
        let Some(max) = self.shares_max() else {
            return;
        };
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        match entry.credit.share {
            Share::Held(_) | Share::Returning(_) => return,
            Share::None => self.shares.asking.push_back(slot),
            Share::Asking(_) => {}
        }
        entry.credit.share = Share::Asking(now);
        if self.shares.holders.len() < max {
            return self.pass_shares_on(now);
        }
        let turn = self.shares.holders.len().min(LOOK);
        for _ in 0..turn {
            if self.shares.returning as usize >= self.shares.asking.len() {
                return;
            }
            self.shares.holders.rotate_left(1);
            let Some(&holder) = self.shares.holders.back() else {
                return;
            };
            let Some(entry) = self.peers.get_mut(holder) else {
                continue;
            };
            if let Share::Held(since) = entry.credit.share
                && (now >= entry.credit.seen_at.max(since).saturating_add(IDLE_AFTER)
                    || now >= since.saturating_add(TURN))
            {
                self.call_back(now, holder);
            }
        }
    }

    /// Asks a holder for its share.
    pub(super) fn call_back(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        match entry.credit.share {
            Share::Held(_) => {
                self.shares.returning += 1;
                entry.credit.called_at = now;
            }
            Share::Returning(_) => {}
            Share::None | Share::Asking(_) => return,
        }
        entry.credit.share = Share::Returning(now);
        if entry.credit.given() == 0 {
            return self.take_share(now, slot);
        }
        entry.credit.due = true;
        let again = now.saturating_add(entry.rtt.rto(&self.config.policy, 0));
        self.timers.arm(Owner::Peer(slot), again);
        self.mark_ready(slot, Priority::High);
    }

    /// The peer's timer: repeat a call that was not heard.
    pub(super) fn repeat_call(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get(slot) else {
            return;
        };
        let Share::Returning(called) = entry.credit.share else {
            return;
        };
        let again = called.saturating_add(entry.rtt.rto(&self.config.policy, 0));
        if now < again {
            self.timers.arm(Owner::Peer(slot), again);
        } else if now
            >= entry
                .last_heard
                .max(entry.credit.called_at)
                .saturating_add(self.unreachable_after())
        {
            self.take_share(now, slot);
        } else {
            self.call_back(now, slot);
        }
    }

    /// What a header says about time, credit and crowds, once its writer is known.
    pub(super) fn hear(&mut self, now: Nanos, slot: u32, header: &FrameHeader) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let heard = entry.learn_stamps(now, header);
        let repeat = entry.rtt.repeat(&self.config.policy);
        // A HELLO-ACK to an incarnation that its writer does not believe in yet counts from what our former self had sent.
        let ours = super::truncate(self.config.incarnation);
        let for_us = [0, ours].contains(&header.dst_incarnation);
        let horizon = if for_us { heard.horizon } else { 0 };
        entry.credit.learn(now, header, horizon, repeat);
        let sample = heard.rtt.map(|rtt| (rtt, entry.rtt.min));
        let policy = &self.config.policy;
        entry
            .window
            .learn(now, entry.stamps.known_to(), sample, policy);
        entry.crowded = header.crowded;
        if entry.credit.due {
            self.mark_ready(slot, Priority::High);
        }
        self.share_used(now, slot);
    }

    /// The same for a HELLO, whose sender may have forgotten us and counts anew.
    pub(super) fn hear_hello(&mut self, now: Nanos, slot: u32, header: &FrameHeader) {
        if let Some(entry) = self.peers.get_mut(slot)
            && entry.stamps.is_newer(now, header.sent_at)
        {
            entry.credit.begin_if_behind(now, header.sent_buffers);
        }
        self.hear(now, slot, header);
    }

    /// Something of the peer was heard: perhaps what was left of its share is gone.
    fn share_used(&mut self, now: Nanos, slot: u32) {
        if let Some(entry) = self.peers.get(slot)
            && matches!(entry.credit.share, Share::Returning(_))
            && entry.credit.given() == 0
        {
            self.take_share(now, slot);
        }
    }

    /// The peer's share, if it has one, is free. What it had left is not counted any more.
    #[cold]
    pub(super) fn take_share(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let share = core::mem::take(&mut entry.credit.share);
        match share {
            Share::None => return,
            Share::Asking(_) => return self.shares.asking.retain(|&other| other != slot),
            Share::Held(_) => {}
            Share::Returning(_) => self.shares.returning -= 1,
        }
        entry.credit.allowed = entry.credit.seen;
        if let Some(place) = self.shares.holders.iter().position(|&other| other == slot) {
            self.shares.holders.remove(place);
        }
        self.pass_shares_on(now);
    }

    /// Free shares go to those who asked first.
    #[cold]
    fn pass_shares_on(&mut self, now: Nanos) {
        let max = self.shares_max().unwrap_or(0);
        while self.shares.holders.len() < max
            && let Some(slot) = self.shares.asking.pop_front()
        {
            let Some(entry) = self.peers.get_mut(slot) else {
                continue;
            };
            if let Share::Asking(asked) = core::mem::take(&mut entry.credit.share)
                && now < asked.saturating_add(ASKING_FOR)
            {
                self.give_share(now, slot);
            }
        }
    }

    fn give_share(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        if entry.credit.share == Share::None {
            entry.credit.share = Share::Held(now);
            entry.credit.due = true;
            self.shares.holders.push_back(slot);
            self.mark_ready(slot, Priority::High);
        }
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_shares(&self) {
        let share = |slot: &u32| self.peers.get(*slot).map(|entry| entry.credit.share);
        let mut counts = (0, 0, 0);
        for (_, entry) in self.peers.iter() {
            entry.credit.check_consistency(&self.config.policy);
            entry.window.check_consistency(&self.config.policy);
            match entry.credit.share {
                Share::None => {}
                Share::Asking(_) => counts.0 += 1,
                Share::Held(_) => counts.1 += 1,
                Share::Returning(_) => counts.2 += 1,
            }
        }
        let shares = &self.shares;
        assert_eq!(counts.0, shares.asking.len(), "asking");
        assert_eq!(counts.1 + counts.2, shares.holders.len(), "holders");
        assert_eq!(counts.2, shares.returning as usize, "returning");
        assert!(
            shares
                .holders
                .iter()
                .all(|s| share(s).is_some_and(Share::is_held))
        );
        assert!(
            shares
                .asking
                .iter()
                .all(|s| matches!(share(s), Some(Share::Asking(_)))),
            "who asks"
        );
        assert!(shares.holders.len() <= self.shares_max().unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(sent_buffers: u32, credit_limit: u32) -> FrameHeader {
        FrameHeader {
            sent_buffers,
            credit_limit,
            ..FrameHeader::default()
        }
    }

    /// A count that began at 100 and stands at `sent`.
    fn credit(sent: u32) -> Credit {
        let mut credit = Credit::new(100);
        credit.sent = sent;
        credit.void(100, 0);
        credit
    }

    #[test]
    fn a_limit_counts_once_its_writer_has_heard_of_us() {
        // So much was sent to its predecessor that the serial comparison turns round.
        for sent in [0x9000_0000, 0, 7, u32::MAX - 2] {
            let mut credit = credit(sent);
            // Nothing of ours came there yet, or only something older than our count. Expect: no credit.
            for horizon in [0, 99] {
                credit.learn(200, &header(0, 64), horizon, 10);
                credit.learn(200, &header(0, sent.wrapping_add(64)), horizon, 10);
                assert_eq!((credit.left(), credit.is_at_its_end(300)), (0, false));
            }
            credit.learn(200, &header(0, sent.wrapping_add(64)), 150, 10);
            assert_eq!(credit.left(), 64);
            // An older frame. Expect: nothing is lost. An absurd one. Expect: nothing is gained.
            credit.learn(200, &header(0, sent.wrapping_add(9)), 150, 10);
            credit.learn(200, &header(0, sent.wrapping_add(LIMIT_MAX + 65)), 150, 10);
            assert_eq!(credit.left(), 64);
        }
    }

    #[test]
    fn what_was_sent_is_seen_before_anything_is_asked_for() {
        let mut credit = credit(5);
        assert!(!credit.is_at_its_end(1_000), "no limit was heard");
        credit.learn(200, &header(0, 6), 150, 10);
        credit.charge(300, 1);
        assert_eq!(credit.left(), 0);
        assert!(!credit.is_at_its_end(299) && credit.is_at_its_end(300));
    }

    #[test]
    fn returning_credit_loses_nothing_but_the_credit() {
        let mut credit = credit(5);
        let call = |limit| FrameHeader {
            return_credit: true,
            ..header(0, limit)
        };
        credit.learn(200, &header(0, 69), 150, 10);
        credit.learn(210, &call(69), 150, 10);
        assert_eq!((credit.sent, credit.left(), credit.due), (69, 0, true));
        // The call again, written before the answer came. Expect: silence; later, perhaps the answer was lost.
        credit.due = false;
        credit.learn(215, &call(69), 150, 10);
        assert!(!credit.due);
        credit.learn(221, &call(69), 150, 10);
        assert_eq!((credit.sent, credit.due), (69, true));
        // A new share.
        credit.learn(230, &header(0, 133), 150, 10);
        assert_eq!(credit.left(), 64);
    }

    #[test]
    fn a_count_that_goes_backwards_is_a_new_one() {
        let policy = Policy {
            eager_buffers: 8,
            ..Policy::default()
        };
        let mut credit = credit(0);
        let mut to = FrameHeader::default();
        credit.learn(200, &header(1_000, 0), 0, 10);
        credit.write(&policy, &mut to);
        assert_eq!((to.credit_limit, credit.given()), (1_008, 8));
        credit.begin_if_behind(210, 0);
        credit.write(&policy, &mut to);
        assert_eq!((to.credit_limit, credit.given()), (8, 8));
        credit.begin_if_behind(220, 3);
        assert_eq!(credit.seen, 0, "not behind");
    }
}
