//! A recorded session, understood a second time: by the transport's own parser, and by looking ahead from each request for its answer
//! instead of back from each answer (transport.md §5.1, §6.2, §7.1).

use portolan_transport::wire::{self, Chunk, FrameHeader, StreamRef};

/// A chunk, and the frame that carries it.
struct Told<'a> {
    /// From 1, as tshark counts.
    frame: usize,
    header: FrameHeader,
    chunk: Chunk<'a>,
}

/// What the dissector must find, per frame, each in the order of its chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    pub sent_before_in: Vec<usize>,
    pub answered_in: Vec<usize>,
    pub committed_in: Vec<usize>,
    pub kinds: Vec<&'static str>,
    pub is_bare: bool,
}

/// Node and incarnation of a stream's sender, its receiver's node, and its name.
type Key = (u16, u32, u16, StreamRef);

/// Whether a frame written with this echo knows of what was sent then.
fn heard(echo: u32, sent_at: u32) -> bool {
    echo == 0 || echo.wrapping_sub(sent_at) < 1 << 31
}

/// Whether `number` comes before `base`.
fn before(number: u32, base: u32) -> bool {
    number != base && base.wrapping_sub(number) < 1 << 31
}

impl Told<'_> {
    fn forward(&self, stream: &StreamRef) -> Option<Key> {
        let h = &self.header;
        Some((h.src_node, h.src_incarnation, h.dst_node, *stream))
    }

    fn back(&self, stream: &StreamRef) -> Option<Key> {
        let h = &self.header;
        Some((h.dst_node, h.dst_incarnation, h.src_node, *stream))
    }

    fn stream(&self) -> Option<Key> {
        match &self.chunk {
            Chunk::Eager { stream, .. }
            | Chunk::Rts { stream, .. }
            | Chunk::Data { stream, .. }
            | Chunk::Probe { stream, .. }
            | Chunk::DropConfirm { stream, .. }
            | Chunk::Null { stream, .. }
            | Chunk::Close { stream, .. } => self.forward(stream),
            Chunk::Cts { stream, .. }
            | Chunk::MsgEnd { stream, .. }
            | Chunk::Ack { stream, .. }
            | Chunk::Nack { stream, .. }
            | Chunk::Ready { stream, .. }
            | Chunk::MsgDrop { stream, .. }
            | Chunk::NullAck { stream, .. }
            | Chunk::PortClosed { stream, .. }
            | Chunk::Closed { stream }
            | Chunk::Refused { stream }
            | Chunk::Resume { stream, .. } => self.back(stream),
            Chunk::Hello(_)
            | Chunk::HelloAck(_)
            | Chunk::Reset { .. }
            | Chunk::PathProbe { .. }
            | Chunk::PathAck { .. } => None,
        }
    }

    fn kind(&self) -> &'static str {
        match self.chunk {
            Chunk::Hello(_) => "HELLO",
            Chunk::HelloAck(_) => "HELLO-ACK",
            Chunk::Reset { .. } => "RESET",
            Chunk::Eager { .. } => "EAGER",
            Chunk::Rts { .. } => "RTS",
            Chunk::Data { .. } => "DATA",
            Chunk::Cts { .. } => "CTS",
            Chunk::MsgEnd { .. } => "MSGEND",
            Chunk::Ack { .. } => "ACK",
            Chunk::Nack { .. } => "NACK",
            Chunk::Ready { .. } => "READY",
            Chunk::Probe { .. } => "PROBE",
            Chunk::MsgDrop { .. } => "MSGDROP",
            Chunk::DropConfirm { .. } => "DROP-CONFIRM",
            Chunk::Null { .. } => "NULL",
            Chunk::NullAck { .. } => "NULL-ACK",
            Chunk::PortClosed { .. } => "PORT-CLOSED",
            Chunk::Close { .. } => "CLOSE",
            Chunk::Closed { .. } => "CLOSED",
            Chunk::Refused { .. } => "REFUSED",
            Chunk::Resume { .. } => "RESUME",
            Chunk::PathProbe { .. } => "PATH-PROBE",
            Chunk::PathAck { .. } => "PATH-ACK",
        }
    }

    /// The message of which this is the first chunk.
    fn message(&self) -> Option<u32> {
        match self.chunk {
            Chunk::Eager { number, .. } | Chunk::Rts { number, .. } => Some(number),
            _ => None,
        }
    }

    /// The message and the bytes of it that travel here.
    fn bytes(&self) -> Option<(u32, u64, u64)> {
        let (number, from, len) = match self.chunk {
            Chunk::Eager {
                number, payload, ..
            }
            | Chunk::Rts {
                number, payload, ..
            } => (number, 0, payload.len),
            Chunk::Data {
                number,
                offset,
                payload,
                ..
            } => (number, offset, payload.len),
            _ => return None,
        };
        Some((number, u64::from(from), u64::from(from) + u64::from(len)))
    }

    /// Whether this chunk says something of the message, asked by its first chunk.
    fn speaks_of(&self, number: u32) -> bool {
        match &self.chunk {
            Chunk::Ack { base, received, .. } => {
                before(number, *base) || received.has(number.wrapping_sub(*base) as usize)
            }
            Chunk::Resume { base, .. } => before(number, *base),
            Chunk::Nack { expected, .. } => number == *expected,
            Chunk::Cts { number: n, .. }
            | Chunk::Ready { number: n, .. }
            | Chunk::MsgEnd { number: n, .. }
            | Chunk::MsgDrop { number: n, .. } => number == *n,
            Chunk::PortClosed { .. } | Chunk::Refused { .. } => true,
            _ => false,
        }
    }

    /// Whether it says that the message is committed.
    fn commits(&self, number: u32) -> bool {
        match self.chunk {
            Chunk::Ack { base, .. } | Chunk::Resume { base, .. } => before(number, base),
            Chunk::PortClosed { base, .. } => before(number, base),
            Chunk::MsgEnd { number: n, .. } => number == n,
            Chunk::NullAck {
                number: n,
                delivered,
                ..
            } => number == n && delivered,
            _ => false,
        }
    }

    /// Whether it says that the message is not, and never will be.
    fn gives_up(&self, number: u32) -> bool {
        match self.chunk {
            Chunk::MsgDrop { number: n, .. } => number == n,
            Chunk::NullAck {
                number: n,
                delivered,
                ..
            } => number == n && !delivered,
            _ => false,
        }
    }

    /// Whether it answers this request, whose writer it had heard.
    fn answers(&self, request: &Told<'_>) -> bool {
        let back = self.header.src_node == request.header.dst_node
            && self.header.dst_node == request.header.src_node;
        if !back || !heard(self.header.echo, request.header.sent_at) {
            return false;
        }
        if let Some(number) = request.message() {
            return self.speaks_of(number);
        }
        match (&request.chunk, &self.chunk) {
            (Chunk::Hello(asked), Chunk::HelloAck(told)) => asked.incarnation == told.echo,
            (Chunk::PathProbe { nonce: a, size: b }, Chunk::PathAck { nonce: c, size: d }) => {
                (a, b) == (c, d)
            }
            (Chunk::Probe { .. }, _) => {
                let key = self.stream();
                key.is_some_and(|key| self.back(&key.3) == Some(key))
            }
            (Chunk::Null { number: a, .. }, Chunk::NullAck { number: b, .. })
            | (Chunk::Null { number: a, .. }, Chunk::MsgDrop { number: b, .. })
            | (Chunk::MsgDrop { number: a, .. }, Chunk::DropConfirm { number: b, .. }) => a == b,
            (
                Chunk::NullAck {
                    number: a,
                    delivered,
                    ..
                },
                Chunk::DropConfirm { number: b, .. },
            ) => a == b && !delivered,
            (Chunk::Close { .. }, Chunk::Closed { .. }) => true,
            _ => false,
        }
    }
}

