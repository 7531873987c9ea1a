//! What one seed does: which cluster, which traffic, which faults and when.
//!
//! Everything is drawn before the run begins, from the seed alone, so that a run's course cannot change what is asked of it.

use portolan_transport::ident::{Nanos, NodeId, PortId, Priority};
use portolan_transport::policy::{Ack, Policy, Profile};

use crate::cluster::Setup;
use crate::cluster::impairment::{Bursts, Impairment};
use crate::cluster::switch::Hardware;
use crate::harness::book::Route;
use crate::harness::rng::Rng;
use crate::harness::{MS, SECOND, US};

/// What somebody fixed from outside.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub profile: Option<Profile>,
    pub nodes: Option<u16>,
}

/// One direction of traffic of one application.
#[derive(Clone, Debug)]
pub struct Flow {
    pub route: Route,
    /// Messages to send.
    pub count: u32,
    /// Sends outstanding at most.
    pub depth: u32,
    /// Between a completion and the next send.
    pub think_ns: Nanos,
    pub begins_ns: Nanos,
    /// Lengths.
    pub sizes: Sizes,
    /// Per thousand sends.
    pub cancels: u32,
    pub deadlines: u32,
}

/// How long messages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Up to 200 bytes.
    Tiny,
    /// One frame, mostly.
    Frame,
    /// Anything up to 64 KiB.
    Mixed,
    /// 10 KB to 1 MB.
    Long,
}

/// A fault, or its end.
#[derive(Clone, Copy, Debug)]
pub enum Deed {
    Kill {
        engine: usize,
        pause: Nanos,
    },
    KillAtStep {
        engine: usize,
        steps: u64,
    },
    Stop {
        engine: usize,
        time: Nanos,
    },
    Cut {
        from: NodeId,
        to: NodeId,
        both: bool,
    },
    Mend {
        from: NodeId,
        to: NodeId,
    },
    Reboot {
        node: NodeId,
    },
    Close {
        node: NodeId,
        port: PortId,
    },
    Open {
        node: NodeId,
        port: PortId,
    },
    Lag {
        engine: usize,
        time: Nanos,
    },
    Weather(Impairment),
    /// Not a fault: an engine goes round for frames, and grants what one look brings, or does not any more.
    Grant {
        engine: usize,
        bytes: u32,
    },
}

/// The whole run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub setup: Setup,
    /// Its name, if all nodes have one.
    pub profile: &'static str,
    pub ports: u16,
    /// Receive tokens per port and priority, and the longest message they hold.
    pub tokens: usize,
    pub max_len: u32,
    pub flows: Vec<Flow>,
    pub deeds: Vec<(Nanos, Deed)>,
    /// Until when faults happen.
    pub safety_ns: Nanos,
    /// After them all must be over within so long, and something must end at least every so often.
    pub bound_ns: Nanos,
    pub patience_ns: Nanos,
    /// Nodes may fail to hear each other for longer than they wait.
    pub silence: bool,
    /// Applications take this long to provide a receive buffer again.
    pub provide_lag_ns: Nanos,
    /// After a send that was not delivered: resume, or drop what waits.
    pub resume: bool,
}

impl Plan {
    /// What this seed does.
    pub fn new(seed: u64, options: &Options) -> Self {
        let mut rng = Rng::new(seed ^ 0x706c_616e);
        let nodes = options.nodes.unwrap_or_else(|| match rng.below(100) {
            0..=89 => rng.between(2, 8),
            90..=98 => rng.between(12, 40),
            _ => rng.between(100, 200),
        } as u16);
        let profile = options.profile.unwrap_or_else(|| match rng.below(10) {
            0..=4 => Profile::Default,
            _ => *rng.pick(&Profile::ALL),
        });
        let calm = rng.chance(150);
        let silence = !calm && rng.chance(350);
        let policy = policy(&mut rng, profile, silence);
        let safety_ns = rng.between(3, 40) * MS;
        let mut setup = Setup::new(seed, usize::from(nodes), policy);
        setup.queues = if nodes <= 8 {
            rng.between(1, 2) as u8
        } else {
            1
        };
        if rng.chance(500) {
            (setup.max_frame, setup.segment) =
                *rng.pick(&[(1_458, usize::MAX), (1_458, 700), (576, 576)]);
        }
        setup.first_number = (rng.u32() % 60).wrapping_add(u32::MAX - 40);
        setup.first_epoch = (rng.u32() % 8).wrapping_add(u32::MAX - 6);
        setup.hardware = hardware(&mut rng);
        vary(&mut rng, &mut setup);
        // Some with one token per port and many streams.
        let single = rng.chance(150);
        let ports = if single { 1 } else { rng.between(1, 4) as u16 };
        let mut plan = Self {
            profile: profile.name(),
            ports,
            tokens: if single {
                1
            } else {
                rng.between(2, 24) as usize
            },
            max_len: 1 << 20,
            flows: Vec::new(),
            deeds: Vec::new(),
            safety_ns,
            bound_ns: 120 * SECOND,
            patience_ns: SECOND * 5 + u64::from(policy.unreachable_after_ms) * 2 * MS,
            silence,
            provide_lag_ns: if rng.chance(200) {
                rng.below(300 * US)
            } else {
                0
            },
            resume: rng.chance(500),
            setup,
        };
        plan.draw_flows(&mut rng, single);
        if !calm {
            plan.draw_faults(&mut rng);
        }
        plan.draw_grants(&mut Rng::new(seed ^ 0x6772_616e));
        plan.deeds.sort_by_key(|deed| deed.0);
        plan
    }

