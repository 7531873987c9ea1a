//! Offers: messages about which the engine asks before it takes them, and what was answered.
//!
//! The engine asks once, but its successor, after a fault, asks again: it knows no question and no answer. So the port remembers what
//! it was asked and what the application answered, and answers a repeated question itself. The memory is bounded: if more than
//! [`REMEMBERED`] messages were answered since, the application is asked again.

use std::collections::VecDeque;

use portolan_abi::event::{Event as Entry, OFFERED_BYTES, Offered};
use portolan_abi::token::{AnswerToken, Verdict as Wanted};

use crate::error::SendError;
use crate::event::Event;
use crate::integrity::SEAL;
use crate::names::{Address, NodeId, PortId, Priority};
use crate::port::Port;
use crate::tokens::Use;

/// Questions and answers remembered.
const REMEMBERED: usize = 64;
/// Most messages of a stream under way at one time; one that is further behind is over.
const WINDOW: u32 = 512;

/// What an application wants of a message that is offered to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All of it.
    Accept,
    /// Its first bytes, so many; all of it if it has no more. The sender's send ends as delivered.
    Shorten(usize),
    /// Nothing. The sender's send ends as not delivered ([`crate::Reason::Refused`]), and its stream waits until the sender says how it
    /// goes on, as after any send that failed.
    Refuse,
}

/// What names a message, also to an engine's successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name {
    from: Address,
    priority: Priority,
    incarnation: u32,
    epoch: u32,
    number: u32,
}

/// A message that waits, with its sender, for the application's word: [`Port::accept`], [`Port::shorten`] or [`Port::refuse`]. One that
/// is never answered waits until the sender's timeout ends it.
#[derive(Debug)]
#[must_use = "the message waits until it is accepted, shortened or refused"]
pub struct Offer {
    name: Name,
    total: u32,
    tag: u64,
    first: [u8; OFFERED_BYTES],
    shown: u32,
    /// The port it was offered to.
    to: Address,
}

impl Offer {
    /// Who sends it.
    pub fn from(&self) -> Address {
        self.name.from
    }

    /// The priority it is sent at.
    pub fn priority(&self) -> Priority {
        self.name.priority
    }

    /// Its bytes.
    pub fn total(&self) -> usize {
        self.total as usize
    }

    /// What the sender put beside the bytes.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Its first bytes, as many as came with the question: at most 16, perhaps none.
    pub fn first(&self) -> &[u8] {
        self.first.get(..self.shown as usize).unwrap_or_default()
    }
}

/// Called for each offer that comes.
pub(crate) type OfferHandler = Box<dyn FnMut(&Offer) -> Verdict + Send>;

/// What is known of a question that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Never,
    Open,
    Answered(Verdict),
}

/// Questions that came, and answers that are on their way.
#[derive(Debug, Default)]
pub(crate) struct OfferBook {
    /// Oldest first; `None` while the application has not answered.
    known: Vec<(Name, Option<Verdict>)>,
    /// Answers that wait for a slot.
    waiting: VecDeque<AnswerToken>,
}

impl OfferBook {
    fn asked(&mut self, name: Name) -> Asked {
        match self.known.iter().find(|(known, _)| *known == name) {
            Some((_, Some(verdict))) => Asked::Answered(*verdict),
            Some((_, None)) => Asked::Open,
            None => {
                self.remember(name, None);
                Asked::Never
            }
        }
    }

    fn remember(&mut self, name: Name, verdict: Option<Verdict>) {
        if let Some((_, known)) = self.known.iter_mut().find(|(known, _)| *known == name) {
            *known = verdict;
            return;
        }
        if self.known.len() >= REMEMBERED {
            let answered = self.known.iter().position(|(_, v)| v.is_some());
            self.known.remove(answered.unwrap_or(0));
        }
        self.known.push((name, verdict));
    }

