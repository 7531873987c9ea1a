//! An acknowledgement that came in front of messages: acted on after them.
//!
//! Problem: in an exchange each message carries the acknowledgement of the one before it. An application waits for the message; what it sent is
//! settled whenever its token and buffer come back. To act on the acknowledgement takes half as long as to deliver the message.
//!
//! Idea: a plain ACK in front of short messages is put aside until [`Endpoint::poll_timeout`]'s next *due* is asked for, which is at once: who calls
//! handles what came first, perhaps has a frame with the answer leave, and then acts on it. Nothing that may depend on the order happens
//! in between: it is acted on before any other chunk of the frame, before the next frame is looked at, and if no message followed.
//!
//! For a stream it is an acknowledgement that the network brought a moment later. It is judged like any other ([`Endpoint::on_answer`]) when it
//! is acted on, by what is known then; the answer's time stamp is still the newest, since no frame was heard since. An engine that dies
//! with one has lost one frame's answer.
//!
//! So do the header's news (credit, round trip, congestion), which take as long as all that is checked of a frame: but for its time stamp, which the frame that leaves
//! in between echoes, and only while neither side is near the end of its credit, nothing waits to be sent, and none of it is asked back.
//!
//! Rejected: a queue, since one frame has
//! one of them; to put it behind the messages on the wire, since a receiver would still have to know that it may go first.
//!
//! Invariant: at most one, and none while a frame is being read but of that frame.

use super::Endpoint;
use crate::host::Host;
use crate::ident::Nanos;
use crate::wire::chunk::Received;
use crate::wire::{Chunk, FrameHeader, StreamRef, Words};

/// An acknowledgement that waits.
#[derive(Clone, Debug)]
pub(super) struct Late {
    /// Who said it.
    pub peer: u32,
    /// Of which stream of ours.
    pub stream: StreamRef,
    /// Every number before it is committed.
    pub base: u32,
    /// When it came.
    pub came_at: Nanos,
    /// The frame's header, if most of what it says waits too.
    pub header: Option<Words>,
}

impl Endpoint {
    /// Acts on the acknowledgement that waits, if one does.
    #[inline]
    pub(super) fn catch_up<H: Host>(&mut self, now: Nanos, host: &mut H) {
        if let Some(late) = self.late.take() {
            self.act_on_late(now, late, host);
        }
    }

    /// Of a frame that begins with an ACK, whether all that its header says may wait but what the next frame to its writer repeats of it, which is noted. Else
    /// it is learned.
    #[inline]
    pub(super) fn note_only<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        header: &FrameHeader,
        host: &mut H,
    ) -> bool {
        let policy = &self.config.policy;
        match self.peers.get_mut(peer) {
            Some(entry)
                if !header.return_credit && entry.is_at_ease(header.sent_buffers, policy) =>
            {
                entry.stamps.note(now, header.sent_at);
                true
            }
            _ => {
                self.hear_recognized(now, peer, header, host);
                false
            }
        }
    }

    #[inline(never)]
    fn act_on_late<H: Host>(&mut self, now: Nanos, late: Late, host: &mut H) {
        // Whoever it was may have been forgotten since.
        if let Some(header) = late.header.map(|words| words.header())
            && (self.peers.get(late.peer)).is_some_and(|entry| entry.wrote(&header))
        {
            self.hear_recognized(late.came_at, late.peer, &header, host);
        }
        let ack = Chunk::Ack {
            stream: late.stream,
            base: late.base,
            received: Received::default(),
        };
        self.on_answer(now, late.peer, &ack, host);
    }
}
