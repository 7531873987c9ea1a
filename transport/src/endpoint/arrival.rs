//! First chunks: EAGER, RTS, NULL, PROBE. Table 1, commits, acknowledgements.
//!
//! Problem and idea: see `receive_stream`. transport.md §5.1, §5.5, §7.3, §7.4, §14. ParaStation2 Table 1 for DATA, applied to the first chunk of a message:
//!
//! | number | EAGER, RTS | NULL | PROBE |
//! |---|---|---|---|
//! | < base | acknowledge again | NULL-ACK | answer the state |
//! | accepted | acknowledge, grants again | the message is taken back, its number stays | answer the state |
//! | = arrival | accept if a buffer can be claimed, else one NACK (no buffer) | accept | READY, or NACK (no buffer) |
//! | > arrival, selective | the same, and an acknowledgement at once | accept | READY, or NACK (no buffer) |
//! | > arrival, go-back-N | NACK (gap); with Stall one, then silence | same | NACK (gap), always |
//! | > arrival, whole message | dropped; acknowledge again | same | answer the state |
//! | beyond the window | a violation | same | answer the state |
//!
//! Opening streams is in `opening`, taking messages in `accept`.
//!
//! Invariants: a buffer is claimed before anything is placed, and every claimed buffer is in `messages` or released.

use super::Endpoint;
use super::receive_stream::{Incoming, Kind};
use super::{NACK_GAP, NACK_NO_BUFFER};
use crate::host::{Host, NoBuffer};
use crate::ident::{Nanos, serial_lt};
use crate::policy::{AckMode, Recovery};
use crate::wire::chunk::ACK_WORDS;
use crate::wire::{Chunk, PayloadView, StreamRef};

/// How far back single numbers are acknowledged; one RESUME speaks for those farther back, which only a damaged ledger can bring.
const ACKS_BACK: usize = 64 * ACK_WORDS;

