//! Tokens: what an application puts into its half of a port, and how the engine reads it without believing it.
//!
//! A slot is read once, word by word, into a private copy ([`Untrusted`]); only [`Untrusted::check`] turns the copy into a value.

use crate::atomic::{AtomicU64, Ordering};
use crate::port::PortGeometry;

/// Words of a send slot: two cache lines.
pub const SEND_SLOT_WORDS: usize = 16;
/// Words of it before an inline payload.
pub const SEND_HEADER_WORDS: usize = 6;
/// Payload bytes that fit into a send slot itself.
pub const INLINE_BYTES: usize = 80;
const _: () = assert!(SEND_HEADER_WORDS * 8 + INLINE_BYTES == SEND_SLOT_WORDS * 8);
/// Words of a receive slot.
pub const RECEIVE_SLOT_WORDS: usize = 4;

/// What a send token asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Send a message.
    Send = 1,
    /// Let a stream go on after a failed send (GM's `resume_sending`).
    ResumeSending = 2,
    /// End all waiting sends of a stream after a failed send (GM's `drop_sends`).
    DropSends = 3,
    /// Give up the send in slot `arena_offset` (low 32 bits) of generation (high 32 bits).
    Cancel = 4,
    /// Say what is wanted of an offered message ([`AnswerToken`]).
    Answer = 5,
}

/// Flag of a send token: the payload is in the slot, not in the arena.
pub const FLAG_INLINE: u8 = 1;
/// Flag of a send token: its delivery is acknowledged at once, whatever the receiver's policy.
pub const FLAG_ACK_IMMEDIATE: u8 = 2;
/// Flag of a send token: its delivery is acknowledged whenever a frame goes back anyway.
pub const FLAG_ACK_LAZY: u8 = 4;

/// What the application wants of an offered message; the flags of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Verdict {
    /// All of it.
    Accept = 1,
    /// Its first bytes, as many as the answer says; all of it if it has no more.
    Shorten = 2,
    /// Nothing.
    Refuse = 3,
}

/// A send token's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendToken {
    /// The slot's generation; grows by one per use, never 0.
    pub generation: u32,
    /// What is asked.
    pub opcode: Opcode,
    /// 0 low, 1 high.
    pub priority: u8,
    /// [`FLAG_INLINE`], [`FLAG_ACK_IMMEDIATE`] or [`FLAG_ACK_LAZY`].
    pub flags: u8,
    /// Receiving node.
    pub node: u16,
    /// Receiving port.
    pub port: u16,
    /// Payload bytes.
    pub len: u32,
    /// Payload's offset in the arena, if not inline.
    pub arena_offset: u64,
    /// Carried beside the payload.
    pub tag: u64,
    /// Microseconds until the send is given up; 0 means the daemon's default.
    pub timeout_us: u32,
}

/// An answer to an offer, as a send token carries it. It names the message, not the engine's question, so that the engine's successor
/// understands it too.
///
/// | field of the token | |
/// |---|---|
/// | node, port, priority | the message's sender, its priority |
/// | flags | the [`Verdict`] |
/// | len | [`Verdict::Shorten`]: bytes wanted |
/// | tag | high: the stream's epoch; low: the message's number |
/// | arena_offset | low: the sender's incarnation, as the offer gave it |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerToken {
    /// The message's sender: node and port.
    pub from: (u16, u16),
    /// Its priority.
    pub priority: u8,
    /// Low half of the sending node's incarnation.
    pub incarnation: u32,
    /// The stream's epoch.
    pub epoch: u32,
    /// The message's number.
    pub number: u32,
    /// What is wanted.
    pub verdict: Verdict,
    /// [`Verdict::Shorten`]: bytes wanted.
    pub len: u32,
}

impl AnswerToken {
    /// As the content of a send slot of this generation.
    pub fn token(&self, generation: u32) -> SendToken {
        SendToken {
            generation,
            opcode: Opcode::Answer,
            priority: self.priority,
            flags: self.verdict as u8,
            node: self.from.0,
            port: self.from.1,
            len: self.len,
            arena_offset: u64::from(self.incarnation),
            tag: u64::from(self.epoch) << 32 | u64::from(self.number),
            timeout_us: 0,
        }
    }

    /// The answer a checked token carries; `None` if it carries none.
    pub fn of(token: &SendToken) -> Option<Self> {
        let verdict = match token.flags {
            1 => Verdict::Accept,
            2 => Verdict::Shorten,
            3 => Verdict::Refuse,
            _ => return None,
        };
        (token.opcode == Opcode::Answer).then_some(Self {
            from: (token.node, token.port),
            priority: token.priority,
            incarnation: token.arena_offset as u32,
            epoch: (token.tag >> 32) as u32,
            number: token.tag as u32,
            verdict,
            len: token.len,
        })
    }
}

