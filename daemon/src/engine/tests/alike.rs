//! Two engines that are given the same tokens, of which one takes each by itself: whatever the tokens say, nobody can tell which.
//!
//! What both leave in ledger and port, the frames they write and what they count is compared after every turn. Deaths between the stores are
//! searched in `stops`.

use std::sync::atomic::Ordering;

use portolan_abi::ledger::{pair, working_token};
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::ring::ProducerCursor;
use portolan_abi::token::{FLAG_INLINE, ReceiveToken, TokenRef};
use portolan_transport::policy::Profile;

use super::super::commit_point::dies_at;
use super::super::conversation::{Engine, Memory, TakeOver, geometry};
use super::super::crossing::SLOT_BYTES;
use super::super::suspect::Suspect;

const PORT: u16 = 7;
const SLOTS: u32 = 16;
const BYTES: u32 = 2048;

/// An engine and the application that writes to its port.
struct Node {
    memory: Memory,
    engine: Engine,
    client: ClientHalf,
    half: EngineHalf,
}

impl Node {
    fn new(node: u16) -> Self {
        let memory = Memory::with(node, geometry(SLOTS, BYTES));
        memory.empty();
        let (client, half) = memory.halves();
        Self {
            engine: Self::take_over(&memory),
            memory,
            client,
            half,
        }
    }

    fn take_over(memory: &Memory) -> Engine {
        let take_over = TakeOver {
            port: Some(1),
            now: 1,
            policy: Profile::Default.policy(),
        };
        take_over.run(memory)
    }

    /// Nothing has happened yet.
    fn renew(&mut self) {
        self.memory.empty();
        self.engine = Self::take_over(&self.memory);
        (self.client, self.half) = self.memory.halves();
    }

    /// Writes a token into its slot and pushes an entry, which need not belong together.
    fn offer(&self, slot: u32, words: [u64; 16], entry: TokenRef) {
        if let Some(slot) = self.client.send_slots().get(slot as usize) {
            for (to, from) in slot.iter().zip(words) {
                to.store(from, Ordering::Relaxed);
            }
        }
        let ring = self.client.send_ring(&self.half);
        let mut cursor = ProducerCursor::new(ring.published());
        cursor.stage(ring, &[entry.encode()]);
        cursor.publish(ring);
    }

    /// Slots that no send of ours is in, and that wait in no ring.
    fn free(&self) -> Vec<u32> {
        let ring = self.client.send_ring(&self.half);
        if ring.published() != ring.consumed() {
            return Vec::new();
        }
        let facts = self.memory.ledger().ledger().sends(PORT);
        let is_free = |slot: &u32| facts[*slot as usize].tag.load(Ordering::Relaxed) == 0;
        (0..SLOTS).filter(is_free).collect()
    }

    /// Offers every buffer that was used again.
    fn provide(&self) {
        let facts = self.memory.ledger().ledger().receives(PORT);
        let ring = self.client.provide_ring(&self.half);
        let mut cursor = ProducerCursor::new(ring.published());
        for (slot, fact) in (0..SLOTS).zip(facts) {
            let word = fact.load(Ordering::Relaxed);
            let (used, given) = ((word >> 32) as u32, word as u32);
            if used == given && ring.published() == ring.consumed() {
                let generation = given + 1;
                ReceiveToken {
                    generation,
                    priority: 0,
                    arena_offset: u64::from(slot * BYTES),
                    len: BYTES,
                }
                .store(&self.client.receive_slots()[slot as usize]);
                cursor.stage(ring, &[TokenRef { slot, generation }.encode()]);
            }
        }
        cursor.publish(ring);
    }

    fn turn(&mut self, now: u64) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut room = vec![0; SLOT_BYTES];
        self.engine.serve(now);
        self.engine.timers(now);
        while let Some(len) = self.engine.speak(now, &mut room) {
            frames.push(room[..len].to_vec());
        }
        self.engine.serve_buffers(now);
        self.engine.check_consistency();
        frames
    }
}

struct Dice(u64);

impl Dice {
    fn of(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % sides
    }
}

/// The next token of an application that mostly sends the same, and now and then anything.
fn next_words(dice: &mut Dice, before: [u64; 16], generation: u32) -> [u64; 16] {
    let mut words = before;
    let pick = |dice: &mut Dice, from: &[u64]| from[dice.of(from.len() as u64) as usize];
    let (order, destination) = (words[0] as u32, words[1] as u32);
    words[0] = u64::from(order) | u64::from(generation) << 32;
    // Length and tag may differ from one to the next.
    if dice.of(3) == 0 {
        words[1] = u64::from(destination) | dice.of(90) << 32;
    }
    if dice.of(3) == 0 {
        words[3] = dice.of(5);
    }
    match dice.of(24) {
        0 => words[0] = words[0] & !0xff | pick(dice, &[0, 1, 1, 1, 2, 3, 4, 5, 6]),
        1 => words[0] = words[0] & !0xff00 | pick(dice, &[0, 0, 1, 2]) << 8,
        2 | 3 => words[0] = words[0] & !0xff_0000 | pick(dice, &[0, 1, 1, 2, 4, 6, 8]) << 16,
        4 => words[0] = words[0] & !0xff00_0000 | pick(dice, &[0, 1]) << 24,
        5 => words[1] = words[1] & !0xffff | pick(dice, &[0, 1, 2, 2, 3, 65_535]),
        6 => words[1] = words[1] & !0xffff_0000 | pick(dice, &[7, 7, 8, 60_000]) << 16,
        7 => {
            words[1] = u64::from(words[1] as u32) | pick(dice, &[64, 80, 81, 2_000, 1 << 31]) << 32
        }
        8 => words[2] = pick(dice, &[0, 64, u64::from(2 * SLOTS * BYTES) - 70, u64::MAX]),
        9 => words[4] = pick(dice, &[0, 0, 500, 1 << 40]),
        _ => {}
    }
    words
}

