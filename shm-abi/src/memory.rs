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
use crate::token::{INLINE_BYTES, RECEIVE_SLOT_WORDS, SEND_HEADER_WORDS, SEND_SLOT_WORDS};

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

    /// Loads a word of every page of the first `bytes`, so that they are mapped; the sum of those words.
    fn touch(&self, bytes: usize) -> u64 {
        let words = self.words(0, bytes.min(self.bytes) / size_of::<u64>());
        let firsts = words.iter().step_by(crate::port::PAGE / size_of::<u64>());
        firsts.fold(0, |sum, word| sum ^ word.load(Ordering::Relaxed))
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

/// A table or header inside a mapping. Its place follows from the geometry and is checked when the half is mapped, since every token
/// asks for some of them.
struct Part<T: ?Sized>(NonNull<T>);

// SAFETY: as for the mapping it lies in.
unsafe impl<T: ?Sized> Send for Part<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized> Sync for Part<T> {}

impl<T: ?Sized> Part<T> {
    fn of(at: &T) -> Self {
        Self(NonNull::from(at))
    }

    /// # Safety
    /// `_owner` is the mapping that `of` was given a part of.
    #[inline]
    unsafe fn inside<'m>(&self, _owner: &'m Mapping) -> &'m T {
        // SAFETY: `of` was given a valid reference into the mapping, which stays where it is as long as it is borrowed.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: we own the mapping, and every borrow of it has ended. An munmap of a valid range cannot fail.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The client half of a port, mapped. The parts lie in the mapping.
pub struct ClientHalf {
    mapping: Mapping,
    geometry: PortGeometry,
    header: Part<ClientHeader>,
    send_ring: Part<[[AtomicU64; 1]]>,
    provide_ring: Part<[[AtomicU64; 1]]>,
    send_slots: Part<[[AtomicU64; SEND_SLOT_WORDS]]>,
    receive_slots: Part<[[AtomicU64; RECEIVE_SLOT_WORDS]]>,
    /// Offset of the arena.
    arena: usize,
}

/// The engine half of a port, mapped: writable for the engine and the supervisor, read-only for the application.
///
/// The parts lie in the mapping.
pub struct EngineHalf {
    mapping: Mapping,
    geometry: PortGeometry,
    header: Part<EngineHeader>,
    event_ring: Part<[[AtomicU64; EVENT_WORDS]]>,
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
        let mapping = Mapping::new(fd, geometry.client_half_bytes(), true)?;
        let (sends, receives) = (
            geometry.send_tokens as usize,
            geometry.receive_tokens as usize,
        );
        Ok(Self {
            header: Part::of(&mapping.at::<ClientHeader>(0, 1)[0]),
            send_ring: Part::of(mapping.at(geometry.send_ring(), sends)),
            provide_ring: Part::of(mapping.at(geometry.provide_ring(), receives)),
            send_slots: Part::of(mapping.at(geometry.send_slots(), sends)),
            receive_slots: Part::of(mapping.at(geometry.receive_slots(), receives)),
            arena: geometry.arena(),
            geometry,
            mapping,
        })
    }

    /// Could it be mapped with this geometry, which is valid?
    ///
    /// # Errors
    /// As [`verify_sealed`].
    pub fn verify(fd: BorrowedFd<'_>, geometry: &PortGeometry) -> io::Result<()> {
        verify_sealed(fd, geometry.client_half_bytes())
    }

    /// Geometry it was mapped with.
    pub fn geometry(&self) -> PortGeometry {
        self.geometry
    }

    /// The header.
    #[inline]
    pub fn header(&self) -> &ClientHeader {
        // SAFETY: made of this mapping, as all parts.
        unsafe { self.header.inside(&self.mapping) }
    }

    /// Send slots.
    #[inline]
    pub fn send_slots(&self) -> &[[AtomicU64; SEND_SLOT_WORDS]] {
        // SAFETY: made of this mapping, as all parts.
        unsafe { self.send_slots.inside(&self.mapping) }
    }

    /// Receive slots.
    #[inline]
    pub fn receive_slots(&self) -> &[[AtomicU64; RECEIVE_SLOT_WORDS]] {
        // SAFETY: made of this mapping, as all parts.
        unsafe { self.receive_slots.inside(&self.mapping) }
    }

    /// The ring of send tokens (application → engine).
    #[inline]
    pub fn send_ring<'m>(&'m self, engine: &'m EngineHalf) -> SharedRing<'m, 1> {
        // SAFETY: made of this mapping, as all parts.
        let entries = unsafe { self.send_ring.inside(&self.mapping) };
        SharedRing::of_geometry(
            &self.header().send_producer,
            &engine.header().send_consumer,
            entries,
        )
    }

    /// The ring of receive tokens (application → engine).
    #[inline]
    pub fn provide_ring<'m>(&'m self, engine: &'m EngineHalf) -> SharedRing<'m, 1> {
        // SAFETY: made of this mapping, as all parts.
        let entries = unsafe { self.provide_ring.inside(&self.mapping) };
        SharedRing::of_geometry(
            &self.header().provide_producer,
            &engine.header().provide_consumer,
            entries,
        )
    }

    /// First byte of the arena. Other processes may change it at any time: copy with [`Self::read_arena`], [`Self::write_arena`], or
    /// by raw pointer.
    #[inline]
    pub fn arena(&self) -> NonNull<u8> {
        // SAFETY: the arena lies inside the mapping by geometry.
        unsafe { self.mapping.base.add(self.arena) }
    }

    /// First of `len` bytes of the arena; `None` if they are not all inside. As [`Self::arena`].
    #[inline]
    pub fn arena_range(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        if !self.geometry.arena_holds(offset, u32::try_from(len).ok()?) {
            return None;
        }
        // SAFETY: inside the arena (checked), and so inside the mapping.
        Some(unsafe { self.arena().add(offset as usize) })
    }

    /// Copies out of the arena. `None` if the range is not inside.
    pub fn read_arena(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        let from = self.arena_range(offset, to.len())?;
        // SAFETY: source inside the mapping (checked), destination a private slice. The other process may write meanwhile; the bytes
        // copied are then unspecified, which every caller treats as the writer's own fault.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Some(())
    }

    /// Copies into the arena. `None` if the range is not inside.
    pub fn write_arena(&self, offset: u64, from: &[u8]) -> Option<()> {
        let to = self.arena_range(offset, from.len())?;
        // SAFETY: destination inside the mapping (checked), source a private slice; races as above.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
        Some(())
    }

    /// First of `len` bytes of a send slot's inline payload; `None` if they are not all inside. As [`Self::arena`].
    #[inline]
    pub fn inline_range(&self, slot: u32, offset: u32, len: usize) -> Option<NonNull<u8>> {
        let words = &self.send_slots().get(slot as usize)?[SEND_HEADER_WORDS..];
        if (offset as usize).checked_add(len)? > INLINE_BYTES {
            return None;
        }
        // SAFETY: inside the slot's inline words (checked).
        Some(unsafe { NonNull::from(words).cast::<u8>().add(offset as usize) })
    }

    /// Copies inline payload out of a send slot. `None` if the range is not inside.
    pub fn read_inline(&self, slot: u32, offset: u32, to: &mut [u8]) -> Option<()> {
        let from = self.inline_range(slot, offset, to.len())?;
        // SAFETY: source inside the mapping (checked), destination a private slice; races as in `read_arena`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Some(())
    }

    /// Loads a word of every page of header, rings and slots: who works with them later need not wait for the kernel to map them. What
    /// was read, so that it is.
    pub fn touch_tables(&self) -> u64 {
        self.mapping.touch(self.arena)
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
        let mapping = Mapping::new(fd, geometry.engine_half_bytes(), writable)?;
        let events = geometry.event_capacity() as usize;
        Ok(Self {
            header: Part::of(&mapping.at::<EngineHeader>(0, 1)[0]),
            event_ring: Part::of(mapping.at(geometry.event_ring(), events)),
            geometry,
            mapping,
        })
    }

    /// The geometry of a port's engine half, which is found without mapping anything. Believed as far as the memory's size agrees: an engine can write
    /// there.
    ///
    /// # Errors
    /// It is not the engine half of this port of this node, in a version we speak; or the system's.
    pub fn recognise(fd: BorrowedFd<'_>, node: u16, port: u16) -> io::Result<PortGeometry> {
        let size = usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        verify_sealed(fd, size)?;
        let found = Head::read(fd)?;
        found
            .geometry()
            .filter(|geometry| geometry.engine_half_bytes() == size)
            .filter(|geometry| found == Head::of(geometry, node, port))
            .ok_or_else(|| {
                let what = "the memory is not this port's engine half";
                io::Error::new(io::ErrorKind::InvalidData, what)
            })
    }

    /// The header. Storing through a read-only mapping faults; the application only loads.
    #[inline]
    pub fn header(&self) -> &EngineHeader {
        // SAFETY: made of this mapping, as all parts.
        unsafe { self.header.inside(&self.mapping) }
    }

    /// The ring of events (engine → application).
    #[inline]
    pub fn event_ring<'m>(&'m self, client: &'m ClientHalf) -> SharedRing<'m, EVENT_WORDS> {
        // SAFETY: made of this mapping, as all parts.
        let entries = unsafe { self.event_ring.inside(&self.mapping) };
        SharedRing::of_geometry(
            &self.header().event_producer,
            &client.header().event_consumer,
            entries,
        )
    }

    /// Loads a word of every page, likewise ([`ClientHalf::touch_tables`]).
    pub fn touch(&self) -> u64 {
        self.mapping.touch(self.mapping.bytes)
    }

    /// Fills in a fresh, zeroed half's header; magic last. Supervisor.
    pub fn initialise(&self, node: u16, port: u16) {
        self.header()
            .state
            .store(u64::from(crate::port::state::OPENING), Ordering::Relaxed);
        self.write_names(node, port);
    }

    /// The supervisor's words of the header, magic last.
    fn write_names(&self, node: u16, port: u16) {
        let (header, geometry) = (self.header(), &self.geometry);
        let store = |word: &AtomicU32, value| word.store(value, Ordering::Relaxed);
        store(&header.version, crate::PORT_ABI_VERSION);
        store(&header.send_tokens, geometry.send_tokens);
        store(&header.receive_tokens, geometry.receive_tokens);
        header
            .arena_bytes
            .store(geometry.arena_bytes, Ordering::Relaxed);
        store(&header.port, u32::from(port));
        store(&header.node, u32::from(node));
        // SYNC(port-magic)
        header.magic.store(PORT_MAGIC, Ordering::Release);
    }

    /// Writes the supervisor's words again where an engine that went wrong has written over them. False if they are as they should be, which
    /// is found without mapping anything.
    pub fn mend(
        fd: BorrowedFd<'_>,
        geometry: PortGeometry,
        node: u16,
        port: u16,
    ) -> io::Result<bool> {
        if Head::read(fd)? == Head::of(&geometry, node, port) {
            return Ok(false);
        }
        Self::map(fd, geometry, true)?.write_names(node, port);
        Ok(true)
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

/// The supervisor's words of an engine half, as bytes: the beginning of [`EngineHeader`].
#[derive(PartialEq, Eq)]
struct Head([u8; HEAD]);

/// Up to the node's id, inclusive.
const HEAD: usize = 36;
const _: () = {
    assert!(std::mem::offset_of!(EngineHeader, send_tokens) == 12);
    assert!(std::mem::offset_of!(EngineHeader, receive_tokens) == 16);
    assert!(std::mem::offset_of!(EngineHeader, port) == 20);
    assert!(std::mem::offset_of!(EngineHeader, arena_bytes) == 24);
    assert!(std::mem::offset_of!(EngineHeader, node) + 4 == HEAD);
};

impl Head {
    fn of(geometry: &PortGeometry, node: u16, port: u16) -> Self {
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(&PORT_MAGIC.to_ne_bytes());
        let halves = [
            crate::PORT_ABI_VERSION,
            geometry.send_tokens,
            geometry.receive_tokens,
            u32::from(port),
        ];
        for (at, half) in (8..).step_by(4).zip(halves) {
            bytes[at..at + 4].copy_from_slice(&half.to_ne_bytes());
        }
        bytes[24..32].copy_from_slice(&geometry.arena_bytes.to_ne_bytes());
        bytes[32..].copy_from_slice(&u32::from(node).to_ne_bytes());
        Self(bytes)
    }

    /// As it is; zeros where the memory ends.
    fn read(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let mut bytes = [0; HEAD];
        rustix::io::pread(fd, &mut bytes, 0)?;
        Ok(Self(bytes))
    }

    fn geometry(&self) -> Option<PortGeometry> {
        let half = |at: usize| {
            self.0
                .get(at..at + 4)?
                .try_into()
                .ok()
                .map(u32::from_ne_bytes)
        };
        let arena_bytes = self
            .0
            .get(24..32)?
            .try_into()
            .ok()
            .map(u64::from_ne_bytes)?;
        PortGeometry::new(half(12)?, half(16)?, arena_bytes)
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
    #[inline]
    pub fn ledger(&self) -> Ledger<'_> {
        // SAFETY: the mapping has `geometry.bytes()` bytes, is page-aligned, and lives as long as the borrow.
        unsafe { Ledger::from_raw(self.mapping.base, self.geometry) }
    }
}
