//! Two pairs of nodes that are told the same, of which one knows no trains, no bursts and no short way for lone messages, and takes each send by itself: whatever happens,
//! nobody can tell which.

use alloc::format;

use super::*;
use crate::policy::{AckMode, Profile};

/// Everything one pair is asked to do, both do.
struct Twins {
    /// With shortcuts, and without.
    pairs: [Pair; 2],
    /// Of the dice that both are asked with.
    random: u64,
    /// Frames under way, the same of both, and to whom.
    wire: VecDeque<(usize, Vec<u8>)>,
    slots: Vec<(usize, u32, StreamKey)>,
    /// RUNs of more than one message.
    runs: u64,
    /// Bare frames.
    bare: u64,
}

impl Twins {
    fn new(seed: u64, frame: u16, policy: Policy) -> Self {
        // Time stamps have 32 bits.
        let begin = [0, (1 << 32) - 3_000_000][(seed >> 1) as usize % 2];
        let pair = |off| {
            let mut pair = Pair::new(frame);
            pair.now += begin;
            for (node, side) in pair.sides.iter_mut().enumerate() {
                let mut config = config(node as u16 + 1, frame);
                config.policy = policy;
                side.endpoint = Endpoint::new(config, begin);
                side.endpoint.shortcuts.off = off;
                for other in [1, 2] {
                    side.endpoint.set_node(begin, NodeId(other), frame);
                }
                for port in [5, 6] {
                    side.endpoint.port_opened(PortId(port));
                }
            }
            pair
        };
        Self {
            pairs: [pair(false), pair(true)],
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            wire: VecDeque::new(),
            slots: Vec::new(),
            runs: 0,
            bare: 0,
        }
    }

