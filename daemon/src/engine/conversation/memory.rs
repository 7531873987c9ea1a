//! What survives the engine of one end: ledger, port and wire, in real memfds, and images of it.
//!
//! An [`Image`] holds every word an engine of this laboratory may store: it is what a successor would find if the engine had died just
//! then. Two things are left out: counters, which nobody restores from, and the frames on the wire, which are written before the
//! index that makes them visible and never again; [`Memory::frames_since`] keeps those.

use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use portolan_abi::event::{Event, EventKind, OtherEnds};
use portolan_abi::ledger::{LedgerGeometry, LedgerHeader};
use portolan_abi::memory::{ClientHalf, EngineHalf, LedgerMapping, Mapping, create_sealed};
use portolan_abi::port::{EngineHeader, Inventory, PortGeometry};
use rustix::fs::{FallocateFlags, fallocate};

use super::super::crossing::{CROSSING_BYTES, SLOT_BYTES, SLOTS};
use super::super::ports::PortParts;

/// The port of either end.
pub const PORT: u16 = 7;
/// Send and receive tokens of a port.
pub const TOKENS: u32 = 4;
/// Bytes of each buffer, and of each place messages are sent from.
pub const BUFFER: u32 = 2048;

const LEDGER: LedgerGeometry = LedgerGeometry {
    peers: 2,
    send_streams: 4,
    receive_streams: 4,
    frames: 8,
};

/// The durable words at one moment.
pub type Image = Vec<u64>;

/// Counts of what an engine has done for its application, while the event ring has not wrapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub accepted: u32,
    pub committed: u32,
    pub completed: u32,
}

/// What survives.
pub struct Memory {
    node: u16,
    port: PortGeometry,
    ledger_fd: OwnedFd,
    client_fd: OwnedFd,
    engine_fd: OwnedFd,
    ledger: &'static LedgerMapping,
    ledger_words: Mapping,
    client_words: Mapping,
    engine_words: Mapping,
    to_it: OwnedFd,
    from_it: OwnedFd,
    to_words: Mapping,
    from_words: Mapping,
}

/// A port of so many tokens each way, with so many bytes for each.
pub fn geometry(tokens: u32, bytes: u32) -> PortGeometry {
    PortGeometry {
        send_tokens: tokens,
        receive_tokens: tokens,
        arena_bytes: 2 * u64::from(tokens) * u64::from(bytes),
    }
}

/// Takes the pages away: they read as zeros.
fn punch(fd: &OwnedFd, bytes: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, flags, 0, bytes as u64).unwrap();
}

impl Memory {
    /// Made once per end and process: an engine's ledger is borrowed for ever.
    pub fn new(node: u16) -> Self {
        Self::with(node, geometry(TOKENS, BUFFER))
    }

    /// As [`Self::new`], with another port.
    pub fn with(node: u16, port: PortGeometry) -> Self {
        let fd = |name, bytes| create_sealed(name, bytes).unwrap();
        let ledger_fd = LedgerMapping::create(LEDGER).unwrap();
        let (client_bytes, engine_bytes) = (port.client_half_bytes(), port.engine_half_bytes());
        let client_fd = fd("client", client_bytes);
        let engine_fd = fd("engine", engine_bytes);
        let (to_it, from_it) = (fd("to", CROSSING_BYTES), fd("from", CROSSING_BYTES));
        let words = |fd: &OwnedFd, bytes| Mapping::new(fd.as_fd(), bytes, true).unwrap();
        let mapped = LedgerMapping::map(&ledger_fd, LEDGER).unwrap();
        Self {
            node,
            port,
            ledger: Box::leak(Box::new(mapped)),
            ledger_words: words(&ledger_fd, LEDGER.bytes()),
            client_words: words(&client_fd, client_bytes),
            engine_words: words(&engine_fd, engine_bytes),
            to_words: words(&to_it, CROSSING_BYTES),
            from_words: words(&from_it, CROSSING_BYTES),
            ledger_fd,
            client_fd,
            engine_fd,
            to_it,
            from_it,
        }
    }

    /// Nothing has happened yet.
    pub fn empty(&self) {
        punch(&self.ledger_fd, LEDGER.bytes());
        for ring in [&self.to_it, &self.from_it] {
            punch(ring, 4096);
        }
        self.ledger.ledger().initialise(70 + u64::from(self.node));
        self.renew_port();
    }

    /// A new port's halves, as the supervisor makes them.
    pub fn renew_port(&self) {
        punch(&self.client_fd, self.port.client_half_bytes());
        punch(&self.engine_fd, self.port.engine_half_bytes());
        let (client, engine) = self.halves();
        client.initialise();
        engine.initialise(self.node, PORT);
    }

