//! The Wireshark dissector, `deploy/wireshark/portolan.lua`, read by tshark: every field of every kind as the transport's writer put
//! it in (wire.md §2, §3, §4, §5), every hostile frame judged as the transport's parser judges it (wire.md §6, §7), and a recorded session
//! linked as it happened.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use crate::harness::exchange::{between, options};
use crate::harness::random::Random;
use crate::harness::{Cluster, STEP, until};
use crate::tshark::capture::{Capture, ENCAPS};
use crate::tshark::expected::{FOUND, expected};
use crate::tshark::samples::{HEADER, STREAM, Sample, every_kind, payload, reseal, write};
use crate::tshark::{BOTH, ERROR, Fields, Passes, capture, dialogue, packets, rows, session};
use portolan::{Event, Port, PortOptions, Priority, SendOptions};
use portolan_testbed::{Encap, Impairment, Lab};
use portolan_transport::wire::{self, Chunk, FrameHeader};

mod next;

/// What is shown of a packet's bytes, without what was found by comparing packets.
fn shown(fields: &Fields) -> Fields {
    let found = |name: &str| {
        let name = name.strip_prefix("portolan.");
        name.is_none_or(|name| FOUND.contains(&name))
    };
    let mut fields = fields.clone();
    fields.retain(|name, _| !found(name));
    fields
}

// ---- what was put in comes out ----

// A frame of each kind, in each encapsulation. Expect: every field as it was put in, and no other.
#[test]
fn every_field_of_every_kind_is_shown() {
    let directory = tempfile::tempdir().unwrap();
    let samples = every_kind();
    let mut capture = Capture::new();
    let mut written = Vec::new();
    for (nth, sample) in samples.iter().enumerate() {
        // No two frames are one frame twice.
        let header = FrameHeader {
            sent_at: HEADER.sent_at + nth as u32,
            return_credit: nth % 2 == 1,
            ..HEADER
        };
        written.push((header, write(&header, std::slice::from_ref(sample))));
    }
    for encap in ENCAPS {
        written
            .iter()
            .for_each(|(_, frame)| capture.frame(encap, frame));
    }
    let capture = capture.write(directory.path());
    for passes in BOTH {
        let packets = packets(&capture, passes);
        let lines = rows(
            &capture,
            passes,
            &["_ws.col.Protocol", "_ws.col.Info", "portolan.duplicate_of"],
        );
        assert_eq!(packets.len(), ENCAPS.len() * samples.len());
        for (nth, (fields, line)) in packets.iter().zip(&lines).enumerate() {
            let sample = &samples[nth % samples.len()];
            let (header, frame) = &written[nth % samples.len()];
            let (mut expected, _, name) = expected(header, sample, frame);
            // The second and the third encapsulation repeat the first.
            if nth >= samples.len() {
                let first = (nth % samples.len() + 1).to_string();
                expected.insert("portolan.duplicate".into(), vec!["1".into()]);
                expected.insert("portolan.duplicate_of".into(), vec![first.clone()]);
                expected.insert("portolan.expert.duplicate".into(), vec![String::new()]);
                assert_eq!(line[2], [first]);
            }
            assert_eq!(shown(fields), expected, "packet {}: {sample:?}", nth + 1);
            assert_eq!(line[0], ["Portolan"]);
            let info = line[1].join(";");
            assert!(info.contains(&format!("  {name}")), "{info}");
        }
    }
    every_kind_of_the_specification_is_there(&samples);
}

/// Number and name of each kind, as wire.md §4 lists them.
fn every_kind_of_the_specification_is_there(samples: &[Sample]) {
    let spec = include_str!("../../../docs/spec/wire.md");
    let table = spec.split("## §4 Chunk kinds").nth(1).unwrap();
    let table = table.split("### §4.1").next().unwrap();
    let listed: BTreeSet<(u8, String)> = table
        .lines()
        .filter_map(|line| {
            let mut cells = line.split('|').map(str::trim).skip(1);
            Some((cells.next()?.parse().ok()?, cells.next()?.to_owned()))
        })
        .collect();
    let mut sampled: BTreeSet<(u8, String)> = samples
        .iter()
        .map(|sample| {
            let frame = write(&HEADER, std::slice::from_ref(sample));
            let (_, number, name) = expected(&HEADER, sample, &frame);
            (number, name.to_owned())
        })
        .collect();
    // It is none by itself: see `next_is_shown_with_what_it_leaves_out`.
    sampled.insert((24, "NEXT".to_owned()));
    sampled.insert((25, "RUN".to_owned())); // see `each_message_of_a_run_is_shown`
    assert_eq!(listed, sampled);
}

