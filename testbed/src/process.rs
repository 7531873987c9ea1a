//! Running programs with a deadline, and finding processes to end them for certain.

use std::collections::HashSet;
use std::fs;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::cancel;

/// How often a wait looks up from the kernel to see whether it was cancelled.
const CANCEL_CHECK: Duration = Duration::from_millis(100);
/// The pause between two looks at something that cannot be polled.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// What a program left behind.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Everything it wrote to standard output.
    pub stdout: String,
    /// Everything it wrote to standard error.
    pub stderr: String,
}

/// What a wait does when [`cancel::requested`] becomes true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCancel {
    /// Give up with an error: the ordinary case.
    Stop,
    /// Go on to the deadline: cleaning up.
    Ignore,
}

/// Waits until `child` has ended; `None` when `deadline` came first.
pub fn wait_child(
    child: &mut Child,
    deadline: Instant,
    on_cancel: OnCancel,
) -> Result<Option<ExitStatus>> {
    let pid = Pid::from_child(child);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if on_cancel == OnCancel::Stop && cancel::requested() {
            bail!("interrupted");
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
        let timeout = Timespec::try_from(left.min(CANCEL_CHECK)).context("poll timeout")?;
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("poll on a pidfd"),
        }
    }
}

/// Runs a program to its end and returns what it wrote; an error when it cannot start or does not end in time (it
/// is then killed with its process group).
pub fn run(command: &mut Command, within: Duration) -> Result<Finished> {
    run_with(command, within, OnCancel::Stop)
}

/// [`run`], and a non-zero exit is an error that carries the program's standard error. Returns standard output.
pub fn run_ok(command: &mut Command, within: Duration) -> Result<String> {
    let finished = run(command, within)?;
    require_success(command, finished)
}

/// [`run_ok`] for cleaning up: goes on although the process was told to stop.
pub(crate) fn clean_up_with(command: &mut Command, within: Duration) -> Result<String> {
    let finished = run_with(command, within, OnCancel::Ignore)?;
    require_success(command, finished)
}

fn require_success(command: &Command, finished: Finished) -> Result<String> {
    if !finished.status.success() {
        bail!(
            "{}: {}\n{}{}",
            describe(command),
            finished.status,
            finished.stdout,
            finished.stderr
        );
    }
    Ok(finished.stdout)
}

fn run_with(command: &mut Command, within: Duration, on_cancel: OnCancel) -> Result<Finished> {
    // Files, not pipes: a grandchild that keeps them open cannot keep us waiting.
    let mut stdout = tempfile::tempfile().context("temporary file")?;
    let mut stderr = tempfile::tempfile().context("temporary file")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {}", describe(command)))?;
    let waited = wait_child(&mut child, Instant::now() + within, on_cancel);
    if !matches!(waited, Ok(Some(_))) {
        kill_group(&mut child);
    }
    let text = |file: &mut fs::File| -> Result<String> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let (stdout, stderr) = (text(&mut stdout)?, text(&mut stderr)?);
    match waited {
        Ok(Some(status)) => Ok(Finished {
            status,
            stdout,
            stderr,
        }),
        Ok(None) => bail!(
            "{} did not end within {within:?}\n{stdout}{stderr}",
            describe(command)
        ),
        Err(error) => Err(error.context(describe(command))),
    }
}

/// A command as one would type it, for messages.
pub fn describe(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Kills a child that leads its own process group, with the whole group, and reaps it.
pub fn kill_group(child: &mut Child) {
    // A group whose last member is gone is not an error.
    let _ = rustix::process::kill_process_group(Pid::from_child(child), Signal::KILL);
    let _ = child.kill();
    let _ = child.wait();
}

/// One line of the process table.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its process id.
    pub pid: i32,
    /// What it calls itself, at most 15 bytes.
    pub name: String,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    /// What it has used of the processors, in user and system mode, in clock ticks.
    pub ticks: u64,
}

/// Every process that is not a zombie.
pub fn table() -> Vec<Entry> {
    let Ok(proc) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    proc.flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(entry)
        .collect()
}

fn entry(pid: i32) -> Option<Entry> {
    parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// A line as in `proc_pid_stat(5)`; `None` also of a zombie.
fn parse(pid: i32, stat: &str) -> Option<Entry> {
    // The name between the parentheses may hold anything, parentheses too.
    let (head, rest) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let (parent, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let mut times = fields.skip(8).map(|ticks| ticks.parse::<u64>().ok());
    Some(Entry {
        pid,
        name: name.to_owned(),
        parent,
        group,
        ticks: times.next()?? + times.next()??,
    })
}

/// `root`'s process group and all its descendants, itself included.
pub(crate) fn family(root: i32) -> HashSet<i32> {
    let table = table();
    let mut family: HashSet<i32> = table
        .iter()
        .filter(|e| e.pid == root || e.group == root)
        .map(|e| e.pid)
        .collect();
    loop {
        let before = family.len();
        for e in &table {
            if family.contains(&e.parent) {
                family.insert(e.pid);
            }
        }
        if family.len() == before {
            return family;
        }
    }
}

/// Kills whatever `select` names until it names nobody, or says who is left after `within`.
pub(crate) fn kill_until_gone(
    mut select: impl FnMut() -> HashSet<i32>,
    within: Duration,
) -> Result<()> {
    let deadline = Instant::now() + within;
    let me = std::process::id();
    loop {
        let mut left = select();
        left.retain(|&pid| u32::try_from(pid).is_ok_and(|pid| pid != me));
        if left.is_empty() {
            return Ok(());
        }
        for pid in left.iter().copied().filter_map(Pid::from_raw) {
            // It may have ended meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
        if Instant::now() > deadline {
            bail!("processes {left:?} survive SIGKILL");
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed_at_its_deadline() {
        let started = Instant::now();
        let mut command = Command::new("sh");
        command.args(["-c", "echo said; sleep 60 & wait"]);
        let error = run(&mut command, Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("said"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_failure_carries_what_the_program_said() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo reason >&2; exit 3"]);
        let error = run_ok(&mut command, Duration::from_secs(10)).unwrap_err();
        assert!(error.to_string().contains("reason"), "{error}");
    }

    // A name that looks like the end of a name; lines that end early; a zombie. Expect: what it says; nothing.
    #[test]
    fn a_name_may_hold_anything() {
        let stat = "17 (a) R (b) S 1 2 3 4 5 6 7 8 9 10 1200 34 0 0";
        let entry = parse(17, stat).unwrap();
        assert_eq!((entry.pid, entry.name.as_str()), (17, "a) R (b"));
        assert_eq!((entry.parent, entry.group, entry.ticks), (1, 2, 1234));
        for end in [0, 4, 12, 20, 36, stat.find("34").unwrap()] {
            assert!(parse(17, &stat[..end]).is_none(), "{end}");
        }
        assert!(parse(17, &stat.replace('S', "Z")).is_none());
    }

    #[test]
    fn a_family_is_killed_even_where_a_child_left_the_group() {
        let mut leader = Command::new("sh")
            .args(["-c", "setsid sleep 60 & sleep 60 & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let pid = i32::try_from(leader.id()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while family(pid).len() < 3 {
            assert!(Instant::now() < deadline, "the children never started");
            std::thread::sleep(RETRY_PAUSE);
        }
        let members = family(pid);
        kill_until_gone(
            || {
                let now: HashSet<i32> = table().iter().map(|e| e.pid).collect();
                members.intersection(&now).copied().collect()
            },
            Duration::from_secs(10),
        )
        .unwrap();
        leader.wait().unwrap();
        assert!(members.iter().all(|&pid| entry(pid).is_none()));
    }
}
