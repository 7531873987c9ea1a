//! A veth pair in a network namespace of its own, our socket on one end and an
//! xsk-rs endpoint, written by others, on the other.
//!
//! The namespace has no name: a thread unshares its network, and what is made
//! there goes away with the last thread, process and socket in it. So nothing
//! needs cleaning up, also after a crash.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Encap, Steer, SteerConfig};
use portoland::xsk::{
    BindMode, BindOptions, KickOutcome, UmemLayout, UmemMemfd, Xsk, XskConfig, XskError, XskFd,
};
use xsk_rs::config::{BindFlags, LibxdpFlags, QueueSize, SocketConfig, UmemConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem};

/// Our end of the pair.
pub const OURS: &str = "ptx0";
/// The foreign end.
pub const THEIRS: &str = "ptx1";

/// How long anything may take that should happen at once.
pub const PATIENCE: Duration = Duration::from_secs(10);

const ETHERNET_HEADER: usize = 14;

/// Runs `test` in a fresh network namespace with a veth pair of `mtu` that is up.
pub fn with_veth(mtu: u32, test: impl FnOnce() + Send) {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: a network namespace shares no memory, no descriptors.
            let unshared = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(unshared, 0, "unshare: {}", std::io::Error::last_os_error());
            // IPv6 would send frames of its own; a kernel without it is as good.
            let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
            ip(&format!(
                "link add {OURS} mtu {mtu} type veth peer name {THEIRS} mtu {mtu}"
            ));
            ip(&format!("link set {OURS} up"));
            ip(&format!("link set {THEIRS} up"));
            test();
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs `ip` in the calling thread's namespace.
pub fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The index of an interface in the calling thread's namespace.
pub fn ifindex(name: &str) -> u32 {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the name is a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// A program that steers every frame of [`frame`] on `interface` into `xsk`.
pub fn steer(interface: &str, xsk: BorrowedFd<'_>) -> Steer {
    let mut steer = Steer::load(&SteerConfig {
        encap: Encap::Ethernet,
        ethertype: DEFAULT_ETHERTYPE,
        udp_base_port: 0,
        queues: 1,
        local_mac: [0; 6],
        local_v4: None,
        local_v6: None,
    })
    .unwrap();
    steer.attach(interface, AttachMode::Native).unwrap();
    steer.insert(0, xsk).unwrap();
    steer
}

/// A frame of `len` bytes that carries `number` and can be checked.
pub fn frame(number: u64, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len];
    write_frame(&mut frame, number);
    frame
}

/// [`frame`] in place.
pub fn write_frame(frame: &mut [u8], number: u64) {
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&DEFAULT_ETHERTYPE.to_be_bytes());
    frame[14..22].copy_from_slice(&number.to_be_bytes());
    for (place, byte) in frame.iter_mut().enumerate().skip(22) {
        *byte = pattern(number, place);
    }
}

fn pattern(number: u64, place: usize) -> u8 {
    (number as u8).wrapping_mul(31).wrapping_add(place as u8) ^ (place >> 8) as u8
}

/// The number a frame carries, if every byte of it is right.
pub fn check_frame(frame: &[u8]) -> Result<u64, String> {
    if frame.len() < 22 || frame[12..14] != DEFAULT_ETHERTYPE.to_be_bytes() {
        return Err(format!("not one of ours: {} bytes", frame.len()));
    }
    let number = u64::from_be_bytes(frame[14..22].try_into().unwrap());
    match (22..frame.len()).find(|place| frame[*place] != pattern(number, *place)) {
        None => Ok(number),
        Some(place) => Err(format!(
            "frame {number}: byte {place} of {} is wrong",
            frame.len()
        )),
    }
}

/// What the supervisor holds of our end.
pub struct Ours {
    pub config: XskConfig,
    pub umem: UmemMemfd,
    pub xsk: XskFd,
    pub table: Vec<AtomicU64>,
    pub steer: Steer,
}

/// The configuration for a veth of `mtu` and chunks for `frames` frames each way.
pub fn config(mtu: u32, frames: u32) -> XskConfig {
    let max_frame_len = mtu as usize + ETHERNET_HEADER;
    let rx_chunks = frames * max_frame_len.div_ceil(3840) as u32;
    let layout = UmemLayout::new(rx_chunks, frames, max_frame_len).unwrap();
    XskConfig::new(layout)
}

/// How to bind to our end.
pub fn bind_options(mode: BindMode) -> BindOptions {
    BindOptions {
        ifindex: ifindex(OURS),
        queue: 0,
        mode,
        sg: true,
        busy_patience: PATIENCE,
    }
}

impl Ours {
    pub fn create(mtu: u32, frames: u32) -> Self {
        let config = config(mtu, frames);
        let table = new_table(&config.layout);
        let umem = UmemMemfd::create(&config.layout).unwrap();
        let xsk = XskFd::create(&umem, &config, &bind_options(BindMode::Copy), &table).unwrap();
        let steer = steer(OURS, xsk.fd());
        Ours {
            config,
            umem,
            xsk,
            table,
            steer,
        }
    }

    pub fn xsk_fd(&self) -> OwnedFd {
        self.xsk.fd().try_clone_to_owned().unwrap()
    }

    pub fn adopt(&self) -> Result<Xsk<'_>, XskError> {
        Xsk::adopt(self.xsk_fd(), &self.umem.fd(), &self.table, &self.config)
    }
}

