//! §5 and §6: what receivers do. transport.md §5.4, §5.5, §5.6, §6.1, §6.2, §14

use portolan_sim::harness::{MS, SECOND, US};
use portolan_sim::puppet::{MAX_LEN, NOTHING, Puppet};
use portolan_transport::policy::{Ack, Policy, Profile};

use crate::{any, policy, puppet};

// A message takes the smallest buffer that holds it. transport.md §5.4
#[test]
fn s5_4_the_smallest_buffer_that_fits() {
    let mut p = Puppet::new(policy(), 0);
    for len in [1_000, 100, 500] {
        p.provides(len);
    }
    let (small, middle, large) = (p.eager_of(0, 100), p.eager_of(1, 101), p.eager_of(2, 501));
    for (say, number) in [(small, 0), (middle, 1), (large, 2)] {
        let outcome = p.says(say);
        assert!(any(&outcome, &format!("delivers {number}")), "{outcome:?}");
    }
}

// Want of a buffer: a NACK for the first number that has none, silence about those beyond it; the sender probes with headers, backing off; READY sets it off again. transport.md §5.5
#[test]
fn s5_5_want_of_a_buffer() {
    let mut p = Puppet::new(policy(), 0);
    let message = p.eager(0);
    assert_eq!(
        p.says(message.clone()),
        ["NACK 0 no buffer", "no_buffer +1", "streams_opened +1"]
    );
    let beyond = p.eager(1);
    assert_eq!(p.says(beyond), ["no_buffer +1"]);
    assert_eq!(p.provides(MAX_LEN), ["READY 0"]);
    assert_eq!(p.says(message), ["delivers 0", "ACK 1"]);

    let mut p = puppet();
    p.sends(100);
    assert_eq!(p.says(p.nack(0, 2)), NOTHING);
    let mut probes = Vec::new();
    for _ in 0..2_000 {
        let outcome = p.waits(MS);
        assert!(!any(&outcome, "EAGER"), "{outcome:?}");
        if any(&outcome, "PROBE 0") {
            probes.push(p.now / MS);
            let still = p.nack(0, 2);
            p.says(still);
        }
    }
    let gaps: Vec<u64> = probes.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(
        gaps.len() > 4 && gaps.last() > Some(&(4 * gaps[0])),
        "{gaps:?}"
    );
    let outcome = p.says(p.ready(0));
    assert!(any(&outcome, "EAGER 0"), "{outcome:?}");
}

// A message that no buffer can ever hold: told, and its number committed only when the sender knows; no acknowledgement crosses it before.
// The same for a NULL. transport.md §5.6
#[test]
fn s5_6_no_acknowledgement_crosses_what_is_not_confirmed() {
    let mut p = puppet();
    let (long, next) = (p.rts(0, MAX_LEN + 1, 1_000), p.eager(1));
    let outcome = p.says(long);
    assert!(any(&outcome, "MSGDROP 0 too long"), "{outcome:?}");
    let outcome = p.says(next);
    assert!(
        !any(&outcome, "ACK 1") && !any(&outcome, "ACK 2"),
        "{outcome:?}"
    );
    let outcome = p.says(p.drop_confirm(0));
    assert!(any(&outcome, "ACK 2"), "{outcome:?}");
    let (null, next) = (p.null(2), p.eager(3));
    let outcome = p.says(null);
    assert!(any(&outcome, "ACK 2"), "{outcome:?}");
    let outcome = p.says(next);
    assert_eq!(outcome[0], "delivers 3");
    assert!(any(&outcome, "ACK 2"), "{outcome:?}");
    let outcome = p.says(p.drop_confirm(2));
    assert!(any(&outcome, "ACK 4"), "{outcome:?}");
}

