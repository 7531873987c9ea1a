//! Messages the application is asked about: engines that die at any store between offer, question, answer and commit; applications that
//! answer what was not asked, twice, absurdly, or not at all.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use portolan_abi::event::{Event, EventKind};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::EVENT_RESERVE;
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{AnswerToken, ReceiveToken, TokenRef, Verdict as Wanted};
use portolan_transport::host::{Delivery, Durable, Host, Offer, Verdict, after_commit};
use portolan_transport::ident::{BufferId, PortId, Priority, RecordId};

use super::super::commit;
use super::super::commit_point::dies_at;
use super::super::host::{EngineHost, Order};
use super::{Memory, PORT, stream};

/// Numbers wrap in the middle of the scenario.
const FIRST: u32 = u32::MAX - 2;
const MESSAGES: u32 = 6;
const TOTAL: u32 = 48;
const EPOCH: u32 = 40;
const INCARNATION: u64 = 9 << 32 | 5;

/// What the application says to message number `number`, and how many bytes it gets.
fn wish(number: u32) -> (Wanted, u32) {
    match number.wrapping_sub(FIRST) % 3 {
        0 => (Wanted::Accept, TOTAL),
        1 => (Wanted::Shorten, 20),
        _ => (Wanted::Refuse, 0),
    }
}

/// An application that asks before every message and remembers, as the library does, what it answered.
pub(super) struct Application {
    client: ClientHalf,
    engine: EngineHalf,
    sends: ProducerCursor,
    provides: ProducerCursor,
    events: ConsumerCursor,
    pub(super) slots: [(u32, bool); 2],
    buffer: (u32, bool),
    due: Vec<AnswerToken>,
    /// How often each message was asked about.
    asked: BTreeMap<u32, u32>,
    /// Number and length of what came.
    received: Vec<(u32, u32)>,
}

impl Application {
    fn new(memory: &Memory) -> Self {
        let (client, engine) = memory.halves();
        client.header().ask_first.store(1, Ordering::Relaxed);
        Self {
            client,
            engine,
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            events: ConsumerCursor::new(0),
            slots: [(0, false); 2],
            buffer: (0, false),
            due: Vec::new(),
            asked: BTreeMap::new(),
            received: Vec::new(),
        }
    }

    fn act(&mut self) {
        self.take_events();
        if !self.buffer.1 {
            self.buffer = (self.buffer.0 + 1, true);
            self.provide(0, self.buffer.0);
        }
        for slot in 0..2 {
            if !self.slots[slot].1
                && let Some(answer) = self.due.pop()
            {
                self.push(slot as u32, &answer);
            }
        }
    }

    pub(super) fn provide(&mut self, slot: u32, generation: u32) {
        let token = ReceiveToken {
            generation,
            priority: 0,
            arena_offset: 0,
            len: TOTAL,
        };
        token.store(&self.client.receive_slots()[slot as usize]);
        let ring = self.client.provide_ring(&self.engine);
        self.provides
            .stage(ring, &[TokenRef { slot, generation }.encode()]);
        self.provides.publish(ring);
    }

    pub(super) fn push(&mut self, slot: u32, answer: &AnswerToken) {
        let (generation, out) = &mut self.slots[slot as usize];
        (*generation, *out) = (*generation + 1, true);
        let entry = TokenRef {
            slot,
            generation: *generation,
        };
        let token = answer.token(entry.generation);
        token.store(&self.client.send_slots()[slot as usize], &[]);
        let ring = self.client.send_ring(&self.engine);
        self.sends.stage(ring, &[entry.encode()]);
        self.sends.publish(ring);
    }

    /// The next event, if there is one.
    fn take_event(&mut self) -> Option<Event> {
        let ring = self.engine.event_ring(&self.client);
        if self.events.available(ring).unwrap() == 0 {
            return None;
        }
        let event = Event::decode(&self.events.take(ring)).expect("an event");
        self.events.release(ring);
        Some(event)
    }

