//! Messages the application is asked about first: events, handlers, answers, and what happens when an engine's successor asks again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{FakeDaemon, LONG, NODE};
use portolan::{
    AckMode, Event, Node, Offer, Port, PortOptions, Priority, SendError, SendOptions, Verdict,
};
use portolan_abi::event::{Event as Entry, EventKind, Offered};
use portolan_abi::token::{
    AnswerToken, FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY, FLAG_INLINE, Verdict as Wanted,
};

fn open(daemon: &FakeDaemon, options: PortOptions) -> Port {
    let node = Node::attach(&daemon.path).unwrap();
    node.open_port(options).unwrap()
}

/// The engine asks about message `number` of `total` bytes.
fn ask(daemon: &FakeDaemon, port: u16, number: u32, total: u32) {
    let first = *b"the first bytes.";
    let event = Entry {
        kind: EventKind::Offered(Offered {
            incarnation: 77,
            first,
        }),
        priority: 1,
        slot: 0,
        generation: 0,
        len: total.min(16),
        total,
        node: 2,
        port: 9,
        record: 3,
        epoch: 40,
        number,
        tag: u64::from(number) + 1000,
    };
    daemon.with_port(port, |p| p.push(&event));
}

fn answer(number: u32, verdict: Wanted, len: u32) -> AnswerToken {
    AnswerToken {
        from: (2, 9),
        priority: 1,
        incarnation: 77,
        epoch: 40,
        number,
        verdict,
        len,
    }
}

/// What the engine was answered so far; waits for so many.
fn answers(daemon: &FakeDaemon, port: u16, count: usize) -> Vec<AnswerToken> {
    let deadline = std::time::Instant::now() + LONG;
    loop {
        let answers = daemon.with_port(port, |p| p.answers.clone());
        if answers.len() >= count {
            return answers;
        }
        assert!(std::time::Instant::now() < deadline, "{answers:?}");
        std::thread::yield_now();
    }
}

fn offer(port: &mut Port) -> Offer {
    match port.blocking_receive(LONG).unwrap() {
        Some(Event::Offered(offer)) => offer,
        other => panic!("{other:?}"),
    }
}

// Three messages are offered as events. Expect: each shows what is known of it, and each answer reaches the engine by the message's name.
#[test]
fn offers_are_shown_and_answered() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, PortOptions::at(10).ask_first(5));
    let word = daemon.with_port(10, |p| p.client.header().ask_first.load(Ordering::Relaxed));
    assert_eq!(word, 6);

    ask(&daemon, 10, 1, 5);
    let first = offer(&mut port);
    assert_eq!(
        (first.from(), first.priority()),
        ((2, 9).into(), Priority::High)
    );
    assert_eq!((first.total(), first.tag()), (5, 1001));
    assert_eq!(first.first(), b"the f");
    port.accept(first).unwrap();
    ask(&daemon, 10, 2, 1 << 20);
    let second = offer(&mut port);
    assert_eq!(second.first(), b"the first bytes.");
    port.shorten(second, 300).unwrap();
    ask(&daemon, 10, 3, u32::MAX);
    let third = offer(&mut port);
    assert_eq!(third.total(), u32::MAX as usize);
    port.refuse(third).unwrap();
    let expected = [
        answer(1, Wanted::Accept, 0),
        answer(2, Wanted::Shorten, 300),
        answer(3, Wanted::Refuse, 0),
    ];
    assert_eq!(answers(&daemon, 10, 3), expected);
    // Lengths that no message has. Expect: all of it.
    ask(&daemon, 10, 4, 64);
    let fourth = offer(&mut port);
    port.shorten(fourth, usize::MAX).unwrap();
    assert_eq!(
        answers(&daemon, 10, 4)[3],
        answer(4, Wanted::Shorten, u32::MAX)
    );
    assert_eq!(port.anomalies(), 0);
}

// A port opened without the option, and one that asks before every message. Expect: 0 and 1 in the word the engine reads.
#[test]
fn only_who_asks_for_it_is_asked() {
    let daemon = FakeDaemon::start();
    let _plain = open(&daemon, PortOptions::at(10));
    let _every = open(&daemon, PortOptions::at(11).ask_first(0));
    let word = |port| {
        daemon.with_port(port, |p| {
            p.client.header().ask_first.load(Ordering::Relaxed)
        })
    };
    assert_eq!((word(10), word(11)), (0, 1));
}

