//! `portolan doctor` on real interfaces: every fault that can be planted is found, with what mends it; a good node has none.

use std::process::Command;
use std::time::{Duration, Instant};

use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Steer, SteerConfig};
use portolan_testbed::{Binaries, DaemonOptions, Lab, Node, process};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::proc::cpu_latency_bound;
use crate::harness::running::Running;
use crate::harness::until;

const WITHIN: Duration = Duration::from_secs(20);

fn doctor_command(node: &Node, overrides: &str) -> Command {
    let config = node.write_config(overrides).unwrap();
    let mut command = node.command(Binaries::find().unwrap().cli().unwrap());
    command.args(["doctor", "--json", "--config"]).arg(config);
    command
}

fn findings(command: &mut Command) -> Vec<Value> {
    let finished = process::run(command, WITHIN).unwrap();
    let report: Value = serde_json::from_str(&finished.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", finished.stdout, finished.stderr));
    let bad = report["worst"] == "bad";
    assert_eq!(finished.status.code(), Some(i32::from(bad)), "{report}");
    report["findings"].as_array().unwrap().clone()
}

fn doctor(node: &Node, overrides: &str) -> Vec<Value> {
    findings(&mut doctor_command(node, overrides))
}

/// The one finding of this check and severity whose text has these words; its remedy.
#[track_caller]
fn found(findings: &[Value], check: &str, severity: &str, words: &[&str]) -> String {
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap_or("").to_owned();
    let mut meant = findings.iter().filter(|finding| {
        let what = text(finding, "what");
        finding["check"] == check
            && finding["severity"] == severity
            && words.iter().all(|word| what.contains(word))
    });
    let Some(finding) = meant.next() else {
        panic!("no {severity} of {check} with {words:?} in {findings:#?}");
    };
    text(finding, "mend")
}

#[track_caller]
fn nothing_bad(findings: &[Value]) {
    let bad: Vec<&Value> = findings.iter().filter(|f| f["severity"] == "bad").collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

fn ip(node: &Node, arguments: &str) {
    let mut command = node.command("ip");
    process::run_ok(command.args(arguments.split(' ')), WITHIN).unwrap();
}

/// Faults that need no daemon, planted one after the other and mended with the very command the doctor names.
#[test]
fn planted_faults_are_found_and_what_it_says_mends_them() {
    let lab = Lab::builder().name("ptdo").build().unwrap();
    let node = lab.node(1);
    let name = node.interface();
    nothing_bad(&doctor(node, ""));
    let mend = |command: &str| {
        let command = command.split('#').next().unwrap();
        process::run_ok(node.command("sh").args(["-c", command]), WITHIN).unwrap();
    };
    // Plant, check, severity, words.
    let faults = [
        (
            format!("ip link set dev {name} down"),
            "interface",
            "bad",
            "set down",
        ),
        (
            format!("ip link set dev {name} mtu 500"),
            "mtu",
            "bad",
            "500",
        ),
        (
            format!("ip link set dev {name} mtu 1000"),
            "mtu",
            "warn",
            "1000",
        ),
        (
            format!("ethtool -K {name} tx on tso on gso on"),
            "offloads",
            "warn",
            "TSO",
        ),
    ];
    for (plant, check, severity, word) in faults {
        mend(&plant);
        let remedy = found(&doctor(node, ""), check, severity, &[word, &name]);
        mend(&remedy);
        let after = doctor(node, "");
        found(&after, check, "ok", &[]);
        nothing_bad(&after);
    }
    // On a veth that is a choice.
    mend(&format!("ethtool -K {name} gro on"));
    found(&doctor(node, ""), "offloads", "ok", &["GRO", &name]);
    // The interface belongs to a bridge.
    ip(node, "link add br0 type bridge");
    ip(node, &format!("link set {name} master br0"));
    let remedy = found(&doctor(node, ""), "links", "bad", &["br0"]);
    mend(&remedy);
    nothing_bad(&doctor(node, ""));
}

#[test]
fn a_foreign_program_is_found_and_taken_off() {
    let lab = Lab::builder().name("ptdo").build().unwrap();
    let node = lab.node(1);
    let foreign = SteerConfig {
        encap: portolan_ebpf::Encap::Ethernet,
        ethertype: DEFAULT_ETHERTYPE + 1,
        udp_base_port: 9,
        queues: 1,
        local_mac: [0; 6],
        local_v4: None,
        local_v6: None,
    };
    let mut program = Steer::load(&foreign).unwrap();
    let attached = node.in_namespace(|| program.attach(&node.interface(), AttachMode::Native));
    attached.unwrap().unwrap();
    // It is a steering program, but no daemon's: somebody else's portoland.
    let remedy = found(&doctor(node, ""), "xdp", "warn", &["no daemon answers"]);
    assert!(remedy.contains("ss -xlp"), "{remedy}");
    drop(program);
    // Another's altogether: made by the kernel's own example, three instructions.
    let object = lab.directory().join("pass.o");
    let source = lab.directory().join("pass.c");
    std::fs::write(
        &source,
        "__attribute__((section(\"xdp\"), used)) int watchman(void *c) { return 2; }\n",
    )
    .unwrap();
    let mut clang = Command::new("clang");
    clang
        .args(["-O2", "-target", "bpf", "-c"])
        .arg(&source)
        .arg("-o")
        .arg(&object);
    process::run_ok(&mut clang, WITHIN).unwrap();
    let object = object.display();
    ip(
        node,
        &format!(
            "link set dev {} xdpgeneric obj {object} sec xdp",
            node.interface()
        ),
    );
    let remedy = found(&doctor(node, ""), "xdp", "bad", &["another XDP program"]);
    process::run_ok(node.command("sh").args(["-c", &remedy]), WITHIN).unwrap();
    found(&doctor(node, ""), "xdp", "ok", &["no XDP program"]);
}

// Peers: one that answers, one that is not there, one with another MAC than is written down, one to which no way leads.
#[test]
fn peers_that_cannot_be_reached_are_found() {
    let lab = Lab::builder().name("ptdo").build().unwrap();
    let node = lab.node(1);
    let peers = "[[peer]]\nid = 2\nname = \"two\"\naddress = \"10.77.0.2\"\n\
                 [[peer]]\nid = 3\nname = \"three\"\naddress = \"10.77.0.3\"\n\
                 [[peer]]\nid = 4\nname = \"four\"\naddress = \"172.20.1.4\"\n";
    let seen = doctor(node, peers);
    let remedy = found(
        &seen,
        "neighbours",
        "bad",
        &["peer 3 (three)", "nobody answers"],
    );
    assert!(remedy.contains("10.77.0.3"), "{remedy}");
    let remedy = found(&seen, "neighbours", "bad", &["peer 4 (four)", "no way"]);
    assert!(remedy.contains("ip route add 172.20.1.4"), "{remedy}");
    found(&seen, "neighbours", "ok", &["1 of 3"]);
    let wrong =
        "[[peer]]\nid = 2\nname = \"two\"\naddress = \"10.77.0.2\"\nmac = \"02:00:00:00:00:99\"\n";
    let remedy = found(
        &doctor(node, wrong),
        "neighbours",
        "bad",
        &["02:00:00:00:00:99"],
    );
    assert!(remedy.contains(&lab.node(2).mac()), "{remedy}");
}

#[test]
fn a_low_memlock_limit_and_a_wrong_file_are_found() {
    let lab = Lab::builder().name("ptdo").build().unwrap();
    let node = lab.node(1);
    let config = node.write_config("").unwrap();
    let mut limited = node.command("prlimit");
    limited.args([
        "--memlock=65536:65536",
        "setpriv",
        "--bounding-set=-ipc_lock",
        "--inh-caps=-ipc_lock",
    ]);
    limited.arg(Binaries::find().unwrap().cli().unwrap());
    limited.args(["doctor", "--json", "--config"]).arg(config);
    let remedy = found(&findings(&mut limited), "memlock", "bad", &["65536"]);
    assert!(remedy.contains("LimitMEMLOCK"), "{remedy}");
    // A mistake in the file: named, and the rest is looked at all the same.
    let seen = doctor(node, "[engine]\nwait = \"sometimes\"");
    found(&seen, "configuration", "bad", &["sometimes"]);
    found(&seen, "interface", "ok", &[&node.interface()]);
}

// With a daemon: its engines, its program, a peer whose frames are shorter, another cluster's node.
#[test]
fn a_running_node_is_looked_at_too() {
    let lab = Lab::builder().name("ptdo").mtu(9000).build().unwrap();
    let node = lab.node(1);
    ip(
        lab.node(2),
        &format!("link set dev {} mtu 4000", lab.node(2).interface()),
    );
    let one = node.start_daemon("").unwrap();
    let two = lab.node(2).start_daemon("").unwrap();
    process::run_ok(node.portolan().args(["ping", "2", "-c", "10"]), WITHIN).unwrap();
    let deadline = Instant::now() + WITHIN;
    let seen = loop {
        let seen = doctor(node, "");
        let known = seen.iter().any(|finding| finding["check"] == "peer mtu");
        if known || Instant::now() > deadline {
            break seen;
        }
    };
    nothing_bad(&seen);
    found(&seen, "peer mtu", "warn", &["peer 2 (ptl2)"]);
    found(&seen, "daemon", "ok", &["node 1 (ptl1) runs, 1 engines"]);
    found(&seen, "xdp", "ok", &["our program", "generic"]);
    // How long a processor takes to wake, where engines let theirs sleep.
    let several = std::thread::available_parallelism().unwrap().get() > 1;
    let measured = match several {
        true => "us to wake",
        false => "one processor",
    };
    for (wait, word) in [("busy", "engines never sleep"), ("adaptive", measured)] {
        let seen = doctor(node, &format!("[engine]\nwait = \"{wait}\""));
        let finding = seen.iter().find(|finding| finding["check"] == "wake-up");
        let what = finding.unwrap()["what"].as_str().unwrap();
        assert!(what.contains(word), "{wait}: {what}");
    }
    // A bound that the file has and the daemon has not, until it is told.
    let bounded = "[node]\ncpu_latency_us = 70";
    let remedy = found(&doctor(node, bounded), "cpu latency", "warn", &["70"]);
    assert!(remedy.contains("reload"), "{remedy}");
    let pid = Pid::from_raw(one.pid()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    if cpu_latency_bound().is_some() {
        let holds = |status: &Value| status["node"]["cpu_latency_us"] == 70;
        one.wait_status("the bound", WITHIN, holds).unwrap();
        found(&doctor(node, bounded), "cpu latency", "ok", &["70"]);
    }
    drop(two);
    let _other = lab
        .node(2)
        .start_daemon("[cluster]\nname = \"other\"")
        .unwrap();
    let mut ping = node.portolan();
    ping.args(["ping", "2", "-c", "1", "--timeout", "1"]);
    assert!(!process::run(&mut ping, WITHIN).unwrap().status.success());
    let remedy = found(&doctor(node, ""), "peers", "bad", &["peer 2", "cluster"]);
    assert!(remedy.contains("cluster.name"), "{remedy}");
}

/// Whether the kernel shares a core among sessions first: it does so among those that no control group has a share for.
fn sessions_share() -> bool {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let groups = read("/proc/self/cgroup");
    let mut shares = groups.lines().filter(|line| {
        let controllers = line.split(':').nth(1).unwrap_or_default();
        controllers.is_empty() || controllers.split(',').any(|name| name == "cpu")
    });
    let space = std::fs::read_link("/proc/self/ns/cgroup").unwrap();
    // The root that a container sees is none.
    space.to_str() == Some("cgroup:[4026531835]")
        && read("/proc/sys/kernel/sched_autogroup_enabled").trim() == "1"
        && shares.all(|line| line.ends_with(":/"))
}

// An application that has no core but its engine's: in the daemon's session, in another one, beside an engine that spins; and one that may run elsewhere. Expect: only the second and
// the third are named, and a core of its own, as it is said, mends that.
#[test]
fn who_is_at_odds_with_its_engine_over_a_core_is_found() {
    if std::thread::available_parallelism().unwrap().get() < 2 {
        eprintln!("skipped: with one core nobody can be given another");
        return;
    }
    let lab = Lab::builder().name("ptdo").build().unwrap();
    let node = lab.node(1);
    let open = |cores: &str, port: u16| {
        let mut command = node.command("taskset");
        command.arg("-c").arg(cores);
        command.arg(Binaries::find().unwrap().cli().unwrap());
        let mut echo = Running::start(
            command
                .arg("--socket")
                .arg(node.socket())
                .args(["echo", &port.to_string()]),
        );
        until("the port is open", WITHIN, || echo.open(node, port));
        echo
    };
    let started = |wait: &str, session: bool| {
        node.start_daemon_with(&DaemonOptions {
            overrides: format!("[engine]\ncores = [0]\nwait = \"{wait}\"\n"),
            session,
            ..DaemonOptions::default()
        })
        .unwrap()
    };
    let fine = |many: u32| {
        let many = format!("{many} applications, none at odds");
        found(&doctor(node, ""), "sharing", "ok", &[&many]);
    };
    let daemon = started("adaptive", false);
    fine(0);
    let _beside = open("0", 7);
    let _elsewhere = open("0,1", 8);
    fine(2);
    drop(daemon);
    if sessions_share() {
        let daemon = started("adaptive", true);
        let echo = open("0", 7);
        let seen = doctor(node, "");
        let remedy = found(&seen, "sharing", "warn", &["port 7", "[0]", "session"]);
        assert!(remedy.contains("sched_autogroup_enabled=0"), "{remedy}");
        let (_, own) = remedy.split_once("own: ").unwrap();
        process::run_ok(node.command("sh").args(["-c", own]), WITHIN).unwrap();
        fine(1);
        drop((echo, daemon));
    }
    let _daemon = started("busy", false);
    let _echo = open("0", 7);
    let seen = doctor(node, "");
    let remedy = found(&seen, "sharing", "warn", &["port 7", "[0]", "spins"]);
    process::run_ok(node.command("sh").args(["-c", &remedy]), WITHIN).unwrap();
    fine(1);
}
