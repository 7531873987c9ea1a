//! Portolan's deterministic simulator: the very transport code, any number of nodes, one clock, one seed.
//!
//! [`harness`] is a cluster small enough to hold a conversation in a test.

pub mod checks;
pub mod harness;
pub mod puppet;
