//! Sends that end together: one event tells of several, to an application that reads such events.

use std::sync::atomic::Ordering;

use portolan_abi::event::{ENDS, Ends, Event, EventKind, OtherEnds};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::{PortGeometry, READS_ENDS};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{FLAG_INLINE, Opcode, SendToken, TokenRef};
use portolan_transport::host::Host;
use portolan_transport::ident::{PortId, SendId};

use super::super::commit;
use super::super::commit_point::dies_at;
use super::super::host::{EngineHost, Order, send_id};
use super::{Memory, PORT, stream};

const SENDS: u32 = 16;

/// A port whose sends are all under way, and its application.
struct Scene {
    memory: Memory,
    client: ClientHalf,
    engine: EngineHalf,
    events: ConsumerCursor,
}

fn send(slot: u32) -> SendId {
    send_id(PORT, slot, slot + 1)
}

impl Scene {
    /// Of an application that reads these events, and the engine.
    fn new(reads: u32) -> (Self, EngineHost) {
        let memory = Memory::of(PortGeometry::new(SENDS, 2, 8192).unwrap());
        let (client, engine) = memory.halves();
        client.header().reads.store(reads, Ordering::Relaxed);
        let ring = client.send_ring(&engine);
        let mut sends = ProducerCursor::new(0);
        for slot in 0..SENDS {
            let token = SendToken {
                generation: slot + 1,
                opcode: Opcode::Send,
                priority: 0,
                flags: FLAG_INLINE,
                node: 2,
                port: 9,
                len: 8,
                arena_offset: 0,
                tag: 0,
                timeout_us: 0,
            };
            token.store(&client.send_slots()[slot as usize], &[1; 8]);
            let entry = TokenRef {
                slot,
                generation: slot + 1,
            };
            sends.stage(ring, &[entry.encode()]);
        }
        sends.publish(ring);
        let (mut host, _) = memory.take_over();
        let record = host.open_send_record(stream(), 5, 1, 0).unwrap();
        for number in 0..host.port(PORT).sends_waiting() {
            let Some(Order::Send(send)) = host.take_order(PORT, 0) else {
                panic!("refused");
            };
            host.accept(&send, record, 1, number);
            host.finish_token();
        }
        let events = ConsumerCursor::new(0);
        let scene = Self {
            memory,
            client,
            engine,
            events,
        };
        (scene, host)
    }

    /// The slots each new event tells of.
    fn told(&mut self) -> Vec<Vec<u32>> {
        let ring = self.engine.event_ring(&self.client);
        let mut told = Vec::new();
        for _ in 0..self.events.available(ring).unwrap() {
            let words = self.events.take(ring);
            let event = Event::decode(&words).expect("an event");
            assert_eq!(event.kind, EventKind::Sent(commit::DONE));
            let first = TokenRef {
                slot: event.slot,
                generation: event.generation,
            };
            let all: Vec<_> = [first].into_iter().chain(OtherEnds::of(&words)).collect();
            let right = |token: &TokenRef| token.generation == token.slot + 1;
            assert!(all.iter().all(right), "{all:?}");
            told.push(all.iter().map(|token| token.slot).collect());
        }
        told
    }

    /// Slots the ledger calls under way.
    fn under_way(&self, host: &EngineHost) -> Vec<u32> {
        let facts = host.facts.ledger().sends(PORT);
        let is_out = |slot: &u32| facts[*slot as usize].tag.load(Ordering::Relaxed) != 0;
        (0..SENDS).filter(is_out).collect()
    }
}

