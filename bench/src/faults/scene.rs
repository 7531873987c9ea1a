//! One campaign's world: a lab of two nodes, their daemons, the load between them. Fresh for every campaign, so that what one left
//! behind is nobody's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan::{Address, Node, Port, PortOptions};
use portolan_testbed::{Daemon, DaemonOptions, Lab, ManagerOptions, Node as LabNode, cancel};
use serde_json::{Value, json};

use super::books::{Inbox, Outbox, Tally};
use super::clock::{now_ns, ns, sleep_until};
use super::letter::{Sizes, Stream};
use super::load::{self, Talker, Written};
use super::meter::{Meter, Orders};
use super::steady::{self, Steady};
use super::victim::Engine;

/// The nodes.
pub const NODES: [u16; 2] = [1, 2];
/// The first loaded port on each node.
const FIRST_PORT: u16 = 10;
/// The steady port on each node.
const STEADY_PORT: u16 = 1;
/// Ports that are only open, on each node: from here to the last there is.
const FIRST_IDLE_PORT: u16 = 80;
const IDLE_BYTES: u64 = 1 << 16;
/// Bound on everything under way to end once nobody begins anything new.
const SETTLED: Duration = Duration::from_secs(45);
/// The same where the world is known to be broken.
const BROKEN: Duration = Duration::from_secs(5);
/// How long a report watches whether anything comes.
const REPORT_SPAN: Duration = Duration::from_millis(500);
/// Bound on receivers to say what they have: what they lack is reported before.
const CONFIRMED: Duration = Duration::from_secs(3);
/// The pause between two looks at something that cannot be waited for.
pub const PAUSE: Duration = Duration::from_millis(1);

/// What the world looks like.
#[derive(Clone, Debug)]
pub struct Setting {
    /// MTU in bytes.
    pub mtu: u32,
    /// Loaded ports on each node.
    pub ports: u16,
    /// Bound on a recovery.
    pub patience: Duration,
    /// Open ports on each node, if more than those that carry traffic.
    pub open_ports: u16,
    /// Whether the daemons have a manager that starts them again.
    pub managed: bool,
    /// Whether the ports ask for end-to-end integrity.
    pub integrity: bool,
    /// TOML merged over each daemon's configuration.
    pub overrides: [String; 2],
    /// Random choices follow from it.
    pub seed: u64,
    /// The bit that every flip flips, if it is not a random one: address in the file and bit of the byte.
    pub flip_at: Option<(u64, u32)>,
}

impl Setting {
    /// Ports that carry traffic, on each node.
    pub fn busy_ports(&self) -> u16 {
        self.ports + 1
    }

    fn idle_ports(&self) -> u16 {
        self.open_ports.saturating_sub(self.busy_ports())
    }

    fn start(&self, node: &LabNode, overrides: &str) -> Result<Daemon> {
        node.start_daemon_with(&DaemonOptions {
            overrides: overrides.to_owned(),
            manager: self.managed.then(ManagerOptions::default),
            ..DaemonOptions::default()
        })
    }

    /// A lab without daemons.
    pub fn lab(&self) -> Result<Lab> {
        let builder = Lab::builder().name("faults").mtu(self.mtu);
        builder.build()
    }
}

/// The world, running.
pub struct Scene {
    orders: Arc<Orders>,
    talkers: Vec<JoinHandle<Written>>,
    meters: Vec<(Address, Arc<Meter>)>,
    integrity: bool,
    /// Bound on a recovery.
    pub patience: Duration,
    /// Open, and nothing more.
    idle: Vec<Port>,
    steady: Option<Steady>,
    // Dropped before the lab they run in.
    daemons: Vec<Daemon>,
    lab: Lab,
}

impl Scene {
    /// Makes the lab, starts the daemons, opens the ports, lets traffic flow.
    pub fn start(setting: &Setting) -> Result<Self> {
        let lab = setting.lab()?;
        let daemons = lab.nodes().iter().zip(&setting.overrides);
        let daemons = daemons.map(|(node, overrides)| setting.start(node, overrides));
        let mut scene = Self {
            orders: Arc::default(),
            talkers: Vec::new(),
            meters: Vec::new(),
            integrity: setting.integrity,
            patience: setting.patience,
            idle: Vec::new(),
            steady: None,
            daemons: daemons.collect::<Result<_>>()?,
            lab,
        };
        scene.open(setting)?;
        Ok(scene)
    }

