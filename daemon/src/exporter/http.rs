//! HTTP, as much of it as Prometheus needs: GET and HEAD of one page, an answer, the end.
//!
//! Bounds: [`CONNECTIONS`] at a time, of which the one that has been silent for longest makes way for a new one; [`REQUEST_BYTES`] until the
//! empty line; [`ASKS_WITHIN`] to ask and [`TAKES_WITHIN`] to take the answer. A body is never read. Nothing waits for anybody.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::page::Format;

/// Connections at a time.
pub const CONNECTIONS: usize = 16;
/// Longest request, up to the empty line.
pub const REQUEST_BYTES: usize = 8192;
/// A client has asked within this.
pub const ASKS_WITHIN: Duration = Duration::from_secs(2);
/// And taken its answer within this.
pub const TAKES_WITHIN: Duration = Duration::from_secs(5);
/// What a client still says after its answer is read and thrown away for so long, as closing at once might destroy the answer.
const LINGERS: Duration = Duration::from_millis(500);
/// From one attempt to have the address to the next.
const AGAIN: Duration = Duration::from_millis(50);

/// Where pages come from.
pub trait Pages {
    /// The page as of now.
    fn page(&mut self, format: Format, answered: &Answered) -> Vec<u8>;
}

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The page was sent.
    Answered,
    /// Another path than /metrics.
    NotFound,
    /// Neither GET nor HEAD.
    BadMethod,
    /// No HTTP.
    BadRequest,
    /// Too long.
    TooLong,
    /// Too slow to ask or to take the answer.
    TooSlow,
    /// Made way for another.
    MadeWay,
    /// It ended by itself before it had its answer.
    Left,
}

impl Outcome {
    const ALL: [(Self, &'static str); 8] = [
        (Self::Answered, "answered"),
        (Self::NotFound, "not_found"),
        (Self::BadMethod, "bad_method"),
        (Self::BadRequest, "bad_request"),
        (Self::TooLong, "too_long"),
        (Self::TooSlow, "too_slow"),
        (Self::MadeWay, "made_way"),
        (Self::Left, "left"),
    ];
}

/// Connections by what became of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answered([u64; Outcome::ALL.len()]);

impl Answered {
    fn count(&mut self, outcome: Outcome) {
        if let Some(place) = Outcome::ALL.iter().position(|(known, _)| *known == outcome) {
            self.0[place] += 1;
        }
    }

    /// Name and number of each.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let all = Outcome::ALL.iter().zip(self.0);
        all.map(|((_, name), count)| (*name, count))
    }
}

/// How far a connection is.
enum Stage {
    Asking(Vec<u8>),
    Taking { answer: Vec<u8>, taken: usize },
    Leaving,
}

struct Connection {
    stream: TcpStream,
    stage: Stage,
    since: Instant,
    deadline: Instant,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Page { format: Format, body: bool },
    Refused(Outcome),
}

/// A listening socket.
pub struct Server {
    listener: TcpListener,
    connections: Vec<Connection>,
    answered: Answered,
}

