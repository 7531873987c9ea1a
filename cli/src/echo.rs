//! `echo`: sends every message back.

use std::process::ExitCode;
use std::time::Duration;

use portolan::Node;
use portolan::service::{Answers, EchoServer};

use crate::arguments::Echo;

/// An answer that cannot be delivered for so long is given up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

pub fn run(node: &Node, options: &Echo) -> anyhow::Result<ExitCode> {
    let mut port = node.open_port(EchoServer::port_options(options.port))?;
    EchoServer::provide_buffers(&mut port)?;
    eprintln!("answering at {}", port.address());
    EchoServer::new(Answers::Everything, ANSWER_TIMEOUT).serve(&mut port, Duration::MAX)?;
    Ok(ExitCode::SUCCESS)
}
