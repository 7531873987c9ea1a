//! How two engines come to know each other, and notice that the other is not who it was.
//!
//! Problem: nodes reboot (new incarnation), engines are replaced (new engine epoch), frames of the dead arrive late, others lie.
//! transport.md §1.1, §2.1, §2.2, §2.3, §2.4, §2.5; FTGM's restart cases (004, Figures 4 and 5).
//!
//! Idea: HELLO says who I am and echoes who I think you are, HELLO-ACK answers it. An incarnation is believed only from a HELLO-ACK
//! that echoes ours in full while a HELLO of ours is unanswered, so neither a late nor a forged frame changes it. To change one
//! that is known, it must also echo the time stamp of that HELLO, which no ghost ever heard; so one that was superseded never comes back, even
//! if we have forgotten that it was. From then on the truncated incarnations in every header are compared: a mismatch is answered by
//! RESET (rate-limited, without any state), which makes a peer say HELLO again. Inside an incarnation a higher engine epoch voids
//! what is volatile, a lower one is a ghost.
//!
//! Rejected: believing HELLO alone (a delayed one of the previous incarnation would end every send); a nonce per HELLO (the echo
//! and the list of superseded incarnations do its work); data before HELLO-ACK.
//!
//! Invariants: state Up implies `incarnation != 0`; `store_peer` before an incarnation is used; records of another incarnation are
//! freed after it.

use alloc::collections::VecDeque;
use alloc::string::String;

use super::timers::Owner;
use super::{Endpoint, FrameError, Misfit, PeerEntry, PeerState};
use crate::host::{Host, Reason};
use crate::ident::{Nanos, NodeId, Peer, Priority, serial_lt};
use crate::policy::{UNASKED_UNIT, WINDOW_MAX, misfit_name};
use crate::wire::chunk::{Hello, features};
use crate::wire::{FrameHeader, Rows};

/// Wire versions this build speaks.
pub(super) const WIRE_MIN: u8 = 1;
pub(super) const WIRE_MAX: u8 = 1;
/// No path is narrower: IPv4's minimum of 576 less IP and UDP headers, rounded down.
pub(super) const MIN_FRAME: u16 = 512;

/// RESET: an incarnation did not match.
pub(super) const RESET_INCARNATION: u8 = 1;
const RESET_CLUSTER: u8 = 2;
const RESET_VERSION: u8 = 3;
const RESET_POLICY: u8 = 4;

/// First repeat of a HELLO; doubles.
const HELLO_REPEAT: Nanos = 10_000_000;
const HELLO_REPEAT_MAX: Nanos = 500_000_000;
/// After so long an incompatible peer is asked again.
const INCOMPATIBLE_FOR: Nanos = 1_000_000_000;

/// An incarnation as frame headers carry it; never 0, which means unknown.
pub(super) fn truncate(incarnation: u64) -> u32 {
    (incarnation as u32).max(1)
}

/// A RESET on its way: it needs no peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reset {
    pub to: Peer,
    pub src_incarnation: u32,
    pub dst_incarnation: u32,
    pub reason: u8,
    pub detail: u8,
}

/// RESETs to send: at most a few per millisecond, whoever provokes them.
#[derive(Clone, Debug)]
pub(super) struct Resets {
    pub queue: VecDeque<Reset>,
    tokens: u32,
    refilled_at: Nanos,
}

impl Resets {
    const BURST: u32 = 16;

    pub(super) fn new(now: Nanos) -> Self {
        Self {
            queue: VecDeque::new(),
            tokens: Self::BURST,
            refilled_at: now,
        }
    }

    fn push(&mut self, now: Nanos, reset: Reset) {
        let millis = now.saturating_sub(self.refilled_at) / 1_000_000;
        if millis > 0 {
            let refill = u32::try_from(millis).unwrap_or(u32::MAX);
            self.tokens = self.tokens.saturating_add(refill).min(Self::BURST);
            self.refilled_at = now;
        }
        if self.tokens > 0 {
            self.tokens -= 1;
            self.queue.push_back(reset);
        }
    }
}

