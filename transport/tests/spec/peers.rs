//! §2: who is there. transport.md §2.1, §2.2, §2.3, §2.4, §2.5, §2.7, §2.8

use portolan_sim::harness::{MS, SECOND, US};
use portolan_sim::puppet::{NOTHING, OUR_INCARNATION, Puppet};
use portolan_transport::endpoint::PeerState;
use portolan_transport::wire::Chunk;
use portolan_transport::wire::chunk::Hello;

use crate::{REBORN, any, policy, puppet, reborn};

// HELLO is repeated after 10 ms, doubling to 500 ms, while somebody waits. transport.md §2.1
#[test]
fn s2_1_hello_is_repeated_while_anybody_waits() {
    let mut p = Puppet::stranger(policy(), 1, 1458);
    let start = p.now;
    assert_eq!(p.sends(100), ["HELLO from us to nobody"]);
    let mut at = Vec::new();
    while at.len() < 9 {
        if any(&p.waits(MS), "HELLO") {
            at.push((p.now - start) / MS);
        }
    }
    let gaps: Vec<u64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!((10..12).contains(&at[0]), "{at:?}");
    assert!((19..22).contains(&gaps[0]), "{gaps:?}");
    assert!(
        gaps.is_sorted() && (498..=502).contains(&gaps[7]),
        "{gaps:?}"
    );
    // Nobody waits: nothing is asked.
    let mut idle = Puppet::stranger(policy(), 1, 1458);
    assert_eq!(idle.waits(10 * SECOND), NOTHING);
}

