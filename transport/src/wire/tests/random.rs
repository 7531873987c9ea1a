//! Random frames and random bytes.

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::chunk::{Hello, MAX_RANGES, Range};
use super::*;

/// Any chunk the writer can be asked for, well formed, with its payload.
pub(in crate::wire) fn any_chunk() -> impl Strategy<Value = (Chunk<'static>, Vec<u8>)> {
    let fields = (
        0..256u16,
        0..256u16,
        0..2u8,
        any::<[u32; 4]>(),
        any::<[u64; 3]>(),
        any::<[u8; 4]>(),
    );
    let fields = (
        0..23u8,
        fields,
        any::<Option<u32>>(),
        prop::collection::vec(any::<u8>(), 0..200),
        any::<bool>(),
    );
    fields.prop_map(
        |(kind, (sender_port, receiver_port, priority, n, q, b), start, body, flag)| {
            let stream = StreamRef {
                sender_port,
                receiver_port,
                priority,
                epoch: n[0],
            };
            let (number, tag) = (n[1], q[0]);
            let hello = || Hello {
                incarnation: q[0],
                echo: q[1],
                cluster: q[2],
                wire_min: b[0],
                wire_max: b[1],
                queues: b[2],
                max_frame: n[0] as u16,
                window: n[1] as u16,
                policy: PolicyWire {
                    recovery: b[0],
                    ack_rule: b[1],
                    order: b[2],
                },
                unasked: b[1],
                features: n[2],
                name: ["", "n", "node-17", "knoten-ä"][usize::from(b[3] % 4)],
            };
            let p = payload(&body);
            let chunk = match kind {
                0 => Chunk::Hello(hello()),
                1 => Chunk::HelloAck(hello()),
                2 => Chunk::Reset {
                    src_incarnation: n[0],
                    dst_incarnation: n[1],
                    reason: b[0],
                    detail: b[1],
                },
                3 => Chunk::Eager {
                    stream,
                    start,
                    number,
                    tag,
                    ack: [AckMode::Policy, AckMode::Immediate, AckMode::Lazy]
                        [usize::from(b[2] % 3)],
                    payload: p,
                },
                4 => Chunk::Rts {
                    stream,
                    start,
                    number,
                    tag,
                    ack: [AckMode::Policy, AckMode::Immediate, AckMode::Lazy]
                        [usize::from(b[2] % 3)],
                    total: n[2].max(200),
                    unasked: b[1] & 1 != 0,
                    payload: p,
                },
                5 if !body.is_empty() => Chunk::Data {
                    stream,
                    number,
                    offset: n[2] % (u32::MAX - 200),
                    unasked: b[1] & 1 != 0,
                    payload: p,
                },
                6 => {
                    let mut missing = [Range::default(); MAX_RANGES];
                    let missing_len = b[0] % 9;
                    missing[..usize::from(missing_len)].fill(Range {
                        from: n[2] / 2,
                        to: n[2] / 2 + 1,
                    });
                    Chunk::Cts {
                        stream,
                        number,
                        granted: n[2],
                        missing,
                        missing_len,
                    }
                }
                7 => Chunk::MsgEnd { stream, number },
                8 => Chunk::Ack {
                    stream,
                    base: number,
                    received: Received([
                        q[0],
                        q[1] & (0u64.wrapping_sub(u64::from(b[1] & 1))),
                        0,
                        q[2],
                        0,
                        q[1] & (0u64.wrapping_sub(u64::from(b[1] >> 1 & 1))),
                        0,
                        q[0] & (0u64.wrapping_sub(u64::from(b[1] >> 2 & 1))),
                    ]),
                },
                9 => Chunk::Nack {
                    stream,
                    expected: number,
                    reason: b[0],
                },
                10 => Chunk::Ready { stream, number },
                11 => Chunk::Probe {
                    stream,
                    start,
                    number,
                    total: n[2],
                },
                12 => Chunk::MsgDrop {
                    stream,
                    number,
                    reason: b[0],
                },
                13 => Chunk::DropConfirm { stream, number },
                14 => Chunk::Null {
                    stream,
                    start,
                    number,
                },
                15 => Chunk::NullAck {
                    stream,
                    number,
                    delivered: flag,
                },
                16 => Chunk::PortClosed {
                    stream,
                    base: number,
                },
                17 => Chunk::Close {
                    stream,
                    next: number,
                },
                18 => Chunk::Closed { stream },
                19 => Chunk::Refused { stream },
                20 => Chunk::Resume {
                    stream,
                    base: number,
                },
                21 => Chunk::PathProbe {
                    size: n[2] as u16 % 9000,
                    nonce: number,
                },
                _ => Chunk::PathAck {
                    size: n[2] as u16,
                    nonce: number,
                },
            };
            let body = if chunk.payload().is_some() {
                body
            } else {
                vec![]
            };
            (chunk, body)
        },
    )
}

