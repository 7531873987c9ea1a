//! `portoland`: the daemon of a node, its configuration check, and the processes it starts from itself.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// The Portolan daemon: one per node.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    arg_required_else_help = true
)]
struct Arguments {
    /// Runs the daemon with this configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Checks a configuration: the file, the interface, queues, limits and privileges.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Looks at everything on this machine that Portolan depends on, and names what mends what is wrong
    Doctor(Doctor),
    /// Prints what a build must agree on with the one it replaces.
    Abi,
    /// An engine; the daemon starts it.
    #[command(hide = true)]
    Engine {
        /// Run when nobody else wants to, until told otherwise.
        #[arg(long)]
        at_leisure: bool,
    },
    /// The service on port 0; the daemon starts it.
    #[command(hide = true)]
    Service {
        /// The daemon's socket.
        #[arg(long)]
        socket: PathBuf,
    },
}

#[derive(clap::Args)]
struct Doctor {
    /// The daemon's configuration
    #[arg(long, value_name = "FILE", default_value = portoland::doctor::DEFAULT_CONFIG)]
    config: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `ps` and `top` call this process, which was started as `/proc/self/exe`; at most 15 bytes.
fn name_process(name: &std::ffi::CStr) {
    // It works as well without.
    let _ = rustix::thread::set_name(name);
}

fn main() -> ExitCode {
    let leisure = portoland::supervisor::Leisure::begin();
    let arguments = Arguments::parse();
    let result = match arguments {
        Arguments {
            command: Some(Command::Check { file }),
            ..
        } => portoland::supervisor::check(&file).map(|summary| println!("{summary}")),
        Arguments {
            command: Some(Command::Doctor(Doctor { config, json })),
            ..
        } => match portoland::doctor::run(&config, json) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Arguments {
            command: Some(Command::Abi),
            ..
        } => {
            println!("{}", portoland::supervisor::store::abi::describe());
            Ok(())
        }
        Arguments {
            command: Some(Command::Engine { at_leisure }),
            ..
        } => {
            if at_leisure {
                portolan::turns::idle();
            }
            log();
            name_process(c"portoland-eng");
            portoland::engine::run()
        }
        Arguments {
            command: Some(Command::Service { socket }),
            ..
        } => {
            log();
            name_process(c"portoland-svc");
            portoland::service::run(&socket)
        }
        Arguments {
            config: Some(file), ..
        } => {
            log();
            portoland::supervisor::run(&file, leisure)
        }
        Arguments { .. } => Ok(()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("portoland: {error:#}");
            if error.is::<portoland::supervisor::ForeignStore>() {
                return ExitCode::from(portoland::supervisor::ForeignStore::EXIT_CODE);
            }
            ExitCode::FAILURE
        }
    }
}

/// Logs to standard error, as much as `RUST_LOG` says.
fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}
