//! The engine: delivers in the order sent, holds a stream after a failed send, and misbehaves as its [`Knobs`] say.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use portolan_abi::MAX_MESSAGE_BYTES;
use portolan_abi::doorbell::{self, Sleeper};
use portolan_abi::event::{Certainty, Ends, Event, EventKind, Outcome};
use portolan_abi::memory::{self, ClientHalf, EngineHalf};
use portolan_abi::port::{CloseReason, PortGeometry, state};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{
    AnswerToken, FLAG_INLINE, Opcode, ReceiveToken, SendToken, TokenRef, Untrusted,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::{Knobs, Lie, NODE, Ports, readable};

pub struct FakePort {
    pub client: ClientHalf,
    pub engine: EngineHalf,
    events: OwnedFd,
    doorbell: OwnedFd,
    sends: ConsumerCursor,
    provides: ConsumerCursor,
    completions: ProducerCursor,
    offered: Vec<(TokenRef, ReceiveToken)>,
    waiting: VecDeque<Pending>,
    /// Streams held up by a failed send: (node, port, priority).
    held: Vec<(u16, u16, u8)>,
    /// What the application answered.
    pub answers: Vec<AnswerToken>,
    /// It lies about what became of tokens.
    pub forges: bool,
    /// Flags of the sends that came.
    pub flags: Vec<u8>,
    /// Messages to call delivered and drop.
    pub swallow: u32,
    alarm_fired: u64,
    wakes_nappers: bool,
}

struct Pending {
    slot: TokenRef,
    token: SendToken,
    deadline: Option<Instant>,
}

impl FakePort {
    pub(super) fn make(port: u16, geometry: PortGeometry, lie: Lie) -> (Self, Vec<OwnedFd>) {
        let client_fd = memory::create_sealed("fake-client", geometry.client_half_bytes()).unwrap();
        let engine_fd = memory::create_sealed("fake-engine", geometry.engine_half_bytes()).unwrap();
        let client = ClientHalf::map(client_fd.as_fd(), geometry).unwrap();
        let engine = EngineHalf::map(engine_fd.as_fd(), geometry, true).unwrap();
        client.initialise();
        engine.initialise(NODE, if lie == Lie::Port { port + 1 } else { port });
        match lie {
            Lie::Version => engine.header().version.store(99, Ordering::Relaxed),
            Lie::Magic => client.header().magic.store(1, Ordering::Relaxed),
            _ => {}
        }
        engine
            .header()
            .state
            .store(u64::from(state::OPEN), Ordering::Release);
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (events, doorbell) = (eventfd(), eventfd());
        let shown = match lie {
            Lie::Size => memory::create_sealed("wrong", 4096).unwrap(),
            Lie::Unsealed => {
                let fd = rustix::fs::memfd_create("bare", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&fd, geometry.client_half_bytes() as u64).unwrap();
                fd
            }
            _ => client_fd,
        };
        let fds = vec![
            shown,
            memory::reopen_read_only(engine_fd.as_fd()).unwrap(),
            rustix::io::dup(&events).unwrap(),
            rustix::io::dup(&doorbell).unwrap(),
        ];
        let made = Self {
            client,
            engine,
            events,
            doorbell,
            sends: ConsumerCursor::new(0),
            provides: ConsumerCursor::new(0),
            completions: ProducerCursor::new(0),
            offered: Vec::new(),
            waiting: VecDeque::new(),
            held: Vec::new(),
            answers: Vec::new(),
            forges: false,
            flags: Vec::new(),
            swallow: 0,
            alarm_fired: 0,
            wakes_nappers: false,
        };
        (made, fds)
    }

    pub fn set_state(&self, to: u32, reason: Option<CloseReason>) {
        let word = u64::from(reason.map_or(0, |r| r as u32)) << 32 | u64::from(to);
        self.engine.header().state.store(word, Ordering::Release);
        self.ring();
    }

    /// From now on as an engine that wakes those that nap, bound to this core if to one.
    pub fn wake_nappers(&mut self, core: Option<u32>) {
        let header = self.engine.header();
        let recovered = header.faults_recovered.load(Ordering::Relaxed);
        header
            .core
            .store(core.map_or(0, |core| core + 1), Ordering::Relaxed);
        header.naps_of.store(recovered + 1, Ordering::Relaxed);
        self.wakes_nappers = true;
    }

    /// Wakes the application if it sleeps.
    pub fn ring(&self) {
        let word = &self.client.header().waiting;
        match doorbell::sleeper(word) {
            Sleeper::Nobody => {}
            Sleeper::Napping if self.wakes_nappers => doorbell::rouse(word),
            Sleeper::AtBell | Sleeper::Napping => self.ring_anyway(),
        }
    }

    /// As if it had just been asleep.
    pub fn ring_anyway(&self) {
        rustix::io::write(&self.events, &1u64.to_ne_bytes()).unwrap();
    }

    /// Takes over as the next engine, and finds these slots in its hands.
    pub fn take_over(&self, sends: &[u32], receives: &[u32]) {
        let header = self.engine.header();
        let (found, of) = (
            &header.inventory,
            header.faults_recovered.load(Ordering::Relaxed) + 1,
        );
        let bits = |slots: &[u32], word: u32| -> u64 {
            let here = slots.iter().filter(|slot| **slot / 64 == word);
            here.fold(0, |bits, slot| bits | 1 << (slot % 64))
        };
        found.of.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        found.sends.store(self.sends.next(), Ordering::Relaxed);
        found
            .provides
            .store(self.provides.next(), Ordering::Relaxed);
        found
            .events
            .store(self.completions.next(), Ordering::Relaxed);
        for (at, word) in (0..).zip(&found.sends_held) {
            word.store(bits(sends, at), Ordering::Relaxed);
        }
        for (at, word) in (0..).zip(&found.receives_held) {
            word.store(bits(receives, at), Ordering::Relaxed);
        }
        found.of.store(of, Ordering::Release);
        header.faults_recovered.store(of, Ordering::Release);
        self.ring();
    }

    /// Says that it has written events that it has not.
    pub fn jump(&mut self, by: u32) {
        self.completions = ProducerCursor::new(self.completions.next().wrapping_add(by));
        self.completions
            .publish(self.engine.event_ring(&self.client));
        self.ring();
    }

    /// Names and places of the buffers it was offered.
    pub fn offers(&mut self) -> Vec<(u32, u64)> {
        self.take();
        let place = |(slot, token): &(TokenRef, ReceiveToken)| (slot.slot, token.arena_offset);
        self.offered.iter().map(place).collect()
    }

    /// Puts any words into the event ring.
    pub fn push_words(&mut self, words: &[u64; 8]) {
        let ring = self.engine.event_ring(&self.client);
        self.completions.stage(ring, words);
        self.completions.publish(ring);
        self.ring();
    }

    pub fn push(&mut self, event: &Event) {
        self.push_words(&event.encode());
    }

    /// Ends sends at once.
    pub fn end(&mut self, tokens: &[TokenRef], outcome: Outcome) {
        let mut ends = Ends::new(outcome);
        tokens.iter().for_each(|token| ends.push(*token));
        self.push_words(&ends.encode());
    }

    /// Takes what the application published.
    fn take(&mut self) {
        let geometry = self.client.geometry();
        let ring = self.client.provide_ring(&self.engine);
        for _ in 0..self.provides.available(ring).unwrap() {
            let slot = TokenRef::decode(self.provides.take(ring)[0]);
            let words = Untrusted::read(&self.client.receive_slots()[slot.slot as usize]);
            match words.check(slot, &geometry) {
                Ok(token) => self.offered.push((slot, token)),
                // A forged event had the slot provided again before it was looked at.
                Err(_) if self.forges => {}
                Err(nonsense) => panic!("{nonsense:?}"),
            }
        }
        self.provides.release(ring);
        let ring = self.client.send_ring(&self.engine);
        let mut taken = Vec::new();
        for _ in 0..self.sends.available(ring).unwrap() {
            let slot = TokenRef::decode(self.sends.take(ring)[0]);
            let words = Untrusted::read(&self.client.send_slots()[slot.slot as usize]);
            taken.push((
                slot,
                words.check(slot, &geometry).expect("a sensible token"),
            ));
        }
        self.sends.release(ring);
        for (slot, token) in taken {
            self.accept(slot, token);
        }
    }

    fn accept(&mut self, slot: TokenRef, token: SendToken) {
        let stream = (token.node, token.port, token.priority);
        let mut ended = Vec::new();
        match token.opcode {
            Opcode::Send => {
                self.flags.push(token.flags);
                let us = token.timeout_us;
                let deadline = (us != 0).then(|| Instant::now() + Duration::from_micros(us.into()));
                self.waiting.push_back(Pending {
                    slot,
                    token,
                    deadline,
                });
                return;
            }
            Opcode::Answer => self.answers.push(AnswerToken::of(&token).unwrap()),
            Opcode::ResumeSending => self.held.retain(|&h| h != stream),
            Opcode::DropSends => {
                self.held.retain(|&h| h != stream);
                self.waiting.retain(|p| {
                    let drop = (p.token.node, p.token.port, p.token.priority) == stream;
                    if drop {
                        ended.push((p.slot, 7));
                    }
                    !drop
                });
            }
            Opcode::Cancel => self.waiting.retain(|p| {
                let name = u64::from(p.slot.generation) << 32 | u64::from(p.slot.slot);
                if name == token.arena_offset {
                    ended.push((p.slot, 6));
                }
                name != token.arena_offset
            }),
        }
        for (slot, reason) in ended {
            self.end(&[slot], not_delivered(reason));
        }
        self.end(&[slot], DELIVERED);
    }

    fn payload(&self, pending: &Pending) -> Vec<u8> {
        let mut bytes = vec![0; pending.token.len as usize];
        if pending.token.flags & FLAG_INLINE != 0 {
            self.client
                .read_inline(pending.slot.slot, 0, &mut bytes)
                .unwrap();
        } else {
            let offset = pending.token.arena_offset;
            self.client.read_arena(offset, &mut bytes).unwrap();
        }
        bytes
    }

    /// Puts a message into the smallest buffer that holds it. `None`: it must wait.
    fn deliver(&mut self, from: u16, token: &SendToken, bytes: &[u8]) -> Option<()> {
        let (i, _) = self
            .offered
            .iter()
            .enumerate()
            .filter(|(_, (_, o))| o.priority == token.priority && o.len >= token.len)
            .min_by_key(|(_, (_, o))| o.len)?;
        let (slot, offer) = self.offered.remove(i);
        self.client.write_arena(offer.arena_offset, bytes).unwrap();
        self.push(&Event {
            kind: EventKind::Received,
            priority: token.priority,
            slot: slot.slot,
            generation: slot.generation,
            len: token.len,
            total: token.len,
            node: NODE,
            port: from,
            record: 0,
            epoch: 1,
            number: 1,
            tag: token.tag,
        });
        Some(())
    }

    /// Takes a buffer of so many bytes: where it is, and its slot.
    pub fn offered_buffer(&mut self, len: u32) -> (u64, TokenRef) {
        self.take();
        let i = self.offered.iter().position(|(_, o)| o.len == len).unwrap();
        let (slot, offer) = self.offered.remove(i);
        (offer.arena_offset, slot)
    }

    fn ring_alarm(&mut self) {
        let at = self.client.header().alarm_at.load(Ordering::Acquire);
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        if at != 0 && at != self.alarm_fired && at <= now {
            self.alarm_fired = at;
            rustix::io::write(&self.events, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

/// A message of one port of this node to another came into this buffer.
pub fn received(into: TokenRef, len: u32) -> Event {
    Event {
        kind: EventKind::Received,
        priority: 0,
        slot: into.slot,
        generation: into.generation,
        len,
        total: len,
        node: NODE,
        port: 11,
        record: 0,
        epoch: 1,
        number: 1,
        tag: 0,
    }
}

pub const DELIVERED: Outcome = Outcome {
    certainty: Certainty::Delivered,
    reason: 0,
};

pub fn not_delivered(reason: u8) -> Outcome {
    Outcome {
        certainty: Certainty::NotDelivered,
        reason,
    }
}

pub(super) fn engine(knobs: &Knobs, ports: &Ports) {
    while !knobs.stop.load(Ordering::Relaxed) {
        let mut ports = ports.lock().unwrap();
        let numbers: Vec<u16> = ports.keys().copied().collect();
        for &number in &numbers {
            let port = ports.get_mut(&number).unwrap();
            port.engine
                .header()
                .engine_sleeping
                .store(0, Ordering::Relaxed);
            port.take();
            port.ring_alarm();
            if !knobs.frozen.load(Ordering::Relaxed) {
                work(&mut ports, number);
            }
        }
        let mut sleeps = knobs.sleeps.load(Ordering::Relaxed);
        if sleeps {
            for port in ports.values() {
                port.engine
                    .header()
                    .engine_sleeping
                    .store(1, Ordering::Relaxed);
            }
            fence(Ordering::SeqCst);
            sleeps = ports.values().all(|p| {
                p.sends.available(p.client.send_ring(&p.engine)) == Ok(0)
                    && p.provides.available(p.client.provide_ring(&p.engine)) == Ok(0)
            });
        }
        let bells: Vec<_> = ports
            .values()
            .map(|p| rustix::io::dup(&p.doorbell).unwrap())
            .collect();
        drop(ports);
        if !sleeps {
            std::thread::yield_now();
            continue;
        }
        let mut fds: Vec<_> = bells
            .iter()
            .map(|b| PollFd::new(b, PollFlags::IN))
            .collect();
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        for bell in &bells {
            if readable(bell, Duration::ZERO) && rustix::io::read(bell, &mut [0; 8]).is_ok() {
                knobs.rung.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// One pass over a port's waiting sends. A stream goes on only past what ended well.
fn work(ports: &mut BTreeMap<u16, FakePort>, number: u16) {
    let mut stuck = Vec::new();
    let mut keep = VecDeque::new();
    let mut source = ports.remove(&number).unwrap();
    while let Some(pending) = source.waiting.pop_front() {
        let token = pending.token;
        let stream = (token.node, token.port, token.priority);
        if stuck.contains(&stream) || source.held.contains(&stream) {
            keep.push_back(pending);
            continue;
        }
        let bytes = source.payload(&pending);
        let outcome = if source.swallow > 0 {
            source.swallow -= 1;
            Some(DELIVERED)
        } else if token.node != NODE {
            Some(not_delivered(9))
        } else if token.len == MAX_MESSAGE_BYTES {
            Some(not_delivered(2))
        } else {
            let target = if token.port == number {
                Some(&mut source)
            } else {
                ports.get_mut(&token.port)
            };
            match target {
                None => Some(not_delivered(1)),
                Some(port) => port.deliver(number, &token, &bytes).map(|()| DELIVERED),
            }
        };
        let overdue = pending.deadline.is_some_and(|d| Instant::now() >= d);
        match outcome.or(overdue.then(|| not_delivered(3))) {
            Some(outcome) => {
                if outcome != DELIVERED {
                    source.held.push(stream);
                }
                source.end(&[pending.slot], outcome);
            }
            None => {
                stuck.push(stream);
                keep.push_back(pending);
            }
        }
    }
    source.waiting = keep;
    ports.insert(number, source);
}
