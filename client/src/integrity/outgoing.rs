//! What a sending port knows of one stream: which of its messages have ended, and which of those the receiving library has confirmed.
//!
//! Sequences are counted by this library, one per message, whatever becomes of it. `limit` is the promise that makes loss visible: *all
//! below it have ended as delivered, or were given up and the receiver knows which*. It rides in every seal. Since a message that the
//! engine calls delivered is in the receiver's event ring before anything that was sealed afterwards, a receiver that reads a limit has
//! read everything below it, or it is lost. That holds in whatever order messages arrive.
//!
//! A message that was given up is a lawful gap. The limit stops before it until a [`Statement`] has told the receiver, and a
//! [`Receipt`] has said that it was heard. Neighbours are one gap. State is bounded: a stream has no more than [`WINDOW`] messages beyond
//! its limit and [`GAPS`] gaps untold. When it has half of either the receiver is asked at once; when it has all, the stream takes no message
//! until a receipt comes, or nobody waits for one: then it begins a new session.

use std::collections::VecDeque;

use crate::integrity::seal::{Receipt, Statement};
use crate::names::Priority;
use crate::status::Status;

/// Most sequences beyond the limit.
pub(crate) const WINDOW: u32 = 1024;
/// Most gaps the receiver has not confirmed.
const GAPS: usize = 64;
#[cfg(test)]
pub(crate) const GAPS_FOR_TESTS: usize = GAPS;

/// Is `a` before `b`?
pub(crate) fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// How a send ended, as far as the receiver's count goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Open,
    Delivered,
    /// Certainly not delivered, or only perhaps.
    GivenUp {
        certain: bool,
    },
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        match status {
            Status::Delivered => Self::Delivered,
            Status::NotDelivered(_) => Self::GivenUp { certain: true },
            Status::MaybeDelivered(_) => Self::GivenUp { certain: false },
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    first: u32,
    count: u32,
    certain: bool,
    /// The receiver has been told, or will be in a moment.
    stated: bool,
}

/// What a receipt brought to light.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Word {
    /// Delivered, says the engine, and lost, says the receiver.
    pub(crate) lost: u32,
    /// Delivered, says the engine, before this receiver knew of the stream; its predecessor has not confirmed them.
    pub(crate) unconfirmed: u32,
    /// Not delivered, says the engine, and received.
    pub(crate) contradicted: u32,
}

/// One stream, at its sender.
#[derive(Debug)]
pub(crate) struct Outgoing {
    session: u64,
    next: u32,
    /// The oldest that has not ended.
    base: u32,
    /// From `base` on.
    ends: VecDeque<End>,
    /// Before `base`.
    gaps: VecDeque<Gap>,
    /// The receiver has accounted for all below, or the application knows that it has not.
    confirmed: u32,
    /// Who confirms, and from where on it knows the stream.
    receiver: Option<(u64, u32)>,
    former: Option<u64>,
    /// As the present receiver counts.
    lost: u32,
}

impl Outgoing {
    /// A new stream whose session is `session`. `first` is 0 but in tests.
    pub(crate) fn new(session: u64, first: u32) -> Self {
        Self {
            session,
            next: first,
            base: first,
            ends: VecDeque::new(),
            gaps: VecDeque::new(),
            confirmed: first,
            receiver: None,
            former: None,
            lost: 0,
        }
    }

    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// The oldest that has not ended; the next one, if all have.
    pub(crate) fn base(&self) -> u32 {
        self.base
    }

    fn limit(&self) -> u32 {
        self.gaps.front().map_or(self.base, |gap| gap.first)
    }

    /// Is there room for one more?
    pub(crate) fn may_send(&self) -> bool {
        self.next.wrapping_sub(self.limit()) < WINDOW && self.gaps.len() < GAPS
    }

    /// Will there be no room soon?
    pub(crate) fn is_crowded(&self) -> bool {
        self.next.wrapping_sub(self.limit()) >= WINDOW / 2 || self.gaps.len() >= GAPS / 2
    }

    /// The next sequence, and how far behind it the limit is. Only if [`Self::may_send`].
    pub(crate) fn send(&mut self) -> (u32, u16) {
        let sequence = self.next;
        self.next = self.next.wrapping_add(1);
        self.ends.push_back(End::Open);
        (sequence, sequence.wrapping_sub(self.limit()) as u16)
    }

    /// Messages that have not ended.
    pub(crate) fn open(&self) -> bool {
        !self.ends.is_empty()
    }

