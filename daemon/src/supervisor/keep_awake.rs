//! Processors of engines, kept from sleeping for a while after a message (`engine.keep_awake_ms`).
//!
//! **Problem.** An engine that waits as `adaptive` does sleeps after 50 us without work, and so does its processor, as deeply as the machine lets it. Waking that takes
//! longer than all else on a message's way: 60 us and more in a virtual machine, and its caches are cold (docs/performance-history.md, *First message*). Bounding that
//! for the whole machine and for good ([`super::cpu_latency`]) costs too much to be anybody's default.
//!
//! **Idea.** Only the processors that engines sleep on, and only while it is likely that there will be another message soon. The kernel has a bound for each processor
//! (`pm_qos_resume_latency_us`; Documentation/ABI/testing/sysfs-devices-power). Every [`LOOK`] the engines' counts of messages are looked at: as long
//! as they change, and for so long afterwards, the bound is there.
//!
//! **Whose bound it is.** The kernel keeps it after us. So a file beside the socket names the processors *before* they are bounded, and is gone when none is: whoever
//! starts next takes away what was left behind. A processor that somebody else has bounded is let be.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::config::Config;
use super::engines::Engine;
use super::poll::Timer;
use super::watchdog::vitals;
use crate::engine_link::Wait;

/// How often it is looked at whether there were messages.
const LOOK: Duration = Duration::from_millis(250);
const PROCESSORS: &str = "/sys/devices/system/cpu";
/// No bound, as the kernel writes it.
const FREE: &str = "0";
/// Only the lightest sleep, which takes a microsecond or two to leave (drivers/idle/intel_idle.c: C1 takes 1 or 2).
const LIGHTEST: &str = "2";
/// No sleep at all.
const NONE: &str = "n/a";

/// Which processors are kept awake, and since when there is no reason.
#[derive(Debug)]
pub(super) struct KeepAwake {
    processors: PathBuf,
    /// Names those that have a bound of ours.
    ours: PathBuf,
    /// What is written to keep one awake; `None` where that changes nothing.
    bound: Option<&'static str>,
    held: BTreeSet<usize>,
    /// As it was when it was looked at last.
    messages: u64,
    last: Option<Instant>,
    refused: Option<String>,
    announced: bool,
    /// It was said that it cannot be done.
    complained: bool,
    armed: bool,
}

impl KeepAwake {
    /// On this machine, for the node with this configuration. What a predecessor left behind is taken over.
    pub fn new(config: &Config) -> Self {
        let mut keep = Self::of(Path::new(PROCESSORS), config.socket.with_extension("awake"));
        keep.adopt();
        if keep.bound.is_some() && keeps(config) {
            for core in &config.cores {
                if let Err(error) = OpenOptions::new().write(true).open(keep.file(*core)) {
                    keep.refuse(*core, &error);
                }
            }
        }
        keep
    }

    fn of(processors: &Path, ours: PathBuf) -> Self {
        let driver = fs::read_to_string(processors.join("cpuidle/current_driver"));
        let bound = match driver.unwrap_or_default().trim() {
            "" | "none" => None,
            // Its only sleep is the hypervisor's, whatever it says how long that takes to leave (drivers/cpuidle/cpuidle-haltpoll.c).
            "haltpoll" => Some(NONE),
            _ => Some(LIGHTEST),
        };
        Self {
            processors: processors.to_owned(),
            ours,
            bound,
            held: BTreeSet::new(),
            messages: 0,
            last: None,
            refused: None,
            announced: false,
            complained: false,
            armed: false,
        }
    }

    fn file(&self, core: usize) -> PathBuf {
        self.processors
            .join(format!("cpu{core}/power/pm_qos_resume_latency_us"))
    }

    /// What bounds a processor now.
    fn found(&self, core: usize) -> io::Result<String> {
        let text = fs::read_to_string(self.file(core))?;
        Ok(text.trim().to_owned())
    }

