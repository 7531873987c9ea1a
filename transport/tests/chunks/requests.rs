//! PROBE, NULL, DROP-CONFIRM and CLOSE: what a stream's sender asks and tells besides messages. transport.md §3.2, §4.5, §5.1, §5.6

use portolan_sim::puppet::{EPOCH, MAX_LEN, NOTHING, Puppet};

use crate::{Case, WINDOW, policy, receiver};

pub mod probe {
    use super::*;

    /// The sender asks about message 1, which is expected. Expect: there is a buffer; and the state.
    pub fn case() -> Case {
        let mut p = receiver();
        let say = p.probe(1, 100);
        Case::new(p, say, ["ACK 1", "READY 1"])
    }

    // About a number that is committed: the state, no more.
    pub fn past() {
        let mut p = receiver();
        let say = p.probe(0, 100);
        assert_eq!(p.says(say), ["ACK 1"]);
    }

    // About a number beyond the expected one: there is a buffer for it, too. Beyond the window: the state is all there is to say.
    pub fn future() {
        let mut p = receiver();
        let (early, beyond) = (p.probe(3, 100), p.probe(1 + WINDOW, 100));
        assert_eq!(p.says(early), ["ACK 1", "READY 3"]);
        assert_eq!(p.says(beyond), ["ACK 1"]);
        case().holds();
    }

    // A length no buffer fits now: it is told to wait. One that no buffer ever fits: the message itself will hear so.
    pub fn malformed() {
        case().refuses_ports(52).holds();
        let mut p = receiver();
        let say = p.probe(1, MAX_LEN + 1);
        assert_eq!(p.says(say), ["ACK 1", "READY 1"]);
        let mut p = Puppet::new(policy(), 0);
        let say = p.probe(0, 100);
        assert_eq!(
            p.says(say),
            ["ACK 0", "NACK 0 no buffer", "streams_opened +1"]
        );
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        let case = case().elsewhere(
            false,
            &["REFUSED", "streams_refused +1"],
            &["protocol_violations +1"],
            &["REFUSED", "streams_refused +1"],
        );
        case.elsewhere_opening().holds();
    }
}

pub mod null {
    use super::*;

    /// The sender gave message 1 up, and the endpoint never had it. Expect: its number is committed without a delivery, and not
    /// acknowledged with the others before the sender confirmed that it knows.
    pub fn case() -> Case {
        let mut p = receiver();
        let say = p.null(1);
        Case::new(p, say, ["ACK 1 +1", "NULL-ACK 1 not delivered"])
    }

    // Given up too late: it was delivered, and the sender hears so. Given up while its bytes are under way: its token comes back.
    pub fn past() {
        let mut p = receiver();
        let say = p.null(0);
        assert_eq!(p.says(say), ["ACK 1", "NULL-ACK 0 delivered"]);
        let request = p.rts(1, 5000, 1000);
        p.says(request);
        assert_eq!(p.host.claimed(), 1);
        let say = p.null(1);
        assert_eq!(
            p.says(say.clone()),
            ["ACK 1 +1", "NULL-ACK 1 not delivered"]
        );
        assert_eq!((p.host.claimed(), p.delivered()), (0, 1));
        assert_eq!(p.says(say), ["ACK 1 +1", "NULL-ACK 1 not delivered"]);
    }

    // A number beyond the expected one: taken like any other first chunk, and committed in its turn.
    pub fn future() {
        let mut p = receiver();
        let say = p.null(2);
        assert_eq!(p.says(say), ["ACK 1 +2"]);
        let one = p.eager(1);
        assert_eq!(
            p.says(one),
            ["delivers 1", "ACK 2 +2", "NULL-ACK 2 not delivered"]
        );
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        let case = case().elsewhere(
            false,
            &["REFUSED", "streams_refused +1"],
            &["protocol_violations +1"],
            &["REFUSED", "streams_refused +1"],
        );
        case.elsewhere_opening().holds();
    }
}

pub mod drop_confirm {
    use super::*;

    /// Message 1 was refused for good, and the sender knows. Expect: its number is committed and acknowledged.
    pub fn case() -> Case {
        let mut p = receiver();
        let long = p.rts(1, MAX_LEN + 1, 1000);
        assert_eq!(p.says(long), ["MSGDROP 1 too long"]);
        let say = p.drop_confirm(1);
        Case::new(p, say, ["ACK 2"])
    }

    // Confirmed before, and a number that was delivered: no news.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!(p.says(say), NOTHING);
        let delivered = p.drop_confirm(0);
        assert_eq!(p.says(delivered), NOTHING);
        let next = p.eager(2);
        assert_eq!(p.says(next), ["delivers 2", "ACK 3"]);
    }

    // A number nobody dropped yet: it drops nothing.
    pub fn future() {
        let mut p = receiver();
        let early = p.drop_confirm(1);
        assert_eq!(p.says(early), NOTHING);
        let next = p.eager(1);
        assert_eq!(p.says(next), ["delivers 1", "ACK 2"]);
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    pub fn wrong_port() {
        let nothing = &["stale_epochs +1"];
        case().elsewhere(false, nothing, nothing, nothing).holds();
    }
}

pub mod close {
    use super::*;

    /// The sender ends its stream. Expect: the record is freed after the floor was raised past the epoch.
    pub fn case() -> Case {
        let p = receiver();
        let say = p.close(1);
        Case::new(p, say, ["CLOSED", "streams_closed +1"])
    }

    // Again, and of an epoch before: CLOSED, since the sender still asks. What comes late of the epoch opens nothing.
    pub fn past() {
        let Case { mut p, say, .. } = case();
        p.says(say.clone());
        assert_eq!((p.host.records(), p.floor()), ((0, 0), EPOCH + 1));
        assert_eq!(p.says(say), ["CLOSED"]);
        let late = p.eager(0).start(Some(0));
        assert_eq!(p.says(late), ["REFUSED", "streams_refused +1"]);

        let mut p = receiver();
        let before = p.close(1).epoch(-1);
        assert_eq!(p.says(before), ["CLOSED @-1"]);
        let next = p.eager(1);
        assert_eq!(p.says(next), ["delivers 1", "ACK 2"]);
    }

    // Of an epoch to come: the sender is past the known one and done with it and all between.
    pub fn future() {
        let mut p = receiver();
        let say = p.close(1).epoch(2);
        assert_eq!(p.says(say), ["CLOSED @2", "streams_closed +1"]);
        assert_eq!((p.host.records(), p.floor()), ((0, 0), EPOCH + 3));
    }

    pub fn malformed() {
        case().refuses_ports(52).holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    // Of a stream nobody knows, to a port of ours or a shut one: forgotten, as asked. Epochs are the node's, so the floor rises for
    // all of them; a record that is there stays. The other engine's port: a violation.
    pub fn wrong_port() {
        case()
            .elsewhere(false, &["CLOSED"], &["protocol_violations +1"], &["CLOSED"])
            .holds();
    }
}
