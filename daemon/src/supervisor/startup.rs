//! From a configuration file to a running supervisor. Each thing that can be missing on a machine ends here, in one line.
//!
//! The order matters: what needs root beyond the kept capabilities comes first (limits, socket, ports below 1024), then they are
//! dropped for good; memory, AF_XDP sockets and the XDP program do with what is kept.
//!
//! A supervisor that finds what a predecessor left (`store/`) goes on with it. If that is not whole, or made for another configuration, it
//! is cleared away and the node begins anew, with another incarnation. If it belongs to another version it is left alone.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rustix::fs::{FlockOperation, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::config::{Config, Key};
use super::foundation::{Foundation, Plan};
use super::kernel::{KernelVersion, Support};
use super::leisure::Leisure;
use super::reload::{Load, Reload};
use super::sockets::KernelSockets;
use super::spawn::Processes;
use super::store::abi::Abi;
use super::store::inherit::Inherited;
use super::store::notify::Notifier;
use super::store::predecessor::{self, Left, Predecessor};
use super::store::{Store, handover, manifest};
use super::surroundings::{AsItWas, Interface, ThisMachine};
use super::{Ended, Parts, Supervisor, privileges, steering};
use crate::engine_link::{Encap, xsk_config};
use crate::xsk::XskConfig;

/// A queue whose former socket is being released is free within this.
pub(super) const BUSY_PATIENCE: Duration = Duration::from_secs(2);
/// Connections the kernel holds until we accept them.
const BACKLOG: i32 = 4096;

/// Runs the daemon of a node until it is asked to stop. `leisure` is begun and ends when it looks after its engines.
///
/// # Errors
/// What is in the way and what to do, one line each.
pub fn run(file: &Path, mut leisure: Leisure) -> anyhow::Result<()> {
    // First: before anything else can have these numbers.
    let inherited = Inherited::from_environment();
    let kernel = running_kernel()?;
    let was = inherited.interface();
    let mut plan = self::plan(file, &kernel, was.clone())?;
    crate::logging::set_level(plan.config.log_level);
    tracing::info!("{}", kernel.describe());
    if cfg!(feature = "volatile") {
        tracing::warn!("built to be measured: nothing survives the death of an engine");
    }
    privileges::check().map_err(anyhow::Error::msg)?;
    privileges::raise_descriptor_limit();
    let manager = Notifier::from_environment().context("the service manager")?;
    let mut store = Store::new(manager);
    let (left, lock) = predecessor(&plan, inherited, &store)?;
    if left.is_none() && was.is_some() {
        // What is made anew is made for the interface as it is.
        plan = self::plan(file, &kernel, None)?;
    }
    let Plan {
        config,
        layout,
        mtu,
    } = &plan;
    log_memory(config, layout);
    let signals = signals(store.outlives_us()).context("signals cannot be caught")?;
    let drop_privileges = || privileges::drop_the_rest().context("capabilities cannot be dropped");
    let foundation = match (left, lock) {
        (Some(left), _) => Foundation::resume(&plan, &mut store, *left, drop_privileges)?,
        (None, Some(lock)) => Foundation::lay(&plan, &mut store, lock, drop_privileges)?,
        (None, None) => Foundation::lay(&plan, &mut store, self::lock(config)?, drop_privileges)?,
    };
    let launcher =
        Processes::new(config.user, &config.socket, config.metrics).context("processes")?;
    tracing::info!(
        node = config.node,
        name = config.name,
        incarnation = format!("{:016x}", foundation.incarnation),
        socket = %config.socket.display(),
        "{}",
        if foundation.leftovers.is_some() { "node goes on" } else { "node up" }
    );
    let mut supervisor = Supervisor::new(Parts {
        incarnation: foundation.incarnation,
        mtu: *mtu,
        kernel,
        queues: foundation.queues,
        crossings: foundation.crossings,
        listener: foundation.listener,
        stop: signals.stop,
        leave: signals.leave,
        launcher: Box::new(launcher),
        sockets: Box::new(KernelSockets::new(config, *layout)),
        steering: Box::new(foundation.steer),
        resolve_neighbours: true,
        watch_interface: true,
        store,
        build: manifest::build(),
        reload: Some(Reload {
            signal: signals.reload,
            load: load_again(file),
        }),
        config: config.clone(),
    })
    .context("the supervisor cannot be set up")?;
    if let Some(leftovers) = foundation.leftovers {
        supervisor.succeed(leftovers);
    }
    supervisor.ready(handover::to_be_told());
    let settled = || {
        // Its thread has kept all our privileges.
        leisure.end();
        // So that it is in nobody's way for long: while it works, while it is torn down, and, since this outlives exec, until its successor
        // of an upgrade makes way by itself.
        portolan::turns::as_engines();
    };
    if supervisor.run(settled).context("the event loop failed")? == Ended::Stopped {
        // Gone already: as good. A socket whose node goes on keeps its file.
        let _ = std::fs::remove_file(&config.socket);
    }
    Ok(())
}

