//! What the puppet can say: a constructor per chunk kind, in numbers relative to the stream's first.

use portolan_transport::host::Reason;
use portolan_transport::policy::AckMode;
use portolan_transport::wire::chunk::{Hello, MAX_RANGES, Range, Received};
use portolan_transport::wire::{Chunk, Payload, StreamRef, crc32c};

use super::{FIRST, OURS, Puppet, THEIRS};
use crate::harness::book::{NO_TAG, fill};

/// A chunk and its payload.
#[derive(Clone, Debug)]
pub struct Say {
    pub chunk: Chunk<'static>,
    pub payload: Vec<u8>,
}

impl From<Chunk<'static>> for Say {
    fn from(chunk: Chunk<'static>) -> Self {
        Self {
            chunk,
            payload: Vec::new(),
        }
    }
}

impl Say {
    /// Of the epoch `k` after the stream's.
    pub fn epoch(mut self, k: i32) -> Self {
        self.stream_mut(|stream| stream.epoch = stream.epoch.wrapping_add(k as u32));
        self
    }

    /// Between other ports.
    pub fn ports(mut self, sender: u16, receiver: u16) -> Self {
        self.stream_mut(|stream| (stream.sender_port, stream.receiver_port) = (sender, receiver));
        self
    }

    /// With START at this number, or without any.
    pub fn start(mut self, at: Option<u32>) -> Self {
        let at = at.map(|number| FIRST.wrapping_add(number));
        if let Chunk::Eager { start, .. }
        | Chunk::Rts { start, .. }
        | Chunk::Null { start, .. }
        | Chunk::Probe { start, .. } = &mut self.chunk
        {
            *start = at;
        }
        self
    }

    /// With the sender's wish about the acknowledgement.
    pub fn acked(mut self, mode: AckMode) -> Self {
        if let Chunk::Eager { ack, .. } | Chunk::Rts { ack, .. } = &mut self.chunk {
            *ack = mode;
        }
        self
    }

    /// A request that is followed by more without a grant, or the bytes that follow so.
    pub fn unasked(mut self) -> Self {
        if let Chunk::Rts { unasked, .. } | Chunk::Data { unasked, .. } = &mut self.chunk {
            *unasked = true;
        }
        self
    }

    /// With a payload that does not match its checksum.
    pub fn corrupt(mut self) -> Self {
        self.payload[0] ^= 1;
        self
    }

    /// Receive buffers it is charged.
    pub(super) fn charge(&self) -> u32 {
        match self.chunk {
            Chunk::Eager { .. } => 1,
            Chunk::Rts { payload, .. } => u32::from(payload.len > 0),
            Chunk::Data { unasked, .. } => u32::from(unasked),
            _ => 0,
        }
    }

    fn stream_mut(&mut self, change: impl FnOnce(&mut StreamRef)) {
        match &mut self.chunk {
            Chunk::Hello(_)
            | Chunk::HelloAck(_)
            | Chunk::Reset { .. }
            | Chunk::PathProbe { .. }
            | Chunk::PathAck { .. } => panic!("a chunk without a stream"),
            Chunk::Eager { stream, .. }
            | Chunk::Rts { stream, .. }
            | Chunk::Data { stream, .. }
            | Chunk::Cts { stream, .. }
            | Chunk::MsgEnd { stream, .. }
            | Chunk::Ack { stream, .. }
            | Chunk::Nack { stream, .. }
            | Chunk::Ready { stream, .. }
            | Chunk::Probe { stream, .. }
            | Chunk::MsgDrop { stream, .. }
            | Chunk::DropConfirm { stream, .. }
            | Chunk::Null { stream, .. }
            | Chunk::NullAck { stream, .. }
            | Chunk::PortClosed { stream, .. }
            | Chunk::Close { stream, .. }
            | Chunk::Closed { stream }
            | Chunk::Refused { stream }
            | Chunk::Resume { stream, .. } => change(stream),
        }
    }
}

/// The stream a chunk names.
pub(super) fn stream_of(chunk: &Chunk<'_>) -> Option<StreamRef> {
    match *chunk {
        Chunk::Hello(_)
        | Chunk::HelloAck(_)
        | Chunk::Reset { .. }
        | Chunk::PathProbe { .. }
        | Chunk::PathAck { .. } => None,
        Chunk::Eager { stream, .. }
        | Chunk::Rts { stream, .. }
        | Chunk::Data { stream, .. }
        | Chunk::Cts { stream, .. }
        | Chunk::MsgEnd { stream, .. }
        | Chunk::Ack { stream, .. }
        | Chunk::Nack { stream, .. }
        | Chunk::Ready { stream, .. }
        | Chunk::Probe { stream, .. }
        | Chunk::MsgDrop { stream, .. }
        | Chunk::DropConfirm { stream, .. }
        | Chunk::Null { stream, .. }
        | Chunk::NullAck { stream, .. }
        | Chunk::PortClosed { stream, .. }
        | Chunk::Close { stream, .. }
        | Chunk::Closed { stream }
        | Chunk::Refused { stream }
        | Chunk::Resume { stream, .. } => Some(stream),
    }
}

