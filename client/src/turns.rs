//! How a thread shares its core with others. An `unsafe` island.
//!
//! Problem: on a machine without a core to spare, whoever takes a long turn is in the way of messages. Ordinary processes get turns of
//! some milliseconds, and until one is over nobody else of their kind runs there.
//!
//! Idea: EEVDF (kernel/sched/fair.c, Linux 6.12) has a task name the length of its turns, and one that wakes with a short turn runs before those in
//! the middle of a long one. Engines ask for that; a thread that answers messages, does little for each and wants them soon should too. Older
//! kernels take no notice.
//!
//! Who shares a core by yielding must agree on that length: since Linux 6.18 a yield gives the rest of a turn away, so that of two threads that
//! yield to each other one with turns of 100 us is taken many times before one with the usual turns has its next. An application that
//! polled beside its engine waited for as many empty loops of it: 8.3 us for one way of 64 bytes instead of 6.4. So threads that
//! open a port and do not wait spinning take turns as short as their engine's.
//!
//! Even so a yield may come back at once, since the rest of a turn is given away only by who has had no more than its share. Two threads that yield to each other
//! may come to a rhythm in which one of them needs two yields each time. What it handed over lies there until the second: see [`give_way`].

mod looks;
mod patience;

pub(crate) use looks::Looks;
pub use patience::Patience;

/// The kernel's least (`sysctl_sched_base_slice` is ten times that and more).
const SHORT_NS: u64 = 100_000;

/// `struct sched_attr` of linux/sched/types.h, first version.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Makes the calling thread one among ordinary ones (SCHED_OTHER, nice 0), with turns of 100 us, whatever it was. Anybody may. It neither allocates
/// nor locks, and cannot fail: a kernel before 6.12 leaves the thread's turns as they are.
pub fn short() {
    let attributes = SchedAttr {
        size: size_of::<SchedAttr>() as u32,
        policy: libc::SCHED_OTHER as u32,
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: SHORT_NS,
        deadline: 0,
        period: 0,
    };
    let itself: libc::c_long = 0;
    let no_flags: libc::c_long = 0;
    // SAFETY: the call reads the attributes, whose size they name, and changes how this thread is scheduled, nothing else.
    let set = unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            itself,
            &raw const attributes,
            no_flags,
        )
    };
    if set < 0 {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: as above.
        let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) };
    }
}

/// Gives the calling thread turns as short as an engine's and changes nothing else: neither its policy nor how nice it is. A thread that is no
/// ordinary one, or asks for short turns already, stays as it is. It cannot fail, as [`short`].
pub fn as_engines() {
    let mut attributes = SchedAttr::default();
    let itself: libc::c_long = 0;
    let no_flags: libc::c_long = 0;
    // SAFETY: the call writes at most as many bytes as it is told there are.
    let got = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            itself,
            &raw mut attributes,
            size_of::<SchedAttr>() as libc::c_long,
            no_flags,
        )
    };
    let ordinary = attributes.policy == libc::SCHED_OTHER as u32;
    // Before 6.12 the runtime is 0, and would be refused or ignored.
    if got < 0 || !ordinary || attributes.runtime <= SHORT_NS {
        return;
    }
    attributes.size = size_of::<SchedAttr>() as u32;
    attributes.runtime = SHORT_NS;
    // SAFETY: the call reads the attributes, whose size they name, and changes how this thread is scheduled, nothing else.
    let _ = unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            itself,
            &raw const attributes,
            no_flags,
        )
    };
}

/// Yields before it is left to the next occasion.
const YIELDS: u32 = 3;

/// Gives the core away to whoever was handed something; at once again, but not for ever, while that is `untaken`: then the core was given to nobody. Who takes
/// nothing on another core, or is stopped, costs that many yields.
#[inline]
pub fn give_way(mut untaken: impl FnMut() -> bool) {
    for _ in 0..YIELDS {
        std::thread::yield_now();
        if !untaken() {
            return;
        }
    }
}

/// Has the calling thread run only when its processor has nothing else to do (SCHED_IDLE). Anybody may.
pub fn idle() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the parameters and changes how this thread is scheduled, nothing else.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn own() -> SchedAttr {
        let mut attributes = SchedAttr::default();
        let (itself, no_flags): (libc::c_long, libc::c_long) = (0, 0);
        let size = size_of::<SchedAttr>() as libc::c_long;
        // SAFETY: the call writes at most as many bytes as it is told there are.
        let got = unsafe {
            libc::syscall(
                libc::SYS_sched_getattr,
                itself,
                &raw mut attributes,
                size,
                no_flags,
            )
        };
        assert_eq!(got, 0);
        attributes
    }

    // A thread that is nicer than others. Expect: its turns are short, where the kernel knows of that, and it is as nice as before.
    #[test]
    fn turns_become_as_short_as_an_engines_and_nothing_else_changes() {
        let thread = std::thread::spawn(|| {
            // SAFETY: makes the calling thread nicer, nothing else.
            assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 7) }, 0);
            let before = own();
            as_engines();
            let after = own();
            assert_eq!((after.policy, after.nice), (before.policy, 7));
            if before.runtime > 0 {
                assert_eq!(after.runtime, SHORT_NS);
            }
        });
        thread.join().unwrap();
    }

    // What was handed over is taken after the first yield, after the second, never. Expect: no yield more than that takes, and an end.
    #[test]
    fn the_core_is_given_away_until_it_was_had_but_not_for_ever() {
        for (taken_after, looks) in [(1, 1), (2, 2), (u32::MAX, YIELDS)] {
            let mut looked = 0;
            give_way(|| {
                looked += 1;
                looked < taken_after
            });
            assert_eq!(looked, looks, "taken after {taken_after}");
        }
    }

    // A thread that runs only when nobody else wants to. Expect: it stays so.
    #[test]
    fn who_is_no_ordinary_thread_stays_what_it_is() {
        let thread = std::thread::spawn(|| {
            idle();
            as_engines();
            assert_eq!(own().policy, libc::SCHED_IDLE as u32);
        });
        thread.join().unwrap();
    }
}
