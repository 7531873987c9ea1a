//! What the kernel says about a process, and once about processors.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;

/// A line of `/proc/PID/status`; empty if there is none.
pub fn status(pid: i32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

/// What each descriptor of a process is.
pub fn descriptors(pid: i32) -> BTreeMap<i32, String> {
    let directory = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    directory
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.parse().ok()?;
            // It may be closed meanwhile.
            let target = fs::read_link(entry.path()).ok()?;
            Some((number, target.to_string_lossy().into_owned()))
        })
        .collect()
}

/// How many descriptors there are of each kind; sockets and pipes without their number.
pub fn descriptor_kinds(pid: i32) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for target in descriptors(pid).into_values() {
        let kind = match target.split_once(":[") {
            Some((kind @ ("socket" | "pipe"), _)) => kind.to_owned(),
            _ => target,
        };
        *kinds.entry(kind).or_default() += 1;
    }
    kinds
}

/// What is mapped from shared memory, and how often.
pub fn shared_mappings(pid: i32) -> BTreeMap<String, usize> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mut mappings = BTreeMap::new();
    for line in text.lines() {
        if let Some(at) = line.find("/memfd:") {
            *mappings.entry(line[at..].to_owned()).or_default() += 1;
        }
    }
    mappings
}

/// A figure of `/proc/PID/status` in kB.
pub fn kilobytes(pid: i32, key: &str) -> u64 {
    let value = status(pid, key);
    value.trim_end_matches(" kB").trim().parse().unwrap()
}

/// Within how many microseconds idle processors wake now, as the kernel has it; `None` if it has no such bounds for a daemon of root's
/// (kernel/power/qos.c, `cpu_latency_qos_read`).
pub fn cpu_latency_bound() -> Option<i32> {
    let mut device = File::open("/dev/cpu_dma_latency").ok()?;
    if device.metadata().unwrap().uid() != 0 {
        return None;
    }
    let mut number = [0; 4];
    device.read_exact(&mut number).unwrap();
    Some(i32::from_ne_bytes(number))
}
