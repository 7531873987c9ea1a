//! What happens next, and an engine's turn.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use portolan_transport::Endpoint;
use portolan_transport::ident::{Nanos, NodeId, Priority};

use super::clock::Happening;
use super::engine::Command;
use super::wire::BUFFER_BYTES;
use super::{Application, Cluster};
use crate::checks::Usage;
use crate::harness::host::{EngineDeath, TestHost};

/// Frames in, and frames out, of one turn.
const BATCH: usize = 16;
/// A turn costs at least this.
const LEAST: Nanos = 50;
/// How long a successor takes if nobody said.
const TAKEOVER: Nanos = 1_000_000;
/// Turns in a row that do nothing: time stands still, for all it matters.
const IDLE_TURNS: u32 = 10_000;
/// Things that happen between two looks at how long everything takes.
const LOOK_AT_TIME: u64 = 256;

impl Cluster {
    /// Runs until `done`, or until `end`. Whether it was done. Asked after every thing that happens, so `done` must be cheap.
    pub fn run<A: Application>(
        &mut self,
        app: &mut A,
        end: Nanos,
        mut done: impl FnMut(&Self, &A) -> bool,
    ) -> bool {
        let mut happened = 0;
        loop {
            if done(self, app) {
                return true;
            }
            happened += 1;
            if happened % LOOK_AT_TIME == 0 {
                self.time_passed(self.now);
            }
            match self.clock.next() {
                Some(at) if at <= end => {}
                next => {
                    // Nothing will ever happen, or nothing before the end.
                    if next.is_none() {
                        self.time_passed(Nanos::MAX / 2);
                    }
                    self.now = self.now.max(end);
                    return false;
                }
            }
            self.happen(app);
        }
    }

    fn time_passed(&mut self, now: Nanos) {
        let mut book = self.book.borrow_mut();
        let waiting = book.waiting_len();
        book.checks.ask(|check| check.passed(now, waiting));
    }

    fn happen<A: Application>(&mut self, app: &mut A) {
        let Some((at, what)) = self.clock.pop() else {
            return;
        };
        self.now = self.now.max(at);
        match what {
            Happening::Turn(engine) => self.turn(engine as usize, at),
            Happening::Ingress(frame) => self.ingress(frame),
            Happening::Egress(port) => self.egress(port),
            Happening::Arrival(frame) => self.arrival(frame),
            Happening::Read(engine) => self.read(engine as usize, app),
            Happening::Alarm(name) => app.alarm(self, name),
        }
    }

    /// The engine runs at `at`, or earlier.
    pub(super) fn wake(&mut self, engine: usize, at: Nanos) {
        let e = &mut self.engines[engine];
        let at = at.max(e.busy_until).max(self.now);
        if at < e.wake_at {
            e.wake_at = at;
            self.clock.set(at, Happening::Turn(engine as u32));
        }
    }

    fn turn(&mut self, index: usize, due: Nanos) {
        let e = &mut self.engines[index];
        if e.wake_at != due {
            return; // an earlier turn took its place
        }
        e.wake_at = Nanos::MAX;
        let ready = e.stopped_until.max(e.busy_until);
        if ready > self.now {
            return self.wake(index, ready);
        }
        if e.endpoint.is_none() {
            if e.reborn_at > self.now {
                let at = e.reborn_at;
                return self.wake(index, at);
            }
            self.take_over(index);
        }
        self.tally.turns += 1;
        self.book.borrow_mut().now = self.now;
        let start = self.now + LEAST;
        let mut at = start;
        let commands = self.obey(index, at);
        self.receive(index, &mut at);
        // An engine does what is due before it transmits, or afterwards.
        let afterwards = self.engines[index].turns.is_multiple_of(2);
        let mut due = false;
        self.with(index, |endpoint, host| {
            due = endpoint.poll_timeout().is_some_and(|due| due <= at);
            if due && !afterwards {
                endpoint.handle_timeout(at, host);
            }
            while let Some(send) = host.take_send() {
                if let Err(reason) = endpoint.submit(at, &send, host) {
                    host.refuse_send(send.id, reason);
                }
            }
        });
        let (mut more, room_at) = self.send(index, &mut at);
        if due && afterwards {
            self.with(index, |endpoint, host| endpoint.handle_timeout(at, host));
            more = true;
        }
        self.after_turn(index, at, at > start || commands, more, room_at);
    }