// The engine dies twice and its successors ask again: before the application has answered, and after. Expect: the application hears of
// the message once, and both successors hear the same answer; once the message has come, its number may be asked about anew.
#[test]
fn a_successor_hears_the_same_answer() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, PortOptions::at(10).ask_first(0));
    ask(&daemon, 10, 7, 100);
    let question = offer(&mut port);
    ask(&daemon, 10, 7, 100);
    assert!(port.receive().unwrap().is_none(), "shown twice");
    port.shorten(question, 8).unwrap();
    ask(&daemon, 10, 7, 100);
    assert!(port.receive().unwrap().is_none(), "shown twice");
    let said = answer(7, Wanted::Shorten, 8);
    assert_eq!(answers(&daemon, 10, 2), [said, said]);

    // It comes, shortened.
    let buffer = port.allocate(8).unwrap();
    port.provide_receive_buffer(buffer, Priority::High).unwrap();
    daemon.with_port(10, |p| {
        p.push(&Entry {
            kind: EventKind::Received,
            priority: 1,
            slot: 0,
            generation: 1,
            len: 8,
            total: 100,
            node: 2,
            port: 9,
            record: 3,
            epoch: 40,
            number: 7,
            tag: 1,
        });
    });
    let Some(Event::Received(message)) = port.blocking_receive(LONG).unwrap() else {
        panic!("no message")
    };
    assert_eq!((message.len(), message.total()), (8, 100));
    ask(&daemon, 10, 7, 100);
    let again = offer(&mut port);
    port.unknown(Event::Offered(again));
    assert_eq!(answers(&daemon, 10, 3)[2], answer(7, Wanted::Accept, 0));
}

// A handler decides by length, and the application only ever waits for something else. Expect: it is asked inside that wait, no offer
// becomes an event.
#[test]
fn a_handler_answers_inside_any_call_that_waits() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, PortOptions::at(10).ask_first(0));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heard = asked.clone();
    port.on_offer(move |offer| {
        heard.lock().unwrap().push(offer.total());
        match offer.total() {
            1 => Verdict::Accept,
            2 => Verdict::Shorten(1),
            _ => Verdict::Refuse,
        }
    });
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    let handle = port
        .send_bytes((NODE, 0), b"x", SendOptions::default())
        .unwrap();
    for total in 1..=3 {
        ask(&daemon, 10, total, total);
    }
    // The send ends only after all were answered.
    let waiting = std::thread::scope(|scope| {
        let engine = scope.spawn(|| {
            let answers = answers(&daemon, 10, 3);
            daemon.knobs.frozen.store(false, Ordering::Relaxed);
            answers
        });
        let end = port.wait_for(handle, LONG).unwrap();
        assert!(end.is_some());
        engine.join().unwrap()
    });
    let expected = [
        answer(1, Wanted::Accept, 0),
        answer(2, Wanted::Shorten, 1),
        answer(3, Wanted::Refuse, 0),
    ];
    assert_eq!(waiting, expected);
    assert_eq!(*asked.lock().unwrap(), [1, 2, 3]);
    assert!(port.receive().unwrap().is_none());
}

// Every send token is out and more answers are due than slots are left. Expect: all arrive, in order, and no send token was taken.
#[test]
fn answers_take_no_send_tokens_and_wait_for_slots() {
    let daemon = FakeDaemon::start();
    let options = PortOptions {
        send_tokens: 7,
        ..PortOptions::at(10)
    };
    let mut port = open(&daemon, options.ask_first(0));
    port.on_offer(|_| Verdict::Accept);
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    for _ in 0..7 {
        port.send_bytes((NODE, 10), b"x", SendOptions::default())
            .unwrap();
    }
    assert_eq!(port.send_tokens(), 0);
    daemon.knobs.frozen.store(false, Ordering::Relaxed);
    for number in 0..16 {
        ask(&daemon, 10, number, 100);
    }
    // The messages to ourselves have no buffer: no send ends.
    assert!(
        port.blocking_receive(Duration::from_millis(1))
            .unwrap()
            .is_none()
    );
    while daemon.with_port(10, |p| p.answers.len()) < 16 {
        assert!(port.receive().unwrap().is_none());
        std::thread::yield_now();
    }
    let expected: Vec<_> = (0..16).map(|n| answer(n, Wanted::Accept, 0)).collect();
    assert_eq!(answers(&daemon, 10, 16), expected);
    assert_eq!(port.sends_outstanding(), 7);
}

// An offer is answered at another port. Expect: refused, and the engine of that port hears nothing.
#[test]
fn an_offer_belongs_to_its_port() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, PortOptions::at(10).ask_first(0));
    let mut other = open(&daemon, PortOptions::at(11));
    ask(&daemon, 10, 1, 1);
    let question = offer(&mut port);
    assert_eq!(other.refuse(question), Err(SendError::ForeignOffer));
    assert!(daemon.with_port(11, |p| p.answers.is_empty()));
}

// Each acknowledgement mode, inline and from a buffer. Expect: the token says so.
#[test]
fn a_send_says_when_it_is_acknowledged() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, PortOptions::at(10));
    let modes = [AckMode::Policy, AckMode::Immediate, AckMode::Lazy];
    for ack in modes {
        let options = SendOptions {
            ack,
            ..SendOptions::default()
        };
        for bytes in [&[1; 8][..], &[1; 200]] {
            let handle = port.send_bytes((NODE, 200), bytes, options).unwrap();
            port.wait_for(handle, LONG).unwrap().unwrap();
            port.drop_sends((NODE, 200), Priority::Low).unwrap();
            while port.send_tokens() < 63 {
                port.receive().unwrap();
            }
        }
    }
    let flags = daemon.with_port(10, |p| p.flags.clone());
    let (now, lazy, inline) = (FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY, FLAG_INLINE);
    assert_eq!(flags, [inline, 0, now | inline, now, lazy | inline, lazy]);
}
