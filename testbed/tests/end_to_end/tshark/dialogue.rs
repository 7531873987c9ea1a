//! A conversation of two nodes, frame by frame, and the links that must be found in it: what a session seldom shows.

use portolan_transport::policy::AckMode;
use portolan_transport::wire::chunk::{Hello, PolicyWire, Received};
use portolan_transport::wire::{Chunk, FrameHeader, StreamRef};

use super::samples::{Sample, payload, write};

/// The fields that say what was found of a frame, in the order of [`Turn::found`].
pub const FOUND: [&str; 6] = [
    "portolan.sent_before_in",
    "portolan.asked_before_in",
    "portolan.answers",
    "portolan.answered_in",
    "portolan.committed_in",
    "portolan.duplicate_of",
];

/// A frame, and what must be found of it.
pub struct Turn {
    pub frame: Vec<u8>,
    pub found: [Vec<u32>; 6],
}

const STREAM: StreamRef = StreamRef {
    sender_port: 1,
    receiver_port: 2,
    priority: 0,
    epoch: 7,
};

/// A frame from node 1 to node 2, or back, written at this time of its sender and knowing of that time of the other's.
fn frame(from: u16, sent_at: u32, echo: u32, sample: &Sample) -> Vec<u8> {
    let header = FrameHeader {
        src_node: from,
        dst_node: 3 - from,
        src_incarnation: u32::from(from) + 10,
        dst_incarnation: u32::from(3 - from) + 10,
        sent_at,
        echo,
        ..FrameHeader::default()
    };
    write(&header, std::slice::from_ref(sample))
}

fn bare(chunk: Chunk<'static>) -> Sample {
    (chunk, vec![])
}

fn hello(from: u16, ack_rule: u8) -> Hello<'static> {
    Hello {
        incarnation: 0x5555_0000_0000_000a + u64::from(from),
        echo: 0x5555_0000_0000_000d - u64::from(from),
        cluster: 1,
        wire_min: 1,
        wire_max: 1,
        queues: 1,
        max_frame: 1472,
        window: 64,
        policy: PolicyWire {
            recovery: 3,
            ack_rule,
            order: 1,
        },
        unasked: 17,
        features: 1,
        name: "n",
    }
}

fn reset() -> Sample {
    bare(Chunk::Reset {
        src_incarnation: 11,
        dst_incarnation: 12,
        reason: 1,
        detail: 0,
    })
}

fn eager(number: u32) -> Sample {
    let bytes = vec![1; 10];
    let chunk = Chunk::Eager {
        stream: STREAM,
        start: None,
        number,
        tag: 0,
        ack: AckMode::Policy,
        payload: payload(&bytes),
    };
    (chunk, bytes)
}

fn rts(number: u32, total: u32, len: usize) -> Sample {
    let bytes = vec![2; len];
    let chunk = Chunk::Rts {
        stream: STREAM,
        start: None,
        number,
        tag: 0,
        ack: AckMode::Policy,
        total,
        unasked: false,
        payload: payload(&bytes),
    };
    (chunk, bytes)
}

fn data(number: u32, offset: u32, len: usize) -> Sample {
    let bytes = vec![3; len];
    let chunk = Chunk::Data {
        stream: STREAM,
        number,
        offset,
        unasked: false,
        payload: payload(&bytes),
    };
    (chunk, bytes)
}

fn ack(base: u32) -> Sample {
    bare(Chunk::Ack {
        stream: STREAM,
        base,
        received: Received::default(),
    })
}

fn turn(frame: Vec<u8>, found: [&[u32]; 6]) -> Turn {
    Turn {
        frame,
        found: found.map(<[u32]>::to_vec),
    }
}

