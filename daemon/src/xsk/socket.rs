//! The socket itself: what the supervisor creates and binds, and how an engine
//! maps the rings of a socket it was handed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XdpMmapOffsets, XdpOptionsFlags, XdpRingOffset,
    XdpStatistics, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use super::error::{Attempt, BindMode, Operation, XskError, classify, refused_zero_copy};
use super::layout::{CHUNK_SIZE, RingSizes, XskConfig};
use super::ownership::{OwnershipTable, Record};
use super::receive::FILL_AT_FIRST;
use super::ring::{Descriptor, Producer, RingMemory};
use super::umem::{Mapping, UmemMemfd};

/// `XDP_MAX_TX_SKB_BUDGET` of linux/if_xdp.h: descriptors per kick in copy mode.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// What we raise it to; the kernel's default is 32.
const TX_BUDGET: u32 = 256;

/// Memory of the kernel's for frames of ours that nobody has taken yet, in copy mode: the default holds 13 of 9,000 bytes.
const SEND_MEMORY: usize = 4 << 20;

/// How often a busy queue is tried again: release takes about 16 ms.
const BUSY_RETRY: Duration = Duration::from_millis(1);

/// Where and how to bind.
#[derive(Debug, Clone, Copy)]
pub struct BindOptions {
    /// The interface, in the caller's network namespace.
    pub ifindex: u32,
    /// Its queue.
    pub queue: u32,
    /// Copy, zero-copy or the better one that works.
    pub mode: BindMode,
    /// `XDP_USE_SG`: frames of several chunks (kernel ≥ 6.6).
    pub sg: bool,
    /// How long to wait for a queue whose former socket is still being
    /// released; the calling thread sleeps.
    pub busy_patience: Duration,
}

/// A bound socket as the supervisor holds it: it keeps the queue alive, but
/// touches no ring.
#[derive(Debug)]
pub struct XskFd {
    fd: OwnedFd,
    zero_copy: bool,
}

impl XskFd {
    /// Creates a socket on `umem`, gives as many receive chunks to the fill ring as it holds at first
    /// (recording that in `ownership`, which is reset) and binds it. No engine
    /// may be using `ownership` or the queue's former socket any more.
    ///
    /// # Errors
    /// Each failure as the [`XskError`] that says what to do.
    pub fn create(
        umem: &UmemMemfd,
        config: &XskConfig,
        bind: &BindOptions,
        ownership: &[AtomicU64],
    ) -> Result<Self, XskError> {
        let attempt = Attempt {
            ifindex: bind.ifindex,
            queue: bind.queue,
            mode: bind.mode,
            sg: bind.sg,
            umem_bytes: umem.layout().bytes(),
        };
        check_config(umem, config, bind, ownership)?;
        let explain = |operation| move |errno| classify(operation, errno, &attempt);

        let fd = rustix::net::socket_with(
            AddressFamily::XDP,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(explain(Operation::Socket))?;
        register_umem(fd.as_fd(), umem, &attempt)?;
        size_rings(fd.as_fd(), &config.rings).map_err(explain(Operation::SizeRings))?;
        raise_tx_budget(fd.as_fd(), config.rings.tx);
        raise_send_memory(fd.as_fd());
        initial_fill(fd.as_fd(), config, ownership)?;
        bind_patiently(fd.as_fd(), bind, &attempt)?;
        Self::from_fd(fd)
    }

    /// A bound socket that was kept elsewhere, for instance by systemd.
    ///
    /// # Errors
    /// [`XskError::System`] if it is no AF_XDP socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, XskError> {
        let zero_copy = is_zero_copy(fd.as_fd())?;
        Ok(XskFd { fd, zero_copy })
    }

    /// The socket, to hand to an engine, the XSKMAP or a store.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What `XDP_OPTIONS` says: the NIC works on the UMEM itself.
    pub fn zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// The kernel's statistics of this socket.
    ///
    /// # Errors
    /// [`XskError::System`].
    pub fn statistics(&self) -> Result<XdpStatistics, XskError> {
        statistics(self.fd.as_fd())
    }
}

