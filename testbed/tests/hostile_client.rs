//! An application that does everything it can do wrong with what the daemon gave it, in a lab of two nodes. Its port closes with a
//! named reason or goes on; the engine lives, and so does everybody else's traffic.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod hostile;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hostile::STEP;
use hostile::control::Control;
use hostile::neighbour::{Echo, PingPong};
use hostile::random::Random;
use hostile::raw_port::{RawPort, overwrite};
use hostile::watch::Watch;
use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::event::{Certainty, EventKind, Outcome, reason};
use portolan_abi::memory::{ClientHalf, create_sealed};
use portolan_abi::port::{CloseReason, PAGE, PortGeometry};
use portolan_abi::ring::ProducerCursor;
use portolan_abi::token::{FLAG_INLINE, Opcode, ReceiveToken, SendToken, TokenRef};
use portolan_abi::{MAX_ARENA_BYTES, PORT_ABI_VERSION};
use portolan_testbed::{Daemon, Lab};
use rustix::time::{ClockId, clock_gettime};

/// The hostile port, on node 1, and its partner, on node 2.
const HOSTILE: u16 = 50;
const PARTNER: (u16, u16) = (2, 12);
/// The bystander, on node 1, and its partner, on node 2.
const BYSTANDER: u16 = 10;
const ECHO: (u16, u16) = (2, 11);

const ARENA: u64 = 64 * 1024;

fn geometry() -> PortGeometry {
    PortGeometry::new(16, 16, ARENA).unwrap()
}

/// Two nodes with daemons, echoes on node 2, a bystander's traffic between them.
struct Scene {
    // Dropped in this order: applications, daemons, lab.
    bystander: PingPong,
    _echoes: [Echo; 2],
    watches: [Watch; 2],
    daemons: [Daemon; 2],
    _lab: Lab,
}

impl Scene {
    fn set() -> Self {
        let lab = Lab::builder().name("pthc").build().unwrap();
        let daemons = [1, 2].map(|id| lab.node(id).start_daemon("").unwrap());
        let [one, two] = [daemons[0].socket(), daemons[1].socket()];
        let watches = [Watch::begin(&one), Watch::begin(&two)];
        let echoes = [ECHO.1, PARTNER.1].map(|port| Echo::start(two.clone(), port));
        let bystander = PingPong::start(one, BYSTANDER, ECHO);
        bystander.assert_goes_on();
        Self {
            bystander,
            _echoes: echoes,
            watches,
            daemons,
            _lab: lab,
        }
    }

    fn socket(&self) -> PathBuf {
        self.daemons[0].socket()
    }

    fn open(&self) -> RawPort {
        open(&self.socket())
    }

    /// Nobody but the hostile port noticed anything.
    #[track_caller]
    fn assert_unharmed(&self) {
        self.bystander.assert_goes_on();
        let longest = self.bystander.longest();
        assert!(
            longest < Duration::from_secs(1),
            "the bystander was held up for {longest:?}"
        );
        for watch in &self.watches {
            watch.assert_unharmed();
        }
    }
}

