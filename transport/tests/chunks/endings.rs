//! MSGDROP, NULL-ACK, PORT-CLOSED, CLOSED, REFUSED and RESUME: how messages and streams end other than well, and go on after an
//! engine's death. transport.md §2.5, §3.2, §3.3, §3.4, §4.4, §4.5, §5.6

use portolan_sim::puppet::{NOTHING, Puppet};
use portolan_transport::host::Reason;

use crate::{Case, policy, sender};

const STALE: [&str; 1] = ["stale_epochs +1"];

pub mod msg_drop {
    use super::*;

    /// Message 1 is refused for good. Expect: so its send ends, and the receiver hears that it may go on.
    pub fn case() -> Case {
        let p = sender(100);
        let say = p.msg_drop(1, Reason::TooLong);
        Case::new(
            p,
            say,
            ["completes 1 NotDelivered(TooLong)", "DROP-CONFIRM 1"],
        )
    }

    // Told again: the confirmation was lost. It is confirmed again, and nothing ends twice.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), ["DROP-CONFIRM 1"]);
    }

    // A message that never went out cannot have been refused.
    pub fn future() {
        let mut p = sender(100);
        let say = p.msg_drop(2, Reason::TooLong);
        assert_eq!(p.says(say), ["protocol_violations +1"]);
        assert_eq!(p.status(1), None);
        case().holds();
    }

    // A reason nobody knows is one for which the message will never be taken, all the same.
    pub fn malformed() {
        let mut case = case().refuses_ports(52);
        let reason = Reason::Unreachable; // no receiver says so
        let odd = case.p.msg_drop(1, reason);
        assert_eq!(
            case.p.says(odd),
            ["completes 1 NotDelivered(TooLong)", "DROP-CONFIRM 1"]
        );
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        case().elsewhere(true, &STALE, &STALE, &STALE).holds();
    }
}

pub mod null_ack {
    use super::*;

    /// Message 1 was given up, and the receiver says that it does not have it.
    pub fn case() -> Case {
        let mut p = sender(100);
        assert_eq!(p.cancels(1), ["NULL 1"]);
        let say = p.null_ack(1, false);
        Case::new(
            p,
            say,
            ["completes 1 NotDelivered(Cancelled)", "DROP-CONFIRM 1"],
        )
    }

    // Answered before; and of one that was delivered and never given up.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), ["DROP-CONFIRM 1"]);
        assert_eq!(p.says(p.null_ack(0, true)), NOTHING);
        // Given up too late.
        let mut p = sender(100);
        p.cancels(1);
        assert_eq!(p.says(p.null_ack(1, true)), ["completes 1 Delivered"]);
    }

    // A number that never went out.
    pub fn future() {
        let mut p = sender(100);
        p.cancels(1);
        assert_eq!(p.says(p.null_ack(2, true)), ["protocol_violations +1"]);
        assert_eq!(p.status(1), None);
    }

    // Neither delivered nor not.
    pub fn malformed() {
        let mut case = case().refuses_ports(52);
        case.refuses(
            portolan_transport::wire::WireError::ChunkField,
            |f| f[64] = 2,
            &[],
        );
        case.holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        case().elsewhere(true, &STALE, &STALE, &STALE).holds();
    }
}

pub mod port_closed {
    use super::*;

    /// The port is closed, and message 1 was not delivered. Expect: so it ends; the epoch is over.
    pub fn case() -> Case {
        let p = sender(100);
        let say = p.port_closed(1);
        Case::new(p, say, ["completes 1 NotDelivered(PortClosed)"])
    }

