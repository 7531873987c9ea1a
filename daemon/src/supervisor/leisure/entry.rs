//! The first instructions of a program, and a signal's handler, in assembly. An `unsafe` island.
//!
//! Both run before anything of the program's own can: before it is relocated, before its C library has asked the processor what it is (each of its
//! 43 questions is a call of a guest's monitor, 0.4 ms together). So they use registers, the stack, their own data relative to the instruction
//! pointer and system calls, nothing else: no library, no thread-local variable, no `errno`. A compiler would be free to call memset(3).
//!
//! `portoland_entry` is where the kernel starts the daemon (`-e`, `.cargo/rustc`). If the environment announces what a predecessor left, it
//! begins a leisure, which heeds those among it who may come to wait, by their names; then it goes on where programs usually start.

use std::arch::global_asm;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use super::{AT_MOST, AT_MOST_WAITED_FOR, NICE, PAUSE, RAN, SHORT, TURN};
use crate::supervisor::store::inherit::{FIRST, HANDOVER, LISTEN_FDNAMES, LISTEN_FDS};

/// Not used by glibc (32, 33), nor by anybody here.
const SIGNAL: i32 = 41;

const OFF: u32 = 0;
const ON: u32 = 1;
/// No timer: the kernel's numbers begin with 0.
const NONE: i32 = -1;

/// What handler and program share; they are one thread.
#[repr(C)]
struct State {
    phase: AtomicU32,
    timer: AtomicI32,
    /// Until when it is nice; CLOCK_MONOTONIC nanoseconds.
    until: AtomicU64,
    /// The thread's processor time when it last went on.
    chosen: AtomicU64,
    /// How nice it is.
    nice: AtomicI32,
    /// How many of `HEEDED` there are; with none it does not pause.
    heeded: AtomicU32,
    /// How often it has paused.
    pauses: AtomicU32,
    /// Was it seen that somebody waits?
    waited_for: AtomicU32,
}

#[unsafe(export_name = "portoland_leisure")]
static STATE: State = State {
    phase: AtomicU32::new(OFF),
    timer: AtomicI32::new(NONE),
    until: AtomicU64::new(0),
    chosen: AtomicU64::new(0),
    nice: AtomicI32::new(NICE),
    heeded: AtomicU32::new(0),
    pauses: AtomicU32::new(0),
    waited_for: AtomicU32::new(0),
};

/// More than so many are not heeded, so there are no pauses.
const MOST: usize = 512;

/// `struct pollfd` each: descriptor, what is asked for, what poll(2) answers.
#[unsafe(export_name = "portoland_heeded")]
static HEEDED: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];

/// Asks whether there is something to read.
const READABLE: u64 = (libc::POLLIN as u64) << 32;

/// Eight bytes of a name and its `=`, from one on.
const fn word(name: &str, from: usize) -> u64 {
    let mut word = [0; 8];
    let mut at = 0;
    while at < 8 {
        word[at] = if from + at < name.len() {
            name.as_bytes()[from + at]
        } else {
            b'='
        };
        at += 1;
    }
    u64::from_le_bytes(word)
}

const _: () = assert!(LISTEN_FDS.len() == 10 && LISTEN_FDNAMES.len() == 14 && HANDOVER.len() == 17);

/// The first four bytes of a name.
const fn start(name: &str) -> u32 {
    let name = name.as_bytes();
    u32::from_le_bytes([name[0], name[1], name[2], name[3]])
}