    pub(super) fn take_events(&mut self) {
        while let Some(event) = self.take_event() {
            match event.kind {
                EventKind::Sent(end) => {
                    assert_eq!(end, commit::DONE);
                    let slot = &mut self.slots[event.slot as usize];
                    assert_eq!(*slot, (event.generation, true), "ended twice");
                    slot.1 = false;
                }
                EventKind::Received => {
                    assert_eq!(self.buffer, (event.generation, true), "came twice");
                    assert_eq!(event.total, TOTAL);
                    self.buffer.1 = false;
                    self.received.push((event.number, event.len));
                }
                EventKind::Offered(offered) => {
                    assert_eq!(offered.incarnation, INCARNATION as u32);
                    assert_eq!(&offered.first[..8], &event.tag.to_le_bytes());
                    assert_eq!((event.total, event.len), (TOTAL, 16));
                    *self.asked.entry(event.number).or_default() += 1;
                    self.due.insert(0, answer_to(&event));
                }
            }
        }
    }
}

fn answer_to(event: &Event) -> AnswerToken {
    let (verdict, len) = wish(event.number);
    AnswerToken {
        from: (event.node, event.port),
        priority: event.priority,
        incarnation: INCARNATION as u32,
        epoch: event.epoch,
        number: event.number,
        verdict,
        len,
    }
}

/// What the peer offers for number `number`.
fn offer(record: RecordId, number: u32, first: &[u8]) -> Offer<'_> {
    Offer {
        stream: stream(),
        record,
        epoch: EPOCH,
        number,
        total: TOTAL,
        tag: u64::from(number),
        first,
    }
}

/// The commit of number `number`, the next one, whole.
fn delivery(buffer: BufferId, record: RecordId, number: u32) -> Delivery {
    let (base, bits) = after_commit(number, 0, number, false);
    Delivery {
        buffer,
        stream: stream(),
        record,
        epoch: EPOCH,
        number,
        base,
        bits,
        len: TOTAL,
        total: TOTAL,
        tag: u64::from(number),
    }
}

fn first_bytes(number: u32) -> [u8; 16] {
    let tag = u64::from(number).to_le_bytes();
    std::array::from_fn(|i| tag[i % 8])
}

/// The engine's transport: offers the message at base until it is decided. Dies with its engine.
struct Transport {
    record: Option<RecordId>,
    base: u32,
}

impl Transport {
    fn restore(durable: &Durable) -> Self {
        assert!(durable.receiving.len() <= 1);
        let stream = durable.receiving.first();
        Self {
            record: stream.map(|s| s.record),
            base: stream.map_or(FIRST, |s| s.base),
        }
    }

    fn round(&mut self, host: &mut EngineHost) {
        let ledger = host.facts.ledger();
        host.port(PORT).take_provided(ledger);
        for _ in 0..host.port(PORT).sends_waiting() {
            let Some(Order::Answer(id, answer)) = host.take_order(PORT, 0) else {
                panic!("only answers in this scenario")
            };
            host.port(PORT).questions.answer(&answer);
            host.finish_locally(id, commit::DONE);
            host.finish_token();
        }
        if self.base != FIRST.wrapping_add(MESSAGES) {
            self.receive(host);
        }
    }

    fn receive(&mut self, host: &mut EngineHost) {
        let record = *self.record.get_or_insert_with(|| {
            let incarnation = INCARNATION;
            host.open_receive_record(stream(), incarnation, EPOCH, FIRST)
                .unwrap()
        });
        let number = self.base;
        let first = first_bytes(number);
        let len = match host.offer(&offer(record, number, &first)) {
            Verdict::Undecided => return,
            Verdict::Accept => TOTAL,
            Verdict::Shorten(len) => len,
            Verdict::Refuse => {
                let (base, bits) = after_commit(number, 0, number, false);
                host.commit_base(record, EPOCH, base, bits);
                self.base = base;
                return;
            }
        };
        let Ok(buffer) = host.claim(PortId(PORT), Priority::Low, len) else {
            return;
        };
        let delivery = Delivery {
            len,
            ..delivery(buffer, record, number)
        };
        host.commit(&delivery).unwrap();
        self.base = delivery.base;
    }
}

