//! An application that follows the rules, sends what its script says, and notices when somebody else does not.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use portolan_abi::event::{Certainty, Event, EventKind, OtherEnds, Outcome};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::READS_ENDS;
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{
    FLAG_INLINE, INLINE_BYTES, Opcode, ReceiveToken, SEND_SLOT_WORDS, SendToken, TokenRef,
};

use super::memory::{BUFFER, Memory, PORT, TOKENS};

/// A message of the script; its place in it is its tag.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// Bytes, at most [`BUFFER`].
    pub len: u32,
    /// 0 low, 1 high.
    pub priority: u8,
    /// Not sent before, nanoseconds.
    pub at: u64,
    /// Microseconds until it is given up; 0: hardly ever.
    pub timeout_us: u32,
}

/// What became of a message of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Not sent yet.
    Unsent,
    /// The engine has it.
    Out,
    /// It ended.
    Ended(Outcome),
    /// The application closed its port before it ended.
    Abandoned,
}

pub struct Application {
    client: ClientHalf,
    engine: EngineHalf,
    sends: ProducerCursor,
    provides: ProducerCursor,
    events: ConsumerCursor,
    /// Generation of each slot, and what is out in it: a message of the script, or a command.
    send_slots: [(u32, Option<Sent>); TOKENS as usize],
    receive_slots: [(u32, bool); TOKENS as usize],
    /// The ring's index at which each slot was last given to an engine.
    sends_given: [u32; TOKENS as usize],
    receives_given: [u32; TOKENS as usize],
    peer: u16,
    pub script: Vec<Message>,
    pub fates: Vec<Fate>,
    /// Tags received, in order.
    pub received: Vec<u64>,
    /// The other end's script: what is to be received.
    expected: Vec<Message>,
    /// No buffers before, nanoseconds.
    pub buffers_from: u64,
    /// Receive tokens kept out.
    pub buffers: u32,
    /// A command goes out after every third message.
    pub commands: bool,
    commanded: usize,
    /// Messages of the script sent so far.
    sent: usize,
    /// Messages of the script that may be sent by now.
    pub allowed: usize,
    /// A send failed for a reason that pauses its stream.
    resume: Option<u8>,
    /// Which events it says it reads.
    reads: u32,
    /// Events that told of the ends of several sends.
    pub told_of_several: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Message(usize),
    Command,
}

fn byte(tag: u64, at: u32) -> u8 {
    (tag.wrapping_mul(31)
        .wrapping_add(u64::from(at).wrapping_mul(7))) as u8
}

fn bytes(tag: u64, len: u32) -> Vec<u8> {
    (0..len).map(|at| byte(tag, at)).collect()
}

impl Application {
    pub fn new(memory: &Memory, peer: u16, script: &[Message], expected: &[Message]) -> Self {
        let (client, engine) = memory.halves();
        client.header().reads.store(READS_ENDS, Ordering::Relaxed);
        Self {
            client,
            engine,
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            events: ConsumerCursor::new(0),
            send_slots: [(u32::MAX - 1, None); TOKENS as usize],
            receive_slots: [(u32::MAX - 1, false); TOKENS as usize],
            sends_given: [0; TOKENS as usize],
            receives_given: [0; TOKENS as usize],
            peer,
            script: script.to_vec(),
            fates: vec![Fate::Unsent; script.len()],
            received: Vec::new(),
            expected: expected.to_vec(),
            buffers_from: 0,
            buffers: TOKENS,
            commands: false,
            commanded: 0,
            sent: 0,
            allowed: usize::MAX,
            resume: None,
            reads: READS_ENDS,
            told_of_several: 0,
        }
    }

    /// Its library reads these events only.
    pub fn reads(&mut self, reads: u32) {
        self.reads = reads;
        let word = &self.client.header().reads;
        word.store(reads, Ordering::Relaxed);
    }

