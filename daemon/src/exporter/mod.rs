//! The exporter: answers Prometheus over HTTP, in a process of its own without any privilege.
//!
//! Problem: whoever can reach the port may send anything, as slowly as they like, on as many connections as they like. The supervisor has
//! one thread and looks after engines; nothing of this may delay it.
//!
//! Idea: this process is an ordinary client of the daemon's socket. It asks for the four reports that `portolan` shows, at most five times a
//! second however many ask it, and makes a page of them. Its HTTP is one thread and one poll set with bounds on everything:
//! [`http::CONNECTIONS`] connections, [`http::REQUEST_BYTES`] of a request, a deadline for each.
//!
//! Rejected: *tiny_http*, *hyper*: a thread per connection without a deadline, or a runtime, for one path and one method; *prometheus-client*: a
//! registry of the process's own counters, where ours are read from another process's reports and only have to be written down.
//!
//! | file | noun |
//! |---|---|
//! | `families.rs` | every metric there is |
//! | `page.rs` | the text format |
//! | `collect.rs` | from reports to a page |
//! | `http.rs` | connections |

pub mod collect;
pub mod families;
pub mod http;
pub mod page;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use portolan::{Node, NodeError, Report};
use serde_json::Value;

use collect::Reports;
use page::Format;

/// A page serves everybody who asks within this.
const FRESH: Duration = Duration::from_millis(200);
/// A predecessor that leaves may have the address for so long.
const ADDRESS_WITHIN: Duration = Duration::from_secs(5);

/// Serves until standard input ends: until the supervisor leaves.
///
/// # Errors
/// The address cannot be had.
pub fn run(socket: &Path, listen: SocketAddr) -> anyhow::Result<()> {
    // Never at others' expense. It works as well without.
    let _ = rustix::process::nice(10);
    let server = http::Server::bind(listen, ADDRESS_WITHIN)
        .with_context(|| format!("metrics.listen = \"{listen}\": cannot listen there; is another process there (`ss -ltnp`), or is the address none of this machine?"))?;
    tracing::info!(%listen, "metrics are served at /metrics");
    let mut source = Source::new(socket);
    server.serve(&std::io::stdin(), &mut source)
}

/// Where pages come from.
struct Source {
    socket: PathBuf,
    node: Option<Node>,
    reports: Option<(Instant, Reports)>,
    collected: u64,
    failed: u64,
}

impl Source {
    fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            node: None,
            reports: None,
            collected: 0,
            failed: 0,
        }
    }

    fn ask(&mut self) -> Result<Reports, NodeError> {
        let node = match self.node.take() {
            Some(node) => node,
            None => Node::attach(&self.socket)?,
        };
        let reports = Reports {
            status: node.report(Report::Status)?,
            peers: node.report(Report::Peers)?,
            ports: node.report(Report::Ports)?,
            counters: node.report(Report::Counters)?,
        };
        // Only a connection that worked is kept.
        self.node = Some(node);
        Ok(reports)
    }

    fn fresh(&mut self) -> &Reports {
        let fresh = |at: &Instant| at.elapsed() < FRESH;
        if !self.reports.as_ref().is_some_and(|(at, _)| fresh(at)) {
            self.collected += 1;
            let reports = self.ask().unwrap_or_else(|error| {
                self.failed += 1;
                tracing::warn!(%error, "the daemon does not report");
                Reports::default()
            });
            self.reports = Some((Instant::now(), reports));
        }
        let reports = self
            .reports
            .get_or_insert_with(|| (Instant::now(), Reports::default()));
        &reports.1
    }
}

impl http::Pages for Source {
    fn page(&mut self, format: Format, answered: &http::Answered) -> Vec<u8> {
        let mut samples = collect::samples(self.fresh());
        samples.plain("portolan_exporter_collections_total", self.collected as f64);
        samples.plain(
            "portolan_exporter_collections_failed_total",
            self.failed as f64,
        );
        for (outcome, count) in answered.counts() {
            let labels = [("outcome", Value::from(outcome))];
            samples.add("portolan_exporter_requests_total", &labels, count as f64);
        }
        samples.render(format).into_bytes()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use http::Pages;

    // Expect: a page that says so, in both formats' terms, and counts it.
    #[test]
    fn a_daemon_that_does_not_answer() {
        let mut source = Source::new(Path::new("/nowhere/at/all"));
        let page = source.page(Format::Text, &http::Answered::default());
        let page = String::from_utf8(page).unwrap();
        let says = |line: &str| page.lines().any(|is| is == line);
        assert!(says("portolan_up 0"), "{page}");
        assert!(
            says("portolan_exporter_collections_failed_total 1"),
            "{page}"
        );
    }
}
