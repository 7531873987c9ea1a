//! The bounded ring on which frames cross from one engine of a node to another.
//!
//! Two uses: a frame that arrived on a queue whose engine does not own the receiving port, and a message between two ports of this
//! node that different engines own. A full ring drops the frame; the transport sends it again.
//!
//! | word | writer | reader | store | load | publishes |
//! |---|---|---|---|---|---|
//! | producer | sending engine | receiving engine | Release | Acquire | the slots before it |
//! | consumer | receiving engine | sending engine | Release | Acquire | that the slots before it may be overwritten |
//! | sleeping | receiving engine | sending engine | [`doorbell`] | [`doorbell`] | that a wake-up is wanted |
//!
//! The engines of a node trust each other no further than a network: an index that cannot be true never moves ours, a frame is
//! copied out before anything looks at it, and its own CRCs decide. Both ends go on at the published indices after a takeover.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use portolan_abi::doorbell;
use portolan_abi::memory::Mapping;

/// Bytes of a slot: a length word and the longest frame.
pub const SLOT_BYTES: usize = 16 * 1024;
/// Slots of a ring.
pub const SLOTS: usize = 256;
/// Bytes of a ring's memfd: a page for the two indices, then the slots.
pub const CROSSING_BYTES: usize = 4096 + SLOTS * SLOT_BYTES;
/// Longest frame a slot holds.
pub const MAX_CROSSING_FRAME: usize = SLOT_BYTES - 8;

/// The mapped memory of one ring.
struct Memory(Mapping);

impl Memory {
    fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Mapping::new(fd, CROSSING_BYTES, true).map(Self)
    }
    fn producer(&self) -> &AtomicU64 {
        &self.0.words(0, 1)[0]
    }
    fn consumer(&self) -> &AtomicU64 {
        &self.0.words(64, 1)[0]
    }
    fn sleeping(&self) -> &AtomicU32 {
        self.0.half_word(128)
    }
    /// The length word, then the bytes.
    fn slot(&self, index: u32) -> &[AtomicU64] {
        let at = 4096 + index as usize % SLOTS * SLOT_BYTES;
        self.0.words(at, SLOT_BYTES / 8)
    }
}

/// The sending engine's end.
pub struct CrossingSender {
    memory: Memory,
    next: u32,
    wake: bool,
}

impl CrossingSender {
    /// Maps the ring and goes on where the predecessor stopped.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let memory = Memory::map(fd)?;
        let next = memory.producer().load(Ordering::Acquire) as u32;
        Ok(Self {
            memory,
            next,
            wake: false,
        })
    }

    /// Goes on where the engine stopped that has died since we mapped the ring.
    pub fn go_on(&mut self) {
        self.next = self.memory.producer().load(Ordering::Acquire) as u32;
    }

    /// Sends a frame across; false if the ring is full or the frame too long.
    pub fn push(&mut self, segments: &[&[u8]]) -> bool {
        let len: usize = segments.iter().map(|segment| segment.len()).sum();
        // SYNC(crossing-consumer)
        let consumed = self.memory.consumer().load(Ordering::Acquire) as u32;
        let waiting = self.next.wrapping_sub(consumed) as usize;
        if waiting > SLOTS {
            // Nonsense, or it has followed nonsense in our own word: it is told where we are and follows. The frame is lost.
            self.publish();
            return false;
        }
        if waiting == SLOTS || len > MAX_CROSSING_FRAME {
            return false;
        }
        let (head, body) = match self.memory.slot(self.next).split_first() {
            Some(split) => split,
            None => return false,
        };
        head.store(len as u64, Ordering::Relaxed);
        let mut words = body.iter();
        let mut pending = [0u8; 8];
        let mut held = 0;
        for segment in segments {
            let mut rest = *segment;
            // Finish the word the last segment left unfinished.
            if held > 0 {
                let take = rest.len().min(8 - held);
                pending[held..held + take].copy_from_slice(&rest[..take]);
                held += take;
                rest = &rest[take..];
                if held < 8 {
                    continue;
                }
                store(words.next(), pending);
            }
            let mut chunks = rest.chunks_exact(8);
            for (chunk, word) in (&mut chunks).zip(&mut words) {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(chunk);
                store(Some(word), bytes);
            }
            let left = chunks.remainder();
            pending[..left.len()].copy_from_slice(left);
            held = left.len();
        }
        if held > 0 {
            store(words.next(), pending);
        }
        self.next = self.next.wrapping_add(1);
        self.publish();
        true
    }

    fn publish(&mut self) {
        // SYNC(crossing-producer)
        self.memory
            .producer()
            .store(u64::from(self.next), Ordering::Release);
        self.wake = true;
    }

    /// Must the receiving engine be woken for what was pushed since the last call?
    pub fn wants_wake(&mut self) -> bool {
        std::mem::take(&mut self.wake) && doorbell::must_ring(self.memory.sleeping())
    }
}

fn store(word: Option<&AtomicU64>, bytes: [u8; 8]) {
    if let Some(word) = word {
        word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
    }
}

/// The receiving engine's end.
pub struct CrossingReceiver {
    memory: Memory,
    next: u32,
    /// Times the producer's index could not be true.
    pub jumps: u64,
}