    /// By a generator of its own: what else a seed does does not depend on it.
    fn draw_grants(&mut self, rng: &mut Rng) {
        if !rng.chance(500) {
            return;
        }
        let engines = self.setup.policies.len() as u64 * u64::from(self.setup.queues);
        for _ in 0..rng.between(5, 80) {
            let engine = rng.below(engines) as usize;
            let bytes = *rng.pick(&[0, 0, 30_000, 93_000, 487_000]);
            self.deeds
                .push((rng.below(self.safety_ns), Deed::Grant { engine, bytes }));
        }
    }

    fn node(&self, rng: &mut Rng) -> NodeId {
        NodeId(rng.between(1, self.setup.policies.len() as u64) as u16)
    }

    fn port(&self, rng: &mut Rng) -> PortId {
        PortId(rng.between(1, u64::from(self.ports)) as u16)
    }

    fn draw_flows(&mut self, rng: &mut Rng, single: bool) {
        let nodes = self.setup.policies.len() as u64;
        let flows = match nodes {
            0..=8 if single => rng.between(4, 16),
            0..=8 => rng.between(2, 12),
            _ => nodes * 3 / 2,
        };
        let messages = rng.between(1_500, 5_000);
        for _ in 0..flows {
            let from = (self.node(rng), self.port(rng));
            let mut to = (self.node(rng), self.port(rng));
            if to.0 == from.0 && rng.chance(850) {
                to.0 = NodeId(to.0.0 % nodes as u16 + 1);
            }
            let sizes = match rng.below(20) {
                0..=9 => Sizes::Tiny,
                10..=14 => Sizes::Frame,
                15..=18 => Sizes::Mixed,
                _ => Sizes::Long,
            };
            let share = (messages / flows).max(4);
            let count = match sizes {
                Sizes::Tiny | Sizes::Frame => share * 3 / 2,
                Sizes::Mixed => share / 3,
                Sizes::Long => share / 40,
            };
            let depth = *rng.pick(&[1, 2, 8, 32, 60]);
            // What the flow would take without a fault, stretched over the time of the faults.
            let stretch = self.safety_ns * u64::from(depth) / count.max(1) / 2;
            self.flows.push(Flow {
                route: Route {
                    from,
                    to,
                    priority: if rng.chance(300) {
                        Priority::High
                    } else {
                        Priority::Low
                    },
                },
                count: count as u32,
                depth,
                think_ns: if rng.chance(700) { stretch } else { 0 },
                begins_ns: rng.below(self.safety_ns / 2),
                sizes,
                cancels: if rng.chance(200) { 20 } else { 0 },
                deadlines: if rng.chance(200) { 100 } else { 0 },
            });
        }
    }

    fn draw_faults(&mut self, rng: &mut Rng) {
        let engines = self.setup.policies.len() as u64 * u64::from(self.setup.queues);
        let weather = weather(rng);
        self.deeds.push((rng.below(MS), Deed::Weather(weather)));
        if rng.chance(300) {
            let weather = self::weather(rng);
            self.deeds
                .push((self.safety_ns / 2, Deed::Weather(weather)));
        }
        let kinds = rng.u64(); // which kinds of faults this run has
        let restarts = self.silence && kinds & 1 != 0;
        for _ in 0..rng.between(4, 40) {
            let at = rng.below(self.safety_ns);
            let engine = rng.below(engines) as usize;
            let (node, other, port) = (self.node(rng), self.node(rng), self.port(rng));
            match rng.below(16) {
                0..=3 if kinds & 2 != 0 => self.deeds.push((
                    at,
                    Deed::KillAtStep {
                        engine,
                        steps: rng.between(1, 80),
                    },
                )),
                4..=5 if kinds & 4 != 0 => {
                    let pause = rng.below(3 * MS);
                    self.deeds.push((at, Deed::Kill { engine, pause }));
                }
                6..=7 if kinds & 8 != 0 => {
                    let time = if self.silence && rng.chance(200) {
                        rng.below(3 * SECOND) // its clock jumps past everybody's patience
                    } else {
                        rng.below(8 * MS)
                    };
                    self.deeds.push((at, Deed::Stop { engine, time }));
                }
                8..=9 if self.silence => {
                    let (from, to, both) = (node, other, rng.chance(500));
                    self.deeds.push((at, Deed::Cut { from, to, both }));
                    if rng.chance(800) {
                        let end = at + rng.below(self.safety_ns);
                        self.deeds.push((end, Deed::Mend { from, to }));
                    }
                    // Half-open: it restarts while nobody hears it.
                    if restarts && rng.chance(400) {
                        self.deeds.push((at + 1, Deed::Reboot { node }));
                    }
                }
                10 if restarts => {
                    self.deeds.push((at, Deed::Reboot { node }));
                    if rng.chance(300) {
                        self.deeds
                            .push((at + rng.below(50 * US), Deed::Reboot { node: other }));
                    }
                }
                11..=12 if kinds & 16 != 0 => {
                    self.deeds.push((at, Deed::Close { node, port }));
                    if rng.chance(700) {
                        self.deeds
                            .push((at + rng.below(5 * MS), Deed::Open { node, port }));
                    }
                }
                13..=14 if kinds & 32 != 0 => {
                    let time = rng.below(4 * MS);
                    self.deeds.push((at, Deed::Lag { engine, time }));
                }
                _ => {}
            }
        }
    }
}

