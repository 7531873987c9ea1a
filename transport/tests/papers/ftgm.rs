//! FTGM (004): what goes wrong when a network interface is merely restarted, and does not when tokens and sequence numbers lie
//! outside of what fails and the acknowledgement follows the copy. transport.md §2.5, §5.2, §13.1, §13.2
//!
//! Figure 4 is a sender that restarts while an ACK is in transit, Figure 5 a receiver that acknowledged before its copy was
//! complete. Both are played with the endpoint as the one that dies, and with the endpoint as the one that must not be fooled; and
//! once with the death between any two stores.

use portolan_sim::puppet::{NOTHING, OUR_INCARNATION, Puppet};
use portolan_transport::host::SendStatus::Delivered;
use portolan_transport::policy::Profile;

use crate::dialogue;

fn puppet() -> Puppet {
    Puppet::new(Profile::Ftgm.policy(), 4)
}

/// The endpoint's next engine takes over and is greeted.
fn take_over(p: &mut Puppet) {
    p.is_restored();
    p.says(p.hello_ack(OUR_INCARNATION));
}

// The sender dies when the receiver's ACK for message 0 is in transit, which is lost with it. The next engine knows the number of
// what it sends again, so the receiver knows it too. Expect: one message, one status.
#[test]
fn figure_4_a_sender_restarts_with_an_ack_in_transit() {
    let mut p = puppet();
    p.sends(100);
    p.dies();
    p.says(p.ack(1)); // to nobody
    take_over(&mut p);
    p.says(p.ack(1));
    assert_eq!(p.status(0), Some(Delivered));
    p.sends(100);
    dialogue(
        &mut p,
        "< EAGER 0 start 0, 100 bytes
         the engine dies
         > ACK 1
         another engine takes over
         < HELLO from us to them
         > HELLO-ACK from them to us
         < EAGER 0 start 0, 100 bytes
         > ACK 1
         < EAGER 1, 100 bytes",
    );
}

// The figure's mistake: the receiver NACKs with the number it expects, and the sender puts the old message under that number.
// Expect: a NACK for 1 makes nobody send message 0 as 1.
#[test]
fn figure_4_a_nack_does_not_renumber() {
    let mut p = puppet();
    p.sends(100);
    p.dies();
    take_over(&mut p);
    p.transcript();
    p.says(p.nack(1, 1));
    dialogue(&mut p, "> NACK 1 gap");
    assert_eq!(p.status(0), None);
    assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
}

// The other side of the figure: the endpoint acknowledged message 0, the sender's next engine sends it again. Expect: acknowledged
// again, not delivered again.
#[test]
fn figure_4_the_duplicate_is_not_accepted() {
    let mut p = puppet();
    let message = p.eager(0);
    p.says(message.clone());
    p.header.engine_epoch = p.header.engine_epoch.wrapping_add(1);
    p.says(p.hello(OUR_INCARNATION));
    let again = message.start(Some(0));
    assert_eq!(p.says(again), ["ACK 1", "duplicates +1"]);
    assert_eq!(p.delivered(), 1);
    dialogue(
        &mut p,
        "> EAGER 0 start 0, 100 bytes
         < ACK 1
         > HELLO from them to us
         < HELLO-ACK from us to them
         > EAGER 0 start 0, 100 bytes
         < ACK 1",
    );
}

// The receiver dies when all of a long message but its last bytes lie in the application's buffer. Expect: nothing was acknowledged, so the
// sender has it still; the next engine says what is committed, which is nothing, and the message comes again.
#[test]
fn figure_5_a_receiver_dies_before_the_copy_is_complete() {
    let mut p = puppet();
    let (request, first, last) = (
        p.rts(0, 3000, 1000),
        p.data(0, 1000, 2000),
        p.data(0, 2000, 3000),
    );
    p.says(request.clone());
    p.says(first.clone());
    p.dies();
    take_over(&mut p);
    p.says_all(vec![request.start(Some(0)), first, last]);
    assert_eq!(p.delivered(), 1);
    dialogue(
        &mut p,
        "> RTS 0 start 0, 1000 of 3000 bytes
         < CTS 0 to 3000
         > DATA 0 1000..2000
         the engine dies
         another engine takes over
         < HELLO from us to them
         > HELLO-ACK from them to us
         < RESUME 0
         > RTS 0 start 0, 1000 of 3000 bytes
         > DATA 0 1000..2000
         > DATA 0 2000..3000
         < ACK 1
         < MSGEND 0",
    );
}

// The receiver dies at each of the stores between a frame's arrival and its acknowledgement. Expect: never an acknowledgement without a
// delivery; whoever was delivered is said so by RESUME and never delivered again; whoever was not comes again.
#[test]
fn figure_5_a_death_between_any_two_stores() {
    let (mut before, mut after) = (0, 0);
    for step in 1.. {
        let mut p = puppet();
        p.dies_at(step);
        let message = p.eager(0);
        let outcome = p.says(message.clone());
        if !p.is_dead() {
            assert_eq!(outcome, ["delivers 0", "ACK 1", "streams_opened +1"]);
            break;
        }
        assert!(
            !outcome.iter().any(|line| line.starts_with("ACK")),
            "acknowledged before all was stored: {outcome:?}"
        );
        p.is_restored();
        let committed = p.delivered() == 1;
        let outcome = p.says(p.hello_ack(OUR_INCARNATION));
        match committed {
            true => {
                assert_eq!(outcome, ["RESUME 1"], "step {step}");
                let again = message.start(Some(0));
                assert_eq!(p.says(again), ["ACK 1", "duplicates +1"]);
                after += 1;
            }
            false => {
                let again = message.start(Some(0));
                p.says(again);
                before += 1;
            }
        }
        assert_eq!(p.delivered(), 1, "step {step}");
    }
    assert!(before >= 3 && after >= 3, "{before} before, {after} after");
}

// Figure 5's ACK, had it been sent: the sender keeps what it did not hear committed. Expect: with a RESUME 0 after an ACK 1
// nothing is sent again, so the ACK must be, and is, the later of the two stores.
#[test]
fn figure_5_what_was_acknowledged_is_gone() {
    let mut p = puppet();
    p.sends(100);
    assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
    p.header.engine_epoch = p.header.engine_epoch.wrapping_add(1);
    assert_eq!(p.says(p.resume(0)), ["peer_takeovers +1"]);
    assert_eq!(p.waits(1_000_000_000), NOTHING);
}
