//! A running daemon: started, waited for, ended for certain.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::manager::{Manager, ManagerOptions};
use crate::node::Node;
use crate::process::{self, OnCancel};
use crate::{cancel, control};

/// Bound on the death of killed processes.
const DEATH: Duration = Duration::from_secs(10);
/// The pause between two looks at a starting daemon.
const PAUSE: Duration = Duration::from_millis(10);
/// How much of a log goes into an error.
const LOG_LINES: usize = 40;

/// What starting a daemon waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The socket accepts a connection.
    Socket,
    /// And the daemon reports every engine running.
    Engines,
}

/// How a daemon is started.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// TOML merged over the node's configuration.
    pub overrides: String,
    /// Environment variables on top of our own.
    pub env: Vec<(String, String)>,
    /// What to wait for.
    pub ready: Ready,
    /// How long to wait.
    pub within: Duration,
    /// In a session of its own, as a service manager starts it: the scheduler shares a core among sessions first (sched(7), *The autogroup feature*).
    pub session: bool,
    /// With a manager that keeps its descriptors and starts it again; without, it is a plain child.
    pub manager: Option<ManagerOptions>,
}

impl Default for DaemonOptions {
    fn default() -> Self {
        Self {
            overrides: String::new(),
            env: Vec::new(),
            ready: Ready::Engines,
            within: Duration::from_secs(15),
            session: false,
            manager: None,
        }
    }
}

/// A node's daemon. Dropping it kills the supervisor and every engine.
#[derive(Debug)]
pub struct Daemon {
    node: Node,
    keeper: Keeper,
    config: PathBuf,
    detached: bool,
}

/// The program in its node's network, and in a process group of its own. Who leads one already would not become `setsid`'s session itself but start a child.
fn launch(node: &Node, program: &Path, session: bool) -> Command {
    if session {
        let mut command = node.command("setsid");
        command.arg(program);
        return command;
    }
    let mut command = node.command(program);
    command.process_group(0);
    command
}

/// Who started the supervisor and reaps it.
#[derive(Debug)]
enum Keeper {
    Child(Child),
    Manager(Box<Manager>),
}

impl Daemon {
    pub(crate) fn start(node: &Node, options: &DaemonOptions) -> Result<Self> {
        let config = node.write_config(&options.overrides)?;
        // As /proc/PID/exe will show it.
        let program = node.daemon_program()?.canonicalize()?;
        let log_path = node.log_path();
        let log = File::create(&log_path).with_context(|| log_path.display().to_string())?;
        let keeper = match &options.manager {
            Some(manager) => {
                let manager = Manager::start(node, &program, &config, &log, &options.env, manager)?;
                Keeper::Manager(Box::new(manager))
            }
            None => Keeper::Child(
                launch(node, &program, options.session)
                    .arg("--config")
                    .arg(&config)
                    .envs(options.env.iter().map(|(name, value)| (name, value)))
                    .stdin(Stdio::null())
                    .stdout(log.try_clone()?)
                    .stderr(log)
                    .spawn()
                    .context("cannot start ip netns exec")?,
            ),
        };
        let mut daemon = Self {
            node: node.clone(),
            keeper,
            config,
            detached: false,
        };
        daemon
            .wait_ready(options)
            .with_context(|| daemon.explain("did not start"))?;
        Ok(daemon)
    }

