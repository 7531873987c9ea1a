//! A laboratory in one process: two nodes, each with the real host, transport and port service over real memfds; between them a wire
//! that loses and repeats what its script says. One engine, the *subject*, may die; its application, its peer and the wire survive.
//!
//! Problem: exactly-once across an engine's death is a promise of many parts (commit order, restore, the transport's recovery), and a
//! test of each part alone misses what they do to each other. Idea: a [`World`] runs a [`Script`] in virtual time, wholly determined
//! by it; whatever the subject does, it does under a [`Risk`], which decides whether it lives through it, dies in it, or is found dead
//! with a given [`Image`]. Tests beside the engine let it die before every store (`engine/tests/stops.rs`); the stepping tests, in a
//! program as it is built, after every instruction (`steps/`). At the end [`World::check`] asks both applications.
//!
//! It is compiled for tests and with the feature `conversation`; the engine's code is the same with and without.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a check speaks

mod application;
mod engine;
mod memory;
mod ping_pong;
mod script;
mod stream;

use std::os::fd::AsFd;

use portolan_abi::event::Certainty;
use portolan_transport::ident::Nanos;

pub use application::{Application, Fate, Message};
pub use engine::{Engine, TakeOver};
pub use memory::{Image, Memory, Progress, geometry};
pub use ping_pong::PingPong;
pub use script::Script;
pub use stream::{Meter, Part, Stream, StreamMemories};

use super::crossing::{CrossingReceiver, CrossingSender, SLOT_BYTES};

/// Virtual time of a turn.
const TURN: Nanos = 50_000;
/// Turns after which nothing comes of it any more.
const PATIENCE: u32 = 20_000;
/// After the end of the script, so that late copies are noticed.
const AFTERMATH: Nanos = 100_000_000;

/// What the subject is doing.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    TakeOver(TakeOver),
    Turn,
    Open,
    Close,
}

/// Decides about the subject's life.
pub trait Risk {
    /// Lets the subject do its work; `None`: it died doing it, and left its memory as it is now.
    fn run<R>(&mut self, work: Work, memory: &Memory, body: impl FnOnce() -> R) -> Option<R>;
}

/// Nothing happens to it.
pub struct Safe;

impl Risk for Safe {
    fn run<R>(&mut self, _: Work, _: &Memory, body: impl FnOnce() -> R) -> Option<R> {
        Some(body())
    }
}

/// Both ends' memory; made once, used by one world after the other.
pub struct Memories {
    pub subject: Memory,
    pub peer: Memory,
}

impl Default for Memories {
    fn default() -> Self {
        Self {
            subject: Memory::new(1),
            peer: Memory::new(2),
        }
    }
}

/// The supervisor's journal of the subject's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    Open,
    Closing,
    Closed,
}

/// One end of the wire, in the world's hands.
struct End {
    from: CrossingReceiver,
    to: CrossingSender,
    /// Frames so far towards this end.
    count: usize,
}

impl End {
    fn new(memory: &Memory) -> Self {
        Self {
            from: CrossingReceiver::map(memory.wire_out().as_fd()).unwrap(),
            to: CrossingSender::map(memory.wire_in().as_fd()).unwrap(),
            count: 0,
        }
    }
}

/// Everything there is.
pub struct World<'m> {
    memories: &'m Memories,
    script: Script,
    subject: Option<Engine>,
    peer: Engine,
    application: Application,
    partner: Application,
    phase: Phase,
    generation: u32,
    subject_end: End,
    peer_end: End,
    /// Frames towards the subject that come again, and when.
    late: Vec<(Nanos, Vec<u8>)>,
    now: Nanos,
    buffer: Vec<u8>,
    deaths: u32,
    /// Turns after which the subject's ledger named messages committed ahead of a stream's base.
    pub ahead: u32,
}

