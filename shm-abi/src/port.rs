//! The layout of a port's two halves.
//!
//! | half | written by | believed by |
//! |---|---|---|
//! | client half | the application | nobody |
//! | engine half | the engine (and, once, the supervisor) | the application, which maps it read-only |

use crate::atomic::{AtomicU32, AtomicU64};
use crate::event::EVENT_WORDS;
use crate::token::{RECEIVE_SLOT_WORDS, SEND_SLOT_WORDS};
use crate::{MAX_ARENA_BYTES, MAX_RECEIVE_TOKENS, MAX_SEND_TOKENS};

/// Bytes of a page; every part that is mapped or punched apart begins on one.
pub const PAGE: usize = 4096;
/// `b"PTLNPRT1"`: stored last, when everything else in the half is in place.
pub const PORT_MAGIC: u64 = u64::from_be_bytes(*b"PTLNPRT1");
/// Events beyond one per token: as many offers as may be in the ring and not yet read.
pub const EVENT_RESERVE: u32 = 16;

/// Bit of [`ClientHeader::reads`]: events that tell of the ends of several sends ([`crate::event::Ends`]).
pub const READS_ENDS: u32 = 1;

/// Header page of the client half.
#[repr(C, align(64))]
pub struct ClientHeader {
    /// [`PORT_MAGIC`].
    pub magic: AtomicU64,
    /// [`crate::PORT_ABI_VERSION`].
    pub version: AtomicU32,
    /// Which events the application reads that not every version of the library does: [`READS_ENDS`]. Application, before it provides or sends
    /// anything; bits that nobody knows mean nothing.
    pub reads: AtomicU32,
    /// Which messages the engine asks about before it accepts them ([`crate::event::EventKind::Offered`]): those of at least this
    /// many bytes, less one; 0: none. Application, at any time; every value makes sense.
    pub ask_first: AtomicU64,
    pad1: [u64; 5],
    /// Send ring's producer index. Application.
    pub send_producer: AtomicU32,
    /// Provide ring's producer index. Application; in the same line, so that polling a port costs one line.
    pub provide_producer: AtomicU32,
    pad2: [u32; 14],
    /// Event ring's consumer index. Application; the engine reads it only to count the offers that were not taken yet, so that a
    /// false one costs the application events of its own and nobody anything else.
    pub event_consumer: AtomicU32,
    pad3: [u32; 15],
    /// Not 0: the application is about to sleep, or sleeps, on its event doorbell or on this word ([`crate::doorbell`]).
    pub waiting: AtomicU32,
    pad4: u32,
    /// CLOCK_MONOTONIC nanoseconds at which to ring the doorbell; 0: never.
    pub alarm_at: AtomicU64,
    pad5: [u64; 6],
}

/// State of a port, low half of [`EngineHeader::state`]; the high half is a [`CloseReason`].
pub mod state {
    /// Memory made, engine not yet told.
    pub const OPENING: u32 = 1;
    /// In service.
    pub const OPEN: u32 = 2;
    /// Being closed.
    pub const CLOSING: u32 = 3;
    /// Closed; the memory may be unmapped.
    pub const CLOSED: u32 = 4;
}

/// Why a port was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "std", derive(serde::Serialize, serde::Deserialize))]
#[repr(u32)]
pub enum CloseReason {
    /// By its owner.
    ByOwner = 1,
    /// Its owner died or closed its connection.
    OwnerGone = 2,
    /// A ring index jumped.
    RingJump = 3,
    /// A token made no sense.
    BadToken = 4,
    /// Its memory could not be read or written.
    BadMemory = 5,
    /// An engine died twice working on it.
    Poison = 6,
    /// By the administrator or a daemon that stops.
    Administrator = 7,
}

impl CloseReason {
    /// From the high half of the state word.
    pub fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::ByOwner,
            2 => Self::OwnerGone,
            3 => Self::RingJump,
            4 => Self::BadToken,
            5 => Self::BadMemory,
            6 => Self::Poison,
            7 => Self::Administrator,
            _ => return None,
        })
    }
}

