//! What the hostile tests share. They speak the control protocol and write the shared memory themselves: the client library
//! would not do what they do.

pub mod control;
pub mod deeds;
pub mod forger;
pub mod neighbour;
pub mod raw_port;
pub mod scene;
pub mod watch;

use std::time::Duration;

/// Bound on one step of anything.
pub const STEP: Duration = Duration::from_secs(10);
