//! Sealed memfds, their mappings, and views of ports and ledgers over them: the crate's `unsafe` island.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::event::EVENT_WORDS;
use crate::ledger::{Ledger, LedgerGeometry};
use crate::port::{ClientHeader, EngineHeader, PORT_MAGIC, PortGeometry};
use crate::ring::SharedRing;
use crate::token::{RECEIVE_SLOT_WORDS, SEND_SLOT_WORDS};

/// Makes a memfd of exactly `bytes` zero bytes, mode 0600, sealed against shrinking, growing and further seals.
pub fn create_sealed(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Opens the same memory read-only. Mode 0600 keeps an application with another uid from reopening it for writing through /proc.
pub fn reopen_read_only(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Checks that a received descriptor is a sealed memfd of exactly `bytes` bytes.
pub fn verify_sealed(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let wanted = SealFlags::SHRINK | SealFlags::GROW;
    let seals = rustix::fs::fcntl_get_seals(fd)?;
    if !seals.contains(wanted) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the memory is not sealed against resizing",
        ));
    }
    let size = rustix::fs::fstat(fd)?.st_size;
    if u64::try_from(size).ok() != Some(bytes as u64) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the memory has {size} bytes where {bytes} were expected"),
        ));
    }
    Ok(())
}

/// A shared mapping of a sealed memfd, unmapped when dropped.
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory; all access through it is atomic or by raw copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of a sealed memfd, checking seals and size first.
    pub fn new(fd: BorrowedFd<'_>, bytes: usize, writable: bool) -> io::Result<Self> {
        verify_sealed(fd, bytes)?;
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; nothing else can refer to it.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, fd, 0)?
        };
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Self { base, bytes })
    }

    /// First byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `len` words at byte `offset`, for memory whose layout the caller knows. The range must lie inside.
    pub fn words(&self, offset: usize, len: usize) -> &[AtomicU64] {
        self.at(offset, len)
    }

    /// The 32-bit word at byte `offset`, likewise.
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        &self.at(offset, 1)[0]
    }

    fn at<T>(&self, offset: usize, len: usize) -> &[T] {
        assert!(
            offset.is_multiple_of(align_of::<T>()) && offset + len * size_of::<T>() <= self.bytes
        );
        // SAFETY: inside the mapping and aligned (asserted); T is made of atomics and padding (private callers below), for which
        // every bit pattern is valid and which other processes may change at any time.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast::<T>(), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: we own the mapping, and every borrow of it has ended. An munmap of a valid range cannot fail.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The client half of a port, mapped.
pub struct ClientHalf {
    mapping: Mapping,
    geometry: PortGeometry,
}

/// The engine half of a port, mapped: writable for the engine and the supervisor, read-only for the application.
pub struct EngineHalf {
    mapping: Mapping,
    geometry: PortGeometry,
}

impl ClientHalf {
    /// Maps it.
    pub fn map(fd: BorrowedFd<'_>, geometry: PortGeometry) -> io::Result<Self> {
        if !geometry.is_valid() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "port geometry out of limits",
            ));
        }
        Ok(Self {
            mapping: Mapping::new(fd, geometry.client_half_bytes(), true)?,
            geometry,
        })
    }

    /// Geometry it was mapped with.
    pub fn geometry(&self) -> PortGeometry {
        self.geometry
    }

    /// The header.
    pub fn header(&self) -> &ClientHeader {
        &self.mapping.at::<ClientHeader>(0, 1)[0]
    }

    /// Send slots.
    pub fn send_slots(&self) -> &[[AtomicU64; SEND_SLOT_WORDS]] {
        self.mapping.at(
            self.geometry.send_slots(),
            self.geometry.send_tokens as usize,
        )
    }

    /// Receive slots.
    pub fn receive_slots(&self) -> &[[AtomicU64; RECEIVE_SLOT_WORDS]] {
        self.mapping.at(
            self.geometry.receive_slots(),
            self.geometry.receive_tokens as usize,
        )
    }

    /// The ring of send tokens (application → engine).
    pub fn send_ring<'m>(&'m self, engine: &'m EngineHalf) -> SharedRing<'m, 1> {
        SharedRing::new(
            &self.header().send_producer,
            &engine.header().send_consumer,
            self.mapping.at(
                self.geometry.send_ring(),
                self.geometry.send_tokens as usize,
            ),
        )
    }

    /// The ring of receive tokens (application → engine).
    pub fn provide_ring<'m>(&'m self, engine: &'m EngineHalf) -> SharedRing<'m, 1> {
        SharedRing::new(
            &self.header().provide_producer,
            &engine.header().provide_consumer,
            self.mapping.at(
                self.geometry.provide_ring(),
                self.geometry.receive_tokens as usize,
            ),
        )
    }

    /// First byte of the arena. Other processes may change it at any time: copy with [`Self::read_arena`], [`Self::write_arena`], or
    /// by raw pointer where the application owns the bytes.
    pub fn arena(&self) -> NonNull<u8> {
        // SAFETY: the arena lies inside the mapping by geometry.
        unsafe { self.mapping.base.add(self.geometry.arena()) }
    }

    /// Copies out of the arena. `None` if the range is not inside.
    pub fn read_arena(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        let len = u32::try_from(to.len()).ok()?;
        if !self.geometry.arena_holds(offset, len) {
            return None;
        }
        // SAFETY: source inside the mapping (checked), destination a private slice. The other process may write meanwhile; the bytes
        // copied are then unspecified, which every caller treats as the writer's own fault.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.arena().as_ptr().add(offset as usize),
                to.as_mut_ptr(),
                to.len(),
            )
        };
        Some(())
    }

    /// Copies into the arena. `None` if the range is not inside.
    pub fn write_arena(&self, offset: u64, from: &[u8]) -> Option<()> {
        let len = u32::try_from(from.len()).ok()?;
        if !self.geometry.arena_holds(offset, len) {
            return None;
        }
        // SAFETY: destination inside the mapping (checked), source a private slice; races as above.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.as_ptr(),
                self.arena().as_ptr().add(offset as usize),
                from.len(),
            )
        };
        Some(())
    }

    /// Copies inline payload out of a send slot. `None` if the range is not inside.
    pub fn read_inline(&self, slot: u32, offset: u32, to: &mut [u8]) -> Option<()> {
        let words = &self.send_slots().get(slot as usize)?[6..];
        let mut bytes = [0; crate::token::INLINE_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        to.copy_from_slice(bytes.get(offset as usize..)?.get(..to.len())?);
        Some(())
    }

    /// Fills in a fresh, zeroed half's header; magic last. Supervisor.
    pub fn initialise(&self) {
        self.header()
            .version
            .store(crate::PORT_ABI_VERSION, Ordering::Relaxed);
        // SYNC(port-magic)
        self.header().magic.store(PORT_MAGIC, Ordering::Release);
    }
}

