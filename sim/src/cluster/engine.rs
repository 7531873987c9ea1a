//! An engine and what belongs to it: its endpoint, its host, its rings, its clock.

use std::collections::VecDeque;

use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::ident::{Nanos, Peer, PortId, SendId, StreamKey};

use crate::harness::host::TestHost;

/// What an application or the supervisor asks an engine to do, at its next turn.
#[derive(Clone, Copy, Debug)]
pub enum Command {
    Provided(PortId),
    Opened(PortId),
    Closed(PortId),
    Cancel(SendId),
    Resume(StreamKey),
    Drop(StreamKey),
    /// Long messages are granted at least so many bytes: it goes round for frames, or with 0 does not any more.
    Grant(u32),
    /// A node restarted: its frames may be this long.
    Node(portolan_transport::ident::NodeId),
}

/// One engine.
pub struct Engine {
    pub peer: Peer,
    pub config: Config,
    /// None while it is dead.
    pub endpoint: Option<Endpoint>,
    pub host: TestHost,
    pub commands: VecDeque<Command>,
    /// Frames in the receive ring, and the buffers they fill.
    pub receive_ring: VecDeque<u32>,
    pub receive_buffers: u32,
    /// Frames in the transmit ring: when each has left, and its descriptors.
    pub transmit_ring: VecDeque<(Nanos, u32)>,
    pub transmit_used: u32,
    /// A turn is due then; `MAX` for none.
    pub wake_at: Nanos,
    /// It works until then.
    pub busy_until: Nanos,
    /// It gets no processor until then.
    pub stopped_until: Nanos,
    /// When its successor takes over, if it is dead.
    pub reborn_at: Nanos,
    /// Its applications will read their events.
    pub read_due: bool,
    /// How long they take to.
    pub read_lag: Nanos,
    /// Turns that did nothing, in a row.
    pub idle_turns: u32,
    /// Bumped at every boot, so that what was meant for its predecessor is known.
    pub turns: u64,
}

impl Engine {
    pub fn new(peer: Peer, config: Config, endpoint: Endpoint, host: TestHost) -> Self {
        Self {
            peer,
            config,
            endpoint: Some(endpoint),
            host,
            commands: VecDeque::new(),
            receive_ring: VecDeque::new(),
            receive_buffers: 0,
            transmit_ring: VecDeque::new(),
            transmit_used: 0,
            wake_at: Nanos::MAX,
            busy_until: 0,
            stopped_until: 0,
            reborn_at: Nanos::MAX,
            read_due: false,
            read_lag: 0,
            idle_turns: 0,
            turns: 0,
        }
    }

    /// Forgets descriptors whose frames have left by `now`.
    pub fn reap(&mut self, now: Nanos) {
        while let Some(&(left, descriptors)) = self.transmit_ring.front() {
            if left > now {
                break;
            }
            self.transmit_used -= descriptors;
            self.transmit_ring.pop_front();
        }
    }
}
