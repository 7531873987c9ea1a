//! How long it takes to a peer and back, and what it had received when it spoke.
//!
//! Problem: timers must follow the path (RFC 6298), a sample of something sent twice must not lie (Karn), and a sender should know
//! as early as possible what was lost, without a rule of its own for every kind of frame. transport.md §7.1, §7.5; wire.md §2
//!
//! Idea: every frame says when it was written (`sent_at`), and, unless it is bare, repeats the newest such stamp received from the other side (`echo`), and says how long
//! ago that one came (`held`): TCP's time stamps (RFC 7323) with the receiver's own delay taken out, so that late acknowledgements do
//! not lengthen the round trip. A frame that is sent again has another stamp, so each new echo is a true sample. And what the frame
//! answers was known to the peer after our frame of time `echo` had arrived: that time is the *horizon*. Whatever left before it by
//! more than a reordering window and is not reported received, is lost (RACK, RFC 8985).
//!
//! A stamp is 32 bits of nanoseconds, 4.3 s: one compares to another for half of that. After a second without a newer stamp any one is
//! taken, so that a peer that was silent for long is not thought old. No two frames to a peer have the same stamp, though a batch is written at one reading of the clock:
//! an answer says for each frame of it whether it was there. An echo is believed for a second after its stamp; the same echo
//! repeated stands for the same time, however long ago.
//!
//! Rejected: a time stamp per acknowledgement (it would miss NACK, CTS and credit); one message timed at a time, voided by
//! retransmission (no sample at all while there is loss, when it is wanted most).
//!
//! Invariants: a sample is never longer than the time since its frame was written; everything here is volatile and void when either engine is
//! replaced; an absurd echo or stamp costs samples, nothing else.

use crate::ident::{Nanos, serial_lt};
use crate::policy::Policy;
use crate::wire::FrameHeader;
use crate::wire::frame::HELD_UNIT;

/// How long a stamp is worth comparing.
pub(super) const STAMP_GOOD_FOR: Nanos = 1 << 30;
/// Frames that left within so long of each other may change places on the way, however short the way is.
const REORDER_MIN: Nanos = 2_000;
/// The same before the first sample.
const REORDER_UNKNOWN: Nanos = 1_000_000;
/// Stamps run ahead of the clock by less: there are fewer frames in a batch than nanoseconds in this.
const AHEAD_MAX: Nanos = 65_536;
/// The smallest round trip is that of so long, up to twice.
const MIN_HOLDS: Nanos = 10_000_000_000;

/// Round trip estimate, RFC 6298.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rtt {
    /// Smoothed; 0 before the first sample.
    pub srtt: Nanos,
    var: Nanos,
    /// The smallest of the last ten to twenty seconds; 0 before the first sample.
    pub min: Nanos,
    /// The smallest since `min_since`.
    min_now: Nanos,
    min_since: Nanos,
}

impl Rtt {
    pub(super) fn sample(&mut self, now: Nanos, rtt: Nanos) {
        let rtt = rtt.max(1);
        if self.srtt == 0 {
            (self.srtt, self.var) = (rtt, rtt / 2);
            (self.min, self.min_now, self.min_since) = (rtt, rtt, now);
            return;
        }
        self.var = (3 * self.var + self.srtt.abs_diff(rtt)) / 4;
        self.srtt = (7 * self.srtt + rtt) / 8;
        if now >= self.min_since.saturating_add(MIN_HOLDS) {
            (self.min, self.min_now, self.min_since) = (self.min_now, rtt, now);
        }
        self.min_now = self.min_now.min(rtt);
        self.min = self.min.min(rtt);
    }

    /// Retransmission timeout, backed off `backoff` times.
    pub(super) fn rto(&self, policy: &Policy, backoff: u8) -> Nanos {
        let (min, max) = (
            Nanos::from(policy.rto_min_us) * 1_000,
            Nanos::from(policy.rto_max_us) * 1_000,
        );
        let rto = match self.srtt {
            0 => min * 4,
            srtt => srtt.saturating_add(self.var.saturating_mul(4)),
        };
        let rto = rto.clamp(min, max.max(min));
        rto.saturating_mul(1 << backoff.min(16)).min(max.max(min))
    }

    /// How often one number may be asked for again.
    pub(super) fn repeat(&self, policy: &Policy) -> Nanos {
        match self.srtt {
            0 => Nanos::from(policy.rto_min_us) * 1_000,
            srtt => srtt,
        }
    }

    /// By how much frames may overtake each other without one of them being lost.
    pub(super) fn reorder_window(&self) -> Nanos {
        match self.srtt {
            0 => REORDER_UNKNOWN,
            srtt => (srtt / 4).max(REORDER_MIN),
        }
    }
}

/// The newest stamps of both sides.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stamps {
    /// The newest `sent_at` of theirs; 0 if none.
    theirs: u32,
    /// When it came.
    came_at: Nanos,
    /// The newest stamp of ours they echoed; 0 if none.
    echoed: u32,
    /// When it was written.
    echoed_at: Nanos,
    /// The newest stamp we wrote.
    wrote_at: Nanos,
}

