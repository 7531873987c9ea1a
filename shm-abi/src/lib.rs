//! What two Portolan processes share: the port's two halves, the token rings, the ledger, and the control protocol.
//!
//! The layouts are versioned and every offset is asserted where it is declared. Nothing here trusts anything: what another
//! process writes is a claim until the reader has checked its own copy ([`token`]).
#![cfg_attr(not(any(feature = "std", test)), no_std)]

#[cfg(all(feature = "std", not(loom)))]
pub mod control;
pub mod doorbell;
pub mod event;
pub mod ledger;
#[cfg(all(feature = "std", not(loom)))]
pub mod memory;
pub mod port;
pub mod ring;
#[cfg(all(feature = "std", not(loom)))]
pub mod tap;
pub mod token;

/// Version of the port's two halves. A change of layout or meaning raises it; see `CHANGELOG.md` of this crate.
pub const PORT_ABI_VERSION: u32 = 2;
/// Version of the ledger, counted apart: applications never see it.
pub const LEDGER_ABI_VERSION: u32 = 4;

/// Ports per node; port 0 is the daemon's own service.
pub const PORTS: u16 = 256;
/// Most send tokens of a port. A power of two.
pub const MAX_SEND_TOKENS: u32 = 512;
/// Most receive tokens of a port. A power of two.
pub const MAX_RECEIVE_TOKENS: u32 = 1024;
/// Largest arena of a port, bytes.
pub const MAX_ARENA_BYTES: u64 = 1 << 36;
/// Longest message, bytes: 4 GiB − 1.
pub const MAX_MESSAGE_BYTES: u32 = u32::MAX;

#[cfg(all(test, not(loom)))]
mod oracle;

pub(crate) mod atomic {
    #[cfg(not(loom))]
    pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    #[cfg(loom)]
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}