// All kinds in few frames. Expect: as many chunks, in their order, each payload with its own checksum.
#[test]
fn frames_of_many_chunks_are_shown() {
    let directory = tempfile::tempdir().unwrap();
    let samples = every_kind();
    let frames: Vec<&[Sample]> = samples.chunks(9).collect();
    let mut capture = Capture::new();
    for chunks in &frames {
        capture.frame(Encap::Udp4, &write(&HEADER, chunks));
    }
    let capture = capture.write(directory.path());
    let names = [
        "portolan.chunk.kind",
        "portolan.payload",
        "portolan.payload.crc.status",
        "portolan.malformed",
    ];
    for passes in BOTH {
        for (row, chunks) in rows(&capture, passes, &names).iter().zip(&frames) {
            assert_eq!(row[0], kinds(chunks));
            assert_eq!(row[0].len(), chunks.len());
            let payloads = chunks.iter().filter(|(_, bytes)| !bytes.is_empty());
            let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let payloads: Vec<String> = payloads.map(|(_, bytes)| hex(bytes)).collect();
            assert_eq!(row[1], payloads);
            let carriers = chunks.iter().filter(|(chunk, _)| chunk.payload().is_some());
            assert_eq!(row[2], vec!["1"; carriers.count()]);
            assert!(row[3].is_empty());
        }
    }
}

/// The kinds of a frame's chunks, as numbers.
fn kinds(chunks: &[Sample]) -> Vec<String> {
    let frame = write(&HEADER, chunks);
    let end = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
    let mut at = 48;
    let mut kinds = Vec::new();
    while at < end {
        kinds.push(frame[at].to_string());
        at += usize::from(u16::from_be_bytes([frame[at + 2], frame[at + 3]]));
    }
    kinds
}

fn data(number: u32, bytes: &[u8]) -> Sample {
    let chunk = Chunk::Data {
        stream: STREAM,
        number,
        offset: 0,
        unasked: false,
        payload: payload(bytes),
    };
    (chunk, bytes.to_vec())
}

// A kind and fields of a later version (wire.md §3). Expect: skipped and said so, what is behind them found, nothing malformed.
#[test]
fn a_newer_version_is_shown_as_far_as_it_is_known() {
    let directory = tempfile::tempdir().unwrap();
    let bytes: [&[u8]; 3] = [b"one", b"newer", b"two"];
    let mut frame = write(&HEADER, &bytes.map(|bytes| data(1, bytes)));
    frame[48 + 28] = 200;
    frame.splice(48 + 3 * 28..48 + 3 * 28, [1, 2, 3, 4]);
    frame[48 + 2 * 28 + 3] += 4;
    frame[5] += 4;
    reseal(&mut frame);
    assert_eq!(wire::parse(&[&frame]).unwrap().unknown_chunks(), 1);
    let mut capture = Capture::new();
    capture.frame(Encap::Ethernet, &frame);
    let capture = capture.write(directory.path());
    let fields = &packets(&capture, Passes::One)[0];
    let one = |name: &str| fields.get(&format!("portolan.{name}")).cloned();
    assert_eq!(one("malformed"), None);
    assert_eq!(
        one("chunk.kind"),
        Some(vec!["6".into(), "200".into(), "6".into()])
    );
    assert_eq!(one("chunk.more"), Some(vec!["01:02:03:04".into()]));
    assert_eq!(one("payload.crc.status"), Some(vec!["1".into(); 3]));
    assert_eq!(
        one("payload"),
        Some(vec![
            "6f:6e:65".into(),
            "6e:65:77:65:72".into(),
            "74:77:6f".into()
        ])
    );
    assert!(fields.contains_key("portolan.expert.unknown_kind"));
    assert!(!fields["_ws.expert.severity"].contains(&ERROR.to_owned()));
}

