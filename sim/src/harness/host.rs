//! [`TestHost`]: one engine's surroundings over vectors, with a ledger that survives the engine and a step between any two stores.
//!
//! Every durable method performs its stores one by one in the order of `Host`'s documentation and calls [`TestHost::step`] between
//! them; a run may ask that the engine dies at the n-th step, whichever it is. What the ledger then holds is what
//! [`TestHost::durable`] gives to the next engine, after replaying the events that were committed but not settled.
//!
//! The host also is a checker: it panics when the endpoint breaks the contract (a number twice, a write beside a buffer, a token
//! that is not there).

use std::collections::{BTreeMap, VecDeque};

use portolan_transport::host::{
    Durable, Reason, RestoredReceiveStream, RestoredSend, RestoredSendStream, SendRequest,
    SendStatus, Verdict, after_commit,
};
use portolan_transport::ident::{
    BufferId, NodeId, Peer, PortId, Priority, RecordId, SendId, StreamKey, serial_lt,
};
use portolan_transport::policy::AckMode;

use super::book::{NO_TAG, Route, SharedBook};
use super::records::{Record, Records};
use crate::checks::TokenStep;

/// What [`TestHost::step`] unwinds with when the engine dies in the middle of an operation.
pub struct EngineDeath;

/// What an application reads from its event ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Received {
        id: u64,
        stream: StreamKey,
        epoch: u32,
        number: u32,
    },
    Completed {
        id: u64,
        send: SendId,
        stream: StreamKey,
        status: SendStatus,
    },
}

