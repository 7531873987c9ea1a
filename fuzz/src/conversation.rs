//! Target `conversation`: endpoints that talk to each other while the input decides what their applications, their network, their engines'
//! lives and, in half of all runs, a lying third node do.
//!
//! The input is a program: a few bytes of circumstances ([`Circumstances`]), then steps of an opcode and its operands, until it ends. Then
//! everything heals. Time is virtual and everything random comes from a seed in the input.
//!
//! Expected, checked by `portolan-sim` at every step: messages arrive at most once, in order, unchanged, and no status lies; the endpoint
//! keeps its contract with its host, and its own invariants hold; tables stay within their bounds. After healing: every send of an honest
//! node gets its status, and without liars every token comes back.
//!
//! A liar knows every checksum and incarnation (forged headers and chunks are sealed properly): what it says of its own streams may come
//! true, but it must not touch what others were promised.

use portolan_sim::harness::{AfterFailure, Faults, MS, Net, SECOND, US, engine, node};
use portolan_transport::ident::{NodeId, Peer, PortId, Priority, SendId};
use portolan_transport::policy::{Order, Policy, Profile};
use portolan_transport::wire::bare::BARE_LEN;
use portolan_transport::wire::frame::FRAME_HEADER_LEN;
use portolan_transport::wire::header_area_len;

use crate::frame::put_right;
use crate::input::Input;

/// The node whose frames are forged.
const LIAR: u16 = 3;
/// Ports 1 to this on each node.
const PORTS: u16 = 2;
/// Bytes of a receive buffer: several grants, below; what is longer nobody takes.
const LONGEST: u32 = 48 * 1024;
/// Messages of one run.
const MESSAGES: usize = 300;
/// Frames remembered, to be sent again or forged.
const REMEMBERED: usize = 64;
/// Where a frame says from whom it comes and to whom it goes.
const ADDRESSES: std::ops::Range<usize> = 8..14;

/// One input.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let mut run = Run::new(&mut input);
    while !input.is_empty() && run.net.book.borrow().len() < MESSAGES {
        run.step(&mut input);
        run.bounds();
    }

    run.heal();
}

/// What does not change in a run.
struct Circumstances {
    nodes: u16,
    hostile: bool,
    /// Records a ledger holds; a small one excludes restarts, which may fill it for ever.
    records: usize,
}

struct Run {
    net: Net,
    given: Circumstances,
    sends: Vec<(NodeId, SendId)>,
    frames: Vec<(Peer, Vec<u8>)>,
}

impl Run {
    fn new(input: &mut Input<'_>) -> Self {
        let shape = input.u8();
        let hostile = shape & 1 != 0;
        let nodes = if hostile { LIAR } else { 2 };
        let profiles = Profile::ALL.map(Profile::policy);
        // The book wants messages in the order they were sent.
        let in_order = profiles.iter().filter(|p| p.order == Order::Number);
        let policy = in_order.cycle().nth(usize::from(input.u8() & 15));
        let policy = policy.copied().unwrap_or_default();
        let policy = Policy {
            rto_max_us: policy.rto_max_us.min(100_000).max(policy.rto_min_us),
            unreachable_after_ms: 200,
            stream_idle_ms: 50,
            grant_bytes: 8 * 1024,
            grant_budget_bytes: 32 * 1024,
            ..policy
        };
        assert_eq!(policy.validate(), Ok(()));
        let mut net = Net::with_policy(u64::from(input.u8()), nodes, 1, policy);
        if shape & 2 != 0 {
            (net.max_frame, net.segment) = (8958, 3776);
        }
        net.first_number = u32::MAX - u32::from(shape >> 4);
        net.after_failure = match shape >> 2 & 3 {
            0 | 1 => AfterFailure::Resume,
            2 => AfterFailure::Drop,
            _ => AfterFailure::Nothing,
        };
        let records = match input.u8() {
            few @ 1..8 => few.into(),
            _ => 64,
        };
        if hostile {
            net.book.borrow_mut().liars.push(node(LIAR));
        }
        for id in 1..=nodes {
            // Again, with the settings above.
            net.boot(node(id), 1);
            net.host(engine(id)).max_records = records;
            for port in 1..=PORTS {
                net.open(node(id), port, 1 + usize::from(port), LONGEST);
            }
        }
        net.record(true);
        let given = Circumstances {
            nodes,
            hostile,
            records,
        };
        Self {
            net,
            given,
            sends: Vec::new(),
            frames: Vec::new(),
        }
    }

    fn end(&self, byte: u8) -> (u16, u16) {
        let byte = u16::from(byte);
        (1 + byte % self.given.nodes, 1 + (byte >> 4) % PORTS)
    }

