//! Applications that wait while their engine dies: they sleep on, wake when they should, and hear of the fault only if they asked to.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::harness::proc::cpu_latency_bound as bound;
use crate::harness::{Cluster, STEP, until};
use portolan::{Event, Port, PortOptions, Priority, SendOptions, Wait};
use portolan_testbed::Lab;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// How long somebody waits across a takeover.
const WAIT: Duration = Duration::from_millis(600);

fn asleep(port: u16) -> PortOptions {
    PortOptions {
        wait: Wait::Adaptive {
            spin: Duration::ZERO,
        },
        ..PortOptions::at(port)
    }
}

/// An engine is left alone for so long: those that die young, one after the other, count against the node.
const LIFE: Duration = Duration::from_millis(250);

/// Kills engines and sees that others take over, by a port of its own.
struct Killer {
    cluster: Cluster,
    watch: Port,
    last: Cell<Instant>,
}

impl Killer {
    fn start() -> Self {
        let cluster = Cluster::start(Lab::builder());
        Self {
            watch: cluster.open(2, PortOptions::at(200)),
            cluster,
            last: Cell::new(Instant::now()),
        }
    }

    fn kill(&self) {
        let pids = self.cluster.daemon(2).engine_pids().unwrap();
        kill_process(Pid::from_raw(pids[0]).unwrap(), Signal::KILL).unwrap();
    }

    /// Kills, and waits until there is another.
    fn replace(&self) {
        until("the engine has lived", STEP, || {
            (self.last.get().elapsed() >= LIFE).then_some(())
        });
        let before = self.watch.faults_recovered();
        self.kill();
        until("another engine takes over", STEP, || {
            (self.watch.faults_recovered() > before).then_some(())
        });
        self.last.set(Instant::now());
    }
}

/// A thread that does something with a port, and tells who it is first.
struct Waiter<T> {
    thread: JoinHandle<(Port, T)>,
    id: Receiver<i32>,
}

impl<T: Send + 'static> Waiter<T> {
    fn start(mut port: Port, job: impl FnOnce(&mut Port) -> T + Send + 'static) -> Self {
        let (tell, id): (Sender<i32>, _) = channel();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            let done = job(&mut port);
            (port, done)
        });
        Self { thread, id }
    }

    /// Returns once the thread sleeps in the kernel.
    fn sleeps(&self) {
        let id = self.id.recv_timeout(STEP).unwrap();
        until("the waiter sleeps", STEP, || {
            let stat = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")).ok()?;
            let call = std::fs::read_to_string(format!("/proc/self/task/{id}/syscall")).ok()?;
            let (_, state) = stat.rsplit_once(") ")?;
            // On its doorbell or on its word, and in nothing else.
            let waits = [libc::SYS_poll, libc::SYS_ppoll, libc::SYS_futex];
            let number = call.split(' ').next()?.parse().ok()?;
            (state.starts_with('S') && waits.contains(&number)).then_some(())
        });
    }

    fn done(self) -> (Port, T) {
        until("the waiter is done", STEP, || {
            self.thread.is_finished().then_some(())
        });
        self.thread.join().unwrap()
    }
}

fn provide(port: &mut Port) {
    let buffer = port.allocate(100).unwrap();
    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
}

// Somebody sleeps for a while and an engine dies meanwhile. Expect: sleeps its time, hears nothing. Somebody sleeps for long, an engine
// dies, a message comes through the next. Expect: wakes with it.
#[test]
fn who_sleeps_sleeps_on_and_wakes() {
    let killer = Killer::start();
    let mut port = killer.cluster.open(2, asleep(5));
    provide(&mut port);
    let waiter = Waiter::start(port, |port| {
        let start = Instant::now();
        let event = port.blocking_receive(WAIT).unwrap();
        assert!(event.is_none(), "{event:?}");
        start.elapsed()
    });
    waiter.sleeps();
    killer.replace();
    let (port, slept) = waiter.done();
    assert!(slept >= WAIT, "{slept:?}");
    assert_eq!(port.faults_recovered(), 1);

    let waiter = Waiter::start(port, |port| port.blocking_receive(Duration::MAX).unwrap());
    waiter.sleeps();
    killer.replace();
    let mut sender = killer.cluster.open(1, PortOptions::at(5));
    sender
        .send_bytes((2, 5), b"good morning", SendOptions::default())
        .unwrap();
    let (port, event) = waiter.done();
    let Some(Event::Received(message)) = event else {
        panic!("{event:?}");
    };
    assert_eq!(&message[..], b"good morning");
    assert_eq!((port.faults_recovered(), port.anomalies()), (2, 0));
}

