//! End-to-end integrity at ports: what is right arrives as if nothing were, what is wrong is reported.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{DELIVERED, FakeDaemon, LONG, NODE, SECOND, event, provide, sent};
use portolan::{
    Address, Event, Fault, Integrity, IntegrityReport, Message, Node, Port, PortOptions, Priority,
    SendOptions, Status, Verdict,
};
use portolan_abi::event::{Event as Entry, EventKind, Offered};
use portolan_abi::token::TokenRef;

/// Where silence is what a test is about.
const SOON: Duration = Duration::from_millis(400);

fn options(port: u16) -> PortOptions {
    PortOptions {
        integrity: Some(Integrity {
            confirm_within: LONG,
        }),
        ..PortOptions::at(port)
    }
}

fn within(confirm_within: Duration, port: u16) -> PortOptions {
    PortOptions {
        integrity: Some(Integrity { confirm_within }),
        ..PortOptions::at(port)
    }
}

fn open_with(daemon: &FakeDaemon, options: PortOptions) -> Port {
    let node = Node::attach(&daemon.path).unwrap();
    node.open_port(options).unwrap()
}

fn open(daemon: &FakeDaemon, port: u16) -> Port {
    open_with(daemon, options(port))
}

fn message(port: &mut Port) -> Message {
    match event(port) {
        Event::Received(message) => message,
        other => panic!("{other:?}"),
    }
}

fn report(port: &mut Port) -> IntegrityReport {
    match event(port) {
        Event::Integrity(report) => report,
        other => panic!("{other:?}"),
    }
}

fn of(fault: Fault, port: u16, priority: Priority, messages: u64) -> IntegrityReport {
    IntegrityReport {
        fault,
        peer: Some((NODE, port).into()),
        priority: Some(priority),
        messages,
    }
}

fn nothing(port: &mut Port) {
    let event = port.blocking_receive(Duration::from_millis(2)).unwrap();
    assert!(event.is_none(), "{event:?}");
}

fn free_bytes(port: &Port) -> u64 {
    port.allocate(usize::MAX >> 8).unwrap_err().free
}

fn high(tag: u64) -> SendOptions {
    SendOptions {
        priority: Priority::High,
        tag,
        ..SendOptions::default()
    }
}

// Confirms while the other end looks at its port.
fn confirm(port: &mut Port, peer: &mut Port) -> u64 {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let event = peer.receive().unwrap();
                assert!(event.is_none(), "{event:?}");
                std::thread::yield_now();
            }
        });
        let left = port.confirm(LONG).unwrap();
        done.store(true, Ordering::Relaxed);
        left
    })
}

// Messages of all kinds of lengths, copied and not, in buffers that just hold them. Expect: they arrive as without integrity, verified; the
// sender's buffer is as it was, tokens and memory come back, nothing is reported, everything is confirmed.
#[test]
fn what_is_right_is_as_without() {
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    let (tokens, free) = (a.receive_tokens(), free_bytes(&a));
    assert_eq!(
        (tokens >= 256, a.send_tokens(), a.buffers_provided()),
        (true, 63, 0)
    );
    for len in [0, 1, 30, 31, 32, 47, 48, 49, 79, 80, 81, 4096, 1 << 20] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
        for copied in [true, false] {
            provide(&mut b, 1, len, Priority::High);
            if copied {
                a.send_bytes((NODE, 11), &bytes, high(3)).unwrap();
            } else {
                // More room than the message needs, and something in it.
                let mut buffer = a.allocate(len + 40).unwrap();
                buffer.fill(0xa5);
                buffer[..len].copy_from_slice(&bytes);
                a.send((NODE, 11), buffer, len, high(3)).unwrap();
            }
            let came = message(&mut b);
            assert_eq!(&came[..], &bytes[..]);
            assert_eq!(
                (came.total(), came.tag(), came.is_verified()),
                (len, 3, true)
            );
            assert_eq!(came.from(), Address::from((NODE, 10)));
            assert_eq!(came.into_buffer().len(), len);
            let end = sent(&mut a);
            assert_eq!(end.status, Status::Delivered);
            if let Some(buffer) = end.buffer {
                assert!(buffer[..len] == bytes && buffer[len..].iter().all(|&x| x == 0xa5));
            }
        }
    }
    assert_eq!(a.unconfirmed(), 26);
    assert_eq!(confirm(&mut a, &mut b), 0);
    nothing(&mut a);
    nothing(&mut b);
    assert_eq!((a.receive_tokens(), free_bytes(&a)), (tokens, free));
    assert_eq!((b.receive_tokens(), b.buffers_provided()), (tokens, 0));
    assert_eq!((a.anomalies(), b.anomalies()), (0, 0));
}

