//! Two books in conversation over an engine that does anything to what it carries. The model knows what really happened; nothing of it may
//! go unreported, and nothing else may be reported.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::incoming::{Incoming, Judged};
use super::outgoing::{End, GAPS_FOR_TESTS as GAPS, Outgoing, WINDOW, Word};
use super::seal::{Receipt, Seal, Statement};
use super::*;
use crate::names::Priority::{High, Low};

pub(super) fn address(port: u16) -> Address {
    (1, port).into()
}

pub(super) fn book(port: u16, id: u64) -> Book {
    let options = Integrity {
        confirm_within: Duration::from_millis(4),
    };
    Book::new(address(port), id << 32, options, 256, 1_000_000)
}

fn reports(book: &mut Book) -> BTreeMap<Fault, u64> {
    let mut all = BTreeMap::new();
    while let Some(report) = book.reports.take() {
        *all.entry(report.fault).or_default() += report.messages;
    }
    all
}

/// A message between the two libraries.
#[derive(Clone, Debug)]
struct Carried {
    slot: u32,
    bytes: Vec<u8>,
    tag: u64,
}

fn send(book: &mut Book, to: Address, slot: u32, len: usize) -> Carried {
    let at = book.may_send(to, Low).unwrap();
    let mut bytes = vec![slot as u8; len + SEAL];
    let options = SendOptions {
        tag: slot.into(),
        ..SendOptions::default()
    };
    book.seal(at, slot, &options, &mut bytes);
    let tag = options.tag;
    Carried { slot, bytes, tag }
}

fn deliver(book: &mut Book, from: Address, carried: &Carried) -> bool {
    let judgement = book.message(&carried.bytes, from, Low, carried.tag);
    matches!(judgement, Judgement::Deliver)
}

/// Carries notes both ways until nobody has anything to say.
pub(super) fn talk(a: &mut Book, b: &mut Book) {
    loop {
        let mut said = false;
        for turn in 0..2 {
            let (from, to) = if turn == 0 {
                (&mut *a, &mut *b)
            } else {
                (&mut *b, &mut *a)
            };
            while let Some((address, bytes, tag, asks)) = from.next_note(1) {
                assert_eq!(address, to.own);
                to.note(&bytes, from.own, High, tag);
                if let Some(stream) = asks.and_then(|at| from.sending.get(at)) {
                    stream.asking = false;
                }
                said = true;
            }
        }
        if !said {
            return;
        }
    }
}

/// Asks until everything is confirmed or known.
fn settle(a: &mut Book, b: &mut Book) {
    for _ in 0..2 * GAPS {
        a.ask_all();
        talk(a, b);
    }
}

/// What the engines do to one message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Carry,
    /// Acknowledged, never delivered.
    Swallow,
    Double,
    /// Ends as not delivered, and is not.
    Fail,
    /// Ends as perhaps delivered; is it?
    Perhaps(bool),
    /// Ends as not delivered, and is.
    Deny,
    FlipBit(usize),
    FlipTag,
    /// Stays behind until so many others have come.
    Delay(usize),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        12 => Just(Fate::Carry),
        1 => Just(Fate::Swallow),
        1 => Just(Fate::Double),
        1 => Just(Fate::Fail),
        1 => any::<bool>().prop_map(Fate::Perhaps),
        1 => Just(Fate::Deny),
        1 => any::<usize>().prop_map(Fate::FlipBit),
        1 => Just(Fate::FlipTag),
        1 => (1usize..20).prop_map(Fate::Delay),
    ]
}

