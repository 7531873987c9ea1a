//! The application's own books of its tokens. What the engine says about a slot counts only if it agrees with them.

use portolan_abi::token::TokenRef;

use crate::arena::Buffer;
use crate::event::{SendHandle, Sent};
use crate::names::{Address, Priority};
use crate::status::Status;

/// A send that the engine has, but for its buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub(crate) to: Address,
    pub(crate) priority: Priority,
    pub(crate) tag: u64,
    /// It has a buffer, which the book keeps beside; else the payload is in the slot.
    has_buffer: bool,
    /// The buffer is the library's own copy, not to be handed out.
    copied: bool,
}

impl InFlight {
    /// Without a buffer so far.
    #[inline]
    pub(crate) fn new(to: Address, priority: Priority, tag: u64) -> Self {
        Self {
            to,
            priority,
            tag,
            has_buffer: false,
            copied: false,
        }
    }
}

/// What a send slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    Send,
}

/// Two of them in a cache line: an application that has all its sends under way looks at another one for each message.
#[derive(Debug)]
#[repr(align(32))]
struct SendSlot {
    generation: u32,
    /// The send ring's index it was given at.
    given_at: u32,
    used: Use,
    /// Of a message.
    send: InFlight,
}

const _: () = assert!(size_of::<SendSlot>() == 32);

