//! Building a frame in place, wire.md §5.
//!
//! All chunk headers come before all payloads, so a frame is written in two steps: [`FrameWriter::push`] the headers, with the
//! payloads' lengths, while they fit; then [`FrameWriter::finish_headers`] fixes where payloads start, and
//! [`PayloadWriter::payload_mut`] and [`PayloadWriter::set_payload_crc`] fill them in any order before
//! [`PayloadWriter::finish`] seals the headers. No allocation, nothing moved. The two types make the wrong order impossible.

use super::chunk::{Chunk, Payload, Rows, StreamRef};
use super::codec::{LONGEST, PAYLOAD_CRC_AT, PREFIX_LEN, encode, header_len};
use super::frame::{FRAME_HEADER_LEN, FrameHeader};
use super::plain::{
    Before, Form, RUN_MAX, lengthen_run, write_data, write_next, write_next_tag, write_plain_eager,
    write_run,
};
use crate::policy::AckMode;
use portolan_crc::crc32c_combine;

/// Most chunks in one frame this build writes; it reads up to 255.
pub const MAX_CHUNKS: usize = 32;

/// Most bytes of headers in one frame this build writes: with any encapsulation and XDP's 256 bytes of headroom they fit the
/// first receive buffer, even of 2048 bytes.
pub const HEADER_AREA_MAX: usize = 1536;

/// The chunk does not fit this frame; it goes into the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A frame whose chunk headers are being written.
#[derive(Debug)]
pub struct FrameWriter<'a> {
    frame: &'a mut [u8],
    /// Frame header and chunk headers so far.
    header_len: usize,
    /// Payload bytes promised so far.
    payload_len: usize,
    /// The frame is padded to this, for a path probe.
    padded_len: usize,
    chunks: usize,
    /// What who receives the frame reads.
    rows: Rows,
    /// The message pushed last, if nothing else was since: NEXT or RUN may follow it.
    before: Option<Before>,
    /// Messages, and bytes of each, of the RUN that `before` is the last of; none if it is an EAGER or NEXT.
    run: (u16, u16),
    slots: [Slot; MAX_CHUNKS],
}

/// Where a chunk's header starts in the frame, and its payload in the payload area.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    header: u16,
    payload: u16,
    payload_len: u16,
}

impl<'a> FrameWriter<'a> {
    /// A frame of at most `frame.len()` bytes (and never more than 65535).
    #[inline]
    pub fn new(frame: &'a mut [u8]) -> Self {
        let len = frame.len().min(usize::from(u16::MAX));
        Self {
            frame: &mut frame[..len],
            header_len: FRAME_HEADER_LEN,
            payload_len: 0,
            padded_len: 0,
            chunks: 0,
            rows: Rows::InFull,
            before: None,
            run: (0, 0),
            slots: [Slot::default(); MAX_CHUNKS],
        }
    }

    /// From now on writes messages in a row so, where it can: only for who said that he reads it.
    #[inline]
    pub fn shorten(&mut self, rows: Rows) {
        self.rows = rows;
    }

