//! The UMEM: frames in a sealed memfd, so that it outlives any engine.
//!
//! The supervisor creates the memfd and registers it; the pages stay pinned by
//! the socket, and the supervisor unmaps. Each engine maps the memfd it was
//! handed. Sealed, because an unsealed one could be truncated under a live UMEM.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::error::{Operation, XskError};
use super::layout::UmemLayout;

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Bytes, 64 pages.
const POPULATED_AT_ONCE: usize = 256 << 10;

/// A file mapped shared, read-write; unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; Mapping itself
// hands out nothing but its address.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`, with the pages present if `populate`.
    pub(super) fn new(
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        populate: bool,
    ) -> Result<Self, Errno> {
        let flags = MapFlags::SHARED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, flags, fd, offset) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        let mapping = Mapping { start, len };
        if populate {
            mapping.populate()?;
        }
        Ok(mapping)
    }

    /// Has every page present. Piece by piece: a kernel that does not preempt keeps its core for the length of a call, and 32 MiB are most of
    /// a millisecond.
    fn populate(&self) -> Result<(), Errno> {
        for from in (0..self.len).step_by(POPULATED_AT_ONCE) {
            let len = POPULATED_AT_ONCE.min(self.len - from);
            // SAFETY: inside the mapping; the advice changes no byte of it.
            let populated = unsafe {
                let start = self.start.as_ptr().add(from).cast();
                rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxPopulateWrite)
            };
            match populated {
                // Kernels before 5.14 do not know the advice: pages come when they are touched.
                Err(Errno::INVAL) => return Ok(()),
                other => other?,
            }
        }
        Ok(())
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length; users of the address are
        // dropped with or before their Mapping.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// The UMEM's memory, not mapped.
#[derive(Debug)]
pub struct UmemMemfd {
    fd: OwnedFd,
    layout: UmemLayout,
}

impl UmemMemfd {
    /// Creates memory for `layout`: mode 0600, sealed against any change of size.
    ///
    /// # Errors
    /// [`XskError::System`] with the operation and the errno.
    pub fn create(layout: &UmemLayout) -> Result<Self, XskError> {
        let failed = |errno| XskError::System {
            operation: Operation::CreateUmem,
            errno,
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("portolan-umem", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|errno| match errno {
                // Kernels before 6.3 do not know the flag.
                Errno::INVAL => rustix::fs::memfd_create("portolan-umem", flags),
                other => Err(other),
            })
            .map_err(failed)?;
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        rustix::fs::ftruncate(&fd, layout.bytes() as u64).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(failed)?;
        Ok(UmemMemfd {
            fd,
            layout: *layout,
        })
    }

    /// The UMEM another process created, checked to have the size and the seals.
    ///
    /// # Errors
    /// [`XskError::Misuse`] if it has not.
    pub fn from_fd(fd: OwnedFd, layout: &UmemLayout) -> Result<Self, XskError> {
        check_memfd(fd.as_fd(), layout)?;
        Ok(UmemMemfd {
            fd,
            layout: *layout,
        })
    }

    /// The memfd, to hand to an engine or a store.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Its division.
    pub fn layout(&self) -> &UmemLayout {
        &self.layout
    }
}

fn check_memfd(fd: BorrowedFd<'_>, layout: &UmemLayout) -> Result<(), XskError> {
    let failed = |errno| XskError::System {
        operation: Operation::MapUmem,
        errno,
    };
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(failed)?;
    if !seals.contains(SEALS) {
        return Err(XskError::Misuse("the UMEM's memfd is not sealed"));
    }
    let size = rustix::fs::fstat(fd).map_err(failed)?.st_size;
    if u64::try_from(size) != Ok(layout.bytes() as u64) {
        return Err(XskError::Misuse(
            "the UMEM's memfd is not of the configured size",
        ));
    }
    Ok(())
}

/// The UMEM mapped into the engine.
///
/// Who may touch which chunk is decided by the ownership table: the kernel
/// writes receive chunks between fill and receive ring, and only reads transmit
/// chunks between transmit and completion ring.
#[derive(Debug)]
pub(super) struct UmemMap {
    mapping: Mapping,
}

/// Outer headers, the transport's, an ACK, an EAGER and 64 bytes of it are 230.
#[cfg(target_arch = "x86_64")]
const PREFETCHED_LINES: usize = 4;

impl UmemMap {
    /// Maps the UMEM with its pages present.
    pub(super) fn new(fd: BorrowedFd<'_>, layout: &UmemLayout) -> Result<Self, XskError> {
        check_memfd(fd, layout)?;
        let mapping =
            Mapping::new(fd, layout.bytes(), 0, true).map_err(|errno| XskError::System {
                operation: Operation::MapUmem,
                errno,
            })?;
        Ok(UmemMap { mapping })
    }