/// Send slots.
#[derive(Debug)]
pub(crate) struct SendBook {
    slots: Vec<SendSlot>,
    /// What is sent from memory, by slot. Looked at only for sends that have a buffer.
    buffers: Vec<Option<Buffer>>,
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
                    send: InFlight::new(Address::from((0, 0)), Priority::Low, 0),
                })
                .collect(),
            buffers: (0..slots).map(|_| None).collect(),
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
    #[inline]
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

    /// Uses the slot that [`Self::next`] named, but not for a message; `given_at` is the index it gets in the send ring.
    pub(crate) fn fill(&mut self, token: TokenRef, given_at: u32, used: Use) {
        self.answers += u32::from(used == Use::Answer);
        self.begin(token, given_at, used);
    }

    /// The same for a message, sent from a buffer or from the slot; `copied` if the buffer is the library's own.
    #[inline(always)]
    pub(crate) fn fill_send(
        &mut self,
        token: TokenRef,
        given_at: u32,
        send: InFlight,
        buffer: Option<Buffer>,
        copied: bool,
    ) {
        self.out += 1;
        let own = &mut self.begin(token, given_at, Use::Send).send;
        *own = send;
        if buffer.is_some() {
            (own.has_buffer, own.copied) = (true, copied);
            self.keep(token.slot, buffer);
        }
    }

    #[inline(never)]
    fn keep(&mut self, slot: u32, buffer: Option<Buffer>) {
        self.buffers[slot as usize] = buffer;
    }

    /// What a send of a slot is sent from.
    pub(crate) fn buffer_mut(&mut self, slot: u32) -> Option<&mut Buffer> {
        self.buffers.get_mut(slot as usize)?.as_mut()
    }

    /// The same, taken out of the book.
    #[inline(never)]
    pub(crate) fn take_buffer(&mut self, slot: u32) -> Option<Buffer> {
        self.buffers.get_mut(slot as usize)?.take()
    }

    /// How a send that [`Self::end`] gave ended, with the buffer that is to be handed out.
    #[inline(always)]
    pub(crate) fn sent(&mut self, handle: SendHandle, send: InFlight, status: Status) -> Sent {
        // Most sends have none, and of none there is nothing to move.
        let buffer = match send.has_buffer {
            false => None,
            true => self
                .take_buffer(handle.token().slot)
                .filter(|_| !send.copied),
        };
        Sent {
            handle,
            status,
            to: send.to,
            priority: send.priority,
            tag: send.tag,
            buffer,
        }
    }

    #[inline(always)]
    fn begin(&mut self, token: TokenRef, given_at: u32, used: Use) -> &mut SendSlot {
        self.free.pop();
        let state = &mut self.slots[token.slot as usize];
        state.generation = token.generation;
        state.given_at = given_at;
        state.used = used;
        state
    }

    /// A slot in use that an engine has had since before `given_until` and does not hold.
    pub(crate) fn lost(&self, given_until: u32, held: impl Fn(u32) -> bool) -> Option<TokenRef> {
        let is_lost = |(slot, state): &(u32, &SendSlot)| {
            state.used != Use::Free && is_before(state.given_at, given_until) && !held(*slot)
        };
        let (slot, state) = (0..).zip(&self.slots).find(is_lost)?;
        Some(TokenRef {
            slot,
            generation: state.generation,
        })
    }

    /// Is this send still under way?
    pub(crate) fn holds(&self, handle: SendHandle) -> bool {
        self.sends(handle.token())
    }

    /// Is a message under way with this token?
    #[inline]
    pub(crate) fn sends(&self, token: TokenRef) -> bool {
        let state = self.slots.get(token.slot as usize);
        state.is_some_and(|s| s.generation == token.generation && s.used == Use::Send)
    }

    /// Ends the use of a slot, if slot and generation name one. A send's buffer is to be taken before the slot is used again ([`Self::sent`]).
    #[inline(always)]
    pub(crate) fn end(&mut self, slot: u32, generation: u32) -> Option<(Use, InFlight)> {
        let state = self.slots.get_mut(slot as usize)?;
        let used = state.used;
        if state.generation != generation || used == Use::Free {
            return None;
        }
        state.used = Use::Free;
        self.out -= u32::from(used == Use::Send);
        self.answers -= u32::from(used == Use::Answer);
        self.free.push(slot);
        Some((used, state.send))
    }

    /// Ends any message that is under way, for a port that is no more.
    pub(crate) fn end_any(&mut self) -> Option<(SendHandle, InFlight)> {
        let slot = self.slots.iter().position(|s| s.used == Use::Send)?;
        let (slot, generation) = (slot as u32, self.slots[slot].generation);
        let (_, send) = self.end(slot, generation)?;
        Some((SendHandle::of(TokenRef { slot, generation }), send))
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

    /// Do slot and generation name a buffer that holds `len` bytes?
    #[inline]
    pub(crate) fn holds(&self, slot: u32, generation: u32, len: u32) -> bool {
        let state = self.slots.get(slot as usize);
        let buffer = state.filter(|s| s.generation == generation);
        buffer.is_some_and(|s| s.buffer.as_ref().is_some_and(|b| b.token_len() >= len))
    }

    /// The buffer a message of `len` bytes came in, if slot and generation name one that holds as much, and the priority it was
    /// provided at.
    #[inline]
    pub(crate) fn end(
        &mut self,
        slot: u32,
        generation: u32,
        len: u32,
    ) -> Option<(Buffer, Priority)> {
        if !self.holds(slot, generation, len) {
            return None;
        }
        let state = self.slots.get_mut(slot as usize)?;
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

    // All tokens out. Expect: no slot for a message, one for a command; a stale or foreign name ends nothing, the right one once.
    #[test]
    fn books_only_believe_names_they_gave() {
        let mut book = SendBook::new(2, 1, 0);
        let token = book.next(false).unwrap();
        let send = InFlight::new((1, 2).into(), Priority::Low, 0);
        book.fill_send(token, 0, send, None, false);
        assert_eq!((book.out(), book.available()), (1, 0));
        assert!(book.next(false).is_none());
        let command = book.next(true).unwrap();
        book.fill(command, 1, Use::Command);
        assert!(book.next(true).is_none());
        assert!(book.end(7, 1).is_none());
        assert!(book.end(token.slot, token.generation + 1).is_none());
        assert!(book.end(token.slot, token.generation).is_some());
        assert!(book.end(token.slot, token.generation).is_none());
        let ended = book.end(command.slot, command.generation);
        assert_eq!(ended.map(|(used, _)| used), Some(Use::Command));
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
