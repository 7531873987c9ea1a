//! What moves each metric.

/// In `whoever_watches_sees_what_happens`, asserted there.
pub const HERE: &[&str] = &[
    "portolan_arena_bytes",
    "portolan_clients",
    "portolan_engine_cpu_seconds_total",
    "portolan_engine_deaths_total",
    "portolan_engine_doorbells_total",
    "portolan_engine_epoch",
    "portolan_engine_looped_back_total",
    "portolan_engine_loops_busy_total",
    "portolan_engine_loops_total",
    "portolan_engine_outage_seconds",
    "portolan_engine_receive_tokens_total",
    "portolan_engine_send_tokens_total",
    "portolan_engine_send_latency_seconds",
    "portolan_engine_sleeps_total",
    "portolan_engine_takeover_seconds",
    "portolan_engine_takeovers_total",
    "portolan_events_total",
    "portolan_exporter_collections_total",
    "portolan_exporter_requests_total",
    "portolan_node_uptime_seconds",
    "portolan_peer_frame_bytes",
    "portolan_peer_outstanding_messages",
    "portolan_peer_rtt_seconds",
    "portolan_peer_up",
    "portolan_port_buffers_offered",
    "portolan_port_receive_tokens",
    "portolan_port_send_tokens",
    "portolan_port_sends_under_way",
    "portolan_ports_open",
    "portolan_steering_packets_total",
    "portolan_supervisor_connections_total",
    "portolan_supervisor_refusals_total",
    "portolan_supervisor_requests_total",
    "portolan_supervisor_turn_seconds",
    "portolan_transport_acks_sent_total",
    "portolan_transport_bytes_delivered_total",
    "portolan_transport_bytes_received_total",
    "portolan_transport_bytes_sent_total",
    "portolan_transport_chunks_received_total",
    "portolan_transport_chunks_sent_total",
    "portolan_transport_frames_malformed_total",
    "portolan_transport_frames_received_total",
    "portolan_transport_frames_sent_total",
    "portolan_transport_grants_sent_total",
    "portolan_transport_hellos_sent_total",
    "portolan_transport_malformed_magic_total",
    "portolan_transport_malformed_truncated_total",
    "portolan_transport_messages_delivered_total",
    "portolan_transport_nacks_received_total",
    "portolan_transport_nacks_sent_total",
    "portolan_transport_peer_restarts_total",
    "portolan_transport_sends_accepted_total",
    "portolan_transport_sends_delivered_total",
    "portolan_transport_sends_failed_total",
    "portolan_transport_streams_opened_total",
    "portolan_xsk_kicks_total",
    "portolan_xsk_rx_bytes_total",
    "portolan_xsk_rx_frames_total",
    "portolan_xsk_tx_bytes_total",
    "portolan_xsk_tx_completions_total",
    "portolan_xsk_tx_frames_total",
];

/// There, but the same as long as nothing is out of order or nobody changes the configuration: asserted to be on the page; that of the interface
/// also while it is down.
pub const STEADY: &[&str] = &[
    "portolan_interface_up",
    "portolan_arena_limit_bytes",
    "portolan_clients_limit",
    "portolan_engine_degraded",
    "portolan_engine_standby_ready",
    "portolan_engine_up",
    "portolan_engine_zero_copy",
    "portolan_node_info",
    "portolan_node_mtu_bytes",
    "portolan_ports_limit",
    "portolan_up",
    "portolan_peer_incompatible",
];

