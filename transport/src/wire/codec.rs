//! Chunk headers to bytes and back, wire.md §3 and §4.
//!
//! [`encode`] and [`decode`] list every kind's fields in the same order, side by side. A chunk header is `kind, flags, length`,
//! then, with the PAYLOAD flag, the payload's descriptor at the same place in every kind (so that a kind nobody knows can be
//! skipped with its payload), then the kind's fields. What a newer version appends is skipped by length. The parts that kinds are made of are
//! in `fields`.
//!
//! Short messages come by the dozen in a frame, and each header is read twice: so the plain EAGER, which all but the first of a stream are,
//! is written and read at fixed places ([`write_plain_eager`], [`plain_eager`]) before anybody asks [`encode`] or [`decode`], and
//! [`header_len`] knows without writing it how long the header of a message is. Tests hold both against the general way.

use super::chunk::{Chunk, MAX_RANGES, Payload, StreamRef};
use super::error::WireError;
use super::fields::{
    Emit, FLAG_PAYLOAD, FLAG_START, Fields, ack_flags, ack_mode, is_unasked, priority,
    priority_flag,
};
use crate::ident::PORTS;
use crate::policy::AckMode;

/// Kind, flags, length.
pub(super) const PREFIX_LEN: usize = 4;
/// Where a payload's CRC sits in its chunk header.
pub(super) const PAYLOAD_CRC_AT: usize = 8;
/// The longest chunk header this build writes: a HELLO with the longest name.
pub(super) const LONGEST: usize = 104;

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

/// An EAGER without START, as this version writes it.
pub(super) const PLAIN_EAGER_LEN: usize = PREFIX_LEN + 8 + 8 + 4 + 8;

// ---- writing ----

/// How long an EAGER's header is.
#[inline]
pub(crate) fn eager_header_len(start: Option<u32>) -> usize {
    match start {
        None => PLAIN_EAGER_LEN,
        Some(_) => PLAIN_EAGER_LEN + 4,
    }
}

/// How long the header is that [`encode`] writes.
#[inline]
pub(super) fn header_len(chunk: &Chunk<'_>) -> usize {
    match chunk {
        Chunk::Eager { start, .. } => eager_header_len(*start),
        Chunk::Rts { start, .. } => 4 + eager_header_len(*start),
        Chunk::Data { .. } => PREFIX_LEN + 8 + 8 + 4 + 4,
        other => encode(other, &mut [0; LONGEST]),
    }
}

/// [`encode`] for an EAGER without START.
#[inline(always)]
pub(super) fn write_plain_eager(
    stream: &StreamRef,
    number: u32,
    tag: u64,
    ack: AckMode,
    payload: Payload,
    h: &mut [u8; PLAIN_EAGER_LEN],
) {
    h[0] = kind::EAGER;
    h[1] = FLAG_PAYLOAD | priority_flag(stream.priority) | ack_flags(ack);
    h[2..4].copy_from_slice(&(PLAIN_EAGER_LEN as u16).to_be_bytes());
    h[4..6].copy_from_slice(&payload.len.to_be_bytes());
    h[6..8].copy_from_slice(&[0; 2]);
    h[8..12].copy_from_slice(&payload.crc.to_be_bytes());
    h[12..14].copy_from_slice(&stream.sender_port.to_be_bytes());
    h[14..16].copy_from_slice(&stream.receiver_port.to_be_bytes());
    h[16..20].copy_from_slice(&stream.epoch.to_be_bytes());
    h[20..24].copy_from_slice(&number.to_be_bytes());
    h[24..32].copy_from_slice(&tag.to_be_bytes());
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
pub(super) struct Decoded<'a> {
    /// `None` for a kind this version does not know.
    pub chunk: Option<Chunk<'a>>,
    /// The payload, known kind or not.
    pub payload: Option<Payload>,
    /// The rest of the header area.
    pub rest: &'a [u8],
}

