//! transport.md §8.4: the first bytes of a long message that come without a grant.

use portolan_sim::harness::US;
use portolan_sim::puppet::{NOTHING, OUR_INCARNATION, Puppet};
use portolan_transport::ident::Priority;
use portolan_transport::policy::{Ack, AckMode, Policy, Recovery};

use crate::{any, policy, puppet};

/// It takes so many units of 256 bytes unasked.
fn takes(units: u8) -> Puppet {
    let mut p = Puppet::stranger(policy(), 8, 1458);
    p.unasked = units;
    p.greets();
    p
}

/// The endpoint takes so much.
fn taken(unasked_bytes: u32) -> Puppet {
    let policy = Policy {
        unasked_bytes,
        ..policy()
    };
    Puppet::new(policy, 8)
}

fn sent_buffers(p: &Puppet) -> u32 {
    p.heard.last().map_or(0, |frame| frame.header.sent_buffers)
}

// Expect: as much as was announced follows the request at once, each frame charged; the rest once it is granted, and not charged.
#[test]
fn s8_4_what_was_announced_follows_the_request() {
    let mut p = takes(16);
    assert_eq!(
        p.sends(6_000),
        [
            "RTS 0 start 0, 1370 of 6000 bytes and more",
            "DATA 0 1370..2752 unasked",
            "DATA 0 2752..4096 unasked"
        ]
    );
    let charged = sent_buffers(&p);
    let granted = p.cts(0, 6_000, &[]);
    assert_eq!(p.says(granted), ["DATA 0 4096..5478", "DATA 0 5478..6000"]);
    assert_eq!(sent_buffers(&p), charged);
    p.sends(1);
    assert_eq!(sent_buffers(&p), charged.wrapping_add(1));
    // Shorter than what was announced: nothing is left to grant.
    assert_eq!(
        p.sends(2_000),
        [
            "RTS 2, 1374 of 2000 bytes and more",
            "DATA 2 1374..2000 unasked"
        ]
    );
}

// Two long messages at once. Expect: the first is whole before the second begins.
#[test]
fn s8_4_one_message_after_the_other() {
    let mut p = Puppet::stranger(policy(), 8, 1458);
    p.unasked = 16;
    p.sends(3_000);
    p.sends(3_000);
    p.transcript();
    p.says(p.hello(0));
    p.says(p.hello_ack(OUR_INCARNATION));
    let said = p.transcript();
    let kinds: Vec<_> = (said.iter())
        .filter(|line| line.contains("RTS") || line.contains("DATA"))
        .map(|line| line.split(',').next().unwrap_or_default().to_owned())
        .collect();
    let expected = [
        "< RTS 0 start 0",
        "< DATA 0 1370..2752 unasked @1",
        "< DATA 0 2752..3000 unasked @1",
        "< RTS 1 start 0",
        "< DATA 1 1094..2476 unasked @1",
        "< DATA 1 2476..3000 unasked @1",
    ];
    assert_eq!(kinds, expected, "{said:?}");
}

// Credit for the request and not for what would follow; a crowd; nothing announced. Expect: the request says that nothing follows, and nothing does.
#[test]
fn s8_4_only_with_credit_for_all_of_it() {
    let first = "RTS 0 start 0, 1370 of 6000 bytes";
    assert_eq!(puppet().sends(6_000), [first]);

    let mut p = Puppet::stranger(policy(), 8, 1458);
    (p.credit, p.unasked) = (2, 16);
    p.greets();
    assert_eq!(p.sends(6_000), [first]);
    let granted = p.cts(0, 6_000, &[]);
    assert!(any(&p.says(granted), "DATA 0 1370..2752"));

    let mut p = takes(16);
    p.header.crowded = true;
    p.says_all(Vec::new());
    assert_eq!(p.sends(6_000), ["RTS 0 start 0, 0 of 6000 bytes"]);
}

