//! Copies of the frames that pass, for `portolan capture`.
//!
//! Off, it costs the path one test per frame. On, a frame is copied to a ring of its own ([`portolan_abi::tap`]) if there is room, and counted if
//! not: an engine waits for nobody who watches it. The standby has the ring mapped as well, and goes on with it.

use std::os::fd::{AsFd, OwnedFd};

use portolan_abi::tap::{Passing, TapGeometry, TapWriter, Way};

use super::encap::Encapsulation;

/// Where sender and receiving queue are in a transport frame (wire.md §2).
const HEADER: usize = 14;

/// A ring, and what goes onto it.
pub struct Tap {
    id: u64,
    writer: TapWriter,
    peer: Option<u16>,
}

impl Tap {
    /// Maps a ring from its message. `None`, and a line in the log, if that cannot be done: nobody loses a message by it.
    pub fn map(
        id: u64,
        geometry: TapGeometry,
        peer: Option<u16>,
        fds: &[OwnedFd],
    ) -> Option<Box<Self>> {
        let [ring, mark] = fds else {
            tracing::warn!("a tap came without its ring");
            return None;
        };
        match TapWriter::map(ring.as_fd(), mark.as_fd(), geometry) {
            Ok(writer) => Some(Box::new(Self { id, writer, peer })),
            Err(error) => {
                tracing::warn!(%error, "a tap cannot be mapped");
                None
            }
        }
    }

    /// Tells it from others.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> u64 {
        self.writer.bytes()
    }

    /// Records from now on.
    pub fn begin(&mut self, engine_epoch: u32) {
        self.writer.begin(engine_epoch);
    }

    /// Says that no more comes.
    pub fn end(&self) {
        self.writer.end();
    }

    /// A frame as it came from the wire, whatever it is.
    #[cold]
    #[inline(never)]
    pub fn received(&mut self, encap: &Encapsulation, segments: &[&[u8]]) {
        let total = segments.iter().map(|segment| segment.len()).sum();
        let first = segments.first().copied().unwrap_or_default();
        let inner = encap.parse(first, total).ok();
        let header = inner.and_then(|inner| first.get(inner.at..)?.first_chunk::<HEADER>());
        let (peer, queue) = header.map_or((0, 0), |header| {
            (u16::from_be_bytes([header[8], header[9]]), header[13])
        });
        self.record(Way::Received, peer, queue, segments);
    }

    /// A frame that goes to the wire.
    #[cold]
    #[inline(never)]
    pub fn sent(&mut self, frame: &[u8], node: u16, queue: u8) {
        self.record(Way::Sent, node, queue, &[frame]);
    }

    /// A transport frame that stays on this node, `node`.
    #[cold]
    #[inline(never)]
    pub fn inside(&mut self, way: Way, node: u16, queue: u8, segments: &[&[u8]]) {
        self.record(way, node, queue, segments);
    }

    fn record(&mut self, way: Way, peer: u16, queue: u8, segments: &[&[u8]]) {
        if self.peer.is_some_and(|wanted| wanted != peer) {
            return;
        }
        let length: usize = segments.iter().map(|segment| segment.len()).sum();
        let passing = Passing {
            at: super::now(),
            way,
            peer,
            queue,
            length: u32::try_from(length).unwrap_or(u32::MAX),
        };
        self.writer.record(&passing, segments);
    }
}
