//! An application that follows the rules: it sends numbered messages to its own port and checks what comes.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Certainty, Event, EventKind, OtherEnds};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::READS_ENDS;
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{
    FLAG_INLINE, INLINE_BYTES, Opcode, ReceiveToken, SEND_SLOT_WORDS, SendToken, TokenRef,
};

use super::{HONEST, HOSTILE, Halves, NODE};

/// Bytes of each buffer, and of each place messages are sent from.
const BUFFER: u32 = 4096;
/// Send and receive slots used: the first half of the arena is sent from, the second received into.
const SLOTS: u32 = 8;
/// Messages it sends while nobody asks it to stop.
const MESSAGES: u64 = 400;
/// Bytes nobody was offered.
const CANARY: u8 = 0xc3;

pub struct Honest {
    client: ClientHalf,
    engine: EngineHalf,
    sends: ProducerCursor,
    provides: ProducerCursor,
    events: ConsumerCursor,
    /// Generation of each slot, and whether the engine has it.
    send_slots: [(u32, bool); SLOTS as usize],
    receive_slots: [(u32, bool); SLOTS as usize],
    sent: u64,
    ended: u64,
    arrived: u64,
    finishing: bool,
}

impl std::fmt::Debug for Honest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            sent,
            ended,
            arrived,
            ..
        } = self;
        write!(f, "{sent} sent, {ended} ended, {arrived} arrived")
    }
}

/// Lengths in turn: nothing, in the slot, in a frame, in several, all of a buffer.
fn len(number: u64) -> u32 {
    [0, 7, 80, 81, 1000, 1500, BUFFER][(number % 7) as usize]
}

fn byte(number: u64, at: u32) -> u8 {
    (number
        .wrapping_mul(31)
        .wrapping_add(u64::from(at).wrapping_mul(7))) as u8
}

fn bytes(number: u64) -> Vec<u8> {
    (0..len(number)).map(|at| byte(number, at)).collect()
}

impl Honest {
    pub fn new(halves: &Halves) -> Self {
        let (client, engine) = halves.map();
        let canary = vec![CANARY; halves.geometry.arena_bytes as usize];
        client.write_arena(0, &canary).unwrap();
        client.header().reads.store(READS_ENDS, Ordering::Relaxed);
        let mut honest = Self {
            client,
            engine,
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            events: ConsumerCursor::new(0),
            send_slots: [(u32::MAX - 2, false); SLOTS as usize],
            receive_slots: [(u32::MAX - 2, false); SLOTS as usize],
            sent: 0,
            ended: 0,
            arrived: 0,
            finishing: false,
        };
        (0..SLOTS).for_each(|slot| honest.provide(slot));
        honest
    }

    /// No more messages.
    pub fn finish(&mut self) {
        self.finishing = true;
    }

    /// Every send has ended.
    pub fn is_done(&self) -> bool {
        self.finishing && self.ended == self.sent && self.arrived == self.sent
    }

    pub fn turn(&mut self) {
        self.read_events();
        let mut free = (0..SLOTS).filter(|slot| !self.send_slots[*slot as usize].1);
        if let Some(slot) = free.next()
            && !self.finishing
            && self.sent < MESSAGES
        {
            self.send(slot);
        }
    }

    fn send(&mut self, slot: u32) {
        let generation = next(&mut self.send_slots[slot as usize]);
        let payload = bytes(self.sent);
        let inline = payload.len() <= INLINE_BYTES && self.sent.is_multiple_of(2);
        let arena_offset = u64::from(slot * BUFFER);
        let token = SendToken {
            generation,
            opcode: Opcode::Send,
            priority: 0,
            flags: if inline { FLAG_INLINE } else { 0 },
            node: NODE,
            port: HONEST,
            len: payload.len() as u32,
            arena_offset,
            tag: self.sent,
            timeout_us: 0,
        };
        let words: &[_; SEND_SLOT_WORDS] = &self.client.send_slots()[slot as usize];
        if inline {
            token.store(words, &payload);
        } else {
            self.client.write_arena(arena_offset, &payload).unwrap();
            token.store(words, &[]);
        }
        let ring = self.client.send_ring(&self.engine);
        assert!(self.sends.free(ring) > 0, "no room for a token we have");
        self.sends
            .stage(ring, &[TokenRef { slot, generation }.encode()]);
        self.sends.publish(ring);
        self.sent += 1;
    }

