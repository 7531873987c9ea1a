//! Configurations and machines the daemon cannot run with. Expect, of each: it does not start, says in one line what to do, and
//! leaves nothing behind.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Steer, SteerConfig};
use portolan_testbed::{Binaries, Encap, Lab, Node, process};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

const WITHIN: Duration = Duration::from_secs(10);

/// What a daemon that did not start said: one line, and what to do.
#[track_caller]
fn assert_refused(what: &str, command: &mut Command, words: &[&str]) {
    let finished = process::run(command, WITHIN).unwrap();
    let said = &finished.stderr;
    assert!(!finished.status.success(), "`{what}`: it started\n{said}");
    assert!(
        finished.status.code().is_some(),
        "`{what}`: {}\n{said}",
        finished.status
    );
    // What it logged of a good start until then is no error.
    let errors: Vec<&str> = said
        .lines()
        .filter(|line| !line.contains(" INFO "))
        .collect();
    let [error] = errors[..] else {
        panic!("`{what}` is not one line:\n{said}");
    };
    for word in words {
        assert!(error.contains(word), "`{what}`: no `{word}` in\n{error}");
    }
    assert!(!error.contains("panicked"), "`{what}`: {error}");
    eprintln!("{what}: {error}");
}

fn daemon(node: &Node, config: &Path) -> Command {
    let mut command = node.portoland().unwrap();
    command.arg("--config").arg(config);
    command
}

/// The daemon by way of another program that takes something away from it first.
fn daemon_through(node: &Node, wrapper: &[&str], program: &Path, config: &Path) -> Command {
    let mut command = node.command(wrapper[0]);
    command
        .args(&wrapper[1..])
        .arg(program)
        .arg("--config")
        .arg(config);
    command
}

fn program() -> PathBuf {
    Binaries::find().unwrap().daemon().unwrap()
}

/// Nothing of a daemon that did not start is left: no socket, no program on the interface.
#[track_caller]
fn assert_clean(node: &Node) {
    let mut show = node.command("ip");
    show.args(["-d", "link", "show", "dev", &node.interface()]);
    let link = process::run_ok(&mut show, WITHIN).unwrap();
    assert!(!link.contains("prog/xdp"), "{link}");
    assert!(!node.socket().exists());
}

/// A configuration that is wrong in one way, and what must be said about it beside its file and line.
struct Row {
    what: &'static str,
    overrides: &'static str,
    words: &'static [&'static str],
}

const ROWS: &[Row] = &[
    Row {
        what: "an unknown key",
        overrides: "[engine]\nwiat = \"busy\"",
        words: &["wiat", "remove it or correct its spelling"],
    },
    Row {
        what: "an unknown table",
        overrides: "[engines]\nwait = \"busy\"",
        words: &["engines", "remove it or correct its spelling"],
    },
    Row {
        what: "a value of no such kind",
        overrides: "[engine]\nwait = \"sometimes\"",
        words: &["sometimes"],
    },
    Row {
        what: "a missing interface",
        overrides: "[network]\ninterface = \"nowhere0\"",
        words: &["nowhere0", "ip link"],
    },
    Row {
        what: "a peer with our own id",
        overrides: "[[peer]]\nid = 1\nname = \"other\"\naddress = \"10.77.0.9\"\nmac = \"02:00:00:00:00:09\"",
        words: &["1", "every node"],
    },
    Row {
        what: "two peers with one id",
        overrides: "[[peer]]\nid = 2\nname = \"two\"\naddress = \"10.77.0.2\"\n\
                    [[peer]]\nid = 2\nname = \"too\"\naddress = \"10.77.0.3\"",
        words: &["2", "every node"],
    },
    Row {
        what: "a node id that cannot be",
        overrides: "[node]\nid = 65535",
        words: &["node.id", "1 to 65534"],
    },
    Row {
        what: "processors kept awake for too long",
        overrides: "[engine]\nkeep_awake_ms = 3600001",
        words: &["engine.keep_awake_ms", "0 to 3600000"],
    },
    Row {
        what: "a bound on wake-ups that cannot be",
        overrides: "[node]\ncpu_latency_us = -1",
        words: &["node.cpu_latency_us", "0 to 1000000"],
    },
    Row {
        what: "a port twice",
        overrides: "[[acl]]\nuid = \"root\"\nports = \"1-9,7\"",
        words: &["port 7", "twice"],
    },
    Row {
        what: "a port twice in two rules",
        overrides: "[[acl]]\nuid = 0\nports = \"1-9\"\n[[acl]]\nuid = 0\nports = \"9-12\"",
        words: &["port 9", "twice", "one rule"],
    },
    Row {
        what: "a queue that does not exist",
        overrides: "[network]\nqueues = [7]",
        words: &["7", "ptl1v"],
    },
    Row {
        what: "a queue twice",
        overrides: "[network]\nqueues = [0, 0]",
        words: &["0", "twice"],
    },
];

// Each by `portoland --config` and by `portoland check`.
#[test]
fn a_wrong_configuration_is_refused_with_its_line() {
    let lab = Lab::builder().name("ptcf").build().unwrap();
    let node = lab.node(1);
    for Row {
        what,
        overrides,
        words,
    } in ROWS
    {
        let config = node.write_config(overrides).unwrap();
        let place = format!("{}:", config.display());
        let mut words = words.to_vec();
        words.push(&place);
        assert_refused(what, &mut daemon(node, &config), &words);
        let mut check = node.portoland().unwrap();
        check.arg("check").arg(&config);
        assert_refused(what, &mut check, &words);
        // It names the line.
        let finished = process::run(&mut daemon(node, &config), WITHIN).unwrap();
        let after = finished.stderr.split_once(&place).unwrap().1;
        let line: usize = after.split(':').next().unwrap().parse().unwrap();
        let lines = std::fs::read_to_string(&config).unwrap().lines().count();
        assert!(
            (1..=lines).contains(&line),
            "{what}: line {line} of {lines}"
        );
    }
    assert_clean(node);
    // The configuration without a mistake is fine.
    let config = node.write_config("").unwrap();
    let mut check = node.portoland().unwrap();
    process::run_ok(check.arg("check").arg(&config), WITHIN).unwrap();
    node.start_daemon("").unwrap();
}

