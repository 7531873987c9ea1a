//! RMPP (001), profile `rmpp`: Figures 5 and 6 as dialogues, Figure 8 as a property, and what §3.5 says of loss.
//! transport.md §3.2, §4.5, §5.3, §5.7, §7.4, §8.2
//!
//! | RMPP | here |
//! |---|---|
//! | RTS, LAST_RTS | RTS, EAGER |
//! | CTS\[n\] | CTS: absolute, in bytes; n packets are the bytes granted and not sent |
//! | DATA\[s\], STOP_DATA, LAST_DATA | DATA by offset; a block ends where the grant does, the message at its length |
//! | MSGEND | MSGEND of a long message, ACK of a short one |
//! | GCH | CLOSE after the stream has been idle |
//! | NULL, MSGDROP | the same, confirmed |

use portolan_sim::harness::{MS, Rng};
use portolan_sim::puppet::{FIRST, NOTHING, Puppet};
use portolan_transport::host::Verdict;
use portolan_transport::policy::{Policy, Profile};

use crate::dialogue;

/// Bytes of a packet: DATA in a frame of 1458 bytes.
const PACKET: u32 = 1_382;
/// Bytes that travel with a request that opens its stream.
const FIRST_PACKET: u32 = 1_370;
/// The paper's MAX_DATA_PKTS.
const MAX_DATA_PKTS: u32 = 16;

fn policy() -> Policy {
    Policy {
        grant_bytes: MAX_DATA_PKTS * PACKET,
        ..Profile::Rmpp.policy()
    }
}

fn puppet() -> Puppet {
    Puppet::new(policy(), 20)
}

/// How long the timer takes at most, while nothing was lost before.
const TIMEOUT: u64 = 10 * MS;

/// Time until an idle stream is closed.
fn idle() -> u64 {
    u64::from(policy().stream_idle_ms) * MS
}

/// `count` packets of DATA as the endpoint sends them, from this packet on.
fn block(first: u32, count: u32) -> String {
    let at = |packet: u32| FIRST_PACKET + packet * PACKET;
    let line = |packet| format!("< DATA 0 {}..{}\n", at(packet), at(packet + 1));
    (first..first + count).map(line).collect()
}

// ---- Figure 5: a short message ----

// The request carries all the data; its end is acknowledged; the hint that the receiver may forget follows when the stream is idle,
// and is answered, which the paper's is not.
#[test]
fn figure_5_a_short_message_sent() {
    let mut p = puppet();
    p.sends(1_000);
    p.says(p.ack(1));
    p.waits(idle());
    p.says(p.closed());
    dialogue(
        &mut p,
        "< EAGER 0 start 0, 1000 bytes
         > ACK 1
         < CLOSE 1
         > CLOSED",
    );
    assert_eq!(p.host.records(), (0, 0));
}

#[test]
fn figure_5_a_short_message_received() {
    let mut p = puppet();
    let message = p.eager_of(0, 1_000);
    p.says(message);
    p.says(p.close(1));
    dialogue(
        &mut p,
        "> EAGER 0 start 0, 1000 bytes
         < ACK 1
         > CLOSE 1
         < CLOSED",
    );
    assert_eq!((p.delivered(), p.host.records()), (1, (0, 0)));
}

// ---- Figure 6: a long message ----

// Three grants of n₁, n₂ and n₃ packets. Expect: after each exactly so many packets, then silence until the next.
#[test]
fn figure_6_a_long_message_sent() {
    let mut p = puppet();
    let (n1, n2, n3) = (16, 16, 3);
    let at = |packets: u32| FIRST_PACKET + packets * PACKET;
    let total = at(n1 + n2 + n3);
    p.sends(total);
    p.says(p.cts(0, at(n1), &[]));
    assert_eq!(p.waits(MS), NOTHING); // STOP_DATA
    p.says(p.cts(0, at(n1 + n2), &[]));
    assert_eq!(p.waits(MS), NOTHING);
    p.says(p.cts(0, total, &[]));
    p.says(p.msg_end(0));
    p.waits(idle());
    dialogue(
        &mut p,
        &format!(
            "< RTS 0 start 0, {FIRST_PACKET} of {total} bytes
             > CTS 0 to {}
             {}
             > CTS 0 to {}
             {}
             > CTS 0 to {total}
             {}
             > MSGEND 0
             < CLOSE 1",
            at(n1),
            block(0, n1),
            at(n1 + n2),
            block(n1, n2),
            block(n1 + n2, n3)
        ),
    );
}

