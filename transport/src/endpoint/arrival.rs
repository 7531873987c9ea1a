//! First chunks: EAGER, RTS, NULL, PROBE, and CLOSE. Table 1, commits, acknowledgements.
//!
//! Problem, spec and idea: see `receive_stream`. ParaStation2 Table 1 for DATA, applied to the first chunk of a message:
//!
//! | number | EAGER, RTS | NULL | PROBE |
//! |---|---|---|---|
//! | < base | acknowledge again | NULL-ACK | answer the state |
//! | < arrival | acknowledge, grants again | the message is taken back, its number stays | answer the state |
//! | = arrival | accept if a buffer can be claimed, else one NACK (no buffer) | accept | READY, or NACK (no buffer) |
//! | > arrival | one NACK (gap), then silence | same | NACK (gap), always |
//!
//! A stream opens with the first chunk that carries START. Its base is the oldest number the sender has not settled, so any
//! message may open it. Below the peer's floor, or without START, the answer is REFUSED; to a port that is not open it is
//! PORT-CLOSED, after the floor was raised past the epoch, so that a late copy cannot open the stream when the port does.
//!
//! Invariants: a buffer is claimed before anything is placed, and every claimed buffer is in `messages` or released.

use super::Endpoint;
use super::peer::{PeerEntry, Reply};
use super::receive_stream::{Incoming, Kind, ReceiveStream};
use super::{NACK_CORRUPT, NACK_GAP, NACK_NO_BUFFER};
use crate::host::{Host, NoBuffer, Reason};
use crate::ident::{BufferId, Nanos, StreamKey, serial_lt};
use crate::wire::{Chunk, PayloadView, StreamRef, crc32c_combine};

/// Idle streams asked about, and rows looked at, each time a stream finds no record.
const ASKED_MAX: u32 = 4;
const ASKED_LOOK: u32 = 64;

/// What a first chunk is.
#[derive(Clone, Copy)]
pub(super) enum First {
    Message { total: u32, tag: u64 },
    Null,
    Probe { total: u32 },
}

