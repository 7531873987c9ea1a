//! The `Policy`: every choice on which the five papers differ, as one validated value.
//!
//! The transport issue completes it; what is here is what the default needs.

/// How messages and frames recover from loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Messages go back to the first one missing, with Stall on both sides (Tam §4.2); the data of a long message recovers
    /// selectively, because every chunk names its offset.
    GoBackN,
}

/// When a commit is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    /// At once.
    Immediate,
    /// With the next frame to the peer, or after `delay_us`.
    Delayed {
        /// Longest wait, in microseconds.
        delay_us: u32,
    },
}

/// A validated protocol policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Messages under way per stream.
    pub window_messages: u32,
    /// Recovery of lost messages.
    pub recovery: Recovery,
    /// Acknowledgement.
    pub ack: Ack,
    /// Receive buffers (UMEM frames) every peer may fill unasked.
    pub eager_buffers: u32,
    /// Bytes granted ahead to one long message.
    pub grant_bytes: u32,
    /// Bytes granted ahead to all long messages together (RMPP Figure 8's budget).
    pub grant_budget_bytes: u32,
    /// Retransmission timeout's bounds, in microseconds.
    pub rto_min_us: u32,
    /// Upper bound after backoff.
    pub rto_max_us: u32,
    /// Silence after which a peer is unreachable, in milliseconds.
    pub unreachable_after_ms: u32,
    /// Silence after which an idle stream is closed and its record reclaimed, in milliseconds.
    pub stream_idle_ms: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            window_messages: 64,
            recovery: Recovery::GoBackN,
            ack: Ack::Delayed { delay_us: 50 },
            eager_buffers: 256,
            grant_bytes: 256 * 1024,
            grant_budget_bytes: 2 * 1024 * 1024,
            rto_min_us: 2_000,
            rto_max_us: 200_000,
            unreachable_after_ms: 5_000,
            stream_idle_ms: 60_000,
        }
    }
}