    fn dice(&mut self, sides: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 20) % sides
    }

    fn both(&mut self, mut ask: impl FnMut(&mut Pair)) {
        self.pairs.iter_mut().for_each(&mut ask);
    }

    fn send(&mut self, from: usize) {
        let (to, dice) = (1 + self.dice(2) as u16, self.dice(8));
        let len = match dice {
            0..=2 => self.dice(200),
            3 => self.dice(6_000),
            _ => 20_000 + self.dice(300_000),
        };
        let mut stream = key(to);
        stream.local = PortId([5, 5, 5, 6][self.dice(4) as usize]);
        stream.priority = match self.dice(4) {
            0 => Priority::High,
            _ => Priority::Low,
        };
        self.submit(from, stream, &[len]);
    }

    /// Some of many of a stream, one after another.
    fn send_short(&mut self, from: usize) {
        let some = 1 + self.dice(4);
        let lens: Vec<u64> = (0..some)
            .map(|_| match self.dice(8) {
                0 => self.dice(1_500),
                1..=2 => self.dice(80),
                _ => 64, // often several in a row
            })
            .collect();
        self.submit(from, key(2 - from as u16), &lens);
    }

    /// Sends in a row, which one of the two takes in one go.
    fn submit(&mut self, from: usize, stream: StreamKey, lens: &[u64]) {
        let first = self.slots.len() as u32;
        let patience = 100_000 << self.dice(24);
        let slots = first..first + lens.len() as u32;
        self.slots
            .extend(slots.clone().map(|slot| (from, slot, stream)));
        self.both(|pair| {
            let (now, side) = (pair.now, &mut pair.sides[from]);
            let (endpoint, host) = (&mut side.endpoint, &mut side.host);
            let mut accepted: Option<SendRequest> = None;
            for (slot, &len) in slots.clone().zip(lens) {
                let bytes = (0..len).map(|i| (i as u8).wrapping_mul(31) ^ slot as u8);
                host.payloads.insert(slot, bytes.collect());
                let request = SendRequest {
                    id: id(slot, stream),
                    stream,
                    len: len as u32,
                    tag: u64::from(slot / 10),
                    deadline: now + patience,
                    ack: match slot / 7 % 16 {
                        0 => AckMode::Immediate,
                        1 => AckMode::Lazy,
                        _ => AckMode::Policy,
                    },
                };
                if !endpoint.shortcuts.off
                    && let Some(first) = &accepted
                    && first.ack == request.ack
                    && let Some(mut more) = endpoint.more(first)
                    && let Some(number) = more.number()
                {
                    let (record, epoch) = more.record();
                    assert_eq!(more.next(request.id, request.len, request.tag), request);
                    host.accept(&request, record, epoch, number);
                    more.push(&request);
                    endpoint.shortcuts.more += 1;
                } else if endpoint.submit(now, &request, host).is_ok() {
                    accepted = Some(request);
                } else {
                    host.payloads.remove(&slot);
                    accepted = None;
                }
            }
        });
    }

    /// Frames of one node, at most so many. Expect: the same of both.
    fn transmit(&mut self, from: usize, at_most: u64, room: usize) {
        for _ in 0..at_most {
            let mut frames = Vec::new();
            self.both(|pair| {
                let (now, side) = (pair.now, &mut pair.sides[from]);
                // What was there before must not matter.
                let mut frame = vec![
                    if side.endpoint.shortcuts.off {
                        0x55
                    } else {
                        0xaa
                    };
                    room
                ];
                let sent = side.endpoint.poll_transmit(now, &mut frame, &mut side.host);
                side.endpoint.check_consistency();
                frame.truncate(sent.map_or(0, |sent| sent.len));
                frames.push((sent, frame));
            });
            assert_eq!(frames[0], frames[1]);
            self.runs += runs(&frames[0].1);
            self.bare += u64::from(frames[0].1.starts_with(b"PB"));
            let Some((Some(sent), bytes)) = frames.pop() else {
                return;
            };
            self.wire
                .push_back((usize::from(sent.peer.node.0 - 1), bytes));
        }
    }

    fn deliver(&mut self) {
        let Some((to, bytes)) = self.wire.pop_front() else {
            return;
        };
        match self.dice(60) {
            0 => return, // lost
            1 => return self.wire.push_back((to, bytes)),
            _ => {}
        }
        self.hand_over(to, &bytes);
    }

    /// A frame arrives. Expect: both think the same of it.
    fn hand_over(&mut self, to: usize, bytes: &[u8]) {
        let mut said = Vec::new();
        self.both(|pair| {
            let (now, side) = (pair.now, &mut pair.sides[to]);
            let endpoint = &mut side.endpoint;
            said.push(endpoint.handle_frame(now, &[bytes], &mut side.host));
        });
        assert_eq!(said[0], said[1]);
    }

    /// One like the frame that arrives next comes first, of which a bit says something else: of who sends it to whom, or anything behind that.
    fn forge(&mut self) {
        let Some((to, mut bytes)) = self.wire.front().cloned() else {
            return;
        };
        let sides = [20, bytes.len() as u64 - 8][self.dice(2) as usize];
        let at = 8 + self.dice(sides) as usize;
        bytes[at] ^= 1 << self.dice(8);
        // Or it is damaged.
        if self.dice(4) > 0 {
            wire::reseal(&mut bytes);
        }
        self.hand_over(to, &bytes);
    }

    /// One short message after another, to and fro; what answers it may come before the next, with it, or never.
    fn exchange(&mut self, first: usize) {
        let frame = usize::from(self.pairs[0].frame);
        let high = self.dice(4) == 0;
        for nth in 0..self.dice(12) as usize {
            let from = (first + nth) % 2;
            let len = match self.dice(16) {
                0 => 0,
                1 => self.dice(2 * frame as u64),
                2 => self.dice(20 * frame as u64), // of which some is sent again beside the next
                _ => 64,
            };
            self.both(|pair| pair.provide(1 - from, 1));
            let mut stream = key(2 - from as u16);
            if high {
                stream.priority = Priority::High;
            }
            self.submit(from, stream, &[len]);
            if self.dice(16) == 0 {
                self.happen();
            }
            if self.dice(32) == 0 {
                // Its memory goes before it does.
                let slot = self.slots.len() as u32 - 1;
                self.both(|pair| _ = pair.sides[from].host.payloads.remove(&slot));
            }
            let later = self.dice(4) * self.dice(20_000);
            let due = self.dice(12) == 0;
            self.both(|pair| {
                pair.now += later;
                let now = pair.now;
                for side in pair.sides.iter_mut().filter(|_| due) {
                    side.endpoint.handle_timeout(now, &mut side.host);
                }
            });
            let at_most = 1 + self.dice(3);
            self.transmit(from, at_most, frame);
            while !self.wire.is_empty() && self.dice(16) > 0 {
                let long = self
                    .wire
                    .front()
                    .is_some_and(|(_, bytes)| bytes.len() > 1_000);
                if self.dice(20) == 0 {
                    self.forge();
                }
                match long && self.dice(4) == 0 {
                    true => _ = self.wire.pop_front(),
                    false => self.deliver(),
                }
            }
        }
    }

    /// Nothing else is asked for, until all is said.
    fn calm_down(&mut self) {
        let frame = usize::from(self.pairs[0].frame);
        for _ in 0..40 {
            for from in [0, 1] {
                self.transmit(from, 40, frame);
            }
            while !self.wire.is_empty() {
                self.deliver();
            }
            self.both(|pair| {
                pair.now += 1_000_000;
                let now = pair.now;
                for side in &mut pair.sides {
                    side.endpoint.handle_timeout(now, &mut side.host);
                }
            });
        }
    }

    /// Who is in the midst of a train.
    fn at_work(&self) -> Option<usize> {
        let mut sides = self.pairs[0].sides.iter();
        sides.position(|side| side.endpoint.train.is_some())
    }

    /// One thing or another, and what a train that was under way makes of it.
    fn step(&mut self) {
        let busy = self.at_work();
        self.happen();
        if let Some(from) = busy {
            let frame = usize::from(self.pairs[0].frame);
            self.transmit(from, 2, frame);
        }
    }

    fn happen(&mut self) {
        let from = self.dice(2) as usize;
        let frame = usize::from(self.pairs[0].frame);
        match self.dice(42) {
            0..=5 => self.send(from),
            6..=7 => {
                for _ in 0..self.dice(40) {
                    self.send_short(from);
                }
            }
            8..=18 => {
                let at_most = 1 + self.dice(40);
                self.transmit(from, at_most, frame);
            }
            19 => {
                let room = frame - self.dice(400) as usize;
                self.transmit(from, 3, room);
            }
            20..=30 => {
                for _ in 0..1 + self.dice(40) {
                    self.deliver();
                }
            }
            31..=33 => {
                let later = self.dice(2) * self.dice(100_000);
                self.both(|pair| {
                    pair.now += later;
                    let now = pair.now;
                    for side in &mut pair.sides {
                        side.endpoint.handle_timeout(now, &mut side.host);
                    }
                });
            }
            34 => {
                // Time alone.
                let later = 1 << self.dice(20);
                self.both(|pair| pair.now += later);
            }
            what @ 35..=38 if !self.slots.is_empty() => {
                let nth =
                    self.slots.len() - 1 - self.dice(self.slots.len().min(12) as u64) as usize;
                let (from, slot, stream) = self.slots[nth];
                self.both(|pair| {
                    let (now, side) = (pair.now, &mut pair.sides[from]);
                    match what {
                        35 => side.endpoint.cancel(now, id(slot, stream), stream),
                        36 => side.endpoint.drop_sends(now, stream, &mut side.host),
                        // Its memory goes.
                        37 => _ = side.host.payloads.remove(&slot),
                        _ => side.endpoint.resume_sending(now, stream),
                    }
                });
            }
            39 if self.dice(2) == 0 => self.both(|pair| pair.provide(from, 4)),
            // Another engine, as far as the other node can tell: all that is under way goes again.
            41 if self.dice(4) == 0 => self.both(|pair| {
                let endpoint = &mut pair.sides[from].endpoint;
                endpoint.config.engine_epoch += 1;
                endpoint.train = None; // an engine that begins has none
            }),
            40 if self.dice(4) == 0 => {
                let (from, gone) = (self.at_work().unwrap_or(from), self.dice(2) as u16 + 1);
                self.both(|pair| {
                    let (now, side) = (pair.now, &mut pair.sides[from]);
                    side.endpoint.remove_node(now, NodeId(gone), &mut side.host);
                });
                self.transmit(from, 2, frame);
                self.both(|pair| {
                    pair.sides[from]
                        .endpoint
                        .set_node(pair.now, NodeId(gone), frame as u16)
                });
            }
            39 if self.dice(2) == 0 => {
                let from = self.at_work().unwrap_or(from);
                self.both(|pair| pair.close_port(from));
                self.transmit(from, 2, frame);
                self.both(|pair| pair.open_port(from, 400));
            }
            _ => {
                let from = self.at_work().unwrap_or(from);
                let longest = [1_400, frame as u16][self.dice(2) as usize];
                self.both(|pair| {
                    let (now, node) = (pair.now, NodeId(2 - from as u16));
                    pair.sides[from].endpoint.set_node(now, node, longest);
                });
            }
        }
    }

    /// Frames of trains, but for the first of each, messages of bursts, sends in one go with others, lone messages without and with an acknowledgement, and arrivals of the latter.
    fn shortcuts(&self) -> [u64; 6] {
        let [with, without] = self.pairs.each_ref().map(|pair| {
            let taken = pair.sides.each_ref().map(|side| &side.endpoint.shortcuts);
            let sum = |of: fn(&Shortcuts) -> u64| taken.iter().map(|side| of(side)).sum();
            [
                sum(|side| side.trains),
                sum(|side| side.bursts),
                sum(|side| side.more),
                sum(|side| side.lone[0]),
                sum(|side| side.lone[1]),
                sum(|side| side.arrivals),
            ]
        });
        assert_eq!(without, [0; 6]);
        with
    }

    /// All that is remembered, but of the train itself.
    fn check_in_full(&self) {
        let [with, without] = &self.pairs;
        for (with, without) in with.sides.iter().zip(&without.sides) {
            let known = |side: &Side| {
                let e = &side.endpoint;
                let ends = (&e.send, &e.receive, &e.peers);
                format!("{:?}", (ends, &e.timers, &e.ready, e.low_due))
            };
            assert_eq!(known(with), known(without));
        }
    }

    /// What applications were told, and what was counted.
    fn check(&self) {
        let [with, without] = &self.pairs;
        for (with, without) in with.sides.iter().zip(&without.sides) {
            assert_eq!(with.host.completed, without.host.completed);
            assert_eq!(with.host.delivered.len(), without.host.delivered.len());
            let counted = |side: &Side| side.endpoint.counters().iter().collect::<Vec<_>>();
            assert_eq!(counted(with), counted(without));
            assert_eq!(
                with.endpoint.poll_timeout(),
                without.endpoint.poll_timeout()
            );
        }
    }
}

