//! How much unasked traffic may be under way to a peer while the network is busy.
//!
//! Problem: credit bounds what fills a receiver, not what fills the queues before it; a thousand senders with credit each overflow the switch they share.
//! transport.md §10; Swift (Kumar et al., SIGCOMM 2020).
//!
//! Idea: what we take from Swift: a window per peer that follows the delay. Below the target (the smallest round trip of late, and
//! `target_us`) it grows by one receive buffer per window acknowledged, well below it by an eighth; above it, it shrinks in proportion to the
//! excess (0.8 × excess / delay, at most by half), and not again before something that left since is answered, or the same queue would be
//! answered twice; a timeout with silence shrinks it to one buffer, from which it doubles per round trip to half of where it was. It starts
//! full, since credit bounds it too, also after a tenth of a second without traffic, and at least one frame may always be under way. Time
//! that the peer held an answer is not in the samples (see `round_trip`), so late acknowledgements are no congestion. Loss at
//! low delay does not shrink it: that is corruption, or a switch that would show in the next delay. With `DelayAndLoss`, the default's, delay alone
//! does not shrink it either: an engine that shares its core is late by milliseconds without any queue in the network (a target of 200 us
//! cost two nodes on two busy cores nine tenths of their rate). A switch that is full delays *and* drops.
//!
//! What is under way is what was charged less what the peer's echo covers: whatever left before it has arrived or is lost. A few marks of (time, count)
//! tell how much that was; none stands for more than a sixteenth of the window. (Eight marks for any number of frames made twice as much seem to
//! be under way on a link with a round trip of a millisecond, and let go of it in bursts that looked like a queue: 117 Mbit/s of 175 at one loss in a thousand.)
//!
//! What we leave: pacing below one packet, topology and flow scaling of the target, the separate window for the host's own delay. Long
//! messages are not bounded here: their receiver paces them (`grants`).
//!
//! Rejected: shrinking on loss (AF_XDP rings drop when an engine is descheduled for a moment); ECN (few networks mark).
//!
//! Invariants: one buffer ≤ window ≤ `eager_buffers`; marks are in order of time and count.

use crate::ident::{Nanos, serial_le};
use crate::policy::{Congestion, Policy};

/// The window's unit.
const ONE: u32 = 256;
/// Marks kept; the newest one stands for all that would be more.
const MARKS: usize = 18;
/// A mark stands for no more than this part of the window, or for a frame: so much must arrive before anything else may leave, and what arrives
/// one by one is answered one by one (the self-clocking of a window).
const MARKS_PER_WINDOW: u32 = 16;

/// What was learned of the network is forgotten after so long without traffic: longer than any queue lasts.
const FORGETS_AFTER: Nanos = 100_000_000;

/// A peer's window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// In 1/256 of a buffer.
    size: u32,
    /// Below it the window doubles per round trip.
    threshold: u32,
    /// When it shrank last.
    shrunk_at: Nanos,
    /// No silence before counts again.
    hold_until: Nanos,
    /// When something was last found lost.
    lost_at: Nanos,
    /// Buffers charged so far, and how many of them are not under way any more.
    sent: u32,
    arrived: u32,
    /// When something was charged last.
    charged_at: Nanos,
    /// Up to this time, so much was sent.
    marks: [(Nanos, u32); MARKS],
    len: u8,
}

impl Window {
    pub(super) fn new() -> Self {
        Self {
            size: u32::MAX, // as far as the policy allows
            threshold: u32::MAX,
            shrunk_at: 0,
            hold_until: 0,
            lost_at: 0,
            sent: 0,
            arrived: 0,
            charged_at: 0,
            marks: [(0, 0); MARKS],
            len: 0,
        }
    }

    /// Buffers.
    pub(super) fn size(&self, policy: &Policy) -> u32 {
        match policy.congestion {
            Congestion::None => policy.eager_buffers,
            Congestion::Delay { .. } | Congestion::DelayAndLoss { .. } => {
                (self.size / ONE).clamp(1, policy.eager_buffers)
            }
        }
    }

