//! CTS, MSGEND, ACK, NACK and READY: what a stream's receiver answers while all is well. transport.md §6.2, §7.3, §8.1
//!
//! The stream is the endpoint's; the puppet receives. None of these kinds opens or creates anything, so between wrong ports they
//! are of no stream, and counted. Only ACK and RESUME are answered there: a receiver that still keeps a record of a stream that
//! is over learns by CLOSE that it may forget it.

use portolan_sim::puppet::{NOTHING, Puppet};
use portolan_transport::wire::WireError;

use crate::{Case, policy, sender};

/// Between wrong ports nothing happens.
const STALE: [&str; 1] = ["stale_epochs +1"];

pub mod cts {
    use super::*;

    /// An endpoint whose request for a message of 4000 bytes went out with the first of them.
    fn requested() -> Puppet {
        let p = sender(4000);
        assert_eq!(p.heard[0].lines, ["RTS 1, 1374 of 4000 bytes"]);
        p
    }

    /// Bytes are granted. Expect: they go out, and no more.
    pub fn case() -> Case {
        let p = requested();
        let say = p.cts(1, 2000, &[]);
        Case::new(p, say, ["DATA 1 1374..2000"])
    }

    // A smaller grant than one before changes nothing; one for a message that is over neither.
    pub fn past() {
        let mut p = requested();
        p.says(p.cts(1, 3000, &[]));
        assert_eq!(p.says(p.cts(1, 2000, &[])), NOTHING);
        assert_eq!(p.says(p.cts(0, 100, &[])), NOTHING);
        assert_eq!(p.says(p.cts(1, 3500, &[])), ["DATA 1 3000..3500"]);
    }

    // For a message that never went out.
    pub fn future() {
        let mut p = requested();
        assert_eq!(p.says(p.cts(2, 4000, &[])), NOTHING);
        case().holds();
    }

    // More than eight ranges, an empty one; more than the message has.
    pub fn malformed() {
        let mut case = case().refuses_ports(52);
        case.refuses(WireError::ChunkField, |f| f[68] = 9, &[]);
        case.say = case.p.cts(1, 2000, &[(0, 10)]);
        let empty = |f: &mut Vec<u8>| f[76..80].fill(0);
        case.refuses(WireError::ChunkField, empty, &[]);
        let too_much = case.p.cts(1, 4001, &[]);
        assert_eq!(case.p.says(too_much), ["protocol_violations +1"]);
        let say = case.p.cts(1, 2000, &[]);
        assert_eq!(case.p.says(say), ["DATA 1 1374..2000"]);
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        case().elsewhere(true, &STALE, &STALE, &STALE).holds();
    }
}

pub mod msg_end {
    use super::*;

    /// The long message is committed at the other end.
    pub fn case() -> Case {
        let mut p = sender(2000);
        p.says(p.cts(1, 2000, &[]));
        let say = p.msg_end(1);
        Case::new(p, say, ["completes 1 Delivered"])
    }

    // It ended before.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), NOTHING);
        assert_eq!(p.says(p.msg_end(0)), NOTHING);
    }

    // A message that never went out cannot have arrived.
    pub fn future() {
        let mut p = sender(2000);
        assert_eq!(p.says(p.msg_end(2)), ["protocol_violations +1"]);
        assert_eq!(p.status(1), None);
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        case().elsewhere(true, &STALE, &STALE, &STALE).holds();
    }
}

pub mod ack {
    use super::*;

    /// Message 1 is committed at the other end.
    pub fn case() -> Case {
        let p = sender(100);
        let say = p.ack(2);
        Case::new(p, say, ["completes 1 Delivered"])
    }

    // An older one: ignored. And one of an epoch that is over: its receiver may free the record.
    pub fn past() {
        let mut p = sender(100);
        p.echo = p.last_heard().map(|stamp| stamp - 1); // written before message 1 was there
        assert_eq!(p.says(p.ack(1)), NOTHING);
        assert_eq!(p.says(p.ack(0)), NOTHING);
        p.echo = None;
        let before = p.ack(0).epoch(-1);
        assert_eq!(p.says(before), ["CLOSE 0 @-1", "stale_epochs +1"]);
        assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
    }

    // Above everything that was ever transmitted: a lie. transport.md §6.2, §15
    pub fn future() {
        let mut p = sender(100);
        assert_eq!(p.says(p.ack(3)), ["protocol_violations +1"]);
        let to_come = p.ack(2).epoch(1);
        assert_eq!(p.says(to_come), STALE);
        assert_eq!(p.status(1), None);
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        let close = ["CLOSE 2", "stale_epochs +1"];
        case().elsewhere(true, &close, &STALE, &close).holds();
    }
}

pub mod nack {
    use super::*;

    /// Message 1 did not come. Expect: it goes out again.
    pub fn case() -> Case {
        let p = sender(100);
        let say = p.nack(1, 1);
        Case::new(p, say, ["EAGER 1, 100 bytes", "retransmits +1"])
    }

    // A number that is settled here and missing there can only have been told as dropped: its number is owed, NULL pays it.
    pub fn past() {
        let mut p = sender(100);
        assert_eq!(p.says(p.nack(0, 1)), ["NULL 0"]);
        assert_eq!(p.status(1), None);
    }

    // A number that never went out.
    pub fn future() {
        let mut p = sender(100);
        assert_eq!(p.says(p.nack(3, 1)), ["protocol_violations +1"]);
    }

    // A reason nobody knows.
    pub fn malformed() {
        let mut case = case().refuses_ports(52);
        let unknown = case.p.nack(1, 9);
        assert_eq!(case.p.says(unknown), ["protocol_violations +1"]);
        case.holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        case().elsewhere(true, &STALE, &STALE, &STALE).holds();
    }
}

pub mod ready {
    use super::*;

    /// There was no buffer for message 1; now there is. Expect: it goes out again.
    pub fn case() -> Case {
        let mut p = sender(100);
        assert_eq!(p.says(p.nack(1, 2)), NOTHING);
        let say = p.ready(1);
        Case::new(p, say, ["EAGER 1, 100 bytes", "retransmits +1"])
    }

    // For a message that is settled.
    pub fn past() {
        let mut p = sender(100);
        p.says(p.nack(1, 2));
        assert_eq!(p.says(p.ready(0)), NOTHING);
        assert_eq!(p.says(p.ready(1)), ["EAGER 1, 100 bytes", "retransmits +1"]);
    }

    // For a message that never went out.
    pub fn future() {
        let mut p = sender(100);
        assert_eq!(p.says(p.ready(3)), ["protocol_violations +1"]);
        case().holds();
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        case().elsewhere(true, &STALE, &STALE, &STALE).holds();
    }
}

/// The window holds new messages back until the oldest is acknowledged. transport.md §4.2
#[test]
fn the_window_opens_with_an_acknowledgement() {
    let mut p = Puppet::new(
        portolan_transport::policy::Policy {
            window_messages: 2,
            ..policy()
        },
        0,
    );
    p.sends(1);
    p.sends(1);
    assert_eq!(p.sends(1), NOTHING);
    assert_eq!(
        p.says(p.ack(1)),
        ["completes 0 Delivered", "EAGER 2, 1 bytes"]
    );
}
