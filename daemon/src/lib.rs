//! The per-node daemon: the supervisor that owns what must survive, and the
//! engines that move messages.

pub mod credit_budget;
pub mod doctor;
pub mod engine;
pub mod engine_link;
mod ethtool;
pub mod exporter;
pub mod image;
pub mod logging;
pub mod service;
pub mod supervisor;
pub mod transport_policy;
pub mod xsk;