struct World {
    memory: Memory,
    application: Application,
}

impl World {
    fn new() -> Self {
        let memory = Memory::new();
        let application = Application::new(&memory);
        Self {
            memory,
            application,
        }
    }

    /// One engine's life, to the end of the scenario unless it dies.
    fn live(&mut self) {
        let (mut host, durable) = self.memory.take_over();
        let mut transport = Transport::restore(&durable);
        for _ in 0..6 * MESSAGES {
            self.application.act();
            transport.round(&mut host);
            assert_eq!(host.port(PORT).fault(), None);
        }
        self.application.act();
        assert_eq!(transport.base, FIRST.wrapping_add(MESSAGES));
    }

    fn check(&self, what: &str, deaths: u32) {
        let application = &self.application;
        let numbers = (0..MESSAGES).map(|i| FIRST.wrapping_add(i));
        let wanted: Vec<(u32, u32)> = numbers
            .clone()
            .filter(|number| wish(*number).0 != Wanted::Refuse)
            .map(|number| (number, wish(number).1))
            .collect();
        assert_eq!(
            application.received, wanted,
            "{what}: each as it was asked for, once"
        );
        for number in numbers {
            let asked = application.asked[&number];
            assert!(
                (1..=1 + deaths).contains(&asked),
                "{what}: {number} asked {asked} times"
            );
        }
    }
}

// Accepted, shortened and refused messages in turn. The engine dies before any one store of it. Expect: who is not decided is asked
// about again, at most once per death; every message comes once, or is refused once, as the application said.
#[test]
fn an_engine_that_dies_between_offer_and_commit_asks_again_and_keeps_to_the_answer() {
    let mut undisturbed = World::new();
    undisturbed.live();
    undisturbed.check("undisturbed", 0);
    let (mut point, mut repeated) = (0, 0);
    loop {
        let mut world = World::new();
        let Some(store) = dies_at(point, || world.live()) else {
            break;
        };
        world.live();
        world.check(&format!("dead before {store:?}, store {point}"), 1);
        repeated += u32::from(world.application.asked.values().any(|asked| *asked > 1));
        point += 1;
    }
    assert!(point > 60, "only {point} crash points");
    assert!(repeated > 10, "asked again after {repeated} deaths only");
}

/// An engine with an open port and a stream, and its application.
pub(super) struct Scene {
    memory: Memory,
    pub(super) host: EngineHost,
    pub(super) application: Application,
    record: RecordId,
}

impl Scene {
    pub(super) fn new() -> Self {
        let memory = Memory::new();
        let application = Application::new(&memory);
        let (mut host, _) = memory.take_over();
        let record = host
            .open_receive_record(stream(), INCARNATION, EPOCH, 0)
            .unwrap();
        Self {
            memory,
            host,
            application,
            record,
        }
    }

    pub(super) fn offer(&mut self, number: u32) -> Verdict {
        let first = first_bytes(number);
        self.host.offer(&offer(self.record, number, &first))
    }

    fn answer(&mut self, answer: &AnswerToken) -> bool {
        let stream = self.host.port(PORT).questions.answer(answer);
        assert!(stream.is_none_or(|s| s == super::stream()));
        stream.is_some()
    }

    pub(super) fn answered(&self, number: u32, verdict: Wanted, len: u32) -> AnswerToken {
        AnswerToken {
            from: (2, 9),
            priority: 0,
            incarnation: INCARNATION as u32,
            epoch: EPOCH,
            number,
            verdict,
            len,
        }
    }

    /// Entries of the event ring the application has not read.
    fn unread(&self) -> u32 {
        let ring = self.application.engine.event_ring(&self.application.client);
        ring.published().wrapping_sub(ring.consumed())
    }
}

