//! Fuzzing targets: everything in Portolan that reads what somebody else wrote, as functions from bytes.
//!
//! | target | who wrote the bytes | what reads them |
//! |---|---|---|
//! | [`frame`] | the network | `wire::parse` |
//! | [`conversation`] | peers, one of them a liar, the network, deaths | whole `Endpoint`s |
//! | [`control`] | clients, engines, people | JSON packets, the configuration |
//!
//! A target panics when a promise is broken and does nothing else. It decides everything by its input, so that an input that fails fails
//! again. `cargo xtask fuzz` runs them under libFuzzer; `corpus/` holds the inputs that reach the most, and every test run replays them.
//!
//! Rejected: cargo-fuzz (a nightly compiler and a workspace of its own; what it adds to libFuzzer is flags); structure-aware input through
//! derived `Arbitrary` (a change of a type would invalidate the corpus; here the programs' bytes mean the same for longer).
#![allow(clippy::panic)] // a panic is how a target speaks

pub mod control;
pub mod conversation;
pub mod frame;
pub mod input;

#[cfg(test)]
mod corpus;
