//! The ledger: the durable facts of one engine, shared by that engine and the supervisor, never by an application.
//!
//! One fact is one aligned `u64`, stored once with Release by one named writer; everything else is rebuilt. A ledger outlives its
//! engine and its supervisor.

use crate::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::port::PAGE;
use crate::{MAX_RECEIVE_TOKENS, MAX_SEND_TOKENS, PORTS};

/// `b"PTLNLDG1"`: stored last.
pub const LEDGER_MAGIC: u64 = u64::from_be_bytes(*b"PTLNLDG1");
/// Counter words of an engine; their names are the daemon's.
pub const COUNTERS: usize = 128;
/// Classes of send latencies; their bounds are the daemon's.
pub const LATENCY_CLASSES: usize = 22;

/// Header page.
#[repr(C, align(64))]
pub struct LedgerHeader {
    /// [`LEDGER_MAGIC`]. Supervisor.
    pub magic: AtomicU64,
    /// [`crate::LEDGER_ABI_VERSION`]. Supervisor.
    pub version: AtomicU64,
    /// Low: peers; high: UMEM frames. Supervisor.
    pub peers_frames: AtomicU64,
    /// Low: sending streams; high: receiving streams. Supervisor.
    pub streams: AtomicU64,
    pad0: [u64; 4],
    /// The node's incarnation. Supervisor.
    pub incarnation: AtomicU64,
    /// The engine's epoch; the engine raises it first of all when it takes over. Engine.
    pub engine_epoch: AtomicU64,
    /// The next stream epoch to draw. Engine.
    pub stream_epoch_next: AtomicU64,
    pad1: [u64; 5],
    /// Loops so far while RUNNING (bit 63 clear), or bit 63 set and the CLOCK_MONOTONIC nanoseconds until which it sleeps. Engine.
    pub heartbeat: AtomicU64,
    /// Answer to `challenge`. Engine.
    pub response: AtomicU64,
    /// Poison: UMEM frame index + 1 of the received frame being worked on; 0 none. Bit 62: the last engine died of it. Engine.
    pub working_frame: AtomicU64,
    /// Poison: the token being worked on, as [`working_token`]; 0 none. Bit 62: the last engine died of it. Engine.
    pub working_token: AtomicU64,
    /// The death word: a robust futex held by the engine that has taken over, so its thread id and `FUTEX_WAITERS`. When that thread
    /// ends, the kernel sets `FUTEX_OWNER_DIED` and wakes a waiter, before it takes the process's memory down. Engine, then kernel.
    pub death: AtomicU32,
    pad2: [u32; 7],
    /// Magic word the engine must copy to `response`. Supervisor.
    pub challenge: AtomicU64,
    pad3: [u64; 7],
    /// Counters, for the supervisor to read at any time. Engine.
    pub counters: [AtomicU64; COUNTERS],
    /// Sends delivered, by how long they took; 0 where an engine of an earlier build serves. Engine.
    pub send_latencies: [AtomicU64; LATENCY_CLASSES],
    /// The sum of those times, nanoseconds. Engine.
    pub send_latency_ns: AtomicU64,
    pad4: u64,
}

/// Bit 63 of the heartbeat: asleep.
pub const HEARTBEAT_SLEEPING: u64 = 1 << 63;

/// `working_token` of a send token: it names the one use of its slot. Never 0.
#[inline]
pub fn working_token(port: u16, slot: u32, generation: u32) -> u64 {
    1 << 63 | u64::from(port) << 48 | u64::from(slot & 0xffff) << 32 | u64::from(generation)
}

/// (port, slot, generation) of a `working_token`.
pub fn decode_working_token(word: u64) -> Option<(u16, u32, u32)> {
    (word >> 63 == 1).then_some((
        (word >> 48) as u16 & 0x3fff,
        (word >> 32) as u32 & 0xffff,
        word as u32,
    ))
}

/// What is known of a peer engine, 32 bytes. Engine.
#[repr(C)]
pub struct PeerRecord {
    /// 0: free. Else [`PeerRecord::key`]. Stored last when a record is opened.
    pub key: AtomicU64,
    /// Its node's incarnation.
    pub incarnation: AtomicU64,
    /// Low: epoch floor; high: the incarnation's low half, without which the floor is void.
    pub floor: AtomicU64,
    pad: u64,
}