/// A message an application was asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offered {
    pub number: u32,
    pub total: u32,
    /// Its first bytes.
    pub first: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Token {
    pub(super) slot: u32,
    pub(super) generation: u32,
    pub(super) priority: Priority,
    /// The longest message it holds.
    pub(super) size: u32,
    /// Its memory, there while it is claimed.
    pub(super) bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Port {
    pub(super) open: bool,
    pub(super) max_len: u32,
    pub(super) free: Vec<Token>,
    /// Tokens claimed by the engine, with the length claimed. Volatile: an engine's death gives them back.
    pub(super) claimed: Vec<(Token, u32)>,
    next_slot: u32,
    /// How often the port was opened; its receiving streams belong to one opening.
    pub(super) generation: u32,
    /// Generation of each send slot.
    send_slots: Vec<u32>,
    /// Send slots without a live send.
    free_slots: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Send {
    pub(super) request: SendRequest,
    /// The message's id.
    pub(super) message: u64,
    /// The tag: record, epoch, number. Set at the accept point.
    pub(super) accepted: Option<(RecordId, u32, u32)>,
    /// Handed to the endpoint, not yet accepted. Volatile.
    taken: bool,
}

/// The surroundings of one engine.
#[derive(Debug)]
pub struct TestHost {
    pub(super) node: NodeId,
    pub(super) book: SharedBook,
    pub(super) ports: BTreeMap<PortId, Port>,
    /// Send slots by key, and the send ring: keys in the order the application wrote them.
    pub(super) sends: BTreeMap<(PortId, u32, u32), Send>,
    pub(super) ring: VecDeque<SendId>,
    /// Events not settled or not read yet.
    pub(super) events: VecDeque<Event>,
    /// Of those, how many are settled.
    pub(super) settled: usize,
    /// And how many the application has read.
    read: usize,
    pub(super) send_records: Records,
    pub(super) receive_records: Records,
    /// Memory of tokens that are not claimed.
    pub(super) memory: Vec<Vec<u8>>,
    pub(super) peers: BTreeMap<Peer, (u64, u32)>,
    pub(super) next_epoch: u32,
    pub(super) epochs_drawn: u64,
    /// Records of each kind the ledger holds.
    pub max_records: usize,
    /// Its applications use no tags.
    pub tagless: bool,
    /// Sends whose memory cannot be read, by id; ports whose buffers cannot be written.
    pub bad_sends: Vec<u64>,
    /// Whether its applications want to be asked about messages; what they answer, in turn (then: accept); and what they were asked.
    pub wants_offers: bool,
    pub verdicts: VecDeque<Verdict>,
    pub offered: Vec<Offered>,
    /// Steps until the engine dies.
    pub die_after: Option<u64>,
    /// Steps so far.
    pub steps: u64,
}

impl TestHost {
    /// A fresh ledger; stream epochs start at `first_epoch`, near their wrap by preference.
    pub fn new(node: NodeId, book: SharedBook, first_epoch: u32) -> Self {
        Self {
            node,
            book,
            ports: BTreeMap::new(),
            sends: BTreeMap::new(),
            ring: VecDeque::new(),
            events: VecDeque::new(),
            settled: 0,
            read: 0,
            send_records: Records::default(),
            receive_records: Records::default(),
            memory: Vec::new(),
            peers: BTreeMap::new(),
            next_epoch: first_epoch,
            epochs_drawn: 0,
            max_records: 1024,
            tagless: false,
            bad_sends: Vec::new(),
            wants_offers: false,
            verdicts: VecDeque::new(),
            offered: Vec::new(),
            die_after: None,
            steps: 0,
        }
    }

    // ---- the application's side ----

    pub fn open_port(&mut self, port: PortId, max_len: u32) {
        let port = self.ports.entry(port).or_default();
        assert!(!port.open);
        port.open = true;
        port.generation += 1;
        port.max_len = max_len;
    }

    /// The supervisor closed the port: its free tokens are gone at once, claimed ones when the endpoint lets go.
    pub fn close_port(&mut self, port: PortId) {
        self.book.borrow_mut().port_closed(self.node, port);
        if let Some(port) = self.ports.get_mut(&port) {
            port.open = false;
            port.free.clear();
        }
    }

    pub fn open_ports(&self) -> Vec<PortId> {
        self.ports
            .iter()
            .filter(|(_, p)| p.open)
            .map(|(id, _)| *id)
            .collect()
    }

    /// Ports that were open once and are not now.
    pub fn closed_ports(&self) -> Vec<PortId> {
        self.ports
            .iter()
            .filter(|(_, p)| !p.open)
            .map(|(id, _)| *id)
            .collect()
    }

    pub fn provide(&mut self, port: PortId, priority: Priority, len: u32) {
        let name = port;
        let port = self.ports.get_mut(&port).expect("an opened port");
        let token = Token {
            slot: port.next_slot,
            generation: 1,
            priority,
            size: len,
            bytes: Vec::new(),
        };
        port.next_slot += 1;
        self.book
            .borrow_mut()
            .token(self.node, token.name(name), priority, TokenStep::Provided);
        port.free.push(token);
    }

    /// The longest message an open port takes.
    pub fn max_len(&self, port: PortId) -> Option<u32> {
        self.ports.get(&port).filter(|p| p.open).map(|p| p.max_len)
    }

    /// Free receive tokens of a port.
    pub fn tokens(&self, port: PortId) -> usize {
        self.ports.get(&port).map_or(0, |p| p.free.len())
    }

    /// Writes a send into the send ring.
    pub fn post(&mut self, route: Route, len: u32, deadline: u64) -> (u64, SendId) {
        assert_eq!(route.from.0, self.node);
        let message = self.book.borrow_mut().sent_until(route, len, deadline);
        let id = self.free_slot(route.from.1);
        let stream = StreamKey {
            local: route.from.1,
            node: route.to.0,
            remote: route.to.1,
            priority: route.priority,
        };
        let request = SendRequest {
            id,
            stream,
            len,
            tag: match self.tagless && len >= 8 {
                true => NO_TAG,
                false => message,
            },
            deadline,
            ack: AckMode::Policy,
        };
        self.sends.insert(
            key(id),
            Send {
                request,
                message,
                accepted: None,
                taken: false,
            },
        );
        self.ring.push_back(id);
        (message, id)
    }

    /// A send slot of the port that holds no live send, under a new generation.
    fn free_slot(&mut self, port: PortId) -> SendId {
        let p = self.ports.get_mut(&port).expect("an opened port");
        let slot = p.free_slots.pop().unwrap_or_else(|| {
            p.send_slots.push(u32::MAX - 2);
            p.send_slots.len() as u32 - 1
        });
        let generation = &mut p.send_slots[slot as usize];
        *generation = generation.wrapping_add(1).max(1);
        SendId {
            port,
            slot,
            generation: *generation,
        }
    }

    /// The send is over: its slot is free.
    fn remove_send(&mut self, id: SendId) {
        if let Some(send) = self.sends.remove(&key(id)) {
            if send.accepted.is_none() {
                self.leave_ring(id);
            }
            let port = self.ports.get_mut(&id.port).expect("an opened port");
            port.free_slots.push(id.slot);
        }
    }

    /// The send ring's consumer index passes it.
    pub(super) fn leave_ring(&mut self, id: SendId) {
        if self.ring.front() == Some(&id) {
            self.ring.pop_front();
        } else {
            self.ring.retain(|other| *other != id);
        }
    }

    /// Events the application has not read yet.
    pub fn read_events(&mut self) -> Vec<Event> {
        let new = self.events.range(self.read..).copied().collect();
        self.read = self.events.len();
        self.forget_events();
        new
    }

    /// Whether there are some.
    pub fn has_events(&self) -> bool {
        self.read < self.events.len()
    }

    /// What is settled and read is in nobody's way.
    pub(super) fn forget_events(&mut self) {
        let over = self.read.min(self.settled);
        self.events.drain(..over);
        self.read -= over;
        self.settled -= over;
    }

    // ---- the engine's side, beside `Host` ----

    /// The next entry of the send ring the endpoint was not given yet.
    pub fn take_send(&mut self) -> Option<SendRequest> {
        let id = *self.ring.iter().find(|id| !self.sends[&key(**id)].taken)?;
        let send = self.sends.get_mut(&key(id))?;
        send.taken = true;
        Some(send.request)
    }

    /// The stream of a send that has not ended.
    pub fn stream_of(&self, id: SendId) -> Option<StreamKey> {
        Some(self.sends.get(&key(id))?.request.stream)
    }

    /// `submit` refused it: the engine completes the token itself.
    pub fn refuse_send(&mut self, id: SendId, reason: Reason) {
        assert!(
            self.sends[&key(id)].accepted.is_none(),
            "{id:?} refused after it was accepted"
        );
        self.finish_send(id, SendStatus::NotDelivered(reason));
    }

    /// The engine is dead: what it held in its own memory is gone, what was committed is settled.
    pub fn engine_died(&mut self) {
        self.die_after = None;
        // Replay, as the next engine does before anything else. Idempotent.
        for at in self.settled..self.events.len() {
            let event = self.events[at];
            match event {
                Event::Completed { send, .. } => self.remove_send(send),
                Event::Received {
                    stream,
                    epoch,
                    number,
                    ..
                } => {
                    for record in self.receive_records.rows.iter_mut().flatten() {
                        if record.stream == stream
                            && record.epoch == epoch
                            && !serial_lt(number, record.next)
                        {
                            (record.next, record.bits) =
                                after_commit(record.next, record.bits, number, false);
                        }
                    }
                    // The buffer's generation is consumed.
                    let port = self.ports.get_mut(&stream.local).expect("its port");
                    port.claimed.retain(|(token, _)| token.generation != 0);
                }
            }
        }
        self.settled = self.events.len();
        for name in self.ports.keys().copied().collect::<Vec<_>>() {
            while let Some((token, _)) = self.ports.get_mut(&name).and_then(|p| p.claimed.pop()) {
                self.give_back(name, token);
            }
        }
        self.ring.retain(|id| {
            self.sends
                .get(&key(*id))
                .is_some_and(|send| send.accepted.is_none())
        });
        // A tag is newer than its record's `next` if the engine died between the two stores.
        for (record, epoch, number) in self.sends.values().filter_map(|send| send.accepted) {
            if let Some(r) = self.send_records.get_mut(record)
                && r.epoch == epoch
                && !serial_lt(number, r.next)
            {
                r.next = number.wrapping_add(1);
            }
        }
        for send in self.sends.values_mut() {
            send.taken = false;
        }
    }

    /// What the ledger says.
    pub fn durable(&self) -> Durable {
        let accepted = || {
            self.sends
                .values()
                .filter_map(|s| s.accepted.map(|tag| (s.request, tag)))
        };
        let sending = self
            .send_records
            .live()
            .map(|(record, r)| RestoredSendStream {
                record,
                stream: r.stream,
                incarnation: r.incarnation,
                epoch: r.epoch,
                next: r.next,
            });
        let receiving = self
            .receive_records
            .live()
            .map(|(record, r)| RestoredReceiveStream {
                record,
                stream: r.stream,
                incarnation: r.incarnation,
                epoch: r.epoch,
                base: r.next,
                bits: r.bits,
                closed: self.port_instance(r.stream.local) != Some(r.port_generation),
            });
        Durable {
            peers: self
                .peers
                .iter()
                .map(|(peer, (incarnation, floor))| (*peer, *incarnation, *floor))
                .collect(),
            sending: sending.collect(),
            receiving: receiving.collect(),
            sends: accepted()
                .map(|(request, (record, _, number))| RestoredSend {
                    request,
                    record,
                    number,
                })
                .collect(),
        }
    }

    /// No token is claimed, no send slot in use.
    pub fn holds_nothing(&self) -> bool {
        self.ports.values().all(|port| port.claimed.is_empty()) && self.sends.is_empty()
    }

    /// Stream records in use, sending and receiving.
    pub fn records(&self) -> (usize, usize) {
        (self.send_records.len(), self.receive_records.len())
    }

    /// Which opening of the port is current, if it is open.
    pub(super) fn port_instance(&self, port: PortId) -> Option<u32> {
        self.ports
            .get(&port)
            .filter(|p| p.open)
            .map(|p| p.generation)
    }

    /// Between two stores.
    pub(super) fn step(&mut self) {
        self.steps += 1;
        if let Some(left) = &mut self.die_after {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.die_after = None;
                std::panic::resume_unwind(Box::new(EngineDeath));
            }
        }
    }

    pub(super) fn finish_send(&mut self, id: SendId, status: SendStatus) {
        let Some(send) = self.sends.get(&key(id)).copied() else {
            panic!("{id:?} completed, but there is no such send")
        };
        self.step();
        self.book.borrow_mut().completed(send.message, status);
        self.events.push_back(Event::Completed {
            id: send.message,
            send: id,
            stream: send.request.stream,
            status,
        });
        self.step();
        self.remove_send(id);
        self.step();
        self.settled = self.events.len();
        self.forget_events();
    }

    /// A claimed token that no message used is free again, or gone with its port.
    pub(super) fn give_back(&mut self, port: PortId, mut token: Token) {
        self.memory.push(std::mem::take(&mut token.bytes));
        let p = self.ports.get_mut(&port).expect("the token's port");
        let step = if p.open {
            TokenStep::Released
        } else {
            TokenStep::Withdrawn
        };
        self.book
            .borrow_mut()
            .token(self.node, token.name(port), token.priority, step);
        if p.open {
            p.free.push(token);
        }
    }

    /// Sends its applications wait for.
    pub fn sends_waiting(&self) -> usize {
        self.sends.len()
    }

    /// Tokens the engine holds.
    pub fn claimed(&self) -> usize {
        self.ports.values().map(|port| port.claimed.len()).sum()
    }

    pub(super) fn send_record(&mut self, record: RecordId) -> &mut Record {
        self.send_records
            .get_mut(record)
            .expect("a live send record")
    }

    pub(super) fn receive_record(&mut self, record: RecordId) -> &mut Record {
        self.receive_records
            .get_mut(record)
            .expect("a live receive record")
    }
}

pub(super) fn key(id: SendId) -> (PortId, u32, u32) {
    (id.port, id.slot, id.generation)
}

impl Token {
    pub(super) fn name(&self, port: PortId) -> BufferId {
        BufferId {
            port,
            slot: self.slot,
            generation: self.generation,
        }
    }
}
