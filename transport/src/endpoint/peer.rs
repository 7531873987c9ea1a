//! A peer: one engine of one node, and what is volatile about talking to it.
//!
//! Problem: every stream with an engine shares its liveness, round trip time and receive buffers. transport.md §1.1, §2.7; the round trip is in
//! `round_trip`, credit in `credit`.
//!
//! Idea: an entry per peer there is something to say to. What outlives it is its incarnation and its epoch floor, in the ledger.
//!
//! Invariants: everything here but `incarnation`, `retired` and `floor` may be lost.

use alloc::collections::VecDeque;
use alloc::string::String;

use super::congestion::Window;
use super::credit::{BUFFER_BYTES, Credit};
use super::hello::truncate;
use super::path::Path;
use super::round_trip::{Heard, Rtt, Stamps};
use super::{Misfit, PeerState};
use crate::ident::{Nanos, Peer, serial_lt};
use crate::policy::Policy;
use crate::wire::chunk::PolicyWire;
use crate::wire::{Chunk, Ends, FrameHeader, Rows, StreamRef};

/// Answers about streams we have no record of, waiting per peer.
const REPLIES_MAX: usize = 64;
/// Superseded incarnations remembered: late HELLOs of theirs must not bring them back.
const RETIRED: usize = 4;

/// An answer that needs no stream record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Refused(StreamRef),
    Closed(StreamRef),
    PortClosed(StreamRef, u32),
    NoBuffer(StreamRef, u32),
    Close(StreamRef, u32),
    PathAck(u16, u32),
}

impl Reply {
    pub(super) fn chunk(self) -> Chunk<'static> {
        match self {
            Self::Refused(stream) => Chunk::Refused { stream },
            Self::Closed(stream) => Chunk::Closed { stream },
            Self::PortClosed(stream, base) => Chunk::PortClosed { stream, base },
            Self::Close(stream, next) => Chunk::Close { stream, next },
            Self::NoBuffer(stream, expected) => Chunk::Nack {
                stream,
                expected,
                reason: super::NACK_NO_BUFFER,
            },
            Self::PathAck(size, nonce) => Chunk::PathAck { size, nonce },
        }
    }
}

/// One peer.
#[derive(Clone, Debug)]
pub(super) struct PeerEntry {
    pub id: Peer,
    pub state: PeerState,
    /// In full; 0 while unknown.
    pub incarnation: u64,
    retired: [u64; RETIRED],
    /// The ledger was asked about it.
    pub recalled: bool,
    pub engine_epoch: Option<u32>,
    /// When the first frame of that epoch came, as frames are stamped.
    pub epoch_since: Nanos,
    /// A START below is refused; durable. 0 until an epoch was forgotten.
    pub floor: u32,
    pub name: String,
    /// Why it and we do not talk.
    pub misfit: Option<Misfit>,
    /// What HELLO said of its policy.
    pub remote_policy: PolicyWire,
    /// Messages per stream it accepts.
    pub remote_window: u32,
    /// First bytes of a long message that it takes without a grant.
    pub remote_unasked: u32,
    /// How it reads messages in a row.
    pub rows: Rows,
    /// It reads bare frames.
    pub reads_bare: bool,
    /// The clock's reading when the last frame left for it whose header says all there is to say; `MAX` if none has.
    pub told_at: Nanos,
    /// Longest frame it says it can receive.
    pub remote_max_frame: u16,
    /// Longest frame sent to it.
    pub max_frame: u16,
    /// What may prove longer ones.
    pub path: Path,

    // HELLO
    pub hello_due: bool,
    pub hello_ack_due: bool,
    /// What the next HELLO and HELLO-ACK echo.
    pub echo: u64,
    /// A HELLO of ours is unanswered; only then a HELLO-ACK is believed.
    pub hello_outstanding: bool,
    /// When the first of them left.
    pub asked_at: Nanos,
    /// When to repeat it.
    pub hello_at: Nanos,
    pub hello_tries: u8,
    /// HELLOs were exchanged by this engine: queues and frame length are known.
    pub greeted: bool,