impl Endpoint {
    /// A chunk from a stream's sender.
    pub(super) fn on_message_chunk<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        chunk: &Chunk<'_>,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let (first, stream, start, number) = match *chunk {
            Chunk::Eager {
                stream,
                start,
                number,
                tag,
                payload,
                ..
            } => {
                let total = u32::from(payload.len);
                (First::Message { total, tag }, stream, start, number)
            }
            Chunk::Rts {
                stream,
                start,
                number,
                tag,
                total,
                ..
            } => (First::Message { total, tag }, stream, start, number),
            Chunk::Null {
                stream,
                start,
                number,
            } => (First::Null, stream, start, number),
            Chunk::Probe {
                stream,
                start,
                number,
                total,
            } => (First::Probe { total }, stream, start, number),
            Chunk::Data {
                stream,
                number,
                offset,
                ..
            } => return self.on_data(now, peer, &stream, number, offset, view, host),
            Chunk::DropConfirm { stream, number } => {
                return self.on_drop_confirm(now, peer, &stream, number, host);
            }
            Chunk::Close { stream, .. } => return self.on_close(peer, &stream, host),
            _ => return,
        };
        let Some(key) = self.key_of(peer, &stream, false) else {
            self.counters.protocol_violations += 1;
            return;
        };
        let Some(slot) = self.stream_for(now, peer, key, &stream, start, (number, first), host)
        else {
            return;
        };
        let Some(entry) = self.receive.get_mut(slot) else {
            return;
        };
        if entry.closed {
            // Only when no NULL waits for its confirmation: `base` must say *delivered*.
            entry.due.nulled = entry.nulled() != 0;
            entry.due.port_closed = entry.nulled() == 0;
            return self.queue_control(slot);
        }
        if serial_lt(entry.arrival, number) {
            let probe = matches!(first, First::Probe { .. });
            self.counters.out_of_order += 1;
            // What follows a message without a buffer is no gap: `arrival` came, and its NACK said why it was not taken.
            let (told, reason) = match entry.no_buffer {
                true => (true, NACK_NO_BUFFER),
                false => (entry.stalled, NACK_GAP),
            };
            if !told || probe {
                entry.stalled |= !entry.no_buffer;
                entry.due.nack = Some(reason);
                self.queue_control(slot);
            }
        } else if serial_lt(number, entry.arrival) {
            self.first_again(now, slot, number, first, host);
        } else {
            self.first_in_order(now, slot, first, view, host);
        }
        if let First::Probe { .. } = first {
            self.tell_state(slot);
        }
    }

    /// The receiving stream a first chunk belongs to; opened if START allows it.
    #[allow(clippy::too_many_arguments)]
    fn stream_for<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        key: StreamKey,
        stream: &StreamRef,
        start: Option<u32>,
        (number, first): (u32, First),
        host: &mut H,
    ) -> Option<u32> {
        let known = self.receive_index.get(&key).copied();
        if let Some(slot) = known {
            let epoch = self.receive.get(slot)?.epoch;
            if epoch == stream.epoch {
                return self.attach_receiving(slot, peer, host).then_some(slot);
            }
            if serial_lt(stream.epoch, epoch) {
                self.counters.stale_epochs += 1;
                return None;
            }
        }
        let entry = self.peers.get(peer)?;
        let below_floor = entry.is_below_floor(stream.epoch);
        let open = self
            .open_ports
            .get(usize::from(key.local.0))
            .copied()
            .unwrap_or(false);
        let Some(base) = start.filter(|_| !below_floor || !open) else {
            self.counters.streams_refused += 1;
            self.reply(peer, Reply::Refused(*stream));
            return None;
        };
        if serial_lt(number, base) {
            self.counters.protocol_violations += 1;
            return None;
        }
        if !open {
            // Also replaces an older epoch's record; nothing of the new one was delivered.
            if self.forget_epoch(peer, known, stream.epoch, host) {
                self.reply(peer, Reply::PortClosed(*stream, base));
            }
            return None;
        }
        if let Some(old) = known {
            let epoch = self.receive.get(old)?.epoch;
            if !self.forget_epoch(peer, known, epoch, host) {
                return None;
            }
        }
        let incarnation = self.peers.get(peer)?.incarnation;
        let Ok(record) = host.open_receive_record(key, incarnation, stream.epoch, base) else {
            self.counters.tables_full += 1;
            self.ask_idle_streams(now);
            // A sender that gives up needs no record to be told that nothing was delivered.
            if matches!(first, First::Null) && self.forget_epoch(peer, None, stream.epoch, host) {
                self.reply(peer, Reply::Refused(*stream));
            } else {
                self.reply(peer, Reply::NoBuffer(*stream, base));
            }
            return None;
        };
        let entry = ReceiveStream::new(key, peer, incarnation, record, stream.epoch, base);
        let slot = self.receive.insert(entry);
        self.receive_index.insert(key, slot);
        self.counters.streams_opened += 1;
        Some(slot)
    }

    /// The table is full: some idle streams tell their senders what they know, and those that have no such stream any more (a CLOSE
    /// was lost with its sender's patience) answer CLOSE.
    fn ask_idle_streams(&mut self, now: Nanos) {
        let (end, mut asked) = (self.receive.end(), 0);
        for _ in 0..end.min(ASKED_LOOK) {
            self.ask_next = if self.ask_next + 1 < end {
                self.ask_next + 1
            } else {
                0
            };
            let slot = self.ask_next;
            let Some(stream) = self.receive.get_mut(slot) else {
                continue;
            };
            if stream.messages.is_empty() {
                stream.due.ack = true;
                let peer = stream.peer;
                self.queue_control(slot);
                self.connect(now, peer);
                asked += 1;
            }
            if asked == ASKED_MAX {
                return;
            }
        }
    }

    /// Raises the peer's durable floor past `epoch`, then frees the record. False if the floor could not be stored.
    fn forget_epoch<H: Host>(
        &mut self,
        peer: u32,
        slot: Option<u32>,
        epoch: u32,
        host: &mut H,
    ) -> bool {
        let Some(entry) = self.peers.get_mut(peer) else {
            return false;
        };
        if !entry.is_below_floor(epoch) {
            let floor = PeerEntry::floor_past(epoch);
            if host.store_peer(entry.id, entry.incarnation, floor).is_err() {
                self.counters.tables_full += 1;
                return false;
            }
            entry.floor = floor;
        }
        if let Some(slot) = slot {
            self.drop_receive_stream(slot, host);
        }
        true
    }

    /// A number that came before.
    fn first_again<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        first: First,
        host: &mut H,
    ) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        if matches!(first, First::Message { .. }) {
            self.counters.duplicates += 1;
        }
        stream.due.ack = true;
        stream.due.nulled |= stream.nulled() != 0;
        match stream.index(number) {
            Some(index) => {
                if let First::Null = first {
                    self.take_back(now, slot, index, host);
                } else if let Some(Kind::Placing(row)) = stream.messages.get(index).map(|m| m.kind)
                    && let Some(long) = self.longs.get_mut(row)
                {
                    long.cts = long.cts.or(Some(false));
                    stream.due.grants = true;
                }
                if let Some(stream) = self.receive.get_mut(slot) {
                    stream.due.drops = true;
                }
            }
            None => {
                if matches!(first, First::Null) && !stream.is_nulled(number) {
                    stream.due.null_delivered = Some(number);
                }
            }
        }
        self.queue_control(slot);
    }

    /// NULL for a message that was accepted and not committed: it keeps its place, not its buffer. One that is whole only waits
    /// for its turn; it will be delivered, and the sender will hear so.
    fn take_back<H: Host>(&mut self, now: Nanos, slot: u32, index: usize, host: &mut H) {
        let kind = self
            .receive
            .get(slot)
            .and_then(|s| Some(s.messages.get(index)?.kind));
        if let Some(Kind::Placing(row)) = kind {
            self.drop_long(row, host);
            if let Some(incoming) = self
                .receive
                .get_mut(slot)
                .and_then(|s| s.messages.get_mut(index))
            {
                incoming.kind = Kind::Null;
            }
            self.commit_ready(now, slot, host);
        }
    }

    /// The number that is next.
    fn first_in_order<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        first: First,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let window = self.config.policy.window_messages as usize;
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        if stream.messages.len() >= window && !matches!(first, First::Probe { .. }) {
            self.counters.protocol_violations += 1;
            return;
        }
        let key = stream.key;
        let unconfirmed = |m: &Incoming| {
            matches!(
                m.kind,
                Kind::Drop {
                    confirmed: false,
                    ..
                }
            )
        };
        if stream.messages.iter().any(unconfirmed) {
            // Nobody confirmed it yet: it is told again with whatever follows.
            stream.due.drops = true;
            self.queue_control(slot);
        }
        match first {
            First::Message { total, tag } => self.accept_message(now, slot, total, tag, view, host),
            First::Null => {
                self.push(now, slot, Kind::Null, 0, 0);
                self.commit_ready(now, slot, host);
            }
            First::Probe { total } => {
                let claimed = host.claim(key.local, key.priority, total);
                let Some(stream) = self.receive.get_mut(slot) else {
                    return;
                };
                stream.due.nack = (claimed == Err(NoBuffer::NotNow)).then_some(NACK_NO_BUFFER);
                // If it is too long or the port is gone, the message itself will be told so.
                stream.due.ready = claimed != Err(NoBuffer::NotNow);
                match claimed {
                    Ok(buffer) => host.release(buffer),
                    Err(NoBuffer::NotNow) => self.wait_for_token(slot),
                    Err(NoBuffer::TooLong | NoBuffer::PortClosed) => {}
                }
                self.queue_control(slot);
            }
        }
    }

    fn accept_message<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        total: u32,
        tag: u64,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let Some(stream) = self.receive.get(slot) else {
            return;
        };
        let key = stream.key;
        let in_order = stream.messages.is_empty() && !stream.no_buffer;
        let mut claimed = host.claim(key.local, key.priority, total);
        if in_order && claimed == Err(NoBuffer::NotNow) && self.take_token_back(slot, host) {
            claimed = host.claim(key.local, key.priority, total);
        }
        let buffer = match claimed {
            Ok(buffer) => buffer,
            Err(NoBuffer::NotNow) => {
                self.counters.no_buffer += 1;
                let Some(stream) = self.receive.get_mut(slot) else {
                    return;
                };
                if !stream.no_buffer {
                    stream.no_buffer = true;
                    stream.due.nack = Some(NACK_NO_BUFFER);
                    self.queue_control(slot);
                }
                return self.wait_for_token(slot);
            }
            Err(NoBuffer::TooLong) => {
                let reason = Reason::TooLong;
                self.push(
                    now,
                    slot,
                    Kind::Drop {
                        reason,
                        confirmed: false,
                    },
                    total,
                    tag,
                );
                if let Some(stream) = self.receive.get_mut(slot) {
                    stream.due.drops = true;
                }
                return self.queue_control(slot);
            }
            Err(NoBuffer::PortClosed) => return self.close_receive_stream(slot, host),
        };
        let whole = view.len() as u32 == total;
        match self.place(buffer, 0, view, host) {
            Some(true) if whole => {
                self.push(now, slot, Kind::Whole(buffer), total, tag);
                self.commit_ready(now, slot, host);
            }
            Some(matched) if !whole => {
                let first_bytes = view.len() as u32;
                self.push_long(now, slot, buffer, total, tag, first_bytes, matched);
            }
            matched => {
                host.release(buffer);
                let Some(stream) = self.receive.get_mut(slot) else {
                    return;
                };
                if matched.is_some() && !stream.stalled {
                    stream.stalled = true;
                    stream.due.nack = Some(NACK_CORRUPT);
                    self.queue_control(slot);
                }
            }
        }
        self.wake_waiting(key.local, 1);
    }

    /// Writes a payload into a buffer while its checksum is computed. `Some(true)`: it matched; `None`: the memory is gone.
    pub(super) fn place<H: Host>(
        &mut self,
        buffer: BufferId,
        offset: u32,
        view: &PayloadView<'_>,
        host: &mut H,
    ) -> Option<bool> {
        let (mut at, mut crc) = (offset, 0);
        for part in view.parts() {
            let Ok(written) = host.write_payload(buffer, at, part) else {
                self.counters.memory_faults += 1;
                return None;
            };
            crc = if at == offset {
                written
            } else {
                crc32c_combine(crc, written, part.len() as u32)
            };
            at += part.len() as u32;
        }
        let matched = view.is_empty() || crc == view.crc();
        self.counters.payloads_corrupt += u64::from(!matched);
        Some(matched)
    }

    /// The sender ends the epoch: forget it, once late copies of it are refused for ever.
    fn on_close<H: Host>(&mut self, peer: u32, stream: &StreamRef, host: &mut H) {
        let Some(key) = self.key_of(peer, stream, false) else {
            self.counters.protocol_violations += 1;
            return;
        };
        let known = self.receive_index.get(&key).copied();
        let known = known.filter(|&slot| {
            self.receive
                .get(slot)
                .is_some_and(|s| !serial_lt(stream.epoch, s.epoch))
        });
        if self.forget_epoch(peer, known, stream.epoch, host) {
            self.reply(peer, Reply::Closed(*stream));
        }
    }

    /// The slot of a stream, perhaps a closed one, whose current epoch the chunk names.
    pub(super) fn current(&mut self, peer: u32, stream: &StreamRef) -> Option<u32> {
        let slot = self
            .key_of(peer, stream, false)
            .and_then(|key| self.receive_index.get(&key).copied());
        let fits = |slot: &u32| {
            self.receive
                .get(*slot)
                .is_some_and(|s| s.epoch == stream.epoch && s.peer == peer)
        };
        let found = slot.filter(fits);
        self.counters.stale_epochs += u64::from(found.is_none());
        found
    }
}
