//! The engine's surroundings for the quick checks.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use crate::host::*;
use crate::ident::*;
use crate::wire::crc32c;

/// The engine's surroundings, all in vectors. Records and sends survive `restore`.
#[derive(Default)]
pub(super) struct TestHost {
    pub(super) payloads: BTreeMap<u32, Vec<u8>>,
    pub(super) accepted: Vec<(SendRequest, RecordId, u32, u32)>,
    pub(super) completed: Vec<(u32, SendStatus)>,
    pub(super) buffers: BTreeMap<u32, Vec<u8>>,
    pub(super) tokens: Vec<u32>,
    pub(super) token_len: u32,
    pub(super) open: bool,
    pub(super) delivered: Vec<(Delivery, Vec<u8>)>,
    pub(super) epoch: u32,
    pub(super) next_record: u32,
    pub(super) sending: BTreeMap<u32, (StreamKey, u64, u32, u32)>,
    pub(super) receiving: BTreeMap<u32, (StreamKey, u64, u32, u32)>,
    /// The port's instance that opened a receive record.
    pub(super) instance_of: BTreeMap<u32, u32>,
    pub(super) instance: u32,
    pub(super) peers: BTreeMap<Peer, (u64, u32)>,
    pub(super) next_token: u32,
    pub(super) bits: BTreeMap<u32, u32>,
    /// The longest message a token holds, if not all that the port may take.
    pub(super) fits: Option<u32>,
    /// What the application says to offered messages, by tag; undecided about those that are not there. `None`: it is not asked.
    pub(super) verdicts: Option<BTreeMap<u64, Verdict>>,
    /// Tags of the messages offered.
    pub(super) offered: Vec<u64>,
    /// The port goes at the commit after so many.
    pub(super) commits_max: Option<usize>,
    /// Payloads after so many are not copied in without a checksum.
    pub(super) places_max: Option<usize>,
    /// Payloads that were copied out, and in, without a checksum.
    pub(super) unchecked: [usize; 2],
}

impl TestHost {
    pub(super) fn provide(&mut self, count: u32) {
        for _ in 0..count {
            self.tokens.push(self.next_token);
            self.next_token += 1;
        }
    }

    /// What the daemon reads from its ledger. A number that was accepted is used, whatever the stream's record says.
    pub(super) fn durable(&mut self) -> Durable {
        for &(_, record, _, number) in &self.accepted {
            if let Some(stream) = self.sending.get_mut(&record.0)
                && serial_lt(stream.3, number.wrapping_add(1))
            {
                stream.3 = number.wrapping_add(1);
            }
        }
        let done: Vec<u32> = self.completed.iter().map(|c| c.0).collect();
        Durable {
            peers: self.peers.iter().map(|(p, v)| (*p, v.0, v.1)).collect(),
            sending: self
                .sending
                .iter()
                .map(|(record, s)| RestoredSendStream {
                    record: RecordId(*record),
                    stream: s.0,
                    incarnation: s.1,
                    epoch: s.2,
                    next: s.3,
                })
                .collect(),
            receiving: self
                .receiving
                .iter()
                .map(|(record, s)| RestoredReceiveStream {
                    record: RecordId(*record),
                    stream: s.0,
                    incarnation: s.1,
                    epoch: s.2,
                    base: s.3,
                    bits: self.bits.get(record).copied().unwrap_or(0),
                    closed: !self.open || self.instance_of[record] != self.instance,
                })
                .collect(),
            sends: self
                .accepted
                .iter()
                .filter(|s| !done.contains(&s.0.id.slot))
                .map(|s| RestoredSend {
                    request: s.0,
                    record: s.1,
                    number: s.3,
                })
                .collect(),
        }
    }
}