    /// The port was closed and is opened anew: new memory, the same application.
    pub fn reopen(&mut self, memory: &Memory) {
        let abandoned = Self::new(memory, self.peer, &[], &[]);
        for fate in &mut self.fates {
            if *fate == Fate::Out {
                *fate = Fate::Abandoned;
            }
        }
        (self.client, self.engine) = (abandoned.client, abandoned.engine);
        (self.sends, self.provides, self.events) =
            (abandoned.sends, abandoned.provides, abandoned.events);
        (self.send_slots, self.receive_slots) = (abandoned.send_slots, abandoned.receive_slots);
        self.resume = None;
        self.reads(self.reads);
    }

    /// Nothing of the script is left to do.
    pub fn is_done(&self) -> bool {
        (self.fates.iter()).all(|fate| matches!(fate, Fate::Ended(_) | Fate::Abandoned))
            && self.send_slots.iter().all(|(_, sent)| sent.is_none())
    }

    /// When the next message is due, if that is later than now.
    pub fn next_at(&self, now: u64) -> Option<u64> {
        let unsent = self.fates.iter().zip(&self.script);
        let next = unsent.filter(|(fate, _)| **fate == Fate::Unsent);
        let at = next.map(|(_, message)| message.at).min();
        let buffers = Some(self.buffers_from).filter(|at| *at > now);
        [at, buffers]
            .into_iter()
            .flatten()
            .filter(|at| *at > now)
            .min()
    }

    /// Reads events, offers buffers, sends.
    pub fn turn(&mut self, now: u64) {
        self.read_events();
        if now >= self.buffers_from {
            for slot in 0..self.buffers {
                self.provide(slot);
            }
        }
        while let Some(slot) = self.send_slots.iter().position(|(_, sent)| sent.is_none()) {
            let slot = slot as u32;
            if let Some(priority) = self.resume.take() {
                self.command(slot, priority);
                continue;
            }
            let next = self.sent;
            let due = self.script.get(next).is_some_and(|m| m.at <= now);
            if !due || next >= self.allowed {
                return;
            };
            if self.commands && next / 3 > self.commanded {
                self.commanded += 1;
                self.command(slot, 0);
                continue;
            }
            self.send(slot, next);
        }
    }

    fn send(&mut self, slot: u32, nth: usize) {
        let message = self.script[nth];
        let payload = bytes(nth as u64, message.len);
        let inline = payload.len() <= INLINE_BYTES && nth.is_multiple_of(2);
        let arena_offset = u64::from(slot * BUFFER);
        if !inline {
            self.client.write_arena(arena_offset, &payload).unwrap();
        }
        let token = SendToken {
            generation: 0,
            opcode: Opcode::Send,
            priority: message.priority,
            flags: if inline { FLAG_INLINE } else { 0 },
            node: self.peer,
            port: PORT,
            len: message.len,
            arena_offset,
            tag: nth as u64,
            timeout_us: message.timeout_us,
        };
        self.push(
            slot,
            token,
            if inline { &payload } else { &[] },
            Sent::Message(nth),
        );
        self.fates[nth] = Fate::Out;
        self.sent = nth + 1;
    }

    fn command(&mut self, slot: u32, priority: u8) {
        let token = SendToken {
            generation: 0,
            opcode: Opcode::ResumeSending,
            priority,
            flags: 0,
            node: self.peer,
            port: PORT,
            len: 0,
            arena_offset: 0,
            tag: 0,
            timeout_us: 0,
        };
        self.push(slot, token, &[], Sent::Command);
    }

    fn push(&mut self, slot: u32, token: SendToken, payload: &[u8], sent: Sent) {
        let place = &mut self.send_slots[slot as usize];
        *place = (place.0.wrapping_add(1).max(1), Some(sent));
        let generation = place.0;
        let words: &[_; SEND_SLOT_WORDS] = &self.client.send_slots()[slot as usize];
        SendToken {
            generation,
            ..token
        }
        .store(words, payload);
        let ring = self.client.send_ring(&self.engine);
        assert!(self.sends.free(ring) > 0, "no room for a token we have");
        let entry = TokenRef { slot, generation };
        self.sends_given[slot as usize] = self.sends.next();
        self.sends.stage(ring, &[entry.encode()]);
        self.sends.publish(ring);
    }

