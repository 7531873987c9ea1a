//! A port in use: sending, receiving, tokens, waiting, and what happens after failures.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::{FakeDaemon, LONG, NODE, SECOND, event, open, provide, sent, tagged};
use portolan::service::{Answers, EchoServer, Kind, Tag};
use portolan::{
    Event, Node, Port, PortOptions, Priority, Reason, SendError, SendOptions, Status, Wait,
};
use portolan_abi::port::state;
use rustix::event::{PollFd, PollFlags, Timespec};

fn free_bytes(port: &Port) -> u64 {
    port.allocate(usize::MAX).unwrap_err().free
}

// Messages of 0, inline, just not inline and many bytes, to another port of this node. Expect: each arrives as it was sent, ends as
// delivered, and its buffer comes back.
#[test]
fn messages_arrive() {
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    for len in [0, 1, 79, 80, 81, 4096, 1 << 20] {
        provide(&mut b, 1, len, Priority::High);
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
        let options = SendOptions {
            priority: Priority::High,
            tag: len as u64,
            ..SendOptions::default()
        };
        let handle = a.send_bytes((NODE, 11), &bytes, options).unwrap();
        assert!(a.is_outstanding(handle));
        let Event::Received(message) = event(&mut b) else {
            panic!()
        };
        assert_eq!(&message[..], &bytes[..]);
        assert_eq!(
            (message.from(), message.tag(), message.priority()),
            ((NODE, 10).into(), len as u64, Priority::High)
        );
        let end = sent(&mut a);
        assert_eq!((end.status, end.handle), (Status::Delivered, handle));
        assert!(end.buffer.is_none() && !a.is_outstanding(handle));
    }
    assert_eq!(free_bytes(&a), 8 << 20);
    assert_eq!((a.anomalies(), b.anomalies()), (0, 0));

    // Without a copy: the buffer itself comes back.
    provide(&mut b, 1, 4096, Priority::Low);
    let mut buffer = a.allocate(4096).unwrap();
    buffer.fill(0xa5);
    let first = buffer.as_ptr();
    a.send((NODE, 11), buffer, 4000, tagged(1)).unwrap();
    let Event::Received(message) = event(&mut b) else {
        panic!()
    };
    assert!(message.len() == 4000 && message.iter().all(|&b| b == 0xa5));
    assert_eq!(sent(&mut a).buffer.unwrap().as_ptr(), first);
}

// All that can be done wrong in safe code. Expect: refused by name, the buffer handed back, nothing used up.
#[test]
fn misuse_is_refused() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let options = PortOptions {
        send_tokens: 1,
        receive_tokens: 1,
        arena_bytes: 65536,
        ..PortOptions::at(10)
    };
    let mut port = node.open_port(options).unwrap();
    let other = open(&daemon, 11);

    let foreign = other.allocate(64).unwrap();
    let refused = port.send((NODE, 11), foreign, 64, tagged(0)).err().unwrap();
    assert_eq!(refused.error, SendError::ForeignBuffer);
    let refused = port
        .provide_receive_buffer(refused.buffer, Priority::Low)
        .err()
        .unwrap();
    assert_eq!(refused.error, SendError::ForeignBuffer);

    let buffer = port.allocate(64).unwrap();
    let refused = port.send((NODE, 11), buffer, 65, tagged(0)).err().unwrap();
    assert_eq!(
        refused.error,
        SendError::TooLong {
            len: 65,
            buffer: 64
        }
    );
    for address in [(0, 1), (u16::MAX, 1), (1, 256)] {
        let refused = port.send_bytes(address, b"", tagged(0)).err().unwrap();
        assert_eq!(refused, SendError::BadAddress);
    }
    let full = port.allocate(65537).unwrap_err();
    assert_eq!((full.wanted, full.largest), (65537, 65536 - 64));

    // The only token of each kind is out.
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    let handle = port.send_bytes((NODE, 11), b"1", tagged(0)).unwrap();
    let again = port.send((NODE, 11), refused.buffer, 1, tagged(0));
    let Err(again) = again else { panic!() };
    assert_eq!(again.error, SendError::NoToken);
    port.provide_receive_buffer(again.buffer, Priority::Low)
        .unwrap();
    let buffer = port.allocate(64).unwrap();
    let refused = port
        .provide_receive_buffer(buffer, Priority::Low)
        .err()
        .unwrap();
    assert_eq!(refused.error, SendError::NoToken);
    // Commands have a token of their own.
    assert!(port.cancel(handle).unwrap());
    let end = sent(&mut port);
    assert_eq!(end.status, Status::NotDelivered(Reason::Cancelled));
    assert!(!port.cancel(handle).unwrap());
}

