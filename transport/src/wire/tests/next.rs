//! NEXT: messages in a row, written and read, wire.md §4.2; and who says that he reads it, wire.md §4.1.

use std::vec;

use super::*;

// Three messages in a row, the third with another tag. Expect: NEXT and NEXT with a tag, byte for byte.
#[test]
fn layout_of_next() {
    let chunks = [
        eager(u32::MAX, 5, b"a"),
        eager(0, 5, b"bcd"),
        eager(1, 6, b"e"),
    ];
    let frame = write(&chunks);
    let mut expected = vec![24, 1, 0, 12, 0, 3, 0, 0];
    expected.extend(crc32c(b"bcd").to_be_bytes());
    expected.extend([24, 0x41, 0, 20, 0, 1, 0, 0]);
    expected.extend(crc32c(b"e").to_be_bytes());
    expected.extend([0, 0, 0, 0, 0, 0, 0, 6]);
    expected.extend(b"abcde");
    assert_eq!(frame[FRAME_HEADER_LEN + 32..], expected);
    assert_eq!(read(&[&frame]).unwrap(), chunks);
}

// Messages that are no successors, or not directly behind, and a peer that does not read NEXT. Expect: each has a header of its own; and what was
// behind another can be the one in front of the next.
#[test]
fn next_only_behind_its_predecessor() {
    let header_len = |frame: &[u8]| usize::from(u16::from_be_bytes([frame[4], frame[5]]));
    let other = |change: fn(&mut StreamRef, &mut AckMode)| {
        let (mut chunk, bytes) = eager(8, 5, b"b");
        if let Chunk::Eager { stream, ack, .. } = &mut chunk {
            change(stream, ack);
        }
        (chunk, bytes)
    };
    let ack = Chunk::Ack {
        stream: STREAM,
        base: 1,
        received: Received::default(),
    };
    let first = eager(7, 5, b"a");
    let run = [first.clone(), eager(8, 5, b"b"), eager(9, 5, b"")];
    assert_eq!(header_len(&write(&run)), 48 + 32 + 12 + 12);
    assert_eq!(header_len(&write_for(Rows::InFull, &run)), 48 + 3 * 32);
    assert_eq!(read(&[&write_for(Rows::InFull, &run)]).unwrap(), run);
    for second in [
        eager(7, 5, b"b"),
        eager(9, 5, b"b"),
        eager(6, 5, b"b"),
        other(|stream, _| stream.sender_port ^= 1),
        other(|stream, _| stream.receiver_port ^= 1),
        other(|stream, _| stream.priority ^= 1),
        other(|stream, _| stream.epoch ^= 1),
        other(|_, ack| *ack = AckMode::Policy),
    ] {
        let chunks = [first.clone(), second];
        let frame = write(&chunks);
        assert_eq!(header_len(&frame), 48 + 2 * 32, "{chunks:?}");
        assert_eq!(read(&[&frame]).unwrap(), chunks);
    }
    let apart = [run[0].clone(), (ack, vec![]), run[1].clone()];
    let frame = write(&apart);
    assert_eq!(header_len(&frame), 48 + 32 + 16 + 32);
    assert_eq!(read(&[&frame]).unwrap(), apart);
    let data = Chunk::Data {
        stream: STREAM,
        number: 1,
        offset: 0,
        unasked: false,
        payload: payload(b"x"),
    };
    let apart = [run[0].clone(), (data, b"x".to_vec()), run[1].clone()];
    assert_eq!(header_len(&write(&apart)), 48 + 32 + 28 + 32);
    // START stays in front of what has none.
    let (mut opening, bytes) = eager(7, 5, b"a");
    if let Chunk::Eager { start, .. } = &mut opening {
        *start = Some(7);
    }
    let opens = [(opening, bytes), run[1].clone(), run[2].clone()];
    let frame = write(&opens);
    assert_eq!(read(&[&frame]).unwrap(), opens);
}

