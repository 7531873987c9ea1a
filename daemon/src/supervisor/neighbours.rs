//! Which MAC a peer has, for peers whose MAC is not configured: the kernel's neighbour table knows, if it is asked to.
//!
//! The kernel resolves neighbours that it sends to, and forgets those that nobody confirms; AF_XDP traffic does neither. So every
//! entry we need is *used* by hand (`NTF_USE`: as if a packet went there), whenever it is missing or stale, and every change of the
//! table is followed. A peer behind a router has the router's MAC.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::Supervisor;
use super::config::{Config, DiscoveryMode};
use super::netlink::{Neighbour, NeighbourWatch, Netlink};
use super::poll::Timer;
use crate::engine_link::{Encap, Route};

/// Something is unresolved: look again.
const SOON: Duration = Duration::from_secs(1);
/// All is well: look again all the same.
const LATER: Duration = Duration::from_secs(5);
/// Something changed for the worse: look again, but not at every change.
const AT_ONCE: Duration = Duration::from_millis(100);
/// Routes are looked up again.
const ROUTES_EVERY: Duration = Duration::from_secs(10);
/// Packets of changes taken in before others get a turn.
const PACKETS_PER_TURN: usize = 64;

/// A peer to be resolved.
#[derive(Debug)]
struct Unresolved {
    node: u16,
    address: IpAddr,
    /// Whose MAC it is.
    next_hop: Option<IpAddr>,
}

/// The part of the neighbour table that matters to us.
pub struct Neighbours {
    ifindex: u32,
    netlink: Netlink,
    watch: NeighbourWatch,
    peers: Vec<Unresolved>,
    table: HashMap<IpAddr, Neighbour>,
    routes_at: Option<Instant>,
    look_at: Option<Instant>,
}

impl Neighbours {
    /// For the peers of this configuration; `None` if there is nothing to resolve.
    ///
    /// # Errors
    /// The system's.
    pub fn new(config: &Config) -> io::Result<Option<Self>> {
        let peers: Vec<Unresolved> = config
            .peers
            .iter()
            .filter(|peer| config.encap == Encap::Udp && peer.mac.is_none())
            .filter_map(|peer| {
                Some(Unresolved {
                    node: peer.id,
                    address: peer.address?,
                    next_hop: None,
                })
            })
            .collect();
        if peers.is_empty() && !matches!(config.discovery, DiscoveryMode::Seeds(_)) {
            return Ok(None);
        }
        // Changes first, then the table: nothing is missed in between.
        let watch = NeighbourWatch::new()?;
        let mut neighbours = Self {
            ifindex: config.interface_facts.index,
            netlink: Netlink::new()?,
            watch,
            peers,
            table: HashMap::new(),
            routes_at: None,
            look_at: None,
        };
        neighbours.read_table()?;
        Ok(Some(neighbours))
    }

    /// Resolves one more, or one that is elsewhere now.
    fn follow(&mut self, node: u16, address: IpAddr) {
        self.peers.retain(|peer| peer.node != node);
        self.peers.push(Unresolved {
            node,
            address,
            next_hop: None,
        });
        self.routes_at = None;
        self.look_at = None;
    }

    /// The interface has another index: what was known is of no use.
    pub fn moved(&mut self, ifindex: u32) -> io::Result<()> {
        self.ifindex = ifindex;
        self.routes_at = None;
        self.look_at = None;
        self.read_table()
    }

