//! What a predecessor left, sorted: either everything a node runs on, or nothing that can be gone on with.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use portolan_abi::port::CloseReason;
use portolan_ebpf::SteerFds;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::Store;
use super::inherit::Inherited;
use super::manifest::{Manifest, Unreadable};
use super::names::{Name, PortLife, PortPart};
use crate::supervisor::memory::PortMemory;
use crate::supervisor::notes::Notes;

/// Killed processes are gone within this.
const DEATH: Duration = Duration::from_secs(5);

/// A process of an engine.
#[derive(Debug)]
pub struct LeftProcess {
    /// Its queue.
    pub queue: u8,
    /// Its launch.
    pub launch: u32,
    /// Its build.
    pub build: u32,
    /// Our end of its link.
    pub link: OwnedFd,
    /// Its pidfd.
    pub exit: OwnedFd,
}

/// What one engine works on.
#[derive(Debug)]
pub struct LeftQueue {
    /// Its ledger.
    pub ledger: OwnedFd,
    /// Its UMEM.
    pub umem: OwnedFd,
    /// Its socket.
    pub xsk: OwnedFd,
    /// Its doorbell.
    pub wake: OwnedFd,
}

/// Processes, connections and ports.
#[derive(Debug, Default)]
pub struct Leftovers {
    /// Engines' processes, of a queue the youngest last.
    pub processes: Vec<LeftProcess>,
    /// The service's pidfd.
    pub service: Option<OwnedFd>,
    /// What it had found and drained.
    pub notes: Option<OwnedFd>,
    /// Connections.
    pub clients: BTreeMap<u64, OwnedFd>,
    /// Ports, as far as they are complete.
    pub ports: BTreeMap<PortLife, [OwnedFd; 5]>,
    /// Names of what makes nothing whole.
    pub odd: Vec<Name>,
    /// The predecessor was this very process: its children are ours.
    pub in_place: bool,
}

/// All that is needed to go on.
#[derive(Debug)]
pub struct Predecessor {
    /// What it belongs to.
    pub manifest: (Manifest, OwnedFd),
    /// The lock.
    pub lock: OwnedFd,
    /// The socket applications connect to.
    pub listener: OwnedFd,
    /// The kernel's sockets at our UDP ports.
    pub udp: BTreeMap<u16, OwnedFd>,
    /// Steering.
    pub steer: SteerFds,
    /// In order.
    pub queues: Vec<LeftQueue>,
    /// By the engines they connect.
    pub crossings: BTreeMap<(u8, u8), OwnedFd>,
    /// The rest.
    pub leftovers: Leftovers,
}

/// What there is to go on with.
pub enum Left {
    /// Nothing: a first start.
    Nothing,
    /// Everything.
    All(Box<Predecessor>),
    /// Something, which cannot be gone on with, and why.
    Ruins(Ruins, String),
    /// What another version left; engines go on with it.
    Foreign(super::abi::Abi),
}

/// What must be cleared away.
pub struct Ruins(BTreeMap<Name, OwnedFd>);

/// Sorts what was inherited.
pub fn sort(inherited: Inherited) -> Left {
    if inherited.is_empty() {
        return Left::Nothing;
    }
    let in_place = inherited.in_place;
    let mut fds: BTreeMap<Name, OwnedFd> = inherited.ours.into_iter().collect();
    let Some(fd) = fds.remove(&Name::Manifest) else {
        return Left::Ruins(Ruins(fds), "the manifest is lost".to_owned());
    };
    let manifest = match Manifest::read(&fd) {
        Ok(manifest) => (manifest, fd),
        Err(Unreadable::Versions(abi)) => return Left::Foreign(abi),
        Err(Unreadable::Nonsense) => {
            return Left::Ruins(Ruins(fds), "the manifest makes no sense".to_owned());
        }
    };
    let queues = manifest.0.basis.get("network.queues");
    let count = queues.and_then(|q| q.as_array()).map_or(0, Vec::len) as u8;
    if let Some(missing) = missing(&fds, count) {
        return Left::Ruins(Ruins(fds), format!("`{missing}` is lost"));
    }
    match take_all(manifest, fds, count, in_place) {
        Some(predecessor) => Left::All(Box::new(predecessor)),
        // Cannot be: nothing is missing.
        None => Left::Nothing,
    }
}

