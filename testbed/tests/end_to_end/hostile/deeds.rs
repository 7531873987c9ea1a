//! What an application can do wrong with its half of a port, one deed at a time, and how each must end.

use std::sync::atomic::Ordering;
use std::time::Instant;

use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::port::{CloseReason, PAGE};
use portolan_abi::token::{
    AnswerToken, FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY, FLAG_INLINE, Opcode, ReceiveToken, SendToken,
    TokenRef, Verdict,
};

use super::STEP;
use super::raw_port::{RawPort, overwrite};
use super::scene::{ARENA, PARTNER};

/// How a deed must end.
#[derive(Clone, Copy, Debug)]
pub enum End {
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
pub const FOR_CAUSE: [CloseReason; 3] = [
    CloseReason::RingJump,
    CloseReason::BadToken,
    CloseReason::BadMemory,
];

pub type Deed = (&'static str, End, fn(&mut RawPort));

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

pub const DEEDS: &[Deed] = &[
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
    ("two acknowledgement modes", End::Refused, |p| {
        bad_send(p, |t| t.flags = FLAG_ACK_IMMEDIATE | FLAG_ACK_LAZY)
    }),
    // ---- answers to offers ----
    ("an answer that is no verdict", End::Refused, |p| {
        bad_send(p, |t| {
            t.opcode = Opcode::Answer;
            t.flags = 4;
        });
    }),
    ("an answer to a node that cannot exist", End::Refused, |p| {
        bad_send(p, |t| {
            t.opcode = Opcode::Answer;
            t.flags = Verdict::Refuse as u8;
            t.node = 0;
        });
    }),
    ("answers to offers never made", End::GoesOn, |p| {
        for (slot, verdict) in [
            (3, Verdict::Accept),
            (4, Verdict::Shorten),
            (5, Verdict::Refuse),
        ] {
            for number in [0, 1, u32::MAX] {
                let answer = AnswerToken {
                    from: PARTNER,
                    priority: 0,
                    incarnation: number,
                    epoch: 1,
                    number,
                    verdict,
                    len: u32::MAX,
                };
                let reference = p.send_reference(slot);
                p.push_send(reference, &answer.token(reference.generation), &[]);
                // It ends like any command; its slot may then be used again.
                let ended = p.wait_event(STEP).expect("the end of an answer");
                assert_eq!((ended.slot, ended.generation), (slot, reference.generation));
            }
        }
    }),
    (
        "a wish to be asked that no message fulfils",
        End::GoesOn,
        |p| {
            p.client
                .header()
                .ask_first
                .store(u64::MAX, Ordering::Release);
        },
    ),
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