/// A receive token's content: a buffer in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveToken {
    /// The slot's generation; grows by one per use, never 0.
    pub generation: u32,
    /// Priority it is meant for: 0 low, 1 high.
    pub priority: u8,
    /// Where the buffer begins in the arena.
    pub arena_offset: u64,
    /// Bytes it holds.
    pub len: u32,
}

/// Why a token is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "std", derive(thiserror::Error))]
pub enum BadToken {
    /// The ring entry names a slot that is not there.
    #[cfg_attr(
        feature = "std",
        error("a ring entry names a slot the port does not have")
    )]
    Slot,
    /// The slot's generation is 0 or not the ring entry's.
    #[cfg_attr(
        feature = "std",
        error("the slot's generation is not the ring entry's")
    )]
    Generation,
    /// No such opcode.
    #[cfg_attr(feature = "std", error("no such opcode"))]
    Opcode,
    /// An answer that is no verdict, or two acknowledgement modes at once.
    #[cfg_attr(
        feature = "std",
        error("the flags contradict the opcode or each other")
    )]
    Flags,
    /// Priority is neither 0 nor 1.
    #[cfg_attr(feature = "std", error("the priority is neither 0 nor 1"))]
    Priority,
    /// Offset and length are not inside the arena (or the slot, if inline).
    #[cfg_attr(feature = "std", error("offset and length are not inside the arena"))]
    Range,
    /// Node or port cannot exist.
    #[cfg_attr(feature = "std", error("no such node or port can exist"))]
    Destination,
    /// The slot is already in use.
    #[cfg_attr(feature = "std", error("the slot is already in use"))]
    InUse,
}

/// A private copy of words another process wrote: a claim until checked.
#[derive(Clone, Copy, Debug)]
pub struct Untrusted<const W: usize>([u64; W]);

impl<const W: usize> Untrusted<W> {
    /// Reads each word once.
    #[inline]
    pub fn read(slot: &[AtomicU64; W]) -> Self {
        Self(core::array::from_fn(|i| slot[i].load(Ordering::Relaxed)))
    }

    /// Claims these words, as a test or a fuzzer would.
    pub fn claim(words: [u64; W]) -> Self {
        Self(words)
    }
}

/// A ring entry: slot and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRef {
    /// The slot.
    pub slot: u32,
    /// The generation it carries.
    pub generation: u32,
}

impl TokenRef {
    /// As one ring word.
    #[inline]
    pub fn encode(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    /// From one ring word; the slot is a claim.
    #[inline]
    pub fn decode(word: u64) -> Self {
        Self {
            slot: word as u32,
            generation: (word >> 32) as u32,
        }
    }
}

impl SendToken {
    /// The header words of a slot.
    #[inline]
    pub fn encode(&self) -> [u64; SEND_HEADER_WORDS] {
        [
            u64::from(self.generation) << 32
                | u64::from(self.opcode as u8)
                | u64::from(self.priority) << 8
                | u64::from(self.flags) << 16,
            u64::from(self.node) | u64::from(self.port) << 16 | u64::from(self.len) << 32,
            self.arena_offset,
            self.tag,
            u64::from(self.timeout_us),
            0,
        ]
    }

    /// Whether the payload lies where payloads may lie.
    #[inline]
    fn is_inside(&self, geometry: &PortGeometry) -> bool {
        if self.flags & FLAG_INLINE != 0 {
            self.len as usize <= INLINE_BYTES
        } else {
            geometry.arena_holds(self.arena_offset, self.len)
        }
    }

    /// Writes the token, and its payload if that is inline (at most [`INLINE_BYTES`]), into a slot.
    #[inline]
    pub fn store(&self, slot: &[AtomicU64; SEND_SLOT_WORDS], inline: &[u8]) {
        for (word, value) in slot.iter().zip(self.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        // To copy a number of bytes that the compiler does not know is a call: not for each word.
        let (whole, rest) = inline.as_chunks::<8>();
        let mut words = slot[SEND_HEADER_WORDS..].iter();
        for (bytes, word) in whole.iter().zip(&mut words) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        if let Some(word) = words.next().filter(|_| !rest.is_empty()) {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            word.store(u64::from_ne_bytes(last), Ordering::Relaxed);
        }
    }
}

impl Untrusted<SEND_SLOT_WORDS> {
    /// Reads each word of the header once, and nothing of an inline payload, which is copied when it is sent.
    #[inline]
    pub fn read_header(slot: &[AtomicU64; SEND_SLOT_WORDS]) -> Self {
        let mut words = [0; SEND_SLOT_WORDS];
        for (copy, word) in words.iter_mut().zip(&slot[..SEND_HEADER_WORDS]) {
            *copy = word.load(Ordering::Relaxed);
        }
        Self(words)
    }

