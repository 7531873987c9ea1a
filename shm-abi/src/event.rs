//! Events: what the engine tells an application, one cache line each.

use crate::token::TokenRef;

/// Words of an event.
pub const EVENT_WORDS: usize = 8;
/// Bytes of a message shown with [`EventKind::Offered`]: what is left of the cache line.
pub const OFFERED_BYTES: usize = 16;
/// Sends whose end one event can tell of: the first as in [`EventKind::Sent`], each other in a word of its own.
pub const ENDS: usize = 7;
/// The first of those words.
const OTHER_ENDS: usize = EVENT_WORDS + 1 - ENDS;
/// The code of [`EventKind::Sent`].
const SENT: u8 = 2;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A message is in the buffer of receive slot `slot`.
    Received,
    /// The send, or command, in send slot `slot` ended; perhaps others with it ([`OtherEnds`]).
    Sent(Outcome),
    /// A message's first chunk came and the engine asks what the application wants of it; to be answered with
    /// [`Opcode::Answer`](crate::token::Opcode::Answer). It belongs to no slot. The same question comes again from an engine's
    /// successor: (node, port, priority, incarnation, epoch, number) name it.
    Offered(Offered),
}

/// What an offer says beside the fields it shares with other events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Low half of the sending node's incarnation: epochs begin anew with the next one.
    pub incarnation: u32,
    /// The message's first bytes; [`Event::len`] of them count.
    pub first: [u8; OFFERED_BYTES],
}

/// How a send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Delivered, not, or perhaps.
    pub certainty: Certainty,
    /// Why not or perhaps; a `portolan_transport` reason code, or one from [`reason`]; 0 if delivered.
    pub reason: u8,
}

/// What is known of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Certainty {
    /// In the receiver's buffer.
    Delivered = 0,
    /// Not, and it never will be.
    NotDelivered = 1,
    /// It cannot be known.
    MaybeDelivered = 2,
}

/// Reason codes beside the transport's own (1–63).
pub mod reason {
    /// The token did not make sense.
    pub const BAD_TOKEN: u8 = 64;
    /// The node is being drained: it takes no new sends.
    pub const DRAINING: u8 = 65;
}

/// One entry of the event ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The message's priority.
    pub priority: u8,
    /// Send or receive slot.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
    /// Received: bytes in the buffer. Offered: bytes shown.
    pub len: u32,
    /// Received and offered: bytes the sender sent; more than `len` if the application shortened the message.
    pub total: u32,
    /// Received and offered: sending node.
    pub node: u16,
    /// Received and offered: sending port.
    pub port: u16,
    /// Received: the stream's record in the ledger, for restore.
    pub record: u32,
    /// Received and offered: the stream's epoch.
    pub epoch: u32,
    /// Received and offered: the message's number.
    pub number: u32,
    /// Received and offered: the sender's tag.
    pub tag: u64,
}

impl Event {
    /// As ring words.
    #[inline]
    pub fn encode(&self) -> [u64; EVENT_WORDS] {
        let (kind, certainty, reason) = match self.kind {
            EventKind::Received => (1u8, 0, 0),
            EventKind::Sent(outcome) => (SENT, outcome.certainty as u8, outcome.reason),
            EventKind::Offered(_) => (3u8, 0, 0),
        };
        let (incarnation, first) = match &self.kind {
            EventKind::Offered(offered) => {
                (offered.incarnation, u128::from_le_bytes(offered.first))
            }
            EventKind::Received | EventKind::Sent(_) => (0, 0),
        };
        [
            u64::from(kind)
                | u64::from(certainty) << 8
                | u64::from(reason) << 16
                | u64::from(self.priority) << 24
                | u64::from(self.slot) << 32,
            u64::from(self.generation) | u64::from(self.len) << 32,
            u64::from(self.node) | u64::from(self.port) << 16 | u64::from(self.epoch) << 32,
            u64::from(self.number) | u64::from(self.record) << 32,
            self.tag,
            u64::from(self.total) | u64::from(incarnation) << 32,
            first as u64,
            (first >> 64) as u64,
        ]
    }

    /// From ring words; `None` if they are no event.
    pub fn decode(w: &[u64; EVENT_WORDS]) -> Option<Self> {
        let kind = match w[0] as u8 {
            1 => EventKind::Received,
            SENT => {
                let certainty = match (w[0] >> 8) as u8 {
                    0 => Certainty::Delivered,
                    1 => Certainty::NotDelivered,
                    2 => Certainty::MaybeDelivered,
                    _ => return None,
                };
                EventKind::Sent(Outcome {
                    certainty,
                    reason: (w[0] >> 16) as u8,
                })
            }
            3 if (w[1] >> 32) as u32 <= OFFERED_BYTES as u32 => EventKind::Offered(Offered {
                incarnation: (w[5] >> 32) as u32,
                first: (u128::from(w[6]) | u128::from(w[7]) << 64).to_le_bytes(),
            }),
            _ => return None,
        };
        Some(Self {
            kind,
            priority: (w[0] >> 24) as u8,
            slot: (w[0] >> 32) as u32,
            generation: w[1] as u32,
            len: (w[1] >> 32) as u32,
            total: w[5] as u32,
            node: w[2] as u16,
            port: (w[2] >> 16) as u16,
            epoch: (w[2] >> 32) as u32,
            number: w[3] as u32,
            record: (w[3] >> 32) as u32,
            tag: w[4],
        })
    }
}

/// The event that tells of the same end of one or several sends, as it is written. Several only to an application that reads them
/// ([`READS_ENDS`](crate::port::READS_ENDS)); who does not know of the others reads the first.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// The event's first word, but for the slot.
    head: u64,
    /// As in a send ring.
    tokens: [u64; ENDS],
    len: usize,
}

