//! The parts of chunk headers, written and read, wire.md §3 and §4. What a kind consists of is in `codec`.

use super::chunk::{ACK_WORDS, Hello, MAX_RANGES, Payload, PolicyWire, Range, Received, StreamRef};
use super::codec::LONGEST;
use super::error::WireError;
use crate::ident::PORTS;
use crate::policy::AckMode;

/// The longest node name.
const NAME_MAX: usize = 64;

pub(super) const FLAG_PAYLOAD: u8 = 1;
pub(super) const FLAG_START: u8 = 2;
const FLAG_HIGH: u8 = 4;
const FLAG_ACK_NOW: u8 = 8;
const FLAG_ACK_LAZY: u8 = 16;
const FLAG_UNASKED: u8 = 32;
pub(super) const FLAG_TAG: u8 = 64;

// ---- writing ----

/// The flag of a priority.
#[inline]
pub(super) fn priority_flag(priority: u8) -> u8 {
    if priority == 0 { 0 } else { FLAG_HIGH }
}

/// The flag of bytes that were not asked for.
#[inline]
pub(super) fn unasked_flag(unasked: bool) -> u8 {
    if unasked { FLAG_UNASKED } else { 0 }
}

/// The flags that say when a message's sender wants its acknowledgement.
#[inline]
pub(super) fn ack_flags(mode: AckMode) -> u8 {
    match mode {
        AckMode::Policy => 0,
        AckMode::Immediate => FLAG_ACK_NOW,
        AckMode::Lazy => FLAG_ACK_LAZY,
    }
}

/// A chunk header being written; the caller's array is long enough for every kind.
pub(super) struct Emit<'b> {
    pub to: &'b mut [u8; LONGEST],
    pub len: usize,
}

impl Emit<'_> {
    #[inline]
    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        if let Some(to) = self.to.get_mut(self.len..self.len + bytes.len()) {
            to.copy_from_slice(bytes);
            self.len += bytes.len();
        }
        self
    }
    #[inline]
    pub(super) fn u8_padded(self, value: u8) -> Self {
        self.bytes(&[value, 0, 0, 0])
    }
    #[inline]
    pub(super) fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_be_bytes())
    }
    #[inline]
    pub(super) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_be_bytes())
    }
    #[inline]
    pub(super) fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    #[inline]
    pub(super) fn payload(self, payload: Payload) -> Self {
        self.to[1] |= FLAG_PAYLOAD;
        self.u16(payload.len).u16(0).u32(payload.crc)
    }

    #[inline]
    pub(super) fn stream(self, stream: &StreamRef) -> Self {
        self.to[1] |= priority_flag(stream.priority);
        self.u16(stream.sender_port)
            .u16(stream.receiver_port)
            .u32(stream.epoch)
    }

    #[inline]
    pub(super) fn start(self, start: Option<u32>) -> Self {
        match start {
            None => self,
            Some(start) => {
                self.to[1] |= FLAG_START;
                self.u32(start)
            }
        }
    }

    #[inline]
    pub(super) fn ack_mode(self, mode: AckMode) -> Self {
        self.to[1] |= ack_flags(mode);
        self
    }

    #[inline]
    pub(super) fn unasked(self, unasked: bool) -> Self {
        self.to[1] |= unasked_flag(unasked);
        self
    }

    pub(super) fn received(mut self, received: &Received) -> Self {
        for word in received.words() {
            self = self.u64(*word);
        }
        self
    }

    pub(super) fn hello(self, hello: &Hello<'_>) -> Self {
        let name = name_prefix(hello.name).as_bytes();
        self.u64(hello.incarnation)
            .u64(hello.echo)
            .u64(hello.cluster)
            .bytes(&[
                hello.wire_min,
                hello.wire_max,
                hello.queues,
                name.len() as u8,
            ])
            .u16(hello.max_frame)
            .u16(hello.window)
            .bytes(&[
                hello.policy.recovery,
                hello.policy.ack_rule,
                hello.policy.order,
                hello.unasked,
            ])
            .bytes(name)
            .bytes(&[0; 3][..name.len().wrapping_neg() % 4])
            .u32(hello.features)
    }

    pub(super) fn ranges(mut self, ranges: &[Range]) -> Self {
        for range in ranges {
            self = self.u32(range.from).u32(range.to);
        }
        self
    }
}

