//! A Debian system with its own init, in a container: its own file system, processes, and network namespace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::process::{self, Finished, OnCancel, kill_group, wait_child};
use rustix::process::{Pid, Signal, kill_process};

/// From the start of init until it says that the system runs.
const BOOT: Duration = Duration::from_secs(90);
/// What is done to a system from outside.
const QUICK: Duration = Duration::from_secs(60);
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// A system that was started; ends when dropped, with everything in it.
pub struct Container {
    /// What it is called.
    pub name: String,
    tree: PathBuf,
    netns: String,
    nspawn: Option<Child>,
    leader: i32,
}

impl Container {
    /// Unpacks a system. Its network namespace is there already.
    pub fn unpack(name: &str, base: &Path, directory: &Path, netns: &str) -> Result<Self> {
        let tree = directory.join(name);
        fs::create_dir_all(&tree)?;
        let mut tar = Command::new("tar");
        tar.arg("-xpf")
            .arg(base)
            .arg("--numeric-owner")
            .arg("-C")
            .arg(&tree);
        process::run_ok(&mut tar, QUICK)?;
        fs::write(tree.join("etc/hostname"), format!("{name}\n"))?;
        fs::write(tree.join("etc/machine-id"), "")?;
        // A journal on /var/log, which a test may fill.
        fs::create_dir_all(tree.join("var/log/journal"))?;
        Ok(Self {
            name: name.to_owned(),
            tree,
            netns: netns.to_owned(),
            nspawn: None,
            leader: 0,
        })
    }

    /// Its files.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.tree.join(inside.trim_start_matches('/'))
    }

    /// Boots it and waits until it runs.
    pub fn boot(&mut self) -> Result<()> {
        let console = fs::File::create(self.tree.with_extension("console"))?;
        let mut command = Command::new("systemd-nspawn");
        command
            .args([
                "--quiet",
                "--boot",
                "--register=no",
                "--keep-unit",
                "--console=pipe",
            ])
            .args([
                "--capability=all",
                "--system-call-filter=bpf perf_event_open",
            ])
            .arg(format!(
                "--network-namespace-path=/run/netns/{}",
                self.netns
            ))
            .arg(format!("--machine={}", self.netns))
            .arg("--tmpfs=/var/log:mode=755,size=32m")
            // As on a machine of its own, how soon a processor wakes may be said.
            .arg(format!("--bind={}", super::processors::DIRECTORY))
            .arg(format!("--directory={}", self.tree.display()))
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console);
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let nspawn = command.spawn().context("systemd-nspawn")?;
        let parent = nspawn.id();
        self.nspawn = Some(nspawn);
        let end = Instant::now() + BOOT;
        self.leader = loop {
            if let Some(pid) = init_below(parent) {
                break pid;
            }
            self.still_there(end, "no init")?;
            std::thread::sleep(PAUSE);
        };
        loop {
            let state = self.run("systemctl is-system-running", QUICK)?.stdout;
            match state.trim() {
                "running" => return Ok(()),
                "degraded" => {
                    let failed = self.run("systemctl --failed --plain --no-legend", QUICK)?;
                    bail!("{}: units failed: {}", self.name, failed.stdout);
                }
                _ => self.still_there(end, "does not come up")?,
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn still_there(&mut self, end: Instant, what: &str) -> Result<()> {
        let ended = match &mut self.nspawn {
            Some(nspawn) => nspawn.try_wait()?,
            None => bail!("{} was not started", self.name),
        };
        if let Some(status) = ended {
            let console = fs::read_to_string(self.tree.with_extension("console"))?;
            bail!("{}: systemd-nspawn: {status}\n{console}", self.name);
        }
        if Instant::now() > end {
            bail!("{}: {what}", self.name);
        }
        Ok(())
    }

    /// A command in it, for a shell.
    pub fn command(&self, script: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.leader))
            .args(["--mount", "--uts", "--ipc", "--net", "--pid"])
            .args([
                "env",
                "-i",
                "HOME=/root",
                "LC_ALL=C.UTF-8",
                "DEBIAN_FRONTEND=noninteractive",
            ])
            .arg("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .args(["sh", "-c", &format!("cd /root\n{script}")]);
        command
    }

    /// Runs a command in it, whatever becomes of it.
    pub fn run(&self, script: &str, within: Duration) -> Result<Finished> {
        process::run(&mut self.command(script), within)
            .with_context(|| format!("{}: {script}", self.name))
    }

    /// Runs a command in it that must succeed; what it printed.
    pub fn ok(&self, script: &str, within: Duration) -> Result<String> {
        let done = self.run(script, within)?;
        if !done.status.success() {
            bail!(
                "{}: {script}: {}\n{}{}",
                self.name,
                done.status,
                done.stdout,
                done.stderr
            );
        }
        Ok(done.stdout)
    }

    /// Waits until a command in it succeeds.
    pub fn wait_for(&self, what: &str, script: &str, within: Duration) -> Result<()> {
        let end = Instant::now() + within;
        loop {
            let done = self.run(script, within)?;
            if done.status.success() {
                return Ok(());
            }
            if Instant::now() > end {
                bail!(
                    "{}: not within {within:?}: {what}\n{}{}",
                    self.name,
                    done.stdout,
                    done.stderr
                );
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Has it reboot at once, with no farewell of anybody, and waits until it is back.
    pub fn reboot(&mut self) -> Result<()> {
        self.run("systemctl reboot --force --force", QUICK)?;
        let nspawn = self.nspawn.as_mut().context("not started")?;
        // With --keep-unit it leaves the second half to who started it.
        let ended = wait_child(nspawn, Instant::now() + BOOT, OnCancel::Stop)?;
        if ended.is_none() {
            bail!("{} does not go down", self.name);
        }
        self.boot()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(mut nspawn) = self.nspawn.take() {
            // Its init does not die with it, but everything dies with its init.
            if let Some(init) = init_below(nspawn.id()).and_then(Pid::from_raw) {
                // Gone already: as good.
                let _ = kill_process(init, Signal::KILL);
            }
            kill_group(&mut nspawn);
            let _ = wait_child(&mut nspawn, Instant::now() + QUICK, OnCancel::Ignore);
        }
    }
}

/// The init of a container: the child of its nspawn that is systemd.
fn init_below(parent: u32) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().find_map(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (name.trim() == "systemd")
            .then(|| pid.parse().ok())
            .flatten()
    })
}

/// Two network namespaces with a wire between them, `eth0` at both ends.
pub struct Wire {
    namespaces: [String; 2],
}

impl Wire {
    /// Makes them, up and with these addresses.
    pub fn new(namespaces: [String; 2], addresses: [&str; 2]) -> Result<Self> {
        let ip = |arguments: &str| {
            let mut command = Command::new("ip");
            process::run_ok(command.args(arguments.split_whitespace()), QUICK)
        };
        let wire = Self { namespaces };
        let [a, b] = &wire.namespaces;
        for namespace in [a, b] {
            ip(&format!("netns add {namespace}"))?;
        }
        ip(&format!(
            "link add eth0 netns {a} type veth peer name eth0 netns {b}"
        ))?;
        for (namespace, address) in wire.namespaces.iter().zip(addresses) {
            ip(&format!("-n {namespace} addr add {address} dev eth0"))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
        }
        Ok(wire)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            // Not there: as good.
            let _ = Command::new("ip")
                .args(["netns", "del", namespace])
                .stderr(Stdio::null())
                .status();
        }
    }
}