impl Ends {
    /// Of none yet.
    #[inline]
    pub fn new(outcome: Outcome) -> Self {
        let certainty = outcome.certainty as u64;
        Self {
            head: u64::from(SENT) | certainty << 8 | u64::from(outcome.reason) << 16,
            tokens: [0; ENDS],
            len: 0,
        }
    }

    /// Of one.
    #[inline]
    pub fn one(token: TokenRef, outcome: Outcome) -> Self {
        let mut ends = Self::new(outcome);
        ends.push(token);
        ends
    }

    /// This one, too. There is room for [`ENDS`].
    #[inline]
    pub fn push(&mut self, token: TokenRef) {
        debug_assert!(self.len < ENDS);
        if let Some(place) = self.tokens.get_mut(self.len) {
            *place = token.encode();
            self.len += 1;
        }
    }

    /// Sends told of.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// None?
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// As ring words.
    #[inline]
    pub fn encode(&self) -> [u64; EVENT_WORDS] {
        let [first, others @ ..] = &self.tokens;
        let first = TokenRef::decode(*first);
        let mut words = [0; EVENT_WORDS];
        words[0] = self.head | u64::from(first.slot) << 32;
        words[1] = u64::from(first.generation);
        words[OTHER_ENDS..].copy_from_slice(others);
        words
    }

    /// The sends told of.
    #[inline]
    pub fn tokens(&self) -> impl Iterator<Item = TokenRef> {
        let tokens = self.tokens.iter().take(self.len);
        tokens.map(|word| TokenRef::decode(*word))
    }
}

/// The sends beside the first that an event of kind [`EventKind::Sent`] tells of, as it is read. By default none.
#[derive(Clone, Copy, Debug)]
pub struct OtherEnds {
    words: [u64; EVENT_WORDS],
    next: usize,
}

impl Default for OtherEnds {
    fn default() -> Self {
        Self {
            words: [0; EVENT_WORDS],
            next: EVENT_WORDS,
        }
    }
}

impl OtherEnds {
    /// Of an event of that kind.
    #[inline]
    pub fn of(words: &[u64; EVENT_WORDS]) -> Self {
        Self {
            words: *words,
            next: OTHER_ENDS,
        }
    }

    /// The next one. Generation 0 is none's: where it is, they end.
    #[inline]
    fn peek(&self) -> Option<TokenRef> {
        let token = TokenRef::decode(*self.words.get(self.next)?);
        (token.generation != 0).then_some(token)
    }

    /// Is none left?
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.peek().is_none()
    }
}

impl Iterator for OtherEnds {
    type Item = TokenRef;

    #[inline]
    fn next(&mut self) -> Option<TokenRef> {
        let token = self.peek()?;
        self.next += 1;
        Some(token)
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // From none to as many sends as an event tells of, at the edges of their names. Expect: each is read as it was told, once and in order, by who
    // knows of all; who does not reads the first.
    #[test]
    fn each_end_is_read_once() {
        let outcome = Outcome {
            certainty: Certainty::MaybeDelivered,
            reason: 5,
        };
        let all = [
            (0, 1),
            (255, u32::MAX),
            (1, 7),
            (0, 2),
            (0, 3),
            (9, 9),
            (255, 1),
        ];
        for count in 0..=ENDS {
            let told: std::vec::Vec<TokenRef> = (all.into_iter().take(count))
                .map(|(slot, generation)| TokenRef { slot, generation })
                .collect();
            let mut ends = Ends::new(outcome);
            told.iter().for_each(|token| ends.push(*token));
            assert_eq!((ends.len(), ends.is_empty()), (count, count == 0));
            assert!(ends.tokens().eq(told.iter().copied()));
            let Some(first) = told.first() else { continue };
            let event = Event::decode(&ends.encode()).unwrap();
            assert_eq!(event.kind, EventKind::Sent(outcome));
            assert_eq!(
                (event.slot, event.generation),
                (first.slot, first.generation)
            );
            let mut others = OtherEnds::of(&ends.encode());
            for other in &told[1..] {
                assert!(!others.is_empty());
                assert_eq!(others.next(), Some(*other));
            }
            assert!(others.is_empty());
            assert_eq!((others.next(), others.next()), (None, None));
        }
        assert!(OtherEnds::default().is_empty());
    }

    proptest! {
        // Any words. Expect: no panic, and what decodes encodes to the same event.
        #[test]
        fn an_event_survives_its_words(words in any::<[u64; EVENT_WORDS]>(), kind in 0u64..5) {
            let mut words = words;
            words[0] = words[0] & !0xff | kind;
            if kind == 3 {
                words[1] &= 0x1f_ffff_ffff;
            }
            if let Some(event) = Event::decode(&words) {
                prop_assert_eq!(Event::decode(&event.encode()), Some(event));
            }
        }
    }

    // Every field of an offer, at its edges. Expect: it comes back as it was; one that claims to show more than there is room for is
    // no event.
    #[test]
    fn an_offer_survives_its_words() {
        let offer = Event {
            kind: EventKind::Offered(Offered {
                incarnation: u32::MAX - 1,
                first: core::array::from_fn(|i| 0xf0 + i as u8),
            }),
            priority: 1,
            slot: 0,
            generation: 0,
            len: OFFERED_BYTES as u32,
            total: u32::MAX,
            node: u16::MAX - 1,
            port: 255,
            record: 7,
            epoch: u32::MAX,
            number: u32::MAX,
            tag: u64::MAX,
        };
        let mut words = offer.encode();
        assert_eq!(Event::decode(&words), Some(offer));
        words[1] += 1 << 32;
        assert_eq!(Event::decode(&words), None);
    }
}
