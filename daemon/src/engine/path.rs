//! The path of frames: socket and crossing rings on one side, the transport on the other.
//!
//! A received frame belongs to the engine its header names. Ours goes to the transport, that of another queue of this node crosses to
//! its engine ([`super::crossing`]), anything else is counted and dropped. Nothing before the transport's own checks is believed: a
//! frame sent to the wrong engine by a flipped bit is dropped there.
//!
//! A frame to send is written by the transport straight into a transmit slot, behind room for the outer headers. Frames for this very
//! engine never leave it, and those for another engine of this node cross. At most [`MAX_STAGED`] descriptors are handed to the kernel at once, and no more are with it (on a veth [`MAX_ON_VETH`]),
//! so that high priority never queues behind a deep ring (transport.md §11.2). While the link is down, frames are still taken
//! from the transport: those for this node arrive, the others are lost, as on any broken wire.

use std::os::fd::OwnedFd;

use portolan_abi::tap::Way;
use portolan_transport::Endpoint;
use portolan_transport::ident::{Nanos, Priority};

use crate::credit_budget::CreditBudget;
use crate::xsk::{CHUNK_SIZE, KickOutcome, MAX_SINGLE_CHUNK_FRAME, TxSlot, Xsk};

use super::bell;
use super::busy_poll::{BusyPoll, FRAMES_PER_LOOK, gulp};
use super::counters::EngineCounters;
use super::crossing::{CrossingReceiver, CrossingSender};
use super::encap::Encapsulation;
use super::fill_depth::FillDepth;
use super::host::EngineHost;
use super::inbound::{Inbound, Seen};
use super::lookout::Lookout;
use super::routes::Routes;
use super::suspect::Suspect;
use super::tap::Tap;
use super::wedge::{Vitals, Wedge};

/// Transmit descriptors handed to the kernel at once, and with it at any time.
pub const MAX_STAGED: u32 = 32;
/// With it at any time on a veth, whose other end may go round for them itself ([`super::busy_poll`]): they are what it finds. Else none is left after a kick there.
pub const MAX_ON_VETH: u32 = 64;
/// Frames received per loop.
const RX_BUDGET: usize = 64;
/// Frames per crossing ring and loop.
const CROSSING_BUDGET: usize = 32;
/// Frames written per loop.
const TX_BUDGET: usize = 64;
/// How long a socket that cannot send is left alone.
const RETRY_NS: Nanos = 1_000_000;

/// Another engine of this node.
pub struct Neighbour {
    /// Its queue.
    pub queue: u8,
    /// From it to us.
    pub from: CrossingReceiver,
    /// From us to it.
    pub to: CrossingSender,
    /// Wakes it.
    pub wake: OwnedFd,
}

/// How long a wire without room is left alone: it takes a frame in a microsecond, if anybody takes them.
const FULL_NS: Nanos = 50_000;

/// Everything a frame passes.
pub struct Path {
    /// This node.
    pub node: u16,
    /// This engine's queue.
    pub queue: u8,
    /// The socket.
    pub xsk: Xsk<'static>,
    /// Outer headers.
    pub encap: Encapsulation,
    /// Outer headers that came last.
    pub(super) seen: Seen,
    /// Where nodes are.
    pub routes: Routes,
    /// The node's other engines.
    pub neighbours: Vec<Neighbour>,
    /// The transport.
    pub endpoint: Endpoint,
    /// Ports and ledger.
    pub host: EngineHost,
    /// What happened.
    pub counters: EngineCounters,
    /// A frame in private memory.
    pub scratch: Vec<u8>,
    /// The socket cannot send before then; 0: it can.
    pub down_until: Nanos,
    /// Transmit descriptors with the kernel at any time.
    pub max_outstanding: u32,
    /// The wire has no room before then; 0: it has.
    pub full_until: Nanos,
    /// When to look what the kernel has sent.
    pub(super) lookout: Lookout,
    /// Transmission waits for the kernel, or for the next turn.
    pub blocked: bool,
    /// Whether the queue stands still.
    pub(super) wedge: Wedge,
    /// How deep the fill ring is.
    pub(super) fill_depth: FillDepth,
    /// How the last kick ended.
    pub(super) last_kick: KickOutcome,
    /// The frame the last engine died of.
    pub(super) suspect: Suspect,
    /// Who goes round for frames.
    pub(super) busy_poll: BusyPoll,
    /// Who captures frames, if somebody does.
    pub(super) tap: Option<Box<Tap>>,
}

/// Where a frame that was written goes.
enum Onward {
    Wire(usize),
    Nowhere,
}

