//! Engines that die before any one of their durable stores, and again while their successor restores.
//!
//! A scenario of sends, commands and receives runs over real port halves and a real ledger, with a transport as simple as can be: it
//! numbers sends, and a peer delivers what it gets exactly in number order and repeats what is not acknowledged. At every crash point
//! the engine is killed, its memory handed to a successor, and the scenario goes on. Expect: every send reaches the peer once and ends
//! once, every message reaches the application once and in order.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Event, EventKind, Outcome};
use portolan_abi::ledger::SendRecord;
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::CloseReason;
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{
    FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY, FLAG_INLINE, Opcode, ReceiveToken, SendToken, TokenRef,
};
use portolan_transport::host::{Delivery, Durable, Host, NoBuffer, SendRequest, SendStatus};
use portolan_transport::ident::{PortId, Priority, RecordId};
use portolan_transport::policy::AckMode;

use super::super::commit;
use super::super::commit_point::dies_at;
use super::super::host::{EngineHost, Order};
use super::{Memory, PORT, stream};

const MESSAGES: u32 = 5;
const SENDS: u32 = 6;
/// Numbers wrap in the middle of the scenario.
const FIRST: u32 = u32::MAX - 2;

/// The application: follows the rules, and notices when somebody else does not.
struct Application {
    client: ClientHalf,
    engine: EngineHalf,
    sends: ProducerCursor,
    provides: ProducerCursor,
    events: ConsumerCursor,
    send_generations: [(u32, bool); 2],
    receive_generations: [(u32, bool); 2],
    sent: u32,
    ended: u32,
    received: Vec<u64>,
}

impl Application {
    fn new(memory: &Memory) -> Self {
        let (client, engine) = memory.halves();
        Self {
            client,
            engine,
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            events: ConsumerCursor::new(0),
            send_generations: [(0, false); 2],
            receive_generations: [(0, false); 2],
            sent: 0,
            ended: 0,
            received: Vec::new(),
        }
    }

    fn act(&mut self) {
        self.take_events();
        for slot in 0..2u32 {
            let (generation, out) = &mut self.receive_generations[slot as usize];
            if !*out {
                (*generation, *out) = (*generation + 1, true);
                ReceiveToken {
                    generation: *generation,
                    priority: 0,
                    arena_offset: u64::from(slot) * 64,
                    len: 64,
                }
                .store(&self.client.receive_slots()[slot as usize]);
                let entry = TokenRef {
                    slot,
                    generation: *generation,
                };
                let ring = self.client.provide_ring(&self.engine);
                self.provides.stage(ring, &[entry.encode()]);
                self.provides.publish(ring);
            }
        }
        for slot in 0..2u32 {
            let (generation, out) = &mut self.send_generations[slot as usize];
            if !*out && self.sent < SENDS {
                (*generation, *out) = (*generation + 1, true);
                self.sent += 1;
                // Every third is a command.
                let opcode = if self.sent.is_multiple_of(3) {
                    Opcode::ResumeSending
                } else {
                    Opcode::Send
                };
                SendToken {
                    generation: *generation,
                    opcode,
                    priority: 0,
                    flags: FLAG_INLINE,
                    node: 2,
                    port: 9,
                    len: 8,
                    arena_offset: 0,
                    tag: u64::from(self.sent),
                    timeout_us: 0,
                }
                .store(&self.client.send_slots()[slot as usize], &[1; 8]);
                let entry = TokenRef {
                    slot,
                    generation: *generation,
                };
                let ring = self.client.send_ring(&self.engine);
                self.sends.stage(ring, &[entry.encode()]);
                self.sends.publish(ring);
            }
        }
    }

    fn take_events(&mut self) {
        let ring = self.engine.event_ring(&self.client);
        for _ in 0..self.events.available(ring).unwrap() {
            let event = Event::decode(&self.events.take(ring)).expect("an event");
            let table = match event.kind {
                EventKind::Sent(end) => {
                    let delivered = Outcome {
                        certainty: portolan_abi::event::Certainty::Delivered,
                        reason: 0,
                    };
                    assert_eq!(end, delivered);
                    self.ended += 1;
                    &mut self.send_generations
                }
                EventKind::Received => {
                    self.received.push(event.tag);
                    &mut self.receive_generations
                }
                EventKind::Offered(_) => panic!("nobody wants to be asked"),
            };
            let token = &mut table[event.slot as usize];
            assert_eq!(
                *token,
                (event.generation, true),
                "a token ended twice: {event:?}"
            );
            token.1 = false;
        }
        self.events.release(ring);
    }
}

