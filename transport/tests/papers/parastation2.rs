//! ParaStation2 (000), profile `parastation2`: Table 1, one test per row; the states of Figure 3; the window.
//! transport.md §4.2, §5.1, §6.3, §7.3
//!
//! The paper's packets are messages here. An ACK names one of them: `ACK 3` acknowledges number 2 and nothing else.

use portolan_sim::harness::{MS, US};
use portolan_sim::puppet::{MAX_LEN, NOTHING, Puppet};
use portolan_transport::policy::Profile;

use crate::dialogue;

fn puppet(tokens: usize) -> Puppet {
    Puppet::new(Profile::ParaStation2.policy(), tokens)
}

/// An endpoint that received 0, 1 and 2, and expects 3.
fn receiver() -> Puppet {
    let mut p = puppet(8);
    for number in 0..3 {
        let packet = p.eager(number);
        p.says(packet);
    }
    p.transcript();
    p
}

/// An endpoint whose packet 0 was acknowledged and whose packets 1, 2 and 3 are in transit.
fn sender() -> Puppet {
    let mut p = puppet(8);
    p.sends(100);
    p.says(p.ack(1));
    for _ in 1..4 {
        p.sends(100);
    }
    p.transcript();
    p
}

// ---- Table 1 ----

// DATA < expected: its ACK was lost. Expect: that ACK again.
#[test]
fn table_1_data_older_is_acknowledged_again() {
    let mut p = receiver();
    let old = p.eager(1);
    assert_eq!(p.says(old), ["ACK 2", "duplicates +1"]);
    assert_eq!(p.delivered(), 3);
}

// DATA = expected, and there is a buffer. Expect: accepted and acknowledged, each packet by itself.
#[test]
fn table_1_data_expected_is_accepted() {
    let mut p = receiver();
    let both = vec![p.eager(3), p.eager(4)];
    assert_eq!(
        p.says_all(both),
        ["delivers 3", "delivers 4", "ACK 4", "ACK 5"]
    );
}

// DATA = expected, and there is none (Figure 3). Expect: NACK, and the packet is dropped.
#[test]
fn table_1_data_expected_without_a_buffer_is_nacked() {
    let mut p = puppet(1);
    let (first, second) = (p.eager(0), p.eager(1));
    p.says(first);
    assert_eq!(p.says(second), ["NACK 1 no buffer", "no_buffer +1"]);
    assert_eq!((p.delivered(), p.host.claimed()), (1, 0));
}

// DATA > expected: something was lost. Expect: ignored, and NACKed, every time.
#[test]
fn table_1_data_newer_is_ignored_and_nacked() {
    let mut p = receiver();
    for number in [4, 5, 4] {
        let early = p.eager(number);
        assert_eq!(p.says(early), ["NACK 3 gap", "out_of_order +1"]);
    }
    assert_eq!((p.delivered(), p.host.claimed()), (3, 0));
}

// ACK < expected: a duplicate. Expect: ignored.
#[test]
fn table_1_ack_older_is_ignored() {
    let mut p = sender();
    assert_eq!(p.says(p.ack(1)), NOTHING);
    assert_eq!(p.status(1), None);
}

// ACK = expected. Expect: that buffer is released, and no other.
#[test]
fn table_1_ack_expected_releases_the_buffer() {
    let mut p = sender();
    assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
    assert_eq!((p.status(2), p.status(3)), (None, None));
}

// ACK > expected: the ACKs before it were lost. Expect: those buffers are sent again, which makes the receiver repeat its ACKs. The
// paper ignores this ACK; here its own packet is released, since it says that it was received.
#[test]
fn table_1_ack_newer_marks_the_older_for_retransmission() {
    let mut p = sender();
    assert_eq!(
        p.says(p.ack(4)),
        [
            "completes 3 Delivered",
            "EAGER 1, 100 bytes",
            "EAGER 2, 100 bytes",
            "retransmits +2"
        ]
    );
    assert_eq!((p.status(1), p.status(2)), (None, None));
    assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
    assert_eq!(p.says(p.ack(3)), ["completes 2 Delivered"]);
}

// NACK: the buffer is marked for retransmission if it is in transit. Expect: it and what follows go out again; one that is
// marked already is not marked twice, and one that was never sent not at all.
#[test]
fn table_1_nack_marks_what_is_in_transit() {
    let mut p = sender();
    let nack = p.nack(2, 1);
    assert_eq!(
        p.says_all(vec![nack.clone(), nack]),
        ["EAGER 2, 100 bytes", "EAGER 3, 100 bytes", "retransmits +2"]
    );
    assert_eq!(p.says(p.nack(4, 1)), NOTHING);
}

