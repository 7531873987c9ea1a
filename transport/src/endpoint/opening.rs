//! Receiving streams begin and end: START, floors, REFUSED, CLOSE.
//!
//! Problem: transport.md §3.1, §3.2, §3.3, §3.4. An epoch opens once, at the oldest number its sender has not settled, and once it is over no
//! late copy of it opens it again.
//!
//! Idea: a stream opens with the first chunk that carries START. Its base is the oldest number the sender has not settled, so any
//! message may open it. Below the peer's floor, or without START, the answer is REFUSED; to a port that is not open it is
//! PORT-CLOSED, after the floor was raised past the epoch, so that a late copy cannot open the stream when the port does.
//!
//! Invariant: a record is freed only after the floor was raised past its epoch.

use super::Endpoint;
use super::arrival::First;
use super::peer::{PeerEntry, Reply};
use super::receive_stream::ReceiveStream;
use crate::host::Host;
use crate::ident::{Nanos, StreamKey, serial_lt};
use crate::policy::AckRule;
use crate::wire::StreamRef;

/// Idle streams asked about, and rows looked at, each time a stream finds no record.
const ASKED_MAX: u32 = 4;
const ASKED_LOOK: u32 = 64;

/// How far an epoch may be ahead of the one that is known. A sender draws one after the other; what is farther was made up by a damaged engine, and
/// near the end of the serial space nothing could come after it.
const AHEAD_MAX: u32 = 1 << 30;

impl Endpoint {
    /// Whether nobody can have drawn the epoch yet, by what is known of the stream or the peer.
    #[cold]
    fn is_made_up(&self, peer: u32, known: Option<u32>, epoch: u32) -> bool {
        let Some(entry) = self.peers.get(peer) else {
            return false;
        };
        let stream = known.and_then(|slot| self.receive.get(slot));
        let newest = match stream {
            Some(stream) if !entry.is_below_floor(stream.epoch) => Some(stream.epoch),
            _ => (entry.floor != 0).then_some(entry.floor),
        };
        newest.is_some_and(|newest| {
            serial_lt(newest, epoch) && epoch.wrapping_sub(newest) > AHEAD_MAX
        })
    }

    /// The receiving stream a first chunk belongs to; opened if START allows it.
    #[allow(clippy::too_many_arguments)]
    #[inline(never)]
    pub(super) fn stream_for<H: Host>(
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
            // The floor is past every epoch that was forgotten: what is not below it comes after what is.
            let below = |epoch| {
                let entry = self.peers.get(peer);
                entry.is_some_and(|entry| entry.is_below_floor(epoch))
            };
            let passed = below(epoch) && !below(stream.epoch);
            if serial_lt(stream.epoch, epoch) && !passed {
                // An old copy, and its sender takes no notice of the answer. Or the record is wrong, left by an engine that was: then nothing
                // else would ever end the sender's waiting.
                self.counters.stale_epochs += 1;
                self.reply(peer, Reply::Refused(*stream));
                return None;
            }
        }
        let made_up = self.is_made_up(peer, known, stream.epoch);
        let entry = self.peers.get(peer)?;
        let below_floor = entry.is_below_floor(stream.epoch);
        let open = self
            .open_ports
            .get(usize::from(key.local.0))
            .copied()
            .unwrap_or(false);
        let fits = !made_up && (!below_floor || !open);
        let Some(base) = start.filter(|_| fits) else {
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
        let mut entry = ReceiveStream::new(key, peer, incarnation, record, stream.epoch, base);
        entry.exact = self.config.policy.ack_rule == AckRule::Exact;
        // What was refused of it before, as we knew less of its sender then, and was not told yet, is true no more: who is told so sends all of it again.
        if let Some(peer) = self.peers.get_mut(peer) {
            (peer.replies).retain(|reply| *reply != Reply::Refused(*stream));
        }
        let slot = self.receive.insert(entry);
        self.receive_index.insert(key, slot);
        self.counters.streams_opened += 1;
        Some(slot)
    }

    /// The table is full: some idle streams tell their senders what they know, and those that have no such stream any more (a CLOSE
    /// was lost with its sender's patience) answer CLOSE.
    #[cold]
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
    #[cold]
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

    /// The sender ends the epoch: forget it, once late copies of it are refused for ever.
    #[cold]
    pub(super) fn on_close<H: Host>(&mut self, peer: u32, stream: &StreamRef, host: &mut H) {
        let Some(key) = self.key_of(peer, stream, false) else {
            self.counters.protocol_violations += 1;
            return;
        };
        let known = self.receive_index.get(&key).copied();
        if self.is_made_up(peer, known, stream.epoch) {
            // There is nothing to forget, and what is drawn next must not be below the floor.
            return self.reply(peer, Reply::Closed(*stream));
        }
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
