//! The control socket: one request per connection, a line of JSON each way.
//!
//! Served between two turns of the loop. Who connects is the lab's own process or a person with root, so it is trusted to
//! send its line at once; if it does not, the wire waits for it as long as [`PATIENCE`] and goes on.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use portolan_testbed::wire::{WireAnswer, WireRequest};

const PATIENCE: Duration = Duration::from_millis(200);
/// The longest request.
const REQUEST: u64 = 64 * 1024;

/// The listening socket.
#[derive(Debug)]
pub struct Control(UnixListener);

impl Control {
    pub fn listen(path: &Path) -> Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    /// Answers whoever waits.
    pub fn serve(&self, mut answer: impl FnMut(WireRequest) -> WireAnswer) {
        while let Ok((stream, _)) = self.0.accept() {
            if let Err(error) = converse(&stream, &mut answer) {
                eprintln!("a request went wrong: {error:#}");
            }
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn converse(stream: &UnixStream, answer: &mut impl FnMut(WireRequest) -> WireAnswer) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(REQUEST)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Ok(request) => answer(request),
        Err(error) => WireAnswer::Refused(error.to_string()),
    };
    let mut stream = stream;
    stream.write_all((serde_json::to_string(&answer)? + "\n").as_bytes())?;
    Ok(())
}
