//! The kernel's sockets: what programs use that use nothing else.
//!
//! TCP as programs use it that pass messages: one connection, `TCP_NODELAY`, a `send` per message, `recv` of what is there. A message
//! is so many bytes of the stream, without a header: shorter than any real program's. UDP: a datagram per message; or, with the
//! kernel's segmentation (`UDP_SEGMENT`, `UDP_GRO`), as many messages of one length as fit into 64 KiB per system call.
//!
//! | waits | how |
//! |---|---|
//! | spins | never sleeps: asks the socket again and again |
//! | blocks | `recv` that sleeps until something comes, `poll` where something cannot be sent |
//!
//! Messages are sent from, and arrive in, as much memory as everybody's ([`window`]).

use std::io;
use std::net::SocketAddrV4;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recv, send, socket_with, sockopt,
};
use serde::{Deserialize, Serialize};

use super::first_message::{self, Sleeper};
use super::{Arrival, Ends, Job, Orders};
use crate::cases::window;

/// What one `recv` of a stream takes at most.
const RECEIVED: usize = 256 << 10;
/// Bytes of a datagram, and of what `UDP_SEGMENT` takes at once.
pub const DATAGRAM: usize = 65_507;
/// Segments that the kernel takes at once.
const SEGMENTS: usize = 64;
/// Of a UDP socket's queues. The usual ones hold a few hundred short messages.
const QUEUE: usize = 4 << 20;
/// Of `linux/udp.h`.
const UDP_SEGMENT: libc::c_int = 103;
const UDP_GRO: libc::c_int = 104;
/// How long who blocks sleeps before he looks at his orders.
const SLEEP: Duration = Duration::from_millis(5);
/// Bound on the other end's connecting.
const CONNECTED: Duration = Duration::from_secs(5);

/// One end of a pair of sockets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SocketRole {
    /// What they speak.
    pub protocol: Protocol,
    /// Where it is bound.
    pub own: SocketAddrV4,
    /// Where the other is.
    pub other: SocketAddrV4,
    /// Whether it waits for the other to connect.
    pub listens: bool,
    /// Whether it sleeps while nothing comes.
    pub blocks: bool,
}

/// What sockets speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP, a system call per message.
    Udp,
    /// UDP, many messages of one length per system call.
    UdpSegments,
}

/// An application with a socket.
pub struct Sockets {
    role: SocketRole,
    /// Not connected yet.
    listener: Option<OwnedFd>,
    socket: Option<OwnedFd>,
    /// Length of the messages of this job.
    bytes: usize,
    out: Memory,
    /// Bytes of the message at hand that were sent; or, in segments, that wait to be sent.
    sent: usize,
    /// Something could not be sent since the last pause.
    refused: bool,
    into: Memory,
    /// Bytes of a stream, or messages, that came and were not taken.
    came: usize,
    /// Messages sent since something was asked for.
    unasked: u32,
}

/// Memory that is used from its beginning to its end, and again.
#[derive(Default)]
struct Memory {
    bytes: Vec<u8>,
    at: usize,
}

impl Memory {
    /// For messages of this length.
    fn of(bytes: usize, least: usize) -> Self {
        let len = (window(bytes) * bytes).max(least);
        Self {
            bytes: vec![7; len],
            at: 0,
        }
    }

    /// What comes next, so much at most, in one piece.
    fn next(&mut self, most: usize) -> &mut [u8] {
        let end = (self.at + most).min(self.bytes.len());
        &mut self.bytes[self.at..end]
    }

    /// So much of it was used; whatever comes next is to be of at least `least` bytes.
    fn advance(&mut self, used: usize, least: usize) {
        self.at += used;
        if self.at + least.max(1) > self.bytes.len() {
            self.at = 0;
        }
    }
}

