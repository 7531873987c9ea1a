//! Engines killed with SIGKILL under load: the next one takes over the same socket, ledger and ports; applications stay attached,
//! nothing is lost, nothing comes twice, nothing changes its order.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::harness::crowd::{all_go_on, all_is_well, begin, kill, talk};
use crate::harness::exchange::{exchange_counting, options};
use crate::harness::talker::Talking;
use crate::harness::{Cluster, STEP, until};
use portolan::{Address, Event, Priority, Reason, SendOptions, Status};
use portolan_abi::ledger::{LedgerGeometry, ReceiveRecord, SendRecord, pair, unpair};
use portolan_abi::memory::LedgerMapping;
use portolan_testbed::{Daemon, Encap, Lab};
use rustix::process::{Pid, Signal, kill_process};

/// An engine is back within this.
const BACK: Duration = Duration::from_secs(10);
/// Waits until every engine runs and none is one of those killed.
fn wait_replaced(daemon: &Daemon, killed: &[i32]) {
    let replaced = |status: &serde_json::Value| {
        status["engines"].as_array().is_some_and(|engines| {
            engines.iter().all(|e| {
                let fresh = killed.iter().all(|&pid| e["pid"] != pid);
                e["state"] == "running" && fresh
            })
        })
    };
    daemon
        .wait_status("the killed engine is replaced", BACK, replaced)
        .unwrap();
}

/// Kills engines of these nodes under load, round by round; then everything must have come, once and in order.
fn survive(cluster: &Cluster, mut all: Vec<Talking>, rounds: &[&[(u16, usize)]]) {
    begin(&mut all);
    let mut outages = Vec::new();
    for round in rounds {
        let killed: Vec<(u16, i32)> = round
            .iter()
            .map(|&(node, queue)| (node, cluster.daemon(node).engine_pids().unwrap()[queue]))
            .collect();
        let start = Instant::now();
        for (_, pid) in &killed {
            kill(*pid);
        }
        for talking in &mut all {
            talking.deliver(1, STEP);
        }
        outages.push(start.elapsed());
        for &(node, pid) in &killed {
            wait_replaced(cluster.daemon(node), &[pid]);
        }
        all_go_on(&mut all);
    }
    println!(
        "{} rounds; everybody had delivered again after at most {:?}",
        rounds.len(),
        outages.iter().max().unwrap()
    );
    let queues = cluster.lab.spec().queues;
    for talking in &all {
        let Address { node, port } = talking.address;
        let engine = (node.0, usize::from(port.0 % queues));
        let deaths = rounds.iter().filter(|r| r.contains(&engine)).count();
        let told = talking.faults();
        assert_eq!(told, deaths as u64, "{} is told of each", talking.address);
    }
    all_is_well(all);
}

#[test]
fn streams_between_nodes_survive_either_engine_and_both() {
    let cluster = Cluster::start(Lab::builder());
    let all = vec![
        talk(&cluster, (1, 10), &[(2, 10), (2, 11)]),
        talk(&cluster, (1, 11), &[(2, 10), (2, 11)]),
        talk(&cluster, (2, 10), &[(1, 10), (1, 11)]),
        talk(&cluster, (2, 11), &[(1, 10), (1, 11)]),
    ];
    let rounds: [&[(u16, usize)]; 3] = [&[(1, 0)], &[(2, 0)], &[(1, 0), (2, 0)]];
    survive(&cluster, all, &rounds.repeat(5));
}

#[test]
fn streams_survive_over_ethernet_with_jumbo_frames() {
    let cluster = Cluster::start(Lab::builder().encap(Encap::Ethernet).mtu(9000));
    let all = vec![
        talk(&cluster, (1, 10), &[(2, 10)]),
        talk(&cluster, (2, 10), &[(1, 10)]),
    ];
    let rounds: [&[(u16, usize)]; 2] = [&[(1, 0)], &[(2, 0)]];
    survive(&cluster, all, &rounds.repeat(5));
}

