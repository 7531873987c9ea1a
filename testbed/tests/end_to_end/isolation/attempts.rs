//! What a thief tries. Every attempt that succeeds is a line of the answer; there must be none.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use portolan_abi::control::{Request, Response};
use portolan_abi::memory::{EngineHalf, Mapping, reopen_read_only};
use portolan_abi::token::{ReceiveToken, SendToken};
use rustix::fs::{Mode, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::{ARENA, geometry};
use crate::harness::STEP;
use crate::hostile::control::Control;
use crate::hostile::raw_port::RawPort;

/// The user that engines run as in a laboratory.
pub const NOBODY: u32 = 65_534;
/// Descriptors of another process that are tried.
const DESCRIPTORS: i32 = 64;

/// The inodes of a port's two memfds.
pub fn inodes(port: &RawPort) -> Vec<u64> {
    [&port.client_fd, &port.engine_fd]
        .map(|fd| rustix::fs::fstat(fd).unwrap().st_ino)
        .to_vec()
}

/// Collects what succeeded.
#[derive(Default)]
struct Got(Vec<String>);

impl Got {
    fn refused<T>(&mut self, what: impl FnOnce() -> String, result: io::Result<T>) {
        if result.is_ok() {
            self.0.push(what());
        }
    }

    fn must(&mut self, what: impl FnOnce() -> String, holds: bool) {
        if !holds {
            self.0.push(what());
        }
    }
}

fn read_a_byte(path: &str) -> io::Result<()> {
    let file = File::open(path)?;
    file.read_at(&mut [0], 0).map(drop)
}

fn trace(pid: i32) -> io::Result<()> {
    // SAFETY: no memory of ours is involved. A process that was seized is let go when we end.
    let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    if result == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

fn read_memory_of(pid: i32) -> io::Result<()> {
    let mut byte = 0u8;
    let local = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // Where programs that are not position-independent begin; whether it is mapped is asked after whether we may.
    let remote = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(0x40_0000),
        iov_len: 1,
    };
    // SAFETY: one byte of ours is written, which `local` names.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    let error = io::Error::last_os_error();
    if read < 0 && error.raw_os_error() != Some(libc::EFAULT) {
        return Err(error);
    }
    Ok(())
}

/// Everything the kernel offers to look into another process.
pub fn on_processes(processes: &[(i32, String)]) -> Vec<String> {
    let mut got = Got::default();
    for (pid, name) in processes {
        for what in ["fd", "map_files"] {
            let path = format!("/proc/{pid}/{what}");
            got.refused(|| format!("{what} of {name}"), fs::read_dir(&path));
        }
        for what in ["mem", "maps", "pagemap", "environ", "auxv"] {
            let path = format!("/proc/{pid}/{what}");
            got.refused(|| format!("{what} of {name}"), read_a_byte(&path));
        }
        for number in 0..DESCRIPTORS {
            let path = format!("/proc/{pid}/fd/{number}");
            got.refused(
                || format!("descriptor {number} of {name}"),
                File::open(&path),
            );
        }
        got.refused(|| format!("tracing {name}"), trace(*pid));
        got.refused(|| format!("memory of {name}"), read_memory_of(*pid));
        let Ok(handle) = pidfd_open(Pid::from_raw(*pid).unwrap(), PidfdFlags::empty()) else {
            continue;
        };
        for number in 0..DESCRIPTORS {
            let copied = pidfd_getfd(&handle, number, PidfdGetfdFlags::empty());
            got.refused(
                || format!("a copy of descriptor {number} of {name}"),
                copied.map_err(io::Error::from),
            );
        }
    }
    got.0
}

fn reopened(fd: BorrowedFd<'_>, options: &OpenOptions) -> io::Result<File> {
    options.open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// What the descriptors are good for that came with a port.
pub fn on_own_descriptors(port: &RawPort, others: &[u64]) -> Vec<String> {
    let mut got = Got::default();
    let engine_half = port.engine_fd.as_fd();
    let mut write = OpenOptions::new();
    write.write(true);
    let mut read_write = OpenOptions::new();
    read_write.read(true).write(true);

    // The engine's half: for reading.
    let says = "the engine half can be";
    for options in [&write, &read_write] {
        let opened = reopened(engine_half, options);
        got.refused(|| format!("{says} opened for writing"), opened);
    }
    // Not even for reading: it is root's, mode 0600.
    got.refused(
        || format!("{says} opened again"),
        reopen_read_only(engine_half),
    );
    let mapped = EngineHalf::map(engine_half, geometry(), true);
    got.refused(|| format!("{says} mapped for writing"), mapped);
    let copy = File::from(port.engine_fd.try_clone().unwrap());
    got.refused(|| format!("{says} written"), copy.write_at(b"x", 0));
    let protected = upgrade_mapping(&copy);
    drop(copy);
    got.refused(
        || format!("{says} mapped for reading and then made writable"),
        protected,
    );
    got.refused(
        || format!("{says} opened to everybody"),
        rustix::fs::fchmod(engine_half, Mode::from_raw_mode(0o666)).map_err(io::Error::from),
    );

    // Both halves: of their size, for ever.
    for (name, fd, bytes) in [
        ("client", &port.client_fd, geometry().client_half_bytes()),
        ("engine", &port.engine_fd, geometry().engine_half_bytes()),
    ] {
        let file = File::from(fd.try_clone().unwrap());
        for size in [0, bytes as u64 + 4096] {
            let result = file.set_len(size);
            got.refused(|| format!("the {name} half can have {size} bytes"), result);
        }
        let beyond = file.read_at(&mut [0; 64], bytes as u64);
        got.must(
            || format!("there is something beyond the {name} half"),
            matches!(beyond, Ok(0)),
        );
        let written = file.write_at(&[0; 64], bytes as u64);
        got.refused(|| format!("beyond the {name} half can be written"), written);
        got.refused(
            || format!("more than the {name} half can be mapped"),
            Mapping::new(fd.as_fd(), bytes + 4096, false),
        );
        got.must(
            || format!("a mapping reaches beyond the {name} half"),
            !reaches_beyond(fd, bytes),
        );
        let sealed = rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE);
        got.refused(
            || format!("the {name} half can be sealed by its user"),
            sealed.map_err(io::Error::from),
        );
    }
    received_nothing_else(&mut got, port, others);
    got.0
}

/// A shared mapping for reading, made writable afterwards.
fn upgrade_mapping(file: &File) -> io::Result<()> {
    // SAFETY: a fresh mapping at an address of the kernel's choice; nothing is read or written through it.
    unsafe {
        let null = std::ptr::null_mut();
        let at = rustix::mm::mmap(null, 4096, ProtFlags::READ, MapFlags::SHARED, file, 0)?;
        let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        let changed = rustix::mm::mprotect(at, 4096, flags);
        rustix::mm::munmap(at, 4096)?;
        Ok(changed?)
    }
}

/// Maps a page more than there is and has the kernel read the last one: what would be a bus error for us is an error of its.
fn reaches_beyond(fd: &OwnedFd, bytes: usize) -> bool {
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    // SAFETY: a fresh mapping; its last page is touched by the kernel only, which checks.
    unsafe {
        let null = std::ptr::null_mut();
        let size = bytes + 4096;
        let Ok(at) = rustix::mm::mmap(null, size, ProtFlags::READ, MapFlags::SHARED, fd, 0) else {
            return false;
        };
        let written = libc::write(writer.as_raw_fd(), at.byte_add(bytes), 64);
        rustix::mm::munmap(at, size).unwrap();
        written > 0
    }
}

/// All descriptors of this process that can lead to memory are those of its port.
fn received_nothing_else(got: &mut Got, port: &RawPort, others: &[u64]) {
    let own = inodes(port);
    got.must(
        || "the port's memory is the victim's".to_owned(),
        own.iter().all(|inode| !others.contains(inode)),
    );
    let mut memory = 0;
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let target = target.display().to_string();
        if target.starts_with("/memfd:") || target.contains("portolan-") {
            memory += 1;
            let inode = fs::metadata(entry.path()).unwrap().ino();
            got.must(|| format!("a descriptor of {target}"), own.contains(&inode));
        }
        let strange = ["bpf", "xsk", "AF_XDP", "/dev/mem", "pidfd"];
        got.must(
            || format!("a descriptor of {target}"),
            !strange.iter().any(|name| target.contains(name)),
        );
    }
    got.must(|| format!("{memory} descriptors of memory"), memory == 2);
}

