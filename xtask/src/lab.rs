//! `cargo xtask lab`: the one laboratory that stays up.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use portolan_testbed::{Encap, Impairment, Lab, Node, Spec, process};

use crate::build;

/// Bound on one look at a node.
const LOOK: Duration = Duration::from_secs(10);

#[derive(Subcommand)]
pub enum Task {
    /// Makes it: namespaces ptl1, ptl2, … with a daemon each, sockets /run/portolan/lab/N.sock
    Up {
        /// How many nodes: two share a veth pair, more meet on a bridge
        #[arg(long, default_value_t = 2)]
        nodes: u16,
        #[command(flatten)]
        network: Network,
        #[command(flatten)]
        damage: Damage,
        /// Namespaces and interfaces only, no daemons
        #[arg(long)]
        bare: bool,
    },
    /// From now on this happens to Portolan's frames, in a lab that was made with any of these; without arguments nothing
    Impair {
        #[command(flatten)]
        damage: Damage,
    },
    /// Records Portolan's frames in a file for Wireshark, in a lab that `impair` works in; without a file no more
    Record {
        /// The file, begun anew
        file: Option<PathBuf>,
    },
    /// Runs a command in a node's network, with `portolan` in its PATH and told that node's socket
    Exec {
        /// The node's id
        node: u16,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Takes it down
    Down,
    /// Shows every node
    Status,
}

/// The network between nodes.
#[derive(Args, Clone)]
pub struct Network {
    /// Queues of every interface, an engine for each
    #[arg(long, default_value_t = 1)]
    pub queues: u16,
    /// MTU in bytes
    #[arg(long, default_value_t = 1500)]
    pub mtu: u32,
    /// How Portolan frames travel
    #[arg(long, value_enum, default_value_t = Carrier::Udp)]
    pub encap: Carrier,
    /// UDP over IPv6 instead of IPv4
    #[arg(long)]
    pub ipv6: bool,
}

/// What happens to Portolan's frames on the way
#[derive(Args, Clone)]
pub struct Damage {
    /// Lost frames, in percent
    #[arg(long)]
    loss: Option<f64>,
    /// Frames that arrive twice, in percent
    #[arg(long)]
    duplicate: Option<f64>,
    /// Frames with a wrong bit, in percent
    #[arg(long)]
    corrupt: Option<f64>,
    /// Frames overtaken by others, in percent
    #[arg(long)]
    reorder: Option<f64>,
    /// How long every frame travels at least, in microseconds
    #[arg(long)]
    delay_us: Option<u32>,
    /// Rate of the link toward each node, in Mbit/s
    #[arg(long)]
    rate_mbit: Option<u64>,
}

impl Damage {
    /// None where nothing was asked for.
    fn impairment(&self) -> Option<Impairment> {
        let share = |percent: Option<f64>| percent.unwrap_or(0.0) / 100.0;
        let impairment = Impairment {
            loss: share(self.loss),
            duplicate: share(self.duplicate),
            corrupt: share(self.corrupt),
            reorder: share(self.reorder),
            delay_us: self.delay_us.unwrap_or(0),
            rate_bps: self.rate_mbit.unwrap_or(0).saturating_mul(1_000_000),
            ..Impairment::default()
        };
        let shares = [self.loss, self.duplicate, self.corrupt, self.reorder];
        let asked = shares.iter().any(Option::is_some)
            || self.delay_us.is_some()
            || self.rate_mbit.is_some();
        asked.then_some(impairment)
    }
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Carrier {
    /// UDP
    Udp,
    /// Ethernet frames of EtherType 0x88B5
    Ethernet,
}

impl Network {
    /// A lab of so many nodes on this network.
    pub fn spec(&self, nodes: u16) -> Result<Spec> {
        let encap = match (self.encap, self.ipv6) {
            (Carrier::Udp, false) => Encap::Udp4,
            (Carrier::Udp, true) => Encap::Udp6,
            (Carrier::Ethernet, false) => Encap::Ethernet,
            (Carrier::Ethernet, true) => bail!("--ipv6 makes no sense with --encap ethernet"),
        };
        Ok(Spec {
            nodes,
            queues: self.queues,
            mtu: self.mtu,
            encap,
            impairment: None,
        })
    }
}

/// Does it.
pub fn run(task: Task) -> Result<()> {
    build::require_root()?;
    match task {
        Task::Up {
            nodes,
            network,
            damage,
            bare,
        } => {
            let mut spec = network.spec(nodes)?;
            spec.impairment = damage.impairment();
            up(spec, bare)
        }
        Task::Impair { damage } => impair(&damage),
        Task::Record { file } => record(file.as_deref()),
        Task::Exec { node, command } => exec(node, &command),
        Task::Down => down(),
        Task::Status => status(),
    }
}

fn existing() -> Result<Lab> {
    let lab = Lab::lasting(build::binaries()?)?;
    lab.context("no lab is up; `cargo xtask lab up` makes one")
}

fn up(spec: Spec, bare: bool) -> Result<()> {
    if Lab::lasting(build::binaries()?)?.is_some() {
        bail!("a lab is up already; `cargo xtask lab down` takes it down");
    }
    if !bare {
        build::programs()?;
    }
    if spec.impairment.is_some() {
        build::wire()?;
    }
    let builder = Lab::builder().spec(spec).binaries(build::binaries()?);
    let lab = builder.build_lasting().context(
        "cannot make the lab (`cargo xtask lab down` removes what is left of an earlier one)",
    )?;
    if !bare {
        // Should one of them fail, dropping the others and the lab ends them all.
        let daemons: Result<Vec<_>> = lab
            .nodes()
            .iter()
            .map(|node| node.start_daemon(""))
            .collect();
        daemons?
            .into_iter()
            .for_each(portolan_testbed::Daemon::detach);
    }
    println!("the lab is up: {}", describe(lab.spec()));
    lab.nodes().iter().for_each(print_node);
    println!("\n  cargo xtask lab exec 1 -- portolan status");
    println!("  cargo xtask lab down");
    lab.leave_up()
}

/// The lab that is up, with a wire.
fn wired() -> Result<Lab> {
    let lab = existing()?;
    if lab.spec().impairment.is_none() {
        bail!("this lab has no wire that could; `cargo xtask lab up --loss 0` makes one that has");
    }
    Ok(lab)
}

fn record(file: Option<&Path>) -> Result<()> {
    let lab = wired()?;
    match file {
        Some(file) => lab.wire().record(file),
        None => lab.wire().end_recording(),
    }
}

fn impair(damage: &Damage) -> Result<()> {
    let lab = wired()?;
    lab.wire().set(&damage.impairment().unwrap_or_default())?;
    for (node, line) in lab.wire().counters()?.toward {
        println!("toward node {node} so far: {line:?}");
    }
    Ok(())
}

fn describe(spec: &Spec) -> String {
    let Spec {
        nodes,
        queues,
        mtu,
        encap,
        impairment,
    } = spec;
    let wire = if impairment.is_some() {
        ", over a wire that can be told to impair"
    } else {
        ""
    };
    format!("{nodes} nodes, queues {queues}, MTU {mtu}, {encap}{wire}")
}

fn print_node(node: &Node) {
    println!(
        "  node {}  namespace {}  interface {}  {}  {}  {}",
        node.id(),
        node.namespace_name(),
        node.interface(),
        node.ipv4(),
        node.ipv6(),
        node.socket().display()
    );
}

fn exec(node: u16, command: &[String]) -> Result<()> {
    let lab = existing()?;
    if !(1..=lab.spec().nodes).contains(&node) {
        bail!("the lab has nodes 1 to {}", lab.spec().nodes);
    }
    let (program, arguments) = command.split_first().context("no command")?;
    let mut directories = vec![build::bin_dir()?];
    directories.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    let mut command: Command = lab.node(node).command(program);
    command
        .args(arguments)
        .env("PATH", std::env::join_paths(directories)?)
        .env("PORTOLAN_SOCKET", lab.node(node).socket());
    // Only returns if it fails.
    Err(command.exec()).context("cannot run ip netns exec")
}

fn down() -> Result<()> {
    let found = Lab::take_down_lasting()?;
    println!(
        "{}",
        if found {
            "the lab is down"
        } else {
            "no lab was up"
        }
    );
    Ok(())
}

fn status() -> Result<()> {
    let lab = existing()?;
    println!(
        "{}, logs in {}",
        describe(lab.spec()),
        lab.directory().display()
    );
    for node in lab.nodes() {
        println!();
        print_node(node);
        match process::run_ok(node.portolan().arg("status"), LOOK) {
            Ok(text) => print!("{text}"),
            Err(error) => println!("  no daemon answers: {error:#}"),
        }
    }
    Ok(())
}
