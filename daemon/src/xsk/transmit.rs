//! Sending: slot → transmit ring → kick → completion ring → slot.
//!
//! A slot is a contiguous buffer; [`Xsk::submit`] stages one descriptor per
//! chunk of it, [`Xsk::flush`] publishes all staged ones with one store (so no
//! frame is ever published in part) and kicks. What was staged but not
//! published when we die was never sent; what was published will be sent by
//! the first kick of our successor.
//!
//! The kernel's answers to a kick are in `error.rs`; AF_XDP.md, *Sending*, has
//! the reasons.

use rustix::io::Errno;

use super::error::{KickVerdict, kick_verdict};
use super::layout::CHUNK_SIZE;
use super::ownership::{Record, is_published};
use super::ring::{CONTINUED, Descriptor};
use super::{Doorbell, Xsk};

/// Kicks per flush: one moves 32 descriptors at least.
const KICKS_PER_FLUSH: usize = 8;

/// A free transmit slot, to be given back by [`Xsk::submit`] or [`Xsk::abandon`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slot that is dropped stays unused until the socket is adopted again"]
pub struct TxSlot {
    slot: u32,
}

/// How a [`Xsk::flush`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KickOutcome {
    /// The transmit ring was empty, or the driver is at work on it.
    Idle,
    /// The kernel has taken everything.
    Sent,
    /// Some is still in the ring: flush again, soon.
    Pending,
    /// There is no room below the kernel's way, as in a veth whose other end is not looked at: it lost a frame, and would lose one at each further kick.
    /// Flush again in a moment.
    Full,
    /// The kernel has no buffers: flush again, later.
    NoBuffers,
    /// The link is down: flush again when it is up. What is in the ring stays.
    LinkDown,
    /// The socket has lost its queue and must be rebuilt; nothing can be sent.
    Rebuild,
    /// The socket does not work; nothing can be sent.
    Failed(Errno),
}