/// A sending stream, 32 bytes. Engine.
#[repr(C)]
pub struct SendStreamRecord {
    /// 0: free. Else [`stream_key`]. Stored last when a record is opened, first when it is freed.
    pub key: AtomicU64,
    /// The peer's incarnation.
    pub incarnation: AtomicU64,
    /// High: epoch; low: next number.
    pub state: AtomicU64,
    pad: u64,
}

/// A receiving stream, 32 bytes. Engine.
#[repr(C)]
pub struct ReceiveStreamRecord {
    /// 0: free. Else [`stream_key`]. Stored last when a record is opened, first when it is freed.
    pub key: AtomicU64,
    /// The peer's incarnation.
    pub incarnation: AtomicU64,
    /// Low: the stream's epoch; high: generation of the port's instance that opened it, 0 if the port was closed.
    pub epoch: AtomicU64,
    /// Low: base, the next number to commit; high: its low half looks back, bit i: number base − 1 − i was given up by its sender, who
    /// has not confirmed that it knows; its high half looks ahead, bit i: base + 1 + i is committed.
    pub base: AtomicU64,
}

/// A port, 64 bytes.
#[repr(C)]
pub struct PortRecord {
    /// High: generation; low: [`crate::port::state`]. Supervisor.
    pub life: AtomicU64,
    /// Low: event index up to which ledger and events agree; high: the port's generation. Engine.
    pub events_settled: AtomicU64,
    pad: [u64; 6],
}

/// The validated copy of a send token, 64 bytes. Engine.
#[repr(C)]
pub struct SendRecord {
    /// High: the slot's generation; low: the message's number. 0: free. **The accept point** when stored.
    pub tag: AtomicU64,
    /// Low 16: node; next 16: port; high: length.
    pub destination: AtomicU64,
    /// Offset in the arena.
    pub arena_offset: AtomicU64,
    /// The application's tag.
    pub message_tag: AtomicU64,
    /// CLOCK_MONOTONIC nanoseconds; `u64::MAX`: never.
    pub deadline: AtomicU64,
    /// Low: the stream's record; bits 32–39: priority; bits 40–47: flags (no stream knows of it, payload in the slot, to be
    /// acknowledged at once, to be acknowledged lazily); bits 48–63: how it ends, if no stream knows of it.
    pub stream: AtomicU64,
    pad: [u64; 2],
}

/// A receive slot, 8 bytes: low: generation last taken from the provide ring; high: generation last consumed by a commit. The token
/// is out iff they differ. Engine.
pub type ReceiveRecord = AtomicU64;

/// A UMEM frame's owner, 8 bytes; encoding in the daemon's `xsk::ownership`. Engine (supervisor before the engine starts).
pub type FrameRecord = AtomicU64;

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(offset_of!(LedgerHeader, magic) == 0);
    assert!(offset_of!(LedgerHeader, version) == 8);
    assert!(offset_of!(LedgerHeader, peers_frames) == 16);
    assert!(offset_of!(LedgerHeader, streams) == 24);
    assert!(offset_of!(LedgerHeader, incarnation) == 64);
    assert!(offset_of!(LedgerHeader, engine_epoch) == 72);
    assert!(offset_of!(LedgerHeader, stream_epoch_next) == 80);
    assert!(offset_of!(LedgerHeader, heartbeat) == 128);
    assert!(offset_of!(LedgerHeader, response) == 136);
    assert!(offset_of!(LedgerHeader, working_frame) == 144);
    assert!(offset_of!(LedgerHeader, working_token) == 152);
    assert!(offset_of!(LedgerHeader, death) == 160);
    assert!(offset_of!(LedgerHeader, challenge) == 192);
    assert!(offset_of!(LedgerHeader, counters) == 256);
    assert!(offset_of!(LedgerHeader, send_latencies) == 256 + COUNTERS * 8);
    assert!(offset_of!(LedgerHeader, send_latency_ns) == 256 + (COUNTERS + LATENCY_CLASSES) * 8);
    assert!(size_of::<LedgerHeader>() == 256 + (COUNTERS + LATENCY_CLASSES + 2) * 8);
    assert!(size_of::<LedgerHeader>() <= PAGE);
    assert!(size_of::<PeerRecord>() == 32);
    assert!(offset_of!(PeerRecord, incarnation) == 8);
    assert!(offset_of!(PeerRecord, floor) == 16);
    assert!(size_of::<SendStreamRecord>() == 32);
    assert!(offset_of!(SendStreamRecord, incarnation) == 8);
    assert!(offset_of!(SendStreamRecord, state) == 16);
    assert!(size_of::<ReceiveStreamRecord>() == 32);
    assert!(offset_of!(ReceiveStreamRecord, incarnation) == 8);
    assert!(offset_of!(ReceiveStreamRecord, epoch) == 16);
    assert!(offset_of!(ReceiveStreamRecord, base) == 24);
    assert!(size_of::<PortRecord>() == 64);
    assert!(offset_of!(PortRecord, events_settled) == 8);
    assert!(size_of::<SendRecord>() == 64);
    assert!(offset_of!(SendRecord, destination) == 8);
    assert!(offset_of!(SendRecord, arena_offset) == 16);
    assert!(offset_of!(SendRecord, message_tag) == 24);
    assert!(offset_of!(SendRecord, deadline) == 32);
    assert!(offset_of!(SendRecord, stream) == 40);
};