/// What a first chunk is.
#[derive(Clone, Copy)]
pub(super) enum First {
    Message {
        total: u32,
        tag: u64,
        ack: AckMode,
        unasked: bool,
    },
    Null,
    Probe {
        total: u32,
    },
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
                ack,
                payload,
            } => {
                let message = First::Message {
                    total: u32::from(payload.len),
                    tag,
                    ack,
                    unasked: false,
                };
                (message, stream, start, number)
            }
            Chunk::Rts {
                stream,
                start,
                number,
                tag,
                ack,
                total,
                unasked,
                ..
            } => {
                let message = First::Message {
                    total,
                    tag,
                    ack,
                    unasked,
                };
                (message, stream, start, number)
            }
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
        let slot = match self.named_before(peer, &stream) {
            Some(slot) => slot,
            None => {
                let Some(key) = self.key_of(peer, &stream, false) else {
                    self.counters.protocol_violations += 1;
                    return;
                };
                let slot = self.stream_for(now, peer, key, &stream, start, (number, first), host);
                self.named = slot;
                let Some(slot) = slot else {
                    return;
                };
                slot
            }
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
        let before = serial_lt(number, entry.base);
        // Committed by our predecessor, whose other messages must come again: no later number will show that they are missing.
        let beyond_a_gap = serial_lt(entry.arrival, number)
            && self.config.policy.recovery != Recovery::Selective
            && matches!(first, First::Probe { .. });
        if before || entry.index(number).is_some() {
            self.first_again(now, slot, number, first, view, host);
            if beyond_a_gap {
                self.out_of_order(now, slot, first);
            }
        } else if number == entry.arrival || self.config.policy.recovery == Recovery::Selective {
            self.first_missing(now, slot, number, first, view, host);
        } else {
            self.out_of_order(now, slot, first);
        }
        if let First::Probe { .. } = first {
            self.tell_state(slot);
        }
    }

    /// The stream that an earlier chunk named, if this one names it too. Its row says all that it is named by.
    #[inline]
    pub(super) fn named_before(&self, peer: u32, stream: &StreamRef) -> Option<u32> {
        let slot = self.named?;
        let row = self.receive.get(slot)?;
        (row.peer == peer && row.wire() == *stream).then_some(slot)
    }

    /// A number too early for a receiver that takes them in order only.
    #[cold]
    fn out_of_order(&mut self, now: Nanos, slot: u32, first: First) {
        self.counters.out_of_order += 1;
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        let Recovery::GoBackN { stall } = self.config.policy.recovery else {
            // No NACK. But a sender that settled what we still wait for (told before our predecessor died) must hear of it.
            return self.acknowledge(now, slot, 0, AckMode::Immediate);
        };
        // What follows a message without a buffer is no gap: `arrival` came, and its NACK said why it was not taken.
        let (told, reason) = match stream.no_buffer {
            Some(_) if !stream.woken => (true, NACK_NO_BUFFER),
            _ => (stall && stream.stalled, NACK_GAP),
        };
        if !told || matches!(first, First::Probe { .. }) {
            stream.stalled |= reason == NACK_GAP;
            stream.due.nack = Some((stream.arrival, reason));
            self.queue_control(slot);
        }
    }

    /// A number that came before.
    #[cold]
    fn first_again<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        first: First,
        view: &PayloadView<'_>,
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
        let Some(index) = stream.index(number) else {
            let back = stream.base.wrapping_sub(number).wrapping_sub(1) as usize;
            if stream.is_nulled(number) {
                // told already
            } else if stream.exact && back < ACKS_BACK {
                stream.acks.set(back);
            } else if stream.exact {
                stream.due.resume = true;
            } else if let First::Null = first {
                stream.due.null_delivered = Some(number);
            }
            return self.queue_control(slot);
        };
        stream.due.drops = true;
        match stream.messages.get(index).map(|m| m.kind) {
            Some(Kind::Committed) => {
                stream.ends |= 1 << index;
                stream.due.ends = true;
            }
            Some(_) if matches!(first, First::Null) => self.take_back(now, slot, index, host),
            Some(Kind::Placing(row)) => {
                if let Some(long) = self.longs.get_mut(row) {
                    long.cts = long.cts.or(Some(false));
                    stream.due.grants = true;
                }
                if matches!(first, First::Message { unasked: true, .. }) {
                    self.expect_unasked(row);
                }
                self.on_first_bytes(now, slot, row, view, host);
            }
            _ => {}
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

    /// A number that is missing, and may come: `arrival`, or any other if recovery is selective.
    #[inline(never)]
    fn first_missing<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        first: First,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let window = self.config.policy.window_messages;
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        let unconfirmed = |m: &Incoming| {
            matches!(
                m.kind,
                Kind::Drop {
                    confirmed: false,
                    ..
                }
            )
        };
        let untold = stream.messages.iter().any(unconfirmed);
        if untold {
            // Nobody confirmed it yet: it is told again with whatever follows.
            stream.due.drops = true;
            self.queue_control(slot);
        }
        if self
            .receive
            .get(slot)
            .is_none_or(|s| number.wrapping_sub(s.base) >= window)
        {
            // To its sender what was refused is over, and makes no window full.
            let honest = untold || matches!(first, First::Probe { .. });
            self.counters.protocol_violations += u64::from(!honest);
            return;
        }
        match first {
            First::Message {
                total,
                tag,
                ack,
                unasked,
            } => {
                let incoming = Incoming {
                    total,
                    tag,
                    ack,
                    unasked,
                    len: total,
                    ..Incoming::bare(Kind::Missing)
                };
                self.accept_message(now, slot, number, incoming, view, host);
            }
            First::Null => {
                self.push(now, slot, number, Incoming::bare(Kind::Null));
                self.commit_or_tell(now, slot, number, host);
            }
            First::Probe { total } => self.answer_probe(slot, number, total, host),
        }
    }

    /// PROBE of a message that is missing: would it find a buffer?
    #[cold]
    fn answer_probe<H: Host>(&mut self, slot: u32, number: u32, total: u32, host: &mut H) {
        let Some(stream) = self.receive.get(slot) else {
            return;
        };
        let (key, asked) = (stream.key, stream.undecided == Some(number));
        if let Some(lower) = stream.no_buffer.filter(|&lower| serial_lt(lower, number)) {
            if !stream.woken {
                self.ask_for_token(slot, lower);
            }
            return;
        }
        // How much of it a port that is asked first will take, and thus the buffer it needs, only its first chunk can tell (transport.md §5.7).
        let claimed = match host.wants_offers(key.local) {
            true => None,
            false => Some(host.claim(key.local, key.priority, total)),
        };
        if let Some(Ok(buffer)) = claimed {
            host.release(buffer);
        }
        let none =
            claimed == Some(Err(NoBuffer::NotNow)) && self.find_victim(slot, number).is_none();
        if asked || none {
            return self.ask_for_token(slot, number);
        }
        // If it is too long or the port is gone, the message itself will be told so.
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.due.nack = stream.due.nack.filter(|&(refused, _)| refused != number);
        stream.due.ready = Some(number);
        self.queue_control(slot);
    }
}
