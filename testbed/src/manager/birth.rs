//! A supervisor that is born without a copy of the process that manages it. An `unsafe` island.
//!
//! The child runs in our memory until it executes its program, on a stack of its own, while the thread that made it waits (`clone` with
//! CLONE_VM and CLONE_VFORK). posix_spawn does the same, but cannot tell the child its process id (`LISTEN_PID`, sd_listen_fds(3)).
//!
//! What must hold between birth and exec, because both share memory: the child allocates nothing, takes no lock, does not return from its
//! function, and runs no signal handler of ours (all signals are blocked before it is born, and its handlers go before they are let
//! through).

use std::ffi::{CStr, CString};
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr;

use rustix::process::{Pid, WaitOptions, waitpid};

/// The variable with the child's own process id.
pub(super) const PID: &str = "LISTEN_PID";
/// Enough for the few calls before exec, in debug builds too.
const STACK_BYTES: usize = 128 << 10;
/// Linux has signals 1 to 64.
const LAST_SIGNAL: libc::c_int = 64;
/// `LISTEN_PID=`, the digits of a process id, and a zero.
const PID_BYTES: usize = 32;

/// What becomes of a child.
pub(super) struct Plan<'p> {
    pub program: &'p CStr,
    /// Its own name first.
    pub arguments: &'p [CString],
    /// `NAME=value`.
    pub environment: &'p [CString],
    /// Its descriptors from 0 on. Those from [`super::launch::FIRST`] on are here under numbers beyond all of these.
    pub descriptors: &'p [RawFd],
    /// Whether it is told its process id.
    pub tell_pid: bool,
}

/// A child, until it is reaped.
#[derive(Debug)]
pub(super) struct Born {
    pub pid: Pid,
    /// Readable when it is dead.
    pub pidfd: OwnedFd,
}

impl Born {
    /// Waits for its death and collects it.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        loop {
            match waitpid(Some(self.pid), WaitOptions::empty()) {
                Ok(Some((_, status))) => return Ok(ExitStatus::from_raw(status.as_raw())),
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What the child reads and writes of ours.
struct Shared<'p> {
    plan: &'p Plan<'p>,
    arguments: *const *const libc::c_char,
    environment: *const *const libc::c_char,
    /// One of the environment, if it is to be told.
    pid: [u8; PID_BYTES],
    /// Why it did not get to its program; 0: it did.
    error: libc::c_int,
}

/// Starts it.
pub(super) fn bear(plan: &Plan<'_>) -> io::Result<Born> {
    let mut shared = Shared {
        plan,
        arguments: ptr::null(),
        environment: ptr::null(),
        pid: [0; PID_BYTES],
        error: 0,
    };
    let end = std::iter::once(ptr::null());
    let arguments: Vec<_> = plan.arguments.iter().map(|text| text.as_ptr()).collect();
    let arguments: Vec<_> = arguments.into_iter().chain(end.clone()).collect();
    let pid = plan.tell_pid.then_some((&raw const shared.pid).cast());
    let environment = plan.environment.iter().map(|text| text.as_ptr());
    let environment: Vec<_> = environment.chain(pid).chain(end).collect();
    (shared.arguments, shared.environment) = (arguments.as_ptr(), environment.as_ptr());
    // u128: a stack must be aligned to 16 bytes.
    let mut stack = vec![0_u128; STACK_BYTES / size_of::<u128>()];
    let mut pidfd: RawFd = -1;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;

    // SAFETY: the signal sets are ours. The child gets a stack that outlives it in our memory, because CLONE_VFORK keeps us here until it
    // has left that memory, and for the same reason `shared` and all it points to are valid and used by nobody else. `child` keeps the
    // rules of this file.
    let (pid, failed) = unsafe {
        let (mut every, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut every);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const every, &raw mut before);
        let top = stack.as_mut_ptr_range().end.cast();
        let pid = libc::clone(child, top, flags, (&raw mut shared).cast(), &raw mut pidfd);
        let failed = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        (pid, failed)
    };
    let Some(pid) = Pid::from_raw(pid.max(0)) else {
        return Err(failed);
    };
    // SAFETY: the kernel made it for us, and nobody else knows of it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let born = Born { pid, pidfd };
    // SAFETY: a variable of ours, initialised; read once more from memory, since another process wrote to it.
    let error = unsafe { ptr::read_volatile(&raw const shared.error) };
    if error != 0 {
        born.wait()?;
        return Err(io::Error::from_raw_os_error(error));
    }
    Ok(born)
}

/// The child, in its parent's memory, on its own stack.
extern "C" fn child(shared: *mut libc::c_void) -> libc::c_int {
    // SAFETY: what `bear` passed, which waits; see there.
    let shared = unsafe { &mut *shared.cast::<Shared<'_>>() };
    // SAFETY: plain system calls on variables of this function and of `bear`, which outlive them; the handlers and the table of
    // descriptors are this process's own copies.
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
        libc::setpgid(0, 0);
        // The buffer is larger than what is written; the rest stays zero.
        let _ = write!(&mut shared.pid[..], "{PID}={}", libc::getpid());
        let mut placed = true;
        for (place, source) in (0..).zip(shared.plan.descriptors) {
            placed &= libc::dup2(*source, place) >= 0;
        }
        if placed {
            libc::execve(
                shared.plan.program.as_ptr(),
                shared.arguments,
                shared.environment,
            );
        }
        let error = io::Error::last_os_error().raw_os_error();
        // Volatile, so that it is written before we are gone.
        ptr::write_volatile(&raw mut shared.error, error.unwrap_or(libc::EINVAL));
        // Not `exit`, which would run the parent's last rites.
        libc::_exit(127)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::os::fd::AsRawFd;

    use super::*;

    // A shell that says what it has. Expect: its own number, its environment, and the descriptor where it belongs.
    #[test]
    fn a_child_has_what_was_planned() {
        let mut out = tempfile::tempfile().unwrap();
        let kept = tempfile::tempfile().unwrap();
        let kept = rustix::io::fcntl_dupfd_cloexec(&kept, 50).unwrap();
        let script = r#"[ $LISTEN_PID = $$ ] && [ -e /proc/self/fd/3 ] && echo "$A""#;
        let arguments = ["sh", "-c", script].map(|text| CString::new(text).unwrap());
        let fd = out.as_raw_fd();
        let (environment, descriptors) = ([c"A=b".into()], [fd, fd, fd, kept.as_raw_fd()]);
        let plan = |program| Plan {
            program,
            arguments: &arguments,
            environment: &environment,
            descriptors: &descriptors,
            tell_pid: true,
        };
        let born = bear(&plan(c"/bin/sh")).unwrap();
        assert!(born.wait().unwrap().success());
        let mut said = String::new();
        out.rewind().unwrap();
        out.read_to_string(&mut said).unwrap();
        assert_eq!(said, "b\n");

        let error = bear(&plan(c"/nowhere/at/all")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
