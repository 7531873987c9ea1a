//! Who is at the other end of a Unix socket. An `unsafe` island: two socket options that rustix does not offer as we need them
//! (it takes a pid of 0, which a peer in another pid namespace has, for impossible).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::config::Credentials;

/// More supplementary groups than this are not looked at.
const MAX_GROUPS: usize = 256;

/// What the kernel vouched for when the peer connected.
///
/// # Errors
/// The system's.
pub fn of(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` is plain numbers and `length` its size.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if result < 0 || length as usize != size_of::<libc::ucred>() {
        return Err(io::Error::last_os_error());
    }
    let mut gids = vec![peer.gid];
    gids.extend(supplementary_groups(socket));
    Ok(Credentials {
        pid: peer.pid,
        uid: peer.uid,
        gids,
    })
}

/// None if there are too many, or the kernel does not say: then only the primary group counts.
fn supplementary_groups(socket: BorrowedFd<'_>) -> Vec<u32> {
    let mut groups = vec![0u32; MAX_GROUPS];
    let mut length = (MAX_GROUPS * size_of::<u32>()) as libc::socklen_t;
    // SAFETY: `groups` has `length` bytes, and every value is a group.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Vec::new();
    }
    groups.truncate(length as usize / size_of::<u32>());
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn we_are_at_the_other_end() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let who = of(a.as_fd()).unwrap();
        assert_eq!(who.pid, i32::try_from(std::process::id()).unwrap());
        assert_eq!(who.uid, rustix::process::getuid().as_raw());
        assert_eq!(who.gids[0], rustix::process::getgid().as_raw());
    }
}
