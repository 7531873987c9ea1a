//! How a port ends: closed with linger, dropped, closed by the daemon, orphaned, forked.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::{FakeDaemon, LONG, NODE, SECOND, open};
use portolan::{
    CloseReason, Event, Node, Port, PortError, PortOptions, Priority, Reason, SendError,
    SendOptions, Status, Wait,
};
use portolan_abi::port::state;

fn send(port: &mut Port, to: u16) -> Result<portolan::SendHandle, SendError> {
    port.send_bytes((NODE, to), &[7; 100], SendOptions::default())
}

// Sends are under way when the port closes. Expect: with linger they end first; without, they are counted as unfinished.
#[test]
fn close_lingers() {
    let daemon = FakeDaemon::start();
    let mut a = open(&daemon, 10);
    let mut b = open(&daemon, 11);
    send(&mut a, 11).unwrap();
    send(&mut a, 99).unwrap();
    let offer = std::thread::spawn(move || {
        let buffer = b.allocate(100).unwrap();
        b.provide_receive_buffer(buffer, Priority::Low).unwrap();
        assert!(b.blocking_receive(LONG).unwrap().is_some());
        b
    });
    let closed = a.close(LONG).unwrap();
    assert_eq!(
        (closed.delivered, closed.failed, closed.unfinished),
        (1, 1, 0)
    );
    let _b = offer.join().unwrap();

    let mut a = open(&daemon, 10);
    send(&mut a, 11).unwrap();
    let closed = a.close(Duration::ZERO).unwrap();
    assert_eq!(
        (closed.delivered, closed.failed, closed.unfinished),
        (0, 0, 1)
    );
}

// A port is dropped with its number in use. Expect: free again soon; a buffer that outlives it stays readable.
#[test]
fn drop_closes() {
    let daemon = FakeDaemon::start();
    let port = open(&daemon, 10);
    let mut buffer = port.allocate(64).unwrap();
    drop(port);
    buffer.fill(1);
    assert_eq!(&buffer[..], &[1; 64]);
    let node = Node::attach(&daemon.path).unwrap();
    let deadline = Instant::now() + LONG;
    while node.open_port(PortOptions::at(10)).is_err() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}

// The engine closes the port for a reason, with an event in the ring and sends under way, while the application sleeps. Expect: the event,
// then each send as perhaps delivered with its buffer, then the reason, again and again; operations refuse with it.
#[test]
fn closed_by_the_engine() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    let buffer = port.allocate(64).unwrap();
    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
    port.send_bytes((NODE, 10), b"x", SendOptions::default())
        .unwrap();
    while daemon.with_port(10, |p| {
        p.engine.header().event_producer.load(Ordering::Relaxed)
    }) < 2
    {
        std::thread::yield_now();
    }
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    let mut buffer = port.allocate(64).unwrap();
    buffer.fill(3);
    let first = buffer.as_ptr();
    port.send((NODE, 10), buffer, 64, SendOptions::default())
        .unwrap();
    send(&mut port, 10).unwrap();
    let spare = port.allocate(64).unwrap();
    daemon.with_port(10, |p| {
        p.set_state(state::CLOSED, Some(CloseReason::BadToken));
    });
    assert!(matches!(
        port.blocking_receive(LONG),
        Ok(Some(Event::Received(_)))
    ));
    assert!(matches!(port.receive(), Ok(Some(Event::Sent(s))) if s.status.is_delivered()));
    let mut returned = Vec::new();
    for _ in 0..2 {
        let Ok(Some(Event::Sent(sent))) = port.receive() else {
            panic!()
        };
        assert_eq!(sent.status, Status::MaybeDelivered(Reason::OwnPortClosed));
        returned.extend(sent.buffer);
    }
    assert!(returned.len() == 1 && returned[0].as_ptr() == first);
    let closed = PortError::Closed(CloseReason::BadToken);
    for _ in 0..2 {
        assert_eq!(port.receive().err(), Some(closed));
        assert_eq!(port.blocking_receive(LONG).err(), Some(closed));
    }
    assert!(closed.to_string().contains("token"));
    assert_eq!(send(&mut port, 10), Err(SendError::Port(closed)));
    let refused = port.provide_receive_buffer(spare, Priority::Low);
    assert_eq!(
        refused.err().map(|r| r.error),
        Some(SendError::Port(closed))
    );
    port.close(LONG).unwrap();
}

// The daemon dies under a waiting application, under each strategy. Expect: sends end as perhaps delivered, then an error.
#[test]
fn daemon_gone() {
    let strategies = [
        Wait::Busy,
        Wait::Yield,
        Wait::Adaptive {
            spin: Duration::ZERO,
        },
    ];
    for wait in strategies {
        let daemon = FakeDaemon::start();
        let mut port = open(&daemon, 10);
        port.set_wait(wait);
        daemon.knobs.frozen.store(true, Ordering::Relaxed);
        let buffer = port.allocate(64).unwrap();
        port.send((NODE, 10), buffer, 64, SendOptions::default())
            .unwrap();
        // Taken by the engine, which must not be inside its loop any more when the port is torn down.
        let waiter = std::thread::spawn(move || {
            let first = port.blocking_receive(LONG);
            let second = port.blocking_receive(LONG);
            (first, second, port)
        });
        daemon.ports.lock().unwrap().clear();
        daemon.die();
        let start = Instant::now();
        let (first, second, _port) = waiter.join().unwrap();
        let Ok(Some(Event::Sent(sent))) = first else {
            panic!("{wait:?} {first:?}")
        };
        assert_eq!(sent.status, Status::MaybeDelivered(Reason::DaemonGone));
        assert!(sent.buffer.is_none());
        assert_eq!(second.err(), Some(PortError::DaemonGone));
        assert!(start.elapsed() < SECOND * 5);
    }
}

// The application forks. Expect: in the child every operation says so and dropping is harmless; the parent goes on.
#[test]
fn fork_is_refused_in_the_child() {
    let daemon = FakeDaemon::start();
    let mut port = open(&daemon, 10);
    let buffer = port.allocate(64).unwrap();
    // SAFETY: the child takes no lock another thread may have held (the C library resets its own), then leaves at once.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let forked = Some(PortError::Forked);
        let ok = port.receive().err() == forked
            && port.blocking_receive(LONG).err() == forked
            && port.prepare_wait().err() == forked
            && send(&mut port, 10) == Err(SendError::Port(PortError::Forked))
            && port.allocate(64).is_err();
        drop(buffer);
        drop(port);
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(if ok { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
    port.send_bytes((NODE, 10), b"x", SendOptions::default())
        .unwrap();
    assert!(port.blocking_receive(LONG).unwrap().is_some());
}

// Who may go where. Expect: a port moves between threads; buffers and nodes are shared.
#[test]
fn threads() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<Port>();
    is_send::<portolan::Buffer>();
    is_sync::<portolan::Buffer>();
    is_sync::<Node>();
}