/// The conversation. Times wrap within it, and numbers do.
pub fn dialogue() -> Vec<Turn> {
    let t = |time: u32| 0xffff_ffe0_u32.wrapping_add(time);
    let stream = STREAM;
    let last = u32::MAX;
    let closed = || bare(Chunk::Refused { stream });
    let again = frame(2, t(8), t(40), &ack(0));
    vec![
        // 1: HELLO, and once more; a RESET that knows of the first, an answer that knows of the second.
        turn(
            frame(1, t(10), 0, &bare(Chunk::Hello(hello(1, 1)))),
            [&[], &[], &[], &[3], &[], &[]],
        ),
        turn(
            frame(1, t(20), 0, &bare(Chunk::Hello(hello(1, 1)))),
            [&[], &[1], &[], &[4], &[], &[]],
        ),
        turn(
            frame(2, t(1), t(10), &reset()),
            [&[], &[], &[1], &[], &[], &[]],
        ),
        turn(
            frame(2, t(2), t(20), &bare(Chunk::HelloAck(hello(2, 1)))),
            [&[], &[], &[2], &[], &[], &[]],
        ),
        // 5: a message, and once more. The acknowledgement of the first commits it; the second has one of its own.
        turn(
            frame(1, t(30), t(2), &eager(last)),
            [&[], &[], &[], &[7], &[7], &[]],
        ),
        turn(
            frame(1, t(40), t(2), &eager(last)),
            [&[5], &[], &[], &[8], &[], &[]],
        ),
        turn(
            frame(2, t(7), t(30), &ack(0)),
            [&[], &[], &[5], &[], &[], &[]],
        ),
        turn(again.clone(), [&[], &[], &[6], &[], &[], &[]]),
        // 9: that very frame again answers nothing.
        turn(again, [&[], &[], &[], &[], &[], &[8]]),
        // 10: two messages, and an engine that has just taken over: it has heard nothing, and knows what was committed.
        turn(
            frame(1, t(50), t(8), &eager(0)),
            [&[], &[], &[], &[12], &[12], &[]],
        ),
        turn(
            frame(1, t(51), t(8), &eager(1)),
            [&[], &[], &[], &[13], &[], &[]],
        ),
        turn(
            frame(2, t(12), 0, &bare(Chunk::Resume { stream, base: 1 })),
            [&[], &[], &[10], &[], &[], &[]],
        ),
        turn(
            frame(2, t(13), t(51), &closed()),
            [&[], &[], &[11], &[], &[], &[]],
        ),
        // 14: a long message whose pieces overlap: with its request, with each other, and not at all.
        turn(
            frame(1, t(60), t(13), &rts(2, 20_000, 100)),
            [&[], &[], &[], &[20], &[20], &[]],
        ),
        turn(
            frame(1, t(61), t(13), &data(2, 100, 4000)),
            [&[], &[], &[], &[], &[], &[]],
        ),
        turn(
            frame(1, t(62), t(13), &data(2, 4099, 10)),
            [&[15], &[], &[], &[], &[], &[]],
        ),
        turn(
            frame(1, t(63), t(13), &data(2, 4109, 10)),
            [&[], &[], &[], &[], &[], &[]],
        ),
        turn(
            frame(1, t(64), t(13), &data(2, 0, 8000)),
            [&[17], &[], &[], &[], &[], &[]],
        ),
        turn(
            frame(1, t(65), t(13), &data(2, 8000, 1)),
            [&[], &[], &[], &[20], &[], &[]],
        ),
        turn(
            frame(2, t(20), t(65), &bare(Chunk::MsgEnd { stream, number: 2 })),
            [&[], &[], &[14, 19], &[], &[], &[]],
        ),
        // 21: from now on each acknowledgement is of one message.
        turn(
            frame(2, t(21), t(65), &bare(Chunk::HelloAck(hello(2, 2)))),
            [&[], &[], &[], &[], &[], &[]],
        ),
        turn(
            frame(1, t(70), t(21), &eager(3)),
            [&[], &[], &[], &[25], &[25], &[]],
        ),
        turn(
            frame(1, t(71), t(21), &eager(4)),
            [&[], &[], &[], &[24], &[24], &[]],
        ),
        turn(
            frame(2, t(24), t(71), &ack(5)),
            [&[], &[], &[23], &[], &[], &[]],
        ),
        turn(
            frame(2, t(25), t(71), &ack(4)),
            [&[], &[], &[22], &[], &[], &[]],
        ),
    ]
}