// A capture that holds only the beginning of each frame. Expect: that is said, and is not the frame's fault.
#[test]
fn a_short_capture_makes_no_frame_malformed() {
    let directory = tempfile::tempdir().unwrap();
    let samples = every_kind();
    let frame = write(&HEADER, &samples[..12]);
    let mut capture = Capture::new();
    for encap in ENCAPS {
        for captured in (1..=frame.len()).filter(|len| len % 7 == 0 || *len == frame.len()) {
            capture.cut_frame(encap, &frame, captured);
        }
    }
    let capture = capture.write(directory.path());
    let names = [
        "portolan.malformed",
        "portolan.expert.cut",
        "portolan.payload.crc.status",
        "frame.len",
        "frame.cap_len",
        "_ws.expert.severity",
    ];
    for passes in BOTH {
        for row in rows(&capture, passes, &names) {
            assert!(row[0].is_empty(), "{row:?}");
            assert_eq!(row[1].is_empty(), row[3] == row[4], "{row:?}");
            assert!(!row[2].contains(&"0".to_owned()), "{row:?}");
            assert!(!row[5].contains(&ERROR.to_owned()), "{row:?}");
        }
    }
}

// ---- what belongs together ----

// A conversation made by hand. Expect: every link, and no other.
#[test]
fn a_conversation_is_linked() {
    let directory = tempfile::tempdir().unwrap();
    let turns = dialogue::dialogue();
    let mut capture = Capture::new();
    for turn in &turns {
        capture.frame(Encap::Udp6, &turn.frame);
    }
    let capture = capture.write(directory.path());
    let rows = rows(&capture, Passes::Two, &dialogue::FOUND);
    assert_eq!(rows.len(), turns.len());
    for (nth, (row, turn)) in rows.iter().zip(&turns).enumerate() {
        for ((name, found), expected) in dialogue::FOUND.iter().zip(row).zip(&turn.found) {
            let expected: Vec<String> = expected.iter().map(u32::to_string).collect();
            assert_eq!(found, &expected, "packet {}: {name}", nth + 1);
        }
    }
}

// ---- hostile frames ----

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
        .collect()
}

