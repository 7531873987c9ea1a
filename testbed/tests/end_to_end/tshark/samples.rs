//! A chunk of every kind, with known values, and frames of them made by the transport's own writer; bare frames are made here.

use portolan_transport::policy::AckMode;
use portolan_transport::wire::chunk::{Hello, MAX_RANGES, PolicyWire, Range, Received};
use portolan_transport::wire::{Chunk, FrameHeader, FrameWriter, Payload, Rows, StreamRef, crc32c};

pub const HEADER: FrameHeader = FrameHeader {
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

pub const STREAM: StreamRef = StreamRef {
    sender_port: 3,
    receiver_port: 255,
    priority: 1,
    epoch: 0xffff_fff0,
};

const LOW: StreamRef = StreamRef {
    priority: 0,
    epoch: 1,
    ..STREAM
};

/// A chunk and the payload it carries.
pub type Sample = (Chunk<'static>, Vec<u8>);

pub fn payload(bytes: &[u8]) -> Payload {
    Payload {
        len: bytes.len() as u16,
        crc: crc32c(bytes),
    }
}

fn body(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + len) as u8).collect()
}

fn hello(name: &'static str) -> Hello<'static> {
    Hello {
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
    }
}

fn eager(start: Option<u32>, ack: AckMode, bytes: Vec<u8>) -> Sample {
    let chunk = Chunk::Eager {
        stream: STREAM,
        start,
        number: u32::MAX,
        tag: 0xfedc_ba98_7654_3210,
        ack,
        payload: payload(&bytes),
    };
    (chunk, bytes)
}

/// A message behind the one with the number before it.
fn behind(number: u32, tag: u64, bytes: Vec<u8>) -> Sample {
    let chunk = Chunk::Eager {
        stream: STREAM,
        start: None,
        number,
        tag,
        ack: AckMode::Immediate,
        payload: payload(&bytes),
    };
    (chunk, bytes)
}

fn rts(start: Option<u32>, ack: AckMode, total: u32, bytes: Vec<u8>) -> Sample {
    let chunk = Chunk::Rts {
        stream: LOW,
        start,
        number: 6,
        tag: 9,
        ack,
        total,
        unasked: total == 100_000,
        payload: payload(&bytes),
    };
    (chunk, bytes)
}

fn cts(ranges: &[(u32, u32)]) -> Sample {
    let mut missing = [Range::default(); MAX_RANGES];
    for (to, &(from, end)) in missing.iter_mut().zip(ranges) {
        *to = Range { from, to: end };
    }
    let chunk = Chunk::Cts {
        stream: LOW,
        number: 6,
        granted: 0x8000_0000,
        missing,
        missing_len: ranges.len() as u8,
    };
    (chunk, vec![])
}

/// Samples of the kind that follows this one's; a new kind is missed by the compiler here.
pub fn samples_after(chunk: Option<&Chunk<'_>>) -> Vec<Sample> {
    let (stream, number) = (STREAM, 17);
    let plain = |chunk| vec![(chunk, vec![])];
    let Some(chunk) = chunk else {
        let names = ["", "größe"].map(|name| (Chunk::Hello(hello(name)), vec![]));
        return names.to_vec();
    };
    match chunk {
        Chunk::Hello(_) => plain(Chunk::HelloAck(hello("node-17"))),
        Chunk::HelloAck(_) => plain(Chunk::Reset {
            src_incarnation: 0x1111_2222,
            dst_incarnation: 2,
            reason: 4,
            detail: 2,
        }),
        Chunk::Reset { .. } => vec![
            eager(None, AckMode::Policy, body(97)),
            eager(Some(8), AckMode::Lazy, body(1400)),
            eager(Some(u32::MAX), AckMode::Immediate, vec![]),
            eager(None, AckMode::Immediate, body(9)),
            // Behind that one these two are NEXT.
            behind(0, 0xfedc_ba98_7654_3210, body(5)),
            behind(1, 3, vec![]),
        ],
        Chunk::Eager { .. } => vec![
            rts(None, AckMode::Immediate, u32::MAX, vec![]),
            rts(Some(0), AckMode::Policy, 97, body(97)),
            rts(Some(6), AckMode::Lazy, 100_000, body(33)),
        ],
        Chunk::Rts { .. } => {
            let bytes = body(1001);
            let data = |offset| Chunk::Data {
                stream: LOW,
                number: 6,
                offset,
                unasked: offset == 33,
                payload: payload(&bytes),
            };
            vec![
                (data(33), bytes.clone()),
                (data(u32::MAX - 1001), bytes.clone()),
            ]
        }
        Chunk::Data { .. } => vec![
            cts(&[]),
            cts(&[(0, 1), (4000, u32::MAX)]),
            cts(&[(1, 2); MAX_RANGES]),
        ],
        Chunk::Cts { .. } => plain(Chunk::MsgEnd { stream, number }),
        Chunk::MsgEnd { .. } => [
            [0; 8],
            [1, 0, 1 << 63, 0, 0, 0, 0, 0],
            [0b1101, 0, 0, 0, 0, 0, 0, u64::MAX],
        ]
        .map(|words| {
            let received = Received(words);
            let base = u32::MAX - 1;
            let chunk = Chunk::Ack {
                stream,
                base,
                received,
            };
            (chunk, vec![])
        })
        .to_vec(),
        Chunk::Ack { .. } => plain(Chunk::Nack {
            stream,
            expected: 4,
            reason: 2,
        }),
        Chunk::Nack { .. } => plain(Chunk::Ready { stream, number }),
        Chunk::Ready { .. } => [None, Some(2)]
            .map(|start| {
                let chunk = Chunk::Probe {
                    stream,
                    start,
                    number,
                    total: 5,
                };
                (chunk, vec![])
            })
            .to_vec(),
        Chunk::Probe { .. } => plain(Chunk::MsgDrop {
            stream,
            number,
            reason: 12,
        }),
        Chunk::MsgDrop { .. } => plain(Chunk::DropConfirm { stream, number }),
        Chunk::DropConfirm { .. } => [None, Some(16)]
            .map(|start| {
                let chunk = Chunk::Null {
                    stream,
                    start,
                    number,
                };
                (chunk, vec![])
            })
            .to_vec(),
        Chunk::Null { .. } => [true, false]
            .map(|delivered| {
                let chunk = Chunk::NullAck {
                    stream,
                    number,
                    delivered,
                };
                (chunk, vec![])
            })
            .to_vec(),
        Chunk::NullAck { .. } => plain(Chunk::PortClosed { stream, base: 1 }),
        Chunk::PortClosed { .. } => plain(Chunk::Close { stream, next: 2 }),
        Chunk::Close { .. } => plain(Chunk::Closed { stream }),
        Chunk::Closed { .. } => plain(Chunk::Refused { stream: LOW }),
        Chunk::Refused { .. } => plain(Chunk::Resume { stream, base: 3 }),
        Chunk::Resume { .. } => plain(Chunk::PathProbe {
            size: 700,
            nonce: 0x8765_4321,
        }),
        Chunk::PathProbe { .. } => plain(Chunk::PathAck {
            size: 9000,
            nonce: 8,
        }),
        Chunk::PathAck { .. } => vec![],
    }
}

/// A chunk of every kind, some in several forms.
pub fn every_kind() -> Vec<Sample> {
    let mut all = samples_after(None);
    loop {
        let next = samples_after(all.last().map(|(chunk, _)| chunk));
        if next.is_empty() {
            return all;
        }
        all.extend(next);
    }
}

/// A frame of these chunks for who reads NEXT.
pub fn write(header: &FrameHeader, chunks: &[Sample]) -> Vec<u8> {
    write_for(Rows::Next, header, chunks)
}

/// A frame of these chunks for who reads messages in a row so.
pub fn write_for(rows: Rows, header: &FrameHeader, chunks: &[Sample]) -> Vec<u8> {
    let mut frame = vec![0xaa; 9000];
    let mut headers = FrameWriter::new(&mut frame);
    headers.shorten(rows);
    let mut bytes = Vec::new();
    for (chunk, payload) in chunks {
        headers.push(chunk).unwrap();
        bytes.extend_from_slice(payload);
    }
    let mut payloads = headers.finish_headers();
    payloads.payloads_mut().copy_from_slice(&bytes);
    let len = payloads.finish(header);
    frame.truncate(len);
    frame
}

/// A bare frame, from and to whom the other samples are, with this at an offset of [`BARE_OFFSET`]. wire.md §2.1
pub fn bare(bytes: &[u8]) -> Vec<u8> {
    let h = HEADER;
    let association =
        h.engine_epoch ^ h.src_incarnation.rotate_left(8) ^ h.dst_incarnation.rotate_left(16);
    let mut frame = b"PB\x01\x04".to_vec();
    frame.extend(association.to_be_bytes());
    frame.extend([h.src_node, h.dst_node].map(u16::to_be_bytes).concat());
    frame.extend([h.src_queue, h.dst_queue, 3, 255]);
    for word in [h.sent_at, STREAM.epoch, 77, BARE_OFFSET, crc32c(bytes)] {
        frame.extend(word.to_be_bytes());
    }
    frame.extend(crc32c(&frame).to_be_bytes());
    frame.extend(bytes);
    frame
}

pub const BARE_OFFSET: u32 = 1_000_000;

/// Puts magic, version and header CRC right, so that a frame is judged by what is behind them. One that begins as a bare frame stays one.
pub fn reseal(frame: &mut [u8]) {
    let Some(begin) = frame.first_chunk_mut() else {
        return;
    };
    *begin = match begin {
        [0x50, 0x42, _] => [0x50, 0x42, 1],
        _ => [0x50, 0x4c, 1],
    };
    portolan_transport::wire::reseal(frame);
}
