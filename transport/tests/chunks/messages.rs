//! EAGER, RTS and DATA: what carries messages. transport.md §5.1, §5.2, §8.1

use portolan_sim::puppet::{MAX_LEN, NOTHING, Puppet};
use portolan_transport::wire::{Rows, WireError};

use crate::{Case, WINDOW, policy, receiver};

pub mod eager {
    use super::*;

    /// Message 1 arrives where 1 is expected. Expect: delivered, then acknowledged.
    pub fn case() -> Case {
        let mut p = receiver();
        let say = p.eager(1);
        Case::new(p, say, ["delivers 1", "ACK 2"])
    }

    // Message 0 arrives again. Expect: acknowledged again, not delivered again.
    pub fn past() {
        let mut p = receiver();
        let again = p.eager(0);
        assert_eq!(p.says(again), ["ACK 1", "duplicates +1"]);
        case().holds();
    }

    // Messages 2 and 3 arrive where 1 is expected. Expect: taken into buffers, listed, delivered in their turn. A number beyond
    // the window is a violation.
    pub fn future() {
        let mut p = receiver();
        let (two, three) = (p.eager(2), p.eager(3));
        assert_eq!(p.says(three.clone()), ["ACK 1 +3"]);
        assert_eq!(p.says(three), ["ACK 1 +3", "duplicates +1"]);
        assert_eq!(p.says(two), ["ACK 1 +2 +3"]);
        assert_eq!((p.delivered(), p.host.claimed()), (1, 2));
        let beyond = p.eager(1 + WINDOW);
        assert_eq!(p.says(beyond), ["protocol_violations +1"]);
        let one = p.eager(1);
        assert_eq!(
            p.says(one),
            ["delivers 1", "delivers 2", "delivers 3", "ACK 4"]
        );
    }

    // Shapes the parser refuses; a payload that does not match its checksum, which is NACKed and counts for nothing.
    pub fn malformed() {
        let mut case = case().refuses_ports(60);
        case.refuses(WireError::PayloadLength, |f| f.truncate(f.len() - 1), &[]);
        case.refuses(WireError::Trailing, |f| f.push(0), &[]);
        let corrupt = case.say.clone().corrupt();
        assert_eq!(
            case.p.says(corrupt),
            ["NACK 1 corrupt", "payloads_corrupt +1"]
        );
        assert_eq!(case.p.host.claimed(), 0);
        case.holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    // To a shut port: PORT-CLOSED if START allows to say so, and it never opens that stream. To the other engine's: a violation.
    // From a port that never opened a stream, without START: REFUSED.
    pub fn wrong_port() {
        let case = case().elsewhere(
            false,
            &["REFUSED", "streams_refused +1"],
            &["protocol_violations +1"],
            &["REFUSED", "streams_refused +1"],
        );
        let mut case = case.elsewhere_opening();
        assert_eq!(case.p.delivered(), 1);
        let say = case.say.clone();
        assert_eq!(case.p.says(say), ["delivers 1", "ACK 2"]);
    }
}

impl Case {
    /// With START to a shut port: PORT-CLOSED, and the floor is raised, so that a late copy does not open it. transport.md §3.4
    pub fn elsewhere_opening(mut self) -> Self {
        use portolan_sim::puppet::{SHUT, THEIRS};
        let opening = self.say.clone().ports(THEIRS, SHUT).start(Some(0)).epoch(1);
        assert_eq!(self.p.says(opening), ["PORT-CLOSED 0 @1"]);
        self
    }
}

/// A message behind the one with the number before it, as its receiver may ask for: an EAGER without what both have in common. wire.md §4.2
pub mod next {
    use super::*;

    /// Messages 1 and 2 in one frame, where 1 is expected. Expect: as two EAGERs.
    pub fn case() -> Case {
        let mut p = receiver();
        p.rows = Rows::Next;
        let (one, two) = (p.eager(1), p.eager(2));
        let mut case = Case::new(p, one, ["delivers 1", "delivers 2", "ACK 3"]);
        case.behind = vec![two];
        case.at += 32;
        case
    }

    // Messages 0 and 1 in one frame, where 0 was taken. Expect: 0 is acknowledged again, 1 delivered.
    pub fn past() {
        let mut p = receiver();
        p.rows = Rows::Next;
        let both = vec![p.eager(0), p.eager(1)];
        assert_eq!(p.says_all(both), ["delivers 1", "ACK 2", "duplicates +1"]);
        case().holds();
    }