impl Sockets {
    /// Bound, and connected if it is who connects.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(role: &SocketRole) -> Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let kind = match role.protocol {
            Protocol::Tcp => SocketType::STREAM,
            Protocol::Udp | Protocol::UdpSegments => SocketType::DGRAM,
        };
        let socket = socket_with(AddressFamily::INET, kind, flags, None).context("socket")?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if role.protocol != Protocol::Tcp {
            sockopt::set_socket_recv_buffer_size_force(&socket, QUEUE).context("queue")?;
            sockopt::set_socket_send_buffer_size_force(&socket, QUEUE).context("queue")?;
        }
        bind(&socket, &role.own).with_context(|| format!("bind {}", role.own))?;
        let mut sockets = Self {
            role: role.clone(),
            listener: None,
            socket: None,
            bytes: 0,
            out: Memory::default(),
            sent: 0,
            refused: false,
            into: Memory::default(),
            came: 0,
            unasked: 0,
        };
        if role.protocol == Protocol::Tcp && role.listens {
            listen(&socket, 1).context("listen")?;
            sockets.listener = Some(socket);
        } else {
            connect(&socket, &role.other).with_context(|| format!("connect to {}", role.other))?;
            sockets.connected(socket)?;
        }
        Ok(sockets)
    }

    fn connected(&mut self, socket: OwnedFd) -> Result<()> {
        if self.role.protocol == Protocol::Tcp {
            sockopt::set_tcp_nodelay(&socket, true)?;
        }
        if self.role.blocks {
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(SLEEP))?;
        }
        self.socket = Some(socket);
        Ok(())
    }

    /// The other end connects before it is given its first job, but not before ours: so it is waited for when it is needed.
    fn socket(&mut self) -> Result<&OwnedFd> {
        if let Some(listener) = self.listener.take() {
            let deadline = Instant::now() + CONNECTED;
            while !ready(&listener, PollFlags::IN)? {
                ensure!(Instant::now() < deadline, "nobody connects");
            }
            let socket = accept_with(&listener, SocketFlags::CLOEXEC).context("accept")?;
            self.connected(socket)?;
        }
        self.socket.as_ref().context("no socket")
    }

    /// Takes what is there; sleeps until there is something if `flags` do not say otherwise.
    fn fill(&mut self, flags: RecvFlags) -> Result<()> {
        self.unasked = 0;
        self.socket()?;
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        let is_stream = self.role.protocol == Protocol::Tcp;
        let most = if is_stream { RECEIVED } else { DATAGRAM };
        let (count, _) = match recv(socket, self.into.next(most), flags) {
            Ok(received) => received,
            // A datagram found nobody: the other end had not begun, or has ended.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNREFUSED) => return Ok(()),
            Err(error) => return Err(error).context("recv"),
        };
        if is_stream {
            ensure!(count > 0, "the other end closed the connection");
            self.came += count;
            self.into.advance(count, 1);
        } else {
            // Several only where the kernel put together what was sent together.
            let together = self.role.protocol == Protocol::UdpSegments && self.bytes > 0;
            let messages = if together { count / self.bytes } else { 1 };
            ensure!(
                count == messages * self.bytes,
                "a datagram of {count} bytes came, not of {}",
                self.bytes
            );
            self.came += messages;
            self.into.advance(count, DATAGRAM);
        }
        Ok(())
    }

    /// Sends what waits of a message, or of segments. Whether all of it went.
    fn push(&mut self, from: usize, to: usize) -> Result<usize> {
        self.socket()?;
        let Some(socket) = &self.socket else {
            return Ok(0);
        };
        let piece = self.out.next(to);
        let Some(piece) = piece.get(from..) else {
            bail!("{to} bytes are more than there is memory for");
        };
        match send(socket, piece, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::CONNREFUSED) => {
                self.refused = true;
                Ok(0)
            }
            Err(error) => Err(error).context("send"),
        }
    }

    /// Sends all segments that wait, or none.
    fn flush(&mut self) -> Result<bool> {
        let waiting = self.sent;
        if waiting == 0 {
            return Ok(true);
        }
        // More memory than one batch takes is not used then, as the kernel's copy of it is not reused either.
        if self.push(0, waiting)? == 0 {
            return Ok(false);
        }
        self.out.advance(waiting, DATAGRAM);
        self.sent = 0;
        Ok(true)
    }

    /// Messages that go with one system call.
    fn together(&self) -> usize {
        (DATAGRAM / self.bytes.max(1)).clamp(1, SEGMENTS)
    }
}

/// An application asleep in `recv`.
struct Asleep<'s>(&'s OwnedFd);

