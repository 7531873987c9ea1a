//! What happened, counted. One table yields the fields, their help, metrics and documentation.

use crate::wire::WireError;

crate::counted! {
    /// What happened, counted since this engine started.
    pub struct Counters {
        /// Frames handed to the transport.
        frames_received,
        /// Frames the transport wrote.
        frames_sent,
        /// Transport bytes received.
        bytes_received,
        /// Transport bytes written.
        bytes_sent,
        /// Chunks received.
        chunks_received,
        /// Chunks written.
        chunks_sent,
        /// Frames the wire layer refused, for one of the reasons that follow.
        frames_malformed,
        /// Frames shorter than their header.
        malformed_truncated,
        /// Frames longer than 65535 bytes.
        malformed_too_long,
        /// Frames that do not start with our magic number.
        malformed_magic,
        /// Frames of a wire version this build does not speak.
        malformed_version,
        /// Frames whose header length is impossible.
        malformed_header_length,
        /// Frames whose header checksum does not match.
        malformed_header_crc,
        /// Frames with a chunk header of impossible length.
        malformed_chunk_length,
        /// Frames whose chunk count does not match their header length.
        malformed_chunk_count,
        /// Frames with an impossible value in a chunk header.
        malformed_chunk_field,
        /// Frames whose payloads are longer than they are.
        malformed_payload_length,
        /// Frames with bytes after their last payload.
        malformed_trailing,
        /// Frames for another node or queue.
        frames_not_for_us,
        /// Frames from a node or queue that is not configured.
        frames_unknown_peer,
        /// Frames that name an incarnation we do not know.
        frames_wrong_incarnation,
        /// Frames from an engine that has a successor.
        frames_stale_engine,
        /// Frames from a peer we are not associated with.
        frames_not_associated,
        /// Chunks of a kind this version does not know.
        chunks_unknown,
        /// Chunks that no correct peer sends, ignored.
        protocol_violations,
        /// Chunks of an epoch that has passed, ignored.
        stale_epochs,
        /// Payloads whose checksum did not match.
        payloads_corrupt,
        /// HELLOs sent.
        hellos_sent,
        /// RESETs sent.
        resets_sent,
        /// RESETs received and believed.
        resets_received,
        /// Peers that came back with a new incarnation.
        peer_restarts,
        /// Peers whose engine was replaced.
        peer_takeovers,
        /// Peers that fell silent for too long.
        peers_unreachable,
        /// Idle peers forgotten but for their durable record.
        peers_forgotten,
        /// Paths that did not carry the frames both ends allow.
        paths_short,
        /// HELLOs of another cluster, version or policy.
        peers_incompatible,
        /// Sends accepted.
        sends_accepted,
        /// Sends that ended Delivered.
        sends_delivered,
        /// Sends that ended NotDelivered.
        sends_failed,
        /// Sends that ended MaybeDelivered.
        sends_maybe,
        /// Messages committed to a receive buffer.
        messages_delivered,
        /// Payload bytes committed to receive buffers.
        bytes_delivered,
        /// First chunks that had come before; acknowledged again.
        duplicates,
        /// First chunks that came too early, dropped.
        out_of_order,
        /// Bytes of long messages that had come before.
        data_duplicates,
        /// DATA that no open transfer or grant covers, dropped.
        data_unexpected,
        /// DATA beyond a hole, dropped because recovery goes back to the hole.
        data_out_of_order,
        /// DATA dropped because its message has too many holes to remember.
        ranges_full,
        /// First chunks dropped because no receive token fits.
        no_buffer,
        /// Tokens taken back from a later message for one that is next in order.
        tokens_taken_back,
        /// NACKs sent.
        nacks_sent,
        /// NACKs received.
        nacks_received,
        /// First chunks sent again.
        retransmits,
        /// First chunks found lost by what had arrived when the peer answered.
        losses_found,
        /// Messages the receiver had and forgot, for another's sake.
        messages_reneged,
        /// Payload bytes of long messages sent again.
        retransmitted_bytes,
        /// Retransmission timers that fired.
        timeouts,
        /// PROBEs sent.
        probes_sent,
        /// ACKs sent.
        acks_sent,
        /// Grants (CTS) sent.
        grants_sent,
        /// Long messages whose senders did not use what they were granted, for so long that others got it.
        grants_lapsed,
        /// Times a message waited for credit.
        credit_stalls,
        /// Receiving streams opened.
        streams_opened,
        /// Receiving streams forgotten.
        streams_closed,
        /// Streams refused because their START was below the floor or missing.
        streams_refused,
        /// Streams that went on under a new epoch.
        streams_reopened,
        /// Records, peers or streams refused because a table was full.
        tables_full,
        /// Client memory that could not be read or written.
        memory_faults,
    }
}

impl Counters {
    /// Counts a frame the wire layer refused, and why (wire.md §7).
    pub(super) fn count_malformed(&mut self, error: WireError) {
        self.frames_malformed += 1;
        *match error {
            WireError::Truncated => &mut self.malformed_truncated,
            WireError::TooLong => &mut self.malformed_too_long,
            WireError::Magic => &mut self.malformed_magic,
            WireError::Version => &mut self.malformed_version,
            WireError::HeaderLength => &mut self.malformed_header_length,
            WireError::HeaderCrc => &mut self.malformed_header_crc,
            WireError::ChunkLength => &mut self.malformed_chunk_length,
            WireError::ChunkCount => &mut self.malformed_chunk_count,
            WireError::ChunkField => &mut self.malformed_chunk_field,
            WireError::PayloadLength => &mut self.malformed_payload_length,
            WireError::Trailing => &mut self.malformed_trailing,
        } += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expect: each reason has the counter of its name, and only that moves beside the sum.
    #[test]
    fn every_wire_error_has_its_counter() {
        for error in WireError::ALL {
            let mut counters = Counters::default();
            counters.count_malformed(*error);
            let mut moved: alloc::vec::Vec<_> = counters
                .iter()
                .filter(|(_, _, value)| *value == 1)
                .map(|(name, _, _)| name)
                .collect();
            moved.retain(|name| *name != "frames_malformed");
            assert_eq!(moved.len(), 1, "{error:?}");
            assert_eq!(moved[0].strip_prefix("malformed_"), Some(error.name()));
        }
    }

    #[test]
    fn every_counter_has_name_and_help() {
        let counters = Counters {
            duplicates: 3,
            ..Counters::default()
        };
        assert!(
            counters
                .iter()
                .all(|(name, help, _)| !name.is_empty() && help.ends_with('.'))
        );
        assert!(counters.iter().any(|row| row
            == (
                "duplicates",
                "First chunks that had come before; acknowledged again.",
                3
            )));
    }
}
