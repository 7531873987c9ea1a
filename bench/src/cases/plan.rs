//! Which cases, how often, for how long.

use std::time::Duration;

use anyhow::{Result, bail};

use super::{Case, MTUS, Wait};

const K: usize = 1 << 10;
const M: usize = 1 << 20;

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Turns of every subject at every case; medians of them are reported.
    pub turns: usize,
    /// How long each is measured.
    pub lasting: Duration,
    /// How long each point of the sweep over all sizes is.
    pub point: Duration,
    /// How long an idle node is watched before its first message.
    pub idle: Duration,
}

impl Timing {
    /// For figures to be published.
    pub const FULL: Self = Self {
        turns: 5,
        lasting: Duration::from_millis(400),
        point: Duration::from_millis(60),
        idle: Duration::from_secs(1),
    };
    /// For a look.
    pub const QUICK: Self = Self {
        turns: 3,
        lasting: Duration::from_millis(120),
        point: Duration::from_millis(40),
        idle: Duration::from_secs(1),
    };

    /// How long one turn of a case is measured.
    pub fn of(&self, case: &Case) -> Duration {
        match case {
            Case::AllSize { .. } => self.point,
            Case::Idle { .. } => self.idle,
            _ => self.lasting,
        }
    }
}

/// Cases that are measured on subjects started once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Of the interfaces.
    pub mtu: u32,
    /// Of the interfaces.
    pub queues: u16,
    /// In this order.
    pub cases: Vec<Case>,
}

/// Everything that is to be measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In this order.
    pub groups: Vec<Group>,
    /// How long and how often.
    pub timing: Timing,
    /// Measurements wait until the cores are near each other.
    pub near: bool,
}

impl Plan {
    /// The cases that `names` mean, all if there are no names.
    ///
    /// # Errors
    /// A name that means nothing.
    pub fn new(names: &[String], quick: bool) -> Result<Self> {
        let all = full();
        for name in names {
            if !all.iter().any(|case| case.is_meant_by(name)) {
                let names: Vec<String> = all.iter().map(Case::to_string).collect();
                bail!("there is no case {name}; there are: {}", names.join(" "));
            }
        }
        // Who names a case wants it, quick or not.
        let mut cases = match (names, quick) {
            ([], true) => short(),
            _ => all,
        };
        cases.retain(|case| names.is_empty() || names.iter().any(|name| case.is_meant_by(name)));
        let timing = match quick {
            true => Timing::QUICK,
            false => Timing::FULL,
        };
        Ok(Self {
            groups: grouped(&cases),
            timing,
            near: false,
        })
    }

    /// All cases, in order.
    pub fn cases(&self) -> impl Iterator<Item = &Case> {
        self.groups.iter().flat_map(|group| &group.cases)
    }
}

fn grouped(cases: &[Case]) -> Vec<Group> {
    let of = |cases: &[Case]| {
        let first = cases.first()?;
        Some(Group {
            mtu: first.mtu(),
            queues: first.queues(),
            cases: cases.to_vec(),
        })
    };
    let runs = cases.chunk_by(Case::goes_with);
    runs.filter_map(of).collect()
}

fn full() -> Vec<Case> {
    let inline = [0, 16, 32, 64, 80];
    let pings = inline.into_iter().chain([128, K, 4 * K, 64 * K, M]);
    let mut cases: Vec<Case> = pings.map(|bytes| Case::PingPong { bytes }).collect();
    cases.push(Case::Rate { bytes: 64 });
    let sizes = (0..=20).map(|power| 1 << power);
    cases.extend(sizes.map(|bytes| Case::AllSize { bytes }));
    cases.extend(alone());
    cases.extend(Wait::ALL.map(|wait| Case::Idle { wait }));
    for mtu in MTUS {
        let sizes = [4 * K, 64 * K, M, 16 * M];
        cases.extend(sizes.map(|bytes| Case::Stream { bytes, mtu }));
    }
    cases
}

fn short() -> Vec<Case> {
    let pings = [0, 64, K, 64 * K];
    let mut cases: Vec<Case> = pings.map(|bytes| Case::PingPong { bytes }).to_vec();
    cases.push(Case::Rate { bytes: 64 });
    let sizes = [64, 512, 4 * K, 64 * K, M];
    cases.extend(sizes.map(|bytes| Case::AllSize { bytes }));
    cases.extend(alone());
    let wait = Wait::Adaptive;
    cases.push(Case::Idle { wait });
    cases.extend(MTUS.map(|mtu| Case::Stream { bytes: M, mtu }));
    cases
}

fn alone() -> [Case; 4] {
    [
        Case::FanIn { senders: 4 },
        Case::Ports { ports: 16 },
        Case::Startup,
        Case::Queues { queues: 2 },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_group_has_one_mtu_and_is_started_once() {
        let plan = Plan::new(&[], false).unwrap();
        for group in &plan.groups {
            let interfaces = (group.mtu, group.queues);
            let of = |case: &Case| (case.mtu(), case.queues());
            assert!(group.cases.iter().all(|case| of(case) == interfaces));
        }
        let starts = |wanted: fn(&Case) -> bool| {
            let with = |group: &&Group| group.cases.iter().any(wanted);
            plan.groups.iter().filter(with).count()
        };
        assert_eq!(starts(|case| matches!(case, Case::PingPong { .. })), 1);
        assert_eq!(starts(|case| matches!(case, Case::AllSize { .. })), 1);
        assert_eq!(starts(|case| matches!(case, Case::Stream { .. })), 3);
        // An engine's way of waiting is chosen when it is started.
        assert_eq!(starts(|case| matches!(case, Case::Idle { .. })), 3);
    }

    #[test]
    fn named_cases_are_measured_also_where_a_quick_run_leaves_them_out() {
        let plan = Plan::new(&names(&["pingpong-128", "stream-16M"]), true).unwrap();
        let found: Vec<String> = plan.cases().map(Case::to_string).collect();
        let expected = [
            "pingpong-128",
            "stream-16M-mtu1500",
            "stream-16M-mtu3498",
            "stream-16M-mtu9000",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_name_that_means_nothing_is_refused_with_those_that_do() {
        let error = Plan::new(&names(&["pingpong-65"]), false).unwrap_err();
        assert!(error.to_string().contains("pingpong-64"), "{error}");
    }

    #[test]
    fn a_quick_run_asks_only_what_a_full_one_asks() {
        let full = full();
        assert!(short().iter().all(|case| full.contains(case)));
    }
}