proptest! {
    // Any fates, ends told late or early. Expect: every right message handed out once; every wrong one and every lost one reported, to the
    // receiver, and if lost to the sender; nothing reported that did not happen.
    #[test]
    fn nothing_goes_unreported(fates in proptest::collection::vec((fate(), 0usize..100, 0usize..6), 1..300)) {
        let (mut a, mut b) = (book(10, 1), book(11, 2));
        let (from, to) = (address(10), address(11));
        let mut expected: BTreeMap<Fault, u64> = BTreeMap::new();
        // Who has heard nothing of a stream misses nothing: see `the_first_of_a_stream_is_lost`.
        let first = send(&mut a, to, 0, 0);
        prop_assert!(deliver(&mut b, from, &first));
        delivered(&mut a, &first);
        let mut handed_out = 0u64;
        let mut right = 0u64;
        // Delivered for good, and their ends not told yet; delayed, with what must come first.
        let mut ends: Vec<(u32, Status)> = Vec::new();
        let mut late: Vec<(usize, Carried)> = Vec::new();
        for (i, (fate, len, behind)) in fates.into_iter().enumerate() {
            let slot = i as u32 % 256;
            while ends.len() > behind {
                let (slot, status) = ends.remove(0);
                a.ended(slot, status);
            }
            let carried = send(&mut a, to, slot, len);
            let mut status = Status::Delivered;
            match fate {
                Fate::Carry => {
                    right += 1;
                    handed_out += u64::from(deliver(&mut b, from, &carried));
                }
                Fate::Swallow => *expected.entry(Fault::Lost).or_default() += 1,
                Fate::Double => {
                    right += 1;
                    *expected.entry(Fault::Repeated).or_default() += 1;
                    handed_out += u64::from(deliver(&mut b, from, &carried));
                    prop_assert!(!deliver(&mut b, from, &carried));
                }
                Fate::Fail => status = Status::NotDelivered(Reason::Deadline),
                Fate::Perhaps(came) => {
                    status = Status::MaybeDelivered(Reason::Unreachable);
                    if came {
                        right += 1;
                        handed_out += u64::from(deliver(&mut b, from, &carried));
                    }
                }
                Fate::Deny => {
                    status = Status::NotDelivered(Reason::Deadline);
                    right += 1;
                    *expected.entry(Fault::Contradicted).or_default() += 1;
                    handed_out += u64::from(deliver(&mut b, from, &carried));
                }
                Fate::FlipBit(bit) => {
                    let mut wrong = carried.clone();
                    let bit = bit % (wrong.bytes.len() * 8);
                    wrong.bytes[bit / 8] ^= 1 << (bit % 8);
                    prop_assert!(!deliver(&mut b, from, &wrong));
                    *expected.entry(Fault::Changed).or_default() += 1;
                    *expected.entry(Fault::Lost).or_default() += 1;
                }
                Fate::FlipTag => {
                    let wrong = Carried { tag: carried.tag ^ 4, ..carried };
                    prop_assert!(!deliver(&mut b, from, &wrong));
                    *expected.entry(Fault::Changed).or_default() += 1;
                    *expected.entry(Fault::Lost).or_default() += 1;
                }
                Fate::Delay(by) => {
                    right += 1;
                    late.push((by, carried));
                    continue;
                }
            }
            ends.push((slot, status));
            for (by, carried) in std::mem::take(&mut late) {
                if by > 1 {
                    late.push((by - 1, carried));
                } else {
                    handed_out += u64::from(deliver(&mut b, from, &carried));
                    ends.push((carried.slot, Status::Delivered));
                }
            }
            talk(&mut a, &mut b);
        }
        for (_, carried) in late {
            handed_out += u64::from(deliver(&mut b, from, &carried));
            ends.push((carried.slot, Status::Delivered));
        }
        for (slot, status) in ends {
            a.ended(slot, status);
        }
        settle(&mut a, &mut b);
        prop_assert_eq!(handed_out, right);
        let lost = expected.get(&Fault::Lost).copied();
        let mut heard = reports(&mut b);
        // A flipped magic is "no seal": as definite.
        let unsealed = heard.remove(&Fault::Unsealed).unwrap_or(0);
        if unsealed > 0 {
            *heard.entry(Fault::Changed).or_default() += unsealed;
        }
        // One of the two finds out that a message came that should not have.
        let mut told = reports(&mut a);
        if let Some(more) = told.remove(&Fault::Contradicted) {
            *heard.entry(Fault::Contradicted).or_default() += more;
        }
        prop_assert_eq!(heard, expected);
        prop_assert_eq!(told, lost.map(|n| (Fault::Lost, n)).into_iter().collect());
        prop_assert_eq!(a.unconfirmed(), 0);
    }

    // The counts just before the wrap, any gaps. Expect: as anywhere else.
    #[test]
    fn sequences_wrap(lost in proptest::collection::vec(any::<bool>(), 1..60), back in 0u32..40) {
        let mut sender = Outgoing::new(7, u32::MAX - back);
        let mut receiver = Incoming::default();
        let mut missing = 0;
        for (i, &lost) in lost.iter().enumerate() {
            let (sequence, back) = sender.send();
            // The first is never lost: who has heard nothing has missed nothing.
            if !lost || i == 0 {
                let (came, judged) = receiver.message(&seal(7, sequence, back));
                prop_assert_eq!(came, Came::Fresh);
                missing += judged.lost;
            }
            sender.ended(sequence, End::Delivered);
        }
        missing += receiver.statement(&sender.statement(Low)).unwrap().lost;
        prop_assert_eq!(missing as usize, lost[1..].iter().filter(|&&l| l).count());
        let word = sender.receipt(&receiver.receipt(9, Low).unwrap()).unwrap();
        prop_assert_eq!((word.lost, word.unconfirmed), (missing, 0));
        prop_assert!(!sender.wants_receipt());
    }

    // Any seals and statements, as from a library that is wrong itself. Expect: no panic, and bounded work.
    #[test]
    fn noise_does_no_harm(words in proptest::collection::vec((0u64..3, any::<u32>(), any::<u16>(), any::<u32>(), any::<u32>(), any::<bool>()), 0..60)) {
        let mut receiver = Incoming::default();
        for (session, first, back, count, upto, seals) in words {
            if seals {
                receiver.message(&seal(session, first, back));
            } else {
                let certain = count % 2 == 0;
                receiver.statement(&Statement { session, priority: Low, first, count, certain, upto });
            }
        }
    }
}

