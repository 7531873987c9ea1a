//! Ports that open and close, and tokens that appear.
//!
//! Problem: an application may close its port, or die, with messages under way in both directions; the peers must hear something
//! definite, and the next owner of the port must never see what was meant for this one. transport.md §3.4, §5.4,
//! §5.5
//!
//! Idea: receiving streams outlive their port as closed: they answer PORT-CLOSED{base} until their sender ends the epoch, which
//! it does at once. Sending streams end their epoch with CLOSE, so that the peer gives half-placed buffers back. A message that
//! finds no token makes its stream wait at the port; every token wakes the one that waited longest, and a message that was
//! accepted wakes the next, so a thousand senders do not all answer one token. Their own probes catch what this misses.
//!
//! When the next message in order finds no token, the youngest accepted message of the port that is not next in its own stream
//! gives its token up: it can come again, the other holds everybody up. Inside a stream a lower number takes the token of a higher one.

use super::Endpoint;
use super::receive_stream::Kind;
use crate::host::{Host, Reason};
use crate::ident::{Nanos, PortId, StreamKey};
use crate::policy::Recovery;

impl Endpoint {
    /// The port may receive from now on. Streams of an earlier owner stay closed.
    pub fn port_opened(&mut self, port: PortId) {
        self.train = None;
        if let Some(open) = self.open_ports.get_mut(usize::from(port.0)) {
            *open = true;
        }
    }

    /// The port is gone: its receiving streams answer PORT-CLOSED from now on, its sends end (MaybeDelivered if they were
    /// transmitted: their payload is gone, they cannot be followed up).
    pub fn port_closed<H: Host>(&mut self, now: Nanos, port: PortId, host: &mut H) {
        self.train = None;
        self.catch_up(now, host);
        let Some(open) = self.open_ports.get_mut(usize::from(port.0)) else {
            return;
        };
        *open = false;
        for slot in 0..self.receive.end() {
            if self
                .receive
                .get(slot)
                .is_some_and(|s| s.key.local == port && !s.closed)
            {
                self.close_receive_stream(slot, host);
            }
        }
        if let Some(waiting) = self.waiting.get_mut(usize::from(port.0)) {
            waiting.clear();
        }
        for slot in 0..self.send.end() {
            if self
                .send
                .get(slot)
                .is_some_and(|stream| stream.key.local == port)
            {
                self.fail_stream(now, slot, Reason::PortClosed, host);
                if let Some(stream) = self.send.get_mut(slot) {
                    stream.idle_at = now; // CLOSE
                    stream.paused = false;
                }
                self.rearm(now, slot);
            }
        }
    }

    /// The stream's port is gone: nothing more is delivered on it.
    pub(super) fn close_receive_stream<H: Host>(&mut self, slot: u32, host: &mut H) {
        self.void_receive_stream(slot, host);
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        stream.closed = true;
        stream.waiting = false;
        stream.due.nulled = stream.nulled() != 0;
        stream.due.port_closed = stream.nulled() == 0;
        self.queue_control(slot);
        self.give_grants();
    }

    /// A receive token appeared at the port.
    pub fn buffer_provided(&mut self, _now: Nanos, port: PortId) {
        self.train = None;
        self.wake_waiting(port, 1);
    }

    /// The application answered an offer of this stream, which [`Host::offer`] called undecided: its message may come again. The others
    /// that wait at the port do so for something else.
    pub fn offer_answered(&mut self, _now: Nanos, key: StreamKey) {
        self.train = None;
        let Some(slot) = self.receive_index.get(&key).copied() else {
            return;
        };
        if let Some(waiting) = self.waiting.get_mut(usize::from(key.local.0)) {
            waiting.retain(|&other| other != slot);
        }
        self.wake(slot, key.local);
    }

    /// The stream's next message has no buffer.
    pub(super) fn wait_for_token(&mut self, slot: u32) {
        let Some(stream) = self.receive.get_mut(slot) else {
            return;
        };
        let port = usize::from(stream.key.local.0); // ours, so below PORTS
        if self.waiting.len() <= port {
            self.waiting.resize_with(port + 1, Default::default);
        }
        if !stream.waiting
            && let Some(waiting) = self.waiting.get_mut(port)
        {
            stream.waiting = true;
            waiting.push_back(slot);
        }
    }

    /// READY to streams that wait at the port.
    pub(super) fn wake_waiting(&mut self, port: PortId, mut count: usize) {
        while count > 0
            && let Some(slot) = self
                .waiting
                .get_mut(usize::from(port.0))
                .and_then(|w| w.pop_front())
        {
            count -= usize::from(self.wake(slot, port));
        }
    }

    /// READY to this stream, if it waits at the port.
    fn wake(&mut self, slot: u32, port: PortId) -> bool {
        let Some(stream) = self.receive.get_mut(slot) else {
            return false;
        };
        if !stream.waiting || stream.key.local != port {
            return false; // the row belongs to another stream by now
        }
        stream.waiting = false;
        stream.undecided = None;
        let Some(number) = stream.no_buffer else {
            return false; // it found one meanwhile
        };
        stream.woken = true;
        stream.due.nack = stream.due.nack.filter(|&(refused, _)| refused != number);
        stream.due.ready = Some(number);
        self.queue_control(slot);
        true
    }

    /// The youngest message of the port whose token `number` may take: one that is not next in its stream, if `number` is; a later one
    /// of the same stream in any case. So the lowest number always wins, and nobody takes a token in turns.
    pub(super) fn find_victim(&self, slot: u32, number: u32) -> Option<(u32, usize)> {
        let asker = self.receive.get(slot)?;
        let (key, next) = (asker.key, asker.base == number);
        let middle = self.config.policy.recovery == Recovery::Selective;
        let rivals = self.receive.iter().filter(|(other, stream)| {
            (next || *other == slot)
                && stream.key.local == key.local
                && stream.key.priority == key.priority
        });
        let messages = rivals.flat_map(|(other, stream)| {
            let last = stream.messages.len().saturating_sub(1);
            let own = number.wrapping_sub(stream.base) as usize;
            let from = if other == slot { own } else { 0 } + 1;
            let from = if middle { from } else { from.max(last) };
            let messages = stream.messages.iter().enumerate().skip(from);
            messages.map(move |(index, incoming)| (incoming, other, index))
        });
        messages
            .filter(|(incoming, ..)| matches!(incoming.kind, Kind::Whole(_) | Kind::Placing(_)))
            .max_by_key(|(incoming, ..)| incoming.age)
            .map(|(_, other, index)| (other, index))
    }

    /// Takes a token back for `number`: the message that had it is forgotten, and its sender told.
    pub(super) fn take_token_back<H: Host>(
        &mut self,
        slot: u32,
        number: u32,
        host: &mut H,
    ) -> bool {
        let Some((victim, index)) = self.find_victim(slot, number) else {
            return false;
        };
        let Some(stream) = self.receive.get_mut(victim) else {
            return false;
        };
        let (peer, lost) = (stream.peer, stream.number(index));
        match stream.forget(index).map(|incoming| incoming.kind) {
            Some(Kind::Whole(buffer)) => host.release(buffer),
            Some(Kind::Placing(row)) => self.drop_long(row, host),
            _ => return false,
        }
        self.counters.tokens_taken_back += 1;
        if let Some(stream) = self.receive.get_mut(victim) {
            stream.stalled = false;
            stream.due.ack = true;
        }
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.placing = entry.placing.saturating_sub(1);
        }
        self.ask_for_token(victim, lost);
        self.queue_control(victim);
        true
    }
}
