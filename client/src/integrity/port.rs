//! Integrity's part in what a port does: its notes, its turn after each look at the event ring, its questions.

use std::time::Duration;

use portolan_abi::event::Event as Entry;
use portolan_abi::token::{FLAG_ACK_LAZY, FLAG_INLINE, INLINE_BYTES, Opcode, SendToken, TokenRef};

use crate::alarm::{deadline_ns, now_ns};
use crate::arena::Buffer;
use crate::error::PortError;
use crate::event::{Event, Message, SendHandle};
use crate::integrity::{Fault, Judgement, NOTE, NOTES, Posted, SEAL};
use crate::names::{Address, NodeId, PortId, Priority};
use crate::port::{Port, SendOptions, Way};
use crate::status::Status;
use crate::tokens::Use;

/// Events after which time is looked at although more wait.
const EVENTS_PER_LOOK: u32 = 64;

impl Port {
    /// Messages whose sends have ended, and of which the receiving library has not confirmed yet that it has them, or that it has them not;
    /// those that were reported do not count. 0 without [`crate::PortOptions::integrity`].
    pub fn unconfirmed(&mut self) -> u64 {
        self.integrity.as_mut().map_or(0, |book| book.unconfirmed())
    }

    /// Asks every receiver what it has received, and waits, at most `timeout`, until what was said of each message is confirmed or
    /// reported. Other events that come meanwhile are kept for [`Self::receive`]. Returns [`Self::unconfirmed`].
    pub fn confirm(&mut self, timeout: Duration) -> Result<u64, PortError> {
        let deadline = deadline_ns(timeout);
        if let Some(book) = &mut self.integrity {
            book.ask_all();
        }
        self.post_notes();
        while self.unconfirmed() > 0 {
            let came = self.wait_new(deadline)?;
            match self.poll()? {
                Some(event) => self.backlog.push_back(event),
                None if came => {}
                None => break,
            }
        }
        Ok(self.unconfirmed())
    }

    /// Buffers for the receipts this port will ask for.
    pub(crate) fn provide_for_notes(&mut self) -> Option<()> {
        for _ in 0..NOTES {
            let buffer = self.memory.allocate_bare(NOTE).ok()?;
            self.provide_receive_buffer(buffer, Priority::High).ok()?;
        }
        Some(())
    }

    /// Seals and publishes a send, as [`Self::publish`] does without integrity.
    pub(crate) fn push_sealed(
        &mut self,
        way: Way,
        len: u32,
        mut buffer: Option<Buffer>,
        bytes: &[u8],
        options: SendOptions,
    ) -> SendHandle {
        let copied = buffer.is_some() && !bytes.is_empty();
        let whole = len as usize + SEAL;
        let mut inline = [0; INLINE_BYTES];
        let message = match &mut buffer {
            Some(buffer) => buffer.whole_mut(whole),
            None => {
                // Whoever chose to send without a buffer has seen that it fits.
                let whole = whole.min(INLINE_BYTES);
                let payload = bytes.len().min(INLINE_BYTES - SEAL);
                inline[..payload].copy_from_slice(&bytes[..payload]);
                &mut inline[..whole]
            }
        };
        if let Some(book) = &mut self.integrity {
            book.seal(way.stream, way.slot.slot, &options, message);
        }
        let inline = match &buffer {
            Some(_) => &[],
            None => &inline[..whole.min(INLINE_BYTES)],
        };
        self.publish(way, whole as u32, buffer, copied, inline, options)
    }

    /// A message came in `buffer`, which was provided at `provided`. With integrity on.
    pub(crate) fn judge(
        &mut self,
        entry: &Entry,
        priority: Priority,
        buffer: Buffer,
        provided: Priority,
    ) -> Option<Event> {
        let (len, total) = (entry.len as usize, entry.total as usize);
        let from = Address {
            node: NodeId(entry.node),
            port: PortId(entry.port),
        };
        let mut message = Message {
            buffer,
            len,
            total: total.saturating_sub(SEAL),
            from,
            priority,
            tag: entry.tag,
            verified: false,
        };
        let asked_for = self.offers.shortened(entry);
        let book = self.integrity.as_mut()?;
        if len < total && asked_for {
            message.len = len.saturating_sub(SEAL);
            book.shortened(from, priority);
            return Some(Event::Received(message));
        }
        let bytes = message.buffer.whole(len);
        let judgement = if len < total {
            book.reports
                .add(Fault::Changed, Some((from, priority)), 1u32);
            Judgement::Keep
        } else if len < SEAL {
            book.note(bytes, from, priority, entry.tag);
            Judgement::Keep
        } else {
            book.message(bytes, from, priority, entry.tag)
        };
        match judgement {
            Judgement::Deliver => {
                message.len = len - SEAL;
                message.verified = true;
                Some(Event::Received(message))
            }
            Judgement::Keep => {
                // Refused only if the port is gone.
                let _ = self.provide_receive_buffer(message.buffer, provided);
                None
            }
        }
    }

