//! Receiving: receive ring → the caller → fill ring.
//!
//! A frame arrives as one to [`MAX_SEGMENTS`] descriptors, all but the last
//! marked continued. Per batch: record each chunk OWNED, let the caller look at
//! the frame, release the batch, record the chunks FILL, publish them. A frame
//! that was looked at but not released when we die is looked at again by our
//! successor: what the caller does with it must bear repetition. A frame is
//! released as a whole, also one that is dropped, so that a successor does not
//! start in the middle of one.
//!
//! The fill ring is kept no deeper than what may come before we look again ([`Xsk::keep_filled`]). The kernel uses its chunks in turn, so all that are in it
//! pass through caches and TLBs, of the sender's core too, which in copy mode writes them: with 6,144 of them (24 MiB) a stream was a tenth slower than with
//! 1,024, and with those 4 to 9 % slower than with the 400 to 650 that one peer may fill.

use super::layout::{CHUNK_SIZE, MAX_SEGMENTS};
use super::ownership::{Record, is_published};
use super::ring::{CONTINUED, Descriptor};
use super::{Doorbell, Xsk};

/// Chunks that may wait before the fill ring gets them, if it is that much deeper than it need be.
const REFILL_AT: u32 = 16;
/// Frames between two releases: few enough that the fill ring does not run dry.
const BATCH_FRAMES: usize = 32;
/// Chunks that the fill ring holds at least, if there are so many: for whoever is not known yet.
pub const FILL_AT_LEAST: u32 = 256;
/// Chunks that it holds at first: a new socket may take an old one's place, whose peers go on sending before an engine looks at it.
pub const FILL_AT_FIRST: u32 = 1_024;

/// What a call of [`Xsk::receive`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RxOutcome {
    /// Frames handed to the caller.
    pub frames: usize,
    /// Frames dropped, by the reasons in the counters.
    pub dropped: usize,
    /// The budget ended before the ring did: call again.
    pub more: bool,
}

impl RxOutcome {
    fn done(&self) -> usize {
        self.frames + self.dropped
    }
}

/// The next frame in the receive ring, as far as it is there.
enum NextFrame {
    /// This many descriptors.
    Whole(u32),
    /// Its last descriptor has not arrived yet, or there is none at all.
    Partial,
    /// This many descriptors, which are more than a frame may have.
    TooLong(u32),
    /// The whole ring is one frame whose end is still to come.
    Endless,
}