fn check_config(
    umem: &UmemMemfd,
    config: &XskConfig,
    bind: &BindOptions,
    ownership: &[AtomicU64],
) -> Result<(), XskError> {
    if umem.layout() != &config.layout {
        return Err(XskError::Misuse("the UMEM was created for another layout"));
    }
    if ownership.len() != config.layout.chunks() {
        return Err(XskError::Misuse(
            "the ownership table has not one word per chunk",
        ));
    }
    if config.layout.needs_sg() && !bind.sg {
        return Err(XskError::Misuse(
            "frames of more than 3840 bytes need scatter/gather",
        ));
    }
    config.rings.check(&config.layout)
}

fn register_umem(fd: BorrowedFd<'_>, umem: &UmemMemfd, attempt: &Attempt) -> Result<(), XskError> {
    // Mapped only while the kernel looks the pages up; it pins them.
    let mapping = Mapping::new(umem.fd(), umem.layout().bytes(), 0, false)
        .map_err(|errno| classify(Operation::MapUmem, errno, attempt))?;
    let registration = XdpUmemReg {
        addr: mapping.start().as_ptr().addr() as u64,
        len: mapping.len() as u64,
        chunk_size: CHUNK_SIZE as u32,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    sockopt::set_xdp_umem_reg(fd, registration)
        .map_err(|errno| classify(Operation::RegisterUmem, errno, attempt))
}

fn size_rings(fd: BorrowedFd<'_>, rings: &RingSizes) -> Result<(), Errno> {
    sockopt::set_xdp_umem_fill_ring_size(fd, rings.fill)?;
    sockopt::set_xdp_umem_completion_ring_size(fd, rings.completion)?;
    sockopt::set_xdp_rx_ring_size(fd, rings.rx)?;
    sockopt::set_xdp_tx_ring_size(fd, rings.tx)
}

/// Best effort: kernels before 6.18 do not know the option, and kick more often.
fn raise_tx_budget(fd: BorrowedFd<'_>, tx_ring: u32) {
    // The kernel wants 32 ..= ring size.
    let budget = TX_BUDGET.min(tx_ring);
    // SAFETY: the value is a live u32 of the length given.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_XDP,
            XDP_MAX_TX_SKB_BUDGET,
            (&raw const budget).cast(),
            size_of::<u32>() as libc::socklen_t,
        );
    }
}

/// Best effort: without CAP_NET_ADMIN as much as the administrator allows everybody.
fn raise_send_memory(fd: BorrowedFd<'_>) {
    if sockopt::set_socket_send_buffer_size_force(fd, SEND_MEMORY).is_err() {
        let _ = sockopt::set_socket_send_buffer_size(fd, SEND_MEMORY);
    }
}

/// Drivers fill their hardware ring at bind, so the chunks must be there before.
fn initial_fill(
    fd: BorrowedFd<'_>,
    config: &XskConfig,
    ownership: &[AtomicU64],
) -> Result<(), XskError> {
    let rings = MappedRings::new(fd, &config.rings)?;
    // SAFETY: `rings` lives to the end of this function; the socket is not
    // bound and nobody else has it.
    let memory = unsafe { rings.memory() };
    let mut fill = Producer::adopt(memory.fill)
        .map_err(|_| XskError::Corrupt("a new fill ring is not empty"))?;
    let table = OwnershipTable::new(ownership);
    table.reset();
    for chunk in 0..config.layout.rx_chunks().min(FILL_AT_FIRST) {
        table.set(chunk, Record::Fill(fill.next_index()));
        fill.stage(u64::from(chunk) * CHUNK_SIZE as u64);
    }
    fill.publish();
    Ok(())
}

