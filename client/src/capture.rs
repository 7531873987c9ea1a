//! The frames that pass an engine, for `portolan capture`. Root only.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use portolan_abi::control::{Request, Response};
pub use portolan_abi::tap::{Passing, Way};
use portolan_abi::tap::{TapReader, state};
use rustix::event::{PollFd, PollFlags};

use crate::control::{Connection, timespec};
use crate::error::NodeError;

/// What is to be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureOptions {
    /// The engine: its queue's index among the node's.
    pub engine: u16,
    /// Bytes of each frame that are wanted.
    pub snaplen: u32,
    /// Only frames to and from this node.
    pub peer: Option<u16>,
    /// Bytes that may wait to be read; what comes beyond is dropped and counted.
    pub buffer_bytes: u64,
}

/// Counts of a capture so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureCounts {
    /// Frames there was no room for.
    pub dropped: u64,
    /// Records that made no sense.
    pub nonsense: u64,
}

/// Frames of one engine. Dropping it ends the capture.
pub struct Capture {
    connection: Connection,
    options: CaptureOptions,
    reader: TapReader,
    /// Of rings before this one.
    before: CaptureCounts,
}

impl Capture {
    pub(crate) fn start(path: &Path, options: CaptureOptions) -> Result<Self, NodeError> {
        let connection = Connection::open(path)?;
        let reader = ask(&connection, &options)?;
        Ok(Self {
            connection,
            options,
            reader,
            before: CaptureCounts::default(),
        })
    }

    /// The next frame, its bytes in `to`; `None` if there is none at the moment. When a daemon was restarted, it is asked again.
    ///
    /// # Errors
    /// The capture has ended: the daemon is gone, or refuses to go on.
    pub fn next(&mut self, to: &mut Vec<u8>) -> Result<Option<Passing>, NodeError> {
        // Looked at before the frames: what was recorded before its end is read.
        let ended = self.reader.state() == state::ENDED;
        if let Some(passing) = self.reader.next(to) {
            return Ok(Some(passing));
        }
        if ended {
            let reader = ask(&self.connection, &self.options)?;
            self.before = self.counts();
            self.reader = reader;
        } else if self.connection.is_gone() {
            return Err(NodeError::Disconnected);
        }
        Ok(None)
    }

    /// Does the engine record? A moment after the start it does; while an engine is being replaced, the ring waits for its successor.
    pub fn is_on(&self) -> bool {
        self.reader.state() == state::ON
    }

    /// The epoch of the engine that records, which a successor raises.
    pub fn engine_epoch(&self) -> u32 {
        self.reader.engine_epoch()
    }

    /// The engine.
    pub fn engine(&self) -> u16 {
        self.options.engine
    }

    /// Bytes of each frame that are kept.
    pub fn snaplen(&self) -> u32 {
        self.reader.snaplen()
    }

    /// What could not be read.
    pub fn counts(&self) -> CaptureCounts {
        CaptureCounts {
            dropped: self.before.dropped + self.reader.dropped(),
            nonsense: self.before.nonsense + self.reader.nonsense(),
        }
    }

    /// Waits until the daemon closes the connection, at most so long.
    pub fn pause(&self, time: Duration) {
        let mut fds = [PollFd::new(&self.connection, PollFlags::RDHUP)];
        // Either way the next look tells.
        let _ = rustix::event::poll(&mut fds, Some(&timespec(time)));
    }
}

fn ask(connection: &Connection, options: &CaptureOptions) -> Result<TapReader, NodeError> {
    let request = Request::Capture {
        engine: options.engine,
        snaplen: options.snaplen,
        peer: options.peer,
        buffer_bytes: options.buffer_bytes,
    };
    let (response, descriptors) = connection.request(&request)?;
    let Response::Capturing { geometry } = response else {
        return Err(NodeError::BadAnswer(format!("to Capture: {response:?}")));
    };
    let [ring, mark]: [OwnedFd; 2] = descriptors
        .try_into()
        .map_err(|_| NodeError::BadAnswer("a capture without its ring".into()))?;
    TapReader::map(ring.as_fd(), mark.as_fd(), geometry)
        .map_err(|error| NodeError::BadAnswer(error.to_string()))
}
