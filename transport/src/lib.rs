//! Portolan's reliable transport, sans-IO: no clock, no sockets, no randomness of its own, no unsafe code.
//!
//! Frames and the time go in; frames, deliveries, completions and the next deadline come out. The same code runs in the
//! engine, in the simulator and in the fuzzers. [`Endpoint`] states the contract; [`Host`] is what it asks of its surroundings;
//! [`wire`] is what travels.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod counted;
pub mod endpoint;
pub mod host;
pub mod ident;
pub mod policy;
pub mod wire;

pub use endpoint::Endpoint;
pub use host::Host;
