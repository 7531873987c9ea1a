//! Chunk headers to bytes and back, wire.md §3 and §4.
//!
//! [`encode`] and [`decode`] list every kind's fields in the same order, side by side. A chunk header is `kind, flags, length`,
//! then, with the PAYLOAD flag, the payload's descriptor at the same place in every kind (so that a kind nobody knows can be
//! skipped with its payload), then the kind's fields. What a newer version appends is skipped by length. The parts that kinds are made of are
//! in `fields`, and the kinds that come by the dozen are in `plain`.

use super::chunk::{Chunk, MAX_RANGES, Payload};
use super::error::WireError;
use super::fields::{Emit, FLAG_PAYLOAD, FLAG_TAG, Fields, ack_mode, is_unasked};
use super::plain::{Before, DATA_LEN, PLAIN_ACK_LEN, eager_header_len, plain, run_of};

/// Kind, flags, length.
pub(super) const PREFIX_LEN: usize = 4;
/// Where a payload's CRC sits in its chunk header.
pub(super) const PAYLOAD_CRC_AT: usize = 8;
/// The longest chunk header this build writes: a HELLO with the longest name.
pub(super) const LONGEST: usize = 108;

/// Kind numbers, wire.md §4. Numbers are never used again for something else.
pub(super) mod kind {
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
    pub const NEXT: u8 = 24;
    pub const RUN: u8 = 25;
}

// ---- writing ----

/// How long the header is that [`encode`] writes.
#[inline]
pub(super) fn header_len(chunk: &Chunk<'_>) -> usize {
    match chunk {
        Chunk::Eager { start, .. } => eager_header_len(*start),
        Chunk::Rts { start, .. } => 4 + eager_header_len(*start),
        Chunk::Data { .. } => DATA_LEN,
        Chunk::Ack { received, .. } => PLAIN_ACK_LEN + 8 * received.words().len(),
        other => encode(other, &mut [0; LONGEST]),
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
            unasked,
            payload,
        } => (
            kind::RTS,
            e.payload(*payload)
                .stream(stream)
                .u32(*number)
                .u64(*tag)
                .u32(*total)
                .ack_mode(*ack)
                .unasked(*unasked)
                .start(*start),
        ),
        Chunk::Data {
            stream,
            number,
            offset,
            unasked,
            payload,
        } => (
            kind::DATA,
            e.payload(*payload)
                .stream(stream)
                .u32(*number)
                .u32(*offset)
                .unasked(*unasked),
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

// ---- reading ----

/// One chunk header and what follows it in the header area.
#[cfg_attr(test, derive(PartialEq))]
pub(super) struct Decoded<'a> {
    /// `None` for a kind this version does not know.
    pub chunk: Option<Chunk<'a>>,
    /// The payload, known kind or not.
    pub payload: Option<Payload>,
    /// The messages that the payload is of, if the chunk is RUN; else 0. `chunk` is the first of them with the payload of all.
    pub run: u16,
    /// The rest of the header area.
    pub rest: &'a [u8],
}

/// Reads the chunk header at the start of `area`, of any kind, behind the EAGER `before`, if there is one directly in front of it.
pub(super) fn decode<'a>(
    area: &'a [u8],
    before: Option<&Before>,
) -> Result<Decoded<'a>, WireError> {
    match plain(area) {
        Some(chunk) => Ok(chunk),
        None => decode_any(area, before),
    }
}

/// [`decode`] by kind, whatever the chunk: what the ways of `plain` are held against.
#[inline(never)]
pub(super) fn decode_any<'a>(
    area: &'a [u8],
    before: Option<&Before>,
) -> Result<Decoded<'a>, WireError> {
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
    let (payload, count) = if flags & FLAG_PAYLOAD != 0 {
        let (len, count, crc) = (fields.u16()?, fields.u16()?, fields.u32()?);
        (Some(Payload { len, crc }), count)
    } else {
        (None, 0)
    };
    let run = if kind == kind::RUN { count } else { 0 };
    let chunk = decode_fields(kind, payload, run, fields, before)?;
    // A known kind has a payload if and only if the flag said so.
    if let Some(chunk) = &chunk
        && chunk.payload().is_some() != payload.is_some()
    {
        return Err(WireError::ChunkField);
    }
    Ok(Decoded {
        chunk,
        payload,
        run,
        rest,
    })
}

fn decode_fields<'a>(
    kind: u8,
    payload: Option<Payload>,
    run: u16,
    mut f: Fields<'a>,
    before: Option<&Before>,
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
                ack: ack_mode(f.flags),
                payload,
            }
        }
        kind::NEXT => {
            let before = before.ok_or(WireError::ChunkField)?;
            let tag = match f.flags & FLAG_TAG {
                0 => before.tag,
                _ => f.u64()?,
            };
            before.next(tag, payload).chunk()
        }
        kind::RUN => {
            let before = before.ok_or(WireError::ChunkField)?;
            run_of(payload, run).ok_or(WireError::ChunkField)?;
            before.next(before.tag, payload).chunk()
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
                ack: ack_mode(f.flags),
                total,
                unasked: is_unasked(f.flags),
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
                unasked: is_unasked(f.flags),
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