    fn provide(&mut self, slot: u32) {
        let generation = next(&mut self.receive_slots[slot as usize]);
        let token = ReceiveToken {
            generation,
            priority: 0,
            arena_offset: u64::from((SLOTS + slot) * BUFFER),
            len: BUFFER,
        };
        token.store(&self.client.receive_slots()[slot as usize]);
        let ring = self.client.provide_ring(&self.engine);
        assert!(self.provides.free(ring) > 0, "no room for a token we have");
        self.provides
            .stage(ring, &[TokenRef { slot, generation }.encode()]);
        self.provides.publish(ring);
    }

    fn read_events(&mut self) {
        loop {
            let ring = self.engine.event_ring(&self.client);
            if self.events.available(ring).unwrap() == 0 {
                break;
            }
            let words = self.events.take(ring);
            let event = Event::decode(&words).expect("an event");
            self.events.release(ring);
            match event.kind {
                EventKind::Sent(outcome) => {
                    let first = (event.slot, event.generation);
                    let others = OtherEnds::of(&words).map(|send| (send.slot, send.generation));
                    for (slot, generation) in std::iter::once(first).chain(others) {
                        let slot = &mut self.send_slots[slot as usize];
                        assert_eq!(*slot, (generation, true), "a token that is not out");
                        slot.1 = false;
                        assert_eq!(outcome.certainty, Certainty::Delivered, "{outcome:?}");
                        self.ended += 1;
                    }
                }
                EventKind::Received => self.received(&event),
                EventKind::Offered(_) => panic!("it never asked to be asked"),
            }
        }
    }

    fn received(&mut self, event: &Event) {
        let slot = &mut self.receive_slots[event.slot as usize];
        assert_eq!(*slot, (event.generation, true), "a token that is not out");
        slot.1 = false;
        assert!(event.len <= BUFFER && event.node == NODE);
        if event.port == HONEST {
            assert_eq!(event.tag, self.arrived, "out of order, or twice");
            let mut got = vec![0; event.len as usize];
            let offset = u64::from((SLOTS + event.slot) * BUFFER);
            self.client.read_arena(offset, &mut got).unwrap();
            assert_eq!(got, bytes(self.arrived), "message {}", self.arrived);
            self.arrived += 1;
        } else {
            assert_eq!(event.port, HOSTILE);
        }
        self.provide(event.slot);
    }

    /// Nobody writes where nothing was offered.
    pub fn check_untouched(&self) {
        for slot in 0..SLOTS {
            // The end of a place that never held a message of full length.
            let mut end = vec![0; 1];
            let at = u64::from(slot * BUFFER + BUFFER - 1);
            self.client.read_arena(at, &mut end).unwrap();
            let full = (0..self.sent).any(|n| len(n) == BUFFER && end[0] == byte(n, BUFFER - 1));
            assert!(
                end[0] == CANARY || full,
                "somebody wrote into slot {slot}'s payload"
            );
        }
        let header = self.client.header();
        assert_eq!(
            header.send_producer.load(Ordering::Relaxed),
            self.sends.next()
        );
        assert_eq!(
            header.provide_producer.load(Ordering::Relaxed),
            self.provides.next()
        );
    }
}

/// The slot goes out once more.
fn next(slot: &mut (u32, bool)) -> u32 {
    assert!(!slot.1);
    *slot = (slot.0.wrapping_add(1).max(1), true);
    slot.0
}