/// RUNs of more than one message in a frame.
fn runs(frame: &[u8]) -> u64 {
    let (mut at, mut runs) = (wire::frame::FRAME_HEADER_LEN, 0);
    let end = match frame {
        [] | [0x50, 0x42, ..] => 0,
        frame => usize::from(u16::from_be_bytes([frame[4], frame[5]])),
    };
    while at < end {
        runs += u64::from(frame[at] == 25 && frame[at + 6..at + 8] > [0, 1][..]);
        at += usize::from(u16::from_be_bytes([frame[at + 2], frame[at + 3]]));
    }
    runs
}

fn id(slot: u32, stream: StreamKey) -> SendId {
    SendId {
        port: stream.local,
        slot,
        generation: 1,
    }
}

/// Other policies under which there are trains.
fn also(seed: u64, mut policy: Policy) -> Policy {
    match seed % 4 {
        1 => policy.coalesce = false,
        // Less than a frame of several buffers needs.
        2 => (policy.eager_buffers, policy.eager_budget_buffers) = (2, 2),
        3 => policy.window_messages = 3,
        _ => {}
    }
    policy
}

// Whatever happens between any two frames, at three lengths of frames, before and after time stamps wrap, and under each set of answers and some others.
// Expect: the same frames, byte for byte, the same told, counted and remembered; and many of the frames belonged to trains, where there are any.
#[test]
fn nobody_can_tell_a_frame_of_a_train_from_another() {
    for profile in Profile::ALL {
        let (mut of_trains, mut of_bursts, mut in_one_go, mut runs) = (0, 0, 0, 0);
        for seed in 1..tries(16) {
            let frame = [1_472, 3_470, 8_972][seed as usize % 3];
            let policy = match profile {
                Profile::Default => also(seed, profile.policy()),
                profile => profile.policy(),
            };
            policy.validate().unwrap();
            let mut twins = Twins::new(seed, frame, policy);
            for step in 0..1_500 {
                twins.step();
                twins.check();
                if step % 50 == 0 {
                    twins.check_in_full();
                }
            }
            let [trains, bursts, more, ..] = twins.shortcuts();
            (of_trains, of_bursts) = (of_trains + trains, of_bursts + bursts);
            in_one_go += more;
            runs += twins.runs;
        }
        let expected = profile.policy().on_timeout != crate::policy::OnTimeout::Resend;
        assert_eq!(of_trains > 500, expected, "{}: {of_trains}", profile.name());
        // Of a policy without coalescing each message has a frame of its own.
        let expected = profile.policy().coalesce;
        assert_eq!(of_bursts > 500, expected, "{}: {of_bursts}", profile.name());
        assert!(in_one_go > 500, "{}: {in_one_go}", profile.name());
        assert_eq!(runs > 40, expected, "{}: {runs}", profile.name());
    }
}