impl<'m> World<'m> {
    pub fn new(memories: &'m Memories, script: &Script) -> Self {
        memories.subject.empty();
        memories.peer.empty();
        let now = 1_000_000;
        let take_over = TakeOver {
            port: Some(1),
            now,
            policy: script.policy,
        };
        let peer = take_over.run(&memories.peer);
        let mut application =
            Application::new(&memories.subject, 2, &script.to_peer, &script.to_subject);
        let partner = Application::new(&memories.peer, 1, &script.to_subject, &script.to_peer);
        application.buffers_from = script.buffers_from;
        application.reads(script.reads);
        application.commands = script.commands;
        application.buffers = script.buffers;
        Self {
            memories,
            script: script.clone(),
            subject: None,
            peer,
            application,
            partner,
            phase: Phase::Opening,
            generation: 1,
            subject_end: End::new(&memories.subject),
            peer_end: End::new(&memories.peer),
            late: Vec::new(),
            now,
            buffer: vec![0; SLOT_BYTES],
            deaths: 0,
            ahead: 0,
        }
    }

    /// Runs the script to its end and looks whether everybody got what was theirs.
    pub fn run<R: Risk>(memories: &'m Memories, script: &Script, risk: &mut R) -> Self {
        let mut world = Self::new(memories, script);
        let mut done_at = None;
        for _ in 0..PATIENCE {
            if world.is_done() {
                let since = *done_at.get_or_insert(world.now);
                if world.now > since + AFTERMATH {
                    world.check();
                    return world;
                }
            }
            world.step(risk);
        }
        panic!(
            "nothing comes of it any more: subject {:?}, received {:?}; peer {:?}, received {:?}",
            world.application.fates,
            world.application.received,
            world.partner.fates,
            world.partner.received
        );
    }

    fn is_done(&self) -> bool {
        let reopened = self.script.close_at.is_none() || self.generation > 1;
        let settled = matches!(self.phase, Phase::Open) && reopened && self.subject.is_some();
        settled && self.application.is_done() && self.partner.is_done() && self.late.is_empty()
    }

    /// One turn of everybody.
    fn step<R: Risk>(&mut self, risk: &mut R) {
        let now = self.now;
        if self.phase == Phase::Open {
            self.application.turn(now);
        }
        self.partner.turn(now);
        let mut worked = self.subject_turn(risk);
        worked |= self.supervise(risk);
        worked |= self.carry();
        worked |= self.peer.turn(now);
        worked |= self.carry();
        self.peer.check_consistency();
        assert_eq!(self.peer.fault(), None);
        self.now = if worked {
            now + TURN
        } else {
            self.next_at().unwrap_or(now + AFTERMATH).max(now + TURN)
        };
    }

