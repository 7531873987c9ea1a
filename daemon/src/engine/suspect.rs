//! Poison: what an engine was working on when it died, and dies of again.
//!
//! Problem: a frame or a token that kills an engine is still there when the next one takes over, which dies of it, too, and so for ever.
//!
//! Idea: the ledger names what is being worked on ([`LedgerHeader::working_frame`], [`LedgerHeader::working_token`]). A successor finds
//! there what its predecessor died of, and marks the word when it comes to the same thing once more. So whoever finds a
//! *marked* word knows of two deaths over one thing: it does not touch it a third time. A frame is discarded and counted (its sender
//! sends again; if that is poison as well, it is discarded as well); a token closes its port, with [`CloseReason::Poison`].
//!
//! The mark is part of the same word, so there is no moment in which one death counts twice: an engine that dies while it
//! takes over has marked nothing. Tokens are named with their generation, frames by their place in the UMEM: another frame in the same place may be
//! discarded for two deaths that happened to fall on it, and is sent again.
//!
//! Rejected: remembering it in the supervisor (which would have to survive, too); counting deaths per port (an engine killed from outside while
//! it serves a port would close it).
//!
//! [`LedgerHeader::working_frame`]: portolan_abi::ledger::LedgerHeader::working_frame
//! [`LedgerHeader::working_token`]: portolan_abi::ledger::LedgerHeader::working_token
//! [`CloseReason::Poison`]: portolan_abi::port::CloseReason::Poison

/// In a word of work: its predecessor died of the same.
const AGAIN: u64 = 1 << 62;

/// What the predecessor died of, if anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Suspect {
    word: u64,
    poison: bool,
}

impl Suspect {
    /// From the word the predecessor left.
    pub(super) fn found(word: u64) -> Self {
        Self {
            word: word & !AGAIN,
            poison: word & AGAIN != 0,
        }
    }

    /// Did the predecessor die of this?
    #[inline]
    pub(super) fn is(&self, word: u64) -> bool {
        self.word == word
    }

    /// The word to store before working on this. `None`: leave it alone, two have died of it.
    #[inline]
    pub(super) fn meet(&mut self, word: u64) -> Option<u64> {
        if word != self.word {
            return Some(word);
        }
        let suspect = std::mem::take(self);
        (!suspect.poison).then_some(word | AGAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Frame 7 kills. Expect: it is worked on twice, by two engines; the third leaves it alone, once.
    #[test]
    fn two_deaths_are_enough() {
        let mut first = Suspect::found(0);
        let mut ledger = first.meet(7).unwrap();
        assert_eq!(ledger, 7);
        let mut second = Suspect::found(ledger);
        ledger = second.meet(7).unwrap();
        let mut third = Suspect::found(ledger);
        assert_eq!(third.meet(7), None);
        // What comes to the same place later is another.
        assert_eq!(third.meet(7), Some(7));
    }

    #[test]
    fn deaths_over_different_things_accuse_nothing() {
        let mut ledger = 0;
        for word in [7, 8, 7, 8, 9] {
            let mut engine = Suspect::found(ledger);
            ledger = engine.meet(word).unwrap();
            assert_eq!(ledger, word);
        }
        // Between two deaths it got past it.
        let mut engine = Suspect::found(ledger);
        assert_eq!(engine.meet(9), Some(9 | AGAIN));
        assert_eq!(engine.meet(10), Some(10));
        assert_eq!(engine.meet(9), Some(9));
    }

    // It dies while taking over, before it works on anything, again and again. Expect: one death over the frame stays one.
    #[test]
    fn deaths_of_other_causes_do_not_count() {
        let ledger = 7;
        let found = [(); 10].map(|()| Suspect::found(ledger));
        assert!(found.iter().all(|suspect| !suspect.poison));
        assert_eq!(Suspect::found(ledger).meet(7), Some(7 | AGAIN));
    }
}
