//! How far a transfer is, on standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::table::rate;

/// Counts bytes; shows them on a terminal, and their rate at the end.
pub struct Progress {
    bar: ProgressBar,
    quiet: bool,
    bytes: u64,
    start: Instant,
}

impl Progress {
    pub fn start(quiet: bool) -> Self {
        let bar = if quiet || !std::io::stderr().is_terminal() {
            ProgressBar::hidden()
        } else {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) =
                ProgressStyle::with_template("{spinner} {bytes} {binary_bytes_per_sec} {elapsed}")
            {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        };
        Self {
            bar,
            quiet,
            bytes: 0,
            start: Instant::now(),
        }
    }

    pub fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.bar.set_position(self.bytes);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The last line.
    pub fn finish(&self, verb: &str) {
        self.bar.finish_and_clear();
        if !self.quiet {
            let seconds = self.start.elapsed().as_secs_f64();
            let bytes = self.bytes;
            eprintln!(
                "{verb} {bytes} bytes in {seconds:.2} s, {}",
                rate(bytes as f64 / seconds.max(1e-9))
            );
        }
    }
}
