//! The tables of the ledger: which records are free, and the facts that are not part of a message's order (`commit.rs` has those).
//!
//! A record is opened by storing its fields and then its key, and freed by storing key 0 first, so a record whose key is not 0 is
//! whole. The free lists are rebuilt from the keys; a key that we would not have written frees its record: an implausible
//! record fails its own stream, never the node.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use portolan_abi::ledger::{Ledger, PeerRecord, decode_stream_key, pair, stream_key, unpair};
use portolan_transport::host::TableFull;
use portolan_transport::ident::{NodeId, Peer, PortId, Priority, RecordId, StreamKey, serial_lt};

use super::commit_point::{Point, store};

/// So many engines in a row may have died before they said that they serve.
const UNHEARD_MAX: u32 = 1 << 16;

/// The tables of one ledger.
pub struct Facts {
    ledger: Ledger<'static>,
    free_sends: Vec<u32>,
    free_receives: Vec<u32>,
    free_peers: Vec<u32>,
    peers: BTreeMap<Peer, u32>,
}

/// The stream a key names.
pub(super) fn stream_of(key: u64) -> Option<StreamKey> {
    let (local, node, remote, priority) = decode_stream_key(key)?;
    (local < portolan_abi::PORTS && remote < portolan_abi::PORTS).then_some(StreamKey {
        local: PortId(local),
        node: NodeId::new(node)?,
        remote: PortId(remote),
        priority: if priority == 0 {
            Priority::Low
        } else {
            Priority::High
        },
    })
}

fn key_of(stream: StreamKey) -> u64 {
    stream_key(
        stream.local.0,
        stream.node.0,
        stream.remote.0,
        stream.priority as u8,
    )
}

/// Indices of the records whose key makes no sense; those keys become 0. Lowest last, so that low ones are used first.
fn free_list<'k>(
    keys: impl ExactSizeIterator<Item = &'k AtomicU64> + DoubleEndedIterator,
    valid: impl Fn(u64) -> bool,
) -> Vec<u32> {
    let mut free = Vec::with_capacity(keys.len());
    for (index, key) in keys.enumerate().rev() {
        let value = key.load(Ordering::Acquire);
        if value != 0 && !valid(value) {
            store(Point::AdoptClearKey, key, 0);
        }
        if value == 0 || !valid(value) {
            free.push(index as u32);
        }
    }
    free
}

/// Has the next stream's epoch come after those of all streams there are: an engine that went wrong may have written over it, and peers believe no
/// epoch from before.
fn keep_ahead(ledger: Ledger<'_>) {
    let streams = ledger.send_streams().iter();
    let streams = streams.filter(|record| stream_of(record.key.load(Ordering::Acquire)).is_some());
    let epochs = streams.map(|record| unpair(record.state.load(Ordering::Acquire)).0);
    let latest = epochs.reduce(|a, b| if serial_lt(a, b) { b } else { a });
    let word = &ledger.header().stream_epoch_next;
    let next = word.load(Ordering::Acquire) as u32;
    if let Some(latest) = latest.filter(|latest| !serial_lt(*latest, next)) {
        store(Point::DrawEpoch, word, u64::from(latest.wrapping_add(1)));
    }
}

impl Facts {
    /// Takes a ledger over.
    pub fn adopt(ledger: Ledger<'static>) -> Self {
        let valid_stream = |key| stream_of(key).is_some();
        keep_ahead(ledger);
        let valid_peer = |key| peer_of(key).is_some();
        let free_peers = free_list(ledger.peers().iter().map(|r| &r.key), valid_peer);
        let peers = ledger
            .peers()
            .iter()
            .enumerate()
            .filter_map(|(index, r)| Some((peer_of(r.key.load(Ordering::Acquire))?, index as u32)))
            .collect();
        Self {
            ledger,
            free_sends: free_list(ledger.send_streams().iter().map(|r| &r.key), valid_stream),
            free_receives: free_list(
                ledger.receive_streams().iter().map(|r| &r.key),
                valid_stream,
            ),
            free_peers,
            peers,
        }
    }

