//! Two endpoints and a network that loses, doubles and reorders: the quick check; the thorough ones live in `transport/tests`.

use alloc::collections::VecDeque;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::host::*;
use crate::ident::*;
use host::TestHost;

struct Side {
    endpoint: Endpoint,
    host: TestHost,
}

/// Two nodes and the wire between them.
struct Pair {
    now: Nanos,
    sides: [Side; 2],
    wire: VecDeque<(Nanos, usize, Vec<u8>)>,
    random: u64,
    /// Of 1000 frames: lost, doubled, late, corrupted.
    loss: u64,
    double: u64,
    late: u64,
    corrupt: u64,
    /// Of 1000 frames of each node: their sender lies in them.
    lies: [u64; 2],
    /// Longer frames are swallowed.
    longest: usize,
    /// Every frame sent, and to whom, for later.
    log: Vec<(usize, Vec<u8>)>,
    next_slot: u32,
    frame: u16,
}

const LATENCY: Nanos = 10_000;

fn config(node: u16, frame: u16) -> Config {
    Config {
        node: NodeId(node),
        queue: 0,
        queues: 1,
        incarnation: 0x1_0000_0000 * u64::from(node) + 77 * u64::from(node),
        engine_epoch: 1,
        cluster: 42,
        name: alloc::format!("node-{node}").to_string(),
        max_frame: frame,
        max_peers: 8,
        first_number: u32::MAX - 3,
        policy: Policy::default(),
    }
}

impl Endpoint {
    /// Another policy than at the beginning.
    fn obey(&mut self, policy: Policy) {
        (self.config.policy, self.granting) = (policy, policy);
    }
}

impl Pair {
    fn new(frame: u16) -> Self {
        let side = |node| {
            let mut endpoint = Endpoint::new(config(node, frame), 0);
            for other in [1, 2] {
                endpoint.set_node(0, NodeId(other), frame);
            }
            endpoint.port_opened(PortId(5));
            let mut host = TestHost {
                open: true,
                token_len: 1 << 24,
                ..TestHost::default()
            };
            host.provide(1000);
            Side { endpoint, host }
        };
        Self {
            now: 1_000_000,
            sides: [side(1), side(2)],
            wire: VecDeque::new(),
            random: 0x9e37_79b9_7f4a_7c15,
            loss: 0,
            double: 0,
            late: 0,
            corrupt: 0,
            lies: [0; 2],
            longest: usize::MAX,
            log: Vec::new(),
            next_slot: 0,
            frame,
        }
    }

