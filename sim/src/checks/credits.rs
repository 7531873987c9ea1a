//! Receive buffers in use never exceed what their owner gave out, and after everything healed the credit is back in full.
//!
//! transport.md §9.1: `sent_buffers` and `credit_limit` are absolute serial counts in every frame header. The checker reads them
//! off the wire and keeps, per engine and peer, what was sent and what was allowed. An *association* is the incarnations and
//! engine epochs of both ends; a new one starts with what its sender may fill unasked.

use std::collections::BTreeMap;

use portolan_transport::ident::{NodeId, Peer, serial_lt};
use portolan_transport::wire::{Chunk, FrameHeader};

use super::{Check, FrameSeen, Verdict};
use crate::harness::book::Message;

/// Payload bytes of one receive buffer.
const BUFFER_BYTES: usize = 3840;

/// Both ends as one end knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Association {
    ours: (u32, u32),
    /// Incarnation 0 and no epoch: not known yet.
    theirs: (u32, Option<u32>),
}

/// What the checker keeps of an incarnation until its peer speaks to it.
#[derive(Clone, Copy, Debug, Default)]
struct Other {
    incarnation: u32,
    /// The highest `sent_buffers`.
    sent: Option<u32>,
    called_back: bool,
}

impl Other {
    fn hear(&mut self, header: &FrameHeader) {
        if self.incarnation != header.src_incarnation {
            *self = Self {
                incarnation: header.src_incarnation,
                ..Self::default()
            };
        }
        self.sent = later(self.sent, header.sent_buffers);
        self.called_back |= header.return_credit;
    }
}

/// The later of two counts.
fn later(before: Option<u32>, now: u32) -> Option<u32> {
    Some(
        before
            .filter(|before| !serial_lt(*before, now))
            .unwrap_or(now),
    )
}

/// Of what was said by engines, each with its epoch: what the newer one said, and of one engine the later count.
fn newer(before: Option<(u32, u32)>, now: (u32, u32)) -> Option<(u32, u32)> {
    match before {
        Some((epoch, _)) if serial_lt(now.0, epoch) => before,
        Some((epoch, sent)) if epoch == now.0 => later(Some(sent), now.1).map(|sent| (epoch, sent)),
        _ => Some(now),
    }
}

/// What one engine sent to one peer.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    association: Association,
    /// The newest `sent_buffers`.
    sent: u32,
    /// How far it may go.
    limit: u32,
    /// The highest `sent_buffers` of the peer's that arrived here.
    seen: Option<u32>,
    /// The highest one in a frame that may or may not have counted: a handshake, or one of an engine that has a successor.
    heard: Option<u32>,
    /// Newest engine epoch of a handshake that arrived, and the highest `sent_buffers` of these: the epoch's first ordinary frame may be
    /// overtaken by its predecessor's. What arrived at our own predecessor counts, too, and not only handshakes: we may have heard it instead.
    greeted: Option<(u32, u32)>,
    /// The peer wants back what is left, which is then counted as sent.
    called_back: bool,
    /// What an incarnation said that is not believed yet, or not any more.
    other: Other,
    /// Names the newest frame.
    newest: u32,
    /// It arrived.
    arrived: bool,
    /// When it was sent, the peer's newest had arrived.
    informed: bool,
}

/// The checker.
#[derive(Default)]
pub struct Credits {
    eager: BTreeMap<NodeId, u32>,
    /// Credit may be withheld: peers beyond the budget have none.
    rationed: bool,
    accounts: BTreeMap<(Peer, Peer), Account>,
}

impl Credits {
    /// `eager`: the receive buffers each node lets a peer fill unasked. `rationed`: not every peer has them.
    pub fn new(eager: BTreeMap<NodeId, u32>, rationed: bool) -> Self {
        Self {
            eager,
            rationed,
            accounts: BTreeMap::new(),
        }
    }

    fn eager(&self, node: NodeId) -> u32 {
        self.eager.get(&node).copied().unwrap_or(0)
    }
}

