//! From received bytes to a [`Frame`], wire.md §5 and §6.
//!
//! A frame arrives as one or more segments (receive buffers). All headers lie in the first; payloads may straddle. [`parse`] walks
//! the chunk headers once and checks every one, so that the [`Frame`] it returns can be walked without errors. It copies nothing
//! and looks at no payload byte: the payload's CRC is computed by whoever copies it ([`PayloadView::crc`]).
//!
//! A RUN's messages share a checksum, and are walked as the EAGERs that they are. So the walk computes it when it comes to the RUN, once: who takes
//! them by [`Chunks::short`] copies them as they are. Of anybody else, who knows nothing of runs, each gets a checksum of its own, made of
//! its bytes: the right one if the RUN's was, else one that cannot match.
//!
//! Rejected: decoding the chunks into a list (an allocation or a copy per frame); a cursor that fails in the middle (half a frame
//! believed).

use super::bare::{BARE_LEN, Bare};
use super::chunk::{Chunk, Payload, StreamRef};
use super::codec::{Decoded, decode};
use super::error::WireError;
use super::frame::{FRAME_HEADER_LEN, FrameHeader, Parsed, Words};
use super::plain::{
    Before, PlainData, PlainEager, RUNS_MAX, Run, next_eager, plain_ack, plain_data, plain_run,
    run_of,
};
use crate::policy::AckMode;
use portolan_crc::crc32c_append;

/// Up to this length a frame may have bytes after its payloads: Ethernet pads to 60 bytes, and VLAN tags come and go.
pub(super) const PADDED_MAX: usize = 64;

/// A frame whose headers were checked. Payload bytes are not checked yet.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    header: FrameHeader,
    segments: &'a [&'a [u8]],
    header_len: usize,
    chunk_count: u8,
    unknown: u8,
    bare: Option<Bare<'a>>,
}

