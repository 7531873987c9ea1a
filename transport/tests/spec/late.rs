//! Acknowledgements that come in front of messages. transport.md §6.1

use portolan_sim::puppet::{Puppet, Say};
use portolan_transport::host::{Reason, SendStatus};
use portolan_transport::policy::{AckMode, Policy};

use super::{any, policy};

/// What the endpoint may fill at the puppet, and the puppet at the endpoint, as the endpoint knows; and the round trip.
fn known(p: &Puppet) -> (u32, u32, u64) {
    let mut peers = p.endpoint.peers();
    peers
        .next()
        .map_or((0, 0, 0), |peer| (peer.credit, peer.given, peer.rtt_ns))
}

/// A puppet whose stream is open, so that its messages are short in every sense, and that owes an acknowledgement.
fn asked() -> Puppet {
    asked_under(policy())
}

fn asked_under(policy: Policy) -> Puppet {
    let mut p = Puppet::new(policy, 8);
    let first = p.eager(0);
    p.says(first);
    p.sends(100);
    p
}

/// In one frame: an acknowledgement, a message, and perhaps more.
fn says(p: &mut Puppet, acks: u32, number: u32, more: Option<Say>) -> Vec<String> {
    let mut all: Vec<Say> = vec![p.ack(acks), p.eager(number)];
    all.extend(more);
    p.says_all(all)
}

// It comes with a message. Expect: the message is delivered; the acknowledgement is due at once, and acted on as what is due is.
#[test]
fn s6_1_waits_for_the_message_behind_it() {
    let mut p = asked();
    assert_eq!(says(&mut p, 1, 1, None), ["delivers 1", "ACK 2"]);
    assert!(p.endpoint.poll_timeout().is_some_and(|due| due <= p.now));
    assert_eq!(p.waits(0), ["completes 0 Delivered"]);
    assert!(p.endpoint.poll_timeout().is_none_or(|due| due > p.now));
}

// Another frame comes first. Expect: acted on before anything of that; at most one ever waits.
#[test]
fn s6_1_waits_for_no_other_frame() {
    let mut p = asked();
    says(&mut p, 1, 1, None);
    p.sends(100);
    assert_eq!(
        says(&mut p, 2, 2, None),
        ["completes 0 Delivered", "delivers 2", "ACK 3"]
    );
    // One that is nothing at all.
    assert!(any(&p.says_bytes(&[0; 64]), "completes 1 Delivered"));
}

// It comes alone, with a message that finds no buffer, with an answer behind the message. Expect: it does not wait; before what stands behind it,
// though behind the message.
#[test]
fn s6_1_waits_for_nothing_but_messages() {
    let mut p = asked();
    assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
    p.sends(100);
    p.sends(100);
    let drop = p.msg_drop(2, Reason::TooLong);
    assert_eq!(
        says(&mut p, 2, 1, Some(drop)),
        [
            "delivers 1",
            "completes 1 Delivered",
            "completes 2 NotDelivered(TooLong)",
            "ACK 2",
            "DROP-CONFIRM 2"
        ]
    );
    p.resumes();
    for number in 2..8 {
        let message = p.eager(number);
        p.says(message);
    }
    p.sends(100);
    assert_eq!(
        says(&mut p, 4, 8, None),
        ["completes 3 Delivered", "NACK 8 no buffer", "no_buffer +1"]
    );
}

// Meanwhile the application gives the send up, its port closes, or the engine dies. Expect: as if it came a moment later: what was delivered is
// never said not to be.
#[test]
fn s6_1_what_happens_meanwhile() {
    let mut p = asked();
    says(&mut p, 1, 1, None);
    p.cancels(0);
    assert_eq!(p.waits(0)[0], "completes 0 Delivered");

    // Acted on, and NULL is out, before the acknowledgement is.
    let mut p = asked();
    says(&mut p, 1, 1, None);
    assert!(any(&p.cancels(0), "NULL 0"));
    assert_eq!(p.waits(0)[0], "completes 0 Delivered");

    let mut p = asked();
    says(&mut p, 1, 1, None);
    p.closes_port();
    p.waits(0);
    assert!(!matches!(p.status(0), Some(SendStatus::NotDelivered(_))));

    let mut p = asked();
    says(&mut p, 1, 1, None);
    p.dies();
    let lines = p.is_restored();
    assert_eq!(p.status(0), None, "{lines:?}");
    p.says(p.hello(portolan_sim::puppet::OUR_INCARNATION));
    assert_eq!(p.says(p.ack(1))[..1], ["completes 0 Delivered".to_owned()]);
}

// It comes with a message, and the header in front of both says that more may be sent. Expect: what left in between echoes the header's time stamp; its credit and its
// round trip are known when the acknowledgement is.
#[test]
fn s6_1_the_header_waits_with_it() {
    let mut p = asked();
    let before = known(&p);
    p.credit += 3;
    p.rtt = 40_000;
    p.now += 100_000;
    let said_at = (p.now + 1_000) as u32;
    says(&mut p, 1, 1, None);
    assert_eq!(known(&p), before, "it did not wait");
    assert_eq!(p.heard.last().unwrap().header.echo, said_at);
    // However long that takes.
    p.now += 500_000;
    p.waits(0);
    let after = known(&p);
    assert_eq!((after.0, after.1), (before.0 + 4, before.1 - 1));
    let exact = (7 * before.2 + 40_000) / 8;
    assert!(after.2.abs_diff(exact) < 100, "{before:?} {after:?}");
}

// The same where more than half of either side's credit is used, or not a frame's worth is left, or it is asked back. Expect: it is known at once.
#[test]
fn s6_1_the_header_waits_only_where_that_does_not_matter() {
    let few = Policy {
        eager_buffers: 4,
        ..policy()
    };
    // Ours: one of four is left.
    let mut p = asked_under(few);
    p.sends(100);
    p.sends(100);
    assert_eq!(known(&p).0, 1);
    says(&mut p, 1, 1, None);
    assert_eq!(known(&p).0, 4);

    // Theirs: one of four is left behind this frame. What leaves in between says that it has four again.
    let mut p = asked_under(few);
    for number in 1..3 {
        let message = p.eager(number);
        p.says(message.acked(AckMode::Lazy));
    }
    says(&mut p, 1, 3, None);
    p.waits(0);
    assert_eq!(known(&p).1, 4);

    // All they ever have is one.
    let one = Policy {
        eager_buffers: 1,
        ..policy()
    };
    let mut p = asked_under(one);
    says(&mut p, 1, 1, None);
    p.waits(0);
    assert_eq!((known(&p).0, known(&p).1), (1, 1));

    // Asked back.
    let mut p = asked();
    p.header.return_credit = true;
    says(&mut p, 1, 1, None);
    assert_eq!(known(&p).0, 0);
}