fn missing(fds: &BTreeMap<Name, OwnedFd>, queues: u8) -> Option<Name> {
    let fixed = [
        Name::Lock,
        Name::Listener,
        Name::XdpLink,
        Name::XdpProgram,
        Name::XdpSockets,
        Name::XdpCounters,
    ];
    let each = (0..queues).flat_map(|q| {
        let own = [Name::Ledger(q), Name::Umem(q), Name::Xsk(q), Name::Wake(q)];
        let others = (0..queues).filter(move |other| *other != q);
        own.into_iter()
            .chain(others.map(move |other| Name::Crossing(q, other)))
    });
    fixed
        .into_iter()
        .chain(each)
        .find(|name| !fds.contains_key(name))
}

fn take_all(
    manifest: (Manifest, OwnedFd),
    mut fds: BTreeMap<Name, OwnedFd>,
    count: u8,
    in_place: bool,
) -> Option<Predecessor> {
    let lock = fds.remove(&Name::Lock)?;
    let listener = fds.remove(&Name::Listener)?;
    let steer = SteerFds {
        link: fds.remove(&Name::XdpLink)?,
        program: fds.remove(&Name::XdpProgram)?,
        sockets: fds.remove(&Name::XdpSockets)?,
        counters: fds.remove(&Name::XdpCounters)?,
        // An older build had none.
        errands: fds.remove(&Name::XdpErrands),
    };
    let mut queues = Vec::new();
    for queue in 0..count {
        queues.push(LeftQueue {
            ledger: fds.remove(&Name::Ledger(queue))?,
            umem: fds.remove(&Name::Umem(queue))?,
            xsk: fds.remove(&Name::Xsk(queue))?,
            wake: fds.remove(&Name::Wake(queue))?,
        });
    }
    let (mut udp, mut crossings) = (BTreeMap::new(), BTreeMap::new());
    let mut left = Leftovers {
        in_place,
        ..Leftovers::default()
    };
    let mut exits = BTreeMap::new();
    let mut links = Vec::new();
    let mut parts: BTreeMap<PortLife, BTreeMap<PortPart, OwnedFd>> = BTreeMap::new();
    for (name, fd) in fds {
        match name {
            Name::Udp(queue) => drop(udp.insert(queue, fd)),
            Name::Crossing(from, to) => drop(crossings.insert((from, to), fd)),
            Name::Link(queue, launch, build) => links.push((queue, launch, build, fd)),
            Name::Process(queue, launch) => drop(exits.insert((queue, launch), fd)),
            Name::Service => left.service = Some(fd),
            Name::Notes => left.notes = Some(fd),
            Name::Client(id) => drop(left.clients.insert(id, fd)),
            Name::Port(life, part) => drop(parts.entry(life).or_default().insert(part, fd)),
            other => left.odd.push(other),
        }
    }
    for (queue, launch, build, link) in links {
        match exits.remove(&(queue, launch)) {
            Some(exit) => left.processes.push(LeftProcess {
                queue,
                launch,
                build,
                link,
                exit,
            }),
            // Nothing was told to it yet: it leaves when its link ends.
            None => left.odd.push(Name::Link(queue, launch, build)),
        }
    }
    left.odd
        .extend(exits.into_keys().map(|(q, l)| Name::Process(q, l)));
    for (life, parts) in parts {
        let names: Vec<Name> = parts.keys().map(|part| Name::Port(life, *part)).collect();
        match <[OwnedFd; 5]>::try_from(parts.into_values().collect::<Vec<_>>()) {
            Ok(whole) => drop(left.ports.insert(life, whole)),
            Err(_) => left.odd.extend(names),
        }
    }
    Some(Predecessor {
        manifest,
        lock,
        listener,
        udp,
        steer,
        queues,
        crossings,
        leftovers: left,
    })
}