// The same, received. Expect: a grant of 16 packets at once, the next when half of it has come, so that the sender need not stop, and the
// end when all has.
#[test]
fn figure_6_a_long_message_received() {
    let mut p = puppet();
    let at = |packets: u32| FIRST_PACKET + packets * PACKET;
    let total = at(35);
    let request = p.rts(0, total, FIRST_PACKET);
    let mut answers = p.says(request);
    answers.retain(|line| line.starts_with("CTS"));
    assert_eq!(answers, [format!("CTS 0 to {}", at(16))]);
    let mut granted = vec![(0, 16)];
    for packet in 0..35 {
        let data = p.data(0, at(packet), at(packet + 1));
        for line in p.says(data) {
            let Some(to) = line.strip_prefix("CTS 0 to ") else {
                continue;
            };
            let to: u32 = to.parse().expect("a limit");
            granted.push((packet + 1, (to - FIRST_PACKET) / PACKET));
        }
    }
    // Never more than 16 under way, and the sender never waits for a grant.
    for pair in granted.windows(2) {
        let [(_, before), (arrived, after)] = pair else {
            unreachable!("a pair")
        };
        assert!(after - arrived <= 16, "{granted:?}");
        assert!(arrived < before, "the block had ended: {granted:?}");
    }
    assert_eq!(granted.last().map(|g| g.1), Some(35));
    assert_eq!(p.delivered(), 1);
    let lines = p.transcript();
    assert!(lines.contains(&"< MSGEND 0".into()), "{lines:?}");
}

// ---- §3.5: the sender alone recovers, by timer ----

// The request is lost, or its answer. Expect: the timer sends it again, with its data.
#[test]
fn a_lost_request_is_sent_again_by_the_timer() {
    let mut p = puppet();
    p.sends(1_000);
    p.waits(TIMEOUT);
    p.says(p.ack(1));
    let mut lines = p.transcript();
    assert_eq!(lines.pop().as_deref(), Some("> ACK 1"));
    assert!(lines.len() > 1);
    assert!(
        lines
            .iter()
            .all(|line| line == "< EAGER 0 start 0, 1000 bytes"),
        "{lines:?}"
    );
}

// MSGEND is lost, so the first packet comes again. Expect: MSGEND again, no second delivery.
#[test]
fn a_lost_msgend_is_sent_again_when_the_first_packet_comes_again() {
    let mut p = puppet();
    let message = p.eager_of(0, 1_000);
    p.says(message.clone());
    assert_eq!(p.says(message), ["ACK 1", "duplicates +1"]);
    let (request, rest) = (p.rts(1, 2_000, 1_000), p.data(1, 1_000, 2_000));
    p.says(request.clone());
    let outcome = p.says(rest);
    assert!(outcome.contains(&"MSGEND 1".into()), "{outcome:?}");
    assert_eq!(p.says(request), ["ACK 2", "duplicates +1"]);
    assert_eq!(p.delivered(), 2);
}

// Data of a granted block is lost. Expect: no complaint of the receiver; the sender's timer starts the message again at byte 0.
#[test]
fn lost_data_restarts_the_message() {
    let mut p = puppet();
    p.sends(FIRST_PACKET + 2 * PACKET);
    p.says(p.cts(0, FIRST_PACKET + 2 * PACKET, &[]));
    p.transcript();
    p.waits(TIMEOUT);
    let lines = p.transcript();
    assert!(lines[0].starts_with("< RTS 0"), "{lines:?}");
}

// The receiver, when packets are out of sequence, drops them. Expect: no NACK, nothing asked for again.
#[test]
fn the_receiver_only_drops() {
    let mut p = puppet();
    let request = p.rts(0, 5_000, 1_000);
    p.says(request.clone());
    let (ahead, early) = (p.data(0, 2_000, 3_000), p.eager(2));
    let mut outcome = p.says(ahead);
    outcome.extend(p.says(early));
    assert!(
        !outcome
            .iter()
            .any(|line| line.starts_with("NACK") || line.contains("again")),
        "{outcome:?}"
    );
    assert_eq!((p.delivered(), p.host.claimed()), (0, 1));
}

