//! [`Host`] over shared memory: what the transport asks for, the engine does to ports and ledger.
//!
//! The transport names tokens by slot and generation; a name that is stale (the port closed, the slot was reused) does nothing.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Ends, Outcome};
use portolan_abi::ledger::working_token;
use portolan_abi::port::CloseReason;
use portolan_abi::token::{AnswerToken, Opcode, SendToken, TokenRef};
use portolan_transport::host::{
    Delivery, Host, MemoryFault, NoBuffer, Offer, SendRequest, SendStatus, TableFull, Verdict,
};
use portolan_transport::ident::{
    BufferId, Nanos, NodeId, Peer, PortId, Priority, RecordId, SendId, StreamKey,
};

use super::commit;
use super::commit_point::{Point, store};
use super::latency::Latencies;
use super::ledger_facts::{Facts, stream_of};
use super::port_table::PortTable;
use super::ports::{Port, Taken};
use super::questions::Questions;
use super::suspect::Suspect;

/// The engine's ports and ledger.
pub struct EngineHost {
    /// The ports served.
    pub ports: PortTable,
    /// The ledger's tables.
    pub facts: Facts,
    /// Messages the applications were asked about.
    pub offers: u64,
    /// The node takes no new sends.
    pub draining: bool,
    /// When this round of the duty cycle began, or went on after an application had had the core.
    pub now: Nanos,
    /// How long sends took.
    pub latencies: Latencies,
    /// An application was given a message, or the end of a send, in this round.
    pub delivered: bool,
    /// Takes each token by itself.
    #[cfg(test)]
    pub one_by_one: bool,
    /// Tokens taken in one go with others.
    #[cfg(test)]
    pub in_one_go: u64,
    /// The token the last engine died of.
    suspect: Suspect,
    /// A deadline for sends that name none, nanoseconds.
    default_timeout: u64,
    /// The core this engine is bound to.
    pub core: Option<usize>,
}

/// What to do with a send token.
pub(super) enum Order {
    /// Submit this.
    Send(SendRequest),
    /// GM's `resume_sending`: slot and generation to complete, and the stream.
    Resume(SendId, StreamKey),
    /// GM's `drop_sends`.
    Drop(SendId, StreamKey),
    /// Give up the second send, which is of this stream; `None` if it has ended.
    Cancel(SendId, Option<(SendId, StreamKey)>),
    /// What the application wants of an offered message.
    Answer(SendId, AnswerToken),
    /// The token made no sense and is to end so.
    Refuse(SendId),
}

impl EngineHost {
    /// Over a ledger that was taken over.
    pub fn new(facts: Facts, default_timeout_ms: u64) -> Self {
        Self {
            ports: PortTable::default(),
            #[cfg(test)]
            one_by_one: false,
            #[cfg(test)]
            in_one_go: 0,
            suspect: Suspect::default(),
            latencies: Latencies::adopt(facts.ledger()),
            delivered: false,
            facts,
            offers: 0,
            draining: false,
            now: 0,
            default_timeout: default_timeout_ms.saturating_mul(1_000_000),
            core: None,
        }
    }

    /// Takes what the last engine was working on for what it died of.
    pub(super) fn suspect_last_token(&mut self) {
        let word = &self.facts.ledger().header().working_token;
        self.suspect = Suspect::found(word.load(Ordering::Acquire));
    }

    /// Maps a port whose ledger facts, if there are any, belong to an earlier generation, and opens it.
    #[cfg(any(test, feature = "conversation"))]
    pub(super) fn open_fresh(&mut self, parts: super::ports::PortParts) -> std::io::Result<()> {
        self.open_mapped(Port::map(parts)?);
        Ok(())
    }

    /// Opens a mapped port whose ledger facts, if there are any, belong to an earlier generation.
    pub(super) fn open_mapped(&mut self, port: Port) {
        let number = port.number();
        let ledger = self.facts.ledger();
        // What an earlier generation left behind. The slots of this one start from generation 0 again.
        for fact in ledger.sends(number) {
            if fact.tag.load(Ordering::Relaxed) != 0 {
                store(Point::OpenClearSend, &fact.tag, 0);
            }
        }
        for fact in ledger.receives(number) {
            if fact.load(Ordering::Relaxed) != 0 {
                store(Point::OpenClearReceive, fact, 0);
            }
        }
        // From here on the ledger speaks of this generation.
        commit::settle(Point::OpenSettled, ledger, &port);
        port.open(self.core);
        self.ports.insert(port);
    }

