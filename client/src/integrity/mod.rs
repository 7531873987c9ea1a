//! End-to-end integrity: between two libraries, past engines that are wrong rather than dead.
//!
//! **Problem.** The recovery of RECOVERY.md rests on engines that stop. FTGM (paper 004, Table 1) found by flipping bits in the code of a
//! network processor that a fifth of the faults corrupt messages or lose them without stopping anything. An engine whose code is damaged
//! can acknowledge what it did not deliver, deliver it twice, change it, or give it to another port, with every CRC of the transport
//! right: it computes them itself.
//!
//! **Idea.** The two libraries trust each other and nothing between them (RECOVERY.md, *What is promised when an engine is wrong*). The
//! sender puts a [`seal`] behind each message: session, sequence, both addresses, priority and a checksum over all of it, the
//! payload, its length and the tag. The receiver hands out only what is right, strips the seal, and counts. Loss is told from delay by one
//! rule ([`outgoing`]): what a sender writes after a send has ended is read after that send's message. So each seal says up to where all
//! have ended, and whatever is missing below is lost. What was given up is told by a *statement* and confirmed by a *receipt*; receipts
//! also tell the sender that what its engine called delivered was seen by the library there. They are cumulative, asked for by the sender
//! once per [`RECEIPT_EVERY`] messages and when a stream falls silent, and a buffer is kept for each that is asked for: none ever waits for
//! an application's tokens.
//!
//! **Invariants.** A message handed out as verified is one that was sent, to this port, unchanged, and not handed out before (while its
//! stream is remembered). A sequence is accounted for exactly once: received, given up, or reported. What is reported stays reported:
//! reports are added up, never dropped. An engine that dies and is replaced changes nothing here: all state is the application's.
//!
//! **Rejected.** *A header instead of a seal behind*: a shortened message would keep it, but offers show a message's first 16 bytes, which
//! are the application's. *Receipts in the transport*: that is who is checked. *A port of their own for notes*: it would end pauses
//! of shared streams, at twice the ports. *A CRC*: see `seal.rs`. *Sessions
//! in the order of a clock*: clocks are set back.
//!
//! **Notes and GM's pauses.** Notes travel at high priority in the application's own stream, without a deadline, and are cancelled, not
//! timed out, because a cancelled send pauses no stream. A closed port does. The library then resumes the stream itself, once it has seen
//! every event there was and none of them was a failure of the application's, which would be the application's to resume.
//!
//! What is promised to applications, what is not, and what it costs: `docs/integrity.md`.

#[cfg(test)]
mod cost;
mod incoming;
mod notes;
mod outgoing;
mod port;
mod report;
mod seal;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use incoming::{Came, Incoming};
use outgoing::{End, Outgoing};
use report::Reports;
pub use report::{Fault, Integrity, IntegrityReport};
pub(crate) use seal::{NOTE, SEAL};
use seal::{Note, Receipt, Seal, Statement};
use table::{STREAMS, Table};

use crate::arena::Buffer;
use crate::names::{Address, Priority};
use crate::port::SendOptions;
use crate::status::{Reason, Status};

/// Send slots kept for notes, and receive tokens for receipts: as many are under way at one time.
pub(crate) const NOTES: u32 = 8;
/// A sender asks for a receipt once per so many messages.
const RECEIPT_EVERY: u32 = 128;

/// A stream this port sends on.
#[derive(Debug)]
struct Sending {
    count: Outgoing,
    /// In [`Book::watched`].
    watched: bool,
    /// Nobody waits for a receipt until something happens.
    quiet: bool,
    /// A receipt was asked for and did not come.
    wanted: bool,
    /// A statement waits to be sent, or is under way.
    asking: bool,
    /// The next sequence when a seal last asked.
    asked_at: u32,
    /// When the oldest unconfirmed was first seen to be so, and when it was first asked for.
    since: u64,
    asked: u64,
    asks: u64,
    /// A send failed and the application has not said how to go on.
    paused: bool,
    /// Longest timeout of its sends.
    longest_ns: u64,
    /// The oldest open sequence, since when, and whether it was reported.
    oldest: (u32, u64, bool),
}

/// A stream this port receives on.
#[derive(Debug, Default)]
struct Receiving {
    count: Incoming,
    /// A receipt is to be written.
    owed: bool,
    /// What the last one said.
    said: u32,
}

