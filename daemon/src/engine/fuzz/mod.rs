//! Fuzz target `client_memory`: everything an application can write, read by the engine's real code.
//!
//! Two ports of one engine, in real memfds, with a real ledger and endpoint; what the engine sends goes to itself. One port belongs to an
//! application that follows the rules ([`honest`]); into the client half of the other the input writes what it likes
//! ([`hostile`]): slots, ring words, indices, holes. Engines die at stores the input names, and another takes over.
//!
//! Expected: no panic; a port that is closed is closed with a reason its application can read; whatever happens, the honest application's
//! messages arrive once, in order and unchanged, each send ends *Delivered*, and the bytes it did not offer stay as they were.
//!
//! It lives here because it needs what nobody else may have: the engine's insides. It is compiled for tests, which replay the corpus,
//! and by `cargo xtask fuzz`.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a target speaks

mod honest;
mod hostile;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use portolan_abi::ledger::{LedgerGeometry, LedgerHeader};
use portolan_abi::memory::{ClientHalf, EngineHalf, LedgerMapping, create_sealed};
use portolan_abi::port::{CloseReason, PortGeometry, state};
use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::ident::{Nanos, NodeId, PortId};
use portolan_transport::policy::Policy;
use rustix::fs::{FallocateFlags, fallocate};

use super::commit_point::dies_at;
use super::counters::EngineCounters;
use super::host::EngineHost;
use super::ledger_facts::Facts;
use super::ports::PortParts;
use super::{restore, serve};

use honest::Honest;
use hostile::Hostile;

const HONEST: u16 = 1;
const HOSTILE: u16 = 2;
const NODE: u16 = 1;
/// A node that never answers.
const ABSENT: u16 = 2;
/// Engine turns of one run.
const TURNS: u32 = 2_000;
/// Frames the engine sends in one turn.
const FRAMES_PER_TURN: usize = 64;
const MS: Nanos = 1_000_000;

const LEDGER: LedgerGeometry = LedgerGeometry {
    peers: 4,
    send_streams: 8,
    receive_streams: 8,
    frames: 8,
};

/// One input.
pub fn client_memory(input: &[u8]) {
    thread_local! {
        static MEMORY: Memory = Memory::new();
    }
    MEMORY.with(|memory| run(memory, input));
}

fn run(memory: &Memory, input: &[u8]) {
    memory.empty();
    let mut world = World::new(memory);
    let mut hostile = Hostile::new(memory, input);
    while let Some(turns) = hostile.act(&mut world) {
        for _ in 0..turns {
            world.turn();
        }
        if world.turns > TURNS {
            break;
        }
    }
    world.heal();
}

/// What survives engines, made once per process: an engine's ledger is borrowed for ever.
struct Memory {
    ledger: OwnedFd,
    mapped: &'static LedgerMapping,
    honest: Halves,
    hostile: Halves,
}

/// A port's two halves.
struct Halves {
    port: u16,
    geometry: PortGeometry,
    client: OwnedFd,
    engine: OwnedFd,
}

impl Halves {
    fn new(port: u16, tokens: u32, arena: u64) -> Self {
        let geometry = PortGeometry::new(tokens, tokens, arena).unwrap();
        Self {
            port,
            geometry,
            client: create_sealed("client", geometry.client_half_bytes()).unwrap(),
            engine: create_sealed("engine", geometry.engine_half_bytes()).unwrap(),
        }
    }

    fn map(&self) -> (ClientHalf, EngineHalf) {
        (
            ClientHalf::map(self.client.as_fd(), self.geometry).unwrap(),
            EngineHalf::map(self.engine.as_fd(), self.geometry, true).unwrap(),
        )
    }

    /// As the supervisor makes them for a new port.
    fn renew(&self) {
        punch(&self.client, 0, self.geometry.client_half_bytes());
        punch(&self.engine, 0, self.geometry.engine_half_bytes());
        let (client, engine) = self.map();
        client.initialise();
        engine.initialise(NODE, self.port);
    }