    /// Does the ledger know this generation of the port?
    pub(super) fn knows(&self, port: u16, generation: u32) -> bool {
        self.facts
            .ledger()
            .ports()
            .get(usize::from(port))
            .is_some_and(|fact| {
                (fact.events_settled.load(Ordering::Acquire) >> 32) as u32 == generation
            })
    }

    /// Takes the next entry of a port's send ring, which is not empty. `None`: the port has failed. Until [`Self::finish_token`], the
    /// ledger names the token as being worked on.
    #[inline]
    pub(super) fn take_token(&mut self, port: u16) -> Option<Taken> {
        let ledger = self.facts.ledger();
        let taken = self.ports.get_mut(port)?.take_send(ledger, self.now)?;
        let (slot, generation) = match &taken {
            Taken::Token(slot, token) => (*slot, token.generation),
            Taken::Refused(slot, generation) => (*slot, *generation),
        };
        self.note_working(port, slot, generation)?;
        Some(taken)
    }

    /// The send that a token asks for.
    #[inline]
    pub(super) fn request(
        &self,
        port: u16,
        slot: u32,
        token: &SendToken,
        now: Nanos,
    ) -> SendRequest {
        SendRequest {
            id: send_id(port, slot, token.generation),
            stream: stream_key(port, token),
            len: token.len,
            tag: token.tag,
            deadline: now.saturating_add(match token.timeout_us {
                0 => self.default_timeout,
                us => u64::from(us) * 1_000,
            }),
            ack: commit::ack_mode(token),
        }
    }

    /// What a token asks for, whatever it is.
    #[cold]
    pub(super) fn order(&self, port: u16, taken: &Taken, now: Nanos) -> Order {
        let (slot, token) = match taken {
            Taken::Token(slot, token) => (*slot, token),
            Taken::Refused(slot, generation) => {
                return Order::Refuse(send_id(port, *slot, *generation));
            }
        };
        let id = send_id(port, slot, token.generation);
        match token.opcode {
            Opcode::Send => Order::Send(self.request(port, slot, token, now)),
            Opcode::ResumeSending => Order::Resume(id, stream_key(port, token)),
            Opcode::DropSends => Order::Drop(id, stream_key(port, token)),
            Opcode::Cancel => {
                let (slot, generation) =
                    (token.arena_offset as u32, (token.arena_offset >> 32) as u32);
                Order::Cancel(id, self.send_under_way(port, slot, generation))
            }
            Opcode::Answer => match AnswerToken::of(token) {
                Some(answer) => Order::Answer(id, answer),
                None => Order::Refuse(id),
            },
        }
    }

    /// Takes a token and says what it asks for.
    #[cfg(test)]
    pub(super) fn take_order(&mut self, port: u16, now: Nanos) -> Option<Order> {
        let taken = self.take_token(port)?;
        Some(self.order(port, &taken, now))
    }

    /// A send of the port and its stream, from the ledger's copy: the application only names it.
    fn send_under_way(&self, port: u16, slot: u32, generation: u32) -> Option<(SendId, StreamKey)> {
        let fact = self.facts.ledger().sends(port).get(slot as usize)?;
        let send = commit::accepted(fact).ok()??;
        (send.generation == generation && send.local.is_none()).then_some((
            send_id(port, slot, generation),
            StreamKey {
                local: PortId(port),
                node: NodeId(send.node),
                remote: PortId(send.port),
                priority: priority(send.priority),
            },
        ))
    }

    /// Poison: names the token being worked on. `None`: two engines have died of it, so the port has failed.
    fn note_working(&mut self, port: u16, slot: u32, generation: u32) -> Option<()> {
        if cfg!(feature = "volatile") {
            return Some(());
        }
        let Some(word) = self.suspect.meet(working_token(port, slot, generation)) else {
            self.ports.get_mut(port)?.fail(CloseReason::Poison);
            return None;
        };
        self.facts
            .ledger()
            .header()
            .working_token
            .store(word, Ordering::Release);
        Some(())
    }

    #[cfg(test)]
    pub(super) fn set_suspect(&mut self, suspect: Suspect) {
        self.suspect = suspect;
    }

    /// The token the last engine died of.
    #[inline]
    pub(super) fn suspect(&self) -> Suspect {
        self.suspect
    }

    /// The token taken last is done with.
    #[inline]
    pub(super) fn finish_token(&mut self) {
        if cfg!(feature = "volatile") {
            return;
        }
        self.facts
            .ledger()
            .header()
            .working_token
            .store(0, Ordering::Release);
    }

