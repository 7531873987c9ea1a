//! Starting, killing and reaping the processes we look after. An `unsafe` island: what runs
//! between a child's birth (`birth.rs`) and exec.
//!
//! A child gets nothing it does not need: an unprivileged user, no capability in any set, no way to gain one, no descriptor but
//! standard ones and, for an engine, its end of the link.

pub(super) mod birth;

use std::ffi::{CString, OsString};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Signal, WaitId, WaitIdOptions};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::store::handover::FOR;
use super::store::inherit::HANDOVER;
use super::store::points;
use super::surroundings::Account;
use super::watchdog::{STANDBY_PRIORITY, vitals};
use crate::engine_link::LINK_FD;
use crate::logging;

/// A running child.
#[derive(Debug)]
pub struct Child {
    /// Its process id: ours to name as long as it is not reaped.
    pub pid: i32,
    /// Readable when it is dead (a pidfd).
    pub exit: OwnedFd,
}

/// When a child runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// When its processor has nothing else to do.
    Idle,
    /// Like everybody.
    Ordinary,
    /// Before all ordinary processes.
    Urgent,
}

/// Starts and ends children. Tests put theirs in its place.
pub trait Launcher {
    /// Starts the engine of a queue, at this urgency; the other value is our end of its link.
    ///
    /// # Errors
    /// The system's.
    fn engine(&mut self, queue: u8, urgency: Urgency) -> io::Result<(Child, OwnedFd)>;
    /// Starts the service; `None` if there is none.
    ///
    /// # Errors
    /// The system's.
    fn service(&mut self) -> io::Result<Option<Child>>;
    /// Starts the exporter of metrics, with our end of its standard input, at whose end it leaves; `None` if there is none.
    ///
    /// # Errors
    /// The system's.
    fn exporter(&mut self) -> io::Result<Option<(Child, OwnedFd)>> {
        Ok(None)
    }
    /// Kills a child with SIGKILL. Its exit descriptor becomes readable.
    ///
    /// # Errors
    /// The system's.
    fn kill(&mut self, child: &Child) -> io::Result<()>;
    /// Says when a child may run.
    ///
    /// # Errors
    /// The system's.
    fn schedule(&mut self, child: &Child, urgency: Urgency) -> io::Result<()>;
    /// Collects a dead child; says how it died.
    fn reap(&mut self, child: &Child) -> String;
}

/// Starts real processes from our own executable.
#[derive(Debug)]
pub struct Processes {
    user: Account,
    socket: PathBuf,
    metrics: Option<SocketAddr>,
    null: OwnedFd,
    /// Keeps [`LINK_FD`] taken, so that no descriptor of ours has that number.
    _link_number: Option<OwnedFd>,
}

/// glibc registers a restartable sequence for each thread (rseq(2)), which the kernel then looks after whenever the thread comes back to its
/// core. Nothing here uses it, and an engine that shares its core comes back for every message.
const TUNABLES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.pthread.rseq=0");

/// The environment a child inherits.
fn kept_environment() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        let ours = name.starts_with("PORTOLAN_") || name.starts_with("RUST_");
        let ours = ours || name == logging::JOURNAL;
        ours && ![HANDOVER, FOR, points::VARIABLE].contains(&&*name)
    })
}

impl Processes {
    /// Children will run as `user`; the service and the exporter connect to `socket`, and the latter listens at `metrics`.
    ///
    /// # Errors
    /// The system's.
    pub fn new(user: Account, socket: &Path, metrics: Option<SocketAddr>) -> io::Result<Self> {
        let null: OwnedFd = std::fs::File::open("/dev/null")?.into();
        let placeholder = rustix::io::fcntl_dupfd_cloexec(&null, LINK_FD)?;
        let taken = (placeholder.as_raw_fd() == LINK_FD).then_some(placeholder);
        Ok(Self {
            user,
            socket: socket.to_owned(),
            metrics,
            null,
            _link_number: taken,
        })
    }

    /// Starts ourselves with these arguments, a name for `ps` first; with this instead of nothing as standard input.
    fn start(
        &self,
        arguments: &[&[u8]],
        link: Option<OwnedFd>,
        input: Option<OwnedFd>,
    ) -> io::Result<Child> {
        let arguments = arguments.iter().map(|one| CString::new(*one));
        let arguments = arguments.collect::<Result<Vec<_>, _>>()?;
        let told = (logging::VARIABLE.into(), logging::level().name().into());
        let said = std::env::var_os(logging::VARIABLE).is_some();
        let told = (!said).then_some(told);
        let light = (TUNABLES.0.into(), TUNABLES.1.into());
        let environment = kept_environment().chain(told).chain([light]);
        let environment = environment.map(|(name, value)| {
            let bytes = [name.into_vec(), value.into_vec()].join(&b'=');
            CString::new(bytes)
        });
        let environment = environment.collect::<Result<Vec<_>, _>>()?;
        let null = input.as_ref().unwrap_or(&self.null).as_raw_fd();
        let link_number = link.as_ref().map(AsRawFd::as_raw_fd);
        let (pid, exit) = birth::bear(&birth::Plan {
            program: c"/proc/self/exe",
            arguments: &arguments,
            environment: &environment,
            changes_user: true,
            before: &|| confine(self.user, null, link_number),
        })?;
        Ok(Child { pid, exit })
    }
}

