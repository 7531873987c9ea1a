//! Which campaigns run, how large, and how long they may be expected to take.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::deaths::{self, Deaths};
use super::fault::{Fault, can_freeze};
use super::flips::{self, Flips, Path};
use super::outcome::Outcome;
use super::progress::Progress;
use super::scene::Setting;
use super::supervisors::{self, Deed};
use super::{alarms, links};

/// Campaigns and their sizes. Without any, all of them in under ten minutes; with some, those alone.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Engines killed with SIGKILL
    #[arg(long, value_name = "N")]
    kills: Option<u64>,
    /// Engines ended by a segmentation fault, at any instruction
    #[arg(long, value_name = "N")]
    crashes: Option<u64>,
    /// Engines in an endless loop: told to by their daemon and, in turns, at any instruction
    #[arg(long, value_name = "N")]
    hangs: Option<u64>,
    /// Engines stopped with SIGSTOP for good
    #[arg(long, value_name = "N")]
    stops: Option<u64>,
    /// Engines blocked in the kernel: in a system call that never returns and, in turns, in a frozen control group
    #[arg(long, value_name = "N")]
    blocks: Option<u64>,
    /// Queues reset with `portolan fault reset`
    #[arg(long, value_name = "N")]
    resets: Option<u64>,
    /// Interfaces taken down and up again
    #[arg(long, value_name = "N")]
    links: Option<u64>,
    /// Engines stopped and continued within the watchdog's bound: no alarm may be raised
    #[arg(long, value_name = "N")]
    pauses: Option<u64>,
    /// Minutes without a fault, six busy processes competing for the processors: no alarm may be raised
    #[arg(long, value_name = "MINUTES")]
    calm: Option<f64>,
    /// Supervisors killed with SIGKILL and started again by their manager
    #[arg(long, value_name = "N")]
    supervisor: Option<u64>,
    /// Supervisors replaced with `portolan upgrade`
    #[arg(long, value_name = "N")]
    upgrades: Option<u64>,
    /// Bits flipped in the machine code of engines, half in the send and half in the receive path; ports with end-to-end integrity
    #[arg(long, value_name = "N")]
    bitflips: Option<u64>,
    /// The same with ports that do not ask for integrity
    #[arg(long, value_name = "N")]
    bitflips_plain: Option<u64>,
    /// Always this bit, as a report names it, instead of random ones
    #[arg(long, value_name = "ADDRESS:BIT", value_parser = flip_at)]
    bitflip_at: Option<(u64, u32)>,
    /// Engines killed with so many ports open, from few to many: FTGM's Table 3
    #[arg(long, value_name = "N")]
    open_ports: Option<u64>,
    /// Measures what each message costs: FTGM's Table 2
    #[arg(long)]
    cost: bool,
    /// Random choices follow from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds in which an engine must be replaced and every port must receive again
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    patience: u64,
    /// MTU in bytes
    #[arg(long, default_value_t = 1500)]
    mtu: u32,
    /// Loaded ports on each node
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    ports: u16,
    /// TOML merged over the configuration of both daemons, as `[engine]` tables
    #[arg(long = "config", value_name = "TOML", default_value = "")]
    overrides: String,
    /// Writes the report here, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A campaign.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Item {
    Kills(u64),
    Crashes(u64),
    Hangs(u64),
    Stops(u64),
    Blocks(u64),
    Resets(u64),
    Links(u64),
    Supervisors(Deed, u64),
    Pauses(u64),
    /// Seconds.
    Calm(u64),
    /// How many, and how many ports are open.
    OpenPorts(u64, u16),
    /// How many, where, and whether the ports have integrity.
    Flips(u64, Path, bool),
}

impl Options {
    /// What is to be done, in order.
    pub fn plan(&self) -> Vec<Item> {
        let calm = self.calm.map(|minutes| (minutes.max(0.0) * 60.0) as u64);
        let asked = [
            self.kills.map(Item::Kills),
            self.crashes.map(Item::Crashes),
            self.hangs.map(Item::Hangs),
            self.stops.map(Item::Stops),
            self.blocks.map(Item::Blocks),
            self.resets.map(Item::Resets),
            self.links.map(Item::Links),
            self.supervisor.map(|n| Item::Supervisors(Deed::Kill, n)),
            self.upgrades.map(|n| Item::Supervisors(Deed::Upgrade, n)),
            self.pauses.map(Item::Pauses),
            calm.map(Item::Calm),
        ];
        let mut plan: Vec<Item> = asked.into_iter().flatten().collect();
        plan.extend(open_ports(self.open_ports.unwrap_or(0)));
        plan.extend(flips(self.bitflips.unwrap_or(0), true));
        plan.extend(flips(self.bitflips_plain.unwrap_or(0), false));
        if plan.is_empty() && !self.cost {
            plan = vec![
                Item::Kills(200),
                Item::Crashes(60),
                Item::Hangs(60),
                Item::Stops(60),
                Item::Blocks(60),
                Item::Resets(10),
                Item::Links(10),
                Item::Supervisors(Deed::Kill, 20),
                Item::Supervisors(Deed::Upgrade, 5),
                Item::Pauses(100),
                Item::Calm(60),
            ];
            plan.extend(open_ports(15));
            plan.extend(flips(60, true));
            plan.extend(flips(60, false));
        }
        plan.retain(|item| item.count() > 0);
        plan
    }

