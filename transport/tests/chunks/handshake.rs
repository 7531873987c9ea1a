//! HELLO, HELLO-ACK, RESET, PATH-PROBE and PATH-ACK: who is there, and how long frames may be. transport.md §2.1, §2.2, §2.3, §2.4,
//! §2.5, §2.6
//!
//! These kinds name no stream and no number. *Past* is a superseded incarnation, an engine that has a successor, or an answer to
//! something that is over; *future* an incarnation or engine nobody heard of; a *wrong incarnation* one that does not fit its
//! frame or its echo; a *wrong port* another queue, since a port is a queue's.

use portolan_sim::puppet::{ENGINE, NOTHING, OUR_INCARNATION, Puppet, Say, THEIR_INCARNATION};
use portolan_transport::endpoint::{Misfit, PeerState};
use portolan_transport::wire::chunk::Hello;
use portolan_transport::wire::{Chunk, WireError};

use crate::{Case, policy};

/// The puppet's next incarnation.
const REBORN: u64 = 0x0003_0000_0000_0033;

fn stranger() -> Puppet {
    Puppet::stranger(policy(), 4, 1458)
}

fn state(p: &Puppet) -> PeerState {
    p.endpoint.peers().next().expect("a peer").state
}

/// The puppet comes back with another incarnation and greets.
fn reborn(p: &mut Puppet) {
    (p.incarnation, p.header.src_incarnation) = (REBORN, REBORN as u32);
    p.established = false;
    assert_eq!(
        p.says(p.hello(0)),
        ["HELLO-ACK from us to somebody", "HELLO from us to somebody"]
    );
    let outcome = p.says(p.hello_ack(OUR_INCARNATION));
    assert!(outcome.contains(&"peer_restarts +1".into()), "{outcome:?}");
}

/// Frames between other queues. The endpoint is queue 1 of its node, the puppet's node has one.
fn wrong_queue(mut case: Case, unknown_queue: &[&str]) {
    let right = case.p.header;
    case.p.header.dst_queue = 0;
    // `frames_for_others` of the metrics.
    let before = case.p.counter("frames_not_for_us");
    assert_eq!(case.p.says(case.say.clone()), ["dropped: NotForUs"]);
    assert_eq!(case.p.counter("frames_not_for_us"), before + 1);
    case.p.header = right;
    case.p.header.src_queue = 3;
    assert_eq!(case.p.says(case.say.clone()), unknown_queue);
    case.p.header = right;
    case.holds();
}

pub mod hello {
    use super::*;

    /// Somebody introduces itself to an endpoint that does not know it. Expect: an answer, and the counter-question, since an
    /// incarnation is believed only from a HELLO-ACK.
    pub fn case() -> Case {
        let p = stranger();
        let say = p.hello(0).into();
        Case::new(
            p,
            say,
            ["HELLO-ACK from us to them", "HELLO from us to them"],
        )
    }

    // Of an incarnation that was superseded, and of an engine that has a successor: from the dead.
    pub fn past() {
        let mut p = Puppet::new(policy(), 4);
        let (old, header) = (p.hello(0), p.header);
        reborn(&mut p);
        p.echo = p.last_heard(); // the dead hear nothing more
        let right = std::mem::replace(&mut p.header, header);
        let asked = "HELLO from us to somebody";
        assert_eq!(p.says(old), ["dropped: WrongIncarnation", asked]);
        p.header = right;
        p.header.engine_epoch = ENGINE.wrapping_sub(1);
        let outcome = p.says(p.hello(OUR_INCARNATION));
        assert_eq!(outcome, ["dropped: StaleEngine"]); // asked already
        assert_eq!(state(&p), PeerState::Up);
    }

