//! Chunks as a test reads them.

use portolan_transport::policy::AckMode;
use portolan_transport::wire::Chunk;

use super::{EPOCH, FIRST, OUR_INCARNATION, Puppet, THEIR_INCARNATION, say};

/// No answer, no delivery, no counter.
pub const NOTHING: [&str; 0] = [];

/// A number as transcripts show it.
fn n(number: u32) -> i32 {
    number.wrapping_sub(FIRST) as i32
}

fn who(incarnation: u64) -> &'static str {
    match incarnation {
        0 => "nobody",
        OUR_INCARNATION => "us",
        THEIR_INCARNATION => "them",
        _ => "somebody",
    }
}

fn start(start: Option<u32>) -> String {
    start.map_or(String::new(), |start| format!(" start {}", n(start)))
}

fn mode(mode: AckMode) -> &'static str {
    match mode {
        AckMode::Policy => "",
        AckMode::Immediate => " ack now",
        AckMode::Lazy => " ack lazy",
    }
}

impl Puppet {
    /// The chunk in one line: kind, number, what matters; `@k` if its epoch is not the stream's first, `high` at high priority.
    pub fn text(&self, chunk: &Chunk<'_>) -> String {
        let mut line = line(chunk);
        if let Some(stream) = say::stream_of(chunk) {
            if stream.epoch != EPOCH {
                line += &format!(" @{}", stream.epoch.wrapping_sub(EPOCH) as i32);
            }
            if stream.priority != 0 {
                line += " high";
            }
        }
        line
    }
}

fn line(chunk: &Chunk<'_>) -> String {
    match chunk {
        Chunk::Hello(h) => format!("HELLO from {} to {}", who(h.incarnation), who(h.echo)),
        Chunk::HelloAck(h) => format!("HELLO-ACK from {} to {}", who(h.incarnation), who(h.echo)),
        Chunk::Reset { reason, detail, .. } => match reason {
            1 => "RESET incarnation".into(),
            2 => "RESET cluster".into(),
            3 => "RESET version".into(),
            4 => format!("RESET policy {detail}"),
            other => format!("RESET {other}"),
        },
        Chunk::Eager {
            start: s,
            number,
            ack,
            payload,
            ..
        } => format!(
            "EAGER {}{}, {} bytes{}",
            n(*number),
            start(*s),
            payload.len,
            mode(*ack)
        ),
        Chunk::Rts {
            start: s,
            number,
            ack,
            total,
            unasked,
            payload,
            ..
        } => format!(
            "RTS {}{}, {} of {total} bytes{}{}",
            n(*number),
            start(*s),
            payload.len,
            if *unasked { " and more" } else { "" },
            mode(*ack)
        ),
        Chunk::Data {
            number,
            offset,
            unasked,
            payload,
            ..
        } => format!(
            "DATA {} {offset}..{}{}",
            n(*number),
            offset + u32::from(payload.len),
            if *unasked { " unasked" } else { "" }
        ),
        Chunk::Cts {
            number,
            granted,
            missing,
            missing_len,
            ..
        } => {
            let missing = missing.iter().take(usize::from(*missing_len));
            let again: Vec<_> = missing.map(|r| format!(" {}..{}", r.from, r.to)).collect();
            let word = if again.is_empty() { "" } else { ", again" };
            format!("CTS {} to {granted}{word}{}", n(*number), again.concat())
        }
        Chunk::MsgEnd { number, .. } => format!("MSGEND {}", n(*number)),
        Chunk::Ack { base, received, .. } => {
            let beyond = (0..received.end()).filter(|i| received.has(*i));
            let more: Vec<_> = beyond
                .map(|i| format!(" +{}", n(*base) + i as i32))
                .collect();
            format!("ACK {}{}", n(*base), more.concat())
        }
        Chunk::Nack {
            expected, reason, ..
        } => {
            let reason = match reason {
                1 => "gap",
                2 => "no buffer",
                3 => "corrupt",
                _ => "?",
            };
            format!("NACK {} {reason}", n(*expected))
        }
        Chunk::Ready { number, .. } => format!("READY {}", n(*number)),
        Chunk::Probe {
            start: s,
            number,
            total,
            ..
        } => format!("PROBE {}{}, of {total} bytes", n(*number), start(*s)),
        Chunk::MsgDrop { number, reason, .. } => {
            let reason = match reason {
                1 => "port closed",
                2 => "too long",
                11 => "no resources",
                12 => "refused",
                _ => "?",
            };
            format!("MSGDROP {} {reason}", n(*number))
        }
        Chunk::DropConfirm { number, .. } => format!("DROP-CONFIRM {}", n(*number)),
        Chunk::Null {
            start: s, number, ..
        } => format!("NULL {}{}", n(*number), start(*s)),
        Chunk::NullAck {
            number, delivered, ..
        } => {
            let what = if *delivered {
                "delivered"
            } else {
                "not delivered"
            };
            format!("NULL-ACK {} {what}", n(*number))
        }
        Chunk::PortClosed { base, .. } => format!("PORT-CLOSED {}", n(*base)),
        Chunk::Close { next, .. } => format!("CLOSE {}", n(*next)),
        Chunk::Closed { .. } => "CLOSED".into(),
        Chunk::Refused { .. } => "REFUSED".into(),
        Chunk::Resume { base, .. } => format!("RESUME {}", n(*base)),
        Chunk::PathProbe { size, .. } => format!("PATH-PROBE {size}"),
        Chunk::PathAck { size, .. } => format!("PATH-ACK {size}"),
    }
}
