//! What may be said on the command line.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Parser, Subcommand, ValueEnum};
use portolan::service::{ECHO_PORT, SERVICE_PORT, TRANSFER_PORT};
use portolan::{Priority, Wait};

use crate::target::TargetText;

/// See, test and use a Portolan node.
#[derive(Debug, Parser)]
#[command(
    name = "portolan",
    version,
    after_help = "NODE is a node's number or name. Exit status: 0 if all went well, 1 if anything did not, 2 for a wrong command line."
)]
pub struct Arguments {
    /// The daemon's socket
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "PORTOLAN_SOCKET",
        default_value = portolan::DEFAULT_SOCKET
    )]
    pub socket: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// What this node is and how its engines do
    Status(Format),
    /// The other nodes, as this node's engines see them
    Peers(Format),
    /// The open ports of this node
    Ports(Format),
    /// Counters of the engines, and what the steering program did with frames
    Counters(Format),
    /// What happened on this node: engines lost and replaced, ports, peers, refusals
    Events(Events),
    /// What this node does now: rates, tokens, CPU time, recoveries
    Top(Top),
    /// All nodes that are known, found or configured, and what is wrong with them
    Map(Format),
    /// Take no new sends, wait for those under way, and say when it is safe to stop (root only)
    Drain(Drain),
    /// Measure the time to another node and back
    Ping(Ping),
    /// Send standard input to `portolan recv` on another node
    Send(Send),
    /// Write what `portolan send` sends to standard output
    Recv(Recv),
    /// Send every message back, until interrupted
    Echo(Echo),
    /// Send messages of all sizes to another node's service and back, like gm_allsize
    Allsize(Allsize),
    /// Write the frames of this node's engines to a file for Wireshark (root only)
    Capture(Capture),
    /// Replace the daemon by another build while applications stay attached (root only)
    Upgrade {
        /// The build; without it, what is now where the daemon was started from
        #[arg(value_name = "BINARY")]
        binary: Option<PathBuf>,
    },
    /// Look at everything on this machine that Portolan depends on; name what mends what is wrong
    Doctor(Doctor),
    /// Inject a fault into an engine, on purpose (root only), and tell what became of it
    Fault(Fault),
    /// Write man pages and shell completions, for packagers
    #[command(hide = true)]
    Manual {
        /// Into this directory
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct Drain {
    /// Take ports and sends again
    #[arg(long)]
    pub undo: bool,
    /// Seconds to wait for sends under way
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    #[command(flatten)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// The daemon's configuration
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/portolan/portolan.toml"
    )]
    pub config: PathBuf,
    #[command(flatten)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct Format {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Events {
    /// Go on with what happens from now on, until interrupted
    #[arg(long, short = 'f')]
    pub follow: bool,
    /// Only what happened since then: `10m`, `2h 30s`, or a time as `2026-11-22T06:00:00Z`
    #[arg(long, value_name = "WHEN", value_parser = since)]
    pub since: Option<Since>,
    /// Print JSON, one event a line
    #[command(flatten)]
    pub format: Format,
}

/// A time in the past.
#[derive(Clone, Copy, Debug)]
pub struct Since(pub SystemTime);

fn since(text: &str) -> Result<Since, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        let at = SystemTime::now()
            .checked_sub(ago)
            .ok_or("that long ago there was no time")?;
        return Ok(Since(at));
    }
    let at = humantime::parse_rfc3339_weak(text);
    at.map(Since)
        .map_err(|_| "neither a span as 10m nor a time as 2026-11-22T06:00:00Z".into())
}

#[derive(Debug, Args)]
pub struct Top {
    /// Seconds from one picture to the next
    #[arg(long, short = 'i', value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: Duration,
    /// One picture, then end
    #[arg(long)]
    pub once: bool,
    /// So many pictures, then end
    #[arg(long, short = 'c')]
    pub count: Option<u64>,
    /// Ping the peers' services, too, and show percentiles
    #[arg(long)]
    pub probe: bool,
    /// Print JSON, one picture a line
    #[command(flatten)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct Ping {
    /// NODE or NODE:PORT; without PORT, the node's own service answers
    #[arg(value_name = "NODE[:PORT]")]
    pub target: TargetText<SERVICE_PORT>,
    /// How many times
    #[arg(long, short = 'c', default_value_t = 1000)]
    pub count: u64,
    /// Bytes of each message, up to 4096
    #[arg(long, short = 's', default_value_t = 64, value_parser = clap::value_parser!(u16).range(0..=4096))]
    pub size: u16,
    /// Seconds from one to the next; from 0.1 on, each is printed
    #[arg(long, short = 'i', value_name = "SECONDS", default_value = "0", value_parser = seconds)]
    pub interval: Duration,
    /// Seconds after which an answer counts as lost
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub timeout: Duration,
    /// Priority of the messages
    #[arg(long, default_value = "high")]
    pub priority: PriorityName,
    #[command(flatten)]
    pub wait: WaitOption,
    #[command(flatten)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct Send {
    /// NODE or NODE:PORT; without PORT, port 7
    #[arg(value_name = "NODE[:PORT]")]
    pub target: TargetText<TRANSFER_PORT>,
    /// Seconds to wait for the receiver to open its port
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub wait_for_receiver: Duration,
    /// Seconds a receiver may take none of the data before the transfer fails
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    #[command(flatten)]
    pub quiet: Quiet,
}

