//! Every profile at several losses: goodput with always something to send, and latency at a fixed load.
//!
//! One sender, one receiver, one stream, one switch between them. Goodput is payload delivered against the link's bits. Latency
//! is from the post to the receiver's event, messages at random times (Poisson), so a loss delays those behind it as well.

use portolan_transport::ident::{Nanos, NodeId, PortId, Priority};
use portolan_transport::policy::{OnTimeout, Order, Policy, Profile};
use serde_json::{Value, json};

use super::load::{Load, Pace, Source, open};
use crate::checks::order::Order as OrderCheck;
use crate::cluster::impairment::Impairment;
use crate::cluster::{Cluster, Setup};
use crate::harness::book::Route;
use crate::harness::{MS, SECOND};

/// Losses in parts per million: 0, 0.01, 0.1, 1, 5, 10 %.
pub const LOSSES_PPM: [u32; 6] = [0, 100, 1_000, 10_000, 50_000, 100_000];

/// What lies between the two.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub mbit_per_s: u64,
    /// Of an empty frame, there and back.
    pub round_trip_us: u64,
}

/// How it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Bytes of a message.
    pub len: u32,
    pub max_frame: u16,
    pub link: Link,
    /// For goodput.
    pub measured_ns: Nanos,
    /// For latency: messages, and the part of the link they take.
    pub messages: u64,
    pub load_percent: u32,
    /// Timers that never adapt, as the papers have them.
    pub fixed_us: Option<u32>,
    pub seed: u64,
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Part of the link.
    pub goodput: f64,
    pub p50_ns: Nanos,
    pub p99_ns: Nanos,
}

fn policy(profile: Profile, case: &Case) -> Policy {
    let mut policy = profile.policy();
    if let Some(us) = case.fixed_us
        && profile != Profile::Default
    {
        (policy.rto_min_us, policy.rto_max_us) = (us, us);
        policy.on_timeout = OnTimeout::Resend;
        policy.unreachable_after_ms = policy.unreachable_after_ms.max(us / 100);
    }
    // Nobody is given up for the losses in this table.
    policy.unreachable_after_ms = policy.unreachable_after_ms.max(60_000);
    policy
}

fn cluster(profile: Profile, case: &Case) -> Cluster {
    let mut setup = Setup::new(case.seed, 2, policy(profile, case));
    setup.max_frame = case.max_frame;
    setup.hardware.link_bits_per_s = case.link.mbit_per_s * 1_000_000;
    setup.hardware.propagation_ns = case.link.round_trip_us * 1_000 / 4; // to the switch and from it, both ways
    let in_arrival_order = setup.policies.iter().any(|p| p.order == Order::Arrival);
    let mut cluster = Cluster::new(setup);
    if in_arrival_order {
        let order = Box::new(OrderCheck::of_arrival());
        cluster.book.borrow_mut().checks.replace(order);
    }
    open(&mut cluster, NodeId(1), PortId(1), 0, case.len);
    open(&mut cluster, NodeId(2), PortId(1), 1_024, case.len);
    cluster
}

/// Lets the two meet and prove their path, then lets frames be lost: a lost HELLO is no part of the table.
fn meet(cluster: &mut Cluster, load: &mut Load, loss_ppm: u32) {
    let met = cluster.now + MEETING;
    cluster.run(load, met, |_, _| false);
    cluster.network.impairment = Impairment {
        loss_ppm,
        ..Impairment::default()
    };
}

/// Long enough for a path proof that is repeated once.
const MEETING: Nanos = 20 * MS;

fn source(case: &Case, pace: Pace) -> Source {
    Source {
        route: Route {
            from: (NodeId(1), PortId(1)),
            to: (NodeId(2), PortId(1)),
            priority: Priority::Low,
        },
        len: case.len,
        pace,
    }
}

