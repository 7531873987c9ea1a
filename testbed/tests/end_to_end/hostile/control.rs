//! One connection to the daemon's socket, byte by byte.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use portolan_abi::control::{ErrorCode, MAX_RESPONSE_PACKET, Request, Response};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::STEP;

/// A connected socket. Every operation ends within [`STEP`], unless another bound was given.
pub struct Control {
    socket: OwnedFd,
}

/// What came back.
pub struct Answer {
    pub document: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

impl Control {
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let control = Self { socket };
        control.bound(STEP)?;
        rustix::net::connect(&control.socket, &SocketAddrUnix::new(path)?)?;
        Ok(control)
    }

    /// Changes the bound on one operation.
    pub fn bound(&self, step: Duration) -> io::Result<()> {
        for which in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
            sockopt::set_socket_timeout(&self.socket, which, Some(step))?;
        }
        Ok(())
    }

    /// Sends one packet.
    pub fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(packet, descriptors, SendFlags::NOSIGNAL)
    }

    /// Sends one packet, or fails at once with [`io::ErrorKind::WouldBlock`].
    pub fn send_now(&self, packet: &[u8]) -> io::Result<()> {
        self.send_with(packet, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with(
        &self,
        packet: &[u8],
        descriptors: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let packet = [IoSlice::new(packet)];
        rustix::net::sendmsg(&self.socket, &packet, &mut control, flags)?;
        Ok(())
    }

    /// Receives one answer, all its packets; `None` when the daemon has closed the connection.
    pub fn receive(&self) -> io::Result<Option<Answer>> {
        let mut document = Vec::new();
        let mut descriptors = Vec::new();
        let mut packet = vec![0; MAX_RESPONSE_PACKET + 1];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut packet)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            );
            let bytes = match received {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::CONNRESET) => 0,
                Err(error) => return Err(error.into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            let Some((more, text)) = packet[..bytes].split_first() else {
                return Ok(None);
            };
            document.extend_from_slice(text);
            if *more == 0 {
                return Ok(Some(Answer {
                    document,
                    descriptors,
                }));
            }
        }
    }

    /// Asks and waits for the answer.
    pub fn ask(&self, request: &Request) -> io::Result<(Response, Vec<OwnedFd>)> {
        self.send(&serde_json::to_vec(request)?, &[])?;
        let closed = || io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the daemon");
        let answer = self.receive()?.ok_or_else(closed)?;
        let response = serde_json::from_slice(&answer.document)?;
        Ok((response, answer.descriptors))
    }

    /// Asks for what is refused, and returns how.
    pub fn refused(&self, request: &Request) -> (ErrorCode, String) {
        match self.ask(request).unwrap() {
            (Response::Error { code, message }, descriptors) => {
                assert!(descriptors.is_empty());
                assert!(!message.contains('\n'), "{message}");
                (code, message)
            }
            other => panic!("{request:?} was granted: {other:?}"),
        }
    }

    /// A report.
    pub fn document(&self, request: &Request) -> io::Result<serde_json::Value> {
        match self.ask(request)?.0 {
            Response::Document { document } => Ok(document),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
