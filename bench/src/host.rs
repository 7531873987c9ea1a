//! The machine that figures are of.

use std::fs;

use serde_json::{Value, json};

/// Processor, cores, kernel, memory.
pub fn describe() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let of = |line: &str| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        };
        cpuinfo.lines().find_map(of)
    };
    let uname = rustix::system::uname();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.lines().find_map(|line| {
        let kib = line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?;
        kib.trim().parse::<u64>().ok()
    });
    json!({
        "processor": field("model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "virtual": field("flags").is_some_and(|flags| flags.contains("hypervisor")),
        "kernel": uname.release().to_string_lossy(),
        "architecture": uname.machine().to_string_lossy(),
        "memory_mib": memory.map(|kib| kib / 1024),
        "profile": profile(),
    })
}

/// The Cargo profile that this program, and so what it measures, was built with: the directory it lies in.
fn profile() -> Option<String> {
    let program = std::env::current_exe().ok()?;
    let directory = program.parent()?.file_name()?;
    Some(directory.to_string_lossy().into_owned())
}

/// The same in a line.
pub fn line() -> String {
    let host = describe();
    let text = |key: &str| host[key].as_str().unwrap_or("?").to_owned();
    let guest = match host["virtual"].as_bool() {
        Some(true) => ", a virtual machine",
        _ => "",
    };
    format!(
        "{}, {} cores{guest}, Linux {}, built as {}",
        text("processor"),
        host["cores"],
        text("kernel"),
        text("profile")
    )
}
