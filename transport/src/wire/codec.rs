//! Chunk headers to bytes and back, wire.md §3 and §4.
//!
//! [`encode`] and [`decode`] list every kind's fields in the same order, side by side. A chunk header is `kind, flags, length`,
//! then, with the PAYLOAD flag, the payload's descriptor at the same place in every kind (so that a kind nobody knows can be
//! skipped with its payload), then the kind's fields. What a newer version appends is skipped by length.

use super::chunk::{
    ACK_WORDS, Chunk, Hello, MAX_RANGES, Payload, PolicyWire, Range, Received, StreamRef,
};
use super::error::WireError;
use crate::ident::PORTS;
use crate::policy::AckMode;

/// Kind, flags, length.
pub(super) const PREFIX_LEN: usize = 4;
/// Where a payload's CRC sits in its chunk header.
pub(super) const PAYLOAD_CRC_AT: usize = 8;
/// The longest chunk header this build writes: a HELLO with the longest name.
pub(super) const LONGEST: usize = 104;
/// The longest node name.
const NAME_MAX: usize = 64;

const FLAG_PAYLOAD: u8 = 1;
const FLAG_START: u8 = 2;
const FLAG_HIGH: u8 = 4;
const FLAG_ACK_NOW: u8 = 8;
const FLAG_ACK_LAZY: u8 = 16;

/// Kind numbers, wire.md §4. Numbers are never used again for something else.
mod kind {
    pub const HELLO: u8 = 1;
    pub const HELLO_ACK: u8 = 2;
    pub const RESET: u8 = 3;
    pub const EAGER: u8 = 4;
    pub const RTS: u8 = 5;
    pub const DATA: u8 = 6;
    pub const CTS: u8 = 7;
    pub const MSG_END: u8 = 8;
    pub const ACK: u8 = 9;
    pub const NACK: u8 = 10;
    pub const READY: u8 = 11;
    pub const PROBE: u8 = 12;
    pub const MSG_DROP: u8 = 13;
    pub const DROP_CONFIRM: u8 = 14;
    pub const NULL: u8 = 15;
    pub const NULL_ACK: u8 = 16;
    pub const PORT_CLOSED: u8 = 17;
    pub const CLOSE: u8 = 18;
    pub const CLOSED: u8 = 19;
    pub const REFUSED: u8 = 20;
    pub const RESUME: u8 = 21;
    pub const PATH_PROBE: u8 = 22;
    pub const PATH_ACK: u8 = 23;
}

// ---- writing ----

/// A chunk header being written; the caller's array is long enough for every kind.
struct Emit<'b> {
    to: &'b mut [u8; LONGEST],
    len: usize,
}

impl Emit<'_> {
    fn bytes(mut self, bytes: &[u8]) -> Self {
        if let Some(to) = self.to.get_mut(self.len..self.len + bytes.len()) {
            to.copy_from_slice(bytes);
            self.len += bytes.len();
        }
        self
    }
    fn u8_padded(self, value: u8) -> Self {
        self.bytes(&[value, 0, 0, 0])
    }
    fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_be_bytes())
    }
    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_be_bytes())
    }
    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    fn payload(self, payload: Payload) -> Self {
        self.to[1] |= FLAG_PAYLOAD;
        self.u16(payload.len).u16(0).u32(payload.crc)
    }

    fn stream(self, stream: &StreamRef) -> Self {
        if stream.priority != 0 {
            self.to[1] |= FLAG_HIGH;
        }
        self.u16(stream.sender_port)
            .u16(stream.receiver_port)
            .u32(stream.epoch)
    }

    fn start(self, start: Option<u32>) -> Self {
        match start {
            None => self,
            Some(start) => {
                self.to[1] |= FLAG_START;
                self.u32(start)
            }
        }
    }

    fn ack_mode(self, mode: AckMode) -> Self {
        self.to[1] |= match mode {
            AckMode::Policy => 0,
            AckMode::Immediate => FLAG_ACK_NOW,
            AckMode::Lazy => FLAG_ACK_LAZY,
        };
        self
    }

    fn received(mut self, received: &Received) -> Self {
        for word in received.words() {
            self = self.u64(*word);
        }
        self
    }

    fn hello(self, hello: &Hello<'_>) -> Self {
        let name = name_prefix(hello.name).as_bytes();
        self.u64(hello.incarnation)
            .u64(hello.echo)
            .u64(hello.cluster)
            .bytes(&[
                hello.wire_min,
                hello.wire_max,
                hello.queues,
                name.len() as u8,
            ])
            .u16(hello.max_frame)
            .u16(hello.window)
            .bytes(&[
                hello.policy.recovery,
                hello.policy.ack_rule,
                hello.policy.order,
                0,
            ])
            .bytes(name)
            .bytes(&[0; 3][..name.len().wrapping_neg() % 4])
    }

    fn ranges(mut self, ranges: &[Range]) -> Self {
        for range in ranges {
            self = self.u32(range.from).u32(range.to);
        }
        self
    }
}