impl Sleeper for Asleep<'_> {
    fn send(&mut self, message: &[u8; first_message::BYTES]) -> Result<()> {
        send(self.0, message, SendFlags::NOSIGNAL).context("send")?;
        Ok(())
    }

    fn sleep(&mut self) -> Result<Option<(u64, [u8; 8])>> {
        let mut message = [0; first_message::BYTES];
        match recv(self.0, &mut message, RecvFlags::empty()) {
            Ok(_) => {
                let came = first_message::now();
                Ok(message.first_chunk().map(|first| (came, *first)))
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNREFUSED) => Ok(None),
            Err(error) => Err(error).context("recv"),
        }
    }
}

impl Ends for Sockets {
    fn prepare(&mut self, bytes: usize) -> Result<()> {
        let is_stream = self.role.protocol == Protocol::Tcp;
        ensure!(self.sent == 0, "a message was not sent to its end");
        if is_stream {
            ensure!(bytes > 0, "a stream has no empty messages");
            ensure!(self.came == 0, "a message did not come to its end");
        }
        let least = if is_stream { RECEIVED } else { DATAGRAM };
        self.out = Memory::of(bytes, least);
        self.into = Memory::of(bytes, least);
        (self.bytes, self.came) = (bytes, 0);
        if self.role.protocol == Protocol::UdpSegments {
            let socket = self.socket()?;
            option(socket, UDP_SEGMENT, bytes).context("UDP_SEGMENT")?;
            option(socket, UDP_GRO, 1).context("UDP_GRO")?;
        }
        if !is_stream {
            // What is left of the last job would be counted in this one.
            let Some(socket) = &self.socket else {
                return Ok(());
            };
            let mut left = || recv(socket, self.into.next(DATAGRAM), RecvFlags::DONTWAIT);
            while matches!(left(), Ok(_) | Err(Errno::CONNREFUSED)) {}
        }
        Ok(())
    }

    fn send(&mut self, _end: usize, bytes: usize) -> Result<bool> {
        self.unasked = self.unasked.saturating_add(1);
        match self.role.protocol {
            Protocol::Tcp => loop {
                let count = self.push(self.sent, bytes)?;
                if count == 0 {
                    return Ok(false);
                }
                self.sent += count;
                if self.sent == bytes {
                    self.sent = 0;
                    self.out.advance(bytes, bytes);
                    return Ok(true);
                }
            },
            Protocol::Udp => {
                self.refused = false;
                let count = self.push(0, bytes)?;
                self.out.advance(count, bytes);
                // Nothing of an empty datagram is sent, and it is.
                Ok(!self.refused)
            }
            Protocol::UdpSegments => {
                if self.sent >= self.together() * bytes && !self.flush()? {
                    return Ok(false);
                }
                // The message is there already: memory is as it was filled.
                self.sent += bytes;
                Ok(true)
            }
        }
    }

    fn partial(&self, _end: usize) -> bool {
        self.role.protocol == Protocol::Tcp && self.sent > 0
    }

    fn special(&mut self, job: &Job, orders: &Orders) -> Result<()> {
        ensure!(
            self.role.protocol == Protocol::Udp && self.role.blocks,
            "{job:?} is for UDP that sleeps"
        );
        let socket = self.socket()?;
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(first_message::LOOK))?;
        let mut asleep = Asleep(socket);
        let done = match job {
            Job::Stamp => first_message::stamp(&mut asleep, orders),
            Job::Await => first_message::await_stamp(&mut asleep, orders),
            _ => bail!("{job:?} is not for this subject"),
        };
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(SLEEP))?;
        done
    }

    fn receive(&mut self, _end: usize) -> Result<Option<Arrival>> {
        let is_stream = self.role.protocol == Protocol::Tcp;
        let of_one = if is_stream { self.bytes } else { 1 };
        if self.role.protocol == Protocol::UdpSegments {
            self.flush()?;
        }
        // Who blocks receives where he sleeps; unless he has more to send, and does not come to sleep.
        if self.came < of_one && (!self.role.blocks || self.unasked > 1) {
            self.fill(RecvFlags::DONTWAIT)?;
        }
        if self.came < of_one {
            return Ok(None);
        }
        self.came -= of_one;
        let bytes = self.bytes;
        Ok(Some(Arrival { bytes, source: 0 }))
    }

    fn pause(&mut self) {
        if !self.role.blocks {
            return std::hint::spin_loop();
        }
        // What is wrong with the socket is seen when it is used next.
        let refused = std::mem::take(&mut self.refused);
        if refused && let Some(socket) = &self.socket {
            let _ = ready(socket, PollFlags::IN | PollFlags::OUT);
            let _ = self.fill(RecvFlags::DONTWAIT);
        } else {
            let _ = self.fill(RecvFlags::empty());
        }
    }

    fn settled(&mut self) -> Result<bool> {
        match self.role.protocol {
            Protocol::Tcp => Ok(self.sent == 0),
            Protocol::Udp => Ok(true),
            Protocol::UdpSegments => self.flush(),
        }
    }

    fn missed(&self) -> u64 {
        let table = std::fs::read_to_string("/proc/self/net/udp").unwrap_or_default();
        match self.role.protocol {
            Protocol::Tcp => 0,
            _ => dropped(&table, self.role.own.port()).unwrap_or(0),
        }
    }
}

