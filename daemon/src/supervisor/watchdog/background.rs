//! Who runs when nobody else wants to is interrupted often.
//!
//! Problem: an engine that shares its core gives it away whenever it finds nothing to do (`sched_yield`), and so do applications that spin. If
//! nobody else wants the core but a process in the background (SCHED_IDLE), that one gets it, although the engine could run. Nobody *wakes up*
//! then, so the scheduler has no reason to look again before its next tick: 4 ms with 250 Hz, 2 ms on average. An engine that dies takes
//! down its page tables in the background, its next standby and a supervisor that comes back are prepared there: each of them was good for
//! gaps of 1 to 2.5 ms (measured: a dying engine alone was behind 24 of 40 gaps above 0.7 ms in the 15 ms after takeovers).
//!
//! Idea: a niceness that grows has the kernel choose anew who runs where the process runs (`prio_changed_fair`, kernel/sched/fair.c). So who is in the background has
//! its niceness changed and changed back every [`EVERY_NS`], by a thread that runs before all ordinary ones. Whoever gave the
//! core away has it back by then.
//!
//! And who is in the background may hold what others wait for. A process that dies, or is being prepared, takes the kernel's lock on who maps a file
//! (`i_mmap_rwsem`; that of the C library is everybody's), and on processors that are never idle it has a three-hundredth of one at best: whoever
//! maps that file, starts or ends waits meanwhile. Dying engines left there had others wait for up to 9 s (measured, with as many busy processes as 8). So
//! **nobody is in the background for long**: who dies is made an ordinary process after [`LONGEST_NS`], who is prepared by the main thread
//! (`succession.rs`), and without the right to take it back nobody is put there ([`vitals::make_idle`]).
//!
//! Rejected: engines that keep their core (they would take it from the application that they serve); an ordinary process instead (it
//! takes the core from whoever needs it); real-time priority, to have it over with (milliseconds at once).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, getpriority_process, setpriority_process};

use super::vitals;

/// From one interruption to the next: what a message may wait. Each takes some microseconds of a core.
pub const EVERY_NS: u64 = 100_000;

/// How long anybody is in the background. Dying takes a millisecond or two of a core, being prepared a few: with any leisure it is over by then.
pub const LONGEST_NS: u64 = 100_000_000;

/// Lowest niceness.
const LOWEST: i32 = -20;

/// Processes in the background, or about to be.
#[derive(Debug, Default)]
pub struct Background(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    pid: i32,
    /// It has been in the background.
    was_there: bool,
    until_ns: u64,
    /// It is dying, and its pidfd: then it is an ordinary process.
    dying: Option<OwnedFd>,
}

impl Background {
    /// This process runs when nobody else wants to, or will: looked after until it does not any more, is gone, or this time has come.
    pub fn add(&mut self, pid: i32, until_ns: u64) {
        self.watch(pid, until_ns, None);
    }

    /// This process is dying. It does so when nobody else wants to run, until this time has come.
    ///
    /// # Errors
    /// As for [`vitals::make_idle`]: it is where it was.
    pub fn lay_out(&mut self, pid: i32, exit: OwnedFd, until_ns: u64) -> io::Result<()> {
        vitals::make_idle(pid)?;
        self.watch(pid, until_ns, Some(exit));
        Ok(())
    }

    fn watch(&mut self, pid: i32, until_ns: u64, dying: Option<OwnedFd>) {
        self.0.retain(|entry| entry.pid != pid);
        self.0.push(Entry {
            pid,
            was_there: false,
            until_ns,
            dying,
        });
    }

    /// Interrupts everybody; returns when to do so again.
    pub fn interrupt(&mut self, now_ns: u64) -> Option<u64> {
        self.0.retain_mut(|entry| {
            let is_there = vitals::is_idle(entry.pid);
            if is_there {
                // Gone since, or we have not the right: then it has its turns.
                let _ = interrupt(entry.pid);
            }
            let leaves = entry.was_there && !is_there;
            entry.was_there |= is_there;
            let over = now_ns >= entry.until_ns;
            if let Some(exit) = entry.dying.as_ref().filter(|_| over && is_there)
                && !vitals::is_readable(exit.as_fd())
            {
                // It ends at this very moment: as good.
                let _ = vitals::make_ordinary(entry.pid);
            }
            !leaves && !over
        });
        (!self.0.is_empty()).then_some(now_ns + EVERY_NS)
    }
}