    // Told again; and with everything delivered, of an epoch that is over.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), NOTHING);
        let mut p = sender(100);
        let before = p.port_closed(1).epoch(-1);
        assert_eq!(p.says(before), STALE);
        assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
    }

    // More delivered than was ever transmitted.
    pub fn future() {
        let mut p = sender(100);
        assert_eq!(p.says(p.port_closed(3)), ["protocol_violations +1"]);
        assert_eq!(p.status(1), None);
        // Everything that was transmitted was delivered before the port closed.
        assert_eq!(p.says(p.port_closed(2)), ["completes 1 Delivered"]);
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

pub mod closed {
    use super::*;

    /// An endpoint that closed its idle stream.
    fn closing() -> Puppet {
        let mut p = sender(100);
        p.says(p.ack(2));
        let idle = u64::from(policy().stream_idle_ms) * 1_000_000;
        assert_eq!(p.waits(idle)[0], "CLOSE 2");
        assert_eq!(p.host.records(), (1, 0));
        p
    }

    /// The receiver forgot the stream. Expect: so do we.
    pub fn case() -> Case {
        let p = closing();
        let say = p.closed();
        Case::new(p, say, NOTHING)
    }

    // Of an epoch before; and again, when the stream is gone.
    pub fn past() {
        let mut p = closing();
        let before = p.closed().epoch(-1);
        assert_eq!(p.says(before), STALE);
        assert_eq!(p.host.records(), (1, 0));
        assert_eq!(p.says(p.closed()), NOTHING);
        assert_eq!(p.host.records(), (0, 0));
        assert_eq!(p.says(p.closed()), STALE);
    }

    // Before anybody asked for it: no receiver forgets a stream of its own accord.
    pub fn future() {
        let mut p = sender(100);
        assert_eq!(p.says(p.closed()), NOTHING);
        assert_eq!(p.host.records(), (1, 0));
        assert_eq!(p.says(p.ack(2)), ["completes 1 Delivered"]);
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        let mut case = case().elsewhere(true, &STALE, &STALE, &STALE);
        assert_eq!(case.p.host.records(), (1, 0));
        let say = case.say.clone();
        assert_eq!(case.p.says(say), NOTHING);
        assert_eq!(case.p.host.records(), (0, 0));
    }
}

pub mod refused {
    use super::*;

    /// Message 0 went out with START and found neither a record nor an epoch above the floor. Expect: nothing of it was delivered, so it
    /// goes out again under the next epoch, unseen by the application.
    pub fn case() -> Case {
        let mut p = Puppet::new(policy(), 0);
        p.sends(100);
        let say = p.refused();
        Case::new(
            p,
            say,
            ["EAGER 0 start 0, 100 bytes @1", "streams_reopened +1"],
        )
    }

    // Of the epoch before.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), STALE);
        assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
    }

    // Of an epoch that was not drawn yet; and after the epoch's first answer, which no correct receiver says: what was transmitted
    // may have been delivered, and nobody knows.
    pub fn future() {
        let Case { mut p, say, .. } = case();
        let to_come = say.clone().epoch(1);
        assert_eq!(p.says(to_come), STALE);
        let mut p = sender(100);
        assert_eq!(
            p.says(p.refused()),
            [
                "completes 1 MaybeDelivered(PeerRestarted)",
                "streams_reopened +1"
            ]
        );
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

pub mod resume {
    use super::*;

    /// The receiver's next engine says what was committed before it came.
    pub fn case() -> Case {
        let p = sender(100);
        let say = p.resume(2);
        Case::new(p, say, ["completes 1 Delivered"])
    }

    // Less than what was acknowledged before: the acknowledgement holds, and what is outstanding stays so.
    pub fn past() {
        let mut p = sender(100);
        p.echo = p.last_heard().map(|stamp| stamp - 1); // written before message 1 was there
        assert_eq!(p.says(p.resume(0)), NOTHING);
        p.echo = None;
        let before = p.resume(0).epoch(-1);
        assert_eq!(p.says(before), ["CLOSE 0 @-1", "stale_epochs +1"]);
        assert_eq!(p.says(p.resume(2)), ["completes 1 Delivered"]);
    }

    // More than was ever transmitted.
    pub fn future() {
        let mut p = sender(100);
        assert_eq!(p.says(p.resume(3)), ["protocol_violations +1"]);
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
