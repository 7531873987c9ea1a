//! One connection to the daemon's socket: a request, its answer, and never an unbounded wait.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use portolan_abi::control::{MAX_REQUEST_BYTES, MAX_RESPONSE_PACKET, Request, Response};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::error::NodeError;

/// Longest wait for one step of the daemon. Opening a port may have to wait for an engine that is just being replaced.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);
/// Longest answer, all packets together.
const MAX_RESPONSE: usize = 64 << 20;
/// Most descriptors of one answer.
const MAX_DESCRIPTORS: usize = 4;

/// A connected socket.
pub(crate) struct Connection {
    socket: OwnedFd,
}

impl Connection {
    pub(crate) fn open(path: &Path) -> Result<Self, NodeError> {
        let fail = |source: Errno| NodeError::system("make a socket", source);
        let address = SocketAddrUnix::new(path)
            .map_err(|e| NodeError::system("use this path for a socket", e))?;
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(fail)?;
        // Also bounds connect, which waits while the daemon's backlog is full.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(DEADLINE))
            .map_err(fail)?;
        match retry(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => Ok(Self { socket }),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR) => {
                Err(NodeError::NoDaemon { path: path.into() })
            }
            Err(Errno::ACCESS | Errno::PERM) => Err(NodeError::NoPermission { path: path.into() }),
            Err(Errno::AGAIN) => Err(NodeError::Timeout {
                what: "accept the connection",
                waited: DEADLINE,
            }),
            Err(other) => Err(NodeError::system("connect to the daemon", other)),
        }
    }

    /// Asks, and returns the answer with its descriptors. A refusal is an error.
    pub(crate) fn request(&self, request: &Request) -> Result<(Response, Vec<OwnedFd>), NodeError> {
        let packet = serde_json::to_vec(request)
            .map_err(|e| NodeError::BadAnswer(format!("cannot write the request: {e}")))?;
        if packet.len() > MAX_REQUEST_BYTES {
            return Err(NodeError::BadOptions(format!(
                "a request of {} bytes is longer than {MAX_REQUEST_BYTES}",
                packet.len()
            )));
        }
        match retry(|| {
            rustix::net::sendmsg(
                &self.socket,
                &[IoSlice::new(&packet)],
                &mut SendAncillaryBuffer::default(),
                SendFlags::NOSIGNAL,
            )
        }) {
            Ok(_) => {}
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                return Err(NodeError::Disconnected);
            }
            Err(Errno::AGAIN) => {
                return Err(NodeError::Timeout {
                    what: "read the request",
                    waited: DEADLINE,
                });
            }
            Err(other) => return Err(NodeError::system("send to the daemon", other)),
        }
        let (document, descriptors) = self.answer()?;
        match serde_json::from_slice(&document) {
            Ok(Response::Error { code, message }) => Err(NodeError::Refused { code, message }),
            Ok(response) => Ok((response, descriptors)),
            Err(e) => Err(NodeError::BadAnswer(e.to_string())),
        }
    }

    /// All packets of one answer.
    fn answer(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), NodeError> {
        let deadline = Instant::now() + DEADLINE;
        let mut document = Vec::new();
        let mut descriptors = Vec::new();
        // One byte more than a packet may have, so that a longer one is recognised.
        let mut packet = vec![0; MAX_RESPONSE_PACKET + 2];
        loop {
            self.await_packet(deadline)?;
            let len = self.packet(&mut packet, &mut descriptors)?;
            let Some((&more, text)) = packet.get(..len).and_then(<[u8]>::split_first) else {
                return Err(NodeError::Disconnected);
            };
            document.extend_from_slice(text);
            if document.len() > MAX_RESPONSE {
                return Err(NodeError::BadAnswer("it has no end".into()));
            }
            match more {
                0 => return Ok((document, descriptors)),
                1 => {}
                other => {
                    return Err(NodeError::BadAnswer(format!(
                        "a packet begins with {other}"
                    )));
                }
            }
        }
    }

    fn await_packet(&self, deadline: Instant) -> Result<(), NodeError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = timespec(left);
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) if left.is_zero() => {
                    return Err(NodeError::Timeout {
                        what: "answer",
                        waited: DEADLINE,
                    });
                }
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(e) => return Err(NodeError::system("wait for the daemon", e)),
            }
        }
    }

    fn packet(
        &self,
        packet: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, NodeError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry(|| {
            rustix::net::recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(packet)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            )
        })
        .map_err(|e| match e {
            Errno::CONNRESET => NodeError::Disconnected,
            other => NodeError::system("hear from the daemon", other),
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
            || descriptors.len() > MAX_DESCRIPTORS
        {
            return Err(NodeError::BadAnswer("a packet is too long".into()));
        }
        Ok(received.bytes)
    }

    /// Has the daemon closed its end?
    pub(crate) fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP;
        matches!(rustix::event::poll(&mut fds, Some(&timespec(Duration::ZERO))), Ok(n) if n > 0)
            && fds[0].revents().intersects(gone)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// For poll.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
