//! The XDP program that steers Portolan frames into AF_XDP sockets, and its loader.
//!
//! `src/bpf/steer.bpf.c` decides per frame: ours goes to the socket of its receive queue, ours
//! without a socket is dropped, everything else passes to the kernel untouched; each is counted by
//! [`Reason`]. [`Steer`] loads it with a [`SteerConfig`], attaches it through a link held as a
//! file descriptor and maps queues to sockets.
//!
//! Needs CAP_BPF and CAP_NET_ADMIN, a kernel of 5.15 or newer (frames of several buffers: 5.18)
//! and, to build, clang and libbpf's headers.

mod config;
mod error;
mod link;
mod object;
mod reason;
mod steer;
mod syscall;

pub use config::{DEFAULT_ETHERTYPE, Encap, MAX_QUEUES, SteerConfig};
pub use error::SteerError;
pub use link::{AttachMode, detach};
pub use reason::Reason;
pub use steer::{Frames, Steer, SteerFds, program_name};

/// The compiled program: an ELF object, aligned for those who parse it in place.
pub const STEER_OBJECT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer.bpf.o"));
