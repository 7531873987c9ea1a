//! The memory kinds keep their promises against an application that does not.
#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd, AsRawFd};

use portolan_abi::ledger::{LedgerGeometry, decode_stream_key, stream_key};
use portolan_abi::memory::{
    ClientHalf, EngineHalf, LedgerMapping, create_sealed, reopen_read_only, verify_sealed,
};
use portolan_abi::port::PortGeometry;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

fn geometry() -> PortGeometry {
    PortGeometry::new(16, 32, 1 << 16).unwrap()
}

// An application has the engine half's descriptor. Expect: it can be neither written, nor mapped writable, nor made writable.
#[test]
fn engine_half_is_read_only_to_the_application() {
    let memfd = create_sealed("half", geometry().engine_half_bytes()).unwrap();
    let given = reopen_read_only(memfd.as_fd()).unwrap();
    assert_eq!(rustix::io::write(&given, b"x"), Err(Errno::BADF));
    // SAFETY: a mapping that must fail, of a descriptor we own.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &given,
            0,
        )
    };
    assert_eq!(mapped, Err(Errno::ACCESS));
    let half = EngineHalf::map(given.as_fd(), geometry(), false).unwrap();
    let page = half.header() as *const _ as *mut std::ffi::c_void;
    // SAFETY: changes the protection of our own mapping; it must fail.
    let protected = unsafe {
        rustix::mm::mprotect(
            page,
            4096,
            rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
        )
    };
    assert_eq!(protected, Err(Errno::ACCESS));
}

// The application, under its own uid, reopens the descriptor for writing through /proc. Expect: EACCES, because the memfd is 0600 and
// the supervisor's. With an ordinary memfd (mode 0777) the same works, which shows that the test can fail.
#[test]
fn engine_half_cannot_be_reopened_for_writing() {
    let reopen_as_nobody = |fd: &std::os::fd::OwnedFd| {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        // The thread alone changes its uid (the raw call, not the process-wide one) and ends with it.
        std::thread::spawn(move || {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            rustix::fs::open(path, OFlags::RDWR, Mode::empty()).map(drop)
        })
        .join()
        .unwrap()
    };
    assert!(
        rustix::process::geteuid().is_root(),
        "run as root: the test changes to another uid"
    );
    let sealed = create_sealed("half", 4096).unwrap();
    let given = reopen_read_only(sealed.as_fd()).unwrap();
    assert_eq!(reopen_as_nobody(&given), Err(Errno::ACCESS));
    let ordinary = rustix::fs::memfd_create("ordinary", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&ordinary, 4096).unwrap();
    assert_eq!(reopen_as_nobody(&ordinary), Ok(()));
}

// An application tries to resize its half under the engine, or to take off the seals. Expect: EPERM.
#[test]
fn sealed_memory_keeps_its_size() {
    let memfd = create_sealed("half", 8192).unwrap();
    assert_eq!(rustix::fs::ftruncate(&memfd, 4096), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&memfd, 16384), Err(Errno::PERM));
    assert_eq!(
        rustix::fs::fcntl_add_seals(&memfd, rustix::fs::SealFlags::WRITE),
        Err(Errno::PERM)
    );
    assert!(verify_sealed(memfd.as_fd(), 8192).is_ok());
    assert!(verify_sealed(memfd.as_fd(), 4096).is_err());
}

// Memory that is not sealed, or of the wrong size, is offered for mapping. Expect: refused with the reason, before it is touched.
#[test]
fn unsealed_or_missized_memory_is_refused() {
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, geometry().client_half_bytes() as u64).unwrap();
    let error = ClientHalf::map(unsealed.as_fd(), geometry()).err().unwrap();
    assert!(error.to_string().contains("not sealed"), "{error}");
    let short = create_sealed("short", 4096).unwrap();
    let error = ClientHalf::map(short.as_fd(), geometry()).err().unwrap();
    assert!(error.to_string().contains("4096 bytes"), "{error}");
}

// A hole is punched into the client half while it is mapped. Expect: zeros, no fault.
#[test]
fn a_punched_hole_reads_as_zeros() {
    let memfd = create_sealed("half", geometry().client_half_bytes()).unwrap();
    let half = ClientHalf::map(memfd.as_fd(), geometry()).unwrap();
    half.write_arena(100, &[7; 50]).unwrap();
    let whole = geometry().client_half_bytes() as u64;
    rustix::fs::fallocate(
        &memfd,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        0,
        whole,
    )
    .unwrap();
    let mut bytes = [1; 50];
    half.read_arena(100, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 50]);
    half.write_arena(100, &[9; 50]).unwrap();
}

#[test]
fn arena_and_inline_ranges_are_checked() {
    let memfd = create_sealed("half", geometry().client_half_bytes()).unwrap();
    let half = ClientHalf::map(memfd.as_fd(), geometry()).unwrap();
    assert!(half.write_arena((1 << 16) - 1, &[0; 1]).is_some());
    assert!(half.write_arena(1 << 16, &[0; 1]).is_none());
    assert!(half.read_arena(u64::MAX, &mut [0; 1]).is_none());
    assert!(half.read_inline(0, 79, &mut [0; 1]).is_some());
    assert!(half.read_inline(0, 80, &mut [0; 1]).is_none());
    assert!(half.read_inline(0, u32::MAX, &mut [0; 1]).is_none());
    assert!(half.read_inline(16, 0, &mut [0; 1]).is_none());
}

#[test]
fn a_ledger_knows_itself() {
    let geometry = LedgerGeometry {
        peers: 8,
        send_streams: 16,
        receive_streams: 16,
        frames: 64,
    };
    let fd = LedgerMapping::create(geometry).unwrap();
    let mapping = LedgerMapping::map(&fd, geometry).unwrap();
    assert!(!mapping.ledger().is_valid(), "no magic yet");
    mapping.ledger().initialise(7);
    assert!(mapping.ledger().is_valid());
    // Mapped a second time, by another process as it were. Expect: the same facts.
    assert!(
        LedgerMapping::map(&fd, geometry)
            .unwrap()
            .ledger()
            .is_valid()
    );
    assert!(
        LedgerMapping::map(
            &fd,
            LedgerGeometry {
                frames: 1 << 20,
                ..geometry
            }
        )
        .is_err()
    );
    assert_eq!(
        decode_stream_key(stream_key(3, 65534, 255, 1)),
        Some((3, 65534, 255, 1))
    );
    assert_eq!(decode_stream_key(0), None);
}
