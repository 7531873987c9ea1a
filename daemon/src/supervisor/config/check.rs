//! From the file as written to a [`Config`], with every complaint on the way.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use toml::{Spanned, Value};

use super::acl::{Acl, PortSet, Subject};
use super::address::only_address;
use super::checker::{Checker, as_name};
use super::discovery::discovery;
use super::file::{self, File};
use super::quota::quotas;
use super::recovery::recovery;
use super::transport::transport;
use super::{Config, ConfigErrors, Limits, Peer, Places};
use crate::credit_budget::CreditBudget;
use crate::engine_link::Encap;
use crate::supervisor::surroundings::{Account, Interface, Surroundings};

/// Longest path a Unix socket's address holds.
const MAX_SOCKET_PATH: usize = 107;
/// Most queues: what the steering program's map holds.
const MAX_QUEUES: usize = 64;

pub(super) fn check(
    path: &Path,
    text: &str,
    surroundings: &dyn Surroundings,
) -> Result<Config, ConfigErrors> {
    let mut checker = Checker {
        file: path,
        text,
        errors: Vec::new(),
    };
    let file: File = match toml::from_str(text) {
        Ok(file) => file,
        Err(error) => {
            // What Rust calls a number.
            let what = error.message().replace("expected i64", "expected a number");
            let message = format!("{what}; {}", advice(&what));
            checker.complain(error.span().unwrap_or(0..0), message);
            return Err(ConfigErrors(checker.errors));
        }
    };
    let config = build(&mut checker, &file, surroundings);
    match config {
        Some(config) if checker.errors.is_empty() => Ok(config),
        _ => Err(ConfigErrors(checker.errors)),
    }
}

/// What to do about a complaint of the TOML parser.
fn advice(message: &str) -> &'static str {
    if message.starts_with("unknown field") {
        "remove it or correct its spelling"
    } else if message.starts_with("missing field") {
        "add it"
    } else if message.starts_with("unknown variant") {
        "choose one of those"
    } else if message.starts_with("duplicate") {
        "keep one"
    } else if message.contains("expected a string") || message.contains("leading zero") {
        "write it in double quotes"
    } else if message.contains("must be quoted") {
        "correct the value: strings stand in double quotes"
    } else {
        "correct the value"
    }
}

fn build(
    checker: &mut Checker<'_>,
    file: &File,
    surroundings: &dyn Surroundings,
) -> Option<Config> {
    let encap = file
        .cluster
        .encap
        .as_ref()
        .map_or(Encap::Udp, |e| *e.get_ref());
    let cluster = checker.name("cluster.name", &file.cluster.name);
    let node = checker.number("node.id", Some(&file.node.id), 1..=65_534, 1) as u16;
    let name = checker.name("node.name", &file.node.name);
    let (socket, socket_mode, socket_group) = socket(checker, &file.node, surroundings);
    let user = user(checker, file, surroundings);

    let cpu_latency_us =
        file.node.cpu_latency_us.as_ref().map(|bound| {
            checker.number("node.cpu_latency_us", Some(bound), 0..=1_000_000, 0) as u32
        });

    let interface_facts = interface(checker, &file.network.interface, surroundings);
    let address = own_address(checker, file, encap, interface_facts.as_ref());
    let queues = queues(checker, file, interface_facts.as_ref());
    let last_queue = i64::from(queues.iter().copied().max().unwrap_or(0));
    let udp_port = checker.number(
        "cluster.udp_port",
        file.cluster.udp_port.as_ref(),
        1..=65_535 - last_queue,
        28_000,
    );
    let peers = peers(checker, file, encap, node, &name, address);

    let umem_frames = checker.number(
        "engine.umem_frames",
        file.engine.umem_frames.as_ref(),
        256..=1 << 20,
        8192,
    );
    let default_timeout_ms = checker.number(
        "engine.default_timeout_ms",
        file.engine.default_timeout_ms.as_ref(),
        1..=86_400_000,
        10_000,
    );
    let engine = &file.engine;
    let cores = super::engine::cores(checker, engine, queues.len(), surroundings);
    let (transport, policy) = transport(checker, &file.transport);
    let discovery = discovery(checker, file, address, udp_port);
    let limits = limits(checker, &file.limits, discovery.expected(peers.len()));
    let recovery = recovery(checker, &file.recovery);
    let metrics = super::metrics::listen(checker, &file.metrics);
    let acl = match &file.acl {
        Some(rules) => acl(checker, rules, surroundings),
        None => Acl::closed(surroundings.own_uid()),
    };
    let quotas = quotas(checker, &file.quota, &limits, surroundings);

    let config = Config {
        cluster,
        encap,
        udp_port: udp_port as u16,
        node,
        name,
        socket,
        socket_mode,
        socket_group,
        user: user?,
        interface: file.network.interface.get_ref().clone(),
        interface_facts: interface_facts?,
        address,
        queues,
        copy_mode: chosen(&file.network.mode),
        xdp_mode: chosen(&file.network.xdp),
        busy_polling: chosen(&file.network.busy_poll),
        discovery,
        cpu_latency_us,
        wait: super::engine::wait(engine),
        keep_awake: super::engine::keep_awake(checker, engine),
        cores,
        umem_frames: umem_frames as u32,
        default_timeout_ms: default_timeout_ms as u64,
        transport,
        policy,
        limits,
        recovery,
        peers,
        acl,
        log_level: chosen(&file.log.level),
        written: toml::from_str(checker.text).unwrap_or_default(),
        metrics,
        quotas,
        places: Places::find(checker, file),
    };
    budget(checker, file, &config);
    Some(config)
}