/// Header page of the engine half.
#[repr(C, align(64))]
pub struct EngineHeader {
    /// [`PORT_MAGIC`].
    pub magic: AtomicU64,
    /// [`crate::PORT_ABI_VERSION`].
    pub version: AtomicU32,
    /// Send tokens. Supervisor, before magic.
    pub send_tokens: AtomicU32,
    /// Receive tokens. Supervisor, before magic.
    pub receive_tokens: AtomicU32,
    /// This port's number. Supervisor, before magic.
    pub port: AtomicU32,
    /// Arena bytes. Supervisor, before magic.
    pub arena_bytes: AtomicU64,
    /// This node's id. Supervisor, before magic.
    pub node: AtomicU32,
    pad0: [u32; 7],
    /// Low: [`state`]; high: [`CloseReason`]. Supervisor until OPEN, then the engine.
    pub state: AtomicU64,
    /// Times an engine took over; a change is the FaultRecovered event (level-triggered).
    pub faults_recovered: AtomicU32,
    /// Not 0: the engine sleeps, ring its doorbell after producing.
    pub engine_sleeping: AtomicU32,
    /// The `alarm_at` value that last fired.
    pub alarm_fired: AtomicU64,
    /// One more than [`Self::faults_recovered`] was when the engine that serves the port began, if it wakes applications that nap. Engine; older ones leave what
    /// they find, which the next count makes wrong.
    pub naps_of: AtomicU32,
    /// One more than the number of the core that the engine is bound to; 0: none, or not known. Engine.
    pub core: AtomicU32,
    pad1: [u64; 4],
    /// Send ring's consumer index. Engine.
    pub send_consumer: AtomicU32,
    /// Provide ring's consumer index. Engine.
    pub provide_consumer: AtomicU32,
    pad2: [u32; 14],
    /// Event ring's producer index: **the commit point**. Engine.
    pub event_producer: AtomicU32,
    pad3: [u32; 15],
    /// What the last engine that took over found. Engine.
    pub inventory: Inventory,
}

/// The tokens that an engine found to be its own when it took over. A token that the application gave to an earlier engine, that is not
/// here, and that no event gave back was lost in a damaged engine: the application has it back.
///
/// Valid if [`Self::of`] is the same before and after the rest is read.
#[repr(C, align(64))]
pub struct Inventory {
    /// The takeover it belongs to: the value that `faults_recovered` then gets; 0: none, or being written.
    pub of: AtomicU32,
    /// Send ring's consumer index: entries before it are judged here.
    pub sends: AtomicU32,
    /// Provide ring's consumer index, likewise.
    pub provides: AtomicU32,
    /// Event ring's producer index: what earlier engines said is before it.
    pub events: AtomicU32,
    pad0: [u32; 12],
    /// Send slots under way, a bit for each.
    pub sends_held: [AtomicU64; MAX_SEND_TOKENS as usize / 64],
    /// Receive slots with a buffer, a bit for each.
    pub receives_held: [AtomicU64; MAX_RECEIVE_TOKENS as usize / 64],
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<ClientHeader>() == 256);
    assert!(offset_of!(ClientHeader, magic) == 0);
    assert!(offset_of!(ClientHeader, version) == 8);
    assert!(offset_of!(ClientHeader, reads) == 12);
    assert!(offset_of!(ClientHeader, ask_first) == 16);
    assert!(offset_of!(ClientHeader, send_producer) == 64);
    assert!(offset_of!(ClientHeader, provide_producer) == 68);
    assert!(offset_of!(ClientHeader, event_consumer) == 128);
    assert!(offset_of!(ClientHeader, waiting) == 192);
    assert!(offset_of!(ClientHeader, alarm_at) == 200);
    assert!(size_of::<EngineHeader>() == 512 && size_of::<EngineHeader>() <= PAGE);
    assert!(offset_of!(EngineHeader, magic) == 0);
    assert!(offset_of!(EngineHeader, version) == 8);
    assert!(offset_of!(EngineHeader, send_tokens) == 12);
    assert!(offset_of!(EngineHeader, receive_tokens) == 16);
    assert!(offset_of!(EngineHeader, port) == 20);
    assert!(offset_of!(EngineHeader, arena_bytes) == 24);
    assert!(offset_of!(EngineHeader, node) == 32);
    assert!(offset_of!(EngineHeader, state) == 64);
    assert!(offset_of!(EngineHeader, faults_recovered) == 72);
    assert!(offset_of!(EngineHeader, engine_sleeping) == 76);
    assert!(offset_of!(EngineHeader, alarm_fired) == 80);
    assert!(offset_of!(EngineHeader, naps_of) == 88);
    assert!(offset_of!(EngineHeader, core) == 92);
    assert!(offset_of!(EngineHeader, send_consumer) == 128);
    assert!(offset_of!(EngineHeader, provide_consumer) == 132);
    assert!(offset_of!(EngineHeader, event_producer) == 192);
    assert!(offset_of!(EngineHeader, inventory) == 256);
    assert!(size_of::<Inventory>() == 256);
    assert!(offset_of!(Inventory, of) == 0);
    assert!(offset_of!(Inventory, sends) == 4);
    assert!(offset_of!(Inventory, provides) == 8);
    assert!(offset_of!(Inventory, events) == 12);
    assert!(offset_of!(Inventory, sends_held) == 64);
    assert!(offset_of!(Inventory, receives_held) == 128);
};

