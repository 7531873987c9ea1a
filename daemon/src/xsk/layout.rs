//! How the UMEM is divided, and how large the rings are.
//!
//! The UMEM is an array of 4096-byte *chunks* (the kernel says frame; here a
//! frame is what is on the wire, which may need several chunks):
//!
//! ```text
//! chunk 0 .. rx_chunks          receive: one chunk each, always owned by fill/rx
//! chunk rx_chunks .. chunks     transmit: tx_slots × chunks_per_slot, contiguous
//! ```
//!
//! A transmit slot is one contiguous buffer that holds the longest frame, so the
//! transport writes a frame in one piece whatever the MTU; it is submitted as
//! one descriptor per chunk. Slots begin with a page, and there is no extra
//! headroom, so what the kernel copies lies at multiples of 64 at both ends:
//! `rep movsb`, with which it does, takes 30 times as long on a Zen 4 where the
//! destination is 1 to 63 bytes beyond the source modulo 4096 (1.8 us instead of
//! 0.06 for a page).
//!
//! Every ring is at least as large as the number of chunks that may be in it, so
//! that publishing never finds a ring full.

use std::ops::Range;

use super::error::XskError;

/// Bytes per UMEM chunk: one page, aligned mode, no extra headroom.
pub const CHUNK_SIZE: usize = 4096;

/// Chunks one received frame may take (9 KiB in copy mode takes three).
pub const MAX_SEGMENTS: usize = 4;

/// What the kernel keeps free in front of received data (`XDP_PACKET_HEADROOM`).
const KERNEL_HEADROOM: usize = 256;

/// The longest frame that needs no scatter/gather, in bytes.
pub const MAX_SINGLE_CHUNK_FRAME: usize = CHUNK_SIZE - KERNEL_HEADROOM;

/// The longest frame there is, in bytes: what fits into [`MAX_SEGMENTS`] received chunks.
pub const MAX_FRAME_LEN: usize = MAX_SEGMENTS * MAX_SINGLE_CHUNK_FRAME;

/// The most chunks a UMEM may have (4 GiB; keeps every offset far from overflow).
const MAX_CHUNKS: u64 = 1 << 20;

/// The division of one UMEM. Validated by [`UmemLayout::new`], then immutable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UmemLayout {
    rx_chunks: u32,
    tx_slots: u32,
    chunks_per_slot: u32,
    max_frame_len: u32,
}

impl UmemLayout {
    /// A UMEM of `rx_chunks` receive chunks and `tx_slots` transmit slots, each
    /// for a frame of up to `max_frame_len` bytes (MTU + 14).
    ///
    /// # Errors
    /// [`XskError::Misuse`] if a count is zero or the sizes are out of range.
    pub fn new(rx_chunks: u32, tx_slots: u32, max_frame_len: usize) -> Result<Self, XskError> {
        if rx_chunks == 0 || tx_slots == 0 {
            return Err(XskError::Misuse(
                "a UMEM needs receive chunks and transmit slots",
            ));
        }
        if !(60..=MAX_FRAME_LEN).contains(&max_frame_len) {
            return Err(XskError::Misuse(
                "the longest frame must be 60 to 15360 bytes",
            ));
        }
        let chunks_per_slot = max_frame_len.div_ceil(CHUNK_SIZE) as u32;
        let chunks = u64::from(rx_chunks) + u64::from(tx_slots) * u64::from(chunks_per_slot);
        if chunks > MAX_CHUNKS {
            return Err(XskError::Misuse(
                "a UMEM has at most 1048576 chunks of 4096 bytes",
            ));
        }
        Ok(UmemLayout {
            rx_chunks,
            tx_slots,
            chunks_per_slot,
            max_frame_len: max_frame_len as u32,
        })
    }

    /// All chunks; also the number of words in the ownership table.
    pub fn chunks(&self) -> usize {
        (self.rx_chunks + self.tx_chunks()) as usize
    }

    /// The size of the UMEM in bytes.
    pub fn bytes(&self) -> usize {
        self.chunks() * CHUNK_SIZE
    }

    /// Chunks for receiving; they are the first ones.
    pub fn rx_chunks(&self) -> u32 {
        self.rx_chunks
    }

    /// Slots for transmitting.
    pub fn tx_slots(&self) -> u32 {
        self.tx_slots
    }

    /// Chunks for transmitting: those of all slots.
    pub fn tx_chunks(&self) -> u32 {
        self.tx_slots * self.chunks_per_slot
    }

    /// Contiguous chunks in one transmit slot.
    pub fn chunks_per_slot(&self) -> u32 {
        self.chunks_per_slot
    }

    /// The longest frame in bytes, Ethernet header included, FCS not.
    pub fn max_frame_len(&self) -> usize {
        self.max_frame_len as usize
    }

    /// True if frames may take more than one chunk, so that the socket must be
    /// bound with `XDP_USE_SG`.
    pub fn needs_sg(&self) -> bool {
        self.max_frame_len() > MAX_SINGLE_CHUNK_FRAME
    }

    /// The first chunk of a transmit slot.
    pub(super) fn slot_chunk(&self, slot: u32) -> u32 {
        self.rx_chunks + slot * self.chunks_per_slot
    }

    /// The slot a chunk belongs to, if it is a transmit chunk of this UMEM.
    pub(super) fn chunk_slot(&self, chunk: u32) -> Option<u32> {
        let offset = chunk.checked_sub(self.rx_chunks)?;
        (offset < self.tx_chunks()).then(|| offset / self.chunks_per_slot)
    }

    /// The byte range of a transmit slot that a frame may use.
    pub(super) fn slot_bytes(&self, slot: u32) -> Range<usize> {
        let start = self.slot_chunk(slot) as usize * CHUNK_SIZE;
        start..start + self.max_frame_len()
    }

