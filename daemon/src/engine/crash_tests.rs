//! Engines that die before any one of their durable stores, and again while their successor restores.
//!
//! A scenario of sends, commands and receives runs over real port halves and a real ledger, with a transport as simple as can be: it
//! numbers sends, and a peer delivers what it gets exactly in number order and repeats what is not acknowledged. At every crash point
//! the engine is killed, its memory handed to a successor, and the scenario goes on. Expect: every send reaches the peer once and ends
//! once, every message reaches the application once and in order.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use portolan_abi::event::{Event, EventKind, Outcome};
use portolan_abi::ledger::LedgerGeometry;
use portolan_abi::memory::{ClientHalf, EngineHalf, LedgerMapping, create_sealed};
use portolan_abi::port::{CloseReason, PortGeometry};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{FLAG_INLINE, Opcode, ReceiveToken, SendToken, TokenRef};
use portolan_transport::host::{Delivery, Durable, Host, SendRequest, SendStatus};
use portolan_transport::ident::{NodeId, PortId, Priority, RecordId, SendId, StreamKey};

use super::commit::tests::dies_at;
use super::host::{EngineHost, Order};
use super::ledger_facts::Facts;
use super::ports::PortParts;
use super::{commit, restore};

const PORT: u16 = 7;
const GENERATION: u32 = 3;
const MESSAGES: u32 = 5;
const SENDS: u32 = 6;
/// Numbers wrap in the middle of the scenario.
const FIRST: u32 = u32::MAX - 2;

fn ledger_geometry() -> LedgerGeometry {
    LedgerGeometry {
        peers: 2,
        send_streams: 4,
        receive_streams: 4,
        frames: 8,
    }
}

fn port_geometry() -> PortGeometry {
    PortGeometry::new(2, 2, 8192).unwrap()
}

/// What survives every death.
struct Memory {
    ledger: OwnedFd,
    client: OwnedFd,
    engine: OwnedFd,
}

impl Memory {
    fn new() -> Self {
        let geometry = port_geometry();
        let memory = Self {
            ledger: LedgerMapping::create(ledger_geometry()).unwrap(),
            client: create_sealed("c", geometry.client_half_bytes()).unwrap(),
            engine: create_sealed("e", geometry.engine_half_bytes()).unwrap(),
        };
        let ledger = LedgerMapping::map(&memory.ledger, ledger_geometry()).unwrap();
        ledger.ledger().initialise(77);
        let (client, engine) = memory.halves();
        client.initialise();
        engine.initialise(1, PORT);
        memory
    }

    fn halves(&self) -> (ClientHalf, EngineHalf) {
        (
            ClientHalf::map(self.client.as_fd(), port_geometry()).unwrap(),
            EngineHalf::map(self.engine.as_fd(), port_geometry(), true).unwrap(),
        )
    }

    fn parts(&self) -> PortParts {
        let bell = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        PortParts {
            port: PORT,
            generation: GENERATION,
            geometry: port_geometry(),
            client: self.client.try_clone().unwrap(),
            engine: self.engine.try_clone().unwrap(),
            event_bell: bell(),
            engine_bell: bell(),
        }
    }

    fn host(&self) -> EngineHost {
        let mapping = LedgerMapping::map(&self.ledger, ledger_geometry()).unwrap();
        let facts = Facts::adopt(Box::leak(Box::new(mapping)).ledger());
        facts.raise_engine_epoch();
        EngineHost::new(facts, 1000)
    }

    /// A new engine, from nothing or from what another left.
    fn take_over(&self) -> (EngineHost, Durable) {
        let mut host = self.host();
        if host.knows(PORT, GENERATION) {
            restore::restore_port(&mut host, self.parts()).unwrap();
        } else {
            host.open_fresh(self.parts()).unwrap();
        }
        let durable = restore::durable(&mut host);
        (host, durable)
    }
}

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
    epochs: BTreeMap<u32, u32>,
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

fn stream() -> StreamKey {
    StreamKey {
        local: PortId(PORT),
        node: NodeId(2),
        remote: PortId(9),
        priority: Priority::Low,
    }
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
            let epoch = host.draw_epoch();
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
            let (_, epoch, _) = self.sending.unwrap();
            *peer.epochs.entry(epoch).or_default() += 1;
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
                len: 8,
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
        if dies_at(point, || world.live()) {
            break;
        }
        world.live();
        world.check(&format!("dead before store {point}"));
        point += 1;
    }
    assert!(point > 80, "only {point} crash points");
}

#[test]
fn a_successor_that_dies_while_it_restores_changes_nothing() {
    for point in 0.. {
        let mut world = World::new();
        if dies_at(point, || world.live()) {
            break;
        }
        for second in 0.. {
            // As many lives as it takes: each dies one store later than the one before it.
            if dies_at(second, || world.live()) {
                break;
            }
        }
        world.check(&format!("dead before store {point}, then once before each"));
    }
}

