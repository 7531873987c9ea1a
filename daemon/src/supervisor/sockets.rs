//! AF_XDP sockets made while the node runs, or a test's.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::config::{Config, CopyMode};
use crate::xsk::{BindMode, BindOptions, UmemMemfd, XskConfig, XskError, XskFd};

/// A bound socket and its memory.
pub struct NewSocket {
    /// The UMEM's memfd.
    pub umem: Arc<OwnedFd>,
    /// The socket.
    pub xsk: Arc<OwnedFd>,
    /// The NIC works on the UMEM itself.
    pub zero_copy: bool,
}

/// Why there is none.
#[derive(Debug)]
pub enum NoSocket {
    /// The queue's former socket is still being released: try again.
    NotYet,
    /// One line: what and what to do.
    Failed(String),
}

/// What makes sockets.
pub trait Sockets {
    /// A socket on a NIC queue, over this UMEM or a new one. Every word of `ownership` is written. Does not wait.
    ///
    /// # Errors
    /// Why there is none.
    fn create(
        &mut self,
        nic_queue: u32,
        umem: Option<&OwnedFd>,
        ownership: &[AtomicU64],
    ) -> Result<NewSocket, NoSocket>;

    /// The interface has another index from now on.
    fn moved(&mut self, _ifindex: u32) {}
}

/// The kernel's.
pub struct KernelSockets {
    ifindex: u32,
    mode: BindMode,
    xsk: XskConfig,
}

impl KernelSockets {
    /// On the interface of this configuration.
    pub fn new(config: &Config, xsk: XskConfig) -> Self {
        Self {
            ifindex: config.interface_facts.index,
            mode: match config.copy_mode {
                CopyMode::Auto => BindMode::Auto,
                CopyMode::Copy => BindMode::Copy,
                CopyMode::ZeroCopy => BindMode::ZeroCopy,
            },
            xsk,
        }
    }
}

impl Sockets for KernelSockets {
    fn moved(&mut self, ifindex: u32) {
        self.ifindex = ifindex;
    }

    fn create(
        &mut self,
        nic_queue: u32,
        umem: Option<&OwnedFd>,
        ownership: &[AtomicU64],
    ) -> Result<NewSocket, NoSocket> {
        let failed = |error: XskError| match error {
            XskError::QueueBusy { .. } => NoSocket::NotYet,
            other => NoSocket::Failed(other.to_string()),
        };
        let system = |error: std::io::Error| NoSocket::Failed(error.to_string());
        let layout = &self.xsk.layout;
        let umem = match umem {
            Some(fd) => UmemMemfd::from_fd(fd.try_clone().map_err(system)?, layout),
            None => UmemMemfd::create(layout),
        }
        .map_err(failed)?;
        let bind = BindOptions {
            ifindex: self.ifindex,
            queue: nic_queue,
            mode: self.mode,
            sg: layout.needs_sg(),
            busy_patience: Duration::ZERO,
        };
        let socket = XskFd::create(&umem, &self.xsk, &bind, ownership).map_err(failed)?;
        let keep = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map(Arc::new);
        Ok(NewSocket {
            umem: keep(umem.fd().as_fd()).map_err(system)?,
            xsk: keep(socket.fd().as_fd()).map_err(system)?,
            zero_copy: socket.zero_copy(),
        })
    }
}
