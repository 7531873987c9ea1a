//! End-to-end integrity over a real wire: silent while all is well, engines' deaths included; not when memory between the two libraries changes.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::harness::talker::{Manner, Talker, Talking};
use crate::harness::{Cluster, STEP, books, until};
use portolan::{
    Address, Event, Fault, Integrity, IntegrityReport, Port, PortOptions, Priority, SendOptions,
    Status,
};
use portolan_abi::event::EVENT_WORDS;
use portolan_testbed::Lab;
use rustix::process::{Pid, Signal, kill_process};

/// Longer than an engine's takeover takes, on a busy machine too.
const CONFIRM: Duration = Duration::from_secs(5);

fn options(port: u16) -> PortOptions {
    PortOptions {
        arena_bytes: 32 << 20,
        integrity: Some(Integrity {
            confirm_within: CONFIRM,
        }),
        ..PortOptions::at(port)
    }
}

/// Ends the node's engine and waits until `port` there has another.
fn replace_engine(cluster: &Cluster, node: u16, port: &Talking) {
    let before = port.faults();
    for pid in cluster.daemon(node).engine_pids().unwrap() {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    until("an engine takes over", STEP, || {
        (port.faults() > before).then_some(())
    });
}

// All to all, both priorities, also within a node and from a port to itself, while engines die. Expect: everything arrives once, verified, in
// order; every delivery is confirmed; nobody is told of anything.
#[test]
fn engines_that_die_cause_no_report() {
    let cluster = Cluster::start(Lab::builder());
    let everybody = [(1, 10), (1, 11), (2, 10), (2, 11)];
    let to: Vec<_> = everybody
        .iter()
        .flat_map(|&to| [Priority::Low, Priority::High].map(|p| (Address::from(to), p)))
        .collect();
    let mut all: Vec<_> = everybody
        .iter()
        .map(|&(node, port)| {
            let manner = Manner {
                longest: 20_000,
                ..Manner::default()
            };
            let port = cluster.open(node, options(port));
            Talking::start(Talker::new(port, &to, manner).unwrap())
        })
        .collect();
    all.iter().for_each(|talking| talking.send(true));
    for round in 0..6 {
        let node = 1 + round % 2;
        let index = all.iter().position(|t| t.address.node.0 == node).unwrap();
        replace_engine(&cluster, node, &all[index]);
        for talking in &mut all {
            talking.deliver(200, STEP);
            talking.hear(200, STEP);
        }
    }
    for talking in &mut all {
        talking.settle(STEP);
    }
    // Everybody confirms at the same time: each answers while it asks.
    let talkers: Vec<_> = all.into_iter().map(Talking::finish).collect();
    let threads: Vec<_> = talkers
        .into_iter()
        .map(|mut talker| {
            std::thread::spawn(move || {
                assert_eq!(talker.confirm(CONFIRM).unwrap(), 0);
                // Stays to answer the others.
                let deadline = std::time::Instant::now() + CONFIRM / 4;
                while std::time::Instant::now() < deadline {
                    talker.confirm(Duration::from_millis(10)).unwrap();
                    std::thread::yield_now();
                }
                talker.books()
            })
        })
        .collect();
    let all: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    let complaints = books::complaints(&all);
    assert!(complaints.is_empty(), "{complaints:#?}");
    assert!(all.iter().all(|book| book.failures().count() == 0));
}

/// Two ports on two nodes.
struct Pair {
    one: Port,
    two: Port,
    cluster: Cluster,
}

const TO: (u16, u16) = (2, 11);
const FROM: (u16, u16) = (1, 10);

impl Pair {
    fn start() -> Self {
        let cluster = Cluster::start(Lab::builder());
        Self {
            one: cluster.open(FROM.0, options(FROM.1)),
            two: cluster.open(TO.0, options(TO.1)),
            cluster,
        }
    }

    /// Sends, and waits until the engine calls it delivered: it is committed in the receiver's memory.
    fn commit(&mut self, bytes: &[u8]) {
        self.one
            .send_bytes(TO, bytes, SendOptions::default())
            .unwrap();
        match self.one.blocking_receive(STEP).unwrap().unwrap() {
            Event::Sent(sent) => assert_eq!(sent.status, Status::Delivered),
            other => panic!("{other:?}"),
        }
    }

    fn receive(&mut self) -> Event {
        self.two.blocking_receive(STEP).unwrap().expect("an event")
    }

    fn takes(&mut self, bytes: &[u8]) {
        self.commit(bytes);
        match self.receive() {
            Event::Received(message) => {
                assert!(message.is_verified() && message[..] == *bytes);
                self.two.unknown(Event::Received(message));
            }
            other => panic!("{other:?}"),
        }
    }

    /// What either is told, both looking at their ports, until the sender hears something.
    fn both_hear(&mut self) -> (Vec<IntegrityReport>, Vec<IntegrityReport>) {
        let mut heard = (Vec::new(), Vec::new());
        // Asks now; the answer comes below.
        self.one.confirm(Duration::ZERO).unwrap();
        until("the sender hears of it", STEP, || {
            for (port, heard) in [(&mut self.one, &mut heard.0), (&mut self.two, &mut heard.1)] {
                while let Some(event) = port.receive().unwrap() {
                    match event {
                        Event::Integrity(report) => heard.push(report),
                        other => panic!("{other:?}"),
                    }
                }
            }
            (!heard.0.is_empty()).then_some(())
        });
        heard
    }
}

fn of(fault: Fault, peer: (u16, u16)) -> IntegrityReport {
    IntegrityReport {
        fault,
        peer: Some(peer.into()),
        priority: Some(Priority::Low),
        messages: 1,
    }
}

// A bit of the receiver's arena turns between commit and receive: of the payload's first and last byte, and of what lies behind it.
// Expect: not handed out, reported; the sender, who was told that it is delivered, hears that it is lost; the next one arrives.
#[test]
fn an_arena_that_changes_is_noticed() {
    const LEN: usize = 3000;
    let mut pair = Pair::start();
    let buffer = pair.two.allocate(LEN).unwrap();
    let address = buffer.as_ptr() as u64;
    pair.two
        .provide_receive_buffer(buffer, Priority::Low)
        .unwrap();
    let memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/proc/self/mem")
        .unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|i| i as u8).collect();
    pair.takes(&bytes);
    for at in [0, LEN - 1, LEN + 20] {
        pair.commit(&bytes);
        let mut byte = [0];
        let place = address + at as u64;
        memory.read_exact_at(&mut byte, place).unwrap();
        memory.write_all_at(&[byte[0] ^ 0x10], place).unwrap();
        match pair.receive() {
            Event::Integrity(report) => assert_eq!(report, of(Fault::Changed, FROM)),
            other => panic!("{other:?}"),
        }
        let (sender, receiver) = pair.both_hear();
        assert_eq!(sender, [of(Fault::Lost, TO)]);
        assert_eq!(receiver, [of(Fault::Lost, FROM)]);
        pair.takes(&bytes);
    }
}