    /// The token, if it makes sense for a port of this geometry.
    #[inline]
    pub fn check(
        &self,
        expected: TokenRef,
        geometry: &PortGeometry,
    ) -> Result<SendToken, BadToken> {
        let w = &self.0;
        let generation = (w[0] >> 32) as u32;
        if generation == 0 || generation != expected.generation {
            return Err(BadToken::Generation);
        }
        let opcode = match w[0] as u8 {
            1 => Opcode::Send,
            2 => Opcode::ResumeSending,
            3 => Opcode::DropSends,
            4 => Opcode::Cancel,
            5 => Opcode::Answer,
            _ => return Err(BadToken::Opcode),
        };
        let token = SendToken {
            generation,
            opcode,
            priority: (w[0] >> 8) as u8,
            flags: (w[0] >> 16) as u8,
            node: w[1] as u16,
            port: (w[1] >> 16) as u16,
            len: (w[1] >> 32) as u32,
            arena_offset: w[2],
            tag: w[3],
            timeout_us: w[4] as u32,
        };
        if token.priority > 1 {
            return Err(BadToken::Priority);
        }
        if token.opcode != Opcode::Cancel
            && (token.node == 0 || token.node == u16::MAX || token.port >= crate::PORTS)
        {
            return Err(BadToken::Destination);
        }
        let both = FLAG_ACK_IMMEDIATE | FLAG_ACK_LAZY;
        let contradict = match token.opcode {
            Opcode::Answer => AnswerToken::of(&token).is_none(),
            _ => token.flags & both == both,
        };
        if contradict {
            return Err(BadToken::Flags);
        }
        if token.opcode == Opcode::Send && !token.is_inside(geometry) {
            return Err(BadToken::Range);
        }
        Ok(token)
    }
}

/// What a send has in common with the one before it: all but slot, length, place and tag of its message.
///
/// Problem: whoever sends many short messages writes the same words into one slot after another, and each was told from every other order
/// again. Idea: after a send that made sense, one in the same words makes sense too, but for its place.
#[derive(Clone, Copy, Debug)]
pub struct Alike {
    first: SendToken,
    order: u32,
    destination: u32,
}

impl Alike {
    /// To this send, which was checked; `None` if it is another order.
    #[inline]
    pub fn to(first: &SendToken) -> Option<Self> {
        let [order, destination, ..] = first.encode();
        (first.opcode == Opcode::Send).then_some(Self {
            first: *first,
            order: order as u32,
            destination: destination as u32,
        })
    }

    /// The send in a slot, of which each word is read once; `None`: anything else, of which [`Untrusted::check`] says what it is.
    #[inline]
    pub fn read(
        &self,
        slot: &[AtomicU64; SEND_SLOT_WORDS],
        expected: TokenRef,
        geometry: &PortGeometry,
    ) -> Option<SendToken> {
        let [order, destination, arena_offset, tag, timeout, ..] = slot;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (order, destination) = (load(order), load(destination));
        let token = SendToken {
            generation: (order >> 32) as u32,
            len: (destination >> 32) as u32,
            arena_offset: load(arena_offset),
            tag: load(tag),
            ..self.first
        };
        let alike = order as u32 == self.order
            && destination as u32 == self.destination
            && load(timeout) as u32 == self.first.timeout_us;
        let known = token.generation != 0 && token.generation == expected.generation;
        (alike && known && token.is_inside(geometry)).then_some(token)
    }
}

impl ReceiveToken {
    /// The words of a receive slot.
    pub fn encode(&self) -> [u64; RECEIVE_SLOT_WORDS] {
        [
            u64::from(self.generation) << 32 | u64::from(self.priority),
            self.arena_offset,
            u64::from(self.len),
            0,
        ]
    }

    /// Writes the token into a slot.
    pub fn store(&self, slot: &[AtomicU64; RECEIVE_SLOT_WORDS]) {
        for (word, value) in slot.iter().zip(self.encode()) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

impl Untrusted<RECEIVE_SLOT_WORDS> {
    /// The token, if it makes sense for a port of this geometry.
    #[inline]
    pub fn check(
        &self,
        expected: TokenRef,
        geometry: &PortGeometry,
    ) -> Result<ReceiveToken, BadToken> {
        let w = &self.0;
        let token = ReceiveToken {
            generation: (w[0] >> 32) as u32,
            priority: w[0] as u8,
            arena_offset: w[1],
            len: w[2] as u32,
        };
        if token.generation == 0 || token.generation != expected.generation {
            return Err(BadToken::Generation);
        }
        if token.priority > 1 {
            return Err(BadToken::Priority);
        }
        if !geometry.arena_holds(token.arena_offset, token.len) {
            return Err(BadToken::Range);
        }
        Ok(token)
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests;