/// What everybody sends: 64 bytes to the peer, in the slot.
fn plain() -> [u64; 16] {
    let mut words = [0; 16];
    words[0] = 1 | u64::from(FLAG_INLINE) << 16;
    words[1] = 2 | u64::from(PORT) << 16 | 64 << 32;
    words[6..].fill(0x5555_5555_5555_5555);
    words
}

/// Both, and the peer they send to.
struct Twins {
    both: [Node; 2],
    peer: Node,
    now: u64,
    generations: [u32; SLOTS as usize],
    words: [u64; 16],
}

impl Twins {
    fn new() -> Self {
        Self {
            both: [Node::new(1), Node::new(1)],
            peer: Node::new(2),
            now: 0,
            generations: [0; SLOTS as usize],
            words: plain(),
        }
    }

    fn renew(&mut self) {
        for node in self.both.iter_mut().chain([&mut self.peer]) {
            node.renew();
        }
        self.both[1].engine.host().one_by_one = true;
        (self.now, self.words) = (1_000_000, plain());
        self.generations = [0; SLOTS as usize];
    }

    /// Some tokens; true if they are nonsense that may close the port.
    fn offer(&mut self, dice: &mut Dice) -> bool {
        let mut free = self.both[0].free();
        let mut wild = false;
        for _ in 0..dice.of(SLOTS.into()) {
            if free.is_empty() {
                break;
            }
            let slot = free.swap_remove(dice.of(free.len() as u64) as usize);
            let generation = &mut self.generations[slot as usize];
            *generation += 1;
            let mut entry = TokenRef {
                slot,
                generation: *generation,
            };
            self.words = next_words(dice, self.words, *generation);
            let mut words = self.words;
            let honest = (entry, words);
            match dice.of(400) {
                0 => entry.slot = pick_slot(dice),
                1 => entry.generation ^= 1,
                2 => words[0] &= 0xffff_ffff,
                // The generation that no slot has.
                3 => (entry.generation, words[0]) = (0, words[0] & 0xffff_ffff),
                _ => {}
            }
            wild |= (entry, words) != honest;
            let both = &self.both;
            both.iter().for_each(|node| node.offer(slot, words, entry));
            // And once more, while it waits or is under way.
            if dice.of(300) == 0 {
                wild = true;
                both.iter().for_each(|node| node.offer(slot, words, entry));
            }
            if dice.of(8) == 0 {
                self.words = plain();
            }
        }
        wild
    }

    fn turn(&mut self, dice: &mut Dice) {
        self.now += 1_000 + dice.of(20_000);
        let [with, without] = &mut self.both;
        let frames = with.turn(self.now);
        assert_eq!(frames, without.turn(self.now));
        for frame in &frames {
            self.peer.engine.hear(self.now, frame);
        }
        self.peer.provide();
        for frame in self.peer.turn(self.now) {
            if dice.of(30) > 0 {
                self.both
                    .iter_mut()
                    .for_each(|n| n.engine.hear(self.now, &frame));
            }
        }
        let [with, without] = &self.both;
        assert_eq!(with.engine.counted(), without.engine.counted());
        assert_eq!(with.engine.fault(), without.engine.fault());
        let essence = |node: &Node| node.memory.essence(&node.memory.image());
        assert_eq!(essence(with), essence(without));
    }
}

/// A slot of others, or none.
fn pick_slot(dice: &mut Dice) -> u32 {
    dice.of(u64::from(SLOTS) + 2) as u32
}

// Tokens of every kind, most of them alike, with nonsense between them. Expect: the same memory, frames and counts after every turn; and many
// of the tokens went in one go with others.
#[test]
fn nobody_can_tell_tokens_taken_in_one_go() {
    let (mut twins, mut in_one_go, mut tokens, mut faults) = (Twins::new(), 0, 0, 0);
    for seed in 1..=60_u64 {
        twins.renew();
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut wild = false;
        for _ in 0..80 {
            wild |= twins.offer(&mut dice);
            twins.turn(&mut dice);
            if twins.both[0].engine.fault().is_some() {
                assert!(wild);
                faults += 1;
                break;
            }
        }
        assert_eq!(twins.both[1].engine.host().in_one_go, 0);
        in_one_go += twins.both[0].engine.host().in_one_go;
        let ring = twins.both[0].client.send_ring(&twins.both[0].half);
        tokens += u64::from(ring.consumed());
    }
    assert!(faults > 10, "{faults}");
    assert!(in_one_go > tokens / 5, "{in_one_go} of {tokens}");
}

