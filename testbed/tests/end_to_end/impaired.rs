//! Every profile over an impaired wire, between real daemons: all is delivered, once and whole. Profiles that cannot work together say
//! so. Links that are cut, slow or of several queues.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::harness::exchange::{Order, between_in, options};
use crate::harness::{Cluster, STEP, until};
use portolan::{Event, Priority, Reason, SendOptions, Status};
use portolan_testbed::{Encap, Impairment, Lab, Node, process};
use portolan_transport::policy::{self, AckRule, Profile};
use serde_json::Value;

const LARGEST: usize = 1 << 20;
/// Bound on one whole list of sizes.
const LIST: Duration = Duration::from_secs(60);

/// Everything at once. Each way its own fates.
fn everything(seed: u64) -> Impairment {
    Impairment {
        seed,
        loss: 0.01,
        duplicate: 0.01,
        corrupt: 0.005,
        reorder: 0.01,
        ..Impairment::default()
    }
}

/// Sizes at every kind of edge, many of them short; one of a mebibyte.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![1, 80, 81, 1000, 1472, 4096, 9000, 20_000, 65_537, 300_000];
    sizes.extend((0..150).map(|n| n * 37 % 5000 + 1));
    sizes.extend([LARGEST, 1, 2, 3]);
    sizes
}

fn with_profile(profile: Profile) -> String {
    format!("[transport]\nprofile = \"{}\"", profile.name())
}

fn order(profile: Profile) -> Order {
    let policy = profile.policy();
    match (policy.order, policy.ack_rule) {
        (policy::Order::Arrival, _) => Order::Any,
        (policy::Order::Number, AckRule::Exact) => Order::AnyEnd,
        (policy::Order::Number, AckRule::Cumulative) => Order::Sent,
    }
}

/// Both ways at both priorities; ports of every engine if there are several.
fn all_is_delivered(cluster: &Cluster, profile: Profile, sizes: &[usize]) {
    let queues = cluster.lab.spec().queues;
    std::thread::scope(|scope| {
        for number in 0..queues {
            scope.spawn(move || {
                let mut one = cluster.open(1, options(20 + number, LARGEST));
                let mut two = cluster.open(2, options(30 + number, LARGEST));
                let count = AtomicU64::new(0);
                between_in(order(profile), &mut one, &mut two, sizes, LIST, &count);
                for port in [one, two] {
                    let closed = port.close(STEP).unwrap();
                    assert_eq!((closed.failed, closed.unfinished), (0, 0));
                }
            });
        }
    });
}

/// What the wire did to frames toward either node, all kinds at least once.
fn was_impaired(lab: &Lab) {
    let counters = lab.wire().counters().unwrap();
    println!("{counters:?}");
    let sum = |what: fn(&portolan_testbed::LineCounters) -> u64| -> u64 {
        counters.toward.values().map(what).sum()
    };
    assert!(sum(|line| line.lost) > 0);
    assert!(sum(|line| line.duplicated) > 0);
    assert!(sum(|line| line.corrupted) > 0);
    assert!(sum(|line| line.reordered) > 0);
}

fn everything_arrives(profile: Profile, encap: Encap, mtu: u32) {
    let lab = Lab::builder().encap(encap).mtu(mtu);
    let lab = lab.impaired(everything(7)).build().unwrap();
    let cluster = Cluster::start_in(lab, |_| with_profile(profile));
    let status = cluster.daemon(1).status().unwrap();
    assert_eq!(status["transport"]["profile"], profile.name(), "{status}");
    all_is_delivered(&cluster, profile, &sizes());
    was_impaired(&cluster.lab);
}

#[test]
fn everything_arrives_with_parastation2() {
    everything_arrives(Profile::ParaStation2, Encap::Udp4, 9000);
}

// A message that loses one frame begins again: a mebibyte of short frames would never be whole.
#[test]
fn everything_arrives_with_rmpp() {
    everything_arrives(Profile::Rmpp, Encap::Udp6, 9000);
}

#[test]
fn everything_arrives_with_gamma() {
    everything_arrives(Profile::Gamma, Encap::Ethernet, 1500);
}

#[test]
fn everything_arrives_with_gbn_stall() {
    everything_arrives(Profile::GbnStall, Encap::Udp4, 1500);
}

#[test]
fn everything_arrives_with_ftgm() {
    everything_arrives(Profile::Ftgm, Encap::Ethernet, 9000);
}

#[test]
fn everything_arrives_with_the_default() {
    everything_arrives(Profile::Default, Encap::Udp4, 1500);
}

#[test]
fn everything_arrives_with_jumbo_frames() {
    everything_arrives(Profile::Default, Encap::Udp6, 9000);
}

#[test]
fn everything_arrives_at_the_engines_of_two_queues() {
    let lab = Lab::builder().queues(2).impaired(everything(9));
    let cluster = Cluster::start(lab);
    all_is_delivered(&cluster, Profile::Default, &sizes());
    was_impaired(&cluster.lab);
}

#[test]
fn a_tenth_lost_in_bursts_is_recovered() {
    let bursts = Impairment {
        burst: 4,
        ..Impairment::loss(0.1)
    };
    let cluster = Cluster::start(Lab::builder().impaired(bursts));
    all_is_delivered(&cluster, Profile::Default, &sizes());
}

// 100 Mbit/s, half a millisecond away, with room for 40 frames before it: what is sent too fast is dropped and sent again.
#[test]
fn a_slow_link_with_a_short_buffer_delivers() {
    let slow = Impairment {
        rate_bps: 100_000_000,
        buffer_bytes: 40 * 1500,
        delay_us: 500,
        ..Impairment::default()
    };
    let cluster = Cluster::start(Lab::builder().impaired(slow));
    all_is_delivered(&cluster, Profile::Default, &sizes());
}