/// What fixes the layout of a port. Both sides compute it from numbers the supervisor vouches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "std", derive(serde::Serialize, serde::Deserialize))]
pub struct PortGeometry {
    /// Send tokens; a power of two up to [`MAX_SEND_TOKENS`].
    pub send_tokens: u32,
    /// Receive tokens; a power of two up to [`MAX_RECEIVE_TOKENS`].
    pub receive_tokens: u32,
    /// Bytes of the arena; a multiple of [`PAGE`] up to [`MAX_ARENA_BYTES`].
    pub arena_bytes: u64,
}

const fn page_up(bytes: usize) -> usize {
    bytes.div_ceil(PAGE) * PAGE
}

impl PortGeometry {
    /// The geometry, if it is within the limits.
    pub fn new(send_tokens: u32, receive_tokens: u32, arena_bytes: u64) -> Option<Self> {
        let geometry = Self {
            send_tokens,
            receive_tokens,
            arena_bytes,
        };
        geometry.is_valid().then_some(geometry)
    }

    /// Within the limits?
    pub fn is_valid(&self) -> bool {
        self.send_tokens.is_power_of_two()
            && self.send_tokens <= MAX_SEND_TOKENS
            && self.receive_tokens.is_power_of_two()
            && self.receive_tokens <= MAX_RECEIVE_TOKENS
            && self.arena_bytes > 0
            && self.arena_bytes <= MAX_ARENA_BYTES
            && self.arena_bytes.is_multiple_of(PAGE as u64)
    }

    /// Entries of the event ring: one per token, and [`EVENT_RESERVE`] for offers, so that a commit never waits.
    pub fn event_capacity(&self) -> u32 {
        (self.send_tokens + self.receive_tokens + EVENT_RESERVE).next_power_of_two()
    }

    /// Offset of the send ring in the client half.
    pub fn send_ring(&self) -> usize {
        PAGE
    }

    /// Offset of the provide ring in the client half.
    pub fn provide_ring(&self) -> usize {
        self.send_ring() + self.send_tokens as usize * 8
    }

    /// Offset of the send slots in the client half.
    pub fn send_slots(&self) -> usize {
        (self.provide_ring() + self.receive_tokens as usize * 8).next_multiple_of(128)
    }

    /// Offset of the receive slots in the client half.
    pub fn receive_slots(&self) -> usize {
        self.send_slots() + self.send_tokens as usize * SEND_SLOT_WORDS * 8
    }

    /// Offset of the arena in the client half.
    pub fn arena(&self) -> usize {
        page_up(self.receive_slots() + self.receive_tokens as usize * RECEIVE_SLOT_WORDS * 8)
    }

    /// Bytes of the client half.
    pub fn client_half_bytes(&self) -> usize {
        self.arena() + self.arena_bytes as usize
    }

    /// Offset of the event ring in the engine half.
    pub fn event_ring(&self) -> usize {
        PAGE
    }

    /// Bytes of the engine half.
    pub fn engine_half_bytes(&self) -> usize {
        self.event_ring() + page_up(self.event_capacity() as usize * EVENT_WORDS * 8)
    }

    /// Is `offset..offset + len` inside the arena?
    pub fn arena_holds(&self, offset: u64, len: u32) -> bool {
        offset
            .checked_add(u64::from(len))
            .is_some_and(|end| end <= self.arena_bytes)
    }
}
