//! A port: sending, providing, closing. Commands are in `command.rs`, receiving is in `receive.rs`, waiting in `wait.rs`.

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::doorbell;
use portolan_abi::port::{CloseReason, state};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{
    FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY, FLAG_INLINE, INLINE_BYTES, Opcode, ReceiveToken,
    SEND_SLOT_WORDS, SendToken, TokenRef,
};

use crate::alarm::{AlarmId, Alarms, deadline_ns};
use crate::arena::{Buffer, Memory};
use crate::control::Connection;
use crate::error::{ArenaFull, NodeError, PortError, Refused, SendError, TooManyAlarms};
use crate::event::{Event, Message, SendHandle};
use crate::integrity::{self, SEAL};
use crate::names::{AckMode, Address, NodeId, PortId, Priority};
use crate::node::{PortOptions, unexpected};
use crate::offer::{OfferBook, OfferHandler};
use crate::receive::MoreEnded;
use crate::tokens::{InFlight, ReceiveBook, SendBook, Use};
use crate::wait::Waiting;

/// What may be said about a send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// Its priority.
    pub priority: Priority,
    /// Carried to the receiver beside the bytes.
    pub tag: u64,
    /// When to give up, in microseconds up to 71 minutes; `None` for the daemon's default ([`crate::Node::default_timeout`]).
    pub timeout: Option<Duration>,
    /// When its delivery is acknowledged.
    pub ack: AckMode,
}

/// What became of the sends that were under way when a port was closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// Ended while lingering, delivered.
    pub delivered: u32,
    /// Ended while lingering, not or perhaps not delivered.
    pub failed: u32,
    /// Not ended when the linger was over: perhaps delivered.
    pub unfinished: u32,
}

/// A numbered port, open: send from it, provide buffers to it, receive from it.
///
/// One thread at a time owns a port (`Send`, not `Sync`); it may be moved to another. See the crate's documentation for the contract
/// on threads and fork.
pub struct Port {
    pub(crate) memory: Arc<Memory>,
    pub(crate) connection: Connection,
    pub(crate) events: OwnedFd,
    doorbell: OwnedFd,
    node: NodeId,
    port: PortId,
    default_timeout: Duration,
    pub(crate) wait: Waiting,
    pub(crate) report_faults: bool,

    sends: ProducerCursor,
    provides: ProducerCursor,
    pub(crate) received: ConsumerCursor,
    pub(crate) send_book: SendBook,
    pub(crate) receive_book: ReceiveBook,
    pub(crate) more_ended: MoreEnded,
    /// Events that came while waiting for a particular one.
    pub(crate) backlog: VecDeque<Event>,
    pub(crate) alarms: Alarms,
    pub(crate) life: Life,
    /// `waiting` is set in shared memory and the doorbell may have rung.
    pub(crate) armed: bool,
    pub(crate) faults_seen: u32,
    pub(crate) anomalies: u64,
    pub(crate) handler: Option<Handler>,
    pub(crate) offers: OfferBook,
    pub(crate) offer_handler: Option<OfferHandler>,
    /// End-to-end integrity, if it was asked for.
    pub(crate) integrity: Option<Box<integrity::Book>>,
    not_sync: PhantomData<Cell<()>>,
}

/// Called for each message by [`Port::dispatch`].
pub(crate) type Handler = Box<dyn FnMut(&mut Port, Message) + Send>;

/// Where a message goes: slot and, with integrity, stream are chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) to: Address,
    pub(crate) slot: TokenRef,
    pub(crate) stream: u32,
}

/// From open to over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// In use.
    Open,
    /// No more: the sends that were under way are being handed out.
    Ending(PortError),
    /// Nothing is left.
    Over(PortError),
}

/// What opening a port yielded, verified.
pub(crate) struct Opened {
    pub(crate) memory: Memory,
    pub(crate) connection: Connection,
    pub(crate) events: OwnedFd,
    pub(crate) doorbell: OwnedFd,
    pub(crate) node: NodeId,
    pub(crate) port: PortId,
    pub(crate) default_timeout: Duration,
    /// A random number, if integrity was asked for.
    pub(crate) integrity_id: u64,
}

