//! Bare frames, wire.md §2.1: shown as the DATA that they are.

use portolan_testbed::Encap;

use super::{data, next};
use crate::tshark::capture::Capture;
use crate::tshark::samples::{BARE_OFFSET, HEADER, bare, write};
use crate::tshark::{BOTH, rows};

// A frame in full, and a bare one behind it. Expect: every field of the latter's, of the same stream as the former's chunk.
#[test]
fn a_bare_frame_is_shown_as_the_data_that_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = [7; 30];
    let frame = bare(&bytes);
    let crc = |at: usize| {
        let word = frame[at..at + 4].first_chunk().unwrap();
        format!("{:#010x}", u32::from_be_bytes(*word))
    };
    let (association, payload_crc, header_crc) = (crc(4), crc(32), crc(36));
    let mut capture = Capture::new();
    capture.frame(Encap::Udp4, &frame);
    let capture = capture.write(directory.path());
    let payload = "07".repeat(30);
    let expected = [
        ("magic", vec!["0x5042"]),
        ("version", vec!["1"]),
        ("bare.flags", vec!["0x04"]),
        ("association", vec![association.as_str()]),
        ("src_node", vec!["7"]),
        ("dst_node", vec!["65534"]),
        ("node", vec!["7", "65534"]),
        ("src_queue", vec!["1"]),
        ("dst_queue", vec!["2"]),
        ("sent_at", vec!["168496141"]),
        ("header_crc", vec![header_crc.as_str()]),
        ("header_crc.status", vec!["1"]),
        ("chunk.kind", vec!["6"]),
        ("sender_port", vec!["3"]),
        ("receiver_port", vec!["255"]),
        ("port", vec!["3", "255"]),
        ("stream_epoch", vec!["4294967280"]),
        ("stream", vec!["7:3 → 65534:255 high epoch 4294967280"]),
        ("number", vec!["77"]),
        ("offset", vec!["1000000"]),
        ("payload.length", vec!["30"]),
        ("payload", vec![payload.as_str()]),
        ("payload.crc", vec![payload_crc.as_str()]),
        ("payload.crc.status", vec!["1"]),
        ("malformed", vec![]),
        ("held", vec![]),
        ("echo", vec![]),
        ("flags", vec![]),
        ("chunk_count", vec![]),
        ("chunk.flags", vec![]),
    ];
    let info = format!("7.1→65534.2  DATA 7:3→65534:255 #77 {BARE_OFFSET} to 1000030");
    next::shows(&capture, &expected, &info);
}

// The same bytes in full, then bare, then of another engine. Expect: found to be the same bytes of one stream; what nobody knows whose it is, is another's.
#[test]
fn a_bare_frame_is_of_whom_a_frame_in_full_named() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = [7; 30];
    let mut in_full = data(77, &bytes);
    if let portolan_transport::wire::Chunk::Data { offset, .. } = &mut in_full.0 {
        *offset = BARE_OFFSET;
    }
    let mut stranger = bare(&bytes);
    stranger[4] ^= 1;
    portolan_transport::wire::reseal(&mut stranger);
    let mut earlier = HEADER;
    earlier.sent_at -= 1;
    let mut capture = Capture::new();
    for frame in [write(&earlier, &[in_full]), bare(&bytes), stranger] {
        capture.frame(Encap::Ethernet, &frame);
    }
    let capture = capture.write(directory.path());
    let names = ["portolan.sent_before_in", "portolan.stream.index"];
    for passes in BOTH {
        let rows = rows(&capture, passes, &names);
        assert_eq!(rows[1], [["1"], ["0"]]);
        assert_eq!(rows[2], [vec![], vec!["1"]]);
    }
}