// The third of five tokens alike is the one that the last engine died of, for the first or for the second time. Expect: it is named as met again,
// or closes the port; those before it are accepted either way.
#[test]
fn what_the_last_engine_died_of_is_met_by_itself() {
    let mut twins = Twins::new();
    for deaths in [1, 2] {
        twins.renew();
        let mut dice = Dice(7);
        // Until the peer is known.
        twins
            .both
            .iter()
            .for_each(|node| node.offer(0, with_generation(1), at(0)));
        for _ in 0..20 {
            twins.turn(&mut dice);
        }
        let mut found = working_token(PORT, 3, 1);
        if deaths == 2 {
            found = Suspect::found(found).meet(found).unwrap();
        }
        for node in &mut twins.both {
            node.engine.host().set_suspect(Suspect::found(found));
            (1..6).for_each(|slot| node.offer(slot, with_generation(1), at(slot)));
        }
        twins.turn(&mut dice);
        let [with, _] = &mut twins.both;
        let accepted = with.client.send_ring(&with.half).consumed();
        let expected = [(6, false), (3, true)][deaths - 1];
        assert_eq!((accepted, with.engine.fault().is_some()), expected);
        assert!(with.engine.host().in_one_go > 0);
    }
}

fn with_generation(generation: u32) -> [u64; 16] {
    let mut words = plain();
    words[0] |= u64::from(generation) << 32;
    words
}

fn at(slot: u32) -> TokenRef {
    TokenRef {
        slot,
        generation: 1,
    }
}

// An engine that dies before any store of taking eight tokens alike. Expect: whatever it had accepted by then, the ledger names the token it was
// working on: the first that is not accepted, or the last that is, if it was just done with that.
#[test]
fn a_token_is_named_while_it_is_worked_on() {
    let mut twins = Twins::new();
    let mut named = 0;
    for nth in 0.. {
        twins.renew();
        let mut dice = Dice(7);
        let node = &mut twins.both[0];
        node.offer(0, with_generation(1), at(0));
        twins.both[1].offer(0, with_generation(1), at(0));
        for _ in 0..20 {
            twins.turn(&mut dice);
        }
        let (node, now) = (&mut twins.both[0], twins.now);
        (1..9).for_each(|slot| node.offer(slot, with_generation(1), at(slot)));
        let engine = &mut node.engine;
        let Some(point) = dies_at(nth, || _ = engine.serve(now)) else {
            break;
        };
        let facts = node.memory.ledger().ledger().sends(PORT);
        let accepted = (1..9).filter(|slot| facts[*slot].tag.load(Ordering::Relaxed) != 0);
        let accepted = accepted.count() as u32;
        let word = node.memory.header().working_token.load(Ordering::Relaxed);
        let those = [accepted, accepted + 1].map(|slot| working_token(PORT, slot, 1));
        assert!(
            those.contains(&word),
            "{point:?} after {accepted}: {word:#x}"
        );
        named += u32::from(word == those[1]);
    }
    // Before each of the six words of each copy, the tag among them.
    assert_eq!(named, 8 * 6);
}

// A predecessor, of whatever build, died with a hundred tokens accepted and none of them told. Expect: its successor passes over all, and the next
// token is taken as ever.
#[test]
fn a_successor_passes_over_all_that_is_untold() {
    const UNTOLD: u32 = 100;
    let memory = Memory::with(1, geometry(128, 64));
    memory.empty();
    drop(Node::take_over(&memory));
    let (client, half) = memory.halves();
    let facts = memory.ledger().ledger().sends(PORT);
    let ring = client.send_ring(&half);
    let mut cursor = ProducerCursor::new(0);
    for slot in 0..=UNTOLD {
        for (to, from) in client.send_slots()[slot as usize]
            .iter()
            .zip(with_generation(1))
        {
            to.store(from, Ordering::Relaxed);
        }
        cursor.stage(ring, &[at(slot).encode()]);
        let fact = &facts[slot as usize];
        let destination = 2 | u64::from(PORT) << 16 | 64 << 32;
        fact.destination.store(destination, Ordering::Relaxed);
        fact.stream.store(1 << 41, Ordering::Relaxed); // the payload is in the slot
        let tag = pair(1, slot);
        fact.tag
            .store(if slot < UNTOLD { tag } else { 0 }, Ordering::Relaxed);
    }
    cursor.publish(ring);
    let mut engine = Node::take_over(&memory);
    assert_eq!((engine.fault(), ring.consumed()), (None, UNTOLD));
    engine.serve(1_000);
    assert_eq!((engine.fault(), ring.consumed()), (None, UNTOLD + 1));
}