/// What an answer on the endpoint's stream says was received: all numbers before one, one number, and one that never will be.
pub(super) fn acknowledged(
    chunk: &Chunk<'_>,
    epoch: u32,
) -> (Option<u32>, Option<u32>, Option<u32>) {
    let fits = stream_of(chunk).is_some_and(|s| s.sender_port == OURS && s.epoch == epoch);
    if !fits {
        return (None, None, None);
    }
    let n = |number: u32| Some(number.wrapping_sub(FIRST));
    match *chunk {
        Chunk::Ack { base, .. } | Chunk::Resume { base, .. } | Chunk::PortClosed { base, .. } => {
            (n(base), None, None)
        }
        Chunk::MsgEnd { number, .. }
        | Chunk::NullAck {
            number,
            delivered: true,
            ..
        } => (None, n(number), None),
        Chunk::NullAck { number, .. } | Chunk::MsgDrop { number, .. } => (None, None, n(number)),
        _ => (None, None, None),
    }
}

fn at(number: u32) -> u32 {
    FIRST.wrapping_add(number)
}

impl Puppet {
    // ---- who is who ----

    fn introduction(&self, echo: u64) -> Hello<'static> {
        let policy = &self.config.policy;
        Hello {
            incarnation: self.incarnation,
            echo,
            cluster: self.config.cluster,
            wire_min: 1,
            wire_max: 1,
            queues: 1,
            max_frame: self.config.max_frame,
            window: policy.window_messages as u16,
            policy: policy.wire(),
            unasked: self.unasked,
            features: self.features,
            name: "two",
        }
    }

    pub fn hello(&self, echo: u64) -> Chunk<'static> {
        Chunk::Hello(self.introduction(echo))
    }

    pub fn hello_ack(&self, echo: u64) -> Chunk<'static> {
        Chunk::HelloAck(self.introduction(echo))
    }

    /// HELLO with something changed.
    pub fn hello_but(&self, change: impl FnOnce(&mut Hello<'static>)) -> Chunk<'static> {
        let mut hello = self.introduction(super::OUR_INCARNATION);
        change(&mut hello);
        Chunk::Hello(hello)
    }

    // ---- the puppet's stream: THEIRS to OURS ----

    pub fn stream(&self) -> StreamRef {
        StreamRef {
            sender_port: THEIRS,
            receiver_port: OURS,
            priority: self.priority as u8,
            epoch: self.epoch,
        }
    }

    fn opening(&self) -> Option<u32> {
        (!self.established).then_some(FIRST)
    }

    /// The id of the puppet's message of this number; messages before it get theirs first, so that ids are in order.
    fn id(&mut self, number: u32, len: u32) -> u64 {
        let len = *self.lengths.entry(number).or_insert(len);
        while self.theirs.len() <= number as usize {
            let next = self.theirs.len() as u32;
            let len = if next == number { len } else { 100 };
            let (route, len) = (
                self.route(false),
                self.lengths.get(&next).copied().unwrap_or(len),
            );
            let id = self.book.borrow_mut().sent(route, len);
            self.theirs.push(id);
        }
        self.theirs[number as usize]
    }

    fn tag(&self, id: u64, len: u32) -> u64 {
        match self.host.tagless && len >= 8 {
            true => NO_TAG,
            false => id,
        }
    }

    /// Bytes `from..to` of the puppet's message.
    fn bytes(id: u64, from: u32, to: u32) -> (Vec<u8>, Payload) {
        let mut bytes = vec![0; (to - from) as usize];
        fill(id, from, &mut bytes);
        let payload = Payload {
            len: bytes.len() as u16,
            crc: crc32c(&bytes),
        };
        (bytes, payload)
    }

    /// A message of 100 bytes.
    pub fn eager(&mut self, number: u32) -> Say {
        self.eager_of(number, 100)
    }

    pub fn eager_of(&mut self, number: u32, len: u32) -> Say {
        let tag = self.id(number, len);
        let (bytes, payload) = Self::bytes(tag, 0, len);
        Say {
            chunk: Chunk::Eager {
                stream: self.stream(),
                start: self.opening(),
                number: at(number),
                tag: self.tag(tag, len),
                ack: AckMode::Policy,
                payload,
            },
            payload: bytes,
        }
    }

    /// A request for `total` bytes with the first `len` of them.
    pub fn rts(&mut self, number: u32, total: u32, len: u32) -> Say {
        let tag = self.id(number, total);
        let (bytes, payload) = Self::bytes(tag, 0, len);
        Say {
            chunk: Chunk::Rts {
                stream: self.stream(),
                start: self.opening(),
                number: at(number),
                tag,
                ack: AckMode::Policy,
                total,
                unasked: false,
                payload,
            },
            payload: bytes,
        }
    }

    pub fn data(&mut self, number: u32, from: u32, to: u32) -> Say {
        let id = self.id(number, to);
        let (bytes, payload) = Self::bytes(id, from, to);
        Say {
            chunk: Chunk::Data {
                stream: self.stream(),
                number: at(number),
                offset: from,
                unasked: false,
                payload,
            },
            payload: bytes,
        }
    }

    pub fn probe(&mut self, number: u32, total: u32) -> Say {
        Chunk::Probe {
            stream: self.stream(),
            start: self.opening(),
            number: at(number),
            total,
        }
        .into()
    }

    pub fn null(&mut self, number: u32) -> Say {
        Chunk::Null {
            stream: self.stream(),
            start: self.opening(),
            number: at(number),
        }
        .into()
    }

    pub fn drop_confirm(&self, number: u32) -> Say {
        Chunk::DropConfirm {
            stream: self.stream(),
            number: at(number),
        }
        .into()
    }

    pub fn close(&self, next: u32) -> Say {
        Chunk::Close {
            stream: self.stream(),
            next: at(next),
        }
        .into()
    }

    // ---- answers to the endpoint's stream: OURS to THEIRS ----

    /// The endpoint's stream, of the newest epoch heard.
    pub fn our_stream(&self) -> StreamRef {
        StreamRef {
            sender_port: OURS,
            receiver_port: THEIRS,
            priority: self.priority as u8,
            epoch: self.our_epoch,
        }
    }

    pub fn ack(&self, base: u32) -> Say {
        self.ack_with(base, &[])
    }

    /// ACK that lists numbers received from its base on.
    pub fn ack_with(&self, base: u32, beyond: &[u32]) -> Say {
        let mut received = Received::default();
        beyond
            .iter()
            .for_each(|number| received.set((number - base) as usize));
        Chunk::Ack {
            stream: self.our_stream(),
            base: at(base),
            received,
        }
        .into()
    }

    /// NACK: 1 gap, 2 no buffer, 3 corrupt.
    pub fn nack(&self, expected: u32, reason: u8) -> Say {
        Chunk::Nack {
            stream: self.our_stream(),
            expected: at(expected),
            reason,
        }
        .into()
    }

    pub fn ready(&self, number: u32) -> Say {
        Chunk::Ready {
            stream: self.our_stream(),
            number: at(number),
        }
        .into()
    }

    pub fn cts(&self, number: u32, granted: u32, again: &[(u32, u32)]) -> Say {
        let mut missing = [Range::default(); MAX_RANGES];
        for (place, &(from, to)) in missing.iter_mut().zip(again) {
            *place = Range { from, to };
        }
        Chunk::Cts {
            stream: self.our_stream(),
            number: at(number),
            granted,
            missing,
            missing_len: again.len() as u8,
        }
        .into()
    }

    pub fn msg_end(&self, number: u32) -> Say {
        Chunk::MsgEnd {
            stream: self.our_stream(),
            number: at(number),
        }
        .into()
    }

    pub fn msg_drop(&self, number: u32, reason: Reason) -> Say {
        Chunk::MsgDrop {
            stream: self.our_stream(),
            number: at(number),
            reason: reason as u8,
        }
        .into()
    }

    pub fn null_ack(&self, number: u32, delivered: bool) -> Say {
        Chunk::NullAck {
            stream: self.our_stream(),
            number: at(number),
            delivered,
        }
        .into()
    }

    pub fn port_closed(&self, base: u32) -> Say {
        Chunk::PortClosed {
            stream: self.our_stream(),
            base: at(base),
        }
        .into()
    }

    pub fn closed(&self) -> Say {
        Chunk::Closed {
            stream: self.our_stream(),
        }
        .into()
    }

    pub fn refused(&self) -> Say {
        Chunk::Refused {
            stream: self.our_stream(),
        }
        .into()
    }

    pub fn resume(&self, base: u32) -> Say {
        Chunk::Resume {
            stream: self.our_stream(),
            base: at(base),
        }
        .into()
    }
}