    pub fn ledger(&self) -> &'static LedgerMapping {
        self.ledger
    }

    pub fn header(&self) -> &'static LedgerHeader {
        self.ledger.ledger().header()
    }

    /// Is a message committed ahead of its stream's base?
    pub fn is_ahead(&self) -> bool {
        let mut streams = self.ledger.ledger().receive_streams().iter();
        streams.any(|stream| stream.base.load(Ordering::Relaxed) >> 48 != 0)
    }

    pub fn node(&self) -> u16 {
        self.node
    }

    /// Frames to its engine.
    pub fn wire_in(&self) -> &OwnedFd {
        &self.to_it
    }

    /// Frames from its engine.
    pub fn wire_out(&self) -> &OwnedFd {
        &self.from_it
    }

    pub fn halves(&self) -> (ClientHalf, EngineHalf) {
        (
            ClientHalf::map(self.client_fd.as_fd(), self.port).unwrap(),
            EngineHalf::map(self.engine_fd.as_fd(), self.port, true).unwrap(),
        )
    }

    /// The port as the supervisor hands it over.
    pub fn parts(&self, generation: u32) -> PortParts {
        let bell = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        PortParts {
            port: PORT,
            generation,
            geometry: self.port,
            client: self.client_fd.try_clone().unwrap(),
            engine: self.engine_fd.try_clone().unwrap(),
            event_bell: bell(),
            engine_bell: bell(),
        }
    }

    /// Every word an engine may store.
    fn regions(&self) -> impl Iterator<Item = &[AtomicU64]> {
        let ledger = self.ledger.ledger();
        let base = std::ptr::from_ref(ledger.header()).addr();
        let record =
            |address: usize, bytes: usize| self.ledger_words.words(address - base, bytes / 8);
        let (from, to) = (ledger.peers().as_ptr(), ledger.receive_streams());
        let end = to.as_ptr_range().end.addr();
        let port = std::ptr::from_ref(&ledger.ports()[usize::from(PORT)]).addr();
        let sends = ledger.sends(PORT).as_ptr().addr();
        let receives = ledger.receives(PORT).as_ptr().addr();
        [
            record(base, 256),
            record(from.addr(), end - from.addr()),
            record(port, 64),
            record(sends, self.port.send_tokens as usize * 64),
            record(receives, self.port.receive_tokens as usize * 8),
            self.client_words.words(0, self.client_words.bytes() / 8),
            self.engine_words.words(0, self.engine_words.bytes() / 8),
            self.to_words.words(0, 16),
            self.from_words.words(0, 16),
        ]
        .into_iter()
    }

    /// The durable words now.
    pub fn image(&self) -> Image {
        let words = self.regions().flatten();
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Brings `image` up to the present; true if that changed anything.
    pub fn refresh(&self, image: &mut Image) -> bool {
        let mut changed = false;
        for (word, known) in self.regions().flatten().zip(image) {
            let now = word.load(Ordering::Relaxed);
            changed |= now != *known;
            *known = now;
        }
        changed
    }

    /// What matters of an image beyond the life it was taken in: not how many engines there were, nor what the last one found.
    pub fn essence(&self, image: &Image) -> Image {
        let mut essence = image.clone();
        let apart = [
            self.ledger_words
                .words(offset_of!(LedgerHeader, engine_epoch), 1),
            self.engine_words
                .words(offset_of!(EngineHeader, faults_recovered), 1),
            self.engine_words
                .words(offset_of!(EngineHeader, naps_of), 1),
            self.engine_words.words(
                offset_of!(EngineHeader, inventory),
                size_of::<Inventory>() / 8,
            ),
        ]
        .map(<[AtomicU64]>::as_ptr_range);
        for (word, value) in self.regions().flatten().zip(&mut essence) {
            let word = std::ptr::from_ref(word);
            if apart.iter().any(|range| range.contains(&word)) {
                *value = 0;
            }
        }
        essence
    }

    /// Makes the past the present.
    pub fn restore(&self, image: &Image) {
        for (word, known) in self.regions().flatten().zip(image) {
            word.store(*known, Ordering::Relaxed);
        }
    }

    /// A digest of the ledger's words that are in no image and that no engine of this laboratory should store, counters aside.
    pub fn rest(&self) -> u64 {
        let seen: Vec<_> = self.regions().map(<[AtomicU64]>::as_ptr_range).collect();
        let after_counters = size_of::<LedgerHeader>() / 8;
        let words = self.ledger_words.words(0, LEDGER.bytes() / 8);
        (words.iter().enumerate().skip(after_counters))
            .filter(|(_, word)| {
                !seen
                    .iter()
                    .any(|range| range.contains(&std::ptr::from_ref(*word)))
            })
            .fold(0, |sum: u64, (index, word)| {
                let word = word.load(Ordering::Relaxed);
                sum.wrapping_add(word.wrapping_mul(2 * index as u64 + 1))
            })
    }

    /// What the application can see of the engine's work: tokens taken from the send ring, messages received, sends ended.
    pub fn progress(&self) -> Progress {
        let (client, engine) = self.halves();
        let ring = engine.event_ring(&client);
        let mut progress = Progress {
            accepted: client.send_ring(&engine).consumed(),
            ..Progress::default()
        };
        for index in 0..ring.published() {
            let words = ring.peek(index);
            match Event::decode(&words).map(|event| event.kind) {
                Some(EventKind::Received) => progress.committed += 1,
                Some(EventKind::Sent(_)) => {
                    progress.completed += 1 + OtherEnds::of(&words).count() as u32;
                }
                _ => {}
            }
        }
        progress
    }

    /// The index the engine's next frame gets on the wire.
    pub fn frames_sent(&self) -> u32 {
        self.from_words.words(0, 1)[0].load(Ordering::Acquire) as u32
    }

    fn slot(&self, index: u32) -> &[AtomicU64] {
        let at = 4096 + index as usize % SLOTS * SLOT_BYTES;
        self.from_words.words(at, 2048 / 8)
    }

    /// The frames on the wire from this index on, whole.
    pub fn frames_since(&self, first: u32) -> Vec<(u32, Vec<u64>)> {
        let count = self.frames_sent().wrapping_sub(first);
        (0..count)
            .map(|nth| first.wrapping_add(nth))
            .map(|index| {
                let words = self.slot(index).iter();
                (
                    index,
                    words.map(|word| word.load(Ordering::Relaxed)).collect(),
                )
            })
            .collect()
    }

    /// Puts frames back.
    pub fn put_frames(&self, frames: &[(u32, Vec<u64>)]) {
        for (index, words) in frames {
            for (word, value) in self.slot(*index).iter().zip(words) {
                word.store(*value, Ordering::Relaxed);
            }
        }
    }
}
