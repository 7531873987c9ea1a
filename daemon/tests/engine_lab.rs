//! Two real daemons in two network namespaces: applications exchange messages over AF_XDP, through engines that are killed, and
//! beside applications that write nonsense into their memory. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod hostile_application;

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use portolan::{
    Event, Message, Node, Port, PortOptions, Priority, Report, SendOptions, Status, Wait,
};
use portolan_testbed::{Daemon, Encap, Lab};
use rustix::process::{Pid, Signal, kill_process};

/// Bound on one exchange.
const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough for every pause the tests cause.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

fn port(lab: &Lab, node: u16, number: u16) -> Port {
    let node = Node::attach(lab.node(node).socket()).unwrap();
    let options = PortOptions {
        arena_bytes: 64 << 20,
        wait: Wait::Yield,
        ..PortOptions::at(number)
    };
    let mut port = node.open_port(options).unwrap();
    for (len, count) in [
        (64, 24),
        (2048, 24),
        (16 << 10, 12),
        (256 << 10, 6),
        (4 << 20, 3),
    ] {
        for _ in 0..count {
            let buffer = port.allocate(len).unwrap();
            port.provide_receive_buffer(buffer, Priority::Low).unwrap();
        }
    }
    port
}

fn byte(seed: u64, at: usize) -> u8 {
    (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8
        ^ (at as u8).wrapping_mul(31)
        ^ (at >> 8) as u8
}

/// One direction of an exchange: what is still to be sent, and what the other end expects.
struct Flow {
    from: usize,
    to: usize,
    unsent: VecDeque<usize>,
    expected: VecDeque<usize>,
    sent: u64,
    received: u64,
    ended: usize,
}

/// Sends messages of these sizes over every flow (sender, receiver) at once and checks every byte, the order, and every status.
/// `between` is called after each message that arrives, with how many have.
fn exchange(
    ports: &mut [Port],
    flows: &[(usize, usize)],
    sizes: &[usize],
    mut between: impl FnMut(usize),
) {
    let deadline = Instant::now() + PATIENCE;
    let mut flows: Vec<Flow> = flows
        .iter()
        .map(|&(from, to)| Flow {
            from,
            to,
            unsent: sizes.iter().copied().collect(),
            expected: sizes.iter().copied().collect(),
            sent: 0,
            received: 0,
            ended: 0,
        })
        .collect();
    let addresses: Vec<_> = ports.iter().map(Port::address).collect();
    let mut arrived = 0;
    while flows
        .iter()
        .any(|flow| flow.ended < sizes.len() || !flow.expected.is_empty())
    {
        assert!(Instant::now() < deadline, "stuck: {:?}", progress(&flows));
        for flow in &mut flows {
            let sender = &mut ports[flow.from];
            while sender.sends_outstanding() < 16
                && let Some(&len) = flow.unsent.front()
            {
                let Ok(mut buffer) = sender.allocate(len.max(1)) else {
                    break;
                };
                for (at, to) in buffer[..len].iter_mut().enumerate() {
                    *to = byte(flow.sent ^ flow.from as u64, at);
                }
                let options = SendOptions {
                    tag: flow.sent,
                    timeout: Some(SEND_TIMEOUT),
                    ..SendOptions::default()
                };
                sender
                    .send_bytes(addresses[flow.to], &buffer[..len], options)
                    .unwrap();
                flow.unsent.pop_front();
                flow.sent += 1;
            }
        }
        for (index, port) in ports.iter_mut().enumerate() {
            while let Some(event) = port.receive().unwrap() {
                match event {
                    Event::Received(message) => {
                        let flow = flows
                            .iter_mut()
                            .find(|f| f.to == index && addresses[f.from] == message.from())
                            .expect("a message nobody sent");
                        let len = flow.expected.pop_front().expect("more than was sent");
                        assert_eq!((message.len(), message.tag()), (len, flow.received));
                        for (at, is) in message.iter().enumerate() {
                            assert_eq!(*is, byte(flow.received ^ flow.from as u64, at));
                        }
                        flow.received += 1;
                        arrived += 1;
                        provide_again(port, message);
                        between(arrived);
                    }
                    Event::Sent(sent) => {
                        assert_eq!(sent.status, Status::Delivered, "to {}", sent.to);
                        let flow = flows
                            .iter_mut()
                            .find(|f| f.from == index && addresses[f.to] == sent.to)
                            .expect("a send nobody made");
                        flow.ended += 1;
                    }
                    other => port.unknown(other),
                }
            }
        }
        std::thread::yield_now();
    }
    for port in ports {
        assert_eq!(port.anomalies(), 0);
    }
}

fn progress(flows: &[Flow]) -> Vec<(u64, u64, usize)> {
    flows
        .iter()
        .map(|f| (f.sent, f.received, f.ended))
        .collect()
}

/// Around every boundary there is: inline, one frame at either MTU, eager, grants.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1, 79, 80, 81, 500];
    for around in [1400, 1472, 4096, 8900, 8972, 1 << 16, 1 << 18] {
        sizes.extend([around - 1, around, around + 1]);
    }
    sizes.extend([1 << 20, (2 << 20) + 7]);
    sizes
}

