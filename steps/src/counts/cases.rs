//! What is counted.
//!
//! | case | counts, per entry, call, frame or message |
//! |---|---|
//! | `ring-1`, `ring-32` | a ring entry written, published, taken and released; alone, and 32 with one publication |
//! | `token-64` | a send token and its payload of 64 bytes written into a slot, as an application does |
//! | `crc-64`, `crc-1400` | CRC32C of so many bytes |
//! | `parse-1`, `parse-32` | a frame with so many chunks checked and walked |
//! | `message-1-…`, `message-64-…` | a message of 64 bytes from token to completion, the parts of its way and the whole; one under way, or 64 |
//! | `long-64k` | a message of 64 KiB, the whole way |
//!
//! Messages pass two engines with everything real but the socket; of what applications do, only the writing of a token is counted.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use portolan_abi::ring::{ConsumerCursor, ProducerCursor, SharedRing};
use portolan_abi::token::{FLAG_INLINE, INLINE_BYTES, Opcode, SEND_SLOT_WORDS, SendToken};
use portolan_transport::policy::AckMode;
use portolan_transport::wire::{
    Chunk, FrameHeader, FrameWriter, Payload, StreamRef, crc32c, parse,
};
use portoland::engine::conversation::{Meter, Part, Stream, StreamMemories};

use super::counted;

/// Repetitions before the first that is counted.
const WARM_UP: u64 = 50;
/// A short message.
const SHORT: u32 = 64;
/// A long one.
const LONG: u32 = 64 * 1024;
/// Send tokens are a power of two.
const MANY: u32 = 64;

/// One thing that is counted.
#[derive(Clone, Copy, Debug)]
pub enum Case {
    /// A ring, so many entries at a time.
    Ring(usize),
    /// A token with so many bytes inside.
    Token(usize),
    /// CRC32C of so many bytes.
    Crc(usize),
    /// A frame of so many chunks.
    Parse(usize),
    /// So many messages of so many bytes at a time; a part of their way, or all of it.
    Message(u32, u32, Option<Part>),
}

const PARTS: [(Option<Part>, &str); 6] = [
    (Some(Part::TokenToFrame), "token-to-frame"),
    (Some(Part::FrameToEvent), "frame-to-event"),
    (Some(Part::Buffers), "buffers"),
    (Some(Part::Answer), "answer"),
    (Some(Part::AnswerToEvent), "answer-to-event"),
    (None, "whole"),
];

impl Case {
    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Ring(1),
            Self::Ring(32),
            Self::Token(SHORT as usize),
            Self::Crc(64),
            Self::Crc(1400),
            Self::Parse(1),
            Self::Parse(32),
            Self::Message(1, LONG, None),
        ];
        for at_a_time in [1, MANY] {
            let parts = PARTS.map(|(part, _)| Self::Message(at_a_time, SHORT, part));
            all.extend(parts);
        }
        all
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|case| case.name() == name)
    }

    pub fn name(&self) -> String {
        match self {
            Self::Ring(entries) => format!("ring-{entries}"),
            Self::Token(bytes) => format!("token-{bytes}"),
            Self::Crc(bytes) => format!("crc-{bytes}"),
            Self::Parse(chunks) => format!("parse-{chunks}"),
            Self::Message(_, LONG, _) => "long-64k".to_owned(),
            Self::Message(at_a_time, _, part) => {
                let named = PARTS.iter().find(|(known, _)| known == part);
                let part = named.map_or("", |(_, name)| name);
                format!("message-{at_a_time}-{part}")
            }
        }
    }

    /// Among how many a repetition's instructions are shared.
    pub fn messages(&self) -> u64 {
        match self {
            Self::Ring(entries) => *entries as u64,
            Self::Token(_) | Self::Crc(_) | Self::Parse(_) => 1,
            Self::Message(at_a_time, ..) => u64::from(*at_a_time),
        }
    }

    /// Does it so often, counted.
    pub fn run(&self, repetitions: u64) {
        match *self {
            Self::Ring(entries) => ring(entries, repetitions),
            Self::Token(bytes) => token(bytes, repetitions),
            Self::Crc(bytes) => {
                let bytes = vec![7; bytes];
                for _ in 0..repetitions {
                    black_box(counted(|| crc32c(black_box(&bytes))));
                }
            }
            Self::Parse(chunks) => parse_frame(chunks, repetitions),
            Self::Message(at_a_time, bytes, part) => {
                let memories = StreamMemories::new(at_a_time, bytes);
                let mut stream = Stream::new(&memories, bytes);
                for _ in 0..WARM_UP {
                    stream.round(&mut Uncounted);
                }
                let before = stream.detours();
                for _ in 0..repetitions {
                    stream.round(&mut Counting(part));
                }
                assert_eq!(stream.detours(), before, "not the straight way");
            }
        }
    }
}

