//! A whole lab: what it looks like, making it, taking it down.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::binaries::Binaries;
use crate::impairment::Impairment;
use crate::namespace::Namespace;
use crate::node::Node;
use crate::run_dir::{self, RunDir};
use crate::wire::{self, Wire};
use crate::wiring;

/// The bridge makes larger labs pointless; the addresses would allow 65 534.
const MAX_NODES: u16 = 64;
/// veth's own limit is 4096; more than this many engines on one machine is a mistake.
const MAX_QUEUES: u16 = 64;
const MTU: std::ops::RangeInclusive<u32> = 1280..=65_000;
/// The lab that `cargo xtask lab` keeps up: its directory and the beginning of its namespaces' names.
const LASTING_NAME: &str = "lab";
const LASTING_PREFIX: &str = "ptl";
/// What a lasting lab looks like, in its directory.
const SPEC_FILE: &str = "lab.json";

/// How Portolan frames travel in a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encap {
    /// In UDP over IPv4.
    Udp4,
    /// In UDP over IPv6.
    Udp6,
    /// Directly in Ethernet frames.
    Ethernet,
}

impl std::fmt::Display for Encap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Udp4 => "UDP over IPv4",
            Self::Udp6 => "UDP over IPv6",
            Self::Ethernet => "Ethernet",
        })
    }
}

/// What a lab looks like.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// How many nodes, with ids from 1.
    pub nodes: u16,
    /// Transmit and receive queues of every interface, and engines of every daemon.
    pub queues: u16,
    /// MTU of every interface, in bytes.
    pub mtu: u32,
    /// How frames travel.
    pub encap: Encap,
    /// What happens to Portolan frames on the way at first. None: all is well, and nothing can be done to them later.
    #[serde(default)]
    pub impairment: Option<Impairment>,
}

/// Everything that follows from a spec and a name.
#[derive(Debug)]
pub(crate) struct Plan {
    pub name: String,
    pub spec: Spec,
    pub directory: PathBuf,
    pub namespace_prefix: String,
    pub binaries: Binaries,
}

impl Plan {
    pub fn namespace(&self, id: u16) -> String {
        format!("{}{id}", self.namespace_prefix)
    }

    pub fn interface(&self, id: u16) -> String {
        format!("ptl{id}v")
    }

    pub fn mac_bytes(&self, id: u16) -> [u8; 6] {
        let [high, low] = id.to_be_bytes();
        [2, 0, 0, 0, high, low]
    }

    pub fn mac(&self, id: u16) -> String {
        self.mac_bytes(id)
            .map(|byte| format!("{byte:02x}"))
            .join(":")
    }

    /// The name of a node's interface on the bridge.
    pub fn bridge_port(&self, id: u16) -> String {
        format!("port{id}")
    }

    pub fn bridge_port_mac(&self, id: u16) -> String {
        let [high, low] = id.to_be_bytes();
        format!("02:00:00:01:{high:02x}:{low:02x}")
    }

    pub fn ipv4(&self, id: u16) -> Ipv4Addr {
        let [high, low] = id.to_be_bytes();
        Ipv4Addr::new(10, 77, high, low)
    }

    pub fn ipv6(&self, id: u16) -> Ipv6Addr {
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, id)
    }

    /// The address of a node's daemon, where it has one.
    pub fn address(&self, id: u16) -> Option<IpAddr> {
        match self.spec.encap {
            Encap::Udp4 => Some(self.ipv4(id).into()),
            Encap::Udp6 => Some(self.ipv6(id).into()),
            Encap::Ethernet => None,
        }
    }

    pub fn socket(&self, id: u16) -> PathBuf {
        self.directory.join(format!("{id}.sock"))
    }
}

/// Says what a lab is to look like. Unless told otherwise: two nodes, one queue, MTU 1500, UDP over IPv4.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    spec: Spec,
    prefix: String,
    binaries: Option<Binaries>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            spec: Spec {
                nodes: 2,
                queues: 1,
                mtu: 1500,
                encap: Encap::Udp4,
                impairment: None,
            },
            prefix: "pt".to_owned(),
            binaries: None,
        }
    }
}

impl Builder {
    /// How many nodes: two share a veth pair, any other number meets on a bridge.
    pub fn nodes(mut self, nodes: u16) -> Self {
        self.spec.nodes = nodes;
        self
    }

