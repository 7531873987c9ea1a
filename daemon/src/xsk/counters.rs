//! What the socket's owner counts. One table gives names, help text and values.

portolan_transport::counted! {
    /// Counted by the owner of the socket since it adopted it.
    pub struct XskCounters {
        /// Frames received and handed on.
        rx_frames,
        /// Bytes in them.
        rx_bytes,
        /// Received frames of more segments than any frame may have: dropped.
        rx_too_many_segments,
        /// Received frames with a bogus descriptor: dropped.
        rx_bad_frames,
        /// Receive descriptors that name no chunk the kernel had: never trusted.
        rx_bogus_descriptors,
        /// Frames submitted.
        tx_frames,
        /// Bytes in them.
        tx_bytes,
        /// Submissions with a length of zero or beyond the longest frame: dropped.
        tx_bad_lengths,
        /// Transmit descriptors completed.
        tx_completions,
        /// Completed addresses that name no chunk the kernel had: never trusted.
        tx_bogus_completions,
        /// Transmit kicks: system calls.
        kicks,
        /// Kicks answered EAGAIN: budget spent or completion ring full.
        kick_eagain,
        /// Kicks answered EBUSY: a frame was dropped below us, and completed.
        kick_ebusy,
        /// Kicks answered ENOBUFS or ENOMEM: later.
        kick_enobufs,
        /// Kicks answered ENETDOWN: the link is down.
        kick_enetdown,
        /// Kicks answered with any other error.
        kick_failed,
        /// Receive wake-ups: system calls.
        rx_wakeups,
        /// Times a ring's indices could not be true.
        corrupt_rings,
    }
}