/// Understands a session's frames.
pub fn links(frames: &[Vec<u8>]) -> Vec<Links> {
    let segments: Vec<[&[u8]; 1]> = frames.iter().map(|frame| [frame.as_slice()]).collect();
    let mut all = Vec::new();
    let (mut in_full, mut bare) = (Vec::<FrameHeader>::new(), Vec::new());
    for (nth, segments) in segments.iter().enumerate() {
        let frame = wire::parse(segments).expect("engines send well-formed frames");
        let mut header = *frame.header();
        if frame.is_bare() {
            // Who they are was said before, and has not changed: nobody dies here.
            let way = (header.src_node, header.dst_node);
            let before = (in_full.iter().rev())
                .find(|before| (before.src_node, before.dst_node) == way)
                .expect("a frame in full");
            header.src_incarnation = before.src_incarnation;
            header.dst_incarnation = before.dst_incarnation;
        } else {
            in_full.push(header);
        }
        bare.push(frame.is_bare());
        for (chunk, view) in frame.chunks() {
            assert!(view.verify());
            all.push(Told {
                frame: nth + 1,
                header,
                chunk,
            });
        }
    }
    let link = |&is_bare: &bool| Links {
        is_bare,
        ..Links::default()
    };
    let mut links: Vec<Links> = bare.iter().map(link).collect();
    for (at, told) in all.iter().enumerate() {
        let found = &mut links[told.frame - 1];
        found.kinds.push(told.kind());
        found.sent_before_in.extend(sent_before(&all[..at], told));
        found.answered_in.extend(answer(&all[at + 1..], told));
        found
            .committed_in
            .extend(commit(&all[..at], &all[at + 1..], told));
    }
    links
}

fn sent_before(past: &[Told<'_>], told: &Told<'_>) -> Option<usize> {
    let (number, from, to) = told.bytes()?;
    let key = told.stream();
    let same = |other: &&Told<'_>| {
        let Some((n, f, t)) = other.bytes() else {
            return false;
        };
        n == number
            && other.stream() == key
            && match told.message() {
                Some(_) => other.message().is_some(),
                None => f < to && from < t,
            }
    };
    past.iter().rev().find(same).map(|other| other.frame)
}

fn answer(future: &[Told<'_>], told: &Told<'_>) -> Option<usize> {
    let key = told.stream();
    if let Chunk::Data { number, .. } = told.chunk {
        // The last piece before the message's end.
        for other in future.iter().filter(|other| other.stream() == key) {
            match other.chunk {
                Chunk::Data { number: n, .. } if n == number => return None,
                Chunk::MsgEnd { number: n, .. } if n == number => return Some(other.frame),
                _ => {}
            }
        }
        return None;
    }
    let mut future = future.iter();
    let found = future.find(|other| other.stream() == key && other.answers(told));
    found.map(|other| other.frame)
}

/// Where the message is committed whose first chunk this is, the first time that it is sent.
fn commit(past: &[Told<'_>], future: &[Told<'_>], told: &Told<'_>) -> Option<usize> {
    let number = told.message()?;
    if sent_before(past, told).is_some() {
        return None;
    }
    let key = told.stream();
    let mut future = future.iter().filter(|other| other.stream() == key);
    let end = future.find(|other| other.commits(number) || other.gives_up(number))?;
    end.commits(number).then_some(end.frame)
}