fn bind_patiently(
    fd: BorrowedFd<'_>,
    bind: &BindOptions,
    attempt: &Attempt,
) -> Result<(), XskError> {
    let give_up = Instant::now() + bind.busy_patience;
    let mut mode = match bind.mode {
        BindMode::Copy => SocketAddrXdpFlags::XDP_COPY,
        BindMode::ZeroCopy | BindMode::Auto => SocketAddrXdpFlags::XDP_ZEROCOPY,
    };
    loop {
        let mut flags = mode | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        flags.set(SocketAddrXdpFlags::XDP_USE_SG, bind.sg);
        let address = SocketAddrXdp::new(flags, bind.ifindex, bind.queue);
        let tried_zero_copy = mode == SocketAddrXdpFlags::XDP_ZEROCOPY;
        match rustix::net::bind(fd, &address) {
            Ok(()) => return Ok(()),
            Err(Errno::BUSY) if Instant::now() < give_up => std::thread::sleep(BUSY_RETRY),
            Err(errno)
                if bind.mode == BindMode::Auto && tried_zero_copy && refused_zero_copy(errno) =>
            {
                mode = SocketAddrXdpFlags::XDP_COPY;
            }
            Err(errno) => return Err(classify(Operation::Bind, errno, attempt)),
        }
    }
}

fn query_failed(errno: Errno) -> XskError {
    XskError::System {
        operation: Operation::Query,
        errno,
    }
}

fn is_zero_copy(fd: BorrowedFd<'_>) -> Result<bool, XskError> {
    let options = sockopt::xdp_options(fd).map_err(query_failed)?;
    Ok(options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY))
}

fn statistics(fd: BorrowedFd<'_>) -> Result<XdpStatistics, XskError> {
    sockopt::xdp_statistics(fd).map_err(query_failed)
}

/// Where the four rings lie.
#[derive(Clone, Copy)]
pub(super) struct RingSet {
    pub(super) fill: RingMemory<u64>,
    pub(super) rx: RingMemory<Descriptor>,
    pub(super) tx: RingMemory<Descriptor>,
    pub(super) completion: RingMemory<u64>,
}

/// The four rings of a socket, mapped.
struct MappedRings {
    fill: Mapping,
    rx: Mapping,
    tx: Mapping,
    completion: Mapping,
    offsets: XdpMmapOffsets,
    sizes: RingSizes,
}

impl MappedRings {
    fn new(fd: BorrowedFd<'_>, sizes: &RingSizes) -> Result<Self, XskError> {
        let offsets = sockopt::xdp_mmap_offsets(fd).map_err(query_failed)?;
        if offsets.rx.flags.is_none() {
            return Err(XskError::NoAfXdp {
                errno: Errno::NOSYS,
            });
        }
        let map = |ring: &XdpRingOffset, size: u32, entry: usize, offset: u64| {
            let len = ring.desc as usize + size as usize * entry;
            Mapping::new(fd, len, offset, true).map_err(|errno| match errno {
                Errno::BUSY => XskError::CannotAdopt,
                errno => XskError::System {
                    operation: Operation::MapRings,
                    errno,
                },
            })
        };
        let (address, descriptor) = (size_of::<u64>(), size_of::<Descriptor>());
        let rx = map(
            &offsets.rx,
            sizes.rx,
            descriptor,
            libc::XDP_PGOFF_RX_RING as u64,
        )?;
        let tx = map(
            &offsets.tx,
            sizes.tx,
            descriptor,
            libc::XDP_PGOFF_TX_RING as u64,
        )?;
        let fill = map(
            &offsets.fr,
            sizes.fill,
            address,
            libc::XDP_UMEM_PGOFF_FILL_RING,
        )?;
        let completion = map(
            &offsets.cr,
            sizes.completion,
            address,
            libc::XDP_UMEM_PGOFF_COMPLETION_RING,
        )?;
        Ok(MappedRings {
            fill,
            rx,
            tx,
            completion,
            offsets,
            sizes: *sizes,
        })
    }

