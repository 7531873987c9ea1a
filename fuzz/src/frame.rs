//! Target `frame`: bytes from the network into `wire::parse`, and back through the writer.
//!
//! The input's first byte says how the rest becomes a frame: whether magic (of which kind), version and header CRC are put right (a fuzzer does not guess
//! a CRC, and most of the parser lies behind it), and into how many receive buffers the bytes are cut.
//!
//! Expected of a frame that parses (wire.md §5, §6): every accessor works; where the cuts are makes no difference; what was understood,
//! written again, is understood the same.

use std::collections::BTreeSet;

use portolan_crc::{crc32c_append, crc32c_combine};
use portolan_transport::wire::bare::BARE_MAGIC;
use portolan_transport::wire::frame::{MAGIC, VERSION};
use portolan_transport::wire::{
    Chunk, Frame, FrameHeader, FrameWriter, HEADER_AREA_MAX, PayloadView, Rows, crc32c, parse,
    reseal,
};

use crate::input::Input;

/// Longest frame there is; one byte more is an error worth reaching.
const LONGEST: usize = 65_536;

/// One input.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let how = input.u8();
    let cuts: Vec<usize> = (0..how >> 1 & 3).map(|_| input.u16().into()).collect();
    let mut bytes = input.rest().to_vec();
    // A few bytes may stand for a long frame.
    if how & 0x40 != 0
        && let Some(&last) = bytes.last()
    {
        bytes.resize((bytes.len() * usize::from(last)).min(LONGEST), last);
    }
    if how & 1 != 0 {
        put_right(&mut bytes, how & 0x20 != 0);
    }
    let segments = cut(&bytes, &cuts);
    let whole: [&[u8]; 1] = [&bytes];
    let frame = match parse(&segments) {
        Ok(frame) => frame,
        Err(error) => {
            assert!(!error.name().is_empty() && !error.help().is_empty());
            return;
        }
    };
    let read = read(&frame);
    // Cuts never help: what parses in pieces parses as a whole, to the same.
    match parse(&whole) {
        Ok(whole) => {
            assert_eq!(whole.header(), frame.header());
            assert_eq!(whole.unknown_chunks(), frame.unknown_chunks());
            assert_eq!(whole.is_bare(), frame.is_bare());
            assert_eq!(self::read(&whole), read);
        }
        Err(error) => panic!("parses in pieces only: {error:?}"),
    }
    for rows in [Rows::InFull, Rows::Next, Rows::Run] {
        write_again(frame.header(), &read, rows);
    }
}

/// Puts magic, of a bare frame or another, version and header CRC right, so that a frame is judged by what is behind them.
pub fn put_right(frame: &mut [u8], bare: bool) {
    let Some([a, b, version]) = frame.first_chunk_mut() else {
        return;
    };
    [*a, *b] = if bare { BARE_MAGIC } else { MAGIC }.to_be_bytes();
    *version = VERSION;
    reseal(frame);
}

/// The bytes in pieces, each cut relative to the one before.
fn cut<'a>(mut bytes: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut segments = Vec::new();
    for cut in cuts {
        let (piece, rest) = bytes.split_at(cut % (bytes.len() + 1));
        segments.push(piece);
        bytes = rest;
    }
    segments.push(bytes);
    segments
}

type Read<'a> = Vec<(Chunk<'a>, Vec<u8>, u32)>;

/// Everything there is to know of a frame's chunks.
fn read<'a>(frame: &Frame<'a>) -> Read<'a> {
    let mut chunks = Vec::new();
    for (chunk, view) in frame.chunks() {
        let bytes = payload(&view);
        assert_eq!(
            chunk.payload().map_or(0, |p| usize::from(p.len)),
            bytes.len()
        );
        assert!(!format!("{chunk:?}").is_empty());
        chunks.push((chunk, bytes, view.crc()));
    }
    // A RUN is as many as it has bytes, at most.
    assert!(chunks.len() + usize::from(frame.unknown_chunks()) <= 255 + LONGEST);
    chunks
}

/// The chunks without their checksums, and which of them match theirs: those that are in the same place only all together.
fn judged<'a>(chunks: &[(Chunk<'a>, Vec<u8>, u32)], places: &[usize]) -> Vec<(Chunk<'a>, bool)> {
    let damaged = |(_, bytes, crc): &(Chunk<'_>, Vec<u8>, u32)| crc32c(bytes) != *crc;
    let all = chunks.iter().zip(places);
    let bad: BTreeSet<usize> = (all.clone())
        .filter(|(chunk, _)| damaged(chunk))
        .map(|(_, place)| *place)
        .collect();
    all.map(|((chunk, ..), place)| {
        let mut chunk = *chunk;
        if let Chunk::Eager { payload, .. }
        | Chunk::Rts { payload, .. }
        | Chunk::Data { payload, .. } = &mut chunk
        {
            payload.crc = 0;
        }
        (chunk, !bad.contains(place))
    })
    .collect()
}

fn payload(view: &PayloadView<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut joined = 0;
    for part in view.parts() {
        assert!(!part.is_empty(), "a part without bytes");
        joined = crc32c_combine(joined, crc32c(part), part.len() as u32);
        bytes.extend_from_slice(part);
    }
    assert_eq!(bytes.len(), view.len());
    assert_eq!(view.is_empty(), bytes.is_empty());
    assert_eq!(joined, crc32c_append(0, &bytes), "joined checksums");
    assert_eq!(view.verify(), joined == view.crc());
    bytes
}

/// Writes the chunks into as many frames as it takes, and reads those. Of a RUN all are damaged if one is.
fn write_again(header: &FrameHeader, chunks: &Read<'_>, rows: Rows) {
    let mut left = &chunks[..];
    while !left.is_empty() {
        let mut buffer = vec![0x5a; LONGEST];
        let mut writer = FrameWriter::new(&mut buffer);
        writer.shorten(rows);
        let mut places = Vec::new();
        let fit = left
            .iter()
            .take_while(|(chunk, ..)| {
                let room = writer.room_for(chunk);
                let pushed = writer.push(chunk);
                assert!(room.is_some() || rows != Rows::InFull || pushed.is_err());
                places.extend(pushed);
                pushed.is_ok()
            })
            .count();
        assert!(
            fit > 0,
            "a chunk that came in a frame fits none: {:?}",
            left[0].0
        );
        let (now, later) = left.split_at(fit);
        assert_eq!(writer.chunks(), places.last().map_or(0, |last| last + 1));
        assert!(rows == Rows::Run || writer.chunks() == fit);
        let mut payloads = writer.finish_headers();
        let bytes: Vec<u8> = now.iter().flat_map(|(_, bytes, _)| bytes.clone()).collect();
        payloads.payloads_mut().copy_from_slice(&bytes);
        let len = payloads.finish(header);
        let written = &buffer[..len];
        let headers = usize::from(u16::from_be_bytes([written[4], written[5]]));
        assert!(headers <= HEADER_AREA_MAX);
        let segments: [&[u8]; 2] = [&written[..headers], &written[headers..]];
        match parse(&segments) {
            Ok(frame) => {
                assert_eq!(frame.header(), header);
                let again = read(&frame);
                match rows {
                    Rows::Run => assert_eq!(judged(&again, &places), judged(now, &places)),
                    _ => assert_eq!(again, now),
                }
            }
            Err(error) => panic!("what we write we cannot read: {error:?}"),
        }
        left = later;
    }
}