    fn open(&mut self, setting: &Setting) -> Result<()> {
        let nodes = NODES.map(|node| Node::attach(self.lab.node(node).socket()));
        let [one, two] = nodes;
        let nodes = [one?, two?];
        let mut talkers = Vec::new();
        for number in (FIRST_PORT..).take(usize::from(setting.ports)) {
            for (node, other) in nodes.iter().zip([2, 1]) {
                let port = node.open_port(load::options(number, setting.integrity))?;
                let peer = Address::from((other, number));
                talkers.push(Talker::new(port, peer, Sizes::Mixed, setting.seed)?);
            }
        }
        for number in (FIRST_IDLE_PORT..).take(usize::from(setting.idle_ports())) {
            for node in &nodes {
                let options = PortOptions {
                    arena_bytes: IDLE_BYTES,
                    ..PortOptions::at(number)
                };
                self.idle.push(node.open_port(options)?);
            }
        }
        let [from, to] =
            nodes.map(|node| node.open_port(steady::options(STEADY_PORT, setting.integrity)));
        // Now that every port is open.
        self.steady = Some(Steady::start(from?, to?, &self.orders)?);
        for talker in talkers {
            self.meters.push((talker.address(), talker.meter()));
            self.talkers.push(talker.start(Arc::clone(&self.orders))?);
        }
        Ok(())
    }

    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    pub fn daemon(&self, node: u16) -> Result<&Daemon> {
        let index = usize::from(node).wrapping_sub(1);
        self.daemons.get(index).context("no such node")
    }

    /// The engine of a node, as its daemon describes it.
    pub fn engine(&self, node: u16) -> Result<Engine> {
        Engine::look(self.daemon(node)?)
    }

    pub fn steady(&self) -> Result<&Steady> {
        self.steady.as_ref().context("the steady port is closed")
    }

    /// An error if a thread of the load gave up, a send failed for good, or somebody pressed Ctrl-C.
    pub fn check(&self) -> Result<()> {
        if cancel::requested() {
            bail!("interrupted");
        }
        match self.orders.failure() {
            Some(why) => bail!("the load gave up: {why}"),
            None => Ok(()),
        }
    }

    /// Why a thread of the load gave up, if one did.
    pub fn failure(&self) -> Option<String> {
        self.orders.failure()
    }

    /// Messages received so far, by port; the steady port last.
    pub fn received(&self) -> Vec<u64> {
        let loaded = self.meters.iter().map(|(_, meter)| meter.received());
        let steady = self.steady.iter().map(|steady| steady.receiver.received());
        loaded.chain(steady).collect()
    }

    /// What each end of the load knows, and whether anything comes.
    pub fn load_report(&self) -> Value {
        let before = self.received();
        sleep_until(now_ns() + ns(REPORT_SPAN));
        let came = self.received();
        let names = self.meters.iter().map(|(address, _)| address.to_string());
        let names = names.chain(["steady".to_owned()]);
        let meters = self.meters.iter().map(|(_, meter)| meter);
        let meters = meters.chain(self.steady.iter().map(|steady| &steady.sender));
        let figures = before.iter().zip(&came).zip(meters);
        let of = |((before, came), meter): ((&u64, &u64), &Arc<Meter>)| {
            json!({
                "received": came,
                "received_in_half_a_second": came - before,
                "outstanding": meter.outstanding.load(Ordering::SeqCst),
                "failed": meter.failed.load(Ordering::SeqCst),
                "anomalies": meter.anomalies.load(Ordering::SeqCst),
                "unconfirmed": meter.unconfirmed.load(Ordering::SeqCst),
            })
        };
        names.zip(figures.map(of)).collect()
    }

