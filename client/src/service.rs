//! The node's own service on port 0, and the few messages the `portolan` command exchanges, told apart by their tags.
//!
//! | kind | bytes | answered by |
//! |---|---|---|
//! | [`Kind::Ping`] | any | [`Kind::PingReply`], the same bytes, id and priority |
//! | [`Kind::Allsize`] | any | [`Kind::AllsizeReply`], the same |
//! | [`Kind::Begin`] | none | – ; a transfer begins, its id in every message of it |
//! | [`Kind::Data`] | a piece, in order | – |
//! | [`Kind::End`] | 8: how many bytes all pieces had, little-endian | [`Kind::Receipt`], 8: how many were written out |

use std::time::Duration;

use crate::arena::Buffer;
use crate::error::{PortError, SendError};
use crate::event::{Event, Message};
use crate::names::Priority;
use crate::node::PortOptions;
use crate::port::{Port, SendOptions};
use crate::status::{Reason, Status};

/// The port the daemon answers on itself.
pub const SERVICE_PORT: u16 = 0;
/// The port `portolan recv` opens and `portolan send` sends to, if none is named.
pub const TRANSFER_PORT: u16 = 7;
/// The port `portolan echo` opens, if none is named.
pub const ECHO_PORT: u16 = 6;
/// Longest message an [`EchoServer`] answers.
pub const ECHO_MAX: usize = (16 << 20) + 4096;
/// What an [`EchoServer`] offers at each priority: bytes of a buffer, and how many. A few more bytes than the round number, because
/// tests of all sizes like the number after it.
const BUFFERS: [(usize, usize); 4] = [
    (4096, 64),
    ((64 << 10) + 64, 16),
    ((1 << 20) + 4096, 6),
    (ECHO_MAX, 2),
];
const ECHO_ARENA: u64 = 96 << 20;

/// Meaning of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Answer, please.
    Ping = 1,
    /// Answer to a ping.
    PingReply = 2,
    /// Send it back, please, whatever its size.
    Allsize = 3,
    /// The message, back.
    AllsizeReply = 4,
    /// A transfer begins.
    Begin = 16,
    /// A piece of it.
    Data = 17,
    /// Its end.
    End = 18,
    /// It was written out.
    Receipt = 19,
}

/// A message's tag: what it is, in the high 8 bits, and which conversation it belongs to, in the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// What it is.
    pub kind: Kind,
    /// Which conversation, 56 bits.
    pub id: u64,
}

const ID_BITS: u32 = 56;

impl Tag {
    /// As the tag of a message.
    pub fn encode(self) -> u64 {
        u64::from(self.kind as u8) << ID_BITS | self.id & ((1 << ID_BITS) - 1)
    }

    /// From the tag of a message; `None` if it is none of these.
    pub fn decode(tag: u64) -> Option<Self> {
        let kind = match (tag >> ID_BITS) as u8 {
            1 => Kind::Ping,
            2 => Kind::PingReply,
            3 => Kind::Allsize,
            4 => Kind::AllsizeReply,
            16 => Kind::Begin,
            17 => Kind::Data,
            18 => Kind::End,
            19 => Kind::Receipt,
            _ => return None,
        };
        Some(Self {
            kind,
            id: tag & ((1 << ID_BITS) - 1),
        })
    }
}

/// Which messages an [`EchoServer`] sends back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// Pings and allsizes only.
    Service,
    /// Everything but replies: whatever two servers may think of, they never answer each other for ever.
    Everything,
}

/// What an [`EchoServer`] did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EchoCounts {
    /// Messages sent back and delivered.
    pub answered: u64,
    /// Messages that were none of ours to answer.
    pub ignored: u64,
    /// Answers that were not, or perhaps not, delivered.
    pub failed: u64,
}

/// Sends messages back in the buffers they came in.
///
/// Memory is bounded by the port's arena. While an answer is under way its buffer takes no message; an asker that stops reading
/// holds its answers' buffers until their timeout ends them and no longer: the first failed answer drops the others to the same asker.
#[derive(Debug)]
pub struct EchoServer {
    answers: Answers,
    timeout: Duration,
    counts: EchoCounts,
}

impl EchoServer {
    /// Answers `answers`; gives an answer up after `timeout`.
    pub fn new(answers: Answers, timeout: Duration) -> Self {
        Self {
            answers,
            timeout,
            counts: EchoCounts::default(),
        }
    }

