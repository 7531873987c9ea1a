//! The chunks that most frames consist of, at fixed places.
//!
//! Problem: short messages come by the dozen in a frame, and each header is read twice; long ones are nothing but DATA; and in front of
//! nearly every answer is an ACK. [`encode`](super::codec::encode) and [`decode`](super::codec::decode) know every kind, which costs more than
//! the kind at hand.
//!
//! Idea: an EAGER without START, which all but the first of a stream are, and DATA are written and read in one piece, and an ACK of nothing but
//! a base is read so, and written so where its place is known ([`super::lone`]). An EAGER directly behind the one with the number before it is written as NEXT, without what both have in common, if the
//! peer reads that, and several of one length as RUN, which is one header and one checksum for all. Anything else is for the general way, also what only looks alike. A test holds each against it.

use super::chunk::{Chunk, Payload, Received, StreamRef};
use super::codec::{Decoded, PREFIX_LEN, kind};
use super::fields::{
    FLAG_PAYLOAD, FLAG_START, FLAG_TAG, ack_flags, ack_mode, is_unasked, priority, priority_flag,
    unasked_flag,
};
use super::writer::MAX_CHUNKS;
use crate::ident::PORTS;
use crate::policy::AckMode;

/// An EAGER without START, as this version writes it.
pub(super) const PLAIN_EAGER_LEN: usize = PREFIX_LEN + 8 + 8 + 4 + 8;
/// NEXT with the tag of the message before it.
const NEXT_LEN: usize = PREFIX_LEN + 8;
/// NEXT with a tag of its own.
const NEXT_TAG_LEN: usize = NEXT_LEN + 8;
/// RUN, however many messages it stands for.
const RUN_LEN: usize = PREFIX_LEN + 8;
/// Most messages in a RUN that this version writes, so that a frame's chunks stand for no more than [`RUNS_MAX`].
pub(super) const RUN_MAX: u16 = 32;
/// Most messages in all RUNs of a frame: what a frame costs its reader is bounded, however short they are.
pub(super) const RUNS_MAX: usize = 1024;
const _: () = assert!(MAX_CHUNKS * RUN_MAX as usize <= RUNS_MAX);
/// DATA, as this version writes it.
pub(crate) const DATA_LEN: usize = PREFIX_LEN + 8 + 8 + 4 + 4;
/// An ACK that names no number beyond its base, as this version writes it.
pub(super) const PLAIN_ACK_LEN: usize = PREFIX_LEN + 8 + 4;

// ---- writing ----

/// What NEXT takes from the EAGER directly in front of it, or counts on from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before {
    pub stream: StreamRef,
    pub number: u32,
    pub tag: u64,
    pub ack: AckMode,
}

impl Before {
    /// One of which only matters that it is there.
    pub(super) const ANY: Self = Self {
        stream: StreamRef {
            sender_port: 0,
            receiver_port: 0,
            priority: 0,
            epoch: 0,
        },
        number: 0,
        tag: 0,
        ack: AckMode::Policy,
    };

    /// Of this chunk, if it is one.
    #[inline]
    pub(super) fn of(chunk: &Chunk<'_>) -> Option<Self> {
        match *chunk {
            Chunk::Eager {
                stream,
                number,
                tag,
                ack,
                ..
            } => Some(Self {
                stream,
                number,
                tag,
                ack,
            }),
            _ => None,
        }
    }

    /// The message behind it.
    #[inline(always)]
    pub(super) fn next(&self, tag: u64, payload: Payload) -> PlainEager {
        PlainEager {
            before: Self {
                number: self.number.wrapping_add(1),
                tag,
                ..*self
            },
            payload,
        }
    }
}

/// How an EAGER without START is written in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// By itself.
    Eager,
    /// As NEXT with a tag.
    NextTag,
    /// As NEXT.
    Next,
    /// As a RUN, of which it is the first.
    Run,
    /// As one more of the RUN that is the chunk in front of it.
    More,
}

