//! RUN: messages of one length in a row, written and read, wire.md §4.3.

use std::vec;

use proptest::prelude::*;

use super::super::plain::{Form, RUN_MAX};
use super::*;

fn header_len(frame: &[u8]) -> usize {
    usize::from(u16::from_be_bytes([frame[4], frame[5]]))
}

/// Chunks, and their kinds with the messages that each says it is of.
fn kinds(frame: &[u8]) -> Vec<(u8, u16)> {
    let (mut at, mut all) = (FRAME_HEADER_LEN, Vec::new());
    while at < header_len(frame) {
        let count = u16::from_be_bytes([frame[at + 6], frame[at + 7]]);
        all.push((frame[at], count * u16::from(frame[at + 1] & 1)));
        at += usize::from(u16::from_be_bytes([frame[at + 2], frame[at + 3]]));
    }
    assert_eq!(all.len(), usize::from(frame[3]));
    all
}

// An EAGER, two of one length behind it, and two of another. Expect: two RUNs, byte for byte; and the checksums that `push` joins are those of the
// bytes.
#[test]
fn layout_of_run() {
    let chunks = [
        eager(u32::MAX, 5, b"abc"),
        eager(0, 5, b"def"),
        eager(1, 5, b"ghi"),
        eager(2, 5, b"j"),
        eager(3, 5, b"k"),
        eager(4, 5, b"l"),
    ];
    let frame = write_for(Rows::Run, &chunks);
    let mut expected = vec![25, 1, 0, 12, 0, 6, 0, 2];
    expected.extend(crc32c(b"defghi").to_be_bytes());
    expected.extend([25, 1, 0, 12, 0, 3, 0, 3]);
    expected.extend(crc32c(b"jkl").to_be_bytes());
    expected.extend(b"abcdefghijkl");
    assert_eq!(frame[FRAME_HEADER_LEN + 32..], expected);
    assert_eq!(read(&[&frame]).unwrap(), chunks);

    let mut again = vec![0; frame.len()];
    let mut headers = FrameWriter::new(&mut again);
    headers.shorten(Rows::Run);
    let places = chunks.each_ref().map(|(chunk, _)| headers.push(chunk));
    assert_eq!(places, [0, 1, 1, 2, 2, 2].map(Ok));
    let mut payloads = headers.finish_headers();
    assert_eq!(payloads.payload_mut(1).len(), 6);
    payloads.payloads_mut().copy_from_slice(b"abcdefghijkl");
    payloads.finish(&HEADER);
    assert_eq!(again, frame);
}

