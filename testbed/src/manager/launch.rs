//! One start of a supervisor with what its manager kept. An `unsafe` island: descriptors are put in place between fork and exec.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with, sockopt,
};

use crate::node::Node;

use super::store::Store;

/// The first inherited descriptor (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;
/// `LISTEN_PID` is known only after fork; the shell becomes the daemon, so its number is the daemon's.
const TELL_PID: &str = r#"export LISTEN_PID=$$; exec "$0" "$@""#;

/// What every start has in common.
pub(super) struct Launch {
    pub node: Node,
    pub config: PathBuf,
    pub log: File,
    pub notify: PathBuf,
    pub env: Vec<(String, String)>,
    pub first_env: Vec<(String, String)>,
    pub store_max: usize,
}

impl Launch {
    /// Starts it.
    pub fn start(&self, program: &Path, first: bool, store: &Store) -> Result<Child> {
        let mut command = self.node.command("sh");
        command
            .args(["-c", TELL_PID])
            .arg(program)
            .arg("--config")
            .arg(&self.config)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("NOTIFY_SOCKET", &self.notify)
            .env("FDSTORE", self.store_max.to_string())
            .stdin(Stdio::null())
            .stdout(self.log.try_clone()?)
            .stderr(self.log.try_clone()?)
            .process_group(0);
        if first {
            command.envs(self.first_env.iter().map(|(name, value)| (name, value)));
        }
        let count = i32::try_from(store.names().len())?;
        let (names, fds) = store.hand_out(FIRST + count)?;
        if count > 0 {
            command
                .env("LISTEN_FDS", count.to_string())
                .env("LISTEN_FDNAMES", names.join(":"));
        }
        let sources: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let put_in_place = move || {
            for (source, place) in sources.iter().zip(FIRST..) {
                // SAFETY: two numbers; `source` is open in the parent, which waits. What was at `place` can only be the pipe over which
                // the standard library hears that exec failed; exec of `ip` does not.
                if unsafe { libc::dup2(*source, place) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: the closure makes plain system calls on numbers made before the fork; it neither allocates nor locks.
        unsafe { command.pre_exec(put_in_place) };
        let child = command.spawn().context("cannot start ip netns exec")?;
        drop(fds);
        Ok(child)
    }
}

/// The socket a daemon talks to its manager over.
pub(super) fn notify_socket(path: &Path) -> Result<OwnedFd> {
    // A predecessor's.
    let _ = fs::remove_file(path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    sockopt::set_socket_passcred(&socket, true)?;
    bind(&socket, &SocketAddrUnix::new(path)?).with_context(|| path.display().to_string())?;
    Ok(socket)
}
