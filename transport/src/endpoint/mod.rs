//! One engine's end of the transport: docs/spec/transport.md, whose sections the files cite. Who is who is transport.md §1.1; what a
//! lying peer says is judged where it is heard, transport.md §15.
//!
//! | file | holds |
//! |---|---|
//! | `peer`, `round_trip` | liveness of one peer, and how long it takes to it and back |
//! | `credit`, `congestion` | who may fill receive buffers unasked, and how fast while the network is busy |
//! | `path` | how long frames to a peer may be |
//! | `hello` | how two engines come to know each other, RESET, restarts and takeovers |
//! | `send_stream`, `submit`, `answers`, `loss`, `want`, `settle` | the sending end: state, commands, what receivers answer, what that says is lost or had no buffer, how sends end |
//! | `receive_stream`, `opening`, `arrival`, `accept`, `commit`, `long_message`, `grants`, `data` | the receiving end: state, streams opening, first chunks, buffers, commits and acknowledgements, ranges, who may send more, DATA |
//! | `frame`, `late` | a received frame, chunk by chunk; acknowledgements that wait until what came with them is delivered |
//! | `ports` | ports opening and closing, tokens appearing |
//! | `transmit`, `turn`, `burst`, `lone`, `control`, `train` | what goes into the next frame; short messages in a row; one alone; the next frame of many that differ only in their place |
//! | `timeout`, `stream_timeout`, `timers` | deadlines |
//! | `restore`, `recall` | taking over from the ledger; idle peers forgotten and met again |
//! | `counters`, `slab`, `heap` | what happened; tables |

mod accept;
mod answers;
mod arrival;
mod bare;
mod burst;
mod commit;
mod congestion;
mod control;
mod counters;
mod credit;
mod data;
mod frame;
mod grants;
mod heap;
mod hello;
mod late;
mod lone;
mod lone_arrival;
mod long_message;
mod loss;
mod opening;
mod path;
mod peer;
mod ports;
mod recall;
mod receive_stream;
mod restore;
mod round_trip;
mod send_stream;
mod settle;
mod slab;
mod stream_timeout;
mod submit;
mod timeout;
mod timers;
mod train;
mod transmit;
mod turn;
mod want;

#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

pub use counters::Counters;

use crate::ident::{Nanos, NodeId, PORTS, Peer, PortId, Priority, StreamKey};
use crate::policy::Policy;
use crate::wire::chunk::PolicyWire;
use crate::wire::{self, StreamRef};

use credit::Shares;
use grants::Grants;
use hello::{Resets, truncate};
use late::Late;
use long_message::LongMessage;
use peer::{PeerEntry, Reply};
use receive_stream::ReceiveStream;
use send_stream::{MessageState, SendStream};
use slab::Slab;
use timers::Timers;
use train::Train;

/// NACK: the number did not come.
const NACK_GAP: u8 = 1;
/// NACK: no buffer now.
const NACK_NO_BUFFER: u8 = 2;
/// NACK: the payload did not match its checksum.
const NACK_CORRUPT: u8 = 3;

/// What an endpoint is told once.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// This engine's queue.
    pub queue: u8,
    /// Engines on this node.
    pub queues: u8,
    /// This node's incarnation; never 0.
    pub incarnation: u64,
    /// This engine's epoch, one more than its predecessor's.
    pub engine_epoch: u32,
    /// Hash of the cluster's name.
    pub cluster: u64,
    /// This node's name.
    pub name: String,
    /// Longest frame the path's encapsulation leaves for the transport, bytes.
    pub max_frame: u16,
    /// Most peers (node and queue) at once.
    pub max_peers: usize,
    /// Number of a new stream's first message; simulations begin near the wrap.
    pub first_number: u32,
    /// Protocol policy.
    pub policy: Policy,
}

/// A frame [`Endpoint::poll_transmit`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Where it goes. May be this very node: the engine loops it back.
    pub peer: Peer,
    /// Bytes written.
    pub len: usize,
    /// Highest priority among its chunks.
    pub priority: Priority,
    /// Same for all frames of a flow; the engine derives the UDP source port from it.
    pub flow: u16,
}

/// Why a frame, or the rest of it, was dropped. Each has its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The wire layer refused it.
    Wire(wire::WireError),
    /// Addressed to another node or queue.
    NotForUs,
    /// From a node nobody told us of, or a queue that node does not have.
    UnknownPeer,
    /// An incarnation in the header is not the one we know; a RESET answers it.
    WrongIncarnation,
    /// From an engine that has a successor.
    StaleEngine,
    /// No association with the peer yet.
    NotAssociated,
}