/// Damages a frame. Most of the time its checksum is put right, for most of what is to be judged lies behind it.
fn damage(frame: &mut Vec<u8>, random: &mut Random) {
    let headers = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
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

// ---- a recorded session ----

/// Long enough for a message without a buffer to be asked about again.
const PATIENCE: Duration = Duration::from_millis(150);

/// Sends a message to node 2 that cannot be delivered there.
fn send_in_vain(port: &mut Port, to: u16, len: usize, within: Duration) {
    let options = SendOptions {
        timeout: Some(within),
        ..SendOptions::default()
    };
    port.send_bytes((2u16, to), &vec![7; len], options).unwrap();
    let Some(Event::Sent(sent)) = port.blocking_receive(STEP).unwrap() else {
        panic!("a send without an end");
    };
    assert!(!sent.status.is_delivered(), "{sent:?}");
}

/// Everything that two nodes say to each other, over a wire that loses some of it.
fn hold_a_session(cluster: &Cluster) {
    let mut one = cluster.open(1, options(9, 300_000));
    let mut two = cluster.open(2, options(5, 300_000));
    let mut sizes = vec![1, 80, 9000, 65_537, 300_000, 0, 20_000];
    sizes.extend((0..80).map(|n| n * 379 % 12_000));
    between(&mut one, &mut two, &sizes, Duration::from_secs(30));
    // A port without buffers, a port whose memory is too small, a port that is not there.
    let small = PortOptions {
        arena_bytes: 64 * 1024,
        ..PortOptions::at(6)
    };
    let _without_buffers = cluster.open(2, small);
    send_in_vain(&mut one, 6, 100, PATIENCE);
    one.resume_sending((2u16, 6u16), Priority::Low).unwrap();
    send_in_vain(&mut one, 6, 200_000, STEP);
    send_in_vain(&mut one, 77, 10, STEP);
}

// Two nodes talk, and all that they send is recorded before the wire loses some of it. Expect: nothing malformed, every repetition
// marked with the frame it repeats, every request with its answer, every message with its commit, and back.
#[test]
fn a_recorded_session_is_linked_as_it_happened() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("session.pcap");
    let lossy = Impairment::loss(0.04).seeded(5);
    let lab = Lab::builder().name("ptds").mtu(9000).impaired(lossy);
    let cluster = Cluster::start_with(lab, "[transport]\nstream_idle_ms = 300");
    let wire = cluster.lab.wire();
    wire.record(&path).unwrap();
    hold_a_session(&cluster);
    until("a stream is closed", STEP, || {
        wire.counters().unwrap();
        let links = session::links(&capture::read(&path));
        let closed = links.iter().any(|frame| frame.kinds.contains(&"CLOSED"));
        closed.then_some(())
    });
    wire.end_recording().unwrap();
    drop(cluster);

    let frames = capture::read(&path);
    let links = session::links(&frames);
    let names = [
        "portolan.malformed",
        "portolan.sent_before_in",
        "portolan.answered_in",
        "portolan.committed_in",
        "portolan.answers",
        "portolan.first_sent_in",
        "portolan.payload.crc.status",
        "portolan.retransmission",
        "portolan.duplicate",
        "portolan.echoed",
    ];
    let rows = BOTH.map(|passes| rows(&path, passes, &names));
    for (passes, rows) in BOTH.iter().zip(&rows) {
        assert_eq!(rows.len(), frames.len());
        for (nth, (row, links)) in rows.iter().zip(&links).enumerate() {
            let what = format!("{passes:?}, packet {}: {row:?} {links:?}", nth + 1);
            let text =
                |frames: &[usize]| -> Vec<String> { frames.iter().map(usize::to_string).collect() };
            assert!(row[0].is_empty() && row[8].is_empty(), "{what}");
            assert!(row[6].iter().all(|status| status == "1"), "{what}");
            assert_eq!(row[1], text(&links.sent_before_in), "{what}");
            assert_eq!(row[7], vec!["1"; links.sent_before_in.len()], "{what}");
            // What is to come is known in the second pass only.
            let known = |later: &[usize]| match passes {
                Passes::One => vec![],
                Passes::Two => text(later),
            };
            assert_eq!(row[2], known(&links.answered_in), "{what}");
            assert_eq!(row[3], known(&links.committed_in), "{what}");
        }
    }
    // And back, which one pass knows as well.
    let [once, twice] = &rows;
    for (nth, row) in twice.iter().enumerate() {
        assert_eq!(
            (&row[4], &row[5], &row[9]),
            (&once[nth][4], &once[nth][5], &once[nth][9])
        );
        let at = |frame: &String| &twice[frame.parse::<usize>().unwrap() - 1];
        let this = (nth + 1).to_string();
        for asked in &row[4] {
            assert!(at(asked)[2].contains(&this), "{asked} → {this}");
        }
        for first in &row[5] {
            assert!(at(first)[3].contains(&this), "{first} → {this}");
        }
        for answer in &row[2] {
            assert!(!at(answer)[4].is_empty(), "{this} → {answer}");
        }
    }
    let count = |what: fn(&session::Links) -> usize| links.iter().map(what).sum::<usize>();
    let repeated = count(|links| links.sent_before_in.len());
    let answered = count(|links| links.answered_in.len());
    let echoed = twice.iter().filter(|row| !row[9].is_empty()).count();
    let kinds: BTreeSet<&str> = links.iter().flat_map(|links| links.kinds.clone()).collect();
    println!(
        "{} frames, {repeated} repeated, {answered} answered, {echoed} echo: {kinds:?}",
        frames.len()
    );
    assert!(repeated >= 10 && answered >= 200 && echoed * 10 > frames.len() * 9);
    for kind in [
        "HELLO",
        "HELLO-ACK",
        "EAGER",
        "RTS",
        "DATA",
        "CTS",
        "MSGEND",
        "ACK",
        "NACK",
        "PROBE",
        "MSGDROP",
        "DROP-CONFIRM",
        "NULL",
        "NULL-ACK",
        "PORT-CLOSED",
        "CLOSE",
        "CLOSED",
        "PATH-PROBE",
        "PATH-ACK",
    ] {
        assert!(kinds.contains(kind), "{kind} in {kinds:?}");
    }
}