    fn write(&self, core: usize, bound: &str) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).truncate(true).open(self.file(core))?;
        file.write_all(bound.as_bytes())
    }

    /// Takes over what a predecessor left behind: it is seen to at the next look.
    fn adopt(&mut self) {
        let Some(bound) = self.bound else {
            return;
        };
        let text = fs::read_to_string(&self.ours).unwrap_or_default();
        let named = text.split_ascii_whitespace();
        let named: Vec<usize> = named.filter_map(|core| core.parse().ok()).collect();
        for core in named {
            if self.found(core).is_ok_and(|found| found == bound) {
                self.held.insert(core);
            }
        }
        // Who is named no more must not be taken for ours by the next one.
        if !text.is_empty()
            && let Err(error) = self.say_whose()
        {
            tracing::warn!("{}: {error}", self.ours.display());
        }
    }

    /// The processors that are kept awake by us.
    pub fn held(&self) -> &BTreeSet<usize> {
        &self.held
    }

    /// Why processors cannot be kept awake, if they cannot.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn refuse(&mut self, core: usize, error: &io::Error) {
        let remedy = match error.kind() {
            // We have none of root's power over others' files.
            io::ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => {
                "; it is another user's, perhaps of a service that ran before: `chown root` it"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "; the service may not (docs/nic.md, Cores and interrupts)"
            }
            _ => "",
        };
        let why = format!("{}: {error}{remedy}", self.file(core).display());
        if !self.complained {
            self.complained = true;
            tracing::info!("engine.keep_awake_ms is without effect: {why}");
        }
        self.refused = Some(why);
    }

    /// There have been so many messages. True if the last of them came within this time.
    fn looks_busy(&mut self, messages: u64, within: Duration, now: Instant) -> bool {
        if messages != std::mem::replace(&mut self.messages, messages) {
            self.last = Some(now);
        }
        self.last.is_some_and(|last| now - last < within)
    }

    /// Keeps these awake and no others.
    fn keep(&mut self, wanted: &BTreeSet<usize>) {
        let Some(bound) = self.bound else {
            return;
        };
        if !wanted.is_empty() {
            self.refused = None;
        }
        let before = self.held.clone();
        for core in &before {
            match self.found(*core) {
                Ok(found) if found == bound && wanted.contains(core) => {}
                Ok(found) if found == bound => match self.write(*core, FREE) {
                    Ok(()) => {
                        self.held.remove(core);
                    }
                    // Tried again.
                    Err(error) => self.refuse(*core, &error),
                },
                // Somebody else has it bounded now.
                Ok(_) => {
                    self.held.remove(core);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.held.remove(core);
                }
                Err(error) => self.refuse(*core, &error),
            }
        }
        for core in wanted {
            if self.held.contains(core) {
                continue;
            }
            let done = match self.found(*core) {
                Ok(found) if found == FREE => {
                    self.held.insert(*core);
                    self.say_whose().and_then(|()| self.write(*core, bound))
                }
                Ok(_) => continue,
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                self.held.remove(core);
                self.refuse(*core, &error);
            }
        }
        // Also if one was named above that then could not be bounded.
        let named = self.held != before || self.refused.is_some();
        if named && let Err(error) = self.say_whose() {
            tracing::warn!("{}: {error}", self.ours.display());
        }
    }

    /// Writes down which are ours.
    fn say_whose(&self) -> io::Result<()> {
        if self.held.is_empty() {
            return match fs::remove_file(&self.ours) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let names: Vec<String> = self.held.iter().map(usize::to_string).collect();
        fs::write(&self.ours, names.join(" "))
    }
}

/// Whether there is anything to be kept awake.
fn keeps(config: &Config) -> bool {
    config.wait == Wait::Adaptive && !config.keep_awake.is_zero()
}

impl Supervisor {
    /// Looks at it now and then from now on, if there is reason to.
    pub(super) fn look_after_processors(&mut self, now: Instant) {
        let reason = keeps(&self.config) || !self.keep_awake.held.is_empty();
        if reason && !self.keep_awake.armed && self.keep_awake.bound.is_some() {
            self.keep_awake.armed = true;
            // Only what comes from now on is of interest.
            self.keep_awake.messages = self.messages();
            self.poll.set_timer(now + LOOK, Timer::KeepAwake);
        }
    }