    fn wait_ready(&mut self, options: &DaemonOptions) -> Result<()> {
        let deadline = Instant::now() + options.within;
        loop {
            match &mut self.keeper {
                Keeper::Child(child) => {
                    if let Some(status) = child.try_wait()? {
                        bail!("it ended: {status}");
                    }
                }
                Keeper::Manager(manager) => {
                    if let Some(failure) = manager.failure() {
                        bail!("its manager gave up: {failure}");
                    }
                }
            }
            let not_yet = match self.look(options.ready) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if cancel::requested() {
                bail!("interrupted");
            }
            if Instant::now() > deadline {
                return Err(not_yet.context(format!("not ready within {:?}", options.within)));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn look(&self, ready: Ready) -> Result<()> {
        control::reach(&self.node.socket())?;
        if ready == Ready::Engines {
            let status = self.status()?;
            let engines = engines(&status)?;
            let running = |engine: &Value| engine["state"] == "running";
            if engines.is_empty() || !engines.iter().all(running) {
                bail!("not every engine is running: {status}");
            }
        }
        Ok(())
    }

    /// The process id of the supervisor; 0 while its manager has none.
    pub fn pid(&self) -> i32 {
        match &self.keeper {
            Keeper::Child(child) => child.id().cast_signed(),
            Keeper::Manager(manager) => manager.pid().unwrap_or(0),
        }
    }

    /// Its manager; an error if it was started without ([`DaemonOptions::manager`]).
    pub fn manager(&self) -> Result<&Manager> {
        match &self.keeper {
            Keeper::Manager(manager) => Ok(manager),
            Keeper::Child(_) => bail!("{} was started without a manager", self.node.name()),
        }
    }

    /// Where it listens for applications.
    pub fn socket(&self) -> PathBuf {
        self.node.socket()
    }

    /// The configuration file it was started with.
    pub fn config_path(&self) -> &std::path::Path {
        &self.config
    }

    /// What it has written to standard output and error.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.node.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the supervisor still lives.
    pub fn is_running(&mut self) -> bool {
        match &mut self.keeper {
            Keeper::Child(child) => matches!(child.try_wait(), Ok(None)),
            Keeper::Manager(manager) => manager.pid().is_some(),
        }
    }

    /// The daemon's own report of its state, which `portolan status --json` prints.
    pub fn status(&self) -> Result<Value> {
        self.node.report("status")
    }

    /// The process ids of its engines, by queue.
    pub fn engine_pids(&self) -> Result<Vec<i32>> {
        let status = self.status()?;
        engines(&status)?
            .iter()
            .map(|engine| {
                let pid = engine["pid"].as_i64().context("an engine without a pid")?;
                i32::try_from(pid).context("pid")
            })
            .collect()
    }

    /// Waits until `condition` holds of the status, or says what it was last.
    pub fn wait_status(
        &self,
        what: &str,
        within: Duration,
        mut condition: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + within;
        loop {
            let status = self.status();
            if let Ok(status) = &status
                && condition(status)
            {
                return Ok(status.clone());
            }
            if cancel::requested() {
                bail!("interrupted");
            }
            if Instant::now() > deadline {
                let reason = match status {
                    Ok(status) => format!("last status: {status}"),
                    Err(error) => format!("no status: {error:#}"),
                };
                bail!(self.explain(&format!("{what}: not within {within:?}; {reason}")));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Asks it to stop (SIGTERM) and waits. An error when it does not stop in time or leaves a process behind, which
    /// is then killed.
    pub fn stop(mut self, within: Duration) -> Result<ExitStatus> {
        let family = process::family(self.pid());
        let deadline = Instant::now() + within;
        let status = match &mut self.keeper {
            Keeper::Child(child) => {
                kill_process(Pid::from_child(child), Signal::TERM).context("SIGTERM")?;
                let waited = process::wait_child(child, deadline, OnCancel::Stop)?;
                waited.with_context(|| self.explain("did not stop"))?
            }
            Keeper::Manager(manager) => {
                let stopped = manager.stop(within);
                let status = stopped.with_context(|| self.explain("did not stop"))?;
                // Engines notice that nobody holds their links any more.
                while !self.left(&family).is_empty() && Instant::now() < deadline {
                    std::thread::sleep(PAUSE);
                }
                status
            }
        };
        let left = self.left(&family);
        if !left.is_empty() {
            process::kill_until_gone(|| self.left(&family), DEATH)?;
            bail!(self.explain(&format!("stopped and left processes {left:?} behind")));
        }
        Ok(status)
    }

    /// Kills the supervisor and every engine with SIGKILL, now.
    pub fn kill(mut self) -> Result<()> {
        self.kill_all()
    }

    /// Lets it go on after us: for a lab that stays up.
    pub fn detach(mut self) {
        self.detached = true;
    }

    fn kill_all(&mut self) -> Result<()> {
        let pid = self.pid();
        let mut family = HashSet::new();
        if pid != 0 {
            family = process::family(pid);
        }
        match &mut self.keeper {
            Keeper::Child(child) => process::kill_group(child),
            Keeper::Manager(manager) => manager.abandon(),
        }
        process::kill_until_gone(|| self.left(&family), DEATH)?;
        self.let_processors_sleep()
    }

    /// What only the next daemon of this node would do: it was killed, and the processors that it kept awake are named in a file beside its socket.
    fn let_processors_sleep(&self) -> Result<()> {
        let named = self.socket().with_extension("awake");
        let Ok(text) = fs::read_to_string(&named) else {
            return Ok(());
        };
        for core in text.split_ascii_whitespace() {
            let bound = format!("/sys/devices/system/cpu/cpu{core}/power/pm_qos_resume_latency_us");
            fs::write(&bound, "0").context(bound)?;
        }
        fs::remove_file(&named).with_context(|| named.display().to_string())
    }

    /// Which of `family`, and of the node's processes that run a daemon, of this build or another, still live. The
    /// supervisor's children outlive it by design, so neither parent nor group alone is enough.
    fn left(&self, family: &HashSet<i32>) -> HashSet<i32> {
        let live: HashSet<i32> = process::table().iter().map(|e| e.pid).collect();
        let ours = |pid: &i32| {
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| {
                exe.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("portoland"))
            })
        };
        let mut left: HashSet<i32> = family.intersection(&live).copied().collect();
        left.extend(self.node.namespace().processes().into_iter().filter(ours));
        left
    }

    /// A message about this daemon with the end of its log.
    fn explain(&self, what: &str) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
        format!(
            "portoland of {} {what}; its log ends:\n{tail}",
            self.node.name()
        )
    }
}

/// The list of engines in a status.
fn engines(status: &Value) -> Result<&Vec<Value>> {
    status["engines"]
        .as_array()
        .with_context(|| format!("a status without engines: {status}"))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.detached {
            return;
        }
        if std::thread::panicking() {
            eprintln!("{}", self.explain("ran during this failure"));
        }
        if let Err(error) = self.kill_all() {
            eprintln!("{}", self.explain(&format!("cannot be ended: {error:#}")));
        }
    }
}
