//! One thread at a time: there is one leisure per process. Each test begins it in a thread of its own and does nothing without the right to.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::*;

const LONG: Duration = Duration::from_secs(3600);

fn nice(thread: Option<Pid>) -> i32 {
    getpriority_process(thread).unwrap()
}

/// Runs the test in a thread that is ordinary and may choose, if we may.
fn alone(test: impl FnOnce() + Send) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if setpriority_process(None, -1).is_ok() {
                setpriority_process(None, 0).unwrap();
                test();
            }
        });
    });
}

/// Works until this holds.
fn work_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
    }
}

fn work_for(time: Duration) {
    let until = Instant::now() + time;
    work_until("time passes", || Instant::now() >= until);
}

// A thread begins, another is born meanwhile, the first ends it. Expect: both nice in between, both ordinary afterwards.
#[test]
fn whoever_was_nice_is_ordinary_afterwards() {
    alone(|| {
        entry::begin(LONG);
        assert_eq!(nice(None), NICE);
        let (tell, tid) = channel();
        let (stay, left) = channel::<()>();
        let born = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            // Until the other end is dropped.
            let _ = left.recv();
        });
        let other = tid.recv().unwrap();
        assert_eq!(nice(Some(other)), NICE);
        Leisure::begun().end();
        assert_eq!((nice(None), nice(Some(other))), (0, 0));
        drop(stay);
        born.join().unwrap();
    });
}

// Nobody ends it, it only works. Expect: it becomes ordinary by itself, the kernel goes on to be asked, and ending it then does no harm.
#[test]
fn niceness_does_not_last() {
    alone(|| {
        entry::begin(Duration::from_millis(1));
        work_until("ordinary", || nice(None) == 0);
        let chosen = entry::chosen();
        work_until("chosen anew", || entry::chosen() > chosen);
        assert_eq!(nice(None), 0);
        Leisure::begun().end();
        assert_eq!(nice(None), 0);
    });
}

// It works; from a moment on signals come all the time. Expect: the kernel chooses again and again, and never before the thread has had its
// turn; after the end no more.
#[test]
fn the_kernel_chooses_anew_after_each_turn_until_the_end() {
    alone(|| {
        entry::begin(LONG);
        for _ in 0..5 {
            let before = entry::chosen();
            work_until("chosen anew", || entry::chosen() > before);
        }
        for _ in 0..5 {
            let before = entry::chosen();
            work_until("chosen anew, told to", || {
                entry::signal();
                entry::chosen() > before
            });
            assert!(entry::chosen() - before >= RAN.as_nanos() as u64);
        }
        Leisure::begun().end();
        let last = entry::chosen();
        work_for(20 * TURN);
        entry::signal();
        assert_eq!((entry::chosen(), nice(None)), (last, 0));
    });
}

// A call that waits, meanwhile signals. Expect: it returns what it waited for.
#[test]
fn calls_that_wait_are_not_cut_short() {
    alone(|| {
        let (mut hear, mut tell) = std::io::pipe().unwrap();
        entry::begin(LONG);
        let itself = rustix::thread::gettid();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let state = format!("/proc/self/task/{itself}/stat");
                let waits = || {
                    let stat = std::fs::read_to_string(&state).unwrap();
                    stat.rsplit(')').next().unwrap().starts_with(" S")
                };
                work_until("the other waits", waits);
                work_for(50 * TURN);
                tell.write_all(b"x").unwrap();
            });
            // Not `read_exact`, which would go on by itself.
            assert_eq!(hear.read(&mut [0]).unwrap(), 1);
        });
        Leisure::begun().end();
    });
}

// Work that must not be disturbed, as long as several turns. Expect: the kernel is not asked meanwhile, and is afterwards.
#[test]
fn what_must_not_be_disturbed_is_not() {
    alone(|| {
        entry::begin(LONG);
        let before = undisturbed(|| {
            let before = entry::chosen();
            work_for(20 * TURN);
            entry::signal();
            assert_eq!(entry::chosen(), before);
            before
        });
        work_until("chosen afterwards", || entry::chosen() > before);
        Leisure::begun().end();
    });
}

// Threads that have been made nicer, or idle. Expect: nothing begins.
#[test]
fn whose_niceness_or_policy_was_chosen_keeps_it() {
    alone(|| {
        setpriority_process(None, 5).unwrap();
        entry::begin(LONG);
        assert_eq!((nice(None), entry::end()), (5, false));
        setpriority_process(None, 0).unwrap();
        portolan::turns::idle();
        entry::begin(LONG);
        assert_eq!((nice(None), entry::end()), (0, false));
    });
}
