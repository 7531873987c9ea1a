//! Portolan's deterministic simulator: the very transport code, any number of nodes, one clock, one seed.
//!
//! [`harness`] is a cluster small enough to hold a conversation in a test. [`cluster`] is one that is large and fast: engines with
//! finite rings and processor time, links, a switch, faults. [`checks`] judge both. [`campaign`] makes random runs of it.
#![allow(missing_docs)] // a tool: names and module documentation say what there is to say

pub mod campaign;
pub mod checks;
pub mod cluster;
pub mod harness;
pub mod heap;
pub mod puppet;
pub mod scenario;
