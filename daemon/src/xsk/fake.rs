//! The kernel's side of a socket, played by tests: rings in plain memory, a
//! driver that holds chunks in no ring, and a doorbell with scripted answers.
//!
//! The fake kernel is also the oracle: it asserts on everything it is handed
//! that a chunk is never handed over twice, and it stamps the frames it
//! delivers and checks the stamps of those it is to send.

use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;

use super::adopt::adopt_rings;
use super::layout::{CHUNK_SIZE, UmemLayout, XskConfig};
use super::ring::{CONTINUED, Descriptor, RingMemory};
use super::socket::{Doorbell, RingSet};
use super::umem::{UmemMap, UmemMemfd};
use super::{Xsk, XskError};

/// A ring in plain memory, freed on drop.
pub(super) struct FakeRing<T> {
    memory: RingMemory<T>,
    start: NonNull<u8>,
    layout: Layout,
}

const HEAD: usize = 64;

impl<T: Copy> FakeRing<T> {
    pub(super) fn new(size: u32) -> Self {
        let layout = Layout::from_size_align(HEAD + size as usize * size_of::<T>(), 64).unwrap();
        // SAFETY: the layout is not empty; zeroes are valid for all that is in it.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        // SAFETY: inside the allocation and aligned; RingMemory is only used
        // while the FakeRing lives.
        let memory = unsafe {
            let index = |n: usize| start.add(4 * n).cast::<AtomicU32>();
            RingMemory::new(index(0), index(1), index(2), start.add(HEAD).cast(), size)
        };
        FakeRing {
            memory,
            start,
            layout,
        }
    }

    pub(super) fn memory(&self) -> RingMemory<T> {
        self.memory
    }

    pub(super) fn set(&self, producer: u32, consumer: u32) {
        self.memory.producer().store(producer, Ordering::Release);
        self.memory.consumer().store(consumer, Ordering::Release);
    }

    fn producer(&self) -> u32 {
        self.memory.producer().load(Ordering::Acquire)
    }

    fn consumer(&self) -> u32 {
        self.memory.consumer().load(Ordering::Acquire)
    }

    /// Published and not consumed, oldest first.
    pub(super) fn entries(&self) -> Vec<T> {
        let (producer, consumer) = (self.producer(), self.consumer());
        let count = producer.wrapping_sub(consumer);
        assert!(count <= self.memory.size(), "overflowed ring");
        (0..count)
            .map(|nth| self.memory.read(consumer.wrapping_add(nth)))
            .collect()
    }

    /// The kernel consumes an entry.
    fn pop(&self) -> Option<T> {
        let entry = *self.entries().first()?;
        self.memory
            .consumer()
            .store(self.consumer().wrapping_add(1), Ordering::Release);
        Some(entry)
    }

    /// The kernel produces entries, with one store.
    pub(super) fn push(&self, entries: &[T]) {
        let producer = self.producer();
        for (nth, entry) in (0..).zip(entries) {
            self.memory.write(producer.wrapping_add(nth), *entry);
        }
        self.memory.producer().store(
            producer.wrapping_add(entries.len() as u32),
            Ordering::Release,
        );
    }

    fn room(&self) -> usize {
        self.memory.size() as usize - self.entries().len()
    }
}

impl<T> Drop for FakeRing<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Everything beyond the user's side.
pub(super) struct FakeKernel {
    layout: UmemLayout,
    umem: UmemMap,
    pub(super) fill: FakeRing<u64>,
    pub(super) rx: FakeRing<Descriptor>,
    pub(super) tx: FakeRing<Descriptor>,
    pub(super) completion: FakeRing<u64>,
    /// Entries of the fill ring the kernel has taken but not yet said so.
    fill_taken: u32,
    /// Receive chunks taken from the fill ring.
    driver: VecDeque<u64>,
    /// Transmit chunks taken from the transmit ring.
    in_flight: VecDeque<u64>,
    /// Stamp and length of each frame put into the receive ring so far.
    pub(super) delivered: Vec<(u64, usize)>,
    /// Stamp and length of each frame taken from the transmit ring so far.
    pub(super) sent: Vec<(u64, usize)>,
    /// The frame being taken from the transmit ring.
    partly_sent: Vec<u8>,
    /// What the next kicks are answered; then Ok, with everything sent.
    pub(super) answers: VecDeque<Errno>,
    pub(super) kicks: usize,
}

