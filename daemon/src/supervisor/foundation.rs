//! What a node stands on while its supervisors come and go: the socket, the steering, the memory of its engines. Made once, stored, and
//! gone on with.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, anyhow};
use portolan_abi::ledger::LedgerGeometry;
use portolan_abi::memory::LedgerMapping;
use portolan_ebpf::Steer;

use super::config::{Config, CopyMode};
use super::memory::{self, Crossings, QueueMemory};
use super::startup::{BUSY_PATIENCE, hold_udp_ports, listen};
use super::steering;
use super::store::abi::Abi;
use super::store::manifest::{self, Manifest};
use super::store::predecessor::{LeftQueue, Leftovers, Predecessor};
use super::store::{Name, Store, StoreError, points};
use crate::xsk::{BindMode, BindOptions, UmemMemfd, XskConfig, XskFd};

/// All of it.
pub(super) struct Foundation {
    /// The node's incarnation.
    pub incarnation: u64,
    /// The socket applications connect to.
    pub listener: OwnedFd,
    /// Steering.
    pub steer: Steer,
    /// What each engine works on.
    pub queues: Vec<QueueMemory>,
    /// Between engines.
    pub crossings: Crossings,
    /// Who works with it already.
    pub leftovers: Option<Leftovers>,
    /// What is only held, beside the store.
    _held: Vec<Arc<OwnedFd>>,
}

/// What a foundation is made for.
pub(super) struct Plan {
    pub config: Config,
    pub layout: XskConfig,
    pub mtu: u16,
}

impl Plan {
    pub fn geometry(&self) -> LedgerGeometry {
        self.config
            .ledger_geometry(self.layout.layout.chunks() as u32)
    }

    pub fn manifest(&self, incarnation: u64) -> Manifest {
        let frames = self.layout.layout.chunks() as u32;
        Manifest {
            abi: Abi::OURS,
            incarnation,
            basis: manifest::basis(&self.config, self.mtu, frames),
        }
    }

    /// Why what a predecessor left is of no use to us, if so.
    pub fn objection(&self, left: &Predecessor) -> Option<String> {
        let manifest = &left.manifest.0;
        let changes = manifest.changes(&self.manifest(manifest.incarnation).basis);
        if !changes.is_empty() {
            let what = changes.join(", ");
            return Some(format!("the configuration has changed ({what})"));
        }
        for (queue, fds) in left.queues.iter().enumerate() {
            let sound = LedgerMapping::map(&fds.ledger, self.geometry()).is_ok_and(|ledger| {
                let ledger = ledger.ledger();
                let incarnation = ledger.header().incarnation.load(Ordering::Relaxed);
                ledger.is_valid() && incarnation == manifest.incarnation
            });
            if !sound {
                return Some(format!("the ledger of engine {queue} is not valid"));
            }
        }
        None
    }
}

/// The file of a socket whose daemon may yet fail to start: then it is removed.
struct SocketFile<'a>(Option<&'a Path>);

