//! Portolan as a subject: a daemon per node, its engine on the node's core beside the applications, as the relays are.
//!
//! Engines give the core away (`wait = "yield"`), as relays do; how they wait otherwise is what the idle cases are about.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use portolan_testbed::{Daemon, DaemonOptions};

use super::offloads::{Offloads, Switched};
use super::pair::{histogram, nanoseconds};
use super::{About, Figure, Pair, Scene, Side, Started, Subject, metric, unit};
use crate::actor::{Actor, Answer, Job, Order, PortRole, Role};
use crate::cases::{Case, Wait};

/// The first port of each application.
const PORT: u16 = 10;
/// Bound on an answer beyond the time that is measured.
const GRACE: Duration = Duration::from_secs(10);
/// `engine.keep_awake_ms` as it is by default.
const KEEP_AWAKE_MS: u32 = 2_000;
/// Bound on a node that has everything it is to have.
const STANDBYS_WITHIN: Duration = Duration::from_secs(20);

/// `portolan`: an engine for each queue. `portolan-ethernet`: the same in Ethernet frames without IP and UDP, as the limits' are.
/// `portolan-unpolled`: the same, and engines never go round for frames themselves, as the limits do not.
/// `portolan-asleep`: the same with `[engine] keep_awake_ms = 0`, so that processors of engines sleep as soon as these do.
/// `portolan-blocking`: as it is installed, the daemon in a session of its own, for applications that leave waiting to the library. `portolan-one-engine`: one engine for the first queue,
/// whatever there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portolan {
    /// An engine for each queue.
    AllQueues,
    /// Without IP and UDP.
    Ethernet,
    /// Frames come by themselves.
    Unpolled,
    /// Processors sleep when engines do.
    Asleep,
    /// Everything waits by default.
    Blocking,
    /// One engine.
    OneEngine,
}

impl Subject for Portolan {
    fn name(&self) -> &'static str {
        match self {
            Self::AllQueues => "portolan",
            Self::Ethernet => "portolan-ethernet",
            Self::Unpolled => "portolan-unpolled",
            Self::Asleep => "portolan-asleep",
            Self::Blocking => "portolan-blocking",
            Self::OneEngine => "portolan-one-engine",
        }
    }

    fn about(&self) -> About {
        let (wait, rest) = match self {
            Self::AllQueues | Self::OneEngine => ("\"yield\"", "UDP over IPv4"),
            Self::Ethernet => ("\"yield\"", "[cluster] encap = \"ethernet\""),
            Self::Unpolled => (
                "\"yield\"",
                "UDP over IPv4; [network] busy_poll = \"never\"",
            ),
            Self::Asleep => (
                "\"adaptive\" (its default)",
                "UDP over IPv4; [engine] keep_awake_ms = 0",
            ),
            Self::Blocking => (
                "\"adaptive\" (its default)",
                "UDP over IPv4; daemons in sessions of their own, applications in Port::wait with PortOptions::default()",
            ),
        };
        About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: format!("portoland with [engine] wait = {wait}, default profile, {rest}"),
        }
    }

    fn is_extra(&self) -> bool {
        *self == Self::Blocking
    }

    fn offers(&self, case: &Case) -> bool {
        match self {
            Self::AllQueues => true,
            // What is held against a limit's frames; N/2 and the curves are the default's.
            Self::Ethernet => matches!(
                case,
                Case::PingPong { .. } | Case::Rate { .. } | Case::Stream { .. }
            ),
            Self::Unpolled => matches!(case, Case::Stream { .. }),
            Self::Asleep => {
                let wait = Wait::Adaptive;
                *case == Case::Idle { wait }
            }
            Self::Blocking => matches!(case, Case::PingPong { .. } | Case::Rate { .. }),
            Self::OneEngine => matches!(case, Case::Queues { .. }),
        }
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, cases: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let wait = match cases {
            [Case::Idle { wait }, ..] => *wait,
            [Case::Startup, ..] => Wait::Adaptive,
            _ if *self == Self::Blocking => Wait::Adaptive,
            _ => Wait::Yield,
        };
        let queues: Vec<u16> = match self {
            Self::OneEngine => vec![0],
            _ => (0..scene.queues()).collect(),
        };
        // Every peer's MAC is in a lab's configuration.
        let encap = match self {
            Self::Ethernet => "ethernet",
            _ => "udp",
        };
        let busy_poll = match self {
            Self::Unpolled => "never",
            _ => "auto",
        };
        // A lab's configuration has 0, as processors are the machine's.
        let keep_awake_ms = match self {
            Self::Asleep => 0,
            _ => KEEP_AWAKE_MS,
        };
        let daemon = |side| {
            let cores = vec![scene.core(side); queues.len()];
            let overrides = format!(
                "[cluster]\nencap = \"{encap}\"\n[network]\nqueues = {queues:?}\nbusy_poll = \"{busy_poll}\"\n[engine]\nwait = \"{}\"\ncores = {cores:?}\nkeep_awake_ms = {keep_awake_ms}\n",
                wait.name(),
            );
            scene.node(side).start_daemon_with(&DaemonOptions {
                overrides,
                // As a service manager starts it.
                session: *self == Self::Blocking,
                ..DaemonOptions::default()
            })
        };
        let offloads = Switched::to(Offloads::None, scene)?;
        let daemons = [daemon(Side::One)?, daemon(Side::Two)?];
        // In the first tenth of a second of its life a node makes its standbys, on the cores that are measured.
        for daemon in &daemons {
            daemon.wait_status("its standbys are ready", STANDBYS_WITHIN, |status| {
                let ready = |engine: &serde_json::Value| engine["standby"] == "ready";
                (status["engines"].as_array()).is_some_and(|engines| engines.iter().all(ready))
            })?;
        }
        Ok(Box::new(Running {
            blocks: *self == Self::Blocking,
            applications: None,
            daemons,
            scene,
            _offloads: offloads,
        }))
    }
}