// What must be alike and is not is answered by RESET with the reason; what is each end's own fits. transport.md §2.2, §12
#[test]
fn s2_2_misfits_are_named() {
    type Change = fn(&mut Hello<'static>);
    let cases: [(Change, &str); 5] = [
        (|h| h.cluster ^= 1, "RESET cluster"),
        (|h| (h.wire_min, h.wire_max) = (2, 3), "RESET version"),
        (|h| h.policy.recovery = 0, "RESET policy 1"),
        (|h| h.policy.recovery = 2, "RESET policy 1"),
        (|h| h.policy.ack_rule = 2, "RESET policy 2"),
    ];
    for (change, answer) in cases {
        let mut p = Puppet::stranger(policy(), 1, 1458);
        let hello = p.hello_but(change);
        assert_eq!(
            p.says(hello),
            ["dropped: NotAssociated", answer, "peers_incompatible +1"]
        );
    }
    let mut p = puppet();
    let fits = p.hello_but(|h| (h.policy.order, h.window, h.wire_max) = (2, 1, 9));
    assert_eq!(p.says(fits), ["HELLO-ACK from us to them"]);
}

// Sends to a node that does not fit end so; after a second it is asked again. transport.md §2.2
#[test]
fn s2_2_sends_to_an_incompatible_node() {
    let mut p = Puppet::stranger(policy(), 1, 1458);
    p.sends(100);
    let reset = Chunk::Reset {
        src_incarnation: OUR_INCARNATION as u32,
        dst_incarnation: 0,
        reason: 4,
        detail: 1,
    };
    let outcome = p.says(reset);
    assert_eq!(outcome[0], "completes 0 NotDelivered(Incompatible)");
    assert_eq!(p.sends(100), ["completes 1 NotDelivered(Incompatible)"]);
    p.waits(SECOND);
    let outcome = p.sends(100);
    assert!(any(&outcome, "HELLO"), "{outcome:?}");
}

// RESETs: sixteen at once, then one per millisecond, whoever provokes them. transport.md §2.3
#[test]
fn s2_3_resets_are_few() {
    let mut p = puppet();
    let right = p.header;
    let wrong = |p: &mut Puppet, count: u32| -> usize {
        let mut answers = 0;
        for stranger in 1..=count {
            p.header.src_incarnation = right.src_incarnation ^ stranger;
            let lie = p.ack(0);
            answers += usize::from(any(&p.says(lie), "RESET"));
        }
        answers
    };
    assert_eq!(wrong(&mut p, 40), 16);
    p.waits(3 * MS);
    assert_eq!(wrong(&mut p, 40), 3);
}

// A restarted peer: what was transmitted to its old self is MaybeDelivered, what was not goes to the new one under a new epoch; what the
// old one half sent is forgotten. transport.md §2.4
#[test]
fn s2_4_a_restarted_peer() {
    let mut p = Puppet::new(
        portolan_transport::policy::Policy {
            window_messages: 1,
            ..policy()
        },
        8,
    );
    let request = p.rts(0, 3_000, 1_000);
    p.says(request);
    p.sends(100);
    p.sends(200);
    assert_eq!((p.host.claimed(), p.host.records()), (1, (1, 1)));
    let outcome = reborn(&mut p);
    assert_eq!(outcome[0], "completes 0 MaybeDelivered(PeerRestarted)");
    assert!(any(&outcome, "EAGER 1 start 1, 200 bytes @"), "{outcome:?}");
    assert_eq!((p.host.claimed(), p.host.records()), (0, (1, 0)));
}

// An incarnation that was taken for superseded. Expect: from the dead, but asked; who answers what only the living heard is believed again, and
// the other one never was. transport.md §2.4
#[test]
fn s2_4_an_incarnation_that_was_never_superseded() {
    for lives in [false, true] {
        let mut p = puppet();
        let (incarnation, header) = (p.incarnation, p.header);
        reborn(&mut p);
        p.echo = p.last_heard();
        (p.incarnation, p.header) = (incarnation, header);
        let outcome = p.says(p.hello(OUR_INCARNATION));
        assert_eq!(outcome[0], "dropped: WrongIncarnation");
        assert!(any(&outcome, "HELLO from us"), "{outcome:?}");
        if lives {
            p.echo = p.last_heard();
        }
        let outcome = p.says(p.hello_ack(OUR_INCARNATION));
        assert_eq!(any(&outcome, "peer_restarts +1"), lives, "{outcome:?}");
        assert_eq!(any(&outcome, "dropped: WrongIncarnation"), !lives);
        if lives {
            // It is who it was, and the other one is gone.
            assert!(any(&p.says(p.hello(OUR_INCARNATION)), "HELLO-ACK"));
            (p.incarnation, p.header.src_incarnation) = (REBORN, REBORN as u32);
            let outcome = p.says(p.hello(0));
            assert_eq!(outcome[0], "dropped: WrongIncarnation");
        }
    }
}

// A replaced engine: what is volatile about it is void, committed numbers stay; its predecessor's frames are from the dead.
// transport.md §2.5
#[test]
fn s2_5_a_replaced_engine() {
    let mut p = puppet();
    let (message, request) = (p.eager(0), p.rts(1, 3_000, 1_000));
    p.says(message);
    p.says(request.clone());
    p.sends(100);
    assert_eq!(p.host.claimed(), 1);
    let before = p.header;
    p.header.engine_epoch = before.engine_epoch.wrapping_add(1);
    let outcome = p.says(p.resume(0));
    assert_eq!(
        outcome,
        ["EAGER 0, 100 bytes", "peer_takeovers +1", "retransmits +1"]
    );
    assert_eq!(p.host.claimed(), 0);
    let after = std::mem::replace(&mut p.header, before);
    let asked = "HELLO from us to them";
    let outcome = p.says(request.clone());
    assert_eq!(outcome, ["dropped: StaleEngine", asked]);
    p.header = after;
    let outcome = p.says(request);
    assert!(any(&outcome, "CTS 1"), "{outcome:?}");
    assert_eq!(p.delivered(), 1);
}

// An engine that was taken for dead, since another epoch was heard of. Expect: asked, and dropped until it says what only the living can say, that it
// has heard us since; then it is believed, as any successor. transport.md §2.5
#[test]
fn s2_5_an_epoch_that_was_never_true() {
    let mut p = puppet();
    p.sends(100);
    p.waits(US);
    p.echo = p.last_heard();
    let truth = p.header;
    p.header.engine_epoch = truth.engine_epoch.wrapping_add(29);
    assert!(any(&p.says(p.ack(0)), "peer_takeovers"));
    p.header = truth;
    let asked = "HELLO from us to them";
    assert_eq!(p.says(p.ack(1)), ["dropped: StaleEngine", asked]);
    assert_eq!(p.says(p.ack(1)), ["dropped: StaleEngine"]);
    p.echo = p.last_heard();
    let outcome = p.says(p.ack(1));
    assert_eq!(outcome[0], "completes 0 Delivered", "{outcome:?}");
    assert!(any(&outcome, "peer_takeovers +1"), "{outcome:?}");
}

// Silence: transmitted sends may have arrived, others did not; what the silent peer held here comes back. transport.md §2.7
#[test]
fn s2_7_silence() {
    let mut p = Puppet::new(
        portolan_transport::policy::Policy {
            window_messages: 1,
            ..policy()
        },
        8,
    );
    let request = p.rts(0, 3_000, 1_000);
    p.says(request);
    p.sends(100);
    p.sends(200);
    let after = u64::from(policy().unreachable_after_ms) * MS;
    let outcome = p.waits(after / 2);
    assert!(!any(&outcome, "completes"), "{outcome:?}");
    let outcome = p.waits(after);
    assert!(any(&outcome, "completes 0 MaybeDelivered(Unreachable)"));
    assert!(any(&outcome, "completes 1 NotDelivered(Unreachable)"));
    p.waits(after);
    assert_eq!(p.host.claimed(), 0);
    // And here it is again.
    let outcome = p.sends(100);
    assert!(!any(&outcome, "completes"), "{outcome:?}");
    // Nobody here waits for it, but it holds a buffer.
    let mut p = puppet();
    let request = p.rts(0, 3_000, 1_000);
    p.says(request);
    p.waits(after / 2);
    assert_eq!(p.host.claimed(), 1);
    p.waits(after);
    assert_eq!(p.host.claimed(), 0);
}

// Whoever is greeted by a peer with long frames owes it a HELLO-ACK, and has a path to prove. Expect: the answer goes first, as the peer believes nobody, and so no
// probe, before it has it; and the probe at once. transport.md §2.6
#[test]
fn s2_6_a_probe_does_not_overtake_the_handshake() {
    let mut p = Puppet::stranger(policy(), 8, 9_000);
    let outcome = p.sends(100);
    assert!(any(&outcome, "HELLO from us"), "{outcome:?}");
    let answer = [p.hello_ack(OUR_INCARNATION), p.hello(OUR_INCARNATION)];
    let outcome = p.says_all(answer.map(Into::into).to_vec());
    let at = |what: &str| outcome.iter().position(|line| line.starts_with(what));
    let (told, proved) = (at("HELLO-ACK from us"), at("PATH-PROBE 9000"));
    assert!(told.is_some() && told < proved, "{outcome:?}");
    assert!(any(&outcome, "EAGER 0"), "{outcome:?}");
}

// An idle peer costs nothing but its durable record, which still refuses what is late. transport.md §2.8
#[test]
fn s2_8_idle_peers_are_forgotten() {
    let mut p = puppet();
    let message = p.eager(0);
    p.says(message.clone());
    p.says(p.close(1));
    p.waits(2 * u64::from(policy().peer_idle_ms) * MS);
    assert_eq!(p.endpoint.peers().count(), 0);
    let floor = p.floor();
    assert_ne!(floor, 0);
    p.greets();
    let state = p.endpoint.peers().next().map(|peer| peer.state);
    assert_eq!((state, p.floor()), (Some(PeerState::Up), floor));
    let late = message.start(Some(0));
    assert_eq!(p.says(late), ["REFUSED", "streams_refused +1"]);
}
