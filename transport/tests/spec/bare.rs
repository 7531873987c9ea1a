//! Bare frames: to whom they are written, what of them is believed, and that they say nothing else. wire.md §2.1, transport.md §11.3

use portolan_sim::puppet::{NOTHING, OUR_INCARNATION, Puppet};
use portolan_transport::wire::chunk::features::{BARE, NEXT, RUN};

use super::{any, policy};

/// The longest frame here, and what it holds of a long message, in full and bare.
const FRAME: u16 = 1_458;
const IN_FULL: usize = FRAME as usize - 48 - 28;
const BARE_HOLDS: usize = FRAME as usize - 40;

/// A peer that reads what these bits of `features` say.
fn who_reads(features: u32) -> Puppet {
    let mut p = Puppet::stranger(policy(), 8, FRAME);
    p.features = features;
    p.greets();
    p
}

/// The endpoint has a long message to send, number `number` of its stream, and is granted all of it at once: bytes of payload in each frame that
/// follows, and which frames were bare.
fn stream(p: &mut Puppet, number: u32) -> Vec<(usize, bool)> {
    p.sends(30_000);
    p.says(p.cts(number, 30_000, &[]));
    let sent = |heard: &portolan_sim::puppet::Heard| {
        let bytes = heard.payloads.iter().map(Vec::len).sum();
        (bytes, heard.bare)
    };
    let frames: Vec<_> = p.heard.iter().map(sent).collect();
    p.says(p.msg_end(number));
    p.says(p.ack(number + 1));
    frames
}

// A stream to peers of several builds. Expect: bare frames for who says that he reads them, but for the first, which tells him the rest, and the last,
// which is not full; for anybody else none.
#[test]
fn for_those_who_read_them() {
    for features in [0, NEXT | RUN, !BARE] {
        let frames = stream(&mut who_reads(features), 0);
        assert!(frames.len() > 15, "{frames:?}");
        let (last, all) = frames.split_last().unwrap();
        assert!(all.iter().all(|frame| *frame == (IN_FULL, false)));
        assert!(last.0 <= IN_FULL && !last.1);
    }
    for features in [BARE, NEXT | RUN | BARE, u32::MAX] {
        let frames = stream(&mut who_reads(features), 0);
        let [first, bare @ .., last] = &frames[..] else {
            panic!("{frames:?}");
        };
        assert_eq!(*first, (IN_FULL, false));
        assert!(bare.len() > 15 && bare.iter().all(|frame| *frame == (BARE_HOLDS, true)));
        assert!(last.0 <= BARE_HOLDS && !last.1);
    }
}

// Another engine takes the peer's place. Expect: no bare frames until it said that it reads them, and none when it thought better of it.
#[test]
fn not_for_an_engine_that_did_not_say_so() {
    let mut p = who_reads(BARE);
    let bare = |frames: Vec<(usize, bool)>| frames.iter().any(|frame| frame.1);
    assert!(bare(stream(&mut p, 0)));
    p.header.engine_epoch = p.header.engine_epoch.wrapping_add(1);
    p.says(p.ack(1));
    assert!(!bare(stream(&mut p, 1)));
    p.says(p.hello(OUR_INCARNATION));
    assert!(bare(stream(&mut p, 2)), "greeted again");
    p.features = 0;
    p.says(p.hello(OUR_INCARNATION));
    assert!(!bare(stream(&mut p, 3)), "it thought better of it");
}

/// The endpoint has granted bytes 1000..3000 of message 0.
fn granted() -> Puppet {
    let mut p = Puppet::new(policy(), 8);
    let request = p.rts(0, 3_000, 1_000);
    assert!(p.says(request).contains(&"CTS 0 to 3000".into()));
    p
}

// DATA in bare frames. Expect: as in others; and the next frame of the endpoint's says that it came.
#[test]
fn counts_as_any_other() {
    let mut p = granted();
    for (from, to, outcome) in [
        (1_000, 2_000, &NOTHING[..]),
        (1_000, 2_000, &["data_duplicates +1000"]),
        (2_000, 3_000, &["delivers 0", "ACK 1", "MSGEND 0"]),
        (2_000, 3_000, &["data_unexpected +1"]),
    ] {
        let data = p.data(0, from, to);
        let frame = p.bare_frame(&data);
        assert_eq!(p.says_bytes(&frame), outcome, "{from}..{to}");
        if let Some(heard) = p.heard.first() {
            assert_eq!(heard.header.echo, p.now as u32);
        }
    }
}