// Sends fail for different reasons, one with more behind it. Expect: definite statuses; what is behind waits until the application drops
// or resumes.
#[test]
fn failed_sends_hold_their_stream() {
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    a.send_bytes((2, 0), b"x", tagged(0)).unwrap();
    assert_eq!(sent(&mut a).status, Status::NotDelivered(Reason::NoRoute));
    a.send_bytes((NODE, 99), b"x", tagged(0)).unwrap();
    assert_eq!(
        sent(&mut a).status,
        Status::NotDelivered(Reason::PortClosed)
    );

    let options = SendOptions {
        timeout: Some(Duration::from_millis(20)),
        ..tagged(1)
    };
    a.send_bytes((NODE, 11), b"1", options).unwrap();
    a.send_bytes((NODE, 11), b"2", tagged(2)).unwrap();
    let end = sent(&mut a);
    assert_eq!(
        (end.tag, end.status),
        (1, Status::NotDelivered(Reason::Deadline))
    );
    a.drop_sends((NODE, 11), Priority::Low).unwrap();
    let end = sent(&mut a);
    assert_eq!(
        (end.tag, end.status),
        (2, Status::NotDelivered(Reason::Dropped))
    );

    a.send_bytes((NODE, 11), b"3", options).unwrap();
    a.send_bytes((NODE, 11), b"4", tagged(4)).unwrap();
    assert_eq!(sent(&mut a).status, Status::NotDelivered(Reason::Deadline));
    provide(&mut b, 1, 64, Priority::Low);
    assert!(
        a.blocking_receive(Duration::from_millis(30))
            .unwrap()
            .is_none()
    );
    a.resume_sending((NODE, 11), Priority::Low).unwrap();
    let end = sent(&mut a);
    assert_eq!((end.tag, end.status), (4, Status::Delivered));
    assert_eq!(a.anomalies(), 0);
}

// Both sides sleep whenever they can, under each waiting strategy, for many round trips. Expect: no wake-up is missed.
#[test]
fn nobody_sleeps_through_a_doorbell() {
    let strategies = [
        Wait::Busy,
        Wait::Yield,
        Wait::default(),
        Wait::Adaptive {
            spin: Duration::ZERO,
        },
    ];
    for wait in strategies {
        let daemon = FakeDaemon::start();
        daemon.knobs.sleeps.store(true, Ordering::Relaxed);
        let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
        a.set_wait(wait);
        b.set_wait(wait);
        provide(&mut a, 4, 64, Priority::Low);
        provide(&mut b, 4, 64, Priority::Low);
        let echo = std::thread::spawn(move || {
            let mut served = 0;
            while served < 200 {
                if let Event::Received(message) = event(&mut b) {
                    let from = message.from();
                    b.send_bytes(from, &message, tagged(message.tag())).unwrap();
                    b.unknown(Event::Received(message));
                    served += 1;
                }
            }
            b.close(LONG).unwrap()
        });
        let start = Instant::now();
        for tag in 0..200u64 {
            a.send_bytes((NODE, 11), &tag.to_ne_bytes(), tagged(tag))
                .unwrap();
            let mut back = false;
            while !back || a.sends_outstanding() > 0 {
                match event(&mut a) {
                    Event::Received(message) => {
                        assert_eq!((message.tag(), &message[..]), (tag, &tag.to_ne_bytes()[..]));
                        a.unknown(Event::Received(message));
                        back = true;
                    }
                    other => a.unknown(other),
                }
            }
        }
        // The engine looks every 100 ms even when nobody rings, so missed doorbells show as time: 600 of them would take a minute.
        assert!(start.elapsed() < LONG, "{wait:?} {:?}", start.elapsed());
        let closed = echo.join().unwrap();
        assert_eq!((closed.failed, closed.unfinished), (0, 0));
        assert!(daemon.knobs.rung.load(Ordering::Relaxed) > 0);
    }
}