    /// Was this message's beginning asked for, and no more? With integrity.
    pub(crate) fn shortened(&self, entry: &Entry) -> bool {
        self.known.iter().any(|(name, verdict)| {
            let from = (name.from.node.0, name.from.port.0);
            let stream = (from, name.priority.code(), name.epoch, name.number);
            let wanted = match verdict {
                Some(Verdict::Shorten(bytes)) => bytes.saturating_add(SEAL),
                _ => return false,
            };
            stream
                == (
                    (entry.node, entry.port),
                    entry.priority,
                    entry.epoch,
                    entry.number,
                )
                && entry.len as usize == wanted
        })
    }

    /// A message came: what was said of it, and of those long before it, is over.
    #[inline]
    pub(crate) fn received(&mut self, entry: &Entry) {
        if !self.known.is_empty() {
            self.is_over(entry);
        }
    }

    #[cold]
    fn is_over(&mut self, entry: &Entry) {
        self.known.retain(|(name, _)| {
            let from = (name.from.node.0, name.from.port.0);
            let stream = (from, name.priority.code(), name.epoch);
            let behind = entry.number.wrapping_sub(name.number);
            stream != ((entry.node, entry.port), entry.priority, entry.epoch)
                || (1..WINDOW).contains(&behind)
                || behind > u32::MAX / 2
        });
    }
}

fn answer_token(name: &Name, verdict: Verdict, seal: u32) -> AnswerToken {
    let (verdict, len) = match verdict {
        Verdict::Accept => (Wanted::Accept, 0),
        Verdict::Shorten(bytes) => {
            // Its buffer has room for a seal: with it a message that has no more bytes comes whole.
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            (Wanted::Shorten, bytes.saturating_add(seal))
        }
        Verdict::Refuse => (Wanted::Refuse, 0),
    };
    AnswerToken {
        from: (name.from.node.0, name.from.port.0),
        priority: name.priority.code(),
        incarnation: name.incarnation,
        epoch: name.epoch,
        number: name.number,
        verdict,
        len,
    }
}

impl Port {
    /// Takes an offered message whole.
    pub fn accept(&mut self, offer: Offer) -> Result<(), SendError> {
        self.answer(&offer, Verdict::Accept)
    }

    /// Takes the first `bytes` of an offered message; all of it if it has no more. It is received with its true length beside it
    /// ([`crate::Message::total`]) and needs a buffer of `bytes` only.
    pub fn shorten(&mut self, offer: Offer, bytes: usize) -> Result<(), SendError> {
        self.answer(&offer, Verdict::Shorten(bytes))
    }

    /// Refuses an offered message; its sender is told so.
    pub fn refuse(&mut self, offer: Offer) -> Result<(), SendError> {
        self.answer(&offer, Verdict::Refuse)
    }

    /// Has every call that receives ask `handler` about an offered message, instead of handing out [`Event::Offered`] (RMPP's up-call on
    /// a message's first chunk). Which messages are offered is up to [`crate::PortOptions::ask_first`].
    pub fn on_offer(&mut self, handler: impl FnMut(&Offer) -> Verdict + Send + 'static) {
        self.offer_handler = Some(Box::new(handler));
    }

    fn answer(&mut self, offer: &Offer, verdict: Verdict) -> Result<(), SendError> {
        self.usable()?;
        if offer.to != self.address() {
            return Err(SendError::ForeignOffer);
        }
        self.decide(offer.name, verdict);
        Ok(())
    }

    /// Bytes behind every message.
    fn seal_bytes(&self) -> u32 {
        if self.integrity.is_some() {
            SEAL as u32
        } else {
            0
        }
    }

    fn decide(&mut self, name: Name, verdict: Verdict) {
        self.offers.remember(name, Some(verdict));
        let token = answer_token(&name, verdict, self.seal_bytes());
        self.offers.waiting.push_back(token);
        self.send_answers();
    }

    /// Publishes answers as far as slots allow: as many at one time as are not meant for messages, so that they take none from them.
    pub(crate) fn send_answers(&mut self) {
        while self.send_book.may_answer()
            && let Some(slot) = self.send_book.next(true)
            && let Some(answer) = self.offers.waiting.pop_front()
        {
            self.push_token(slot, &answer.token(slot.generation), &[], Use::Answer);
        }
    }