/// The profile, with other limits where that changes nothing of what it is.
fn policy(rng: &mut Rng, profile: Profile, silence: bool) -> Policy {
    let mut policy = profile.policy();
    policy.stream_idle_ms = *rng.pick(&[20, 100, 1_000, 60_000]);
    policy.peer_idle_ms = *rng.pick(&[30, 500, 300_000]);
    if silence {
        policy.unreachable_after_ms = *rng.pick(&[250, 500, 1_000]);
    }
    if rng.chance(500) {
        policy.rto_max_us = 20_000;
    }
    if rng.chance(300) {
        policy.window_messages = rng.between(1, u64::from(policy.window_messages)) as u32;
    }
    if rng.chance(300) {
        policy.eager_buffers = rng.between(3, 64) as u32;
    }
    if rng.chance(200) {
        policy.grant_bytes = rng.between(1, 100_000) as u32;
        policy.grant_budget_bytes = policy.grant_bytes + rng.below(200_000) as u32;
    }
    if rng.chance(300) {
        policy.unasked_bytes = 256 * rng.below(256) as u32;
    }
    if rng.chance(200) {
        policy.crowd = rng.below(4) as u32;
    }
    if rng.chance(150) {
        policy.eager_budget_buffers = policy.eager_buffers * rng.between(1, 4) as u32;
    }
    policy
}

/// Nodes may differ in what is their own affair.
fn vary(rng: &mut Rng, setup: &mut Setup) {
    if !rng.chance(250) {
        return;
    }
    for policy in &mut setup.policies {
        if rng.chance(500) {
            policy.ack = *rng.pick(&[
                Ack::Immediate,
                Ack::Delayed { delay_us: 20 },
                Ack::Piggybacked { at_most_us: 200 },
            ]);
        }
        policy.window_messages = policy.window_messages.div_ceil(rng.between(1, 3) as u32);
        policy.eager_buffers = policy.eager_buffers.div_ceil(rng.between(1, 2) as u32);
        policy.eager_buffers = policy.eager_buffers.max(3);
        if policy.eager_budget_buffers > 0 {
            policy.eager_budget_buffers = policy.eager_budget_buffers.max(policy.eager_buffers);
        }
    }
}

fn hardware(rng: &mut Rng) -> Hardware {
    let mut hardware = Hardware::default();
    if rng.chance(300) {
        hardware.link_bits_per_s = *rng.pick(&[1_000_000_000, 10_000_000_000, 100_000_000_000]);
    }
    if rng.chance(300) {
        hardware.propagation_ns = rng.between(200, 20_000);
    }
    if rng.chance(200) {
        hardware.shared_buffer_bytes = rng.between(64 << 10, 1 << 20);
    }
    if rng.chance(200) {
        hardware.receive_ring_buffers = rng.between(16, 256) as u32;
    }
    hardware
}

/// A network as bad as this.
fn weather(rng: &mut Rng) -> Impairment {
    let mut weather = Impairment::default();
    if rng.chance(600) {
        weather.loss_ppm = *rng.pick(&[1_000, 10_000, 50_000, 100_000, 250_000]);
    }
    if rng.chance(250) {
        weather.bursts = Some(Bursts {
            begin_ppm: *rng.pick(&[500, 5_000, 20_000]),
            end_ppm: *rng.pick(&[20_000, 100_000, 300_000]),
            loss_ppm: *rng.pick(&[300_000, 800_000, 1_000_000]),
        });
    }
    if rng.chance(350) {
        weather.duplicate_ppm = *rng.pick(&[1_000, 20_000, 200_000]);
    }
    if rng.chance(350) {
        weather.corrupt_ppm = *rng.pick(&[1_000, 20_000, 100_000]);
    }
    if rng.chance(450) {
        weather.late_ppm = *rng.pick(&[5_000, 50_000, 300_000]);
        weather.late_by_ns = *rng.pick(&[20 * US, 300 * US, 5 * MS, 100 * MS]);
    }
    if rng.chance(150) {
        weather.delay_ns = rng.below(200 * US);
    }
    if rng.chance(200) {
        weather.crossing_loss_ppm = *rng.pick(&[1_000, 50_000]);
    }
    weather
}
