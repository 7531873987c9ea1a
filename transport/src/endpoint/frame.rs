//! A received frame, chunk by chunk.
//!
//! Problem: a frame may come from anybody and say anything, and most that come say the same few things. transport.md §1.1, §11.1, §15
//!
//! Idea: who claims to have sent it and for whom is looked at first; then its chunks are acted on in order, the header being judged before the first that speaks
//! of a stream, and then learned from. Short messages go the straight way ([`Endpoint::commit_short`]), a lone one behind an ACK a straighter one (`lone_arrival`), plain DATA nearly so (in a bare frame without a walk), and an ACK in front of short messages waits for them, with
//! most of what the header says (`late`); anything else goes to the sending or the receiving end by kind.
//!
//! Rejected: to judge the header of every frame alike: HELLO and RESET come from those whose incarnation is not known yet.

use super::hello::{RESET_INCARNATION, truncate};
use super::late::Late;
use super::peer::Reply;
use super::{Endpoint, FrameError, PeerState};
use crate::host::Host;
use crate::ident::{Nanos, NodeId, Peer, Priority};
use crate::wire::{self, Chunk, FrameHeader};

impl Endpoint {
    /// Takes a received frame, given as its segments in order. An error says why the frame, or the rest of it after its handshake
    /// chunks, was dropped; it is counted and needs no action.
    pub fn handle_frame<H: Host>(
        &mut self,
        now: Nanos,
        segments: &[&[u8]],
        host: &mut H,
    ) -> Result<(), FrameError> {
        self.train = None;
        self.catch_up(now, host);
        self.grants.tick(now);
        self.counters.frames_received += 1;
        self.counters.bytes_received += segments.iter().map(|s| s.len() as u64).sum::<u64>();
        let result = match self.lone_arrival(now, segments, host) {
            true => Ok(()),
            false => self.receive_frame(now, segments, host),
        };
        let c = &mut self.counters;
        match result {
            Ok(()) => {}
            Err(FrameError::Wire(error)) => c.count_malformed(error),
            Err(FrameError::NotForUs) => c.frames_not_for_us += 1,
            Err(FrameError::UnknownPeer) => c.frames_unknown_peer += 1,
            Err(FrameError::WrongIncarnation) => c.frames_wrong_incarnation += 1,
            Err(FrameError::StaleEngine) => c.frames_stale_engine += 1,
            Err(FrameError::NotAssociated) => c.frames_not_associated += 1,
        }
        result
    }

    fn receive_frame<H: Host>(
        &mut self,
        now: Nanos,
        segments: &[&[u8]],
        host: &mut H,
    ) -> Result<(), FrameError> {
        let frame = wire::parse(segments).map_err(FrameError::Wire)?;
        let header = frame.header();
        if header.dst_node != self.config.node.0 || header.dst_queue != self.config.queue {
            return Err(FrameError::NotForUs);
        }
        let from = NodeId::new(header.src_node)
            .map(|node| Peer {
                node,
                queue: header.src_queue,
            })
            .filter(|from| self.heard_last(*from).is_some() || self.nodes.contains_key(&from.node))
            .ok_or(FrameError::UnknownPeer)?;
        // Nearly every frame of a stream.
        if let Some((association, data, view)) = frame.bare() {
            self.counters.chunks_received += 1;
            let peer = self.admit_bare(now, from, header.sent_at, association)?;
            let (stream, number, offset) = (&data.stream, data.number, data.offset);
            self.on_data(now, peer, stream, number, offset, &view, host);
            return Ok(());
        }
        self.counters.chunks_unknown += u64::from(frame.unknown_chunks());
        let (mut admitted, mut refused, mut known_chunks) = (None, None, 0);
        let mut chunks = frame.chunks();
        // Only ever in front of what it would hold up.
        if let Some((stream, base)) = chunks.ack() {
            let peer = self
                .recognize(now, from, header, host)
                .inspect_err(|_| self.counters.chunks_received += 1)?;
            // There is nothing that it would hold up if it is alone.
            let header = match chunks.is_over() {
                true => {
                    self.hear_recognized(now, peer, header, host);
                    None
                }
                false => frame
                    .words()
                    .filter(|_| self.note_only(now, peer, header, host)),
            };
            admitted = Some(peer);
            (known_chunks, self.counters.chunks_received) = (1, self.counters.chunks_received + 1);
            self.late = Some(Late {
                peer,
                stream,
                base,
                came_at: now,
                header,
            });
        }
        let mut delivered = 0;
        loop {
            if refused.is_none()
                && let Some(short) = chunks.short()
            {
                let peer = match admitted {
                    Some(peer) => peer,
                    None => *admitted.insert(
                        self.admit(now, from, header, host)
                            .inspect_err(|_| self.counters.chunks_received += 1)?,
                    ),
                };
                let taken = self.commit_short(now, peer, short, &mut chunks, host);
                self.counters.chunks_received += u64::from(taken);
                known_chunks += taken;
                delivered += taken;
            }
            if refused.is_none()
                && let Some((data, view)) = chunks.data()
            {
                self.catch_up(now, host);
                self.counters.chunks_received += 1;
                known_chunks += 1;
                let peer = match admitted {
                    Some(peer) => peer,
                    None => *admitted.insert(self.admit(now, from, header, host)?),
                };
                let (stream, number, offset) = (&data.stream, data.number, data.offset);
                self.on_data(now, peer, stream, number, offset, &view, host);
                continue;
            }
            let Some((chunk, view)) = chunks.next() else {
                break;
            };
            self.catch_up(now, host);
            self.counters.chunks_received += 1;
            known_chunks += 1;
            match chunk {
                // Whose port is whose may be another matter after any of these three.
                Chunk::Hello(_) | Chunk::HelloAck(_) | Chunk::Reset { .. } => self.named = None,
                _ => {}
            }
            match chunk {
                Chunk::Hello(hello) => self.on_hello(now, from, header, &hello, host)?,
                Chunk::HelloAck(hello) => {
                    // An answer nobody believes must not hide the HELLO behind it.
                    refused = self.on_hello_ack(now, from, header, &hello, host).err();
                }
                Chunk::Reset {
                    src_incarnation,
                    dst_incarnation,
                    reason,
                    detail,
                } => {
                    let echo = (src_incarnation, dst_incarnation);
                    self.on_reset(now, from, echo, (reason, detail), host);
                }
                chunk => {
                    if let Some(error) = refused {
                        return Err(error);
                    }
                    let peer = match admitted {
                        Some(peer) => peer,
                        None => *admitted.insert(self.admit(now, from, header, host)?),
                    };
                    self.on_chunk(now, peer, &chunk, &view, host);
                }
            }
        }
        if delivered == 0 {
            self.catch_up(now, host);
        }
        if known_chunks == 0 {
            self.admit(now, from, header, host)?; // its header says something
        }
        refused.map_or(Ok(()), Err)
    }

