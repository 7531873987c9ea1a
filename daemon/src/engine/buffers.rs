//! A port's receive tokens as the engine knows them: which are out, and which one a message gets.
//!
//! A message takes the smallest size class that fits at its priority (transport.md §5.4). A class is a power of two: class 0
//! holds empty buffers, class c those of 2^(c−1) to 2^c − 1 bytes. In the message's own class some buffers may be too short, so that
//! list is searched; any buffer of a higher class fits, and a bitmap finds the lowest that is not empty. Within a class the newest
//! token goes first: what application and engine had in hand last is in the caches, and in an exchange that is all that is used, of however many.
//! Work per claim is bounded by the port's tokens, and constant when a class holds one size, as GM's do.
//!
//! Everything here is rebuilt from the ledger; nothing here is durable.

use portolan_abi::token::ReceiveToken;
use portolan_transport::ident::Priority;

const CLASSES: usize = 33;
const NONE: u32 = u32::MAX;

/// Where a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// With the application.
    Absent,
    /// Waiting for a message.
    Offered,
    /// A message is being placed into it.
    Claimed,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    generation: u32,
    len: u32,
    arena_offset: u64,
    priority: u8,
    place: Place,
    next: u32,
}

/// The receive tokens of one port.
#[derive(Debug)]
pub struct Buffers {
    slots: Vec<Buffer>,
    /// Per priority and class, the slot of the newest token.
    firsts: [[u32; CLASSES]; 2],
    /// Bit c: the list of class c is not empty.
    filled: [u64; 2],
}

fn class(len: u32) -> usize {
    (u32::BITS - len.leading_zeros()) as usize
}

impl Buffers {
    /// No token out.
    pub fn new(slots: u32) -> Self {
        let absent = Buffer {
            generation: 0,
            len: 0,
            arena_offset: 0,
            priority: 0,
            place: Place::Absent,
            next: NONE,
        };
        Self {
            slots: vec![absent; slots as usize],
            firsts: [[NONE; CLASSES]; 2],
            filled: [0; 2],
        }
    }