/// What the file says, or else the default.
fn chosen<T: Copy + Default>(said: &Option<Spanned<T>>) -> T {
    said.as_ref()
        .map(|said| *said.get_ref())
        .unwrap_or_default()
}

fn socket(
    checker: &mut Checker<'_>,
    node: &file::Node,
    surroundings: &dyn Surroundings,
) -> (PathBuf, u32, Option<u32>) {
    let path = node
        .socket
        .as_ref()
        .map_or(portolan_abi::control::DEFAULT_SOCKET, |s| s.get_ref());
    if let Some(value) = &node.socket
        && (!path.starts_with('/') || path.ends_with('/') || path.len() > MAX_SOCKET_PATH)
    {
        let message = format!(
            "socket `{path}` is no path of a socket; give an absolute path of at most {MAX_SOCKET_PATH} bytes"
        );
        checker.complain(value.span(), message);
    }
    let mut mode = 0o660;
    if let Some(value) = &node.socket_mode {
        match u32::from_str_radix(value.get_ref(), 8) {
            Ok(bits) if bits <= 0o777 => mode = bits,
            _ => {
                let message = format!(
                    "socket_mode `{}` is no mode; write it in octal, as \"0660\"",
                    value.get_ref()
                );
                checker.complain(value.span(), message);
            }
        }
    }
    let group = node.socket_group.as_ref().and_then(|value| {
        let found = as_name(value.get_ref()).and_then(|name| surroundings.group(&name));
        if found.is_none() {
            let message = format!(
                "there is no group {}; create it (`groupadd`) or name another",
                value.get_ref()
            );
            checker.complain(value.span(), message);
        }
        found
    });
    (PathBuf::from(path), mode, group)
}

fn user(
    checker: &mut Checker<'_>,
    file: &File,
    surroundings: &dyn Surroundings,
) -> Option<Account> {
    let (name, span) = match &file.node.user {
        Some(value) => (as_name(value.get_ref()), value.span()),
        None => (Some("nobody".to_owned()), file.node.id.span()),
    };
    match name.as_deref().and_then(|name| surroundings.user(name)) {
        Some(account) if account.uid == 0 => {
            checker.complain(
                span,
                "engines must not run as root; name an unprivileged user in node.user",
            );
            None
        }
        Some(account) => Some(account),
        None => {
            let name = name.unwrap_or_default();
            checker.complain(span, format!("there is no user `{name}`; create it (`useradd --system`) or name another in node.user"));
            None
        }
    }
}

fn interface(
    checker: &mut Checker<'_>,
    name: &Spanned<String>,
    surroundings: &dyn Surroundings,
) -> Option<Interface> {
    let text = name.get_ref();
    let message = match surroundings.interface(text) {
        Ok(Some(interface)) if interface.mtu < 576 => {
            format!(
                "interface `{text}` has an MTU of {}; set at least 576 (`ip link set dev {text} mtu 1500`)",
                interface.mtu
            )
        }
        Ok(Some(interface)) if interface.mac == [0; 6] => format!(
            "interface `{text}` has no MAC, so no other node can reach it; name an Ethernet interface (`ip link` lists them)"
        ),
        Ok(Some(interface)) => return Some(interface),
        Ok(None) => format!(
            "there is no interface `{text}` in this network namespace; `ip link` lists them"
        ),
        Err(error) => format!(
            "interface `{text}` cannot be looked up: {error}; run in the network namespace it is in"
        ),
    };
    checker.complain(name.span(), message);
    None
}