/// Checks a received frame, given as its segments in order, against wire.md §6.
#[inline]
pub fn parse<'a>(segments: &'a [&'a [u8]]) -> Result<Frame<'a>, WireError> {
    let first = *segments.first().ok_or(WireError::Truncated)?;
    let total = segments
        .iter()
        .try_fold(0usize, |sum, segment| sum.checked_add(segment.len()));
    let total = total
        .filter(|&total| total <= usize::from(u16::MAX))
        .ok_or(WireError::TooLong)?;
    if let Some(bare) = Bare::parse(first, total) {
        return bare.map(|bare| Frame {
            header: bare.header(),
            segments,
            header_len: BARE_LEN,
            chunk_count: 0, // it has no chunk's header
            unknown: 0,
            bare: Some(bare),
        });
    }
    let Parsed {
        header,
        chunk_count,
        header_len,
    } = FrameHeader::parse(first)?;

    let mut rest = &first[FRAME_HEADER_LEN..header_len];
    let (mut payloads, mut in_runs) = (0usize, 0usize);
    let mut unknown = 0;
    let mut probe_size = 0;
    // Whether NEXT and RUN are well formed does not depend on what the EAGER in front of them says.
    let mut before = None;
    for _ in 0..chunk_count {
        if let Some((eager, after)) = next_eager(rest, before) {
            payloads += usize::from(eager.payload.len);
            (rest, before) = (after, Some(&Before::ANY));
            continue;
        }
        if before.is_some()
            && let Some((run, after)) = plain_run(rest)
        {
            payloads += usize::from(run.payload.len);
            in_runs += usize::from(run.count);
            rest = after;
            continue;
        }
        if let Some((data, after)) = plain_data(rest) {
            payloads += usize::from(data.payload.len);
            (rest, before) = (after, None);
            continue;
        }
        let decoded = decode(rest, before)?;
        before = match decoded.chunk {
            Some(Chunk::Eager { .. }) => Some(&Before::ANY),
            _ => None,
        };
        rest = decoded.rest;
        in_runs += usize::from(decoded.run);
        payloads += decoded
            .payload
            .map_or(0, |payload| usize::from(payload.len)); // at most 255 × 65535
        match decoded.chunk {
            None => unknown += 1,
            Some(Chunk::PathProbe { size, .. }) => probe_size = probe_size.max(usize::from(size)),
            Some(_) => {}
        }
    }
    if !rest.is_empty() {
        return Err(WireError::ChunkCount);
    }
    if in_runs > RUNS_MAX {
        return Err(WireError::ChunkField);
    }
    let used = header_len + payloads;
    if total < used.max(probe_size) {
        return Err(WireError::PayloadLength);
    }
    if total > used.max(probe_size).max(PADDED_MAX) {
        return Err(WireError::Trailing);
    }
    Ok(Frame {
        header,
        segments,
        header_len,
        chunk_count,
        unknown,
        bare: None,
    })
}

impl<'a> Frame<'a> {
    /// The frame header. A bare frame has of it who wrote it, to whom and when; what it does not say is 0.
    #[inline]
    pub fn header(&self) -> &FrameHeader {
        &self.header
    }

    /// The frame header as it came, of a frame that is not bare.
    #[inline]
    pub(crate) fn words(&self) -> Option<Words> {
        let first = self.segments.first()?.first_chunk()?;
        Some(Words::of(first))
    }

    /// The chunks of known kinds, in order, each with its payload (empty for kinds without one).
    #[inline]
    pub fn chunks(&self) -> Chunks<'a> {
        let first = self.segments.first().copied().unwrap_or_default();
        Chunks {
            rest: first
                .get(FRAME_HEADER_LEN..self.header_len)
                .unwrap_or_default(),
            left: self.chunk_count,
            bare: self.bare,
            before: None,
            run: Pieces::default(),
            payload: Position {
                segments: self.segments,
                at: self.header_len,
            },
        }
    }

    /// Whether it is a bare frame, wire.md §2.1.
    #[inline]
    pub fn is_bare(&self) -> bool {
        self.bare.is_some()
    }

    /// Of a bare frame, what it says of its association, and its DATA.
    #[inline(always)]
    pub(crate) fn bare(&self) -> Option<(u32, PlainData, PayloadView<'a>)> {
        let bare = self.bare?;
        let from = Position {
            segments: self.segments,
            at: BARE_LEN,
        };
        let (data, view) = bare_data(bare, from);
        Some((bare.association(), data, view))
    }

    /// How many chunks had a kind this version does not know; they are skipped.
    pub fn unknown_chunks(&self) -> u8 {
        self.unknown
    }
}

/// A bare frame's DATA; its headers end here.
#[inline(always)]
fn bare_data<'a>(bare: Bare<'a>, from: Position<'a>) -> (PlainData, PayloadView<'a>) {
    let total: usize = from.segments.iter().map(|segment| segment.len()).sum();
    let payload = Payload {
        len: (total - from.at.min(total)) as u16, // a frame is at most 65535 bytes long
        crc: bare.payload_crc(),
    };
    let data = PlainData {
        stream: bare.stream(),
        number: bare.number(),
        offset: bare.offset(),
        unasked: false,
        payload,
    };
    (data, PayloadView { from, payload })
}

/// A place in a frame's bytes.
#[derive(Clone, Copy, Debug)]
struct Position<'a> {
    /// The segments not behind the place.
    segments: &'a [&'a [u8]],
    /// Bytes into the first of them, at most its length.
    at: usize,
}

impl Position<'_> {
    /// Moves on by `bytes`, or to the end.
    #[inline]
    fn advance(&mut self, mut bytes: usize) {
        while let [first, rest @ ..] = self.segments {
            let here = first.len() - self.at;
            if bytes < here || rest.is_empty() {
                self.at += bytes.min(here);
                return;
            }
            bytes -= here;
            (self.segments, self.at) = (rest, 0);
        }
    }
}

/// Iterator over a frame's chunks; see [`Frame::chunks`].
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    rest: &'a [u8],
    left: u8,
    /// The frame is a bare one, and nothing of it was passed over.
    bare: Option<Bare<'a>>,
    /// The chunk passed over last, if it was an EAGER.
    before: Option<Before>,
    run: Pieces,
    payload: Position<'a>,
}

