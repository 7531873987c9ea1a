//! Questions: messages whose first chunk came and about which the application is asked before they are taken (RMPP's up-call, 001;
//! transport.md §5.7).
//!
//! The transport offers a message ([`Host::offer`](portolan_transport::Host::offer)) each time its first chunk might be accepted. If the
//! port asks first for messages as long as this one, the first offer becomes an event and the message is left with its sender as if it
//! had no buffer; the application's answer is remembered here, and the transport, told that it may go on, offers the message again and
//! hears it.
//!
//! **Nothing here is durable.** A successor knows no question: it is offered the message again, because a message that is not committed
//! comes again, and asks again. The library remembers what its application answered, so the second answer is the first one; an answer
//! names the message and not the question, so one that was on its way when the engine died does no harm and no good.
//!
//! **An application that does not answer** holds that message up as if it had provided no buffer: the send's own deadline ends it.
//! Rejected: taking the message after a while. It would be a guess, and an application that wanted less than all of it, but was slow
//! to say so, would not get what it asked for.
//!
//! **Bounds.** At most [`OPEN`] questions of a port wait for their answer and at most [`EVENT_RESERVE`] offers are in its event ring and
//! not yet read; beyond either the message waits, and is asked about when there is room. So the ring always has an entry for every token,
//! and a commit never waits. Of the verdicts not yet used the oldest is forgotten first: then it is asked again.
//!
//! A question ends with its message: when it is committed, when its number is (the sender gave it up), when its stream's record is freed.

use std::collections::VecDeque;

use portolan_abi::event::{Event, EventKind, OFFERED_BYTES, Offered};
use portolan_abi::port::EVENT_RESERVE;
use portolan_abi::token::{AnswerToken, Verdict as Wanted};
use portolan_transport::host::{Offer, Verdict};
use portolan_transport::ident::{RecordId, StreamKey, serial_lt};

/// Questions of a port that wait for an answer.
const OPEN: u32 = EVENT_RESERVE;
/// Questions and verdicts of a port.
const KNOWN: usize = 64;

/// A message the application is or was asked about.
#[derive(Clone, Copy, Debug)]
struct Question {
    stream: StreamKey,
    record: RecordId,
    /// Low half of the sender's incarnation: the next one uses the same epochs again.
    incarnation: u32,
    epoch: u32,
    number: u32,
    total: u32,
    /// `None` while it is open.
    verdict: Option<Verdict>,
}

/// The questions of one port.
#[derive(Debug, Default)]
pub struct Questions {
    /// Oldest first.
    known: Vec<Question>,
    open: u32,
    /// Event indices of the offers that were not read, by what is known, oldest first.
    unread: VecDeque<u32>,
    /// Messages turned away because there was no room for another question.
    turned_away: u32,
}

impl Questions {
    /// What is known of an offered message: the verdict, or that it is being asked about.
    pub fn verdict(&self, offer: &Offer<'_>, incarnation: u32) -> Option<Verdict> {
        let question = self.known.iter().find(|q| {
            (q.record, q.epoch, q.number) == (offer.record, offer.epoch, offer.number)
                && (q.stream, q.incarnation) == (offer.stream, incarnation)
        });
        question.map(|q| q.verdict.unwrap_or(Verdict::Undecided))
    }

    /// Is there room for another question, if the application has read the events before `consumer`? If not, the message is counted as
    /// turned away.
    pub fn has_room(&mut self, consumer: u32) -> bool {
        let room = self.room(consumer) > 0;
        self.turned_away = self.turned_away.saturating_add(u32::from(!room));
        room
    }

    fn room(&mut self, consumer: u32) -> u32 {
        // The consumer's index is the application's word. A false one makes it miss events of its own.
        while let Some(index) = self.unread.front()
            && serial_lt(*index, consumer)
        {
            self.unread.pop_front();
        }
        EVENT_RESERVE
            .saturating_sub(self.unread.len() as u32)
            .min(OPEN.saturating_sub(self.open))
    }

    /// Was any message turned away that was not named since?
    pub fn turned_some_away(&self) -> bool {
        self.turned_away > 0
    }

    /// Messages that were turned away and can be asked about now; each is named once.
    pub fn room_again(&mut self, consumer: u32) -> u32 {
        let room = self.room(consumer).min(self.turned_away);
        self.turned_away -= room;
        room
    }

    /// Opens a question, whose event gets this index; there is room. Returns the event.
    pub fn open(&mut self, offer: &Offer<'_>, incarnation: u32, index: u32) -> Event {
        if self.known.len() >= KNOWN
            && let Some(oldest) = self.known.iter().position(|q| q.verdict.is_some())
        {
            self.known.remove(oldest);
        }
        self.known.push(Question {
            stream: offer.stream,
            record: offer.record,
            incarnation,
            epoch: offer.epoch,
            number: offer.number,
            total: offer.total,
            verdict: None,
        });
        self.open += 1;
        self.unread.push_back(index);
        let mut first = [0; OFFERED_BYTES];
        let shown = offer.first.len().min(OFFERED_BYTES);
        first[..shown].copy_from_slice(&offer.first[..shown]);
        Event {
            kind: EventKind::Offered(Offered { incarnation, first }),
            priority: offer.stream.priority as u8,
            slot: 0,
            generation: 0,
            len: shown as u32,
            total: offer.total,
            node: offer.stream.node.0,
            port: offer.stream.remote.0,
            record: offer.record.0,
            epoch: offer.epoch,
            number: offer.number,
            tag: offer.tag,
        }
    }

    /// After a takeover: the event at this index is an offer nobody has read.
    pub fn recall_unread(&mut self, index: u32) {
        self.unread.push_back(index);
    }

    /// The application's answer. Returns the stream that waited for it; `None` if no open question is meant: it was answered, is over,
    /// or never was.
    pub fn answer(&mut self, answer: &AnswerToken) -> Option<StreamKey> {
        let question = self.known.iter_mut().find(|q| {
            let from = (q.stream.node.0, q.stream.remote.0);
            q.verdict.is_none()
                && (from, q.stream.priority as u8) == (answer.from, answer.priority)
                && (q.incarnation, q.epoch, q.number)
                    == (answer.incarnation, answer.epoch, answer.number)
        })?;
        question.verdict = Some(match answer.verdict {
            Wanted::Accept => Verdict::Accept,
            Wanted::Shorten if answer.len >= question.total => Verdict::Accept,
            Wanted::Shorten => Verdict::Shorten(answer.len),
            Wanted::Refuse => Verdict::Refuse,
        });
        self.open -= 1;
        Some(question.stream)
    }

    /// The message with this number was committed.
    #[inline]
    pub fn committed(&mut self, record: RecordId, number: u32) {
        if self.known.is_empty() {
            return; // as with every port that does not ask
        }
        self.forget(|q| q.record == record && q.number == number);
    }

    /// Every number below `base` was committed, or given up.
    pub fn passed(&mut self, record: RecordId, base: u32) {
        self.forget(|q| q.record == record && serial_lt(q.number, base));
    }

    /// The stream is no more.
    pub fn ended(&mut self, record: RecordId) {
        self.forget(|q| q.record == record);
    }

    fn forget(&mut self, over: impl Fn(&Question) -> bool) {
        let open = &mut self.open;
        self.known.retain(|q| {
            let stays = !over(q);
            *open -= u32::from(!stays && q.verdict.is_none());
            stays
        });
    }
}