fn daemons(lab: &Lab, overrides: &str) -> Vec<Daemon> {
    (1..=2)
        .map(|id| lab.node(id).start_daemon(overrides).unwrap())
        .collect()
}

fn restarts(daemon: &Daemon) -> u64 {
    let status = daemon.status().unwrap();
    let engines = status["engines"].as_array().unwrap();
    engines
        .iter()
        .map(|e| e["restarts"].as_u64().unwrap())
        .sum()
}

#[test]
fn every_size_travels_both_ways_over_every_encapsulation_and_mtu() {
    for encap in [Encap::Udp4, Encap::Udp6, Encap::Ethernet] {
        for mtu in [1500, 9000] {
            let lab = Lab::builder().encap(encap).mtu(mtu).build().unwrap();
            let daemons = daemons(&lab, "");
            let mut ports = [port(&lab, 1, 5), port(&lab, 2, 5)];
            exchange(&mut ports, &[(0, 1), (1, 0)], &sizes(), |_| {});
            assert_eq!(
                daemons.iter().map(restarts).sum::<u64>(),
                0,
                "{encap} {mtu}"
            );
        }
    }
}

#[test]
fn ports_of_two_engines_reach_each_other_here_and_there() {
    let lab = Lab::builder().queues(2).build().unwrap();
    let _daemons = daemons(&lab, "");
    // Even ports belong to the first engine of a node, odd ones to the second.
    let mut ports = [
        port(&lab, 1, 4),
        port(&lab, 1, 5),
        port(&lab, 2, 4),
        port(&lab, 2, 5),
    ];
    let all: Vec<(usize, usize)> = (0..4).flat_map(|a| (0..4).map(move |b| (a, b))).collect();
    exchange(&mut ports, &all, &sizes(), |_| {});
    let counters = lab.node(1).report("counters").unwrap();
    for (engine, counter) in [(0, "crossed"), (1, "crossing_received")] {
        let count = &counters["engines"][engine]["counters"][counter];
        assert!(count.as_u64() > Some(0), "{counter}: {counters}");
    }
}

#[test]
fn every_way_of_waiting_works() {
    for wait in ["busy", "yield", "adaptive"] {
        let lab = Lab::builder().build().unwrap();
        let _daemons = daemons(&lab, &format!("[engine]\nwait = \"{wait}\""));
        let mut ports = [port(&lab, 1, 5), port(&lab, 2, 5)];
        exchange(&mut ports, &[(0, 1), (1, 0)], &sizes(), |_| {});
        // Nothing to do for a while. Expect: it still wakes for the next message.
        for port in &mut ports {
            assert!(
                port.blocking_receive(Duration::from_millis(150))
                    .unwrap()
                    .is_none()
            );
        }
        exchange(&mut ports, &[(0, 1), (1, 0)], &[1, 100_000], |_| {});
    }
}

/// Kills engines, one after the other, while messages go over every flow.
fn kill_engines(queues: u16, mtu: u32, numbers: &[u16], messages: usize) {
    let lab = Lab::builder().queues(queues).mtu(mtu).build().unwrap();
    let daemons = daemons(&lab, "");
    let mut ports: Vec<Port> = (1..=2)
        .flat_map(|node| numbers.iter().map(move |number| (node, *number)))
        .map(|(node, number)| port(&lab, node, number))
        .collect();
    let all = 0..ports.len();
    let flows: Vec<(usize, usize)> = all
        .clone()
        .flat_map(|a| all.clone().map(move |b| (a, b)))
        .collect();
    let sizes: Vec<usize> = sizes().into_iter().cycle().take(messages).collect();
    let every = flows.len() * messages / 12;
    let mut kills = 0;
    exchange(&mut ports, &flows, &sizes, |arrived| {
        if arrived % every == 0 {
            let status = daemons[kills % 2].status().unwrap();
            let engines = status["engines"].as_array().unwrap();
            // Between two engines of a queue there is none to kill.
            if let Some(pid) = engines[kills / 2 % engines.len()]["pid"].as_i64() {
                let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                kill_process(pid, Signal::KILL).unwrap();
                kills += 1;
            }
        }
    });
    assert!(kills >= 5, "only {kills} engines were killed");
    let recovered: u32 = ports.iter().map(Port::faults_recovered).sum();
    assert!(recovered > 0);
}

