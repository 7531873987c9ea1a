//! Commands of the sending side, and the life of its streams: opened by the first send, given a new epoch when the old one cannot
//! be continued, resolved to a peer once the node's queues are known.
//!
//! Problem: numbers are the engine's, streams and epochs nobody's to manage, and what is accepted survives. transport.md §3.1, §4.1, §4.5,
//! §4.6, §13.1
//!
//! Idea: [`Host::accept`] happens inside [`Endpoint::submit`], whatever the state of the peer, because accepting moves the
//! client's ring. So a record may be needed before the peer's incarnation is known; it is tagged 0 then and replaced by one with
//! the real tag (and a new epoch) before anything of it is transmitted. *Reopening* is the same step for every reason: draw an
//! epoch, open the new record, free the old one, keep the numbers. A death between the two leaves two records of one stream;
//! restore keeps the one with the later epoch, which is safe because the new epoch was not used yet.
//!
//! Rejected: holding sends unaccepted until HELLO is done (one stream to a dead peer would hold the whole ring).

use super::send_stream::{Message, MessageState, SendStream, UNSETTLED_MAX, pauses};
use super::slab::NONE;
use super::timers::Owner;
use super::{Counters, Endpoint, PeerState};
use crate::host::{Host, Reason, SendRequest, SendStatus};
use crate::ident::{Nanos, NodeId, PORTS, Peer, Priority, RecordId, SendId, StreamKey};

/// The stream of a send that was just accepted, to accept more like it.
pub struct More<'a> {
    first: &'a SendRequest,
    stream: &'a mut SendStream,
    record: RecordId,
    counters: &'a mut Counters,
}

impl More<'_> {
    /// The stream's record and epoch.
    #[inline]
    pub fn record(&self) -> (RecordId, u32) {
        (self.record, self.stream.epoch)
    }

    /// The number of the next send; `None` if the stream takes no more now.
    #[inline]
    pub fn number(&self) -> Option<u32> {
        (self.stream.queue.len() < UNSETTLED_MAX).then(|| self.stream.next())
    }

    /// The next send, if this is its token.
    #[inline]
    pub fn next(&self, id: SendId, len: u32, tag: u64) -> SendRequest {
        SendRequest {
            id,
            len,
            tag,
            ..*self.first
        }
    }

    /// Takes a send of [`Self::next`], which was made durable under [`Self::number`].
    #[inline]
    pub fn push(&mut self, send: &SendRequest) {
        // No earlier deadline than that of the first, for which the timer is armed.
        self.stream.queue.push_back(Message::new(send));
        self.counters.sends_accepted += 1;
    }
}

impl Endpoint {
    /// Right after [`Self::submit`] accepted a send, nothing having been asked for since: its stream, for more that differ from it only in token,
    /// length and tag. Whoever takes them makes each durable as [`Host::accept`] would. `None`: they have to be submitted.
    #[inline]
    pub fn more<'a>(&'a mut self, first: &'a SendRequest) -> Option<More<'a>> {
        let slot = self.goes_on(&first.stream)?;
        let stream = self.send.get_mut(slot)?;
        let record = stream.record?;
        Some(More {
            first,
            stream,
            record,
            counters: &mut self.counters,
        })
    }

    /// Accepts a send: gives it its number and makes it durable. `Err`: nothing was accepted; the caller completes the token.
    pub fn submit<H: Host>(
        &mut self,
        now: Nanos,
        send: &SendRequest,
        host: &mut H,
    ) -> Result<(), Reason> {
        self.train = None;
        let slot = match self.goes_on(&send.stream) {
            Some(slot) => slot,
            None => self.find_stream(now, send.stream, host)?,
        };
        let Some(stream) = self.send.get_mut(slot) else {
            return Err(Reason::NoResources);
        };
        let Some(record) = stream.record.filter(|_| !stream.closing) else {
            return Err(Reason::NoResources);
        };
        if stream.queue.len() >= UNSETTLED_MAX {
            self.counters.tables_full += 1;
            return Err(Reason::NoResources);
        }
        host.accept(send, record, stream.epoch, stream.next());
        stream.queue.push_back(Message::new(send));
        self.counters.sends_accepted += 1;
        // The stream's timer is armed for its earliest deadline, or earlier.
        if send.deadline < stream.deadline {
            stream.deadline = send.deadline;
            self.timers.arm(Owner::Send(slot), send.deadline);
        }
        // Nothing to tell those who wait for their turn already.
        let (queued, class) = (
            stream.in_active && !stream.nulls,
            stream.key.priority as usize,
        );
        let entry = self.peers.get(stream.peer).filter(|_| queued);
        if !entry.is_some_and(|entry| entry.is_up() && entry.ready[class]) {
            self.activate(now, slot);
        }
        Ok(())
    }