    /// The chunk a receive descriptor points into: the claim `(addr, len)` is
    /// inside one receive chunk.
    pub(super) fn check_received(&self, addr: u64, len: u32) -> Option<u32> {
        let chunk = u32::try_from(addr / CHUNK_SIZE as u64).ok()?;
        let within = addr % CHUNK_SIZE as u64;
        let fits = len > 0 && within + u64::from(len) <= CHUNK_SIZE as u64;
        (chunk < self.rx_chunks && fits).then_some(chunk)
    }

    /// The transmit chunk an address from the completion ring names: we submit
    /// chunk starts only.
    pub(super) fn check_completed(&self, addr: u64) -> Option<u32> {
        let chunk = u32::try_from(addr / CHUNK_SIZE as u64).ok()?;
        let aligned = addr.is_multiple_of(CHUNK_SIZE as u64);
        (aligned && self.chunk_slot(chunk).is_some()).then_some(chunk)
    }
}

/// Entries of the four rings, each a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSizes {
    /// Fill ring: at least the receive chunks.
    pub fill: u32,
    /// Receive ring: at least the receive chunks, or bursts are dropped.
    pub rx: u32,
    /// Transmit ring: at least the transmit chunks.
    pub tx: u32,
    /// Completion ring: at least the transmit chunks.
    pub completion: u32,
}

impl RingSizes {
    /// The smallest rings that `layout` can never overflow.
    pub fn for_layout(layout: &UmemLayout) -> Self {
        let rx = layout.rx_chunks().next_power_of_two();
        let tx = layout.tx_chunks().next_power_of_two();
        RingSizes {
            fill: rx,
            rx,
            tx,
            completion: tx,
        }
    }

    /// # Errors
    /// [`XskError::Misuse`] if a ring is no power of two or too small.
    pub(super) fn check(&self, layout: &UmemLayout) -> Result<(), XskError> {
        let all = [self.fill, self.rx, self.tx, self.completion];
        if all
            .iter()
            .any(|size| !size.is_power_of_two() || u64::from(*size) > 2 * MAX_CHUNKS)
        {
            return Err(XskError::Misuse(
                "ring sizes are powers of two up to 2097152",
            ));
        }
        if self.fill < layout.rx_chunks() {
            return Err(XskError::Misuse(
                "the fill ring must hold every receive chunk",
            ));
        }
        if self.tx < layout.tx_chunks() || self.completion < layout.tx_chunks() {
            return Err(XskError::Misuse(
                "the transmit and completion rings must hold every transmit chunk",
            ));
        }
        Ok(())
    }
}

/// What the supervisor and the engine must agree on to use the same socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XskConfig {
    /// The division of the UMEM.
    pub layout: UmemLayout,
    /// The rings' sizes; the kernel cannot be asked for them.
    pub rings: RingSizes,
}

impl XskConfig {
    /// `layout` with the smallest rings it cannot overflow.
    pub fn new(layout: UmemLayout) -> Self {
        XskConfig {
            layout,
            rings: RingSizes::for_layout(&layout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_as_many_chunks_as_the_longest_frame_needs() {
        for (max_frame_len, chunks) in [(1514, 1), (4096, 1), (4097, 2), (9014, 3), (15360, 4)] {
            let layout = UmemLayout::new(64, 8, max_frame_len).unwrap();
            assert_eq!(layout.chunks_per_slot(), chunks);
            assert_eq!(layout.chunks(), 64 + 8 * chunks as usize);
        }
        assert!(UmemLayout::new(0, 8, 1514).is_err());
        assert!(UmemLayout::new(8, 0, 1514).is_err());
        assert!(UmemLayout::new(8, 8, 15361).is_err());
        assert!(UmemLayout::new(u32::MAX, u32::MAX, 9014).is_err());
    }

    #[test]
    fn addresses_out_of_rings_are_claims() {
        let layout = UmemLayout::new(4, 2, 9014).unwrap();
        assert_eq!(layout.check_received(256, 3840), Some(0));
        assert_eq!(layout.check_received(3 * 4096 + 256, 1), Some(3));
        // Runs over the end of its chunk; empty; a transmit chunk; far outside.
        assert_eq!(layout.check_received(256, 3841), None);
        assert_eq!(layout.check_received(256, 0), None);
        assert_eq!(layout.check_received(4 * 4096, 64), None);
        assert_eq!(layout.check_received(u64::MAX, u32::MAX), None);

        assert_eq!(layout.check_completed(4 * 4096), Some(4));
        assert_eq!(layout.check_completed(9 * 4096), Some(9));
        // A receive chunk; not a chunk's start; past the end; far outside.
        assert_eq!(layout.check_completed(3 * 4096), None);
        assert_eq!(layout.check_completed(4 * 4096 + 1), None);
        assert_eq!(layout.check_completed(10 * 4096), None);
        assert_eq!(layout.check_completed(!4095), None);
    }

    #[test]
    fn rings_that_could_overflow_are_refused() {
        let layout = UmemLayout::new(100, 10, 9014).unwrap();
        let good = RingSizes::for_layout(&layout);
        assert_eq!(
            good,
            RingSizes {
                fill: 128,
                rx: 128,
                tx: 32,
                completion: 32
            }
        );
        assert!(good.check(&layout).is_ok());
        assert!(RingSizes { fill: 64, ..good }.check(&layout).is_err());
        assert!(RingSizes { tx: 16, ..good }.check(&layout).is_err());
        assert!(
            RingSizes {
                completion: 16,
                ..good
            }
            .check(&layout)
            .is_err()
        );
        assert!(RingSizes { rx: 100, ..good }.check(&layout).is_err());
    }
}