/// What a send slot carries.
#[derive(Clone, Copy, Debug, Default)]
struct Sealed {
    stream: u32,
    session: u64,
    sequence: u32,
    /// Where the seal ends.
    end: usize,
    /// What the seal covers of the application's buffer.
    covered: [u8; SEAL],
}

/// A note that the engine has.
#[derive(Clone, Copy, Debug)]
struct Posted {
    slot: u32,
    generation: u32,
    at: u64,
    to: Address,
    /// The stream whose statement it is.
    asks: Option<u32>,
}

/// A sealed message's end.
#[derive(Debug)]
pub(crate) enum Judgement {
    /// For the application.
    Deliver,
    /// Not for it; what is to be said about it has been reported.
    Keep,
}

/// All that a port knows for integrity's sake.
#[derive(Debug)]
pub(crate) struct Book {
    own: Address,
    /// This port's name as a receiver; sessions of its streams are counted from it.
    id: u64,
    sessions: u64,
    /// A quarter of the time within which receipts must come.
    quarter_ns: u64,
    default_timeout_ns: u64,
    sending: Table<Sending>,
    receiving: Table<Receiving>,
    sealed: Vec<Sealed>,
    owed: VecDeque<u32>,
    asks: VecDeque<u32>,
    /// Streams with sends that have not ended or are not confirmed.
    watched: Vec<u32>,
    wanted: u32,
    posted: Vec<Posted>,
    /// High priority streams that a note's failure has paused.
    resume: Vec<Address>,
    reports: Reports,
    anomalies: u64,
    next_look: u64,
    events: u32,
}

impl Book {
    pub(crate) fn new(
        own: Address,
        id: u64,
        options: Integrity,
        slots: u32,
        default_timeout_ns: u64,
    ) -> Self {
        let within = u64::try_from(options.confirm_within.as_nanos()).unwrap_or(u64::MAX);
        Self {
            own,
            id,
            sessions: id,
            quarter_ns: (within / 4).clamp(1_000_000, u64::MAX / 64),
            default_timeout_ns,
            sending: Table::new(STREAMS),
            receiving: Table::new(STREAMS),
            sealed: vec![Sealed::default(); slots as usize],
            owed: VecDeque::new(),
            asks: VecDeque::new(),
            watched: Vec::new(),
            wanted: 0,
            posted: Vec::with_capacity(NOTES as usize),
            resume: Vec::new(),
            reports: Reports::default(),
            anomalies: 0,
            next_look: 0,
            events: 0,
        }
    }

    // ---- sending ----

    /// Where the stream is; `None` if it takes no message now.
    pub(crate) fn may_send(&mut self, to: Address, priority: Priority) -> Option<u32> {
        let at = match self.sending.find(to, priority) {
            Some(at) => at,
            None => {
                self.sessions = self.sessions.wrapping_add(1);
                let stream = Sending {
                    count: Outgoing::new(self.sessions, 0),
                    watched: false,
                    quiet: false,
                    wanted: false,
                    asking: false,
                    asked_at: 0,
                    since: 0,
                    asked: 0,
                    asks: 0,
                    paused: false,
                    longest_ns: 0,
                    oldest: (0, 0, false),
                };
                let spare = |s: &Sending| !s.watched && !s.asking && !s.wanted;
                self.sending.insert(to, priority, stream, spare)?
            }
        };
        if !self.sending.get(at)?.count.may_send() && !self.renew(at) {
            // What holds it up is a receipt.
            self.watch(at);
            return None;
        }
        Some(at)
    }

    /// A new session for a stream whose sends have all ended, and whose receiver need not account for any: it was never there, perhaps, to
    /// be told of the gaps. `false`: not yet.
    fn renew(&mut self, at: u32) -> bool {
        let Some(stream) = self.sending.get(at) else {
            return false;
        };
        if stream.count.open() || stream.count.unconfirmed() > 0 {
            return false;
        }
        self.sessions = self.sessions.wrapping_add(1);
        stream.count = Outgoing::new(self.sessions, 0);
        stream.asked_at = 0;
        (stream.since, stream.asked, stream.asks) = (0, 0, 0);
        stream.oldest = (0, 0, false);
        if std::mem::take(&mut stream.wanted) {
            self.wanted -= 1;
        }
        true
    }

