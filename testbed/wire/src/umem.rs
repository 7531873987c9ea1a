//! The one UMEM of the wire, and the frames that lie in it.
//!
//! Each chunk is in exactly one place: the free list, a frame of ours, or a ring of a socket (fill, receive, transmit,
//! completion). Descriptors move between those and are never copied to two; that is what every `unsafe` block here and in
//! `side.rs` leans on.

use std::io::Write;
use std::num::NonZeroU32;

use anyhow::{Context, Result};
use xsk_rs::config::{QueueSize, UmemConfig};
use xsk_rs::{FrameDesc, Umem};

/// Chunks of 4 KiB: 64 MiB, pinned. Most of it is for frames that are delayed.
pub const CHUNKS: u32 = 16 * 1024;
/// Chunks kept back from frames under way, so that sockets can receive.
const RESERVE: usize = 1024;
/// Entries of every ring.
pub const RING: u32 = 4096;
/// Pieces of the longest frame: 9000 bytes and an Ethernet header.
const PIECES: usize = 3;

/// The memory of the wire.
#[derive(Debug)]
pub struct Memory {
    pub umem: Umem,
    free: Vec<FrameDesc>,
    blank: FrameDesc,
}

/// A whole frame; only [`Memory::drop_frame`] and a transmit ring end it.
#[derive(Debug)]
pub struct Frame {
    pieces: [FrameDesc; PIECES],
    count: usize,
    /// The queue it came in on.
    pub queue: usize,
}

impl Memory {
    pub fn new() -> Result<Self> {
        let ring = QueueSize::new(RING)?;
        let config = UmemConfig::builder()
            .fill_queue_size(ring)
            .comp_queue_size(ring)
            .build()?;
        let chunks = NonZeroU32::new(CHUNKS).context("no chunks")?;
        let (umem, free) = Umem::new(config, chunks, false).context("UMEM")?;
        let blank = *free.first().context("no chunks")?;
        Ok(Self { umem, free, blank })
    }

    /// A descriptor to be overwritten: xsk-rs has no other way to make one.
    pub fn blank(&self) -> FrameDesc {
        self.blank
    }

    /// Whether a frame may be kept: what sockets receive into is not short.
    pub fn has_room(&self) -> bool {
        self.free.len() >= RESERVE
    }

    /// Up to `count` free chunks.
    pub fn take(&mut self, count: usize) -> std::vec::Drain<'_, FrameDesc> {
        let from = self.free.len().saturating_sub(count);
        self.free.drain(from..)
    }

    /// Chunks that came out of a ring or of [`Self::take`].
    pub fn give_back(&mut self, chunks: &[FrameDesc]) {
        self.free.extend_from_slice(chunks);
    }

    pub fn drop_frame(&mut self, frame: &Frame) {
        self.give_back(frame.pieces());
    }

    /// The first bytes of a frame, as many as lie together.
    pub fn head(&self, frame: &Frame) -> &[u8] {
        // SAFETY: the chunk is this frame's, so in no ring and nobody writes it; the length is what the kernel wrote.
        unsafe { self.umem.data(&frame.pieces[0]) }.contents()
    }

    /// A frame's bytes, piece by piece.
    pub fn pieces<'a>(&'a self, frame: &'a Frame) -> impl Iterator<Item = &'a [u8]> {
        // SAFETY: as in `head`.
        let contents = |piece| unsafe { self.umem.data(piece) }.contents();
        frame.pieces().iter().map(contents)
    }

    /// Flips the bit that `word` chooses, behind the Ethernet header.
    pub fn corrupt(&mut self, frame: &mut Frame, word: u64) {
        const HEADER: usize = 14;
        let bits = (frame.bytes().saturating_sub(HEADER) * 8) as u64;
        if bits == 0 {
            return;
        }
        let bit = (word % bits) as usize;
        let mut at = HEADER + bit / 8;
        for piece in &mut frame.pieces[..frame.count] {
            let len = piece.lengths().data();
            if at < len {
                // SAFETY: as in `head`, and we hold the frame alone.
                let mut data = unsafe { self.umem.data_mut(piece) };
                if let Some(byte) = data.contents_mut().get_mut(at) {
                    *byte ^= 1 << (bit % 8);
                }
                return;
            }
            at -= len;
        }
    }

    /// The same frame once more; `None` when memory is short.
    pub fn copy(&mut self, frame: &Frame) -> Option<Frame> {
        if !self.has_room() {
            return None;
        }
        let mut copy = Frame::empty(frame.queue, self.blank);
        for piece in frame.pieces() {
            let mut chunk = self.free.pop()?;
            // SAFETY: as in `head`.
            let from = unsafe { self.umem.data(piece) };
            // SAFETY: a free chunk is in no ring and nobody's.
            let mut to = unsafe { self.umem.data_mut(&mut chunk) };
            let mut cursor = to.cursor();
            cursor.set_pos(0);
            // Both chunks have the same room.
            let written = cursor.write(from.contents());
            if !copy.push(chunk) || written.is_err() {
                self.drop_frame(&copy);
                return None;
            }
        }
        Some(copy)
    }
}

impl Frame {
    pub fn empty(queue: usize, blank: FrameDesc) -> Self {
        Self {
            pieces: [blank; PIECES],
            count: 0,
            queue,
        }
    }

    /// Appends a piece; false when it has too many.
    pub fn push(&mut self, piece: FrameDesc) -> bool {
        let Some(place) = self.pieces.get_mut(self.count) else {
            return false;
        };
        *place = piece;
        self.count += 1;
        true
    }

    pub fn pieces(&self) -> &[FrameDesc] {
        &self.pieces[..self.count]
    }

    /// The pieces as a transmit ring wants them: all but the last say that the frame goes on.
    pub fn sendable(&mut self) -> &[FrameDesc] {
        let last = self.count.saturating_sub(1);
        for (nth, piece) in self.pieces[..self.count].iter_mut().enumerate() {
            piece.set_options(u32::from(nth < last));
        }
        self.pieces()
    }

    /// Its length with the Ethernet header.
    pub fn bytes(&self) -> usize {
        self.pieces()
            .iter()
            .map(|piece| piece.lengths().data())
            .sum()
    }
}