/// What is left of the RUN that the walk has come to; its header was passed over.
#[derive(Clone, Copy, Debug, Default)]
struct Pieces {
    /// Messages.
    left: u16,
    /// Bytes of each.
    len: u16,
    /// The RUN matches its checksum.
    good: bool,
}

impl<'a> Iterator for Chunks<'a> {
    type Item = (Chunk<'a>, PayloadView<'a>);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.run.left > 0 {
            return self.next_of_run();
        }
        if self.left == 0 {
            let (data, view) = bare_data(self.bare.take()?, self.payload);
            return Some((data.chunk(), view));
        }
        if let Some((eager, rest)) = next_eager(self.rest, self.before.as_ref()) {
            self.left -= 1;
            self.before = Some(eager.before);
            return Some((eager.chunk(), self.step(eager.payload, rest)));
        }
        self.next_of_any_kind()
    }
}

impl<'a> Chunks<'a> {
    fn next_of_any_kind(&mut self) -> Option<(Chunk<'a>, PayloadView<'a>)> {
        loop {
            self.left = self.left.checked_sub(1)?;
            // `parse` decoded every chunk already; an error is impossible and would end the walk.
            let Decoded {
                chunk,
                payload,
                run,
                rest,
            } = decode(self.rest, self.before.as_ref()).ok()?;
            if let Some(run) = run_of(payload.unwrap_or_default(), run) {
                self.enter(run, rest);
                return self.next_of_run();
            }
            self.before = chunk.as_ref().and_then(Before::of);
            let view = self.step(payload.unwrap_or_default(), rest);
            if let Some(chunk) = chunk {
                return Some((chunk, view));
            }
        }
    }

    /// Passes over the header of a RUN: its messages come next.
    #[inline]
    fn enter(&mut self, run: Run, rest: &'a [u8]) {
        let all = PayloadView {
            from: self.payload,
            payload: run.payload,
        };
        self.rest = rest;
        self.run = Pieces {
            left: run.count,
            len: run.len,
            good: all.verify(),
        };
    }

    /// The next message of a RUN as an EAGER.
    #[inline(never)]
    fn next_of_run(&mut self) -> Option<(Chunk<'a>, PayloadView<'a>)> {
        self.run.left = self.run.left.checked_sub(1)?;
        let mut view = PayloadView {
            from: self.payload,
            payload: Payload {
                len: self.run.len,
                crc: 0,
            },
        };
        let crc = view.parts().fold(0, crc32c_append);
        view.payload.crc = if self.run.good { crc } else { !crc };
        let before = self.before?; // there is one, or `parse` had refused the RUN
        let eager = before.next(before.tag, view.payload);
        self.before = Some(eager.before);
        self.payload.advance(view.len());
        Some((eager.chunk(), view))
    }

    /// Passes over a chunk; what is left of it is its payload.
    #[inline]
    fn step(&mut self, payload: Payload, rest: &'a [u8]) -> PayloadView<'a> {
        let view = PayloadView {
            from: self.payload,
            payload,
        };
        self.rest = rest;
        self.payload.advance(view.len());
        view
    }

    /// Whether the walk is at its end.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.left == 0 && self.run.left == 0 && self.bare.is_none()
    }

    /// Passes over a plain ACK, if that is the next chunk: the stream it names, and the next number it wants.
    #[inline(always)]
    pub(crate) fn ack(&mut self) -> Option<(StreamRef, u32)> {
        if self.left == 0 || self.run.left > 0 {
            return None;
        }
        let (stream, base, rest) = plain_ack(self.rest)?;
        self.left -= 1;
        (self.rest, self.before) = (rest, None);
        Some((stream, base))
    }

    /// Passes over plain DATA, if that is the next chunk; its bytes.
    #[inline(always)]
    pub(crate) fn data(&mut self) -> Option<(PlainData, PayloadView<'a>)> {
        if self.left == 0 || self.run.left > 0 {
            return None;
        }
        let (data, rest) = plain_data(self.rest)?;
        self.left -= 1;
        self.before = None;
        let view = self.step(data.payload, rest);
        Some((data, view))
    }

