//! How far the campaigns have come, and how long they will take: from how long they were expected to, and how long they do.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// Between two lines where there is no terminal.
const LINES: Duration = Duration::from_secs(15);
/// Between two looks of a line on a terminal.
const LOOKS: Duration = Duration::from_millis(200);

/// The progress of a run.
pub struct Progress {
    began: Instant,
    expected_s: f64,
    done_s: f64,
    name: String,
    /// Expected seconds of the campaign under way, and of one of its items.
    item_s: f64,
    items: u64,
    done_items: u64,
    last: Option<Instant>,
    terminal: bool,
}

impl Progress {
    /// Of campaigns expected to take so long together.
    pub fn new(expected_s: f64) -> Self {
        Self {
            began: Instant::now(),
            expected_s,
            done_s: 0.0,
            name: String::new(),
            item_s: 0.0,
            items: 0,
            done_items: 0,
            last: None,
            terminal: stderr().is_terminal(),
        }
    }

    /// A campaign begins: so many items, expected to take so long together.
    pub fn begin(&mut self, name: &str, items: u64, expected_s: f64) {
        name.clone_into(&mut self.name);
        self.items = items;
        self.item_s = expected_s / items.max(1) as f64;
        self.done_items = 0;
        self.last = None;
        self.show();
    }

    /// One item more is done.
    pub fn step(&mut self) {
        self.done_items += 1;
        self.done_s += self.item_s;
        let every = if self.terminal { LOOKS } else { LINES };
        if self.last.is_none_or(|last| last.elapsed() >= every) {
            self.show();
        }
    }

    /// The campaign is over, whether all its items were done or not.
    pub fn end(&mut self) {
        self.done_s += self.item_s * self.items.saturating_sub(self.done_items) as f64;
        self.done_items = self.items;
        if self.terminal {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }

    fn show(&mut self) {
        self.last = Some(Instant::now());
        let elapsed = self.began.elapsed().as_secs_f64();
        let expected_left = (self.expected_s - self.done_s).max(0.0);
        // At first the expectation counts, later the pace.
        let pace = (elapsed + 10.0) / (self.done_s + 10.0);
        let left = Duration::from_secs_f64(expected_left * pace).as_secs();
        let line = format!(
            "{}: {} of {}, about {} min {:02} s left in all",
            self.name,
            self.done_items,
            self.items,
            left / 60,
            left % 60
        );
        // Nobody may be reading.
        let _ = match self.terminal {
            true => write!(stderr(), "\r\x1b[K{line}").and_then(|()| stderr().flush()),
            false => writeln!(stderr(), "{line}"),
        };
    }
}
