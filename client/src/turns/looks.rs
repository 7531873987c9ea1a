//! How often an application that waits looks before it gives its core away.
//!
//! Problem: if its engine has the same core, every look before that keeps the engine from what it was just asked for: sixty-four were
//! a quarter of a way of 64 bytes. If it has the core for itself, giving it away takes as long as ten looks, in which nothing is seen.
//!
//! Idea: a yield that comes back at once was taken by nobody. So the core is given away at the first look; whoever has it for himself looks often
//! before he asks again.
//!
//! On the engine's own core there is one who wants it, and whom a yield in vain keeps from it: the scheduler shares a core among groups (sessions, services, users)
//! before it does among threads, and a yield gives away nothing of a group's share. An application that needs less of the core than its engine would
//! yield in vain until it had used up as much. So there, after two in vain, it sleeps ([`Looks::in_vain`]).
//!
//! Rejected: to ask which core the engine has before any yield: it says nothing of who else is there, and threads move.

/// So many yields in a row that came back at once: one alone may, although somebody waits for the core (see [`super::give_way`]).
const VAIN: u32 = 4;
/// So many in a row on the engine's own core.
const VAIN_THERE: u32 = 2;
/// Looks between two yields of who has the core for himself.
const LOOKS: u32 = 64;
/// A yield that takes longer was taken by somebody, ns: there and back are two switches, and something was done in between.
const TAKEN_NS: u64 = 1_000;
/// On the engine's own core, where to take one for in vain that was not costs less than to miss one that was: a lone yield took up to 1.2 us on an EPYC guest, two
/// switches there 4, 1.6 on a Xeon guest.
const TAKEN_THERE_NS: u64 = 1_500;

/// What one thread learned of its core.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// Yields in a row that came back at once.
    vain: u32,
    /// The same by the measure of the engine's own core.
    vain_there: u32,
    left: u32,
}

impl Looks {
    /// A wait begins.
    pub(crate) fn begin(&mut self) {
        self.left = if self.vain >= VAIN { LOOKS } else { 0 };
    }

    /// Nothing was there: is the core to be given away, or looked again?
    pub(crate) fn give_way(&mut self) -> bool {
        let over = self.left == 0;
        self.left = self.left.saturating_sub(1);
        over
    }

    /// It was given away in vain, as far as one can tell on the engine's own core.
    pub(crate) fn in_vain(&self) -> bool {
        self.vain_there >= VAIN_THERE
    }

    /// It slept instead. The next wait needs one more yield in vain to do the same.
    pub(crate) fn slept_instead(&mut self) {
        self.vain_there = VAIN_THERE - 1;
        self.vain = 0;
        self.begin();
    }

    /// It was given away for so long; `None`: and brought what was waited for, which as likely as not is the work of who had it.
    pub(crate) fn gave_way(&mut self, took_ns: Option<u64>) {
        let counted = |before: u32, taken_ns: u64| match took_ns {
            Some(ns) if ns < taken_ns => before.saturating_add(1),
            _ => 0,
        };
        self.vain = counted(self.vain, TAKEN_NS);
        self.vain_there = counted(self.vain_there, TAKEN_THERE_NS);
        self.begin();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks_before_giving_way(looks: &mut Looks) -> u32 {
        looks.begin();
        let mut before = 0;
        while !looks.give_way() {
            before += 1;
            assert!(before <= LOOKS, "never given away");
        }
        before
    }

    // Yields that take long, return at once, bring something. Expect: the core is given away at once where somebody takes it, and where nothing is known;
    // seldom where nobody does, in the same wait and the next.
    #[test]
    fn a_core_that_nobody_takes_is_offered_seldom() {
        let mut looks = Looks::default();
        assert_eq!(looks_before_giving_way(&mut looks), 0);
        looks.gave_way(Some(TAKEN_NS));
        for _ in 0..VAIN {
            assert!(looks.give_way());
            looks.gave_way(Some(TAKEN_NS - 1));
        }
        for _ in 0..LOOKS {
            assert!(!looks.give_way());
        }
        assert!(looks.give_way());
        assert_eq!(looks_before_giving_way(&mut looks), LOOKS);
        looks.gave_way(None);
        assert_eq!(looks_before_giving_way(&mut looks), 0);
    }

    // On the engine's core: yields in vain, then sleep instead, then one more in vain, then one that somebody takes. Expect: two in a row are in vain; after a sleep
    // the core is offered once before the next; one that is taken counts from the start.
    #[test]
    fn on_the_engines_core_two_yields_in_vain_are_enough() {
        let mut looks = Looks::default();
        looks.gave_way(Some(TAKEN_THERE_NS - 1));
        assert!(!looks.in_vain());
        looks.gave_way(Some(TAKEN_THERE_NS - 1));
        assert!(looks.in_vain());
        looks.slept_instead();
        assert!(!looks.in_vain());
        assert_eq!(looks_before_giving_way(&mut looks), 0);
        looks.gave_way(Some(TAKEN_THERE_NS - 1));
        assert!(looks.in_vain());
        looks.gave_way(Some(TAKEN_THERE_NS));
        assert!(!looks.in_vain());
    }
}
