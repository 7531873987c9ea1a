//! The order of the durable stores: accept, complete, take and commit (transport.md §13.1), in one place.
//!
//! One fact is one aligned `u64`, stored once with Release. An engine that dies between any two stores of this file leaves facts from
//! which [`super::restore`] finds exactly one continuation; each store has a name ([`Point`]), and the tests stop before every one.
//!
//! | step | stores, in order | the point of no return |
//! |---|---|---|
//! | accept a send, or several of a stream | ledger copy · **tag**, of each · stream {epoch, next} · ring consumer | tag {generation, number} |
//! | accept a command, or refuse a send | ledger copy, marked local · **tag** · ring consumer | tag |
//! | complete sends, one or several at once | event · **producer** · tags freed · events_settled | event producer |
//! | take a receive token | **record, low half** · ring consumer (once per batch) | record |
//! | ask about a message | event · producer · events_settled | none: what is not answered is asked again |
//! | commit a receive | event · **producer** · stream base · record, high half · events_settled | event producer |
//!
//! Rejected: a write-ahead log beside the rings (every message would be stored twice); flags such as "half done" (the order of the
//! stores says as much). The engine never writes a client's slots.

use std::sync::atomic::{AtomicU64, Ordering};

use portolan_abi::event::{Certainty, Ends, Event, EventKind, Outcome, reason};
use portolan_abi::ledger::{Ledger, SendRecord, pair, unpair};
use portolan_abi::token::{FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY, SendToken};
use portolan_transport::host::{Delivery, SendRequest, SendStatus};
use portolan_transport::ident::RecordId;
use portolan_transport::policy::AckMode;

use super::commit_point::{Point, crash_point, store};
use super::ports::{Port, Sending};

/// Flag in [`SendRecord::stream`], bits 40–47: no stream knows of it; the status is in bits 48–63.
const LOCAL: u64 = 1 << 40;
/// Flag in [`SendRecord::stream`]: the payload is in the slot.
const INLINE: u64 = 1 << 41;
/// Flag in [`SendRecord::stream`]: [`AckMode::Immediate`].
const ACK_IMMEDIATE: u64 = 1 << 42;
/// Flag in [`SendRecord::stream`]: [`AckMode::Lazy`].
const ACK_LAZY: u64 = 1 << 43;

/// A send record as the ledger holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Accepted {
    pub generation: u32,
    pub number: u32,
    pub node: u16,
    pub port: u16,
    pub len: u32,
    pub arena_offset: u64,
    pub message_tag: u64,
    pub deadline: u64,
    pub priority: u8,
    pub inline: bool,
    pub ack: AckMode,
    /// Set if no stream knows of it: how it ends.
    pub local: Option<Outcome>,
}

/// The accepted send in a record, if there is one. A word that we would not have written is an error.
pub(super) fn accepted(record: &SendRecord) -> Result<Option<Accepted>, ()> {
    let load = |word: &AtomicU64| word.load(Ordering::Acquire);
    let tag = load(&record.tag);
    if tag == 0 {
        return Ok(None);
    }
    let (generation, number) = unpair(tag);
    let destination = load(&record.destination);
    let stream = load(&record.stream);
    let local = if stream & LOCAL != 0 {
        Some(Outcome {
            certainty: certainty((stream >> 48) as u8).ok_or(())?,
            reason: (stream >> 56) as u8,
        })
    } else {
        None
    };
    let ack = match (stream & ACK_IMMEDIATE != 0, stream & ACK_LAZY != 0) {
        (false, false) => AckMode::Policy,
        (true, false) => AckMode::Immediate,
        (false, true) => AckMode::Lazy,
        (true, true) => return Err(()),
    };
    let priority = (stream >> 32) as u8;
    if generation == 0 || priority > 1 {
        return Err(());
    }
    Ok(Some(Accepted {
        generation,
        number,
        node: destination as u16,
        port: (destination >> 16) as u16,
        len: (destination >> 32) as u32,
        arena_offset: load(&record.arena_offset),
        message_tag: load(&record.message_tag),
        deadline: load(&record.deadline),
        priority,
        inline: stream & INLINE != 0,
        ack,
        local,
    }))
}

fn certainty(code: u8) -> Option<Certainty> {
    Some(match code {
        0 => Certainty::Delivered,
        1 => Certainty::NotDelivered,
        2 => Certainty::MaybeDelivered,
        _ => return None,
    })
}

