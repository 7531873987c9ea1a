//! The configuration: what is accepted, and each thing that is not, with its line and what to do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod address;
mod quota;
mod transport;

use std::io;
use std::net::IpAddr;
use std::path::Path;

use portoland::engine_link::{Encap, Wait};
use portoland::supervisor::config::{Config, Credentials, XdpMode};
use portoland::supervisor::surroundings::{Account, Interface, Surroundings};

/// A machine with one interface, `ptl1v`.
struct Machine;

impl Surroundings for Machine {
    fn interface(&self, name: &str) -> io::Result<Option<Interface>> {
        Ok((name == "ptl1v").then(|| Interface {
            index: 7,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            addresses: vec!["10.77.0.1".parse().unwrap(), "fd77::1".parse().unwrap()],
            rx_queues: Some(2),
            veth: false,
        }))
    }
    fn user(&self, name: &str) -> Option<Account> {
        match name {
            "root" => Some(Account { uid: 0, gid: 0 }),
            "nobody" => Some(Account {
                uid: 65534,
                gid: 65534,
            }),
            "alice" => Some(Account {
                uid: 1000,
                gid: 1000,
            }),
            _ => name.parse().ok().map(|id| Account { uid: id, gid: id }),
        }
    }
    fn group(&self, name: &str) -> Option<u32> {
        if name == "wheel" {
            Some(10)
        } else {
            name.parse().ok()
        }
    }
    fn cores(&self) -> Vec<usize> {
        vec![0, 1]
    }
    fn own_uid(&self) -> u32 {
        0
    }
}

const GOOD: &str = r#"
[cluster]
name = "lab"
encap = "udp"
udp_port = 28000
[node]
id = 1
name = "ptl1"
socket = "/run/portolan/lab/1.sock"
socket_mode = "0666"
user = "nobody"
[network]
interface = "ptl1v"
address = "10.77.0.1"
queues = [0]
mode = "auto"
xdp = "auto"
[engine]
wait = "adaptive"
cores = []
umem_frames = 8192
[limits]
clients = 1024
[[peer]]
id = 2
name = "ptl2"
address = "10.77.0.2"
mac = "02:00:00:00:00:02"
[[peer]]
id = 3
name = "ptl3"
address = "10.77.0.3"
[[acl]]
uid = "any"
ports = "1-99"
[[acl]]
gid = "wheel"
ports = "100-255"
"#;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("node.toml"), text, &Machine).map_err(|errors| errors.to_string())
}

#[test]
fn a_good_configuration_is_what_it_says() {
    let config = parse(GOOD).unwrap();
    assert_eq!((config.node, config.name.as_str()), (1, "ptl1"));
    assert_eq!((config.encap, config.udp_port), (Encap::Udp, 28000));
    assert_eq!(config.socket_mode, 0o666);
    assert_eq!(
        config.user,
        Account {
            uid: 65534,
            gid: 65534
        }
    );
    assert_eq!(config.address, Some("10.77.0.1".parse::<IpAddr>().unwrap()));
    assert_eq!(
        (config.queues.as_slice(), config.mtu()),
        ([0].as_slice(), 1500)
    );
    assert_eq!(
        (config.wait, config.xdp_mode),
        (Wait::Adaptive, XdpMode::Auto)
    );
    assert_eq!(config.rx_frames(), 6144);
    assert_eq!(config.peers.len(), 2);
    assert_eq!(config.peers[0].mac, Some([2, 0, 0, 0, 0, 2]));
    assert_eq!(config.peers[1].mac, None);
    let who = |uid, gid| Credentials {
        pid: 1,
        uid,
        gids: vec![gid],
    };
    assert!(config.acl.allows(&who(1000, 1000), 99));
    assert!(!config.acl.allows(&who(1000, 1000), 100));
    assert!(config.acl.allows(&who(1000, 10), 100));
}

#[test]
fn a_short_configuration_has_defaults() {
    let config = parse(
        r#"
[cluster]
name = "lab"
encap = "ethernet"
[node]
id = 9
name = "n9"
[network]
interface = "ptl1v"
"#,
    )
    .unwrap();
    assert_eq!(config.socket, Path::new("/run/portolan/portolan.sock"));
    assert_eq!(config.socket_mode, 0o660);
    assert_eq!(config.limits.clients, 1024);
    // Without a list: root, and nobody else.
    let who = |uid| Credentials {
        pid: 1,
        uid,
        gids: vec![0],
    };
    assert!(config.acl.allows(&who(0), 255));
    assert!(!config.acl.allows(&who(1000), 255));
    // The hash of a cluster's name must never change: FNV-1a of "lab".
    assert_eq!(config.cluster_id(), 0x1265_9619_1dc1_ebb4);
}

/// Replaces a line that must be there.
fn with(line: &str, replacement: &str) -> String {
    assert!(GOOD.contains(line), "{line}");
    GOOD.replacen(line, replacement, 1)
}

/// The line number of the first occurrence.
fn line_of(text: &str, what: &str) -> usize {
    1 + text.lines().position(|line| line.contains(what)).unwrap()
}