/// Reads the file again, for the interface as the node knows it: that it is gone for the moment is nothing to complain of.
fn load_again(file: &Path) -> Load {
    let file = file.to_owned();
    Box::new(move |config| {
        let interface = (config.interface.clone(), config.interface_facts.clone());
        Config::load(&file, &AsItWas { interface })
    })
}

/// What the node is to be made for, or is made for if a predecessor's interface is given: that may be gone or another by now, or carry less or more
/// than memory is laid out for.
fn plan(file: &Path, kernel: &Support, was: Option<(String, Interface)>) -> anyhow::Result<Plan> {
    let laid_out = was.as_ref().map(|(_, interface)| interface.mtu);
    let mut config = match was {
        Some(interface) => Config::load(file, &AsItWas { interface })?,
        None => Config::load(file, &ThisMachine)?,
    };
    if let Some(mtu) = laid_out {
        config.interface_facts.mtu = mtu;
    }
    let mtu = config.mtu().min(kernel.max_mtu());
    let layout = layout(&config, mtu)?;
    Ok(Plan {
        config,
        layout,
        mtu,
    })
}

/// What a store holds is of another version: its engines go on, but not with us.
#[derive(Debug, thiserror::Error)]
#[error(
    "the engines that are running belong to another version ({0}); start that version again, or stop the daemon for good and start this one"
)]
pub struct ForeignStore(String);

impl ForeignStore {
    /// What `portoland` then exits with.
    pub const EXIT_CODE: u8 = 4;
}

/// What to go on with, or the lock of what was cleared away.
fn predecessor(
    plan: &Plan,
    inherited: Inherited,
    store: &Store,
) -> anyhow::Result<(Option<Box<Predecessor>>, Option<OwnedFd>)> {
    for name in &inherited.unknown {
        tracing::warn!(name, "a stored descriptor is not ours: dropped");
        store.forget(name);
    }
    let (mut ruins, why) = match predecessor::sort(inherited) {
        Left::Nothing => return Ok((None, None)),
        Left::Foreign(abi) => {
            let why = Abi::OURS.misfit(&abi).unwrap_or_default();
            return Err(ForeignStore(why).into());
        }
        Left::All(left) => match plan.objection(&left) {
            None => return Ok((Some(left), None)),
            Some(why) => (left.give_up(), why),
        },
        Left::Ruins(ruins, why) => (ruins, why),
    };
    tracing::warn!("{why}: the node begins anew, ports are closed and peers are told");
    let lock = ruins.take_lock();
    ruins.clear(store, plan.config.node);
    Ok((None, lock))
}

/// Checks a configuration and, as far as that is possible without changing anything, whether the daemon could start with it.
///
/// # Errors
/// What is in the way and what to do, one line each.
pub fn check(file: &Path) -> anyhow::Result<String> {
    let config = Config::load(file, &ThisMachine)?;
    let kernel = running_kernel()?;
    let layout = layout(&config, config.mtu().min(kernel.max_mtu()))?;
    let bytes = umem_bytes(&config, &layout);
    privileges::check().map_err(anyhow::Error::msg)?;
    privileges::check_memlock(bytes)
        .map_err(|error| config.places.error(Key::UmemFrames, error))?;
    Ok(format!(
        "{}: node {} ({}) of cluster {}, {} engines on {}, {} MiB of UMEM; {}",
        file.display(),
        config.node,
        config.name,
        config.cluster,
        config.queues.len(),
        config.interface,
        bytes >> 20,
        kernel.describe()
    ))
}

