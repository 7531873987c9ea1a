//! What a receiving port knows of one stream: which sequences came, and which should have.
//!
//! `judged` is the line between what is accounted for and what may still come. It passes what came in order by itself; over a gap it goes
//! only by its sender's word, a limit or a [`Statement`] (see `outgoing.rs`): what that word covers, is not there, and was not given up, is
//! lost. What lies behind the line comes a second time or too late; it is not handed out.
//!
//! Messages that the application shortened come without their seal. Each counts as one message of the stream that came, whichever: one
//! gap, the next, is not held against anybody.

use crate::integrity::outgoing::{WINDOW, before};
use crate::integrity::seal::{Receipt, Seal, Statement};
use crate::names::Priority;

const WORDS: usize = WINDOW as usize / 64;
/// Former sessions remembered, to tell a late message from a new sender.
const FORMER: usize = 4;

/// What a message turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Came {
    /// The right one, for the first time.
    Fresh,
    /// It was here before, or was given up, or counted as lost, or belongs to a session that is over.
    Repeated,
    /// No sender of ours writes such a thing.
    Nonsense,
}

/// What a word of the sender brought to light.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Judged {
    /// Told as delivered to their sender, and never came.
    pub(crate) lost: u32,
    /// Told as not delivered to their sender, and came.
    pub(crate) contradicted: u32,
}

/// One stream, at its receiver.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    session: Option<u64>,
    former: [Option<u64>; FORMER],
    start: u32,
    judged: u32,
    /// No statement covers what is at or behind this; up to here they do.
    told: u32,
    /// Came beyond `judged`: sequence modulo window.
    bits: [u64; WORDS],
    ahead: u32,
    unsealed: u32,
    lost: u32,
}

impl Incoming {
    fn place(sequence: u32) -> (usize, u64) {
        let at = sequence % WINDOW;
        ((at / 64) as usize, 1 << (at % 64))
    }

    fn take(&mut self, sequence: u32) -> bool {
        let (word, bit) = Self::place(sequence);
        let was = self.bits[word] & bit != 0;
        self.bits[word] &= !bit;
        self.ahead -= u32::from(was);
        was
    }

    /// Passes what came in order.
    fn pass(&mut self) {
        while self.ahead > 0 && self.take(self.judged) {
            self.judged = self.judged.wrapping_add(1);
        }
    }

    /// The session is the present one, or becomes it. `false` if it is over.
    fn enter(&mut self, session: u64, limit: u32) -> bool {
        if self.session == Some(session) {
            return true;
        }
        if self.former.contains(&Some(session)) {
            return false;
        }
        if self.session.is_some() {
            self.former.rotate_right(1);
            self.former[0] = self.session;
        }
        // What was shortened before we heard of the session may have been the first of it.
        let start = limit.wrapping_sub(self.unsealed.min(limit));
        *self = Self {
            session: Some(session),
            former: self.former,
            start,
            judged: start,
            told: start,
            unsealed: self.unsealed,
            ..Self::default()
        };
        true
    }

    /// All below `upto` should be here: how many are not.
    fn judge(&mut self, upto: u32) -> u32 {
        let mut missing = 0;
        if before(self.judged, upto) {
            let all = upto.wrapping_sub(self.judged);
            if all > WINDOW {
                missing = all - self.ahead;
                self.bits = [0; WORDS];
                self.ahead = 0;
                self.judged = upto;
            }
            while self.judged != upto {
                missing += u32::from(!self.take(self.judged));
                self.judged = self.judged.wrapping_add(1);
            }
            self.pass();
        }
        let excused = missing.min(self.unsealed);
        self.unsealed -= excused;
        self.lost = self.lost.wrapping_add(missing - excused);
        missing - excused
    }

    /// A message came whose seal is right.
    pub(crate) fn message(&mut self, seal: &Seal) -> (Came, Judged) {
        let (session, sequence) = (seal.session, seal.sequence);
        if u32::from(seal.back) > WINDOW {
            return (Came::Nonsense, Judged::default());
        }
        let limit = sequence.wrapping_sub(seal.back.into());
        if !self.enter(session, limit) {
            return (Came::Repeated, Judged::default());
        }
        let lost = self.judge(limit);
        let judged = Judged {
            lost,
            contradicted: 0,
        };
        if sequence == self.judged {
            self.judged = sequence.wrapping_add(1);
            self.pass();
            return (Came::Fresh, judged);
        }
        if before(sequence, self.judged) {
            return (Came::Repeated, judged);
        }
        if sequence.wrapping_sub(self.judged) >= WINDOW {
            return (Came::Nonsense, judged);
        }
        let (word, bit) = Self::place(sequence);
        if self.bits[word] & bit != 0 {
            return (Came::Repeated, judged);
        }
        self.bits[word] |= bit;
        self.ahead += 1;
        (Came::Fresh, judged)
    }

    /// A message came without its seal, because the application wanted only its beginning.
    pub(crate) fn shortened(&mut self) {
        self.unsealed = self.unsealed.saturating_add(1);
    }

    /// The sender's word. `None` if it makes no sense, or is of a session that is over.
    pub(crate) fn statement(&mut self, word: &Statement) -> Option<Judged> {
        let end = word.first.wrapping_add(word.count);
        if word.count > u32::MAX / 4 || before(word.upto, end) {
            return None;
        }
        if !self.enter(word.session, word.upto) {
            return None;
        }
        if self.judged.wrapping_sub(self.told) > WINDOW {
            // Statements are about what is within a window of the limit.
            self.told = self.judged.wrapping_sub(WINDOW);
        }
        let mut lost = self.judge(word.first);
        let mut contradicted = 0;
        if word.certain {
            // Behind the line without a statement: they came.
            let first = if before(word.first, self.told) {
                self.told
            } else {
                word.first
            };
            let passed = if before(self.judged, end) {
                self.judged
            } else {
                end
            };
            if before(first, passed) {
                contradicted = passed.wrapping_sub(first);
            }
        }
        let mut steps = 0;
        while before(self.judged, end) && steps < WINDOW {
            let came = self.take(self.judged);
            contradicted += u32::from(came && word.certain);
            self.judged = self.judged.wrapping_add(1);
            steps += 1;
        }
        if before(self.judged, end) {
            self.judged = end;
        }
        if before(self.told, end) {
            self.told = end;
        }
        self.pass();
        lost += self.judge(word.upto);
        Some(Judged { lost, contradicted })
    }

    /// What is here, in the words of a receipt; `None` if nothing is known.
    pub(crate) fn receipt(&self, receiver: u64, priority: Priority) -> Option<Receipt> {
        Some(Receipt {
            session: self.session?,
            priority,
            receiver,
            start: self.start,
            upto: self.judged,
            lost: self.lost,
        })
    }
}
