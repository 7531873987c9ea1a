//! Letting engines go round for frames themselves ([`crate::engine::busy_poll`] says what for).
//!
//! **What it takes.** The kernel goes round for who receives from a socket, if that has received through the queue before
//! (`SO_INCOMING_NAPI_ID`). An AF_XDP socket is told at its bind, by drivers that say which NAPI instance a queue has; veth does not (6.18). So there is a
//! UDP socket per queue for nothing else, which the XDP program sends one frame of ours as a datagram: the first time only (or three times in vain), and lost
//! for the transport, which sends it again. After that a filter keeps everything out of it. Where the interface has no instance, it is given one (`gro.rs`).
//!
//! **Order.** To begin: the instance is deferred, then the engine told; frames of the time in between wait for at most [`DEFERRAL`]. To end: the
//! instance is let loose, then the engine told, which goes round once more, as an instance that is deferred does not notice by
//! itself. When the engine is dead we do that for it.
//!
//! **Rejected.** `/sys/class/net/*/napi_defer_hard_irqs`: of the whole interface, and of the namespace that sysfs was mounted in. io_uring can poll an
//! instance without a socket, but only on its way to sleep.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use super::Supervisor;
use super::config::BusyPolling;
use super::engines::Engine;
use super::napi::{Deferral, Napi};
use super::poll::Timer;
use crate::engine::busy_poll::{BUDGET, go_round};
use crate::engine_link::ToEngine;

/// While an engine goes round the kernel does not, but for an engine that was kept from its core for so long. More than a tick of kernels with
/// 1,000 of them per second: a timer that is the next to come is set in the processor, again at each look.
const DEFERRAL: Deferral = Deferral {
    rounds: 1,
    pause_ns: 2_000_000,
};
/// Frames given for a socket that learns nothing of them, as those of the other end do not come through the instance; then it is let be until the interface has another one.
const ERRANDS: u32 = 3;
/// An engine of ours asks no sooner again.
const PAUSE: Duration = Duration::from_millis(4);

/// What a queue has for it.
#[derive(Default)]
pub struct BusyPoll {
    socket: Option<PolledSocket>,
    /// The instance is deferred, and an engine goes round.
    on: bool,
    /// The kernel cannot, or may not.
    refused: bool,
    /// Frames given in vain, for these instances of the interface.
    errands: u32,
    tried: Vec<u32>,
    /// Asked for the last time.
    asked: Option<Instant>,
}

struct PolledSocket {
    fd: Arc<OwnedFd>,
    port: u16,
    /// The instance, once it has received through it.
    instance: Option<u32>,
}

impl BusyPoll {
    /// Does an engine go round?
    pub fn is_on(&self) -> bool {
        self.on
    }
}

