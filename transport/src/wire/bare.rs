//! Bare frames, wire.md §2.1: one piece of a long message that was granted, and of all headers what differs.
//!
//! Problem: nearly every frame of a stream carries nothing but DATA, and 76 bytes of headers say in each what the frame before it said as well: who both ends
//! are, how far the credit goes, what was heard last. A twentieth of a frame of 1,500 bytes.
//!
//! Idea: who has just said all that in full leaves it out. Who both are and which engine writes is four bytes ([`association`]), which the
//! receiver makes of what it knows and compares; the rest of the frame is the payload.
//!
//! Rejected: leaving out the stream and the message as well (a place that is lost with the frame that named it).

use super::chunk::StreamRef;
use super::error::WireError;
use super::fields::{priority, priority_flag};
use super::frame::{FrameHeader, VERSION};
use super::parse::PADDED_MAX;
use portolan_crc::crc32c_of_words;

/// Bytes before the payload.
pub const BARE_LEN: usize = 40;
/// First two bytes of a bare frame: "PB".
pub const BARE_MAGIC: u16 = 0x5042;
/// Offset of the header CRC, which covers all before it.
pub(super) const CRC_AT: usize = 36;
/// Where what differs from one to the next is, and the payload's checksum.
const SENT_AT: usize = 16;
const OFFSET_AT: usize = 28;
const PAYLOAD_CRC_AT: usize = 32;

/// What both ends know of each other: the incarnations in a frame header from one to the other, and its engine epoch.
#[inline]
pub fn association(src_incarnation: u32, dst_incarnation: u32, engine_epoch: u32) -> u32 {
    engine_epoch ^ src_incarnation.rotate_left(8) ^ dst_incarnation.rotate_left(16)
}

/// The headers of a bare frame as they are written, one after another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BareHeaders([u8; CRC_AT]);

impl BareHeaders {
    /// Of all frames with pieces of this message, to whom such a header is written.
    #[inline]
    pub(crate) fn new(header: &FrameHeader, stream: &StreamRef, number: u32) -> Self {
        let association = association(
            header.src_incarnation,
            header.dst_incarnation,
            header.engine_epoch,
        );
        let mut h = [0; CRC_AT];
        h[0..2].copy_from_slice(&BARE_MAGIC.to_be_bytes());
        h[2] = VERSION;
        h[3] = priority_flag(stream.priority);
        h[4..8].copy_from_slice(&association.to_be_bytes());
        h[8..10].copy_from_slice(&header.src_node.to_be_bytes());
        h[10..12].copy_from_slice(&header.dst_node.to_be_bytes());
        h[12] = header.src_queue;
        h[13] = header.dst_queue;
        h[14] = stream.sender_port as u8; // there are 256
        h[15] = stream.receiver_port as u8;
        h[20..24].copy_from_slice(&stream.epoch.to_be_bytes());
        h[24..28].copy_from_slice(&number.to_be_bytes());
        Self(h)
    }

    /// One of them: what is known before its payload is read.
    #[inline]
    pub(crate) fn go_on(&mut self, sent_at: u32, offset: u32) {
        self.0[SENT_AT..SENT_AT + 4].copy_from_slice(&sent_at.to_be_bytes());
        self.0[OFFSET_AT..OFFSET_AT + 4].copy_from_slice(&offset.to_be_bytes());
    }

    /// Writes it for a payload of this checksum.
    #[inline]
    pub(crate) fn seal(&mut self, payload_crc: u32, to: &mut [u8; BARE_LEN]) {
        self.0[PAYLOAD_CRC_AT..].copy_from_slice(&payload_crc.to_be_bytes());
        to[..CRC_AT].copy_from_slice(&self.0);
        to[CRC_AT..].copy_from_slice(&crc32c_of_words(&[], &self.0).to_be_bytes());
    }
}

/// A bare frame's headers as they arrived: they match their checksum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bare<'a>(&'a [u8; BARE_LEN]);

impl<'a> Bare<'a> {
    /// Of a frame with this first segment and so many bytes in all; `None`: it is no bare frame.
    #[inline(always)]
    pub(super) fn parse(first: &'a [u8], total: usize) -> Option<Result<Self, WireError>> {
        let (magic, _) = first.split_first_chunk()?;
        (u16::from_be_bytes(*magic) == BARE_MAGIC).then(|| Self::check(first, total))
    }

    fn check(first: &'a [u8], total: usize) -> Result<Self, WireError> {
        let bytes: &[u8; BARE_LEN] = first.first_chunk().ok_or(WireError::Truncated)?;
        if bytes[2] != VERSION {
            return Err(WireError::Version);
        }
        let bare = Self(bytes);
        if crc32c_of_words(&[], &bytes[..CRC_AT]) != bare.word(CRC_AT) {
            return Err(WireError::HeaderCrc);
        }
        // What pads a shorter one would be payload.
        if total <= PADDED_MAX {
            return Err(WireError::Truncated);
        }
        match bare.offset().checked_add((total - BARE_LEN) as u32) {
            Some(_) => Ok(bare),
            None => Err(WireError::ChunkField),
        }
    }

    #[inline(always)]
    fn word(self, at: usize) -> u32 {
        let word = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        word.map_or(0, |word| u32::from_be_bytes(*word))
    }

    /// What it says of a frame header: who, to whom, and when.
    #[inline(always)]
    pub(super) fn header(self) -> FrameHeader {
        let (nodes, sent_at) = (self.word(8), self.word(SENT_AT));
        FrameHeader {
            src_node: (nodes >> 16) as u16,
            dst_node: nodes as u16,
            src_queue: self.0[12],
            dst_queue: self.0[13],
            sent_at,
            ..FrameHeader::default()
        }
    }

    #[inline(always)]
    pub(super) fn association(self) -> u32 {
        self.word(4)
    }

    #[inline(always)]
    pub(super) fn stream(self) -> StreamRef {
        StreamRef {
            sender_port: self.0[14].into(),
            receiver_port: self.0[15].into(),
            priority: priority(self.0[3]),
            epoch: self.word(20),
        }
    }

    #[inline(always)]
    pub(super) fn number(self) -> u32 {
        self.word(24)
    }

    #[inline(always)]
    pub(super) fn offset(self) -> u32 {
        self.word(OFFSET_AT)
    }

    #[inline(always)]
    pub(super) fn payload_crc(self) -> u32 {
        self.word(PAYLOAD_CRC_AT)
    }
}
