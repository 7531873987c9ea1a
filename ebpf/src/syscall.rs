//! The bpf system call, for what aya does not offer as we need it: [`crate::object`] and [`crate::link`] say why.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Commands of `linux/bpf.h`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    MapCreate = 0,
    MapUpdate = 2,
    ProgramLoad = 5,
    Info = 15,
    MapFreeze = 22,
    LinkCreate = 28,
    LinkDetach = 34,
}

/// Calls the kernel; what it returned.
///
/// # Safety
/// `attr` is what `command` takes of `union bpf_attr`, from its begin; the kernel takes what is missing at the end for zero. What it
/// points to is as long as it says, lives through the call, and is writable where the kernel writes.
pub(crate) unsafe fn call<T>(command: Command, attr: &T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads as many bytes of `attr` as it is told it has; the rest is the caller's.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            std::ptr::from_ref(attr),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// The same, for commands that return a descriptor.
///
/// # Safety
/// As [`call`]; and `command` returns a descriptor.
pub(crate) unsafe fn descriptor<T>(command: Command, attr: &T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's.
    let fd = unsafe { call(command, attr) }?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