/// Writes `chunk`'s header to the start of `to` and returns its length, a multiple of 4.
pub(super) fn encode(chunk: &Chunk<'_>, to: &mut [u8; LONGEST]) -> usize {
    *to.first_chunk_mut::<PREFIX_LEN>()
        .unwrap_or(&mut [0; PREFIX_LEN]) = [0; PREFIX_LEN];
    let e = Emit {
        to,
        len: PREFIX_LEN,
    };
    let (kind, e) = match chunk {
        Chunk::Hello(hello) => (kind::HELLO, e.hello(hello)),
        Chunk::HelloAck(hello) => (kind::HELLO_ACK, e.hello(hello)),
        Chunk::Reset {
            src_incarnation,
            dst_incarnation,
            reason,
            detail,
        } => (
            kind::RESET,
            e.u32(*src_incarnation)
                .u32(*dst_incarnation)
                .bytes(&[*reason, *detail, 0, 0]),
        ),
        Chunk::Eager {
            stream,
            start,
            number,
            tag,
            ack,
            payload,
        } => (
            kind::EAGER,
            e.payload(*payload)
                .stream(stream)
                .u32(*number)
                .u64(*tag)
                .ack_mode(*ack)
                .start(*start),
        ),
        Chunk::Rts {
            stream,
            start,
            number,
            tag,
            ack,
            total,
            payload,
        } => (
            kind::RTS,
            e.payload(*payload)
                .stream(stream)
                .u32(*number)
                .u64(*tag)
                .u32(*total)
                .ack_mode(*ack)
                .start(*start),
        ),
        Chunk::Data {
            stream,
            number,
            offset,
            payload,
        } => (
            kind::DATA,
            e.payload(*payload).stream(stream).u32(*number).u32(*offset),
        ),
        Chunk::Cts {
            stream,
            number,
            granted,
            missing,
            missing_len,
        } => {
            let ranges = &missing[..usize::from(*missing_len).min(MAX_RANGES)];
            (
                kind::CTS,
                e.stream(stream)
                    .u32(*number)
                    .u32(*granted)
                    .u8_padded(ranges.len() as u8)
                    .ranges(ranges),
            )
        }
        Chunk::MsgEnd { stream, number } => (kind::MSG_END, e.stream(stream).u32(*number)),
        Chunk::Ack {
            stream,
            base,
            received,
        } => (kind::ACK, e.stream(stream).u32(*base).received(received)),
        Chunk::Nack {
            stream,
            expected,
            reason,
        } => (
            kind::NACK,
            e.stream(stream).u32(*expected).u8_padded(*reason),
        ),
        Chunk::Ready { stream, number } => (kind::READY, e.stream(stream).u32(*number)),
        Chunk::Probe {
            stream,
            start,
            number,
            total,
        } => (
            kind::PROBE,
            e.stream(stream).u32(*number).u32(*total).start(*start),
        ),
        Chunk::MsgDrop {
            stream,
            number,
            reason,
        } => (
            kind::MSG_DROP,
            e.stream(stream).u32(*number).u8_padded(*reason),
        ),
        Chunk::DropConfirm { stream, number } => {
            (kind::DROP_CONFIRM, e.stream(stream).u32(*number))
        }
        Chunk::Null {
            stream,
            start,
            number,
        } => (kind::NULL, e.stream(stream).u32(*number).start(*start)),
        Chunk::NullAck {
            stream,
            number,
            delivered,
        } => (
            kind::NULL_ACK,
            e.stream(stream)
                .u32(*number)
                .u8_padded(u8::from(*delivered)),
        ),
        Chunk::PortClosed { stream, base } => (kind::PORT_CLOSED, e.stream(stream).u32(*base)),
        Chunk::Close { stream, next } => (kind::CLOSE, e.stream(stream).u32(*next)),
        Chunk::Closed { stream } => (kind::CLOSED, e.stream(stream)),
        Chunk::Refused { stream } => (kind::REFUSED, e.stream(stream)),
        Chunk::Resume { stream, base } => (kind::RESUME, e.stream(stream).u32(*base)),
        Chunk::PathProbe { size, nonce } => (kind::PATH_PROBE, e.u16(*size).u16(0).u32(*nonce)),
        Chunk::PathAck { size, nonce } => (kind::PATH_ACK, e.u16(*size).u16(0).u32(*nonce)),
    };
    let Emit { to, len } = e;
    to[0] = kind;
    to[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    len
}

/// The longest prefix of a name that fits and ends between characters.
fn name_prefix(name: &str) -> &str {
    let mut end = name.len().min(NAME_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

// ---- reading ----

/// What is left of a chunk header being read.
struct Fields<'a> {
    flags: u8,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(WireError::ChunkField)?;
        self.rest = rest;
        Ok(*head)
    }
    fn u8_padded(&mut self) -> Result<u8, WireError> {
        Ok(self.array::<4>()?[0])
    }
    fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_be_bytes(self.array()?))
    }
    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_be_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    fn stream(&mut self) -> Result<StreamRef, WireError> {
        let (sender_port, receiver_port) = (self.u16()?, self.u16()?);
        if sender_port >= PORTS || receiver_port >= PORTS {
            return Err(WireError::ChunkField);
        }
        let priority = u8::from(self.flags & FLAG_HIGH != 0);
        Ok(StreamRef {
            sender_port,
            receiver_port,
            priority,
            epoch: self.u32()?,
        })
    }

    fn start(&mut self) -> Result<Option<u32>, WireError> {
        if self.flags & FLAG_START != 0 {
            self.u32().map(Some)
        } else {
            Ok(None)
        }
    }

    fn ack_mode(&self) -> AckMode {
        if self.flags & FLAG_ACK_NOW != 0 {
            AckMode::Immediate
        } else if self.flags & FLAG_ACK_LAZY != 0 {
            AckMode::Lazy
        } else {
            AckMode::Policy
        }
    }

    /// As many words as there are.
    fn received(&mut self) -> Result<Received, WireError> {
        let mut received = Received::default();
        for word in received
            .0
            .iter_mut()
            .take(self.rest.len() / 8)
            .take(ACK_WORDS)
        {
            *word = self.u64()?;
        }
        Ok(received)
    }

    fn hello(&mut self) -> Result<Hello<'a>, WireError> {
        let (incarnation, echo, cluster) = (self.u64()?, self.u64()?, self.u64()?);
        let [wire_min, wire_max, queues, name_len] = self.array()?;
        let (max_frame, window) = (self.u16()?, self.u16()?);
        let [recovery, ack_rule, order, _reserved] = self.array()?;
        let policy = PolicyWire {
            recovery,
            ack_rule,
            order,
        };
        let name_len = usize::from(name_len);
        if name_len > NAME_MAX {
            return Err(WireError::ChunkField);
        }
        let name = self.rest.get(..name_len).ok_or(WireError::ChunkField)?;
        let name = core::str::from_utf8(name).map_err(|_| WireError::ChunkField)?;
        Ok(Hello {
            incarnation,
            echo,
            cluster,
            wire_min,
            wire_max,
            queues,
            max_frame,
            window,
            policy,
            name,
        })
    }

    fn ranges(&mut self, count: u8) -> Result<[Range; MAX_RANGES], WireError> {
        let mut ranges = [Range::default(); MAX_RANGES];
        for range in ranges
            .get_mut(..usize::from(count))
            .ok_or(WireError::ChunkField)?
        {
            *range = Range {
                from: self.u32()?,
                to: self.u32()?,
            };
            if range.from >= range.to {
                return Err(WireError::ChunkField);
            }
        }
        Ok(ranges)
    }
}