    /// Looks at whether there were messages.
    pub(super) fn on_keep_awake_timer(&mut self, now: Instant) {
        let messages = self.messages();
        let within = self.config.keep_awake;
        let busy = self.keep_awake.looks_busy(messages, within, now) && keeps(&self.config);
        let wanted = match busy {
            true => self.processors_of_engines(),
            false => BTreeSet::new(),
        };
        self.keep_awake.keep(&wanted);
        if !self.keep_awake.held.is_empty() && !self.keep_awake.announced {
            self.keep_awake.announced = true;
            let ms = within.as_millis();
            tracing::info!(
                "processors of engines do not sleep for {ms} ms after a message (engine.keep_awake_ms)"
            );
        }
        self.keep_awake.armed = keeps(&self.config) || !self.keep_awake.held.is_empty();
        if self.keep_awake.armed {
            self.poll.set_timer(now + LOOK, Timer::KeepAwake);
        }
    }

    /// How many messages of applications went out and came in.
    fn messages(&self) -> u64 {
        let counts = self.engines.iter().map(messages);
        counts.fold(0, u64::wrapping_add)
    }

    /// All may sleep as they like.
    pub(super) fn let_processors_sleep(&mut self) {
        self.keep_awake.keep(&BTreeSet::new());
    }

    /// Where engines sleep: on the processors that they are bound to, or else where they ran last.
    fn processors_of_engines(&self) -> BTreeSet<usize> {
        let of = |engine: &Engine| match self.config.core_of(engine.index) {
            (Some(core), _) => Some(core),
            (None, _) => engine.pid().and_then(vitals::last_processor),
        };
        self.engines.iter().filter_map(of).collect()
    }
}

