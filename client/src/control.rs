//! One connection to the daemon's socket: a request, its answer, and never an unbounded wait.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portolan_abi::control::{
    FIRST, MAX_REQUEST_BYTES, MAX_RESPONSE_PACKET, MORE, Request, Response, number_prefix,
    split_number,
};
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
    /// Requests so far: each has a number, so that a daemon that was restarted while it worked on one can answer it again.
    asked: AtomicU64,
}

/// An answer that is coming, packet by packet.
#[derive(Default)]
struct Answer {
    document: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    /// What comes is the answer to an earlier request, which we have.
    stale: bool,
}

impl Answer {
    /// Takes a packet in; true if the answer to request `number` is complete.
    fn take(
        &mut self,
        number: u64,
        packet: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<bool, NodeError> {
        let bad = |what: String| Err(NodeError::BadAnswer(what));
        let Some((&marks, mut text)) = packet.split_first() else {
            return Err(NodeError::Disconnected);
        };
        if marks & !(MORE | FIRST) != 0 {
            return bad(format!("a packet begins with {marks}"));
        }
        if marks & FIRST != 0 {
            // What came before was all that a daemon had sent when it died.
            let (answered, rest) = split_number(text);
            text = rest;
            *self = Self {
                stale: answered != Some(number),
                ..Self::default()
            };
        }
        self.document.extend_from_slice(text);
        self.descriptors.extend(descriptors);
        if self.document.len() > MAX_RESPONSE {
            return bad("it has no end".into());
        }
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return bad("it brings too many descriptors".into());
        }
        Ok(marks & MORE == 0 && !self.stale)
    }
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
            Ok(()) => Ok(Self {
                socket,
                asked: AtomicU64::new(0),
            }),
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
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let mut packet = number_prefix(number).into_bytes();
        serde_json::to_writer(&mut packet, request)
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
        let (document, descriptors) = self.answer(number)?;
        match serde_json::from_slice(&document) {
            Ok(Response::Error { code, message }) => Err(NodeError::Refused { code, message }),
            Ok(response) => Ok((response, descriptors)),
            Err(e) => Err(NodeError::BadAnswer(e.to_string())),
        }
    }

    /// The whole answer to request `number`.
    fn answer(&self, number: u64) -> Result<(Vec<u8>, Vec<OwnedFd>), NodeError> {
        let deadline = Instant::now() + DEADLINE;
        let mut answer = Answer::default();
        // One byte more than a packet may have, so that a longer one is recognised.
        let mut packet = vec![0; MAX_RESPONSE_PACKET + 2];
        loop {
            self.await_packet(deadline)?;
            let (len, descriptors) = self.packet(&mut packet)?;
            let bytes = packet.get(..len).unwrap_or_default();
            if answer.take(number, bytes, descriptors)? {
                return Ok((answer.document, answer.descriptors));
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

    fn packet(&self, packet: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), NodeError> {
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
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(NodeError::BadAnswer("a packet is too long".into()));
        }
        Ok((received.bytes, descriptors))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn take(answer: &mut Answer, number: u64, packet: &[u8]) -> Result<bool, NodeError> {
        answer.take(number, packet, Vec::new())
    }

    // A daemon dies in the middle of an answer; its successor gives it from the start.
    #[test]
    fn an_answer_that_begins_anew_is_taken_once() {
        let mut answer = Answer::default();
        assert!(!take(&mut answer, 3, b"\x03#3 half of ").unwrap());
        assert!(!take(&mut answer, 3, b"\x03#3 the ").unwrap());
        assert!(!take(&mut answer, 3, b"\x01whole ").unwrap());
        assert!(take(&mut answer, 3, b"\x00answer").unwrap());
        assert_eq!(answer.document, b"the whole answer");
    }

    // An answer comes twice, the second time after the next request. Expect: passed over, all of it.
    #[test]
    fn the_answer_to_an_earlier_request_is_passed_over() {
        let mut answer = Answer::default();
        assert!(!take(&mut answer, 4, b"\x03#3 old ").unwrap());
        assert!(!take(&mut answer, 4, b"\x00news").unwrap());
        assert!(take(&mut answer, 4, b"\x02#4 new").unwrap());
        assert_eq!(answer.document, b"new");
        // Refused at the door, before anything was asked: no number.
        let mut answer = Answer::default();
        assert!(take(&mut answer, 1, b"\x00go away").unwrap());
        assert!(take(&mut Answer::default(), 1, b"\x04").is_err());
        assert!(take(&mut Answer::default(), 1, b"").is_err());
    }
}
