//! An AF_XDP socket and the frames that go through it.
//!
//! A frame is an Ethernet header, [`Stamp`], [`Label`], and payload; frames longer than a chunk of the UMEM are of several pieces. Whoever sends
//! stages frames and kicks the kernel once per batch; whoever receives sees each piece where it lies. Each chunk is in exactly one
//! place: the free list or a ring of the socket. That is what every `unsafe` block here leans on.

use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Encap, Frames, Steer, SteerConfig};
use rustix::net::{SendFlags, send};
use xsk_rs::config::{BindFlags, LibxdpFlags, QueueSize, SocketConfig, UmemConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket as Xsk, TxQueue, Umem};

use super::WireRole;
use super::polling::Polling;
use super::window::{STAMP, Stamp, UNDER_WAY, Window};

/// Entries of every ring, and chunks to send from.
const RING: u32 = 2048;
/// Bytes of a frame that one chunk takes as it is received.
const CHUNK: usize = 3840;
/// Pieces taken, and chunks given, at once.
const BATCH: usize = 64;
/// Bound on binding: the last owner's socket is released a moment after its death.
const BIND: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// Up to this MTU frames fit a page, with what the kernel puts before and behind them.
const PAGE_MTU: u32 = 3_500;
const ETHERNET: usize = 14;
/// Frames the kernel sends for one kick; it is 32 unless told otherwise.
const BUDGET: libc::c_int = 256;
/// `XDP_MAX_TX_SKB_BUDGET` of `linux/if_xdp.h`.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// What is in front of a frame's payload: all that a receiver needs to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// Length of the whole message.
    pub message: u32,
    /// Length of the payload in this frame.
    pub payload: u32,
    /// CRC32C of it, where somebody computes it.
    pub crc: u32,
    /// Where in the message it belongs. 0: the message begins with this frame, whatever became of the last one.
    pub at: u32,
}

/// Bytes of a label, and of what [`Window`] has in front of a frame.
pub const LABEL: usize = 16;
const FRONT: usize = ETHERNET + LABEL + STAMP;

impl Label {
    /// Whether the message ends with this frame.
    pub fn is_last(&self) -> bool {
        self.at.saturating_add(self.payload) >= self.message
    }

    fn to_bytes(self) -> [u8; LABEL] {
        let mut bytes = [0; LABEL];
        let words = [self.message, self.payload, self.crc, self.at];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes.get(..LABEL)?.chunks_exact(4);
        let mut word = || {
            let word = words.next()?.first_chunk::<4>()?;
            Some(u32::from_ne_bytes(*word))
        };
        Some(Self {
            message: word()?,
            payload: word()?,
            crc: word()?,
            at: word()?,
        })
    }
}

/// What a frame carries.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// So many bytes, whatever they are.
    Anything(usize),
    /// These.
    Copied(&'a [u8]),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Anything(len) => *len,
            Self::Copied(bytes) => bytes.len(),
        }
    }
}

/// A socket of queue 0, alone on its interface.
pub struct Socket {
    umem: Umem,
    rx: RxQueue,
    tx: TxQueue,
    fill: FillQueue,
    completion: CompQueue,
    _steer: Steer,
    ethernet: [u8; ETHERNET],
    /// Payload of a full frame, and what a chunk takes when it is sent.
    frame: usize,
    chunk: usize,
    /// To send from.
    free: Vec<FrameDesc>,
    /// Staged for sending, and not told to the kernel yet.
    staged: Vec<FrameDesc>,
    /// The kernel has not been kicked for all that it was told.
    owed: bool,
    /// Where what is received lies, to be given back.
    taken: Vec<FrameDesc>,
    scratch: Vec<FrameDesc>,
    /// The next piece continues a frame.
    inside: bool,
    window: Window,
    polling: Option<Polling>,
}

/// Chunks to receive into: for all frames that may be under way and those being looked at. More would only wander through the caches (with 1,024 a way was 4 %
/// longer, docs/tuning.md).
fn chunks_to_fill(mtu: u32) -> usize {
    (UNDER_WAY as usize + BATCH) * (mtu as usize + ETHERNET).div_ceil(CHUNK)
}