impl Form {
    /// The shortest behind `before`.
    #[inline(always)]
    pub(super) fn behind(
        before: &Before,
        stream: &StreamRef,
        number: u32,
        tag: u64,
        ack: AckMode,
    ) -> Self {
        let number_before = number.wrapping_sub(1);
        if before.number != number_before || before.stream != *stream || before.ack != ack {
            Self::Eager
        } else if before.tag != tag {
            Self::NextTag
        } else {
            Self::Next
        }
    }

    /// Whether the message goes into a RUN.
    #[inline(always)]
    pub(crate) fn is_of_run(self) -> bool {
        matches!(self, Self::Run | Self::More)
    }

    /// How long its header is.
    #[inline(always)]
    pub(crate) fn header_len(self) -> usize {
        match self {
            Self::Eager => PLAIN_EAGER_LEN,
            Self::NextTag => NEXT_TAG_LEN,
            Self::Next => NEXT_LEN,
            Self::Run => RUN_LEN,
            Self::More => 0,
        }
    }
}

/// NEXT.
#[inline(always)]
pub(super) fn write_next(payload: Payload, h: &mut [u8; NEXT_LEN]) {
    h[..4].copy_from_slice(&PLAIN_NEXT.to_be_bytes());
    h[4..6].copy_from_slice(&payload.len.to_be_bytes());
    h[6..8].copy_from_slice(&[0; 2]);
    h[8..12].copy_from_slice(&payload.crc.to_be_bytes());
}

/// RUN of one message.
#[inline(always)]
pub(super) fn write_run(payload: Payload, h: &mut [u8; RUN_LEN]) {
    h[..4].copy_from_slice(&PLAIN_RUN.to_be_bytes());
    h[4..6].copy_from_slice(&payload.len.to_be_bytes());
    h[6..8].copy_from_slice(&1u16.to_be_bytes());
    h[8..12].copy_from_slice(&payload.crc.to_be_bytes());
}

/// The same RUN with so many messages, whose payloads are `len` bytes together.
#[inline(always)]
pub(super) fn lengthen_run(len: u16, count: u16, h: &mut [u8; RUN_LEN]) {
    h[4..6].copy_from_slice(&len.to_be_bytes());
    h[6..8].copy_from_slice(&count.to_be_bytes());
}

/// NEXT with a tag.
#[inline(always)]
pub(super) fn write_next_tag(tag: u64, payload: Payload, h: &mut [u8; NEXT_TAG_LEN]) {
    h[..4].copy_from_slice(&PLAIN_NEXT_TAG.to_be_bytes());
    h[4..6].copy_from_slice(&payload.len.to_be_bytes());
    h[6..8].copy_from_slice(&[0; 2]);
    h[8..12].copy_from_slice(&payload.crc.to_be_bytes());
    h[12..20].copy_from_slice(&tag.to_be_bytes());
}

/// How long an EAGER's header is.
#[inline]
pub(crate) fn eager_header_len(start: Option<u32>) -> usize {
    match start {
        None => PLAIN_EAGER_LEN,
        Some(_) => PLAIN_EAGER_LEN + 4,
    }
}

/// An EAGER without START.
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

/// An ACK that names no number beyond its base.
#[inline(always)]
pub(super) fn write_plain_ack(stream: &StreamRef, base: u32, h: &mut [u8; PLAIN_ACK_LEN]) {
    h[0] = kind::ACK;
    h[1] = priority_flag(stream.priority);
    h[2..4].copy_from_slice(&(PLAIN_ACK_LEN as u16).to_be_bytes());
    h[4..6].copy_from_slice(&stream.sender_port.to_be_bytes());
    h[6..8].copy_from_slice(&stream.receiver_port.to_be_bytes());
    h[8..12].copy_from_slice(&stream.epoch.to_be_bytes());
    h[12..16].copy_from_slice(&base.to_be_bytes());
}

