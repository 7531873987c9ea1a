//! Bare frames, written and read, wire.md §2.1.

use std::vec;

use proptest::prelude::*;

use super::super::bare::{BARE_LEN, BareHeaders, association};
use super::*;

const NUMBER: u32 = 0x2233_4455;
const OFFSET: u32 = 0x0100_0000;

/// The frame with this payload, which is longer than what may be padding.
fn bare(offset: u32, bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![0xee; BARE_LEN];
    let mut headers = BareHeaders::new(&HEADER, &STREAM, NUMBER);
    headers.go_on(HEADER.sent_at, offset);
    headers.seal(crc32c(bytes), frame.first_chunk_mut().unwrap());
    frame.extend_from_slice(bytes);
    frame
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

/// The DATA in it.
fn data(offset: u32, bytes: &[u8]) -> Chunk<'static> {
    Chunk::Data {
        stream: STREAM,
        number: NUMBER,
        offset,
        unasked: false,
        payload: payload(bytes),
    }
}

// The layout is the one in docs/spec/wire.md, byte for byte.
#[test]
fn layout() {
    let bytes = bytes(32);
    let frame = bare(OFFSET, &bytes);
    let mut expected = vec![0x50, 0x42, 1, 4]; // magic, version, HIGH
    // Engine epoch, and the incarnations, rotated by 8 and 16.
    let association: u32 = 0xffff_ffff ^ 0xadbe_efde ^ 0x0304_0102;
    expected.extend(association.to_be_bytes());
    expected.extend([0, 7, 0xff, 0xfe, 1, 2, 3, 255]); // nodes, queues, ports
    expected.extend([0x0a, 0x0b, 0x0c, 0x0d, 0xff, 0xff, 0xff, 0xf0]); // sent_at, stream epoch
    expected.extend([0x22, 0x33, 0x44, 0x55, 1, 0, 0, 0]); // number, offset
    expected.extend(crc32c(&bytes).to_be_bytes());
    expected.extend(crc32c(&expected).to_be_bytes());
    expected.extend(&bytes);
    assert_eq!(frame, expected);
}

// What is read is what was written, in whatever pieces it comes; what it does not say is 0.
#[test]
fn read_in_pieces() {
    let bytes = bytes(200);
    let frame = bare(OFFSET, &bytes);
    for cut in 0..=frame.len() {
        let (a, b) = frame.split_at(cut);
        if cut < BARE_LEN {
            assert_eq!(parse(&[a, b]).err(), Some(WireError::Truncated), "{cut}");
            continue;
        }
        let segments = [a, &[], b];
        let parsed = parse(&segments).unwrap();
        let header = FrameHeader {
            src_node: HEADER.src_node,
            dst_node: HEADER.dst_node,
            src_queue: HEADER.src_queue,
            dst_queue: HEADER.dst_queue,
            sent_at: HEADER.sent_at,
            ..FrameHeader::default()
        };
        assert_eq!((parsed.header(), parsed.is_bare()), (&header, true));
        assert_eq!(parsed.unknown_chunks(), 0);
        assert_eq!(
            read(&segments).unwrap(),
            [(data(OFFSET, &bytes), bytes.clone())]
        );
        let (said, plain, view) = parsed.bare().unwrap();
        let known = association(
            HEADER.src_incarnation,
            HEADER.dst_incarnation,
            HEADER.engine_epoch,
        );
        assert_eq!((said, plain.chunk()), (known, data(OFFSET, &bytes)));
        assert!(view.verify());
        // Walked like any other.
        let mut chunks = parsed.chunks();
        assert!(!chunks.is_over());
        assert!(chunks.ack().is_none() && chunks.data().is_none() && chunks.short().is_none());
        assert!(chunks.next().is_some() && chunks.is_over() && chunks.next().is_none());
    }
    // Of a frame in full there is nothing of the kind.
    let in_full = write(&[(data(OFFSET, &bytes), bytes)]);
    let segments = [&in_full[..]];
    let parsed = parse(&segments).unwrap();
    assert!(!parsed.is_bare() && parsed.bare().is_none());
}

// Cut, or of a length at which padding would be payload; another version; a checksum that is not right, of any bit; beyond 2³². Expect: each has its reason.
#[test]
fn refused() {
    let frame = bare(OFFSET, &bytes(25));
    assert_eq!(error(&frame), None);
    for len in 2..frame.len() {
        assert_eq!(error(&frame[..len]), Some(WireError::Truncated), "{len}");
    }
    for at in 0..BARE_LEN {
        for bit in 0..8 {
            let mut flipped = frame.clone();
            flipped[at] ^= 1 << bit;
            let expected = match at {
                0 | 1 => WireError::Magic,
                2 => WireError::Version,
                _ => WireError::HeaderCrc,
            };
            assert_eq!(error(&flipped), Some(expected), "byte {at} bit {bit}");
        }
    }
    let mut flipped = frame.clone();
    flipped[BARE_LEN + 7] ^= 1;
    assert!(read(&[&flipped]).is_err(), "a payload that does not match");
    let far = |len: u32| error(&bare(u32::MAX - len, &bytes(100)));
    assert_eq!((far(100), far(99)), (None, Some(WireError::ChunkField)));
    let longest = bare(0, &bytes(65_535 - BARE_LEN));
    assert_eq!(error(&longest), None);
    assert_eq!(
        error(&[&longest[..], &[0]].concat()),
        Some(WireError::TooLong)
    );
}

// Whom it comes from is told by four bytes. Expect: any one of the three is enough to make others of them.
#[test]
fn every_part_of_an_association_counts() {
    let known = association(1, 2, 3);
    for bit in (0..32).map(|i| 1u32 << i) {
        for other in [
            association(1 ^ bit, 2, 3),
            association(1, 2 ^ bit, 3),
            association(1, 2, 3 ^ bit),
        ] {
            assert_ne!(other, known);
        }
    }
    assert_ne!(association(2, 1, 3), known, "the other way");
}

proptest! {
    // Two frames that differ in everything that may differ, one after the other. Expect: each reads as it was meant.
    #[test]
    fn one_after_another(first: (u32, u32), second: (u32, u32), len in 25usize..2_000) {
        let mut headers = BareHeaders::new(&HEADER, &STREAM, NUMBER);
        let mut frame = vec![7; BARE_LEN + len];
        for (sent_at, offset) in [first, second] {
            let offset = offset.min(u32::MAX - len as u32);
            let (area, payload) = frame.split_first_chunk_mut().unwrap();
            payload.fill(offset as u8);
            headers.go_on(sent_at, offset);
            headers.seal(crc32c(payload), area);
            let payload = frame[BARE_LEN..].to_vec();
            prop_assert_eq!(parse(&[&frame]).unwrap().header().sent_at, sent_at);
            let segments = [&frame[..]];
            prop_assert_eq!(read(&segments).unwrap(), [(data(offset, &payload), payload)]);
        }
    }
}
