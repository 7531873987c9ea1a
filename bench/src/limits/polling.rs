//! Going round for frames oneself, as Portolan's engines do when there are many: the interface's NAPI instance is deferred
//! ([`crate::subjects`] sees to it), and who looks in vain receives from a socket that has received through it, which makes the kernel go round.
//!
//! The other end's subject sends datagrams until the socket has. Nothing of it is shared with the daemon's way of doing so: a limit shares no mistake with
//! what is held against it.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socket_with};

/// Of `asm-generic/socket.h`.
const SO_BUSY_POLL: libc::c_int = 46;
const SO_INCOMING_NAPI_ID: libc::c_int = 56;
const SO_PREFER_BUSY_POLL: libc::c_int = 69;
const SO_BUSY_POLL_BUDGET: libc::c_int = 70;
/// Frames at once.
const BUDGET: libc::c_int = 64;
/// Where datagrams are sent: discard (RFC 863).
pub const PORT: u16 = 9;
/// Bound on the first datagram.
const FIRST: Duration = Duration::from_secs(5);

/// What is polled.
pub struct Polling {
    socket: OwnedFd,
}

impl Polling {
    pub fn open(interface: &str) -> Result<Self> {
        let (family, flags) = (AddressFamily::INET, SocketFlags::CLOEXEC);
        let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
        set(&socket, libc::SO_BINDTODEVICE, interface.as_bytes()).context("bind to the device")?;
        let options = [
            (SO_PREFER_BUSY_POLL, 1),
            (SO_BUSY_POLL, 1),
            (SO_BUSY_POLL_BUDGET, BUDGET),
        ];
        for (option, value) in options {
            set(&socket, option, &value.to_ne_bytes()).context("busy polling")?;
        }
        rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, PORT))?;
        let polling = Self { socket };
        let deadline = Instant::now() + FIRST;
        while !polling.is_effective() {
            ensure!(
                Instant::now() < deadline,
                "no datagram came through a NAPI instance"
            );
            polling.go_round();
        }
        Ok(polling)
    }

    /// Has the kernel go round once. Errors are the socket's, and there are none that matter.
    pub fn go_round(&self) {
        let _ = recv(&self.socket, &mut [0u8; 1][..], RecvFlags::DONTWAIT);
    }

    /// Whether the socket has received through an instance.
    fn is_effective(&self) -> bool {
        let mut id: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the option's value is an int, as long as it says.
        let got = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_INCOMING_NAPI_ID,
                std::ptr::from_mut(&mut id).cast(),
                &mut len,
            )
        };
        got == 0 && id > 0
    }
}

fn set(socket: &OwnedFd, option: libc::c_int, value: &[u8]) -> Result<()> {
    // SAFETY: the value is as long as it says, and read during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}