impl Endpoint {
    /// A node that may be talked to, and the longest frame its path carries. This node itself included.
    pub fn set_node(&mut self, now: Nanos, node: NodeId, max_frame: u16) {
        self.train = None;
        let max_frame = max_frame.max(MIN_FRAME);
        let queues = self.nodes.get(&node).and_then(|known| known.queues);
        self.nodes.insert(node, super::Node { max_frame, queues });
        for slot in 0..self.peers.end() {
            if self
                .peers
                .get(slot)
                .is_some_and(|entry| entry.id.node == node)
            {
                self.bound_frames(slot);
                // Only a restored engine knows peers before their nodes: it greets them at once.
                if self
                    .peers
                    .get(slot)
                    .is_some_and(|entry| entry.incarnation != 0 && !entry.greeted)
                {
                    self.connect(now, slot);
                }
            }
        }
        if self.seeks_peer(node) {
            self.connect_node(now, node);
        }
    }

    /// A node that is not talked to any more: its sends end, half-placed messages are forgotten, frames of it are dropped.
    pub fn remove_node<H: Host>(&mut self, now: Nanos, node: NodeId, host: &mut H) {
        self.train = None;
        self.catch_up(now, host);
        self.nodes.remove(&node);
        self.heard = None;
        for slot in 0..self.peers.end() {
            if self
                .peers
                .get(slot)
                .is_some_and(|entry| entry.id.node == node)
            {
                self.fail_peer(now, slot, Reason::NoRoute, host);
            }
        }
        self.fail_unresolved(now, node, Reason::NoRoute, host);
    }

    /// The peer's slot; made if there is room.
    pub(super) fn peer_slot(&mut self, now: Nanos, id: Peer) -> Option<u32> {
        if let Some(&slot) = self.peer_index.get(&id) {
            return Some(slot);
        }
        if self.peers.len() >= self.config.max_peers {
            self.make_room(now);
        }
        if self.peers.len() >= self.config.max_peers {
            self.counters.tables_full += 1;
            return None;
        }
        let slot = self.peers.insert(PeerEntry::new(id, now));
        self.peer_index.insert(id, slot);
        self.bound_frames(slot);
        self.arm_sweep(now);
        Some(slot)
    }

    /// Asks queue 0 how many queues its node has.
    pub(super) fn connect_node(&mut self, now: Nanos, node: NodeId) -> Option<u32> {
        let slot = self.peer_slot(now, Peer { node, queue: 0 })?;
        self.connect(now, slot);
        Some(slot)
    }

    /// Says HELLO to a peer that is not up and not being asked yet.
    #[cold]
    pub(super) fn connect(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        match entry.state {
            PeerState::Up | PeerState::Connecting => return,
            PeerState::Incompatible if now < entry.hello_at => return,
            PeerState::Idle | PeerState::Incompatible => {}
        }
        entry.state = PeerState::Connecting;
        entry.hello_tries = 0;
        self.say_hello(now, slot);
    }

    /// HELLO with the next frame, and somebody waits for the answer.
    fn say_hello(&mut self, now: Nanos, slot: u32) {
        let unreachable = self.unreachable_after();
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        if entry.hello_outstanding && now < entry.hello_at {
            return;
        }
        entry.hello_due = true;
        let since = *entry.waiting_since.get_or_insert(now);
        self.timers
            .arm(Owner::Peer(slot), since.saturating_add(unreachable));
        self.mark_ready(slot, Priority::High);
    }

    /// A HELLO was written into a frame: when to repeat it.
    pub(super) fn hello_sent(entry: &mut PeerEntry, now: Nanos) -> Nanos {
        let repeat = (HELLO_REPEAT << entry.hello_tries.min(8)).min(HELLO_REPEAT_MAX);
        entry.hello_due = false;
        if !core::mem::replace(&mut entry.hello_outstanding, true) {
            entry.asked_at = now;
        }
        entry.hello_tries = entry.hello_tries.saturating_add(1);
        entry.hello_at = now.saturating_add(repeat);
        entry.hello_at
    }