/// DATA.
#[inline(always)]
pub(super) fn write_data(
    stream: &StreamRef,
    number: u32,
    offset: u32,
    unasked: bool,
    payload: Payload,
    h: &mut [u8; DATA_LEN],
) {
    h[0] = kind::DATA;
    h[1] = FLAG_PAYLOAD | priority_flag(stream.priority) | unasked_flag(unasked);
    h[2..4].copy_from_slice(&(DATA_LEN as u16).to_be_bytes());
    h[4..6].copy_from_slice(&payload.len.to_be_bytes());
    h[6..8].copy_from_slice(&[0; 2]);
    h[8..12].copy_from_slice(&payload.crc.to_be_bytes());
    h[12..14].copy_from_slice(&stream.sender_port.to_be_bytes());
    h[14..16].copy_from_slice(&stream.receiver_port.to_be_bytes());
    h[16..20].copy_from_slice(&stream.epoch.to_be_bytes());
    h[20..24].copy_from_slice(&number.to_be_bytes());
    h[24..28].copy_from_slice(&offset.to_be_bytes());
}

// ---- reading ----

/// An EAGER without START and with nothing wrong.
#[derive(Clone, Copy)]
pub(super) struct PlainEager {
    /// As those behind it see it.
    pub before: Before,
    pub payload: Payload,
}

impl PlainEager {
    #[inline]
    pub(super) fn chunk(self) -> Chunk<'static> {
        let Before {
            stream,
            number,
            tag,
            ack,
        } = self.before;
        Chunk::Eager {
            stream,
            start: None,
            number,
            tag,
            ack,
            payload: self.payload,
        }
    }
}

/// The EAGER at the start of `area`, in either form, and what follows it; `None`: anything else, which the general way judges.
#[inline(always)]
pub(super) fn next_eager<'a>(
    area: &'a [u8],
    before: Option<&Before>,
) -> Option<(PlainEager, &'a [u8])> {
    match (before, area.first()) {
        (Some(before), Some(&kind::NEXT)) => plain_next(area, before),
        _ => plain_eager(area),
    }
}

/// The start of NEXT's header as one number, as [`PLAIN_EAGER`].
const PLAIN_NEXT: u32 = (kind::NEXT as u32) << 24 | (FLAG_PAYLOAD as u32) << 16 | NEXT_LEN as u32;
/// The same of NEXT with a tag.
const PLAIN_NEXT_TAG: u32 =
    (kind::NEXT as u32) << 24 | ((FLAG_PAYLOAD | FLAG_TAG) as u32) << 16 | NEXT_TAG_LEN as u32;
const PLAIN_NEXT_MASK: u32 = 0xff00_ffff | ((FLAG_PAYLOAD | FLAG_TAG) as u32) << 16;

#[inline(always)]
fn plain_next<'a>(area: &'a [u8], before: &Before) -> Option<(PlainEager, &'a [u8])> {
    let (h, rest) = area.split_first_chunk::<NEXT_LEN>()?;
    let payload = Payload {
        len: u16::from_be_bytes([h[4], h[5]]),
        crc: u32::from_be_bytes([h[8], h[9], h[10], h[11]]),
    };
    match u32::from_be_bytes([h[0], h[1], h[2], h[3]]) & PLAIN_NEXT_MASK {
        PLAIN_NEXT => Some((before.next(before.tag, payload), rest)),
        PLAIN_NEXT_TAG => {
            let (tag, rest) = rest.split_first_chunk()?;
            Some((before.next(u64::from_be_bytes(*tag), payload), rest))
        }
        _ => None,
    }
}

/// Messages of one length, whose payloads lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Messages, at least one.
    pub count: u16,
    /// Bytes of each, at least one.
    pub len: u16,
    /// The payload of all.
    pub payload: Payload,
}

/// What a RUN of so many messages with this payload is; `None` if there can be none, wire.md §4.3.
#[inline(always)]
pub(super) fn run_of(payload: Payload, count: u16) -> Option<Run> {
    let len = payload.len.checked_div(count)?;
    (len > 0 && payload.len.is_multiple_of(count)).then_some(Run {
        count,
        len,
        payload,
    })
}

/// The start of RUN's header as one number, as [`PLAIN_EAGER`].
const PLAIN_RUN: u32 = (kind::RUN as u32) << 24 | (FLAG_PAYLOAD as u32) << 16 | RUN_LEN as u32;
const PLAIN_RUN_MASK: u32 = 0xff00_ffff | (FLAG_PAYLOAD as u32) << 16;

