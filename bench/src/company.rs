//! Who else uses the processors: what is measured beside somebody is a figure of both. And whether the kernel writes down what it does, which makes every
//! system call and every switch longer.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use portolan_testbed::process;

/// How long nothing of ours runs, so that others can be seen.
const ALONE: Duration = Duration::from_millis(500);
/// Processes that used less than this share of a processor are left out.
const LITTLE: f64 = 0.1;

/// Where the kernel's trace events are switched (Documentation/trace/events.rst).
const TRACING: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Who used a processor when a measurement began.
pub struct Company {
    others: Vec<Other>,
    /// Where trace events are enabled.
    traced: Option<PathBuf>,
}

impl Company {
    /// Looks who is there, and warns of them.
    pub fn meet() -> Self {
        let company = Self {
            others: look(ALONE),
            traced: traced(&TRACING.map(Path::new)),
        };
        company.warn();
        company
    }

    /// Figures beside somebody else are not worth much. To be said again at the end, hours and many lines later.
    pub fn warn(&self) {
        if let Some(switch) = &self.traced {
            eprintln!(
                "warning: trace events are enabled, so everybody's system calls and switches take longer, whether anything is recorded or not; end that \
                 with `echo 0 > {}`",
                switch.display()
            );
        }
        if !self.others.is_empty() {
            let all: Vec<String> = self.others.iter().map(Other::to_string).collect();
            eprintln!(
                "warning: this machine was not idle when this began: {}; end that, or take the figures for figures of both",
                all.join(", ")
            );
        }
    }
}

/// The switch of all trace events, if any of them is enabled: it says 0 if none is, 1 if all are, X if some.
fn traced(roots: &[&Path]) -> Option<PathBuf> {
    let mut switches = roots.iter().map(|root| root.join("events/enable"));
    switches.find(|switch| {
        std::fs::read_to_string(switch).is_ok_and(|says| matches!(says.trim(), "1" | "X"))
    })
}

/// A process that is none of ours, and the share of a processor it used.
struct Other {
    pid: i32,
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
fn look(during: Duration) -> Vec<Other> {
    let table = process::table().into_iter();
    let before: HashMap<i32, u64> = table.map(|entry| (entry.pid, entry.ticks)).collect();
    let began = Instant::now();
    std::thread::sleep(during);
    let most = began.elapsed().as_secs_f64() * rustix::param::clock_ticks_per_second() as f64;
    let used = |entry: process::Entry| {
        // Who came meanwhile used all it has used since.
        let before = before.get(&entry.pid).copied().unwrap_or(0);
        let share = entry.ticks.saturating_sub(before) as f64 / most;
        let other = Other {
            pid: entry.pid,
            name: entry.name,
            share,
        };
        let ours = u32::try_from(other.pid).is_ok_and(|pid| pid == std::process::id());
        (share >= LITTLE && !ours).then_some(other)
    };
    let mut others: Vec<Other> = process::table().into_iter().filter_map(used).collect();
    others.sort_by(|a, b| b.share.total_cmp(&a.share));
    others
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    // No tracefs at all, one without events, one with some, one with all. Expect: the switch of the first that has any.
    #[test]
    fn enabled_trace_events_are_found() {
        let root = tempfile::tempdir().unwrap();
        let [missing, none, some, all] =
            [None, Some("0\n"), Some("X\n"), Some("1\n")].map(|says| {
                let here = root.path().join(says.map_or("missing", str::trim));
                if let Some(says) = says {
                    std::fs::create_dir_all(here.join("events")).unwrap();
                    std::fs::write(here.join("events/enable"), says).unwrap();
                }
                here
            });
        assert_eq!(traced(&[&missing, &none]), None);
        for there in [&some, &all] {
            let found = traced(&[&missing, &none, there, &some]);
            assert_eq!(found, Some(there.join("events/enable")));
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
        let others = look(ALONE);
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let found = |child: usize| {
            others
                .iter()
                .find(|o| o.pid.cast_unsigned() == children[child].id())
        };
        let spinner = found(0).unwrap();
        assert_eq!(spinner.name, "sh");
        assert!(spinner.share > 0.1 && spinner.share < 1.5, "{spinner}");
        assert!(found(1).is_none());
    }
}