impl PeerRecord {
    /// Key of a peer engine; never 0.
    pub fn key(node: u16, queue: u8) -> u64 {
        1 << 63 | u64::from(queue) << 16 | u64::from(node)
    }

    /// Node and queue of a key.
    pub fn decode_key(key: u64) -> Option<(u16, u8)> {
        (key >> 63 == 1).then_some((key as u16, (key >> 16) as u8))
    }
}

/// Key of a stream's record; never 0.
pub fn stream_key(local_port: u16, node: u16, remote_port: u16, priority: u8) -> u64 {
    1 << 63
        | u64::from(priority & 1) << 48
        | u64::from(remote_port) << 32
        | u64::from(node) << 16
        | u64::from(local_port)
}

/// (local port, node, remote port, priority) of a key.
pub fn decode_stream_key(key: u64) -> Option<(u16, u16, u16, u8)> {
    (key >> 63 == 1).then_some((
        key as u16,
        (key >> 16) as u16,
        (key >> 32) as u16,
        (key >> 48) as u8 & 1,
    ))
}

/// Two halves in one word.
#[inline]
pub fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// (high, low) of a word.
#[inline]
pub fn unpair(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// What fixes the layout of a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "std", derive(serde::Serialize, serde::Deserialize))]
pub struct LedgerGeometry {
    /// Peer engines.
    pub peers: u32,
    /// Sending streams.
    pub send_streams: u32,
    /// Receiving streams.
    pub receive_streams: u32,
    /// UMEM frames.
    pub frames: u32,
}

/// From the ports' records to the send records.
const SENDS_BEHIND_PORTS: usize = PORTS as usize * 64;
/// From the ports' records to the receive records.
const RECEIVES_BEHIND_PORTS: usize =
    SENDS_BEHIND_PORTS + PORTS as usize * MAX_SEND_TOKENS as usize * 64;

impl LedgerGeometry {
    fn peers_at(&self) -> usize {
        PAGE
    }
    fn send_streams_at(&self) -> usize {
        self.peers_at() + self.peers as usize * 32
    }
    fn receive_streams_at(&self) -> usize {
        self.send_streams_at() + self.send_streams as usize * 32
    }
    fn ports_at(&self) -> usize {
        (self.receive_streams_at() + self.receive_streams as usize * 32).next_multiple_of(PAGE)
    }
    fn frames_at(&self) -> usize {
        self.ports_at() + RECEIVES_BEHIND_PORTS + PORTS as usize * MAX_RECEIVE_TOKENS as usize * 8
    }

    /// Bytes of the ledger; most are never touched, so never backed.
    pub fn bytes(&self) -> usize {
        (self.frames_at() + self.frames as usize * 8).next_multiple_of(PAGE)
    }
}

/// A ledger's memory, seen through its geometry.
#[derive(Clone, Copy)]
pub struct Ledger<'m> {
    base: core::ptr::NonNull<u8>,
    geometry: LedgerGeometry,
    /// Where the ports' records begin, behind tables of any length; what every message looks up lies at fixed distances from here.
    ports_at: usize,
    mapping: core::marker::PhantomData<&'m [AtomicU64]>,
}

// SAFETY: a `Ledger` is a shared borrow of atomics.
unsafe impl Send for Ledger<'_> {}
// SAFETY: as above.
unsafe impl Sync for Ledger<'_> {}

impl<'m> Ledger<'m> {
    /// A view of a mapping.
    ///
    /// # Safety
    /// `base` points to at least `geometry.bytes()` bytes of page-aligned, readable and writable shared memory that stays mapped
    /// for `'m` and is only ever accessed atomically.
    pub unsafe fn from_raw(base: core::ptr::NonNull<u8>, geometry: LedgerGeometry) -> Self {
        Self {
            base,
            geometry,
            ports_at: geometry.ports_at(),
            mapping: core::marker::PhantomData,
        }
    }

