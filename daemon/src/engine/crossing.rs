//! The bounded ring on which frames cross from one engine of a node to another.
//!
//! Two uses: a frame that arrived on a queue whose engine does not own the receiving port, and a message between two ports of this
//! node that different engines own. A full ring drops the frame; the transport sends it again.

/// Bytes of a slot: a length word and the longest frame.
pub const SLOT_BYTES: usize = 16 * 1024;
/// Slots of a ring.
pub const SLOTS: usize = 256;
/// Bytes of a ring's memfd: a page for the two indices, then the slots.
pub const CROSSING_BYTES: usize = 4096 + SLOTS * SLOT_BYTES;