    /// A sum over all meters.
    pub fn total(&self, figure: impl Fn(&Meter) -> u64) -> u64 {
        let steady = self.steady.iter().flat_map(|s| [&s.sender, &s.receiver]);
        let all = self.meters.iter().map(|(_, meter)| meter).chain(steady);
        all.map(|meter| figure(meter)).sum()
    }

    /// Waits until every port has received something more than `before`; names those that have not.
    pub fn wait_all_go_on(&self, before: &[u64], within: Duration) -> Result<(), Vec<String>> {
        let deadline = Instant::now() + within;
        loop {
            let now = self.received();
            let silent = || now.iter().zip(before).map(|(now, before)| now <= before);
            if !silent().any(|silent| silent) {
                return Ok(());
            }
            if Instant::now() > deadline || self.check().is_err() {
                let names = self.meters.iter().map(|(address, _)| address.to_string());
                let names = names.chain(["steady".to_owned()]);
                let silent = names.zip(silent()).filter(|(_, silent)| *silent);
                return Err(silent.map(|(name, _)| name).collect());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Gives integrity its time to find out what became of everything, also where a thread gave up: what the others were told was delivered
    /// may be lost with its port.
    fn confirm(&self) {
        self.orders.confirm.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + CONFIRMED;
        let unconfirmed = |meter: &Meter| meter.unconfirmed.load(Ordering::SeqCst);
        while self.integrity && Instant::now() < deadline && !cancel::requested() {
            // Each thread has looked once after it was told to.
            std::thread::sleep(CONFIRMED / 8);
            if self.total(unconfirmed) == 0 {
                return;
            }
        }
    }

    /// Nobody begins anything new, everything under way ends, and the books are compared. The daemons go on.
    pub fn settle(&mut self) -> Result<Tally> {
        self.settle_within(SETTLED)
    }

    /// [`Scene::settle`] where something does not go on any more: what hangs is not waited for.
    pub fn settle_broken(&mut self) -> Result<Tally> {
        self.settle_within(BROKEN)
    }

    fn settle_within(&mut self, within: Duration) -> Result<Tally> {
        self.orders.quiet.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + within;
        let outstanding = |meter: &Meter| meter.outstanding.load(Ordering::SeqCst);
        while self.total(outstanding) > 0 && Instant::now() < deadline {
            if self.check().is_err() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        self.confirm();
        // What was delivered is in the rings by now.
        self.orders.leave.store(true, Ordering::SeqCst);
        let mut written = Vec::new();
        for thread in self.talkers.drain(..) {
            let one = thread.join();
            written.push(one.map_err(|_| anyhow::anyhow!("a thread of the load panicked"))?);
        }
        let mut books: Vec<(Stream, Outbox, Inbox, u64)> = Vec::new();
        for one in &written {
            // Port n of one node only hears from port n of the other.
            let other = written.iter().find(|other| other.out.from == one.out.to);
            let (inbox, reported) = other.map_or((Inbox::default(), 0), |other| {
                (other.inbox.clone(), other.reported)
            });
            let reported = reported + one.reported;
            books.push((one.out, one.outbox.clone(), inbox, reported));
        }
        books.extend(self.steady.take().map(Steady::join).transpose()?);
        let mut tally = Tally::default();
        for (stream, outbox, inbox, reported) in &books {
            let mut one = Tally::default();
            one.add(&format!("{} → {}", stream.from, stream.to), outbox, inbox);
            if self.integrity && one.is_unreported(*reported) {
                one.unreported = 1;
                one.notes
                    .push(format!("{} → {}: not reported", stream.from, stream.to));
            }
            tally.merge(one);
        }
        if let Some(why) = self.orders.failure() {
            tally.notes.push(format!("the load gave up: {why}"));
        }
        Ok(tally)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.orders.quiet.store(true, Ordering::SeqCst);
        self.orders.leave.store(true, Ordering::SeqCst);
        for thread in self.talkers.drain(..) {
            // Whatever it says, we are leaving.
            let _ = thread.join();
        }
        if let Some(steady) = self.steady.take() {
            let _ = steady.join();
        }
    }
}