fn seal(session: u64, sequence: u32, back: u16) -> Seal {
    Seal {
        session,
        sequence,
        back,
        receipt_wanted: false,
        priority: Low,
        from: address(10),
        to: address(11),
    }
}

fn delivered(book: &mut Book, carried: &Carried) {
    book.ended(carried.slot, Status::Delivered);
}

// The sender's port is opened anew; then the engine brings up a message of the former one. Expect: the new session begins without a
// complaint, the old message is not handed out.
#[test]
fn a_new_session_begins_and_an_old_one_does_not_come_back() {
    let (mut old, mut b) = (book(10, 1), book(11, 2));
    let carried = [0, 1].map(|slot| {
        let carried = send(&mut old, address(11), slot, 10);
        assert!(deliver(&mut b, address(10), &carried));
        delivered(&mut old, &carried);
        carried
    });
    let mut new = book(10, 3);
    let first = send(&mut new, address(11), 0, 10);
    assert!(deliver(&mut b, address(10), &first));
    assert!(reports(&mut b).is_empty());
    assert!(!deliver(&mut b, address(10), &carried[1]));
    assert_eq!(reports(&mut b), [(Fault::Repeated, 1)].into());
    let second = send(&mut new, address(11), 1, 10);
    assert!(deliver(&mut b, address(10), &second));
}

// The receiver's port is opened anew in the middle of a stream, with some messages unconfirmed. Expect: the new one complains of nothing;
// the sender hears how many nobody confirms.
#[test]
fn a_new_receiver_is_owed_nothing() {
    let (mut a, mut old) = (book(10, 1), book(11, 2));
    for slot in 0..5 {
        let carried = send(&mut a, address(11), slot, 10);
        deliver(&mut old, address(10), &carried);
        delivered(&mut a, &carried);
        if slot == 1 {
            settle(&mut a, &mut old);
        }
    }
    let mut new = book(11, 3);
    let carried = send(&mut a, address(11), 5, 10);
    assert!(deliver(&mut new, address(10), &carried));
    delivered(&mut a, &carried);
    settle(&mut a, &mut new);
    assert!(reports(&mut new).is_empty());
    assert_eq!(reports(&mut a), [(Fault::Unconfirmed, 3)].into());
}

// The first messages of a stream are lost. Expect: the receiver, which cannot know, says nothing; the sender hears of them.
#[test]
fn the_first_of_a_stream_is_lost() {
    let (mut a, mut b) = (book(10, 1), book(11, 2));
    for slot in 0..3 {
        let carried = send(&mut a, address(11), slot, 10);
        if slot == 2 {
            assert!(deliver(&mut b, address(10), &carried));
        }
        delivered(&mut a, &carried);
    }
    settle(&mut a, &mut b);
    assert!(reports(&mut b).is_empty());
    assert_eq!(reports(&mut a), [(Fault::Unconfirmed, 2)].into());
}