#[derive(Debug, Args)]
pub struct Recv {
    /// Port to receive on
    #[arg(default_value_t = TRANSFER_PORT, value_parser = clap::value_parser!(u16).range(1..256))]
    pub port: u16,
    /// Seconds the sender may be silent before the transfer fails; a sender whose input pauses says so
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    #[command(flatten)]
    pub quiet: Quiet,
}

#[derive(Debug, Args)]
pub struct Quiet {
    /// No progress, no rate on standard error
    #[arg(long, short = 'q')]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct Echo {
    /// Port to answer on
    #[arg(default_value_t = ECHO_PORT, value_parser = clap::value_parser!(u16).range(1..256))]
    pub port: u16,
}

#[derive(Debug, Args)]
pub struct Allsize {
    /// NODE or NODE:PORT; without PORT, the node's own service answers
    #[arg(value_name = "NODE[:PORT]")]
    pub target: TargetText<SERVICE_PORT>,
    /// Check every byte that comes back
    #[arg(long)]
    pub verify: bool,
    /// Smallest size, bytes
    #[arg(long, value_name = "BYTES", default_value = "1", value_parser = bytes)]
    pub min: u32,
    /// Largest size, bytes; K, M and G may follow the number
    #[arg(long, value_name = "BYTES", default_value = "16M", value_parser = bytes)]
    pub max: u32,
    /// Round trips of each size; by default fewer the longer
    #[arg(long, short = 'c')]
    pub count: Option<u32>,
    /// Seconds a message may take
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    #[command(flatten)]
    pub wait: WaitOption,
    #[command(flatten)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct WaitOption {
    /// How to wait for answers
    #[arg(long = "wait", default_value = "adaptive")]
    pub mode: WaitName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum WaitName {
    /// Spin
    Busy,
    /// Spin, giving the core away
    Yield,
    /// Spin for a moment, then sleep
    Adaptive,
}

impl WaitOption {
    pub fn wait(&self) -> Wait {
        match self.mode {
            WaitName::Busy => Wait::Busy,
            WaitName::Yield => Wait::Yield,
            WaitName::Adaptive => Wait::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum PriorityName {
    Low,
    High,
}

impl PriorityName {
    pub fn priority(self) -> Priority {
        match self {
            Self::Low => Priority::Low,
            Self::High => Priority::High,
        }
    }
}

#[derive(Debug, Args)]
pub struct Capture {
    /// The file, in pcapng; `-` for standard output
    #[arg(long, short = 'w', value_name = "FILE")]
    pub write: PathBuf,
    /// Only this engine: its queue's number
    #[arg(long, value_name = "N")]
    pub engine: Option<u16>,
    /// Only frames to and from this node; `inside` frames have this node's own number
    #[arg(long, value_name = "NODE")]
    pub peer: Option<String>,
    /// Bytes of each frame that are kept
    #[arg(long, short = 's', value_name = "BYTES", default_value_t = 16384, value_parser = clap::value_parser!(u32).range(64..=16384))]
    pub snaplen: u32,
    /// End after so many frames
    #[arg(long, short = 'c')]
    pub count: Option<u64>,
    /// End after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<Duration>,
    /// MiB of frames that may wait to be written, for each engine
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub buffer: u32,
}

#[derive(Debug, Args)]
pub struct Fault {
    /// What happens to it
    pub kind: FaultKind,
    /// Which engine: its queue's number
    pub engine: u16,
    /// Do not wait until another engine serves
    #[arg(long)]
    pub no_wait: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FaultKind {
    /// Kill the process
    Kill,
    /// Have it loop for ever
    Hang,
    /// Give its queue a new socket and a new engine
    Reset,
}

impl FaultKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Hang => "hang",
            Self::Reset => "reset",
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

fn bytes(text: &str) -> Result<u32, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "not a number of bytes")?;
    number
        .checked_mul(1 << shift)
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| "messages have at most 4 GiB - 1 bytes".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    // Expect: clap finds nothing wrong with the definition; defaults are those --help promises.
    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
        let parsed = Arguments::parse_from(["portolan", "recv"]);
        assert!(matches!(
            parsed.command,
            Command::Recv(Recv { port: 7, .. })
        ));
        assert!(Arguments::try_parse_from(["portolan", "recv", "0"]).is_err());
        assert!(Arguments::try_parse_from(["portolan", "recv", "256"]).is_err());
        assert!(Arguments::try_parse_from(["portolan", "ping", "2", "-s", "4097"]).is_err());
        assert!(Arguments::try_parse_from(["portolan", "ping", "2:256"]).is_err());
    }

    #[test]
    fn times_in_the_past() {
        for good in [
            "10m",
            "2h 30s",
            "1day",
            "2026-11-22T06:00:00Z",
            "2026-11-22 06:00:00",
        ] {
            assert!(
                since(good).is_ok_and(|at| at.0 < SystemTime::now() || good.contains('T')),
                "{good}"
            );
        }
        for bad in ["", "yesterday", "-10m", "99999999999999y", "é"] {
            assert!(since(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_with_units() {
        assert_eq!(bytes("16M"), Ok(16 << 20));
        assert_eq!(bytes("1k"), Ok(1024));
        assert_eq!(bytes("4294967295"), Ok(u32::MAX));
        for bad in ["4G", "", "M", "-1", "1.5", "99999999999999999999G", "é"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(seconds("0.01"), Ok(Duration::from_millis(10)));
        for bad in ["-1", "x", "inf", "NaN"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
