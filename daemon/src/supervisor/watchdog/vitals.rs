//! What the kernel says of an engine's process, and the calls a watchdog needs. An `unsafe` island.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::thread::CapabilitySet;
use rustix::thread::futex::{self, Wait, WaitFlags, WaitPtr, WaitvFlags};
use std::sync::atomic::AtomicU32;

/// `PF_EXITING` of linux/sched.h: the process will never return to user mode.
const PF_EXITING: u64 = 0x4;

/// What /proc/PID/stat says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vitals {
    /// `R`, `S`, `D`, `T`, `t`, `Z` …
    pub state: u8,
    /// It is being taken down.
    pub exiting: bool,
}

/// Reads /proc/PID/stat. `None`: there is no such process, or no such file system.
pub fn vitals(pid: i32) -> Option<Vitals> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(&text)
}

/// The name, which is in parentheses, may hold anything.
fn parse(text: &[u8]) -> Option<Vitals> {
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = text.get(after_name..)?.split(u8::is_ascii_whitespace);
    fields.next(); // nothing, before the first blank
    let state = *fields.next()?.first()?;
    let flags = std::str::from_utf8(fields.nth(5)?).ok()?;
    Some(Vitals {
        state,
        exiting: flags.parse::<u64>().ok()? & PF_EXITING != 0,
    })
}

/// The processor that a process runs on, or ran on last; `None` if there is no such process.
pub fn last_processor(pid: i32) -> Option<usize> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_processor(&text)
}

/// The 39th field of proc_pid_stat(5); the third is the first behind the name.
fn parse_processor(text: &[u8]) -> Option<usize> {
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 1;
    let fields = text.get(after_name..)?.split(u8::is_ascii_whitespace);
    let field = std::str::from_utf8(fields.skip(1).nth(39 - 3)?).ok()?;
    field.parse().ok()
}

/// Is a process dead, or so nearly that it can never run again? The pidfd says the former, the flag the latter. (A number that is
/// another process's by now only means that ours is gone.)
pub fn is_ending(pid: i32, exit: BorrowedFd<'_>) -> bool {
    vitals(pid).is_some_and(|vitals| vitals.exiting) || is_readable(exit)
}

/// Is a pidfd readable: is the process gone, its memory included?
pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    loop {
        match rustix::event::poll(&mut fds, Some(&at_once)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready == Ok(1),
        }
    }
}