    // liveness
    pub rtt: Rtt,
    pub stamps: Stamps,
    /// What the frame admitted last that was not bare says was written after our frames of this time had arrived; 0 if it does not say. Frames
    /// overtake each other: compare a frame's answers with this before another is (`late`), not later.
    pub horizon: Nanos,
    /// Its time stamp: orders the frames of this peer among each other.
    pub written: u32,
    /// Since when something waits for an answer.
    pub waiting_since: Option<Nanos>,
    pub last_heard: Nanos,
    /// Messages of this peer that hold a buffer or wait for their turn.
    pub placing: u32,

    // credit
    pub credit: Credit,
    pub window: Window,
    /// Requests to it travel without data.
    pub crowded: bool,

    // work
    /// Receiving streams with chunks to send.
    pub control: VecDeque<u32>,
    /// Delayed acknowledgements go out by then; `MAX` if none wait.
    pub ack_due: Nanos,
    pub acks_pending: u32,
    /// Sending streams with control chunks to send.
    pub sender_control: VecDeque<u32>,
    pub replies: VecDeque<Reply>,
    /// Sending streams with messages to send, by priority.
    pub active: [VecDeque<u32>; 2],
    /// The stream that waits until there is credit for all of a message: what comes is kept for it.
    pub saver: Option<u32>,
    /// Whether the peer is in the endpoint's ready queue of that priority.
    pub ready: [bool; 2],
}