/// One chunk header and what follows it in the header area.
pub(super) struct Decoded<'a> {
    /// `None` for a kind this version does not know.
    pub chunk: Option<Chunk<'a>>,
    /// The payload, known kind or not.
    pub payload: Option<Payload>,
    /// The rest of the header area.
    pub rest: &'a [u8],
}

/// Reads the chunk header at the start of `area`.
pub(super) fn decode(area: &[u8]) -> Result<Decoded<'_>, WireError> {
    let (&[kind, flags, high, low], _) = area.split_first_chunk().ok_or(WireError::ChunkLength)?;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length < PREFIX_LEN || length % 4 != 0 || length > area.len() {
        return Err(WireError::ChunkLength);
    }
    let (header, rest) = area.split_at(length);
    let mut fields = Fields {
        flags,
        rest: &header[PREFIX_LEN..],
    };
    let payload = if flags & FLAG_PAYLOAD != 0 {
        let (len, _reserved, crc) = (fields.u16()?, fields.u16()?, fields.u32()?);
        Some(Payload { len, crc })
    } else {
        None
    };
    let chunk = decode_fields(kind, payload, fields)?;
    // A known kind has a payload if and only if the flag said so.
    if let Some(chunk) = &chunk
        && chunk.payload().is_some() != payload.is_some()
    {
        return Err(WireError::ChunkField);
    }
    Ok(Decoded {
        chunk,
        payload,
        rest,
    })
}