impl<D: Doorbell> Xsk<'_, D> {
    /// Hands up to `budget` frames to `f`, each as its 1 to [`MAX_SEGMENTS`]
    /// non-empty segments, and gives their chunks back to the kernel.
    pub fn receive(&mut self, budget: usize, mut f: impl FnMut(&[&[u8]])) -> RxOutcome {
        let mut outcome = RxOutcome::default();
        loop {
            let Ok(available) = self.rx.available() else {
                self.note_corrupt_ring();
                break;
            };
            if available == 0 || outcome.done() >= budget {
                outcome.more = available > 0;
                break;
            }
            self.ask_for_next();
            let limit = budget.min(outcome.done() + BATCH_FRAMES);
            let taken = self.receive_batch(available, limit, &mut outcome, &mut f);
            self.rx.release(taken);
            self.unfilled += taken;
            if self.unfilled >= self.refill_at {
                self.publish_refill();
            }
            if taken == 0 {
                break;
            }
        }
        outcome
    }

    /// Works through frames among the `available` descriptors until `limit` are
    /// done; returns the descriptors to release.
    fn receive_batch(
        &mut self,
        available: u32,
        limit: usize,
        outcome: &mut RxOutcome,
        f: &mut impl FnMut(&[&[u8]]),
    ) -> u32 {
        let mut taken = 0;
        while taken < available && outcome.done() < limit {
            if self.skipping {
                let entry = self.rx.peek(taken);
                self.claim_received(&entry);
                taken += 1;
                if entry.options & CONTINUED == 0 {
                    self.skipping = false;
                    self.counters.rx_too_many_segments += 1;
                    outcome.dropped += 1;
                }
                continue;
            }
            match self.next_frame(taken, available) {
                NextFrame::Whole(count) => {
                    if self.receive_frame(taken, count, f) {
                        outcome.frames += 1;
                    } else {
                        outcome.dropped += 1;
                    }
                    taken += count;
                }
                NextFrame::TooLong(count) => {
                    for nth in taken..taken + count {
                        self.claim_received(&self.rx.peek(nth));
                    }
                    taken += count;
                    self.counters.rx_too_many_segments += 1;
                    outcome.dropped += 1;
                }
                NextFrame::Partial => break,
                NextFrame::Endless => self.skipping = true,
            }
        }
        taken
    }

    fn next_frame(&self, from: u32, available: u32) -> NextFrame {
        for count in 1..=available - from {
            if self.rx.peek(from + count - 1).options & CONTINUED == 0 {
                return if count as usize <= MAX_SEGMENTS {
                    NextFrame::Whole(count)
                } else {
                    NextFrame::TooLong(count)
                };
            }
        }
        // Waiting for the rest is pointless if there is no place for it.
        if available - from == self.rx.size() {
            NextFrame::Endless
        } else {
            NextFrame::Partial
        }
    }

    /// Hands on the frame of `count` descriptors at `from`; false if one of
    /// them was bogus.
    #[inline]
    fn receive_frame(&mut self, from: u32, count: u32, f: &mut impl FnMut(&[&[u8]])) -> bool {
        if count > 1 {
            return self.receive_segments(from, count, f);
        }
        let entry = self.rx.peek(from);
        if !self.claim_received(&entry) {
            self.counters.rx_bad_frames += 1;
            return false;
        }
        let start = entry.addr as usize;
        self.umem.prefetch(start);
        // SAFETY: as of each of several.
        let bytes = unsafe { self.umem.bytes(start..start + entry.len as usize) };
        self.counters.rx_frames += 1;
        self.counters.rx_bytes += bytes.len() as u64;
        f(&[bytes]);
        true
    }

    /// The same of several descriptors.
    fn receive_segments(&mut self, from: u32, count: u32, f: &mut impl FnMut(&[&[u8]])) -> bool {
        let mut segments = [const { 0..0 }; MAX_SEGMENTS];
        let mut good = true;
        for (segment, nth) in segments.iter_mut().zip(0..count) {
            let entry = self.rx.peek(from + nth);
            if self.claim_received(&entry) {
                let start = entry.addr as usize;
                *segment = start..start + entry.len as usize;
            } else {
                good = false;
            }
        }
        if !good {
            self.counters.rx_bad_frames += 1;
            return false;
        }
        self.umem.prefetch(segments[0].start);
        // SAFETY: each range lies in a chunk just claimed: the kernel has put it
        // into the receive ring and does not write it until it is in the fill
        // ring again, which is after the slices' last use; receive chunks are
        // never handed out for writing.
        let slices = segments.map(|range| unsafe { self.umem.bytes(range) });
        let slices = &slices[..count as usize];
        self.counters.rx_frames += 1;
        self.counters.rx_bytes += slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
        f(slices);
        true
    }

    /// Takes the chunk of a receive descriptor, if it is one the kernel had.
    fn claim_received(&mut self, entry: &Descriptor) -> bool {
        let found = self.layout.check_received(entry.addr, entry.len);
        // Also refuses a chunk that occurs twice: the first made it OWNED.
        let found = found.and_then(|chunk| match self.table.get(chunk) {
            _ if cfg!(feature = "volatile") => Some((chunk, self.next_filled.0)),
            Some(Record::Fill(index)) if is_published(index, self.fill.published()) => {
                Some((chunk, index))
            }
            _ => None,
        });
        match found {
            Some((chunk, index)) => {
                self.next_filled = (index.wrapping_add(1), entry.addr as usize % CHUNK_SIZE);
                self.table.note(chunk, Record::Owned);
                self.refill.push(chunk);
                true
            }
            None => {
                self.counters.rx_bogus_descriptors += 1;
                false
            }
        }
    }

    /// Whether something waits in the receive ring.
    #[inline]
    pub fn has_received(&self) -> bool {
        self.rx.available() != Ok(0)
    }

    /// Has the lines of the frame that comes next fetched while its descriptor is: the kernel uses chunks in the order of the fill ring, so it is known
    /// where it will be. Both were written by the core that sent it, and each fetched from there takes as long as a hundred instructions.
    fn ask_for_next(&self) {
        let (index, offset) = self.next_filled;
        // Whatever stands there: a predecessor may have damaged it.
        let chunk = self.fill.entry(index) as usize;
        self.umem.prefetch(chunk.wrapping_add(offset));
    }

    /// From now on the fill ring holds so many chunks, or [`FILL_AT_LEAST`], or all there are. Those it holds beyond that leave it as frames come. If there
    /// are some to spare, a few are gathered before it is filled: to see how far the kernel is takes a line that the core has which sent the last frame.
    pub fn keep_filled(&mut self, chunks: u32) {
        self.fill_wanted = chunks.max(FILL_AT_LEAST);
        self.fill_as_wanted();
    }

    /// And no more than so many and a few, whatever is wanted.
    pub fn fill_at_most(&mut self, chunks: u32) {
        self.fill_most = chunks;
        self.fill_as_wanted();
    }

    fn fill_as_wanted(&mut self) {
        let chunks = self.fill_wanted.min(self.fill_most);
        let spare = REFILL_AT - 1;
        let some_to_spare = self.layout.rx_chunks() >= chunks.saturating_add(spare);
        (self.fill_depth, self.refill_at) = match some_to_spare {
            true => (chunks + spare, REFILL_AT),
            false => (chunks, 1),
        };
        self.publish_refill();
    }

    /// Gives the receive chunks that are ours to the kernel, as far as the fill ring is to hold them.
    pub(super) fn publish_refill(&mut self) {
        self.unfilled = 0;
        if self.refill.is_empty() {
            return;
        }
        let Ok(in_ring) = self.fill.in_ring() else {
            self.note_corrupt_ring();
            return;
        };
        // There is room for all, unless the table lied at adoption.
        let room = self
            .fill
            .size()
            .min(self.fill_depth)
            .saturating_sub(in_ring);
        for _ in 0..room {
            let Some(chunk) = self.refill.pop() else {
                break;
            };
            self.table.note(chunk, Record::Fill(self.fill.next_index()));
            self.fill.stage(u64::from(chunk) * CHUNK_SIZE as u64);
        }
        self.fill.publish();
    }

    /// True if the driver wants to be woken to take chunks from the fill ring
    /// (zero-copy only; copy mode takes them as frames arrive).
    pub fn rx_wakeup_needed(&self) -> bool {
        self.zero_copy && self.fill.needs_wakeup()
    }

    /// Wakes the driver. Errors are counted nowhere but in its silence: the
    /// next transmit kick meets the same ones.
    pub fn wake_rx(&mut self) {
        self.counters.rx_wakeups += 1;
        let _ = self.doorbell.kick_receive();
    }

    pub(super) fn note_corrupt_ring(&mut self) {
        self.counters.corrupt_rings += 1;
    }
}
