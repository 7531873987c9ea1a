//! What an engine may still ask of the kernel once it has everything it was given.
//!
//! The supervisor has already made the process an unprivileged user without capabilities. Here it gives up the rest: no new
//! privileges, and only the system calls its loop needs; any other kills it, which its supervisor notices. Memory can be mapped (ports
//! come and go, the allocator grows), but never as code. It leaves no core dump, which would keep its successor waiting while hundreds of
//! megabytes of memory that is not its own are written.
//!
//! An `unsafe` island for the one call that nobody wraps.

use std::collections::BTreeMap;

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Calls that are allowed whatever their arguments.
const ALLOWED: &[libc::c_long] = &[
    // The loop: kick, doorbells, link, waiting.
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_write,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    // The socket's statistics and pending error; seals and size of memory that comes in.
    libc::SYS_getsockopt,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_close,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // The runtime: locks, random hash seeds, unwinding to a clean exit.
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[libc::c_long] = &[libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[libc::c_long] = &[];

/// Calls that are allowed as long as the protection asked for (third argument) does not say executable.
const ALLOWED_NOT_AS_CODE: &[libc::c_long] = &[libc::SYS_mmap, libc::SYS_mprotect];

fn program() -> anyhow::Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in ALLOWED.iter().chain(ALLOWED_HERE) {
        rules.insert(*call, Vec::new());
    }
    for call in ALLOWED_NOT_AS_CODE {
        let not_executable = SeccompCondition::new(
            2,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64),
            0,
        )?;
        rules.insert(*call, vec![SeccompRule::new(vec![not_executable])?]);
    }
    let ordinary = SeccompCondition::new(
        1,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        libc::SCHED_OTHER as u64,
    )?;
    rules.insert(
        libc::SYS_sched_setscheduler,
        vec![SeccompRule::new(vec![ordinary])?],
    );
    // Of itself only. What it asks for is behind a pointer, but without a capability the kernel grants nothing that matters.
    let itself = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 0)?;
    rules.insert(
        libc::SYS_sched_setattr,
        vec![SeccompRule::new(vec![itself])?],
    );
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    Ok(filter.try_into()?)
}

/// Enters the sandbox; there is no way out.
///
/// # Errors
/// If the kernel has no seccomp filters.
pub fn enter() -> anyhow::Result<()> {
    rustix::thread::set_no_new_privs(true).context("no_new_privs")?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .context("core dumps")?;
    seccompiler::apply_filter(&program()?)
        .context("the seccomp filter cannot be installed; the kernel needs CONFIG_SECCOMP_FILTER")
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use super::*;

    const CHILD: &str = "PORTOLAN_SANDBOX_TEST";

    /// Runs this test binary again, in the sandbox, doing `what`.
    fn sandboxed(what: &str) -> std::process::ExitStatus {
        Command::new(std::env::current_exe().unwrap())
            .args(["engine::sandbox::tests::child", "--exact", "--nocapture"])
            .env(CHILD, what)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap()
    }

    #[test]
    fn child() {
        let Ok(what) = std::env::var(CHILD) else {
            return;
        };
        enter().unwrap();
        let status = match what.as_str() {
            "work" => {
                portolan::turns::short();
                let grown = vec![1u8; 8 << 20];
                rustix::thread::sched_yield();
                i32::from(grown.iter().any(|byte| *byte != 1))
            }
            "open" => i32::from(std::fs::File::open("/etc/passwd").is_ok()),
            "priority" => {
                let parameters = libc::sched_param { sched_priority: 1 };
                // SAFETY: as in `be_ordinary`.
                unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) }
            }
            "spawn" => i32::from(Command::new("/bin/true").status().is_ok()),
            _ => {
                // SAFETY: an anonymous mapping at an address of the kernel's choice.
                let _ = unsafe {
                    rustix::mm::mmap_anonymous(
                        std::ptr::null_mut(),
                        4096,
                        rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::EXEC,
                        rustix::mm::MapFlags::PRIVATE,
                    )
                };
                0
            }
        };
        std::process::exit(status);
    }

    #[test]
    fn the_loop_can_work_and_nothing_else_can() {
        assert_eq!(sandboxed("work").code(), Some(0));
        for what in ["open", "spawn", "code", "priority"] {
            assert_eq!(sandboxed(what).signal(), Some(libc::SIGSYS), "{what}");
        }
    }
}
