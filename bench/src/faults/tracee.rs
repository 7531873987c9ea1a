//! Faults that a process does not do by itself: it is stopped between two instructions, wherever it happens to be, and sent astray.
//!
//! | fault | how |
//! |---|---|
//! | segfault | its instruction pointer becomes 0: the next instruction is fetched from where nothing is mapped |
//! | endless loop | it jumps to an instruction that jumps to itself |
//! | blocked in the kernel | it makes a futex call that nobody will ever wake: a lock that is never released |
//!
//! A signal would not do for the first: Rust's handler takes one SIGSEGV that no instruction caused for a guard page's and goes on. The
//! instructions for the others are written over the program's entry point, which ran once and never will again; the write goes through
//! `/proc/PID/mem`, so it lands in a private copy of the page, and neither the file nor another process sees it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::clock::now_ns;
use super::text::Text;

/// `jmp .`
const LOOP: [u8; 2] = [0xeb, 0xfe];
/// `syscall; jmp .`
const CALL: [u8; 4] = [0x0f, 0x05, 0xeb, 0xfe];

/// A process stopped between two instructions. It goes on when dropped.
struct Stopped {
    pid: Pid,
}

impl Stopped {
    fn stop(pid: i32) -> Result<Self> {
        let pid = Pid::from_raw(pid);
        ptrace::seize(pid, ptrace::Options::empty()).context("ptrace: seize")?;
        let stopped = Self { pid };
        ptrace::interrupt(pid).context("ptrace: interrupt")?;
        // It was not ours to wait for before; its death is reported to its parent all the same.
        waitpid(pid, Some(WaitPidFlag::__WALL)).context("ptrace: wait")?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have been killed meanwhile.
        let _ = ptrace::detach(self.pid, None);
    }
}

/// Sends the process astray. Returns when it did, CLOCK_MONOTONIC.
#[cfg(target_arch = "x86_64")]
fn astray(
    pid: i32,
    change: impl FnOnce(&mut nix::libc::user_regs_struct) -> Result<()>,
) -> Result<u64> {
    let stopped = Stopped::stop(pid)?;
    let mut registers = ptrace::getregs(stopped.pid).context("ptrace: registers")?;
    // If it is in a system call, that one is not to be made again.
    registers.orig_rax = u64::MAX;
    change(&mut registers)?;
    ptrace::setregs(stopped.pid, registers).context("ptrace: set registers")?;
    let at = now_ns();
    drop(stopped);
    Ok(at)
}

/// A true segmentation fault at whatever instruction it is.
#[cfg(target_arch = "x86_64")]
pub fn segfault(pid: i32) -> Result<u64> {
    astray(pid, |registers| {
        registers.rip = 0;
        Ok(())
    })
}

/// An endless loop from whatever instruction it is at.
#[cfg(target_arch = "x86_64")]
pub fn spin(pid: i32) -> Result<u64> {
    let spare = plant(pid, &LOOP)?;
    astray(pid, |registers| {
        registers.rip = spare;
        Ok(())
    })
}

/// Blocked in a system call for ever.
#[cfg(target_arch = "x86_64")]
pub fn block(pid: i32) -> Result<u64> {
    let spare = plant(pid, &CALL)?;
    let memory = File::open(format!("/proc/{pid}/mem")).context("its memory")?;
    astray(pid, |registers| {
        let word = registers.rsp & !7;
        let mut value = [0; 4];
        memory
            .read_exact_at(&mut value, word)
            .context("its stack")?;
        registers.rip = spare;
        registers.rax = nix::libc::SYS_futex as u64;
        registers.rdi = word;
        registers.rsi = (nix::libc::FUTEX_WAIT | nix::libc::FUTEX_PRIVATE_FLAG) as u64;
        registers.rdx = u64::from(u32::from_le_bytes(value));
        registers.r10 = 0;
        Ok(())
    })
}

/// Writes instructions where none will be missed; says where.
#[cfg(target_arch = "x86_64")]
fn plant(pid: i32, instructions: &[u8]) -> Result<u64> {
    let text = Text::of(pid)?;
    text.write(text.entry(), instructions)?;
    Ok(text.entry())
}

#[cfg(not(target_arch = "x86_64"))]
mod elsewhere {
    use anyhow::{Result, bail};

    const WHY: &str = "this fault is made of x86-64 instructions; this machine has others";

    pub fn segfault(_: i32) -> Result<u64> {
        bail!(WHY)
    }
    pub fn spin(_: i32) -> Result<u64> {
        bail!(WHY)
    }
    pub fn block(_: i32) -> Result<u64> {
        bail!(WHY)
    }
}
#[cfg(not(target_arch = "x86_64"))]
pub use elsewhere::{block, segfault, spin};

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    fn victim() -> Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    /// Its state as in /proc/PID/stat, and its CPU time in ticks.
    fn state(child: &Child) -> (String, u64) {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[0].to_owned(), fields[11].parse().unwrap())
    }

    fn until(mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !condition() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// It runs the program we started, and not our own copy any more.
    fn started(child: &Child) {
        let exe = format!("/proc/{}/exe", child.id());
        until(|| {
            std::fs::read_link(&exe)
                .is_ok_and(|exe| exe.ends_with("sleep") || exe.ends_with("coreutils"))
        });
        until(|| state(child).0 == "S");
    }

    #[test]
    fn a_segfault_is_one() {
        let mut child = victim();
        started(&child);
        segfault(child.id().cast_signed()).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(nix::libc::SIGSEGV));
    }

    #[test]
    fn a_loop_uses_its_processor_and_a_blocked_call_does_not() {
        let mut child = victim();
        started(&child);
        spin(child.id().cast_signed()).unwrap();
        let (_, before) = state(&child);
        until(|| state(&child).1 > before + 3);
        block(child.id().cast_signed()).unwrap();
        until(|| state(&child).0 == "S");
        let (_, before) = state(&child);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(state(&child), ("S".to_owned(), before));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