// A blocking send while messages and an alarm come. Expect: it returns its own end; the others are received afterwards, in order.
#[test]
fn blocking_send_keeps_other_events() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    provide(&mut port, 8, 256, Priority::Low);
    port.send_bytes((NODE, 10), b"1", tagged(1)).unwrap();
    let later = port.send_bytes((NODE, 10), b"2", tagged(2)).unwrap();
    let buffer = port.allocate(256).unwrap();
    let end = port
        .send_and_wait((NODE, 10), buffer, 100, tagged(3))
        .unwrap();
    assert_eq!((end.tag, end.status), (3, Status::Delivered));
    assert!(end.buffer.is_some());
    assert_eq!(port.wait_for(later, LONG).unwrap().unwrap().tag, 2);
    assert!(port.wait_for(later, LONG).unwrap().is_none());
    let mut received = Vec::new();
    let mut ends = Vec::new();
    while received.len() + ends.len() < 4 {
        match event(&mut port) {
            Event::Received(message) => received.push(message.tag()),
            Event::Sent(sent) => ends.push(sent.tag),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((received, ends), (vec![1, 2, 3], vec![1]));
}

// Alarms in the wrong order, one cancelled; a sleeper waits for one by its doorbell. Expect: due ones in order, not early.
#[test]
fn alarms_go_off() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    let start = Instant::now();
    let ms = Duration::from_millis;
    let late = port.set_alarm(ms(40)).unwrap();
    let never = port.set_alarm(ms(10)).unwrap();
    let early = port.set_alarm(ms(20)).unwrap();
    assert!(port.cancel_alarm(never) && !port.cancel_alarm(never));
    assert!(matches!(event(&mut port), Event::Alarm(id) if id == early));
    assert!(start.elapsed() >= ms(20));
    assert!(port.prepare_wait().unwrap());
    let mut fds = [PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    assert_eq!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1));
    assert!(matches!(port.receive(), Ok(Some(Event::Alarm(id))) if id == late));
    assert!(start.elapsed() >= ms(40));
    let alarms: Vec<_> = (0..portolan::MAX_ALARMS)
        .map(|_| port.set_alarm(LONG).unwrap())
        .collect();
    assert!(port.set_alarm(LONG).is_err());
    assert!(port.cancel_alarm(alarms[0]) && port.set_alarm(LONG).is_ok());
}

/// Whether a port's doorbell rings within so many seconds.
fn readable(port: &Port, seconds: i64) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut fds, Some(&timeout)).unwrap() == 1
}

// A doorbell rings for somebody who just found by himself what it was about. Expect: it ends one sleep, not the next.
#[test]
fn a_doorbell_ends_one_sleep() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    port.set_wait(Wait::Adaptive {
        spin: Duration::ZERO,
    });
    daemon.with_port(10, |port| port.ring_anyway());
    assert!(!port.wait(Duration::from_millis(20)).unwrap());
    assert!(port.prepare_wait().unwrap());
    assert!(!readable(&port, 0));
}

// epoll's way: prepare, sleep on the descriptor, receive. Expect: readable after a message, silent after it was received.
#[test]
fn event_fd_tells_of_messages() {
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    provide(&mut b, 2, 64, Priority::Low);
    assert!(b.prepare_wait().unwrap());
    assert!(!readable(&b, 0));
    a.send_bytes((NODE, 11), b"x", tagged(0)).unwrap();
    assert!(readable(&b, 10));
    assert!(matches!(b.receive(), Ok(Some(Event::Received(_)))));
    assert!(!readable(&b, 0));
    assert!(b.prepare_wait().unwrap());
    sent(&mut a);
    a.send_bytes((NODE, 11), b"x", tagged(0)).unwrap();
    sent(&mut a);
    assert!(!b.prepare_wait().unwrap());
}

// A handler answers messages. Expect: called once per message with a port it can use; other events come through.
#[test]
fn handlers_are_called() {
    let daemon = FakeDaemon::start();
    let (mut a, mut b) = (open(&daemon, 10), open(&daemon, 11));
    provide(&mut a, 4, 64, Priority::Low);
    provide(&mut b, 4, 64, Priority::Low);
    b.on_message(|port, message| {
        port.send_bytes(message.from(), &message, tagged(message.tag() + 100))
            .unwrap();
        port.unknown(Event::Received(message));
    });
    for tag in 0..4 {
        a.send_bytes((NODE, 11), b"x", tagged(tag)).unwrap();
    }
    let (mut answers, mut ends) = (Vec::new(), 0);
    let deadline = Instant::now() + LONG;
    while answers.len() < 4 || ends < 4 {
        assert!(Instant::now() < deadline);
        if let Some(Event::Sent(sent)) = b.dispatch().unwrap() {
            assert_eq!(sent.status, Status::Delivered);
            ends += 1;
        }
        if let Some(Event::Received(message)) = a.receive().unwrap() {
            answers.push(message.tag());
        }
    }
    assert_eq!(answers, [100, 101, 102, 103]);
    assert_eq!(b.buffers_provided(), 4);
}

