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

use super::{AT_MOST, AT_MOST_WAITED_FOR, CHOICE, ENOUGH, NICE, PAUSE, RAN, SHORT, SIGNALS, TURN};
use crate::supervisor::store::inherit::{FIRST, HANDOVER, LISTEN_FDNAMES, LISTEN_FDS};

/// Not used by glibc (32, 33), nor by anybody here.
const SIGNAL: i32 = 41;

const OFF: u32 = 0;
const ON: u32 = 1;
/// No timer, no descriptor: the kernel's numbers begin with 0.
const NONE: i32 = -1;

/// What handler and program share; they are one thread.
#[repr(C)]
struct State {
    phase: AtomicU32,
    timer: AtomicI32,
    /// Until when it is nice; CLOCK_MONOTONIC nanoseconds.
    until: AtomicU64,
    /// The thread's processor time when the kernel last chose, or the last turn ended.
    chosen: AtomicU64,
    /// How nice it is.
    nice: AtomicI32,
    /// How many `epoll` watches; with none it does not pause.
    heeded: AtomicU32,
    /// How often it has paused.
    pauses: AtomicU32,
    /// Was it seen that somebody waits?
    waited_for: AtomicU32,
    /// Watches whoever may come to wait.
    epoll: AtomicI32,
    /// Signals since the last pause before which others had come in between.
    in_company: AtomicU32,
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
    epoll: AtomicI32::new(NONE),
    in_company: AtomicU32::new(0),
};

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
    "movabs rdi, {at_most}",
    "call portoland_begin_leisure",
    "test rbp, rbp",
    "jz 6f",
    "mov rdi, rbp",
    "mov esi, {first}",
    "call portoland_heed",
    "6: mov rdx, r15",
    "jmp _start",

    // extern "C" fn(names, separated by colons; the descriptor that the first is the name of)
    ".globl portoland_heed",
    "portoland_heed:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "sub rsp, 16",
    "mov r12, rdi",
    "mov ebx, esi",
    "xor ebp, ebp",
    "mov eax, {epoll_create}",
    "mov edi, {cloexec}",
    "syscall",
    "test rax, rax",
    "js 9f",
    "mov r13d, eax",
    "2: mov eax, [r12]",
    "cmp eax, {pidfd}",
    "je 3f",
    "cmp eax, {link}",
    "je 3f",
    "cmp eax, {listener}",
    "je 3f",
    "cmp eax, {client}",
    "jne 4f",
    // struct epoll_event: what is watched for, whatever, without a hole.
    "3: mov dword ptr [rsp], {readable}",
    "mov qword ptr [rsp + 4], 0",
    "mov eax, {epoll_ctl}",
    "mov edi, r13d",
    "mov esi, {add}",
    "mov edx, ebx",
    "mov r10, rsp",
    "syscall",
    // Nothing that can be watched: nobody can wait there.
    "test rax, rax",
    "js 4f",
    "inc ebp",
    "4: mov al, [r12]",
    "inc r12",
    "test al, al",
    "jz 5f",
    "cmp al, ':'",
    "jne 4b",
    "inc ebx",
    "jmp 2b",
    // Its number must be none of those that have names, open or not.
    "5: mov eax, {fcntl}",
    "mov edi, r13d",
    "mov esi, {dup}",
    "lea edx, [rbx + 1]",
    "syscall",
    "mov r12, rax",
    "mov eax, {close}",
    "mov edi, r13d",
    "syscall",
    "test r12, r12",
    "js 9f",
    "mov [rip + portoland_leisure + 40], r12d",
    "mov [rip + portoland_leisure + 28], ebp",
    "9: add rsp, 16",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
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
    // struct itimerspec: no interval, the first.
    "mov qword ptr [rsp], 0",
    "mov qword ptr [rsp + 8], 0",
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
    "sub rsp, 56",
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
    "cmp dword ptr [rbx + 28], 0",
    "jne 4f",
    // Nobody is heeded. If others came first, the rest of its turn is still its.
    "mov r13d, {choice}",
    "sub r13, rax",
    "cmp rax, {ran}",
    "jb 8f",
    "jmp 5f",
    // If others came in between, the rest of its turn is still its; but not for ever.
    "4: mov r13d, {turn}",
    "sub r13, rax",
    "cmp rax, {enough}",
    "jae 5f",
    "inc dword ptr [rbx + 44]",
    "cmp dword ptr [rbx + 44], {signals}",
    "jb 8f",
    "5: mov eax, {clock_gettime}",
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
    "6: cmp dword ptr [rbx + 28], 0",
    "je 7f",
    // A pause, unless somebody waits.
    "inc dword ptr [rbx + 32]",
    "mov dword ptr [rbx + 44], 0",
    "mov r12, rax",
    "mov eax, {epoll_wait}",
    "mov edi, [rbx + 40]",
    "lea rsi, [rsp + 16]",
    "mov edx, 1",
    "mov r10d, {pause}",
    "syscall",
    "mov r13d, {turn}",
    "test rax, rax",
    "jz 6f",
    "js 7f",
    "mov dword ptr [rbx + 28], 0",
    "mov dword ptr [rbx + 36], 1",
    "movabs rax, {waited_for}",
    "add rax, r12",
    "cmp rax, [rbx + 8]",
    "jae 7f",
    "mov [rbx + 8], rax",
    // A niceness that grows has the kernel choose anew.
    "7: mov eax, {setpriority}",
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
    "mov r13d, {choice}",
    // What this took is not the program's turn: it would never come to anything if it were as long.
    "6: mov eax, {clock_gettime}",
    "mov edi, {thread_time}",
    "mov rsi, rsp",
    "syscall",
    "imul rax, [rsp], 1000000000",
    "add rax, [rsp + 8]",
    "mov [rbx + 16], rax",
    // struct itimerspec: no interval, the next.
    "8: mov qword ptr [rsp + 16], 0",
    "mov qword ptr [rsp + 24], 0",
    "mov qword ptr [rsp + 32], 0",
    "mov [rsp + 40], r13",
    "mov eax, {timer_settime}",
    "mov edi, [rbx + 4]",
    "xor esi, esi",
    "lea rdx, [rsp + 16]",
    "xor r10d, r10d",
    "syscall",
    "9: add rsp, 56",
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
    readable = const libc::EPOLLIN,
    epoll_create = const libc::SYS_epoll_create1,
    epoll_ctl = const libc::SYS_epoll_ctl,
    epoll_wait = const libc::SYS_epoll_wait,
    cloexec = const libc::EPOLL_CLOEXEC,
    add = const libc::EPOLL_CTL_ADD,
    fcntl = const libc::SYS_fcntl,
    dup = const libc::F_DUPFD_CLOEXEC,
    close = const libc::SYS_close,
    first = const FIRST,
    pidfd = const start("pidfd"),
    link = const start("link"),
    listener = const start("listener"),
    client = const start("client"),
    pause = const PAUSE.as_millis() as u64,
    waited_for = const AT_MOST_WAITED_FOR.as_nanos() as u64,
    at_most = const AT_MOST.as_nanos() as u64,
    nice = const NICE,
    short = const SHORT.as_nanos() as u64,
    turn = const TURN.as_nanos() as u64,
    choice = const CHOICE.as_nanos() as u64,
    ran = const RAN.as_nanos() as u64,
    enough = const ENOUGH.as_nanos() as u64,
    signals = const SIGNALS,
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
    fn portoland_heed(names: *const std::ffi::c_char, first: std::ffi::c_int);
}

