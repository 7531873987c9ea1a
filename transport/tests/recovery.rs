//! Recovery as dialogues: what the receiver keeps, what the sender finds lost, and what survives a takeover. transport.md §5.3, §5.4, §5.5,
//! §6.1, §7.1, §7.2, §7.5

use portolan_sim::harness::{Faults, MS, Net, SECOND, US, all_delivered, node};
use portolan_sim::puppet::{NOTHING, Puppet};
use portolan_transport::host::Verdict;
use portolan_transport::policy::{Ack, AckMode, OnTimeout, Policy, Profile, Recovery};

fn policy() -> Policy {
    Policy {
        recovery: Recovery::Selective,
        ack: Ack::Immediate,
        ..Policy::default()
    }
}

/// An endpoint that has sent messages 0 to `count - 1`, `apart` from each other, and a puppet that heard them all.
fn sent(policy: Policy, count: u32, apart: u64) -> Puppet {
    let mut p = Puppet::new(policy, 4);
    p.sends(100);
    let established = p.ack(1);
    p.says(established);
    for _ in 1..=count {
        p.waits(apart);
        p.sends(100);
    }
    p
}

/// Lines that say what was sent.
fn eagers(lines: &[String]) -> Vec<String> {
    let eager = lines.iter().filter(|line| line.starts_with("EAGER"));
    eager.map(|line| line[..7].to_string()).collect()
}

// ---- the receiver ----

// Two tokens, and messages 1 and 2 come first. Expect: 0 takes the token of 2, the youngest; 0 and 1 are delivered; 2 waits for a
// token and is told when one comes.
#[test]
fn the_next_number_takes_the_youngest_ones_token() {
    let mut p = Puppet::new(policy(), 2);
    let (zero, one, two) = (p.eager(0), p.eager(1), p.eager(2));
    p.says(one);
    assert_eq!(p.says(two.clone()), ["ACK 0 +1 +2"]);
    let outcome = p.says(zero);
    assert_eq!(
        outcome,
        [
            "delivers 0",
            "delivers 1",
            "ACK 2",
            "NACK 2 no buffer",
            "tokens_taken_back +1"
        ]
    );
    assert_eq!(p.provides(1000), ["READY 2"]);
    assert_eq!(p.says(two), ["delivers 2", "ACK 3"]);
}

// A lower number takes the token of a higher one of its stream even while something before both is missing. The acknowledgement does not
// list the loser any more.
#[test]
fn a_lower_number_takes_a_higher_ones_token() {
    let mut p = Puppet::new(policy(), 1);
    let (one, two) = (p.eager(1), p.eager(2));
    p.says(two.clone());
    let outcome = p.says(one);
    let told = ["ACK 0 +1", "NACK 2 no buffer", "tokens_taken_back +1"];
    assert_eq!(outcome, told);
    // The other way round nothing is taken.
    assert_eq!(p.says(two), ["NACK 2 no buffer", "no_buffer +1"]);
}

// Message 1 finds no token; one comes, and 2 arrives before 1 does. Expect: the token is kept for 1.
#[test]
fn a_token_is_for_the_number_that_waits() {
    let mut p = Puppet::new(policy(), 1);
    let (zero, one, two) = (p.eager(0), p.eager(1), p.eager(2));
    p.says(zero);
    assert_eq!(p.says(one.clone()), ["NACK 1 no buffer", "no_buffer +1"]);
    assert_eq!(p.says(two.clone()), ["no_buffer +1"]);
    assert_eq!(p.provides(1000), ["READY 1"]);
    assert_eq!(p.says(two), ["ACK 1", "no_buffer +1"]);
    assert_eq!(p.says(one), ["delivers 1", "ACK 2"]);
}

// A short message is committed while a long one is under way, then the engine dies. Expect: told by MSGEND, told again by the successor,
// never delivered again; the long one is delivered when it comes again.
#[test]
fn what_was_committed_ahead_stays_committed() {
    let mut p = Puppet::new(Profile::Rmpp.policy(), 4);
    let (long, short) = (p.rts(0, 2000, 1000), p.eager(1));
    p.says(long.clone());
    assert_eq!(p.says(short.clone())[..2], ["delivers 1", "ACK 0"]);
    p.dies();
    p.is_restored();
    p.greets();
    assert_eq!(p.says(short), ["ACK 0", "MSGEND 1", "duplicates +1"]);
    p.says(long);
    let rest = p.data(0, 1000, 2000);
    assert_eq!(p.says(rest), ["delivers 0", "ACK 2", "MSGEND 0"]);
    assert_eq!(p.delivered(), 2);
}