/// Those of one engine.
fn messages(engine: &Engine) -> u64 {
    let counters = &engine.memory.ledger.ledger().header().counters;
    let counted = crate::engine::counters::messages();
    let counted = counted.iter().filter_map(|word| counters.get(*word));
    let counts = counted.map(|word| word.load(Ordering::Relaxed));
    counts.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of four processors with this driver, and a node's directory.
    fn machine(driver: &str) -> (tempfile::TempDir, KeepAwake) {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("cpuidle")).unwrap();
        fs::write(place.path().join("cpuidle/current_driver"), driver).unwrap();
        for core in 0..4 {
            let power = place.path().join(format!("cpu{core}/power"));
            fs::create_dir_all(&power).unwrap();
            fs::write(power.join("pm_qos_resume_latency_us"), "0\n").unwrap();
        }
        let keep = again(&place);
        (place, keep)
    }

    fn again(place: &tempfile::TempDir) -> KeepAwake {
        let mut keep = KeepAwake::of(place.path(), place.path().join("node.awake"));
        keep.adopt();
        keep
    }

    fn bounds(keep: &KeepAwake) -> Vec<String> {
        (0..4).map(|core| keep.found(core).unwrap()).collect()
    }

    fn only(cores: &[usize]) -> BTreeSet<usize> {
        cores.iter().copied().collect()
    }

    // Processors 1 and 2, then 2 and 3, then none, on real ones and on a hypervisor's. Expect: these are bounded, all others free; and nothing is written down any more at the end.
    #[test]
    fn only_the_processors_of_engines_are_kept_awake() {
        for (driver, bound) in [("intel_idle\n", "2"), ("haltpoll\n", "n/a")] {
            let (_place, mut keep) = machine(driver);
            keep.keep(&only(&[1, 2]));
            assert_eq!(bounds(&keep), ["0", bound, bound, "0"]);
            keep.keep(&only(&[2, 3]));
            assert_eq!(bounds(&keep), ["0", "0", bound, bound]);
            assert!(keep.held.contains(&3) && !keep.held.contains(&1));
            assert_eq!(fs::read_to_string(&keep.ours).unwrap(), "2 3");
            keep.keep(&only(&[]));
            assert_eq!(bounds(&keep), ["0"; 4]);
            assert!(!keep.ours.exists());
        }
    }

    // A machine whose processors know no states. Expect: nothing is written.
    #[test]
    fn where_it_changes_nothing_nothing_is_done() {
        for driver in ["none\n", ""] {
            let (_place, mut keep) = machine(driver);
            keep.keep(&only(&[1]));
            assert_eq!(bounds(&keep), ["0"; 4]);
            assert_eq!(keep.refused(), None);
        }
    }

    // Somebody has bounded 1; 2 is ours, and somebody writes another bound there. Expect: neither is touched, then or at the end, also where the bound is what we would write.
    #[test]
    fn what_others_bounded_is_let_be() {
        let (_place, mut keep) = machine("haltpoll");
        keep.write(1, NONE).unwrap();
        keep.keep(&only(&[1, 2]));
        assert_eq!(bounds(&keep), ["0", NONE, NONE, "0"]);
        assert!(!keep.held.contains(&1) && keep.held.contains(&2));
        keep.write(2, "70").unwrap();
        keep.keep(&only(&[1, 2]));
        assert_eq!(bounds(&keep), ["0", NONE, "70", "0"]);
        keep.keep(&only(&[]));
        assert_eq!(bounds(&keep), ["0", NONE, "70", "0"]);
        assert!(!keep.ours.exists());
    }

    // Two nodes on one processor. Expect: the second has no bound of its own as long as the first has one, and has it at its next look after that is gone.
    #[test]
    fn two_nodes_on_one_processor() {
        let (place, mut first) = machine("haltpoll");
        let mut second = KeepAwake::of(place.path(), place.path().join("other.awake"));
        first.keep(&only(&[1]));
        second.keep(&only(&[1]));
        assert!(first.held.contains(&1) && !second.held.contains(&1));
        first.keep(&only(&[]));
        assert_eq!(bounds(&first), ["0"; 4]);
        second.keep(&only(&[1]));
        assert_eq!(bounds(&first), ["0", NONE, "0", "0"]);
    }

    // Who holds 1 and 2 is killed; 2 has another's bound by then. Expect: the next one frees 1 at its first look, and lets 2 be; what is no number names nothing.
    #[test]
    fn what_a_predecessor_left_behind_is_taken_away() {
        let (place, mut keep) = machine("haltpoll");
        keep.keep(&only(&[1, 2]));
        keep.write(2, "70").unwrap();
        drop(keep);
        let mut next = again(&place);
        assert!(next.held.contains(&1) && !next.held.contains(&2));
        next.keep(&only(&[]));
        assert_eq!(bounds(&next), ["0", "0", "70", "0"]);
        fs::write(&next.ours, "1 -1 99 x 18446744073709551616").unwrap();
        assert_eq!(again(&place).held, only(&[]));
    }

    // A processor that is not there, one that is; and nowhere to write down whose a bound is. Expect: it is said, and not any more; and no bound is left that nobody would take away.
    #[test]
    fn what_cannot_be_done_is_said() {
        let (place, mut keep) = machine("haltpoll");
        keep.keep(&only(&[9]));
        assert!(keep.refused().unwrap().contains("cpu9"));
        assert!(!keep.ours.exists());
        keep.keep(&only(&[1]));
        assert_eq!(keep.refused(), None);
        let mut keep = KeepAwake::of(place.path(), place.path().join("nowhere/node.awake"));
        keep.keep(&only(&[2]));
        assert!(keep.refused().is_some());
        assert_eq!(bounds(&keep), ["0", NONE, "0", "0"]);
    }

    // Counts of messages at looks, 7 before. Expect: a change keeps it busy for so long, and no longer.
    #[test]
    fn busy_is_who_had_messages_of_late() {
        let (_place, mut keep) = machine("haltpoll");
        keep.messages = 7;
        let start = Instant::now();
        let ms = Duration::from_millis;
        let mut at = |at, messages| keep.looks_busy(messages, ms(2000), start + ms(at));
        assert!(!at(0, 7));
        assert!(!at(250, 7));
        assert!(at(500, 8));
        assert!(at(2250, 8));
        assert!(!at(2500, 8));
        assert!(at(2750, 9));
        // A successor counts on from less.
        assert!(at(4500, 3));
        assert!(at(6250, 3));
        assert!(!at(6500, 3));
    }
}