// A HELLO of an older build, which ends with the name, and one of a newer build, which says more. Expect: read.
#[test]
fn features_may_be_missing() {
    for name in ["", "a", "abcd"] {
        let frame = write(&every_kind(name)[..1]);
        for (more, expected) in [(-4i16, 0), (4, 0x8000_0001)] {
            let mut frame = frame.clone();
            frame.resize(usize::try_from(frame.len() as i16 + more).unwrap(), 7);
            for at in [4, 50] {
                let len = i16::from_be_bytes([frame[at], frame[at + 1]]) + more;
                frame[at..at + 2].copy_from_slice(&len.to_be_bytes());
            }
            reseal(&mut frame);
            let segments: [&[u8]; 1] = [&frame];
            let (Chunk::Hello(hello), _) = read(&segments).unwrap()[0].clone() else {
                panic!("not a HELLO")
            };
            assert_eq!((hello.name, hello.features), (name, expected));
        }
    }
}

// NEXT with nothing in front of it, behind what is no message, behind what nobody knows, without a payload, cut short; and one of a newer build, which says
// more. Expect: refused, and read.
#[test]
fn next_that_is_none() {
    let next = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = write(&[eager(7, 5, b"a"), eager(8, 6, b"b")]);
        change(&mut frame);
        reseal(&mut frame);
        parse(&[&frame]).err()
    };
    let first = FRAME_HEADER_LEN;
    let second = first + 32;
    assert_eq!(next(&|_| {}), None);
    let field = Some(WireError::ChunkField);
    assert_eq!(next(&|f| f[first] = 24), field);
    assert_eq!(next(&|f| f[first] = 6), field); // DATA
    assert_eq!(next(&|f| f[first] = 200), field);
    assert_eq!(next(&|f| f[second + 1] &= !1), field);
    // Without its flag the tag is what a newer build appended.
    assert_eq!(next(&|f| f[second + 1] &= !64), None);
    // All other flags are reserved.
    assert_eq!(next(&|f| f[second + 1] = 0xff), None);
    let resized = |len: u8, flags: u8| {
        next(&|f| {
            let by = usize::from(len);
            f[second + 1] = flags;
            f[second + 3] = len;
            f[5] = (second + by) as u8;
            let payloads = f.split_off(second + 20);
            f.resize(second + by, 3);
            f.extend(payloads);
        })
    };
    assert_eq!(resized(24, 65), None);
    assert_eq!(resized(16, 65), field);
    assert_eq!(resized(16, 1), None);
    assert_eq!(resized(8, 1), field);
    assert_eq!(resized(4, 1), field);
    assert_eq!(resized(0, 1), Some(WireError::ChunkLength));
    assert_eq!(resized(18, 1), Some(WireError::ChunkLength));
}

// An EAGER's header said to be NEXT: behind an ACK that is behind an EAGER, and behind an EAGER with START. Expect: refused; and the message after that,
// which inherits no START.
#[test]
fn next_by_hand() {
    let ack = Chunk::Ack {
        stream: STREAM,
        base: 1,
        received: Received::default(),
    };
    let mut frame = write(&[eager(7, 5, b"a"), (ack, vec![]), eager(8, 6, b"b")]);
    frame[FRAME_HEADER_LEN + 32 + 16] = 24;
    reseal(&mut frame);
    assert_eq!(error(&frame), Some(WireError::ChunkField));

    let (mut opening, bytes) = eager(7, 5, b"a");
    if let Chunk::Eager { start, .. } = &mut opening {
        *start = Some(7);
    }
    let mut frame = write(&[(opening, bytes.clone()), eager(9, 6, b"b")]);
    frame[FRAME_HEADER_LEN + 36] = 24;
    reseal(&mut frame);
    let expected = [(opening, bytes), eager(8, 5, b"b")];
    assert_eq!(read(&[&frame]).unwrap(), expected);
}