    // Messages 2 and 3 where 1 is expected; then the last of the window and the one beyond. Expect: taken, and delivered in their turn; the
    // one beyond is a violation.
    pub fn future() {
        let mut p = receiver();
        p.rows = Rows::Next;
        let both = vec![p.eager(2), p.eager(3)];
        assert_eq!(p.says_all(both), ["ACK 1 +2 +3"]);
        let one = p.eager(1);
        assert_eq!(
            p.says(one),
            ["delivers 1", "delivers 2", "delivers 3", "ACK 4"]
        );
        p.provides(100);
        let ahead = vec![p.eager(3 + WINDOW), p.eager(4 + WINDOW)];
        let outcome = ["ACK 4 +11", "protocol_violations +1"];
        assert_eq!(p.says_all(ahead), outcome);
    }

    // Shapes; none in front of it; and a payload of the second that does not match its checksum, while the first does.
    pub fn malformed() {
        let mut case = case().refuses_shapes();
        let kind = |f: &mut Vec<u8>| f[48] = 24;
        case.refuses(WireError::ChunkField, kind, &[]);
        let unknown = |f: &mut Vec<u8>| f[48] = 0xff;
        case.refuses(WireError::ChunkField, unknown, &[]);
        case.refuses(WireError::PayloadLength, |f| f.truncate(f.len() - 1), &[]);
        case.refuses(WireError::Trailing, |f| f.push(0), &[]);
        let corrupt = vec![case.say.clone(), case.behind[0].clone().corrupt()];
        assert_eq!(
            case.p.says_all(corrupt),
            [
                "delivers 1",
                "ACK 2",
                "NACK 2 corrupt",
                "payloads_corrupt +1"
            ]
        );
        assert_eq!(case.p.host.claimed(), 0);
        let again = case.all();
        assert_eq!(
            case.p.says_all(again),
            ["delivers 2", "ACK 3", "duplicates +1"]
        );
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    // As EAGER, twice.
    pub fn wrong_port() {
        case()
            .elsewhere(
                false,
                &["REFUSED", "streams_refused +2"],
                &["protocol_violations +2"],
                &["REFUSED", "streams_refused +2"],
            )
            .holds();
    }
}

/// Messages of one length behind the one with the number before them: EAGERs with one header and one checksum. wire.md §4.3
pub mod run {
    use super::*;

    /// An endpoint like [`receiver`]'s, and a peer whose application uses no tags.
    fn receiver() -> Puppet {
        let mut p = crate::receiver();
        (p.rows, p.host.tagless) = (Rows::Run, true);
        p.provides(MAX_LEN);
        p
    }

    /// Messages 1 to 4 in one frame, where 1 is expected. Expect: as four EAGERs.
    pub fn case() -> Case {
        let mut p = receiver();
        let (one, more) = (p.eager(1), [2, 3, 4].map(|number| p.eager(number)));
        let outcome = [
            "delivers 1",
            "delivers 2",
            "delivers 3",
            "delivers 4",
            "ACK 5",
        ];
        let mut case = Case::new(p, one, outcome);
        case.behind = more.to_vec();
        case.at += 32;
        assert_eq!(
            case.p.frame(&case.all())[case.at..][..8],
            [25, 1, 0, 12, 1, 44, 0, 3]
        );
        case
    }

    // Messages 0 to 3 in one frame, where 0 was taken; then where all but the last were. Expect: those are acknowledged again, the others delivered.
    pub fn past() {
        let mut p = receiver();
        let all = [0, 1, 2, 3, 4].map(|number| p.eager(number)).to_vec();
        let outcome = [
            "delivers 1",
            "delivers 2",
            "delivers 3",
            "ACK 4",
            "duplicates +1",
        ];
        assert_eq!(p.says_all(all[..4].to_vec()), outcome);
        let outcome = ["delivers 4", "ACK 5", "duplicates +4"];
        assert_eq!(p.says_all(all), outcome);
        case().holds();
    }