/// The longest prefix of a name that fits and ends between characters.
fn name_prefix(name: &str) -> &str {
    let mut end = name.len().min(NAME_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

// ---- reading ----

/// The priority that a chunk's flags say.
#[inline]
pub(super) fn priority(flags: u8) -> u8 {
    u8::from(flags & FLAG_HIGH != 0)
}

/// When a message's sender wants its acknowledgement.
#[inline]
pub(super) fn ack_mode(flags: u8) -> AckMode {
    if flags & FLAG_ACK_NOW != 0 {
        AckMode::Immediate
    } else if flags & FLAG_ACK_LAZY != 0 {
        AckMode::Lazy
    } else {
        AckMode::Policy
    }
}

/// Whether a chunk's flags speak of bytes that nobody asked for.
#[inline]
pub(super) fn is_unasked(flags: u8) -> bool {
    flags & FLAG_UNASKED != 0
}

/// What is left of a chunk header being read.
pub(super) struct Fields<'a> {
    pub flags: u8,
    pub rest: &'a [u8],
}

impl<'a> Fields<'a> {
    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(WireError::ChunkField)?;
        self.rest = rest;
        Ok(*head)
    }
    #[inline]
    pub(super) fn u8_padded(&mut self) -> Result<u8, WireError> {
        Ok(self.array::<4>()?[0])
    }
    #[inline]
    pub(super) fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_be_bytes(self.array()?))
    }
    #[inline]
    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_be_bytes(self.array()?))
    }
    #[inline]
    pub(super) fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    #[inline]
    pub(super) fn stream(&mut self) -> Result<StreamRef, WireError> {
        let (sender_port, receiver_port) = (self.u16()?, self.u16()?);
        if sender_port >= PORTS || receiver_port >= PORTS {
            return Err(WireError::ChunkField);
        }
        Ok(StreamRef {
            sender_port,
            receiver_port,
            priority: priority(self.flags),
            epoch: self.u32()?,
        })
    }

    #[inline]
    pub(super) fn start(&mut self) -> Result<Option<u32>, WireError> {
        if self.flags & FLAG_START != 0 {
            self.u32().map(Some)
        } else {
            Ok(None)
        }
    }

    /// As many words as there are.
    pub(super) fn received(&mut self) -> Result<Received, WireError> {
        let mut received = Received::default();
        for word in received
            .0
            .iter_mut()
            .take(self.rest.len() / 8)
            .take(ACK_WORDS)
        {
            *word = self.u64()?;
        }
        Ok(received)
    }

    pub(super) fn hello(&mut self) -> Result<Hello<'a>, WireError> {
        let (incarnation, echo, cluster) = (self.u64()?, self.u64()?, self.u64()?);
        let [wire_min, wire_max, queues, name_len] = self.array()?;
        let (max_frame, window) = (self.u16()?, self.u16()?);
        let [recovery, ack_rule, order, unasked] = self.array()?;
        let policy = PolicyWire {
            recovery,
            ack_rule,
            order,
        };
        let name_len = usize::from(name_len);
        if name_len > NAME_MAX {
            return Err(WireError::ChunkField);
        }
        let name = self.rest.get(..name_len).ok_or(WireError::ChunkField)?;
        let name = core::str::from_utf8(name).map_err(|_| WireError::ChunkField)?;
        // Who has nothing to say of them says nothing.
        let features = self.rest.get(name_len.next_multiple_of(4)..);
        let features = features.and_then(|rest| rest.first_chunk());
        Ok(Hello {
            incarnation,
            echo,
            cluster,
            wire_min,
            wire_max,
            queues,
            max_frame,
            window,
            policy,
            unasked,
            features: features.map_or(0, |bits| u32::from_be_bytes(*bits)),
            name,
        })
    }

    pub(super) fn ranges(&mut self, count: u8) -> Result<[Range; MAX_RANGES], WireError> {
        let mut ranges = [Range::default(); MAX_RANGES];
        for range in ranges
            .get_mut(..usize::from(count))
            .ok_or(WireError::ChunkField)?
        {
            *range = Range {
                from: self.u32()?,
                to: self.u32()?,
            };
            if range.from >= range.to {
                return Err(WireError::ChunkField);
            }
        }
        Ok(ranges)
    }
}
