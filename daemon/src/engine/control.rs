//! The engine's end of the link to its supervisor.
//!
//! Sending never waits: what the supervisor has not taken in yet is kept and sent later. The supervisor may be believed, but not to be
//! there: a link that ends means that nobody looks after this engine any more, and it leaves.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags};

use crate::engine_link::{FromEngine, LINK_FD, MAX_PACKET, ToEngine};

/// Most descriptors beside one packet (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// What came over the link.
#[derive(Debug)]
pub enum Incoming {
    /// A message and its descriptors.
    Message(ToEngine, Vec<OwnedFd>),
    /// Nothing at the moment.
    Nothing,
    /// The supervisor is gone.
    Closed,
}

/// The link.
pub struct Link {
    fd: OwnedFd,
    buffer: Vec<u8>,
    waiting: VecDeque<Vec<u8>>,
}

impl Link {
    /// The link this process was started with.
    ///
    /// # Errors
    /// If [`LINK_FD`] is no socket: somebody started an engine by hand.
    pub fn inherit() -> io::Result<Self> {
        // SAFETY: the descriptor is only borrowed to ask what it is; nothing else of this process owns its number.
        let borrowed = unsafe { BorrowedFd::borrow_raw(LINK_FD) };
        rustix::net::sockopt::socket_type(borrowed).map_err(|_| {
            io::Error::other("an engine is started by its supervisor, which gives it a link")
        })?;
        // SAFETY: it is open (asked just now), meant for us, and this is the only place that takes it.
        Ok(Self::new(unsafe { OwnedFd::from_raw_fd(LINK_FD) }))
    }

    /// Over this socket.
    pub fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            buffer: vec![0; MAX_PACKET],
            waiting: VecDeque::new(),
        }
    }

    /// For polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The next message; waits for it if `wait`.
    ///
    /// # Errors
    /// A packet that is no message, or the system's.
    pub fn receive(&mut self, wait: bool) -> io::Result<Incoming> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut flags = RecvFlags::CMSG_CLOEXEC;
        flags.set(RecvFlags::DONTWAIT, !wait);
        let buffers = &mut [IoSliceMut::new(&mut self.buffer)];
        let received = match rustix::net::recvmsg(&self.fd, buffers, &mut control, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Incoming::Nothing),
            Err(Errno::CONNRESET) => return Ok(Incoming::Closed),
            Err(errno) => return Err(errno.into()),
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Ok(Incoming::Closed);
        }
        let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        let bytes = self.buffer.get(..received.bytes).unwrap_or_default();
        if received.flags.intersects(cut) {
            return Err(io::Error::other(
                "a message of the supervisor was cut short",
            ));
        }
        let message = serde_json::from_slice(bytes).map_err(|error| {
            io::Error::other(format!(
                "a message of the supervisor makes no sense: {error}"
            ))
        })?;
        Ok(Incoming::Message(message, fds))
    }

    /// Sends a message, now or as soon as there is room.
    pub fn send(&mut self, message: &FromEngine) {
        match serde_json::to_vec(message) {
            Ok(bytes) => self.waiting.push_back(bytes),
            Err(error) => tracing::error!(%error, "a message to the supervisor cannot be written"),
        }
        self.flush();
    }

    /// Sends what waits, as far as there is room.
    pub fn flush(&mut self) {
        while let Some(bytes) = self.waiting.front() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.fd, bytes, flags) {
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => break,
                // A broken link shows when it is read.
                Ok(_) | Err(_) => {
                    self.waiting.pop_front();
                }
            }
        }
    }
}
