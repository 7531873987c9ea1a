//! Messages one way, as many at a time as wanted, each part of their way by itself: what a count of instructions asks for.
//!
//! Nothing lies between the parts: what one engine writes the other is handed as it is, and the applications only keep the engines busy.
//! A [`Meter`] is told which part runs.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Certainty, Event, EventKind, OtherEnds};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::{PortGeometry, READS_ENDS};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{FLAG_INLINE, INLINE_BYTES, Opcode, ReceiveToken, SendToken, TokenRef};
use portolan_transport::policy::Profile;

use super::memory::{Memory, PORT, geometry};
use super::{Engine, TakeOver};
use crate::engine::crossing::SLOT_BYTES;

/// Virtual time of a turn of both.
const TURN: u64 = 1_000;
/// Turns of both engines within which messages arrive.
const PATIENCE: u32 = 10_000;

/// Part of a message's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The sender's engine takes tokens and writes frames.
    TokenToFrame,
    /// The receiver's engine takes frames and writes events.
    FrameToEvent,
    /// The receiver's engine takes the buffers its application offers.
    Buffers,
    /// The receiver's engine writes acknowledgements and grants.
    Answer,
    /// The sender's engine takes them and ends sends.
    AnswerToEvent,
}

/// Is told what runs.
pub trait Meter {
    /// Runs a part.
    fn run<R>(&mut self, part: Part, body: impl FnOnce() -> R) -> R;
}

/// Two nodes' memories.
pub struct StreamMemories {
    from: Memory,
    to: Memory,
}

impl StreamMemories {
    /// For so many messages at a time, a power of two, of so many bytes.
    pub fn new(at_a_time: u32, bytes: u32) -> Self {
        let port = geometry(at_a_time, bytes.next_multiple_of(4096).max(4096));
        Self {
            from: Memory::with(1, port),
            to: Memory::with(2, port),
        }
    }
}

/// Both ends of a stream.
pub struct Stream {
    sender: Engine,
    receiver: Engine,
    from: Desk,
    to: Desk,
    now: u64,
    room: Vec<u8>,
    bytes: u32,
}

impl Stream {
    /// Of messages of so many bytes, as many at a time as the memories were made for.
    pub fn new(memories: &StreamMemories, bytes: u32) -> Self {
        let engine = |memory: &Memory| {
            memory.empty();
            let take_over = TakeOver {
                port: Some(1),
                now: 1,
                policy: Profile::Default.policy(),
            };
            take_over.run(memory)
        };
        Self {
            sender: engine(&memories.from),
            receiver: engine(&memories.to),
            from: Desk::new(&memories.from),
            to: Desk::new(&memories.to),
            now: 1_000_000,
            room: vec![0; SLOT_BYTES],
            bytes,
        }
    }

    /// Counters of both ends that tell of another way than the straight one.
    pub fn detours(&self) -> u64 {
        let names = ["retransmits", "no_buffer", "out_of_order", "timeouts"];
        let ends = [&self.sender, &self.receiver];
        let all = names.map(|name| ends.map(|end| end.counter(name)));
        all.as_flattened().iter().sum()
    }

    /// As many messages as there are tokens, until all have arrived and ended.
    pub fn round(&mut self, meter: &mut impl Meter) {
        self.to.provide();
        self.from.send(self.bytes);
        for _ in 0..PATIENCE {
            self.now += TURN;
            // Buffers first: a message that finds none takes another way.
            let mut worked = self.one_way(meter, Way::Back);
            worked |= self.one_way(meter, Way::There);
            self.to.take_events();
            self.from.take_events();
            if !self.from.is_waiting() && !self.to.is_waiting() {
                return;
            }
            if !worked {
                let due = [&self.sender, &self.receiver].map(Engine::due_at);
                let due = due.into_iter().flatten().min();
                self.now = due.unwrap_or(self.now).max(self.now);
            }
        }
        panic!("nothing comes of it");
    }

