//! The supervisor in dialogues: tests play engines, standbys and applications. One program, since linking each of its parts by itself takes longer than running it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod captures;
mod clients;
mod harness;
mod ports;
mod reload;
mod standby;
