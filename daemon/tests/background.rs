//! The kernel's scheduler and what `background` asks of it. Alone on the machine: what others run would be measured, too.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use portoland::supervisor::watchdog::background::{EVERY_NS, interrupt};
use portoland::supervisor::watchdog::{STANDBY_PRIORITY, now_ns, vitals};

/// Measured in turns, so that whatever else happens on the machine happens to both.
const TURNS: u32 = 10;
const TURN: Duration = Duration::from_millis(100);

/// A run this many beats long, a millisecond and more, is one that should have been interrupted. Beats and not time: the machine may keep who
/// interrupts from its own core for as long, which is not what is asked here.
const LONG: u32 = 6;

// On one core, a thread in the background that never sleeps, and one that gives the core away all the time; on another, one that beats every
// tenth of a millisecond. Expect: left alone, the first often has its core for many beats; interrupted with each, hardly ever.
#[test]
fn nobody_keeps_the_core_from_who_gave_it_away() {
    let priority = STANDBY_PRIORITY;
    let may = std::thread::spawn(move || vitals::make_urgent(0, priority).is_ok());
    let cores = rustix::thread::sched_getaffinity(None).unwrap();
    if !may.join().unwrap() || cores.count() < 2 {
        return;
    }
    let (mut alone, mut interrupted) = (0, 0);
    for _ in 0..TURNS {
        alone += long_runs(false);
        interrupted += long_runs(true);
    }
    assert!(
        interrupted <= alone / 4 + 3,
        "{interrupted} long runs, {alone} without"
    );
}

/// How often, in a turn, the one in the background had the core for [`LONG`].
fn long_runs(interrupt_it: bool) -> u32 {
    let (over, beats) = (&AtomicBool::new(false), &AtomicU32::new(0));
    std::thread::scope(|scope| {
        let (tell, told) = channel();
        let spins = scope.spawn(move || {
            pin(0);
            let own = rustix::thread::gettid().as_raw_pid();
            vitals::make_idle(own).unwrap();
            tell.send(own).unwrap();
            count_long_runs(over, beats)
        });
        let thread = told.recv().unwrap();
        scope.spawn(move || {
            pin(1);
            vitals::make_urgent(0, STANDBY_PRIORITY).unwrap();
            while !over.load(Ordering::Relaxed) {
                if interrupt_it {
                    interrupt(thread).unwrap();
                }
                beats.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_nanos(EVERY_NS));
            }
        });
        scope.spawn(move || {
            pin(0);
            let end = now_ns() + TURN.as_nanos() as u64;
            while now_ns() < end {
                rustix::thread::sched_yield();
            }
            over.store(true, Ordering::Relaxed);
        });
        spins.join().unwrap()
    })
}

/// Runs are told apart by a clock that jumps: two switches take longer than this.
fn count_long_runs(over: &AtomicBool, beats: &AtomicU32) -> u32 {
    const JUMP_NS: u64 = 1_500;
    let mut runs = 0;
    let mut last = now_ns();
    let mut began = beats.load(Ordering::Relaxed);
    while !over.load(Ordering::Relaxed) {
        let (now, beat) = (now_ns(), beats.load(Ordering::Relaxed));
        if now - last > JUMP_NS {
            runs += u32::from(beat - began >= LONG);
            began = beat;
        }
        last = now;
    }
    runs
}

fn pin(nth: usize) {
    let cores = rustix::thread::sched_getaffinity(None).unwrap();
    let mut one = rustix::thread::CpuSet::new();
    let core = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| cores.is_set(*core));
    one.set(core.clone().nth(nth).unwrap());
    rustix::thread::sched_setaffinity(None, &one).unwrap();
}