    /// When anybody has something to do by itself.
    fn next_at(&self) -> Option<Nanos> {
        let subject = self.subject.as_ref().and_then(Engine::due_at);
        let late = self.late.iter().map(|(at, _)| *at).min();
        let script = [self.script.close_at, self.script.reopen_at];
        let script = script
            .into_iter()
            .flatten()
            .filter(|at| *at > self.now)
            .min();
        [
            subject,
            self.peer.due_at(),
            self.application.next_at(self.now),
            self.partner.next_at(self.now),
            late,
            script,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The subject's part of a turn.
    fn subject_turn<R: Risk>(&mut self, risk: &mut R) -> bool {
        let (memory, now) = (&self.memories.subject, self.now);
        let Some(mut engine) = self.subject.take() else {
            // Also of a port that is being closed: what was committed in it must reach the ledger before its streams are answered for.
            let port = Some(self.generation).filter(|_| self.phase != Phase::Closed);
            let policy = self.script.policy;
            let take_over = TakeOver { port, now, policy };
            let work = Work::TakeOver(take_over);
            self.subject = risk.run(work, memory, || take_over.run(memory));
            if self.subject.is_none() {
                self.deaths += 1;
            } else if self.phase == Phase::Opening {
                self.phase = Phase::Open;
            }
            return true;
        };
        let turned = risk.run(Work::Turn, memory, move || {
            let worked = engine.turn(now);
            (engine, worked)
        });
        self.survived(turned)
    }

    /// The outcome of the subject's work.
    fn survived(&mut self, outcome: Option<(Engine, bool)>) -> bool {
        let Some((engine, worked)) = outcome else {
            self.deaths += 1;
            return true;
        };
        engine.check_consistency();
        // A port that was told closed, by an engine that could not tell the supervisor, is one that fails.
        if self.phase == Phase::Open {
            assert_eq!(engine.fault(), None, "the subject blames its application");
        }
        self.ahead += u32::from(self.memories.subject.is_ahead());
        self.subject = Some(engine);
        worked
    }

    /// The supervisor closes the subject's port and opens it again, as the script says.
    fn supervise<R: Risk>(&mut self, risk: &mut R) -> bool {
        let (memory, now) = (&self.memories.subject, self.now);
        let closes = self.script.close_at.is_some_and(|at| at <= now) && self.generation == 1;
        if self.phase == Phase::Open && closes {
            self.phase = Phase::Closing;
        }
        if self.phase == Phase::Closing {
            if let Some(mut engine) = self.subject.take() {
                let closed = risk.run(Work::Close, memory, move || {
                    engine.close(now);
                    (engine, true)
                });
                self.survived(closed);
                if self.subject.is_some() {
                    self.phase = Phase::Closed;
                    self.application.read_events();
                }
            }
            return true;
        }
        if self.phase == Phase::Closed && self.script.reopen_at.is_some_and(|at| at <= now) {
            memory.renew_port();
            self.application.reopen(memory);
            self.generation += 1;
            self.phase = Phase::Opening;
            let generation = self.generation;
            if let Some(mut engine) = self.subject.take() {
                let opened = risk.run(Work::Open, memory, move || {
                    engine.open(memory, generation);
                    (engine, true)
                });
                self.survived(opened);
                if self.subject.is_some() {
                    self.phase = Phase::Open;
                }
            }
            return true;
        }
        false
    }

    /// Moves frames over the wire.
    fn carry(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..self.subject_end.from.available() {
            moved = true;
            let frame = self
                .subject_end
                .from
                .pop(&mut self.buffer)
                .unwrap_or_default();
            let nth = self.peer_end.count;
            self.peer_end.count += 1;
            if !self.script.lose_out.contains(&nth) {
                self.peer_end.to.push(&[frame]);
            }
        }
        for _ in 0..self.peer_end.from.available() {
            moved = true;
            let frame = self.peer_end.from.pop(&mut self.buffer).unwrap_or_default();
            let nth = self.subject_end.count;
            self.subject_end.count += 1;
            for late in &self.script.late_in {
                self.late.push((self.now + late, frame.to_vec()));
            }
            if !self.script.lose_in.contains(&nth) {
                self.subject_end.to.push(&[frame]);
            }
        }
        let now = self.now;
        let to = &mut self.subject_end.to;
        self.late.retain(|(at, frame)| {
            if *at <= now {
                moved = true;
                to.push(&[frame]);
            }
            *at > now
        });
        moved
    }

    /// Deaths of the subject so far.
    pub fn deaths(&self) -> u32 {
        self.deaths
    }

    /// Events that told the subject's application of the ends of several sends.
    pub fn told_of_several(&self) -> u32 {
        self.application.told_of_several
    }

    /// What the subject's transport counted in its last life.
    pub fn counter(&self, name: &str) -> u64 {
        self.subject
            .as_ref()
            .map_or(0, |engine| engine.counter(name))
    }

    /// Every message once, with the status it deserves.
    pub fn check(&self) {
        let both = [
            ("to the peer", &self.application, &self.partner),
            ("to the subject", &self.partner, &self.application),
        ];
        for (way, sender, receiver) in both {
            for (nth, fate) in sender.fates.iter().enumerate() {
                let got = receiver.received.iter().filter(|tag| **tag == nth as u64);
                let got = got.count();
                let right = match fate {
                    Fate::Ended(end) => match end.certainty {
                        Certainty::Delivered => got == 1,
                        Certainty::NotDelivered => got == 0 && self.script.may_fail,
                        Certainty::MaybeDelivered => got <= 1 && self.script.may_fail,
                    },
                    Fate::Abandoned => got <= 1 && self.script.may_fail,
                    Fate::Unsent | Fate::Out => false,
                };
                assert!(right, "message {nth} {way}: {fate:?}, received {got} times");
            }
            for priority in [0, 1] {
                let stream = receiver.received.iter();
                let stream =
                    stream.filter(|tag| sender.script[**tag as usize].priority == priority);
                assert!(
                    self.script.any_order || stream.is_sorted(),
                    "{way}, out of order: {:?}",
                    receiver.received
                );
            }
        }
    }
}