    /// The stream of the last send, if this is another one of it and its peer is up: so its node is known, its port is ours, and its
    /// peer fits. One that may have to be reopened is looked at more closely.
    #[inline]
    fn goes_on(&self, key: &StreamKey) -> Option<u32> {
        let stream = self.send.get(self.last_sent)?;
        let same = stream.key == *key && !stream.closing && !stream.reopen;
        let up = same && self.peers.get(stream.peer).is_some_and(|e| e.is_up());
        up.then_some(self.last_sent)
    }

    /// The stream that a send is of, opened if need be. `Err`: why there is none.
    #[inline(never)]
    fn find_stream<H: Host>(
        &mut self,
        now: Nanos,
        key: StreamKey,
        host: &mut H,
    ) -> Result<u32, Reason> {
        if !self.nodes.contains_key(&key.node) || key.remote.0 >= PORTS || !self.owns(key.local) {
            return Err(Reason::NoRoute);
        }
        let known = self.send_index.get(&key).copied();
        if self.is_incompatible(now, key.node, known) {
            return Err(Reason::Incompatible);
        }
        let slot = match known {
            Some(slot) => slot,
            None => self.open_stream(now, key, host)?,
        };
        if let Some(stream) = self.send.get_mut(slot)
            && (stream.closing || (stream.reopen && stream.queue.is_empty()))
        {
            self.reopen(slot, host);
        }
        self.last_sent = slot;
        Ok(slot)
    }

    /// Whether the peer of a stream said that it does not fit, a moment ago. For a stream whose peer is not known yet, the engine that
    /// would say which it is.
    #[cold]
    fn is_incompatible(&self, now: Nanos, node: NodeId, stream: Option<u32>) -> bool {
        let stream = stream.and_then(|slot| self.send.get(slot));
        let peer = stream
            .map(|stream| stream.peer)
            .filter(|peer| *peer != NONE);
        let asked = || self.peer_index.get(&Peer { node, queue: 0 }).copied();
        let entry = peer.or_else(asked).and_then(|slot| self.peers.get(slot));
        entry.is_some_and(|e| e.state == PeerState::Incompatible && now < e.hello_at)
    }

    /// Gives a send of this stream up. Its status follows: NotDelivered at once if it never left, else what the receiver says. Ignored if the send
    /// is settled.
    pub fn cancel(&mut self, _now: Nanos, id: SendId, stream: StreamKey) {
        self.train = None;
        let Some(&slot) = self.send_index.get(&stream) else {
            return;
        };
        let found = self.send.get_mut(slot).and_then(|stream| {
            let mut queue = stream.queue.iter_mut();
            queue.find(|m| m.id == id && m.state == MessageState::Live)
        });
        if let Some(message) = found {
            message.cancelled = true;
            if !self.cancelled.contains(&slot) {
                self.cancelled.push_back(slot);
            }
        }
    }

    /// Acts on what came in calls without a host.
    pub(super) fn act_on_cancels<H: Host>(&mut self, now: Nanos, host: &mut H) {
        if self.orphans.len() > 0 {
            self.settle_orphans(host);
        }
        while let Some(slot) = self.cancelled.pop_front() {
            self.give_up_where(now, slot, Reason::Cancelled, host, |message| {
                message.cancelled
            });
        }
    }

    /// After a failed send: what waits is sent (GM's `gm_resume_sending`).
    pub fn resume_sending(&mut self, now: Nanos, stream: StreamKey) {
        self.train = None;
        if let Some(&slot) = self.send_index.get(&stream)
            && let Some(stream) = self.send.get_mut(slot)
        {
            stream.paused = false;
            self.activate(now, slot);
        }
    }