    /// The ledger.
    pub fn ledger(&self) -> Ledger<'static> {
        self.ledger
    }

    /// Raises the engine's epoch: the first store of a new engine. `first` is one more than the supervisor knows to have been used (0: it does not
    /// know); what is not it or soon after was not written by a sound engine, and peers would never believe an epoch from before.
    pub fn raise_engine_epoch(&self, first: u32) -> u32 {
        let word = &self.ledger.header().engine_epoch;
        let next = (word.load(Ordering::Acquire) as u32).wrapping_add(1);
        let is_sound = first == 0 || next.wrapping_sub(first) < UNHEARD_MAX;
        // 0 is never used, so that a peer's "unknown" cannot be it.
        let epoch = if is_sound { next } else { first }.max(1);
        store(Point::EngineEpoch, word, u64::from(epoch));
        epoch
    }

    /// Draws a stream epoch and leaves out as many before it as it is told; durable before it is used, never 0.
    pub fn draw_epoch(&self, leave_out: u32) -> u32 {
        let word = &self.ledger.header().stream_epoch_next;
        let next = word.load(Ordering::Acquire) as u32;
        let epoch = next.wrapping_add(leave_out).max(1);
        store(Point::DrawEpoch, word, u64::from(epoch) + 1);
        epoch
    }

    /// Opens a sending stream's record.
    pub fn open_send(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        next: u32,
    ) -> Result<RecordId, TableFull> {
        let index = self.free_sends.pop().ok_or(TableFull)?;
        let record = &self.ledger.send_streams()[index as usize];
        store(Point::OpenSendFields, &record.incarnation, incarnation);
        store(Point::OpenSendFields, &record.state, pair(epoch, next));
        store(Point::OpenSendKey, &record.key, key_of(stream));
        Ok(RecordId(index))
    }

    /// Opens a receiving stream's record. `instance` is the generation of the port that receives; 0 if it is not open.
    pub fn open_receive(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        instance: u32,
        epoch: u32,
        base: u32,
    ) -> Result<RecordId, TableFull> {
        let index = self.free_receives.pop().ok_or(TableFull)?;
        let record = &self.ledger.receive_streams()[index as usize];
        store(Point::OpenReceiveFields, &record.incarnation, incarnation);
        store(
            Point::OpenReceiveFields,
            &record.epoch,
            pair(instance, epoch),
        );
        store(Point::OpenReceiveFields, &record.base, pair(0, base));
        store(Point::OpenReceiveKey, &record.key, key_of(stream));
        Ok(RecordId(index))
    }

    /// Frees a sending stream's record.
    pub fn free_send(&mut self, record: RecordId) {
        if let Some(fact) = self.ledger.send_streams().get(record.0 as usize)
            && fact.key.load(Ordering::Relaxed) != 0
        {
            store(Point::FreeSend, &fact.key, 0);
            self.free_sends.push(record.0);
        }
    }

    /// Frees a receiving stream's record.
    pub fn free_receive(&mut self, record: RecordId) {
        if let Some(fact) = self.ledger.receive_streams().get(record.0 as usize)
            && fact.key.load(Ordering::Relaxed) != 0
        {
            store(Point::FreeReceive, &fact.key, 0);
            self.free_receives.push(record.0);
        }
    }

    /// Stores a peer's incarnation and epoch floor. The floor carries half of the incarnation it belongs to, so between the two
    /// stores of a new incarnation there is no floor rather than a wrong one.
    pub fn store_peer(
        &mut self,
        peer: Peer,
        incarnation: u64,
        floor: u32,
    ) -> Result<(), TableFull> {
        let floor = pair(incarnation as u32, floor);
        if let Some(index) = self.peers.get(&peer) {
            let record = &self.ledger.peers()[*index as usize];
            if record.incarnation.load(Ordering::Relaxed) != incarnation {
                store(Point::PeerIncarnation, &record.incarnation, incarnation);
            }
            if record.floor.load(Ordering::Relaxed) != floor {
                store(Point::PeerFloor, &record.floor, floor);
            }
            return Ok(());
        }
        let index = self.free_peers.pop().ok_or(TableFull)?;
        let record = &self.ledger.peers()[index as usize];
        store(Point::PeerIncarnation, &record.incarnation, incarnation);
        store(Point::PeerFloor, &record.floor, floor);
        store(
            Point::PeerKey,
            &record.key,
            PeerRecord::key(peer.node.0, peer.queue),
        );
        self.peers.insert(peer, index);
        Ok(())
    }

    /// Peers with incarnation and floor, for [`portolan_transport::host::Durable`].
    pub fn peers(&self) -> impl Iterator<Item = (Peer, u64, u32)> {
        self.peers.keys().filter_map(|peer| {
            let (incarnation, floor) = self.load_peer(*peer)?;
            Some((*peer, incarnation, floor))
        })
    }

    /// A peer's incarnation and epoch floor.
    pub fn load_peer(&self, peer: Peer) -> Option<(u64, u32)> {
        let record = &self.ledger.peers()[*self.peers.get(&peer)? as usize];
        let incarnation = record.incarnation.load(Ordering::Acquire);
        let (owner, floor) = unpair(record.floor.load(Ordering::Acquire));
        let fits = owner == incarnation as u32;
        Some((incarnation, if fits { floor } else { 0 }))
    }
}

