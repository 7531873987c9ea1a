//! Events: what the engine tells an application, one cache line each.

/// Words of an event.
pub const EVENT_WORDS: usize = 8;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A message is in the buffer of receive slot `slot`.
    Received,
    /// The send, or command, in send slot `slot` ended.
    Sent(Outcome),
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
    /// Received: bytes.
    pub len: u32,
    /// Received: sending node.
    pub node: u16,
    /// Received: sending port.
    pub port: u16,
    /// Received: the stream's record in the ledger, for restore.
    pub record: u32,
    /// Received: the stream's epoch.
    pub epoch: u32,
    /// Received: the message's number.
    pub number: u32,
    /// Received: the sender's tag.
    pub tag: u64,
}

impl Event {
    /// As ring words.
    pub fn encode(&self) -> [u64; EVENT_WORDS] {
        let (kind, certainty, reason) = match self.kind {
            EventKind::Received => (1u8, 0, 0),
            EventKind::Sent(outcome) => (2u8, outcome.certainty as u8, outcome.reason),
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
            0,
            0,
            0,
        ]
    }

    /// From ring words; `None` if they are no event.
    pub fn decode(w: &[u64; EVENT_WORDS]) -> Option<Self> {
        let kind = match w[0] as u8 {
            1 => EventKind::Received,
            2 => {
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
            _ => return None,
        };
        Some(Self {
            kind,
            priority: (w[0] >> 24) as u8,
            slot: (w[0] >> 32) as u32,
            generation: w[1] as u32,
            len: (w[1] >> 32) as u32,
            node: w[2] as u16,
            port: (w[2] >> 16) as u16,
            epoch: (w[2] >> 32) as u32,
            number: w[3] as u32,
            record: (w[3] >> 32) as u32,
            tag: w[4],
        })
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        // Any words. Expect: no panic, and what decodes encodes to the same event.
        #[test]
        fn an_event_survives_its_words(words in any::<[u64; EVENT_WORDS]>(), kind in 0u64..4) {
            let mut words = words;
            words[0] = words[0] & !0xff | kind;
            if let Some(event) = Event::decode(&words) {
                prop_assert_eq!(Event::decode(&event.encode()), Some(event));
            }
        }
    }
}
