//! A frame of one EAGER, or of a plain ACK and one EAGER: everything at fixed places.

use super::chunk::{Payload, StreamRef};
use super::codec::PAYLOAD_CRC_AT;
use super::frame::{FRAME_HEADER_LEN, FrameHeader};
use super::plain::{PLAIN_ACK_LEN, PLAIN_EAGER_LEN, write_plain_ack, write_plain_eager};
use crate::policy::AckMode;

/// Such a frame, while it is being written.
pub(crate) struct LoneMessage<'a> {
    frame: &'a mut [u8],
    /// Where the EAGER's header is; its payload follows that.
    eager_at: usize,
}

impl<'a> LoneMessage<'a> {
    /// Bytes of all headers.
    #[inline(always)]
    pub(crate) fn headers_len(with_ack: bool) -> usize {
        let ack = if with_ack { PLAIN_ACK_LEN } else { 0 };
        FRAME_HEADER_LEN + ack + PLAIN_EAGER_LEN
    }

    /// A frame with so many bytes of payload, and this acknowledgement. `None` without room.
    #[inline(always)]
    pub(crate) fn begin(
        to: &'a mut [u8],
        ack: Option<(StreamRef, u32)>,
        payload_len: usize,
    ) -> Option<Self> {
        let headers = Self::headers_len(ack.is_some());
        let frame = to.get_mut(..headers + payload_len)?;
        if let Some((stream, base)) = ack {
            let h = frame.get_mut(FRAME_HEADER_LEN..)?.first_chunk_mut()?;
            write_plain_ack(&stream, base, h);
        }
        Some(Self {
            frame,
            eager_at: headers - PLAIN_EAGER_LEN,
        })
    }

    /// The message's header.
    #[inline(always)]
    pub(crate) fn message(
        &mut self,
        stream: &StreamRef,
        number: u32,
        tag: u64,
        ack: AckMode,
        payload: Payload,
    ) {
        let h = self.frame.get_mut(self.eager_at..);
        if let Some(h) = h.and_then(|h| h.first_chunk_mut()) {
            write_plain_eager(stream, number, tag, ack, payload, h);
        }
    }

    /// Bytes of the whole frame.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.frame.len()
    }

    /// The message's payload, to be filled in.
    #[inline(always)]
    pub(crate) fn payload(&mut self) -> &mut [u8] {
        let at = self.eager_at + PLAIN_EAGER_LEN;
        self.frame.get_mut(at..).unwrap_or_default()
    }

    /// Of the payload, if that has any bytes.
    #[inline(always)]
    pub(crate) fn set_crc(&mut self, crc: u32) {
        let at = self.eager_at + PAYLOAD_CRC_AT;
        let place = self.frame.get_mut(at..).and_then(|to| to.first_chunk_mut());
        if let Some(place) = place {
            *place = crc.to_be_bytes();
        }
    }

    /// Writes the frame's header.
    #[inline(always)]
    pub(crate) fn finish(self, header: &FrameHeader) {
        let headers = self.eager_at + PLAIN_EAGER_LEN;
        let chunks = if headers == Self::headers_len(true) {
            2
        } else {
            1
        };
        if let Some(area) = self.frame.get_mut(..headers) {
            header.emit(area, chunks);
        }
    }
}
