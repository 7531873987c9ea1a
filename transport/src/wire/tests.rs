//! The wire format's tests: every kind there and back, and everything that can be wrong with a frame.

use std::vec::Vec;
use std::{format, string::String, vec};

use super::chunk::{Hello, MAX_RANGES, PolicyWire, Range, Received};
use super::frame::FRAME_HEADER_LEN;
use super::*;
use crate::policy::AckMode;

mod bare;
mod hostile;
mod next;
pub(super) mod random;
mod run;

const HEADER: FrameHeader = FrameHeader {
    src_node: 7,
    dst_node: 65_534,
    src_queue: 1,
    dst_queue: 2,
    src_incarnation: 0xdead_beef,
    dst_incarnation: 0x0102_0304,
    engine_epoch: u32::MAX,
    sent_buffers: 0xffff_fffe,
    credit_limit: 3,
    crowded: true,
    return_credit: false,
    sent_at: 0x0a0b_0c0d,
    echo: 0xf0f1_f2f3,
    held: 0x1122,
};

const STREAM: StreamRef = StreamRef {
    sender_port: 3,
    receiver_port: 255,
    priority: 1,
    epoch: 0xffff_fff0,
};

fn payload(bytes: &[u8]) -> Payload {
    Payload {
        len: bytes.len() as u16,
        crc: crc32c(bytes),
    }
}

/// One chunk of every kind, each with the payload it carries.
fn every_kind(name: &str) -> Vec<(Chunk<'_>, Vec<u8>)> {
    let hello = Hello {
        incarnation: u64::MAX - 1,
        echo: 5,
        cluster: 0x0123_4567_89ab_cdef,
        wire_min: 1,
        wire_max: 2,
        queues: 4,
        max_frame: 9000,
        window: 64,
        policy: PolicyWire {
            recovery: 3,
            ack_rule: 1,
            order: 2,
        },
        unasked: 17,
        features: 0x8000_0001,
        name,
    };
    let mut missing = [Range::default(); MAX_RANGES];
    missing[0] = Range { from: 0, to: 1 };
    missing[1] = Range {
        from: 4000,
        to: u32::MAX,
    };
    let body: Vec<u8> = (0..97u8).collect();
    let none = Vec::new;
    let stream = STREAM;
    let number = u32::MAX;
    vec![
        (Chunk::Hello(hello), none()),
        (Chunk::HelloAck(hello), none()),
        (
            Chunk::Reset {
                src_incarnation: 1,
                dst_incarnation: 2,
                reason: 3,
                detail: 2,
            },
            none(),
        ),
        (
            Chunk::Eager {
                stream,
                start: None,
                number,
                tag: 9,
                ack: AckMode::Policy,
                payload: payload(&body),
            },
            body.clone(),
        ),
        // Behind that one these three travel as NEXT, or the first two as RUN.
        (
            Chunk::Eager {
                stream,
                start: None,
                number: 0,
                tag: 9,
                ack: AckMode::Policy,
                payload: payload(&body[1..]),
            },
            body[1..].to_vec(),
        ),
        (
            Chunk::Eager {
                stream,
                start: None,
                number: 1,
                tag: 9,
                ack: AckMode::Policy,
                payload: payload(&body[..96]),
            },
            body[..96].to_vec(),
        ),
        (
            Chunk::Eager {
                stream,
                start: None,
                number: 2,
                tag: 8,
                ack: AckMode::Policy,
                payload: payload(&[]),
            },
            none(),
        ),
        (
            Chunk::Eager {
                stream,
                start: Some(8),
                number,
                tag: 9,
                ack: AckMode::Lazy,
                payload: payload(&[]),
            },
            none(),
        ),
        (
            Chunk::Rts {
                stream,
                start: None,
                number,
                tag: u64::MAX,
                ack: AckMode::Immediate,
                total: u32::MAX,
                unasked: false,
                payload: payload(&[]),
            },
            none(),
        ),
        (
            Chunk::Rts {
                stream,
                start: Some(0),
                number,
                tag: 1,
                ack: AckMode::Policy,
                total: 97,
                unasked: false,
                payload: payload(&body),
            },
            body.clone(),
        ),
        (
            Chunk::Data {
                stream,
                number,
                offset: u32::MAX - 97,
                unasked: false,
                payload: payload(&body),
            },
            body.clone(),
        ),
        (
            Chunk::Cts {
                stream,
                number,
                granted: 12,
                missing,
                missing_len: 2,
            },
            none(),
        ),
        (Chunk::MsgEnd { stream, number }, none()),
        (
            Chunk::Ack {
                stream,
                base: 0,
                received: Received([1, 0, 1 << 63, 0, 0, 0, 0, 0]),
            },
            none(),
        ),
        (
            Chunk::Nack {
                stream,
                expected: 4,
                reason: 2,
            },
            none(),
        ),
        (Chunk::Ready { stream, number }, none()),
        (
            Chunk::Probe {
                stream,
                start: Some(2),
                number,
                total: 5,
            },
            none(),
        ),
        (
            Chunk::MsgDrop {
                stream,
                number,
                reason: 6,
            },
            none(),
        ),
        (Chunk::DropConfirm { stream, number }, none()),
        (
            Chunk::Null {
                stream,
                start: None,
                number,
            },
            none(),
        ),
        (
            Chunk::NullAck {
                stream,
                number,
                delivered: true,
            },
            none(),
        ),
        (Chunk::PortClosed { stream, base: 1 }, none()),
        (Chunk::Close { stream, next: 2 }, none()),
        (Chunk::Closed { stream }, none()),
        (
            Chunk::Refused {
                stream: StreamRef {
                    priority: 0,
                    ..stream
                },
            },
            none(),
        ),
        (Chunk::Resume { stream, base: 3 }, none()),
        (
            Chunk::PathProbe {
                size: 100,
                nonce: 8,
            },
            none(),
        ),
        (
            Chunk::PathAck {
                size: 9000,
                nonce: 8,
            },
            none(),
        ),
    ]
}

