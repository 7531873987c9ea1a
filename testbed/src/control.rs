//! Asking a daemon for a report over its socket, without the client library: what is tested does not judge itself.
//!
//! SOCK_SEQPACKET, one JSON document per packet; a response's packets begin with 1 if another follows, 0 if not.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use serde_json::Value;

/// The longest packet the daemon sends.
const PACKET: usize = 32 * 1024;
/// More than any report.
const REPORT: usize = 16 * 1024 * 1024;

/// Connects to a daemon; an error when nothing accepts.
pub(crate) fn reach(path: &Path) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?).with_context(|| path.display().to_string())?;
    Ok(socket)
}

/// What the daemon answers to a report's request: `status`, `peers`, `ports` or `counters`.
pub(crate) fn report(path: &Path, request: &str, within: Duration) -> Result<Value> {
    let deadline = Instant::now() + within;
    let socket = reach(path)?;
    let request = serde_json::json!({ "request": request }).to_string();
    send(&socket, request.as_bytes(), SendFlags::NOSIGNAL).context("request to the daemon")?;
    let mut document = Vec::new();
    let mut packet = vec![0; PACKET];
    loop {
        wait_readable(&socket, deadline)?;
        let (length, _) =
            recv(&socket, &mut *packet, RecvFlags::empty()).context("answer of the daemon")?;
        match packet.get(..length).and_then(<[u8]>::split_first) {
            Some((more, part)) => {
                document.extend_from_slice(part);
                if *more == 0 {
                    break;
                }
            }
            None => bail!("the daemon hung up"),
        }
        if document.len() > REPORT {
            bail!("the daemon's answer never ends");
        }
    }
    let mut answer: Value = serde_json::from_slice(&document).context("answer of the daemon")?;
    match answer.get_mut("document") {
        Some(report) => Ok(report.take()),
        None => bail!("the daemon answers {answer}"),
    }
}

fn wait_readable(socket: &OwnedFd, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).context("timeout")?;
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
        Ok(0) => bail!("the daemon does not answer"),
        Ok(_) => Ok(()),
        Err(error) => Err(error).context("poll"),
    }
}
