//! NEXT and RUN, wire.md §4.2, §4.3: what they leave out is shown with them.

use std::path::Path;

use portolan_testbed::Encap;
use portolan_transport::policy::AckMode;
use portolan_transport::wire::{Chunk, Rows, WireError, parse};

use super::kinds;
use crate::tshark::capture::Capture;
use crate::tshark::samples::{
    HEADER, STREAM, Sample, every_kind, payload, reseal, write, write_for,
};
use crate::tshark::{BOTH, rows};

/// Expect of the first packet: these fields, with one pass and with two, and this in the list of packets.
pub fn shows(capture: &Path, expected: &[(&str, Vec<&str>)], info: &str) {
    let names: Vec<String> = (expected.iter())
        .map(|(name, _)| format!("portolan.{name}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for passes in BOTH {
        let shown = rows(capture, passes, &names);
        for ((name, expected), shown) in expected.iter().zip(&shown[0]) {
            assert_eq!(shown, expected, "{name}");
        }
        let row = rows(capture, passes, &["_ws.col.Info"])[0][0].join(";");
        assert!(row.contains(info), "{row}");
    }
}

// Messages in a row, the last with another tag. Expect: NEXT, shown with what it has in common with the one in front of it.
#[test]
fn next_is_shown_with_what_it_leaves_out() {
    let directory = tempfile::tempdir().unwrap();
    let samples = every_kind();
    let is_last = |(chunk, _): &Sample| matches!(chunk, Chunk::Eager { number: 1, .. });
    let last = samples.iter().position(is_last).unwrap();
    let run = &samples[last - 2..=last];
    assert_eq!(kinds(run), ["4", "24", "24"]);
    let mut capture = Capture::new();
    capture.frame(Encap::Udp4, &write(&HEADER, run));
    let capture = capture.write(directory.path());
    let expected = [
        ("chunk.kind", vec!["4", "24", "24"]),
        ("number", vec!["4294967295", "0", "1"]),
        ("sender_port", vec!["3"; 3]),
        ("receiver_port", vec!["255"; 3]),
        ("port", vec!["3", "255", "3", "255", "3", "255"]),
        ("stream_epoch", vec!["4294967280"; 3]),
        ("stream", vec!["7:3 → 65534:255 high epoch 4294967280"; 3]),
        (
            "tag",
            vec![
                "0xfedcba9876543210",
                "0xfedcba9876543210",
                "0x0000000000000003",
            ],
        ),
        ("chunk.tag", vec!["0", "0", "1"]),
        ("payload.length", vec!["9", "5", "0"]),
        ("payload.crc.status", vec!["1"; 3]),
        ("malformed", vec![]),
    ];
    shows(&capture, &expected, "NEXT 7:3→65534:255 #1 0 B");
}

/// A frame of an EAGER and a RUN of so many messages behind it, in all that length, and one message more, of another length.
pub fn run(count: u32) -> Vec<u8> {
    let message = |nth: u32| {
        let bytes = match nth <= count {
            true => vec![nth as u8; 4],
            false => vec![9; 7],
        };
        let chunk = Chunk::Eager {
            stream: STREAM,
            start: None,
            number: nth.wrapping_sub(2),
            tag: 0x1234,
            ack: AckMode::Policy,
            payload: payload(&bytes),
        };
        (chunk, bytes)
    };
    let messages: Vec<Sample> = (0..count + 2).map(message).collect();
    write_for(Rows::Run, &HEADER, &messages)
}

// An EAGER, a RUN of three messages and a RUN of one. Expect: each message's number, and once for all what they have in common.
#[test]
fn each_message_of_a_run_is_shown() {
    let directory = tempfile::tempdir().unwrap();
    let mut capture = Capture::new();
    capture.frame(Encap::Udp4, &run(3));
    let mut damaged = run(3);
    let last = damaged.len() - 8;
    damaged[last] ^= 1;
    capture.frame(Encap::Udp4, &damaged);
    let capture = capture.write(directory.path());
    let expected = [
        ("chunk.kind", vec!["4", "25", "25"]),
        ("number", vec!["4294967294", "4294967295", "0", "1", "2"]),
        ("run.count", vec!["3", "1"]),
        ("sender_port", vec!["3"; 3]),
        ("stream_epoch", vec!["4294967280"; 3]),
        ("stream", vec!["7:3 → 65534:255 high epoch 4294967280"; 3]),
        ("tag", vec!["0x0000000000001234"; 3]),
        ("payload.length", vec!["4", "12", "7"]),
        (
            "payload",
            vec!["00000000", "010101010202020203030303", "09090909090909"],
        ),
        ("payload.crc.status", vec!["1"; 3]),
        ("malformed", vec![]),
    ];
    shows(
        &capture,
        &expected,
        "RUN 7:3→65534:255 #4294967295 to #1 3 × 4 B",
    );
    for passes in BOTH {
        let rows = rows(&capture, passes, &["portolan.payload.crc.status"]);
        assert_eq!(rows[1][0], ["1", "0", "1"]);
    }
}

/// Whether each payload of a frame is whole, of what the parser says of each message: a RUN's have one payload.
pub fn by_chunk(frame: &[u8], mut verdicts: impl Iterator<Item = bool>) -> Vec<bool> {
    let mut chunks = Vec::new();
    while let Some(good) = verdicts.next() {
        let more = of_run(frame, chunks.len()).saturating_sub(1);
        assert!((0..more).all(|_| verdicts.next() == Some(good)));
        chunks.push(good);
    }
    chunks
}

/// The messages of the RUN that is the frame's chunk of this index among those of known kinds with a payload; 0 if it is none.
fn of_run(frame: &[u8], index: usize) -> usize {
    if frame.starts_with(b"PB") {
        return 0; // a bare frame has no chunk's header
    }
    let (mut at, mut left) = (48, index);
    loop {
        let carries = frame[at + 1] & 1 != 0 && (1..=25).contains(&frame[at]);
        if carries && left == 0 {
            let count = u16::from_be_bytes([frame[at + 6], frame[at + 7]]);
            return usize::from(count) * usize::from(frame[at] == 25);
        }
        left -= usize::from(carries);
        at += usize::from(u16::from_be_bytes([frame[at + 2], frame[at + 3]]));
    }
}

// RUNs of as many messages as a reader takes of a frame, and one more. Expect: the parser's verdict.
#[test]
fn a_frames_runs_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let frames = [1_024_u16, 1_025].map(|count| {
        let at = 48 + 32;
        let mut frame = run(1);
        // Without the last, which is of another length; a byte each.
        frame[3] = 2;
        frame[5] = at as u8 + 12;
        frame.drain(at + 12..at + 24);
        frame[at + 4..at + 6].copy_from_slice(&count.to_be_bytes());
        frame[at + 6..at + 8].copy_from_slice(&count.to_be_bytes());
        frame.resize(at + 12 + 4 + usize::from(count), 0);
        reseal(&mut frame);
        frame
    });
    let parsed = frames.each_ref().map(|frame| parse(&[frame]).err());
    assert_eq!(parsed, [None, Some(WireError::ChunkField)]);
    let mut capture = Capture::new();
    for frame in &frames {
        capture.frame(Encap::Udp4, frame);
    }
    let capture = capture.write(directory.path());
    let rows = rows(&capture, BOTH[0], &["portolan.malformed"]);
    let shown: Vec<_> = rows.iter().map(|row| row[0].first()).collect();
    let field = WireError::ChunkField.name().to_owned();
    assert_eq!(shown, [None, Some(&field)]);
}