impl PolledSocket {
    /// A socket of this interface, at some port.
    fn open(interface: &str) -> io::Result<Self> {
        let (family, flags) = (AddressFamily::INET, SocketFlags::CLOEXEC);
        let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
        set(&fd, libc::SO_BINDTODEVICE, interface.as_bytes())?;
        // Without this it would be polled only when the kernel is not going round anyway. Needs CAP_NET_ADMIN.
        set(&fd, libc::SO_PREFER_BUSY_POLL, &1i32.to_ne_bytes())?;
        // Not 0: one look for each call that does not wait.
        set(&fd, libc::SO_BUSY_POLL, &1i32.to_ne_bytes())?;
        set(&fd, libc::SO_BUSY_POLL_BUDGET, &BUDGET.to_ne_bytes())?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&fd, 0)?;
        let any = std::net::SocketAddrV4::new(std::net::Ipv4Addr::UNSPECIFIED, 0);
        rustix::net::bind(&fd, &any)?;
        let name = rustix::net::getsockname(&fd)?;
        let name = std::net::SocketAddrV4::try_from(name)?;
        // An engine may send frames, but not have the host's own stack send datagrams. That it is connected to nobody is no error: it is shut all the same.
        match rustix::net::shutdown(&fd, rustix::net::Shutdown::Write) {
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Self {
            fd: Arc::new(fd),
            port: name.port(),
            instance: None,
        })
    }

    /// The instance that something was received through; 0: none.
    fn received_through(&self) -> io::Result<u32> {
        let mut id: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the option's value is an int, as long as it says.
        let got = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_INCOMING_NAPI_ID,
                std::ptr::from_mut(&mut id).cast(),
                &mut len,
            )
        };
        match got {
            0.. => Ok(id.cast_unsigned()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether anything was received.
    fn has_received(&self) -> bool {
        self.received_through().is_ok_and(|id| id != 0)
    }

    /// Which of these instances it is, if that is known by now. The socket is told once, by whatever comes first: of another one it cannot be used.
    fn learn(&mut self, instances: &[u32]) -> io::Result<Option<u32>> {
        if self.instance.is_none() {
            let id = self.received_through()?;
            if instances.contains(&id) {
                self.keep_everything_out()?;
                self.instance = Some(id);
            }
        }
        Ok(self.instance)
    }

    /// Nothing is received any more: who receives with something there is given that, and nothing is polled.
    fn keep_everything_out(&self) -> io::Result<()> {
        let mut nothing = libc::sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: 0,
        };
        let program = libc::sock_fprog {
            len: 1,
            filter: &raw mut nothing,
        };
        let len = size_of::<libc::sock_fprog>() as libc::socklen_t;
        // SAFETY: a program of one instruction, read during the call.
        let set = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                len,
            )
        };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        // What is there already: little, as there is no room for more.
        while rustix::net::recv(&self.fd, &mut [0u8; 1][..], RecvFlags::DONTWAIT).is_ok() {}
        Ok(())
    }
}