/// Runs in the child, between its birth and exec, in our memory: plain system calls, no allocation, no lock.
fn confine(user: Account, null: RawFd, link: Option<RawFd>) -> io::Result<()> {
    portolan::turns::short();
    // A Ctrl-C is for the supervisor, which asks them to leave.
    rustix::process::setpgid(None, None)?;
    rustix::process::chdir(c"/")?;
    // SAFETY: descriptors of our own; the child's table is its copy.
    if unsafe { libc::dup2(null, libc::STDIN_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut first_unwanted = LINK_FD as libc::c_uint;
    if let Some(link) = link {
        // SAFETY: two descriptors of our own, none of which is LINK_FD (`Processes::_link_number`).
        if unsafe { libc::dup2(link, LINK_FD) } < 0 {
            return Err(io::Error::last_os_error());
        }
        first_unwanted += 1;
    }
    // SAFETY: only marks descriptors, in the child's own table.
    let marked = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first_unwanted,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if marked < 0 {
        return Err(io::Error::last_os_error());
    }

    let uid = rustix::process::Uid::from_raw(user.uid);
    let gid = rustix::process::Gid::from_raw(user.gid);
    if rustix::process::geteuid() != uid {
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    }
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    rustix::thread::set_capabilities(None, sets)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Both ends of a child's link.
fn link() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(
        family,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

impl Launcher for Processes {
    fn engine(&mut self, queue: u8, urgency: Urgency) -> io::Result<(Child, OwnedFd)> {
        let (ours, theirs) = link()?;
        let name = format!("portoland: engine {queue}");
        let mut arguments: Vec<&[u8]> = vec![name.as_bytes(), b"engine"];
        if urgency == Urgency::Idle && vitals::may_take_back_idleness() {
            arguments.push(b"--at-leisure");
        }
        let child = self.start(&arguments, Some(theirs), None)?;
        if urgency == Urgency::Urgent {
            // An error means that it is in the way, or takes longer.
            let _ = self.schedule(&child, Urgency::Urgent);
        }
        Ok((child, ours))
    }

    fn service(&mut self) -> io::Result<Option<Child>> {
        let socket = self.socket.as_os_str().as_bytes();
        let arguments: [&[u8]; 4] = [b"portoland: service", b"service", b"--socket", socket];
        self.start(&arguments, None, None).map(Some)
    }

    fn exporter(&mut self) -> io::Result<Option<(Child, OwnedFd)>> {
        let Some(listen) = self.metrics else {
            return Ok(None);
        };
        let (ours, theirs) = link()?;
        let (socket, listen) = (self.socket.as_os_str().as_bytes(), listen.to_string());
        let arguments: [&[u8]; 6] = [
            b"portoland: metrics",
            b"metrics",
            b"--socket",
            socket,
            b"--listen",
            listen.as_bytes(),
        ];
        let child = self.start(&arguments, None, Some(theirs))?;
        Ok(Some((child, ours)))
    }

    fn kill(&mut self, child: &Child) -> io::Result<()> {
        // Dying takes a moment of its own on a core, which on a busy machine it would wait for. It works as well without. Before the signal,
        // as the watchdog takes it back when nobody waits any more.
        let _ = self.schedule(child, Urgency::Urgent);
        match rustix::process::pidfd_send_signal(&child.exit, Signal::KILL) {
            // Dead already.
            Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => Ok(()),
        }
    }

    fn schedule(&mut self, child: &Child, urgency: Urgency) -> io::Result<()> {
        match urgency {
            Urgency::Idle => vitals::make_idle(child.pid),
            Urgency::Ordinary => vitals::make_ordinary(child.pid),
            Urgency::Urgent => vitals::make_urgent(child.pid, STANDBY_PRIORITY),
        }
    }

    fn reap(&mut self, child: &Child) -> String {
        reap(child.exit.as_fd())
    }
}

fn reap(pidfd: BorrowedFd<'_>) -> String {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    match rustix::process::waitid(WaitId::PidFd(pidfd), options) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "unknown cause".to_owned(),
        },
        Ok(None) => "not dead".to_owned(),
        // It was started by our predecessor, so another process reaped it.
        Err(rustix::io::Errno::CHILD) => "unknown cause".to_owned(),
        Err(error) => format!("cannot be waited for: {error}"),
    }
}