    /// When the engine runs again, and when its applications read.
    fn after_turn(&mut self, index: usize, at: Nanos, worked: bool, more: bool, room_at: Nanos) {
        let now = self.now;
        let e = &mut self.engines[index];
        e.busy_until = at;
        e.turns += 1;
        e.idle_turns = if worked { 0 } else { e.idle_turns + 1 };
        if e.idle_turns > IDLE_TURNS {
            let timeout = e.endpoint.as_ref().and_then(Endpoint::poll_timeout);
            #[allow(clippy::panic)] // how a run ends
            {
                panic!(
                    "{:?}: time stands still at {now}, timeout {timeout:?}",
                    e.peer
                );
            }
        }
        let look = self.look_every > 0 && e.turns.is_multiple_of(self.look_every);
        if let Some(endpoint) = &e.endpoint {
            let next = if more || !e.receive_ring.is_empty() {
                at
            } else {
                endpoint.poll_timeout().unwrap_or(Nanos::MAX).min(room_at)
            };
            if next < Nanos::MAX {
                self.wake(index, next);
            }
        }
        if look {
            self.look(index);
        }
        let e = &mut self.engines[index];
        if e.host.has_events() && !e.read_due {
            e.read_due = true;
            let at = at + e.read_lag;
            self.clock.set(at, Happening::Read(index as u32));
        }
    }

    /// Does what was asked. Whether there was anything.
    fn obey(&mut self, index: usize, at: Nanos) -> bool {
        let (max_frame, mut any) = (self.setup.max_frame, false);
        while let Some(command) = self.engines[index].commands.pop_front() {
            any = true;
            self.with(index, |endpoint, host| match command {
                Command::Provided(port) => endpoint.buffer_provided(at, port),
                Command::Opened(port) => endpoint.port_opened(port),
                Command::Closed(port) => endpoint.port_closed(at, port, host),
                Command::Cancel(send) => {
                    if let Some(stream) = host.stream_of(send) {
                        endpoint.cancel(at, send, stream);
                    }
                }
                Command::Resume(stream) => endpoint.resume_sending(at, stream),
                Command::Drop(stream) => endpoint.drop_sends(at, stream, host),
                Command::Grant(bytes) => endpoint.grant_at_least(at, bytes),
                Command::Node(node) => {
                    endpoint.set_node(at, node, max_frame);
                }
            });
        }
        any
    }

    /// A batch from the receive ring.
    fn receive(&mut self, index: usize, at: &mut Nanos) {
        for _ in 0..BATCH {
            let e = &mut self.engines[index];
            if e.endpoint.is_none() {
                return;
            }
            let Some(frame) = e.receive_ring.pop_front() else {
                return;
            };
            let slot = self.frames.get(frame);
            e.receive_buffers -= slot.len.div_ceil(BUFFER_BYTES);
            *at += self.setup.hardware.cost(slot.len);
            self.look_at_received(index, frame);
            let (now, segment) = (*at, self.setup.segment);
            let bytes = self.frames.get(frame).bytes();
            // The buffer that holds the headers is long enough for them; the rest is cut as buffers are.
            let headers = bytes
                .get(4..6)
                .map_or(0, |b| usize::from(u16::from_be_bytes([b[0], b[1]])));
            let first = segment.max(headers).min(bytes.len());
            let mut segments: [&[u8]; 8] = [&[]; 8];
            segments[0] = &bytes[..first];
            let mut count = 1;
            for (place, part) in segments[1..].iter_mut().zip(bytes[first..].chunks(segment)) {
                *place = part;
                count += 1;
            }
            let e = &mut self.engines[index];
            if let Some(endpoint) = &mut e.endpoint {
                let host = &mut e.host;
                let run = || endpoint.handle_frame(now, &segments[..count], host);
                if let Err(death) = catch_unwind(AssertUnwindSafe(run)) {
                    self.died(index, death);
                }
            }
            self.frames.free(frame);
        }
    }

