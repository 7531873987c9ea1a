//! Who captures which engine's frames: a ring per engine, made for one connection and gone with it.
//!
//! The serving engine and its standby have the ring mapped ([`ToEngine::Tap`]), so a takeover goes on with it; a process started later hears of
//! it in its briefing. It is not stored: a supervisor that goes on with engines tells them to end what it knows nothing of, and who captures sees
//! that in the ring and asks again.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use portolan_abi::control::{ErrorCode, Response};
use portolan_abi::memory::{create_sealed, reopen_read_only};
use portolan_abi::tap::{self, MARK_BYTES, TapGeometry};

use super::Supervisor;
use crate::engine_link::ToEngine;

/// Most bytes of a ring.
const MAX_BUFFER: u64 = 1 << 30;
/// What Ethernet puts before a packet, and a tag or two.
const ETHERNET: u32 = 14 + 8;

/// A ring.
#[derive(Debug)]
struct Capture {
    id: u64,
    client: u64,
    pid: i32,
    geometry: TapGeometry,
    peer: Option<u16>,
    ring: Arc<OwnedFd>,
    mark: Arc<OwnedFd>,
}

impl Capture {
    fn message(&self) -> (ToEngine, Vec<Arc<OwnedFd>>) {
        let message = ToEngine::Tap {
            id: self.id,
            geometry: self.geometry,
            peer: self.peer,
        };
        (
            message,
            vec![Arc::clone(&self.ring), Arc::clone(&self.mark)],
        )
    }
}

/// All rings, by engine.
#[derive(Debug, Default)]
pub(super) struct Captures {
    by_engine: BTreeMap<usize, Capture>,
    made: u64,
}

impl Captures {
    /// What a new process of this engine must hear.
    pub(super) fn briefing(&self, index: usize) -> Option<(ToEngine, Vec<Arc<OwnedFd>>)> {
        self.by_engine.get(&index).map(Capture::message)
    }
}

/// What is asked for.
pub(super) struct Wanted {
    pub(super) engine: u16,
    pub(super) snaplen: u32,
    pub(super) peer: Option<u16>,
    pub(super) buffer_bytes: u64,
}

fn refuse(code: ErrorCode, message: impl Into<String>) -> Response {
    Response::Error {
        code,
        message: message.into(),
    }
}

impl Supervisor {
    /// A client wants to see an engine's frames. Answered with the ring, which is the engine's from now on.
    pub(super) fn request_capture(&mut self, id: u64, wanted: &Wanted) -> Result<(), Response> {
        let Some(client) = self.clients.get(id) else {
            return Ok(());
        };
        if client.who.uid != 0 {
            let message = "only root may capture frames: they carry everybody's messages";
            return Err(refuse(ErrorCode::Denied, message));
        }
        let pid = client.who.pid;
        let index = usize::from(wanted.engine);
        if self.engines.get(index).is_none() {
            let message = format!(
                "there is no engine {}; `portolan status` lists them",
                wanted.engine
            );
            return Err(refuse(ErrorCode::NotFound, message));
        }
        let other = self.captures.by_engine.get(&index);
        if let Some(other) = other.filter(|other| other.client != id) {
            let message = format!(
                "the frames of engine {index} are captured by process {} already; end it first",
                other.pid
            );
            return Err(refuse(ErrorCode::PortInUse, message));
        }
        let buffer = wanted.buffer_bytes.min(MAX_BUFFER);
        let longest = u32::from(self.mtu) + ETHERNET;
        let geometry = TapGeometry::fitting(buffer, wanted.snaplen, longest);
        let make = || -> std::io::Result<_> {
            let ring = create_sealed("portolan-tap", geometry.bytes())?;
            let mark = create_sealed("portolan-tap-mark", MARK_BYTES)?;
            tap::initialise(ring.as_fd(), geometry)?;
            let read_only = reopen_read_only(ring.as_fd())?;
            Ok((ring, mark, read_only))
        };
        let (ring, mark, read_only) = make().map_err(|error| {
            let message = format!("the ring cannot be made: {error}");
            refuse(ErrorCode::Internal, message)
        })?;
        self.captures.made += 1;
        let capture = Capture {
            id: self.captures.made,
            client: id,
            pid,
            geometry,
            peer: wanted.peer,
            ring: Arc::new(ring),
            mark: Arc::new(mark),
        };
        let (message, fds) = capture.message();
        let answer = vec![Arc::new(read_only), Arc::clone(&capture.mark)];
        tracing::info!(engine = index, pid, "frames are captured");
        self.captures.by_engine.insert(index, capture);
        self.tell(index, &message, fds);
        self.finish(id, Response::Capturing { geometry }, answer);
        Ok(())
    }

    /// A connection has ended: so have its captures.
    pub(super) fn end_captures_of(&mut self, client: u64) {
        let captures = &self.captures.by_engine;
        let theirs = captures
            .iter()
            .filter(|(_, capture)| capture.client == client);
        let engines: Vec<usize> = theirs.map(|(index, _)| *index).collect();
        for index in engines {
            self.captures.by_engine.remove(&index);
            tracing::info!(engine = index, "frames are captured no longer");
            self.tell(index, &ToEngine::Untap, Vec::new());
        }
    }
}