// A send whose end is waited for when the receiver's engine, and then its own, dies. Expect: it ends, delivered.
#[test]
fn who_waits_for_a_send_gets_its_end() {
    let killer = Killer::start();
    let mut to = killer.cluster.open(1, PortOptions::at(5));
    let from = killer.cluster.open(2, asleep(5));
    let waiter = Waiter::start(from, |port| {
        let options = SendOptions {
            timeout: Some(STEP),
            ..SendOptions::default()
        };
        let mut buffer = port.allocate(5).unwrap();
        buffer.copy_from_slice(b"12345");
        // Nobody takes it yet.
        port.send_and_wait((1, 5), buffer, 5, options).unwrap()
    });
    waiter.sleeps();
    killer.replace();
    let pid = killer.cluster.daemon(1).engine_pids().unwrap()[0];
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    until("the receiver's engine is replaced", STEP, || {
        (to.faults_recovered() > 0).then_some(())
    });
    provide(&mut to);
    let (_, sent) = waiter.done();
    assert!(sent.status.is_delivered(), "{:?}", sent.status);
    let Some(Event::Received(message)) = to.blocking_receive(STEP).unwrap() else {
        panic!()
    };
    assert_eq!(&message[..], b"12345");
}

// Alarms are set, some due before an engine is back, some after. Expect: each goes off once, not early, whether the application sleeps in
// a call of ours or on the doorbell.
#[test]
fn alarms_go_off_once() {
    let killer = Killer::start();
    let mut port = killer.cluster.open(2, asleep(5));
    for by_doorbell in [false, true] {
        killer.replace();
        // The engine dies at once, and has to live before it dies again: all are set across one death.
        until("it has lived", STEP, || {
            (killer.last.get().elapsed() >= LIFE).then_some(())
        });
        let start = Instant::now();
        let after = [0, 1, 2, 5, 10, 20, 50, 400].map(Duration::from_millis);
        let alarms = after.map(|after| port.set_alarm(after).unwrap());
        let waiter = Waiter::start(port, move |port| {
            after.map(|_| {
                let event = if by_doorbell {
                    on_doorbell(port)
                } else {
                    port.blocking_receive(STEP).unwrap()
                };
                (event, start.elapsed())
            })
        });
        killer.replace();
        let (back, events) = waiter.done();
        port = back;
        for ((event, at), (alarm, after)) in events.iter().zip(alarms.iter().zip(after)) {
            assert!(
                matches!(event, Some(Event::Alarm(id)) if id == alarm),
                "{event:?}"
            );
            assert!(*at >= after, "{at:?} is before {after:?}");
        }
        // Not again, after another takeover.
        killer.replace();
        assert!(port.receive().unwrap().is_none());
    }
}