/// Bytes a node of this configuration locks in memory.
pub(crate) fn memlock_needed(config: &Config) -> anyhow::Result<u64> {
    let longest = running_kernel()?.max_mtu();
    let layout = layout(config, config.mtu().min(longest))?;
    Ok(umem_bytes(config, &layout))
}

fn running_kernel() -> anyhow::Result<Support> {
    let version = KernelVersion::running().context("the kernel's version cannot be read")?;
    match version.support() {
        Support::TooOld => bail!("{}", Support::TooOld.describe()),
        support => Ok(support),
    }
}

fn layout(config: &Config, mtu: u16) -> anyhow::Result<XskConfig> {
    Ok(xsk_config(mtu, config.rx_frames(), config.umem_frames)?)
}

fn umem_bytes(config: &Config, layout: &XskConfig) -> u64 {
    (layout.layout.bytes() * config.queues.len()) as u64
}

/// Engine memory is bounded by configuration: here is the bound.
fn log_memory(config: &Config, layout: &XskConfig) {
    let engines = config.queues.len();
    let ledger = config
        .ledger_geometry(layout.layout.chunks() as u32)
        .bytes();
    let crossings = engines * (engines - 1) * crate::engine::crossing::CROSSING_BYTES;
    tracing::info!(
        engines,
        umem_kib = (engines * layout.layout.bytes()) >> 10,
        ledger_kib = (engines * ledger) >> 10,
        crossings_kib = crossings >> 10,
        arenas_at_most_kib = config.limits.arena_bytes_total >> 10,
        "engine memory (ledgers and arenas: only what is used is backed)"
    );
}

/// One daemon per socket.
fn lock(config: &Config) -> anyhow::Result<OwnedFd> {
    let socket = config.socket.as_path();
    let place = |what: String| config.places.error(Key::Socket, what);
    if let Some(directory) = socket.parent() {
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o755).create(directory);
        made.map_err(|error| {
            place(format!(
                "{} cannot be made: {error}; make it, or set node.socket",
                directory.display()
            ))
        })?;
    }
    let path = socket.with_extension("lock");
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .map_err(|error| {
            place(format!(
                "{} cannot be opened: {error}; check its permissions, or set node.socket",
                path.display()
            ))
        })?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(place(format!(
            "another portoland has {}; stop it, or give this one a node.socket of its own",
            socket.display()
        ))),
        Err(error) => Err(anyhow!(error).context(format!("{}: cannot be locked", path.display()))),
    }
}

/// Readable when signals came.
struct Signals {
    /// Stop the node.
    stop: OwnedFd,
    /// Leave it to a successor.
    leave: Option<OwnedFd>,
    /// Read the configuration again.
    reload: OwnedFd,
}

/// SIGINT stops the node. So does SIGTERM, unless somebody keeps our descriptors: a service manager sends it to restart us as well as to
/// stop us, and only it knows which. It then ends what is to end by dropping what it keeps.
fn signals(kept: bool) -> io::Result<Signals> {
    let pair = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    let (stop, interrupted) = pair()?;
    let leave = if kept {
        let (leave, terminated) = pair()?;
        signal_hook::low_level::pipe::register(SIGTERM, terminated)?;
        Some(leave)
    } else {
        signal_hook::low_level::pipe::register(SIGTERM, interrupted.try_clone()?)?;
        None
    };
    signal_hook::low_level::pipe::register(SIGINT, interrupted)?;
    let (reload, hung_up) = pair()?;
    signal_hook::low_level::pipe::register(SIGHUP, hung_up)?;
    Ok(Signals {
        stop,
        leave,
        reload,
    })
}