#[test]
fn a_missing_or_unreadable_file_is_said() {
    let lab = Lab::builder().name("ptcf").build().unwrap();
    let node = lab.node(1);
    let missing = Path::new("/nonexistent/portolan.toml");
    assert_refused(
        "no such file",
        &mut daemon(node, missing),
        &["/nonexistent/portolan.toml", "check the path"],
    );
    let config = node.write_config("").unwrap();
    std::fs::write(&config, [0xff, 0xfe, 0]).unwrap();
    assert_refused(
        "not text",
        &mut daemon(node, &config),
        &[&config.display().to_string()],
    );
    assert_clean(node);
}

// Without the capability to lock memory beyond a limit of 64 KiB; with the limit high enough it runs without that capability.
#[test]
fn too_little_memlock_is_said() {
    let lab = Lab::builder().name("ptcf").build().unwrap();
    let node = lab.node(1);
    let config = node.write_config("").unwrap();
    let limited = [
        "prlimit",
        "--memlock=65536:65536",
        "setpriv",
        "--bounding-set=-ipc_lock",
        "--inh-caps=-ipc_lock",
    ];
    assert_refused(
        "too little RLIMIT_MEMLOCK",
        &mut daemon_through(node, &limited, &program(), &config),
        &["may not be locked", "LimitMEMLOCK=", "CAP_IPC_LOCK"],
    );
    assert_clean(node);
}

// As nobody, and as root that may not load programs.
#[test]
fn no_privilege_is_said() {
    let lab = Lab::builder().name("ptcf").build().unwrap();
    let node = lab.node(1);
    let config = node.write_config("").unwrap();
    // Where nobody may go, whatever the path to the build directory is.
    let directory = tempfile::tempdir().unwrap();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).unwrap();
    let copy = directory.path().join("portoland");
    std::fs::copy(program(), &copy).unwrap();
    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    assert_refused(
        "as nobody",
        &mut daemon_through(node, &nobody, &copy, &config),
        &["no privilege", "CAP_NET_ADMIN", "CAP_BPF", "run as root"],
    );
    let without = [
        "setpriv",
        "--bounding-set=-bpf,-sys_admin",
        "--inh-caps=-bpf,-sys_admin",
    ];
    assert_refused(
        "as root without CAP_BPF",
        &mut daemon_through(node, &without, &copy, &config),
        &["no privilege", "CAP_BPF", "run as root"],
    );
    assert_clean(node);
}

// Another program holds the interface. Expect: it keeps it.
#[test]
fn another_xdp_program_is_left_alone() {
    let lab = Lab::builder().name("ptcf").build().unwrap();
    let node = lab.node(1);
    let config = node.write_config("").unwrap();
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
    for mode in [AttachMode::Native, AttachMode::Generic] {
        let attached = node.in_namespace(|| program.attach(&node.interface(), mode));
        attached.unwrap().unwrap();
        assert_refused(
            "another XDP program",
            &mut daemon(node, &config),
            &["another XDP program", "ptl1v", "xdp off"],
        );
        let mut show = node.command("ip");
        show.args(["-d", "link", "show", "dev", &node.interface()]);
        let link = process::run_ok(&mut show, WITHIN).unwrap();
        assert!(link.contains("prog/xdp"), "it was taken away: {link}");
        program = Steer::load(&foreign).unwrap(); // detaches the other
    }
    drop(program);
    assert_clean(node);
    node.start_daemon("").unwrap();
}

// A second daemon for the same interface and socket. Expect: it is refused, the first goes on.
#[test]
fn a_second_daemon_is_refused() {
    let lab = Lab::builder().name("ptcf").build().unwrap();
    let node = lab.node(1);
    let first = node.start_daemon("").unwrap();
    assert_refused(
        "a second daemon",
        &mut daemon(node, first.config_path()),
        &[],
    );
    assert!(first.status().is_ok());
    assert_eq!(first.engine_pids().unwrap().len(), 1);
}

/// A filter by which `socket` of this family fails as in a kernel without it.
fn without_family(family: i32) -> BpfProgram {
    let is_family = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        family.unsigned_abs().into(),
    );
    let rule = SeccompRule::new(vec![is_family.unwrap()]).unwrap();
    SeccompFilter::new(
        [(libc::SYS_socket, vec![rule])].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EAFNOSUPPORT.unsigned_abs()),
        std::env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap()
    .try_into()
    .unwrap()
}

// A kernel without AF_XDP: `socket` says EAFNOSUPPORT, in this and all child processes of a thread.
#[test]
fn a_kernel_without_af_xdp_is_said() {
    for encap in [Encap::Udp4, Encap::Ethernet] {
        let lab = Lab::builder().name("ptcf").encap(encap).build().unwrap();
        let node = lab.node(1);
        let config = node.write_config("").unwrap();
        std::thread::scope(|scope| {
            let limited = scope.spawn(|| {
                seccompiler::apply_filter(&without_family(libc::AF_XDP)).unwrap();
                assert_refused(
                    "a kernel without AF_XDP",
                    &mut daemon(node, &config),
                    &["no AF_XDP", "CONFIG_XDP_SOCKETS"],
                );
            });
            limited.join().unwrap();
        });
        assert_clean(node);
    }
}