impl Socket {
    pub fn open(role: &WireRole) -> Result<Self> {
        let deadline = Instant::now() + BIND;
        loop {
            match Self::try_open(role) {
                Ok(socket) => return Ok(socket),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn try_open(role: &WireRole) -> Result<Self> {
        let ring = QueueSize::new(RING)?;
        let config = UmemConfig::builder()
            .fill_queue_size(ring)
            .comp_queue_size(ring)
            .build()?;
        let wanted = chunks_to_fill(role.mtu);
        let chunks = RING + wanted as u32;
        let chunk = config.mtu() as usize;
        let chunks = NonZeroU32::new(chunks).context("no chunks")?;
        let (umem, mut free) = Umem::new(config, chunks, false).context("UMEM")?;
        let config = SocketConfig::builder()
            .rx_queue_size(ring)
            .tx_queue_size(ring)
            .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
            .bind_flags(
                BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP | BindFlags::XDP_USE_SG,
            )
            .build();
        // SAFETY: the only socket of this UMEM, so its rings are new.
        let socket = unsafe { Xsk::new(config, &umem, &role.interface.parse()?, 0) };
        let (tx, rx, rings) = socket.context("socket")?;
        let (mut fill, completion) = rings.context("the queue has a socket already")?;
        let received = free.split_off(RING as usize);
        // SAFETY: chunks of our UMEM that are in no other ring and no longer in the free list.
        let given = unsafe { fill.produce(&received) };
        anyhow::ensure!(
            given == wanted,
            "the fill ring took {given} chunks of {wanted}"
        );
        raise_budget(tx.fd().as_raw_fd());
        // As Portolan does on veth.
        let frames = match role.mtu {
            0..=PAGE_MTU => Frames::OfOneBuffer,
            _ => Frames::OfSeveralBuffers,
        };
        let config = SteerConfig {
            encap: Encap::Ethernet,
            ethertype: DEFAULT_ETHERTYPE,
            udp_base_port: 0,
            queues: 1,
            local_mac: role.mac,
            local_v4: None,
            local_v6: None,
        };
        let mut steer = Steer::load_for(&config, frames)?;
        // SAFETY: the receive queue keeps the socket open.
        steer.insert(0, unsafe { BorrowedFd::borrow_raw(rx.fd().as_raw_fd()) })?;
        steer.attach(&role.interface, AttachMode::Generic)?;
        let mut ethernet = [0; ETHERNET];
        ethernet[..6].copy_from_slice(&role.peer);
        ethernet[6..12].copy_from_slice(&role.mac);
        ethernet[12..].copy_from_slice(&DEFAULT_ETHERTYPE.to_be_bytes());
        let blank = *free.first().context("no chunks")?;
        Ok(Self {
            umem,
            rx,
            tx,
            fill,
            completion,
            _steer: steer,
            ethernet,
            frame: role.mtu as usize - LABEL - STAMP,
            chunk,
            free,
            staged: Vec::with_capacity(RING as usize),
            owed: false,
            taken: Vec::with_capacity(2 * BATCH),
            scratch: vec![blank; BATCH],
            inside: false,
            window: Window::default(),
            polling: role
                .polled
                .then(|| Polling::open(&role.interface))
                .transpose()?,
        })
    }

    /// Payload of a full frame.
    pub fn frame_payload(&self) -> usize {
        self.frame
    }

    /// Frames that were sent and did not come, whoever dropped them.
    pub fn missed(&self) -> u64 {
        self.window.missing()
    }

    /// Stages a frame; false when there is no room for it, here or at the other end.
    pub fn stage(&mut self, label: Label, payload: Payload<'_>) -> bool {
        if !self.window.is_open() {
            return false;
        }
        let stamp = self.window.next();
        let staged = self.stage_with(stamp, label, payload);
        if staged {
            self.window.sent(stamp);
        }
        staged
    }

    fn stage_with(&mut self, stamp: Stamp, label: Label, payload: Payload<'_>) -> bool {
        let total = FRONT + payload.len();
        let pieces = total.div_ceil(self.chunk);
        if self.free.len() < pieces {
            self.reap();
            if self.free.len() < pieces {
                return false;
            }
        }
        let label = label.to_bytes();
        let (mut done, mut left) = (0, total);
        for piece in 0..pieces {
            let Some(mut chunk) = self.free.pop() else {
                return false;
            };
            let len = left.min(self.chunk);
            left -= len;
            // SAFETY: a free chunk is in no ring and nobody's.
            let mut data = unsafe { self.umem.data_mut(&mut chunk) };
            data.cursor().set_pos(len);
            let mut room = data.contents_mut();
            if piece == 0 {
                let (front, rest) = room.split_at_mut(FRONT);
                front[..ETHERNET].copy_from_slice(&self.ethernet);
                front[ETHERNET..][..STAMP].copy_from_slice(&stamp.to_bytes());
                front[ETHERNET + STAMP..].copy_from_slice(&label);
                room = rest;
            }
            if let Payload::Copied(bytes) = payload {
                room.copy_from_slice(&bytes[done..done + room.len()]);
                done += room.len();
            }
            chunk.set_options(u32::from(piece + 1 < pieces));
            self.staged.push(chunk);
        }
        true
    }

    /// Has the kernel send what is staged, in batches of what it sends for one kick.
    pub fn flush(&mut self) {
        if !self.staged.is_empty() {
            // SAFETY: chunks of our UMEM, in no ring; we let go of them until they come out of the completion ring.
            let told = unsafe { self.tx.produce(&self.staged) };
            // All of them or none: there are no more chunks than entries.
            debug_assert_eq!(told, self.staged.len());
            self.staged.clear();
            self.owed = true;
        }
        if self.owed {
            // SAFETY: the receive queue keeps the socket open.
            let socket = unsafe { BorrowedFd::borrow_raw(self.rx.fd().as_raw_fd()) };
            self.owed = send(socket, &[], SendFlags::DONTWAIT).is_err();
            self.reap();
        }
    }

    /// Frames staged since the last [`Socket::flush`].
    pub fn staged(&self) -> usize {
        self.staged.len()
    }

    /// Hands what has come, at most a batch, to `piece`: with the label where a frame begins. Whether anything came.
    pub fn receive(&mut self, mut piece: impl FnMut(Option<Label>, &[u8])) -> bool {
        // SAFETY: a ring of our UMEM; each chunk that comes out of it goes into the fill ring again.
        let mut count = unsafe { self.rx.consume(&mut self.scratch) };
        if count == 0
            && let Some(polling) = &self.polling
        {
            polling.go_round();
            // SAFETY: as above.
            count = unsafe { self.rx.consume(&mut self.scratch) };
        }
        for chunk in &self.scratch[..count] {
            // SAFETY: the chunk came out of the receive ring, so nobody writes it; the length is what the kernel wrote.
            let data = unsafe { self.umem.data(chunk) };
            let bytes = data.contents();
            if std::mem::replace(&mut self.inside, chunk.has_more_frames()) {
                piece(None, bytes);
            } else if let Some((front, rest)) = bytes.split_at_checked(FRONT)
                && let Some(stamp) = Stamp::read(&front[ETHERNET..])
                && let Some(label) = Label::read(&front[ETHERNET + STAMP..])
                && self.window.came(stamp)
            {
                piece(Some(label), rest);
            }
        }
        self.taken.extend_from_slice(&self.scratch[..count]);
        if self.taken.len() >= BATCH {
            // SAFETY: chunks of our UMEM that came out of the receive ring and are in no other.
            let given = unsafe { self.fill.produce(&self.taken) };
            self.taken.drain(..given);
        }
        // Once there is room again for what was taken.
        if self.window.owes() {
            let stamp = self.window.word();
            if self.stage_with(stamp, Label::default(), Payload::Anything(0)) {
                self.window.sent(stamp);
                self.flush();
            }
        }
        count > 0
    }

    fn reap(&mut self) {
        loop {
            // SAFETY: a ring of our UMEM; what comes out of it was sent and is ours again.
            let count = unsafe { self.completion.consume(&mut self.scratch) };
            self.free.extend_from_slice(&self.scratch[..count]);
            if count < BATCH {
                break;
            }
        }
    }
}

/// Kernels that do not know it go on with 32.
fn raise_budget(socket: libc::c_int) {
    let budget = BUDGET;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is an int, read during the call.
    let _ = unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_XDP,
            XDP_MAX_TX_SKB_BUDGET,
            std::ptr::from_ref(&budget).cast(),
            len,
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_that_reaches_the_end_is_the_last() {
        let frame = |payload, at| Label {
            message: 100,
            payload,
            crc: 0,
            at,
        };
        assert!(frame(100, 0).is_last());
        assert!(!frame(60, 0).is_last());
        assert!(frame(40, 60).is_last());
        assert!(Label::default().is_last());
    }

    #[test]
    fn a_label_is_read_as_it_was_written() {
        let label = Label {
            message: 1,
            payload: 2,
            crc: 0xdead_beef,
            at: 3,
        };
        assert_eq!(Label::read(&label.to_bytes()), Some(label));
        assert_eq!(Label::read(&[0; LABEL - 1]), None);
    }
}