// The application refuses a message, its engine dies, and a late copy arrives at the successor, whose application would take it.
// Expect: it stays refused, since its sender may have been told.
#[test]
fn a_refusal_outlives_the_engine() {
    let mut p = Puppet::new(policy(), 4);
    p.host.wants_offers = true;
    p.host.verdicts.extend([Verdict::Refuse, Verdict::Accept]);
    let message = p.eager(0);
    let outcome = p.says(message.clone());
    assert!(outcome.contains(&"MSGDROP 0 refused".into()), "{outcome:?}");
    p.dies();
    p.is_restored();
    p.greets();
    let outcome = p.says(message);
    assert!(
        outcome.contains(&"NULL-ACK 0 not delivered".into()),
        "{outcome:?}"
    );
    assert_eq!((p.delivered(), p.host.claimed()), (0, 0));
}

// Every second message wants its acknowledgement at once, the others whenever. Expect: as the sender says, whatever the policy; a lazy one
// goes with the next frame, or alone before the sender's timer.
#[test]
fn the_sender_says_when_to_acknowledge() {
    let delayed = Policy {
        ack: Ack::Delayed { delay_us: 500 },
        ..policy()
    };
    let mut p = Puppet::new(delayed, 4);
    let (one, two) = (p.eager(0), p.eager(1).acked(AckMode::Immediate));
    let first = p.says(one);
    assert!(!first.contains(&"ACK 1".into()), "{first:?}");
    assert_eq!(p.says(two), ["delivers 1", "ACK 2"]);

    let mut p = Puppet::new(policy(), 4);
    let (one, two) = (p.eager(0), p.eager(1).acked(AckMode::Lazy));
    p.says(one);
    assert_eq!(p.says(two), ["delivers 1"]);
    let bound = u64::from(policy().rto_min_us) * US;
    assert_eq!(p.waits(bound), ["ACK 2"]);
}

#[test]
fn a_piggybacked_acknowledgement_waits_for_a_frame() {
    let lazy = Policy {
        ack: Ack::Piggybacked { at_most_us: 300 },
        ..policy()
    };
    let mut p = Puppet::new(lazy, 40);
    for number in 0..20 {
        let message = p.eager(number);
        let outcome = p.says(message);
        assert!(!outcome.iter().any(|l| l.starts_with("ACK")), "{outcome:?}");
    }
    assert_eq!(p.waits(300 * US), ["ACK 20"]);
    let message = p.eager(20);
    p.says(message);
    let outcome = p.sends(100);
    assert_eq!(outcome[0], "ACK 21", "{outcome:?}");
}

// ---- the sender ----

// Messages 1 to 4 went out one after the other; 2 is not listed. Expect: it goes out again, once; and again when an acknowledgement that was written
// after a later frame arrived still does not list it.
#[test]
fn what_is_not_listed_goes_out_again() {
    let mut p = sent(policy(), 4, 10 * US);
    let hole = p.ack_with(2, &[3, 4]);
    assert_eq!(eagers(&p.says(hole.clone())), ["EAGER 2"]);
    assert_eq!(eagers(&p.says(hole.clone())), NOTHING);
    p.waits(10 * US);
    p.sends(100);
    let hole = p.ack_with(2, &[3, 4, 5]);
    assert_eq!(eagers(&p.says(hole)), ["EAGER 2"]);
    assert_eq!(p.counter("losses_found"), 2);
    let all = p.ack(6);
    assert_eq!(p.says(all).len(), 4, "2 to 5 are complete");
}

// The same, but the frames left so close together that they may have changed places. Expect: nothing at once; when the reorder window is
// over, 2. And nothing at all if it is listed meanwhile.
#[test]
fn what_was_overtaken_is_not_lost() {
    for meanwhile in [true, false] {
        let mut p = sent(policy(), 4, US / 10);
        let hole = p.ack_with(2, &[3, 4]);
        assert_eq!(eagers(&p.says(hole)), NOTHING);
        if meanwhile {
            let listed = p.ack_with(1, &[2, 3, 4]);
            p.says(listed);
        }
        let outcome = eagers(&p.waits(20 * US));
        match meanwhile {
            true => assert_eq!(outcome, NOTHING),
            false => assert_eq!(outcome, ["EAGER 2"]),
        }
    }
}