/// As an application with an epoll loop waits.
fn on_doorbell(port: &mut Port) -> Option<Event> {
    loop {
        if let Some(event) = port.receive().unwrap() {
            return Some(event);
        }
        if port.prepare_wait().unwrap() {
            let mut fds = [PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
            let limit = Timespec {
                tv_sec: STEP.as_secs() as i64,
                tv_nsec: 0,
            };
            let rung = rustix::event::poll(&mut fds, Some(&limit)).unwrap();
            assert_eq!(rung, 1, "the doorbell did not ring");
        }
    }
}

// Somebody wants to know of faults and sleeps. Expect: wakes and is told once per look, with the count; another who does not want to know is not.
#[test]
fn who_asks_is_told_of_faults() {
    let killer = Killer::start();
    let curious = PortOptions {
        report_faults: true,
        ..asleep(5)
    };
    let mut port = killer.cluster.open(2, curious);
    let mut other = killer.cluster.open(2, asleep(6));
    for by_doorbell in [false, true] {
        let before = port.faults_recovered();
        let waiter = Waiter::start(port, move |port| {
            if by_doorbell {
                on_doorbell(port)
            } else {
                port.blocking_receive(STEP).unwrap()
            }
        });
        waiter.sleeps();
        killer.replace();
        let (back, event) = waiter.done();
        port = back;
        let Some(Event::FaultRecovered(count)) = event else {
            panic!("{event:?}");
        };
        assert_eq!(count, before + 1);
        port.unknown(Event::FaultRecovered(count));
        assert!(port.receive().unwrap().is_none());
    }
    // Two while nobody looks: one event, and the count says it.
    killer.replace();
    killer.replace();
    let event = port.blocking_receive(STEP).unwrap();
    assert!(matches!(event, Some(Event::FaultRecovered(4))), "{event:?}");
    assert!(port.receive().unwrap().is_none());
    assert!(other.receive().unwrap().is_none());
    assert_eq!(other.faults_recovered(), 4);
}

/// Waits for a message, whatever else comes first, and gives its buffer back.
fn message(port: &mut Port) {
    loop {
        let event = port.blocking_receive(STEP).unwrap().expect("a message");
        let came = matches!(event, Event::Received(_));
        port.unknown(event);
        if came {
            return;
        }
    }
}

/// Binds the calling thread to where another process may run.
fn beside(pid: i32) {
    let cores = rustix::thread::sched_getaffinity(Pid::from_raw(pid)).unwrap();
    rustix::thread::sched_setaffinity(None, &cores).unwrap();
}

// An exchange between two that sleep at once, each on its engine's core, so that each acknowledgement comes with the answer. Expect: an application is woken once for a
// message, not once more for the end of its own; in some round at least, since answers that are slow are acknowledged by themselves.
#[test]
fn who_sleeps_is_woken_once_for_a_message() {
    const ROUND: u64 = 500;
    let cores = |node: u16| format!("[engine]\ncores = [{}]\nwait = \"yield\"\n", node - 1);
    let cluster = Cluster::start_in(Lab::builder().build().unwrap(), cores);
    let woken = || {
        let counters = cluster.lab.node(1).report("counters").unwrap();
        let count = &counters["engines"][0]["counters"]["doorbells"];
        count.as_u64().expect("a counter")
    };
    let engine = |node: u16| cluster.daemon(node).engine_pids().unwrap()[0];
    let mut ping = cluster.open(1, asleep(5));
    let mut pong = cluster.open(2, asleep(5));
    provide(&mut ping);
    provide(&mut pong);
    let (go, rounds) = channel();
    std::thread::scope(|scope| {
        let beside_pong = engine(2);
        scope.spawn(move || {
            beside(beside_pong);
            for () in rounds {
                for _ in 0..ROUND {
                    message(&mut pong);
                    pong.send_bytes((1, 5), b"pong", SendOptions::default())
                        .unwrap();
                }
            }
        });
        beside(engine(1));
        until("a round with few wakings", 6 * STEP, || {
            go.send(()).unwrap();
            let before = woken();
            for _ in 0..ROUND {
                ping.send_bytes((2, 5), b"ping", SendOptions::default())
                    .unwrap();
                message(&mut ping);
            }
            let often = woken() - before;
            eprintln!("woken {often} times for {ROUND} messages");
            (ROUND / 2..=ROUND * 5 / 4).contains(&often).then_some(())
        });
        drop(go);
    });
}

// A daemon that bounds how long idle processors take to wake: as it starts, by reloads, killed. Expect: the kernel has the bound, the report says so, and it ends with the
// daemon; where the kernel has no such thing the daemon runs and says that it has none.
#[test]
fn processors_wake_within_what_is_configured() {
    let lab = Lab::builder().build().unwrap();
    let config = |us: u32| format!("[node]\ncpu_latency_us = {us}");
    let before = bound();
    let daemon = lab.node(1).start_daemon(&config(70)).unwrap();
    let pid = Pid::from_raw(daemon.pid()).unwrap();
    let holds = |us: Option<u32>| {
        let said = us.filter(|_| before.is_some());
        let reported = |status: &Value| status["node"]["cpu_latency_us"] == json!(said);
        daemon
            .wait_status("the bound is reported", STEP, reported)
            .unwrap();
        // Somebody else may hold a lower one.
        let wanted = us.map(|us| i32::try_from(us).unwrap());
        let expected = before.map(|before| before.min(wanted.unwrap_or(i32::MAX)));
        assert_eq!(bound(), expected, "{us:?}");
    };
    holds(Some(70));
    if before.is_none() {
        assert!(
            daemon.log().contains("cpu_latency_us is without effect"),
            "{}",
            daemon.log()
        );
    }
    for us in [Some(60), None, Some(50)] {
        let text = us.map(&config).unwrap_or_default();
        lab.node(1).write_config(&text).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        holds(us);
    }
    daemon.kill().unwrap();
    assert_eq!(bound(), before);
}
