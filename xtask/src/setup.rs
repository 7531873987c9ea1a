//! `cargo xtask setup`: what building and testing need beyond Rust, and installing it with apt.
//!
//! Each need is looked for by the file it is needed for, not by package name, so a machine that has it from elsewhere
//! is left alone, and one that has everything is not kept waiting.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use portolan_testbed::process;

/// Bound on each of apt's two commands.
const APT: Duration = Duration::from_secs(15 * 60);
/// The oldest clang that compiles `steer.bpf.c`.
const CLANG: u32 = 14;

struct Need {
    package: &'static str,
    found_by: Found,
    why: &'static str,
}

enum Found {
    /// A program in PATH.
    Program(&'static str),
    /// A header below `/usr/include`, or below it in the machine's architecture.
    Header(&'static str),
}

const fn program(package: &'static str, program: &'static str, why: &'static str) -> Need {
    Need {
        package,
        found_by: Found::Program(program),
        why,
    }
}

const fn header(package: &'static str, header: &'static str, why: &'static str) -> Need {
    Need {
        package,
        found_by: Found::Header(header),
        why,
    }
}

const NEEDS: &[Need] = &[
    program(
        "clang",
        "clang",
        "compiles the eBPF program; its libclang reads C headers for xsk-rs",
    ),
    program(
        "gcc",
        "gcc",
        "links Rust programs, compiles libbpf and libxdp for the tests",
    ),
    program(
        "binutils",
        "objcopy",
        "embeds libxdp's eBPF objects for the tests",
    ),
    program("make", "make", "builds libbpf for the tests"),
    program("m4", "m4", "generates libxdp's dispatcher for the tests"),
    program(
        "pkg-config",
        "pkg-config",
        "finds libelf and zlib for libbpf",
    ),
    header("libc6-dev", "stdio.h", "C headers"),
    header(
        "linux-libc-dev",
        "linux/if_xdp.h",
        "the kernel's AF_XDP and BPF headers",
    ),
    header(
        "libbpf-dev",
        "bpf/bpf_helpers.h",
        "helpers the eBPF program includes",
    ),
    header(
        "libelf-dev",
        "libelf.h",
        "libbpf reads eBPF objects with it in the tests",
    ),
    header("zlib1g-dev", "zlib.h", "libelf and libbpf need it"),
    program("iproute2", "ip", "makes network namespaces and veth pairs"),
    program(
        "ethtool",
        "ethtool",
        "switches offloads and sets queues of interfaces",
    ),
    program(
        "iputils-ping",
        "ping",
        "ordinary kernel traffic beside ours",
    ),
];

/// What Portolan is compared with when `bench --peers` asks for it.
const PEERS: &[Need] = &[
    header("libucx-dev", "ucp/api/ucp.h", "UCX, a peer"),
    header("libfabric-dev", "rdma/fabric.h", "libfabric, a peer"),
    program("libopenmpi-dev", "mpicc", "Open MPI, a peer"),
    program("openmpi-bin", "mpirun", "starts Open MPI's ranks"),
];

impl Need {
    fn is_met(&self) -> bool {
        match self.found_by {
            Found::Program(name) => in_path(name).is_some(),
            Found::Header(name) => {
                let here = format!("{}-linux-gnu", std::env::consts::ARCH);
                let include = Path::new("/usr/include");
                include.join(name).exists() || include.join(here).join(name).exists()
            }
        }
    }
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Installs what is missing; quiet when nothing is.
pub fn run() -> Result<()> {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !need.is_met()).collect();
    if !missing.is_empty() {
        install(&missing)?;
    }
    check_clang()
}

/// Installs what Portolan is compared with.
pub fn peers() -> Result<()> {
    let missing: Vec<&Need> = PEERS.iter().filter(|need| !need.is_met()).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => install(&missing),
    }
}

/// Installs one package more, for a task that alone needs it, unless its program is there.
pub fn require(package: &'static str, name: &'static str, why: &'static str) -> Result<()> {
    let need = program(package, name, why);
    if need.is_met() {
        return Ok(());
    }
    install(&[&need])
}

fn install(missing: &[&Need]) -> Result<()> {
    println!("   this machine lacks:");
    for need in missing {
        println!("     {:<16} {}", need.package, need.why);
    }
    let packages: Vec<&str> = missing.iter().map(|need| need.package).collect();
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if in_path("apt-get").is_none() {
        bail!(
            "there is no apt-get: install what these Debian packages hold: {}",
            packages.join(" ")
        );
    }
    if !rustix::process::geteuid().is_root() {
        bail!("only root can install them; run this as root, or once, as root: {by_hand}");
    }
    println!("   installing with apt-get …");
    apt(&["update"], &[])?;
    apt(&["install", "--no-install-recommends"], &packages)?;
    let still: Vec<&str> = missing
        .iter()
        .filter(|need| !need.is_met())
        .map(|need| need.package)
        .collect();
    if !still.is_empty() {
        bail!(
            "installed, but what they are needed for is not found: {} (is /usr/sbin in PATH?)",
            still.join(" ")
        );
    }
    println!("   installed");
    Ok(())
}

fn apt(what: &[&str], packages: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command
        .args([
            "-qq",
            "-y",
            "-o",
            "Dpkg::Use-Pty=0",
            "-o",
            "DPkg::Lock::Timeout=300",
        ])
        .args(what)
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive");
    process::run_ok(&mut command, APT).map(drop)
}

fn check_clang() -> Result<()> {
    let mut command = Command::new("clang");
    let text = process::run_ok(command.arg("--version"), Duration::from_secs(20))?;
    let version = clang_major(&text)
        .with_context(|| format!("clang --version says nothing of its version: {text}"))?;
    if version < CLANG {
        bail!("clang {version} is too old for the eBPF program: {CLANG} or later is needed");
    }
    Ok(())
}

/// The major version in `Debian clang version 14.0.6`.
fn clang_major(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("version ")?;
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_clang_is_read() {
        assert_eq!(
            clang_major("Debian clang version 14.0.6\nTarget: x"),
            Some(14)
        );
        assert_eq!(clang_major("Ubuntu clang version 18.1.3 (1)"), Some(18));
        assert_eq!(clang_major("nothing"), None);
    }

    #[test]
    fn a_missing_program_is_missed() {
        assert!(!program("x", "no-such-program-anywhere", "").is_met());
        assert!(program("coreutils", "ls", "").is_met());
        assert!(!header("x", "no/such/header.h", "").is_met());
    }
}
