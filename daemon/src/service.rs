//! The node's own service on port 0: answers `ping` and `allsize`.
//!
//! An ordinary client in a process of its own, started by the supervisor, so that what it does with its memory can harm nobody. What
//! it says and how much memory it uses is `portolan::service`; this is only its process.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use portolan::service::{Answers, EchoServer, SERVICE_PORT};
use portolan::{CloseReason, Node, PortError};

/// An answer that cannot be delivered for so long is given up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves until the port ends. An error for the supervisor, which starts it again, unless the port was closed on purpose.
pub fn run(socket: &Path) -> anyhow::Result<()> {
    let node = Node::attach(socket)?;
    let mut port = node.open_port(EchoServer::port_options(SERVICE_PORT))?;
    EchoServer::provide_buffers(&mut port).context("the service cannot offer its buffers")?;
    tracing::info!(address = %port.address(), "the service answers");
    let mut server = EchoServer::new(Answers::Service, ANSWER_TIMEOUT);
    let ended = server.serve(&mut port, Duration::MAX);
    tracing::info!(counts = ?server.counts(), anomalies = port.anomalies(), "the service ends");
    match ended {
        Ok(()) | Err(PortError::Closed(CloseReason::ByOwner | CloseReason::Administrator)) => {
            Ok(())
        }
        Err(error) => Err(error).context("the service's port ended"),
    }
}
