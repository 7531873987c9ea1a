//! The kernel, its clock, what we may use of the machine, and systemd.

use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Resource;

use super::{Findings, Patient, read};
use crate::supervisor::kernel::{KernelVersion, Support};
use crate::supervisor::{memlock_needed, privileges};

/// Clocks that cost no system call and do not jump.
const GOOD_CLOCKS: [&str; 5] = [
    "tsc",
    "kvm-clock",
    "arch_sys_counter",
    "hyperv_clocksource_tsc_page",
    "xen",
];
/// Descriptors of a node with every port open and some hundred clients.
const DESCRIPTORS: u64 = 65_536;
/// What a store must hold for a node with every port open (docs/restart.md).
const STORED: u64 = 2048;
/// Where units and their drop-ins may be, later ones first.
const UNITS: [&str; 4] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

pub(super) fn look(patient: &Patient, findings: &mut Findings) {
    kernel(findings);
    clock(findings);
    limits(patient, findings);
    store(findings);
}

fn kernel(findings: &mut Findings) {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy();
    let newer = "apt install linux-image-amd64   # 6.6 or newer, then reboot";
    match KernelVersion::parse(&release).map(KernelVersion::support) {
        Some(Support::Full) => {
            findings.ok("kernel", format!("{release}: {}", Support::Full.describe()));
        }
        Some(support @ Support::Degraded) => {
            findings.warn(
                "kernel",
                format!("{release}: {}", support.describe()),
                newer,
            );
        }
        Some(Support::TooOld) | None => {
            findings.bad(
                "kernel",
                format!("{release}: {}", Support::TooOld.describe()),
                newer,
            );
        }
    }
    let socket = rustix::net::socket_with(
        AddressFamily::from_raw(libc::AF_XDP as u16),
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    );
    match socket {
        Ok(_) => findings.ok("af_xdp", "AF_XDP sockets are there"),
        Err(rustix::io::Errno::AFNOSUPPORT) => {
            findings.bad(
                "af_xdp",
                "this kernel has no AF_XDP (CONFIG_XDP_SOCKETS)",
                newer,
            );
        }
        Err(error) => findings.bad(
            "af_xdp",
            format!("no AF_XDP socket can be made: {error}"),
            "run as root   # or with CAP_NET_RAW",
        ),
    }
    // Absent where the compiler is always on.
    if read("/proc/sys/net/core/bpf_jit_enable").as_deref() == Some("0") {
        findings.warn(
            "bpf",
            "the BPF compiler is off: the XDP program is interpreted",
            "sysctl -w net.core.bpf_jit_enable=1",
        );
    } else {
        findings.ok("bpf", "programs are compiled");
    }
}

fn clock(findings: &mut Findings) {
    let at = "/sys/devices/system/clocksource/clocksource0";
    let Some(now) = read(format!("{at}/current_clocksource")) else {
        findings.warn(
            "clock",
            "the kernel does not say which clock it reads",
            format!("ls {at}"),
        );
        return;
    };
    if GOOD_CLOCKS.contains(&now.as_str()) {
        findings.ok("clock", now);
        return;
    }
    let available = read(format!("{at}/available_clocksource")).unwrap_or_default();
    let better = available
        .split_whitespace()
        .find(|clock| GOOD_CLOCKS.contains(clock));
    findings.warn(
        "clock",
        format!("`{now}`: every look at the time is a system call or a device access"),
        match better {
            Some(clock) => format!("echo {clock} > {at}/current_clocksource"),
            None => format!(
                "dmesg | grep -i tsc   # why the kernel distrusts it; available: {available}"
            ),
        },
    );
}

fn limits(patient: &Patient, findings: &mut Findings) {
    if let Err(error) = privileges::check() {
        findings.warn(
            "privilege",
            error,
            "sudo portolan doctor   # to look at everything",
        );
    }
    if let Some(config) = &patient.config {
        match memlock_needed(config).map(privileges::check_memlock) {
            Ok(Ok(())) => findings.ok("memlock", "the UMEMs may be locked in memory"),
            Ok(Err(error)) => findings.bad(
                "memlock",
                error,
                "systemctl edit portoland   # [Service] LimitMEMLOCK=infinity; by hand: ulimit -l unlimited",
            ),
            Err(error) => findings.bad("memlock", format!("{error:#}"), "lower engine.umem_frames"),
        }
    }
    let hard = rustix::process::getrlimit(Resource::Nofile).maximum;
    match hard {
        Some(hard) if hard < DESCRIPTORS => findings.warn(
            "descriptors",
            format!("at most {hard} descriptors for what this shell starts: each port takes five, each client one"),
            "systemctl edit portoland   # [Service] LimitNOFILE=65536",
        ),
        _ => findings.ok("descriptors", "room for 65536 or more"),
    }
}

/// Does somebody keep the node's descriptors over a restart?
fn store(findings: &mut Findings) {
    if !Path::new("/run/systemd/system").exists() {
        findings.warn(
            "store",
            "systemd does not run here: nobody keeps the node's descriptors, so a restart of the daemon ends all ports",
            "run portoland under systemd, or a manager that speaks FDSTORE=1 (docs/restart.md)",
        );
        return;
    }
    let Some((file, kept)) = unit_setting("FileDescriptorStoreMax") else {
        findings.warn(
            "store",
            "no unit portoland.service keeps descriptors: a restart of the daemon ends all ports",
            "systemctl edit portoland   # [Service] FileDescriptorStoreMax=4096",
        );
        return;
    };
    match kept.parse::<u64>() {
        Ok(kept) if kept >= STORED => {
            findings.ok("store", format!("systemd keeps up to {kept} descriptors"));
        }
        _ => findings.warn(
            "store",
            format!(
                "{}: FileDescriptorStoreMax={kept} is too few for all ports",
                file.display()
            ),
            "systemctl edit portoland   # [Service] FileDescriptorStoreMax=4096",
        ),
    }
}

/// The last setting of our unit and its drop-ins, and where it is.
fn unit_setting(key: &str) -> Option<(PathBuf, String)> {
    let unit = UNITS
        .iter()
        .map(|d| Path::new(d).join("portoland.service"))
        .find(|p| p.exists())?;
    let mut dropins: Vec<PathBuf> = (UNITS.iter())
        .filter_map(|d| std::fs::read_dir(Path::new(d).join("portoland.service.d")).ok())
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    dropins.sort_by(|a, b| b.file_name().cmp(&a.file_name()));
    dropins.push(unit);
    dropins.into_iter().find_map(|file| {
        let text = std::fs::read_to_string(&file).ok()?;
        let value = setting(&text, key)?;
        Some((file, value))
    })
}

/// The last value of a key in a unit's text.
fn setting(text: &str, key: &str) -> Option<String> {
    let lines = text.lines().rev().filter_map(|line| line.split_once('='));
    let mut ours = lines.filter(|(name, _)| name.trim() == key);
    ours.next().map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_setting_counts() {
        let text = "[Service]\nFileDescriptorStoreMax=16\n# FileDescriptorStoreMax=1\nFileDescriptorStoreMax = 4096\n";
        assert_eq!(
            setting(text, "FileDescriptorStoreMax").as_deref(),
            Some("4096")
        );
        assert_eq!(setting(text, "LimitNOFILE"), None);
    }
}