    /// Checks a frame's header before its stream chunks are believed, and learns from it.
    fn admit<H: Host>(
        &mut self,
        now: Nanos,
        from: Peer,
        header: &FrameHeader,
        host: &mut H,
    ) -> Result<u32, FrameError> {
        let slot = self.recognize(now, from, header, host)?;
        self.hear_recognized(now, slot, header, host);
        Ok(slot)
    }

    /// Checks a frame's header before its stream chunks are believed. Nothing of what it says is learned but that its writer is there.
    fn recognize<H: Host>(
        &mut self,
        now: Nanos,
        from: Peer,
        header: &FrameHeader,
        host: &mut H,
    ) -> Result<u32, FrameError> {
        let ours = truncate(self.config.incarnation);
        let slot = match self.heard_last(from) {
            Some(slot) => Some(slot),
            None => self.recall_for(now, from, header.src_incarnation, host),
        };
        let entry = slot.and_then(|slot| Some((slot, self.peers.get(slot)?)));
        let Some((slot, entry)) = entry.filter(|_| header.dst_incarnation == ours) else {
            self.reset(now, from, header, (RESET_INCARNATION, 0));
            return Err(FrameError::WrongIncarnation);
        };
        if entry.incarnation == 0 || truncate(entry.incarnation) != header.src_incarnation {
            if entry.hello_outstanding {
                return Err(FrameError::NotAssociated); // HELLO is on its way already
            }
            self.reset(now, from, header, (RESET_INCARNATION, 0));
            return Err(FrameError::WrongIncarnation);
        }
        self.learn_epoch(now, slot, header, host)?;
        let Some(entry) = self.peers.get_mut(slot) else {
            return Err(FrameError::NotAssociated);
        };
        entry.last_heard = now;
        entry.waiting_since = None;
        self.heard = Some(slot);
        Ok(slot)
    }

    /// Learns from the header of a frame that was recognized.
    pub(super) fn hear_recognized<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        header: &FrameHeader,
        host: &mut H,
    ) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let idle = entry.state == PeerState::Idle;
        let back = idle && entry.greeted;
        if back {
            entry.state = PeerState::Up;
        }
        let waiting = [entry.active[0].is_empty(), entry.active[1].is_empty()];
        self.hear(now, slot, header);
        if back {
            // Silent for too long, and here it is again; both incarnations still fit.
            self.offer_share(now, slot);
            self.peer_up(now, slot, host);
        } else if idle {
            // A restored engine gave the peer up before it ever heard it. Answers need an association.
            self.connect(now, slot);
        }
        for (priority, empty) in [Priority::Low, Priority::High].into_iter().zip(waiting) {
            if !empty {
                self.mark_ready(slot, priority);
            }
        }
    }

    /// A chunk of an associated peer: to the sending end, or to the receiving end.
    fn on_chunk<H: Host>(
        &mut self,
        now: Nanos,
        peer: u32,
        chunk: &Chunk<'_>,
        view: &wire::PayloadView<'_>,
        host: &mut H,
    ) {
        if let Chunk::Probe { .. } = chunk {
            self.ask_share(now, peer);
        } else if let Chunk::Rts { payload, .. } = chunk
            && payload.len == 0
        {
            self.ask_share(now, peer);
        }
        match *chunk {
            Chunk::Eager { .. }
            | Chunk::Rts { .. }
            | Chunk::Null { .. }
            | Chunk::Probe { .. }
            | Chunk::Data { .. }
            | Chunk::DropConfirm { .. }
            | Chunk::Close { .. } => self.on_message_chunk(now, peer, chunk, view, host),
            Chunk::PathProbe { size, nonce } => {
                self.reply(peer, Reply::PathAck(size, nonce));
            }
            Chunk::PathAck { size, nonce } => self.on_path_ack(peer, size, nonce),
            _ => self.on_answer(now, peer, chunk, host),
        }
    }
}
