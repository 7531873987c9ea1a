//! An XDP link as a file descriptor.
//!
//! `aya::programs::Xdp::attach` falls back to netlink when the kernel says EINVAL, and would then
//! replace somebody else's program; and its links do not give out their descriptor, which has to
//! outlive this process in systemd's store. So `BPF_LINK_CREATE` is called here.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::syscall::{self, Command};

/// Constants of `linux/bpf.h` and `linux/if_link.h`.
pub(crate) const BPF_XDP: u32 = 37;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// Where the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachMode {
    /// In the driver, before the kernel allocates anything for the frame.
    Native,
    /// In the network stack: works with every driver, and slower, unless the driver has made an skb anyway (veth).
    Generic,
}

impl AttachMode {
    /// For people and scripts; as in the daemon's `[network] xdp`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

/// The part of `union bpf_attr` that `BPF_LINK_CREATE` reads.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// The part of `union bpf_attr` that `BPF_OBJ_GET_INFO_BY_FD` reads.
#[repr(C)]
struct InfoByFd {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// The beginning of `struct bpf_link_info`, as it is for XDP.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    pad: u32,
    ifindex: u32,
    pad_end: u32,
}

/// The interface a link is attached to; 0 when it is not any more: the interface is gone, or somebody detached it.
pub(crate) fn attached_to(link: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = LinkInfo::default();
    let attr = InfoByFd {
        fd: link.as_raw_fd().cast_unsigned(),
        info_len: size_of::<LinkInfo>() as u32,
        info: (&raw mut info).expose_provenance() as u64,
    };
    // SAFETY: `InfoByFd` is the command's prefix of `union bpf_attr`; the kernel writes at most `info_len` bytes to `info`, which lives
    // through the call and for which every bit pattern is valid.
    unsafe { syscall::call(Command::Info, &attr) }?;
    Ok(info.ifindex)
}

/// Attaches `program` to interface `index` of the calling thread's network namespace. The program
/// stays attached until the last copy of the returned descriptor is closed.
pub(crate) fn create(program: BorrowedFd<'_>, index: u32, mode: AttachMode) -> io::Result<OwnedFd> {
    let attr = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        target_ifindex: index,
        attach_type: BPF_XDP,
        flags: match mode {
            AttachMode::Native => XDP_FLAGS_DRV_MODE,
            AttachMode::Generic => XDP_FLAGS_SKB_MODE,
        },
    };
    // SAFETY: `LinkCreate` is the command's prefix of `union bpf_attr`, without a pointer; it returns a descriptor.
    unsafe { syscall::descriptor(Command::LinkCreate, &attr) }
}

/// Takes the program of a link off its interface, whoever keeps copies of the link. A link that is on no interface any more is left
/// as it is.
///
/// # Errors
/// The system's: a descriptor of something else, no privilege.
pub fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // `struct { link_fd }` of `union bpf_attr`.
    let attr = link.as_raw_fd().cast_unsigned();
    // SAFETY: that is the command's prefix of `union bpf_attr`, without a pointer.
    unsafe { syscall::call(Command::LinkDetach, &attr) }?;
    Ok(())
}

/// The index of the named interface in the calling thread's network namespace.
pub(crate) fn interface_index(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: `name` is a string that ends in a null byte and lives through the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}
