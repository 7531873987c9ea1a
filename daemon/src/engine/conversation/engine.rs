//! An engine of one end: the real host, transport and port service between two rings of frames.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use portolan_abi::port::CloseReason;
use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::ident::{Nanos, NodeId, PortId};
use portolan_transport::policy::Policy;

use super::super::counters::EngineCounters;
use super::super::crossing::{CrossingReceiver, CrossingSender, SLOT_BYTES};
use super::super::host::EngineHost;
use super::super::ledger_facts::Facts;
use super::super::ports::Port;
use super::super::{restore, serve};
use super::memory::{Memory, PORT};

/// Longest frame of the transport.
const MAX_FRAME: u16 = 1458;
/// Frames received, and sent, in one turn.
const FRAMES_PER_TURN: usize = 64;
/// Numbers wrap soon.
const FIRST_NUMBER: u32 = u32::MAX - 2;

/// An engine at work.
pub struct Engine {
    host: EngineHost,
    endpoint: Endpoint,
    counters: EngineCounters,
    from: CrossingReceiver,
    to: CrossingSender,
    scratch: Vec<u8>,
}

/// What a new engine is told.
#[derive(Clone, Copy, Debug)]
pub struct TakeOver {
    /// The port's generation, if there is one that is not closed.
    pub port: Option<u32>,
    pub now: Nanos,
    pub policy: Policy,
}

impl TakeOver {
    /// Takes over what there is, which may be nothing.
    pub fn run(self, memory: &Memory) -> Engine {
        let Self { port, now, policy } = self;
        // Whoever dies here is killed from outside, twice over the same token if the test wants it so: that is no poison.
        memory.header().working_token.store(0, Ordering::Release);
        let facts = Facts::adopt(memory.ledger().ledger());
        let engine_epoch = facts.raise_engine_epoch(0);
        let mut host = EngineHost::new(facts, 1_000_000);
        if let Some(generation) = port {
            // Mapped while standing by; the takeover begins here.
            let mut port = Port::map(memory.parts(generation)).unwrap();
            port.go_on();
            restore::take_up(&mut host, port);
        }
        let durable = restore::durable(&mut host);
        let config = Config {
            node: NodeId(memory.node()),
            queue: 0,
            queues: 1,
            incarnation: memory.header().incarnation.load(Ordering::Relaxed),
            engine_epoch,
            cluster: 5,
            name: "conversation".to_owned(),
            max_frame: MAX_FRAME,
            max_peers: 2,
            first_number: FIRST_NUMBER,
            policy,
        };
        let mut endpoint = Endpoint::restore(config, now, &durable);
        for node in [1, 2] {
            endpoint.set_node(now, NodeId(node), MAX_FRAME);
        }
        if port.is_some() {
            endpoint.port_opened(PortId(PORT));
        }
        Engine {
            host,
            endpoint,
            counters: EngineCounters::default(),
            from: CrossingReceiver::map(memory.wire_in().as_fd()).unwrap(),
            to: CrossingSender::map(memory.wire_out().as_fd()).unwrap(),
            scratch: vec![0; SLOT_BYTES],
        }
    }
}

impl Engine {
    /// The duty cycle of [`super::super::Engine::turn`], without socket, link and sleep; true if there was anything to do.
    // Not inlined: instructions are counted inside it.
    #[inline(never)]
    pub fn turn(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        for _ in 0..self.from.available().min(FRAMES_PER_TURN) {
            worked = true;
            if let Some(frame) = self.from.pop(&mut self.scratch) {
                // Refusals are counted by the transport.
                let _ = self.endpoint.handle_frame(now, &[frame], &mut self.host);
            }
        }
        worked |= self.serve(now);
        for _ in 0..FRAMES_PER_TURN {
            let mut room = std::mem::take(&mut self.scratch);
            let len = self.speak(now, &mut room);
            if let Some(len) = len {
                self.to.push(&[&room[..len]]);
            }
            self.scratch = room;
            if len.is_none() {
                break;
            }
            worked = true;
        }
        self.serve_buffers(now);
        worked |= self.timers(now);
        self.ring();
        worked
    }

    /// A frame arrives.
    #[inline]
    pub fn hear(&mut self, now: Nanos, frame: &[u8]) {
        // Refusals are counted by the transport.
        let _ = self.endpoint.handle_frame(now, &[frame], &mut self.host);
    }

    /// Takes a turn's worth of tokens; true if there were any.
    #[inline]
    pub fn serve(&mut self, now: Nanos) -> bool {
        let (host, endpoint) = (&mut self.host, &mut self.endpoint);
        serve::serve_port(now, PORT, host, endpoint, &mut self.counters)
    }

    /// Takes the buffers that were behind sends.
    #[inline]
    pub fn serve_buffers(&mut self, now: Nanos) {
        let (host, endpoint) = (&mut self.host, &mut self.endpoint);
        serve::serve_buffers(now, PORT, host, endpoint, &mut self.counters);
    }

    /// Does what is due; true if anything was.
    #[inline]
    pub fn timers(&mut self, now: Nanos) -> bool {
        let due = self.endpoint.poll_timeout().is_some_and(|at| at <= now);
        if due {
            self.endpoint.handle_timeout(now, &mut self.host);
        }
        due
    }

    /// Writes the next frame; its length, if there was one to write.
    #[inline]
    pub fn speak(&mut self, now: Nanos, to: &mut [u8]) -> Option<usize> {
        let room = to.get_mut(..usize::from(MAX_FRAME))?;
        let sent = self.endpoint.poll_transmit(now, room, &mut self.host)?;
        Some(sent.len)
    }

    /// Rings the application's doorbell if it waits.
    #[inline]
    pub fn ring(&mut self) {
        if let Some(port) = self.host.ports.get_mut(PORT) {
            port.wake_if_wanted();
        }
    }

    /// The supervisor opens the port.
    pub fn open(&mut self, memory: &Memory, generation: u32) {
        self.host.open_fresh(memory.parts(generation)).unwrap();
        self.endpoint.port_opened(PortId(PORT));
    }

    /// The supervisor closes the port.
    pub fn close(&mut self, now: Nanos) {
        self.endpoint.port_closed(now, PortId(PORT), &mut self.host);
        if let Some(port) = self.host.ports.remove(PORT) {
            port.close(CloseReason::ByOwner);
        }
    }

    /// Why the port is to be closed, if it is.
    pub fn fault(&self) -> Option<CloseReason> {
        self.host.ports.get(PORT).and_then(|port| port.fault())
    }

    /// When something is due by itself.
    pub fn due_at(&self) -> Option<Nanos> {
        self.endpoint.poll_timeout()
    }

    /// The transport's books agree with each other.
    pub fn check_consistency(&self) {
        self.endpoint.check_consistency();
    }

    /// Everything the transport counted.
    #[cfg(test)]
    pub fn counted(&self) -> Vec<u64> {
        let transport = self.endpoint.counters().iter();
        let own = [
            self.counters.send_tokens,
            self.counters.send_tokens_refused,
            self.counters.receive_tokens,
        ];
        transport.map(|(.., count)| count).chain(own).collect()
    }

    /// What serves its applications.
    #[cfg(test)]
    pub fn host(&mut self) -> &mut EngineHost {
        &mut self.host
    }

    /// What the transport counted.
    pub fn counter(&self, name: &str) -> u64 {
        let mut all = self.endpoint.counters().iter();
        all.find(|(known, ..)| *known == name)
            .map_or(0, |(.., count)| count)
    }
}