    /// The geometry it was made with.
    pub fn geometry(&self) -> LedgerGeometry {
        self.geometry
    }

    #[inline]
    fn slice<T>(&self, offset: usize, len: usize) -> &'m [T] {
        debug_assert!(offset + len * size_of::<T>() <= self.geometry.bytes());
        // SAFETY: `from_raw`'s caller vouches for `bytes()` mapped bytes; every offset above lies inside, is a multiple of the
        // records' alignment (8, or a page for the header), and every record is made of atomics and padding.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr().add(offset).cast::<T>(), len) }
    }

    /// The header.
    #[inline]
    pub fn header(&self) -> &'m LedgerHeader {
        &self.slice::<LedgerHeader>(0, 1)[0]
    }

    /// Peer records.
    pub fn peers(&self) -> &'m [PeerRecord] {
        self.slice(self.geometry.peers_at(), self.geometry.peers as usize)
    }

    /// Sending streams.
    #[inline]
    pub fn send_streams(&self) -> &'m [SendStreamRecord] {
        self.slice(
            self.geometry.send_streams_at(),
            self.geometry.send_streams as usize,
        )
    }

    /// Receiving streams.
    #[inline]
    pub fn receive_streams(&self) -> &'m [ReceiveStreamRecord] {
        self.slice(
            self.geometry.receive_streams_at(),
            self.geometry.receive_streams as usize,
        )
    }

    /// Ports.
    #[inline]
    pub fn ports(&self) -> &'m [PortRecord] {
        self.slice(self.ports_at, PORTS as usize)
    }

    /// The send records of a port.
    #[inline]
    pub fn sends(&self, port: u16) -> &'m [SendRecord] {
        assert!(port < PORTS);
        let bytes = MAX_SEND_TOKENS as usize * 64;
        self.slice(
            self.ports_at + SENDS_BEHIND_PORTS + port as usize * bytes,
            MAX_SEND_TOKENS as usize,
        )
    }

    /// The receive records of a port.
    #[inline]
    pub fn receives(&self, port: u16) -> &'m [ReceiveRecord] {
        assert!(port < PORTS);
        let bytes = MAX_RECEIVE_TOKENS as usize * 8;
        self.slice(
            self.ports_at + RECEIVES_BEHIND_PORTS + port as usize * bytes,
            MAX_RECEIVE_TOKENS as usize,
        )
    }

    /// The UMEM's ownership table.
    pub fn frames(&self) -> &'m [FrameRecord] {
        self.slice(self.geometry.frames_at(), self.geometry.frames as usize)
    }

    /// Fills in a fresh, zeroed ledger's header; magic last. Supervisor.
    pub fn initialise(&self, incarnation: u64) {
        self.header().stream_epoch_next.store(1, Ordering::Relaxed);
        self.mend(incarnation);
    }

    /// Writes the supervisor's own words of the header again, magic last. False if they are as they should be: an engine has no business
    /// with them, but one that goes wrong can write anywhere in its ledger.
    pub fn mend(&self, incarnation: u64) -> bool {
        let header = self.header();
        if self.is_valid() && header.incarnation.load(Ordering::Relaxed) == incarnation {
            return false;
        }
        let g = &self.geometry;
        header
            .version
            .store(u64::from(crate::LEDGER_ABI_VERSION), Ordering::Relaxed);
        header
            .peers_frames
            .store(pair(g.frames, g.peers), Ordering::Relaxed);
        header
            .streams
            .store(pair(g.receive_streams, g.send_streams), Ordering::Relaxed);
        header.incarnation.store(incarnation, Ordering::Relaxed);
        // SYNC(ledger-magic)
        header.magic.store(LEDGER_MAGIC, Ordering::Release);
        true
    }

    /// Does the header agree with this geometry and version?
    pub fn is_valid(&self) -> bool {
        let header = self.header();
        let g = &self.geometry;
        // SYNC(ledger-magic)
        header.magic.load(Ordering::Acquire) == LEDGER_MAGIC
            && header.version.load(Ordering::Relaxed) == u64::from(crate::LEDGER_ABI_VERSION)
            && header.peers_frames.load(Ordering::Relaxed) == pair(g.frames, g.peers)
            && header.streams.load(Ordering::Relaxed) == pair(g.receive_streams, g.send_streams)
    }
}