/// Nanoseconds of CPU time the process has used. The kernel brings this figure up to date when it looks at the process: at a tick (up to
/// 10 ms apart) or when something else runs. So it may lag, never lead. `None`: no such process.
pub fn cpu_time_ns(pid: i32) -> Option<u64> {
    // A clock's number holds this much of a process's; the kernel gives out less.
    if !(1..1 << 28).contains(&pid) {
        return None;
    }
    let mut clock = 0;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: both calls write to the variable they are given and nothing else.
    let read = unsafe {
        libc::clock_getcpuclockid(pid, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    read.then(|| time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

/// Has a process (0: this thread) run before all ordinary ones whenever it can.
///
/// # Errors
/// EPERM without CAP_SYS_NICE.
pub fn make_urgent(pid: i32, priority: i32) -> io::Result<()> {
    schedule(pid, libc::SCHED_FIFO, priority)
}

/// Has a process run only when its processor has nothing else to do.
///
/// # Errors
/// EPERM without CAP_SYS_NICE, by which alone it could be taken back; ESRCH if there is no such process.
pub fn make_idle(pid: i32) -> io::Result<()> {
    if !may_take_back_idleness() {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    schedule(pid, libc::SCHED_IDLE, 0)
}

/// May this thread make an idle process an ordinary one again (`can_nice`, kernel/sched/syscalls.c)?
pub fn may_take_back_idleness() -> bool {
    let have = rustix::thread::capabilities(None);
    have.is_ok_and(|have| have.effective.contains(CapabilitySet::SYS_NICE))
}

/// Has a process run like everybody.
///
/// # Errors
/// EPERM if it is idle or another user's and CAP_SYS_NICE is missing, ESRCH if there is none.
pub fn make_ordinary(pid: i32) -> io::Result<()> {
    schedule(pid, libc::SCHED_OTHER, 0)
}

/// Does a thread run only when its processor has nothing else to do?
pub fn is_idle(thread: i32) -> bool {
    // SAFETY: the call only asks; it is negative if there is no such thread.
    unsafe { libc::sched_getscheduler(thread) == libc::SCHED_IDLE }
}

fn schedule(pid: i32, policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the call reads the parameters and changes how a process is scheduled, nothing else.
    match unsafe { libc::sched_setscheduler(pid, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sleeps until one of the words is woken or has another value than the one given, or until then (CLOCK_MONOTONIC nanoseconds).
/// False: this kernel cannot (before 5.16).
pub fn wait_for_any<'w>(words: impl Iterator<Item = (&'w AtomicU32, u32)>, until_ns: u64) -> bool {
    // The kernel's limit; there are at most 64 queues, and one word more.
    const MOST: usize = 128;
    let waits: Vec<Wait> = words
        .take(MOST)
        .map(|(word, value)| {
            let mut wait = Wait::new();
            wait.val = value.into();
            wait.uaddr = WaitPtr::new(word.as_ptr().cast());
            // Not private: the words of ledgers are shared.
            wait.flags = WaitFlags::SIZE_U32;
            wait
        })
        .collect();
    let until = Timespec {
        tv_sec: (until_ns / 1_000_000_000) as i64,
        tv_nsec: (until_ns % 1_000_000_000) as _,
    };
    let clock = rustix::time::ClockId::Monotonic;
    // Whatever ends the wait: the caller looks at everything.
    futex::waitv(&waits, WaitvFlags::empty(), Some(&until), clock) != Err(rustix::io::Errno::NOSYS)
}

/// Wakes who waits for a word.
pub fn wake(word: &AtomicU32) {
    // Nobody waits: as good.
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_confuse() {
        let line = |name: &str, state: char, flags: u64| {
            parse(format!("12 ({name}) {state} 1 2 3 0 -1 {flags} 5 6").as_bytes())
        };
        for name in ["portoland-eng", "a b", ") R 1 (", ""] {
            let vitals = line(name, 'T', 0x40_0000).unwrap();
            assert_eq!((vitals.state, vitals.exiting), (b'T', false), "{name}");
            assert!(line(name, 'R', 0x40_0004).unwrap().exiting);
        }
        for nonsense in ["", "12", "12 (a)", "12 (a) R", "12 (a) R 1 2 3 4 5 x"] {
            assert_eq!(parse(nonsense.as_bytes()), None, "{nonsense}");
        }
    }

    // Every field is its own number. Expect: the 39th, whatever the name; nothing of a line that ends before it.
    #[test]
    fn a_processor_is_the_39th_field() {
        let rest: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        for name in ["portoland-eng", "a b", ") R 1 ("] {
            let line = format!("1 ({name}) S {}", rest.join(" "));
            assert_eq!(parse_processor(line.as_bytes()), Some(39), "{name}");
            let short = format!("1 ({name}) S {}", rest[..34].join(" "));
            assert_eq!(parse_processor(short.as_bytes()), None, "{name}");
        }
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(last_processor(own).is_some());
    }

    #[test]
    fn we_are_alive_and_use_time() {
        let own = i32::try_from(std::process::id()).unwrap();
        let vitals = vitals(own).unwrap();
        assert!(!vitals.exiting);
        let before = cpu_time_ns(own).unwrap();
        while cpu_time_ns(own).unwrap() == before {
            std::hint::spin_loop();
        }
        assert_eq!(cpu_time_ns(i32::MAX - 7), None);
    }
}