/// The RUN at the start of `area`, which is directly behind a message, and what follows it; `None`: anything else.
#[inline(always)]
pub(super) fn plain_run(area: &[u8]) -> Option<(Run, &[u8])> {
    let (h, rest) = area.split_first_chunk::<RUN_LEN>()?;
    if u32::from_be_bytes([h[0], h[1], h[2], h[3]]) & PLAIN_RUN_MASK != PLAIN_RUN {
        return None;
    }
    let payload = Payload {
        len: u16::from_be_bytes([h[4], h[5]]),
        crc: u32::from_be_bytes([h[8], h[9], h[10], h[11]]),
    };
    Some((run_of(payload, u16::from_be_bytes([h[6], h[7]]))?, rest))
}

/// The start of a plain EAGER's header as one number: kind, flags, length. Of the flags only these two are as they must be.
const PLAIN_EAGER: u32 =
    (kind::EAGER as u32) << 24 | (FLAG_PAYLOAD as u32) << 16 | PLAIN_EAGER_LEN as u32;
const PLAIN_EAGER_MASK: u32 = 0xff00_ffff | ((FLAG_PAYLOAD | FLAG_START) as u32) << 16;

/// The plain EAGER at the start of `area`, and what follows it; `None`: anything else, which the general way judges.
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
    let before = Before {
        stream: StreamRef {
            sender_port,
            receiver_port,
            priority: priority(flags),
            epoch: u32::from_be_bytes([h[16], h[17], h[18], h[19]]),
        },
        number: u32::from_be_bytes([h[20], h[21], h[22], h[23]]),
        tag: u64::from_be_bytes([h[24], h[25], h[26], h[27], h[28], h[29], h[30], h[31]]),
        ack: ack_mode(flags),
    };
    let eager = PlainEager {
        before,
        payload: Payload {
            len: u16::from_be_bytes([h[4], h[5]]),
            crc: u32::from_be_bytes([h[8], h[9], h[10], h[11]]),
        },
    };
    Some((eager, rest))
}

/// The chunk at the start of `area`, if it is plain DATA or a plain ACK; `None`: anything else.
#[inline]
pub(super) fn plain(area: &[u8]) -> Option<Decoded<'_>> {
    match *area.first()? {
        kind::DATA => {
            let (data, rest) = plain_data(area)?;
            Some(Decoded {
                chunk: Some(data.chunk()),
                payload: Some(data.payload),
                run: 0,
                rest,
            })
        }
        kind::ACK => {
            let (stream, base, rest) = plain_ack(area)?;
            let chunk = Chunk::Ack {
                stream,
                base,
                received: Received::default(),
            };
            Some(Decoded {
                chunk: Some(chunk),
                payload: None,
                run: 0,
                rest,
            })
        }
        _ => None,
    }
}

/// The start of DATA's header as one number, as [`PLAIN_EAGER`].
const PLAIN_DATA: u32 = (kind::DATA as u32) << 24 | (FLAG_PAYLOAD as u32) << 16 | DATA_LEN as u32;
/// The same of an ACK, which has no payload.
const PLAIN_ACK: u32 = (kind::ACK as u32) << 24 | PLAIN_ACK_LEN as u32;

/// DATA.
pub(crate) struct PlainData {
    pub stream: StreamRef,
    pub number: u32,
    pub offset: u32,
    pub unasked: bool,
    pub payload: Payload,
}

impl PlainData {
    /// The same as a chunk.
    pub(super) fn chunk(&self) -> Chunk<'static> {
        Chunk::Data {
            stream: self.stream,
            number: self.number,
            offset: self.offset,
            unasked: self.unasked,
            payload: self.payload,
        }
    }
}

/// The plain DATA at the start of `area`, and what follows it.
#[inline(always)]
pub(super) fn plain_data(area: &[u8]) -> Option<(PlainData, &[u8])> {
    let (h, rest) = area.split_first_chunk::<DATA_LEN>()?;
    let word = |at: usize| u32::from_be_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    if word(0) & PLAIN_EAGER_MASK != PLAIN_DATA {
        return None;
    }
    let (ports, offset) = (word(12), word(24));
    let payload = Payload {
        len: u16::from_be_bytes([h[4], h[5]]),
        crc: word(8),
    };
    let stream = stream(ports, word(16), h[1])?;
    offset.checked_add(u32::from(payload.len))?;
    if payload.len == 0 {
        return None;
    }
    let data = PlainData {
        stream,
        number: word(20),
        offset,
        unasked: is_unasked(h[1]),
        payload,
    };
    Some((data, rest))
}