    fn is_open(&mut self, id: u16, port: u16) -> bool {
        self.net.host(engine(id)).max_len(PortId(port)).is_some()
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 16 {
            0..=2 => self.send(input),
            3 | 4 => self.time(input),
            5 => self.weather(input),
            6 => {
                let id = self.end(input.u8()).0;
                self.net.kill_at_step(engine(id), input.u8().into());
            }
            7 => {
                let (id, pause) = (self.end(input.u8()).0, input.u8());
                self.net.kill(engine(id), u64::from(pause) * 20 * US);
            }
            8 => self.port(input),
            9 => {
                let which = usize::from(input.u8());
                if let Some((id, send)) = self.sends.iter().rev().nth(which).copied() {
                    self.net.cancel(id, send);
                }
            }
            10 => {
                let (pair, up) = (input.u8(), input.u8() & 1 != 0);
                let (a, b) = (self.end(pair).0, self.end(pair >> 4).0);
                self.net.link(node(a), node(b), up);
            }
            11 => self.restart(input),
            12 => {
                let id = self.end(input.u8()).0;
                let longest = self.net.max_frame;
                let frame = *input.pick(&[576, 1000, longest, longest]);
                self.net.path_to(node(id), frame);
            }
            13 => self.repeat(input),
            _ if self.given.hostile => self.forge(input),
            14 => self.net.provide_again = input.u8() & 1 != 0,
            _ => self.tokens(input),
        }
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let (ends, how) = (input.u8(), input.u8());
        let (from, to) = (self.end(ends), self.end(ends.rotate_left(3)));
        if !self.is_open(from.0, from.1) {
            return;
        }
        let longest = u32::from(self.net.max_frame);
        let len = match how & 7 {
            0 => 0,
            1 | 2 => u32::from(input.u8()),
            // Around what one frame carries.
            3 => longest - u32::from(input.u8()),
            4 => u32::from(input.u16()) >> 3,
            5 => longest * u32::from(input.u8() & 15),
            6 => u32::from(input.u16()) >> 1,
            // As long as a buffer, and longer than any.
            _ => LONGEST + u32::from(input.u8() & 1),
        };
        let priority = if how & 8 == 0 {
            Priority::Low
        } else {
            Priority::High
        };
        let deadline = match how >> 4 & 3 {
            0 => self.net.now + u64::from(input.u8()) * 100 * US,
            _ => u64::MAX,
        };
        for _ in 0..[1, 1, 4, 12][usize::from(how >> 6)] {
            let (_, send) = self.net.send_with(from, to, priority, len, deadline);
            self.sends.push((node(from.0), send));
        }
    }

    fn time(&mut self, input: &mut Input<'_>) {
        let time = input.u8();
        let unit = [US, 8 * US, 100 * US, 4 * MS][usize::from(time & 3)];
        self.net.run_for(unit * u64::from(time >> 2));
        let new = self.net.record(true);
        self.frames.extend(new);
        let old = self.frames.len().saturating_sub(REMEMBERED);
        self.frames.drain(..old);
    }

    /// What the network does from now on.
    fn weather(&mut self, input: &mut Input<'_>) {
        let how = input.u8();
        let chance = [0, 50, 300, 1000];
        let at = |shift: u8| chance[usize::from(how >> shift & 3)];
        self.net.faults = Faults {
            loss: at(0),
            duplicate: at(2),
            corrupt: at(4) / 2,
            late: at(6),
            late_by: (1 + u64::from(input.u8())) * 20 * US,
            ..Faults::NONE
        };
    }

    fn port(&mut self, input: &mut Input<'_>) {
        let (end, tokens) = (input.u8(), input.u8());
        let (id, port) = self.end(end);
        if self.is_open(id, port) {
            self.net.close(node(id), port);
        } else if self.net.is_alive(engine(id)) {
            self.net
                .open(node(id), port, usize::from(tokens & 3), LONGEST);
        }
    }

    fn restart(&mut self, input: &mut Input<'_>) {
        let (id, _) = self.end(input.u8());
        if self.given.records < 64 || id == LIAR {
            return;
        }
        self.net.boot(node(id), 1);
        self.sends.retain(|(from, _)| *from != node(id));
    }

    /// A frame of the past arrives once more.
    fn repeat(&mut self, input: &mut Input<'_>) {
        let (which, times) = (usize::from(input.u8()), input.u8() & 3);
        if let Some((to, frame)) = self.frames.iter().rev().nth(which).cloned() {
            for _ in 0..=times {
                self.net.inject(to, frame.clone());
            }
        }
    }

    fn tokens(&mut self, input: &mut Input<'_>) {
        let (end, how) = (input.u8(), input.u8());
        let (id, port) = self.end(end);
        if self.is_open(id, port) {
            let len = [0, 100, 5000, LONGEST][usize::from(how & 3)];
            let priority = if how & 4 == 0 {
                Priority::Low
            } else {
                Priority::High
            };
            self.net.provide(node(id), PortId(port), priority, len);
        }
    }

