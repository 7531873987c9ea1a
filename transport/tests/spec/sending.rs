//! §3 and §4: streams and what their senders do. transport.md §3.1, §3.2, §4.1, §4.3, §4.4, §4.5, §4.6, §14

use portolan_sim::harness::{MS, SECOND};
use portolan_sim::puppet::{NOTHING, OUR_INCARNATION, Puppet};
use portolan_transport::host::Reason;

use crate::{any, policy, puppet};

// START travels until the epoch's first answer, on retries and probes too. Whichever message arrives first opens the record at the number
// it names. transport.md §3.1
#[test]
fn s3_1_start_until_the_first_answer() {
    let mut p = puppet();
    assert_eq!(p.sends(100), ["EAGER 0 start 0, 100 bytes"]);
    assert_eq!(p.sends(100), ["EAGER 1 start 0, 100 bytes"]);
    let outcome = p.waits(20 * MS);
    assert!(any(&outcome, "PROBE 1 start 0"), "{outcome:?}");
    p.says(p.ack(2));
    assert_eq!(p.sends(100), ["EAGER 2, 100 bytes"]);

    let mut p = puppet();
    let (late, first) = (p.eager(2).start(Some(1)), p.eager(1));
    let outcome = p.says(late);
    assert!(any(&outcome, "ACK 1 +2"), "{outcome:?}");
    assert_eq!(p.says(first), ["delivers 1", "delivers 2", "ACK 3"]);
    // Before the number it names lies nothing that the stream still owes.
    let mut p = puppet();
    let absurd = p.eager(0).start(Some(1));
    assert_eq!(p.says(absurd), ["protocol_violations +1"]);
}

// The sender closes an idle stream; unanswered ten times, it gives up. transport.md §3.2
#[test]
fn s3_2_an_unanswered_close_is_given_up() {
    let mut p = puppet();
    p.sends(100);
    p.says(p.ack(1));
    let outcome = p.waits(u64::from(policy().stream_idle_ms) * MS + 10 * SECOND);
    let closes = outcome.iter().filter(|line| *line == "CLOSE 1").count();
    assert!((10..=11).contains(&closes), "{closes}");
    assert_eq!(p.host.records(), (0, 0));
}

// A receiver whose table is full asks idle streams whether their senders still know them; CLOSE is the answer of one that does not.
// transport.md §3.2
#[test]
fn s3_2_a_full_table_asks_idle_streams() {
    let mut p = puppet();
    p.host.max_records = 1;
    let first = p.eager(0);
    p.says(first);
    let other = p.eager(1).ports(10, 5).start(Some(0));
    let outcome = p.says(other);
    assert_eq!(outcome, ["NACK 0 no buffer", "ACK 1", "tables_full +1"]);
    assert_eq!(p.says(p.close(1)), ["CLOSED", "streams_closed +1"]);
}

// A number is used only after it was accepted: whichever store the engine dies at, what was heard is what the ledger knows.
// transport.md §4.1, §13.1
#[test]
fn s4_1_accepted_before_it_is_transmitted() {
    for step in 1.. {
        let mut p = puppet();
        p.sends(100);
        p.says(p.ack(1));
        p.dies_at(step);
        let outcome = p.sends(100);
        if !p.is_dead() {
            assert_eq!(outcome, ["EAGER 1, 100 bytes"]);
            assert!(step > 3, "{step} stores");
            return;
        }
        assert_eq!(outcome, NOTHING, "step {step}");
        p.is_restored();
        let outcome = p.says(p.hello_ack(portolan_sim::puppet::OUR_INCARNATION));
        // Accepted or not, it goes out now, once, and under a number nobody used.
        let sent: Vec<_> = outcome.iter().filter(|l| l.starts_with("EAGER")).collect();
        assert_eq!(sent.len(), 1, "step {step}: {outcome:?}");
        assert!(sent[0].starts_with("EAGER 1 "), "step {step}: {outcome:?}");
    }
}

// A message that fits a frame is EAGER; one byte more, and it is RTS with its first bytes. transport.md §4.3
#[test]
fn s4_3_first_chunks() {
    let mut p = puppet();
    assert_eq!(p.sends(1_370), ["EAGER 0 start 0, 1370 bytes"]);
    assert_eq!(p.sends(1_371), ["RTS 1 start 0, 1370 of 1371 bytes"]);
    assert_eq!(p.sends(0), ["EAGER 2 start 0, 0 bytes"]);
}

/// Four short messages to peers that read what these bits of `features` say, and the headers of their frame; to an engine that replaced the peer's, until it
/// greets; and to one that takes back what it said.
fn to_those_who_read(
    tagless: bool,
    each: &[(u32, usize)],
    (features, expected_then): (u32, usize),
) {
    let burst = |p: &mut Puppet| {
        let lines = p.sends_many(4, 64);
        assert!(
            lines.iter().all(|line| line.contains(", 64 bytes")),
            "{lines:?}"
        );
        assert_eq!((lines.len(), p.heard.len()), (4, 1));
        p.heard[0].len - 4 * 64
    };
    for &(read, expected) in each {
        let mut p = Puppet::stranger(policy(), 8, 1458);
        (p.features, p.host.tagless) = (read, tagless);
        p.greets();
        assert_eq!(burst(&mut p), IN_FULL + 4 * 4, "START");
        p.says(p.ack(4));
        assert_eq!(burst(&mut p), expected, "{read:#x}");
        p.says(p.ack(8));
        // Another engine, which has not said anything yet but that it is there.
        p.header.engine_epoch = p.header.engine_epoch.wrapping_add(1);
        p.says(p.ack(8));
        assert_eq!(burst(&mut p), IN_FULL);
        p.says(p.ack(12));
        p.says(p.hello(OUR_INCARNATION));
        assert_eq!(burst(&mut p), expected, "greeted again");
        p.says(p.ack(16));
        p.features = features;
        p.says(p.hello(OUR_INCARNATION));
        assert_eq!(burst(&mut p), expected_then, "it thought better of it");
    }
}