/// In these tests, which look at the counter by its name.
pub const ELSEWHERE: &[(&str, &[&str])] = &[
    ("transport/tests/dialogues.rs", &["no_route"]),
    ("testbed/tests/waiting.rs", &["alarms"]),
    ("daemon/src/engine/tests/questions.rs", &["offers"]),
    (
        "daemon/tests/engine_lab.rs",
        &["crossed", "crossing_received", "ports_failed"],
    ),
    (
        "testbed/tests/hostile_socket.rs",
        &["supervisor_connections_refused"],
    ),
    (
        "daemon/src/engine/tests/answers.rs",
        &["answers", "answers_ignored"],
    ),
    ("daemon/src/engine/path.rs", &["crossing_full"]),
    ("testbed/tests/drain.rs", &["send_tokens_refused"]),
    (
        "daemon/src/exporter/mod.rs",
        &["exporter_collections_failed"],
    ),
    (
        "testbed/tests/hostile_frames.rs",
        &["outer_source", "transport_payloads_corrupt"],
    ),
    (
        "daemon/src/engine/counters.rs",
        &[
            "outer_short",
            "outer_mac",
            "outer_protocol",
            "outer_ip_header",
            "outer_ip_checksum",
            "outer_fragment",
            "outer_address",
            "outer_udp_port",
            "outer_udp_length",
        ],
    ),
    (
        "transport/src/endpoint/counters.rs",
        &[
            "transport_malformed_too_long",
            "transport_malformed_version",
            "transport_malformed_header_length",
            "transport_malformed_header_crc",
            "transport_malformed_chunk_length",
            "transport_malformed_chunk_count",
            "transport_malformed_chunk_field",
            "transport_malformed_payload_length",
            "transport_malformed_trailing",
        ],
    ),
    (
        "transport/src/endpoint/mod.rs",
        &[
            "transport_frames_unknown_peer",
            "transport_frames_not_associated",
            "transport_chunks_unknown",
        ],
    ),
    (
        "transport/tests/idle.rs",
        &[
            "transport_frames_wrong_incarnation",
            "transport_peers_forgotten",
            "transport_resets_sent",
        ],
    ),
    (
        "transport/tests/failures.rs",
        &[
            "transport_frames_stale_engine",
            "transport_peers_unreachable",
            "transport_sends_maybe",
        ],
    ),
    (
        "transport/tests/spec/sending.rs",
        &[
            "transport_protocol_violations",
            "transport_tables_full",
            "transport_streams_closed",
        ],
    ),
    (
        "transport/tests/chunks/answers.rs",
        &["transport_stale_epochs"],
    ),
    (
        "transport/tests/chunks/handshake.rs",
        &[
            "transport_frames_for_others",
            "transport_resets_received",
            "transport_peer_takeovers",
            "transport_streams_reopened",
        ],
    ),
    (
        "transport/src/endpoint/tests/shares.rs",
        &["transport_paths_short", "transport_credit_stalls"],
    ),
    (
        "transport/tests/spec/peers.rs",
        &["transport_peers_incompatible", "transport_streams_refused"],
    ),
    (
        "transport/tests/recovery.rs",
        &[
            "transport_duplicates",
            "transport_no_buffer",
            "transport_tokens_taken_back",
            "transport_losses_found",
            "transport_messages_reneged",
            "transport_retransmitted_bytes",
            "transport_retransmits",
            "transport_ranges_full",
        ],
    ),
    (
        "transport/tests/papers/go_back_n.rs",
        &["transport_out_of_order", "transport_data_out_of_order"],
    ),
    (
        "transport/tests/chunks/messages.rs",
        &["transport_data_duplicates", "transport_data_unexpected"],
    ),
    (
        "transport/src/endpoint/tests/statuses.rs",
        &["transport_probes_sent", "transport_memory_faults"],
    ),
    (
        "transport/src/endpoint/tests/grants.rs",
        &["transport_grants_lapsed"],
    ),
    ("transport/tests/allocations.rs", &["transport_timeouts"]),
    (
        "daemon/src/xsk/tests/dialogues.rs",
        &[
            "xsk_rx_too_many_segments",
            "xsk_rx_bad_frames",
            "xsk_rx_bogus_descriptors",
            "xsk_tx_bad_lengths",
            "xsk_tx_bogus_completions",
            "xsk_kick_eagain",
            "xsk_kick_ebusy",
            "xsk_kick_enetdown",
            "xsk_kick_enobufs",
            "xsk_kick_failed",
            "xsk_rx_wakeups",
            "xsk_corrupt_rings",
        ],
    ),
];

/// Asserted by no test, and why. To become shorter.
pub const NOWHERE: &[(&str, &str)] = &[
    (
        "portolan_engine_crossing_bad_total",
        "the ring would have to be corrupted by the other engine; its own tests look at the ring",
    ),
    (
        "portolan_engine_link_down_total",
        "a frame would have to be due in the millisecond after the kernel said ENETDOWN: chance",
    ),
    (
        "portolan_engine_poisoned_frames_total",
        "two deaths on one frame: steps/ looks at what becomes of the frame",
    ),
];