/// How far the association with a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nothing asked for yet, or unreachable and nobody wants it now.
    Idle,
    /// HELLO is on its way, repeated until answered.
    Connecting,
    /// Both incarnations are known to both sides.
    Up,
    /// The peer speaks another version, policy or cluster.
    Incompatible,
}

/// What does not fit between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// They are of different clusters.
    Cluster,
    /// No common wire version.
    Version,
    /// Policies that cannot work together; the field.
    Policy(&'static str),
}

/// A peer as `status` shows it.
#[derive(Clone, Copy, Debug)]
pub struct PeerStatus<'a> {
    /// Node and queue.
    pub peer: Peer,
    /// Its name from HELLO; empty before.
    pub name: &'a str,
    /// The association.
    pub state: PeerState,
    /// Why it is incompatible.
    pub misfit: Option<Misfit>,
    /// Its incarnation; 0 while unknown.
    pub incarnation: u64,
    /// Its engine's epoch.
    pub engine_epoch: u32,
    /// Smoothed round trip, nanoseconds; 0 before the first sample.
    pub rtt_ns: u64,
    /// The smallest round trip of the last ten to twenty seconds.
    pub min_rtt_ns: u64,
    /// Retransmission timeout now, nanoseconds.
    pub rto_ns: u64,
    /// Messages sent and not settled.
    pub in_flight: u32,
    /// Receive buffers we may still fill unasked.
    pub credit: u32,
    /// Receive buffers of ours it may still fill unasked.
    pub given: u32,
    /// Receive buffers that may be under way unasked, as the network's delay has it; credit bounds it too.
    pub congestion_window: u32,
    /// Messages of a stream that may be under way: the smaller of both ends' windows.
    pub window_messages: u32,
    /// What it said of its policy; zeros before HELLO.
    pub policy: PolicyWire,
    /// Longest frame sent to it.
    pub max_frame: u16,
}

/// What is configured of a node.
#[derive(Clone, Copy, Debug)]
struct Node {
    max_frame: u16,
    /// How many engines it has, once it said so.
    queues: Option<u8>,
}

/// One engine's end of the transport: all streams from and to the ports of one queue.
///
/// Sans-IO: the caller owns clock, sockets and memory. Frames, commands and `now` go in; frames come out of
/// [`poll_transmit`](Self::poll_transmit); deliveries, completions and every durable fact go through the [`Host`](crate::Host) passed along.
/// `now` never goes backwards. Nothing blocks; nothing is allocated once tables and queues have grown to the load.
///
/// # The order of calls
///
/// 1. [`new`](Self::new), or [`restore`](Self::restore) after a takeover; then [`set_node`](Self::set_node) for every node that may
///    be talked to, this one included, and [`port_opened`](Self::port_opened) for every port that is open.
/// 2. In a loop, in any order and as often as there is something: [`handle_frame`](Self::handle_frame) for every frame received,
///    commands ([`submit`](Self::submit), [`cancel`](Self::cancel), [`resume_sending`](Self::resume_sending),
///    [`drop_sends`](Self::drop_sends)) and events ([`buffer_provided`](Self::buffer_provided), ports, nodes);
///    [`handle_timeout`](Self::handle_timeout) when [`poll_timeout`](Self::poll_timeout) is due.
/// 3. After any of these, [`poll_transmit`](Self::poll_transmit) until it returns `None` (or the transmit ring is full; nothing is
///    lost by calling later), then [`poll_timeout`](Self::poll_timeout).
///
/// Frames for this very node come out of `poll_transmit` too; the caller loops them back.
///
/// # What is relied on
///
/// A number is used only after [`Host::accept`](crate::Host::accept) returned; acknowledged only after [`Host::commit`](crate::Host::commit) or [`Host::commit_base`](crate::Host::commit_base) did.
/// A host that stops (is killed) inside any of its methods and is restored from what it stored loses and doubles nothing.
///
/// # Bounds
///
/// Peers: `max_peers`. Streams: what the host's tables hold. Messages accepted per receiving stream: the policy's window.
/// Sends: what the host submits. Received frames are never kept.
pub struct Endpoint {
    config: Config,
    /// The policy, as far as grants go ([`Endpoint::grant_at_least`]).
    granting: Policy,
    nodes: BTreeMap<NodeId, Node>,
    peer_index: BTreeMap<Peer, u32>,
    peers: Slab<PeerEntry>,
    send_index: BTreeMap<StreamKey, u32>,
    send: Slab<SendStream>,
    receive_index: BTreeMap<StreamKey, u32>,
    /// The peer whose frame was believed last, since nodes were removed or peers forgotten.
    heard: Option<u32>,
    /// The receiving stream that a frame named last, since ports changed hands: short messages of one stream come by the dozen.
    named: Option<u32>,
    /// The acknowledgement that came with the messages of the last frame.
    late: Option<Late>,
    receive: Slab<ReceiveStream>,
    longs: Slab<LongMessage>,
    grants: Grants,
    shares: Shares,
    timers: Timers,
    /// The sending stream that the last send was of: sends of one stream come by the dozen.
    last_sent: u32,
    /// The payloads of the frame being written; kept for its memory.
    sources: Vec<turn::Source>,
    /// The next frame, as long as nothing happens.
    train: Option<Train>,
    #[cfg(test)]
    shortcuts: Shortcuts,
    /// Peers with something to send, by priority.
    ready: [VecDeque<u32>; 2],
    /// Bytes of high priority until it is low's turn, negative.
    low_due: i64,
    resets: Resets,
    open_ports: [bool; PORTS as usize],
    /// Per port, as far as some ever waited, receiving streams that wait for a token.
    waiting: Vec<VecDeque<u32>>,
    /// Which peers had streams when idle ones were looked for last, and when that was.
    swept: Vec<bool>,
    swept_at: Nanos,
    /// Sending streams with cancelled messages to act on.
    cancelled: VecDeque<u32>,
    orphans: restore::Orphans,
    /// Messages accepted so far: their age.
    age: u64,
    /// The receiving stream asked last whether its sender still knows it.
    ask_next: u32,
    counters: Counters,
}