    fn parts(&self, generation: u32) -> PortParts {
        let bell = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        PortParts {
            port: self.port,
            generation,
            geometry: self.geometry,
            client: self.client.try_clone().unwrap(),
            engine: self.engine.try_clone().unwrap(),
            event_bell: bell(),
            engine_bell: bell(),
        }
    }
}

/// Takes the pages away: they read as zeros.
fn punch(fd: &OwnedFd, from: usize, bytes: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, flags, from as u64, bytes as u64).unwrap();
}

impl Memory {
    fn new() -> Self {
        let ledger = LedgerMapping::create(LEDGER).unwrap();
        let mapped = LedgerMapping::map(&ledger, LEDGER).unwrap();
        Self {
            ledger,
            mapped: Box::leak(Box::new(mapped)),
            honest: Halves::new(HONEST, 8, 1 << 16),
            hostile: Halves::new(HOSTILE, 4, 1 << 14),
        }
    }

    fn empty(&self) {
        punch(&self.ledger, 0, LEDGER.bytes());
        self.mapped.ledger().initialise(77);
        self.honest.renew();
        self.hostile.renew();
    }

    fn header(&self) -> &'static LedgerHeader {
        self.mapped.ledger().header()
    }
}

/// An engine at work.
struct Running {
    host: EngineHost,
    endpoint: Endpoint,
    counters: EngineCounters,
}

/// The engine, the honest application, and what the supervisor remembers.
struct World<'m> {
    memory: &'m Memory,
    running: Running,
    honest: Honest,
    now: Nanos,
    turns: u32,
    /// Generation of the hostile port; whether the supervisor thinks it open.
    generation: u32,
    open: bool,
    /// Stores until the engine dies.
    dies_in: Option<u64>,
}

impl<'m> World<'m> {
    fn new(memory: &'m Memory) -> Self {
        let now = MS;
        Self {
            memory,
            running: start(memory, now, &[(&memory.honest, 1), (&memory.hostile, 1)]),
            honest: Honest::new(&memory.honest),
            now,
            turns: 0,
            generation: 1,
            open: true,
            dies_in: None,
        }
    }

    /// One loop of the engine, and the honest application's part.
    fn turn(&mut self) {
        self.turns += 1;
        self.now += MS / 20;
        let (now, running) = (self.now, &mut self.running);
        match self.dies_in.take() {
            None => running.turn(now),
            Some(stores) => {
                if dies_at(stores, || running.turn(now)).is_some() {
                    self.take_over();
                }
            }
        }
        self.close_failed();
        self.honest.turn();
    }

    /// As the engine does in the same loop, but for the supervisor's part.
    fn close_failed(&mut self) {
        let host = &self.running.host;
        let fault = |port| host.ports.get(port).and_then(super::ports::Port::fault);
        assert_eq!(fault(HONEST), None, "the honest port is blamed");
        let Some(reason) = fault(HOSTILE) else { return };
        let blamed = matches!(
            reason,
            CloseReason::RingJump
                | CloseReason::BadToken
                | CloseReason::BadMemory
                | CloseReason::Poison
        );
        assert!(blamed, "closed because of {reason:?}");
        self.close(reason);
    }

    /// Closes the hostile port.
    fn close(&mut self, reason: CloseReason) {
        let Running { host, endpoint, .. } = &mut self.running;
        endpoint.port_closed(self.now, PortId(HOSTILE), host);
        if let Some(port) = host.ports.remove(HOSTILE) {
            port.close(reason);
            let (_, engine) = self.memory.hostile.map();
            let word = engine.header().state.load(Ordering::Relaxed);
            assert_eq!(word as u32, state::CLOSED);
            assert_eq!(CloseReason::from_code((word >> 32) as u32), Some(reason));
        }
        self.open = false;
    }

    /// The hostile application opens its port again, in fresh memory.
    fn reopen(&mut self) {
        if self.open {
            self.close(CloseReason::ByOwner);
        }
        self.memory.hostile.renew();
        self.generation += 1;
        self.open = true;
        let parts = self.memory.hostile.parts(self.generation);
        self.running.host.open_fresh(parts).unwrap();
        self.running.endpoint.port_opened(PortId(HOSTILE));
    }

