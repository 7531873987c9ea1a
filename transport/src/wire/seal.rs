//! Putting a frame's checksum right again, for those who forge frames: tests, simulator and fuzzers.

use super::bare::{self, BARE_LEN, BARE_MAGIC};
use super::frame::{self, FRAME_HEADER_LEN, header_crc};
use portolan_crc::crc32c;

/// Bytes of headers that a frame says it has; `None` if it is too short to say.
pub fn header_area_len(frame: &[u8]) -> Option<usize> {
    let [a, b, _, _, c, d] = *frame.first_chunk()?;
    Some(match u16::from_be_bytes([a, b]) {
        BARE_MAGIC => BARE_LEN,
        _ => usize::from(u16::from_be_bytes([c, d])),
    })
}

/// Computes the header CRC anew, of either kind of frame. One whose headers are not all there stays as it is.
pub fn reseal(frame: &mut [u8]) {
    let len = header_area_len(frame).unwrap_or_default();
    let Some(area) = frame.get_mut(..len) else {
        return;
    };
    let (at, crc) = match area.len() {
        BARE_LEN => (
            bare::CRC_AT,
            crc32c(area.get(..bare::CRC_AT).unwrap_or_default()),
        ),
        FRAME_HEADER_LEN.. => (frame::CRC_AT, header_crc(area)),
        _ => return,
    };
    if let Some(to) = area.get_mut(at..).and_then(|to| to.first_chunk_mut()) {
        *to = crc.to_be_bytes();
    }
}
