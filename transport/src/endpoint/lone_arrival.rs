//! A frame with the acknowledgement of one message and the message that answers it, as it arrives.
//!
//! Problem: in an exchange every frame is of this kind, and an application waits for what is in it. The general way walks over its chunks twice, once to check them and once to act on them,
//! reads all that the header says, and asks of every chunk what it may be.
//!
//! Idea: the frame is read once, at fixed places. If it comes from the peer that was heard last, as that is known, for the stream that was named last, and has the
//! message that this waits for, then it is delivered; its acknowledgement and nearly all of its header wait until then (`late`). Whatever is out of the ordinary is
//! the general way's, before anything was changed: also who is to blame for a frame that is damaged. Nobody can tell afterwards which way a frame
//! came (`tests/shortcuts.rs`).
//!
//! Rejected: a copy of the bytes that the next header will have, to compare with (they hang on the peer's incarnation and epoch and on the stream, and must not outlive any of them;
//! to make them anew takes a dozen instructions).

use super::Endpoint;
use super::commit::{Taken, take, takes_straight};
use super::late::Late;
use crate::host::Host;
use crate::ident::Nanos;
use crate::wire::LoneAnswer;

impl Endpoint {
    /// Takes a received frame if it is of this kind. False: nothing was changed.
    #[inline(always)]
    pub(super) fn lone_arrival<H: Host>(
        &mut self,
        now: Nanos,
        segments: &[&[u8]],
        host: &mut H,
    ) -> bool {
        let taken = LoneAnswer::read(segments).and_then(|lone| self.take_lone(now, &lone, host));
        taken.is_some()
    }

    #[inline(always)]
    fn take_lone<H: Host>(
        &mut self,
        now: Nanos,
        lone: &LoneAnswer<'_>,
        host: &mut H,
    ) -> Option<()> {
        #[cfg(test)]
        if self.shortcuts.off {
            return None;
        }
        let config = &self.config;
        let (header, short) = (&lone.header, &lone.message);
        let peer = self.heard?;
        let entry = self.peers.get_mut(peer)?;
        let ends = entry.ends(config.node.0, config.queue, config.incarnation)?;
        if !header.is_between(&ends) || !entry.is_at_ease(header.sent_buffers(), &config.policy) {
            return None;
        }
        let slot = self.named?;
        let stream = self.receive.get_mut(slot)?;
        if stream.peer != peer
            || stream.wire() != short.stream
            || stream.base != short.number
            || short.bytes.len() > usize::from(config.max_frame)
            || !takes_straight(stream, &self.waiting, host)
        {
            return None;
        }
        let taken = take(stream, short, &mut self.counters, host);
        if matches!(taken, Taken::No) {
            return None;
        }
        entry.last_heard = now;
        entry.waiting_since = None;
        entry.stamps.note(now, header.sent_at());
        self.counters.chunks_received += 2;
        self.late = Some(Late {
            peer,
            stream: lone.ack.0,
            base: lone.ack.1,
            came_at: now,
            header: Some(lone.header),
        });
        match taken {
            Taken::Fault(buffer) => self.end_faulty(now, slot, short, buffer, host),
            _ => self.acknowledge_all(now, slot, 1, short.ack),
        }
        #[cfg(test)]
        {
            self.shortcuts.arrivals += 1;
        }
        Some(())
    }
}
