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
//! Rejected: to let the header's own news (credit, round trip) wait too, since the frame that leaves in between echoes them; a queue, since one frame has
//! one of them; to put it behind the messages on the wire, since a receiver would still have to know that it may go first.
//!
//! Invariant: at most one, and none while a frame is being read but of that frame.

use super::Endpoint;
use crate::host::Host;
use crate::ident::Nanos;
use crate::wire::chunk::Received;
use crate::wire::{Chunk, StreamRef};

/// An acknowledgement that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Late {
    /// Who said it.
    pub peer: u32,
    /// Of which stream of ours.
    pub stream: StreamRef,
    /// Every number before it is committed.
    pub base: u32,
    /// When it came.
    pub came_at: Nanos,
}

impl Endpoint {
    /// Acts on the acknowledgement that waits, if one does.
    #[inline]
    pub(super) fn catch_up<H: Host>(&mut self, now: Nanos, host: &mut H) {
        if let Some(late) = self.late.take() {
            self.act_on_late(now, late, host);
        }
    }

    #[inline(never)]
    fn act_on_late<H: Host>(&mut self, now: Nanos, late: Late, host: &mut H) {
        let ack = Chunk::Ack {
            stream: late.stream,
            base: late.base,
            received: Received::default(),
        };
        self.on_answer(now, late.peer, &ack, host);
    }
}
