//! Control chunks: what a stream's end owes the other, written from its due flags. transport.md §6.2, §6.3, §9.3
//!
//! Idea: an answer is a flag on the stream, not a queued chunk, so answering twice costs nothing, memory is bounded, and what goes
//! out is the state at the time of sending (an acknowledgement is read from the committed base, never from what once was). A frame
//! that is full leaves the remaining flags for the next one.

use super::counters::Counters;
use super::long_message::LongMessage;
use super::receive_stream::{Incoming, Kind, ReceiveStream};
use super::send_stream::{MessageState, SendStream};
use super::slab::Slab;
use crate::host::Reason;
use crate::ident::serial_lt;
use crate::policy::Recovery;
use crate::wire::chunk::Received;
use crate::wire::{Chunk, FrameWriter, Full};

/// MSGDROPs, and NULL-ACKs, of one stream in a frame.
const DROPS_AT_ONCE: usize = 8;

/// Writes a chunk and counts it.
pub(super) fn push(
    w: &mut FrameWriter<'_>,
    counters: &mut Counters,
    chunk: &Chunk<'_>,
) -> Result<usize, Full> {
    let index = w.push(chunk)?;
    counters.chunks_sent += 1;
    Ok(index)
}

/// Everything a receiving stream owes its sender. `Err`: the frame is full and some of it is left.
pub(super) fn receiver_chunks(
    stream: &mut ReceiveStream,
    longs: &mut Slab<LongMessage>,
    w: &mut FrameWriter<'_>,
    counters: &mut Counters,
    recovery: Recovery,
) -> Result<(), Full> {
    let name = stream.wire();
    if stream.due.resume {
        let base = stream.ack_base();
        push(w, counters, &Chunk::Resume { stream: name, base })?;
        (stream.due.resume, stream.due.ack) = (false, false);
    }
    if stream.due.ack && stream.exact {
        exact_acks(stream, w, counters)?;
        stream.due.ack = false;
    }
    if stream.due.ack {
        let chunk = Chunk::Ack {
            stream: name,
            base: stream.ack_base(),
            received: match recovery {
                Recovery::Selective => stream.received(),
                _ => Received::default(),
            },
        };
        push(w, counters, &chunk)?;
        counters.acks_sent += 1;
        stream.due.ack = false;
    }
    if stream.due.is_rare() {
        rare_chunks(stream, w, counters)?;
    }
    if let Some(number) = stream.due.msg_end {
        push(
            w,
            counters,
            &Chunk::MsgEnd {
                stream: name,
                number,
            },
        )?;
        stream.due.msg_end = None;
    }
    if stream.due.ends {
        while stream.ends != 0 {
            let index = stream.ends.trailing_zeros();
            let number = stream.number(index as usize);
            let chunk = Chunk::MsgEnd {
                stream: name,
                number,
            };
            push(w, counters, &chunk)?;
            stream.ends &= stream.ends - 1;
        }
        stream.due.ends = false;
    }
    if stream.due.grants {
        for incoming in &stream.messages {
            if let Kind::Placing(row) = incoming.kind
                && let Some(long) = longs.get_mut(row)
                && let Some(all) = long.cts
            {
                // Bytes above the highest one that came may still be under way, unless the sender asked; and what came in the
                // last moments may have overtaken others. Whole messages are recovered by their sender alone.
                let limit = match recovery {
                    Recovery::WholeMessage => 0,
                    _ if all => long.granted,
                    _ => long.report,
                };
                let (missing, missing_len) = long.ranges.missing(limit);
                let chunk = Chunk::Cts {
                    stream: name,
                    number: long.number,
                    granted: long.granted,
                    missing,
                    missing_len,
                };
                push(w, counters, &chunk)?;
                counters.grants_sent += 1;
                (long.cts, long.report) = (None, 0);
            }
        }
        stream.due.grants = false;
    }
    Ok(())
}