// Answers that no question asked for: another message, stream, epoch or incarnation; the same twice; lengths beyond the message. Expect:
// ignored, the first answer stays, and no length is longer than the message.
#[test]
fn only_the_first_answer_to_an_open_question_counts() {
    let mut scene = Scene::new();
    assert!(
        !scene.answer(&scene.answered(5, Wanted::Refuse, 0)),
        "never asked"
    );
    assert_eq!(scene.offer(5), Verdict::Undecided);
    let right = scene.answered(5, Wanted::Shorten, 7);
    let wrong = [
        AnswerToken { number: 6, ..right },
        AnswerToken { epoch: 41, ..right },
        AnswerToken {
            incarnation: 6,
            ..right
        },
        AnswerToken {
            priority: 1,
            ..right
        },
        AnswerToken {
            from: (2, 8),
            ..right
        },
        AnswerToken {
            from: (3, 9),
            ..right
        },
    ];
    for wrong in wrong {
        assert!(!scene.answer(&wrong), "{wrong:?}");
        assert_eq!(scene.offer(5), Verdict::Undecided);
    }
    assert!(scene.answer(&right));
    assert_eq!(scene.offer(5), Verdict::Shorten(7));
    assert!(
        !scene.answer(&scene.answered(5, Wanted::Refuse, 0)),
        "twice"
    );
    assert_eq!(scene.offer(5), Verdict::Shorten(7));
    for (number, len, expected) in [
        (10, TOTAL, Verdict::Accept),
        (11, u32::MAX, Verdict::Accept),
        (12, TOTAL - 1, Verdict::Shorten(TOTAL - 1)),
        (13, 0, Verdict::Shorten(0)),
    ] {
        assert_eq!(scene.offer(number), Verdict::Undecided);
        assert!(scene.answer(&scene.answered(number, Wanted::Shorten, len)));
        assert_eq!(scene.offer(number), expected);
    }
}

// The threshold at its edges, and any nonsense in its word. Expect: asked exactly about messages at least as long as it says.
#[test]
fn only_long_enough_messages_are_asked_about() {
    for (word, asked) in [
        (0, false),
        (1, true),
        (u64::from(TOTAL), true),
        (u64::from(TOTAL) + 1, true),
        (u64::from(TOTAL) + 2, false),
        (u64::MAX, false),
    ] {
        let mut scene = Scene::new();
        let header = scene.application.client.header();
        header.ask_first.store(word, Ordering::Relaxed);
        assert_eq!(scene.host.wants_offers(PortId(PORT)), word != 0);
        assert_eq!(scene.offer(5) == Verdict::Undecided, asked, "{word}");
        assert_eq!(scene.unread(), u32::from(asked));
    }
    let mut scene = Scene::new();
    assert!(!scene.host.wants_offers(PortId(PORT + 1)), "not open");
    let mut elsewhere = offer(scene.record, 5, &[]);
    elsewhere.stream.local = PortId(PORT + 1);
    assert_eq!(scene.host.offer(&elsewhere), Verdict::Accept);
}

// An application that reads nothing, one that reads and does not answer, and engines that die meanwhile. Expect: never more offers in its
// ring than the reserve, so that every token has its entry; who was turned away is named when there is room.
#[test]
fn questions_never_take_an_entry_meant_for_a_token() {
    let mut scene = Scene::new();
    for death in 0..4 {
        for number in 0..40 {
            assert_eq!(scene.offer(number), Verdict::Undecided);
            assert!(scene.unread() <= EVENT_RESERVE, "after {death} deaths");
        }
        assert_eq!(scene.unread(), EVENT_RESERVE);
        assert!(scene.host.port(PORT).questions.turned_some_away());
        let (host, _) = scene.memory.take_over();
        scene.host = host;
    }
    // It reads them all. The engine's successor asks about as many again, and then about none, as none is answered.
    while scene.application.take_event().is_some() {}
    for number in 0..40 {
        scene.offer(number);
    }
    assert_eq!(scene.unread(), EVENT_RESERVE);
    while scene.application.take_event().is_some() {}
    for number in 0..40 {
        scene.offer(number);
    }
    assert_eq!(scene.unread(), 0);
    // Two are answered. Expect: room for two of those turned away.
    for number in [3, 4] {
        assert!(scene.answer(&scene.answered(number, Wanted::Accept, 0)));
    }
    let port = scene.host.port(PORT);
    let read = port.events_read();
    assert_eq!(port.questions.room_again(read), 2);
    for number in 30..33 {
        scene.offer(number);
    }
    assert_eq!(scene.unread(), 2);
}

