//! The checker of the invariants in `mod.rs`: every chunk exactly once.
//!
//! For tests and for operators in doubt, not for the hot path: it allocates and
//! reads everything. The kernel may go on meanwhile; consumer rings are read
//! before the producer rings that feed them, so that a chunk on its way is
//! missed in both rather than seen in both. One exception: the kernel publishes
//! what it has received before it publishes what it took from the fill ring for
//! that (net/xdp/xsk.c, `xsk_flush`), and may be interrupted in between. A chunk
//! seen in the fill ring and elsewhere is looked at again, until the kernel must
//! have gone on.

use std::time::{Duration, Instant};

use super::ownership::{Record, is_published};
use super::{CHUNK_SIZE, Xsk};

/// How long the kernel may stand between two stores: an interrupt, a virtual
/// processor that is not run.
const KERNEL_PATIENCE: Duration = Duration::from_millis(200);

const FILL_RING: &str = "the fill ring";

/// The first violation found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Inconsistency {
    text: String,
    /// True if the kernel may be about to end it.
    may_pass: bool,
}

impl Inconsistency {
    fn lasting(text: String) -> Self {
        Inconsistency {
            text,
            may_pass: false,
        }
    }
}

/// Where each chunk has been seen.
struct Places(Vec<Option<&'static str>>);

impl Places {
    fn see(&mut self, chunk: u64, place: &'static str) -> Result<(), Inconsistency> {
        let Some(seen) = self.0.get_mut(chunk as usize) else {
            return Err(Inconsistency::lasting(format!(
                "{place} names chunk {chunk}, which does not exist"
            )));
        };
        match seen.replace(place) {
            None => Ok(()),
            Some(before) => Err(Inconsistency {
                text: format!("chunk {chunk} is in {place} and in {before}"),
                may_pass: place == FILL_RING || before == FILL_RING,
            }),
        }
    }
}

impl<D> Xsk<'_, D> {
    /// Checks that every chunk is accounted for exactly once.
    ///
    /// # Errors
    /// The first chunk that is not.
    pub fn check_consistency(&self) -> Result<(), Inconsistency> {
        let deadline = Instant::now() + KERNEL_PATIENCE;
        let places = loop {
            match self.see_rings() {
                Ok(places) => break places,
                Err(seen) if seen.may_pass && Instant::now() < deadline => {
                    std::thread::yield_now();
                }
                Err(seen) => return Err(seen),
            }
        };
        for chunk in 0..self.layout.rx_chunks() {
            self.check_receive_chunk(chunk, &places)?;
        }
        self.check_slots(&places)
    }

    /// Where each chunk is that is in a ring or a list.
    fn see_rings(&self) -> Result<Places, Inconsistency> {
        let mut places = Places(vec![None; self.layout.chunks()]);
        let corrupt =
            |ring| move |_| Inconsistency::lasting(format!("the indices of the {ring} ring"));
        let chunk_of = |addr: u64| addr / CHUNK_SIZE as u64;

        for nth in 0..self.rx.available().map_err(corrupt("receive"))? {
            places.see(chunk_of(self.rx.peek(nth).addr), "the receive ring")?;
        }
        let in_ring = self.fill.in_ring().map_err(corrupt("fill"))?;
        for back in 1..=in_ring {
            let entry = self
                .fill
                .memory()
                .read(self.fill.published().wrapping_sub(back));
            places.see(chunk_of(entry), FILL_RING)?;
        }
        for nth in 0..self.completion.available().map_err(corrupt("completion"))? {
            places.see(chunk_of(self.completion.peek(nth)), "the completion ring")?;
        }
        let in_ring = self.tx.in_ring().map_err(corrupt("transmit"))? + self.tx.staged();
        for back in 1..=in_ring {
            let entry = self
                .tx
                .memory()
                .read(self.tx.next_index().wrapping_sub(back));
            places.see(chunk_of(entry.addr), "the transmit ring")?;
        }
        for chunk in &self.refill {
            places.see(u64::from(*chunk), "the list of chunks to refill")?;
        }
        Ok(places)
    }

    fn check_receive_chunk(&self, chunk: u32, places: &Places) -> Result<(), Inconsistency> {
        let record = self.table.get(chunk);
        let place = places.0[chunk as usize];
        let ours = place == Some("the list of chunks to refill");
        match record {
            Some(Record::Owned) if ours => Ok(()),
            Some(Record::Fill(index)) if !ours && is_published(index, self.fill.published()) => {
                Ok(())
            }
            _ => Err(Inconsistency::lasting(format!(
                "receive chunk {chunk} is recorded {record:?} and in {place:?}"
            ))),
        }
    }

    fn check_slots(&self, places: &Places) -> Result<(), Inconsistency> {
        let mut free = vec![0u32; self.layout.tx_slots() as usize];
        for slot in &self.free_slots {
            free[*slot as usize] += 1;
        }
        let mut outstanding = 0;
        let mut in_use = 0;
        for slot in 0..self.layout.tx_slots() {
            let first = self.layout.slot_chunk(slot);
            let mut out = 0;
            for chunk in first..first + self.layout.chunks_per_slot() {
                out += u32::from(self.check_transmit_chunk(chunk, places)?);
            }
            let counted = u32::from(self.slot_chunks_out[slot as usize]);
            let listed = free[slot as usize];
            if counted != out || listed > 1 || (listed == 1 && out > 0) {
                return Err(Inconsistency::lasting(format!(
                    "slot {slot}: {out} chunks at the kernel, {counted} counted, {listed} times free"
                )));
            }
            outstanding += out;
            in_use += u32::from(out > 0);
        }
        let slots = self.free_slots.len() as u32 + self.slots_handed_out + in_use;
        if outstanding != self.tx_outstanding || slots != self.layout.tx_slots() {
            return Err(Inconsistency::lasting(format!(
                "{outstanding} chunks at the kernel, {} counted; {slots} slots of {}",
                self.tx_outstanding,
                self.layout.tx_slots(),
            )));
        }
        Ok(())
    }

    /// True if the kernel (or the staging area) has the chunk.
    fn check_transmit_chunk(&self, chunk: u32, places: &Places) -> Result<bool, Inconsistency> {
        let record = self.table.get(chunk);
        let place = places.0[chunk as usize];
        match (record, place) {
            (Some(Record::Owned), None) => Ok(false),
            (Some(Record::Transmit(index)), _) if is_published(index, self.tx.next_index()) => {
                Ok(true)
            }
            _ => Err(Inconsistency::lasting(format!(
                "transmit chunk {chunk} is recorded {record:?} and in {place:?}"
            ))),
        }
    }
}
