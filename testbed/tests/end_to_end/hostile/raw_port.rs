//! A port without the client library: every word of its half is ours to get wrong.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{Request, Response};
use portolan_abi::doorbell;
use portolan_abi::event::{Certainty, Event, EventKind, Outcome};
use portolan_abi::ledger::unpair;
use portolan_abi::memory::{ClientHalf, EngineHalf};
use portolan_abi::port::{CloseReason, PAGE, PortGeometry, state};
use portolan_abi::ring::{ConsumerCursor, ProducerCursor};
use portolan_abi::token::{FLAG_INLINE, INLINE_BYTES, Opcode, ReceiveToken, SendToken, TokenRef};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::sync::atomic::Ordering;

use super::control::Control;
use crate::harness::random::Random;

/// Longest sleep between two looks at a word that rings no bell.
const LOOK: Duration = Duration::from_millis(1);

pub struct RawPort {
    pub control: Control,
    pub number: u16,
    pub node: u16,
    pub geometry: PortGeometry,
    pub client_fd: OwnedFd,
    pub engine_fd: OwnedFd,
    pub client: ClientHalf,
    pub engine: EngineHalf,
    pub event_bell: OwnedFd,
    pub engine_bell: OwnedFd,
    pub sends: ProducerCursor,
    pub provides: ProducerCursor,
    pub events: ConsumerCursor,
    /// Last generation used, by slot.
    pub send_generations: Vec<u32>,
    pub receive_generations: Vec<u32>,
    /// Where the buffer offered last begins, by slot.
    pub buffers: Vec<u64>,
}

impl RawPort {
    pub fn open(socket: &Path, port: Option<u16>, geometry: PortGeometry) -> io::Result<Self> {
        Self::open_on(Control::connect(socket)?, port, geometry)
    }

    pub fn open_on(
        control: Control,
        port: Option<u16>,
        geometry: PortGeometry,
    ) -> io::Result<Self> {
        let request = Request::OpenPort {
            abi: PORT_ABI_VERSION,
            port,
            geometry,
        };
        let (response, descriptors) = control.ask(&request)?;
        let Response::PortOpened {
            port: number, node, ..
        } = response
        else {
            return Err(io::Error::other(format!("{response:?}")));
        };
        let [client_fd, engine_fd, event_bell, engine_bell]: [OwnedFd; 4] = descriptors
            .try_into()
            .map_err(|d: Vec<_>| io::Error::other(format!("{} descriptors", d.len())))?;
        let client = ClientHalf::map(client_fd.as_fd(), geometry)?;
        let engine = EngineHalf::map(engine_fd.as_fd(), geometry, false)?;
        let flags = rustix::fs::fcntl_getfl(&event_bell)?;
        rustix::fs::fcntl_setfl(&event_bell, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self {
            control,
            number,
            node,
            geometry,
            client_fd,
            engine_fd,
            client,
            engine,
            event_bell,
            engine_bell,
            sends: ProducerCursor::new(0),
            provides: ProducerCursor::new(0),
            events: ConsumerCursor::new(0),
            send_generations: vec![0; geometry.send_tokens as usize],
            receive_generations: vec![0; geometry.receive_tokens as usize],
            buffers: vec![0; geometry.receive_tokens as usize],
        })
    }