    /// The engine is dead; the next one finds what it stored.
    fn take_over(&mut self) {
        let memory = self.memory;
        let mut ports = vec![(&memory.honest, 1)];
        if self.open {
            ports.push((&memory.hostile, self.generation));
        }
        self.running = start(memory, self.now, &ports);
    }

    /// The hostile application stops. Expect: the honest one's sends end well.
    fn heal(&mut self) {
        self.dies_in = None;
        self.honest.finish();
        for _ in 0..TURNS {
            if self.honest.is_done() {
                return self.honest.check_untouched();
            }
            self.turn();
            self.now += MS;
        }
        panic!(
            "the honest application's sends do not end: {:?}",
            self.honest
        );
    }
}

/// An engine that takes over what there is, which may be nothing.
fn start(memory: &Memory, now: Nanos, ports: &[(&Halves, u32)]) -> Running {
    let facts = Facts::adopt(memory.mapped.ledger());
    let engine_epoch = facts.raise_engine_epoch(0);
    let mut host = EngineHost::new(facts, 1_000_000);
    for (halves, generation) in ports {
        let parts = halves.parts(*generation);
        restore::take_up_parts(&mut host, parts).unwrap();
    }
    let durable = restore::durable(&mut host);
    let config = Config {
        node: NodeId(NODE),
        queue: 0,
        queues: 1,
        incarnation: memory.header().incarnation.load(Ordering::Relaxed),
        engine_epoch,
        cluster: 5,
        name: "fuzz".to_owned(),
        max_frame: 1458,
        max_peers: LEDGER.peers as usize,
        first_number: u32::MAX - 3,
        policy: Policy {
            unreachable_after_ms: 1_000,
            stream_idle_ms: 20,
            ..Policy::default()
        },
    };
    let mut endpoint = Endpoint::restore(config, now, &durable);
    for node in [NODE, ABSENT] {
        endpoint.set_node(now, NodeId(node), 1458);
    }
    for (halves, _) in ports {
        endpoint.port_opened(PortId(halves.port));
    }
    Running {
        host,
        endpoint,
        counters: EngineCounters::default(),
    }
}

impl Running {
    fn turn(&mut self, now: Nanos) {
        let Self {
            host,
            endpoint,
            counters,
        } = self;
        for nth in 0..host.ports.count() {
            if let Some(number) = host.ports.number(nth) {
                serve::serve_port(now, number, host, endpoint, counters);
                serve::serve_buffers(now, number, host, endpoint, counters);
            }
        }
        if endpoint.poll_timeout().is_some_and(|at| at <= now) {
            endpoint.handle_timeout(now, host);
        }
        let mut frame = vec![0; 1458];
        for _ in 0..FRAMES_PER_TURN {
            let Some(sent) = endpoint.poll_transmit(now, &mut frame, host) else {
                break;
            };
            if sent.peer.node == NodeId(NODE) {
                endpoint.handle_frame(now, &[&frame[..sent.len]], host).ok();
            }
        }
        for number in [HONEST, HOSTILE] {
            if let Some(port) = host.ports.get_mut(number) {
                port.fire_alarm(now);
                port.wake_if_wanted();
                port.announce_sleep();
                port.has_work();
                port.withdraw_sleep();
            }
        }
        endpoint.check_consistency();
    }
}

#[cfg(test)]
mod corpus {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::path::Path;

    // Every input of the corpus again, without a fuzzer.
    #[test]
    fn client_memory_corpus() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/client_memory");
        let mut files: Vec<_> = std::fs::read_dir(&corpus)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        assert!(files.len() > 10, "the corpus is lost");
        for file in files {
            let input = std::fs::read(&file).unwrap();
            let run = AssertUnwindSafe(|| super::client_memory(&input));
            if let Err(panic) = catch_unwind(run) {
                let file = file.display();
                eprintln!("repeat with: cargo xtask fuzz client_memory --replay {file}");
                resume_unwind(panic);
            }
        }
    }
}
