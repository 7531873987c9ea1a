//! A child that is born without copying its parent. An `unsafe` island.
//!
//! Problem: the next standby is started when its predecessor has just taken over, that is while applications wait for what a death has
//! held up. `fork` copies our page tables and `exec` throws the copy away; both happen in the kernel, where a kernel that does not preempt
//! lets nobody else have the core: 1.7 and 2.6 ms, seen as the longest gap between deliveries on a machine without a core to spare.
//!
//! Idea: the child runs in our memory until it executes another program (`clone` with CLONE_VM and CLONE_VFORK, as posix_spawn does), on a
//! stack of its own, while the thread that made it waits. Nothing is copied, nothing thrown away.
//!
//! Rejected: posix_spawn itself, which cannot make a child give up its user and its capabilities; having the child do that once it runs the
//! new program, which would be root for its first instructions; and a small process that forks for us, whose children would not be
//! ours to wait for.
//!
//! What must hold between birth and exec, because both share memory: the child allocates nothing, takes no lock, does not return from
//! its function and runs no signal handler of ours (all signals are blocked before it is born; its handlers, which are its own copy, go
//! before they are let through). A change of user marks the memory as not to be looked at by others of that user (`PR_SET_DUMPABLE`),
//! which is right while it is shared and taken back afterwards.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Enough for the few calls before exec, in debug builds too.
const STACK_BYTES: usize = 128 << 10;
/// Linux has signals 1 to 64.
const LAST_SIGNAL: libc::c_int = 64;

/// What becomes of a child.
pub struct Plan<'p> {
    /// The program.
    pub program: &'p CStr,
    /// Its arguments, its own name first.
    pub arguments: &'p [CString],
    /// Its environment, `NAME=value`.
    pub environment: &'p [CString],
    /// Whether `before` gives up our user. Births of one process at the same time must not: one would undo another's marking of the memory.
    pub changes_user: bool,
    /// Runs in the child before exec, under the rules above.
    pub before: &'p dyn Fn() -> io::Result<()>,
}

/// What the child reads and writes of ours.
struct Shared<'p> {
    plan: &'p Plan<'p>,
    arguments: *const *const libc::c_char,
    environment: *const *const libc::c_char,
    /// Why it did not get to the other program; 0: it did.
    error: libc::c_int,
}

fn pointers(texts: &[CString]) -> Vec<*const libc::c_char> {
    let all = texts.iter().map(|text| text.as_ptr());
    all.chain(std::iter::once(ptr::null())).collect()
}

/// Starts it. The process id, and a pidfd that is closed at exec.
///
/// # Errors
/// The system's, also what the child met before it executed the program; then there is no child.
pub fn bear(plan: &Plan<'_>) -> io::Result<(i32, OwnedFd)> {
    let (arguments, environment) = (pointers(plan.arguments), pointers(plan.environment));
    let mut shared = Shared {
        plan,
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        error: 0,
    };
    // u128: a stack must be aligned to 16 bytes.
    let mut stack = vec![0_u128; STACK_BYTES / size_of::<u128>()];
    let mut pidfd: RawFd = -1;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;

    // SAFETY: PR_GET_DUMPABLE and PR_SET_DUMPABLE touch no memory; the signal sets are ours. The child gets a stack that outlives it in our
    // memory, because CLONE_VFORK keeps us here until it has left that memory, and for the same reason `shared` and all it points to
    // are valid and used by nobody else. `child` keeps the rules of this file.
    let (pid, failed) = unsafe {
        let dumpable = libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0);
        let (mut every, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut every);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const every, &raw mut before);
        let pid = libc::clone(
            child,
            stack.as_mut_ptr_range().end.cast(),
            flags,
            (&raw mut shared).cast(),
            &raw mut pidfd,
        );
        let failed = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        if plan.changes_user && dumpable == 1 {
            libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        }
        (pid, failed)
    };
    if pid < 0 {
        return Err(failed);
    }
    // SAFETY: the kernel made it for us, and nobody else knows of it.
    let exit = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: a variable of ours, initialised; read once more from memory, since another process wrote to it.
    let error = unsafe { ptr::read_volatile(&raw const shared.error) };
    if error != 0 {
        // It has left already, or is about to; nobody else collects it.
        // SAFETY: touches no memory of ours.
        while unsafe { libc::waitpid(pid, ptr::null_mut(), 0) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        return Err(io::Error::from_raw_os_error(error));
    }
    Ok((pid, exit))
}