    /// Closes it in the ordinary way.
    pub fn close(self) -> io::Result<()> {
        let port = self.number;
        match self.control.ask(&Request::ClosePort { port })?.0 {
            Response::Done => Ok(()),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    // ---- sending and providing as the rules say ----

    /// The next reference of a send slot.
    pub fn send_reference(&mut self, slot: u32) -> TokenRef {
        let generation = &mut self.send_generations[slot as usize];
        *generation += 1;
        TokenRef {
            slot,
            generation: *generation,
        }
    }

    /// The next reference of a receive slot.
    pub fn receive_reference(&mut self, slot: u32) -> TokenRef {
        let generation = &mut self.receive_generations[slot as usize];
        *generation += 1;
        TokenRef {
            slot,
            generation: *generation,
        }
    }

    /// A token that makes sense: `len` bytes from `offset` of the arena.
    pub fn token(reference: TokenRef, to: (u16, u16), offset: u64, len: u32) -> SendToken {
        SendToken {
            generation: reference.generation,
            opcode: Opcode::Send,
            priority: 0,
            flags: 0,
            node: to.0,
            port: to.1,
            len,
            arena_offset: offset,
            tag: 0,
            timeout_us: 0,
        }
    }

    /// Writes and publishes a send token, whatever it says.
    pub fn push_send(&mut self, reference: TokenRef, token: &SendToken, inline: &[u8]) {
        if let Some(slot) = self.client.send_slots().get(reference.slot as usize) {
            token.store(slot, inline);
        }
        self.push_send_entry(reference);
    }

    /// Publishes an entry of the send ring, whatever its slot holds.
    pub fn push_send_entry(&mut self, reference: TokenRef) {
        let ring = self.client.send_ring(&self.engine);
        self.sends.stage(ring, &[reference.encode()]);
        self.sends.publish(ring);
        self.ring_engine();
    }

    /// Writes and publishes a receive token, whatever it says.
    pub fn push_receive(&mut self, reference: TokenRef, token: &ReceiveToken) {
        if let Some(slot) = self.client.receive_slots().get(reference.slot as usize) {
            token.store(slot);
        }
        let ring = self.client.provide_ring(&self.engine);
        self.provides.stage(ring, &[reference.encode()]);
        self.provides.publish(ring);
        self.ring_engine();
    }

    /// Sends up to 80 bytes from the slot itself.
    pub fn send_inline(&mut self, slot: u32, to: (u16, u16), bytes: &[u8]) -> TokenRef {
        assert!(bytes.len() <= INLINE_BYTES);
        let reference = self.send_reference(slot);
        let token = SendToken {
            flags: FLAG_INLINE,
            ..Self::token(reference, to, 0, bytes.len() as u32)
        };
        self.push_send(reference, &token, bytes);
        reference
    }

    /// Sends what lies in the arena.
    pub fn send_arena(&mut self, slot: u32, to: (u16, u16), offset: u64, len: u32) -> TokenRef {
        let reference = self.send_reference(slot);
        let token = Self::token(reference, to, offset, len);
        self.push_send(reference, &token, &[]);
        reference
    }

    /// Offers a buffer.
    pub fn provide(&mut self, slot: u32, offset: u64, len: u32) -> TokenRef {
        let reference = self.receive_reference(slot);
        self.buffers[slot as usize] = offset;
        let token = ReceiveToken {
            generation: reference.generation,
            priority: 0,
            arena_offset: offset,
            len,
        };
        self.push_receive(reference, &token);
        reference
    }

    /// Wakes the engine if it sleeps.
    pub fn ring_engine(&self) {
        if doorbell::must_ring(&self.engine.header().engine_sleeping) {
            self.ring_engine_anyway();
        }
    }

    pub fn ring_engine_anyway(&self) {
        // Full is loud enough.
        let _ = rustix::io::write(&self.engine_bell, &1u64.to_ne_bytes());
    }

    // ---- what comes back ----

    /// The next event, if one is there.
    pub fn poll(&mut self) -> Option<Event> {
        let ring = self.engine.event_ring(&self.client);
        if self.events.available(ring).unwrap() == 0 {
            return None;
        }
        let words = self.events.take(ring);
        self.events.release(ring);
        Some(Event::decode(&words).expect("the engine writes events"))
    }

    /// The next event within this time.
    pub fn wait_event(&mut self, within: Duration) -> Option<Event> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(event) = self.poll() {
                return Some(event);
            }
            doorbell::announce(&self.client.header().waiting);
            let event = self.poll();
            if event.is_none() {
                self.sleep(deadline);
            }
            doorbell::withdraw(&self.client.header().waiting);
            if event.is_some() || Instant::now() >= deadline {
                return event.or_else(|| self.poll());
            }
        }
    }

