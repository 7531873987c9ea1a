//! The service manager, as it is talked to: datagrams to `$NOTIFY_SOCKET` (sd_notify(3)).

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};

/// Where the manager listens.
const SOCKET: &str = "NOTIFY_SOCKET";
/// How many descriptors it keeps (systemd 254 and newer set it; for older ones the unit does).
const STORE_MAX: &str = "FDSTORE";
/// A manager that takes no message for so long is not there.
const PATIENCE: Duration = Duration::from_secs(1);

/// A manager that listens.
#[derive(Debug)]
pub struct Notifier {
    socket: OwnedFd,
    to: SocketAddrUnix,
    store_max: usize,
}

impl Notifier {
    /// The manager that started us, if it listens.
    ///
    /// # Errors
    /// The address makes no sense, or the system's.
    pub fn from_environment() -> io::Result<Option<Self>> {
        let Some(address) = std::env::var_os(SOCKET).filter(|address| !address.is_empty()) else {
            return Ok(None);
        };
        let store_max = std::env::var(STORE_MAX).ok().and_then(|n| n.parse().ok());
        Self::new(&address, store_max.unwrap_or(0)).map(Some)
    }

    /// A manager at `address`, a path or `@` and an abstract name, that keeps `store_max` descriptors.
    ///
    /// # Errors
    /// The address makes no sense, or the system's.
    pub fn new(address: &OsStr, store_max: usize) -> io::Result<Self> {
        let to = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
            [b'/', ..] => SocketAddrUnix::new(address)?,
            _ => {
                return Err(io::Error::other(format!(
                    "${SOCKET} is {}, neither a path nor an abstract name",
                    address.display()
                )));
            }
        };
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
        Ok(Self {
            socket,
            to,
            store_max,
        })
    }

    /// How many descriptors it keeps for us; 0 if none.
    pub fn store_max(&self) -> usize {
        self.store_max
    }

    /// Sends one message. Waits a moment if the manager has many to read.
    ///
    /// # Errors
    /// The system's.
    pub fn say(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::other("no room for a descriptor"));
        }
        let text = [IoSlice::new(text.as_bytes())];
        loop {
            let flags = SendFlags::NOSIGNAL;
            match rustix::net::sendmsg_addr(&self.socket, &self.to, &text, &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
