//! A frame of one EAGER, or of a plain ACK and one EAGER: everything at fixed places.

use super::chunk::{Payload, StreamRef};
use super::codec::PAYLOAD_CRC_AT;
use super::frame::{FRAME_HEADER_LEN, FrameHeader, Words};
use super::parse::Short;
use super::plain::{
    PLAIN_ACK_LEN, PLAIN_EAGER_LEN, plain_ack, plain_eager, write_plain_ack, write_plain_eager,
};
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

/// Bytes of all headers of a message behind an acknowledgement.
const ANSWER_LEN: usize = FRAME_HEADER_LEN + PLAIN_ACK_LEN + PLAIN_EAGER_LEN;

/// A frame of a plain ACK and one EAGER with bytes, as it came: its headers match their checksum.
pub(crate) struct LoneAnswer<'a> {
    /// The frame's header.
    pub header: Words,
    /// The stream that the ACK names, and the next number it wants.
    pub ack: (StreamRef, u32),
    /// The message.
    pub message: Short<'a>,
}

impl<'a> LoneAnswer<'a> {
    /// `None`: anything else, which the general way judges.
    #[inline(always)]
    pub(crate) fn read(segments: &[&'a [u8]]) -> Option<Self> {
        let [frame] = *segments else {
            return None;
        };
        let (header, rest) = frame.split_first_chunk::<FRAME_HEADER_LEN>()?;
        let header = Words::of(header);
        if !header.is(const { Words::kind(2, ANSWER_LEN as u16) }) {
            return None;
        }
        let (chunks, bytes) = rest.split_at_checked(PLAIN_ACK_LEN + PLAIN_EAGER_LEN)?;
        if header.crc_with(chunks) != header.crc() {
            return None;
        }
        let (stream, base, chunks) = plain_ack(chunks)?;
        let (eager, rest) = plain_eager(chunks)?;
        // It is too long to be padded.
        if bytes.is_empty() || bytes.len() != usize::from(eager.payload.len) {
            return None;
        }
        Some(Self {
            header,
            ack: (stream, base),
            message: Short::of(&eager, bytes, rest),
        })
    }
}