/// Writes a frame of these chunks for who reads NEXT.
fn write(chunks: &[(Chunk<'_>, Vec<u8>)]) -> Vec<u8> {
    write_for(Rows::Next, chunks)
}

/// A message of this number, tag and bytes, without START.
fn eager(number: u32, tag: u64, bytes: &[u8]) -> (Chunk<'static>, Vec<u8>) {
    let chunk = Chunk::Eager {
        stream: STREAM,
        start: None,
        number,
        tag,
        ack: AckMode::Lazy,
        payload: payload(bytes),
    };
    (chunk, bytes.to_vec())
}

fn write_for(rows: Rows, chunks: &[(Chunk<'_>, Vec<u8>)]) -> Vec<u8> {
    let mut frame = vec![0xaa; 9000];
    let mut headers = FrameWriter::new(&mut frame);
    headers.shorten(rows);
    let places = chunks.iter().map(|(chunk, _)| headers.push(chunk).unwrap());
    let places: Vec<usize> = places.collect();
    let count = headers.chunks();
    let mut payloads = headers.finish_headers();
    for index in 0..count {
        let of_it = chunks.iter().zip(&places).filter(|c| *c.1 == index);
        let bytes: Vec<u8> = of_it.flat_map(|((_, bytes), _)| bytes.clone()).collect();
        payloads.payload_mut(index).copy_from_slice(&bytes);
        payloads.set_payload_crc(index, crc32c(&bytes));
    }
    let len = payloads.finish(&HEADER);
    frame.truncate(len);
    frame
}

/// Reads a frame back, or says why not; a payload that does not match its CRC makes it `Err(None)`.
fn read<'a>(segments: &'a [&'a [u8]]) -> Result<Vec<(Chunk<'a>, Vec<u8>)>, Option<WireError>> {
    let frame = parse(segments).map_err(Some)?;
    let mut chunks = Vec::new();
    short_is_next(frame.chunks());
    answer_is_alone(&frame, segments);
    for (chunk, view) in frame.chunks() {
        let bytes: Vec<u8> = view.parts().flatten().copied().collect();
        assert_eq!(bytes.len(), view.len());
        assert_eq!(view.verify(), crc32c(&bytes) == view.crc());
        if !view.verify() {
            return Err(None);
        }
        chunks.push((chunk, bytes));
    }
    Ok(chunks)
}

/// A frame said to be a message behind an acknowledgement is what the general way finds, and each that the general way finds is said to be one.
fn answer_is_alone(frame: &Frame<'_>, segments: &[&[u8]]) {
    let mut chunks = frame.chunks();
    let found = chunks.ack().and_then(|ack| {
        let short = chunks.short()?;
        chunks.pass(&short);
        chunks.is_over().then_some((ack, short))
    });
    let header = frame.header();
    let plain = segments.len() == 1 && !header.crowded && !header.return_credit;
    let told = |(ack, short): ((StreamRef, u32), Short<'_>)| {
        let Short {
            stream,
            number,
            tag,
            ..
        } = short;
        format!(
            "{:?}",
            (ack, stream, number, tag, short.ack, short.crc, short.bytes)
        )
    };
    let alone = LoneAnswer::read(segments);
    assert!(
        alone
            .as_ref()
            .is_none_or(|alone| alone.header.header() == *header)
    );
    let read = alone.map(|alone| told((alone.ack, alone.message)));
    assert_eq!(read, found.filter(|_| plain).map(told));
}

/// A chunk said to be a short message, or plain DATA, is what the general way finds, and so is all that follows.
fn short_is_next(mut chunks: Chunks<'_>) {
    let bytes = |view: PayloadView<'_>| -> Vec<u8> { view.parts().flatten().copied().collect() };
    let known = |chunks: &Chunks<'_>| -> Vec<_> {
        (chunks
            .clone()
            .map(|(chunk, view)| (format!("{chunk:?}"), bytes(view))))
        .collect()
    };
    loop {
        let (short, mut other) = (chunks.short(), chunks.clone());
        let mut behind = chunks.clone();
        let data = behind.data();
        let Some((chunk, view)) = chunks.next() else {
            return assert!(short.is_none() && data.is_none());
        };
        if let Some((data, of_data)) = data {
            assert_eq!((data.chunk(), bytes(of_data)), (chunk, bytes(view)));
            assert_eq!(known(&behind), known(&chunks));
        }
        let Some(short) = short else { continue };
        let plain = Chunk::Eager {
            stream: short.stream,
            start: None,
            number: short.number,
            tag: short.tag,
            ack: short.ack,
            payload: Payload {
                len: short.bytes.len() as u16,
                crc: short.crc.unwrap_or_else(|| crc32c(short.bytes)),
            },
        };
        assert_eq!(chunk, plain);
        assert_eq!(known(&other)[0].1, short.bytes);
        other.pass(&short);
        assert_eq!(known(&other), known(&chunks));
    }
}

fn error(frame: &[u8]) -> Option<WireError> {
    parse(&[frame]).err()
}

/// A mixed frame with two payloads.
fn mixed() -> (Vec<(Chunk<'static>, Vec<u8>)>, Vec<u8>) {
    let mut chunks = every_kind("a");
    chunks.retain(|(chunk, _)| !matches!(chunk, Chunk::PathProbe { .. }));
    let frame = write_for(Rows::Run, &chunks);
    (chunks, frame)
}

// Every kind alone and all together come back as they were, header included.
#[test]
fn round_trip() {
    for name in ["", "a", "abcd", "größe", &"n".repeat(64)] {
        let chunks = every_kind(name);
        for one in &chunks {
            let frame = write(std::slice::from_ref(one));
            assert_eq!(read(&[&frame]).unwrap(), std::slice::from_ref(one));
        }
        for rows in [Rows::InFull, Rows::Next, Rows::Run] {
            let frame = write_for(rows, &chunks);
            assert_eq!(parse(&[&frame]).unwrap().header(), &HEADER);
            assert_eq!(read(&[&frame]).unwrap(), chunks);
        }
    }
}

// The layout is the one in docs/spec/wire.md, byte for byte.
#[test]
fn layout() {
    let chunk = Chunk::Eager {
        stream: STREAM,
        start: Some(0x11),
        number: 0x22,
        tag: 0x33,
        ack: AckMode::Immediate,
        payload: payload(b"hi"),
    };
    let frame = write(&[(chunk, b"hi".to_vec())]);
    let mut expected = vec![
        0x50, 0x4c, 1, 1, 0, 84, 0, 1, 0, 7, 0xff, 0xfe, 1, 2, 0x11, 0x22, // magic … held
        0xde, 0xad, 0xbe, 0xef, 1, 2, 3, 4, 0xff, 0xff, 0xff,
        0xff, // incarnations, engine epoch
        0xff, 0xff, 0xff, 0xfe, 0, 0, 0, 3, // credits
        0x0a, 0x0b, 0x0c, 0x0d, 0xf0, 0xf1, 0xf2, 0xf3, 0, 0, 0,
        0, // sent_at, echo, header CRC
        4, 15, 0, 36, 0, 2, 0,
        0, // EAGER, PAYLOAD | START | HIGH | ACK_NOW, length, payload length
    ];
    expected.extend(crc32c(b"hi").to_be_bytes());
    expected.extend([0, 3, 0, 255, 0xff, 0xff, 0xff, 0xf0]); // stream
    expected.extend([0, 0, 0, 0x22, 0, 0, 0, 0, 0, 0, 0, 0x33, 0, 0, 0, 0x11]); // number, tag, start
    expected.extend(b"hi");
    reseal(&mut expected);
    assert_eq!(frame, expected);
}

// A frame without chunks carries credits. Expect: fine.
#[test]
fn no_chunks() {
    let frame = write(&[]);
    assert_eq!(frame.len(), FRAME_HEADER_LEN);
    assert_eq!(read(&[&frame]), Ok(vec![]));
}

// A writer out of room says so, changes nothing, and what was pushed before is sent.
#[test]
fn full() {
    let stream = STREAM;
    let ack = Chunk::Ack {
        stream,
        base: 1,
        received: Received::default(),
    };
    let mut buffer = [0; 48 + 16 + 28 + 10];
    let mut w = FrameWriter::new(&mut buffer);
    w.push(&ack).unwrap();
    let data = |len| Chunk::Data {
        stream,
        number: 1,
        offset: 0,
        unasked: false,
        payload: Payload { len, crc: 0 },
    };
    assert_eq!(w.room_for(&data(0)), Some(10));
    assert_eq!(w.push(&data(11)), Err(Full));
    assert_eq!(
        w.push(&Chunk::PathProbe {
            size: 103,
            nonce: 0
        }),
        Err(Full)
    );
    assert_eq!(w.push(&data(10)), Ok(1));
    assert_eq!(w.room_for(&ack), None);
    assert_eq!(w.push(&ack), Err(Full));
    let mut w = w.finish_headers();
    assert!(w.payload_mut(0).is_empty() && w.payload_mut(2).is_empty());
    w.set_payload_crc(0, 1);
    w.set_payload_crc(2, 1);
    w.payload_mut(1).fill(3);
    w.set_payload_crc(1, crc32c(&[3; 10]));
    assert_eq!(w.finish(&HEADER), 102);
    assert_eq!(read(&[&buffer]).unwrap().len(), 2);

    // The number of chunks and the header area are bounded.
    let mut big = vec![0; 100_000];
    let mut w = FrameWriter::new(&mut big);
    while w.push(&ack).is_ok() {}
    assert_eq!(w.chunks(), MAX_CHUNKS);
    let mut w = FrameWriter::new(&mut big);
    let cts = Chunk::Cts {
        stream,
        number: 0,
        granted: 0,
        missing: [Range { from: 0, to: 1 }; MAX_RANGES],
        missing_len: 8,
    };
    while w.push(&cts).is_ok() {}
    assert!(w.len() <= HEADER_AREA_MAX && w.len() + 88 > HEADER_AREA_MAX);
    let len = w.finish_headers().finish(&HEADER);
    assert_eq!(
        read(&[&big[..len]]).unwrap().len(),
        (HEADER_AREA_MAX - 48) / 88
    );

    // A buffer that cannot hold a frame header.
    let mut tiny = [0; 39];
    let mut w = FrameWriter::new(&mut tiny);
    assert_eq!(w.push(&ack), Err(Full));
    assert_eq!(w.finish_headers().finish(&HEADER), 0);
}

// A name too long is cut between characters; the reasons' names are distinct.
#[test]
fn names() {
    let name: String = format!("{}é", "x".repeat(63));
    let frame = write(&every_kind(&name)[..1]);
    let segments: [&[u8]; 1] = [&frame];
    let (Chunk::Hello(hello), _) = read(&segments).unwrap()[0].clone() else {
        panic!("not a HELLO")
    };
    assert_eq!(hello.name, "x".repeat(63));
    for (index, reason) in WireError::ALL.iter().enumerate() {
        assert_eq!(reason.index(), index);
        assert!(
            WireError::ALL[..index]
                .iter()
                .all(|other| other.name() != reason.name())
        );
    }
}

// wire.md §7 lists every reason with the help text the code gives.
#[test]
fn reasons_are_documented() {
    let spec = include_str!("../../../docs/spec/wire.md");
    for reason in WireError::ALL {
        let row = format!("| `{}` | {} |", reason.name(), reason.help());
        assert!(spec.contains(&row), "{row}");
    }
}
