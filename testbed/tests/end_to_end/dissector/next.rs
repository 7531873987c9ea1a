//! NEXT, wire.md §4.2: what it leaves out is shown with it.

use portolan_testbed::Encap;
use portolan_transport::wire::Chunk;

use super::kinds;
use crate::tshark::capture::Capture;
use crate::tshark::samples::{HEADER, Sample, every_kind, write};
use crate::tshark::{BOTH, rows};

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
    let names = expected
        .each_ref()
        .map(|(name, _)| format!("portolan.{name}"));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for passes in BOTH {
        let rows = rows(&capture, passes, &names);
        for ((name, expected), shown) in expected.iter().zip(&rows[0]) {
            assert_eq!(shown, expected, "{name}");
        }
        let info = self::rows(&capture, passes, &["_ws.col.Info"]);
        let info = info[0][0].join(";");
        assert!(info.contains("NEXT 7:3→65534:255 #1 0 B"), "{info}");
    }
}