impl Port {
    pub(crate) fn new(opened: Opened, options: &PortOptions) -> Self {
        let geometry = opened.memory.client().geometry();
        let faults_seen = opened
            .memory
            .engine()
            .header()
            .faults_recovered
            .load(Ordering::Relaxed);
        // Before the first buffer is provided, so that no message is taken unasked.
        options.announce(opened.memory.client().header());
        let notes = options.notes();
        let integrity = options.integrity.map(|wanted| {
            let own = Address {
                node: opened.node,
                port: opened.port,
            };
            let timeout = u64::try_from(opened.default_timeout.as_nanos()).unwrap_or(u64::MAX);
            Box::new(integrity::Book::new(
                own,
                opened.integrity_id,
                wanted,
                geometry.send_tokens,
                timeout,
            ))
        });
        Self {
            memory: Arc::new(opened.memory),
            connection: opened.connection,
            events: opened.events,
            doorbell: opened.doorbell,
            node: opened.node,
            port: opened.port,
            default_timeout: opened.default_timeout,
            wait: Waiting::new(options.wait),
            report_faults: options.report_faults,
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            received: ConsumerCursor::new(0),
            send_book: SendBook::new(geometry.send_tokens, options.send_tokens, notes),
            receive_book: ReceiveBook::new(geometry.receive_tokens, notes),
            more_ended: MoreEnded::default(),
            backlog: VecDeque::with_capacity(geometry.event_capacity() as usize),
            alarms: Alarms::new(),
            life: Life::Open,
            armed: false,
            faults_seen,
            anomalies: 0,
            handler: None,
            offers: OfferBook::default(),
            offer_handler: None,
            integrity,
            not_sync: PhantomData,
        }
    }

    /// This port's own address.
    pub fn address(&self) -> Address {
        Address {
            node: self.node,
            port: self.port,
        }
    }

    /// Messages that can be sent before a send must end.
    pub fn send_tokens(&self) -> u32 {
        self.send_book.available()
    }

    /// Buffers that can be provided before one must come back.
    pub fn receive_tokens(&self) -> u32 {
        self.receive_book.available()
    }

    /// Sends under way.
    pub fn sends_outstanding(&self) -> u32 {
        self.send_book.out()
    }

    /// Buffers provided and not yet used by a message.
    pub fn buffers_provided(&self) -> u32 {
        self.receive_book.out()
    }

    /// Is this send still under way? `false` once its end was received.
    pub fn is_outstanding(&self, handle: SendHandle) -> bool {
        self.send_book.holds(handle)
    }

    /// Events the engine sent that did not fit this port's own books, and were ignored, and tokens that an engine lost when it died
    /// ([`Reason::Lost`](crate::Reason::Lost)). 0 unless something is badly wrong.
    pub fn anomalies(&self) -> u64 {
        self.anomalies
    }

    /// How often an engine took over this port after a fault.
    pub fn faults_recovered(&self) -> u32 {
        self.memory
            .engine()
            .header()
            .faults_recovered
            .load(Ordering::Relaxed)
    }

    /// The timeout a send gets that names none.
    pub fn default_timeout(&self) -> Duration {
        self.default_timeout
    }

    /// A buffer of `len` bytes in this port's arena, 64-byte aligned, its content arbitrary.
    pub fn allocate(&self, len: usize) -> Result<Buffer, ArenaFull> {
        if self.memory.forked() {
            return Err(ArenaFull {
                wanted: len,
                free: 0,
                largest: 0,
            });
        }
        self.memory.allocate(len)
    }

    // ---- sending ----

    /// Sends the first `len` bytes of `buffer` without copying them. The buffer comes back with [`Event::Sent`].
    pub fn send(
        &mut self,
        to: impl Into<Address>,
        buffer: Buffer,
        len: usize,
        options: SendOptions,
    ) -> Result<SendHandle, Refused> {
        match self.check_send(to.into(), options.priority, &buffer, len) {
            Ok(way) => Ok(self.push_send(way, len as u32, Some(buffer), &[], options)),
            Err(error) => Err(Refused { error, buffer }),
        }
    }

    fn check_send(
        &mut self,
        to: Address,
        priority: Priority,
        buffer: &Buffer,
        len: usize,
    ) -> Result<Way, SendError> {
        self.usable()?;
        if !buffer.belongs_to(&self.memory) {
            return Err(SendError::ForeignBuffer);
        }
        if len > buffer.len() {
            return Err(SendError::TooLong {
                len,
                buffer: buffer.len(),
            });
        }
        self.way(to, priority)
    }