    /// Where it is mapped.
    pub(super) fn address(&self) -> usize {
        self.mapping.start().as_ptr().addr()
    }

    fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.mapping.len()
    }

    /// Bytes of chunks we own; empty if out of range.
    ///
    /// # Safety
    /// While the result lives, nobody writes these bytes: their chunks are
    /// recorded OWNED and no mutable slice of them exists.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        if !self.contains(&range) {
            return &[];
        }
        // SAFETY: inside the mapping, which lives as long as self; the memfd is
        // sealed, so it is not truncated; unshared by the caller's promise.
        unsafe {
            let start = self.mapping.start().as_ptr().add(range.start);
            std::slice::from_raw_parts(start, range.len())
        }
    }

    /// Asks for the first lines of a frame, its headers and a short message, if there is an instruction for that. Nothing is read: it may be
    /// any place, also one that is not ours.
    #[inline]
    pub(super) fn prefetch(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in 0..PREFETCHED_LINES {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let line = self
                .mapping
                .start()
                .as_ptr()
                .wrapping_add(at)
                .wrapping_add(line * 64);
            // SAFETY: a hint, which no address makes fault.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Bytes of chunks we own, to be written; empty if out of range.
    ///
    /// # Safety
    /// While the result lives, nobody else reads or writes these bytes: their
    /// chunks are recorded OWNED.
    pub(super) unsafe fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        if !self.contains(&range) {
            return &mut [];
        }
        // SAFETY: as in `bytes`, and exclusive through &mut self.
        unsafe {
            let start = self.mapping.start().as_ptr().add(range.start);
            std::slice::from_raw_parts_mut(start, range.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memfd_is_private_sealed_and_of_its_size() {
        let layout = UmemLayout::new(4, 2, 1514).unwrap();
        let umem = UmemMemfd::create(&layout).unwrap();
        let stat = rustix::fs::fstat(umem.fd()).unwrap();
        assert_eq!(stat.st_mode & 0o777, 0o600);
        assert_eq!(stat.st_size, 6 * 4096);
        // Neither smaller nor larger, and no way to take the seals away.
        assert!(rustix::fs::ftruncate(umem.fd(), 4096).is_err());
        assert!(rustix::fs::ftruncate(umem.fd(), 1 << 20).is_err());
        assert!(rustix::fs::fcntl_add_seals(umem.fd(), SealFlags::WRITE).is_err());
    }

    #[test]
    fn an_unsealed_or_wrongly_sized_umem_is_refused() {
        let layout = UmemLayout::new(4, 2, 1514).unwrap();
        let unsealed = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, layout.bytes() as u64).unwrap();
        assert!(matches!(
            UmemMap::new(unsealed.as_fd(), &layout),
            Err(XskError::Misuse(_))
        ));

        let umem = UmemMemfd::create(&layout).unwrap();
        let larger = UmemLayout::new(5, 2, 1514).unwrap();
        assert!(matches!(
            UmemMap::new(umem.fd(), &larger),
            Err(XskError::Misuse(_))
        ));
        assert!(UmemMap::new(umem.fd(), &layout).is_ok());
    }

    // Places inside, at the end, far beyond, and as a damaged ring may name them. Expect: nothing happens.
    #[test]
    fn any_place_may_be_asked_for() {
        let layout = UmemLayout::new(4, 2, 1514).unwrap();
        let umem = UmemMemfd::create(&layout).unwrap();
        let map = UmemMap::new(umem.fd(), &layout).unwrap();
        for at in [0, layout.bytes() - 1, 1 << 40, usize::MAX] {
            map.prefetch(at);
        }
    }
}
