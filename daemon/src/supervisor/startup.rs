//! From a configuration file to a running supervisor. Each thing that can be missing on a machine ends here, in one line.
//!
//! The order matters: what needs root beyond the kept capabilities comes first (limits, socket, ports below 1024), then they are
//! dropped for good; memory, AF_XDP sockets and the XDP program do with what is kept.

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
use signal_hook::consts::{SIGINT, SIGTERM};

use super::config::{Config, CopyMode};
use super::kernel::{KernelVersion, Support};
use super::memory::{self, Crossings, QueueMemory};
use super::sockets::KernelSockets;
use super::spawn::Processes;
use super::surroundings::ThisMachine;
use super::{Parts, Supervisor, privileges, steering};
use crate::engine_link::{Encap, xsk_config};
use crate::xsk::{BindMode, BindOptions, UmemMemfd, XskConfig, XskFd};

/// A queue whose former socket is being released is free within this.
const BUSY_PATIENCE: Duration = Duration::from_secs(2);
/// Connections the kernel holds until we accept them.
const BACKLOG: i32 = 4096;

/// Runs the daemon of a node until it is asked to stop.
///
/// # Errors
/// What is in the way and what to do, one line each.
pub fn run(file: &Path) -> anyhow::Result<()> {
    let config = Config::load(file, &ThisMachine)?;
    let kernel = running_kernel()?;
    tracing::info!("{}", kernel.describe());
    privileges::check().map_err(anyhow::Error::msg)?;
    let mtu = config.mtu().min(kernel.max_mtu());
    let layout = layout(&config, mtu)?;
    log_memory(&config, &layout);

    privileges::raise_descriptor_limit();
    let _lock = lock(&config.socket)?;
    let stop = stop_signals().context("signals cannot be caught")?;
    let held = hold_udp_ports(&config)?;
    let listener = listen(&config)?;
    let _socket_file = SocketFile(&config.socket);
    privileges::drop_the_rest().context("capabilities cannot be dropped")?;

    let incarnation = new_incarnation()?;
    let crossings = Crossings::create(config.queues.len()).context("memory between engines")?;
    // Attached before the queues are bound, so that a second daemon is told what is in its way.
    let steer = steering::attach(&config)?;
    let mut queues = Vec::new();
    for nic_queue in &config.queues {
        queues.push(queue_memory(&config, &layout, incarnation, *nic_queue)?);
    }
    let launcher = Processes::new(config.user, &config.socket).context("processes")?;
    tracing::info!(
        node = config.node,
        name = config.name,
        incarnation = format!("{incarnation:016x}"),
        socket = %config.socket.display(),
        "node up"
    );
    let supervisor = Supervisor::new(Parts {
        incarnation,
        mtu,
        kernel,
        queues,
        crossings,
        listener,
        stop,
        launcher: Box::new(launcher),
        sockets: Box::new(KernelSockets::new(&config, layout)),
        steering: Box::new(steer),
        resolve_neighbours: true,
        config: config.clone(),
    })
    .context("the supervisor cannot be set up")?;
    let ended = supervisor.run().context("the event loop failed");
    drop(held);
    ended
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
    privileges::check_memlock(bytes).map_err(anyhow::Error::msg)?;
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
fn lock(socket: &Path) -> anyhow::Result<OwnedFd> {
    if let Some(directory) = socket.parent() {
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o755).create(directory);
        made.with_context(|| format!("{}: cannot be made", directory.display()))?;
    }
    let path = socket.with_extension("lock");
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| {
            format!(
                "{}: cannot be opened; check its permissions",
                path.display()
            )
        })?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => bail!(
            "another portoland has {}; stop it, or give this one a node.socket of its own",
            socket.display()
        ),
        Err(error) => Err(anyhow!(error).context(format!("{}: cannot be locked", path.display()))),
    }
}

/// Readable when SIGTERM or SIGINT came.
fn stop_signals() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (read, write) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    signal_hook::low_level::pipe::register(SIGTERM, write.try_clone()?)?;
    signal_hook::low_level::pipe::register(SIGINT, write)?;
    Ok(read)
}

/// Holds our UDP ports in the kernel, so that it never answers our frames with ICMP and gives the ports to nobody else. Nothing is
/// ever read from them.
fn hold_udp_ports(config: &Config) -> anyhow::Result<Vec<UdpSocket>> {
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
            io::ErrorKind::AddrInUse => anyhow!("UDP port {port} on {address} is in use; stop its owner (`ss -ulpn`) or set cluster.udp_port, the same on all nodes"),
            io::ErrorKind::PermissionDenied => anyhow!("no privilege to bind UDP port {port}: choose cluster.udp_port above 1023, or grant CAP_NET_BIND_SERVICE"),
            _ => anyhow!("UDP port {port} on {address} cannot be bound: {error}; check that the address is on the interface (`ip addr`)"),
        })?;
        // What arrives all the same must not pile up.
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 0).context("UDP socket")?;
        held.push(socket);
    }
    Ok(held)
}

/// Removes the socket's file when the daemon ends.
struct SocketFile<'a>(&'a Path);

impl Drop for SocketFile<'_> {
    fn drop(&mut self) {
        // Gone already: as good.
        let _ = std::fs::remove_file(self.0);
    }
}

/// The socket applications connect to. Called under the lock: a file that is there is a dead daemon's.
fn listen(config: &Config) -> anyhow::Result<OwnedFd> {
    let path = &config.socket;
    let shown = path.display();
    match std::fs::symlink_metadata(path) {
        Ok(found) if std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            std::fs::remove_file(path).with_context(|| format!("{shown}: cannot be removed"))?;
        }
        Ok(_) => bail!("{shown} is there and no socket; remove it or set node.socket"),
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
    bound
        .with_context(|| format!("{shown}: cannot be bound; check the directory's permissions"))?;
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

fn new_incarnation() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut bytes, flags).context("random numbers")?;
    // 0 means none.
    Ok(u64::from_ne_bytes(bytes).max(1))
}

fn queue_memory(
    config: &Config,
    xsk: &XskConfig,
    incarnation: u64,
    nic_queue: u32,
) -> anyhow::Result<QueueMemory> {
    let geometry = config.ledger_geometry(xsk.layout.chunks() as u32);
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
    let socket = XskFd::create(&umem, xsk, &bind, ledger.ledger().frames())?;
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
