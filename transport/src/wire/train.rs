//! The headers of a frame that carries one DATA chunk and nothing else, made from those of the one before.
//!
//! In a train of them (`endpoint/train.rs`) nothing differs but when the frame was written, the offset, and the two checksums. A test holds
//! what is written here against the general way.

use super::codec::PAYLOAD_CRC_AT;
use super::crc::crc32c;
use super::frame::{CRC_AT, FRAME_HEADER_LEN, HELD_AT, SENT_AT};
use super::plain::{DATA_LEN, OFFSET_AT};

/// Bytes before the payload.
pub(crate) const DATA_HEADERS_LEN: usize = FRAME_HEADER_LEN + DATA_LEN;

/// The headers, their own checksum taken as zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataHeaders([u8; DATA_HEADERS_LEN]);

impl DataHeaders {
    /// Of the frame that was written last; `None` if it has no room for them.
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
        let mut headers = *frame.first_chunk()?;
        put(&mut headers, CRC_AT, [0; 4]);
        Some(Self(headers))
    }

    /// The frame after that: what is known before its payload is read.
    #[inline]
    pub(crate) fn go_on(&mut self, sent_at: u32, held: u16, offset: u32) {
        put(&mut self.0, HELD_AT, held.to_be_bytes());
        put(&mut self.0, SENT_AT, sent_at.to_be_bytes());
        put(
            &mut self.0,
            FRAME_HEADER_LEN + OFFSET_AT,
            offset.to_be_bytes(),
        );
    }

    /// Writes them for a payload of this checksum.
    #[inline]
    pub(crate) fn seal(&mut self, payload_crc: u32, to: &mut [u8; DATA_HEADERS_LEN]) {
        put(
            &mut self.0,
            FRAME_HEADER_LEN + PAYLOAD_CRC_AT,
            payload_crc.to_be_bytes(),
        );
        *to = self.0;
        put(to, CRC_AT, crc32c(&self.0).to_be_bytes());
    }
}

#[inline(always)]
fn put<const N: usize>(headers: &mut [u8; DATA_HEADERS_LEN], at: usize, bytes: [u8; N]) {
    if let Some(to) = headers.get_mut(at..at + N) {
        to.copy_from_slice(&bytes);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::super::chunk::{Payload, StreamRef};
    use super::super::frame::FrameHeader;
    use super::super::writer::FrameWriter;
    use super::*;

    fn write(header: &FrameHeader, number: u32, offset: u32, bytes: &[u8]) -> Vec<u8> {
        let mut frame = vec![0xee; 1_472];
        let stream = StreamRef {
            sender_port: 3,
            receiver_port: 200,
            priority: 1,
            epoch: 0xfedc_ba98,
        };
        let payload = Payload {
            len: bytes.len() as u16,
            crc: crc32c(bytes),
        };
        let mut w = FrameWriter::new(&mut frame);
        let at = w
            .push_data(&stream, number, offset, false, payload)
            .unwrap();
        let mut payloads = w.finish_headers();
        payloads.payload_mut(at).copy_from_slice(bytes);
        let len = payloads.finish(header);
        frame.truncate(len);
        frame
    }

    proptest! {
        // Two frames of DATA that differ in everything that may differ. Expect: the second, from the first's headers, byte for byte as by the general way.
        #[test]
        fn the_next_frame_is_what_the_general_way_writes(
            number: u32, crowded: bool, echo: u32, credit_limit: u32,
            first: (u32, u16, u32, u8), second: (u32, u16, u32, u8),
        ) {
            let header = |(sent_at, held, ..): (u32, u16, u32, u8)| FrameHeader {
                src_node: 7, dst_node: 9, src_incarnation: 0x1234_5678, engine_epoch: 3,
                crowded, echo, credit_limit, sent_at, held,
                ..FrameHeader::default()
            };
            let general = |it: (u32, u16, u32, u8)| write(&header(it), number, it.2, &[it.3; 1_396]);
            let expected = general(second);
            let mut headers = DataHeaders::of(&general(first)).unwrap();
            headers.go_on(second.0, second.1, second.2);
            let mut area = [0xee; DATA_HEADERS_LEN];
            headers.seal(crc32c(&[second.3; 1_396]), &mut area);
            prop_assert_eq!(&area[..], &expected[..DATA_HEADERS_LEN]);
        }
    }
}