/// Has the kernel choose anew who runs where this process or thread runs. Its niceness is in the end what it was.
///
/// # Errors
/// EACCES without CAP_SYS_NICE, before anything is changed; ESRCH.
pub fn interrupt(thread: i32) -> io::Result<()> {
    let thread = Pid::from_raw(thread);
    let nice = getpriority_process(thread)?;
    // Growing is what counts; shrinking is what may be forbidden.
    let less = (nice - 1).max(LOWEST);
    setpriority_process(thread, less)?;
    Ok(setpriority_process(thread, nice)?)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// A thread that waits, and what it waits for.
    struct Waits(
        i32,
        std::sync::mpsc::Sender<()>,
        std::thread::JoinHandle<()>,
    );

    impl Waits {
        fn start() -> Self {
            let (tell, told) = channel();
            let (end, ended) = channel::<()>();
            let work = move || {
                tell.send(rustix::thread::gettid().as_raw_pid()).unwrap();
                // Until the other end is dropped.
                let _ = ended.recv();
            };
            let thread = std::thread::spawn(work);
            Self(told.recv().unwrap(), end, thread)
        }

        fn end(self) {
            drop(self.1);
            self.2.join().unwrap();
        }
    }

    fn nice(thread: i32) -> i32 {
        getpriority_process(Pid::from_raw(thread)).unwrap()
    }

    #[test]
    fn niceness_stays() {
        let thread = Waits::start();
        // Without the right nothing is changed either.
        for value in [0, 5, 19] {
            setpriority_process(Pid::from_raw(thread.0), value).unwrap();
            let _ = interrupt(thread.0);
            assert_eq!(nice(thread.0), value);
        }
        if setpriority_process(Pid::from_raw(thread.0), LOWEST).is_ok() {
            interrupt(thread.0).unwrap();
            assert_eq!(nice(thread.0), LOWEST);
        }
        thread.end();
    }

    // One that is about to go to the background, goes there and comes back; one that never goes; one that does not exist. Expect: each
    // looked after as long as it should be.
    #[test]
    fn whoever_leaves_is_left_alone() {
        let thread = Waits::start();
        let mut all = Background::default();
        all.add(thread.0, u64::MAX);
        assert_eq!(all.interrupt(7), Some(7 + EVERY_NS));
        if vitals::make_idle(thread.0).is_ok() {
            assert!(all.interrupt(8).is_some());
            assert!(all.interrupt(9).is_some());
            vitals::make_ordinary(thread.0).unwrap();
            assert_eq!(all.interrupt(10), None);
        }
        let mut all = Background::default();
        all.add(thread.0, 100);
        all.add(i32::MAX - 7, 50);
        assert!(all.interrupt(50).is_some());
        assert_eq!(all.0.len(), 1);
        assert_eq!(all.interrupt(100), None);
        thread.end();
    }

    // Two that die: one takes its time, one is gone when its time has come, and its number another's who is there of its own accord. And one that
    // is prepared. Expect: only the first is an ordinary one then, and not before.
    #[test]
    fn who_dies_is_not_there_for_long() {
        let [slow, gone, prepared] = [Waits::start(), Waits::start(), Waits::start()];
        let pidfd = |readable: bool| {
            let flags = rustix::event::EventfdFlags::empty();
            rustix::event::eventfd(u32::from(readable), flags).unwrap()
        };
        let mut all = Background::default();
        if all.lay_out(slow.0, pidfd(false), 100).is_ok() {
            all.lay_out(gone.0, pidfd(true), 100).unwrap();
            vitals::make_idle(prepared.0).unwrap();
            all.add(prepared.0, 100);
            assert!(all.interrupt(99).is_some());
            assert!(
                [&slow, &gone, &prepared]
                    .iter()
                    .all(|t| vitals::is_idle(t.0))
            );
            assert_eq!(all.interrupt(100), None);
            assert!(!vitals::is_idle(slow.0));
            assert!(vitals::is_idle(gone.0) && vitals::is_idle(prepared.0));
        }
        for thread in [slow, gone, prepared] {
            thread.end();
        }
    }
}