// One short message at a time, to and fro, with and without bytes, now and then a longer one or a forged frame, and between any two of them whatever else may happen. Expect: as above; and under policies that
// coalesce many messages went alone, many of them behind an acknowledgement.
#[test]
fn nobody_can_tell_a_lone_message_from_another() {
    for profile in Profile::ALL {
        let mut alone = [0, 0, 0];
        for seed in 1..tries(16) {
            let frame = [1_472, 3_470, 8_972][seed as usize % 3];
            let policy = match profile {
                Profile::Default => also(seed, profile.policy()),
                profile => profile.policy(),
            };
            let mut twins = Twins::new(seed, frame, policy);
            for step in 0..200 {
                twins.exchange(step % 2);
                twins.check();
                twins.check_in_full();
                if twins.dice(8) == 0 {
                    twins.calm_down();
                    twins.check_in_full();
                }
            }
            let [.., lone, answers, arrivals] = twins.shortcuts();
            alone = [alone[0] + lone, alone[1] + answers, alone[2] + arrivals];
        }
        let many = alone.iter().all(|&some| some > 50);
        let expected = profile.policy().coalesce;
        assert_eq!(many, expected, "{}: {alone:?}", profile.name());
    }
}

// A frame of a long message is lost and asked for again; before it leaves, a short message is sent. Expect: as above, what was asked for beside the message.
#[test]
fn a_short_message_beside_what_is_sent_again_is_not_alone() {
    let mut twins = Twins::new(1, 1_472, Profile::Default.policy());
    twins.both(|pair| pair.provide(1, 10));
    twins.submit(0, key(2), &[200_000]);
    let waits = |twins: &Twins| {
        let mut streams = twins.pairs[0].sides[0].endpoint.send.iter();
        streams.any(|(_, stream)| !stream.resend.is_empty())
    };
    let mut lost = 0;
    for round in 0..400 {
        if waits(&twins) {
            twins.submit(0, key(2), &[64]);
            twins.transmit(0, 40, 1_472);
            twins.check_in_full();
            return;
        }
        for from in [0, 1] {
            twins.transmit(from, 40, 1_472);
            while let Some((to, bytes)) = twins.wire.pop_front() {
                if bytes.len() > 1_000 && lost < 3 && round > 2 {
                    lost += 1;
                    continue;
                }
                twins.both(|pair| {
                    let (now, side) = (pair.now, &mut pair.sides[to]);
                    let _ = side
                        .endpoint
                        .handle_frame(now, &[&bytes[..]], &mut side.host);
                });
                if waits(&twins) {
                    break;
                }
            }
        }
        twins.both(|pair| {
            pair.now += 50_000;
            let now = pair.now;
            for side in &mut pair.sides {
                side.endpoint.handle_timeout(now, &mut side.host);
            }
        });
    }
    panic!("nothing was asked for again, {lost} frames lost");
}