pub fn new_table(layout: &UmemLayout) -> Vec<AtomicU64> {
    (0..layout.chunks()).map(|_| AtomicU64::new(0)).collect()
}

/// Sends one frame; false if no slot is free.
pub fn submit(xsk: &mut Xsk<'_>, number: u64, len: usize) -> bool {
    let Some(slot) = xsk.tx_slot() else {
        return false;
    };
    write_frame(&mut xsk.tx_buffer(&slot)[..len], number);
    xsk.submit(slot, len);
    true
}

/// Flushes and reaps until nothing is outstanding.
pub fn settle(xsk: &mut Xsk<'_>) {
    let deadline = Instant::now() + PATIENCE;
    while xsk.tx_outstanding() > 0 {
        let outcome = xsk.flush();
        assert!(
            matches!(
                outcome,
                KickOutcome::Idle | KickOutcome::Sent | KickOutcome::Pending
            ),
            "{outcome:?}"
        );
        xsk.reap();
        assert!(
            Instant::now() < deadline,
            "{} outstanding",
            xsk.tx_outstanding()
        );
    }
}

/// An endpoint made with xsk-rs on the other end.
pub struct Foreign {
    umem: Umem,
    tx: TxQueue,
    rx: RxQueue,
    fill: FillQueue,
    completion: CompQueue,
    free: Vec<FrameDesc>,
    /// To be overwritten: xsk-rs has no other way to make a descriptor.
    blank: FrameDesc,
    /// Received pieces of a frame that is not whole yet.
    partial: Vec<u8>,
    _steer: Steer,
}

/// Half the frames of the foreign endpoint receive, half send.
const FOREIGN_FRAMES: u32 = 4096;

impl Foreign {
    pub fn create() -> Self {
        let ring = QueueSize::new(FOREIGN_FRAMES).unwrap();
        let umem_config = UmemConfig::builder()
            .fill_queue_size(ring)
            .comp_queue_size(ring)
            .build()
            .unwrap();
        let (umem, mut receive) =
            Umem::new(umem_config, FOREIGN_FRAMES.try_into().unwrap(), false).unwrap();
        let socket_config = SocketConfig::builder()
            .rx_queue_size(ring)
            .tx_queue_size(ring)
            .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
            .bind_flags(
                BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP | BindFlags::XDP_USE_SG,
            )
            .build();
        // SAFETY: the UMEM is shared with no other socket.
        let (tx, rx, rings) =
            unsafe { Socket::new(socket_config, &umem, &THEIRS.parse().unwrap(), 0) }.unwrap();
        let (mut fill, completion) = rings.unwrap();
        let free = receive.split_off(receive.len() / 2);
        // SAFETY: frames of this UMEM, in no other ring.
        assert_eq!(unsafe { fill.produce(&receive) }, receive.len());
        // SAFETY: the socket lives as long as its queues.
        let fd = unsafe { BorrowedFd::borrow_raw(rx.fd().as_raw_fd()) };
        let steer = steer(THEIRS, fd);
        Foreign {
            umem,
            tx,
            rx,
            fill,
            completion,
            blank: free[0],
            free,
            partial: Vec::new(),
            _steer: steer,
        }
    }

    /// Sends one frame, in pieces of up to 3840 bytes; false if it has no room.
    pub fn send(&mut self, frame: &[u8]) -> bool {
        const PIECE: usize = 3840;
        let count = frame.len().div_ceil(PIECE);
        self.reap();
        if self.free.len() < count {
            return false;
        }
        let mut descs = self.free.split_off(self.free.len() - count);
        for (nth, (desc, piece)) in descs.iter_mut().zip(frame.chunks(PIECE)).enumerate() {
            desc.set_options(u32::from(nth + 1 < count));
            // SAFETY: a frame of this UMEM, in no ring.
            let mut data = unsafe { self.umem.data_mut(desc) };
            let mut cursor = data.cursor();
            cursor.set_pos(0);
            cursor.write_all(piece).unwrap();
        }
        // SAFETY: as above; not touched again before its completion.
        assert_eq!(unsafe { self.tx.produce(&descs) }, count);
        true
    }

    /// Has what was sent go out.
    pub fn kick(&mut self) {
        self.tx.wakeup().unwrap();
    }

    /// True if everything sent has gone out.
    pub fn idle(&mut self) -> bool {
        self.reap();
        self.free.len() == FOREIGN_FRAMES as usize / 2
    }

    fn reap(&mut self) {
        let mut done = [self.blank; 64];
        loop {
            // SAFETY: the queue of this UMEM.
            let count = unsafe { self.completion.consume(&mut done) };
            self.free.extend_from_slice(&done[..count]);
            if count < done.len() {
                break;
            }
        }
    }

    /// Hands on what has arrived.
    pub fn receive(&mut self, mut f: impl FnMut(&[u8])) -> usize {
        let mut frames = 0;
        let mut descs = [self.blank; 64];
        loop {
            // SAFETY: the queue of this UMEM.
            let count = unsafe { self.rx.consume(&mut descs) };
            for desc in &descs[..count] {
                // SAFETY: just received, not yet given back.
                let data = unsafe { self.umem.data(desc) };
                self.partial.extend_from_slice(data.contents());
                if !desc.has_more_frames() {
                    f(&self.partial);
                    self.partial.clear();
                    frames += 1;
                }
            }
            // SAFETY: received above, the data is not used any more.
            assert_eq!(unsafe { self.fill.produce(&descs[..count]) }, count);
            if count < descs.len() {
                return frames;
            }
        }
    }
}
