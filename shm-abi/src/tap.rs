//! The ring on which an engine puts copies of the frames that pass it, for whoever captures them.
//!
//! Two memfds. The *ring* is the engine's: a header page, then slots of one size. The *mark* is the reader's: how far it has read. The reader has
//! the ring read-only. The engine never waits: without a free slot it counts the frame as dropped.
//!
//! | word | in | writer | reader | store | load | publishes |
//! |---|---|---|---|---|---|---|
//! | produced | ring | engine | who captures | Release | Acquire | the slots before it |
//! | dropped, state, epoch | ring | engine | who captures | Release | Acquire | nothing |
//! | consumed | mark | who captures | engine | Release | Acquire | that the slots before it may be overwritten |
//!
//! An engine that dies leaves a ring that is true up to *produced*; its successor goes on there. Both sides take the other's words for claims: an
//! absurd *consumed* reads as a full ring, an absurd *produced* or length is counted and passed over.

use std::io;
use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use crate::atomic::{AtomicU64, Ordering};
use crate::memory::Mapping;
use crate::port::PAGE;

/// First word of the ring; the last character is the layout's version.
pub const TAP_MAGIC: u64 = u64::from_be_bytes(*b"PTLNTAP1");
/// Bytes of the mark's memfd.
pub const MARK_BYTES: usize = PAGE;
/// Longest part of a frame that is kept.
pub const MAX_SNAPLEN: u32 = 16 * 1024;
/// Most slots.
pub const MAX_SLOTS: u32 = 1 << 16;

/// Words before the bytes of a frame: when, lengths, what, its number.
const HEAD_WORDS: usize = 4;
const MAGIC: usize = 0;
const STATE: usize = 8;
const EPOCH: usize = 16;
const PRODUCED: usize = 64;
const DROPPED: usize = 128;

/// What an engine does with its tap.
pub mod state {
    /// No engine has it yet.
    pub const NEW: u64 = 0;
    /// Frames are recorded.
    pub const ON: u64 = 1;
    /// The engine was told to stop.
    pub const ENDED: u64 = 2;
}

/// Layout of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapGeometry {
    /// Slots; a power of two.
    pub slots: u32,
    /// Bytes of each frame that are kept; a multiple of 8.
    pub snaplen: u32,
}

impl TapGeometry {
    /// The largest ring of at most `bytes` bytes for frames of at most `longest` bytes, of each of which `snaplen` are wanted.
    pub fn fitting(bytes: u64, snaplen: u32, longest: u32) -> Self {
        let snaplen = snaplen.clamp(64, MAX_SNAPLEN).min(longest.max(64));
        let snaplen = snaplen.next_multiple_of(8).min(MAX_SNAPLEN);
        let slot = u64::from(snaplen) + HEAD_WORDS as u64 * 8;
        let slots = (bytes / slot).clamp(16, u64::from(MAX_SLOTS)) as u32;
        Self {
            // The power of two at or below.
            slots: 1 << slots.ilog2(),
            snaplen,
        }
    }

    /// Is it within limits?
    pub fn is_valid(&self) -> bool {
        self.slots.is_power_of_two()
            && self.slots <= MAX_SLOTS
            && self.snaplen.is_multiple_of(8)
            && (8..=MAX_SNAPLEN).contains(&self.snaplen)
    }

    fn slot_words(&self) -> usize {
        HEAD_WORDS + self.snaplen as usize / 8
    }

    /// Bytes of the ring's memfd.
    pub fn bytes(&self) -> usize {
        PAGE + (self.slots as usize * self.slot_words() * 8).next_multiple_of(PAGE)
    }

    fn check(&self) -> io::Result<()> {
        if self.is_valid() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the layout of a tap is out of limits",
        ))
    }
}

/// Which way a frame went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Came from the wire: a whole Ethernet frame.
    Received = 1,
    /// Went to the wire: a whole Ethernet frame.
    Sent = 2,
    /// From the engine to itself: a transport frame.
    Looped = 3,
    /// Handed to another engine of the node: a transport frame.
    CrossedOut = 4,
    /// Taken from another engine of the node: a transport frame.
    CrossedIn = 5,
}

impl Way {
    fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Received,
            2 => Self::Sent,
            3 => Self::Looped,
            4 => Self::CrossedOut,
            5 => Self::CrossedIn,
            _ => return None,
        })
    }
}

