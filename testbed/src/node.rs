//! One node of a lab.

use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::daemon::{Daemon, DaemonOptions};
use crate::lab::Plan;
use crate::namespace::Namespace;
use crate::{config, control};

/// Bound on one report of a daemon.
const REPORT: Duration = Duration::from_secs(5);

/// A network namespace with one interface, and what belongs to a node in it.
#[derive(Clone, Debug)]
pub struct Node {
    plan: Arc<Plan>,
    id: u16,
    namespace: Namespace,
}

impl Node {
    pub(crate) fn new(plan: Arc<Plan>, id: u16) -> Self {
        let namespace = Namespace::existing(&plan.namespace(id));
        Self {
            plan,
            id,
            namespace,
        }
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Its node id.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// What people call it: `ptl1`, `ptl2`, …
    pub fn name(&self) -> String {
        config::node_name(self.id)
    }

    /// The name of its network namespace.
    pub fn namespace_name(&self) -> &str {
        self.namespace.name()
    }

    /// The name of its interface inside its namespace.
    pub fn interface(&self) -> String {
        self.plan.interface(self.id)
    }

    /// The MAC of its interface, as text.
    pub fn mac(&self) -> String {
        self.plan.mac(self.id)
    }

    /// Its IPv4 address; every node has one, whatever the encapsulation.
    pub fn ipv4(&self) -> Ipv4Addr {
        self.plan.ipv4(self.id)
    }

    /// Its IPv6 address; every node has one where the kernel has IPv6.
    pub fn ipv6(&self) -> Ipv6Addr {
        self.plan.ipv6(self.id)
    }

    /// Where its daemon listens for applications.
    pub fn socket(&self) -> PathBuf {
        self.plan.socket(self.id)
    }

    /// Where its daemon's standard output and error go.
    pub fn log_path(&self) -> PathBuf {
        self.plan.directory.join(format!("{}.log", self.id))
    }

    /// A command that runs in the node's network, with its own view of `/sys`. The child's process id is the
    /// program's own.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.namespace.command(program)
    }

    /// The command line tool, in the node's network, told its socket.
    pub fn portolan(&self) -> Command {
        // Where it does not exist, starting it says so.
        let tool = self.plan.binaries.directory().join("portolan");
        let mut command = self.command(tool);
        command.arg("--socket").arg(self.socket());
        command
    }

    /// A report of its daemon: `status`, `peers`, `ports` or `counters`.
    pub fn report(&self, what: &str) -> Result<Value> {
        control::report(&self.socket(), what, REPORT)
            .with_context(|| format!("{what} of {}", self.name()))
    }

    /// Runs `work` on a fresh thread in the node's network and returns its result; sockets opened there stay there.
    /// A panic goes on in the caller.
    pub fn in_namespace<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.namespace.run_inside(work)
    }

    /// The text of its configuration with `overrides` (TOML) merged over it: tables by key, the rest replaced.
    pub fn config(&self, overrides: &str) -> Result<String> {
        config::render(&self.plan, self.id, overrides)
    }

    /// Writes its configuration and returns the file's path.
    pub fn write_config(&self, overrides: &str) -> Result<PathBuf> {
        let path = self.plan.directory.join(format!("{}.toml", self.id));
        fs::write(&path, self.config(overrides)?).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    pub(crate) fn daemon_program(&self) -> Result<PathBuf> {
        self.plan.binaries.daemon()
    }

    /// `portoland` in the node's network, without arguments, not started yet.
    pub fn portoland(&self) -> Result<Command> {
        Ok(self.command(self.daemon_program()?))
    }

    /// Starts its daemon and waits until the socket answers and every engine runs.
    pub fn start_daemon(&self, overrides: &str) -> Result<Daemon> {
        self.start_daemon_with(&DaemonOptions {
            overrides: overrides.to_owned(),
            ..DaemonOptions::default()
        })
    }

    /// Starts its daemon as `options` say.
    pub fn start_daemon_with(&self, options: &DaemonOptions) -> Result<Daemon> {
        Daemon::start(self, options)
    }
}
