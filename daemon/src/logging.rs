//! The log: on a terminal or in a file as lines for people, under systemd as entries of the journal.
//!
//! The supervisor writes to the journal itself, so that every field of an event is a field of the entry (`journalctl -o verbose`,
//! `journalctl PORTOLAN_NODE=2`). Engines and the service cannot open sockets of their own any more when they log; they write lines to
//! standard error, which systemd has connected to the journal, each with its priority in front (sd-daemon(3)).
//!
//! How much is said: `$RUST_LOG` if it is set, else `log.level` of the configuration, else `info`. The supervisor changes its mind at a
//! reload; processes started before keep their level.

use std::io::{self, Stderr, Write};
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use tracing::Metadata;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// The environment variable that decides before the configuration does.
pub const VARIABLE: &str = "RUST_LOG";
/// Set by systemd: which socket standard error is (systemd.exec(5)).
pub const JOURNAL: &str = "JOURNAL_STREAM";
/// What our fields are called in the journal.
const PREFIX: &str = "PORTOLAN";

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// What somebody must see to.
    Error,
    /// And what may become that.
    Warn,
    /// And what happens to the node: starts, recoveries, upgrades, routes.
    #[default]
    Info,
    /// And how it came to that.
    Debug,
    /// Everything.
    Trace,
}

impl Level {
    const ALL: [Self; 5] = [
        Self::Error,
        Self::Warn,
        Self::Info,
        Self::Debug,
        Self::Trace,
    ];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    fn filter(self) -> EnvFilter {
        let level = LevelFilter::from_str(self.name()).unwrap_or(LevelFilter::INFO);
        EnvFilter::new(level.to_string())
    }
}

/// The level of the configuration, as an index into [`Level::ALL`]; what children are told.
static CONFIGURED: AtomicU8 = AtomicU8::new(2);
/// Changes the filter that is installed.
static HANDLE: Mutex<Option<reload::Handle<EnvFilter, Registry>>> = Mutex::new(None);

/// Who logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// The supervisor, which may write to the journal itself.
    Supervisor,
    /// A process of its.
    Child,
}

/// Begins to log; once per process.
pub fn begin(process: Process) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| Level::default().filter());
    let (filter, handle) = reload::Layer::new(filter);
    let under_systemd = std::env::var_os(JOURNAL).is_some() && stderr_is_a_journal();
    let journal = (process == Process::Supervisor && under_systemd)
        .then(tracing_journald::layer)
        .and_then(Result::ok)
        .map(|layer| layer.with_field_prefix(Some(PREFIX.to_owned())));
    let lines = match (&journal, under_systemd) {
        (Some(_), _) => None,
        (None, true) => Some(
            tracing_subscriber::fmt::layer()
                .with_ansi(false)
                .without_time()
                .with_level(false)
                .with_writer(Prioritised)
                .boxed(),
        ),
        (None, false) => Some(
            tracing_subscriber::fmt::layer()
                .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
                .with_writer(io::stderr)
                .boxed(),
        ),
    };
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .with(journal)
        .init();
    *HANDLE.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
}

/// From here on this much is logged, unless `$RUST_LOG` says something else.
pub fn set_level(level: Level) {
    let index = Level::ALL.iter().position(|one| *one == level);
    CONFIGURED.store(index.unwrap_or_default() as u8, Ordering::Relaxed);
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let handle = HANDLE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*handle {
        // It fails only when nobody logs any more.
        let _ = handle.reload(level.filter());
    }
}

/// What children are to be told in `$RUST_LOG` if nobody has set it.
pub fn level() -> Level {
    let index = usize::from(CONFIGURED.load(Ordering::Relaxed));
    Level::ALL.get(index).copied().unwrap_or_default()
}

/// Is standard error the socket that systemd made for the journal, and not something it was redirected to since?
fn stderr_is_a_journal() -> bool {
    let Ok(stat) = rustix::fs::fstat(io::stderr()) else {
        return false;
    };
    let is = format!("{}:{}", stat.st_dev, stat.st_ino);
    std::env::var(JOURNAL).is_ok_and(|told| told == is)
}

/// Standard error with a priority in front of each line.
struct Prioritised;

/// One event on its way to standard error.
struct Line(Stderr, &'static [u8], bool);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !std::mem::replace(&mut self.2, true) {
            self.0.write_all(self.1)?;
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<'a> MakeWriter<'a> for Prioritised {
    type Writer = Line;

    fn make_writer(&'a self) -> Self::Writer {
        Line(io::stderr(), b"<6>", false)
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Self::Writer {
        Line(io::stderr(), priority(*event.level()), false)
    }
}

/// syslog(3)'s, as sd-daemon(3) writes it: information for administrators is 5 (notice) for `journalctl -p notice`, like tracing-journald's.
fn priority(level: tracing::Level) -> &'static [u8] {
    match level {
        tracing::Level::ERROR => b"<3>",
        tracing::Level::WARN => b"<4>",
        tracing::Level::INFO => b"<5>",
        tracing::Level::DEBUG => b"<6>",
        tracing::Level::TRACE => b"<7>",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_have_the_names_they_are_written_with() {
        for level in Level::ALL {
            let value = toml::Value::String(level.name().to_owned());
            assert_eq!(value.try_into::<Level>().unwrap(), level);
            assert_eq!(level.filter().to_string(), level.name());
        }
    }

    #[test]
    fn children_are_told_the_level_of_the_configuration() {
        assert_eq!(level(), Level::Info);
        set_level(Level::Debug);
        assert_eq!(level(), Level::Debug);
        set_level(Level::default());
    }
}