/// The first bytes of a frame; the rest is filled with the stamp's low byte.
pub(super) fn stamp_frame(frame: &mut [u8], stamp: u64) {
    frame.fill(stamp as u8);
    frame[..8].copy_from_slice(&stamp.to_be_bytes());
}

/// The stamp of a frame that is whole and unchanged.
pub(super) fn read_stamp(frame: &[u8]) -> u64 {
    let stamp = u64::from_be_bytes(frame[..8].try_into().unwrap());
    assert!(
        frame[8..].iter().all(|byte| *byte == stamp as u8),
        "a frame was overwritten"
    );
    stamp
}

/// What the fake kernel may do next.
#[derive(Debug, Clone, Copy)]
pub(super) enum KernelOp {
    /// The driver takes a chunk from the fill ring.
    TakeFill,
    /// A frame of this many segments arrives, if there are chunks and room.
    Deliver { segments: usize, at_once: bool },
    /// The kernel says what it has taken from the fill ring: after it has
    /// delivered, as in `xsk_flush` (net/xdp/xsk.c), or when nothing is left in it.
    ReleaseFill,
    /// A descriptor is taken from the transmit ring.
    TakeTx,
    /// A chunk in flight completes: the oldest or the newest.
    Complete { newest: bool },
}

impl FakeKernel {
    pub(super) fn act(&mut self, op: KernelOp) {
        match op {
            KernelOp::TakeFill => self.take_fill(),
            KernelOp::Deliver { segments, at_once } => self.deliver(segments, at_once),
            KernelOp::ReleaseFill => self.release_fill(),
            KernelOp::TakeTx => self.take_tx(),
            KernelOp::Complete { newest } => self.complete(newest),
        }
    }

    fn take_fill(&mut self) {
        let Some(addr) = self.fill_left().first().copied() else {
            return self.release_fill();
        };
        self.fill_taken += 1;
        assert!(addr.is_multiple_of(CHUNK_SIZE as u64));
        assert!(addr / (CHUNK_SIZE as u64) < u64::from(self.layout.rx_chunks()));
        assert!(
            !self.driver.contains(&addr),
            "a chunk was given to the fill ring twice"
        );
        self.driver.push_back(addr);
    }

    /// What the fill ring still holds, oldest first.
    fn fill_left(&self) -> Vec<u64> {
        self.fill.entries().split_off(self.fill_taken as usize)
    }

    fn release_fill(&mut self) {
        for _ in 0..std::mem::take(&mut self.fill_taken) {
            self.fill.pop();
        }
    }

    fn deliver(&mut self, segments: usize, at_once: bool) {
        const HEADROOM: u64 = 256;
        while self.driver.len() < segments && !self.fill_left().is_empty() {
            self.take_fill();
        }
        if self.driver.len() < segments || self.rx.room() < segments {
            return;
        }
        let stamp = self.delivered.len() as u64;
        let full = CHUNK_SIZE - HEADROOM as usize;
        let len = full * (segments - 1) + 60;
        let mut frame = vec![0; len];
        stamp_frame(&mut frame, stamp);
        let mut entries = Vec::new();
        for (nth, piece) in frame.chunks(full).enumerate() {
            let addr = self.driver.pop_front().unwrap() + HEADROOM;
            let start = addr as usize;
            // SAFETY: the chunk is the kernel's.
            let bytes = unsafe { self.umem.bytes_mut(start..start + piece.len()) };
            bytes.copy_from_slice(piece);
            let options = if nth + 1 < segments { CONTINUED } else { 0 };
            entries.push(Descriptor {
                addr,
                len: piece.len() as u32,
                options,
            });
        }
        if at_once {
            self.rx.push(&entries);
        } else {
            for entry in entries {
                self.rx.push(&[entry]);
            }
        }
        self.delivered.push((stamp, len));
    }