    /// Accepts and at once completes a token no stream knows of: a command, or a send that was refused.
    #[cold]
    pub(super) fn finish_locally(&mut self, id: SendId, end: Outcome) {
        let ledger = self.facts.ledger();
        if let Some(port) = self.ports.get_mut(id.port.0) {
            commit::accept_local(ledger, port, id.slot, id.generation, end);
            commit::complete(ledger, port, &Ends::one(token_of(id), end));
            port.forget_sending(id.slot);
        }
    }

    /// The questions of the port whose stream has this record.
    fn questions_of(&mut self, record: RecordId) -> Option<&mut Questions> {
        let fact = self.facts.ledger().receive_streams();
        let key = fact.get(record.0 as usize)?.key.load(Ordering::Relaxed);
        let port = self.ports.get_mut(stream_of(key)?.local.0)?;
        Some(&mut port.questions)
    }

    /// Whether a receive token is claimed, for tests.
    #[cfg(test)]
    pub(super) fn port(&mut self, port: u16) -> &mut Port {
        self.ports.get_mut(port).unwrap()
    }
}

#[inline]
pub(super) fn send_id(port: u16, slot: u32, generation: u32) -> SendId {
    SendId {
        port: PortId(port),
        slot,
        generation,
    }
}

/// The token of a send.
#[inline]
fn token_of(send: SendId) -> TokenRef {
    TokenRef {
        slot: send.slot,
        generation: send.generation,
    }
}

/// The stream that a token of this port names.
#[inline]
fn stream_key(port: u16, token: &SendToken) -> StreamKey {
    StreamKey {
        local: PortId(port),
        node: NodeId(token.node),
        remote: PortId(token.port),
        priority: priority(token.priority),
    }
}

#[inline]
pub(super) fn priority(code: u8) -> Priority {
    if code == 0 {
        Priority::Low
    } else {
        Priority::High
    }
}

impl Host for EngineHost {
    #[inline]
    fn accept(&mut self, send: &SendRequest, record: RecordId, epoch: u32, number: u32) {
        let ledger = self.facts.ledger();
        let Some(port) = self.ports.get(send.id.port.0) else {
            return;
        };
        // Noted when the token was taken: read once, so that what is accepted is what was checked.
        if let Some(sending) = port.sending(send.id.slot, send.id.generation) {
            commit::accept(ledger, port, sending, send, record, epoch, number);
        }
    }

    #[inline(always)]
    fn read_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<u32, MemoryFault> {
        let port = self.ports.get(send.port.0).ok_or(MemoryFault)?;
        // Of what was copied: what the client does to its memory now only hurts its own message.
        port.read_payload(send.slot, send.generation, offset, to)
            .ok_or(MemoryFault)
    }