    /// Readable when the table changed.
    pub fn watch(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    fn read_table(&mut self) -> io::Result<()> {
        self.table.clear();
        for neighbour in self.netlink.neighbours()? {
            self.note(neighbour);
        }
        Ok(())
    }

    /// Only our interface's, and only valid ones: the table stays as small as the kernel's.
    fn note(&mut self, neighbour: Neighbour) {
        if neighbour.ifindex != self.ifindex {
            return;
        }
        if neighbour.mac.is_some() {
            self.table.insert(neighbour.address, neighbour);
        } else {
            self.table.remove(&neighbour.address);
        }
    }

    fn take_changes(&mut self) {
        for _ in 0..PACKETS_PER_TURN {
            match self.watch.changes() {
                Ok(None) => return,
                Ok(Some(changes)) => changes.into_iter().for_each(|change| self.note(change)),
                Err(error) => {
                    // Changes were lost (ENOBUFS): read it all again.
                    tracing::debug!(%error, "neighbour table read again");
                    if let Err(error) = self.read_table() {
                        tracing::warn!(%error, "the neighbour table cannot be read");
                        return;
                    }
                }
            }
        }
    }

    fn look_up_routes(&mut self, now: Instant) {
        if self.routes_at.is_some_and(|at| at > now) {
            return;
        }
        self.routes_at = Some(now + ROUTES_EVERY);
        for peer in &mut self.peers {
            let found = self.netlink.route(peer.address, self.ifindex);
            let next_hop = match found {
                Ok(hop) => Some(hop.unwrap_or(peer.address)),
                Err(error) => {
                    tracing::debug!(node = peer.node, %error, "no route");
                    None
                }
            };
            if next_hop != peer.next_hop {
                match next_hop {
                    Some(hop) => tracing::debug!(node = peer.node, %hop, "next hop"),
                    None => {
                        tracing::warn!(node = peer.node, address = %peer.address, "no route to this peer over our interface")
                    }
                }
                peer.next_hop = next_hop;
            }
        }
    }

    /// Is an entry missing or stale?
    fn need_attention(&self) -> bool {
        let hops = self.peers.iter().filter_map(|peer| peer.next_hop);
        let mut entries = hops.map(|hop| self.table.get(&hop));
        entries.any(|entry| entry.is_none_or(|entry| entry.stale))
    }

    /// Has the kernel resolve or confirm what needs it. True if all are resolved.
    fn use_entries(&mut self) -> bool {
        let mut all = true;
        for peer in &self.peers {
            let Some(hop) = peer.next_hop else {
                all = false;
                continue;
            };
            let entry = self.table.get(&hop);
            all &= entry.is_some();
            if entry.is_none_or(|entry| entry.stale)
                && let Err(error) = self.netlink.use_neighbour(self.ifindex, hop)
            {
                tracing::debug!(node = peer.node, %error, "neighbour cannot be resolved");
            }
        }
        all
    }

    /// Each peer's MAC as of now.
    fn macs(&self) -> Vec<(u16, Option<[u8; 6]>)> {
        let mac = |hop: IpAddr| self.table.get(&hop).and_then(|entry| entry.mac);
        let peers = self.peers.iter();
        peers
            .map(|peer| (peer.node, peer.next_hop.and_then(mac)))
            .collect()
    }
}

impl Supervisor {
    /// The kernel's table changed.
    pub(super) fn on_neighbours(&mut self) {
        let Some(neighbours) = &mut self.neighbours else {
            return;
        };
        neighbours.take_changes();
        let soon = Instant::now() + AT_ONCE;
        if neighbours.need_attention() && neighbours.look_at.is_none_or(|at| at > soon) {
            neighbours.look_at = Some(soon);
            self.poll.set_timer(soon, Timer::Neighbours);
        }
        self.publish_macs();
    }

    /// A peer was found whose MAC the kernel is to look up.
    pub(super) fn follow_neighbour(&mut self, route: &Route) {
        if let (Some(neighbours), Some(address)) = (&mut self.neighbours, route.address) {
            neighbours.follow(route.node, address);
            self.poll.set_timer(Instant::now(), Timer::Neighbours);
        }
    }

    /// From time to time.
    pub(super) fn look_after_neighbours(&mut self, now: Instant) {
        let Some(neighbours) = &mut self.neighbours else {
            return;
        };
        if neighbours.look_at.is_some_and(|at| at > now) {
            return;
        }
        neighbours.look_up_routes(now);
        let all = neighbours.use_entries();
        let again = now + if all { LATER } else { SOON };
        neighbours.look_at = Some(again);
        self.poll.set_timer(again, Timer::Neighbours);
        self.publish_macs();
    }

    /// Tells engines of MACs that changed. One that is lost for the moment is kept: an entry that fails may come back, and a peer
    /// that is really gone is found out by the transport.
    fn publish_macs(&mut self) {
        let Some(neighbours) = &self.neighbours else {
            return;
        };
        let changed: Vec<Route> = neighbours
            .macs()
            .into_iter()
            .filter_map(|(node, mac)| {
                let route = self.routes.get(&node)?;
                let new = mac.is_some() && mac != route.mac;
                new.then(|| Route {
                    mac,
                    ..route.clone()
                })
            })
            .collect();
        for route in changed {
            self.publish_route(route);
        }
    }
}
