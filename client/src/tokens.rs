//! The application's own books of its tokens. What the engine says about a slot counts only if it agrees with them.

use portolan_abi::token::TokenRef;

use crate::arena::Buffer;
use crate::event::{SendHandle, Sent};
use crate::names::{Address, Priority};
use crate::status::Status;

/// A send that the engine has.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// What it sends from; `None` if the payload is in the slot.
    pub(crate) buffer: Option<Buffer>,
    /// The buffer is the library's own copy, not to be handed out.
    pub(crate) copied: bool,
    pub(crate) to: Address,
    pub(crate) priority: Priority,
    pub(crate) tag: u64,
}

impl InFlight {
    #[inline]
    pub(crate) fn end(self, handle: SendHandle, status: Status) -> Sent {
        Sent {
            handle,
            status,
            to: self.to,
            priority: self.priority,
            tag: self.tag,
            buffer: self.buffer.filter(|_| !self.copied),
        }
    }
}

/// What a send slot is used for.
#[derive(Debug)]
pub(crate) enum Use {
    /// Nothing.
    Free,
    /// Cancel, resume or drop.
    Command,
    /// An answer to an offer.
    Answer,
    /// A note of the library to another ([`crate::integrity`]).
    Note,
    /// A message.
    Send(InFlight),
}

#[derive(Debug)]
struct SendSlot {
    generation: u32,
    /// The send ring's index it was given at.
    given_at: u32,
    used: Use,
}

/// Send slots.
#[derive(Debug)]
pub(crate) struct SendBook {
    slots: Vec<SendSlot>,
    free: Vec<u32>,
    limit: u32,
    /// Not for answers.
    notes: u32,
    out: u32,
    answers: u32,
}

impl SendBook {
    /// `slots` slots, of which at most `limit` are used for messages at one time and `notes` are kept for notes.
    pub(crate) fn new(slots: u32, limit: u32, notes: u32) -> Self {
        Self {
            slots: (0..slots)
                .map(|_| SendSlot {
                    generation: 0,
                    given_at: 0,
                    used: Use::Free,
                })
                .collect(),
            free: (0..slots).rev().collect(),
            limit,
            notes,
            out: 0,
            answers: 0,
        }
    }

    /// Messages under way.
    pub(crate) fn out(&self) -> u32 {
        self.out
    }

    /// Messages that could be sent now.
    pub(crate) fn available(&self) -> u32 {
        (self.limit - self.out).min(self.free.len() as u32)
    }

    /// May another answer be under way? As many as there are slots not meant for messages.
    pub(crate) fn may_answer(&self) -> bool {
        self.answers < (self.slots.len() as u32).saturating_sub(self.limit + self.notes)
    }

    /// A free slot for a message, or for a command. The slot is used only after [`Self::fill`].
    pub(crate) fn next(&mut self, command: bool) -> Option<TokenRef> {
        if !command && self.out >= self.limit {
            return None;
        }
        let slot = *self.free.last()?;
        let state = &self.slots[slot as usize];
        Some(TokenRef {
            slot,
            generation: next_generation(state.generation),
        })
    }

    /// Uses the slot that [`Self::next`] named; `given_at` is the index it gets in the send ring.
    pub(crate) fn fill(&mut self, token: TokenRef, given_at: u32, used: Use) {
        self.free.pop();
        match used {
            Use::Send(_) => self.out += 1,
            Use::Answer => self.answers += 1,
            Use::Command | Use::Note | Use::Free => {}
        }
        let state = &mut self.slots[token.slot as usize];
        state.generation = token.generation;
        state.given_at = given_at;
        state.used = used;
    }

    /// A slot in use that an engine has had since before `given_until` and does not hold.
    pub(crate) fn lost(&self, given_until: u32, held: impl Fn(u32) -> bool) -> Option<TokenRef> {
        let is_lost = |(slot, state): &(u32, &SendSlot)| {
            !matches!(state.used, Use::Free)
                && is_before(state.given_at, given_until)
                && !held(*slot)
        };
        let (slot, state) = (0..).zip(&self.slots).find(is_lost)?;
        Some(TokenRef {
            slot,
            generation: state.generation,
        })
    }

    /// Is this send still under way?
    pub(crate) fn holds(&self, handle: SendHandle) -> bool {
        self.slots
            .get(handle.slot as usize)
            .is_some_and(|s| s.generation == handle.generation && matches!(s.used, Use::Send(_)))
    }

    /// Ends the use of a slot, if slot and generation name one.
    #[inline]
    pub(crate) fn end(&mut self, slot: u32, generation: u32) -> Option<Use> {
        let state = self.slots.get_mut(slot as usize)?;
        if state.generation != generation || matches!(state.used, Use::Free) {
            return None;
        }
        let used = std::mem::replace(&mut state.used, Use::Free);
        match used {
            Use::Send(_) => self.out -= 1,
            Use::Answer => self.answers -= 1,
            Use::Command | Use::Note | Use::Free => {}
        }
        self.free.push(slot);
        Some(used)
    }