impl Path {
    /// Keeps as many buffers with the kernel as peers may fill before they hear from us again. Called before frames are written: what allows a new peer to
    /// send is one of ours, and so is a grant.
    fn keep_filled(&mut self, now: Nanos) {
        let endpoint = &self.endpoint;
        let config = endpoint.config();
        let budget = |peers| CreditBudget::new(&config.policy, peers, config.max_frame, u32::MAX);
        let (peers, long) = (endpoint.known_peers(), endpoint.is_placing());
        if let Some(needed) = self.fill_depth.look(now, peers, long, budget) {
            self.xsk.keep_filled(needed);
        }
    }

    /// Told to go round for frames, with this, or not any more. Who does finds no more of them at once than a look brings, so the fill ring need not hold more either: what
    /// it holds is written and read in turn, all by this core then, whose cache it has to fit into beside what applications are given. And long messages are granted
    /// what one brings ([`gulp`]).
    pub fn told_to_go_round(&mut self, now: Nanos, socket: Option<OwnedFd>) {
        let frame = usize::from(self.encap.max_frame()) + self.encap.overhead();
        let chunks = frame.div_ceil(MAX_SINGLE_CHUNK_FRAME) as u32 * FRAMES_PER_LOOK;
        let (chunks, granted) = match socket {
            Some(_) => (chunks, gulp(frame, &self.endpoint.config().policy)),
            None => (u32::MAX, 0),
        };
        self.xsk.fill_at_most(chunks);
        self.endpoint.grant_at_least(now, granted);
        self.busy_poll.told(now, socket);
    }

    /// Takes received frames from the socket; true if there were any.
    pub fn receive(&mut self, now: Nanos) -> bool {
        if self.busy_poll.is_on() && !self.xsk.has_received() {
            self.busy_poll.go_round();
        }
        let Self {
            xsk,
            encap,
            routes,
            neighbours,
            endpoint,
            host,
            counters,
            queue,
            suspect,
            tap,
            seen,
            ..
        } = self;
        let umem = xsk.umem_address();
        let ledger = host.facts.ledger();
        let working_frame = &ledger.header().working_frame;
        let mut inbound = Inbound {
            now,
            queue: *queue,
            encap,
            seen,
            routes,
            neighbours,
            endpoint,
            host,
            counters,
        };
        let outcome = xsk.receive(RX_BUDGET, |segments| {
            if let Some(tap) = tap {
                tap.received(inbound.encap, segments);
            }
            // Poison: names the UMEM frame being worked on.
            let address = segments.first().map_or(umem, |first| first.as_ptr().addr());
            let frame = address.wrapping_sub(umem) / CHUNK_SIZE;
            if !cfg!(feature = "volatile") {
                let Some(word) = suspect.meet(frame as u64 + 1) else {
                    inbound.counters.poisoned_frames += 1;
                    return;
                };
                working_frame.store(word, std::sync::atomic::Ordering::Release);
            }
            inbound.frame(segments);
        });
        let any = outcome.frames + outcome.dropped > 0;
        if any && !cfg!(feature = "volatile") {
            working_frame.store(0, std::sync::atomic::Ordering::Release);
        }
        if xsk.rx_wakeup_needed() {
            xsk.wake_rx();
        }
        any
    }

    /// Takes frames from the node's other engines; true if there were any.
    pub fn drain_crossings(&mut self, now: Nanos) -> bool {
        let mut any = false;
        for neighbour in &mut self.neighbours {
            let waiting = waiting(neighbour, &mut self.counters);
            for _ in 0..waiting.min(CROSSING_BUDGET) {
                any = true;
                match neighbour.from.pop(&mut self.scratch) {
                    Some(frame) => {
                        self.counters.crossing_received += 1;
                        if let Some(tap) = &mut self.tap {
                            tap.inside(Way::CrossedIn, self.node, neighbour.queue, &[frame]);
                        }
                        // Refusals are counted by the transport.
                        let _ = self.endpoint.handle_frame(now, &[frame], &mut self.host);
                    }
                    None => self.counters.crossing_bad += 1,
                }
            }
        }
        any
    }

    /// Whether frames of the node's other engines wait.
    pub fn is_crossed(&mut self) -> bool {
        let mut any = false;
        for neighbour in &mut self.neighbours {
            any |= waiting(neighbour, &mut self.counters) > 0;
        }
        any
    }

    /// Runs the transport's timers; true if any was due. What applications are told here is no reason to give them the core at once: that a send ended
    /// whose answer they have already, or that ran out of time.
    pub fn timers(&mut self, now: Nanos) -> bool {
        let due = self.endpoint.poll_timeout().is_some_and(|at| at <= now);
        if due {
            self.endpoint.handle_timeout(now, &mut self.host);
            self.host.delivered = false;
        }
        due
    }