    fn dice(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn send(&mut self, from: usize, to: u16, len: usize, deadline: Nanos) -> u32 {
        let slot = self.next_slot;
        self.next_slot += 1;
        let payload: Vec<u8> = (0..len)
            .map(|i| (i as u32).wrapping_mul(31).wrapping_add(slot * 7) as u8)
            .collect();
        let side = &mut self.sides[from];
        side.host.payloads.insert(slot, payload);
        let request = SendRequest {
            id: SendId {
                port: PortId(5),
                slot,
                generation: 1,
            },
            stream: StreamKey {
                local: PortId(5),
                node: NodeId(to),
                remote: PortId(5),
                priority: Priority::Low,
            },
            len: len as u32,
            tag: u64::from(slot),
            deadline,
            ack: crate::policy::AckMode::Policy,
        };
        side.endpoint
            .submit(self.now, &request, &mut side.host)
            .unwrap();
        slot
    }

    /// Everybody sends what they may, then time moves on to the next thing that happens. False if nothing ever will.
    fn step(&mut self) -> bool {
        let mut frame = vec![0; usize::from(self.frame)];
        for from in 0..2 {
            loop {
                let side = &mut self.sides[from];
                let Some(transmit) =
                    side.endpoint
                        .poll_transmit(self.now, &mut frame, &mut side.host)
                else {
                    break;
                };
                let mut bytes = frame[..transmit.len].to_vec();
                let to = usize::from(transmit.peer.node.0 - 1);
                if self.dice() % 1000 < self.lies[from] {
                    self.lie(&mut bytes);
                }
                self.log.push((to, bytes.clone()));
                let dice = self.dice() % 1000;
                if dice < self.loss || bytes.len() > self.longest {
                    continue;
                }
                let mut at = self.now + LATENCY;
                if self.dice() % 1000 < self.late {
                    at += self.dice() % (20 * LATENCY);
                }
                if self.dice() % 1000 < self.double {
                    let later = at + self.dice() % (50 * LATENCY);
                    self.wire.push_back((later, to, bytes.clone()));
                }
                if self.dice() % 1000 < self.corrupt {
                    let index = self.dice() as usize % bytes.len();
                    bytes[index] ^= 1 << (self.dice() % 8);
                }
                self.wire.push_back((at, to, bytes));
            }
            self.sides[from].endpoint.check_consistency();
        }
        self.wire.make_contiguous().sort_by_key(|frame| frame.0);
        let timeouts = self
            .sides
            .iter()
            .filter_map(|side| side.endpoint.poll_timeout());
        let next = timeouts.chain(self.wire.front().map(|frame| frame.0)).min();
        let Some(next) = next else { return false };
        self.now = self.now.max(next);
        while let Some((_, to, bytes)) = self.wire.pop_front_if(|frame| frame.0 <= self.now) {
            let side = &mut self.sides[to];
            // In two segments, as jumbo frames arrive.
            let cut = bytes.len().min(2000);
            let _ = side.endpoint.handle_frame(
                self.now,
                &[&bytes[..cut], &bytes[cut..]],
                &mut side.host,
            );
            side.endpoint.check_consistency();
        }
        for side in &mut self.sides {
            side.endpoint.handle_timeout(self.now, &mut side.host);
            side.endpoint.check_consistency();
        }
        true
    }

    /// Another value in some field of the headers, and the CRC that fits it.
    fn lie(&mut self, frame: &mut [u8]) {
        let headers = wire::header_area_len(frame).unwrap();
        let word = 2 + self.dice() as usize % (headers / 4 - 2);
        let place = &mut frame[4 * word..4 * word + 4];
        let truth = u32::from_be_bytes(place.try_into().unwrap());
        let dice = self.dice();
        let lie = match dice % 3 {
            0 => truth ^ 1 << (dice >> 8 & 31),
            1 => truth.wrapping_add((dice >> 8) as u32 % 100),
            _ => (dice >> 8) as u32,
        };
        place.copy_from_slice(&lie.to_be_bytes());
        wire::reseal(frame);
    }

    fn run_until(&mut self, limit: Nanos, done: impl Fn(&Self) -> bool) -> bool {
        let end = self.now + limit;
        while !done(self) {
            if self.now > end || !self.step() {
                return done(self);
            }
        }
        true
    }

    fn all_settled(&self) -> bool {
        self.sides.iter().all(|side| side.endpoint.unsettled() == 0)
    }

    /// Everything delivered is what was sent, once and in order; no status says otherwise.
    fn check_deliveries(&self) {
        self.check_arrivals();
        for side in &self.sides {
            for (slot, status) in &side.host.completed {
                let there = self
                    .sides
                    .iter()
                    .any(|s| s.host.delivered.iter().any(|d| d.0.tag == u64::from(*slot)));
                match status {
                    SendStatus::Delivered => assert!(there, "{slot} said delivered"),
                    SendStatus::NotDelivered(_) => assert!(!there, "{slot} said not delivered"),
                    SendStatus::MaybeDelivered(_) => {}
                }
            }
        }
    }

    /// Everything delivered is what was sent, once and in order.
    fn check_arrivals(&self) {
        for (to, side) in self.sides.iter().enumerate() {
            for from in 0..2 {
                let mine = side
                    .host
                    .delivered
                    .iter()
                    .filter(|d| usize::from(d.0.stream.node.0 - 1) == from);
                let mut last = None;
                for (delivery, bytes) in mine {
                    let slot = delivery.tag as u32;
                    assert!(
                        last.is_none_or(|last| slot > last),
                        "order or duplicate {slot} after {last:?}"
                    );
                    last = Some(slot);
                    assert!(
                        &self.sides[from].host.payloads[&slot] == bytes,
                        "bytes of {slot} to {to}"
                    );
                }
            }
        }
    }

    fn statuses(&self, from: usize) -> Vec<SendStatus> {
        let mut completed = self.sides[from].host.completed.clone();
        completed.sort_by_key(|c| c.0);
        completed.into_iter().map(|c| c.1).collect()
    }

    /// The engine dies and another takes over what the ledger holds.
    fn take_over(&mut self, node: usize) {
        let side = &mut self.sides[node];
        let mut config = side.endpoint.config().clone();
        config.engine_epoch += 1;
        let durable = side.host.durable();
        let held: Vec<u32> = side.host.buffers.keys().copied().collect();
        for slot in held {
            side.host.buffers.remove(&slot);
            side.host.tokens.push(slot);
        }
        side.endpoint = Endpoint::restore(config, self.now, &durable);
        for other in [1, 2] {
            side.endpoint.set_node(self.now, NodeId(other), self.frame);
        }
        side.endpoint.port_opened(PortId(5));
    }
}

impl Pair {
    /// The application on `node` goes away.
    fn close_port(&mut self, node: usize) {
        let (now, side) = (self.now, &mut self.sides[node]);
        side.host.open = false;
        side.endpoint.port_closed(now, PortId(5), &mut side.host);
        assert!(side.host.buffers.is_empty(), "a claimed buffer was kept");
        side.host.tokens.clear();
    }