    /// What was done so far.
    pub fn counts(&self) -> EchoCounts {
        self.counts
    }

    /// The options of a port to serve on: a send token and a receive token for each buffer, so that no answer waits for a token.
    pub fn port_options(port: u16) -> PortOptions {
        PortOptions {
            send_tokens: 255,
            receive_tokens: 256,
            arena_bytes: ECHO_ARENA,
            ..PortOptions::at(port)
        }
    }

    /// Offers the port's buffers. Once, before serving.
    pub fn provide_buffers(port: &mut Port) -> Result<(), SendError> {
        for (len, count) in BUFFERS {
            for _ in 0..count {
                for priority in [Priority::Low, Priority::High] {
                    let buffer = port.allocate(len)?;
                    port.provide_receive_buffer(buffer, priority)?;
                }
            }
        }
        Ok(())
    }

    /// Serves until the port ends or `timeout` passes without an event.
    pub fn serve(&mut self, port: &mut Port, timeout: Duration) -> Result<(), PortError> {
        while let Some(event) = port.blocking_receive(timeout)? {
            self.handle(port, event);
        }
        Ok(())
    }

    /// Answers one event.
    pub fn handle(&mut self, port: &mut Port, event: Event) {
        match event {
            Event::Received(message) => match self.reply_tag(message.tag()) {
                Some(tag) => self.answer(port, message, tag),
                None => {
                    self.counts.ignored += 1;
                    let priority = message.priority();
                    provide(port, message.into_buffer(), priority);
                }
            },
            Event::Sent(sent) => {
                match sent.status {
                    Status::Delivered => self.counts.answered += 1,
                    Status::NotDelivered(reason) | Status::MaybeDelivered(reason) => {
                        self.counts.failed += 1;
                        if reason != Reason::Dropped {
                            // Without a free command slot the next failure does it.
                            let _ = port.drop_sends(sent.to, sent.priority);
                        }
                    }
                }
                if let Some(buffer) = sent.buffer {
                    provide(port, buffer, sent.priority);
                }
            }
            other => port.unknown(other),
        }
    }

    fn reply_tag(&self, tag: u64) -> Option<u64> {
        let reply = |kind, id| Some(Tag { kind, id }.encode());
        match (Tag::decode(tag), self.answers) {
            (
                Some(Tag {
                    kind: Kind::Ping,
                    id,
                }),
                _,
            ) => reply(Kind::PingReply, id),
            (
                Some(Tag {
                    kind: Kind::Allsize,
                    id,
                }),
                _,
            ) => reply(Kind::AllsizeReply, id),
            (
                Some(Tag {
                    kind: Kind::PingReply | Kind::AllsizeReply | Kind::Receipt,
                    ..
                }),
                _,
            )
            | (_, Answers::Service) => None,
            (_, Answers::Everything) => Some(tag),
        }
    }

    fn answer(&mut self, port: &mut Port, message: Message, tag: u64) {
        let (to, priority, len) = (message.from(), message.priority(), message.len());
        let options = SendOptions {
            priority,
            tag,
            timeout: Some(self.timeout),
            ..SendOptions::default()
        };
        if let Err(refused) = port.send(to, message.into_buffer(), len, options) {
            // No token, which a server has one of per buffer, or the port is gone, which the next receive says.
            self.counts.failed += 1;
            provide(port, refused.buffer, priority);
        }
    }
}

/// Offers a buffer again; if the port is gone the buffer goes back to the arena.
fn provide(port: &mut Port, buffer: Buffer, priority: Priority) {
    let _ = port.provide_receive_buffer(buffer, priority);
}

#[cfg(test)]
mod tests {
    use super::*;

    // Every kind, with an id that uses all its bits. Expect: the tag survives; other tags are none of ours.
    #[test]
    fn tags_survive() {
        let kinds = [
            Kind::Ping,
            Kind::PingReply,
            Kind::Allsize,
            Kind::AllsizeReply,
            Kind::Begin,
            Kind::Data,
            Kind::End,
            Kind::Receipt,
        ];
        for kind in kinds {
            let tag = Tag {
                kind,
                id: 0x00ab_cdef_0123_4567,
            };
            assert_eq!(Tag::decode(tag.encode()), Some(tag));
        }
        assert_eq!(Tag::decode(5), None);
        assert_eq!(Tag::decode(u64::MAX), None);
    }
}
