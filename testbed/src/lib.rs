//! Laboratories for Portolan: network namespaces wired with veth pairs, and daemons inside them.
//!
//! A [`Lab`] is a small cluster on one machine. Every node is a network namespace with one interface, `ptl1v`,
//! `ptl2v`, …; two nodes share a veth pair, any other number meets on a bridge in a namespace of its own, so nothing
//! ever appears in the machine's own network. Addresses and MACs follow from the node id. Many labs live side by
//! side: their names carry the process id and a number.
//!
//! ```no_run
//! use portolan_testbed::{Encap, Lab};
//!
//! # fn main() -> anyhow::Result<()> {
//! let lab = Lab::builder().nodes(2).mtu(9000).encap(Encap::Udp6).build()?;
//! let _one = lab.node(1).start_daemon("")?;
//! let _two = lab.node(2).start_daemon("[engine]\nwait = \"busy\"")?;
//! let status = lab.node(1).portolan().args(["ping", "2"]).status()?;
//! assert!(status.success());
//! # Ok(())
//! # }
//! ```
//!
//! A lab built [`Builder::impaired`] loses, doubles, damages, overtakes, delays and throttles Portolan's frames as its
//! [`Wire`] is told, while it runs.
//!
//! **Cleaning up.** Dropping a [`Daemon`] kills its processes, dropping a [`Lab`] kills what is left in its
//! namespaces and removes them, in a panic too. A lab whose process died without unwinding is removed by the next
//! lab anyone builds: each lab's directory holds a lock file, and the kernel drops that lock with the process
//! ([`sweep`]).
//!
//! Everything here needs root.

mod binaries;
pub mod cancel;
mod config;
mod control;
mod daemon;
mod impairment;
mod lab;
pub mod manager;
mod namespace;
mod node;
pub mod pattern;
pub mod process;
mod run_dir;
pub mod wire;
mod wiring;

pub use binaries::Binaries;
pub use config::merge_toml;
pub use daemon::{Daemon, DaemonOptions, Ready};
pub use impairment::{Impairment, LineCounters, WireCounters};
pub use lab::{Builder, Encap, Lab, Spec};
pub use manager::{Manager, ManagerOptions};
pub use node::Node;
pub use run_dir::sweep;
pub use wire::Wire;
