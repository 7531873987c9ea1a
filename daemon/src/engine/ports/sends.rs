//! A port's send tokens on their way out of its ring.

use std::sync::atomic::Ordering;

use portolan_abi::ledger::{Ledger, SendRecord};
use portolan_abi::port::CloseReason;
use portolan_abi::token::{Alike, BadToken, FLAG_INLINE, SendToken, TokenRef, Untrusted};
use portolan_transport::ident::Nanos;

use super::super::commit_point::{Point, crash_point};
use super::{Port, Sending, TOKENS_PER_TURN, Taken};

impl Port {
    /// Whether send tokens wait.
    #[inline]
    pub(in super::super) fn has_sends(&self) -> bool {
        self.send_cursor.available(self.send_ring()) != Ok(0)
    }

    /// Send tokens that wait, at most a turn's worth.
    pub(in super::super) fn sends_waiting(&mut self) -> u32 {
        match self.send_cursor.available(self.send_ring()) {
            Ok(available) => available.min(TOKENS_PER_TURN),
            Err(_) => {
                self.fail(CloseReason::RingJump);
                0
            }
        }
    }

    /// Takes the next entry of the send ring, which is not empty. `None`: the port has failed.
    #[inline]
    pub(in super::super) fn take_send(&mut self, ledger: Ledger<'_>, now: Nanos) -> Option<Taken> {
        let ring = self.client.send_ring(&self.engine);
        let entry = TokenRef::decode(self.send_cursor.take(ring)[0]);
        let (slots, facts) = (self.client.send_slots(), ledger.sends(self.number));
        let place = entry.slot as usize;
        let (Some(slot), Some(fact)) = (slots.get(place), facts.get(place)) else {
            self.fail(CloseReason::BadToken);
            return None;
        };
        if fact.tag.load(Ordering::Relaxed) != 0 {
            // Still under way: no application that follows the rules offers it.
            self.fail(CloseReason::BadToken);
            return None;
        }
        match Untrusted::read_header(slot).check(entry, &self.geometry) {
            Ok(token) => {
                self.note_sending(entry.slot, &token, now);
                Some(Taken::Token(entry.slot, token))
            }
            Err(BadToken::Slot | BadToken::Generation | BadToken::InUse) => {
                self.fail(CloseReason::BadToken);
                None
            }
            Err(
                BadToken::Opcode
                | BadToken::Flags
                | BadToken::Priority
                | BadToken::Range
                | BadToken::Destination,
            ) => Some(Taken::Refused(entry.slot, entry.generation)),
        }
    }

    /// The next entry of the send ring, which is not empty, if it is a send like the ones before it: slot, token, and its record in the ledger. It
    /// stays the next one until [`Self::take_alike`].
    #[inline]
    pub(in super::super) fn next_alike<'l>(
        &self,
        alike: &Alike,
        facts: &'l [SendRecord],
    ) -> Option<(u32, SendToken, &'l SendRecord)> {
        let ring = self.client.send_ring(&self.engine);
        let entry = TokenRef::decode(ring.peek(self.send_cursor.next())[0]);
        let place = entry.slot as usize;
        let (slot, fact) = (self.client.send_slots().get(place)?, facts.get(place)?);
        if fact.tag.load(Ordering::Relaxed) != 0 {
            return None;
        }
        let token = alike.read(slot, entry, &self.geometry)?;
        Some((entry.slot, token, fact))
    }

    /// Takes what [`Self::next_alike`] found.
    #[inline]
    pub(in super::super) fn take_alike(
        &mut self,
        slot: u32,
        token: &SendToken,
        now: Nanos,
    ) -> Sending {
        self.send_cursor.pass();
        self.note_sending(slot, token, now)
    }

    #[inline]
    fn note_sending(&mut self, slot: u32, token: &SendToken, now: Nanos) -> Sending {
        let sending = Sending {
            generation: token.generation,
            inline: token.flags & FLAG_INLINE != 0,
            len: token.len,
            arena_offset: token.arena_offset,
            taken_at: now,
        };
        if let Some(place) = self.sends.get_mut(slot as usize) {
            *place = sending;
        }
        sending
    }

    /// Gives the entries taken from the send ring back to the application.
    pub(in super::super) fn release_sends(&self) {
        self.send_cursor.release(self.send_ring());
    }

    /// After a takeover: passes over entries whose slot was accepted before the predecessor could say so.
    pub(in super::super) fn skip_accepted(&mut self, ledger: Ledger<'_>) {
        // All of the ring: how many may be untold is for the build to say that died.
        let waiting = match self.send_cursor.available(self.send_ring()) {
            Ok(available) => available,
            Err(_) => return self.fail(CloseReason::RingJump),
        };
        for _ in 0..waiting {
            let entry = TokenRef::decode(self.send_ring().peek(self.send_cursor.next())[0]);
            let tag = ledger
                .sends(self.number)
                .get(entry.slot as usize)
                .map_or(0, |fact| fact.tag.load(Ordering::Acquire));
            if tag == 0 || (tag >> 32) as u32 != entry.generation {
                break;
            }
            self.send_cursor.pass();
        }
        crash_point(Point::SkipAccepted);
        self.release_sends();
    }
}
