//! What the hostile tests share. They speak the control protocol and write the shared memory themselves: the client library
//! would not do what they do.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers fail by panicking, and each test uses its part"
)]

pub mod control;
pub mod deeds;
pub mod forger;
pub mod neighbour;
#[path = "../harness/packet_socket.rs"]
pub mod packet_socket;
pub mod random;
pub mod raw_port;
pub mod scene;
pub mod watch;

use std::time::Duration;

/// Bound on one step of anything.
pub const STEP: Duration = Duration::from_secs(10);
