//! The chunk kinds, wire.md §3.

use crate::policy::AckMode;

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

/// The policy fields that matter to the other end, wire.md §4.1. 0 and unknown values fit nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PolicyWire {
    /// 1 go-back-n, 2 whole message, 3 selective.
    pub recovery: u8,
    /// 1 cumulative, 2 exact.
    pub ack_rule: u8,
    /// 1 by number, 2 by arrival.
    pub order: u8,
}

/// Most words of an acknowledgement's bitmap.
pub const ACK_WORDS: usize = 8;

/// Numbers received from an acknowledgement's base on: bit i stands for `base + i`. Base itself may have been received, when it is not
/// whole yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Received(pub [u64; ACK_WORDS]);

impl Received {
    /// Whether number `base + i` was received.
    pub fn has(&self, i: usize) -> bool {
        self.0
            .get(i / 64)
            .is_some_and(|word| word >> (i % 64) & 1 != 0)
    }

    /// Marks number `base + i`; beyond the bitmap it is left out.
    pub fn set(&mut self, i: usize) {
        if let Some(word) = self.0.get_mut(i / 64) {
            *word |= 1 << (i % 64);
        }
    }

    /// Takes a mark back.
    pub fn clear(&mut self, i: usize) {
        if let Some(word) = self.0.get_mut(i / 64) {
            *word &= !(1 << (i % 64));
        }
    }

    /// Moves every mark up by one; the highest is forgotten.
    pub fn shift(&mut self) {
        let mut carry = 0;
        for word in &mut self.0 {
            (*word, carry) = (*word << 1 | carry, *word >> 63);
        }
    }

    /// Words up to the last that is not empty: what travels.
    pub fn words(&self) -> &[u64] {
        let len = ACK_WORDS - self.0.iter().rev().take_while(|word| **word == 0).count();
        &self.0[..len]
    }

    /// One past the highest `i` that is marked.
    pub fn end(&self) -> usize {
        match self.words() {
            [] => 0,
            [full @ .., last] => full.len() * 64 + 64 - last.leading_zeros() as usize,
        }
    }
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
    /// Messages per stream the sender accepts beyond the last one committed.
    pub window: u16,
    /// What both ends must know of each other's policy.
    pub policy: PolicyWire,
    /// First bytes of a long message that the sender takes unasked, in units of 256.
    pub unasked: u8,
    /// What the sender reads beyond the first version 1; bits of [`features`].
    pub features: u32,
    /// The node's name, at most 64 bytes of UTF-8.
    pub name: &'a str,
}

/// Bits of [`Hello::features`], wire.md §4.1.
pub mod features {
    /// NEXT: an EAGER without what it has in common with the one in front of it.
    pub const NEXT: u32 = 1;
    /// RUN: several EAGERs of one length. Says nothing without [`NEXT`].
    pub const RUN: u32 = 2;
    /// Bare frames, wire.md §2.1.
    pub const BARE: u32 = 4;
}

/// How messages in a row are written: as whoever receives them can read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rows {
    /// Each as EAGER.
    #[default]
    InFull,
    /// As NEXT.
    Next,
    /// As NEXT, and as RUN where that is shorter.
    Run,
}

impl Rows {
    /// The shortest for a peer with these bits of [`features`]. RUN by itself is nobody's: who writes it writes NEXT for what has a tag of its own.
    pub fn of(bits: u32) -> Self {
        match (bits & features::NEXT != 0, bits & features::RUN != 0) {
            (false, _) => Self::InFull,
            (true, false) => Self::Next,
            (true, true) => Self::Run,
        }
    }
}

