//! What every start of a supervisor has in common, and one start with what its manager kept.
//!
//! A manager is to cost a machine as little as systemd does, which stays in memory and never copies itself: a supervisor that comes back comes
//! to processors that its engines and their applications need. So the manager's thread moves into the node's network once
//! ([`Namespace::enter`]), and its children, who inherit that, are born without a copy of the page tables (`birth.rs`). Rejected: `ip
//! netns exec` and a shell for each start, which took 5 ms of a core and held up others for up to 2 ms at a time.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with, sockopt,
};

use crate::namespace::Namespace;

use super::birth::{self, Born};
use super::store::Store;

/// The first inherited descriptor (`SD_LISTEN_FDS_START`).
pub(super) const FIRST: i32 = 3;

/// What every start has in common.
pub(super) struct Launch {
    pub namespace: Namespace,
    pub config: PathBuf,
    pub log: File,
    pub null: File,
    pub notify: PathBuf,
    pub env: Vec<(String, String)>,
    pub first_env: Vec<(String, String)>,
    pub store_max: usize,
}

impl Launch {
    /// Starts it, in the namespaces of the thread that calls.
    pub fn start(&self, program: &Path, first: bool, store: &Store) -> Result<Born> {
        let text = |text: &[u8]| CString::new(text).context("a zero byte");
        let count = i32::try_from(store.names().len())?;
        let (names, fds) = store.hand_out(FIRST + count)?;
        let listen = (count > 0).then(|| (count.to_string(), names.join(":")));
        let environment = self.environment(first, listen);
        let environment = environment.into_iter().map(|(name, value)| {
            let bytes = [name.into_vec(), value.into_vec()].join(&b'=');
            CString::new(bytes).context("a zero byte")
        });
        let program = text(program.as_os_str().as_bytes())?;
        let config = text(self.config.as_os_str().as_bytes())?;
        let descriptors: Vec<i32> = [&self.null, &self.log, &self.log]
            .map(AsRawFd::as_raw_fd)
            .into_iter()
            .chain(fds.iter().map(AsRawFd::as_raw_fd))
            .collect();
        birth::bear(&birth::Plan {
            program: &program,
            arguments: &[program.clone(), c"--config".into(), config],
            environment: &environment.collect::<Result<Vec<_>>>()?,
            descriptors: &descriptors,
            tell_pid: count > 0,
        })
        .with_context(|| format!("cannot start {}", program.to_string_lossy()))
    }

    fn environment(
        &self,
        first: bool,
        listen: Option<(String, String)>,
    ) -> BTreeMap<OsString, OsString> {
        let inherited = std::env::vars_os();
        let mut all: BTreeMap<OsString, OsString> =
            inherited.filter(|(name, _)| name != birth::PID).collect();
        let more = self.env.iter();
        let more = more.chain(self.first_env.iter().filter(|_| first));
        all.extend(more.map(|(name, value)| (name.into(), value.into())));
        all.insert("NOTIFY_SOCKET".into(), self.notify.clone().into());
        all.insert("FDSTORE".into(), self.store_max.to_string().into());
        if let Some((count, names)) = listen {
            all.insert("LISTEN_FDS".into(), count.into());
            all.insert("LISTEN_FDNAMES".into(), names.into());
        }
        all
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