struct Running<'a> {
    /// Applications leave waiting to the library.
    blocks: bool,
    /// Those that are running, and how many senders with how many ports they are.
    applications: Option<((u16, u16), Pair)>,
    daemons: [Daemon; 2],
    scene: &'a Scene<'a>,
    /// What daemons switched on is off again when they are gone: they are killed, and whoever comes next would have it.
    _offloads: Switched<'a>,
}

impl Started for Running<'_> {
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        match case {
            Case::Idle { .. } => self.idle(lasting),
            Case::Startup => self.startup(lasting),
            Case::FanIn { senders } => self.pair(*senders, 1)?.measure(case, lasting),
            Case::Ports { ports } | Case::Queues { queues: ports } => {
                self.pair(1, *ports)?.measure(case, lasting)
            }
            _ => self.pair(1, 1)?.measure(case, lasting),
        }
    }
}

impl Running<'_> {
    /// So many applications on side one, each with so many ports, and one on side two.
    fn pair(&mut self, senders: u16, ports: u16) -> Result<&mut Pair> {
        let wanted = (senders, ports);
        if self
            .applications
            .as_ref()
            .is_none_or(|(are, _)| *are != wanted)
        {
            self.applications = None;
            let numbers = |first: u16| (0..ports).map(move |port| first + port);
            let two = numbers(PORT).map(|port| (port, (1, port))).collect();
            let two = self.application(Side::Two, two)?;
            let mut one = Vec::new();
            for sender in 0..senders {
                let own = numbers(PORT + sender * ports);
                let ports = own.zip(numbers(PORT)).map(|(own, to)| (own, (2, to)));
                one.push(self.application(Side::One, ports.collect())?);
            }
            self.applications = Some((wanted, Pair { one, two }));
        }
        let (_, pair) = self.applications.as_mut().context("no applications")?;
        Ok(pair)
    }

    fn application(&self, side: Side, ports: Vec<(u16, (u16, u16))>) -> Result<Actor> {
        let role = Role::Port(PortRole {
            socket: self.scene.node(side).socket(),
            ports,
            blocks: self.blocks,
        });
        Actor::start("portolan", self.scene.actor(side), &role)
    }

    /// Nodes with an open port and nothing to do; then a message.
    fn idle(&mut self, lasting: Duration) -> Result<Vec<Figure>> {
        self.pair(1, 1)?;
        let (_, pair) = self.applications.as_mut().context("no applications")?;
        let daemons = &self.daemons;
        let cores = self.scene.cores();
        let watched = || Ok((cpu(daemons)?, polled(cores)));
        let ([before, after], first) = pair.after_idling(lasting, watched)?;
        let share = |before: u64, after: u64| {
            let ns = after.saturating_sub(before) as f64;
            ns / nanoseconds(lasting) as f64 / daemons.len() as f64
        };
        let used = share(before.0, after.0);
        let mut figures = vec![Figure::number(metric::IDLE_CPU, used, unit::ONE)];
        if let (Some(before), Some(after)) = (before.1, after.1) {
            let polled = share(before, after);
            figures.push(Figure::number(metric::IDLE_POLLED, polled, unit::ONE));
        }
        figures.push(first);
        Ok(figures)
    }

    fn startup(&mut self, lasting: Duration) -> Result<Vec<Figure>> {
        let Pair { one, two } = self.pair(1, 1)?;
        let one = one.first_mut().context("nobody on side one")?;
        two.prepare(Job::Echo { bytes: 64 })?;
        let lasting_ns = nanoseconds(lasting);
        one.prepare(Job::Startup {
            lasting: lasting_ns,
        })?;
        two.order(Order::Go)?;
        one.order(Order::Go)?;
        let times = match one.answer(lasting + GRACE)? {
            Answer::Startup(times) => times,
            other => bail!("times were expected, not {other:?}"),
        };
        match one.answer(GRACE)? {
            Answer::Done => {}
            other => bail!("an application says {other:?}"),
        }
        two.stop()?;
        let metrics = [metric::ATTACH, metric::OPEN, metric::FIRST_ANSWER];
        let figures = metrics.iter().zip(&times);
        figures
            .map(|(metric, times)| Ok(Figure::times(metric, histogram(times)?)))
            .collect()
    }
}