/// When a checked send token wants its delivery acknowledged.
pub(super) fn ack_mode(token: &SendToken) -> AckMode {
    match token.flags & (FLAG_ACK_IMMEDIATE | FLAG_ACK_LAZY) {
        FLAG_ACK_IMMEDIATE => AckMode::Immediate,
        FLAG_ACK_LAZY => AckMode::Lazy,
        _ => AckMode::Policy,
    }
}

/// The transport's status as the application sees it.
#[inline]
pub(super) fn outcome(status: SendStatus) -> Outcome {
    let (certainty, reason) = match status {
        SendStatus::Delivered => (Certainty::Delivered, 0),
        SendStatus::NotDelivered(reason) => (Certainty::NotDelivered, reason as u8),
        SendStatus::MaybeDelivered(reason) => (Certainty::MaybeDelivered, reason as u8),
    };
    Outcome { certainty, reason }
}

/// The end of a token that made no sense.
pub(super) const REFUSED_TOKEN: Outcome = Outcome {
    certainty: Certainty::NotDelivered,
    reason: reason::BAD_TOKEN,
};

/// The end of a command.
pub(super) const DONE: Outcome = Outcome {
    certainty: Certainty::Delivered,
    reason: 0,
};

/// **Accept a send.** The caller has read the slot once, checked the copy, taken the entry from the send ring, and noted what it holds
/// (`sending`).
#[inline]
pub(super) fn accept(
    ledger: Ledger<'_>,
    port: &Port,
    sending: &Sending,
    send: &SendRequest,
    record: RecordId,
    epoch: u32,
    number: u32,
) {
    let Some(fact) = ledger.sends(port.number()).get(send.id.slot as usize) else {
        return;
    };
    accept_one(fact, sending, send, record, number);
    accepted_up_to(ledger, port, record, epoch, number);
}

/// Accepts one of several sends of a stream, whose ring entries are given back once for all: [`accepted_up_to`].
#[inline(always)]
pub(super) fn accept_one(
    fact: &SendRecord,
    sending: &Sending,
    send: &SendRequest,
    record: RecordId,
    number: u32,
) {
    let inline = if sending.inline { INLINE } else { 0 };
    let ack = match send.ack {
        AckMode::Policy => 0,
        AckMode::Immediate => ACK_IMMEDIATE,
        AckMode::Lazy => ACK_LAZY,
    };
    // The copy: means nothing while the tag is 0.
    store(
        Point::AcceptCopy,
        &fact.destination,
        u64::from(send.stream.node.0)
            | u64::from(send.stream.remote.0) << 16
            | u64::from(send.len) << 32,
    );
    store(Point::AcceptCopy, &fact.arena_offset, sending.arena_offset);
    store(Point::AcceptCopy, &fact.message_tag, send.tag);
    store(Point::AcceptCopy, &fact.deadline, send.deadline);
    store(
        Point::AcceptCopy,
        &fact.stream,
        u64::from(record.0) | (send.stream.priority as u64) << 32 | inline | ack,
    );
    // The accept point: from here on the send exists, under this number, whoever dies.
    store(
        Point::AcceptTag,
        &fact.tag,
        pair(send.id.generation, number),
    );
}

/// The sends of a stream are accepted up to this number, and their ring entries taken.
#[inline(always)]
pub(super) fn accepted_up_to(
    ledger: Ledger<'_>,
    port: &Port,
    record: RecordId,
    epoch: u32,
    number: u32,
) {
    // The number is used, and those before it. If we die before this store, restore takes them from the tags.
    if let Some(stream) = ledger.send_streams().get(record.0 as usize) {
        store(
            Point::AcceptNext,
            &stream.state,
            pair(epoch, number.wrapping_add(1)),
        );
    }
    // The application may reuse the ring entries. If we die before this store, restore finds the slots tagged and skips the entries.
    crash_point(Point::AcceptRelease);
    port.release_sends();
}

