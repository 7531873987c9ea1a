//! Trains: DATA after DATA of one message, each frame full of it.
//!
//! Problem: a long message is hundreds of frames that differ in an offset, a time stamp and two checksums, and each took the whole way of
//! `transmit`: whose turn it is, what that peer is owed, which stream, which message, how much of it, and then every field of two headers. Some 1,350
//! instructions, of which the copy of the payload is none: a tenth of what a frame of 1,500 bytes costs its sender, the kernel's part included.
//!
//! Idea: who wrote a frame of nothing but granted DATA, which filled it, for the only peer that has something to say, of the only stream that has, knows
//! the next one as long as nothing happens: the same decisions lead to the same message, further on, in a bare frame (`bare`). So the frame's
//! place and the next one's headers are kept, and the next polls at the same time write what differs. Whatever the endpoint is told ends the train ([`Endpoint::train`] is
//! `None` after any call but [`Endpoint::poll_transmit`]), as do a later time, another room to write into, and the last piece that fills a frame; then the general
//! way decides again. It must not be possible to tell from the frames which way they went.
//!
//! There are no trains to a peer that does not read bare frames: one of an older build, while a cluster is upgraded.
//!
//! Rejected: to judge again whether each reason to send something else is still absent (a third of what is saved, and every new reason would have to
//! be known in two places); several messages or peers in turn (their frames alternate, so each needs its own template and its turn).
//!
//! Invariants: a frame of a train is the one that the general way would have written, byte for byte, and leaves the same behind
//! (`tests/shortcuts.rs`); nothing that is not granted, or was asked for again, or is charged to the credit, travels in a train's frames after the first.

use alloc::collections::VecDeque;

use super::round_trip::stamp;
use super::send_stream::MessageState;
use super::transmit::header_to;
use super::turn::{Filled, Plan};
use super::{Endpoint, Transmit};
use crate::host::Host;
use crate::ident::Nanos;
use crate::policy::OnTimeout;
use crate::wire::BareHeaders;
use crate::wire::bare::BARE_LEN;
use crate::wire::chunk::Range;

/// What the next frame takes from the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Train {
    now: Nanos,
    /// Bytes there were to write into.
    room: usize,
    slot: u32,
    /// The queue in which the peer is ready.
    class: usize,
    /// The last piece. The message has as much again as a bare frame holds, or the train ends.
    filled: Filled,
    /// Bytes of the next one.
    piece: u32,
    headers: BareHeaders,
    transmit: Transmit,
}

impl Endpoint {
    /// The frame just written for `slot` was filled by DATA: does it begin a train?
    #[inline(never)]
    pub(super) fn begin_train(
        &mut self,
        now: Nanos,
        room: usize,
        slot: u32,
        plan: &Plan,
        transmit: Option<Transmit>,
    ) {
        let (Some(filled), Some(transmit)) = (plan.filled, transmit) else {
            return;
        };
        let piece = transmit.len.saturating_sub(BARE_LEN) as u32;
        #[cfg(test)]
        if self.shortcuts.off {
            return;
        }
        // If it were otherwise for another reason, something else would have filled the frame, or come before it.
        let alone = self.ready[0].len() + self.ready[1].len() == 1;
        let Some(entry) = self.peers.get(slot).filter(|entry| {
            // Control comes from a payload that could not be read.
            let one = entry.active[0].len() + entry.active[1].len() == 1;
            one && entry.sender_control.is_empty() && entry.may_get_bare(now)
        }) else {
            return;
        };
        // A timer that sends again restarts with each frame.
        let restarts = self.config.policy.on_timeout == OnTimeout::Resend;
        if !alone || restarts || !filled.has_another(piece) {
            return;
        }
        let Some(stream) = self.send.get(filled.sender) else {
            return;
        };
        let header = header_to(&self.config, entry, now);
        self.train = Some(Train {
            now,
            room,
            slot,
            class: usize::from(self.ready[0].is_empty()),
            filled,
            piece,
            headers: BareHeaders::new(&header, &stream.wire(), filled.number),
            transmit,
        });
    }

    /// The train's next frame; `None` if there is none, and the general way decides.
    #[inline(never)]
    pub(super) fn next_of_train<H: Host>(
        &mut self,
        now: Nanos,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        let Self {
            train,
            send,
            peers,
            counters,
            ..
        } = self;
        let Some(train) = train.as_mut().filter(|t| t.fits(now, to.len())) else {
            self.train = None;
            return None;
        };
        let (class, transmit) = (train.class, train.transmit);
        let filled = train.filled.next(train.piece);
        let (headers, payload) = to.get_mut(..transmit.len)?.split_first_chunk_mut()?;
        let stream = send.get_mut(filled.sender)?;
        let entry = peers.get_mut(train.slot)?;

        let at = entry.stamps.write(now);
        stream.queue.get_mut(filled.index)?.sent = filled.taken.to;
        stream.note_bytes(filled.number, filled.taken, at);
        counters.chunks_sent += 1;
        counters.frames_sent += 1;
        counters.bytes_sent += transmit.len as u64;
        train.filled = filled;
        train.headers.go_on(stamp(at), filled.taken.from);
        match host.read_payload(filled.id, filled.taken.from, payload) {
            Ok(crc) => {
                train.headers.seal(crc, headers);
                if !filled.has_another(train.piece) {
                    self.train = None;
                }
            }
            Err(_) => {
                // An event like any other.
                if let Some(mut train) = self.train.take() {
                    let crc = self.unreadable(filled.sender, filled.number, payload);
                    train.headers.seal(crc, headers);
                }
            }
        }
        #[cfg(test)]
        {
            self.shortcuts.trains += 1;
        }
        self.note_turn(class, transmit.len);
        Some(transmit)
    }

    /// Panics if the next frame would not be what the general way decides.
    pub(super) fn check_train(&self) {
        let Some(train) = &self.train else {
            return;
        };
        let filled = train.filled;
        let stream = self.send.get(filled.sender);
        let message = stream.and_then(|stream| stream.queue.get(filled.index));
        assert_eq!(
            stream.map(|s| (s.number(filled.index), s.peer, s.resend.len())),
            Some((filled.number, train.slot, 0)),
            "of another, or something is asked for again"
        );
        assert_eq!(
            message.map(|m| (m.id, m.state, m.sent, m.granted)),
            Some((filled.id, MessageState::Live, filled.taken.to, filled.until)),
            "of another send, or from another place"
        );
        let ready = [&self.ready[0], &self.ready[1]].map(VecDeque::len);
        let class = usize::from(ready[0] == 0);
        assert_eq!(ready[0] + ready[1], 1, "beside somebody else");
        assert_eq!(self.ready[class].front(), Some(&train.slot));
        assert!(self.cancelled.is_empty() && self.orphans.len() == 0);
        assert!(self.resets.queue.is_empty());
    }
}

impl Train {
    /// Whether the next frame may be of it.
    fn fits(&self, now: Nanos, room: usize) -> bool {
        (self.now, self.room) == (now, room)
    }
}

impl Filled {
    /// Whether what is left fills a frame with so many bytes.
    fn has_another(&self, bytes: u32) -> bool {
        self.until - self.taken.to >= bytes
    }

    fn next(self, bytes: u32) -> Self {
        let from = self.taken.to;
        Self {
            taken: Range {
                from,
                to: from + bytes,
            },
            ..self
        }
    }
}