/// Most byte ranges `[from, to)` one CTS asks for again.
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
        /// The offending frame's source incarnation.
        src_incarnation: u32,
        /// The offending frame's destination incarnation.
        dst_incarnation: u32,
        /// What did not fit.
        reason: u8,
        /// Which part of it: for a policy the field.
        detail: u8,
    },
    /// → A whole message.
    Eager {
        /// Its stream.
        stream: StreamRef,
        /// Present until the epoch's first acknowledgement: the oldest number not settled, where a receiver without a record
        /// opens the stream.
        start: Option<u32>,
        /// The message.
        number: u32,
        /// The sender's tag.
        tag: u64,
        /// The sender's wish about the acknowledgement.
        ack: AckMode,
        /// The whole message.
        payload: Payload,
    },
    /// → Request to send a long message, carrying its first bytes (perhaps none).
    Rts {
        /// Its stream.
        stream: StreamRef,
        /// As in EAGER.
        start: Option<u32>,
        /// The message.
        number: u32,
        /// The sender's tag.
        tag: u64,
        /// The sender's wish about the acknowledgement.
        ack: AckMode,
        /// The message's length in bytes.
        total: u32,
        /// More of it follows unasked, up to what the receiver's HELLO announced.
        unasked: bool,
        /// Bytes from offset 0; never more than `total`.
        payload: Payload,
    },
    /// → Bytes of a long message.
    Data {
        /// Its stream.
        stream: StreamRef,
        /// The message.
        number: u32,
        /// Where in the message; `offset + payload.len` never overflows.
        offset: u32,
        /// Nobody asked for the bytes: they are charged to the credit.
        unasked: bool,
        /// The bytes, at least one.
        payload: Payload,
    },
    /// ← Bytes below `granted` may be sent; `missing` ones again.
    Cts {
        /// Its stream.
        stream: StreamRef,
        /// The message.
        number: u32,
        /// First byte not granted yet.
        granted: u32,
        /// What to send again; each range holds at least one byte.
        missing: [Range; MAX_RANGES],
        /// How many of `missing` count.
        missing_len: u8,
    },
    /// ← A long message is committed.
    MsgEnd {
        /// Its stream.
        stream: StreamRef,
        /// The message.
        number: u32,
    },
    /// ← Every number before `base` is committed (with exact acknowledgement: the one before it).
    Ack {
        /// Its stream.
        stream: StreamRef,
        /// The next number to commit.
        base: u32,
        /// What was received from there on.
        received: Received,
    },
    /// ← `expected` did not come (reason 1), had no buffer (2), or was corrupt (3).
    Nack {
        /// Its stream.
        stream: StreamRef,
        /// The number to send again.
        expected: u32,
        /// Why, as above.
        reason: u8,
    },
    /// ← A buffer for `number` appeared.
    Ready {
        /// Its stream.
        stream: StreamRef,
        /// The message.
        number: u32,
    },
    /// → Asks for the state of the stream; carries no payload.
    Probe {
        /// Its stream.
        stream: StreamRef,
        /// As in EAGER.
        start: Option<u32>,
        /// The message asked about.
        number: u32,
        /// Its length in bytes.
        total: u32,
    },
    /// ← `number` is refused for good and its number committed.
    MsgDrop {
        /// Its stream.
        stream: StreamRef,
        /// The message.
        number: u32,
        /// Why; a [`crate::host::Reason`].
        reason: u8,
    },
    /// → Confirms MSGDROP up to `number`.
    DropConfirm {
        /// Its stream.
        stream: StreamRef,
        /// The last message confirmed.
        number: u32,
    },
    /// → The sender gave `number` up: commit the number without a delivery unless it is committed already.
    Null {
        /// Its stream.
        stream: StreamRef,
        /// As in EAGER.
        start: Option<u32>,
        /// The message.
        number: u32,
    },
    /// ← What became of a NULLed number: `delivered` or not.
    NullAck {
        /// Its stream.
        stream: StreamRef,
        /// The message.
        number: u32,
        /// Whether it had been delivered.
        delivered: bool,
    },
    /// ← The port is closed: numbers before `base` were delivered, none after.
    PortClosed {
        /// Its stream.
        stream: StreamRef,
        /// The first number not delivered.
        base: u32,
    },
    /// → The stream ends; numbers before `next` are settled.
    Close {
        /// Its stream.
        stream: StreamRef,
        /// The number after the last.
        next: u32,
    },
    /// ← The stream is forgotten.
    Closed {
        /// Its stream.
        stream: StreamRef,
    },
    /// ← No such stream, or a START below the floor: nothing of it was delivered under this epoch beyond what was acknowledged.
    Refused {
        /// Its stream.
        stream: StreamRef,
    },
    /// ← After a takeover: every number before `base` is committed, everything volatile is void.
    Resume {
        /// Its stream.
        stream: StreamRef,
        /// The next number to commit.
        base: u32,
    },
    /// Padded to `size` bytes to prove the path carries them.
    PathProbe {
        /// Bytes of the whole frame; the writer pads to it, the parser insists on it.
        size: u16,
        /// Echoed in PATH-ACK.
        nonce: u32,
    },
    /// A path probe of this size arrived.
    PathAck {
        /// The probe's size.
        size: u16,
        /// The probe's nonce.
        nonce: u32,
    },
}

impl Chunk<'_> {
    /// The payload that travels with the chunk, if its kind has one.
    pub fn payload(&self) -> Option<Payload> {
        match self {
            Chunk::Eager { payload, .. }
            | Chunk::Rts { payload, .. }
            | Chunk::Data { payload, .. } => Some(*payload),
            _ => None,
        }
    }
}