// An acknowledgement that was overtaken by a newer one, and lists less. Expect: believed in nothing but its base.
#[test]
fn a_late_acknowledgement_is_no_news() {
    let mut p = sent(policy(), 2, 10 * US);
    p.waits(10 * US);
    let less = p.ack_with(1, &[2]);
    let late = p.frame(&[less]);
    p.waits(US);
    let all = p.ack_with(1, &[1, 2]);
    p.says(all);
    assert_eq!(p.says_bytes(&late), NOTHING);
    assert_eq!(p.counter("messages_reneged"), 0);
}

// Listed, and not any more: its buffer went to another. Expect: it goes out again without having been lost.
#[test]
fn what_is_not_listed_any_more_goes_out_again() {
    let mut p = sent(policy(), 3, 10 * US);
    let listed = p.ack_with(1, &[2, 3]);
    assert_eq!(eagers(&p.says(listed)), ["EAGER 1"]);
    p.waits(10 * US);
    let forgotten = p.ack_with(1, &[2]);
    assert_eq!(eagers(&p.says(forgotten)), ["EAGER 3"]);
    assert_eq!(p.counter("messages_reneged"), 1);
    // Even if the answer that said so was lost: everything looks received, but the timer asks.
    let mut p = sent(policy(), 2, 10 * US);
    let listed = p.ack_with(1, &[1, 2]);
    assert_eq!(p.says(listed), NOTHING);
    let asked = p.waits(2 * MS);
    assert!(asked.iter().any(|l| l.starts_with("PROBE")), "{asked:?}");
    let forgotten = p.ack(1);
    assert_eq!(eagers(&p.says(forgotten)), ["EAGER 1", "EAGER 2"]);
}

// What is lost goes before what is new, when the window holds both.
#[test]
fn the_lost_go_first() {
    let narrow = Policy {
        window_messages: 4,
        ..policy()
    };
    let mut p = sent(narrow, 4, 10 * US);
    p.sends(100);
    p.sends(100);
    let hole = p.ack_with(2, &[4]);
    assert_eq!(eagers(&p.says(hole)), ["EAGER 2", "EAGER 3", "EAGER 5"]);
}

// A message in the middle finds no buffer. Expect: it and those after it wait, one before it does not; READY lets them go.
#[test]
fn want_of_a_buffer_holds_only_later_numbers() {
    let mut p = sent(policy(), 4, 10 * US);
    let (nack, ack) = (p.nack(3, 2), p.ack_with(1, &[2]));
    assert_eq!(eagers(&p.says_all(vec![ack, nack])), ["EAGER 1"]);
    assert_eq!(p.sends(100), NOTHING);
    let ready = p.ready(3);
    let outcome = eagers(&p.says(ready));
    assert_eq!(outcome, ["EAGER 3", "EAGER 4", "EAGER 5"]);
}

// ParaStation2: the acknowledgements of 1 and 2 are lost, that of 3 arrives. Expect: 3 is complete, 1 and 2 go out again.
#[test]
fn an_exact_acknowledgement_shows_which_were_lost() {
    let exact = Profile::ParaStation2.policy();
    let mut p = sent(exact, 3, 10 * US);
    let third = p.ack(4);
    let outcome = p.says(third);
    assert_eq!(outcome[0], "completes 3 Delivered");
    assert_eq!(eagers(&outcome), ["EAGER 1", "EAGER 2"]);
    // An old one is no news.
    let old = p.ack(1);
    assert_eq!(p.says(old), NOTHING);
}

// The receiver's engine died after it told of a drop, before it committed it: it acknowledges less than was settled. Expect: NULL in its
// place.
#[test]
fn a_base_that_fell_back_is_filled() {
    let mut p = sent(policy(), 1, 10 * US);
    let dropped = p.msg_drop(1, portolan_transport::host::Reason::TooLong);
    p.says(dropped);
    p.resumes();
    p.waits(10 * US);
    p.sends(100);
    let behind = p.ack_with(1, &[2]);
    let outcome = p.says(behind);
    assert!(outcome.iter().any(|l| l == "NULL 1"), "{outcome:?}");
}