impl SocketFile<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for SocketFile<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            // Gone already: as good.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Foundation {
    /// Makes everything anew and stores it. Privileges are dropped in between by `drop_privileges`, after what needs all of them.
    pub fn lay(
        plan: &Plan,
        store: &mut Store,
        lock: OwnedFd,
        drop_privileges: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let config = &plan.config;
        let mut held = vec![(Name::Lock, Arc::new(lock))];
        held.extend(
            (0..)
                .zip(hold_udp_ports(config)?)
                .map(|(queue, socket)| (Name::Udp(queue), Arc::new(socket.into()))),
        );
        let listener = listen(config)?;
        let socket_file = SocketFile(Some(&config.socket));
        drop_privileges()?;

        let incarnation = super::startup::new_incarnation()?;
        let crossings = Crossings::create(config.queues.len()).context("memory between engines")?;
        // Attached before the queues are bound, so that a second daemon is told what is in its way.
        let steer = steering::attach(config).map_err(|error| config.places.steering(error))?;
        let mut queues = Vec::new();
        for nic_queue in &config.queues {
            queues.push(queue_memory(plan, incarnation, *nic_queue)?);
        }
        let foundation = Self {
            incarnation,
            listener,
            steer,
            queues,
            crossings,
            leftovers: None,
            _held: held.iter().map(|(_, fd)| Arc::clone(fd)).collect(),
        };
        held.extend(foundation.named()?);
        let manifest = plan.manifest(incarnation).write().context("the manifest")?;
        held.push((Name::Manifest, Arc::new(manifest)));
        for (name, fd) in &held {
            store.put(*name, fd)?;
            points::reached("start.storing");
        }
        points::reached("start.stored");
        socket_file.keep();
        Ok(foundation)
    }

    /// Goes on with a predecessor's, to which there is no objection.
    pub fn resume(
        plan: &Plan,
        store: &mut Store,
        left: Predecessor,
        drop_privileges: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let config = &plan.config;
        let (manifest, manifest_fd) = left.manifest;
        let mut held = vec![
            (Name::Manifest, Arc::new(manifest_fd)),
            (Name::Lock, Arc::new(left.lock)),
        ];
        let udp = left.udp.into_iter();
        held.extend(udp.map(|(queue, fd)| (Name::Udp(queue), Arc::new(fd))));
        for (name, fd) in &held {
            store.adopt(*name, Arc::clone(fd));
        }
        let mut fresh = Vec::new();
        let listener = if config.socket.exists() {
            left.listener
        } else {
            // Somebody removed the file: nobody can connect to the socket any more.
            fresh.push(Name::Listener);
            listen(config)?
        };
        drop_privileges()?;

        // Whether the program is still on the interface is looked at, and seen to, once the supervisor runs.
        let steer = Steer::adopt(left.steer, steering::steered_queues(config))?;
        let queues: Result<_, _> = (left.queues.into_iter())
            .map(|queue| restore_queue(plan, queue))
            .collect();
        let crossings = Crossings::restore(config.queues.len(), left.crossings)
            .ok_or_else(|| anyhow!("a ring between engines is lost"))?;
        let foundation = Self {
            incarnation: manifest.incarnation,
            listener,
            steer,
            queues: queues?,
            crossings,
            leftovers: Some(left.leftovers),
            _held: held.into_iter().map(|(_, fd)| fd).collect(),
        };
        for (name, fd) in foundation.named()? {
            if fresh.contains(&name) {
                store.forget(&name.to_string());
                store.put(name, &fd)?;
            } else {
                store.adopt(name, fd);
            }
        }
        Ok(foundation)
    }

    /// What is stored of it, beside what is only held.
    fn named(&self) -> anyhow::Result<Vec<(Name, Arc<OwnedFd>)>> {
        let steer = self.steer.fds()?.context("steering is not attached")?;
        let mut all = vec![
            (Name::Listener, Arc::new(self.listener.try_clone()?)),
            (Name::XdpLink, Arc::new(steer.link)),
            (Name::XdpProgram, Arc::new(steer.program)),
            (Name::XdpSockets, Arc::new(steer.sockets)),
            (Name::XdpCounters, Arc::new(steer.counters)),
        ];
        all.extend((steer.errands).map(|fd| (Name::XdpErrands, Arc::new(fd))));
        for (queue, memory) in (0..).zip(&self.queues) {
            all.extend([
                (Name::Ledger(queue), Arc::clone(&memory.ledger_fd)),
                (Name::Umem(queue), Arc::clone(&memory.umem)),
                (Name::Xsk(queue), Arc::clone(&memory.xsk)),
                (Name::Wake(queue), Arc::clone(&memory.wake)),
            ]);
        }
        all.extend((self.crossings.iter()).map(|((from, to), fd)| (Name::Crossing(from, to), fd)));
        Ok(all)
    }
}

fn queue_memory(plan: &Plan, incarnation: u64, nic_queue: u32) -> anyhow::Result<QueueMemory> {
    let (config, xsk) = (&plan.config, &plan.layout);
    let geometry = plan.geometry();
    let (ledger_fd, ledger) =
        memory::create_ledger(geometry, incarnation).context("the ledger cannot be made")?;
    let umem = UmemMemfd::create(&xsk.layout)?;
    let bind = BindOptions {
        ifindex: config.interface_facts.index,
        queue: nic_queue,
        mode: match config.copy_mode {
            CopyMode::Auto => BindMode::Auto,
            CopyMode::Copy => BindMode::Copy,
            CopyMode::ZeroCopy => BindMode::ZeroCopy,
        },
        sg: xsk.layout.needs_sg(),
        busy_patience: BUSY_PATIENCE,
    };
    let socket = XskFd::create(&umem, xsk, &bind, ledger.ledger().frames())
        .map_err(|error| config.places.socket(error))?;
    let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map(Into::into);
    Ok(QueueMemory {
        ledger_fd: ledger_fd.into(),
        ledger,
        geometry,
        umem: clone(umem.fd())?,
        xsk: clone(socket.fd())?,
        wake: memory::eventfd()?.into(),
        zero_copy: socket.zero_copy(),
    })
}

fn restore_queue(plan: &Plan, left: LeftQueue) -> anyhow::Result<QueueMemory> {
    let geometry = plan.geometry();
    let ledger = LedgerMapping::map(&left.ledger, geometry).context("the ledger")?;
    let kept = left.xsk.try_clone()?;
    let socket = XskFd::from_fd(left.xsk)?;
    Ok(QueueMemory {
        ledger_fd: left.ledger.into(),
        ledger,
        geometry,
        umem: left.umem.into(),
        xsk: kept.into(),
        wake: left.wake.into(),
        zero_copy: socket.zero_copy(),
    })
}

impl From<StoreError> for std::io::Error {
    fn from(error: StoreError) -> Self {
        Self::other(error)
    }
}