#[test]
fn a_refusal_ends_the_same_way_after_a_death() {
    for point in 0.. {
        let memory = Memory::new();
        let mut victim = Victim::of(&memory);
        let Some(Order::Refuse(id)) = victim.offer_send(send_token(9, 8, 0, 1), at(0, 1)) else {
            panic!("believed")
        };
        let alive = dies_at(point, || {
            victim.host.finish_locally(id, commit::REFUSED_TOKEN)
        });
        let mut heir = Victim::of(&memory);
        if heir.host.port(PORT).sends_waiting() == 1 {
            // Not accepted yet: the entry is there again, and refused again.
            let Some(Order::Refuse(id)) = heir.host.take_order(PORT, 0) else {
                panic!("point {point}")
            };
            heir.host.finish_locally(id, commit::REFUSED_TOKEN);
        }
        let ring = heir.engine.event_ring(&heir.client);
        assert_eq!(ring.published(), 1, "point {point}");
        let event = Event::decode(&ring.peek(0)).unwrap();
        assert_eq!(event.kind, EventKind::Sent(commit::REFUSED_TOKEN));
        assert_eq!((event.slot, event.generation), (0, 1));
        if alive {
            break;
        }
    }
}

#[test]
fn accepted_numbers_stay_used_across_two_deaths() {
    // Dies between the accept point and {epoch, next}; its successor completes the send and dies before it accepts another.
    for point in 0.. {
        let mut world = World::new();
        if dies_at(point, || world.live()) {
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

fn send_token(opcode: u8, len: u32, offset: u64, generation: u32) -> [u64; 16] {
    let mut words = [0; 16];
    words[0] = u64::from(generation) << 32 | u64::from(opcode);
    words[1] = 2 | 9 << 16 | u64::from(len) << 32;
    words[2] = offset;
    words
}

/// An engine with one open port, whose client half is ours to spoil.
struct Victim {
    host: EngineHost,
    client: ClientHalf,
    engine: EngineHalf,
}

impl Victim {
    fn new() -> Self {
        Self::of(&Memory::new())
    }

    fn of(memory: &Memory) -> Self {
        let (host, _) = memory.take_over();
        let (client, engine) = memory.halves();
        Self {
            host,
            client,
            engine,
        }
    }

    fn offer_send(&mut self, words: [u64; 16], entry: TokenRef) -> Option<Order> {
        if let Some(slot) = self.client.send_slots().get(entry.slot as usize) {
            for (to, from) in slot.iter().zip(words) {
                to.store(from, Ordering::Relaxed);
            }
        }
        let ring = self.client.send_ring(&self.engine);
        let mut cursor = ProducerCursor::new(ring.published());
        cursor.stage(ring, &[entry.encode()]);
        cursor.publish(ring);
        let waiting = self.host.port(PORT).sends_waiting();
        assert_eq!(waiting, 1);
        self.host.take_order(PORT, 0)
    }

    fn offer_receive(&mut self, words: [u64; 4], entry: TokenRef) {
        if let Some(slot) = self.client.receive_slots().get(entry.slot as usize) {
            for (to, from) in slot.iter().zip(words) {
                to.store(from, Ordering::Relaxed);
            }
        }
        let ring = self.client.provide_ring(&self.engine);
        let mut cursor = ProducerCursor::new(ring.published());
        cursor.stage(ring, &[entry.encode()]);
        cursor.publish(ring);
        let ledger = self.host.facts.ledger();
        self.host.port(PORT).take_provided(ledger);
    }

    fn fault(&mut self) -> Option<CloseReason> {
        self.host.port(PORT).fault()
    }
}

fn at(slot: u32, generation: u32) -> TokenRef {
    TokenRef { slot, generation }
}

#[test]
fn send_tokens_whose_content_makes_no_sense_only_fail_themselves() {
    for (what, words) in [
        ("opcode", send_token(9, 8, 0, 1)),
        ("range", send_token(1, 8, 8185, 1)),
        ("range", send_token(1, u32::MAX, 0, 1)),
        ("range", send_token(1, 1, u64::MAX, 1)),
    ] {
        let mut victim = Victim::new();
        let order = victim.offer_send(words, at(0, 1));
        let Some(Order::Refuse(id)) = order else {
            panic!("{what} was believed")
        };
        victim.host.finish_locally(id, commit::REFUSED_TOKEN);
        victim.host.finish_token();
        assert_eq!(victim.fault(), None);
        // The slot is free again, and the ring goes on.
        let order = victim.offer_send(send_token(1, 8, 0, 2), at(0, 2));
        assert!(matches!(order, Some(Order::Send(_))));
        let event = Event::decode(&victim.engine.event_ring(&victim.client).peek(0)).unwrap();
        assert_eq!(event.kind, EventKind::Sent(commit::REFUSED_TOKEN));
    }
}

#[test]
fn entries_and_slots_that_contradict_each_other_close_the_port() {
    for (what, words, entry) in [
        ("no such slot", send_token(1, 8, 0, 1), at(2, 1)),
        ("no such slot", send_token(1, 8, 0, 1), at(u32::MAX, 1)),
        ("another generation", send_token(1, 8, 0, 2), at(0, 1)),
        ("a hole", [0; 16], at(0, 0)),
        ("a hole", [0; 16], at(0, 1)),
    ] {
        let mut victim = Victim::new();
        assert!(victim.offer_send(words, entry).is_none(), "{what}");
        assert_eq!(victim.fault(), Some(CloseReason::BadToken), "{what}");
    }
    // A slot that is under way.
    let mut victim = Victim::new();
    let Some(Order::Send(send)) = victim.offer_send(send_token(1, 8, 0, 1), at(0, 1)) else {
        panic!("refused")
    };
    victim.host.accept(&send, RecordId(0), 1, 1);
    victim.host.finish_token();
    assert!(
        victim
            .offer_send(send_token(1, 8, 0, 2), at(0, 2))
            .is_none()
    );
    assert_eq!(victim.fault(), Some(CloseReason::BadToken));
}

#[test]
fn receive_tokens_that_make_no_sense_close_the_port() {
    for (what, words, entry) in [
        ("no such slot", [1 << 32, 0, 8, 0], at(2, 1)),
        ("generation", [1 << 32, 0, 8, 0], at(0, 2)),
        ("priority", [1 << 32 | 2, 0, 8, 0], at(0, 1)),
        ("range", [1 << 32, 8190, 8, 0], at(0, 1)),
        ("range", [1 << 32, u64::MAX, 8, 0], at(0, 1)),
        ("a hole", [0; 4], at(0, 0)),
    ] {
        let mut victim = Victim::new();
        victim.offer_receive(words, entry);
        assert_eq!(victim.fault(), Some(CloseReason::BadToken), "{what}");
    }
    // The same slot twice.
    let mut victim = Victim::new();
    victim.offer_receive([1 << 32, 0, 8, 0], at(0, 1));
    assert_eq!(victim.fault(), None);
    victim.offer_receive([2 << 32, 0, 8, 0], at(0, 2));
    assert_eq!(victim.fault(), Some(CloseReason::BadToken));
}

#[test]
fn indices_that_jump_close_the_port() {
    for claim in [3, 1000, u32::MAX] {
        let mut victim = Victim::new();
        let header = victim.client.header();
        header.send_producer.store(claim, Ordering::Relaxed);
        assert_eq!(victim.host.port(PORT).sends_waiting(), 0);
        assert_eq!(victim.fault(), Some(CloseReason::RingJump));

        let mut victim = Victim::new();
        let header = victim.client.header();
        header.provide_producer.store(claim, Ordering::Relaxed);
        let ledger = victim.host.facts.ledger();
        victim.host.port(PORT).take_provided(ledger);
        assert_eq!(victim.fault(), Some(CloseReason::RingJump));
    }
}

#[test]
fn stale_names_do_nothing() {
    let mut victim = Victim::new();
    let stale = SendId {
        port: PortId(PORT),
        slot: 0,
        generation: 9,
    };
    victim.host.complete(stale, SendStatus::Delivered);
    assert_eq!(victim.engine.event_ring(&victim.client).published(), 0);
    assert!(victim.host.read_payload(stale, 0, &mut [0; 8]).is_err());
    // Payload beyond the token's end.
    let Some(Order::Send(send)) = victim.offer_send(send_token(1, 8, 0, 1), at(0, 1)) else {
        panic!("refused")
    };
    assert!(victim.host.read_payload(send.id, 0, &mut [0; 8]).is_ok());
    assert!(victim.host.read_payload(send.id, 1, &mut [0; 8]).is_err());
    assert!(
        victim
            .host
            .read_payload(send.id, u32::MAX, &mut [0; 8])
            .is_err()
    );
}

#[test]
fn a_ledger_of_nonsense_closes_its_port_and_nothing_else() {
    for word in [u64::MAX, 1, 1 << 63, 0x0101_0101_0101_0101] {
        let memory = Memory::new();
        drop(memory.take_over());
        let mapping = LedgerMapping::map(&memory.ledger, ledger_geometry()).unwrap();
        let ledger = mapping.ledger();
        for fact in ledger.sends(PORT) {
            for word_of in [
                &fact.tag,
                &fact.destination,
                &fact.arena_offset,
                &fact.stream,
            ] {
                word_of.store(word, Ordering::Relaxed);
            }
        }
        for fact in ledger.receives(PORT) {
            fact.store(word, Ordering::Relaxed);
        }
        for record in ledger.send_streams() {
            record.key.store(word, Ordering::Relaxed);
        }
        for record in ledger.receive_streams() {
            record.key.store(word, Ordering::Relaxed);
        }
        for record in ledger.peers() {
            record.key.store(word, Ordering::Relaxed);
        }
        let (mut host, durable) = memory.take_over();
        // Words that happen to look like a record are believed; whoever wrote them owned the ledger.
        let looks_true = word == 0x0101_0101_0101_0101;
        assert_eq!(host.port(PORT).fault().is_none(), looks_true, "{word:#x}");
        assert!(durable.sends.is_empty());
        assert!(host.open_send_record(stream(), 1, 1, 1).is_ok() || !durable.sending.is_empty());
    }
}
