//! Hostile frames: no accident, and each judged as the transport's parser judges it (wire.md §6, §7).

use std::collections::BTreeMap;
use std::path::Path;

use portolan_testbed::Encap;
use portolan_transport::wire;

use super::next;
use crate::harness::random::Random;
use crate::tshark::capture::{Capture, ENCAPS};
use crate::tshark::samples::{HEADER, bare, every_kind, reseal, write};
use crate::tshark::{BOTH, ERROR, Passes, rows};

/// Frames made of valid ones, each damaged in another way.
const DAMAGED: usize = 4000;

/// Valid frames: each sample alone, and mixed ones.
fn valid() -> Vec<Vec<u8>> {
    let samples = every_kind();
    let alone = samples.iter().map(std::slice::from_ref);
    let mixed = samples.windows(7).step_by(3);
    let frames = alone.chain(mixed).chain([&[][..]]);
    frames
        .map(|chunks| write(&HEADER, chunks))
        .chain((2..5).map(next::run))
        .chain([25, 97, 1400].map(|len| bare(&vec![len as u8; len])))
        .collect()
}

/// Damages a frame. Most of the time its checksum is put right, for most of what is to be judged lies behind it.
fn damage(frame: &mut Vec<u8>, random: &mut Random) {
    let headers = wire::header_area_len(frame).unwrap().max(1);
    for _ in 0..=random.below(3) {
        let at = random.below(frame.len());
        let in_headers = random.below(headers.min(frame.len()));
        match random.below(6) {
            0 => frame[at] ^= 1 << random.below(8),
            1 => frame[in_headers] ^= 1 << random.below(8),
            2 => frame[in_headers] = random.next() as u8,
            3 => frame.truncate(at.max(1)),
            4 => frame.extend((0..random.below(70)).map(|byte| byte as u8)),
            _ => {
                let from = random.below(frame.len());
                let bytes: Vec<u8> = frame[from..(from + 8).min(frame.len())].to_vec();
                let end = (at + bytes.len()).min(frame.len());
                frame[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
    }
    if random.below(4) > 0 {
        reseal(frame);
    }
}

/// The fuzzer's inputs, as they are and as the fuzzer makes frames of them.
fn corpus() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/frame");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 10, "the corpus is lost");
    let mut frames = Vec::new();
    for file in files {
        let input = std::fs::read(file).unwrap();
        let cuts = input.first().map_or(0, |how| usize::from(how >> 1 & 3));
        let frame = input.get(1 + 2 * cuts..).unwrap_or_default().to_vec();
        let mut sealed = frame.clone();
        reseal(&mut sealed);
        frames.extend([input, frame, sealed]);
    }
    frames.retain(|frame| !frame.is_empty());
    frames
}

/// HELLOs with every kind of beginning and middle of a character in their name (RFC 3629).
fn names() -> Vec<Vec<u8>> {
    let sample = every_kind().into_iter().nth(2).unwrap();
    let frame = write(&HEADER, &[sample]);
    let firsts = [
        0x00, 0x7f, 0x80, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xed, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff,
    ];
    let seconds = [0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0];
    let lasts = [[0x80, 0xbf], [0xbf, 0x20], [0x20, 0x20]];
    let mut frames = Vec::new();
    for first in firsts {
        for second in seconds {
            for [third, fourth] in lasts {
                let mut frame = frame.clone();
                frame[88..92].copy_from_slice(&[first, second, third, fourth]);
                reseal(&mut frame);
                frames.push(frame);
            }
        }
    }
    // Cut short by the name's end.
    frames.extend([0xc3, 0xe2, 0xf0].map(|first| {
        let mut frame = frame.clone();
        frame[94] = first;
        reseal(&mut frame);
        frame
    }));
    frames
}

/// What the parser says: a reason to drop the frame, and for each payload of a known kind whether it is whole.
fn judge(frame: &[u8]) -> (Option<&'static str>, Vec<bool>) {
    match wire::parse(&[frame]) {
        Err(error) => (Some(error.name()), vec![]),
        Ok(parsed) => {
            let carriers = parsed
                .chunks()
                .filter(|(chunk, _)| chunk.payload().is_some());
            let verdicts = carriers.map(|(_, view)| view.verify());
            (None, next::by_chunk(frame, verdicts))
        }
    }
}

// Damaged frames, too long ones, and the fuzzer's. Expect: no accident, and the parser's verdict on each, by its name.
#[test]
fn hostile_frames_are_judged_as_the_parser_judges_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random::new(0x9047_01a5);
    let valid = valid();
    let mut frames = valid.clone();
    frames.extend(corpus());
    frames.extend(names());
    for nth in 0..DAMAGED {
        let mut frame = valid[nth % valid.len()].clone();
        damage(&mut frame, &mut random);
        frames.push(frame);
    }
    // Around the length up to which Ethernet may have padded a frame.
    for len in 62..68 {
        let mut frame = write(&HEADER, &[]);
        frame.resize(len, 0);
        frames.push(frame);
    }
    let mut longest = valid[0].clone();
    longest.resize(65_535, 0);
    frames.push(longest.clone());
    longest.push(0);
    frames.push(longest);

    let mut capture = Capture::new();
    for (nth, frame) in frames.iter().enumerate() {
        // No datagram holds the longest.
        let encap = if frame.len() > 60_000 {
            Encap::Ethernet
        } else {
            ENCAPS[nth % 3]
        };
        capture.frame(encap, frame);
    }
    let capture = capture.write(directory.path());
    let names = [
        "portolan.malformed",
        "portolan.payload.crc.status",
        "_ws.expert.severity",
        "portolan.chunk.kind",
        "frame.protocols",
        "portolan.expert.payload_crc",
    ];
    // In words, too.
    let text = crate::tshark::run(&capture, Passes::One, &["-V", "-O", "portolan"]);
    assert!(!text.contains("Lua Error"));
    let mut reasons = BTreeMap::<&str, usize>::new();
    for reason in frames.iter().filter_map(|frame| judge(frame).0) {
        *reasons.entry(reason).or_default() += 1;
    }
    // Also where nobody looks at fields.
    let experts = crate::tshark::run(&capture, Passes::One, &["-q", "-z", "expert"]);
    for reason in wire::WireError::ALL {
        let (name, help) = (reason.name(), reason.help());
        let count = reasons.get(name).copied().unwrap_or_default();
        assert!(count > 0, "no frame is {name}");
        let line = format!("{count}  Malformed           PORTOLAN  Malformed: {help} ({name})");
        assert!(experts.contains(&format!(" {line}")), "{line}: {experts}");
    }
    for passes in BOTH {
        let rows = rows(&capture, passes, &names);
        assert_eq!(rows.len(), frames.len());
        for (nth, (row, frame)) in rows.iter().zip(&frames).enumerate() {
            let (malformed, payloads) = judge(frame);
            let what = format!("packet {}: {row:?}, {frame:02x?}", nth + 1);
            let error = row[2].contains(&ERROR.to_owned());
            assert!(row[4][0].ends_with(":portolan"), "{what}");
            assert_eq!(row[0].first().map(String::as_str), malformed, "{what}");
            if malformed.is_some() {
                assert!(error, "{what}");
                continue;
            }
            // Payloads of kinds nobody knows are checked too; the parser leaves them out.
            if row[3]
                .iter()
                .all(|kind| (1..=25).contains(&kind.parse::<u8>().unwrap()))
            {
                let verdicts: Vec<String> = payloads
                    .iter()
                    .map(|&good| u8::from(good).to_string())
                    .collect();
                assert_eq!(row[1], verdicts, "{what}");
                assert_eq!(error, payloads.contains(&false), "{what}");
                assert_eq!(error, !row[5].is_empty(), "{what}");
            }
        }
    }
}
