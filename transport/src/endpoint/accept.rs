//! Taking a message in: the application's word, a buffer, the first bytes.
//!
//! Problem: a first chunk that may come needs a receive token of the application, and there may be none; the application may want to
//! see what it is about to get. ParaStation2's check for a buffer (000), RMPP's up-call (001).
//! transport.md §5.4, §5.5, §5.7
//!
//! Idea: the message claims a token and its bytes are written while their checksum is computed; nothing is buffered by us. Without a
//! token it takes the one of a later message (`ports`), else it is not taken, and its sender told once. With whole message recovery
//! nobody is told: the sender's timer repeats the request.
//!
//! A port that wants offers sees the first bytes before anything is claimed, so they are checked first and read twice. *Undecided* is
//! want of a buffer. A refusal is committed before it is told (`receive_stream`), in its turn like any other commit.
//!
//! Invariants: every claimed buffer is in `messages` or released; no byte beyond a shortened length is written.

use super::Endpoint;
use super::receive_stream::{Incoming, Kind};
use super::{NACK_CORRUPT, NACK_NO_BUFFER};
use crate::host::{Host, NoBuffer, Offer, Reason, Verdict};
use crate::ident::{BufferId, Nanos, serial_lt};
use crate::policy::{AckMode, Recovery};
use crate::wire::{PayloadView, crc32c_combine};

/// Tokens taken back for one message: one of them may be too small.
const TAKE_BACK_MAX: usize = 8;

impl Endpoint {
    /// A message whose number is missing and may come.
    pub(super) fn accept_message<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        number: u32,
        mut incoming: Incoming,
        view: &PayloadView<'_>,
        host: &mut H,
    ) {
        let Some(stream) = self.receive.get(slot) else {
            return;
        };
        let key = stream.key;
        if stream
            .no_buffer
            .is_some_and(|lower| serial_lt(lower, number))
        {
            self.counters.no_buffer += 1;
            if stream.woken {
                // Where is it? What was sent before this one should be here.
                self.acknowledge(now, slot, 0, AckMode::Immediate);
            }
            return;
        }
        if host.wants_offers(key.local) {
            if !view.is_empty() && !view.verify() {
                self.counters.payloads_corrupt += 1;
                return self.first_corrupt(slot, number);
            }
            match self.ask(slot, number, &incoming, view, host) {
                Verdict::Accept => {}
                Verdict::Shorten(len) => incoming.len = len.min(incoming.total),
                Verdict::Refuse => {
                    let refused = Incoming {
                        kind: Kind::Refused,
                        ..incoming
                    };
                    self.push(now, slot, number, refused);
                    return self.commit_or_tell(now, slot, number, host);
                }
                Verdict::Undecided => {
                    if let Some(stream) = self.receive.get_mut(slot) {
                        stream.undecided = Some(number);
                    }
                    return self.no_token(slot, number);
                }
            }
        }
        let mut claimed = host.claim(key.local, key.priority, incoming.len);
        let scarce = claimed == Err(NoBuffer::NotNow);
        for _ in 0..TAKE_BACK_MAX {
            if claimed != Err(NoBuffer::NotNow) || !self.take_token_back(slot, number, host) {
                break;
            }
            claimed = host.claim(key.local, key.priority, incoming.len);
        }
        let buffer = match claimed {
            Ok(buffer) => buffer,
            Err(NoBuffer::NotNow) => return self.no_token(slot, number),
            Err(NoBuffer::TooLong) => {
                incoming.kind = Kind::Drop {
                    reason: Reason::TooLong,
                    confirmed: false,
                };
                self.push(now, slot, number, incoming);
                if let Some(stream) = self.receive.get_mut(slot) {
                    stream.due.drops = true;
                }
                self.queue_control(slot);
                return self.commit_or_tell(now, slot, number, host);
            }
            Err(NoBuffer::PortClosed) => return self.close_receive_stream(slot, host),
        };
        let whole = view.len() as u32 >= incoming.len;
        match self.place(buffer, 0, incoming.len, view, host) {
            Some(true) if whole => {
                incoming.kind = Kind::Whole(buffer);
                self.push(now, slot, number, incoming);
                self.commit_or_tell(now, slot, number, host);
            }
            Some(matched) if !whole => {
                let first_bytes = view.len() as u32;
                self.push_long(now, slot, number, incoming, buffer, first_bytes, matched);
                self.commit_or_tell(now, slot, number, host);
            }
            matched => {
                host.release(buffer);
                if matched.is_some() {
                    self.first_corrupt(slot, number);
                }
            }
        }
        if !scarce {
            self.wake_waiting(key.local, 1);
        }
    }

    /// RMPP's up-call.
    #[cold]
    fn ask<H: Host>(
        &self,
        slot: u32,
        number: u32,
        incoming: &Incoming,
        view: &PayloadView<'_>,
        host: &mut H,
    ) -> Verdict {
        let Some(stream) = self.receive.get(slot) else {
            return Verdict::Undecided;
        };
        host.offer(&Offer {
            stream: stream.key,
            record: stream.record,
            epoch: stream.epoch,
            number,
            total: incoming.total,
            tag: incoming.tag,
            first: view.parts().next().unwrap_or_default(),
        })
    }

    /// A first chunk whose payload does not match its checksum.
    #[cold]
    fn first_corrupt(&mut self, slot: u32, number: u32) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        match self.config.policy.recovery {
            Recovery::WholeMessage => return,
            Recovery::GoBackN { stall: true } if stream.stalled => return,
            Recovery::GoBackN { .. } => stream.stalled = true,
            Recovery::Selective => {}
        }
        stream.due.nack = Some((number, NACK_CORRUPT));
        self.queue_control(slot);
    }

    /// A message without a token: its sender is told, once for the lowest such number of the stream.
    #[cold]
    fn no_token(&mut self, slot: u32, number: u32) {
        self.counters.no_buffer += 1;
        self.ask_for_token(slot, number);
    }

    /// The stream waits for a token, and its sender knows.
    pub(super) fn ask_for_token(&mut self, slot: u32, number: u32) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        if self.config.policy.recovery == Recovery::WholeMessage {
            return;
        }
        let lower = |&refused: &u32| serial_lt(refused, number);
        if !stream.no_buffer.as_ref().is_some_and(lower) {
            (stream.no_buffer, stream.woken) = (Some(number), false);
            stream.due.nack = Some((number, NACK_NO_BUFFER));
            self.queue_control(slot);
        }
        self.wait_for_token(slot);
    }

    /// Writes a payload into a buffer while its checksum is computed. Nothing is written from `end`
    /// on. `Some(true)`: it matched; `None`: the memory is gone.
    pub(super) fn place<H: Host>(
        &mut self,
        buffer: BufferId,
        offset: u32,
        end: u32,
        view: &PayloadView<'_>,
        host: &mut H,
    ) -> Option<bool> {
        let (mut at, mut crc) = (offset, 0);
        for part in view.parts() {
            let wanted = part.get(..end.saturating_sub(at) as usize);
            let Ok(written) = host.write_payload(buffer, at, wanted.unwrap_or(part)) else {
                self.counters.memory_faults += 1;
                return None;
            };
            if wanted.is_some_and(|wanted| wanted.len() < part.len()) {
                return Some(true); // shortened: the payload was checked before it was offered
            }
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
}