    #[inline(always)]
    fn way(&mut self, to: Address, priority: Priority) -> Result<Way, SendError> {
        if !to.is_valid() {
            return Err(SendError::BadAddress);
        }
        let slot = self.send_book.next(false).ok_or(SendError::NoToken)?;
        let stream = match &mut self.integrity {
            Some(book) => book.may_send(to, priority).ok_or(SendError::NoToken)?,
            None => 0,
        };
        Ok(Way { to, slot, stream })
    }

    /// Sends a copy of `bytes`: inside the token if there are at most 80 (48 with [`PortOptions::integrity`]), else through the arena.
    #[inline]
    pub fn send_bytes(
        &mut self,
        to: impl Into<Address>,
        bytes: &[u8],
        options: SendOptions,
    ) -> Result<SendHandle, SendError> {
        self.usable()?;
        let way = self.way(to.into(), options.priority)?;
        let seal = if self.integrity.is_some() { SEAL } else { 0 };
        if bytes.len() + seal <= INLINE_BYTES {
            return Ok(self.push_send(way, bytes.len() as u32, None, bytes, options));
        }
        let mut copy = self.memory.allocate(bytes.len())?;
        copy.copy_from_slice(bytes);
        let len = copy.len() as u32;
        Ok(self.push_send(way, len, Some(copy), bytes, options))
    }

    /// Writes and publishes a send. `bytes` is what was copied, if anything was: into the slot without a buffer, else into it.
    #[inline(always)]
    fn push_send(
        &mut self,
        way: Way,
        len: u32,
        buffer: Option<Buffer>,
        bytes: &[u8],
        options: SendOptions,
    ) -> SendHandle {
        if self.integrity.is_some() {
            return self.push_sealed(way, len, buffer, bytes, options);
        }
        let copied = buffer.is_some() && !bytes.is_empty();
        let inline = if buffer.is_none() { bytes } else { &[] };
        self.publish(way, len, buffer, copied, inline, options)
    }

    /// As [`Self::push_send`], of bytes as they are to travel.
    #[inline(always)]
    pub(crate) fn publish(
        &mut self,
        way: Way,
        len: u32,
        buffer: Option<Buffer>,
        copied: bool,
        inline: &[u8],
        options: SendOptions,
    ) -> SendHandle {
        let Way { to, slot, .. } = way;
        let ack = match options.ack {
            AckMode::Policy => 0,
            AckMode::Immediate => FLAG_ACK_IMMEDIATE,
            AckMode::Lazy => FLAG_ACK_LAZY,
        };
        let token = SendToken {
            generation: slot.generation,
            opcode: Opcode::Send,
            priority: options.priority.code(),
            flags: ack | if buffer.is_none() { FLAG_INLINE } else { 0 },
            node: to.node.0,
            port: to.port.0,
            len,
            arena_offset: buffer.as_ref().map_or(0, Buffer::offset),
            tag: options.tag,
            timeout_us: options.timeout.map_or(0, timeout_us),
        };
        let send = InFlight::new(to, options.priority, options.tag);
        self.write_token(slot, &token, inline);
        let given_at = self.sends.next();
        self.send_book
            .fill_send(slot, given_at, send, buffer, copied);
        self.hand_over(slot);
        SendHandle::of(slot)
    }

    /// Writes and publishes what is no message of the application.
    pub(crate) fn push_token(
        &mut self,
        slot: TokenRef,
        token: &SendToken,
        inline: &[u8],
        used: Use,
    ) {
        self.write_token(slot, token, inline);
        self.send_book.fill(slot, self.sends.next(), used);
        self.hand_over(slot);
    }

    #[inline(always)]
    fn write_token(&self, slot: TokenRef, token: &SendToken, inline: &[u8]) {
        let words: &[AtomicU64; SEND_SLOT_WORDS] =
            &self.memory.client().send_slots()[slot.slot as usize];
        token.store(words, inline);
    }

    /// Publishes a token that is written and in the book.
    #[inline(always)]
    fn hand_over(&mut self, slot: TokenRef) {
        // There is room: as many entries as slots, and the slot was free.
        let ring = self.memory.send_ring();
        self.sends.stage(ring, &[slot.encode()]);
        self.sends.publish(ring);
        self.ring_doorbell();
    }

    // ---- providing ----

