//! One thread at a time: there is one leisure per process. Each test begins it in a thread of its own and does nothing without the right to.

#![allow(clippy::unwrap_used)]

use std::ffi::CStr;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::*;

/// Longer than a test takes; a test that fails goes on at its leisure until then, and what it has to say is a second of work.
const LONG: Duration = Duration::from_secs(30);

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

/// What a manager passes: as many of these as there are names, from this number on.
const FIRST: RawFd = 700;

fn passed(count: usize, what: impl AsFd) -> Vec<OwnedFd> {
    let next = |_| rustix::io::fcntl_dupfd_cloexec(&what, FIRST).unwrap();
    let all: Vec<_> = (0..count).map(next).collect();
    for (number, fd) in (FIRST..).zip(&all) {
        assert_eq!(fd.as_raw_fd(), number);
    }
    all
}

/// What a manager calls the descriptors it passes, as it stands in the environment: something follows.
fn heed(names: &str) -> (u32, RawFd) {
    let text = [names.as_bytes(), b"\0/usr/bin/portoland\0\0\0\0\0\0\0\0"].concat();
    entry::heed(CStr::from_bytes_until_nul(&text).unwrap(), FIRST)
}

/// Which of them are watched, counted from the first.
fn heeded(names: &str) -> Vec<RawFd> {
    let (count, epoll) = heed(names);
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{epoll}")).unwrap();
    let watched = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
    let number = |line: &str| line.split_whitespace().next().unwrap().parse::<RawFd>();
    let mut watched: Vec<RawFd> = watched.map(|line| number(line).unwrap() - FIRST).collect();
    watched.sort_unstable();
    assert_eq!(watched.len(), count as usize);
    watched
}

/// Begins one that heeds this, as at the first instruction; the descriptor is another one later.
fn begin_heeding(at_most: Duration, who: impl AsFd) {
    let passed = passed(1, who);
    entry::begin(at_most);
    assert_eq!(heed("listener").0, 1);
    drop(passed);
}

// Names of all kinds of what is inherited. Expect: those from whom something may be heard are heeded, under the numbers that follow from the order; not
// those whose poll would do something (sockets of AF_XDP) or tell of messages (doorbells). What is not open, or cannot be watched, is left out.
#[test]
fn who_may_wait_is_known_by_name() {
    alone(|| {
        let (hear, _tell) = std::io::pipe().unwrap();
        let mut there = passed(100, &hear);
        assert_eq!(heeded("listener"), [0]);
        let all = "manifest:lock:listener:udp-0:xdp-link:ledger-0:umem-0:xsk-0:wake-0:link-0-1-7:pidfd-0-1:service:client-12:\
                   port-9-1-12-2-client:port-9-1-12-2-bell:pidfd-1-2";
        assert_eq!(heeded(all), [2, 9, 10, 12, 15]);
        for none in ["", ":", "::", "l", "pid", "x:y", "xlistener", ":cli:"] {
            assert_eq!(heeded(none), [0; 0], "{none:?}");
        }
        assert_eq!(heeded("::listener:"), [2]);
        assert_eq!(heeded(&vec!["client-1"; 100].join(":")).len(), 100);
        there.remove(1);
        assert_eq!(heeded("link:client:listener"), [0, 2]);
        drop(there);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let _there = passed(2, file);
        assert_eq!(heeded("link:client"), [0; 0]);
        assert!(entry::end().is_none());
    });
}

// What watches must not be taken for one of those that have names, nor stay.
#[test]
fn what_watches_has_a_number_of_its_own_until_the_end() {
    alone(|| {
        let (_, epoll) = heed("listener:client:link");
        assert!(epoll >= FIRST + 3, "{epoll}");
        assert!(entry::end().is_none(), "it had not begun");
        assert!(std::fs::metadata(format!("/proc/self/fd/{epoll}")).is_err());
    });
}

// It works while nobody says anything, then somebody does, for good. Expect: a pause after each turn, which lasts; afterwards none any more, and
// it is ordinary soon although its leisure was a long one.
#[test]
fn it_pauses_until_somebody_waits() {
    alone(|| {
        let (hear, mut tell) = std::io::pipe().unwrap();
        begin_heeding(LONG, &hear);
        let began = Instant::now();
        for _ in 0..5 {
            let before = entry::pauses().0;
            work_until("a turn ends", || entry::pauses().0 > before);
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

// Signals come all the time, most of them long before its turn is over, as if others had come in between. Expect: it pauses all the same, after so many
// of them at most.
#[test]
fn it_pauses_whoever_comes_in_between() {
    alone(|| {
        let (hear, _tell) = std::io::pipe().unwrap();
        begin_heeding(LONG, &hear);
        let before = entry::pauses().0;
        for _ in 0..10 * SIGNALS {
            entry::signal();
        }
        let pauses = entry::pauses().0 - before;
        Leisure::begun().end();
        assert!(pauses >= 10, "{pauses}");
    });
}

// One pauses, another closes its end meanwhile. Expect: that is heard, too.
#[test]
fn who_goes_is_heard() {
    alone(|| {
        let (hear, tell) = std::io::pipe().unwrap();
        begin_heeding(LONG, &hear);
        drop(tell);
        work_until("ordinary", || nice(None) == 0);
        assert!(entry::end().unwrap().waited_for);
    });
}

// Nobody is heeded. Expect: no pauses; the kernel is asked instead.
#[test]
fn without_anybody_to_heed_there_are_no_pauses() {
    alone(|| {
        entry::begin(LONG);
        assert_eq!(heed("lock:listener").0, 0);
        let before = entry::chosen();
        work_until("chosen anew", || entry::chosen() > before);
        assert_eq!(entry::end().unwrap().pauses, 0);
    });
}

// Nobody says anything, for longer than it may last. Expect: no pauses afterwards.
#[test]
fn pauses_do_not_last() {
    alone(|| {
        let (hear, _tell) = std::io::pipe().unwrap();
        begin_heeding(3 * PAUSE, &hear);
        work_until("ordinary", || nice(None) == 0);
        let ended = entry::end().unwrap();
        assert!(ended.pauses > 0 && !ended.waited_for, "{ended:?}");
    });
}
