//! What things cost in memory: printed by `cargo test sizes -- --nocapture`, and bounded.

use core::mem::size_of;
use std::println;

use super::*;
use crate::endpoint::long_message::LongMessage;
use crate::endpoint::receive_stream::Incoming;
use crate::endpoint::send_stream::Message;

#[test]
fn sizes() {
    let rows = [
        ("endpoint", size_of::<Endpoint>(), 3_072),
        ("peer, while it is not idle", size_of::<PeerEntry>(), 912),
        (
            "sending stream, while it is open",
            size_of::<SendStream>(),
            448,
        ),
        (
            "receiving stream, while it is open",
            size_of::<ReceiveStream>(),
            320,
        ),
        ("message unsettled", size_of::<Message>(), 72),
        ("message accepted", size_of::<Incoming>(), 64),
        ("long message being placed", size_of::<LongMessage>(), 448),
        ("node configured", size_of::<(NodeId, Node)>(), 8),
    ];
    for (what, bytes, most) in rows {
        println!("{bytes:5} bytes: {what}");
        assert!(bytes <= most, "{what}: {bytes}, at most {most}");
    }
}
