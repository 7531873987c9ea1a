//! The wire of an impaired lab: a program, `portolan-wire`, in the namespace of the lab's bridge, and its remote control.
//!
//! Every node's interface ends in that namespace. What is not Portolan's crosses the bridge untouched (ARP, neighbour
//! discovery, ping, TCP): the steering program passes it on. Portolan's frames it redirects into AF_XDP sockets of the
//! wire, which does to them what [`Impairment`] says and hands them to the interface of the node they are for.
//!
//! A program and not a thread, so that this crate, which `cargo xtask` is built from, needs neither clang nor libbpf; so that
//! a lab that stays up keeps its wire; and so that it ends like everything else in a lab: with its namespace.
//!
//! One request per connection to a Unix socket in the lab's directory, a line of JSON each way.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::cancel;
use crate::impairment::{Impairment, WireCounters};
use crate::lab::{Encap, Plan};
use crate::namespace::Namespace;
use crate::process::{self, RETRY_PAUSE};

/// Bound on its start: it faults in its memory.
const START: Duration = Duration::from_secs(20);
/// Bound on one answer.
const ANSWER: Duration = Duration::from_secs(5);
/// The longest frames it is made for.
pub(crate) const MAX_MTU: u32 = 9000;

/// What `portolan-wire` is told, in a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WireSpec {
    /// Where it listens for requests.
    pub control: PathBuf,
    /// How Portolan frames travel.
    pub encap: Encap,
    /// The UDP port of queue 0.
    pub udp_port: u16,
    /// Queues of every interface.
    pub queues: u16,
    /// What happens to frames at first, toward every node.
    pub impairment: Impairment,
    /// The interfaces.
    pub sides: Vec<WireSide>,
}

/// One interface of the wire.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WireSide {
    /// The node at its other end.
    pub node: u16,
    /// That node's MAC.
    pub mac: [u8; 6],
    /// Its name in the wire's namespace.
    pub interface: String,
}

/// What can be asked of `portolan-wire`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireRequest {
    /// From now on this happens to frames toward a node, or toward all.
    Set {
        /// The node; none: all.
        toward: Option<u16>,
        /// What happens.
        impairment: Impairment,
    },
    /// Cuts or heals the link toward a node, or all, and changes nothing else.
    Cut {
        /// The node; none: all.
        toward: Option<u16>,
        /// Whether it is down.
        cut: bool,
    },
    /// From now on every frame that comes, before anything happens to it, goes into a file for Wireshark.
    Record {
        /// The file; none: no more, and what was recorded is in its file.
        file: Option<PathBuf>,
    },
    /// Only the counters.
    Counters,
}

/// What it answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireAnswer {
    /// It was done; the counters afterwards.
    Done(WireCounters),
    /// It was not.
    Refused(String),
}

/// The wire of an impaired lab.
#[derive(Debug)]
pub struct Wire {
    control: PathBuf,
    /// None: it was started by the process that made the lab, and is ended with its namespace.
    child: Option<Child>,
}

impl Wire {
    pub(crate) fn start(
        plan: &Plan,
        namespace: &Namespace,
        impairment: &Impairment,
    ) -> Result<Self> {
        let spec = WireSpec {
            control: control(plan),
            encap: plan.spec.encap,
            udp_port: crate::config::UDP_PORT,
            queues: plan.spec.queues,
            impairment: impairment.clone(),
            sides: (1..=plan.spec.nodes).map(|node| side(plan, node)).collect(),
        };
        let file = plan.directory.join("wire.json");
        let text = serde_json::to_string_pretty(&spec)?;
        fs::write(&file, text).with_context(|| file.display().to_string())?;
        let log_path = plan.directory.join("wire.log");
        let log = File::create(&log_path).with_context(|| log_path.display().to_string())?;
        let child = namespace
            .command(plan.binaries.wire()?)
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("cannot start ip netns exec")?;
        let mut wire = Self {
            control: spec.control,
            child: Some(child),
        };
        wire.wait_ready().with_context(|| {
            let log = fs::read_to_string(&log_path).unwrap_or_default();
            format!("portolan-wire did not start; it says:\n{log}")
        })?;
        Ok(wire)
    }

    /// The wire of a lab that somebody else made.
    pub(crate) fn existing(plan: &Plan) -> Self {
        Self {
            control: control(plan),
            child: None,
        }
    }

    fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START;
        loop {
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait()?
            {
                bail!("it ended: {status}");
            }
            let Err(error) = self.counters() else {
                return Ok(());
            };
            if cancel::requested() {
                bail!("interrupted");
            }
            if Instant::now() > deadline {
                return Err(error.context(format!("not ready within {START:?}")));
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    }

    /// From now on this happens to all frames. What is under way already arrives as it was to.
    pub fn set(&self, impairment: &Impairment) -> Result<()> {
        self.set_for(None, impairment)
    }

    /// From now on this happens to frames toward this node.
    pub fn set_toward(&self, node: u16, impairment: &Impairment) -> Result<()> {
        self.set_for(Some(node), impairment)
    }

    fn set_for(&self, toward: Option<u16>, impairment: &Impairment) -> Result<()> {
        impairment.check()?;
        let impairment = impairment.clone();
        self.ask(&WireRequest::Set { toward, impairment }).map(drop)
    }

    /// Nothing arrives anywhere any more.
    pub fn cut(&self) -> Result<()> {
        let (toward, cut) = (None, true);
        self.ask(&WireRequest::Cut { toward, cut }).map(drop)
    }

    /// Nothing arrives at this node any more; what it sends does.
    pub fn cut_toward(&self, node: u16) -> Result<()> {
        let (toward, cut) = (Some(node), true);
        self.ask(&WireRequest::Cut { toward, cut }).map(drop)
    }

    /// Every cut link is whole again; other impairments stay.
    pub fn heal(&self) -> Result<()> {
        let (toward, cut) = (None, false);
        self.ask(&WireRequest::Cut { toward, cut }).map(drop)
    }

    /// Records every frame that comes from a node, before anything happens to it, in a pcap file.
    pub fn record(&self, file: &Path) -> Result<()> {
        let file = std::path::absolute(file).with_context(|| file.display().to_string())?;
        self.ask(&WireRequest::Record { file: Some(file) })
            .map(drop)
    }

    /// Ends recording; the file is whole.
    pub fn end_recording(&self) -> Result<()> {
        self.ask(&WireRequest::Record { file: None }).map(drop)
    }

    /// What became of the frames. What came before is in the file that is being recorded.
    pub fn counters(&self) -> Result<WireCounters> {
        self.ask(&WireRequest::Counters)
    }

    pub(crate) fn detach(&mut self) {
        self.child = None;
    }

    fn ask(&self, request: &WireRequest) -> Result<WireCounters> {
        let asked = || -> Result<WireAnswer> {
            let mut stream = UnixStream::connect(&self.control)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.set_write_timeout(Some(ANSWER))?;
            stream.write_all((serde_json::to_string(request)? + "\n").as_bytes())?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)?;
            Ok(serde_json::from_str(&line)?)
        };
        match asked().with_context(|| format!("portolan-wire at {}", self.control.display()))? {
            WireAnswer::Done(counters) => Ok(counters),
            WireAnswer::Refused(reason) => bail!("portolan-wire: {reason}"),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            process::kill_group(child);
        }
    }
}

fn control(plan: &Plan) -> PathBuf {
    Path::new(&plan.directory).join("wire.sock")
}

fn side(plan: &Plan, node: u16) -> WireSide {
    WireSide {
        node,
        mac: plan.mac_bytes(node),
        interface: plan.bridge_port(node),
    }
}
