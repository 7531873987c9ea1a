//! How a step runs: the call, the endpoint's answers, what is believed to be received, and the frames of the puppet.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use portolan_transport::Endpoint;
use portolan_transport::endpoint::FrameError;
use portolan_transport::ident::{Nanos, PortId, serial_lt};
use portolan_transport::wire::frame::HELD_UNIT;
use portolan_transport::wire::{self, Chunk, FrameWriter};

use super::{FIRST, Heard, OURS, Puppet, QUIET, Say, THEIRS, say};
use crate::harness::book::{Route, fill};
use crate::harness::host::{EngineDeath, Event, TestHost};
use crate::harness::{US, node};

impl Puppet {
    pub(super) fn run(
        &mut self,
        call: impl FnOnce(&mut Endpoint, Nanos, &mut TestHost) -> Result<(), FrameError>,
    ) -> Result<(), FrameError> {
        if self.dead {
            return Ok(()); // said to nobody
        }
        let (now, endpoint, host) = (self.now, &mut self.endpoint, &mut self.host);
        self.book.borrow_mut().now = now;
        match catch_unwind(AssertUnwindSafe(|| call(endpoint, now, host))) {
            Ok(result) => result,
            Err(death) if death.is::<EngineDeath>() => {
                self.dies();
                Ok(())
            }
            Err(bug) => resume_unwind(bug),
        }
    }

    /// Lets the endpoint take sends and answer; lines of what happened.
    pub(super) fn settle(&mut self, result: Result<(), FrameError>) -> Vec<String> {
        let mut lines = Vec::new();
        if let Err(error) = result {
            lines.push(format!("dropped: {error:?}"));
        }
        let _ = self.run(|endpoint, now, host| {
            while let Some(send) = host.take_send() {
                if let Err(reason) = endpoint.submit(now, &send, host) {
                    host.refuse_send(send.id, reason);
                }
            }
            Ok(())
        });
        let before = self.heard.len();
        let mut buffer = vec![0xdd; usize::from(self.config.max_frame)];
        loop {
            let mut sent = None;
            let _ = self.run(|endpoint, now, host| {
                sent = endpoint.poll_transmit(now, &mut buffer, host);
                Ok(())
            });
            let Some(transmit) = sent else { break };
            assert_eq!(transmit.peer.node, node(2));
            self.hears(&buffer[..transmit.len]);
        }
        for event in self.host.read_events() {
            lines.push(self.event(event));
        }
        let answers = self.heard[before..].iter().flat_map(|f| f.lines.clone());
        lines.extend(answers);
        if self.dead {
            return lines;
        }
        self.endpoint.check_consistency();
        for (name, _, value) in self.endpoint.counters().iter() {
            let old = self.counted.insert(name, value).unwrap_or(0);
            if value != old && !QUIET.contains(&name) && !name.starts_with("malformed_") {
                lines.push(format!("{name} +{}", value - old));
            }
        }
        lines
    }

    pub(super) fn event(&self, event: Event) -> String {
        match event {
            Event::Received { number, .. } => {
                format!("delivers {}", number.wrapping_sub(FIRST) as i32)
            }
            Event::Completed { id, status, .. } => {
                let number = self.ours.iter().position(|(other, ..)| *other == id);
                format!("completes {} {status:?}", number.expect("a send of ours"))
            }
        }
    }

    /// A frame of the endpoint.
    pub(super) fn hears(&mut self, bytes: &[u8]) {
        let segments = [bytes];
        let frame = wire::parse(&segments).expect("a frame of ours");
        let header = *frame.header();
        if !frame.is_bare() && serial_lt(self.seen_buffers, header.sent_buffers) {
            self.seen_buffers = header.sent_buffers;
        }
        if header.sent_at != 0 {
            self.newest = (header.sent_at, self.now);
        }
        let (mut lines, mut payloads) = (Vec::new(), Vec::new());
        for (chunk, view) in frame.chunks() {
            if let Some(stream) = say::stream_of(&chunk) {
                if stream.sender_port == OURS {
                    if serial_lt(self.our_epoch, stream.epoch) {
                        self.our_epoch = stream.epoch;
                    }
                } else if !matches!(chunk, Chunk::Refused { .. }) {
                    self.established |= stream.epoch == self.epoch;
                }
            }
            let line = self.text(&chunk);
            self.transcript.push(format!("< {line}"));
            lines.push(line);
            payloads.push(view.parts().flatten().copied().collect());
        }
        self.heard.push(Heard {
            header,
            bare: frame.is_bare(),
            len: bytes.len(),
            lines,
            payloads,
        });
    }