/// Counts one part, or all.
struct Counting(Option<Part>);

impl Meter for Counting {
    fn run<R>(&mut self, part: Part, body: impl FnOnce() -> R) -> R {
        if self.0.is_none_or(|chosen| chosen == part) {
            counted(body)
        } else {
            body()
        }
    }
}

struct Uncounted;

impl Meter for Uncounted {
    fn run<R>(&mut self, _: Part, body: impl FnOnce() -> R) -> R {
        body()
    }
}

fn ring(entries: usize, repetitions: u64) {
    let words: Vec<[AtomicU64; 1]> = (0..64).map(|_| [AtomicU64::new(0)]).collect();
    let (produced, consumed) = (AtomicU32::new(0), AtomicU32::new(0));
    let (mut producer, mut consumer) = (ProducerCursor::new(0), ConsumerCursor::new(0));
    let ring = SharedRing::new(&produced, &consumed, &words);
    for _ in 0..repetitions {
        let sum = counted(|| {
            let ring = black_box(ring);
            for entry in 0..black_box(entries as u64) {
                producer.stage(ring, &[entry]);
            }
            producer.publish(ring);
            let mut sum = 0;
            for _ in 0..consumer.available(ring).unwrap_or(0) {
                sum += consumer.take(ring)[0];
            }
            consumer.release(ring);
            sum
        });
        assert_eq!(sum, (0..entries as u64).sum::<u64>());
    }
}

fn token(bytes: usize, repetitions: u64) {
    let slot = [const { AtomicU64::new(0) }; SEND_SLOT_WORDS];
    let payload = vec![7; bytes];
    let token = SendToken {
        generation: 1,
        opcode: Opcode::Send,
        priority: 0,
        flags: FLAG_INLINE,
        node: 2,
        port: 3,
        len: bytes as u32,
        arena_offset: 0,
        tag: 9,
        timeout_us: 0,
    };
    for _ in 0..repetitions {
        counted(|| black_box(&token).store(black_box(&slot), black_box(&payload)));
    }
    let written = slot[SEND_SLOT_WORDS - INLINE_BYTES / 8..][..bytes / 8].iter();
    let whole = u64::from_ne_bytes([7; 8]);
    assert!(
        written
            .map(|word| word.load(Ordering::Relaxed))
            .all(|word| word == whole)
    );
}

fn parse_frame(chunks: usize, repetitions: u64) {
    let mut frame = [0; 1458];
    let mut writer = FrameWriter::new(&mut frame);
    let bytes = [7; 4];
    for number in 0..chunks as u32 {
        let chunk = Chunk::Eager {
            stream: StreamRef {
                sender_port: 1,
                receiver_port: 2,
                priority: 0,
                epoch: 3,
            },
            start: None,
            number,
            tag: 9,
            ack: AckMode::Policy,
            payload: Payload {
                len: bytes.len() as u16,
                crc: crc32c(&bytes),
            },
        };
        assert!(writer.push(&chunk).is_ok());
    }
    let len = writer.finish_headers().finish(&FrameHeader::default());
    let segments = [&frame[..len]];
    for _ in 0..repetitions {
        let walked = counted(|| {
            let parsed = parse(black_box(&segments)).ok()?;
            Some(parsed.chunks().map(black_box).count())
        });
        assert_eq!(walked, Some(chunks));
    }
}