    /// After a failed send: what was never transmitted ends as NotDelivered(Dropped), and later sends go (GM's `gm_drop_sends`).
    pub fn drop_sends<H: Host>(&mut self, now: Nanos, stream: StreamKey, host: &mut H) {
        self.train = None;
        let Some(&slot) = self.send_index.get(&stream) else {
            return;
        };
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        stream.paused = false;
        let sent = stream.high.wrapping_sub(stream.base) as usize;
        for index in sent..stream.queue.len() {
            let Some(stream) = self.send.get_mut(slot) else {
                return;
            };
            let id = stream.queue.get(index).map(|message| message.id);
            let status = stream.give_up(index, Reason::Dropped);
            self.finish(host, id, status);
        }
        self.activate(now, slot);
    }

    #[cold]
    fn open_stream<H: Host>(
        &mut self,
        now: Nanos,
        key: StreamKey,
        host: &mut H,
    ) -> Result<u32, Reason> {
        let peer = self.resolve(now, key).ok_or(Reason::NoResources)?;
        self.recall(peer, host);
        let epoch = host.draw_epoch(0);
        let mut stream = SendStream::new(key, epoch, self.config.first_number);
        stream.peer = peer;
        stream.incarnation = self.peers.get(peer).map_or(0, |entry| entry.incarnation);
        let record = host.open_send_record(key, stream.incarnation, epoch, stream.base);
        let Ok(record) = record else {
            self.counters.tables_full += 1;
            return Err(Reason::NoResources);
        };
        stream.record = Some(record);
        let slot = self.send.insert(stream);
        self.send_index.insert(key, slot);
        Ok(slot)
    }

    /// The peer a stream belongs to: NONE while the node's queues are unknown (it is being asked), `None` without room.
    #[cold]
    pub(super) fn resolve(&mut self, now: Nanos, key: StreamKey) -> Option<u32> {
        match self.nodes.get(&key.node).and_then(|node| node.queues) {
            Some(queues) => {
                let queue = (key.remote.0 % u16::from(queues.max(1))) as u8;
                self.peer_slot(
                    now,
                    Peer {
                        node: key.node,
                        queue,
                    },
                )
            }
            None => self.connect_node(now, key.node).map(|_| NONE),
        }
    }

    /// A node said how many queues it has: its streams find their engines.
    pub(super) fn resolve_streams<H: Host>(&mut self, now: Nanos, node: NodeId, host: &mut H) {
        self.resolve_receiving(now, node);
        for slot in 0..self.send.end() {
            let Some(stream) = self.send.get(slot).filter(|s| s.key.node == node) else {
                continue;
            };
            let (key, old) = (stream.key, stream.peer);
            let Some(peer) = self.resolve(now, key) else {
                self.fail_stream(now, slot, Reason::NoResources, host);
                continue;
            };
            let Some(stream) = self.send.get_mut(slot) else {
                continue;
            };
            stream.peer = peer;
            if old != peer {
                (stream.in_active, stream.in_control) = (false, false);
                if self.peers.get(peer).is_some_and(|entry| entry.is_up()) {
                    self.stream_up(now, slot, host);
                } else {
                    self.activate(now, slot);
                }
            }
        }
    }

    /// Receiving streams that a restore brought ask for their engines.
    fn resolve_receiving(&mut self, now: Nanos, node: NodeId) {
        for slot in 0..self.receive.end() {
            let unresolved = |s: &&super::ReceiveStream| s.key.node == node && s.peer == NONE;
            if let Some(key) = self.receive.get(slot).filter(unresolved).map(|s| s.key)
                && let Some(peer) = self.resolve(now, key)
            {
                self.connect(now, peer);
            }
        }
    }

    /// An association came to be: its streams start or go on.
    pub(super) fn peer_up<H: Host>(&mut self, now: Nanos, peer: u32, host: &mut H) {
        for slot in 0..self.send.end() {
            if self
                .send
                .get(slot)
                .is_some_and(|stream| stream.peer == peer)
            {
                self.stream_up(now, slot, host);
            }
        }
        for slot in 0..self.receive.end() {
            let Some(stream) = self.receive.get(slot) else {
                continue;
            };
            if stream.peer == NONE {
                let key = stream.key;
                if self.resolve(now, key) == Some(peer) {
                    self.attach_receiving(slot, peer, host);
                }
            } else if stream.peer == peer && stream.due.any() {
                self.queue_control(slot);
            }
        }
    }

