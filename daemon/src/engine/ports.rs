//! The ports an engine serves: mapped halves, cursors, tokens under way.
//!
//! Everything in a client half is hostile. Ring entries and slots are read once into private copies and checked
//! ([`portolan_abi::token::Untrusted`]); indices that jump, entries that name no slot, or slots that contradict their entry close the
//! port with a named reason, because nothing after them can be believed. A send token whose *content* makes no sense only fails itself:
//! it ends with `NotDelivered(BAD_TOKEN)`. A receive token that makes no sense closes the port: there is no event that could say so.
//!
//! Holes punched in a client half read as zeros, thus as generation 0, thus as bad tokens. Out of scope: a SIGBUS because the machine
//! has no page left for a hole the engine writes to.
//!
//! Work per port and call is bounded by [`TOKENS_PER_TURN`], so that no client can starve another.

mod sends;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use portolan_abi::PORTS;
use portolan_abi::doorbell::{self, Sleeper};
use portolan_abi::event::{ENDS, EVENT_WORDS, Event, EventKind};
use portolan_abi::ledger::Ledger;
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::{CloseReason, PortGeometry, READS_ENDS, state};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor, SharedRing};
use portolan_abi::token::{SendToken, TokenRef, Untrusted};
use portolan_transport::ident::Nanos;

use super::buffers::Buffers;
use super::checked_copy;
use super::commit;
use super::commit_point::{Point, crash_point};
use super::inventory::Held;
use super::questions::Questions;

/// Tokens taken from a ring of a port before the next port has its turn. Messages of 64 bytes without tags of their own fill four frames of 1,472 bytes
/// then, which leave with one kick: what does not fill its frames costs the kernel's way of one more. With half of that 5 % fewer pass in a second; with
/// twice that as many, and the other node waits longer for the first.
pub const TOKENS_PER_TURN: u32 = 84;

/// A send in the engine's hands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sending {
    /// 0: the slot is the application's.
    pub generation: u32,
    pub inline: bool,
    pub len: u32,
    pub arena_offset: u64,
    /// When its token was taken; 0: by a predecessor.
    pub taken_at: Nanos,
}

/// Occasions on which an application that slept once is expected to sleep again.
const SLEEPY: u8 = 4;

const IDLE: Sending = Sending {
    generation: 0,
    inline: false,
    len: 0,
    arena_offset: 0,
    taken_at: 0,
};

/// What the next entry of a send ring turned out to be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Taken {
    /// A token that makes sense, in this slot.
    Token(u32, SendToken),
    /// Slot and generation of a token whose content makes no sense.
    Refused(u32, u32),
}

/// What a port is made of; descriptors as the supervisor sent them.
pub struct PortParts {
    /// Its number.
    pub port: u16,
    /// Its generation.
    pub generation: u32,
    /// Its layout.
    pub geometry: PortGeometry,
    /// Client half.
    pub client: OwnedFd,
    /// Engine half.
    pub engine: OwnedFd,
    /// Engine → application.
    pub event_bell: OwnedFd,
    /// Application → engine.
    pub engine_bell: OwnedFd,
}

/// A port being served.
pub struct Port {
    number: u16,
    generation: u32,
    geometry: PortGeometry,
    pub(super) client: ClientHalf,
    engine: EngineHalf,
    event_bell: OwnedFd,
    engine_bell: OwnedFd,
    send_cursor: ConsumerCursor,
    provide_cursor: ConsumerCursor,
    event_cursor: ProducerCursor,
    pub(super) sends: Vec<Sending>,
    pub(super) buffers: Buffers,
    pub(super) questions: Questions,
    /// Events were published since the doorbell was last considered.
    dirty: bool,
    /// It slept at one of the last so many occasions.
    sleepy: u8,
    /// The port is to be closed for this reason as soon as nobody works on it.
    fault: Option<CloseReason>,
}

