//! Taking over: from the ledger and the published indices to ports, tokens and the transport's [`Durable`].
//!
//! transport.md §13.2. In this order, each step idempotent, so that dying in here is no different from dying elsewhere:
//!
//! 1. the engine's epoch grows ([`Facts::raise_engine_epoch`]), before anything else;
//! 2. per port: events between `events_settled` and the published producer are replayed into the ledger; then the ledger says which
//!    send and receive tokens are out; ring entries that were taken before the consumer index said so are passed over;
//! 3. the transport's durable state is read from the records ([`durable`]);
//! 4. only then are rings polled and frames handled.
//!
//! A record that we would not have written closes its port with [`CloseReason::Poison`] or is freed; it never stops the engine.
//!
//! [`Facts::raise_engine_epoch`]: super::ledger_facts::Facts::raise_engine_epoch

use std::io;
use std::sync::atomic::Ordering;

use portolan_abi::event::{Ends, Event, EventKind, OtherEnds};
use portolan_abi::ledger::{Ledger, pair, stream_key, unpair};
use portolan_abi::port::CloseReason;
use portolan_abi::token::{TokenRef, Untrusted};
use portolan_transport::host::{
    Durable, RestoredReceiveStream, RestoredSend, RestoredSendStream, SendRequest,
};
use portolan_transport::ident::{NodeId, PortId, RecordId, StreamKey, serial_lt};

use super::commit::{self, Accepted};
use super::commit_point::{Point, store};
use super::host::{EngineHost, priority, send_id};
use super::inventory::Held;
use super::ledger_facts::stream_of;
use super::ports::{Port, PortParts, Sending};

/// Maps a port and takes it up.
pub(super) fn take_up_parts(host: &mut EngineHost, parts: PortParts) -> io::Result<()> {
    take_up(host, Port::map(parts)?);
    Ok(())
}

/// Takes over a mapped port that an earlier engine served, or opens one that nobody did. The ledger knows which of the two it is; its word may
/// have been written over, but what nobody served has no indices.
pub(super) fn take_up(host: &mut EngineHost, port: Port) {
    if host.knows(port.number(), port.generation()) || port.was_served() {
        restore_mapped(host, port);
    } else {
        host.open_mapped(port);
    }
}

/// Takes over the tokens of a mapped port that an earlier engine served. A port whose memory or records contradict themselves is
/// returned with its fault set, to be closed like any other; so is one that the predecessor closed without the supervisor's hearing of
/// it: it must not serve again.
fn restore_mapped(host: &mut EngineHost, mut port: Port) {
    let ledger = host.facts.ledger();
    if let Some(reason) = port.told_closed() {
        port.fail(reason);
    }
    let mut held = Held::default();
    replay(ledger, &mut port);
    if port.fault().is_none() {
        take_over_sends(ledger, &mut port, &mut held);
    }
    if port.fault().is_none() {
        take_over_receives(ledger, &mut port, &mut held);
    }
    if port.fault().is_none() {
        port.recall_offers();
        port.open(host.core);
        port.count_recovery(&held);
    }
    host.ports.insert(port);
}

/// Brings the ledger up to the events that were published but not settled.
fn replay(ledger: Ledger<'_>, port: &mut Port) {
    let settled = ledger.ports()[usize::from(port.number())]
        .events_settled
        .load(Ordering::Acquire) as u32;
    let produced = port.events_published();
    if produced.wrapping_sub(settled) > port.event_ring().capacity() {
        return port.fail(CloseReason::Poison);
    }
    let mut index = settled;
    while index != produced {
        let words = port.event_ring().peek(index);
        let Some(event) = Event::decode(&words) else {
            return port.fail(CloseReason::Poison);
        };
        match event.kind {
            EventKind::Sent(_) => {
                let (slot, generation) = (event.slot, event.generation);
                replay_sent(ledger, port.number(), TokenRef { slot, generation });
                OtherEnds::of(&words).for_each(|send| replay_sent(ledger, port.number(), send));
            }
            EventKind::Received => replay_received(ledger, port.number(), &event),
            // It said nothing that the ledger knows of.
            EventKind::Offered(_) => {}
        }
        index = index.wrapping_add(1);
    }
    commit::settle(Point::ReplaySettled, ledger, port);
}