// Credit for one message of three frames and for two frames of the next. Expect: the next waits, as a short one does, as long as the peer may not
// have heard of all that was sent; the credit that comes with its answer is used. Once the peer has heard it all and gives no more, when there is
// a crowd, and for what is longer than was announced, a request goes out for a grant.
#[test]
fn s8_4_credit_is_waited_for_while_it_may_come() {
    let whole = |number: u32| {
        [
            format!("RTS {number}, 1374 of 3000 bytes and more"),
            format!("DATA {number} 1374..2756 unasked"),
            format!("DATA {number} 2756..3000 unasked"),
        ]
    };
    let five = || {
        let mut p = Puppet::stranger(policy(), 8, 1458);
        (p.credit, p.unasked) = (5, 16);
        p.greets();
        p.sends(1);
        let heard = p.ack(1);
        p.says(heard);
        assert_eq!(p.sends(3_000), whole(1));
        p
    };
    let mut p = five();
    assert_eq!(p.sends(3_000), ["credit_stalls +1"]);
    let heard = p.ack(2);
    assert_eq!(p.says(heard)[1..], whole(2));

    let mut p = five();
    p.credit = 2;
    p.sends(3_000);
    let heard = p.ack(2);
    assert_eq!(p.says(heard)[1..], ["RTS 2, 1374 of 3000 bytes"]);

    let mut p = five();
    assert_eq!(p.sends(4_097), ["RTS 2, 1374 of 4097 bytes"]);
    // Another stream would take whatever comes.
    let mut p = five();
    p.priority = Priority::High;
    p.sends_many(3, 1_300);
    p.priority = Priority::Low;
    assert_eq!(p.sends(3_000), ["RTS 2, 0 of 3000 bytes"]);

    // What fits its request needs no more.
    let mut p = five();
    assert_eq!(p.sends(1_374), ["RTS 2, 1374 of 1374 bytes"]);

    let mut p = five();
    p.says(p.ack(2));
    p.header.crowded = true;
    p.says_all(Vec::new());
    p.credit = 2;
    assert_eq!(p.sends(1), ["EAGER 2, 1 bytes"]);
    assert_eq!(p.sends(3_000), ["RTS 3, 0 of 3000 bytes"]);
}

// What follows is lost, then what was refused is asked for anew. Expect: it is sent again as asked, without credit; all of it goes again with
// the request.
#[test]
fn s8_4_lost_and_refused() {
    let mut p = takes(16);
    p.sends(3_000);
    let charged = sent_buffers(&p);
    p.waits(1_000_000);
    let again = p.cts(0, 3_000, &[(1_370, 3_000)]);
    assert!(any(&p.says(again), "DATA 0 1370..2752"));
    assert_eq!(sent_buffers(&p), charged);

    let mut p = takes(16);
    p.sends(3_000);
    let refused = p.nack(0, 2);
    assert_eq!(p.says(refused), NOTHING);
    let ready = p.ready(0);
    let lines = p.says(ready);
    assert!(
        any(&lines, "RTS 0 start 0, 1370 of 3000 bytes and more"),
        "{lines:?}"
    );
    assert!(any(&lines, "DATA 0 1370..2752 unasked"), "{lines:?}");
}

// Expect: what was announced is taken, and no grant is spent on it; nothing beyond it is.
#[test]
fn s8_4_taking_it() {
    let mut p = taken(4_096);
    let request = p.rts(0, 3_000, 1_000).unasked();
    assert_eq!(p.says(request), ["ACK 0 +0", "streams_opened +1"]);
    let rest = p.data(0, 1_000, 3_000).unasked();
    assert_eq!(p.says(rest), ["delivers 0", "ACK 1"]);

    let policy = Policy {
        unasked_bytes: 4_096,
        grant_bytes: 1_000,
        ..policy()
    };
    let mut p = Puppet::new(policy, 8);
    let request = p.rts(0, 20_000, 1_000).unasked();
    assert_eq!(p.says(request), ["ACK 0 +0", "streams_opened +1"]);
    let (beyond, within) = (p.data(0, 4_000, 4_097), p.data(0, 3_000, 4_096));
    assert_eq!(p.says(beyond), ["data_unexpected +1"]);
    assert_eq!(p.says(within.unasked()), NOTHING);
}