    /// One has ended.
    pub(crate) fn ended(&mut self, sequence: u32, end: End) {
        let at = sequence.wrapping_sub(self.base) as usize;
        if let Some(known) = self.ends.get_mut(at) {
            *known = end;
        }
        while let Some(&end) = self.ends.front() {
            match end {
                End::Open => break,
                End::Delivered => {}
                End::GivenUp { certain } => self.give_up(certain),
            }
            self.ends.pop_front();
            self.base = self.base.wrapping_add(1);
        }
    }

    /// The message at `base` was given up.
    fn give_up(&mut self, certain: bool) {
        match self.gaps.back_mut() {
            Some(gap)
                if !gap.stated
                    && gap.certain == certain
                    && gap.first.wrapping_add(gap.count) == self.base =>
            {
                gap.count += 1;
            }
            _ => self.gaps.push_back(Gap {
                first: self.base,
                count: 1,
                certain,
                stated: false,
            }),
        }
    }

    /// Of `from..base`, how many ended as delivered?
    fn delivered_since(&self, from: u32) -> u32 {
        self.delivered_between(from, self.base)
    }

    fn delivered_between(&self, from: u32, to: u32) -> u32 {
        if !before(from, to) {
            return 0;
        }
        let given: u32 = self
            .gaps
            .iter()
            .map(|gap| {
                let end = gap.first.wrapping_add(gap.count);
                let first = if before(gap.first, from) {
                    from
                } else {
                    gap.first
                };
                let end = if before(to, end) { to } else { end };
                if before(first, end) {
                    end.wrapping_sub(first)
                } else {
                    0
                }
            })
            .sum();
        to.wrapping_sub(from).saturating_sub(given)
    }

    /// Messages that were delivered, says the engine, and that the receiver has not confirmed.
    pub(crate) fn unconfirmed(&self) -> u32 {
        self.delivered_since(self.confirmed)
    }

    /// Is there anything the receiver should be asked or told?
    pub(crate) fn wants_receipt(&self) -> bool {
        !self.gaps.is_empty() || self.unconfirmed() > 0
    }

    /// Messages whose end the receiver has not confirmed: of those that were delivered and of those that were not.
    pub(crate) fn unsettled(&self) -> u64 {
        let untold: u64 = self.gaps.iter().map(|gap| u64::from(gap.count)).sum();
        untold + u64::from(self.unconfirmed())
    }

    /// The application has been told: nobody waits for a receipt of these any more. How many they were.
    pub(crate) fn write_off(&mut self) -> u32 {
        let unconfirmed = self.unconfirmed();
        if before(self.confirmed, self.base) {
            self.confirmed = self.base;
        }
        unconfirmed
    }

    /// What is to be told to the receiver now.
    pub(crate) fn statement(&mut self, priority: Priority) -> Statement {
        let upto = self.gaps.get(1).map_or(self.base, |gap| gap.first);
        if let Some(gap) = self.gaps.front_mut() {
            gap.stated = true;
        }
        let gap = self.gaps.front();
        Statement {
            session: self.session,
            priority,
            first: gap.map_or(upto, |gap| gap.first),
            count: gap.map_or(0, |gap| gap.count),
            certain: gap.is_some_and(|gap| gap.certain),
            upto,
        }
    }

    /// A receipt came. `None` if it makes no sense.
    pub(crate) fn receipt(&mut self, receipt: &Receipt) -> Option<Word> {
        let beyond = before(self.next, receipt.upto) || before(receipt.upto, receipt.start);
        if beyond {
            return None;
        }
        if self.former == Some(receipt.receiver) {
            return Some(Word::default());
        }
        let mut word = Word::default();
        let known = (receipt.receiver, receipt.start);
        if self.receiver != Some(known) {
            let former = self.receiver.replace(known);
            self.former = former.map(|(id, _)| id).filter(|&id| id != known.0);
            self.lost = 0;
            let start = if before(self.base, receipt.start) {
                self.base
            } else {
                receipt.start
            };
            if before(self.confirmed, start) {
                word.unconfirmed = self.delivered_between(self.confirmed, start);
                self.confirmed = start;
            }
        }
        if before(self.lost, receipt.lost) {
            word.lost = receipt.lost.wrapping_sub(self.lost);
            self.lost = receipt.lost;
        }
        if before(self.confirmed, receipt.upto) {
            self.confirmed = receipt.upto;
        }
        while let Some(gap) = self.gaps.front()
            && !before(receipt.upto, gap.first.wrapping_add(gap.count))
        {
            // Nobody has told the receiver to pass it: it came.
            if gap.certain && !gap.stated {
                word.contradicted += gap.count;
            }
            self.gaps.pop_front();
        }
        Some(word)
    }
}