    // Of an incarnation nobody heard of: asked back, not believed. Of the known one's next engine: believed, and what was volatile is
    // void.
    pub fn future() {
        let mut p = Puppet::new(policy(), 4);
        let (incarnation, header) = (p.incarnation, p.header);
        (p.incarnation, p.header.src_incarnation) = (REBORN, REBORN as u32);
        assert_eq!(
            p.says(p.hello(0)),
            ["HELLO-ACK from us to somebody", "HELLO from us to somebody"]
        );
        assert_eq!(p.host.records(), (0, 0));
        (p.incarnation, p.header) = (incarnation, header);
        let first = p.eager(0);
        assert_eq!(p.says(first), ["delivers 0", "ACK 1", "streams_opened +1"]);
        p.header.engine_epoch = ENGINE.wrapping_add(1);
        assert_eq!(
            p.says(p.hello(OUR_INCARNATION)),
            ["HELLO-ACK from us to them", "peer_takeovers +1"]
        );
    }

    // Shapes; and what no engine says of itself.
    pub fn malformed() {
        let mut case = case().refuses_shapes_cut_by(8); // its name ends there
        let name = |f: &mut Vec<u8>| f[48 + 31] = 65;
        case.refuses(WireError::ChunkField, name, &[]);
        let utf8 = |f: &mut Vec<u8>| f[48 + 40] = 0xff;
        case.refuses(WireError::ChunkField, utf8, &[]);
        let lies: [fn(&mut Hello<'static>); 3] = [
            |h| h.incarnation = 0,
            |h| h.queues = 0,
            |h| h.max_frame = 511,
        ];
        for lie in lies {
            let say = case.p.hello_but(lie);
            assert_eq!(
                case.p.says(say),
                ["dropped: NotAssociated", "protocol_violations +1"]
            );
        }
        assert_eq!(case.p.endpoint.peers().count(), 0);
        case.holds();
    }

    // One that is not its frame's; and echoes of another incarnation of ours, which are answered with the true one.
    pub fn wrong_incarnation() {
        let mut p = stranger();
        p.header.src_incarnation ^= 1;
        let say = p.hello(0);
        assert_eq!(
            p.says(say),
            ["dropped: NotAssociated", "protocol_violations +1"]
        );
        let mut p = stranger();
        let say = p.hello(OUR_INCARNATION ^ 1);
        assert_eq!(
            p.says(say),
            ["HELLO-ACK from us to them", "HELLO from us to them"]
        );
        assert_ne!(state(&p), PeerState::Up);
    }

    pub fn wrong_port() {
        let violation = &["dropped: NotAssociated", "protocol_violations +1"];
        wrong_queue(case(), violation);
    }
}

pub mod hello_ack {
    use super::*;

    /// An endpoint that wants to talk and asked who is there is answered.
    pub fn case() -> Case {
        let mut p = stranger();
        assert_eq!(p.sends(100), ["HELLO from us to nobody"]);
        let say = p.hello_ack(OUR_INCARNATION).into();
        Case::new(
            p,
            say,
            ["EAGER 0 start 0, 100 bytes @1", "streams_reopened +1"],
        )
    }

    // A second answer; and one of an incarnation that was superseded, to a later question.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say.clone()), NOTHING);
        let header = p.header;
        reborn(&mut p);
        p.says(p.hello(0));
        let right = std::mem::replace(&mut p.header, header);
        assert_eq!(p.says(say), NOTHING); // nothing was asked
        p.header = right;
        assert_eq!(state(&p), PeerState::Up);
    }

    // Nobody asked: an answer to a question of the future changes nothing.
    pub fn future() {
        let mut p = stranger();
        assert_eq!(
            p.says(p.hello_ack(OUR_INCARNATION)),
            ["dropped: NotAssociated"]
        );
        assert_eq!(p.endpoint.peers().count(), 0);
    }

    pub fn malformed() {
        let mut case = case().refuses_shapes_cut_by(8);
        let lie = |h: &mut Hello<'static>| h.queues = 0;
        let Chunk::Hello(hello) = case.p.hello_but(lie) else {
            unreachable!("a HELLO")
        };
        assert_eq!(
            case.p.says(Chunk::HelloAck(hello)),
            ["dropped: NotAssociated", "protocol_violations +1"]
        );
        case.holds();
    }