    /// Has the transport write frames and hands them on; true if there were any.
    pub fn transmit(&mut self, now: Nanos) -> bool {
        self.keep_filled(now);
        self.blocked = false;
        let down = now < self.down_until;
        for written in 0..TX_BUDGET {
            // Most looks find nothing, and need no slot for it.
            if !self.endpoint.has_frames() {
                return written > 0;
            }
            let more = if down {
                self.transmit_without_wire(now)
            } else {
                let Some(slot) = self.free_slot(now) else {
                    self.blocked = true;
                    return written > 0;
                };
                self.transmit_one(now, slot)
            };
            if !more {
                return written > 0;
            }
        }
        self.blocked = true;
        true
    }

    /// Takes back what the kernel has sent, if it is time to look.
    fn reap(&mut self, now: Nanos) {
        if self.lookout.is_time(now) {
            self.xsk.reap();
            self.lookout.found(now, self.xsk.tx_outstanding());
        }
    }

    fn free_slot(&mut self, now: Nanos) -> Option<TxSlot> {
        if self.xsk.tx_staged() >= MAX_STAGED {
            return None;
        }
        if self.xsk.tx_outstanding() >= self.max_outstanding {
            self.reap(now);
            if self.xsk.tx_outstanding() >= self.max_outstanding {
                return None;
            }
        }
        self.xsk.tx_slot()
    }

    fn transmit_one(&mut self, now: Nanos, slot: TxSlot) -> bool {
        let head = self.encap.overhead();
        let buffer = self.xsk.tx_buffer(&slot);
        let Some((_, room)) = buffer.split_at_mut_checked(head) else {
            self.xsk.abandon(slot);
            return false;
        };
        let Some(frame) = self.endpoint.poll_transmit(now, room, &mut self.host) else {
            self.xsk.abandon(slot);
            return false;
        };
        let whole = buffer.get_mut(..head + frame.len).unwrap_or_default();
        let way = if frame.peer.node.0 == self.node {
            let inner = whole.get(head..).unwrap_or_default();
            hand_round(
                now,
                frame.peer.queue,
                inner,
                self.queue,
                &mut self.neighbours,
                &mut self.endpoint,
                &mut self.host,
                &mut self.counters,
                (&mut self.tap, self.node),
            );
            Onward::Nowhere
        } else {
            let high = frame.priority == Priority::High;
            let (node, queue) = (frame.peer.node.0, frame.peer.queue);
            let built = if let Some(headers) = self.routes.repeated(&frame)
                && let Some(to) = whole.first_chunk_mut()
            {
                *to = *headers;
                Some(())
            } else {
                let target = self.routes.target(node, queue, frame.flow, high);
                let built = target.and_then(|target| self.encap.build(whole, &target));
                let repeatable = built.and_then(|()| self.encap.repeatable(whole));
                self.routes.remember(frame, repeatable);
                built
            };
            match built {
                Some(()) => {
                    if let Some(tap) = &mut self.tap {
                        tap.sent(whole, node, queue);
                    }
                    Onward::Wire(whole.len())
                }
                None => {
                    self.counters.no_route += 1;
                    Onward::Nowhere
                }
            }
        };
        match way {
            Onward::Wire(len) => self.xsk.submit(slot, len),
            Onward::Nowhere => self.xsk.abandon(slot),
        }
        true
    }

    fn transmit_without_wire(&mut self, now: Nanos) -> bool {
        let mut scratch = std::mem::take(&mut self.scratch);
        let room = usize::from(self.encap.max_frame()).min(scratch.len());
        let room = scratch.get_mut(..room).unwrap_or_default();
        let frame = self.endpoint.poll_transmit(now, room, &mut self.host);
        if let Some(frame) = frame {
            if frame.peer.node.0 == self.node {
                hand_round(
                    now,
                    frame.peer.queue,
                    scratch.get(..frame.len).unwrap_or_default(),
                    self.queue,
                    &mut self.neighbours,
                    &mut self.endpoint,
                    &mut self.host,
                    &mut self.counters,
                    (&mut self.tap, self.node),
                );
            } else {
                self.counters.link_down += 1;
            }
        }
        self.scratch = scratch;
        frame.is_some()
    }

    /// Publishes what was written with one store, kicks the kernel once if it has work, and takes back what it has sent, if it is time to look.
    pub fn kick(&mut self, now: Nanos) {
        if now < self.down_until {
            return;
        }
        if self.is_full(now) {
            self.blocked = true;
            return;
        }
        self.last_kick = self.xsk.flush();
        self.down_until = match self.last_kick {
            KickOutcome::Idle | KickOutcome::Sent => 0,
            KickOutcome::Full => {
                self.full_until = now.saturating_add(FULL_NS);
                self.blocked = true;
                0
            }
            KickOutcome::Pending | KickOutcome::NoBuffers => {
                // Tried again with the next loop.
                self.blocked = true;
                0
            }
            KickOutcome::LinkDown | KickOutcome::Rebuild | KickOutcome::Failed(_) => {
                now.saturating_add(RETRY_NS)
            }
        };
        self.reap(now);
    }

