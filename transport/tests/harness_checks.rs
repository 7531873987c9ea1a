//! The harness's own checkers can fail: each promise, broken on purpose.

#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use portolan_sim::harness::book::{Book, Message, SharedBook, fill};
use portolan_sim::harness::host::{EngineDeath, TestHost};
use portolan_sim::harness::*;
use portolan_transport::Host;
use portolan_transport::host::{Delivery, Reason, SendStatus};
use portolan_transport::ident::{PortId, Priority, StreamKey};

const ROUTE: Route = Route {
    from: (portolan_transport::ident::NodeId(1), PortId(1)),
    to: (portolan_transport::ident::NodeId(2), PortId(2)),
    priority: Priority::Low,
};

fn bytes(id: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(id, 0, &mut bytes);
    bytes
}

/// A book with messages 0 to 3, of 10 bytes; 1 is committed.
fn book() -> Book {
    let mut book = Book::default();
    for _ in 0..4 {
        book.sent(ROUTE, 10);
    }
    book.committed(ROUTE, 1, &bytes(1, 10));
    book
}

fn refused(what: &str, broken: impl FnOnce(&mut Book)) {
    let mut book = book();
    assert!(
        catch_unwind(AssertUnwindSafe(|| broken(&mut book))).is_err(),
        "{what} went unnoticed"
    );
}

#[test]
fn broken_promises_are_noticed() {
    let not = SendStatus::NotDelivered(Reason::Deadline);
    refused("a doubled message", |b| {
        b.committed(ROUTE, 1, &bytes(1, 10))
    });
    refused("an overtaken message", |b| {
        b.committed(ROUTE, 0, &bytes(0, 10))
    });
    refused("a changed byte", |b| b.committed(ROUTE, 2, &bytes(3, 10)));
    refused("a shortened message", |b| {
        b.committed(ROUTE, 2, &bytes(2, 9))
    });
    refused("an invented message", |b| {
        b.committed(ROUTE, 9, &bytes(9, 10))
    });
    refused("a message astray", |b| {
        b.committed(
            Route {
                priority: Priority::High,
                ..ROUTE
            },
            2,
            &bytes(2, 10),
        )
    });
    refused("a false Delivered", |b| {
        b.completed(2, SendStatus::Delivered)
    });
    refused("a false NotDelivered", |b| b.completed(1, not));
    refused("two statuses", |b| {
        (0..2).for_each(|_| b.completed(1, SendStatus::Delivered))
    });
    refused("a delivery after NotDelivered", |b| {
        b.completed(2, not);
        b.committed(ROUTE, 2, &bytes(2, 10));
    });
    let mut good = book();
    good.completed(1, SendStatus::Delivered);
    good.completed(2, not);
    good.completed(3, SendStatus::MaybeDelivered(Reason::Unreachable));
    assert_eq!(good.waiting(), [0]);
    good.abandon(node(1));
    assert!(good.is_settled());
    assert!(matches!(
        good.message(0),
        Message {
            abandoned: true,
            ..
        }
    ));
}

/// A host of node 2 with one token claimed for message 0, and the delivery that commits it.
fn claimed() -> (TestHost, Delivery, SharedBook) {
    let book = Book::shared();
    book.borrow_mut().sent(ROUTE, 10);
    let mut host = TestHost::new(node(2), book.clone(), 5);
    host.open_port(PortId(2), 100);
    host.provide(PortId(2), Priority::Low, 100);
    let stream = StreamKey {
        local: PortId(2),
        node: node(1),
        remote: PortId(1),
        priority: Priority::Low,
    };
    let record = host.open_receive_record(stream, 7, 3, u32::MAX).unwrap();
    let buffer = host.claim(PortId(2), Priority::Low, 10).unwrap();
    host.write_payload(buffer, 0, &bytes(0, 10)).unwrap();
    let delivery = Delivery {
        base: 0,
        bits: 0,
        total: 10,
        buffer,
        stream,
        record,
        epoch: 3,
        number: u32::MAX,
        len: 10,
        tag: 0,
    };
    (host, delivery, book)
}

// An engine dies at each store of a commit. Expect: either nothing happened and the token is free, or all of it did.
#[test]
fn a_commit_is_whole() {
    for step in 1..=4 {
        let (mut host, delivery, book) = claimed();
        host.die_after = Some(step);
        let death = catch_unwind(AssertUnwindSafe(|| host.commit(&delivery))).unwrap_err();
        assert!(death.is::<EngineDeath>());
        host.engine_died();
        assert!(host.holds_nothing());
        let committed = book.borrow().delivered() == 1;
        assert_eq!(committed, step > 1);
        let base = host.durable().receiving[0].base;
        assert_eq!(base, if committed { 0 } else { u32::MAX });
        assert_eq!(host.tokens(PortId(2)), usize::from(!committed));
    }
}

#[test]
fn a_broken_contract_is_noticed() {
    let broken = |what: &str, act: &dyn Fn(&mut TestHost, Delivery) -> bool| {
        let (mut host, delivery, _) = claimed();
        let done = catch_unwind(AssertUnwindSafe(|| act(&mut host, delivery)));
        assert!(done.is_err(), "{what} went unnoticed");
    };
    broken("a write beyond the message", &|h, d| {
        h.write_payload(d.buffer, 5, &[0; 6]).is_ok()
    });
    broken("a commit out of order", &|h, d| {
        h.commit(&Delivery { number: 0, ..d }).is_ok()
    });
    broken("a commit twice", &|h, d| {
        h.commit(&d).is_ok() && h.commit(&d).is_ok()
    });
    broken("a release twice", &|h, d| {
        (0..2).for_each(|_| h.release(d.buffer));
        true
    });
    broken("a base that goes back", &|h, d| {
        h.commit_base(d.record, 3, u32::MAX - 1, 0);
        true
    });
    let (host, _, _) = claimed();
    assert!(!host.holds_nothing(), "a token kept went unnoticed");
}