/// The link is cut in the middle of everything, until frames have been dropped because of it.
fn a_cut_is_survived(cut: impl Fn(&Lab)) {
    let cluster = Cluster::start(Lab::builder().impaired(Impairment::default()));
    let mut one = cluster.open(1, options(9, LARGEST));
    let mut two = cluster.open(2, options(5, LARGEST));
    let sizes = vec![30_000; 400];
    let count = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let traffic =
            scope.spawn(|| between_in(Order::Sent, &mut one, &mut two, &sizes, LIST, &count));
        until("traffic flows", STEP, || {
            (count.load(Ordering::Relaxed) > 100 || traffic.is_finished()).then_some(())
        });
        let wire = cluster.lab.wire();
        cut(&cluster.lab);
        until("the cut is noticed", STEP, || {
            let counters = wire.counters().unwrap();
            let dropped: u64 = counters.toward.values().map(|line| line.cut).sum();
            (dropped >= 10).then_some(())
        });
        assert!(!traffic.is_finished());
        wire.heal().unwrap();
    });
    assert_eq!(count.into_inner(), 4 * 400);
}

#[test]
fn a_link_that_is_cut_and_healed_loses_nothing() {
    a_cut_is_survived(|lab| lab.wire().cut().unwrap());
}

#[test]
fn a_link_that_is_cut_one_way_and_healed_loses_nothing() {
    a_cut_is_survived(|lab| lab.wire().cut_toward(2).unwrap());
}

// ---- profiles that can work together, and such that cannot ----

fn pair(one: Profile, two: Profile) -> Cluster {
    let lab = Lab::builder().impaired(everything(11)).build().unwrap();
    Cluster::start_in(lab, |node| with_profile(if node == 1 { one } else { two }))
}

fn peer(node: &Node) -> Value {
    let text = process::run_ok(node.portolan().args(["peers", "--json"]), STEP).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    report["peers"][0].clone()
}

/// Both sides try; both are told why not.
fn refuse_each_other(one: Profile, two: Profile, field: &str) {
    let misfit = one.policy().misfit(&two.policy().wire());
    assert_eq!(misfit.map(policy::misfit_name), Some(field));
    let cluster = pair(one, two);
    for (own, other) in [(1, 2), (2, 1)] {
        let mut port = cluster.open(own, options(9, 4096));
        let to = (other, 9u16);
        port.send_bytes(to, b"do we understand each other?", SendOptions::default())
            .unwrap();
        let Some(Event::Sent(sent)) = port.blocking_receive(STEP).unwrap() else {
            panic!("a send without an end");
        };
        assert_eq!(sent.status, Status::NotDelivered(Reason::Incompatible));
        let row = peer(cluster.lab.node(own));
        assert_eq!(row["state"], "incompatible", "{row}");
        assert_eq!(row["misfit"], field, "{row}");
    }
    // For people too.
    let text = process::run_ok(cluster.lab.node(1).portolan().arg("peers"), STEP).unwrap();
    assert!(text.contains(field), "{text}");
}

#[test]
fn profiles_that_recover_differently_refuse_each_other() {
    refuse_each_other(Profile::Rmpp, Profile::GbnStall, "recovery");
}

#[test]
fn profiles_that_acknowledge_differently_refuse_each_other() {
    refuse_each_other(Profile::ParaStation2, Profile::Ftgm, "ack_rule");
}

fn work_together(one: Profile, two: Profile) {
    assert_eq!(one.policy().misfit(&two.policy().wire()), None);
    let cluster = pair(one, two);
    all_is_delivered(&cluster, one, &sizes());
    let row = peer(cluster.lab.node(1));
    assert_eq!(row["state"], "up", "{row}");
    assert_eq!(row["misfit"], Value::Null, "{row}");
}

#[test]
fn profiles_of_other_windows_and_credits_work_together() {
    work_together(Profile::Gamma, Profile::Ftgm);
}

#[test]
fn a_profile_that_stalls_and_one_that_does_not_work_together() {
    work_together(Profile::Ftgm, Profile::GbnStall);
}

// A profile is changed by restarting the daemon with another: then they understand each other.
#[test]
fn a_refusal_ends_when_the_other_side_changes_its_profile() {
    let lab = Lab::builder().impaired(Impairment::default());
    let lab = lab.build().unwrap();
    let _one = lab
        .node(1)
        .start_daemon(&with_profile(Profile::GbnStall))
        .unwrap();
    let two = lab
        .node(2)
        .start_daemon(&with_profile(Profile::Rmpp))
        .unwrap();
    let node = portolan::Node::attach(lab.node(1).socket()).unwrap();
    let mut port = node.open_port(options(9, 4096)).unwrap();
    let mut send = || {
        port.send_bytes((2u16, 9u16), b"and now?", SendOptions::default())
            .unwrap();
        let Some(Event::Sent(sent)) = port.blocking_receive(STEP).unwrap() else {
            panic!("a send without an end");
        };
        port.drop_sends((2u16, 9u16), Priority::Low).unwrap();
        sent.status
    };
    assert_eq!(send(), Status::NotDelivered(Reason::Incompatible));
    two.stop(STEP).unwrap();
    let _two = lab
        .node(2)
        .start_daemon(&with_profile(Profile::Gamma))
        .unwrap();
    // Nobody has port 9 there: whoever says so has understood.
    until("they understand each other", STEP, || {
        (send() == Status::NotDelivered(Reason::PortClosed)).then_some(())
    });
}