impl Predecessor {
    /// What is left if it is not gone on with.
    pub fn give_up(self) -> Ruins {
        let mut all = BTreeMap::new();
        all.insert(Name::Manifest, self.manifest.1);
        all.insert(Name::Lock, self.lock);
        all.insert(Name::Listener, self.listener);
        all.insert(Name::XdpLink, self.steer.link);
        all.insert(Name::XdpProgram, self.steer.program);
        all.insert(Name::XdpSockets, self.steer.sockets);
        all.insert(Name::XdpCounters, self.steer.counters);
        if let Some(errands) = self.steer.errands {
            all.insert(Name::XdpErrands, errands);
        }
        for (queue, left) in (0..).zip(self.queues) {
            all.insert(Name::Ledger(queue), left.ledger);
            all.insert(Name::Umem(queue), left.umem);
            all.insert(Name::Xsk(queue), left.xsk);
            all.insert(Name::Wake(queue), left.wake);
        }
        let crossings = self.crossings.into_iter();
        all.extend(crossings.map(|((from, to), fd)| (Name::Crossing(from, to), fd)));
        let udp = self.udp.into_iter();
        all.extend(udp.map(|(queue, fd)| (Name::Udp(queue), fd)));
        for left in self.leftovers.processes {
            all.insert(Name::Link(left.queue, left.launch, left.build), left.link);
            all.insert(Name::Process(left.queue, left.launch), left.exit);
        }
        all.extend(self.leftovers.service.map(|fd| (Name::Service, fd)));
        all.extend(self.leftovers.notes.map(|fd| (Name::Notes, fd)));
        let clients = self.leftovers.clients.into_iter();
        all.extend(clients.map(|(id, fd)| (Name::Client(id), fd)));
        for (life, parts) in self.leftovers.ports {
            let named = PortPart::ALL.into_iter().zip(parts);
            all.extend(named.map(|(part, fd)| (Name::Port(life, part), fd)));
        }
        Ruins(all)
    }
}

impl Ruins {
    /// The lock, which is ours all the same.
    pub fn take_lock(&mut self) -> Option<OwnedFd> {
        self.0.remove(&Name::Lock)
    }

    /// Clears everything away: processes are killed, applications told that their ports are closed, the store emptied.
    pub fn clear(mut self, store: &Store, node: u16) {
        let mut processes = Vec::new();
        for (name, fd) in &self.0 {
            if matches!(name, Name::Process(..) | Name::Service) {
                // Dead already: as good.
                let _ = rustix::process::pidfd_send_signal(fd, Signal::KILL);
                processes.push(fd);
            }
        }
        let deadline = Instant::now() + DEATH;
        for exit in processes {
            if !is_dead(exit, deadline.saturating_duration_since(Instant::now())) {
                tracing::error!("an engine that was left behind survives SIGKILL");
            }
        }
        if let Some(gro) = (self.0.get(&Name::Notes).and_then(Notes::read)).and_then(|n| n.gro) {
            gro.switch_off();
        }
        let lives: Vec<PortLife> = self.0.keys().filter_map(engine_half_of).collect();
        for life in lives {
            let parts = PortPart::ALL.map(|part| self.0.remove(&Name::Port(life, part)));
            if let [Some(a), Some(b), Some(c), Some(d), Some(e)] = parts
                && let Ok(memory) = PortMemory::restore(node, life.port, [a, b, c, d, e])
            {
                // Its memory is damaged: its application sees its connection end.
                let _ = memory.mark_closed(CloseReason::Administrator);
            }
            for part in PortPart::ALL {
                store.forget(&Name::Port(life, part).to_string());
            }
        }
        for name in self.0.keys() {
            store.forget(&name.to_string());
        }
        store.forget(&Name::Manifest.to_string());
    }
}

fn engine_half_of(name: &Name) -> Option<PortLife> {
    match name {
        Name::Port(life, PortPart::Engine) => Some(*life),
        _ => None,
    }
}

/// Is the process of a pidfd dead, now or within this time?
pub fn is_dead(pidfd: &OwnedFd, within: Duration) -> bool {
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// The process id of a pidfd; `None` if the process is gone.
pub fn pid_of(pidfd: &OwnedFd) -> Option<i32> {
    let path = format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd());
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    line.trim().parse().ok().filter(|pid| *pid > 0)
}
