//! The chunk kinds, wire.md §3.

/// Names a stream in a chunk; the direction is the chunk kind's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRef {
    /// The port that sends messages on this stream.
    pub sender_port: u16,
    /// The port that receives them.
    pub receiver_port: u16,
    /// 0 low, 1 high.
    pub priority: u8,
    /// The stream's epoch.
    pub epoch: u32,
}

/// A payload's place in the frame's payload area, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Payload {
    /// Bytes.
    pub len: u16,
    /// CRC32C of the bytes.
    pub crc: u32,
}

/// What a node says of itself in HELLO and HELLO-ACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    /// The sender's incarnation in full.
    pub incarnation: u64,
    /// The receiver's incarnation as the sender knows it; 0 if unknown.
    pub echo: u64,
    /// Hash of the cluster's name.
    pub cluster: u64,
    /// Lowest wire version spoken.
    pub wire_min: u8,
    /// Highest wire version spoken.
    pub wire_max: u8,
    /// Engines of the sender's node.
    pub queues: u8,
    /// Longest frame (transport bytes, without encapsulation) the sender can receive.
    pub max_frame: u16,
    /// Fingerprint of the policy fields that both sides must share.
    pub policy: u32,
    /// The node's name, at most 64 bytes of UTF-8.
    pub name: &'a str,
}

/// Byte ranges `[from, to)` of a long message that the receiver misses; at most [`MAX_RANGES`].
pub const MAX_RANGES: usize = 8;

/// A range of bytes, half open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Range {
    /// First byte.
    pub from: u32,
    /// One past the last byte.
    pub to: u32,
}

/// One chunk. Kinds marked → go from a stream's sender to its receiver, ← the other way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// Introduces an engine.
    Hello(Hello<'a>),
    /// Answers HELLO.
    HelloAck(Hello<'a>),
    /// Incarnations did not match, or versions, clusters or policies do not fit; echoes what was received.
    Reset {
        src_incarnation: u32,
        dst_incarnation: u32,
        reason: u8,
    },
    /// → A whole message. `start`: present until the epoch's first acknowledgement: the oldest number not settled, where a receiver
    /// without a record opens the stream.
    Eager {
        stream: StreamRef,
        start: Option<u32>,
        number: u32,
        tag: u64,
        payload: Payload,
    },
    /// → Request to send a long message, carrying its first bytes (perhaps none).
    Rts {
        stream: StreamRef,
        start: Option<u32>,
        number: u32,
        tag: u64,
        total: u32,
        payload: Payload,
    },
    /// → Bytes of a long message.
    Data {
        stream: StreamRef,
        number: u32,
        offset: u32,
        payload: Payload,
    },
    /// ← Bytes below `granted` may be sent; `missing` ones again.
    Cts {
        stream: StreamRef,
        number: u32,
        granted: u32,
        missing: [Range; MAX_RANGES],
        missing_len: u8,
    },
    /// ← A long message is committed.
    MsgEnd { stream: StreamRef, number: u32 },
    /// ← Every number before `base` is committed.
    Ack { stream: StreamRef, base: u32 },
    /// ← `expected` did not come (reason 1), had no buffer (2), or was corrupt (3).
    Nack {
        stream: StreamRef,
        expected: u32,
        reason: u8,
    },
    /// ← A buffer for `number` appeared.
    Ready { stream: StreamRef, number: u32 },
    /// → Asks for the state of the stream; carries no payload. `start` as in EAGER.
    Probe {
        stream: StreamRef,
        start: Option<u32>,
        number: u32,
        total: u32,
    },
    /// ← `number` is refused for good and its number committed.
    MsgDrop {
        stream: StreamRef,
        number: u32,
        reason: u8,
    },
    /// → Confirms MSGDROP up to `number`.
    DropConfirm { stream: StreamRef, number: u32 },
    /// → The sender gave `number` up: commit the number without a delivery unless it is committed already.
    Null {
        stream: StreamRef,
        start: Option<u32>,
        number: u32,
    },
    /// ← What became of a NULLed number: `delivered` or not.
    NullAck {
        stream: StreamRef,
        number: u32,
        delivered: bool,
    },
    /// ← The port is closed: numbers before `base` were delivered, none after.
    PortClosed { stream: StreamRef, base: u32 },
    /// → The stream ends; numbers before `next` are settled.
    Close { stream: StreamRef, next: u32 },
    /// ← The stream is forgotten.
    Closed { stream: StreamRef },
    /// ← No such stream, or a START below the floor: nothing of it was delivered under this epoch beyond what was acknowledged.
    Refused { stream: StreamRef },
    /// ← After a takeover: every number before `base` is committed, everything volatile is void.
    Resume { stream: StreamRef, base: u32 },
    /// Padded to `size` bytes to prove the path carries them.
    PathProbe { size: u16, nonce: u32 },
    /// A path probe of this size arrived.
    PathAck { size: u16, nonce: u32 },
}
