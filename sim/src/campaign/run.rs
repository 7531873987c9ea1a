//! One seed: a time of faults in which nothing bad may happen, then a time without in which everything must end well.

use portolan_transport::ident::Nanos;
use portolan_transport::policy::Order as CommitOrder;

use super::plan::{Options, Plan};
use super::workload::Workload;
use crate::checks::credits::Credits;
use crate::checks::deadlock::Deadlock;
use crate::checks::memory::Memory;
use crate::checks::order::Order;
use crate::checks::status::Status;
use crate::cluster::{Cluster, Tally};
use crate::harness::MS;

/// Turns of an engine between two looks at its innards.
const LOOK_EVERY: u64 = 512;

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub messages: u64,
    pub delivered: u64,
    pub tally: Tally,
    pub switch_dropped: u64,
    /// Virtual time.
    pub lasted_ns: Nanos,
}

/// Runs one seed to its end; panics at the first violation.
pub fn run(seed: u64, options: &Options, trace: bool) -> Outcome {
    let plan = Plan::new(seed, options);
    let mut cluster = Cluster::new(plan.setup.clone());
    cluster.trace = trace;
    cluster.watch_frames = true;
    cluster.look_every = LOOK_EVERY;
    engage_checks(&cluster, &plan);
    let start = cluster.now;
    let (safety, bound) = (plan.safety_ns, plan.bound_ns);
    let policies = cluster.setup.policies.clone();
    let mut workload = Workload::new(plan, &mut cluster);

    cluster.run(&mut workload, start + safety, |_, _| false);
    workload.heal(&mut cluster);
    let end = cluster.now + bound + MS;
    let settled =
        |cluster: &Cluster, workload: &Workload| cluster.is_settled() && workload.is_exhausted();
    finish(&mut cluster, &mut workload, end, settled, "every send ends");
    workload.say_goodbye(&mut cluster);
    finish(
        &mut cluster,
        &mut workload,
        end,
        settled,
        "the last sends end",
    );

    // Tokens of a sender that went away come back when it is given up, or when it closes the stream.
    let longest = policies
        .iter()
        .map(|p| p.unreachable_after_ms + p.stream_idle_ms.min(2_000));
    let patience = u64::from(longest.max().unwrap_or(0)) * 2 * MS;
    let end = cluster.now + patience;
    while cluster.now < end && !cluster.holds_nothing() {
        let until = cluster.now + patience / 50;
        cluster.run(&mut workload, until, |_, _| false);
    }
    let quiet = cluster.now + 2 * MS;
    cluster.run(&mut workload, quiet, |_, _| false);
    cluster.book.borrow_mut().end_of_run();
    let book = cluster.book.borrow();
    Outcome {
        messages: book.len() as u64,
        delivered: book.delivered() as u64,
        tally: cluster.tally,
        switch_dropped: cluster.switch.dropped.iter().sum(),
        lasted_ns: cluster.now - start,
    }
}

fn engage_checks(cluster: &Cluster, plan: &Plan) {
    let mut book = cluster.book.borrow_mut();
    let policies = &cluster.setup.policies;
    let eager = (1..)
        .map(portolan_transport::ident::NodeId)
        .zip(policies.iter().map(|p| p.eager_buffers));
    let rationed = policies.iter().any(|p| p.eager_budget_buffers > 0);
    let arrival = policies.iter().any(|p| p.order == CommitOrder::Arrival);
    if arrival {
        book.checks.replace(Box::new(Order::of_arrival()));
    }
    // What is given up still takes its number until the peer knows, and numbers under way are bounded.
    let gives_up = plan.flows.iter().any(|f| f.cancels + f.deadlines > 0);
    let scarce = gives_up || !plan.resume;
    book.checks.replace(Box::new(Status::with_reasons(scarce)));
    book.checks
        .add(Box::new(Credits::new(eager.collect(), rationed)));
    book.checks.add(Box::new(Memory::default()));
    book.checks
        .add(Box::new(Deadlock::new(plan.patience_ns, plan.bound_ns)));
    if plan.silence {
        book.checks.tell(|check| check.silence());
    }
}

fn finish(
    cluster: &mut Cluster,
    workload: &mut Workload,
    end: Nanos,
    settled: impl FnMut(&Cluster, &Workload) -> bool,
    what: &str,
) {
    if !cluster.run(workload, end, settled) {
        let waiting = cluster.book.borrow().waiting();
        #[allow(clippy::panic)] // how a run ends
        {
            panic!(
                "{what}: not by the end; {} wait: {:?}",
                waiting.len(),
                &waiting[..waiting.len().min(8)]
            );
        }
    }
}
