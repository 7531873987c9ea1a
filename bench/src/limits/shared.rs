//! What a relay and its application share: two one-way channels in one memory.
//!
//! A channel is a ring of slots and an arena. A slot is two cache lines: a state word, a length, and the payload if it is short. The
//! state word alone says whose the slot is, so neither side ever reads the other's index: a message costs one line moved, or none
//! when both run on one core. Longer payloads lie in the arena, one behind the other; what the reader is done with it adds to `taken`.
//!
//! | word | writer | reader | order | publishes |
//! |---|---|---|---|---|
//! | `state` = FULL | producer | consumer | Release, Acquire | the slot, and its payload in the arena |
//! | `state` = EMPTY | consumer | producer | Release, Acquire | that the slot was read |
//! | `taken` | consumer | producer | Release, Acquire | that so many bytes of the arena were read |

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::cases::window;

/// Bytes that travel in a slot.
pub const INLINE: usize = 104;
/// Slots of a channel.
const SLOTS: usize = 1024;
/// Bytes of an arena: four of the longest messages.
const ARENA: usize = 64 << 20;

/// Bytes of an arena that messages of most lengths use. Faulted in at once: a limit that waits for pages is none.
const USUAL: usize = 8 << 20;

const EMPTY: u32 = 0;
const FULL: u32 = 1;

#[repr(C, align(128))]
struct Slot {
    state: AtomicU32,
    bytes: AtomicU32,
    at: AtomicU32,
    _pad: u32,
    /// What `taken` is to be when this message has been read; 0: nothing of it lies in the arena.
    until: AtomicU64,
    inline: [AtomicU64; INLINE / 8],
}

#[repr(C, align(128))]
struct Channel {
    slots: [Slot; SLOTS],
    taken: AtomicU64,
    /// What the producer had to drop: counted, and told to the consumer.
    dropped: AtomicU64,
    _line: [u64; 14],
}

#[repr(C, align(4096))]
struct Layout {
    channels: [Channel; 2],
}

const HEAD: usize = size_of::<Layout>();
const BYTES: usize = HEAD + 2 * ARENA;
const _: () = assert!(size_of::<Slot>() == 128 && HEAD.is_multiple_of(4096));

