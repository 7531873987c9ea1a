//! A service manager for one daemon: the part of systemd that a restart leans on.
//!
//! `portoland` puts every descriptor that must survive it into its manager's store, over the notify protocol (sd_notify(3)), and a
//! supervisor that is started again gets them back as `LISTEN_FDS`. Tests need that without systemd. A [`Manager`] does as systemd does
//! with this unit:
//!
//! ```ini
//! [Service]
//! Type=notify
//! NotifyAccess=main
//! KillMode=process
//! Restart=always
//! RestartSec=0
//! FileDescriptorStoreMax=…
//! FileDescriptorStorePreserve=restart
//! ```
//!
//! It starts the supervisor again the moment it is dead, keeps the store over that and over [`Manager::restart`], and drops it at
//! [`Manager::stop`]. Beyond systemd it can [`Manager::hold`] the next start back, so that a test can do something while there is no
//! supervisor, and take things out of the store, so that they are lost.
//!
//! Not done: that systemd takes a descriptor which is in the store under another name for the same.

mod birth;
mod launch;
mod store;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{Pid, Signal, kill_process};

use crate::node::Node;

use birth::Born;
use launch::Launch;
use store::Store;

/// How often the manager looks at descriptors that it is to poll.
const LOOK: Duration = Duration::from_millis(100);
/// So many starts in a row that never said they were ready are a failure, as `StartLimitBurst=` has it.
const FAILED_STARTS: u32 = 5;

/// What a manager does beside starting and restarting.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// `FileDescriptorStoreMax=`.
    pub store_max: usize,
    /// Environment variables of the first start only.
    pub first_env: Vec<(String, String)>,
}

impl Default for ManagerOptions {
    fn default() -> Self {
        Self {
            store_max: 8192,
            first_env: Vec::new(),
        }
    }
}

/// What is to become of the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Running, started again whenever it ends.
    Running,
    /// Stopped, and the store dropped.
    Stopped,
    /// Left alone: whoever asked kills what is left.
    Abandoned,
}

struct State {
    wanted: Wanted,
    /// Starts are held back.
    held: bool,
    /// To be sent as soon as there is a process to send it to.
    signal: Option<Signal>,
    pid: Option<i32>,
    /// Starts so far.
    starts: u64,
    /// The running supervisor said that it is ready.
    ready: bool,
    /// The daemon of the next start.
    program: PathBuf,
    /// How the last ones ended.
    exits: VecDeque<ExitStatus>,
    /// Starts in a row that were never ready.
    failed_starts: u32,
    failure: Option<String>,
    ended: bool,
    store: Store,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }
}

/// A daemon's service manager. Dropping it abandons the daemon; [`crate::Daemon`] kills what it looks after.
pub struct Manager {
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager")
            .field("pid", &self.pid())
            .field("starts", &self.starts())
            .finish_non_exhaustive()
    }
}

