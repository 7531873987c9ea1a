//! The ways to hurt an engine, each at whatever instruction it happens to be.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use portolan::Node;
use rustix::process::{Pid, Signal, kill_process};

use super::clock::now_ns;
use super::tracee;

/// The kinds of faults that end an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// A segmentation fault, at any instruction.
    Crash,
    /// An endless loop: told to by its daemon, between two rounds.
    Hang,
    /// An endless loop, at any instruction.
    Spin,
    /// SIGSTOP.
    Stop,
    /// A system call that never returns.
    Block,
    /// Its control group is frozen.
    Freeze,
    /// Its daemon resets the queue.
    Reset,
}

/// What was done.
#[derive(Debug)]
pub struct Injected {
    /// CLOCK_MONOTONIC of the moment.
    pub at_ns: u64,
    /// Undone when dropped, where there is something to undo.
    _frozen: Option<Frozen>,
}

impl Fault {
    /// Hurts the process `pid`, engine 0 of the daemon behind `socket`.
    pub fn inject(self, pid: i32, socket: &Path) -> Result<Injected> {
        let mut frozen = None;
        let at_ns = match self {
            Self::Kill => signal(pid, Signal::KILL)?,
            Self::Stop => signal(pid, Signal::STOP)?,
            Self::Crash => tracee::segfault(pid)?,
            Self::Spin => tracee::spin(pid)?,
            Self::Block => tracee::block(pid)?,
            Self::Hang => by_daemon(socket, "hang")?,
            Self::Reset => by_daemon(socket, "reset")?,
            Self::Freeze => {
                let group = Frozen::prepare(pid)?;
                let at = now_ns();
                group.freeze()?;
                frozen = Some(group);
                at
            }
        };
        Ok(Injected {
            at_ns,
            _frozen: frozen,
        })
    }
}

/// Sends a signal; says when.
pub fn signal(pid: i32, signal: Signal) -> Result<u64> {
    let at = now_ns();
    let pid = Pid::from_raw(pid).context("a process id")?;
    kill_process(pid, signal).with_context(|| format!("{signal:?}"))?;
    Ok(at)
}

fn by_daemon(socket: &Path, kind: &str) -> Result<u64> {
    let node = Node::attach(socket)?;
    let at = now_ns();
    node.inject_fault(0, kind)?;
    Ok(at)
}

/// A control group of one process, as container managers pause containers.
#[derive(Debug)]
struct Frozen {
    group: PathBuf,
}

impl Frozen {
    /// Whether this machine has what it takes.
    fn root() -> Option<PathBuf> {
        ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            .map(PathBuf::from)
            .into_iter()
            .find(|root| {
                root.join("cgroup.procs").exists() && root.join("cgroup.controllers").exists()
            })
    }

    fn prepare(pid: i32) -> Result<Self> {
        let root = Self::root().context("there is no cgroup2 file system")?;
        let group = root.join(format!("portolan-faults-{pid}"));
        fs::create_dir(&group).with_context(|| group.display().to_string())?;
        let frozen = Self { group };
        fs::write(frozen.group.join("cgroup.procs"), pid.to_string()).context("cgroup.procs")?;
        Ok(frozen)
    }

    fn freeze(&self) -> Result<()> {
        fs::write(self.group.join("cgroup.freeze"), "1").context("cgroup.freeze")
    }
}

/// Whether [`Fault::Freeze`] can be done here.
pub fn can_freeze() -> bool {
    Frozen::root().is_some()
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join("cgroup.freeze"), "0");
        // Busy for a moment after its process died.
        for _ in 0..100 {
            match fs::remove_dir(&self.group) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    fn cpu_ns(pid: i32) -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    }

    // A process that computes is frozen with its group. Expect: it uses no more processor time until the fault is undone; the group is gone
    // afterwards. Where there are no control groups, nothing is to be seen.
    #[test]
    fn a_frozen_process_stands_still() {
        if !can_freeze() {
            return;
        }
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        let injected = Fault::Freeze.inject(pid, Path::new("")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let before = cpu_ns(pid);
            std::thread::sleep(Duration::from_millis(50));
            if cpu_ns(pid) == before {
                break;
            }
            assert!(Instant::now() < deadline, "it computes on");
        }
        let frozen = cpu_ns(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(frozen > 0);
        drop(injected);
        let group = Frozen::root()
            .unwrap()
            .join(format!("portolan-faults-{pid}"));
        assert!(!group.exists());
    }
}