// Of or for another incarnation, of another engine, older or newer. Expect: dropped without an answer, and nothing of it believed; the right one is then
// heard as if nothing had been.
#[test]
fn of_an_association_that_is_not_known() {
    let mut p = granted();
    let right = p.header;
    for change in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1)] {
        p.header.src_incarnation ^= change.0;
        p.header.dst_incarnation ^= change.1;
        p.header.engine_epoch = right.engine_epoch.wrapping_add_signed(change.2);
        let data = p.data(0, 1_000, 3_000);
        let frame = p.bare_frame(&data);
        assert_eq!(p.says_bytes(&frame), ["dropped: NotAssociated"]);
        p.header = right;
    }
    // To another engine of ours, and from a node nobody knows.
    let data = p.data(0, 1_000, 3_000);
    p.header.dst_queue ^= 1;
    let frame = p.bare_frame(&data);
    assert_eq!(p.says_bytes(&frame), ["dropped: NotForUs"]);
    p.header = right;
    p.header.src_node = 77;
    let frame = p.bare_frame(&data);
    assert_eq!(p.says_bytes(&frame), ["dropped: UnknownPeer"]);
    p.header = right;
    let frame = p.bare_frame(&data);
    assert_eq!(p.says_bytes(&frame), ["delivers 0", "ACK 1", "MSGEND 0"]);
}

// Before anybody greeted. Expect: dropped, and no RESET: who writes bare frames writes others, which are answered.
#[test]
fn of_a_stranger() {
    let mut p = Puppet::stranger(policy(), 8, FRAME);
    let data = p.data(0, 1_000, 3_000);
    let frame = p.bare_frame(&data);
    assert_eq!(p.says_bytes(&frame), ["dropped: NotAssociated"]);
    p.greets();
}

/// How long somebody may be silent who owes an answer.
fn patience() -> u64 {
    u64::from(policy().unreachable_after_ms) * 1_000_000
}

// A peer to which nothing is said, and from which nothing comes but pieces of a message. Expect: the message keeps its buffer for as long as they come.
#[test]
fn shows_that_a_message_goes_on() {
    let mut p = granted();
    for nth in 0..4 {
        p.waits(patience() * 3 / 4);
        assert_eq!(p.host.claimed(), 1, "{nth}");
        let data = p.data(0, 1_000 + 100 * nth, 1_100 + 100 * nth);
        let frame = p.bare_frame(&data);
        assert_eq!(p.says_bytes(&frame), NOTHING, "{nth}");
    }
    p.waits(2 * patience());
    assert_eq!(p.host.claimed(), 0);
}

// A peer that owes an answer, and from which nothing comes but bare frames. Expect: it is there, for as long as they come; and given up once nothing does.
#[test]
fn shows_that_its_writer_is_there() {
    let mut p = granted();
    p.sends(100);
    for nth in 0..4 {
        let outcome = p.waits(patience() * 3 / 4);
        assert!(!any(&outcome, "completes"), "{nth}: {outcome:?}");
        let data = p.data(0, 1_000 + 100 * nth, 1_100 + 100 * nth);
        let frame = p.bare_frame(&data);
        let outcome = p.says_bytes(&frame);
        assert!(!any(&outcome, "dropped"), "{nth}: {outcome:?}");
    }
    assert_eq!(p.host.claimed(), 1);
    let outcome = p.waits(2 * patience());
    assert!(any(&outcome, "completes 0 MaybeDelivered(Unreachable)"));
    assert_eq!(p.host.claimed(), 0);
    // Which another one does not change, but a frame in full does.
    let data = p.data(0, 2_000, 2_100);
    let frame = p.bare_frame(&data);
    assert!(any(&p.says_bytes(&frame), "dropped: NotAssociated"));
    let next = p.ack(0);
    assert!(!any(&p.says(next), "dropped"));
    let frame = p.bare_frame(&data);
    assert!(!any(&p.says_bytes(&frame), "dropped"));
}
