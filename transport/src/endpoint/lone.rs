//! A frame with one short message, and perhaps the acknowledgement of the one that it answers.
//!
//! Problem: in an exchange each frame is of this kind, and its receiver waits for every instruction that goes before it. The general way asks of each thing that may be in a
//! frame whether it is due, writes chunk after chunk behind the one before, wherever that ends, and remembers for each what is to be filled in later: 1,700 instructions.
//!
//! Idea: if one peer has something to say, of one stream, of which one message was never sent, and owes nobody anything but one plain ACK, then
//! the frame has one of two shapes, and all is written at fixed places. Whatever is out of the ordinary is the general way's, before
//! anything was changed. It must not be possible to tell from the frames, nor from what is remembered, which way they went (`tests/shortcuts.rs`).
//!
//! Rejected: the same for several messages, whose frames have no fixed shape (`burst`); to leave out the stream's queue as well, since what is sent
//! must be there when it is lost.

use super::credit::BUFFER_BYTES;
use super::peer::PeerEntry;
use super::send_stream::MessageState;
use super::timers::Owner;
use super::transmit::{flow, header_to};
use super::turn::EAGER_HEADER;
use super::{Endpoint, Transmit};
use crate::host::Host;
use crate::ident::{Nanos, Priority};
use crate::policy::OnTimeout;
use crate::wire::frame::FRAME_HEADER_LEN;
use crate::wire::{LoneMessage, Payload};

/// Whose message it is, and what goes with it.
struct Lone {
    slot: u32,
    class: usize,
    sender: u32,
    /// The receiving stream that owes an acknowledgement.
    acked: Option<u32>,
    /// Of the payload.
    len: usize,
}

impl PeerEntry {
    /// Whether a frame to it holds nothing but a message of one stream of this priority, and at most one receiving stream's control.
    #[inline(always)]
    fn has_one_stream(&self, class: usize) -> bool {
        self.recalled
            && self.is_up()
            && !(self.path.is_due() || self.hello_due || self.hello_ack_due)
            && self.replies.len() | self.sender_control.len() | self.active[1 - class].len() == 0
            && self.active[class].len() == 1
            && self.control.len() <= 1
    }
}

impl Endpoint {
    /// The next frame, if it is of this kind.
    #[inline(never)]
    pub(super) fn lone_message<H: Host>(
        &mut self,
        now: Nanos,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        let lone = self.find_lone(to.len())?;
        self.write_lone(now, &lone, to, host)
    }

    /// Changes nothing.
    #[inline(always)]
    fn find_lone(&self, room: usize) -> Option<Lone> {
        let policy = &self.config.policy;
        if self.ready[0].len() + self.ready[1].len() != 1 || !policy.coalesce {
            return None;
        }
        #[cfg(test)]
        if self.shortcuts.off {
            return None;
        }
        let class = usize::from(self.ready[0].is_empty());
        let slot = *self.ready[class].front()?;
        let entry = self.peers.get(slot)?;
        if !entry.has_one_stream(class) {
            return None;
        }
        let sender = *entry.active[class].front()?;
        let stream = self.send.get(sender)?;
        let sent = stream.cursor.wrapping_sub(stream.base) as usize;
        let window = policy.window_messages.min(entry.remote_window) as usize;
        let one = stream.peer == slot
            && sent + 1 == stream.queue.len()
            && sent < window
            && stream.goes_straight_on()
            && !stream.hungry
            && stream.resend.is_empty();
        let message = stream.queue.back().filter(|_| one)?;
        let acked = match entry.control.front() {
            None => None,
            Some(&receiver) => {
                let stream = self.receive.get(receiver)?;
                if stream.peer != slot || !stream.owes_a_plain_ack() {
                    return None;
                }
                Some(receiver)
            }
        };
        let len = message.len as usize;
        let headers = LoneMessage::headers_len(acked.is_some());
        // In a frame of its own, as `StreamWriter::first` asks; and in this one.
        let whole = (FRAME_HEADER_LEN + EAGER_HEADER).max(headers) + len;
        let space = room.min(usize::from(entry.max_frame));
        let credit = entry.may_fill(policy) as usize * BUFFER_BYTES;
        let fits = message.state == MessageState::Live && whole <= space.min(credit);
        fits.then_some(Lone {
            slot,
            class,
            sender,
            acked,
            len,
        })
    }

    #[inline(always)]
    fn write_lone<H: Host>(
        &mut self,
        now: Nanos,
        lone: &Lone,
        to: &mut [u8],
        host: &mut H,
    ) -> Option<Transmit> {
        let (slot, class, sender) = (lone.slot, lone.class, lone.sender);
        let crowded = self.is_crowded();
        let unreachable = self.unreachable_after();
        let Self {
            config,
            peers,
            send,
            receive,
            ready,
            timers,
            counters,
            ..
        } = self;
        let policy = &config.policy;
        let entry = peers.get_mut(slot)?;
        let stream = send.get_mut(sender)?;
        ready[class].pop_front();
        entry.ready[class] = false;
        let at = entry.stamps.write(now);

        let ack = lone.acked.and_then(|receiver| receive.get_mut(receiver));
        let ack = ack.map(|stream| {
            (stream.due.ack, stream.in_control) = (false, false);
            (stream.wire(), stream.base)
        });
        entry.control.pop_front();
        (entry.ack_due, entry.acks_pending) = (Nanos::MAX, 0);

        let number = stream.cursor;
        let name = stream.wire();
        let message = stream.queue.back_mut()?;
        message.goes_whole(at);
        let id = message.id;
        let mut frame = LoneMessage::begin(to, ack, lone.len)?;
        let payload = Payload {
            len: lone.len as u16,
            crc: 0,
        };
        frame.message(&name, number, message.tag, message.ack, payload);
        stream.cursor = number.wrapping_add(1);
        stream.high = stream.cursor;
        if stream.timer == Nanos::MAX || policy.on_timeout == OnTimeout::Resend {
            stream.timer = at.saturating_add(entry.rtt.rto(policy, stream.backoff));
            timers.arm(Owner::Send(sender), stream.timer);
        }
        (stream.starved, stream.in_active) = (false, false);
        entry.active[class].pop_front();

        let peer = entry.id;
        entry.told_at = now;
        let mut header = header_to(config, entry, at);
        header.crowded = crowded;
        let len = frame.len();
        let buffers = len.div_ceil(BUFFER_BYTES) as u32;
        entry.credit.charge(at, buffers);
        entry.window.charge(at, buffers, policy);
        entry.credit.write(policy, &mut header);
        (header.echo, header.held) = entry.stamps.echo(at);
        if entry.waiting_since.is_none() {
            entry.waiting_since = Some(at);
            timers.arm(Owner::Peer(slot), at.saturating_add(unreachable));
        }
        let chunks = 1 + u64::from(ack.is_some());
        counters.chunks_sent += chunks;
        counters.acks_sent += chunks - 1;
        counters.frames_sent += 1;
        counters.bytes_sent += len as u64;
        let transmit = Transmit {
            peer,
            len,
            priority: match class == 0 && ack.is_none() {
                true => Priority::Low,
                false => Priority::High,
            },
            flow: flow(config, peer),
        };
        #[cfg(test)]
        {
            self.shortcuts.lone[chunks as usize - 1] += 1;
        }
        if lone.len > 0 {
            let crc = host.read_payload(id, 0, frame.payload());
            let crc = crc.unwrap_or_else(|_| self.unreadable(sender, number, frame.payload()));
            frame.set_crc(crc);
        }
        frame.finish(&header);
        self.note_turn(class, len);
        Some(transmit)
    }
}
