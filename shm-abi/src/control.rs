//! The control protocol on the daemon's Unix socket: SOCK_SEQPACKET, one JSON document per packet, descriptors beside it.
//!
//! A request is one packet of at most [`MAX_REQUEST_BYTES`]. A response is one or more packets: the first byte is 1 if another
//! packet follows, 0 if it is the last; the rest, joined, is the JSON document. Descriptors come with the last packet. The ports a
//! connection opened close when it does.

use serde::{Deserialize, Serialize};

use crate::port::PortGeometry;

/// Default path of the socket.
pub const DEFAULT_SOCKET: &str = "/run/portolan/portolan.sock";
/// Longest request packet.
pub const MAX_REQUEST_BYTES: usize = 4096;
/// Longest response packet.
pub const MAX_RESPONSE_PACKET: usize = 32 * 1024;

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
    /// Injects a fault (root only). Answered by [`Response::Done`].
    Fault {
        /// Which engine.
        engine: u16,
        /// `kill`, `hang` or `reset`.
        kind: String,
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
