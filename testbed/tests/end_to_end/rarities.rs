//! What hardly ever happens, and is counted when it does: an interface that is down under a burst, memory that only root could spoil.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use portolan::{PortOptions, SendOptions};
use portolan_testbed::{Daemon, Lab, Node, process};
use rustix::process::{Pid, Signal, kill_process};

const WITHIN: Duration = Duration::from_secs(20);
/// Of the ledger's header: the frame that is being worked on, and the mark of whoever died of it (`shm-abi/src/ledger.rs`).
const WORKING_FRAME: u64 = 144;
const AGAIN: u64 = 1 << 62;

/// Counter of an engine.
fn counter(node: &Node, engine: usize, name: &str) -> u64 {
    let counters = node.report("counters").unwrap();
    let count = &counters["engines"][engine]["counters"][name];
    count.as_u64().unwrap_or_else(|| panic!("no {name}"))
}

/// Does something again and again until a counter has moved.
#[track_caller]
fn until_counted(node: &Node, engine: usize, name: &str, again: impl Fn()) {
    let deadline = Instant::now() + WITHIN;
    while counter(node, engine, name) == 0 {
        assert!(Instant::now() < deadline, "{name} does not move");
        again();
    }
}

fn ping(from: &Node, to: &str, count: &str) {
    let mut ping = from.portolan();
    process::run_ok(ping.args(["ping", to, "-c", count]), WITHIN).unwrap();
}

/// What the supervisor keeps under a name, in the order of its descriptors.
fn kept(daemon: &Daemon, name: &str) -> Vec<File> {
    let directory = format!("/proc/{}/fd", daemon.pid());
    let mut numbers: Vec<u32> = fs::read_dir(&directory)
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let paths = numbers.iter().map(|number| format!("{directory}/{number}"));
    let named = paths
        .filter(|path| fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains(name)));
    named
        .map(|path| File::options().write(true).open(path).unwrap())
        .collect()
}

// A burst while the interface is down. Expect: frames that find no wire are counted, and afterwards everything arrives.
#[test]
fn a_burst_while_the_interface_is_down() {
    let lab = Lab::builder().name("ptra").build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let _daemons = [one, two].map(|node| node.start_daemon("").unwrap());
    let here = portolan::Node::attach(one.socket()).unwrap();
    let mut port = here.open_port(PortOptions::at(9)).unwrap();
    ping(one, "2", "5");
    let link = |state: &str| {
        let mut ip = one.command("ip");
        ip.args(["link", "set", "dev", &one.interface(), state]);
        process::run_ok(&mut ip, WITHIN).unwrap();
    };
    link("down");
    let options = SendOptions::default();
    let burst = || port.send_bytes((2, 77), &[7; 1000], options).is_ok();
    let mut burst = burst;
    let sent = (0..64).take_while(|_| burst()).count();
    assert!(sent > 40, "{sent} sent");
    until_counted(one, 0, "link_down", std::thread::yield_now);
    link("up");
    ping(one, "2", "5");
}

// The ledger says that two engines have died of a frame. Expect: when it comes round it is discarded, once, and nobody notices.
#[test]
fn a_frame_that_two_have_died_of() {
    let lab = Lab::builder().name("ptra").build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let [first, _second] = [one, two].map(|node| node.start_daemon("").unwrap());
    ping(one, "2", "5");
    let status = one.report("status").unwrap();
    let pid = status["engines"][0]["pid"].as_i64().unwrap();
    let engine = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    // Stopped, so that it does not say what it works on itself.
    kill_process(engine, Signal::STOP).unwrap();
    let ledger = kept(&first, "portolan-ledger").swap_remove(0);
    // Of those that a new socket holds at first the last ones come round again and again.
    let frame_1000: u64 = AGAIN | 1001;
    ledger
        .write_all_at(&frame_1000.to_ne_bytes(), WORKING_FRAME)
        .unwrap();
    kill_process(engine, Signal::KILL).unwrap();
    until_counted(one, 0, "poisoned_frames", || ping(one, "2", "2000"));
    assert_eq!(counter(one, 0, "poisoned_frames"), 1);
}

// The index of each ring between a node's engines jumps. Expect: counted, and frames cross again.
#[test]
fn a_ring_between_engines_that_makes_no_sense() {
    let lab = Lab::builder().name("ptra").queues(2).build().unwrap();
    let (one, two) = (lab.node(1), lab.node(2));
    let [first, _second] = [one, two].map(|node| node.start_daemon("").unwrap());
    let rings = kept(&first, "portolan-crossing");
    assert!(rings.len() >= 2, "{rings:?}");
    for ring in &rings {
        ring.write_all_at(&100_000_u64.to_ne_bytes(), 0).unwrap();
    }
    for engine in [0, 1] {
        until_counted(one, engine, "crossing_bad", || ping(one, "2", "20"));
    }
    ping(two, "1", "100");
}
