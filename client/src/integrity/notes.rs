//! Which notes are sent, and when: receipts that are owed, questions whose time has come.

use crate::integrity::seal::{NOTE, Note};
use crate::integrity::{Book, Fault, NOTES, Posted, pauses};
use crate::names::Address;
use crate::status::Status;

/// Statements under way at one time.
const ASKING: usize = NOTES as usize / 2;

impl Book {
    /// Streams that wait are asked now.
    pub(crate) fn ask_all(&mut self) {
        for i in 0..self.watched.len() {
            self.ask(self.watched[i]);
        }
    }

    pub(super) fn ask(&mut self, at: u32) {
        if let Some(stream) = self.sending.get(at)
            && stream.count.wants_receipt()
            && !std::mem::replace(&mut stream.asking, true)
        {
            self.asks.push_back(at);
        }
    }

    /// The next note to send: to whom, its bytes and tag, and whose statement it is.
    pub(super) fn next_note(
        &mut self,
        now: u64,
    ) -> Option<(Address, [u8; NOTE], u64, Option<u32>)> {
        while let Some(at) = self.owed.pop_front() {
            let Some((to, priority)) = self.receiving.name(at) else {
                continue;
            };
            let Some(stream) = self.receiving.get(at) else {
                continue;
            };
            stream.owed = false;
            if let Some(receipt) = stream.count.receipt(self.id, priority) {
                stream.said = receipt.upto;
                let (bytes, tag) = Note::Receipt(receipt).write(self.own, to);
                return Some((to, bytes, tag, None));
            }
        }
        // Those who answer nobody shall not keep us from answering.
        let asking = self.posted.iter().filter(|p| p.asks.is_some()).count();
        if self.wanted >= NOTES || asking >= ASKING {
            return None;
        }
        let at = self.asks.pop_front()?;
        let (to, priority) = self.sending.name(at)?;
        let stream = self.sending.get(at)?;
        if !std::mem::replace(&mut stream.wanted, true) {
            self.wanted += 1;
        }
        if stream.asked == 0 {
            stream.asked = now;
        }
        let (bytes, tag) = Note::Statement(stream.count.statement(priority)).write(self.own, to);
        Some((to, bytes, tag, Some(at)))
    }

    pub(super) fn note_ended(&mut self, slot: u32, generation: u32, status: Status) {
        let found = |p: &Posted| (p.slot, p.generation) == (slot, generation);
        let Some(i) = self.posted.iter().position(found) else {
            return;
        };
        let posted = self.posted.swap_remove(i);
        if let Some(stream) = posted.asks.and_then(|at| self.sending.get(at)) {
            stream.asking = false;
        }
        if pauses(status) && !self.resume.contains(&posted.to) {
            self.resume.push(posted.to);
        }
    }

    // ---- time ----

    /// When to look next, if ever.
    pub(crate) fn due(&self) -> Option<u64> {
        let idle = self.watched.is_empty() && self.posted.is_empty() && self.resume.is_empty();
        (!idle).then_some(self.next_look)
    }

    /// What time brings: questions to ask, and answers that did not come.
    pub(super) fn look(&mut self, now: u64) {
        if now < self.next_look {
            return;
        }
        self.next_look = now.saturating_add(self.quarter_ns / 4);
        for i in (0..self.watched.len()).rev() {
            let at = self.watched[i];
            if !self.look_at(at, now) {
                self.watched.swap_remove(i);
                if let Some(stream) = self.sending.get(at) {
                    stream.watched = false;
                }
            }
        }
    }

    /// `false`: there is nothing to watch.
    fn look_at(&mut self, at: u32, now: u64) -> bool {
        let quarter = self.quarter_ns;
        let peer = self.sending.name(at);
        let Some(stream) = self.sending.get(at) else {
            return false;
        };
        let open = stream.count.open();
        let base = stream.count.base();
        if !open || stream.oldest.0 != base || stream.oldest.1 == 0 {
            stream.oldest = (base, now, false);
        }
        let patience = stream.longest_ns.saturating_add(4 * quarter);
        let endless = open && !stream.oldest.2 && now - stream.oldest.1 > patience;
        stream.oldest.2 |= endless;

        let waits = stream.count.wants_receipt() && !stream.quiet;
        let mut written_off = 0;
        let mut ask = false;
        if !waits {
            (stream.since, stream.asked, stream.asks) = (0, 0, 0);
        } else if stream.since == 0 {
            stream.since = now;
        } else {
            let age = now - stream.since;
            let silent = stream.asked != 0 && now - stream.asked >= 3 * quarter;
            if silent || age >= 8 * quarter {
                written_off = stream.count.write_off();
                stream.quiet = true;
                (stream.since, stream.asked, stream.asks) = (0, 0, 0);
            } else if age >= quarter * (1 + stream.asks) {
                stream.asks += 1;
                // What was asked for is not coming.
                if std::mem::take(&mut stream.wanted) {
                    self.wanted -= 1;
                }
                ask = true;
            }
        }
        let watch = open || (waits && !stream.quiet);
        if !watch && std::mem::take(&mut stream.wanted) {
            self.wanted -= 1;
        }
        self.reports.add(Fault::Endless, peer, u32::from(endless));
        self.reports.add(Fault::Unconfirmed, peer, written_off);
        if ask {
            self.ask(at);
        }
        watch
    }
}