/// Headers of a frame of four EAGERs.
const IN_FULL: usize = 48 + 4 * 32;

// Short messages in a row. Expect: in full for a peer that did not say that it reads NEXT, or whose engine was replaced and whose successor did not;
// else without what they have in common, but for what opens the stream. It reads the same. transport.md §4.3, wire.md §4.2
#[test]
fn s4_3_next_for_those_who_read_it() {
    let short = 48 + 32 + 3 * (12 + 8); // each has a tag of its own
    let each = [(0, IN_FULL), (2, IN_FULL), (1, short), (u32::MAX, short)];
    to_those_who_read(false, &each, (0, IN_FULL));
}

// The same of an application without tags. Expect: a peer that reads NEXT and RUN gets messages of one length as a RUN; one that reads only NEXT gets that,
// and one that reads only RUN neither. An engine that replaces another has to say it again. transport.md §4.3, wire.md §4.3
#[test]
fn s4_3_run_for_those_who_read_it() {
    let (next, run) = (48 + 32 + 3 * 12, 48 + 32 + 12);
    let each = [
        (0, IN_FULL),
        (1, next),
        (2, IN_FULL),
        (3, run),
        (u32::MAX, run),
    ];
    to_those_who_read(true, &each, (1, next));
}

// Each kind of answer ends a send in its own way, once. transport.md §4.4
#[test]
fn s4_4_statuses() {
    let mut p = puppet();
    for _ in 0..4 {
        p.sends(100);
    }
    assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
    assert_eq!(
        p.says(p.msg_drop(1, Reason::Refused))[0],
        "completes 1 NotDelivered(Refused)"
    );
    assert_eq!(
        p.says(p.refused())[..2],
        [
            "completes 2 MaybeDelivered(PeerRestarted)",
            "completes 3 MaybeDelivered(PeerRestarted)"
        ]
    );
    assert_eq!(p.endpoint.unsettled(), 0);
}

// Given up before it was transmitted: it ends at once, and its number travels as NULL in its turn. After: NULL asks, and only the
// answer ends it. transport.md §4.5
#[test]
fn s4_5_giving_up() {
    let mut p = Puppet::new(
        portolan_transport::policy::Policy {
            window_messages: 1,
            ..policy()
        },
        0,
    );
    p.sends(100);
    p.sends(100);
    p.sends(100);
    assert_eq!(p.cancels(1), ["completes 1 NotDelivered(Cancelled)"]);
    let outcome = p.says(p.ack(1));
    assert_eq!(outcome, ["completes 0 Delivered", "NULL 1"]);
    assert_eq!(p.says(p.null_ack(1, false))[0], "DROP-CONFIRM 1");
    let until = p.now + 5 * MS;
    p.says(p.ack(2));
    let outcome = p.sends_until(100, until);
    assert!(!any(&outcome, "completes"), "{outcome:?}");
    p.waits(10 * MS);
    assert_eq!(
        p.status(3),
        Some(portolan_transport::host::SendStatus::NotDelivered(
            Reason::Deadline
        ))
    );
}

// First chunks of an epoch before the one that is known: an old copy, or a wrong record that an engine left which was wrong itself. Expect: whoever
// asks hears of it, and opens anew. transport.md §3.3
#[test]
fn s3_3_an_earlier_epoch_is_refused() {
    let mut p = puppet();
    let later = p.eager(0).epoch(1);
    assert!(any(&p.says(later), "delivers 0"));
    for say in [p.eager(3), p.probe(3, 100), p.null(3), p.rts(3, 5000, 100)] {
        let outcome = p.says(say.start(None));
        assert!(any(&outcome, "REFUSED"), "{outcome:?}");
        assert_eq!(p.delivered(), 1);
    }
}

// A predecessor gave it up at its deadline; the receiver's answer comes before our own timer has looked. Expect: the deadline, not a cancel
// that nobody asked for. transport.md §4.5
#[test]
fn s4_5_given_up_by_a_predecessor() {
    for late in [true, false] {
        let mut p = puppet();
        let until = p.now + 5 * MS;
        p.sends_until(100, until);
        p.dies();
        p.is_restored();
        p.greets();
        p.now = if late { until } else { until - MS };
        let reason = if late {
            Reason::Deadline
        } else {
            Reason::Cancelled
        };
        let outcome = p.says(p.null_ack(0, false));
        let expected = format!("completes 0 NotDelivered({reason:?})");
        assert!(any(&outcome, &expected), "{outcome:?}");
    }
}

// After a failure of its receiver's the stream waits for the application; after a cancel it does not. transport.md §4.6
#[test]
fn s4_6_after_a_failure() {
    let mut p = puppet();
    p.sends(100);
    p.says(p.msg_drop(0, Reason::TooLong));
    assert_eq!(p.sends(100), NOTHING);
    let outcome = p.resumes();
    assert!(any(&outcome, "EAGER 1"), "{outcome:?}");
    p.cancels(1);
    p.says(p.null_ack(1, false));
    let outcome = p.sends(100);
    assert!(any(&outcome, "EAGER 2"), "{outcome:?}");
}

// Numbers unsettled per sending stream: 1,024. transport.md §14
#[test]
fn s14_unsettled_numbers_are_bounded() {
    let mut p = puppet();
    for _ in 0..1_024 {
        let outcome = p.sends(1);
        assert!(!any(&outcome, "completes"), "{outcome:?}");
    }
    assert!(any(&p.sends(1), "completes 1024 NotDelivered(NoResources)"));
}
