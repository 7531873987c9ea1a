//! What failed, out of the output of `cargo test`: it is said again at the very end, for who keeps only that.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Lines kept of one step.
const LINES_MAX: usize = 120;
/// How long after the end of a step something it started may keep its output open.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// Passes output on and keeps what is said of failures.
pub struct Failures(Receiver<String>);

impl Failures {
    /// Until `output` ends; all of it goes on to `to`.
    pub fn of(output: impl Read + Send + 'static, mut to: impl Write + Send + 'static) -> Self {
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let mut inside = false;
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                // Nobody may listen any more, here or there; the tests go on.
                let _ = writeln!(to, "{line}");
                if is_of_a_failure(&line, &mut inside) && tell.send(line).is_err() {
                    inside = false;
                }
            }
        });
        Self(told)
    }

    /// Once the program has ended.
    pub fn lines(self) -> Vec<String> {
        let mut lines = Vec::new();
        while lines.len() < LINES_MAX
            && let Ok(line) = self.0.recv_timeout(AFTERWARDS)
        {
            lines.push(line);
        }
        lines
    }
}

/// libtest names the failed tests, with their output, between these lines; tests without libtest's help end otherwise.
fn is_of_a_failure(line: &str, inside: &mut bool) -> bool {
    if line == "failures:" {
        *inside = true;
    }
    let kept = *inside || line.ends_with("... FAILED");
    if line.starts_with("test result: ") {
        *inside = false;
    }
    kept && !line.is_empty()
}

#[cfg(test)]
mod tests {
    use std::io::sink;

    use super::*;

    const OUTPUT: &str = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\npanicked\n\n\
        failures:\n    b\n\ntest result: FAILED. 1 passed\nrunning 1 test\ntest c ... ok\ntest result: ok.\n";

    #[test]
    fn what_failed_is_kept() {
        let kept = [
            "test b ... FAILED",
            "failures:",
            "---- b stdout ----",
            "panicked",
            "failures:",
            "    b",
            "test result: FAILED. 1 passed",
        ];
        assert_eq!(Failures::of(OUTPUT.as_bytes(), sink()).lines(), kept);
        assert!(
            Failures::of(&b"test result: ok.\n\xff"[..], sink())
                .lines()
                .is_empty()
        );
    }

    #[test]
    fn not_everything_is_kept() {
        let much = format!("failures:\n{}", "said\n".repeat(1_000));
        let lines = Failures::of(std::io::Cursor::new(much), sink()).lines();
        assert_eq!(lines.len(), LINES_MAX);
    }
}
