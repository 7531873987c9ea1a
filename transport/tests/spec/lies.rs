//! §15: a peer whose frames are well formed and whose chunks are not true. transport.md §15
//!
//! Chunks of every kind with numbers near what the endpoint expects, in any order, under every profile, with time passing, sends,
//! cancels and takeovers between them. Expect: the endpoint stays consistent, keeps its contract with the host (which judges every call), and never
//! delivers bytes that fail their checksum. `PORTOLAN_SEEDS` makes it longer.

use portolan_sim::harness::{MS, Rng, US, node, seeds};
use portolan_sim::puppet::{MAX_LEN, OUR_INCARNATION, Puppet, Say};
use portolan_transport::host::Reason;
use portolan_transport::policy::{AckMode, Profile};

use crate::{any, policy};

/// A number close to this one.
fn near(rng: &mut Rng, number: u32) -> u32 {
    (number + rng.below(6) as u32).saturating_sub(rng.below(6) as u32)
}

/// A chunk, true or not.
fn lie(p: &mut Puppet, rng: &mut Rng, ours: u32, theirs: u32) -> Say {
    let (ours, theirs) = (near(rng, ours), near(rng, theirs));
    let byte = rng.below(8) as u32 * 700;
    let rarely = rng.chance(100);
    let say = match rng.below(22) {
        0..=2 => p.eager(theirs),
        3 => p.rts(theirs, 100, 0),
        4 => p.rts(theirs, 100, 50),
        5 => p.data(theirs, rng.below(50) as u32, 51 + rng.below(50) as u32),
        6 => p.cts(ours, byte, &[]),
        7 => p.cts(ours, byte + 700, &[(byte / 2, byte / 2 + 300)]),
        8 => p.msg_end(ours),
        9 => p.ack(ours),
        10 => p.ack_with(ours, &[ours + rng.below(4) as u32]),
        11 => p.nack(ours, 1 + rng.below(4) as u8),
        12 => p.ready(ours),
        13 => p.probe(theirs, 100),
        14 => p.msg_drop(ours, Reason::TooLong),
        15 => p.drop_confirm(theirs),
        16 => p.null(theirs),
        17 => p.null_ack(ours, rng.chance(500)),
        18 if rarely => p.port_closed(ours),
        19 if rarely => p.close(theirs),
        20 if rarely => p.refused(),
        21 => p.closed(),
        _ => p.resume(ours),
    };
    let say = match rng.chance(30) {
        true => say.epoch(rng.below(3) as i32 - 1),
        false => say,
    };
    match rng.below(8) {
        0 | 1 => say.start(Some(near(rng, theirs))),
        2 => say.acked(AckMode::Immediate),
        3 => say.acked(AckMode::Lazy),
        _ => say,
    }
}

/// What may happen between two frames.
fn life(p: &mut Puppet, rng: &mut Rng, sends: &mut u32) {
    match rng.below(6) {
        0 => {
            p.sends(*rng.pick(&[0, 100, 1_300, 4_000, 30_000]));
            *sends += 1;
        }
        1 => {
            let time = rng.below(3 * MS);
            p.waits(time);
        }
        2 if rng.chance(300) => {
            p.provides(MAX_LEN);
        }
        3 if *sends > 0 && rng.chance(50) => {
            p.cancels(rng.below(u64::from(*sends)) as u32);
        }
        4 => {
            p.resumes();
        }
        5 if rng.chance(30) => {
            p.dies();
            p.is_restored();
            p.says(p.hello_ack(OUR_INCARNATION));
        }
        _ => {}
    }
}

#[test]
fn s15_a_lying_peer_breaks_nothing() {
    seeds(
        "spec",
        "lies::s15_a_lying_peer_breaks_nothing",
        15,
        |seed| {
            for profile in Profile::ALL {
                let mut rng = Rng::new(seed);
                let mut p = Puppet::new(profile.policy(), 3);
                p.book.borrow_mut().liars.push(node(2)); // nothing is promised about its messages
                p.host.wants_offers = rng.chance(300);
                let (mut ours, mut theirs, mut sends) = (0, 0, 0);
                for _ in 0..300 {
                    life(&mut p, &mut rng, &mut sends);
                    let count = 1 + rng.below(3);
                    let lies = (0..count).map(|_| lie(&mut p, &mut rng, ours, theirs));
                    let lies = lies.collect();
                    p.says_all(lies);
                    p.now += rng.below(60) * US;
                    ours += u32::from(rng.chance(100));
                    theirs += u32::from(rng.chance(200));
                }
            }
        },
    );
}

/// What the puppet hears from what is sent now on is what it echoes.
fn hears_more(p: &mut Puppet) {
    p.waits(US);
    p.sends(100);
    p.waits(40 * US);
    p.echo = p.last_heard();
}

fn reopens(outcome: &[String]) -> bool {
    any(outcome, "streams_reopened")
}

// Acknowledgements of what was never sent. Expect: ignored, until one comes that was written after we had been heard since, and
// nothing was settled in between; then everything ends as perhaps delivered, and the next message opens a new epoch. transport.md §13.3
#[test]
fn s13_3_a_number_never_sent_ends_the_epoch_when_it_is_said_again() {
    for settled_between in [false, true] {
        let mut p = Puppet::new(policy(), 8);
        p.sends(100);
        hears_more(&mut p);
        for _ in 0..3 {
            assert_eq!(p.says(p.ack(50)), ["protocol_violations +1"]);
        }
        if settled_between {
            p.says(p.ack(1));
        }
        hears_more(&mut p);
        let outcome = p.says(p.ack(50));
        assert_eq!(reopens(&outcome), !settled_between, "{outcome:?}");
        assert_eq!(
            any(&outcome, "completes 1 MaybeDelivered"),
            !settled_between
        );
    }
}

// One far below what was settled. Expect: the same; one that a sound receiver may lack is filled.
#[test]
fn s13_3_a_number_settled_long_ago_ends_the_epoch_when_it_is_said_again() {
    for (base, contradicts) in [(75, true), (77, false)] {
        let mut p = Puppet::new(policy(), 8);
        for number in 1..=1_100 {
            p.sends(100);
            p.waits(40 * US);
            p.echo = p.last_heard();
            p.says(p.ack(number));
        }
        hears_more(&mut p);
        let outcome = p.says(p.ack(base));
        assert_eq!(any(&outcome, "NULL"), !contradicts, "{outcome:?}");
        assert_eq!(any(&outcome, "protocol_violations"), contradicts);
        hears_more(&mut p);
        assert_eq!(reopens(&p.says(p.ack(base))), contradicts);
    }
}