// CRC error. Expect: ignored, nothing else, whatever the packet is.
#[test]
fn table_1_crc_errors_are_ignored() {
    let mut p = sender();
    let says = [p.eager(0), p.ack(2), p.nack(2, 1)];
    for say in says {
        let mut frame = p.frame(&[say]);
        frame[60] ^= 4;
        assert_eq!(p.says_bytes(&frame), ["dropped: Wire(HeaderCrc)"]);
        portolan_transport::wire::reseal(&mut frame);
    }
    assert_eq!((p.delivered(), p.status(1)), (0, None));
}

// ---- Figure 3: the buffers' states, seen from outside ----

// IDLE → READY → INTRANSIT → IDLE: a packet is stored, sent once, and released by its ACK; a NACK that comes later finds nothing.
#[test]
fn figure_3_send_buffer_idle_ready_intransit() {
    let mut p = puppet(0);
    for _ in 0..8 {
        p.sends(100);
    }
    // READY: stored, not sent, because eight are in transit.
    assert_eq!(p.sends(100), NOTHING);
    assert_eq!(p.host.records(), (1, 0));
    assert_eq!(p.waits(MS), NOTHING);
    // The oldest is IDLE, the ninth INTRANSIT.
    assert_eq!(
        p.says(p.ack(1)),
        ["completes 0 Delivered", "EAGER 8, 100 bytes"]
    );
    let outcome = p.says(p.nack(0, 1));
    assert!(
        !outcome.iter().any(|line| line.starts_with("EAGER")),
        "{outcome:?}"
    );
}

// INTRANSIT → RETRANSMIT → INTRANSIT, by NACK and by timeout, as often as it takes.
#[test]
fn figure_3_send_buffer_retransmit() {
    let mut p = puppet(0);
    p.sends(100);
    p.sends(100);
    p.says(p.ack(1));
    p.transcript();
    for _ in 0..3 {
        p.says(p.nack(1, 1));
    }
    dialogue(
        &mut p,
        "> NACK 1 gap
         < EAGER 1, 100 bytes
         > NACK 1 gap
         < EAGER 1, 100 bytes
         > NACK 1 gap
         < EAGER 1, 100 bytes",
    );
    let timeout = u64::from(Profile::ParaStation2.policy().rto_min_us) * US;
    let outcome = p.waits(4 * timeout);
    assert_eq!(outcome[0], "EAGER 1, 100 bytes");
    assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
    assert_eq!(p.waits(100 * MS), NOTHING);
}

// The packet that would eat the last buffer is NACKed and dropped. Expect: control is received and answered meanwhile, in both
// directions, and with a buffer the packet is taken.
#[test]
fn figure_3_the_last_buffer_is_kept_for_control() {
    let mut p = puppet(0);
    p.sends(100);
    let (packet, asks) = (p.eager(0), p.probe(0, 100));
    let outcome = p.says(packet.clone());
    assert_eq!(outcome[0], "NACK 0 no buffer");
    assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
    let outcome = p.says(asks);
    assert!(outcome.contains(&"NACK 0 no buffer".into()), "{outcome:?}");
    assert_eq!(p.provides(MAX_LEN), ["READY 0"]);
    assert_eq!(p.says(packet), ["delivers 0", "ACK 1"]);
}

// ---- the rest of the protocol ----

// After a NACK the sender goes back and goes on: the paper knows no Stall.
#[test]
fn go_back_n_without_a_stall() {
    let mut p = sender();
    p.says(p.nack(1, 1));
    p.sends(100);
    dialogue(
        &mut p,
        "> NACK 1 gap
         < EAGER 1, 100 bytes
         < EAGER 2, 100 bytes
         < EAGER 3, 100 bytes
         < EAGER 4, 100 bytes",
    );
}

// A lost ACK: the timer sends the packet again, the ACK comes again.
#[test]
fn a_lost_ack_costs_a_timeout() {
    let mut p = receiver();
    let packet = p.eager(3);
    p.says(packet.clone()); // its ACK is lost
    p.waits(10 * MS);
    p.says(packet);
    dialogue(
        &mut p,
        "> EAGER 3, 100 bytes
         < ACK 4
         > EAGER 3, 100 bytes
         < ACK 4",
    );
    assert_eq!(p.delivered(), 4);
}