fn peer_of(key: u64) -> Option<Peer> {
    let (node, queue) = PeerRecord::decode_key(key)?;
    Some(Peer {
        node: NodeId::new(node)?,
        queue,
    })
}

/// A new ledger of small tables.
#[cfg(test)]
pub(super) fn small_ledger() -> Ledger<'static> {
    let geometry = portolan_abi::ledger::LedgerGeometry {
        peers: 4,
        frames: 4,
        send_streams: 4,
        receive_streams: 4,
    };
    let mapping = portolan_abi::memory::LedgerMapping::create(geometry)
        .and_then(|fd| portolan_abi::memory::LedgerMapping::map(fd, geometry))
        .unwrap();
    let ledger = Box::leak(Box::new(mapping)).ledger();
    ledger.initialise(7);
    ledger
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two streams, then an engine that goes wrong writes over what the next one is to get. Expect: a successor's comes after both; if nothing was
    // written over, it is as it was.
    #[test]
    fn a_streams_epoch_comes_after_those_there_are() {
        let ledger = small_ledger();
        let mut facts = Facts::adopt(ledger);
        for remote in [1, 2] {
            let stream = StreamKey {
                local: PortId(1),
                node: NodeId(2),
                remote: PortId(remote),
                priority: Priority::Low,
            };
            let epoch = facts.draw_epoch(0);
            facts.open_send(stream, 9, epoch, 1).unwrap();
        }
        let word = &ledger.header().stream_epoch_next;
        let sound = word.load(Ordering::Relaxed);
        Facts::adopt(ledger);
        assert_eq!(word.load(Ordering::Relaxed), sound);
        for damage in [0, 1, sound - 1] {
            word.store(damage, Ordering::Relaxed);
            assert_eq!(u64::from(Facts::adopt(ledger).draw_epoch(0)), sound);
        }
    }

    // What the supervisor knows and what the ledger says. Expect: the ledger's, unless no sound engine wrote it.
    #[test]
    fn an_engines_epoch_comes_after_its_predecessors() {
        let ledger = small_ledger();
        let facts = Facts::adopt(ledger);
        let word = &ledger.header().engine_epoch;
        let table = [
            (0, 0, 1),
            (5, 0, 6),
            (5, 6, 6),
            (7, 6, 8), // two died before they were heard of
            (0, 6, 6),
            (4, 6, 6),
            (1 << 31, 6, 6),
            (u64::from(u32::MAX), 0, 1),
            (u64::from(u32::MAX), u32::MAX, 1),
        ];
        for (said, first, expected) in table {
            word.store(said, Ordering::Relaxed);
            assert_eq!(facts.raise_engine_epoch(first), expected, "{said}, {first}");
        }
    }
}
