//! What the dissector must show of a chunk: every field, by the names of wire.md §2 to §4.

use portolan_transport::policy::AckMode;
use portolan_transport::wire::chunk::{Hello, Received};
use portolan_transport::wire::{Chunk, FrameHeader, Payload, StreamRef, crc32c};

use super::Fields;
use super::samples::Sample;

/// Fields that are found by comparing frames; what is put in does not say them.
pub const FOUND: [&str; 17] = [
    "stream.index",
    "retransmission",
    "sent_before_in",
    "repeated",
    "asked_before_in",
    "answers",
    "answer_time",
    "answered_in",
    "commits",
    "first_sent_in",
    "commit_time",
    "committed_in",
    "echoed",
    "echo_time",
    "expert.refusal",
    "expert.repeated",
    "expert.retransmission",
];

/// Fields as they are expected, in the form of tshark's JSON.
#[derive(Default)]
struct Expected(Fields);

/// The bits of a chunk's flags.
#[derive(Default)]
struct Flags {
    payload: bool,
    start: bool,
    high: bool,
    ack: AckMode,
    unasked: bool,
}

impl Expected {
    fn add(&mut self, name: &str, value: impl ToString) {
        let values = self.0.entry(format!("portolan.{name}")).or_default();
        values.push(value.to_string());
    }

    fn hex32(&mut self, name: &str, value: u32) {
        self.add(name, format!("{value:#010x}"));
    }

    fn hex64(&mut self, name: &str, value: u64) {
        self.add(name, format!("{value:#018x}"));
    }

    fn bytes(&mut self, name: &str, bytes: &[u8]) {
        let text: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        if !text.is_empty() {
            self.add(name, text.join(":"));
        }
    }

    fn header(&mut self, h: &FrameHeader, frame: &[u8], chunks: usize) {
        let header_len = u16::from_be_bytes([frame[4], frame[5]]);
        self.add("magic", "0x504c");
        self.add("version", 1);
        self.add("chunk_count", chunks);
        self.add("header_len", header_len);
        let flags = u16::from(h.crowded) | u16::from(h.return_credit) << 1;
        self.add("flags", format!("{flags:#06x}"));
        self.add("flags.crowded", u8::from(h.crowded));
        self.add("flags.return_credit", u8::from(h.return_credit));
        self.add("flags.reserved", "0x0000");
        self.add("src_node", h.src_node);
        self.add("dst_node", h.dst_node);
        self.add("node", h.src_node);
        self.add("node", h.dst_node);
        self.add("src_queue", h.src_queue);
        self.add("dst_queue", h.dst_queue);
        self.add("held", h.held);
        self.hex32("src_incarnation", h.src_incarnation);
        self.hex32("dst_incarnation", h.dst_incarnation);
        self.add("engine_epoch", h.engine_epoch);
        self.add("sent_buffers", h.sent_buffers);
        self.add("credit_limit", h.credit_limit);
        self.add("sent_at", h.sent_at);
        self.add("echo", h.echo);
        let mut area = frame[..usize::from(header_len)].to_vec();
        area[44..48].fill(0);
        self.hex32("header_crc", crc32c(&area));
        self.add("header_crc.status", 1);
    }

    fn stream(&mut self, h: &FrameHeader, forward: bool, s: &StreamRef) -> Flags {
        let (from, to) = match forward {
            true => (h.src_node, h.dst_node),
            false => (h.dst_node, h.src_node),
        };
        let StreamRef {
            sender_port,
            receiver_port,
            priority,
            epoch,
        } = *s;
        let high = if priority == 1 { " high" } else { "" };
        self.add(
            "stream",
            format!("{from}:{sender_port} → {to}:{receiver_port}{high} epoch {epoch}"),
        );
        self.add("sender_port", sender_port);
        self.add("receiver_port", receiver_port);
        self.add("port", sender_port);
        self.add("port", receiver_port);
        self.add("stream_epoch", epoch);
        Flags {
            high: priority == 1,
            ..Flags::default()
        }
    }

    fn start(&mut self, start: Option<u32>) -> bool {
        if let Some(start) = start {
            self.add("start", start);
        }
        start.is_some()
    }

    fn payload(&mut self, payload: Payload, bytes: &[u8]) {
        self.add("payload.length", payload.len);
        self.bytes("reserved", &[0; 2]);
        self.hex32("payload.crc", crc32c(bytes));
        self.add("payload.crc.status", u8::from(payload.crc == crc32c(bytes)));
        self.bytes("payload", bytes);
    }