// No buffer for a request: it is dropped without a word, and its sender's timer brings it again.
#[test]
fn a_request_without_a_buffer_is_dropped() {
    let mut p = Puppet::new(policy(), 0);
    let message = p.eager(0);
    assert_eq!(
        p.says(message.clone()),
        ["no_buffer +1", "streams_opened +1"]
    );
    p.provides(1_000);
    assert_eq!(p.says(message), ["delivers 0", "ACK 1"]);
}

// The sender gave up before the request was answered. Expect: where the request would be sent again, NULL goes instead, so that the
// numbers stay in step; the next message goes on.
#[test]
fn null_instead_of_a_request_retry() {
    let mut p = puppet();
    p.sends(1_000);
    p.sends(500);
    p.cancels(0);
    p.transcript();
    p.waits(TIMEOUT);
    let lines = p.transcript();
    assert!(lines.contains(&"< NULL 0 start 0".into()), "{lines:?}");
    assert!(
        !lines.iter().any(|line| line.starts_with("< EAGER 0")),
        "{lines:?}"
    );
    let outcome = p.says(p.null_ack(0, false));
    assert_eq!(outcome[0], "completes 0 NotDelivered(Cancelled)");
    assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
}

// Several requests wait. Expect: the oldest is repeated periodically.
#[test]
fn the_oldest_pending_request_is_sent_again_periodically() {
    let mut p = puppet();
    for _ in 0..3 {
        p.sends(1_000);
    }
    p.transcript();
    let mut oldest = 0;
    for _ in 0..4 {
        p.waits(200 * MS);
        let lines = p.transcript();
        oldest += usize::from(lines.iter().any(|line| line.starts_with("< EAGER 0")));
    }
    assert_eq!(oldest, 4);
}

// ---- §3.8: order of arrival ----

// A short message arrives while a long one is under way. Expect: it finishes first; both are known to have arrived in their order.
#[test]
fn short_messages_finish_during_a_long_one() {
    let mut p = puppet();
    let (long, short) = (p.rts(0, 3_000, 1_000), p.eager(1));
    p.says(long);
    let outcome = p.says(short);
    assert_eq!(outcome[0], "delivers 1");
    assert!(outcome.contains(&"MSGEND 1".into()), "{outcome:?}");
    let rest = [(1_000, 2_000), (2_000, 3_000)].map(|(from, to)| p.data(0, from, to));
    let outcome = rest.map(|say| p.says(say)).concat();
    assert_eq!(outcome[0], "delivers 0");
    assert!(outcome.contains(&"ACK 2".into()), "{outcome:?}");
}

// But not before it arrived: first packets are taken in the order of their numbers.
#[test]
fn first_packets_arrive_in_order() {
    let mut p = puppet();
    let (long, short) = (p.rts(0, 3_000, 1_000), p.eager(1));
    p.says(short.clone());
    assert_eq!((p.delivered(), p.host.claimed()), (0, 0));
    p.says(long);
    let outcome = p.says(short);
    assert_eq!(outcome[0], "delivers 1");
}

// And the sender's side: MSGEND of a later message ends it alone.
#[test]
fn a_short_message_is_acknowledged_during_a_long_one() {
    let mut p = puppet();
    p.sends(5_000);
    p.sends(100);
    assert_eq!(p.says(p.msg_end(1)), ["completes 1 Delivered"]);
    assert_eq!(p.status(0), None);
}

// ---- Figure 8: the allowance ----

