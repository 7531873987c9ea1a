//! [`Host`] for [`TestHost`]: the stores in their order, and the contract checked at every call.

use portolan_transport::Host;
use portolan_transport::host::{
    Delivery, MemoryFault, NoBuffer, Offer, SendRequest, SendStatus, TableFull, Verdict,
    after_commit,
};
use portolan_transport::ident::{BufferId, Peer, PortId, Priority, RecordId, SendId, StreamKey};
use portolan_transport::wire::crc32c;

use super::book::{Route, fill, first_difference, id_of};
use super::host::{Event, Offered, TestHost, key};
use super::records::Record;
use crate::checks::TokenStep;

impl Host for TestHost {
    fn accept(&mut self, send: &SendRequest, record: RecordId, epoch: u32, number: u32) {
        let r = *self.send_record(record);
        assert_eq!(
            (r.stream, r.epoch),
            (send.stream, epoch),
            "accepted on another stream's record"
        );
        let known = self
            .sends
            .get(&key(send.id))
            .expect("a send the application wrote");
        assert_eq!(known.request, *send);
        let fresh = known.accepted.is_none();
        // A stream that was reopened with a new epoch numbers its sends again.
        if let Some((_, old, _)) = known.accepted {
            assert_ne!(old, epoch, "{:?} accepted twice in an epoch", send.id);
        }
        assert_eq!(r.next, number, "numbers are used in order, once");
        self.step();
        self.sends.get_mut(&key(send.id)).expect("checked").accepted =
            Some((record, epoch, number));
        self.step();
        self.send_record(record).next = number.wrapping_add(1);
        self.step();
        if fresh {
            self.leave_ring(send.id);
        }
    }

    fn read_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<u32, MemoryFault> {
        let known = self.sends.get(&key(send)).expect("payload of a live send");
        assert!(known.accepted.is_some(), "payload before it was accepted");
        assert!(
            offset as usize + to.len() <= known.request.len as usize,
            "payload beyond its end"
        );
        if self.bad_sends.contains(&known.message) {
            return Err(MemoryFault);
        }
        fill(known.message, offset, to);
        Ok(crc32c(to))
    }

    fn complete(&mut self, send: SendId, status: SendStatus) {
        self.finish_send(send, status);
    }

    fn wants_offers(&self, _port: PortId) -> bool {
        self.wants_offers
    }

    fn offer(&mut self, offer: &Offer<'_>) -> Verdict {
        let id = id_of(offer.tag, offer.first);
        assert_eq!(
            first_difference(id, offer.first),
            None,
            "offered before it was verified"
        );
        self.offered.push(Offered {
            number: offer.number,
            total: offer.total,
            first: offer.first.to_vec(),
        });
        let verdict = self.verdicts.pop_front().unwrap_or(Verdict::Accept);
        if let Verdict::Shorten(len) = verdict {
            self.book.borrow_mut().shortened(id, len);
        }
        verdict
    }

    fn claim(&mut self, port: PortId, priority: Priority, len: u32) -> Result<BufferId, NoBuffer> {
        let p = self
            .ports
            .get_mut(&port)
            .filter(|p| p.open)
            .ok_or(NoBuffer::PortClosed)?;
        if len > p.max_len {
            return Err(NoBuffer::TooLong);
        }
        let fits = p
            .free
            .iter()
            .enumerate()
            .filter(|(_, t)| t.priority == priority && t.size >= len);
        let (index, _) = fits.min_by_key(|(_, t)| t.size).ok_or(NoBuffer::NotNow)?;
        let mut token = p.free.swap_remove(index);
        // What is left of somebody else's message must never show.
        token.bytes = self.memory.pop().unwrap_or_default();
        token.bytes.clear();
        token.bytes.resize(len as usize, 0xee);
        let id = token.name(port);
        p.claimed.push((token, len));
        self.book
            .borrow_mut()
            .token(self.node, id, priority, TokenStep::Claimed);
        Ok(id)
    }

    fn release(&mut self, buffer: BufferId) {
        let p = self.ports.get_mut(&buffer.port).expect("the buffer's port");
        let index = p
            .claimed
            .iter()
            .position(|(t, _)| t.slot == buffer.slot)
            .expect("a claimed buffer");
        let (token, _) = p.claimed.swap_remove(index);
        self.give_back(buffer.port, token);
    }

    fn write_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<u32, MemoryFault> {
        let p = self.ports.get_mut(&buffer.port).expect("the buffer's port");
        let claimed = p
            .claimed
            .iter_mut()
            .find(|(t, _)| (t.slot, t.generation) == (buffer.slot, buffer.generation));
        let (token, len) = claimed.expect("a claimed buffer");
        let end = offset as usize + from.len();
        assert!(
            end <= *len as usize,
            "a write beyond the message: {offset} + {} > {len}",
            from.len()
        );
        token.bytes[offset as usize..end].copy_from_slice(from);
        if p.open {
            Ok(crc32c(from))
        } else {
            Err(MemoryFault)
        }
    }

