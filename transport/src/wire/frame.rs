//! The frame header, wire.md §2.

/// 40 bytes at the start of every frame, under the header CRC together with all chunk headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Sending node.
    pub src_node: u16,
    /// Receiving node.
    pub dst_node: u16,
    /// Sending engine.
    pub src_queue: u8,
    /// Receiving engine.
    pub dst_queue: u8,
    /// The sender's incarnation, truncated.
    pub src_incarnation: u32,
    /// The receiver's incarnation as the sender knows it, truncated; 0 before HELLO-ACK.
    pub dst_incarnation: u32,
    /// The sending engine's epoch.
    pub engine_epoch: u32,
    /// UMEM buffers' worth of credit-bearing frames sent to this peer so far, this frame included (serial).
    pub sent_buffers: u32,
    /// Absolute limit the receiver of this frame may raise its own `sent_buffers` to (serial).
    pub credit_limit: u32,
}

/// Bytes of [`FrameHeader`] on the wire.
pub const FRAME_HEADER_LEN: usize = 40;