impl Host for TestHost {
    fn accept(&mut self, send: &SendRequest, record: RecordId, epoch: u32, number: u32) {
        let stream = self.sending.get_mut(&record.0).unwrap();
        assert_eq!((stream.2, stream.3), (epoch, number), "numbers in order");
        stream.3 = number.wrapping_add(1);
        self.accepted.push((*send, record, epoch, number));
    }
    fn read_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<u32, MemoryFault> {
        let from = self.payloads.get(&send.slot).ok_or(MemoryFault)?;
        to.copy_from_slice(&from[offset as usize..offset as usize + to.len()]);
        Ok(crc32c(to))
    }
    fn copy_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), MemoryFault> {
        self.read_payload(send, offset, to)?;
        self.unchecked[0] += 1;
        Ok(())
    }
    fn complete(&mut self, send: SendId, status: SendStatus) {
        assert!(
            !self.completed.iter().any(|c| c.0 == send.slot),
            "completed twice"
        );
        self.completed.push((send.slot, status));
    }
    fn wants_offers(&self, _: PortId) -> bool {
        self.verdicts.is_some()
    }
    fn offer(&mut self, offer: &Offer<'_>) -> Verdict {
        self.offered.push(offer.tag);
        let verdicts = self.verdicts.as_ref().unwrap();
        let verdict = verdicts.get(&offer.tag).copied();
        verdict.unwrap_or(Verdict::Undecided)
    }
    fn claim(&mut self, port: PortId, _: Priority, len: u32) -> Result<BufferId, NoBuffer> {
        if !self.open {
            return Err(NoBuffer::PortClosed);
        }
        if len > self.token_len {
            return Err(NoBuffer::TooLong);
        }
        if self.fits.is_some_and(|fits| len > fits) {
            return Err(NoBuffer::NotNow);
        }
        let slot = self.tokens.pop().ok_or(NoBuffer::NotNow)?;
        self.buffers.insert(slot, vec![0; len as usize]);
        Ok(BufferId {
            port,
            slot,
            generation: 1,
        })
    }
    fn release(&mut self, buffer: BufferId) {
        self.buffers.remove(&buffer.slot).unwrap();
        self.tokens.push(buffer.slot);
    }
    fn write_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<u32, MemoryFault> {
        let to = self.buffers.get_mut(&buffer.slot).unwrap();
        to[offset as usize..offset as usize + from.len()].copy_from_slice(from);
        Ok(crc32c(from))
    }
    fn place_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<(), MemoryFault> {
        if self.places_max == Some(self.unchecked[1]) {
            return Err(MemoryFault);
        }
        self.write_payload(buffer, offset, from)?;
        self.unchecked[1] += 1;
        Ok(())
    }
    fn commit(&mut self, delivery: &Delivery) -> Result<(), MemoryFault> {
        if self.commits_max == Some(self.delivered.len()) {
            self.open = false;
            return Err(MemoryFault);
        }
        let stream = self.receiving.get_mut(&delivery.record.0).unwrap();
        assert_eq!(stream.2, delivery.epoch);
        // In order of arrival a number may be ahead.
        let in_turn = delivery.number == stream.3;
        let ahead = serial_lt(stream.3, delivery.number) && delivery.base == stream.3;
        assert!(in_turn || ahead, "{} after {}", delivery.number, stream.3);
        stream.3 = delivery.base;
        self.bits.insert(delivery.record.0, delivery.bits);
        let bytes = self.buffers.remove(&delivery.buffer.slot).unwrap();
        assert_eq!(bytes.len(), delivery.len as usize);
        self.delivered.push((*delivery, bytes));
        Ok(())
    }
    fn commit_base(&mut self, record: RecordId, epoch: u32, base: u32, bits: u32) {
        let stream = self.receiving.get_mut(&record.0).unwrap();
        assert_eq!(stream.2, epoch);
        assert!(base.wrapping_sub(stream.3) <= 17); // and what was committed ahead
        stream.3 = base;
        self.bits.insert(record.0, bits);
    }
    fn draw_epoch(&mut self, leave_out: u32) -> u32 {
        self.epoch = self.epoch.wrapping_add(leave_out).wrapping_add(1);
        self.epoch
    }
    fn open_send_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        next: u32,
    ) -> Result<RecordId, TableFull> {
        self.next_record += 1;
        self.sending
            .insert(self.next_record, (stream, incarnation, epoch, next));
        Ok(RecordId(self.next_record))
    }
    fn free_send_record(&mut self, record: RecordId) {
        self.sending.remove(&record.0).unwrap();
    }
    fn open_receive_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        base: u32,
    ) -> Result<RecordId, TableFull> {
        self.next_record += 1;
        self.instance_of.insert(self.next_record, self.instance);
        self.receiving
            .insert(self.next_record, (stream, incarnation, epoch, base));
        Ok(RecordId(self.next_record))
    }
    fn free_receive_record(&mut self, record: RecordId) {
        self.receiving.remove(&record.0).unwrap();
    }
    fn load_peer(&self, peer: Peer) -> Option<(u64, u32)> {
        self.peers.get(&peer).copied()
    }

    fn store_peer(&mut self, peer: Peer, incarnation: u64, floor: u32) -> Result<(), TableFull> {
        self.peers.insert(peer, (incarnation, floor));
        Ok(())
    }
}
