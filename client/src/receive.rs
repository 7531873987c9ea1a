//! Receiving: the event ring first, then alarms, faults recovered, and the port's end. No system call but after a sleep.

use std::sync::atomic::Ordering;

use portolan_abi::event::{EVENT_WORDS, Event as Entry, EventKind, OtherEnds};
use portolan_abi::port::state;
use portolan_abi::ring::ConsumerCursor;
use portolan_abi::token::TokenRef;

use crate::error::PortError;
use crate::event::{Event, Message, SendHandle};
use crate::names::{Address, NodeId, PortId, Priority};
use crate::port::{Life, Port, close_reason};
use crate::status::{Reason, Status};
use crate::tokens::Use;

/// Sends that an event told of beside the one that was handed out.
#[derive(Debug)]
pub(crate) struct MoreEnded {
    tokens: OtherEnds,
    status: Status,
}

impl Default for MoreEnded {
    fn default() -> Self {
        Self {
            tokens: OtherEnds::default(),
            status: Status::Delivered,
        }
    }
}

/// What the ring says next, before it is an event. That is big, and its bytes are made where the application gets them: moved from function to
/// function, they are read in other pieces than they were just written in, and a processor waits for that.
enum Said {
    /// The send with this token ended.
    Ended(TokenRef, Status),
    /// A message lies in the buffer that this entry names.
    Received(Entry, Priority),
    /// Anything else.
    Else(Event),
}

/// What a rare way found. A type of its own, so that the compiler keeps what is rare apart: a result that the address of is known to a function may
/// lie nowhere but in memory, and the one of the common way is to be taken apart in registers.
struct Rare(Result<Option<Event>, PortError>);

impl Port {
    /// The next event, if one is there. Makes no system call (but the first after [`Self::prepare_wait`], which silences the doorbell).
    ///
    /// When the port has been closed, by the daemon for instance, every send still under way is first received as perhaps delivered;
    /// then comes the error.
    #[inline(always)]
    pub fn receive(&mut self) -> Result<Option<Event>, PortError> {
        if self.backlog.is_empty() {
            return self.poll();
        }
        Ok(self.backlog.pop_front())
    }

    /// The next event that is not in the backlog.
    #[inline(always)]
    pub(crate) fn poll(&mut self) -> Result<Option<Event>, PortError> {
        if self.armed
            || self.life != Life::Open
            || self.integrity.is_some()
            || self.alarms.any_set()
            || self.memory.forked()
        {
            let Rare(result) = self.poll_all();
            return result;
        }
        match self.look() {
            Some(said) => self.event(said),
            None => self.poll_rest(),
        }
    }

    /// The same where there is more to look at than the ring.
    #[cold]
    fn poll_all(&mut self) -> Rare {
        Rare(self.poll_everything())
    }

    fn poll_everything(&mut self) -> Result<Option<Event>, PortError> {
        if self.memory.forked() {
            return Err(PortError::Forked);
        }
        if self.armed {
            self.disarm();
        }
        match self.life {
            Life::Open => {}
            Life::Ending(error) => return self.next_ending(error).map(Some),
            Life::Over(error) => return Err(error),
        }
        if let Some(report) = self.next_report() {
            return Ok(Some(report));
        }
        if let Some(id) = self.alarms.take_due() {
            return Ok(Some(Event::Alarm(id)));
        }
        let event = self.poll_ring()?;
        if self.integrity.is_some() {
            self.look_after(event.is_none());
        }
        if event.is_some() {
            return Ok(event);
        }
        if let Some(report) = self.next_report() {
            return Ok(Some(report));
        }
        self.poll_rest()
    }

    /// What there is when the ring says nothing: faults recovered, the port's end.
    #[inline(always)]
    fn poll_rest(&mut self) -> Result<Option<Event>, PortError> {
        let header = self.memory.engine().header();
        // SYNC(inventory): after the count, what the engine found.
        let faults = header.faults_recovered.load(Ordering::Acquire);
        // SYNC(port-state): after CLOSED, every event that will ever come is in the ring.
        let word = header.state.load(Ordering::Acquire);
        if faults == self.faults_seen && word as u32 != state::CLOSED {
            return Ok(None);
        }
        let Rare(result) = self.poll_last(faults, word);
        result
    }

    #[cold]
    fn poll_last(&mut self, faults: u32, word: u64) -> Rare {
        Rare(self.poll_end(faults, word))
    }

    fn poll_end(&mut self, faults: u32, word: u64) -> Result<Option<Event>, PortError> {
        if faults != self.faults_seen {
            if let Some(event) = self.next_after_fault(faults)? {
                return Ok(Some(event));
            }
            self.faults_seen = faults;
            if self.report_faults {
                return Ok(Some(Event::FaultRecovered(faults)));
            }
        }
        if word as u32 != state::CLOSED {
            return Ok(None);
        }
        if let Some(event) = self.poll_ring()? {
            return Ok(Some(event));
        }
        let error = PortError::Closed(close_reason(word));
        self.life = Life::Ending(error);
        self.next_ending(error).map(Some)
    }