    // One that does not echo ours in full, and one that is not its frame's.
    pub fn wrong_incarnation() {
        let mut case = case();
        for echo in [0, OUR_INCARNATION ^ 1 << 63] {
            assert_eq!(
                case.p.says(case.p.hello_ack(echo)),
                ["dropped: NotAssociated"]
            );
        }
        case.p.header.src_incarnation ^= 1;
        assert_eq!(
            case.p.says(case.say.clone()),
            ["dropped: NotAssociated", "protocol_violations +1"]
        );
        case.p.header.src_incarnation ^= 1;
        case.holds();
    }

    pub fn wrong_port() {
        let violation = &["dropped: NotAssociated", "protocol_violations +1"];
        wrong_queue(case(), violation);
    }
}

pub mod reset {
    use super::*;

    fn say(p: &Puppet, reason: u8, detail: u8) -> Say {
        Chunk::Reset {
            src_incarnation: OUR_INCARNATION as u32,
            dst_incarnation: p.incarnation as u32,
            reason,
            detail,
        }
        .into()
    }

    /// The peer does not know us any more. Expect: HELLO.
    pub fn case() -> Case {
        let p = Puppet::new(policy(), 4);
        let say = say(&p, 1, 0);
        Case::new(p, say, ["HELLO from us to them", "resets_received +1"])
    }

    // It echoes what we sent to an incarnation that was superseded.
    pub fn past() {
        let mut p = Puppet::new(policy(), 4);
        let late = say(&p, 1, 0);
        reborn(&mut p);
        assert_eq!(p.says(late), ["protocol_violations +1"]);
        assert_eq!(state(&p), PeerState::Up);
    }

    // It echoes an incarnation the peer will have.
    pub fn future() {
        let mut p = Puppet::new(policy(), 4);
        let say = Chunk::Reset {
            src_incarnation: OUR_INCARNATION as u32,
            dst_incarnation: REBORN as u32,
            reason: 1,
            detail: 0,
        };
        assert_eq!(p.says(say), ["protocol_violations +1"]);
        assert_eq!(state(&p), PeerState::Up);
        case().holds();
    }

    // A reason nobody knows changes nothing. A policy that does not fit is told by name.
    pub fn malformed() {
        let mut case = case().refuses_shapes();
        let unknown = say(&case.p, 9, 0);
        assert_eq!(
            case.p.says(unknown),
            ["protocol_violations +1", "resets_received +1"]
        );
        assert_eq!(state(&case.p), PeerState::Up);
        let policy = say(&case.p, 4, 2);
        assert_eq!(case.p.says(policy), ["resets_received +1"]);
        let status = case.p.endpoint.peers().next().expect("a peer");
        assert_eq!(
            (status.state, status.misfit),
            (PeerState::Incompatible, Some(Misfit::Policy("ack_rule")))
        );
    }

    // It echoes what we never sent.
    pub fn wrong_incarnation() {
        let mut case = case();
        let forged = Chunk::Reset {
            src_incarnation: OUR_INCARNATION as u32 ^ 1,
            dst_incarnation: THEIR_INCARNATION as u32,
            reason: 1,
            detail: 0,
        };
        assert_eq!(case.p.says(forged), ["protocol_violations +1"]);
        case.holds();
    }

    // Of an engine nobody talks to: nothing.
    pub fn wrong_port() {
        wrong_queue(case(), &NOTHING);
    }
}

/// An endpoint on a path that may carry frames of 9000 bytes, and its first probe of that.
fn jumbo() -> Puppet {
    let mut p = Puppet::stranger(policy(), 4, 9000);
    p.says(p.hello(0));
    assert_eq!(p.says(p.hello_ack(OUR_INCARNATION)), ["PATH-PROBE 9000"]);
    assert_eq!(p.heard[0].len, 9000);
    p
}