/// The event ring of the port that was opened last on a node, written to behind everybody's back.
struct Ring {
    half: fs::File,
    entries: u64,
}

impl Ring {
    fn of(cluster: &Cluster, node: u16, port: u16) -> Self {
        let pid = cluster.daemon(node).pid();
        let half = fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .filter_map(|entry| {
                let path = entry.unwrap().path();
                let target = fs::read_link(&path).ok()?;
                let is_half = target.to_string_lossy().contains("portolan-engine-half");
                let file = is_half.then(|| OpenOptions::new().read(true).write(true).open(path));
                file?.ok()
            })
            .find(|file| {
                let mut number = [0; 4];
                // `EngineHeader::port`.
                file.read_exact_at(&mut number, 20).unwrap();
                u32::from_le_bytes(number) == u32::from(port)
            });
        let half = half.expect("the port's engine half");
        let entries = (half.metadata().unwrap().len() - 4096) / (8 * EVENT_WORDS as u64);
        Self {
            half,
            entries: 1 << entries.ilog2(),
        }
    }

    fn producer(&self) -> u32 {
        let mut index = [0; 4];
        self.half.read_exact_at(&mut index, 192).unwrap();
        u32::from_le_bytes(index)
    }

    /// Changes the newest entry.
    fn change(&self, change: impl FnOnce(&mut [u64; EVENT_WORDS])) {
        let newest = u64::from(self.producer().wrapping_sub(1));
        let at = 4096 + newest % self.entries * 8 * EVENT_WORDS as u64;
        let mut bytes = [0; 8 * EVENT_WORDS];
        self.half.read_exact_at(&mut bytes, at).unwrap();
        let mut words = [0; EVENT_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        change(&mut words);
        for (word, bytes) in words.iter().zip(bytes.chunks_mut(8)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        self.half.write_all_at(&bytes, at).unwrap();
    }
}

// The engine's last word about a message is wrong: its tag, its sender, its length, or it is no event at all. Expect: not handed out;
// reported as what it is, to both; the stream goes on.
#[test]
fn an_event_that_is_wrong_is_noticed() {
    let mut pair = Pair::start();
    for _ in 0..8 {
        let buffer = pair.two.allocate(200).unwrap();
        pair.two
            .provide_receive_buffer(buffer, Priority::Low)
            .unwrap();
    }
    let ring = Ring::of(&pair.cluster, TO.0, TO.1);
    pair.takes(b"first");
    // Words 4, 2, 1 and 5, 0 of an event: tag; node; length and total; kind.
    type Change = fn(&mut [u64; EVENT_WORDS]);
    let changes: [(Change, Fault, bool); 4] = [
        (|w| w[4] ^= 1 << 40, Fault::Changed, true),
        (|w| w[2] ^= 1 << 17, Fault::Misdirected, false),
        (
            |w| {
                w[1] -= 1 << 32;
                w[5] -= 1;
            },
            Fault::Unsealed,
            true,
        ),
        (|w| w[0] |= 0xff, Fault::Nonsense, false),
    ];
    for (change, fault, names_sender) in changes {
        pair.commit(&[7; 100]);
        ring.change(change);
        match pair.receive() {
            Event::Integrity(report) => {
                assert_eq!((report.fault, report.messages), (fault, 1));
                assert_eq!(report.peer == Some(FROM.into()), names_sender, "{report:?}");
            }
            other => panic!("{other:?}"),
        }
        let (sender, receiver) = pair.both_hear();
        assert_eq!(sender, [of(Fault::Lost, TO)]);
        assert_eq!(receiver, [of(Fault::Lost, FROM)]);
        pair.takes(b"next");
    }
}

// One way in nanoseconds, half of a round trip, without and with integrity in turns: `-- --ignored --nocapture cost_on_the_wire`.
#[test]
#[ignore = "a measurement"]
fn cost_on_the_wire() {
    const TURNS: usize = 10;
    let cluster = Cluster::start(Lab::builder());
    let pair = |integrity: bool, port| {
        let options = |port| PortOptions {
            wait: portolan::Wait::Yield,
            integrity: integrity.then(Integrity::default),
            ..options(port)
        };
        [1, 2].map(|node| cluster.open(node, options(port)))
    };
    let mut pairs = [pair(false, 20), pair(true, 21)];
    println!("     bytes  without ns     with ns");
    for (len, rounds) in [
        (0, 2000),
        (48, 2000),
        (64, 2000),
        (1024, 2000),
        (16 << 10, 500),
        (256 << 10, 100),
        (1 << 20, 40),
    ] {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            for ([one, two], times) in pairs.iter_mut().zip(&mut times) {
                times.extend(ping_pong(one, two, len, rounds / TURNS));
            }
        }
        let [without, with] = times.map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2]
        });
        println!("{len:>10} {without:>11} {with:>11}");
    }
}

fn ping_pong(one: &mut Port, two: &mut Port, len: usize, rounds: usize) -> Vec<u128> {
    let echo = |port: &mut Port| loop {
        match port.blocking_receive(STEP).unwrap().unwrap() {
            Event::Received(message) => break message,
            other => port.unknown(other),
        }
    };
    let (here, there) = (one.address(), two.address());
    let bytes = vec![0x5a; len];
    for port in [&mut *one, &mut *two] {
        while port.buffers_provided() < 4 {
            let buffer = port.allocate(1 << 20).unwrap();
            port.provide_receive_buffer(buffer, Priority::Low).unwrap();
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                let message = echo(two);
                two.unknown(Event::Received(message));
                two.send_bytes(here, &bytes, SendOptions::default())
                    .unwrap();
            }
        });
        (0..rounds)
            .map(|_| {
                let start = std::time::Instant::now();
                one.send_bytes(there, &bytes, SendOptions::default())
                    .unwrap();
                let message = echo(one);
                let time = start.elapsed().as_nanos() / 2;
                one.unknown(Event::Received(message));
                time
            })
            .collect()
    })
}
