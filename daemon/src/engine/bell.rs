//! Ringing a doorbell without ever waiting.
//!
//! A doorbell that an application holds must not be able to block the engine. The O_NONBLOCK of an eventfd belongs to the open file
//! description, which the application shares and could clear while the counter is full; a socket is asked for not waiting with each
//! call. So the bells towards applications are the engine's end of a stream socket pair, and those between engines, which no
//! application ever holds, are eventfds.

use std::os::fd::BorrowedFd;

use rustix::net::SendFlags;

/// Rings towards an application: eight bytes, the number 1, as an eventfd would take them. Full or hung up: nothing happens.
pub fn ring(bell: BorrowedFd<'_>) {
    let _ = rustix::net::send(
        bell,
        &1u64.to_ne_bytes(),
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    );
}

/// Wakes another engine of this node through its eventfd.
pub fn wake(engine: BorrowedFd<'_>) {
    let _ = rustix::io::write(engine, &1u64.to_ne_bytes());
}