/// What is known of a frame beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passing {
    /// When, CLOCK_MONOTONIC nanoseconds.
    pub at: u64,
    /// Which way.
    pub way: Way,
    /// The node at the other end; 0 if unknown.
    pub peer: u16,
    /// The queue of the engine at the other end.
    pub queue: u8,
    /// Length of the whole frame, bytes.
    pub length: u32,
}

fn slot(ring: &Mapping, geometry: TapGeometry, number: u64) -> &[AtomicU64] {
    let index = (number % u64::from(geometry.slots)) as usize;
    let words = geometry.slot_words();
    ring.words(PAGE + index * words * 8, words)
}

/// The engine's end.
pub struct TapWriter {
    ring: Mapping,
    mark: Mapping,
    geometry: TapGeometry,
    next: u64,
    dropped: u64,
    scratch: Vec<u8>,
}

impl TapWriter {
    /// Maps a ring and its mark.
    ///
    /// # Errors
    /// They are not what they should be; or the system's.
    pub fn map(
        ring: BorrowedFd<'_>,
        mark: BorrowedFd<'_>,
        geometry: TapGeometry,
    ) -> io::Result<Self> {
        geometry.check()?;
        let mut writer = Self {
            ring: Mapping::new(ring, geometry.bytes(), true)?,
            mark: Mapping::new(mark, MARK_BYTES, true)?,
            geometry,
            next: 0,
            dropped: 0,
            scratch: Vec::with_capacity(geometry.snaplen as usize),
        };
        writer.read_position();
        Ok(writer)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.ring.words(at, 1)[0]
    }

    fn read_position(&mut self) {
        self.next = self.word(PRODUCED).load(Ordering::Acquire);
        self.dropped = self.word(DROPPED).load(Ordering::Relaxed);
    }