/// What a frame's stamps say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heard {
    /// Everything in the frame was written after our frames of this time had arrived; 0 if that is unknown.
    pub horizon: Nanos,
    /// A round trip that was not known before.
    pub rtt: Option<Nanos>,
}

/// The clock as a header carries it; never 0, which means none.
pub(super) fn stamp(now: Nanos) -> u32 {
    (now as u32).max(1)
}

impl Stamps {
    /// Echo and how long it was held, for a frame that is written now.
    pub(super) fn echo(&self, now: Nanos) -> (u32, u16) {
        let held = now.saturating_sub(self.came_at) / HELD_UNIT;
        (self.theirs, u16::try_from(held).unwrap_or(u16::MAX))
    }

    /// The time of a frame that is written now: a little later than now, if need be, so that no two have the same.
    pub(super) fn write(&mut self, now: Nanos) -> Nanos {
        let ahead = self.wrote_at.saturating_sub(now) < AHEAD_MAX;
        let next = if ahead {
            self.wrote_at.saturating_add(1).max(now)
        } else {
            now
        };
        // One whose stamp would be 0, which means none, is skipped.
        self.wrote_at = if next as u32 == 0 {
            next.saturating_add(1)
        } else {
            next
        };
        self.wrote_at
    }

    /// Everything written so far has this time at most, everything from the clock's next reading on a later one.
    pub(super) fn newest(&self, now: Nanos) -> Nanos {
        self.wrote_at.clamp(now, now.saturating_add(AHEAD_MAX))
    }

    /// The time of the newest frame that was written; what is written from now on has a later one.
    pub(super) fn last(&self, now: Nanos) -> Nanos {
        self.wrote_at.min(now.saturating_add(AHEAD_MAX))
    }

    /// Whether a frame with this stamp was written after all that came.
    pub(super) fn is_newer(&self, now: Nanos, sent_at: u32) -> bool {
        let comparable = self.theirs != 0 && now < self.came_at.saturating_add(STAMP_GOOD_FOR);
        sent_at != 0 && (!comparable || serial_lt(self.theirs, sent_at))
    }

    /// As of when the peer knows us, at least.
    pub(super) fn known_to(&self) -> Nanos {
        self.echoed_at
    }

    /// When the frame of ours left that the header echoes; 0 if it does not say, or nothing that can be true.
    pub(super) fn echo_of(&self, now: Nanos, header: &FrameHeader) -> Nanos {
        let newest = self.newest(now);
        let age = Nanos::from(stamp(newest).wrapping_sub(header.echo));
        match newest.checked_sub(age) {
            Some(at) if header.echo != 0 && age < STAMP_GOOD_FOR => at,
            _ => 0,
        }
    }

    /// Notes what a frame that is written now repeats of one that came now.
    #[inline]
    pub(super) fn note(&mut self, now: Nanos, sent_at: u32) {
        if self.is_newer(now, sent_at) {
            (self.theirs, self.came_at) = (sent_at, now);
        }
    }

