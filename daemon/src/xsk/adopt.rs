//! Taking over a socket as its last owner left it.
//!
//! Problem: the last owner may have died between any two stores, chunks are
//! spread over rings, drivers and lists in its lost memory, and the kernel goes
//! on moving them while we look. ARCHITECTURE.md, invariant 4.
//!
//! Idea: go by the ownership table, and settle the three cases where the table
//! is ahead of the rings, in this order:
//!
//! 1. recorded FILL or TRANSMIT, but the producer index does not cover it: the
//!    publishing never happened, the chunk is ours;
//! 2. completed and recorded OWNED, but still in the completion ring: drain that
//!    ring (which also takes what completed since), then release it;
//! 3. received and recorded OWNED, but still in the receive ring: it will be
//!    received once more, so it is recorded as the kernel's again.
//!
//! What is then recorded OWNED is ours, everything else the kernel's. Each step
//! can be repeated, so dying in here is no different from dying elsewhere. The
//! producers are our side and stand still; they are read before the consumer
//! ring of the same chunks (fill before receive, transmit before completion),
//! so that a chunk on its way through the kernel is seen in one place at least.
//!
//! Rejected: recreating the socket (tens of milliseconds, frames lost); keeping
//! the free lists themselves in the ledger (two facts that can disagree).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use super::error::XskError;
use super::layout::{UmemLayout, XskConfig};
use super::ownership::{OwnershipTable, Record, is_published};
use super::receive::FILL_AT_LEAST;
use super::ring::{Consumer, Corrupt, Producer};
use super::socket::{RingSet, XskSocket};
use super::umem::UmemMap;
use super::{Doorbell, Xsk, XskCounters};

/// What was found at adoption, in chunks unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AdoptReport {
    /// Receive chunks that were ours.
    pub rx_ours: u32,
    /// Receive chunks the kernel had, those in the receive ring included.
    pub rx_kernel: u32,
    /// Entries of the receive ring that arrived meanwhile.
    pub rx_waiting: u32,
    /// Of those, the ones the last owner had already worked on.
    pub rx_repeated: u32,
    /// Transmit slots (not chunks) that were free.
    pub tx_slots_free: u32,
    /// Transmit chunks the kernel had.
    pub tx_kernel: u32,
    /// Completions that had not been consumed.
    pub completions: u32,
    /// Chunks recorded for a ring but never published.
    pub unpublished: u32,
    /// Chunks with a record that cannot be true: never used again. Not zero
    /// means that the last owner went wrong; recreate the socket when convenient.
    pub implausible: u32,
}

/// A socket whose memory is mapped but which still belongs to another process.
pub struct MappedXsk {
    socket: XskSocket,
    umem: UmemMap,
    config: XskConfig,
}

impl MappedXsk {
    /// The socket, for polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Takes the socket over. Its last owner must be dead: rings have one user.
    ///
    /// # Errors
    /// [`XskError::Misuse`] if the table has not one word per chunk,
    /// [`XskError::Corrupt`] if the rings cannot be true.
    pub fn adopt(self, ownership: &[AtomicU64]) -> Result<Xsk<'_>, XskError> {
        // SAFETY: the socket moves into the same Xsk as the memory, and drops
        // last; its former user is dead by the contract of this method.
        let rings = unsafe { self.socket.memory() };
        let zero_copy = self.socket.zero_copy();
        adopt_rings(
            self.socket,
            rings,
            self.umem,
            &self.config,
            zero_copy,
            ownership,
        )
    }
}

impl<'t> Xsk<'t> {
    /// Maps a socket and its UMEM without touching either. `config` is what the
    /// socket was created with.
    ///
    /// # Errors
    /// [`XskError::CannotAdopt`] on kernels before 6.4, [`XskError::Misuse`] for
    /// a UMEM of another shape, [`XskError::System`].
    pub fn map(
        xsk_fd: OwnedFd,
        umem_fd: &impl AsFd,
        config: &XskConfig,
    ) -> Result<MappedXsk, XskError> {
        config.rings.check(&config.layout)?;
        let umem = UmemMap::new(umem_fd.as_fd(), &config.layout)?;
        let socket = XskSocket::map(xsk_fd, &config.rings)?;
        Ok(MappedXsk {
            socket,
            umem,
            config: *config,
        })
    }

    /// [`Xsk::map`] and [`MappedXsk::adopt`] in one. `ownership` has one word
    /// per chunk and survives us; all zero says that every chunk is ours.
    ///
    /// # Errors
    /// Those of both.
    pub fn adopt(
        xsk_fd: OwnedFd,
        umem_fd: &impl AsFd,
        ownership: &'t [AtomicU64],
        config: &XskConfig,
    ) -> Result<Self, XskError> {
        Self::map(xsk_fd, umem_fd, config)?.adopt(ownership)
    }
}

