//! When who finds nothing to do gives its core away: engines, and the relays they are compared with.
//!
//! Problem: an application on the same core can only send once it has the core. But to give it away and get it back takes a microsecond or two,
//! and what comes from the wire meanwhile is seen by nobody. How long to look is right depends on what the application does: one
//! that streams wants the core again and again; one that waits for an answer has nothing to do until it has come, and an engine that gives
//! it the core in vain is as likely as not away when it comes. A fixed number of looks is a matter of luck: with twelve, one way of 64 bytes took
//! 4.7 us, with 16 and 20 it took 5.0, with 24 to 40 4.2 to 4.3, with 64 again 4.9, and with 200 4.3, but a third less messages per second
//! (Xeon guest, both nodes' engines and applications on a core each).
//!
//! Idea: ask, and learn from the answer. An application that was given an event has the core at once, without another look; the end of a send is one, too, as it
//! may wait for the token. Otherwise it is asked for by giving it away after a short while without work; if that brought no token, twice as long is waited
//! the next time, up to [`MOST`] times the short while; if it did, it is asked soon again.
//!
//! A while is time, not a number of loops: counted in loops, whatever makes an empty one longer by a few nanoseconds makes an application that waits for its
//! core wait that much longer a hundred times over.
//!
//! Rejected: a fixed number (above); to keep the core for a round trip (that of the other end's application is not known before it answers);
//! not to give it away at all (a spinning application would starve until the scheduler's tick).

/// From the shortest time without work to the longest: an engine's is 20 us then. It must outlast a round trip, or who sent away its answer is not there when the
/// other's comes. With half of that a third of the frames of an exchange whose ways take 7 to 13 us met nobody, and waited 4 us (EPYC guest, four runs: 8 to 74 %).
const MOST: u64 = 32;

/// So many loops with work since the core was given away are a stream, in which nothing is lost while nobody looks: what comes waits in the ring, and
/// is taken at once then. With the patience of an exchange streams were 1 to 4 % slower (Xeon guest, alternating turns); why, is not known.
const STREAM: u32 = 8;

/// The patience of one thread. Its clock is the caller's, and so is its unit.
#[derive(Debug)]
pub struct Patience {
    /// Time without work before the core is given away, if that was worth it the last time.
    least: u64,
    /// The longest.
    most: u64,
    /// The first loop without work since there was any or the core was given away.
    since: Option<u64>,
    /// Loops with work since the core was given away.
    busy: u32,
    /// After so long without work it is given away as things are.
    lasts: u64,
    /// An application was given an event since the core was given away.
    delivered: bool,
    /// The core was given away without an event for anybody.
    asked: bool,
}

impl Patience {
    /// Of who gives its core away after so long without work while that pays, and after up to 32 times as long while it does not.
    pub fn new(least: u64) -> Self {
        Self::up_to(least, least.saturating_mul(MOST))
    }

    /// The same, never longer than `most`.
    pub fn up_to(least: u64, most: u64) -> Self {
        Self {
            least,
            most,
            since: None,
            busy: 0,
            lasts: least,
            delivered: false,
            asked: false,
        }
    }