    fn watch(&mut self, at: u32) {
        if let Some(stream) = self.sending.get(at) {
            stream.quiet = false;
            if !std::mem::replace(&mut stream.watched, true) {
                self.watched.push(at);
            }
        }
    }

    /// Seals a message that goes out in `slot`; the seal is the end of `bytes`. After [`Self::may_send`] found the stream.
    pub(crate) fn seal(&mut self, at: u32, slot: u32, options: &SendOptions, bytes: &mut [u8]) {
        let timeout_ns = options.timeout.map_or(self.default_timeout_ns, |timeout| {
            u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
        });
        self.watch(at);
        let Some((to, priority)) = self.sending.name(at) else {
            return;
        };
        let Some(stream) = self.sending.get(at) else {
            return;
        };
        let (sequence, back) = stream.count.send();
        stream.longest_ns = stream.longest_ns.max(timeout_ns);
        let due = sequence.wrapping_sub(stream.asked_at) >= RECEIPT_EVERY;
        let receipt_wanted = due && !stream.wanted && self.wanted < NOTES;
        if receipt_wanted {
            stream.asked_at = sequence;
            stream.wanted = true;
            self.wanted += 1;
        }
        let session = stream.count.session();
        let seal = Seal {
            session,
            sequence,
            back,
            receipt_wanted,
            priority,
            from: self.own,
            to,
        };
        if let Some(sealed) = self.sealed.get_mut(slot as usize) {
            (sealed.stream, sealed.session, sealed.sequence) = (at, session, sequence);
            sealed.end = bytes.len();
            if let Some(covered) = bytes.last_chunk() {
                sealed.covered = *covered;
            }
        }
        seal.write(bytes, options.tag);
    }

    /// Takes the seal off the buffer of the message in `slot`: it comes back as it was given.
    pub(crate) fn uncover(&self, slot: u32, buffer: Option<&mut Buffer>) {
        if let Some(sealed) = self.sealed.get(slot as usize)
            && let Some(buffer) = buffer
            && let Some(bytes) = buffer.whole_mut(sealed.end).last_chunk_mut()
        {
            *bytes = sealed.covered;
        }
    }

    /// The send in `slot` has ended.
    pub(crate) fn ended(&mut self, slot: u32, status: Status) {
        let Some(&Sealed {
            stream: at,
            session,
            sequence,
            ..
        }) = self.sealed.get(slot as usize)
        else {
            return;
        };
        let Some(stream) = self.sending.get(at) else {
            return;
        };
        if stream.count.session() == session {
            stream.count.ended(sequence, End::from(status));
            stream.paused |= pauses(status);
            let crowded = !stream.wanted && stream.count.is_crowded();
            self.watch(at);
            if crowded {
                self.ask(at);
            }
        }
    }

    /// The application has said how a stream goes on.
    pub(crate) fn went_on(&mut self, to: Address, priority: Priority) {
        if let Some(at) = self.sending.find(to, priority)
            && let Some(stream) = self.sending.get(at)
        {
            stream.paused = false;
        }
    }

    /// Messages that have ended, and that wait for a receipt.
    pub(crate) fn unconfirmed(&mut self) -> u64 {
        let sending = &mut self.sending;
        let count = |&at: &u32| {
            let stream = sending.get(at).filter(|s| !s.quiet);
            stream.map_or(0, |s| s.count.unsettled())
        };
        self.watched.iter().map(count).sum()
    }

    // ---- receiving ----

    fn inbox(&mut self, from: Address, priority: Priority) -> Option<u32> {
        if let Some(at) = self.receiving.find(from, priority) {
            return Some(at);
        }
        let (table, new) = (&mut self.receiving, Receiving::default);
        table
            .insert(from, priority, new(), |r| !r.owed)
            .or_else(|| table.insert(from, priority, new(), |_| true))
    }