    fn provide(&mut self, slot: u32) {
        let place = &mut self.receive_slots[slot as usize];
        if place.1 {
            return;
        }
        *place = (place.0.wrapping_add(1).max(1), true);
        let generation = place.0;
        // The last buffer is kept for urgent messages.
        let token = ReceiveToken {
            generation,
            priority: u8::from(slot == TOKENS - 1),
            arena_offset: u64::from((TOKENS + slot) * BUFFER),
            len: BUFFER,
        };
        token.store(&self.client.receive_slots()[slot as usize]);
        let ring = self.client.provide_ring(&self.engine);
        assert!(self.provides.free(ring) > 0, "no room for a token we have");
        let entry = TokenRef { slot, generation };
        self.receives_given[slot as usize] = self.provides.next();
        self.provides.stage(ring, &[entry.encode()]);
        self.provides.publish(ring);
    }

    /// By the last engine's inventory, no token is lost: what was given to an earlier engine, and no event gave back, it holds. Called when
    /// every event was read.
    fn nothing_is_lost(&self) {
        let header = self.engine.header();
        let found = &header.inventory;
        let of = found.of.load(Ordering::Relaxed);
        if of == 0 || of != header.faults_recovered.load(Ordering::Relaxed) {
            return;
        }
        let judged = |given: u32, until: &AtomicU32| {
            (given.wrapping_sub(until.load(Ordering::Relaxed)) as i32) < 0
        };
        let held = |words: &[AtomicU64], slot| words[0].load(Ordering::Relaxed) >> slot & 1 == 1;
        for slot in 0..TOKENS as usize {
            let out = self.send_slots[slot].1.is_some();
            let lost =
                judged(self.sends_given[slot], &found.sends) && !held(&found.sends_held, slot);
            assert!(!(out && lost), "send slot {slot} is called lost");
            let out = self.receive_slots[slot].1;
            let lost = judged(self.receives_given[slot], &found.provides)
                && !held(&found.receives_held, slot);
            assert!(!(out && lost), "receive slot {slot} is called lost");
        }
    }

    /// Takes every event there is.
    pub fn read_events(&mut self) {
        loop {
            let ring = self.engine.event_ring(&self.client);
            if self.events.available(ring).unwrap() == 0 {
                break;
            }
            let words = self.events.take(ring);
            let event = Event::decode(&words).expect("an event");
            self.events.release(ring);
            match event.kind {
                EventKind::Sent(end) => {
                    let (slot, generation) = (event.slot, event.generation);
                    self.sent(TokenRef { slot, generation }, end);
                    let others = OtherEnds::of(&words);
                    self.told_of_several += u32::from(!others.is_empty());
                    assert!(others.is_empty() || self.reads & READS_ENDS != 0);
                    others.for_each(|token| self.sent(token, end));
                }
                EventKind::Received => self.received(&event),
                EventKind::Offered(_) => panic!("it never asked to be asked"),
            }
        }
        self.nothing_is_lost();
    }

    fn sent(&mut self, token: TokenRef, end: Outcome) {
        let (generation, sent) = &mut self.send_slots[token.slot as usize];
        assert_eq!(*generation, token.generation, "a token that is not out");
        match sent.take().expect("a token that ended twice") {
            Sent::Message(nth) => {
                assert_eq!(self.fates[nth], Fate::Out);
                self.fates[nth] = Fate::Ended(end);
                if end.certainty == Certainty::NotDelivered {
                    self.resume = Some(self.script[nth].priority);
                }
            }
            Sent::Command => assert_eq!(end.certainty, Certainty::Delivered),
        }
    }

    fn received(&mut self, event: &Event) {
        let slot = &mut self.receive_slots[event.slot as usize];
        assert_eq!(*slot, (event.generation, true), "a token that is not out");
        slot.1 = false;
        let expected = self.expected[event.tag as usize];
        assert_eq!(event.len, expected.len, "message {}", event.tag);
        assert_eq!((event.node, event.port), (self.peer, PORT));
        let mut got = vec![0; event.len as usize];
        let offset = u64::from((TOKENS + event.slot) * BUFFER);
        self.client.read_arena(offset, &mut got).unwrap();
        assert_eq!(got, bytes(event.tag, event.len), "message {}", event.tag);
        self.received.push(event.tag);
    }
}
