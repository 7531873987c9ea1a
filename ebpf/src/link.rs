//! The one system call aya does not offer as we need it: an XDP link as a file descriptor.
//!
//! `aya::programs::Xdp::attach` falls back to netlink when the kernel says EINVAL, and would then
//! replace somebody else's program; and its links do not give out their descriptor, which has to
//! outlive this process in systemd's store. So `BPF_LINK_CREATE` is called here. This is the
//! crate's only unsafe code.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Commands and constants of `linux/bpf.h` and `linux/if_link.h`.
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_DETACH: libc::c_long = 34;
const BPF_XDP: u32 = 37;
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

/// The part of `union bpf_attr` that `BPF_LINK_CREATE` reads; the kernel takes what is missing at
/// the end for zero.
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
    // SAFETY: `attr` is a valid prefix of `union bpf_attr` of the size given; the kernel writes at most `info_len` bytes to `info`,
    // which lives through the call and for which every bit pattern is valid.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_OBJ_GET_INFO_BY_FD,
            &raw const attr,
            size_of_val(&attr),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
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
    // SAFETY: `attr` is a valid prefix of `union bpf_attr` of the size given, it holds no pointer,
    // and the kernel only reads it.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_LINK_CREATE,
            &raw const attr,
            size_of_val(&attr),
        )
    };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor (close-on-exec) and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes the program of a link off its interface, whoever keeps copies of the link. A link that is on no interface any more is left
/// as it is.
///
/// # Errors
/// The system's: a descriptor of something else, no privilege.
pub fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // `struct { link_fd }` of `union bpf_attr`.
    let attr = link.as_raw_fd().cast_unsigned();
    // SAFETY: `attr` is a valid prefix of `union bpf_attr` of the size given, it holds no pointer, and the kernel only reads it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_LINK_DETACH,
            &raw const attr,
            size_of_val(&attr),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The index of the named interface in the calling thread's network namespace.
pub(crate) fn interface_index(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: `name` is a string that ends in a null byte and lives through the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}
