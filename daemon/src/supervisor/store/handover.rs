//! The running program replaced by another build, in place: the same process, the same descriptors, another program.
//!
//! **Problem.** A newer build is to serve, and applications are to notice nothing, also where no service manager keeps descriptors.
//!
//! **Idea.** exec(2). The new program inherits what the store has a name for ([`super::inherit`]) and goes on with it as after any other
//! restart (`adopt.rs`): there is one way to go on, and it is used all the time. Before, the new build is asked what it can go on with
//! (`portoland abi`); if it cannot, or cannot be run at all, the old one goes on serving and says why. What is asked and
//! what is executed is one open file, so it cannot be another one in between. If exec fails after all, nothing has changed.
//!
//! Engines are replaced afterwards, one takeover each: a standby of the new build is prepared, and when it is ready the old engine ends.
//!
//! **Rejected.** Starting the new build beside the old one and passing descriptors over a socket: two supervisors for a while, and
//! the service manager's main process changes.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use portolan_abi::control::{ErrorCode, Response};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::FdFlags;
use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};

use super::abi::Abi;
use super::inherit::{HANDOVER, hand_over};
use super::points;
use crate::supervisor::clients::Pending;
use crate::supervisor::events::{Event, Kind, Severity};
use crate::supervisor::poll::{EventFlags, Source};
use crate::supervisor::spawn::{Child, birth};
use crate::supervisor::watchdog::{background, vitals};
use crate::supervisor::{Supervisor, privileges};

/// Whom the new program tells that it serves: connection and number of the request.
pub const FOR: &str = "PORTOLAN_UPGRADE_FOR";
/// A build that takes longer to say what it is is no build of ours.
const PROBE: Duration = Duration::from_secs(3);
/// So long it is asked in the time that others leave.
const AT_LEISURE: Duration = Duration::from_millis(50);
/// So long at a time.
const TURN: Duration = Duration::from_nanos(background::EVERY_NS);
/// Longer than what it says.
const SAID: u64 = 4096;

/// A build that is being asked.
pub struct Probe {
    client: u64,
    bell: Arc<OwnedFd>,
    answer: Receiver<Result<File, String>>,
}

/// The program that runs, or what has been put in its place.
fn own_path() -> Option<PathBuf> {
    let path = std::fs::read_link("/proc/self/exe").ok()?;
    let bytes = path.as_os_str().as_bytes();
    let bytes = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(bytes)))
}

/// Asks a build whether it can go on where we stop.
fn probe(path: &Path) -> Result<File, String> {
    let shown = path.display();
    let file = File::open(path).map_err(|error| format!("{shown}: {error}"))?;
    let (mut hear, child) =
        ask(&file, path).map_err(|error| format!("{shown} cannot be run: {error}"))?;
    let content = await_end(&child).map_err(|why| format!("`{shown} abi` {why}"))?;
    let mut said = String::new();
    // What cannot be read says nothing. It is not waited for: whoever the program has started may hold the other end for ever.
    let _ = rustix::io::ioctl_fionbio(&hear, true);
    let _ = hear.by_ref().take(SAID).read_to_string(&mut said);
    match Abi::parse(&said) {
        Some(abi) if content => match Abi::OURS.misfit(&abi) {
            None => Ok(file),
            Some(why) => Err(format!(
                "{shown} cannot go on where this build stops: {why}; stop the daemon and start the new one"
            )),
        },
        _ => Err(format!("{shown} is no portoland: it does not say its ABI")),
    }
}

/// Starts an open file as `path abi`, in nobody's way; what it says comes from the pipe.
fn ask(file: &File, path: &Path) -> io::Result<(PipeReader, Child)> {
    let number = file.as_raw_fd();
    let (hear, tell) = io::pipe()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let places = [null.as_raw_fd(), tell.as_raw_fd(), null.as_raw_fd()];
    let before = || {
        portolan::turns::short();
        rustix::process::setpgid(None, None)?;
        rustix::process::chdir(c"/")?;
        let mut done = true;
        for (place, source) in (0..).zip(places) {
            // SAFETY: descriptors of our own; the child's table is its copy.
            done &= unsafe { libc::dup2(source, place) } >= 0;
        }
        // A script's interpreter opens it once more by this number.
        // SAFETY: as above.
        done &= unsafe { libc::fcntl(number, libc::F_SETFD, 0) } >= 0;
        if done {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    let (pid, exit) = birth::bear(&birth::Plan {
        program: &CString::new(format!("/proc/self/fd/{number}"))?,
        arguments: &[
            CString::new(path.as_os_str().as_bytes())?,
            c"abi".to_owned(),
        ],
        environment: &[],
        changes_user: false,
        before: &before,
    })?;
    // Not before exec, which we wait for. Without it, it is in others' way.
    let _ = vitals::make_idle(pid);
    Ok((hear, Child { pid, exit }))
}

/// Waits until it has ended and collects it: was it content with itself? If it takes too long it is killed.
fn await_end(child: &Child) -> Result<bool, String> {
    let ends_within = |time: Duration| {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let idle = vitals::is_idle(child.pid) && background::interrupt(child.pid).is_ok();
            let turn = if idle { left.min(TURN) } else { left };
            let timeout = Timespec::try_from(turn).ok();
            let mut fds = [PollFd::new(&child.exit, PollFlags::IN)];
            match rustix::event::poll(&mut fds, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) if turn < left => {}
                other => return other == Ok(1),
            }
        }
    };
    let mut ended = ends_within(AT_LEISURE);
    if !ended {
        // There was no leisure. Ended: as good.
        let _ = vitals::make_ordinary(child.pid);
        ended = ends_within(PROBE.saturating_sub(AT_LEISURE));
    }
    if !ended {
        // It may just have ended: as good.
        let _ = rustix::process::pidfd_send_signal(&child.exit, Signal::KILL);
    }
    let status = waitid(WaitId::PidFd(child.exit.as_fd()), WaitIdOptions::EXITED);
    match status {
        _ if !ended => Err("does not end".to_owned()),
        Ok(status) => Ok(status.and_then(|status| status.exit_status()) == Some(0)),
        Err(error) => Err(error.to_string()),
    }
}