    /// Whether no message would find one.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.filled == [0; 2]
    }

    /// A checked token came in. False if its slot is out already or does not exist.
    #[inline]
    pub fn offer(&mut self, slot: u32, token: &ReceiveToken) -> bool {
        let Some(buffer) = self.slots.get_mut(slot as usize) else {
            return false;
        };
        if buffer.place != Place::Absent {
            return false;
        }
        *buffer = Buffer {
            generation: token.generation,
            len: token.len,
            arena_offset: token.arena_offset,
            priority: token.priority & 1,
            place: Place::Offered,
            next: NONE,
        };
        self.put(slot);
        true
    }

    #[inline]
    fn put(&mut self, slot: u32) {
        let buffer = &mut self.slots[slot as usize];
        let (priority, class) = (usize::from(buffer.priority), class(buffer.len));
        let first = &mut self.firsts[priority][class];
        buffer.next = std::mem::replace(first, slot);
        self.filled[priority] |= 1 << class;
    }

    /// Takes the token a message of `len` bytes gets: its slot and generation.
    #[inline]
    pub fn claim(&mut self, priority: Priority, len: u32) -> Option<(u32, u32)> {
        let priority = priority as usize;
        let own = class(len);
        let fitting = self.filled[priority] >> own << own;
        if fitting == 0 {
            return None;
        }
        let lowest = fitting.trailing_zeros() as usize;
        let slot = self.firsts[priority][lowest];
        if self.slots[slot as usize].len >= len {
            return Some(self.take(priority, lowest, NONE, slot));
        }
        self.claim_behind(priority, fitting, len)
    }

    /// The newest token of the message's own class is too short for it: another of that class, or of the next that is not empty, where
    /// any will do.
    fn claim_behind(&mut self, priority: usize, fitting: u64, len: u32) -> Option<(u32, u32)> {
        let own = fitting.trailing_zeros() as usize;
        let (mut before, mut slot) = (NONE, self.firsts[priority][own]);
        // A list is at most as long as the port has tokens.
        while slot != NONE && self.slots[slot as usize].len < len {
            before = slot;
            slot = self.slots[slot as usize].next;
        }
        if slot != NONE {
            return Some(self.take(priority, own, before, slot));
        }
        let higher = fitting & (fitting - 1);
        if higher == 0 {
            return None;
        }
        let class = higher.trailing_zeros() as usize;
        let slot = self.firsts[priority][class];
        Some(self.take(priority, class, NONE, slot))
    }

    /// Takes the token in `slot`, which comes after that in `before` in the list of its class.
    #[inline]
    fn take(&mut self, priority: usize, class: usize, before: u32, slot: u32) -> (u32, u32) {
        let buffer = &mut self.slots[slot as usize];
        buffer.place = Place::Claimed;
        let (next, generation) = (buffer.next, buffer.generation);
        if before == NONE {
            self.firsts[priority][class] = next;
            if next == NONE {
                self.filled[priority] &= !(1 << class);
            }
        } else {
            self.slots[before as usize].next = next;
        }
        (slot, generation)
    }

    #[inline]
    fn claimed(&mut self, slot: u32, generation: u32) -> Option<&mut Buffer> {
        self.slots
            .get_mut(slot as usize)
            .filter(|b| b.place == Place::Claimed && b.generation == generation)
    }

    /// Gives a claimed token back unused.
    pub fn release(&mut self, slot: u32, generation: u32) {
        if let Some(buffer) = self.claimed(slot, generation) {
            buffer.place = Place::Offered;
            self.put(slot);
        }
    }

    /// A claimed token was consumed by a commit and is the application's again.
    #[inline]
    pub fn consume(&mut self, slot: u32, generation: u32) -> bool {
        match self.claimed(slot, generation) {
            Some(buffer) => {
                buffer.place = Place::Absent;
                true
            }
            None => false,
        }
    }

    /// Where in the arena `len` bytes at `offset` of a claimed buffer lie; `None` if they are not inside the buffer.
    #[inline]
    pub fn arena_range(
        &mut self,
        slot: u32,
        generation: u32,
        offset: u32,
        len: usize,
    ) -> Option<u64> {
        let buffer = self.claimed(slot, generation)?;
        let end = u64::from(offset) + len as u64;
        (end <= u64::from(buffer.len)).then_some(buffer.arena_offset + u64::from(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(len: u32, priority: u8) -> ReceiveToken {
        ReceiveToken {
            generation: 1,
            priority,
            arena_offset: 0,
            len,
        }
    }

    #[test]
    fn a_message_takes_the_smallest_class_that_fits_newest_first() {
        let mut buffers = Buffers::new(8);
        for (slot, len) in [(0, 64), (1, 4096), (2, 64), (3, 100), (4, 0)] {
            assert!(buffers.offer(slot, &token(len, 0)));
        }
        // Not this priority.
        assert_eq!(buffers.claim(Priority::High, 1), None);
        // Class 7 holds 64, 64 and 100 bytes: 64 bytes take the newest of them, whatever its length beyond that; 65 pass over what is too short.
        assert_eq!(buffers.claim(Priority::Low, 64), Some((3, 1)));
        buffers.release(3, 1);
        assert_eq!(buffers.claim(Priority::Low, 64), Some((3, 1)));
        assert_eq!(buffers.claim(Priority::Low, 64), Some((2, 1)));
        for slot in [3, 2] {
            buffers.release(slot, 1);
        }
        assert_eq!(buffers.claim(Priority::Low, 65), Some((3, 1)));
        assert_eq!(buffers.claim(Priority::Low, 64), Some((2, 1)));
        assert_eq!(buffers.claim(Priority::Low, 0), Some((4, 1)));
        assert_eq!(buffers.claim(Priority::Low, 0), Some((0, 1)));
        assert_eq!(buffers.claim(Priority::Low, 4097), None);
        assert_eq!(buffers.claim(Priority::Low, 1), Some((1, 1)));
        assert_eq!(buffers.claim(Priority::Low, 0), None);
        // Given back, it is found again; consumed, it is not.
        buffers.release(1, 1);
        assert_eq!(buffers.claim(Priority::Low, 4096), Some((1, 1)));
        assert!(buffers.consume(1, 1));
        assert!(!buffers.consume(1, 1));
        buffers.release(1, 1);
        assert_eq!(buffers.claim(Priority::Low, 1), None);
    }

    #[test]
    fn a_slot_that_is_out_cannot_be_offered_again() {
        let mut buffers = Buffers::new(2);
        assert!(buffers.offer(0, &token(u32::MAX, 1)));
        assert!(!buffers.offer(0, &token(8, 1)));
        assert!(!buffers.offer(2, &token(8, 1)));
        assert_eq!(buffers.claim(Priority::High, u32::MAX), Some((0, 1)));
        assert!(!buffers.offer(0, &token(8, 1)));
    }

    #[test]
    fn bytes_outside_a_buffer_have_no_place() {
        let mut buffers = Buffers::new(1);
        buffers.offer(
            0,
            &ReceiveToken {
                generation: 5,
                priority: 0,
                arena_offset: 1000,
                len: 100,
            },
        );
        assert_eq!(buffers.arena_range(0, 5, 0, 1), None, "not claimed");
        buffers.claim(Priority::Low, 100);
        assert_eq!(buffers.arena_range(0, 5, 60, 40), Some(1060));
        assert_eq!(buffers.arena_range(0, 5, 60, 41), None);
        assert_eq!(buffers.arena_range(0, 5, u32::MAX, 1), None);
        assert_eq!(buffers.arena_range(0, 4, 0, 1), None);
    }

    proptest::proptest! {
        /// Whatever the order of offers, claims and returns: each token is in one place, and a claim fails only if nothing fits.
        #[test]
        fn lists_stay_whole(steps in proptest::collection::vec((0u32..16, 0u32..300, 0u8..4), 1..200)) {
            let mut buffers = Buffers::new(16);
            let mut model: Vec<Option<(u32, bool)>> = vec![None; 16];
            for (slot, len, step) in steps {
                match step {
                    0 => {
                        let fresh = model[slot as usize].is_none();
                        assert_eq!(buffers.offer(slot, &token(len, 0)), fresh);
                        if fresh { model[slot as usize] = Some((len, false)); }
                    }
                    1 => match buffers.claim(Priority::Low, len) {
                        Some((slot, _)) => {
                            let (size, claimed) = model[slot as usize].unwrap();
                            assert!(size >= len && !claimed);
                            let best = model.iter().flatten().filter(|(l, c)| !c && *l >= len).map(|(l, _)| class(*l)).min().unwrap();
                            assert_eq!(class(size), best);
                            model[slot as usize] = Some((size, true));
                        }
                        None => assert!(model.iter().flatten().all(|(l, claimed)| *claimed || *l < len)),
                    },
                    2 => {
                        buffers.release(slot, 1);
                        if let Some((_, claimed)) = &mut model[slot as usize] { *claimed = false; }
                    }
                    _ => {
                        let claimed = matches!(model[slot as usize], Some((_, true)));
                        assert_eq!(buffers.consume(slot, 1), claimed);
                        if claimed { model[slot as usize] = None; }
                    }
                }
            }
        }
    }
}