/// Holds our UDP ports in the kernel, so that it never answers our frames with ICMP and gives the ports to nobody else. Nothing is
/// ever read from them.
pub(super) fn hold_udp_ports(config: &Config) -> anyhow::Result<Vec<UdpSocket>> {
    let mut held = Vec::new();
    let (Encap::Udp, Some(address)) = (config.encap, config.address) else {
        return Ok(held);
    };
    for queue in 0..steering::steered_queues(config) {
        let port = config.udp_port + queue;
        let mut to = SocketAddr::new(address, port);
        if let SocketAddr::V6(v6) = &mut to
            && v6.ip().is_unicast_link_local()
        {
            v6.set_scope_id(config.interface_facts.index);
        }
        let socket = UdpSocket::bind(to).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => config.places.error(Key::UdpPort, format_args!("UDP port {port} on {address} is in use; stop its owner (`ss -ulpn`) or set cluster.udp_port, the same on all nodes")),
            io::ErrorKind::PermissionDenied => config.places.error(Key::UdpPort, format_args!("no privilege to bind UDP port {port}: choose cluster.udp_port above 1023, or grant CAP_NET_BIND_SERVICE")),
            _ => config.places.error(Key::Address, format_args!("UDP port {port} on {address} cannot be bound: {error}; check that the address is on the interface (`ip addr`)")),
        })?;
        // What arrives all the same must not pile up.
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 0).context("UDP socket")?;
        held.push(socket);
    }
    Ok(held)
}

/// The socket applications connect to. Called under the lock: a file that is there is a dead daemon's.
pub(super) fn listen(config: &Config) -> anyhow::Result<OwnedFd> {
    let path = &config.socket;
    let shown = path.display();
    match std::fs::symlink_metadata(path) {
        Ok(found) if std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            std::fs::remove_file(path).with_context(|| format!("{shown}: cannot be removed"))?;
        }
        Ok(_) => {
            let what = format_args!("{shown} is there and no socket; remove it or set node.socket");
            return Err(config.places.error(Key::Socket, what));
        }
        Err(_) => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .context("socket")?;
    let address = SocketAddrUnix::new(path.as_path()).context("socket")?;
    // Nobody gets in before owner and mode are right. No other thread makes files now.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = rustix::net::bind(&socket, &address);
    rustix::process::umask(before);
    bound.map_err(|error| {
        let what = format_args!("{shown} cannot be bound: {error}; check the directory's permissions, or set node.socket");
        config.places.error(Key::Socket, what)
    })?;
    // The mode first: afterwards the file is not ours.
    rustix::fs::chmod(
        path.as_path(),
        Mode::from_raw_mode(config.socket_mode | 0o600),
    )
    .with_context(|| format!("{shown}: its mode cannot be set"))?;
    give_socket(config)?;
    rustix::net::listen(&socket, BACKLOG).with_context(|| format!("{shown}: cannot listen"))?;
    Ok(socket)
}

/// The service must be able to connect, so the socket is its user's; whom else the mode admits is the administrator's choice.
fn give_socket(config: &Config) -> anyhow::Result<()> {
    let shown = config.socket.display();
    let own = rustix::process::geteuid().as_raw();
    let owner = (config.user.uid != own).then_some(config.user.uid);
    match std::os::unix::fs::chown(&config.socket, owner, config.socket_group) {
        // Without CAP_CHOWN: fine if no group was asked for, and everybody may connect.
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied && config.socket_group.is_none() =>
        {
            if config.socket_mode & 0o006 != 0o006 {
                tracing::warn!(
                    "{shown}: the service cannot connect, so nobody answers pings; grant CAP_CHOWN or set node.socket_mode = \"0666\""
                );
            }
            Ok(())
        }
        given => given.with_context(|| format!("{shown}: cannot be given to its owner")),
    }
}

pub(super) fn new_incarnation() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut bytes, flags).context("random numbers")?;
    // 0 means none.
    Ok(u64::from_ne_bytes(bytes).max(1))
}