#[test]
fn engines_killed_under_load_lose_and_double_nothing() {
    kill_engines(1, 1500, &[5], 100);
}

#[test]
fn engines_of_several_queues_killed_under_load_lose_and_double_nothing() {
    kill_engines(2, 9000, &[4, 5], 40);
}

/// The port of the application that is killed.
const VICTIM: u16 = 50;
const VICTIM_SOCKET: &str = "PORTOLAN_TEST_VICTIM";

/// The buffer of a message that was seen takes another.
fn provide_again(port: &mut Port, message: Message) {
    let priority = message.priority();
    port.provide_receive_buffer(message.into_buffer(), priority)
        .unwrap();
}

/// Not a test by itself: the application that is killed, in a process of its own.
#[test]
fn victim() {
    let Some(socket) = std::env::var_os(VICTIM_SOCKET) else {
        return;
    };
    let mut port = Node::attach(socket)
        .unwrap()
        .open_port(PortOptions::at(VICTIM))
        .unwrap();
    for _ in 0..64 {
        let buffer = port.allocate(64 << 10).unwrap();
        port.provide_receive_buffer(buffer, Priority::Low).unwrap();
    }
    loop {
        while port.sends_outstanding() < 8 {
            let message = [7; 20_000];
            port.send_bytes((1, 5), &message, SendOptions::default())
                .unwrap();
        }
        if let Some(Event::Received(message)) = port.blocking_receive(PATIENCE).unwrap() {
            provide_again(&mut port, message);
        }
    }
}

/// Descriptors of a process by what they are, and its port mappings.
fn holdings(pid: i32) -> (BTreeMap<String, usize>, usize) {
    let mut kinds = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        // Closed meanwhile.
        if let Ok(link) = std::fs::read_link(entry.unwrap().path()) {
            let kind = link.display().to_string();
            let kind = kind.split(":[").next().unwrap_or_default().to_owned();
            *kinds.entry(kind).or_default() += 1;
        }
    }
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let halves = maps.lines().filter(|line| line.contains("-half")).count();
    (kinds, halves)
}

/// Waits until a daemon knows the victim's port no longer. It does one thing after the other: by its answer it has let go of everything.
fn wait_let_go(node: &Node) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let document = node.report(Report::Ports).unwrap();
        let mut ports = document["ports"].as_array().unwrap().iter();
        if ports.all(|port| port["port"] != VICTIM) {
            return;
        }
        assert!(Instant::now() < deadline, "{document}");
    }
}