/// Waits a moment for something of a socket.
fn ready(socket: &OwnedFd, what: PollFlags) -> Result<bool> {
    let timeout = Timespec::try_from(SLEEP)?;
    match poll(&mut [PollFd::new(socket, what)], Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error).context("poll"),
    }
}

/// Datagrams that found no room at the socket of this port: the last column of `/proc/net/udp`.
fn dropped(table: &str, port: u16) -> Option<u64> {
    let of = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (_, bound) = fields.nth(1)?.split_once(':')?;
        (u16::from_str_radix(bound, 16).ok()? == port).then_some(())?;
        fields.next_back()?.parse().ok()
    };
    table.lines().find_map(of)
}

/// Options of UDP.
fn option(socket: &OwnedFd, name: libc::c_int, value: usize) -> Result<()> {
    let value = libc::c_int::try_from(value)?;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    let at = std::ptr::from_ref(&value).cast();
    // SAFETY: the option's value is an int, read during the call.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, name, at, len) };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pair(protocol: Protocol, blocks: bool, ports: [u16; 2]) -> [Sockets; 2] {
        let [own, other] = ports.map(|port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port));
        let role = |own, other, listens| SocketRole {
            protocol,
            own,
            other,
            listens,
            blocks,
        };
        let two = Sockets::open(&role(own, other, true)).unwrap();
        let one = Sockets::open(&role(other, own, false)).unwrap();
        [one, two]
    }

    /// Sends so many messages and takes them.
    fn exchange([one, two]: &mut [Sockets; 2], bytes: usize, count: usize) {
        two.prepare(bytes).unwrap();
        one.prepare(bytes).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let (mut sent, mut came) = (0, 0);
        while came < count {
            assert!(Instant::now() < deadline, "{came} of {count} came");
            if sent < count && one.send(0, bytes).unwrap() {
                sent += 1;
            }
            assert!(one.receive(0).unwrap().is_none());
            let mut took = false;
            while let Some(arrival) = two.receive(0).unwrap() {
                assert_eq!(arrival.bytes, bytes);
                came += 1;
                took = true;
            }
            if !took {
                two.pause();
            }
        }
        assert!(one.settled().unwrap());
        assert_eq!((sent, two.missed()), (count, 0));
    }

    // Streams of all kinds of sockets, messages longer than what one call takes among them. Expect: each message once, whole.
    #[test]
    fn every_message_comes_whole() {
        for blocks in [false, true] {
            let mut tcp = pair(Protocol::Tcp, blocks, [43_117, 43_118]);
            exchange(&mut tcp, 64, 5000);
            exchange(&mut tcp, 3 << 20, 5);
            exchange(&mut tcp, 1000, 50);
            let mut udp = pair(Protocol::Udp, blocks, [43_117, 43_118]);
            exchange(&mut udp, 64, 500);
            exchange(&mut udp, 0, 5);
            exchange(&mut udp, 30_000, 20);
        }
        let mut segments = pair(Protocol::UdpSegments, false, [43_117, 43_118]);
        exchange(&mut segments, 64, 500);
        exchange(&mut segments, 1000, 100);
    }

    #[test]
    fn drops_are_those_of_the_port() {
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n\
            12: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 1 2 0 5\n\
            13: 0100007F:A86D 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 1 2 0 77\n";
        assert_eq!(dropped(table, 0xa86d), Some(77));
        assert_eq!(dropped(table, 53), Some(5));
        assert_eq!(dropped(table, 54), None);
    }
}