    /// After a loop, begun then, that found work or did not, tokens of an application or none, gave one an event or did not, and left something to
    /// do or nothing: is the core to be given away now?
    #[inline]
    pub fn ends(
        &mut self,
        now: u64,
        worked: bool,
        tokens: bool,
        delivered: bool,
        more: bool,
    ) -> bool {
        self.learn(tokens);
        self.delivered |= delivered;
        // Who gave an event and found no token in the same loop may well get one for it.
        let done = worked && delivered && !tokens && !more;
        if worked && !done {
            self.since = None;
            // Who never comes to an end of its work counts for ever.
            self.busy = self.busy.saturating_add(1);
            if self.busy > STREAM {
                self.lasts = self.least;
            }
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let ends = self.delivered || now.saturating_sub(since) >= self.lasts;
        if ends {
            self.asked = !self.delivered;
            (self.since, self.busy, self.delivered) = (None, 0, false);
        }
        ends
    }

    /// What came of the core having been given away without an event for anybody, if it was.
    #[inline]
    fn learn(&mut self, tokens: bool) {
        if std::mem::take(&mut self.asked) {
            self.lasts = if tokens {
                self.least
            } else {
                self.lasts.saturating_mul(2).min(self.most)
            };
        }
    }

    /// The core is given away in the middle of a loop, to an application that was given an event; there were no tokens.
    #[inline]
    pub fn gave(&mut self) {
        self.learn(false);
        (self.since, self.busy, self.delivered) = (None, 0, false);
    }

    /// There was nothing to do for so long that what was learned is old.
    pub fn forget(&mut self) {
        *self = Self::up_to(self.least, self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = 12;

    /// A patience and a clock that ticks once per loop.
    struct Loops {
        patience: Patience,
        clock: u64,
    }

    impl Loops {
        fn new() -> Self {
            let patience = Patience::new(LEAST);
            Self { patience, clock: 7 }
        }

        fn ends(&mut self, worked: bool, tokens: bool, delivered: bool, more: bool) -> bool {
            self.clock += 1;
            (self.patience).ends(self.clock, worked, tokens, delivered, more)
        }

        /// Time from the first loop without work until the core is given away.
        fn wait(&mut self) -> u64 {
            let began = self.clock + 1;
            while !self.ends(false, false, false, false) {
                assert!(self.clock - began <= MOST * LEAST, "never given away");
            }
            self.clock - began
        }
    }

    // Nobody ever has a token. Expect: the core is given away ever more rarely, but not for ever less.
    #[test]
    fn asking_in_vain_is_done_less_and_less() {
        let mut loops = Loops::new();
        let all: Vec<_> = (0..8).map(|_| loops.wait()).collect();
        assert_eq!(all, [12, 24, 48, 96, 192, 384, 384, 384]);
    }

    // Loops take longer, and the thread was kept from its core for long. Expect: as much time, in fewer loops; the clock's jump is no patience of ours if there
    // was no loop without work before it, and ends it if there was. A clock that goes back is no trouble.
    #[test]
    fn patience_is_time_and_not_loops() {
        let mut loops = Loops::new();
        let empty = |loops: &mut Loops, later: u64| {
            loops.clock += later - 1;
            loops.ends(false, false, false, false)
        };
        assert!(!empty(&mut loops, 1_000_000));
        assert!(!empty(&mut loops, 6));
        assert!(empty(&mut loops, 6));
        assert!(!empty(&mut loops, 1));
        assert!(!empty(&mut loops, 23));
        assert!(empty(&mut loops, 1_000_000));
        assert!(!empty(&mut loops, 1));
        loops.clock -= 1_000;
        assert!(!empty(&mut loops, 1));
        assert!(empty(&mut loops, 1_100));
    }

    // It was in vain for long, then the core brings a token. Expect: asked soon again; not so for a token that comes later, or for a frame.
    #[test]
    fn a_token_for_the_core_has_it_asked_for_soon_again() {
        let mut loops = Loops::new();
        for _ in 0..6 {
            loops.wait();
        }
        assert!(!loops.ends(true, false, false, false));
        assert!(!loops.ends(true, true, false, false));
        assert_eq!(loops.wait(), MOST * LEAST);
        assert!(!loops.ends(true, true, false, false));
        assert_eq!(loops.wait(), LEAST);
    }

    // An application is given an event, answers when it has the core, and so on. Expect: it has the core at once, or, if there were tokens or there is
    // more to do, at the first empty loop, each time, and nothing is concluded from that.
    #[test]
    fn who_was_given_an_event_has_the_core_at_once() {
        let mut loops = Loops::new();
        for _ in 0..5 {
            assert!(loops.ends(true, false, true, false));
            assert!(!loops.ends(true, true, true, false));
            assert!(!loops.ends(true, false, true, true));
            assert!(loops.ends(false, false, false, false));
            assert!(!loops.ends(true, true, false, false));
        }
        assert!(loops.ends(false, false, true, false));
        assert_eq!(loops.wait(), LEAST);
        assert_eq!(loops.wait(), 2 * LEAST);
    }

    // The core is given away in the middle of a loop, after it was in vain, and for an event of the same loop. Expect: what was in vain counts; the loop's end does
    // not give it away again, and nothing is concluded from what comes of it.
    #[test]
    fn who_had_the_core_in_the_middle_of_a_loop_does_not_get_it_at_its_end() {
        let mut loops = Loops::new();
        assert_eq!(loops.wait(), LEAST);
        loops.patience.gave();
        assert!(!loops.ends(true, true, false, false));
        assert_eq!(loops.wait(), 2 * LEAST);
        assert!(!loops.ends(false, false, false, false));
        loops.clock += 100 * LEAST;
        loops.patience.gave();
        assert!(!loops.ends(false, false, false, false), "given away twice");
        // An event whose application was to have the core at the next empty loop.
        assert!(!loops.ends(true, true, true, false));
        loops.patience.gave();
        assert!(!loops.ends(false, false, false, false), "given away twice");
    }

    // It was in vain, then loop after loop finds frames. Expect: as in the beginning, from so many on; an exchange of single messages is none.
    #[test]
    fn in_a_stream_nothing_is_lost_by_giving_the_core_away() {
        for (busy, expected) in [(STREAM, 2 * LEAST), (STREAM + 1, LEAST)] {
            let mut loops = Loops::new();
            loops.wait();
            assert!(!loops.ends(false, false, false, false));
            for _ in 0..busy {
                assert!(!loops.ends(true, false, false, false));
            }
            assert_eq!(loops.wait(), expected);
        }
    }

    // It was in vain, then the engine slept. Expect: as in the beginning.
    #[test]
    fn what_was_learned_before_a_sleep_is_forgotten() {
        let mut loops = Loops::new();
        loops.wait();
        loops.wait();
        loops.patience.forget();
        assert_eq!(loops.wait(), LEAST);
    }

    // Work without end. Expect: nothing but that, however long.
    #[test]
    fn work_without_end_is_no_trouble() {
        let mut loops = Loops::new();
        loops.patience.busy = u32::MAX;
        assert!(!loops.ends(true, false, false, false));
        assert_eq!(loops.wait(), LEAST);
    }
}