fn own_address(
    checker: &mut Checker<'_>,
    file: &File,
    encap: Encap,
    interface: Option<&Interface>,
) -> Option<IpAddr> {
    let Some(value) = &file.network.address else {
        return match (encap, interface) {
            (Encap::Udp, Some(interface)) => only_address(checker, file, interface),
            _ => None,
        };
    };
    let address = checker.address("network.address", value)?;
    if encap == Encap::Udp
        && let Some(interface) = interface
        && !interface.addresses.contains(&address)
    {
        let name = file.network.interface.get_ref();
        let there: Vec<String> = interface
            .addresses
            .iter()
            .map(ToString::to_string)
            .collect();
        let there = if there.is_empty() {
            "none".to_owned()
        } else {
            there.join(", ")
        };
        let message = format!(
            "{address} is not on interface `{name}` (it has {there}); add it (`ip addr add`) or correct it"
        );
        checker.complain(value.span(), message);
    }
    Some(address)
}

fn queues(checker: &mut Checker<'_>, file: &File, interface: Option<&Interface>) -> Vec<u32> {
    let Some(list) = &file.network.queues else {
        return vec![0];
    };
    let mut queues = Vec::new();
    for value in list.get_ref() {
        let queue = *value.get_ref();
        let there = interface.and_then(|facts| facts.rx_queues);
        let name = file.network.interface.get_ref();
        match u32::try_from(queue) {
            Ok(queue) if queues.contains(&queue) => {
                checker.complain(
                    value.span(),
                    format!("queue {queue} is named twice; name it once"),
                );
            }
            Ok(queue) if there.is_some_and(|there| queue >= there) => {
                let there = there.unwrap_or_default();
                let message = format!(
                    "interface `{name}` has no queue {queue}, only 0 to {}; correct network.queues or add queues (`ethtool -L {name}`)",
                    there.saturating_sub(1)
                );
                checker.complain(value.span(), message);
            }
            Ok(queue) if (queue as usize) < MAX_QUEUES => queues.push(queue),
            _ => checker.complain(
                value.span(),
                format!(
                    "queue {queue} is out of range; it must be 0 to {}",
                    MAX_QUEUES - 1
                ),
            ),
        }
    }
    if list.get_ref().is_empty() {
        checker.complain(
            list.span(),
            "network.queues is empty; name at least one queue, as [0]",
        );
    }
    if queues.is_empty() { vec![0] } else { queues }
}

fn limits(checker: &mut Checker<'_>, limits: &file::Limits, peers: usize) -> Limits {
    let ports = i64::from(portolan_abi::PORTS) - 1;
    let arena = portolan_abi::MAX_ARENA_BYTES as i64;
    let mut number = |what, value: &Option<Spanned<i64>>, range, default| {
        checker.number(what, value.as_ref(), range, default)
    };
    let default_peers = (peers as i64).max(1);
    Limits {
        peers: number("limits.peers", &limits.peers, 1..=65_534, default_peers) as u32,
        streams: number("limits.streams", &limits.streams, 16..=1 << 20, 8192) as u32,
        ports: number("limits.ports", &limits.ports, 1..=ports, ports) as u32,
        arena_bytes_per_port: number(
            "limits.arena_bytes_per_port",
            &limits.arena_bytes_per_port,
            4096..=arena,
            1 << 30,
        ) as u64,
        arena_bytes_total: number(
            "limits.arena_bytes_total",
            &limits.arena_bytes_total,
            4096..=i64::MAX,
            4 << 30,
        ) as u64,
        clients: number("limits.clients", &limits.clients, 1..=65_536, 1024) as usize,
    }
}

