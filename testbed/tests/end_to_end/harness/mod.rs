//! What the end-to-end tests share: a cluster of running daemons, traffic that keeps books, and applications in processes of
//! their own.

pub mod books;
pub mod crowd;
pub mod exchange;
pub mod letter;
pub mod packet_socket;
pub mod proc;
pub mod random;
pub mod running;
pub mod talker;
pub mod worker;

use std::time::{Duration, Instant};

use portolan::{Node, Port, PortOptions};
pub use portolan_testbed::pattern;
use portolan_testbed::{Builder, Daemon, DaemonOptions, Lab, ManagerOptions};

/// Bound on one step of a test that should take far less.
pub const STEP: Duration = Duration::from_secs(20);
/// The pause between two looks at something that cannot be waited for.
const PAUSE: Duration = Duration::from_millis(2);

/// A lab in which every node's daemon runs.
pub struct Cluster {
    // Dropped before the lab they run in.
    daemons: Vec<Daemon>,
    pub lab: Lab,
}

impl Cluster {
    pub fn start(builder: Builder) -> Self {
        Self::start_with(builder, "")
    }

    /// With TOML merged over every node's configuration.
    pub fn start_with(builder: Builder, overrides: &str) -> Self {
        let lab = builder.build().unwrap();
        Self::start_in(lab, |_| overrides.to_owned())
    }

    /// With a service manager for every daemon.
    pub fn start_managed(builder: Builder) -> Self {
        Self::start_as(builder, |_| DaemonOptions {
            manager: Some(ManagerOptions::default()),
            ..DaemonOptions::default()
        })
    }

    /// With each daemon started as told.
    pub fn start_as(builder: Builder, options: impl Fn(u16) -> DaemonOptions) -> Self {
        let lab = builder.build().unwrap();
        let start = |node: &portolan_testbed::Node| node.start_daemon_with(&options(node.id()));
        let daemons = lab
            .nodes()
            .iter()
            .map(|node| start(node).unwrap())
            .collect();
        Self { daemons, lab }
    }

    /// In a lab that is there, with TOML for each node by its id.
    pub fn start_in(lab: Lab, overrides: impl Fn(u16) -> String) -> Self {
        let daemons = lab
            .nodes()
            .iter()
            .map(|node| node.start_daemon(&overrides(node.id())).unwrap())
            .collect();
        Self { daemons, lab }
    }

    pub fn daemon(&self, node: u16) -> &Daemon {
        &self.daemons[usize::from(node) - 1]
    }

    /// Stops a node's daemon; the others cannot be named any more.
    pub fn stop(mut self, node: u16) -> (std::process::ExitStatus, Self) {
        let daemon = self.daemons.remove(usize::from(node) - 1);
        (daemon.stop(STEP).unwrap(), self)
    }

    /// Attached to a node's daemon.
    pub fn attach(&self, node: u16) -> Node {
        Node::attach(self.lab.node(node).socket()).unwrap()
    }

    pub fn open(&self, node: u16, options: PortOptions) -> Port {
        self.attach(node).open_port(options).unwrap()
    }
}

/// Looks until there is something, or fails naming what never came.
#[track_caller]
pub fn until<T>(what: &str, within: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {within:?}");
        std::thread::sleep(PAUSE);
    }
}

/// Jain's index of fairness: 1 when all are equal, 1/n when one has everything.
pub fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|&x| x as f64).sum();
    let squares: f64 = shares.iter().map(|&x| (x as f64).powi(2)).sum();
    sum * sum / (shares.len() as f64 * squares)
}
