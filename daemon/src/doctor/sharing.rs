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

/// The control group namespace of the machine itself (kernel, `PROC_CGROUP_INIT_INO`).
const WHOLE_MACHINE: &str = "cgroup:[4026531835]";

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

/// How an application and the engines on its cores get on.
#[derive(Debug, PartialEq, Eq)]
enum Together {
    Well,
    /// Such an engine spins.
    NeverGetsIt,
    /// They are in different sessions.
    Sessions,
    /// They are in different control groups.
    ControlGroups,
    /// It cannot be seen.
    Unseen,
}

/// `status` and `ports` are the daemon's reports.
pub(super) fn look(status: &Value, ports: &Value, findings: &mut Findings) {
    let engines: Vec<Engine> = list(status, "engines").filter_map(engine).collect();
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    let taken = |core: &usize| engines.iter().any(|engine| engine.core == *core);
    let free = (0..there).find(|core| !taken(core));
    let free = free.map_or("CORE".to_owned(), |core| core.to_string());
    // The node's own service has the daemon's cores and session.
    let service = &status["node"]["service_pid"];
    let rows = list(ports, "ports").filter(|row| row["owner_pid"] != *service);
    let applications: BTreeMap<u64, &Value> = rows
        .filter_map(|row| Some((row["owner_pid"].as_u64()?, &row["port"])))
        .collect();
    let (mut fine, mut unseen, mut at_odds) = (0, 0, false);
    for (pid, port) in applications {
        let cores = cores(pid).unwrap_or_default();
        let who = format!("process {pid} (port {port}) can run only on engines' cores, {cores:?}");
        let own = format!("taskset -apc {free} {pid}");
        let groups =
            "they do not get it by yielding to each other, so a message takes up to twice as long";
        let (what, mend) = match together(&engines, &cores, || group_of(pid)) {
            Together::Well => {
                fine += 1;
                continue;
            }
            Together::Unseen => {
                unseen += 1;
                continue;
            }
            Together::NeverGetsIt => (
                format!("{who}, where an engine spins and gives it to nobody"),
                format!("{own}   # a core of its own, or engine.wait = \"adaptive\""),
            ),
            Together::Sessions => (
                format!("{who}, and is in another session than they are: {groups}"),
                format!(
                    "sysctl kernel.sched_autogroup_enabled=0   # then start portoland and the application anew; or a core of its own: {own}"
                ),
            ),
            Together::ControlGroups => (
                format!("{who}, and is in another control group than they are: {groups}"),
                format!("{own}   # a core of its own"),
            ),
        };
        findings.warn("sharing", what, mend);
        at_odds = true;
    }
    let others = match unseen {
        0 => String::new(),
        unseen => format!("; {unseen} could not be looked at"),
    };
    if !at_odds {
        findings.ok(
            "sharing",
            format!("{fine} applications, none at odds with an engine over a core{others}"),
        );
    }
}

/// An application that may run on these cores. Its group is asked for only where it matters.
fn together(
    engines: &[Engine],
    cores: &[usize],
    group: impl FnOnce() -> Option<Group>,
) -> Together {
    if cores.is_empty() {
        return Together::Unseen;
    }
    let on = |core: usize| engines.iter().filter(move |engine| engine.core == core);
    if cores.iter().any(|&core| on(core).next().is_none()) {
        return Together::Well;
    }
    let mut beside = cores.iter().flat_map(|&core| on(core));
    if beside.clone().any(|engine| engine.spins) {
        return Together::NeverGetsIt;
    }
    let Some(group) = group() else {
        return Together::Unseen;
    };
    match beside.find(|engine| engine.group.as_ref() != Some(&group)) {
        None => Together::Well,
        Some(Engine { group: None, .. }) => Together::Unseen,
        Some(engine) => {
            let controls = |group: &Group| matches!(group, Group::Control(_));
            match controls(&group) || engine.group.as_ref().is_some_and(controls) {
                true => Together::ControlGroups,
                false => Together::Sessions,
            }
        }
    }
}

fn list<'a>(report: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    report[key].as_array().into_iter().flatten()
}

/// What concerns us of an engine, if it has one core.
fn engine(row: &Value) -> Option<Engine> {
    let pid = row["pid"].as_u64()?;
    let [core] = cores(pid)?[..] else {
        return None;
    };
    Some(Engine {
        core,
        spins: row["wait"] == "busy",
        group: group_of(pid),
    })
}

