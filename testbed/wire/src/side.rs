//! One interface of the wire: the steering program on it and an AF_XDP socket for each of its queues.
//!
//! Copy mode, as veth knows no other; frames of several buffers, for jumbo frames. Whatever a ring has no room for stays with
//! its owner, so a slow node pushes back into its line, and from there nowhere: a wire does not push back on who sends.

use std::os::fd::{AsRawFd, BorrowedFd};

use anyhow::{Context, Result};
use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Steer, SteerConfig};
use portolan_testbed::Encap;
use portolan_testbed::wire::{WireSide, WireSpec};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use xsk_rs::config::{BindFlags, LibxdpFlags, QueueSize, SocketConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue};

use crate::umem::{CHUNKS, Frame, Memory, RING};

/// Chunks a socket is given to receive into, at most: all that two nodes have under way unasked and granted, so that nothing is
/// missed while others have the core.
const FILL: usize = RING as usize;
/// Frames taken from a socket at once, chunks given to or taken from a ring at once.
pub const BATCH: usize = 64;
/// Kicks in a row while the kernel says that it has more to send.
const KICKS: usize = 8;

/// One interface.
#[derive(Debug)]
pub struct Side {
    /// The node at its other end.
    pub node: u16,
    /// That node's MAC.
    pub mac: [u8; 6],
    /// Its queues.
    pub queues: Vec<Queue>,
    _steer: Steer,
}

impl Side {
    pub fn open(side: &WireSide, spec: &WireSpec, memory: &mut Memory) -> Result<Self> {
        let interface = &side.interface;
        // Half of all chunks are for frames on their way.
        let sockets = spec.sides.len() * usize::from(spec.queues);
        let fill = FILL.min(CHUNKS as usize / 2 / sockets.max(1));
        let mut steer = Steer::load(&steering(spec))?;
        let mut queues = Vec::new();
        for number in 0..spec.queues {
            let mut queue = Queue::open(interface, number, fill, memory)
                .with_context(|| format!("AF_XDP socket of {interface}, queue {number}"))?;
            queue.refill(memory);
            steer.insert(u32::from(number), queue.fd())?;
            queues.push(queue);
        }
        steer.attach(interface, AttachMode::Native)?;
        Ok(Self {
            node: side.node,
            mac: side.mac,
            queues,
            _steer: steer,
        })
    }
}

/// Portolan's frames to anyone.
fn steering(spec: &WireSpec) -> SteerConfig {
    SteerConfig {
        encap: match spec.encap {
            Encap::Udp4 | Encap::Udp6 => portolan_ebpf::Encap::Udp,
            Encap::Ethernet => portolan_ebpf::Encap::Ethernet,
        },
        ethertype: DEFAULT_ETHERTYPE,
        udp_base_port: spec.udp_port,
        queues: spec.queues,
        local_mac: [0; 6],
        local_v4: None,
        local_v6: None,
    }
}

/// One queue's socket.
#[derive(Debug)]
pub struct Queue {
    number: usize,
    rx: RxQueue,
    tx: TxQueue,
    fill: FillQueue,
    completion: CompQueue,
    /// Chunks the kernel has to receive into, and the most it is given.
    given: usize,
    most: usize,
    /// Chunks the kernel has to send and did not complete.
    sending: usize,
    /// Whether it was told of all of them.
    kicked: bool,
    /// Pieces of a frame that has not come whole yet.
    partial: Option<Frame>,
    /// That frame has more pieces than we take: the rest goes the same way.
    too_long: bool,
    scratch: Vec<FrameDesc>,
}

impl Queue {
    fn open(interface: &str, number: u16, most: usize, memory: &Memory) -> Result<Self> {
        let ring = QueueSize::new(RING)?;
        let config = SocketConfig::builder()
            .rx_queue_size(ring)
            .tx_queue_size(ring)
            .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
            .bind_flags(
                BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP | BindFlags::XDP_USE_SG,
            )
            .build();
        // SAFETY: every socket of the UMEM is on an interface and queue of its own, so its rings are new.
        let sockets =
            unsafe { Socket::new(config, &memory.umem, &interface.parse()?, u32::from(number)) };
        let (tx, rx, rings) = sockets?;
        let (fill, completion) = rings.context("the queue has a socket already")?;
        Ok(Self {
            number: usize::from(number),
            rx,
            tx,
            fill,
            completion,
            given: 0,
            most,
            sending: 0,
            kicked: true,
            partial: None,
            too_long: false,
            scratch: vec![memory.blank(); BATCH],
        })
    }

