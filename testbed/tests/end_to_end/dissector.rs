//! The Wireshark dissector, `deploy/wireshark/portolan.lua`, read by tshark: every field of every kind as the transport's writer put
//! it in (wire.md §2, §3, §4, §5), every hostile frame judged as the transport's parser judges it (wire.md §6, §7), and a recorded session
//! linked as it happened.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::harness::exchange::{between, options};
use crate::harness::{Cluster, STEP, until};
use crate::tshark::capture::{Capture, ENCAPS};
use crate::tshark::expected::{FOUND, expected};
use crate::tshark::samples::{HEADER, STREAM, Sample, bare, every_kind, payload, reseal, write};
use crate::tshark::{BOTH, ERROR, Fields, Passes, capture, dialogue, packets, rows, session};
use portolan::{Event, Port, PortOptions, Priority, SendOptions};
use portolan_testbed::{Encap, Impairment, Lab};
use portolan_transport::wire::{self, Chunk, FrameHeader};

mod bare;
mod hostile;
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
    let frames = [write(&HEADER, &samples[..12]), bare(&[5; 200])];
    let mut capture = Capture::new();
    for encap in ENCAPS {
        for frame in &frames {
            for captured in (1..=frame.len()).filter(|len| len % 7 == 0 || *len == frame.len()) {
                capture.cut_frame(encap, frame, captured);
            }
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
    let bare = count(|links| usize::from(links.is_bare));
    assert!(
        repeated >= 10 && answered >= 200 && bare >= 10,
        "{bare} bare"
    );
    assert!(echoed * 10 > (frames.len() - bare) * 9);
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