/// An EAGER without START and with nothing wrong.
#[derive(Clone, Copy)]
pub(super) struct PlainEager {
    pub stream: StreamRef,
    pub number: u32,
    pub tag: u64,
    pub ack: AckMode,
    pub payload: Payload,
}

impl PlainEager {
    #[inline]
    pub(super) fn chunk(self) -> Chunk<'static> {
        Chunk::Eager {
            stream: self.stream,
            start: None,
            number: self.number,
            tag: self.tag,
            ack: self.ack,
            payload: self.payload,
        }
    }
}

/// The start of a plain EAGER's header as one number: kind, flags, length. Of the flags only these two are as they must be.
const PLAIN_EAGER: u32 =
    (kind::EAGER as u32) << 24 | (FLAG_PAYLOAD as u32) << 16 | PLAIN_EAGER_LEN as u32;
const PLAIN_EAGER_MASK: u32 = 0xff00_ffff | ((FLAG_PAYLOAD | FLAG_START) as u32) << 16;

/// The plain EAGER at the start of `area`, and what follows it; `None`: anything else, which [`decode`] judges.
#[inline(always)]
pub(super) fn plain_eager(area: &[u8]) -> Option<(PlainEager, &[u8])> {
    let (h, rest) = area.split_first_chunk::<PLAIN_EAGER_LEN>()?;
    let (sender_port, receiver_port) = (
        u16::from_be_bytes([h[12], h[13]]),
        u16::from_be_bytes([h[14], h[15]]),
    );
    if u32::from_be_bytes([h[0], h[1], h[2], h[3]]) & PLAIN_EAGER_MASK != PLAIN_EAGER
        || sender_port >= PORTS
        || receiver_port >= PORTS
    {
        return None;
    }
    let flags = h[1];
    let eager = PlainEager {
        stream: StreamRef {
            sender_port,
            receiver_port,
            priority: priority(flags),
            epoch: u32::from_be_bytes([h[16], h[17], h[18], h[19]]),
        },
        number: u32::from_be_bytes([h[20], h[21], h[22], h[23]]),
        tag: u64::from_be_bytes([h[24], h[25], h[26], h[27], h[28], h[29], h[30], h[31]]),
        ack: ack_mode(flags),
        payload: Payload {
            len: u16::from_be_bytes([h[4], h[5]]),
            crc: u32::from_be_bytes([h[8], h[9], h[10], h[11]]),
        },
    };
    Some((eager, rest))
}

/// Reads the chunk header at the start of `area`, of any kind.
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
                ack: ack_mode(f.flags),
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::random::any_chunk;
    use super::*;

    fn same((eager, rest): &(PlainEager, &[u8]), general: &Decoded<'_>) -> bool {
        let (chunk, payload) = (Some(eager.chunk()), Some(eager.payload));
        (chunk, payload, *rest) == (general.chunk, general.payload, general.rest)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        // Whatever is written, and that with a bit flipped. Expect: the short way finds what the general way finds, or nothing.
        #[test]
        fn the_short_way_is_the_general_way((chunk, _) in any_chunk(), flip in 0usize..8 * PLAIN_EAGER_LEN, more in 0usize..40) {
            let mut header = [0; LONGEST];
            let len = encode(&chunk, &mut header);
            prop_assert_eq!(header_len(&chunk), len);
            if let Chunk::Eager { stream, start: None, number, tag, ack, payload } = &chunk {
                let mut plain = [0xff; PLAIN_EAGER_LEN];
                write_plain_eager(stream, *number, *tag, *ack, *payload, &mut plain);
                prop_assert_eq!(&header[..len], &plain[..]);
            }
            let area = &mut header[..(len + more).min(LONGEST)];
            for _ in 0..2 {
                if let Some(short) = plain_eager(area) {
                    let general = decode(area);
                    prop_assert!(general.is_ok_and(|general| same(&short, &general)));
                }
                if let Some(byte) = area.get_mut(flip / 8) {
                    *byte ^= 1 << (flip % 8);
                }
            }
        }
    }
}
