//! What can be wrong with a frame, case by case.

use std::vec;

use super::super::chunk::{MAX_RANGES, Range};
use super::*;

// Cut after any byte. Expect: an error, never a shorter frame taken for whole.
#[test]
fn truncated_at_every_length() {
    let (_, frame) = mixed();
    for len in 0..frame.len() {
        assert!(parse(&[&frame[..len]]).is_err(), "{len}");
    }
    for chunk in every_kind("abc") {
        let frame = write(&[chunk]);
        for len in 0..frame.len() {
            assert!(parse(&[&frame[..len]]).is_err(), "{len}");
        }
    }
    assert_eq!(parse(&[]).err(), Some(WireError::Truncated));
    assert_eq!(parse(&[&[], &frame]).err(), Some(WireError::Truncated));
}

// One bit flipped, any. Expect: an error, or a payload that does not match.
#[test]
fn every_bit_flipped() {
    let (chunks, mut frame) = mixed();
    for at in 0..frame.len() {
        for bit in 0..8 {
            frame[at] ^= 1 << bit;
            assert!(read(&[&frame]).is_err(), "byte {at} bit {bit}");
            frame[at] ^= 1 << bit;
        }
    }
    assert_eq!(read(&[&frame]).unwrap(), chunks);
}

// Cut into segments at every place behind the headers. Expect: the same chunks. Inside the headers: an error.
#[test]
fn segmented_at_every_position() {
    let (chunks, frame) = mixed();
    let header_len = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
    for cut in 0..=frame.len() {
        let (a, b) = frame.split_at(cut);
        if cut < header_len {
            assert!(parse(&[a, b]).is_err());
            continue;
        }
        assert_eq!(read(&[a, b]).unwrap(), chunks, "{cut}");
        assert_eq!(read(&[a, &[], b, &[]]).unwrap(), chunks, "{cut}");
        for second in 0..=b.len() {
            let (b, c) = b.split_at(second);
            assert_eq!(read(&[a, b, c]).unwrap(), chunks, "{cut} {second}");
        }
    }
}

// Lies told under a valid checksum, each with its reason.
#[test]
fn lies() {
    let stream = STREAM;
    let ack = write(&[(
        Chunk::Ack {
            stream,
            base: 1,
            received: Received::default(),
        },
        vec![],
    )]);
    let tampered = |at: usize, bytes: &[u8]| {
        let mut frame = ack.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(&mut frame);
        error(&frame)
    };
    assert_eq!(tampered(0, b"X"), Some(WireError::Magic));
    assert_eq!(tampered(2, &[2]), Some(WireError::Version));
    // chunk_count: one too few, one too many.
    assert_eq!(tampered(3, &[0]), Some(WireError::ChunkCount));
    assert_eq!(tampered(3, &[2]), Some(WireError::ChunkLength));
    // header_len: below the frame header, cutting a chunk, just the frame header, beyond the segment.
    assert_eq!(
        error(&{
            let mut f = ack.clone();
            f[5] = 47;
            f
        }),
        Some(WireError::HeaderLength)
    );
    assert_eq!(tampered(5, &[60]), Some(WireError::ChunkLength));
    assert_eq!(tampered(5, &[48]), Some(WireError::ChunkLength));
    assert_eq!(
        error(&{
            let mut f = ack.clone();
            f[4] = 1;
            f
        }),
        Some(WireError::HeaderLength)
    );
    assert_eq!(
        error(&{
            let mut f = ack.clone();
            f[44] ^= 1;
            f
        }),
        Some(WireError::HeaderCrc)
    );
    // Chunk length: zero, less than its prefix, no multiple of 4, too short for an ACK, beyond the headers.
    for (length, reason) in [
        (0, WireError::ChunkLength),
        (3, WireError::ChunkLength),
        (15, WireError::ChunkLength),
        (4, WireError::ChunkField),
        (12, WireError::ChunkField),
        (20, WireError::ChunkLength),
        (255, WireError::ChunkLength),
    ] {
        assert_eq!(tampered(51, &[length]), Some(reason), "{length}");
    }
    assert_eq!(tampered(50, &[255]), Some(WireError::ChunkLength));
    // A payload where the kind has none, ports that do not exist.
    assert_eq!(tampered(49, &[1 | 4]), Some(WireError::ChunkField));
    assert_eq!(tampered(52, &[1, 0]), Some(WireError::ChunkField));
    assert_eq!(tampered(54, &[1, 0]), Some(WireError::ChunkField));
    // Unknown flags and reserved bytes are for later versions.
    assert_eq!(tampered(49, &[0xf8 | 4]), None);
    assert_eq!(tampered(6, &[0xff, 0xff]), None);
    assert_eq!(tampered(14, &[0xff, 0xff]), None);
}