global_asm!(
    ".pushsection .text.portoland_entry,\"ax\",@progbits",
    // The kernel's and the C library's convention: the stack has the number of arguments, they, a zero, the environment; rdx is the library's.
    ".globl portoland_entry",
    "portoland_entry:",
    "mov r15, rdx",
    "mov rax, [rsp]",
    "lea r14, [rsp + 8*rax + 16]",
    "movabs r12, {listen}",
    "movabs r13, {listen_rest}",
    "movabs r8, {handover}",
    "movabs r9, {handover_rest}",
    "movabs r10, {names_rest}",
    // Is there anything, and what it is called.
    "xor ebx, ebx",
    "xor ebp, ebp",
    "2: mov rsi, [r14]",
    "add r14, 8",
    "test rsi, rsi",
    "jz 4f",
    // Behind the last string there is the program's name and eight zeros, so eight bytes may be read from everywhere.
    "mov rax, [rsi]",
    "cmp rax, r12",
    "jne 3f",
    "cmp [rsi + 3], r13",
    "je 5f",
    "cmp [rsi + 7], r10",
    "jne 2b",
    "lea rbp, [rsi + 15]",
    "jmp 2b",
    "3: cmp rax, r8",
    "jne 2b",
    "cmp [rsi + 10], r9",
    "jne 2b",
    "5: mov ebx, 1",
    "jmp 2b",
    "4: test ebx, ebx",
    "jz 6f",
    "test rbp, rbp",
    "jz 7f",
    "mov rdi, rbp",
    "call portoland_heed",
    "7: movabs rdi, {at_most}",
    "call portoland_begin_leisure",
    "6: mov rdx, r15",
    "jmp _start",

    // extern "C" fn(names, separated by colons): the first is that of the first descriptor.
    ".globl portoland_heed",
    "portoland_heed:",
    "lea rsi, [rip + portoland_heeded]",
    "movabs r8, {readable}",
    "mov ecx, {first}",
    "xor edx, edx",
    "2: mov eax, [rdi]",
    "cmp eax, {pidfd}",
    "je 3f",
    "cmp eax, {link}",
    "je 3f",
    "cmp eax, {listener}",
    "je 3f",
    "cmp eax, {client}",
    "jne 4f",
    "3: cmp edx, {most}",
    "jb 5f",
    "xor edx, edx",
    "jmp 9f",
    "5: lea rax, [r8 + rcx]",
    "mov [rsi + 8*rdx], rax",
    "inc edx",
    "4: mov al, [rdi]",
    "inc rdi",
    "test al, al",
    "jz 9f",
    "cmp al, ':'",
    "jne 4b",
    "inc ecx",
    "jmp 2b",
    "9: mov [rip + portoland_leisure + 28], edx",
    "ret",

    // extern "C" fn(nanoseconds at most)
    ".globl portoland_begin_leisure",
    "portoland_begin_leisure:",
    "push rbx",
    "push r12",
    "sub rsp, 72",
    "mov r12, rdi",
    "lea rbx, [rip + portoland_leisure]",
    // Who has been given another policy or niceness keeps it.
    "mov eax, {sched_getattr}",
    "xor edi, edi",
    "mov rsi, rsp",
    "mov edx, 48",
    "xor r10d, r10d",
    "syscall",
    "test rax, rax",
    "js 9f",
    "mov eax, [rsp + 4]",
    "or eax, [rsp + 16]",
    "jnz 9f",
    // Only with the right to come back.
    "mov eax, {setpriority}",
    "xor edi, edi",
    "xor esi, esi",
    "mov edx, -1",
    "syscall",
    "test rax, rax",
    "js 9f",
    // struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
    "mov qword ptr [rsp], 48",
    "mov qword ptr [rsp + 8], 0",
    "mov qword ptr [rsp + 16], {nice}",
    "mov qword ptr [rsp + 24], {short}",
    "mov qword ptr [rsp + 32], 0",
    "mov qword ptr [rsp + 40], 0",
    "mov eax, {sched_setattr}",
    "xor edi, edi",
    "mov rsi, rsp",
    "xor edx, edx",
    "syscall",
    "test rax, rax",
    "jns 2f",
    "mov eax, {setpriority}",
    "xor edi, edi",
    "xor esi, esi",
    "mov edx, {nice}",
    "syscall",
    "2:",
    "mov eax, {clock_gettime}",
    "mov edi, {monotonic}",
    "mov rsi, rsp",
    "syscall",
    "imul rax, [rsp], 1000000000",
    "add rax, [rsp + 8]",
    "add rax, r12",
    "mov [rbx + 8], rax",
    // struct sigaction of the kernel: handler, flags, restorer, mask.
    "lea rax, [rip + portoland_on_turn]",
    "mov [rsp], rax",
    "mov qword ptr [rsp + 8], {flags}",
    "lea rax, [rip + portoland_after_turn]",
    "mov [rsp + 16], rax",
    "mov qword ptr [rsp + 24], 0",
    "mov eax, {rt_sigaction}",
    "mov edi, {signal}",
    "mov rsi, rsp",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    // struct sigevent: value, signal, how (SIGEV_THREAD_ID), thread.
    "mov eax, {gettid}",
    "syscall",
    "mov qword ptr [rsp], 0",
    "mov dword ptr [rsp + 8], {signal}",
    "mov dword ptr [rsp + 12], 4",
    "mov [rsp + 16], rax",
    "mov eax, {timer_create}",
    "mov edi, {monotonic}",
    "mov rsi, rsp",
    "lea rdx, [rbx + 4]",
    "syscall",
    "mov dword ptr [rbx], {on}",
    "test rax, rax",
    // Its turns are longer then.
    "js 9f",
    // struct itimerspec: interval, first.
    "mov qword ptr [rsp], 0",
    "mov qword ptr [rsp + 8], {turn}",
    "mov qword ptr [rsp + 16], 0",
    "mov qword ptr [rsp + 24], {turn}",
    "mov eax, {timer_settime}",
    "mov edi, [rbx + 4]",
    "xor esi, esi",
    "mov rdx, rsp",
    "xor r10d, r10d",
    "syscall",
    "9: add rsp, 72",
    "pop r12",
    "pop rbx",
    "ret",

    // The handler. What it changes of the registers comes back from the signal's frame.
    "portoland_on_turn:",
    "sub rsp, 24",
    "lea rbx, [rip + portoland_leisure]",
    "cmp dword ptr [rbx], {on}",
    "jne 9f",
    "mov eax, {clock_gettime}",
    "mov edi, {thread_time}",
    "mov rsi, rsp",
    "syscall",
    "imul rax, [rsp], 1000000000",
    "add rax, [rsp + 8]",
    "sub rax, [rbx + 16]",
    "cmp rax, {ran}",
    "jb 9f",
    "mov eax, {clock_gettime}",
    "mov edi, {monotonic}",
    "mov rsi, rsp",
    "syscall",
    "imul rax, [rsp], 1000000000",
    "add rax, [rsp + 8]",
    "cmp rax, [rbx + 8]",
    "jb 6f",
    // It has been nice for long enough.
    "mov dword ptr [rbx + 24], 0",
    "mov dword ptr [rbx + 28], 0",
    "6: mov esi, [rbx + 28]",
    "test esi, esi",
    "jz 7f",
    // A pause, unless somebody waits.
    "inc dword ptr [rbx + 32]",
    "mov r12, rax",
    "mov eax, {poll}",
    "lea rdi, [rip + portoland_heeded]",
    "mov edx, {pause}",
    "syscall",
    "test rax, rax",
    "jz 8f",
    "js 7f",
    "mov dword ptr [rbx + 28], 0",
    "mov dword ptr [rbx + 36], 1",
    "movabs rax, {waited_for}",
    "add rax, r12",
    "cmp rax, [rbx + 8]",
    "jae 7f",
    "mov [rbx + 8], rax",
    "7:",
    // A niceness that grows has the kernel choose anew.
    "mov eax, {setpriority}",
    "xor edi, edi",
    "xor esi, esi",
    "mov edx, [rbx + 24]",
    "dec edx",
    "syscall",
    "mov eax, {setpriority}",
    "xor edi, edi",
    "xor esi, esi",
    "mov edx, [rbx + 24]",
    "syscall",
    // What this took is not the program's turn: it would never come to anything if it were as long.
    "8: mov eax, {clock_gettime}",
    "mov edi, {thread_time}",
    "mov rsi, rsp",
    "syscall",
    "imul rax, [rsp], 1000000000",
    "add rax, [rsp + 8]",
    "mov [rbx + 16], rax",
    "9: add rsp, 24",
    "ret",

    "portoland_after_turn:",
    "mov eax, {rt_sigreturn}",
    "syscall",
    ".popsection",
    listen = const word(LISTEN_FDS, 0),
    listen_rest = const word(LISTEN_FDS, 3),
    handover = const word(HANDOVER, 0),
    handover_rest = const word(HANDOVER, 10),
    names_rest = const word(LISTEN_FDNAMES, 7),
    readable = const READABLE,
    first = const FIRST,
    pidfd = const start("pidfd"),
    link = const start("link"),
    listener = const start("listener"),
    client = const start("client"),
    most = const MOST,
    pause = const PAUSE.as_millis() as u64,
    waited_for = const AT_MOST_WAITED_FOR.as_nanos() as u64,
    poll = const libc::SYS_poll,
    at_most = const AT_MOST.as_nanos() as u64,
    nice = const NICE,
    short = const SHORT.as_nanos() as u64,
    turn = const TURN.as_nanos() as u64,
    ran = const RAN.as_nanos() as u64,
    signal = const SIGNAL,
    // SA_RESTORER, SA_RESTART
    flags = const 0x0400_0000 | libc::SA_RESTART,
    on = const ON,
    monotonic = const libc::CLOCK_MONOTONIC,
    thread_time = const libc::CLOCK_THREAD_CPUTIME_ID,
    sched_getattr = const libc::SYS_sched_getattr,
    sched_setattr = const libc::SYS_sched_setattr,
    setpriority = const libc::SYS_setpriority,
    clock_gettime = const libc::SYS_clock_gettime,
    rt_sigaction = const libc::SYS_rt_sigaction,
    rt_sigreturn = const libc::SYS_rt_sigreturn,
    gettid = const libc::SYS_gettid,
    timer_create = const libc::SYS_timer_create,
    timer_settime = const libc::SYS_timer_settime,
);