    fn hello(&mut self, hello: &Hello<'_>) {
        self.hex64("hello.incarnation", hello.incarnation);
        self.hex64("hello.echo", hello.echo);
        self.hex64("hello.cluster", hello.cluster);
        self.add("hello.wire_min", hello.wire_min);
        self.add("hello.wire_max", hello.wire_max);
        self.add("hello.queues", hello.queues);
        self.add("hello.name_len", hello.name.len());
        self.add("hello.max_frame", hello.max_frame);
        self.add("hello.window", hello.window);
        self.add("hello.recovery", hello.policy.recovery);
        self.add("hello.ack_rule", hello.policy.ack_rule);
        self.add("hello.order", hello.policy.order);
        self.add("hello.unasked", hello.unasked);
        if !hello.name.is_empty() {
            self.add("hello.name", hello.name);
        }
        self.bytes("padding", &[0; 3][..hello.name.len().wrapping_neg() % 4]);
        self.hex32("hello.features", hello.features);
        self.add("hello.features.next", hello.features & 1);
        self.add("hello.features.run", hello.features >> 1 & 1);
        self.add("hello.features.bare", hello.features >> 2 & 1);
    }

    fn received(&mut self, base: u32, received: &Received) {
        let words = received.words();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.bytes("received", &bytes);
        // Runs of numbers, as people write them.
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for i in (0..received.end()).filter(|&i| received.has(i)) {
            match runs.last_mut() {
                Some((from, len)) if *from + *len == i as u32 => *len += 1,
                _ => runs.push((i as u32, 1)),
            }
        }
        let number = |i: u32| base.wrapping_add(i);
        let text: Vec<String> = runs
            .iter()
            .map(|&(from, len)| match len {
                1 => number(from).to_string(),
                _ => format!("{}-{}", number(from), number(from + len - 1)),
            })
            .collect();
        if !text.is_empty() {
            self.add("received.numbers", text.join(", "));
        }
    }