    /// Adds a chunk with its payload's length; the payload's CRC may still be unknown. Returns the chunk's index in the frame.
    /// A path probe needs room for its size, and the frame will be padded to it.
    ///
    /// With [`Rows::Run`] an EAGER may become one more message of the chunk in front of it, and has that one's index. The chunk's payload is
    /// then the payloads of all its messages, one behind the other, and its CRC is joined of theirs.
    pub fn push(&mut self, chunk: &Chunk<'_>) -> Result<usize, Full> {
        if let Chunk::Eager {
            stream,
            start: None,
            number,
            tag,
            ack,
            payload,
        } = chunk
        {
            let form = self.form(stream, *number, *tag, *ack, payload.len.into());
            let index = self.push_eager(form, stream, *number, *tag, *ack, *payload)?;
            if form == Form::More {
                self.join_crc(index, *payload);
            }
            return Ok(index);
        }
        let len = header_len(chunk);
        let header_end = self.header_len + len;
        let payload_len = chunk.payload().map_or(0, |payload| payload.len);
        let payload_end = self.payload_len + usize::from(payload_len);
        let padded_len = match chunk {
            Chunk::PathProbe { size, .. } => self.padded_len.max(usize::from(*size)),
            _ => self.padded_len,
        };
        if self.chunks == MAX_CHUNKS
            || header_end > HEADER_AREA_MAX
            || (header_end + payload_end).max(padded_len) > self.frame.len()
        {
            return Err(Full);
        }
        let to = &mut self.frame[self.header_len..];
        match to.first_chunk_mut() {
            // What is overwritten behind it comes later.
            Some(to) => _ = encode(chunk, to),
            None => {
                let mut header = [0; LONGEST];
                encode(chunk, &mut header);
                to[..len].copy_from_slice(&header[..len]);
            }
        }
        // Both fit u16: the frame is at most 65535 bytes long.
        self.slots[self.chunks] = Slot {
            header: self.header_len as u16,
            payload: self.payload_len as u16,
            payload_len,
        };
        (self.header_len, self.payload_len, self.padded_len) =
            (header_end, payload_end, padded_len);
        self.chunks += 1;
        self.before = None;
        Ok(self.chunks - 1)
    }

    /// The shortest way in which an EAGER without START and with so many bytes of payload may be written here.
    #[inline(always)]
    pub(crate) fn form(
        &self,
        stream: &StreamRef,
        number: u32,
        tag: u64,
        ack: AckMode,
        len: usize,
    ) -> Form {
        let form = match &self.before {
            Some(before) if self.rows != Rows::InFull => {
                Form::behind(before, stream, number, tag, ack)
            }
            _ => Form::Eager,
        };
        if form != Form::Next || self.rows != Rows::Run || len == 0 {
            return form;
        }
        let (count, each) = self.run;
        if usize::from(each) == len && count < RUN_MAX {
            Form::More
        } else {
            Form::Run
        }
    }

    /// [`Self::push`] of an EAGER without START, of which most frames consist: written at fixed places, in a form that [`Self::form`] allows.
    /// The CRC of a RUN is the first message's until it is set.
    #[inline(always)]
    pub(crate) fn push_eager(
        &mut self,
        form: Form,
        stream: &StreamRef,
        number: u32,
        tag: u64,
        ack: AckMode,
        payload: Payload,
    ) -> Result<usize, Full> {
        let index = match form {
            Form::Next => {
                let (index, header) = self.take_place(payload)?;
                write_next(payload, header);
                index
            }
            Form::NextTag => {
                let (index, header) = self.take_place(payload)?;
                write_next_tag(tag, payload, header);
                index
            }
            Form::Eager => {
                let (index, header) = self.take_place(payload)?;
                write_plain_eager(stream, number, tag, ack, payload, header);
                index
            }
            Form::Run => {
                let (index, header) = self.take_place(payload)?;
                write_run(payload, header);
                index
            }
            Form::More => self.lengthen(1, payload.len)?,
        };
        match form {
            Form::Run => self.run = (1, payload.len),
            Form::More => {}
            Form::Eager | Form::Next | Form::NextTag => self.run = (0, 0),
        }
        self.before = Some(Before {
            stream: *stream,
            number,
            tag,
            ack,
        });
        Ok(index)
    }

    /// [`Self::push`] of DATA, of which nearly all other frames consist.
    #[inline(always)]
    pub(crate) fn push_data(
        &mut self,
        stream: &StreamRef,
        number: u32,
        offset: u32,
        unasked: bool,
        payload: Payload,
    ) -> Result<usize, Full> {
        let (index, header) = self.take_place(payload)?;
        write_data(stream, number, offset, unasked, payload, header);
        self.before = None;
        Ok(index)
    }