    /// The socket, for as long as the queue lives.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the receive queue keeps the socket open.
        unsafe { BorrowedFd::borrow_raw(self.rx.fd().as_raw_fd()) }
    }

    /// Frames the kernel could not give us, since the socket was made.
    pub fn missed(&self) -> u64 {
        let statistics = self.rx.fd().xdp_statistics();
        statistics.map_or(0, |s| {
            s.rx_dropped() + s.rx_ring_full() + s.rx_fill_ring_empty_descs()
        })
    }

    /// Takes what has come, at most [`BATCH`] pieces; returns how many.
    pub fn receive(&mut self, memory: &mut Memory, frames: &mut Vec<Frame>) -> usize {
        let mut pieces = std::mem::take(&mut self.scratch);
        // SAFETY: a ring of our UMEM; each chunk that comes out of it is taken below.
        let count = unsafe { self.rx.consume(&mut pieces) };
        self.given -= count;
        for piece in &pieces[..count] {
            let mut frame = match self.partial.take() {
                Some(frame) => frame,
                None => Frame::empty(self.number, memory.blank()),
            };
            if self.too_long || !frame.push(*piece) {
                self.too_long = true;
                memory.give_back(std::slice::from_ref(piece));
            }
            if piece.has_more_frames() {
                self.partial = Some(frame);
            } else if std::mem::take(&mut self.too_long) {
                memory.drop_frame(&frame);
            } else {
                frames.push(frame);
            }
        }
        self.scratch = pieces;
        count
    }

    /// Gives the kernel chunks to receive into.
    pub fn refill(&mut self, memory: &mut Memory) {
        while self.given + BATCH <= self.most {
            self.scratch.clear();
            self.scratch.extend(memory.take(BATCH));
            // SAFETY: chunks of our UMEM that were free, so in no ring.
            let count = unsafe { self.fill.produce(&self.scratch) };
            self.given += count;
            memory.give_back(&self.scratch[count..]);
            if count < BATCH {
                break;
            }
        }
        self.scratch.resize(BATCH, memory.blank());
    }

    /// Queues a frame for sending, or hands it back because the ring is full.
    pub fn send(&mut self, mut frame: Frame) -> Result<(), Frame> {
        let count = frame.pieces().len();
        // So that completions always have room, and a frame is queued whole or not at all.
        if self.sending + count > RING as usize || (self.tx.nb_free(count as u32) as usize) < count
        {
            return Err(frame);
        }
        // SAFETY: the frame's chunks are ours; we let go of them until they come out of the completion ring.
        let queued = unsafe { self.tx.produce(frame.sendable()) };
        debug_assert_eq!(queued, count);
        self.sending += queued;
        self.kicked = false;
        Ok(())
    }

    /// Has the kernel send what is queued, and takes back what it has sent. Returns how many frames it dropped.
    pub fn flush(&mut self, memory: &mut Memory) -> u64 {
        let mut dropped = 0;
        for _ in 0..KICKS {
            if self.kicked {
                break;
            }
            match send(self.fd(), &[], SendFlags::DONTWAIT) {
                Ok(_) => self.kicked = true,
                // The frame it was at is dropped and completed; others may wait.
                Err(Errno::BUSY) => dropped += 1,
                // Its budget is spent, or the peer's ring is full.
                Err(_) => {}
            }
            self.reap(memory);
        }
        if self.sending > 0 {
            self.reap(memory);
        }
        dropped
    }

    /// Whether the kernel must be told again to send.
    pub fn must_kick(&self) -> bool {
        !self.kicked
    }

    fn reap(&mut self, memory: &mut Memory) {
        self.scratch.resize(BATCH, memory.blank());
        loop {
            // SAFETY: a ring of our UMEM; what comes out of it was sent and is ours again.
            let count = unsafe { self.completion.consume(&mut self.scratch) };
            memory.give_back(&self.scratch[..count]);
            self.sending -= count;
            if count < BATCH {
                break;
            }
        }
    }
}