impl<D: Doorbell> Xsk<'_, D> {
    /// A slot to write a frame into; `None` if all are in use: [`Xsk::reap`].
    pub fn tx_slot(&mut self) -> Option<TxSlot> {
        let slot = self.free_slots.pop()?;
        self.slots_handed_out += 1;
        Some(TxSlot { slot })
    }

    /// The slot's buffer, as long as the longest frame. It holds what was there
    /// before. Empty for a slot of another socket.
    pub fn tx_buffer(&mut self, slot: &TxSlot) -> &mut [u8] {
        if self.slot_chunks_out.get(slot.slot as usize) != Some(&0) {
            return &mut [];
        }
        // SAFETY: the slot has no chunk at the kernel; other slots are other
        // bytes, and &mut self makes this the only slice.
        unsafe { self.umem.bytes_mut(self.layout.slot_bytes(slot.slot)) }
    }

    /// Stages the first `len` bytes of the slot as one frame. A length that no
    /// frame can have is counted and the slot abandoned.
    pub fn submit(&mut self, slot: TxSlot, len: usize) {
        if len == 0 || len > self.layout.max_frame_len() {
            self.counters.tx_bad_lengths += 1;
            return self.abandon(slot);
        }
        let Some(out @ 0) = self.slot_chunks_out.get_mut(slot.slot as usize) else {
            return;
        };
        let count = len.div_ceil(CHUNK_SIZE);
        *out = count as u8;
        self.slots_handed_out = self.slots_handed_out.saturating_sub(1);
        self.tx_outstanding += count as u32;
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += len as u64;

        let mut chunk = self.layout.slot_chunk(slot.slot);
        let mut left = len;
        while left > 0 {
            let here = left.min(CHUNK_SIZE);
            left -= here;
            self.table
                .note(chunk, Record::Transmit(self.tx.next_index()));
            // There is room: the ring has a place for every transmit chunk.
            self.tx.stage(Descriptor {
                addr: u64::from(chunk) * CHUNK_SIZE as u64,
                len: here as u32,
                options: if left > 0 { CONTINUED } else { 0 },
            });
            chunk += 1;
        }
    }

    /// Gives a slot back unused.
    pub fn abandon(&mut self, slot: TxSlot) {
        if self.slot_chunks_out.get(slot.slot as usize) == Some(&0) {
            self.slots_handed_out = self.slots_handed_out.saturating_sub(1);
            self.free_slots.push(slot.slot);
        }
    }

    /// Descriptors staged or published and not completed.
    pub fn tx_outstanding(&self) -> u32 {
        self.tx_outstanding
    }

    /// Of these, the ones not published.
    pub fn tx_staged(&self) -> u32 {
        self.tx.staged()
    }

    /// Of these, the ones the kernel has taken out of the transmit ring.
    pub fn tx_taken(&self) -> u32 {
        let in_ring = self.tx.in_ring().unwrap_or(0);
        self.tx_outstanding
            .saturating_sub(in_ring + self.tx.staged())
    }

    /// Publishes everything staged and kicks the kernel if it has work, also
    /// work left by an earlier flush or owner. May reap completions.
    pub fn flush(&mut self) -> KickOutcome {
        self.tx.publish();
        if let Some(failed) = self.failed {
            return failed;
        }
        for attempt in 0..KICKS_PER_FLUSH {
            match self.tx.in_ring() {
                Ok(0) if attempt == 0 => return KickOutcome::Idle,
                Ok(0) => return KickOutcome::Sent,
                Ok(_) => {}
                Err(_) => {
                    self.note_corrupt_ring();
                    return self.fail(KickOutcome::Rebuild);
                }
            }
            // A copy-mode socket sends only when kicked; a driver says when it sleeps.
            if self.zero_copy && !self.tx.needs_wakeup() {
                return if attempt == 0 {
                    KickOutcome::Idle
                } else {
                    KickOutcome::Sent
                };
            }
            if let Some(outcome) = self.kick() {
                return outcome;
            }
        }
        KickOutcome::Pending
    }

    /// One kick; `None` if another one is due.
    fn kick(&mut self) -> Option<KickOutcome> {
        self.counters.kicks += 1;
        let Err(errno) = self.doorbell.kick_transmit() else {
            return Some(KickOutcome::Sent);
        };
        match kick_verdict(errno) {
            KickVerdict::Again => {
                self.counters.kick_eagain += 1;
                self.reap();
                None
            }
            KickVerdict::FrameLost => {
                self.counters.kick_ebusy += 1;
                Some(KickOutcome::Full)
            }
            KickVerdict::Later => {
                self.counters.kick_enobufs += 1;
                Some(KickOutcome::NoBuffers)
            }
            KickVerdict::LinkDown => {
                self.counters.kick_enetdown += 1;
                Some(KickOutcome::LinkDown)
            }
            KickVerdict::Rebuild => {
                self.counters.kick_failed += 1;
                Some(self.fail(KickOutcome::Rebuild))
            }
            KickVerdict::Failed => {
                self.counters.kick_failed += 1;
                Some(self.fail(KickOutcome::Failed(errno)))
            }
        }
    }

    fn fail(&mut self, outcome: KickOutcome) -> KickOutcome {
        self.failed = Some(outcome);
        outcome
    }

    /// Takes completed chunks back; returns how many the kernel reported. Slots
    /// with no chunk left at the kernel are free again.
    pub fn reap(&mut self) -> usize {
        let Ok(available) = self.completion.available() else {
            self.note_corrupt_ring();
            return 0;
        };
        for nth in 0..available {
            let addr = self.completion.peek(nth);
            self.claim_completed(addr);
        }
        // Nobody takes a slot before this: &mut self.
        self.completion.release(available);
        available as usize
    }

    /// Takes back the chunk an address from the completion ring names, if the
    /// kernel had it.
    fn claim_completed(&mut self, addr: u64) {
        let Some((chunk, slot)) = self.check_completed(addr) else {
            self.counters.tx_bogus_completions += 1;
            return;
        };
        let Some(out @ 1..) = self.slot_chunks_out.get_mut(slot as usize) else {
            self.counters.tx_bogus_completions += 1;
            return;
        };
        self.table.note(chunk, Record::Owned);
        *out -= 1;
        if *out == 0 {
            self.free_slots.push(slot);
        }
        self.tx_outstanding = self.tx_outstanding.saturating_sub(1);
        self.counters.tx_completions += 1;
    }

    /// The chunk and slot of an address that may have completed.
    fn check_completed(&self, addr: u64) -> Option<(u32, u32)> {
        let chunk = self.layout.check_completed(addr)?;
        if cfg!(feature = "volatile") {
            return Some((chunk, self.layout.chunk_slot(chunk)?));
        }
        match self.table.get(chunk)? {
            Record::Transmit(index) if self.may_complete(index) => {
                Some((chunk, self.layout.chunk_slot(chunk)?))
            }
            _ => None,
        }
    }

    /// True if a chunk recorded at this transmit index may be at the kernel:
    /// published, and not longer ago than both rings together reach, as the
    /// kernel reserves a completion before it takes a descriptor.
    pub(super) fn may_complete(&self, index: u32) -> bool {
        let published = self.tx.published();
        let reach = self.tx.size() + self.completion.size();
        is_published(index, published) && published.wrapping_sub(index) <= reach
    }
}