// A statement comes twice, its first receipt lost; a gap grows after it was stated, and what was given up in it came. Expect: no
// complaint about the first; one about the second.
#[test]
fn statements_are_told_again() {
    let (mut sender, mut receiver) = (Outgoing::new(7, 0), Incoming::default());
    let certain = End::GivenUp { certain: true };
    let (first, back) = sender.send();
    receiver.message(&seal(7, first, back));
    sender.ended(first, End::Delivered);
    let (given_up, _) = sender.send();
    sender.ended(given_up, certain);
    let statement = sender.statement(Low);
    for _ in 0..2 {
        assert_eq!(receiver.statement(&statement), Some(Judged::default()));
    }
    let (denied, back) = sender.send();
    receiver.message(&seal(7, denied, back));
    sender.ended(denied, certain);
    let word = sender.receipt(&receiver.receipt(1, Low).unwrap()).unwrap();
    let contradicted = Word {
        contradicted: 1,
        ..Word::default()
    };
    assert_eq!(word, contradicted);
}

// A receipt of the port's former owner comes late. Expect: nothing is counted twice.
#[test]
fn a_late_receipt_changes_nothing() {
    let mut sender = Outgoing::new(7, 0);
    for _ in 0..5 {
        let (sequence, _) = sender.send();
        sender.ended(sequence, End::Delivered);
    }
    let receipt = |receiver, start, upto, lost| Receipt {
        session: 7,
        priority: Low,
        receiver,
        start,
        upto,
        lost,
    };
    let old = receipt(1, 0, 2, 1);
    let new = receipt(2, 3, 5, 1);
    let mut hear = |receipt| {
        let word = sender.receipt(&receipt).unwrap();
        (word.lost, word.unconfirmed)
    };
    assert_eq!(hear(old), (1, 0));
    assert_eq!(hear(new), (1, 1));
    assert_eq!(hear(old), (0, 0));
    assert_eq!(hear(new), (0, 0));
    assert_eq!(
        sender.receipt(&receipt(2, 3, 6, 1)),
        None,
        "beyond what was sent"
    );
}

// Messages for another port, from another, at another priority; one cut short; one that has no seal. Expect: none handed out, each
// reported as what it is.
#[test]
fn what_is_not_ours_is_not_handed_out() {
    let (mut a, mut b) = (book(10, 1), book(11, 2));
    let other = send(&mut a, address(12), 0, 100);
    assert!(!deliver(&mut b, address(10), &other));
    let ours = send(&mut a, address(11), 1, 100);
    assert!(!deliver(&mut b, address(12), &ours));
    let high = b.message(&ours.bytes, address(10), High, ours.tag);
    assert!(matches!(high, Judgement::Keep));
    assert_eq!(reports(&mut b), [(Fault::Misdirected, 3)].into());
    let cut = Carried {
        bytes: ours.bytes[..120].to_vec(),
        ..ours.clone()
    };
    assert!(!deliver(&mut b, address(10), &cut));
    b.note(b"hello", address(10), Low, 0);
    assert_eq!(reports(&mut b), [(Fault::Unsealed, 2)].into());
    assert!(deliver(&mut b, address(10), &ours));
}

// The application wants the beginning of some messages only; one of the others is lost. Expect: the shortened ones are not taken for
// lost, the lost one is.
#[test]
fn shortened_messages_are_not_lost() {
    let (mut a, mut b) = (book(10, 1), book(11, 2));
    for slot in 0..9 {
        let carried = send(&mut a, address(11), slot, 100);
        match slot {
            0 | 3 | 8 => b.shortened(address(10), Low),
            5 => {}
            _ => assert!(deliver(&mut b, address(10), &carried)),
        }
        delivered(&mut a, &carried);
    }
    settle(&mut a, &mut b);
    assert_eq!(reports(&mut b), [(Fault::Lost, 1)].into());
    assert_eq!(reports(&mut a), [(Fault::Lost, 1)].into());
}