    /// Sleeps on the bell until the deadline, but not for long: some words change without a ring.
    fn sleep(&self, deadline: Instant) {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .min(10 * LOOK);
        let timeout = Timespec::try_from(left).unwrap();
        let mut bell = [PollFd::new(&self.event_bell, PollFlags::IN)];
        if matches!(rustix::event::poll(&mut bell, Some(&timeout)), Ok(1..)) {
            let _ = rustix::io::read(&self.event_bell, &mut [0; 8]);
        }
    }

    /// Waits for the end of one send; other events are passed over.
    pub fn wait_sent(&mut self, reference: TokenRef, within: Duration) -> Option<Outcome> {
        let deadline = Instant::now() + within;
        while let Some(event) = self.wait_event(deadline.saturating_duration_since(Instant::now()))
        {
            if let EventKind::Sent(outcome) = event.kind
                && (event.slot, event.generation) == (reference.slot, reference.generation)
            {
                return Some(outcome);
            }
        }
        None
    }

    /// A message to the echo at `to` is delivered and comes back: the port works. Other messages may come before. Uses send
    /// slot 0, receive slot 0 and the arena's first 4096 bytes.
    pub fn exchange(&mut self, to: (u16, u16), within: Duration) -> Result<(), String> {
        let deadline = Instant::now() + within;
        let text = format!("exchange {}", self.send_generations[0]);
        self.provide(0, 0, 4096);
        let reference = self.send_inline(0, to, text.as_bytes());
        let (mut sent, mut received) = (false, false);
        while !(sent && received) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(event) = self.wait_event(left) else {
                let closed = self.closed();
                return Err(format!(
                    "sent {sent}, received {received}, closed {closed:?}"
                ));
            };
            match event.kind {
                EventKind::Sent(outcome) if event.slot == reference.slot => {
                    if outcome.certainty != Certainty::Delivered {
                        return Err(format!("{outcome:?}"));
                    }
                    sent = true;
                }
                EventKind::Received => {
                    let mut bytes = vec![0; event.len as usize];
                    let at = self.buffers[event.slot as usize];
                    self.client.read_arena(at, &mut bytes).unwrap();
                    if bytes == text.as_bytes() {
                        received = true;
                    } else {
                        self.provide(event.slot, at, 4096);
                    }
                }
                EventKind::Sent(_) | EventKind::Offered(_) => {}
            }
        }
        Ok(())
    }

    // ---- its end ----

    /// Why it was closed, if it is.
    pub fn closed(&self) -> Option<CloseReason> {
        let word = self.engine.header().state.load(Ordering::Acquire);
        let (reason, now) = unpair(word);
        (now == state::CLOSED)
            .then(|| CloseReason::from_code(reason).expect("a reason that has a name"))
    }

    /// Why it was closed, within this time.
    pub fn wait_closed(&self, within: Duration) -> Option<CloseReason> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(reason) = self.closed() {
                return Some(reason);
            }
            if Instant::now() >= deadline {
                return None;
            }
            self.sleep(deadline);
        }
    }

    // ---- violence ----

    /// Writes random bytes over the whole half: header, rings, slots and arena.
    pub fn scribble(&self, random: &mut Random, bytes: &mut Vec<u8>) {
        bytes.resize(self.geometry.client_half_bytes(), 0);
        random.fill(bytes);
        overwrite(&self.client_fd, 0, bytes);
    }

    /// Writes random bytes over everything but the header: rings, slots and arena.
    pub fn scribble_behind_header(&self, random: &mut Random, bytes: &mut Vec<u8>) {
        bytes.resize(self.geometry.client_half_bytes() - PAGE, 0);
        random.fill(bytes);
        overwrite(&self.client_fd, PAGE as u64, bytes);
    }

    /// Punches a hole into the half: the range reads as zeros from now on and has no memory behind it.
    pub fn punch(&self, offset: usize, len: usize) {
        use rustix::fs::FallocateFlags;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.client_fd, flags, offset as u64, len as u64).unwrap();
    }
}

/// Writes over a memfd.
pub fn overwrite(memory: &OwnedFd, offset: u64, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(memory, &bytes[at..], offset + at as u64).unwrap();
    }
}