    /// # Safety
    /// `self` outlives the result and its copies, and the caller is the only
    /// user of the socket's rings on the user's side.
    unsafe fn memory(&self) -> RingSet {
        let (offsets, sizes) = (&self.offsets, &self.sizes);
        // SAFETY: each mapping has the offsets and the size it was made for;
        // the rest is the caller's promise.
        unsafe {
            RingSet {
                fill: ring_memory(&self.fill, &offsets.fr, sizes.fill),
                rx: ring_memory(&self.rx, &offsets.rx, sizes.rx),
                tx: ring_memory(&self.tx, &offsets.tx, sizes.tx),
                completion: ring_memory(&self.completion, &offsets.cr, sizes.completion),
            }
        }
    }
}

/// # Safety
/// `mapping` was made from `offsets` for `size` entries of `T` and outlives the
/// result; the caller is the ring's only user on our side.
unsafe fn ring_memory<T: Copy>(
    mapping: &Mapping,
    offsets: &XdpRingOffset,
    size: u32,
) -> RingMemory<T> {
    let at = |offset: u64| {
        // SAFETY: the kernel's offsets lie in front of the entries, inside the mapping.
        unsafe { mapping.start().add(offset as usize) }
    };
    let index = |offset: u64| at(offset).cast::<AtomicU32>();
    // `MappedRings::new` has refused kernels without flags (before 5.4).
    let flags = offsets.flags.unwrap_or_default();
    // SAFETY: the kernel aligns indices to cache lines and entries to 8 bytes;
    // the rest is the caller's promise.
    unsafe {
        RingMemory::new(
            index(offsets.producer),
            index(offsets.consumer),
            index(flags),
            at(offsets.desc).cast::<T>(),
            size,
        )
    }
}

/// The system calls of the hot path, apart so that tests can answer them.
pub trait Doorbell {
    /// Tells the kernel to send what is in the transmit ring.
    ///
    /// # Errors
    /// The errno of `sendto`.
    fn kick_transmit(&self) -> Result<(), Errno>;

    /// Tells the driver to look at the fill ring.
    ///
    /// # Errors
    /// The errno of `recvfrom`.
    fn kick_receive(&self) -> Result<(), Errno>;
}

/// A socket in the engine, with its rings mapped.
pub struct XskSocket {
    fd: OwnedFd,
    rings: MappedRings,
    zero_copy: bool,
}

impl XskSocket {
    /// Maps the rings of a bound socket; touches nothing.
    pub(super) fn map(fd: OwnedFd, sizes: &RingSizes) -> Result<Self, XskError> {
        let rings = MappedRings::new(fd.as_fd(), sizes)?;
        let zero_copy = is_zero_copy(fd.as_fd())?;
        Ok(XskSocket {
            fd,
            rings,
            zero_copy,
        })
    }

    /// # Safety
    /// As for `MappedRings::memory`: `self` outlives the result.
    pub(super) unsafe fn memory(&self) -> RingSet {
        // SAFETY: the caller's promise.
        unsafe { self.rings.memory() }
    }

    pub(super) fn zero_copy(&self) -> bool {
        self.zero_copy
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn statistics(&self) -> Result<XdpStatistics, XskError> {
        statistics(self.fd.as_fd())
    }

    /// Takes the pending error (`SO_ERROR`): the only sign of a removed device.
    pub(super) fn take_error(&self) -> Option<Errno> {
        match sockopt::socket_error(&self.fd) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno),
        }
    }
}

impl Doorbell for XskSocket {
    fn kick_transmit(&self) -> Result<(), Errno> {
        rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT).map(drop)
    }

    fn kick_receive(&self) -> Result<(), Errno> {
        let nothing: &mut [u8] = &mut [];
        rustix::net::recv(&self.fd, nothing, RecvFlags::DONTWAIT).map(drop)
    }
}