fn set(socket: &OwnedFd, option: libc::c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the value is as long as it says, and read during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether asking again would be of no use: the kernel is too old, we may not, or the program runs no errands.
fn is_for_good(error: &io::Error) -> bool {
    let codes = [
        libc::EPERM,
        libc::EACCES,
        libc::EOPNOTSUPP,
        libc::ENOENT,
        libc::ENOPROTOOPT,
        libc::EINVAL,
    ];
    match error.raw_os_error() {
        Some(code) => codes.contains(&code),
        None => true,
    }
}

impl Supervisor {
    /// A predecessor that was killed may have left instances deferred.
    pub(super) fn let_loose(&self) {
        let facts = &self.config.interface_facts;
        let let_loose = || -> io::Result<()> {
            let mut napi = Napi::new()?;
            for (id, deferral) in napi.of_interface(facts.index)? {
                if deferral == DEFERRAL {
                    napi.set(id, Deferral::default())?;
                }
            }
            Ok(())
        };
        if facts.veth
            && let Err(error) = let_loose()
        {
            tracing::debug!(%error, "the NAPI instances cannot be looked at");
        }
    }

    /// Frames come by themselves again, for whoever comes after us; perhaps nobody does. Engines say within a second or so that they go round.
    pub(super) fn leave_polling(&mut self) {
        for index in 0..self.engines.len() {
            self.end_polling(index);
        }
        self.end_gro();
    }

    /// An engine asks to go round itself, or to be let off.
    pub(super) fn on_busy_poll(&mut self, index: usize, wanted: bool) {
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        if !wanted || engine.busy_poll.refused || !self.may_poll() {
            self.end_polling(index);
            // Also an engine that a predecessor of ours let begin.
            return self.tell_active(index, &ToEngine::BusyPoll { on: false }, Vec::new());
        }
        let now = Instant::now();
        if (engine.busy_poll.asked).is_some_and(|asked| now - asked < PAUSE) {
            return;
        }
        if let Some(engine) = self.engines.get_mut(index) {
            engine.busy_poll.asked = Some(now);
        }
        self.answer(index, now);
    }

    /// A frame was given for an engine that asked. There are many, so the first one has come, and the answer need not wait until it asks again.
    pub(super) fn on_errand_timer(&mut self, queue: u8, now: Instant) {
        let asks = |engine: &Engine| engine.index == queue && !engine.busy_poll.on;
        let Some(index) = self.engines.iter().position(asks) else {
            return;
        };
        let poll = &self.engines[index].busy_poll;
        if poll.socket.as_ref().is_some_and(PolledSocket::has_received) {
            self.answer(index, now);
        }
    }

    /// Lets an engine that asks go round, if everything is in place.
    fn answer(&mut self, index: usize, now: Instant) {
        let Some(engine) = self.engines.get(index) else {
            return;
        };
        let (was_on, queue) = (engine.busy_poll.on, engine.index);
        match self.begin_polling(index, now) {
            // It says so again: the instance is still there.
            Ok(Some(_)) if was_on => {}
            Ok(Some(socket)) => {
                tracing::debug!(queue, "the engine goes round for frames itself");
                self.tell_active(index, &ToEngine::BusyPoll { on: true }, vec![socket]);
            }
            // It asks again. Perhaps it goes round for an instance that is not there any more, or for one that a predecessor knew.
            Ok(None) => {
                self.tell_active(index, &ToEngine::BusyPoll { on: false }, Vec::new());
            }
            Err(error) => {
                tracing::info!(queue, %error, "the engine cannot go round for frames itself");
                let for_good = is_for_good(&error);
                if let Some(engine) = self.engines.get_mut(index) {
                    engine.busy_poll.refused = for_good;
                }
            }
        }
    }

    /// Whether engines may at all.
    fn may_poll(&self) -> bool {
        self.config.busy_polling != BusyPolling::Never && self.config.interface_facts.veth
    }

    /// The socket to poll, if everything is in place.
    fn begin_polling(&mut self, index: usize, now: Instant) -> io::Result<Option<Arc<OwnedFd>>> {
        let mut napi = Napi::new()?;
        let interface = self.config.interface_facts.index;
        let mut instances = napi.of_interface(interface)?;
        if instances.is_empty() {
            self.switch_gro_on(now)?;
            instances = napi.of_interface(interface)?;
        }
        let instances: Vec<u32> = instances.into_iter().map(|(id, _)| id).collect();
        let Some(engine) = self.engines.get_mut(index) else {
            return Ok(None);
        };
        let poll = &mut engine.busy_poll;
        if instances.is_empty() {
            (poll.socket, poll.on) = (None, false);
            return Ok(None);
        }
        if instances != poll.tried {
            (poll.errands, poll.tried) = (0, instances.clone());
        }
        let mut known = None;
        if let Some(socket) = &mut poll.socket {
            known = socket.learn(&instances)?;
        }
        let Some(instance) = known.filter(|id| instances.contains(id)) else {
            (poll.socket, poll.on) = (None, false);
            if poll.errands >= ERRANDS {
                self.gro.is_in_vain(now);
                return Ok(None);
            }
            poll.errands += 1;
            let socket = PolledSocket::open(&self.config.interface)?;
            let steering = &mut self.steering;
            let sent = steering.send_on_errand(engine.nic_queue, socket.port);
            poll.socket = Some(socket);
            self.poll.set_timer(now, Timer::Errand(engine.index));
            self.gro.is_of_use(now);
            return sent.map(|()| None).map_err(io::Error::other);
        };
        let Some(socket) = &poll.socket else {
            return Ok(None);
        };
        poll.errands = 0;
        match napi.set(instance, DEFERRAL) {
            Ok(()) => {}
            // Another one has taken its place: another socket has to learn of it.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                (poll.socket, poll.on) = (None, false);
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        poll.on = true;
        self.gro.is_of_use(now);
        Ok(Some(Arc::clone(&socket.fd)))
    }

    /// Frames come by themselves again. The engine is dead, or will be told.
    pub(super) fn end_polling(&mut self, index: usize) {
        let Some(engine) = self.engines.get_mut(index) else {
            return;
        };
        let poll = &mut engine.busy_poll;
        if !std::mem::take(&mut poll.on) {
            return;
        }
        let Some(socket) = &poll.socket else {
            return;
        };
        let instance = socket.instance.unwrap_or_default();
        match Napi::new().and_then(|mut napi| napi.set(instance, Deferral::default())) {
            Ok(()) => {}
            // With its interface.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => poll.socket = None,
            Err(error) => {
                let queue = engine.index;
                tracing::warn!(queue, %error, "the NAPI instance stays deferred: frames may come late");
            }
        }
        if let Some(socket) = &poll.socket {
            go_round(&socket.fd);
        }
    }
}