// The timer sends data instead of asking. Expect: only the oldest message that is not listed.
#[test]
fn the_timer_sends_the_oldest_again() {
    let resend = Policy {
        on_timeout: OnTimeout::Resend,
        ..policy()
    };
    let mut p = sent(resend, 3, US / 10);
    let outcome = p.waits(2 * MS);
    assert_eq!(eagers(&outcome), ["EAGER 1"], "{outcome:?}");
}

// ---- both ----

// A network that only reorders, by less than a quarter of the round trip. Expect: nothing goes out twice but unasked bytes that overtook their request,
// which three in ten may do here: less than a fiftieth of all.
#[test]
fn little_reordering_costs_nothing() {
    let mut net = Net::with_policy(3, 2, 1, policy());
    net.open(node(1), 1, 8, 1 << 20);
    net.open(node(2), 2, 255, 1 << 20);
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    net.faults = Faults {
        late: 300,
        late_by: 10 * US,
        delay: 40 * US,
        ..Faults::NONE
    };
    // The way became longer: what it takes now must be learned first.
    net.send_many((1, 1), (2, 2), 1000, 10);
    net.settle(SECOND);
    let before = ["retransmits", "retransmitted_bytes"].map(|name| net.counter(name));
    for _ in 0..40 {
        net.send_many((1, 1), (2, 2), 1000, 10);
        net.send((1, 1), (2, 2), 100_000);
        net.run_for(100 * US);
    }
    net.settle(SECOND);
    all_delivered(&net);
    let again = net.counter("retransmits") - before[0];
    assert!(again <= 4, "{again} messages went out twice");
    let again = net.counter("retransmitted_bytes") - before[1];
    assert!(again <= 80_000, "{again} bytes went out twice");
}

// One frame in twenty is lost. Expect: what goes out again is about as much.
#[test]
fn only_what_was_lost_goes_out_again() {
    let mut net = Net::with_policy(3, 2, 1, policy());
    net.open(node(1), 1, 8, 1 << 20);
    net.open(node(2), 2, 255, 1 << 20);
    net.faults = Faults::loss(50);
    for _ in 0..60 {
        net.send_many((1, 1), (2, 2), 1300, 20);
        net.run_for(100 * US);
    }
    net.settle(SECOND);
    all_delivered(&net);
    let again = net.counter("retransmits");
    assert!(
        (30..=100).contains(&again),
        "{again} of 1200 went out again"
    );
}

// Long messages one behind the other, and one frame in a hundred is lost, grants and last bytes included. Expect: no timer is needed, because
// what follows shows each loss; and little goes out for nothing.
#[test]
fn losses_in_a_flow_need_no_timer() {
    let mut net = Net::with_policy(3, 2, 1, policy());
    net.open(node(1), 1, 8, 1 << 20);
    net.open(node(2), 2, 255, 1 << 20);
    net.send((1, 1), (2, 2), 100);
    net.settle(SECOND);
    net.faults = Faults::loss(10);
    for _ in 0..20 {
        net.send_many((1, 1), (2, 2), 8192, 50);
        let few = |net: &Net| net.book.borrow().waiting_len() < 50;
        net.run_until(SECOND, "room for more", few);
    }
    assert_eq!(net.counter("timeouts"), 0);
    net.settle(SECOND);
    all_delivered(&net);
    let lost = net.counter("retransmitted_bytes") + 1400 * net.counter("retransmits");
    assert!((40_000..160_000).contains(&lost), "{lost} of 8 MB");
}

// A long message arrives with more holes than are remembered. Expect: what would be one too many is dropped and counted, and the message
// arrives when everything comes again.
#[test]
fn more_holes_than_are_remembered() {
    let mut p = Puppet::new(policy(), 4);
    let request = p.rts(0, 10_000, 1000);
    p.says(request);
    for from in (1100..9000).step_by(200) {
        let piece = p.data(0, from, from + 100);
        p.says(piece);
    }
    // 32 ranges, of which the first bytes are one, and 40 pieces.
    assert_eq!(p.counter("ranges_full"), 9);
    assert_eq!(p.delivered(), 0);
    for from in (1000..10_000).step_by(1000) {
        let piece = p.data(0, from, from + 1000);
        p.says(piece);
    }
    assert_eq!((p.delivered(), p.host.claimed()), (1, 0));
}