    /// Ends any message that is under way, for a port that is no more.
    pub(crate) fn end_any(&mut self) -> Option<(SendHandle, InFlight)> {
        let i = self
            .slots
            .iter()
            .position(|s| matches!(s.used, Use::Send(_)))?;
        let handle = SendHandle {
            slot: i as u32,
            generation: self.slots[i].generation,
        };
        match self.end(handle.slot, handle.generation)? {
            Use::Send(send) => Some((handle, send)),
            Use::Free | Use::Command | Use::Answer | Use::Note => None,
        }
    }
}

#[derive(Debug)]
struct ReceiveSlot {
    generation: u32,
    /// The provide ring's index it was given at.
    given_at: u32,
    priority: Priority,
    buffer: Option<Buffer>,
}

/// Receive slots.
#[derive(Debug)]
pub(crate) struct ReceiveBook {
    slots: Vec<ReceiveSlot>,
    free: Vec<u32>,
    /// Slots that are the library's.
    notes: u32,
}

impl ReceiveBook {
    /// `slots` slots, of which `notes` are the library's own.
    pub(crate) fn new(slots: u32, notes: u32) -> Self {
        Self {
            slots: (0..slots)
                .map(|_| ReceiveSlot {
                    generation: 0,
                    given_at: 0,
                    priority: Priority::Low,
                    buffer: None,
                })
                .collect(),
            free: (0..slots).rev().collect(),
            notes,
        }
    }

    /// Buffers that could be provided now.
    pub(crate) fn available(&self) -> u32 {
        self.free.len() as u32
    }

    /// Buffers the engine has.
    pub(crate) fn out(&self) -> u32 {
        ((self.slots.len() - self.free.len()) as u32).saturating_sub(self.notes)
    }

    /// A free slot. It is used only after [`Self::fill`].
    pub(crate) fn next(&self) -> Option<TokenRef> {
        let slot = *self.free.last()?;
        Some(TokenRef {
            slot,
            generation: next_generation(self.slots[slot as usize].generation),
        })
    }

    /// Uses the slot that [`Self::next`] named; `given_at` is the index it gets in the provide ring.
    pub(crate) fn fill(
        &mut self,
        token: TokenRef,
        given_at: u32,
        buffer: Buffer,
        priority: Priority,
    ) {
        self.free.pop();
        let state = &mut self.slots[token.slot as usize];
        state.generation = token.generation;
        state.given_at = given_at;
        state.priority = priority;
        state.buffer = Some(buffer);
    }

    /// The buffer a message of `len` bytes came in, if slot and generation name one that holds as much, and the priority it was
    /// provided at.
    pub(crate) fn end(
        &mut self,
        slot: u32,
        generation: u32,
        len: u32,
    ) -> Option<(Buffer, Priority)> {
        let state = self.slots.get_mut(slot as usize)?;
        if state.generation != generation || state.buffer.as_ref()?.token_len() < len {
            return None;
        }
        self.free.push(slot);
        Some((state.buffer.take()?, state.priority))
    }

    /// Takes back a buffer that an engine has had since before `given_until` and does not hold.
    pub(crate) fn end_lost(
        &mut self,
        given_until: u32,
        held: impl Fn(u32) -> bool,
    ) -> Option<(Buffer, Priority)> {
        let is_lost = |(slot, state): &(u32, &ReceiveSlot)| {
            state.buffer.is_some() && is_before(state.given_at, given_until) && !held(*slot)
        };
        let (slot, state) = (0..).zip(&self.slots).find(is_lost)?;
        let generation = state.generation;
        self.end(slot, generation, 0)
    }

    /// Ends any, for a port that is no more.
    pub(crate) fn end_any(&mut self) -> Option<Buffer> {
        self.slots.iter_mut().find_map(|s| s.buffer.take())
    }
}

/// Is one index of a ring before another? As long as they are less than 2³¹ apart; an older one may look younger, which nobody minds.
pub(crate) fn is_before(index: u32, other: u32) -> bool {
    (index.wrapping_sub(other) as i32) < 0
}

/// Grows by one per use, never 0.
fn next_generation(generation: u32) -> u32 {
    generation.wrapping_add(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send() -> Use {
        Use::Send(InFlight {
            buffer: None,
            copied: false,
            to: (1, 1).into(),
            priority: Priority::Low,
            tag: 0,
        })
    }

    // All tokens out. Expect: no slot for a message, one for a command; a stale or foreign name ends nothing, the right one once.
    #[test]
    fn books_only_believe_names_they_gave() {
        let mut book = SendBook::new(2, 1, 0);
        let token = book.next(false).unwrap();
        book.fill(token, 0, send());
        assert_eq!((book.out(), book.available()), (1, 0));
        assert!(book.next(false).is_none());
        let command = book.next(true).unwrap();
        book.fill(command, 1, Use::Command);
        assert!(book.next(true).is_none());
        assert!(book.end(7, 1).is_none());
        assert!(book.end(token.slot, token.generation + 1).is_none());
        assert!(book.end(token.slot, token.generation).is_some());
        assert!(book.end(token.slot, token.generation).is_none());
        assert!(matches!(
            book.end(command.slot, command.generation),
            Some(Use::Command)
        ));
        assert_eq!((book.out(), book.available()), (0, 1));
    }

    // A slot used 2³² times. Expect: the generation skips 0.
    #[test]
    fn generation_is_never_zero() {
        assert_eq!(next_generation(u32::MAX), 1);
        assert_eq!(next_generation(0), 1);
        assert_eq!(next_generation(1), 2);
    }
}