/// Makes such a memory; it can be opened at the path as long as the descriptor lives.
pub fn create() -> Result<(OwnedFd, PathBuf)> {
    let memory = memfd_create("limit-relay", MemfdFlags::CLOEXEC).context("memfd")?;
    ftruncate(&memory, BYTES as u64).context("memfd")?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    Ok((memory, path.into()))
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toward {
    /// From the application to its relay.
    Relay,
    /// From the relay to its application.
    Application,
}

/// The memory, mapped.
struct Mapping(NonNull<u8>);

impl Mapping {
    fn open(path: &Path) -> Result<Self> {
        let what = || path.display().to_string();
        let file = File::options().read(true).write(true).open(path);
        let file = file.with_context(what)?;
        ensure!(file.metadata()?.len() == BYTES as u64, "another memory");
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address of the kernel's choice; the file was just seen to be as long, and whoever made it
        // never makes it shorter.
        let first = unsafe { mmap(std::ptr::null_mut(), BYTES, prot, flags, &file, 0) };
        let first = NonNull::new(first.with_context(what)?.cast());
        let mapping = Self(first.context("mapped at 0")?);
        for toward in [Toward::Relay, Toward::Application] {
            let arena = mapping.arena(toward).as_ptr().cast();
            // SAFETY: inside the mapping; the advice changes no byte. Kernels that do not know it fault the pages in later.
            let _ = unsafe { madvise(arena, USUAL, Advice::LinuxPopulateWrite) };
        }
        Ok(mapping)
    }

    fn channel(&self, toward: Toward) -> &Channel {
        // SAFETY: mapped for as long as `self` lives, a page's alignment, made of atomics alone, and zero is a valid value of it all.
        let layout = unsafe { self.0.cast::<Layout>().as_ref() };
        let [to_relay, to_application] = &layout.channels;
        match toward {
            Toward::Relay => to_relay,
            Toward::Application => to_application,
        }
    }

    fn arena(&self, toward: Toward) -> NonNull<u8> {
        let at = HEAD
            + match toward {
                Toward::Relay => 0,
                Toward::Application => ARENA,
            };
        // SAFETY: inside the mapping, which holds both arenas behind the head.
        unsafe { self.0.add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and what borrows from it has ended.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

/// The end that writes.
pub struct Producer {
    mapping: Mapping,
    toward: Toward,
    next: usize,
    /// How much of the arena is used, and where it goes on.
    extent: usize,
    position: usize,
    /// Bytes of the arena given out since the beginning, and as `taken` was last seen.
    given: u64,
    taken: u64,
    /// `given` and `position` before the last piece was given out.
    before: (u64, usize),
}

/// The end that reads.
pub struct Consumer {
    mapping: Mapping,
    toward: Toward,
    next: usize,
}

/// A message in a channel.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its length.
    pub bytes: usize,
    /// Where it begins in the arena, if it lies there.
    pub at: usize,
}

impl Producer {
    pub fn open(path: &Path, toward: Toward) -> Result<Self> {
        Ok(Self {
            mapping: Mapping::open(path)?,
            toward,
            next: 0,
            extent: 0,
            position: 0,
            given: 0,
            taken: 0,
            before: (0, 0),
        })
    }

    /// Whether there is a free slot.
    pub fn has_room(&self) -> bool {
        let slot = &self.mapping.channel(self.toward).slots[self.next];
        slot.state.load(Ordering::Acquire) == EMPTY
    }

    /// Tells the consumer how much was dropped so far.
    pub fn tell_dropped(&self, count: u64) {
        let dropped = &self.mapping.channel(self.toward).dropped;
        dropped.store(count, Ordering::Relaxed);
    }

    /// Whether everything was read.
    pub fn is_empty(&self) -> bool {
        // They are read in order.
        let last = (self.next + SLOTS - 1) % SLOTS;
        let slot = &self.mapping.channel(self.toward).slots[last];
        slot.state.load(Ordering::Acquire) == EMPTY
    }

    /// Publishes a message with its payload in `inline`, or in the arena where it was reserved `at`, or nowhere. There is room.
    pub fn push(&mut self, bytes: usize, at: Option<usize>, inline: &[u8]) {
        let slot = &self.mapping.channel(self.toward).slots[self.next];
        slot.bytes.store(bytes as u32, Ordering::Relaxed);
        slot.at.store(at.unwrap_or(0) as u32, Ordering::Relaxed);
        let until = at.map_or(0, |_| self.given);
        slot.until.store(until, Ordering::Relaxed);
        for (to, from) in slot.inline.iter().zip(inline.chunks(8)) {
            let mut word = [0; 8];
            word[..from.len()].copy_from_slice(from);
            to.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        slot.state.store(FULL, Ordering::Release);
        self.next = (self.next + 1) % SLOTS;
    }

    /// So much of the arena, in one piece; `None`: not now. As much of it is used as may be under way at this length.
    pub fn reserve(&mut self, bytes: usize) -> Option<usize> {
        let len = bytes.next_multiple_of(64).max(64);
        let extent = (window(bytes) * len).min(ARENA);
        if len > extent {
            return None;
        }
        if self.extent != extent {
            // Another length: begins anew when nothing of the last is left.
            if self.given != self.seen() {
                return None;
            }
            (self.extent, self.position) = (extent, 0);
        }
        // What does not fit before the end is skipped.
        let (at, skipped) = match self.position + len <= extent {
            true => (self.position, 0),
            false => (0, extent - self.position),
        };
        let given = self.given + (skipped + len) as u64;
        if given - self.taken > extent as u64 && given - self.seen() > extent as u64 {
            return None;
        }
        self.before = (self.given, self.position);
        (self.given, self.position) = (given, at + len);
        Some(at)
    }

    /// What was reserved last is not needed: its message will not be pushed, so nobody would ever say that it was taken.
    pub fn take_back(&mut self) {
        (self.given, self.position) = self.before;
    }

    fn seen(&mut self) -> u64 {
        let taken = &self.mapping.channel(self.toward).taken;
        self.taken = taken.load(Ordering::Acquire);
        self.taken
    }

    /// A part of the arena, to be written.
    pub fn room(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        let at = at.min(ARENA);
        let bytes = bytes.min(ARENA - at);
        // SAFETY: inside the arena. Reserved, so the consumer has not been told of it yet and is done with what was there.
        unsafe {
            let first = self.mapping.arena(self.toward).add(at);
            std::slice::from_raw_parts_mut(first.as_ptr(), bytes)
        }
    }
}

impl Consumer {
    pub fn open(path: &Path, toward: Toward) -> Result<Self> {
        Ok(Self {
            mapping: Mapping::open(path)?,
            toward,
            next: 0,
        })
    }

    fn slot(&self) -> &Slot {
        &self.mapping.channel(self.toward).slots[self.next]
    }

    /// The oldest message; it stays until [`Consumer::pop`].
    pub fn peek(&self) -> Option<Entry> {
        let slot = self.slot();
        if slot.state.load(Ordering::Acquire) != FULL {
            return None;
        }
        Some(Entry {
            bytes: slot.bytes.load(Ordering::Relaxed) as usize,
            at: slot.at.load(Ordering::Relaxed) as usize,
        })
    }

    /// How much the producer said it dropped.
    pub fn dropped(&self) -> u64 {
        let dropped = &self.mapping.channel(self.toward).dropped;
        dropped.load(Ordering::Relaxed)
    }

    /// The payload in the oldest message's slot, as far as `into` goes.
    pub fn inline(&self, into: &mut [u8]) {
        for (from, to) in self.slot().inline.iter().zip(into.chunks_mut(8)) {
            let word = from.load(Ordering::Relaxed).to_ne_bytes();
            to.copy_from_slice(&word[..to.len()]);
        }
    }

    /// Payload in the arena.
    pub fn payload(&self, at: usize, bytes: usize) -> &[u8] {
        let at = at.min(ARENA);
        let bytes = bytes.min(ARENA - at);
        // SAFETY: inside the arena, and the producer writes only what it was told to be taken.
        unsafe {
            let first = self.mapping.arena(self.toward).add(at);
            std::slice::from_raw_parts(first.as_ptr(), bytes)
        }
    }

    /// Done with the oldest message.
    pub fn pop(&mut self) {
        let slot = self.slot();
        let until = slot.until.load(Ordering::Relaxed);
        if until != 0 {
            let taken = &self.mapping.channel(self.toward).taken;
            taken.store(until, Ordering::Release);
        }
        slot.state.store(EMPTY, Ordering::Release);
        self.next = (self.next + 1) % SLOTS;
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn channel() -> (OwnedFd, Producer, Consumer) {
        let (memory, path) = create().unwrap();
        let producer = Producer::open(&path, Toward::Relay).unwrap();
        let consumer = Consumer::open(&path, Toward::Relay).unwrap();
        (memory, producer, consumer)
    }

    // Short messages until the ring is full. Expect: all of them, whole and in order, and room again after each that is taken.
    #[test]
    fn short_messages_pass_in_order() {
        let (_memory, mut producer, mut consumer) = channel();
        let mut sent = 0u32;
        while producer.has_room() {
            producer.push(20, None, &[sent.to_ne_bytes(); 5].concat());
            sent += 1;
        }
        assert_eq!(sent as usize, SLOTS);
        for number in 0..sent {
            let entry = consumer.peek().unwrap();
            assert_eq!(entry.bytes, 20);
            let mut inline = [0; 20];
            consumer.inline(&mut inline);
            assert_eq!(inline, [number.to_ne_bytes(); 5].concat()[..]);
            consumer.pop();
            assert!(producer.has_room());
        }
        assert!(consumer.peek().is_none());
    }

    // Room for a message that is then given up, the last of its length. Expect: the arena is as empty as before, and begins anew at the
    // next length.
    #[test]
    fn what_is_taken_back_is_not_waited_for() {
        let (_memory, mut producer, mut consumer) = channel();
        let at = producer.reserve(5000);
        producer.push(5000, at, &[]);
        consumer.pop();
        assert!(producer.reserve(5000).is_some());
        producer.take_back();
        assert!(producer.reserve(100).is_some());
    }

    // Messages in the arena, more than fit. Expect: as many as the window allows, none over another, and room for one more when one
    // was read.
    #[test]
    fn the_arena_holds_a_window_and_no_more() {
        let (_memory, mut producer, mut consumer) = channel();
        let bytes = 3 << 20;
        for round in 0..20u8 {
            let mut places = Vec::new();
            while let Some(at) = producer.reserve(bytes) {
                producer.room(at, bytes).fill(round);
                producer.push(bytes, Some(at), &[]);
                places.push(at);
            }
            assert!((3..=window(bytes)).contains(&places.len()), "{places:?}");
            for (number, at) in places.iter().enumerate() {
                let entry = consumer.peek().unwrap();
                assert_eq!(entry.at, *at);
                let payload = consumer.payload(entry.at, entry.bytes);
                assert!(payload.iter().all(|byte| *byte == round));
                let apart = |other: &usize| at.abs_diff(*other) >= bytes;
                assert!(places[..number].iter().all(apart));
                consumer.pop();
            }
        }
        // Another length begins when all of the last were read.
        assert!(producer.reserve(100).is_some());
    }
}
