//! The control protocol on the daemon's Unix socket: SOCK_SEQPACKET, one JSON document per packet, descriptors beside it.
//!
//! A request is one packet of at most [`MAX_REQUEST_BYTES`]. A response is one or more packets: the first byte is 1 if another
//! packet follows, 0 if it is the last; the rest, joined, is the JSON document. Descriptors come with the last packet. The ports a
//! connection opened close when it does.
//!
//! A request may be numbered: `#7 {…}`. A daemon that dies while it works on a numbered request has a successor which works on it again, so
//! that an answer may come twice, or its beginning before all of it. Therefore the answer to a numbered request carries the number in its
//! first packet, whose first byte has [`FIRST`] set: `#7 {…}` follows. A client that is in the middle of an answer when such a
//! packet comes begins anew, and passes over answers to other numbers. A request without a number is lost with the daemon that read it.

use serde::{Deserialize, Serialize};

use crate::port::PortGeometry;

/// Default path of the socket.
pub const DEFAULT_SOCKET: &str = "/run/portolan/portolan.sock";
/// Longest request packet.
pub const MAX_REQUEST_BYTES: usize = 4096;
/// Longest response packet.
pub const MAX_RESPONSE_PACKET: usize = 32 * 1024;

/// In the first byte of a response packet: another follows.
pub const MORE: u8 = 1;
/// In the first byte of a response packet: the answer to a numbered request begins here, with its number.
pub const FIRST: u8 = 2;

/// Writes the number before a request or an answer.
pub fn number_prefix(number: u64) -> std::string::String {
    std::format!("#{number} ")
}

/// The number of a request or an answer, if it has one, and what follows. A number that makes no sense is none: the rest is then no
/// JSON.
pub fn split_number(packet: &[u8]) -> (Option<u64>, &[u8]) {
    let numbered = || {
        let rest = packet.strip_prefix(b"#")?;
        let end = rest.iter().position(|byte| *byte == b' ')?;
        let (digits, text) = (rest.get(..end)?, rest.get(end + 1..)?);
        if digits.is_empty() || digits.len() > 20 || !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        let number = core::str::from_utf8(digits).ok()?.parse().ok()?;
        Some((number, text))
    };
    match numbered() {
        Some((number, text)) if number > 0 => (Some(number), text),
        _ => (None, packet),
    }
}