    // Messages 2 to 4 where 1 is expected; then some of the window and one beyond. Expect: taken, and delivered in their turn; the one beyond is a
    // violation.
    pub fn future() {
        let mut p = receiver();
        let three = [2, 3, 4].map(|number| p.eager(number)).to_vec();
        assert_eq!(p.says_all(three), ["ACK 1 +2 +3 +4"]);
        let one = p.eager(1);
        let outcome = [
            "delivers 1",
            "delivers 2",
            "delivers 3",
            "delivers 4",
            "ACK 5",
        ];
        assert_eq!(p.says(one), outcome);
        for _ in 0..3 {
            p.provides(100);
        }
        let ahead = [2, 3, 4, 5].map(|number| p.eager(number + WINDOW));
        let outcome = ["ACK 5 +10 +11 +12", "protocol_violations +1"];
        assert_eq!(p.says_all(ahead.to_vec()), outcome);
    }

    // Shapes; none in front of it; counts that do not divide its bytes; and a payload that does not match its checksum, while the first message does:
    // none of the RUN's is believed.
    pub fn malformed() {
        let mut case = case().refuses_shapes();
        let kind = |f: &mut Vec<u8>| f[48] = 25;
        case.refuses(WireError::ChunkField, kind, &[]);
        let unknown = |f: &mut Vec<u8>| f[48] = 0xff;
        case.refuses(WireError::ChunkField, unknown, &[]);
        for count in [0, 7, 16, 255] {
            let counts = |f: &mut Vec<u8>| f[48 + 32 + 7] = count;
            case.refuses(WireError::ChunkField, counts, &[]);
        }
        case.refuses(WireError::PayloadLength, |f| f.truncate(f.len() - 1), &[]);
        case.refuses(WireError::Trailing, |f| f.push(0), &[]);
        let mut corrupt = case.all();
        corrupt[2] = corrupt[2].clone().corrupt();
        assert_eq!(
            case.p.says_all(corrupt),
            [
                "delivers 1",
                "ACK 2",
                "NACK 4 corrupt",
                "payloads_corrupt +3"
            ]
        );
        assert_eq!(case.p.host.claimed(), 0);
        let again = case.all();
        let outcome = [
            "delivers 2",
            "delivers 3",
            "delivers 4",
            "ACK 5",
            "duplicates +1",
        ];
        assert_eq!(case.p.says_all(again), outcome);
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    // As EAGER, four times.
    pub fn wrong_port() {
        case()
            .elsewhere(
                false,
                &["REFUSED", "streams_refused +4"],
                &["protocol_violations +4"],
                &["REFUSED", "streams_refused +4"],
            )
            .holds();
    }
}

pub mod rts {
    use super::*;

    /// A request with its first 1000 bytes arrives where it is expected. Expect: a grant for the rest.
    pub fn case() -> Case {
        let mut p = receiver();
        let say = p.rts(1, 5000, 1000);
        Case::new(p, say, ["CTS 1 to 5000"])
    }

    // The request again while its message is under way: acknowledged and granted again. And again when it is over: acknowledged.
    pub fn past() {
        let mut p = receiver();
        let request = p.rts(1, 5000, 1000);
        p.says(request.clone());
        assert_eq!(
            p.says(request.clone()),
            ["ACK 1 +1", "CTS 1 to 5000", "duplicates +1"]
        );
        for from in (1000..5000).step_by(1000) {
            let data = p.data(1, from, from + 1000);
            p.says(data);
        }
        assert_eq!(p.delivered(), 2);
        assert_eq!(p.says(request), ["ACK 2", "duplicates +1"]);
        assert_eq!(p.delivered(), 2);
    }

    // Request 2 where 1 is expected: granted all the same, and delivered in its turn. Beyond the window: a violation, no token taken.
    pub fn future() {
        let mut p = receiver();
        let (early, rest) = (p.rts(2, 1500, 1000), p.data(2, 1000, 1500));
        assert_eq!(p.says(early), ["ACK 1 +2", "CTS 2 to 1500"]);
        assert_eq!(p.says(rest), ["ACK 1 +2"]);
        let beyond = p.rts(1 + WINDOW, 5000, 1000);
        assert_eq!(p.says(beyond), ["protocol_violations +1"]);
        assert_eq!(p.host.claimed(), 1);
        let one = p.eager(1);
        assert_eq!(
            p.says(one),
            ["delivers 1", "delivers 2", "ACK 3", "MSGEND 2"]
        );
    }