    /// The next chunk's place, which is taken: its index, and where its header of fixed length goes.
    #[inline(always)]
    fn take_place<const LEN: usize>(
        &mut self,
        payload: Payload,
    ) -> Result<(usize, &mut [u8; LEN]), Full> {
        let room = self.room_behind(LEN).ok_or(Full)?;
        let index = self.chunks;
        let header = self.frame.get_mut(self.header_len..);
        let header = header.and_then(|to| to.first_chunk_mut()).ok_or(Full)?;
        let slot = self.slots.get_mut(index).ok_or(Full)?;
        if usize::from(payload.len) > room {
            return Err(Full);
        }
        *slot = Slot {
            header: self.header_len as u16,
            payload: self.payload_len as u16,
            payload_len: payload.len,
        };
        self.header_len += LEN;
        self.payload_len += usize::from(payload.len);
        self.chunks = index + 1;
        Ok((index, header))
    }

    /// Makes the last chunk, a RUN, one of so many messages more, each as long as those it has. Returns its index.
    #[inline(always)]
    fn lengthen(&mut self, count: u16, each: u16) -> Result<usize, Full> {
        let room = self.room_in(Form::More).ok_or(Full)?;
        let more = usize::from(count) * usize::from(each);
        let index = self.chunks.wrapping_sub(1);
        let slot = self.slots.get_mut(index).ok_or(Full)?;
        let header = self.frame.get_mut(usize::from(slot.header)..);
        let header = header.and_then(|to| to.first_chunk_mut()).ok_or(Full)?;
        if more > room {
            return Err(Full);
        }
        slot.payload_len += more as u16; // the frame is at most 65535 bytes long
        self.payload_len += more;
        self.run = (self.run.0 + count, each);
        lengthen_run(slot.payload_len, self.run.0, header);
        Ok(index)
    }

    /// How many messages more, of the length of those it has, the RUN that was pushed last takes in so many bytes; 0 if something else was.
    #[inline(always)]
    pub(crate) fn run_takes(&self, bytes: usize) -> usize {
        if self.before.is_none() {
            return 0;
        }
        let (count, each) = self.run;
        let room = bytes.checked_div(each.into()).unwrap_or(0);
        room.min(RUN_MAX.saturating_sub(count).into())
    }

    /// [`Self::push_eager`] of so many messages more, one number behind the other, which differ in nothing else from the last of the RUN that was
    /// pushed last, and of which there are not more than [`Self::run_takes`].
    #[inline(always)]
    pub(crate) fn push_more(&mut self, count: usize) -> Result<(), Full> {
        let count = u16::try_from(count).map_err(|_| Full)?;
        self.lengthen(count, self.run.1)?;
        if let Some(before) = &mut self.before {
            before.number = before.number.wrapping_add(count.into());
        }
        Ok(())
    }

    /// A RUN's CRC after the payload of one more message.
    fn join_crc(&mut self, index: usize, payload: Payload) {
        let slot = self.slots.get(index).copied().unwrap_or_default();
        let at = usize::from(slot.header) + PAYLOAD_CRC_AT;
        if let Some(crc) = (self.frame.get_mut(at..)).and_then(|to| to.first_chunk_mut()) {
            let before = u32::from_be_bytes(*crc);
            *crc = crc32c_combine(before, payload.crc, payload.len.into()).to_be_bytes();
        }
    }

    /// How many payload bytes a chunk may bring whose header, without payload, is `chunk`'s; `None` if not even the header fits. Of
    /// an EAGER the whole header, though NEXT may do.
    pub fn room_for(&self, chunk: &Chunk<'_>) -> Option<usize> {
        self.room_behind(header_len(chunk))
    }

    /// The same for a header of this length.
    #[inline]
    pub(crate) fn room_behind(&self, header_len: usize) -> Option<usize> {
        let header_end = self.header_len + header_len;
        if self.chunks == MAX_CHUNKS || header_end > HEADER_AREA_MAX {
            return None;
        }
        self.frame.len().checked_sub(header_end + self.payload_len)
    }

    /// The same for an EAGER without START that is written so.
    #[inline(always)]
    pub(crate) fn room_in(&self, form: Form) -> Option<usize> {
        match form {
            // No chunk and no header comes with it.
            Form::More => (self.frame.len()).checked_sub(self.header_len + self.payload_len),
            form => self.room_behind(form.header_len()),
        }
    }