#[cfg(test)]
unsafe extern "C" {
    fn portoland_begin_leisure(at_most_ns: u64);
    fn portoland_heed(names: *const std::ffi::c_char);
}

/// Heeds those of these names that may come to wait, as the program's first instructions do; the numbers.
#[cfg(test)]
pub fn heed_by_names(names: &std::ffi::CStr) -> Vec<RawFd> {
    // SAFETY: reads the string and, at its end, up to three bytes more, which the caller has behind it; writes to `HEEDED` and `STATE`.
    unsafe { portoland_heed(names.as_ptr()) }
    let heeded = STATE.heeded.load(Ordering::Relaxed) as usize;
    let number = |place: &AtomicU64| place.load(Ordering::Relaxed) as u32 as RawFd;
    HEEDED.iter().take(heeded).map(number).collect()
}

/// Begins one for the calling thread; there is one per process at a time.
#[cfg(test)]
pub fn begin(at_most: std::time::Duration) {
    STATE.nice.store(NICE, Ordering::Relaxed);
    STATE.chosen.store(0, Ordering::Relaxed);
    STATE.pauses.store(0, Ordering::Relaxed);
    STATE.waited_for.store(0, Ordering::Relaxed);
    // SAFETY: keeps what the C convention says is kept, and writes to its own stack and to `STATE`.
    unsafe { portoland_begin_leisure(at_most.as_nanos() as u64) }
}