// Both ways, all the time, over one pair of ports and from a port to itself. Expect: a few notes, no reports, no token lost.
#[test]
fn receipts_are_few() {
    const MESSAGES: u64 = 2000;
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    for port in [&mut a, &mut b] {
        provide(port, 64, 64, Priority::Low);
    }
    for number in 0..MESSAGES {
        for (first, to) in [(true, 11), (false, 10), (true, 10)] {
            let options = SendOptions {
                tag: number,
                ..SendOptions::default()
            };
            let port = if first { &mut a } else { &mut b };
            port.send_bytes((NODE, to), b"over and over", options)
                .unwrap();
        }
        for (port, ends, messages) in [(&mut a, 2, 2), (&mut b, 1, 1)] {
            let mut left = (ends, messages);
            while left != (0, 0) {
                match event(port) {
                    Event::Sent(sent) if sent.status.is_delivered() => left.0 -= 1,
                    Event::Received(message) => {
                        left.1 -= 1;
                        assert_eq!(message.tag(), number);
                        port.unknown(Event::Received(message));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    assert!(a.unconfirmed() < 3 * 128, "{}", a.unconfirmed());
    let sends = daemon.with_port(11, |p| p.flags.len()) as u64;
    assert!(sends < MESSAGES + MESSAGES / 20, "{sends}");
    confirm(&mut a, &mut b);
    confirm(&mut b, &mut a);
    assert_eq!((a.unconfirmed(), b.unconfirmed()), (0, 0));
    assert_eq!((a.buffers_provided(), b.buffers_provided()), (64, 64));
}

// The receiver's memory changes between the engine's commit and the application's look at it: payload, seal. The event changes: tag,
// sender, length. Expect: reported each time, the buffer offered again, the next message arrives.
#[test]
fn what_changed_after_the_commit_is_seen() {
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    provide(&mut b, 1, 100, Priority::Low);
    let offset = 8 * 64; // Behind the buffers for notes.
    for (at, byte) in [(0, 0x55), (99, 0x55), (105, 0x55), (131, 0x55)] {
        a.send_bytes((NODE, 11), &[7; 100], SendOptions::default())
            .unwrap();
        sent(&mut a);
        daemon.with_port(11, |p| {
            let mut was = [0];
            p.client.read_arena(offset + at, &mut was).unwrap();
            p.client.write_arena(offset + at, &[was[0] ^ byte]).unwrap();
        });
        assert_eq!(report(&mut b), of(Fault::Changed, 10, Priority::Low, 1));
        nothing(&mut b);
    }
    // Each time the sender believed that it is delivered.
    a.send_bytes((NODE, 11), &[8; 100], SendOptions::default())
        .unwrap();
    sent(&mut a);
    assert_eq!(message(&mut b)[..], [8; 100]);
    confirm(&mut a, &mut b);
    assert_eq!(report(&mut a), of(Fault::Unconfirmed, 11, Priority::Low, 4));

    provide(&mut b, 1, 100, Priority::Low);
    a.send_bytes((NODE, 11), &[9; 100], SendOptions::default())
        .unwrap();
    sent(&mut a);
    assert_eq!(message(&mut b)[..], [9; 100]);
}

// A message that the engine calls delivered and drops; then another. Expect: both ends hear of it, without another word at once, after a
// while if nothing more is sent.
#[test]
fn what_is_called_delivered_and_is_not_is_reported() {
    let daemon = FakeDaemon::start();
    let mut a = open_with(&daemon, within(4 * SECOND, 10));
    let mut b = open(&daemon, 11);
    provide(&mut b, 4, 100, Priority::Low);
    let swallow = |a: &mut Port| {
        daemon.with_port(10, |p| p.swallow = 1);
        a.send_bytes((NODE, 11), b"lost", SendOptions::default())
            .unwrap();
        assert_eq!(sent(a).status, Status::Delivered);
    };
    let pass = |a: &mut Port, b: &mut Port| {
        a.send_bytes((NODE, 11), b"here", SendOptions::default())
            .unwrap();
        sent(a);
        loop {
            match event(b) {
                Event::Received(message) => break b.unknown(Event::Received(message)),
                Event::Integrity(report) => {
                    assert_eq!(report, of(Fault::Lost, 10, Priority::Low, 1))
                }
                other => panic!("{other:?}"),
            }
        }
    };
    pass(&mut a, &mut b);
    swallow(&mut a);
    pass(&mut a, &mut b);
    assert_eq!(report(&mut b), of(Fault::Lost, 10, Priority::Low, 1));
    confirm(&mut a, &mut b);
    assert_eq!(report(&mut a), of(Fault::Lost, 11, Priority::Low, 1));
    // The last of all.
    swallow(&mut a);
    let lost = of(Fault::Lost, 10, Priority::Low, 1);
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let b = &mut b;
        scope.spawn(move || {
            assert_eq!(report(b), lost);
            while !done.load(Ordering::Relaxed) {
                nothing(b);
            }
        });
        assert_eq!(report(&mut a), of(Fault::Lost, 11, Priority::Low, 1));
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(a.unconfirmed(), 0);
}

// The receiving application does not look; then its port is closed. Expect: the sender hears once that nobody confirms; later sends of
// both priorities end as they would without notes, and a new port there is sent to.
#[test]
fn silence_and_a_closed_port_are_no_deadlock() {
    let daemon = FakeDaemon::start();
    let mut a = open_with(&daemon, within(SOON, 10));
    let mut b = open(&daemon, 11);
    provide(&mut b, 1, 100, Priority::Low);
    a.send_bytes((NODE, 11), b"unheard", SendOptions::default())
        .unwrap();
    sent(&mut a);
    assert_eq!(report(&mut a), of(Fault::Unconfirmed, 11, Priority::Low, 1));
    nothing(&mut a);
    b.close(SECOND).unwrap();

    // A failure at low priority is told about at high priority, which fails.
    a.send_bytes((NODE, 11), b"nobody", SendOptions::default())
        .unwrap();
    assert!(!sent(&mut a).status.is_delivered());
    assert_eq!(a.unconfirmed(), 1, "nobody has heard of the gap");
    assert!(a.blocking_receive(2 * SOON).unwrap().is_none());
    assert_eq!(a.unconfirmed(), 0, "and nobody will");
    a.resume_sending((NODE, 11), Priority::Low).unwrap();
    let mut b = open(&daemon, 11);
    provide(&mut b, 1, 100, Priority::Low);
    provide(&mut b, 1, 100, Priority::High);
    for options in [SendOptions::default(), high(0)] {
        a.send_bytes((NODE, 11), b"somebody", options).unwrap();
        assert_eq!(sent(&mut a).status, Status::Delivered);
        assert_eq!(&message(&mut b)[..], b"somebody");
    }
    // On a busy machine it may be too late to confirm, and then it is reported.
    assert_eq!(confirm(&mut a, &mut b), 0);
}

// The receiver closes its port when it has what it wanted. Expect: its receipts still go out, without waiting for anybody; the sender hears
// of nothing.
#[test]
fn who_closes_says_what_came() {
    let daemon = FakeDaemon::start();
    let mut a = open_with(&daemon, within(LONG, 10));
    let mut b = open(&daemon, 11);
    provide(&mut b, 3, 100, Priority::Low);
    for _ in 0..3 {
        a.send_bytes((NODE, 11), b"farewell", SendOptions::default())
            .unwrap();
        sent(&mut a);
        message(&mut b);
    }
    let start = std::time::Instant::now();
    b.close(LONG).unwrap();
    assert!(start.elapsed() < LONG / 2);
    while a.unconfirmed() > 0 {
        nothing(&mut a);
    }
    nothing(&mut a);
}

// One end has no integrity. Expect: the other says so.
#[test]
fn both_ends_must_have_it() {
    let daemon = FakeDaemon::start();
    let mut a = open_with(&daemon, within(SOON, 10));
    let mut b = open_with(&daemon, PortOptions::at(11));
    provide(&mut a, 2, 100, Priority::High);
    provide(&mut b, 8, 200, Priority::High);
    for len in [3, 90] {
        b.send_bytes((NODE, 10), &vec![1; len], high(0)).unwrap();
        assert_eq!(report(&mut a), of(Fault::Unsealed, 11, Priority::High, 1));
    }
    assert_eq!(a.buffers_provided(), 2);
    a.send_bytes((NODE, 11), b"12345", high(0)).unwrap();
    sent(&mut a);
    assert_eq!(
        report(&mut a),
        of(Fault::Unconfirmed, 11, Priority::High, 1)
    );
}

// Messages are offered, and shortened. Expect: offers speak of the application's bytes; a shortened message is the application's beginning,
// not verified; one that is not longer comes whole; one that the engine shortens by itself does not come.
#[test]
fn shortened_messages_come_without_a_seal() {
    let daemon = FakeDaemon::start();
    let mut a = open(&daemon, 10);
    let mut b = open_with(&daemon, options(11).ask_first(0));
    let least = daemon.with_port(11, |p| p.client.header().ask_first.load(Ordering::Relaxed));
    assert_eq!(least, 33, "notes are not offered");
    provide(&mut b, 1, 5, Priority::Low);
    provide(&mut b, 1, 10, Priority::Low);
    b.on_offer(|offer| {
        assert_eq!((offer.total(), offer.first().len()), (10, 10));
        Verdict::Shorten(5)
    });
    let entry = |kind, number, len| Entry {
        kind,
        priority: 0,
        slot: 0,
        generation: 1,
        len,
        total: 42,
        node: NODE,
        port: 10,
        record: 0,
        epoch: 1,
        number,
        tag: 0,
    };
    let offered = EventKind::Offered(Offered {
        incarnation: 1,
        first: *b"0123456789abcdef",
    });
    daemon.with_port(11, |p| p.push(&entry(offered, 1, 16)));
    nothing(&mut b);
    let answer = loop {
        if let Some(answer) = daemon.with_port(11, |p| p.answers.first().copied()) {
            break answer;
        }
        std::thread::yield_now();
    };
    assert_eq!(answer.len, 37, "room for a seal");
    let (at, slot) = daemon.with_port(11, |p| p.offered_buffer(37));
    let received = Entry {
        slot: slot.slot,
        generation: slot.generation,
        ..entry(EventKind::Received, 1, 37)
    };
    daemon.with_port(11, |p| {
        p.client.write_arena(at, &[b'x'; 37]).unwrap();
        p.push(&received);
    });
    let came = message(&mut b);
    assert_eq!(
        (&came[..], came.total(), came.is_verified()),
        (&b"xxxxx"[..], 10, false)
    );

    // What it was, its sender knows. The next one: nothing is missing.
    daemon.with_port(10, |p| p.swallow = 1);
    for _ in 0..2 {
        a.send_bytes((NODE, 11), b"0123456789", SendOptions::default())
            .unwrap();
        sent(&mut a);
    }
    assert!(message(&mut b).is_verified());
    assert_eq!(confirm(&mut a, &mut b), 0);
    nothing(&mut a);
    provide(&mut b, 1, 5, Priority::Low);

    // Never answered for: the engine makes it up.
    let (_, slot) = daemon.with_port(11, |p| p.offered_buffer(37));
    let false_one = Entry {
        slot: slot.slot,
        generation: slot.generation,
        ..entry(EventKind::Received, 2, 37)
    };
    daemon.with_port(11, |p| p.push(&false_one));
    assert_eq!(report(&mut b), of(Fault::Changed, 10, Priority::Low, 1));
}

// The engine ends a send that is not out. Expect: ignored as ever, and reported.
#[test]
fn what_contradicts_the_books_is_reported() {
    let daemon = FakeDaemon::start();
    let mut a = open(&daemon, 10);
    let nobodys = TokenRef {
        slot: 3,
        generation: 9,
    };
    daemon.with_port(10, |p| p.end(&[nobodys], DELIVERED));
    let report = report(&mut a);
    assert_eq!(
        (report.fault, report.peer, a.anomalies()),
        (Fault::Nonsense, None, 1)
    );
}

// Anything at all in the event ring and in the arena. Expect: no panic, nothing handed out, and the port is usable: no token is lost but
// those the engine ended.
#[test]
fn noise_from_the_engine_is_never_handed_out() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    provide(&mut port, 16, 100, Priority::Low);
    let mut seed = 0x1234_5678_9abc_def0u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut reports = 0;
    for round in 0..3000 {
        let mut words = [(); 8].map(|()| random());
        if round % 4 != 0 {
            // Plausible: a message, or an offer, in a slot that may be out, of a length that may fit.
            words[0] =
                [1, 3][(random() % 2) as usize] | (random() % 2) << 24 | (random() % 32) << 32;
            let len = random() % 140;
            words[1] = (1 + random() % 4) | len << 32;
            words[5] = len + random() % 2;
            words[2] = words[2] & !0xffff_ffff | 1 | 11 << 16;
        }
        daemon.with_port(10, |p| {
            p.forges = true;
            let noise = [(); 64].map(|()| random() as u8);
            p.client.write_arena(random() % 4096, &noise).unwrap();
            p.push_words(&words);
        });
        while let Some(event) = port.receive().unwrap() {
            match event {
                Event::Integrity(report) => reports += report.messages,
                Event::Offered(offer) => port.accept(offer).unwrap(),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(reports > 1000, "{reports}");
}

// More tokens than are left beside the library's. Expect: refused by name.
#[test]
fn some_tokens_are_the_librarys() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    for (send_tokens, receive_tokens, fits) in
        [(503, 1016, true), (504, 1, false), (1, 1017, false)]
    {
        let options = PortOptions {
            send_tokens,
            receive_tokens,
            ..options(10)
        };
        assert_eq!(node.open_port(options).is_ok(), fits);
    }
}
