//! The library against a daemon and an engine that a test plays: one program, since linking each of its parts by itself takes longer than running it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attach;
mod endings;
mod ends;
mod engine_faults;
mod integrity;
mod naps;
mod offers;
mod port;
mod support;
