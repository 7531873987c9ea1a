//! Taking over: an endpoint from what the ledger held.
//!
//! Problem: the predecessor died at any instruction. transport.md §2.5, §13.2; FTGM's restored
//! tokens and sequence numbers (004).
//!
//! Idea: the durable facts are few: numbers, epochs, accepted sends. Everything is assumed transmitted (`high = next`), nothing
//! established, so the oldest unsettled number goes out again with START and receivers answer from their records. Numbers whose
//! sends were settled before the death are holes and go out as NULL, which a receiver that committed them merely acknowledges.
//! Receiving streams start at their base; whatever was half placed comes again. HELLO goes to every peer at once (the higher engine
//! epoch in its header already voids what is volatile there), RESUME with the committed base as soon as it is answered.
//!
//! A stream with nothing outstanding goes on under a new epoch. Its predecessor may have told sends as MaybeDelivered (its port
//! closed, the peer was unreachable) and meant to reopen; what the receiver half placed of them would hold the old epoch up for ever.
//!
//! Two records of one stream: the predecessor died while it reopened; the later epoch holds. An accepted send without a record:
//! it died while reopening with a full table; a new record is opened, which is safe since reopening proves that nothing was
//! delivered.

use alloc::vec::Vec;

use super::receive_stream::ReceiveStream;
use super::send_stream::{Message, MessageState, SendStream, UNSETTLED_MAX};
use super::slab::NONE;
use super::timers::Owner;
use super::{Config, Endpoint};
use crate::host::{
    Durable, Host, Reason, RestoredReceiveStream, RestoredSend, RestoredSendStream, SendStatus,
};
use crate::ident::{Nanos, Peer, RecordId, SendId, StreamKey, serial_lt};
use crate::policy::AckRule;

/// What a restore found that belongs to nothing; dealt with at the first call that brings a host.
#[derive(Clone, Debug, Default)]
pub(super) struct Orphans {
    sending: Vec<RecordId>,
    receiving: Vec<RecordId>,
    sends: Vec<SendId>,
}

impl Orphans {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.sending.len() + self.receiving.len() + self.sends.len()
    }
}

impl Endpoint {
    /// An endpoint that goes on where a predecessor died. `set_node` and `port_opened` come next, as for [`Endpoint::new`]; every
    /// peer the ledger knows is greeted at once. Facts that contradict each other cost their own stream, nothing else.
    pub fn restore(config: Config, now: Nanos, durable: &Durable) -> Self {
        let mut endpoint = Self::new(config, now);
        for &(id, incarnation, floor) in &durable.peers {
            endpoint.restore_peer(now, id, incarnation, floor);
        }
        for stream in &durable.receiving {
            endpoint.restore_receiving(stream);
        }
        for stream in &durable.sending {
            endpoint.restore_sending(now, stream);
        }
        let mut sends: Vec<&RestoredSend> = durable.sends.iter().collect();
        sends.sort_unstable_by_key(|send| (send.request.stream, send.number));
        for sends in sends.chunk_by(|a, b| a.request.stream == b.request.stream) {
            endpoint.restore_sends(sends);
        }
        endpoint
    }

    fn restore_peer(&mut self, now: Nanos, id: Peer, incarnation: u64, floor: u32) {
        if let Some(slot) = self.peer_slot(now, id)
            && let Some(entry) = self.peers.get_mut(slot)
        {
            entry.incarnation = incarnation;
            entry.floor = floor;
            entry.recalled = true;
        }
    }

    fn restore_receiving(&mut self, durable: &RestoredReceiveStream) {
        let key = durable.stream;
        if self.receive_index.contains_key(&key) {
            return self.orphans.receiving.push(durable.record);
        }
        // The peer is found when HELLO, or the sender itself, says which of the node's engines it is.
        let mut stream = ReceiveStream::new(
            key,
            NONE,
            durable.incarnation,
            durable.record,
            durable.epoch,
            durable.base,
        );
        stream.exact = self.config.policy.ack_rule == AckRule::Exact;
        stream.bits = durable.bits;
        stream.only_committed();
        stream.closed = durable.closed;
        stream.due.resume = true;
        let slot = self.receive.insert(stream);
        self.receive_index.insert(key, slot);
    }

