//! Tam's go-back-N with Stall (003 §4.2.1), profile `gbn-stall`: Figure 4.1 (a), the sender, and (b), the receiver.
//! transport.md §6.1, §7.3, §7.5

use portolan_sim::harness::{MS, US};
use portolan_sim::puppet::{NOTHING, Puppet};
use portolan_transport::policy::{AckMode, Policy, Profile};

use crate::dialogue;

/// Longer than the profile's acknowledgement waits, shorter than any timer.
const SOON: u64 = 100 * US;

fn policy() -> Policy {
    Profile::GbnStall.policy()
}

fn puppet() -> Puppet {
    Puppet::new(policy(), 8)
}

/// An endpoint that received message 0.
fn receiver() -> Puppet {
    let mut p = puppet();
    let first = p.eager(0).acked(AckMode::Immediate);
    p.says(first);
    p.waits(SOON);
    p.transcript();
    p
}

/// An endpoint whose messages 0, 1, 2 and 3 are outstanding, with 0 acknowledged.
fn sender() -> Puppet {
    let mut p = puppet();
    p.rtt = 50 * US;
    p.sends(100);
    p.waits(50 * US);
    p.says(p.ack(1));
    for _ in 1..4 {
        p.sends(100);
    }
    p.transcript();
    p
}

// ---- Figure 4.1 (b): the receiver ----

// Message 1 is lost. Expect: one Nack for the first one out of order; then silence, whatever else comes; the expected one ends the
// Stall, and is answered by a Pack.
#[test]
fn figure_4_1_b_one_nack_then_silence_until_the_expected_one() {
    let mut p = receiver();
    for number in 2..6 {
        let early = p.eager(number);
        p.says(early);
    }
    p.waits(SOON);
    for number in 1..3 {
        let next = p.eager(number);
        p.says(next);
    }
    p.waits(SOON);
    dialogue(
        &mut p,
        "> EAGER 2, 100 bytes
         < NACK 1 gap
         > EAGER 3, 100 bytes
         > EAGER 4, 100 bytes
         > EAGER 5, 100 bytes
         > EAGER 1, 100 bytes
         > EAGER 2, 100 bytes
         < ACK 3",
    );
    assert_eq!((p.delivered(), p.host.claimed()), (3, 0));
    assert_eq!(p.counter("out_of_order"), 4);
}

// Bytes of a long message beyond a hole. Expect: dropped and counted, since the sender goes back to the hole; then it arrives.
#[test]
fn bytes_beyond_a_hole_are_dropped() {
    let mut p = receiver();
    let (request, early) = (p.rts(1, 3000, 1000), p.data(1, 2000, 3000));
    p.says(request);
    p.says(early);
    assert_eq!(p.counter("data_out_of_order"), 1);
    for from in [1000, 2000] {
        let data = p.data(1, from, from + 1000);
        p.says(data);
    }
    assert_eq!((p.delivered(), p.host.claimed()), (2, 0));
}

// After the Stall, the next gap is news again.
#[test]
fn figure_4_1_b_the_next_gap_is_nacked_again() {
    let mut p = receiver();
    let (early, expected, later) = (p.eager(2), p.eager(1), p.eager(4));
    assert_eq!(p.says(early)[0], "NACK 1 gap");
    assert_eq!(p.says(expected)[0], "delivers 1");
    let outcome = p.says(later);
    assert!(outcome.contains(&"NACK 2 gap".into()), "{outcome:?}");
}

// What came before is acknowledged again, in the Stall too.
#[test]
fn figure_4_1_b_old_packets_are_acknowledged_in_the_stall() {
    let mut p = receiver();
    let (early, old) = (p.eager(2), p.eager(0));
    p.says(early);
    assert_eq!(p.says(old), ["ACK 1", "duplicates +1"]);
}

// ---- Figure 4.1 (a): the sender ----

// Nack for 1. Expect: back to 1, all outstanding again, and nothing new until a positive acknowledgement.
#[test]
fn figure_4_1_a_a_nack_stalls_the_sender() {
    let mut p = sender();
    p.says(p.nack(1, 1));
    p.sends(100);
    p.sends(100);
    p.says(p.ack(2));
    dialogue(
        &mut p,
        "> NACK 1 gap
         < EAGER 1, 100 bytes
         < EAGER 2, 100 bytes
         < EAGER 3, 100 bytes
         > ACK 2
         < EAGER 4, 100 bytes
         < EAGER 5, 100 bytes",
    );
    assert_eq!(p.counter("retransmits"), 3);
}

// The Nack is the fast retransmission: no timer was waited for, and a second one for the same number within a round trip goes unheard.
#[test]
fn figure_4_1_a_one_going_back_per_number_and_round_trip() {
    let mut p = sender();
    p.waits(50 * US);
    // Written before what was sent again was heard.
    p.echo = p.last_heard();
    assert_eq!(p.says(p.nack(1, 1)).len(), 4);
    assert_eq!(p.says(p.nack(1, 1)), NOTHING);
    p.echo = None;
    p.waits(50 * US);
    assert_eq!(p.says(p.nack(1, 1)).len(), 4);
    assert_eq!(p.counter("timeouts"), 0);
}

// ---- acknowledgements as the layer above asks ----