/// Opens the hostile port. Its predecessor is gone soon, whatever became of it.
fn open(socket: &Path) -> RawPort {
    let deadline = Instant::now() + STEP;
    loop {
        match RawPort::open(socket, Some(HOSTILE), geometry()) {
            Ok(port) => return port,
            Err(error) if Instant::now() > deadline => {
                panic!("port {HOSTILE} never opens: {error}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// How a deed must end.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The port closes, for one of these reasons.
    Closes(&'static [CloseReason]),
    /// The send ends as a bad token and the port goes on.
    Refused,
    /// The port goes on as if nothing had happened.
    GoesOn,
    /// The port closes for any of the reasons hostile memory has, or goes on in some way.
    Whatever,
}

const JUMP: End = End::Closes(&[CloseReason::RingJump]);
const TOKEN: End = End::Closes(&[CloseReason::BadToken]);
/// The reasons for which an engine closes a port whose memory is nonsense.
const FOR_CAUSE: [CloseReason; 3] = [
    CloseReason::RingJump,
    CloseReason::BadToken,
    CloseReason::BadMemory,
];

type Deed = (&'static str, End, fn(&mut RawPort));

/// A send token that is wrong in one way.
fn bad_send(port: &mut RawPort, spoil: impl FnOnce(&mut SendToken)) {
    let reference = port.send_reference(1);
    let mut token = RawPort::token(reference, PARTNER, 0, 16);
    spoil(&mut token);
    port.push_send(reference, &token, &[]);
}

/// A receive token that is wrong in one way.
fn bad_receive(port: &mut RawPort, spoil: impl FnOnce(&mut ReceiveToken)) {
    let reference = port.receive_reference(1);
    let mut token = ReceiveToken {
        generation: reference.generation,
        priority: 0,
        arena_offset: 0,
        len: 4096,
    };
    spoil(&mut token);
    port.push_receive(reference, &token);
}

/// Writes one word of the half.
fn poke(port: &RawPort, offset: usize, word: u64) {
    let bytes = word.to_le_bytes();
    rustix::io::pwrite(&port.client_fd, &bytes, offset as u64).unwrap();
}

/// Words of the slots, for what no type of ours can express.
fn poke_send_word(port: &RawPort, slot: u32, word: usize, value: u64) {
    port.client.send_slots()[slot as usize][word].store(value, Ordering::Relaxed);
}

const DEEDS: &[Deed] = &[
    // ---- ring indices that jump ----
    ("send ring runs over", JUMP, |p| {
        let jump = p.sends.next().wrapping_add(p.geometry.send_tokens + 1);
        p.client
            .header()
            .send_producer
            .store(jump, Ordering::Release);
    }),
    ("send ring runs backwards", JUMP, |p| {
        let jump = p.sends.next().wrapping_sub(1);
        p.client
            .header()
            .send_producer
            .store(jump, Ordering::Release);
    }),
    ("send ring jumps half way round", JUMP, |p| {
        let jump = p.sends.next().wrapping_add(1 << 31);
        p.client
            .header()
            .send_producer
            .store(jump, Ordering::Release);
    }),
    ("provide ring runs over", JUMP, |p| {
        let jump = p
            .provides
            .next()
            .wrapping_add(p.geometry.receive_tokens + 1);
        p.client
            .header()
            .provide_producer
            .store(jump, Ordering::Release);
    }),
    ("provide ring runs backwards", JUMP, |p| {
        let jump = p.provides.next().wrapping_sub(1);
        p.client
            .header()
            .provide_producer
            .store(jump, Ordering::Release);
    }),
    ("event consumer jumps", End::GoesOn, |p| {
        let jump = p.events.next().wrapping_add(12345);
        p.client
            .header()
            .event_consumer
            .store(jump, Ordering::Release);
    }),
    // ---- ring entries that name no slot, or not what is in it ----
    ("send slot outside the port", TOKEN, |p| {
        let slot = p.geometry.send_tokens;
        p.push_send_entry(TokenRef {
            slot,
            generation: 1,
        });
    }),
    ("send slot far outside", TOKEN, |p| {
        p.push_send_entry(TokenRef {
            slot: u32::MAX,
            generation: 1,
        });
    }),
    ("send entry of another generation", TOKEN, |p| {
        let reference = p.send_reference(1);
        let token = RawPort::token(reference, PARTNER, 0, 16);
        let other = TokenRef {
            generation: reference.generation + 1,
            ..reference
        };
        p.push_send(other, &token, &[]);
    }),
    ("send slot never written", TOKEN, |p| {
        p.push_send_entry(TokenRef {
            slot: 9,
            generation: 0,
        });
    }),
    (
        "a slot sent again while it is under way",
        End::Whatever,
        |p| {
            // Nobody takes this message, so it stays under way.
            let first = p.send_reference(1);
            let token = RawPort::token(first, (2, 13), 0, 16);
            p.push_send(first, &token, &[]);
            let second = p.send_reference(1);
            p.push_send(second, &RawPort::token(second, (2, 13), 0, 16), &[]);
        },
    ),
    ("receive slot outside the port", TOKEN, |p| {
        let slot = p.geometry.receive_tokens;
        let token = ReceiveToken {
            generation: 1,
            priority: 0,
            arena_offset: 0,
            len: 64,
        };
        p.push_receive(
            TokenRef {
                slot,
                generation: 1,
            },
            &token,
        );
    }),
    ("receive slot provided twice", TOKEN, |p| {
        p.provide(3, 0, 4096);
        p.provide(3, 4096, 4096);
    }),
    // ---- sends that make no sense ----
    ("offset outside the arena", End::Refused, |p| {
        bad_send(p, |t| t.arena_offset = ARENA)
    }),
    ("offset and length just outside", End::Refused, |p| {
        bad_send(p, |t| t.arena_offset = ARENA - 15);
    }),
    ("offset that overflows with its length", End::Refused, |p| {
        bad_send(p, |t| t.arena_offset = u64::MAX - 8);
    }),
    ("length outside the arena", End::Refused, |p| {
        bad_send(p, |t| t.len = ARENA as u32 + 1)
    }),
    ("length of 4 GiB - 1", End::Refused, |p| {
        bad_send(p, |t| t.len = u32::MAX)
    }),
    ("81 bytes in the slot", End::Refused, |p| {
        bad_send(p, |t| {
            t.flags = FLAG_INLINE;
            t.len = 81;
        });
    }),
    ("4 GiB - 1 in the slot", End::Refused, |p| {
        bad_send(p, |t| {
            t.flags = FLAG_INLINE;
            t.len = u32::MAX;
        });
    }),
    ("no such opcode", End::Refused, |p| {
        let reference = p.send_reference(1);
        RawPort::token(reference, PARTNER, 0, 16).store(&p.client.send_slots()[1], &[]);
        poke_send_word(p, 1, 0, u64::from(reference.generation) << 32 | 0xee);
        p.push_send_entry(reference);
    }),
    ("no such priority", End::Refused, |p| {
        bad_send(p, |t| t.priority = 2)
    }),
    ("node 0", End::Refused, |p| bad_send(p, |t| t.node = 0)),
    ("node 65535", End::Refused, |p| {
        bad_send(p, |t| t.node = u16::MAX)
    }),
    ("port 256", End::Refused, |p| bad_send(p, |t| t.port = 256)),
    ("command to a node that cannot exist", End::Refused, |p| {
        bad_send(p, |t| {
            t.opcode = Opcode::DropSends;
            t.node = 0;
        });
    }),
    ("commands about nothing", End::GoesOn, |p| {
        for opcode in [Opcode::ResumeSending, Opcode::DropSends, Opcode::Cancel] {
            let slot = 2 + opcode as u32;
            let reference = p.send_reference(slot);
            let offset = u64::from_le_bytes([0xff, 3, 0, 0, 9, 9, 9, 9]);
            let token = SendToken {
                opcode,
                ..RawPort::token(reference, (2, 99), offset, 0)
            };
            p.push_send(reference, &token, &[]);
        }
    }),
    // ---- buffers that make no sense ----
    ("buffer outside the arena", TOKEN, |p| {
        bad_receive(p, |t| t.arena_offset = ARENA)
    }),
    ("buffer that overflows", TOKEN, |p| {
        bad_receive(p, |t| t.arena_offset = u64::MAX - 8)
    }),
    ("buffer longer than the arena", TOKEN, |p| {
        bad_receive(p, |t| t.len = u32::MAX)
    }),
    ("buffer of no such priority", TOKEN, |p| {
        bad_receive(p, |t| t.priority = 9)
    }),
    ("buffer of generation 0", TOKEN, |p| {
        let token = ReceiveToken {
            generation: 0,
            priority: 0,
            arena_offset: 0,
            len: 64,
        };
        p.push_receive(
            TokenRef {
                slot: 1,
                generation: 0,
            },
            &token,
        );
    }),
    // ---- the header ----
    ("wrong magic", End::GoesOn, |p| {
        p.client
            .header()
            .magic
            .store(0xdead_beef, Ordering::Release);
    }),
    ("wrong version", End::GoesOn, |p| {
        p.client
            .header()
            .version
            .store(PORT_ABI_VERSION + 1, Ordering::Release);
    }),
    (
        "an alarm that was due long ago, again and again",
        End::GoesOn,
        |p| {
            for at in 1..1000 {
                p.client.header().alarm_at.store(at, Ordering::Release);
                p.ring_engine_anyway();
            }
        },
    ),
    ("the bell of the engine is full", End::GoesOn, |p| {
        let _ = rustix::io::write(&p.engine_bell, &(u64::MAX - 1).to_ne_bytes());
        p.ring_engine_anyway();
    }),
    (
        "our bell is rung a thousand times and never answered",
        End::GoesOn,
        |p| {
            // As if asleep; the alarm goes off at once. Whoever rings must not wait for us.
            let flags = rustix::fs::fcntl_getfl(&p.event_bell).unwrap();
            let blocking = flags - rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(&p.event_bell, blocking).unwrap();
            let header = p.engine.header();
            for at in 1..=1000 {
                p.client.header().waiting.store(1, Ordering::SeqCst);
                p.client.header().alarm_at.store(at, Ordering::SeqCst);
                p.ring_engine();
                let deadline = Instant::now() + STEP;
                while header.alarm_fired.load(Ordering::Acquire) != at {
                    assert!(Instant::now() < deadline, "ring {at} holds the engine");
                    std::thread::yield_now();
                }
            }
            rustix::fs::fcntl_setfl(&p.event_bell, flags).unwrap();
        },
    ),
    // ---- holes ----
    ("a hole where the header was", End::Whatever, |p| {
        p.punch(0, PAGE)
    }),
    (
        "a hole where the rings and slots were",
        End::Whatever,
        |p| {
            p.punch(PAGE, p.geometry.arena() - PAGE);
        },
    ),
    (
        "a hole where the arena was, while it is being sent",
        End::GoesOn,
        |p| {
            p.client.write_arena(8192, &[7; 40_000]).unwrap();
            for slot in 4..8 {
                p.send_arena(slot, PARTNER, 8192, 40_000);
            }
            p.punch(p.geometry.arena(), ARENA as usize);
        },
    ),
    (
        "a hole where a buffer was, while it is being filled",
        End::GoesOn,
        |p| {
            for slot in 4..8 {
                p.provide(slot, 8192 + u64::from(slot) * 4096, 4096);
                p.client.write_arena(4096, &[7; 2000]).unwrap();
                p.send_arena(slot, PARTNER, 4096, 2000);
                p.punch(p.geometry.arena() + 8192, ARENA as usize - 8192);
            }
        },
    ),
    ("nothing but a hole", End::Whatever, |p| {
        p.send_arena(4, PARTNER, 8192, 40_000);
        p.punch(0, p.geometry.client_half_bytes());
    }),
    // ---- everything ones ----
    ("a header of ones", End::Whatever, |p| {
        for offset in (0..256).step_by(8) {
            poke(p, offset, u64::MAX);
        }
    }),
    ("a half of ones", JUMP, |p| {
        overwrite(&p.client_fd, 0, &vec![0xff; p.geometry.client_half_bytes()]);
    }),
];

// Each deed on a port of its own, that worked before. Expect: the end it must have, and nobody else notices.
#[test]
fn each_bad_deed_has_its_end() {
    let scene = Scene::set();
    for (what, end, deed) in DEEDS {
        let mut port = scene.open();
        if let Err(error) = port.exchange(PARTNER, STEP) {
            panic!("before `{what}`: {error}");
        }
        deed(&mut port);
        port.ring_engine_anyway();
        match end {
            End::Closes(reasons) => {
                let closed = port.wait_closed(STEP);
                let reason = closed.unwrap_or_else(|| panic!("`{what}`: the port goes on"));
                assert!(reasons.contains(&reason), "`{what}`: closed by {reason:?}");
            }
            End::Refused => {
                let reference = TokenRef {
                    slot: 1,
                    generation: port.send_generations[1],
                };
                let expected = Outcome {
                    certainty: Certainty::NotDelivered,
                    reason: reason::BAD_TOKEN,
                };
                let outcome = port.wait_sent(reference, STEP);
                assert_eq!(outcome, Some(expected), "`{what}`, {:?}", port.closed());
                port.exchange(PARTNER, STEP)
                    .unwrap_or_else(|error| panic!("after `{what}`: {error}"));
            }
            End::GoesOn => port
                .exchange(PARTNER, STEP)
                .unwrap_or_else(|error| panic!("after `{what}`: {error}")),
            End::Whatever => {
                if let Some(reason) = port.wait_closed(Duration::from_millis(100)) {
                    assert!(
                        FOR_CAUSE.contains(&reason),
                        "`{what}`: closed by {reason:?}"
                    );
                }
            }
        }
        scene.assert_unharmed();
    }
}

// Requests of another version or with sizes nobody may have. Expect: refused by name, the connection and the daemon go on.
#[test]
fn wrong_versions_and_sizes_are_refused() {
    let scene = Scene::set();
    let control = Control::connect(&scene.socket()).unwrap();
    for abi in [0, PORT_ABI_VERSION + 1, u32::MAX] {
        let (code, message) = control.refused(&Request::Attach { abi });
        assert_eq!(code, ErrorCode::AbiMismatch, "{message}");
        let open = Request::OpenPort {
            abi,
            port: Some(HOSTILE),
            geometry: geometry(),
        };
        let (code, message) = control.refused(&open);
        assert_eq!(code, ErrorCode::AbiMismatch, "{message}");
    }
    let sizes = [
        (0, 16, ARENA),
        (3, 16, ARENA),
        (512, 16, ARENA),
        (u32::MAX, 16, ARENA),
        (16, 0, ARENA),
        (16, 17, ARENA),
        (16, 2048, ARENA),
        (16, 1 << 31, ARENA),
        (16, 16, 0),
        (16, 16, 4095),
        (16, 16, ARENA + 1),
        (16, 16, MAX_ARENA_BYTES + PAGE as u64),
        (16, 16, u64::MAX - 4095),
        (16, 16, 1 << 63),
    ];
    for (send_tokens, receive_tokens, arena_bytes) in sizes {
        let geometry = PortGeometry {
            send_tokens,
            receive_tokens,
            arena_bytes,
        };
        let open = Request::OpenPort {
            abi: PORT_ABI_VERSION,
            port: Some(HOSTILE),
            geometry,
        };
        let (code, message) = control.refused(&open);
        let expected = [ErrorCode::BadRequest, ErrorCode::Limit];
        assert!(expected.contains(&code), "{geometry:?}: {code:?} {message}");
    }
    // More than this daemon gives to one port, though the ABI could.
    let open = Request::OpenPort {
        abi: PORT_ABI_VERSION,
        port: Some(HOSTILE),
        geometry: PortGeometry::new(16, 16, MAX_ARENA_BYTES).unwrap(),
    };
    assert_eq!(control.refused(&open).0, ErrorCode::Limit);
    for port in [0, 256, u16::MAX] {
        let open = Request::OpenPort {
            abi: PORT_ABI_VERSION,
            port: Some(port),
            geometry: geometry(),
        };
        let (code, message) = control.refused(&open);
        assert!(
            code != ErrorCode::Internal,
            "port {port}: {code:?} {message}"
        );
    }
    assert!(matches!(
        control
            .ask(&Request::Attach {
                abi: PORT_ABI_VERSION
            })
            .unwrap(),
        (Response::Node { id: 1, .. }, _)
    ));
    scene.assert_unharmed();
}

// The region is of another size than it should be, or becomes it. Expect: not possible, by its seals; and memory that an
// application sends along instead of the daemon's is not used.
#[test]
fn a_region_keeps_its_size() {
    let scene = Scene::set();
    let mut port = scene.open();
    let right = geometry().client_half_bytes() as u64;
    for bytes in [0, right - PAGE as u64, right + PAGE as u64] {
        let error = rustix::fs::ftruncate(&port.client_fd, bytes).unwrap_err();
        assert_eq!(error, rustix::io::Errno::PERM);
    }
    let write = rustix::fs::SealFlags::WRITE | rustix::fs::SealFlags::FUTURE_WRITE;
    assert!(rustix::fs::fcntl_add_seals(&port.client_fd, write).is_err());
    assert!(rustix::fs::ftruncate(&port.engine_fd, 0).is_err());
    assert!(rustix::io::write(&port.engine_fd, &[1]).is_err());
    // Mapped with another size than it has.
    let larger = PortGeometry::new(16, 16, 2 * ARENA).unwrap();
    assert!(ClientHalf::map(port.client_fd.as_fd(), larger).is_err());
    port.exchange(PARTNER, STEP).unwrap();
    port.close().unwrap();

    // A region of our own, too small, sent along with the request.
    let control = Control::connect(&scene.socket()).unwrap();
    let own = create_sealed("hostile", PAGE).unwrap();
    let open = Request::OpenPort {
        abi: PORT_ABI_VERSION,
        port: Some(HOSTILE),
        geometry: geometry(),
    };
    let packet = serde_json::to_vec(&open).unwrap();
    control.send(&packet, &[own.as_fd(), own.as_fd()]).unwrap();
    if let Some(answer) = control.receive().unwrap() {
        for descriptor in &answer.descriptors {
            let is = rustix::fs::fstat(descriptor).unwrap();
            let ours = rustix::fs::fstat(&own).unwrap();
            assert_ne!((is.st_dev, is.st_ino), (ours.st_dev, ours.st_ino));
        }
    }
    drop(control);
    let mut port = scene.open();
    port.exchange(PARTNER, STEP).unwrap();
    scene.assert_unharmed();
}

/// Rounds of random bytes, and how many of them one phase has.
const ROUNDS: usize = 10_000;
const PHASE: usize = 500;
/// Between them, in each phase, rounds that leave the header alone, so that the engine gets to see the random tokens.
const TOKEN_ROUNDS: usize = 50;
/// Least share of its rate that the bystander keeps.
const SHARE: f64 = 0.8;

/// What one phase showed.
struct Phase {
    /// Rounds of the bystander per second.
    rate: f64,
    /// Share of a core the busy client used.
    cpu: f64,
}

/// One round of a busy client up to the point where hostile and well-behaved ones part: a port is opened, buffers are offered, short
/// and long messages sent, and traffic has begun.
fn begin_round(socket: &Path) -> RawPort {
    let mut port = open(socket);
    for slot in 0..4 {
        port.provide(slot, u64::from(slot) * 4096, 4096);
    }
    port.client.write_arena(16384, &[0x5a; 40_000]).unwrap();
    port.send_arena(0, PARTNER, 16384, 40_000);
    port.send_inline(1, PARTNER, b"a short one");
    port.send_arena(2, PARTNER, 16384, 1500);
    let event = port.wait_event(STEP).expect("traffic runs");
    if let EventKind::Sent(outcome) = event.kind {
        assert_eq!(outcome.certainty, Certainty::Delivered, "{outcome:?}");
    }
    port
}

/// Random bytes over the whole half. How often each reason closed the port, and how often it went on.
fn hostile_rounds(socket: &Path, random: &mut Random, ends: &mut [usize; 4]) {
    let mut bytes = Vec::new();
    for round in 0..PHASE + TOKEN_ROUNDS {
        let mut port = begin_round(socket);
        if round < PHASE {
            port.scribble(random, &mut bytes);
        } else {
            port.scribble_behind_header(random, &mut bytes);
            port.sends = ProducerCursor::new(port.sends.next().wrapping_add(3));
            port.sends.publish(port.client.send_ring(&port.engine));
            port.provides = ProducerCursor::new(port.provides.next().wrapping_add(3));
            port.provides
                .publish(port.client.provide_ring(&port.engine));
        }
        port.ring_engine_anyway();
        let end = match port.wait_closed(Duration::from_millis(200)) {
            None => 3,
            Some(reason) => FOR_CAUSE
                .iter()
                .position(|cause| *cause == reason)
                .unwrap_or_else(|| panic!("closed by {reason:?}")),
        };
        ends[end] += 1;
    }
}

/// The same work by the rules: as many random bytes written, but into memory of its own.
fn good_rounds(socket: &Path, random: &mut Random) {
    let mut bytes = vec![0; geometry().client_half_bytes()];
    let own = create_sealed("well-behaved", bytes.len()).unwrap();
    // Half as many are enough for the rate.
    for _ in 0..PHASE / 2 {
        let port = begin_round(socket);
        random.fill(&mut bytes);
        overwrite(&own, 0, &bytes);
        port.ring_engine_anyway();
        port.close().unwrap();
    }
}

fn measure(bystander: &PingPong, work: impl FnOnce()) -> Phase {
    let cpu = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
    };
    let (rounds, began, used) = (bystander.rounds(), Instant::now(), cpu());
    work();
    let took = began.elapsed().as_secs_f64();
    Phase {
        rate: (bystander.rounds() - rounds) as f64 / took,
        cpu: (cpu() - used) / took,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

// 10,000 times random bytes over the whole half while traffic runs on it, in turn with a client that does as much by the rules.
// Expect: each time the port closes for a named reason or goes on; the engines live; the bystander keeps its rate.
#[test]
fn random_bytes_over_the_whole_half_hurt_nobody_else() {
    let scene = Scene::set();
    let socket = scene.socket();
    let seed = std::env::var("HOSTILE_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or(u64::from(std::process::id()));
    eprintln!("HOSTILE_SEED={seed}");
    let mut random = Random::new(seed);
    let mut ends = [0; 4];
    let (mut hostile, mut good) = (Vec::new(), Vec::new());
    for turn in 0..ROUNDS / PHASE {
        let mut bad_turn = || {
            hostile.push(measure(&scene.bystander, || {
                hostile_rounds(&socket, &mut random, &mut ends);
            }));
        };
        let mut random = Random::new(seed ^ 7);
        let mut good_turn = || {
            good.push(measure(&scene.bystander, || {
                good_rounds(&socket, &mut random)
            }))
        };
        // Neither always has the other's aftermath.
        if turn % 2 == 0 {
            good_turn();
            bad_turn();
        } else {
            bad_turn();
            good_turn();
        }
        scene.assert_unharmed();
    }
    let ratios = good
        .iter()
        .zip(&hostile)
        .map(|(good, bad)| bad.rate / good.rate);
    let share = median(ratios.collect());
    let summary = |phases: &[Phase]| {
        let rate = median(phases.iter().map(|phase| phase.rate).collect());
        let cpu = median(phases.iter().map(|phase| phase.cpu).collect());
        format!("{rate:.0} rounds/s beside {:.0} % of a core", cpu * 100.0)
    };
    eprintln!(
        "ring jump {}, bad token {}, bad memory {}, went on {}",
        ends[0], ends[1], ends[2], ends[3]
    );
    eprintln!(
        "bystander: {} (well-behaved), {} (hostile), share {share:.2}",
        summary(&good),
        summary(&hostile)
    );
    let rounds = ROUNDS / PHASE * (PHASE + TOKEN_ROUNDS);
    assert_eq!(ends.iter().sum::<usize>(), rounds);
    assert!(share >= SHARE, "the bystander keeps {share:.2} of its rate");
    // Every port that was closed is gone: as many descriptors as a daemon without clients has, and those of the bystander.
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", scene.daemons[0].pid())).unwrap();
    assert!(descriptors.count() < 100, "descriptors leak");
}
