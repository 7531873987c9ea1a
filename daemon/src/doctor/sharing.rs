//! Applications on engines' cores: whether the two can give the core to each other.
//!
//! The scheduler shares a core among groups before it does among threads: among control groups where the `cpu` controller is on, else among sessions
//! (sched(7), *The autogroup feature*). A yield gives away nothing of a group's share, so between two groups most are in vain.
//!
//! Only who can run nowhere but on engines' cores is looked at, by the first thread of the process: for others the scheduler finds a free core.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{Findings, numbers, read};

/// An engine that has one core.
struct Engine {
    core: usize,
    spins: bool,
    group: Option<Group>,
}

/// Whom the scheduler gives a share of a core.
#[derive(Debug, PartialEq, Eq)]
enum Group {
    /// A control group, by its path.
    Control(String),
    /// A session, by the name that the kernel gave it.
    Session(String),
    /// All who are in neither.
    Everybody,
}

/// `status` and `ports` are the daemon's reports.
pub(super) fn look(status: &Value, ports: &Value, findings: &mut Findings) {
    let engines: BTreeMap<u64, Engine> = list(status, "engines").filter_map(engine).collect();
    let taken: Vec<usize> = engines.values().map(|engine| engine.core).collect();
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    let free = (0..there).find(|core| !taken.contains(core));
    let own_core = |pid: u64| match free {
        Some(core) => format!("taskset -apc {core} {pid}"),
        None => format!("taskset -apc CORE {pid}"),
    };
    // A process once for each engine that serves it; the node's own service has the daemon's cores and session.
    let mut applications = BTreeMap::new();
    let service = &status["node"]["service_pid"];
    for row in list(ports, "ports").filter(|row| row["owner_pid"] != *service) {
        let who = (row["owner_pid"].as_u64(), row["queue"].as_u64());
        if let ((Some(pid), Some(queue)), Some(port)) = (who, row["port"].as_u64()) {
            applications.entry((pid, queue)).or_insert(port);
        }
    }
    let mut fine = 0;
    for (&(pid, queue), port) in &applications {
        let (Some(engine), Some(cores)) = (engines.get(&queue), cores(pid)) else {
            fine += 1;
            continue;
        };
        let shares = !cores.is_empty() && cores.iter().all(|core| taken.contains(core));
        let who = format!(
            "process {pid} (port {port}) has no core but core {} of its engine's",
            engine.core
        );
        if shares && engine.spins {
            findings.warn(
                "sharing",
                format!("{who}, which spins and gives it to nobody"),
                format!(
                    "{}   # a core of its own, or engine.wait = \"adaptive\"",
                    own_core(pid)
                ),
            );
            continue;
        }
        let group = group_of(pid);
        if !shares || group.is_none() || group == engine.group {
            fine += 1;
            continue;
        }
        let by_session = [&group, &engine.group]
            .iter()
            .all(|group| !matches!(group, Some(Group::Control(_))));
        let (what, mend) = match by_session {
            true => (
                "session",
                format!(
                    "sysctl kernel.sched_autogroup_enabled=0   # or a core of its own: {}",
                    own_core(pid)
                ),
            ),
            false => (
                "control group",
                format!("{}   # a core of its own", own_core(pid)),
            ),
        };
        findings.warn(
            "sharing",
            format!("{who}, and is in another {what}: they do not get it by yielding to each other, so a message takes up to twice as long"),
            mend,
        );
    }
    if fine == applications.len() {
        findings.ok(
            "sharing",
            format!("{fine} applications, none at odds with its engine over a core"),
        );
    }
}

fn list<'a>(report: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    report[key].as_array().into_iter().flatten()
}

/// An engine's queue, and what concerns us of it, if it has a core.
fn engine(row: &Value) -> Option<(u64, Engine)> {
    let (queue, pid) = (row["queue"].as_u64()?, row["pid"].as_u64()?);
    let [core] = cores(pid)?[..] else {
        return None;
    };
    let engine = Engine {
        core,
        spins: row["wait"] == "busy",
        group: group_of(pid),
    };
    Some((queue, engine))
}

/// Where a process may run; `None` if it is gone.
fn cores(pid: u64) -> Option<Vec<usize>> {
    let status = read(format!("/proc/{pid}/status"))?;
    let mut lines = status.lines();
    lines.find_map(|line| Some(numbers(line.strip_prefix("Cpus_allowed_list:")?)))
}

fn group_of(pid: u64) -> Option<Group> {
    let groups = read(format!("/proc/{pid}/cgroup"))?;
    let weighs = |path: &str| Path::new(&format!("/sys/fs/cgroup{path}/cpu.weight")).exists();
    if let Some(path) = control_group(&groups, weighs) {
        return Some(Group::Control(path));
    }
    let sessions = read("/proc/sys/kernel/sched_autogroup_enabled");
    let session = read(format!("/proc/{pid}/autogroup"));
    Some(match session {
        // `/autogroup-42 nice 0`
        Some(session) if sessions.is_some_and(|sessions| sessions != "0") => {
            let name = session.split(' ').next().unwrap_or_default();
            Group::Session(name.to_owned())
        }
        _ => Group::Everybody,
    })
}

/// The control group that has a share of its own, unless it is the root. `weighs`: whether the controller is on in this group of the second version, whose
/// groups have a share from the first one above them on that it is on in.
fn control_group(groups: &str, weighs: impl Fn(&str) -> bool) -> Option<String> {
    let mut second = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        if controllers.split(',').any(|name| name == "cpu") {
            return (path != "/").then(|| path.to_owned());
        }
        if controllers.is_empty() {
            second = Some(path);
        }
    }
    let mut path = second?;
    while path.len() > 1 {
        if weighs(path) {
            return Some(path.to_owned());
        }
        path = path.rsplit_once('/')?.0;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expect: with the first version its own line counts, with the second the nearest group that has a share; the root is none.
    #[test]
    fn who_has_a_share() {
        let never = |_: &str| false;
        let first = "9:name=systemd:/a\n4:cpu,cpuacct:/system.slice/x\n0::/b\n";
        assert_eq!(
            control_group(first, never).as_deref(),
            Some("/system.slice/x")
        );
        assert_eq!(
            control_group("2:cpuacct:/x\n1:cpu:/\n0::/b\n", |_| true),
            None
        );
        let second = "0::/system.slice/portoland.service\n";
        let service = "/system.slice/portoland.service";
        assert_eq!(control_group(second, |_| true).as_deref(), Some(service));
        let slice = |path: &str| path == "/system.slice";
        assert_eq!(
            control_group(second, slice).as_deref(),
            Some("/system.slice")
        );
        assert_eq!(control_group(second, never), None);
        assert_eq!(control_group("0::/\n", |_| true), None);
        assert_eq!(control_group("", |_| true), None);
    }
}