    /// Are receipts under way?
    pub(crate) fn receipts_out(&self) -> bool {
        let book = self.integrity.as_ref();
        book.is_some_and(|book| {
            !book.owed.is_empty() || book.posted.iter().any(|p| p.asks.is_none())
        })
    }

    /// A note's slot is free again.
    pub(crate) fn note_ended(&mut self, token: TokenRef, status: Status) {
        if let Some(book) = &mut self.integrity {
            book.note_ended(token.slot, token.generation, status);
        }
    }

    /// After each look at the event ring: what is owed is sent, what is due is done.
    pub(crate) fn look_after(&mut self, ring_empty: bool) {
        let Some(book) = &mut self.integrity else {
            return;
        };
        if book.anomalies != self.anomalies {
            let more = self.anomalies.wrapping_sub(book.anomalies);
            book.anomalies = self.anomalies;
            book.reports.add(Fault::Nonsense, None, more);
        }
        book.events = book.events.wrapping_add(1);
        let look = ring_empty || book.events.is_multiple_of(EVENTS_PER_LOOK);
        if look && let Some(due) = book.due() {
            let now = now_ns();
            if now >= due {
                book.look(now);
                self.give_up_notes(now);
            }
        }
        if ring_empty {
            self.resume_after_notes();
        }
        self.post_notes();
    }

    /// The next report, if there is one.
    pub(crate) fn next_report(&mut self) -> Option<Event> {
        let book = self.integrity.as_mut()?;
        book.reports.take().map(Event::Integrity)
    }

    /// Has integrity something for the application?
    pub(crate) fn has_report(&self) -> bool {
        let book = self.integrity.as_ref();
        book.is_some_and(|book| !book.reports.is_empty())
    }

    /// When integrity wants to be looked after.
    pub(crate) fn integrity_due(&self) -> u64 {
        let book = self.integrity.as_ref();
        book.and_then(|book| book.due()).unwrap_or(u64::MAX)
    }

    /// While waiting. `true`: there is a report.
    pub(crate) fn look_in(&mut self, now: u64) -> bool {
        if now >= self.integrity_due() {
            if let Some(book) = &mut self.integrity {
                book.look(now);
            }
            self.give_up_notes(now);
            self.resume_after_notes();
            self.post_notes();
        }
        self.has_report()
    }

    /// Sends notes as far as their slots go.
    pub(crate) fn post_notes(&mut self) {
        loop {
            let Some(book) = &mut self.integrity else {
                return;
            };
            if (book.owed.is_empty() && book.asks.is_empty()) || book.posted.len() >= NOTES as usize
            {
                return;
            }
            let Some(slot) = self.send_book.next(true) else {
                return;
            };
            let now = now_ns();
            let Some((to, bytes, tag, asks)) = book.next_note(now) else {
                return;
            };
            book.posted.push(Posted {
                slot: slot.slot,
                generation: slot.generation,
                at: now,
                to,
                asks,
            });
            let token = SendToken {
                generation: slot.generation,
                opcode: Opcode::Send,
                priority: Priority::High.code(),
                flags: FLAG_INLINE | FLAG_ACK_LAZY,
                node: to.node.0,
                port: to.port.0,
                len: NOTE as u32,
                arena_offset: 0,
                tag,
                timeout_us: u32::MAX,
            };
            self.push_token(slot, &token, &bytes, Use::Note);
        }
    }

    /// Notes that found no way in a quarter are cancelled, which pauses no stream: the next will know more, and others want the slots.
    fn give_up_notes(&mut self, now: u64) {
        for i in 0..NOTES as usize {
            let Some(book) = &mut self.integrity else {
                return;
            };
            let old = book.quarter_ns;
            let Some(posted) = book.posted.get_mut(i) else {
                return;
            };
            if now.saturating_sub(posted.at) < old {
                continue;
            }
            posted.at = now;
            let name = u64::from(posted.generation) << 32 | u64::from(posted.slot);
            // Without a free slot it is tried again.
            let _ = self.cancel_named(name);
        }
    }

    /// Streams that a note's failure paused go on, unless a failure of the application's paused them too.
    fn resume_after_notes(&mut self) {
        while let Some(book) = &mut self.integrity
            && let Some(&to) = book.resume.last()
        {
            let at = book.sending.find(to, Priority::High);
            let paused = at
                .and_then(|at| book.sending.get(at))
                .is_some_and(|s| s.paused);
            book.resume.pop();
            let command = Opcode::ResumeSending;
            if !paused && self.command(command, to, Priority::High, 0).is_err() {
                if let Some(book) = &mut self.integrity {
                    book.resume.push(to);
                }
                return;
            }
        }
    }
}
