//! How a thread shares its core with others. An `unsafe` island.
//!
//! Problem: on a machine without a core to spare, whoever takes a long turn is in the way of messages. Ordinary processes get turns of
//! some milliseconds, and until one is over nobody else of their kind runs there.
//!
//! Idea: EEVDF (kernel/sched/fair.c, Linux 6.12) has a task name the length of its turns, and one that wakes with a short turn runs before those in
//! the middle of a long one. Engines ask for that; a thread that answers messages, does little for each and wants them soon should too. Older
//! kernels take no notice.

/// The kernel's least (`sysctl_sched_base_slice` is ten times that and more).
const SHORT_NS: u64 = 100_000;

/// `struct sched_attr` of linux/sched/types.h, first version.
#[repr(C)]
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

/// Has the calling thread run only when its processor has nothing else to do (SCHED_IDLE). Anybody may.
pub fn idle() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the parameters and changes how this thread is scheduled, nothing else.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
}
