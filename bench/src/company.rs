//! Who else uses the processors: what is measured beside somebody is a figure of both.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

/// Processes that used less than this share of a processor are left out.
const LITTLE: f64 = 0.1;

/// A process that is none of ours, and the share of a processor it used.
#[derive(Clone, Debug)]
pub struct Other {
    pid: u32,
    name: String,
    share: f64,
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}) used {:.0} % of a processor",
            self.name,
            self.pid,
            self.share * 100.0
        )
    }
}

/// Looks for so long, during which nobody of ours is to run, and tells who used a processor, most first.
pub fn look(during: Duration) -> Vec<Other> {
    let before = ticks();
    let began = Instant::now();
    std::thread::sleep(during);
    let most = began.elapsed().as_secs_f64() * rustix::param::clock_ticks_per_second() as f64;
    let used = |(pid, (name, after)): (u32, (String, u64))| {
        // Who came meanwhile used all it has used since.
        let before = before.get(&pid).map_or(0, |(_, ticks)| *ticks);
        let share = after.saturating_sub(before) as f64 / most;
        (share >= LITTLE).then_some(Other { pid, name, share })
    };
    let mut others: Vec<Other> = ticks().into_iter().filter_map(used).collect();
    others.sort_by(|a, b| b.share.total_cmp(&a.share));
    others
}

/// What of the processors each process but this one has used, in clock ticks. One that ended meanwhile is not there.
fn ticks() -> HashMap<u32, (String, u64)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return HashMap::new();
    };
    entries
        .filter_map(|entry| {
            let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            (pid != std::process::id()).then_some((pid, parse(&stat)?))
        })
        .collect()
}

/// Name and ticks in user and system mode, of a line as in `proc_pid_stat(5)`.
fn parse(stat: &str) -> Option<(String, u64)> {
    // A name may hold anything, parentheses and spaces, too.
    let (head, rest) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((name.to_owned(), user + system))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    // A name that looks like the end of a name; lines that end early. Expect: name and ticks; nothing.
    #[test]
    fn a_name_may_hold_anything() {
        let stat = "17 (a) R (b) S 1 2 3 4 5 6 7 8 9 10 1200 34 0 0";
        assert_eq!(parse(stat), Some(("a) R (b".to_owned(), 1234)));
        for end in [0, 4, 12, 20, 36, stat.find("34").unwrap()] {
            assert_eq!(parse(&stat[..end]), None, "{end}");
        }
    }

    // A process that spins, and one that sleeps. Expect: the first is found, by name, with a good part of a processor, and not the second.
    #[test]
    fn who_spins_is_found() {
        let spins = "while :; do :; done";
        let mut children: Vec<_> = [spins, "read line"]
            .map(|script| {
                let mut command = Command::new("sh");
                command.args(["-c", script]).stdin(Stdio::piped());
                command.spawn().unwrap()
            })
            .into();
        let others = look(Duration::from_millis(500));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let found = |child: usize| others.iter().find(|o| o.pid == children[child].id());
        let spinner = found(0).unwrap();
        assert_eq!(spinner.name, "sh");
        assert!(spinner.share > 0.1 && spinner.share < 1.5, "{spinner}");
        assert!(found(1).is_none());
    }
}