    /// A frame of the liar's with something else in it.
    fn forge(&mut self, input: &mut Input<'_>) {
        let (which, how) = (usize::from(input.u8()), input.u8());
        let liar = node(LIAR).0.to_be_bytes();
        let mut from_liar = self.frames.iter().filter(|(_, frame)| frame[8..10] == liar);
        let count = from_liar.clone().count().max(1);
        let Some((to, frame)) = from_liar.nth(which % count) else {
            return;
        };
        let (to, mut frame) = (*to, frame.clone());
        let addresses = frame[ADDRESSES].to_vec();
        let headers = header_area_len(&frame).unwrap_or_default();
        let bare = headers == BARE_LEN;
        match how & 7 {
            // One chunk, as the input says.
            0 | 1 if !bare => {
                let (kind, flags) = (input.u8(), input.u8());
                let len = usize::from(input.u8() & 31) * 4;
                let mut chunk = vec![kind % 26, flags];
                chunk.extend((len as u16 + 4).to_be_bytes());
                chunk.extend(input.bytes(len));
                chunk.resize(len + 4, 0);
                let payload = input.bytes(usize::from(how >> 3)).to_vec();
                frame.truncate(FRAME_HEADER_LEN);
                frame[3] = 1;
                frame[4..6].copy_from_slice(&((FRAME_HEADER_LEN + len + 4) as u16).to_be_bytes());
                frame.extend(chunk);
                frame.extend(payload);
            }
            // Another kind.
            2 if headers > FRAME_HEADER_LEN => {
                frame[FRAME_HEADER_LEN] = input.u8() % 26;
                frame[FRAME_HEADER_LEN + 1] ^= input.u8();
            }
            // The payload.
            3 if headers < frame.len() => {
                let at = headers + usize::from(input.u16()) % (frame.len() - headers);
                frame[at] ^= 1 | input.u8();
            }
            // A field of the frame header, or of a chunk.
            _ => {
                let words = if how & 4 == 0 && !bare {
                    FRAME_HEADER_LEN / 4
                } else {
                    headers / 4
                };
                let at = usize::from(input.u8()) % words * 4;
                let word = &mut frame[at..at + 4];
                let old = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
                let new = match how >> 3 & 3 {
                    0 => old.wrapping_add(input.u8().into()).wrapping_sub(128),
                    1 => *input.pick(&[0, 1, u32::MAX, 1 << 31, u32::MAX >> 1]),
                    _ => input.u32(),
                };
                word.copy_from_slice(&new.to_be_bytes());
            }
        }
        frame[ADDRESSES].copy_from_slice(&addresses);
        put_right(&mut frame, bare);
        self.net.inject(to, frame);
    }

    /// Nothing grows beyond what was allowed.
    fn bounds(&mut self) {
        for peer in self.net.peers() {
            let (sending, receiving) = self.net.host(peer).records();
            assert!(sending <= self.given.records && receiving <= self.given.records);
            if self.net.is_alive(peer) {
                let endpoint = self.net.endpoint(peer);
                assert!(endpoint.unsettled() <= self.sends.len());
                assert!(endpoint.peers().count() <= usize::from(self.given.nodes));
            }
        }
    }

    /// All faults end. Expect: everything that was promised.
    fn heal(&mut self) {
        self.net.faults = Faults::NONE;
        self.net.provide_again = true;
        if self.net.after_failure == AfterFailure::Nothing {
            self.net.after_failure = AfterFailure::Resume;
            for (from, send) in std::mem::take(&mut self.sends) {
                if let Some(stream) = self.net.host(engine(from.0)).stream_of(send) {
                    self.net.resume_sending(from, stream);
                }
            }
        }
        for a in 1..=self.given.nodes {
            (1..=self.given.nodes).for_each(|b| self.net.link(node(a), node(b), true));
        }
        // Engines that are to die do so first.
        self.net.run_for(5 * MS);
        for id in 1..=self.given.nodes {
            for port in 1..=PORTS {
                if self.is_open(id, port) {
                    for priority in [Priority::Low, Priority::High] {
                        self.net.provide(node(id), PortId(port), priority, LONGEST);
                    }
                }
            }
        }
        if !self.given.hostile {
            return self.net.settle(60 * SECOND);
        }
        let honest = |net: &Net| {
            let book = net.book.borrow();
            let waiting = book.waiting();
            waiting.iter().all(|id| {
                let route = book.message(*id).route;
                [route.from.0, route.to.0].contains(&node(LIAR))
            })
        };
        self.net.run_until(60 * SECOND, "honest messages", honest);
    }
}