impl Manager {
    /// Starts the node's daemon under a manager. What it says goes to `log`.
    pub(crate) fn start(
        node: &Node,
        program: &Path,
        config: &Path,
        log: &File,
        env: &[(String, String)],
        options: &ManagerOptions,
    ) -> Result<Self> {
        let path = node.log_path().with_extension("notify");
        let socket = launch::notify_socket(&path)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                wanted: Wanted::Running,
                held: false,
                signal: None,
                pid: None,
                starts: 0,
                ready: false,
                program: program.to_owned(),
                exits: VecDeque::new(),
                failed_starts: 0,
                failure: None,
                ended: false,
                store: Store::new(options.store_max),
            }),
            changed: Condvar::new(),
        });
        let launch = Launch {
            namespace: node.namespace().clone(),
            config: config.to_owned(),
            log: log.try_clone()?,
            null: File::options().read(true).open("/dev/null")?,
            notify: path.clone(),
            env: env.to_vec(),
            first_env: options.first_env.clone(),
            store_max: options.store_max,
        };
        let thread = std::thread::Builder::new()
            .name("manager".to_owned())
            .spawn({
                let (shared, wake) = (Arc::clone(&shared), Arc::clone(&wake));
                move || {
                    let inside = launch.namespace.enter();
                    if let Err(error) =
                        inside.and_then(|()| look_after(&shared, &launch, &socket, &wake))
                    {
                        shared.update(|state| state.failure = Some(format!("{error:#}")));
                    }
                    shared.update(|state| state.ended = true);
                }
            })?;
        Ok(Self {
            shared,
            wake,
            socket: path,
            thread: Some(thread),
        })
    }

    /// The process id of the supervisor, while there is one.
    pub fn pid(&self) -> Option<i32> {
        self.shared.lock().pid
    }

    /// Starts so far; the first is one.
    pub fn starts(&self) -> u64 {
        self.shared.lock().starts
    }

    /// Whether the running supervisor has said that it is ready.
    pub fn is_ready(&self) -> bool {
        let state = self.shared.lock();
        state.pid.is_some() && state.ready
    }

    /// Why the manager gave up, if it did.
    pub fn failure(&self) -> Option<String> {
        self.shared.lock().failure.clone()
    }

    /// How the supervisors ended so far.
    pub fn exits(&self) -> Vec<ExitStatus> {
        self.shared.lock().exits.iter().copied().collect()
    }

    /// The names in the store, in order.
    pub fn stored(&self) -> Vec<String> {
        self.shared.lock().store.names()
    }

    /// Names that came when the store was full.
    pub fn refused(&self) -> Vec<String> {
        self.shared.lock().store.refused.clone()
    }

    /// Names that were dropped because their other end hung up: those that came without `FDPOLL=0`.
    pub fn hung_up(&self) -> Vec<String> {
        self.shared.lock().store.hung_up.clone()
    }

    /// A copy of a stored descriptor.
    pub fn stored_fd(&self, name: &str) -> Result<OwnedFd> {
        self.shared.lock().store.copy(name)
    }

    /// Loses whatever is stored under names that `lost` says. Returns how many.
    pub fn lose(&self, lost: impl Fn(&str) -> bool) -> usize {
        self.shared.update(|state| state.store.lose(lost))
    }

    /// Puts another descriptor in the place of a stored one.
    pub fn replace(&self, name: &str, fd: OwnedFd) -> Result<()> {
        self.shared.update(|state| state.store.replace(name, fd))
    }

    /// The daemon to start from the next start on: what a package's upgrade puts in its place.
    pub fn set_program(&self, program: &Path) {
        self.shared
            .update(|state| state.program = program.to_owned());
    }

    /// Holds starts back, or lets them happen again, the one that is due at once.
    pub fn hold(&self, held: bool) {
        self.shared.update(|state| state.held = held);
        self.wake();
    }

    /// Kills the supervisor with SIGKILL; it is started again at once. Returns how many starts there will have been then.
    pub fn kill(&self) -> Result<u64> {
        let state = self.shared.lock();
        let pid = state.pid.context("there is no supervisor to kill")?;
        let pid = Pid::from_raw(pid).context("pid")?;
        // The lock keeps the manager from reaping it and the number from being another's.
        kill_process(pid, Signal::KILL).context("SIGKILL")?;
        Ok(state.starts + 1)
    }

    /// Waits until the supervisor of start number `start`, or a later one, is ready.
    pub fn wait_ready(&self, start: u64, within: Duration) -> Result<()> {
        self.wait("the supervisor is ready", within, |state| {
            state.pid.is_some() && state.starts >= start && state.ready
        })
    }

    /// Waits until there is no supervisor; starts must be held back.
    pub fn wait_gone(&self, within: Duration) -> Result<()> {
        self.wait("the supervisor is gone", within, |state| {
            state.pid.is_none()
        })
    }

    /// What `systemctl restart` does: SIGTERM, then a start with the store. Waits until it is ready.
    pub fn restart(&self, within: Duration) -> Result<()> {
        let start = self.shared.update(|state| {
            state.signal = Some(Signal::TERM);
            state.starts + 1
        });
        self.wake();
        self.wait_ready(start, within)
    }

    /// What `systemctl stop` does: SIGTERM, and when the supervisor has ended the store is dropped. Returns how it ended.
    pub fn stop(&self, within: Duration) -> Result<ExitStatus> {
        self.shared.update(|state| {
            state.signal = Some(Signal::TERM);
            state.wanted = Wanted::Stopped;
        });
        self.wake();
        self.wait("the daemon has stopped", within, |state| state.ended)?;
        let last = self.shared.lock().exits.back().copied();
        last.context("the supervisor never ran")
    }

    /// Starts no supervisor any more and drops the store.
    pub(crate) fn abandon(&mut self) {
        self.shared.update(|state| state.wanted = Wanted::Abandoned);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // What it panicked about has been printed.
            let _ = thread.join();
        }
        self.shared.update(|state| state.store.lose(|_| true));
        let _ = fs::remove_file(&self.socket);
    }

    fn wake(&self) {
        // Full: awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn wait(&self, what: &str, within: Duration, done: impl Fn(&State) -> bool) -> Result<()> {
        let deadline = Instant::now() + within;
        let mut state = self.shared.lock();
        loop {
            if done(&state) {
                return Ok(());
            }
            if state.ended || state.failure.is_some() {
                let why = state.failure.clone();
                bail!(
                    "{what}: never: {}",
                    why.unwrap_or_else(|| "it was stopped".to_owned())
                );
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!(
                    "{what}: not within {within:?}; {} starts, pid {:?}, ready: {}",
                    state.starts,
                    state.pid,
                    state.ready
                );
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.abandon();
    }
}

/// The manager's thread.
fn look_after(shared: &Shared, launch: &Launch, notify: &OwnedFd, wake: &OwnedFd) -> Result<()> {
    loop {
        let program = {
            let state = shared.lock();
            match state.wanted {
                Wanted::Running if state.held => None,
                Wanted::Running => Some(state.program.clone()),
                Wanted::Stopped | Wanted::Abandoned => break,
            }
        };
        let Some(program) = program else {
            pause(notify, wake, None)?;
            shared.update(|state| state.store.drop_hung_up());
            continue;
        };
        let child = {
            let mut state = shared.lock();
            let first = state.starts == 0;
            let child = launch.start(&program, first, &state.store)?;
            state.pid = Some(child.pid.as_raw_pid());
            state.starts += 1;
            state.ready = false;
            child
        };
        shared.changed.notify_all();
        let abandoned = attend(shared, &child, notify, wake)?;
        if abandoned {
            return Ok(());
        }
        let gave_up = shared.update(|state| {
            state.failed_starts = if state.ready {
                0
            } else {
                state.failed_starts + 1
            };
            if state.failed_starts >= FAILED_STARTS {
                state.failure = Some(format!("{FAILED_STARTS} starts in a row failed"));
            }
            state.failure.is_some()
        });
        if gave_up {
            // As with FileDescriptorStorePreserve=yes: somebody may repair what is wrong and start it again.
            return Ok(());
        }
    }
    shared.update(|state| state.store.lose(|_| true));
    Ok(())
}

/// Looks after one supervisor until it is dead and all that it said has been heard. True: we are to leave it alone.
fn attend(shared: &Shared, child: &Born, notify: &OwnedFd, wake: &OwnedFd) -> Result<bool> {
    let pid = child.pid;
    loop {
        let dead = pause(notify, wake, Some(&child.pidfd))?;
        let abandoned = shared.update(|state| {
            state.store.drop_hung_up();
            if state.wanted == Wanted::Abandoned {
                return true;
            }
            // Heard before its end is taken notice of, as systemd does.
            while let Some(message) = store::receive(notify) {
                if message.from == Some(pid.as_raw_pid()) && message.is("READY=1") {
                    state.ready = true;
                }
                state.store.hear(message, pid.as_raw_pid());
            }
            if !dead && let Some(signal) = state.signal.take() {
                // It may just have ended: as good.
                let _ = kill_process(pid, signal);
            }
            false
        });
        if abandoned {
            return Ok(true);
        }
        if dead {
            break;
        }
    }
    // Under the lock: whoever kills the process by its number must find it unreaped.
    shared.update(|state| {
        let status = child.wait();
        state.pid = None;
        state.signal = None;
        state.exits.extend(status.ok());
    });
    Ok(false)
}

/// Waits until something happens; true if the process is dead.
fn pause(notify: &OwnedFd, wake: &OwnedFd, pidfd: Option<&OwnedFd>) -> Result<bool> {
    let timeout = Timespec::try_from(LOOK).context("poll timeout")?;
    let mut fds = vec![
        PollFd::new(notify, PollFlags::IN),
        PollFd::new(wake, PollFlags::IN),
    ];
    fds.extend(pidfd.map(|pidfd| PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)));
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error).context("poll"),
    }
    let dead = fds.get(2).is_some_and(|fd| !fd.revents().is_empty());
    // Empty: as good.
    let _ = rustix::io::read(wake, &mut [0u8; 8]);
    Ok(dead)
}