    // More payload than the message has; a corrupt payload, which leaves the request standing and asks for the bytes again.
    pub fn malformed() {
        let mut case = case().refuses_ports(60);
        let total = |f: &mut Vec<u8>| f[80..84].copy_from_slice(&999u32.to_be_bytes());
        case.refuses(WireError::ChunkField, total, &[]);
        case.refuses(WireError::PayloadLength, |f| f.truncate(f.len() - 1), &[]);
        let corrupt = case.say.clone().corrupt();
        assert_eq!(
            case.p.says(corrupt),
            ["CTS 1 to 5000, again 0..5000", "payloads_corrupt +1"]
        );
        // Longer than the port ever takes: refused for good.
        let mut p = receiver();
        let long = p.rts(1, MAX_LEN + 1, 1000);
        assert_eq!(p.says(long), ["MSGDROP 1 too long"]);
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

pub mod data {
    use super::*;

    /// The endpoint has granted bytes 1000..3000 of message 1.
    fn granted() -> Puppet {
        let mut p = receiver();
        let request = p.rts(1, 3000, 1000);
        assert_eq!(p.says(request), ["CTS 1 to 3000"]);
        p
    }

    /// The last bytes arrive. Expect: the message is whole, delivered, and ended.
    pub fn case() -> Case {
        let mut p = granted();
        let middle = p.data(1, 1000, 2000);
        assert_eq!(p.says(middle), NOTHING);
        let say = p.data(1, 2000, 3000);
        Case::new(p, say, ["delivers 1", "ACK 2", "MSGEND 1"])
    }

    // Bytes that counted before, in part and in full; bytes of a message that is over. Expect: counted once.
    pub fn past() {
        let mut p = granted();
        let (old, overlapping) = (p.data(1, 0, 1000), p.data(1, 500, 1500));
        assert_eq!(p.says(old), ["data_duplicates +1000"]);
        assert_eq!(p.says(overlapping), ["data_duplicates +500"]);
        let rest = p.data(1, 1500, 2500);
        assert_eq!(p.says(rest), NOTHING);
        let rest = p.data(1, 2500, 3000);
        assert_eq!(p.says(rest.clone()), ["delivers 1", "ACK 2", "MSGEND 1"]);
        assert_eq!(p.says(rest), ["data_unexpected +1"]);
    }

    // Bytes behind a gap: placed; the gap is asked for once what was overtaken would have come. Bytes beyond the grant, of a message
    // that was not accepted yet, and of an epoch to come: not taken.
    pub fn future() {
        let mut p = granted();
        let behind = p.data(1, 2000, 2500);
        assert_eq!(p.says(behind), NOTHING);
        p.waits(1_000_000);
        let next = p.data(1, 2500, 3000);
        assert_eq!(p.says(next), ["CTS 1 to 3000, again 1000..2000"]);
        let hole = p.data(1, 1000, 2000);
        assert_eq!(p.says(hole), ["delivers 1", "ACK 2", "MSGEND 1"]);
        let (early, later) = (p.data(2, 0, 1000), p.data(2, 0, 1000).epoch(1));
        assert_eq!(p.says(early), ["data_unexpected +1"]);
        assert_eq!(p.says(later), ["stale_epochs +1", "data_unexpected +1"]);

        let mut p = Puppet::new(
            portolan_transport::policy::Policy {
                grant_bytes: 1000,
                ..policy()
            },
            4,
        );
        let request = p.rts(0, 5000, 1000);
        assert_eq!(p.says(request), ["CTS 0 to 2000", "streams_opened +1"]);
        let (beyond, across) = (p.data(0, 2000, 3000), p.data(0, 1500, 2500));
        assert_eq!(p.says(beyond), ["data_unexpected +1"]);
        assert_eq!(p.says(across), ["data_unexpected +1"]);
    }

    // No bytes; bytes beyond 2³²; bytes that do not match their checksum, which count for nothing until
    // they come again.
    pub fn malformed() {
        let mut case = case().refuses_ports(60);
        let empty = |f: &mut Vec<u8>| f[52..54].fill(0);
        case.refuses(WireError::ChunkField, empty, &[]);
        let far = |f: &mut Vec<u8>| f[72..76].fill(0xff);
        case.refuses(WireError::ChunkField, far, &[]);
        let corrupt = case.say.clone().corrupt();
        assert_eq!(case.p.says(corrupt), ["payloads_corrupt +1"]);
        assert_eq!(case.p.delivered(), 1);
        case.holds();
    }

    pub fn wrong_incarnation() {
        case().wrong_incarnation();
    }

    // DATA never opens anything and is not answered.
    pub fn wrong_port() {
        let nothing = &["stale_epochs +1", "data_unexpected +1"];
        case().elsewhere(false, nothing, nothing, nothing).holds();
    }
}