    /// Whether the wire has no room just now.
    #[inline]
    pub fn is_full(&self, now: Nanos) -> bool {
        now < self.full_until
    }

    /// What of the queue stands still, if anything; once per second.
    pub fn wedged(&mut self, now: Nanos) -> Option<&'static str> {
        let xsk = &self.xsk;
        self.wedge.look(now, self.last_kick, || {
            let counters = xsk.counters();
            let dropped = xsk.statistics().map_or(0, |statistics| {
                let full = statistics.rx_ring_full.unwrap_or(0);
                full + statistics.rx_fill_ring_empty_descs.unwrap_or(0)
            });
            Vitals {
                taken: xsk.tx_taken(),
                completions: counters.tx_completions,
                received: counters.rx_frames,
                dropped,
                refused: counters.rx_bogus_descriptors,
                implausible: xsk.adopted().implausible,
            }
        })
    }

    /// Wakes the engines that frames crossed to, if they sleep.
    pub fn wake_neighbours(&mut self) {
        use std::os::fd::AsFd;
        for neighbour in &mut self.neighbours {
            if neighbour.to.wants_wake() {
                bell::wake(neighbour.wake.as_fd());
            }
        }
    }
}

/// Frames that wait from another engine.
fn waiting(neighbour: &mut Neighbour, counters: &mut EngineCounters) -> usize {
    let jumps = neighbour.from.jumps;
    let waiting = neighbour.from.available();
    counters.crossing_bad += neighbour.from.jumps - jumps;
    waiting
}

/// A frame for this node, from this engine: back into it, or across.
#[allow(clippy::too_many_arguments)]
fn hand_round(
    now: Nanos,
    to_queue: u8,
    frame: &[u8],
    queue: u8,
    neighbours: &mut [Neighbour],
    endpoint: &mut Endpoint,
    host: &mut EngineHost,
    counters: &mut EngineCounters,
    (tap, node): (&mut Option<Box<Tap>>, u16),
) {
    if let Some(tap) = tap {
        let way = if to_queue == queue {
            Way::Looped
        } else {
            Way::CrossedOut
        };
        tap.inside(way, node, to_queue, &[frame]);
    }
    if to_queue == queue {
        counters.looped_back += 1;
        // Refusals are counted by the transport.
        let _ = endpoint.handle_frame(now, &[frame], host);
    } else {
        cross(to_queue, &[frame], neighbours, counters);
    }
}

pub(super) fn cross(
    queue: u8,
    segments: &[&[u8]],
    neighbours: &mut [Neighbour],
    counters: &mut EngineCounters,
) {
    let neighbour = neighbours.iter_mut().find(|n| n.queue == queue);
    match neighbour.map(|neighbour| neighbour.to.push(segments)) {
        Some(true) => counters.crossed += 1,
        Some(false) => counters.crossing_full += 1,
        None => counters.no_route += 1,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use portolan_abi::memory::create_sealed;

    use super::super::crossing::{CROSSING_BYTES, SLOT_BYTES};
    use super::*;

    // Frames for the node's other engine, which takes none. Expect: as many cross as there is room for; the next is lost and counted, and one
    // for an engine that is not there is too.
    #[test]
    fn a_full_crossing_loses_frames_and_says_so() {
        let ring = create_sealed("crossing", CROSSING_BYTES).unwrap();
        let mut neighbours = [Neighbour {
            queue: 1,
            from: CrossingReceiver::map(ring.as_fd()).unwrap(),
            to: CrossingSender::map(ring.as_fd()).unwrap(),
            wake: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap(),
        }];
        let mut counters = EngineCounters::default();
        while counters.crossing_full == 0 {
            assert!(counters.crossed < 1 << 16, "it is never full");
            cross(1, &[b"frame"], &mut neighbours, &mut counters);
        }
        assert!(counters.crossed > 0);
        cross(2, &[b"frame"], &mut neighbours, &mut counters);
        assert_eq!((counters.crossing_full, counters.no_route), (1, 1));
        let mut frame = vec![0; SLOT_BYTES];
        assert_eq!(neighbours[0].from.pop(&mut frame), Some(&b"frame"[..]));
        let crossed = counters.crossed;
        cross(1, &[b"frame"], &mut neighbours, &mut counters);
        assert_eq!(counters.crossed, crossed + 1);
    }
}