fn peers(
    checker: &mut Checker<'_>,
    file: &File,
    encap: Encap,
    node: u16,
    node_name: &str,
    own_address: Option<IpAddr>,
) -> Vec<Peer> {
    let mut ids = HashMap::from([(i64::from(node), checker.line(&file.node.id.span()))]);
    let mut names = HashMap::from([(node_name.to_owned(), checker.line(&file.node.name.span()))]);
    let mut addresses = HashMap::new();
    if let (Some(address), Some(value)) = (own_address, &file.network.address) {
        addresses.insert(address, checker.line(&value.span()));
    }
    let mut macs = HashMap::new();
    let mut peers = Vec::new();
    for entry in &file.peer {
        let id = *entry.id.get_ref();
        let line = checker.line(&entry.id.span());
        checker.number("peer.id", Some(&entry.id), 1..=65_534, 1);
        if let Some(first) = ids.insert(id, line) {
            checker.complain(
                entry.id.span(),
                format!("node id {id} is taken in line {first}; give every node its own"),
            );
        }
        let name = checker.name("peer.name", &entry.name);
        if let Some(first) = names.insert(name.clone(), checker.line(&entry.name.span())) {
            checker.complain(
                entry.name.span(),
                format!("node name `{name}` is taken in line {first}; give every node its own"),
            );
        }
        let address = entry.address.as_ref().and_then(|value| {
            let address = checker.address("peer.address", value)?;
            if let Some(first) = addresses.insert(address, checker.line(&value.span())) {
                checker.complain(value.span(), format!("address {address} is taken in line {first}; give every node its own"));
            }
            if encap == Encap::Udp && own_address.is_some_and(|own| own.is_ipv4() != address.is_ipv4()) {
                checker.complain(value.span(), format!("{address} is of another IP version than network.address; use one version in a cluster"));
            }
            Some(address)
        });
        let mac = entry.mac.as_ref().and_then(|value| {
            let mac = checker.mac(value)?;
            // Behind a router, nodes share the router's.
            if encap == Encap::Ethernet
                && let Some(first) = macs.insert(mac, checker.line(&value.span()))
            {
                checker.complain(
                    value.span(),
                    format!(
                        "mac {} is taken in line {first}; give every node its own",
                        value.get_ref()
                    ),
                );
            }
            Some(mac)
        });
        match encap {
            Encap::Udp if entry.address.is_none() => {
                checker.complain(
                    entry.id.span(),
                    format!("peer {id} has no address; encap udp needs one, add `address`"),
                );
            }
            Encap::Ethernet if entry.mac.is_none() => {
                checker.complain(
                    entry.id.span(),
                    format!("peer {id} has no mac; encap ethernet needs one, add `mac`"),
                );
            }
            _ => {}
        }
        peers.push(Peer {
            id: u16::try_from(id).unwrap_or(0),
            name,
            address,
            mac,
        });
    }
    peers.sort_by_key(|peer| peer.id);
    peers
}

fn acl(checker: &mut Checker<'_>, rules: &[file::Acl], surroundings: &dyn Surroundings) -> Acl {
    let mut checked: Vec<(Subject, PortSet)> = Vec::new();
    for rule in rules {
        let subject = match (&rule.uid, &rule.gid) {
            (Some(uid), None) => subject(checker, "user", uid, |name| {
                surroundings
                    .user(name)
                    .map(|account| Subject::Uid(account.uid))
            }),
            (None, Some(gid)) => subject(checker, "group", gid, |name| {
                surroundings.group(name).map(Subject::Gid)
            }),
            _ => {
                checker.complain(
                    rule.ports.span(),
                    "an acl rule names either uid or gid; give exactly one",
                );
                None
            }
        };
        let text = as_name(rule.ports.get_ref()).unwrap_or_default();
        let ports = match PortSet::parse(&text) {
            Ok(ports) => ports,
            Err(error) => {
                checker.complain(
                    rule.ports.span(),
                    format!(
                        "acl ports: {error}; write them as \"1-9,20\" with ports 1 to {}",
                        portolan_abi::PORTS - 1
                    ),
                );
                continue;
            }
        };
        let Some(subject) = subject else { continue };
        let earlier = checked.iter().filter(|(other, _)| *other == subject);
        let twice = earlier
            .flat_map(|(_, theirs)| (1..portolan_abi::PORTS).filter(|port| theirs.contains(*port)))
            .find(|port| ports.contains(*port));
        if let Some(port) = twice {
            checker.complain(
                rule.ports.span(),
                format!(
                    "port {port} is given to the same user or group twice; name it in one rule"
                ),
            );
        }
        checked.push((subject, ports));
    }
    Acl::new(checked)
}

pub(super) fn subject(
    checker: &mut Checker<'_>,
    kind: &str,
    value: &Spanned<Value>,
    find: impl FnOnce(&str) -> Option<Subject>,
) -> Option<Subject> {
    let name = as_name(value.get_ref()).unwrap_or_default();
    if name == "any" {
        return Some(Subject::Any);
    }
    let found = find(&name);
    if found.is_none() {
        let message = format!(
            "there is no {kind} {}; use a name, a number or \"any\"",
            value.get_ref()
        );
        checker.complain(value.span(), message);
    }
    found
}

fn budget(checker: &mut Checker<'_>, file: &File, config: &Config) {
    let peers = config.limits.peers as usize;
    let receive = config.rx_frames();
    let budget = CreditBudget::new(&config.policy, peers, config.mtu(), receive);
    if budget.fits() {
        return;
    }
    let span = match (&file.engine.umem_frames, &file.limits.peers) {
        (Some(value), _) | (None, Some(value)) => value.span(),
        (None, None) => file.node.id.span(),
    };
    // Frames for sending are a quarter.
    let enough = (budget.needed().div_ceil(3) * 4).next_multiple_of(256);
    checker.complain(span, format!("the credit of all peers does not fit: {budget}; set engine.umem_frames to at least {enough}, or limits.peers or transport.eager_budget_buffers lower"));
}