    fn commit(&mut self, delivery: &Delivery) -> Result<(), MemoryFault> {
        let d = *delivery;
        let r = *self.receive_record(d.record);
        assert_eq!(
            (r.stream, r.epoch),
            (d.stream, d.epoch),
            "committed on another stream's record"
        );
        assert_eq!(
            after_commit(r.next, r.bits, d.number, false),
            (d.base, d.bits),
            "the record follows the commit"
        );
        assert_ne!((r.next, r.bits), (d.base, d.bits), "committed before");
        keeps_nulls(r.bits, d.bits);
        assert_eq!(d.buffer.port, d.stream.local);
        let p = self.ports.get(&d.stream.local).expect("the stream's port");
        let claimed = p
            .claimed
            .iter()
            .find(|(t, _)| t.slot == d.buffer.slot)
            .expect("a claimed buffer");
        assert_eq!((claimed.1, claimed.0.priority), (d.len, d.stream.priority));
        if !p.open {
            return Err(MemoryFault);
        }
        self.step();
        let route = Route {
            from: (d.stream.node, d.stream.remote),
            to: (self.node, d.stream.local),
            priority: d.stream.priority,
        };
        // The token the event names is the application's from here on; generation 0 marks it for the replay.
        let p = self.ports.get_mut(&d.stream.local).expect("checked");
        let index = p
            .claimed
            .iter()
            .position(|(t, _)| t.slot == d.buffer.slot)
            .expect("checked");
        let token = &mut p.claimed[index].0;
        let id;
        {
            let mut book = self.book.borrow_mut();
            let bytes = &token.bytes[..d.len as usize];
            id = id_of(d.tag, bytes);
            book.committed(route, id, bytes);
            book.token(self.node, d.buffer, token.priority, TokenStep::Delivered);
        }
        token.generation = 0;
        self.memory.push(std::mem::take(&mut token.bytes));
        self.events.push_back(Event::Received {
            id,
            stream: d.stream,
            epoch: d.epoch,
            number: d.number,
        });
        self.step();
        let record = self.receive_record(d.record);
        (record.next, record.bits) = (d.base, d.bits);
        self.step();
        self.ports
            .get_mut(&d.stream.local)
            .expect("checked")
            .claimed
            .swap_remove(index);
        self.step();
        self.settled = self.events.len();
        self.forget_events();
        Ok(())
    }

    fn commit_base(&mut self, record: RecordId, epoch: u32, base: u32, bits: u32) {
        let r = *self.receive_record(record);
        assert_eq!(r.epoch, epoch);
        if base == r.next {
            assert_eq!(
                bits & !r.bits,
                0,
                "only confirmations change the bits alone"
            );
        } else {
            let (null, drop) = (
                after_commit(r.next, r.bits, r.next, true),
                after_commit(r.next, r.bits, r.next, false),
            );
            assert!([null, drop].contains(&(base, bits)), "{} to {base}", r.next);
            keeps_nulls(r.bits, drop.1);
        }
        self.step();
        let record = self.receive_record(record);
        (record.next, record.bits) = (base, bits);
        self.step();
    }

    fn draw_epoch(&mut self, leave_out: u32) -> u32 {
        self.step();
        let epoch = self.next_epoch.wrapping_add(leave_out);
        self.next_epoch = epoch.wrapping_add(1);
        self.epochs_drawn += 1;
        self.step();
        epoch
    }

    fn open_send_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        next: u32,
    ) -> Result<RecordId, TableFull> {
        self.step();
        let port_generation = self.port_instance(stream.local).unwrap_or(0);
        let record = Record {
            stream,
            incarnation,
            epoch,
            next,
            bits: 0,
            port_generation,
        };
        let record = self.send_records.insert(self.max_records, record);
        self.step();
        record
    }

    fn free_send_record(&mut self, record: RecordId) {
        self.step();
        self.send_record(record);
        self.send_records.remove(record);
        self.step();
    }

    fn open_receive_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        base: u32,
    ) -> Result<RecordId, TableFull> {
        self.step();
        let port_generation = self.port_instance(stream.local).unwrap_or(0);
        let record = Record {
            stream,
            incarnation,
            epoch,
            next: base,
            bits: 0,
            port_generation,
        };
        let record = self.receive_records.insert(self.max_records, record);
        self.step();
        record
    }

    fn free_receive_record(&mut self, record: RecordId) {
        self.step();
        self.receive_record(record);
        self.receive_records.remove(record);
        self.step();
    }

    fn load_peer(&self, peer: Peer) -> Option<(u64, u32)> {
        self.peers.get(&peer).copied()
    }

    fn store_peer(&mut self, peer: Peer, incarnation: u64, floor: u32) -> Result<(), TableFull> {
        self.step();
        self.peers.insert(peer, (incarnation, floor));
        self.step();
        Ok(())
    }
}

/// A commit must not shift a NULL out of the word that its sender has not confirmed.
fn keeps_nulls(before: u32, after: u32) {
    let nulls = |bits: u32| (bits & 0xffff).count_ones();
    assert!(
        nulls(after) >= nulls(before),
        "an unconfirmed NULL is forgotten"
    );
}