    #[inline(always)]
    fn copy_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), MemoryFault> {
        let port = self.ports.get(send.port.0).ok_or(MemoryFault)?;
        port.copy_payload(send.slot, send.generation, offset, to)
            .ok_or(MemoryFault)
    }

    #[inline]
    fn complete(&mut self, send: SendId, status: SendStatus) {
        if status == SendStatus::Delivered {
            return self.complete_delivered(send.port, std::iter::once(send));
        }
        let ledger = self.facts.ledger();
        let Some(port) = self.ports.get_mut(send.port.0) else {
            return;
        };
        if port.sending(send.slot, send.generation).is_some() {
            let end = commit::outcome(status);
            commit::complete(ledger, port, &Ends::one(token_of(send), end));
            port.forget_sending(send.slot);
            self.delivered = true;
        }
    }

    #[inline]
    fn complete_delivered(&mut self, port: PortId, sends: impl Iterator<Item = SendId>) {
        let ledger = self.facts.ledger();
        let Some(port) = self.ports.get_mut(port.0) else {
            return;
        };
        let room = port.ends_per_event();
        let mut ends = Ends::new(commit::DONE);
        for send in sends {
            let Some(sending) = port.sending(send.slot, send.generation) else {
                continue;
            };
            if sending.taken_at > 0 {
                let took = self.now.saturating_sub(sending.taken_at);
                self.latencies.observe(took);
            }
            port.forget_sending(send.slot);
            self.delivered = true;
            ends.push(token_of(send));
            if ends.len() == room {
                commit::complete(ledger, port, &ends);
                ends = Ends::new(commit::DONE);
            }
        }
        if !ends.is_empty() {
            commit::complete(ledger, port, &ends);
        }
    }

    #[inline]
    fn wants_offers(&self, port: PortId) -> bool {
        self.ports.get(port.0).is_some_and(Port::wants_offers)
    }

    fn offer(&mut self, offer: &Offer<'_>) -> Verdict {
        let ledger = self.facts.ledger();
        // A port that is gone has no wishes; the claim that follows says that it is gone.
        let asks = |port: &&mut Port| port.fault().is_none() && port.asks_first(offer.total);
        let Some(port) = self.ports.get_mut(offer.stream.local.0).filter(asks) else {
            return Verdict::Accept;
        };
        let fact = ledger.receive_streams().get(offer.record.0 as usize);
        let incarnation = fact.map_or(0, |fact| fact.incarnation.load(Ordering::Relaxed) as u32);
        if let Some(verdict) = port.questions.verdict(offer, incarnation) {
            return verdict;
        }
        let read = port.events_read();
        if port.questions.has_room(read) {
            let index = port.events_published();
            let event = port.questions.open(offer, incarnation, index);
            commit::ask(ledger, port, &event);
            self.offers += 1;
        }
        Verdict::Undecided
    }

    #[inline]
    fn claim(&mut self, port: PortId, priority: Priority, len: u32) -> Result<BufferId, NoBuffer> {
        let served = self.ports.get_mut(port.0).ok_or(NoBuffer::PortClosed)?;
        if served.fault().is_some() {
            return Err(NoBuffer::PortClosed);
        }
        if u64::from(len) > served.geometry().arena_bytes {
            return Err(NoBuffer::TooLong);
        }
        let (slot, generation) = served
            .buffers
            .claim(priority, len)
            .ok_or(NoBuffer::NotNow)?;
        Ok(BufferId {
            port,
            slot,
            generation,
        })
    }

    fn release(&mut self, buffer: BufferId) {
        if let Some(port) = self.ports.get_mut(buffer.port.0) {
            port.buffers.release(buffer.slot, buffer.generation);
        }
    }

    #[inline]
    fn write_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<u32, MemoryFault> {
        let port = self.ports.get_mut(buffer.port.0).ok_or(MemoryFault)?;
        port.write_payload(buffer.slot, buffer.generation, offset, from)
            .ok_or(MemoryFault)
    }

    #[inline]
    fn place_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<(), MemoryFault> {
        let port = self.ports.get_mut(buffer.port.0).ok_or(MemoryFault)?;
        port.place_payload(buffer.slot, buffer.generation, offset, from)
            .ok_or(MemoryFault)
    }

    #[inline]
    fn commit(&mut self, delivery: &Delivery) -> Result<(), MemoryFault> {
        let ledger = self.facts.ledger();
        let buffer = delivery.buffer;
        let port = self.ports.get_mut(buffer.port.0).ok_or(MemoryFault)?;
        if port.fault().is_some() || !port.buffers.consume(buffer.slot, buffer.generation) {
            return Err(MemoryFault);
        }
        commit::commit(ledger, port, delivery);
        self.delivered = true;
        port.questions.committed(delivery.record, delivery.number);
        Ok(())
    }

    fn commit_base(&mut self, record: RecordId, _epoch: u32, base: u32, bits: u32) {
        commit::commit_base(Point::GiveUpBase, self.facts.ledger(), record, base, bits);
        if let Some(questions) = self.questions_of(record) {
            questions.passed(record, base);
        }
    }

    fn draw_epoch(&mut self, leave_out: u32) -> u32 {
        self.facts.draw_epoch(leave_out)
    }

    fn open_send_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        next: u32,
    ) -> Result<RecordId, TableFull> {
        self.facts.open_send(stream, incarnation, epoch, next)
    }

    fn free_send_record(&mut self, record: RecordId) {
        self.facts.free_send(record);
    }

    fn open_receive_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        base: u32,
    ) -> Result<RecordId, TableFull> {
        let instance = self.ports.get(stream.local.0).map_or(0, Port::generation);
        self.facts
            .open_receive(stream, incarnation, instance, epoch, base)
    }

    fn free_receive_record(&mut self, record: RecordId) {
        if let Some(questions) = self.questions_of(record) {
            questions.ended(record);
        }
        self.facts.free_receive(record);
    }

    fn load_peer(&self, peer: Peer) -> Option<(u64, u32)> {
        self.facts.load_peer(peer)
    }

    fn store_peer(&mut self, peer: Peer, incarnation: u64, floor: u32) -> Result<(), TableFull> {
        self.facts.store_peer(peer, incarnation, floor)
    }
}