    /// The puppet counts as having received what it acknowledges.
    pub(super) fn receives(&mut self, chunk: &Chunk<'_>) {
        let (upto, one, never) = say::acknowledged(chunk, self.our_epoch);
        if let Some(number) = never {
            self.never.insert(number);
        }
        let route = self.route(true);
        let upto = upto.filter(|n| *n as usize <= self.ours.len()).unwrap_or(0);
        for number in (0..upto).chain(one) {
            let known = self.ours.get(number as usize);
            if let Some(&(id, len, _)) = known
                && !self.never.contains(&number)
                && self.has.insert(number)
            {
                let mut bytes = vec![0; len as usize];
                fill(id, 0, &mut bytes);
                self.book.borrow_mut().committed(route, id, &bytes);
            }
        }
    }

    pub(super) fn route(&self, from_us: bool) -> Route {
        let (us, them) = ((node(1), PortId(OURS)), (node(2), PortId(THEIRS)));
        let (from, to) = if from_us { (us, them) } else { (them, us) };
        Route {
            from,
            to,
            priority: self.priority,
        }
    }

    /// The bare frame with this DATA, wire.md §2.1.
    pub fn bare_frame(&mut self, data: &Say) -> Vec<u8> {
        let Chunk::Data {
            stream,
            number,
            offset,
            payload,
            ..
        } = data.chunk
        else {
            panic!("{:?} is no DATA", data.chunk);
        };
        let header = self.header;
        let association = header.engine_epoch
            ^ header.src_incarnation.rotate_left(8)
            ^ header.dst_incarnation.rotate_left(16);
        let sent_at = ((self.now + US) as u32).max(1);
        let mut frame = vec![b'P', b'B', 1, 4 * stream.priority];
        frame.extend(association.to_be_bytes());
        for node in [header.src_node, header.dst_node] {
            frame.extend(node.to_be_bytes());
        }
        frame.extend([header.src_queue, header.dst_queue]);
        frame.extend([stream.sender_port as u8, stream.receiver_port as u8]);
        for word in [sent_at, stream.epoch, number, offset, payload.crc] {
            frame.extend(word.to_be_bytes());
        }
        frame.extend(wire::crc32c(&frame).to_be_bytes());
        frame.extend(&data.payload);
        frame
    }

    /// The frame with these chunks.
    pub fn frame(&mut self, says: &[Say]) -> Vec<u8> {
        let mut buffer = vec![0; 65_535];
        let mut w = FrameWriter::new(&mut buffer);
        w.shorten(self.rows);
        let (mut bytes, mut charged) = (Vec::new(), 0);
        for say in says {
            w.push(&say.chunk).expect("room");
            bytes.extend_from_slice(&say.payload);
            charged += say.charge();
        }
        let mut payloads = w.finish_headers();
        payloads.payloads_mut().copy_from_slice(&bytes);
        self.sent_buffers = self.sent_buffers.wrapping_add(u32::from(charged > 0));
        let mut header = self.header;
        header.sent_buffers = self.sent_buffers;
        header.credit_limit = self.seen_buffers.wrapping_add(self.credit);
        header.sent_at = ((self.now + US) as u32).max(1);
        let (newest, at) = self.newest;
        header.echo = self.echo.unwrap_or(newest);
        let held = (self.now + US - at).saturating_sub(self.rtt);
        header.held = u16::try_from(held / HELD_UNIT).unwrap_or(u16::MAX);
        let len = payloads.finish(&header);
        buffer.truncate(len);
        buffer
    }
}