    /// Queues of every interface, each with an engine of its own.
    pub fn queues(mut self, queues: u16) -> Self {
        self.spec.queues = queues;
        self
    }

    /// MTU of every interface, in bytes.
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.spec.mtu = mtu;
        self
    }

    /// How Portolan frames travel.
    pub fn encap(mut self, encap: Encap) -> Self {
        self.spec.encap = encap;
        self
    }

    /// Has every Portolan frame pass a wire that does this to it, and later whatever [`Lab::wire`] is told. Everything
    /// else crosses unimpaired. Frames go through a bridge, also between two nodes.
    pub fn impaired(mut self, impairment: Impairment) -> Self {
        self.spec.impairment = Some(impairment);
        self
    }

    /// Takes all of the above from a spec.
    pub fn spec(mut self, spec: Spec) -> Self {
        self.spec = spec;
        self
    }

    /// How the lab's unique name begins, `pt` unless told otherwise: up to eight lower-case letters.
    pub fn name(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.prefix);
        self
    }

    /// Where the daemon and the tool are, if not where [`Binaries::find`] looks.
    pub fn binaries(mut self, binaries: Binaries) -> Self {
        self.binaries = Some(binaries);
        self
    }

    /// Makes the lab. It is removed when dropped.
    pub fn build(self) -> Result<Lab> {
        let good = |c: u8| c.is_ascii_lowercase();
        if !(1..=8).contains(&self.prefix.len()) || !self.prefix.bytes().all(good) {
            bail!("{:?} is not one to eight lower-case letters", self.prefix);
        }
        self.make(false)
    }

    /// Makes the one lab that stays up until [`Lab::take_down_lasting`], with namespaces `ptl1`, `ptl2`, … and sockets
    /// `/run/portolan/lab/N.sock`. An error when it is up already. Until [`Lab::leave_up`] it is removed when dropped.
    pub fn build_lasting(self) -> Result<Lab> {
        self.make(true)
    }

    fn make(self, lasting: bool) -> Result<Lab> {
        let spec = self.spec;
        if !(1..=MAX_NODES).contains(&spec.nodes) {
            bail!("a lab has 1 to {MAX_NODES} nodes, not {}", spec.nodes);
        }
        if !(1..=MAX_QUEUES).contains(&spec.queues) {
            bail!("a lab has 1 to {MAX_QUEUES} queues, not {}", spec.queues);
        }
        if !MTU.contains(&spec.mtu) {
            let (low, high) = (MTU.start(), MTU.end());
            bail!("a lab's MTU is {low} to {high} bytes, not {}", spec.mtu);
        }
        if let Some(impairment) = &spec.impairment {
            impairment.check()?;
            if spec.mtu > wire::MAX_MTU {
                let (longest, mtu) = (wire::MAX_MTU, spec.mtu);
                bail!("an impaired lab's MTU is at most {longest} bytes, not {mtu}");
            }
        }
        let binaries = self.binaries.map_or_else(Binaries::find, Ok)?;

        let held = run_dir::lock()?;
        run_dir::sweep_holding(&held);
        let run = if lasting {
            RunDir::create_lasting(LASTING_NAME)?
        } else {
            RunDir::create_owned(&self.prefix)?
        };
        let name = run.name();
        let namespace_prefix = if lasting {
            LASTING_PREFIX.to_owned()
        } else {
            run_dir::namespace_prefix(&name)
        };
        let plan = Arc::new(Plan {
            name,
            directory: run.path().to_owned(),
            namespace_prefix,
            binaries,
            spec,
        });
        // From here on dropping the lab removes whatever part of it was made.
        let mut lab = Lab::assemble(plan, run);
        lab.owned = true;
        for namespace in lab.namespaces() {
            Namespace::create(namespace.name())?;
        }
        drop(held);
        lab.connect()?;
        Ok(lab)
    }
}

/// A cluster on this machine, until it is dropped.
#[derive(Debug)]
pub struct Lab {
    plan: Arc<Plan>,
    nodes: Vec<Node>,
    bridge: Option<Namespace>,
    wire: Option<Wire>,
    run: RunDir,
    /// Whether dropping it removes it.
    owned: bool,
}