/// Heeds those of these names that may come to wait, as the program's first instructions do; the first is that of this descriptor. How many there
/// are, and the descriptor that watches them.
#[cfg(test)]
pub fn heed(names: &std::ffi::CStr, first: RawFd) -> (u32, RawFd) {
    STATE.heeded.store(0, Ordering::Relaxed);
    close(STATE.epoll.swap(NONE, Ordering::Relaxed));
    // SAFETY: reads the string and, at its end, up to three bytes more, which the caller has behind it; writes to its own stack and to `STATE`.
    unsafe { portoland_heed(names.as_ptr(), first) }
    let epoll = STATE.epoll.load(Ordering::Relaxed);
    (STATE.heeded.load(Ordering::Relaxed), epoll)
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

/// When the kernel was last asked to choose, in processor time of the thread.
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

/// What there was of one.
#[derive(Debug)]
pub struct Ended {
    pub pauses: u32,
    pub waited_for: bool,
}

/// Ends it: no signal of it does anything afterwards. None if there was none. For the thread that began it.
pub fn end() -> Option<Ended> {
    // The handler runs on this thread, so before this or after.
    let phase = STATE.phase.swap(OFF, Ordering::SeqCst);
    STATE.heeded.store(0, Ordering::Relaxed);
    close(STATE.epoll.swap(NONE, Ordering::Relaxed));
    if phase == OFF {
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

/// What this file opened, or nothing.
fn close(fd: RawFd) {
    if fd != NONE {
        // SAFETY: a descriptor of our own that nobody else knows, closed once.
        unsafe { libc::close(fd) };
    }
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
