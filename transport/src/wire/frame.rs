//! The frame header, wire.md §2.

use super::error::WireError;
use portolan_crc::{crc32c, crc32c_append, crc32c_of_words};

/// 48 bytes at the start of every frame but a bare one ([`super::bare`]), under the header CRC together with all chunk headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FrameHeader {
    /// Sending node.
    pub src_node: u16,
    /// Receiving node.
    pub dst_node: u16,
    /// Sending engine.
    pub src_queue: u8,
    /// Receiving engine.
    pub dst_queue: u8,
    /// The sender's incarnation, truncated.
    pub src_incarnation: u32,
    /// The receiver's incarnation as the sender knows it, truncated; 0 before HELLO-ACK.
    pub dst_incarnation: u32,
    /// The sending engine's epoch.
    pub engine_epoch: u32,
    /// UMEM buffers' worth of credit-bearing frames sent to this peer so far, this frame included (serial).
    pub sent_buffers: u32,
    /// Absolute limit the receiver of this frame may raise its own `sent_buffers` to (serial).
    pub credit_limit: u32,
    /// Too many long messages wait at the sender of this frame: requests to it travel without data.
    pub crowded: bool,
    /// The sender of this frame wants unused credit back.
    pub return_credit: bool,
    /// The sender's clock when it wrote the frame: nanoseconds, low 32 bits, never 0.
    pub sent_at: u32,
    /// The newest `sent_at` the sender has received from the receiver; 0 if none.
    pub echo: u32,
    /// How long ago that was, in units of [`HELD_UNIT`] nanoseconds, saturating.
    pub held: u16,
}

/// Nanoseconds of one unit of [`FrameHeader::held`].
pub const HELD_UNIT: u64 = 256;

/// Flag bits at offset 6.
const FLAG_CROWDED: u16 = 1;
const FLAG_RETURN_CREDIT: u16 = 2;

/// Bytes of [`FrameHeader`] on the wire.
pub const FRAME_HEADER_LEN: usize = 48;

/// First two bytes of every frame but a bare one: "PL".
pub const MAGIC: u16 = 0x504c;

/// The wire version this build writes.
pub const VERSION: u8 = 1;

/// Up to here a header area's checksum is computed word by word, which takes no call.
const SHORT_AREA: usize = 256;

/// Offset of the header CRC.
pub(super) const CRC_AT: usize = 44;

/// A frame header as it arrived: what it says of the caller's bytes, still to be checked against them.
pub(super) struct Parsed {
    pub header: FrameHeader,
    pub chunk_count: u8,
    pub header_len: usize,
}

/// A frame header as it is on the wire, by words of eight bytes. All are written at once, so nothing is read across what was just written in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Words([u64; FRAME_HEADER_LEN / 8]);

/// Who sends a frame to whom, as its header says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ends {
    /// Node and queue of the engine that sends.
    pub src: (u16, u8),
    /// Of the one that receives.
    pub dst: (u16, u8),
    /// Truncated, of the sender and of the receiver.
    pub incarnations: (u32, u32),
    /// Of the sender.
    pub engine_epoch: u32,
}