    /// The peer's timer: repeat HELLO while anybody needs the peer.
    pub(super) fn repeat_hello(&mut self, now: Nanos, slot: u32) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        // A challenge (a HELLO while the association stands) is given up after a while.
        let wanted =
            entry.state == PeerState::Connecting || (entry.is_up() && entry.hello_tries < 8);
        if entry.hello_outstanding && wanted {
            if now >= entry.hello_at {
                self.say_hello(now, slot);
            } else {
                self.timers.arm(Owner::Peer(slot), entry.hello_at);
            }
        } else {
            entry.hello_outstanding = false;
        }
    }

    pub(super) fn unreachable_after(&self) -> Nanos {
        Nanos::from(self.config.policy.unreachable_after_ms) * 1_000_000
    }

    /// Whether cluster, wire version and policy fit; else the RESET's reason and detail.
    fn misfit(&self, hello: &Hello<'_>) -> Option<(u8, u8)> {
        if hello.cluster != self.config.cluster {
            Some((RESET_CLUSTER, 0))
        } else if hello.wire_min > WIRE_MAX || hello.wire_max < WIRE_MIN {
            Some((RESET_VERSION, 0))
        } else {
            let detail = self.config.policy.misfit(&hello.policy)?;
            Some((RESET_POLICY, detail))
        }
    }

    /// Whether a HELLO agrees with itself and its frame.
    fn plausible(&mut self, from: Peer, header: &FrameHeader, hello: &Hello<'_>) -> bool {
        let fine = hello.incarnation != 0
            && truncate(hello.incarnation) == header.src_incarnation
            && from.queue < hello.queues
            && hello.max_frame >= MIN_FRAME;
        self.counters.protocol_violations += u64::from(!fine);
        fine
    }

    /// HELLO: always answered; believed only if it is from the incarnation we know.
    #[cold]
    pub(super) fn on_hello<H: Host>(
        &mut self,
        now: Nanos,
        from: Peer,
        header: &FrameHeader,
        hello: &Hello<'_>,
        host: &mut H,
    ) -> Result<(), FrameError> {
        if let Some(misfit) = self.misfit(hello) {
            self.counters.peers_incompatible += 1;
            self.reset(now, from, header, misfit);
            return Err(FrameError::NotAssociated);
        }
        if !self.plausible(from, header, hello) {
            return Err(FrameError::NotAssociated);
        }
        let slot = self.peer_slot(now, from).ok_or(FrameError::UnknownPeer)?;
        self.recall(slot, host);
        let ours = self.config.incarnation;
        let Some(entry) = self.peers.get_mut(slot) else {
            return Err(FrameError::UnknownPeer);
        };
        if entry.is_retired(hello.incarnation) {
            // From the dead, or what took its place was a lie: who is alive answers.
            self.say_hello(now, slot);
            return Err(FrameError::WrongIncarnation);
        }
        let known = entry.incarnation == hello.incarnation;
        let stranger = entry.incarnation == 0;
        if known {
            self.learn_epoch(now, slot, header, host)?;
            self.hear_hello(now, slot, header);
        } else if stranger {
            // Nothing that could be hurt yet: so HELLO-ACK echoes a stamp and tells a credit.
            entry.void_volatile(now, header.sent_buffers);
            self.hear(now, slot, header);
        }
        self.offer_share(now, slot);
        let Some(entry) = self.peers.get_mut(slot) else {
            return Err(FrameError::UnknownPeer);
        };
        entry.hello_ack_due = true;
        entry.echo = hello.incarnation;
        self.mark_ready(slot, Priority::High);
        if known && hello.echo == ours {
            self.associate(now, slot, hello, host);
        } else if !known {
            self.say_hello(now, slot);
        }
        Ok(())
    }

    /// HELLO-ACK: the only way an incarnation becomes known.
    #[cold]
    pub(super) fn on_hello_ack<H: Host>(
        &mut self,
        now: Nanos,
        from: Peer,
        header: &FrameHeader,
        hello: &Hello<'_>,
        host: &mut H,
    ) -> Result<(), FrameError> {
        if self.misfit(hello).is_some() || !self.plausible(from, header, hello) {
            return Err(FrameError::NotAssociated);
        }
        let slot = *self
            .peer_index
            .get(&from)
            .ok_or(FrameError::NotAssociated)?;
        self.recall(slot, host);
        let Some(entry) = self.peers.get_mut(slot) else {
            return Err(FrameError::NotAssociated);
        };
        if !entry.hello_outstanding {
            return Ok(()); // a second answer
        }
        if hello.echo != self.config.incarnation {
            return Err(FrameError::NotAssociated);
        }
        if entry.is_retired(hello.incarnation) && !entry.is_alive(now, header) {
            return Err(FrameError::WrongIncarnation);
        }
        if entry.incarnation == hello.incarnation {
            self.learn_epoch(now, slot, header, host)?;
        } else if entry.incarnation != 0 && entry.stamps.echo_of(now, header) < entry.asked_at {
            return Err(FrameError::WrongIncarnation); // a ghost's: it never heard this HELLO
        } else {
            // transport.md §2.4: one store invalidates every record of the old incarnation; only then they are freed.
            if host.store_peer(from, hello.incarnation, 0).is_err() {
                self.counters.tables_full += 1;
                return Err(FrameError::NotAssociated);
            }
            let old = entry.incarnation;
            entry.retire(old, hello.incarnation);
            entry.incarnation = hello.incarnation;
            entry.floor = 0;
            entry.begin_epoch(now, header.engine_epoch);
            entry.void_volatile(now, header.sent_buffers);
            entry.credit.due = true; // its HELLO-ACK knew no limit of ours
            self.counters.peer_restarts += u64::from(old != 0);
            self.forget_receiving(slot, host);
        }
        if let Some(entry) = self.peers.get_mut(slot) {
            entry.hello_outstanding = false;
            entry.hello_due = false;
        }
        self.hear(now, slot, header);
        self.associate(now, slot, hello, host);
        Ok(())
    }

    /// Both sides know each other: what HELLO said holds, and waiting streams go.
    fn associate<H: Host>(&mut self, now: Nanos, slot: u32, hello: &Hello<'_>, host: &mut H) {
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let was_up = entry.is_up();
        entry.state = PeerState::Up;
        entry.misfit = None;
        entry.remote_policy = hello.policy;
        entry.remote_window = u32::from(hello.window).clamp(1, WINDOW_MAX);
        entry.remote_unasked = u32::from(hello.unasked) * UNASKED_UNIT;
        entry.rows = Rows::of(hello.features);
        entry.reads_bare = hello.features & features::BARE != 0;
        entry.greeted = true;
        if !was_up {
            entry.path.try_again();
            entry.credit.due = true; // it may know no limit yet
        }
        entry.hello_tries = 0;
        entry.waiting_since = None;
        entry.last_heard = now;
        entry.remote_max_frame = hello.max_frame;
        if entry.name != hello.name {
            entry.name = String::from(hello.name);
        }
        let node = entry.id.node;
        let stale = self.streams_of_another_incarnation(slot);
        self.bound_frames(slot);
        if let Some(known) = self.nodes.get_mut(&node)
            && known.queues != Some(hello.queues)
        {
            known.queues = Some(hello.queues);
            self.resolve_streams(now, node, host);
        }
        if !was_up {
            self.offer_share(now, slot);
            self.mark_ready(slot, Priority::High);
        }
        if !was_up || stale {
            self.peer_up(now, slot, host);
        }
    }

    fn streams_of_another_incarnation(&self, slot: u32) -> bool {
        let incarnation = self.peers.get(slot).map_or(0, |entry| entry.incarnation);
        self.send
            .iter()
            .any(|(_, s)| s.peer == slot && s.incarnation != incarnation)
    }

    /// The peer's slot, if it is the peer of a node that may be talked to whose frame was believed last: frames come in bursts.
    #[inline]
    pub(super) fn heard_last(&self, from: Peer) -> Option<u32> {
        let slot = self.heard?;
        (self.peers.get(slot)?.id == from).then_some(slot)
    }

    /// Compares engine epochs; a successor voids everything volatile. So does an engine that was taken for dead and has heard us since.
    pub(super) fn learn_epoch<H: Host>(
        &mut self,
        now: Nanos,
        slot: u32,
        header: &FrameHeader,
        host: &mut H,
    ) -> Result<(), FrameError> {
        let Some(entry) = self.peers.get_mut(slot) else {
            return Err(FrameError::NotAssociated);
        };
        match entry.engine_epoch {
            Some(epoch) if epoch == header.engine_epoch => {}
            Some(epoch)
                if serial_lt(header.engine_epoch, epoch) && !entry.is_alive(now, header) =>
            {
                // From the dead. Or the other epoch was a lie: who is alive echoes what it hears now.
                self.say_hello(now, slot);
                return Err(FrameError::StaleEngine);
            }
            known => {
                entry.begin_epoch(now, header.engine_epoch);
                entry.void_volatile(now, header.sent_buffers);
                if known.is_some() {
                    self.counters.peer_takeovers += 1;
                    self.void_receiving(slot, host);
                    self.void_sending(now, slot);
                }
            }
        }
        Ok(())
    }

    /// Answers a frame whose header does not fit.
    #[cold]
    pub(super) fn reset(
        &mut self,
        now: Nanos,
        to: Peer,
        header: &FrameHeader,
        (reason, detail): (u8, u8),
    ) {
        self.resets.push(
            now,
            Reset {
                to,
                src_incarnation: header.src_incarnation,
                dst_incarnation: header.dst_incarnation,
                reason,
                detail,
            },
        );
    }

    /// RESET: believed only if it echoes what we really send.
    #[cold]
    pub(super) fn on_reset<H: Host>(
        &mut self,
        now: Nanos,
        from: Peer,
        echo: (u32, u32),
        (reason, detail): (u8, u8),
        host: &mut H,
    ) {
        let ours = truncate(self.config.incarnation);
        let Some(&slot) = self.peer_index.get(&from) else {
            return;
        };
        self.recall(slot, host);
        let Some(entry) = self.peers.get_mut(slot) else {
            return;
        };
        let theirs = match entry.incarnation {
            0 => 0,
            known => truncate(known),
        };
        if echo.0 != ours || (echo.1 != theirs && echo.1 != 0) {
            self.counters.protocol_violations += 1;
            return;
        }
        self.counters.resets_received += 1;
        match reason {
            RESET_INCARNATION => {
                if entry.is_up() {
                    entry.state = PeerState::Connecting;
                }
                self.say_hello(now, slot);
            }
            RESET_CLUSTER | RESET_VERSION | RESET_POLICY => {
                let node = from.node;
                self.fail_peer(now, slot, Reason::Incompatible, host);
                self.fail_unresolved(now, node, Reason::Incompatible, host);
                if let Some(entry) = self.peers.get_mut(slot) {
                    entry.state = PeerState::Incompatible;
                    entry.misfit = Some(match reason {
                        RESET_CLUSTER => Misfit::Cluster,
                        RESET_VERSION => Misfit::Version,
                        _ => Misfit::Policy(misfit_name(detail)),
                    });
                    entry.hello_at = now.saturating_add(INCOMPATIBLE_FOR);
                }
            }
            _ => self.counters.protocol_violations += 1,
        }
    }
}