    /// What the event ring says next that concerns the application, as an event.
    #[cold]
    pub(crate) fn poll_ring(&mut self) -> Result<Option<Event>, PortError> {
        match self.look() {
            Some(said) => self.event(said),
            None => Ok(None),
        }
    }

    /// What the event ring says next that concerns the application.
    #[inline(always)]
    fn look(&mut self) -> Option<Said> {
        if let Some(said) = self.next_ended() {
            return Some(said);
        }
        let mut waiting = match self.received.available(self.memory.event_ring()) {
            Ok(waiting) => waiting,
            Err(jump) => {
                // What was in the ring is written over. A sound engine goes on from here.
                self.anomalies += 1;
                self.received = ConsumerCursor::new(jump.claimed);
                self.received.release(self.memory.event_ring());
                return None;
            }
        };
        while waiting > 0 {
            waiting -= 1;
            let ring = self.memory.event_ring();
            let words = self.received.take(ring);
            self.received.release(ring);
            match Entry::decode(&words) {
                Some(entry) => {
                    let said = self.believe(&entry, &words);
                    if said.is_some() {
                        return said;
                    }
                }
                None => self.anomalies += 1,
            }
        }
        None
    }

    /// The next end that an event told of beside others.
    #[inline(always)]
    fn next_ended(&mut self) -> Option<Said> {
        while let Some(token) = self.more_ended.tokens.next() {
            let said = self.ends(token, self.more_ended.status);
            if said.is_some() {
                return said;
            }
        }
        None
    }

    /// What an entry means, if it agrees with our books.
    #[inline(always)]
    fn believe(&mut self, entry: &Entry, words: &[u64; EVENT_WORDS]) -> Option<Said> {
        match entry.kind {
            EventKind::Received => {
                let is_ours = entry.total >= entry.len
                    && (self.receive_book).holds(entry.slot, entry.generation, entry.len);
                let (Some(priority), true) = (Priority::from_code(entry.priority), is_ours) else {
                    self.anomalies += 1;
                    return None;
                };
                if self.integrity.is_some() {
                    return self.judged(entry, priority);
                }
                self.offers.received(entry);
                Some(Said::Received(*entry, priority))
            }
            EventKind::Sent(outcome) => {
                let status = Status::from_outcome(outcome);
                self.more_ended = MoreEnded {
                    tokens: OtherEnds::of(words),
                    status,
                };
                let first = TokenRef {
                    slot: entry.slot,
                    generation: entry.generation,
                };
                self.ends(first, status).or_else(|| self.next_ended())
            }
            EventKind::Offered(offered) => self.offered(entry, &offered).map(Said::Else),
        }
    }

    /// A message came, with integrity on.
    #[cold]
    fn judged(&mut self, entry: &Entry, priority: Priority) -> Option<Said> {
        let ended = (self.receive_book).end(entry.slot, entry.generation, entry.len);
        let (buffer, provided) = ended?;
        let event = self.judge(entry, priority, buffer, provided);
        self.offers.received(entry);
        event.map(Said::Else)
    }

    /// A slot's use is over: a message's, or something that does not concern the application.
    #[inline(always)]
    fn ends(&mut self, token: TokenRef, status: Status) -> Option<Said> {
        if self.integrity.is_none() && self.send_book.sends(token) {
            return Some(Said::Ended(token, status));
        }
        self.ended(token, status).map(Said::Else)
    }

    /// A slot's use is over.
    #[cold]
    pub(crate) fn ended(&mut self, token: TokenRef, status: Status) -> Option<Event> {
        let TokenRef { slot, generation } = token;
        let event = match self.send_book.end(slot, generation) {
            Some((Use::Send, send)) => {
                if let Some(book) = &mut self.integrity {
                    book.uncover(slot, self.send_book.buffer_mut(slot));
                    book.ended(slot, status);
                }
                let handle = SendHandle::of(token);
                Some(Event::Sent(self.send_book.sent(handle, send, status)))
            }
            Some((Use::Note, _)) => {
                self.note_ended(token, status);
                None
            }
            Some((Use::Command | Use::Answer, _)) => None,
            Some((Use::Free, _)) | None => {
                self.anomalies += 1;
                None
            }
        };
        // A slot may be free.
        self.send_answers();
        event
    }

