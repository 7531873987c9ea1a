//! [`Net`]'s clock: what happens at one instant, and until when.

use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use portolan_transport::host::SendStatus;
use portolan_transport::ident::{Nanos, NodeId, Peer};
use portolan_transport::{Endpoint, wire};

use super::host::{EngineDeath, Event, TestHost};
use super::net::{AfterFailure, Engine, Flight, MS, Net, RING_TIME, SECOND, wire_time};

impl Net {
    // ---- time ----

    /// Runs until `done`, at most `limit` of virtual time.
    pub fn run_until(&mut self, limit: Nanos, what: &str, done: impl Fn(&Self) -> bool) {
        let end = self.now + limit;
        let mut idle_turns = 0;
        loop {
            self.turn();
            if done(self) {
                return;
            }
            let next = self.next_time().max(self.now);
            idle_turns = if next == self.now { idle_turns + 1 } else { 0 };
            assert!(
                idle_turns < 10_000,
                "time stands still at {}: a timeout that handle_timeout does not clear",
                self.now
            );
            assert!(
                next <= end,
                "{what}: not within {} ms; waiting: {:?}",
                limit / MS,
                self.diagnosis()
            );
            self.now = next;
        }
    }

    /// Runs for a while.
    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now + time;
        loop {
            self.turn();
            let next = self.next_time().max(self.now);
            if next >= end {
                self.now = end;
                return;
            }
            self.now = next;
        }
    }

    /// Runs until every send has its status, then until nothing is held for messages that are over: tokens of a sender that went
    /// away come back when it is given up, or when it closes the stream.
    pub fn settle(&mut self, limit: Nanos) {
        self.run_until(limit, "every send has a status", |net| {
            net.book.borrow().is_settled()
        });
        let policy = &self.policy;
        let patience = u64::from(policy.unreachable_after_ms + policy.stream_idle_ms) * MS;
        self.run_until(2 * patience, "every token is back", |net| {
            net.engines.values().all(|e| e.host.holds_nothing())
        });
        self.run_for(MS);
        self.book.borrow_mut().end_of_run();
    }

    fn diagnosis(&self) -> Vec<String> {
        let book = self.book.borrow();
        let waiting = book.waiting();
        let mut lines: Vec<String> = waiting
            .iter()
            .take(4)
            .map(|&id| format!("{id}: {:?}", book.message(id)))
            .collect();
        lines.push(format!("{} in all", waiting.len()));
        for (peer, engine) in &self.engines {
            let Some(endpoint) = &engine.endpoint else {
                continue;
            };
            lines.push(format!(
                "\n{peer:?} timeout {:?}",
                endpoint.poll_timeout().map(|t| t as i64 - self.now as i64)
            ));
            let counted = endpoint
                .counters()
                .iter()
                .filter(|c| c.2 > 0)
                .map(|c| format!("{} {}", c.0, c.2));
            lines.push(counted.collect::<Vec<_>>().join(", "));
            lines.extend(endpoint.peers().map(|p| format!("\n  {p:?}")));
        }
        lines
    }

    fn next_time(&self) -> Nanos {
        let flight = self.flights.peek().map(|Reverse(f)| f.at);
        let wake = |e: &Engine| {
            let unblocked = e.blocked.then_some(e.busy_until.saturating_sub(RING_TIME));
            let timeout = e.endpoint.as_ref()?.poll_timeout();
            timeout.into_iter().chain(unblocked).min()
        };
        let timers = self
            .engines
            .values()
            .filter_map(|e| e.reborn.or_else(|| wake(e)));
        timers.chain(flight).min().unwrap_or(self.now + 10 * SECOND)
    }

    /// Everything that happens at `now`.
    fn turn(&mut self) {
        while self
            .flights
            .peek()
            .is_some_and(|Reverse(f)| f.at <= self.now)
        {
            let Some(Reverse(flight)) = self.flights.pop() else {
                break;
            };
            let to = Peer {
                node: flight.to.0,
                queue: flight.to.1,
            };
            let Some(engine) = self.engines.get_mut(&to) else {
                continue;
            };
            if engine.endpoint.is_some() {
                self.receive(to, &flight.frame);
            } else if engine.parked.len() < 64 {
                engine.parked.push(flight.frame);
            }
        }
        for peer in self.peers() {
            self.engine_turn(peer);
        }
    }

    fn engine_turn(&mut self, peer: Peer) {
        if self.engines[&peer].reborn.is_some_and(|at| at <= self.now) {
            self.take_over(peer);
        }
        let due = |e: &Endpoint, now| e.poll_timeout().is_some_and(|t| t <= now);
        if self.engines[&peer]
            .endpoint
            .as_ref()
            .is_some_and(|e| due(e, self.now))
        {
            self.with(peer, |now, endpoint, host| {
                endpoint.handle_timeout(now, host)
            });
        }
        self.with(peer, |now, endpoint, host| {
            while let Some(send) = host.take_send() {
                if let Err(reason) = endpoint.submit(now, &send, host) {
                    host.refuse_send(send.id, reason);
                }
            }
        });
        let mut blocked = true;
        while self.engines[&peer].busy_until <= self.now + RING_TIME {
            let mut buffer = vec![0xdd; usize::from(self.max_frame)];
            let sent = self.with(peer, |now, endpoint, host| {
                endpoint.poll_transmit(now, &mut buffer, host)
            });
            let Some(transmit) = sent.flatten() else {
                blocked = false;
                break;
            };
            assert!(transmit.len <= buffer.len());
            buffer.truncate(transmit.len);
            self.transmit(peer, transmit.peer, buffer);
        }
        self.engines.get_mut(&peer).expect("an engine").blocked = blocked;
        self.application_turn(peer);
        if let Some(endpoint) = &self.engines[&peer].endpoint {
            endpoint.check_consistency();
        }
    }

    /// The applications of an engine read their events.
    fn application_turn(&mut self, peer: Peer) {
        for event in self.host(peer).read_events() {
            self.events.push((peer.node, event));
            match event {
                Event::Received { stream, .. } => {
                    if self.provide_again
                        && let Some(len) = self.host(peer).max_len(stream.local)
                    {
                        self.provide(peer.node, stream.local, stream.priority, len);
                    }
                }
                Event::Completed {
                    status: SendStatus::Delivered,
                    ..
                } => {}
                Event::Completed { stream, .. } => match self.after_failure {
                    AfterFailure::Resume => self.resume_sending(peer.node, stream),
                    AfterFailure::Drop => self.drop_sends(peer.node, stream),
                    AfterFailure::Nothing => {}
                },
            }
        }
    }

    fn receive(&mut self, to: Peer, frame: &[u8]) {
        // The buffer that holds the headers is long enough for them; the rest is cut as buffers are.
        let headers = wire::header_area_len(frame).unwrap_or_default();
        let first = self.segment.max(headers).min(frame.len());
        let mut segments = vec![&frame[..first]];
        segments.extend(frame[first..].chunks(self.segment));
        self.with(to, |now, endpoint, host| {
            let _ = endpoint.handle_frame(now, &segments, host);
        });
    }

    fn transmit(&mut self, from: Peer, to: Peer, frame: Vec<u8>) {
        self.frames += 1;
        if self.trace {
            let segments: [&[u8]; 1] = [&frame];
            let parsed = wire::parse(&segments).expect("a frame of ours");
            let chunks: Vec<_> = parsed.chunks().map(|(chunk, _)| chunk).collect();
            eprintln!(
                "{:>12} {from:?} -> {to:?} {} {chunks:?}",
                self.now,
                frame.len()
            );
        }
        if let Some(recorded) = &mut self.recorded {
            recorded.push((to, frame.clone()));
        }
        let engine = self.engines.get_mut(&from).expect("an engine");
        engine.busy_until = engine.busy_until.max(self.now) + wire_time(frame.len());
        let sent = engine.busy_until;
        // Within a node frames cross the inter-engine ring, which neither loses nor changes them.
        if from.node == to.node {
            self.fly(sent, from.node, to, frame);
            return;
        }
        if self.cut.contains(&(from.node, to.node)) || self.rng.chance(self.faults.loss) {
            return;
        }
        let copies = 1 + u64::from(self.rng.chance(self.faults.duplicate));
        for _ in 0..copies {
            let mut frame = frame.clone();
            if self.rng.chance(self.faults.corrupt) {
                let bit = self.rng.below(frame.len() as u64 * 8);
                frame[(bit / 8) as usize] ^= 1 << (bit % 8);
            }
            let late = if self.rng.chance(self.faults.late) {
                self.rng.below(self.faults.late_by)
            } else {
                0
            };
            self.fly(sent + self.faults.delay + late, from.node, to, frame);
        }
    }

    pub(super) fn fly(&mut self, at: Nanos, from: NodeId, to: Peer, frame: Vec<u8>) {
        self.sequence += 1;
        self.flights.push(Reverse(Flight {
            at,
            sequence: self.sequence,
            from,
            to: (to.node, to.queue),
            frame,
        }));
    }

    fn take_over(&mut self, peer: Peer) {
        let nodes: Vec<NodeId> = self.queues.keys().copied().collect();
        let engine = self.engines.get_mut(&peer).expect("an engine");
        engine.reborn = None;
        engine.host.engine_died();
        engine.config.engine_epoch = engine.config.engine_epoch.wrapping_add(1);
        let mut endpoint =
            Endpoint::restore(engine.config.clone(), self.now, &engine.host.durable());
        for id in nodes {
            endpoint.set_node(self.now, id, self.max_frame);
        }
        for port in engine.host.open_ports() {
            endpoint.port_opened(port);
        }
        for port in engine.host.closed_ports() {
            endpoint.port_closed(self.now, port, &mut engine.host);
        }
        engine.endpoint = Some(endpoint);
        for frame in std::mem::take(&mut engine.parked) {
            self.receive(peer, &frame);
        }
    }

    /// Runs part of a living engine; if it dies in there, its successor is due in 1 ms.
    pub(super) fn with<R>(
        &mut self,
        peer: Peer,
        run: impl FnOnce(Nanos, &mut Endpoint, &mut TestHost) -> R,
    ) -> Option<R> {
        let now = self.now;
        let engine = self.engines.get_mut(&peer).expect("an engine");
        let endpoint = engine.endpoint.as_mut()?;
        match catch_unwind(AssertUnwindSafe(|| run(now, endpoint, &mut engine.host))) {
            Ok(value) => Some(value),
            Err(death) if death.is::<EngineDeath>() => {
                self.kill(peer, MS);
                None
            }
            Err(bug) => resume_unwind(bug),
        }
    }
}