// A receiver that says nothing, and sends that do not end. Expect: both reported once, after their time; then nobody asks any more until
// something happens.
#[test]
fn silence_is_reported() {
    let mut a = book(10, 1);
    let lost = send(&mut a, address(11), 0, 10);
    delivered(&mut a, &lost);
    send(&mut a, address(12), 1, 10);
    let (mut now, mut asked) = (1, 0);
    while now < 50_000_000 {
        if a.due().is_some_and(|due| now >= due) {
            a.look(now);
        }
        while let Some((_, _, _, Some(at))) = a.next_note(now) {
            asked += 1;
            a.sending.get(at).unwrap().asking = false;
        }
        now += 100_000;
    }
    let expected = [(Fault::Unconfirmed, 1), (Fault::Endless, 1)].into();
    assert_eq!(reports(&mut a), expected);
    assert_eq!(a.wanted, 0);
    // A new message has all its time.
    let next = send(&mut a, address(11), 2, 10);
    delivered(&mut a, &next);
    for _ in 0..3 {
        a.look(now);
        now += 300_000;
    }
    assert!(reports(&mut a).is_empty());
    let mut b = book(11, 2);
    assert!(deliver(&mut b, address(10), &next));
    settle(&mut a, &mut b);
    assert!((1..=4).contains(&asked), "{asked}");
    assert_eq!(a.wanted, 0);
    // It ends after all: nothing is left to do.
    a.ended(1, Status::NotDelivered(Reason::Deadline));
    settle(&mut a, &mut book(12, 2));
    a.look(now + 10_000_000);
    a.look(now + 20_000_000);
    assert_eq!(a.due(), None);
}

// Sends to a port that is not there, each of which fails, for ever; then it is opened. Expect: the stream is never held up, and what is sent
// to the new port arrives.
#[test]
fn failures_without_end_hold_nobody_up() {
    let mut a = book(10, 1);
    for _ in 0..10 * WINDOW {
        let carried = send(&mut a, address(11), 0, 10);
        a.ended(carried.slot, Status::NotDelivered(Reason::PortClosed));
    }
    let mut b = book(11, 2);
    for _ in 0..10 {
        let carried = send(&mut a, address(11), 0, 10);
        assert!(deliver(&mut b, address(10), &carried));
        delivered(&mut a, &carried);
    }
    settle(&mut a, &mut b);
    assert!(reports(&mut a).is_empty() && reports(&mut b).is_empty());
    assert_eq!(a.unconfirmed(), 0);
}

// Failures and successes in turn, and a receiver that looks now and then. Expect: it is told of the gaps in time; nothing is held up.
#[test]
fn gaps_are_told_in_time() {
    let (mut a, mut b) = (book(10, 1), book(11, 2));
    for i in 0..1000 {
        let carried = send(&mut a, address(11), 0, 10);
        if i % 2 == 0 {
            assert!(deliver(&mut b, address(10), &carried));
            delivered(&mut a, &carried);
        } else {
            a.ended(0, Status::NotDelivered(Reason::Deadline));
        }
        talk(&mut a, &mut b);
    }
    settle(&mut a, &mut b);
    assert!(reports(&mut a).is_empty() && reports(&mut b).is_empty());
}

// Failures and successes in turn, and a receiver that confirms nothing. Expect: the stream takes no message any more before its state
// would grow; a receipt, or several, and it goes on.
#[test]
fn the_state_of_a_stream_is_bounded() {
    let (mut a, mut b) = (book(10, 1), book(11, 2));
    let mut sent = 0;
    while a.may_send(address(11), Low).is_some() {
        let carried = send(&mut a, address(11), 0, 10);
        if sent % 2 == 0 {
            assert!(deliver(&mut b, address(10), &carried));
            delivered(&mut a, &carried);
        } else {
            a.ended(0, Status::NotDelivered(Reason::Deadline));
        }
        sent += 1;
    }
    assert_eq!(sent, 2 * GAPS);
    settle(&mut a, &mut b);
    assert!(a.may_send(address(11), Low).is_some());
    // One that does not end holds up the limit.
    let mut sent = 0;
    while a.may_send(address(11), Low).is_some() {
        let carried = send(&mut a, address(11), 1, 10);
        if sent > 0 {
            delivered(&mut a, &carried);
        }
        sent += 1;
    }
    assert_eq!(sent, WINDOW);
    assert!(reports(&mut a).is_empty() && reports(&mut b).is_empty());
}