    pub(super) fn under_way(&self) -> u32 {
        self.sent.wrapping_sub(self.arrived)
    }

    /// How many more may leave. One frame always may, however long it is.
    pub(super) fn room(&self, policy: &Policy) -> u32 {
        if self.under_way() == 0 || policy.congestion == Congestion::None {
            return u32::MAX;
        }
        self.size(policy).saturating_sub(self.under_way())
    }

    /// A frame of so many leaves.
    pub(super) fn charge(&mut self, now: Nanos, buffers: u32, policy: &Policy) {
        if self.under_way() == 0 && now >= self.charged_at.saturating_add(FORGETS_AFTER) {
            (self.size, self.threshold) = (u32::MAX, u32::MAX);
        }
        self.charged_at = now;
        self.sent = self.sent.wrapping_add(buffers);
        let mark = (now, self.sent);
        let len = usize::from(self.len);
        let before = match len {
            0 | 1 => self.arrived,
            _ => self.marks[len - 2].1,
        };
        let step = self.size(policy) / MARKS_PER_WINDOW;
        match self.marks[..len].last_mut() {
            Some(last)
                if last.0 == now || self.sent.wrapping_sub(before) <= step || len == MARKS =>
            {
                *last = mark;
            }
            _ => {
                self.marks[len] = mark;
                self.len += 1;
            }
        }
    }

    /// The peer has what we sent until `echoed`. `rtt`: a new sample, and the smallest of late.
    pub(super) fn learn(
        &mut self,
        now: Nanos,
        echoed: Nanos,
        rtt: Option<(Nanos, Nanos)>,
        policy: &Policy,
    ) {
        let len = usize::from(self.len);
        let passed = self.marks[..len]
            .iter()
            .take_while(|mark| mark.0 <= echoed)
            .count();
        let mut news = 0;
        if let Some(&(_, sent)) = self.marks[..passed].last() {
            news = sent.wrapping_sub(self.arrived);
            self.arrived = sent;
            self.marks.copy_within(passed..len, 0);
            self.len -= passed as u8;
        }
        let Some((rtt, min)) = rtt.filter(|_| policy.congestion != Congestion::None) else {
            return;
        };
        let target_us = policy.congestion.target_us();
        let congested = match policy.congestion {
            Congestion::DelayAndLoss { .. } => {
                self.lost_at != 0 && now.saturating_sub(self.lost_at) <= rtt
            }
            Congestion::None | Congestion::Delay { .. } => true,
        };
        let most = policy.eager_buffers.saturating_mul(ONE);
        self.size = self.size.min(most);
        let target = min.saturating_add(Nanos::from(target_us) * 1_000);
        if rtt <= target {
            let news = u64::from(news.min(policy.eager_buffers)) * u64::from(ONE);
            let slow = news * u64::from(ONE) / u64::from(self.size.max(ONE));
            let more = match target - rtt >= Nanos::from(target_us) * 500 {
                _ if self.size < self.threshold => news,
                true => slow.max(news / 8),
                false => slow,
            };
            self.size = self.size.saturating_add(more as u32).min(most);
        } else if congested && echoed > self.shrunk_at {
            let excess = 4 * (rtt - target) * u64::from(ONE) / (5 * rtt);
            let less = u64::from(self.size) * excess.min(u64::from(ONE) / 2) / u64::from(ONE);
            self.size = self.size.saturating_sub(less as u32).max(ONE);
            self.threshold = self.size;
            self.shrunk_at = now;
        }
    }

    /// Something of it is lost.
    pub(super) fn lost(&mut self, now: Nanos) {
        self.lost_at = now;
    }

    /// A timer ran out while nothing at all was heard.
    pub(super) fn silence(&mut self, now: Nanos, rto: Nanos, policy: &Policy) {
        if self.under_way() > 0 && now >= self.hold_until {
            if !matches!(policy.congestion, Congestion::DelayAndLoss { .. }) {
                self.threshold = (self.size(policy) * ONE / 2).max(2 * ONE);
                self.size = ONE;
            }
            self.hold_until = now.saturating_add(rto);
            // What was under way is lost, or it would have been heard of: it must not hold back what goes again.
            (self.arrived, self.len) = (self.sent, 0);
        }
    }

