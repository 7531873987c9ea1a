//! One thread at a time: there is one leisure per process. Each test begins it in a thread of its own and does nothing without the right to.

#![allow(clippy::unwrap_used)]

use std::ffi::CStr;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
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
        assert_eq!((nice(None), entry::end().is_some()), (5, false));
        setpriority_process(None, 0).unwrap();
        portolan::turns::idle();
        entry::begin(LONG);
        assert_eq!((nice(None), entry::end().is_some()), (0, false));
    });
}

/// What a manager calls the descriptors it passes, as it stands in the environment: something follows.
fn heeded(names: &str) -> Vec<i32> {
    let text = [names.as_bytes(), b"\0/usr/bin/portoland\0\0\0\0\0\0\0\0"].concat();
    entry::heed_by_names(CStr::from_bytes_until_nul(&text).unwrap())
}

/// Begins one that heeds what is called so, as at the first instruction, and then under other numbers.
fn begin_heeding(at_most: Duration, names: &str, who: impl Iterator<Item = i32>) {
    undisturbed(|| {
        entry::begin(at_most);
        heeded(names);
        entry::heed(who);
    });
}

// Names of all kinds of what is inherited. Expect: those from whom something may be heard are heeded, under the numbers that follow from the order; not
// those whose poll would do something (sockets of AF_XDP) or tell of messages (doorbells).
#[test]
fn who_may_wait_is_known_by_name() {
    alone(|| {
        assert_eq!(heeded("listener"), [3]);
        let all = "manifest:lock:listener:udp-0:xdp-link:ledger-0:umem-0:xsk-0:wake-0:link-0-1-7:pidfd-0-1:service:client-12:\
                   port-9-1-12-2-client:port-9-1-12-2-bell:pidfd-1-2";
        assert_eq!(heeded(all), [5, 12, 13, 15, 18]);
        for none in ["", ":", "::", "l", "pid", "x:y", "xlistener", ":cli:"] {
            assert_eq!(heeded(none), [0; 0], "{none:?}");
        }
        assert_eq!(heeded("::listener:"), [5]);
        let many = |count: usize| vec!["client-1"; count].join(":");
        assert_eq!(heeded(&many(512)).len(), 512);
        assert_eq!(heeded(&many(513)).len(), 0, "then nobody, and no pauses");
    });
}

// It works while nobody says anything, then somebody does, for good. Expect: a pause after each turn, which lasts; afterwards none any more, and
// it is ordinary soon although its leisure was a long one.
#[test]
fn it_pauses_until_somebody_waits() {
    alone(|| {
        let (hear, mut tell) = std::io::pipe().unwrap();
        begin_heeding(LONG, "listener", [hear.as_raw_fd()].into_iter());
        let began = Instant::now();
        for _ in 0..5 {
            let before = entry::chosen();
            work_until("a turn ends", || entry::chosen() > before);
        }
        // The fifth pause may just have begun: one thread, so it has not.
        assert!(began.elapsed() >= 5 * PAUSE, "{:?}", began.elapsed());
        assert_eq!(nice(None), NICE);
        tell.write_all(b"x").unwrap();
        work_until("it is heard", || entry::pauses().1);
        let heard = entry::pauses();
        work_until("ordinary", || nice(None) == 0);
        let ended = entry::end().unwrap();
        assert_eq!((ended.pauses, ended.waited_for), heard);
        assert!(heard.0 > 5);
    });
}

// One pauses, another closes its end meanwhile. Expect: that is heard, too.
#[test]
fn who_goes_is_heard() {
    alone(|| {
        let (hear, tell) = std::io::pipe().unwrap();
        begin_heeding(LONG, "listener", [hear.as_raw_fd()].into_iter());
        drop(tell);
        work_until("ordinary", || nice(None) == 0);
        assert!(entry::end().unwrap().waited_for);
    });
}

// Nobody is heeded, or more than there is room for. Expect: no pauses; the kernel is asked instead.
#[test]
fn without_anybody_to_heed_there_are_no_pauses() {
    alone(|| {
        for names in ["lock", "listener"] {
            setpriority_process(None, 0).unwrap();
            begin_heeding(LONG, names, std::iter::repeat_n(0, 513));
            let before = entry::chosen();
            work_until("chosen anew", || entry::chosen() > before);
            assert_eq!(entry::end().unwrap().pauses, 0, "{names}");
        }
    });
}

// Nobody says anything, for longer than it may last. Expect: no pauses afterwards.
#[test]
fn pauses_do_not_last() {
    alone(|| {
        let (hear, _tell) = std::io::pipe().unwrap();
        begin_heeding(3 * PAUSE, "listener", [hear.as_raw_fd()].into_iter());
        work_until("ordinary", || nice(None) == 0);
        let ended = entry::end().unwrap();
        assert!(ended.pauses > 0 && !ended.waited_for, "{ended:?}");
    });
}