// Also the rings between the engines of a node outlive them.
#[test]
fn streams_between_two_engines_of_a_node_survive_either() {
    let cluster = Cluster::start(Lab::builder().queues(2));
    let all = vec![
        talk(&cluster, (1, 10), &[(1, 11), (2, 11)]),
        talk(&cluster, (1, 11), &[(1, 10), (2, 10)]),
        talk(&cluster, (2, 10), &[(1, 11), (2, 11)]),
        talk(&cluster, (2, 11), &[(1, 10), (2, 10)]),
    ];
    let rounds: [&[(u16, usize)]; 4] = [&[(1, 0)], &[(1, 1)], &[(2, 1)], &[(1, 0), (1, 1)]];
    survive(&cluster, all, &rounds.repeat(3));
}

/// Does a process run only when nobody else wants to (field 41 of proc_pid_stat(5))?
fn is_in_background(pid: i32) -> bool {
    const SCHED_IDLE: &str = "5";
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false; // gone
    };
    let after_name = stat.rsplit(')').next().unwrap();
    after_name.split_whitespace().nth(41 - 3) == Some(SCHED_IDLE)
}

/// Ends those who spin, also when the test fails: their scope waits for them.
struct EndsSpinning<'a>(&'a AtomicBool);

impl Drop for EndsSpinning<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

