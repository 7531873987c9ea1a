//! Measurements on the simulated hardware: [`incast`], [`all_to_all`], [`profiles`].
//!
//! They run the same cluster as the random runs, without faults but those they are about, and with the checkers of messages on.

pub mod all_to_all;
pub mod incast;
pub mod load;
pub mod profiles;