    fn take_tx(&mut self) {
        // The kernel reserves the completion first.
        if self.completion.room() <= self.in_flight.len() {
            return;
        }
        let Some(entry) = self.tx.pop() else { return };
        assert!(self.layout.check_completed(entry.addr).is_some());
        assert!(entry.len > 0 && entry.len as usize <= CHUNK_SIZE);
        assert!(
            !self.in_flight.contains(&entry.addr),
            "a chunk was submitted twice"
        );
        self.in_flight.push_back(entry.addr);
        let start = entry.addr as usize;
        // SAFETY: the chunk is the kernel's.
        let bytes = unsafe { self.umem.bytes(start..start + entry.len as usize) };
        self.partly_sent.extend_from_slice(bytes);
        if entry.options & CONTINUED == 0 {
            let frame = std::mem::take(&mut self.partly_sent);
            self.sent.push((read_stamp(&frame), frame.len()));
        }
    }

    fn complete(&mut self, newest: bool) {
        let addr = if newest {
            self.in_flight.pop_back()
        } else {
            self.in_flight.pop_front()
        };
        if let Some(addr) = addr {
            self.completion.push(&[addr]);
        }
    }

    /// How often each chunk is on the kernel's side or in a ring.
    pub(super) fn occurrences(&self) -> Vec<usize> {
        let descriptors = self.rx.entries().into_iter().chain(self.tx.entries());
        let mut occurrences = vec![0; self.layout.chunks()];
        let all = (self.fill_left().into_iter())
            .chain(self.completion.entries())
            .chain(descriptors.map(|entry| entry.addr))
            .chain(self.driver.iter().copied())
            .chain(self.in_flight.iter().copied());
        for addr in all {
            occurrences[addr as usize / CHUNK_SIZE] += 1;
        }
        occurrences
    }
}

/// A fake socket: what survives its owner.
pub(super) struct FakeSocket {
    pub(super) kernel: Rc<RefCell<FakeKernel>>,
    memory: RingSet,
    umem: UmemMemfd,
    config: XskConfig,
    pub(super) table: Vec<AtomicU64>,
}

impl FakeSocket {
    /// An empty socket whose ring indices all stand at `index`.
    pub(super) fn new(layout: UmemLayout, index: u32) -> Self {
        let config = XskConfig::new(layout);
        let umem = UmemMemfd::create(&layout).unwrap();
        let kernel = FakeKernel {
            layout,
            umem: UmemMap::new(umem.fd(), &layout).unwrap(),
            fill: FakeRing::new(config.rings.fill),
            rx: FakeRing::new(config.rings.rx),
            tx: FakeRing::new(config.rings.tx),
            completion: FakeRing::new(config.rings.completion),
            fill_taken: 0,
            driver: VecDeque::new(),
            in_flight: VecDeque::new(),
            delivered: Vec::new(),
            sent: Vec::new(),
            partly_sent: Vec::new(),
            answers: VecDeque::new(),
            kicks: 0,
        };
        kernel.fill.set(index, index);
        kernel.rx.set(index, index);
        kernel.tx.set(index, index);
        kernel.completion.set(index, index);
        let memory = RingSet {
            fill: kernel.fill.memory(),
            rx: kernel.rx.memory(),
            tx: kernel.tx.memory(),
            completion: kernel.completion.memory(),
        };
        let table = (0..layout.chunks()).map(|_| AtomicU64::new(0)).collect();
        FakeSocket {
            kernel: Rc::new(RefCell::new(kernel)),
            memory,
            umem,
            config,
            table,
        }
    }

    pub(super) fn adopt(&self) -> Result<Xsk<'_, FakeDoorbell>, XskError> {
        let umem = UmemMap::new(self.umem.fd(), &self.config.layout)?;
        let doorbell = FakeDoorbell(self.kernel.clone());
        adopt_rings(
            doorbell,
            self.memory,
            umem,
            &self.config,
            false,
            &self.table,
        )
    }
}

/// Answers kicks from the kernel's script.
pub(super) struct FakeDoorbell(Rc<RefCell<FakeKernel>>);

impl Doorbell for FakeDoorbell {
    fn kick_transmit(&self) -> Result<(), Errno> {
        let mut kernel = self.0.borrow_mut();
        kernel.kicks += 1;
        match kernel.answers.pop_front() {
            Some(errno) => Err(errno),
            None => {
                while !kernel.tx.entries().is_empty() {
                    let before = kernel.tx.entries().len();
                    kernel.act(KernelOp::TakeTx);
                    if kernel.tx.entries().len() == before {
                        return Err(Errno::AGAIN);
                    }
                }
                Ok(())
            }
        }
    }

    fn kick_receive(&self) -> Result<(), Errno> {
        Ok(())
    }
}
