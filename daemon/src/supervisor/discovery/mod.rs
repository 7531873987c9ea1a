//! Nodes find each other (docs/discovery.md): each says once per second where and what it is, over UDP beside the data ports. On one
//! segment to a multicast group; across routers to the seeds of the configuration and to whoever it has heard of from them.
//!
//! Control only: engines hear of a node that was found as they hear of one from the configuration, by `ToEngine::Route`. The XDP program
//! passes these packets to the kernel: multicast is never ours, and the port is below the engines'.
//!
//! | file | noun |
//! |---|---|
//! | `packet.rs` | what a node says of itself, as bytes |
//! | `table.rs` | who is there, and what is wrong with it |
//! | here | sockets, times, and what the supervisor does about it |

mod packet;
mod table;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::time::{Duration, Instant};

use portolan_transport::policy::Profile;
use portolan_transport::wire::frame;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde_json::{Value, json};

use super::Supervisor;
use super::config::{Config, DiscoveryMode};
use super::poll::{EventFlags, Source, Timer};
use crate::engine_link::{Encap, Route};
use packet::{Announcement, LONGEST, MOST_KNOWN, Unread};
use table::Table;

/// Of organisations' own groups (RFC 2365), and of the link (RFC 4291): "PTL" in both.
const GROUP_V4: Ipv4Addr = Ipv4Addr::new(239, 80, 84, 76);
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0x5054, 0x4c01);
/// Everybody speaks so often.
const EVERY: Duration = Duration::from_secs(1);
/// Who is asked answers, but not more often than this.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);
/// Packets read before others get a turn.
const PACKETS_PER_TURN: usize = 64;
/// Nodes spoken to one by one, per round.
const MOST_SPOKEN_TO: usize = 256;

/// What is needed to be found and to find.
#[derive(Debug)]
pub struct Discovery {
    mode: DiscoveryMode,
    /// Bound to our address: speaks, and hears what is sent to us alone.
    socket: Option<UdpSocket>,
    /// Hears the group.
    group: Option<UdpSocket>,
    /// What keeps us from it.
    failure: Option<String>,
    table: Table,
    incarnation: u64,
    found: BTreeMap<u16, Route>,
    spoke: Option<Instant>,
    rounds: usize,
    /// Packets that were none, and of versions that are too old.
    unread: (u64, u64),
}

/// The port nodes speak at: below that of queue 0.
fn port(config: &Config) -> u16 {
    config.udp_port.saturating_sub(1)
}

