//! A queue that stands still although the engine does not.
//!
//! The engine comes round, so the watchdog has nothing to object to, but frames go nowhere: the kernel has lost the socket's queue, takes frames and
//! never completes them, or says that it drops what it receives for want of room while there is nothing in our ring; or an engine that went
//! wrong before it died has left records of frames that cannot be true, so that those frames are lost to us, or all that come are refused. Evidence is
//! what the rings' indices and the kernel's statistics (`XDP_STATISTICS`) say over a second, never silence alone: a link that is down is
//! another matter ([`KickOutcome::LinkDown`]), and so is a wire on which nothing comes. What is done about it, the supervisor decides.
//!
//! Pure but for the clock it is told.

use portolan_transport::ident::Nanos;

use crate::xsk::KickOutcome;

/// Evidence is collected for so long.
const PERIOD_NS: Nanos = 1_000_000_000;

/// What is known of the queue at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Vitals {
    /// Transmit descriptors the kernel has taken out of the ring and, as far as we looked, not completed.
    pub taken: u32,
    /// Completions so far.
    pub completions: u64,
    /// Frames received so far.
    pub received: u64,
    /// Frames the kernel dropped because our rings had no room, as it says.
    pub dropped: u64,
    /// Received descriptors that were refused, since our records say that the kernel does not have those frames.
    pub refused: u64,
    /// Frames whose record at adoption could not be true.
    pub implausible: u32,
}

/// The evidence so far.
#[derive(Debug, Default)]
pub(super) struct Wedge {
    since: Nanos,
    first: Vitals,
    /// Frames were out at every look.
    always_taken: bool,
}

impl Wedge {
    /// A look at the queue; says what stands still, once per period.
    pub(super) fn look(
        &mut self,
        now: Nanos,
        kick: KickOutcome,
        vitals: impl FnOnce() -> Vitals,
    ) -> Option<&'static str> {
        let due = now.saturating_sub(self.since) >= PERIOD_NS;
        if !due {
            return None;
        }
        let (first, now_is) = (self.first, vitals());
        let known = self.since != 0;
        let always_taken = std::mem::replace(&mut self.always_taken, now_is.taken > 0);
        (self.since, self.first) = (now, now_is);
        if now_is.implausible > 0 {
            return Some("records of frames that cannot be true");
        }
        if !known {
            return None;
        }
        match kick {
            KickOutcome::Rebuild | KickOutcome::Failed(_) => {
                return Some("the socket has lost its queue");
            }
            KickOutcome::LinkDown => return None,
            KickOutcome::Idle
            | KickOutcome::Sent
            | KickOutcome::Pending
            | KickOutcome::Full
            | KickOutcome::NoBuffers => {}
        }
        if always_taken && now_is.taken > 0 && now_is.completions == first.completions {
            return Some("completions stopped");
        }
        if now_is.dropped > first.dropped && now_is.received == first.received {
            return Some("receives stopped");
        }
        if now_is.refused > first.refused && now_is.received == first.received {
            return Some("every frame that comes is refused");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdicts of a queue looked at once per second.
    fn verdicts(kick: KickOutcome, looks: &[Vitals]) -> Vec<Option<&'static str>> {
        let mut wedge = Wedge::default();
        (1..)
            .zip(looks)
            .map(|(second, vitals)| wedge.look(second * PERIOD_NS, kick, || *vitals))
            .collect()
    }

    fn at(taken: u32, completions: u64, received: u64, dropped: u64) -> Vitals {
        Vitals {
            taken,
            completions,
            received,
            dropped,
            ..Vitals::default()
        }
    }

    // What a wrong engine left. Expect: records that cannot be true are told at once, and again until something is done; frames refused
    // now and then are no evidence, frames refused while none is taken are.
    #[test]
    fn what_a_wrong_engine_left_is_named() {
        let implausible = Vitals {
            implausible: 3,
            ..at(0, 1, 5, 0)
        };
        let untrue = Some("records of frames that cannot be true");
        assert_eq!(
            verdicts(KickOutcome::Idle, &[implausible; 2]),
            [untrue, untrue]
        );
        let refusing = |received, refused| Vitals {
            refused,
            ..at(0, 1, received, 0)
        };
        let looks = [
            refusing(5, 1),
            refusing(6, 9),
            refusing(6, 9),
            refusing(6, 12),
        ];
        let expected = [None, None, None, Some("every frame that comes is refused")];
        assert_eq!(verdicts(KickOutcome::Idle, &looks), expected);
    }

    #[test]
    fn a_queue_that_works_or_rests_is_in_order() {
        let busy = [at(3, 10, 5, 0), at(3, 20, 9, 4), at(7, 30, 11, 9)];
        let resting = [at(0, 10, 5, 2), at(0, 10, 5, 2), at(0, 10, 5, 2)];
        let begins = [at(0, 10, 5, 2), at(5, 10, 5, 2), at(5, 15, 5, 2)];
        for looks in [busy, resting, begins] {
            assert_eq!(verdicts(KickOutcome::Sent, &looks), [None; 3]);
        }
    }

    #[test]
    fn what_stands_still_is_named() {
        let looks = [at(3, 10, 5, 0), at(3, 10, 5, 0), at(3, 11, 5, 0)];
        let expected = [None, Some("completions stopped"), None];
        assert_eq!(verdicts(KickOutcome::Sent, &looks), expected);
        // It is no fault of the queue that the link is down.
        assert_eq!(verdicts(KickOutcome::LinkDown, &looks), [None; 3]);

        let looks = [at(0, 1, 5, 0), at(0, 1, 5, 8), at(0, 1, 6, 9)];
        let expected = [None, Some("receives stopped"), None];
        assert_eq!(verdicts(KickOutcome::Idle, &looks), expected);

        let lost = Some("the socket has lost its queue");
        assert_eq!(verdicts(KickOutcome::Rebuild, &looks), [None, lost, lost]);
    }

    #[test]
    fn nobody_looks_more_than_once_per_period() {
        let mut wedge = Wedge::default();
        let mut asked = 0;
        for millisecond in 1..=5_000 {
            wedge.look(millisecond * 1_000_000, KickOutcome::Idle, || {
                asked += 1;
                Vitals::default()
            });
        }
        assert_eq!(asked, 5);
    }
}