/// Whether the frame fills buffers unasked.
fn is_charged(seen: &FrameSeen<'_>) -> bool {
    seen.frame.chunks().any(|(chunk, _)| match chunk {
        Chunk::Eager { .. } => true,
        Chunk::Rts { payload, .. } => payload.len > 0,
        Chunk::Data { unasked, .. } => unasked,
        _ => false,
    })
}

fn is_reset(chunk: &Chunk<'_>) -> bool {
    matches!(chunk, Chunk::Reset { .. })
}

fn is_handshake(chunk: &Chunk<'_>) -> bool {
    matches!(chunk, Chunk::Hello(_) | Chunk::HelloAck(_)) || is_reset(chunk)
}

/// Whether a frame has chunks of this kind and no others. One without any chunk is credit alone.
fn only(seen: &FrameSeen<'_>, kind: fn(&Chunk<'_>) -> bool) -> bool {
    let mut chunks = seen.frame.chunks().peekable();
    chunks.peek().is_some() && chunks.all(|(chunk, _)| kind(&chunk))
}

impl Check for Credits {
    fn name(&self) -> &'static str {
        "credits"
    }

    fn frame_sent(&mut self, seen: &FrameSeen<'_>) -> Verdict {
        let header = seen.frame.header();
        // A bare frame says nothing of all this, and charges nothing.
        if seen.from.node == seen.to.node || seen.frame.is_bare() || only(seen, is_reset) {
            return Ok(());
        }
        let eager = self.eager(seen.to.node);
        let own = self.eager(seen.from.node);
        let informed = match self.accounts.get_mut(&(seen.to, seen.from)) {
            Some(back) => {
                back.informed = false;
                back.arrived
            }
            None => false,
        };
        let account = self.accounts.entry((seen.from, seen.to)).or_default();
        (account.newest, account.arrived, account.informed) = (seen.id, false, informed);
        let ours = (header.src_incarnation, header.engine_epoch);
        if account.association.ours != ours {
            // A new engine may have heard of the peer before it says its first word, which is when we hear of the engine.
            let heard = match (account.seen, account.heard) {
                (Some(seen), heard) => later(heard, seen),
                (None, heard) => heard,
            };
            let greeted = match (account.association.theirs.1, account.seen) {
                (Some(epoch), Some(seen)) => newer(account.greeted, (epoch, seen)),
                _ => account.greeted,
            };
            *account = Account {
                association: Association {
                    ours,
                    theirs: (header.dst_incarnation, None),
                },
                sent: header.sent_buffers,
                limit: header.sent_buffers.wrapping_add(eager.max(own)),
                newest: seen.id,
                heard: heard.filter(|_| account.association.ours.0 == ours.0),
                greeted: greeted.filter(|_| account.association.ours.0 == ours.0),
                ..Account::default()
            };
            return Ok(());
        }
        if header.dst_incarnation != 0 && account.association.theirs.0 != header.dst_incarnation {
            account.association.theirs = (header.dst_incarnation, None);
            account.limit = account.sent.wrapping_add(eager.max(own));
            (account.seen, account.heard) = (None, None);
            if account.other.incarnation == header.dst_incarnation {
                account.called_back |= account.other.called_back;
                account.heard = account.other.sent;
            }
        }
        let charged = is_charged(seen);
        let buffers = if charged {
            seen.len.div_ceil(BUFFER_BYTES) as u32
        } else {
            0
        };
        if header.sent_buffers == buffers && account.sent != 0 {
            // The peer was given up and forgotten, and is known anew.
            account.sent = 0;
            account.limit = eager.max(own);
            (account.seen, account.heard) = (None, None);
        }
        let used = header.sent_buffers.wrapping_sub(account.sent);
        // The answer to a HELLO of an incarnation that the header does not name yet may return credit, too.
        let called_back =
            account.called_back || (header.dst_incarnation == 0 && account.other.called_back);
        let returned = called_back && !serial_lt(account.limit, header.sent_buffers);
        if used != buffers && !returned {
            return Err(format!(
                "{:?} -> {:?}: a frame of {} bytes uses {buffers} buffers, sent_buffers went from {} to {}",
                seen.from, seen.to, seen.len, account.sent, header.sent_buffers
            ));
        }
        if charged && serial_lt(account.limit, header.sent_buffers) {
            return Err(format!(
                "{:?} -> {:?}: sent_buffers {} beyond the limit {}",
                seen.from, seen.to, header.sent_buffers, account.limit
            ));
        }
        account.sent = header.sent_buffers;
        let heard = account.heard;
        // A handshake may answer an incarnation that the header does not name yet.
        if !only(seen, is_handshake)
            && let Some(theirs) = account.seen
            && let theirs = heard.filter(|h| serial_lt(theirs, *h)).unwrap_or(theirs)
            && header.credit_limit.wrapping_sub(theirs) as i32 > own as i32
        {
            return Err(format!(
                "{:?} allows {:?} up to {}, {} more than it has seen; it gives out {own}",
                seen.from,
                seen.to,
                header.credit_limit,
                header.credit_limit.wrapping_sub(theirs)
            ));
        }
        Ok(())
    }

    fn frame_received(&mut self, seen: &FrameSeen<'_>) -> Verdict {
        if seen.frame.is_bare() {
            return Ok(());
        }
        let header = seen.frame.header();
        if let Some(theirs) = self.accounts.get_mut(&(seen.from, seen.to))
            && theirs.newest == seen.id
        {
            theirs.arrived = true;
        }
        let eager = self.eager(seen.from.node).max(self.eager(seen.to.node));
        let Some(account) = self.accounts.get_mut(&(seen.to, seen.from)) else {
            return Ok(());
        };
        let theirs = (header.src_incarnation, Some(header.engine_epoch));
        if account.association.theirs.0 == 0 {
            account.association.theirs.0 = theirs.0;
        }
        let for_us = [0, account.association.ours.0].contains(&header.dst_incarnation);
        if !for_us || theirs.0 != account.association.theirs.0 {
            account.other.hear(header);
            return Ok(()); // of or for somebody who is gone, or not known yet
        }
        let known = account.association.theirs.1;
        let succeeded = known.is_some_and(|known| serial_lt(header.engine_epoch, known));
        // A handshake is judged before the rest of its header is believed, perhaps instead. Until an incarnation is known by its
        // HELLO-ACK nothing else is believed, so that may be one which an engine wrote that has a successor.
        let believed = !only(seen, is_handshake) && !succeeded;
        if theirs.1 != known {
            let anew = account.sent.wrapping_add(eager);
            if believed {
                (account.association.theirs, account.limit) = (theirs, anew);
                if known.is_some() {
                    // The successor counts for itself.
                    let greeted = account.greeted.filter(|g| g.0 == header.engine_epoch);
                    (account.seen, account.heard) = (None, greeted.map(|(_, sent)| sent));
                }
            } else if serial_lt(account.limit, anew) {
                account.limit = anew;
            }
        }
        if serial_lt(account.limit, header.credit_limit) && !succeeded {
            account.limit = header.credit_limit;
        }
        account.called_back |= header.return_credit;
        if only(seen, is_handshake) {
            account.greeted = newer(account.greeted, (header.engine_epoch, header.sent_buffers));
        }
        let place = if believed {
            &mut account.seen
        } else {
            &mut account.heard
        };
        *place = later(*place, header.sent_buffers);
        Ok(())
    }

    fn node_restarted(&mut self, node: NodeId) {
        // Its peers do not know yet.
        self.accounts.retain(|(from, _), _| from.node != node);
    }

    fn end_of_run(&mut self, _messages: &[Message]) -> Verdict {
        if self.rationed {
            return Ok(());
        }
        // The newest frame arrived, the peer said something after it, and that arrived too: the limit is as far as at first.
        for ((from, to), account) in &self.accounts {
            let Some(back) = self.accounts.get(&(*to, *from)) else {
                continue;
            };
            let same = (back.association.ours.0, Some(back.association.ours.1))
                == account.association.theirs;
            let told = account.arrived && back.informed && back.arrived && same;
            let full = account.sent.wrapping_add(self.eager(to.node));
            let missing = full.wrapping_sub(account.limit) as i32;
            if told && missing > 0 {
                return Err(format!(
                    "{from:?} -> {to:?}: {missing} buffers of credit never came back: {account:?}"
                ));
            }
        }
        Ok(())
    }
}