    /// Another one comes.
    fn open_port(&mut self, node: usize, tokens: u32) {
        let side = &mut self.sides[node];
        side.host.open = true;
        side.host.instance += 1;
        side.host.provide(tokens);
        side.endpoint.port_opened(PortId(5));
    }

    fn provide(&mut self, node: usize, tokens: u32) {
        let (now, side) = (self.now, &mut self.sides[node]);
        side.host.provide(tokens);
        for _ in 0..tokens {
            side.endpoint.buffer_provided(now, PortId(5));
        }
    }

    fn resume(&mut self, from: usize, to: u16) {
        let now = self.now;
        self.sides[from].endpoint.resume_sending(now, key(to));
    }

    fn cancel(&mut self, from: usize, slot: u32) {
        let id = SendId {
            port: PortId(5),
            slot,
            generation: 1,
        };
        let now = self.now;
        self.sides[from]
            .endpoint
            .cancel(now, id, key(2 - from as u16));
    }
}

fn key(to: u16) -> StreamKey {
    StreamKey {
        local: PortId(5),
        node: NodeId(to),
        remote: PortId(5),
        priority: Priority::Low,
    }
}

/// How many seeds: `PORTOLAN_SEEDS` overrides.
fn tries(default: u64) -> u64 {
    std::env::var("PORTOLAN_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(default)
}

const SECOND: Nanos = 1_000_000_000;

mod bare;
mod damage;
mod ghosts;
mod grants;
mod host;
mod offers;
mod refusals;
mod round_trips;
mod runs;
mod shares;
mod shortcuts;
mod sizes;
mod statuses;
mod want;

#[test]
fn messages_of_all_sizes_arrive() {
    for frame in [1472, 8972] {
        let mut pair = Pair::new(frame);
        for len in [
            0, 1, 100, 1400, 1500, 4000, 9000, 20_000, 300_000, 3_000_000,
        ] {
            pair.send(0, 2, len, Nanos::MAX);
            pair.send(1, 1, len, Nanos::MAX);
            pair.send(0, 1, len, Nanos::MAX); // to itself
        }
        assert!(pair.run_until(SECOND, Pair::all_settled));
        pair.check_deliveries();
        assert_eq!(pair.sides[1].host.delivered.len(), 10);
        assert_eq!(pair.sides[0].host.delivered.len(), 20);
        let c = pair.sides[0].endpoint.counters();
        assert_eq!(
            (
                c.timeouts,
                c.retransmits,
                c.retransmitted_bytes,
                c.protocol_violations
            ),
            (0, 0, 0, 0)
        );
    }
}

#[test]
fn loss_doubling_reordering_and_corruption_change_nothing() {
    for seed in 1..tries(30) {
        let mut pair = Pair::new(1472);
        pair.random ^= seed.wrapping_mul(0x1234_5678_9abc_def1);
        (pair.loss, pair.double, pair.late, pair.corrupt) = (50, 50, 100, 20);
        for i in 0..300usize {
            let len = match i % 10 {
                0 => 40_000 + i * 100,
                n => n * n * 10,
            };
            pair.send(i % 2, 2 - (i % 2) as u16, len, Nanos::MAX);
            if i % 37 == 0 {
                pair.run_until(50 * LATENCY, |_| false);
            }
        }
        assert!(
            pair.run_until(60 * SECOND, Pair::all_settled),
            "seed {seed}"
        );
        pair.check_deliveries();
        assert!(
            pair.statuses(0)
                .iter()
                .chain(&pair.statuses(1))
                .all(|s| *s == SendStatus::Delivered)
        );
    }
}

#[test]
fn engines_die_and_nothing_is_lost_or_doubled() {
    for seed in 1..tries(40) {
        let mut pair = Pair::new(1472);
        pair.random ^= seed.wrapping_mul(0x7654_3210_9abc_def1);
        (pair.loss, pair.double, pair.late) = (20, 20, 50);
        for i in 0..200usize {
            pair.send(0, 2, if i % 7 == 0 { 30_000 } else { 200 }, Nanos::MAX);
            pair.run_until(3 * LATENCY, |_| false);
            if pair.dice().is_multiple_of(20) {
                pair.take_over((seed % 2) as usize);
            }
            if pair.dice().is_multiple_of(40) {
                pair.take_over(0);
                pair.take_over(1);
            }
        }
        assert!(
            pair.run_until(60 * SECOND, Pair::all_settled),
            "seed {seed}"
        );
        pair.check_deliveries();
        assert!(pair.statuses(0).iter().all(|s| *s == SendStatus::Delivered));
        assert_eq!(pair.sides[1].host.delivered.len(), 200);
    }
}
