//! An Open MPI job of two ranks, one in each namespace.
//!
//! mpirun runs on node 1. It reaches node 2 as it would reach another machine, by a program that it is told to use as `ssh`: here one
//! that enters the namespace, under another host name, or Open MPI would take both for one machine. Ranks are actors like all
//! others, but not our children: they take their orders from a socket.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::process::{self, OnCancel};
use portolan_testbed::{Node, cancel};

use super::{Scene, Side};
use crate::actor::{Actor, Role};

/// Bound on the ranks' start.
const STARTED: Duration = Duration::from_secs(20);
/// Bound on the job's own end.
const ENDED: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);

/// A job that runs. Dropping it, after its ranks, ends it.
pub struct Job {
    mpirun: Child,
    errors: File,
}

impl Job {
    /// How it is run, but for addresses.
    pub const COMMAND: &str = "mpirun --mca pml ob1 --mca btl tcp,self --bind-to none, a rank per node, MPI_Isend and MPI_Irecv";

    /// Starts two ranks of these roles.
    ///
    /// # Errors
    /// What mpirun says.
    pub fn start(
        what: &str,
        scene: &Scene<'_>,
        meeting: &Path,
        roles: &[Role; 2],
    ) -> Result<(Self, [Actor; 2])> {
        let sides = [Side::One, Side::Two];
        let agent = meeting.join("agent");
        fs::write(&agent, agent_script(scene.node(Side::Two)))?;
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o700))?;
        let network = format!("{}/16", scene.node(Side::One).ipv4());
        let mut command = scene.node(Side::One).command("mpirun");
        command.current_dir(meeting);
        command.args(["--allow-run-as-root", "--bind-to", "none", "--mca", "plm"]);
        command.args(["rsh", "--mca", "plm_rsh_agent"]).arg(&agent);
        for (key, value) in [
            ("pml", "ob1"),
            ("btl", "tcp,self"),
            ("mpi_yield_when_idle", "0"),
            ("btl_tcp_if_include", &*network),
            ("oob_tcp_if_include", &*network),
        ] {
            command.args(["--mca", key, value]);
        }
        let mut listeners = Vec::new();
        for (rank, (side, role)) in sides.into_iter().zip(roles).enumerate() {
            let path = meeting.join(format!("orders-{rank}"));
            let listener = UnixListener::bind(&path).context("socket for orders")?;
            listener.set_nonblocking(true)?;
            listeners.push(listener);
            let role = Role::Remote {
                orders: path,
                role: Box::new(role.clone()),
            };
            if rank > 0 {
                command.arg(":");
            }
            let host = scene.node(side).ipv4().to_string();
            let core = scene.core(side).to_string();
            command.args(["-np", "1", "--host", &host, "taskset", "--cpu-list", &core]);
            command.arg(scene.program()).arg("actor");
            command.arg(serde_json::to_string(&role)?);
        }
        let errors = tempfile::tempfile().context("temporary file")?;
        let mpirun = command
            .stdin(Stdio::null())
            .stdout(errors.try_clone()?)
            .stderr(errors.try_clone()?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", process::describe(&command)))?;
        let mut job = Self { mpirun, errors };
        let mut streams = Vec::new();
        for listener in &listeners {
            streams.push(job.accept(listener)?);
        }
        let mut actors = Vec::new();
        for stream in streams {
            actors.push(Actor::attach(what, stream, job.errors.try_clone()?)?);
        }
        match <[Actor; 2]>::try_from(actors) {
            Ok(mut actors) => {
                // Both first: neither is ready before the other has begun.
                for actor in &mut actors {
                    actor.expect_ready()?;
                }
                Ok((job, actors))
            }
            Err(_) => bail!("there are two ranks"),
        }
    }

    fn accept(&mut self, listener: &UnixListener) -> Result<UnixStream> {
        let deadline = Instant::now() + STARTED;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("socket for orders"),
            }
            if cancel::requested() {
                bail!("interrupted");
            }
            if let Some(status) = self.mpirun.try_wait()? {
                bail!("mpirun: {status}\n{}", crate::actor::said(&self.errors));
            }
            if Instant::now() > deadline {
                let said = crate::actor::said(&self.errors);
                bail!("ranks do not come within {STARTED:?}\n{said}");
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let deadline = Instant::now() + ENDED;
        let _ = process::wait_child(&mut self.mpirun, deadline, OnCancel::Ignore);
        process::kill_group(&mut self.mpirun);
    }
}

/// What mpirun uses instead of ssh: its first argument is the machine, the rest a command for a shell.
fn agent_script(node: &Node) -> String {
    format!(
        "#!/bin/sh\nshift\nexec ip netns exec {} unshare --uts sh -c \"hostname {}; $*\"\n",
        node.namespace_name(),
        node.name()
    )
}