    /// What an offer means; `None` if the application need not hear of it.
    pub(crate) fn offered(&mut self, entry: &Entry, offered: &Offered) -> Option<Event> {
        let from = Address {
            node: NodeId(entry.node),
            port: PortId(entry.port),
        };
        let (Some(priority), true) = (Priority::from_code(entry.priority), from.is_valid()) else {
            self.anomalies += 1;
            return None;
        };
        let total = entry.total.saturating_sub(self.seal_bytes());
        let offer = Offer {
            name: Name {
                from,
                priority,
                incarnation: offered.incarnation,
                epoch: entry.epoch,
                number: entry.number,
            },
            total,
            tag: entry.tag,
            first: offered.first,
            shown: entry.len.min(total),
            to: self.address(),
        };
        match self.offers.asked(offer.name) {
            Asked::Open => return None,
            Asked::Answered(verdict) => {
                self.decide(offer.name, verdict);
                return None;
            }
            Asked::Never => {}
        }
        let Some(handler) = &mut self.offer_handler else {
            return Some(Event::Offered(offer));
        };
        let verdict = handler(&offer);
        self.decide(offer.name, verdict);
        None
    }
}

#[cfg(test)]
mod tests {
    use portolan_abi::event::EventKind;
    use portolan_transport::policy::WINDOW_MAX;

    use super::*;

    // Expect: what the library takes for the most messages under way is what engines let be under way.
    #[test]
    fn the_window_is_the_transports() {
        assert_eq!(WINDOW, WINDOW_MAX);
    }

    fn name(number: u32) -> Name {
        Name {
            from: (2, 9).into(),
            priority: Priority::High,
            incarnation: 5,
            epoch: 7,
            number,
        }
    }

    fn came(epoch: u32, number: u32) -> Entry {
        Entry {
            kind: EventKind::Received,
            priority: 1,
            slot: 0,
            generation: 0,
            len: 0,
            total: 0,
            node: 2,
            port: 9,
            record: 0,
            epoch,
            number,
            tag: 0,
        }
    }

    // Asked, answered, asked again, and by a sender's next incarnation. Expect: the answer is remembered for the very message only, and
    // until it came.
    #[test]
    fn what_was_answered_is_remembered_until_the_message_comes() {
        let mut book = OfferBook::default();
        assert_eq!(book.asked(name(u32::MAX)), Asked::Never);
        assert_eq!(book.asked(name(u32::MAX)), Asked::Open);
        book.remember(name(u32::MAX), Some(Verdict::Refuse));
        assert_eq!(book.asked(name(u32::MAX)), Asked::Answered(Verdict::Refuse));
        let reborn = Name {
            incarnation: 6,
            ..name(u32::MAX)
        };
        assert_eq!(book.asked(reborn), Asked::Never);
        // Another stream's message, an earlier and the next one of this: nothing changes. One far later: it is over.
        for entry in [came(8, u32::MAX), came(7, u32::MAX - 1), came(7, 0)] {
            book.received(&entry);
            assert_eq!(book.asked(name(u32::MAX)), Asked::Answered(Verdict::Refuse));
        }
        book.received(&came(7, WINDOW));
        assert_eq!(book.asked(name(u32::MAX)), Asked::Never);
        book.received(&came(7, u32::MAX));
        assert_eq!(book.asked(name(u32::MAX)), Asked::Never);
    }

    // More questions than are remembered. Expect: the oldest answered one is forgotten, never one that is open.
    #[test]
    fn open_questions_are_remembered_longest() {
        let mut book = OfferBook::default();
        for number in 0..REMEMBERED as u32 {
            assert_eq!(book.asked(name(number)), Asked::Never);
        }
        book.remember(name(1), Some(Verdict::Accept));
        assert_eq!(book.asked(name(1000)), Asked::Never);
        assert_eq!(book.asked(name(0)), Asked::Open);
        assert_eq!(book.asked(name(1000)), Asked::Open);
        assert_eq!(book.known.len(), REMEMBERED);
        assert_eq!(book.asked(name(1)), Asked::Never, "forgotten");
    }
}