/// The other end of the wire. Survives every engine.
#[derive(Default)]
struct Peer {
    /// Our sends as the peer delivered them.
    delivered: Vec<u64>,
    next: u32,
    /// What we acknowledged of its messages.
    acknowledged: u32,
}

impl Peer {
    fn new() -> Self {
        Self {
            next: FIRST,
            acknowledged: FIRST,
            ..Self::default()
        }
    }
}

/// A transport as simple as can be; dies with its engine.
struct Transport {
    sending: Option<(RecordId, u32, u32)>,
    pending: Vec<(SendRequest, u32)>,
    receiving: Option<(RecordId, u32, u32)>,
}

impl Transport {
    fn restore(durable: &Durable) -> Self {
        let mut pending: Vec<_> = (durable.sends.iter())
            .map(|send| (send.request, send.number))
            .collect();
        pending.sort_by_key(|(_, number)| number.wrapping_sub(FIRST));
        assert!(durable.sending.len() <= 1 && durable.receiving.len() <= 1);
        Self {
            sending: (durable.sending.first()).map(|s| (s.record, s.epoch, s.next)),
            pending,
            receiving: (durable.receiving.first()).map(|s| {
                assert!(!s.closed);
                (s.record, s.epoch, s.base)
            }),
        }
    }

    fn round(&mut self, host: &mut EngineHost, peer: &mut Peer) {
        let ledger = host.facts.ledger();
        host.port(PORT).take_provided(ledger);
        for _ in 0..host.port(PORT).sends_waiting() {
            match host.take_order(PORT, 0).expect("a token that makes sense") {
                Order::Send(send) => self.submit(host, &send),
                Order::Resume(id, _) => host.finish_locally(id, commit::DONE),
                _ => panic!("not in this scenario"),
            }
            host.finish_token();
        }
        self.send_pending(host, peer);
        self.receive_one(host, peer);
    }

    fn submit(&mut self, host: &mut EngineHost, send: &SendRequest) {
        let (record, epoch, next) = self.sending.unwrap_or_else(|| {
            let epoch = host.draw_epoch(0);
            let record = host.open_send_record(send.stream, 5, epoch, FIRST).unwrap();
            (record, epoch, FIRST)
        });
        host.accept(send, record, epoch, next);
        self.sending = Some((record, epoch, next.wrapping_add(1)));
        self.pending.push((*send, next));
    }

    fn send_pending(&mut self, host: &mut EngineHost, peer: &mut Peer) {
        for (send, number) in std::mem::take(&mut self.pending) {
            let mut payload = [0; 8];
            host.read_payload(send.id, 0, &mut payload).unwrap();
            assert_eq!(payload, [1; 8]);
            // The peer delivers what is next, acknowledges what is past, and never sees a gap.
            match number.wrapping_sub(peer.next) as i32 {
                0 => {
                    peer.delivered.push(send.tag);
                    peer.next = peer.next.wrapping_add(1);
                }
                past if past < 0 => {}
                gap => panic!("a gap of {gap} numbers: one was lost"),
            }
            host.complete(send.id, SendStatus::Delivered);
        }
    }

    fn receive_one(&mut self, host: &mut EngineHost, peer: &mut Peer) {
        let number = peer.acknowledged;
        if number == FIRST.wrapping_add(MESSAGES) {
            return;
        }
        let (record, epoch, base) = self.receiving.unwrap_or_else(|| {
            let record = host.open_receive_record(stream(), 5, 40, FIRST).unwrap();
            (record, 40, FIRST)
        });
        self.receiving = Some((record, epoch, base));
        if number == base {
            let Ok(buffer) = host.claim(PortId(PORT), Priority::Low, 8) else {
                return;
            };
            host.write_payload(buffer, 0, &number.to_le_bytes())
                .unwrap();
            host.commit(&Delivery {
                buffer,
                stream: stream(),
                record,
                epoch,
                number,
                base: number.wrapping_add(1),
                bits: 0,
                len: 8,
                total: 8,
                tag: u64::from(number),
            })
            .unwrap();
            self.receiving = Some((record, epoch, number.wrapping_add(1)));
        }
        // The acknowledgement is read from the ledger.
        let fact = &host.facts.ledger().receive_streams()[record.0 as usize];
        peer.acknowledged = fact.base.load(Ordering::Acquire) as u32;
    }
}