/// Where a process may run; `None` if it is gone.
fn cores(pid: u64) -> Option<Vec<usize>> {
    let status = read(format!("/proc/{pid}/status"))?;
    let mut lines = status.lines();
    lines.find_map(|line| Some(numbers(line.strip_prefix("Cpus_allowed_list:")?)))
}

/// A process has the session that counts since it was started: whether they are counted at all is asked of the kernel as it is now, so who was started before that was switched
/// is not told from who was not.
fn group_of(pid: u64) -> Option<Group> {
    let groups = read(format!("/proc/{pid}/cgroup"))?;
    let weighs = |path: &str| Path::new(&format!("/sys/fs/cgroup{path}/cpu.weight")).exists();
    let path = control_group(&groups, weighs);
    // Of a part of the machine's groups, which is what a container sees, the root is no root; and who is outside of it has no path.
    let space = std::fs::read_link("/proc/self/ns/cgroup").ok()?;
    let whole = space == Path::new(WHOLE_MACHINE);
    match path {
        Some(path) if whole || !path.starts_with("/..") => return Some(Group::Control(path)),
        None if whole => {}
        _ => return None,
    }
    let counted = read("/proc/sys/kernel/sched_autogroup_enabled").is_some_and(|on| on != "0");
    let session = read(format!("/proc/{pid}/autogroup")).unwrap_or_default();
    Some(match session.split(' ').next() {
        // `/autogroup-42 nice 0`
        Some(name) if counted && !name.is_empty() => Group::Session(name.to_owned()),
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
        if path.starts_with("/..") || weighs(path) {
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
        let group = |groups: &str| control_group(groups, never);
        let first = "9:name=systemd:/a\n4:cpu,cpuacct:/system.slice/x\n0::/b\n";
        assert_eq!(group(first).as_deref(), Some("/system.slice/x"));
        let root = "2:cpuacct:/x\n1:cpu:/\n0::/b\n";
        assert_eq!(control_group(root, |_| true), None);
        let second = "0::/system.slice/portoland.service\n";
        let service = "/system.slice/portoland.service";
        assert_eq!(control_group(second, |_| true).as_deref(), Some(service));
        let slice = control_group(second, |path| path == "/system.slice");
        assert_eq!(slice.as_deref(), Some("/system.slice"));
        assert_eq!(group(second), None);
        assert_eq!(group("0::/../other\n").as_deref(), Some("/../other"));
        assert_eq!(control_group("0::/\n", |_| true), None);
        assert_eq!(control_group("", |_| true), None);
    }

    // Engines on cores 0 and 1. Expect: who has another core is well off; who has not is judged by the engines on its own cores, whichever serves its port.
    #[test]
    fn who_is_at_odds_with_whom() {
        let session = |name: &str| Some(Group::Session(name.to_owned()));
        let control = |path: &str| Some(Group::Control(path.to_owned()));
        let on = |core, group| Engine {
            core,
            spins: false,
            group,
        };
        let engines = [on(0, session("a")), on(1, control("/b"))];
        let judged = |cores: &[usize], group: Option<Group>| together(&engines, cores, || group);
        assert_eq!(judged(&[0, 2], session("b")), Together::Well);
        assert_eq!(judged(&[0], session("a")), Together::Well);
        assert_eq!(judged(&[0], session("b")), Together::Sessions);
        assert_eq!(judged(&[0], Some(Group::Everybody)), Together::Sessions);
        assert_eq!(judged(&[0], control("/b")), Together::ControlGroups);
        assert_eq!(judged(&[1], control("/b")), Together::Well);
        assert_eq!(judged(&[0, 1], control("/b")), Together::ControlGroups);
        assert_eq!(judged(&[], session("a")), Together::Unseen);
        assert_eq!(judged(&[0], None), Together::Unseen);
        let hidden = [on(0, None)];
        let unseen = together(&hidden, &[0], || session("a"));
        assert_eq!(unseen, Together::Unseen);
        let spins = [Engine {
            spins: true,
            ..on(0, None)
        }];
        assert_eq!(together(&spins, &[0], || None), Together::NeverGetsIt);
        assert_eq!(together(&spins, &[0, 1], || None), Together::Well);
    }
}