/// Accepts what no stream will know of: a command, or a send that was refused. `token` was taken from the send ring.
pub(super) fn accept_local(
    ledger: Ledger<'_>,
    port: &Port,
    slot: u32,
    generation: u32,
    end: Outcome,
) {
    let Some(fact) = ledger.sends(port.number()).get(slot as usize) else {
        return;
    };
    // How it ends is durable before it is accepted, so a successor ends it the same way.
    store(
        Point::LocalEnd,
        &fact.stream,
        LOCAL | (end.certainty as u64) << 48 | u64::from(end.reason) << 56,
    );
    // The accept point.
    store(Point::LocalTag, &fact.tag, pair(generation, 0));
    crash_point(Point::LocalRelease);
    port.release_sends();
}

/// **Complete sends**, or a command.
#[inline]
pub(super) fn complete(ledger: Ledger<'_>, port: &mut Port, ends: &Ends) {
    // The event, then the point from which the application knows.
    port.publish_event(
        &ends.encode(),
        [Point::CompleteEvent, Point::CompleteProducer],
    );
    // The slots' records are free. If we die before one of these stores, restore frees them when it replays the event.
    let facts = ledger.sends(port.number());
    for token in ends.tokens() {
        if let Some(fact) = facts.get(token.slot as usize) {
            store(Point::CompleteTag, &fact.tag, 0);
        }
    }
    settle(Point::CompleteSettled, ledger, port);
}

/// Takes a checked receive token. The provide ring's consumer follows once per batch ([`Port::take_provided`]); a successor that
/// finds the entry again sees from this fact that it was taken.
pub(super) fn take_receive(ledger: Ledger<'_>, port: u16, slot: u32, generation: u32) {
    if let Some(fact) = ledger.receives(port).get(slot as usize) {
        let (consumed, _) = unpair(fact.load(Ordering::Relaxed));
        store(Point::TakeRecord, fact, pair(consumed, generation));
    }
}

/// Asks the application about a message. Nothing durable depends on it; it is settled so that restore has few events to replay.
pub(super) fn ask(ledger: Ledger<'_>, port: &mut Port, event: &Event) {
    port.publish_event(&event.encode(), [Point::AskEvent, Point::AskProducer]);
    settle(Point::AskSettled, ledger, port);
}

/// **Commit** a message that is placed and verified.
#[inline]
pub(super) fn commit(ledger: Ledger<'_>, port: &mut Port, delivery: &Delivery) {
    let event = Event {
        kind: EventKind::Received,
        priority: delivery.stream.priority as u8,
        slot: delivery.buffer.slot,
        generation: delivery.buffer.generation,
        len: delivery.len,
        total: delivery.total,
        node: delivery.stream.node.0,
        port: delivery.stream.remote.0,
        record: delivery.record.0,
        epoch: delivery.epoch,
        number: delivery.number,
        tag: delivery.tag,
    };
    // The event, then **the commit point**: the message is the application's. If we die from here on, restore does the rest from the
    // event itself; the peer, not yet acknowledged, sends again and is told that its number is past.
    port.publish_event(&event.encode(), [Point::CommitEvent, Point::CommitProducer]);
    commit_base(
        Point::CommitBase,
        ledger,
        delivery.record,
        delivery.base,
        delivery.bits,
    );
    settle_slot(
        Point::CommitSlot,
        ledger,
        port.number(),
        delivery.buffer.slot,
        delivery.buffer.generation,
    );
    settle(Point::CommitSettled, ledger, port);
}

/// What a receiving stream has committed, as [`after_commit`](portolan_transport::host::after_commit) computed it; acknowledgements are read
/// from it.
#[inline]
pub(super) fn commit_base(
    point: Point,
    ledger: Ledger<'_>,
    record: RecordId,
    base: u32,
    bits: u32,
) {
    if let Some(stream) = ledger.receive_streams().get(record.0 as usize) {
        store(point, &stream.base, pair(bits, base));
    }
}

/// The receive token is the application's again.
#[inline]
pub(super) fn settle_slot(point: Point, ledger: Ledger<'_>, port: u16, slot: u32, generation: u32) {
    if let Some(fact) = ledger.receives(port).get(slot as usize) {
        store(point, fact, pair(generation, generation));
    }
}

/// Ledger and events agree up to everything published.
#[inline]
pub(super) fn settle(point: Point, ledger: Ledger<'_>, port: &Port) {
    if let Some(fact) = ledger.ports().get(usize::from(port.number())) {
        store(
            point,
            &fact.events_settled,
            pair(port.generation(), port.events_published()),
        );
    }
}