impl EngineHalf {
    /// Maps it; `writable` for the engine and the supervisor.
    pub fn map(fd: BorrowedFd<'_>, geometry: PortGeometry, writable: bool) -> io::Result<Self> {
        if !geometry.is_valid() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "port geometry out of limits",
            ));
        }
        Ok(Self {
            mapping: Mapping::new(fd, geometry.engine_half_bytes(), writable)?,
            geometry,
        })
    }

    /// The geometry that an engine half says it has. Believed as far as the memory's size agrees: an engine can write there.
    pub fn geometry_of(fd: BorrowedFd<'_>) -> io::Result<PortGeometry> {
        let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let size = usize::try_from(rustix::fs::fstat(fd)?.st_size)
            .map_err(|_| bad("the memory has no size"))?;
        if size < crate::port::PAGE {
            return Err(bad("the memory is smaller than a header"));
        }
        let mapping = Mapping::new(fd, size, false)?;
        let header = &mapping.at::<EngineHeader>(0, 1)[0];
        let geometry = PortGeometry::new(
            header.send_tokens.load(Ordering::Relaxed),
            header.receive_tokens.load(Ordering::Relaxed),
            header.arena_bytes.load(Ordering::Relaxed),
        );
        geometry
            .filter(|geometry| geometry.engine_half_bytes() == size)
            .ok_or_else(|| bad("the memory is no port's engine half"))
    }

    /// The header. Storing through a read-only mapping faults; the application only loads.
    pub fn header(&self) -> &EngineHeader {
        &self.mapping.at::<EngineHeader>(0, 1)[0]
    }

    /// The ring of events (engine → application).
    pub fn event_ring<'m>(&'m self, client: &'m ClientHalf) -> SharedRing<'m, EVENT_WORDS> {
        SharedRing::new(
            &self.header().event_producer,
            &client.header().event_consumer,
            self.mapping.at(
                self.geometry.event_ring(),
                self.geometry.event_capacity() as usize,
            ),
        )
    }

    /// Fills in a fresh, zeroed half's header; magic last. Supervisor.
    pub fn initialise(&self, node: u16, port: u16) {
        let header = self.header();
        header
            .version
            .store(crate::PORT_ABI_VERSION, Ordering::Relaxed);
        header
            .send_tokens
            .store(self.geometry.send_tokens, Ordering::Relaxed);
        header
            .receive_tokens
            .store(self.geometry.receive_tokens, Ordering::Relaxed);
        header
            .arena_bytes
            .store(self.geometry.arena_bytes, Ordering::Relaxed);
        header.port.store(u32::from(port), Ordering::Relaxed);
        header.node.store(u32::from(node), Ordering::Relaxed);
        header
            .state
            .store(u64::from(crate::port::state::OPENING), Ordering::Relaxed);
        // SYNC(port-magic)
        header.magic.store(PORT_MAGIC, Ordering::Release);
    }

    /// Is this the engine half of a port of this geometry, in a version we speak?
    pub fn is_valid(&self) -> bool {
        let header = self.header();
        // SYNC(port-magic)
        header.magic.load(Ordering::Acquire) == PORT_MAGIC
            && header.version.load(Ordering::Relaxed) == crate::PORT_ABI_VERSION
            && header.send_tokens.load(Ordering::Relaxed) == self.geometry.send_tokens
            && header.receive_tokens.load(Ordering::Relaxed) == self.geometry.receive_tokens
            && header.arena_bytes.load(Ordering::Relaxed) == self.geometry.arena_bytes
    }
}

/// A mapped ledger.
pub struct LedgerMapping {
    mapping: Mapping,
    geometry: LedgerGeometry,
}

impl LedgerMapping {
    /// Makes the memfd of a ledger.
    pub fn create(geometry: LedgerGeometry) -> io::Result<OwnedFd> {
        create_sealed("portolan-ledger", geometry.bytes())
    }

    /// Maps it.
    pub fn map(fd: impl AsFd, geometry: LedgerGeometry) -> io::Result<Self> {
        Ok(Self {
            mapping: Mapping::new(fd.as_fd(), geometry.bytes(), true)?,
            geometry,
        })
    }

    /// The ledger.
    pub fn ledger(&self) -> Ledger<'_> {
        // SAFETY: the mapping has `geometry.bytes()` bytes, is page-aligned, and lives as long as the borrow.
        unsafe { Ledger::from_raw(self.mapping.base, self.geometry) }
    }
}
