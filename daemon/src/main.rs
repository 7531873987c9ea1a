//! `portoland`: the daemon of a node, its configuration check, and the processes it starts from itself.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use portoland::logging::{self, Process};

/// The Portolan daemon: one per node.
#[derive(Parser)]
#[command(
    name = "portoland",
    version,
    after_help = "The configuration is /etc/portolan/portolan.toml where a package installed it. SIGHUP has it read again; SIGTERM and SIGINT end the daemon. $RUST_LOG says what is logged.",
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
    /// Writes man pages and shell completions, for packagers.
    #[command(hide = true)]
    Manual {
        /// Into this directory.
        directory: PathBuf,
    },
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
    /// The exporter of metrics; the daemon starts it.
    #[command(hide = true)]
    Metrics {
        /// The daemon's socket.
        #[arg(long, required_unless_present = "list")]
        socket: Option<PathBuf>,
        /// Where to listen.
        #[arg(long, required_unless_present = "list")]
        listen: Option<std::net::SocketAddr>,
        /// Print every metric there is, for docs/metrics.md.
        #[arg(long)]
        list: bool,
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
    let leisure = portoland::supervisor::Leisure::begun();
    if !portolan_crc::is_supported() {
        eprintln!(
            "portoland: this processor has no SSE 4.2, which this build needs (every x86-64 has had it since 2011): build Portolan without `+sse4.2` in .cargo/rustc"
        );
        return ExitCode::FAILURE;
    }
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
            command: Some(Command::Manual { directory }),
            ..
        } => portolan_manual::write(Arguments::command(), 8, &directory)
            .with_context(|| directory.display().to_string()),
        Arguments {
            command: Some(Command::Engine { at_leisure }),
            ..
        } => {
            if at_leisure {
                portolan::turns::idle();
            }
            logging::begin(Process::Child);
            name_process(c"portoland-eng");
            portoland::engine::run()
        }
        Arguments {
            command: Some(Command::Service { socket }),
            ..
        } => {
            logging::begin(Process::Child);
            name_process(c"portoland-svc");
            portoland::service::run(&socket)
        }
        Arguments {
            command: Some(Command::Metrics { list: true, .. }),
            ..
        } => {
            print!("{}", portoland::exporter::families::markdown());
            Ok(())
        }
        Arguments {
            command:
                Some(Command::Metrics {
                    socket: Some(socket),
                    listen: Some(listen),
                    ..
                }),
            ..
        } => {
            logging::begin(Process::Child);
            name_process(c"portoland-met");
            portoland::exporter::run(&socket, listen)
        }
        Arguments {
            config: Some(file), ..
        } => {
            logging::begin(Process::Supervisor);
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