impl Words {
    /// Of the frame header at the start of these bytes.
    #[inline(always)]
    pub(super) fn of(bytes: &[u8; FRAME_HEADER_LEN]) -> Self {
        let mut words = [0; FRAME_HEADER_LEN / 8];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_be_bytes(*bytes);
        }
        Self(words)
    }

    /// Magic, version, chunks, bytes of all headers, flags: what says of which kind a frame is.
    #[inline(always)]
    pub(super) const fn kind(chunk_count: u8, header_len: u16) -> u64 {
        (MAGIC as u64) << 48
            | (VERSION as u64) << 40
            | (chunk_count as u64) << 32
            | (header_len as u64) << 16
    }

    /// Whether the frame is of this kind, and no flag is set.
    #[inline(always)]
    pub(super) fn is(&self, kind: u64) -> bool {
        self.0[0] == kind
    }

    /// Whether these are its ends.
    #[inline(always)]
    pub(crate) fn is_between(&self, ends: &Ends) -> bool {
        let queues = u64::from(ends.src.1) << 24 | u64::from(ends.dst.1) << 16;
        let nodes = u64::from(ends.src.0) << 48 | u64::from(ends.dst.0) << 32;
        let incarnations = u64::from(ends.incarnations.0) << 32 | u64::from(ends.incarnations.1);
        let held = u64::from(u16::MAX);
        self.0[1] & !held == nodes | queues
            && self.0[2] == incarnations
            && (self.0[3] >> 32) as u32 == ends.engine_epoch
    }

    /// What its sender had sent.
    #[inline(always)]
    pub(crate) fn sent_buffers(&self) -> u32 {
        self.0[3] as u32
    }

    /// When it was written.
    #[inline(always)]
    pub(crate) fn sent_at(&self) -> u32 {
        self.0[4] as u32
    }

    /// The checksum that it has.
    #[inline(always)]
    pub(super) fn crc(&self) -> u32 {
        self.0[5] as u32
    }

    /// The checksum that it must have, with these chunk headers.
    #[inline(always)]
    pub(super) fn crc_with(&self, chunks: &[u8]) -> u32 {
        let [a, b, c, d, e, f] = self.0;
        let words = [a, b, c, d, e, f & !u64::from(u32::MAX)];
        if FRAME_HEADER_LEN + chunks.len() <= SHORT_AREA {
            return crc32c_of_words(&words, chunks);
        }
        crc32c_append(crc32c(words.map(u64::to_be_bytes).as_flattened()), chunks)
    }

    /// What it says.
    #[inline(always)]
    pub(crate) fn header(&self) -> FrameHeader {
        let [kind, ends, incarnations, epoch, credit, echo] = self.0;
        let flags = kind as u16;
        FrameHeader {
            src_node: (ends >> 48) as u16,
            dst_node: (ends >> 32) as u16,
            src_queue: (ends >> 24) as u8,
            dst_queue: (ends >> 16) as u8,
            held: ends as u16,
            src_incarnation: (incarnations >> 32) as u32,
            dst_incarnation: incarnations as u32,
            engine_epoch: (epoch >> 32) as u32,
            sent_buffers: epoch as u32,
            credit_limit: (credit >> 32) as u32,
            sent_at: credit as u32,
            echo: (echo >> 32) as u32,
            crowded: flags & FLAG_CROWDED != 0,
            return_credit: flags & FLAG_RETURN_CREDIT != 0,
        }
    }
}

impl FrameHeader {
    /// Reads the header of the frame whose first segment is `first`, and checks magic, version, length and CRC, in this order.
    #[inline(always)]
    pub(super) fn parse(first: &[u8]) -> Result<Parsed, WireError> {
        let Some((bytes, _)) = first.split_first_chunk::<FRAME_HEADER_LEN>() else {
            return Err(WireError::Truncated);
        };
        let words = Words::of(bytes);
        let [kind, ..] = words.0;
        if (kind >> 48) as u16 != MAGIC {
            return Err(WireError::Magic);
        }
        if (kind >> 40) as u8 != VERSION {
            return Err(WireError::Version);
        }
        let header_len = usize::from((kind >> 16) as u16);
        if header_len < FRAME_HEADER_LEN {
            return Err(WireError::HeaderLength);
        }
        let chunks = first.get(FRAME_HEADER_LEN..header_len);
        if words.crc_with(chunks.ok_or(WireError::HeaderLength)?) != words.crc() {
            return Err(WireError::HeaderCrc);
        }
        Ok(Parsed {
            header: words.header(),
            chunk_count: (kind >> 32) as u8,
            header_len,
        })
    }

    /// The header in front of so many chunks, `header_len` bytes of headers in all, without a checksum.
    #[inline(always)]
    fn words(&self, chunk_count: u8, header_len: u16) -> Words {
        let flags = if self.crowded { FLAG_CROWDED } else { 0 }
            | if self.return_credit {
                FLAG_RETURN_CREDIT
            } else {
                0
            };
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let nodes = u32::from(self.src_node) << 16 | u32::from(self.dst_node);
        let queues = u32::from(self.src_queue) << 24 | u32::from(self.dst_queue) << 16;
        Words([
            Words::kind(chunk_count, header_len) | u64::from(flags),
            pair(nodes, queues | u32::from(self.held)),
            pair(self.src_incarnation, self.dst_incarnation),
            pair(self.engine_epoch, self.sent_buffers),
            pair(self.credit_limit, self.sent_at),
            pair(self.echo, 0),
        ])
    }

    /// Writes the header over the first bytes of `area` (frame header and all chunk headers), the CRC included.
    #[inline]
    pub(super) fn emit(&self, area: &mut [u8], chunk_count: u8) {
        let header_len = area.len() as u16;
        let Some((bytes, chunks)) = area.split_first_chunk_mut::<FRAME_HEADER_LEN>() else {
            return;
        };
        let mut words = self.words(chunk_count, header_len);
        words.0[5] |= u64::from(words.crc_with(chunks));
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words.0) {
            *bytes = word.to_be_bytes();
        }
    }
}

/// CRC32C over the header area with the CRC field taken as zero; 0 if `area` does not hold a frame header.
pub(super) fn header_crc(area: &[u8]) -> u32 {
    let split = area.split_first_chunk::<FRAME_HEADER_LEN>();
    split.map_or(0, |(header, chunks)| Words::of(header).crc_with(chunks))
}