// Ten sends are delivered, one of which ended before and one of whose names is old. Expect: each of the others ends once, in their order, told of by
// as few events as the application reads; the others stay under way.
#[test]
fn as_few_events_as_the_application_reads() {
    for (reads, each) in [
        (0, 1),
        (!READS_ENDS, 1),
        (READS_ENDS, ENDS),
        (u32::MAX, ENDS),
    ] {
        let (mut scene, mut host) = Scene::new(reads);
        host.complete_delivered(PortId(PORT), [send(4)].into_iter());
        assert_eq!(scene.told(), [[4]]);
        let old = send_id(PORT, 15, 1);
        let delivered = (0..9).map(send).chain([old]);
        host.complete_delivered(PortId(PORT), delivered);
        let told = scene.told();
        let left = [0, 1, 2, 3, 5, 6, 7, 8];
        assert_eq!(told.concat(), left);
        let (last, full) = told.split_last().unwrap();
        assert!(full.iter().all(|event| event.len() == each) && last.len() <= each);
        assert_eq!(scene.under_way(&host), (9..SENDS).collect::<Vec<_>>());
        // Nothing is left to be done again.
        drop(host);
        let (host, durable) = scene.memory.take_over();
        assert_eq!(durable.sends.len(), SENDS as usize - 9);
        assert_eq!(scene.under_way(&host).len(), durable.sends.len());
        assert!(scene.told().is_empty());
    }
}

// No send at all; a port that is gone. Expect: nothing.
#[test]
fn nothing_that_ended_is_no_event() {
    let (mut scene, mut host) = Scene::new(READS_ENDS);
    host.complete_delivered(PortId(PORT), std::iter::empty());
    host.complete_delivered(PortId(PORT + 1), [send(0)].into_iter());
    assert!(scene.told().is_empty());
    assert_eq!(scene.under_way(&host).len(), SENDS as usize);
}

// The engine dies before any one store of ending all sends, and its successors before any one of taking over. Expect: what was told of is not under
// way for the successor, all else is, and ends with it: each once.
#[test]
fn who_dies_between_the_ends_of_a_run_loses_and_doubles_none() {
    let mut deaths = 0;
    for point in 0.. {
        let (mut scene, mut host) = Scene::new(READS_ENDS);
        let all = (0..SENDS).map(send);
        let died = dies_at(point, || host.complete_delivered(PortId(PORT), all));
        drop(host);
        let mut told = scene.told().concat();
        for second in 0.. {
            if dies_at(second, || drop(scene.memory.take_over())).is_none() {
                break;
            }
            deaths += 1;
        }
        let (mut host, durable) = scene.memory.take_over();
        let left: Vec<_> = (durable.sends.iter()).map(|send| send.request.id).collect();
        let both = told.len() + left.len();
        assert_eq!(both, SENDS as usize, "dead before {died:?}, store {point}");
        host.complete_delivered(PortId(PORT), left.into_iter());
        told.extend(scene.told().concat());
        told.sort_unstable();
        assert_eq!(told, (0..SENDS).collect::<Vec<_>>(), "store {point}");
        assert!(scene.under_way(&host).is_empty());
        if died.is_none() {
            break;
        }
        deaths += 1;
    }
    assert!(deaths > 100, "{deaths}");
}

// A damaged engine published an event that tells of slots there are none of, old names, and one send that is under way, and died. Expect: its
// successor believes the last only.
#[test]
fn a_run_that_names_nonsense_ends_what_it_names_rightly() {
    let (scene, host) = Scene::new(READS_ENDS);
    let mut ends = Ends::new(commit::DONE);
    for (slot, generation) in [(3, 9), (u32::MAX, 1), (SENDS, 17), (5, 1), (7, 8)] {
        ends.push(TokenRef { slot, generation });
    }
    let ring = scene.engine.event_ring(&scene.client);
    let mut damaged = ProducerCursor::new(ring.published());
    damaged.stage(ring, &ends.encode());
    damaged.publish(ring);
    drop(host);
    let (mut host, durable) = scene.memory.take_over();
    assert_eq!(host.port(PORT).fault(), None);
    assert_eq!(durable.sends.len(), SENDS as usize - 1);
    assert!(!scene.under_way(&host).contains(&7));
}
