//! `send`: standard input to `portolan recv`, in pieces of 1 MiB, several under way.
//!
//! Pieces travel in one stream, so they arrive in order; the receiver's tokens hold the sender back. `End` carries the number of
//! bytes, so that a truncated transfer is known as one, and the receiver confirms what it wrote out before this command succeeds.

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use portolan::service::{Kind, Tag};
use portolan::{
    Address, Buffer, Event, Node, Port, PortOptions, Priority, Reason, SendOptions, Status,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::arguments::Send;
use crate::ping::random_id;
use crate::progress::Progress;

/// Bytes of a piece.
pub const PIECE: usize = 1 << 20;
/// Pieces under way.
pub const DEPTH: usize = 16;
/// An input that pauses for so long has what is there sent on.
const LINGER: Duration = Duration::from_millis(20);
/// An input that pauses for so long has the receiver told that we are still here, with an empty piece.
const STILL_HERE: Duration = Duration::from_secs(5);

struct Transfer<'p> {
    port: &'p mut Port,
    to: Address,
    id: u64,
    timeout: Duration,
    free: Vec<Buffer>,
    receipt: Option<u64>,
}

pub fn run(node: &Node, options: &Send) -> anyhow::Result<ExitCode> {
    let to = options.target.resolve(node)?;
    let mut port = node.open_port(PortOptions {
        arena_bytes: ((DEPTH + 1) * PIECE) as u64,
        ..PortOptions::default()
    })?;
    for _ in 0..4 {
        let buffer = port.allocate(64)?;
        port.provide_receive_buffer(buffer, Priority::Low)?;
    }
    let free = (0..DEPTH)
        .map(|_| port.allocate(PIECE))
        .collect::<Result<_, _>>()?;
    let mut transfer = Transfer {
        port: &mut port,
        to,
        id: random_id(),
        timeout: options.timeout,
        free,
        receipt: None,
    };
    transfer.begin(options.wait_for_receiver)?;
    let mut progress = Progress::start(options.quiet.quiet);
    transfer.pieces(&mut progress)?;
    transfer.end(progress.bytes())?;
    progress.finish("sent");
    port.close(Duration::ZERO)?;
    Ok(ExitCode::SUCCESS)
}

impl Transfer<'_> {
    fn options(&self, kind: Kind) -> SendOptions {
        let id = self.id;
        SendOptions {
            priority: Priority::Low,
            tag: Tag { kind, id }.encode(),
            timeout: Some(self.timeout),
            ..SendOptions::default()
        }
    }

    /// Finds the receiver, which may be about to start.
    fn begin(&mut self, patience: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let options = self.options(Kind::Begin);
            let handle = self.port.send_bytes(self.to, &[], options)?;
            let grace = self.timeout.saturating_add(Duration::from_secs(10));
            let sent = self.port.wait_for(handle, grace)?;
            let sent = sent.context("the engine did not end a send in time")?;
            match sent.status {
                Status::Delivered => return Ok(()),
                Status::NotDelivered(Reason::PortClosed) => {
                    if start.elapsed() >= patience {
                        bail!(
                            "nobody receives at {to}; start `portolan recv {port}` on node {node} first",
                            to = self.to,
                            port = self.to.port,
                            node = self.to.node
                        );
                    }
                    self.port.drop_sends(self.to, Priority::Low)?;
                    // Asking again at once would only load both nodes.
                    let alarm = self.port.set_alarm(Duration::from_millis(50))?;
                    while !matches!(
                        self.port.blocking_receive(patience)?,
                        None | Some(Event::Alarm(_))
                    ) {}
                    self.port.cancel_alarm(alarm);
                }
                status => bail!("cannot reach {}: {status}", self.to),
            }
        }
    }

    fn pieces(&mut self, progress: &mut Progress) -> anyhow::Result<()> {
        loop {
            let mut buffer = self.buffer()?;
            let (len, more) = self.fill(&mut buffer)?;
            if len > 0 || more {
                let options = self.options(Kind::Data);
                self.port.send(self.to, buffer, len, options)?;
                progress.add(len);
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Reads a piece: as much as fits, or as much as there is before the input pauses. `false`: the input has ended.
    fn fill(&mut self, buffer: &mut Buffer) -> anyhow::Result<(usize, bool)> {
        let input = std::io::stdin();
        let input = input.as_fd();
        let mut len = 0;
        while len < buffer.len() {
            let pause = if len == 0 { STILL_HERE } else { LINGER };
            let timeout = Timespec {
                tv_sec: pause.as_secs() as i64,
                tv_nsec: pause.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&input, PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) => break,
                Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error).context("cannot wait for standard input"),
            }
            match rustix::io::read(input, &mut buffer[len..]) {
                Ok(0) => return Ok((len, false)),
                Ok(read) => len += read,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error).context("cannot read standard input"),
            }
        }
        Ok((len, true))
    }

    /// A free buffer, once there is one.
    fn buffer(&mut self) -> anyhow::Result<Buffer> {
        loop {
            // What has ended shows a failure early, and makes buffers warm.
            while let Some(event) = self.port.receive()? {
                self.handle(event)?;
            }
            if let Some(buffer) = self.free.pop() {
                return Ok(buffer);
            }
            self.wait()?;
        }
    }

    /// One event, in the time that every send ends in.
    fn wait(&mut self) -> anyhow::Result<()> {
        let grace = self.timeout.saturating_add(Duration::from_secs(10));
        let event = self.port.blocking_receive(grace)?;
        self.handle(event.context("the engine did not end a send in time")?)
    }

    fn handle(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Sent(sent) if !sent.status.is_delivered() => {
                bail!("the transfer to {} failed: {}", self.to, sent.status)
            }
            Event::Sent(sent) => self.free.extend(sent.buffer),
            Event::Received(message) => {
                let tag = Tag {
                    kind: Kind::Receipt,
                    id: self.id,
                };
                if message.from() == self.to && message.tag() == tag.encode() {
                    self.receipt = message[..].try_into().ok().map(u64::from_le_bytes);
                }
                self.port.unknown(Event::Received(message));
            }
            other => self.port.unknown(other),
        }
        Ok(())
    }

    /// Says how much it was, and hears how much was written out.
    fn end(&mut self, bytes: u64) -> anyhow::Result<()> {
        let options = self.options(Kind::End);
        self.port
            .send_bytes(self.to, &bytes.to_le_bytes(), options)?;
        while self.port.sends_outstanding() > 0 {
            self.wait()?;
        }
        let start = Instant::now();
        while self.receipt.is_none() {
            let left = self.timeout.saturating_sub(start.elapsed());
            match self.port.blocking_receive(left)? {
                Some(event) => self.handle(event)?,
                None => bail!(
                    "{} took all but did not confirm to have written it",
                    self.to
                ),
            }
        }
        match self.receipt {
            Some(written) if written == bytes => Ok(()),
            written => bail!(
                "{} wrote {} of {bytes} bytes",
                self.to,
                written.unwrap_or(0)
            ),
        }
    }
}