impl Server {
    /// Listens, as soon as whoever has the address lets go of it.
    ///
    /// # Errors
    /// The system's.
    pub fn bind(address: SocketAddr, within: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + within;
        let listener = loop {
            match TcpListener::bind(address) {
                Err(error)
                    if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline =>
                {
                    std::thread::sleep(AGAIN);
                }
                other => break other?,
            }
        };
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            connections: Vec::new(),
            answered: Answered::default(),
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `parent`'s other end is closed.
    ///
    /// # Errors
    /// The system's: it cannot wait.
    pub fn serve(mut self, parent: &impl AsFd, pages: &mut dyn Pages) -> anyhow::Result<()> {
        loop {
            let mut fds = vec![
                PollFd::new(parent, PollFlags::empty()),
                PollFd::new(&self.listener, PollFlags::IN),
            ];
            for connection in &self.connections {
                let flags = match connection.stage {
                    Stage::Taking { .. } => PollFlags::OUT,
                    _ => PollFlags::IN,
                };
                fds.push(PollFd::new(&connection.stream, flags));
            }
            let next = self.connections.iter().map(|c| c.deadline).min();
            let wait = next.map(|at| timespec(at.saturating_duration_since(Instant::now())));
            match rustix::event::poll(&mut fds, wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready.first() == Some(&true) {
                return Ok(());
            }
            self.go_on(ready.get(2..).unwrap_or_default(), pages);
            if ready.get(1) == Some(&true) {
                self.welcome();
            }
        }
    }

    /// Does what can be done for each connection, and ends those that are done or overdue.
    fn go_on(&mut self, ready: &[bool], pages: &mut dyn Pages) {
        let now = Instant::now();
        let mut kept = Vec::new();
        for (index, mut connection) in std::mem::take(&mut self.connections)
            .into_iter()
            .enumerate()
        {
            let is_ready = ready.get(index) == Some(&true);
            let stays = if is_ready {
                self.advance(&mut connection, pages)
            } else {
                true
            };
            if stays && connection.deadline > now {
                kept.push(connection);
            } else if stays && !matches!(connection.stage, Stage::Leaving) {
                self.answered.count(Outcome::TooSlow);
            }
        }
        self.connections = kept;
    }

    /// False: it is over.
    fn advance(&mut self, connection: &mut Connection, pages: &mut dyn Pages) -> bool {
        let mut space = [0; 2048];
        match &mut connection.stage {
            Stage::Asking(request) => {
                match connection.stream.read(&mut space) {
                    Err(error) if waits(&error) => return true,
                    Ok(length) if length > 0 => {
                        request.extend_from_slice(space.get(..length).unwrap_or_default());
                    }
                    _ => {
                        self.answered.count(Outcome::Left);
                        return false;
                    }
                }
                let asked = match read_head(request) {
                    Some(asked) => asked,
                    None if request.len() >= REQUEST_BYTES => Asked::Refused(Outcome::TooLong),
                    None => return true,
                };
                let answer = match asked {
                    Asked::Page { format, body } => {
                        self.answered.count(Outcome::Answered);
                        let page = pages.page(format, &self.answered);
                        response("200 OK", format.content_type(), &page, body)
                    }
                    Asked::Refused(outcome) => {
                        self.answered.count(outcome);
                        refusal(outcome)
                    }
                };
                connection.stage = Stage::Taking { answer, taken: 0 };
                connection.deadline = Instant::now() + TAKES_WITHIN;
                self.advance(connection, pages)
            }
            Stage::Taking { answer, taken } => {
                let rest = answer.get(*taken..).unwrap_or_default();
                match connection.stream.write(rest) {
                    Ok(length) => *taken += length,
                    Err(error) if waits(&error) => return true,
                    Err(_) => return false,
                }
                if *taken >= answer.len() {
                    connection.stage = Stage::Leaving;
                    connection.deadline = Instant::now() + LINGERS;
                    return connection.stream.shutdown(Shutdown::Write).is_ok();
                }
                true
            }
            Stage::Leaving => match connection.stream.read(&mut space) {
                Err(error) => waits(&error),
                Ok(length) => length > 0,
            },
        }
    }

    fn welcome(&mut self) {
        for _ in 0..CONNECTIONS {
            let Ok((stream, _)) = self.listener.accept() else {
                return;
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.connections.len() >= CONNECTIONS {
                self.make_way();
            }
            let now = Instant::now();
            self.connections.push(Connection {
                stream,
                stage: Stage::Asking(Vec::new()),
                since: now,
                deadline: now + ASKS_WITHIN,
            });
        }
    }

    /// Ends the oldest connection, if there is one that has not asked yet, of these.
    fn make_way(&mut self) {
        let age = |connection: &Connection| match connection.stage {
            Stage::Leaving => (0, connection.since),
            Stage::Asking(_) => (1, connection.since),
            Stage::Taking { .. } => (2, connection.since),
        };
        let places = 0..self.connections.len();
        let oldest = places.min_by_key(|place| self.connections.get(*place).map(age));
        if let Some(place) = oldest {
            let gone = self.connections.swap_remove(place);
            if !matches!(gone.stage, Stage::Leaving) {
                self.answered.count(Outcome::MadeWay);
            }
        }
    }
}

fn waits(error: &io::Error) -> bool {
    let kind = error.kind();
    kind == io::ErrorKind::WouldBlock || kind == io::ErrorKind::Interrupted
}

/// Rounded up, so that the deadline has passed afterwards.
fn timespec(wait: Duration) -> Timespec {
    let wait = wait.min(TAKES_WITHIN) + Duration::from_millis(1);
    Timespec {
        tv_sec: wait.as_secs() as i64,
        tv_nsec: wait.subsec_nanos().into(),
    }
}

/// What a request says, once its head is there.
fn read_head(request: &[u8]) -> Option<Asked> {
    let crlf = request.windows(4).position(|end| end == b"\r\n\r\n");
    let bare = request.windows(2).position(|end| end == b"\n\n");
    let end = [crlf, bare].into_iter().flatten().min()?;
    if end > REQUEST_BYTES {
        return Some(Asked::Refused(Outcome::TooLong));
    }
    let Ok(head) = std::str::from_utf8(request.get(..end)?) else {
        return Some(Asked::Refused(Outcome::BadRequest));
    };
    Some(judge(head))
}

fn judge(head: &str) -> Asked {
    let mut lines = head.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let (Some(method), Some(target), Some(version), None) = (method, target, version, words.next())
    else {
        return Asked::Refused(Outcome::BadRequest);
    };
    let is_token = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_uppercase());
    if !is_token(method) || !version.starts_with("HTTP/1.") {
        return Asked::Refused(Outcome::BadRequest);
    }
    let path = target.split('?').next().unwrap_or_default();
    let body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return Asked::Refused(Outcome::BadMethod),
    };
    if path != "/metrics" {
        return Asked::Refused(Outcome::NotFound);
    }
    let accepts = lines.filter_map(|line| line.split_once(':'));
    let mut accepts = accepts.filter(|(name, _)| name.eq_ignore_ascii_case("accept"));
    let open = accepts.any(|(_, what)| what.contains("application/openmetrics-text"));
    let format = if open {
        Format::OpenMetrics
    } else {
        Format::Text
    };
    Asked::Page { format, body }
}

fn refusal(outcome: Outcome) -> Vec<u8> {
    let (status, text) = match outcome {
        Outcome::NotFound => ("404 Not Found", "metrics are at /metrics\n"),
        Outcome::BadMethod => ("405 Method Not Allowed", "only GET and HEAD\n"),
        Outcome::TooLong => ("431 Request Header Fields Too Large", "too long\n"),
        _ => ("400 Bad Request", "this is no HTTP/1 request\n"),
    };
    response(status, "text/plain; charset=utf-8", text.as_bytes(), true)
}

fn response(status: &str, kind: &str, body: &[u8], with_body: bool) -> Vec<u8> {
    let length = body.len();
    let allow = if status.starts_with("405") {
        "Allow: GET, HEAD\r\n"
    } else {
        ""
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    );
    let mut bytes = head.into_bytes();
    if with_body {
        bytes.extend_from_slice(body);
    }
    bytes
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
