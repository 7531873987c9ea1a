//! Long messages in motion: DATA, gaps, grants, and giving buffers back.
//!
//! Problem and idea: see `long_message`. transport.md §7.3, §7.4, §8.1. Here is what happens per chunk: DATA of an accepted message within its grant is
//! placed at its offset and counts once its checksum matched. With selective recovery a CTS names what is missing once it is missing
//! for longer than frames overtake each other, and as often; the sender knows from the frame's horizon which of it went out again
//! since. What was lost last is found by the sender's PROBE. With go-back-N bytes beyond a hole are dropped and everything from the hole on is asked for, once
//! per round trip. With whole message recovery nothing is asked for: the sender's timer starts the message again.
//!
//! A chunk that partly covers counted bytes is read twice, once to check it whole and once to write what is new: it happens only
//! where two transmissions were cut differently: the sender's frame length changed, or one of them was in bare frames.

use super::Endpoint;
use super::long_message::{LongMessage, RangeSet};
use super::receive_stream::{Incoming, Kind, ReceiveStream};
use crate::host::Host;
use crate::ident::{BufferId, Nanos, Priority};
use crate::policy::{AckMode, Recovery};
use crate::wire::chunk::Range;
use crate::wire::{PayloadView, StreamRef};

impl Endpoint {
    /// An RTS was accepted: its first bytes lie in the buffer, and count if they matched.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn push_long(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        incoming: Incoming,
        buffer: BufferId,
        first_bytes: u32,
        matched: bool,
    ) {
        let priority = self
            .receive
            .get(slot)
            .map_or(Priority::Low, |stream| stream.key.priority);
        let mut long = LongMessage {
            stream: slot,
            number,
            buffer,
            priority,
            total: incoming.len,
            received: 0,
            ranges: RangeSet::default(),
            granted: 0,
            unasked: 0,
            cts: (!matched).then_some(true),
            report: 0,
            asked_at: None,
            seen: 0,
            age: self.age + 1,
            heard_at: now,
            silent: false,
        };
        if matched && first_bytes > 0 {
            let first = Range {
                from: 0,
                to: first_bytes,
            };
            if long.ranges.insert(first).is_ok() {
                (long.received, long.granted) = (first_bytes, first_bytes);
            }
        }
        if incoming.unasked {
            long.expect_unasked(&self.config.policy);
        }
        let row = self.longs.insert(long);
        self.grants.add(row, &long, &self.granting);
        let kind = Kind::Placing(row);
        self.push(now, slot, number, Incoming { kind, ..incoming });
        self.give_grants();
    }

    /// Bytes of a long message.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn on_data<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        stream: &StreamRef,
        number: u32,
        offset: u32,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let slot = match self.named_before(peer, stream) {
            Some(slot) => Some(slot),
            None => {
                self.named = self.current(peer, stream);
                self.named
            }
        };
        let found = slot.and_then(|slot| {
            let entry = self.receive.get(slot)?;
            match entry.messages.get(entry.index(number)?)?.kind {
                Kind::Placing(row) => Some((slot, row)),
                _ => None,
            }
        });
        let Some((slot, row)) = found else {
            self.counters.data_unexpected += 1;
            return;
        };
        let range = Range {
            from: offset,
            to: offset.wrapping_add(view.len() as u32), // not above `from`: empty, or beyond any message
        };
        if !self.on_bytes(now, slot, row, range, view, host) {
            self.counters.data_unexpected += 1;
        }
    }

    /// The first bytes of a long message came again: some of them may be news.
    pub(super) fn on_first_bytes<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        row: u32,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let range = Range {
            from: 0,
            to: view.len() as u32,
        };
        let Some(long) = self.longs.get_mut(row) else {
            return;
        };
        if long.ranges.first_gap(range).is_none() {
            return;
        }
        if range.to > long.granted && range.to <= long.total && view.verify() {
            // The request brings more than it did the first time, because its frame is longer now. That was never granted, nor need it
            // be; and the sender will not send it otherwise.
            self.grants.remove(row, long);
            long.granted = range.to;
            self.grants.add(row, long, &self.granting);
        }
        self.on_bytes(now, slot, row, range, view, host);
    }

    /// Its request says, or says again, that more of it follows without a grant.
    pub(super) fn expect_unasked(&mut self, row: u32) {
        if let Some(long) = self.longs.get_mut(row) {
            self.grants.remove(row, long);
            long.expect_unasked(&self.config.policy);
            self.grants.add(row, long, &self.granting);
        }
    }

    /// Bytes for a row. False if they are not granted.
    fn on_bytes<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        row: u32,
        range: Range,
        view: &PayloadView<'_>,
        host: &mut H,
    ) -> bool {
        let Some(long) = self.longs.get(row) else {
            return false;
        };
        if range.to > long.granted || range.from >= range.to {
            return false;
        }
        let (buffer, end) = (long.buffer, long.ranges.end());
        if range.from > end && matches!(self.config.policy.recovery, Recovery::GoBackN { .. }) {
            // Go-back-N goes back for bytes too: the papers' receiver has no place for what comes out of order.
            self.counters.data_out_of_order += 1;
            self.after_data(now, slot, row, 0, range, host);
            return true;
        }
        let len = range.to - range.from;
        let (counted, old) = match long.ranges.first_gap(range) {
            None => (0, len),
            Some(hole) if hole == range => (self.count_range(buffer, row, range, view, host), 0),
            Some(_) if view.verify() => {
                let counted = self.count_holes(buffer, row, range, view, host);
                (counted, len.saturating_sub(counted))
            }
            Some(_) => {
                self.counters.payloads_corrupt += 1;
                (0, 0)
            }
        };
        self.counters.data_duplicates += u64::from(old);
        self.after_data(now, slot, row, counted, range, host);
        true
    }

    /// Places a range none of which is counted yet. Returns the bytes counted.
    fn count_range<H: Host>(
        &mut self,
        buffer: BufferId,
        row: u32,
        range: Range,
        view: &PayloadView<'_>,
        host: &mut H,
    ) -> u32 {
        // Room in the list first: a chunk that cannot be remembered is not worth placing.
        let Some(long) = self.longs.get(row) else {
            return 0;
        };
        if !long.ranges.has_room(range) {
            self.counters.ranges_full += 1;
            return 0;
        }
        if self.place(buffer, range.from, u32::MAX, view, host) != Some(true) {
            return 0;
        }
        match self
            .longs
            .get_mut(row)
            .map(|long| long.ranges.insert(range))
        {
            Some(Ok(())) => range.to - range.from,
            _ => 0,
        }
    }

    /// Places those parts of a verified payload that are not counted yet.
    #[cold]
    fn count_holes<H: Host>(
        &mut self,
        buffer: BufferId,
        row: u32,
        range: Range,
        view: &PayloadView<'_>,
        host: &mut H,
    ) -> u32 {
        let mut counted = 0;
        while let Some(long) = self.longs.get_mut(row)
            && let Some(hole) = long.ranges.first_gap(range)
        {
            if long.ranges.insert(hole).is_err() {
                self.counters.ranges_full += 1;
                break;
            }
            let mut at = range.from;
            for part in view.parts() {
                let (from, to) = (at.max(hole.from), (at + part.len() as u32).min(hole.to));
                if from < to {
                    let piece = part.get((from - at) as usize..(to - at) as usize);
                    if host
                        .write_payload(buffer, from, piece.unwrap_or_default())
                        .is_err()
                    {
                        self.counters.memory_faults += 1;
                        return counted; // the port is closing; what was marked will not be delivered
                    }
                }
                at += part.len() as u32;
            }
            counted += hole.to - hole.from;
        }
        counted
    }

    /// Complete, hungry, or with a hole. `counted` bytes of `range` are new.
    fn after_data<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        row: u32,
        counted: u32,
        range: Range,
        host: &mut H,
    ) {
        let policy = &self.config.policy;
        let Some(long) = self.longs.get_mut(row) else {
            return;
        };
        let received = long.received + counted;
        self.grants.received(row, long, received, &self.granting);
        if long.is_complete() {
            let selective = policy.recovery == Recovery::Selective;
            let (number, buffer) = (long.number, long.buffer);
            self.grants.remove(row, long);
            self.longs.remove(row);
            if let Some(stream) = self.receive.get_mut(slot)
                && let Some(index) = stream.index(number)
                && let Some(incoming) = stream.messages.get_mut(index)
            {
                incoming.kind = Kind::Whole(buffer);
            }
            self.commit_ready(now, slot, host);
            let waits = |s: &ReceiveStream| s.index(number).is_some();
            if selective && self.receive.get(slot).is_some_and(waits) {
                // It overtook another that may have lost something: the sender should know how far we are.
                self.acknowledge(now, slot, 0, AckMode::Immediate);
            }
        } else {
            let asked = long.asked_at;
            let since = |wait: Nanos| asked.is_none_or(|at| now >= at.saturating_add(wait));
            let entry = || self.peers.get(self.receive.get(slot)?.peer);
            let due = match policy.recovery {
                Recovery::GoBackN { .. } if counted == 0 && range.from > long.ranges.end() => {
                    let round_trip = entry().map_or(0, |entry| entry.rtt.repeat(policy));
                    since(round_trip).then_some(true)
                }
                // The grant was lost, if what it answered comes again.
                Recovery::WholeMessage => {
                    (counted == 0 && range.to == long.granted).then_some(false)
                }
                Recovery::Selective if long.received < long.ranges.end() => {
                    if asked.is_none() {
                        (long.asked_at, long.seen) = (Some(now), long.ranges.end());
                    }
                    let reorder = || entry().map_or(0, |entry| entry.reorder_window());
                    (asked.is_some() && since(reorder())).then_some(false)
                }
                Recovery::Selective => {
                    long.asked_at = None;
                    None
                }
                Recovery::GoBackN { .. } => None,
            };
            if let Some(all) = due {
                (long.asked_at, long.report) = (Some(now), long.seen);
                long.seen = long.ranges.end();
                long.cts = long.cts.max(Some(all));
                if let Some(stream) = self.receive.get_mut(slot) {
                    stream.due.grants = true;
                }
                self.queue_control(slot);
            }
        }
        self.give_grants();
    }

    /// A long message ends without a delivery: its buffer goes back, its grant to others.
    #[cold]
    pub(super) fn drop_long<H: Host>(&mut self, row: u32, host: &mut H) {
        if let Some(long) = self.longs.remove(row) {
            self.grants.remove(row, &long);
            host.release(long.buffer);
        }
    }

    /// Forgets what a stream accepted and did not commit.
    #[cold]
    pub(super) fn void_receive_stream<H: Host>(&mut self, slot: u32, host: &mut H) {
        let mut count = 0;
        while let Some(incoming) = self
            .receive
            .get_mut(slot)
            .and_then(|s| s.messages.pop_back())
        {
            match incoming.kind {
                Kind::Whole(buffer) => host.release(buffer),
                Kind::Placing(row) => self.drop_long(row, host),
                Kind::Null | Kind::Refused | Kind::Drop { .. } => {}
                Kind::Missing | Kind::Committed => continue,
            }
            count += 1;
        }
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.only_committed();
        (stream.stalled, stream.no_buffer, stream.undecided) = (false, None, None);
        stream.woken = false;
        (stream.due.nack, stream.due.ready) = (None, None);
        (stream.due.drops, stream.due.grants) = (false, false);
        let peer = stream.peer;
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.placing = entry.placing.saturating_sub(count);
        }
    }

    /// The same for all streams of a peer.
    pub(super) fn void_receiving<H: Host>(&mut self, peer: u32, host: &mut H) {
        for slot in 0..self.receive.end() {
            if self
                .receive
                .get(slot)
                .is_some_and(|stream| stream.peer == peer)
            {
                self.void_receive_stream(slot, host);
            }
        }
        self.give_grants();
    }

    /// A peer's records of an incarnation that is no more.
    pub(super) fn forget_receiving<H: Host>(&mut self, peer: u32, host: &mut H) {
        for slot in 0..self.receive.end() {
            if self
                .receive
                .get(slot)
                .is_some_and(|stream| stream.peer == peer)
            {
                self.drop_receive_stream(slot, host);
            }
        }
        self.give_grants();
    }

    /// Frees the record and forgets the stream.
    pub(super) fn drop_receive_stream<H: Host>(&mut self, slot: u32, host: &mut H) {
        self.void_receive_stream(slot, host);
        if let Some(stream) = self.receive.remove(slot) {
            self.receive_index.remove(&stream.key);
            host.free_receive_record(stream.record);
            self.counters.streams_closed += 1;
        }
        self.give_grants();
    }
}