    /// The next chunk, if it is a short message; it stays the next one until [`Self::pass`].
    #[inline(always)]
    pub(crate) fn short(&mut self) -> Option<Short<'a>> {
        if self.run.left > 0 {
            return self.short_of_run();
        }
        if self.left == 0 {
            return None;
        }
        let Some((eager, rest)) = next_eager(self.rest, self.before.as_ref()) else {
            self.before?;
            let (run, rest) = plain_run(self.rest)?;
            self.left -= 1;
            self.enter(run, rest);
            return self.short_of_run();
        };
        let Position { segments, at } = self.payload;
        let bytes = segments
            .first()?
            .get(at..at + usize::from(eager.payload.len))?;
        (!bytes.is_empty()).then(|| Short::of(&eager, bytes, rest))
    }

    /// The next message of a RUN, unless that is damaged.
    #[inline]
    fn short_of_run(&self) -> Option<Short<'a>> {
        let Position { segments, at } = self.payload;
        let bytes = segments.first()?.get(at..at + usize::from(self.run.len))?;
        let Before {
            stream,
            number,
            tag,
            ack,
        } = self.before?;
        self.run.good.then_some(Short {
            stream,
            number: number.wrapping_add(1),
            tag,
            ack,
            crc: None,
            bytes,
            rest: self.rest,
        })
    }

    /// Passes over the short message that is the next chunk.
    #[inline]
    pub(crate) fn pass(&mut self, short: &Short<'a>) {
        match short.crc {
            Some(_) => self.left = self.left.saturating_sub(1),
            None => self.run.left = self.run.left.saturating_sub(1),
        }
        self.rest = short.rest;
        self.before = Some(Before {
            stream: short.stream,
            number: short.number,
            tag: short.tag,
            ack: short.ack,
        });
        self.payload.at += short.bytes.len(); // it lies in the segment
    }
}

/// A message in the plainest form there is: an EAGER without START whose payload is not empty and lies in one segment.
pub(crate) struct Short<'a> {
    pub stream: StreamRef,
    pub number: u32,
    pub tag: u64,
    pub ack: AckMode,
    /// The CRC32C that the bytes, which nobody has checked yet, must have; `None`: they are of a RUN that was checked.
    pub crc: Option<u32>,
    pub bytes: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Short<'a> {
    /// Of an EAGER, its payload, and the headers behind its own.
    #[inline(always)]
    pub(super) fn of(eager: &PlainEager, bytes: &'a [u8], rest: &'a [u8]) -> Self {
        let Before {
            stream,
            number,
            tag,
            ack,
        } = eager.before;
        Self {
            stream,
            number,
            tag,
            ack,
            crc: Some(eager.payload.crc),
            bytes,
            rest,
        }
    }
}

/// The bytes that belong to one chunk; nobody has checked them yet.
#[derive(Clone, Copy, Debug)]
pub struct PayloadView<'a> {
    from: Position<'a>,
    payload: Payload,
}

impl<'a> PayloadView<'a> {
    /// Bytes.
    pub fn len(&self) -> usize {
        usize::from(self.payload.len)
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.payload.len == 0
    }

    /// The CRC32C the sender computed. Join the parts' with [`super::crc32c_combine`] and compare before the bytes count.
    pub fn crc(&self) -> u32 {
        self.payload.crc
    }

    /// The bytes in order, one non-empty slice per segment they lie in.
    pub fn parts(&self) -> Parts<'a> {
        Parts {
            from: self.from,
            left: self.len(),
        }
    }

    /// Reads the bytes once and compares their CRC32C.
    pub fn verify(&self) -> bool {
        self.parts().fold(0, crc32c_append) == self.payload.crc
    }
}

/// Iterator over a payload's parts; see [`PayloadView::parts`].
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    from: Position<'a>,
    left: usize,
}

impl<'a> Iterator for Parts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while self.left > 0
            && let [first, ..] = self.from.segments
        {
            let here = &first[self.from.at..];
            let part = &here[..here.len().min(self.left)];
            if part.is_empty() && self.from.segments.len() == 1 {
                return None; // impossible after `parse`: the payloads lie inside the segments
            }
            self.from.advance(part.len());
            self.left -= part.len();
            if !part.is_empty() {
                return Some(part);
            }
        }
        None
    }
}