    /// What was said, as it is handed out: as [`Self::poll`] returns it, so that it is not moved again. There is an event: our books were asked. Answers that wait for a slot do not wait for a message's, of which
    /// there are always enough, but for another answer's or a command's.
    #[inline(always)]
    fn event(&mut self, said: Said) -> Result<Option<Event>, PortError> {
        match said {
            Said::Ended(token, status) => {
                let TokenRef { slot, generation } = token;
                let Some((_, send)) = self.send_book.end(slot, generation) else {
                    return Ok(None);
                };
                let handle = SendHandle::of(token);
                let sent = self.send_book.sent(handle, send, status);
                Ok(Some(Event::Sent(sent)))
            }
            Said::Received(entry, priority) => {
                let ended = (self.receive_book).end(entry.slot, entry.generation, entry.len);
                let Some((buffer, _)) = ended else {
                    return Ok(None);
                };
                Ok(Some(Event::Received(Message {
                    buffer,
                    len: entry.len as usize,
                    total: entry.total as usize,
                    from: Address {
                        node: NodeId(entry.node),
                        port: PortId(entry.port),
                    },
                    priority,
                    tag: entry.tag,
                    verified: false,
                })))
            }
            Said::Else(event) => Ok(Some(event)),
        }
    }

    /// Hands out what was under way, one by one; at last the reason itself.
    fn next_ending(&mut self, error: PortError) -> Result<Event, PortError> {
        // A closed port's engine has let go of the memory; one whose supervisor died may still be at work on it.
        let engine_let_go = matches!(error, PortError::Closed(_));
        let reason = if engine_let_go {
            Reason::OwnPortClosed
        } else {
            Reason::DaemonGone
        };
        if let Some((handle, send)) = self.send_book.end_any() {
            let slot = handle.token().slot;
            if !engine_let_go && let Some(buffer) = self.send_book.take_buffer(slot) {
                buffer.abandon();
            }
            if let Some(book) = &self.integrity {
                book.uncover(slot, self.send_book.buffer_mut(slot));
            }
            let status = Status::MaybeDelivered(reason);
            return Ok(Event::Sent(self.send_book.sent(handle, send, status)));
        }
        while let Some(buffer) = self.receive_book.end_any() {
            if !engine_let_go {
                buffer.abandon();
            }
        }
        self.life = Life::Over(error);
        Err(error)
    }

    /// Is there anything to receive that is not in the backlog?
    pub(crate) fn pending(&self) -> bool {
        if self.life != Life::Open || self.memory.forked() {
            return true;
        }
        let header = self.memory.engine().header();
        self.received
            .available(self.memory.event_ring())
            .is_ok_and(|waiting| waiting > 0)
            || !self.more_ended.tokens.is_empty()
            || header.state.load(Ordering::Acquire) as u32 == state::CLOSED
            || self.has_report()
            || header.faults_recovered.load(Ordering::Relaxed) != self.faults_seen
            || self.alarms.any_due()
    }

    /// Does with an event what is right for an application that does not care about it (GM's `gm_unknown`): a message's buffer is
    /// provided again, an offered one is accepted, a stream held up by a failed send is resumed, anything else needs nothing.
    pub fn unknown(&mut self, event: Event) {
        match event {
            Event::Received(message) => {
                let priority = message.priority();
                // Refused only if the port is gone; then the buffer goes back to the arena.
                let _ = self.provide_receive_buffer(message.into_buffer(), priority);
            }
            Event::Sent(sent) if !sent.status.is_delivered() => {
                // As above; and if no slot is free for the command, the streams' other sends end by their timeouts.
                let _ = self.resume_sending(sent.to, sent.priority);
            }
            Event::Offered(offer) => {
                // As above.
                let _ = self.accept(offer);
            }
            Event::Sent(_) | Event::Alarm(_) | Event::FaultRecovered(_) | Event::Integrity(_) => {}
        }
    }

    /// Has [`Self::dispatch`] call `handler` for each message (GAMMA's active ports). The handler gets the port to answer with; it
    /// owns the message and with it the buffer, to be provided again.
    pub fn on_message(&mut self, handler: impl FnMut(&mut Port, Message) + Send + 'static) {
        self.handler = Some(Box::new(handler));
    }

    /// Calls the handler for the messages that wait, at most once per receive token, and returns the first other event. `None`: nothing
    /// waited, or enough was done for one call.
    pub fn dispatch(&mut self) -> Result<Option<Event>, PortError> {
        let Some(mut handler) = self.handler.take() else {
            return self.receive();
        };
        let mut result = Ok(None);
        for _ in 0..self.memory.client().geometry().receive_tokens {
            match self.receive() {
                Ok(Some(Event::Received(message))) => handler(self, message),
                other => {
                    result = other;
                    break;
                }
            }
        }
        // Unless the handler has set another.
        self.handler.get_or_insert(handler);
        result
    }
}