fn decode_fields<'a>(
    kind: u8,
    payload: Option<Payload>,
    mut f: Fields<'a>,
) -> Result<Option<Chunk<'a>>, WireError> {
    let payload = payload.unwrap_or_default();
    let chunk = match kind {
        kind::HELLO => Chunk::Hello(f.hello()?),
        kind::HELLO_ACK => Chunk::HelloAck(f.hello()?),
        kind::RESET => {
            let (src_incarnation, dst_incarnation) = (f.u32()?, f.u32()?);
            let [reason, detail, _, _] = f.array()?;
            Chunk::Reset {
                src_incarnation,
                dst_incarnation,
                reason,
                detail,
            }
        }
        kind::EAGER => {
            let (stream, number, tag) = (f.stream()?, f.u32()?, f.u64()?);
            Chunk::Eager {
                stream,
                start: f.start()?,
                number,
                tag,
                ack: f.ack_mode(),
                payload,
            }
        }
        kind::RTS => {
            let (stream, number, tag, total) = (f.stream()?, f.u32()?, f.u64()?, f.u32()?);
            if u32::from(payload.len) > total {
                return Err(WireError::ChunkField);
            }
            Chunk::Rts {
                stream,
                start: f.start()?,
                number,
                tag,
                ack: f.ack_mode(),
                total,
                payload,
            }
        }
        kind::DATA => {
            let (stream, number, offset) = (f.stream()?, f.u32()?, f.u32()?);
            if payload.len == 0 || offset.checked_add(u32::from(payload.len)).is_none() {
                return Err(WireError::ChunkField);
            }
            Chunk::Data {
                stream,
                number,
                offset,
                payload,
            }
        }
        kind::CTS => {
            let (stream, number, granted, missing_len) =
                (f.stream()?, f.u32()?, f.u32()?, f.u8_padded()?);
            Chunk::Cts {
                stream,
                number,
                granted,
                missing: f.ranges(missing_len)?,
                missing_len,
            }
        }
        kind::MSG_END => Chunk::MsgEnd {
            stream: f.stream()?,
            number: f.u32()?,
        },
        kind::ACK => Chunk::Ack {
            stream: f.stream()?,
            base: f.u32()?,
            received: f.received()?,
        },
        kind::NACK => Chunk::Nack {
            stream: f.stream()?,
            expected: f.u32()?,
            reason: f.u8_padded()?,
        },
        kind::READY => Chunk::Ready {
            stream: f.stream()?,
            number: f.u32()?,
        },
        kind::PROBE => {
            let (stream, number, total) = (f.stream()?, f.u32()?, f.u32()?);
            Chunk::Probe {
                stream,
                start: f.start()?,
                number,
                total,
            }
        }
        kind::MSG_DROP => Chunk::MsgDrop {
            stream: f.stream()?,
            number: f.u32()?,
            reason: f.u8_padded()?,
        },
        kind::DROP_CONFIRM => Chunk::DropConfirm {
            stream: f.stream()?,
            number: f.u32()?,
        },
        kind::NULL => {
            let (stream, number) = (f.stream()?, f.u32()?);
            Chunk::Null {
                stream,
                start: f.start()?,
                number,
            }
        }
        kind::NULL_ACK => {
            let (stream, number, delivered) = (f.stream()?, f.u32()?, f.u8_padded()?);
            if delivered > 1 {
                return Err(WireError::ChunkField);
            }
            Chunk::NullAck {
                stream,
                number,
                delivered: delivered == 1,
            }
        }
        kind::PORT_CLOSED => Chunk::PortClosed {
            stream: f.stream()?,
            base: f.u32()?,
        },
        kind::CLOSE => Chunk::Close {
            stream: f.stream()?,
            next: f.u32()?,
        },
        kind::CLOSED => Chunk::Closed {
            stream: f.stream()?,
        },
        kind::REFUSED => Chunk::Refused {
            stream: f.stream()?,
        },
        kind::RESUME => Chunk::Resume {
            stream: f.stream()?,
            base: f.u32()?,
        },
        kind::PATH_PROBE => {
            let (size, _reserved, nonce) = (f.u16()?, f.u16()?, f.u32()?);
            Chunk::PathProbe { size, nonce }
        }
        kind::PATH_ACK => {
            let (size, _reserved, nonce) = (f.u16()?, f.u16()?, f.u32()?);
            Chunk::PathAck { size, nonce }
        }
        _ => return Ok(None),
    };
    Ok(Some(chunk))
}
