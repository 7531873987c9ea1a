//! Acknowledgements that come in front of messages. transport.md §6.1

use portolan_sim::puppet::{Puppet, Say};
use portolan_transport::host::{Reason, SendStatus};

use super::{any, puppet};

/// A puppet whose stream is open, so that its messages are short in every sense, and that owes an acknowledgement.
fn asked() -> Puppet {
    let mut p = puppet();
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
