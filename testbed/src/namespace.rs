//! One network namespace: made, entered, emptied of processes, removed.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::process;

/// Where `ip netns` keeps its handles.
const HANDLES: &str = "/run/netns";
/// Bound on one `ip` command.
pub(crate) const STEP: Duration = Duration::from_secs(20);
/// Bound on the death of what runs in a namespace.
const DEATH: Duration = Duration::from_secs(10);

/// A named network namespace. It exists until [`Namespace::remove`].
#[derive(Clone, Debug)]
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes it. The caller holds the testbed's lock: the first `ip netns add` of a machine also sets up the
    /// directory of handles, and two of them at once can fail.
    pub fn create(name: &str) -> Result<Self> {
        // To its end even when we are told to stop: half a namespace is harder to remove than a whole one.
        process::clean_up_with(Command::new("ip").args(["netns", "add", name]), STEP)?;
        Ok(Self::existing(name))
    }

    /// A namespace somebody else made.
    pub fn existing(name: &str) -> Self {
        Self {
            name: name.to_owned(),
        }
    }

    /// Every namespace on this machine whose name `wanted` accepts.
    pub fn list(wanted: impl Fn(&str) -> bool) -> Vec<Self> {
        let Ok(handles) = fs::read_dir(HANDLES) else {
            return Vec::new();
        };
        handles
            .flatten()
            .filter_map(|handle| handle.file_name().into_string().ok())
            .filter(|name| wanted(name))
            .map(|name| Self { name })
            .collect()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn handle(&self) -> PathBuf {
        PathBuf::from(HANDLES).join(&self.name)
    }

    /// A command that runs inside, with its own view of `/sys`.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// `ip` with this namespace as its own; no argument holds a space.
    pub fn ip(&self, arguments: &str) -> Result<()> {
        let mut command = Command::new("ip");
        command.args(["-n", &self.name]);
        command.args(arguments.split_whitespace());
        process::run_ok(&mut command, STEP).map(drop)
    }

    /// Runs `work` on a fresh thread inside and returns what it returns; a panic goes on in the caller.
    pub fn run_inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let handle = File::open(self.handle())
            .with_context(|| format!("network namespace {} is gone", self.name))?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                move_into_link_name_space(handle.as_fd(), Some(LinkNameSpaceType::Network))
                    .map(|()| work())
            });
            match thread.join() {
                Ok(result) => {
                    result.with_context(|| format!("cannot enter network namespace {}", self.name))
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Moves the calling thread inside for good, with its own view of `/sys`, as `ip netns exec` does for a process. What it starts is inside,
    /// too.
    pub fn enter(&self) -> Result<()> {
        let handle = File::open(self.handle())
            .with_context(|| format!("network namespace {} is gone", self.name))?;
        let enter = || -> rustix::io::Result<()> {
            move_into_link_name_space(handle.as_fd(), Some(LinkNameSpaceType::Network))?;
            // SAFETY: no descriptor is unshared; the thread's directory and mounts become its own.
            unsafe { unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS)? };
            // What is mounted inside is nobody else's.
            let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
            mount_change("/", slave)?;
            unmount("/sys", UnmountFlags::DETACH)?;
            mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)
        };
        enter().with_context(|| format!("cannot enter network namespace {}", self.name))
    }

    /// Every process whose network this is.
    pub fn processes(&self) -> HashSet<i32> {
        let Ok(own) = fs::metadata(self.handle()) else {
            return HashSet::new();
        };
        process::table()
            .iter()
            .map(|entry| entry.pid)
            .filter(|pid| {
                fs::metadata(format!("/proc/{pid}/ns/net"))
                    .is_ok_and(|of| of.dev() == own.dev() && of.ino() == own.ino())
            })
            .collect()
    }

    /// Kills what runs inside, then removes it. Removing one that is gone is not an error.
    pub fn remove(&self) -> Result<()> {
        if !self.handle().exists() {
            return Ok(());
        }
        process::kill_until_gone(|| self.processes(), DEATH)
            .with_context(|| format!("network namespace {}", self.name))?;
        process::clean_up_with(
            Command::new("ip").args(["netns", "delete", &self.name]),
            STEP,
        )
        .map(drop)
    }
}