// What breaks a row: another tag, nothing to carry, another length, a message that is no successor, a chunk of another kind, a peer that reads less.
// Expect: as short as it can be written, and read as it was.
#[test]
fn run_only_where_nothing_differs() {
    let ack = (
        Chunk::Ack {
            stream: STREAM,
            base: 1,
            received: Received::default(),
        },
        vec![],
    );
    let written = |chunks: &[(Chunk<'static>, Vec<u8>)], rows, expected: &[(u8, u16)]| {
        let frame = write_for(rows, chunks);
        assert_eq!(read(&[&frame]).unwrap(), chunks);
        assert_eq!(kinds(&frame), expected, "{rows:?} {chunks:?}");
    };
    let one = |number, tag| eager(number, tag, b"a");
    let plain = [one(0, 5), one(1, 5), one(2, 5), one(3, 5)];
    written(&plain, Rows::Run, &[(4, 0), (25, 3)]);
    written(&plain, Rows::Next, &[(4, 0), (24, 0), (24, 0), (24, 0)]);
    written(&plain, Rows::InFull, &[(4, 0); 4]);
    let tagged = [one(0, 5), one(1, 5), one(2, 6), one(3, 6), one(4, 6)];
    let expected = [(4, 0), (25, 1), (24, 0), (25, 2)];
    written(&tagged, Rows::Run, &expected);
    let none = [one(0, 5), one(1, 5), eager(2, 5, b""), one(3, 5)];
    written(&none, Rows::Run, &[(4, 0), (25, 1), (24, 0), (25, 1)]);
    let longer = [one(0, 5), one(1, 5), eager(2, 5, b"bc"), one(3, 5)];
    written(&longer, Rows::Run, &[(4, 0), (25, 1), (25, 1), (25, 1)]);
    let apart = [one(0, 5), one(1, 5), one(3, 5), one(4, 5)];
    written(&apart, Rows::Run, &[(4, 0), (25, 1), (4, 0), (25, 1)]);
    let between = [one(0, 5), one(1, 5), ack, one(2, 5), one(3, 5)];
    let expected = [(4, 0), (25, 1), (9, 0), (4, 0), (25, 1)];
    written(&between, Rows::Run, &expected);
}

// RUN is no NEXT: who reads it has to say that he reads both.
#[test]
fn who_reads_runs() {
    let expected = [Rows::InFull, Rows::Next, Rows::InFull, Rows::Run];
    assert_eq!([0, 1, 2, 3].map(Rows::of), expected);
    let expected = [Rows::InFull, Rows::Run];
    assert_eq!([0xffff_fffc, u32::MAX].map(Rows::of), expected);
}

// As many messages as one RUN holds, and more; and a frame whose chunks are all taken. Expect: another RUN; and the last RUN still grows.
#[test]
fn how_many() {
    let many: Vec<_> = (0..90)
        .map(|number| eager(number, 5, &[number as u8; 3]))
        .collect();
    let frame = write_for(Rows::Run, &many);
    assert_eq!(
        kinds(&frame),
        [(4, 0), (25, RUN_MAX), (25, RUN_MAX), (25, 25)]
    );
    assert_eq!(read(&[&frame]).unwrap(), many);
    assert_eq!(
        read(&[&frame[..200], &frame[200..303], &frame[303..]]).unwrap(),
        many
    );

    let mut buffer = [0; 1_472];
    let mut w = FrameWriter::new(&mut buffer);
    w.shorten(Rows::Run);
    for number in 0..MAX_CHUNKS as u32 {
        let (chunk, _) = eager(number, 5, &[0; 70][..1 + number as usize % 2]);
        assert_eq!(w.push(&chunk), Ok(number as usize));
    }
    let number = MAX_CHUNKS as u32;
    assert_eq!(w.push(&eager(number, 5, b"a").0), Err(Full));
    assert_eq!(w.form(&STREAM, number, 5, AckMode::Lazy, 2), Form::More);
    assert_eq!((w.room_in(Form::Run), w.room_behind(0)), (None, None));
    let (len, room) = (w.len(), w.room_in(Form::More).unwrap());
    assert_eq!(len + room, 1_472);
    assert_eq!(w.push(&eager(number, 5, b"ab").0), Ok(MAX_CHUNKS - 1));
    assert_eq!((w.chunks(), w.len()), (MAX_CHUNKS, len + 2));
    let mut next = number + 1;
    while w.push(&eager(next, 5, b"ab").0).is_ok() {
        next += 1;
    }
    // Nothing in the way but the RUN's length.
    assert_eq!(next as usize, MAX_CHUNKS - 1 + usize::from(RUN_MAX));

    // A message that does not fit changes nothing.
    let mut small = [0; 48 + 32 + 12 + 4 + 4 + 3];
    let mut w = FrameWriter::new(&mut small);
    w.shorten(Rows::Run);
    assert_eq!(w.room_in(Form::Run), w.room_behind(12));
    let fits: Vec<_> = (0..3)
        .map(|number| w.push(&eager(number, 5, b"abcd").0))
        .collect();
    assert_eq!(fits, [Ok(0), Ok(1), Err(Full)]);
    assert_eq!(w.len(), 48 + 32 + 12 + 8);
    w.finish_headers()
        .payloads_mut()
        .copy_from_slice(b"abcdabcd");
    let len = w.finish_headers().finish(&HEADER);
    assert_eq!(kinds(&small[..len]), [(4, 0), (25, 1)]);
    assert_eq!(read(&[&small[..len]]).unwrap().len(), 2);
}

// RUNs of a frame that together are of as many messages as a reader takes, and of one more. Expect: read; refused.
#[test]
fn how_many_in_a_frame() {
    let of = |counts: &[u16]| {
        let chunks: Vec<_> = (0..1 + counts.len() as u32)
            .map(|number| eager(number, 5, &vec![0; 1 + number as usize % 2]))
            .collect();
        let mut frame = write_for(Rows::Run, &chunks);
        let bytes: usize = counts.iter().map(|count| usize::from(*count)).sum();
        for (nth, count) in counts.iter().enumerate() {
            let at = FRAME_HEADER_LEN + 32 + 12 * nth;
            frame[at + 4..at + 6].copy_from_slice(&count.to_be_bytes());
            frame[at + 6..at + 8].copy_from_slice(&count.to_be_bytes());
        }
        frame.resize(header_len(&frame) + 1 + bytes, 0);
        reseal(&mut frame);
        (kinds(&frame).len(), error(&frame))
    };
    assert_eq!(of(&[1_024]), (2, None));
    assert_eq!(of(&[1_025]), (2, Some(WireError::ChunkField)));
    assert_eq!(of(&[33; 31]), (32, None));
    assert_eq!(of(&[512, 511, 1]), (4, None));
    assert_eq!(of(&[512, 512, 1]), (4, Some(WireError::ChunkField)));
}

// RUN with nothing in front of it, behind what is no message or what nobody knows, without a payload, of no messages, of messages without bytes or not
// of one length, cut short, under another kind's number; and one of a newer build, which says more, with every other flag. Expect: refused, and read.
#[test]
fn run_that_is_none() {
    let chunks = [eager(7, 5, b"a"), eager(8, 5, b"bcd"), eager(9, 5, b"efg")];
    let good = write_for(Rows::Run, &chunks);
    let run = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = good.clone();
        change(&mut frame);
        reseal(&mut frame);
        error(&frame)
    };
    let first = FRAME_HEADER_LEN;
    let second = first + 32;
    assert_eq!(kinds(&good), [(4, 0), (25, 2)]);
    assert_eq!(run(&|_| {}), None);
    let field = Some(WireError::ChunkField);
    assert_eq!(run(&|f| f[first] = 25), field);
    assert_eq!(run(&|f| f[first] = 6), field); // DATA
    assert_eq!(run(&|f| f[first] = 200), field);
    assert_eq!(run(&|f| f[second + 1] &= !1), field);
    for (len, count, expected) in [
        (6, 0, field),
        (6, 1, None),
        (6, 3, None),
        (6, 6, None),
        (6, 4, field),
        (6, 5, field),
        (6, 7, field),
        (6, 12, field),
        (6, u16::MAX, field),
        (0, 0, field),
        (0, 1, field),
        (0, 2, field),
    ] {
        let lie = |f: &mut Vec<u8>| {
            f[second + 5] = len;
            f[second + 6..second + 8].copy_from_slice(&count.to_be_bytes());
            f.truncate(second + 12 + 1 + usize::from(len));
        };
        assert_eq!(run(&lie), expected, "{len} bytes of {count}");
    }
    assert_eq!(run(&|f| f[second + 5] = 8), Some(WireError::PayloadLength));
    assert_eq!(run(&|f| f[second + 5] = 4), Some(WireError::Trailing));
    // All other flags are reserved, TAG among them.
    let all_flags = |f: &mut Vec<u8>| f[second + 1] = 0xff;
    assert_eq!(run(&all_flags), None);
    let resized = |len: u8| {
        let mut f = good.clone();
        let by = usize::from(len);
        f[second + 3] = len;
        f[5] = (second + by) as u8;
        let payloads = f.split_off(second + 12);
        f.resize(second + by, 3);
        f.extend(payloads);
        reseal(&mut f);
        f
    };
    for (len, flags) in [(16, 1), (20, 0xff), (12, 0xff)] {
        let mut longer = resized(len);
        longer[second + 1] = flags;
        reseal(&mut longer);
        assert_eq!(read(&[&longer]).unwrap(), chunks, "{len} {flags}");
    }
    assert_eq!(error(&resized(8)), field);
    assert_eq!(error(&resized(4)), field);
    assert_eq!(error(&resized(0)), Some(WireError::ChunkLength));
    assert_eq!(error(&resized(14)), Some(WireError::ChunkLength));
}