    /// The kind's number and name, after all its fields.
    fn chunk(&mut self, h: &FrameHeader, chunk: &Chunk<'_>, bytes: &[u8]) -> (u8, &'static str) {
        let (number, name, flags) = match chunk {
            Chunk::Hello(hello) => {
                self.hello(hello);
                (1, "HELLO", Flags::default())
            }
            Chunk::HelloAck(hello) => {
                self.hello(hello);
                (2, "HELLO-ACK", Flags::default())
            }
            Chunk::Reset {
                src_incarnation,
                dst_incarnation,
                reason,
                detail,
            } => {
                self.hex32("reset.src_incarnation", *src_incarnation);
                self.hex32("reset.dst_incarnation", *dst_incarnation);
                self.add("reset.reason", reason);
                self.add("reset.detail", detail);
                self.bytes("reserved", &[0; 2]);
                (3, "RESET", Flags::default())
            }
            Chunk::Eager {
                stream,
                start,
                number,
                tag,
                ack,
                payload,
            } => {
                self.payload(*payload, bytes);
                let high = self.stream(h, true, stream).high;
                self.add("number", number);
                self.hex64("tag", *tag);
                let (start, ack, payload) = (self.start(*start), *ack, true);
                let flags = Flags {
                    payload,
                    start,
                    high,
                    ack,
                    unasked: false,
                };
                (4, "EAGER", flags)
            }
            Chunk::Rts {
                stream,
                start,
                number,
                tag,
                ack,
                total,
                unasked,
                payload,
            } => {
                self.payload(*payload, bytes);
                let high = self.stream(h, true, stream).high;
                self.add("number", number);
                self.hex64("tag", *tag);
                self.add("total", total);
                let (start, ack, payload) = (self.start(*start), *ack, true);
                let flags = Flags {
                    payload,
                    start,
                    high,
                    ack,
                    unasked: *unasked,
                };
                (5, "RTS", flags)
            }
            Chunk::Data {
                stream,
                number,
                offset,
                unasked,
                payload,
            } => {
                self.payload(*payload, bytes);
                let (payload, unasked) = (true, *unasked);
                let flags = self.stream(h, true, stream);
                self.add("number", number);
                self.add("offset", offset);
                let flags = Flags {
                    payload,
                    unasked,
                    ..flags
                };
                (6, "DATA", flags)
            }
            Chunk::Cts {
                stream,
                number,
                granted,
                missing,
                missing_len,
            } => {
                let flags = self.stream(h, false, stream);
                self.add("number", number);
                self.add("granted", granted);
                self.add("missing.count", missing_len);
                self.bytes("reserved", &[0; 3]);
                for range in &missing[..usize::from(*missing_len)] {
                    self.add("missing.from", range.from);
                    self.add("missing.to", range.to);
                }
                (7, "CTS", flags)
            }
            Chunk::MsgEnd { stream, number } => {
                self.add("number", number);
                (8, "MSGEND", self.stream(h, false, stream))
            }
            Chunk::Ack {
                stream,
                base,
                received,
            } => {
                self.add("base", base);
                self.received(*base, received);
                (9, "ACK", self.stream(h, false, stream))
            }
            Chunk::Nack {
                stream,
                expected,
                reason,
            } => {
                self.add("expected", expected);
                self.add("number", expected);
                self.add("nack.reason", reason);
                self.bytes("reserved", &[0; 3]);
                (10, "NACK", self.stream(h, false, stream))
            }
            Chunk::Ready { stream, number } => {
                self.add("number", number);
                (11, "READY", self.stream(h, false, stream))
            }
            Chunk::Probe {
                stream,
                start,
                number,
                total,
            } => {
                let start = self.start(*start);
                let flags = self.stream(h, true, stream);
                self.add("number", number);
                self.add("total", total);
                (12, "PROBE", Flags { start, ..flags })
            }
            Chunk::MsgDrop {
                stream,
                number,
                reason,
            } => {
                self.add("number", number);
                self.add("drop.reason", reason);
                self.bytes("reserved", &[0; 3]);
                (13, "MSGDROP", self.stream(h, false, stream))
            }
            Chunk::DropConfirm { stream, number } => {
                self.add("number", number);
                (14, "DROP-CONFIRM", self.stream(h, true, stream))
            }
            Chunk::Null {
                stream,
                start,
                number,
            } => {
                let start = self.start(*start);
                let flags = self.stream(h, true, stream);
                self.add("number", number);
                (15, "NULL", Flags { start, ..flags })
            }
            Chunk::NullAck {
                stream,
                number,
                delivered,
            } => {
                self.add("number", number);
                self.add("delivered", u8::from(*delivered));
                self.bytes("reserved", &[0; 3]);
                (16, "NULL-ACK", self.stream(h, false, stream))
            }
            Chunk::PortClosed { stream, base } => {
                self.add("base", base);
                (17, "PORT-CLOSED", self.stream(h, false, stream))
            }
            Chunk::Close { stream, next } => {
                self.add("next", next);
                (18, "CLOSE", self.stream(h, true, stream))
            }
            Chunk::Closed { stream } => (19, "CLOSED", self.stream(h, false, stream)),
            Chunk::Refused { stream } => (20, "REFUSED", self.stream(h, false, stream)),
            Chunk::Resume { stream, base } => {
                self.add("base", base);
                (21, "RESUME", self.stream(h, false, stream))
            }
            Chunk::PathProbe { size, nonce } => {
                self.path(*size, *nonce);
                (22, "PATH-PROBE", Flags::default())
            }
            Chunk::PathAck { size, nonce } => {
                self.path(*size, *nonce);
                (23, "PATH-ACK", Flags::default())
            }
        };
        self.flags(&flags);
        self.add("chunk.kind", number);
        (number, name)
    }

    fn path(&mut self, size: u16, nonce: u32) {
        self.add("size", size);
        self.bytes("reserved", &[0; 2]);
        self.hex32("nonce", nonce);
    }

    fn flags(&mut self, flags: &Flags) {
        let now = flags.ack == AckMode::Immediate;
        let lazy = flags.ack == AckMode::Lazy;
        let Flags {
            payload,
            start,
            high,
            unasked,
            ..
        } = *flags;
        let bits = [payload, start, high, now, lazy, unasked, false];
        let names = [
            "payload", "start", "high", "ack_now", "ack_lazy", "unasked", "tag",
        ];
        let mut byte = 0;
        for (bit, (name, set)) in names.iter().zip(bits).enumerate() {
            self.add(&format!("chunk.{name}"), u8::from(set));
            byte |= u8::from(set) << bit;
        }
        self.add("chunk.flags", format!("{byte:#04x}"));
        self.add("chunk.reserved", "0x00");
    }
}

/// All that is shown of a frame with one chunk, and the number and name of the chunk's kind.
pub fn expected(
    header: &FrameHeader,
    (chunk, bytes): &Sample,
    frame: &[u8],
) -> (Fields, u8, &'static str) {
    let mut expected = Expected::default();
    expected.header(header, frame, 1);
    let (number, name) = expected.chunk(header, chunk, bytes);
    let length = u16::from_be_bytes([frame[50], frame[51]]);
    expected.add("chunk.length", length);
    let used = 48 + usize::from(length) + bytes.len();
    expected.bytes("padding", &frame[used..]);
    (expected.0, number, name)
}
