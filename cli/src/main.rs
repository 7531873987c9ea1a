//! `portolan`: see, test and use a Portolan node from the command line.

mod allsize;
mod arguments;
mod capture;
mod doctor;
mod drain;
mod echo;
mod events;
mod fault;
mod map;
mod paint;
mod ping;
mod progress;
mod receive_file;
mod recovery;
mod report;
mod send_file;
mod table;
mod target;
mod top;

use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use portolan::{Node, Report};

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            // A reader that left (`portolan peers | head`) is no news.
            let left = error.chain().any(|cause| {
                cause
                    .downcast_ref::<std::io::Error>()
                    .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
            });
            if !left {
                eprintln!("portolan: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Command::Manual { directory } = &arguments.command {
        portolan_manual::write(Arguments::command(), 1, directory)
            .with_context(|| directory.display().to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::Doctor(options) = &arguments.command {
        return Err(doctor::run(options));
    }
    let node = Node::attach(&arguments.socket)?;
    match &arguments.command {
        Command::Status(format) => report::show(&node, Report::Status, format.json),
        Command::Peers(format) => report::show(&node, Report::Peers, format.json),
        Command::Ports(format) => report::show(&node, Report::Ports, format.json),
        Command::Counters(format) => report::show(&node, Report::Counters, format.json),
        Command::Events(options) => events::run(node, &arguments.socket, options),
        Command::Top(options) => top::run(&node, options),
        Command::Map(format) => map::show(&node, format.json),
        Command::Drain(options) => drain::run(&node, options),
        Command::Ping(options) => ping::run(&node, options),
        Command::Send(options) => send_file::run(&node, options),
        Command::Recv(options) => receive_file::run(&node, options),
        Command::Echo(options) => echo::run(&node, options),
        Command::Allsize(options) => allsize::run(&node, options),
        Command::Capture(options) => capture::run(&node, options),
        Command::Upgrade { binary } => {
            let absolute = binary.as_deref().map(std::path::absolute).transpose()?;
            let path = absolute.as_ref().map(|path| path.to_string_lossy());
            node.upgrade(path.as_deref())
                .context("the daemon is not replaced")?;
            Ok(ExitCode::SUCCESS)
        }
        // Needs no daemon: done above.
        Command::Doctor(options) => Err(doctor::run(options)),
        Command::Fault(fault) => fault::run(&node, fault),
        Command::Manual { .. } => Ok(ExitCode::SUCCESS), // above
    }
}