    /// A stream's peer is up: settle what an older incarnation took with it, then send.
    fn stream_up<H: Host>(&mut self, now: Nanos, slot: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let incarnation = self
            .peers
            .get(stream.peer)
            .map_or(0, |entry| entry.incarnation);
        stream.void_volatile();
        if stream.incarnation != incarnation {
            if stream.incarnation != 0 {
                self.settle_transmitted(now, slot, Reason::PeerRestarted, host);
            }
            self.reopen(slot, host);
        } else if stream.reopen {
            self.reopen(slot, host);
        }
        self.activate(now, slot);
    }

    /// A peer's engine was replaced: everything outstanding goes again at once.
    pub(super) fn void_sending(&mut self, now: Nanos, peer: u32) {
        for slot in 0..self.send.end() {
            if let Some(stream) = self.send.get_mut(slot)
                && stream.peer == peer
            {
                stream.void_volatile();
                stream.nulls = stream
                    .queue
                    .iter()
                    .any(|m| matches!(m.state, MessageState::Null(_)));
                self.activate(now, slot);
            }
        }
    }

    /// Goes on under a new epoch with the same numbers. Only when nothing outstanding was delivered under the old one, or can be
    /// told as MaybeDelivered. Without room the stream waits and tries again.
    #[cold]
    pub(super) fn reopen<H: Host>(&mut self, slot: u32, host: &mut H) {
        self.reopen_later(slot, 0, host);
    }

    /// [`Self::reopen`] under an epoch so many later than the next.
    pub(super) fn reopen_later<H: Host>(&mut self, slot: u32, leave_out: u32, host: &mut H) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let incarnation = self
            .peers
            .get(stream.peer)
            .map_or(0, |entry| entry.incarnation);
        let epoch = host.draw_epoch(leave_out);
        let next = stream.next();
        let open = |host: &mut H| {
            host.open_send_record(stream.key, incarnation, epoch, next)
                .ok()
        };
        let mut record: Option<RecordId> = open(host);
        let old = stream.record;
        if record.is_none() {
            // The table is full: our own record makes room. A death here leaves accepted sends without a record, which restore
            // takes for what they are: never delivered.
            self.counters.tables_full += 1;
            if let Some(old) = stream.record.take() {
                host.free_send_record(old);
                record = host
                    .open_send_record(stream.key, incarnation, epoch, next)
                    .ok();
            }
        } else if let Some(old) = old {
            host.free_send_record(old);
        }
        stream.record = record;
        stream.reopen = record.is_none();
        stream.void_volatile();
        stream.epoch = epoch;
        stream.incarnation = incarnation;
        stream.established = false;
        stream.closing = false;
        stream.close = false;
        // Nothing of this epoch went out. Given up messages still owe their status: it is known now.
        stream.high = stream.base;
        stream.nulls = false;
        stream.holding = false;
        let mut index = 0;
        while let Some(stream) = self.send.get_mut(slot)
            && let Some(message) = stream.queue.get_mut(index)
        {
            match message.state {
                MessageState::Null(reason) => {
                    message.state = MessageState::Hole;
                    let id = message.id;
                    stream.paused |= pauses(reason);
                    self.finish(host, Some(id), Some(SendStatus::NotDelivered(reason)));
                }
                MessageState::Done => message.state = MessageState::Hole,
                MessageState::Live | MessageState::Hole => {}
            }
            index += 1;
        }
        self.counters.streams_reopened += 1;
    }

    /// The stream may have something to send.
    pub(super) fn activate(&mut self, now: Nanos, slot: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        if stream.peer == NONE {
            if !stream.queue.is_empty() {
                let node = stream.key.node;
                self.connect_node(now, node);
            }
            return;
        }
        let (peer, priority) = (stream.peer, stream.key.priority);
        let Some(entry) = self.peers.get_mut(peer) else {
            return;
        };
        if !entry.is_up() {
            if !stream.queue.is_empty() {
                self.connect(now, peer);
            }
            return;
        }
        if !stream.in_active {
            stream.in_active = true;
            entry.active[priority as usize].push_back(slot);
        }
        if stream.nulls {
            self.queue_sender_control(slot);
        }
        self.mark_ready(peer, priority);
    }

    /// The stream has control chunks to send.
    pub(super) fn queue_sender_control(&mut self, slot: u32) {
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        let peer = stream.peer;
        if let Some(entry) = self.peers.get_mut(peer) {
            if !stream.in_control {
                stream.in_control = true;
                entry.sender_control.push_back(slot);
            }
            self.mark_ready(peer, Priority::High);
        }
    }
}
