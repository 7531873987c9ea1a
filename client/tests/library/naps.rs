//! How an application sleeps: on the word that tells the engine of it, a moment at a time, or on its doorbell; and when at once.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::pthread::pthread_kill;
use nix::sys::signal::Signal;

use crate::support::{FakeDaemon, FakePort, LONG, NODE, open, provide, received, tagged};
use portolan::{Event, Port, PortError, Priority, Wait};

/// Longer than two naps.
const NAPS: Duration = Duration::from_millis(250);
/// What [`portolan_abi::doorbell`] writes.
const AT_BELL: u32 = 1;
const NAPPING: u32 = 2;

/// A port whose engine does nothing by itself, with a buffer provided.
fn quiet(daemon: &FakeDaemon, spin: Duration) -> Port {
    let mut port = open(daemon, 10);
    port.set_wait(Wait::Adaptive { spin });
    daemon.knobs.frozen.store(true, Ordering::Relaxed);
    provide(&mut port, 1, 4096, Priority::Low);
    port
}

fn waiting(engine: &FakePort) -> u32 {
    engine.client.header().waiting.load(Ordering::Relaxed)
}

/// Does this as soon as the application's word satisfies that, before the word can mean anything else to this engine.
fn once<T>(
    daemon: &FakeDaemon,
    wanted: impl Fn(u32) -> bool,
    mut action: impl FnMut(&mut FakePort) -> T,
) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        let done = daemon.with_port(10, |engine| wanted(waiting(engine)).then(|| action(engine)));
        if let Some(done) = done {
            return done;
        }
        assert!(Instant::now() < deadline, "it never sleeps so");
        std::thread::yield_now();
    }
}

fn message(engine: &mut FakePort) {
    let (_, slot) = engine.offered_buffer(4096);
    engine.push(&received(slot, 1));
}

/// Waits for a message with this port, on a thread.
fn receives(mut port: Port) -> std::thread::JoinHandle<Port> {
    std::thread::spawn(move || {
        let event = port.blocking_receive(LONG).unwrap();
        assert!(matches!(event, Some(Event::Received(_))), "{event:?}");
        port
    })
}

// Somebody sleeps, and the engine has a message: at once; after more than two naps; after a signal, which ends a nap as whatever forbids them would. Expect: he naps, and naps
// on; after the signal he sleeps on his doorbell; whatever he does is woken.
#[test]
fn who_naps_is_woken_and_so_is_who_may_not() {
    // A handler, so that the signal is no end.
    let caught = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGUSR1, caught).unwrap();
    let daemon = FakeDaemon::start();
    let mut port = quiet(&daemon, Duration::ZERO);
    daemon.with_port(10, |engine| engine.wake_nappers(None));
    for (lasting, signalled) in [
        (Duration::ZERO, false),
        (NAPS, false),
        (Duration::ZERO, true),
    ] {
        let waiter = receives(port);
        once(&daemon, |word| word == NAPPING, |_| ());
        let since = Instant::now();
        while since.elapsed() < lasting {
            let word = daemon.with_port(10, |engine| waiting(engine));
            assert_ne!(word, AT_BELL, "after {:?}", since.elapsed());
            std::thread::yield_now();
        }
        let deadline = Instant::now() + LONG;
        while signalled && daemon.with_port(10, |engine| waiting(engine)) != AT_BELL {
            pthread_kill(waiter.as_pthread_t(), Signal::SIGUSR1).unwrap();
            assert!(Instant::now() < deadline, "it naps on");
            std::thread::yield_now();
        }
        let how = if signalled { AT_BELL } else { NAPPING };
        once(&daemon, |word| word == how, message);
        port = waiter.join().unwrap();
        provide(&mut port, 1, 4096, Priority::Low);
    }
}

// The daemon is gone without a word, and an application that has naps only, since each of its waits is short. Expect: it learns of it.
#[test]
fn who_only_naps_learns_that_the_daemon_is_gone() {
    let daemon = FakeDaemon::start();
    let mut port = quiet(&daemon, Duration::ZERO);
    daemon.with_port(10, |engine| engine.wake_nappers(None));
    drop(daemon);
    let deadline = Instant::now() + LONG;
    let error = loop {
        match port.blocking_receive(Duration::from_millis(2)) {
            Ok(None) => assert!(Instant::now() < deadline, "it never learns"),
            Ok(Some(event)) => panic!("{event:?}"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, PortError::DaemonGone), "{error:?}");
}

// Engines that do not wake those that nap: one that never did, and one that took over from one that did. Expect: nobody naps.
#[test]
fn for_an_older_engine_nobody_naps() {
    let daemon = FakeDaemon::start();
    let mut port = quiet(&daemon, Duration::ZERO);
    for takes_over in [false, true] {
        if takes_over {
            daemon.with_port(10, |engine| {
                engine.wake_nappers(None);
                let held: Vec<u32> = engine.offers().iter().map(|(slot, _)| *slot).collect();
                engine.take_over(&[], &held);
            });
            assert!(port.receive().unwrap().is_none());
        }
        let waiter = receives(port);
        let first = once(&daemon, |word| word != 0, |engine| waiting(engine));
        assert_eq!(first, AT_BELL, "{takes_over}");
        once(&daemon, |word| word == AT_BELL, message);
        port = waiter.join().unwrap();
        provide(&mut port, 1, 4096, Priority::Low);
    }
}

/// Binds the calling thread to the first core it may use, and says which.
fn bind() -> u32 {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let core = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| allowed.is_set(*core));
    let core = core.unwrap();
    let mut one = rustix::thread::CpuSet::new();
    one.set(core);
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    u32::try_from(core).unwrap()
}

/// How often this thread has slept.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = (status.lines()).find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

// An application that would look for ten seconds before it sleeps, or never sleeps, and whose engine takes nothing: on that engine's core; on another; with an engine that is
// bound to none. Expect: on its core it sleeps at once, so that the engine could take something; elsewhere it does not.
#[test]
fn on_the_engines_core_nobody_waits_in_its_way() {
    let daemon = FakeDaemon::start();
    let mut port = quiet(&daemon, LONG);
    let here = bind();
    for (core, sleeps_at_once) in [(Some(here + 1), false), (None, false), (Some(here), true)] {
        daemon.with_port(10, |engine| engine.wake_nappers(core));
        for (wait, may_sleep) in [
            (Wait::Adaptive { spin: LONG }, true),
            (Wait::Yield, true),
            (Wait::Busy, false),
        ] {
            port.set_wait(wait);
            port.send_bytes((NODE, 11), &[7], tagged(0)).unwrap();
            let expected = sleeps_at_once && may_sleep;
            let lasting = Duration::from_millis(if expected { 100 } else { 5 });
            // Whatever else makes a thread sleep does not do so every time.
            let slept = (0..if expected { 1 } else { 3 }).map(|_| {
                let before = sleeps();
                assert!(!port.wait(lasting).unwrap());
                sleeps() - before
            });
            let slept = slept.min().unwrap();
            assert_eq!(slept > 0, expected, "{core:?}, {wait:?}: {slept}");
        }
    }
}