// An echo server among askers: one stops reading. Expect: the other is served on, every byte unchanged, no buffer is lost.
#[test]
fn echo_server_outlives_askers() {
    let daemon = FakeDaemon::start();
    let node = Node::attach(&daemon.path).unwrap();
    let mut server_port = node.open_port(EchoServer::port_options(0)).unwrap();
    let mut server = EchoServer::new(Answers::Service, Duration::from_millis(50));
    EchoServer::provide_buffers(&mut server_port).unwrap();
    let provided = server_port.buffers_provided();
    let serving = std::thread::spawn(move || {
        server.serve(&mut server_port, SECOND).unwrap();
        (server.counts(), server_port.buffers_provided())
    });
    // This one never offers a buffer.
    let mut deaf = open(&daemon, 10);
    let mut asker = open(&daemon, 11);
    provide(&mut asker, 2, 65536, Priority::Low);
    let tag = |kind, id| tagged(Tag { kind, id }.encode());
    for id in 0..8 {
        deaf.send_bytes((NODE, 0), b"x", tag(Kind::Ping, id))
            .unwrap();
    }
    for id in 0..50u64 {
        let len = if id % 2 == 0 { 10 } else { 60_000 };
        let bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + id) as u8).collect();
        let options = tag(Kind::Allsize, id);
        asker.send_bytes((NODE, 0), &bytes, options).unwrap();
        loop {
            match event(&mut asker) {
                Event::Received(message) => {
                    let reply = Tag {
                        kind: Kind::AllsizeReply,
                        id,
                    };
                    assert_eq!(Tag::decode(message.tag()), Some(reply));
                    assert_eq!(&message[..], &bytes[..]);
                    asker.unknown(Event::Received(message));
                    break;
                }
                Event::Sent(sent) => assert_eq!(sent.status, Status::Delivered),
                other => panic!("{other:?}"),
            }
        }
    }
    // A message nobody asked an answer to.
    asker.send_bytes((NODE, 0), b"x", tagged(0)).unwrap();
    let (counts, provided_after) = serving.join().unwrap();
    assert_eq!(provided_after, provided);
    assert_eq!((counts.answered, counts.ignored, counts.failed), (50, 1, 8));
}

// The engine says things that do not fit: unknown slots, stale generations, more bytes than the buffer has, no event at all, an index that
// jumps. Expect: ignored and counted; the real completion still counts.
#[test]
fn nonsense_is_ignored() {
    use portolan_abi::event::{Event as Entry, EventKind, Offered};
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    provide(&mut port, 1, 64, Priority::Low);
    port.send_bytes((NODE, 10), b"x", tagged(1)).unwrap();
    let entry = |kind, slot, generation, len, priority| Entry {
        kind,
        priority,
        slot,
        generation,
        len,
        total: len,
        node: 1,
        port: 1,
        record: 0,
        epoch: 0,
        number: 0,
        tag: 0,
    };
    let done = EventKind::Sent(crate::support::DELIVERED);
    let offered = EventKind::Offered(Offered {
        incarnation: 1,
        first: [0; 16],
    });
    let nonsense = [
        entry(done, 1 << 30, 1, 0, 0),
        entry(done, 0, 2, 0, 0),
        entry(done, 1, 0, 0, 0),
        entry(EventKind::Received, 0, 1, 65, 0),
        entry(EventKind::Received, 0, 1, 64, 2),
        entry(EventKind::Received, 0, 2, 64, 0),
        entry(EventKind::Received, 9999, 1, 64, 0),
        Entry {
            total: 63,
            ..entry(EventKind::Received, 0, 1, 64, 0)
        },
        entry(offered, 0, 0, 0, 2),
        Entry {
            node: 0,
            ..entry(offered, 0, 0, 0, 0)
        },
    ];
    daemon.with_port(10, |p| {
        for entry in &nonsense {
            p.push(entry);
        }
        p.push_words(&[u64::MAX; 8]);
    });
    assert!(port.receive().unwrap().is_none());
    assert_eq!(port.anomalies(), 11);
    daemon.with_port(10, |p| {
        let producer = &p.engine.header().event_producer;
        let before = producer.swap(u32::MAX, Ordering::Release);
        assert_eq!(before, 11);
    });
    assert!(port.receive().unwrap().is_none());
    assert_eq!(port.anomalies(), 12);
    daemon.with_port(10, |p| {
        p.engine
            .header()
            .event_producer
            .store(11, Ordering::Release);
        assert_eq!(
            p.engine.header().state.load(Ordering::Relaxed) as u32,
            state::OPEN
        );
    });
    daemon.knobs.frozen.store(false, Ordering::Relaxed);
    assert!(matches!(event(&mut port), Event::Received(m) if &m[..] == b"x"));
    assert_eq!(sent(&mut port).tag, 1);
}