    /// A message came from `from`, says the engine. Is it one that was sent so?
    pub(crate) fn message(
        &mut self,
        sealed: &[u8],
        from: Address,
        priority: Priority,
        tag: u64,
    ) -> Judgement {
        let peer = Some((from, priority));
        let seal = match Seal::read(sealed, tag) {
            Ok(seal) => seal,
            Err(seal::Broken::Changed) => {
                self.reports.add(Fault::Changed, peer, 1u32);
                return Judgement::Keep;
            }
            Err(seal::Broken::Unsealed) => {
                self.reports.add(Fault::Unsealed, peer, 1u32);
                return Judgement::Keep;
            }
        };
        if (seal.from, seal.to, seal.priority) != (from, self.own, priority) {
            self.reports.add(Fault::Misdirected, peer, 1u32);
            return Judgement::Keep;
        }
        let Some(at) = self.inbox(from, priority) else {
            return Judgement::Keep;
        };
        let Some(stream) = self.receiving.get(at) else {
            return Judgement::Keep;
        };
        let (came, judged) = stream.count.message(&seal);
        if seal.receipt_wanted {
            self.owe(at);
        }
        self.reports.add(Fault::Lost, peer, judged.lost);
        match came {
            Came::Fresh => Judgement::Deliver,
            Came::Repeated => {
                self.reports.add(Fault::Repeated, peer, 1u32);
                Judgement::Keep
            }
            Came::Nonsense => {
                self.reports.add(Fault::Nonsense, peer, 1u32);
                Judgement::Keep
            }
        }
    }

    /// The beginning of a message came, as the application had asked.
    pub(crate) fn shortened(&mut self, from: Address, priority: Priority) {
        if let Some(at) = self.inbox(from, priority)
            && let Some(stream) = self.receiving.get(at)
        {
            stream.count.shortened();
        }
    }

    /// A message shorter than any that is sealed.
    pub(crate) fn note(&mut self, bytes: &[u8], from: Address, priority: Priority, tag: u64) {
        match Note::read(bytes, tag, from, self.own) {
            Ok(Note::Receipt(receipt)) => self.receipt(from, &receipt),
            Ok(Note::Statement(statement)) => self.statement(from, &statement),
            Err(_) => self
                .reports
                .add(Fault::Unsealed, Some((from, priority)), 1u32),
        }
    }

    fn receipt(&mut self, from: Address, receipt: &Receipt) {
        let Some(at) = self.sending.find(from, receipt.priority) else {
            return;
        };
        let Some(stream) = self.sending.get(at) else {
            return;
        };
        if stream.count.session() != receipt.session {
            return;
        }
        let peer = Some((from, receipt.priority));
        let before = (stream.count.unconfirmed(), stream.count.wants_receipt());
        let Some(word) = stream.count.receipt(receipt) else {
            self.reports.add(Fault::Nonsense, peer, 1u32);
            return;
        };
        if (stream.count.unconfirmed(), stream.count.wants_receipt()) != before {
            (stream.since, stream.asked, stream.asks) = (0, 0, 0);
        }
        if std::mem::take(&mut stream.wanted) {
            self.wanted -= 1;
        }
        self.reports.add(Fault::Lost, peer, word.lost);
        self.reports.add(Fault::Unconfirmed, peer, word.unconfirmed);
        self.reports
            .add(Fault::Contradicted, peer, word.contradicted);
    }

    fn statement(&mut self, from: Address, statement: &Statement) {
        let peer = (from, statement.priority);
        let Some(at) = self.inbox(from, statement.priority) else {
            return;
        };
        let Some(stream) = self.receiving.get(at) else {
            return;
        };
        match stream.count.statement(statement) {
            Some(judged) => {
                self.owe(at);
                self.reports.add(Fault::Lost, Some(peer), judged.lost);
                self.reports
                    .add(Fault::Contradicted, Some(peer), judged.contradicted);
            }
            None => self.reports.add(Fault::Repeated, Some(peer), 1u32),
        }
    }

    fn owe(&mut self, at: u32) {
        if let Some(stream) = self.receiving.get(at)
            && !std::mem::replace(&mut stream.owed, true)
        {
            self.owed.push_back(at);
        }
    }

    /// A receipt to every sender that has not the last word.
    pub(crate) fn owe_all(&mut self) {
        for at in 0..STREAMS as u32 {
            let Some(stream) = self.receiving.get(at) else {
                break;
            };
            let news = stream.count.receipt(self.id, Priority::Low);
            if news.is_some_and(|r| r.upto != stream.said) {
                self.owe(at);
            }
        }
    }
}

/// Does a send that ended so pause its stream (transport §4.6)?
fn pauses(status: Status) -> bool {
    matches!(
        status,
        Status::NotDelivered(
            Reason::PortClosed | Reason::TooLong | Reason::Deadline | Reason::BadMemory
        )
    )
}