// Sixteen long messages share a pool of packets; data arrives in any order. Expect: every grant leaves its message with 1 to 16 packets
// under way, all grants together never exceed the pool, and every message is finished.
#[test]
fn figure_8_the_allowance() {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let pool = 20 + rng.below(100) as u32;
        let budget = pool * PACKET;
        let policy = Policy {
            grant_budget_bytes: budget,
            ..policy()
        };
        let mut p = Puppet::new(policy, 20);
        let packets: Vec<u32> = (0..16).map(|_| 1 + rng.below(60) as u32).collect();
        // Bytes received and granted, per message.
        let (mut received, mut granted) = ([0; 16], [0; 16]);
        let mut waiting: Vec<usize> = (0..16).collect();
        let mut open = 0;
        while !waiting.is_empty() || open < 16 {
            let outcome = if open < 16 && rng.chance(300) {
                let number = open;
                open += 1;
                let request = p.rts(number as u32, packets[number] * PACKET, 0);
                p.says(request)
            } else {
                let may = |m: &&usize| received[**m] < granted[**m];
                let able: Vec<usize> = waiting.iter().filter(may).copied().collect();
                if able.is_empty() {
                    assert!(open < 16, "nobody has a grant: {granted:?} of {packets:?}");
                    continue;
                }
                let message = *rng.pick(&able);
                let (from, to) = (received[message], received[message] + PACKET);
                let to = to.min(granted[message]);
                received[message] = to;
                let data = p.data(message as u32, from, to);
                p.says(data)
            };
            for line in outcome {
                let Some(grant) = line.strip_prefix("CTS ") else {
                    continue;
                };
                let grant = grant.split(',').next().expect("a first part");
                let (message, to) = grant.split_once(" to ").expect("a grant");
                let message: usize = message.parse().expect("a number");
                let to: u32 = to.parse().expect("a limit");
                let n = to - received[message];
                assert!(
                    (1..=MAX_DATA_PKTS * PACKET).contains(&n),
                    "seed {seed}: {n} bytes for message {message}"
                );
                granted[message] = to;
            }
            let outstanding: u32 = (0..16).map(|m| granted[m] - received[m]).sum();
            assert!(
                outstanding <= budget,
                "seed {seed}: {outstanding} of {budget} bytes"
            );
            waiting.retain(|m| received[*m] < packets[*m] * PACKET);
        }
        assert_eq!(p.delivered(), 16, "from number {FIRST}");
    }
}

// ---- §3.6: the up-call on the first packet ----

/// An endpoint whose application is asked about every message and answers so.
fn asking(verdicts: &[Verdict]) -> Puppet {
    let mut p = puppet();
    p.host.wants_offers = true;
    p.host.verdicts.extend(verdicts);
    p
}

// The layer above sees length and first bytes of a long message and takes all of it. Expect: asked once.
#[test]
fn the_upper_layer_is_asked_on_the_first_packet() {
    let mut p = asking(&[Verdict::Accept]);
    let (request, rest) = (p.rts(0, 2_000, 1_000), p.data(0, 1_000, 2_000));
    p.says(request.clone());
    let outcome = p.says(rest);
    assert_eq!(outcome[0], "delivers 0");
    p.says(request);
    let asked: Vec<_> = p
        .host
        .offered
        .iter()
        .map(|o| (o.total, o.first.len()))
        .collect();
    assert_eq!(asked, [(2_000, 1_000)]);
}

// It takes only the first 1500 bytes. Expect: no more is granted, the message ends there, and the sender sees it delivered.
#[test]
fn the_upper_layer_shortens_a_message() {
    let mut p = asking(&[Verdict::Shorten(1_500), Verdict::Shorten(10)]);
    let (request, rest) = (p.rts(0, 50_000, 1_000), p.data(0, 1_000, 1_500));
    let outcome = p.says(request);
    assert!(outcome.contains(&"CTS 0 to 1500".into()), "{outcome:?}");
    let outcome = p.says(rest);
    assert_eq!(outcome[0], "delivers 0");
    assert!(outcome.contains(&"MSGEND 0".into()), "{outcome:?}");
    // A short one, of which less is wanted than came.
    let short = p.eager_of(1, 1_000);
    assert_eq!(p.says(short), ["delivers 1", "ACK 2"]);
}

// It refuses. Expect: MSGDROP; the number is committed when the sender confirmed that it knows; the next message is asked about anew.
#[test]
fn the_upper_layer_refuses_a_message() {
    let mut p = asking(&[Verdict::Refuse, Verdict::Accept]);
    let (refused, next) = (p.rts(0, 50_000, 1_000), p.eager(1));
    let outcome = p.says(refused);
    assert!(outcome.contains(&"MSGDROP 0 refused".into()), "{outcome:?}");
    p.says(p.drop_confirm(0));
    let outcome = p.says(next);
    assert_eq!(outcome, ["delivers 1", "ACK 2"]);
    assert_eq!((p.delivered(), p.host.claimed()), (1, 0));
}

// It has to think. Expect: the message is one without a buffer until it has, and asked about again when it comes again.
#[test]
fn the_upper_layer_is_undecided() {
    let mut p = asking(&[Verdict::Undecided, Verdict::Accept]);
    let message = p.eager(0);
    let outcome = p.says(message.clone());
    assert!(
        !outcome.iter().any(|line| line.starts_with("delivers")),
        "{outcome:?}"
    );
    let outcome = p.says(message);
    assert_eq!(outcome, ["delivers 0", "ACK 1"]);
    assert_eq!(p.host.offered.len(), 2);
}