/// Any chunks, often with messages in a row.
fn any_chunks(
    len: core::ops::Range<usize>,
) -> impl Strategy<Value = Vec<(Chunk<'static>, Vec<u8>)>> {
    let one = (any_chunk(), 0..4u8, any::<bool>(), any::<bool>());
    prop::collection::vec(one, len).prop_map(|drawn| {
        let mut chunks: Vec<(Chunk<'static>, Vec<u8>)> = Vec::new();
        for ((mut chunk, mut body), after, same_tag, same_len) in drawn {
            if after > 0
                && let Some((
                    Chunk::Eager {
                        stream,
                        number,
                        tag,
                        ack,
                        ..
                    },
                    before,
                )) = chunks.last()
            {
                if chunk.payload().is_none() {
                    body = vec![after];
                }
                if same_len {
                    body.resize(before.len(), after);
                }
                chunk = Chunk::Eager {
                    stream: *stream,
                    start: None,
                    number: number.wrapping_add(1),
                    tag: if same_tag { *tag } else { tag.wrapping_add(1) },
                    ack: *ack,
                    payload: payload(&body),
                };
            }
            chunks.push((chunk, body));
        }
        chunks
    })
}

fn any_rows() -> impl Strategy<Value = Rows> {
    prop::sample::select(vec![Rows::InFull, Rows::Next, Rows::Run])
}

proptest! {
    // Any frame, cut anywhere behind its headers. Expect: what was written.
    #[test]
    fn any_frame_round_trips(chunks in any_chunks(0..12), rows in any_rows(), cuts in any::<[prop::sample::Index; 2]>()) {
        let frame = write_for(rows, &chunks);
        let header_len = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
        let mut cuts = cuts.map(|cut| header_len + cut.index(frame.len() - header_len + 1));
        cuts.sort();
        let segments = [&frame[..cuts[0]], &frame[cuts[0]..cuts[1]], &frame[cuts[1]..]];
        let header = *parse(&segments).unwrap().header();
        prop_assert_eq!(header, HEADER);
        prop_assert_eq!(read(&segments).unwrap(), chunks);
    }

    // Random bytes, and a good frame with random bytes written over it and its checksum put right again. Expect: no panic, and
    // what is accepted can be walked.
    #[test]
    fn hostile_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&[&bytes]);
    }

    #[test]
    fn hostile_frames(
        chunks in any_chunks(1..6),
        rows in any_rows(),
        pokes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        bare: bool,
    ) {
        let mut frame = write_for(rows, &chunks);
        for (at, byte) in pokes {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        frame[0..3].copy_from_slice(&[0x50, if bare { 0x42 } else { 0x4c }, 1]);
        reseal(&mut frame);
        let (a, b) = frame.split_at(cut.index(frame.len() + 1));
        let segments = [a, b];
        if let Ok(frame) = parse(&segments) {
            for (chunk, view) in frame.chunks() {
                prop_assert_eq!(view.parts().map(<[u8]>::len).sum::<usize>(), view.len());
                prop_assert_eq!(chunk.payload().unwrap_or_default().len as usize, view.len());
            }
        }
        let _ = read(&[a, b]);
    }
}
