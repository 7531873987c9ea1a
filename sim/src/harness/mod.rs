//! A cluster of endpoints in one process: hosts over vectors, a network with faults, a virtual clock, and a book of promises.
//!
//! Everything is decided by one seed. [`seeds`] runs a test over many and prints, for one that fails, the command that repeats it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // it is all test

pub mod book;
pub mod host;
mod host_impl;
pub mod net;
mod records;
pub mod rng;
mod turns;

pub use book::Route;
pub use host::Event;
pub use net::{AfterFailure, Faults, MS, Net, SECOND, US, node};
pub use rng::Rng;

use portolan_transport::ident::Peer;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub const MIB: u32 = 1 << 20;

/// Two nodes; port 1 on node 1 and port 2 on node 2, each with 8 tokens of 4 MiB at each priority.
pub fn pair() -> Net {
    let mut net = Net::new(1, 2, 1);
    net.open(node(1), 1, 8, 4 * MIB);
    net.open(node(2), 2, 8, 4 * MIB);
    net
}

/// The first engine of a node.
pub fn engine(id: u16) -> Peer {
    Peer {
        node: node(id),
        queue: 0,
    }
}

pub fn all_delivered(net: &Net) {
    assert_eq!(net.book.borrow().delivered(), net.book.borrow().len());
}

/// Runs `test` for `count` seeds, or for the one in `PORTOLAN_SEED`. `PORTOLAN_SEEDS` changes the count.
pub fn seeds(binary: &str, name: &str, count: u64, test: impl Fn(u64)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seeds = match number("PORTOLAN_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PORTOLAN_SEEDS").unwrap_or(count),
    };
    for seed in seeds {
        if let Err(failure) = catch_unwind(AssertUnwindSafe(|| test(seed))) {
            eprintln!(
                "repeat with: PORTOLAN_SEED={seed} cargo test -p portolan-transport --test {binary} {name} -- --exact"
            );
            resume_unwind(failure);
        }
    }
}