    fn restore_sending(&mut self, now: Nanos, durable: &RestoredSendStream) {
        let key = durable.stream;
        let known = self.send_index.get(&key).copied();
        if let Some(stream) = known.and_then(|slot| self.send.get_mut(slot)) {
            // Died between opening the new record and freeing the old one.
            let later = serial_lt(stream.epoch, durable.epoch);
            let loser = if later {
                stream.record
            } else {
                Some(durable.record)
            };
            self.orphans.sending.extend(loser);
            if !later {
                return;
            }
        }
        let mut stream = SendStream::new(key, durable.epoch, durable.next);
        stream.record = Some(durable.record);
        stream.incarnation = durable.incarnation;
        stream.reopen = true; // unless there are sends
        stream.moved_at = now; // what answers our predecessor may be old
        stream.idle_at =
            now.saturating_add(Nanos::from(self.config.policy.stream_idle_ms) * 1_000_000);
        let slot = match known {
            Some(slot) => {
                if let Some(place) = self.send.get_mut(slot) {
                    *place = stream;
                }
                slot
            }
            None => self.send.insert(stream),
        };
        self.send_index.insert(key, slot);
        self.rearm_restored(slot);
    }

    /// The accepted sends of one stream.
    fn restore_sends(&mut self, sends: &[&RestoredSend]) {
        let Some(key) = sends.first().map(|send| send.request.stream) else {
            return;
        };
        let slot = match self.send_index.get(&key) {
            Some(&slot) => slot,
            None => {
                let slot = self.send.insert(Self::without_record(key, sends));
                self.send_index.insert(key, slot);
                slot
            }
        };
        let Some(stream) = self.send.get_mut(slot) else {
            return;
        };
        // `next` is never behind an accepted number, whatever the record says.
        let newest = sends.iter().map(|send| send.number.wrapping_add(1));
        let next = newest.fold(
            stream.base,
            |next, n| if serial_lt(next, n) { n } else { next },
        );
        let back = |send: &RestoredSend| next.wrapping_sub(send.number) as usize;
        let oldest = sends
            .iter()
            .map(|send| back(send))
            .filter(|&back| back <= UNSETTLED_MAX) // more is no gap but a damaged ledger
            .max();
        let Some(count) = oldest else {
            let ids = sends.iter().map(|send| send.request.id);
            return self.orphans.sends.extend(ids);
        };
        let base = next.wrapping_sub(count as u32);
        // What is missing was settled: only its number may still be owed.
        let mut gap = Message::new(&sends[0].request);
        gap.state = MessageState::Hole;
        stream.queue.extend(core::iter::repeat_n(gap, count));
        (stream.base, stream.cursor, stream.high) = (base, base, next);
        stream.reopen = stream.record.is_none();
        for send in sends {
            let index = send.number.wrapping_sub(base) as usize;
            match stream.queue.get_mut(index) {
                Some(message) if message.state == MessageState::Hole => {
                    *message = Message::new(&send.request);
                    message.restored = true;
                }
                _ => self.orphans.sends.push(send.request.id),
            }
        }
        stream.find_deadline();
        self.rearm_restored(slot);
    }

    /// A stream whose record is gone; see the module's text.
    fn without_record(key: StreamKey, sends: &[&RestoredSend]) -> SendStream {
        let first = sends.first().map_or(0, |send| send.number);
        let mut stream = SendStream::new(key, 0, first);
        stream.reopen = true;
        stream
    }

    fn rearm_restored(&mut self, slot: u32) {
        if let Some(stream) = self.send.get(slot) {
            let wake = stream.next_wake();
            self.timers.arm(Owner::Send(slot), wake);
        }
    }

    /// Whether a restored stream of the node still looks for its engine.
    pub(super) fn seeks_peer(&self, node: crate::ident::NodeId) -> bool {
        self.send
            .iter()
            .any(|(_, s)| s.key.node == node && s.peer == NONE && !s.queue.is_empty())
            || self
                .receive
                .iter()
                .any(|(_, s)| s.key.node == node && s.peer == NONE)
    }

    /// A restored receiving stream found its sender's engine. False if that is of another incarnation: the stream is gone.
    pub(super) fn attach_receiving<H: Host>(&mut self, slot: u32, peer: u32, host: &mut H) -> bool {
        let Some(stream) = self.receive.get_mut(slot) else {
            return false;
        };
        if stream.peer == NONE {
            let incarnation = self.peers.get(peer).map_or(0, |entry| entry.incarnation);
            if stream.incarnation != incarnation {
                self.drop_receive_stream(slot, host);
                return false;
            }
            stream.peer = peer;
            if stream.due.any() {
                self.queue_control(slot);
            }
        }
        true
    }

    /// Frees what belongs to nothing and ends what cannot be placed.
    #[cold]
    pub(super) fn settle_orphans<H: Host>(&mut self, host: &mut H) {
        while let Some(record) = self.orphans.sending.pop() {
            host.free_send_record(record);
        }
        while let Some(record) = self.orphans.receiving.pop() {
            host.free_receive_record(record);
        }
        while let Some(id) = self.orphans.sends.pop() {
            let status = SendStatus::MaybeDelivered(Reason::PeerRestarted);
            self.finish(host, Some(id), Some(status));
        }
    }
}
