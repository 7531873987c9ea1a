//! The application that follows no rule: the input's opcodes as stores into its client half.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Event, EventKind};
use portolan_abi::memory::{ClientHalf, EngineHalf, Mapping};
use portolan_abi::port::CloseReason;
use portolan_abi::token::{AnswerToken, RECEIVE_SLOT_WORDS, SEND_SLOT_WORDS, TokenRef, Verdict};

use super::{ABSENT, HONEST, HOSTILE, MS, Memory, NODE, World, punch};
use std::os::fd::AsFd;

/// Values that mean something somewhere.
const TELLING: [u64; 12] = [
    0,
    1,
    u64::MAX,
    1 << 63,
    1 << 32,
    (1 << 32) - 1,
    1 << 31,
    1 << 14,
    (1 << 14) - 1,
    0x0101_0101_0101_0101,
    4096,
    0xffff,
];

pub struct Hostile<'m, 'i> {
    memory: &'m Memory,
    client: ClientHalf,
    engine: EngineHalf,
    /// The client half once more, as bare words.
    words: Mapping,
    input: &'i [u8],
    /// The generations a client that follows the rules would use next.
    send_generations: [u32; 4],
    receive_generations: [u32; 4],
}

impl<'m, 'i> Hostile<'m, 'i> {
    pub fn new(memory: &'m Memory, input: &'i [u8]) -> Self {
        let halves = &memory.hostile;
        let bytes = halves.geometry.client_half_bytes();
        let (client, engine) = halves.map();
        Self {
            memory,
            client,
            engine,
            words: Mapping::new(halves.client.as_fd(), bytes, true).unwrap(),
            input,
            send_generations: [1; 4],
            receive_generations: [1; 4],
        }
    }

    fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.input.split_first() else {
            return 0;
        };
        self.input = rest;
        *first
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|_| self.u8()))
    }

    fn value(&mut self) -> u64 {
        match self.u8() {
            telling @ 0..64 => TELLING[usize::from(telling) % TELLING.len()],
            small @ 64..192 => u64::from(small - 64),
            192..224 => self.u32().into(),
            224..240 => u64::from(self.u32()) << 32,
            _ => u64::from(self.u32()) << 32 | u64::from(self.u32()),
        }
    }

    /// The next deed; how many turns the engine gets afterwards. `None`: no more.
    pub fn act(&mut self, world: &mut World<'_>) -> Option<u32> {
        if self.input.is_empty() {
            return None;
        }
        let op = self.u8();
        match op & 15 {
            0..=3 => self.send(),
            4 | 5 => self.provide(),
            6 => self.jump(),
            7 => self.ring_word(),
            8 => {
                // Anything anywhere, the magic and the indices included.
                let all = self.words.bytes() / 8;
                let at = self.u32() as usize % if op & 16 == 0 { 600 } else { all };
                let value = self.value();
                self.words.words(0, all)[at].store(value, Ordering::Relaxed);
            }
            9 => self.field(),
            10 => {
                let page = usize::from(self.u8()) * 4096 % self.words.bytes();
                punch(&self.memory.hostile.client, page, 4096);
            }
            11 => {
                let (waiting, alarm) = (self.u8(), u64::from(self.u8()) * MS);
                let asks = self.value();
                let header = self.client.header();
                header.waiting.store(waiting.into(), Ordering::Relaxed);
                header.alarm_at.store(alarm, Ordering::Relaxed);
                header.ask_first.store(asks, Ordering::Relaxed);
                header.reads.store(asks as u32, Ordering::Relaxed);
            }
            12 => world.dies_in = Some(self.u8().into()),
            13 => {
                world.reopen();
                self.send_generations = [1; 4];
                self.receive_generations = [1; 4];
            }
            14 if op & 16 != 0 && world.open => world.close(CloseReason::OwnerGone),
            14 => self.answer(),
            _ => {
                // The engine runs before its patience with a silent peer ends: an engine that is kept from running for longer may take
                // its own absence for the peer's.
                world.now += u64::from(self.u8()) * MS / 4;
                return Some(1 + u32::from(op >> 5));
            }
        }
        // Several deeds may come between two looks of the engine.
        Some(u32::from(op >> 5))
    }

    fn push_send(&mut self, entry: TokenRef) {
        let ring = self.client.send_ring(&self.engine);
        let at = ring.published();
        self.words_of_send_ring()[at as usize & 3].store(entry.encode(), Ordering::Relaxed);
        let header = self.client.header();
        header
            .send_producer
            .store(at.wrapping_add(1), Ordering::Release);
    }

    fn words_of_send_ring(&self) -> &[std::sync::atomic::AtomicU64] {
        let geometry = &self.memory.hostile.geometry;
        self.words.words(geometry.send_ring(), 4)
    }

    fn words_of_provide_ring(&self) -> &[std::sync::atomic::AtomicU64] {
        let geometry = &self.memory.hostile.geometry;
        self.words.words(geometry.provide_ring(), 4)
    }

    /// A token as the rules want it, but for what the input changes.
    fn send(&mut self) {
        let (how, slot) = (self.u8(), self.u8());
        let slot = u32::from(slot) & if how & 1 == 0 { 3 } else { 7 };
        let known = self.send_generations.get(slot as usize).copied();
        let generation = match how >> 1 & 7 {
            0 => self.u32(),
            _ => known.unwrap_or(1),
        };
        let mut words = [0; SEND_SLOT_WORDS];
        let opcode = match how >> 4 & 7 {
            0..=3 => 1,
            4 => 2,
            5 => 3,
            6 => 4,
            _ => self.u8(),
        };
        let flags = self.u8();
        let priority = if flags & 0x80 == 0 { flags >> 6 } else { flags };
        let node = match self.u8() {
            0..160 => NODE,
            160..200 => ABSENT,
            other => other.into(),
        };
        let port = match self.u8() {
            0..120 => HONEST,
            120..200 => HOSTILE,
            other => other.into(),
        };
        let len = match self.u8() {
            small @ 0..100 => u64::from(small),
            some @ 100..250 => u64::from(some - 99) * 113,
            _ => self.value() & u64::from(u32::MAX),
        };
        words[0] = u64::from(generation) << 32
            | u64::from(opcode)
            | u64::from(priority) << 8
            | u64::from(flags & 1) << 16;
        words[1] = u64::from(node) | u64::from(port) << 16 | len << 32;
        // The send to cancel, or the payload.
        words[2] = match opcode {
            4 => u64::from(generation.wrapping_sub(u32::from(flags >> 2 & 3))) << 32 | len & 7,
            _ => self.value(),
        };
        words[3] = self.value();
        words[4] = match flags >> 1 & 1 {
            0 => 0,
            _ => self.value(),
        };
        if let Some(to) = self.client.send_slots().get(slot as usize) {
            to.iter()
                .zip(words)
                .for_each(|(to, w)| to.store(w, Ordering::Relaxed));
        }
        if let Some(known) = self.send_generations.get_mut(slot as usize) {
            *known = known.wrapping_add(1).max(1);
        }
        self.push_send(TokenRef { slot, generation });
    }

    /// Says what it wants of a message it was offered, or might have been.
    fn answer(&mut self) {
        let (how, slot) = (self.u8(), usize::from(self.u8() & 3));
        let ring = self.engine.event_ring(&self.client);
        let at = ring.published().wrapping_sub(1 + u32::from(how & 7));
        let Some(event) = Event::decode(&ring.peek(at)) else {
            return;
        };
        let EventKind::Offered(offered) = event.kind else {
            return;
        };
        let verdicts = [Verdict::Accept, Verdict::Shorten, Verdict::Refuse];
        let generation = self.send_generations[slot];
        let len = match how >> 3 & 3 {
            0 => self.value() as u32,
            _ => event.total / 2,
        };
        let answer = AnswerToken {
            from: (event.node, event.port),
            priority: event.priority,
            incarnation: offered.incarnation,
            epoch: event.epoch,
            number: event.number.wrapping_add(u32::from(how >> 7)),
            verdict: verdicts[usize::from(how >> 5) % 3],
            len,
        };
        answer
            .token(generation)
            .store(&self.client.send_slots()[slot], &[]);
        self.send_generations[slot] = generation.wrapping_add(1).max(1);
        let slot = slot as u32;
        self.push_send(TokenRef { slot, generation });
    }

    fn provide(&mut self) {
        let (how, slot) = (self.u8(), self.u8());
        let slot = u32::from(slot) & if how & 1 == 0 { 3 } else { 7 };
        let known = self.receive_generations.get(slot as usize).copied();
        let generation = match how >> 1 & 7 {
            0 => self.u32(),
            _ => known.unwrap_or(1),
        };
        let (offset, len) = match how >> 4 & 7 {
            0 => (self.value(), self.value()),
            _ => (u64::from(slot) * 4096, 4096),
        };
        let priority = u64::from(how >> 7);
        let words: [u64; RECEIVE_SLOT_WORDS] = [
            u64::from(generation) << 32 | priority,
            offset,
            len,
            self.value(),
        ];
        if let Some(to) = self.client.receive_slots().get(slot as usize) {
            to.iter()
                .zip(words)
                .for_each(|(to, w)| to.store(w, Ordering::Relaxed));
        }
        if let Some(known) = self.receive_generations.get_mut(slot as usize) {
            *known = known.wrapping_add(1).max(1);
        }
        let ring = self.client.provide_ring(&self.engine);
        let at = ring.published();
        let entry = TokenRef { slot, generation };
        self.words_of_provide_ring()[at as usize & 3].store(entry.encode(), Ordering::Relaxed);
        let header = self.client.header();
        header
            .provide_producer
            .store(at.wrapping_add(1), Ordering::Release);
    }

    /// An index goes somewhere else.
    fn jump(&mut self) {
        let how = self.u8();
        let by = match how >> 2 & 3 {
            0 => u32::from(how >> 4),
            1 => u32::from(how >> 4).wrapping_neg(),
            _ => self.u32(),
        };
        let header = self.client.header();
        let index = match how & 3 {
            0 | 3 => &header.send_producer,
            1 => &header.provide_producer,
            _ => &header.event_consumer,
        };
        index.store(
            index.load(Ordering::Relaxed).wrapping_add(by),
            Ordering::Release,
        );
    }

    fn ring_word(&mut self) {
        let (how, value) = (self.u8(), self.value());
        let ring = if how & 4 == 0 {
            self.words_of_send_ring()
        } else {
            self.words_of_provide_ring()
        };
        ring[usize::from(how & 3)].store(value, Ordering::Relaxed);
    }

    /// A word of a slot the engine may have read already.
    fn field(&mut self) {
        let (how, value) = (self.u8(), self.value());
        let slot = usize::from(how & 3);
        let word = if how & 4 == 0 {
            &self.client.send_slots()[slot][usize::from(how >> 3) % SEND_SLOT_WORDS]
        } else {
            &self.client.receive_slots()[slot][usize::from(how >> 3) % RECEIVE_SLOT_WORDS]
        };
        word.store(value, Ordering::Relaxed);
    }
}