    /// Learns from a frame that came now.
    pub(super) fn learn(&mut self, now: Nanos, header: &FrameHeader) -> Heard {
        self.note(now, header.sent_at);
        let mut heard = Heard {
            horizon: 0,
            rtt: None,
        };
        if header.echo == 0 {
            return heard;
        }
        if header.echo == self.echoed {
            heard.horizon = self.echoed_at;
            return heard;
        }
        let at = self.echo_of(now, header);
        if at == 0 {
            return heard; // of the future, or too old to tell
        }
        heard.horizon = at;
        if at > self.echoed_at {
            (self.echoed, self.echoed_at) = (header.echo, at);
            if header.held != u16::MAX {
                heard.rtt = now
                    .saturating_sub(at)
                    .checked_sub(Nanos::from(header.held) * HELD_UNIT);
            }
        }
        heard
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const US: Nanos = 1_000;
    const SECOND: Nanos = 1_000_000_000;

    fn header(sent_at: u32, echo: u32, held: u16) -> FrameHeader {
        FrameHeader {
            sent_at,
            echo,
            held,
            ..FrameHeader::default()
        }
    }

    #[test]
    fn a_new_echo_is_a_sample_and_an_old_one_is_not() {
        let mut stamps = Stamps::default();
        let now = (7 << 32) + 3; // the stamp has just wrapped
        let sent = now - 10 * US;
        let heard = stamps.learn(now, &header(5, stamp(sent), 16)); // held for 4096 ns
        assert_eq!(heard.horizon, sent);
        assert_eq!(heard.rtt, Some(10 * US - 4096));
        // Again in the next frame, a minute later. Expect: the same horizon, no sample.
        let heard = stamps.learn(now + 60_000_000 * US, &header(6, stamp(sent), 200));
        assert_eq!((heard.horizon, heard.rtt), (sent, None));
        // A frame that was overtaken. Expect: its own horizon, no sample.
        let heard = stamps.learn(now + US, &header(4, stamp(sent - US), 0));
        assert_eq!((heard.horizon, heard.rtt), (sent - US, None));
        assert_eq!(stamps.learn(now + US, &header(4, 0, 0)).horizon, 0);
    }

    #[test]
    fn absurd_stamps_cost_a_sample() {
        let mut stamps = Stamps::default();
        let now = (5 << 32) + 9;
        for (echo, held) in [
            (stamp(now + 1), 0),              // of the future
            (stamp(now - 2_000_000 * US), 0), // seconds old
            (stamp(now - 10 * US), 40),       // held for longer than it took
        ] {
            assert_eq!(stamps.learn(now, &header(1, echo, held)).rtt, None);
        }
        // Held for too long to say: a horizon, no sample.
        let heard = stamps.learn(now, &header(1, stamp(now - 5 * US), u16::MAX));
        assert_eq!((heard.horizon, heard.rtt), (now - 5 * US, None));
        // Before the clock began.
        assert_eq!(Stamps::default().learn(3, &header(1, 7, 0)).horizon, 0);
    }

    #[test]
    fn the_newest_stamp_is_echoed() {
        let mut stamps = Stamps::default();
        assert_eq!(stamps.echo(77).0, 0, "nothing came yet");
        let now = 1_000_000 * US;
        stamps.learn(now, &header(u32::MAX - 1, 0, 0));
        stamps.learn(now + US, &header(2, 0, 0)); // wrapped
        stamps.learn(now + 2 * US, &header(u32::MAX, 0, 0)); // overtaken
        stamps.learn(now + 3 * US, &header(2, 0, 0)); // doubled
        assert_eq!(stamps.echo(now + 2 * US + 24), (2, 4));
        assert_eq!(stamps.echo(now + 1_000_000 * US), (2, u16::MAX));
        // Silent for longer than a stamp is good for.
        stamps.learn(now + 2_000_000 * US, &header(1, 0, 0));
        assert_eq!(stamps.echo(now + 2_000_000 * US), (1, 0));
    }

    #[test]
    fn the_smallest_round_trip_is_forgotten_after_a_while() {
        let mut rtt = Rtt::default();
        rtt.sample(0, 10 * US);
        rtt.sample(1, 50 * US);
        assert_eq!(rtt.min, 10 * US);
        rtt.sample(MIN_HOLDS + 1, 40 * US); // a longer path from here on
        assert_eq!(rtt.min, 10 * US);
        rtt.sample(2 * MIN_HOLDS + 2, 45 * US);
        assert_eq!(rtt.min, 40 * US);
        rtt.sample(2 * MIN_HOLDS + 3, 9 * US);
        assert_eq!(rtt.min, 9 * US);
    }

    #[test]
    fn each_frame_has_its_own_stamp() {
        let now = (7 << 32) - 3; // the third would have none
        let mut stamps = Stamps::default();
        let batch: Vec<Nanos> = (0..5).map(|_| stamps.write(now)).collect();
        assert_eq!(batch, [now, now + 1, now + 2, now + 4, now + 5]);
        // An answer that comes before the clock went on. Expect: it speaks of the frame it echoes.
        for (i, &at) in batch.iter().enumerate() {
            let heard = stamps.learn(now, &header(9 + i as u32, stamp(at), 0));
            assert_eq!(heard.horizon, at);
        }
        assert_eq!(stamps.learn(now, &header(20, stamp(now + 6), 0)).horizon, 0);
        assert_eq!(stamps.write(now + 100), now + 100);
        // A clock that is put back far is followed.
        assert_eq!(stamps.write(now - SECOND), now - SECOND);
    }

    #[test]
    fn frames_may_overtake_each_other_a_little() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.reorder_window(), REORDER_UNKNOWN);
        rtt.sample(0, 4 * US);
        assert_eq!(rtt.reorder_window(), REORDER_MIN);
        (0..100).for_each(|now| rtt.sample(now, 400 * US));
        assert!((90 * US..=100 * US).contains(&rtt.reorder_window()));
    }

    #[test]
    fn a_timer_between_equal_bounds_is_fixed() {
        let fixed = Policy {
            rto_min_us: 500,
            rto_max_us: 500,
            ..Policy::default()
        };
        let mut rtt = Rtt::default();
        assert_eq!(rtt.rto(&fixed, 0), 500 * US);
        rtt.sample(0, 3_000 * US);
        assert_eq!(
            (rtt.rto(&fixed, 0), rtt.rto(&fixed, 9)),
            (500 * US, 500 * US)
        );
        let adaptive = Policy {
            rto_min_us: 1_000,
            rto_max_us: 20_000,
            ..Policy::default()
        };
        assert_eq!(rtt.rto(&adaptive, 0), 9_000 * US); // 3 ms, and four times half of it
        assert_eq!(rtt.rto(&adaptive, 1), 18_000 * US);
        assert_eq!(rtt.rto(&adaptive, 2), 20_000 * US);
    }
}
