//! An actor as the bench sees it: started, told, asked, and ended for certain.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{cancel, process};

use super::{Answer, Job, Order, Role, Totals};

/// Bound on the start of an actor, and on getting ready for a job: memory is faulted in.
const READY: Duration = Duration::from_secs(20);
/// Bound on the end of a job, and on what was sent to end.
const ENDED: Duration = Duration::from_secs(15);
/// How often a wait looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(100);
/// How much of what it wrote to standard error goes into an error.
const SAID: u64 = 4000;

/// Where an actor takes orders from.
enum Link {
    Pipe(ChildStdin),
    Socket(UnixStream),
}

/// A process of a subject. Dropping it kills it, or, if somebody else started it, tells it to end.
pub struct Actor {
    what: String,
    /// None where somebody else started it.
    child: Option<Child>,
    orders: Option<Link>,
    answers: Receiver<String>,
    errors: File,
}

impl Actor {
    /// Starts this program again as `role`; `command` says where, and ends with the program. Waits until it is there.
    pub fn start(what: &str, mut command: Command, role: &Role) -> Result<Self> {
        let errors = tempfile::tempfile().context("temporary file")?;
        let mut child = command
            .arg("actor")
            .arg(serde_json::to_string(role)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", process::describe(&command)))?;
        let out = child.stdout.take().context("no standard output")?;
        let mut actor = Self {
            what: what.to_owned(),
            orders: child.stdin.take().map(Link::Pipe),
            child: Some(child),
            answers: listen(out),
            errors,
        };
        actor.expect_ready()?;
        Ok(actor)
    }

    /// One that somebody else started, at the other end of `stream`; what it says otherwise is in `errors`. It may not be ready yet.
    pub fn attach(what: &str, stream: UnixStream, errors: File) -> Result<Self> {
        Ok(Self {
            what: what.to_owned(),
            child: None,
            answers: listen(stream.try_clone().context("socket")?),
            orders: Some(Link::Socket(stream)),
            errors,
        })
    }

    /// Tells it something.
    pub fn order(&mut self, order: Order) -> Result<()> {
        let line = serde_json::to_string(&order)? + "\n";
        let told = match self.orders.as_mut().context("it was ended")? {
            Link::Pipe(pipe) => pipe.write_all(line.as_bytes()),
            Link::Socket(stream) => stream.write_all(line.as_bytes()),
        };
        told.map_err(|error| self.explain(&format!("cannot be told {order:?}: {error}")))
    }

    /// Gives it a job; it is ready when this returns.
    pub fn prepare(&mut self, job: Job) -> Result<()> {
        self.order(Order::Job(job))?;
        self.expect_ready()
    }

    /// Waits until it is ready.
    pub fn expect_ready(&mut self) -> Result<()> {
        match self.answer(READY)? {
            Answer::Ready => Ok(()),
            other => Err(self.explain(&format!("is not ready but says {other:?}"))),
        }
    }

    /// Has it send no more, and waits until all it sent has ended and nothing comes any more: when it has had so many, if that is
    /// known, or much later. What it sent and what came.
    pub fn settle(&mut self, expected: Option<u64>) -> Result<Totals> {
        self.order(Order::Quiet { expected })?;
        self.settled()
    }

    /// Waits until it has settled, as it was ordered to.
    pub fn settled(&mut self) -> Result<Totals> {
        match self.answer(ENDED)? {
            Answer::Settled(totals) => Ok(totals),
            other => Err(self.explain(&format!("did not settle but says {other:?}"))),
        }
    }

    /// Has it end its job.
    pub fn stop(&mut self) -> Result<()> {
        self.order(Order::Stop)?;
        match self.answer(ENDED)? {
            Answer::Done => Ok(()),
            other => Err(self.explain(&format!("did not stop but says {other:?}"))),
        }
    }

    /// What it says next.
    pub fn answer(&mut self, within: Duration) -> Result<Answer> {
        let deadline = Instant::now() + within;
        loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(line) => {
                    return match serde_json::from_str(&line) {
                        Ok(Answer::Failed(reason)) => Err(self.explain(&reason)),
                        Ok(answer) => Ok(answer),
                        Err(error) => Err(self.explain(&format!("says {line:?}: {error}"))),
                    };
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.explain("ended")),
                Err(RecvTimeoutError::Timeout) if cancel::requested() => bail!("interrupted"),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(self.explain(&format!("says nothing within {within:?}")));
                }
            }
        }
    }

    /// An error about it, with what it wrote to standard error.
    fn explain(&self, what: &str) -> anyhow::Error {
        anyhow::anyhow!("{}: {what}\n{}", self.what, said(&self.errors))
    }
}

/// The end of what was written to standard error.
pub fn said(errors: &File) -> String {
    let end = errors.metadata().map_or(0, |file| file.len());
    let from = end.saturating_sub(SAID);
    let mut said = vec![0; (end - from) as usize];
    // Not by reading on: the file's position is the actor's too.
    let _ = errors.read_exact_at(&mut said, from);
    String::from_utf8_lossy(&said).trim_end().to_owned()
}

/// Lines as they come, until there are no more.
fn listen(out: impl Read + Send + 'static) -> Receiver<String> {
    let (tell, answers) = channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(out).lines().map_while(Result::ok);
        lines.map(|line| tell.send(line)).all(|sent| sent.is_ok())
    });
    answers
}

impl Drop for Actor {
    fn drop(&mut self) {
        // First the end of its orders, which it would end by itself; then for certain.
        if let Some(Link::Socket(stream)) = self.orders.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(child) = &mut self.child {
            process::kill_group(child);
        }
    }
}