    /// Offers a whole buffer for a message sent at `priority`. A message takes the smallest offered size class that holds it. The buffer
    /// comes back with [`Event::Received`].
    pub fn provide_receive_buffer(
        &mut self,
        buffer: Buffer,
        priority: Priority,
    ) -> Result<(), Refused> {
        let slot = match self.check_provide(&buffer) {
            Ok(slot) => slot,
            Err(error) => return Err(Refused { error, buffer }),
        };
        let token = ReceiveToken {
            generation: slot.generation,
            priority: priority.code(),
            arena_offset: buffer.offset(),
            len: buffer.token_len(),
        };
        token.store(&self.memory.client().receive_slots()[slot.slot as usize]);
        self.receive_book
            .fill(slot, self.provides.next(), buffer, priority);
        // There is room: as many entries as slots, and the slot was free.
        let ring = self.memory.provide_ring();
        self.provides.stage(ring, &[slot.encode()]);
        self.provides.publish(ring);
        self.ring_doorbell();
        Ok(())
    }

    fn check_provide(&self, buffer: &Buffer) -> Result<TokenRef, SendError> {
        self.usable()?;
        if !buffer.belongs_to(&self.memory) {
            return Err(SendError::ForeignBuffer);
        }
        self.receive_book.next().ok_or(SendError::NoToken)
    }

    // ---- alarms ----

    /// Sets an alarm, received as [`Event::Alarm`] once `after` has passed.
    pub fn set_alarm(&mut self, after: Duration) -> Result<AlarmId, TooManyAlarms> {
        self.alarms.set(deadline_ns(after))
    }

    /// Cancels an alarm. `false` if it has gone off already.
    pub fn cancel_alarm(&mut self, alarm: AlarmId) -> bool {
        self.alarms.cancel(alarm)
    }

    // ---- closing ----

    /// Waits up to `linger` for the sends under way, then closes the port. When this returns its number is free again. Events that
    /// come meanwhile are dropped. Dropping a port closes it without linger, a moment later.
    pub fn close(mut self, linger: Duration) -> Result<Closed, NodeError> {
        let mut closed = Closed::default();
        let deadline = deadline_ns(linger);
        if let Some(book) = &mut self.integrity {
            // What came must not be taken for lost.
            book.owe_all();
            self.post_notes();
        }
        while (self.send_book.out() > 0 || self.receipts_out())
            && matches!(self.wait_until(deadline), Ok(true))
        {
            match self.receive() {
                Ok(Some(Event::Sent(sent))) if sent.status.is_delivered() => closed.delivered += 1,
                Ok(Some(Event::Sent(_))) => closed.failed += 1,
                Ok(_) => {}
                Err(_) => break,
            }
        }
        closed.unfinished = self.send_book.out();
        if self.memory.forked() || self.life != Life::Open {
            return Ok(closed);
        }
        let request = Request::ClosePort { port: self.port.0 };
        match self.connection.request(&request) {
            Ok((Response::Done, _)) => Ok(closed),
            Ok((other, _)) => Err(unexpected("ClosePort", &other)),
            // Closed meanwhile, for another reason.
            Err(NodeError::Refused {
                code: ErrorCode::NotFound,
                ..
            }) => Ok(closed),
            Err(error) => Err(error),
        }
    }

    // ---- what all share ----

    /// Can it be used at all?
    pub(crate) fn usable(&self) -> Result<(), PortError> {
        if self.memory.forked() {
            return Err(PortError::Forked);
        }
        if let Life::Ending(error) | Life::Over(error) = self.life {
            return Err(error);
        }
        let word = self.memory.engine().header().state.load(Ordering::Acquire);
        match word as u32 {
            state::CLOSING | state::CLOSED => Err(PortError::Closed(close_reason(word))),
            _ => Ok(()),
        }
    }

    /// Whether the engine took all that it was given.
    pub(crate) fn all_taken(&self) -> bool {
        let header = self.memory.engine().header();
        header.send_consumer.load(Ordering::Relaxed) == self.sends.next()
            && header.provide_consumer.load(Ordering::Relaxed) == self.provides.next()
    }

    /// Wakes the engine if it sleeps. After publishing.
    pub(crate) fn ring_doorbell(&self) {
        if doorbell::must_ring(&self.memory.engine().header().engine_sleeping) {
            // It can only fail because the doorbell has been rung 2⁶⁴ − 2 times unheard: then it rings already.
            let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
        }
    }
}

/// From a state word.
pub(crate) fn close_reason(word: u64) -> CloseReason {
    CloseReason::from_code((word >> 32) as u32).unwrap_or(CloseReason::Administrator)
}

/// For a token: 0 means the default, so the shortest timeout is 1 µs.
fn timeout_us(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_micros())
        .unwrap_or(u32::MAX)
        .max(1)
}