/// Adopts rings wherever they are; `doorbell` keeps their memory alive.
pub(super) fn adopt_rings<'t, D: Doorbell>(
    doorbell: D,
    rings: RingSet,
    umem: UmemMap,
    config: &XskConfig,
    zero_copy: bool,
    ownership: &'t [AtomicU64],
) -> Result<Xsk<'t, D>, XskError> {
    let layout = config.layout;
    if ownership.len() != layout.chunks() {
        return Err(XskError::Misuse(
            "the ownership table has not one word per chunk",
        ));
    }
    let corrupt = |_: Corrupt| XskError::Corrupt("a ring's indices cannot be true");
    let mut xsk = Xsk {
        layout,
        umem,
        table: OwnershipTable::new(ownership),
        fill: Producer::adopt(rings.fill).map_err(corrupt)?,
        rx: Consumer::adopt(rings.rx).map_err(corrupt)?,
        tx: Producer::adopt(rings.tx).map_err(corrupt)?,
        completion: Consumer::adopt(rings.completion).map_err(corrupt)?,
        refill: Vec::with_capacity(layout.rx_chunks() as usize),
        fill_wanted: FILL_AT_LEAST,
        fill_most: u32::MAX,
        fill_depth: FILL_AT_LEAST,
        refill_at: 1,
        unfilled: 0,
        next_filled: (0, 0),
        free_slots: Vec::with_capacity(layout.tx_slots() as usize),
        slot_chunks_out: vec![0; layout.tx_slots() as usize],
        slots_handed_out: 0,
        tx_outstanding: 0,
        skipping: false,
        zero_copy,
        failed: None,
        counters: XskCounters::default(),
        adopted: AdoptReport::default(),
        doorbell,
    };
    xsk.settle_unpublished();
    xsk.settle_completions().map_err(corrupt)?;
    xsk.settle_received().map_err(corrupt)?;
    xsk.take_stock();
    xsk.publish_refill();
    Ok(xsk)
}

impl<D: Doorbell> Xsk<'_, D> {
    /// Step 1: what was recorded but never published is ours.
    fn settle_unpublished(&mut self) {
        let (fill, tx) = (self.fill.published(), self.tx.published());
        for chunk in 0..self.layout.chunks() as u32 {
            let unpublished = match self.table.get(chunk) {
                Some(Record::Fill(index)) => {
                    is_receive(&self.layout, chunk) && !is_published(index, fill)
                }
                Some(Record::Transmit(index)) => {
                    !is_receive(&self.layout, chunk) && !is_published(index, tx)
                }
                Some(Record::Owned) | None => false,
            };
            if unpublished {
                self.table.set(chunk, Record::Owned);
                self.adopted.unpublished += 1;
            }
        }
    }

    /// Step 2: what has completed is ours, whether that was recorded or not.
    fn settle_completions(&mut self) -> Result<(), Corrupt> {
        let available = self.completion.available()?;
        for nth in 0..available {
            let Some(chunk) = self.layout.check_completed(self.completion.peek(nth)) else {
                self.counters.tx_bogus_completions += 1;
                continue;
            };
            match self.table.get(chunk) {
                Some(Record::Transmit(_)) => self.table.set(chunk, Record::Owned),
                Some(Record::Owned) => {}
                Some(Record::Fill(_)) | None => self.counters.tx_bogus_completions += 1,
            }
        }
        self.completion.release(available);
        self.adopted.completions = available;
        Ok(())
    }

    /// Step 3: what waits in the receive ring is still the kernel's to give.
    fn settle_received(&mut self) -> Result<(), Corrupt> {
        let available = self.rx.available()?;
        let last_published = self.fill.published().wrapping_sub(1);
        for nth in 0..available {
            let entry = self.rx.peek(nth);
            // Bogus entries are counted when they are received.
            let Some(chunk) = self.layout.check_received(entry.addr, entry.len) else {
                continue;
            };
            if self.table.get(chunk) == Some(Record::Owned) {
                self.table.set(chunk, Record::Fill(last_published));
                self.adopted.rx_repeated += 1;
            }
        }
        self.adopted.rx_waiting = available;
        Ok(())
    }

    /// Builds our lists from the table.
    fn take_stock(&mut self) {
        for chunk in 0..self.layout.rx_chunks() {
            match self.table.get(chunk) {
                Some(Record::Owned) => self.refill.push(chunk),
                Some(Record::Fill(_)) => self.adopted.rx_kernel += 1,
                Some(Record::Transmit(_)) | None => self.adopted.implausible += 1,
            }
        }
        self.adopted.rx_ours = self.refill.len() as u32;

        for slot in 0..self.layout.tx_slots() {
            let first = self.layout.slot_chunk(slot);
            let mut out = 0;
            for chunk in first..first + self.layout.chunks_per_slot() {
                match self.table.get(chunk) {
                    Some(Record::Owned) => {}
                    Some(Record::Transmit(index)) if self.may_complete(index) => {
                        self.adopted.tx_kernel += 1;
                        out += 1;
                    }
                    // The slot never becomes free: its chunk never completes.
                    Some(_) | None => {
                        self.adopted.implausible += 1;
                        out += 1;
                    }
                }
            }
            self.tx_outstanding += u32::from(out);
            self.slot_chunks_out[slot as usize] = out;
            if out == 0 {
                self.free_slots.push(slot);
            }
        }
        self.adopted.tx_slots_free = self.free_slots.len() as u32;
    }
}

fn is_receive(layout: &UmemLayout, chunk: u32) -> bool {
    chunk < layout.rx_chunks()
}
