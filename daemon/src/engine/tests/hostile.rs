//! Applications that follow no rule, engines that die while they refuse, and ledgers of nonsense.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Event, EventKind};
use portolan_abi::memory::{ClientHalf, EngineHalf, LedgerMapping};
use portolan_abi::port::CloseReason;
use portolan_abi::ring::ProducerCursor;
use portolan_abi::token::TokenRef;
use portolan_transport::host::{Host, SendStatus};
use portolan_transport::ident::{PortId, RecordId, SendId};

use super::super::commit;
use super::super::commit_point::dies_at;
use super::super::host::{EngineHost, Order};
use super::{Memory, PORT, ledger_geometry, stream};

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

#[test]
fn a_refusal_ends_the_same_way_after_a_death() {
    for point in 0.. {
        let memory = Memory::new();
        let mut victim = Victim::of(&memory);
        let Some(Order::Refuse(id)) = victim.offer_send(send_token(9, 8, 0, 1), at(0, 1)) else {
            panic!("believed")
        };
        let died = dies_at(point, || {
            victim.host.finish_locally(id, commit::REFUSED_TOKEN)
        });
        let mut heir = Victim::of(&memory);
        if heir.host.port(PORT).sends_waiting() == 1 {
            // Not accepted yet: the entry is there again, and refused again.
            let Some(Order::Refuse(id)) = heir.host.take_order(PORT, 0) else {
                panic!("dead before {died:?}")
            };
            heir.host.finish_locally(id, commit::REFUSED_TOKEN);
        }
        let ring = heir.engine.event_ring(&heir.client);
        assert_eq!(ring.published(), 1, "dead before {died:?}");
        let event = Event::decode(&ring.peek(0)).unwrap();
        assert_eq!(event.kind, EventKind::Sent(commit::REFUSED_TOKEN));
        assert_eq!((event.slot, event.generation), (0, 1));
        if died.is_none() {
            break;
        }
    }
}