/// What went another way than the general one.
#[cfg(test)]
#[derive(Debug, Default)]
struct Shortcuts {
    /// Nothing may.
    off: bool,
    /// Frames of trains, but for the first of each.
    trains: u64,
    /// Messages of bursts.
    bursts: u64,
    /// Sends accepted in one go with the one before them.
    more: u64,
    /// Frames with one message of the shortest way; those with an acknowledgement in front of it.
    lone: [u64; 2],
    /// Frames with a message behind an acknowledgement, read at fixed places.
    arrivals: u64,
}

impl Endpoint {
    /// An endpoint without any history.
    pub fn new(config: Config, now: Nanos) -> Self {
        Self {
            granting: config.policy,
            nodes: BTreeMap::new(),
            peer_index: BTreeMap::new(),
            peers: Slab::new(),
            send_index: BTreeMap::new(),
            send: Slab::new(),
            receive_index: BTreeMap::new(),
            heard: None,
            named: None,
            late: None,
            receive: Slab::new(),
            longs: Slab::new(),
            grants: Grants::default(),
            shares: Shares::default(),
            timers: Timers::default(),
            last_sent: slab::NONE,
            // More than a frame of 9,000 bytes holds of messages of 64.
            sources: Vec::with_capacity(256),
            train: None,
            #[cfg(test)]
            shortcuts: Shortcuts::default(),
            ready: [VecDeque::new(), VecDeque::new()],
            low_due: transmit::LOW_DUE_AT_FIRST,
            resets: Resets::new(now),
            open_ports: [false; PORTS as usize],
            waiting: Vec::new(),
            swept: Vec::new(),
            swept_at: 0,
            cancelled: VecDeque::new(),
            orphans: restore::Orphans::default(),
            age: 0,
            ask_next: 0,
            counters: Counters::default(),
            config,
        }
    }

    /// Which stream of ours a chunk names, if the ports belong to the engines that talk.
    fn key_of(&self, peer: u32, stream: &StreamRef, we_send: bool) -> Option<StreamKey> {
        let entry = self.peers.get(peer)?;
        let (local, remote) = if we_send {
            (stream.sender_port, stream.receiver_port)
        } else {
            (stream.receiver_port, stream.sender_port)
        };
        let queues = self.nodes.get(&entry.id.node).and_then(|node| node.queues);
        let theirs =
            queues.is_none_or(|queues| remote % u16::from(queues) == u16::from(entry.id.queue));
        (theirs && self.owns(PortId(local))).then_some(StreamKey {
            local: PortId(local),
            node: entry.id.node,
            remote: PortId(remote),
            priority: if stream.priority == 0 {
                Priority::Low
            } else {
                Priority::High
            },
        })
    }