    /// Whether Table 2 is asked for: by name, or by asking for nothing.
    pub fn costs(&self, plan: &[Item]) -> bool {
        self.cost
            || plan.iter().any(|item| matches!(item, Item::OpenPorts(..)))
                && self.open_ports.is_none()
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn json(&self) -> Option<&std::path::Path> {
        self.json.as_deref()
    }

    pub fn setting(&self) -> Setting {
        Setting {
            mtu: self.mtu,
            ports: self.ports,
            patience: Duration::from_secs(self.patience),
            open_ports: 0,
            managed: false,
            integrity: false,
            overrides: [(); 2].map(|()| self.overrides.clone()),
            seed: self.seed,
            flip_at: self.bitflip_at,
        }
    }
}

/// From "0x4b397c:3".
fn flip_at(text: &str) -> Result<(u64, u32), String> {
    let parse = || {
        let (address, bit) = text.split_once(':')?;
        let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).ok()?;
        bit.parse()
            .ok()
            .filter(|bit| *bit < 8)
            .map(|bit| (address, bit))
    };
    parse().ok_or_else(|| "wanted an address in the file and a bit, as in 0x4b397c:3".to_owned())
}

impl Item {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kills(_) => "kill",
            Self::Crashes(_) => "crash",
            Self::Hangs(_) => "hang",
            Self::Stops(_) => "stop",
            Self::Blocks(_) => "block",
            Self::Resets(_) => "reset",
            Self::Links(_) => "link",
            Self::Supervisors(Deed::Kill, _) => "supervisor",
            Self::Supervisors(Deed::Upgrade, _) => "upgrade",
            Self::Pauses(_) => "pause",
            Self::Calm(_) => "calm",
            Self::OpenPorts(..) => "kill-open-ports",
            Self::Flips(_, Path::Send, true) => "bitflip-send",
            Self::Flips(_, Path::Receive, true) => "bitflip-receive",
            Self::Flips(_, Path::Send, false) => "bitflip-send-plain",
            Self::Flips(_, Path::Receive, false) => "bitflip-receive-plain",
        }
    }

    /// How many.
    pub fn count(&self) -> u64 {
        match *self {
            Self::Kills(n)
            | Self::Crashes(n)
            | Self::Hangs(n)
            | Self::Stops(n)
            | Self::Blocks(n)
            | Self::Resets(n)
            | Self::Links(n)
            | Self::Supervisors(_, n)
            | Self::Pauses(n)
            | Self::Calm(n)
            | Self::OpenPorts(n, _)
            | Self::Flips(n, ..) => n,
        }
    }

    pub fn expected_s(&self) -> f64 {
        let each = match self {
            Self::Links(_) => 0.7,
            Self::Supervisors(deed, _) => deed.expected_s(),
            Self::Pauses(_) => 0.09,
            Self::Calm(_) => 1.0,
            Self::Flips(..) => flips::EXPECTED_S,
            _ => deaths::EXPECTED_S,
        };
        3.0 + each * self.count() as f64
    }

    pub fn run(&self, setting: &Setting, progress: &mut Progress) -> Result<Outcome> {
        let blocks = [Fault::Block, Fault::Freeze];
        let blocks = if can_freeze() {
            &blocks[..]
        } else {
            &blocks[..1]
        };
        let faults: &[Fault] = match self {
            Self::Kills(_) => &[Fault::Kill],
            Self::Crashes(_) => &[Fault::Crash],
            Self::Hangs(_) => &[Fault::Hang, Fault::Spin],
            Self::Stops(_) => &[Fault::Stop],
            Self::Blocks(_) => blocks,
            Self::Resets(_) => &[Fault::Reset],
            Self::Links(count) => return links::links(setting, *count, progress),
            Self::Supervisors(deed, count) => {
                return supervisors::supervisors(*deed, setting, *count, progress);
            }
            Self::Pauses(count) => return alarms::pauses(setting, *count, progress),
            Self::Calm(seconds) => {
                return alarms::calm(setting, Duration::from_secs(*seconds), progress);
            }
            Self::OpenPorts(count, ports) => {
                let setting = Setting {
                    open_ports: *ports,
                    ..setting.clone()
                };
                let campaign = Deaths {
                    kind: self.name(),
                    faults: &[Fault::Kill],
                    count: *count,
                    setting: &setting,
                };
                let mut outcome = campaign.run(progress)?;
                outcome.open_ports = Some(u64::from(*ports.max(&setting.busy_ports())));
                return Ok(outcome);
            }
            Self::Flips(count, path, integrity) => {
                let setting = Setting {
                    integrity: *integrity,
                    ..setting.clone()
                };
                let campaign = Flips {
                    kind: self.name(),
                    path: *path,
                    count: *count,
                    setting: &setting,
                };
                return campaign.run(progress);
            }
        };
        let campaign = Deaths {
            kind: self.name(),
            faults,
            count: self.count(),
            setting,
        };
        campaign.run(progress)
    }
}

/// Half in each path.
fn flips(count: u64, integrity: bool) -> [Item; 2] {
    let send = count.div_ceil(2);
    [
        Item::Flips(send, Path::Send, integrity),
        Item::Flips(count - send, Path::Receive, integrity),
    ]
}

/// As few as carry the traffic, and more.
fn open_ports(count: u64) -> [Item; 4] {
    [0, 16, 64, 160].map(|ports| Item::OpenPorts(count, ports))
}