// Delayed, as the policy says: several messages, one acknowledgement, within its bound.
#[test]
fn acknowledgements_are_delayed() {
    let mut p = receiver();
    for number in 1..4 {
        let message = p.eager(number);
        let delivered = format!("delivers {number}");
        assert_eq!(p.says(message), [delivered.as_str()]);
    }
    assert_eq!(p.waits(SOON), ["ACK 4"]);
}
// Going back fails. Expect: in the Stall nothing is sent but by the timer, which backs off; the first positive acknowledgement ends it.
#[test]
fn figure_4_1_a_in_the_stall_only_timers_send() {
    let mut p = sender();
    p.says(p.nack(1, 1));
    p.sends(100);
    p.transcript();
    let (mut last, mut gaps) = (p.now, Vec::new());
    while gaps.len() < 4 {
        let outcome = p.waits(100 * US);
        if !outcome.is_empty() {
            assert_eq!(outcome[0], "EAGER 1, 100 bytes");
            assert!(!outcome.iter().any(|line| line.starts_with("EAGER 4")));
            gaps.push(p.now - last);
            last = p.now;
        }
    }
    assert!(gaps[0] >= u64::from(policy().rto_min_us) * US - 100 * US);
    assert!(gaps.is_sorted() && gaps[3] >= 4 * gaps[0], "{gaps:?}");
    let outcome = p.says(p.ack(2));
    assert!(
        outcome.contains(&"EAGER 4, 100 bytes".into()),
        "{outcome:?}"
    );
}

// At once, because the sender asks for it; and any frame that goes anyway takes the others along.
#[test]
fn acknowledgements_are_immediate_or_piggybacked_per_message() {
    let mut p = receiver();
    let now = p.eager(1).acked(AckMode::Immediate);
    assert_eq!(p.says(now), ["delivers 1", "ACK 2"]);
    let lazy = p.eager(2).acked(AckMode::Lazy);
    assert_eq!(p.says(lazy), ["delivers 2"]);
    assert_eq!(p.waits(40 * US), NOTHING);
    assert_eq!(p.sends(10), ["ACK 3", "EAGER 0 start 0, 10 bytes"]);
    // Without one it is not later than the sender's timer can be.
    let lazy = p.eager(3).acked(AckMode::Lazy);
    assert_eq!(p.says(lazy), ["delivers 3"]);
    assert_eq!(p.waits(2 * MS)[0], "ACK 4");
}

// ---- what the paper rejected: selective repeat, for its buffers and its copy; the default here. transport.md §7.1, §7.2 ----

/// Like `sender`, under the default policy, with five messages outstanding.
fn selective_sender() -> Puppet {
    let mut p = Puppet::new(Policy::default(), 8);
    p.rtt = 50 * US;
    p.sends(100);
    p.waits(50 * US);
    p.says(p.ack(1));
    for _ in 1..6 {
        p.sends(100);
        p.waits(20 * US);
    }
    p.waits(50 * US);
    p
}

// Messages 1 and 3 were lost; 2, 4 and 5 are listed. Expect: these two again, and nothing else; not twice for answers that were written
// before they can have arrived; and new messages go on.
#[test]
fn selective_repeat_sends_again_exactly_what_is_lost() {
    let mut p = selective_sender();
    p.echo = p.last_heard();
    let answer = p.ack_with(1, &[2, 4, 5]);
    assert_eq!(
        p.says(answer.clone()),
        [
            "EAGER 1, 100 bytes",
            "EAGER 3, 100 bytes",
            "retransmits +2",
            "losses_found +2"
        ]
    );
    assert_eq!(p.says(answer), NOTHING);
    assert_eq!(p.sends(100), ["EAGER 6, 100 bytes"]);
    p.echo = None;
    let outcome = p.says(p.ack(6));
    assert_eq!(outcome.len(), 5, "{outcome:?}");
}

// What comes early is placed in the buffer it is for: no copy is made and nothing is buffered elsewhere. Expect: one token per message, and
// commits in order when the first comes.
#[test]
fn selective_repeat_places_early_messages_in_their_buffers() {
    let mut p = Puppet::new(Policy::default(), 8);
    for number in [3, 1, 2] {
        let early = p.eager(number).start(Some(0));
        p.says(early);
    }
    assert_eq!((p.delivered(), p.host.claimed()), (0, 3));
    let first = p.eager(0);
    let outcome = p.says(first);
    assert_eq!(
        outcome[..4],
        ["delivers 0", "delivers 1", "delivers 2", "delivers 3"]
    );
    assert_eq!(p.host.claimed(), 0);
}

// The next message in order finds no token. Expect: it takes the one of the youngest early message, which is listed no more and comes again.
#[test]
fn selective_repeat_gives_its_buffer_to_who_is_next() {
    let mut p = Puppet::new(Policy::default(), 2);
    let (two, one, zero) = (p.eager(2), p.eager(1), p.eager(0));
    let heard = [two, one].map(|say| p.says(say.start(Some(0)))).concat();
    assert!(heard.contains(&"ACK 0 +1 +2".into()), "{heard:?}");
    let outcome = p.says(zero);
    assert_eq!(outcome[..1], ["delivers 0"]);
    assert!(
        outcome.contains(&"tokens_taken_back +1".into()),
        "{outcome:?}"
    );
    assert!(
        !outcome.iter().any(|line| line.contains("delivers 1")),
        "{outcome:?}"
    );
}