impl Supervisor {
    /// A client wants another build to serve; by default what is where this one was started from. Asked in a thread of its own:
    /// here nobody waits.
    pub(in crate::supervisor) fn request_upgrade(
        &mut self,
        id: u64,
        binary: Option<&str>,
    ) -> Result<(), Response> {
        let error = |code, message: String| Response::Error { code, message };
        if self.clients.get(id).is_none_or(|c| c.who.uid != 0) {
            let message = "only root may replace the daemon".to_owned();
            return Err(error(ErrorCode::Denied, message));
        }
        if self.upgrade.is_some() {
            let message = "the daemon is being replaced already".to_owned();
            return Err(error(ErrorCode::Unavailable, message));
        }
        let path = binary.map(PathBuf::from).or_else(own_path);
        let Some(path) = path.filter(|path| path.is_absolute()) else {
            let message = "the new build's path must be absolute".to_owned();
            return Err(error(ErrorCode::BadRequest, message));
        };
        // Not twice.
        self.take_request(id);
        let begin = || -> io::Result<Probe> {
            let bell = Arc::new(crate::supervisor::memory::eventfd()?);
            let (tell, answer) = channel();
            std::thread::Builder::new()
                .name("upgrade".to_owned())
                .spawn({
                    let bell = Arc::clone(&bell);
                    move || {
                        // Nobody listens any more: as good.
                        let _ = tell.send(probe(&path));
                        let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
                    }
                })?;
            self.poll.add(&*bell, Source::Upgrade, EventFlags::IN)?;
            Ok(Probe {
                client: id,
                bell,
                answer,
            })
        };
        match begin() {
            Ok(probe) => self.upgrade = Some(probe),
            Err(failed) => return Err(error(ErrorCode::Internal, failed.to_string())),
        }
        self.wait_for(id, Pending::Upgrade);
        Ok(())
    }

    /// The new build has said what it is.
    pub(in crate::supervisor) fn on_probed(&mut self) {
        let Some(probe) = &self.upgrade else {
            return;
        };
        let answer = match probe.answer.try_recv() {
            Ok(answer) => answer,
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => Err("nobody asked the new build".to_owned()),
        };
        let client = probe.client;
        self.poll.remove(&*probe.bell);
        self.upgrade = None;
        let failed = match answer {
            Ok(file) => self.hand_over(&file, client),
            Err(why) => why,
        };
        let event = Event::new(Kind::Upgrade, format!("not replaced: {failed}"));
        self.events.record(event.severity(Severity::Warning));
        let code = ErrorCode::AbiMismatch;
        let message = failed;
        self.finish(client, Response::Error { code, message }, Vec::new());
    }

    /// Becomes another program. Returns only if that failed, and why.
    fn hand_over(&mut self, file: &File, client: u64) -> String {
        self.end_exporter();
        self.leave_polling();
        let number = self.clients.get(client).and_then(|client| client.asked);
        let entries = self.store.iter().map(|(name, fd)| (name, &**fd));
        let handover = hand_over(entries);
        tracing::info!("replaced by another build");
        points::reached("upgrade.exec");
        let inherit = |flags: FdFlags| {
            for (_, fd) in self.store.iter() {
                // It cannot fail: the descriptor is ours.
                let _ = rustix::io::fcntl_setfd(fd.as_fd(), flags);
            }
        };
        inherit(FdFlags::empty());
        let why = match privileges::keep_across_exec() {
            Ok(()) => {
                let told = format!("{client} {}", number.unwrap_or(0));
                exec(file, &handover, &told).to_string()
            }
            Err(error) => format!("capabilities cannot be kept: {error}"),
        };
        inherit(FdFlags::CLOEXEC);
        // Nobody inherits them now either way.
        let _ = privileges::drop_the_rest();
        format!("the new build cannot be executed: {why}")
    }
}

/// Executes an open file with our own arguments.
fn exec(file: &File, handover: &str, told: &str) -> io::Error {
    let text = |text: OsString| CString::new(text.as_bytes()).unwrap_or_default();
    let arguments: Vec<CString> = std::env::args_os().map(text).collect();
    let dropped = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("LISTEN_") || [HANDOVER, FOR, points::VARIABLE].contains(&&*name)
    };
    let mut environment: Vec<CString> = std::env::vars_os()
        .filter(|(name, _)| !dropped(name))
        .map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            text(name)
        })
        .collect();
    environment.push(text(format!("{HANDOVER}={handover}").into()));
    environment.push(text(format!("{FOR}={told}").into()));
    let pointers = |strings: &[CString]| {
        let ends = std::iter::once(std::ptr::null());
        strings
            .iter()
            .map(|s| s.as_ptr())
            .chain(ends)
            .collect::<Vec<*const libc::c_char>>()
    };
    let (argv, envp) = (pointers(&arguments), pointers(&environment));
    // SAFETY: an open file, an empty path as AT_EMPTY_PATH wants it, and two arrays of strings that end in null; all live through
    // the call, which does not return if it succeeds.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Whom to tell that the replacement serves, if it is one.
pub fn to_be_told() -> Option<(u64, u64)> {
    let told = std::env::var(FOR).ok()?;
    let (client, number) = told.split_once(' ')?;
    Some((client.parse().ok()?, number.parse().ok()?))
}