/// What a client asks. Requests without arguments are written with braces: serde lets keys nobody knows pass for unit variants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Who are you? Answered by [`Response::Node`].
    Attach {
        /// [`crate::PORT_ABI_VERSION`] of the client.
        abi: u32,
    },
    /// Opens a port. Answered by [`Response::PortOpened`] with four descriptors: client half, engine half (read-only), event
    /// doorbell (engine → application), engine doorbell (application → engine).
    OpenPort {
        /// [`crate::PORT_ABI_VERSION`] of the client.
        abi: u32,
        /// The port; `None` for any that is free and allowed.
        port: Option<u16>,
        /// Send tokens, receive tokens, arena.
        geometry: PortGeometry,
    },
    /// Closes a port of this connection. Answered by [`Response::Done`] when it is closed.
    ClosePort {
        /// The port.
        port: u16,
    },
    /// A node's number for its name or number. Answered by [`Response::Node`].
    Resolve {
        /// Name or decimal number.
        node: String,
    },
    /// Answered by [`Response::Document`].
    Status {},
    /// Answered by [`Response::Document`].
    Peers {},
    /// Answered by [`Response::Document`].
    Ports {},
    /// Answered by [`Response::Document`].
    Counters {},
    /// What happened on the node. Answered by [`Response::Document`]. Older daemons refuse it as no request.
    Events {
        /// `run` of the document that was read last; `None` at first.
        run: Option<String>,
        /// Only what happened after that event: `after` of that document, 0 at first.
        after: u64,
        /// If nothing has happened, wait a moment for something to happen.
        wait: bool,
    },
    /// Injects a fault (root only). Answered by [`Response::Done`].
    Fault {
        /// Which engine.
        engine: u16,
        /// `kill`, `hang` or `reset`.
        kind: String,
    },
    /// Records the frames that pass an engine (root only), until the connection ends. Answered by [`Response::Capturing`] with two
    /// descriptors: the ring (read-only) and the mark of [`crate::tap`].
    Capture {
        /// Which engine.
        engine: u16,
        /// Bytes of each frame that are wanted.
        snaplen: u32,
        /// Only frames to and from this node.
        peer: Option<u16>,
        /// Bytes the ring may have.
        buffer_bytes: u64,
    },
    /// The nodes that are known, and what is wrong with them. Answered by [`Response::Document`].
    Map {},
    /// Begins or ends draining the node (root only), or asks how far it is. Answered by [`Response::Document`].
    Drain {
        /// `begin`, `end` or `look`.
        action: String,
    },
    /// Replaces the daemon by another build (root only). Answered by [`Response::Done`], by that build.
    Upgrade {
        /// Its path, absolute; `None` for what is where the daemon was started from.
        binary: Option<String>,
    },
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// A node.
    Node {
        /// Its id.
        id: u16,
        /// Its name.
        name: String,
        /// Longest wait, in milliseconds, that a send without a timeout of its own gets.
        default_timeout_ms: u64,
    },
    /// The port is open.
    PortOpened {
        /// Its number.
        port: u16,
        /// This node's id.
        node: u16,
        /// Its layout.
        geometry: PortGeometry,
    },
    /// Frames are recorded.
    Capturing {
        /// The ring's layout.
        geometry: crate::tap::TapGeometry,
    },
    /// Done.
    Done,
    /// A report for people or scripts.
    Document {
        /// JSON.
        document: serde_json::Value,
    },
    /// Refused or failed.
    Error {
        /// What kind.
        code: ErrorCode,
        /// One line: what, and what to do.
        message: String,
    },
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The packet is no request.
    BadRequest,
    /// Client and daemon speak different ABI versions.
    AbiMismatch,
    /// Not allowed for this uid and gid.
    Denied,
    /// The port is taken.
    PortInUse,
    /// Nothing by that name or number.
    NotFound,
    /// A limit of the daemon is reached.
    Limit,
    /// The engine that should do it is not there at the moment; try again.
    Unavailable,
    /// The daemon's own failure.
    Internal,
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_they_are_written() {
        for number in [1, 7, u64::MAX] {
            let packet = number_prefix(number) + "{}";
            assert_eq!(split_number(packet.as_bytes()), (Some(number), &b"{}"[..]));
        }
        for packet in [
            "{}",
            "",
            "#",
            "# {}",
            "#0 {}",
            "#x {}",
            "#-1 {}",
            "#+1 {}",
            "#7{}",
            "#18446744073709551616 {}",
        ] {
            assert_eq!(
                split_number(packet.as_bytes()),
                (None, packet.as_bytes()),
                "{packet}"
            );
        }
    }

    // A key nobody knows, in requests with and without arguments. Expect: refused, and what we write ourselves is not.
    #[test]
    fn unknown_keys_are_refused() {
        let requests = [
            Request::Attach { abi: 1 },
            Request::ClosePort { port: 1 },
            Request::Status {},
            Request::Peers {},
            Request::Ports {},
            Request::Counters {},
            Request::Events {
                run: None,
                after: 0,
                wait: true,
            },
            Request::Map {},
        ];
        for request in requests {
            let text = serde_json::to_string(&request).unwrap();
            assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request);
            let surprise = text.replacen('{', r#"{"surprise":1,"#, 1);
            assert!(
                serde_json::from_str::<Request>(&surprise).is_err(),
                "{surprise}"
            );
        }
        assert_eq!(
            serde_json::to_string(&Request::Status {}).unwrap(),
            r#"{"request":"status"}"#
        );
    }
}