// Values a kind forbids, under a valid checksum. Expect: refused by the parser.
#[test]
fn impossible_fields() {
    let stream = STREAM;
    let body = b"payload".to_vec();
    let refused = |chunk: Chunk<'_>, body: &[u8]| {
        assert_eq!(
            error(&write(&[(chunk, body.to_vec())])),
            Some(WireError::ChunkField),
            "{chunk:?}"
        );
    };
    let p = payload(&body);
    refused(
        Chunk::Rts {
            stream,
            start: None,
            number: 0,
            tag: 0,
            ack: AckMode::Policy,
            total: 6,
            unasked: false,
            payload: p,
        },
        &body,
    );
    refused(
        Chunk::Data {
            stream,
            number: 0,
            offset: u32::MAX - 6,
            unasked: false,
            payload: p,
        },
        &body,
    );
    refused(
        Chunk::Data {
            stream,
            number: 0,
            offset: 0,
            unasked: false,
            payload: Payload::default(),
        },
        &[],
    );
    for range in [Range { from: 5, to: 5 }, Range { from: 6, to: 5 }] {
        refused(
            Chunk::Cts {
                stream,
                number: 0,
                granted: 0,
                missing: [range; MAX_RANGES],
                missing_len: 1,
            },
            &[],
        );
    }
    let tamper = |chunk: Chunk<'_>, at: usize, to: u8| {
        let mut frame = write(&[(chunk, vec![])]);
        frame[at] = to;
        reseal(&mut frame);
        assert_eq!(error(&frame), Some(WireError::ChunkField), "{chunk:?}");
    };
    let missing = [Range { from: 0, to: 1 }; MAX_RANGES];
    let cts = Chunk::Cts {
        stream,
        number: 0,
        granted: 0,
        missing,
        missing_len: 8,
    };
    tamper(cts, 48 + 20, 9); // more ranges than any CTS has
    tamper(
        Chunk::NullAck {
            stream,
            number: 0,
            delivered: true,
        },
        48 + 16,
        2,
    );
    let (hello, _) = every_kind("abcd")[0].clone();
    tamper(hello, 48 + 31, 5); // a name longer than the chunk
    tamper(hello, 48 + 31, 65); // than any name
    tamper(hello, 48 + 40, 0xff); // not UTF-8
    // An EAGER without its payload.
    tamper(
        Chunk::Eager {
            stream,
            start: None,
            number: 0,
            tag: 0,
            ack: AckMode::Policy,
            payload: Payload::default(),
        },
        49,
        0,
    );
}

// Payload lengths that do not match the frame. Expect: refused; padding of the shortest frames and path probes is tolerated.
#[test]
fn payload_sum() {
    let stream = STREAM;
    let long = write(&[(
        Chunk::Data {
            stream,
            number: 1,
            offset: 0,
            unasked: false,
            payload: payload(&[5; 40]),
        },
        vec![5; 40],
    )]);
    let mut lie = long.clone();
    lie[53] = 41;
    reseal(&mut lie);
    assert_eq!(error(&lie), Some(WireError::PayloadLength));
    lie[53] = 39;
    reseal(&mut lie);
    assert_eq!(error(&lie), Some(WireError::Trailing));

    let mut ack = write(&[(
        Chunk::Ack {
            stream,
            base: 1,
            received: Received::default(),
        },
        vec![],
    )]);
    assert_eq!(ack.len(), 64);
    assert_eq!(error(&ack), None);
    let mut short = write(&[(Chunk::Closed { stream }, vec![])]);
    short.resize(64, 0xff);
    assert_eq!(error(&short), None);
    ack.push(0);
    assert_eq!(error(&ack), Some(WireError::Trailing));

    let probe = write(&[(
        Chunk::PathProbe {
            size: 3000,
            nonce: 1,
        },
        vec![],
    )]);
    assert_eq!(probe.len(), 3000);
    assert_eq!(error(&probe), None);
    assert_eq!(error(&probe[..2999]), Some(WireError::PayloadLength));
    assert_eq!(error(&[probe, vec![0]].concat()), Some(WireError::Trailing));
    assert_eq!(error(&vec![0; 65536]), Some(WireError::TooLong));
}

// A newer version's chunk kind, with a payload of its own, between two of ours; and a known kind with fields appended. Expect:
// the unknown one and the unknown fields skipped, the payload behind them found.
#[test]
fn newer_version() {
    let stream = STREAM;
    let data = |bytes: &[u8]| Chunk::Data {
        stream,
        number: 1,
        offset: 0,
        unasked: false,
        payload: payload(bytes),
    };
    let chunks = [
        (data(b"one"), b"one".to_vec()),
        (data(b"newer"), b"newer".to_vec()),
        (data(b"two"), b"two".to_vec()),
    ];
    let mut frame = write(&chunks);
    frame[48 + 28] = 200;
    // Four more bytes at the end of the last header.
    frame.splice(48 + 3 * 28..48 + 3 * 28, [1, 2, 3, 4]);
    frame[48 + 2 * 28 + 3] += 4;
    frame[5] += 4;
    reseal(&mut frame);
    assert_eq!(
        read(&[&frame]).unwrap(),
        [chunks[0].clone(), chunks[2].clone()]
    );
    assert_eq!(parse(&[&frame]).unwrap().unknown_chunks(), 1);
}
