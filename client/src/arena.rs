//! A port's memory as the application sees it, and the buffers in its arena: this crate's `unsafe` island.
//!
//! **Why a [`Buffer`] may be a slice.** A range of the arena is in exactly one place: the free list, one `Buffer`, or one token.
//! A `Buffer` handed to the engine moves into the token's slot and comes back with its completion, so safe code cannot reach bytes
//! the engine works on. The engine is believed in this one thing: that it keeps its hands off memory it was not given. It is the
//! process that carries the application's messages, and it checks every range against the token; an engine that scribbles
//! elsewhere is a defect that no library on this side could contain.
//!
//! **Fork.** The two halves are marked not to be inherited and a guard page is wiped in the child, so that the child recognises
//! itself by one load, and a child that touches a `Buffer` dies of SIGSEGV instead of sharing it with its parent.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portolan_abi::event::EVENT_WORDS;
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::PAGE;
use portolan_abi::ring::SharedRing;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::ArenaFull;
use crate::free_list::FreeList;

/// A port's two halves and its free ranges, kept alive by the port and by every buffer.
pub(crate) struct Memory {
    client: ManuallyDrop<ClientHalf>,
    engine: ManuallyDrop<EngineHalf>,
    guard: ForkGuard,
    free: Mutex<FreeList>,
    /// Bytes behind every buffer that the application does not see.
    tail: u16,
}

impl Memory {
    pub(crate) fn new(
        client: ClientHalf,
        engine: EngineHalf,
        tail: u16,
    ) -> rustix::io::Result<Self> {
        let geometry = client.geometry();
        do_not_inherit(client.header(), geometry.client_half_bytes())?;
        do_not_inherit(engine.header(), geometry.engine_half_bytes())?;
        let tokens = (geometry.send_tokens + geometry.receive_tokens) as usize;
        Ok(Self {
            client: ManuallyDrop::new(client),
            engine: ManuallyDrop::new(engine),
            guard: ForkGuard::new()?,
            free: Mutex::new(FreeList::new(geometry.arena_bytes, tokens + 64)),
            tail,
        })
    }

    pub(crate) fn client(&self) -> &ClientHalf {
        &self.client
    }

    pub(crate) fn engine(&self) -> &EngineHalf {
        &self.engine
    }

    pub(crate) fn send_ring(&self) -> SharedRing<'_, 1> {
        self.client.send_ring(&self.engine)
    }

    pub(crate) fn provide_ring(&self) -> SharedRing<'_, 1> {
        self.client.provide_ring(&self.engine)
    }

    pub(crate) fn event_ring(&self) -> SharedRing<'_, EVENT_WORDS> {
        self.engine.event_ring(&self.client)
    }

    /// Is this process a child of the one that opened the port?
    pub(crate) fn forked(&self) -> bool {
        self.guard.forked()
    }

    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn allocate(self: &Arc<Self>, len: usize) -> Result<Buffer, ArenaFull> {
        let tail = usize::from(self.tail);
        let (Ok(short), Some(Ok(whole))) =
            (u32::try_from(len), len.checked_add(tail).map(u32::try_from))
        else {
            return Err(self.free().full(len));
        };
        let offset = self.free().take(whole)?;
        Ok(Buffer {
            memory: Arc::clone(self),
            offset,
            len: short,
            tail: self.tail,
            abandoned: false,
        })
    }

    /// Without room behind it.
    pub(crate) fn allocate_bare(self: &Arc<Self>, len: usize) -> Result<Buffer, ArenaFull> {
        let short = u32::try_from(len).map_err(|_| self.free().full(len))?;
        let offset = self.free().take(short)?;
        Ok(Buffer {
            memory: Arc::clone(self),
            offset,
            len: short,
            tail: 0,
            abandoned: false,
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.guard.forked() {
            // The child never inherited the mappings; something else may lie at their addresses by now.
            return;
        }
        // SAFETY: dropped once, here, and not used afterwards; nobody else holds a reference, or this would not be dropped.
        unsafe {
            ManuallyDrop::drop(&mut self.client);
            ManuallyDrop::drop(&mut self.engine);
        }
    }
}

/// A range of a port's arena, owned. Given back when dropped.
pub struct Buffer {
    memory: Arc<Memory>,
    offset: u64,
    len: u32,
    /// Bytes behind `len` that are the library's.
    tail: u16,
    abandoned: bool,
}

impl Buffer {
    /// Never to be used again: somebody may still be at work on it.
    pub(crate) fn abandon(mut self) {
        self.abandoned = true;
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes an engine may put into it.
    pub(crate) fn token_len(&self) -> u32 {
        // Cannot overflow: allocated as one.
        self.len + u32::from(self.tail)
    }

    /// Its first `len` bytes, those behind what the application sees included.
    pub(crate) fn whole(&self, len: usize) -> &[u8] {
        let len = len.min(self.token_len() as usize);
        // SAFETY: as for `deref`; the tail was allocated with the rest.
        unsafe { std::slice::from_raw_parts(self.first(), len) }
    }

    /// As [`Self::whole`].
    pub(crate) fn whole_mut(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.token_len() as usize);
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.first(), len) }
    }

    pub(crate) fn belongs_to(&self, memory: &Arc<Memory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    fn first(&self) -> *mut u8 {
        // SAFETY: the free list hands out ranges inside the arena only.
        unsafe {
            self.memory
                .client
                .arena()
                .as_ptr()
                .add(self.offset as usize)
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for as long as `memory` lives, always initialised, and owned by this buffer alone (see the module).
        unsafe { std::slice::from_raw_parts(self.first(), self.len as usize) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.first(), self.len as usize) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.abandoned && !self.memory.forked() {
            self.memory.free().give(self.offset, self.token_len());
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}

/// Keeps a half out of forked children.
fn do_not_inherit<T>(first: &T, bytes: usize) -> rustix::io::Result<()> {
    let address = std::ptr::from_ref(first).cast_mut().cast();
    // SAFETY: a half begins with its header and is mapped for `bytes` bytes; the advice changes nothing in this process.
    unsafe { rustix::mm::madvise(address, bytes, Advice::LinuxDontFork) }
}

/// A private page that reads 1 in the process that made it and 0 in its children.
struct ForkGuard {
    page: NonNull<AtomicU32>,
}

// SAFETY: one atomic word, written once before anybody else can see it.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    fn new() -> rustix::io::Result<Self> {
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let page = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let Some(word) = NonNull::new(page.cast::<AtomicU32>()) else {
            return Err(rustix::io::Errno::NOMEM);
        };
        let guard = Self { page: word };
        // SAFETY: our own page; being wiped in children is what it is for.
        unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork)? };
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped, aligned to a page, and unmapped only when dropped.
        unsafe { self.page.as_ref() }
    }

    fn forked(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: our own mapping (children inherit it, wiped), and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}