// No processor is ever idle, and an engine is killed. Expect: it may make way for others while it dies, but not for long: what it holds of the kernel's
// locks the next standby and every other process wait for.
#[test]
fn a_dying_engine_does_not_starve() {
    const SPINNERS: usize = 8;
    let cluster = Cluster::start(Lab::builder());
    let daemon = cluster.daemon(1);
    let ready = |status: &serde_json::Value| status["engines"][0]["standby"] == "ready";
    daemon.wait_status("a standby", BACK, ready).unwrap();
    let over = AtomicBool::new(false);
    let processors = std::thread::available_parallelism().unwrap().get();
    std::thread::scope(|scope| {
        let _ends = EndsSpinning(&over);
        for _ in 0..SPINNERS * processors {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let dying = daemon.engine_pids().unwrap()[0];
        kill(dying);
        wait_replaced(daemon, &[dying]);
        let replaced = Instant::now();
        while is_in_background(dying) {
            let so_long = replaced.elapsed();
            assert!(so_long <= Duration::from_secs(2), "in the background still");
            std::thread::yield_now();
        }
        daemon.wait_status("the next standby", BACK, ready).unwrap();
    });
}

// Messages of megabytes are under way whenever an engine dies. Expect: each delivered, every byte right, in order.
#[test]
fn long_messages_survive() {
    const LARGEST: usize = 4 << 20;
    const DEATHS: u16 = 8;
    let cluster = Cluster::start(Lab::builder());
    let mut ports = [1, 2].map(|node| cluster.open(node, options(9, LARGEST)));
    let addresses = ports.each_ref().map(portolan::Port::address);
    let sizes: Vec<usize> = (0..8)
        .flat_map(|n| [LARGEST - n, 70_000 + n, 1000 + n])
        .collect();

    let enough = AtomicBool::new(false);
    let failed = AtomicBool::new(false);
    let count = AtomicU64::new(0);
    // Both sides begin each list together, and agree whether there is another.
    let together = Barrier::new(2);
    let run = |port: &mut portolan::Port, peer: Address| {
        loop {
            let result = exchange_counting(port, peer, &sizes, 2 * STEP, &count);
            failed.fetch_or(result.is_err(), Ordering::SeqCst);
            together.wait();
            let over = failed.load(Ordering::SeqCst) || enough.load(Ordering::SeqCst);
            together.wait();
            if result.is_err() || over {
                return result;
            }
        }
    };
    let [one, two] = &mut ports;
    let deaths = std::thread::scope(|scope| {
        let sides = [
            scope.spawn(|| run(one, addresses[1])),
            scope.spawn(|| run(two, addresses[0])),
        ];
        // Also if we fail here, or the sides would go on for ever.
        let last_list = OnDrop(&enough);
        let mut deaths = 0;
        while deaths < DEATHS && !failed.load(Ordering::SeqCst) {
            let goal = count.load(Ordering::Relaxed) + 5;
            until("more messages come", 2 * STEP, || {
                let go_on = count.load(Ordering::Relaxed) >= goal || failed.load(Ordering::SeqCst);
                go_on.then_some(())
            });
            let daemon = cluster.daemon(1 + deaths % 2);
            let pid = daemon.engine_pids().unwrap()[0];
            kill(pid);
            wait_replaced(daemon, &[pid]);
            deaths += 1;
        }
        drop(last_list);
        for side in sides {
            side.join().unwrap().unwrap();
        }
        deaths
    });
    assert_eq!(deaths, DEATHS);
}

/// Sets a flag at its end.
struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The geometry that a ledger's own header names: its third and fourth word.
fn geometry_of(ledger: &impl std::os::fd::AsFd) -> LedgerGeometry {
    let mut words = [0; 32];
    assert_eq!(rustix::io::pread(ledger, &mut words, 0).unwrap(), 32);
    let half = |at: usize| u32::from_le_bytes(words[at..at + 4].try_into().unwrap());
    LedgerGeometry {
        peers: half(16),
        frames: half(20),
        send_streams: half(24),
        receive_streams: half(28),
    }
}

// An engine that went wrong before it died has left records of frames that no engine writes, so that its successor cannot know whose any
// of them is: nothing it receives may be believed, and nothing ever goes back to the kernel. Expect: it says so, the queue is given
// another socket, whose records are new, and the node receives again.
#[test]
fn records_of_frames_that_cannot_be_true_cost_a_socket_and_not_the_node() {
    let cluster = Cluster::start_managed(Lab::builder());
    let daemon = cluster.daemon(1);
    let ledger = daemon.manager().unwrap().stored_fd("ledger-0").unwrap();
    let mapping = LedgerMapping::map(&ledger, geometry_of(&ledger)).unwrap();
    let engine = daemon.engine_pids().unwrap()[0];
    kill_process(Pid::from_raw(engine).unwrap(), Signal::STOP).unwrap();
    // Three quarters are for receiving, and come first.
    let records = mapping.ledger().frames();
    assert!(!records.is_empty());
    for record in &records[..records.len() / 4 * 3] {
        record.store(u64::MAX, Ordering::Release);
    }
    kill(engine);
    let reset = |status: &serde_json::Value| {
        let engine = &status["engines"][0];
        engine["state"] == "running" && engine["last_recovery"]["cause"] == "wedged"
    };
    daemon
        .wait_status("the queue is given another socket", BACK, reset)
        .unwrap();
    until("the other node reaches it", STEP, || {
        let mut ping = cluster.lab.node(2).portolan();
        let ping = ping.args(["ping", "1", "-c", "10"]).output().unwrap();
        ping.status.success().then_some(())
    });
}

// An engine that went wrong before it died has written over its ledger's epoch: with nothing, with a number from long before, from far ahead. Peers
// believe no engine whose epoch is lower than one they know. Expect: the successor's is the one after its predecessor's, and
// everybody goes on.
#[test]
fn an_epoch_that_cannot_be_true_is_not_gone_on_from() {
    let cluster = Cluster::start_managed(Lab::builder());
    let daemon = cluster.daemon(1);
    let ledger = daemon.manager().unwrap().stored_fd("ledger-0").unwrap();
    let mapping = LedgerMapping::map(&ledger, geometry_of(&ledger)).unwrap();
    let word = &mapping.ledger().header().engine_epoch;
    let mut all = vec![
        talk(&cluster, (1, 10), &[(2, 10)]),
        talk(&cluster, (2, 10), &[(1, 10)]),
    ];
    begin(&mut all);
    // One life without damage, so that there is something to fall behind.
    for (expected, damage) in [(2, None), (3, Some(0)), (4, Some(1)), (5, Some(1 << 31))] {
        let engine = daemon.engine_pids().unwrap()[0];
        kill_process(Pid::from_raw(engine).unwrap(), Signal::STOP).unwrap();
        if let Some(damage) = damage {
            word.store(damage, Ordering::Release);
        }
        kill(engine);
        wait_replaced(daemon, &[engine]);
        assert_eq!(word.load(Ordering::Acquire), expected, "after {damage:?}");
        all_go_on(&mut all);
    }
    all_is_well(all);
}

// An engine that went wrong before it died has written over what its supervisor wrote into its ledger and into a port's memory, by which every
// engine knows them. Expect: the standby that was there takes over, and the next ones find both as they should be; nobody notices more
// than two deaths.
#[test]
fn what_the_supervisor_wrote_is_written_again() {
    let cluster = Cluster::start_managed(Lab::builder());
    let daemon = cluster.daemon(1);
    let mut all = vec![
        talk(&cluster, (1, 10), &[(2, 10)]),
        talk(&cluster, (2, 10), &[(1, 10)]),
    ];
    begin(&mut all);
    let manager = daemon.manager().unwrap();
    let ledger = manager.stored_fd("ledger-0").unwrap();
    let mapping = LedgerMapping::map(&ledger, geometry_of(&ledger)).unwrap();
    let header = mapping.ledger().header();
    let name = (manager.stored().into_iter())
        .find(|name| name.starts_with("port-10-") && name.ends_with("-engine"));
    let half = manager.stored_fd(&name.expect("its memory")).unwrap();
    let engine = daemon.engine_pids().unwrap()[0];
    kill_process(Pid::from_raw(engine).unwrap(), Signal::STOP).unwrap();
    for word in [
        &header.magic,
        &header.version,
        &header.peers_frames,
        &header.streams,
        &header.incarnation,
    ] {
        word.store(0x5555_5555_5555_5555, Ordering::Release);
    }
    assert_eq!(rustix::io::pwrite(&half, &[0x55; 36], 0).unwrap(), 36);
    kill(engine);
    wait_replaced(daemon, &[engine]);
    let ready = |status: &serde_json::Value| status["engines"][0]["standby"] == "ready";
    daemon
        .wait_status("another standby is ready", BACK, ready)
        .unwrap();
    let engine = daemon.engine_pids().unwrap()[0];
    kill(engine);
    wait_replaced(daemon, &[engine]);
    all_go_on(&mut all);
    all_is_well(all);
}

// An engine that went wrong before it died has ended the tokens of a port in its ledger without a word to the application: buffers that nobody
// fills, sends that nobody knows of. Expect: the sends end as perhaps delivered, the buffers take messages again, and the port's stream goes
// on.
#[test]
fn tokens_that_a_damaged_engine_lost_come_back() {
    const BUFFERS: usize = 8;
    const SENDS: u64 = 4;
    let cluster = Cluster::start_managed(Lab::builder());
    let daemon = cluster.daemon(1);
    let ledger = daemon.manager().unwrap().stored_fd("ledger-0").unwrap();
    let mapping = LedgerMapping::map(&ledger, geometry_of(&ledger)).unwrap();
    let (receives, sends) = (mapping.ledger().receives(9), mapping.ledger().sends(9));
    let mut ports = [1, 2].map(|node| cluster.open(node, options(9, 4096)));
    let [one, two] = &mut ports;
    let addresses = [one.address(), two.address()];
    (0..BUFFERS).for_each(|_| provide(one));
    for tag in 0..SENDS {
        // Nobody has a buffer for them.
        let options = SendOptions {
            tag,
            ..SendOptions::default()
        };
        one.send_bytes(addresses[1], &[1; 1000], options).unwrap();
    }
    let out = || receives.iter().filter(|fact| is_out(fact));
    let under_way = || {
        let tag = |send: &&SendRecord| send.tag.load(Ordering::Acquire) != 0;
        sends.iter().filter(tag)
    };
    until("the engine has every token", STEP, || {
        (out().count() == BUFFERS && under_way().count() == SENDS as usize).then_some(())
    });

    let engine = daemon.engine_pids().unwrap()[0];
    kill_process(Pid::from_raw(engine).unwrap(), Signal::STOP).unwrap();
    for fact in out() {
        let (_, taken) = unpair(fact.load(Ordering::Acquire));
        fact.store(pair(taken, taken), Ordering::Release);
    }
    for send in under_way() {
        send.tag.store(0, Ordering::Release);
    }
    kill(engine);
    wait_replaced(daemon, &[engine]);

    for tag in 0..SENDS {
        let event = one.blocking_receive(STEP).unwrap();
        let Some(Event::Sent(sent)) = event else {
            panic!("{event:?}");
        };
        assert_eq!(
            (sent.tag, sent.status),
            (tag, Status::MaybeDelivered(Reason::Lost))
        );
    }
    assert_eq!(one.buffers_provided() as usize, BUFFERS);
    assert_eq!(one.anomalies(), BUFFERS as u64 + SENDS);
    takes_messages(one, two, 2 * BUFFERS as u64);
    provide(two);
    one.send_bytes(addresses[1], &[2; 1000], SendOptions::default())
        .unwrap();
    let came =
        std::iter::from_fn(|| two.blocking_receive(STEP).unwrap()).find_map(|event| match event {
            Event::Received(message) => Some(message[0]),
            _ => None,
        });
    assert_eq!(came, Some(2));
}

// An engine that went wrong before it died has written over what the ledger says of a port's generation. Expect: its successor takes the port over
// all the same, instead of opening it as a new one and forgetting its tokens.
#[test]
fn a_port_that_was_served_is_taken_over_whatever_the_ledger_says_of_it() {
    const BUFFERS: usize = 4;
    let cluster = Cluster::start_managed(Lab::builder());
    let daemon = cluster.daemon(1);
    let ledger = daemon.manager().unwrap().stored_fd("ledger-0").unwrap();
    let mapping = LedgerMapping::map(&ledger, geometry_of(&ledger)).unwrap();
    let receives = mapping.ledger().receives(9);
    let mut ports = [1, 2].map(|node| cluster.open(node, options(9, 4096)));
    let [one, two] = &mut ports;
    (0..BUFFERS).for_each(|_| provide(one));
    until("the engine has every buffer", STEP, || {
        let out = receives.iter().filter(|fact| is_out(fact));
        (out.count() == BUFFERS).then_some(())
    });

    let engine = daemon.engine_pids().unwrap()[0];
    kill_process(Pid::from_raw(engine).unwrap(), Signal::STOP).unwrap();
    let word = &mapping.ledger().ports()[9].events_settled;
    word.fetch_xor(1 << 48, Ordering::AcqRel);
    kill(engine);
    wait_replaced(daemon, &[engine]);

    takes_messages(one, two, 2 * BUFFERS as u64);
    assert_eq!(one.anomalies(), 0);
}

fn provide(port: &mut portolan::Port) {
    let buffer = port.allocate(4096).unwrap();
    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
}

/// So many messages, one after the other, each into a buffer that is there again afterwards.
fn takes_messages(to: &mut portolan::Port, from: &mut portolan::Port, messages: u64) {
    for tag in 0..messages {
        let options = SendOptions {
            tag,
            ..SendOptions::default()
        };
        from.send_bytes(to.address(), &[tag as u8; 1000], options)
            .unwrap();
        let event = to.blocking_receive(STEP).unwrap();
        let Some(Event::Received(message)) = event else {
            panic!("{event:?}");
        };
        assert_eq!((message.tag(), message[0]), (tag, tag as u8));
        to.provide_receive_buffer(message.into_buffer(), Priority::Low)
            .unwrap();
    }
}

/// Has the engine this receive token?
fn is_out(fact: &ReceiveRecord) -> bool {
    let (consumed, taken) = unpair(fact.load(Ordering::Acquire));
    consumed != taken
}