/// A mistake: what is replaced, by what, where to find the line, what it says, what to do.
type Mistake = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

fn each_is_named(table: &[Mistake]) {
    for (line, replacement, place, complaint, remedy) in table {
        let text = with(line, replacement);
        // Two rules for everybody are fine as long as no port is in both.
        if complaint.is_empty() && remedy.is_empty() {
            parse(&text).unwrap();
            continue;
        }
        let error = parse(&text).expect_err(replacement);
        let first = error.lines().next().unwrap();
        assert!(first.contains(complaint), "{replacement:?}: {error}");
        assert!(first.contains(remedy), "{replacement:?}: {error}");
        let number: usize = first
            .strip_prefix("node.toml:")
            .and_then(|rest| rest.split(':').next())
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("{error}"));
        let near = line_of(&text, place.lines().next().unwrap());
        let last = text.lines().count()
            - text
                .lines()
                .rev()
                .position(|l| l.contains(place.lines().next().unwrap()))
                .unwrap();
        assert!(
            number == near || number == last || (place.contains('\n') && number == near + 1),
            "{replacement:?}: line {near} or {last}: {error}"
        );
    }
}

#[test]
fn each_mistake_is_named_with_its_line_and_a_remedy() {
    let table: &[Mistake] = &[
        (
            "udp_port = 28000",
            "udp_prt = 28000",
            "udp_prt",
            "unknown field `udp_prt`",
            "remove it",
        ),
        (
            "[limits]",
            "[limit]",
            "[limit]",
            "unknown field `limit`",
            "remove it",
        ),
        (
            "id = 1\n",
            "id = \"one\"\n",
            "\"one\"",
            "invalid type",
            "correct the value",
        ),
        (
            "id = 1\n",
            "id = 1\nid = 1\n",
            "id = 1\nid",
            "duplicate key",
            "keep one",
        ),
        ("id = 1\n", "", "[node]", "missing field `id`", "add it"),
        (
            "id = 1\n",
            "id = 0\n",
            "id = 0",
            "node.id is 0",
            "1 to 65534",
        ),
        (
            "id = 1\n",
            "id = 65535\n",
            "id = 65535",
            "node.id is 65535",
            "1 to 65534",
        ),
        (
            "encap = \"udp\"",
            "encap = \"tcp\"",
            "tcp",
            "unknown variant",
            "choose one",
        ),
        (
            "udp_port = 28000",
            "udp_port = 70000",
            "70000",
            "udp_port is 70000",
            "1 to 65535",
        ),
        (
            "name = \"ptl1\"",
            "name = \"ptl 1\"",
            "ptl 1",
            "is no name",
            "letters",
        ),
        (
            "name = \"ptl1\"",
            "name = \"17\"",
            "\"17\"",
            "reads as a node id",
            "letter",
        ),
        (
            "\"/run/portolan/lab/1.sock\"",
            "\"1.sock\"",
            "1.sock",
            "no path of a socket",
            "absolute",
        ),
        ("\"0666\"", "\"0888\"", "0888", "no mode", "octal"),
        (
            "user = \"nobody\"",
            "user = \"nemo\"",
            "nemo",
            "no user `nemo`",
            "useradd",
        ),
        (
            "user = \"nobody\"",
            "user = \"root\"",
            "\"root\"",
            "must not run as root",
            "unprivileged",
        ),
        (
            "user = \"nobody\"",
            "socket_group = \"ghosts\"",
            "ghosts",
            "no group \"ghosts\"",
            "groupadd",
        ),
        (
            "interface = \"ptl1v\"",
            "interface = \"eth9\"",
            "eth9",
            "no interface `eth9`",
            "ip link",
        ),
        (
            "address = \"10.77.0.1\"",
            "address = \"10.77.0.9\"",
            "10.77.0.9",
            "is not on interface `ptl1v`",
            "ip addr add",
        ),
        (
            "address = \"10.77.0.1\"",
            "address = \"10.77.0.1/24\"",
            "0.1/24",
            "no IPv4 or IPv6 address",
            "prefix",
        ),
        (
            "address = \"10.77.0.1\"",
            "address = \"224.0.0.1\"",
            "224.0.0.1",
            "no address of one node",
            "unicast",
        ),
        (
            "address = \"10.77.0.1\"",
            "address = \"fd77::1\"",
            "10.77.0.2",
            "another IP version",
            "one version",
        ),
        (
            "queues = [0]",
            "queues = [0, 2]",
            "queues",
            "has no queue 2, only 0 to 1",
            "ethtool -L",
        ),
        (
            "queues = [0]",
            "queues = [1, 1]",
            "queues",
            "queue 1 is named twice",
            "once",
        ),
        (
            "queues = [0]",
            "queues = [-1]",
            "queues",
            "queue -1 is out of range",
            "0 to 63",
        ),
        (
            "queues = [0]",
            "queues = []",
            "queues",
            "is empty",
            "at least one",
        ),
        (
            "cores = []",
            "cores = [0, 1]",
            "cores",
            "2 cores for 1 engines",
            "one for each",
        ),
        (
            "cores = []",
            "cores = [5]",
            "cores",
            "no core 5",
            "choose of [0, 1]",
        ),
        (
            "umem_frames = 8192",
            "umem_frames = 100",
            "= 100",
            "umem_frames is 100",
            "256 to",
        ),
        (
            "clients = 1024",
            "clients = 0",
            "clients",
            "limits.clients is 0",
            "1 to",
        ),
        (
            "id = 2",
            "id = 1",
            "id = 1",
            "node id 1 is taken in line 7",
            "its own",
        ),
        (
            "id = 3",
            "id = 2",
            "id = 2",
            "node id 2 is taken in line 25",
            "its own",
        ),
        (
            "name = \"ptl3\"",
            "name = \"ptl1\"",
            "ptl1\"",
            "node name `ptl1` is taken in line 8",
            "its own",
        ),
        (
            "10.77.0.3",
            "10.77.0.2",
            "10.77.0.2",
            "address 10.77.0.2 is taken in line 27",
            "its own",
        ),
        (
            "10.77.0.3",
            "10.77.0.1",
            "10.77.0.1",
            "address 10.77.0.1 is taken in line 14",
            "its own",
        ),
        (
            "address = \"10.77.0.2\"\n",
            "",
            "id = 2",
            "peer 2 has no address",
            "udp needs one",
        ),
        (
            "02:00:00:00:00:02",
            "02:00:00:00:00",
            "mac",
            "is no MAC",
            "02:00:00:00:00:01",
        ),
        (
            "02:00:00:00:00:02",
            "03:00:00:00:00:02",
            "mac",
            "not one station's",
            "unicast",
        ),
        (
            "ports = \"1-99\"",
            "ports = \"0-99\"",
            "0-99",
            "port 0 is the daemon's own",
            "1 to 255",
        ),
        (
            "ports = \"1-99\"",
            "ports = \"1-300\"",
            "1-300",
            "`300` is no port",
            "1 to 255",
        ),
        (
            "ports = \"1-99\"",
            "ports = \"1-9,7\"",
            "1-9,7",
            "port 7 is named twice",
            "\"1-9,20\"",
        ),
        (
            "uid = \"any\"",
            "uid = \"nemo\"",
            "nemo",
            "no user \"nemo\"",
            "a number or \"any\"",
        ),
        (
            "uid = \"any\"\n",
            "",
            "1-99",
            "either uid or gid",
            "exactly one",
        ),
        ("gid = \"wheel\"", "uid = \"any\"", "100-255", "", ""),
        (
            "udp_port = 28000",
            "udp_port =",
            "udp_port",
            "",
            "correct the value",
        ),
    ];
    each_is_named(table);
}

