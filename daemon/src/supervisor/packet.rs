//! Packets with descriptors over SOCK_SEQPACKET sockets.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Most descriptors beside one packet (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// What arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A packet of so many bytes.
    Packet(usize),
    /// A packet longer than the buffer; its bytes are lost.
    TooLong,
    /// The other end is gone. (An empty packet reads the same; nobody we talk to sends one.)
    Closed,
    /// Nothing at the moment.
    Nothing,
}

/// Receives a packet without waiting. Descriptors beside it are never taken in: without room for them the kernel closes them.
///
/// # Errors
/// The system's.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    receive_with(socket, buffer, RecvFlags::empty())
}

/// Like [`receive`], and leaves the packet where it is.
///
/// # Errors
/// The system's.
pub fn peek(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    receive_with(socket, buffer, RecvFlags::PEEK)
}

fn receive_with(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    more: RecvFlags,
) -> io::Result<Received> {
    let capacity = buffer.len();
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC | more;
    match rustix::net::recv(socket, buffer, flags) {
        Ok((_, 0)) => Ok(Received::Closed),
        Ok((_, length)) if length > capacity => Ok(Received::TooLong),
        Ok((_, length)) => Ok(Received::Packet(length)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(Received::Nothing),
        Err(rustix::io::Errno::CONNRESET) => Ok(Received::Closed),
        Err(error) => Err(error.into()),
    }
}

/// A packet to send.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The descriptors beside it.
    pub fds: Vec<Arc<OwnedFd>>,
}

impl Packet {
    /// A packet without descriptors.
    pub fn plain(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            fds: Vec::new(),
        }
    }

    /// Sends it without waiting; false if there is no room at the moment.
    ///
    /// # Errors
    /// The system's; EPIPE if the other end is gone.
    pub fn send(&self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::other("too many descriptors for one packet"));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::sendmsg(socket, &[IoSlice::new(&self.bytes)], &mut control, flags) {
            Ok(_) => Ok(true),
            // ETOOMANYREFS: the receivers of earlier descriptors have not taken them in yet.
            Err(
                rustix::io::Errno::AGAIN
                | rustix::io::Errno::INTR
                | rustix::io::Errno::NOBUFS
                | rustix::io::Errno::TOOMANYREFS,
            ) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Packets that wait for room in a socket.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<Packet>,
}

impl Outbox {
    /// Puts a packet at the end.
    pub fn push(&mut self, packet: Packet) {
        self.waiting.push_back(packet);
    }

    /// Packets that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Does none wait?
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Sends what there is room for.
    ///
    /// # Errors
    /// The system's; the socket is then useless.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while let Some(packet) = self.waiting.front() {
            if !packet.send(socket)? {
                break;
            }
            self.waiting.pop_front();
        }
        Ok(())
    }
}