/// Nanoseconds that both daemons have run, all their processes.
fn cpu(daemons: &[Daemon; 2]) -> Result<u64> {
    let mut ns = 0;
    for daemon in daemons {
        let supervisor = daemon.pid();
        for pid in children(supervisor)?.into_iter().chain([supervisor]) {
            ns += cpu_ns(pid)?;
        }
    }
    Ok(ns)
}

/// Nanoseconds for which these processors had nothing to do and the kernel polled instead of having them sleep; `None` if it does not tell (Documentation/admin-guide/pm/cpuidle.rst).
fn polled(cores: [usize; 2]) -> Option<u64> {
    let us = |core| {
        let state = format!("/sys/devices/system/cpu/cpu{core}/cpuidle/state0");
        let name = fs::read_to_string(format!("{state}/name")).ok()?;
        let time = fs::read_to_string(format!("{state}/time")).ok()?;
        let us: u64 = time.trim().parse().ok()?;
        (name.trim() == "POLL").then_some(us)
    };
    let [one, two] = cores.map(us);
    Some((one? + two?) * 1000)
}

/// Processes whose parent this is.
fn children(pid: i32) -> Result<Vec<i32>> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let pids = text.split_ascii_whitespace().map(str::parse);
    pids.collect::<Result<_, _>>().with_context(|| path)
}

/// Nanoseconds a process has run, all its threads.
fn cpu_ns(pid: i32) -> Result<u64> {
    let mut ns = 0;
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).context("threads")?;
    for task in tasks {
        let path = task?.path().join("schedstat");
        let text = fs::read_to_string(&path).context("schedstat")?;
        let first = text.split_ascii_whitespace().next().context("schedstat")?;
        ns += first.parse::<u64>().context("schedstat")?;
    }
    Ok(ns)
}
