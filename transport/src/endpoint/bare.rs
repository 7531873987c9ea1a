//! Bare frames: when one is written, and what is believed of one that came.
//!
//! Problem: in a stream each frame's header says again what the one before it said, and is what it takes to say it: 36 bytes of a frame. wire.md §2.1, transport.md §11.3
//!
//! Idea: what a header tells is news to its receiver at most once for each reading of the clock: whoever has written a frame to a peer in full leaves the rest out of
//! those that follow at the same reading, if there is granted DATA to fill them. Nothing of it is charged to the credit. What becomes news in between waits for the
//! next frame, as if this one had been lost, and every batch begins with one in full.
//!
//! The time stamp of a bare frame is echoed as any other, so an echo does not show that its writer's credits were heard: where the frame that told them was lost, a sender may
//! think for a moment that all its credit was used up as far as its peer knows, and asks first (`Credit::is_at_its_end`), which tells them again.
//!
//! Rejected: bare frames for a while after one in full (a peer that only receives would be told later what came of its answers, for nothing: there is one in
//! full in dozens); a number for what both know, agreed on beforehand (it would have to survive either engine's death).
//!
//! Invariants: a bare frame goes only to an engine whose HELLO said that it reads them, and says nothing but its DATA, its time stamp, and that its writer is
//! there; from a writer whose incarnation, engine, or knowledge of ours is not the one that is known, nothing is believed.

use super::round_trip::stamp;
use super::transmit::{flow, header_to};
use super::turn::StreamWriter;
use super::{Endpoint, FrameError, PeerEntry, Transmit, truncate};
use crate::host::Host;
use crate::ident::{Nanos, Peer, Priority, SendId};
use crate::wire::BareHeaders;
use crate::wire::bare::{BARE_LEN, association};
use crate::wire::chunk::Range;

/// A piece of a message that fills a bare frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct BarePiece {
    sender: u32,
    number: u32,
    id: SendId,
    taken: Range,
}

impl PeerEntry {
    /// Whether it reads bare frames, and was told all there is to say at this reading of the clock.
    #[inline]
    pub(super) fn may_get_bare(&self, now: Nanos) -> bool {
        self.told_at == now && self.reads_bare && self.is_up()
    }
}

impl StreamWriter<'_, '_, '_> {
    /// The front of `range`, if that fills a bare frame and the frame may be one.
    #[inline]
    pub(super) fn bare_piece(&mut self, number: u32, id: SendId, range: Range) -> Option<Range> {
        let room = self.space.checked_sub(BARE_LEN)? as u32;
        if !self.plan.may_be_bare || !self.w.is_empty() || range.to - range.from < room {
            return None;
        }
        // It is the only one: nothing has room beside it, nor in its place.
        self.plan.may_be_bare = false;
        self.w.close();
        let taken = Range {
            from: range.from,
            to: range.from + room,
        };
        self.plan.bare = Some(BarePiece {
            sender: self.sender,
            number,
            id,
            taken,
        });
        self.plan.asks = true;
        self.counters.chunks_sent += 1;
        Some(taken)
    }
}

impl Endpoint {
    /// Writes a bare frame over all of `to`.
    pub(super) fn finish_bare<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        piece: &BarePiece,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        let len = to.len();
        let (area, payload) = to.split_first_chunk_mut()?;
        let name = self.send.get(piece.sender)?.wire();
        let crc = host
            .read_payload(piece.id, piece.taken.from, payload)
            .unwrap_or_else(|_| self.unreadable(piece.sender, piece.number, payload));
        self.expect_answer(now, slot);
        let entry = self.peers.get(slot)?;
        let header = header_to(&self.config, entry, now);
        let mut headers = BareHeaders::new(&header, &name, piece.number);
        headers.go_on(stamp(now), piece.taken.from);
        headers.seal(crc, area);
        self.counters.frames_sent += 1;
        self.counters.bytes_sent += len as u64;
        Some(Transmit {
            peer: entry.id,
            len,
            priority: match name.priority {
                0 => Priority::Low,
                _ => Priority::High,
            },
            flow: flow(&self.config, entry.id),
        })
    }

    /// Checks that who wrote a bare frame and we know each other, as it says.
    #[inline]
    pub(super) fn admit_bare(
        &mut self,
        now: Nanos,
        from: Peer,
        sent_at: u32,
        said: u32,
    ) -> Result<u32, FrameError> {
        let ours = truncate(self.config.incarnation);
        let slot = self.heard_last(from);
        let slot = slot.or_else(|| self.peer_index.get(&from).copied());
        let entry = slot.and_then(|slot| Some((slot, self.peers.get_mut(slot)?)));
        let Some((slot, entry)) = entry.filter(|(_, entry)| entry.is_up()) else {
            return Err(FrameError::NotAssociated);
        };
        let theirs = truncate(entry.incarnation);
        let known = entry
            .engine_epoch
            .map(|epoch| association(theirs, ours, epoch));
        if known != Some(said) {
            return Err(FrameError::NotAssociated); // whose next frame in full says more
        }
        entry.last_heard = now;
        entry.waiting_since = None;
        entry.stamps.note(now, sent_at);
        self.heard = Some(slot);
        Ok(slot)
    }
}