pub mod path_probe {
    use super::*;

    fn probe(size: u16) -> Chunk<'static> {
        Chunk::PathProbe { size, nonce: 7 }
    }

    /// A frame of 4000 bytes arrives whole. Expect: its size and nonce are told.
    pub fn case() -> Case {
        Case::new(
            Puppet::new(policy(), 4),
            probe(4000).into(),
            ["PATH-ACK 4000"],
        )
    }

    // The same probe again: its answer was lost.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), ["PATH-ACK 4000"]);
    }

    // Longer than we said we receive: it arrived, so the path carries it; how long frames may be is not the path's alone.
    pub fn future() {
        let mut p = Puppet::new(policy(), 4);
        assert_eq!(p.says(probe(60_000)), ["PATH-ACK 60000"]);
        let mut stranger = stranger();
        let unknown = ["dropped: WrongIncarnation", "RESET incarnation"];
        assert_eq!(stranger.says(probe(4000)), unknown);
    }

    // Shorter than it says: not a probe. Longer: not a frame.
    pub fn malformed() {
        let mut case = case().refuses_shapes();
        let short = |f: &mut Vec<u8>| f.truncate(3999);
        case.refuses(WireError::PayloadLength, short, &[]);
        case.refuses(WireError::Trailing, |f| f.push(0), &[]);
        case.holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        let unknown = &["dropped: WrongIncarnation", "RESET incarnation"];
        wrong_queue(case(), unknown);
    }
}

pub mod path_ack {
    use super::*;

    fn max_frame(p: &Puppet) -> u16 {
        p.endpoint.peers().next().expect("a peer").max_frame
    }

    fn answer(size: u16, nonce: u32) -> Chunk<'static> {
        Chunk::PathAck { size, nonce }
    }

    /// The probe arrived. Expect: long frames from now on.
    pub fn case() -> Case {
        let p = jumbo();
        assert_eq!(max_frame(&p), 1472);
        Case::new(p, answer(9000, 1).into(), NOTHING)
    }

    /// The right answer still proves the path.
    fn proves(mut p: Puppet) {
        assert_eq!(max_frame(&p), 1472);
        assert_eq!(p.says(answer(9000, 1)), NOTHING);
        assert_eq!(max_frame(&p), 9000);
    }

    // Of a probe before; and again.
    pub fn past() {
        let mut p = jumbo();
        assert_eq!(p.says(answer(9000, 0)), NOTHING);
        proves(p);
        let mut p = jumbo();
        p.says(answer(9000, 1));
        assert_eq!(p.says(answer(9000, 1)), NOTHING);
        assert_eq!(max_frame(&p), 9000);
    }

    // Of a probe that was not sent yet.
    pub fn future() {
        let mut p = jumbo();
        assert_eq!(p.says(answer(9000, 2)), NOTHING);
        proves(p);
    }

    // Shapes; and a size that was not asked for.
    pub fn malformed() {
        let mut case = case().refuses_shapes();
        assert_eq!(case.p.says(answer(8999, 1)), NOTHING);
        assert_eq!(case.p.says(answer(65_535, 1)), NOTHING);
        proves(case.p);
    }

    pub fn wrong_incarnation() {
        let mut case = case();
        for (src, dst) in [(1, 0), (0, 1)] {
            let right = case.p.header;
            case.p.header.src_incarnation ^= src;
            case.p.header.dst_incarnation ^= dst;
            let outcome = ["dropped: WrongIncarnation", "RESET incarnation"];
            assert_eq!(case.p.says(case.say.clone()), outcome);
            case.p.header = right;
        }
        proves(case.p);
    }

    pub fn wrong_port() {
        let mut p = jumbo();
        p.header.dst_queue = 0;
        assert_eq!(p.says(answer(9000, 1)), ["dropped: NotForUs"]);
        p.header.dst_queue = 1;
        proves(p);
    }
}