#[test]
fn a_port_twice_for_the_same_user_is_refused() {
    let text = with(
        "gid = \"wheel\"\nports = \"100-255\"",
        "uid = \"any\"\nports = \"99-255\"",
    );
    let error = parse(&text).unwrap_err();
    assert!(
        error.contains("port 99 is given to the same user or group twice"),
        "{error}"
    );
    assert!(
        error.starts_with(&format!("node.toml:{}:", line_of(&text, "99-255"))),
        "{error}"
    );
}

#[test]
fn ethernet_peers_need_macs() {
    let text = with("encap = \"udp\"", "encap = \"ethernet\"");
    let error = parse(&text).unwrap_err();
    assert!(
        error.contains("peer 3 has no mac; encap ethernet needs one"),
        "{error}"
    );
    // And different ones.
    let text = text.replacen("address = \"10.77.0.3\"", "mac = \"02:00:00:00:00:02\"", 1);
    let error = parse(&text).unwrap_err();
    assert!(
        error.contains("mac 02:00:00:00:00:02 is taken in line"),
        "{error}"
    );
}

#[test]
fn credit_that_does_not_fit_is_refused_with_the_sum() {
    // 23 peers need 23 × 264 + 350 = 6422 buffers; 8192 frames have 6144 for receiving.
    let text = with("clients = 1024", "peers = 23");
    let error = parse(&text).unwrap_err();
    assert!(
        error.contains(
            "23 peers x (256 eager + 8 control) + 350 grants = 6422 of 6144 receive buffers"
        ),
        "{error}"
    );
    assert!(error.contains("at least 8704"), "{error}");
    assert!(
        error.starts_with(&format!("node.toml:{}:", line_of(&text, "umem_frames"))),
        "{error}"
    );
    // With what it advises, it fits.
    parse(&text.replacen("8192", "8704", 1)).unwrap();
    // The last that fits, and the first that does not.
    parse(&with("clients = 1024", "peers = 21")).unwrap();
    parse(&with("clients = 1024", "peers = 22")).unwrap_err();
}

#[test]
fn every_mistake_is_told_at_once() {
    let text = with("id = 1\n", "id = 0\n")
        .replacen("queues = [0]", "queues = [7]", 1)
        .replacen("id = 3", "id = 2", 1);
    let error = parse(&text).unwrap_err();
    assert_eq!(error.lines().count(), 3, "{error}");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Config::load(Path::new("/nowhere/node.toml"), &Machine)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("/nowhere/node.toml: cannot be read"),
        "{error}"
    );
}