/// Number, tag and bytes of each message of a frame, and whether they are good. Bits say of each whether it is asked for as a short one, and taken so
/// if it is one.
fn taken(frame: &Frame<'_>, mut short: u64) -> Vec<(u32, u64, Vec<u8>, bool)> {
    let (mut chunks, mut all) = (frame.chunks(), Vec::new());
    loop {
        short = short.rotate_right(1);
        if short & 1 != 0
            && let Some(found) = chunks.short()
            && short & 2 != 0
        {
            chunks.pass(&found);
            let good = found.crc.is_none_or(|crc| crc == crc32c(found.bytes));
            all.push((found.number, found.tag, found.bytes.to_vec(), good));
            continue;
        }
        let Some((chunk, view)) = chunks.next() else {
            return all;
        };
        let Chunk::Eager {
            number,
            tag,
            payload,
            ..
        } = chunk
        else {
            panic!("{chunk:?}")
        };
        assert_eq!((payload.len, payload.crc), (view.len() as u16, view.crc()));
        let bytes = view.parts().flatten().copied().collect();
        all.push((number, tag, bytes, view.verify()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    // Messages in a row, some of one length, some of one tag; a bit of the payloads flipped; cut anywhere behind the headers; taken one way or the
    // other, message by message. Expect: all are found, and those damaged that share their checksum with the bit, and no others.
    #[test]
    fn a_run_is_its_messages(
        drawn in prop::collection::vec((0..4usize, 0..6u8), 1..30),
        long in 0..200usize,
        flip in any::<(bool, prop::sample::Index)>(),
        cuts in any::<[prop::sample::Index; 2]>(),
        ways: u64,
    ) {
        let mut tag = 7;
        let mut chunks = Vec::new();
        for (len, other) in drawn {
            tag += u64::from(other == 0);
            let len = [0, 1, 9, long][len];
            for _ in 0..1 + other % 3 {
                let number = (u32::MAX - 4).wrapping_add(chunks.len() as u32);
                let bytes: Vec<u8> = (0..len).map(|at| (at * 17 + chunks.len()) as u8).collect();
                if chunks.len() < MAX_CHUNKS {
                    chunks.push(eager(number, tag, &bytes));
                }
            }
        }
        let mut frame = write_for(Rows::Run, &chunks);
        let headers = header_len(&frame);
        let mut cuts = cuts.map(|cut| headers + cut.index(frame.len() - headers + 1));
        cuts.sort();
        let known: Vec<(u64, usize)> = chunks.iter().map(|(chunk, bytes)| match chunk {
            Chunk::Eager { tag, .. } => (*tag, bytes.len()),
            _ => unreachable!("messages"),
        }).collect();
        // Which of them have a checksum in common.
        let in_run = |i: usize| i > 0 && known[i].0 == known[i - 1].0 && known[i].1 > 0;
        let (mut checksums, mut checksum) = (Vec::new(), 0);
        for i in 0..known.len() {
            let more = in_run(i) && i > 1 && in_run(i - 1) && known[i].1 == known[i - 1].1;
            checksum += usize::from(!more);
            checksums.push(checksum);
        }
        prop_assert_eq!(usize::from(frame[3]), checksum);
        let mut hit = None;
        if flip.0 && frame.len() > headers {
            let place = flip.1.index(frame.len() - headers);
            frame[headers + place] ^= 0x10;
            let mut end = 0;
            hit = known.iter().position(|(_, len)| {
                end += len;
                place < end
            });
        }
        let segments = [&frame[..cuts[0]], &frame[cuts[0]..cuts[1]], &frame[cuts[1]..]];
        let parsed = parse(&segments).unwrap();
        short_is_next(parsed.chunks());
        let found = taken(&parsed, ways);
        prop_assert_eq!(found.len(), chunks.len());
        let mut at = headers;
        for (index, (number, tag, bytes, good)) in found.iter().enumerate() {
            prop_assert_eq!(*number, (u32::MAX - 4).wrapping_add(index as u32));
            prop_assert_eq!((*tag, bytes.len()), known[index]);
            prop_assert_eq!(&frame[at..at + bytes.len()], &bytes[..]);
            at += bytes.len();
            let damaged = hit.is_some_and(|hit| checksums[hit] == checksums[index]);
            prop_assert_eq!(*good, !damaged, "{} of {:?}", index, &checksums);
        }
    }
}