/// The plain ACK at the start of `area`: the stream it names, its base, and what follows it.
#[inline(always)]
pub(super) fn plain_ack(area: &[u8]) -> Option<(StreamRef, u32, &[u8])> {
    let (h, rest) = area.split_first_chunk::<PLAIN_ACK_LEN>()?;
    let word = |at: usize| u32::from_be_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    if word(0) & PLAIN_EAGER_MASK != PLAIN_ACK {
        return None;
    }
    let stream = stream(word(4), word(8), h[1])?;
    Some((stream, word(12), rest))
}

/// A stream's name by its words; `None` if there are no such ports.
#[inline]
fn stream(ports: u32, epoch: u32, flags: u8) -> Option<StreamRef> {
    let (sender_port, receiver_port) = ((ports >> 16) as u16, ports as u16);
    (sender_port < PORTS && receiver_port < PORTS).then_some(StreamRef {
        sender_port,
        receiver_port,
        priority: priority(flags),
        epoch,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::codec::{LONGEST, decode_any, encode, header_len};
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
        fn the_short_way_is_the_general_way((chunk, _) in any_chunk(), flip in 0usize..8 * PLAIN_EAGER_LEN, more in 0usize..40, follows: bool) {
            let before = Before { stream: StreamRef { sender_port: 1, receiver_port: 2, priority: 1, epoch: 3 }, number: u32::MAX, tag: 4, ack: AckMode::Lazy };
            let before = Some(&before).filter(|_| follows);
            let mut header = [0; LONGEST];
            let len = encode(&chunk, &mut header);
            prop_assert_eq!(header_len(&chunk), len);
            if let Chunk::Eager { stream, start: None, number, tag, ack, payload } = &chunk {
                let mut plain = [0xff; PLAIN_EAGER_LEN];
                write_plain_eager(stream, *number, *tag, *ack, *payload, &mut plain);
                prop_assert_eq!(&header[..len], &plain[..]);
            }
            if let Chunk::Data { stream, number, offset, unasked, payload } = &chunk {
                let mut data = [0xff; DATA_LEN];
                write_data(stream, *number, *offset, *unasked, *payload, &mut data);
                prop_assert_eq!(&header[..len], &data[..]);
            }
            if let (Chunk::Eager { tag, payload, .. }, true) = (&chunk, follows) {
                match more % 4 {
                    0 => write_next(*payload, header.first_chunk_mut().unwrap()),
                    1 => write_next_tag(*tag, *payload, header.first_chunk_mut().unwrap()),
                    2 => {
                        let run = header.first_chunk_mut().unwrap();
                        write_run(*payload, run);
                        lengthen_run(payload.len, 1 + flip as u16 % 4, run);
                    }
                    _ => {}
                }
            }
            let area = &mut header[..(len + more).min(LONGEST)];
            for _ in 0..2 {
                if let Some(short) = next_eager(area, before) {
                    let general = decode_any(area, before);
                    prop_assert!(general.is_ok_and(|general| same(&short, &general)));
                }
                if let (Some((run, rest)), true) = (plain_run(area), follows) {
                    let general = decode_any(area, before).unwrap_or_else(|error| panic!("{error:?}"));
                    prop_assert_eq!((general.run, general.payload, general.rest), (run.count, Some(run.payload), rest));
                    prop_assert_eq!(u32::from(run.len) * u32::from(run.count), u32::from(run.payload.len));
                    let first = before.unwrap().next(4, run.payload).chunk();
                    prop_assert_eq!(general.chunk, Some(first));
                }
                if let Some(short) = plain(area) {
                    let general = decode_any(area, before);
                    prop_assert!(general.is_ok_and(|general| general == short));
                }
                if let Some(byte) = area.get_mut(flip / 8) {
                    *byte ^= 1 << (flip % 8);
                }
            }
        }
    }
}