impl CrossingReceiver {
    /// Maps the ring and goes on where the predecessor stopped.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let memory = Memory::map(fd)?;
        let next = memory.consumer().load(Ordering::Acquire) as u32;
        Ok(Self {
            memory,
            next,
            jumps: 0,
        })
    }

    /// Goes on where the engine stopped that has died since we mapped the ring.
    pub fn go_on(&mut self) {
        self.next = self.memory.consumer().load(Ordering::Acquire) as u32;
    }

    /// Frames that wait.
    pub fn available(&mut self) -> usize {
        // SYNC(crossing-producer)
        let produced = self.memory.producer().load(Ordering::Acquire) as u32;
        let available = produced.wrapping_sub(self.next) as usize;
        if available > SLOTS {
            // Nonsense: go on from where it says it is; the frames in between are lost, which the transport survives.
            self.jumps += 1;
            self.next = produced;
            self.release();
            return 0;
        }
        available
    }

    /// Copies the next of the [`Self::available`] frames and gives its slot back; `None` if its length is nonsense.
    pub fn pop<'b>(&mut self, to: &'b mut [u8]) -> Option<&'b [u8]> {
        let slot = self.memory.slot(self.next);
        let len = usize::try_from(slot[0].load(Ordering::Relaxed)).ok();
        let copied = len
            .filter(|len| *len <= MAX_CROSSING_FRAME)
            .and_then(|len| to.get_mut(..len))
            .map(|to| {
                for (bytes, word) in to.chunks_mut(8).zip(&slot[1..]) {
                    let word = word.load(Ordering::Relaxed).to_le_bytes();
                    bytes.copy_from_slice(&word[..bytes.len()]);
                }
                &*to
            });
        self.next = self.next.wrapping_add(1);
        self.release();
        copied
    }

    fn release(&self) {
        // SYNC(crossing-consumer)
        self.memory
            .consumer()
            .store(u64::from(self.next), Ordering::Release);
    }

    /// Says whether this engine sleeps; after saying so the caller looks for work once more.
    pub fn announce_sleep(&self, asleep: bool) {
        if asleep {
            doorbell::announce(self.memory.sleeping());
        } else {
            doorbell::withdraw(self.memory.sleeping());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use portolan_abi::memory::create_sealed;

    use super::*;

    fn ring() -> (CrossingSender, CrossingReceiver, Mapping) {
        let fd = create_sealed("crossing", CROSSING_BYTES).unwrap();
        let hostile = Mapping::new(fd.as_fd(), CROSSING_BYTES, true).unwrap();
        (
            CrossingSender::map(fd.as_fd()).unwrap(),
            CrossingReceiver::map(fd.as_fd()).unwrap(),
            hostile,
        )
    }

    #[test]
    fn frames_arrive_whole_whatever_their_segments() {
        let (mut sender, mut receiver, _) = ring();
        let bytes: Vec<u8> = (0..9000u32).map(|i| (i * 7) as u8).collect();
        let mut to = vec![0; SLOT_BYTES];
        for cut in [0, 1, 3, 8, 9, 4000, 8999, 9000] {
            for len in [cut, 9000] {
                let (a, b) = bytes[..len].split_at(cut);
                assert!(sender.push(&[a, &b[..b.len() / 3], &b[b.len() / 3..]]));
                assert_eq!(receiver.available(), 1);
                assert_eq!(receiver.pop(&mut to).unwrap(), &bytes[..len]);
                assert_eq!(receiver.available(), 0);
            }
        }
    }

    #[test]
    fn a_full_ring_refuses_and_goes_on() {
        let (mut sender, mut receiver, _) = ring();
        for i in 0..SLOTS {
            assert!(sender.push(&[&[i as u8]]));
        }
        assert!(!sender.push(&[b"lost"]));
        let mut to = vec![0; SLOT_BYTES];
        assert_eq!(receiver.pop(&mut to).unwrap(), &[0]);
        assert!(sender.push(&[b"x"]));
        assert_eq!(receiver.available(), SLOTS);
        assert!(!sender.push(&[&vec![0; MAX_CROSSING_FRAME + 1]]));
    }

    #[test]
    fn absurd_indices_and_lengths_move_nothing_of_ours() {
        let (mut sender, mut receiver, hostile) = ring();
        let mut to = vec![0; SLOT_BYTES];
        // The receiver lies: full.
        hostile.words(64, 1)[0].store(77, Ordering::Relaxed);
        assert!(!sender.push(&[b"x"]));
        hostile.words(64, 1)[0].store(0, Ordering::Relaxed);
        // The sender's index jumps: counted, followed, and the ring works again.
        hostile.words(0, 1)[0].store(100_000, Ordering::Relaxed);
        assert_eq!(receiver.available(), 0);
        assert_eq!(receiver.jumps, 1);
        // The sender itself knows better, and says so.
        assert!(!sender.push(&[b"x"]));
        assert_eq!((receiver.available(), receiver.jumps), (0, 2));
        assert!(sender.push(&[b"x"]));
        assert_eq!(receiver.available(), 1);
        assert_eq!(receiver.pop(&mut to), Some(&b"x"[..]));
        hostile.words(0, 1)[0].store(100_001, Ordering::Relaxed);
        // The length lies.
        let at = 4096 + 100_000 % SLOTS * SLOT_BYTES;
        for len in [MAX_CROSSING_FRAME as u64 + 1, u64::MAX] {
            hostile.words(at, 1)[0].store(len, Ordering::Relaxed);
            receiver.next = 100_000;
            assert_eq!(receiver.available(), 1);
            assert_eq!(receiver.pop(&mut to), None);
        }
    }

    #[test]
    fn a_sleeping_receiver_is_woken_once() {
        let (mut sender, receiver, _) = ring();
        assert!(!sender.wants_wake());
        sender.push(&[b"x"]);
        assert!(!sender.wants_wake());
        receiver.announce_sleep(true);
        sender.push(&[b"x"]);
        assert!(sender.wants_wake());
        assert!(!sender.wants_wake());
    }
}