    /// A batch into the transmit ring. Whether there may be more, and when the ring has room for it. Some turns have one time for all of it, as
    /// real engines have, without which there are no trains; some look at the clock for each frame.
    fn send(&mut self, index: usize, at: &mut Nanos) -> (bool, Nanos) {
        let one_time = (self.engines[index].turns % 4 < 2).then_some(*at);
        for _ in 0..BATCH {
            let e = &mut self.engines[index];
            e.reap(*at);
            if e.transmit_used >= self.setup.hardware.transmit_ring {
                let room_at = e.transmit_ring.front().map_or(Nanos::MAX, |first| first.0);
                return (false, room_at);
            }
            let frame = self.frames.take();
            let (now, slot) = (one_time.unwrap_or(*at), self.frames.get_mut(frame));
            let Some(endpoint) = &mut e.endpoint else {
                self.frames.free(frame);
                return (false, Nanos::MAX);
            };
            let host = &mut e.host;
            let run = || endpoint.poll_transmit(now, slot.buffer(), host);
            match catch_unwind(AssertUnwindSafe(run)) {
                Ok(Some(transmit)) => {
                    slot.len = transmit.len as u32;
                    slot.class = u8::from(transmit.priority == Priority::High);
                    *at += self.setup.hardware.cost(slot.len);
                    self.transmit(*at, index, transmit.peer, frame);
                }
                Ok(None) => {
                    self.frames.free(frame);
                    return (false, Nanos::MAX);
                }
                Err(death) => {
                    self.frames.free(frame);
                    self.died(index, death);
                    return (false, Nanos::MAX);
                }
            }
        }
        (true, Nanos::MAX)
    }

    /// Runs part of a living engine.
    fn with(&mut self, index: usize, run: impl FnOnce(&mut Endpoint, &mut TestHost)) {
        let e = &mut self.engines[index];
        let Some(endpoint) = &mut e.endpoint else {
            return;
        };
        let host = &mut e.host;
        if let Err(death) = catch_unwind(AssertUnwindSafe(|| run(endpoint, host))) {
            self.died(index, death);
        }
    }

    /// It died at one of its stores, or it has a bug.
    fn died(&mut self, index: usize, death: Box<dyn std::any::Any + Send>) {
        if !death.is::<EngineDeath>() {
            resume_unwind(death);
        }
        let pause = self.rng.below(2 * TAKEOVER);
        self.kill(index, pause);
    }

    fn take_over(&mut self, index: usize) {
        let nodes = self.nodes();
        let (now, max_frame) = (self.now, self.setup.max_frame);
        let e = &mut self.engines[index];
        e.reborn_at = Nanos::MAX;
        e.host.engine_died();
        e.config.engine_epoch = e.config.engine_epoch.wrapping_add(1);
        let mut endpoint = Endpoint::restore(e.config.clone(), now, &e.host.durable());
        for id in 1..=nodes {
            endpoint.set_node(now, NodeId(id), max_frame);
        }
        // What the applications asked for meanwhile is said in full here, or still in the commands.
        e.commands.retain(|command| {
            matches!(
                command,
                Command::Cancel(_) | Command::Resume(_) | Command::Drop(_)
            )
        });
        for port in e.host.open_ports() {
            endpoint.port_opened(port);
        }
        for port in e.host.closed_ports() {
            endpoint.port_closed(now, port, &mut e.host);
        }
        e.endpoint = Some(endpoint);
        let peer = e.peer;
        self.book
            .borrow_mut()
            .checks
            .ask(|check| check.engine_died(peer));
    }

    /// The applications of an engine read their events.
    fn read<A: Application>(&mut self, index: usize, app: &mut A) {
        let e = &mut self.engines[index];
        e.read_due = false;
        let node = e.peer.node;
        for event in e.host.read_events() {
            app.event(self, node, event);
        }
    }

    fn look(&mut self, index: usize) {
        let e = &self.engines[index];
        let Some(endpoint) = &e.endpoint else {
            return;
        };
        endpoint.check_consistency();
        let (sending, receiving) = e.host.records();
        let usage = Usage {
            engine: e.peer,
            peers: (endpoint.peers().count(), e.config.max_peers),
            records: (sending + receiving, self.setup.max_records),
            sends: e.host.sends_waiting(),
            claimed: e.host.claimed(),
            heap: 0,
        };
        self.book
            .borrow_mut()
            .checks
            .ask(|check| check.looked_at(&usage));
    }
}