/// When the last turn began, in processor time of the thread.
#[cfg(test)]
pub fn chosen() -> u64 {
    STATE.chosen.load(Ordering::SeqCst)
}

/// How often it has paused, and whether it was seen that somebody waits.
#[cfg(test)]
pub fn pauses() -> (u32, bool) {
    let waited_for = STATE.waited_for.load(Ordering::SeqCst) != 0;
    (STATE.pauses.load(Ordering::SeqCst), waited_for)
}

/// The timer's signal, at once.
#[cfg(test)]
pub fn signal() {
    // SAFETY: only a signal, for this thread, which has its handler.
    assert_eq!(unsafe { libc::raise(SIGNAL) }, 0);
}

/// Heeds these from now on, if it pauses at all. While [`Quiet`]: they are what it heeded before, under other numbers.
pub fn heed(who: impl Iterator<Item = RawFd>) {
    if STATE.heeded.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut places = HEEDED.iter();
    let mut heeded = 0;
    for fd in who {
        let Some(place) = places.next() else {
            heeded = 0;
            break;
        };
        place.store(READABLE | u64::from(fd.cast_unsigned()), Ordering::Relaxed);
        heeded += 1;
    }
    STATE.heeded.store(heeded, Ordering::Relaxed);
}

/// What there was of one.
#[derive(Debug)]
pub struct Ended {
    pub pauses: u32,
    pub waited_for: bool,
}

/// Ends it: no signal of it does anything afterwards. None if there was none. For the thread that began it.
pub fn end() -> Option<Ended> {
    // The handler runs on this thread, so before this or after.
    if STATE.phase.swap(OFF, Ordering::SeqCst) == OFF {
        return None;
    }
    // Without one the number is none of ours.
    if let timer @ 0.. = STATE.timer.swap(NONE, Ordering::Relaxed) {
        // SAFETY: a timer of our own, deleted once.
        unsafe { libc::syscall(libc::SYS_timer_delete, libc::c_long::from(timer)) };
    }
    Some(Ended {
        pauses: STATE.pauses.load(Ordering::Relaxed),
        waited_for: STATE.waited_for.load(Ordering::Relaxed) != 0,
    })
}

/// As long as it lives, this thread gets none of the timer's signals; one that was sent comes afterwards.
pub struct Quiet(libc::sigset_t);

impl Quiet {
    pub fn begin() -> Self {
        // SAFETY: both sets are variables of ours, and a set of zeros is a set.
        unsafe {
            let mut ours: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut ours, SIGNAL);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const ours, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: the set is what `begin` was told.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}