    /// Panics when an invariant is broken.
    pub(super) fn check_consistency(&self, policy: &Policy) {
        assert!((1..=policy.eager_buffers).contains(&self.size(policy)));
        for pair in self.marks[..usize::from(self.len)].windows(2) {
            assert!(pair[0].0 < pair[1].0);
            assert!(serial_le(pair[0].1, pair[1].1));
        }
        let last = self.marks[..usize::from(self.len)].last();
        assert_eq!(last.map_or(self.arrived, |mark| mark.1), self.sent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Nanos = 1_000;
    const BASE: Nanos = 10 * US;

    fn policy() -> Policy {
        Policy {
            eager_buffers: 64,
            congestion: Congestion::Delay { target_us: 50 },
            ..Policy::default()
        }
    }

    /// Sends a window and hears of it after `rtt`.
    fn round(window: &mut Window, now: &mut Nanos, rtt: Nanos) {
        let policy = policy();
        let sent = *now;
        loop {
            window.charge(sent, 1, &policy);
            if window.room(&policy) == 0 {
                break;
            }
        }
        assert_eq!(window.under_way(), window.size(&policy));
        *now += rtt;
        window.learn(*now, sent, Some((rtt, BASE)), &policy);
        assert_eq!(window.under_way(), 0);
        window.check_consistency(&policy);
        *now += US;
    }

    #[test]
    fn it_follows_the_delay() {
        let (mut window, mut now) = (Window::new(), 1 << 33);
        assert_eq!(window.size(&policy()), 64, "full at first");
        round(&mut window, &mut now, 60 * US); // at the target
        assert_eq!(window.size(&policy()), 64);
        round(&mut window, &mut now, 80 * US); // 20 us above: 0.8 of a quarter
        assert_eq!(window.size(&policy()), 51);
        round(&mut window, &mut now, 10_000 * US); // by half at most
        assert_eq!(window.size(&policy()), 25);
        let mut rounds_to = |size: u32, rtt: Nanos| {
            (1..).find(|_| {
                round(&mut window, &mut now, rtt);
                window.size(&policy()) >= size
            })
        };
        assert_eq!(rounds_to(30, 50 * US), Some(5), "one buffer per round");
        assert_eq!(rounds_to(60, 20 * US), Some(6), "an eighth per round");
        for _ in 0..100 {
            round(&mut window, &mut now, 1_000 * US);
        }
        assert_eq!(window.size(&policy()), 1, "never less");
    }

    #[test]
    fn it_shrinks_once_per_round_trip() {
        let (mut window, policy, now) = (Window::new(), policy(), 1 << 33);
        for i in 0..10 {
            window.charge(now + i, 1, &policy);
        }
        for i in 0..10 {
            let at = now + 100 * US + i;
            window.learn(at, now + i, Some((100 * US, BASE)), &policy);
        }
        assert_eq!(window.size(&policy), 43, "64 less a third, once");
    }

    #[test]
    fn an_old_queue_is_forgotten() {
        let (mut window, policy, mut now) = (Window::new(), policy(), 1 << 33);
        for _ in 0..20 {
            round(&mut window, &mut now, 10_000 * US);
        }
        assert_eq!(window.size(&policy), 1);
        // Traffic goes on, with pauses shorter than a queue may last. Expect: it is remembered.
        now += FORGETS_AFTER / 2;
        round(&mut window, &mut now, 10_000 * US);
        assert_eq!(window.size(&policy), 1);
        // Nothing for longer, but something is still out. Then it is answered, and again nothing.
        window.charge(now, 1, &policy);
        window.charge(now + 2 * FORGETS_AFTER, 1, &policy);
        assert_eq!(window.size(&policy), 1);
        now += 2 * FORGETS_AFTER;
        window.learn(now, now, None, &policy);
        window.charge(now + FORGETS_AFTER, 1, &policy);
        assert_eq!(window.size(&policy), 64);
    }

    #[test]
    fn what_left_before_it_shrank_says_nothing_new() {
        let (mut window, policy, now) = (Window::new(), policy(), 1 << 33);
        window.charge(now, 1, &policy);
        window.charge(now + 90 * US, 1, &policy);
        window.learn(now + 100 * US, now, Some((100 * US, BASE)), &policy);
        assert_eq!(window.size(&policy), 43);
        // It stood behind the same queue. Expect: no less, though a round trip is over.
        let rtt = Some((120 * US, BASE));
        window.learn(now + 210 * US, now + 90 * US, rtt, &policy);
        assert_eq!(window.size(&policy), 43);
        window.charge(now + 220 * US, 1, &policy);
        window.learn(now + 340 * US, now + 220 * US, rtt, &policy);
        assert!(window.size(&policy) < 43);
    }

    #[test]
    fn what_arrives_one_by_one_is_followed_one_by_one() {
        let (mut window, policy) = (Window::new(), policy());
        // A full window, spread over a long round trip, and so on: each answer lets one go.
        let at = |i: u64| (1 << 33) + i * 10 * US;
        for i in 0..64 {
            window.charge(at(i), 1, &policy);
        }
        assert_eq!(window.room(&policy), 0);
        for i in 0..1_000 {
            window.learn(at(64 + i), at(i), None, &policy);
            assert!(window.under_way() < 64 + 4, "answer {i}");
            for _ in 0..window.room(&policy) {
                window.charge(at(64 + i), 1, &policy);
            }
            assert!(window.room(&policy) == 0 && window.under_way() == 64);
            window.check_consistency(&policy);
        }
    }

    #[test]
    fn silence_leaves_one_and_it_comes_back_fast() {
        let (mut window, policy, mut now) = (Window::new(), policy(), 1 << 33);
        window.silence(now, 1_000 * US, &policy);
        assert_eq!(window.size(&policy), 64, "nothing was under way");
        window.charge(now, 1, &policy);
        window.silence(now + 2_000 * US, 1_000 * US, &policy);
        window.silence(now + 2_001 * US, 1_000 * US, &policy); // another stream's timer
        assert_eq!((window.size(&policy), window.under_way()), (1, 0));
        now += 5_000 * US;
        window.learn(now, now, None, &policy);
        let rounds = (0..).find(|_| {
            round(&mut window, &mut now, 20 * US);
            window.size(&policy) >= 32
        });
        assert_eq!(rounds, Some(4), "1, 2, 4, 8, 16, 32");
    }

    #[test]
    fn delay_without_loss_is_a_busy_core() {
        let congestion = Congestion::DelayAndLoss { target_us: 50 };
        let policy = Policy {
            congestion,
            ..policy()
        };
        let (mut window, mut now) = (Window::new(), 1 << 33);
        let mut late = |window: &mut Window| {
            let sent = now;
            window.charge(sent, 1, &policy);
            now += 1_000 * US;
            window.learn(now, sent, Some((1_000 * US, BASE)), &policy);
            now
        };
        for _ in 0..5 {
            late(&mut window);
        }
        assert_eq!(window.size(&policy), 64, "late, and nothing lost");
        let now = late(&mut window);
        window.lost(now);
        late(&mut window);
        assert_eq!(window.size(&policy), 32, "late, and something lost");
        let now = late(&mut window) + 10_000 * US;
        window.charge(now, 1, &policy);
        window.silence(now, US, &policy);
        assert_eq!((window.size(&policy), window.under_way()), (32, 0));
    }

    #[test]
    fn what_left_after_the_echo_is_under_way() {
        let (mut window, policy, now) = (Window::new(), policy(), (1 << 33) - 5);
        for i in 0..20 {
            window.charge(now + i, 2, &policy);
            window.check_consistency(&policy);
        }
        for (i, left) in [(0, 40), (1, 36), (4, 32), (6, 28), (19, 0), (3, 0)] {
            window.learn(now + 100, now + i, None, &policy);
            assert_eq!(window.under_way(), left, "after {i}");
        }
        // A frame longer than the window still goes.
        window.charge(now + 200, 3, &policy);
        assert_eq!(window.room(&policy), 61);
    }
}