impl PeerEntry {
    pub(super) fn new(id: Peer, now: Nanos) -> Self {
        Self {
            id,
            state: PeerState::Idle,
            incarnation: 0,
            retired: [0; RETIRED],
            recalled: false,
            engine_epoch: None,
            epoch_since: 0,
            floor: 0,
            name: String::new(),
            misfit: None,
            remote_policy: PolicyWire::default(),
            remote_window: 1,
            remote_unasked: 0,
            rows: Rows::InFull,
            reads_bare: false,
            told_at: Nanos::MAX,
            remote_max_frame: u16::MAX,
            max_frame: 0,
            path: Path::default(),
            hello_due: false,
            hello_ack_due: false,
            echo: 0,
            hello_outstanding: false,
            asked_at: 0,
            hello_at: Nanos::MAX,
            hello_tries: 0,
            greeted: false,
            rtt: Rtt::default(),
            stamps: Stamps::default(),
            horizon: 0,
            written: 0,
            waiting_since: None,
            last_heard: now,
            placing: 0,
            credit: Credit::new(now),
            window: Window::new(),
            crowded: false,
            control: VecDeque::new(),
            ack_due: Nanos::MAX,
            acks_pending: 0,
            sender_control: VecDeque::new(),
            replies: VecDeque::new(),
            active: [VecDeque::new(), VecDeque::new()],
            saver: None,
            ready: [false; 2],
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.state == PeerState::Up
    }

    /// Another engine speaks. Before [`Self::void_volatile`], which forgets how our frames are stamped.
    pub(super) fn begin_epoch(&mut self, now: Nanos, engine_epoch: u32) {
        self.engine_epoch = Some(engine_epoch);
        self.epoch_since = self.stamps.newest(now);
    }

    /// Forgets what a replaced or restarted engine no longer knows. `seen` is the first `sent_buffers` of its successor.
    pub(super) fn void_volatile(&mut self, now: Nanos, seen: u32) {
        self.rtt = Rtt::default();
        self.stamps = Stamps::default();
        self.horizon = 0;
        self.credit.void(now, seen);
        self.window = Window::new();
        (self.crowded, self.saver) = (false, None);
        // Its successor may be of an older build, and says what it reads.
        (self.rows, self.reads_bare) = (Rows::InFull, false);
        self.told_at = Nanos::MAX;
        self.replies.clear();
    }

    /// Whether a START of this epoch is refused. Epochs are serial, so 0 cannot mean the lowest: it means none yet.
    pub(super) fn is_below_floor(&self, epoch: u32) -> bool {
        self.floor != 0 && serial_lt(epoch, self.floor)
    }

    /// The floor that keeps `epoch` out.
    pub(super) fn floor_past(epoch: u32) -> u32 {
        epoch.wrapping_add(1).max(1)
    }

    /// `new` takes the place of `old`, which is out of the running unless it proves that it is alive.
    pub(super) fn retire(&mut self, old: u64, new: u64) {
        // If it was out itself, that was a lie.
        for retired in &mut self.retired {
            *retired = if *retired == new { 0 } else { *retired };
        }
        if old != 0 {
            self.retired.rotate_right(1);
            self.retired[0] = old;
        }
    }

    pub(super) fn is_retired(&self, incarnation: u64) -> bool {
        self.retired.contains(&incarnation)
    }

    /// Whether who wrote this has heard us since the engine that is known spoke first: the dead hear nothing.
    pub(super) fn is_alive(&self, now: Nanos, header: &FrameHeader) -> bool {
        self.stamps.echo_of(now, header) > self.epoch_since
    }

    /// What a header of theirs says about time.
    pub(super) fn learn_stamps(&mut self, now: Nanos, header: &FrameHeader) -> Heard {
        let heard = self.stamps.learn(now, header);
        self.horizon = heard.horizon;
        self.written = header.sent_at;
        if let Some(rtt) = heard.rtt {
            self.rtt.sample(now, rtt);
        }
        heard
    }

    /// Our frames that left so long before one that arrived, and did not arrive, are lost.
    pub(super) fn reorder_window(&self) -> Nanos {
        self.rtt.reorder_window()
    }

    /// Receive buffers of theirs that may be filled unasked now.
    pub(super) fn may_fill(&self, policy: &Policy) -> u32 {
        self.credit.left().min(self.window.room(policy))
    }

    /// Whether it wrote a frame with this header, as it is known now.
    pub(super) fn wrote(&self, header: &FrameHeader) -> bool {
        let id = (header.src_node, header.src_queue);
        id == (self.id.node.0, self.id.queue)
            && truncate(self.incarnation) == header.src_incarnation
            && self.engine_epoch == Some(header.engine_epoch)
    }

    /// Whether it makes no difference if what the header of its frame says, but that it wants nothing back, is learned a moment later: nothing waits for it, and both sides may
    /// send half of what they ever may, and a longest frame, without it. `sent`: what the header says of that.
    #[inline]
    pub(super) fn is_at_ease(&self, sent: u32, policy: &Policy) -> bool {
        let longest = usize::from(self.max_frame).div_ceil(BUFFER_BYTES) as u32;
        let enough = (policy.eager_buffers / 2).max(longest);
        self.is_up()
            && self.active.iter().all(|queue| queue.is_empty())
            && self.credit.is_far_from_its_end(sent, enough)
            && self.may_fill(policy) >= enough
    }

    /// Whether a message that the credit does not cover goes as a request: it will not be covered by waiting.
    pub(super) fn asks_first(&self) -> bool {
        self.credit.is_at_its_end(self.stamps.known_to())
    }

    /// What the header of a frame says of who sends it to whom, if it is from this peer, as it is known now, to this engine. `None`: it is not known yet.
    #[inline(always)]
    pub(super) fn ends(&self, node: u16, queue: u8, incarnation: u64) -> Option<Ends> {
        let known = self.incarnation != 0;
        Some(Ends {
            src: (self.id.node.0, self.id.queue),
            dst: (node, queue),
            incarnations: (truncate(self.incarnation), truncate(incarnation)),
            engine_epoch: self.engine_epoch.filter(|_| known)?,
        })
    }

    /// Queues an answer; beyond the bound it is lost like a frame would be.
    pub(super) fn reply(&mut self, reply: Reply) {
        if self.replies.len() < REPLIES_MAX && !self.replies.contains(&reply) {
            self.replies.push_back(reply);
        }
    }
}