// Long messages end, acknowledged after a delay. Expect: what came unasked as a whole waits with its acknowledgement, as a short one, and no later if it may be lazy; what needed a
// grant, since it is longer than what was announced or its sender asked, is answered at once, and ended. transport.md §6.1
#[test]
fn s8_4_what_came_unasked_is_acknowledged_as_short_ones() {
    let policy = Policy {
        ack: Ack::Delayed { delay_us: 50 },
        unasked_bytes: 4_096,
        ..policy()
    };
    for (total, mode, unasked, waits) in [
        (3_000, AckMode::Policy, true, true),
        (3_000, AckMode::Lazy, true, true),
        (3_000, AckMode::Immediate, true, false),
        (4_096, AckMode::Policy, true, true),
        (4_097, AckMode::Policy, true, false),
        (3_000, AckMode::Policy, false, false),
    ] {
        let mut p = Puppet::new(policy, 8);
        let request = p.rts(0, total, 1_400).acked(mode);
        p.says(if unasked { request.unasked() } else { request });
        let data = p.data(0, 1_400, 2_800);
        p.says(if unasked { data.unasked() } else { data });
        let last = p.data(0, 2_800, total);
        let outcome = p.says(if unasked { last.unasked() } else { last });
        if waits {
            assert_eq!(outcome, ["delivers 0"], "{total}");
            assert_eq!(p.waits(60 * US), ["ACK 1"]);
        } else {
            let ends = if mode == AckMode::Immediate { 2 } else { 3 };
            let expected = ["delivers 0", "ACK 1", "MSGEND 0"];
            assert_eq!(outcome, expected[..ends], "{total}");
        }
    }
}

// One message uses what was granted, two wait for their turn, with all that was granted of them there; then the sender asks about the last. Expect:
// it is told of the first and of that, and not again of what it knows of the other. transport.md §7.5
#[test]
fn s7_5_a_probe_is_not_told_of_what_waits() {
    let policy = Policy {
        grant_bytes: 1_000,
        grant_budget_bytes: 1_000,
        ..policy()
    };
    let mut p = Puppet::new(policy, 8);
    let (first, second) = (p.rts(0, 2_000, 0), p.rts(1, 2_500, 1_000));
    let (third, asks) = (p.rts(2, 2_500, 1_000), p.probe(2, 2_500));
    assert_eq!(p.says(first), ["CTS 0 to 1000", "streams_opened +1"]);
    assert_eq!(p.says(second), ["ACK 0 +0 +1"]);
    assert_eq!(p.says(third), ["ACK 0 +0 +1 +2"]);
    let told = p.says(asks);
    let expected = [
        "ACK 0 +0 +1 +2",
        "CTS 0 to 1000, again 0..1000",
        "CTS 2 to 1000",
    ];
    assert_eq!(told, expected);
}

// The request came without credit first, and again with it, before anything was granted. Expect: what follows is taken.
#[test]
fn s8_4_a_request_that_changes_its_mind() {
    let policy = Policy {
        unasked_bytes: 4_096,
        grant_bytes: 1,
        grant_budget_bytes: 1,
        ..policy()
    };
    let mut p = Puppet::new(policy, 8);
    let greedy = p.rts(0, 20_000, 0);
    p.says(greedy);
    let request = p.rts(1, 3_000, 1_000);
    p.says(request);
    let again = p.rts(1, 3_000, 1_000).unasked();
    p.says(again);
    let rest = p.data(1, 1_000, 3_000).unasked();
    assert!(!any(&p.says(rest), "data_unexpected"));
}

// Go-back-N and whole message recovery know no bytes that come on their own. Expect: none is announced, none is taken.
#[test]
fn s8_4_only_where_recovery_is_selective() {
    let policy = Policy {
        recovery: Recovery::GoBackN { stall: true },
        unasked_bytes: 4_096,
        ..policy()
    };
    assert_eq!(policy.unasked(), 0);
    let mut p = Puppet::new(policy, 8);
    let request = p.rts(0, 3_000, 1_000).unasked();
    assert_eq!(p.says(request), ["CTS 0 to 3000", "streams_opened +1"]);
}
