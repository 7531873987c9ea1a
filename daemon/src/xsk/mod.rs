//! AF_XDP sockets that survive the process using them.
//!
//! A NIC queue is worked on by one [`Xsk`]: UMEM, four rings and an ownership
//! table. Two roles share this module:
//!
//! - the **supervisor** creates everything ([`UmemMemfd::create`],
//!   [`XskFd::create`]), keeps the fds and never touches a ring again;
//! - an **engine**, unprivileged, is handed the XSK and the UMEM as fds and
//!   *adopts* them ([`Xsk::adopt`]). There is no other way to start: the first
//!   engine of a socket, and the one that takes over from a killed one, run the
//!   same code. A warm standby maps beforehand ([`Xsk::map`]) and only
//!   reconciles when its predecessor is known to be dead ([`MappedXsk::adopt`]).
//!
//! Why our own layer and not xsk-rs: it can neither put the UMEM into a memfd,
//! nor map the rings of a received socket, nor reach the raw descriptors; and
//! killing and rebinding a socket costs tens of milliseconds where adopting one
//! costs well under one (`tests/xsk_takeover.rs` prints both).
//!
//! ```text
//!            FILL                          TRANSMIT
//!   refill ───────► fill ring    slot ───────────────► tx ring
//!     ▲                │ kernel   ▲                       │ kernel
//!     │ OWNED          ▼          │ OWNED                 ▼
//!   receive ◄─────── rx ring     reap ◄─────────── completion ring
//! ```
//!
//! | file | noun |
//! |---|---|
//! | `layout.rs` | how the UMEM is divided, ring sizes |
//! | `pages.rs` | how long frames should be |
//! | `umem.rs` | the memfd and its mapping |
//! | `socket.rs` | system calls: create, bind, map the rings, kick |
//! | `ring.rs` | one side of a ring, memory order |
//! | `ownership.rs` | the durable word per chunk |
//! | `adopt.rs` | reconciling rings and table after a death |
//! | `receive.rs`, `transmit.rs` | the hot paths: no allocation, no lock, no system call but the kick |
//! | `consistency.rs` | the checker: every chunk exactly once |
//! | `error.rs` | errno tables |
//!
//! Invariants, checked by [`Xsk::check_consistency`]:
//! 1. a chunk is recorded FILL or TRANSMIT before the index that publishes it
//!    is stored, and OWNED before the index that consumes it is stored;
//! 2. a chunk is reused only after that consumer index was stored;
//! 3. at rest, each chunk is either ours and in exactly one of our lists, or
//!    the kernel's and recorded so.
//!
//! `unsafe` is confined to `ring.rs`, `umem.rs`, `socket.rs` and the two calls
//! each of `receive.rs` and `transmit.rs` that turn chunks we own into slices.

mod adopt;
mod consistency;
mod counters;
mod crash_point;
mod error;
mod layout;
mod ownership;
mod pages;
mod receive;
mod ring;
mod socket;
mod transmit;
mod umem;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::xdp::XdpStatistics;

pub use adopt::{AdoptReport, MappedXsk};
pub use consistency::Inconsistency;
pub use counters::XskCounters;
pub use error::{BindMode, Operation, XskError};
pub use layout::{
    CHUNK_SIZE, MAX_FRAME_LEN, MAX_SEGMENTS, MAX_SINGLE_CHUNK_FRAME, RingSizes, UmemLayout,
    XskConfig,
};
pub use ownership::Record;
pub use pages::frame_mtu;
pub use receive::RxOutcome;
pub use socket::{BindOptions, Doorbell, XskFd, XskSocket};
pub use transmit::{KickOutcome, TxSlot};
pub use umem::UmemMemfd;

use ownership::OwnershipTable;
use ring::{Consumer, Descriptor, Producer};
use umem::UmemMap;

/// An AF_XDP socket and its UMEM in the hands of their one owner.
///
/// Made by [`Xsk::adopt`]. Per round of the engine's loop: [`Xsk::receive`],
/// then [`Xsk::reap`], [`Xsk::tx_slot`] / [`Xsk::tx_buffer`] / [`Xsk::submit`]
/// for each frame to send, and one [`Xsk::flush`]. Dropping it leaves the
/// socket to the next owner as it stands.
pub struct Xsk<'t, D = XskSocket> {
    layout: UmemLayout,
    umem: UmemMap,
    table: OwnershipTable<'t>,
    fill: Producer<u64>,
    rx: Consumer<Descriptor>,
    tx: Producer<Descriptor>,
    completion: Consumer<u64>,
    /// Receive chunks that are ours: they wait for the fill ring, or until it is to be deeper.
    refill: Vec<u32>,
    /// Chunks that the fill ring is to hold, by who may send, and at most.
    fill_wanted: u32,
    fill_most: u32,
    /// Chunks that it does hold.
    fill_depth: u32,
    /// It is filled once so many are to be given back.
    refill_at: u32,
    /// Chunks taken from the receive ring since it was filled.
    unfilled: u32,
    /// Which entry of the fill ring the kernel uses next, and where in a chunk frames begin: a guess.
    next_filled: (u32, usize),
    /// Transmit slots that are ours.
    free_slots: Vec<u32>,
    /// Per slot, how many of its chunks the kernel has.
    slot_chunks_out: Vec<u8>,
    /// Slots handed out by `tx_slot` and not yet back.
    slots_handed_out: u32,
    /// Sum of `slot_chunks_out`.
    tx_outstanding: u32,
    /// Receiving is in the middle of a frame larger than the ring.
    skipping: bool,
    zero_copy: bool,
    /// Set by an error after which no kick makes sense.
    failed: Option<KickOutcome>,
    counters: XskCounters,
    adopted: AdoptReport,
    // Last, as it owns the rings' mappings.
    doorbell: D,
}

impl<D> Xsk<'_, D> {
    /// What was found at adoption.
    pub fn adopted(&self) -> &AdoptReport {
        &self.adopted
    }

    /// What was counted since.
    pub fn counters(&self) -> &XskCounters {
        &self.counters
    }

    /// The UMEM's division.
    pub fn layout(&self) -> &UmemLayout {
        &self.layout
    }

    /// What `XDP_OPTIONS` says: the NIC works on the UMEM itself.
    pub fn zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Where the UMEM is mapped: tells from a segment's address which chunk it lies in.
    pub fn umem_address(&self) -> usize {
        self.umem.address()
    }
}

impl Xsk<'_> {
    /// The socket, for polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.doorbell.fd()
    }

    /// The kernel's statistics.
    ///
    /// # Errors
    /// [`XskError::System`].
    pub fn statistics(&self) -> Result<XdpStatistics, XskError> {
        self.doorbell.statistics()
    }

    /// Takes the socket's pending error. A removed device shows here and in the
    /// next kick only; `poll` stays silent.
    pub fn take_error(&self) -> Option<Errno> {
        self.doorbell.take_error()
    }
}