impl Lab {
    /// Begins to describe a lab.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn assemble(plan: Arc<Plan>, run: RunDir) -> Self {
        let nodes = (1..=plan.spec.nodes)
            .map(|id| Node::new(Arc::clone(&plan), id))
            .collect();
        let bridge = (plan.spec.nodes != 2 || plan.spec.impairment.is_some())
            .then(|| Namespace::existing(&format!("{}br", plan.namespace_prefix)));
        Self {
            plan,
            nodes,
            bridge,
            wire: None,
            run,
            owned: false,
        }
    }

    fn namespaces(&self) -> Vec<Namespace> {
        let nodes = self.nodes.iter().map(|node| node.namespace().clone());
        nodes.chain(self.bridge.clone()).collect()
    }

    fn connect(&mut self) -> Result<()> {
        for namespace in self.namespaces() {
            wiring::prepare(&namespace, self.plan.spec.encap)?;
        }
        let nodes: Vec<_> = self.nodes.iter().map(|n| n.namespace().clone()).collect();
        wiring::connect(&self.plan, &nodes, self.bridge.as_ref())?;
        if let (Some(impairment), Some(bridge)) = (&self.plan.spec.impairment, &self.bridge) {
            self.wire = Some(Wire::start(&self.plan, bridge, impairment)?);
        }
        Ok(())
    }

    /// What all Portolan frames pass, in a lab that was built [`Builder::impaired`].
    ///
    /// # Panics
    /// When it was not: the mistake of a test's author.
    #[track_caller]
    #[allow(clippy::expect_used)]
    pub fn wire(&self) -> &Wire {
        self.wire.as_ref().expect("a lab that was built impaired")
    }

    /// Its unique name; also the name of the cluster in the daemons' configuration.
    pub fn name(&self) -> &str {
        &self.plan.name
    }

    /// What it looks like.
    pub fn spec(&self) -> &Spec {
        &self.plan.spec
    }

    /// Where sockets, configurations and logs are.
    pub fn directory(&self) -> &Path {
        &self.plan.directory
    }

    /// The node with this id.
    ///
    /// # Panics
    /// When the lab has no such node: the mistake of a test's author.
    #[track_caller]
    pub fn node(&self, id: u16) -> &Node {
        &self.nodes[usize::from(id).wrapping_sub(1)]
    }

    /// All nodes, by id.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Removes the lab and says what went wrong, which dropping it only prints.
    pub fn remove(mut self) -> Result<()> {
        self.owned = false;
        self.take_down()
    }

    fn take_down(&self) -> Result<()> {
        // All are tried; the first failure is reported.
        let mut first = Ok(());
        for namespace in self.namespaces() {
            first = first.and(namespace.remove());
        }
        first.and(self.run.remove())
    }

    /// Leaves a lasting lab to [`Lab::lasting`] and [`Lab::take_down_lasting`].
    pub fn leave_up(mut self) -> Result<()> {
        let path = self.run.path().join(SPEC_FILE);
        let text = serde_json::to_string_pretty(&self.plan.spec)?;
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        self.owned = false;
        if let Some(wire) = &mut self.wire {
            wire.detach();
        }
        Ok(())
    }

    /// The lab that stays up, if it is up; its tools are run from `binaries`.
    pub fn lasting(binaries: Binaries) -> Result<Option<Self>> {
        let run = RunDir::lasting(LASTING_NAME);
        let path = run.path().join(SPEC_FILE);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.with_context(|| path.display().to_string())?,
        };
        let spec = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let plan = Plan {
            name: run.name(),
            directory: run.path().to_owned(),
            namespace_prefix: LASTING_PREFIX.to_owned(),
            binaries,
            spec,
        };
        let wire = plan.spec.impairment.as_ref().map(|_| Wire::existing(&plan));
        let mut lab = Self::assemble(Arc::new(plan), run);
        lab.wire = wire;
        Ok(Some(lab))
    }

    /// Removes the lab that stays up, also what is left of one that was made only in part. Returns whether there
    /// was anything to remove.
    pub fn take_down_lasting() -> Result<bool> {
        let _held = run_dir::lock()?;
        let run = RunDir::lasting(LASTING_NAME);
        let ours = |name: &str| {
            name.strip_prefix(LASTING_PREFIX)
                .is_some_and(|rest| rest == "br" || rest.parse::<u16>().is_ok())
        };
        let namespaces = Namespace::list(ours);
        let found = run.path().exists() || !namespaces.is_empty();
        for namespace in namespaces {
            namespace.remove()?;
        }
        run.remove()?;
        Ok(found)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.owned
            && let Err(error) = self.take_down()
        {
            eprintln!("lab {} cannot be removed: {error:#}", self.name());
        }
    }
}