/// Measures one profile at one loss.
pub fn measure(profile: Profile, loss_ppm: u32, case: &Case) -> Cell {
    let mut full = cluster(profile, case);
    let from = full.now + MEETING + case.measured_ns / 10;
    let until = from + case.measured_ns;
    // As many tokens as a port has.
    let sources = vec![source(case, Pace::Closed(255))];
    let mut load = Load::new(&mut full, sources, 1, (from, until));
    meet(&mut full, &mut load, loss_ppm);
    full.run(&mut load, until, |_, _| false);
    let capacity = full.setup.hardware.link_bits_per_s as f64 / 8.0 * case.measured_ns as f64 / 1e9;
    let goodput = load.measured[0].bytes as f64 / capacity;

    let mut calm = cluster(profile, case);
    let message_ns = u64::from(case.len) * 8 * SECOND / calm.setup.hardware.link_bits_per_s;
    let apart = message_ns * 100 / u64::from(case.load_percent.max(1));
    let from = calm.now + MEETING + 2 * MS;
    let until = from + apart * case.messages;
    let sources = vec![source(case, Pace::Open(apart))];
    let mut load = Load::new(&mut calm, sources, 1, (from, until));
    meet(&mut calm, &mut load, loss_ppm);
    calm.run(&mut load, until, |_, _| false);
    calm.run(&mut load, until + 100 * SECOND, |cluster, _| {
        cluster.is_settled()
    });
    let measured = &mut load.measured[0];
    Cell {
        goodput,
        p50_ns: measured.quantile(0.5),
        p99_ns: measured.quantile(0.99),
    }
}

/// All profiles at all losses, on `jobs` threads.
pub fn table(case: &Case, jobs: usize) -> Vec<(Profile, Vec<Cell>)> {
    let cells: Vec<(Profile, u32)> = Profile::ALL
        .into_iter()
        .flat_map(|profile| LOSSES_PPM.map(|loss| (profile, loss)))
        .collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let done = std::sync::Mutex::new(vec![None; cells.len()]);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(&(profile, loss)) = cells.get(index) else {
                        return;
                    };
                    let cell = measure(profile, loss, case);
                    let mut done = done
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                    done[index] = Some(cell);
                }
            });
        }
    });
    let done = done
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut rows = done.chunks(LOSSES_PPM.len());
    Profile::ALL
        .into_iter()
        .map(|profile| {
            (
                profile,
                rows.next()
                    .into_iter()
                    .flatten()
                    .copied()
                    .flatten()
                    .collect(),
            )
        })
        .collect()
}

/// The table as Markdown.
pub fn markdown(case: &Case, table: &[(Profile, Vec<Cell>)]) -> String {
    let head = LOSSES_PPM
        .map(|ppm| format!(" {} % |", f64::from(ppm) / 1e4))
        .concat();
    let rule = LOSSES_PPM.map(|_| "---|").concat();
    let rows = |value: &dyn Fn(&Cell) -> String| -> String {
        let row = |(profile, cells): &(Profile, Vec<Cell>)| {
            let cells: String = cells
                .iter()
                .map(|cell| format!(" {} |", value(cell)))
                .collect();
            format!("| {} |{cells}\n", profile.name())
        };
        table.iter().map(row).collect()
    };
    let timer = match case.fixed_us {
        None => "adaptive timers".to_owned(),
        Some(us) => format!("a fixed timer of {us} us (default: adaptive)"),
    };
    format!(
        "Simulated link of {} Mbit/s, round trip {} us, frames of {} bytes, messages of {} bytes, {timer}.\n\n\
         Goodput, Mbit/s, always 255 messages under way:\n\n| loss |{head}\n|---|{rule}\n{}\n\
         Latency p99 (p50), us, at {} % of the link:\n\n| loss |{head}\n|---|{rule}\n{}",
        case.link.mbit_per_s,
        case.link.round_trip_us,
        case.max_frame,
        case.len,
        rows(&|cell| format!("{:.0}", cell.goodput * case.link.mbit_per_s as f64)),
        case.load_percent,
        rows(&|cell| format!(
            "{:.1} ({:.1})",
            cell.p99_ns as f64 / 1e3,
            cell.p50_ns as f64 / 1e3
        )),
    )
}

/// The table as JSON.
pub fn as_json(case: &Case, table: &[(Profile, Vec<Cell>)]) -> Value {
    let cells = table.iter().flat_map(|(profile, cells)| {
        cells.iter().zip(LOSSES_PPM).map(|(cell, ppm)| {
            json!({
                "profile": profile.name(),
                "loss": f64::from(ppm) / 1e6,
                "goodput_mbit_s": cell.goodput * case.link.mbit_per_s as f64,
                "p50_ns": cell.p50_ns,
                "p99_ns": cell.p99_ns,
            })
        })
    });
    json!({
        "message_bytes": case.len,
        "max_frame": case.max_frame,
        "link_mbit_s": case.link.mbit_per_s,
        "round_trip_us": case.link.round_trip_us,
        "load_percent": case.load_percent,
        "fixed_timer_us": case.fixed_us,
        "results": cells.collect::<Vec<_>>(),
    })
}