/// What a receiving stream owes its sender only if something went wrong, or had to wait.
#[cold]
fn rare_chunks(
    stream: &mut ReceiveStream,
    w: &mut FrameWriter<'_>,
    counters: &mut Counters,
) -> Result<(), Full> {
    let name = stream.wire();
    if stream.due.port_closed {
        // What was committed ahead is said in the same frame and first, or its sender takes it for never delivered.
        let mut ahead = stream.bits >> 16 << 1;
        while ahead != 0 {
            let number = stream.number(ahead.trailing_zeros() as usize);
            let chunk = Chunk::MsgEnd {
                stream: name,
                number,
            };
            push(w, counters, &chunk)?;
            ahead &= ahead - 1;
        }
        let base = stream.ack_base();
        push(w, counters, &Chunk::PortClosed { stream: name, base })?;
        stream.due.port_closed = false;
    }
    if let Some(number) = stream.due.null_delivered {
        let delivered = true;
        push(
            w,
            counters,
            &Chunk::NullAck {
                stream: name,
                number,
                delivered,
            },
        )?;
        stream.due.null_delivered = None;
    }
    if stream.due.nulled {
        // A few at a time, as with drops.
        for (number, refused) in stream.nulled_numbers().take(DROPS_AT_ONCE) {
            let chunk = match refused {
                true => Chunk::MsgDrop {
                    stream: name,
                    number,
                    reason: Reason::Refused as u8,
                },
                false => Chunk::NullAck {
                    stream: name,
                    number,
                    delivered: false,
                },
            };
            push(w, counters, &chunk)?;
        }
        stream.due.nulled = false;
    }
    if stream.due.drops {
        // A few at a time; each confirmation brings the next ones.
        let unconfirmed = |(index, incoming): (usize, &Incoming)| match incoming.kind {
            Kind::Drop {
                reason,
                confirmed: false,
            } => Some((index, reason)),
            _ => None,
        };
        for (index, reason) in stream
            .messages
            .iter()
            .enumerate()
            .filter_map(unconfirmed)
            .take(DROPS_AT_ONCE)
        {
            let number = stream.base.wrapping_add(index as u32);
            let reason = reason as u8;
            push(
                w,
                counters,
                &Chunk::MsgDrop {
                    stream: name,
                    number,
                    reason,
                },
            )?;
        }
        stream.due.drops = false;
    }
    if let Some((expected, reason)) = stream.due.nack {
        push(
            w,
            counters,
            &Chunk::Nack {
                stream: name,
                expected,
                reason,
            },
        )?;
        counters.nacks_sent += 1;
        stream.due.nack = None;
    }
    if let Some(number) = stream.due.ready {
        push(
            w,
            counters,
            &Chunk::Ready {
                stream: name,
                number,
            },
        )?;
        stream.due.ready = None;
    }
    Ok(())
}

/// One acknowledgement per message, oldest first.
#[cold]
fn exact_acks(
    stream: &mut ReceiveStream,
    w: &mut FrameWriter<'_>,
    counters: &mut Counters,
) -> Result<(), Full> {
    while let Some(back) = stream.acks.end().checked_sub(1) {
        let chunk = Chunk::Ack {
            stream: stream.wire(),
            base: stream.base.wrapping_sub(back as u32),
            received: Received::default(),
        };
        push(w, counters, &chunk)?;
        counters.acks_sent += 1;
        stream.acks.clear(back);
    }
    Ok(())
}

/// Everything a sending stream owes its receiver but messages. `Ok(true)`: an answer is expected.
pub(super) fn sender_chunks(
    stream: &mut SendStream,
    w: &mut FrameWriter<'_>,
    counters: &mut Counters,
) -> Result<bool, Full> {
    let name = stream.wire();
    let mut asks = false;
    while let Some(&number) = stream.confirms.front() {
        push(
            w,
            counters,
            &Chunk::DropConfirm {
                stream: name,
                number,
            },
        )?;
        stream.confirms.pop_front();
    }
    // All that we settled and the receiver still waits for, a few at a time: one per answer would cost a timer each.
    let mut fillers = 0;
    while let Some(number) = stream.filler {
        let start = None;
        push(
            w,
            counters,
            &Chunk::Null {
                stream: name,
                start,
                number,
            },
        )?;
        fillers += 1;
        let next = number.wrapping_add(1);
        stream.filler = (fillers < DROPS_AT_ONCE && serial_lt(next, stream.base)).then_some(next);
    }
    if stream.nulls {
        let (start, before) = (
            stream.start(),
            stream.cursor.wrapping_sub(stream.base) as usize,
        );
        // From the cursor on, NULL goes out in its turn.
        for index in 0..before {
            let number = stream.number(index);
            let Some(message) = stream.queue.get_mut(index) else {
                break;
            };
            if message.null_due && matches!(message.state, MessageState::Null(_)) {
                push(
                    w,
                    counters,
                    &Chunk::Null {
                        stream: name,
                        start,
                        number,
                    },
                )?;
                message.null_due = false;
                asks = true;
            }
        }
        stream.nulls = false;
    }
    if stream.probe {
        // The one that waits for a buffer, else the last one that went out: its receiver has all before it, or says what not.
        let number = match stream.not_ready {
            Some(number) => number,
            None if stream.cursor == stream.base => stream.cursor,
            None => stream.cursor.wrapping_sub(1),
        };
        let total = stream
            .index(number)
            .and_then(|index| stream.queue.get(index))
            .map_or(0, |message| message.len);
        let start = stream.start();
        push(
            w,
            counters,
            &Chunk::Probe {
                stream: name,
                start,
                number,
                total,
            },
        )?;
        counters.probes_sent += 1;
        stream.probe = false;
        asks = true;
    }
    if stream.close {
        let next = stream.next();
        push(w, counters, &Chunk::Close { stream: name, next })?;
        stream.close = false;
        asks = true;
    }
    Ok(asks)
}