/// The child, in its parent's memory, on its own stack.
extern "C" fn child(shared: *mut libc::c_void) -> libc::c_int {
    // SAFETY: what `bear` passed, which waits; see there.
    let shared = unsafe { &mut *shared.cast::<Shared<'_>>() };
    let error = turn(shared);
    // SAFETY: as above. Volatile, so that it is written before we are gone.
    unsafe {
        ptr::write_volatile(&raw mut shared.error, error);
        // Not `exit`, which would run the parent's last rites.
        libc::_exit(127)
    }
}

/// Turns the child into the other program; returns only the error that prevented it.
fn turn(shared: &Shared<'_>) -> libc::c_int {
    let number = |error: io::Error| error.raw_os_error().unwrap_or(libc::EINVAL);
    // SAFETY: plain calls on variables of this function; the handlers are this process's own copy.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        for signal in 1..=LAST_SIGNAL {
            // Those that cannot be changed have no handler.
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
    if let Err(error) = (shared.plan.before)() {
        return number(error);
    }
    // SAFETY: the program's name and both lists end with a zero and outlive the call (`bear`).
    unsafe {
        libc::execve(
            shared.plan.program.as_ptr(),
            shared.arguments,
            shared.environment,
        );
    }
    number(io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    use super::*;

    fn texts(texts: &[&str]) -> Vec<CString> {
        texts.iter().map(|t| CString::new(*t).unwrap()).collect()
    }

    fn run(
        program: &CStr,
        arguments: &[&str],
        before: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<Option<i32>> {
        let (pid, exit) = bear(&Plan {
            program,
            arguments: &texts(arguments),
            environment: &texts(&["A=b"]),
            changes_user: true,
            before,
        })?;
        assert!(Pid::from_raw(pid).is_some());
        let status = waitid(WaitId::PidFd(exit.as_fd()), WaitIdOptions::EXITED)?;
        Ok(status.and_then(|status| status.exit_status()))
    }

    // Expect: arguments and environment arrive, SIGTERM is not blocked, and what comes before exec is done in the child alone.
    #[test]
    fn a_child_is_what_was_planned() {
        let script = r#"[ "$0,$1,$A,$(pwd)" = "x,y,b,/" ] || exit 3; kill -TERM $$; exit 4"#;
        let here = std::env::current_dir().unwrap();
        let to_root = || Ok(rustix::process::chdir("/")?);
        let code = run(c"/bin/sh", &["sh", "-c", script, "x", "y"], &to_root).unwrap();
        assert_eq!(code, None, "it dies of the signal");
        assert_eq!(std::env::current_dir().unwrap(), here);
        let ended = run(c"/bin/sh", &["sh", "-c", "exit 5"], &|| Ok(())).unwrap();
        assert_eq!(ended, Some(5));
    }

    // No such program; a preparation that fails. Expect: the reason, and no child left.
    #[test]
    fn what_kept_a_child_from_its_program_is_said() {
        let error = run(c"/nowhere/at/all", &["x"], &|| Ok(())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let refuse = || Err(io::Error::from_raw_os_error(libc::EDOM));
        let error = run(c"/bin/true", &["true"], &refuse).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EDOM));
    }

    // A child that becomes another user. Expect: we stay as visible as we were.
    #[test]
    fn a_child_of_another_user_does_not_hide_us() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dumpable = || rustix::process::dumpable_behavior().unwrap();
        let before = dumpable();
        let nobody = rustix::process::Uid::from_raw(65534);
        let change = || Ok(rustix::thread::set_thread_res_uid(nobody, nobody, nobody)?);
        let script = "[ $(id -u) = 65534 ]";
        let code = run(c"/bin/sh", &["sh", "-c", script], &change).unwrap();
        // No PATH: `id` is found by the shell's own default.
        assert_eq!(code, Some(0));
        assert_eq!(dumpable(), before);
        assert!(rustix::process::geteuid().is_root());
    }
}