// A window of messages that are refused for good, and every DROP-CONFIRM lost; to the sender they are over, so it sends what follows. Expect with any
// recovery: told again, until it is confirmed; no violation. Without that both wait for each other, go-back-N at the rate of the line. transport.md §5.6
#[test]
fn s5_6_a_window_of_refusals_is_told_again() {
    for profile in Profile::ALL {
        let mut p = Puppet::new(profile.policy(), 16);
        let window = profile.policy().window_messages;
        for number in 0..window {
            let long = p.rts(number, MAX_LEN + 1, 100);
            p.says(long);
        }
        let (mut told, mut rounds) = (0, 0);
        while told < window {
            rounds += 1;
            assert!(rounds <= window, "{profile:?}: {told} of {window}");
            let beyond = p.eager(window);
            let outcome = p.says(beyond);
            assert!(any(&outcome, "MSGDROP"), "{profile:?}: {outcome:?}");
            assert!(!any(&outcome, "violation"), "{profile:?}: {outcome:?}");
            let drops = outcome.iter().filter(|line| line.starts_with("MSGDROP"));
            for _ in 0..drops.count() {
                p.says(p.drop_confirm(told));
                told += 1;
            }
        }
        let beyond = p.eager(window);
        let outcome = p.says(beyond);
        assert_eq!(p.delivered(), 1, "{profile:?}: {outcome:?}");
    }
}

// Given-up numbers that are not confirmed: sixteen per stream, then no more commits until one is. transport.md §14
#[test]
fn s14_given_up_numbers_are_bounded() {
    let mut p = puppet();
    for number in 0..20 {
        let null = p.null(number);
        p.says(null);
    }
    let next = p.eager(20);
    let outcome = p.says(next);
    assert!(!any(&outcome, "delivers"), "{outcome:?}");
    for number in 0..20 {
        p.says(p.drop_confirm(number));
    }
    assert_eq!(p.delivered(), 1);
}

// An answer and the acknowledgement of what it answers come in one frame, as in a ping-pong. Expect: nothing leaves for it, until the
// application has something to say or the delay is over. transport.md §6.1
#[test]
fn s6_1_an_acknowledgement_waits_for_the_answer() {
    let policy = Policy {
        ack: Ack::Delayed { delay_us: 50 },
        ..policy()
    };
    for speaks in [true, false] {
        let mut p = Puppet::new(policy, 16);
        p.sends(100);
        let (ack, answer) = (p.ack(1), p.eager(0));
        let outcome = p.says_all(vec![ack, answer]);
        assert!(!any(&outcome, "ACK"), "{outcome:?}");
        if speaks {
            let outcome = p.sends(100);
            assert!(
                any(&outcome, "ACK 1") && any(&outcome, "EAGER 1"),
                "{outcome:?}"
            );
        } else {
            assert!(any(&p.waits(60 * US), "ACK 1"));
        }
    }
}

// Acknowledgements: delayed within their bound, at once when a quarter of the window waits, and with any frame that goes. What fills a
// gap is answered at once. transport.md §6.1
#[test]
fn s6_1_when_to_acknowledge() {
    let policy = Policy {
        ack: Ack::Delayed { delay_us: 50 },
        window_messages: 16,
        ..policy()
    };
    let mut p = Puppet::new(policy, 16);
    let mut acks = Vec::new();
    for number in 0..4 {
        let message = p.eager(number);
        acks.push(any(&p.says(message), "ACK"));
    }
    assert_eq!(acks, [false, false, false, true]);
    let message = p.eager(4);
    assert_eq!(p.says(message), ["delivers 4"]);
    assert_eq!(p.waits(45 * US), NOTHING);
    assert_eq!(p.waits(10 * US), ["ACK 5"]);
    let message = p.eager(5);
    p.says(message);
    let outcome = p.sends(10);
    assert_eq!(outcome[..2], ["ACK 6", "EAGER 0 start 0, 10 bytes"]);
    let (early, gap) = (p.eager(7), p.eager(6));
    assert_eq!(p.says(early), ["ACK 6 +7"]);
    assert_eq!(p.says(gap), ["delivers 6", "delivers 7", "ACK 8"]);
}

// An acknowledgement says what is so when it is sent, and nothing is repeated for ever. transport.md §6.2
#[test]
fn s6_2_an_acknowledgement_is_the_state() {
    let mut p = puppet();
    let all = (0..3).map(|number| p.eager(number)).collect();
    assert_eq!(
        p.says_all(all),
        [
            "delivers 0",
            "delivers 1",
            "delivers 2",
            "ACK 3",
            "streams_opened +1"
        ]
    );
    assert_eq!(p.waits(SECOND), NOTHING);
}