// A consumer index that says anything. Expect: no panic, bounded work, and never more than the reserve is asked at one time.
#[test]
fn a_consumer_index_that_lies_harms_nobody_else() {
    for claim in [1, 15, 16, 17, 33, 1 << 20, 1 << 31, u32::MAX] {
        let mut scene = Scene::new();
        for number in 0..8 {
            scene.offer(number);
        }
        let header = scene.application.client.header();
        header.event_consumer.store(claim, Ordering::Relaxed);
        let before = scene.host.port(PORT).events_published();
        for number in 0..1000 {
            assert_eq!(scene.offer(number), Verdict::Undecided);
        }
        let asked = scene.host.port(PORT).events_published() - before;
        assert!(asked <= EVENT_RESERVE, "{claim}: {asked}");
        let (mut host, _) = scene.memory.take_over();
        assert_eq!(host.port(PORT).fault(), None);
    }
}

// Messages that end while they are asked about: committed, given up by their sender, their stream freed, their sender reborn. Expect: the
// question is over, its place free, and a late answer is ignored.
#[test]
fn a_question_ends_with_its_message() {
    let mut scene = Scene::new();
    for number in 0..EVENT_RESERVE {
        scene.offer(number);
        scene.application.take_event();
    }
    let asked = scene.host.offers;
    scene.offer(100);
    assert_eq!(scene.host.offers, asked, "no room");
    // The sender gives up numbers 0 to 9.
    scene.host.commit_base(scene.record, EPOCH, 10, 0);
    for number in 0..10 {
        assert!(!scene.answer(&scene.answered(number, Wanted::Accept, 0)));
    }
    assert!(scene.answer(&scene.answered(10, Wanted::Accept, 0)));
    // Number 11 comes without an answer: the application asks for less by now.
    scene.application.act();
    let ledger = scene.host.facts.ledger();
    assert_eq!(scene.host.port(PORT).take_provided(ledger), 1);
    let buffer = scene.host.claim(PortId(PORT), Priority::Low, 8).unwrap();
    scene
        .host
        .commit(&delivery(buffer, scene.record, 11))
        .unwrap();
    assert!(!scene.answer(&scene.answered(11, Wanted::Accept, 0)));
    for number in 100..112 {
        scene.offer(number);
        scene.application.take_event();
    }
    assert_eq!(scene.host.offers, asked + 12);
    scene.host.free_receive_record(scene.record);
    assert!(!scene.answer(&scene.answered(100, Wanted::Accept, 0)));
    assert_eq!(
        scene.offer(10),
        Verdict::Undecided,
        "its verdict went with it"
    );
}

// More verdicts than are remembered, none of them used. Expect: the oldest is forgotten and asked again, the newest are not.
#[test]
fn the_oldest_verdict_is_forgotten_first() {
    let mut scene = Scene::new();
    for number in 0..65 {
        assert_eq!(scene.offer(number), Verdict::Undecided);
        scene.application.take_event();
        assert!(scene.answer(&scene.answered(number, Wanted::Refuse, 0)));
    }
    assert_eq!(scene.offer(64), Verdict::Refuse);
    assert_eq!(scene.offer(1), Verdict::Refuse);
    assert_eq!(scene.offer(0), Verdict::Undecided);
    assert_eq!(scene.host.offers, 66);
    // More questions than the ring has entries, and no commit. Expect: the successor finds nothing strange in that.
    let (mut host, _) = scene.memory.take_over();
    assert_eq!(host.port(PORT).fault(), None);
}
