//! The frame header, wire.md §2.

use super::crc::{crc32c, crc32c_append};
use super::error::WireError;

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

/// A header area that is copied whole.
const SHORT_AREA: usize = 128;

/// Offset of the header CRC.
pub(super) const CRC_AT: usize = 44;

/// A frame header as it arrived: what it says of the caller's bytes, still to be checked against them.
pub(super) struct Parsed {
    pub header: FrameHeader,
    pub chunk_count: u8,
    pub header_len: usize,
}

impl FrameHeader {
    /// Reads the header of the frame whose first segment is `first`, and checks magic, version, length and CRC, in this order.
    #[inline(always)]
    pub(super) fn parse(first: &[u8]) -> Result<Parsed, WireError> {
        let Some((bytes, _)) = first.split_first_chunk::<FRAME_HEADER_LEN>() else {
            return Err(WireError::Truncated);
        };
        if u16_at(bytes, 0) != MAGIC {
            return Err(WireError::Magic);
        }
        if bytes[2] != VERSION {
            return Err(WireError::Version);
        }
        let header_len = usize::from(u16_at(bytes, 4));
        if header_len < FRAME_HEADER_LEN {
            return Err(WireError::HeaderLength);
        }
        let area = first.get(..header_len).ok_or(WireError::HeaderLength)?;
        if header_crc(area) != u32_at(bytes, CRC_AT) {
            return Err(WireError::HeaderCrc);
        }
        let header = Self {
            src_node: u16_at(bytes, 8),
            dst_node: u16_at(bytes, 10),
            src_queue: bytes[12],
            dst_queue: bytes[13],
            src_incarnation: u32_at(bytes, 16),
            dst_incarnation: u32_at(bytes, 20),
            engine_epoch: u32_at(bytes, 24),
            sent_buffers: u32_at(bytes, 28),
            credit_limit: u32_at(bytes, 32),
            crowded: u16_at(bytes, 6) & FLAG_CROWDED != 0,
            return_credit: u16_at(bytes, 6) & FLAG_RETURN_CREDIT != 0,
            held: u16_at(bytes, 14),
            sent_at: u32_at(bytes, 36),
            echo: u32_at(bytes, 40),
        };
        Ok(Parsed {
            header,
            chunk_count: bytes[3],
            header_len,
        })
    }

    /// Writes the header over the first bytes of `area` (frame header and all chunk headers), the CRC included.
    pub(super) fn emit(&self, area: &mut [u8], chunk_count: u8) {
        let area_len = area.len() as u16;
        let Some(bytes) = area.first_chunk_mut::<FRAME_HEADER_LEN>() else {
            return;
        };
        bytes[0..2].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[2] = VERSION;
        bytes[3] = chunk_count;
        bytes[4..6].copy_from_slice(&area_len.to_be_bytes());
        let flags = if self.crowded { FLAG_CROWDED } else { 0 }
            | if self.return_credit {
                FLAG_RETURN_CREDIT
            } else {
                0
            };
        bytes[6..8].copy_from_slice(&flags.to_be_bytes());
        bytes[8..10].copy_from_slice(&self.src_node.to_be_bytes());
        bytes[10..12].copy_from_slice(&self.dst_node.to_be_bytes());
        bytes[12] = self.src_queue;
        bytes[13] = self.dst_queue;
        bytes[14..16].copy_from_slice(&self.held.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.src_incarnation.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.dst_incarnation.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.engine_epoch.to_be_bytes());
        bytes[28..32].copy_from_slice(&self.sent_buffers.to_be_bytes());
        bytes[32..36].copy_from_slice(&self.credit_limit.to_be_bytes());
        bytes[36..40].copy_from_slice(&self.sent_at.to_be_bytes());
        bytes[40..44].copy_from_slice(&self.echo.to_be_bytes());
        bytes[CRC_AT..].fill(0);
        let crc = crc32c(area);
        area[CRC_AT..FRAME_HEADER_LEN].copy_from_slice(&crc.to_be_bytes());
    }
}

/// CRC32C over the header area with the CRC field taken as zero; 0 if `area` does not hold a frame header.
pub(super) fn header_crc(area: &[u8]) -> u32 {
    let Some((header, chunks)) = area.split_first_chunk::<FRAME_HEADER_LEN>() else {
        return 0;
    };
    // A copy is cheaper than a second call, and a third for the four zeros: of all there is, if that is a chunk or two.
    let mut copy = [0; SHORT_AREA];
    if let Some(copy) = copy.get_mut(..area.len()) {
        copy.copy_from_slice(area);
        copy[CRC_AT..FRAME_HEADER_LEN].fill(0);
        return crc32c(copy);
    }
    let mut header = *header;
    header[CRC_AT..].fill(0);
    crc32c_append(crc32c(&header), chunks)
}

fn u16_at(bytes: &[u8; FRAME_HEADER_LEN], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8; FRAME_HEADER_LEN], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