fn replay_sent(ledger: Ledger<'_>, port: u16, send: TokenRef) {
    if let Some(fact) = ledger.sends(port).get(send.slot as usize)
        && unpair(fact.tag.load(Ordering::Acquire)).0 == send.generation
    {
        store(Point::ReplayTag, &fact.tag, 0);
    }
}

fn replay_received(ledger: Ledger<'_>, port: u16, event: &Event) {
    let key = stream_key(port, event.node, event.port, event.priority);
    if let Some(stream) = ledger.receive_streams().get(event.record as usize)
        && stream.key.load(Ordering::Acquire) == key
        && stream.epoch.load(Ordering::Acquire) as u32 == event.epoch
    {
        let (bits, base) = unpair(stream.base.load(Ordering::Acquire));
        if !serial_lt(event.number, base) {
            let (base, bits) =
                portolan_transport::host::after_commit(base, bits, event.number, false);
            commit::commit_base(
                Point::ReplayBase,
                ledger,
                RecordId(event.record),
                base,
                bits,
            );
        }
    }
    if let Some(fact) = ledger.receives(port).get(event.slot as usize)
        && fact.load(Ordering::Acquire) as u32 == event.generation
    {
        commit::settle_slot(
            Point::ReplaySlot,
            ledger,
            port,
            event.slot,
            event.generation,
        );
    }
}

/// Accepted sends are ours again; ring entries already accepted are passed over; commands that were accepted are completed.
fn take_over_sends(ledger: Ledger<'_>, port: &mut Port, held: &mut Held) {
    let slots = port.geometry().send_tokens;
    let mut local = Vec::new();
    for (slot, fact) in (0..slots).zip(ledger.sends(port.number())) {
        let send = match commit::accepted(fact) {
            Ok(None) => continue,
            Ok(Some(send)) => send,
            Err(()) => return port.fail(CloseReason::Poison),
        };
        if let Some(end) = send.local {
            local.push((slot, send.generation, end));
            continue;
        }
        if !is_plausible(port, &send) {
            return port.fail(CloseReason::Poison);
        }
        held.send(slot);
        if let Some(place) = port.sends.get_mut(slot as usize) {
            *place = Sending {
                generation: send.generation,
                inline: send.inline,
                len: send.len,
                arena_offset: send.arena_offset,
                taken_at: 0,
            };
        }
    }
    // Before any of them completes: once its tag is free, the entry could not be told from a new one.
    port.skip_accepted(ledger);
    for (slot, generation, end) in local {
        commit::complete(ledger, port, &Ends::one(TokenRef { slot, generation }, end));
    }
}

fn is_plausible(port: &Port, send: &Accepted) -> bool {
    let inside = if send.inline {
        send.len as usize <= portolan_abi::token::INLINE_BYTES
    } else {
        port.geometry().arena_holds(send.arena_offset, send.len)
    };
    inside && NodeId::new(send.node).is_some() && send.port < portolan_abi::PORTS
}

/// Is the accepted send not what its application ordered? Its slot still says what that was; an engine that went wrong may have accepted something else.
fn is_another(port: &Port, slot: u32, send: &Accepted) -> bool {
    let generation = send.generation;
    let Some(words) = port.client.send_slots().get(slot as usize) else {
        return false;
    };
    // An application that has written over it since has nobody else to blame for what comes.
    let ordered =
        Untrusted::read_header(words).check(TokenRef { slot, generation }, &port.geometry());
    ordered.is_ok_and(|ordered| {
        (
            ordered.node,
            ordered.port,
            ordered.priority,
            ordered.len,
            ordered.tag,
        ) != (
            send.node,
            send.port,
            send.priority,
            send.len,
            send.message_tag,
        )
    })
}