    /// Whether the port belongs to this engine.
    fn owns(&self, port: PortId) -> bool {
        port.0 < PORTS
            && port.0 % u16::from(self.config.queues.max(1)) == u16::from(self.config.queue)
    }

    fn reply(&mut self, peer: u32, reply: Reply) {
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.reply(reply);
            self.mark_ready(peer, Priority::High);
        }
    }

    /// The peer has something to send at this priority.
    fn mark_ready(&mut self, peer: u32, priority: Priority) {
        let class = priority as usize;
        if let Some(entry) = self.peers.get_mut(peer)
            && !entry.ready[class]
        {
            entry.ready[class] = true;
            self.ready[class].push_back(peer);
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called next, absolute; due if not after `now`. May be earlier than
    /// anything really happens.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        match &self.late {
            Some(late) => Some(late.came_at),
            None => self.timers.next(),
        }
    }

    /// What happened since the endpoint was made.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What the endpoint was told.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How many peers there are, idle ones included: whoever may hold credit, but for those that were forgotten.
    #[inline]
    pub fn known_peers(&self) -> usize {
        self.peers.len()
    }

    /// Every peer there was an attempt to talk to.
    pub fn peers(&self) -> impl Iterator<Item = PeerStatus<'_>> {
        let mut in_flight = alloc::vec![0u32; self.peers.end() as usize];
        for (_, stream) in self.send.iter() {
            if let Some(sum) = in_flight.get_mut(stream.peer as usize) {
                *sum += stream.high.wrapping_sub(stream.base);
            }
        }
        self.peers.iter().map(move |(slot, entry)| PeerStatus {
            peer: entry.id,
            name: &entry.name,
            state: entry.state,
            misfit: entry.misfit,
            incarnation: entry.incarnation,
            engine_epoch: entry.engine_epoch.unwrap_or(0),
            rtt_ns: entry.rtt.srtt,
            min_rtt_ns: entry.rtt.min,
            rto_ns: entry.rtt.rto(&self.config.policy, 0),
            in_flight: in_flight.get(slot as usize).copied().unwrap_or(0),
            credit: entry.credit.left(),
            given: entry.credit.given(),
            congestion_window: entry.window.size(&self.config.policy),
            window_messages: entry.remote_window.min(self.config.policy.window_messages),
            policy: entry.remote_policy,
            max_frame: entry.max_frame,
        })
    }

    /// Whether a long message is on its way to us: it may be granted more, or its sender may use what it was granted.
    #[inline]
    pub fn is_placing(&self) -> bool {
        self.longs.len() > 0
    }

    /// Sends accepted whose status is not told yet.
    pub fn unsettled(&self) -> usize {
        let open = |m: &&send_stream::Message| {
            matches!(m.state, MessageState::Live | MessageState::Null(_))
        };
        let sends = self
            .send
            .iter()
            .map(|(_, s)| s.queue.iter().filter(open).count());
        sends.sum()
    }

    /// Panics when an internal invariant is broken. For tests, after every step.
    pub fn check_consistency(&self) {
        self.timers.check_consistency();
        self.check_train();
        self.grants.check_consistency(&self.longs, &self.granting);
        self.check_shares();
        let mut placing = 0;
        for (slot, stream) in self.receive.iter() {
            stream.check_consistency();
            assert_eq!(self.receive_index.get(&stream.key), Some(&slot));
            for (index, incoming) in stream.messages.iter().enumerate() {
                if let receive_stream::Kind::Placing(row) = incoming.kind {
                    let long = self.longs.get(row);
                    let names = long.map(|long| (long.stream, long.number));
                    assert_eq!(names, Some((slot, stream.base.wrapping_add(index as u32))));
                    placing += 1;
                }
            }
        }
        assert_eq!(
            self.longs.len(),
            placing,
            "a long message without its stream"
        );
        for (slot, stream) in self.send.iter() {
            stream.check_consistency();
            assert_eq!(self.send_index.get(&stream.key), Some(&slot));
        }
        for (slot, entry) in self.peers.iter() {
            assert_eq!(self.peer_index.get(&entry.id), Some(&slot));
            let mine = |s: &&(u32, &ReceiveStream)| s.1.peer == slot;
            let count: usize = self
                .receive
                .iter()
                .filter(|s| mine(&s))
                .map(|(_, s)| s.messages.iter().filter(|m| m.is_pending()).count())
                .sum();
            assert_eq!(entry.placing as usize, count, "placing");
            assert!(entry.incarnation == 0 || truncate(entry.incarnation) != 0);
        }
    }
}