fn open(config: &Config) -> io::Result<(UdpSocket, Option<UdpSocket>)> {
    let index = config.interface_facts.index;
    let scoped = |ip: Ipv6Addr| {
        let scope = if ip.is_unicast_link_local() || ip.is_multicast() {
            index
        } else {
            0
        };
        SocketAddr::V6(SocketAddrV6::new(ip, port(config), 0, scope))
    };
    // Ethernet needs no address; every interface with IPv6 has one of the link all the same.
    let own = config.address.or_else(|| {
        let mut link_local = config
            .interface_facts
            .addresses
            .iter()
            .filter(|address| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
        link_local.next().copied()
    });
    let own = own.ok_or_else(|| io::Error::other("the interface has no address to speak from"))?;
    let (at, group) = match own {
        IpAddr::V4(ip) => (
            SocketAddr::new(ip.into(), port(config)),
            SocketAddr::new(GROUP_V4.into(), port(config)),
        ),
        IpAddr::V6(ip) => (scoped(ip), scoped(GROUP_V6)),
    };
    let socket = bound(at)?;
    match own {
        IpAddr::V4(_) => {
            let any = Ipv4Addr::UNSPECIFIED;
            sockopt::set_ip_multicast_if_with_ifindex(&socket, &GROUP_V4, &any, index)?;
        }
        IpAddr::V6(_) => sockopt::set_ipv6_multicast_if(&socket, index)?,
    }
    if config.discovery != DiscoveryMode::Multicast {
        return Ok((socket, None));
    }
    let hears = bound(group)?;
    match own {
        IpAddr::V4(_) => {
            let any = Ipv4Addr::UNSPECIFIED;
            sockopt::set_ip_add_membership_with_ifindex(&hears, &GROUP_V4, &any, index)?;
        }
        IpAddr::V6(_) => sockopt::set_ipv6_add_membership(&hears, &GROUP_V6, index)?,
    }
    Ok((socket, Some(hears)))
}

fn bound(at: SocketAddr) -> io::Result<UdpSocket> {
    let family = if at.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
    // Nodes of several interfaces share the group.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &at)?;
    Ok(socket.into())
}

impl Discovery {
    /// For this configuration. What keeps it from working is told and costs nothing else: the configuration's own peers are there.
    pub fn new(config: &Config, incarnation: u64) -> Self {
        let fixed = config
            .peers
            .iter()
            .map(|peer| (peer.id, (peer.address, peer.mac)));
        let mut discovery = Self {
            mode: config.discovery.clone(),
            socket: None,
            group: None,
            failure: None,
            table: Table::new(config.policy, fixed.collect()),
            incarnation,
            found: BTreeMap::new(),
            spoke: None,
            rounds: 0,
            unread: (0, 0),
        };
        discovery.open(config);
        discovery
    }

    fn open(&mut self, config: &Config) {
        self.failure = None;
        if self.mode == DiscoveryMode::Static {
            return;
        }
        match open(config) {
            Ok((socket, group)) => (self.socket, self.group) = (Some(socket), group),
            Err(error) => {
                let port = port(config);
                let what = format!(
                    "no node is found: UDP port {port} cannot be had: {error}; `ss -ulpn` shows who has it, `ip addr` our addresses"
                );
                tracing::error!("{what}");
                self.failure = Some(what);
            }
        }
    }

    /// To be watched.
    pub fn sockets(&self) -> impl Iterator<Item = &UdpSocket> {
        self.socket.iter().chain(&self.group)
    }

    /// Nodes that were found.
    pub fn found(&self) -> impl Iterator<Item = &Route> {
        self.found.values()
    }

    /// A predecessor had found this one. False: nodes are not to be found any more.
    pub fn remember(&mut self, route: Route) -> bool {
        if self.mode == DiscoveryMode::Static {
            return false;
        }
        self.found.insert(route.node, route);
        true
    }

    /// What is spoken to, beside the group.
    fn listeners(&self, now: Instant) -> Vec<IpAddr> {
        let DiscoveryMode::Seeds(seeds) = &self.mode else {
            return Vec::new();
        };
        let skip = self.rounds.wrapping_mul(MOST_SPOKEN_TO);
        let mut all = self.table.addresses(now, skip, MOST_SPOKEN_TO);
        all.extend(seeds);
        // Those that were found may be silent only towards us.
        all.extend(
            self.found
                .values()
                .filter_map(|route| route.address)
                .take(MOST_SPOKEN_TO),
        );
        all.sort_unstable();
        all.dedup();
        all
    }

    fn speak(&mut self, now: Instant, config: &Config, mut own: Announcement) {
        let Some(socket) = &self.socket else {
            return;
        };
        own.ask = self.rounds == 0;
        own.known = self
            .table
            .addresses(now, self.rounds.wrapping_mul(MOST_KNOWN), MOST_KNOWN);
        let bytes = own.write();
        let port = port(config);
        if self.mode == DiscoveryMode::Multicast {
            let group = match socket.local_addr() {
                Ok(SocketAddr::V6(_)) => {
                    let index = config.interface_facts.index;
                    SocketAddr::V6(SocketAddrV6::new(GROUP_V6, port, 0, index))
                }
                _ => SocketAddr::new(GROUP_V4.into(), port),
            };
            if let Err(error) = socket.send_to(&bytes, group) {
                tracing::debug!(%error, "not announced");
            }
        }
        for address in self.listeners(now) {
            // One that cannot be reached is tried again with the next round.
            if let Err(error) = socket.send_to(&bytes, (address, port)) {
                tracing::debug!(%error, %address, "not announced");
            }
        }
        self.spoke = Some(now);
        self.rounds = self.rounds.wrapping_add(1);
    }

    /// Packets that came, a bounded number.
    fn read(&mut self) -> Vec<(IpAddr, Announcement)> {
        let mut all = Vec::new();
        let mut buffer = [0; LONGEST + 1];
        for socket in self.socket.iter().chain(&self.group) {
            for _ in 0..PACKETS_PER_TURN {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else {
                    break;
                };
                match Announcement::read(buffer.get(..length).unwrap_or_default()) {
                    Ok(said) => all.push((from.ip(), said)),
                    Err(Unread::Nonsense) => self.unread.0 += 1,
                    Err(Unread::Version(_)) => self.unread.1 += 1,
                }
            }
        }
        all
    }
}

impl Supervisor {
    /// What this node says of itself.
    fn announcement(&self) -> Announcement {
        let config = &self.config;
        let profile = config.transport.profile().unwrap_or(Profile::Default);
        Announcement {
            ask: false,
            cluster: config.cluster_id(),
            cluster_name: config.cluster.clone(),
            node: config.node,
            name: config.name.clone(),
            incarnation: self.discovery.incarnation,
            wire: (frame::VERSION, frame::VERSION),
            udp: config.encap == Encap::Udp,
            queues: config.engines(),
            udp_port: config.udp_port,
            mtu: self.interface.mtu(),
            mac: config.interface_facts.mac,
            address: config.address,
            policy: config.policy.wire(),
            profile: profile.name().to_owned(),
            known: Vec::new(),
        }
    }

    /// Says where and what we are, and will again: there is one such timer.
    pub(super) fn announce(&mut self, now: Instant) {
        if self.discovery.mode == DiscoveryMode::Static || self.stopping {
            return;
        }
        self.say_now(now);
        self.poll.set_timer(now + EVERY, Timer::Discovery);
    }

    fn say_now(&mut self, now: Instant) {
        let own = self.announcement();
        self.discovery.speak(now, &self.config, own);
    }

    /// Somebody said something.
    pub(super) fn on_discovery(&mut self, now: Instant) {
        let own = self.announcement();
        let mut asked = false;
        let before = self.discovery.found.len();
        let mut fresh = Vec::new();
        for (from, said) in self.discovery.read() {
            if said.incarnation == own.incarnation {
                continue;
            }
            // Who speaks of a place speaks from there.
            if said.address.is_some_and(|address| address != from) {
                self.discovery.unread.0 += 1;
                continue;
            }
            asked |= said.ask;
            self.discovery.meet(&said, now, &self.config, &own);
            fresh.extend(self.discovery.table.hear(now, &own, said));
        }
        for mut route in fresh {
            if matches!(self.discovery.mode, DiscoveryMode::Seeds(_)) {
                // There may be a router in between, whose MAC it then is.
                route.mac = None;
                self.follow_neighbour(&route);
                let known = self.routes.get(&route.node);
                route.mac = known
                    .filter(|r| r.address == route.address)
                    .and_then(|r| r.mac);
            }
            tracing::info!(node = route.node, name = route.name, address = ?route.address, "found");
            self.discovery.found.insert(route.node, route.clone());
            self.publish_route(route);
            self.store_notes();
        }
        let lately = self
            .discovery
            .spoke
            .is_some_and(|at| now.duration_since(at) < AT_MOST_EVERY);
        if (asked || self.discovery.found.len() > before) && !lately {
            self.say_now(now);
        }
    }

    /// The interface has another index.
    pub(super) fn rediscover(&mut self) {
        for socket in self.discovery.sockets() {
            self.poll.remove(socket);
        }
        (self.discovery.socket, self.discovery.group) = (None, None);
        self.discovery.open(&self.config);
        self.watch_discovery();
        self.say_now(Instant::now());
    }

    /// Hears what comes.
    pub(super) fn watch_discovery(&self) {
        for socket in self.discovery.sockets() {
            if let Err(error) = self.poll.add(socket, Source::Discovery, EventFlags::IN) {
                tracing::error!(%error, "discovery cannot be watched");
            }
        }
    }

    /// `portolan map`.
    pub(super) fn map(&mut self) -> Value {
        let now = Instant::now();
        let config = &self.config;
        let (mut nodes, conflicts) = self.discovery.table.document(now);
        let heard: Vec<u64> = nodes
            .iter()
            .filter_map(|node| node["node"].as_u64())
            .collect();
        for route in self.routes.values() {
            let own = route.node == config.node;
            if !own && heard.contains(&u64::from(route.node)) {
                continue;
            }
            let learned = if self.discovery.found.contains_key(&route.node) {
                "announced"
            } else {
                "table"
            };
            nodes.push(json!({
                "node": route.node,
                "name": route.name,
                "state": if own { "self" } else { "silent" },
                "usable": true,
                "learned": if own { "self" } else { learned },
                "address": route.address,
                "mac": route.mac.map(|mac| super::format_mac(&mac)),
                "mtu": own.then(|| self.interface.mtu()),
                "queues": own.then(|| config.engines()),
            }));
        }
        nodes.sort_by_key(|node| node["node"].as_u64());
        json!({
            "discovery": self.discovery.mode.name(),
            "failure": self.discovery.failure,
            "cluster": config.cluster,
            "node": config.node,
            "nodes": nodes,
            "conflicts": conflicts,
            "announced": self.discovery.rounds,
            "unread": self.discovery.unread.0,
            "too_old": self.discovery.unread.1,
        })
    }
}

impl Discovery {
    /// Speaks to those that `said` knows and we do not: they hear of us, and say who they are.
    fn meet(&mut self, said: &Announcement, now: Instant, config: &Config, own: &Announcement) {
        let (DiscoveryMode::Seeds(_), Some(socket)) = (&self.mode, &self.socket) else {
            return;
        };
        if said.cluster != own.cluster {
            return;
        }
        let known = self.table.addresses(now, 0, usize::MAX);
        let others = said.known.iter().chain(&said.address);
        let new =
            others.filter(|address| !known.contains(address) && Some(**address) != config.address);
        let greeting = Announcement {
            ask: true,
            ..own.clone()
        }
        .write();
        for address in new {
            // Heard of again with the next announcement.
            let _ = socket.send_to(&greeting, (*address, port(config)));
        }
    }
}
