//! When who finds nothing to do gives its core away: engines, and the relays they are compared with.
//!
//! Problem: an application on the same core can only send once it has the core. But to give it away and get it back costs as much as ten to twenty
//! looks, and what comes from the wire meanwhile is seen by nobody. How many looks are right depends on what the application does: one
//! that streams wants the core again and again; one that waits for an answer has nothing to do until it has come, and an engine that gives
//! it the core in vain is as likely as not away when it comes. A fixed number is a matter of luck: with twelve, one way of 64 bytes took
//! 4.7 us, with 16 and 20 it took 5.0, with 24 to 40 4.2 to 4.3, with 64 again 4.9, and with 200 4.3, but a third less messages per second
//! (Xeon guest, both nodes' engines and applications on a core each).
//!
//! Idea: ask, and learn from the answer. An application that was given an event has the core at once, without another look; the end of a send is one, too, as it
//! may wait for the token. Otherwise it is asked for by giving it away after a few empty loops; if that brought no token, twice as many are waited for
//! the next time, up to [`MOST`] times the few; if it did, it is asked soon again.
//!
//! Rejected: a fixed number (above); to keep the core for a round trip (that of the other end's application is not known before it answers);
//! not to give it away at all (a spinning application would starve until the scheduler's tick).

/// From the fewest empty loops to the most.
const MOST: u32 = 16;

/// So many loops with work since the core was given away are a stream, in which nothing is lost while nobody looks: what comes waits in the ring, and
/// is taken at once then. With the patience of an exchange streams were 1 to 4 % slower (Xeon guest, alternating turns); why, is not known.
const STREAM: u32 = 8;

/// The patience of one thread.
#[derive(Debug)]
pub struct Patience {
    /// Empty loops in a row before the core is given away, if that was worth it the last time.
    fewest: u32,
    /// Empty loops since there was work or the core was given away.
    empty: u32,
    /// Loops with work since the core was given away.
    busy: u32,
    /// After so many it is given away.
    looks: u32,
    /// An application was given an event since the core was given away.
    delivered: bool,
    /// The core was given away without an event for anybody.
    asked: bool,
}

impl Patience {
    /// Of who gives its core away after so many empty loops while that pays, and after up to 16 times as many while it does not.
    pub fn new(fewest: u32) -> Self {
        Self {
            fewest,
            empty: 0,
            busy: 0,
            looks: fewest,
            delivered: false,
            asked: false,
        }
    }

    /// After a loop that found work or did not, tokens of an application or none, gave one an event or did not, and left something to do or
    /// nothing: is the core to be given away now?
    #[inline]
    pub fn ends(&mut self, worked: bool, tokens: bool, delivered: bool, more: bool) -> bool {
        if std::mem::take(&mut self.asked) {
            self.looks = if tokens {
                self.fewest
            } else {
                let most = self.fewest.saturating_mul(MOST);
                self.looks.saturating_mul(2).min(most)
            };
        }
        self.delivered |= delivered;
        // Who gave an event and found no token in the same loop may well get one for it.
        let done = worked && delivered && !tokens && !more;
        if worked && !done {
            self.empty = 0;
            // Who never comes to an end of its work counts for ever.
            self.busy = self.busy.saturating_add(1);
            if self.busy > STREAM {
                self.looks = self.fewest;
            }
            return false;
        }
        self.empty = self.empty.saturating_add(1);
        let ends = self.delivered || self.empty >= self.looks;
        if ends {
            self.asked = !self.delivered;
            (self.empty, self.busy, self.delivered) = (0, 0, false);
        }
        ends
    }

    /// There was nothing to do for so long that what was learned is old.
    pub fn forget(&mut self) {
        *self = Self::new(self.fewest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEWEST: u32 = 12;

    /// Empty loops until the core is given away.
    fn looks(patience: &mut Patience) -> u32 {
        let mut looks = 1;
        while !patience.ends(false, false, false, false) {
            looks += 1;
            assert!(looks <= MOST * FEWEST, "never given away");
        }
        looks
    }

    // Nobody ever has a token. Expect: the core is given away ever more rarely, but not for ever less.
    #[test]
    fn asking_in_vain_is_done_less_and_less() {
        let mut patience = Patience::new(FEWEST);
        let all: Vec<_> = (0..7).map(|_| looks(&mut patience)).collect();
        assert_eq!(all, [12, 24, 48, 96, 192, 192, 192]);
    }

    // It was in vain for long, then the core brings a token. Expect: asked soon again; not so for a token that comes later, or for a frame.
    #[test]
    fn a_token_for_the_core_has_it_asked_for_soon_again() {
        let mut patience = Patience::new(FEWEST);
        for _ in 0..6 {
            looks(&mut patience);
        }
        assert!(!patience.ends(true, false, false, false));
        assert!(!patience.ends(true, true, false, false));
        assert_eq!(looks(&mut patience), MOST * FEWEST);
        assert!(!patience.ends(true, true, false, false));
        assert_eq!(looks(&mut patience), FEWEST);
    }

    // An application is given an event, answers when it has the core, and so on. Expect: it has the core at once, or, if there were tokens or there is
    // more to do, at the first empty loop, each time, and nothing is concluded from that.
    #[test]
    fn who_was_given_an_event_has_the_core_at_once() {
        let mut patience = Patience::new(FEWEST);
        for _ in 0..5 {
            assert!(patience.ends(true, false, true, false));
            assert!(!patience.ends(true, true, true, false));
            assert!(!patience.ends(true, false, true, true));
            assert!(patience.ends(false, false, false, false));
            assert!(!patience.ends(true, true, false, false));
        }
        assert!(patience.ends(false, false, true, false));
        assert_eq!(looks(&mut patience), FEWEST);
        assert_eq!(looks(&mut patience), 2 * FEWEST);
    }

    // It was in vain, then loop after loop finds frames. Expect: as in the beginning, from so many on; an exchange of single messages is none.
    #[test]
    fn in_a_stream_nothing_is_lost_by_giving_the_core_away() {
        for (busy, expected) in [(STREAM, 2 * FEWEST), (STREAM + 1, FEWEST)] {
            let mut patience = Patience::new(FEWEST);
            looks(&mut patience);
            assert!(!patience.ends(false, false, false, false));
            for _ in 0..busy {
                assert!(!patience.ends(true, false, false, false));
            }
            assert_eq!(looks(&mut patience), expected);
        }
    }

    // It was in vain, then the engine slept. Expect: as in the beginning.
    #[test]
    fn what_was_learned_before_a_sleep_is_forgotten() {
        let mut patience = Patience::new(FEWEST);
        looks(&mut patience);
        looks(&mut patience);
        patience.forget();
        assert_eq!(looks(&mut patience), FEWEST);
    }

    // Work without end. Expect: nothing but that, however long.
    #[test]
    fn work_without_end_is_no_trouble() {
        let mut patience = Patience::new(FEWEST);
        patience.busy = u32::MAX;
        assert!(!patience.ends(true, false, false, false));
        assert_eq!(looks(&mut patience), FEWEST);
    }
}
