//! The tables of the ledger: which records are free, and the facts that are not part of a message's order (`commit.rs` has those).
//!
//! A record is opened by storing its fields and then its key, and freed by storing key 0 first, so a record whose key is not 0 is
//! whole. The free lists are rebuilt from the keys; a key that we would not have written frees its record: an implausible
//! record fails its own stream, never the node.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use portolan_abi::ledger::{Ledger, PeerRecord, decode_stream_key, pair, stream_key, unpair};
use portolan_transport::host::TableFull;
use portolan_transport::ident::{NodeId, Peer, PortId, Priority, RecordId, StreamKey};

use super::commit_point::{Point, store};

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

impl Facts {
    /// Takes a ledger over.
    pub fn adopt(ledger: Ledger<'static>) -> Self {
        let valid_stream = |key| stream_of(key).is_some();
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

    /// Raises the engine's epoch: the first store of a new engine.
    pub fn raise_engine_epoch(&self) -> u32 {
        let word = &self.ledger.header().engine_epoch;
        // 0 is never used, so that a peer's "unknown" cannot be it.
        let epoch = (word.load(Ordering::Acquire) as u32).wrapping_add(1).max(1);
        store(Point::EngineEpoch, word, u64::from(epoch));
        epoch
    }

    /// Draws a stream epoch; durable before it is used, never 0.
    pub fn draw_epoch(&self) -> u32 {
        let word = &self.ledger.header().stream_epoch_next;
        let epoch = (word.load(Ordering::Acquire) as u32).max(1);
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