/// Receive tokens that are out are read from the client half again: it is as hostile as the first time.
fn take_over_receives(ledger: Ledger<'_>, port: &mut Port, held: &mut Held) {
    let slots = port.geometry().receive_tokens;
    for (slot, fact) in (0..slots).zip(ledger.receives(port.number())) {
        let (consumed, taken) = unpair(fact.load(Ordering::Acquire));
        if consumed == taken {
            continue;
        }
        let generation = taken;
        if !port.offer(TokenRef { slot, generation }) {
            return port.fail(CloseReason::BadToken);
        }
        held.receive(slot);
    }
    port.skip_taken(ledger);
}

/// What the ledger holds for the transport, after every port was restored. Sends of ports that are not served any more are not in it:
/// their slots are cleared when the port is opened again.
pub(super) fn durable(host: &mut EngineHost) -> Durable {
    let ledger = host.facts.ledger();
    let mut durable = Durable {
        peers: host.facts.peers().collect(),
        ..Durable::default()
    };
    for (index, record) in ledger.send_streams().iter().enumerate() {
        if let Some(stream) = stream_of(record.key.load(Ordering::Acquire)) {
            let (epoch, next) = unpair(record.state.load(Ordering::Acquire));
            durable.sending.push(RestoredSendStream {
                record: RecordId(index as u32),
                stream,
                incarnation: record.incarnation.load(Ordering::Acquire),
                epoch,
                next,
            });
        }
    }
    for (index, record) in ledger.receive_streams().iter().enumerate() {
        if let Some(stream) = stream_of(record.key.load(Ordering::Acquire)) {
            let (instance, epoch) = unpair(record.epoch.load(Ordering::Acquire));
            let served = host.ports.get(stream.local.0).map(Port::generation);
            let (bits, base) = unpair(record.base.load(Ordering::Acquire));
            durable.receiving.push(RestoredReceiveStream {
                record: RecordId(index as u32),
                stream,
                incarnation: record.incarnation.load(Ordering::Acquire),
                epoch,
                base,
                bits,
                closed: served != Some(instance),
            });
        }
    }
    let numbers: Vec<u16> = host.ports.iter().map(Port::number).collect();
    for number in numbers {
        if let Some(port) = host.ports.get(number)
            && port.fault().is_none()
        {
            restored_sends(ledger, port, &mut durable);
        }
    }
    durable
}

fn restored_sends(ledger: Ledger<'_>, port: &Port, durable: &mut Durable) {
    let slots = port.geometry().send_tokens;
    for (slot, fact) in (0..slots).zip(ledger.sends(port.number())) {
        let Ok(Some(send)) = commit::accepted(fact) else {
            continue;
        };
        let request = SendRequest {
            id: send_id(port.number(), slot, send.generation),
            stream: StreamKey {
                local: PortId(port.number()),
                node: NodeId(send.node),
                remote: PortId(send.port),
                priority: priority(send.priority),
            },
            len: send.len,
            tag: send.message_tag,
            // Over at once: in another stream it may wait for a buffer that nobody means to provide.
            deadline: if is_another(port, slot, &send) {
                0
            } else {
                send.deadline
            },
            ack: send.ack,
        };
        // By key, not by record: a stream that was reopened has a new record and the same numbers. Of two, the one of the later epoch.
        let stream = (durable.sending.iter_mut())
            .filter(|stream| stream.stream == request.stream)
            .max_by_key(|stream| stream.epoch);
        // Accepted, but its number not yet counted as used. It must be so in the ledger before the send can complete, or a second
        // death would use the number again. Without any record its stream was being reopened; the transport finds it another.
        let record = stream.map_or(RecordId(u32::MAX), |stream| {
            let after = send.number.wrapping_add(1);
            if serial_lt(stream.next, after) {
                stream.next = after;
                if let Some(fact) = ledger.send_streams().get(stream.record.0 as usize) {
                    store(Point::RestoreNext, &fact.state, pair(stream.epoch, after));
                }
            }
            stream.record
        });
        durable.sends.push(RestoredSend {
            request,
            record,
            number: send.number,
        });
    }
}