    /// Nothing more fits, for another kind of frame takes this one's place.
    #[inline]
    pub(crate) fn close(&mut self) {
        self.payload_len = self.frame.len().saturating_sub(self.header_len);
    }

    /// Chunks so far.
    #[inline]
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Whether nothing was pushed yet.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.chunks == 0
    }

    /// Whether there is no room for any chunk.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.header_len + self.payload_len + PREFIX_LEN > self.frame.len()
    }

    /// Bytes of the frame as it stands.
    #[inline]
    pub fn len(&self) -> usize {
        (self.header_len + self.payload_len).max(self.padded_len)
    }

    /// Ends the headers; payloads come next.
    #[inline]
    pub fn finish_headers(&mut self) -> PayloadWriter<'_, 'a> {
        PayloadWriter { writer: self }
    }
}

/// A frame whose payloads are being filled in.
#[derive(Debug)]
pub struct PayloadWriter<'w, 'a> {
    writer: &'w mut FrameWriter<'a>,
}

impl PayloadWriter<'_, '_> {
    /// The bytes of chunk `index`'s payload, as long as the pushed chunk said; empty for a chunk without payload or an index
    /// that does not exist.
    #[inline]
    pub fn payload_mut(&mut self, index: usize) -> &mut [u8] {
        let w = &mut *self.writer;
        let Some(slot) = w.slots[..w.chunks].get(index) else {
            return &mut [];
        };
        let start = w.header_len + usize::from(slot.payload);
        &mut w.frame[start..start + usize::from(slot.payload_len)]
    }

    /// The bytes of all payloads, one behind the other in the order in which chunks were pushed.
    pub fn payloads_mut(&mut self) -> &mut [u8] {
        let w = &mut *self.writer;
        let area = w.header_len..w.header_len + w.payload_len;
        w.frame.get_mut(area).unwrap_or_default()
    }

    /// Has chunk `index`'s payload written by `fill`, which returns its CRC32C: [`Self::payload_mut`] and [`Self::set_payload_crc`].
    #[inline]
    pub(crate) fn fill(&mut self, index: usize, fill: impl FnOnce(&mut [u8]) -> u32) {
        let w = &mut *self.writer;
        let Some(slot) = w.slots[..w.chunks].get(index) else {
            return;
        };
        let start = w.header_len + usize::from(slot.payload);
        let crc = fill(&mut w.frame[start..start + usize::from(slot.payload_len)]);
        let at = usize::from(slot.header) + PAYLOAD_CRC_AT;
        if slot.payload_len > 0 {
            w.frame[at..at + 4].copy_from_slice(&crc.to_be_bytes());
        }
    }

    /// Sets the CRC32C of chunk `index`'s payload, where the pushed chunk did not know it. Ignored for a chunk without payload:
    /// its descriptor does not exist.
    #[inline]
    pub fn set_payload_crc(&mut self, index: usize, crc: u32) {
        let w = &mut *self.writer;
        let Some(slot) = w.slots[..w.chunks].get(index) else {
            return;
        };
        let at = usize::from(slot.header) + PAYLOAD_CRC_AT;
        if slot.payload_len > 0 {
            w.frame[at..at + 4].copy_from_slice(&crc.to_be_bytes());
        }
    }

    /// Writes the frame header and its CRC and returns the frame's length; 0 if the buffer cannot even hold the frame header.
    #[inline]
    pub fn finish(self, header: &FrameHeader) -> usize {
        let w = self.writer;
        let (len, end) = (w.len(), w.header_len + w.payload_len);
        let Some(frame) = w.frame.get_mut(..len) else {
            return 0;
        };
        // Nearly never is there anything, and to fill nothing is a call, too.
        if end < len {
            frame[end..].fill(0);
        }
        header.emit(&mut frame[..w.header_len], w.chunks as u8);
        len
    }
}