    /// Records from now on, from where a predecessor stopped if there was one.
    pub fn begin(&mut self, engine_epoch: u32) {
        self.read_position();
        self.word(EPOCH)
            .store(engine_epoch.into(), Ordering::Relaxed);
        self.word(STATE).store(state::ON, Ordering::Release);
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> u64 {
        (self.geometry.bytes() + MARK_BYTES) as u64
    }

    /// Copies as much of a frame as is wanted, unless the ring is full.
    pub fn record(&mut self, passing: &Passing, segments: &[&[u8]]) {
        // SYNC(tap-consumed)
        let consumed = self.mark.words(0, 1)[0].load(Ordering::Acquire);
        let waiting = self.next.checked_sub(consumed);
        if waiting.is_none_or(|frames| frames >= u64::from(self.geometry.slots)) {
            self.dropped += 1;
            self.word(DROPPED).store(self.dropped, Ordering::Release);
            return;
        }
        self.scratch.clear();
        for segment in segments {
            let room = self.geometry.snaplen as usize - self.scratch.len();
            let part = segment.get(..room.min(segment.len())).unwrap_or_default();
            self.scratch.extend_from_slice(part);
        }
        let kept = self.scratch.len() as u64;
        let (head, body) = slot(&self.ring, self.geometry, self.next).split_at(HEAD_WORDS);
        let what = u64::from(passing.way as u8)
            | u64::from(passing.queue) << 8
            | u64::from(passing.peer) << 16;
        let words = [
            passing.at,
            u64::from(passing.length) << 32 | kept,
            what,
            self.next,
        ];
        for (word, value) in head.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        for (word, chunk) in body.iter().zip(self.scratch.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        self.next += 1;
        // SYNC(tap-produced)
        self.word(PRODUCED).store(self.next, Ordering::Release);
    }

    /// Says that no more comes.
    pub fn end(&self) {
        self.word(STATE).store(state::ENDED, Ordering::Release);
    }
}

/// The end of who captures.
pub struct TapReader {
    ring: Mapping,
    mark: Mapping,
    geometry: TapGeometry,
    next: u64,
    nonsense: u64,
}

impl TapReader {
    /// Maps a ring for reading, and its mark.
    ///
    /// # Errors
    /// They are not what they should be; or the system's.
    pub fn map(
        ring: BorrowedFd<'_>,
        mark: BorrowedFd<'_>,
        geometry: TapGeometry,
    ) -> io::Result<Self> {
        geometry.check()?;
        let reader = Self {
            ring: Mapping::new(ring, geometry.bytes(), false)?,
            mark: Mapping::new(mark, MARK_BYTES, true)?,
            geometry,
            next: 0,
            nonsense: 0,
        };
        if reader.word(MAGIC) != TAP_MAGIC {
            let message = "the tap is of another version; use the command of the daemon's version";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(reader)
    }

    fn word(&self, at: usize) -> u64 {
        self.ring.words(at, 1)[0].load(Ordering::Acquire)
    }

    /// One of [`state`], as the engine says.
    pub fn state(&self) -> u64 {
        self.word(STATE)
    }

    /// The epoch of the engine that records.
    pub fn engine_epoch(&self) -> u32 {
        self.word(EPOCH) as u32
    }

    /// Frames for which there was no room.
    pub fn dropped(&self) -> u64 {
        self.word(DROPPED)
    }

    /// Frames and positions that made no sense.
    pub fn nonsense(&self) -> u64 {
        self.nonsense
    }

    /// Bytes of a frame that are kept.
    pub fn snaplen(&self) -> u32 {
        self.geometry.snaplen
    }

    /// The next frame, its bytes in `to`; `None` if there is none yet. Gives its slot back.
    pub fn next(&mut self, to: &mut Vec<u8>) -> Option<Passing> {
        loop {
            // SYNC(tap-produced)
            let produced = self.word(PRODUCED);
            let waiting = produced.wrapping_sub(self.next);
            if waiting == 0 {
                return None;
            }
            if waiting > u64::from(self.geometry.slots) {
                // Nobody got so far ahead of us: go on from where it says it is.
                self.nonsense += 1;
                self.next = produced;
                self.release();
                return None;
            }
            let passing = self.read(to);
            self.next = self.next.wrapping_add(1);
            self.release();
            if passing.is_some() {
                return passing;
            }
            self.nonsense += 1;
        }
    }

    fn read(&self, to: &mut Vec<u8>) -> Option<Passing> {
        let (head, body) = slot(&self.ring, self.geometry, self.next).split_at(HEAD_WORDS);
        let [at, lengths, what, number] = [0, 1, 2, 3].map(|n| head[n].load(Ordering::Relaxed));
        let (length, kept) = ((lengths >> 32) as u32, lengths as u32);
        if number != self.next || kept > self.geometry.snaplen || kept > length {
            return None;
        }
        let passing = Passing {
            at,
            way: Way::from_code(what as u8)?,
            peer: (what >> 16) as u16,
            queue: (what >> 8) as u8,
            length,
        };
        to.clear();
        for word in body.iter().take((kept as usize).div_ceil(8)) {
            to.extend_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        to.truncate(kept as usize);
        Some(passing)
    }

    fn release(&self) {
        // SYNC(tap-consumed)
        self.mark.words(0, 1)[0].store(self.next, Ordering::Release);
    }
}

/// Writes the header of a fresh ring.
///
/// # Errors
/// The system's.
pub fn initialise(ring: BorrowedFd<'_>, geometry: TapGeometry) -> io::Result<()> {
    geometry.check()?;
    let ring = Mapping::new(ring, geometry.bytes(), true)?;
    ring.words(MAGIC, 1)[0].store(TAP_MAGIC, Ordering::Release);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;
    use crate::memory::create_sealed;

    const GEOMETRY: TapGeometry = TapGeometry {
        slots: 16,
        snaplen: 64,
    };

    fn memory() -> (OwnedFd, OwnedFd) {
        let ring = create_sealed("tap", GEOMETRY.bytes()).unwrap();
        let mark = create_sealed("mark", MARK_BYTES).unwrap();
        initialise(ring.as_fd(), GEOMETRY).unwrap();
        (ring, mark)
    }

    fn ends(ring: &OwnedFd, mark: &OwnedFd) -> (TapWriter, TapReader) {
        (
            TapWriter::map(ring.as_fd(), mark.as_fd(), GEOMETRY).unwrap(),
            TapReader::map(ring.as_fd(), mark.as_fd(), GEOMETRY).unwrap(),
        )
    }

    fn passing(at: u64, length: u32) -> Passing {
        Passing {
            at,
            way: Way::CrossedIn,
            peer: 65_534,
            queue: 63,
            length,
        }
    }

    #[test]
    fn frames_come_out_as_they_went_in_up_to_the_snaplen() {
        let (ring, mark) = memory();
        let (mut writer, mut reader) = ends(&ring, &mark);
        let mut to = Vec::new();
        assert_eq!(reader.next(&mut to), None);
        assert_eq!(reader.state(), state::NEW);
        writer.begin(7);
        assert_eq!((reader.state(), reader.engine_epoch()), (state::ON, 7));
        let bytes: Vec<u8> = (0..200).collect();
        // Round the ring, whatever the segments.
        for length in 0..100usize {
            let (a, b) = bytes[..length].split_at(length / 3);
            let frame = passing(length as u64, length as u32);
            writer.record(&frame, &[a, b]);
            assert_eq!(reader.next(&mut to), Some(frame));
            assert_eq!(to, bytes[..length.min(64)]);
        }
        assert_eq!((reader.dropped(), reader.nonsense()), (0, 0));
        writer.end();
        assert_eq!(reader.state(), state::ENDED);
    }

    #[test]
    fn a_full_ring_drops_and_counts_and_a_successor_goes_on() {
        let (ring, mark) = memory();
        let (mut writer, mut reader) = ends(&ring, &mark);
        for at in 0..20 {
            writer.record(&passing(at, 1), &[b"x"]);
        }
        assert_eq!(reader.dropped(), 4);
        // The writer dies; its successor had mapped the ring long before.
        let (mut successor, _) = ends(&ring, &mark);
        writer.record(&passing(20, 1), &[b"x"]);
        drop(writer);
        successor.begin(2);
        let mut to = Vec::new();
        assert_eq!(reader.next(&mut to).unwrap().at, 0);
        successor.record(&passing(99, 1), &[b"y"]);
        successor.record(&passing(100, 1), &[b"y"]);
        let mut left = Vec::new();
        while let Some(frame) = reader.next(&mut to) {
            left.push(frame.at);
        }
        assert_eq!(left, (1..16).chain([99]).collect::<Vec<_>>());
        assert_eq!((reader.dropped(), reader.nonsense()), (6, 0));
    }

    #[test]
    fn absurd_words_move_nothing_out_of_bounds() {
        let (ring, mark) = memory();
        let (mut writer, mut reader) = ends(&ring, &mark);
        let hostile = Mapping::new(ring.as_fd(), GEOMETRY.bytes(), true).unwrap();
        let set = |at: usize, value| hostile.words(at, 1)[0].store(value, Ordering::Relaxed);
        let mut to = Vec::new();
        // Lengths, ways and numbers that cannot be: passed over.
        for (word, value) in [
            (1, u64::MAX),
            (1, 65 | 65 << 32),
            (1, 2 | 1 << 32),
            (2, 0),
            (2, 6),
            (3, 77),
        ] {
            writer.record(&passing(1, 1), &[b"x"]);
            let at = PAGE + (writer.next - 1) as usize % 16 * GEOMETRY.slot_words() * 8;
            set(at + word * 8, value);
            assert_eq!(reader.next(&mut to), None, "{word} {value:#x}");
        }
        assert_eq!(reader.nonsense(), 6);
        // A position far ahead, or behind.
        for produced in [u64::MAX, 1 << 40, 0] {
            set(PRODUCED, produced);
            assert_eq!(reader.next(&mut to), None);
            assert_eq!(reader.next(&mut to), None);
        }
        assert_eq!(reader.nonsense(), 9);
        // The reader lies: full.
        let lies = Mapping::new(mark.as_fd(), MARK_BYTES, true).unwrap();
        for consumed in [u64::MAX, writer.next + 1] {
            lies.words(0, 1)[0].store(consumed, Ordering::Relaxed);
            let before = writer.dropped;
            writer.record(&passing(1, 1), &[b"x"]);
            assert_eq!(writer.dropped, before + 1);
        }
    }

    #[test]
    fn rings_fit_into_what_they_may_have() {
        for (bytes, snaplen, longest) in [(32 << 20, 65_535, 1514), (1 << 20, 96, 9014), (0, 0, 0)]
        {
            let geometry = TapGeometry::fitting(bytes, snaplen, longest);
            assert!(geometry.is_valid(), "{geometry:?}");
            if bytes > 0 {
                assert!(geometry.bytes() as u64 <= bytes + 2 * PAGE as u64);
                assert!(geometry.bytes() as u64 * 2 > bytes);
            }
        }
        assert_eq!(TapGeometry::fitting(1 << 20, 96, 9014).snaplen, 96);
        assert_eq!(TapGeometry::fitting(1 << 20, 9999, 1514).snaplen, 1520);
        let wrong = [(15, 64), (16, 60), (16, 0), (1 << 17, 64), (16, 1 << 15)];
        for (slots, snaplen) in wrong {
            assert!(!TapGeometry { slots, snaplen }.is_valid());
        }
    }
}