struct World {
    memory: Memory,
    application: Application,
    peer: Peer,
}

impl World {
    fn new() -> Self {
        let memory = Memory::new();
        let application = Application::new(&memory);
        Self {
            memory,
            application,
            peer: Peer::new(),
        }
    }

    /// One engine's life, to the end of the scenario unless it dies.
    fn live(&mut self) {
        let (mut host, durable) = self.memory.take_over();
        assert!(host.port(PORT).fault().is_none());
        let mut transport = Transport::restore(&durable);
        for _ in 0..20 {
            self.application.act();
            transport.round(&mut host, &mut self.peer);
            assert_eq!(host.port(PORT).fault(), None);
        }
        self.application.act();
    }

    fn check(&self, what: &str) {
        let application = &self.application;
        assert_eq!(
            self.peer.delivered,
            [1, 2, 4, 5],
            "{what}: each send once, in order"
        );
        assert_eq!(application.ended, SENDS, "{what}: each token ends once");
        let numbers: Vec<u64> = (0..MESSAGES)
            .map(|i| u64::from(FIRST.wrapping_add(i)))
            .collect();
        assert_eq!(
            application.received, numbers,
            "{what}: each message once, in order"
        );
    }
}

#[test]
fn an_engine_that_dies_between_any_two_stores_loses_and_doubles_nothing() {
    let mut undisturbed = World::new();
    undisturbed.live();
    undisturbed.check("undisturbed");
    let mut point = 0;
    loop {
        let mut world = World::new();
        let Some(store) = dies_at(point, || world.live()) else {
            break;
        };
        world.live();
        world.check(&format!("dead before {store:?}, store {point}"));
        point += 1;
    }
    assert!(point > 80, "only {point} crash points");
}

#[test]
fn a_successor_that_dies_while_it_restores_changes_nothing() {
    for point in 0.. {
        let mut world = World::new();
        let Some(store) = dies_at(point, || world.live()) else {
            break;
        };
        for second in 0.. {
            // As many lives as it takes: each dies one store later than the one before it.
            if dies_at(second, || world.live()).is_none() {
                break;
            }
        }
        world.check(&format!(
            "dead before {store:?}, store {point}, then once before each"
        ));
    }
}

#[test]
fn accepted_numbers_stay_used_across_two_deaths() {
    // Dies between the accept point and {epoch, next}; its successor completes the send and dies before it accepts another.
    for point in 0.. {
        let mut world = World::new();
        if dies_at(point, || world.live()).is_none() {
            break;
        }
        let (mut host, durable) = world.memory.take_over();
        for send in &durable.sends {
            host.complete(send.request.id, SendStatus::Delivered);
        }
        drop(host);
        let (_, again) = world.memory.take_over();
        assert!(again.sends.is_empty());
        for send in &durable.sends {
            let next = again.sending[0].next;
            assert!((next.wrapping_sub(send.number) as i32) > 0, "point {point}");
        }
    }
}

/// A memory in which an engine accepted this token of slot 0 and died.
fn with_accepted(token: &SendToken) -> Memory {
    let memory = Memory::new();
    let application = Application::new(&memory);
    token.store(&application.client.send_slots()[0], &[1; 8]);
    let entry = TokenRef {
        slot: 0,
        generation: token.generation,
    };
    let ring = application.client.send_ring(&application.engine);
    let mut cursor = ProducerCursor::new(0);
    cursor.stage(ring, &[entry.encode()]);
    cursor.publish(ring);
    let (mut host, durable) = memory.take_over();
    assert_eq!(host.port(PORT).sends_waiting(), 1);
    let Some(Order::Send(send)) = host.take_order(PORT, 0) else {
        panic!("refused")
    };
    Transport::restore(&durable).submit(&mut host, &send);
    memory
}