#[test]
fn an_application_that_is_killed_leaves_nothing_behind() {
    const KILLS: usize = 100;
    let lab = Lab::builder().build().unwrap();
    // An engine that goes round for frames has the supervisor open a socket for it, and note that GRO is on, whenever there happen to be many of them.
    let daemons = daemons(&lab, "[network]\nbusy_poll = \"never\"");
    let mut port = port(&lab, 1, 5);
    let mut bystanders = [self::port(&lab, 1, 6), self::port(&lab, 2, 6)];
    let engine = daemons[1].engine_pids().unwrap()[0];
    // A standby is two descriptors more.
    let ready = |status: &serde_json::Value| status["engines"][0]["standby"] == "ready";
    daemons[1]
        .wait_status("a standby is ready", PATIENCE, ready)
        .unwrap();
    // Attached once, so that asking opens nothing.
    let asker = Node::attach(lab.node(2).socket()).unwrap();
    let settled = || {
        wait_let_go(&asker);
        (holdings(engine), holdings(daemons[1].pid()))
    };
    let mut before = None;
    let mut closing = Vec::new();
    for round in 0..KILLS {
        let mut application = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["victim", "--exact"])
            .env(VICTIM_SOCKET, lab.node(2).socket())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut heard = 0;
        let mut killed = None;
        loop {
            assert!(Instant::now() < deadline, "round {round}: heard {heard}");
            // Both ways: the killed application is always sending and receiving.
            while heard > 0 && port.sends_outstanding() < 8 {
                let message = [9; 20_000];
                port.send_bytes((2, VICTIM), &message, SendOptions::default())
                    .unwrap();
            }
            match port.blocking_receive(PATIENCE).unwrap() {
                Some(Event::Received(message)) => {
                    heard += 1;
                    provide_again(&mut port, message);
                }
                Some(Event::Sent(sent)) => match sent.status {
                    Status::Delivered => {}
                    Status::NotDelivered(reason) => {
                        assert_eq!(reason, portolan::Reason::PortClosed);
                        assert!(killed.is_some(), "closed before it was killed");
                        break;
                    }
                    Status::MaybeDelivered(reason) => panic!("perhaps: {reason:?}"),
                },
                _ => panic!("silence"),
            }
            if heard == 20 && killed.is_none() {
                application.kill().unwrap();
                killed = Some(Instant::now());
            }
        }
        closing.push(killed.unwrap().elapsed());
        application.wait().unwrap();
        // The failed send held back those behind it.
        port.drop_sends((2, VICTIM), Priority::Low).unwrap();
        while port.sends_outstanding() > 0 {
            match port.blocking_receive(PATIENCE).unwrap() {
                Some(Event::Received(message)) => provide_again(&mut port, message),
                Some(Event::Sent(sent)) => assert_ne!(sent.status, Status::Delivered),
                _ => panic!("silence"),
            }
        }
        // Those that were under way when it was closed may have failed after `drop_sends`.
        port.resume_sending((2, VICTIM), Priority::Low).unwrap();
        if round % 10 == 0 {
            exchange(
                &mut bystanders,
                &[(0, 1), (1, 0)],
                &[10, 10_000, 100_000],
                |_| {},
            );
        }
        // The first rounds grow what grows once.
        if round == 5 {
            before = Some(settled());
        }
    }
    assert_eq!(
        before,
        Some(settled()),
        "descriptors and mappings of engine and supervisor"
    );
    closing.sort_unstable();
    let median = closing[KILLS / 2];
    assert!(
        median < Duration::from_millis(100),
        "closed and told after {median:?}"
    );
    assert_eq!(daemons.iter().map(restarts).sum::<u64>(), 0);
}

#[test]
fn applications_that_write_nonsense_harm_nobody_else() {
    const ROUNDS: u32 = 300;
    let lab = Lab::builder().build().unwrap();
    let daemons = daemons(&lab, "");
    let mut ports = [port(&lab, 1, 5), port(&lab, 2, 5)];
    let socket = lab.node(1).socket();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let opened = std::thread::scope(|scope| {
        let spoiler = scope.spawn(|| {
            let mut state = 0x1234_5678_9ABC_DEF0u64;
            let mut next = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Small numbers look like slots and generations.
                if state & 3 == 0 {
                    state
                } else {
                    state & 0x0000_0007_0000_001F
                }
            };
            let mut opened = 0;
            while opened < ROUNDS && !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let Some(hostile) = hostile_application::Application::open(&socket, 100) else {
                    std::thread::yield_now();
                    continue;
                };
                opened += 1;
                // Makes every ring of its doorbell wait, if it can.
                for bell in &hostile.bells {
                    let flags = rustix::fs::fcntl_getfl(bell).unwrap();
                    let blocking = flags.difference(rustix::fs::OFlags::NONBLOCK);
                    rustix::fs::fcntl_setfl(bell, blocking).unwrap();
                }
                for round in 0..4 {
                    hostile.scribble(&mut next, round % 2 == 0);
                    hostile.produce(next() as u32 % 8);
                    std::thread::yield_now();
                }
            }
            opened
        });
        let sizes: Vec<usize> = sizes().into_iter().cycle().take(200).collect();
        while !spoiler.is_finished() {
            exchange(&mut ports, &[(0, 1), (1, 0)], &sizes, |_| {});
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        spoiler.join().unwrap()
    });
    assert_eq!(opened, ROUNDS);
    // No engine died or was replaced, and ports were closed for cause.
    assert_eq!(daemons.iter().map(restarts).sum::<u64>(), 0);
    let counters = lab.node(1).report("counters").unwrap();
    assert!(
        counters["engines"][0]["counters"]["ports_failed"]
            .as_u64()
            .unwrap()
            > 0
    );
}
