//! A frame's way: out of an engine, through links and switch, into a receive ring.

use portolan_transport::ident::{Nanos, Peer};
use portolan_transport::wire::{self, bare::BARE_MAGIC, frame::FRAME_HEADER_LEN};

use super::Cluster;
use super::clock::Happening;
use super::switch::Ingress;
use crate::checks::FrameSeen;

/// Bytes of a receive buffer and of a transmit descriptor.
pub(super) const BUFFER_BYTES: u32 = 3_840;
/// How a bare frame begins.
const BARE: [u8; 2] = BARE_MAGIC.to_be_bytes();
/// From one engine of a node to another, or back to itself.
const CROSSING: Nanos = 1_000;

impl Cluster {
    /// The frame in slot `frame` leaves an engine at `at`.
    pub(super) fn transmit(&mut self, at: Nanos, from: usize, to: Peer, frame: u32) {
        self.tally.frames += 1;
        self.tally.bare += u64::from(self.frames.get(frame).bytes().starts_with(&BARE));
        self.tally.bytes += u64::from(self.frames.get(frame).len);
        self.look_at_sent(at, from, to, frame);
        let sender = self.engines[from].peer;
        let node = u32::from(to.node.0) - 1;
        let engine = node * u32::from(self.setup.queues) + u32::from(to.queue);
        if node as usize >= self.links.len() || to.queue >= self.setup.queues {
            return self.frames.free(frame);
        }
        let slot = self.frames.get_mut(frame);
        (slot.to, slot.port, slot.from) = (engine, node, from as u32);
        let len = slot.len;
        if sender.node == to.node {
            let lost = sender != to && self.network.loses_crossing();
            self.tally.crossings_lost += u64::from(lost);
            return if lost {
                self.frames.free(frame);
            } else {
                self.clock.set(at + CROSSING, Happening::Arrival(frame));
            };
        }
        let home = u32::from(sender.node.0) - 1;
        let link = &mut self.links[home as usize];
        *link = at.max(*link) + self.setup.hardware.wire_time(len);
        let left = *link;
        let descriptors = len.div_ceil(BUFFER_BYTES);
        let e = &mut self.engines[from];
        e.transmit_ring.push_back((left, descriptors));
        e.transmit_used += descriptors;

        let fate = self.network.fate(home, node);
        if fate.lost {
            self.tally.lost += 1;
            return self.frames.free(frame);
        }
        self.tally.duplicated += u64::from(fate.copies) - 1;
        for copy in 0..fate.copies {
            let frame = if copy == 0 {
                frame
            } else {
                self.frames.copy(frame)
            };
            if let Some(bit) = self.network.flips(len as usize) {
                let slot = self.frames.get_mut(frame);
                slot.bytes_mut()[(bit / 8) as usize] ^= 1 << (bit % 8);
                self.tally.corrupted += 1;
            }
            let late = self.network.late();
            self.tally.late += u64::from(late > 0);
            let reaches = left + fate.late + late + self.setup.hardware.propagation_ns;
            self.clock.set(reaches, Happening::Ingress(frame));
        }
    }

    /// A frame reached the switch.
    pub(super) fn ingress(&mut self, frame: u32) {
        let slot = self.frames.get(frame);
        let (port, class, len) = (slot.port, slot.class, slot.len);
        match self.switch.ingress(self.now, port, class, frame, len) {
            Ingress::Leaves(at) => {
                let reaches = at + self.setup.hardware.propagation_ns;
                self.clock.set(reaches, Happening::Arrival(frame));
            }
            Ingress::Waits(Some(at)) => self.clock.set(at, Happening::Egress(port)),
            Ingress::Waits(None) => {}
            Ingress::Dropped => self.frames.free(frame),
        }
    }

    /// A port of the switch is free.
    pub(super) fn egress(&mut self, port: u32) {
        if let Some((frame, at, more)) = self.switch.egress(self.now, port) {
            let reaches = at + self.setup.hardware.propagation_ns;
            self.clock.set(reaches, Happening::Arrival(frame));
            if more {
                self.clock.set(at, Happening::Egress(port));
            }
        }
    }

    /// A frame reached its engine's receive ring.
    pub(super) fn arrival(&mut self, frame: u32) {
        let slot = self.frames.get(frame);
        let (to, buffers) = (slot.to as usize, slot.len.div_ceil(BUFFER_BYTES));
        let engine = &mut self.engines[to];
        if engine.receive_buffers + buffers > self.setup.hardware.receive_ring_buffers {
            self.tally.no_receive_buffer += 1;
            return self.frames.free(frame);
        }
        engine.receive_buffers += buffers;
        engine.receive_ring.push_back(frame);
        self.wake(to, self.now);
    }

    /// Those who watch the wire see a frame leave.
    fn look_at_sent(&mut self, at: Nanos, from: usize, to: Peer, frame: u32) {
        if !self.watch_frames && !self.trace {
            return;
        }
        let bytes = self.frames.get(frame).bytes();
        let segments = [bytes];
        let Ok(parsed) = wire::parse(&segments) else {
            return;
        };
        let from = self.engines[from].peer;
        let seen = FrameSeen {
            from,
            to,
            len: bytes.len(),
            id: header_crc(bytes),
            frame: &parsed,
        };
        if self.trace {
            print_frame(at, &seen);
        }
        self.book
            .borrow_mut()
            .checks
            .ask(|check| check.frame_sent(&seen));
    }

    /// And see it taken from the receive ring.
    pub(super) fn look_at_received(&mut self, to: usize, frame: u32) {
        let slot = self.frames.get(frame);
        if !self.watch_frames {
            return;
        }
        let segments = [slot.bytes()];
        let Ok(parsed) = wire::parse(&segments) else {
            return; // harmed in its headers
        };
        let seen = FrameSeen {
            from: self.engines[slot.from as usize].peer,
            to: self.engines[to].peer,
            len: slot.len as usize,
            id: header_crc(slot.bytes()),
            frame: &parsed,
        };
        self.book
            .borrow_mut()
            .checks
            .ask(|check| check.frame_received(&seen));
    }
}

fn header_crc(frame: &[u8]) -> u32 {
    let end = wire::header_area_len(frame).unwrap_or_default();
    let end = end.min(FRAME_HEADER_LEN); // where a bare frame's headers end, too, is their checksum
    let crc = frame
        .get(end.saturating_sub(4)..end)
        .and_then(|bytes| bytes.try_into().ok());
    crc.map_or(0, u32::from_be_bytes)
}

fn print_frame(at: Nanos, seen: &FrameSeen<'_>) {
    let header = seen.frame.header();
    let chunks: Vec<_> = seen.frame.chunks().map(|(chunk, _)| chunk).collect();
    eprintln!(
        "{at:>14} {}.{} -> {}.{} {:>5} B sent {} limit {} {chunks:?}",
        seen.from.node.0,
        seen.from.queue,
        seen.to.node.0,
        seen.to.queue,
        seen.len,
        header.sent_buffers,
        header.credit_limit,
    );
}