/// What can be asked of the daemon about others' ports.
pub fn on_the_daemon(socket: &Path, victims: u16) -> Vec<String> {
    let mut got = Got::default();
    let control = Control::connect(socket).unwrap();
    let requests = [
        Request::ClosePort { port: victims },
        Request::OpenPort {
            abi: portolan_abi::PORT_ABI_VERSION,
            port: Some(victims),
            geometry: geometry(),
        },
        Request::OpenPort {
            abi: portolan_abi::PORT_ABI_VERSION,
            port: Some(0),
            geometry: geometry(),
        },
        Request::Fault {
            engine: 0,
            kind: "kill".to_owned(),
        },
        Request::Upgrade { binary: None },
    ];
    for request in requests {
        let (response, descriptors) = control.ask(&request).unwrap();
        let refused = matches!(response, Response::Error { .. }) && descriptors.is_empty();
        got.must(|| format!("{request:?} is granted: {response:?}"), refused);
    }
    for report in [Request::Status {}, Request::Ports {}, Request::Counters {}] {
        let (_, descriptors) = control.ask(&report).unwrap();
        got.must(
            || format!("{report:?} comes with descriptors"),
            descriptors.is_empty(),
        );
    }
    got.0
}

/// Tokens that name memory which is not the port's, a port for each. What arrives anywhere is looked at.
pub fn with_tokens(socket: &Path, secret: &[u8]) -> Vec<String> {
    let mut got = Got::default();
    let inside = |port: &RawPort| {
        let mut bytes = vec![0; ARENA as usize];
        port.client.read_arena(0, &mut bytes).unwrap();
        bytes.windows(secret.len()).any(|at| at == secret)
    };
    let offsets = [
        (ARENA, 64),
        (ARENA - 8, 64),
        (ARENA * 2, 4096),
        (0, ARENA as u32 + 1),
        (u64::MAX - 63, 64),
        (u64::MAX, 1),
        ((geometry().client_half_bytes() as u64).wrapping_neg(), 4096),
        (4096u64.wrapping_neg(), 4096),
    ];
    for (offset, len) in offsets {
        let mut port = RawPort::open(socket, None, geometry()).unwrap();
        let own = (port.node, port.number);
        // To itself: whatever leaves arrives here.
        port.provide(0, 0, 8192);
        let reference = port.send_reference(1);
        let token = SendToken {
            ..RawPort::token(reference, own, offset, len)
        };
        port.push_send(reference, &token, &[]);
        let outcome = port.wait_sent(reference, STEP);
        let delivered = outcome
            .is_some_and(|outcome| outcome.certainty == portolan_abi::event::Certainty::Delivered);
        got.must(
            || format!("{len} bytes from {offset:#x} of the arena are delivered"),
            !delivered && (outcome.is_some() || port.closed().is_some()),
        );
        got.must(
            || format!("the secret, by sending from {offset:#x}"),
            !inside(&port),
        );

        // A buffer there: nothing may be written to it.
        let mut port = RawPort::open(socket, None, geometry()).unwrap();
        let reference = port.receive_reference(0);
        let token = ReceiveToken {
            generation: reference.generation,
            priority: 0,
            arena_offset: offset,
            len,
        };
        port.push_receive(reference, &token);
        port.ring_engine_anyway();
        got.must(
            || format!("a buffer of {len} bytes at {offset:#x} is taken"),
            port.wait_closed(STEP).is_some(),
        );
    }
    got.0
}