    /// One engine does what it can, and the other hears of it.
    fn one_way(&mut self, meter: &mut impl Meter, way: Way) -> bool {
        let now = self.now;
        let (speaker, hearer) = match way {
            Way::There => (&mut self.sender, &mut self.receiver),
            Way::Back => (&mut self.receiver, &mut self.sender),
        };
        let (serves, speaks, hears) = match way {
            Way::There => (Part::TokenToFrame, Part::TokenToFrame, Part::FrameToEvent),
            Way::Back => (Part::Buffers, Part::Answer, Part::AnswerToEvent),
        };
        let mut worked = meter.run(serves, || speaker.serve(now));
        while worked && meter.run(serves, || speaker.serve(now)) {}
        worked |= meter.run(speaks, || speaker.timers(now));
        while let Some(len) = meter.run(speaks, || speaker.speak(now, &mut self.room)) {
            worked = true;
            let frame = &self.room[..len];
            meter.run(hears, || hearer.hear(now, frame));
        }
        meter.run(hears, || hearer.ring());
        worked
    }
}

#[derive(Clone, Copy)]
enum Way {
    There,
    Back,
}

/// An application that gives all it has and believes everything.
struct Desk {
    client: ClientHalf,
    engine: EngineHalf,
    port: PortGeometry,
    peer: u16,
    sends: ProducerCursor,
    provides: ProducerCursor,
    events: ConsumerCursor,
    /// Of all slots.
    generation: u32,
    provided: u32,
    /// Sends and buffers that have not come back in this round.
    out: u32,
}

impl Desk {
    fn new(memory: &Memory) -> Self {
        let (client, engine) = memory.halves();
        client.header().reads.store(READS_ENDS, Ordering::Relaxed);
        Self {
            port: client.geometry(),
            client,
            engine,
            peer: 3 - memory.node(),
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            events: ConsumerCursor::new(0),
            generation: 0,
            provided: 0,
            out: 0,
        }
    }

    fn is_waiting(&self) -> bool {
        self.out > 0
    }

    /// Where a slot's bytes are.
    fn place(&self, slot: u32) -> (u64, u32) {
        let each = self.port.arena_bytes / u64::from(2 * self.port.send_tokens);
        (u64::from(slot) * each, each as u32)
    }

    /// Every token at once.
    fn send(&mut self, len: u32) {
        self.generation = self.generation.wrapping_add(1).max(1);
        let (generation, inline) = (self.generation, len as usize <= INLINE_BYTES);
        let bytes = vec![7; INLINE_BYTES.min(len as usize)];
        let ring = self.client.send_ring(&self.engine);
        for slot in 0..self.port.send_tokens {
            let token = SendToken {
                generation,
                opcode: Opcode::Send,
                priority: 0,
                flags: if inline { FLAG_INLINE } else { 0 },
                node: self.peer,
                port: PORT,
                len,
                arena_offset: self.place(slot).0,
                // All alike, as one application sends them.
                tag: 7,
                timeout_us: 0,
            };
            let inlined: &[u8] = if inline { &bytes } else { &[] };
            token.store(&self.client.send_slots()[slot as usize], inlined);
            self.sends
                .stage(ring, &[TokenRef { slot, generation }.encode()]);
        }
        self.sends.publish(ring);
        self.out = self.port.send_tokens;
    }

    /// Every buffer at once.
    fn provide(&mut self) {
        self.provided = self.provided.wrapping_add(1).max(1);
        let generation = self.provided;
        let ring = self.client.provide_ring(&self.engine);
        for slot in 0..self.port.receive_tokens {
            let (arena_offset, len) = self.place(self.port.send_tokens + slot);
            let token = ReceiveToken {
                generation,
                priority: 0,
                arena_offset,
                len,
            };
            token.store(&self.client.receive_slots()[slot as usize]);
            self.provides
                .stage(ring, &[TokenRef { slot, generation }.encode()]);
        }
        self.provides.publish(ring);
        self.out = self.port.receive_tokens;
    }

    fn take_events(&mut self) {
        let ring = self.engine.event_ring(&self.client);
        for _ in 0..self.events.available(ring).unwrap() {
            let words = self.events.take(ring);
            let event = Event::decode(&words).expect("an event");
            if let EventKind::Sent(end) = event.kind {
                assert_eq!(end.certainty, Certainty::Delivered);
                self.out -= OtherEnds::of(&words).count() as u32;
            }
            self.out -= 1;
        }
        self.events.release(ring);
    }
}