impl Port {
    /// Maps a port's memory. The cursors go on at the published indices; the tables are empty ([`super::restore`] fills them).
    pub fn map(parts: PortParts) -> io::Result<Self> {
        if parts.port >= PORTS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no such port"));
        }
        let client = ClientHalf::map(parts.client.as_fd(), parts.geometry)?;
        let engine = EngineHalf::map(parts.engine.as_fd(), parts.geometry, true)?;
        if !engine.is_valid() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the engine half is none of this version and geometry",
            ));
        }
        let port = Self {
            number: parts.port,
            generation: parts.generation,
            geometry: parts.geometry,
            send_cursor: ConsumerCursor::new(client.send_ring(&engine).consumed()),
            provide_cursor: ConsumerCursor::new(client.provide_ring(&engine).consumed()),
            event_cursor: ProducerCursor::new(engine.event_ring(&client).published()),
            sends: vec![IDLE; parts.geometry.send_tokens as usize],
            buffers: Buffers::new(parts.geometry.receive_tokens),
            questions: Questions::default(),
            client,
            engine,
            event_bell: parts.event_bell,
            engine_bell: parts.engine_bell,
            dirty: false,
            sleepy: 0,
            fault: None,
        };
        Ok(port)
    }

    /// Goes on at the indices of the engine that has died since the memory was mapped.
    pub(super) fn go_on(&mut self) {
        self.send_cursor = ConsumerCursor::new(self.send_ring().consumed());
        self.provide_cursor = ConsumerCursor::new(self.provide_ring().consumed());
        self.event_cursor = ProducerCursor::new(self.event_ring().published());
    }

    /// Whether an engine ever took or gave anything here.
    pub(super) fn was_served(&self) -> bool {
        let indices = [
            self.send_ring().consumed(),
            self.provide_ring().consumed(),
            self.event_ring().published(),
        ];
        indices.into_iter().any(|index| index != 0)
    }

    /// Loads a word of every page of both halves but of the arena, and adds them up.
    pub(super) fn touch(&self) -> u64 {
        self.client.touch_tables() ^ self.engine.touch()
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Its generation.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Its layout.
    pub fn geometry(&self) -> PortGeometry {
        self.geometry
    }

    /// The application's doorbell for us, for epoll. It is never read: with edge-triggered epoll each ring is a wake-up, and a
    /// read could block if the application made the shared descriptor blocking.
    pub fn engine_bell(&self) -> BorrowedFd<'_> {
        self.engine_bell.as_fd()
    }

    fn send_ring(&self) -> SharedRing<'_, 1> {
        self.client.send_ring(&self.engine)
    }

    fn provide_ring(&self) -> SharedRing<'_, 1> {
        self.client.provide_ring(&self.engine)
    }

    pub(super) fn event_ring(&self) -> SharedRing<'_, EVENT_WORDS> {
        self.engine.event_ring(&self.client)
    }

    /// Why it is to be closed, if it is.
    pub fn fault(&self) -> Option<CloseReason> {
        self.fault
    }

    /// Closes it for cause as soon as nobody works on it; the first reason stays.
    #[cold]
    pub(super) fn fail(&mut self, reason: CloseReason) {
        self.fault.get_or_insert(reason);
    }

    // ---- sends under way ----

    /// The send in a slot, if it is of this generation.
    pub(super) fn sending(&self, slot: u32, generation: u32) -> Option<&Sending> {
        self.sends
            .get(slot as usize)
            .filter(|sending| sending.generation == generation && generation != 0)
    }

    /// The slot is the application's again.
    pub(super) fn forget_sending(&mut self, slot: u32) {
        if let Some(sending) = self.sends.get_mut(slot as usize) {
            sending.generation = 0;
        }
    }

    /// Where `len` bytes of a send's payload are. `None` if there is no such payload.
    #[inline(always)]
    fn payload(&self, slot: u32, generation: u32, at: u32, len: usize) -> Option<NonNull<u8>> {
        let sending = self.sending(slot, generation)?;
        if u64::from(at) + len as u64 > u64::from(sending.len) {
            return None;
        }
        match sending.inline {
            true => self.client.inline_range(slot, at, len),
            false => (self.client).arena_range(sending.arena_offset + u64::from(at), len),
        }
    }

    /// Copies payload of a send and returns its CRC32C. `None` if there is no such payload.
    #[inline(always)]
    pub(super) fn read_payload(
        &self,
        slot: u32,
        generation: u32,
        offset: u32,
        to: &mut [u8],
    ) -> Option<u32> {
        let from = self.payload(slot, generation, offset, to.len())?;
        // SAFETY: a range of the mapped half; `to` is ours alone.
        Some(unsafe { checked_copy::copy_out(from, to) })
    }

    /// The same without the checksum.
    #[inline(always)]
    pub(super) fn copy_payload(
        &self,
        slot: u32,
        generation: u32,
        offset: u32,
        to: &mut [u8],
    ) -> Option<()> {
        let from = self.payload(slot, generation, offset, to.len())?;
        // SAFETY: as above.
        unsafe { checked_copy::plain_out(from, to) };
        Some(())
    }

    // ---- receive tokens ----

    /// Takes up to a turn's worth of receive tokens; returns how many came.
    pub(super) fn take_provided(&mut self, ledger: Ledger<'_>) -> u32 {
        let waiting = match self.provide_cursor.available(self.provide_ring()) {
            Ok(available) => available.min(TOKENS_PER_TURN),
            Err(_) => {
                self.fail(CloseReason::RingJump);
                return 0;
            }
        };
        if waiting == 0 {
            return 0;
        }
        for _ in 0..waiting {
            let ring = self.client.provide_ring(&self.engine);
            let entry = TokenRef::decode(self.provide_cursor.take(ring)[0]);
            if !self.offer(entry) {
                self.fail(CloseReason::BadToken);
                return 0;
            }
            commit::take_receive(ledger, self.number, entry.slot, entry.generation);
        }
        crash_point(Point::TakeRelease);
        self.provide_cursor.release(self.provide_ring());
        waiting
    }

    /// Reads and checks a receive slot once and puts the token among the buffers.
    pub(super) fn offer(&mut self, entry: TokenRef) -> bool {
        let Some(slot) = self.client.receive_slots().get(entry.slot as usize) else {
            return false;
        };
        match Untrusted::read(slot).check(entry, &self.geometry) {
            Ok(token) => self.buffers.offer(entry.slot, &token),
            Err(_) => false,
        }
    }

    /// After a takeover: passes over entries that were taken before the predecessor could say so. Taken in ring order, so they are
    /// the first ones.
    pub(super) fn skip_taken(&mut self, ledger: Ledger<'_>) {
        let waiting = match self.provide_cursor.available(self.provide_ring()) {
            Ok(available) => available,
            Err(_) => return self.fail(CloseReason::RingJump),
        };
        for _ in 0..waiting {
            let entry = TokenRef::decode(self.provide_ring().peek(self.provide_cursor.next())[0]);
            let taken = ledger
                .receives(self.number)
                .get(entry.slot as usize)
                .is_some_and(|fact| fact.load(Ordering::Acquire) as u32 == entry.generation);
            if !taken {
                break;
            }
            self.provide_cursor
                .take(self.client.provide_ring(&self.engine));
        }
        crash_point(Point::SkipTaken);
        self.provide_cursor.release(self.provide_ring());
    }

    /// Writes into a claimed buffer and returns the CRC32C of that. `None` if the bytes have no place there.
    pub(super) fn write_payload(
        &mut self,
        slot: u32,
        generation: u32,
        offset: u32,
        from: &[u8],
    ) -> Option<u32> {
        let at = (self.buffers).arena_range(slot, generation, offset, from.len())?;
        let to = self.client.arena_range(at, from.len())?;
        // SAFETY: a range of the mapped arena; `from` is ours alone.
        Some(unsafe { checked_copy::copy_in(from, to) })
    }

    /// The same without the checksum.
    #[inline]
    pub(super) fn place_payload(
        &mut self,
        slot: u32,
        generation: u32,
        offset: u32,
        from: &[u8],
    ) -> Option<()> {
        let at = (self.buffers).arena_range(slot, generation, offset, from.len())?;
        let to = self.client.arena_range(at, from.len())?;
        // SAFETY: a range of the mapped arena; `from` is ours alone.
        unsafe { checked_copy::plain_in(from, to) };
        Some(())
    }

    // ---- events ----

    /// Writes an event and publishes it: the commit point. Inlined, because what an event of a known kind leaves empty is half of it.
    #[inline]
    pub(super) fn publish_event(&mut self, event: &[u64; EVENT_WORDS], points: [Point; 2]) {
        // There is room by construction: at most one event per token, a token comes back only through its event's consumption, and
        // offers stay within the reserve.
        // An application that breaks the rule overwrites its own events.
        let ring = self.engine.event_ring(&self.client);
        let [staged, published] = points;
        crash_point(staged);
        self.event_cursor.stage(ring, event);
        crash_point(published);
        self.event_cursor.publish(ring);
        self.dirty = true;
    }

    /// Sends whose end one event may tell this application of.
    #[inline]
    pub(super) fn ends_per_event(&self) -> usize {
        match self.client.header().reads.load(Ordering::Relaxed) & READS_ENDS {
            0 => 1,
            _ => ENDS,
        }
    }

    /// Index up to which events are published.
    pub(super) fn events_published(&self) -> u32 {
        self.event_cursor.next()
    }

    /// Does the application want to be asked about any message?
    pub(super) fn wants_offers(&self) -> bool {
        self.client.header().ask_first.load(Ordering::Relaxed) != 0
    }

    /// Does the application want to be asked about a message of this length before it is taken?
    pub(super) fn asks_first(&self, total: u32) -> bool {
        let least = self.client.header().ask_first.load(Ordering::Relaxed);
        least != 0 && u64::from(total) >= least - 1
    }

    /// Index up to which the application says it has read its events.
    pub(super) fn events_read(&self) -> u32 {
        self.event_ring().consumed()
    }

    /// After a takeover: finds the offers the application has not read, which its predecessor had counted.
    pub(super) fn recall_offers(&mut self) {
        let produced = self.event_cursor.next();
        let unread = produced.wrapping_sub(self.events_read());
        let unread = unread.min(self.event_ring().capacity());
        for index in (1..=unread).rev().map(|back| produced.wrapping_sub(back)) {
            let event = Event::decode(&self.event_ring().peek(index));
            if event.is_some_and(|event| matches!(event.kind, EventKind::Offered(_))) {
                self.questions.recall_unread(index);
            }
        }
    }

    /// Whether [`Self::wake_if_wanted`] is to wake it, now or once more when it has what was published, as far as a look that costs nothing can tell.
    #[inline]
    pub(super) fn seems_sleepy(&self) -> bool {
        self.dirty && (self.sleepy > 0 || doorbell::seems_asleep(&self.client.header().waiting))
    }

    /// Wakes the application if it sleeps and something was published since the last call.
    #[inline]
    pub(super) fn wake_if_wanted(&mut self) -> bool {
        if !std::mem::take(&mut self.dirty) {
            return false;
        }
        let woken = self.wake_if_asleep();
        self.sleepy = if woken {
            SLEEPY
        } else {
            self.sleepy.saturating_sub(1)
        };
        woken
    }

    fn wake_if_asleep(&self) -> bool {
        let word = &self.client.header().waiting;
        match doorbell::sleeper(word) {
            Sleeper::Nobody => return false,
            // A doorbell that is full rings already; one that is broken is the application's loss.
            Sleeper::AtBell => super::bell::ring(self.event_bell.as_fd()),
            Sleeper::Napping => doorbell::rouse(word),
        }
        true
    }

    /// Wakes the application however it sleeps, and if a predecessor died while it woke it.
    pub(super) fn wake(&self) {
        super::bell::ring(self.event_bell.as_fd());
        doorbell::rouse(&self.client.header().waiting);
    }

    /// When the application wants its alarm; `None` for never, or if it has fired.
    pub(super) fn alarm(&self) -> Option<u64> {
        let at = self.client.header().alarm_at.load(Ordering::Relaxed);
        let fired = self.engine.header().alarm_fired.load(Ordering::Relaxed);
        (at != 0 && at != fired).then_some(at)
    }

    /// Fires the alarm if it is due.
    pub(super) fn fire_alarm(&mut self, now: u64) -> bool {
        let Some(at) = self.alarm().filter(|at| *at <= now) else {
            return false;
        };
        self.engine
            .header()
            .alarm_fired
            .store(at, Ordering::Release);
        self.dirty = true;
        true
    }

    // ---- state words ----

    /// Tells the application that the port is in service, by an engine that is bound to this core.
    pub(super) fn open(&self, core: Option<usize>) {
        let header = self.engine.header();
        let core = core.and_then(|core| u32::try_from(core + 1).ok());
        header.core.store(core.unwrap_or(0), Ordering::Relaxed);
        let recoveries = header.faults_recovered.load(Ordering::Relaxed);
        let naps_of = recoveries.wrapping_add(1);
        header.naps_of.store(naps_of, Ordering::Relaxed);
        crash_point(Point::OpenState);
        (header.state).store(u64::from(state::OPEN), Ordering::Release);
    }

    /// Why a predecessor told the application that the port is closed, if it did: the application may use its memory again.
    pub(super) fn told_closed(&self) -> Option<CloseReason> {
        let word = self.engine.header().state.load(Ordering::Acquire);
        let reason = CloseReason::from_code((word >> 32) as u32);
        (word as u32 == state::CLOSED).then(|| reason.unwrap_or(CloseReason::Poison))
    }

    /// Tells the application that the port is closed, and why.
    pub(super) fn close(&self, reason: CloseReason) {
        crash_point(Point::CloseState);
        self.engine.header().state.store(
            u64::from(state::CLOSED) | (reason as u64) << 32,
            Ordering::Release,
        );
        self.wake();
    }

    /// Level-triggered: an engine took over. Before it says so it says what it found.
    pub(super) fn count_recovery(&self, held: &Held) {
        let header = self.engine.header();
        let count = &header.faults_recovered;
        let recoveries = count.load(Ordering::Relaxed).wrapping_add(1);
        let cursors = [
            self.send_cursor.next(),
            self.provide_cursor.next(),
            self.event_cursor.next(),
        ];
        held.write(&header.inventory, cursors, recoveries);
        crash_point(Point::CountRecovery);
        count.store(recoveries, Ordering::Release);
        // Not before the count, which an older engine that comes after us would make true.
        let naps_of = recoveries.wrapping_add(1);
        header.naps_of.store(naps_of, Ordering::Release);
    }

    /// Says that the engine is about to sleep; the caller fences and looks at the rings again.
    pub(super) fn announce_sleep(&self) {
        doorbell::announce(&self.engine.header().engine_sleeping);
    }

    /// Says that the engine is awake.
    pub(super) fn withdraw_sleep(&self) {
        doorbell::withdraw(&self.engine.header().engine_sleeping);
    }

    /// Is there anything in the rings?
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.has_sends() || self.provide_cursor.available(self.provide_ring()) != Ok(0)
    }
}