fn high_send(flags: u8) -> SendToken {
    SendToken {
        generation: 1,
        opcode: Opcode::Send,
        priority: 1,
        flags: flags | FLAG_INLINE,
        node: 2,
        port: 9,
        len: 8,
        arena_offset: 0,
        tag: 1,
        timeout_us: 0,
    }
}

// Sends of every acknowledgement mode, and an engine that dies with them. Expect: its successor sends them in the same mode.
#[test]
fn how_a_send_is_acknowledged_survives_its_engine() {
    let modes = [
        (0, AckMode::Policy),
        (FLAG_ACK_IMMEDIATE, AckMode::Immediate),
        (FLAG_ACK_LAZY, AckMode::Lazy),
    ];
    for (flags, mode) in modes {
        let (_, durable) = with_accepted(&high_send(flags)).take_over();
        assert_eq!(durable.sends.len(), 1);
        assert_eq!(durable.sends[0].request.ack, mode);
        assert_eq!(durable.sends[0].request.stream.priority, Priority::High);
        assert!(durable.sends[0].request.deadline > 0);
    }
}

// An engine that went wrong accepted something else than was ordered: another priority, receiver, length, tag. Expect: its successor gives that up at
// once. What the application has written over since is its own affair.
#[test]
fn a_send_that_nobody_ordered_is_over() {
    let damages: [fn(&SendRecord); 4] = [
        |fact| _ = fact.stream.fetch_and(!(0xff << 32), Ordering::Relaxed),
        |fact| _ = fact.destination.fetch_xor(1 << 16, Ordering::Relaxed),
        |fact| _ = fact.destination.fetch_sub(1 << 32, Ordering::Relaxed),
        |fact| _ = fact.message_tag.fetch_xor(1, Ordering::Relaxed),
    ];
    for (which, damage) in damages.iter().enumerate() {
        let memory = with_accepted(&high_send(0));
        let (host, _) = memory.take_over();
        let fact = &host.facts.ledger().sends(PORT)[0];
        damage(fact);
        let (_, durable) = memory.take_over();
        assert_eq!(durable.sends.len(), 1, "damage {which}");
        assert_eq!(durable.sends[0].request.deadline, 0, "damage {which}");
    }
    let memory = with_accepted(&high_send(0));
    let other = SendToken {
        generation: 2,
        tag: 2,
        ..high_send(0)
    };
    other.store(&Application::new(&memory).client.send_slots()[0], &[2; 8]);
    let (_, durable) = memory.take_over();
    assert!(durable.sends[0].request.deadline > 0);
}

// An engine closed a port for cause and died before the supervisor heard of it. Expect: its successor does not open it again, takes no
// token of it, and gives its receive tokens to nobody: the application has had its memory back.
#[test]
fn a_port_that_was_told_closed_stays_closed() {
    let memory = Memory::new();
    let mut application = Application::new(&memory);
    let (mut host, _) = memory.take_over();
    application.act();
    let ledger = host.facts.ledger();
    host.port(PORT).take_provided(ledger);
    host.port(PORT).close(CloseReason::RingJump);
    drop(host);
    let (mut host, durable) = memory.take_over();
    assert_eq!(host.port(PORT).fault(), Some(CloseReason::RingJump));
    assert!(durable.sends.is_empty());
    let claimed = host.claim(PortId(PORT), Priority::Low, 1);
    assert_eq!(claimed, Err(NoBuffer::PortClosed));
    let (_, engine) = memory.halves();
    let word = engine.header().state.load(Ordering::Acquire);
    assert_eq!(word as u32, portolan_abi::port::state::CLOSED);
}

// An engine dies while it works on a token, and so does its successor, over the same one. Expect: the third closes the port for poison
// without touching it; between the deaths the token is tried again like any other.
#[test]
fn a_token_that_killed_two_engines_closes_its_port() {
    let memory = Memory::new();
    let mut application = Application::new(&memory);
    application.act();
    for expected in [None, None, Some(CloseReason::Poison)] {
        let (mut host, _) = memory.take_over();
        host.suspect_last_token();
        assert_eq!(host.port(PORT).sends_waiting(), 2);
        let order = host.take_order(PORT, 0);
        assert_eq!(host.port(PORT).fault(), expected);
        assert_eq!(order.is_none(), expected.is_some());
        // It dies here.
    }
}
